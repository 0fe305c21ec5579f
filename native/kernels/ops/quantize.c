/* quantize.c - rows of what quantizes a tensor. */
#include "kernels/ops/row.h"
#include <math.h>

ps_status ps__check_forms(uint32_t dt, uint32_t dt_q, uint32_t forms, const char *op) {
  PS_TRY(ps__check_dt(dt, op));
  if (dt_q != PS__E4M3 && dt_q != PS__E5M2)
    return ps__fail(PS_EINVAL, "%s: dt_q is %u: neither e4m3 nor e5m2", op, dt_q);
  if (!forms || forms & ~(uint32_t)(PS_FORM_ROWS | PS_FORM_COLS))
    return ps__fail(PS_EINVAL, "%s: forms is %u: PS_FORM_ROWS (1), PS_FORM_COLS (2) or both", op,
                    forms);
  return PS_OK;
}
static ps_status check_size(uint32_t rows, uint32_t cols, const char *op) {
  return rows && cols
             ? PS_OK
             : ps__fail(PS_EINVAL, "%s: %u x %u elements: at least one is needed", op, rows, cols);
}

static ps_status check_fp8_scale(const void *args, const char *op) {
  const ps__args_fp8_scale *a = args;
  PS_TRY(ps__check_forms(a->dt, a->dt_q, PS_FORM_ROWS, op));
  if (!(a->headroom >= 0 && a->headroom < INFINITY))
    return ps__fail(PS_EINVAL, "%s: headroom is %g: a power of two is needed", op,
                    (double)a->headroom);
  return check_size(a->rows, a->cols, op);
}
static void bind_fp8_scale(void *args, const ps__chunk_shape *chunk) {
  ps__args_fp8_scale *a = args;
  if (!a->rows)
    a->rows = chunk->n_tokens;
}
static ps_work work_fp8_scale(const void *args) {
  const ps__args_fp8_scale *a = args;
  return ps__bytes_work((double)a->rows * a->cols * (double)ps__dt_bytes(a->dt));
}
PS__OP(fp8_scale, PS_CLASS_ELEMENTWISE, check_fp8_scale, .rate = PS__RATE_MEMORY,
       .work = work_fp8_scale, .bind = bind_fp8_scale);

static ps_status check_quantize(const void *args, const char *op) {
  const ps__args_quantize *a = args;
  PS_TRY(ps__check_forms(a->dt, a->dt_q, a->forms, op));
  return check_size(a->rows, a->cols, op);
}
static void bind_quantize(void *args, const ps__chunk_shape *chunk) {
  ps__args_quantize *a = args;
  if (!a->rows)
    a->rows = chunk->n_tokens;
  a->count = chunk->again ? 0 : a->count;
}
static ps_work work_quantize(const void *args) {
  const ps__args_quantize *a = args;
  return ps__bytes_work(
      (double)a->rows * a->cols *
      ((a->given ? 1.0 : 2.0) * (double)ps__dt_bytes(a->dt) + ps__n_forms(a->forms)));
}
PS__OP(quantize, PS_CLASS_ELEMENTWISE, check_quantize, .rate = PS__RATE_MEMORY,
       .work = work_quantize, .bind = bind_quantize);
