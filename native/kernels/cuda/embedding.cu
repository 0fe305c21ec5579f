/* embedding.cu - rows of the table by token, and their gradient. */
#include "cuda_common.cuh"

enum { THREADS = 256, SCAN_THREADS = 1024, SCAN_EACH = 8 };

/* A block a token. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS) embed_fwd_k(const int32_t *id, const T *table, T *out, uint32_t vocab, uint32_t dim) {
  const int32_t v = id[blockIdx.x];
  const bool known = v >= 0 && (uint32_t)v < vocab;
  const T *from = table + (size_t)(known ? v : 0) * dim;
  T *to = out + (size_t)blockIdx.x * dim;
  for (uint32_t i = threadIdx.x * V; i < dim; i += THREADS * V) {
    float x[V];
    ps_vec<T, V> row = ps_load<T, V>(from + i);
    if (known) {
      *(ps_vec<T, V> *)(to + i) = row;
    } else {
#pragma unroll
      for (int k = 0; k < V; k++) x[k] = __int_as_float(0x7fc00000);
      ps_store<T, V>(to + i, x);
    }
  }
}

/* embed_fwd
 * math    out[t,:] = table[id[t],:]; an id out of range gives a row of NaN
 * shapes  id i32 [T], table [V,D], out [T,D] of dt
 * bytes   2*T*D*sizeof(dt) of HBM; 8192 x 4096 bf16 -> 134 MB, 28 us at 4.8 TB/s
 * determinism  bitwise: a copy.   reference  the cpu backend's, the same bits */
extern "C" ps_status ps__cuda_embed_fwd(const ps_launch *l) {
  const ps__args_embed *a = (const ps__args_embed *)l->args;
  const ps_status st = ps_check(l, "embed_fwd", 3, a->dt, 0);
  if (st != PS_OK || !a->n_tokens || !a->dim) return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->dim) && ps_aligned(l->ptr[1]) && ps_aligned(l->ptr[2]);
  PS_DISPATCH(a->dt, whole, embed_fwd_k<T, V><<<a->n_tokens, THREADS, 0, stream>>>((const int32_t *)l->ptr[0], (const T *)l->ptr[1],
                                                                                  (T *)l->ptr[2], a->vocab, a->dim));
  return ps_launched("embed_fwd", cudaSuccess);
}

/* ---- backward: tokens in the order of their ids ---------------------------------------------------------------------- */

/* Scratch: start [V+1], cursor [V+1], found [T], order [T], all u32. Integer atomics count and place; the places within one id
 * depend on their order and are then ranked by token, so that order does not. */
__global__ void __launch_bounds__(THREADS) count_k(const int32_t *id, uint32_t *cursor, uint32_t n, uint32_t vocab) {
  const uint32_t t = blockIdx.x * THREADS + threadIdx.x;
  if (t < n && (uint32_t)id[t] < vocab) atomicAdd(&cursor[id[t]], 1u);
}

/* One block: start[v] = number of tokens with a smaller id, start[vocab] = of all; cursor = start. SCAN_EACH neighbours a thread and
 * turn: 16 turns for 128256 ids. */
