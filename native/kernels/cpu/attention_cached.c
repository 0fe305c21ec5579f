/* attention_cached.c - attention of a step's rows against the keys and values that each sequence
 * has had so far: generation's attention.
 *
 * math    row i is position p = pos[i] of sequence s = sequence[i]. cache[s][p] = kv[i] for all
 *         rows first. Then row i sees the keys max(0, p + 1 - window) .. p of its sequence, with
 *         attention_fwd's scores, softmax and log-sum-exp. A row of position -1 is left out: its
 *         output and its log-sum-exp are 0.
 * shapes  q, o [T, heads*head_dim], kv [T, 2*kv_heads*head_dim], cache [sequences, sequence_rows,
 *         2*kv_heads*head_dim] in dt; lse [T, heads] fp32
 * bytes   the keys and values that a row sees once for each row; the heads of a group share them
 * determinism  bitwise; a row is a function of its own operands and its sequence's cache alone
 * reference    tests/test_op_cases.py */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include <math.h>

enum { CACHED_KEYS = 64 }; /* keys between two changes of the running maximum */

typedef struct cached_job {
  ps__args_attention a;
  const ps__cpu_exec *exec;
  const void *q, *kv;
  const int32_t *sequence, *pos;
  void *out, *cache;
  float *lse;
  float scale;
} cached_job;

static size_t padded(const ps__args_attention *a) { return ps__round_up(a->head_dim, PS_LANES); }
static uint32_t group_of(const ps__args_attention *a) { return a->n_heads / a->n_kv_heads; }

/* q and o of a group's heads, a row of keys or values, the scores of a block */
size_t ps__cpu_scratch_attention_cached(const void *args, const ps__scratch_target *target) {
  const ps__args_attention *a = args;
  if (!a->n_kv_heads)
    return 0; /* the launch refuses it */
  return (group_of(a) * (2 * padded(a) + CACHED_KEYS) + padded(a)) * sizeof(float);
}

/* Row @pos of sequence @sequence of the cache. */
static void *cache_at(const cached_job *j, int32_t sequence, int64_t pos) {
  const size_t width = 2 * (size_t)j->a.n_kv_heads * j->a.head_dim;
  return ps__elem(j->cache, j->a.dt, ((size_t)sequence * j->a.sequence_rows + (size_t)pos) * width);
}

static void append_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const cached_job *j = arg;
  const size_t bytes = 2 * (size_t)j->a.n_kv_heads * j->a.head_dim * ps__dt_bytes(j->a.dt);
  for (int64_t i = first; i < end; i++)
    if (j->pos[i] >= 0)
      memcpy(cache_at(j, j->sequence[i], j->pos[i]), (const char *)j->kv + (size_t)i * bytes,
             bytes);
}

PS_CLONES static float cached_dot(const float *a, const float *b, size_t n) {
  ps__v sum = ps__v_set(0.0f);
  for (size_t i = 0; i < n; i += PS_LANES)
    sum += ps__v_load(a + i) * ps__v_load(b + i);
  return ps__v_sum(sum);
}
PS_CLONES static void cached_add(float *o, const float *v, float by, size_t n) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_store(o + i, ps__v_load(o + i) + ps__v_load(v + i) * by);
}
PS_CLONES static void cached_scale(float *o, float by, size_t n) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_store(o + i, ps__v_load(o + i) * by);
}
/* s[0..n) become exp(s - the new maximum); returns what earlier sums are multiplied with. Lanes of
 * s past n are overwritten. */
PS_CLONES static float cached_softmax(float *s, size_t n, float *top, float *sum) {
  ps__v high = ps__v_set(*top), add = ps__v_set(0.0f);
  for (size_t i = n; i < CACHED_KEYS; i++)
    s[i] = -INFINITY;
  for (size_t i = 0; i < CACHED_KEYS; i += PS_LANES)
    high = ps__v_max(ps__v_load(s + i), high);
  const float m = ps__v_hmax(high), shrink = ps__expf(*top - m);
  for (size_t i = 0; i < CACHED_KEYS; i += PS_LANES) {
    const ps__v x = ps__v_load(s + i),
                p = ps__v_select(x > -INFINITY, ps__v_exp(x - m), ps__v_set(0.0f));
    ps__v_store(s + i, p);
    add += p;
  }
  *sum = *sum * shrink + ps__v_sum(add);
  *top = m;
  return shrink;
}

