/* conv.cu - short causal convolutions over rows, before the gated delta rule (delta.cu). */
#include "kernels/cuda/conv_ring.cuh"
#include "kernels/cuda/glu.cuh"

namespace {

enum { FWD_ROWS = 32, GRID_Y = 65535 /* most blocks in y */ };

/* W taps or fewer of V channels from c on: those of rows t-(W-1) .. t, the first of them 0 where
 * there are fewer, and the rows themselves. */
template <typename T, int V, int W> struct conv_window {
  float tap[W][V], x[W][V];
  __device__ __forceinline__ conv_window(const conv_job<T> &j, uint32_t c) {
    T own[V * W]; /* as they lie: W taps of each channel */
    if (V > 1 && (int)j.width == W) {
      constexpr int N = ps_full<T>;
#pragma unroll
      for (int i = 0; i < V * W; i += N)
        *(ps_vec<T, N> *)(own + i) = ps_load<T, N>(j.w + (size_t)c * W + i);
    } else {
#pragma unroll
      for (int i = 0; i < V * W; i++) {
        const int of = i % W - (W - (int)j.width);
        own[i] = of < 0 ? ps_from_f32<T>(0.0f) : j.w[(size_t)(c + i / W) * j.width + of];
      }
    }
#pragma unroll
    for (int i = 0; i < V * W; i++) {
      tap[i % W][i / W] = ps_to_f32(own[i]);
      x[i % W][i / W] = 0.0f;
    }
  }
  __device__ __forceinline__ void shift() {
#pragma unroll
    for (int k = 0; k + 1 < W; k++)
#pragma unroll
      for (int e = 0; e < V; e++)
        x[k][e] = x[k + 1][e];
  }
  /* @row becomes the last. */
  __device__ __forceinline__ void enter(const ps_vec<T, V> &row) {
    shift();
    ps_unpack<T, V>(x[W - 1], row);
  }
  /* Row t, which may be of the chunk before, becomes the last. */
  __device__ __forceinline__ void enter(const conv_job<T> &j, int64_t t, uint32_t c) {
    const int64_t before = t + (int64_t)j.width - 1;
    shift();
    if (t >= 0)
      ps_read<T, V>(x[W - 1], j.x + (size_t)t * j.channels + c);
    else if (before >= 0 && j.row0)
      ps_read<T, V>(x[W - 1], j.before + (size_t)before * j.channels + c);
    else
#pragma unroll
      for (int e = 0; e < V; e++)
        x[W - 1][e] = 0.0f;
  }
  /* The rows before row t that it sees, at most width-1. @first: doc_start[t]. */
  static __device__ __forceinline__ int reach(const conv_job<T> &j, int64_t t, int32_t first) {
    return (int)min(t + (int64_t)j.row0 - first, (int64_t)j.width - 1);
  }
  /* Does a row see what tap k of W takes? */
  static __device__ __forceinline__ bool sees(int reach, int k) { return W - 1 - k <= reach; }
  __device__ __forceinline__ void sum(float (&p)[V], int reach) const {
#pragma unroll
    for (int e = 0; e < V; e++)
      p[e] = 0.0f;
#pragma unroll
    for (int k = 0; k < W; k++)
      if (sees(reach, k))
#pragma unroll
        for (int e = 0; e < V; e++)
          p[e] = fmaf(tap[k][e], x[k][e], p[e]);
  }
  /* The same sum where a row sees all of W taps. */
  __device__ __forceinline__ void sum(float (&p)[V]) const {
#pragma unroll
    for (int e = 0; e < V; e++) {
      p[e] = fmaf(tap[0][e], x[0][e], 0.0f);
#pragma unroll
      for (int k = 1; k < W; k++)
        p[e] = fmaf(tap[k][e], x[k][e], p[e]);
    }
  }
  /* The gradient of @p of the last row that entered, from that of y. */
  static __device__ __forceinline__ void slope_of(float (&ds)[V], const float (&p)[V],
                                                  const ps_vec<T, V> &dy) {
    ps_unpack<T, V>(ds, dy);
#pragma unroll
    for (int e = 0; e < V; e++) {
      const float s = sig<T>(p[e]);
      ds[e] *= s * (1.0f + p[e] * (1.0f - s));
    }
  }
  __device__ __forceinline__ void slope(float (&ds)[V], int reach, const ps_vec<T, V> &dy) const {
    float p[V];
    sum(p, reach);
    slope_of(ds, p, dy);
  }
};

/* A thread V channels of a tile of rows. */
template <typename T, int V, int W>
__global__ void __launch_bounds__(THREADS, W > 4 || sizeof(T) > 2 ? 1 : 2)
    conv_fwd_k(const conv_job<T> j) {
  const uint32_t c = (blockIdx.x * THREADS + threadIdx.x) * V;
  const int32_t first = (int32_t)(blockIdx.y * j.tile),
                end = (int32_t)min(blockIdx.y * j.tile + j.tile, j.rows);
  if (c >= j.channels)
    return;
  conv_window<T, V, W> win(j, c);
  conv_rows<T, V, W, false> rows(j, first, end, c);
  for (int32_t t = first - (W - 1); t < first; t++)
    win.enter(j, t, c);
  for (int32_t begin = first; begin < end; begin += AHEAD) {
    rows.advance(j, end, c);
    T *to = j.y + (size_t)begin * j.channels + c;
    const auto give = [&](int i, float (&p)[V]) {
#pragma unroll
      for (int e = 0; e < V; e++)
        p[e] *= sig<T>(p[e]);
      ps_store<T, V>(to + (size_t)i * j.channels, p);
    };
    if (rows.whole(j, end)) {
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        float p[V];
        win.enter(rows.now.x[i]);
        win.sum(p);
        give(i, p);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      float p[V];
      if (begin + i >= end)
        break;
      win.enter(rows.now.x[i]);
      win.sum(p, win.reach(j, begin + i, rows.now.doc[i]));
      give(i, p);
    }
  }
}

/* after: the last W-1 rows of those before the chunk and the chunk's. */
template <typename T>
__global__ void __launch_bounds__(THREADS) conv_tail_k(const conv_job<T> j, T *after) {
  const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
  const uint32_t c = (uint32_t)(i % j.channels);
  const int64_t row = (int64_t)(i / j.channels), t = (int64_t)j.rows - (j.width - 1) + row;
  if (row >= (int64_t)j.width - 1)
    return;
  after[i] = t >= 0   ? j.x[(size_t)t * j.channels + c]
             : j.row0 ? j.before[(size_t)(row + j.rows) * j.channels + c]
                      : ps_from_f32<T>(0.0f);
}

/* A thread V channels of a tile of rows. Row u gives its gradient ds to the rows that it sees, the
 * last of which is complete W-1 rows later: rows behind the tile are computed once more. */
template <typename T, int V, int W>
__global__ void __launch_bounds__(THREADS, W > 4 || sizeof(T) > 2 ? 1 : 2)
    conv_bwd_k(const conv_job<T> j) {
  const uint32_t c = (blockIdx.x * THREADS + threadIdx.x) * V;
  const int32_t first = (int32_t)(blockIdx.y * j.tile),
                end = (int32_t)min(blockIdx.y * j.tile + j.tile, j.rows),
                behind = min(end + W - 1, (int32_t)j.rows);
  float dw[W][V] = {}, sum[W][V] = {}; /* sum[i]: so far of the gradient of row u-(W-1)+i */
  if (c >= j.channels)
    return;
  conv_window<T, V, W> win(j, c);
  conv_rows<T, V, W, true> rows(j, first, behind, c);
  for (int32_t u = first - (W - 1); u < first; u++)
    win.enter(j, u, c);
  const auto shift = [&] {
#pragma unroll
    for (int k = 0; k < W; k++)
#pragma unroll
      for (int e = 0; e < V; e++)
        sum[k][e] = k + 1 < W ? sum[k + 1][e] : 0.0f;
  };
  for (int32_t begin = first; begin < end + W - 1; begin += AHEAD) {
    rows.advance(j, behind, c);
    if (begin - (W - 1) >= first && rows.whole(j, end)) {
      T *to = j.dx + (size_t)(begin - (W - 1)) * j.channels + c;
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        float p[V], ds[V];
        win.enter(rows.now.x[i]);
        win.sum(p);
        win.slope_of(ds, p, rows.now.dy[i]);
#pragma unroll
        for (int k = 0; k < W; k++)
#pragma unroll
          for (int e = 0; e < V; e++) {
            sum[k][e] = fmaf(win.tap[k][e], ds[e], sum[k][e]);
            dw[k][e] = fmaf(ds[e], win.x[k][e], dw[k][e]);
          }
        ps_store<T, V>(to + (size_t)i * j.channels, sum[0]);
        shift();
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int32_t u = begin + i, t = u - (W - 1),
                    next = t - ((int32_t)j.rows - ((int32_t)j.width - 1));
      if (u >= end + W - 1)
        break;
      if (u < (int32_t)j.rows) {
        float ds[V];
        const int reach = win.reach(j, u, rows.now.doc[i]);
        win.enter(rows.now.x[i]);
        win.slope(ds, reach, rows.now.dy[i]);
#pragma unroll
        for (int k = 0; k < W; k++)
          if (win.sees(reach, k))
#pragma unroll
            for (int e = 0; e < V; e++) {
              sum[k][e] = fmaf(win.tap[k][e], ds[e], sum[k][e]);
              if (u < end)
                dw[k][e] = fmaf(ds[e], win.x[k][e], dw[k][e]);
            }
      }
      if (t >= first && t < end) {
        if (next >= 0 && j.carry)
#pragma unroll
          for (int e = 0; e < V; e++)
            sum[0][e] += j.carry[(size_t)next * j.channels + c + e];
        ps_store<T, V>(j.dx + (size_t)t * j.channels + c, sum[0]);
      }
      shift();
    }
  }
  float *to = j.partial + ((size_t)blockIdx.y * j.channels + c) * j.width;
  if (W == 4 && j.width == 4) {
#pragma unroll
    for (int e = 0; e < V; e++)
      ps_put_f32<4>(to + e * 4, {dw[0][e], dw[1][e], dw[2][e], dw[3][e]});
    return;
  }
#pragma unroll
  for (int k = 0; k < W; k++)
#pragma unroll
    for (int e = 0; e < V; e++)
      if (k >= W - (int)j.width)
        to[(size_t)e * j.width + k - (W - (int)j.width)] = dw[k][e];
}

/* A thread a channel: carry, from the gradient of the rows behind the chunk to that of the rows
 * before it. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv_carry_k(const conv_job<T> j, float *carry, bool has_carry) {
  constexpr int W = PS_MAX_CONV;
  const uint32_t c = blockIdx.x * THREADS + threadIdx.x;
  float sum[2 * W - 1] = {}; /* of rows -(W-1) .. W-1 */
  if (c >= j.channels)
    return;
  conv_window<T, 1, W> win(j, c);
  for (int64_t u = -(W - 1); u < 0; u++)
    win.enter(j, u, c);
#pragma unroll
  for (int u = 0; u < W - 1; u++) {
    if (u >= (int)j.width - 1 || u >= (int64_t)j.rows)
      break;
    const int reach = win.reach(j, u, j.doc_start[u]);
    float ds[1];
    win.enter(j, u, c);
    win.slope(ds, reach, ps_load<T, 1>(j.dy + (size_t)u * j.channels + c));
#pragma unroll
    for (int k = 0; k < W; k++)
      if (win.sees(reach, k))
        sum[u + k] = fmaf(win.tap[k][0], ds[0], sum[u + k]);
  }
  float old[W - 1];
#pragma unroll
  for (int i = 0; i < W - 1; i++) {
    const int64_t next = (int64_t)i - (int64_t)j.rows;
    old[i] = i < (int)j.width - 1 && has_carry && next >= 0 ? carry[(size_t)next * j.channels + c]
                                                            : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < W - 1; i++)
    if (i >= W - (int)j.width) { /* row i-(W-1) is row i-(W-width) of carry */
      const int to = i - (W - (int)j.width);
      float back = 0.0f;
#pragma unroll
      for (int k = 0; k < W - 1; k++)
        back = k == to ? old[k] : back;
      carry[(size_t)to * j.channels + c] = sum[i] + back;
    }
}

