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
    ADDEND = EMPTY + 8 * N, /* barriers of the addends, one a warp that multiplies */
    ORDER = ADDEND + 8 * 8,
    BYTES = ORDER + PS_MAX_EXPERTS + PS_MAX_EXPERTS / 8
  };
  static_assert(BYTES <= 227 * 1024, "what a block gets");
};
template <int ROLE, bool ACCUMULATE>
constexpr int stages = ROLE == PS_GEMM_WGRAD && !ACCUMULATE ? 4 : 3;

struct params {
  const int32_t *offsets;
  const uint32_t *slot_of;
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
__device__ __forceinline__ void load_bulk(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
               "[%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
/* The stores that this thread gave to the copy engine have read shared memory. */
__device__ __forceinline__ void stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
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

/* WGRAD takes the experts with the most rows first, at @order in shared memory: a byte an expert
 * with the lower 8 bits of its number, then a bit an expert with the ninth. Every thread calls
 * it. */
__device__ __forceinline__ void sort_experts(uint8_t *order, const params &p) {
  uint32_t *ninth = (uint32_t *)(order + PS_MAX_EXPERTS);
  if (threadIdx.x < PS_MAX_EXPERTS / 32)
    ninth[threadIdx.x] = 0;
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < p.n_experts; e += THREADS) {
    const int32_t rows = __ldg(p.offsets + e + 1) - __ldg(p.offsets + e);
    int32_t before = __ldg(p.offsets);
    uint32_t place = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < p.n_experts; i++) {
      const int32_t end = __ldg(p.offsets + i + 1), other = end - before;
      place += other > rows || (other == rows && i < e);
      before = end;
    }
    order[place] = (uint8_t)e;
    if (e > 255)
      atomicOr(&ninth[place / 32], 1u << place % 32);
  }
}

/* The tiles of a block, in order. */
template <int ROLE> struct walk {
  const uint8_t *order;          /* WGRAD's */
  uint32_t e, i, j;              /* the tile's expert, and its place in the expert */
  int32_t begin = 0, end = 0;    /* the expert's rows */
  uint32_t n_tiles, m_tiles;     /* of the expert: columns and rows of tiles */
  uint32_t turn = 0;             /* of all blocks */
  uint32_t first = 0, later = 0; /* the expert's first tile; the expert to look at next */

  __device__ __forceinline__ walk(const params &p, const uint8_t *order) : order(order) {
    n_tiles = (p.cols + BN - 1) / BN;
    m_tiles = ROLE == PS_GEMM_WGRAD ? (p.m + BM - 1) / BM : 0;
  }
  __device__ __forceinline__ bool next(const params &p) {
    if constexpr (ROLE == PS_GEMM_WGRAD) {
      /* tiles get shorter: every second turn goes backwards, so that no block has always the
       * longest */
      const uint32_t each = m_tiles * n_tiles, all = p.n_experts * each;
      uint32_t t;
      do {
        const uint32_t from = turn * gridDim.x;
        if (from >= all)
          return false;
        t = from + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        turn++;
      } while (t >= all);
      const uint32_t place = t / each;
      const uint32_t *ninth = (const uint32_t *)(order + PS_MAX_EXPERTS);
      e = order[place] | (ninth[place / 32] >> place % 32 & 1) << 8;
      begin = e ? __ldg(p.offsets + e) : 0;
      end = __ldg(p.offsets + e + 1);
      ps_grouped_tile(t - place * each, m_tiles, n_tiles, &i, &j);
    } else {
      const uint32_t t = blockIdx.x + turn++ * gridDim.x;
      while (t >= first + m_tiles * n_tiles) {
        first += m_tiles * n_tiles;
        if (later >= p.n_experts)
          return false;
        e = later++;
        begin = end;
        end = __ldg(p.offsets + later);
        m_tiles = (uint32_t)(end - begin + BM - 1) / BM;
      }
      ps_grouped_tile(t - first, m_tiles, n_tiles, &i, &j);
    }
    return true;
  }
  /* slabs of the sum */
  __device__ __forceinline__ uint32_t slabs(const params &p) const {
    return ROLE == PS_GEMM_WGRAD ? (uint32_t)(end - begin + BK - 1) / BK : (p.sum + BK - 1) / BK;
  }
};

