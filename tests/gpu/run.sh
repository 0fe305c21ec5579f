#!/bin/sh
# run.sh [native] [steps] [sanitizers] - the tests that need a GPU; without words all three parts.
#
# What checks bits and errors runs side by side on the first GPU. What measures memory or time runs
# alone: on the second GPU at the same time, or after the others on a machine with a single GPU.
# Tests of several GPUs come then, on all of them, and the sanitizers last. Nothing else may use the
# GPUs. From the times of its parts, all takes some 15 minutes on one H200 and 10 on two.
#
# A line for each test with its time, and of one that failed the end of its log. Exit code 0: all
# passed; 77: there is no usable GPU, and why; else 1.
#
# Nothing is built or fetched, so that a build folder can be carried to a machine with a GPU:
#   PENSTOCK_BUILD  the folder, with bin, lib and tests (default: build)
#   PYTHON          the interpreter (default: python3)
#   PYTHONPATH      where its packages are, if not its own: pytest, torch (numpy comes with it),
#                   safetensors, cffi and pycparser; with pytest-xdist families run four at a time
#   RUN_LOGS        keep the logs in this folder
set -u
cd "$(dirname "$0")/../.."
build=${PENSTOCK_BUILD:-build} python=${PYTHON:-python3} failed=0
parts=${*:-native steps sanitizers}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
logs=${RUN_LOGS:-$work/logs}
mkdir -p "$logs"
export XDG_CACHE_HOME="$work/cache" PENSTOCK_BUILD="$build"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"

wanted() { case " $parts " in *" $1 "*) return 0 ;; esac; return 1; }

# run NAME SECONDS COMMAND...: its result goes to $logs/NAME.result, what it said to NAME.log.
run() {
  name=$1 limit=$2
  shift 2
  began=$(date +%s)
  timeout "$limit" "$@" >"$logs/$name.log" 2>&1
  code=$?
  echo "$code $(($(date +%s) - began))" >"$logs/$name.result"
}

# tell NAME: the line of a test that ran, with the last line that it said.
tell() {
  [ -e "$logs/$1.result" ] || return 0
  read -r code seconds <"$logs/$1.result"
  last=$(grep -v '^ *$' "$logs/$1.log" | tail -1 | cut -c1-150)
  if [ "$code" = 0 ]; then
    echo "ok    $1  $seconds s  $last"
  else
    failed=1
    echo "FAIL  $1  $seconds s  exit code $code$([ "$code" = 124 ] && echo ', out of time')"
    tail -40 "$logs/$1.log" | sed 's/^/      /'
  fi
}

# Rates are measured once; and this is where a machine without a GPU says so.
started=$(date +%s)
if ! "$build/bin/penstock" profile --backend cuda --quick --seconds 2 >"$logs/profile.log" 2>&1
then
  echo "skipped: $(tail -1 "$logs/profile.log")"
  exit 77
fi
echo "GPU   $(head -1 "$logs/profile.log")"
gpus=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null |
  paste -sd,)}