template <typename T> conv_job<T> conv_job_of(const ps_launch *l) {
  const ps__args_conv *a = (const ps__args_conv *)l->args;
  conv_job<T> j = {};
  j.x = (const T *)l->ptr[0];
  j.w = (const T *)l->ptr[1];
  j.doc_start = (const int32_t *)l->ptr[2];
  j.before = (const T *)l->ptr[3];
  j.rows = a->n_tokens;
  j.row0 = a->row0;
  j.channels = a->channels;
  j.width = a->width;
  return j;
}

template <typename T, int V> cudaError_t conv_fwd_of(const ps_launch *l) {
  conv_job<T> j = conv_job_of<T>(l);
  cudaStream_t stream = ps_stream_of(l);
  const uint32_t least = ps_ceil_div(j.rows, GRID_Y);
  j.tile = least > FWD_ROWS ? least : FWD_ROWS;
  const dim3 grid(ps_ceil_div(j.channels, THREADS * V), ps_ceil_div(j.rows, j.tile));
  j.y = (T *)l->ptr[4];
  if (j.width <= 4)
    conv_fwd_k<T, V, 4><<<grid, THREADS, 0, stream>>>(j);
  else
    conv_fwd_k<T, V, PS_MAX_CONV><<<grid, THREADS, 0, stream>>>(j);
  conv_tail_k<T>
      <<<ps_ceil_div((uint64_t)(j.width - 1) * j.channels, THREADS), THREADS, 0, stream>>>(
          j, (T *)l->ptr[5]);
  return cudaGetLastError();
}

