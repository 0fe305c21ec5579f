/* embedding.c - rows of the table by token, and their gradient. */
#include "kernels/cpu/total.h"

typedef struct emb_job {
  const ps__args_embed *a;
  const ps__args_embed_host *host; /* embed_bwd_host's, else NULL */
  const int32_t *id;
  const char *in;        /* forward: table; backward: dx */
  char *out;             /* forward: out; backward: dtable */
  uint8_t *low;          /* embed_bwd_host's, of the total; NULL: none */
  const uint32_t *order; /* backward: tokens sorted by id, in order of t where ids are equal */
  uint32_t n_order;      /* all but those of pad */
  int64_t col_blocks;
} emb_job;

/* PS_EFORMAT with the first id that is out of range. */
static ps_status emb_check(const ps__args_embed *a, const int32_t *id) {
  for (uint32_t t = 0; t < a->n_tokens; t++)
    if (id[t] < 0 || (uint32_t)id[t] >= a->vocab)
      return ps__fail(PS_EFORMAT,
                      "id %d of token %u is not in the vocabulary of %u: tokenize the data with "
                      "the model's own tokenizer",
                      (int)id[t], t, a->vocab);
  return PS_OK;
}

PS_VEC void emb_scale_row(void *out, const void *row, uint32_t dt, size_t dim, float scale) {
  for (size_t i = 0; i < dim; i += PS_LANES)
    ps__v_write(out, dt, i, dim, ps__v_read(row, dt, i, dim, 0.0f) * scale);
}
PS_CLONES static void embed_scale_row(void *out, const void *row, uint32_t dt, size_t dim,
                                      float scale) {
  PS__BY_DTYPE(dt, DT, emb_scale_row(out, row, DT, dim, scale));
}

void ps__embed_row(void *out, const void *row, uint32_t dt, size_t dim, float scale) {
  if (scale == 1.0f)
    memcpy(out, row, dim * ps__dt_bytes(dt));
  else
    embed_scale_row(out, row, dt, dim, scale);
}

static void emb_fwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const emb_job *j = arg;
  const size_t bytes = j->a->dim * ps__dt_bytes(j->a->dt);
  for (int64_t t = first; t < end; t++)
    ps__embed_row(j->out + (size_t)t * bytes, j->in + (size_t)j->id[t] * bytes, j->a->dt, j->a->dim,
                  ps__embed_scale(j->a));
}

/* embed_fwd
 * math    out[t,:] = scale table[id[t],:], one rounding
 * shapes  id i32 [T], table [V,D], out [T,D] of dt
 * bytes   2*T*D*sizeof(dt).   errors  PS_EFORMAT: an id out of range, with its token; nothing is
 *         written then */
ps_status ps__cpu_embed_fwd(const ps_launch *l) {
  const ps__args_embed *a = l->args;
  PS_TRY(emb_check(a, l->ptr[0]));
  emb_job job = {.a = a, .id = l->ptr[0], .in = l->ptr[1], .out = l->ptr[2]};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(a->dim), emb_fwd_task, &job);
  return PS_OK;
}

/* Stable radix sort of tokens by id, 11 bits a pass, without those of pad. Gives j->order, which is
 * one of order and tmp. */
static void emb_sort(emb_job *j, uint32_t *order, uint32_t *tmp, uint32_t count[2048]) {
  const int32_t *id = j->id;
  uint32_t n = 0;
  for (uint32_t t = 0; t < j->a->n_tokens; t++)
    if (id[t] != j->a->pad)
      order[n++] = t;
  for (uint32_t shift = 0; shift < 32 && (j->a->vocab - 1) >> shift; shift += 11) {
    memset(count, 0, 2048 * sizeof *count);
    for (uint32_t t = 0; t < j->a->n_tokens; t++)
      count[((uint32_t)id[t] >> shift) & 2047] += id[t] != j->a->pad;
    for (uint32_t i = 0, at = 0; i < 2048; i++) {
      uint32_t c = count[i];
      count[i] = at;
      at += c;
    }
    for (uint32_t i = 0; i < n; i++)
      tmp[count[((uint32_t)id[order[i]] >> shift) & 2047]++] = order[i];
    uint32_t *swap = order;
    order = tmp;
    tmp = swap;
  }
  j->order = order;
  j->n_order = n;
}

/* rows and columns of dtable, a task: zeros in whole pages; columns that are summed at a time */
enum { EMB_ROWS = 64, EMB_COLS = 2048, EMB_SUM = 256 };

