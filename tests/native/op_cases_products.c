/* op_cases_products.c - the cases of sums and products. */
#include "core/blocks.h"
#include "op_families.h"

/* ---- sums ------------------------------------------------------------------------------------ */

static const uint32_t sum_test[][1] =
    {{1}, {7}, {1023}, {1025}, {65536}, {65537}, {200003}, {(1 << 24) + 4099}, {(1 << 25) + 77}},
                      sum_bench[][1] = {{16 << 20}};

/* Bit patterns of any size, denormals and zeros too; infinities in kind 1 and 2 of 4, NaNs in 2. */
static op_operand special(uint32_t dt, uint64_t n, size_t kind) {
  op_operand b = in(dt, n, 1);
  const size_t bytes = op_dtype_bytes(dt);
  for (uint64_t i = 0; i < n; i++) {
    const uint32_t exponent = (uint32_t)(op_uniform() * 255),
                   rare = (uint32_t)(op_uniform() * 1000);
    uint32_t u = (uint32_t)(op_uniform() * 0x1p23) | (op_uniform() < 0.5 ? 1u << 31 : 0) |
                 (rare % 5 ? exponent : 0) << 23;
    if (rare == 7)
      u &= 1u << 31;
    if (kind % 4 >= 1 && kind % 4 <= 2 && rare == 8)
      u = 0x7f800000u | (u & 1u << 31);
    if (kind % 4 == 2 && rare == 9)
      u = 0x7fc10000u;
    if (bytes == 2)
      u >>= 16;
    memcpy((char *)b.init + i * bytes, &u, bytes);
  }
  return b;
}
void op_sumsq(visit *v, uint32_t dt) {
  /* fp64: at most n/2^18 + 10 additions a lane and tree, 256 tiles; the terms are positive */
  const op_tolerance t = {0, 512 * 0x1p-53, 0};
  EACH(s, v, sum_test, sum_bench)
  for (uint32_t odd = 0; odd < (v->sizes == OP_BENCH ? 1 : 2) && wanted(v, s[0]); odd++) {
    const ps__args_sumsq a = {.n = s[0], .dt = dt};
    const op_operand o[] = {odd ? special(dt, s[0], s_i) : in(dt, s[0], 3), out(OP_F64, 1, t)};
    CASE(v, &a, 2, o, "n %u%s", s[0], odd ? " of any bits" : "");
  }
}
/* Mode 0, and for bf16 the others (ops.h): PS_LOW_READ .. PS_DITHER. */
void op_accumulate(visit *v, uint32_t dt) {
  /* one rounding of the store, or a dithered one: an ulp. A low byte that is read is worth less
   * than an ulp of the total, 2^-7 of it; tests/test_ops.py has the bits */
  EACH(s, v, sum_test, sum_bench)
  for (uint32_t mode = 0;
       mode <= (ps__dtypes[dt].low_bytes && v->sizes != OP_BENCH ? PS_DITHER : 0) &&
       wanted(v, s[0]);
       mode++) {
    const uint32_t n = s[0], low = mode & (PS_LOW_READ | PS_LOW_WRITE);
    const ps__args_accumulate a = {
        .n = n, .first = 1000003 * s_i, .dt = dt, .mode = mode, .index = 5 + mode};
    const op_operand o[] = {in(dt, n, 1),
                            op_drawn(PS_READ_WRITE, dt, n, 3,
                                     (op_tolerance){mode != 0, 0, mode & PS_LOW_READ ? 0x1p-7 : 0}),
                            op_drawn(mode & PS_LOW_WRITE ? PS_READ_WRITE : PS_READ, PS_F32,
                                     low ? (n + 3) / 4 : 0, 1, (op_tolerance){0, 0, INFINITY})};
    for (uint64_t i = 0; i < o[2].n * 4; i++)
      ((uint8_t *)o[2].init)[i] = (uint8_t)(i * 2654435761u >> 13);
    CASE(v, &a, low ? 3 : 2, o, "n %u mode %u", n, mode);
    if (!low)
      free(o[2].init);
  }
}
void op_accumulate_sumsq(visit *v, uint32_t dt) {
  EACH(s, v, sum_test, sum_bench) {
    const ps__args_accumulate a = {.n = s[0], .dt = dt};
    if (!wanted(v, s[0]))
      continue;
    const op_operand o[] = {in(dt, s[0], 1), op_drawn(PS_READ_WRITE, dt, s[0], 3, exact),
                            /* of the rounded total: half an ulp of bf16 a term at most, twice */
                            out(OP_F64, 1, (op_tolerance){0, dt == PS_BF16 ? 0x1p-8 : 0x1p-23, 0})};
    CASE(v, &a, 3, o, "n %u", s[0]);
  }
}
void op_fill_zero(visit *v, uint32_t dt) {
  EACH(s, v, sum_test, sum_bench)
  if (dt == PS_F32 && wanted(v, s[0])) {
    const ps__args_fill a = {4ull * s[0]};
    const op_operand o[] = {out(PS_F32, s[0], exact)};
    CASE(v, &a, 1, o, "n %u", s[0]);
  }
}
void op_copy_bytes(visit *v, uint32_t dt) {
  EACH(s, v, sum_test, sum_bench)
  if (wanted(v, s[0])) {
    const ps__args_fill a = {s[0] * ps_dtype_bytes((ps_dtype)dt)};
    const op_operand o[] = {in(dt, s[0], 1), out(dt, s[0], exact)};
    CASE(v, &a, 2, o, "n %u", s[0]);
  }
}

