/* mla.c - rows of latent attention's queries, keys and values. */
#include "kernels/ops/row.h"
#include <math.h>

static ps_status check_mla(const void *args, const char *op) {
  const ps__args_mla *a = args;
  if (!a->n_heads || !a->nope_dim || !a->value_dim || a->value_dim > a->nope_dim + a->rotary_dim)
    return ps__fail(PS_EINVAL,
                    "%s: %u heads of %u + %u, values of %u is no valid shape: values are at most "
                    "as wide as keys",
                    op, a->n_heads, a->nope_dim, a->rotary_dim, a->value_dim);
  if (!a->rotary_dim || a->rotary_dim % 2 || a->rotary_dim > 2 * PS_ROPE_PAIRS)
    return ps__fail(PS_EINVAL, "%s: rotary_dim is %u: it must be even and 2 to %d", op,
                    a->rotary_dim, 2 * PS_ROPE_PAIRS);
  if (!(a->attention_factor > 0.0f && a->attention_factor < INFINITY))
    return ps__fail(PS_EINVAL, "%s: attention_factor is %g: it must be positive and finite", op,
                    (double)a->attention_factor);
  return ps__check_dt(a->dt, op);
}

PS__BIND_ROWS(bind_mla, ps__args_mla, n_tokens)

static double mla_bytes(const ps__args_mla *a, double elements) {
  return elements * a->n_tokens * a->n_heads * (double)ps__dt_bytes(a->dt);
}
static ps_work work_mla_turn(const void *args) {
  const ps__args_mla *a = args;
  return ps__bytes_work(mla_bytes(a, 2.0 * a->nope_dim + 2.0 * a->rotary_dim));
}
static ps_work work_mla_kv_fwd(const void *args) {
  const ps__args_mla *a = args;
  return ps__bytes_work(mla_bytes(a, 3.0 * a->nope_dim + 2.0 * a->rotary_dim + a->value_dim));
}
static ps_work work_mla_kv_bwd(const void *args) {
  const ps__args_mla *a = args;
  const double d = (double)a->nope_dim + a->rotary_dim;
  return ps__bytes_work(mla_bytes(a, (double)a->nope_dim + a->value_dim) +
                        8.0 * d * a->n_tokens * a->n_heads);
}
static ps_work work_mla_width(const void *args) {
  const ps__args_mla *a = args;
  return ps__bytes_work(mla_bytes(a, (double)a->nope_dim + a->rotary_dim + a->value_dim));
}

PS__OP(mla_turn, PS_CLASS_ELEMENTWISE, check_mla, .rate = PS__RATE_MEMORY, .work = work_mla_turn,
       .bind = bind_mla);
PS__OP(mla_kv_fwd, PS_CLASS_ELEMENTWISE, check_mla, .rate = PS__RATE_MEMORY,
       .work = work_mla_kv_fwd, .bind = bind_mla);
PS__OP(mla_kv_bwd, PS_CLASS_ELEMENTWISE, check_mla, .rate = PS__RATE_MEMORY,
       .work = work_mla_kv_bwd, .bind = bind_mla);
PS__OP(mla_cut, PS_CLASS_ELEMENTWISE, check_mla, .rate = PS__RATE_MEMORY, .work = work_mla_width,
       .bind = bind_mla);
PS__OP(mla_pad, PS_CLASS_ELEMENTWISE, check_mla, .rate = PS__RATE_MEMORY, .work = work_mla_width,
       .bind = bind_mla);
