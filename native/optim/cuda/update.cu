/* update.cu - updates on CUDA: the arithmetic of steps.h, one vector of elements a thread.
 * Contract: cuda_update.h.
 *
 * __fmul_rn and its like are never contracted to FMA, divide and root are the exact ones, and
 * denormals are kept (no -ftz). The constants arrive rounded by the same function that the host
 * variants use. */
#include "optim/cuda_update.h"
#include "optim/update_impl.h"
#include "kernels/cuda/cuda_common.cuh"

#define STEP      __device__ __forceinline__
#define REAL      float
#define STEP_K    ps__update_k
#define ADD(a, b) __fadd_rn(a, b)
#define SUB(a, b) __fsub_rn(a, b)
#define MUL(a, b) __fmul_rn(a, b)
#define DIV(a, b) __fdiv_rn(a, b)
#define SQRT(a)   __fsqrt_rn(a)
#define SIGN(a)   sign_of(a)
__device__ __forceinline__ float sign_of(float x) {
  return x != x || x == 0.0f ? x : copysignf(1.0f, x);
}
#include "optim/steps.h"

enum { THREADS = 256, MAX_SEGMENTS = 16, MAX_SUMSQ = 32 };

template <int DTYPE> struct storage;
template <> struct storage<PS_F32> {
  using type = float;
};
template <> struct storage<PS_BF16> {
  using type = __nv_bfloat16;
};
/* What a recipe stores, and how many elements a thread takes: 16 bytes of weights. */
template <int RECIPE> struct types {
  static constexpr ps__recipe of = ps__recipe_of((ps_recipe)RECIPE);
  static constexpr bool master = of.updated.dtype != of.weights.dtype;
  using state = typename storage<of.updated.dtype>::type;
  using grad = typename storage<of.grad.dtype>::type;
  static constexpr int wide = 16 / sizeof(state);
  static_assert(of.state[0].dtype == of.updated.dtype && of.state[1].dtype == of.updated.dtype,
                "weights and states are read as one type");
  static_assert((of.rounding == PS__STOCHASTIC) == (of.updated.dtype == PS_BF16),
                "store_rounded() rounds bf16 stochastically");
  static_assert(!master || of.weights.dtype == PS_BF16, "store_copy() makes bf16");
};

struct segment {
  uint64_t first, n;
  float decay, lr_decay;
  uint32_t first_block, whole; /* whole: vectors are aligned, and whole groups of the generator */
};
struct job {
  ps__arrays a;
  ps__update_k k; /* decay, lr_decay: of the segment instead; element: of the unit's first */
  ps__update_gate gate;
  uint32_t n_segments;
  segment seg[MAX_SEGMENTS];
};

__device__ __forceinline__ bool is_open(const ps__update_gate &gate) {
  const uint32_t lane = threadIdx.x % 32;
  bool good = !gate.step || *gate.step == gate.expected;
  if (gate.sumsq && lane < gate.n_sumsq)
    good = good && isfinite(gate.sumsq[lane]);
  return __all_sync(0xffffffffu, good);
}

