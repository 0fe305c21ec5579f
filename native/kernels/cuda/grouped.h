/* grouped.h - what the two kernels of grouped products share: the launch, the order of tiles. */
#ifndef PS_KERNELS_CUDA_GROUPED_H
#define PS_KERNELS_CUDA_GROUPED_H
#include "kernels/cuda/cuda_common.cuh"

/* A product an expert; a, b and c as ops.h lists them. Rows are cut by offsets, on the device. */
typedef struct ps_grouped {
  const void *a, *b;
  void *c;
  const int32_t *offsets;
  uint32_t rows, n_out, n_in, n_experts; /* W[e] is [n_out,n_in] */
  uint32_t role, accumulate;
  /* of experts on demand: b has n_slots matrices, that of expert e at slot_of[e] - 1. NULL:
   * n_experts of them, in order */
  const uint32_t *slot_of;
  uint32_t n_slots;
} ps_grouped;

/* Where b has the matrix of expert @e. Any place will do where it has none. */
__device__ __forceinline__ uint32_t ps_grouped_plane(const uint32_t *slot_of, uint32_t e) {
  const uint32_t s = slot_of ? __ldg(slot_of + e) : e + 1;
  return s ? s - 1 : 0;
}

/* ps_grouped_90() - the product of bf16 by wgmma, on the current device, of compute capability 9.0.
 * Addresses are aligned to 16 bytes, n_out and n_in are multiples of 8, and nothing is empty.
 * Errors: PS_EDEVICE. */
ps_status ps_grouped_90(const ps_grouped *g, uint32_t n_sms, cudaStream_t stream);

/* ps_grouped_80() - the same on 8.0 and newer. PS_EINVAL: too many tiles. */
ps_status ps_grouped_80(const ps_grouped *g, cudaStream_t stream);

/* Columns and rows of tiles of an expert are visited in bands of this many rows of tiles: what
 * runs at a time reads about as many different tiles of either operand. */
enum { PS_GROUPED_BAND = 16 };

/* Tile @at of m x n, as the bands have it. */
__device__ __forceinline__ void ps_grouped_tile(uint32_t at, uint32_t m, uint32_t n, uint32_t *i,
                                                uint32_t *j) {
  const uint32_t band = at / (PS_GROUPED_BAND * n), in = at - band * PS_GROUPED_BAND * n,
                 left = m - band * PS_GROUPED_BAND,
                 height = left < PS_GROUPED_BAND ? left : PS_GROUPED_BAND;
  *j = in / height;
  *i = band * PS_GROUPED_BAND + in - *j * height;
}
#endif
