/* moe_bias.cu - experts with biases, and the gate that clamps: ops.h has the math.
 *
 * Determinism: no atomics, every sum of floats has one order. */
#include "kernels/cuda/glu.cuh"

namespace {

enum { THREADS = 256, WARPS = THREADS / 32 };

template <typename T>
__global__ void __launch_bounds__(THREADS)
    add_bias_k(float *x, const T *b, uint64_t n, uint32_t cols) {
  const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < n)
    x[i] += ps_to_f32(b[i % cols]);
}

/* ---- the gate: a warp a row, a lane V pairs of gate and up ----------------------------------- */

struct clamped {
  float act, up, sig, x; /* act = g sigmoid(alpha g), x = alpha g, up = u + 1 */
  bool g_cut, u_cut;
};
template <typename T>
__device__ __forceinline__ clamped clamp_at(float g0, float u0, float alpha, float limit) {
  clamped c;
  c.g_cut = g0 > limit;
  c.u_cut = u0 > limit || u0 < -limit;
  const float g = c.g_cut ? limit : g0;
  c.up = (u0 > limit ? limit : u0 < -limit ? -limit : u0) + 1.0f;
  c.x = alpha * g;
  c.sig = sig<T>(c.x);
  c.act = g * c.sig;
  return c;
}

/* V pairs, which are two vectors. */
template <typename T, int V>
__device__ __forceinline__ void read_pairs(float (&x)[V][2], const T *p) {
  float half[2][V];
  ps_read<T, V>(half[0], p);
  ps_read<T, V>(half[1], p + V);
#pragma unroll
  for (int k = 0; k < 2 * V; k++)
    x[k / 2][k % 2] = half[k / V][k % V];
}
template <typename T, int V>
__device__ __forceinline__ void write_pairs(T *p, const float (&x)[V][2]) {
  float half[2][V];
#pragma unroll
  for (int k = 0; k < 2 * V; k++)
    half[k / V][k % V] = x[k / 2][k % 2];
  ps_store<T, V>(p, half[0]);
  ps_store<T, V>(p + V, half[1]);
}

template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    clamp_k(const T *gu, const T *bias, const uint16_t *ids, const float *weights,
            const int32_t *slot, T *s, uint32_t rows, ps__args_moe_clamp_glu a) {
  const uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32;
  if (at >= rows)
    return;
  const size_t r = (uint32_t)__ldg(slot + at), f = a.expert_dim;
  const float w = __ldg(weights + at);
  const T *row = gu + r * 2 * f, *b = bias + (size_t)ids[at] * 2 * f;
  for (uint32_t i = threadIdx.x % 32 * V; i < f; i += 32 * V) {
    float v[V][2], y[V][2], out[V];
    read_pairs<T, V>(v, row + 2 * i);
    read_pairs<T, V>(y, b + 2 * i);
#pragma unroll
    for (int k = 0; k < V; k++) {
      const clamped c = clamp_at<T>(v[k][0] + y[k][0], v[k][1] + y[k][1], a.alpha, a.limit);
      out[k] = w * (c.act * c.up);
    }
    ps_store<T, V>(s + r * f + i, out);
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    clamp_bwd_k(T *ds, T *gu, const T *bias, const uint16_t *ids, const float *weights,
                const int32_t *slot, float *dweights, uint32_t rows, ps__args_moe_clamp_glu a) {
  const uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32;
  if (at >= rows)
    return;
  const size_t r = (uint32_t)__ldg(slot + at), f = a.expert_dim;
  const float w = __ldg(weights + at);
  T *row = gu + r * 2 * f, *of_s = ds + r * f;
  const T *b = bias + (size_t)ids[at] * 2 * f;
  float dot = 0.0f;
  uint32_t i = threadIdx.x % 32 * V;
  ps_vec<T, V> next[3];
  const auto load = [&](uint32_t i) {
    next[0] = ps_load<T, V>(row + 2 * i);
    next[1] = ps_load<T, V>(row + 2 * i + V);
    next[2] = ps_load<T, V>(of_s + i);
  };
  if (i < f)
    load(i);
  while (i < f) {
    float v[V][2], y[V][2], d[V], half[2][V];
    ps_unpack<T, V>(half[0], next[0]);
    ps_unpack<T, V>(half[1], next[1]);
    ps_unpack<T, V>(d, next[2]);
#pragma unroll
    for (int k = 0; k < 2 * V; k++)
      v[k / 2][k % 2] = half[k / V][k % V];
    read_pairs<T, V>(y, b + 2 * i);
    const uint32_t here = i;
    i += 32 * V;
    if (i < f)
      load(i); /* before what is stored here */
#pragma unroll
    for (int k = 0; k < V; k++) {
      const clamped c = clamp_at<T>(v[k][0] + y[k][0], v[k][1] + y[k][1], a.alpha, a.limit);
      const float out = c.act * c.up;
      dot += d[k] * out;
      v[k][0] = c.g_cut ? 0.0f : w * d[k] * c.up * c.sig * (1.0f + c.x * (1.0f - c.sig));
      v[k][1] = c.u_cut ? 0.0f : w * d[k] * c.act;
      d[k] = w * out;
    }
    write_pairs<T, V>(row + 2 * here, v);
    ps_store<T, V>(of_s + here, d);
  }
  dot = ps_warp_sum(dot);
  if (threadIdx.x % 32 == 0)
    dweights[at] = dot;
}

/* ---- gradients of biases and weights --------------------------------------------------------- */

/* A warp a choice. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    bias_dot_k(const T *dy, const T *bias, const uint16_t *ids, float *dweights, uint32_t rows,
               ps__args_moe_bias a) {
  const uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32;
  if (at >= rows)
    return;
  const T *x = dy + (size_t)(at / a.n_used) * a.cols, *b = bias + (size_t)ids[at] * a.cols;
  float dot = 0.0f;
  for (uint32_t c = threadIdx.x % 32; c < a.cols; c += 32)
    dot += ps_to_f32(x[c]) * ps_to_f32(b[c]);
  dot = ps_warp_sum(dot);
  if (threadIdx.x % 32 == 0)
    dweights[at] += dot;
}

/* Weights of choices in the order of rows. */
__global__ void __launch_bounds__(THREADS)
    by_row_k(const float *weights, const int32_t *slot, float *of_row, uint32_t rows) {
  const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
  if (i < rows)
    of_row[slot[i]] = weights[i];
}

/* A block: 32*V columns, one part of one expert's rows. Its warps take rows in turn, and their sums
 * are added in order. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    bias_part_k(const T *x, const int32_t *offsets, const float *of_row, float *partial,
                uint32_t parts, uint32_t cols) {
  __shared__ float sums[WARPS][32][V + 1]; /* + 1 avoids bank conflicts */
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = (blockIdx.x * 32 + lane) * V,
                 e = blockIdx.y / parts, p = blockIdx.y % parts, from = (uint32_t)offsets[e],
                 n = (uint32_t)offsets[e + 1] - from,
                 first = from + (uint32_t)((uint64_t)n * p / parts),
                 end = from + (uint32_t)((uint64_t)n * (p + 1) / parts);
  float sum[V] = {};
  if (c < cols)
#pragma unroll 4
    for (uint32_t r = first + warp; r < end; r += WARPS) {
      float v[V];
      const float w = of_row ? __ldg(of_row + r) : 1.0f;
      ps_read<T, V>(v, x + (size_t)r * cols + c);
#pragma unroll
      for (int k = 0; k < V; k++)
        sum[k] = fmaf(w, v[k], sum[k]);
    }
#pragma unroll
  for (int k = 0; k < V; k++)
    sums[warp][lane][k] = sum[k];
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < 32 * V && blockIdx.x * 32 * V + i < cols; i += THREADS) {
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      all += sums[w][i / V][i % V];
    partial[(size_t)blockIdx.y * cols + blockIdx.x * 32 * V + i] = all;
  }
}

