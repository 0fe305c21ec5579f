/* cross_entropy.cu - loss and gradient of the logits, in place. */
#include "cuda_common.cuh"

enum { THREADS = 1024 };

/* exp(d), d <= 0. bf16 gradients keep 8 bits: a rounded product and ex2.approx are within 2^-22 + |d| 2^-23, under 3e-6 where the
 * term is above 1e-9 of the largest. fp32 takes expf. */
template <typename T> __device__ __forceinline__ float exp_of(float d);
template <> __device__ __forceinline__ float exp_of<__nv_bfloat16>(float d) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(d * 1.4426950408889634f));
  return e;
}
template <> __device__ __forceinline__ float exp_of<float>(float d) { return expf(d); }

/* (max, sum of exp(z - max)) of two parts; a part that is empty or all -inf has max -inf and sum 0. */
template <typename T> __device__ __forceinline__ void merge(float &m, float &s, float m2, float s2) {
  const float top = fmaxf(m, m2);
  s = (m == top ? s : s * exp_of<T>(m - top)) + (m2 == top ? s2 : s2 * exp_of<T>(m2 - top));
  m = top;
}

/* A block a row: one pass for max and sum, which scales its sum whenever the maximum grows; one that reads again (from L2: 132 rows
 * of 256 KB are 34 MB) and writes the gradient. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS) cross_entropy_k(T *logits, const int32_t *target, const float *scale, float *loss, uint32_t vocab) {
  __shared__ float shared_m[32], shared_s[32];
  T *z = logits + (size_t)blockIdx.x * vocab;
  const int32_t t = target[blockIdx.x];
  if (t < 0 || (uint32_t)t >= vocab) {
    const float zero[V] = {};
    for (uint32_t i = threadIdx.x * V; i < vocab; i += THREADS * V) ps_store<T, V>(z + i, zero);
    if (threadIdx.x == 0) loss[blockIdx.x] = t == -1 ? 0.0f : __int_as_float(0x7fc00000);
    return;
  }
  const float zt = ps_to_f32(z[t]);
  float m = -INFINITY, s = 0.0f, v[V];
#pragma unroll 2
  for (uint32_t i = threadIdx.x * V; i < vocab; i += THREADS * V) {
    ps_read<T, V>(v, z + i);
    float top = v[0];
#pragma unroll
    for (int k = 1; k < V; k++) top = fmaxf(top, v[k]);
    if (top > m) {
      s *= exp_of<T>(m - top); /* the first time 0 * exp(-inf) */
      m = top;
    }
#pragma unroll
    for (int k = 0; k < V; k++) s += v[k] == m ? 1.0f : exp_of<T>(v[k] - m);
  }
#pragma unroll
  for (int w = 16; w > 0; w /= 2) merge<T>(m, s, __shfl_xor_sync(0xffffffffu, m, w), __shfl_xor_sync(0xffffffffu, s, w));
  if (threadIdx.x % 32 == 0) {
    shared_m[threadIdx.x / 32] = m;
    shared_s[threadIdx.x / 32] = s;
  }
  __syncthreads();
  m = shared_m[threadIdx.x % 32];
  s = shared_s[threadIdx.x % 32];
#pragma unroll
  for (int w = 16; w > 0; w /= 2) merge<T>(m, s, __shfl_xor_sync(0xffffffffu, m, w), __shfl_xor_sync(0xffffffffu, s, w));
  if (threadIdx.x == 0) loss[blockIdx.x] = (float)(log((double)s) + ((double)m - (double)zt));
  const float inv = *scale / s;
#pragma unroll 2
  for (uint32_t i = threadIdx.x * V; i < vocab; i += THREADS * V) {
    ps_read<T, V>(v, z + i);
#pragma unroll
    for (int k = 0; k < V; k++) {
      const float e = exp_of<T>(v[k] - m);
      v[k] = (i + k == (uint32_t)t ? e - s : e) * inv; /* at the target -(s - e)/s: nothing cancels but what the sum has */
    }
    ps_store<T, V>(z + i, v);
  }
}

/* cross_entropy
 * math    loss[r] = log(sum_v exp(z[r,v] - max)) + max - z[r,t]; z[r,v] becomes (softmax(z[r])[v] - [v = t]) * scale;
 *         target -1: loss 0, gradient 0; any other target out of range: loss NaN, gradient 0. fp32 inside, the loss put together in fp64
 * shapes  z [rows,V] of dt, in place; target i32 [rows]; scale f32 [1] = 1 / valid tokens of the step; loss f32 [rows]
 * bytes   2*rows*V*sizeof(dt) of HBM where the second read is from L2, else 3; 1024 x 128256 bf16 -> 525 MB, 109 us at 4.8 TB/s
 * determinism  bitwise: a row is one block's, a thread's elements in order, then fixed trees.
 * reference    the cpu backend's: loss within 4e-6 of 1 + |loss|; gradient 1 ulp of bf16, fp32 within 4e-6 of scale */
extern "C" ps_status ps__cuda_cross_entropy(const ps_launch *l) {
  const ps__args_cross_entropy *a = (const ps__args_cross_entropy *)l->args;
  const ps_status st = ps_check(l, "cross_entropy", 4, a->dt, 0);
  if (st != PS_OK || !a->rows || !a->vocab) return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->vocab) && ps_aligned(l->ptr[0]);
  PS_DISPATCH(a->dt, whole, cross_entropy_k<T, V><<<a->rows, THREADS, 0, stream>>>((T *)l->ptr[0], (const int32_t *)l->ptr[1],
                                                                                  (const float *)l->ptr[2], (float *)l->ptr[3], a->vocab));
  return ps_launched("cross_entropy", cudaSuccess);
}
