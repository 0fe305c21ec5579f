/* glu.cu - the gated activation of the feed-forward layer (Shazeer 2020, arXiv 2002.05202),
 * forward and backward, stored or quantized. */
#include "kernels/cuda/glu.cuh"
#include "kernels/cuda/quantize.cuh"

enum { THREADS = 256 };

template <typename T, int V, bool GELU>
__global__ void __launch_bounds__(THREADS)
    glu_fwd_k(const T *gu, T *s, uint32_t n_tokens, uint32_t f) {
  const uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * V;
  if (i >= f)
    return;
  for (uint32_t t = blockIdx.y; t < n_tokens; t += gridDim.y) {
    const T *row = gu + (size_t)t * 2 * f + i;
    float g[V], u[V];
    ps_read<T, V>(g, row);
    ps_read<T, V>(u, row + f);
#pragma unroll
    for (int k = 0; k < V; k++)
      g[k] = gated<T, GELU>(g[k], u[k]);
    ps_store<T, V>(s + (size_t)t * f + i, g);
  }
}

template <typename T, int V, bool GELU>
__global__ void __launch_bounds__(THREADS) glu_bwd_k(T *ds, T *gu, uint32_t n_tokens, uint32_t f) {
  const uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * V;
  if (i >= f)
    return;
  for (uint32_t t = blockIdx.y; t < n_tokens; t += gridDim.y) {
    T *row = gu + (size_t)t * 2 * f + i, *at = ds + (size_t)t * f + i;
    float d[V], g[V], u[V];
    ps_read<T, V>(d, at);
    ps_read<T, V>(g, row);
    ps_read<T, V>(u, row + f);
#pragma unroll
    for (int k = 0; k < V; k++)
      gated_back<T, GELU>(d[k], g[k], u[k]);
    ps_store<T, V>(at, d);
    ps_store<T, V>(row, g);
    ps_store<T, V>(row + f, u);
  }
}

static dim3 grid_of(uint32_t n_tokens, uint32_t ffn, uint32_t v) {
  return dim3(ps_ceil_div(ffn, (uint64_t)THREADS * v), n_tokens < 65535 ? n_tokens : 65535);
}

/* glu_fwd
 * math    s = act(g)*u; g = gu[:, :F], u = gu[:, F:]; act(g) = g * sig, sig = 1/(1 + exp(-k)), with
 *         k = g for silu, k = 2 sqrt(2/pi) (g + 0.044715 g^3) for gelu_tanh; fp32 inside, one
 *         rounding at the store
 * shapes  gu [T,2F], s [T,F] of dt, no aliasing
 * bytes   3*T*F*sizeof(dt) of HBM; 8192 x 14336 bf16 -> 705 MB, 147 us at 4.8 TB/s
 * determinism  bitwise: elementwise.   reference  the cpu backend's, 1 ulp of bf16; fp32 8 ulp */
extern "C" ps_status ps__cuda_glu_fwd(const ps_launch *l) {
  const ps__args_glu *a = (const ps__args_glu *)l->args;
  const ps_status st = ps_check(l, "glu_fwd", 2, a->dt, 0);
  if (st != PS_OK || !a->n_tokens || !a->ffn_dim)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->ffn_dim) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[1]);
  PS_DISPATCH(a->dt, whole,
              const auto kernel = a->activation == PS_ACTIVATION_SILU ? glu_fwd_k<T, V, false>
                                                                      : glu_fwd_k<T, V, true>;
              kernel<<<grid_of(a->n_tokens, a->ffn_dim, V), THREADS, 0, stream>>>(
                  (const T *)l->ptr[0], (T *)l->ptr[1], a->n_tokens, a->ffn_dim));
  return ps_launched("glu_fwd", cudaSuccess);
}

/* glu_bwd
 * math    dg = ds * u * sig * (1 + g*k'*(1 - sig)); du = ds * g * sig; both over gu, in place; s =
 *         g*sig*u, which the gradient of down's weights needs, over ds: as glu_fwd's
 * shapes  ds [T,F], gu [T,2F] of dt
 * bytes   6*T*F*sizeof(dt) of HBM; 8192 x 14336 bf16 -> 1.41 GB, 294 us at 4.8 TB/s (by itself s
 *         would be 705 MB)
 * determinism  bitwise: elementwise.   reference  the cpu backend's, 1 ulp of bf16 and what
 *              cancels in 1 + g*(1 - sig) */
