/* glu.c - the gated activation of the feed-forward layer (Shazeer 2020, arXiv 2002.05202),
 * forward and backward. */
#include "kernels/cpu/glu.h"
#include "kernels/cpu/quantize.h"

typedef struct glu_job {
  size_t ffn;
  uint32_t dt, activation;
  char *gu; /* [T,2F] */
  char *s;  /* [T,F]; backward: ds, then s */
} glu_job;

PS_VEC void glu_fwd_rows(const glu_job *j, int64_t first, int64_t end, uint32_t dt,
                         uint32_t activation) {
  size_t f = j->ffn, bytes = f * ps__dt_bytes(dt);
  for (int64_t r = first; r < end; r++) {
    const char *g = j->gu + 2 * (size_t)r * bytes, *u = g + bytes;
    char *s = j->s + (size_t)r * bytes;
    for (size_t i = 0; i < f; i += PS_LANES) {
      ps__v x = ps__v_read(g, dt, i, f, 0.0f), below;
      glu_below(&below, &x, activation);
      ps__v_write(s, dt, i, f, x / below * ps__v_read(u, dt, i, f, 0.0f));
    }
  }
}

PS_VEC void glu_bwd_rows(const glu_job *j, int64_t first, int64_t end, uint32_t dt,
                         uint32_t activation) {
  size_t f = j->ffn, bytes = f * ps__dt_bytes(dt);
  for (int64_t r = first; r < end; r++) {
    char *g = j->gu + 2 * (size_t)r * bytes, *u = g + bytes;
    char *s = j->s + (size_t)r * bytes;
    for (size_t i = 0; i < f; i += PS_LANES) {
      ps__v x = ps__v_read(g, dt, i, f, 0.0f), d = ps__v_read(s, dt, i, f, 0.0f),
            up = ps__v_read(u, dt, i, f, 0.0f), below, slope;
      glu_below(&below, &x, activation);
      glu_slope(&slope, &x, activation);
      ps__v sig = 1.0f / below;
      ps__v_write(s, dt, i, f, x / below * up);
      ps__v_write(g, dt, i, f, d * up * sig * (1.0f + slope * (1.0f - sig)));
      ps__v_write(u, dt, i, f, d * (x * sig));
    }
  }
}

PS_CLONES static void glu_fwd_run(const glu_job *j, int64_t first, int64_t end) {
  GLU_ROWS(glu_fwd_rows, j, first, end);
}

PS_CLONES static void glu_bwd_run(const glu_job *j, int64_t first, int64_t end) {
  GLU_ROWS(glu_bwd_rows, j, first, end);
}

static void glu_fwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  glu_fwd_run(arg, first, end);
}
static void glu_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  glu_bwd_run(arg, first, end);
}

static glu_job job_of(const ps_launch *l, void *gu, void *s) {
  const ps__args_glu *a = l->args;
  return (glu_job){.ffn = a->ffn_dim, .dt = a->dt, .activation = a->activation, .gu = gu, .s = s};
}

/* glu_fwd
 * math    s = act(g)*u; g = gu[:, :F], u = gu[:, F:]; act(g) = g * sig, sig = 1/(1 + exp(-k)), with
 *         k = g for silu, k = 2 sqrt(2/pi) (g + 0.044715 g^3) for gelu_tanh; fp32 inside, one
 *         rounding at the store
 * shapes  gu [T,2F], s [T,F] of dt, no aliasing
 * bytes   3*T*F*sizeof(dt).   determinism  bitwise: elementwise
 * reference    tests/test_ops_layers.py: torch's silu and gelu(approximate="tanh") in fp64 */
ps_status ps__cpu_glu_fwd(const ps_launch *l) {
  const ps__args_glu *a = l->args;
  glu_job job = job_of(l, l->ptr[0], l->ptr[1]);
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(2 * (size_t)a->ffn_dim), glu_fwd_task, &job);
  return PS_OK;
}

/* glu_bwd
 * math    dg = ds * u * sig * (1 + g*k'*(1 - sig)); du = ds * g * sig; both over gu, in place; s,
 *         to the bits of glu_fwd's, over ds
 * shapes  ds [T,F], gu [T,2F] of dt
 * bytes   6*T*F*sizeof(dt).   determinism  bitwise: elementwise.   reference  as the forward's */
ps_status ps__cpu_glu_bwd(const ps_launch *l) {
  const ps__args_glu *a = l->args;
  glu_job job = job_of(l, l->ptr[1], l->ptr[0]);
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(2 * (size_t)a->ffn_dim), glu_bwd_task, &job);
  return PS_OK;
}

/* ---- quantized ------------------------------------------------------------------------------- */

typedef struct glu_quantize_job {
  const ps__args_glu_quantize *a;
  const ps__cpu_exec *exec;
  const char *gu, *ds;
  ps__quantizer s, grad; /* grad: of gu's gradient, backward alone */
} glu_quantize_job;

