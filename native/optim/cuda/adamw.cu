/* adamw.cu - AdamW on CUDA: the arithmetic of adamw_scalar.c in the same order, one vector of
 * elements a thread. Contract: cuda_adamw.h.
 *
 * __fmul_rn and its like are never contracted to FMA, divide and root are the exact ones, and
 * denormals are kept (no -ftz). The scalars arrive rounded by the same function that the host
 * variants use. */
#include "optim/adamw_impl.h"
#include "optim/cuda_adamw.h"
#include "kernels/cuda/cuda_common.cuh"

enum { THREADS = 256, MAX_SEGMENTS = 16, MAX_SUMSQ = 32 };

/* What a recipe stores, and how many elements a thread takes: 16 bytes of weights. */
template <int RECIPE> struct types {
  using state = float;
  using grad = __nv_bfloat16;
  static constexpr int wide = 4;
};
template <> struct types<PS_RECIPE_FP32> {
  using state = float;
  using grad = float;
  static constexpr int wide = 4;
};
template <> struct types<PS_RECIPE_BF16> {
  using state = __nv_bfloat16;
  using grad = __nv_bfloat16;
  static constexpr int wide = 8;
};

struct segment {
  uint64_t first, n;
  float lr_decay;
  uint32_t first_block, whole; /* whole: vectors are aligned, and whole groups of the generator */
};
struct job {
  void *w, *m, *v;
  uint16_t *w_bf16;
  const void *grad;
  ps__adamw_k k; /* lr_decay: of the segment instead; element: of the unit's first */
  ps__cuda_gate gate;
  uint32_t n_segments;
  segment seg[MAX_SEGMENTS];
};

__device__ __forceinline__ bool is_open(const ps__cuda_gate &gate) {
  const uint32_t lane = threadIdx.x % 32;
  bool good = *gate.step == gate.expected;
  if (gate.sumsq && lane < gate.n_sumsq)
    good = good && isfinite(gate.sumsq[lane]);
  return __all_sync(0xffffffffu, good);
}

__device__ __forceinline__ float canonical(float x) {
  return x != x ? __uint_as_float(PS__QUIET_NAN) : x;
}

__device__ __forceinline__ void step(const ps__adamw_k &k, float lr_decay, float scale, float grad,
                                     float &w, float &m, float &v) {
  const float g = __fmul_rn(grad, scale);
  const float m1 = __fadd_rn(__fmul_rn(k.beta1, m), __fmul_rn(k.beta1_rest, g));
  const float v1 = __fadd_rn(__fmul_rn(k.beta2, v), __fmul_rn(k.beta2_rest, __fmul_rn(g, g)));
  const float d = __fdiv_rn(__fmul_rn(m1, k.c1), __fadd_rn(__fsqrt_rn(__fmul_rn(v1, k.c2)), k.eps));
  w = canonical(__fsub_rn(__fsub_rn(w, __fmul_rn(lr_decay, w)), __fmul_rn(k.lr, d)));
  m = canonical(m1);
  v = canonical(v1);
}

/* p[i] = the upper half of x[i]. */
template <int V> __device__ __forceinline__ void store_upper(void *p, const uint32_t (&x)[V]) {
  if constexpr (V == 1) {
    *(uint16_t *)p = (uint16_t)(x[0] >> 16);
  } else {
    ps_vec<uint32_t, V / 2> out;
#pragma unroll
    for (int i = 0; i < V / 2; i++)
      out.e[i] = __byte_perm(x[2 * i], x[2 * i + 1], 0x7632);
    ps_put<uint32_t, V / 2>((uint32_t *)p, out);
  }
}

/* bf16 state: rounded with the bits of array @a (0 w, 1 m, 2 v); V elements of whole groups, or
 * one anywhere. */
