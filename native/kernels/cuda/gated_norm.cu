/* gated_norm.cu - the norm with a gate of each head, after the gated delta rule (delta.cu). */
#include "kernels/cuda/glu.cuh"

namespace {

/* SLAB: columns of a block, where rows have more than a vector a lane. */
enum { THREADS = 256, WARPS = THREADS / 32, SLAB = 256 };

template <typename T> struct gate_job {
  const T *x, *z, *w, *dy;
  T *y, *dx, *dz;
  float *partial;
  uint32_t rows, dim, tile; /* rows: of heads */
  float eps;
};

/* A lane's part of a row: N vectors of V columns, of which the first begins at column c and each
 * other one 32*V columns later. Instead of a vector past the row's end the lane loads the row's
 * last one, and mean() leaves it out. */
template <typename T, int V, int N> struct gate_row {
  ps_vec<T, V> x[N], z[N], w[N], d[N];

  __device__ __forceinline__ void load(const gate_job<T> &j, uint32_t row, uint32_t c,
                                       bool backward) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      const uint32_t in = min(c + k * 32 * V, j.dim - V);
      const size_t at = (size_t)row * j.dim + in;
      x[k] = ps_load<T, V>(j.x + at);
      z[k] = ps_load<T, V>(j.z + at);
      w[k] = ps_load<T, V>(j.w + in);
      if (backward)
        d[k] = ps_load<T, V>(j.dy + at);
    }
  }
  /* The mean over the row's columns: f(part, k, sum) adds to sum what vector k of the part gives. A
   * lane goes over its parts of the row in order. This one begins at c, and the others are loaded;
   * where N is 1 there are none. */
  template <typename F>
  __device__ __forceinline__ float mean(const gate_job<T> &j, uint32_t row, uint32_t c,
                                        bool backward, F f) const {
    float sum = 0.0f;
    const auto add = [&](const gate_row &part, uint32_t from) {
#pragma unroll
      for (int k = 0; k < N; k++) {
        float more = sum;
        f(part, k, more);
        sum = from + k * 32 * V < j.dim ? more : sum;
      }
    };
    if constexpr (N == 1)
      add(*this, c);
    else
      for (uint32_t i = threadIdx.x % 32 * V; i < j.dim; i += N * 32 * V) {
        gate_row part = *this;
        if (i != c)
          part.load(j, row, i, backward);
        add(part, i);
      }
    return ps_warp_sum(sum) / (float)j.dim;
  }
  __device__ __forceinline__ float rstd(const gate_job<T> &j, uint32_t row, uint32_t c) const {
    const float squares = mean(j, row, c, false, [](const gate_row &part, int k, float &sum) {
      float v[V];
      ps_unpack<T, V>(v, part.x[k]);
#pragma unroll
      for (int e = 0; e < V; e++)
        sum = fmaf(v[e], v[e], sum);
    });
    return 1.0f / sqrtf(squares + j.eps);
  }
};
/* Rows that a warp loads before it computes the first of them. */
template <int N> constexpr uint32_t gate_rows = N == 1 ? 2 : 1;

/* A warp has gate_rows rows, and a lane N vectors of each. Blocks of another y store other columns
 * of the rows; each block sums all columns. */
template <typename T, int V, int N>
__global__ void __launch_bounds__(THREADS) gate_fwd_k(const gate_job<T> j) {
  constexpr uint32_t ROWS = gate_rows<N>;
  const uint32_t first = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS,
                 at = (blockIdx.y * N * 32 + threadIdx.x % 32) * V;
  gate_row<T, V, N> row[ROWS];
#pragma unroll
  for (uint32_t i = 0; i < ROWS; i++)
    row[i].load(j, min(first + i, j.rows - 1), at, false);
#pragma unroll
  for (uint32_t i = 0; i < ROWS; i++) {
    const uint32_t r = first + i;
    if (r >= j.rows)
      break;
    const float rstd = row[i].rstd(j, r, at);
#pragma unroll
    for (int k = 0; k < N; k++) {
      const uint32_t c = at + k * 32 * V;
      float x[V], z[V], w[V];
      ps_unpack<T, V>(x, row[i].x[k]);
      ps_unpack<T, V>(z, row[i].z[k]);
      ps_unpack<T, V>(w, row[i].w[k]);
#pragma unroll
      for (int e = 0; e < V; e++)
        x[e] = x[e] * rstd * w[e] * (z[e] * sig<T>(z[e]));
      if (c < j.dim)
        ps_store<T, V>(j.y + (size_t)r * j.dim + c, x);
    }
  }
}

