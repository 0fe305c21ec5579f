/* rmsnorm.cu - RMSNorm over rows, forward and backward (Zhang & Sennrich 2019, arXiv 1910.07467). */
#include "cuda_common.cuh"

enum { FWD_THREADS = 256, FWD_KEEP = 4, BWD_THREADS = 512 };

/* A block a row. The first FWD_KEEP vectors of each thread stay in registers between the sum and the product. */
template <typename T, int V>
__global__ void __launch_bounds__(FWD_THREADS) rmsnorm_fwd_k(const T *x, const T *w, T *y, uint32_t cols, float eps) {
  __shared__ float shared[1][32];
  x += (size_t)blockIdx.x * cols;
  y += (size_t)blockIdx.x * cols;
  ps_vec<T, V> keep[FWD_KEEP];
  float sum[1] = {0.0f}, v[V], g[V];
#pragma unroll
  for (int k = 0; k < FWD_KEEP; k++) {
    const uint32_t i = (k * FWD_THREADS + threadIdx.x) * V;
    if (i < cols) keep[k] = ps_load<T, V>(x + i);
  }
#pragma unroll
  for (int k = 0; k < FWD_KEEP; k++) {
    if ((k * FWD_THREADS + threadIdx.x) * V >= cols) break;
    ps_unpack<T, V>(v, keep[k]);
#pragma unroll
    for (int e = 0; e < V; e++) sum[0] += v[e] * v[e];
  }
  for (uint32_t i = (FWD_KEEP * FWD_THREADS + threadIdx.x) * V; i < cols; i += FWD_THREADS * V) {
    ps_read<T, V>(v, x + i);
#pragma unroll
    for (int e = 0; e < V; e++) sum[0] += v[e] * v[e];
  }
  ps_block_sum<1>(sum, shared);
  const float rstd = 1.0f / sqrtf(sum[0] / (float)cols + eps);
#pragma unroll
  for (int k = 0; k < FWD_KEEP; k++) {
    const uint32_t i = (k * FWD_THREADS + threadIdx.x) * V;
    if (i >= cols) break;
    ps_unpack<T, V>(v, keep[k]);
    ps_read<T, V>(g, w + i);
#pragma unroll
    for (int e = 0; e < V; e++) v[e] = v[e] * rstd * g[e];
    ps_store<T, V>(y + i, v);
  }
  for (uint32_t i = (FWD_KEEP * FWD_THREADS + threadIdx.x) * V; i < cols; i += FWD_THREADS * V) {
    ps_read<T, V>(v, x + i);
    ps_read<T, V>(g, w + i);
#pragma unroll
    for (int e = 0; e < V; e++) v[e] = v[e] * rstd * g[e];
    ps_store<T, V>(y + i, v);
  }
}

/* rmsnorm_fwd
 * math    y[r,c] = x[r,c] * rstd[r] * w[c], rstd[r] = 1/sqrt(mean_c(x^2) + eps); fp32 inside, one rounding at the store
 * shapes  x, y [rows,cols], w [cols], all of dt; y may not alias x
 * bytes   2*rows*cols*sizeof(dt) of HBM; 8192 x 4096 bf16 -> 134 MB, 28 us at 4.8 TB/s
 * determinism  bitwise: a row is one block's, a thread's elements in order, then trees.
 * reference    the cpu backend's: fp32 within 1e-6 of the row's largest, bf16 1 ulp */
extern "C" ps_status ps__cuda_rmsnorm_fwd(const ps_launch *l) {
  const ps__args_rmsnorm *a = (const ps__args_rmsnorm *)l->args;
  const ps_status st = ps_check(l, "rmsnorm_fwd", 3, a->dt, 0);
  if (st != PS_OK || !a->rows || !a->cols) return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->cols) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[1]) && ps_aligned(l->ptr[2]);
  PS_DISPATCH(a->dt, whole, rmsnorm_fwd_k<T, V><<<a->rows, FWD_THREADS, 0, stream>>>((const T *)l->ptr[0], (const T *)l->ptr[1],
                                                                                    (T *)l->ptr[2], a->cols, a->eps));
  return ps_launched("rmsnorm_fwd", cudaSuccess);
}

