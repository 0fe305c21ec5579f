/* quantize.c - tensors quantized to FP8 with one scale, which is a power of two. */
#include "kernels/cpu/quantize.h"
#include "core/fp8.h"
#include <math.h>
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

_Atomic uint64_t *ps__flushed_of(const ps_launch *l, uint32_t next, uint32_t count) {
  return count ? (_Atomic uint64_t *)l->ptr[next] + (count - 1) : NULL;
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

void ps__quantizer_ready(ps__quantizer *z, float headroom) {
  const uint32_t amax = z->amax;
  float most;
  uint32_t bits[2] = {0, amax};
  memcpy(&most, &amax, sizeof most);
  most *= headroom;
  memcpy(bits, &most, sizeof most);
  bits[0] = ps__fp8_scale_bits(bits[0] & 0x7fffffffu, z->dt_q);
  memcpy(z->scale, bits, sizeof bits);
}

/* A piece of a row: values in fp32, scaled, then rounded. Returns how many became zero. */
static size_t quantize_piece(const ps__quantizer *z, float inverse, uint8_t *q, const void *x,
                             size_t n) {
  float value[256];
  size_t flushed = 0;
  ps__load_f32(value, x, z->dt, n);
  for (size_t i = 0; i < n; i++)
    value[i] *= inverse;
  ps__store_f32(q, z->dt_q, value, n);
  if (!z->flushed)
    return 0;
  ps__load_f32(value, x, z->dt, n);
  for (size_t i = 0; i < n; i++)
    flushed += value[i] != 0.0f && (q[i] & 0x7f) == 0;
  return flushed;
}

void ps__quantizer_put(const ps__quantizer *z, const void *x, int64_t first, int64_t n) {
  uint8_t piece[PS__QUANTIZE_ROWS][256];
  const float inverse = 1.0f / z->scale[0];
  size_t flushed = 0;
  for (size_t c = 0; c < z->cols; c += 256) {
    const size_t m = z->cols - c < 256 ? z->cols - c : 256;
    for (int64_t r = 0; r < n; r++) {
      flushed +=
          quantize_piece(z, inverse, piece[r], ps__celem(x, z->dt, (size_t)r * z->cols + c), m);
      if (z->q)
        memcpy(z->q + (size_t)(first + r) * z->cols + c, piece[r], m);
    }
    for (size_t i = 0; z->qt && i < m; i++) {
      uint8_t *column = z->qt + (c + i) * z->rows + (size_t)first;
      for (int64_t r = 0; r < n; r++)
        column[r] = piece[r][i];
    }
  }
  if (flushed)
    atomic_fetch_add(z->flushed, flushed);
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

static ps_status check_size(uint32_t rows, uint32_t cols, const char *op) {
  return rows && cols
             ? PS_OK
             : ps__fail(PS_EINVAL, "%s: %u x %u elements: at least one is needed", op, rows, cols);
}
ps_status ps__check_quantize(const ps__args_quantize *a, const char *op) {
  PS_TRY(ps__check_forms(a->dt, a->dt_q, a->forms, op));
  return check_size(a->rows, a->cols, op);
}
ps_status ps__check_fp8_scale(const ps__args_fp8_scale *a) {
  PS_TRY(ps__check_forms(a->dt, a->dt_q, PS_FORM_ROWS, "fp8_scale"));
  if (!(a->headroom >= 0 && a->headroom < INFINITY))
    return ps__fail(PS_EINVAL, "fp8_scale: headroom is %g: a power of two is needed",
                    (double)a->headroom);
  return check_size(a->rows, a->cols, "fp8_scale");
}

/* fp8_scale
 * math    scale = {ps__fp8_scale_bits(headroom * amax), amax}
 * shapes  x [rows,cols].   bytes  rows*cols*sizeof(dt).   determinism  bitwise: a maximum
 * reference  tests/test_fp8_ops.py */
static ps_status fp8_scale(const ps_launch *l) {
  const ps__args_fp8_scale *a = l->args;
  PS_TRY(ps__check_fp8_scale(a));
  quantize_job job = {.x = l->ptr[0]};
  job.z = (ps__quantizer){
      .rows = a->rows, .cols = a->cols, .dt = a->dt, .dt_q = a->dt_q, .scale = l->ptr[1]};
  ps__cpu_rows(l->exec, a->rows, PS__QUANTIZE_ROWS, see_task, &job);
  ps__quantizer_ready(&job.z, a->headroom == 0.0f ? 1.0f : a->headroom);
  return PS_OK;
}

static void bind_fp8_scale(void *args, const ps__chunk_shape *chunk) {
  ps__args_fp8_scale *a = args;
  if (!a->rows)
    a->rows = chunk->n_tokens;
}
static ps_work work_fp8_scale(const void *args) {
  const ps__args_fp8_scale *a = args;
  return ps__bytes_work((double)a->rows * a->cols * (double)ps__dt_bytes(a->dt));
}

const ps_kernel ps__k_fp8_scale = {
    .name = "fp8_scale",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {fp8_scale, PS_CUDA_FN(fp8_scale)},
    .info = &(
        const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_fp8_scale, .bind = bind_fp8_scale},
};

/* quantize
 * math    scale = {ps__fp8_scale_bits(amax), amax}, or given; q[r,c] = qt[c,r] = x[r,c] / scale[0],
 *         rounded and saturated
 * shapes  x, q [rows,cols], qt [cols,rows]; no aliasing
 * bytes   2*rows*cols*sizeof(dt) + rows*cols a form; with a given scale x is read once
 * determinism  bitwise: elementwise, a maximum, sums of integers
 * reference  tests/test_fp8_ops.py: torch.float8_e4m3fn and torch.float8_e5m2 */
static ps_status quantize(const ps_launch *l) {
  const ps__args_quantize *a = l->args;
  PS_TRY(ps__check_quantize(a, "quantize"));
  uint32_t next = 1;
  quantize_job job = {.x = l->ptr[0]};
  job.z = ps__quantizer_of(l, &next, a->rows, a->cols, a->dt, a->dt_q, a->forms);
  job.z.flushed = ps__flushed_of(l, next, a->count);
  if (!a->given) {
    ps__cpu_rows(l->exec, a->rows, PS__QUANTIZE_ROWS, see_task, &job);
    ps__quantizer_ready(&job.z, 1);
  }
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
  return ps__bytes_work(
      (double)a->rows * a->cols *
      ((a->given ? 1.0 : 2.0) * (double)ps__dt_bytes(a->dt) + ps__n_forms(a->forms)));
}

const ps_kernel ps__k_quantize = {
    .name = "quantize",
    .op_class = PS_CLASS_ELEMENTWISE,
    .fn = {quantize, PS_CUDA_FN(quantize)},
    .info =
        &(const ps__op_info){.rate = PS__RATE_MEMORY, .work = work_quantize, .bind = bind_quantize},
};
