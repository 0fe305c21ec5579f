/* op_cases_fp8.c - the cases of quantizing ops and FP8 products. */
#include "op_families.h"
#include "core/fp8.h"

static op_operand scale_of(float scale) {
  op_operand b = {PS_READ, PS_F32, 2, malloc(8), exact};
  memcpy(b.init, (const float[2]){scale, 448 * scale}, 8);
  return b;
}
/* u64 of two numbers, as f64 of the same bits: they compare as numbers do. The op adds to [1], with
 * glu_bwd_quantize to both. */
static op_operand counters(void) {
  op_operand b = {PS_READ_WRITE, OP_F64, 2, malloc(16), exact};
  memcpy(b.init, (const uint64_t[2]){7, 11}, 16);
  return b;
}
static void set(op_operand *b, uint64_t i, float x) { ps__store1_f32(b->init, b->dt, i, x); }

/* Multiples of 16, as on CUDA; weights' shapes and rows that end amid a tile. Sizes of a few, of
 * 1e-6 and of 1e4, and every other time a value so large that some of the others become zero; each
 * form alone, and both; and with a given scale, at which a few values saturate. */
static const uint32_t quantize_test[][2] = {{16, 16},   {48, 272},  {16, 4096}, {1040, 64},
                                            {208, 528}, {64, 8192}, {4112, 48}},
                      quantize_bench[][2] = {{8192, 4096}};
static const float quantize_size[] = {3, 1e-6f, 1e4f};
void op_quantize(visit *v, uint32_t dt) {
  EACH(s, v, quantize_test, quantize_bench)
  for (uint32_t forms = v->sizes == OP_BENCH ? 3 : 1; forms <= (v->sizes == OP_BENCH ? 3 : 4);
       forms++) {
    const float size = quantize_size[s_i % 3];
    const uint64_t n = (uint64_t)s[0] * s[1];
    const bool given = forms == 4, count = forms >= 3 && v->sizes != OP_BENCH;
    const ps__args_quantize a = {.rows = s[0],
                                 .cols = s[1],
                                 .dt = dt,
                                 .dt_q = (s_i + forms) % 2 ? PS__E4M3 : PS__E5M2,
                                 .forms = given ? 3 : forms,
                                 .given = given,
                                 .count = count ? 2 : 0};
    if (!wanted(v, n))
      continue;
    op_operand o[5] = {in(dt, n, size),
                       given ? scale_of(ldexpf(1, ilogbf(size) - (a.dt_q == PS__E4M3 ? 7 : 14)))
                             : out(PS_F32, 2, exact)};
    uint32_t n_operands = 2;
    if (s_i % 2)
      set(&o[0], n / 2, -3e4f * size);
    for (uint32_t form = PS_FORM_ROWS; form <= PS_FORM_COLS; form++)
      if (a.forms & form)
        o[n_operands++] = out(a.dt_q, n, exact);
    if (count)
      o[n_operands++] = counters();
    CASE(v, &a, n_operands, o, "%ux%u forms %u given %u to %s", s[0], s[1], a.forms, given,
         ps__dtypes[a.dt_q].name);
  }
}
/* one element: 1 / valid tokens */
static const uint32_t fp8_scale_test[][2] = {{1, 1},     {16, 16},   {48, 272}, {16, 4096},
                                             {1040, 64}, {64, 8192}, {4112, 48}};
void op_fp8_scale(visit *v, uint32_t dt) {
  EACH(s, v, fp8_scale_test, quantize_bench) {
    const uint64_t n = (uint64_t)s[0] * s[1];
    const ps__args_fp8_scale a = {s[0], s[1], dt, s_i % 2 ? PS__E4M3 : PS__E5M2,
                                  s_i % 3 ? 4.0f : 0.0f};
    if (!wanted(v, n))
      continue;
    const op_operand o[] = {in(dt, n, quantize_size[s_i % 3]), out(PS_F32, 2, exact)};
    CASE(v, &a, 2, o, "%ux%u to %s", s[0], s[1], ps__dtypes[a.dt_q].name);
  }
}

/* Ops that compute and quantize. The backends' values before may differ by their tolerance: in bf16
 * a neighbour, 2^-7 at worst. So may amax, but not the scale: each case has an outlier of 1.2 to
 * 1.25 times a power of two, far from where the scale changes (1.75). A code then differs by what
 * its value differs and by the rounding, an ulp; subnormal codes are 2^-9 or 2^-16 apart, and the
 * largest code is above 256 or 32768. */
