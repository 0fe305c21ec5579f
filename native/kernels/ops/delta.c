/* delta.c - rows of the gated delta rule and of what is around it. */
#include "kernels/ops/row.h"
#include <math.h>

static ps_status check_rows(uint32_t n_tokens, uint32_t row0, const char *op) {
  return n_tokens && (uint64_t)row0 + n_tokens <= INT32_MAX
             ? PS_OK
             : ps__fail(PS_EINVAL, "%s: rows %u to %llu of a group are none, or too many", op, row0,
                        (unsigned long long)row0 + n_tokens);
}

/* ---- convolution ----------------------------------------------------------------------------- */

static ps_status check_conv(const void *args, const char *op) {
  const ps__args_conv *a = args;
  PS_TRY(check_rows(a->n_tokens, a->row0, op));
  if (!a->channels || a->width < 2 || a->width > PS_MAX_CONV)
    return ps__fail(PS_EINVAL, "%s: %u channels, width %u: the width must be 2 to %d", op,
                    a->channels, a->width, PS_MAX_CONV);
  return ps__check_dt(a->dt, op);
}
static void bind_conv(void *args, const ps__chunk_shape *chunk) {
  ps__args_conv *a = args;
  a->n_tokens = chunk->n_tokens;
  a->row0 = chunk->row0;
}
static void bind_conv_bwd(void *args, const ps__chunk_shape *chunk) {
  ps__args_conv *a = args;
  bind_conv(args, chunk);
  a->accumulate_dw = !chunk->first_grad;
  a->accumulate_carry = !chunk->first_dkv;
}
static ps_work work_conv(const ps__args_conv *a, double tensors) {
  return ps__bytes_work(tensors * a->n_tokens * a->channels * (double)ps__dt_bytes(a->dt));
}
static ps_work work_conv_fwd(const void *args) { return work_conv(args, 2); }
static ps_work work_conv_bwd(const void *args) { return work_conv(args, 3); }

PS__BIND_ROWS(bind_conv_cached, ps__args_conv, n_tokens)
static uint64_t cache_of_conv(const void *args) {
  const ps__args_conv *a = args;
  return (uint64_t)(a->width - 1) * a->channels * ps__dt_bytes(a->dt);
}

PS__OP(conv_fwd, PS_CLASS_ELEMENTWISE, check_conv, .rate = PS__RATE_MEMORY, .work = work_conv_fwd,
       .in_generation = &ps__k_conv_cached, .bind = bind_conv);
PS__OP(conv_cached, PS_CLASS_ELEMENTWISE, check_conv, .rate = PS__RATE_MEMORY,
       .work = work_conv_fwd, .bind = bind_conv_cached, .cache_bytes = cache_of_conv);
PS__OP(conv_bwd, PS_CLASS_ELEMENTWISE, check_conv, .rate = PS__RATE_MEMORY, .work = work_conv_bwd,
       .bind = bind_conv_bwd, .scratch = {NULL, ps_scratch_conv_bwd});

/* ---- the delta rule -------------------------------------------------------------------------- */

static ps_status check_delta(const void *args, const char *op) {
  const ps__args_delta *a = args;
  PS_TRY(check_rows(a->n_tokens, a->row0, op));
  if (!a->n_key_heads || !a->n_value_heads || a->n_value_heads % a->n_key_heads || !a->key_dim ||
      !a->value_dim || a->key_dim > PS_MAX_DELTA_DIM || a->value_dim > PS_MAX_DELTA_DIM ||
      a->n_value_heads / a->n_key_heads > PS_MAX_DELTA_SHARE)
    return ps__fail(PS_EINVAL,
                    "%s: %u key heads of %u, %u value heads of %u is no valid shape: a head has at "
                    "most %d, a key head 1 to %d value heads",
                    op, a->n_key_heads, a->key_dim, a->n_value_heads, a->value_dim,
                    PS_MAX_DELTA_DIM, PS_MAX_DELTA_SHARE);
  return ps__check_dt(a->dt, op);
}
static void bind_delta(void *args, const ps__chunk_shape *chunk) {
  ps__args_delta *a = args;
  a->n_tokens = chunk->n_tokens;
  a->row0 = chunk->row0;
}
static void bind_delta_bwd(void *args, const ps__chunk_shape *chunk) {
  ps__args_delta *a = args;
  bind_delta(args, chunk);
  a->accumulate_dw = !chunk->first_grad;
  a->accumulate_carry = !chunk->first_dkv;
}
/* A row and value head: products of a vector and a state, 2 dk dv FLOPs each. Forward has three
 * (S^T k, k d^T, S^T q); backward eight, and forward's again but for S^T q. */
static ps_work work_delta(const ps__args_delta *a, double products, double model, double rows) {
  const double states = (double)a->n_tokens * a->n_value_heads * a->key_dim * a->value_dim * 2,
               width = 2.0 * a->n_key_heads * a->key_dim + 2.0 * a->n_value_heads * a->value_dim;
  return (ps_work){.flops = products * states,
                   .bytes = rows * a->n_tokens * width * (double)ps__dt_bytes(a->dt),
                   .model_flops = model * states};
}
static ps_work work_delta_fwd(const void *args) { return work_delta(args, 3, 3, 1); }
static ps_work work_delta_bwd(const void *args) { return work_delta(args, 10, 6, 2); }

PS__BIND_ROWS(bind_delta_cached, ps__args_delta, n_tokens)
static uint64_t cache_of_delta(const void *args) {
  const ps__args_delta *a = args;
  return sizeof(float) * (uint64_t)a->n_value_heads * a->key_dim * a->value_dim;
}
/* States are read and written once for a sequence, at most as many as there are rows. */
static ps_work work_delta_cached(const void *args) {
  const ps__args_delta *a = args;
  ps_work w = work_delta(a, 3, 3, 1);
  w.bytes += 2.0 * a->n_tokens * (double)cache_of_delta(args);
  return w;
}

