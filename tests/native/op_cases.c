/* op_cases.c - the table of op cases: shapes, arguments, how operands are drawn, tolerances. */
#include "op_cases.h"
#include "model/rope.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct op_table_visit {
  const op_entry *entry;
  op_sizes sizes;
  op_visit visit;
  void *user;
} visit;

/* ---- values ---------------------------------------------------------------------------------- */

static uint64_t seed_now = 1;
static double uniform(void) {
  seed_now ^= seed_now << 13, seed_now ^= seed_now >> 7, seed_now ^= seed_now << 17;
  return (double)(seed_now >> 11) * 0x1p-53;
}
float op_normal(void) {
  return (float)((uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7320508);
}
size_t op_dtype_bytes(uint32_t dt) {
  return dt == OP_F64 ? 8 : dt == OP_I32 ? 4 : ps__dtypes[dt].bytes;
}
static bool is_fp8(uint32_t dt) { return dt == PS__E4M3 || dt == PS__E5M2; }
static double fp8_value(const uint8_t *p, uint32_t dt, uint64_t i) {
  float x;
  ps__dtypes[dt].to_f32(&x, p + i, 1);
  return (double)x;
}
double op_value(const void *p, uint32_t dt, uint64_t i) {
  return is_fp8(dt)     ? fp8_value(p, dt, i)
         : dt == OP_F64 ? ((const double *)p)[i]
         : dt == OP_I32 ? ((const int32_t *)p)[i]
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

static const op_tolerance exact = {0, 0, 0};

static op_operand out(uint32_t dt, uint64_t n, op_tolerance t) {
  return (op_operand){.mode = PS_WRITE, .dt = dt, .n = n, .tolerance = t};
}
/* n values of N(0, scale^2) */
static op_operand drawn(uint32_t mode, uint32_t dt, uint64_t n, float scale, op_tolerance t) {
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
static op_operand in(uint32_t dt, uint64_t n, float scale) {
  return drawn(PS_READ, dt, n, scale, exact);
}
/* added to where @add, else written alone */
static op_operand sum(uint32_t add, uint32_t dt, uint64_t n, op_tolerance t) {
  return add ? drawn(PS_READ_WRITE, dt, n, 1, t) : out(dt, n, t);
}
static op_operand ints(uint64_t n, int64_t lo, int64_t hi, bool skewed) {
  op_operand b = {PS_READ, OP_I32, n, malloc(n * 4 + 1), exact};
  for (uint64_t i = 0; i < n; i++) {
    const double u = uniform();
    ((int32_t *)b.init)[i] =
        (int32_t)(lo + (int64_t)((skewed ? u * u * u : u) * (double)(hi - lo)));
  }
  return b;
}

static bool wanted(const visit *v, uint64_t most_elements) {
  return v->sizes != OP_SMALL || most_elements <= 300000;
}

static void run(visit *v, const void *args, uint32_t args_bytes, const op_operand *operand,
                uint32_t n, const char *shape, ...) {
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
#define CASE(v, args, n, operands, ...) run(v, args, sizeof *(args), operands, n, __VA_ARGS__)
/* every shape of test[], or the one of bench[] */
#define EACH(s, v, test, bench)                                                                    \
  for (size_t s##_i = 0; s##_i < ((v)->sizes == OP_BENCH ? sizeof bench / sizeof *bench            \
                                                         : sizeof test / sizeof *test);            \
       s##_i++)                                                                                    \
    for (const uint32_t *s = (v)->sizes == OP_BENCH ? bench[s##_i] : test[s##_i]; s; s = NULL)

/* Sums over n rows in two orders, of terms of both signs: depth of at most 300 additions of
 * magnitude up to the sum of all terms' sizes, 0.64 n where the largest result is about 3
 * sqrt(n): 300 * 2^-24 * 0.2 sqrt(n), twice; errors being random, a tenth. */
static op_tolerance row_sums(uint32_t dt, double n) {
  return (op_tolerance){dt != PS_F32, 4e-7, 1e-6 + 8e-7 * sqrt(n)};
}

/* ---- norms and activations ------------------------------------------------------------------- */

static const uint32_t norm_test[][2] = {{1, 1},     {1, 4096},   {3, 8},     {7, 1000},
                                        {9, 33},    {257, 4096}, {33, 5120}, {5, 12288},
                                        {2100, 64}, {2049, 40},  {600, 8192}},
                      norm_bench[][2] = {{8192, 1024}};
/* 12288 columns: 100 additions deep at most, 6e-6 of the mean square, half of that in rstd */
static op_tolerance norm_tolerance(uint32_t dt) { return (op_tolerance){dt != PS_F32, 3e-6, 3e-6}; }

static void rmsnorm_fwd(visit *v, uint32_t dt) {
  EACH(s, v, norm_test, norm_bench) {
    const uint32_t residual = v->sizes != OP_BENCH && s_i % 3 == 1;
    const ps__args_rmsnorm a = {.rows = s[0],
                                .cols = s[1],
                                .dt = dt,
                                .eps = 1e-5f,
                                .weight_offset = s_i % 2 ? 1.0f : 0.0f,
                                .has_residual = residual};
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, n))
      continue;
    const op_operand o[] = {in(dt, n, 2), in(dt, s[1], 1), out(dt, n, norm_tolerance(dt)),
                            in(dt, residual ? n : 0, 2)};
    CASE(v, &a, 3 + residual, o, "%ux%u residual %u", s[0], s[1], residual);
    if (!residual)
      free(o[3].init);
  }
}
static void rmsnorm_bwd(visit *v, uint32_t dt) {
  EACH(s, v, norm_test, norm_bench)
  for (uint32_t flags = v->sizes == OP_BENCH ? 2 : 0; flags < (v->sizes == OP_BENCH ? 3 : 4);
       flags++) {
    const ps__args_rmsnorm a = {.rows = s[0],
                                .cols = s[1],
                                .dt = dt,
                                .accumulate_dw = flags & 1,
                                .add_dx = flags >> 1,
                                .eps = 1e-5f,
                                .weight_offset = s_i % 2 ? 1.0f : 0.0f};
    const uint64_t n = (uint64_t)s[0] * s[1];
    /* the gradient of one column is 0 but for eps: there is only rounding to compare */
    if (s[1] == 1 || !wanted(v, n))
      continue;
    const op_operand o[] = {in(dt, n, 2), in(dt, s[1], 1), in(dt, n, 1),
                            sum(a.add_dx, dt, n, norm_tolerance(dt)),
                            sum(a.accumulate_dw, dt, s[1], row_sums(dt, s[0]))};
    CASE(v, &a, 5, o, "%ux%u flags %u", s[0], s[1], flags);
  }
}

static const uint32_t glu_test[][2] = {{1, 1},     {1, 14336},  {3, 7},
                                       {65, 1000}, {130, 4097}, {300, 2048}},
                      glu_bench[][2] = {{2048, 2816}};
/* fp32: exp 2 ulp, quotient and products; 1 + x(1 - sig) cancels near x = -1.28: of the largest.
 * gelu's exponent is a polynomial, 3 * 2^-24 off for each unit of its size, and counts up to 17,
 * where sig is 1. bf16: exp within 1e-5 */
static op_tolerance glu_tolerance(uint32_t dt, uint32_t activation) {
  return dt != PS_F32 ? (op_tolerance){1, 2e-5, 2e-6}
                      : (op_tolerance){0, activation == PS_ACTIVATION_SILU ? 1e-6 : 4e-6, 2e-7};
}
static void glu_fwd(visit *v, uint32_t dt) {
  EACH(s, v, glu_test, glu_bench) {
    const ps__args_glu a = {s[0], s[1], dt, s_i % 2 ? PS_ACTIVATION_GELU_TANH : PS_ACTIVATION_SILU};
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, 2 * n))
      continue;
    const op_operand o[] = {in(dt, 2 * n, 4), out(dt, n, glu_tolerance(dt, a.activation))};
    CASE(v, &a, 2, o, "%ux%u", s[0], s[1]);
  }
}
static void glu_bwd(visit *v, uint32_t dt) {
  EACH(s, v, glu_test, glu_bench) {
    const ps__args_glu a = {s[0], s[1], dt, s_i % 2 ? PS_ACTIVATION_GELU_TANH : PS_ACTIVATION_SILU};
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, 2 * n))
      continue;
    const op_operand o[] = {drawn(PS_READ_WRITE, dt, n, 1, glu_tolerance(dt, a.activation)),
                            drawn(PS_READ_WRITE, dt, 2 * n, 4, glu_tolerance(dt, a.activation))};
    CASE(v, &a, 2, o, "%ux%u", s[0], s[1]);
  }
}

