#!/bin/sh
# bootstrap.sh VENV REQUIREMENTS [PYTHON] - make the virtual environment VENV and install REQUIREMENTS into it.
# Called by the Makefile. REQUIREMENTS lists every package with its hashes: pip looks for no other. Leaves VENV/.done-<name of REQUIREMENTS> behind, so that it runs once for each list of pins.
# Where Debian's python3 comes without the venv module, it is installed when this runs as root; otherwise the exact
# command is printed and nothing is changed.
set -eu
venv=$1 requirements=$2 python=${3:-python3}

say() { printf 'bootstrap: %s\n' "$*" >&2; }
command -v "$python" >/dev/null 2>&1 || { say "$python not found. Debian/Ubuntu: sudo apt-get install -y python3 python3-venv"; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { say "$("$python" -V) is too old: Python 3.10 or newer is needed (make PYTHON=python3.12)"; exit 2; }

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"; flock 9 # make -j asks for several lists at once

if ! [ -x "$venv/bin/pip" ]; then
  if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    pkg=$("$python" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
      say "installing $pkg (this Python has no ensurepip)"
      apt-get update -qq && apt-get install -y -qq "$pkg" >/dev/null
    else
      say "this Python has no venv module. Run: sudo apt-get install -y $pkg"; exit 2
    fi
  fi
  say "making the virtual environment $venv"
  "$python" -m venv "$venv"
fi
quiet=--quiet
case $requirements in
*requirements-cuda1*|*requirements-cudnn*) # the large ones show pip's progress
  say "fetching NVIDIA's libraries for CUDA, up to 2.1 GB in all: make CUDA=0 builds for the CPU without them, CUDNN=0 without cuDNN"
  quiet= ;;
esac
say "installing the pinned packages of $requirements (once)"
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r "$requirements" || {
  say "pip could not install $requirements; its message is above. Check the network, then run make again."; exit 2; }
touch "$venv/.done-$(basename "$requirements")"
