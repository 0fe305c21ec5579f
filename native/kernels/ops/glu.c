/* glu.c - rows of the gated activation. */
#include "kernels/ops/row.h"

static ps_status check_glu(const void *args, const char *op) {
  const ps__args_glu *a = args;
  PS_TRY(ps__check_activation(a->activation, op));
  return ps__check_dt(a->dt, op);
}
PS__BIND_ROWS(bind_glu, ps__args_glu, n_tokens)
static ps_work work_glu_fwd(const void *args) {
  const ps__args_glu *a = args;
  return ps__bytes_work(3.0 * a->n_tokens * a->ffn_dim * (double)ps__dt_bytes(a->dt));
}
static ps_work work_glu_bwd(const void *args) {
  return ps__bytes_work(2.0 * work_glu_fwd(args).bytes);
}

PS__OP(glu_fwd, PS_CLASS_ELEMENTWISE, check_glu, .rate = PS__RATE_MEMORY, .work = work_glu_fwd,
       .bind = bind_glu);
PS__OP(glu_bwd, PS_CLASS_ELEMENTWISE, check_glu, .rate = PS__RATE_MEMORY, .work = work_glu_bwd,
       .bind = bind_glu);

/* ---- quantized ------------------------------------------------------------------------------- */

static ps_status check_forms(const ps__args_glu_quantize *a, uint32_t forms, const char *op) {
  const ps__args_glu glu = {a->n_tokens, a->ffn_dim, a->dt, a->activation};
  PS_TRY(check_glu(&glu, op));
  return ps__check_forms(a->dt, a->dt_q, forms, op);
}
static ps_status check_glu_quantize(const void *args, const char *op) {
  return check_forms(args, ((const ps__args_glu_quantize *)args)->forms, op);
}
static ps_status check_glu_bwd_quantize(const void *args, const char *op) {
  return check_forms(args, PS_FORM_COLS, op);
}
PS__BIND_COUNTED(bind_glu_quantize, ps__args_glu_quantize, n_tokens)
static double glu_quantize_bytes(const ps__args_glu_quantize *a, double read, double written) {
  return (double)a->n_tokens * a->ffn_dim * (2.0 * read * (double)ps__dt_bytes(a->dt) + written);
}
static ps_work work_glu_quantize(const void *args) {
  const ps__args_glu_quantize *a = args;
  return ps__bytes_work(glu_quantize_bytes(a, 2, ps__n_forms(a->forms)));
}
static ps_work work_glu_bwd_quantize(const void *args) {
  return ps__bytes_work(glu_quantize_bytes(args, 3, 5));
}

PS__OP(glu_quantize, PS_CLASS_ELEMENTWISE, check_glu_quantize, .rate = PS__RATE_MEMORY,
       .work = work_glu_quantize, .bind = bind_glu_quantize,
       .scratch = {ps__cpu_scratch_glu_quantize, NULL});
PS__OP(glu_bwd_quantize, PS_CLASS_ELEMENTWISE, check_glu_bwd_quantize, .rate = PS__RATE_MEMORY,
       .work = work_glu_bwd_quantize, .bind = bind_glu_quantize,
       .scratch = {ps__cpu_scratch_glu_bwd_quantize, NULL});
