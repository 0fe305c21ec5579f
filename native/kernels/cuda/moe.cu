/* moe.cu - the router of experts and what moves their rows: choosing, sorting, gathering, the gated
 * activation with its weight, and the sum of a token's rows. ops.h has the math.
 *
 * Determinism: the only atomics count integers in shared memory; positions come from prefix sums
 * in the order (expert, token). Every sum of floats has one order. */
#include "kernels/cuda/glu.cuh"

namespace {

enum { THREADS = 256, WARPS = THREADS / 32 };
constexpr uint32_t ALL = 0xffffffffu;

/* ---- the router ------------------------------------------------------------------------------ */

/* Larger for larger x: 0 is nothing, 1 a NaN, and -0 is 0. */
__device__ __forceinline__ uint32_t rank_of(float x) {
  if (x != x)
    return 1;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return ((bits & 0x80000000u) ? ~bits : bits | 0x80000000u) + 1;
}
__device__ __forceinline__ float of_rank(uint32_t rank) {
  const uint32_t bits = rank - 1;
  return rank == 1 ? __uint_as_float(0x7fc00000u)
                   : __uint_as_float((bits & 0x80000000u) ? bits & 0x7fffffffu : ~bits);
}

/* A token's logits: lane l of its warp has those of experts l, l + 32, ...; -inf past the end. */
template <int PER>
__device__ __forceinline__ void read_logits(float (&x)[PER], const float *logits, uint32_t t,
                                            uint32_t n_experts) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < PER; i++)
    x[i] = lane + 32 * i < n_experts ? __ldg(logits + (size_t)t * n_experts + lane + 32 * i)
                                     : -INFINITY;
}
/* Sum of exp(x - max) over the warp. */
template <int PER> __device__ __forceinline__ float sum_exp(const float (&x)[PER], float max) {
  const uint32_t lane = threadIdx.x % 32;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER; i++)
    sum += x[i] == -INFINITY && max != -INFINITY ? 0.0f : expf(x[i] - max);
  (void)lane;
  return ps_warp_sum(sum);
}

/* The largest of the lanes' ranks, the first of equal ones: its rank and its number, which becomes
 * 0 where it was. */
template <int PER>
__device__ __forceinline__ uint32_t take_best(uint32_t (&rank)[PER], uint32_t *id) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t best = 0, at = 0;
#pragma unroll
  for (int i = 0; i < PER; i++)
    if (rank[i] > best)
      best = rank[i], at = lane + 32 * i;
  const uint32_t most = __reduce_max_sync(ALL, best);
  *id = __reduce_min_sync(ALL, best == most ? at : ALL);
#pragma unroll
  for (int i = 0; i < PER; i++)
    rank[i] = lane + 32 * i == *id ? 0 : rank[i];
  return most;
}

