/* flash_launch.h - flash-attn's kernels as functions: what attention_flash.cu calls, one object
 * for each head dim and direction.
 *
 * The grid holds tiles times heads. A tile is found in the documents on the device (locate() in
 * flash_tiles.cuh), so no blocks are started for the documents' worst case: tiles are at most
 * rows/block + documents. Parameters are flash-attn's own (flash.h); cu_seqlens_q and cu_seqlens_k
 * are NULL for one document. */
#ifndef PS_KERNELS_CUDA_FLASH_LAUNCH_H
#define PS_KERNELS_CUDA_FLASH_LAUNCH_H
#define FLASH_NAMESPACE ps_flash
#include <cuda_runtime_api.h>
#include <flash.h>

/* Rows of padding after each document in dq_accum and dsoftmax_sum: no block of queries is
 * larger. */
enum { PS_FLASH_PAD = 128 };

/* Queue on @stream; @narrow: for GPUs whose blocks have less than 144 KiB of shared memory.
 * Nothing waits, nothing allocates. */
template <int DIM>
cudaError_t ps_flash_fwd(const ps_flash::Flash_fwd_params &p, bool narrow, cudaStream_t stream);
/* dq, dk, dv of every query head. With p.deterministic dq_accum is @splits buffers,
 * p.dq_accum_split_stride elements apart, each zeroed by the caller; else one, cleared here. */
template <int DIM>
cudaError_t ps_flash_bwd(const ps_flash::Flash_bwd_params &p, int splits, bool narrow,
                         cudaStream_t stream);

#endif
