/* quantize.c - tensors quantized to FP8 with one scale, which is a power of two. */
#include "kernels/cpu/quantize.h"
#include "core/fp8.h"
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

/* fp8_scale
 * math    scale = {ps__fp8_scale_bits(headroom * amax), amax}
 * shapes  x [rows,cols].   bytes  rows*cols*sizeof(dt).   determinism  bitwise: a maximum
 * reference  tests/test_fp8_ops.py */
ps_status ps__cpu_fp8_scale(const ps_launch *l) {
  const ps__args_fp8_scale *a = l->args;
  quantize_job job = {.x = l->ptr[0]};
  job.z = (ps__quantizer){
      .rows = a->rows, .cols = a->cols, .dt = a->dt, .dt_q = a->dt_q, .scale = l->ptr[1]};
  ps__cpu_rows(l->exec, a->rows, PS__QUANTIZE_ROWS, see_task, &job);
  ps__quantizer_ready(&job.z, a->headroom == 0.0f ? 1.0f : a->headroom);
  return PS_OK;
}

/* quantize
 * math    scale = {ps__fp8_scale_bits(amax), amax}, or given; q[r,c] = qt[c,r] = x[r,c] / scale[0],
 *         rounded and saturated
 * shapes  x, q [rows,cols], qt [cols,rows]; no aliasing
 * bytes   2*rows*cols*sizeof(dt) + rows*cols a form; with a given scale x is read once
 * determinism  bitwise: elementwise, a maximum, sums of integers
 * reference  tests/test_fp8_ops.py: torch.float8_e4m3fn and torch.float8_e5m2 */
ps_status ps__cpu_quantize(const ps_launch *l) {
  const ps__args_quantize *a = l->args;
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
