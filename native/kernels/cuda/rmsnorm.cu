/* rmsnorm.cu - RMSNorm over rows, forward, quantized and backward (Zhang & Sennrich 2019, arXiv
 * 1910.07467). */
#include "kernels/cuda/quantize.cuh"

enum { FWD_THREADS = 256, FWD_KEEP = 4, ANY_THREADS = 512 };

/* A row of @cols elements at @x, by a block: use(v, i, rstd) for each vector of V elements from i
 * on. The first FWD_KEEP vectors of each thread stay in registers between the sum and the use.
 * Returns rstd. */
template <typename T, int V, typename USE>
__device__ __forceinline__ float norm_row(const T *x, uint32_t cols, float eps, USE use) {
  __shared__ float shared[1][32];
  ps_vec<T, V> keep[FWD_KEEP];
  float sum[1] = {0.0f}, v[V];
#pragma unroll
  for (int k = 0; k < FWD_KEEP; k++) {
    const uint32_t i = (k * FWD_THREADS + threadIdx.x) * V;
    if (i < cols)
      keep[k] = ps_load<T, V>(x + i);
  }
#pragma unroll
  for (int k = 0; k < FWD_KEEP; k++) {
    if ((k * FWD_THREADS + threadIdx.x) * V >= cols)
      break;
    ps_unpack<T, V>(v, keep[k]);
#pragma unroll
    for (int e = 0; e < V; e++)
      sum[0] += v[e] * v[e];
  }
  for (uint32_t i = (FWD_KEEP * FWD_THREADS + threadIdx.x) * V; i < cols; i += FWD_THREADS * V) {
    ps_read<T, V>(v, x + i);
#pragma unroll
    for (int e = 0; e < V; e++)
      sum[0] += v[e] * v[e];
  }
  ps_block_sum<1>(sum, shared);
  const float rstd = 1.0f / sqrtf(sum[0] / (float)cols + eps);
#pragma unroll
  for (int k = 0; k < FWD_KEEP; k++) {
    const uint32_t i = (k * FWD_THREADS + threadIdx.x) * V;
    if (i >= cols)
      break;
    ps_unpack<T, V>(v, keep[k]);
    use(v, i, rstd);
  }
  for (uint32_t i = (FWD_KEEP * FWD_THREADS + threadIdx.x) * V; i < cols; i += FWD_THREADS * V) {
    ps_read<T, V>(v, x + i);
    use(v, i, rstd);
  }
  return rstd;
}

/* An element of y. */
__device__ __forceinline__ float normed(float x, float rstd, float w, float offset) {
  return x * rstd * (w + offset);
}

/* A block a row. */
template <typename T, int V, bool RESIDUAL>
__global__ void __launch_bounds__(FWD_THREADS)
    rmsnorm_fwd_k(const T *x, const T *w, T *y, const T *residual, uint32_t cols, float eps,
                  float offset) {
  const size_t row = (size_t)blockIdx.x * cols;
  norm_row<T, V>(x + row, cols, eps, [&](float (&v)[V], uint32_t i, float rstd) {
    float g[V], r[V];
    ps_read<T, V>(g, w + i);
    if constexpr (RESIDUAL)
      ps_read<T, V>(r, residual + row + i);
#pragma unroll
    for (int e = 0; e < V; e++) {
      v[e] = normed(v[e], rstd, g[e], offset);
      if constexpr (RESIDUAL)
        v[e] += r[e];
    }
    ps_store<T, V>(y + row + i, v);
  });
}

/* rmsnorm_fwd
 * math    y[r,c] = x[r,c] * rstd[r] * (w[c] + weight_offset) (+ residual[r,c]), rstd[r] =
 *         1/sqrt(mean_c(x^2) + eps); fp32 inside, one rounding at the store
 * shapes  x, y, residual [rows,cols], w [cols], all of dt; y may not alias x
 * bytes   2 (with a residual 3) *rows*cols*sizeof(dt) of HBM; 8192 x 4096 bf16 -> 134 MB, 28 us
 *         at 4.8 TB/s
 * determinism  bitwise: a row is one block's, a thread's elements in order, then trees.
 * reference    the cpu backend's: fp32 within 1e-6 of the row's largest, bf16 1 ulp */
