/* quantize.cu - tensors quantized to FP8 with one scale, which is a power of two; and values for
 * the timing of products. */
#include "kernels/cuda/quantize.cuh"

template <typename T> struct tensor {
  using type = T;
  static constexpr bool ahead = true;
  struct part {
    ps_eight<T> x[PS__PART_ROWS];
  };
  const T *x;
  uint32_t cols;
  __device__ __forceinline__ void load(part &p, uint32_t row, uint32_t col) const {
#pragma unroll
    for (int i = 0; i < PS__PART_ROWS; i++)
      p.x[i] = ps_load8(x + (size_t)(row + i) * cols + col);
  }
  __device__ __forceinline__ const ps_eight<T> &value(const part &p, int i) const { return p.x[i]; }
};

/* The scale of @headroom times amax, which the first pass left. */
__global__ void scale_k(float *scale, uint32_t dt_q, float headroom) {
  const uint32_t most = __float_as_uint(scale[1] * headroom) & 0x7fffffffu;
  scale[0] = __uint_as_float(ps__fp8_scale_bits(most, dt_q));
}

/* Of a tensor of one element, such as 1 / valid tokens. */
template <typename T>
__global__ void scale_of_one_k(float *scale, const T *x, uint32_t dt_q, float headroom) {
  scale[1] = fabsf(ps_to_f32(x[0]));
  scale[0] =
      __uint_as_float(ps__fp8_scale_bits(__float_as_uint(scale[1] * headroom) & 0x7fffffffu, dt_q));
}

template <typename T>
static cudaError_t see_tensor(const ps_launch *l, const ps_quantized &z, cudaStream_t stream) {
  const cudaError_t e = ps_clear_amax(z.scale, stream);
  return e == cudaSuccess ? ps_see(tensor<T>{(const T *)l->ptr[0], z.cols}, z, stream) : e;
}

/* fp8_scale
 * math    scale = {ps__fp8_scale_bits(headroom * amax), amax}
 * shapes  x [rows,cols], multiples of 16; or one element
 * bytes   an element: 2 of bf16. 8192 x 4096 bf16: 67 MB, 14 us at an H200's 4.8 TB/s; not measured
 * determinism  bitwise: a maximum of whole numbers
 * reference    the cpu backend's, the same bits */
extern "C" ps_status ps__cuda_fp8_scale(const ps_launch *l) {
  const ps__args_fp8_scale *a = (const ps__args_fp8_scale *)l->args;
  const float headroom = a->headroom == 0.0f ? 1.0f : a->headroom;
  const bool one = a->rows == 1 && a->cols == 1;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const ps_status st =
      one ? PS_OK : ps_check_fp8(l, "fp8_scale", 2, 1u << 1, false, a->rows, a->cols, a->dt, 0);
  if (st != PS_OK)
    return st;
  if (one) {
    PS_BY_TYPE(a->dt, scale_of_one_k<T>
               <<<1, 1, 0, stream>>>((float *)l->ptr[1], (const T *)l->ptr[0], a->dt_q, headroom));
    return ps_launched("fp8_scale", cudaGetLastError());
  }
  uint32_t next = 1;
  const ps_quantized z = ps_quantized_of(l, &next, a->rows, a->cols, 0);
  cudaError_t e = cudaSuccess;
  PS_BY_TYPE(a->dt, e = see_tensor<T>(l, z, stream));
  if (e == cudaSuccess)
    scale_k<<<1, 1, 0, stream>>>(z.scale, a->dt_q, headroom);
  return ps_launched("fp8_scale", e);
}

/* quantize
 * math    scale = {ps__fp8_scale_bits(amax), amax}, or given; q[r,c] = qt[c,r] = x[r,c] / scale[0],
 *         rounded to nearest even and saturated
 * shapes  x, q [rows,cols], qt [cols,rows], multiples of 16; no aliasing
 * bytes   an element: 2 of bf16 for amax but with a given scale, 2 for its code, 1 a form. 8192 x
 *         4096 bf16 in both forms: 201 MB, 42 us at an H200's 4.8 TB/s, less what the second pass
 *         finds in L2; measured 84 us there (bench/log/2026-11-24-fp8-h200.md)
 * determinism  bitwise: elementwise, a maximum and sums of whole numbers
 * reference    the cpu backend's, the same bits */
extern "C" ps_status ps__cuda_quantize(const ps_launch *l) {
  const ps__args_quantize *a = (const ps__args_quantize *)l->args;
  const ps_status st = ps_check_fp8(l, "quantize", 2 + ps_n_outputs(a->forms, a->count), 1u << 1,
                                    a->count != 0, a->rows, a->cols, a->dt, 0);
  if (st != PS_OK)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  uint32_t next = 1;
  ps_quantized z = ps_quantized_of(l, &next, a->rows, a->cols, a->forms);
  z.given = a->given != 0;
  z.flushed = ps_flushed_of(l, next, a->count);
  cudaError_t e = cudaSuccess;
  if (!z.given)
    PS_BY_TYPE(a->dt, e = see_tensor<T>(l, z, stream));
  if (e == cudaSuccess)
    PS_BY_TYPE(a->dt,
               e = ps_put_tiles(tensor<T>{(const T *)l->ptr[0], a->cols}, z, a->dt_q, stream));
  return ps_launched("quantize", e);
}

/* ---- for timing products --------------------------------------------------------------------- */

enum { DRAW_BLOCKS = 1056 };

/* An element's code: of a sum of four bytes of a hash, about N(0, 1) and at most 3.5 away. Of @size
 * 1/16 of the largest number that is e4m3's N(0, 28). */
template <uint32_t Q>
__global__ void __launch_bounds__(256) draw_k(uint8_t *q, uint64_t n, float size) {
  for (uint64_t i = ((uint64_t)blockIdx.x * 256 + threadIdx.x) * 4; i < n;
       i += (uint64_t)gridDim.x * 1024) {
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; k++) { /* PCG-RXS-M-XS of 32 bits (O'Neill 2014) */
      const uint32_t state = (uint32_t)(i + k) * 747796405u + 2891336453u,
                     word = ((state >> ((state >> 28) + 4)) ^ state) * 277803737u,
                     hash = word >> 22 ^ word;
      x[k] = ((float)__dp4a(hash, 0x01010101u, 0u) - 510.0f) * (size / 147.8f);
    }
    *(uint32_t *)(q + i) = ps_codes2<Q>(x[0], x[1]) | ps_codes2<Q>(x[2], x[3]) << 16;
  }
}

extern "C" ps_status ps__cuda_draw_fp8(const ps__cuda_exec *exec, void *q, uint64_t n,
                                       uint32_t dt) {
  if (n % 4 || !ps_aligned(q))
    return ps__fail(PS_EINTERNAL, "draw_fp8: %llu elements at %p", (unsigned long long)n, q);
  PS_BY_FP8(dt, draw_k<Q><<<DRAW_BLOCKS, 256, 0, exec->stream>>>((uint8_t *)q, n,
                                                                 Q == PS__E4M3 ? 28.0f : 3584.0f));
  return ps_launched("draw_fp8", cudaSuccess);
}
