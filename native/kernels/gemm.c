/* gemm.c - the arguments of products. */
#include "kernels/ops.h"

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

ps__args_gemm ps__gemm_of_fp8(const ps__args_gemm_fp8 *a) {
  ps__args_gemm g = ps__gemm_args(a->m, a->n, a->k, false, true, a->dt_a);
  g.accumulate = a->accumulate;
  g.has_bias = a->has_bias;
  g.has_residual = a->has_residual;
  g.dt_b = a->dt_b;
  g.dt_c = a->dt_c;
  return g;
}