extern "C" ps_status ps__cuda_rmsnorm_fwd(const ps_launch *l) {
  const ps__args_rmsnorm *a = (const ps__args_rmsnorm *)l->args;
  const uint32_t n_ptr = a->has_residual ? 4 : 3;
  const ps_status st = ps_check(l, "rmsnorm_fwd", n_ptr, a->dt, 0);
  if (st != PS_OK || !a->rows || !a->cols)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  bool whole = ps_whole(a->dt, a->cols);
  for (uint32_t i = 0; i < n_ptr; i++)
    whole = whole && ps_aligned(l->ptr[i]);
  PS_DISPATCH(
      a->dt, whole,
      const auto kernel = a->has_residual ? rmsnorm_fwd_k<T, V, true> : rmsnorm_fwd_k<T, V, false>;
      kernel<<<a->rows, FWD_THREADS, 0, stream>>>((const T *)l->ptr[0], (const T *)l->ptr[1],
                                                  (T *)l->ptr[2],
                                                  a->has_residual ? (const T *)l->ptr[3] : nullptr,
                                                  a->cols, a->eps, ps_offset(a->weight_offset)));
  return ps_launched("rmsnorm_fwd", cudaSuccess);
}

/* ---- forward, quantized ---------------------------------------------------------------------- */

/* By one warp, the sum that ps_block_sum() takes over a block of eight: @sum[w] of a lane is what
 * the same lane of warp w would have. In each of the first three steps half of the lanes take half
 * of the warps. The tree is ps_block_sum()'s, and so are the bits. */
__device__ __forceinline__ float sum_of_eight(float (&sum)[8]) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t w = 16, n = 4; n > 0; w /= 2, n /= 2)
#pragma unroll
    for (uint32_t i = 0; i < n; i++) {
      const bool high = lane & w;
      const float give = high ? sum[i] : sum[n + i];
      sum[i] = (high ? sum[n + i] : sum[i]) + __shfl_xor_sync(0xffffffffu, give, w);
    }
  float x = sum[0]; /* of warp lane / 4 */
#pragma unroll
  for (uint32_t w = 2; w > 0; w /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, w);
#pragma unroll
  for (uint32_t w = 16; w > 2; w /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, w);
  return x;
}

__device__ __forceinline__ void eight_of(float (&x)[PS__PART_COLS], const uint4 &words) {
  union {
    uint4 words;
    ps_eight<__nv_bfloat16> x;
  } c = {words};
  ps_unpack8(x, c.x);
}

/* The amax of y, and rstd of each row for the second pass. A warp has a row of bf16 at a time. The
 * row's vectors are all on their way at once, at most WARP_VECTORS a lane, and no warp waits for
 * another. A warp takes several rows, as its block first puts w + offset in shared memory. */