extern "C" ps_status ps__cuda_glu_bwd(const ps_launch *l) {
  const ps__args_glu *a = (const ps__args_glu *)l->args;
  const ps_status st = ps_check(l, "glu_bwd", 2, a->dt, 0);
  if (st != PS_OK || !a->n_tokens || !a->ffn_dim)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->ffn_dim) && ps_aligned(l->ptr[0]) && ps_aligned(l->ptr[1]);
  PS_DISPATCH(a->dt, whole,
              const auto kernel = a->activation == PS_ACTIVATION_SILU ? glu_bwd_k<T, V, false>
                                                                      : glu_bwd_k<T, V, true>;
              kernel<<<grid_of(a->n_tokens, a->ffn_dim, V), THREADS, 0, stream>>>(
                  (T *)l->ptr[0], (T *)l->ptr[1], a->n_tokens, a->ffn_dim));
  return ps_launched("glu_bwd", cudaSuccess);
}

/* ---- quantized ------------------------------------------------------------------------------- */

template <typename T, bool GELU> struct gated_product {
  using type = T;
  static constexpr bool ahead = false;
  struct part {
    ps_eight<T> g[PS__PART_ROWS], u[PS__PART_ROWS];
  };
  const T *gu;
  uint32_t f;
  __device__ __forceinline__ void load(part &p, uint32_t row, uint32_t col) const {
    const T *at = gu + (size_t)row * 2 * f + col;
#pragma unroll
    for (int i = 0; i < PS__PART_ROWS; i++) {
      p.g[i] = ps_load8(at + (size_t)i * 2 * f);
      p.u[i] = ps_load8(at + (size_t)i * 2 * f + f);
    }
  }
  __device__ __forceinline__ ps_eight<T> value(const part &p, int i) const {
    float g[PS__PART_COLS], u[PS__PART_COLS];
    ps_unpack8(g, p.g[i]);
    ps_unpack8(u, p.u[i]);
#pragma unroll
    for (int k = 0; k < PS__PART_COLS; k++)
      g[k] = gated<T, GELU>(g[k], u[k]);
    return ps_round8<T>(g);
  }
};

/* Of a launch's gu. */
template <typename T, bool GELU>
static cudaError_t quantize_product(const ps_launch *l, const ps_quantized &z,
                                    cudaStream_t stream) {
  const ps__args_glu_quantize *a = (const ps__args_glu_quantize *)l->args;
  const gated_product<T, GELU> src = {(const T *)l->ptr[0], a->ffn_dim};
  cudaError_t e = ps_clear_amax(z.scale, stream);
  if (e == cudaSuccess)
    e = ps_see(src, z, stream);
  return e == cudaSuccess ? ps_put_tiles(src, z, a->dt_q, stream) : e;
}

/* glu_quantize
 * math    s = glu_fwd(gu), rounded to dt; scale = {ps__fp8_scale_bits(amax of s), amax of s};
 *         q[r,c] = qt[c,r] = s[r,c] / scale[0], rounded to nearest even. s has glu_fwd's bits on
 *         CUDA
 * shapes  gu [T,2F], q [T,F], qt [F,T], multiples of 16; no aliasing
 * bytes   an element of s: 4 of bf16 for amax, 4 for its code, 1 a form. 8192 x 14336 bf16 in one
 *         form: 1.06 GB, 220 us at an H200's 4.8 TB/s, less what the second pass finds in L2;
 *         measured 245 us there (bench/log/2026-11-24-fp8-h200.md)
 * determinism  bitwise: elementwise, and a maximum of whole numbers
 * reference    the cpu backend's; exp differs, so s may be a neighbour in bf16, and so may amax and
 *              codes; the scale differs where amax/1.75 is a power of two or just beyond one */
extern "C" ps_status ps__cuda_glu_quantize(const ps_launch *l) {
  const ps__args_glu_quantize *a = (const ps__args_glu_quantize *)l->args;
  const ps_status st = ps_check_fp8(l, "glu_quantize", 2 + ps_n_outputs(a->forms, a->count),
                                    1u << 1, a->count != 0, a->n_tokens, a->ffn_dim, a->dt, 0);
  if (st != PS_OK)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  uint32_t next = 1;
  ps_quantized z = ps_quantized_of(l, &next, a->n_tokens, a->ffn_dim, a->forms);
  z.flushed = ps_flushed_of(l, next, a->count);
  cudaError_t e = cudaSuccess;
  PS_BY_TYPE(a->dt, e = a->activation == PS_ACTIVATION_SILU
                            ? quantize_product<T, false>(l, z, stream)
                            : quantize_product<T, true>(l, z, stream));
  return ps_launched("glu_quantize", e);
}

