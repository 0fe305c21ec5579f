#!/bin/sh
# install.sh PREFIX DESTDIR WHEEL PYTHON REQUIREMENTS... - what `make install` does once the wheel
# is made. Writes below $DESTDIR$PREFIX:
#   bin/penstock      the command: all of it, as its package runs the program of the library
#   lib/penstock      a Python environment of its own, made from PYTHON, with the packages of
#                     REQUIREMENTS and WHEEL; native leads to the library and the program
#   include/penstock  the headers
#   lib/pkgconfig/penstock.pc  flags for programs in C
# install.sh --remove PREFIX DESTDIR - takes these four away.
# Nothing installed names DESTDIR, so that packages may be made of it.
set -eu
remove=
if [ "$1" = --remove ]; then remove=1; shift; fi
prefix=${1%/} to=${2%/}${1%/}
case $prefix in
/*) ;;
*) printf 'install: PREFIX="%s" is no whole path: give one such as "$HOME/.local"\n' "$prefix" >&2
  exit 2 ;;
esac
own=$to/lib/penstock
if [ -e "$own" ] && ! [ -e "$own/pyvenv.cfg" ]; then
  printf 'install: %s is not what make install writes: move it away, or give another PREFIX\n' \
    "$own" >&2
  exit 2
fi
rm -rf "$own" "$own.lock" "$to/include/penstock"
rm -f "$to/bin/penstock" "$to/lib/pkgconfig/penstock.pc"
[ -z "$remove" ] || exit 0

wheel=$3 python=$4
shift 4
for list; do "$(dirname "$0")/bootstrap.sh" "$own" "$list" "$python"; done
rm -f "$own.lock"
"$own/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index "$wheel"
# Written for the place where the environment is now, which the command below does not need.
rm -f "$own/bin/penstock"
package=$("$own/bin/python" -I -c '
import importlib.util
print(importlib.util.find_spec("penstock").submodule_search_locations[0])')
ln -s "${package#"$own/"}/_native" "$own/native"

mkdir -p "$to/bin" "$to/include/penstock" "$to/lib/pkgconfig"
cp include/penstock/*.h "$to/include/penstock"
cat >"$to/bin/penstock" <<END
#!/bin/sh
exec "$prefix/lib/penstock/bin/python" -I -m penstock "\$@"
END
chmod 755 "$to/bin/penstock"
cat >"$to/lib/pkgconfig/penstock.pc" <<END
prefix=$prefix
Name: penstock
Description: trains transformers in far too little device memory, by streaming
Version: $("$own/native/penstock" version | cut -d' ' -f2)
Cflags: -I"\${prefix}/include"
Libs: -L"\${prefix}/lib/penstock/native" -lpenstock -Wl,-rpath,"\${prefix}/lib/penstock/native"
END
printf 'installed: %s\n' "$prefix/bin/penstock"
case :$PATH: in
*:"$prefix/bin":*) ;;
*) printf '%s is not on PATH: add  export PATH="%s:$PATH"  to your ~/.profile\n' \
  "$prefix/bin" "$prefix/bin" ;;
esac
