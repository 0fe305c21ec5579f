/* cross_entropy.c - rows of the losses: of logits, of scores. */
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

static ps_status check_score_loss(const void *args, const char *op) {
  const ps__args_score_loss *a = args;
  if (a->problem == PS_PROBLEM_LANGUAGE || a->problem >= PS_N_PROBLEMS)
    return ps__fail(PS_EINVAL, "%s: problem is %u: it must be from 1 to %d", op, a->problem,
                    PS_N_PROBLEMS - 1);
  if ((a->problem == PS_PROBLEM_REGRESSION || a->problem == PS_PROBLEM_PAIRS) && a->cols != 1)
    return ps__fail(PS_EINVAL, "%s: cols is %u: %s has one score", op, a->cols,
                    ps_problem_name(a->problem));
  if (a->problem == PS_PROBLEM_MULTI_LABEL && a->cols > PS_MAX_LABEL_BITS)
    return ps__fail(PS_EINVAL, "%s: cols is %u: a target has %d bits", op, a->cols,
                    PS_MAX_LABEL_BITS);
  return ps__check_dt(a->dt, op);
}
PS__BIND_ROWS(bind_score_loss, ps__args_score_loss, rows)
static ps_work work_score_loss(const void *args) {
  const ps__args_score_loss *a = args;
  const double moved = a->problem == PS_PROBLEM_EMBEDDING ? 0 : 2.0 * a->cols;
  return ps__bytes_work(a->rows * (12.0 + moved * (double)ps__dt_bytes(a->dt)));
}
PS__OP(score_loss, PS_CLASS_ELEMENTWISE, check_score_loss, .rate = PS__RATE_MEMORY,
       .work = work_score_loss, .bind = bind_score_loss);