PS__OP(delta_fwd, PS_CLASS_ATTENTION, check_delta, .rate = PS__RATE_DELTA_FWD,
       .work = work_delta_fwd, .in_generation = &ps__k_delta_cached, .bind = bind_delta,
       .scratch = {ps__cpu_scratch_delta_fwd, ps_scratch_delta_fwd});
PS__OP(delta_cached, PS_CLASS_ATTENTION, check_delta, .rate = PS__RATE_MEMORY,
       .work = work_delta_cached, .bind = bind_delta_cached,
       .scratch = {ps__cpu_scratch_delta_fwd, NULL}, .cache_bytes = cache_of_delta);
PS__OP(delta_bwd, PS_CLASS_ATTENTION, check_delta, .rate = PS__RATE_DELTA_BWD,
       .work = work_delta_bwd, .bind = bind_delta_bwd,
       .scratch = {ps__cpu_scratch_delta_bwd, ps_scratch_delta_bwd});

/* ---- the norm with a gate -------------------------------------------------------------------- */

static ps_status check_gated_norm(const void *args, const char *op) {
  const ps__args_gated_norm *a = args;
  if (!a->n_tokens || !a->n_heads || !a->head_dim || !(a->eps >= 0 && a->eps < INFINITY))
    return ps__fail(PS_EINVAL, "%s: %u rows, %u heads of %u, eps %g is no valid shape", op,
                    a->n_tokens, a->n_heads, a->head_dim, (double)a->eps);
  return ps__check_dt(a->dt, op);
}
PS__BIND_ROWS(bind_gated_norm, ps__args_gated_norm, n_tokens)
PS__BIND_GRADIENT(bind_gated_norm_bwd, ps__args_gated_norm, n_tokens, accumulate_dw)
static ps_work work_gated_norm(const ps__args_gated_norm *a, double tensors) {
  return ps__bytes_work(tensors * a->n_tokens * a->n_heads * a->head_dim *
                        (double)ps__dt_bytes(a->dt));
}
static ps_work work_gated_norm_fwd(const void *args) { return work_gated_norm(args, 3); }
static ps_work work_gated_norm_bwd(const void *args) { return work_gated_norm(args, 5); }

PS__OP(gated_norm_fwd, PS_CLASS_ELEMENTWISE, check_gated_norm, .rate = PS__RATE_MEMORY,
       .work = work_gated_norm_fwd, .bind = bind_gated_norm);
PS__OP(gated_norm_bwd, PS_CLASS_ELEMENTWISE, check_gated_norm, .rate = PS__RATE_MEMORY,
       .work = work_gated_norm_bwd, .bind = bind_gated_norm_bwd,
       .scratch = {ps__cpu_scratch_gated_norm_bwd, ps_scratch_gated_norm_bwd});

/* ---- columns by head, and gates -------------------------------------------------------------- */

static ps_status check_heads(const void *args, const char *op) {
  const ps__args_heads *a = args;
  if (!a->n_tokens || !a->n_groups || !a->n_first || a->n_first > PS_HEAD_PARTS || !a->width[0])
    return ps__fail(PS_EINVAL, "%s: %u rows, %u groups, %u parts of which first is no valid shape",
                    op, a->n_tokens, a->n_groups, a->n_first);
  return ps__check_dt(a->dt, op);
}
PS__BIND_ROWS(bind_heads, ps__args_heads, n_tokens)
static ps_work work_heads(const void *args) {
  const ps__args_heads *a = args;
  return ps__bytes_work(2.0 * a->n_tokens *
                        (double)(ps__heads_columns(a, 0, PS_HEAD_PARTS) + a->tail) *
                        (double)ps__dt_bytes(a->dt));
}
PS__OP(heads_split, PS_CLASS_ELEMENTWISE, check_heads, .rate = PS__RATE_MEMORY, .work = work_heads,
       .bind = bind_heads);
PS__OP(heads_join, PS_CLASS_ELEMENTWISE, check_heads, .rate = PS__RATE_MEMORY, .work = work_heads,
       .bind = bind_heads);

static ps_status check_sigmoid_gate(const void *args, const char *op) {
  const ps__args_sigmoid_gate *a = args;
  if (!a->n_tokens || !a->n_gates || !a->cols || a->cols % a->n_gates)
    return ps__fail(PS_EINVAL, "%s: %u rows of %u columns and %u gates is no valid shape", op,
                    a->n_tokens, a->cols, a->n_gates);
  return ps__check_dt(a->dt, op);
}
PS__BIND_ROWS(bind_sigmoid_gate, ps__args_sigmoid_gate, n_tokens)
static ps_work work_sigmoid_gate(const ps__args_sigmoid_gate *a, double tensors) {
  return ps__bytes_work(tensors * a->n_tokens * a->cols * (double)ps__dt_bytes(a->dt));
}
static ps_work work_sigmoid_gate_fwd(const void *args) { return work_sigmoid_gate(args, 3); }
static ps_work work_sigmoid_gate_bwd(const void *args) { return work_sigmoid_gate(args, 5); }
PS__OP(sigmoid_gate_fwd, PS_CLASS_ELEMENTWISE, check_sigmoid_gate, .rate = PS__RATE_MEMORY,
       .work = work_sigmoid_gate_fwd, .bind = bind_sigmoid_gate);
PS__OP(sigmoid_gate_bwd, PS_CLASS_ELEMENTWISE, check_sigmoid_gate, .rate = PS__RATE_MEMORY,
       .work = work_sigmoid_gate_bwd, .bind = bind_sigmoid_gate);
