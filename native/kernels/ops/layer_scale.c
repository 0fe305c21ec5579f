/* layer_scale.c - rows of a block's scale. */
#include "kernels/ops/row.h"

static ps_status check_layer_scale(const void *args, const char *op) {
  return ps__check_dt(((const ps__args_layer_scale *)args)->dt, op);
}
static ps_work work_layer_scale(const void *args) {
  const ps__args_layer_scale *a = args;
  return ps__bytes_work(2.0 * a->rows * a->cols * (double)ps__dt_bytes(a->dt));
}

PS__BIND_ROWS(bind_layer_scale_fwd, ps__args_layer_scale, rows)
PS__OP(layer_scale_fwd, PS_CLASS_ELEMENTWISE, check_layer_scale, .rate = PS__RATE_MEMORY,
       .work = work_layer_scale, .bind = bind_layer_scale_fwd);

PS__BIND_GRADIENT(bind_layer_scale_bwd, ps__args_layer_scale, rows, accumulate_ds)
PS__OP(layer_scale_bwd, PS_CLASS_ELEMENTWISE, check_layer_scale, .rate = PS__RATE_MEMORY,
       .work = work_layer_scale, .bind = bind_layer_scale_bwd);
