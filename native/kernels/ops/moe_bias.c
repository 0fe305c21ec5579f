/* moe_bias.c - rows of the ops of experts with biases. */
#include "kernels/ops/row.h"

static ps_status check_add(const void *args, const char *op) {
  const ps__args_add_bias *a = args;
  PS_TRY(ps__check_dt(a->dt, op));
  return a->cols ? PS_OK : ps__fail(PS_EINVAL, "%s: cols is 0: it must be positive", op);
}
PS__BIND_ROWS(bind_add, ps__args_add_bias, rows)
static ps_work work_add(const void *args) {
  const ps__args_add_bias *a = args;
  return ps__bytes_work(8.0 * a->rows * a->cols);
}

static ps_status check_gate(const void *args, const char *op) {
  const ps__args_moe_clamp_glu *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, a->n_experts, a->n_used, op));
  PS_TRY(ps__check_dt(a->dt, op));
  if (!(a->limit > 0 && a->limit < 1e9f && a->alpha > 0 && a->alpha < 1e9f))
    return ps__fail(PS_EINVAL, "%s: alpha is %g and limit %g: both must be above 0 and below 1e9",
                    op, (double)a->alpha, (double)a->limit);
  return PS_OK;
}
PS__BIND_ROWS(bind_gate, ps__args_moe_clamp_glu, n_tokens)
static ps_work work_gate_of(const void *args, double columns) {
  const ps__args_moe_clamp_glu *a = args;
  return ps__bytes_work((double)a->n_tokens * a->n_used *
                        (columns * a->expert_dim * (double)ps__dt_bytes(a->dt) + 10));
}
static ps_work work_gate(const void *args) { return work_gate_of(args, 3); }
static ps_work work_gate_bwd(const void *args) { return work_gate_of(args, 6); }

static ps_status check_bias(const void *args, const char *op) {
  const ps__args_moe_bias *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, a->n_experts, a->n_used, op));
  PS_TRY(ps__check_dt(a->dt, op));
  return a->cols ? PS_OK : ps__fail(PS_EINVAL, "%s: cols is 0: it must be positive", op);
}
PS__BIND_GRADIENT(bind_bias, ps__args_moe_bias, n_tokens, accumulate)
static ps_work work_bias(const void *args) {
  const ps__args_moe_bias *a = args;
  const double rows = (double)a->n_tokens * a->n_used;
  return ps__bytes_work((rows + a->n_experts) * a->cols * (double)ps__dt_bytes(a->dt));
}

PS__OP(add_bias, PS_CLASS_ELEMENTWISE, check_add, .rate = PS__RATE_MEMORY, .work = work_add,
       .bind = bind_add);
PS__OP(moe_clamp_glu, PS_CLASS_ELEMENTWISE, check_gate, .rate = PS__RATE_MEMORY, .work = work_gate,
       .bind = bind_gate);
PS__OP(moe_clamp_glu_bwd, PS_CLASS_ELEMENTWISE, check_gate, .rate = PS__RATE_MEMORY,
       .work = work_gate_bwd, .bind = bind_gate);
PS__OP(moe_bias_dot, PS_CLASS_ELEMENTWISE, check_bias, .rate = PS__RATE_MEMORY, .work = work_bias,
       .bind = bind_bias);
PS__OP(moe_bias_sum, PS_CLASS_ELEMENTWISE, check_bias, .rate = PS__RATE_MEMORY, .work = work_bias,
       .bind = bind_bias, .scratch = {NULL, ps_scratch_moe_bias_sum});
