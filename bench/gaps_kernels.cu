/* gaps_kernels.cu - kernels that stamp their own start and end with the GPU's nanosecond clock, and
 * three ways to launch them: one by one, with programmatic dependent launch, as a CUDA graph. */
#include "gaps.h"
#include "kernels/cuda/cuda_common.cuh"

enum { THREADS = 256 };

__device__ static unsigned long long now_ns() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

/* A block on each SM. The kernel runs from the first block's start to the last one's end. A
 * dependent kernel is launched while the one before still runs, and waits for its end here. */
__global__ static void work_k(gaps_stamp *stamp, unsigned long long ns) {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
  const unsigned long long start = now_ns();
  while (now_ns() - start < ns)
    ;
  if (threadIdx.x == 0) {
    atomicMin(&stamp->start, start);
    atomicMax(&stamp->end, now_ns());
  }
}

__global__ static void clear_k(gaps_stamp *stamp, uint32_t n) {
  const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n)
    stamp[i] = {~0ull, 0};
}

static ps_status queue(const gaps_args *a, const ps__cuda_exec *exec, bool dependent) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = exec->n_sms;
  config.blockDim = THREADS;
  config.stream = (cudaStream_t)exec->stream;
  config.attrs = &early;
  config.numAttrs = dependent ? 1 : 0;
  for (uint32_t i = 0; i < a->n; i++) {
    const cudaError_t e = cudaLaunchKernelEx(&config, work_k, a->stamps + a->first + i, a->spin_ns);
    if (e != cudaSuccess)
      return ps__fail(PS_EDEVICE, "gaps: launch %u of %u: %s", i, a->n, cudaGetErrorString(e));
  }
  return PS_OK;
}

static cudaGraphExec_t graph; /* of the run that was prepared last */

static ps_status capture(const gaps_args *a, const ps__cuda_exec *exec) {
  cudaStream_t stream = (cudaStream_t)exec->stream;
  cudaGraph_t made = NULL;
  if (graph)
    cudaGraphExecDestroy(graph);
  graph = NULL;
  cudaError_t e = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (e != cudaSuccess)
    return ps__fail(PS_EDEVICE, "gaps: no graph: %s", cudaGetErrorString(e));
  const ps_status st = queue(a, exec, false);
  e = cudaStreamEndCapture(stream, &made);
  if (st == PS_OK && e == cudaSuccess)
    e = cudaGraphInstantiate(&graph, made, 0);
  if (made)
    cudaGraphDestroy(made);
  if (st != PS_OK)
    return st;
  return e == cudaSuccess ? PS_OK
                          : ps__fail(PS_EDEVICE, "gaps: no graph: %s", cudaGetErrorString(e));
}

extern "C" ps_status gaps_prepare_cuda(const void *args, void *exec, size_t *scratch_bytes) {
  const gaps_args *a = (const gaps_args *)args;
  *scratch_bytes = 0;
  return a->how == GAPS_GRAPH ? capture(a, (const ps__cuda_exec *)exec) : PS_OK;
}

extern "C" ps_status gaps_work_cuda(const ps_launch *launch) {
  const gaps_args *a = (const gaps_args *)launch->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)launch->exec;
  if (a->how != GAPS_GRAPH)
    return queue(a, exec, a->how == GAPS_DEPENDENT);
  const cudaError_t e = cudaGraphLaunch(graph, (cudaStream_t)exec->stream);
  return e == cudaSuccess ? PS_OK : ps__fail(PS_EDEVICE, "gaps: graph: %s", cudaGetErrorString(e));
}

extern "C" ps_status gaps_clear_cuda(const ps_launch *launch) {
  const gaps_args *a = (const gaps_args *)launch->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)launch->exec;
  clear_k<<<(a->n + THREADS - 1) / THREADS, THREADS, 0, (cudaStream_t)exec->stream>>>(a->stamps,
                                                                                      a->n);
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? PS_OK : ps__fail(PS_EDEVICE, "gaps: clear: %s", cudaGetErrorString(e));
}
