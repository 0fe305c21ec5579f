#!/bin/sh
# sanitize.sh - the native tests and a short training under ThreadSanitizer, then under
# AddressSanitizer + UBSan; fuzz targets and the Python package under the latter.
# Called by `make test-sanitize` with VENV, VENV_TEST and BUILD set; builds into $BUILD/tsan and
# $BUILD/asan. With SANITIZE=all, as `make test-long` calls it, nothing that is slow is left out. The
# two sanitizers run at the same time, each in a shell of its own. A finding ends its shell with the
# sanitizer's report, and both with exit code 1.
set -eu
cd "$(dirname "$0")/.."
build=${BUILD:-build} venv=${VENV:-$build/venv}; venv_test=${VENV_TEST:-$venv-test}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
export XDG_CACHE_HOME="$work/cache" OMP_NUM_THREADS=1
export TSAN_OPTIONS="halt_on_error=1 exitcode=66"
export UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1" ASAN_OPTIONS="detect_leaks=1"

"$venv/bin/python" models/init_model.py models/tiny-llama.json "$work/model" --seed 1 >/dev/null
"$venv/bin/python" - "$work/data.bin" <<'PY'
import struct, sys
tokens = [(7 * i + i // 13) % 500 for i in range(4000)]
header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
open(sys.argv[1], "wb").write(header + struct.pack("<4000H", *tokens))
PY

# This machine's rates, which the trainings would measure: under a sanitizer that takes minutes, and
# test_hardware does it with ASan.
if [ -x "$build/bin/penstock" ]; then
  "$build/bin/penstock" profile --backend cpu --quick >/dev/null 2>&1 || true
fi

# CUDA's sources are no sanitizer's; `make test` compiles them. Where no GPU is, tests that need
# them would skip.
cuda=0
[ -e /dev/nvidiactl ] && cuda=auto

# PROGRAM NAME LOG. Random programs: each is slow here. So are searches for plans and measurements of
# the machine. What runs on one thread is no matter of ThreadSanitizer.
one_program='
program=$(basename "$0") arguments=
case ${SANITIZE:-}-$1-$program in
  *-test_engine_hazards) arguments=500 ;;
  all-*) ;;
  *-asan-test_caps) arguments=bounds ;;
  *-test_hardware | *-tsan-test_optim) arguments=threads ;;
  *-tsan-test_plan | *-tsan-test_replan | *-tsan-test_switch) arguments=threads ;;
  *-test_plan | *-test_replan | *-test_switch | *-test_generate) arguments=few ;;
esac
echo "== $1: $program $arguments"
"$0" $arguments >"$2.$program" 2>&1 || { cat "$2.$program"; echo "sanitize: $0 failed"; exit 255; }
'

# NAME: the test programs that are run. Those of GPUs would skip where none is. ThreadSanitizer has no
# use for those with one thread.
one_thread="caps cost draw fp8_tile gemm_cache grid many_tensors model timeline"
programs() {
  for source in tests/native/test_*.c; do
    program=$(basename "$source" .c)
    [ "$1" = tsan ] && [ "${SANITIZE:-}" != all ] &&
      case " $one_thread " in *" ${program#test_} "*) continue ;; esac
    case $1-$cuda-$program in
      *-0-test_cuda_* | tsan-*-test_caps) ;;
      *) printf '%s\n' "$build/$1/tests/$program" ;;
    esac
  done
}