first=${gpus%%,*}
rest=${gpus#"$first"}
second=${rest#,}
second=${second%%,*}

# ---- native programs and whole steps -------------------------------------------------------------

# native PROGRAM [ARGUMENT]
native() {
  program=$1
  shift
  wanted native && run "$program" 300 "$build/tests/$program" "$@"
}
# steps NAME SECONDS FILE...: tests of whole steps
steps() {
  wanted steps || return 0
  name=$1 limit=$2
  shift 2
  run "$name" "$limit" "$python" -m pytest -q -s -p no:cacheprovider -m "gpu and not long" "$@"
}
four= # at a time
"$python" -c 'import xdist' 2>/dev/null && four="-n 4"

beside() {
  { native test_cuda_ops; } &
  { native test_cuda_attention; } &
  {
    native test_cuda_optim short
    native test_cuda_generate
    native test_cuda_updates short
    native test_cuda_places short
  } &
  { steps families 400 $four tests/gpu/test_families_steps.py; } &
  {
    steps halves 120 tests/gpu/test_gpu_halves.py tests/gpu/test_gpu_totals.py
    steps fp8 240 tests/gpu/test_fp8_steps.py
  } &
  { steps generate 300 tests/gpu/test_gpu_generate.py tests/gpu/test_gpu_checkpoint.py; } &
  { steps bad_input 120 tests/test_cuda_bad_input.py; } &
  wait
}
alone() {
  native test_cuda_engine 300 # random programs instead of 2000
  steps memory 300 tests/gpu/test_gpu_memory.py
  steps steps 600 tests/gpu/test_steps.py
}
together() { # all GPUs, or on one those that share it
  native test_cuda_peers 60
  native test_cuda_hosts
  steps several 300 tests/gpu/test_gpu_several.py
  steps hosts 300 tests/gpu/test_gpu_hosts.py
}
if wanted native || wanted steps; then
  if [ -n "$second" ]; then
    (export CUDA_VISIBLE_DEVICES="$first"; beside) &
    (export CUDA_VISIBLE_DEVICES="$second"; alone) &
    wait
  else
    beside
    alone
  fi
  together
  for name in ops attention optim generate updates places engine peers hosts; do
    tell "test_cuda_$name"
  done
  for name in families halves fp8 generate bad_input memory steps several hosts; do
    tell "$name"
  done
fi

# ---- sanitizers ----------------------------------------------------------------------------------

# A short training, streamed: two layers, two steps, next to the least device memory. What a
# sanitizer itself takes of the GPU's memory counts as the process's, so the plan is told that
# libraries take that much more.
if wanted sanitizers; then
  mkdir "$work/model"
  cat >"$work/model/config.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
 "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 512,
 "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": false, "initializer_range": 0.02}
JSON
  "$python" - "$work" <<'PY'
import glob, json, struct, sys
work = sys.argv[1]
tokens = [(7 * i + i // 13) % 500 for i in range(4000)]
header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
open(work + "/data.bin", "wb").write(header + struct.pack("<4000H", *tokens))
for path in glob.glob(work + "/cache/penstock/hardware-*.json"):
    rates = json.load(open(path))
    rates["device_overhead_bytes"] += 16 << 30
    json.dump(rates, open(path, "w"))
PY
  cut="--seq-len 128 --tokens-per-step 512 --chunk-tokens 64 --chunks-per-round 4"
  train() { # TOOL...: the training under a tool
    dir=$1
    shift
    least=$("$build/bin/penstock" plan --backend cuda --model "$work/model" $cut \
      --device-mem 1MiB 2>&1 | sed -n 's/.*smallest plan takes \([0-9]*\) bytes.*/\1/p')
    run "$dir" 90 "$@" "$build/bin/penstock" train --backend cuda --model "$work/model" \
      --init-weights --data "$work/data.bin" $cut --steps 2 --quiet --run-dir "$work/$dir" \
      --device-mem "${least:-0}"
  }
  # What is reported inside NVIDIA's libraries' kernels (cuDNN's attention has reports of initcheck)
  # is counted and is no failure of ours.
  libraries='cudnn|cublas|cutlass|nvjet|xmma' skip=
  if compute-sanitizer --help 2>&1 | grep -q -e '--kernel-name-exclude'; then
    skip="--kernel-name-exclude regex=$libraries"
  fi
  sanitized() { # NAME: as tell, where reports in libraries' kernels alone are no failure
    read -r code seconds <"$logs/$1.result"
    log=$logs/$1.log
    at='^=========  +(at|Address|and (Read|Write) access at) |access at '
    places=$(grep -cE "$at" "$log")
    ours=$(grep -E '^=========  +at |access at ' "$log" | grep -cvE "$libraries")
    # nothing may be behind the print limit
    if [ "$code" = 9 ] && [ "$ours" = 0 ] && [ "$places" != 0 ] && ! grep -q 'not printed' "$log"
    then
      echo "0 $seconds" >"$logs/$1.result"
      echo "no report in a kernel of ours; $places lines on libraries' kernels" >>"$log"
    fi
    tell "$1"
  }
  train bare # what is tuned once a shape is cached for those that follow
  tell bare
  for tool in memcheck initcheck; do
    train "$tool" compute-sanitizer --tool "$tool" $skip --error-exitcode 9 --print-limit 2000 &
  done
  # Training does not run under racecheck on Hopper (CUDA 13.0): with cuBLAS's products checked the
  # step stands, and with them left alone they fault. So it takes our kernels, one by one: what it
  # looks for, hazards in a block's shared memory, lies within kernels.
  for name in ops optim attention; do
    run "racecheck_$name" 200 compute-sanitizer --tool racecheck --error-exitcode 9 \
      "$build/tests/test_cuda_$name" short &
  done
  wait
  for tool in memcheck initcheck racecheck_ops racecheck_optim racecheck_attention; do
    sanitized "$tool"
  done
fi
echo "all   $(($(date +%s) - started)) s, $([ "$failed" = 0 ] && echo passed || echo FAILED)"
exit "$failed"
