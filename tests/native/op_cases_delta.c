/* op_cases_delta.c - the cases of the gated delta rule and of what is around it. */
#include "op_families.h"

/* Where documents begin: about every @each rows, none where it is 0. The first may have begun
 * before the chunk. */
static op_operand documents(uint32_t n, uint32_t row0, uint32_t each) {
  op_operand b = {PS_READ, OP_I32, n, malloc(4 * (size_t)n + 1), exact};
  int32_t start = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (each && op_uniform() * each < 1)
      start = (int32_t)(row0 + i);
    ((int32_t *)b.init)[i] = start;
  }
  return b;
}

/* T, row0, C, W, rows a document */
static const uint32_t conv_test[][5] = {{1, 0, 1, 2, 0},     {5, 0, 19, 4, 2},
                                        {70, 0, 40, 4, 9},   {130, 33, 64, 4, 0},
                                        {130, 33, 48, 8, 5}, {2, 7, 33, 4, 0},
                                        {70, 9, 64, 2, 9},   {70, 0, 40, 3, 0},
                                        {66, 33, 64, 5, 7},  {40, 5, 48, 6, 0},
                                        {33, 0, 32, 7, 4}},
                      conv_bench[][5] = {{8192, 0, 8192, 4, 2048}};

/* Four products of size up to 3 times 3 and a sum of them, 2^-24 each; exp and the quotient as in
 * glu. dw: sums of 64 rows and of 64 such sums. */
static op_tolerance conv_tolerance(uint32_t dt) {
  return dt != PS_F32 ? (op_tolerance){1, 2e-5, 2e-6} : (op_tolerance){0, 2e-6, 1e-6};
}

static void conv(visit *v, uint32_t dt, bool backward) {
  EACH(s, v, conv_test, conv_bench) {
    const ps__args_conv a = {.n_tokens = s[0],
                             .row0 = s[1],
                             .channels = s[2],
                             .width = s[3],
                             .dt = dt,
                             .accumulate_dw = backward && s_i % 2,
                             .accumulate_carry = backward && s_i % 3 == 0};
    const uint64_t n = (uint64_t)s[0] * s[2], tail = (uint64_t)(s[3] - 1) * s[2];
    const op_tolerance t = conv_tolerance(dt);
    const op_operand x = in(dt, n, 1), w = in(dt, (uint64_t)s[2] * s[3], 1),
                     doc = documents(s[0], s[1], s[4]), before = in(dt, tail, 1);
    if (backward) {
      const op_operand o[] = {x,
                              w,
                              doc,
                              before,
                              in(dt, n, 1),
                              sum(a.accumulate_carry, PS_F32, tail, conv_tolerance(PS_F32)),
                              out(dt, n, t),
                              sum(a.accumulate_dw, dt, (uint64_t)s[2] * s[3], row_sums(dt, s[0]))};
      CASE(v, &a, 8, o, "%u tokens from %u on, %u channels, width %u", s[0], s[1], s[2], s[3]);
    } else {
      const op_operand o[] = {x, w, doc, before, out(dt, n, t), out(dt, tail, exact)};
      CASE(v, &a, 6, o, "%u tokens from %u on, %u channels, width %u", s[0], s[1], s[2], s[3]);
    }
  }
}
void op_conv_fwd(visit *v, uint32_t dt) { conv(v, dt, false); }
void op_conv_bwd(visit *v, uint32_t dt) { conv(v, dt, true); }

/* T, row0, key heads, value heads, dk, dv, rows a document */
static const uint32_t delta_test[][7] =
    {{1, 0, 1, 1, 1, 1, 0},      {5, 0, 1, 2, 8, 19, 2},         {67, 0, 2, 2, 16, 16, 0},
     {130, 9, 2, 4, 20, 33, 40}, {64, 64, 1, 3, 32, 8, 0},       {150, 7, 2, 2, 33, 16, 0},
     {100, 3, 2, 6, 72, 40, 45}, {1100, 3, 1, 2, 128, 128, 400}, {8300, 5, 1, 2, 16, 24, 900}},
                      delta_bench[][7] = {{8192, 0, 16, 32, 128, 128, 2048}};

