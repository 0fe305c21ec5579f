/* heads.cu - columns by head, and gates of a sigmoid: what is around attention with a gate and the
 * gated delta rule. ops.h has the math. */
#include "kernels/cuda/cuda_common.cuh"

namespace {

enum { THREADS = 256, WARPS = THREADS / 32 };

/* An element a thread of the row with all columns. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    move_k(T *all, T *first, T *second, const ps__args_heads a, uint32_t n_all, uint32_t n_first,
           bool join) {
  const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x, t = i / n_all;
  const uint32_t group = a.width[0] + a.width[1] + a.width[2] + a.width[3],
                 groups = a.n_groups * group, c = (uint32_t)(i % n_all);
  if (t >= a.n_tokens)
    return;
  bool to_first = true;
  uint32_t to = n_first - (n_all - c); /* of the tail */
  if (c < groups) {
    const uint32_t g = c / group;
    uint32_t in = c % group, p = 0, before[2] = {0, 0};
    while (in >= a.width[p]) {
      before[p >= a.n_first] += a.width[p] * a.n_groups;
      in -= a.width[p++];
    }
    to_first = p < a.n_first;
    to = before[!to_first] + g * a.width[p] + in;
  }
  T *other = to_first ? first + t * n_first + to : second + t * (n_all - n_first) + to;
  if (join)
    all[i] = *other;
  else
    *other = all[i];
}

ps_status move(const ps_launch *l, const char *op, bool join) {
  const ps__args_heads *a = (const ps__args_heads *)l->args;
  const uint64_t columns = ps__heads_columns(a, 0, PS_HEAD_PARTS),
                 of_first = ps__heads_columns(a, 0, a->n_first);
  const bool has_second = of_first < columns;
  const uint32_t n_all = (uint32_t)(columns + a->tail), n_first = (uint32_t)(of_first + a->tail);
  const ps_status st = ps_check(l, op, has_second ? 3 : 2, a->dt, 0);
  if (st != PS_OK || !a->n_tokens || !n_all)
    return st;
  const uint32_t all = join ? (has_second ? 2 : 1) : 0, first = join ? 0 : 1;
  PS_BY_TYPE(a->dt, move_k<T><<<ps_ceil_div((uint64_t)a->n_tokens * n_all, THREADS), THREADS, 0,
                                ((const ps__cuda_exec *)l->exec)->stream>>>(
                        (T *)l->ptr[all], (T *)l->ptr[first],
                        has_second ? (T *)l->ptr[first + 1] : nullptr, *a, n_all, n_first, join));
  return ps_launched(op, cudaSuccess);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T>
__global__ void __launch_bounds__(THREADS)
    gate_fwd_k(const T *x, const T *g, T *y, const T *residual, uint64_t n, uint32_t each) {
  const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n)
    return;
  const float v = ps_to_f32(x[i]) * sigmoid(ps_to_f32(g[i / each]));
  y[i] = ps_from_f32<T>(residual ? v + ps_to_f32(residual[i]) : v);
}

/* A gate's columns an element a thread where it has one, else by a warp. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    gate_bwd_k(const T *x, const T *g, const T *dy, T *dx, T *dg, uint64_t gates, uint32_t each) {
  const uint32_t lanes = each == 1 ? 1 : 32, lane = threadIdx.x % lanes;
  const uint64_t k = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) / lanes;
  if (k >= gates)
    return;
  const float s = sigmoid(ps_to_f32(g[k]));
  float sum = 0.0f;
  for (uint32_t c = lane; c < each; c += lanes) {
    const uint64_t i = k * each + c;
    const float d = ps_to_f32(dy[i]);
    sum = fmaf(d, ps_to_f32(x[i]), sum);
    dx[i] = ps_from_f32<T>(d * s);
  }
  if (lanes > 1)
    sum = ps_warp_sum(sum);
  if (lane == 0)
    dg[k] = ps_from_f32<T>(sum * s * (1.0f - s));
}

} // namespace

/* heads_split, heads_join
 * math    none: columns of a row change places
 * bytes   2*T*columns*sizeof(dt).   determinism  bitwise.   reference  the cpu backend's bits */
extern "C" ps_status ps__cuda_heads_split(const ps_launch *l) {
  return move(l, "heads_split", false);
}
extern "C" ps_status ps__cuda_heads_join(const ps_launch *l) { return move(l, "heads_join", true); }

/* sigmoid_gate_fwd
 * math    y = x sigmoid(g) (+ residual); fp32 inside, one rounding at the store
 * bytes   3*T*n*sizeof(dt).   determinism  bitwise: each element alone
 * reference  the cpu backend's */
extern "C" ps_status ps__cuda_sigmoid_gate_fwd(const ps_launch *l) {
  const ps__args_sigmoid_gate *a = (const ps__args_sigmoid_gate *)l->args;
  const ps_status st = ps_check(l, "sigmoid_gate_fwd", a->has_residual ? 4 : 3, a->dt, 0);
  const uint64_t n = (uint64_t)a->n_tokens * a->cols;
  if (st != PS_OK || !n)
    return st;
  PS_BY_TYPE(a->dt, gate_fwd_k<T>
             <<<ps_ceil_div(n, THREADS), THREADS, 0, ((const ps__cuda_exec *)l->exec)->stream>>>(
                 (const T *)l->ptr[0], (const T *)l->ptr[1], (T *)l->ptr[2],
                 a->has_residual ? (const T *)l->ptr[3] : nullptr, n, a->cols / a->n_gates));
  return ps_launched("sigmoid_gate_fwd", cudaSuccess);
}

/* sigmoid_gate_bwd
 * math    dx = dy sigmoid(g); dg = sigmoid(g) (1 - sigmoid(g)) times the sum of dy x over the
 *         gate's columns
 * bytes   5*T*n*sizeof(dt).   determinism  bitwise: a gate is one thread's or warp's
 * reference  the cpu backend's */
extern "C" ps_status ps__cuda_sigmoid_gate_bwd(const ps_launch *l) {
  const ps__args_sigmoid_gate *a = (const ps__args_sigmoid_gate *)l->args;
  const ps_status st = ps_check(l, "sigmoid_gate_bwd", 5, a->dt, 0);
  const uint64_t gates = (uint64_t)a->n_tokens * a->n_gates;
  if (st != PS_OK || !gates)
    return st;
  const uint32_t each = a->cols / a->n_gates;
  PS_BY_TYPE(a->dt, gate_bwd_k<T><<<ps_ceil_div(each == 1 ? gates : gates * 32, THREADS), THREADS,
                                    0, ((const ps__cuda_exec *)l->exec)->stream>>>(
                        (const T *)l->ptr[0], (const T *)l->ptr[1], (const T *)l->ptr[2],
                        (T *)l->ptr[3], (T *)l->ptr[4], gates, each));
  return ps_launched("sigmoid_gate_bwd", cudaSuccess);
}