static const uint32_t colsum_test[][3] = {{1, 1, 1},         {3, 17, 20},      {64, 104, 104},
                                          {65, 33, 48},      {1000, 515, 515}, {5000, 40, 64},
                                          {8192, 1024, 1536}},
                      colsum_bench[][3] = {{8192, 1024, 1024}};
void op_colsum(visit *v, uint32_t dt) {
  EACH(s, v, colsum_test, colsum_bench)
  for (uint32_t add = 0; add < (v->sizes == OP_BENCH ? 1 : 2); add++) {
    const ps__args_colsum a = {s[0], s[1], s[2], dt, add};
    const uint64_t n = (uint64_t)s[0] * s[2];
    if (!wanted(v, n))
      continue;
    const op_operand o[] = {in(dt, n, 1), sum(add, dt, s[1], row_sums(dt, s[0]))};
    CASE(v, &a, 2, o, "%ux%u ld %u add %u", s[0], s[1], s[2], add);
  }
}

/* ---- products -------------------------------------------------------------------------------- */

static const uint32_t gemm_test[][3] = {{1, 1, 1},       {8, 16, 32},   {17, 33, 5},
                                        {128, 256, 64},  {1, 512, 128}, {200, 72, 300},
                                        {256, 128, 1024}},
                      gemm_bench[][3] = {{2048, 1024, 1024}};