/* Ranks of experts outside the best groups become 0. */
template <int PER>
__device__ __forceinline__ void close_groups(uint32_t (&rank)[PER], const ps__args_moe_route &a) {
  const uint32_t lane = threadIdx.x % 32, each = a.n_experts / a.n_groups;
  uint32_t worth[PER] = {}, open[PER] = {}, id;
  for (uint32_t g = 0; g < a.n_groups; g++) {
    uint32_t of_group[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
      of_group[i] = (lane + 32 * i) / each == g ? rank[i] : 0;
    uint32_t most = take_best(of_group, &id);
    if (a.sigmoid)
      most = rank_of(of_rank(most) + of_rank(take_best(of_group, &id)));
#pragma unroll
    for (int i = 0; i < PER; i++)
      worth[i] = lane + 32 * i == g ? most : worth[i];
  }
  for (uint32_t u = 0; u < a.n_groups_used; u++) {
    take_best(worth, &id);
#pragma unroll
    for (int i = 0; i < PER; i++)
      open[i] |= (lane + 32 * i) / each == id;
  }
#pragma unroll
  for (int i = 0; i < PER; i++)
    rank[i] = open[i] ? rank[i] : 0;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float route_scale(float scale) { return scale == 0.0f ? 1.0f : scale; }

/* A warp a token. */
template <int PER>
__global__ void __launch_bounds__(THREADS)
    route_k(const float *logits, uint16_t *ids, float *weights, const void *bias,
            ps__args_moe_route a) {
  const uint32_t t = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (t >= a.n_tokens)
    return;
  float x[PER];
  read_logits(x, logits, t, a.n_experts);
  uint32_t rank[PER], my_rank = 0, my_id = 0, first = 0;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const uint32_t e = lane + 32 * i;
    float key = x[i];
    if (a.sigmoid && e < a.n_experts) {
      finite = finite && x[i] < INFINITY;
      key = sigmoid(x[i]);
      if (bias)
        key += a.dt == PS_F32 ? ((const float *)bias)[e]
                              : __bfloat162float(((const __nv_bfloat16 *)bias)[e]);
    }
    rank[i] = e < a.n_experts ? rank_of(key) : 0;
    first = max(first, rank[i]);
  }
  first = __reduce_max_sync(ALL, first);
  if (a.n_groups)
    close_groups(rank, a);
  for (uint32_t j = 0; j < a.n_used; j++) {
    uint32_t id;
    const uint32_t most = take_best(rank, &id);
    if (lane == j)
      my_rank = most, my_id = id;
  }
  float w = 0.0f;
  if (a.sigmoid) {
    const bool all = __all_sync(ALL, finite);
    if (lane < a.n_used)
      w = all ? sigmoid(__ldg(logits + (size_t)t * a.n_experts + my_id)) : NAN;
  } else {
    const float max = of_rank(first), sum = sum_exp(x, max);
    w = lane < a.n_used ? expf(of_rank(my_rank) - max) / sum : 0.0f;
  }
  if (a.renorm) {
    float chosen = a.sigmoid ? 1e-20f : 0.0f;
    for (uint32_t j = 0; j < a.n_used; j++)
      chosen += __shfl_sync(ALL, w, j);
    w /= chosen;
  }
  w *= route_scale(a.scale);
  if (lane < a.n_used) {
    ids[(size_t)t * a.n_used + lane] = (uint16_t)my_id;
    weights[(size_t)t * a.n_used + lane] = w;
  }
}

/* Whether this is the last block, which adds the counts and has no token. */
__device__ __forceinline__ bool adds_counts(uint64_t *counts, const int32_t *offsets,
                                            uint32_t n_experts) {
  const bool last = blockIdx.x == gridDim.x - 1;
  for (uint32_t e = threadIdx.x; last && counts && e < n_experts; e += THREADS)
    counts[e] += (uint64_t)(offsets[e + 1] - offsets[e]);
  return last;
}

/* A warp a token; the last block adds the counts. */
template <typename T, int PER>
__global__ void __launch_bounds__(THREADS)
    route_bwd_k(const float *logits, const uint16_t *ids, const float *weights,
                const float *dweights, const int32_t *offsets, T *dlogits, uint64_t *counts,
                ps__args_moe_route_bwd a) {
  if (adds_counts(counts, offsets, a.n_experts))
    return;
  const uint32_t t = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (t >= a.n_tokens)
    return;
  float x[PER], dp[PER], add[PER];
  read_logits(x, logits, t, a.n_experts);
  float max = x[0];
#pragma unroll
  for (int i = 1; i < PER; i++)
    max = fmaxf(max, x[i]);
#pragma unroll
  for (int w = 16; w > 0; w /= 2)
    max = fmaxf(max, __shfl_xor_sync(ALL, max, w));
  const float sum = sum_exp(x, max);
  const float each = a.aux == 0.0f ? 0.0f : a.aux / ((float)a.n_tokens * (float)a.step_tokens);
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const uint32_t e = lane + 32 * i;
    dp[i] = a.aux != 0.0f && e < a.n_experts ? each * (float)(offsets[e + 1] - offsets[e]) : 0.0f;
    add[i] = 0.0f;
  }
  const size_t at = (size_t)t * a.n_used + lane;
  const uint32_t id = lane < a.n_used ? ids[at] : ALL;
  const float w = lane < a.n_used ? weights[at] : 0.0f, dw = lane < a.n_used ? dweights[at] : 0.0f;
  float mean = 0.0f;
  const float scale = route_scale(a.scale);
  if (a.renorm)
    for (uint32_t j = 0; j < a.n_used; j++)
      mean += __shfl_sync(ALL, w * dw / scale, j);
  const float mine = a.renorm ? w * (dw - mean) : scale * dw;
  for (uint32_t j = 0; j < a.n_used; j++) {
    const uint32_t e = __shfl_sync(ALL, id, j);
    const float g = __shfl_sync(ALL, mine, j);
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (lane + 32 * i == e) {
        if (a.renorm)
          add[i] = g;
        else
          dp[i] += g;
      }
  }
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    x[i] = x[i] == -INFINITY && max != -INFINITY ? 0.0f : expf(x[i] - max) / sum;
    dot += x[i] * dp[i];
  }
  dot = ps_warp_sum(dot);
  const float z =
      a.z_loss == 0.0f ? 0.0f : 2.0f * a.z_loss * (max + logf(sum)) / (float)a.step_tokens;