enum { WARP_VECTORS = 16 };
__global__ void __launch_bounds__(FWD_THREADS, 2)
    norm_see_warps_k(const __nv_bfloat16 *x, const __nv_bfloat16 *w, float *rstds, uint32_t *amax,
                     uint32_t rows, uint32_t cols, float eps, float offset) {
  using T = __nv_bfloat16;
  constexpr uint32_t V = PS__PART_COLS, WARPS = FWD_THREADS / 32;
  extern __shared__ __align__(16) float weights[]; /* w + offset */
  const uint32_t lane = threadIdx.x % 32;
  uint32_t most = 0;
  uint4 keep[WARP_VECTORS]; /* words: as numbers, each zero would take a register */
  auto at = [&](uint32_t k) { return (k * 32 + lane) * V; };
  for (uint32_t i = threadIdx.x; i < cols / V; i += FWD_THREADS) {
    float g[V];
    ps_read<T, V>(g, w + i * V);
#pragma unroll
    for (uint32_t e = 0; e < V; e++)
      g[e] += offset;
    *(float4 *)(weights + i * V) = {g[0], g[1], g[2], g[3]};
    *(float4 *)(weights + i * V + 4) = {g[4], g[5], g[6], g[7]};
  }
  __syncthreads();
  for (uint32_t r = blockIdx.x * WARPS + threadIdx.x / 32; r < rows; r += gridDim.x * WARPS) {
    float sum[WARPS] = {}, v[V], g[V];
#pragma unroll
    for (uint32_t k = 0; k < WARP_VECTORS; k++) {
      keep[k] = {0, 0, 0, 0}; /* adds nothing */
      if (at(k) < cols)
        keep[k] = *(const uint4 *)(x + (size_t)r * cols + at(k));
    }
#pragma unroll
    for (uint32_t k = 0; k < WARP_VECTORS; k++) {
      eight_of(v, keep[k]);
#pragma unroll
      for (uint32_t e = 0; e < V; e++)
        sum[k % WARPS] += v[e] * v[e];
    }
    const float rstd = 1.0f / sqrtf(sum_of_eight(sum) / (float)cols + eps);
    if (lane == 0)
      rstds[r] = rstd;
#pragma unroll
    for (uint32_t k = 0; k < WARP_VECTORS; k++)
      if (at(k) < cols) {
        eight_of(v, keep[k]);
        ps_unpack8(g, ps_load8(weights + at(k)));
#pragma unroll
        for (uint32_t e = 0; e < V; e++)
          v[e] = v[e] * rstd * g[e];
        ps_see8<T>(&most, ps_round8<T>(v));
      }
  }
  ps_keep_amax(ps_amax_bits<T>(most), amax);
}

/* The same for any rows, a block a row. */
template <typename T>
__global__ void __launch_bounds__(FWD_THREADS)
    norm_see_k(const T *x, const T *w, float *rstds, uint32_t *amax, uint32_t cols, float eps,
               float offset) {
  constexpr int V = ps_full<T>;
  uint32_t most = 0;
  const float of_row = norm_row<T, V>(x + (size_t)blockIdx.x * cols, cols, eps,
                                      [&](float (&v)[V], uint32_t i, float rstd) {
                                        float g[V];
                                        ps_vec<T, V> y;
                                        ps_read<T, V>(g, w + i);
#pragma unroll
                                        for (int e = 0; e < V; e++)
                                          y.e[e] = ps_from_f32<T>(normed(v[e], rstd, g[e], offset));
                                        ps_see<T>(&most, y);
                                      });
  if (threadIdx.x == 0)
    rstds[blockIdx.x] = of_row;
  ps_keep_amax(ps_amax_bits<T>(most), amax);
}

/* y in the second pass. */
template <typename T> struct norm_output {
  using type = T;
  static constexpr bool ahead = true;
  struct part {
    ps_eight<T> x[PS__PART_ROWS], w;
    float rstd[PS__PART_ROWS];
  };
  const T *x, *w;
  const float *rstd;
  uint32_t cols;
  float offset;
  __device__ __forceinline__ void load(part &p, uint32_t row, uint32_t col) const {
#pragma unroll
    for (int i = 0; i < PS__PART_ROWS; i++)
      p.x[i] = ps_load8(x + (size_t)(row + i) * cols + col);
    p.w = ps_load8(w + col);
#pragma unroll
    for (int i = 0; i < PS__PART_ROWS; i++)
      p.rstd[i] = rstd[row + i];
  }
  __device__ __forceinline__ ps_eight<T> value(const part &p, int i) const {
    float y[PS__PART_COLS], g[PS__PART_COLS];
    ps_unpack8(y, p.x[i]);
    ps_unpack8(g, p.w);
#pragma unroll
    for (int e = 0; e < PS__PART_COLS; e++)
      y[e] = normed(y[e], p.rstd[i], g[e], offset);
    return ps_round8<T>(y);
  }
};

/* Rows that a warp takes: so many that loads of w count little, and so few that there are warps
 * enough for a GPU. 0 where a block a row is faster. */
