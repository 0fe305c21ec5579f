/* hosts_add.h - sums over hosts, of what NCCL has brought to the device (hosts/net.h). */
#ifndef PS_KERNELS_CUDA_HOSTS_ADD_H
#define PS_KERNELS_CUDA_HOSTS_ADD_H
#include <penstock/model.h>
#include <penstock/status.h>
#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* ps__cuda_hosts_add() - mine[i] becomes round(sum over ranks of their i-th elements), in the order
 * of ranks, in fp32 with one rounding to nearest even.
 * @received  of the ranks but @rank in their order, @stride_bytes apart, a multiple of 16.
 * @n         elements of @dt, PS_F32 or PS_BF16. Addresses are 16-byte aligned.
 * Queues on @stream and returns. Errors: PS_EINVAL the arguments; PS_EDEVICE. */
ps_status ps__cuda_hosts_add(struct CUstream_st *stream, void *mine, const void *received,
                             uint64_t stride_bytes, uint64_t n, uint32_t rank, uint32_t n_hosts,
                             uint32_t dt);

#ifdef __cplusplus
}
#endif
#endif