#pragma unroll
  for (int i = 0; i < PER; i++)
    if (lane + 32 * i < a.n_experts)
      dlogits[(size_t)t * a.n_experts + lane + 32 * i] =
          ps_from_f32<T>(x[i] * (dp[i] - dot + z) + add[i]);
}

/* The same where scores are sigmoids. */
template <typename T, int PER>
__global__ void __launch_bounds__(THREADS)
    route_sigmoid_bwd_k(const float *logits, const uint16_t *ids, const float *weights,
                        const float *dweights, const int32_t *offsets, T *dlogits, uint64_t *counts,
                        ps__args_moe_route_bwd a) {
  if (adds_counts(counts, offsets, a.n_experts))
    return;
  const uint32_t t = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (t >= a.n_tokens)
    return;
  const size_t at = (size_t)t * a.n_used + lane;
  const bool chose = lane < a.n_used;
  const uint32_t id = chose ? ids[at] : ALL;
  const float w = chose ? weights[at] : 0.0f, dw = chose ? dweights[at] : 0.0f,
              p = chose ? sigmoid(logits[(size_t)t * a.n_experts + id]) : 0.0f,
              scale = route_scale(a.scale);
  float less = 0.0f, sum = 1e-20f;
  for (uint32_t j = 0; j < a.n_used; j++) {
    less += __shfl_sync(ALL, w * dw, j);
    sum += __shfl_sync(ALL, p, j);
  }
  const float mine = p * (1.0f - p) * (a.renorm ? (scale * dw - less) / sum : scale * dw);
  float g[PER] = {};
  for (uint32_t j = 0; j < a.n_used; j++) {
    const uint32_t e = __shfl_sync(ALL, id, j);
    const float of = __shfl_sync(ALL, mine, j);
#pragma unroll
    for (int i = 0; i < PER; i++)
      g[i] = lane + 32 * i == e ? of : g[i];
  }
#pragma unroll
  for (int i = 0; i < PER; i++)
    if (lane + 32 * i < a.n_experts)
      dlogits[(size_t)t * a.n_experts + lane + 32 * i] = ps_from_f32<T>(g[i]);
}

/* ---- the index ------------------------------------------------------------------------------- */

/* Choices, in the order of tokens, are cut in at most PS_MOE_TILES tiles, a block each, and a
 * tile in a part a warp. */
__device__ __forceinline__ uint32_t id_at(const uint16_t *ids, uint32_t i, uint32_t n_experts) {
  const uint32_t id = ids[i];
  return id < n_experts ? id : 0;
}

/* tiles[b,e]: choices of expert e in tile b. */
__global__ void __launch_bounds__(THREADS)
    count_k(const uint16_t *ids, uint32_t *tiles, uint32_t n, uint32_t each, uint32_t n_experts) {
  __shared__ uint32_t count[PS_MAX_EXPERTS];
  for (uint32_t e = threadIdx.x; e < n_experts; e += THREADS)
    count[e] = 0;
  __syncthreads();
  const uint32_t from = blockIdx.x * each, to = n - from < each ? n : from + each;
  for (uint32_t i = from + threadIdx.x; i < to; i += THREADS)
    atomicAdd(&count[id_at(ids, i, n_experts)], 1u);
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < n_experts; e += THREADS)
    tiles[blockIdx.x * n_experts + e] = count[e];
}

/* tiles[b,e] becomes the first row of expert e that tile b fills; one block, a thread an expert. */
__global__ void __launch_bounds__(PS_MAX_EXPERTS)
    offsets_k(uint32_t *tiles, int32_t *offsets, uint32_t n_tiles, uint32_t n_experts) {
  __shared__ uint32_t sums[PS_MAX_EXPERTS / 32];
  const uint32_t e = threadIdx.x, lane = e % 32;
  uint32_t total = 0;
  if (e < n_experts)
#pragma unroll 8
    for (uint32_t b = 0; b < n_tiles; b++)
      total += tiles[b * n_experts + e];
  uint32_t upto = total;
#pragma unroll
  for (int w = 1; w < 32; w *= 2) {
    const uint32_t x = __shfl_up_sync(ALL, upto, w);
    upto += lane >= (uint32_t)w ? x : 0;
  }
  if (lane == 31)
    sums[e / 32] = upto;
  __syncthreads();
  for (uint32_t w = 0; w < e / 32; w++)
    upto += sums[w];
  if (e >= n_experts)
    return;
  if (e == 0)
    offsets[0] = 0;
  offsets[e + 1] = (int32_t)upto;
  uint32_t at = upto - total;
  for (uint32_t b0 = 0; b0 < n_tiles; b0 += 8) {
    uint32_t x[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
      x[i] = b0 + i < n_tiles ? tiles[(b0 + i) * n_experts + e] : 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      if (b0 + i < n_tiles)
        tiles[(b0 + i) * n_experts + e] = at;
      at += x[i];
    }
  }
}