static op_tolerance quantized(op_tolerance t, uint32_t dt_q) {
  return (op_tolerance){1, t.rel + (t.ulps > 0 ? 0x1p-7 : 0),
                        t.of_max + (dt_q == PS__E4M3 ? 0x1p-17 : 0x1p-31)};
}
static op_tolerance scale_tolerance(uint32_t dt) {
  return (op_tolerance){0, dt != PS_F32 ? 0x1p-7 : 1e-5, 0};
}
static const uint32_t computed_test[][2] = {{16, 16},   {48, 272},  {16, 4096}, {1040, 64},
                                            {208, 528}, {32, 8192}, {16, 12288}},
                      norm_quantize_test[][2] = {{16, 16},   {48, 272},  {16, 4096},  {1040, 64},
                                                 {208, 528}, {32, 8192}, {16, 12288}, {4112, 2064}},
                      norm_quantize_bench[][2] = {{8192, 4096}},
                      glu_quantize_bench[][2] = {{2048, 2816}};

/* The last case is large: rows of bf16 that CUDA gives a warp each. */
void op_rmsnorm_quantize(visit *v, uint32_t dt) {
  EACH(s, v, norm_quantize_test, norm_quantize_bench)
  for (uint32_t forms = s[0] == 4112 ? 3 : 1; forms <= (v->sizes == OP_BENCH ? 1 : 3); forms++) {
    const float offset = s_i % 2 ? 1.0f : 0.0f;
    const bool count = forms == 3;
    const ps__args_rmsnorm_quantize a = {
        {.rows = s[0], .cols = s[1], .dt = dt, .eps = 1e-5f, .weight_offset = offset},
        PS__E4M3,
        forms,
        count ? 2 : 0};
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, n))
      continue;
    op_operand o[6] = {in(dt, n, 2), in(dt, s[1], 1), out(PS_F32, 2, scale_tolerance(dt))};
    uint32_t n_operands = 3;
    /* 1000 times the rest of its row: y is 40, and 2% less where there are many columns */
    set(&o[0], (uint64_t)(s[0] / 2) * s[1] + 5, 1000);
    set(&o[1], 5, 40 / sqrtf((float)s[1]) - offset);
    for (uint32_t form = PS_FORM_ROWS; form <= PS_FORM_COLS; form++)
      if (forms & form)
        o[n_operands++] = out(PS__E4M3, n, quantized(norm_tolerance(dt), PS__E4M3));
    if (count)
      o[n_operands++] = counters();
    CASE(v, &a, n_operands, o, "%ux%u forms %u", s[0], s[1], forms);
  }
}

/* The outlier: s = 16 * 20, its gradient by g is 8 * 20, that by u 8 * 16. */
static void glu_outlier(op_operand *gu, const uint32_t *s) {
  const uint64_t at = (uint64_t)(s[0] / 2) * 2 * s[1] + 5;
  set(gu, at, 16);
  set(gu, at + s[1], 20);
}
static ps__args_glu_quantize glu_quantize_args(const uint32_t *s, size_t i, uint32_t dt,
                                               uint32_t dt_q, uint32_t forms, bool count) {
  return (ps__args_glu_quantize){
      s[0],  s[1],          dt, i % 2 ? PS_ACTIVATION_GELU_TANH : PS_ACTIVATION_SILU, dt_q,
      forms, count ? 1 : 0,
  };
}
void op_glu_quantize(visit *v, uint32_t dt) {
  EACH(s, v, computed_test, glu_quantize_bench)
  for (uint32_t forms = 1; forms <= (v->sizes == OP_BENCH ? 1 : 3); forms++) {
    const ps__args_glu_quantize a = glu_quantize_args(s, s_i, dt, PS__E4M3, forms, forms == 3);
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, 2 * n))
      continue;
    op_operand o[5] = {in(dt, 2 * n, 4), out(PS_F32, 2, scale_tolerance(dt))};
    uint32_t n_operands = 2;
    glu_outlier(&o[0], s);
    for (uint32_t form = PS_FORM_ROWS; form <= PS_FORM_COLS; form++)
      if (forms & form)
        o[n_operands++] = out(PS__E4M3, n, quantized(glu_tolerance(dt, a.activation), PS__E4M3));
    if (a.count)
      o[n_operands++] = counters();
    CASE(v, &a, n_operands, o, "%ux%u forms %u", s[0], s[1], forms);
  }
}
void op_glu_bwd_quantize(visit *v, uint32_t dt) {
  EACH(s, v, computed_test, glu_quantize_bench)
  for (uint32_t count = 0; count < (v->sizes == OP_BENCH ? 1 : 2); count++) {
    const ps__args_glu_quantize a = glu_quantize_args(s, s_i, dt, PS__E5M2, 0, count);
    const uint64_t n = (uint64_t)s[0] * s[1];
    const op_tolerance t = glu_tolerance(dt, a.activation), of_gu = quantized(t, PS__E5M2);
    if (!wanted(v, 2 * n))
      continue;
    op_operand o[] = {in(dt, n, 1),
                      in(dt, 2 * n, 4),
                      out(PS_F32, 2, scale_tolerance(dt)),
                      out(PS__E5M2, 2 * n, of_gu),
                      out(PS__E5M2, 2 * n, of_gu),
                      out(PS_F32, 2, scale_tolerance(dt)),
                      out(PS__E4M3, n, quantized(t, PS__E4M3)),
                      counters()};
    glu_outlier(&o[1], s);
    set(&o[0], (uint64_t)(s[0] / 2) * s[1] + 5, 8);
    CASE(v, &a, 7 + count, o, "%ux%u count %u", s[0], s[1], count);
    if (!count)
      free(o[7].init);
  }
}

