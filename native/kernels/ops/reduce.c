/* reduce.c - rows of sums: gradients into totals, columns, squares; of zero fill; of a copy. */
#include "kernels/ops/row.h"

static ps_work work_fill_zero(const void *args) {
  return ps__bytes_work((double)((const ps__args_fill *)args)->bytes);
}
static ps_work work_copy_bytes(const void *args) {
  return ps__bytes_work(2 * (double)((const ps__args_fill *)args)->bytes);
}
PS__ROW(fill_zero, PS_CLASS_ELEMENTWISE, ps__cpu_fill_zero, PS_CUDA_FN(fill_zero),
        .rate = PS__RATE_MEMORY, .work = work_fill_zero);
/* No chunk decides what a definition copies: parameters. */
static void bind_copy_bytes(void *args, const ps__chunk_shape *chunk) { (void)args, (void)chunk; }
PS__ROW(copy_bytes, PS_CLASS_ELEMENTWISE, ps__cpu_copy_bytes, PS_CUDA_FN(copy_bytes),
        .rate = PS__RATE_MEMORY, .work = work_copy_bytes, .bind = bind_copy_bytes);

/* Bytes of an element's low byte, read and written. */
static double low_bytes(const ps__args_accumulate *a) {
  return (a->mode & PS_LOW_READ ? 1 : 0) + (a->mode & PS_LOW_WRITE ? 1 : 0);
}
static ps_work work_accumulate(const void *args) {
  const ps__args_accumulate *a = args;
  return ps__bytes_work((3.0 * (double)ps__dt_bytes(a->dt) + low_bytes(a)) * (double)a->n);
}
/* A definition has the elements of a token. */
static void bind_accumulate(void *args, const ps__chunk_shape *chunk) {
  ((ps__args_accumulate *)args)->n *= chunk->n_tokens;
}
PS__ROW(accumulate, PS_CLASS_ELEMENTWISE, ps__cpu_accumulate, PS_CUDA_FN(accumulate),
        .rate = PS__RATE_MEMORY, .work = work_accumulate, .bind = bind_accumulate);
PS__ROW(accumulate_host, PS_CLASS_OPTIMIZER, ps__cpu_accumulate, NULL, .rate = PS__RATE_ACCUMULATE,
        .work = work_accumulate);

/* rows 0 in a definition: the chunk's tokens. */
static void bind_colsum(void *args, const ps__chunk_shape *chunk) {
  ps__args_colsum *a = args;
  a->rows = a->rows ? a->rows : chunk->n_tokens;
  a->accumulate = !chunk->first_grad;
}
static ps_work work_colsum(const void *args) {
  const ps__args_colsum *a = args;
  return ps__bytes_work((double)a->rows * a->cols * (double)ps__dt_bytes(a->dt));
}
PS__ROW(colsum, PS_CLASS_ELEMENTWISE, ps__cpu_colsum, PS_CUDA_FN(colsum), .rate = PS__RATE_MEMORY,
        .work = work_colsum, .bind = bind_colsum,
        .scratch = {ps__cpu_scratch_colsum, ps_scratch_colsum});

static ps_work work_sumsq(const void *args) {
  const ps__args_sumsq *a = args;
  return ps__bytes_work((double)ps__dt_bytes(a->dt) * (double)a->n);
}
static ps_work work_round_sumsq(const void *args) {
  const ps__args_accumulate *a = args;
  return ps__bytes_work((2.0 * (double)ps__dt_bytes(a->dt) + low_bytes(a)) * (double)a->n);
}
PS__ROW(sumsq, PS_CLASS_ELEMENTWISE, ps__cpu_sumsq, PS_CUDA_FN(sumsq), .rate = PS__RATE_MEMORY,
        .work = work_sumsq, .scratch = {NULL, ps_scratch_sumsq});
PS__ROW(sumsq_host, PS_CLASS_OPTIMIZER, ps__cpu_sumsq, NULL, .rate = PS__RATE_SUMSQ,
        .work = work_sumsq);
PS__ROW(accumulate_sumsq_host, PS_CLASS_OPTIMIZER, ps__cpu_accumulate_sumsq_host, NULL,
        .rate = PS__RATE_ACCUMULATE_SUMSQ, .work = work_accumulate);
PS__ROW(round_sumsq_host, PS_CLASS_OPTIMIZER, ps__cpu_round_sumsq_host, NULL,
        .rate = PS__RATE_SUMSQ, .work = work_round_sumsq);
