/* delta.c - the gated delta rule, forward and backward, row by row (Yang et al. 2024, arXiv
 * 2412.06464; Schlag et al. 2021, arXiv 2102.11174, have the rule without its decay).
 *
 * A key head with the value heads that share it is one thread's. Rows come in blocks of BLOCK. The
 * backward pass keeps the states with which blocks begin, and computes those inside a block again.
 * In scratch a head's rows have a length of whole lanes, with zeros at the end. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include <math.h>

enum { BLOCK = 64 };
static const float NORM_EPS = 1e-6f;

typedef struct delta_job {
  ps__args_delta a;
  uint32_t share;  /* value heads of a key head */
  size_t kp, vp;   /* dk, dv in whole lanes */
  size_t ld, n_ba; /* elements of a row of qkv, and of ba */
  const char *qkv, *ba, *a_log, *dt_bias, *d_o;
  const int32_t *doc_start; /* NULL: no document begins after group row 0 */
  const float *before;
  float *after, *carry;
  char *o, *dqkv, *dba, *da_log, *ddt_bias;
  const ps__cpu_exec *exec;
} delta_job;

/* A block's rows of one key head, then of one of its value heads; all in scratch. */
typedef struct block {
  float *q, *k;     /* [BLOCK,kp], normalized; q scaled too */
  float *dq, *dk;   /* [BLOCK,kp] */
  float *v, *r, *d; /* [BLOCK,vp]: v; S^T k before the update; beta (v - r) */
  float *o, *dv;    /* [BLOCK,vp]: o, in the backward pass its gradient */
  float norm_q[BLOCK], norm_k[BLOCK];
  float beta[BLOCK], decay[BLOCK]; /* decay: e^g, 0 where a document begins */
  int64_t first, n;
} block;

static size_t padded(size_t n) { return ps__round_up(n, PS_LANES); }
static size_t state_floats(const ps__args_delta *a) { return a->key_dim * padded(a->value_dim); }
static size_t block_floats(const ps__args_delta *a) {
  return BLOCK * (4 * padded(a->key_dim) + 5 * padded(a->value_dim));
}

static float *lay_block(block *b, const delta_job *j, float *at) {
  float **const keys[] = {&b->q, &b->k, &b->dq, &b->dk};
  float **const values[] = {&b->v, &b->r, &b->d, &b->o, &b->dv};
  for (size_t i = 0; i < 4; i++, at += BLOCK * j->kp)
    *keys[i] = at;
  for (size_t i = 0; i < 5; i++, at += BLOCK * j->vp)
    *values[i] = at;
  return at;
}

static void load_row(float *to, size_t padded_n, const void *row, uint32_t dt, size_t at,
                     size_t n) {
  ps__load_f32(to, ps__celem(row, dt, at), dt, n);
  memset(to + n, 0, (padded_n - n) * sizeof *to);
}

/* x[0..n) times @scale over its length; returns 1 over the length. */
PS_VEC float delta_normalize(float *x, size_t n, float scale) {
  ps__v sum = {0};
  for (size_t i = 0; i < n; i += PS_LANES)
    sum += ps__v_load(x + i) * ps__v_load(x + i);
  const float norm = 1.0f / sqrtf(ps__v_sum(sum) + NORM_EPS);
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_store(x + i, ps__v_load(x + i) * norm * scale);
  return norm;
}

static float query_scale(const delta_job *j) { return (float)(1 / sqrt((double)j->a.key_dim)); }

static const void *row_of(const delta_job *j, int64_t t) {
  return ps__celem(j->qkv, j->a.dt, (size_t)t * j->ld);
}

PS_CLONES static void delta_normalize_rows(const delta_job *j, block *b) {
  for (int64_t i = 0; i < b->n; i++) {
    b->norm_q[i] = delta_normalize(b->q + (size_t)i * j->kp, j->kp, query_scale(j));
    b->norm_k[i] = delta_normalize(b->k + (size_t)i * j->kp, j->kp, 1);
  }
}