# The libraries are what test_hosts_net opens. Reports name functions and lines, for which -g1 is
# enough: -g takes twice the time.
check() { # NAME SAN TARGETS
  name=$1 out=$build/$1 log=$work/$1.log
  echo "== $name: build"
  make -s VENV="$venv" BUILD="$out" SAN="$2" CUDA=$cuda CUDNN=0 CFLAGS="-O1 -g1" all $3 \
    $(programs "$name") "$out/tests/libfake_nccl.so" "$out/tests/libdisk_shim.so"
  # a sanitizer's dlopen does not look where our library's own would
  LD_LIBRARY_PATH="$(cd "$out/lib" && pwd)"
  export LD_LIBRARY_PATH
  # ThreadSanitizer's take longer than all that the other one runs: two of them at a time.
  at_once=1
  [ "$1" = tsan ] && at_once=2
  programs "$name" |
    xargs -P $at_once -I{} sh -c "$one_program" {} "$name" "$log" || exit 1
  capped="--device-mem 4MiB --chunk-tokens 64 --chunks-per-round 2"
  for case in "fp32" "fp32-master $capped" "bf16 $capped"; do
    echo "== $name: training, $case"
    "$out/bin/penstock" train --model "$work/model" --data "$work/data.bin" --seq-len 64 \
      --tokens-per-step 256 --steps 3 --recipe $case --run-dir "$work/$name-run" \
      --out "$work/$name-out" --force --quiet >"$log" 2>&1 || {
        cat "$log"; echo "sanitize: training failed"; exit 1; }
  done
  for layout in data-parallel ring; do
    echo "== $name: training on three devices, $layout"
    "$out/bin/penstock" train --model "$work/model" --data "$work/data.bin" --backend cpu \
      --gpus 3 --layout $layout --seq-len 64 --chunk-tokens 64 --chunks-per-round 1 \
      --tokens-per-step 256 --steps 3 --recipe bf16 --run-dir "$work/$name-run" \
      --out "$work/$name-out" --force --quiet >"$log" 2>&1 || {
        cat "$log"; echo "sanitize: training on three devices failed"; exit 1; }
  done
  hosts
}

# Two tasks over TCP: the threads of their exchange and of their control connections.
hosts() {
  echo "== $name: training of two tasks"
  port=$("$venv/bin/python" -c '
import socket
s = socket.socket()
s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])')
  for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
      "$out/bin/penstock" train --model "$work/model" --data "$work/data.bin" --backend cpu \
      --seq-len 64 --chunk-tokens 64 --chunks-per-round 1 --tokens-per-step 256 --steps 3 \
      --recipe bf16 --hosts-wait 120 --run-dir "$work/$name-hosts" --quiet \
      >"$log.$rank" 2>&1 & eval "task$rank=\$!"
  done
  for rank in 0 1; do
    eval "wait \$task$rank" || { cat "$log".?; echo "sanitize: task $rank failed"; exit 1; }
  done
}

# Loaders and planner with broken input; FUZZ_SECONDS and FUZZ_SEED for more than a look.
fuzz() {
  "$venv/bin/python" tests/fuzz/corpus.py "$work/corpus"
  for program in "$build"/asan/fuzz/fuzz_*; do
    name=$(basename "$program")
    echo "== asan: $name"
    "$program" "$work/corpus/${name#fuzz_}" "${FUZZ_SECONDS:-1}" "${FUZZ_SEED:-1}" \
      >"$log" 2>&1 || {
      cat "$log"; echo "sanitize: $name failed; its input is in fuzz-crash or fuzz-slow"; exit 1; }
    tail -1 "$log"
  done
}

# The Python package: its examples, and its misuse. The interpreter itself leaks, which is not our
# finding.
python_with_asan() {
  echo "== asan: $*"
  LD_PRELOAD="$(${CC:-cc} -print-file-name=libasan.so)" \
    ASAN_OPTIONS=detect_leaks=0:handle_segv=0 LD_LIBRARY_PATH="$(realpath "$build/asan/lib")" \
    PYTHONMALLOC=malloc PENSTOCK_BUILD="$build/asan" PYTHONPATH=python \
    "$venv_test/bin/python" "$@" >"$log" 2>&1 || {
      cat "$log"; echo "sanitize: $* failed"; exit 1; }
}

(
  check tsan thread ""
) &
tsan=$!
(
  check asan address,undefined,float-cast-overflow fuzz-programs
  fuzz
  python_with_asan python/examples/dataflow.py
  python_with_asan python/examples/train_model.py "$work/model" "$work/data.bin" "$work/saved"
  python_with_asan -m pytest -q tests/test_python_misuse.py
) &
asan=$! failed=0
wait "$tsan" || failed=1
wait "$asan" || failed=1
[ "$failed" = 0 ] && echo "sanitize: no findings"
exit "$failed"