template <typename T, int V> cudaError_t conv_bwd_of(const ps_launch *l) {
  const ps__args_conv *a = (const ps__args_conv *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  conv_job<T> j = conv_job_of<T>(l);
  const uint32_t n = ps_n_row_tiles(j.rows, PS_CONV_TILES);
  const dim3 grid(ps_ceil_div(j.channels, THREADS * V), n);
  j.dy = (const T *)l->ptr[4];
  j.carry = a->accumulate_carry ? (const float *)l->ptr[5] : nullptr;
  j.dx = (T *)l->ptr[6];
  j.partial = (float *)exec->scratch;
  j.tile = ps_row_tile_rows(j.rows, PS_CONV_TILES);
  if (j.width <= 4)
    conv_bwd_k<T, V, 4><<<grid, THREADS, 0, exec->stream>>>(j);
  else
    conv_bwd_k<T, V, PS_MAX_CONV><<<grid, THREADS, 0, exec->stream>>>(j);
  /* after conv_bwd_k, which reads what it replaces */
  conv_carry_k<T><<<ps_ceil_div(j.channels, THREADS), THREADS, 0, exec->stream>>>(
      j, (float *)l->ptr[5], a->accumulate_carry != 0);
  const cudaError_t e = cudaGetLastError();
  return e != cudaSuccess
             ? e
             : ps_add_partials(exec->stream, l->ptr[7], a->dt, j.partial, n, j.channels * j.width,
                               j.channels * j.width, a->accumulate_dw != 0);
}

/* ---- of several sequences -------------------------------------------------------------------- */

template <typename T> struct conv_cached_job {
  const T *x, *w;
  const int32_t *sequence, *pos;
  T *y, *cache;
  uint32_t rows, channels, width;

  __device__ __forceinline__ bool continues(uint32_t t) const {
    return t && pos[t] > 0 && pos[t - 1] == pos[t] - 1 && sequence[t - 1] == sequence[t];
  }
  __device__ __forceinline__ T *cache_of(uint32_t t, uint32_t c) const {
    return cache + (size_t)sequence[t] * (width - 1) * channels + c;
  }
};

/* A thread a channel of a row. */
template <typename T>
__global__ void __launch_bounds__(THREADS) conv_cached_k(const conv_cached_job<T> j) {
  const uint32_t c = blockIdx.y * THREADS + threadIdx.x, t = blockIdx.x, tail = j.width - 1;
  float p = 0.0f;
  uint32_t here = 0; /* rows of the sequence before t that the call has, at most W-1 */
  if (c >= j.channels)
    return;
  while (here < tail && j.continues(t - here))
    here++;
  for (uint32_t k = 0; j.pos[t] >= 0 && k < j.width; k++) {
    const uint32_t back = tail - k; /* the row so many before t, of the call or the cache */
    if ((int64_t)j.pos[t] - back < 0)
      continue;
    const T x = back <= here ? j.x[(size_t)(t - back) * j.channels + c]
                             : j.cache_of(t, c)[(size_t)(tail + here - back) * j.channels];
    p = fmaf(ps_to_f32(j.w[(size_t)c * j.width + k]), ps_to_f32(x), p);
  }
  j.y[(size_t)t * j.channels + c] = ps_from_f32<T>(p * sig<T>(p));
}

/* A thread a channel of a sequence's last row: its rows enter the cache. */
template <typename T>
__global__ void __launch_bounds__(THREADS) conv_cached_tail_k(const conv_cached_job<T> j) {
  const uint32_t c = blockIdx.y * THREADS + threadIdx.x, t = blockIdx.x, tail = j.width - 1;
  uint32_t n = 1; /* rows that enter, at most W-1 */
  if (c >= j.channels || j.pos[t] < 0 || (t + 1 < j.rows && j.continues(t + 1)))
    return;
  while (n < tail && j.continues(t + 1 - n))
    n++;
  T *cache = j.cache_of(t, c);
  for (uint32_t i = 0; i < tail; i++)
    cache[(size_t)i * j.channels] = i + n < tail
                                        ? cache[(size_t)(i + n) * j.channels]
                                        : j.x[(size_t)(t - (tail - 1 - i)) * j.channels + c];
}

template <typename T> cudaError_t conv_cached_of(const ps_launch *l) {
  const ps__args_conv *a = (const ps__args_conv *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const conv_cached_job<T> j = {(const T *)l->ptr[0],
                                (const T *)l->ptr[1],
                                (const int32_t *)l->ptr[2],
                                (const int32_t *)l->ptr[4],
                                (T *)l->ptr[3],
                                (T *)l->ptr[5],
                                a->n_tokens,
                                a->channels,
                                a->width};
  const dim3 grid(a->n_tokens, ps_ceil_div(a->channels, THREADS));
  conv_cached_k<T><<<grid, THREADS, 0, exec->stream>>>(j);
  conv_cached_tail_k<T><<<grid, THREADS, 0, exec->stream>>>(j);
  return cudaGetLastError();
}

} // namespace

/* conv_fwd
 * math    p[t,c] = sum_k w[c,k] x[t-(W-1)+k,c], k ascending, y = silu(p); fp32 inside, one rounding
 *         at the store
 * shapes  x, y [T,C], w [C,W], before and after [W-1,C], all of dt
 * bytes   2*T*C*sizeof(dt) of HBM, and 3 rows in 32 again; 8192 x 8192 bf16 -> 268 MB, 56 us at 4.8
 *         TB/s
 * determinism  bitwise: each element alone.   reference  the cpu backend's */
extern "C" ps_status ps__cuda_conv_fwd(const ps_launch *l) {
  const ps__args_conv *a = (const ps__args_conv *)l->args;
  const ps_status st = ps_check(l, "conv_fwd", 6, a->dt, 0);
  if (st != PS_OK)
    return st;
  cudaError_t e = cudaSuccess;
  PS_DISPATCH(a->dt, ps_whole(a->dt, a->channels) && ps_all_aligned(l, 5),
              e = (conv_fwd_of<T, V>(l)));
  return ps_launched("conv_fwd", e);
}

/* conv_bwd
 * math    ds = dy silu'(p), p again; dx[t] = sum_k w[k] ds[t+(W-1)-k] over rows that see t, those
 *         of the next chunk in carry; dw[k] (+)= sum_t ds[t] x[t-(W-1)+k]
 * shapes  as conv_fwd; carry f32 [W-1,C]
 * bytes   3*T*C*sizeof(dt) of HBM, W-1 rows of a tile again; 8192 x 8192 bf16 -> 403 MB, 84 us at
 *         4.8 TB/s; scratch: at most 64 tiles * C*W fp32
 * determinism  bitwise: dw by tiles of rows, then the tiles in a fixed order.
 * reference    the cpu backend's; dw within rows * 2^-24 * sum |ds x| */
extern "C" ps_status ps__cuda_conv_bwd(const ps_launch *l) {
  const ps__args_conv *a = (const ps__args_conv *)l->args;
  const ps_status st = ps_check(l, "conv_bwd", 8, a->dt, ps_scratch_conv_bwd(a, NULL));
  if (st != PS_OK)
    return st;
  cudaError_t e = cudaSuccess;
  const bool fours = a->channels % 4 == 0 && ps_all_aligned(l, 7);
  PS_BY_TYPE(a->dt, e = fours ? conv_bwd_of<T, 4>(l) : conv_bwd_of<T, 1>(l));
  return ps_launched("conv_bwd", e);
}

/* conv_cached
 * math    conv_fwd's, the rows before those of the call from the cache
 * shapes  x, y [T,C], w [C,W], cache [sequences,W-1,C], all of dt
 * bytes   2*T*C*sizeof(dt) of HBM, rows again W times from L2; the cache of each sequence twice
 * determinism  bitwise: each element alone.   reference  the cpu backend's */
extern "C" ps_status ps__cuda_conv_cached(const ps_launch *l) {
  const ps__args_conv *a = (const ps__args_conv *)l->args;
  const ps_status st = ps_check(l, "conv_cached", 6, a->dt, 0);
  if (st != PS_OK)
    return st;
  cudaError_t e = cudaSuccess;
  PS_BY_TYPE(a->dt, e = conv_cached_of<T>(l));
  return ps_launched("conv_cached", e);
}
