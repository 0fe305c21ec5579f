/* cross_entropy.c - loss and gradient of the logits in one pass over each row, in place. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include <math.h>

typedef struct ce_job {
  size_t vocab;
  uint32_t dt;
  char *z;
  const int32_t *target;
  float scale, cap; /* cap 0: none */
  float z_loss, smoothing;
  float *loss; /* [rows, columns] */
} ce_job;

/* tanh(z / cap); a capped logit is cap times that. -inf, as padding lanes have, stays -inf. */
PS_VEC void ce_tanh(ps__v *t, const ps__v *z, float cap) {
  *t = ps__v_tanh(*z / cap);
  *t = ps__v_select(*z == ps__v_set(-INFINITY), *z, *t);
}

/* max and sum of exp(z - max) of a row; padding lanes are -inf, which exp turns to 0. 64 lanes,
 * fixed tree. */
PS_VEC float ce_row_max(const char *z, uint32_t dt, size_t n) {
  ps__v m[4];
  for (int q = 0; q < 4; q++)
    m[q] = ps__v_set(-INFINITY);
  size_t i = 0;
  for (; i + 4 * PS_LANES <= n; i += 4 * PS_LANES)
    for (int q = 0; q < 4; q++)
      m[q] = ps__v_max(ps__v_get(z, dt, i + (size_t)q * PS_LANES), m[q]);
  for (; i < n; i += PS_LANES)
    m[0] = ps__v_max(ps__v_read(z, dt, i, n, -INFINITY), m[0]);
  return ps__v_hmax(ps__v_max(ps__v_max(m[0], m[1]), ps__v_max(m[2], m[3])));
}

/* exp(y - max) of vectors of logits. */
PS_VEC void ce_terms(ps__v *e, const ps__v *z, float max, bool capped, float cap) {
  ps__v y = *z;
  if (capped) {
    ce_tanh(&y, z, cap);
    y *= cap;
  }
  *e = ps__v_exp(y - max);
}

PS_VEC float ce_row_sum(const char *z, uint32_t dt, size_t n, float max, bool capped, float cap) {
  ps__v s[4] = {{0}}, v, e;
  size_t i = 0;
  for (; i + 4 * PS_LANES <= n; i += 4 * PS_LANES)
    for (int q = 0; q < 4; q++) {
      v = ps__v_get(z, dt, i + (size_t)q * PS_LANES);
      ce_terms(&e, &v, max, capped, cap);
      s[q] += e;
    }
  for (; i < n; i += PS_LANES) {
    v = ps__v_read(z, dt, i, n, -INFINITY);
    ce_terms(&e, &v, max, capped, cap);
    s[0] += e;
  }
  return ps__v_sum((s[0] + s[1]) + (s[2] + s[3]));
}

/* The sum of a row's logits. 64 lanes, fixed tree. */
PS_VEC float ce_row_total(const char *z, uint32_t dt, size_t n, bool capped, float cap) {
  ps__v s[4] = {{0}}, y;
  for (size_t i = 0, q = 0; i < n; i += PS_LANES, q = i / PS_LANES % 4) {
    const ps__v v = ps__v_read(z, dt, i, n, 0.0f);
    y = v;
    if (capped) {
      ce_tanh(&y, &v, cap);
      y *= cap;
    }
    s[q] += y;
  }
  return ps__v_sum((s[0] + s[1]) + (s[2] + s[3]));
}

/* The gradient of a vector of logits: terms times k less @less, with a cap times 1 - tanh^2. */
PS_VEC void ce_grads(ps__v *g, const ps__v *z, float max, float k, bool capped, float cap,
                     bool more, float less) {
  ps__v y = *z, slope;
  if (!capped) {
    *g = ps__v_exp(y - max) * k;
    if (more)
      *g -= less;
    return;
  }
  ce_tanh(&y, z, cap);
  slope = 1.0f - y * y;
  slope = ps__v_select(*z == ps__v_set(-INFINITY), ps__v_set(0.0f), slope);
  *g = ps__v_exp(y * cap - max) * k;
  if (more)
    *g -= less;
  *g *= slope;
}