static void load_keys(const delta_job *j, block *b, uint32_t head, int64_t first) {
  const size_t dk = j->a.key_dim, all = j->a.n_key_heads * dk;
  b->first = first;
  b->n = j->a.n_tokens - first < BLOCK ? j->a.n_tokens - first : BLOCK;
  for (int64_t i = 0; i < b->n; i++) {
    const void *row = row_of(j, first + i);
    load_row(b->q + (size_t)i * j->kp, j->kp, row, j->a.dt, head * dk, dk);
    load_row(b->k + (size_t)i * j->kp, j->kp, row, j->a.dt, all + head * dk, dk);
  }
  delta_normalize_rows(j, b);
}

/* beta and g of row @t and value head @head, in fp64: few, and g is summed over many rows. */
static void gates(const delta_job *j, int64_t t, uint32_t head, double *beta, double *slope,
                  double *g) {
  const size_t at = (size_t)t * j->n_ba + head;
  const double b = ps__load1_f32(j->ba, j->a.dt, at),
               x = (double)ps__load1_f32(j->ba, j->a.dt, at + j->a.n_value_heads) +
                   (double)ps__load1_f32(j->dt_bias, j->a.dt, head),
               rate = exp((double)ps__load1_f32(j->a_log, j->a.dt, head));
  *beta = 1 / (1 + exp(-b));
  *slope = -rate / (1 + exp(-x)); /* dg / da */
  *g = -rate * (x > 40 ? x : log1p(exp(x)));
}

static void load_values(const delta_job *j, block *b, uint32_t head) {
  const size_t dv = j->a.value_dim, at = 2 * (size_t)j->a.n_key_heads * j->a.key_dim + head * dv;
  for (int64_t i = 0; i < b->n; i++) {
    const int64_t t = b->first + i;
    double beta, slope, g;
    load_row(b->v + (size_t)i * j->vp, j->vp, row_of(j, t), j->a.dt, at, dv);
    gates(j, t, head, &beta, &slope, &g);
    b->beta[i] = (float)beta;
    b->decay[i] = j->doc_start && (uint32_t)j->doc_start[t] == j->a.row0 + t ? 0 : (float)exp(g);
  }
}

