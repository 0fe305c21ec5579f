/* matmul_rows.c - products whose rows do not depend on each other, for generation.
 *
 * OpenBLAS adds the terms of a row in an order that depends on how many rows there are, and on
 * which of them it is. Here each element is one dot product in a fixed order, so the tokens of a
 * prompt are the same whatever other prompts are in its batch. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"

enum { ROWS_M = 4, ROWS_N = 4, ROWS_TASK = 16 }; /* a register tile; columns of C a task has */

typedef struct rows_product {
  const ps__args_gemm *a;
  const void *x, *w, *bias, *residual;
  void *y;
} rows_product;

/* out[i][j] = sum over k of x[i][k] w[j][k]: lane l adds the terms k = l, l+16, ... in order, then
 * the lanes are added as a tree. */
PS_VEC void dots_add(ps__v sum[ROWS_M][ROWS_N], const ps__v *b, uint32_t i, const ps__v *a,
                     const uint32_t n_n) {
#pragma GCC unroll 4
  for (uint32_t j = 0; j < n_n; j++)
    sum[i][j] += *a * b[j];
}
PS_VEC void dots_of(float out[ROWS_M][ROWS_N], const void *const *x, const void *const *w,
                    const uint32_t n_m, const uint32_t n_n, size_t k, uint32_t dt) {
  ps__v sum[ROWS_M][ROWS_N], b[ROWS_N], a;
  size_t at = 0;
#pragma GCC unroll 4
  for (uint32_t i = 0; i < n_m; i++)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < n_n; j++)
      sum[i][j] = ps__v_set(0.0f);
  for (; at + PS_LANES <= k; at += PS_LANES) {
#pragma GCC unroll 4
    for (uint32_t j = 0; j < n_n; j++)
      b[j] = ps__v_get(w[j], dt, at);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n_m; i++) {
      a = ps__v_get(x[i], dt, at);
      dots_add(sum, b, i, &a, n_n);
    }
  }
  if (at < k) {
    for (uint32_t j = 0; j < n_n; j++)
      b[j] = ps__v_read(w[j], dt, at, k, 0.0f);
    for (uint32_t i = 0; i < n_m; i++) {
      a = ps__v_read(x[i], dt, at, k, 0.0f);
      dots_add(sum, b, i, &a, n_n);
    }
  }
  for (uint32_t i = 0; i < n_m; i++)
    for (uint32_t j = 0; j < n_n; j++)
      out[i][j] = ps__v_sum(sum[i][j]);
}
/* Missing rows and columns of the tile repeat the last one, but for a single row, which is most of
 * decoding. */
PS_CLONES static void rows_dots(float out[ROWS_M][ROWS_N], const void *const *x,
                                const void *const *w, uint32_t n_m, size_t k, uint32_t dt) {
  if (n_m == 1)
    PS__BY_DTYPE(dt, DT, dots_of(out, x, w, 1, ROWS_N, k, DT));
  else
    PS__BY_DTYPE(dt, DT, dots_of(out, x, w, ROWS_M, ROWS_N, k, DT));
}

static void rows_tile(const rows_product *p, uint32_t i0, uint32_t j0) {
  const ps__args_gemm *a = p->a;
  const uint32_t m = a->m - i0 < ROWS_M ? a->m - i0 : ROWS_M,
                 n = a->n - j0 < ROWS_N ? a->n - j0 : ROWS_N;
  const void *x[ROWS_M], *w[ROWS_N];
  float sum[ROWS_M][ROWS_N];
  for (uint32_t i = 0; i < ROWS_M; i++)
    x[i] = ps__celem(p->x, a->dt_a, (size_t)(i0 + (i < m ? i : m - 1)) * a->lda);
  for (uint32_t j = 0; j < ROWS_N; j++)
    w[j] = ps__celem(p->w, a->dt_b, (size_t)(j0 + (j < n ? j : n - 1)) * a->ldb);
  rows_dots(sum, x, w, m, a->k, a->dt_a);
  for (uint32_t i = 0; i < m; i++)
    for (uint32_t j = 0; j < n; j++) {
      const size_t at = (size_t)(i0 + i) * a->ldc + j0 + j;
      float v = ps__gemm_alpha(a) * sum[i][j];
      if (p->bias)
        v += ps__load1_f32(p->bias, a->dt_c, j0 + j);
      if (a->accumulate)
        v += ps__load1_f32(p->y, a->dt_c, at);
      if (p->residual)
        v += ps__load1_f32(p->residual, a->dt_c, at);
      ps__store1_f32(p->y, a->dt_c, at, v);
    }
}

void ps__cpu_gemm_row(void *y, const void *x, const void *w, uint32_t n, uint32_t k, uint32_t dt) {
  const ps__args_gemm a = ps__gemm_args(1, n, k, false, true, dt);
  const rows_product p = {.a = &a, .x = x, .w = w, .y = y};
  for (uint32_t j = 0; j < n; j += ROWS_N)
    rows_tile(&p, 0, j);
}

static void rows_task(void *arg, int64_t task, uint32_t worker) {
  const rows_product *p = arg;
  const uint32_t first = (uint32_t)task * ROWS_TASK,
                 end = first + ROWS_TASK < p->a->n ? first + ROWS_TASK : p->a->n;
  for (uint32_t i = 0; i < p->a->m; i += ROWS_M)
    for (uint32_t j = first; j < end; j += ROWS_N)
      rows_tile(p, i, j);
}

/* gemm_rows
 * math    gemm's, with op(A) = A and op(B) = B^T; a row of C is a function of the same row of A,
 *         and of C, alone
 * bytes   B once while m <= 4, else once for each 4 rows from the cache: a task's 16 rows of B
 * determinism  bitwise, and for any m.   reference  gemm's */
ps_status ps__cpu_gemm_rows(const ps_launch *l) {
  const ps__args_gemm *a = l->args;
  if (!a->m || !a->n || !a->k || a->lda < a->k || a->ldb < a->k || a->ldc < a->n || a->trans_a ||
      !a->trans_b || a->dt_a != a->dt_b)
    return ps__fail(PS_EINVAL,
                    "gemm_rows %ux%ux%u, leading dimensions %u, %u, %u: it computes A B^T alone, "
                    "of one dtype, with whole rows",
                    a->m, a->n, a->k, a->lda, a->ldb, a->ldc);
  rows_product p = {.a = a, .x = l->ptr[0], .w = l->ptr[1], .y = l->ptr[2]};
  uint32_t next = 3;
  if (a->has_bias)
    p.bias = l->ptr[next++];
  if (a->has_residual)
    p.residual = l->ptr[next++];
  ps__pool_run(((const ps__cpu_exec *)l->exec)->pool, (a->n + ROWS_TASK - 1) / ROWS_TASK, rows_task,
               &p);
  return PS_OK;
}