/* @more: with z-loss or label smoothing. */
PS_VEC void ce_rows(const ce_job *j, int64_t first, int64_t end, uint32_t dt, bool capped,
                    bool more) {
  const float cap = j->cap;
  const uint32_t columns = more ? 3 : 1;
  size_t n = j->vocab, bytes = n * ps__dt_bytes(dt);
  for (int64_t r = first; r < end; r++) {
    char *z = j->z + (size_t)r * bytes;
    int32_t target = j->target[r];
    float *loss = j->loss + (size_t)r * columns;
    if (target < 0) {
      memset(z, 0, bytes);
      memset(loss, 0, columns * sizeof *loss);
      continue;
    }
    float max = ce_row_max(z, dt, n), zt = ps__load1_f32(z, dt, (size_t)target), slope = 1.0f;
    if (capped) { /* which keeps the order of logits */
      const float t = ps__tanhf(zt / cap);
      slope = 1.0f - t * t;
      zt = cap * t;
      max = cap * ps__tanhf(max / cap);
    }
    float sum = ce_row_sum(z, dt, n, max, capped, cap);
    float k = j->scale / sum, et = ps__expf(zt - max), less = 0.0f, pull = 0.0f;
    /* softmax - 1 at the target as -(sum - e)/sum: no cancellation beyond that of the sum */
    float dt_target = (et - sum) * k;
    const double log_sum = log((double)sum);
    if (more) {
      const double lse = log_sum + (double)max,
                   mean = (double)ce_row_total(z, dt, n, capped, cap) / (double)n;
      pull = (float)(2.0 * (double)j->z_loss * lse);
      less = (float)((double)j->smoothing / (double)n * (double)j->scale);
      dt_target += (pull * et) * k + (j->smoothing * j->scale - less);
      k += k * pull;
      loss[1] = (float)(lse * lse);
      loss[2] = (float)(lse - mean);
    }
    for (size_t i = 0; i < n; i += PS_LANES) {
      ps__v v = ps__v_read(z, dt, i, n, 0.0f), g;
      ce_grads(&g, &v, max, k, capped, cap, more, less);
      ps__v_write(z, dt, i, n, g);
    }
    if (capped)
      dt_target *= slope;
    ps__store_f32(z + (size_t)target * ps__dt_bytes(dt), dt, &dt_target, 1);
    loss[0] = (float)(log_sum + ((double)max - (double)zt));
  }
}

PS_CLONES static void ce_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const ce_job *j = arg;
  const bool more = ps__loss_columns(j->z_loss, j->smoothing) > 1;
  if (more && j->cap > 0.0f)
    PS__BY_DTYPE(j->dt, DT, ce_rows(j, first, end, DT, true, true));
  else if (more)
    PS__BY_DTYPE(j->dt, DT, ce_rows(j, first, end, DT, false, true));
  else if (j->cap > 0.0f)
    PS__BY_DTYPE(j->dt, DT, ce_rows(j, first, end, DT, true, false));
  else
    PS__BY_DTYPE(j->dt, DT, ce_rows(j, first, end, DT, false, false));
}

/* cross_entropy
 * math    y = z, or softcap * tanh(z / softcap); loss[r] = log(sum_v exp(y[r,v] - max)) + max -
 *         y[r,t];
 *         z[r,v] becomes (softmax(y[r])[v] - [v = t]) * scale, with a soft cap that times
 *         1 - (y[r,v] / softcap)^2. A z of -inf stays -inf. target -1: loss 0, gradient 0.
 *         fp32 inside, the loss put together in fp64. z-loss and label smoothing: ops.h.
 * shapes  z [rows,V] of dt, in place; target i32 [rows]; scale f32 [1] = 1 / valid tokens of the
 *         step; loss f32 [rows], with z-loss or label smoothing [rows,3]
 * bytes   2*rows*V*sizeof(dt) when a row fits the cache (three passes over it, four with z-loss or
 *         label smoothing)
 * determinism  bitwise: one thread has a row; sums in 64 lanes and a fixed tree
 * errors  PS_EFORMAT: a target that is neither -1 nor an id, with its row. Nothing is written
 *         then. */
ps_status ps__cpu_cross_entropy(const ps_launch *l) {
  const ps__args_cross_entropy *a = l->args;
  const int32_t *target = l->ptr[1];
  for (uint32_t r = 0; r < a->rows; r++)
    if (target[r] < -1 || target[r] >= (int64_t)a->vocab)
      return ps__fail(PS_EFORMAT,
                      "target %d of token %u is not in the vocabulary of %u: tokenize the data "
                      "with the model's own tokenizer",
                      (int)target[r], r, a->vocab);
  ce_job job = {.vocab = a->vocab,
                .dt = a->dt,
                .z = l->ptr[0],
                .target = target,
                .scale = *(const float *)l->ptr[2],
                .cap = a->softcap,
                .z_loss = a->z_loss,
                .smoothing = a->label_smoothing,
                .loss = l->ptr[3]};
  ps__cpu_rows(l->exec, a->rows, ps__block_rows(a->vocab), ce_task, &job);
  return PS_OK;
}
