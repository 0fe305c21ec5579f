/* op_families.h - for the files that make the cases of op_cases.c's table, each of a family of ops:
 * op_cases_layers.c, op_cases_products.c, op_cases_fp8.c, op_cases_moe.c, op_cases_delta.c,
 * op_cases_sinks.c and op_cases_mla.c. */
#ifndef PS_TESTS_OP_FAMILIES_H
#define PS_TESTS_OP_FAMILIES_H
#include "op_cases.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct op_table_visit {
  const op_entry *entry;
  op_sizes sizes;
  op_visit visit;
  void *user;
} visit;

/* ---- operands (op_cases.c) ------------------------------------------------------------------- */

static const op_tolerance exact = {0, 0, 0};

/* uniform over 0..1, from the seed of the last op_cases() */
double op_uniform(void);
/* n values of N(0, scale^2) */
op_operand op_drawn(uint32_t mode, uint32_t dt, uint64_t n, float scale, op_tolerance t);
/* n integers from lo on, below hi; small ones more often where @skewed */
op_operand op_ints(uint64_t n, int64_t lo, int64_t hi, bool skewed);

static inline op_operand out(uint32_t dt, uint64_t n, op_tolerance t) {
  return (op_operand){.mode = PS_WRITE, .dt = dt, .n = n, .tolerance = t};
}
static inline op_operand in(uint32_t dt, uint64_t n, float scale) {
  return op_drawn(PS_READ, dt, n, scale, exact);
}
/* added to where @add, else written alone */
static inline op_operand sum(uint32_t add, uint32_t dt, uint64_t n, op_tolerance t) {
  return add ? op_drawn(PS_READ_WRITE, dt, n, 1, t) : out(dt, n, t);
}

/* ---- cases ----------------------------------------------------------------------------------- */

static inline bool wanted(const visit *v, uint64_t most_elements) {
  return v->sizes != OP_SMALL || most_elements <= 300000;
}

/* Visits the case of these arguments and operands, with the name that @shape and what follows it
 * print, and frees the operands. */
void op_run(visit *v, const void *args, uint32_t args_bytes, const op_operand *operand, uint32_t n,
            const char *shape, ...);