/* What the backward pass reads for a part, and what it makes of a row. */
template <typename T, bool GELU> struct gated_gradient {
  struct part {
    ps_eight<T> d[PS__PART_ROWS], g[PS__PART_ROWS], u[PS__PART_ROWS];
  };
  struct made {
    ps_eight<T> s, dg, du;
  };
  const T *ds, *gu;
  uint32_t f;
  __device__ __forceinline__ void load(part &p, uint32_t row, uint32_t col) const {
    const T *of_s = ds + (size_t)row * f + col, *at = gu + (size_t)row * 2 * f + col;
#pragma unroll
    for (int i = 0; i < PS__PART_ROWS; i++) {
      p.d[i] = ps_load8(of_s + (size_t)i * f);
      p.g[i] = ps_load8(at + (size_t)i * 2 * f);
      p.u[i] = ps_load8(at + (size_t)i * 2 * f + f);
    }
  }
  /* Of row @i. */
  __device__ __forceinline__ made work(const part &p, int i) const {
    float d[PS__PART_COLS], g[PS__PART_COLS], u[PS__PART_COLS];
    ps_unpack8(d, p.d[i]);
    ps_unpack8(g, p.g[i]);
    ps_unpack8(u, p.u[i]);
#pragma unroll
    for (int k = 0; k < PS__PART_COLS; k++)
      gated_back<T, GELU>(d[k], g[k], u[k]);
    return {ps_round8<T>(d), ps_round8<T>(g), ps_round8<T>(u)};
  }
};

/* As ps_see_k(), but for two amax. */
template <typename T, bool GELU>
__global__ void __launch_bounds__(PS__TILE_THREADS, sizeof(T) == 2 ? 3 : 2)
    glu_bwd_see_k(gated_gradient<T, GELU> src, uint32_t rows, uint32_t *of_s, uint32_t *of_gu) {
  const uint32_t across = (src.f + PS__TILE - 1) / PS__TILE, row0 = blockIdx.x / across * PS__TILE,
                 col = blockIdx.x % across * PS__TILE + ps__part_col(threadIdx.x);
  uint32_t s = 0, gu = 0;
#pragma unroll 1
  for (int i = 0; i < PS__TILE_PARTS; i++) {
    const uint32_t row = row0 + ps__part_row(threadIdx.x, i);
    typename gated_gradient<T, GELU>::part p;
    if (row >= rows || col >= src.f)
      break; /* nor is the next part there */
    src.load(p, row, col);
#pragma unroll
    for (int k = 0; k < PS__PART_ROWS; k++) {
      const typename gated_gradient<T, GELU>::made m = src.work(p, k);
      ps_see8<T>(&s, m.s);
      ps_see8<T>(&gu, m.dg);
      ps_see8<T>(&gu, m.du);
    }
  }
  ps_keep_amax(ps_amax_bits<T>(s), of_s);
  __syncthreads();
  ps_keep_amax(ps_amax_bits<T>(gu), of_gu);
}

/* Three tiles in shared memory: of s, of dg and of du. @gu: of 2F columns, both forms; @s: the form
 * COLS. */
template <typename T, bool GELU, uint32_t Q>
__global__ void __launch_bounds__(PS__TILE_THREADS, 2)
    glu_bwd_put_k(gated_gradient<T, GELU> src, ps_quantized gu, ps_quantized s) {
  __shared__ uint4 tile[3][PS__TILE_WORDS / 4];
  const uint32_t f = src.f, across = (f + PS__TILE - 1) / PS__TILE, n = gridDim.x - 1 - blockIdx.x,
                 row0 = n / across * PS__TILE, col0 = n % across * PS__TILE,
                 part_col = ps__part_col(threadIdx.x), col = col0 + part_col;
  typename gated_gradient<T, GELU>::part p;
  uint32_t flushed[2] = {0, 0};
  auto fetch = [&](int i) {
    const uint32_t row = row0 + ps__part_row(threadIdx.x, i);
    if (row < gu.rows && col < f)
      src.load(p, row, col);
  };
  fetch(0); /* before what needs the scales */
  const float of_gu = ps_inverse<Q>(gu), of_s = ps_inverse<PS__E4M3>(s);
  /* bf16: both parts unrolled, as the compiler splits what a loop carries into halves of words */
#pragma unroll(sizeof(T) == 2 ? PS__TILE_PARTS : 1)
  for (int i = 0; i < PS__TILE_PARTS; i++) {
    const uint32_t part_row = ps__part_row(threadIdx.x, i), row = row0 + part_row;
    uint32_t code[3][8];
    if (row >= gu.rows || col >= f)
      break; /* nor is the next part there */
    if (i)
      fetch(i);
#pragma unroll
    for (int k = 0; k < PS__PART_ROWS; k++) {
      const typename gated_gradient<T, GELU>::made m = src.work(p, k);
      ps_codes8<PS__E4M3>(code[0], k, m.s, of_s);
      ps_codes8<Q>(code[1], k, m.dg, of_gu);
      ps_codes8<Q>(code[2], k, m.du, of_gu);
      if (gu.flushed) {
        flushed[0] += ps_flushed8(code[1], k, m.dg) + ps_flushed8(code[2], k, m.du);
        flushed[1] += ps_flushed8(code[0], k, m.s);
      }
      uint8_t *at = gu.q + (size_t)(row + k) * 2 * f + col;
      ps_put_row(at, code[1], k);
      ps_put_row(at + f, code[2], k);
    }
#pragma unroll
    for (int k = 0; k < 3; k++)
      ps__part_keep((uint32_t *)tile[k], part_row, part_col, code[k]);
  }
  if (gu.flushed) {
    ps_keep_flushed(flushed[0], gu.flushed);
    ps_keep_flushed(flushed[1], s.flushed);
  }
  __syncthreads();
  ps_put_runs(s.qt, (const uint32_t *)tile[0], s.rows, f, row0, col0);
  ps_put_runs(gu.qt, (const uint32_t *)tile[1], s.rows, f, row0, col0);
  ps_put_runs(gu.qt + (size_t)f * s.rows, (const uint32_t *)tile[2], s.rows, f, row0, col0);
}

