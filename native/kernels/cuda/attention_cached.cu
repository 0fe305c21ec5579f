/* attention_cached.cu - attention of a step's rows against each sequence's keys and values so far.
 *
 * A block has one row, one kv head and up to ps_cached_heads() of the heads that share it, and one
 * part of the keys that the row sees. A group of lanes takes a key, EACH elements a lane, so a
 * key is read once for all its heads and with whole 16-byte loads. Every group has an online
 * softmax of its own. The groups' sums are added in the order of groups, the parts' in the order
 * of parts.
 *
 * bytes    2 * keys * head_dim * dt for each row and kv head: 4,096 keys, 8 kv heads of 128 in bf16
 *          are 16.8 MB, 3.5 us at 4.8 TB/s. Many rows of one sequence (a prompt) read the same
 *          keys, from the L2 cache; no tensor cores.
 * rate     bound by HBM while few rows have long caches; bench/generate.py measures it
 * determinism  bitwise: no atomics, parts by shape alone
 * reference    the cpu backend's: tests/native/op_cases.c */
#include "kernels/cuda/cuda_common.cuh"
#include <math.h>

enum { THREADS = 128, KEYS = 2 }; /* KEYS: loads in flight a lane */

struct cached {
  const int32_t *sequence, *pos;
  float *lse, *part; /* part [parts][rows*heads][d + 2]: sums, maximum, sum of weights */
  uint32_t n_rows, heads, kv_heads, d, cache_rows, window, lanes, tiles, parts;
  float scale, cap;
};

/* Elements first .. first+EACH-1 of a head, zeros past its end. */
template <typename T, bool WHOLE, int EACH>
__device__ __forceinline__ void load_each(float (&x)[EACH], const T *p, int n) {
  if (WHOLE) {
    constexpr int V = ps_full<T>;
#pragma unroll
    for (int i = 0; i < EACH; i += V) {
      float part[V] = {};
      if (n > i)
        ps_read<T, V>(part, p + i);
#pragma unroll
      for (int e = 0; e < V; e++)
        x[i + e] = part[e];
    }
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      x[i] = i < n ? ps_to_f32(p[i]) : 0.0f;
  }
}

__device__ __forceinline__ float lanes_sum(float x, uint32_t lanes) {
  for (uint32_t w = lanes / 2; w > 0; w /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, w);
  return x;
}
/* 2^(x - top), 0 where there is nothing. */
__device__ __forceinline__ float weight(float x, float top) {
  return x == -INFINITY ? 0.0f : exp2f(x - top);
}

/* cache[sequence, pos] = kv; a thread V elements. */
template <typename T, int V> __global__ void append_k(T *cache, const T *kv, const cached c) {
  const uint32_t width = 2 * c.kv_heads * c.d;
  const uint64_t i = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * V;
  const uint64_t row = i / width;
  if (row >= c.n_rows || c.pos[row] < 0)
    return;
  const uint64_t to = ((uint64_t)c.sequence[row] * c.cache_rows + (uint32_t)c.pos[row]) * width;
  ps_put<T, V>(cache + to + i % width, ps_load<T, V>(kv + i));
}

