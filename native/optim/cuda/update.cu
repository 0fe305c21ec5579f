/* update.cu - updates on CUDA: the arithmetic of steps.h, one vector of elements a thread.
 * Contract: cuda_update.h.
 *
 * __fmul_rn and its like are never contracted to FMA, divide and root are the exact ones, and
 * denormals are kept (no -ftz). The constants arrive rounded by the same function that the host
 * variants use. */
#include "optim/cuda_update.h"
#include "optim/update_impl.h"
#include "kernels/cuda/cuda_common.cuh"

#define STEP        __device__ __forceinline__
#define REAL        float
#define STEP_K      ps__update_k
#define ADD(a, b)   __fadd_rn(a, b)
#define SUB(a, b)   __fsub_rn(a, b)
#define MUL(a, b)   __fmul_rn(a, b)
#define DIV(a, b)   __fdiv_rn(a, b)
#define SQRT(a)     __fsqrt_rn(a)
#define SIGN(a)     sign_of(a)
#define CONST(x)    (x)
#define MOST(a, b)  ((a) > (b) ? (a) : (b))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
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
/* Rows whose weights and states have one dtype; the others are updated by blocks, below. */
template <int RECIPE> struct kind {
  static constexpr ps__recipe of = ps__recipe_of(RECIPE);
  static constexpr bool blocks = of.state[0].block > 1, halves = of.updated.dtype == PS__I8,
                        plain = !blocks && !halves;
};
/* What a recipe stores, and how many elements a thread takes: 16 bytes of weights. */
template <int RECIPE> struct types {
  static constexpr ps__recipe of = ps__recipe_of(RECIPE);
  static constexpr bool master = of.updated.dtype != of.weights.dtype;
  using state = typename storage<of.updated.dtype>::type;
  using grad = typename storage<of.grad.dtype>::type;
  static constexpr int wide = 16 / sizeof(state);
  static_assert(of.state[0].dtype == of.updated.dtype && of.state[1].dtype == of.updated.dtype,
                "weights and states are read as one type");
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

/* ---- state in 8 bits, master copies of 24 bits ----------------------------------------------- */

/* A thread takes EIGHT elements, the LANES threads of a block of state share its scale. Numbers of
 * elements that are not there are 0, which changes no scale. */
enum { EIGHT = 8, LANES = PS__STATE_BLOCK / EIGHT };
enum { STORED = PS__STATE_BLOCK + 4 }; /* BYTES of a block of state */
static_assert(32 % LANES == 0, "a block of state is of one warp");

/* part_of_scale() of all levels: a division each, made once by a block of threads. */
struct level_parts {
  float m[128], v[256];
};
__device__ __forceinline__ void fill_parts(level_parts *parts) {
  for (int i = threadIdx.x; i < 256; i += THREADS) {
    parts->v[i] = part_of_scale(PS__LEVELS_V, (float)i);
    if (i < 128)
      parts->m[i] = part_of_scale(PS__LEVELS_M, (float)i);
  }
  __syncthreads();
}

/* @n elements of @p; all of them @whole: at once. */
__device__ __forceinline__ void read_eight(float (&x)[EIGHT], const void *p, uint32_t dtype,
                                           bool whole, int n) {
  if (whole && dtype == PS_BF16) {
    ps_read<__nv_bfloat16, EIGHT>(x, (const __nv_bfloat16 *)p);
  } else {
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      x[i] = i >= n             ? 0.0f
             : dtype == PS_BF16 ? __uint_as_float((uint32_t)((const uint16_t *)p)[i] << 16)
                                : ((const float *)p)[i];
  }
}
__device__ __forceinline__ void read_bytes(uint32_t (&x)[2], const void *p, bool whole, int n) {
  if (whole) {
    x[0] = ((const uint32_t *)p)[0];
    x[1] = ((const uint32_t *)p)[1];
  } else {
    x[0] = x[1] = 0;
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      if (i < n)
        x[i / 4] |= (uint32_t)((const uint8_t *)p)[i] << (8 * (i % 4));
  }
}
__device__ __forceinline__ void write_bytes(void *p, const uint32_t (&x)[2], bool whole, int n) {
  if (whole) {
    ((uint32_t *)p)[0] = x[0];
    ((uint32_t *)p)[1] = x[1];
  } else {
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      if (i < n)
        ((uint8_t *)p)[i] = (uint8_t)(x[i / 4] >> (8 * (i % 4)));
  }
}
/* The upper halves of @bits. */
__device__ __forceinline__ void write_upper(void *p, const uint32_t (&bits)[EIGHT], bool whole,
                                            int n) {
  if (whole) {
    store_upper<EIGHT>(p, bits);
  } else {
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      if (i < n)
        ((uint16_t *)p)[i] = (uint16_t)(bits[i] >> 16);
  }
}
__device__ __forceinline__ void write_floats(float *p, const float (&x)[EIGHT], int n) {
#pragma unroll
  for (int i = 0; i < EIGHT; i++)
    if (i < n)
      p[i] = x[i];
}

/* A state's levels, of which this thread has those of element @in of the block at @p. */
__device__ __forceinline__ void read_levels(float (&x)[EIGHT], const char *p, bool is_v, int in,
                                            int n, const level_parts *parts) {
  uint32_t level[2] = {0, 0};
  if (n)
    read_bytes(level, p + in, n == EIGHT, n);
  const float scale = n ? *(const float *)(p + PS__STATE_BLOCK) : 0.0f;
#pragma unroll
  for (int i = 0; i < EIGHT; i++) {
    const uint32_t byte = level[i / 4] >> (8 * (i % 4)) & 0xff;
    if (is_v) {
      const float root = __fmul_rn(scale, parts->v[byte]);
      x[i] = __fmul_rn(root, root);
    } else {
      const int q = (int)(int8_t)byte;
      /* -128 is no level, and a block may have it all the same */
      const float part = q == -128 ? part_of_scale(PS__LEVELS_M, 128.0f) : parts->m[abs(q)],
                  size = __fmul_rn(scale, part);
      x[i] = q < 0 ? -size : size;
    }
  }
}
__device__ __forceinline__ void write_levels(char *p, const float (&x)[EIGHT], bool is_v, int in,
                                             int n, const uint32_t (&random)[EIGHT]) {
  uint32_t most = 0, level[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < EIGHT; i++)
    most = i < n ? max(most, __float_as_uint(x[i]) & 0x7fffffffu) : most;
#pragma unroll
  for (int far = LANES / 2; far; far /= 2)
    most = max(most, __shfl_xor_sync(0xffffffffu, most, far));
  const float scale = is_v ? canonical(__fsqrt_rn(__uint_as_float(most))) : __uint_as_float(most);
#pragma unroll
  for (int i = 0; i < EIGHT; i++) {
    const uint32_t bits = __float_as_uint(x[i]) & 0x7fffffffu;
    const float size = is_v ? __fsqrt_rn(__uint_as_float(bits)) : __uint_as_float(bits);
    uint32_t q = (__float2uint_rz(fixed_level(is_v ? PS__LEVELS_V : PS__LEVELS_M, size, scale)) +
                  random[i]) >>
                 16;
    if (is_v)
      q += q == 0 && bits;
    else
      q = __float_as_uint(x[i]) >> 31 ? 0 - q : q;
    level[i / 4] |= (q & 0xff) << (8 * (i % 4));
  }
  if (!n)
    return;
  write_bytes(p + in, level, n == EIGHT, n);
  if (in == 0)
    *(float *)(p + PS__STATE_BLOCK) = scale;
}

/* Random bits of EIGHT elements from @element on, of each array. */
__device__ __forceinline__ void random_of(uint32_t (&r)[1 + PS_MAX_STATES][EIGHT], uint64_t key,
                                          uint64_t element) {
  uint64_t words[1 + PS_MAX_STATES];
#pragma unroll
  for (int i = 0; i < EIGHT; i++) {
    if (i == 0 || (element + i) % 4 == 0)
      ps__sr_words(words, key, element + i);
#pragma unroll
    for (int a = 0; a < 1 + PS_MAX_STATES; a++)
      r[a][i] = (uint32_t)(words[a] >> (16 * ((element + i) % 4))) & 0xffffu;
  }
}

/* The weights of elements @at and on. */
template <int ROW>
__device__ __forceinline__ void read_weights(float (&w)[EIGHT], const ps__arrays &a, uint64_t at,
                                             bool whole, int n) {
  constexpr ps__recipe of = kind<ROW>::of;
  if constexpr (kind<ROW>::halves) {
    uint32_t low[2];
    read_eight(w, (const uint16_t *)a.copy + at, PS_BF16, whole, n);
    read_bytes(low, (const uint8_t *)a.w + at, whole, n);
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      w[i] = __uint_as_float(__float_as_uint(w[i]) +
                             ((uint32_t)(int8_t)(low[i / 4] >> (8 * (i % 4)) & 0xff) << 8));
  } else {
    read_eight(w, (const char *)a.w + at * (of.updated.dtype == PS_BF16 ? 2 : 4), of.updated.dtype,
               whole, n);
  }
}
template <int ROW>
__device__ __forceinline__ void write_weights(const float (&w)[EIGHT], const ps__arrays &a,
                                              uint64_t at, bool whole, int n,
                                              const uint32_t (&random)[EIGHT]) {
  constexpr ps__recipe of = kind<ROW>::of;
  uint32_t bits[EIGHT], low[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < EIGHT; i++) {
    const uint32_t x = __float_as_uint(w[i]);
    if constexpr (kind<ROW>::halves) {
      const uint32_t rounded = x + (random[i] & 0xffu);
      bits[i] = rounded + 0x8000u;
      low[i / 4] |= (rounded >> 8 & 0xffu) << (8 * (i % 4));
    } else if constexpr (of.updated.dtype == PS_BF16) {
      bits[i] = x + random[i];
    } else {
      bits[i] = x + 0x7fffu + (x >> 16 & 1u); /* the copy's */
    }
  }
  if constexpr (kind<ROW>::halves)
    write_bytes((uint8_t *)a.w + at, low, whole, n);
  else if constexpr (of.updated.dtype == PS_F32)
    write_floats((float *)a.w + at, w, n);
  if constexpr (of.updated.dtype == PS_BF16)
    write_upper((uint16_t *)a.w + at, bits, whole, n);
  else if constexpr (of.weights.dtype == PS_BF16)
    write_upper((uint16_t *)a.copy + at, bits, whole, n);
}

/* As update_k, EIGHT elements a thread. All threads of a warp come to write_levels(). */
template <ps_optimizer OPTIMIZER, int ROW>
__global__ void __launch_bounds__(THREADS) update_blocks_k(const __grid_constant__ job j) {
  constexpr ps__recipe of = kind<ROW>::of;
  constexpr int N = ps__n_states(OPTIMIZER);
  __shared__ level_parts parts;
  if constexpr (kind<ROW>::blocks)
    fill_parts(&parts);
  if (!is_open(j.gate))
    return;
  uint32_t idx = 0;
  while (idx + 1 < j.n_segments && blockIdx.x >= j.seg[idx + 1].first_block)
    idx++;
  const segment &s = j.seg[idx];
  const uint64_t i = ((uint64_t)(blockIdx.x - s.first_block) * THREADS + threadIdx.x) * EIGHT,
                 at = s.first + i;
  const int n = i >= s.n          ? 0
                : s.n - i < EIGHT ? (int)(s.n - i)
                                  : (int)EIGHT,
            in = (int)(at % PS__STATE_BLOCK);
  const bool whole = s.whole && n == EIGHT;
  float w[EIGHT], g[EIGHT], state[N][EIGHT];
  uint32_t random[1 + PS_MAX_STATES][EIGHT];
  read_weights<ROW>(w, j.a, at, whole, n);
  read_eight(g, (const char *)j.a.grad + at * (of.grad.dtype == PS_BF16 ? 2 : 4), of.grad.dtype,
             whole, n);
  random_of(random, j.k.sr_key, j.k.element + at);
#pragma unroll
  for (int a = 0; a < N; a++)
    if constexpr (kind<ROW>::blocks)
      read_levels(state[a], (const char *)j.a.state[a] + (at - in) / PS__STATE_BLOCK * STORED,
                  of.state[a].dtype == PS__U8, in, n, &parts);
    else
      read_eight(state[a], (const uint16_t *)j.a.state[a] + at, PS_BF16, whole, n);
  const float scale = j.gate.scale ? *j.gate.scale : j.k.grad_scale;
  ps__update_k k = j.k;
  k.decay = s.decay;
  k.lr_decay = s.lr_decay;
#pragma unroll
  for (int e = 0; e < EIGHT; e++) {
    float x[N];
#pragma unroll
    for (int a = 0; a < N; a++)
      x[a] = state[a][e];
    step(OPTIMIZER, &k, __fmul_rn(g[e], scale), &w[e], x);
    w[e] = canonical(w[e]);
#pragma unroll
    for (int a = 0; a < N; a++)
      state[a][e] = canonical(x[a]);
  }
  write_weights<ROW>(w, j.a, at, whole, n, random[0]);
#pragma unroll
  for (int a = 0; a < N; a++)
    if constexpr (kind<ROW>::blocks) {
      write_levels((char *)j.a.state[a] + (at - in) / PS__STATE_BLOCK * STORED, state[a],
                   of.state[a].dtype == PS__U8, in, n, random[1 + a]);
    } else {
      uint32_t bits[EIGHT];
#pragma unroll
      for (int e = 0; e < EIGHT; e++)
        bits[e] = __float_as_uint(state[a][e]) + random[1 + a][e];
      write_upper((uint16_t *)j.a.state[a] + at, bits, whole, n);
    }
}

/* ---- launch ---------------------------------------------------------------------------------- */

static bool aligned(const void *p, size_t to) { return (uintptr_t)p % to == 0; }

/* Elements a thread takes. */
template <int ROW> constexpr int width() {
  if constexpr (kind<ROW>::plain)
    return types<ROW>::wide;
  else
    return EIGHT;
}
/* Whether V elements at @p are read at once: up to 16 bytes of them, and of bytes four. */
template <int V> static bool fits(const void *p, ps__storage as) {
  const size_t each = ps__dtypes[as.dtype].bytes;
  return aligned(p, each == 1 ? 4 : each * V < 16 ? each * V : 16);
}

/* Segments from @segments on, as many as fit, with their blocks; returns how many were taken. */
template <ps_optimizer OPTIMIZER, int RECIPE>
static uint32_t take(job *j, uint32_t *n_blocks, const ps__update *u, const ps__segment *segments,
                     uint32_t n) {
  constexpr int V = width<RECIPE>();
  constexpr ps__recipe of_row = kind<RECIPE>::of;
  uint32_t i = 0, k = 0;
  *n_blocks = 0;
  for (; i < n && k < MAX_SEGMENTS; i++) {
    const uint64_t first = segments[i].first;
    if (!segments[i].n)
      continue;
    const ps__arrays from = ps__arrays_from(&j->a, RECIPE, first);
    bool whole = (j->k.element + first) % 4 == 0 && fits<V>(from.grad, of_row.grad) &&
                 fits<V>(from.w, of_row.updated) && fits<V>(from.copy, of_row.weights);
    for (uint32_t a = 0; a < ps__n_states(OPTIMIZER); a++)
      whole = whole && fits<V>(from.state[a], of_row.state[a]);
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
    if (n_blocks) {
      if constexpr (kind<RECIPE>::plain)
        update_k<OPTIMIZER, RECIPE><<<n_blocks, THREADS, 0, stream>>>(*j);
      else
        update_blocks_k<OPTIMIZER, RECIPE><<<n_blocks, THREADS, 0, stream>>>(*j);
    }
    segments += taken, n -= taken;
  }
  return cudaGetLastError();
}

typedef cudaError_t (*launch_fn)(job *j, const ps__update *u, const ps__segment *segments,
                                 uint32_t n, cudaStream_t stream);
#define LAUNCH(ROW, NAME)                                                                          \
  if (row == PS__ROW_##ROW)                                                                        \
    return launch<PS_OPTIMIZER_##NAME, PS__ROW_##ROW>;
#define LAUNCHES(NAME, name, n_states, parts, state_op)                                            \
  if (optimizer == PS_OPTIMIZER_##NAME) {                                                          \
    PS__EACH_ROW(LAUNCH, NAME)                                                                     \
  }
/* NULL: a row with FP8, or none. */
static launch_fn launch_of(ps_optimizer optimizer, uint32_t row) {
  PS__OPTIMIZERS(LAUNCHES)
  return NULL;
}

/* update
 * math    optim.h; nothing at all where the gate is closed
 * shapes  w, state [n] fp32, grad [n] fp32 (fp32) or bf16 and copy [n] (fp32-master), or all
 *         [n] bf16; state in 8 bits: segments begin with blocks
 * bytes   ps__update_bytes(). AdamW: 218 M elements (an 8B layer) bf16 -> 3.05 GB, 636 us at 4.8
 *         TB/s; some 75 instructions an element, a third of them the generator's, take 500 us
 *         beside it. Measured on an H200, of copy bandwidth: fp32 100%, 1436 us; fp32-master 98%,
 *         1466 us; bf16 84%, 854 us
 * determinism  bitwise: elementwise.   reference  ps__update_on_pool, the same bits */
extern "C" ps_status ps__cuda_update_unit(void *exec, const ps__update *u,
                                          const ps__segment *segments, uint32_t n_segments,
                                          const ps__arrays *a, uint64_t unit_element0,
                                          const ps__update_gate *gate) {
  const launch_fn run = launch_of(u->optimizer, u->recipe);
  if (!run || u->part != PS_UPDATE_WHOLE)
    return ps__fail(PS_EINVAL, "update: optimizer %u, recipe %u, part %u is not there",
                    (unsigned)u->optimizer, (unsigned)u->recipe, (unsigned)u->part);
  const char *const name = ps__optimizers[u->optimizer].name;
  const ps__recipe *const r = &ps__recipes[u->recipe];
  const bool master = ps__has_master(u->recipe);
  bool good = a->w && a->grad && aligned(a->w, ps__dtypes[r->updated.dtype].bytes) &&
              aligned(a->grad, ps__dtypes[r->grad.dtype].bytes) &&
              (!master || (a->copy && aligned(a->copy, 2)));
  for (uint32_t i = 0; i < ps__optimizers[u->optimizer].n_states; i++)
    good = good && a->state[i] &&
           aligned(a->state[i], r->state[i].block > 1 ? 4 : ps__dtypes[r->state[i].dtype].bytes);
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
      name, run(&j, u, segments, n_segments, static_cast<const ps__cuda_exec *>(exec)->stream));
}