template <typename T, bool GELU>
static cudaError_t quantize_gradient(const gated_gradient<T, GELU> &src, const ps_quantized &gu,
                                     const ps_quantized &s, uint32_t dt_q, cudaStream_t stream) {
  const uint32_t n = ps_tiles(s.rows, s.cols);
  cudaError_t e = ps_clear_amax(gu.scale, stream);
  if (e == cudaSuccess)
    e = ps_clear_amax(s.scale, stream);
  if (e != cudaSuccess)
    return e;
  glu_bwd_see_k<<<n, PS__TILE_THREADS, 0, stream>>>(src, s.rows, (uint32_t *)s.scale + 1,
                                                    (uint32_t *)gu.scale + 1);
  PS_BY_FP8(dt_q, glu_bwd_put_k<T, GELU, Q><<<n, PS__TILE_THREADS, 0, stream>>>(src, gu, s));
  return cudaGetLastError();
}

/* Of a launch's ds and gu. */
template <typename T, bool GELU>
static cudaError_t quantize_gradient_of(const ps_launch *l, const ps_quantized &gu,
                                        const ps_quantized &s, cudaStream_t stream) {
  const ps__args_glu_quantize *a = (const ps__args_glu_quantize *)l->args;
  return quantize_gradient(
      gated_gradient<T, GELU>{(const T *)l->ptr[0], (const T *)l->ptr[1], a->ffn_dim}, gu, s,
      a->dt_q, stream);
}

/* glu_bwd_quantize
 * math    ds and gu become what glu_bwd leaves, rounded to dt; then each is quantized with a scale
 *         of its own: gu's gradient to dt_q in both forms, s to e4m3 in the form COLS. They have
 *         glu_bwd's bits on CUDA
 * shapes  ds [T,F], gu, dgu [T,2F], dgut [2F,T], st [F,T], multiples of 16; no aliasing
 * bytes   an element of s: 6 of bf16 for the two amax, 6 for the codes, 5 of codes. 8192 x 14336
 *         bf16: 2.00 GB, 416 us at an H200's 4.8 TB/s, less what the second pass finds in L2;
 *         measured 496 us there (bench/log/2026-11-21-cuda-memory-bound.md)
 * determinism  bitwise: elementwise, maxima and sums of whole numbers
 * reference    as glu_quantize's */
extern "C" ps_status ps__cuda_glu_bwd_quantize(const ps_launch *l) {
  const ps__args_glu_quantize *a = (const ps__args_glu_quantize *)l->args;
  const ps_status st = ps_check_fp8(l, "glu_bwd_quantize", 7 + (a->count != 0), 1u << 2 | 1u << 5,
                                    a->count != 0, a->n_tokens, a->ffn_dim, a->dt, 0);
  if (st != PS_OK)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  uint32_t next = 2;
  ps_quantized gu = ps_quantized_of(l, &next, a->n_tokens, 2 * a->ffn_dim,
                                    PS_FORM_ROWS | PS_FORM_COLS),
               s = ps_quantized_of(l, &next, a->n_tokens, a->ffn_dim, PS_FORM_COLS);
  gu.flushed = ps_flushed_of(l, next, a->count);
  s.flushed = ps_flushed_of(l, next, a->count ? a->count + 1 : 0);
  cudaError_t e = cudaSuccess;
  PS_BY_TYPE(a->dt, e = a->activation == PS_ACTIVATION_SILU
                            ? quantize_gradient_of<T, false>(l, gu, s, stream)
                            : quantize_gradient_of<T, true>(l, gu, s, stream));
  return ps_launched("glu_bwd_quantize", e);
}