/* A warp takes its part 32 choices at a time: a choice's row is the first that is free for its
 * expert, plus the choices of the same expert on lower lanes. */
__global__ void __launch_bounds__(THREADS)
    place_k(const uint16_t *ids, const uint32_t *tiles, int32_t *slot, uint32_t n, uint32_t each,
            uint32_t n_experts) {
  __shared__ uint32_t next[WARPS][PS_MAX_EXPERTS];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = each / WARPS,
                 from = blockIdx.x * each + warp * part, to = from + part < n ? from + part : n;
  for (uint32_t e = lane; e < n_experts; e += 32)
    next[warp][e] = 0;
  __syncwarp();
  for (uint32_t i = from + lane; i < to; i += 32)
    atomicAdd(&next[warp][id_at(ids, i, n_experts)], 1u);
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < n_experts; e += THREADS) {
    uint32_t at = tiles[blockIdx.x * n_experts + e];
    for (uint32_t w = 0; w < WARPS; w++) {
      const uint32_t count = next[w][e];
      next[w][e] = at;
      at += count;
    }
  }
  __syncthreads();
  for (uint32_t i0 = from; i0 < to; i0 += 32) {
    const uint32_t i = i0 + lane;
    const bool there = i < to;
    const uint32_t id = there ? id_at(ids, i, n_experts) : PS_MAX_EXPERTS + lane,
                   same = __match_any_sync(ALL, id),
                   row = there ? next[warp][id] + __popc(same & ((1u << lane) - 1)) : 0;
    __syncwarp();
    if (there && lane == (uint32_t)__ffs((int)same) - 1)
      next[warp][id] += __popc(same);
    __syncwarp();
    if (there)
      slot[i] = (int32_t)row;
  }
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* A token a block: its row is read once and written k times. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    gather_k(const T *x, const int32_t *slot, T *xr, uint32_t dim, uint32_t n_used) {
  const uint32_t t = blockIdx.x;
  __shared__ uint32_t row[PS_MAX_EXPERTS_USED];
  if (threadIdx.x < n_used)
    row[threadIdx.x] = (uint32_t)slot[(size_t)t * n_used + threadIdx.x];
  __syncthreads();
  for (uint32_t c = threadIdx.x * V; c < dim; c += blockDim.x * V) {
    const ps_vec<T, V> v = ps_load<T, V>(x + (size_t)t * dim + c);
    for (uint32_t j = 0; j < n_used; j++)
      ps_put<T, V>(xr + (size_t)row[j] * dim + c, v);
  }
}

enum { GATHERED = 4 };

/* A token a block; GATHERED of its rows in flight together. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    combine_k(const T *z, const int32_t *slot, T *y, const T *residual, uint32_t dim,
              uint32_t n_used, uint32_t accumulate, const T *bias, const float *weights,
              const uint16_t *ids) {
  const uint32_t t = blockIdx.x;
  __shared__ uint32_t row[PS_MAX_EXPERTS_USED];
  if (threadIdx.x < n_used)
    row[threadIdx.x] = (uint32_t)slot[(size_t)t * n_used + threadIdx.x];
  __syncthreads();
  for (uint32_t c = threadIdx.x * V; c < dim; c += blockDim.x * V) {
    T *to = y + (size_t)t * dim + c;
    float sum[V] = {}, one[V];
    if (accumulate)
      ps_read<T, V>(sum, to);
    for (uint32_t j0 = 0; j0 < n_used; j0 += GATHERED) {
      ps_vec<T, V> v[GATHERED];
#pragma unroll
      for (int j = 0; j < GATHERED; j++)
        if (j0 + j < n_used)
          v[j] = ps_load<T, V>(z + (size_t)row[j0 + j] * dim + c);
#pragma unroll
      for (int j = 0; j < GATHERED; j++)
        if (j0 + j < n_used) {
          ps_unpack<T, V>(one, v[j]);
#pragma unroll
          for (int k = 0; k < V; k++)
            sum[k] += one[k];
        }
    }
    for (uint32_t j = 0; bias && j < n_used; j++) {
      const size_t at = (size_t)t * n_used + j;
      const float w = __ldg(weights + at);
      ps_read<T, V>(one, bias + (size_t)ids[at] * dim + c);
#pragma unroll
      for (int k = 0; k < V; k++)
        sum[k] = __fadd_rn(sum[k], __fmul_rn(one[k], w));
    }
    if (residual) {
      ps_read<T, V>(one, residual + (size_t)t * dim + c);
#pragma unroll
      for (int k = 0; k < V; k++)
        sum[k] += one[k];
    }
    ps_store<T, V>(to, sum);
  }
}

/* ---- the weighted gate: a warp a row --------------------------------------------------------- */