/* ---- q, k and v ------------------------------------------------------------------------------ */

static const uint32_t qkv_test[][4] = {{1, 1, 1, 2},      {5, 4, 2, 16},  {33, 8, 2, 64},
                                       {130, 32, 8, 128}, {9, 3, 1, 80},  {7, 5, 5, 6},
                                       {40, 4, 1, 256},   {3, 2, 1, 512}, {2100, 2, 1, 32},
                                       {70, 64, 8, 128},  {9, 11, 4, 320}},
                      qkv_bench[][4] = {{2048, 16, 8, 64}};
/* By turns RoPE turns all of a head, half of it, and nothing. */
static ps__args_qkv qkv_args(const uint32_t *s, size_t i, uint32_t dt, uint32_t norm,
                             uint32_t accumulate) {
  const uint32_t d = s[3], part = i % 4 == 3 ? 0 : i % 4 == 2 ? d / 4 * 2 : d;
  const ps_rope rope = {.kind = (uint32_t)(i % 3),
                        .rotary_dim = part < 2 * PS_ROPE_PAIRS ? part : 2 * PS_ROPE_PAIRS,
                        .original_positions = 8192,
                        .theta = 5e5,
                        .factor = 8,
                        .low_freq_factor = 1,
                        .high_freq_factor = 4};
  ps__args_qkv a = {.n_tokens = s[0],
                    .n_heads = s[1],
                    .n_kv_heads = s[2],
                    .head_dim = d,
                    .dt = dt,
                    .qk_norm = norm,
                    .accumulate_dw = accumulate,
                    .eps = 1e-6f,
                    .norm_offset = i % 4 ? 0.0f : 1.0f};
  if (ps__rope_table(&a, &rope, 8192, 1) != PS_OK)
    abort(); /* a kind that this table does not know how to ask for */
  if (i % 2)
    a.attention_factor = 1.25f;
  return a;
}
static void qkv_split_fwd(visit *v, uint32_t dt) {
  EACH(s, v, qkv_test, qkv_bench)
  for (uint32_t norm = 0; norm < (v->sizes == OP_BENCH ? 1 : 3); norm++) {
    const ps__args_qkv a = qkv_args(s, s_i, dt, norm, 0);
    const uint64_t q = (uint64_t)s[1] * s[3] * s[0], k = (uint64_t)s[2] * s[3] * s[0];
    /* cos and sin within an ulp on either side: of the pair. With norm 3e-6 as rmsnorm; bf16
     * then rounds before the rotation too: an ulp, 2^-7, of the partner at worst */
    const op_tolerance t = dt != PS_F32 ? (op_tolerance){1, 0, norm ? 0x1p-7 : 1e-6}
                                        : (op_tolerance){0, 0, norm ? 4e-6 : 5e-7};
    if (!wanted(v, q + 2 * k))
      continue;
    const op_operand o[] = {in(dt, q + 2 * k, 1),
                            ints(s[0], 0, 1048576, false),
                            out(dt, q, t),
                            out(dt, 2 * k, t),
                            in(dt, norm ? ps__q_norm_elements(&a) : 0, 1),
                            in(dt, norm ? ps__k_norm_elements(&a) : 0, 1)};
    CASE(v, &a, norm ? 6 : 4, o, "T%u heads %u/%u d%u norm %u", s[0], s[1], s[2], s[3], norm);
    for (uint32_t i = norm ? 6 : 4; i < 6; i++)
      free(o[i].init);
  }
}
static void qkv_split_bwd(visit *v, uint32_t dt) {
  EACH(s, v, qkv_test, qkv_bench)
  for (uint32_t flags = 0; flags < (v->sizes == OP_BENCH ? 1 : 6); flags++) {
    const uint32_t norm = flags % 3, add = flags / 3, heads = norm == PS_QK_NORM_ROW ? 0 : 1;
    const ps__args_qkv a = qkv_args(s, s_i, dt, norm, add);
    const uint64_t q = (uint64_t)s[1] * s[3] * s[0], k = (uint64_t)s[2] * s[3] * s[0],
                   of_q = norm ? ps__q_norm_elements(&a) : 0,
                   of_k = norm ? ps__k_norm_elements(&a) : 0;
    const op_tolerance t = dt != PS_F32 ? (op_tolerance){1, 0, norm ? 1e-5 : 1e-6}
                                        : (op_tolerance){0, 0, norm ? 1e-5 : 5e-7};
    if (!wanted(v, q + 2 * k))
      continue;
    const op_operand o[] = {in(dt, q, 1),
                            in(PS_F32, 2 * k, 1),
                            ints(s[0], 0, 1048576, false),
                            out(dt, q + 2 * k, t),
                            in(dt, norm ? q + 2 * k : 0, 1),
                            in(dt, of_q, 1),
                            in(dt, of_k, 1),
                            sum(add, dt, of_q, row_sums(dt, (double)s[0] * (heads ? s[1] : 1))),
                            sum(add, dt, of_k, row_sums(dt, (double)s[0] * (heads ? s[2] : 1)))};
    CASE(v, &a, norm ? 9 : 4, o, "T%u heads %u/%u d%u flags %u", s[0], s[1], s[2], s[3], flags);
    for (uint32_t i = norm ? 9 : 4; i < 9; i++)
      free(o[i].init);
  }
}

