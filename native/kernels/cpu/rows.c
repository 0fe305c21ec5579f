/* rows.c - loops over blocks of rows, on the pool; documents of rows. */
#include "kernels/cpu/cpu.h"

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

ps_status ps__cpu_check_documents(const int32_t *doc_start, uint32_t n, uint32_t row0,
                                  const char *op) {
  for (uint32_t i = 0; i < n; i++)
    if (doc_start[i] < (i ? doc_start[i - 1] : 0) || (uint32_t)doc_start[i] > row0 + i)
      return ps__fail(PS_EINVAL, "%s: doc_start[%u] = %d decreases or lies past its row %u", op, i,
                      doc_start[i], row0 + i);
  return PS_OK;
}

ps_status ps__cpu_check_rows_of_sequences(const int32_t *sequence, const int32_t *pos, uint32_t n,
                                          const char *op) {
  for (uint32_t t = 0; t < n; t++) {
    const bool follows = !t || pos[t] < 0 || pos[t - 1] < 0 || sequence[t - 1] != sequence[t] ||
                         ps__cpu_row_continues(sequence, pos, t);
    if (pos[t] < -1 || sequence[t] < 0 || !follows)
      return ps__fail(PS_EINVAL,
                      "%s: row %u is position %d of sequence %d: neither may be negative, and rows "
                      "of a sequence follow each other",
                      op, t, pos[t], sequence[t]);
  }
  return PS_OK;
}