/* A thread a column of an expert; its parts in order. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    bias_add_k(const float *partial, T *db, uint32_t parts, uint32_t cols, uint32_t n_experts,
               uint32_t accumulate) {
  const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= (uint64_t)n_experts * cols)
    return;
  const float *from = partial + i / cols * parts * cols + i % cols;
  float sum = 0.0f;
#pragma unroll 8
  for (uint32_t p = 0; p < parts; p++)
    sum += from[(size_t)p * cols];
  db[i] = ps_from_f32<T>(accumulate ? ps_to_f32(db[i]) + sum : sum);
}

template <typename T, int V> void bias_sum_of(const ps_launch *l) {
  const ps__args_moe_bias *a = (const ps__args_moe_bias *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const uint32_t rows = a->n_tokens * a->n_used, parts = ps_moe_bias_parts(a->n_experts);
  float *partial = (float *)exec->scratch,
        *of_row = a->weighted ? partial + (size_t)a->n_experts * parts * a->cols : nullptr;
  if (a->weighted && rows)
    by_row_k<<<ps_ceil_div(rows, THREADS), THREADS, 0, exec->stream>>>(
        (const float *)l->ptr[3], (const int32_t *)l->ptr[2], of_row, rows);
  const dim3 grid(ps_ceil_div(a->cols, 32 * V), a->n_experts * parts);
  bias_part_k<T, V><<<grid, THREADS, 0, exec->stream>>>(
      (const T *)l->ptr[0], (const int32_t *)l->ptr[1], of_row, partial, parts, a->cols);
  bias_add_k<T>
      <<<ps_ceil_div((uint64_t)a->n_experts * a->cols, THREADS), THREADS, 0, exec->stream>>>(
          partial, (T *)l->ptr[4], parts, a->cols, a->n_experts, a->accumulate);
}

} // namespace

/* add_bias
 * bytes   8*rows*cols.   determinism  bitwise: elementwise
 * reference  the cpu backend's, equal */