static uint32_t warp_rows(const ps__args_rmsnorm *n) {
  const uint32_t most = WARP_VECTORS * 32 * PS__PART_COLS;
  if (n->dt != PS_BF16 || n->cols < most / 2 || n->cols > most)
    return 0;
  return n->rows >= 8192 ? 4 : n->rows >= 4096 ? 2 : 0;
}

template <typename T>
static cudaError_t norm_quantize(const ps_launch *l, const ps__args_rmsnorm_quantize *a,
                                 const ps_quantized &z) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps__args_rmsnorm *n = &a->norm;
  const T *x = (const T *)l->ptr[0], *w = (const T *)l->ptr[1];
  float *rstd = (float *)exec->scratch;
  cudaError_t e = ps_clear_amax(z.scale, exec->stream);
  if (e != cudaSuccess)
    return e;
  uint32_t *amax = (uint32_t *)z.scale + 1;
  const uint32_t each = warp_rows(n);
  if (each)
    norm_see_warps_k<<<ps_ceil_div(n->rows, each * FWD_THREADS / 32), FWD_THREADS,
                       n->cols * sizeof(float), exec->stream>>>(
        (const __nv_bfloat16 *)x, (const __nv_bfloat16 *)w, rstd, amax, n->rows, n->cols, n->eps,
        ps_offset(n->weight_offset));
  else
    norm_see_k<T><<<n->rows, FWD_THREADS, 0, exec->stream>>>(x, w, rstd, amax, n->cols, n->eps,
                                                             ps_offset(n->weight_offset));
  e = cudaGetLastError();
  return e != cudaSuccess
             ? e
             : ps_put_tiles(norm_output<T>{x, w, rstd, n->cols, ps_offset(n->weight_offset)}, z,
                            a->dt_q, exec->stream);
}

/* rmsnorm_quantize
 * math    y = rmsnorm_fwd(x, w), rounded to dt; scale = {ps__fp8_scale_bits(amax of y), amax of y};
 *         q[r,c] = qt[c,r] = y[r,c] / scale[0], rounded to nearest even. y has rmsnorm_fwd's bits
 *         on CUDA
 * shapes  x, q [rows,cols], qt [cols,rows], multiples of 16, w [cols]; no aliasing
 * bytes   an element: 2 of bf16 for amax, 2 for its code, 1 a form; scratch: rstd, 4 a row.
 *         8192 x 4096 bf16 in one form: 168 MB, 35 us at an H200's 4.8 TB/s, less what the second
 *         pass finds in L2; measured 48 us there in the form ROWS
 *         (bench/log/2026-11-21-cuda-memory-bound.md)
 * determinism  bitwise: a row's sum as rmsnorm_fwd's, a maximum and sums of whole numbers.
 * reference    the cpu backend's, whose sums have another order: y may be a neighbour in bf16, so
 *              amax too, and a code too; the scale differs where amax/1.75 is a power of two or
 *              just beyond one */
extern "C" ps_status ps__cuda_rmsnorm_quantize(const ps_launch *l) {
  const ps__args_rmsnorm_quantize *a = (const ps__args_rmsnorm_quantize *)l->args;
  const ps_status st = ps_check_fp8(l, "rmsnorm_quantize", 3 + ps_n_outputs(a->forms, a->count),
                                    1u << 2, a->count != 0, a->norm.rows, a->norm.cols, a->norm.dt,
                                    ps_scratch_rmsnorm_quantize(a, NULL));
  if (st != PS_OK)
    return st;
  uint32_t next = 2;
  ps_quantized z = ps_quantized_of(l, &next, a->norm.rows, a->norm.cols, a->forms);
  z.flushed = ps_flushed_of(l, next, a->count);
  cudaError_t e = cudaSuccess;
  PS_BY_TYPE(a->norm.dt, e = norm_quantize<T>(l, a, z));
  return ps_launched("rmsnorm_quantize", e);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Sums of two values over the block, in every thread: half a warp adds each; then the warps'
 * sums in order. Between two calls with the same array lies another with another array. */
template <int WARPS>
__device__ __forceinline__ void sum_two(float (&x)[2], float (*shared)[WARPS]) {
  const uint32_t lane = threadIdx.x % 32;
  const bool low = lane < 16;
  float mine = low ? x[0] : x[1];
  mine += __shfl_xor_sync(0xffffffffu, low ? x[1] : x[0], 16);
#pragma unroll
  for (int w = 8; w > 0; w /= 2)
    mine += __shfl_xor_sync(0xffffffffu, mine, w);
  if (lane % 16 == 0)
    shared[lane / 16][threadIdx.x / 32] = mine;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x[i] = shared[i][0];
#pragma unroll
    for (int w = 1; w < WARPS; w++)
      x[i] += shared[i][w];
  }
}