#define CASE(v, args, n, operands, ...) op_run(v, args, sizeof *(args), operands, n, __VA_ARGS__)
/* every shape of test[], or the one of bench[] */
#define EACH(s, v, test, bench)                                                                    \
  for (size_t s##_i = 0; s##_i < ((v)->sizes == OP_BENCH ? sizeof bench / sizeof *bench            \
                                                         : sizeof test / sizeof *test);            \
       s##_i++)                                                                                    \
    for (const uint32_t *s = (v)->sizes == OP_BENCH ? bench[s##_i] : test[s##_i]; s; s = NULL)

/* ---- tolerances of several families ---------------------------------------------------------- */

/* Sums over n rows in two orders, of terms of both signs: depth of at most 300 additions of
 * magnitude up to the sum of all terms' sizes, 0.64 n where the largest result is about 3
 * sqrt(n): 300 * 2^-24 * 0.2 sqrt(n), twice; errors being random, a tenth. */
static inline op_tolerance row_sums(uint32_t dt, double n) {
  return (op_tolerance){dt != PS_F32, 4e-7, 1e-6 + 8e-7 * sqrt(n)};
}
/* 12288 columns: 100 additions deep at most, 6e-6 of the mean square, half of that in rstd */
static inline op_tolerance norm_tolerance(uint32_t dt) {
  return (op_tolerance){dt != PS_F32, 3e-6, 3e-6};
}
/* fp32: exp 2 ulp, quotient and products; 1 + x(1 - sig) cancels near x = -1.28: of the largest.
 * gelu's exponent is a polynomial, 3 * 2^-24 off for each unit of its size, and counts up to 17,
 * where sig is 1. bf16: exp within 1e-5 */
static inline op_tolerance glu_tolerance(uint32_t dt, uint32_t activation) {
  return dt != PS_F32 ? (op_tolerance){1, 2e-5, 2e-6}
                      : (op_tolerance){0, activation == PS_ACTIVATION_SILU ? 1e-6 : 4e-6, 2e-7};
}

/* Forms of a product: what is added to it, and whether it is stored in fp32. */
enum { PLAIN, ACCUMULATE, BIAS, RESIDUAL, BOTH, TO_F32, N_FORMS };

/* ---- the families: the table's op_entry.cases ------------------------------------------------ */

/* op_cases_layers.c */
void op_rmsnorm_fwd(visit *v, uint32_t dt);
void op_rmsnorm_bwd(visit *v, uint32_t dt);
void op_glu_fwd(visit *v, uint32_t dt);
void op_glu_bwd(visit *v, uint32_t dt);
void op_layer_scale_fwd(visit *v, uint32_t dt);
void op_layer_scale_bwd(visit *v, uint32_t dt);
void op_qkv_split_fwd(visit *v, uint32_t dt);
void op_qkv_split_bwd(visit *v, uint32_t dt);
void op_embed_fwd(visit *v, uint32_t dt);
void op_embed_bwd(visit *v, uint32_t dt);
void op_cross_entropy(visit *v, uint32_t dt);
void op_score_loss(visit *v, uint32_t dt);
void op_attention_cached(visit *v, uint32_t dt);
/* op_cases_products.c */
void op_sumsq(visit *v, uint32_t dt);
void op_accumulate(visit *v, uint32_t dt);
void op_accumulate_sumsq(visit *v, uint32_t dt);
void op_fill_zero(visit *v, uint32_t dt);
void op_copy_bytes(visit *v, uint32_t dt);
void op_dequantize(visit *v, uint32_t dt);
void op_colsum(visit *v, uint32_t dt);
void op_gemm(visit *v, uint32_t dt);
void op_gemm_rows(visit *v, uint32_t dt);
/* op_cases_moe.c */
void op_mla_turn(visit *v, uint32_t dt);
void op_mla_kv_fwd(visit *v, uint32_t dt);
void op_mla_kv_bwd(visit *v, uint32_t dt);
void op_mla_cut(visit *v, uint32_t dt);
void op_mla_pad(visit *v, uint32_t dt);
void op_moe_route(visit *v, uint32_t dt);
void op_moe_route_bwd(visit *v, uint32_t dt);
void op_moe_index(visit *v, uint32_t dt);
void op_moe_gather(visit *v, uint32_t dt);
void op_moe_combine(visit *v, uint32_t dt);
void op_gemm_grouped(visit *v, uint32_t dt);
void op_gemm_grouped_rows(visit *v, uint32_t dt);
void op_gemm_grouped_slots(visit *v, uint32_t dt);
void op_moe_fetch(visit *v, uint32_t dt);
void op_moe_glu(visit *v, uint32_t dt);
void op_moe_glu_bwd(visit *v, uint32_t dt);
void op_moe_scale(visit *v, uint32_t dt);
void op_moe_scale_bwd(visit *v, uint32_t dt);
void op_add_bias(visit *v, uint32_t dt);
void op_moe_clamp_glu(visit *v, uint32_t dt);
void op_moe_clamp_glu_bwd(visit *v, uint32_t dt);
void op_moe_bias_dot(visit *v, uint32_t dt);
void op_moe_bias_sum(visit *v, uint32_t dt);
/* op_cases_delta.c */
void op_conv_fwd(visit *v, uint32_t dt);
void op_conv_bwd(visit *v, uint32_t dt);
void op_conv_cached(visit *v, uint32_t dt);
void op_delta_fwd(visit *v, uint32_t dt);
void op_delta_bwd(visit *v, uint32_t dt);
void op_delta_cached(visit *v, uint32_t dt);
void op_gated_norm_fwd(visit *v, uint32_t dt);
void op_gated_norm_bwd(visit *v, uint32_t dt);
/* op_cases_sinks.c */
void op_attention_sink(visit *v, uint32_t dt);
void op_attention_sink_bwd(visit *v, uint32_t dt);
void op_heads_split(visit *v, uint32_t dt);
void op_heads_join(visit *v, uint32_t dt);
void op_sigmoid_gate_fwd(visit *v, uint32_t dt);
void op_sigmoid_gate_bwd(visit *v, uint32_t dt);
/* op_cases_fp8.c */
void op_quantize(visit *v, uint32_t dt);
void op_fp8_scale(visit *v, uint32_t dt);
void op_rmsnorm_quantize(visit *v, uint32_t dt);
void op_glu_quantize(visit *v, uint32_t dt);
void op_glu_bwd_quantize(visit *v, uint32_t dt);
void op_gemm_fp8(visit *v, uint32_t dt);
#endif