/* ---- embedding and loss ---------------------------------------------------------------------- */

static const uint32_t embed_test[][3] = {{1, 1, 1},         {7, 5, 33},       {1000, 300, 64},
                                         {513, 2048, 4096}, {3000, 1500, 40}, {2, 70000, 8},
                                         {2500, 1, 24}},
                      embed_bench[][3] = {{2048, 8192, 1024}};
static void embed_fwd(visit *v, uint32_t dt) {
  EACH(s, v, embed_test, embed_bench) {
    const ps__args_embed a = {s[0], s[1], s[2], dt, 0, s_i % 2 ? 45.254834f : 0.0f};
    const uint64_t table = (uint64_t)s[1] * s[2];
    if (!wanted(v, table))
      continue;
    const op_operand o[] = {ints(s[0], 0, s[1], true), in(dt, table, 1),
                            out(dt, (uint64_t)s[0] * s[2], exact)};
    CASE(v, &a, 3, o, "T%u V%u D%u", s[0], s[1], s[2]);
  }
}
static void embed_bwd(visit *v, uint32_t dt) {
  EACH(s, v, embed_test, embed_bench)
  for (uint32_t add = 0; add < (v->sizes == OP_BENCH ? 1 : 2); add++) {
    const ps__args_embed a = {s[0], s[1], s[2], dt, add, s_i % 2 ? 45.254834f : 0.0f};
    const uint64_t table = (uint64_t)s[1] * s[2];
    if (!wanted(v, table))
      continue;
    const op_operand o[] = {ints(s[0], 0, s[1], true), in(dt, (uint64_t)s[0] * s[2], 1),
                            sum(add, dt, table, row_sums(dt, s[0]))};
    CASE(v, &a, 3, o, "T%u V%u D%u add %u", s[0], s[1], s[2], add);
  }
}

