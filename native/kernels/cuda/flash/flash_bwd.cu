/* flash_bwd.cu - flash-attn's backward kernels for head dim PS_FLASH_DIM: causal, bf16, no
 * dropout; see attention_flash.cu.
 *
 * Three kernels: rows' dot(d_o, o), a block a tile of queries; dk, dv and sums of dq, a block a
 * tile of keys; dq out of its sums. Block sizes are flash-attn's choices for these GPUs. dq's
 * sums are in an order of elements that only flash-attn's own kernels know. */
#include "kernels/cuda/flash/flash_tiles.cuh"
#include <flash_bwd_preprocess_kernel.h>
#include <flash_bwd_kernel.h>

using namespace ps_flash;

/* The first and last kernel take their tile from blockIdx.x and their document from cu_seqlens.
 * This moves the pointers of @p, so that the tile of this block is tile blockIdx.x of one
 * document. */
template <typename Traits> __device__ bool to_own_document(Flash_bwd_params &p) {
  int doc, tile;
  if (!locate(p.cu_seqlens_q, p.b, p.seqlen_q, Traits::kBlockM, (int)blockIdx.x, &doc, &tile))
    return false;
  if (!p.cu_seqlens_q)
    return true;
  using element = typename Traits::Element;
  const int ahead = p.cu_seqlens_q[doc] + (tile - (int)blockIdx.x) * Traits::kBlockM,
            padded = ahead + PS_FLASH_PAD * doc;
  p.seqlen_q = p.cu_seqlens_q[doc + 1] - ahead;
  p.do_ptr = (element *)p.do_ptr + ahead * p.do_row_stride;
  p.o_ptr = (element *)p.o_ptr + ahead * p.o_row_stride;
  p.dq_ptr = (element *)p.dq_ptr + ahead * p.dq_row_stride;
  p.dq_accum_ptr = (float *)p.dq_accum_ptr + (int64_t)padded * p.h * p.d_rounded;
  p.dsoftmax_sum = (float *)p.dsoftmax_sum + padded;
  p.cu_seqlens_q = p.cu_seqlens_k = nullptr;
  return true;
}

template <typename Traits, bool CLEAR> __global__ void flash_dot_k(Flash_bwd_params p) {
  if (to_own_document<Traits>(p))
    compute_dot_do_o<CLEAR, Traits>(p);
}
template <typename Traits> __global__ void flash_dq_k(Flash_bwd_params p, int splits) {
  if (to_own_document<Traits>(p))
    convert_dQ<Traits>(p, splits);
}

/* Deterministic: gridDim.x blocks a head, each with its own sums of dq, take every gridDim.x-th
 * tile in order. */
template <typename Traits, bool EVEN>
__global__ void flash_bwd_k(const __grid_constant__ Flash_bwd_params p) {
  int doc, tile;
  for (int i = (int)blockIdx.x;
       locate(p.cu_seqlens_k, p.b, p.seqlen_k, Traits::kBlockN, i, &doc, &tile);
       i += (int)gridDim.x)
    compute_dq_dk_dv_1colblock<Traits, /*dropout*/ false, /*causal*/ true, /*local*/ false,
                               /*alibi*/ false, EVEN, /*even K*/ true,
                               /*softcap*/ false, /*first*/ false, /*last*/ false,
                               /*parallel over keys*/ true>(p, doc, (int)blockIdx.y, tile);
}

template <typename Traits>
static cudaError_t launch(const Flash_bwd_params &p, int splits, cudaStream_t stream) {
  const bool even =
      !p.cu_seqlens_q && p.seqlen_q % Traits::kBlockM == 0 && p.seqlen_k % Traits::kBlockN == 0;
  const auto dot = p.deterministic ? flash_dot_k<Traits, false> : flash_dot_k<Traits, true>;
  const auto kernel = even ? flash_bwd_k<Traits, true> : flash_bwd_k<Traits, false>;
  const dim3 queries(max_tiles(p.cu_seqlens_q, p.b, p.seqlen_q, Traits::kBlockM), 1, p.h);
  const dim3 keys(
      p.deterministic ? splits : max_tiles(p.cu_seqlens_k, p.b, p.seqlen_k, Traits::kBlockN), p.h);
  cudaError_t e = allow_shared(kernel, Traits::kSmemSize1colblock);
  if (e == cudaSuccess)
    e = allow_shared(flash_dq_k<Traits>, Traits::kSmemdQSize);
  if (e != cudaSuccess)
    return e;
  dot<<<queries, Traits::kNThreads, 0, stream>>>(p);
  kernel<<<keys, Traits::kNThreads, Traits::kSmemSize1colblock, stream>>>(p);
  flash_dq_k<Traits><<<queries, Traits::kNThreads, Traits::kSmemdQSize, stream>>>(p, splits);
  return cudaPeekAtLastError();
}

template <>
cudaError_t ps_flash_bwd<PS_FLASH_DIM>(const Flash_bwd_params &p, int splits, bool narrow,
                                       cudaStream_t stream) {
  using element = cutlass::bfloat16_t;
#if PS_FLASH_DIM == 64
  if (narrow)
    return launch<Flash_bwd_kernel_traits<64, 64, 128, 8, 2, 4, 4, true, false, element>>(p, splits,
                                                                                          stream);
  return launch<Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4, false, false, element>>(p, splits,
                                                                                          stream);
#else
  if (narrow)
    return launch<Flash_bwd_kernel_traits<128, 64, 64, 8, 4, 2, 2, true, false, element>>(p, splits,
                                                                                          stream);
  return launch<Flash_bwd_kernel_traits<128, 64, 128, 8, 2, 4, 2, false, false, element>>(p, splits,
                                                                                          stream);
#endif
}
