/* launch.c - what a kernel may ask of the stream that runs it: penstock/engine.h, "ops". */
#include "core/core.h"
#include "kernels/cuda/cuda_exec.h"
#include <penstock/engine.h>

static const ps__cpu_exec *on_threads(const ps_launch *l) {
  return l->backend == PS_BACKEND_CPU ? l->exec : NULL;
}

uint32_t ps_launch_n_threads(const ps_launch *launch) {
  const ps__cpu_exec *cpu = on_threads(launch);
  return cpu ? ps__pool_size(cpu->pool) : 1;
}

void ps_launch_parallel(const ps_launch *launch, int64_t n_tasks, ps_task_fn task, void *arg) {
  const ps__cpu_exec *cpu = on_threads(launch);
  if (cpu)
    ps__pool_run_some(cpu->pool, cpu->n_threads ? cpu->n_threads : ps__pool_size(cpu->pool),
                      n_tasks, task, arg);
  else
    for (int64_t i = 0; i < n_tasks; i++)
      task(arg, i, 0);
}

void *ps_launch_scratch(const ps_launch *launch, uint32_t thread, uint64_t *bytes) {
  const ps__cpu_exec *cpu = on_threads(launch);
  const ps__cuda_exec *cuda = launch->exec;
  const bool there = thread < ps_launch_n_threads(launch);
  const uint64_t n = !there ? 0 : cpu ? cpu->scratch_bytes : cuda->scratch_bytes;
  if (bytes)
    *bytes = n;
  return !n ? NULL : cpu ? cpu->scratch + (size_t)thread * cpu->scratch_bytes : cuda->scratch;
}

struct CUstream_st *ps_launch_cuda_stream(const ps_launch *launch) {
  return on_threads(launch) ? NULL : ((const ps__cuda_exec *)launch->exec)->stream;
}