/* The @n keys from row @first on, for the @g heads of kv head @head. */
static void cached_block(const cached_job *j, int32_t sequence, int64_t first, size_t n,
                         uint32_t head, const float *q, float *o, float *row, float *s, float *top,
                         float *sum) {
  const ps__args_attention *a = &j->a;
  const size_t hp = padded(a), d = a->head_dim;
  const uint32_t g = group_of(a);
  for (size_t k = 0; k < n; k++) {
    const void *key = cache_at(j, sequence, first + (int64_t)k);
    ps__load_f32(row, ps__celem(key, a->dt, head * d), a->dt, d);
    for (uint32_t h = 0; h < g; h++) {
      const float x = cached_dot(q + h * hp, row, hp) * j->scale;
      s[h * CACHED_KEYS + k] = a->softcap > 0.0f ? a->softcap * ps__tanhf(x / a->softcap) : x;
    }
  }
  for (uint32_t h = 0; h < g; h++)
    cached_scale(o + h * hp, cached_softmax(s + h * CACHED_KEYS, n, &top[h], &sum[h]), hp);
  for (size_t k = 0; k < n; k++) {
    const void *key = cache_at(j, sequence, first + (int64_t)k);
    ps__load_f32(row, ps__celem(key, a->dt, (a->n_kv_heads + head) * d), a->dt, d);
    for (uint32_t h = 0; h < g; h++)
      cached_add(o + h * hp, row, s[h * CACHED_KEYS + k], hp);
  }
}

static void cached_task(void *arg, int64_t task, uint32_t worker) {
  const cached_job *j = arg;
  const ps__args_attention *a = &j->a;
  const size_t hp = padded(a), d = a->head_dim, i = (size_t)(task / a->n_kv_heads);
  const uint32_t g = group_of(a), head = (uint32_t)(task % a->n_kv_heads);
  const int64_t pos = j->pos[i], end = pos + 1,
                from = a->window && end > a->window ? end - a->window : 0;
  float *q = ps__scratch(j->exec, worker), *o = q + g * hp, *row = o + g * hp, *s = row + hp;
  float top[PS_CACHED_GROUP], sum[PS_CACHED_GROUP];
  memset(q, 0, (2 * g + 1) * hp * sizeof *q); /* columns past head_dim stay 0 */
  for (uint32_t h = 0; h < g; h++) {
    top[h] = -3.0e38f, sum[h] = 0.0f;
    ps__load_f32(q + h * hp, ps__celem(j->q, a->dt, (i * a->n_heads + head * g + h) * d), a->dt, d);
  }
  for (int64_t k = from; k < end; k += CACHED_KEYS)
    cached_block(j, j->sequence[i], k, (size_t)(end - k < CACHED_KEYS ? end - k : CACHED_KEYS),
                 head, q, o, row, s, top, sum);
  for (uint32_t h = 0; h < g; h++) {
    const size_t at = i * a->n_heads + head * g + h;
    if (pos >= 0)
      cached_scale(o + h * hp, 1.0f / sum[h], hp);
    ps__store_f32(ps__elem(j->out, a->dt, at * d), a->dt, o + h * hp, d);
    j->lse[at] = pos >= 0 ? top[h] + logf(sum[h]) : 0.0f;
  }
}

ps_status ps__cpu_attention_cached(const ps_launch *l) {
  const ps__args_attention *a = l->args;
  cached_job j = {.a = *a,
                  .exec = l->exec,
                  .q = l->ptr[0],
                  .kv = l->ptr[1],
                  .sequence = l->ptr[2],
                  .out = l->ptr[3],
                  .lse = l->ptr[4],
                  .pos = l->ptr[5],
                  .cache = l->ptr[6],
                  .scale = ps__attention_scale(a)};
  for (uint32_t i = 0; i < a->n_tokens; i++)
    if (j.pos[i] < -1 || j.pos[i] >= (int64_t)a->sequence_rows || j.sequence[i] < 0)
      return ps__fail(
          PS_EINVAL,
          "attention_cached: row %u is position %d of sequence %d, of a cache of %u rows", i,
          j.pos[i], j.sequence[i], a->sequence_rows);
  ps__cpu_rows(j.exec, a->n_tokens, 64, append_rows, &j);
  ps__pool_run(j.exec->pool, (int64_t)a->n_tokens * a->n_kv_heads, cached_task, &j);
  return PS_OK;
}
