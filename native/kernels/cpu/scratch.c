/* scratch.c - the table of cpu kernels with their scratch sizes, and loops over blocks of rows. */
#include "kernels/cpu/cpu.h"
#include <string.h>

/* Every kernel of ops.h; scratch NULL where a worker needs none. */
static const struct entry {
  const ps_kernel *kernel;
  size_t (*scratch)(const void *args);
} entries[] = {
    {&ps__k_fill_zero, NULL},
    {&ps__k_accumulate, NULL},
    {&ps__k_accumulate_host, NULL},
    {&ps__k_embed_fwd, NULL},
    {&ps__k_embed_bwd, ps__cpu_scratch_embed_bwd},
    {&ps__k_embed_bwd_host, ps__cpu_scratch_embed_bwd},
    {&ps__k_rmsnorm_fwd, NULL},
    {&ps__k_rmsnorm_bwd, ps__cpu_scratch_rmsnorm_bwd},
    {&ps__k_gemm, ps__cpu_scratch_gemm},
    {&ps__k_qkv_split_fwd, ps__cpu_scratch_qkv_split_fwd},
    {&ps__k_qkv_split_bwd, ps__cpu_scratch_qkv_split_bwd},
    {&ps__k_attention_fwd, ps__cpu_scratch_attention_fwd},
    {&ps__k_attention_bwd, ps__cpu_scratch_attention_bwd},
    {&ps__k_swiglu_fwd, NULL},
    {&ps__k_swiglu_bwd, NULL},
    {&ps__k_colsum, ps__cpu_scratch_colsum},
    {&ps__k_cross_entropy, NULL},
    {&ps__k_sumsq, NULL},
    {&ps__k_sumsq_host, NULL},
    {&ps__k_accumulate_sumsq_host, NULL},
    {&ps__k_round_sumsq_host, NULL},
};
enum { N_ENTRIES = sizeof entries / sizeof entries[0] };

size_t ps__cpu_scratch_bytes(const ps_kernel *kernel, const void *args) {
  for (size_t i = 0; i < N_ENTRIES; i++)
    if (entries[i].kernel == kernel)
      return entries[i].scratch ? entries[i].scratch(args) : 0;
  return 0; /* copies and the caller's own ops */
}

const ps_kernel *ps__cpu_kernel_by_name(const char *name) {
  for (size_t i = 0; i < N_ENTRIES; i++)
    if (strcmp(entries[i].kernel->name, name) == 0)
      return entries[i].kernel;
  return NULL;
}

typedef struct rows_job {
  ps__rows_fn fn;
  void *arg;
  int64_t n, block;
} rows_job;

static void rows_task(void *arg, int64_t task, uint32_t worker) {
  const rows_job *j = arg;
  int64_t first = task * j->block, end = first + j->block;
  j->fn(j->arg, first, end < j->n ? end : j->n, worker);
}

void ps__cpu_rows(const ps__cpu_exec *exec, int64_t n, int64_t block, ps__rows_fn fn, void *arg) {
  if (n <= 0)
    return;
  if (n <= block) {
    fn(arg, 0, n, 0);
    return;
  }
  rows_job job = {fn, arg, n, block};
  ps__pool_run_some(exec->pool, exec->n_threads ? exec->n_threads : ps__pool_size(exec->pool),
                    (n + block - 1) / block, rows_task, &job);
}
