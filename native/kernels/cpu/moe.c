/* moe.c - experts: the router, where its rows lie, their products, and the weighted gate. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/glu.h"
#include <math.h>

/* ---- the router ------------------------------------------------------------------------------ */

/* A logit as an integer of the same order: -0 is 0, and a NaN comes before all others. */
static inline int32_t route_key(float x) {
  int32_t bits;
  x += 0.0f;
  memcpy(&bits, &x, sizeof bits);
  return x != x ? INT32_MIN : bits >= 0 ? bits : bits ^ INT32_MAX;
}

/* Experts are chosen from every group where open is NULL. */
typedef struct route_groups {
  const bool *open;
  uint32_t each; /* experts of a group */
} route_groups;

/* The k largest of the groups that are open, by insertion into a list that is in order. */
static void route_choose(uint16_t *ids, const float *scores, uint32_t n_experts, uint32_t n_used,
                         route_groups groups) {
  int32_t key[PS_MAX_EXPERTS_USED];
  uint32_t n = 0;
  for (uint32_t e = 0; e < n_experts; e++) {
    const int32_t k = route_key(scores[e]);
    uint32_t at = n;
    if ((n == n_used && k <= key[n - 1]) || (groups.open && !groups.open[e / groups.each]))
      continue;
    if (n == n_used)
      at--;
    else
      n++;
    for (; at > 0 && k > key[at - 1]; at--) {
      key[at] = key[at - 1];
      ids[at] = ids[at - 1];
    }
    key[at] = k;
    ids[at] = (uint16_t)e;
  }
}

/* What a group of @n experts is worth: its best score, or the sum of its two best. */
static float route_worth(const float *scores, uint32_t n, bool of_two) {
  uint16_t best[2];
  route_choose(best, scores, n, of_two ? 2 : 1, (route_groups){0});
  return of_two ? scores[best[0]] + scores[best[1]] : scores[best[0]];
}

/* Which groups are open: the best of them. */
static void route_open(bool *open, const float *scores, const ps__args_moe_route *a) {
  const uint32_t each = a->n_experts / a->n_groups;
  float worth[PS_MAX_EXPERTS];
  for (uint32_t g = 0; g < a->n_groups; g++) {
    worth[g] = route_worth(scores + (size_t)g * each, each, a->sigmoid);
    open[g] = false;
  }
  for (uint32_t i = 0; i < a->n_groups_used; i++) {
    uint32_t best = a->n_groups;
    for (uint32_t g = 0; g < a->n_groups; g++)
      if (!open[g] && (best == a->n_groups || route_key(worth[g]) > route_key(worth[best])))
        best = g;
    open[best] = true;
  }
}

/* p[e] = exp(logits[e] - max) / sum, and the sum's logarithm with max added. Lanes past the end are
 * -inf, which exp turns to 0; p has room for them. */
PS_VEC float route_softmax(float *p, const float *logits, size_t n) {
  ps__v m = ps__v_set(-INFINITY), sum = ps__v_set(0.0f);
  for (size_t i = 0; i < n; i += PS_LANES)
    m = ps__v_max(ps__v_read(logits, PS_F32, i, n, -INFINITY), m);
  const float max = ps__v_hmax(m);
  for (size_t i = 0; i < n; i += PS_LANES) {
    const ps__v e = ps__v_exp(ps__v_read(logits, PS_F32, i, n, -INFINITY) - max);
    ps__v_put(p, PS_F32, i, e);
    sum += e;
  }
  const float all = ps__v_sum(sum);
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_put(p, PS_F32, i, ps__v_get(p, PS_F32, i) / all);
  return max + (float)log((double)all);
}
PS_CLONES static float moe_softmax(float *p, const float *logits, size_t n) {
  return route_softmax(p, logits, n);
}

/* sigmoid(x); 0 and 1 far out. */
static inline float route_sigmoid(float x) { return 1.0f / (1.0f + ps__expf(-x)); }

typedef struct route_job {
  const ps__args_moe_route *a;
  const float *logits;
  const void *bias;
  uint16_t *ids;
  float *weights;
} route_job;