/* A state is a sum that forgets: errors of 2^-24 of its largest element a row, over some tens of
 * rows that it remembers (e^g is 0.5 on average here), each with sums of up to 33 terms; measured
 * within a third of this. The backward pass has two such chains. */
static op_tolerance delta_tolerance(uint32_t dt, bool backward) {
  return (op_tolerance){dt != PS_F32, backward ? 4e-6 : 2e-6, backward ? 1e-5 : 4e-6};
}

static void delta(visit *v, uint32_t dt, bool backward) {
  EACH(s, v, delta_test, delta_bench) {
    const ps__args_delta a = {.n_tokens = s[0],
                              .row0 = s[1],
                              .n_key_heads = s[2],
                              .n_value_heads = s[3],
                              .key_dim = s[4],
                              .value_dim = s[5],
                              .dt = dt,
                              .accumulate_dw = backward && s_i % 2,
                              .accumulate_carry = backward && s_i % 3 == 0};
    const uint64_t c = 2 * s[2] * s[4] + s[3] * s[5], state = (uint64_t)s[3] * s[4] * s[5];
    if (!wanted(v, s[0] * c))
      continue;
    const op_tolerance t = delta_tolerance(dt, backward), f = delta_tolerance(PS_F32, backward),
                       w = {t.ulps, t.rel, t.of_max + row_sums(dt, s[0]).of_max};
    const op_operand qkv = in(dt, s[0] * c, 1), ba = in(dt, 2ull * s[0] * s[3], 1),
                     a_log = in(dt, s[3], 0.5f), dt_bias = in(dt, s[3], 1),
                     doc = documents(s[0], s[1], s[6]), before = in(PS_F32, state, 0.3f);
    const uint64_t values = (uint64_t)s[0] * s[3] * s[5];
    if (backward) {
      const op_operand o[] = {qkv,
                              ba,
                              a_log,
                              dt_bias,
                              doc,
                              before,
                              in(dt, values, 1),
                              sum(a.accumulate_carry, PS_F32, state, f),
                              out(dt, s[0] * c, t),
                              out(dt, 2ull * s[0] * s[3], t),
                              sum(a.accumulate_dw, dt, s[3], w),
                              sum(a.accumulate_dw, dt, s[3], w)};
      CASE(v, &a, 12, o, "%u tokens from %u on, heads %u of %u, %u of %u", s[0], s[1], s[2], s[4],
           s[3], s[5]);
    } else {
      const op_operand o[] = {
          qkv, ba, a_log, dt_bias, doc, before, out(dt, values, t), out(PS_F32, state, f)};
      CASE(v, &a, 8, o, "%u tokens from %u on, heads %u of %u, %u of %u", s[0], s[1], s[2], s[4],
           s[3], s[5]);
    }
  }
}
void op_delta_fwd(visit *v, uint32_t dt) { delta(v, dt, false); }
void op_delta_bwd(visit *v, uint32_t dt) { delta(v, dt, true); }

/* Rows of @n sequences, the last one's first: the first sequence begins, another has had as many
 * rows as it has number. Between the first two of them is a row of none. */
static void sequences(op_operand *sequence, op_operand *pos, uint32_t rows, uint32_t n) {
  *sequence = op_ints(rows, 0, 1, false);
  *pos = op_ints(rows, 0, 1, false);
  const uint32_t each = rows / n;
  for (uint32_t t = 0; t < rows; t++) {
    const uint32_t i = t / each < n ? t / each : n - 1, q = n - 1 - i;
    ((int32_t *)sequence->init)[t] = (int32_t)q;
    ((int32_t *)pos->init)[t] =
        n > 1 && rows > n && t == each - 1 ? -1 : (int32_t)(q + t - i * each);
  }
}

/* T, sequences, C, W */
static const uint32_t conv_cached_test[][4] = {{1, 1, 1, 2},
                                               {4, 4, 19, 4},
                                               {70, 3, 40, 4},
                                               {9, 4, 33, 8}},
                      conv_cached_bench[][4] = {{64, 64, 8192, 4}};

