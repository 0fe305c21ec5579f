/* moe_bias.c - experts with biases, and the gate that clamps. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"

/* ---- logits ---------------------------------------------------------------------------------- */

typedef struct add_job {
  const ps__args_add_bias *a;
  float *x;
  const void *b;
} add_job;

PS_CLONES static void bias_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const add_job *j = arg;
  const size_t n = j->a->cols;
  for (int64_t r = first; r < end; r++) {
    float *x = j->x + (size_t)r * n;
    for (size_t i = 0; i < n; i += PS_LANES)
      ps__v_write(x, PS_F32, i, n,
                  ps__v_read(x, PS_F32, i, n, 0.0f) + ps__v_read(j->b, j->a->dt, i, n, 0.0f));
  }
}

/* add_bias
 * shapes  x [rows,cols] fp32, b [cols] of dt.   bytes  8*rows*cols.   determinism  elementwise */
ps_status ps__cpu_add_bias(const ps_launch *l) {
  const ps__args_add_bias *a = l->args;
  add_job job = {.a = a, .x = l->ptr[0], .b = l->ptr[1]};
  ps__cpu_rows(l->exec, a->rows, ps__block_rows(a->cols), bias_task, &job);
  return PS_OK;
}

/* ---- the gate -------------------------------------------------------------------------------- */

enum { GATE_BLOCK = 64 /* elements of s, a multiple of PS_LANES */ };

typedef struct clamp_job {
  const ps__args_moe_clamp_glu *a;
  char *gu, *s;
  const char *bias;
  const uint16_t *ids;
  const int32_t *slot;
  const float *weights;
  float *dweights;
} clamp_job;

/* Of n elements: gate and up with their biases, apart; zeros past the end. */
static void gate_load(float *g, float *u, const char *gu, const char *bias, size_t n, uint32_t dt) {
  float x[2 * GATE_BLOCK], b[2 * GATE_BLOCK];
  ps__load_f32(x, gu, dt, 2 * n);
  ps__load_f32(b, bias, dt, 2 * n);
  for (size_t i = 0; i < n; i++) {
    g[i] = x[2 * i] + b[2 * i];
    u[i] = x[2 * i + 1] + b[2 * i + 1];
  }
  memset(g + n, 0, (GATE_BLOCK - n) * sizeof *g);
  memset(u + n, 0, (GATE_BLOCK - n) * sizeof *u);
}

/* s = (u + 1) g sigmoid(alpha g); with d not NULL, d * ds/dg and d * ds/du in the place of g and u.
 * NaN stays NaN. */
PS_VEC void gate_block(float *s, float *g, float *u, const float *d, float alpha, float limit) {
  const ps__v top = ps__v_set(limit), bottom = ps__v_set(-limit);
  for (size_t i = 0; i < GATE_BLOCK; i += PS_LANES) {
    const ps__v g0 = ps__v_load(g + i), u0 = ps__v_load(u + i);
    const ps__v x = ps__v_select(g0 > top, top, g0);
    ps__v up = ps__v_select(u0 > top, top, u0);
    up = ps__v_select(up < bottom, bottom, up) + 1.0f;
    const ps__v sig = 1.0f / (1.0f + ps__v_exp(x * -alpha)), act = x * sig;
    ps__v_store(s + i, act * up);
    if (!d)
      continue;
    const ps__v by = ps__v_load(d + i), zero = ps__v_set(0.0f),
                dg = by * up * sig * (1.0f + x * alpha * (1.0f - sig)), du = by * act;
    ps__v_store(g + i, ps__v_select(g0 > top, zero, dg));
    ps__v_store(u + i, ps__v_select((u0 > top) | (u0 < bottom), zero, du));
  }
}
PS_CLONES static void clamp_gate(float *s, float *g, float *u, const float *d, float alpha,
                                 float limit) {
  gate_block(s, g, u, d, alpha, limit);
}