template <typename T, int V, bool GELU>
__global__ void __launch_bounds__(THREADS)
    moe_glu_k(const T *gu, const float *weights, const int32_t *slot, T *s, uint32_t rows,
              uint32_t f) {
  const uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32;
  if (at >= rows)
    return;
  const size_t r = (uint32_t)__ldg(slot + at);
  const float w = __ldg(weights + at);
  const T *row = gu + r * 2 * f;
#pragma unroll 2
  for (uint32_t i = threadIdx.x % 32 * V; i < f; i += 32 * V) {
    float g[V], u[V];
    ps_read<T, V>(g, row + i);
    ps_read<T, V>(u, row + f + i);
#pragma unroll
    for (int k = 0; k < V; k++)
      g[k] = w * gated<T, GELU>(g[k], u[k]);
    ps_store<T, V>(s + r * f + i, g);
  }
}

template <typename T, int V, bool GELU>
__global__ void __launch_bounds__(THREADS)
    moe_glu_bwd_k(T *ds, T *gu, const float *weights, const int32_t *slot, float *dweights,
                  uint32_t rows, uint32_t f) {
  const uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32;
  if (at >= rows)
    return;
  const size_t r = (uint32_t)__ldg(slot + at);
  const float w = __ldg(weights + at);
  T *row = gu + r * 2 * f;
  float dot = 0.0f;
#pragma unroll 2
  for (uint32_t i = threadIdx.x % 32 * V; i < f; i += 32 * V) {
    float d[V], g[V], u[V];
    ps_read<T, V>(d, ds + r * f + i);
    ps_read<T, V>(g, row + i);
    ps_read<T, V>(u, row + f + i);
#pragma unroll
    for (int k = 0; k < V; k++) {
      const float was = d[k];
      d[k] *= w;
      gated_back<T, GELU>(d[k], g[k], u[k]);
      dot += was * d[k];
      d[k] *= w;
    }
    ps_store<T, V>(ds + r * f + i, d);
    ps_store<T, V>(row + i, g);
    ps_store<T, V>(row + f + i, u);
  }
  dot = ps_warp_sum(dot);
  if (threadIdx.x % 32 == 0)
    dweights[at] = dot;
}

/* ---- a factor an expert ---------------------------------------------------------------------- */

template <typename T>
__global__ void __launch_bounds__(THREADS)
    scale_k(const float *w, const uint16_t *ids, const T *scale, float *y, uint32_t rows) {
  const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
  if (i < rows)
    y[i] = w[i] * ps_to_f32(scale[ids[i]]);
}

/* A block an expert: of its choices every thread adds some, in order, and the block adds these
 * sums. No other block reads or writes what belongs to these choices. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    scale_bwd_k(const float *w, const uint16_t *ids, const T *scale, float *dy, T *dscale,
                uint32_t rows, bool accumulate) {
  __shared__ float shared[1][32];
  const uint32_t e = blockIdx.x;
  const float factor = ps_to_f32(scale[e]);
  float sum[1] = {0.0f};
  for (uint32_t i = threadIdx.x; i < rows; i += THREADS)
    if (ids[i] == e) {
      sum[0] += dy[i] * w[i];
      dy[i] *= factor;
    }
  ps_block_sum(sum, shared);
  if (threadIdx.x == 0)
    dscale[e] = ps_from_f32<T>(accumulate ? ps_to_f32(dscale[e]) + sum[0] : sum[0]);
}

cudaStream_t stream_of(const ps_launch *l) { return ((const ps__cuda_exec *)l->exec)->stream; }
bool all_aligned(const ps_launch *l, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (!ps_aligned(l->ptr[i]))
      return false;
  return true;
}
/* Threads for a row of n vectors. */
uint32_t threads_for(uint32_t n) {
  const uint32_t whole = (n + 31) / 32 * 32;
  return whole < THREADS ? whole : THREADS;
}

} // namespace