template <typename T, int HEADS, bool WHOLE, int EACH>
__global__ void __launch_bounds__(THREADS)
    attend_k(T *out, const T *q, const T *cache, const cached c) {
  __shared__ float sums[HEADS][EACH * THREADS], tops[HEADS][THREADS], weights[HEADS][THREADS];
  const uint32_t group = c.heads / c.kv_heads, tile = blockIdx.x % c.tiles,
                 kv_head = blockIdx.x / c.tiles % c.kv_heads,
                 row = blockIdx.x / c.tiles / c.kv_heads, h0 = tile * HEADS,
                 n_heads = min((uint32_t)HEADS, group - h0);
  const uint32_t n_groups = THREADS / c.lanes, g = threadIdx.x / c.lanes,
                 first = threadIdx.x % c.lanes * EACH;
  const int n = (int)c.d - (int)first; /* of this lane's elements there are so many */
  const int pos = c.pos[row];
  const uint32_t end = (uint32_t)(pos + 1), from = end > c.window ? end - c.window : 0,
                 each = ((end - from + c.parts - 1) / c.parts + 31) / 32 * 32,
                 k0 = min(from + blockIdx.y * each, end), k1 = min(k0 + each, end);
  float query[HEADS][EACH], sum[HEADS][EACH] = {}, top[HEADS], total[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const uint32_t head = kv_head * group + h0 + ((uint32_t)h < n_heads ? h : 0);
    load_each<T, WHOLE, EACH>(query[h],
                              q + ((size_t)row * c.heads + head) * c.d + (n > 0 ? first : 0), n);
    top[h] = -INFINITY;
    total[h] = 0.0f;
  }
  const size_t width = 2 * (size_t)c.kv_heads * c.d;
  const T *keys = cache + (size_t)max(c.sequence[row], 0) * c.cache_rows * width +
                  (size_t)kv_head * c.d + (n > 0 ? first : 0);
  /* all lanes of a warp go round together: the sums over lanes need them */
  for (uint32_t k = k0; k < k1; k += n_groups * KEYS) {
    float key[KEYS][EACH], value[KEYS][EACH];
    bool there[KEYS];
#pragma unroll
    for (int u = 0; u < KEYS; u++) {
      const uint32_t at = k + u * n_groups + g;
      there[u] = at < k1;
      const T *p = keys + (size_t)(there[u] ? at : k0) * width;
      load_each<T, WHOLE, EACH>(key[u], p, n);
      load_each<T, WHOLE, EACH>(value[u], p + (size_t)c.kv_heads * c.d, n);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      float s[KEYS], high = top[h];
#pragma unroll
      for (int u = 0; u < KEYS; u++) {
        float x = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++)
          x += query[h][e] * key[u][e];
        x = lanes_sum(x, c.lanes) * c.scale;
        if (c.cap > 0.0f)
          x = c.cap * tanhf(x / c.cap);
        s[u] = there[u] ? x * 1.44269504f : -INFINITY;
        high = fmaxf(high, s[u]);
      }
      const float keep = weight(top[h], high);
      total[h] *= keep;
#pragma unroll
      for (int e = 0; e < EACH; e++)
        sum[h][e] *= keep;
#pragma unroll
      for (int u = 0; u < KEYS; u++) {
        const float w = weight(s[u], high);
        total[h] += w;
#pragma unroll
        for (int e = 0; e < EACH; e++)
          sum[h][e] += w * value[u][e];
      }
      top[h] = high;
    }
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
#pragma unroll
    for (int e = 0; e < EACH; e++)
      sums[h][(g * c.lanes + threadIdx.x % c.lanes) * EACH + e] = sum[h][e];
    if (first == 0)
      tops[h][g] = top[h], weights[h][g] = total[h];
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < n_heads * c.d; i += THREADS) {
    const uint32_t h = i / c.d, e = i % c.d, head = kv_head * group + h0 + h;
    float high = -INFINITY, all = 0.0f, x = 0.0f;
    for (uint32_t j = 0; j < n_groups; j++)
      high = fmaxf(high, tops[h][j]);
    for (uint32_t j = 0; j < n_groups; j++) {
      const float w = weight(tops[h][j], high);
      all += weights[h][j] * w;
      x += sums[h][j * c.lanes * EACH + e] * w;
    }
    const size_t at = (size_t)row * c.heads + head;
    if (c.parts > 1) {
      float *to = c.part + ((size_t)blockIdx.y * c.n_rows * c.heads + at) * (c.d + 2);
      to[e] = x;
      if (e == 0)
        to[c.d] = high, to[c.d + 1] = all;
    } else {
      out[at * c.d + e] = ps_from_f32<T>(pos < 0 ? 0.0f : x / all);
      if (e == 0)
        c.lse[at] = pos < 0 ? 0.0f : (high + log2f(all)) * 0.693147181f;
    }
  }
}