/* One thread fills the ring. */
template <int ROLE, int STAGES>
__device__ __forceinline__ void produce(const CUtensorMap *map_a, const CUtensorMap *map_b,
                                        const params &p, const uint8_t *shared) {
  const uint32_t smem = shared_address(shared), full = smem + ring<STAGES>::FULL,
                 empty = smem + ring<STAGES>::EMPTY;
  walk<ROLE> w(p, shared + ring<STAGES>::ORDER);
  uint32_t stage = 0, phase = 0;
  while (w.next(p)) {
    const uint32_t slabs = w.slabs(p), col = w.j * BN,
                   plane = ROLE == PS_GEMM_WGRAD ? 0 : ps_grouped_plane(p.slot_of, w.e);
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
          copy_3d(b, map_b, bar, s * BK, col, plane);
        } else {
#pragma unroll
          for (uint32_t k = 0; k < BN / CHUNK; k++)
            copy_3d(b + k * CHUNK_BYTES, map_b, bar, col + k * CHUNK, s * BK, plane);
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

/* A warp's 16 x 256 of an output. */
struct part {
  __nv_bfloat16 *c;         /* its first element */
  uint32_t out, rows, cols; /* where it is in shared memory; how much of it there is */
  uint32_t ld;
};

/* What is added to the part begins to come to shared memory. */
template <int STAGES> __device__ __forceinline__ void fetch_addend(const part &o, uint32_t bar) {
  const uint32_t lane = threadIdx.x % 32;
  stores_have_read();
  __syncwarp();
  if (lane == 0)
    barrier_expect(bar, o.rows * o.cols * 2);
  if (lane < o.rows)
    load_bulk(o.out + lane * ring<STAGES>::PITCH, o.c + (size_t)lane * o.ld, o.cols * 2, bar);
}

/* The part goes from the registers of wgmma to shared memory, then to c. ADD: to what is in shared
 * memory. @zero: of an expert without rows. The registers are not written: wgmma has them. */
template <int STAGES, bool ADD>
__device__ __forceinline__ void store_part(const float (&d)[128], bool zero, const part &o) {
  enum { PITCH = ring<STAGES>::PITCH, COLS = ring<STAGES>::COLS, EACH = ring<STAGES>::EACH };
  static_assert(!ADD || COLS == BN, "the addend of all columns is there");
  const uint32_t lane = threadIdx.x % 32, to = o.out + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
  for (int j = 0; j < BN / 16; j++) {
    const uint32_t at = to + 32 * (j % EACH);
    uint32_t x[4], was[4];
    if (!ADD && j % EACH == 0) {
      stores_have_read();
      __syncwarp();
    }
    if (ADD)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(was[0]), "=r"(was[1]), "=r"(was[2]), "=r"(was[3])
                   : "r"(at)
                   : "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float2 y = make_float2(d[8 * j + 2 * k], d[8 * j + 2 * k + 1]);
      if (ADD) {
        y.x += __uint_as_float(was[k] << 16);
        y.y += __uint_as_float(was[k] & 0xffff0000u);
      } else if (zero) {
        y = make_float2(0.0f, 0.0f);
      }
      const __nv_bfloat162 two = __floats2bfloat162_rn(y.x, y.y);
      x[k] = *(const uint32_t *)&two;
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
    if (j % EACH == EACH - 1) {
      async_fence();
      __syncwarp();
      const uint32_t from = j / EACH * COLS;
      if (lane < o.rows && from < o.cols)
        store_bulk(o.c + (size_t)lane * o.ld + from, o.out + lane * PITCH,
                   2 * (o.cols - from < COLS ? o.cols - from : COLS));
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
  const uint32_t addend = slabs_at + ring<STAGES>::ADDEND + 8 * (group * 4 + warp);
  walk<ROLE> w(p, smem + ring<STAGES>::ORDER);
  uint32_t stage = 0, phase = 0, addend_phase = 0;
  part o;
  o.out = slabs_at + ring<STAGES>::OUT + (group * 4 + warp) * 16 * ring<STAGES>::PITCH;
  o.ld = p.cols;
  while (w.next(p)) {
    float d[128]; /* the first product does not add to them */
    const uint32_t slabs = w.slabs(p);
    const uint32_t row = w.i * BM + group * 64 + warp * 16, col = w.j * BN,
                   rows = ROLE == PS_GEMM_WGRAD ? p.m : (uint32_t)(w.end - w.begin);
    o.rows = row >= rows ? 0 : rows - row < 16 ? rows - row : 16;
    o.cols = p.cols - col < BN ? p.cols - col : BN;
    o.c = p.c + col +
          (ROLE == PS_GEMM_WGRAD ? (size_t)w.e * p.m + row : (size_t)w.begin + row) * p.cols;
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
      if (ACCUMULATE && s == 0)
        fetch_addend<STAGES>(o, addend);
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
    if (!ACCUMULATE) {
      store_part<STAGES, false>(d, ROLE == PS_GEMM_WGRAD && slabs == 0, o);
    } else if (slabs > 0) {
      barrier_wait(addend, addend_phase);
      addend_phase ^= 1;
      store_part<STAGES, ACCUMULATE>(d, false, o);
    }
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
    for (uint32_t i = 0; i < 8; i++)
      barrier_init(at + ring<STAGES>::ADDEND + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (ROLE == PS_GEMM_WGRAD)
    sort_experts(smem + ring<STAGES>::ORDER, p);
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      produce<ROLE, STAGES>(&map_a, &map_b, p, smem);
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
               : encode(&b, g->b, g->slot_of ? g->n_slots : g->n_experts, g->n_out, g->n_in,
                        forward ? BN : BK);
  if (st != PS_OK)
    return st;
  const params p = {g->offsets,
                    g->slot_of,
                    (__nv_bfloat16 *)g->c,
                    g->n_experts,
                    g->n_out,
                    forward ? g->n_out : g->n_in,
                    forward ? g->n_in : g->n_out};
  const cudaError_t e = forward         ? launch<PS_GEMM_FORWARD, false>(a, b, p, n_sms, stream)
                        : !wgrad        ? launch<PS_GEMM_DGRAD, false>(a, b, p, n_sms, stream)
                        : g->accumulate ? launch<PS_GEMM_WGRAD, true>(a, b, p, n_sms, stream)
                                        : launch<PS_GEMM_WGRAD, false>(a, b, p, n_sms, stream);
  return ps_launched("gemm_grouped", e);
}