static const uint32_t loss_test[][2] = {{1, 1},     {3, 7},      {17, 1000},
                                        {5, 32003}, {9, 128256}, {300, 512}},
                      loss_bench[][2] = {{2048, 8192}};
/* z-loss and label smoothing, and both. The coefficients are large, so that a wrong one shows. */
static const float loss_terms[][2] = {{0, 0}, {1e-2f, 0}, {0, 0.1f}, {3e-2f, 0.3f}};
static void cross_entropy(visit *v, uint32_t dt) {
  /* bf16 exponents: 3e-6 at terms that matter, 2e-5 at 60 below the largest, nothing below
   * 1e-38; fp32: 1e-6 an exponent, sums of up to 128 terms a thread, and what cancels at the
   * target */
  const op_tolerance grad = dt != PS_F32 ? (op_tolerance){1, 2e-5, 1e-7}
                                         : (op_tolerance){0, 1e-5, 1e-6},
                     loss = {0, 5e-6, 2e-6};
  EACH(s, v, loss_test, loss_bench) {
    for (uint32_t k = 0; k < (v->sizes == OP_BENCH ? 1 : 4); k++) {
      const uint32_t r = s[0], vocab = s[1];
      /* not where logits are -inf, which torch caps too, and which smoothing makes infinite */
      const bool capped = v->sizes != OP_BENCH && s_i && s_i % 2 == 0,
                 masks = s_i % 2 && loss_terms[k][1] == 0.0f;
      const ps__args_cross_entropy a = {
          r, vocab, dt, capped ? 30.0f : 0.0f, loss_terms[k][0], loss_terms[k][1]};
      const uint64_t n = (uint64_t)r * vocab;
      if (!wanted(v, n))
        continue;
      const op_operand o[] = {
          drawn(PS_READ_WRITE, dt, n, 6, grad), ints(r, r > 2 ? -1 : 0, vocab, false),
          in(PS_F32, 1, 1),
          out(PS_F32, (uint64_t)r * ps__loss_columns(a.z_loss, a.label_smoothing), loss)};
      *(float *)o[2].init = 1.0f / 1024;
      /* most of every other vector, and whole stretches, masked; the target not */
      for (uint64_t i = 0; masks && i < n; i++) {
        const bool masked = i / 8 % 2 || i % vocab < vocab / 3,
                   own = (int64_t)(i % vocab) == ((int32_t *)o[1].init)[i / vocab];
        if (masked && !own && dt == PS_BF16)
          ((uint16_t *)o[0].init)[i] = 0xff80;
        if (masked && !own && dt == PS_F32)
          ((uint32_t *)o[0].init)[i] = 0xff800000u;
      }
      CASE(v, &a, 4, o, "%ux%u z %g smooth %g", r, vocab, a.z_loss, a.label_smoothing);
    }
  }
}