/* p and p + bias; NaN in all of p where a logit is NaN or +inf, as in a softmax. */
static void route_sigmoids(float *p, float *choice, const float *logits, const float *bias,
                           uint32_t n) {
  float poison = 0;
  for (uint32_t e = 0; e < n; e++) {
    if (!(logits[e] < INFINITY))
      poison = NAN;
    p[e] = route_sigmoid(logits[e]);
    choice[e] = p[e] + bias[e];
  }
  for (uint32_t e = 0; e < n; e++)
    p[e] += poison;
}

static void route_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const route_job *j = arg;
  const uint32_t n = j->a->n_experts, k = j->a->n_used;
  float p[PS_MAX_EXPERTS], choice[PS_MAX_EXPERTS], bias[PS_MAX_EXPERTS] = {0};
  bool open[PS_MAX_EXPERTS];
  const float scale = ps__route_scale(j->a->scale);
  const bool sigmoid = j->a->sigmoid, groups = j->a->n_groups;
  if (j->bias)
    ps__load_f32(bias, j->bias, j->a->dt, n);
  for (int64_t t = first; t < end; t++) {
    const float *logits = j->logits + (size_t)t * n, *scores = sigmoid ? choice : logits;
    uint16_t *ids = j->ids + (size_t)t * k;
    float *w = j->weights + (size_t)t * k, sum = sigmoid ? 1e-20f : 0;
    if (sigmoid)
      route_sigmoids(p, choice, logits, bias, n);
    else
      moe_softmax(p, logits, n);
    if (groups)
      route_open(open, scores, j->a);
    route_choose(ids, scores, n, k,
                 (route_groups){groups ? open : NULL, groups ? n / j->a->n_groups : n});
    for (uint32_t i = 0; i < k; i++)
      sum += w[i] = p[ids[i]];
    for (uint32_t i = 0; i < k && j->a->renorm; i++)
      w[i] /= sum;
    for (uint32_t i = 0; i < k; i++)
      w[i] *= scale;
  }
}

/* moe_route
 * shapes  logits [T,E] fp32, ids [T,k] u16, weights [T,k] fp32; no aliasing
 * bytes   T*(4E + 6k).   determinism  bitwise: a row at a time, sums in the order of lanes */
ps_status ps__cpu_moe_route(const ps_launch *l) {
  const ps__args_moe_route *a = l->args;
  route_job job = {.a = a,
                   .logits = l->ptr[0],
                   .bias = a->has_bias ? l->ptr[3] : NULL,
                   .ids = l->ptr[1],
                   .weights = l->ptr[2]};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(4 * (size_t)a->n_experts), route_task, &job);
  return PS_OK;
}

typedef struct route_bwd_job {
  const ps__args_moe_route_bwd *a;
  const float *logits, *weights, *dweights;
  const uint16_t *ids;
  void *dlogits;
  float aux[PS_MAX_EXPERTS]; /* the auxiliary loss's part of dp */
} route_bwd_job;

/* g = p (dp - sum p dp + z). */
PS_VEC void route_grads(float *g, const float *p, const float *dp, size_t n, float z) {
  ps__v sum = ps__v_set(0.0f);
  for (size_t i = 0; i < n; i += PS_LANES)
    sum += ps__v_read(p, PS_F32, i, n, 0.0f) * ps__v_read(dp, PS_F32, i, n, 0.0f);
  const float less = ps__v_sum(sum) - z;
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(g, PS_F32, i, n,
                ps__v_read(p, PS_F32, i, n, 0.0f) * (ps__v_read(dp, PS_F32, i, n, 0.0f) - less));
}
PS_CLONES static void moe_route_grads(float *g, const float *p, const float *dp, size_t n,
                                      float z) {
  route_grads(g, p, dp, n, z);
}

