/* layer_scale.cu - a block's output, or its gradient, times a number.
 *
 * math    x[i] = round(x[i] * s), in place; the gradient of the number is 0
 * shapes  x [rows,cols] and s [1] in dt
 * bytes   2*rows*cols*sizeof(dt); 8192x4096 bf16 -> 134 MB, 28 us at 4.8 TB/s, not measured
 * determinism  bitwise: elementwise.   reference  the cpu backend's, the same bits */
#include "kernels/cuda/cuda_common.cuh"

enum { THREADS = 256 };

/* A thread V elements. @ds: NULL where there is none, or where it has been written already. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS) scale_k(T *x, const T *s, T *ds, uint64_t n) {
  const uint64_t i = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * V;
  const float by = ps_to_f32(s[0]);
  if (i == 0 && ds)
    ds[0] = ps_from_f32<T>(0.0f);
  if (i >= n)
    return;
  float v[V];
  ps_read<T, V>(v, x + i);
#pragma unroll
  for (int e = 0; e < V; e++)
    v[e] *= by;
  ps_store<T, V>(x + i, v);
}

template <typename T> static void launch_scale(const ps_launch *l, uint64_t n, T *ds) {
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  constexpr int V = ps_full<T>;
  T *x = (T *)l->ptr[0];
  const T *s = (const T *)l->ptr[1];
  if (n % V == 0 && ps_aligned(x))
    scale_k<T, V><<<ps_ceil_div(n, V * THREADS), THREADS, 0, stream>>>(x, s, ds, n);
  else
    scale_k<T, 1><<<ps_ceil_div(n, THREADS), THREADS, 0, stream>>>(x, s, ds, n);
}

static ps_status scale(const ps_launch *l, const char *op, uint32_t n_ptr) {
  const ps__args_layer_scale *a = (const ps__args_layer_scale *)l->args;
  const ps_status st = ps_check(l, op, n_ptr, a->dt, 0);
  const uint64_t n = (uint64_t)a->rows * a->cols;
  void *ds = n_ptr > 2 && !a->accumulate_ds ? l->ptr[2] : nullptr;
  if (st != PS_OK || !n)
    return st;
  PS_BY_TYPE(a->dt, launch_scale<T>(l, n, (T *)ds));
  return ps_launched(op, cudaSuccess);
}

extern "C" ps_status ps__cuda_layer_scale_fwd(const ps_launch *l) {
  return scale(l, "layer_scale_fwd", 2);
}
extern "C" ps_status ps__cuda_layer_scale_bwd(const ps_launch *l) {
  return scale(l, "layer_scale_bwd", 3);
}
