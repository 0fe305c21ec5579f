/* rmsnorm.c - RMSNorm over rows, forward and backward (Zhang & Sennrich 2019, arXiv 1910.07467). */
#include "kernels/cpu/quantize.h"
#include "core/vec.h"
#include <math.h>

typedef struct norm_job {
  const ps__args_rmsnorm *a;
  const char *x, *w, *dy, *residual;
  char *y, *dx;
  float *partial; /* [tiles, cols]: dw of each tile of rows */
} norm_job;

/* w + weight_offset; @shifted, a constant, says whether there is an offset: + 0 would turn -0. */
#define weight(w) (shifted ? (w) + offset : (w))

/* sums[0] = sum x^2, sums[1] = sum dy*(w + offset)*x (0 when dy is NULL). Lane j of accumulator q
 * adds elements 64i + 16q + j. */
PS_VEC void norm_sums(float sums[2], const char *x, const char *w, const char *dy, uint32_t dt,
                      size_t cols, bool shifted, float offset) {
  ps__v ss[4] = {{0}}, sg[4] = {{0}};
  size_t i = 0;
  for (; i + 4 * PS_LANES <= cols; i += 4 * PS_LANES) {
    for (int q = 0; q < 4; q++) {
      size_t at = i + (size_t)q * PS_LANES;
      ps__v v = ps__v_get(x, dt, at);
      ss[q] += v * v;
      if (dy)
        sg[q] += ps__v_get(dy, dt, at) * weight(ps__v_get(w, dt, at)) * v;
    }
  }
  for (; i < cols; i += PS_LANES) {
    ps__v v = ps__v_read(x, dt, i, cols, 0.0f);
    ss[0] += v * v;
    if (dy)
      sg[0] += ps__v_read(dy, dt, i, cols, 0.0f) * weight(ps__v_read(w, dt, i, cols, 0.0f)) * v;
  }
  sums[0] = ps__v_sum((ss[0] + ss[1]) + (ss[2] + ss[3]));
  sums[1] = ps__v_sum((sg[0] + sg[1]) + (sg[2] + sg[3]));
}

PS_VEC void norm_fwd_rows(const norm_job *j, int64_t first, int64_t end, uint32_t dt, bool shifted,
                          bool residual) {
  size_t cols = j->a->cols, bytes = cols * ps__dt_bytes(dt);
  const float offset = j->a->weight_offset;
  for (int64_t r = first; r < end; r++) {
    const char *x = j->x + (size_t)r * bytes;
    char *y = j->y + (size_t)r * bytes;
    float sums[2];
    norm_sums(sums, x, NULL, NULL, dt, cols, false, 0.0f);
    float rstd = 1.0f / sqrtf(sums[0] / (float)cols + j->a->eps);
    for (size_t i = 0; i < cols; i += PS_LANES) {
      ps__v v =
          ps__v_read(x, dt, i, cols, 0.0f) * rstd * weight(ps__v_read(j->w, dt, i, cols, 0.0f));
      if (residual)
        v += ps__v_read(j->residual + (size_t)r * bytes, dt, i, cols, 0.0f);
      ps__v_write(y, dt, i, cols, v);
    }
  }
}

/* Apart, so that an offset or a residual costs nothing where there is none. */
PS_CLONES static void norm_fwd_plain(const norm_job *j, int64_t first, int64_t end) {
  PS__BY_DTYPE(j->a->dt, DT, norm_fwd_rows(j, first, end, DT, false, false));
}

PS_CLONES static void norm_fwd_more(const norm_job *j, int64_t first, int64_t end) {
  PS__BY_DTYPE(j->a->dt, DT, norm_fwd_rows(j, first, end, DT, true, j->residual != NULL));
}

static void norm_fwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const norm_job *j = arg;
  if (j->a->weight_offset == 0.0f && !j->residual)
    norm_fwd_plain(j, first, end);
  else
    norm_fwd_more(j, first, end);
}