/* The backward pass. A block has a tile of rows, whose dw are in its warps' registers. A warp takes
 * every WARPS-th row. */
template <typename T, int V, int N>
__global__ void __launch_bounds__(THREADS) gate_bwd_k(const gate_job<T> j) {
  constexpr uint32_t ROWS = gate_rows<N>, COLS = N * 32 * V;
  __shared__ float shared[WARPS][COLS];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, slab = blockIdx.y * COLS,
                 at = slab + lane * V, first = blockIdx.x * j.tile,
                 end = min(first + j.tile, j.rows);
  float dw[N][V] = {};
  for (uint32_t begin = first + warp; begin < end; begin += ROWS * WARPS) {
    gate_row<T, V, N> row[ROWS];
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++)
      row[i].load(j, min(begin + i * WARPS, end - 1), at, true);
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
      const uint32_t r = begin + i * WARPS;
      if (r >= end)
        break;
      const float rstd = row[i].rstd(j, r, at);
      float x[V], z[V], w[V], d[V];
      const auto unpack = [&](const gate_row<T, V, N> &part, int k) {
        ps_unpack<T, V>(x, part.x[k]);
        ps_unpack<T, V>(z, part.z[k]);
        ps_unpack<T, V>(w, part.w[k]);
        ps_unpack<T, V>(d, part.d[k]);
      };
      const float mean =
          row[i].mean(j, r, at, true, [&](const gate_row<T, V, N> &part, int k, float &dot) {
            unpack(part, k);
#pragma unroll
            for (int e = 0; e < V; e++)
              dot = fmaf(d[e] * (z[e] * sig<T>(z[e])) * w[e], x[e] * rstd, dot);
          });
#pragma unroll
      for (int k = 0; k < N; k++) {
        const uint32_t c = at + k * 32 * V;
        unpack(row[i], k);
#pragma unroll
        for (int e = 0; e < V; e++) {
          const float s = sig<T>(z[e]), n = x[e] * rstd, g = d[e];
          dw[k][e] = fmaf(g * n, z[e] * s, dw[k][e]);
          d[e] = fmaf(g * (z[e] * s), w[e], -(n * mean)) * rstd;
          z[e] = g * w[e] * n * s * (1.0f + z[e] * (1.0f - s));
        }
        if (c < j.dim) {
          ps_store<T, V>(j.dx + (size_t)r * j.dim + c, d);
          ps_store<T, V>(j.dz + (size_t)r * j.dim + c, z);
        }
      }
    }
  }
#pragma unroll
  for (int k = 0; k < N; k++)
#pragma unroll
    for (int e = 0; e < V; e++)
      shared[warp][(k * 32 + lane) * V + e] = dw[k][e];
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < COLS && slab + i < j.dim; i += THREADS) {
    float sum = shared[0][i];
    for (int k = 1; k < WARPS; k++)
      sum += shared[k][i];
    j.partial[(size_t)blockIdx.x * j.dim + slab + i] = sum;
  }
}

template <typename T> gate_job<T> gate_job_of(const ps_launch *l) {
  const ps__args_gated_norm *a = (const ps__args_gated_norm *)l->args;
  gate_job<T> j = {};
  j.x = (const T *)l->ptr[0];
  j.z = (const T *)l->ptr[1];
  j.w = (const T *)l->ptr[2];
  j.rows = a->n_tokens * a->n_heads;
  j.dim = a->head_dim;
  j.eps = a->eps;
  return j;
}

