/* layer_scale.c - a block's output, or its gradient, times a number.
 *
 * math    x[r,c] = round(x[r,c] * s), in place. The number is not trained: its gradient is 0.
 * shapes  x [rows,cols] and s [1] in dt
 * bytes   2*rows*cols*sizeof(dt).   determinism  bitwise: elementwise
 * reference  tests/test_op_cases.py */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include <string.h>

typedef struct scale_job {
  const ps__args_layer_scale *a;
  void *x;
  float by;
} scale_job;

PS_CLONES static void scale_elements(void *x, uint32_t dt, size_t n, float by) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(x, dt, i, n, ps__v_read(x, dt, i, n, 0.0f) * by);
}

static void scale_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const scale_job *j = arg;
  const size_t cols = j->a->cols;
  scale_elements(ps__elem(j->x, j->a->dt, (size_t)first * cols), j->a->dt,
                 (size_t)(end - first) * cols, j->by);
}

static void scale(const ps_launch *l) {
  const ps__args_layer_scale *a = l->args;
  scale_job j = {.a = a, .x = l->ptr[0]};
  ps__load_f32(&j.by, l->ptr[1], a->dt, 1);
  ps__cpu_rows(l->exec, a->rows, ps__block_rows(a->cols), scale_rows, &j);
}

ps_status ps__cpu_layer_scale_fwd(const ps_launch *l) {
  scale(l);
  return PS_OK;
}

ps_status ps__cpu_layer_scale_bwd(const ps_launch *l) {
  const ps__args_layer_scale *a = l->args;
  scale(l);
  if (!a->accumulate_ds)
    memset(l->ptr[2], 0, ps__dt_bytes(a->dt));
  return PS_OK;
}