template <int V>
__device__ __forceinline__ void store_state(__nv_bfloat16 *p, const float (&x)[V], uint64_t key,
                                            uint64_t element, int a) {
  uint32_t out[V];
  uint64_t word = 0;
#pragma unroll
  for (int i = 0; i < V; i++) {
    const uint32_t at = V == 1 ? (uint32_t)element % 4 : i % 4;
    if (V == 1 || i % 4 == 0) {
      uint64_t words[3];
      ps__sr_words(words, key, element + i);
      word = words[a];
    }
    out[i] = __float_as_uint(x[i]) + ((uint32_t)(word >> (16 * at)) & 0xffffu);
  }
  store_upper<V>(p, out);
}
template <int V>
__device__ __forceinline__ void store_state(float *p, const float (&x)[V], uint64_t, uint64_t,
                                            int) {
  ps_store<float, V>(p, x);
}

/* To nearest even; what overflows becomes infinite, and the one NaN keeps its upper half. */
template <int V> __device__ __forceinline__ void store_copy(uint16_t *p, const float (&w)[V]) {
  uint32_t out[V];
#pragma unroll
  for (int i = 0; i < V; i++)
    out[i] = __float_as_uint(w[i]) + 0x7fffu + (__float_as_uint(w[i]) >> 16 & 1u);
  store_upper<V>(p, out);
}

/* Elements [at, at + V) of the unit. */
template <int RECIPE, int V>
__device__ __forceinline__ void update(const job &j, float lr_decay, uint64_t at) {
  using S = typename types<RECIPE>::state;
  using G = typename types<RECIPE>::grad;
  float w[V], m[V], v[V], g[V];
  ps_read<S, V>(w, (const S *)j.w + at);
  ps_read<S, V>(m, (const S *)j.m + at);
  ps_read<S, V>(v, (const S *)j.v + at);
  ps_read<G, V>(g, (const G *)j.grad + at);
  const float scale = j.gate.scale ? *j.gate.scale : j.k.grad_scale;
#pragma unroll
  for (int i = 0; i < V; i++)
    step(j.k, lr_decay, scale, g[i], w[i], m[i], v[i]);
  store_state<V>((S *)j.w + at, w, j.k.sr_key, j.k.element + at, 0);
  store_state<V>((S *)j.m + at, m, j.k.sr_key, j.k.element + at, 1);
  store_state<V>((S *)j.v + at, v, j.k.sr_key, j.k.element + at, 2);
  if constexpr (RECIPE == PS_RECIPE_FP32_MASTER)
    store_copy<V>(j.w_bf16 + at, w);
}

/* A block takes THREADS * V elements of one segment. */
template <int RECIPE>
__global__ void __launch_bounds__(THREADS, 4) adamw_k(const __grid_constant__ job j) {
  constexpr int V = types<RECIPE>::wide;
  if (!is_open(j.gate))
    return;
  uint32_t idx = 0;
  while (idx + 1 < j.n_segments && blockIdx.x >= j.seg[idx + 1].first_block)
    idx++;
  const segment &s = j.seg[idx];
  const uint64_t begin = (uint64_t)(blockIdx.x - s.first_block) * THREADS * V,
                 i = begin + threadIdx.x * V;
  if (s.whole && i + V <= s.n) {
    update<RECIPE, V>(j, s.lr_decay, s.first + i);
  } else if (s.whole) {
    for (uint64_t e = i; e < s.n; e++)
      update<RECIPE, 1>(j, s.lr_decay, s.first + e);
  } else {
    for (int e = 0; e < V; e++) {
      const uint64_t one = begin + e * THREADS + threadIdx.x;
      if (one < s.n)
        update<RECIPE, 1>(j, s.lr_decay, s.first + one);
    }
  }
}

/* ---- launch ---------------------------------------------------------------------------------- */

static bool aligned(const void *p, size_t to) { return (uintptr_t)p % to == 0; }

