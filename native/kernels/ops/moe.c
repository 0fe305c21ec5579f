/* moe.c - rows of the ops of experts. */
#include "kernels/ops/row.h"

ps_status ps__check_experts(uint32_t n_tokens, uint32_t n_experts, uint32_t n_used,
                            const char *op) {
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

/* ---- the router ------------------------------------------------------------------------------ */

static ps_status check_scale(float scale, const char *op) {
  return scale >= 0 && scale <= 1e6f
             ? PS_OK
             : ps__fail(PS_EINVAL, "%s: scale is %g: it must be 0 to 1e6", op, (double)scale);
}
static ps_status check_route(const void *args, const char *op) {
  const ps__args_moe_route *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, a->n_experts, a->n_used, op));
  PS_TRY(check_scale(a->scale, op));
  if (a->has_bias)
    PS_TRY(ps__check_dt(a->dt, op));
  if (a->has_bias && !a->sigmoid)
    return ps__fail(PS_EINVAL, "%s: a bias without sigmoid: it is of sigmoids alone", op);
  const uint32_t each = a->n_groups ? a->n_experts / a->n_groups : 0;
  if (a->n_groups &&
      (a->n_experts % a->n_groups || !a->n_groups_used || a->n_groups_used > a->n_groups ||
       each < 1 + (a->sigmoid != 0) || (uint64_t)a->n_groups_used * each < a->n_used))
    return ps__fail(PS_EINVAL,
                    "%s: %u of %u groups of %u experts, %u a token: groups are of one size, with "
                    "sigmoid at least 2, and those used have experts enough",
                    op, a->n_groups_used, a->n_groups, a->n_experts, a->n_used);
  return PS_OK;
}
PS__BIND_ROWS(bind_route, ps__args_moe_route, n_tokens)
static ps_work work_route(const void *args) {
  const ps__args_moe_route *a = args;
  return ps__bytes_work(a->n_tokens * (4.0 * a->n_experts + 6.0 * a->n_used));
}

static ps_status check_route_bwd(const void *args, const char *op) {
  const ps__args_moe_route_bwd *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, a->n_experts, a->n_used, op));
  PS_TRY(ps__check_dt(a->dt, op));
  PS_TRY(check_scale(a->scale, op));
  if (a->sigmoid && (a->aux > 0 || a->z_loss > 0))
    return ps__fail(PS_EINVAL, "%s: aux is %g and z_loss %g: they must be 0 with sigmoid", op,
                    (double)a->aux, (double)a->z_loss);
  if (!(a->aux >= 0 && a->aux < 1e9f && a->z_loss >= 0 && a->z_loss < 1e9f))
    return ps__fail(PS_EINVAL, "%s: aux is %g and z_loss %g: they must be 0 to 1e9", op,
                    (double)a->aux, (double)a->z_loss);
  if ((a->aux > 0 || a->z_loss > 0) && a->step_tokens < a->n_tokens)
    return ps__fail(PS_EINVAL, "%s: step_tokens is %u: at least the chunk's, %u", op,
                    a->step_tokens, a->n_tokens);
  return PS_OK;
}
static void bind_route_bwd(void *args, const ps__chunk_shape *chunk) {
  ps__args_moe_route_bwd *a = args;
  a->n_tokens = chunk->n_tokens;
  a->step_tokens = chunk->step_tokens;
}
static ps_work work_route_bwd(const void *args) {
  const ps__args_moe_route_bwd *a = args;
  const double dt = (double)ps__dt_bytes(a->dt);
  return ps__bytes_work(a->n_tokens * ((4.0 + dt) * a->n_experts + 10.0 * a->n_used));
}

PS__OP(moe_route, PS_CLASS_ELEMENTWISE, check_route, .rate = PS__RATE_MEMORY, .work = work_route,
       .bind = bind_route);
PS__OP(moe_route_bwd, PS_CLASS_ELEMENTWISE, check_route_bwd, .rate = PS__RATE_MEMORY,
       .work = work_route_bwd, .bind = bind_route_bwd);

/* ---- rows ------------------------------------------------------------------------------------ */