/* sum += the gradient of the token that is @i-th in order, n columns from c0 on. */
PS_VEC void emb_sum_token(float *sum, const emb_job *j, uint32_t i, size_t c0, size_t n,
                          uint32_t dt) {
  const char *dx = ps__celem(j->in, dt, (size_t)j->order[i] * j->a->dim + c0);
  for (size_t c = 0; c < n; c += PS_LANES)
    ps__v_write(sum, PS_F32, c, n,
                ps__v_read(sum, PS_F32, c, n, 0.0f) + ps__v_read(dx, dt, c, n, 0.0f));
}

PS_VEC void emb_add_row(const emb_job *j, uint32_t lo, uint32_t hi, size_t v, size_t c0, size_t n,
                        uint32_t dt) {
  float sum[EMB_SUM] = {0};
  const float scale = ps__embed_scale(j->a);
  size_t dim = j->a->dim;
  char *out = ps__elem(j->out, dt, v * dim + c0);
  for (uint32_t i = lo; i < hi; i++)
    emb_sum_token(sum, j, i, c0, n, dt);
  for (size_t c = 0; c < n; c += PS_LANES) {
    ps__v s = ps__v_read(sum, PS_F32, c, n, 0.0f) * scale;
    if (j->a->accumulate)
      s = ps__v_read(out, dt, c, n, 0.0f) + s;
    ps__v_write(out, dt, c, n, s);
  }
}
PS_CLONES static void embed_add_row(const emb_job *j, uint32_t lo, uint32_t hi, size_t v, size_t c0,
                                    size_t n) {
  PS__BY_DTYPE(j->a->dt, DT, emb_add_row(j, lo, hi, v, c0, n, DT));
}

/* Where the chunk of token t ends. */
static uint32_t emb_chunk_end(const ps__args_embed_host *a, uint32_t t) {
  const uint32_t of_round = t + a->skip_tokens,
                 group = of_round / a->group_tokens * a->group_tokens, at = of_round - group;
  return group + a->short_tokens +
         (at < a->short_tokens ? 0
                               : ((at - a->short_tokens) / a->chunk_tokens + 1) * a->chunk_tokens) -
         a->skip_tokens;
}

/* Each chunk's tokens are summed and rounded into the contribution. */
PS_VEC void emb_contribution(const emb_job *j, uint32_t lo, uint32_t hi, size_t c0, size_t n,
                             void *contribution, uint32_t dt) {
  float sum[EMB_SUM];
  const float scale = ps__embed_scale(j->a);
  for (uint32_t i = lo; i < hi;) {
    const uint32_t end = emb_chunk_end(j->host, j->order[i]);
    const bool first = i == lo;
    memset(sum, 0, sizeof sum);
    for (; i < hi && j->order[i] < end; i++)
      emb_sum_token(sum, j, i, c0, n, dt);
    for (size_t c = 0; c < n; c += PS_LANES) {
      ps__v s = ps__v_read(sum, PS_F32, c, n, 0.0f) * scale;
      if (!first)
        s = ps__v_read(contribution, dt, c, n, 0.0f) + s;
      ps__v_write(contribution, dt, c, n, s);
    }
  }
}
PS_CLONES static void embed_contribution(const emb_job *j, uint32_t lo, uint32_t hi, size_t c0,
                                         size_t n, void *contribution) {
  PS__BY_DTYPE(j->a->dt, DT, emb_contribution(j, lo, hi, c0, n, contribution, DT));
}

static void embed_total_row(const emb_job *j, uint32_t lo, uint32_t hi, size_t v, size_t c0,
                            size_t n) {
  float contribution[EMB_SUM]; /* of dt */
  const uint64_t at = (uint64_t)v * j->a->dim + c0;
  void *out = ps__elem(j->out, j->a->dt, at);
  embed_contribution(j, lo, hi, c0, n, contribution);
  if (!j->a->accumulate) {
    memcpy(out, contribution, n * ps__dt_bytes(j->a->dt));
    return;
  }
  const ps__total t = {.g = contribution,
                       .total = out,
                       .low = j->low ? j->low + at : NULL,
                       .first = at,
                       .dt = j->a->dt,
                       .mode = j->host->mode,
                       .index = j->host->index};
  ps__total_add(&t, 0, n);
}

