/* sink.cu - a sink of each head in the softmax of attention, as a correction of what any library's
 * attention without it gives: ops.h has the math. */
#include "kernels/cuda/cuda_common.cuh"

namespace {

enum { THREADS = 256, WARPS = THREADS / 32 };

/* A warp a row and head. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sink_k(T *o, float *lse, const T *sink, uint64_t n, uint32_t n_heads, uint32_t dim) {
  const uint64_t i = (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  if (i >= n)
    return;
  const float s = ps_to_f32(sink[i % n_heads]), l = lse[i], z = expf(-fabsf(l - s)),
              keep = (s > l ? z : 1.0f) / (1.0f + z);
  for (uint32_t c = lane; c < dim; c += 32)
    o[i * dim + c] = ps_from_f32<T>(ps_to_f32(o[i * dim + c]) * keep);
  __syncwarp();
  if (lane == 0)
    lse[i] = fmaxf(l, s) + log1pf(z);
}

/* A head a block, its rows by turns to the warps. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sink_bwd_k(const T *o, const float *lse, const T *d_o, const T *sink, T *dsink, uint32_t rows,
               uint32_t dim, uint32_t accumulate) {
  __shared__ double sums[WARPS];
  const uint32_t head = blockIdx.x, n_heads = gridDim.x, lane = threadIdx.x % 32,
                 warp = threadIdx.x / 32;
  const float s = ps_to_f32(sink[head]);
  double sum = 0;
  for (uint32_t t = warp; t < rows; t += WARPS) {
    const size_t i = (size_t)t * n_heads + head;
    float dot = 0.0f;
    for (uint32_t c = lane; c < dim; c += 32)
      dot += ps_to_f32(o[i * dim + c]) * ps_to_f32(d_o[i * dim + c]);
    sum -= (double)(expf(s - lse[i]) * ps_warp_sum(dot));
  }
  if (lane == 0)
    sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x)
    return;
  for (uint32_t w = 1; w < WARPS; w++)
    sum += sums[w];
  if (accumulate)
    sum += (double)ps_to_f32(dsink[head]);
  dsink[head] = ps_from_f32<T>((float)sum);
}

cudaStream_t stream_of(const ps_launch *l) { return ((const ps__cuda_exec *)l->exec)->stream; }

} // namespace

/* attention_sink
 * bytes   o and lse read and written.   determinism  bitwise: elementwise
 * reference  the cpu backend's: 1e-6 and the rounding of dt */
extern "C" ps_status ps__cuda_attention_sink(const ps_launch *l) {
  const ps__args_sink *a = (const ps__args_sink *)l->args;
  const ps_status st = ps_check(l, "attention_sink", 3, a->dt, 0);
  const uint64_t n = (uint64_t)a->n_tokens * a->n_heads;
  if (st != PS_OK || !n)
    return st;
  PS_BY_TYPE(a->dt, sink_k<T><<<ps_ceil_div(n, WARPS), THREADS, 0, stream_of(l)>>>(
                        (T *)l->ptr[0], (float *)l->ptr[1], (const T *)l->ptr[2], n, a->n_heads,
                        a->head_dim));
  return ps_launched("attention_sink", cudaSuccess);
}

/* attention_sink_bwd
 * bytes   o and d_o once.   determinism  bitwise: a warp's rows in order, then the warps
 * reference  the cpu backend's: sums in another order */
extern "C" ps_status ps__cuda_attention_sink_bwd(const ps_launch *l) {
  const ps__args_sink *a = (const ps__args_sink *)l->args;
  const ps_status st = ps_check(l, "attention_sink_bwd", 5, a->dt, 0);
  if (st != PS_OK)
    return st;
  PS_BY_TYPE(a->dt,
             sink_bwd_k<T><<<a->n_heads, THREADS, 0, stream_of(l)>>>(
                 (const T *)l->ptr[0], (const float *)l->ptr[1], (const T *)l->ptr[2],
                 (const T *)l->ptr[3], (T *)l->ptr[4], a->n_tokens, a->head_dim, a->accumulate));
  return ps_launched("attention_sink_bwd", cudaSuccess);
}