static void clamp_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const clamp_job *j = arg;
  const ps__args_moe_clamp_glu *a = j->a;
  float g[GATE_BLOCK], u[GATE_BLOCK], s[GATE_BLOCK];
  for (int64_t c = first; c < end; c++) {
    const size_t row = (size_t)j->slot[c] * a->expert_dim, of = (size_t)j->ids[c] * a->expert_dim;
    for (size_t i = 0; i < a->expert_dim; i += GATE_BLOCK) {
      const size_t n = a->expert_dim - i < GATE_BLOCK ? a->expert_dim - i : GATE_BLOCK;
      gate_load(g, u, ps__elem(j->gu, a->dt, 2 * (row + i)),
                ps__celem(j->bias, a->dt, 2 * (of + i)), n, a->dt);
      clamp_gate(s, g, u, NULL, a->alpha, a->limit);
      for (size_t k = 0; k < n; k++)
        s[k] *= j->weights[c];
      ps__store_f32(ps__elem(j->s, a->dt, row + i), a->dt, s, n);
    }
  }
}

static void clamp_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const clamp_job *j = arg;
  const ps__args_moe_clamp_glu *a = j->a;
  float g[GATE_BLOCK], u[GATE_BLOCK], s[GATE_BLOCK], d[GATE_BLOCK] = {0}, both[2 * GATE_BLOCK];
  for (int64_t c = first; c < end; c++) {
    const size_t row = (size_t)j->slot[c] * a->expert_dim, of = (size_t)j->ids[c] * a->expert_dim;
    const float w = j->weights[c];
    double dot = 0;
    for (size_t i = 0; i < a->expert_dim; i += GATE_BLOCK) {
      const size_t n = a->expert_dim - i < GATE_BLOCK ? a->expert_dim - i : GATE_BLOCK;
      void *gu = ps__elem(j->gu, a->dt, 2 * (row + i)), *ds = ps__elem(j->s, a->dt, row + i);
      gate_load(g, u, gu, ps__celem(j->bias, a->dt, 2 * (of + i)), n, a->dt);
      ps__load_f32(d, ds, a->dt, n);
      clamp_gate(s, g, u, d, a->alpha, a->limit);
      for (size_t k = 0; k < n; k++) {
        dot += (double)d[k] * s[k];
        both[2 * k] = w * g[k];
        both[2 * k + 1] = w * u[k];
        s[k] *= w;
      }
      ps__store_f32(ds, a->dt, s, n);
      ps__store_f32(gu, a->dt, both, 2 * n);
    }
    j->dweights[c] = (float)dot;
  }
}

static ps_status clamp_over(const ps_launch *l, clamp_job job, ps__rows_fn task) {
  const ps__args_moe_clamp_glu *a = l->args;
  job.a = a;
  ps__cpu_rows(l->exec, (int64_t)a->n_tokens * a->n_used, ps__block_rows(2 * (size_t)a->expert_dim),
               task, &job);
  return PS_OK;
}

/* moe_clamp_glu
 * shapes  gu [R,2I], bias [E,2I], s [R,I] of dt, ids, weights and slot [T,k]; no aliasing
 * bytes   3*R*I*dt.   determinism  bitwise: elementwise */
ps_status ps__cpu_moe_clamp_glu(const ps_launch *l) {
  return clamp_over(l,
                    (clamp_job){.gu = l->ptr[0],
                                .bias = l->ptr[1],
                                .ids = l->ptr[2],
                                .weights = l->ptr[3],
                                .slot = l->ptr[4],
                                .s = l->ptr[5]},
                    clamp_task);
}

/* moe_clamp_glu_bwd
 * shapes  ds [R,I], gu [R,2I], bias [E,2I] of dt, ids, weights, slot and dweights [T,k]
 * bytes   6*R*I*dt.   determinism  bitwise: a row at a time, its sum in order in fp64 */
ps_status ps__cpu_moe_clamp_glu_bwd(const ps_launch *l) {
  return clamp_over(l,
                    (clamp_job){.s = l->ptr[0],
                                .gu = l->ptr[1],
                                .bias = l->ptr[2],
                                .ids = l->ptr[3],
                                .weights = l->ptr[4],
                                .slot = l->ptr[5],
                                .dweights = l->ptr[6]},
                    clamp_bwd_task);
}