__global__ void __launch_bounds__(SCAN_THREADS) scan_k(uint32_t *start, uint32_t *cursor, uint32_t vocab) {
  __shared__ uint32_t warp_sum[32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t before = 0;
  for (uint32_t base = 0; base <= vocab; base += SCAN_THREADS * SCAN_EACH) {
    const uint32_t v = base + threadIdx.x * SCAN_EACH;
    uint32_t count[SCAN_EACH], mine = 0;
#pragma unroll
    for (int k = 0; k < SCAN_EACH; k++) count[k] = v + k < vocab ? cursor[v + k] : 0;
#pragma unroll
    for (int k = 0; k < SCAN_EACH; k++) mine += count[k];
    uint32_t sum = mine;
    for (int w = 1; w < 32; w *= 2) {
      const uint32_t left = __shfl_up_sync(0xffffffffu, sum, w);
      if (lane >= (uint32_t)w) sum += left;
    }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    uint32_t warps = warp_sum[lane];
    for (int w = 1; w < 32; w *= 2) {
      const uint32_t left = __shfl_up_sync(0xffffffffu, warps, w);
      if (lane >= (uint32_t)w) warps += left;
    }
    const uint32_t below = warp ? __shfl_sync(0xffffffffu, warps, warp - 1) : 0, all = __shfl_sync(0xffffffffu, warps, 31);
    uint32_t at = before + below + sum - mine;
#pragma unroll
    for (int k = 0; k < SCAN_EACH; k++) {
      if (v + k <= vocab) start[v + k] = cursor[v + k] = at;
      at += count[k];
    }
    before += all;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(THREADS) place_k(const int32_t *id, uint32_t *cursor, uint32_t *found, uint32_t n, uint32_t vocab) {
  const uint32_t t = blockIdx.x * THREADS + threadIdx.x;
  if (t < n && (uint32_t)id[t] < vocab) found[atomicAdd(&cursor[id[t]], 1u)] = t;
}

/* Places [first, end) of an id hold its tokens in any order: each goes where its rank says. c tokens of one id take c^2 steps in c
 * threads; 8192 tokens that are all alike 8192 steps each, from L1. */
__global__ void __launch_bounds__(THREADS)
    rank_k(const int32_t *id, const uint32_t *start, const uint32_t *found, uint32_t *order, uint32_t vocab) {
  const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= start[vocab]) return;
  const uint32_t t = found[i], first = start[id[t]], end = start[id[t] + 1];
  uint32_t rank = first;
#pragma unroll 4
  for (uint32_t k = first; k < end; k++) rank += found[k] < t;
  order[rank] = t;
}

/* A block a row of the table; when accumulating a block a place in the order instead, of which the first of each id does the row. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS) embed_bwd_k(const int32_t *id, const uint32_t *start, const uint32_t *order, const T *dx, T *dtable,
                                                       uint32_t vocab, uint32_t dim, bool accumulate) {
  if (accumulate && blockIdx.x >= start[vocab]) return;
  const uint32_t v_row = accumulate ? (uint32_t)id[order[blockIdx.x]] : blockIdx.x, first = start[v_row], end = start[v_row + 1];
  if (accumulate && first != blockIdx.x) return;
  T *row = dtable + (size_t)v_row * dim;
  for (uint32_t c = threadIdx.x * V; c < dim; c += THREADS * V) {
    float sum[V] = {}, v[V];
#pragma unroll 8
    for (uint32_t i = first; i < end; i++) {
      ps_read<T, V>(v, dx + (size_t)order[i] * dim + c);
#pragma unroll
      for (int k = 0; k < V; k++) sum[k] += v[k];
    }
    if (accumulate) {
      ps_read<T, V>(v, row + c);
#pragma unroll
      for (int k = 0; k < V; k++) sum[k] = v[k] + sum[k];
    }
    ps_store<T, V>(row + c, sum);
  }
}

/* embed_bwd
 * math    dtable[v,:] (+)= sum over t with id[t] = v, in order of t, of dx[t,:]; fp32 sum, one rounding when added; an id out of range
 *         adds nothing
 * shapes  id i32 [T], dx [T,D], dtable [V,D] of dt
 * bytes   (T*D + V*D)*sizeof(dt) of HBM, or at most 3*T*D*sizeof(dt) when accumulating: rows without a token are not touched then;
 *         8192 x 4096 into 128256 bf16 -> 1.12 GB, 233 us at 4.8 TB/s, accumulating at most 201 MB, 42 us
 * determinism  bitwise: integer atomics only, tokens of an id in order, each element summed by one thread.
 * reference    the cpu backend's, the same bits */
extern "C" ps_status ps__cuda_embed_bwd(const ps_launch *l) {
  const ps__args_embed *a = (const ps__args_embed *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps_status st = ps_check(l, "embed_bwd", 3, a->dt, ps_scratch_embed_bwd(a));
  if (st != PS_OK || !a->vocab || !a->dim) return st;
  const int32_t *id = (const int32_t *)l->ptr[0];
  uint32_t *start = (uint32_t *)exec->scratch, *cursor = start + a->vocab + 1, *found = cursor + a->vocab + 1, *order = found + a->n_tokens;
  const uint32_t blocks = ps_ceil_div(a->n_tokens, THREADS);
  const cudaError_t e = cudaMemsetAsync(cursor, 0, ((size_t)a->vocab + 1) * sizeof *cursor, exec->stream);
  if (blocks) count_k<<<blocks, THREADS, 0, exec->stream>>>(id, cursor, a->n_tokens, a->vocab);
  scan_k<<<1, SCAN_THREADS, 0, exec->stream>>>(start, cursor, a->vocab);
  if (blocks) {
    place_k<<<blocks, THREADS, 0, exec->stream>>>(id, cursor, found, a->n_tokens, a->vocab);
    rank_k<<<blocks, THREADS, 0, exec->stream>>>(id, start, found, order, a->vocab);
  }
  const bool whole = ps_whole(a->dt, a->dim) && ps_aligned(l->ptr[1]) && ps_aligned(l->ptr[2]);
  const uint32_t grid = a->accumulate ? a->n_tokens : a->vocab;
  if (grid)
    PS_DISPATCH(a->dt, whole, embed_bwd_k<T, V><<<grid, THREADS, 0, exec->stream>>>(id, start, order, (const T *)l->ptr[1], (T *)l->ptr[2],
                                                                                   a->vocab, a->dim, a->accumulate != 0));
  return ps_launched("embed_bwd", e);
}