/* Scores are sigmoids: of the experts that were chosen alone. */
static void route_sigmoid_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const route_bwd_job *j = arg;
  const ps__args_moe_route_bwd *a = j->a;
  const uint32_t n = a->n_experts, k = a->n_used;
  const float scale = ps__route_scale(a->scale);
  float p[PS_MAX_EXPERTS_USED], g[PS_MAX_EXPERTS];
  for (int64_t t = first; t < end; t++) {
    const uint16_t *ids = j->ids + (size_t)t * k;
    const float *w = j->weights + (size_t)t * k, *dw = j->dweights + (size_t)t * k;
    float less = 0, sum = 1e-20f;
    memset(g, 0, n * sizeof *g);
    for (uint32_t i = 0; i < k; i++) {
      p[i] = route_sigmoid(j->logits[(size_t)t * n + ids[i]]);
      sum += p[i];
      less += w[i] * dw[i];
    }
    for (uint32_t i = 0; i < k; i++) {
      const float dp = a->renorm ? (scale * dw[i] - less) / sum : scale * dw[i];
      g[ids[i]] = p[i] * (1.0f - p[i]) * dp;
    }
    ps__store_f32(ps__elem(j->dlogits, a->dt, (size_t)t * n), a->dt, g, n);
  }
}

static void route_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const route_bwd_job *j = arg;
  const ps__args_moe_route_bwd *a = j->a;
  const uint32_t n = a->n_experts, k = a->n_used;
  const float scale = ps__route_scale(a->scale);
  float p[PS_MAX_EXPERTS], dp[PS_MAX_EXPERTS], g[PS_MAX_EXPERTS];
  for (int64_t t = first; t < end; t++) {
    const uint16_t *ids = j->ids + (size_t)t * k;
    const float *w = j->weights + (size_t)t * k, *dw = j->dweights + (size_t)t * k;
    const float lse = moe_softmax(p, j->logits + (size_t)t * n, n);
    float less = 0;
    memcpy(dp, j->aux, n * sizeof *dp);
    for (uint32_t i = 0; i < k && !a->renorm; i++)
      dp[ids[i]] += scale * dw[i];
    for (uint32_t i = 0; i < k && a->renorm; i++)
      less += w[i] * dw[i] / scale;
    moe_route_grads(g, p, dp, n, a->z_loss > 0 ? 2 * a->z_loss * lse / (float)a->step_tokens : 0);
    for (uint32_t i = 0; i < k && a->renorm; i++)
      g[ids[i]] += w[i] * (dw[i] - less);
    ps__store_f32(ps__elem(j->dlogits, a->dt, (size_t)t * n), a->dt, g, n);
  }
}

/* moe_route_bwd
 * shapes  logits [T,E], weights and dweights [T,k] fp32, ids [T,k] u16, offsets [E+1], dlogits
 *         [T,E] of dt, counts [E] u64; no aliasing
 * bytes   T*((4 + dt)E + 10k).   determinism  bitwise: a row at a time; counts are integers */
ps_status ps__cpu_moe_route_bwd(const ps_launch *l) {
  const ps__args_moe_route_bwd *a = l->args;
  const int32_t *offsets = l->ptr[4];
  uint64_t *counts = a->count ? l->ptr[6] : NULL;
  route_bwd_job job = {.a = a,
                       .logits = l->ptr[0],
                       .ids = l->ptr[1],
                       .weights = l->ptr[2],
                       .dweights = l->ptr[3],
                       .dlogits = l->ptr[5]};
  for (uint32_t e = 0; e < a->n_experts; e++) {
    const int32_t n = offsets[e + 1] - offsets[e];
    if (a->aux > 0)
      job.aux[e] = (float)((double)a->aux * n / ((double)a->n_tokens * a->step_tokens));
    if (counts)
      counts[e] += (uint64_t)n;
  }
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(8 * (size_t)a->n_experts),
               a->sigmoid ? route_sigmoid_bwd_task : route_bwd_task, &job);
  return PS_OK;
}

/* ---- where rows lie -------------------------------------------------------------------------- */

/* moe_index
 * shapes  ids [T,k] u16, offsets [E+1], slot [T,k] i32; no aliasing
 * bytes   8*R.   determinism  integers; one thread */
