/* flash_fwd.cu - flash-attn's forward kernel for head dim PS_FLASH_DIM: causal, bf16, no
 * dropout; see attention_flash.cu.
 *
 * Block sizes are flash-attn's choices for these GPUs. Tiles go from the last to the first: the
 * last ones see the most keys. */
#include "kernels/cuda/flash/flash_tiles.cuh"
#include <flash_fwd_kernel.h>

using namespace ps_flash;

template <typename Traits, bool EVEN>
__global__ void flash_fwd_k(const __grid_constant__ Flash_fwd_params p) {
  int doc, tile;
  if (locate(p.cu_seqlens_q, p.b, p.seqlen_q, Traits::kBlockM, (int)(gridDim.x - 1 - blockIdx.x),
             &doc, &tile))
    compute_attn_1rowblock<Traits, /*dropout*/ false, /*causal*/ true, /*local*/ false,
                           /*alibi*/ false, EVEN, /*even K*/ true, /*softcap*/ false,
                           /*softmax*/ false>(p, doc, (int)blockIdx.y, tile);
}

template <typename Traits>
static cudaError_t launch(const Flash_fwd_params &p, cudaStream_t stream) {
  const bool even =
      !p.cu_seqlens_q && p.seqlen_q % Traits::kBlockM == 0 && p.seqlen_k % Traits::kBlockN == 0;
  const auto kernel = even ? flash_fwd_k<Traits, true> : flash_fwd_k<Traits, false>;
  const cudaError_t e = allow_shared(kernel, Traits::kSmemSize);
  if (e != cudaSuccess)
    return e;
  kernel<<<dim3(max_tiles(p.cu_seqlens_q, p.b, p.seqlen_q, Traits::kBlockM), p.h),
           Traits::kNThreads, Traits::kSmemSize, stream>>>(p);
  return cudaPeekAtLastError();
}

template <>
cudaError_t ps_flash_fwd<PS_FLASH_DIM>(const Flash_fwd_params &p, bool narrow,
                                       cudaStream_t stream) {
  using element = cutlass::bfloat16_t;
#if PS_FLASH_DIM == 64
  return launch<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, element>>(p, stream);
#else
  if (narrow)
    return launch<Flash_fwd_kernel_traits<128, 64, 64, 4, false, false, element>>(p, stream);
  return launch<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, element>>(p, stream);
#endif
}
