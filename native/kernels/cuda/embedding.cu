/* embedding.cu - rows of the table by token, and their gradient. */
#include "kernels/cuda/cuda_common.cuh"

enum { THREADS = 256 };

/* A block a token. */
template <typename T, int V, bool SCALED>
__global__ void __launch_bounds__(THREADS) embed_fwd_k(const int32_t *id, const T *table, T *out,
                                                       uint32_t vocab, uint32_t dim, float scale) {
  const int32_t v = id[blockIdx.x];
  const bool known = v >= 0 && (uint32_t)v < vocab;
  const T *from = table + (size_t)(known ? v : 0) * dim;
  T *to = out + (size_t)blockIdx.x * dim;
  for (uint32_t i = threadIdx.x * V; i < dim; i += THREADS * V) {
    float x[V];
    ps_vec<T, V> row = ps_load<T, V>(from + i);
    if (known && !SCALED) {
      ps_put<T, V>(to + i, row);
    } else if (known) {
      ps_unpack<T, V>(x, row);
#pragma unroll
      for (int k = 0; k < V; k++)
        x[k] *= scale;
      ps_store<T, V>(to + i, x);
    } else {
#pragma unroll
      for (int k = 0; k < V; k++)
        x[k] = __int_as_float(0x7fc00000);
      ps_store<T, V>(to + i, x);
    }
  }
}

/* embed_fwd
 * math    out[t,:] = scale table[id[t],:], one rounding; an id out of range gives a row of NaN
 * shapes  id i32 [T], table [V,D], out [T,D] of dt
 * bytes   2*T*D*sizeof(dt) of HBM; 8192 x 4096 bf16 -> 134 MB, 28 us at 4.8 TB/s
 * determinism  bitwise: elementwise.   reference  the cpu backend's, the same bits */
extern "C" ps_status ps__cuda_embed_fwd(const ps_launch *l) {
  const ps__args_embed *a = (const ps__args_embed *)l->args;
  const ps_status st = ps_check(l, "embed_fwd", 3, a->dt, 0);
  if (st != PS_OK || !a->n_tokens || !a->dim)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->dim) && ps_aligned(l->ptr[1]) && ps_aligned(l->ptr[2]);
  PS_DISPATCH(a->dt, whole,
              const auto kernel =
                  ps__embed_scale(a) == 1.0f ? embed_fwd_k<T, V, false> : embed_fwd_k<T, V, true>;
              kernel<<<a->n_tokens, THREADS, 0, stream>>>((const int32_t *)l->ptr[0],
                                                          (const T *)l->ptr[1], (T *)l->ptr[2],
                                                          a->vocab, a->dim, ps__embed_scale(a)));
  return ps_launched("embed_fwd", cudaSuccess);
}

/* ---- backward: tokens in the order of their ids ---------------------------------------------- */

/* Scratch, all u32. Each id that occurs gets a segment of `found` and `order`. The order of the
 * segments and of the places in a segment depends on the order of integer atomics. A token's place
 * in `order` then follows from its rank among the tokens of its id, so the sums do not depend on
 * the atomics. */
struct lists {
  uint32_t *count;           /* [V] tokens of an id */
  uint32_t *n_ids, *n_found; /* ids that occur; tokens that have a place */
  /* [V] where the next token of an id goes: in the end its segment's end */
  uint32_t *cursor;
  uint32_t *ids, *first;   /* [T] those that occur, and where their segments begin */
  uint32_t *found, *order; /* [T] */
};

/* Whether tokens of this id add to a row. */
__device__ __forceinline__ bool counts(int32_t id, uint32_t vocab, int32_t pad) {
  return (uint32_t)id < vocab && id != pad;
}

__global__ void __launch_bounds__(THREADS)
    count_k(const int32_t *id, lists s, uint32_t n, uint32_t vocab, int32_t pad) {
  const uint32_t t = blockIdx.x * THREADS + threadIdx.x;
  if (t < n && counts(id[t], vocab, pad) && atomicAdd(&s.count[id[t]], 1u) == 0)
    s.ids[atomicAdd(s.n_ids, 1u)] = (uint32_t)id[t];
}

__global__ void __launch_bounds__(THREADS) segment_k(lists s) {
  const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
  if (i < *s.n_ids)
    s.first[i] = s.cursor[s.ids[i]] = atomicAdd(s.n_found, s.count[s.ids[i]]);
}

__global__ void __launch_bounds__(THREADS)
    place_k(const int32_t *id, lists s, uint32_t n, uint32_t vocab, int32_t pad) {
  const uint32_t t = blockIdx.x * THREADS + threadIdx.x;
  if (t < n && counts(id[t], vocab, pad))
    s.found[atomicAdd(&s.cursor[id[t]], 1u)] = t;
}

/* c tokens of one id take c^2 steps in c threads; 8192 tokens that are all alike 8192 steps
 * each, from L1. */
__global__ void __launch_bounds__(THREADS) rank_k(const int32_t *id, lists s) {
  const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= *s.n_found)
    return;
  const uint32_t t = s.found[i], end = s.cursor[id[t]], first = end - s.count[id[t]];
  uint32_t rank = first;
#pragma unroll 4
  for (uint32_t k = first; k < end; k++)
    rank += s.found[k] < t;
  s.order[rank] = t;
}