/* Rows [first, end) of s in the worker's scratch; backward those of gu's gradient come before. */
static char *glu_block(const glu_quantize_job *j, int64_t first, int64_t end, uint32_t worker) {
  const size_t bytes = j->a->ffn_dim * ps__dt_bytes(j->a->dt), n = (size_t)(end - first);
  char *scratch = ps__scratch(j->exec, worker), *s = j->ds ? scratch + 2 * n * bytes : scratch;
  glu_job part = {.ffn = j->a->ffn_dim, .dt = j->a->dt, .activation = j->a->activation, .s = s};
  if (!j->ds) {
    part.gu = (char *)j->gu + 2 * (size_t)first * bytes;
    glu_fwd_run(&part, 0, end - first);
    return s;
  }
  part.gu = scratch;
  memcpy(scratch, j->gu + 2 * (size_t)first * bytes, 2 * n * bytes);
  memcpy(s, j->ds + (size_t)first * bytes, n * bytes);
  glu_bwd_run(&part, 0, end - first);
  return s;
}

static void glu_see_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  glu_quantize_job *j = arg;
  const size_t n = (size_t)(end - first) * j->a->ffn_dim;
  const char *s = glu_block(j, first, end, worker);
  ps__quantizer_see(&j->s, s, n);
  if (j->ds)
    ps__quantizer_see(&j->grad, ps__scratch(j->exec, worker), 2 * n);
}
static void glu_put_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const glu_quantize_job *j = arg;
  const char *s = glu_block(j, first, end, worker);
  ps__quantizer_put(&j->s, s, first, end - first);
  if (j->ds)
    ps__quantizer_put(&j->grad, ps__scratch(j->exec, worker), first, end - first);
}

static void glu_quantize_run(glu_quantize_job *job) {
  ps__cpu_rows(job->exec, job->a->n_tokens, PS__QUANTIZE_ROWS, glu_see_task, job);
  ps__quantizer_ready(&job->s, 1);
  if (job->ds)
    ps__quantizer_ready(&job->grad, 1);
  ps__cpu_rows(job->exec, job->a->n_tokens, PS__QUANTIZE_ROWS, glu_put_task, job);
}

/* glu_quantize
 * math    q, qt = quantize(glu_fwd(gu)), to their bits
 * shapes  gu [T,2F], q [T,F], qt [F,T]; no aliasing
 * bytes   4*T*F*sizeof(dt) + T*F a form; scratch: 16 rows a worker
 * determinism  as glu_fwd's */
ps_status ps__cpu_glu_quantize(const ps_launch *l) {
  const ps__args_glu_quantize *a = l->args;
  uint32_t next = 1;
  glu_quantize_job job = {.a = a, .exec = l->exec, .gu = l->ptr[0]};
  job.s = ps__quantizer_of(l, &next, a->n_tokens, a->ffn_dim, a->dt, a->dt_q, a->forms);
  job.s.flushed = ps__flushed_of(l, next, a->count);
  glu_quantize_run(&job);
  return PS_OK;
}

/* glu_bwd_quantize
 * math    dgu, dgut = quantize(what glu_bwd leaves in gu); st = quantize(what it leaves in ds)
 * shapes  ds [T,F], gu and dgu [T,2F], dgut [2F,T], st [F,T]; no aliasing
 * bytes   6*T*F*sizeof(dt) + 5*T*F; scratch: 16 rows a worker.   determinism  as glu_bwd's */
ps_status ps__cpu_glu_bwd_quantize(const ps_launch *l) {
  const ps__args_glu_quantize *a = l->args;
  uint32_t next = 2;
  glu_quantize_job job = {.a = a, .exec = l->exec, .ds = l->ptr[0], .gu = l->ptr[1]};
  job.grad = ps__quantizer_of(l, &next, a->n_tokens, 2 * a->ffn_dim, a->dt, a->dt_q,
                              PS_FORM_ROWS | PS_FORM_COLS);
  job.s = ps__quantizer_of(l, &next, a->n_tokens, a->ffn_dim, a->dt, PS__E4M3, PS_FORM_COLS);
  job.grad.flushed = ps__flushed_of(l, next, a->count);
  job.s.flushed = ps__flushed_of(l, next, a->count ? a->count + 1 : 0);
  glu_quantize_run(&job);
  return PS_OK;
}

size_t ps__cpu_scratch_glu_quantize(const void *args, const ps__scratch_target *target) {
  const ps__args_glu_quantize *a = args;
  return ps__round_up(PS__QUANTIZE_ROWS * (size_t)a->ffn_dim * ps__dt_bytes(a->dt), 64);
}
size_t ps__cpu_scratch_glu_bwd_quantize(const void *args, const ps__scratch_target *target) {
  return 3 * ps__cpu_scratch_glu_quantize(args, target);
}
