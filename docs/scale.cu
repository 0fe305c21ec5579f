/* scale.cu - x = x * by + plus on a GPU, for docs/stream_array.c: a kernel, and the function that
 * queues it on the op's stream. */
#include <cuda_runtime.h>
#include <penstock/engine.h>

struct scale_args { /* as stream_array.c has it */
  float by, plus;
  int64_t n;
};

/* math   x[i] = x[i] * by + plus
 * bytes  8 n of device memory: 8 MiB of traffic for a chunk of 1 Mi elements */
static __global__ void scale(float *x, float by, float plus, int64_t n) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n)
    x[i] = x[i] * by + plus;
}

extern "C" ps_status scale_on_cuda(const ps_launch *l) {
  const scale_args *a = static_cast<const scale_args *>(l->args);
  const unsigned threads = 256, blocks = (unsigned)((a->n + threads - 1) / threads);
  scale<<<blocks, threads, 0, ps_launch_cuda_stream(l)>>>(static_cast<float *>(l->ptr[0]), a->by,
                                                          a->plus, a->n);
  const cudaError_t e = cudaGetLastError(); /* of the launch; the run notices what fails later */
  return e == cudaSuccess ? PS_OK : ps_error_set(PS_EDEVICE, cudaGetErrorString(e));
}
