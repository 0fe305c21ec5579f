/* dequantize.cu - a frozen base from blocks to what products read. */
#include "core/blocks.h"
#include "kernels/cuda/cuda_common.cuh"

/* A thread has 8 elements of a block. They begin at a multiple of 4 bytes of e4m3, of 2 of nf4, and
 * anywhere of e2m1, because a block's scale follows its elements. */
enum { EACH = 8, THREADS = 256, MOST_BLOCKS = 1 << 16 };

struct of_fp8 {
  static __device__ __forceinline__ void load(const uint8_t *blocks, uint64_t at, const float *,
                                              float *x) {
    const uint8_t *block = blocks + at / 64 * 68;
    const uint32_t *q = (const uint32_t *)(block + at % 64);
    const float s = *(const float *)(block + 64);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      x[i] = ps__e4m3_value(q[i / 4] >> 8 * (i % 4) & 255) * s;
  }
};

struct of_nf4 {
  static __device__ __forceinline__ void load(const uint8_t *blocks, uint64_t at,
                                              const float *value, float *x) {
    const uint8_t *block = blocks + at / 64 * 34;
    const uint16_t *q = (const uint16_t *)(block + at % 64 / 2);
    const float s = __uint_as_float((uint32_t)*(const uint16_t *)(block + 32) << 16);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      x[i] = value[q[i / 4] >> 4 * (i % 4) & 15] * s;
  }
};

struct of_mxfp4 {
  static __device__ __forceinline__ void load(const uint8_t *blocks, uint64_t at, const float *,
                                              float *x) {
    const uint8_t *block = blocks + at / 32 * 17, *q = block + at % 32 / 2;
    const float s = ps__e8m0_value(block[16]);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      x[i] = ps__e2m1_value(q[i / 2] >> 4 * (i % 2) & 15) * s;
  }
};

template <typename F, typename T>
__global__ void __launch_bounds__(THREADS) dequantize_k(T *w, const uint8_t *blocks, uint64_t n) {
  const float nf4[16] = PS__NF4_VALUES;
  __shared__ float value[16];
  if (threadIdx.x < 16)
    value[threadIdx.x] = nf4[threadIdx.x];
  __syncthreads();
  for (uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * EACH; at < n;
       at += (uint64_t)gridDim.x * THREADS * EACH) {
    float x[EACH];
    F::load(blocks, at, value, x);
#pragma unroll
    for (int i = 0; i < EACH; i += ps_full<T>) {
      float part[ps_full<T>];
#pragma unroll
      for (int k = 0; k < ps_full<T>; k++)
        part[k] = x[i + k];
      ps_store<T, ps_full<T>>(w + at + i, part);
    }
  }
}

/* dequantize
 * math    w[i] = q[i] * scale of its block, in fp32, rounded once
 * shapes  blocks of n elements (core/blocks.h), w [n], n a multiple of 64; no aliasing
 * bytes   of the blocks, and n*sizeof(dt). A block of Llama 70B, 855 million weights of nf4 to
 *         bf16: 2.2 GB, 0.45 ms at an H200's 4.8 TB/s; not measured
 * determinism  bitwise: elementwise
 * reference    the cpu backend's, the same bits */
extern "C" ps_status ps__cuda_dequantize(const ps_launch *l) {
  const ps__args_dequantize *a = (const ps__args_dequantize *)l->args;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const uint64_t blocks = (a->n + THREADS * EACH - 1) / (THREADS * EACH);
  const uint32_t grid = blocks < MOST_BLOCKS ? (uint32_t)blocks : MOST_BLOCKS;
  const uint8_t *from = (const uint8_t *)l->ptr[0];
  if (!ps_aligned(l->ptr[0]) || !ps_aligned(l->ptr[1]))
    return ps__fail(PS_EINVAL, "dequantize: an address is no multiple of 16 bytes");
  if (!a->n)
    return PS_OK;
  if (a->base == PS_BASE_FP8)
    PS_BY_TYPE(a->dt,
               dequantize_k<of_fp8, T><<<grid, THREADS, 0, stream>>>((T *)l->ptr[1], from, a->n));
  else if (a->base == PS_BASE_NF4)
    PS_BY_TYPE(a->dt,
               dequantize_k<of_nf4, T><<<grid, THREADS, 0, stream>>>((T *)l->ptr[1], from, a->n));
  else
    PS_BY_TYPE(a->dt,
               dequantize_k<of_mxfp4, T><<<grid, THREADS, 0, stream>>>((T *)l->ptr[1], from, a->n));
  return ps_launched("dequantize", cudaGetLastError());
}