/* ---- gradients of biases and weights --------------------------------------------------------- */

typedef struct bias_job {
  const ps__args_moe_bias *a;
  const char *x, *bias;
  const uint16_t *ids;
  const int32_t *slot, *offsets;
  const float *weights;
  float *dweights;
  void *db;
} bias_job;

static void dot_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const bias_job *j = arg;
  const size_t bytes = j->a->cols * ps__dt_bytes(j->a->dt), k = j->a->n_used;
  for (size_t c = (size_t)first * k; c < (size_t)end * k; c++)
    j->dweights[c] +=
        ps__cpu_dot(j->x + c / k * bytes, j->bias + j->ids[c] * bytes, j->a->cols, j->a->dt);
}

/* moe_bias_dot
 * shapes  dy [T,cols], bias [E,cols] of dt, ids and dweights [T,k]
 * bytes   (1 + k)*T*cols*dt, the bias from cache.   determinism  bitwise: in the order of lanes */
ps_status ps__cpu_moe_bias_dot(const ps_launch *l) {
  const ps__args_moe_bias *a = l->args;
  bias_job job = {
      .a = a, .x = l->ptr[0], .bias = l->ptr[1], .ids = l->ptr[2], .dweights = l->ptr[3]};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows((size_t)a->cols * a->n_used), dot_task, &job);
  return PS_OK;
}

enum { SUM_COLS = 256 /* columns of a task */ };

PS_VEC void sum_row(float *sum, const char *x, size_t n, float w, uint32_t dt) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(sum, PS_F32, i, n,
                ps__v_read(sum, PS_F32, i, n, 0.0f) + ps__v_read(x, dt, i, n, 0.0f) * w);
}
PS_CLONES static void moe_bias_sum_row(float *sum, const char *x, size_t n, float w, uint32_t dt) {
  PS__BY_DTYPE(dt, DT, sum_row(sum, x, n, w, DT));
}

/* Some columns of an expert. */
static void sum_task(void *arg, int64_t task, uint32_t worker) {
  const bias_job *j = arg;
  const ps__args_moe_bias *a = j->a;
  const size_t blocks = (a->cols + SUM_COLS - 1) / SUM_COLS, e = (size_t)task / blocks,
               c0 = (size_t)task % blocks * SUM_COLS,
               n = a->cols - c0 < SUM_COLS ? a->cols - c0 : SUM_COLS,
               rows = (size_t)a->n_tokens * a->n_used;
  const int32_t first = j->offsets[e], end = j->offsets[e + 1];
  void *db = ps__elem(j->db, a->dt, e * a->cols + c0);
  float sum[SUM_COLS] = {0}, had[SUM_COLS];
  for (size_t i = 0; i < rows; i++)
    if (j->slot[i] >= first && j->slot[i] < end)
      moe_bias_sum_row(sum, ps__celem(j->x, a->dt, (size_t)j->slot[i] * a->cols + c0), n,
                       a->weighted ? j->weights[i] : 1.0f, a->dt);
  if (a->accumulate)
    ps__load_f32(had, db, a->dt, n);
  for (size_t i = 0; i < n && a->accumulate; i++)
    sum[i] += had[i];
  ps__store_f32(db, a->dt, sum, n);
}

/* moe_bias_sum
 * shapes  x [R,cols], db [E,cols] of dt, offsets i32[E+1], slot and weights [T,k]
 * bytes   R*cols*dt.   determinism  bitwise: an expert's rows in order, fp32, one rounding */
ps_status ps__cpu_moe_bias_sum(const ps_launch *l) {
  const ps__args_moe_bias *a = l->args;
  bias_job job = {.a = a,
                  .x = l->ptr[0],
                  .offsets = l->ptr[1],
                  .slot = l->ptr[2],
                  .weights = l->ptr[3],
                  .db = l->ptr[4]};
  ps__pool_run(((const ps__cpu_exec *)l->exec)->pool,
               (int64_t)a->n_experts * ((a->cols + SUM_COLS - 1) / SUM_COLS), sum_task, &job);
  return PS_OK;
}
