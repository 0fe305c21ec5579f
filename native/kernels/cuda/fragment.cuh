/* fragment.cuh - products of bf16 matrices on the tensor cores (compute capability 8.0): m16n8k16
 * with fp32 sums, of matrices that lie in tiles.
 *
 * A number that is not bf16 is split in two that are: its nearest, and that of the rest. Together
 * they have 16 to 17 bits, and three of the four products of such pairs are taken.
 *
 * determinism  bitwise: an element's terms in order */
#ifndef PS_KERNELS_CUDA_FRAGMENT_CUH
#define PS_KERNELS_CUDA_FRAGMENT_CUH
#include "kernels/cuda/cuda_common.cuh"

/* 16 x 16 bf16 numbers as four blocks of 8 x 8, each of them by rows: blocks (0,0), (0,1), (1,0),
 * (1,1). A row of a block is 16 bytes: rows in a row are in different banks of shared memory, and a
 * lane's registers of a sum or a factor are a warp's 128 bytes. */
struct alignas(16) frag_tile {
  uint32_t w[128];
};
/* Four registers of a lane. As A: (0,0), (1,0), (0,1), (1,1) of [m][k]. As B, two columns of
 * blocks: (k0,n0), (k1,n0), (k0,n1), (k1,n1). */
using frag = uint32_t[4];
/* A 16 x 16 tile of sums: two of m16n8, side by side. */
using frag_sum = float[2][4];

/* Lane's row and column in a tile of sums. */
__device__ __forceinline__ uint32_t frag_row(int e) { return threadIdx.x % 32 / 4 + e / 2 * 8; }
__device__ __forceinline__ uint32_t frag_col(int n, int e) {
  return n * 8 + threadIdx.x % 4 * 2 + e % 2;
}

/* Bytes of chunk (r, c) of 8 numbers of a row, in a matrix of @across tiles a row. */
__device__ __forceinline__ uint32_t frag_chunk(uint32_t across, uint32_t r, uint32_t c) {
  return (r / 16 * across + c / 2) * (uint32_t)sizeof(frag_tile) + (r / 8 % 2 * 2 + c % 2) * 128 +
         r % 8 * 16;
}
/* Word of a tile that holds the numbers of row @r and columns @c, @c + 1. */
__device__ __forceinline__ uint32_t frag_word(uint32_t r, uint32_t c) {
  return (r / 8 * 2 + c / 8) * 32 + r % 8 * 4 + c % 8 / 2;
}

/* ---- instructions ---------------------------------------------------------------------------- */

/* @x in the low half. */
__device__ __forceinline__ uint32_t frag_pack(float x, float y) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
/* Lane i gives the address of row i % 8 of block i / 8. TRANS: each block is transposed. */
template <bool TRANS> __device__ __forceinline__ void frag_matrices(frag &r, const void *row) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
  if constexpr (TRANS)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void frag_mma(float (&c)[4], const frag &a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* A block of a warp, transposed. */
__device__ __forceinline__ uint32_t frag_transposed(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

/* ---- tiles ----------------------------------------------------------------------------------- */

__device__ __forceinline__ float frag_low(uint32_t w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float frag_high(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }

/* A tile of shared memory as a factor. A: it is [m][k], AT: [k][m]; B: [n][k], BT: [k][n]. */
enum frag_kind { FRAG_A, FRAG_AT, FRAG_B, FRAG_BT };
template <frag_kind KIND>
__device__ __forceinline__ void frag_load(frag &r, const frag_tile &tile) {
  const uint32_t lane = threadIdx.x % 32, i = lane / 8,
                 block = KIND == FRAG_A || KIND == FRAG_BT ? i % 2 * 2 + i / 2 : i;
  frag_matrices<KIND == FRAG_AT || KIND == FRAG_BT>(r, &tile.w[block * 32 + lane % 8 * 4]);
}
/* c += a b */
__device__ __forceinline__ void frag_add(frag_sum &c, const frag &a, const frag &b) {
  frag_mma(c[0], a, b[0], b[1]);
  frag_mma(c[1], a, b[2], b[3]);
}
/* A tile of sums as A's registers: the nearest bf16 numbers, and those of the rest; in three parts
 * there are 24 bits. */
__device__ __forceinline__ void frag_split(frag &high, frag &low, const frag_sum &c) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float x = c[i / 2][i % 2 * 2], y = c[i / 2][i % 2 * 2 + 1];
    high[i] = frag_pack(x, y);
    low[i] = frag_pack(x - frag_low(high[i]), y - frag_high(high[i]));
  }
}
__device__ __forceinline__ void frag_split(frag &high, frag &mid, frag &low, const frag_sum &c) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x = c[i / 2][i % 2 * 2], y = c[i / 2][i % 2 * 2 + 1];
    high[i] = frag_pack(x, y);
    x -= frag_low(high[i]), y -= frag_high(high[i]);
    mid[i] = frag_pack(x, y);
    low[i] = frag_pack(x - frag_low(mid[i]), y - frag_high(mid[i]));
  }
}
/* A's registers as a tile of memory, [m][k]. */
__device__ __forceinline__ void frag_store(frag_tile &to, const frag &a) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; i++)
    to.w[(i % 2 * 2 + i / 2) * 32 + lane] = a[i];
}
template <int N> __device__ __forceinline__ void frag_clear(frag_sum (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int e = 0; e < 8; e++)
      c[i][e / 4][e % 4] = 0.0f;
}

/* ---- triangles ------------------------------------------------------------------------------- */

/* A lower triangular 64 x 64 matrix: its 10 tiles that are not all zeros, by rows. */
enum { FRAG_TRIANGLE = 10 };
__device__ __forceinline__ constexpr uint32_t frag_triangle(uint32_t i, uint32_t j) {
  return i * (i + 1) / 2 + j;
}
/* Tiles AT of y[16,64] += x m^T, or x m where BACK, which are @y; m [0]: its nearest bf16 numbers,
 * [1]: the rest, in shared memory. x: the sum of its PARTS; of three, products of rests count
 * too. */
template <bool BACK, int... AT, int PARTS, int N>
__device__ __forceinline__ void frag_add_triangle(frag_sum (&y)[N], const frag (&x)[PARTS][4],
                                                  const frag_tile (*m)[FRAG_TRIANGLE]) {
  static_assert(N == sizeof...(AT), "a tile of y each");
  constexpr int at[N] = {AT...};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    frag part[2][N];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int n = 0; n < N; n++)
        if (BACK ? at[n] <= k : at[n] >= k)
          frag_load<BACK ? FRAG_BT : FRAG_B>(
              part[i][n], m[i][BACK ? frag_triangle(k, at[n]) : frag_triangle(at[n], k)]);
#pragma unroll
    for (int of_x = 0; of_x < PARTS; of_x++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (of_x + i < (PARTS < 2 ? 2 : PARTS))
#pragma unroll
          for (int n = 0; n < N; n++)
            if (BACK ? at[n] <= k : at[n] >= k)
              frag_add(y[n], x[of_x][k], part[i][n]);
  }
}
#endif
