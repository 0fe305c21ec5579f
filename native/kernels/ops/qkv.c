/* qkv.c - rows of the split of the fused q, k, v product. */
#include "kernels/ops/row.h"
#include <math.h>

static ps_status check_qkv(const void *args, const char *op) {
  const ps__args_qkv *a = args;
  if (!a->n_heads || (!a->n_kv_heads && a->qk_norm == PS_QK_NORM_ROW))
    return ps__fail(PS_EINVAL,
                    "%s: n_heads is %u, n_kv_heads %u: at least 1 of the first, and with a norm "
                    "over rows of both",
                    op, a->n_heads, a->n_kv_heads);
  if (!a->head_dim || a->head_dim % 2)
    return ps__fail(PS_EINVAL, "%s: head_dim is %u: it must be even and positive", op, a->head_dim);
  if (a->rotary_dim % 2 || a->rotary_dim > a->head_dim || a->rotary_dim > 2 * PS_ROPE_PAIRS)
    return ps__fail(PS_EINVAL, "%s: rotary_dim is %u: it must be even and at most %u", op,
                    a->rotary_dim,
                    a->head_dim < 2 * PS_ROPE_PAIRS ? a->head_dim : 2 * PS_ROPE_PAIRS);
  if (a->rotary_dim && !(a->attention_factor > 0.0f && a->attention_factor < INFINITY))
    return ps__fail(PS_EINVAL, "%s: attention_factor is %g: it must be positive and finite", op,
                    (double)a->attention_factor);
  if (a->qk_norm > PS_QK_NORM_LATE)
    return ps__fail(PS_EINVAL, "%s: qk_norm is %u: at most %d", op, a->qk_norm, PS_QK_NORM_LATE);
  if (!(a->position_beta >= 0.0f && a->position_beta <= 1e6f) ||
      (a->position_beta > 0.0f && !a->position_original))
    return ps__fail(PS_EINVAL,
                    "%s: position_beta is %g and position_original %u: 0 to 1e6, and above 0 with "
                    "the first",
                    op, (double)a->position_beta, a->position_original);
  if (a->qk_norm == PS_QK_NORM_ROW && !ps__qkv_is_plain(a))
    return ps__fail(PS_EINVAL,
                    "%s: interleaved is %u, position_beta %g and whole_head %u: they must be 0 "
                    "with a norm over rows",
                    op, a->interleaved, (double)a->position_beta, a->whole_head);
  if ((a->value_norm && a->qk_norm != PS_QK_NORM_HEAD) || (a->shared_keys && !a->value_norm) ||
      (a->whole_head && a->interleaved))
    return ps__fail(PS_EINVAL,
                    "%s: value_norm is %u, shared_keys %u, qk_norm %u, whole_head %u and "
                    "interleaved %u: the first needs a norm over heads, the second the first, and "
                    "the last two exclude each other",
                    op, a->value_norm, a->shared_keys, a->qk_norm, a->whole_head, a->interleaved);
  if (!(a->norm_offset > -INFINITY && a->norm_offset < INFINITY))
    return ps__fail(PS_EINVAL, "%s: norm_offset is %g: it must be finite", op,
                    (double)a->norm_offset);
  return ps__check_dt(a->dt, op);
}

/* Bytes of the rows of qkv, once. */
static double row_bytes(const ps__args_qkv *a) {
  return (double)a->n_tokens * ps__qkv_elements(a) * (double)ps__dt_bytes(a->dt);
}
PS__BIND_ROWS(bind_qkv_split_fwd, ps__args_qkv, n_tokens)
static ps_work work_qkv_split_fwd(const void *args) {
  return ps__bytes_work(2.0 * row_bytes(args));
}
PS__OP(qkv_split_fwd, PS_CLASS_ELEMENTWISE, check_qkv, .rate = PS__RATE_MEMORY,
       .work = work_qkv_split_fwd, .bind = bind_qkv_split_fwd,
       .scratch = {ps__cpu_scratch_qkv_split_fwd, NULL});

PS__BIND_GRADIENT(bind_qkv_split_bwd, ps__args_qkv, n_tokens, accumulate_dw)
static ps_work work_qkv_split_bwd(const void *args) {
  return ps__bytes_work(3.0 * row_bytes(args));
}
PS__OP(qkv_split_bwd, PS_CLASS_ELEMENTWISE, check_qkv, .rate = PS__RATE_MEMORY,
       .work = work_qkv_split_bwd, .bind = bind_qkv_split_bwd,
       .scratch = {ps__cpu_scratch_qkv_split_bwd, ps_scratch_qkv_split_bwd});
