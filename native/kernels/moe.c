/* moe.c - what the arguments of the ops of experts may be, on every backend. */
#include "core/core.h"
#include "kernels/ops.h"

ps_status ps__check_moe(uint32_t n_tokens, uint32_t n_experts, uint32_t n_used, const char *op) {
  if (n_experts < 1 || n_experts > PS_MAX_EXPERTS)
    return ps__fail(PS_EINVAL, "%s: n_experts is %u: it must be 1 to %d", op, n_experts,
                    PS_MAX_EXPERTS);
  if (n_used < 1 || n_used > PS_MAX_EXPERTS_USED || n_used > n_experts)
    return ps__fail(PS_EINVAL, "%s: n_used is %u: it must be 1 to %d, and at most n_experts, %u",
                    op, n_used, PS_MAX_EXPERTS_USED, n_experts);
  if ((uint64_t)n_tokens * n_used > INT32_MAX)
    return ps__fail(PS_EINVAL, "%s: %u tokens with %u experts each: at most 2^31 - 1 rows", op,
                    n_tokens, n_used);
  return PS_OK;
}

static ps_status check_dt(uint32_t dt, const char *op) {
  return dt < PS_N_DTYPES ? PS_OK
                          : ps__fail(PS_EINVAL, "%s: dt is %u: neither fp32 nor bf16", op, dt);
}
static ps_status check_used(uint32_t n_tokens, uint32_t n_used, const char *op) {
  return ps__check_moe(n_tokens, PS_MAX_EXPERTS, n_used, op);
}

ps_status ps__check_moe_route_bwd(const ps__args_moe_route_bwd *a, const char *op) {
  PS_TRY(ps__check_moe(a->n_tokens, a->n_experts, a->n_used, op));
  PS_TRY(check_dt(a->dt, op));
  if (!(a->aux >= 0 && a->aux < 1e9f && a->z_loss >= 0 && a->z_loss < 1e9f))
    return ps__fail(PS_EINVAL, "%s: aux is %g and z_loss %g: they must be 0 to 1e9", op,
                    (double)a->aux, (double)a->z_loss);
  if ((a->aux > 0 || a->z_loss > 0) && a->step_tokens < a->n_tokens)
    return ps__fail(PS_EINVAL, "%s: step_tokens is %u: at least the chunk's, %u", op,
                    a->step_tokens, a->n_tokens);
  return PS_OK;
}

ps_status ps__check_moe_rows(const ps__args_moe_rows *a, const char *op) {
  PS_TRY(check_used(a->n_tokens, a->n_used, op));
  PS_TRY(check_dt(a->dt, op));
  if (a->dim < 1)
    return ps__fail(PS_EINVAL, "%s: dim is 0: it must be positive", op);
  if (a->accumulate && a->has_residual)
    return ps__fail(PS_EINVAL, "%s: accumulate and a residual at once: one addend a row", op);
  return PS_OK;
}

ps_status ps__check_gemm_grouped(const ps__args_gemm_grouped *a, const char *op) {
  PS_TRY(ps__check_moe(a->n_tokens, a->n_experts, a->n_used, op));
  PS_TRY(check_dt(a->dt, op));
  if (a->n_out < 1 || a->n_in < 1)
    return ps__fail(PS_EINVAL, "%s: a product of %u x %u: sizes must be positive", op, a->n_out,
                    a->n_in);
  if (a->role > PS_GEMM_WGRAD)
    return ps__fail(PS_EINVAL, "%s: role is %u: 0 (forward), 1 (dX) or 2 (dW)", op, a->role);
  if (a->accumulate && a->role != PS_GEMM_WGRAD)
    return ps__fail(PS_EINVAL, "%s: accumulate is set with role %u: only dW is added to", op,
                    a->role);
  return PS_OK;
}

ps_status ps__check_moe_glu(const ps__args_moe_glu *a, const char *op) {
  const ps__args_glu glu = {a->n_tokens, a->expert_dim, a->dt, a->activation};
  PS_TRY(check_used(a->n_tokens, a->n_used, op));
  return ps__check_glu(&glu, op);
}
