/* cross_entropy.c - row of the loss. */
#include "kernels/ops/row.h"
#include <math.h>

static ps_status check_cross_entropy(const void *args, const char *op) {
  const ps__args_cross_entropy *a = args;
  if (!(a->softcap >= 0.0f && a->softcap < INFINITY))
    return ps__fail(PS_EINVAL, "%s: softcap is %g: it must be positive and finite, or 0 for none",
                    op, (double)a->softcap);
  if (!(a->z_loss >= 0.0f && a->z_loss < INFINITY))
    return ps__fail(PS_EINVAL, "%s: z_loss is %g: it must be finite and 0 or more", op,
                    (double)a->z_loss);
  if (!(a->label_smoothing >= 0.0f && a->label_smoothing <= 1.0f))
    return ps__fail(PS_EINVAL, "%s: label_smoothing is %g: it must be from 0 to 1", op,
                    (double)a->label_smoothing);
  return ps__check_dt(a->dt, op);
}
PS__BIND_ROWS(bind_cross_entropy, ps__args_cross_entropy, rows)
static ps_work work_cross_entropy(const void *args) {
  const ps__args_cross_entropy *a = args;
  return ps__bytes_work(3.0 * a->rows * a->vocab * (double)ps__dt_bytes(a->dt));
}
PS__OP(cross_entropy, PS_CLASS_ELEMENTWISE, check_cross_entropy, .rate = PS__RATE_MEMORY,
       .work = work_cross_entropy, .bind = bind_cross_entropy);
