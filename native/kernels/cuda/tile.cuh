/* tile.cuh - sums of products of small matrices by one block: C[64,N] += A[64,n] B[n,N], fp32 in
 * registers, A and B wherever a function finds their elements (delta.cu).
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

template <int N> struct tile {
  static constexpr int EACH = TILE_ROWS * N / TILE_THREADS;
  static constexpr int LANES = N / 4, OWN = EACH / 4; /* threads a row, rows a thread */
  float x[EACH];

  /* Where x[i] is. */
  static __device__ __forceinline__ uint32_t row(int i) {
    return threadIdx.x / LANES * OWN + i / 4;
  }
  static __device__ __forceinline__ uint32_t col(int i) { return threadIdx.x % LANES * 4 + i % 4; }
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

  /* Where element (r,k) of A and (k,c) of B are in a stage. */
  static __device__ __forceinline__ uint32_t at_a(uint32_t r, uint32_t k) {
    return r * (TILE_DEPTH + 4) + k;
  }
  static __device__ __forceinline__ uint32_t at_b(uint32_t k, uint32_t c) {
    return k * (N + 8) + c;
  }

  /* += a b, of @depth terms: a(row, k), b(k, column). A_ROWS, B_ROWS: neighbours in memory are
   * those of a row. Every thread calls it; it begins as it ends, with nobody in
   * @stage and in what a and b read. */
  template <bool A_ROWS, bool B_ROWS, typename A, typename B>
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
        stage.a[at_a(r, k)] = fa[i];
      }
#pragma unroll
      for (int i = 0; i < NB; i++) {
        of_b(i, k, c);
        stage.b[at_b(k, c)] = fb[i];
      }
      __syncthreads();
      if (from + TILE_DEPTH < depth)
        load(from + TILE_DEPTH);
      fma(stage);
      __syncthreads();
    }
  }

  /* The same of what is in shared memory, without barriers. */
  template <int DEPTH, typename A, typename B>
  __device__ __forceinline__ void add_shared(A a, B b) {
#pragma unroll 4
    for (uint32_t k = 0; k < DEPTH; k++)
#pragma unroll
      for (int i = 0; i < EACH; i++)
        x[i] = fmaf(a(row(i), k), b(k, col(i)), x[i]);
  }

  __device__ __forceinline__ void fma(const tile_stage<N> &stage) {
    const uint32_t lane = threadIdx.x % LANES * 4, first = threadIdx.x / LANES * OWN;
#pragma unroll
    for (int k = 0; k < TILE_DEPTH; k += 4) {
      float4 fa[OWN];
#pragma unroll
      for (int r = 0; r < OWN; r++)
        fa[r] = *(const float4 *)&stage.a[at_a(first + r, k)];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 fb = *(const float4 *)&stage.b[at_b(k + i, lane)];
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

  /* sums[row] (+)= the sum of f(row, column, element) over the row. */
  template <typename F>
  __device__ __forceinline__ void row_sums(float *sums, bool accumulate, F f) {
    float part[OWN] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++)
      part[i / 4] += f(row(i), col(i), x[i]);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
      for (int w = LANES / 2; w > 0; w /= 2)
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], w);
      const uint32_t r = row(4 * i);
      if (threadIdx.x % LANES == 0)
        sums[r] = (accumulate ? sums[r] : 0.0f) + part[i];
    }
  }
};
#endif
