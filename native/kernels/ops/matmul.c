/* matmul.c - rows of matrix products. */
#include "kernels/ops/row.h"
#include <math.h>

static ps_status check_gemm(const void *args, const char *op) {
  const ps__args_gemm *a = args;
  if (!(a->alpha > -INFINITY && a->alpha < INFINITY))
    return ps__fail(PS_EINVAL, "%s: alpha is %g: it must be finite", op, (double)a->alpha);
  return PS_OK;
}
/* The rows of a weight gradient's operands are summed over. */
static void bind_gemm(void *args, const ps__chunk_shape *chunk) {
  ps__args_gemm *g = args;
  *(g->trans_a ? &g->k : &g->m) = chunk->n_tokens;
  if (g->trans_a)
    g->accumulate = !chunk->first_grad;
}
PS__BIND_ROWS(bind_gemm_rows, ps__args_gemm, m)
static ps_work work_gemm(const void *args) {
  const ps__args_gemm *a = args;
  const double flops = 2.0 * a->m * a->n * a->k;
  const double bytes = (double)ps__dt_bytes(a->dt_a) *
                       ((double)a->m * a->k + (double)a->n * a->k + (double)a->m * a->n);
  return (ps_work){.flops = flops, .bytes = bytes, .model_flops = flops};
}

PS__OP(gemm, PS_CLASS_GEMM, check_gemm, .rate = PS__RATE_GEMM, .in_generation = &ps__k_gemm_rows,
       .work = work_gemm, .bind = bind_gemm, .scratch = {ps__cpu_scratch_gemm, NULL}, .blas = true,
       .tuned = PS_CUDA_FN(gemm_tuned), .tune = PS_CUDA_FN(tune_gemm));
PS__OP(gemm_rows, PS_CLASS_GEMM, check_gemm, .rate = PS__RATE_GEMM, .work = work_gemm,
       .bind = bind_gemm_rows, .tuned = PS_CUDA_FN(gemm_tuned), .tune = PS_CUDA_FN(tune_gemm));

/* ---- FP8 ------------------------------------------------------------------------------------- */

static ps_status check_gemm_fp8(const void *args, const char *op) {
  const ps__args_gemm_fp8 *a = args;
  if (!(a->alpha > -INFINITY && a->alpha < INFINITY))
    return ps__fail(PS_EINVAL, "%s: alpha is %g: it must be finite", op, (double)a->alpha);
  if (a->role > PS_GEMM_WGRAD)
    return ps__fail(PS_EINVAL, "%s: role is %u: 0 (forward), 1 (dX) or 2 (dW)", op, a->role);
  if ((a->dt_a != PS__E4M3 && a->dt_a != PS__E5M2) || a->dt_b != PS__E4M3 || a->dt_c >= PS_N_DTYPES)
    return ps__fail(PS_EINVAL,
                    "%s: dtypes %u x %u -> %u are no product: e4m3 or e5m2 x e4m3 -> bf16 or fp32 "
                    "is",
                    op, a->dt_a, a->dt_b, a->dt_c);
  if (a->accumulate && a->has_residual)
    return ps__fail(PS_EINVAL, "%s: accumulate and a residual at once: one addend a product", op);
  return PS_OK;
}
static void bind_gemm_fp8(void *args, const ps__chunk_shape *chunk) {
  ps__args_gemm_fp8 *g = args;
  const bool sums_rows = g->role == PS_GEMM_WGRAD;
  *(sums_rows ? &g->k : &g->m) = chunk->n_tokens;
  if (sums_rows)
    g->accumulate = !chunk->first_grad;
}
static ps_work work_gemm_fp8(const void *args) {
  const ps__args_gemm_fp8 *a = args;
  const double flops = 2.0 * a->m * a->n * a->k;
  const double bytes =
      (double)a->m * a->k + (double)a->n * a->k + (double)ps__dt_bytes(a->dt_c) * a->m * a->n;
  return (ps_work){.flops = flops, .bytes = bytes, .model_flops = flops};
}

PS__OP(gemm_fp8, PS_CLASS_GEMM, check_gemm_fp8, .rate = PS__RATE_GEMM_FP8, .work = work_gemm_fp8,
       .bind = bind_gemm_fp8, .scratch = {ps__cpu_scratch_gemm_fp8, NULL}, .blas = true,
       .tuned = PS_CUDA_FN(gemm_fp8_tuned), .tune = PS_CUDA_FN(tune_gemm_fp8));