/* Segments from @segments on, as many as fit, with their blocks; returns how many were taken. */
template <int RECIPE>
static uint32_t take(job *j, uint32_t *n_blocks, const ps__adamw_segment *segments, uint32_t n,
                     const ps__adamw_scalars *s) {
  constexpr int V = types<RECIPE>::wide;
  constexpr size_t state = sizeof(typename types<RECIPE>::state),
                   grad = sizeof(typename types<RECIPE>::grad);
  uint32_t i = 0, k = 0;
  *n_blocks = 0;
  for (; i < n && k < MAX_SEGMENTS; i++) {
    const uint64_t first = segments[i].first;
    if (!segments[i].n)
      continue;
    const char *const arrays[3] = {(const char *)j->w + first * state,
                                   (const char *)j->m + first * state,
                                   (const char *)j->v + first * state};
    bool whole =
        (j->k.element + first) % 4 == 0 && aligned((const char *)j->grad + first * grad, V * grad);
    if (j->w_bf16)
      whole = whole && aligned(j->w_bf16 + first, 2 * V);
    for (int a = 0; a < 3; a++)
      whole = whole && aligned(arrays[a], V * state);
    j->seg[k++] = {first, segments[i].n, ps__adamw_constants(s, segments[i].decay, 0).lr_decay,
                   *n_blocks, whole};
    *n_blocks += ps_ceil_div(segments[i].n, THREADS * V);
  }
  j->n_segments = k;
  return i;
}

template <int RECIPE>
static cudaError_t launch(job *j, const ps__adamw_segment *segments, uint32_t n,
                          const ps__adamw_scalars *s, cudaStream_t stream) {
  while (n) {
    uint32_t n_blocks;
    const uint32_t taken = take<RECIPE>(j, &n_blocks, segments, n, s);
    if (n_blocks)
      adamw_k<RECIPE><<<n_blocks, THREADS, 0, stream>>>(*j);
    segments += taken, n -= taken;
  }
  return cudaGetLastError();
}

/* adamw
 * math    optim.h; nothing at all where the gate is closed
 * shapes  w, m, v [n] fp32, grad [n] fp32 (fp32) or bf16 and w_bf16 [n] (fp32-master), or all
 *         [n] bf16
 * bytes   fp32 and fp32-master 28 n, bf16 14 n of HBM; 218 M elements (an 8B layer) bf16 -> 3.05
 *         GB, 636 us at 4.8 TB/s; some 75
 *         instructions an element, a third of them the generator's, take 500 us beside it.
 *         Measured on an H200, of copy bandwidth: fp32
 *         100%, 1436 us; fp32-master 98%, 1466 us; bf16 84%, 854 us
 * determinism  bitwise: elementwise.   reference  ps__adamw_unit on the host, the same bits */
extern "C" ps_status ps__cuda_adamw_unit(const ps__cuda_exec *exec, ps_recipe recipe,
                                         const ps__adamw_segment *segments, uint32_t n_segments,
                                         void *w, uint16_t *w_bf16, const void *grad, void *m,
                                         void *v, uint64_t unit_element0,
                                         const ps__adamw_scalars *s, const ps__cuda_gate *gate) {
  const size_t state = recipe == PS_RECIPE_BF16 ? 2 : 4,
               grad_bytes = recipe == PS_RECIPE_FP32 ? 4 : 2;
  const bool master = recipe == PS_RECIPE_FP32_MASTER;
  if ((uint32_t)recipe >= PS_N_RECIPES)
    return ps__fail(PS_EINVAL, "adamw: recipe %u is unknown", (unsigned)recipe);
  if (!w || !m || !v || !grad || (master && !w_bf16) || !aligned(w, state) || !aligned(m, state) ||
      !aligned(v, state) || !aligned(grad, grad_bytes) || (master && !aligned(w_bf16, 2)))
    return ps__fail(PS_EINVAL, "adamw: an address is missing or not aligned to its elements");
  if (!gate->step || (gate->sumsq && gate->n_sumsq > MAX_SUMSQ))
    return ps__fail(PS_EINVAL, "adamw: the gate has no step, or %u sums of squares, at most %d",
                    gate->n_sumsq, MAX_SUMSQ);
  job j = {};
  j.w = w, j.m = m, j.v = v, j.grad = grad, j.w_bf16 = master ? w_bf16 : NULL;
  j.k = ps__adamw_constants(s, 0.0f, unit_element0);
  j.gate = *gate;
  cudaError_t e;
  if (recipe == PS_RECIPE_FP32)
    e = launch<PS_RECIPE_FP32>(&j, segments, n_segments, s, exec->stream);
  else if (master)
    e = launch<PS_RECIPE_FP32_MASTER>(&j, segments, n_segments, s, exec->stream);
  else
    e = launch<PS_RECIPE_BF16>(&j, segments, n_segments, s, exec->stream);
  return ps_launched("adamw", e);
}
