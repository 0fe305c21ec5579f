/* moe.c - the rows of the op table for experts: bind, work, scratch, functions (kernels/ops.h). */
#include "kernels/cpu/moe.h"

/* ---- the router ------------------------------------------------------------------------------ */

static ps_status moe_route(const ps_launch *l) {
  const ps__args_moe_route *a = l->args;
  PS_TRY(ps__check_moe(a->n_tokens, a->n_experts, a->n_used, "moe_route"));
  return ps__cpu_moe_route(l);
}
static void bind_route(void *args, const ps__chunk_shape *chunk) {
  ((ps__args_moe_route *)args)->n_tokens = chunk->n_tokens;
}
static ps_work work_route(const void *args) {
  const ps__args_moe_route *a = args;
  return ps__bytes_work(a->n_tokens * (4.0 * a->n_experts + 6.0 * a->n_used));
}
const ps_kernel ps__k_moe_route = {
    .name = "moe_route",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {moe_route, NULL},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_route, .bind = bind_route},
};

static ps_status moe_route_bwd(const ps_launch *l) {
  PS_TRY(ps__check_moe_route_bwd(l->args, "moe_route_bwd"));
  return ps__cpu_moe_route_bwd(l);
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
const ps_kernel ps__k_moe_route_bwd = {
    .name = "moe_route_bwd",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {moe_route_bwd, NULL},
    .info = &(
        const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_route_bwd, .bind = bind_route_bwd},
};

/* ---- rows ------------------------------------------------------------------------------------ */

static ps_status moe_index(const ps_launch *l) {
  const ps__args_moe_index *a = l->args;
  PS_TRY(ps__check_moe(a->n_tokens, a->n_experts, a->n_used, "moe_index"));
  return ps__cpu_moe_index(l);
}
static void bind_index(void *args, const ps__chunk_shape *chunk) {
  ((ps__args_moe_index *)args)->n_tokens = chunk->n_tokens;
}
static ps_work work_index(const void *args) {
  const ps__args_moe_index *a = args;
  return ps__bytes_work(12.0 * a->n_tokens * a->n_used + 4.0 * a->n_experts);
}
const ps_kernel ps__k_moe_index = {
    .name = "moe_index",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {moe_index, NULL},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_index, .bind = bind_index},
};

static ps_status moe_gather(const ps_launch *l) {
  PS_TRY(ps__check_moe_rows(l->args, "moe_gather"));
  return ps__cpu_moe_gather(l);
}
static ps_status moe_combine(const ps_launch *l) {
  PS_TRY(ps__check_moe_rows(l->args, "moe_combine"));
  return ps__cpu_moe_combine(l);
}
static void bind_rows(void *args, const ps__chunk_shape *chunk) {
  ((ps__args_moe_rows *)args)->n_tokens = chunk->n_tokens;
}
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
const ps_kernel ps__k_moe_gather = {
    .name = "moe_gather",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {moe_gather, NULL},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_gather, .bind = bind_rows},
};
const ps_kernel ps__k_moe_combine = {
    .name = "moe_combine",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {moe_combine, NULL},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_combine, .bind = bind_rows},
};

/* ---- products -------------------------------------------------------------------------------- */

static ps_status gemm_grouped(const ps_launch *l) {
  PS_TRY(ps__check_gemm_grouped(l->args, "gemm_grouped"));
  return ps__cpu_gemm_grouped(l);
}
static ps_status gemm_grouped_rows(const ps_launch *l) {
  const ps__args_gemm_grouped *a = l->args;
  PS_TRY(ps__check_gemm_grouped(a, "gemm_grouped_rows"));
  if (a->role != PS_GEMM_FORWARD)
    return ps__fail(PS_EINVAL, "gemm_grouped_rows: role is %u: 0 (forward) alone", a->role);
  return ps__cpu_gemm_grouped_rows(l);
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
static size_t scratch_grouped(const void *args, const ps__scratch_target *target) {
  return ps__cpu_gemm_tile_bytes(((const ps__args_gemm_grouped *)args)->dt);
}
const ps_kernel ps__k_gemm_grouped = {
    .name = "gemm_grouped",
    .op_class = PS_CLASS_GEMM,
    .fn = {gemm_grouped, NULL},
    .info = &(const ps__op_info){.rate = PS__RATE_GEMM_GROUPED,
                                 .in_generation = &ps__k_gemm_grouped_rows,
                                 .work = work_grouped,
                                 .bind = bind_grouped,
                                 .scratch = {scratch_grouped, NULL},
                                 .blas = true},
};
const ps_kernel ps__k_gemm_grouped_rows = {
    .name = "gemm_grouped_rows",
    .op_class = PS_CLASS_GEMM,
    .fn = {gemm_grouped_rows, NULL},
    .info = &(const ps__op_info){.rate = PS__RATE_GEMM_GROUPED,
                                 .work = work_grouped,
                                 .bind = bind_grouped},
};

/* ---- the weighted gate ----------------------------------------------------------------------- */

static ps_status moe_glu(const ps_launch *l) {
  PS_TRY(ps__check_moe_glu(l->args, "moe_glu"));
  return ps__cpu_moe_glu(l);
}
static ps_status moe_glu_bwd(const ps_launch *l) {
  PS_TRY(ps__check_moe_glu(l->args, "moe_glu_bwd"));
  return ps__cpu_moe_glu_bwd(l);
}
static void bind_glu(void *args, const ps__chunk_shape *chunk) {
  ((ps__args_moe_glu *)args)->n_tokens = chunk->n_tokens;
}
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
const ps_kernel ps__k_moe_glu = {
    .name = "moe_glu",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {moe_glu, NULL},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_glu, .bind = bind_glu},
};
const ps_kernel ps__k_moe_glu_bwd = {
    .name = "moe_glu_bwd",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {moe_glu_bwd, NULL},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_glu_bwd, .bind = bind_glu},
};
