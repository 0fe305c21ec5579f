/* embedding.c - rows of the embedding's ops. */
#include "kernels/ops/row.h"
#include <math.h>

/* embed_bwd_host's arguments begin with these. */
static ps_status check_embed(const void *args, const char *op) {
  const ps__args_embed *a = args;
  if (!(a->scale >= 0.0f && a->scale < INFINITY))
    return ps__fail(PS_EINVAL, "%s: scale is %g: it must be positive and finite, or 0 for none", op,
                    (double)a->scale);
  PS_TRY(ps__check_dt(a->dt, op));
  if (a->pad < -1 || a->pad >= (int64_t)a->vocab)
    return ps__fail(PS_EINVAL, "%s: pad is %d: it must be below vocab, %u, or -1 for none", op,
                    (int)a->pad, a->vocab);
  return PS_OK;
}

static double row_bytes(const ps__args_embed *a) {
  return (double)a->n_tokens * a->dim * (double)ps__dt_bytes(a->dt);
}
static double table_bytes(const ps__args_embed *a) {
  return (double)a->vocab * a->dim * (double)ps__dt_bytes(a->dt);
}
PS__BIND_GRADIENT(bind_embed, ps__args_embed, n_tokens, accumulate)
static ps_work work_embed_fwd(const void *args) { return ps__bytes_work(2.0 * row_bytes(args)); }
static ps_work work_embed_bwd(const void *args) {
  const ps__args_embed *a = args;
  return ps__bytes_work(3.0 * row_bytes(a) + (a->accumulate ? 0 : table_bytes(a)));
}
/* Where every row is written or its low bytes are made, rows without a token count too. */
static ps_work work_embed_bwd_host(const void *args) {
  const ps__args_embed_host *a = args;
  const ps__args_embed *r = &a->rows;
  const bool low = a->mode & (PS_LOW_READ | PS_LOW_WRITE);
  const double once = !r->accumulate            ? table_bytes(r)
                      : a->mode == PS_LOW_WRITE ? (double)r->vocab * r->dim
                                                : 0;
  return ps__bytes_work(3.0 * row_bytes(r) + (low ? 2.0 * r->n_tokens * r->dim : 0) + once);
}

PS__OP(embed_fwd, PS_CLASS_ELEMENTWISE, check_embed, .rate = PS__RATE_MEMORY,
       .work = work_embed_fwd, .bind = bind_embed);
PS__OP(embed_bwd, PS_CLASS_ELEMENTWISE, check_embed, .rate = PS__RATE_MEMORY,
       .work = work_embed_bwd, .bind = bind_embed,
       .scratch = {ps__cpu_scratch_embed_bwd, ps_scratch_embed_bwd});
PS__HOST_OP(embed_bwd_host, check_embed, .rate = PS__RATE_ACCUMULATE, .work = work_embed_bwd_host,
            .scratch = {ps__cpu_scratch_embed_bwd, NULL});