extern "C" ps_status ps__cuda_add_bias(const ps_launch *l) {
  const ps__args_add_bias *a = (const ps__args_add_bias *)l->args;
  const ps_status st = ps_check(l, "add_bias", 2, a->dt, 0);
  const uint64_t n = (uint64_t)a->rows * a->cols;
  if (st != PS_OK || !n)
    return st;
  PS_BY_TYPE(a->dt, add_bias_k<T><<<ps_ceil_div(n, THREADS), THREADS, 0, ps_stream_of(l)>>>(
                        (float *)l->ptr[0], (const T *)l->ptr[1], n, a->cols));
  return ps_launched("add_bias", cudaSuccess);
}

/* moe_clamp_glu
 * bytes   3*R*I*sizeof(dt) of HBM.   determinism  bitwise: elementwise
 * reference  the cpu backend's, 1 ulp of bf16; fp32 8 ulp */
extern "C" ps_status ps__cuda_moe_clamp_glu(const ps_launch *l) {
  const ps__args_moe_clamp_glu *a = (const ps__args_moe_clamp_glu *)l->args;
  const ps_status st = ps_check(l, "moe_clamp_glu", 6, a->dt, 0);
  const uint32_t rows = a->n_tokens * a->n_used;
  if (st != PS_OK || !rows || !a->expert_dim)
    return st;
  const bool whole = ps_whole(a->dt, a->expert_dim) && ps_all_aligned(l, 6);
  PS_DISPATCH(a->dt, whole,
              (clamp_k<T, V><<<ps_ceil_div(rows, WARPS), THREADS, 0, ps_stream_of(l)>>>(
                  (const T *)l->ptr[0], (const T *)l->ptr[1], (const uint16_t *)l->ptr[2],
                  (const float *)l->ptr[3], (const int32_t *)l->ptr[4], (T *)l->ptr[5], rows, *a)));
  return ps_launched("moe_clamp_glu", cudaSuccess);
}

/* moe_clamp_glu_bwd
 * bytes   6*R*I*sizeof(dt) of HBM.   determinism  bitwise: a warp a row
 * reference  the cpu backend's, as moe_clamp_glu's */
extern "C" ps_status ps__cuda_moe_clamp_glu_bwd(const ps_launch *l) {
  const ps__args_moe_clamp_glu *a = (const ps__args_moe_clamp_glu *)l->args;
  const ps_status st = ps_check(l, "moe_clamp_glu_bwd", 7, a->dt, 0);
  const uint32_t rows = a->n_tokens * a->n_used;
  if (st != PS_OK || !rows || !a->expert_dim)
    return st;
  const bool whole = ps_whole(a->dt, a->expert_dim) && ps_all_aligned(l, 3);
  PS_DISPATCH(
      a->dt, whole,
      (clamp_bwd_k<T, V><<<ps_ceil_div(rows, WARPS), THREADS, 0, ps_stream_of(l)>>>(
          (T *)l->ptr[0], (T *)l->ptr[1], (const T *)l->ptr[2], (const uint16_t *)l->ptr[3],
          (const float *)l->ptr[4], (const int32_t *)l->ptr[5], (float *)l->ptr[6], rows, *a)));
  return ps_launched("moe_clamp_glu_bwd", cudaSuccess);
}

/* moe_bias_dot
 * bytes   (1 + k)*T*cols*sizeof(dt), most of it from L2.   determinism  bitwise: a warp a choice
 * reference  the cpu backend's: sums in another order */
extern "C" ps_status ps__cuda_moe_bias_dot(const ps_launch *l) {
  const ps__args_moe_bias *a = (const ps__args_moe_bias *)l->args;
  const ps_status st = ps_check(l, "moe_bias_dot", 4, a->dt, 0);
  const uint32_t rows = a->n_tokens * a->n_used;
  if (st != PS_OK || !rows)
    return st;
  PS_BY_TYPE(a->dt, bias_dot_k<T><<<ps_ceil_div(rows, WARPS), THREADS, 0, ps_stream_of(l)>>>(
                        (const T *)l->ptr[0], (const T *)l->ptr[1], (const uint16_t *)l->ptr[2],
                        (float *)l->ptr[3], rows, *a));
  return ps_launched("moe_bias_dot", cudaSuccess);
}

/* moe_bias_sum
 * bytes   R*cols*sizeof(dt) of HBM, and twice those of at most max(E, PS_MOE_BIAS_PARTS) partial
 *         sums a column; 131072 x 5760 bf16 -> 1.51 GB, 315 us at 4.8 TB/s
 * determinism  bitwise: an expert's rows are cut by their number, sums have one order
 * reference  the cpu backend's: sums in another order */
extern "C" ps_status ps__cuda_moe_bias_sum(const ps_launch *l) {
  const ps__args_moe_bias *a = (const ps__args_moe_bias *)l->args;
  const ps_status st = ps_check(l, "moe_bias_sum", 5, a->dt, ps_scratch_moe_bias_sum(a, NULL));
  if (st != PS_OK)
    return st;
  PS_DISPATCH(a->dt, ps_whole(a->dt, a->cols) && ps_aligned(l->ptr[0]), (bias_sum_of<T, V>(l)));
  return ps_launched("moe_bias_sum", cudaSuccess);
}
