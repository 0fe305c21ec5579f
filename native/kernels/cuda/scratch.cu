/* scratch.cu - how much scratch an op needs on CUDA. */
#include "kernels/cuda/attention_cuda.h"
#include "kernels/cuda/cuda_common.cuh"

extern "C" size_t ps__cuda_scratch_bytes(const ps_kernel *kernel, const void *args) {
  if (kernel == &ps__k_embed_bwd)
    return ps_scratch_embed_bwd((const ps__args_embed *)args);
  if (kernel == &ps__k_rmsnorm_bwd)
    return ps_scratch_rmsnorm_bwd((const ps__args_rmsnorm *)args);
  if (kernel == &ps__k_qkv_split_bwd)
    return ps_scratch_qkv_split_bwd((const ps__args_qkv *)args);
  if (kernel == &ps__k_colsum)
    return ps_scratch_colsum((const ps__args_colsum *)args);
  if (kernel == &ps__k_sumsq)
    return ps_scratch_sumsq((const ps__args_sumsq *)args);
  if (kernel == &ps__k_attention_fwd || kernel == &ps__k_attention_bwd)
    return ps_scratch_attention((const ps__args_attention *)args, kernel == &ps__k_attention_bwd);
  return 0;
}
