/* heads.cu - columns by head, and gates of a sigmoid: what is around attention with a gate and the
 * gated delta rule. ops.h has the math. */
#include "kernels/cuda/glu.cuh"

namespace {

enum { THREADS = 256, AT_ONCE = 4 };
enum { TOKEN_BLOCKS = 1024 }; /* so many share a column's tokens, at most */

/* A thread V columns of the row with all of them, which are of one part, of every gridDim.y-th
 * token: AT_ONCE loads, then as many stores. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    move_k(T *all, T *first, T *second, const ps__args_heads a, uint32_t n_all, uint32_t n_first,
           bool join) {
  const uint32_t group = a.width[0] + a.width[1] + a.width[2] + a.width[3],
                 groups = a.n_groups * group, c = (blockIdx.x * THREADS + threadIdx.x) * V;
  if (c >= n_all)
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
  const uint32_t n_other = to_first ? n_first : n_all - n_first;
  T *const other = (to_first ? first : second) + to;
  for (uint32_t begin = blockIdx.y; begin < a.n_tokens; begin += AT_ONCE * gridDim.y) {
    ps_vec<T, V> x[AT_ONCE];
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; i++) {
      const size_t t = begin + i * gridDim.y;
      if (t < a.n_tokens)
        x[i] = ps_load<T, V>(join ? other + t * n_other : all + t * n_all + c);
    }
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; i++) {
      const size_t t = begin + i * gridDim.y;
      if (t < a.n_tokens)
        ps_put<T, V>(join ? all + t * n_all + c : other + t * n_other, x[i]);
    }
  }
}

/* Are parts and tail whole vectors? */
bool whole_parts(const ps__args_heads *a) {
  bool whole = ps_whole(a->dt, a->tail);
  for (uint32_t i = 0; i < PS_HEAD_PARTS; i++)
    whole = whole && ps_whole(a->dt, a->width[i]);
  return whole;
}

ps_status move(const ps_launch *l, const char *op, bool join) {
  const ps__args_heads *a = (const ps__args_heads *)l->args;
  const uint64_t columns = ps__heads_columns(a, 0, PS_HEAD_PARTS),
                 of_first = ps__heads_columns(a, 0, a->n_first);
  const bool has_second = of_first < columns;
  const uint32_t n_all = (uint32_t)(columns + a->tail), n_first = (uint32_t)(of_first + a->tail);
  const uint32_t n_ptr = has_second ? 3 : 2;
  const ps_status st = ps_check(l, op, n_ptr, a->dt, 0);
  if (st != PS_OK || !a->n_tokens || !n_all)
    return st;
  const uint32_t all = join ? (has_second ? 2 : 1) : 0, first = join ? 0 : 1;
  cudaStream_t stream = ps_stream_of(l);
  PS_DISPATCH(a->dt, whole_parts(a) && ps_all_aligned(l, n_ptr),
              const dim3 grid(ps_ceil_div(n_all, (uint64_t)THREADS * V),
                              a->n_tokens < TOKEN_BLOCKS ? a->n_tokens : TOKEN_BLOCKS);
              move_k<T, V><<<grid, THREADS, 0, stream>>>(
                  (T *)l->ptr[all], (T *)l->ptr[first],
                  has_second ? (T *)l->ptr[first + 1] : nullptr, *a, n_all, n_first, join));
  return ps_launched(op, cudaSuccess);
}

/* V elements a thread: of one gate, or of a gate each. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    gate_fwd_k(const T *x, const T *g, T *y, const T *residual, uint64_t n, uint32_t each) {
  const uint64_t i = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * V;
  float v[V], gate[V], add[V];
  if (i >= n)
    return;
  ps_read<T, V>(v, x + i);
  if (residual)
    ps_read<T, V>(add, residual + i);
  if (each == 1) {
    ps_read<T, V>(gate, g + i);
  } else {
    const float one = ps_to_f32(g[i / each]);
#pragma unroll
    for (int e = 0; e < V; e++)
      gate[e] = one;
  }
#pragma unroll
  for (int e = 0; e < V; e++) {
    v[e] *= sig<T>(gate[e]);
    v[e] = residual ? __fadd_rn(v[e], add[e])
                    : v[e]; /* no FMA, so that all elements of a vector round alike */
  }
  ps_store<T, V>(y + i, v);
}