static ps_status check_index(const void *args, const char *op) {
  const ps__args_moe_index *a = args;
  return ps__check_experts(a->n_tokens, a->n_experts, a->n_used, op);
}
PS__BIND_ROWS(bind_index, ps__args_moe_index, n_tokens)
static ps_work work_index(const void *args) {
  const ps__args_moe_index *a = args;
  return ps__bytes_work(8.0 * a->n_tokens * a->n_used + 4.0 * a->n_experts);
}

static ps_status check_rows(const void *args, const char *op) {
  const ps__args_moe_rows *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, PS_MAX_EXPERTS, a->n_used, op));
  PS_TRY(ps__check_dt(a->dt, op));
  if (a->dim < 1)
    return ps__fail(PS_EINVAL, "%s: dim is 0: it must be positive", op);
  if (a->accumulate && a->has_residual)
    return ps__fail(PS_EINVAL, "%s: accumulate and a residual at once: one addend a row", op);
  return PS_OK;
}
PS__BIND_ROWS(bind_rows, ps__args_moe_rows, n_tokens)
static ps_work work_gather(const void *args) {
  const ps__args_moe_rows *a = args;
  return ps__bytes_work((double)a->n_tokens * a->dim * (1.0 + a->n_used) *
                        (double)ps__dt_bytes(a->dt));
}
static ps_work work_combine(const void *args) {
  const ps__args_moe_rows *a = args;
  const double rows = 1.0 + a->n_used + (a->accumulate || a->has_residual);
  return ps__bytes_work((double)a->n_tokens * a->dim * rows * (double)ps__dt_bytes(a->dt));
}

PS__OP(moe_index, PS_CLASS_ELEMENTWISE, check_index, .rate = PS__RATE_MEMORY, .work = work_index,
       .bind = bind_index, .scratch = {NULL, ps_scratch_moe_index});
PS__OP(moe_gather, PS_CLASS_ELEMENTWISE, check_rows, .rate = PS__RATE_MEMORY, .work = work_gather,
       .bind = bind_rows);
PS__OP(moe_combine, PS_CLASS_ELEMENTWISE, check_rows, .rate = PS__RATE_MEMORY, .work = work_combine,
       .bind = bind_rows);

/* ---- products -------------------------------------------------------------------------------- */

static ps_status check_grouped(const void *args, const char *op) {
  const ps__args_gemm_grouped *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, a->n_experts, a->n_used, op));
  PS_TRY(ps__check_dt(a->dt, op));
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
static ps_status check_grouped_rows(const void *args, const char *op) {
  const ps__args_gemm_grouped *a = args;
  PS_TRY(check_grouped(a, op));
  return a->role == PS_GEMM_FORWARD
             ? PS_OK
             : ps__fail(PS_EINVAL, "%s: role is %u: 0 (forward) alone", op, a->role);
}
static ps_status check_grouped_slots(const void *args, const char *op) {
  const ps__args_grouped_slots *a = args;
  PS_TRY(check_grouped_rows(&a->product, op));
  return a->n_slots ? PS_OK : ps__fail(PS_EINVAL, "%s: n_slots is 0: at least 1", op);
}
static void bind_grouped(void *args, const ps__chunk_shape *chunk) {
  ps__args_gemm_grouped *a = args;
  a->n_tokens = chunk->n_tokens;
  if (a->role == PS_GEMM_WGRAD)
    a->accumulate = !chunk->first_grad;
}
static ps_work work_grouped(const void *args) {
  const ps__args_gemm_grouped *a = args;
  const double rows = (double)a->n_tokens * a->n_used, nk = (double)a->n_out * a->n_in;
  const double bytes =
      (double)ps__dt_bytes(a->dt) * (rows * (a->n_out + a->n_in) + a->n_experts * nk);
  return (ps_work){.flops = 2 * rows * nk, .bytes = bytes, .model_flops = 2 * rows * nk};
}

PS__OP(gemm_grouped, PS_CLASS_GEMM, check_grouped, .rate = PS__RATE_GEMM_GROUPED,
       .in_generation = &ps__k_gemm_grouped_rows, .work = work_grouped, .bind = bind_grouped,
       .scratch = {ps__cpu_scratch_gemm_grouped, NULL}, .blas = true);
PS__OP(gemm_grouped_rows, PS_CLASS_GEMM, check_grouped_rows, .rate = PS__RATE_GEMM_GROUPED,
       .from_slots = &ps__k_gemm_grouped_slots, .work = work_grouped, .bind = bind_grouped);
