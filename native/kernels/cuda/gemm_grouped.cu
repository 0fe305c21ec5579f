/* gemm_grouped.cu - products of experts' rows: one product an expert, of rows that offsets cut on
 * the device. bf16 by the tensor cores of 8.0 and newer; on 9.0 gemm_grouped_90.cu is faster; fp32,
 * and bf16 of sizes that are no multiples of 8, plainly.
 *
 * A block of 128 threads computes a tile of 128 x 128, each warp 64 x 64 of it, and loops over the
 * sum in order: no atomics, no split sums. Slabs of 32 of the sum come through a ring of shared
 * memory. The grid has as many tiles as any offsets need, ceil(R/128) + E rows of them; a block
 * finds its expert in the offsets, and a surplus block returns. */
#include "kernels/cuda/grouped.h"

namespace {

enum { TILE = 128, BK = 32, STAGES = 4, THREADS = 128, OPERAND = TILE * BK };
enum { SMEM_BYTES = STAGES * 2 * OPERAND * 2 };

struct params {
  const __nv_bfloat16 *a, *b;
  __nv_bfloat16 *c;
  const int32_t *offsets;
  const uint32_t *slot_of;
  uint32_t n_experts, m, cols, sum, m_tiles, n_tiles;
  uint32_t lda, ldb; /* m: WGRAD's rows of an expert's output */
};

/* The expert of row of tiles @tile, and its rows; the tile's place in it. False: a surplus tile.
 * Every lane of a warp calls it. */
__device__ __forceinline__ bool find_rows(const int32_t *offsets, uint32_t n_experts, uint32_t tile,
                                          uint32_t *e, uint32_t *begin, uint32_t *end,
                                          uint32_t *at) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t before = 0;
  for (uint32_t e0 = 0; e0 < n_experts; e0 += 32) {
    const uint32_t i = e0 + lane < n_experts ? e0 + lane : n_experts - 1;
    const uint32_t lo = (uint32_t)__ldg(offsets + i), hi = (uint32_t)__ldg(offsets + i + 1);
    const uint32_t n = e0 + lane < n_experts ? (hi - lo + TILE - 1) / TILE : 0;
    uint32_t sum = n;
#pragma unroll
    for (int w = 1; w < 32; w *= 2) {
      const uint32_t x = __shfl_up_sync(0xffffffffu, sum, w);
      sum += lane >= (uint32_t)w ? x : 0;
    }
    const uint32_t in = __ballot_sync(0xffffffffu, before + sum > tile);
    if (in) {
      const int from = __ffs((int)in) - 1;
      *e = e0 + (uint32_t)from;
      *begin = __shfl_sync(0xffffffffu, lo, from);
      *end = __shfl_sync(0xffffffffu, hi, from);
      *at = tile - (before + __shfl_sync(0xffffffffu, sum - n, from));
      return true;
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return false;
}

/* ---- operands in shared memory --------------------------------------------------------------- */

/* K-major: [128 of the output][32 of the sum]; MN-major: [32 of the sum][128 of the output]. In
 * elements, of 8 that lie together. Swizzled: 8 addresses of ldmatrix lie in different banks. */
template <bool K_MAJOR> __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t chunk) {
  return K_MAJOR ? row * BK + (chunk ^ (row >> 1 & 3)) * 8 : row * TILE + (chunk ^ (row & 7)) * 8;
}

/* A slab, with zeros beyond @out_end and @sum_end. */
template <bool K_MAJOR>
__device__ __forceinline__ void load(__nv_bfloat16 *to, const __nv_bfloat16 *from, uint32_t ld,
                                     uint32_t out0, uint32_t out_end, uint32_t sum0,
                                     uint32_t sum_end) {
  constexpr uint32_t chunks = (K_MAJOR ? BK : TILE) / 8;
#pragma unroll
  for (uint32_t i = 0; i < OPERAND / 8 / THREADS; i++) {
    const uint32_t n = i * THREADS + threadIdx.x, row = n / chunks, chunk = n % chunks,
                   out = out0 + (K_MAJOR ? row : chunk * 8),
                   sum = sum0 + (K_MAJOR ? chunk * 8 : row);
    const bool there = out < out_end && sum < sum_end;
    ps_copy_async(to + place<K_MAJOR>(row, chunk),
                  there ? from + (size_t)(K_MAJOR ? out : sum) * ld + (K_MAJOR ? sum : out) : from,
                  there);
  }
}

/* Four 8x8 matrices. They are 16 of the output by 16 of the sum from (@out, @sum) on, those of
 * lanes 8-15 8 further in the output with OUT_FIRST, else in the sum. */
template <bool K_MAJOR, bool OUT_FIRST>
__device__ __forceinline__ void fragment(uint32_t (&x)[4], const __nv_bfloat16 *from, uint32_t out,
                                         uint32_t sum) {
  const uint32_t lane = threadIdx.x % 32, one = lane / 8 % 2 * 8, two = lane / 16 * 8,
                 o = out + (OUT_FIRST ? one : two), s = sum + (OUT_FIRST ? two : one);
  const uint32_t at =
      K_MAJOR ? place<true>(o + lane % 8, s / 8) : place<false>(s + lane % 8, o / 8);
  const uint32_t address = (uint32_t)__cvta_generic_to_shared(from + at);
  if (K_MAJOR)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
               "%7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A warp's 64 x 64 of a slab. */
template <bool A_K, bool B_K>
__device__ __forceinline__ void multiply_slab(float (&d)[4][8][4], const __nv_bfloat16 *a,
                                              const __nv_bfloat16 *b, uint32_t row, uint32_t col) {
#pragma unroll
  for (uint32_t s = 0; s < BK; s += 16) {
    uint32_t x[4][4], y[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
      fragment<A_K, true>(x[i], a, row + 16 * i, s);
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      fragment<B_K, false>(y[j], b, col + 16 * j, s);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
#pragma unroll
      for (uint32_t j = 0; j < 8; j++)
        multiply(d[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
  }
}

template <bool ACCUMULATE>
__device__ __forceinline__ void store(const float (&d)[4][8][4], __nv_bfloat16 *c, uint32_t ld,
                                      uint32_t row, uint32_t row_end, uint32_t col,
                                      uint32_t col_end) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t i = 0; i < 4; i++)
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const uint32_t r = row + 16 * i + 8 * half + lane / 4;
      if (r >= row_end)
        continue;
#pragma unroll
      for (uint32_t j = 0; j < 8; j++) {
        const uint32_t n = col + 8 * j + lane % 4 * 2;
        if (n >= col_end)
          continue;
        __nv_bfloat162 *at = (__nv_bfloat162 *)(c + (size_t)r * ld + n);
        const float2 was = ACCUMULATE ? __bfloat1622float2(*at) : make_float2(0.0f, 0.0f);
        *at = __floats2bfloat162_rn(d[i][j][2 * half] + was.x, d[i][j][2 * half + 1] + was.y);
      }
    }
}

template <int ROLE, bool ACCUMULATE>
__global__ void __launch_bounds__(THREADS, 2) grouped_k(const params p) {
  constexpr bool wgrad = ROLE == PS_GEMM_WGRAD, A_K = !wgrad, B_K = ROLE == PS_GEMM_FORWARD;
  extern __shared__ __align__(128) __nv_bfloat16 ring[];
  uint32_t e, begin, end, i, j;
  if (wgrad) {
    const uint32_t each = p.m_tiles * p.n_tiles;
    e = blockIdx.x / each;
    begin = e ? (uint32_t)__ldg(p.offsets + e) : 0;
    end = (uint32_t)__ldg(p.offsets + e + 1);
    ps_grouped_tile(blockIdx.x - e * each, p.m_tiles, p.n_tiles, &i, &j);
  } else {
    uint32_t tile;
    ps_grouped_tile(blockIdx.x, p.m_tiles, p.n_tiles, &tile, &j);
    if (!find_rows(p.offsets, p.n_experts, tile, &e, &begin, &end, &i))
      return;
  }
  const uint32_t sum0 = wgrad ? begin : 0, sum_end = wgrad ? end : p.sum,
                 row0 = i * TILE + (wgrad ? 0 : begin), row_end = wgrad ? p.m : end,
                 col0 = j * TILE, slabs = (sum_end - sum0 + BK - 1) / BK;
  const __nv_bfloat16 *b =
      wgrad ? p.b : p.b + (size_t)ps_grouped_plane(p.slot_of, e) * p.sum * p.cols;
  auto fetch = [&](uint32_t s) {
    __nv_bfloat16 *to = ring + s % STAGES * 2 * OPERAND;
    if (s < slabs) {
      load<A_K>(to, p.a, p.lda, row0, row_end, sum0 + s * BK, sum_end);
      load<B_K>(to + OPERAND, b, p.ldb, col0, p.cols, sum0 + s * BK, sum_end);
    }
    ps_copy_commit();
  };
  float d[4][8][4] = {};
  const uint32_t warp = threadIdx.x / 32, row = warp / 2 * 64, col = warp % 2 * 64;
  for (uint32_t s = 0; s < STAGES - 1; s++)
    fetch(s);
  for (uint32_t s = 0; s < slabs; s++) {
    ps_copy_wait<STAGES - 2>();
    __syncthreads();
    fetch(s + STAGES - 1);
    const __nv_bfloat16 *slab = ring + s % STAGES * 2 * OPERAND;
    multiply_slab<A_K, B_K>(d, slab, slab + OPERAND, row, col);
  }
  store<ACCUMULATE>(d, p.c + (wgrad ? (size_t)e * p.m * p.cols : 0), p.cols, row0 + row, row_end,
                    col0 + col, p.cols);
}

/* ---- plainly --------------------------------------------------------------------------------- */

/* One output a thread. */
template <typename T, int ROLE>
__global__ void __launch_bounds__(256)
    plain_k(const T *a, const T *b, T *c, const int32_t *offsets, const uint32_t *slot_of,
            uint32_t rows, uint32_t n_out, uint32_t n_in, uint32_t n_experts, uint32_t accumulate) {
  const uint32_t cols = ROLE == PS_GEMM_FORWARD ? n_out : n_in,
                 col = blockIdx.y * blockDim.x + threadIdx.x;
  uint32_t r = blockIdx.x, e = 0;
  if (col >= cols)
    return;
  float sum = 0.0f;
  if (ROLE == PS_GEMM_WGRAD) {
    e = r / n_out;
    const uint32_t n = r % n_out, end = (uint32_t)offsets[e + 1];
    for (uint32_t i = e ? (uint32_t)offsets[e] : 0; i < end; i++)
      sum += ps_to_f32(a[(size_t)i * n_out + n]) * ps_to_f32(b[(size_t)i * n_in + col]);
    sum += accumulate ? ps_to_f32(c[(size_t)r * cols + col]) : 0.0f;
  } else {
    while (e < n_experts && (uint32_t)offsets[e + 1] <= r)
      e++;
    if (e == n_experts)
      return;
    const T *w = b + (size_t)ps_grouped_plane(slot_of, e) * n_out * n_in;
    if (ROLE == PS_GEMM_FORWARD)
      for (uint32_t i = 0; i < n_in; i++)
        sum += ps_to_f32(a[(size_t)r * n_in + i]) * ps_to_f32(w[(size_t)col * n_in + i]);
    else
      for (uint32_t i = 0; i < n_out; i++)
        sum += ps_to_f32(a[(size_t)r * n_out + i]) * ps_to_f32(w[(size_t)i * n_in + col]);
  }
  c[(size_t)r * cols + col] = ps_from_f32<T>(sum);
}

template <typename T> void plain(const ps_grouped *g, cudaStream_t stream) {
  const bool wgrad = g->role == PS_GEMM_WGRAD;
  const auto kernel = g->role == PS_GEMM_FORWARD ? plain_k<T, PS_GEMM_FORWARD>
                      : wgrad                    ? plain_k<T, PS_GEMM_WGRAD>
                                                 : plain_k<T, PS_GEMM_DGRAD>;
  const uint32_t cols = g->role == PS_GEMM_FORWARD ? g->n_out : g->n_in;
  kernel<<<dim3(wgrad ? g->n_experts * g->n_out : g->rows, ps_ceil_div(cols, 256)), 256, 0,
           stream>>>((const T *)g->a, (const T *)g->b, (T *)g->c, g->offsets, g->slot_of, g->rows,
                     g->n_out, g->n_in, g->n_experts, g->accumulate);
}

template <int ROLE, bool ACCUMULATE>
cudaError_t launch(const params &p, uint32_t n_blocks, cudaStream_t stream) {
  const auto kernel = grouped_k<ROLE, ACCUMULATE>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES);
  if (e != cudaSuccess)
    return e;
  kernel<<<n_blocks, THREADS, SMEM_BYTES, stream>>>(p);
  return cudaSuccess;
}

} // namespace

