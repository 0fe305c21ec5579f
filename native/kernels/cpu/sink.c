/* sink.c - a sink of each head in the softmax of attention, as a correction of what attention
 * without it gives. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include <math.h>

typedef struct sink_job {
  const ps__args_sink *a;
  char *o;
  const char *d_o;
  float *lse;
  const void *sink;
  void *dsink;
} sink_job;

/* x[0..n) *= by */
PS_VEC void scale_row(char *x, size_t n, float by, uint32_t dt) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(x, dt, i, n, ps__v_read(x, dt, i, n, 0.0f) * by);
}
PS_CLONES static void sink_scale(char *x, size_t n, float by, uint32_t dt) {
  PS__BY_DTYPE(dt, DT, scale_row(x, n, by, DT));
}
PS_VEC float dot_row(const char *x, const char *y, size_t n, uint32_t dt) {
  ps__v sum = ps__v_set(0.0f);
  for (size_t i = 0; i < n; i += PS_LANES)
    sum += ps__v_read(x, dt, i, n, 0.0f) * ps__v_read(y, dt, i, n, 0.0f);
  return ps__v_sum(sum);
}
PS_CLONES static float dot(const char *x, const char *y, size_t n, uint32_t dt) {
  float sum = 0;
  PS__BY_DTYPE(dt, DT, sum = dot_row(x, y, n, DT));
  return sum;
}
float ps__cpu_dot(const void *x, const void *y, size_t n, uint32_t dt) { return dot(x, y, n, dt); }

static void sink_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const sink_job *j = arg;
  const ps__args_sink *a = j->a;
  const size_t bytes = a->head_dim * ps__dt_bytes(a->dt);
  for (size_t i = (size_t)first * a->n_heads; i < (size_t)end * a->n_heads; i++) {
    const double s = ps__load1_f32(j->sink, a->dt, i % a->n_heads), lse = j->lse[i],
                 z = exp(-fabs(lse - s)); /* the smaller of both over the larger */
    sink_scale(j->o + i * bytes, a->head_dim, (float)((s > lse ? z : 1.0) / (1.0 + z)), a->dt);
    j->lse[i] = (float)((s > lse ? s : lse) + log1p(z));
  }
}

/* attention_sink
 * shapes  o [T, heads*head_dim] of dt, lse [T, heads] fp32, sink [heads] of dt
 * bytes   o and lse, read and written.   determinism  bitwise: elementwise
 * reference  tests/test_op_cases.py, PyTorch in fp64 */
ps_status ps__cpu_attention_sink(const ps_launch *l) {
  const ps__args_sink *a = l->args;
  sink_job job = {.a = a, .o = l->ptr[0], .lse = l->ptr[1], .sink = l->ptr[2]};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows((size_t)a->n_heads * a->head_dim), sink_task,
               &job);
  return PS_OK;
}

/* A head: its rows in order, in fp64. */
static void sink_bwd_task(void *arg, int64_t head, uint32_t worker) {
  const sink_job *j = arg;
  const ps__args_sink *a = j->a;
  const size_t bytes = a->head_dim * ps__dt_bytes(a->dt);
  const double s = ps__load1_f32(j->sink, a->dt, (size_t)head);
  double sum = 0;
  for (size_t t = 0; t < a->n_tokens; t++) {
    const size_t i = t * a->n_heads + (size_t)head;
    sum -=
        exp(s - j->lse[i]) * ps__cpu_dot(j->o + i * bytes, j->d_o + i * bytes, a->head_dim, a->dt);
  }
  if (a->accumulate)
    sum += ps__load1_f32(j->dsink, a->dt, (size_t)head);
  ps__store1_f32(j->dsink, a->dt, (size_t)head, (float)sum);
}

/* attention_sink_bwd
 * shapes  o, d_o [T, heads*head_dim] of dt, lse [T, heads] fp32, sink, dsink [heads] of dt
 * bytes   o and d_o once.   determinism  bitwise: a head's rows in order, one rounding */
ps_status ps__cpu_attention_sink_bwd(const ps_launch *l) {
  const ps__args_sink *a = l->args;
  sink_job job = {.a = a,
                  .o = l->ptr[0],
                  .lse = l->ptr[1],
                  .d_o = l->ptr[2],
                  .sink = l->ptr[3],
                  .dsink = l->ptr[4]};
  ps__pool_run(((const ps__cpu_exec *)l->exec)->pool, a->n_heads, sink_bwd_task, &job);
  return PS_OK;
}
