/* tile.cuh - sums of products of small matrices by one block: C[64,N] += A[64,n] B[n,N], fp32 in
 * registers, A and B wherever a function finds their elements (delta.cu).
 *
 * Two ways, with one layout of calls: fused multiply-adds, and the tensor cores' m16n8k8 in TF32,
 * where each factor is the sum of two TF32 numbers (22 bits) and three of the four products are
 * taken: near to fp32's own rounding.
 *
 * determinism  bitwise: an element's terms in order of n */
#ifndef PS_KERNELS_CUDA_TILE_CUH
#define PS_KERNELS_CUDA_TILE_CUH
#include "kernels/cuda/cuda_common.cuh"

enum { TILE_ROWS = 64, TILE_THREADS = 256, TILE_DEPTH = 32 };

/* Slices of A and B, as tile::at_a and at_b lay them. */
template <int N> struct alignas(16) tile_stage {
  float a[TILE_ROWS * (TILE_DEPTH + 4)];
  float b[TILE_DEPTH * (N + 8)];
};

/* x = high + low, both TF32 where the low 13 bits of low are not looked at. */
__device__ __forceinline__ void tile_halves(float x, uint32_t &high, uint32_t &low) {
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
  low = __float_as_uint(x - __uint_as_float(high));
}
__device__ __forceinline__ void tile_mma(float (&c)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <int N, bool MMA> struct tile {
  static constexpr int EACH = TILE_ROWS * N / TILE_THREADS;
  static constexpr int LANES = N / 4,
                       OWN = EACH / 4; /* without MMA: threads a row, rows a thread */
  float x[EACH];

  /* Where x[i] is. */
  static __device__ __forceinline__ uint32_t row(int i) {
    const uint32_t t = threadIdx.x;
    return MMA ? t / 32 % 4 * 16 + t % 32 / 4 + i % 4 / 2 * 8 : t / LANES * OWN + i / 4;
  }
  static __device__ __forceinline__ uint32_t col(int i) {
    const uint32_t t = threadIdx.x;
    return MMA ? t / 128 * (N / 2) + i / 4 * 8 + t % 4 * 2 + i % 2 : t % LANES * 4 + i % 4;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      x[i] = 0.0f;
  }
  /* f(row, column, element) */
  template <typename F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      f(row(i), col(i), x[i]);
  }

  /* Where element (r,k) of A and (k,c) of B are in a stage. The tensor cores' way keeps what comes
   * by columns as it comes: no two lanes of a warp meet in a bank, neither in add nor in mma. */
  template <bool BY_ROWS> static __device__ __forceinline__ uint32_t at_a(uint32_t r, uint32_t k) {
    return BY_ROWS || !MMA ? r * (TILE_DEPTH + 4) + k : k * (TILE_ROWS + 8) + r;
  }
  template <bool BY_ROWS> static __device__ __forceinline__ uint32_t at_b(uint32_t k, uint32_t c) {
    return BY_ROWS || !MMA ? k * (N + 8) + c : c * (TILE_DEPTH + 4) + k;
  }

  /* += a b, of @depth terms: a(row, k), b(k, column). A_ROWS, B_ROWS: neighbours in memory are
   * those of a row. EXACT: as mma's. Every thread calls it; it begins as it ends, with nobody in
   * @stage and in what a and b read. */
  template <bool A_ROWS, bool B_ROWS, int EXACT = 0, typename A, typename B>
  __device__ __forceinline__ void add(tile_stage<N> &stage, uint32_t depth, A a, B b) {
    constexpr int NA = TILE_ROWS * TILE_DEPTH / TILE_THREADS, NB = N * TILE_DEPTH / TILE_THREADS;
    float fa[NA], fb[NB];
    const auto of_a = [](int i, uint32_t &r, uint32_t &k) {
      const uint32_t e = i * TILE_THREADS + threadIdx.x;
      r = A_ROWS ? e / TILE_DEPTH : e % TILE_ROWS;
      k = A_ROWS ? e % TILE_DEPTH : e / TILE_ROWS;
    };
    const auto of_b = [](int i, uint32_t &k, uint32_t &c) {
      const uint32_t e = i * TILE_THREADS + threadIdx.x;
      k = B_ROWS ? e / N : e % TILE_DEPTH;
      c = B_ROWS ? e % N : e / TILE_DEPTH;
    };
    const auto load = [&](uint32_t from) {
      uint32_t r, k, c;
#pragma unroll
      for (int i = 0; i < NA; i++) {
        of_a(i, r, k);
        fa[i] = from + k < depth ? a(r, from + k) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < NB; i++) {
        of_b(i, k, c);
        fb[i] = from + k < depth ? b(from + k, c) : 0.0f;
      }
    };
    load(0);
    for (uint32_t from = 0; from < depth; from += TILE_DEPTH) {
      uint32_t r, k, c;
#pragma unroll
      for (int i = 0; i < NA; i++) {
        of_a(i, r, k);
        stage.a[at_a<A_ROWS>(r, k)] = fa[i];
      }
#pragma unroll
      for (int i = 0; i < NB; i++) {
        of_b(i, k, c);
        stage.b[at_b<B_ROWS>(k, c)] = fb[i];
      }
      __syncthreads();
      if (from + TILE_DEPTH < depth)
        load(from + TILE_DEPTH);
      if constexpr (MMA)
        mma<TILE_DEPTH, EXACT>([&](uint32_t r, uint32_t k) { return stage.a[at_a<A_ROWS>(r, k)]; },
                               [&](uint32_t k, uint32_t c) { return stage.b[at_b<B_ROWS>(k, c)]; });
      else
        fma(stage);
      __syncthreads();
    }
  }

  /* The same of what is in shared memory, without barriers. */
  template <int DEPTH, int EXACT = 0, typename A, typename B>
  __device__ __forceinline__ void add_shared(A a, B b) {
    if constexpr (MMA) {
      mma<DEPTH, EXACT>(a, b);
    } else {
#pragma unroll 4
      for (uint32_t k = 0; k < DEPTH; k++)
#pragma unroll
        for (int i = 0; i < EACH; i++)
          x[i] = fmaf(a(row(i), k), b(k, col(i)), x[i]);
    }
  }

  __device__ __forceinline__ void fma(const tile_stage<N> &stage) {
    const uint32_t lane = threadIdx.x % LANES * 4, first = threadIdx.x / LANES * OWN;
#pragma unroll
    for (int k = 0; k < TILE_DEPTH; k += 4) {
      float4 fa[OWN];
#pragma unroll
      for (int r = 0; r < OWN; r++)
        fa[r] = *(const float4 *)&stage.a[at_a<true>(first + r, k)];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 fb = *(const float4 *)&stage.b[at_b<true>(k + i, lane)];
#pragma unroll
        for (int r = 0; r < OWN; r++) {
          const float v = i == 0 ? fa[r].x : i == 1 ? fa[r].y : i == 2 ? fa[r].z : fa[r].w;
          x[4 * r] = fmaf(v, fb.x, x[4 * r]);
          x[4 * r + 1] = fmaf(v, fb.y, x[4 * r + 1]);
          x[4 * r + 2] = fmaf(v, fb.z, x[4 * r + 2]);
          x[4 * r + 3] = fmaf(v, fb.w, x[4 * r + 3]);
        }
      }
    }
  }

  /* EXACT: 1: A's elements are TF32 numbers, as bf16's are; 2: B's; 3: both. Small products have
   * sums of their own: two chains of instructions, not one. */
  template <int DEPTH, int EXACT, typename A, typename B>
  __device__ __forceinline__ void mma(A a, B b) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4,
                   r = threadIdx.x / 32 % 4 * 16 + g, c = threadIdx.x / 128 * (N / 2) + g;
    float small[EXACT == 3 ? 1 : EACH / 4][4] = {};