/* Bytes of a row in shared memory, and how many rows are there, with the one that is worked on:
 * four of at most 12 KiB, three of at most 24 KiB, else what 96 KiB hold. */
template <int THREADS, int NV, bool ADD>
constexpr int bwd_row_bytes = (ADD ? 3 : 2) * NV * THREADS * 16;
template <int THREADS, int NV, bool ADD>
constexpr int bwd_stages =
    bwd_row_bytes<THREADS, NV, ADD> > 24576   ? 98304 / bwd_row_bytes<THREADS, NV, ADD>
    : bwd_row_bytes<THREADS, NV, ADD> > 12288 ? 3
                                              : 4;

/* A block a tile of rows. Thread j owns the vectors j, j+THREADS, ... (NV of them) and keeps their
 * weights and their dw in registers. It copies its part of the next rows to shared memory in the
 * background. Past the end of a row it copies zeros, which then add nothing. */
template <typename T, int V, int THREADS, int NV, bool ADD>
__global__ void __launch_bounds__(THREADS, 512 / THREADS)
    rmsnorm_bwd_k(const T *x, const T *w, const T *dy, T *dx, float *partial, uint32_t rows,
                  uint32_t tile, uint32_t cols, float eps, float offset) {
  constexpr int ARRAYS = ADD ? 3 : 2, STAGES = bwd_stages<THREADS, NV, ADD>;
  extern __shared__ uint4 ring[]; /* [STAGES][ARRAYS][NV][THREADS] */
  __shared__ float shared[2][2][THREADS / 32];
  const uint32_t first = blockIdx.x * tile, end = min(first + tile, rows);
  auto slot = [&](uint32_t r, int array, int k) {
    return &ring[(((r - first) % STAGES * ARRAYS + array) * NV + k) * THREADS + threadIdx.x];
  };
  auto at = [&](int k) { return (k * THREADS + threadIdx.x) * V; };
  auto fetch = [&](uint32_t r) {
#pragma unroll
    for (int k = 0; k < NV; k++) {
      const bool there = r < end && at(k) < cols;
      const size_t i = there ? (size_t)r * cols + at(k) : 0;
      ps_copy_async(slot(r, 0, k), x + i, there);
      ps_copy_async(slot(r, 1, k), dy + i, there);
      if (ADD)
        ps_copy_async(slot(r, 2, k), dx + i, there);
    }
    ps_copy_commit();
  };
  auto held = [&](float (&to)[V], uint32_t r, int array, int k) {
    ps_read<T, V>(to, (const T *)slot(r, array, k));
  };
  float g[NV][V] = {}, dw[NV][V] = {};
  for (int k = 0; k < STAGES - 1; k++)
    fetch(first + k);
#pragma unroll
  for (int k = 0; k < NV; k++)
    if (at(k) < cols) {
      ps_read<T, V>(g[k], w + at(k));
#pragma unroll
      for (int e = 0; e < V; e++)
        g[k][e] += offset;
    }
  for (uint32_t r = first; r < end; r++) {
    float sum[2] = {0.0f, 0.0f}, v[NV][V], d[NV][V], both[NV][V];
    fetch(r + STAGES - 1);
    ps_copy_wait<STAGES - 1>();
#pragma unroll
    for (int k = 0; k < NV; k++) {
      held(v[k], r, 0, k);
      held(d[k], r, 1, k);
#pragma unroll
      for (int e = 0; e < V; e++) {
        both[k][e] = d[k][e] * v[k][e];
        sum[0] += v[k][e] * v[k][e];
        sum[1] += both[k][e] * g[k][e];
      }
    }
    sum_two<THREADS / 32>(sum, shared[(r - first) % 2]);
    /* rstd * mean(g*xh) * rstd */
    const float rstd = 1.0f / sqrtf(sum[0] / (float)cols + eps),
                back = sum[1] * rstd * rstd * rstd / (float)cols;
#pragma unroll
    for (int k = 0; k < NV; k++) {
      float o[V] = {};
      if (ADD)
        held(o, r, 2, k);
#pragma unroll
      for (int e = 0; e < V; e++) {
        dw[k][e] += both[k][e] * rstd;
        o[e] = fmaf(d[k][e] * g[k][e], rstd, fmaf(-v[k][e], back, o[e]));
      }
      if (at(k) < cols)
        ps_store<T, V>(dx + (size_t)r * cols + at(k), o);
    }
  }
#pragma unroll
  for (int k = 0; k < NV; k++)
    if (at(k) < cols)
      ps_put_f32<V>(partial + (size_t)blockIdx.x * cols + at(k), dw[k]);
}

