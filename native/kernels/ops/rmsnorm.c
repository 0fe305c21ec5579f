/* rmsnorm.c - rows of RMSNorm. */
#include "kernels/ops/row.h"
#include <math.h>

static ps_status check_rmsnorm(const void *args, const char *op) {
  const ps__args_rmsnorm *a = args;
  if (!(a->weight_offset > -INFINITY && a->weight_offset < INFINITY))
    return ps__fail(PS_EINVAL, "%s: weight_offset is %g: it must be finite", op,
                    (double)a->weight_offset);
  return ps__check_dt(a->dt, op);
}

PS__BIND_ROWS(bind_rmsnorm_fwd, ps__args_rmsnorm, rows)
static ps_work work_rmsnorm_fwd(const void *args) {
  const ps__args_rmsnorm *a = args;
  return ps__bytes_work((a->has_residual ? 3.0 : 2.0) * a->rows * a->cols *
                        (double)ps__dt_bytes(a->dt));
}
PS__OP(rmsnorm_fwd, PS_CLASS_ELEMENTWISE, check_rmsnorm, .rate = PS__RATE_MEMORY,
       .work = work_rmsnorm_fwd, .bind = bind_rmsnorm_fwd);

PS__BIND_GRADIENT(bind_rmsnorm_bwd, ps__args_rmsnorm, rows, accumulate_dw)
static ps_work work_rmsnorm_bwd(const void *args) {
  const ps__args_rmsnorm *a = args;
  return ps__bytes_work(4.0 * a->rows * a->cols * (double)ps__dt_bytes(a->dt));
}
PS__OP(rmsnorm_bwd, PS_CLASS_ELEMENTWISE, check_rmsnorm, .rate = PS__RATE_MEMORY,
       .work = work_rmsnorm_bwd, .bind = bind_rmsnorm_bwd,
       .scratch = {ps__cpu_scratch_rmsnorm_bwd, ps_scratch_rmsnorm_bwd});

static ps_status check_rmsnorm_quantize(const void *args, const char *op) {
  const ps__args_rmsnorm_quantize *a = args;
  PS_TRY(check_rmsnorm(&a->norm, op));
  return ps__check_forms(a->norm.dt, a->dt_q, a->forms, op);
}
PS__BIND_COUNTED(bind_rmsnorm_quantize, ps__args_rmsnorm_quantize, norm.rows)
static ps_work work_rmsnorm_quantize(const void *args) {
  const ps__args_rmsnorm_quantize *a = args;
  return ps__bytes_work((double)a->norm.rows * a->norm.cols *
                        (2.0 * (double)ps__dt_bytes(a->norm.dt) + ps__n_forms(a->forms)));
}
PS__OP(rmsnorm_quantize, PS_CLASS_ELEMENTWISE, check_rmsnorm_quantize, .rate = PS__RATE_MEMORY,
       .work = work_rmsnorm_quantize, .bind = bind_rmsnorm_quantize,
       .scratch = {ps__cpu_scratch_rmsnorm_quantize, ps_scratch_rmsnorm_quantize});
