/* op_cases.c - the table of op cases. How operands are drawn; the families' files have shapes,
 * arguments and tolerances (op_families.h). */
#include "op_families.h"
#include <stdarg.h>
#include <stdio.h>

/* ---- values ---------------------------------------------------------------------------------- */

static uint64_t seed_now = 1;
double op_uniform(void) {
  seed_now ^= seed_now << 13, seed_now ^= seed_now >> 7, seed_now ^= seed_now << 17;
  return (double)(seed_now >> 11) * 0x1p-53;
}
float op_normal(void) {
  return (float)((op_uniform() + op_uniform() + op_uniform() + op_uniform() - 2.0) * 1.7320508);
}
size_t op_dtype_bytes(uint32_t dt) {
  return dt == OP_F64 ? 8 : dt == OP_I32 ? 4 : dt == OP_U16 ? 2 : ps__dtypes[dt].bytes;
}
static bool is_fp8(uint32_t dt) { return dt >= PS__E4M3 && dt <= PS__E5M2; }
static double fp8_value(const uint8_t *p, uint32_t dt, uint64_t i) {
  float x;
  ps__dtypes[dt].to_f32(&x, p + i, 1);
  return (double)x;
}
double op_value(const void *p, uint32_t dt, uint64_t i) {
  return is_fp8(dt)     ? fp8_value(p, dt, i)
         : dt == OP_F64 ? ((const double *)p)[i]
         : dt == OP_I32 ? ((const int32_t *)p)[i]
         : dt == OP_U16 ? ((const uint16_t *)p)[i]
                        : ps__load1_f32(p, dt, i);
}
double op_ulp(double v, uint32_t dt) {
  static const int significand[] = {
      [PS_F32] = 24, [PS_BF16] = 8, [PS__E4M3] = 4, [PS__E5M2] = 3, [OP_F64] = 53};
  int e;
  frexp(v, &e);
  return ldexp(1.0, e - significand[dt]);
}

/* ---- operands -------------------------------------------------------------------------------- */

op_operand op_drawn(uint32_t mode, uint32_t dt, uint64_t n, float scale, op_tolerance t) {
  op_operand b = {mode, dt, n, malloc(n * op_dtype_bytes(dt) + 1), t};
  for (uint64_t i = 0; i < n; i++) {
    const float x = op_normal() * scale;
    if (is_fp8(dt))
      ps__dtypes[dt].from_f32((uint8_t *)b.init + i, &x, 1);
    else
      ps__store1_f32(b.init, dt, i, x);
  }
  return b;
}
op_operand op_ints(uint64_t n, int64_t lo, int64_t hi, bool skewed) {
  op_operand b = {PS_READ, OP_I32, n, malloc(n * 4 + 1), exact};
  for (uint64_t i = 0; i < n; i++) {
    const double u = op_uniform();
    ((int32_t *)b.init)[i] =
        (int32_t)(lo + (int64_t)((skewed ? u * u * u : u) * (double)(hi - lo)));
  }
  return b;
}

void op_run(visit *v, const void *args, uint32_t args_bytes, const op_operand *operand, uint32_t n,
            const char *shape, ...) {
  op_case c = {.kernel = v->entry->kernel, .args_bytes = args_bytes, .n_operands = n};
  va_list list;
  va_start(list, shape);
  vsnprintf(c.name, sizeof c.name, shape, list);
  va_end(list);
  memcpy(c.args, args, args_bytes);
  memcpy(c.operand, operand, n * sizeof *operand);
  v->visit(v->user, &c);
  for (uint32_t i = 0; i < n; i++)
    free(operand[i].init);
}

/* ---- the table ------------------------------------------------------------------------------- */