/* The same for any number of columns: dw in the partial sums themselves, which only their thread
 * touches. */
template <typename T>
__global__ void __launch_bounds__(ANY_THREADS)
    rmsnorm_bwd_any_k(const T *x, const T *w, const T *dy, T *dx, float *partial, uint32_t rows,
                      uint32_t tile, uint32_t cols, float eps, float offset, bool add_dx) {
  __shared__ float shared[2][2][32];
  const uint32_t first = blockIdx.x * tile, end = min(first + tile, rows);
  float *dw = partial + (size_t)blockIdx.x * cols;
  for (uint32_t i = threadIdx.x; i < cols; i += ANY_THREADS)
    dw[i] = 0.0f;
  for (uint32_t r = first; r < end; r++) {
    const size_t at = (size_t)r * cols;
    float sum[2] = {0.0f, 0.0f};
    for (uint32_t i = threadIdx.x; i < cols; i += ANY_THREADS) {
      const float v = ps_to_f32(x[at + i]);
      sum[0] += v * v;
      sum[1] += ps_to_f32(dy[at + i]) * (ps_to_f32(w[i]) + offset) * v;
    }
    ps_block_sum<2>(sum, shared[(r - first) % 2]);
    const float rstd = 1.0f / sqrtf(sum[0] / (float)cols + eps), mean = sum[1] * rstd / (float)cols;
    for (uint32_t i = threadIdx.x; i < cols; i += ANY_THREADS) {
      const float d = ps_to_f32(dy[at + i]), xh = ps_to_f32(x[at + i]) * rstd,
                  out = (d * (ps_to_f32(w[i]) + offset) - xh * mean) * rstd;
      dx[at + i] = ps_from_f32<T>(add_dx ? ps_to_f32(dx[at + i]) + out : out);
      dw[i] += d * xh;
    }
  }
}

template <typename T, int THREADS, int NV, bool ADD>
static cudaError_t rmsnorm_bwd_vectors(const ps_launch *l, const ps__args_rmsnorm *a,
                                       float *partial) {
  const auto kernel = rmsnorm_bwd_k<T, ps_full<T>, THREADS, NV, ADD>;
  constexpr uint32_t bytes = bwd_stages<THREADS, NV, ADD> * bwd_row_bytes<THREADS, NV, ADD>;
  /* of this device's context */
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess)
    return e;
  kernel<<<ps_n_row_tiles(a->rows, PS_NORM_TILES), THREADS, bytes,
           ((const ps__cuda_exec *)l->exec)->stream>>>(
      (const T *)l->ptr[0], (const T *)l->ptr[1], (const T *)l->ptr[2], (T *)l->ptr[3], partial,
      a->rows, ps_row_tile_rows(a->rows, PS_NORM_TILES), a->cols, a->eps,
      ps_offset(a->weight_offset));
  return cudaGetLastError();
}