/* rmsnorm_fwd
 * math    y[r,c] = x[r,c] * rstd[r] * (w[c] + weight_offset) (+ residual[r,c]), rstd[r] =
 *         1/sqrt(mean_c(x^2) + eps); fp32 inside, one rounding at the store
 * shapes  x, y, residual [rows,cols], w [cols], all of dt; y may not alias x
 * bytes   2 (with a residual 3) *rows*cols*sizeof(dt) of memory, the second read of a row is from
 *         cache
 * determinism  bitwise: a row's sum has 64 lanes and a fixed tree, whatever thread and
 *              instruction set runs it */
ps_status ps__cpu_rmsnorm_fwd(const ps_launch *l) {
  const ps__args_rmsnorm *a = l->args;
  norm_job job = {.a = a,
                  .x = l->ptr[0],
                  .w = l->ptr[1],
                  .y = l->ptr[2],
                  .residual = a->has_residual ? l->ptr[3] : NULL};
  ps__cpu_rows(l->exec, a->rows, ps__block_rows(a->cols), norm_fwd_task, &job);
  return PS_OK;
}

PS_VEC void norm_bwd_rows(const norm_job *j, int64_t first, int64_t end, float *dw, uint32_t dt,
                          bool shifted) {
  size_t cols = j->a->cols, bytes = cols * ps__dt_bytes(dt);
  bool add = j->a->add_dx != 0;
  const float offset = j->a->weight_offset;
  for (int64_t r = first; r < end; r++) {
    const char *x = j->x + (size_t)r * bytes, *dy = j->dy + (size_t)r * bytes;
    char *dx = j->dx + (size_t)r * bytes;
    float sums[2];
    norm_sums(sums, x, j->w, dy, dt, cols, shifted, offset);
    float rstd = 1.0f / sqrtf(sums[0] / (float)cols + j->a->eps);
    float mean = sums[1] * rstd / (float)cols;
    for (size_t i = 0; i < cols; i += PS_LANES) {
      ps__v g = ps__v_read(dy, dt, i, cols, 0.0f), xh = ps__v_read(x, dt, i, cols, 0.0f) * rstd;
      ps__v d = (g * weight(ps__v_read(j->w, dt, i, cols, 0.0f)) - xh * mean) * rstd;
      if (add)
        d += ps__v_read(dx, dt, i, cols, 0.0f);
      ps__v_write(dx, dt, i, cols, d);
      ps__v_write(dw, PS_F32, i, cols, ps__v_read(dw, PS_F32, i, cols, 0.0f) + g * xh);
    }
  }
}

/* Apart, so that an offset costs nothing where there is none. */
PS_CLONES static void norm_bwd_plain(const norm_job *j, int64_t first, int64_t end, float *dw) {
  PS__BY_DTYPE(j->a->dt, DT, norm_bwd_rows(j, first, end, dw, DT, false));
}

PS_CLONES static void norm_bwd_more(const norm_job *j, int64_t first, int64_t end, float *dw) {
  PS__BY_DTYPE(j->a->dt, DT, norm_bwd_rows(j, first, end, dw, DT, true));
}

static void norm_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const norm_job *j = arg;
  size_t cols = j->a->cols;
  float *dw = j->partial + (size_t)(first / ps__row_tile_rows(j->a->rows)) * cols;
  memset(dw, 0, cols * sizeof *dw);
  if (j->a->weight_offset == 0.0f)
    norm_bwd_plain(j, first, end, dw);
  else
    norm_bwd_more(j, first, end, dw);
}

/* Partial sums of all tiles lie in worker 0's scratch. */
size_t ps__cpu_scratch_rmsnorm_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_rmsnorm *a = args;
  return ps__round_up((size_t)ps__n_row_tiles(a->rows) * a->cols * sizeof(float), 64);
}

