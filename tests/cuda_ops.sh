#!/bin/sh
# Builds the CUDA ops with the CPU ops beside them and runs tests/cuda/test_cuda_ops.c, nothing else of the project needed.
#   sh tests/cuda_ops.sh [time [seed]]      from anywhere
# BUILD (default build/cuda_ops), NVCC, CC; CUDA_ARCH (default 90), CUBLAS: a folder with include/ and lib/ where the toolkit has no cuBLAS;
# BUILD_ONLY=1 stops after the link.
set -e
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build/cuda_ops} NVCC=${NVCC:-nvcc} CC=${CC:-cc} CUDA_ARCH=${CUDA_ARCH:-90}
cuda=$(cd "$(dirname "$(readlink -f "$(command -v "$NVCC")")")/.." && pwd)
[ -f "$cuda/include/cuda_runtime_api.h" ] || cuda=$($NVCC -v --dryrun -x cu /dev/null -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
inc="" lib=-lcublasLt
[ -z "$CUBLAS" ] || { inc="-I$CUBLAS/include"; so=$(basename "$(ls "$CUBLAS"/lib/libcublasLt.so* | head -n 1)"); lib="-L$CUBLAS/lib -Xlinker -rpath=$CUBLAS/lib -l:$so"; }
rm -rf "$BUILD" && mkdir -p "$BUILD"
jobs=""
for f in native/kernels/cuda/*.cu; do
  $NVCC -std=c++17 -O3 -lineinfo -Iinclude -Inative $inc -Xcompiler -Wall,-Wextra,-Wno-unused-parameter,-fPIC \
    -gencode "arch=compute_$CUDA_ARCH,code=sm_$CUDA_ARCH" -c "$f" -o "$BUILD/$(basename "$f").o" & jobs="$jobs $!"
done
flags="-std=gnu11 -O2 -ffp-contract=off -fno-math-errno -pthread -Wall -Wextra -Wno-unused-parameter -D_GNU_SOURCE -Itests/cuda -Iinclude -Inative -I$cuda/include"
for f in native/core/*.c native/kernels/cpu/*.c tests/cuda/*.c; do
  $CC $flags -c "$f" -o "$BUILD/$(basename "$f").o" & jobs="$jobs $!"
done
for j in $jobs; do wait "$j"; done
$NVCC -o "$BUILD/test_cuda_ops" "$BUILD"/*.o -Xcompiler -pthread $lib -lm -ldl
[ -z "$BUILD_ONLY" ] || exit 0
"$BUILD/test_cuda_ops" "$@"
