/* glu.c - the gated activation of the feed-forward layer (Shazeer 2020, arXiv 2002.05202),
 * forward and backward. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"

typedef struct glu_job {
  size_t ffn;
  uint32_t dt, activation;
  char *gu; /* [T,2F] */
  char *s;  /* [T,F]; backward: ds, then s */
} glu_job;

/* 1 + exp(-k(x)): both activations are x * sigmoid(k(x)), silu with k = x, and gelu_tanh, which is
 * x/2 (1 + tanh(y)), with k = 2y = 2 sqrt(2/pi) (x + 0.044715 x^3). */
#define GELU_A 1.5957691216057308f
#define GELU_B 0.044715f
PS_VEC void glu_below(ps__v *below, const ps__v *x, uint32_t activation) {
  const ps__v k = activation == PS_ACTIVATION_SILU ? *x : (*x * *x * GELU_B + 1.0f) * *x * GELU_A;
  *below = 1.0f + ps__v_exp(-k);
}
/* x times the derivative of k. */
PS_VEC void glu_slope(ps__v *slope, const ps__v *x, uint32_t activation) {
  *slope = activation == PS_ACTIVATION_SILU ? *x : (*x * *x * (3.0f * GELU_B) + 1.0f) * *x * GELU_A;
}

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

/* Of a job's dtype and activation, each a constant. */
#define GLU_ROWS(rows, j, first, end)                                                              \
  do {                                                                                             \
    if ((j)->activation == PS_ACTIVATION_SILU)                                                     \
      PS__BY_DTYPE((j)->dt, DT, rows(j, first, end, DT, PS_ACTIVATION_SILU));                      \
    else                                                                                           \
      PS__BY_DTYPE((j)->dt, DT, rows(j, first, end, DT, PS_ACTIVATION_GELU_TANH));                 \
  } while (0)

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

ps_status ps__check_glu(const ps__args_glu *a, const char *op) {
  if (a->activation > PS_ACTIVATION_GELU_TANH)
    return ps__fail(PS_EINVAL, "%s: activation is %u: neither silu nor gelu_tanh", op,
                    a->activation);
  if (a->dt >= PS_N_DTYPES)
    return ps__fail(PS_EINVAL, "%s: dt is %u: neither fp32 nor bf16", op, a->dt);
  return PS_OK;
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
 * reference    tests/test_ops.py: torch's silu and gelu(approximate="tanh") in fp64 */
static ps_status glu_fwd(const ps_launch *l) {
  const ps__args_glu *a = l->args;
  PS_TRY(ps__check_glu(a, "glu_fwd"));
  glu_job job = job_of(l, l->ptr[0], l->ptr[1]);
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(2 * (size_t)a->ffn_dim), glu_fwd_task, &job);
  return PS_OK;
}

/* glu_bwd
 * math    dg = ds * u * sig * (1 + g*k'*(1 - sig)); du = ds * g * sig; both over gu, in place; s,
 *         to the bits of glu_fwd's, over ds
 * shapes  ds [T,F], gu [T,2F] of dt
 * bytes   6*T*F*sizeof(dt).   determinism  bitwise: elementwise.   reference  as the forward's */
static ps_status glu_bwd(const ps_launch *l) {
  const ps__args_glu *a = l->args;
  PS_TRY(ps__check_glu(a, "glu_bwd"));
  glu_job job = job_of(l, l->ptr[1], l->ptr[0]);
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(2 * (size_t)a->ffn_dim), glu_bwd_task, &job);
  return PS_OK;
}

static void bind_glu(void *args, const ps__chunk_shape *chunk) {
  ((ps__args_glu *)args)->n_tokens = chunk->n_tokens;
}
static ps_work work_glu_fwd(const void *args) {
  const ps__args_glu *a = args;
  return ps__bytes_work(3.0 * a->n_tokens * a->ffn_dim * (double)ps__dt_bytes(a->dt));
}
static ps_work work_glu_bwd(const void *args) {
  return ps__bytes_work(2.0 * work_glu_fwd(args).bytes);
}

const ps_kernel ps__k_glu_fwd = {
    .name = "glu_fwd",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {glu_fwd, PS_CUDA_FN(glu_fwd)},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_glu_fwd, .bind = bind_glu},
};
const ps_kernel ps__k_glu_bwd = {
    .name = "glu_bwd",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {glu_bwd, PS_CUDA_FN(glu_bwd)},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_glu_bwd, .bind = bind_glu},
};