#pragma unroll
    for (int k = 0; k < DEPTH; k += 8) {
      uint32_t ah[4], al[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        halves<EXACT & 1>(a(r + i % 2 * 8, k + t + i / 2 * 4), ah[i], al[i]);
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        uint32_t bh[2], bl[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
          halves<EXACT / 2>(b(k + t + 4 * i, c + 8 * n), bh[i], bl[i]);
        if constexpr (!(EXACT & 1))
          tile_mma(small[n], al, bh);
        if constexpr (!(EXACT & 2))
          tile_mma(small[n], ah, bl);
        tile_mma(*(float (*)[4]) & x[4 * n], ah, bh);
      }
    }
    if constexpr (EXACT != 3) {
#pragma unroll
      for (int i = 0; i < EACH; i++)
        x[i] += small[i / 4][i % 4];
    }
  }
  template <int EXACT>
  static __device__ __forceinline__ void halves(float x, uint32_t &high, uint32_t &low) {
    if constexpr (EXACT)
      high = __float_as_uint(x), low = 0;
    else
      tile_halves(x, high, low);
  }

  /* sums[row][0] + sums[row][1] (+)= the sum of f(row, column, element) over the row. */
  template <typename F>
  __device__ __forceinline__ void row_sums(float (*sums)[2], bool accumulate, F f) {
    constexpr int ROWS = MMA ? 2 : OWN;
    float part[ROWS] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++)
      part[MMA ? i % 4 / 2 : i / 4] += f(row(i), col(i), x[i]);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int w = (MMA ? 4 : LANES) / 2; w > 0; w /= 2)
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], w);
      const uint32_t r = row(MMA ? 2 * i : 4 * i), half = MMA ? threadIdx.x / 128 : 0;
      if (threadIdx.x % (MMA ? 4 : LANES) == 0) {
        sums[r][half] = (accumulate ? sums[r][half] : 0.0f) + part[i];
        if (!MMA)
          sums[r][1] = 0.0f;
      }
    }
  }
};
#endif
