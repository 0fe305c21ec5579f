/* hosts_add.cu - sums over hosts. */
#include "kernels/cuda/hosts_add.h"
#include "kernels/cuda/cuda_common.cuh"

enum { THREADS = 256 };

template <typename T, int V>
__global__ void __launch_bounds__(THREADS)
    hosts_add_k(T *mine, const char *received, uint64_t stride, uint64_t n, uint32_t rank,
                uint32_t n_hosts) {
  const uint64_t i = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * V;
  auto of = [&](uint32_t r) {
    return r == rank ? mine : (const T *)(received + (r < rank ? r : r - 1) * stride);
  };
  if (i + V <= n) {
    float total[V], term[V];
    ps_read<T, V>(total, of(0) + i);
    for (uint32_t r = 1; r < n_hosts; r++) {
      ps_read<T, V>(term, of(r) + i);
#pragma unroll
      for (int k = 0; k < V; k++)
        total[k] += term[k];
    }
    ps_store<T, V>(mine + i, total);
  } else {
    for (uint64_t k = i; k < n; k++) {
      float total = ps_to_f32(of(0)[k]);
      for (uint32_t r = 1; r < n_hosts; r++)
        total += ps_to_f32(of(r)[k]);
      mine[k] = ps_from_f32<T>(total);
    }
  }
}

template <typename T>
static void launch(cudaStream_t stream, void *mine, const void *received, uint64_t stride,
                   uint64_t n, uint32_t rank, uint32_t n_hosts) {
  constexpr int V = ps_full<T>;
  hosts_add_k<T, V><<<ps_ceil_div(n, THREADS * V), THREADS, 0, stream>>>(
      (T *)mine, (const char *)received, stride, n, rank, n_hosts);
}

/* hosts_add
 * math    mine[i] = round(sum_r x_r[i]), r = 0, 1, .. in order; x_rank is mine; the sum in fp32
 * shapes  mine and each x_r [n] of dt
 * bytes   (n_hosts + 1) * n * sizeof(dt) of HBM
 * determinism  bitwise: elementwise.   reference  ps__hosts_sum() over TCP, the same bits but for
 *              those of a NaN */
extern "C" ps_status ps__cuda_hosts_add(struct CUstream_st *stream, void *mine,
                                        const void *received, uint64_t stride_bytes, uint64_t n,
                                        uint32_t rank, uint32_t n_hosts, uint32_t dt) {
  if (!mine || !received || !ps_aligned(mine) || !ps_aligned(received) || stride_bytes % 16 ||
      rank >= n_hosts || (dt != PS_F32 && dt != PS_BF16))
    return ps__fail(PS_EINVAL, "hosts_add: addresses, stride, rank or dtype");
  if (n == 0)
    return PS_OK;
  if (dt == PS_F32)
    launch<float>(stream, mine, received, stride_bytes, n, rank, n_hosts);
  else
    launch<__nv_bfloat16>(stream, mine, received, stride_bytes, n, rank, n_hosts);
  return ps_launched("hosts_add", cudaSuccess);
}
