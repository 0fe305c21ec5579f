/* attention.c - rows of attention over a group, and of attention against a cache. */
#include "kernels/ops/row.h"
#include <math.h>

static ps_status check_scores(const ps__args_attention *a, const char *op) {
  if (!(a->scale >= 0.0f && a->scale < INFINITY))
    return ps__fail(PS_EINVAL, "%s: scale is %g: it must be positive and finite, or 0", op,
                    (double)a->scale);
  if (!(a->softcap >= 0.0f && a->softcap < INFINITY))
    return ps__fail(PS_EINVAL, "%s: softcap is %g: it must be positive and finite, or 0 for none",
                    op, (double)a->softcap);
  return PS_OK;
}
static bool heads_fit(const ps__args_attention *a) {
  return a->n_tokens && a->head_dim && a->n_kv_heads && a->n_heads &&
         a->n_heads % a->n_kv_heads == 0 && a->dt < PS_N_DTYPES;
}
static ps_status check_attention(const void *args, const char *op) {
  const ps__args_attention *a = args;
  PS_TRY(check_scores(a, op));
  if (!heads_fit(a) || a->value_dim > a->head_dim)
    return ps__fail(PS_EINVAL,
                    "%s: %u rows, %u heads, %u kv heads, head_dim %u, dtype %u is no valid shape",
                    op, a->n_tokens, a->n_heads, a->n_kv_heads, a->head_dim, a->dt);
  if ((uint64_t)a->row0 + a->n_tokens > INT32_MAX - 128) /* two tiles past the end */
    return ps__fail(PS_EINVAL, "%s: a group of %llu rows is too long", op,
                    (unsigned long long)a->row0 + a->n_tokens);
  return PS_OK;
}

static void bind_attention(void *args, const ps__chunk_shape *chunk) {
  ps__args_attention *a = args;
  a->n_tokens = chunk->n_tokens;
  a->row0 = chunk->row0;
  a->document_rows = chunk->document_rows;
}
static void bind_attention_bwd(void *args, const ps__chunk_shape *chunk) {
  bind_attention(args, chunk);
  ((ps__args_attention *)args)->accumulate_dkv = !chunk->first_dkv;
}

/* Pairs of the first @n rows of a sequence, each with @window keys at most. */
static double pairs_in_window(double n, double window) {
  return n <= window ? 0.5 * n * n : window * (n - 0.5 * window);
}
/* (Query, key) pairs under the causal mask, counted as area: n^2/2 a sequence of n rows. */
static double pairs(const ps__args_attention *a) {
  const double n = a->n_tokens;
  if (a->window) {
    const bool packed = a->sequence_rows && a->sequence_rows < a->n_tokens;
    const double s = a->sequence_rows, w = a->window, to = a->row0 + n;
    return packed ? n / s * pairs_in_window(s, w)
                  : pairs_in_window(to, w) - pairs_in_window(a->row0, w);
  }
  return a->sequence_rows && a->sequence_rows < a->n_tokens ? 0.5 * n * a->sequence_rows
                                                            : n * a->row0 + 0.5 * n * n;
}
/* A product takes 2 FLOP a pair and element of a head. Forward has two products. Backward has five;
 * the one that computes the scores again is not model work. Half of the others go over values, and
 * of those padding is no model work. */
static ps_work work_of(const ps__args_attention *a, double flops, double model_flops, double rows) {
  const double width = (double)a->n_heads * a->head_dim,
               value = a->value_dim ? (double)a->n_heads * a->value_dim : width;
  return (ps_work){.flops = pairs(a) * width * flops,
                   .bytes = a->n_tokens * width * (double)ps__dt_bytes(a->dt) * rows,
                   .model_flops = pairs(a) * 0.5 * (width + value) * model_flops};
}
static ps_work work_attention_fwd(const void *args) { return work_of(args, 4.0, 4.0, 2.0); }
static ps_work work_attention_bwd(const void *args) { return work_of(args, 10.0, 8.0, 5.0); }