const op_entry op_table[] = {
    {.kernel = &ps__k_fill_zero, .cases = op_fill_zero, .same_bits = true},
    {.kernel = &ps__k_copy_bytes, .cases = op_copy_bytes, .same_bits = true},
    {.kernel = &ps__k_dequantize, .cases = op_dequantize, .same_bits = true},
    {.kernel = &ps__k_accumulate, .cases = op_accumulate, .same_bits = true},
    {.kernel = &ps__k_accumulate_sumsq_host, .cases = op_accumulate_sumsq, .same_bits = true},
    {.kernel = &ps__k_sumsq, .cases = op_sumsq, .same_bits = true},
    {.kernel = &ps__k_colsum, .cases = op_colsum},
    {.kernel = &ps__k_embed_fwd, .cases = op_embed_fwd, .same_bits = true},
    {.kernel = &ps__k_embed_bwd,
     .cases = op_embed_bwd,
     .same_bits = true,
     .gradient_of = &ps__k_embed_fwd},
    {.kernel = &ps__k_rmsnorm_fwd, .cases = op_rmsnorm_fwd},
    {.kernel = &ps__k_rmsnorm_bwd, .cases = op_rmsnorm_bwd, .gradient_of = &ps__k_rmsnorm_fwd},
    {.kernel = &ps__k_qkv_split_fwd, .cases = op_qkv_split_fwd},
    {.kernel = &ps__k_qkv_split_bwd,
     .cases = op_qkv_split_bwd,
     .gradient_of = &ps__k_qkv_split_fwd},
    {.kernel = &ps__k_mla_turn, .cases = op_mla_turn},
    {.kernel = &ps__k_mla_kv_fwd, .cases = op_mla_kv_fwd},
    {.kernel = &ps__k_mla_kv_bwd, .cases = op_mla_kv_bwd},
    {.kernel = &ps__k_mla_cut, .cases = op_mla_cut, .same_bits = true},
    {.kernel = &ps__k_mla_pad, .cases = op_mla_pad, .same_bits = true},
    {.kernel = &ps__k_layer_scale_fwd, .cases = op_layer_scale_fwd, .same_bits = true},
    {.kernel = &ps__k_layer_scale_bwd, .cases = op_layer_scale_bwd, .same_bits = true},
    {.kernel = &ps__k_glu_fwd, .cases = op_glu_fwd},
    {.kernel = &ps__k_glu_bwd, .cases = op_glu_bwd, .gradient_of = &ps__k_glu_fwd},
    {.kernel = &ps__k_cross_entropy, .cases = op_cross_entropy},
    {.kernel = &ps__k_score_loss, .cases = op_score_loss},
    {.kernel = &ps__k_gemm, .cases = op_gemm},
    {.kernel = &ps__k_gemm_rows, .cases = op_gemm_rows},
    {.kernel = &ps__k_quantize, .cases = op_quantize, .same_bits = true},
    {.kernel = &ps__k_fp8_scale, .cases = op_fp8_scale, .same_bits = true},
    {.kernel = &ps__k_rmsnorm_quantize, .cases = op_rmsnorm_quantize},
    {.kernel = &ps__k_glu_quantize, .cases = op_glu_quantize},
    {.kernel = &ps__k_glu_bwd_quantize, .cases = op_glu_bwd_quantize},
    {.kernel = &ps__k_gemm_fp8, .cases = op_gemm_fp8},
    {.kernel = &ps__k_moe_route, .cases = op_moe_route},
    {.kernel = &ps__k_moe_route_bwd, .cases = op_moe_route_bwd},
    {.kernel = &ps__k_moe_index, .cases = op_moe_index, .same_bits = true},
    {.kernel = &ps__k_moe_gather, .cases = op_moe_gather, .same_bits = true},
    {.kernel = &ps__k_moe_combine, .cases = op_moe_combine, .same_bits = true},
    {.kernel = &ps__k_gemm_grouped, .cases = op_gemm_grouped},
    {.kernel = &ps__k_gemm_grouped_rows, .cases = op_gemm_grouped_rows},
    {.kernel = &ps__k_gemm_grouped_slots, .cases = op_gemm_grouped_slots},
    {.kernel = &ps__k_moe_fetch, .cases = op_moe_fetch, .same_bits = true},
    {.kernel = &ps__k_moe_glu, .cases = op_moe_glu},
    {.kernel = &ps__k_moe_glu_bwd, .cases = op_moe_glu_bwd},
    {.kernel = &ps__k_moe_scale, .cases = op_moe_scale, .same_bits = true},
    {.kernel = &ps__k_moe_scale_bwd, .cases = op_moe_scale_bwd},
    {.kernel = &ps__k_add_bias, .cases = op_add_bias, .same_bits = true},
    {.kernel = &ps__k_moe_clamp_glu, .cases = op_moe_clamp_glu},
    {.kernel = &ps__k_moe_clamp_glu_bwd, .cases = op_moe_clamp_glu_bwd},
    {.kernel = &ps__k_moe_bias_dot, .cases = op_moe_bias_dot},
    {.kernel = &ps__k_moe_bias_sum, .cases = op_moe_bias_sum},
    {.kernel = &ps__k_conv_fwd, .cases = op_conv_fwd},
    {.kernel = &ps__k_conv_bwd, .cases = op_conv_bwd},
    {.kernel = &ps__k_conv_cached, .cases = op_conv_cached},
    {.kernel = &ps__k_delta_fwd, .cases = op_delta_fwd},
    {.kernel = &ps__k_delta_bwd, .cases = op_delta_bwd},
    {.kernel = &ps__k_delta_cached, .cases = op_delta_cached},
    {.kernel = &ps__k_gated_norm_fwd, .cases = op_gated_norm_fwd},
    {.kernel = &ps__k_gated_norm_bwd, .cases = op_gated_norm_bwd},
    {.kernel = &ps__k_heads_split, .cases = op_heads_split},
    {.kernel = &ps__k_heads_join, .cases = op_heads_join},
    {.kernel = &ps__k_sigmoid_gate_fwd, .cases = op_sigmoid_gate_fwd},
    {.kernel = &ps__k_sigmoid_gate_bwd, .cases = op_sigmoid_gate_bwd},
    {.kernel = &ps__k_attention_cached, .cases = op_attention_cached},
    {.kernel = &ps__k_attention_sink, .cases = op_attention_sink},
    {.kernel = &ps__k_attention_sink_bwd, .cases = op_attention_sink_bwd},
};
const uint32_t n_op_table = sizeof op_table / sizeof *op_table;

void op_cases(uint32_t i, uint32_t dt, op_sizes sizes, uint64_t seed, op_visit visit_case,
              void *user) {
  visit v = {&op_table[i], sizes, visit_case, user};
  seed_now = seed * 0x9e3779b97f4a7c15u | 1;
  op_table[i].cases(&v, dt);
}