ps_status ps_grouped_80(const ps_grouped *g, cudaStream_t stream) {
  const bool forward = g->role == PS_GEMM_FORWARD, wgrad = g->role == PS_GEMM_WGRAD;
  params p = {(const __nv_bfloat16 *)g->a,
              (const __nv_bfloat16 *)g->b,
              (__nv_bfloat16 *)g->c,
              g->offsets,
              g->slot_of,
              g->n_experts};
  p.m = g->n_out;
  p.cols = forward ? g->n_out : g->n_in;
  p.sum = forward ? g->n_in : g->n_out;
  p.lda = forward ? g->n_in : g->n_out;
  p.ldb = g->n_in;
  p.m_tiles = wgrad ? ps_ceil_div(p.m, TILE) : ps_ceil_div(g->rows, TILE) + g->n_experts;
  p.n_tiles = ps_ceil_div(p.cols, TILE);
  const uint64_t n = (uint64_t)p.m_tiles * p.n_tiles * (wgrad ? g->n_experts : 1);
  if (n > INT32_MAX)
    return ps__fail(PS_EINVAL,
                    "gemm_grouped: %llu tiles of 128 x 128: at most 2^31 - 1 are a launch",
                    (unsigned long long)n);
  const cudaError_t e = forward         ? launch<PS_GEMM_FORWARD, false>(p, (uint32_t)n, stream)
                        : !wgrad        ? launch<PS_GEMM_DGRAD, false>(p, (uint32_t)n, stream)
                        : g->accumulate ? launch<PS_GEMM_WGRAD, true>(p, (uint32_t)n, stream)
                                        : launch<PS_GEMM_WGRAD, false>(p, (uint32_t)n, stream);
  return ps_launched("gemm_grouped", e);
}