/* A block a group of rows; thread j owns the vectors j, j+512, ... (NV of them) and keeps their dw in registers. The next row's x
 * and dy are loaded before this row's sums are waited for. */
template <typename T, int V, int NV>
__global__ void __launch_bounds__(BWD_THREADS, NV == 1 ? 2 : 1) rmsnorm_bwd_k(const T *x, const T *w, const T *dy, T *dx, float *partial, uint32_t rows,
                                                             uint32_t group, uint32_t cols, float eps, bool add_dx) {
  __shared__ float shared[2][2][32];
  const uint32_t first = blockIdx.x * group, end = min(first + group, rows);
  ps_vec<T, V> xs[NV], ds[NV];
  float dw[NV][V] = {};
  auto fetch = [&](uint32_t r) {
#pragma unroll
    for (int k = 0; k < NV; k++) {
      const uint32_t i = (k * BWD_THREADS + threadIdx.x) * V;
      if (i < cols) {
        xs[k] = ps_load<T, V>(x + (size_t)r * cols + i);
        ds[k] = ps_load<T, V>(dy + (size_t)r * cols + i);
      }
    }
  };
  fetch(first);
  for (uint32_t r = first; r < end; r++) {
    ps_vec<T, V> old[NV], xr[NV], dr[NV];
    float sum[2] = {0.0f, 0.0f}, v[V], d[V], g[V];
#pragma unroll
    for (int k = 0; k < NV; k++) {
      const uint32_t i = (k * BWD_THREADS + threadIdx.x) * V;
      xr[k] = xs[k];
      dr[k] = ds[k];
      if (i < cols) {
        if (add_dx) old[k] = ps_load<T, V>(dx + (size_t)r * cols + i);
        ps_unpack<T, V>(v, xr[k]);
        ps_unpack<T, V>(d, dr[k]);
        ps_read<T, V>(g, w + i);
#pragma unroll
        for (int e = 0; e < V; e++) {
          sum[0] += v[e] * v[e];
          sum[1] += d[e] * g[e] * v[e];
        }
      }
    }
    if (r + 1 < end) fetch(r + 1);
    ps_block_sum<2>(sum, shared[(r - first) % 2]);
    const float rstd = 1.0f / sqrtf(sum[0] / (float)cols + eps), mean = sum[1] * rstd / (float)cols;
#pragma unroll
    for (int k = 0; k < NV; k++) {
      const uint32_t i = (k * BWD_THREADS + threadIdx.x) * V;
      if (i >= cols) break;
      float o[V];
      ps_unpack<T, V>(v, xr[k]);
      ps_unpack<T, V>(d, dr[k]);
      ps_read<T, V>(g, w + i);
      if (add_dx) ps_unpack<T, V>(o, old[k]);
#pragma unroll
      for (int e = 0; e < V; e++) {
        const float xh = v[e] * rstd, out = (d[e] * g[e] - xh * mean) * rstd;
        dw[k][e] += d[e] * xh;
        o[e] = add_dx ? o[e] + out : out;
      }
      ps_store<T, V>(dx + (size_t)r * cols + i, o);
    }
  }
#pragma unroll
  for (int k = 0; k < NV; k++) {
    const uint32_t i = (k * BWD_THREADS + threadIdx.x) * V;
    if (i < cols)
#pragma unroll
      for (int e = 0; e < V; e++) partial[(size_t)blockIdx.x * cols + i + e] = dw[k][e];
  }
}