/* A block a row and head: the parts' sums, in their order. */
template <typename T> __global__ void combine_k(T *out, const cached c) {
  const size_t at = blockIdx.x, n = (size_t)c.n_rows * c.heads;
  const bool none = c.pos[at / c.heads] < 0;
  float high = -INFINITY;
  for (uint32_t p = 0; p < c.parts; p++)
    high = fmaxf(high, c.part[(p * n + at) * (c.d + 2) + c.d]);
  for (uint32_t e = threadIdx.x; e < c.d; e += blockDim.x) {
    float all = 0.0f, x = 0.0f;
    for (uint32_t p = 0; p < c.parts; p++) {
      const float *from = c.part + (p * n + at) * (c.d + 2), w = weight(from[c.d], high);
      all += from[c.d + 1] * w;
      x += from[e] * w;
    }
    out[at * c.d + e] = ps_from_f32<T>(none ? 0.0f : x / all);
    if (e == 0)
      c.lse[at] = none ? 0.0f : (high + log2f(all)) * 0.693147181f;
  }
}

template <typename T, int HEADS, bool WHOLE, int EACH>
static void attend(cudaStream_t stream, const ps_launch *l, const cached &c) {
  T *cache = (T *)l->ptr[6], *out = (T *)l->ptr[3];
  const T *kv = (const T *)l->ptr[1];
  const uint64_t elements = (uint64_t)c.n_rows * 2 * c.kv_heads * c.d;
  constexpr int V = WHOLE ? ps_full<T> : 1;
  append_k<T, V><<<ps_ceil_div(elements, V * 256), 256, 0, stream>>>(cache, kv, c);
  attend_k<T, HEADS, WHOLE, EACH>
      <<<dim3(c.n_rows * c.kv_heads * c.tiles, c.parts), THREADS, 0, stream>>>(
          out, (const T *)l->ptr[0], cache, c);
  const uint32_t combining = c.d < 128 ? 64 : 128;
  if (c.parts > 1)
    combine_k<T><<<c.n_rows * c.heads, combining, 0, stream>>>(out, c);
}

template <typename T, bool WHOLE, int EACH>
static void by_heads(cudaStream_t stream, const ps_launch *l, const cached &c) {
  constexpr int MOST = 8 * PS_CACHED_HEADS / EACH; /* ps_cached_heads() */
  const uint32_t group = c.heads / c.kv_heads;
  if (group == 1)
    attend<T, 1, WHOLE, EACH>(stream, l, c);
  else if (group == 2)
    attend<T, 2, WHOLE, EACH>(stream, l, c);
  else if (group <= 4)
    attend<T, 4, WHOLE, EACH>(stream, l, c);
  else
    attend<T, MOST, WHOLE, EACH>(stream, l, c);
}

template <typename T, bool WHOLE>
static void by_width(cudaStream_t stream, const ps_launch *l, const cached &c) {
  if (c.d > PS_CACHED_WIDE)
    by_heads<T, WHOLE, 16>(stream, l, c);
  else
    by_heads<T, WHOLE, 8>(stream, l, c);
}

extern "C" ps_status ps__cuda_attention_cached(const ps_launch *l) {
  const ps__args_attention *a = (const ps__args_attention *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  if (a->head_dim > 2 * PS_CACHED_WIDE)
    return ps__fail(PS_EINVAL, "attention_cached: head_dim is %u: at most %d on CUDA", a->head_dim,
                    2 * PS_CACHED_WIDE);
  const ps_status st =
      ps_check(l, "attention_cached", 7, a->dt, ps_scratch_attention_cached(a, nullptr));
  if (st != PS_OK)
    return st;
  cached c = {(const int32_t *)l->ptr[2],
              (const int32_t *)l->ptr[5],
              (float *)l->ptr[4],
              (float *)exec->scratch,
              a->n_tokens,
              a->n_heads,
              a->n_kv_heads,
              a->head_dim,
              a->sequence_rows,
              a->window ? a->window : UINT32_MAX,
              1,
              ps_cached_tiles(a),
              ps_cached_parts(a),
              ps__attention_scale(a),
              a->softcap};
  const uint32_t each = c.d > PS_CACHED_WIDE ? 16 : 8;
  while (c.lanes * each < c.d)
    c.lanes *= 2;
  const bool whole =
      c.d % 8 == 0 && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[1]) && ps_aligned(l->ptr[6]);
  PS_BY_TYPE(a->dt, if (whole) by_width<T, true>(exec->stream, l, c);
             else by_width<T, false>(exec->stream, l, c));
  return ps_launched("attention_cached", cudaSuccess);
}
