/* moe_bias.cu - experts with biases, and the gate that clamps: ops.h has the math.
 *
 * Determinism: no atomics, every sum of floats has one order. */
#include "kernels/cuda/glu.cuh"

namespace {

enum { THREADS = 256, WARPS = THREADS / 32, COLS = 64, PARTS = THREADS / COLS };

template <typename T>
__global__ void __launch_bounds__(THREADS)
    add_bias_k(float *x, const T *b, uint64_t n, uint32_t cols) {
  const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < n)
    x[i] += ps_to_f32(b[i % cols]);
}

/* ---- the gate: a warp a row, a lane pairs of gate and up ------------------------------------- */

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

template <typename T>
__global__ void __launch_bounds__(THREADS)
    clamp_k(const T *gu, const T *bias, const uint16_t *ids, const float *weights,
            const int32_t *slot, T *s, uint32_t rows, ps__args_moe_clamp_glu a) {
  const uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32;
  if (at >= rows)
    return;
  const size_t r = (uint32_t)__ldg(slot + at), f = a.expert_dim;
  const float w = __ldg(weights + at);
  const T *row = gu + r * 2 * f, *b = bias + (size_t)ids[at] * 2 * f;
  for (uint32_t i = threadIdx.x % 32; i < f; i += 32) {
    const ps_vec<T, 2> v = ps_load<T, 2>(row + 2 * i), y = ps_load<T, 2>(b + 2 * i);
    const clamped c = clamp_at<T>(ps_to_f32(v.e[0]) + ps_to_f32(y.e[0]),
                                  ps_to_f32(v.e[1]) + ps_to_f32(y.e[1]), a.alpha, a.limit);
    s[r * f + i] = ps_from_f32<T>(w * (c.act * c.up));
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    clamp_bwd_k(T *ds, T *gu, const T *bias, const uint16_t *ids, const float *weights,
                const int32_t *slot, float *dweights, uint32_t rows, ps__args_moe_clamp_glu a) {
  const uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32;
  if (at >= rows)
    return;
  const size_t r = (uint32_t)__ldg(slot + at), f = a.expert_dim;
  const float w = __ldg(weights + at);
  T *row = gu + r * 2 * f;
  const T *b = bias + (size_t)ids[at] * 2 * f;
  float dot = 0.0f;
  for (uint32_t i = threadIdx.x % 32; i < f; i += 32) {
    const ps_vec<T, 2> v = ps_load<T, 2>(row + 2 * i), y = ps_load<T, 2>(b + 2 * i);
    const clamped c = clamp_at<T>(ps_to_f32(v.e[0]) + ps_to_f32(y.e[0]),
                                  ps_to_f32(v.e[1]) + ps_to_f32(y.e[1]), a.alpha, a.limit);
    const float d = ps_to_f32(ds[r * f + i]), out = c.act * c.up;
    dot += d * out;
    ps_vec<T, 2> g;
    g.e[0] = ps_from_f32<T>(c.g_cut ? 0.0f : w * d * c.up * c.sig * (1.0f + c.x * (1.0f - c.sig)));
    g.e[1] = ps_from_f32<T>(c.u_cut ? 0.0f : w * d * c.act);
    *(ps_vec<T, 2> *)(row + 2 * i) = g;
    ds[r * f + i] = ps_from_f32<T>(w * out);
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

/* Columns of an expert a block. It looks at THREADS choices at a time; those of the expert are
 * added by PARTS threads a column, each in order, and these sums in order. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    bias_sum_k(const T *x, const uint16_t *ids, const int32_t *slot, const float *weights, T *db,
               uint32_t rows, ps__args_moe_bias a) {
  __shared__ int32_t row[THREADS];
  __shared__ float weight[THREADS], sums[PARTS][COLS];
  const uint32_t e = blockIdx.y, col = blockIdx.x * COLS + threadIdx.x % COLS,
                 part = threadIdx.x / COLS;
  float sum = 0.0f;
  for (uint32_t first = 0; first < rows; first += THREADS) {
    const uint32_t at = first + threadIdx.x;
    const bool mine = at < rows && ids[at] == e;
    row[threadIdx.x] = mine ? slot[at] : -1;
    weight[threadIdx.x] = mine && a.weighted ? weights[at] : 1.0f;
    if (__syncthreads_or(mine))
      for (uint32_t i = part; i < THREADS; i += PARTS)
        if (row[i] >= 0 && col < a.cols)
          sum += weight[i] * ps_to_f32(x[(size_t)row[i] * a.cols + col]);
    __syncthreads();
  }
  sums[part][threadIdx.x % COLS] = sum;
  __syncthreads();
  if (part || col >= a.cols)
    return;
  for (uint32_t p = 1; p < PARTS; p++)
    sum += sums[p][threadIdx.x];
  T *to = db + (size_t)e * a.cols + col;
  *to = ps_from_f32<T>(a.accumulate ? ps_to_f32(*to) + sum : sum);
}

cudaStream_t stream_of(const ps_launch *l) { return ((const ps__cuda_exec *)l->exec)->stream; }

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
  PS_BY_TYPE(a->dt, add_bias_k<T><<<ps_ceil_div(n, THREADS), THREADS, 0, stream_of(l)>>>(
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
  PS_BY_TYPE(a->dt,
             clamp_k<T><<<ps_ceil_div(rows, WARPS), THREADS, 0, stream_of(l)>>>(
                 (const T *)l->ptr[0], (const T *)l->ptr[1], (const uint16_t *)l->ptr[2],
                 (const float *)l->ptr[3], (const int32_t *)l->ptr[4], (T *)l->ptr[5], rows, *a));
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
  PS_BY_TYPE(a->dt, clamp_bwd_k<T><<<ps_ceil_div(rows, WARPS), THREADS, 0, stream_of(l)>>>(
                        (T *)l->ptr[0], (T *)l->ptr[1], (const T *)l->ptr[2],
                        (const uint16_t *)l->ptr[3], (const float *)l->ptr[4],
                        (const int32_t *)l->ptr[5], (float *)l->ptr[6], rows, *a));
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
  PS_BY_TYPE(a->dt, bias_dot_k<T><<<ps_ceil_div(rows, WARPS), THREADS, 0, stream_of(l)>>>(
                        (const T *)l->ptr[0], (const T *)l->ptr[1], (const uint16_t *)l->ptr[2],
                        (float *)l->ptr[3], rows, *a));
  return ps_launched("moe_bias_dot", cudaSuccess);
}

/* moe_bias_sum
 * bytes   R*cols*sizeof(dt) of HBM; ids from L2, by every block.   determinism  bitwise: see above
 * reference  the cpu backend's: sums in another order */
extern "C" ps_status ps__cuda_moe_bias_sum(const ps_launch *l) {
  const ps__args_moe_bias *a = (const ps__args_moe_bias *)l->args;
  const ps_status st = ps_check(l, "moe_bias_sum", 5, a->dt, 0);
  const uint32_t rows = a->n_tokens * a->n_used;
  if (st != PS_OK)
    return st;
  PS_BY_TYPE(a->dt, bias_sum_k<T>
             <<<dim3(ps_ceil_div(a->cols, COLS), a->n_experts), THREADS, 0, stream_of(l)>>>(
                 (const T *)l->ptr[0], (const uint16_t *)l->ptr[1], (const int32_t *)l->ptr[2],
                 (const float *)l->ptr[3], (T *)l->ptr[4], rows, *a));
  return ps_launched("moe_bias_sum", cudaSuccess);
}