/* Block (i, y): a piece of the row of the i-th id that occurs; two vectors a thread. Independent
 * loads are issued together: most ids have one token, and a block's time is the chain of its
 * loads. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    embed_bwd_k(lists s, const T *dx, T *dtable, uint32_t dim, bool accumulate, float scale) {
  const uint32_t v_row = s.ids[blockIdx.x], first = s.first[blockIdx.x];
  if (blockIdx.x >= *s.n_ids)
    return;
  const uint32_t end = first + s.count[v_row], c0 = (blockIdx.y * 2 * THREADS + threadIdx.x) * V,
                 c1 = c0 + THREADS * V;
  T *row = dtable + (size_t)v_row * dim;
  float sum[2][V] = {}, v[2][V] = {}, old[2][V] = {};
  if (accumulate && c0 < dim)
    ps_read<T, V>(old[0], row + c0);
  if (accumulate && c1 < dim)
    ps_read<T, V>(old[1], row + c1);
#pragma unroll 4
  for (uint32_t i = first; i < end; i++) {
    const T *from = dx + (size_t)s.order[i] * dim;
    if (c0 < dim)
      ps_read<T, V>(v[0], from + c0);
    if (c1 < dim)
      ps_read<T, V>(v[1], from + c1);
#pragma unroll
    for (int k = 0; k < V; k++)
      sum[0][k] += v[0][k], sum[1][k] += v[1][k];
  }
#pragma unroll
  for (int k = 0; k < V; k++) {
    /* rounded before it is added, as on the CPU: not one multiply-add */
    sum[0][k] = __fmul_rn(sum[0][k], scale);
    sum[1][k] = __fmul_rn(sum[1][k], scale);
    sum[0][k] = accumulate ? old[0][k] + sum[0][k] : sum[0][k];
    sum[1][k] = accumulate ? old[1][k] + sum[1][k] : sum[1][k];
  }
  if (c0 < dim)
    ps_store<T, V>(row + c0, sum[0]);
  if (c1 < dim)
    ps_store<T, V>(row + c1, sum[1]);
}

/* embed_bwd
 * math    dtable[v,:] (+)= scale times the sum over t with id[t] = v, in order of t, of dx[t,:];
 *         fp32 sum and product, one rounding when added; pad and an id out of range add nothing
 * shapes  id i32 [T], dx [T,D], dtable [V,D] of dt
 * bytes   (T*D + V*D)*sizeof(dt) of HBM, and rows with a token twice, or at most 3*T*D*sizeof(dt)
 *         when accumulating: rows without a token are not touched then; 8192 x 4096 into 128256
 *         bf16 -> 1.12 GB, 233 us at 4.8 TB/s, accumulating at most 201 MB, 42 us. Measured on an
 *         H200, of copy bandwidth: all rows 82%, 321 us; accumulating 53% of those bytes, 89 us
 * determinism  bitwise: integer atomics only, tokens of an id in order, each element summed by
 *              one thread.
 * reference    the cpu backend's, the same bits */
extern "C" ps_status ps__cuda_embed_bwd(const ps_launch *l) {
  const ps__args_embed *a = (const ps__args_embed *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps_status st = ps_check(l, "embed_bwd", 3, a->dt, ps_scratch_embed_bwd(a, NULL));
  if (st != PS_OK || !a->vocab || !a->dim)
    return st;
  const int32_t *id = (const int32_t *)l->ptr[0];
  lists s;
  s.count = (uint32_t *)exec->scratch;
  s.n_ids = s.count + a->vocab, s.n_found = s.n_ids + 1, s.cursor = s.n_found + 1;
  s.ids = s.cursor + a->vocab, s.first = s.ids + a->n_tokens, s.found = s.first + a->n_tokens,
  s.order = s.found + a->n_tokens;
  const uint32_t blocks = ps_ceil_div(a->n_tokens, THREADS);
  cudaError_t e =
      cudaMemsetAsync(s.count, 0, ((size_t)a->vocab + 2) * sizeof *s.count, exec->stream);
  if (e == cudaSuccess && !a->accumulate)
    e = cudaMemsetAsync(l->ptr[2], 0, (size_t)a->vocab * a->dim * ps__dtypes[a->dt].bytes,
                        exec->stream);
  if (e != cudaSuccess || !blocks)
    return ps_launched("embed_bwd", e);
  count_k<<<blocks, THREADS, 0, exec->stream>>>(id, s, a->n_tokens, a->vocab, a->pad);
  segment_k<<<blocks, THREADS, 0, exec->stream>>>(s);
  place_k<<<blocks, THREADS, 0, exec->stream>>>(id, s, a->n_tokens, a->vocab, a->pad);
  rank_k<<<blocks, THREADS, 0, exec->stream>>>(id, s);
  const bool whole = ps_whole(a->dt, a->dim) && ps_aligned(l->ptr[1]) && ps_aligned(l->ptr[2]);
  PS_DISPATCH(
      a->dt, whole,
      embed_bwd_k<T, V>
      <<<dim3(a->n_tokens, ps_ceil_div(a->dim, 2 * THREADS * V)), THREADS, 0, exec->stream>>>(
          s, (const T *)l->ptr[1], (T *)l->ptr[2], a->dim, a->accumulate != 0, ps__embed_scale(a)));
  return ps_launched("embed_bwd", cudaSuccess);
}
