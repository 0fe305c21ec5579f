/* gemm_grouped_90.cu - grouped products of bf16 on compute capability 9.0 (sm_90a): wgmma, operands
 * by the bulk tensor copy engine.
 *
 * A block of threads stays on its multiprocessor and takes the output tiles (128 x 256) blockIdx,
 * blockIdx + gridDim, ...: the tiles of expert 0 first, then those of 1. One thread copies slabs of
 * 64 of the summed dimension to a ring of shared memory; two warp groups of 128 threads multiply,
 * each 64 rows of the tile. They leave a tile in shared memory, from where the copy engine stores
 * it row by row, while they go on with the next.
 *   - FORWARD and DGRAD: rows of a tile beyond the expert's are computed from whatever lies there,
 *     and not stored.
 *   - WGRAD: rows are summed. Those of an expert's last slab that are not its own are overwritten
 *     with zeros in shared memory, up to a multiple of 16; the other ones are not read.
 * Operands are taken as they lie in memory: what is contiguous along the sum is "K-major", what is
 * contiguous along the output "MN-major" (PTX ISA, "Matrix descriptor").
 *
 * rates   H100 (700 W), bench/moe_probe.cu, TFLOP/s; the products of gate with up and of down,
 *         PyTorch 2.11's grouped product in the same call in brackets. E 128, k 8, D 2048, I 768:
 *           tokens   forward             gradient of rows    gradient of weights
 *            8,192   610, 533 (520, 438) 613, 559 (523, 478) 463, 512 (487, 442)
 *           32,768   692, 543 (650, 527) 584, 580 (598, 617) 593, 576 (606, 595)
 *         Without the gradients of weights, which had a stage less then, all roles in turn for 2 s:
 *         584 (531) with 16,384 tokens, 598 (584) with 32,768. */
#include "kernels/cuda/grouped.h"
#include <cuda.h>