template <typename T, int V> cudaError_t gate_fwd_of(const ps_launch *l) {
  gate_job<T> j = gate_job_of<T>(l);
  cudaStream_t stream = ps_stream_of(l);
  j.y = (T *)l->ptr[3];
  if (j.dim <= 32 * V)
    gate_fwd_k<T, V, 1><<<ps_ceil_div(j.rows, gate_rows<1> * WARPS), THREADS, 0, stream>>>(j);
  else
    gate_fwd_k<T, V, SLAB / 32 / V>
        <<<dim3(ps_ceil_div(j.rows, WARPS), ps_ceil_div(j.dim, SLAB)), THREADS, 0, stream>>>(j);
  return cudaGetLastError();
}

template <typename T, int V> cudaError_t gate_bwd_of(const ps_launch *l) {
  const ps__args_gated_norm *a = (const ps__args_gated_norm *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  gate_job<T> j = gate_job_of<T>(l);
  const uint32_t n = ps_n_row_tiles(j.rows, PS_GATED_NORM_TILES);
  j.dy = (const T *)l->ptr[3];
  j.dx = (T *)l->ptr[4];
  j.dz = (T *)l->ptr[5];
  j.partial = (float *)exec->scratch;
  j.tile = ps_row_tile_rows(j.rows, PS_GATED_NORM_TILES);
  if (j.dim <= 32 * V)
    gate_bwd_k<T, V, 1><<<n, THREADS, 0, exec->stream>>>(j);
  else
    gate_bwd_k<T, V, SLAB / 32 / V>
        <<<dim3(n, ps_ceil_div(j.dim, SLAB)), THREADS, 0, exec->stream>>>(j);
  const cudaError_t e = cudaGetLastError();
  return e != cudaSuccess ? e
                          : ps_add_partials(exec->stream, l->ptr[6], a->dt, j.partial, n, j.dim,
                                            j.dim, a->accumulate_dw != 0);
}

} // namespace

/* gated_norm_fwd
 * math    y = x rstd w silu(z) over each head, rstd = 1/sqrt(mean(x^2) + eps); fp32 inside, one
 *         rounding at the store
 * shapes  x, z, y [T,n_heads*d], w [d], all of dt
 * bytes   3*T*n_heads*d*sizeof(dt) of HBM; 8192 x 4096 bf16 -> 201 MB, 42 us at 4.8 TB/s
 * determinism  bitwise: a head's sum is one warp's.   reference  the cpu backend's */
extern "C" ps_status ps__cuda_gated_norm_fwd(const ps_launch *l) {
  const ps__args_gated_norm *a = (const ps__args_gated_norm *)l->args;
  const ps_status st = ps_check(l, "gated_norm_fwd", 4, a->dt, 0);
  if (st != PS_OK)
    return st;
  cudaError_t e = cudaSuccess;
  const bool fours = a->head_dim % 4 == 0 && ps_all_aligned(l, 4);
  PS_BY_TYPE(a->dt, e = fours ? gate_fwd_of<T, 4>(l) : gate_fwd_of<T, 1>(l));
  return ps_launched("gated_norm_fwd", e);
}

/* gated_norm_bwd
 * math    n = x rstd, s = silu(z), e = dy s w: dx = rstd (e - n mean(e n)); dz = dy w n silu'(z);
 *         dw (+)= sum over rows and heads of dy n s
 * shapes  as gated_norm_fwd
 * bytes   5*T*n_heads*d*sizeof(dt) of HBM; 8192 x 4096 bf16 -> 336 MB, 70 us at 4.8 TB/s; scratch:
 *         at most 1024 tiles * d fp32
 * determinism  bitwise: dw by warps, tiles of rows by shape, then the tiles in a fixed order.
 * reference    the cpu backend's; dw within rows * 2^-24 * sum |dy n s| */
extern "C" ps_status ps__cuda_gated_norm_bwd(const ps_launch *l) {
  const ps__args_gated_norm *a = (const ps__args_gated_norm *)l->args;
  const ps_status st = ps_check(l, "gated_norm_bwd", 7, a->dt, ps_scratch_gated_norm_bwd(a, NULL));
  if (st != PS_OK)
    return st;
  cudaError_t e = cudaSuccess;
  const bool fours = a->head_dim % 4 == 0 && ps_all_aligned(l, 6);
  PS_BY_TYPE(a->dt, e = fours ? gate_bwd_of<T, 4>(l) : gate_bwd_of<T, 1>(l));
  return ps_launched("gated_norm_bwd", e);
}
