/* glu.cuh - the sigmoid, and an element of a gated activation and of its gradient. */
#ifndef PS_KERNELS_CUDA_GLU_CUH
#define PS_KERNELS_CUDA_GLU_CUH
#include "kernels/cuda/cuda_common.cuh"

/* 1 / (1 + exp(-x)); exp to 2 ulp or so, the quotient to 1. Denormal numbers are flushed: what is
 * that near to 0 or 1 is 0 or 1, and inf in the denominator gives 0. */
__device__ __forceinline__ float sigmoid(float x) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  return s;
}
__device__ __forceinline__ float sigmoid_exact(float x) { return 1.0f / (1.0f + expf(-x)); }
template <typename T> __device__ __forceinline__ float sig(float x);
/* bf16 results keep 8 bits: exp2 of a rounded product is within 1e-5 for |x| < 88, 400 times
 * finer than their half ulp; for x < -87 the exact value is under 1e-37 and __fdividef's 0
 * stands for it. */
template <> __device__ __forceinline__ float sig<__nv_bfloat16>(float x) { return sigmoid(x); }
template <> __device__ __forceinline__ float sig<float>(float x) { return sigmoid_exact(x); }

/* Both activations are x * sigmoid(k(x)) (native/kernels/cpu/glu.c): k, and x times its
 * derivative. */
template <bool GELU> __device__ __forceinline__ float inner(float x) {
  return GELU ? (x * x * 0.044715f + 1.0f) * x * 1.5957691216057308f : x;
}
template <bool GELU> __device__ __forceinline__ float slope(float x) {
  return GELU ? (x * x * (3.0f * 0.044715f) + 1.0f) * x * 1.5957691216057308f : x;
}

/* An element of s. */
template <typename T, bool GELU> __device__ __forceinline__ float gated(float g, float u) {
  return g * sig<T>(inner<GELU>(g)) * u;
}
/* An element of s, of dg and of du in the place of d, g and u. */
template <typename T, bool GELU>
__device__ __forceinline__ void gated_back(float &d, float &g, float &u) {
  const float x = g, s = sig<T>(inner<GELU>(x)), out = x * s * u;
  g = d * u * s * (1.0f + slope<GELU>(x) * (1.0f - s));
  u = d * (x * s);
  d = out;
}
#endif
