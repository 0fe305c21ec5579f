/* dequantize.c - a frozen base from blocks to what products read. */
#include "core/blocks.h"
#include "kernels/cpu/cpu.h"

enum { PIECE = 1024 }; /* elements */

typedef struct dequantize_job {
  const char *blocks;
  char *w;
  ps__storage as;
  uint32_t dt;
} dequantize_job;

static void dequantize_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const dequantize_job *j = arg;
  float x[PIECE];
  for (int64_t i = first; i < end; i += PIECE) {
    const size_t n = (size_t)(end - i < PIECE ? end - i : PIECE);
    ps__blocks_dequantize(x, j->as, j->blocks + ps__stored_at(j->as, (uint64_t)i), n);
    ps__store_f32(ps__elem(j->w, j->dt, (size_t)i), j->dt, x, n);
  }
}

/* dequantize
 * math    w[i] = q[i] * scale of its block, in fp32
 * shapes  blocks of n elements (core/blocks.h), w [n]; no aliasing
 * bytes   of the blocks, and n*sizeof(dt).   determinism  bitwise: elementwise
 * reference  tests/test_op_cases.py */
ps_status ps__cpu_dequantize(const ps_launch *l) {
  const ps__args_dequantize *a = l->args;
  dequantize_job j = {l->ptr[0], l->ptr[1], ps__base_storage(a->base, a->dt), a->dt};
  ps__cpu_rows(l->exec, (int64_t)a->n, 16 * PIECE, dequantize_task, &j);
  return PS_OK;
}
