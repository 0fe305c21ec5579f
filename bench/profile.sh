#!/bin/sh
# profile.sh - profiles two steps of a training.
#
# usage: bench/profile.sh HOST_GIB DEV_GIB SEQLEN MODEL_DIR [OPTIONS of penstock train]
#
# Into $OUT (default: profile) it writes
#   timeline.json      when each op ran, and the memory of both arenas: opens in Perfetto
#   timeline.png       the same as a picture
#   profile.nsys-rep   a report of Nsight Systems, where nsys is installed and there is a GPU
# MODEL_DIR needs config.json alone, as weights are drawn; token shards are those of --data, or of
# MODEL_DIR/data. STEPS=A:B are the steps (default 4:5), BUILD what make built (default: build),
# PYTHON an interpreter with matplotlib (default: that of $BUILD/venv, else python3).
set -eu

if [ $# -lt 4 ]; then
  sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
build=${BUILD:-$root/build}
out=${OUT:-profile}
steps=${STEPS:-4:5}
python=${PYTHON:-$build/venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
if ! expr "$steps" : '[0-9]\{1,9\}:[0-9]\{1,9\}$' >/dev/null ||
  [ "${steps%:*}" -lt 1 ] || [ "${steps%:*}" -gt "${steps#*:}" ]; then
  echo "profile.sh: STEPS is '$steps': give the first and the last step as A:B, such as 4:5" >&2
  exit 2
fi

nsys=
if [ -z "$(command -v nsys)" ]; then
  echo "profile.sh: nsys is not installed, so there is no report of Nsight Systems" >&2
elif ! nvidia-smi -L >/dev/null 2>&1; then
  echo "profile.sh: there is no NVIDIA GPU, so there is no report of Nsight Systems" >&2
else
  nsys="nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi"
  nsys="$nsys --capture-range-end=stop --force-overwrite=true --output=$out/profile"
fi

mkdir -p "$out"
rm -f "$out/metrics.jsonl" # of the profile before
# shellcheck disable=SC2086 # words of a command
$nsys "$build/bin/penstock" demo "$@" --init-weights --run-dir "$out" \
  --steps "${steps#*:}" --profile-steps "$steps"
PENSTOCK_BUILD=$build PYTHONPATH=$root/python "$python" -m penstock.trace \
  "$out/timeline.json" --png "$out/timeline.png"
for file in timeline.json timeline.png profile.nsys-rep; do
  [ ! -f "$out/$file" ] || echo "$out/$file"
done
