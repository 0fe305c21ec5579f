/* quantize.cuh - what the CUDA functions that quantize share (kernels/ops.h, "FP8").
 *
 * Two passes over what is quantized: the first finds its amax, the second computes the values once
 * more and writes their codes. Nothing in between is stored but the amax. The second pass takes the
 * tiles in the opposite order, so that what the first one read last comes from L2.
 *
 * A source makes the values of a tile's parts (fp8_tile.h):
 *   type          of the values, as where they would be stored
 *   part          what a thread reads for a part
 *   ahead         there are registers to read the next part before a part's codes are stored
 *   load(part, row, col), value(part, i): row i of the part, rounded to type */
#ifndef PS_KERNELS_CUDA_QUANTIZE_CUH
#define PS_KERNELS_CUDA_QUANTIZE_CUH
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/fp8_tile.h"
#include <cuda_fp8.h>

/* ---- eight columns of a row ------------------------------------------------------------------ */

template <typename T> struct ps_eight {
  ps_vec<T, ps_full<T>> v[PS__PART_COLS / ps_full<T>];
};
template <typename T> __device__ __forceinline__ ps_eight<T> ps_load8(const T *p) {
  ps_eight<T> x;
#pragma unroll
  for (int i = 0; i < PS__PART_COLS / ps_full<T>; i++)
    x.v[i] = ps_load<T, ps_full<T>>(p + i * ps_full<T>);
  return x;
}
template <typename T>
__device__ __forceinline__ void ps_unpack8(float (&to)[PS__PART_COLS], const ps_eight<T> &x) {
  constexpr int V = ps_full<T>;
#pragma unroll
  for (int i = 0; i < PS__PART_COLS; i += V) {
    float part[V];
    ps_unpack<T, V>(part, x.v[i / V]);
#pragma unroll
    for (int k = 0; k < V; k++)
      to[i + k] = part[k];
  }
}
/* Of bf16 two at a time. The compiler converts one alone in the unit for exponentials and roots
 * (F2F), which takes 16 a clock and SM. */
template <typename T>
__device__ __forceinline__ ps_eight<T> ps_round8(const float (&x)[PS__PART_COLS]) {
  union {
    __nv_bfloat162 two[PS__PART_COLS / 2];
    float one[PS__PART_COLS];
    ps_eight<T> x;
  } to;
#pragma unroll
  for (int i = 0; i < PS__PART_COLS; i++)
    if (sizeof(T) == 4)
      to.one[i] = x[i];
    else if (i % 2)
      to.two[i / 2] = __floats2bfloat162_rn(x[i - 1], x[i]);
  return to.x;
}

/* ---- amax ------------------------------------------------------------------------------------ */

/* The largest |x| so far, by its bits: of bf16 each half of the word for itself. */
template <typename T>
__device__ __forceinline__ void ps_see(uint32_t *most, const ps_vec<T, ps_full<T>> &x) {
  union {
    ps_vec<T, ps_full<T>> x;
    uint32_t word[4];
  } c = {x};
#pragma unroll
  for (int i = 0; i < 4; i++)
    *most = sizeof(T) == 2 ? __vmaxu2(*most, c.word[i] & 0x7fff7fffu)
                           : max(*most, c.word[i] & 0x7fffffffu);
}
template <typename T>
__device__ __forceinline__ void ps_see8(uint32_t *most, const ps_eight<T> &x) {
#pragma unroll
  for (int i = 0; i < PS__PART_COLS / ps_full<T>; i++)
    ps_see<T>(most, x.v[i]);
}
/* The bits of an fp32 number. */
template <typename T> __device__ __forceinline__ uint32_t ps_amax_bits(uint32_t most) {
  return sizeof(T) == 2 ? max(most & 0xffff0000u, most << 16) : most;
}
/* The block's amax goes into *@amax, which was 0 before the kernel. A maximum of whole numbers
 * depends on no order; most blocks find it reached. Every thread calls it. */