/* First place in the sorted order whose id is >= v. */
static uint32_t emb_lower_bound(const emb_job *j, uint32_t v) {
  uint32_t lo = 0, hi = j->n_order;
  while (lo < hi) {
    uint32_t mid = lo + (hi - lo) / 2;
    if ((uint32_t)j->id[j->order[mid]] < v)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

static void emb_bwd_task(void *arg, int64_t task, uint32_t worker) {
  const emb_job *j = arg;
  uint32_t dim = j->a->dim, vocab = j->a->vocab, dt = j->a->dt;
  uint32_t v = (uint32_t)(task / j->col_blocks) * EMB_ROWS,
           v_end = vocab - v < EMB_ROWS ? vocab : v + EMB_ROWS;
  uint32_t c0 = (uint32_t)(task % j->col_blocks) * EMB_COLS,
           n = dim - c0 < EMB_COLS ? dim - c0 : EMB_COLS;
  uint32_t lo = emb_lower_bound(j, v);
  while (v < v_end) {
    uint32_t hi = lo, next = v_end;
    if (lo < j->n_order && (uint32_t)j->id[j->order[lo]] < v_end)
      next = (uint32_t)j->id[j->order[lo]];
    if (!j->a->accumulate)
      for (uint32_t r = v; r < next; r++)
        memset(ps__elem(j->out, dt, (size_t)r * dim + c0), 0, n * ps__dt_bytes(dt));
    if (j->low && !(j->host->mode & PS_LOW_READ))
      for (uint32_t r = v; r < next; r++)
        memset(j->low + (size_t)r * dim + c0, 0, n);
    if (next == v_end)
      return;
    while (hi < j->n_order && (uint32_t)j->id[j->order[hi]] == next)
      hi++;
    for (uint32_t c = 0; c < n; c += EMB_SUM)
      (j->host ? embed_total_row : embed_add_row)(j, lo, hi, next, c0 + c,
                                                  n - c < EMB_SUM ? n - c : EMB_SUM);
    lo = hi;
    v = next + 1;
  }
}

size_t ps__cpu_scratch_embed_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_embed *a = args;
  return ps__round_up((2 * (size_t)a->n_tokens + 2048) * sizeof(uint32_t), 64);
}

static ps_status emb_add(const ps_launch *l, const ps__args_embed *a,
                         const ps__args_embed_host *host) {
  const ps__cpu_exec *exec = l->exec;
  PS_TRY(emb_check(a, l->ptr[0]));
  emb_job job = {.a = a,
                 .host = host,
                 .id = l->ptr[0],
                 .in = l->ptr[1],
                 .out = l->ptr[2],
                 .low = l->n_ptr > 3 ? l->ptr[3] : NULL,
                 .col_blocks = (a->dim + EMB_COLS - 1) / EMB_COLS};
  uint32_t *scratch = ps__scratch(exec, 0);
  emb_sort(&job, scratch, scratch + a->n_tokens, scratch + 2 * (size_t)a->n_tokens);
  ps__pool_run(exec->pool, ((int64_t)a->vocab + EMB_ROWS - 1) / EMB_ROWS * job.col_blocks,
               emb_bwd_task, &job);
  return PS_OK;
}

/* embed_bwd
 * math    dtable[v,:] (+)= scale times the sum over t with id[t] = v, in order of t, of dx[t,:];
 *         fp32 sum and product, one rounding when added; tokens of pad add nothing
 * shapes  id i32 [T], dx [T,D], dtable [V,D] of dt
 * bytes   (T*D + V*D)*sizeof(dt); when accumulating (1 to 3)*T*D*sizeof(dt), since rows without a
 *         token are not touched
 * determinism  bitwise: tokens are sorted (stable) and one thread sums each element
 * errors  PS_EFORMAT: an id out of range, with its token. Nothing is written then. */
ps_status ps__cpu_embed_bwd(const ps_launch *l) { return emb_add(l, l->args, NULL); }

/* embed_bwd_host
 * math    each row with a token, but for that of pad:
 *         contribution = the chunks' fp32 sums in order of t times scale,
 *         chunk after chunk, rounded after each; total = contribution, or what accumulate makes of
 *         total and contribution
 * shapes  id i32 [T], dx [T,D], total [V,D] of dt, low u8 [V,D]
 * bytes   (2 to 3)*T*D*sizeof(dt). The first contribution of a step also zeroes the rows without a
 *         token, V*D*sizeof(dt); the second their low bytes, V*D. Rows with a token may have (1 to
 *         2)*T*D of low bytes.
 * determinism  bitwise: as embed_bwd
 * reference    embed_bwd and accumulate, the same bits (tests/test_ops_layers.py)
 * errors  PS_EFORMAT: an id out of range, with its token. Nothing is written then. */
ps_status ps__cpu_embed_bwd_host(const ps_launch *l) {
  const ps__args_embed_host *host = l->args;
  return emb_add(l, &host->rows, host);
}
