#!/bin/sh
# run.sh [native] [steps] [sanitizers] - the tests that need a GPU, on an H200 in some fifteen minutes;
# without words all three parts. Nothing else may use the GPU, because some check times and memory.
# A line for each test with its time, and of one that failed the end of its log. Exit code 0: all
# passed; 77: there is no usable GPU, and why; else 1.
#
# Nothing is built or fetched, so that a build folder can be carried to a machine with a GPU:
#   PENSTOCK_BUILD  the folder, with bin, lib and tests (default: build)       PYTHON  the interpreter (default: python3)
#   PYTHONPATH      where its packages are, if not its own: pytest, torch (numpy comes with it), safetensors, cffi and pycparser
#   RUN_LOGS        keep the logs in this folder
set -u
cd "$(dirname "$0")/../.."
build=${PENSTOCK_BUILD:-build} python=${PYTHON:-python3} parts=${*:-native steps sanitizers} failed=0
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
logs=${RUN_LOGS:-$work/logs}; mkdir -p "$logs"
export XDG_CACHE_HOME="$work/cache" PENSTOCK_BUILD="$build" PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"

wanted() { case " $parts " in *" $1 "*) return 0 ;; esac; return 1; }

# run NAME SECONDS COMMAND...: its result goes to $logs/NAME.result, what it said to NAME.log.
run() {
  name=$1 limit=$2; shift 2
  began=$(date +%s)
  timeout "$limit" "$@" >"$logs/$name.log" 2>&1
  code=$?
  echo "$code $(($(date +%s) - began))" >"$logs/$name.result"
}

# tell NAME: the line of a test that ran, with the last line that it said.
tell() {
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
if ! "$build/bin/penstock" profile --backend cuda --quick --seconds 2 >"$logs/profile.log" 2>&1; then
  echo "skipped: $(tail -1 "$logs/profile.log")"
  exit 77
fi
echo "GPU   $(head -1 "$logs/profile.log")"

if wanted native; then
  for program in "$build"/tests/test_cuda_*; do
    name=$(basename "$program") arguments=
    case $name in
      test_cuda_engine) arguments=300 ;; # random programs instead of 2000
      test_cuda_peers) arguments=60 ;;
      test_cuda_optim | test_cuda_updates | test_cuda_places) arguments=short ;;
    esac
    run "$name" 240 "$program" $arguments
    tell "$name"
  done
fi

if wanted steps; then # alone on the GPU: some hold what the driver reports against the plan
  run steps 600 "$python" -m pytest -q -s -p no:cacheprovider -m "gpu and not long" tests/gpu tests/test_cuda_bad_input.py
  tell steps
fi

# A short training, streamed: two layers, two steps, next to the least device memory. What a sanitizer itself takes of the GPU's memory
# counts as the process's, so the plan is told that libraries take that much more.
if wanted sanitizers; then
  mkdir "$work/model"
  cat >"$work/model/config.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
 "rope_theta": 1e4, "tie_word_embeddings": false, "initializer_range": 0.02}
JSON
  "$python" - "$work" <<'PY'
import glob, json, struct, sys
work = sys.argv[1]
tokens = [(7 * i + i // 13) % 500 for i in range(4000)]
open(work + "/data.bin", "wb").write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack("<4000H", *tokens))
for path in glob.glob(work + "/cache/penstock/hardware-*.json"):
    rates = json.load(open(path))
    rates["device_overhead_bytes"] += 16 << 30
    json.dump(rates, open(path, "w"))
PY
  train() { # TOOL...: the training under a tool
    dir=$1; shift
    set -- "$@" "$build/bin/penstock" train --backend cuda --model "$work/model" --init-weights --data "$work/data.bin" --seq-len 128 --tokens-per-step 512 \
      --chunk-tokens 64 --chunks-per-round 4 --steps 2 --quiet --run-dir "$work/$dir" --device-mem
    least=$("$build/bin/penstock" plan --backend cuda --model "$work/model" --seq-len 128 --tokens-per-step 512 --chunk-tokens 64 --chunks-per-round 4 \
      --device-mem 1MiB 2>&1 | sed -n 's/.*smallest plan takes \([0-9]*\) bytes.*/\1/p')
    run "$dir" 90 "$@" "${least:-0}"
  }
  # What is reported inside NVIDIA's libraries' kernels (cuDNN's attention has reports of initcheck) is counted and is no failure of ours.
  libraries='cudnn|cublas|cutlass|nvjet|xmma' skip=
  if compute-sanitizer --help 2>&1 | grep -q -e '--kernel-name-exclude'; then skip="--kernel-name-exclude regex=$libraries"; fi
  sanitized() { # NAME: as tell, where reports in libraries' kernels alone are no failure
    read -r code seconds <"$logs/$1.result"
    places=$(grep -cE '^=========  +(at|Address|and (Read|Write) access at) |access at ' "$logs/$1.log")
    ours=$(grep -E '^=========  +at |access at ' "$logs/$1.log" | grep -cvE "$libraries")
    if [ "$code" = 9 ] && [ "$ours" = 0 ] && [ "$places" != 0 ] && ! grep -q 'not printed' "$logs/$1.log"; then # nothing is behind the print limit
      echo "0 $seconds" >"$logs/$1.result"
      echo "no report in a kernel of ours; $places lines on libraries' kernels" >>"$logs/$1.log"
    fi
    tell "$1"
  }
  train bare # what is tuned once a shape is cached for those that follow
  tell bare
  for tool in memcheck initcheck; do
    train "$tool" compute-sanitizer --tool "$tool" $skip --error-exitcode 9 --print-limit 2000 &
  done
  # Training does not run under racecheck on Hopper (CUDA 13.0): with cuBLAS's products checked the step stands, and with them left alone they fault. So it takes our kernels,
  # one by one: what it looks for, hazards in a block's shared memory, lies within kernels.
  run racecheck_ops 120 compute-sanitizer --tool racecheck --error-exitcode 9 "$build/tests/test_cuda_ops" short &
  run racecheck_optim 120 compute-sanitizer --tool racecheck --error-exitcode 9 "$build/tests/test_cuda_optim" short &
  run racecheck_attention 120 compute-sanitizer --tool racecheck --error-exitcode 9 "$build/tests/test_cuda_attention" short &
  wait
  for tool in memcheck initcheck racecheck_ops racecheck_optim racecheck_attention; do
    sanitized "$tool"
  done
fi
echo "all   $(($(date +%s) - started)) s, $([ "$failed" = 0 ] && echo passed || echo FAILED)"
exit "$failed"
