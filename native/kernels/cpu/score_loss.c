/* score_loss.c - loss and gradient of documents' scores. */
#include "kernels/cpu/cpu.h"
#include <math.h>
#include <string.h>

typedef struct score_job {
  const ps__args_score_loss *a;
  const void *z;
  const int32_t *target;
  double scale;
  float *loss; /* [rows,2] */
  void *dz;
} score_job;

static double score_at(const score_job *j, int64_t row, uint32_t col) {
  float x;
  ps__load_f32(&x, ps__celem(j->z, j->a->dt, (size_t)row * j->a->cols + col), j->a->dt, 1);
  return x;
}

static void put_gradient(const score_job *j, int64_t row, uint32_t col, double gradient) {
  const float x = (float)(gradient * j->scale);
  ps__store_f32(ps__elem(j->dz, j->a->dt, (size_t)row * j->a->cols + col), j->a->dt, &x, 1);
}

/* log(1 + exp(x)) without overflow. */
static double softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }
static double sigmoid(double x) { return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)); }

static void single_label(const score_job *j, int64_t row, uint32_t label, float *loss) {
  double max = -INFINITY, sum = 0;
  uint32_t best = 0;
  for (uint32_t v = 0; v < j->a->cols; v++)
    if (score_at(j, row, v) > max) {
      max = score_at(j, row, v);
      best = v;
    }
  for (uint32_t v = 0; v < j->a->cols; v++)
    sum += exp(score_at(j, row, v) - max);
  for (uint32_t v = 0; v < j->a->cols; v++) {
    const double e = exp(score_at(j, row, v) - max);
    put_gradient(j, row, v, (v == label ? e - sum : e) / sum);
  }
  loss[0] = (float)(log(sum) + (max - score_at(j, row, label)));
  loss[1] = best == label;
}

static void multi_label(const score_job *j, int64_t row, uint32_t labels, float *loss) {
  const uint32_t n = j->a->cols;
  double sum = 0, right = 0;
  for (uint32_t v = 0; v < n; v++) {
    const double z = score_at(j, row, v);
    const uint32_t y = labels >> v & 1;
    sum += softplus(y ? -z : z);
    right += (z > 0) == (y == 1);
    put_gradient(j, row, v, (y ? -sigmoid(-z) : sigmoid(z)) / n);
  }
  loss[0] = (float)(sum / n);
  loss[1] = (float)(right / n);
}

static void regression(const score_job *j, int64_t row, int32_t bits, float *loss) {
  float want;
  memcpy(&want, &bits, sizeof want);
  const double error = score_at(j, row, 0) - (double)want;
  put_gradient(j, row, 0, 2 * error);
  loss[0] = (float)(error * error);
  loss[1] = (float)fabs(error);
}

static void pair(const score_job *j, int64_t row, int32_t target, float *loss) {
  const bool rejected = target > 0;
  const int64_t other = rejected ? row - target : row - 1 - (int64_t)target;
  const double margin = rejected ? score_at(j, other, 0) - score_at(j, row, 0)
                                 : score_at(j, row, 0) - score_at(j, other, 0);
  put_gradient(j, row, 0, rejected ? sigmoid(-margin) : -sigmoid(-margin));
  loss[0] = rejected ? (float)softplus(-margin) : 0;
  loss[1] = rejected && margin > 0;
}

static void score_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const score_job *j = arg;
  const ps__args_score_loss *a = j->a;
  const bool trained = a->problem != PS_PROBLEM_EMBEDDING;
  (void)worker;
  for (int64_t r = first; r < end; r++) {
    const int32_t t = j->target[r];
    float *loss = j->loss + 2 * r;
    if (t == -1 || !trained) {
      loss[0] = loss[1] = 0;
      if (trained)
        memset(ps__elem(j->dz, a->dt, (size_t)r * a->cols), 0, a->cols * ps__dt_bytes(a->dt));
      continue;
    }
    switch (a->problem) {
    case PS_PROBLEM_SINGLE_LABEL: single_label(j, r, (uint32_t)t, loss); break;
    case PS_PROBLEM_MULTI_LABEL: multi_label(j, r, (uint32_t)t, loss); break;
    case PS_PROBLEM_REGRESSION: regression(j, r, t, loss); break;
    default: pair(j, r, t, loss); break;
    }
  }
}

static bool fits(const ps__args_score_loss *a, const int32_t *target, int64_t r) {
  const int64_t t = target[r];
  switch (t == -1 ? PS_PROBLEM_EMBEDDING : a->problem) {
  case PS_PROBLEM_SINGLE_LABEL: return t >= 0 && t < a->cols;
  case PS_PROBLEM_MULTI_LABEL: return t >= 0 && t >> a->cols == 0;
  case PS_PROBLEM_PAIRS:
    return t > 0 ? t <= r && target[r - t] == -1 - t
                 : t < -1 && r - 1 - t < a->rows && target[r - 1 - t] == -1 - t;
  default: return true;
  }
}

/* score_loss: ops.h.
 * shapes  z, dz [rows,cols] of dt, no alias; target i32 [rows]; scale f32 [1] = 1 / documents, or
 *         pairs, of the step; loss f32 [rows,2]
 * determinism  bitwise: one thread has a row, in order of columns
 * errors  PS_EFORMAT: a target that is none of the problem's, with its row. Nothing is written
 *         then. */
ps_status ps__cpu_score_loss(const ps_launch *l) {
  const ps__args_score_loss *a = l->args;
  const int32_t *target = l->ptr[1];
  for (uint32_t r = 0; r < a->rows; r++)
    if (!fits(a, target, r))
      return ps__fail(PS_EFORMAT, "target %d of token %u is none of %s with %u scores",
                      (int)target[r], r, ps_problem_name(a->problem), a->cols);
  score_job job = {.a = a,
                   .z = l->ptr[0],
                   .target = target,
                   .scale = (double)*(const float *)l->ptr[2],
                   .loss = l->ptr[3],
                   .dz = a->problem == PS_PROBLEM_EMBEDDING ? NULL : l->ptr[4]};
  ps__cpu_rows(l->exec, a->rows, ps__block_rows(a->cols), score_rows, &job);
  return PS_OK;
}