static const uint32_t fp8_test[][3] = {{16, 16, 16},
                                       {48, 96, 32},
                                       {256, 128, 528},
                                       {32, 272, 1024},
                                       {144, 64, 4096}},
                      fp8_bench[][3] = {{2048, 1024, 1024}};
/* Tensor cores keep 14 bits of a partial sum of FP8 products, also without fast accumulation:
 * then sums of 128 products are added in fp32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). So
 * each of K products errs by up to 2^-13 of the largest partial sum, with either sign. Partial sums
 * of 128 are as small as sqrt(128 / K) beside the result. */
void op_gemm_fp8(visit *v, uint32_t dt) {
  EACH(s, v, fp8_test, fp8_bench)
  for (uint32_t role = 0; role < (v->sizes == OP_BENCH ? 1 : 3); role++)
    for (uint32_t form = 0; form < (v->sizes == OP_BENCH ? 1 : BOTH); form++) {
      if (form == BIAS && dt == PS_F32)
        continue; /* cuBLASLt has none: a bias of FP8 products is bf16 */
      const uint32_t m = s[0], n = s[1], k = s[2];
      const ps__args_gemm_fp8 a = {.m = m,
                                   .n = n,
                                   .k = k,
                                   .role = (uint8_t)role,
                                   .accumulate = form == ACCUMULATE,
                                   .has_bias = form == BIAS,
                                   .has_residual = form == RESIDUAL,
                                   .dt_a = role == PS_GEMM_FORWARD ? PS__E4M3 : PS__E5M2,
                                   .dt_b = PS__E4M3,
                                   .dt_c = (uint8_t)dt,
                                   .fast = (s_i + form) % 2,
                                   .alpha = s_i % 2 ? 0.22f : 0.0f};
      if (!wanted(v, (uint64_t)k * (m > n ? m : n)))
        continue;
      const bool twice = dt != PS_F32 && form != PLAIN, fast = role == PS_GEMM_FORWARD && a.fast;
      const op_tolerance t = {dt != PS_F32, 1e-6,
                              1e-6 + 0x1p-13 * sqrt(fast || k < 128 ? k : 128) +
                                  (twice ? 0x1p-8 : 0)};
      op_operand o[6] = {in(a.dt_a, (uint64_t)m * k, 100), scale_of(0x1p-6f),
                         in(a.dt_b, (uint64_t)n * k, 100), scale_of(0x1p-7f),
                         sum(a.accumulate, dt, (uint64_t)m * n, t)};
      uint32_t n_operands = 5;
      if (a.has_bias || a.has_residual)
        o[n_operands++] = in(dt, a.has_bias ? n : (uint64_t)m * n, 1);
      CASE(v, &a, n_operands, o, "%ux%ux%u role %u form %u fast %u", m, n, k, role, form, a.fast);
    }
}