#ifdef PS_CUDA
static ps_status cuda_prepare_fwd(const void *args, void *exec, size_t *scratch_bytes) {
  PS_TRY(check_attention(args, "attention_fwd"));
  return ps__cuda_prepare_attention_fwd(args, exec, scratch_bytes);
}
static ps_status cuda_prepare_bwd(const void *args, void *exec, size_t *scratch_bytes) {
  PS_TRY(check_attention(args, "attention_bwd"));
  return ps__cuda_prepare_attention_bwd(args, exec, scratch_bytes);
}
#endif

PS__OP(attention_fwd, PS_CLASS_ATTENTION, check_attention, .rate = PS__RATE_ATTENTION_FWD,
       .in_generation = &ps__k_attention_cached, .work = work_attention_fwd, .bind = bind_attention,
       .scratch = {ps__cpu_scratch_attention_fwd, ps_scratch_attention_fwd},
       .prepare = PS__CUDA_OF(prepare_fwd));
PS__OP(attention_bwd, PS_CLASS_ATTENTION, check_attention, .rate = PS__RATE_ATTENTION_BWD,
       .work = work_attention_bwd, .bind = bind_attention_bwd,
       .scratch = {ps__cpu_scratch_attention_bwd, ps_scratch_attention_bwd},
       .prepare = PS__CUDA_OF(prepare_bwd));

/* ---- against a cache ------------------------------------------------------------------------- */

static ps_status check_attention_cached(const void *args, const char *op) {
  const ps__args_attention *a = args;
  PS_TRY(check_scores(a, op));
  if (!heads_fit(a) || a->n_heads / a->n_kv_heads > PS_CACHED_GROUP || !a->sequence_rows ||
      a->sequence_rows > INT32_MAX)
    return ps__fail(PS_EINVAL,
                    "%s: %u rows, %u heads, %u kv heads, head_dim %u, dtype %u, %u rows of cache "
                    "is no valid shape",
                    op, a->n_tokens, a->n_heads, a->n_kv_heads, a->head_dim, a->dt,
                    a->sequence_rows);
  return PS_OK;
}
PS__BIND_ROWS(bind_attention_cached, ps__args_attention, n_tokens)
/* A row sees half of the cache, on average over a sequence. */
static ps_work work_attention_cached(const void *args) {
  const ps__args_attention *a = args;
  const double keys =
                   a->window && a->window < a->sequence_rows ? a->window : a->sequence_rows / 2.0,
               seen = a->n_tokens * keys, flops = 4.0 * seen * a->n_heads * a->head_dim;
  return (ps_work){.flops = flops,
                   .bytes = 2.0 * seen * a->n_kv_heads * a->head_dim * (double)ps__dt_bytes(a->dt),
                   .model_flops = flops};
}

static uint64_t cache_of_attention(const void *args) {
  const ps__args_attention *a = args;
  return 2ull * a->sequence_rows * a->n_kv_heads * a->head_dim * ps__dt_bytes(a->dt);
}

PS__OP(attention_cached, PS_CLASS_ATTENTION, check_attention_cached, .rate = PS__RATE_MEMORY,
       .work = work_attention_cached, .bind = bind_attention_cached,
       .scratch = {ps__cpu_scratch_attention_cached, ps_scratch_attention_cached},
       .cache_bytes = cache_of_attention);

/* ---- sinks ----------------------------------------------------------------------------------- */

static ps_status check_sink(const void *args, const char *op) {
  const ps__args_sink *a = args;
  PS_TRY(ps__check_dt(a->dt, op));
  return a->n_heads && a->head_dim ? PS_OK
                                   : ps__fail(PS_EINVAL, "%s: %u heads of %u: neither may be 0", op,
                                              a->n_heads, a->head_dim);
}
PS__BIND_GRADIENT(bind_sink, ps__args_sink, n_tokens, accumulate)
static ps_work work_sink(const void *args) {
  const ps__args_sink *a = args;
  return ps__bytes_work((double)a->n_tokens * a->n_heads *
                        (2.0 * a->head_dim * (double)ps__dt_bytes(a->dt) + 8));
}

PS__OP(attention_sink, PS_CLASS_ATTENTION, check_sink, .rate = PS__RATE_MEMORY, .work = work_sink,
       .bind = bind_sink);
PS__OP(attention_sink_bwd, PS_CLASS_ATTENTION, check_sink, .rate = PS__RATE_MEMORY,
       .work = work_sink, .bind = bind_sink, .scratch = {NULL, ps_scratch_sink_bwd});