/* Runs body with PER the logits that a lane has of n experts. */
#define BY_EXPERTS(n, ...)                                                                         \
  do {                                                                                             \
    if ((n) <= 64) {                                                                               \
      constexpr int PER = 2;                                                                       \
      __VA_ARGS__;                                                                                 \
    } else if ((n) <= 128) {                                                                       \
      constexpr int PER = 4;                                                                       \
      __VA_ARGS__;                                                                                 \
    } else if ((n) <= 256) {                                                                       \
      constexpr int PER = 8;                                                                       \
      __VA_ARGS__;                                                                                 \
    } else {                                                                                       \
      constexpr int PER = 16;                                                                      \
      __VA_ARGS__;                                                                                 \
    }                                                                                              \
  } while (0)

/* moe_route
 * math    ops.h. The order of a row's logits is exact; exp and sums in fp32: a lane's in order,
 *         then a butterfly over the warp
 * bytes   4*T*E + 6*T*k of HBM; 32768 x 128, k 8 -> 18 MB: 31 us on an H100
 * determinism  bitwise.   reference  the cpu backend's: the same ids, weights to 4e-6 */
extern "C" ps_status ps__cuda_moe_route(const ps_launch *l) {
  const ps__args_moe_route *a = (const ps__args_moe_route *)l->args;
  const ps_status st = ps_check(l, "moe_route", 3 + (a->has_bias != 0), PS_F32, 0);
  if (st != PS_OK || !a->n_tokens)
    return st;
  BY_EXPERTS(a->n_experts,
             route_k<PER><<<ps_ceil_div(a->n_tokens, WARPS), THREADS, 0, stream_of(l)>>>(
                 (const float *)l->ptr[0], (uint16_t *)l->ptr[1], (float *)l->ptr[2],
                 a->has_bias ? l->ptr[3] : NULL, *a));
  return ps_launched("moe_route", cudaSuccess);
}

/* moe_route_bwd
 * math    ops.h; p is computed again, the sum over experts as moe_route's. counts are added by one
 *         block
 * bytes   (4 + sizeof(dt))*T*E + 10*T*k of HBM; 32768 x 128, k 8, bf16 -> 28 MB: 28 us
 *         on an H100
 * determinism  bitwise.   reference  the cpu backend's: 2^-20 of the largest term, and the rounding
 *              of dt */
extern "C" ps_status ps__cuda_moe_route_bwd(const ps_launch *l) {
  const ps__args_moe_route_bwd *a = (const ps__args_moe_route_bwd *)l->args;
  const ps_status st = ps_check(l, "moe_route_bwd", 6 + (a->count != 0), a->dt, 0);
  if (st != PS_OK || !a->n_tokens)
    return st;
  PS_BY_TYPE(
      a->dt,
      BY_EXPERTS(a->n_experts,
                 const auto kernel = a->sigmoid ? route_sigmoid_bwd_k<T, PER> : route_bwd_k<T, PER>;
                 kernel<<<ps_ceil_div(a->n_tokens, WARPS) + 1, THREADS, 0, stream_of(l)>>>(
                     (const float *)l->ptr[0], (const uint16_t *)l->ptr[1],
                     (const float *)l->ptr[2], (const float *)l->ptr[3], (const int32_t *)l->ptr[4],
                     (T *)l->ptr[5], a->count ? (uint64_t *)l->ptr[6] : NULL, *a)));
  return ps_launched("moe_route_bwd", cudaSuccess);
}

/* moe_index
 * math    a counting sort of T*k ids by (expert, token): counts of tiles, their prefix sums, rows
 * bytes   8*T*k of HBM and 12*tiles*E of L2; 32768 x 8 -> 2.1 MB: 27 us on an H100, when it wrote
 *         the rows' tokens too
 * scratch 4*tiles*E, at most 128 tiles
 * determinism  bitwise: integers.   reference  the cpu backend's, equal */