ps_status ps__cpu_moe_index(const ps_launch *l) {
  const ps__args_moe_index *a = l->args;
  const size_t n = (size_t)a->n_tokens * a->n_used;
  const uint16_t *ids = l->ptr[0];
  int32_t *offsets = l->ptr[1], *slot = l->ptr[2], next[PS_MAX_EXPERTS];
  memset(offsets, 0, (a->n_experts + 1) * sizeof *offsets);
  for (size_t i = 0; i < n; i++)
    offsets[(ids[i] < a->n_experts ? ids[i] : 0) + 1]++;
  for (uint32_t e = 0; e < a->n_experts; e++) {
    next[e] = offsets[e];
    offsets[e + 1] += offsets[e];
  }
  for (size_t i = 0; i < n; i++)
    slot[i] = next[ids[i] < a->n_experts ? ids[i] : 0]++;
  return PS_OK;
}

typedef struct moe_rows_job {
  const ps__args_moe_rows *a;
  uint32_t dt;
  const char *from;
  const int32_t *at;
  char *to;
  const char *add;  /* what is added to the sum: the residual, or to itself; NULL: nothing */
  const char *bias; /* of each expert; NULL: none */
  const float *weights;
  const uint16_t *ids;
} moe_rows_job;

static void gather_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const moe_rows_job *j = arg;
  const size_t bytes = j->a->dim * ps__dt_bytes(j->dt), k = j->a->n_used;
  for (size_t t = (size_t)first; t < (size_t)end; t++)
    for (size_t c = 0; c < k; c++)
      memcpy(j->to + (size_t)j->at[t * k + c] * bytes, j->from + t * bytes, bytes);
}

/* moe_gather
 * shapes  x [T,D], xr [R,D] of dt, slot [T,k].   bytes  (T + R)*D*dt.   determinism  copies */
ps_status ps__cpu_moe_gather(const ps_launch *l) {
  const ps__args_moe_rows *a = l->args;
  moe_rows_job job = {.a = a, .dt = a->dt, .from = l->ptr[0], .at = l->ptr[1], .to = l->ptr[2]};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows((size_t)a->dim * a->n_used), gather_task, &job);
  return PS_OK;
}

PS_VEC void combine_rows(const moe_rows_job *j, int64_t first, int64_t end, uint32_t dt) {
  const size_t n = j->a->dim, bytes = n * ps__dt_bytes(dt), k = j->a->n_used;
  for (int64_t t = first; t < end; t++) {
    const int32_t *slot = j->at + (size_t)t * k;
    char *y = j->to + (size_t)t * bytes;
    for (size_t i = 0; i < n; i += PS_LANES) {
      ps__v sum = j->a->accumulate ? ps__v_read(y, dt, i, n, 0.0f) : ps__v_set(0.0f);
      for (size_t c = 0; c < k; c++)
        sum += ps__v_read(j->from + (size_t)slot[c] * bytes, dt, i, n, 0.0f);
      for (size_t c = (size_t)t * k; j->bias && c < ((size_t)t + 1) * k; c++)
        sum += ps__v_read(j->bias + j->ids[c] * bytes, dt, i, n, 0.0f) * j->weights[c];
      if (j->add)
        sum += ps__v_read(j->add + (size_t)t * bytes, dt, i, n, 0.0f);
      ps__v_write(y, dt, i, n, sum);
    }
  }
}
PS_CLONES static void combine_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const moe_rows_job *j = arg;
  PS__BY_DTYPE(j->dt, DT, combine_rows(j, first, end, DT));
}

/* moe_combine
 * shapes  z [R,D], y and residual [T,D] of dt, slot [T,k]; no aliasing
 * bytes   (k + 1)*T*D*dt and the addend.   determinism  bitwise: in the order of choices */
ps_status ps__cpu_moe_combine(const ps_launch *l) {
  const ps__args_moe_rows *a = l->args;
  moe_rows_job job = {.a = a,
                      .dt = a->dt,
                      .from = l->ptr[0],
                      .at = l->ptr[1],
                      .to = l->ptr[2],
                      .add = a->has_residual ? l->ptr[3] : NULL};
  void *const *after = l->ptr + 3 + a->has_residual;
  if (a->has_bias) {
    job.bias = after[0];
    job.weights = after[1];
    job.ids = after[2];
  }
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows((size_t)a->dim * a->n_used), combine_task,
               &job);
  return PS_OK;
}