/* Of gates of one column, V a thread. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    gate_bwd_each_k(const T *x, const T *g, const T *dy, T *dx, T *dg, uint64_t gates) {
  const uint64_t i = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * V;
  float v[V], gate[V], d[V];
  if (i >= gates)
    return;
  ps_read<T, V>(v, x + i);
  ps_read<T, V>(gate, g + i);
  ps_read<T, V>(d, dy + i);
#pragma unroll
  for (int e = 0; e < V; e++) {
    const float s = sig<T>(gate[e]);
    /* + 0: a product of -0 becomes +0, as in a sum of several columns */
    v[e] = fmaf(d[e], v[e], 0.0f) * s * sig<T>(-gate[e]);
    d[e] *= s;
  }
  ps_store<T, V>(dx + i, d);
  ps_store<T, V>(dg + i, v);
}

/* A warp a gate of several columns. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    gate_bwd_k(const T *x, const T *g, const T *dy, T *dx, T *dg, uint64_t gates, uint32_t each) {
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t k = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
  if (k >= gates)
    return;
  const float gate = ps_to_f32(g[k]), s = sig<T>(gate);
  float sum = 0.0f;
  for (uint32_t c = lane; c < each; c += 32) {
    const uint64_t i = k * each + c;
    const float d = ps_to_f32(dy[i]);
    sum = fmaf(d, ps_to_f32(x[i]), sum);
    dx[i] = ps_from_f32<T>(d * s);
  }
  sum = ps_warp_sum(sum);
  if (lane == 0)
    dg[k] = ps_from_f32<T>(sum * s * sig<T>(-gate));
}

} // namespace

/* heads_split, heads_join
 * math    none: columns of a row change places
 * bytes   2*T*columns*sizeof(dt) of HBM; 8192 x 10240 bf16 -> 336 MB, 70 us at 4.8 TB/s
 * determinism  bitwise.   reference  the cpu backend's bits */
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
  const uint32_t n_ptr = a->has_residual ? 4 : 3;
  const ps_status st = ps_check(l, "sigmoid_gate_fwd", n_ptr, a->dt, 0);
  const uint64_t n = (uint64_t)a->n_tokens * a->cols;
  if (st != PS_OK || !n)
    return st;
  const uint32_t each = a->cols / a->n_gates;
  cudaStream_t stream = ps_stream_of(l);
  PS_DISPATCH(a->dt, ps_whole(a->dt, each == 1 ? n : each) && ps_all_aligned(l, n_ptr),
              gate_fwd_k<T, V><<<ps_ceil_div(n, (uint64_t)THREADS * V), THREADS, 0, stream>>>(
                  (const T *)l->ptr[0], (const T *)l->ptr[1], (T *)l->ptr[2],
                  a->has_residual ? (const T *)l->ptr[3] : nullptr, n, each));
  return ps_launched("sigmoid_gate_fwd", cudaSuccess);
}

/* sigmoid_gate_bwd
 * math    dx = dy sigmoid(g); dg = sigmoid(g) sigmoid(-g) times the sum of dy x over the gate's
 *         columns: 1 - sigmoid(g) would cancel at large g
 * bytes   5*T*n*sizeof(dt).   determinism  bitwise: a gate is one thread's or warp's
 * reference  the cpu backend's */
extern "C" ps_status ps__cuda_sigmoid_gate_bwd(const ps_launch *l) {
  const ps__args_sigmoid_gate *a = (const ps__args_sigmoid_gate *)l->args;
  const ps_status st = ps_check(l, "sigmoid_gate_bwd", 5, a->dt, 0);
  const uint64_t gates = (uint64_t)a->n_tokens * a->n_gates;
  if (st != PS_OK || !gates)
    return st;
  const uint32_t each = a->cols / a->n_gates;
  cudaStream_t stream = ps_stream_of(l);
  if (each == 1)
    PS_DISPATCH(a->dt, ps_whole(a->dt, gates) && ps_all_aligned(l, 5),
                gate_bwd_each_k<T, V>
                <<<ps_ceil_div(gates, (uint64_t)THREADS * V), THREADS, 0, stream>>>(
                    (const T *)l->ptr[0], (const T *)l->ptr[1], (const T *)l->ptr[2],
                    (T *)l->ptr[3], (T *)l->ptr[4], gates));
  else
    PS_BY_TYPE(a->dt, gate_bwd_k<T><<<ps_ceil_div(gates * 32, THREADS), THREADS, 0, stream>>>(
                          (const T *)l->ptr[0], (const T *)l->ptr[1], (const T *)l->ptr[2],
                          (T *)l->ptr[3], (T *)l->ptr[4], gates, each));
  return ps_launched("sigmoid_gate_bwd", cudaSuccess);
}