void op_conv_cached(visit *v, uint32_t dt) {
  EACH(s, v, conv_cached_test, conv_cached_bench) {
    const ps__args_conv a = {.n_tokens = s[0], .channels = s[2], .width = s[3], .dt = dt};
    const uint64_t n = (uint64_t)s[0] * s[2];
    op_operand o[] = {
        in(dt, n, 1), in(dt, (uint64_t)s[2] * s[3], 1),
        {0},          out(dt, n, conv_tolerance(dt)),
        {0},          op_drawn(PS_READ_WRITE, dt, (uint64_t)s[1] * (s[3] - 1) * s[2], 1, exact)};
    sequences(&o[2], &o[4], s[0], s[1]);
    CASE(v, &a, 6, o, "%u rows of %u, %u channels, width %u", s[0], s[1], s[2], s[3]);
  }
}

/* T, sequences, key heads, value heads, dk, dv */
static const uint32_t delta_cached_test[][6] = {{1, 1, 1, 1, 1, 1},
                                                {4, 4, 1, 2, 8, 19},
                                                {150, 3, 2, 4, 20, 33},
                                                {9, 2, 1, 1, 256, 40}},
                      delta_cached_bench[][6] = {{64, 64, 16, 32, 128, 128}};

void op_delta_cached(visit *v, uint32_t dt) {
  EACH(s, v, delta_cached_test, delta_cached_bench) {
    const ps__args_delta a = {.n_tokens = s[0],
                              .n_key_heads = s[2],
                              .n_value_heads = s[3],
                              .key_dim = s[4],
                              .value_dim = s[5],
                              .dt = dt};
    const uint64_t c = 2 * s[2] * s[4] + s[3] * s[5], state = (uint64_t)s[3] * s[4] * s[5];
    if (!wanted(v, s[1] * state))
      continue;
    op_operand o[] = {
        in(dt, s[0] * c, 1),
        in(dt, 2ull * s[0] * s[3], 1),
        in(dt, s[3], 0.5f),
        in(dt, s[3], 1),
        {0},
        out(dt, (uint64_t)s[0] * s[3] * s[5], delta_tolerance(dt, false)),
        {0},
        op_drawn(PS_READ_WRITE, PS_F32, s[1] * state, 0.3f, delta_tolerance(PS_F32, false))};
    sequences(&o[4], &o[6], s[0], s[1]);
    CASE(v, &a, 8, o, "%u rows of %u, heads %u of %u, %u of %u", s[0], s[1], s[2], s[4], s[3],
         s[5]);
  }
}

/* T, heads, d */
static const uint32_t norm_test[][3] = {{1, 2, 7},     {5, 3, 19},  {70, 4, 64},
                                        {300, 2, 128}, {9, 2, 260}, {6, 3, 301}},
                      norm_bench[][3] = {{8192, 32, 128}};

static void gated_norm(visit *v, uint32_t dt, bool backward) {
  EACH(s, v, norm_test, norm_bench) {
    const ps__args_gated_norm a = {.n_tokens = s[0],
                                   .n_heads = s[1],
                                   .head_dim = s[2],
                                   .dt = dt,
                                   .accumulate_dw = backward && s_i % 2,
                                   .eps = 1e-6f};
    const uint64_t n = (uint64_t)s[0] * s[1] * s[2];
    const op_tolerance g = glu_tolerance(dt, PS_ACTIVATION_SILU),
                       t = {g.ulps, g.rel + norm_tolerance(dt).rel, g.of_max + 3e-6};
    const op_operand x = in(dt, n, 2), z = in(dt, n, 2), w = in(dt, s[2], 1);
    if (backward) {
      const op_operand o[] = {x,
                              z,
                              w,
                              in(dt, n, 1),
                              out(dt, n, t),
                              out(dt, n, t),
                              sum(a.accumulate_dw, dt, s[2], row_sums(dt, s[0] * s[1]))};
      CASE(v, &a, 7, o, "%u tokens, %u heads of %u", s[0], s[1], s[2]);
    } else {
      const op_operand o[] = {x, z, w, out(dt, n, t)};
      CASE(v, &a, 4, o, "%u tokens, %u heads of %u", s[0], s[1], s[2]);
    }
  }
}
void op_gated_norm_fwd(visit *v, uint32_t dt) { gated_norm(v, dt, false); }
void op_gated_norm_bwd(visit *v, uint32_t dt) { gated_norm(v, dt, true); }

