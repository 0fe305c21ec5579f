/* swiglu.c - the gated activation of the feed-forward layer (Shazeer 2020, arXiv 2002.05202),
 * forward and backward. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

typedef struct glu_job {
  size_t ffn;
  uint32_t dt;
  char *gu; /* [T,2F] */
  char *s;  /* [T,F]; backward: ds, then s */
} glu_job;

PS_VEC void glu_fwd_rows(const glu_job *j, int64_t first, int64_t end, uint32_t dt) {
  size_t f = j->ffn, bytes = f * ps__dt_bytes(dt);
  for (int64_t r = first; r < end; r++) {
    const char *g = j->gu + 2 * (size_t)r * bytes, *u = g + bytes;
    char *s = j->s + (size_t)r * bytes;
    for (size_t i = 0; i < f; i += PS_LANES) {
      ps__v x = ps__v_read(g, dt, i, f, 0.0f);
      ps__v_write(s, dt, i, f, x / (1.0f + ps__v_exp(-x)) * ps__v_read(u, dt, i, f, 0.0f));
    }
  }
}

PS_VEC void glu_bwd_rows(const glu_job *j, int64_t first, int64_t end, uint32_t dt) {
  size_t f = j->ffn, bytes = f * ps__dt_bytes(dt);
  for (int64_t r = first; r < end; r++) {
    char *g = j->gu + 2 * (size_t)r * bytes, *u = g + bytes;
    char *s = j->s + (size_t)r * bytes;
    for (size_t i = 0; i < f; i += PS_LANES) {
      ps__v x = ps__v_read(g, dt, i, f, 0.0f), d = ps__v_read(s, dt, i, f, 0.0f),
            up = ps__v_read(u, dt, i, f, 0.0f);
      ps__v below = 1.0f + ps__v_exp(-x), sig = 1.0f / below;
      ps__v_write(s, dt, i, f, x / below * up);
      ps__v_write(g, dt, i, f, d * up * sig * (1.0f + x * (1.0f - sig)));
      ps__v_write(u, dt, i, f, d * (x * sig));
    }
  }
}

PS_CLONES static void glu_fwd(const glu_job *j, int64_t first, int64_t end) {
  if (j->dt == PS_BF16)
    glu_fwd_rows(j, first, end, PS_BF16);
  else
    glu_fwd_rows(j, first, end, PS_F32);
}

PS_CLONES static void glu_bwd(const glu_job *j, int64_t first, int64_t end) {
  if (j->dt == PS_BF16)
    glu_bwd_rows(j, first, end, PS_BF16);
  else
    glu_bwd_rows(j, first, end, PS_F32);
}

static void glu_fwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  glu_fwd(arg, first, end);
}
static void glu_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  glu_bwd(arg, first, end);
}

/* swiglu_fwd
 * math    s = silu(g)*u, silu(g) = g / (1 + exp(-g)); g = gu[:, :F], u = gu[:, F:]; fp32 inside,
 *         one rounding at the store
 * shapes  gu [T,2F], s [T,F] of dt, no aliasing
 * bytes   3*T*F*sizeof(dt).   determinism  bitwise: elementwise */
static ps_status swiglu_fwd(const ps_launch *l) {
  const ps__args_swiglu *a = l->args;
  glu_job job = {.ffn = a->ffn_dim, .dt = a->dt, .gu = l->ptr[0], .s = l->ptr[1]};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(2 * (size_t)a->ffn_dim), glu_fwd_task, &job);
  return PS_OK;
}

/* swiglu_bwd
 * math    sig = 1/(1 + exp(-g)); dg = ds * u * sig * (1 + g*(1 - sig)); du = ds * g * sig; both
 *         over gu, in place; s, to the bits of
 *         swiglu_fwd's, over ds
 * shapes  ds [T,F], gu [T,2F] of dt
 * bytes   6*T*F*sizeof(dt).   determinism  bitwise: elementwise */
static ps_status swiglu_bwd(const ps_launch *l) {
  const ps__args_swiglu *a = l->args;
  glu_job job = {.ffn = a->ffn_dim, .dt = a->dt, .s = l->ptr[0], .gu = l->ptr[1]};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(2 * (size_t)a->ffn_dim), glu_bwd_task, &job);
  return PS_OK;
}

const ps_kernel ps__k_swiglu_fwd = {
    .name = "swiglu_fwd",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {swiglu_fwd, PS_CUDA_FN(swiglu_fwd)},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY},
};
const ps_kernel ps__k_swiglu_bwd = {
    .name = "swiglu_bwd",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {swiglu_bwd, PS_CUDA_FN(swiglu_bwd)},
    .info = &(const ps__op_info){.rate = PS__RATE_MEMORY},
};