/* ---- products -------------------------------------------------------------------------------- */

typedef struct grouped_job {
  const ps__args_gemm_grouped *a;
  const ps__cpu_exec *exec;
  const void *x, *w; /* in the order of the pointers */
  const int32_t *offsets;
  void *y;
  const uint32_t *slot_of;           /* where w has the experts, plus 1; NULL: in their order */
  int64_t first[PS_MAX_EXPERTS + 1]; /* tiles before those of an expert; the last: all */
} grouped_job;

/* The product of an expert with @rows rows. */
static ps__args_gemm expert_product(const ps__args_gemm_grouped *a, uint32_t rows) {
  ps__args_gemm g =
      a->role == PS_GEMM_FORWARD ? ps__gemm_args(rows, a->n_out, a->n_in, false, true, a->dt)
      : a->role == PS_GEMM_DGRAD ? ps__gemm_args(rows, a->n_in, a->n_out, false, false, a->dt)
                                 : ps__gemm_args(a->n_out, a->n_in, rows, true, false, a->dt);
  g.accumulate = (uint8_t)a->accumulate;
  return g;
}
static uint32_t expert_rows(const grouped_job *j, uint32_t e) {
  return (uint32_t)(j->offsets[e + 1] - j->offsets[e]);
}

static void grouped_task(void *arg, int64_t task, uint32_t worker) {
  const grouped_job *j = arg;
  const ps__args_gemm_grouped *a = j->a;
  uint32_t e = 0, past = a->n_experts;
  while (past - e > 1) { /* first[e] <= task < first[past] */
    const uint32_t mid = (e + past) / 2;
    *(j->first[mid] <= task ? &e : &past) = mid;
  }
  const uint32_t rows = expert_rows(j, e);
  const ps__args_gemm g = expert_product(a, rows);
  const size_t row0 = (size_t)j->offsets[e], matrix = (size_t)e * a->n_out * a->n_in;
  const bool dw = a->role == PS_GEMM_WGRAD;
  const uint32_t of_x = a->role == PS_GEMM_FORWARD ? a->n_in : a->n_out,
                 of_y = a->role == PS_GEMM_FORWARD ? a->n_out : a->n_in;
  const void *x = ps__celem(j->x, a->dt, row0 * of_x),
             *w = ps__celem(j->w, a->dt, dw ? row0 * a->n_in : matrix);
  void *y = ps__elem(j->y, a->dt, dw ? matrix : row0 * of_y);
  if (!rows)
    memset(y, 0, (size_t)a->n_out * a->n_in * ps__dt_bytes(a->dt));
  else if (dw)
    ps__cpu_gemm_tile(j->exec, &g, x, w, y, task - j->first[e], worker);
  else
    ps__cpu_experts_tile(j->exec, &g, x, w, y, task - j->first[e], worker);
}

size_t ps__cpu_scratch_gemm_grouped(const void *args, const ps__scratch_target *target) {
  const ps__args_gemm_grouped *a = args;
  return a->role == PS_GEMM_WGRAD ? ps__cpu_gemm_tile_bytes(a->dt) : ps__cpu_experts_tile_bytes();
}

/* gemm_grouped
 * shapes  x, dx [R,K], y, dy [R,N], W, dW [E,N,K] of dt, no gaps; offsets [E+1]; no aliasing
 * bytes   the operands once when tiles stay in cache; scratch: dW as gemm, else 208 KiB a worker
 * determinism  bitwise. Of y and dx a row depends on its own row and W alone, whatever rows other
 *              tokens have; dW's tiles follow from the expert's rows, each is one product of
 *              OpenBLAS */
