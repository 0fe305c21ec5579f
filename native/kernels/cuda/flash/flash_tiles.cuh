/* flash_tiles.cuh - which document a block works on. */
#ifndef PS_KERNELS_CUDA_FLASH_TILES_CUH
#define PS_KERNELS_CUDA_FLASH_TILES_CUH
#include "kernels/cuda/flash/flash_launch.h"
#include <stdint.h>

/* The @index-th tile of @block rows, counted through the documents: *doc and the tile's number in
 * it; false after the last tile. @cu: n + 1 first rows, NULL for one document of @rows rows. Every
 * warp of a block calls it whole: lanes add up the tiles of 32 documents at once. */
__device__ inline bool locate(const int *cu, int n, int rows, int block, int index, int *doc,
                              int *tile) {
  *doc = 0;
  *tile = index;
  if (!cu)
    return index < (rows + block - 1) / block;
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < n; base += 32) {
    const int d = base + lane, tiles = d < n ? (cu[d + 1] - cu[d] + block - 1) / block : 0;
    int end = tiles;
    for (int by = 1; by < 32; by *= 2) {
      const int left = __shfl_up_sync(0xffffffffu, end, by);
      if (lane >= by)
        end += left;
    }
    const uint32_t after = __ballot_sync(0xffffffffu, end > index);
    if (after) {
      const int found = __ffs(after) - 1;
      *doc = base + found;
      *tile = index - __shfl_sync(0xffffffffu, end - tiles, found);
      return true;
    }
    index -= __shfl_sync(0xffffffffu, end, 31);
  }
  return false;
}

static inline int max_tiles(const int *cu, int n, int rows, int block) {
  return (rows + block - 1) / block + (cu ? n : 0);
}

/* More shared memory than 48 KiB has to be asked for, kernel by kernel. */
template <typename kernel> static inline cudaError_t allow_shared(kernel k, size_t bytes) {
  return bytes < 48 * 1024
             ? cudaSuccess
             : cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

#endif