template <typename T, bool ADD>
static cudaError_t rmsnorm_bwd_launch(const ps_launch *l, const ps__args_rmsnorm *a, bool whole,
                                      float *partial) {
  const uint32_t vectors = ps_ceil_div(a->cols, ps_full<T>);
  if (whole && vectors <= 256)
    return rmsnorm_bwd_vectors<T, 256, 1, ADD>(l, a, partial);
  if (whole && vectors <= 512)
    return rmsnorm_bwd_vectors<T, 256, 2, ADD>(l, a, partial);
  if (whole && vectors <= 1024)
    return rmsnorm_bwd_vectors<T, 512, 2, ADD>(l, a, partial);
  rmsnorm_bwd_any_k<T><<<ps_n_row_tiles(a->rows, PS_NORM_TILES), ANY_THREADS, 0,
                         ((const ps__cuda_exec *)l->exec)->stream>>>(
      (const T *)l->ptr[0], (const T *)l->ptr[1], (const T *)l->ptr[2], (T *)l->ptr[3], partial,
      a->rows, ps_row_tile_rows(a->rows, PS_NORM_TILES), a->cols, a->eps,
      ps_offset(a->weight_offset), ADD);
  return cudaGetLastError();
}

template <typename T>
static cudaError_t rmsnorm_bwd_of(const ps_launch *l, const ps__args_rmsnorm *a, bool whole,
                                  float *partial) {
  return a->add_dx ? rmsnorm_bwd_launch<T, true>(l, a, whole, partial)
                   : rmsnorm_bwd_launch<T, false>(l, a, whole, partial);
}

/* rmsnorm_bwd
 * math    xh = x*rstd; g = dy*(w + weight_offset); d = rstd*(g - xh*mean_c(g*xh));
 *         dx = add_dx ? dx + d : d; dw (+)= sum_r dy*xh
 * shapes  x, dy, dx [rows,cols], w, dw [cols], all of dt; dx aliases neither x nor dy
 * bytes   3 or 4 (add_dx) * rows*cols*sizeof(dt) of HBM; 8192 x 4096 bf16 -> 201 or 268 MB, 42 or
 *         56 us at 4.8 TB/s; scratch: at most 256 tiles * cols fp32 (4 MB), written and read from
 *         L2. Measured on an H200, of copy bandwidth: 84%, 56 us; with add_dx 88%, 72 us
 * determinism  bitwise: tiles of rows by shape; dw adds rows in order in a tile, then the
 *              tiles in a fixed tree.
 * reference    the cpu backend's: dx as the forward's; dw within rows * 2^-24 * sum |dy*xh|, and
 *              1 ulp of bf16 */
extern "C" ps_status ps__cuda_rmsnorm_bwd(const ps_launch *l) {
  const ps__args_rmsnorm *a = (const ps__args_rmsnorm *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps_status st = ps_check(l, "rmsnorm_bwd", 5, a->dt, ps_scratch_rmsnorm_bwd(a, NULL));
  if (st != PS_OK || !a->cols)
    return st;
  bool whole = ps_whole(a->dt, a->cols);
  for (int i = 0; i < 4; i++)
    whole = whole && ps_aligned(l->ptr[i]);
  float *partial = (float *)exec->scratch;
  cudaError_t e = cudaSuccess;
  if (a->rows)
    PS_BY_TYPE(a->dt, e = rmsnorm_bwd_of<T>(l, a, whole, partial));
  if (e == cudaSuccess)
    e = ps_add_partials(exec->stream, l->ptr[4], a->dt, partial,
                        ps_n_row_tiles(a->rows, PS_NORM_TILES), a->cols, a->cols,
                        a->accumulate_dw != 0);
  return ps_launched("rmsnorm_bwd", e);
}