extern "C" ps_status ps__cuda_moe_index(const ps_launch *l) {
  const ps__args_moe_index *a = (const ps__args_moe_index *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps_status st = ps_check(l, "moe_index", 3, PS_F32, ps_scratch_moe_index(a, NULL));
  if (st != PS_OK)
    return st;
  const uint32_t n = a->n_tokens * a->n_used, each = ps_moe_tile(n), n_tiles = ps_ceil_div(n, each);
  const uint16_t *ids = (const uint16_t *)l->ptr[0];
  uint32_t *tiles = (uint32_t *)exec->scratch;
  if (n)
    count_k<<<n_tiles, THREADS, 0, exec->stream>>>(ids, tiles, n, each, a->n_experts);
  offsets_k<<<1, (a->n_experts + 31) / 32 * 32, 0, exec->stream>>>(tiles, (int32_t *)l->ptr[1],
                                                                   n_tiles, a->n_experts);
  if (n)
    place_k<<<n_tiles, THREADS, 0, exec->stream>>>(ids, tiles, (int32_t *)l->ptr[2], n, each,
                                                   a->n_experts);
  return ps_launched("moe_index", cudaSuccess);
}

static ps_status check_rows(const ps_launch *l, const char *op, uint32_t n_ptr) {
  const ps__args_moe_rows *a = (const ps__args_moe_rows *)l->args;
  return ps_check(l, op, n_ptr, a->dt, 0);
}

/* moe_gather
 * bytes   2*(R + T)*D of HBM in bf16; 32768 tokens, k 8, D 2048 -> 1.2 GB: not timed yet. Reading
 *         a row k times took 717 us on an H100 (bench/log/2026-11-27-experts-kernels.md)
 * determinism  a copy.   reference  the cpu backend's, equal */
extern "C" ps_status ps__cuda_moe_gather(const ps_launch *l) {
  const ps__args_moe_rows *a = (const ps__args_moe_rows *)l->args;
  const ps_status st = check_rows(l, "moe_gather", 3);
  if (st != PS_OK || !a->n_tokens)
    return st;
  const bool whole = ps_whole(a->dt, a->dim) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[2]);
  PS_DISPATCH(
      a->dt, whole,
      (gather_k<T, V><<<a->n_tokens, threads_for(ps_ceil_div(a->dim, V)), 0, stream_of(l)>>>(
          (const T *)l->ptr[0], (const int32_t *)l->ptr[1], (T *)l->ptr[2], a->dim, a->n_used)));
  return ps_launched("moe_gather", cudaSuccess);
}

/* moe_combine
 * math    y (+)= the k rows of each token, in the order of its choices (+ residual); fp32, one
 *         rounding
 * bytes   2*(R + T)*D of HBM in bf16, an addend 2*T*D more; 32768 tokens, k 8, D 2048, residual ->
 *         1.3 GB: 451 us on an H100
 * determinism  bitwise.   reference  the cpu backend's, equal */
extern "C" ps_status ps__cuda_moe_combine(const ps_launch *l) {
  const ps__args_moe_rows *a = (const ps__args_moe_rows *)l->args;
  const uint32_t bias = 3 + (a->has_residual != 0);
  const ps_status st = check_rows(l, "moe_combine", bias + (a->has_bias ? 3 : 0));
  if (st != PS_OK || !a->n_tokens)
    return st;
  const bool whole = ps_whole(a->dt, a->dim) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[2]) &&
                     (!a->has_residual || ps_aligned(l->ptr[3])) &&
                     (!a->has_bias || ps_aligned(l->ptr[bias]));
  PS_DISPATCH(
      a->dt, whole,
      (combine_k<T, V><<<a->n_tokens, threads_for(ps_ceil_div(a->dim, V)), 0, stream_of(l)>>>(
          (const T *)l->ptr[0], (const int32_t *)l->ptr[1], (T *)l->ptr[2],
          a->has_residual ? (const T *)l->ptr[3] : NULL, a->dim, a->n_used, a->accumulate,
          a->has_bias ? (const T *)l->ptr[bias] : NULL,
          a->has_bias ? (const float *)l->ptr[bias + 1] : NULL,
          a->has_bias ? (const uint16_t *)l->ptr[bias + 2] : NULL)));
  return ps_launched("moe_combine", cudaSuccess);
}

static ps_status check_glu(const ps_launch *l, const char *op, uint32_t n_ptr) {
  const ps__args_moe_glu *a = (const ps__args_moe_glu *)l->args;
  return ps_check(l, op, n_ptr, a->dt, 0);
}

/* moe_glu
 * math    s = w act(g) u, act as glu_fwd's
 * bytes   3*R*I*sizeof(dt) of HBM; 32768 tokens, k 8, I 768, bf16 -> 1.2 GB: 422 us
 *         on an H100
 * determinism  bitwise: elementwise.   reference  the cpu backend's, 1 ulp of bf16; fp32 8 ulp */