PS__OP(gemm_grouped_slots, PS_CLASS_GEMM, check_grouped_slots, .rate = PS__RATE_GEMM_GROUPED,
       .work = work_grouped);

/* ---- experts on demand ----------------------------------------------------------------------- */

static ps_status check_fetch(const void *args, const char *op) {
  const ps__args_moe_fetch *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, a->n_experts, a->n_used, op));
  const uint64_t rows = (uint64_t)a->n_tokens * a->n_used,
                 most = rows < a->n_experts ? rows : a->n_experts;
  if (a->n_slots < most || a->n_slots > a->n_experts)
    return ps__fail(PS_EINVAL,
                    "%s: n_slots is %u: it must be %llu, as many experts as may be wanted at once, "
                    "to %u, all of them",
                    op, a->n_slots, (unsigned long long)most, a->n_experts);
  for (uint32_t i = 0; i < 2; i++)
    if (a->bytes[i] % 4)
      return ps__fail(PS_EINVAL, "%s: bytes of an expert are %llu: a multiple of 4 is needed", op,
                      (unsigned long long)a->bytes[i]);
  return PS_OK;
}
static ps_work work_fetch(const void *args) {
  const ps__args_moe_fetch *a = args;
  const double rows = (double)a->n_tokens * a->n_used,
               most = rows < a->n_experts ? rows : a->n_experts;
  return ps__bytes_work(2 * most * (double)(a->bytes[0] + a->bytes[1]));
}
PS__OP(moe_fetch, PS_CLASS_ELEMENTWISE, check_fetch, .rate = PS__RATE_MEMORY, .work = work_fetch);

/* ---- the weighted gate ----------------------------------------------------------------------- */

static ps_status check_glu(const void *args, const char *op) {
  const ps__args_moe_glu *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, PS_MAX_EXPERTS, a->n_used, op));
  PS_TRY(ps__check_activation(a->activation, op));
  return ps__check_dt(a->dt, op);
}
PS__BIND_ROWS(bind_glu, ps__args_moe_glu, n_tokens)
static ps_work work_glu(const void *args) {
  const ps__args_moe_glu *a = args;
  return ps__bytes_work((double)a->n_tokens * a->n_used *
                        (3.0 * a->expert_dim * (double)ps__dt_bytes(a->dt) + 8));
}
static ps_work work_glu_bwd(const void *args) {
  const ps__args_moe_glu *a = args;
  return ps__bytes_work((double)a->n_tokens * a->n_used *
                        (6.0 * a->expert_dim * (double)ps__dt_bytes(a->dt) + 12));
}

PS__OP(moe_glu, PS_CLASS_ELEMENTWISE, check_glu, .rate = PS__RATE_MEMORY, .work = work_glu,
       .bind = bind_glu);
PS__OP(moe_glu_bwd, PS_CLASS_ELEMENTWISE, check_glu, .rate = PS__RATE_MEMORY, .work = work_glu_bwd,
       .bind = bind_glu);

/* ---- a factor an expert ---------------------------------------------------------------------- */

static ps_status check_factor(const void *args, const char *op) {
  const ps__args_moe_scale *a = args;
  PS_TRY(ps__check_experts(a->n_tokens, a->n_experts, a->n_used, op));
  return ps__check_dt(a->dt, op);
}
PS__BIND_GRADIENT(bind_factor, ps__args_moe_scale, n_tokens, accumulate)
static ps_work work_factor(const void *args) {
  const ps__args_moe_scale *a = args;
  return ps__bytes_work(10.0 * a->n_tokens * a->n_used);
}
static ps_work work_factor_bwd(const void *args) {
  const ps__args_moe_scale *a = args;
  return ps__bytes_work(14.0 * a->n_tokens * a->n_used);
}

PS__OP(moe_scale, PS_CLASS_ELEMENTWISE, check_factor, .rate = PS__RATE_MEMORY, .work = work_factor,
       .bind = bind_factor);
PS__OP(moe_scale_bwd, PS_CLASS_ELEMENTWISE, check_factor, .rate = PS__RATE_MEMORY,
       .work = work_factor_bwd, .bind = bind_factor);