ps_status ps__cpu_gemm_grouped(const ps_launch *l) {
  const ps__args_gemm_grouped *a = l->args;
  grouped_job job = {.a = a,
                     .exec = l->exec,
                     .x = l->ptr[0],
                     .w = l->ptr[1],
                     .offsets = l->ptr[2],
                     .y = l->ptr[3]};
  const bool dw = a->role == PS_GEMM_WGRAD;
  if (dw)
    PS_TRY(ps__cpu_blas_ready(ps__pool_size(job.exec->pool)));
  for (uint32_t e = 0; e < a->n_experts; e++) {
    const uint32_t rows = expert_rows(&job, e);
    const ps__args_gemm g = expert_product(a, rows);
    job.first[e + 1] = job.first[e] + (!rows ? dw && !a->accumulate
                                       : dw  ? ps__cpu_gemm_tiles(&g)
                                             : ps__cpu_experts_tiles(&g));
  }
  ps__pool_run(job.exec->pool, job.first[a->n_experts], grouped_task, &job);
  return PS_OK;
}

enum { GROUPED_COLS = 16 }; /* columns of y that a task has */

static void grouped_rows_task(void *arg, int64_t task, uint32_t worker) {
  const grouped_job *j = arg;
  const ps__args_gemm_grouped *a = j->a;
  const size_t c0 = (size_t)task * GROUPED_COLS;
  const uint32_t n = a->n_out - c0 < GROUPED_COLS ? a->n_out - (uint32_t)c0 : GROUPED_COLS;
  for (uint32_t e = 0; e < a->n_experts; e++) {
    if (j->slot_of && !j->slot_of[e])
      continue;
    const size_t at = j->slot_of ? j->slot_of[e] - 1 : e;
    for (int32_t r = j->offsets[e]; r < j->offsets[e + 1]; r++)
      ps__cpu_gemm_row(ps__elem(j->y, a->dt, (size_t)r * a->n_out + c0),
                       ps__celem(j->x, a->dt, (size_t)r * a->n_in),
                       ps__celem(j->w, a->dt, (at * a->n_out + c0) * a->n_in), n, a->n_in, a->dt);
  }
}

/* gemm_grouped_rows: a row at a time, with the bits of gemm_rows. */
ps_status ps__cpu_gemm_grouped_rows(const ps_launch *l) {
  const ps__args_gemm_grouped *a = l->args;
  grouped_job job = {.a = a, .x = l->ptr[0], .w = l->ptr[1], .offsets = l->ptr[2], .y = l->ptr[3]};
  ps__pool_run(((const ps__cpu_exec *)l->exec)->pool, (a->n_out + GROUPED_COLS - 1) / GROUPED_COLS,
               grouped_rows_task, &job);
  return PS_OK;
}

ps_status ps__cpu_gemm_grouped_slots(const ps_launch *l) {
  const ps__args_grouped_slots *a = l->args;
  grouped_job job = {.a = &a->product,
                     .x = l->ptr[0],
                     .w = l->ptr[1],
                     .offsets = l->ptr[2],
                     .y = l->ptr[3],
                     .slot_of = l->ptr[4]};
  ps__pool_run(((const ps__cpu_exec *)l->exec)->pool,
               (a->product.n_out + GROUPED_COLS - 1) / GROUPED_COLS, grouped_rows_task, &job);
  return PS_OK;
}

/* ---- experts on demand ----------------------------------------------------------------------- */

typedef struct fetch_job {
  const ps__args_moe_fetch *a;
  uint32_t *slot_of, *expert_of, *used, *missing, *launches, *n_missing;
  const char *from[2];
  char *to[2];
} fetch_job;

/* The slot of those not used by this launch that was used longest ago. */
static uint32_t oldest(const fetch_job *j) {
  uint32_t at = UINT32_MAX;
  for (uint32_t s = 0; s < j->a->n_slots; s++)
    if (j->used[s] != *j->launches && (at == UINT32_MAX || j->used[s] < j->used[at]))
      at = s;
  return at;
}

/* A part of the bytes of what is missing. */
static void fetch_task(void *arg, int64_t task, uint32_t worker) {
  const fetch_job *j = arg;
  const uint32_t e = j->missing[task / 2], part = task % 2;
  const uint64_t bytes = j->a->bytes[part];
  memcpy(j->to[part] + (j->slot_of[e] - 1) * bytes, j->from[part] + e * bytes, bytes);
}