__device__ __forceinline__ void ps_keep_amax(uint32_t bits, uint32_t *amax) {
  __shared__ uint32_t most[32];
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0)
    most[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x >= 32)
    return;
  bits = __reduce_max_sync(0xffffffffu, threadIdx.x < blockDim.x / 32 ? most[threadIdx.x] : 0u);
  if (threadIdx.x == 0 && bits > *(volatile uint32_t *)amax)
    atomicMax(amax, bits);
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* Two codes, @lo in the lower byte. */
template <uint32_t Q> __device__ __forceinline__ uint32_t ps_codes2(float lo, float hi) {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE,
                                  Q == PS__E4M3 ? __NV_E4M3 : __NV_E5M2);
#else
  return ps__fp8_encode(lo, Q) | ps__fp8_encode(hi, Q) << 8;
#endif
}
/* The codes of a row of a part go to [i] and [4 + i] of @code, as ps__part_keep() takes them. */
template <uint32_t Q, typename T>
__device__ __forceinline__ void ps_codes8(uint32_t (&code)[8], int i, const ps_eight<T> &x,
                                          float inverse) {
  float f[PS__PART_COLS];
  ps_unpack8(f, x);
#pragma unroll
  for (int k = 0; k < PS__PART_COLS; k++)
    f[k] *= inverse;
  code[i] = ps_codes2<Q>(f[0], f[1]) | ps_codes2<Q>(f[2], f[3]) << 16;
  code[4 + i] = ps_codes2<Q>(f[4], f[5]) | ps_codes2<Q>(f[6], f[7]) << 16;
}