/* T, groups, widths, parts of the first tensor, tail */
static const uint32_t heads_test[][8] = {{1, 1, 3, 0, 0, 0, 1, 0},
                                         {5, 3, 4, 4, 0, 0, 1, 7},
                                         {33, 2, 5, 5, 9, 9, 3, 0},
                                         {70, 4, 2, 2, 0, 0, 2, 0},
                                         {2100, 2, 8, 16, 8, 0, 1, 16}},
                      heads_bench[][8] = {{8192, 16, 256, 256, 0, 0, 1, 2048}};

static void heads(visit *v, uint32_t dt, bool join) {
  EACH(s, v, heads_test, heads_bench) {
    const ps__args_heads a = {.n_tokens = s[0],
                              .n_groups = s[1],
                              .width = {s[2], s[3], s[4], s[5]},
                              .n_first = s[6],
                              .tail = s[7],
                              .dt = dt};
    const uint64_t n = ps__heads_columns(&a, 0, PS_HEAD_PARTS),
                   n1 = ps__heads_columns(&a, 0, a.n_first);
    op_operand o[3] = {join ? in(dt, s[0] * (n1 + a.tail), 1) : in(dt, s[0] * (n + a.tail), 1)};
    uint32_t n_o = 1;
    if (!join)
      o[n_o++] = out(dt, s[0] * (n1 + a.tail), exact);
    if (n1 < n)
      o[n_o++] = join ? in(dt, s[0] * (n - n1), 1) : out(dt, s[0] * (n - n1), exact);
    if (join)
      o[n_o++] = out(dt, s[0] * (n + a.tail), exact);
    CASE(v, &a, n_o, o, "%u tokens, %u groups", s[0], s[1]);
  }
}
void op_heads_split(visit *v, uint32_t dt) { heads(v, dt, false); }
void op_heads_join(visit *v, uint32_t dt) { heads(v, dt, true); }

/* T, columns, gates, residual, the mean of g: where that is large, 1 - sigmoid(g) has few bits */
static const uint32_t sigmoid_test[][5] = {{1, 1, 1, 0, 0},  {5, 19, 19, 1, 0}, {33, 40, 1, 1, 0},
                                           {7, 48, 3, 0, 0}, {6, 64, 64, 1, 0}, {9, 24, 24, 0, 13},
                                           {9, 24, 3, 0, 13}};
static const uint32_t sigmoid_bench[][5] = {{8192, 4096, 4096, 0, 0}};

/* A sum of up to 40 terms of size 9, for dg */
static void sigmoid_gate(visit *v, uint32_t dt, bool backward) {
  EACH(s, v, sigmoid_test, sigmoid_bench) {
    const ps__args_sigmoid_gate a = {.n_tokens = s[0],
                                     .cols = s[1],
                                     .n_gates = s[2],
                                     .dt = dt,
                                     .has_residual = backward ? 0 : s[3]};
    const uint64_t n = (uint64_t)s[0] * s[1], m = (uint64_t)s[0] * s[2];
    op_tolerance t = glu_tolerance(dt, PS_ACTIVATION_SILU);
    t.of_max += 3e-6f;
    const op_operand x = in(dt, n, 1), g = in(dt, m, 2);
    for (uint64_t i = 0; s[4] && i < m; i++)
      ps__store1_f32(g.init, dt, i, (float)(s[4] + op_value(g.init, dt, i)));
    if (backward) {
      const op_operand o[] = {x, g, in(dt, n, 1), out(dt, n, t), out(dt, m, t)};
      CASE(v, &a, 5, o, "%u tokens, %u columns, %u gates near %u", s[0], s[1], s[2], s[4]);
    } else {
      op_operand o[4] = {x, g, out(dt, n, t)};
      if (s[3])
        o[3] = in(dt, n, 1);
      CASE(v, &a, 3 + s[3], o, "%u tokens, %u columns, %u gates", s[0], s[1], s[2]);
    }
  }
}
void op_sigmoid_gate_fwd(visit *v, uint32_t dt) { sigmoid_gate(v, dt, false); }
void op_sigmoid_gate_bwd(visit *v, uint32_t dt) { sigmoid_gate(v, dt, true); }