/* moe_fetch
 * bytes   the missing experts, read and written.   determinism  integers; copies */
ps_status ps__cpu_moe_fetch(const ps_launch *l) {
  const ps__args_moe_fetch *a = l->args;
  const uint16_t *ids = l->ptr[0];
  const int32_t *pos = l->ptr[1];
  uint32_t *table = l->ptr[2];
  uint64_t *counts = l->ptr[3];
  fetch_job j = {.a = a,
                 .slot_of = table,
                 .expert_of = table + a->n_experts,
                 .from = {l->ptr[4], l->ptr[6]},
                 .to = {l->ptr[5], l->ptr[7]}};
  j.used = j.expert_of + a->n_slots;
  j.missing = j.used + a->n_slots;
  j.launches = j.missing + a->n_slots;
  j.n_missing = j.launches + 1;
  bool wanted[PS_MAX_EXPERTS] = {false};
  for (size_t i = 0; i < (size_t)a->n_tokens * a->n_used; i++)
    if (pos[i / a->n_used] >= 0)
      wanted[ids[i] < a->n_experts ? ids[i] : 0] = true;
  ++*j.launches;
  *j.n_missing = 0;
  for (uint32_t e = 0; e < a->n_experts; e++) {
    counts[0] += wanted[e];
    if (wanted[e] && j.slot_of[e])
      j.used[j.slot_of[e] - 1] = *j.launches;
  }
  for (uint32_t e = 0; e < a->n_experts; e++) {
    if (!wanted[e] || j.slot_of[e])
      continue;
    const uint32_t s = oldest(&j);
    if (j.expert_of[s])
      j.slot_of[j.expert_of[s] - 1] = 0;
    j.expert_of[s] = e + 1;
    j.slot_of[e] = s + 1;
    j.used[s] = *j.launches;
    j.missing[(*j.n_missing)++] = e;
  }
  counts[1] += *j.n_missing;
  ps__pool_run(((const ps__cpu_exec *)l->exec)->pool, 2ll * *j.n_missing, fetch_task, &j);
  return PS_OK;
}

/* ---- the weighted gate ----------------------------------------------------------------------- */

typedef struct moe_glu_job {
  size_t n; /* an expert's ffn dim */
  uint32_t dt, activation;
  char *gu, *s;
  const float *weights;
  const int32_t *slot;
  float *dweights;
} moe_glu_job;

PS_VEC void moe_glu_rows(const moe_glu_job *j, int64_t first, int64_t end, uint32_t dt,
                         uint32_t activation) {
  const size_t n = j->n, bytes = n * ps__dt_bytes(dt);
  for (int64_t c = first; c < end; c++) {
    const size_t r = (size_t)j->slot[c];
    const char *g = j->gu + 2 * r * bytes, *u = g + bytes;
    for (size_t i = 0; i < n; i += PS_LANES) {
      ps__v x = ps__v_read(g, dt, i, n, 0.0f), below;
      glu_below(&below, &x, activation);
      ps__v_write(j->s + r * bytes, dt, i, n,
                  x / below * ps__v_read(u, dt, i, n, 0.0f) * j->weights[c]);
    }
  }
}

PS_VEC void moe_glu_bwd_rows(const moe_glu_job *j, int64_t first, int64_t end, uint32_t dt,
                             uint32_t activation) {
  const size_t n = j->n, bytes = n * ps__dt_bytes(dt);
  for (int64_t c = first; c < end; c++) {
    const size_t r = (size_t)j->slot[c];
    char *g = j->gu + 2 * r * bytes, *u = g + bytes, *s = j->s + r * bytes;
    const float w = j->weights[c];
    ps__v sum = ps__v_set(0.0f);
    for (size_t i = 0; i < n; i += PS_LANES) {
      ps__v x = ps__v_read(g, dt, i, n, 0.0f), d = ps__v_read(s, dt, i, n, 0.0f),
            up = ps__v_read(u, dt, i, n, 0.0f), below, slope;
      glu_below(&below, &x, activation);
      glu_slope(&slope, &x, activation);
      const ps__v sig = 1.0f / below, y = x / below * up;
      sum += d * y;
      d *= w;
      ps__v_write(s, dt, i, n, y * w);
      ps__v_write(g, dt, i, n, d * up * sig * (1.0f + slope * (1.0f - sig)));
      ps__v_write(u, dt, i, n, d * (x * sig));
    }
    j->dweights[c] = ps__v_sum(sum);
  }
}

