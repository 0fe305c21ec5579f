/* gemm.c - what the arguments of gemm mean and may be, and its work, on every backend. */
#include "kernels/ops.h"
#include "core/core.h"
#include "core/dtype.h"
#include <math.h>

ps__args_gemm ps__gemm_args(uint32_t m, uint32_t n, uint32_t k, bool trans_a, bool trans_b,
                            uint32_t dt) {
  return (ps__args_gemm){.m = m,
                         .n = n,
                         .k = k,
                         .lda = trans_a ? m : k,
                         .ldb = trans_b ? k : n,
                         .ldc = n,
                         .trans_a = trans_a,
                         .trans_b = trans_b,
                         .dt_a = (uint8_t)dt,
                         .dt_b = (uint8_t)dt,
                         .dt_c = (uint8_t)dt};
}

ps_status ps__check_gemm(const ps__args_gemm *a) {
  if (!(a->alpha > -INFINITY && a->alpha < INFINITY))
    return ps__fail(PS_EINVAL, "gemm: alpha is %g: it must be finite", (double)a->alpha);
  return PS_OK;
}

ps_work ps__work_gemm(const void *args) {
  const ps__args_gemm *a = args;
  const double flops = 2.0 * a->m * a->n * a->k;
  const double bytes = (double)ps__dtypes[a->dt_a].bytes *
                       ((double)a->m * a->k + (double)a->n * a->k + (double)a->m * a->n);
  return (ps_work){.flops = flops, .bytes = bytes, .model_flops = flops};
}
