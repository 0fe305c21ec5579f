#!/bin/sh
# Builds test_cuda_attention by itself, without the rest of the project (for machines that have little but nvcc and cuDNN), and runs it.
#   usage: cuda_attention.sh OUT_DIR FRONTEND_INCLUDE [ARCH]    run in the repository's root; FRONTEND_INCLUDE: the folder include of the wheel nvidia-cudnn-frontend
# cuDNN's headers and library are those of the wheel nvidia-cudnn-cu13 (or cu12) in python3's environment, or CUDNN_ROOT's.
set -eu
out=$1 frontend=$2 arch=${3:-90}
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")
cudnn=${CUDNN_ROOT:-$(python3 -c 'import nvidia.cudnn as c; print(list(c.__path__)[0])')}
nvrtc=$(for d in "$cuda/include" "$cudnn"/../*/include "$frontend"; do [ -f "$d/nvrtc.h" ] && echo "$d" && break; done)
inc="-Iinclude -Inative -isystem $frontend -isystem $cudnn/include -isystem ${nvrtc:?no nvrtc.h} -isystem $cuda/include"
c="gcc -std=gnu11 -O2 -g -ffp-contract=off -pthread -Wall -Wextra -Wno-unused-parameter -D_GNU_SOURCE -DPS_CUDA=1 -DPS_CUDNN=1 $inc"
mkdir -p "$out"
rm -f "$out"/*.o
g++ -std=c++17 -O1 -Wall -Wextra -D_GNU_SOURCE -DPS_CUDNN=1 $inc -c native/kernels/cuda/attention_cudnn.cpp -o "$out/attention_cudnn.o" &
compiling=$!
for f in attention scratch; do
  "$cuda/bin/nvcc" -std=c++17 -O3 -lineinfo -Iinclude -arch=sm_$arch -DPS_CUDNN=1 -Xcompiler -Wall -c native/kernels/cuda/$f.cu -o "$out/cuda_$f.o"
done
for f in native/core/memory native/core/pool native/core/status native/core/thread native/core/machine native/kernels/cpu/attention native/kernels/cpu/attention_base \
         native/kernels/cpu/attention_avx2 native/kernels/cpu/attention_avx512 native/kernels/cpu/convert native/kernels/cpu/scratch tests/native/test_cuda_attention; do
  $c -c $f.c -o "$out/$(echo $f | tr / _).o"
done
wait $compiling
# The tables of scratch sizes name the other kernels, which nobody calls here: anything stands in for them.
nm "$out"/*.o | awk '$1 == "U" {u[$2]} NF == 3 {d[$3]} END {for (s in u) if (!(s in d) && s ~ /ps_/) print "char " s "[64];"}' > "$out/others.c"
gcc -c "$out/others.c" -o "$out/others.o"
g++ -pthread -o "$out/test_cuda_attention" "$out"/*.o -L"$cuda/lib64" -lcudart_static -lrt -lm -ldl
LD_LIBRARY_PATH="$cudnn/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$out/test_cuda_attention"
LD_LIBRARY_PATH="$cudnn/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$out/test_cuda_attention" time