PS_CLONES static void moe_glu_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const moe_glu_job *j = arg;
  GLU_ROWS(moe_glu_rows, j, first, end);
}
PS_CLONES static void moe_glu_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const moe_glu_job *j = arg;
  GLU_ROWS(moe_glu_bwd_rows, j, first, end);
}

static ps_status glu_over(const ps_launch *l, moe_glu_job job, ps__rows_fn task) {
  const ps__args_moe_glu *a = l->args;
  job.n = a->expert_dim;
  job.dt = a->dt;
  job.activation = a->activation;
  ps__cpu_rows(l->exec, (int64_t)a->n_tokens * a->n_used, ps__block_rows(2 * job.n), task, &job);
  return PS_OK;
}

/* moe_glu
 * math    s = w act(g) u, as glu_fwd and then times w; fp32 inside, one rounding at the store
 * shapes  gu [R,2I], s [R,I] of dt, weights and slot [T,k]; no aliasing
 * bytes   3*R*I*dt.   determinism  bitwise: elementwise */
ps_status ps__cpu_moe_glu(const ps_launch *l) {
  return glu_over(
      l, (moe_glu_job){.gu = l->ptr[0], .weights = l->ptr[1], .slot = l->ptr[2], .s = l->ptr[3]},
      moe_glu_task);
}

/* moe_glu_bwd
 * math    as glu_bwd of w ds; dweights = sum ds act(g) u, in the order of lanes
 * shapes  ds [R,I], gu [R,2I] of dt, weights, dweights and slot [T,k]
 * bytes   6*R*I*dt.   determinism  bitwise: a row at a time */
ps_status ps__cpu_moe_glu_bwd(const ps_launch *l) {
  return glu_over(l,
                  (moe_glu_job){.s = l->ptr[0],
                                .gu = l->ptr[1],
                                .weights = l->ptr[2],
                                .slot = l->ptr[3],
                                .dweights = l->ptr[4]},
                  moe_glu_bwd_task);
}

/* ---- a factor an expert ---------------------------------------------------------------------- */

/* moe_scale
 * shapes  w, y and ids [T,k], scale [E] of dt.   bytes  10*T*k.   determinism  elementwise */
ps_status ps__cpu_moe_scale(const ps_launch *l) {
  const ps__args_moe_scale *a = l->args;
  const float *w = l->ptr[0];
  const uint16_t *ids = l->ptr[1];
  float *y = l->ptr[3];
  for (size_t i = 0; i < (size_t)a->n_tokens * a->n_used; i++)
    y[i] = w[i] * ps__load1_f32(l->ptr[2], a->dt, ids[i]);
  return PS_OK;
}

/* moe_scale_bwd
 * shapes  w, dy and ids [T,k], scale and dscale [E] of dt.   bytes  14*T*k
 * determinism  bitwise: an expert's choices in order, in fp64 */
ps_status ps__cpu_moe_scale_bwd(const ps_launch *l) {
  const ps__args_moe_scale *a = l->args;
  const float *w = l->ptr[0];
  const uint16_t *ids = l->ptr[1];
  float *dy = l->ptr[3];
  double sum[PS_MAX_EXPERTS] = {0};
  for (size_t i = 0; i < (size_t)a->n_tokens * a->n_used; i++) {
    sum[ids[i]] += (double)dy[i] * w[i];
    dy[i] *= ps__load1_f32(l->ptr[2], a->dt, ids[i]);
  }
  for (uint32_t e = 0; e < a->n_experts; e++)
    ps__store1_f32(l->ptr[4], a->dt, e,
                   (float)(sum[e] + (a->accumulate ? ps__load1_f32(l->ptr[4], a->dt, e) : 0)));
  return PS_OK;
}
