/* sink.cu - a sink of each head in the softmax of attention, as a correction of what any library's
 * attention without it gives: ops.h has the math. */
#include "kernels/cuda/cuda_common.cuh"

namespace {

enum { THREADS = 256 };

/* @lanes of a warp, a power of two, a row and head. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS) sink_k(T *o, float *lse, const T *sink, uint64_t n,
                                                  uint32_t n_heads, uint32_t dim, uint32_t lanes) {
  const uint64_t i = (uint64_t)blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes;
  const uint32_t lane = threadIdx.x % lanes;
  const bool there = i < n;
  const float s = there ? ps_to_f32(sink[i % n_heads]) : 0.0f, l = there ? lse[i] : 0.0f,
              z = expf(-fabsf(l - s)), keep = (s > l ? z : 1.0f) / (1.0f + z);
  for (uint32_t c = lane * V; there && c < dim; c += lanes * V) {
    float x[V];
    ps_read<T, V>(x, o + i * dim + c);
#pragma unroll
    for (int k = 0; k < V; k++)
      x[k] *= keep;
    ps_store<T, V>(o + i * dim + c, x);
  }
  __syncwarp(); /* all lanes have read lse */
  if (there && lane == 0)
    lse[i] = fmaxf(l, s) + log1pf(z);
}

/* A thread V elements of a head, of a tile of rows: their terms of dsink, rows in order. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    sink_terms_k(const T *o, const float *lse, const T *d_o, const T *sink, double *partial,
                 uint32_t tile, ps__args_sink a) {
  const uint32_t each = a.head_dim / V, width = a.n_heads * each,
                 i = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * tile,
                 end = min(first + tile, a.n_tokens);
  if (i >= width)
    return;
  const float s = ps_to_f32(sink[i / each]);
  double sum = 0;
#pragma unroll 4
  for (uint32_t t = first; t < end; t++) {
    const size_t at = ((size_t)t * width + i) * V;
    float x[V], y[V], dot = 0.0f;
    ps_read<T, V>(x, o + at);
    ps_read<T, V>(y, d_o + at);
#pragma unroll
    for (int k = 0; k < V; k++)
      dot = fmaf(x[k], y[k], dot);
    sum -= (double)(expf(s - lse[(size_t)t * a.n_heads + i / each]) * dot);
  }
  partial[(size_t)blockIdx.y * width + i] = sum;
}

/* A block a head. A thread adds every THREADS-th of its terms, then the threads' sums are added
 * pair by pair. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sink_add_k(const double *partial, T *dsink, uint32_t n_tiles, uint32_t each,
               uint32_t accumulate) {
  __shared__ double sums[THREADS];
  const uint32_t head = blockIdx.x, width = gridDim.x * each, i = threadIdx.x;
  double sum = 0;
  for (uint32_t k = i; k < n_tiles * each; k += THREADS)
    sum += partial[(size_t)(k / each) * width + head * each + k % each];
  sums[i] = sum;
  for (uint32_t n = THREADS / 2; n; n /= 2) {
    __syncthreads();
    if (i < n)
      sums[i] += sums[i + n];
  }
  if (i == 0)
    dsink[head] =
        ps_from_f32<T>((float)(sums[0] + (accumulate ? (double)ps_to_f32(dsink[head]) : 0.0)));
}

template <typename T, int V> void sink_of(const ps_launch *l) {
  const ps__args_sink *a = (const ps__args_sink *)l->args;
  const uint64_t n = (uint64_t)a->n_tokens * a->n_heads;
  uint32_t lanes = 32;
  while (lanes > 1 && lanes / 2 * V >= a->head_dim)
    lanes /= 2;
  sink_k<T, V><<<ps_ceil_div(n, THREADS / lanes), THREADS, 0, ps_stream_of(l)>>>(
      (T *)l->ptr[0], (float *)l->ptr[1], (const T *)l->ptr[2], n, a->n_heads, a->head_dim, lanes);
}
template <typename T, int V> void sink_bwd_of(const ps_launch *l) {
  const ps__args_sink *a = (const ps__args_sink *)l->args;
  const uint32_t n_tiles = ps_n_row_tiles(a->n_tokens, PS_SINK_TILES), each = a->head_dim / V;
  double *partial = (double *)((const ps__cuda_exec *)l->exec)->scratch;
  const dim3 grid(ps_ceil_div((uint64_t)a->n_heads * each, THREADS), n_tiles);
  if (n_tiles)
    sink_terms_k<T, V><<<grid, THREADS, 0, ps_stream_of(l)>>>(
        (const T *)l->ptr[0], (const float *)l->ptr[1], (const T *)l->ptr[2], (const T *)l->ptr[3],
        partial, ps_row_tile_rows(a->n_tokens, PS_SINK_TILES), *a);
  sink_add_k<T><<<a->n_heads, THREADS, 0, ps_stream_of(l)>>>(partial, (T *)l->ptr[4], n_tiles, each,
                                                             a->accumulate);
}

} // namespace

/* attention_sink
 * bytes   o and lse read and written; 32768 x 4096 bf16 -> 554 MB, 115 us at 4.8 TB/s
 * determinism  bitwise: elementwise.   reference  the cpu backend's: 1e-6 and the rounding of dt */
extern "C" ps_status ps__cuda_attention_sink(const ps_launch *l) {
  const ps__args_sink *a = (const ps__args_sink *)l->args;
  const ps_status st = ps_check(l, "attention_sink", 3, a->dt, 0);
  if (st != PS_OK || !a->n_tokens)
    return st;
  PS_DISPATCH(a->dt, ps_whole(a->dt, a->head_dim) && ps_aligned(l->ptr[0]), (sink_of<T, V>(l)));
  return ps_launched("attention_sink", cudaSuccess);
}

/* attention_sink_bwd
 * bytes   o and d_o once; 32768 x 4096 bf16 -> 537 MB, 112 us at 4.8 TB/s
 * determinism  bitwise: tiles of rows by shape, every sum in one order
 * reference  the cpu backend's: sums in another order */
extern "C" ps_status ps__cuda_attention_sink_bwd(const ps_launch *l) {
  const ps__args_sink *a = (const ps__args_sink *)l->args;
  const ps_status st = ps_check(l, "attention_sink_bwd", 5, a->dt, ps_scratch_sink_bwd(a, NULL));
  if (st != PS_OK)
    return st;
  const bool whole = ps_whole(a->dt, a->head_dim) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[2]);
  PS_DISPATCH(a->dt, whole, (sink_bwd_of<T, V>(l)));
  return ps_launched("attention_sink_bwd", cudaSuccess);
}
