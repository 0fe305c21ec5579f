/* ops.c - the list of ops. */
#include "kernels/ops.h"
#include <string.h>

#define ADDRESS(op) &ps__k_##op,
static const ps_kernel *const ops[] = {PS__OPS(ADDRESS)};

const ps_kernel *ps__op_at(uint32_t i) { return i < sizeof ops / sizeof *ops ? ops[i] : NULL; }

const ps_kernel *ps__op_by_name(const char *name) {
  const ps_kernel *k;
  for (uint32_t i = 0; (k = ps__op_at(i)) && strcmp(k->name, name) != 0; i++)
    ;
  return k;
}

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
