/* quantize.c - tensors quantized to FP8 with one scale, which is a power of two. */
#include "kernels/cpu/quantize.h"
#include <string.h>

ps__quantizer ps__quantizer_of(const ps_launch *l, uint32_t *next, uint32_t rows, uint32_t cols,
                               uint32_t dt, uint32_t dt_q, uint32_t forms) {
  ps__quantizer z = {.rows = rows, .cols = cols, .dt = dt, .dt_q = dt_q};
  z.scale = l->ptr[(*next)++];
  if (forms & PS_FORM_ROWS)
    z.q = l->ptr[(*next)++];
  if (forms & PS_FORM_COLS)
    z.qt = l->ptr[(*next)++];
  return z;
}

void ps__quantizer_see(ps__quantizer *z, const void *x, size_t n) {
  enum { PIECE = 1024 };
  uint32_t piece[PIECE], most = 0;
  for (size_t i = 0; i < n; i += PIECE) {
    const size_t m = n - i < PIECE ? n - i : PIECE;
    ps__load_f32((float *)piece, ps__celem(x, z->dt, i), z->dt, m);
    for (size_t j = 0; j < m; j++) {
      const uint32_t size = piece[j] & 0x7fffffffu;
      most = size > most ? size : most;
    }
  }
  uint32_t now = atomic_load(&z->amax);
  while (now < most && !atomic_compare_exchange_weak(&z->amax, &now, most))
    ;
}

void ps__quantizer_ready(ps__quantizer *z) {
  const uint32_t bits[2] = {ps__fp8_scale_bits(z->amax, z->dt_q), z->amax};
  memcpy(z->scale, bits, sizeof bits);
  z->inverse = 1.0f / z->scale[0];
}

/* A piece of a row: values in fp32, scaled, then rounded. */
static void quantize_piece(const ps__quantizer *z, uint8_t *q, const void *x, size_t n) {
  float value[256];
  ps__load_f32(value, x, z->dt, n);
  for (size_t i = 0; i < n; i++)
    value[i] *= z->inverse;
  ps__store_f32(q, z->dt_q, value, n);
}

void ps__quantizer_put(const ps__quantizer *z, const void *x, int64_t first, int64_t n) {
  uint8_t piece[PS__QUANTIZE_ROWS][256];
  for (size_t c = 0; c < z->cols; c += 256) {
    const size_t m = z->cols - c < 256 ? z->cols - c : 256;
    for (int64_t r = 0; r < n; r++) {
      quantize_piece(z, piece[r], ps__celem(x, z->dt, (size_t)r * z->cols + c), m);
      if (z->q)
        memcpy(z->q + (size_t)(first + r) * z->cols + c, piece[r], m);
    }
    for (size_t i = 0; z->qt && i < m; i++) {
      uint8_t *column = z->qt + (c + i) * z->rows + (size_t)first;
      for (int64_t r = 0; r < n; r++)
        column[r] = piece[r][i];
    }
  }
}

ps_status ps__check_forms(uint32_t dt, uint32_t dt_q, uint32_t forms, const char *op) {
  if (dt >= PS_N_DTYPES)
    return ps__fail(PS_EINVAL, "%s: dt is %u: neither fp32 nor bf16", op, dt);
  if (dt_q != PS__E4M3 && dt_q != PS__E5M2)
    return ps__fail(PS_EINVAL, "%s: dt_q is %u: neither e4m3 nor e5m2", op, dt_q);
  if (!forms || forms & ~(uint32_t)(PS_FORM_ROWS | PS_FORM_COLS))
    return ps__fail(PS_EINVAL, "%s: forms is %u: PS_FORM_ROWS (1), PS_FORM_COLS (2) or both", op,
                    forms);
  return PS_OK;
}

/* ---- quantize -------------------------------------------------------------------------------- */

typedef struct quantize_job {
  ps__quantizer z;
  const void *x;
} quantize_job;

static const void *row(const quantize_job *j, int64_t r) {
  return ps__celem(j->x, j->z.dt, (size_t)r * j->z.cols);
}
static void see_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  quantize_job *j = arg;
  ps__quantizer_see(&j->z, row(j, first), (size_t)(end - first) * j->z.cols);
}
static void put_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const quantize_job *j = arg;
  ps__quantizer_put(&j->z, row(j, first), first, end - first);
}

ps_status ps__check_quantize(const ps__args_quantize *a, const char *op) {
  PS_TRY(ps__check_forms(a->dt, a->dt_q, a->forms, op));
  return a->rows && a->cols ? PS_OK
                            : ps__fail(PS_EINVAL, "%s: %u x %u elements: at least one is needed",
                                       op, a->rows, a->cols);
}

/* quantize
 * math    scale = {ps__fp8_scale_bits(amax), amax}; q[r,c] = qt[c,r] = x[r,c] / scale[0], rounded
 * shapes  x, q [rows,cols], qt [cols,rows]; no aliasing
 * bytes   2*rows*cols*sizeof(dt) + rows*cols a form.   determinism  bitwise: elementwise, a maximum
 * reference  tests/test_fp8.py: torch.float8_e4m3fn and torch.float8_e5m2 */
static ps_status quantize(const ps_launch *l) {
  const ps__args_quantize *a = l->args;
  PS_TRY(ps__check_quantize(a, "quantize"));
  uint32_t next = 1;
  quantize_job job = {.x = l->ptr[0]};
  job.z = ps__quantizer_of(l, &next, a->rows, a->cols, a->dt, a->dt_q, a->forms);
  ps__cpu_rows(l->exec, a->rows, PS__QUANTIZE_ROWS, see_task, &job);
  ps__quantizer_ready(&job.z);
  ps__cpu_rows(l->exec, a->rows, PS__QUANTIZE_ROWS, put_task, &job);
  return PS_OK;
}

static void bind_quantize(void *args, const ps__chunk_shape *chunk) {
  ps__args_quantize *a = args;
  if (!a->rows)
    a->rows = chunk->n_tokens;
}
static ps_work work_quantize(const void *args) {
  const ps__args_quantize *a = args;
  return ps__bytes_work((double)a->rows * a->cols *
                        (2.0 * (double)ps__dt_bytes(a->dt) + ps__n_forms(a->forms)));
}

const ps_kernel ps__k_quantize = {
    .name = "quantize",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {quantize, NULL},
    .info =
        &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_quantize, .bind = bind_quantize},
};
