/* gaps.h - what bench/gaps.c and its CUDA kernels (bench/gaps_kernels.cu) share. */
#ifndef PS_BENCH_GAPS_H
#define PS_BENCH_GAPS_H
#include <penstock/engine.h>
#ifdef __cplusplus
extern "C" {
#endif

/* When a kernel ran, in ns of the clock of what ran it. */
typedef struct gaps_stamp {
  unsigned long long start, end;
} gaps_stamp;

/* How an op's kernels are launched. */
enum { GAPS_LAUNCHES, GAPS_DEPENDENT, GAPS_GRAPH };

/* The op launches kernels [first, first + n), each of which works for spin_ns and stamps its
 * place. */
typedef struct gaps_args {
  gaps_stamp *stamps; /* on the device */
  unsigned long long spin_ns;
  uint32_t first, n, how, reserved;
} gaps_args;

/* ops: gaps_work_cuda() queues the kernels; gaps_clear_cuda() makes n stamps as if nothing ran.
 * gaps_prepare_cuda() - a ps__op_info.prepare: for GAPS_GRAPH, captures the kernels in a graph. */
ps_status gaps_work_cuda(const ps_launch *launch);
ps_status gaps_clear_cuda(const ps_launch *launch);
ps_status gaps_prepare_cuda(const void *args, void *exec, size_t *scratch_bytes);

#ifdef __cplusplus
}
#endif
#endif
