/* glu.cu - the gated activation of the feed-forward layer (Shazeer 2020, arXiv 2002.05202),
 * forward and backward. */
#include "kernels/cuda/cuda_common.cuh"

enum { THREADS = 256 };

/* 1 / (1 + exp(-x)); exp to 1 ulp or so, the quotient to 2: inf in the denominator gives 0. */
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
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

template <typename T, int V, bool GELU>
__global__ void __launch_bounds__(THREADS)
    glu_fwd_k(const T *gu, T *s, uint32_t n_tokens, uint32_t f) {
  const uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * V;
  if (i >= f)
    return;
  for (uint32_t t = blockIdx.y; t < n_tokens; t += gridDim.y) {
    const T *row = gu + (size_t)t * 2 * f + i;
    float g[V], u[V];
    ps_read<T, V>(g, row);
    ps_read<T, V>(u, row + f);
#pragma unroll
    for (int k = 0; k < V; k++)
      g[k] = g[k] * sig<T>(inner<GELU>(g[k])) * u[k];
    ps_store<T, V>(s + (size_t)t * f + i, g);
  }
}

template <typename T, int V, bool GELU>
__global__ void __launch_bounds__(THREADS) glu_bwd_k(T *ds, T *gu, uint32_t n_tokens, uint32_t f) {
  const uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * V;
  if (i >= f)
    return;
  for (uint32_t t = blockIdx.y; t < n_tokens; t += gridDim.y) {
    T *row = gu + (size_t)t * 2 * f + i, *at = ds + (size_t)t * f + i;
    float d[V], g[V], u[V], out[V];
    ps_read<T, V>(d, at);
    ps_read<T, V>(g, row);
    ps_read<T, V>(u, row + f);
#pragma unroll
    for (int k = 0; k < V; k++) {
      const float x = g[k], s = sig<T>(inner<GELU>(x));
      out[k] = x * s * u[k];
      g[k] = d[k] * u[k] * s * (1.0f + slope<GELU>(x) * (1.0f - s));
      u[k] = d[k] * (x * s);
    }
    ps_store<T, V>(at, out);
    ps_store<T, V>(row, g);
    ps_store<T, V>(row + f, u);
  }
}

static dim3 grid_of(uint32_t n_tokens, uint32_t ffn, uint32_t v) {
  return dim3(ps_ceil_div(ffn, (uint64_t)THREADS * v), n_tokens < 65535 ? n_tokens : 65535);
}

/* glu_fwd
 * math    s = act(g)*u; g = gu[:, :F], u = gu[:, F:]; act(g) = g * sig, sig = 1/(1 + exp(-k)), with
 *         k = g for silu, k = 2 sqrt(2/pi) (g + 0.044715 g^3) for gelu_tanh; fp32 inside, one
 *         rounding at the store
 * shapes  gu [T,2F], s [T,F] of dt, no aliasing
 * bytes   3*T*F*sizeof(dt) of HBM; 8192 x 14336 bf16 -> 705 MB, 147 us at 4.8 TB/s
 * determinism  bitwise: elementwise.   reference  the cpu backend's, 1 ulp of bf16; fp32 8 ulp */
extern "C" ps_status ps__cuda_glu_fwd(const ps_launch *l) {
  const ps__args_glu *a = (const ps__args_glu *)l->args;
  ps_status st = ps__check_glu(a, "glu_fwd");
  if (st == PS_OK)
    st = ps_check(l, "glu_fwd", 2, a->dt, 0);
  if (st != PS_OK || !a->n_tokens || !a->ffn_dim)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->ffn_dim) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[1]);
  PS_DISPATCH(a->dt, whole,
              const auto kernel = a->activation == PS_ACTIVATION_SILU ? glu_fwd_k<T, V, false>
                                                                      : glu_fwd_k<T, V, true>;
              kernel<<<grid_of(a->n_tokens, a->ffn_dim, V), THREADS, 0, stream>>>(
                  (const T *)l->ptr[0], (T *)l->ptr[1], a->n_tokens, a->ffn_dim));
  return ps_launched("glu_fwd", cudaSuccess);
}

/* glu_bwd
 * math    dg = ds * u * sig * (1 + g*k'*(1 - sig)); du = ds * g * sig; both over gu, in place; s =
 *         g*sig*u, which the gradient of down's weights needs, over ds: as glu_fwd's
 * shapes  ds [T,F], gu [T,2F] of dt
 * bytes   6*T*F*sizeof(dt) of HBM; 8192 x 14336 bf16 -> 1.41 GB, 294 us at 4.8 TB/s (by itself s
 *         would be 705 MB)
 * determinism  bitwise: elementwise.   reference  the cpu backend's, 1 ulp of bf16 and what
 *              cancels in 1 + g*(1 - sig) */
extern "C" ps_status ps__cuda_glu_bwd(const ps_launch *l) {
  const ps__args_glu *a = (const ps__args_glu *)l->args;
  ps_status st = ps__check_glu(a, "glu_bwd");
  if (st == PS_OK)
    st = ps_check(l, "glu_bwd", 2, a->dt, 0);
  if (st != PS_OK || !a->n_tokens || !a->ffn_dim)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->ffn_dim) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[1]);
  PS_DISPATCH(a->dt, whole,
              const auto kernel = a->activation == PS_ACTIVATION_SILU ? glu_bwd_k<T, V, false>
                                                                      : glu_bwd_k<T, V, true>;
              kernel<<<grid_of(a->n_tokens, a->ffn_dim, V), THREADS, 0, stream>>>(
                  (T *)l->ptr[0], (T *)l->ptr[1], a->n_tokens, a->ffn_dim));
  return ps_launched("glu_bwd", cudaSuccess);
}