extern "C" ps_status ps__cuda_moe_glu(const ps_launch *l) {
  const ps__args_moe_glu *a = (const ps__args_moe_glu *)l->args;
  const ps_status st = check_glu(l, "moe_glu", 4);
  const uint32_t rows = a->n_tokens * a->n_used, f = a->expert_dim;
  if (st != PS_OK || !rows || !f)
    return st;
  const bool whole = ps_whole(a->dt, f) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[3]);
  PS_DISPATCH(a->dt, whole,
              const auto kernel = a->activation == PS_ACTIVATION_SILU ? moe_glu_k<T, V, false>
                                                                      : moe_glu_k<T, V, true>;
              kernel<<<ps_ceil_div(rows, WARPS), THREADS, 0, stream_of(l)>>>(
                  (const T *)l->ptr[0], (const float *)l->ptr[1], (const int32_t *)l->ptr[2],
                  (T *)l->ptr[3], rows, f));
  return ps_launched("moe_glu", cudaSuccess);
}

/* moe_glu_bwd
 * math    dweights = <ds, act(g) u>, a lane's products in order, then a butterfly over the warp; gu
 *         becomes the gradient of w act(g) u, and ds that itself, with moe_glu's bits
 * bytes   6*R*I*sizeof(dt) of HBM; 32768 tokens, k 8, I 768, bf16 -> 2.4 GB: 861 us
 *         on an H100
 * determinism  bitwise.   reference  the cpu backend's, as glu_bwd's */
extern "C" ps_status ps__cuda_moe_glu_bwd(const ps_launch *l) {
  const ps__args_moe_glu *a = (const ps__args_moe_glu *)l->args;
  const ps_status st = check_glu(l, "moe_glu_bwd", 5);
  const uint32_t rows = a->n_tokens * a->n_used, f = a->expert_dim;
  if (st != PS_OK || !rows || !f)
    return st;
  const bool whole = ps_whole(a->dt, f) && all_aligned(l, 2);
  PS_DISPATCH(a->dt, whole,
              const auto kernel = a->activation == PS_ACTIVATION_SILU ? moe_glu_bwd_k<T, V, false>
                                                                      : moe_glu_bwd_k<T, V, true>;
              kernel<<<ps_ceil_div(rows, WARPS), THREADS, 0, stream_of(l)>>>(
                  (T *)l->ptr[0], (T *)l->ptr[1], (const float *)l->ptr[2],
                  (const int32_t *)l->ptr[3], (float *)l->ptr[4], rows, f));
  return ps_launched("moe_glu_bwd", cudaSuccess);
}

/* moe_scale
 * bytes   10*T*k, the factors from L2.   determinism  bitwise: elementwise
 * reference  the cpu backend's, equal */
extern "C" ps_status ps__cuda_moe_scale(const ps_launch *l) {
  const ps__args_moe_scale *a = (const ps__args_moe_scale *)l->args;
  const ps_status st = ps_check(l, "moe_scale", 4, a->dt, 0);
  const uint32_t rows = a->n_tokens * a->n_used;
  if (st != PS_OK || !rows)
    return st;
  PS_BY_TYPE(a->dt, scale_k<T><<<ps_ceil_div(rows, THREADS), THREADS, 0, stream_of(l)>>>(
                        (const float *)l->ptr[0], (const uint16_t *)l->ptr[1], (const T *)l->ptr[2],
                        (float *)l->ptr[3], rows));
  return ps_launched("moe_scale", cudaSuccess);
}

/* moe_scale_bwd
 * bytes   14*T*k of HBM; ids from L2, by every block.   determinism  bitwise: see scale_bwd_k
 * reference  the cpu backend's: sums in another order */
extern "C" ps_status ps__cuda_moe_scale_bwd(const ps_launch *l) {
  const ps__args_moe_scale *a = (const ps__args_moe_scale *)l->args;
  const ps_status st = ps_check(l, "moe_scale_bwd", 5, a->dt, 0);
  const uint32_t rows = a->n_tokens * a->n_used;
  if (st != PS_OK)
    return st;
  PS_BY_TYPE(a->dt, scale_bwd_k<T><<<a->n_experts, THREADS, 0, stream_of(l)>>>(
                        (const float *)l->ptr[0], (const uint16_t *)l->ptr[1], (const T *)l->ptr[2],
                        (float *)l->ptr[3], (T *)l->ptr[4], rows, a->accumulate));
  return ps_launched("moe_scale_bwd", cudaSuccess);
}