static ps_status run(const ps_launch *l, const ps__args_gemm_grouped *a, const char *op,
                     const uint32_t *slot_of, uint32_t n_slots) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps_status st = ps_check(l, op, slot_of ? 5 : 4, a->dt, 0);
  if (st != PS_OK || (!a->n_tokens && a->role != PS_GEMM_WGRAD))
    return st;
  const ps_grouped g = {l->ptr[0],
                        l->ptr[1],
                        l->ptr[3],
                        (const int32_t *)l->ptr[2],
                        a->n_tokens * a->n_used,
                        a->n_out,
                        a->n_in,
                        a->n_experts,
                        a->role,
                        a->accumulate,
                        slot_of,
                        n_slots};
  const bool aligned = ps_aligned(g.a) && ps_aligned(g.b) && ps_aligned(g.c);
  if (a->dt == PS_F32) {
    plain<float>(&g, exec->stream);
    return ps_launched(op, cudaSuccess);
  }
  if (a->n_out % 8 || a->n_in % 8 || !aligned || !g.rows) {
    plain<__nv_bfloat16>(&g, exec->stream);
    return ps_launched(op, cudaSuccess);
  }
#ifdef PS_GROUPED_90
  int major = 0, minor = 0;
  cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, exec->device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, exec->device);
  if (e != cudaSuccess)
    return ps_launched(op, e);
  if (major == 9 && minor == 0)
    return ps_grouped_90(&g, (uint32_t)exec->n_sms, exec->stream);
