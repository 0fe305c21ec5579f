/* Stands in for PyTorch's header of this name: flash-attn's forward kernel unpacks the
 * generator's state, which is never used. */
#ifndef PS_FLASH_UNPACK
#define PS_FLASH_UNPACK
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <stdint.h>
#include <tuple>
namespace at::cuda::philox {
__host__ __device__ inline std::tuple<uint64_t, uint64_t> unpack(PhiloxCudaState) { return {0, 0}; }
} // namespace at::cuda::philox
#endif