static void gemm_case(visit *v, uint32_t dt, const uint32_t *s, uint32_t pad, uint32_t trans,
                      uint32_t form, float alpha) {
  const uint32_t m = s[0], n = s[1], k = s[2], dt_c = form == TO_F32 ? PS_F32 : dt;
  ps__args_gemm a = {.m = m,
                     .n = n,
                     .k = k,
                     .trans_a = trans & 1,
                     .trans_b = trans >> 1,
                     .accumulate = form == ACCUMULATE,
                     .has_bias = form == BIAS || form == BOTH,
                     .has_residual = form == RESIDUAL || form == BOTH,
                     .dt_a = (uint8_t)dt,
                     .dt_b = (uint8_t)dt,
                     .dt_c = (uint8_t)dt_c,
                     .alpha = alpha};
  a.lda = (a.trans_a ? m : k) + pad, a.ldb = (a.trans_b ? k : n) + pad, a.ldc = n + pad;
  /* partial sums of K products near their result's size, in fp32, truncated by tensor cores at
   * worst; bf16 then an ulp; and with an addend cuBLASLt's kernels may round the product to bf16
   * first (matmul.cu): half an ulp of a product, which is at most twice the largest output here,
   * addends being in [-1, 1] */
  const bool twice = dt_c != PS_F32 && (a.accumulate || a.has_bias || a.has_residual);
  const op_tolerance t = {dt_c != PS_F32, 1e-6, 1e-6 + 1e-6 * sqrt(k) + (twice ? 0x1p-8 : 0)};
  /* C is updated where its rows have a margin, which must stay as it is: one row of poison would
   * not compare */
  op_operand o[5] = {in(dt, (uint64_t)a.lda * (a.trans_a ? k : m), 1),
                     in(dt, (uint64_t)a.ldb * (a.trans_b ? n : k), 1),
                     sum(a.accumulate || pad, dt_c, (uint64_t)a.ldc * m, t)};
  uint32_t n_operands = 3;
  if (a.has_bias)
    o[n_operands++] = in(dt_c, n, 1);
  if (a.has_residual)
    o[n_operands++] = in(dt_c, (uint64_t)a.ldc * m, 1);
  CASE(v, &a, n_operands, o, "%ux%ux%u trans %u form %u", m, n, k, trans, form);
}
void op_gemm(visit *v, uint32_t dt) {
  EACH(s, v, gemm_test, gemm_bench)
  for (uint32_t trans = v->sizes == OP_BENCH ? 2 : 0; trans < (v->sizes == OP_BENCH ? 3 : 4);
       trans++)
    for (uint32_t form = 0; form < (v->sizes == OP_BENCH ? 1 : N_FORMS); form++)
      gemm_case(v, dt, s, s_i % 2 ? 8 : 0, trans, form, s_i % 2 ? 0.22f : 0.0f);
}

/* From one row, as when a single sequence is decoded, to a slice of a prompt. */
static const uint32_t rows_test[][3] = {{1, 1, 1},   {1, 512, 128}, {2, 33, 5},    {3, 256, 1024},
                                        {4, 16, 32}, {7, 72, 300},  {130, 128, 64}},
                      rows_bench[][3] = {{1, 4096, 4096}};
void op_gemm_rows(visit *v, uint32_t dt) {
  EACH(s, v, rows_test, rows_bench)
  for (uint32_t form = 0; form < (v->sizes == OP_BENCH ? 1 : N_FORMS); form++)
    gemm_case(v, dt, s, s_i % 2 ? 8 : 0, 2, form, s_i % 2 ? 0.22f : 0.0f);
}

/* Blocks of weights as 16-bit words. Sizes end amid a thread block's share. */
static const uint32_t dequantize_test[][1] = {{64}, {192}, {2048}, {70400}},
                      dequantize_bench[][1] = {{1 << 26}};
void op_dequantize(visit *v, uint32_t dt) {
  EACH(s, v, dequantize_test, dequantize_bench)
  for (uint32_t base = PS_BASE_FP8; base < PS_N_BASES; base++) {
    const ps__args_dequantize a = {.n = s[0], .base = base, .dt = dt};
    const ps__storage as = ps__base_storage(base, dt);
    op_operand w = in(PS_F32, s[0], base == PS_BASE_NF4 ? 1e-3f : 3),
               o[2] = {{PS_READ, OP_U16, ps__stored_bytes(as, s[0]) / 2, NULL, exact},
                       out(dt, s[0], exact)};
    ((float *)w.init)[1] = -0.0f;
    memset((float *)w.init + s[0] - 64, 0, 64 * sizeof(float));
    o[0].init = malloc(ps__stored_bytes(as, s[0]));
    ps__blocks_quantize(o[0].init, as, w.init, s[0]);
    free(w.init);
    CASE(v, &a, 2, o, "%u of %s", s[0], ps_base_name((ps_base)base));
  }
}