__device__ __forceinline__ float canonical(float x) {
  return x != x ? __uint_as_float(PS__QUIET_NAN) : x;
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

/* bf16: rounded with the bits of array @a (0 the weights, 1 + j state j); V elements of whole
 * groups, or one anywhere. */
template <int V>
__device__ __forceinline__ void store_rounded(__nv_bfloat16 *p, const float (&x)[V], uint64_t key,
                                              uint64_t element, int a) {
  uint32_t out[V];
  uint64_t word = 0;
#pragma unroll
  for (int i = 0; i < V; i++) {
    const uint32_t at = V == 1 ? (uint32_t)element % 4 : i % 4;
    if (V == 1 || i % 4 == 0) {
      uint64_t words[1 + PS_MAX_STATES];
      ps__sr_words(words, key, element + i);
      word = words[a];
    }
    out[i] = __float_as_uint(x[i]) + ((uint32_t)(word >> (16 * at)) & 0xffffu);
  }
  store_upper<V>(p, out);
}
template <int V>
__device__ __forceinline__ void store_rounded(float *p, const float (&x)[V], uint64_t, uint64_t,
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
template <ps_optimizer OPTIMIZER, int RECIPE, int V>
__device__ __forceinline__ void update(const job &j, const segment &of, uint64_t at) {
  using S = typename types<RECIPE>::state;
  using G = typename types<RECIPE>::grad;
  constexpr int N = ps__n_states(OPTIMIZER);
  float w[V], state[N][V], g[V];
  ps_read<S, V>(w, (const S *)j.a.w + at);
#pragma unroll
  for (int a = 0; a < N; a++)
    ps_read<S, V>(state[a], (const S *)j.a.state[a] + at);
  ps_read<G, V>(g, (const G *)j.a.grad + at);
  const float scale = j.gate.scale ? *j.gate.scale : j.k.grad_scale;
  ps__update_k k = j.k;
  k.decay = of.decay;
  k.lr_decay = of.lr_decay;
#pragma unroll
  for (int i = 0; i < V; i++) {
    float s[N];
#pragma unroll
    for (int a = 0; a < N; a++)
      s[a] = state[a][i];
    step(OPTIMIZER, &k, __fmul_rn(g[i], scale), &w[i], s);
    w[i] = canonical(w[i]);
#pragma unroll
    for (int a = 0; a < N; a++)
      state[a][i] = canonical(s[a]);
  }
  store_rounded<V>((S *)j.a.w + at, w, k.sr_key, k.element + at, 0);
#pragma unroll
  for (int a = 0; a < N; a++)
    store_rounded<V>((S *)j.a.state[a] + at, state[a], k.sr_key, k.element + at, 1 + a);
  if constexpr (types<RECIPE>::master)
    store_copy<V>((uint16_t *)j.a.copy + at, w);
}

/* A block takes THREADS * V elements of one segment. */
template <ps_optimizer OPTIMIZER, int RECIPE>
__global__ void __launch_bounds__(THREADS, 4) update_k(const __grid_constant__ job j) {
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
    update<OPTIMIZER, RECIPE, V>(j, s, s.first + i);
  } else if (s.whole) {
    for (uint64_t e = i; e < s.n; e++)
      update<OPTIMIZER, RECIPE, 1>(j, s, s.first + e);
  } else {
    for (int e = 0; e < V; e++) {
      const uint64_t one = begin + e * THREADS + threadIdx.x;
      if (one < s.n)
        update<OPTIMIZER, RECIPE, 1>(j, s, s.first + one);
    }
  }
}

/* ---- launch ---------------------------------------------------------------------------------- */

static bool aligned(const void *p, size_t to) { return (uintptr_t)p % to == 0; }

/* Segments from @segments on, as many as fit, with their blocks; returns how many were taken. */
template <ps_optimizer OPTIMIZER, int RECIPE>
static uint32_t take(job *j, uint32_t *n_blocks, const ps__update *u, const ps__segment *segments,
                     uint32_t n) {
  constexpr int V = types<RECIPE>::wide;
  constexpr size_t state = sizeof(typename types<RECIPE>::state),
                   grad = sizeof(typename types<RECIPE>::grad);
  uint32_t i = 0, k = 0;
  *n_blocks = 0;
  for (; i < n && k < MAX_SEGMENTS; i++) {
    const uint64_t first = segments[i].first;
    if (!segments[i].n)
      continue;
    const ps__arrays from = ps__arrays_from(&j->a, (ps_recipe)RECIPE, first);
    bool whole = (j->k.element + first) % 4 == 0 && aligned(from.grad, V * grad) &&
                 aligned(from.w, V * state) && aligned(from.copy, 2 * V);
    for (uint32_t a = 0; a < ps__n_states(OPTIMIZER); a++)
      whole = whole && aligned(from.state[a], V * state);
    const ps__update_k of = ps__update_constants(u, segments[i].decay, 0);
    j->seg[k++] = {first, segments[i].n, of.decay, of.lr_decay, *n_blocks, whole};
    *n_blocks += ps_ceil_div(segments[i].n, THREADS * V);
  }
  j->n_segments = k;
  return i;
}

template <ps_optimizer OPTIMIZER, int RECIPE>
static cudaError_t launch(job *j, const ps__update *u, const ps__segment *segments, uint32_t n,
                          cudaStream_t stream) {
  while (n) {
    uint32_t n_blocks;
    const uint32_t taken = take<OPTIMIZER, RECIPE>(j, &n_blocks, u, segments, n);
    if (n_blocks)
      update_k<OPTIMIZER, RECIPE><<<n_blocks, THREADS, 0, stream>>>(*j);
    segments += taken, n -= taken;
  }
  return cudaGetLastError();
}

typedef cudaError_t (*launch_fn)(job *j, const ps__update *u, const ps__segment *segments,
                                 uint32_t n, cudaStream_t stream);
#define LAUNCH(RECIPE, NAME) launch<PS_OPTIMIZER_##NAME, PS_RECIPE_##RECIPE>,
/* By optimizer and recipe. */
#define LAUNCHES(NAME, name, n_states, parts, state_op) {PS__EACH_RECIPE(LAUNCH, NAME)},
static const launch_fn launches[PS_N_OPTIMIZERS][PS__N_UPDATE_RECIPES] = {PS__OPTIMIZERS(LAUNCHES)};

/* update
 * math    optim.h; nothing at all where the gate is closed
 * shapes  w, state [n] fp32, grad [n] fp32 (fp32) or bf16 and copy [n] (fp32-master), or all
 *         [n] bf16
 * bytes   ps__update_bytes(). AdamW: 218 M elements (an 8B layer) bf16 -> 3.05 GB, 636 us at 4.8
 *         TB/s; some 75 instructions an element, a third of them the generator's, take 500 us
 *         beside it. Measured on an H200, of copy bandwidth: fp32 100%, 1436 us; fp32-master 98%,
 *         1466 us; bf16 84%, 854 us
 * determinism  bitwise: elementwise.   reference  ps__update_on_pool, the same bits */
extern "C" ps_status ps__cuda_update_unit(void *exec, const ps__update *u,
                                          const ps__segment *segments, uint32_t n_segments,
                                          const ps__arrays *a, uint64_t unit_element0,
                                          const ps__update_gate *gate) {
  if ((uint32_t)u->optimizer >= PS_N_OPTIMIZERS || (uint32_t)u->recipe >= PS__N_UPDATE_RECIPES ||
      u->part != PS_UPDATE_WHOLE)
    return ps__fail(PS_EINVAL, "update: optimizer %u, recipe %u, part %u is not there",
                    (unsigned)u->optimizer, (unsigned)u->recipe, (unsigned)u->part);
  const char *const name = ps__optimizers[u->optimizer].name;
  const size_t state = ps__dtypes[ps__recipes[u->recipe].updated.dtype].bytes,
               grad = ps__dtypes[ps__recipes[u->recipe].grad.dtype].bytes;
  const bool master = ps__has_master(u->recipe);
  bool good = a->w && a->grad && aligned(a->w, state) && aligned(a->grad, grad) &&
              (!master || (a->copy && aligned(a->copy, 2)));
  for (uint32_t i = 0; i < ps__optimizers[u->optimizer].n_states; i++)
    good = good && a->state[i] && aligned(a->state[i], state);
  if (!good)
    return ps__fail(PS_EINVAL, "%s: an address is missing or not aligned to its elements", name);
  if (gate->sumsq && gate->n_sumsq > MAX_SUMSQ)
    return ps__fail(PS_EINVAL, "%s: the gate has %u sums of squares, at most %d", name,
                    gate->n_sumsq, MAX_SUMSQ);
  job j = {};
  j.a = *a;
  j.k = ps__update_constants(u, 0.0f, unit_element0);
  j.gate = *gate;
  if (!master)
    j.a.copy = NULL;
  return ps_launched(
      name, launches[u->optimizer][u->recipe](&j, u, segments, n_segments,
                                              static_cast<const ps__cuda_exec *>(exec)->stream));
}