static void load_state(const delta_job *j, float *s, const float *from, uint32_t head) {
  const size_t dk = j->a.key_dim, dv = j->a.value_dim;
  for (size_t i = 0; i < dk; i++) {
    memset(s + i * j->vp, 0, j->vp * sizeof *s);
    if (from)
      memcpy(s + i * j->vp, from + ((size_t)head * dk + i) * dv, dv * sizeof *s);
  }
}
static void store_state(const delta_job *j, float *to, const float *s, uint32_t head) {
  const size_t dk = j->a.key_dim, dv = j->a.value_dim;
  for (size_t i = 0; i < dk; i++)
    memcpy(to + ((size_t)head * dk + i) * dv, s + i * j->vp, dv * sizeof *s);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Row @i of the block: next = e^g s + k d^T, and o where @o. s and next may be the same. */
PS_VEC void delta_row(const delta_job *j, block *b, int64_t i, const float *s, float *next,
                      bool o) {
  const size_t dk = j->a.key_dim, vp = j->vp;
  const float *q = b->q + (size_t)i * j->kp, *k = b->k + (size_t)i * j->kp;
  float *r = b->r + (size_t)i * vp, *d = b->d + (size_t)i * vp;
  for (size_t c = 0; c < vp; c += PS_LANES) {
    ps__v sum = {0}, out = {0};
    for (size_t x = 0; x < dk; x++) {
      const ps__v decayed = ps__v_load(s + x * vp + c) * b->decay[i];
      ps__v_store(next + x * vp + c, decayed);
      sum += decayed * k[x];
    }
    const ps__v delta = (ps__v_load(b->v + (size_t)i * vp + c) - sum) * b->beta[i];
    ps__v_store(r + c, sum);
    ps__v_store(d + c, delta);
    for (size_t x = 0; x < dk; x++) {
      const ps__v now = ps__v_load(next + x * vp + c) + delta * k[x];
      ps__v_store(next + x * vp + c, now);
      out += now * q[x];
    }
    if (o)
      ps__v_store(b->o + (size_t)i * vp + c, out);
  }
}

PS_CLONES static void delta_fwd_block(const delta_job *j, block *b, float *s) {
  for (int64_t i = 0; i < b->n; i++)
    delta_row(j, b, i, s, s, true);
}

static void fwd_head(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const delta_job *j = arg;
  const size_t dv = j->a.value_dim, ld = j->a.n_value_heads * dv, state = state_floats(&j->a);
  block b;
  float *s = lay_block(&b, j, ps__scratch(j->exec, worker));
  for (uint32_t key = (uint32_t)first; key < end; key++) {
    for (uint32_t h = 0; h < j->share; h++)
      load_state(j, s + h * state, j->a.row0 ? j->before : NULL, key * j->share + h);
    for (int64_t t = 0; t < j->a.n_tokens; t += BLOCK) {
      load_keys(j, &b, key, t);
      for (uint32_t h = 0; h < j->share; h++) {
        const uint32_t head = key * j->share + h;
        load_values(j, &b, head);
        delta_fwd_block(j, &b, s + h * state);
        for (int64_t i = 0; i < b.n; i++)
          ps__store_f32(ps__elem(j->o, j->a.dt, (size_t)(t + i) * ld + head * dv), j->a.dt,
                        b.o + (size_t)i * j->vp, dv);
      }
    }
    for (uint32_t h = 0; h < j->share; h++)
      store_state(j, j->after, s + h * state, key * j->share + h);
  }
}

static delta_job job_of(const ps_launch *l) {
  const ps__args_delta *a = l->args;
  return (delta_job){.a = *a,
                     .share = a->n_value_heads / a->n_key_heads,
                     .kp = padded(a->key_dim),
                     .vp = padded(a->value_dim),
                     .ld = 2 * (size_t)a->n_key_heads * a->key_dim +
                           (size_t)a->n_value_heads * a->value_dim,
                     .n_ba = 2 * (size_t)a->n_value_heads,
                     .qkv = l->ptr[0],
                     .ba = l->ptr[1],
                     .a_log = l->ptr[2],
                     .dt_bias = l->ptr[3],
                     .doc_start = l->ptr[4],
                     .before = l->ptr[5],
                     .exec = l->exec};
}

size_t ps__cpu_scratch_delta_fwd(const void *args, const ps__scratch_target *target) {
  const ps__args_delta *a = args;
  const size_t states = a->n_value_heads / a->n_key_heads * state_floats(a);
  return ps__round_up((block_floats(a) + states) * sizeof(float), 64);
}

/* delta_fwd
 * math    of each value head, row by row: S <- e^g S, r = S^T k, d = beta (v - r), S <- S + k d^T,
 *         o = S^T q; fp32 inside, one rounding of o at the store
 * shapes  qkv [T,2 nk dk + nv dv], ba [T,2 nv], o [T,nv dv] of dt; states f32 [nv,dk,dv]
 * flops   6*T*nv*dk*dv; scratch of a worker: 64 rows of a head, and a key head's states
 * determinism  bitwise: sums over dk are in order, lanes are values' elements */
ps_status ps__cpu_delta_fwd(const ps_launch *l) {
  delta_job j = job_of(l);
  PS_TRY(ps__cpu_check_documents(j.doc_start, j.a.n_tokens, j.a.row0, "delta_fwd"));
  j.o = l->ptr[6];
  j.after = l->ptr[7];
  ps__cpu_rows(l->exec, j.a.n_key_heads, 1, fwd_head, &j);
  return PS_OK;
}

/* ---- of several sequences -------------------------------------------------------------------- */

typedef struct delta_cached_job {
  delta_job all; /* of all rows */
  const int32_t *sequence, *pos;
  float *cache;
} delta_cached_job;

/* A row that begins a sequence's rows of the call takes them all, of one key head. */
static void delta_cached_task(void *arg, int64_t task, uint32_t worker) {
  const delta_cached_job *j = arg;
  const ps__args_delta *a = &j->all.a;
  const int64_t t = task / a->n_key_heads, head = task % a->n_key_heads;
  const size_t bytes = ps__dt_bytes(a->dt), values = (size_t)a->n_value_heads * a->value_dim;
  delta_job of = j->all;
  of.o += (size_t)t * values * bytes;
  if (j->pos[t] < 0 && head == 0)
    memset(of.o, 0, values * bytes);
  if (j->pos[t] < 0 || ps__cpu_row_continues(j->sequence, j->pos, t))
    return;
  of.a.row0 = (uint32_t)j->pos[t];
  of.a.n_tokens = 1;
  while (t + of.a.n_tokens < a->n_tokens &&
         ps__cpu_row_continues(j->sequence, j->pos, t + of.a.n_tokens))
    of.a.n_tokens++;
  of.qkv += (size_t)t * of.ld * bytes;
  of.ba += (size_t)t * of.n_ba * bytes;
  of.before = of.after = j->cache + (size_t)j->sequence[t] * values * a->key_dim;
  fwd_head(&of, head, head + 1, worker);
}

/* delta_cached
 * math    delta_fwd's of each sequence's rows, from the state that its cache has and back to it
 * shapes  as delta_fwd; cache f32 [sequences,nv,dk,dv]
 * flops   6*T*nv*dk*dv; bytes: the state of each sequence twice; scratch as delta_fwd
 * determinism  bitwise, with delta_fwd's bits however rows are cut in calls */
ps_status ps__cpu_delta_cached(const ps_launch *l) {
  const ps__args_delta *a = l->args;
  delta_cached_job j = {
      .all = job_of(l), .sequence = l->ptr[4], .pos = l->ptr[6], .cache = l->ptr[7]};
  PS_TRY(ps__cpu_check_rows_of_sequences(j.sequence, j.pos, a->n_tokens, "delta_cached"));
  j.all.doc_start = NULL;
  j.all.o = l->ptr[5];
  ps__pool_run(j.all.exec->pool, (int64_t)a->n_tokens * a->n_key_heads, delta_cached_task, &j);
  return PS_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Row @i, from the state's gradient @ds after the row to that before it. @s: the state before the
 * row, @now: after it. dq and dk of the row are added to; d_beta and d_decay (times e^g) are
 * written. */
PS_VEC void delta_bwd_row(const delta_job *j, block *b, int64_t i, const float *s, const float *now,
                          float *ds, float *d_beta, float *d_g) {
  const size_t dk = j->a.key_dim, vp = j->vp, at = (size_t)i * vp;
  const float *q = b->q + (size_t)i * j->kp, *k = b->k + (size_t)i * j->kp;
  float *dq = b->dq + (size_t)i * j->kp, *dkey = b->dk + (size_t)i * j->kp;
  const float decay = b->decay[i], beta = b->beta[i];
  ps__v beta_sum = {0}, g_sum = {0};
  for (size_t c = 0; c < vp; c += PS_LANES) { /* through o = S^T q and S = S' + k d^T */
    const ps__v d_o = ps__v_load(b->o + at + c);
    ps__v dd = {0};
    for (size_t x = 0; x < dk; x++) {
      const ps__v d = ps__v_load(ds + x * vp + c) + d_o * q[x];
      ps__v_store(ds + x * vp + c, d);
      dd += d * k[x];
    }
    beta_sum += dd * (ps__v_load(b->v + at + c) - ps__v_load(b->r + at + c));
    ps__v_store(b->dv + at + c, dd * beta); /* of v; that of r is its negative */
  }
  for (size_t x = 0; x < dk; x++) {
    ps__v q_sum = {0}, k_sum = {0};
    for (size_t c = 0; c < vp; c += PS_LANES) {
      const ps__v old = ps__v_load(s + x * vp + c) * decay, dr = -ps__v_load(b->dv + at + c);
      ps__v d = ps__v_load(ds + x * vp + c);
      q_sum += ps__v_load(now + x * vp + c) * ps__v_load(b->o + at + c);
      k_sum += d * ps__v_load(b->d + at + c) + old * dr;
      d += dr * k[x];
      g_sum += d * old;
      ps__v_store(ds + x * vp + c, d * decay);
    }
    dq[x] += ps__v_sum(q_sum);
    dkey[x] += ps__v_sum(k_sum);
  }
  *d_beta = ps__v_sum(beta_sum);
  *d_g = ps__v_sum(g_sum);
}

typedef struct gate_grads {
  float beta[BLOCK], g[BLOCK];
} gate_grads;

/* @states: [BLOCK+1] states, the first of which is there. */
PS_CLONES static void delta_bwd_block(const delta_job *j, block *b, float *states, float *ds,
                                      gate_grads *grads) {
  const size_t state = j->a.key_dim * j->vp;
  for (int64_t i = 0; i < b->n; i++)
    delta_row(j, b, i, states + (size_t)i * state, states + (size_t)(i + 1) * state, false);
  for (int64_t i = b->n; i-- > 0;)
    delta_bwd_row(j, b, i, states + (size_t)i * state, states + (size_t)(i + 1) * state, ds,
                  &grads->beta[i], &grads->g[i]);
}

/* dx = norm (dy scale - y (y . dy) / scale), y = x norm scale; in place of dy. */
PS_VEC void delta_normalize_bwd(float *dy, const float *y, size_t n, float norm, float scale) {
  ps__v sum = {0};
  for (size_t i = 0; i < n; i += PS_LANES)
    sum += ps__v_load(y + i) * ps__v_load(dy + i);
  const float dot = ps__v_sum(sum) / scale;
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_store(dy + i, (ps__v_load(dy + i) * scale - ps__v_load(y + i) * dot) * norm);
}
PS_CLONES static void delta_normalize_bwd_rows(const delta_job *j, block *b) {
  for (int64_t i = 0; i < b->n; i++) {
    const size_t at = (size_t)i * j->kp;
    delta_normalize_bwd(b->dq + at, b->q + at, j->kp, b->norm_q[i], query_scale(j));
    delta_normalize_bwd(b->dk + at, b->k + at, j->kp, b->norm_k[i], 1);
  }
}

static void store_keys(const delta_job *j, block *b, uint32_t head) {
  const size_t dk = j->a.key_dim, all = j->a.n_key_heads * dk;
  delta_normalize_bwd_rows(j, b);
  for (int64_t i = 0; i < b->n; i++) {
    char *row = ps__elem(j->dqkv, j->a.dt, (size_t)(b->first + i) * j->ld);
    ps__store_f32(ps__elem(row, j->a.dt, head * dk), j->a.dt, b->dq + (size_t)i * j->kp, dk);
    ps__store_f32(ps__elem(row, j->a.dt, all + head * dk), j->a.dt, b->dk + (size_t)i * j->kp, dk);
  }
}

/* @sums: of da_log and ddt_bias of the head. */
static void store_values(const delta_job *j, const block *b, uint32_t head, const gate_grads *grads,
                         double sums[2]) {
  const size_t dv = j->a.value_dim, at = 2 * (size_t)j->a.n_key_heads * j->a.key_dim + head * dv;
  for (int64_t i = b->n; i-- > 0;) {
    const int64_t t = b->first + i;
    double beta, slope, g;
    char *row = ps__elem(j->dqkv, j->a.dt, (size_t)t * j->ld);
    ps__store_f32(ps__elem(row, j->a.dt, at), j->a.dt, b->dv + (size_t)i * j->vp, dv);
    gates(j, t, head, &beta, &slope, &g);
    const double db = (double)grads->beta[i] * beta * (1 - beta), da = (double)grads->g[i] * slope;
    const size_t ba = (size_t)t * j->n_ba + head;
    ps__store1_f32(j->dba, j->a.dt, ba, (float)db);
    ps__store1_f32(j->dba, j->a.dt, ba + j->a.n_value_heads, (float)da);
    sums[0] += (double)grads->g[i] * g;
    sums[1] += da;
  }
}

static void add_weight(const delta_job *j, char *dw, uint32_t head, double sum) {
  const double old = j->a.accumulate_dw ? (double)ps__load1_f32(dw, j->a.dt, head) : 0;
  ps__store1_f32(dw, j->a.dt, head, (float)(old + sum));
}

static size_t n_blocks(const ps__args_delta *a) { return (a->n_tokens + BLOCK - 1) / BLOCK; }

/* The states with which the blocks of value head @h of the key head begin. */
static void keep_states(const delta_job *j, block *b, uint32_t key, float *kept) {
  const size_t state = state_floats(&j->a), of_head = n_blocks(&j->a) * state;
  for (uint32_t h = 0; h < j->share; h++)
    load_state(j, kept + h * of_head, j->a.row0 ? j->before : NULL, key * j->share + h);
  for (size_t i = 0; i + 1 < n_blocks(&j->a); i++) {
    load_keys(j, b, key, (int64_t)i * BLOCK);
    for (uint32_t h = 0; h < j->share; h++) {
      float *s = kept + h * of_head + i * state;
      load_values(j, b, key * j->share + h);
      memcpy(s + state, s, state * sizeof *s);
      delta_fwd_block(j, b, s + state);
    }
  }
}

static void bwd_head(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const delta_job *j = arg;
  const size_t dv = j->a.value_dim, state = state_floats(&j->a), blocks = n_blocks(&j->a);
  block b;
  gate_grads grads;
  float *states = lay_block(&b, j, ps__scratch(j->exec, worker)),
        *ds = states + (BLOCK + 1) * state, *kept = ds + j->share * state;
  for (uint32_t key = (uint32_t)first; key < end; key++) {
    double sums[PS_MAX_DELTA_SHARE][2];
    keep_states(j, &b, key, kept);
    for (uint32_t h = 0; h < j->share; h++)
      load_state(j, ds + h * state, j->a.accumulate_carry ? j->carry : NULL, key * j->share + h);
    memset(sums, 0, sizeof sums);
    for (size_t i = blocks; i-- > 0;) {
      load_keys(j, &b, key, (int64_t)i * BLOCK);
      memset(b.dq, 0, 2 * BLOCK * j->kp * sizeof *b.dq);
      for (uint32_t h = 0; h < j->share; h++) {
        const uint32_t head = key * j->share + h;
        load_values(j, &b, head);
        for (int64_t t = 0; t < b.n; t++)
          load_row(b.o + (size_t)t * j->vp, j->vp, j->d_o, j->a.dt,
                   ((size_t)(b.first + t) * j->a.n_value_heads + head) * dv, dv);
        memcpy(states, kept + (h * blocks + i) * state, state * sizeof *states);
        delta_bwd_block(j, &b, states, ds + h * state, &grads);
        store_values(j, &b, head, &grads, sums[h]);
      }
      store_keys(j, &b, key);
    }
    for (uint32_t h = 0; h < j->share; h++) {
      const uint32_t head = key * j->share + h;
      store_state(j, j->carry, ds + h * state, head);
      add_weight(j, j->da_log, head, sums[h][0]);
      add_weight(j, j->ddt_bias, head, sums[h][1]);
    }
  }
}

/* States of a block's rows, the gradients of a key head's states, and the states of all blocks. */
size_t ps__cpu_scratch_delta_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_delta *a = args;
  const size_t share = a->n_value_heads / a->n_key_heads, state = state_floats(a);
  return ps__round_up(
      (block_floats(a) + (BLOCK + 1 + share + share * n_blocks(a)) * state) * sizeof(float), 64);
}

/* delta_bwd
 * math    with dS the gradient of the state after a row: dS += q do^T, dq = S do, dd = dS^T k, dk =
 *         dS d; dbeta = dd . (v - r), dv = beta dd, dr = -dv; dS += k dr^T, dk += e^g S_old dr; dg
 *         = <dS, e^g S_old>, dS <- e^g dS; then through sigmoid, softplus and the norms of q and k
 * shapes  as delta_fwd
 * flops   20*T*nv*dk*dv, 6 of them the states again; scratch of a worker: 65 states, and one for
 *         each block of 64 rows and value head of a key head
 * determinism  bitwise: a key head is one thread's; weights' gradients are summed in fp64, from the
 *              last row to the first */
ps_status ps__cpu_delta_bwd(const ps_launch *l) {
  delta_job j = job_of(l);
  PS_TRY(ps__cpu_check_documents(j.doc_start, j.a.n_tokens, j.a.row0, "delta_bwd"));
  j.d_o = l->ptr[6];
  j.carry = l->ptr[7];
  j.dqkv = l->ptr[8];
  j.dba = l->ptr[9];
  j.da_log = l->ptr[10];
  j.ddt_bias = l->ptr[11];
  ps__cpu_rows(l->exec, j.a.n_key_heads, 1, bwd_head, &j);
  return PS_OK;
}