#endif
  return ps_grouped_80(&g, exec->stream);
}

/* gemm_grouped
 * math    ops.h; products of bf16 are exact in fp32, sums of fp32, one rounding at the store. With
 *         accumulate dW is added in fp32 before it
 * shapes  by the tensor cores: bf16, n_out and n_in multiples of 8, addresses of 16 bytes
 * flops   2*R*n_out*n_in; mma.sync on an H100, where gemm_grouped_90.cu serves in its place: 297
 *         TFLOP/s with 16,384 tokens and 309 with 32,768, the mean of the roles (E 128, k 8, D
 *         2048, I 768)
 * bytes   the operands once at least
 * determinism  bitwise: a row's bits, and those of an expert's dW, depend on nothing but its rows
 * reference    fp64: sum * 2^-24 * sum |a*b| and half an ulp of bf16 */
extern "C" ps_status ps__cuda_gemm_grouped(const ps_launch *l) {
  const ps__args_gemm_grouped *a = (const ps__args_gemm_grouped *)l->args;
  return run(l, a, "gemm_grouped", NULL, 0);
}
extern "C" ps_status ps__cuda_gemm_grouped_rows(const ps_launch *l) {
  return ps__cuda_gemm_grouped(l);
}
extern "C" ps_status ps__cuda_gemm_grouped_slots(const ps_launch *l) {
  const ps__args_grouped_slots *a = (const ps__args_grouped_slots *)l->args;
  return run(l, &a->product, "gemm_grouped_slots", (const uint32_t *)l->ptr[4], a->n_slots);
}