/* The same for any number of columns: dw in the partial sums themselves, which only their thread touches. */
template <typename T>
__global__ void __launch_bounds__(BWD_THREADS) rmsnorm_bwd_any_k(const T *x, const T *w, const T *dy, T *dx, float *partial, uint32_t rows,
                                                                 uint32_t group, uint32_t cols, float eps, bool add_dx) {
  __shared__ float shared[2][2][32];
  const uint32_t first = blockIdx.x * group, end = min(first + group, rows);
  float *dw = partial + (size_t)blockIdx.x * cols;
  for (uint32_t i = threadIdx.x; i < cols; i += BWD_THREADS) dw[i] = 0.0f;
  for (uint32_t r = first; r < end; r++) {
    const size_t at = (size_t)r * cols;
    float sum[2] = {0.0f, 0.0f};
    for (uint32_t i = threadIdx.x; i < cols; i += BWD_THREADS) {
      const float v = ps_to_f32(x[at + i]);
      sum[0] += v * v;
      sum[1] += ps_to_f32(dy[at + i]) * ps_to_f32(w[i]) * v;
    }
    ps_block_sum<2>(sum, shared[(r - first) % 2]);
    const float rstd = 1.0f / sqrtf(sum[0] / (float)cols + eps), mean = sum[1] * rstd / (float)cols;
    for (uint32_t i = threadIdx.x; i < cols; i += BWD_THREADS) {
      const float d = ps_to_f32(dy[at + i]), xh = ps_to_f32(x[at + i]) * rstd, out = (d * ps_to_f32(w[i]) - xh * mean) * rstd;
      dx[at + i] = ps_from_f32<T>(add_dx ? ps_to_f32(dx[at + i]) + out : out);
      dw[i] += d * xh;
    }
  }
}

template <typename T> static void rmsnorm_bwd_launch(const ps_launch *l, const ps__args_rmsnorm *a, bool whole, float *partial) {
  constexpr int V = ps_full<T>;
  const uint32_t group = ps_group_rows(a->rows), n = ps_n_groups(a->rows), per_thread = ps_ceil_div(a->cols, (uint64_t)BWD_THREADS * V);
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const T *x = (const T *)l->ptr[0], *w = (const T *)l->ptr[1], *dy = (const T *)l->ptr[2];
  T *dx = (T *)l->ptr[3];
  const bool add = a->add_dx != 0;
  if (whole && per_thread <= 1)
    rmsnorm_bwd_k<T, V, 1><<<n, BWD_THREADS, 0, stream>>>(x, w, dy, dx, partial, a->rows, group, a->cols, a->eps, add);
  else if (whole && per_thread <= 2)
    rmsnorm_bwd_k<T, V, 2><<<n, BWD_THREADS, 0, stream>>>(x, w, dy, dx, partial, a->rows, group, a->cols, a->eps, add);
  else rmsnorm_bwd_any_k<T><<<n, BWD_THREADS, 0, stream>>>(x, w, dy, dx, partial, a->rows, group, a->cols, a->eps, add);
}

/* rmsnorm_bwd
 * math    xh = x*rstd; g = dy*w; d = rstd*(g - xh*mean_c(g*xh)); dx = add_dx ? dx + d : d; dw (+)= sum_r dy*xh
 * shapes  x, dy, dx [rows,cols], w, dw [cols], all of dt; dx aliases neither x nor dy
 * bytes   3 or 4 (add_dx) * rows*cols*sizeof(dt) of HBM; 8192 x 4096 bf16 -> 201 or 268 MB, 42 or 56 us at 4.8 TB/s; scratch: at
 *         most 256 groups * cols fp32 (4 MB), written and read from L2
 * determinism  bitwise: groups of rows by shape; dw adds rows in order in a group, then the groups in a fixed tree.
 * reference    the cpu backend's: dx as the forward's; dw within rows * 2^-24 * sum |dy*xh|, and 1 ulp of bf16 */
extern "C" ps_status ps__cuda_rmsnorm_bwd(const ps_launch *l) {
  const ps__args_rmsnorm *a = (const ps__args_rmsnorm *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps_status st = ps_check(l, "rmsnorm_bwd", 5, a->dt, ps_scratch_rmsnorm_bwd(a));
  if (st != PS_OK || !a->cols) return st;
  bool whole = ps_whole(a->dt, a->cols);
  for (int i = 0; i < 4; i++) whole = whole && ps_aligned(l->ptr[i]);
  if (a->rows) {
    if (a->dt == PS_BF16) rmsnorm_bwd_launch<__nv_bfloat16>(l, a, whole, (float *)exec->scratch);
    else rmsnorm_bwd_launch<float>(l, a, whole, (float *)exec->scratch);
  }
  return ps_launched("rmsnorm_bwd", ps_add_partials(exec->stream, l->ptr[4], a->dt, (const float *)exec->scratch, ps_n_groups(a->rows),
                                                    a->cols, a->cols, a->accumulate_dw != 0));
}