/* rmsnorm_bwd
 * math    xh = x*rstd; g = dy*(w + weight_offset); d = rstd*(g - xh*mean_c(g*xh));
 *         dx = add_dx ? dx + d : d; dw (+)= sum_r dy*xh
 * shapes  x, dy, dx [rows,cols], w, dw [cols], all of dt; dx aliases neither x nor dy
 * bytes   3 or 4 (add_dx) * rows*cols*sizeof(dt) of memory; scratch: at most 64 tiles * cols fp32
 * determinism  bitwise: rows are cut in tiles by shape (cpu.h), dw adds rows in order in a
 *              tile, then tiles in order */
ps_status ps__cpu_rmsnorm_bwd(const ps_launch *l) {
  const ps__args_rmsnorm *a = l->args;
  const ps__cpu_exec *exec = l->exec;
  norm_job job = {.a = a,
                  .x = l->ptr[0],
                  .w = l->ptr[1],
                  .dy = l->ptr[2],
                  .dx = l->ptr[3],
                  .partial = ps__scratch(exec, 0)};
  ps__cpu_rows(exec, a->rows, ps__row_tile_rows(a->rows), norm_bwd_task, &job);
  ps__add_partials(exec, l->ptr[4], a->dt, job.partial, ps__n_row_tiles(a->rows), a->cols,
                   a->accumulate_dw);
  return PS_OK;
}

/* ---- forward, quantized ---------------------------------------------------------------------- */

typedef struct norm_quantize_job {
  norm_job norm;
  ps__quantizer z;
  const ps__cpu_exec *exec;
} norm_quantize_job;

/* Rows [first, end) of y, in the worker's scratch. */
static const void *norm_block(const norm_quantize_job *j, int64_t first, int64_t end,
                              uint32_t worker) {
  norm_job part = j->norm;
  part.x += (size_t)first * part.a->cols * ps__dt_bytes(part.a->dt);
  part.y = ps__scratch(j->exec, worker);
  norm_fwd_task(&part, 0, end - first, worker);
  return part.y;
}
static void norm_see_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  norm_quantize_job *j = arg;
  ps__quantizer_see(&j->z, norm_block(j, first, end, worker),
                    (size_t)(end - first) * j->norm.a->cols);
}
static void norm_put_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const norm_quantize_job *j = arg;
  ps__quantizer_put(&j->z, norm_block(j, first, end, worker), first, end - first);
}

size_t ps__cpu_scratch_rmsnorm_quantize(const void *args, const ps__scratch_target *target) {
  const ps__args_rmsnorm_quantize *a = args;
  return ps__round_up(PS__QUANTIZE_ROWS * (size_t)a->norm.cols * ps__dt_bytes(a->norm.dt), 64);
}

/* rmsnorm_quantize
 * math    q, qt = quantize(rmsnorm_fwd(x, w)), to their bits
 * shapes  x, q [rows,cols], qt [cols,rows], w [cols]; no aliasing
 * bytes   2*rows*cols*sizeof(dt) + rows*cols a form; scratch: 16 rows a worker
 * determinism  as rmsnorm_fwd's and quantize's */
ps_status ps__cpu_rmsnorm_quantize(const ps_launch *l) {
  const ps__args_rmsnorm_quantize *a = l->args;
  uint32_t next = 2;
  norm_quantize_job job = {.norm = {.a = &a->norm, .x = l->ptr[0], .w = l->ptr[1]},
                           .exec = l->exec};
  job.z = ps__quantizer_of(l, &next, a->norm.rows, a->norm.cols, a->norm.dt, a->dt_q, a->forms);
  job.z.flushed = ps__flushed_of(l, next, a->count);
  ps__cpu_rows(l->exec, a->norm.rows, PS__QUANTIZE_ROWS, norm_see_task, &job);
  ps__quantizer_ready(&job.z, 1);
  ps__cpu_rows(l->exec, a->norm.rows, PS__QUANTIZE_ROWS, norm_put_task, &job);
  return PS_OK;
}
