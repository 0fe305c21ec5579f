/* delta_mma.h - the gated delta rule on the tensor cores (delta_mma.cu), for delta.cu. */
#ifndef PS_KERNELS_CUDA_DELTA_MMA_H
#define PS_KERNELS_CUDA_DELTA_MMA_H
#include "kernels/cuda/cuda_common.cuh"

/* Whether shape, addresses and the device's shared memory are such that the launch can go to
 * ps_delta_mma_fwd() or ps_delta_mma_bwd(), and not to the kernels for any. */
bool ps_delta_mma_takes(const ps_launch *l, bool backward);
cudaError_t ps_delta_mma_fwd(const ps_launch *l);
cudaError_t ps_delta_mma_bwd(const ps_launch *l);

#endif