/* How many of the eight values that are not 0 have a code of 0: mostly no code is 0. */
template <typename T>
__device__ __forceinline__ uint32_t ps_flushed8(const uint32_t (&code)[8], int i,
                                                const ps_eight<T> &x) {
  const uint32_t low = (code[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu,
                 high = (code[4 + i] & 0x7f7f7f7fu) + 0x7f7f7f7fu; /* the top bit: not 0 */
  uint32_t n = 0;
  if ((low & high & 0x80808080u) == 0x80808080u)
    return 0;
  float f[PS__PART_COLS];
  ps_unpack8(f, x);
#pragma unroll
  for (int k = 0; k < PS__PART_COLS; k++)
    n += f[k] != 0.0f && !((k < 4 ? low : high) >> (8 * (k % 4) + 7) & 1);
  return n;
}
/* Every thread of the warp calls it. */
__device__ __forceinline__ void ps_keep_flushed(uint32_t n, uint64_t *flushed) {
  n = __reduce_add_sync(0xffffffffu, n);
  if (n && threadIdx.x % 32 == 0)
    atomicAdd((unsigned long long *)flushed, (unsigned long long)n);
}

/* A quantized tensor; q, qt: NULL where that form is not wanted. */
typedef struct ps_quantized {
  float *scale; /* {scale, amax}; the first pass leaves amax */
  uint8_t *q, *qt;
  uint32_t rows, cols;
  bool given;        /* the scale is there */
  uint64_t *flushed; /* NULL: nobody counts */
} ps_quantized;

/* 1 / scale. One thread of the grid writes the scale. */
template <uint32_t Q> __device__ __forceinline__ float ps_inverse(const ps_quantized &z) {
  if (z.given)
    return __uint_as_float(ps__fp8_inverse_bits(__float_as_uint(z.scale[0])));
  const uint32_t scale = ps__fp8_scale_bits(__float_as_uint(z.scale[1]), Q);
  if (blockIdx.x == 0 && threadIdx.x == 0)
    z.scale[0] = __uint_as_float(scale);
  return __uint_as_float(ps__fp8_inverse_bits(scale));
}

/* A row of a part in the form ROWS. */
__device__ __forceinline__ void ps_put_row(uint8_t *at, const uint32_t (&code)[8], int i) {
  ps_put<uint32_t, 2>((uint32_t *)at, ps_vec<uint32_t, 2>{{code[i], code[4 + i]}});
}

/* The tile of rows from @row0 and columns from @col0, which parts left in shared memory, in the
 * form COLS at @qt, a tensor of @rows rows; columns from @cols on are not there. */
__device__ __forceinline__ void ps_put_runs(uint8_t *qt, const uint32_t *tile, uint32_t rows,
                                            uint32_t cols, uint32_t row0, uint32_t col0) {
  const uint32_t row = ps__run_row(threadIdx.x);
#pragma unroll
  for (int i = 0; i < PS__TILE_RUNS; i++) {
    const uint32_t col = ps__run_col(threadIdx.x, i);
    if (row0 + row >= rows || col0 + col >= cols)
      continue;
    const uint4 v = ((const uint4 *)tile)[ps__run_place(col, row)];
    const ps_vec<uint32_t, 4> run = ps__run_turned(col) ? ps_vec<uint32_t, 4>{{v.z, v.w, v.x, v.y}}
                                                        : ps_vec<uint32_t, 4>{{v.x, v.y, v.z, v.w}};
    ps_put<uint32_t, 4>((uint32_t *)(qt + (size_t)(col0 + col) * rows + row0 + row), run);
  }
}

/* ---- a tensor by its tiles ------------------------------------------------------------------- */

static inline uint32_t ps_tiles(uint32_t rows, uint32_t cols) {
  return ps_ceil_div(rows, PS__TILE) * ps_ceil_div(cols, PS__TILE);
}
/* A block has one tile, in the first pass too. Registers decide how many blocks an SM holds. Of a
 * fixed number of blocks with many tiles each, the last ones would run on a few SMs. */
template <typename SRC>
__global__ void __launch_bounds__(PS__TILE_THREADS)
    ps_see_k(SRC src, uint32_t rows, uint32_t cols, uint32_t *amax) {
  using T = typename SRC::type;
  const uint32_t across = (cols + PS__TILE - 1) / PS__TILE, row0 = blockIdx.x / across * PS__TILE,
                 col = blockIdx.x % across * PS__TILE + ps__part_col(threadIdx.x);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < PS__TILE_PARTS; i++) {
    const uint32_t row = row0 + ps__part_row(threadIdx.x, i);
    typename SRC::part part;
    if (row >= rows || col >= cols)
      break; /* nor is the next part there */
    src.load(part, row, col);
#pragma unroll
    for (int k = 0; k < PS__PART_ROWS; k++)
      ps_see8<T>(&most, src.value(part, k));
  }
  ps_keep_amax(ps_amax_bits<T>(most), amax);
}

template <typename SRC, uint32_t Q>
__global__ void __launch_bounds__(PS__TILE_THREADS,
                                  (SRC::ahead ? 3 : 2) + (sizeof(typename SRC::type) == 2))
    ps_put_k(SRC src, ps_quantized z) {
  __shared__ uint4 tile[PS__TILE_WORDS / 4];
  const uint32_t across = (z.cols + PS__TILE - 1) / PS__TILE, n = gridDim.x - 1 - blockIdx.x,
                 row0 = n / across * PS__TILE, col0 = n % across * PS__TILE,
                 part_col = ps__part_col(threadIdx.x), col = col0 + part_col;
  typename SRC::part part;
  uint32_t flushed = 0;
  auto fetch = [&](int i) {
    const uint32_t row = row0 + ps__part_row(threadIdx.x, i);
    if (row < z.rows && col < z.cols)
      src.load(part, row, col);
  };
  fetch(0); /* before what needs the scale */
  const float inverse = ps_inverse<Q>(z);
#pragma unroll
  for (int i = 0; i < PS__TILE_PARTS; i++) {
    const uint32_t part_row = ps__part_row(threadIdx.x, i), row = row0 + part_row;
    uint32_t code[8];
    if (row >= z.rows || col >= z.cols)
      break; /* nor is the next part there */
    if (i && !SRC::ahead)
      fetch(i);
#pragma unroll
    for (int k = 0; k < PS__PART_ROWS; k++) {
      const ps_eight<typename SRC::type> x = src.value(part, k);
      ps_codes8<Q>(code, k, x, inverse);
      if (z.flushed)
        flushed += ps_flushed8(code, k, x);
    }
    if (i + 1 < PS__TILE_PARTS && SRC::ahead)
      fetch(i + 1);
    if (z.q)
#pragma unroll
      for (int k = 0; k < PS__PART_ROWS; k++)
        ps_put_row(z.q + (size_t)(row + k) * z.cols + col, code, k);
    if (z.qt)
      ps__part_keep((uint32_t *)tile, part_row, part_col, code);
  }
  if (z.flushed)
    ps_keep_flushed(flushed, z.flushed);
  if (!z.qt)
    return;
  __syncthreads();
  ps_put_runs(z.qt, (const uint32_t *)tile, z.rows, z.cols, row0, col0);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Runs the rest with Q the dtype dt_q of codes. */
#define PS_BY_FP8(dt_q, ...)                                                                       \
  do {                                                                                             \
    if ((dt_q) == PS__E4M3) {                                                                      \
      constexpr uint32_t Q = PS__E4M3;                                                             \
      __VA_ARGS__;                                                                                 \
    } else {                                                                                       \
      constexpr uint32_t Q = PS__E5M2;                                                             \
      __VA_ARGS__;                                                                                 \
    }                                                                                              \
  } while (0)

/* Before the first pass. */
static inline cudaError_t ps_clear_amax(float *scale, cudaStream_t stream) {
  return cudaMemsetAsync(scale, 0, 2 * sizeof *scale, stream);
}

template <typename SRC>
static cudaError_t ps_see(const SRC &src, const ps_quantized &z, cudaStream_t stream) {
  ps_see_k<SRC><<<ps_tiles(z.rows, z.cols), PS__TILE_THREADS, 0, stream>>>(src, z.rows, z.cols,
                                                                           (uint32_t *)z.scale + 1);
  return cudaGetLastError();
}
template <typename SRC>
static cudaError_t ps_put_tiles(const SRC &src, const ps_quantized &z, uint32_t dt_q,
                                cudaStream_t stream) {
  PS_BY_FP8(dt_q,
            ps_put_k<SRC, Q><<<ps_tiles(z.rows, z.cols), PS__TILE_THREADS, 0, stream>>>(src, z));
  return cudaGetLastError();
}

/* A launch's scale and forms from l->ptr[*next] on; *@next goes past them. Then come the counters:
 * ps_flushed_of(), as ps__flushed_of() of the CPU backend. */
static inline uint64_t *ps_flushed_of(const ps_launch *l, uint32_t next, uint32_t count) {
  return count ? (uint64_t *)l->ptr[next] + (count - 1) : NULL;
}
static inline ps_quantized ps_quantized_of(const ps_launch *l, uint32_t *next, uint32_t rows,
                                           uint32_t cols, uint32_t forms) {
  ps_quantized z = {(float *)l->ptr[(*next)++], NULL, NULL, rows, cols, false, NULL};
  if (forms & PS_FORM_ROWS)
    z.q = (uint8_t *)l->ptr[(*next)++];
  if (forms & PS_FORM_COLS)
    z.qt = (uint8_t *)l->ptr[(*next)++];
  return z;
}
/* How many addresses the forms and the counters take. */
static inline uint32_t ps_n_outputs(uint32_t forms, uint32_t count) {
  return (forms & 1) + (forms >> 1 & 1) + (count != 0);
}

/* What every launcher here checks: as ps_check(), and vectors of 16 bytes everywhere but in scales,
 * which are the pointers of the set bits of @scales, and in counters of 8, the last pointer where
 * @counts. */
static inline ps_status ps_check_fp8(const ps_launch *l, const char *op, uint32_t n_ptr,
                                     uint32_t scales, bool counts, uint32_t rows, uint32_t cols,
                                     uint32_t dt, size_t scratch) {
  const ps_status st = ps_check(l, op, n_ptr, dt, scratch);
  if (st != PS_OK)
    return st;
  if (!rows || !cols || rows % 16 || cols % 16)
    return ps__fail(PS_EINVAL, "%s: %u x %u elements: on CUDA both are multiples of 16", op, rows,
                    cols);
  for (uint32_t i = 0; i < n_ptr; i++) {
    const uint32_t to = scales >> i & 1 ? 4 : counts && i + 1 == n_ptr ? 8 : 16;
    if ((uintptr_t)l->ptr[i] % to)
      return ps__fail(PS_EINVAL, "%s: address %u is %p: no multiple of %u", op, i, l->ptr[i], to);
  }
  return PS_OK;
}

#endif