namespace {

enum { BM = 128, BN = 256, BK = 64, THREADS = 384, CHUNK = 64 };
enum {
  A_BYTES = BM * BK * 2,
  B_BYTES = BN * BK * 2,
  STAGE_BYTES = A_BYTES + B_BYTES,
  CHUNK_BYTES = CHUNK * BK * 2 /* 64 columns of an MN-major operand, or 64 rows of a K-major one */
};
/* Shared memory is a ring of N stages, then the tile that is being stored: in one part of all its
 * columns or, where a fourth stage takes the room, in two. Sums over rows are short: what comes
 * from memory for the next tile while one is stored counts more for them. */
template <int N> struct ring {
  enum { PARTS = N > 3 ? 2 : 1, COLS = BN / PARTS, EACH = COLS / 16 };
  enum {
    PITCH = COLS * 2 + 16, /* BYTES; so that 8 rows lie in different banks */
    OUT = N * STAGE_BYTES,
    FULL = OUT + BM * PITCH,
    EMPTY = FULL + 8 * N,
    BYTES = EMPTY + 8 * N
  };
  static_assert(BYTES <= 227 * 1024, "what a block gets");
};
template <int ROLE, bool ACCUMULATE>
constexpr int stages = ROLE == PS_GEMM_WGRAD && !ACCUMULATE ? 4 : 3;

struct params {
  const int32_t *offsets;
  __nv_bfloat16 *c;
  uint32_t n_experts, m, cols, sum; /* m: WGRAD's rows of an expert's output; sum: not WGRAD's */
};

/* ---- instructions ---------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t phase) {
  asm volatile("{\n.reg .pred p;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@p bra done;\nbra again;\ndone:\n}" ::"r"(bar),
               "r"(phase)
               : "memory");
}
__device__ __forceinline__ void copy_2d(uint32_t to, const CUtensorMap *map, uint32_t bar,
                                        uint32_t x, uint32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(map), "r"(bar), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void copy_3d(uint32_t to, const CUtensorMap *map, uint32_t bar,
                                        uint32_t x, uint32_t y, uint32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %4, %5}], [%2];" ::"r"(to),
               "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void store_bulk(void *to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* An operand at @at in shared memory, swizzled by 128 bytes: 8 rows of 128 bytes after 1024. @lead:
 * BYTES between 64 columns of an MN-major operand. */
__device__ __forceinline__ uint64_t descriptor(uint32_t at, uint32_t lead) {
  return (uint64_t)((at & 0x3ffff) >> 4) | (uint64_t)(lead >> 4) << 16 |
         (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

#define D8(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),      \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)

/* d (+)= A B of 64 x 256 x 16; TA, TB: 1 where the operand is MN-major. */
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b, uint32_t add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, %128, %129, p, 1, 1, %131, %132;\n}\n"
      : D32(0), D32(32), D32(64), D32(96)
      : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}

/* ---- tiles ----------------------------------------------------------------------------------- */

/* The tiles of a block, in order. */
template <int ROLE> struct walk {
  uint32_t e = 0, first = 0, m_tiles = 0; /* of the expert: its first tile, its rows of tiles */
  int32_t begin = 0, end = 0;             /* its rows */
  uint32_t i, j;                          /* the tile's place in the expert */
  uint32_t n_tiles, next = 0;             /* columns of tiles; the expert to look at next */

  __device__ __forceinline__ bool find(uint32_t t, const params &p) {
    while (t >= first + m_tiles * n_tiles) {
      first += m_tiles * n_tiles;
      if (next >= p.n_experts)
        return false;
      e = next++;
      begin = next == 1 ? 0 : end;
      end = __ldg(p.offsets + next);
      m_tiles = ROLE == PS_GEMM_WGRAD ? (p.m + BM - 1) / BM : (uint32_t)(end - begin + BM - 1) / BM;
    }
    ps_grouped_tile(t - first, m_tiles, n_tiles, &i, &j);
    return true;
  }
  __device__ __forceinline__ walk(const params &p) { n_tiles = (p.cols + BN - 1) / BN; }
  /* slabs of the sum */
  __device__ __forceinline__ uint32_t slabs(const params &p) const {
    return ROLE == PS_GEMM_WGRAD ? (uint32_t)(end - begin + BK - 1) / BK : (p.sum + BK - 1) / BK;
  }
};

/* One thread fills the ring. */
template <int ROLE, int STAGES>
__device__ __forceinline__ void produce(const CUtensorMap *map_a, const CUtensorMap *map_b,
                                        const params &p, uint32_t smem) {
  const uint32_t full = smem + ring<STAGES>::FULL, empty = smem + ring<STAGES>::EMPTY;
  walk<ROLE> w(p);
  uint32_t stage = 0, phase = 0;
  for (uint32_t t = blockIdx.x; w.find(t, p); t += gridDim.x) {
    const uint32_t slabs = w.slabs(p), col = w.j * BN;
    for (uint32_t s = 0; s < slabs; s++) {
      const uint32_t a = smem + stage * STAGE_BYTES, b = a + A_BYTES, bar = full + 8 * stage;
      barrier_wait(empty + 8 * stage, phase ^ 1);
      barrier_expect(bar, STAGE_BYTES);
      if (ROLE == PS_GEMM_WGRAD) {
        const uint32_t row = (uint32_t)w.begin + s * BK;
#pragma unroll
        for (uint32_t k = 0; k < BM / CHUNK; k++)
          copy_2d(a + k * CHUNK_BYTES, map_a, bar, w.i * BM + k * CHUNK, row);
#pragma unroll
        for (uint32_t k = 0; k < BN / CHUNK; k++)
          copy_2d(b + k * CHUNK_BYTES, map_b, bar, col + k * CHUNK, row);
      } else {
        copy_2d(a, map_a, bar, s * BK, (uint32_t)w.begin + w.i * BM);
        if (ROLE == PS_GEMM_FORWARD) {
          copy_3d(b, map_b, bar, s * BK, col, w.e);
        } else {
#pragma unroll
          for (uint32_t k = 0; k < BN / CHUNK; k++)
            copy_3d(b + k * CHUNK_BYTES, map_b, bar, col + k * CHUNK, s * BK, w.e);
        }
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      phase ^= stage == 0;
    }
  }
}

/* Zeros for the rows from @rows on of an expert's last slab, in the operands of warp group @group;
 * both groups write those of B. Swizzling stays within a row of 128 bytes. */
__device__ __forceinline__ void clear_rows(uint8_t *slab, uint32_t group, uint32_t rows) {
  const uint32_t n = ((rows + 15) / 16 * 16 - rows) * 8; /* 16 bytes each */
  for (uint32_t i = threadIdx.x % 128; i < n; i += 128) {
    const uint32_t at = rows * 128 + i * 16;
    *(uint4 *)(slab + group * CHUNK_BYTES + at) = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t k = 0; k < BN / CHUNK; k++)
      *(uint4 *)(slab + A_BYTES + k * CHUNK_BYTES + at) = make_uint4(0, 0, 0, 0);
  }
  async_fence();
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

/* The 16 x 256 of a warp, from the registers of wgmma to shared memory at @out, then to c. @zero:
 * of an expert without rows. The registers are not written: wgmma has them. */
template <int STAGES, bool ACCUMULATE>
__device__ __forceinline__ void store_tile(const float (&d)[128], bool zero, uint8_t *out,
                                           uint32_t ld, uint32_t row, uint32_t row_end,
                                           uint32_t col, __nv_bfloat16 *c) {
  enum { PITCH = ring<STAGES>::PITCH, COLS = ring<STAGES>::COLS, EACH = ring<STAGES>::EACH };
  const uint32_t lane = threadIdx.x % 32,
                 to = shared_address(out) + lane % 16 * PITCH + lane / 16 * 16;
  const __nv_bfloat16 *was = c + (size_t)(row + lane / 4) * ld + col + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < BN / 16; j++) {
    if (j % EACH == 0) {
      /* the rows that this lane gave to the copy engine have been read */
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
    }
    uint32_t x[4];
#pragma unroll
    for (int k = 0; k < 4; k++) { /* rows 8 further: k % 2; columns: k / 2 */
      float2 y = make_float2(d[8 * j + 2 * k], d[8 * j + 2 * k + 1]);
      if (ACCUMULATE) {
        if (row + lane / 4 + k % 2 * 8 < row_end && col + 16 * j + k / 2 * 8 < ld) {
          const float2 z = __bfloat1622float2(
              *(const __nv_bfloat162 *)(was + (size_t)(k % 2 * 8) * ld + 16 * j + k / 2 * 8));
          y.x += z.x, y.y += z.y;
        }
      } else if (zero) {
        y = make_float2(0.0f, 0.0f);
      }
      const __nv_bfloat162 two = __floats2bfloat162_rn(y.x, y.y);
      x[k] = *(const uint32_t *)&two;
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     to + 32 * (j % EACH)),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
    if (j % EACH == EACH - 1) {
      async_fence();
      __syncwarp();
      const uint32_t from = col + j / EACH * COLS;
      if (lane < 16 && row + lane < row_end && from < ld)
        store_bulk(c + (size_t)(row + lane) * ld + from, shared_address(out) + lane * PITCH,
                   2 * (ld - from < COLS ? ld - from : COLS));
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
}

/* A warp group multiplies. */
template <int ROLE, bool ACCUMULATE, int STAGES>
__device__ __forceinline__ void consume(const params &p, uint8_t *smem) {
  constexpr int TA = ROLE == PS_GEMM_WGRAD, TB = ROLE != PS_GEMM_FORWARD;
  /* BYTES between 16 of the sum */
  constexpr uint32_t step_a = TA ? 16 * 128 : 32, step_b = TB ? 16 * 128 : 32;
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32,
                 lane = threadIdx.x % 32, slabs_at = shared_address(smem),
                 full = slabs_at + ring<STAGES>::FULL, empty = slabs_at + ring<STAGES>::EMPTY;
  uint8_t *out = smem + ring<STAGES>::OUT + (group * 4 + warp) * 16 * ring<STAGES>::PITCH;
  walk<ROLE> w(p);
  uint32_t stage = 0, phase = 0;
  for (uint32_t t = blockIdx.x; w.find(t, p); t += gridDim.x) {
    float d[128]; /* the first product does not add to them */
    const uint32_t slabs = w.slabs(p);
    uint32_t held = STAGES; /* the slab that the products in flight before the last ones read */
    for (uint32_t s = 0; s < slabs; s++) {
      uint32_t steps = BK / 16;
      barrier_wait(full + 8 * stage, phase);
      if (ROLE == PS_GEMM_WGRAD && s + 1 == slabs) {
        const uint32_t rows = (uint32_t)(w.end - w.begin) - s * BK;
        if (rows < BK) {
          steps = (rows + 15) / 16;
          clear_rows(smem + stage * STAGE_BYTES, group, rows);
        }
      }
      const uint32_t at = slabs_at + stage * STAGE_BYTES;
      const uint64_t a = descriptor(at + group * CHUNK_BYTES, TA ? CHUNK_BYTES : 16),
                     b = descriptor(at + A_BYTES, TB ? CHUNK_BYTES : 16);
      wgmma_fence();
      if (ROLE != PS_GEMM_WGRAD || steps == BK / 16) {
#pragma unroll
        for (uint32_t k = 0; k < BK / 16; k++)
          multiply<TA, TB>(d, a + (k * step_a >> 4), b + (k * step_b >> 4), s > 0 || k > 0);
      } else {
#pragma unroll 1
        for (uint32_t k = 0; k < steps; k++)
          multiply<TA, TB>(d, a + (k * step_a >> 4), b + (k * step_b >> 4), s > 0 || k > 0);
      }
      wgmma_commit();
      if (held < STAGES) {
        wgmma_wait<1>();
        if (lane == 0)
          barrier_arrive(empty + 8 * held);
      }
      held = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      phase ^= stage == 0;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 128; i++) /* nothing reads them before */
      asm volatile("" : "+f"(d[i])::"memory");
    if (held < STAGES && lane == 0)
      barrier_arrive(empty + 8 * held);
    const uint32_t row = w.i * BM + group * 64 + warp * 16, col = w.j * BN;
    if (ROLE != PS_GEMM_WGRAD)
      store_tile<STAGES, false>(d, false, out, p.cols, (uint32_t)w.begin + row, (uint32_t)w.end,
                                col, p.c);
    else if (!ACCUMULATE || slabs > 0)
      store_tile<STAGES, ACCUMULATE>(d, slabs == 0, out, p.cols, row, p.m, col,
                                     p.c + (size_t)w.e * p.m * p.cols);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <int ROLE, bool ACCUMULATE>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_k(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
              const params p) {
  constexpr int STAGES = stages<ROLE, ACCUMULATE>;
  extern __shared__ __align__(1024) uint8_t smem[];
  if (threadIdx.x == 0) {
    const uint32_t at = shared_address(smem);
    for (uint32_t i = 0; i < STAGES; i++) {
      barrier_init(at + ring<STAGES>::FULL + 8 * i, 1);
      barrier_init(at + ring<STAGES>::EMPTY + 8 * i, 8); /* a lane of each warp that multiplies */
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      produce<ROLE, STAGES>(&map_a, &map_b, p, shared_address(smem));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<ROLE, ACCUMULATE, STAGES>(p, smem);
  }
}

/* ---- launches -------------------------------------------------------------------------------- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's, which no build links. */
encode_fn find_encode() {
  void *fn = NULL;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
                                                         cudaEnableDefault, &found);
#else
  const cudaError_t e =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &fn, cudaEnableDefault, &found);
#endif
  return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? (encode_fn)fn : NULL;
}

/* A tensor [planes,rows,cols] of bf16, copied in boxes of [1,box_rows,64]. What lies beyond an edge
 * is read as zeros. */
ps_status encode(CUtensorMap *map, const void *base, uint64_t planes, uint64_t rows, uint64_t cols,
                 uint32_t box_rows) {
  static const encode_fn fn = find_encode();
  if (!fn)
    return ps__fail(PS_EDEVICE, "gemm_grouped: the driver has no cuTensorMapEncodeTiled: it is "
                                "older than CUDA 12");
  const cuuint64_t sizes[3] = {cols, rows, planes}, strides[2] = {cols * 2, rows * cols * 2};
  const cuuint32_t box[3] = {CHUNK, box_rows, 1}, ones[3] = {1, 1, 1};
  const CUresult e =
      fn(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, planes ? 3 : 2, (void *)base, sizes, strides, box,
         ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return e == CUDA_SUCCESS ? PS_OK
                           : ps__fail(PS_EDEVICE,
                                      "gemm_grouped: the driver refused a tensor of %llu x %llu x "
                                      "%llu at %p: error %d",
                                      (unsigned long long)planes, (unsigned long long)rows,
                                      (unsigned long long)cols, base, (int)e);
}

template <int ROLE, bool ACCUMULATE>
cudaError_t launch(const CUtensorMap &a, const CUtensorMap &b, const params &p, uint32_t n_sms,
                   cudaStream_t stream) {
  const auto kernel = grouped_k<ROLE, ACCUMULATE>;
  constexpr int bytes = ring<stages<ROLE, ACCUMULATE>>::BYTES;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess)
    return e;
  kernel<<<n_sms, THREADS, bytes, stream>>>(a, b, p);
  return cudaSuccess;
}

} // namespace

ps_status ps_grouped_90(const ps_grouped *g, uint32_t n_sms, cudaStream_t stream) {
  const uint32_t role = g->role;
  const bool forward = role == PS_GEMM_FORWARD, wgrad = role == PS_GEMM_WGRAD;
  CUtensorMap a, b;
  ps_status st = encode(&a, g->a, 0, g->rows, forward ? g->n_in : g->n_out, wgrad ? BK : BM);
  if (st == PS_OK)
    st = wgrad ? encode(&b, g->b, 0, g->rows, g->n_in, BK)
               : encode(&b, g->b, g->n_experts, g->n_out, g->n_in, forward ? BN : BK);
  if (st != PS_OK)
    return st;
  const params p = {g->offsets, (__nv_bfloat16 *)g->c,        g->n_experts,
                    g->n_out,   forward ? g->n_out : g->n_in, forward ? g->n_in : g->n_out};
  const cudaError_t e = forward         ? launch<PS_GEMM_FORWARD, false>(a, b, p, n_sms, stream)
                        : !wgrad        ? launch<PS_GEMM_DGRAD, false>(a, b, p, n_sms, stream)
                        : g->accumulate ? launch<PS_GEMM_WGRAD, true>(a, b, p, n_sms, stream)
                                        : launch<PS_GEMM_WGRAD, false>(a, b, p, n_sms, stream);
  return ps_launched("gemm_grouped", e);
}