/* ---- sums ------------------------------------------------------------------------------------ */

static const uint32_t sum_test[][1] =
    {{1}, {7}, {1023}, {1025}, {65536}, {65537}, {200003}, {(1 << 24) + 4099}, {(1 << 25) + 77}},
                      sum_bench[][1] = {{16 << 20}};

/* Bit patterns of any size, denormals and zeros too; infinities in kind 1 and 2 of 4, NaNs in 2. */
static op_operand special(uint32_t dt, uint64_t n, size_t kind) {
  op_operand b = in(dt, n, 1);
  const size_t bytes = op_dtype_bytes(dt);
  for (uint64_t i = 0; i < n; i++) {
    const uint32_t exponent = (uint32_t)(uniform() * 255), rare = (uint32_t)(uniform() * 1000);
    uint32_t u = (uint32_t)(uniform() * 0x1p23) | (uniform() < 0.5 ? 1u << 31 : 0) |
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
static void sumsq(visit *v, uint32_t dt) {
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
static void accumulate(visit *v, uint32_t dt) {
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
                            drawn(PS_READ_WRITE, dt, n, 3,
                                  (op_tolerance){mode != 0, 0, mode & PS_LOW_READ ? 0x1p-7 : 0}),
                            drawn(mode & PS_LOW_WRITE ? PS_READ_WRITE : PS_READ, PS_F32,
                                  low ? (n + 3) / 4 : 0, 1, (op_tolerance){0, 0, INFINITY})};
    for (uint64_t i = 0; i < o[2].n * 4; i++)
      ((uint8_t *)o[2].init)[i] = (uint8_t)(i * 2654435761u >> 13);
    CASE(v, &a, low ? 3 : 2, o, "n %u mode %u", n, mode);
    if (!low)
      free(o[2].init);
  }
}
static void accumulate_sumsq(visit *v, uint32_t dt) {
  EACH(s, v, sum_test, sum_bench) {
    const ps__args_accumulate a = {.n = s[0], .dt = dt};
    if (!wanted(v, s[0]))
      continue;
    const op_operand o[] = {in(dt, s[0], 1), drawn(PS_READ_WRITE, dt, s[0], 3, exact),
                            /* of the rounded total: half an ulp of bf16 a term at most, twice */
                            out(OP_F64, 1, (op_tolerance){0, dt == PS_BF16 ? 0x1p-8 : 0x1p-23, 0})};
    CASE(v, &a, 3, o, "n %u", s[0]);
  }
}
static void fill_zero(visit *v, uint32_t dt) {
  EACH(s, v, sum_test, sum_bench)
  if (dt == PS_F32 && wanted(v, s[0])) {
    const ps__args_fill a = {4ull * s[0]};
    const op_operand o[] = {out(PS_F32, s[0], exact)};
    CASE(v, &a, 1, o, "n %u", s[0]);
  }
}
static void copy_bytes(visit *v, uint32_t dt) {
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
static void colsum(visit *v, uint32_t dt) {
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
enum { PLAIN, ACCUMULATE, BIAS, RESIDUAL, BOTH, TO_F32, N_FORMS };
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
static void gemm(visit *v, uint32_t dt) {
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
static void gemm_rows(visit *v, uint32_t dt) {
  EACH(s, v, rows_test, rows_bench)
  for (uint32_t form = 0; form < (v->sizes == OP_BENCH ? 1 : N_FORMS); form++)
    gemm_case(v, dt, s, s_i % 2 ? 8 : 0, 2, form, s_i % 2 ? 0.22f : 0.0f);
}

/* ---- FP8 ------------------------------------------------------------------------------------- */

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
static void quantize(visit *v, uint32_t dt) {
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
static void fp8_scale(visit *v, uint32_t dt) {
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
                      norm_quantize_bench[][2] = {{8192, 4096}},
                      glu_quantize_bench[][2] = {{2048, 2816}};

static void rmsnorm_quantize(visit *v, uint32_t dt) {
  EACH(s, v, computed_test, norm_quantize_bench)
  for (uint32_t forms = 1; forms <= (v->sizes == OP_BENCH ? 1 : 3); forms++) {
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
static void glu_quantize(visit *v, uint32_t dt) {
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
static void glu_bwd_quantize(visit *v, uint32_t dt) {
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
/* Tensor cores keep 14 bits of a partial sum of FP8 products, also where accumulation is exact:
 * then sums of 128 products are added in fp32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). So
 * each of K products errs by up to 2^-13 of the largest partial sum, with either sign. Partial sums
 * of 128 are as small as sqrt(128 / K) beside the result. */
static void gemm_fp8(visit *v, uint32_t dt) {
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
                                   .alpha = s_i % 2 ? 0.22f : 0.0f};
      if (!wanted(v, (uint64_t)k * (m > n ? m : n)))
        continue;
      const bool twice = dt != PS_F32 && form != PLAIN, fast = role == PS_GEMM_FORWARD;
      const op_tolerance t = {dt != PS_F32, 1e-6,
                              1e-6 + 0x1p-13 * sqrt(fast || k < 128 ? k : 128) +
                                  (twice ? 0x1p-8 : 0)};
      op_operand o[6] = {in(a.dt_a, (uint64_t)m * k, 100), scale_of(0x1p-6f),
                         in(a.dt_b, (uint64_t)n * k, 100), scale_of(0x1p-7f),
                         sum(a.accumulate, dt, (uint64_t)m * n, t)};
      uint32_t n_operands = 5;
      if (a.has_bias || a.has_residual)
        o[n_operands++] = in(dt, a.has_bias ? n : (uint64_t)m * n, 1);
      CASE(v, &a, n_operands, o, "%ux%ux%u role %u form %u", m, n, k, role, form);
    }
}

/* ---- attention against a cache --------------------------------------------------------------- */

/* rows, sequences, rows of the cache, heads, kv heads, head_dim, window. Rows are dealt out to the
 * sequences one by one; each sequence ends at a place of its own. */
static const uint32_t cached_test[][7] = {{1, 1, 1, 1, 1, 2, 0},       {1, 1, 300, 4, 1, 64, 0},
                                          {3, 3, 200, 8, 2, 16, 7},    {5, 2, 40, 6, 2, 80, 16},
                                          {70, 3, 100, 4, 4, 32, 0},   {2, 2, 130, 24, 2, 128, 0},
                                          {1, 1, 2000, 2, 2, 256, 0},  {4, 4, 64, 3, 3, 6, 0},
                                          {2, 1, 1100, 16, 2, 24, 900}},
                      cached_bench[][7] = {{1, 1, 4096, 32, 8, 128, 0}};
static void attention_cached(visit *v, uint32_t dt) {
  EACH(s, v, cached_test, cached_bench) {
    const uint32_t rows = s[0], n_sequences = s[1], cache_rows = s[2];
    const ps__args_attention a = {.n_tokens = rows,
                                  .n_heads = s[3],
                                  .n_kv_heads = s[4],
                                  .head_dim = s[5],
                                  .dt = dt,
                                  .sequence_rows = cache_rows,
                                  .window = s[6],
                                  .scale = s_i % 3 ? 0.0f : 0.3f,
                                  .softcap = s_i % 4 == 1 ? 5.0f : 0.0f};
    const uint64_t width = 2ull * s[4] * s[5], n = (uint64_t)n_sequences * cache_rows * width;
    /* scores of size 1 to 4 within 1e-6 of themselves, and so the weights; 5e-6 of what they are
     * added up to, twice; log-sum-exp as a score */
    const op_tolerance t = {dt != PS_F32, 0, 1e-5}, t_lse = {0, 2e-6, 4e-6};
    if (!wanted(v, n))
      continue;
    op_operand o[] = {in(dt, (uint64_t)rows * s[3] * s[5], 1),
                      in(dt, rows * width, 1),
                      ints(rows, 0, 1, false),
                      out(dt, (uint64_t)rows * s[3] * s[5], t),
                      out(PS_F32, (uint64_t)rows * s[3], t_lse),
                      ints(rows, 0, 1, false),
                      drawn(PS_READ_WRITE, dt, n, 1, exact)};
    int32_t *sequence = o[2].init, *pos = o[5].init;
    for (uint32_t i = 0; i < rows; i++) {
      const uint32_t q = i % n_sequences, each = (rows - q + n_sequences - 1) / n_sequences,
                     most = cache_rows - each, last = v->sizes == OP_BENCH ? most : most / (1 + q);
      sequence[i] = (int32_t)q;
      pos[i] = i && i == rows / 2 && rows > 2 ? -1 : (int32_t)(last + i / n_sequences);
    }
    CASE(v, &a, 7, o, "T%u of %u x %u heads %u/%u d%u window %u", rows, n_sequences, cache_rows,
         s[3], s[4], s[5], s[6]);
  }
}

/* ---- the table ------------------------------------------------------------------------------- */

const op_entry op_table[] = {
    {.kernel = &ps__k_fill_zero, .cases = fill_zero, .same_bits = true},
    {.kernel = &ps__k_copy_bytes, .cases = copy_bytes, .same_bits = true},
    {.kernel = &ps__k_accumulate, .cases = accumulate, .same_bits = true},
    {.kernel = &ps__k_accumulate_sumsq_host, .cases = accumulate_sumsq, .same_bits = true},
    {.kernel = &ps__k_sumsq, .cases = sumsq, .same_bits = true},
    {.kernel = &ps__k_colsum, .cases = colsum},
    {.kernel = &ps__k_embed_fwd, .cases = embed_fwd, .same_bits = true},
    {.kernel = &ps__k_embed_bwd,
     .cases = embed_bwd,
     .same_bits = true,
     .gradient_of = &ps__k_embed_fwd},
    {.kernel = &ps__k_rmsnorm_fwd, .cases = rmsnorm_fwd},
    {.kernel = &ps__k_rmsnorm_bwd, .cases = rmsnorm_bwd, .gradient_of = &ps__k_rmsnorm_fwd},
    {.kernel = &ps__k_qkv_split_fwd, .cases = qkv_split_fwd},
    {.kernel = &ps__k_qkv_split_bwd, .cases = qkv_split_bwd, .gradient_of = &ps__k_qkv_split_fwd},
    {.kernel = &ps__k_glu_fwd, .cases = glu_fwd},
    {.kernel = &ps__k_glu_bwd, .cases = glu_bwd, .gradient_of = &ps__k_glu_fwd},
    {.kernel = &ps__k_cross_entropy, .cases = cross_entropy},
    {.kernel = &ps__k_gemm, .cases = gemm},
    {.kernel = &ps__k_gemm_rows, .cases = gemm_rows},
    {.kernel = &ps__k_quantize, .cases = quantize, .same_bits = true},
    {.kernel = &ps__k_fp8_scale, .cases = fp8_scale, .same_bits = true},
    {.kernel = &ps__k_rmsnorm_quantize, .cases = rmsnorm_quantize},
    {.kernel = &ps__k_glu_quantize, .cases = glu_quantize},
    {.kernel = &ps__k_glu_bwd_quantize, .cases = glu_bwd_quantize},
    {.kernel = &ps__k_gemm_fp8, .cases = gemm_fp8},
    {.kernel = &ps__k_attention_cached, .cases = attention_cached},
};
const uint32_t n_op_table = sizeof op_table / sizeof *op_table;

void op_cases(uint32_t i, uint32_t dt, op_sizes sizes, uint64_t seed, op_visit visit_case,
              void *user) {
  visit v = {&op_table[i], sizes, visit_case, user};
  seed_now = seed * 0x9e3779b97f4a7c15u | 1;
  op_table[i].cases(&v, dt);
}
