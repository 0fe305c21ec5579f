/* op_cases_layers.c - the cases of norms and activations, of q, k and v, of embedding and loss, and
 * of attention against a cache. */
#include "op_families.h"
#include "model/rope.h"

/* ---- norms and activations ------------------------------------------------------------------- */

static const uint32_t norm_test[][2] = {{1, 1},     {1, 4096},   {3, 8},     {7, 1000},
                                        {9, 33},    {257, 4096}, {33, 5120}, {5, 12288},
                                        {2100, 64}, {2049, 40},  {600, 8192}},
                      norm_bench[][2] = {{8192, 1024}};

void op_rmsnorm_fwd(visit *v, uint32_t dt) {
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
void op_rmsnorm_bwd(visit *v, uint32_t dt) {
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
void op_glu_fwd(visit *v, uint32_t dt) {
  EACH(s, v, glu_test, glu_bench) {
    const ps__args_glu a = {s[0], s[1], dt, s_i % 2 ? PS_ACTIVATION_GELU_TANH : PS_ACTIVATION_SILU};
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, 2 * n))
      continue;
    const op_operand o[] = {in(dt, 2 * n, 4), out(dt, n, glu_tolerance(dt, a.activation))};
    CASE(v, &a, 2, o, "%ux%u", s[0], s[1]);
  }
}
void op_glu_bwd(visit *v, uint32_t dt) {
  EACH(s, v, glu_test, glu_bench) {
    const ps__args_glu a = {s[0], s[1], dt, s_i % 2 ? PS_ACTIVATION_GELU_TANH : PS_ACTIVATION_SILU};
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, 2 * n))
      continue;
    const op_operand o[] = {op_drawn(PS_READ_WRITE, dt, n, 1, glu_tolerance(dt, a.activation)),
                            op_drawn(PS_READ_WRITE, dt, 2 * n, 4, glu_tolerance(dt, a.activation))};
    CASE(v, &a, 2, o, "%ux%u", s[0], s[1]);
  }
}

static const uint32_t scale_test[][2] = {{1, 1}, {5, 72}, {300, 130}, {3, 4096}},
                      scale_bench[][2] = {{8192, 4096}};
void op_layer_scale_fwd(visit *v, uint32_t dt) {
  EACH(s, v, scale_test, scale_bench) {
    const ps__args_layer_scale a = {s[0], s[1], dt, 0};
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, n))
      continue;
    const op_operand o[] = {op_drawn(PS_READ_WRITE, dt, n, 1, exact), in(dt, 1, 1)};
    CASE(v, &a, 2, o, "%ux%u", s[0], s[1]);
  }
}
void op_layer_scale_bwd(visit *v, uint32_t dt) {
  EACH(s, v, scale_test, scale_bench)
  for (uint32_t add = 0; add < (v->sizes == OP_BENCH ? 1 : 2); add++) {
    const ps__args_layer_scale a = {s[0], s[1], dt, add};
    const uint64_t n = (uint64_t)s[0] * s[1];
    if (!wanted(v, n))
      continue;
    const op_operand o[] = {op_drawn(PS_READ_WRITE, dt, n, 1, exact), in(dt, 1, 1),
                            sum(add, dt, 1, exact)};
    CASE(v, &a, 3, o, "%ux%u add %u", s[0], s[1], add);
  }
}

/* ---- q, k and v ------------------------------------------------------------------------------ */

static const uint32_t qkv_test[][4] = {{1, 1, 1, 2},
                                       {5, 4, 2, 16},
                                       {33, 8, 2, 64},
                                       {130, 32, 8, 128},
                                       {9, 3, 1, 80},
                                       {7, 5, 5, 6},
                                       {40, 4, 1, 256},
                                       {3, 2, 1, 512},
                                       {2100, 2, 1, 32},
                                       {70, 64, 8, 128},
                                       {9, 11, 4, 320},
                                       /* as Gemma 4 */
                                       {9, 4, 2, 24},
                                       {33, 8, 1, 512},
                                       {12, 4, 4, 40},
                                       {9, 3, 0, 40},
                                       {33, 8, 0, 64}},
                      qkv_bench[][4] = {{2048, 16, 8, 64}};
enum { GEMMA4 = 11 }; /* the first of these: pairs of the whole head, v normed, every other one k */
/* The operands that there are without keys and values. */
static uint32_t without_kv(op_operand *o, uint32_t n, const ps__args_qkv *a, uint64_t left_out) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < n; i++)
    if (a->n_kv_heads || !(left_out >> i & 1))
      o[kept++] = o[i];
    else
      free(o[i].init);
  return kept;
}
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
  a.interleaved = norm != PS_QK_NORM_ROW && i % 5 == 2;
  if (norm != PS_QK_NORM_ROW && i % 3 == 1) {
    a.position_original = 70000;
    a.position_beta = 0.3f;
  }
  if (i >= GEMMA4) {
    a.whole_head = norm != PS_QK_NORM_ROW;
    a.interleaved = 0;
    a.value_norm = norm == PS_QK_NORM_HEAD;
    a.shared_keys = a.value_norm && i % 2 == 0;
  }
  return a;
}
void op_qkv_split_fwd(visit *v, uint32_t dt) {
  EACH(s, v, qkv_test, qkv_bench)
  for (uint32_t norm = 0; norm < (v->sizes == OP_BENCH ? 1 : 4); norm++) {
    const ps__args_qkv a = qkv_args(s, s_i, dt, norm, 0);
    const uint64_t q = (uint64_t)s[1] * s[3] * s[0], k = (uint64_t)s[2] * s[3] * s[0];
    /* cos and sin within an ulp on either side: of the pair. With norm 3e-6 as rmsnorm; bf16
     * then rounds before the rotation too: an ulp, 2^-7, of the partner at worst */
    const op_tolerance t = dt != PS_F32 ? (op_tolerance){1, 0, norm ? 0x1p-7 : 1e-6}
                                        : (op_tolerance){0, 0, norm ? 4e-6 : 5e-7};
    if (!wanted(v, q + 2 * k))
      continue;
    if (!s[2] && norm == PS_QK_NORM_ROW)
      continue; /* refused */
    op_operand o[] = {in(dt, a.shared_keys ? q + k : q + 2 * k, 1),
                      op_ints(s[0], 0, 1048576, false),
                      out(dt, q, t),
                      out(dt, 2 * k, t),
                      in(dt, norm ? ps__q_norm_elements(&a) : 0, 1),
                      in(dt, norm ? ps__k_norm_elements(&a) : 0, 1)};
    for (uint32_t i = norm ? 6 : 4; i < 6; i++)
      free(o[i].init);
    const uint32_t n = without_kv(o, norm ? 6 : 4, &a, 1 << 3 | 1 << 5);
    CASE(v, &a, n, o, "T%u heads %u/%u d%u norm %u", s[0], s[1], s[2], s[3], norm);
  }
}
void op_qkv_split_bwd(visit *v, uint32_t dt) {
  EACH(s, v, qkv_test, qkv_bench)
  for (uint32_t flags = 0; flags < (v->sizes == OP_BENCH ? 1 : 8); flags++) {
    const uint32_t norm = flags % 4, add = flags / 4, heads = norm == PS_QK_NORM_ROW ? 0 : 1;
    const ps__args_qkv a = qkv_args(s, s_i, dt, norm, add);
    const uint64_t q = (uint64_t)s[1] * s[3] * s[0], k = (uint64_t)s[2] * s[3] * s[0],
                   of_q = norm ? ps__q_norm_elements(&a) : 0,
                   of_k = norm ? ps__k_norm_elements(&a) : 0,
                   of_qkv = a.shared_keys ? q + k : q + 2 * k;
    const op_tolerance t = dt != PS_F32 ? (op_tolerance){1, 0, norm ? 1e-5 : 1e-6}
                                        : (op_tolerance){0, 0, norm ? 1e-5 : 5e-7};
    if (!wanted(v, q + 2 * k))
      continue;
    if (!s[2] && norm == PS_QK_NORM_ROW)
      continue; /* refused */
    op_operand o[] = {in(dt, q, 1),
                      in(PS_F32, 2 * k, 1),
                      op_ints(s[0], 0, 1048576, false),
                      out(dt, of_qkv, t),
                      in(dt, norm ? of_qkv : 0, 1),
                      in(dt, of_q, 1),
                      in(dt, of_k, 1),
                      sum(add, dt, of_q, row_sums(dt, (double)s[0] * (heads ? s[1] : 1))),
                      sum(add, dt, of_k, row_sums(dt, (double)s[0] * (heads ? s[2] : 1)))};
    for (uint32_t i = norm ? 9 : 4; i < 9; i++)
      free(o[i].init);
    const uint32_t n = without_kv(o, norm ? 9 : 4, &a, 1 << 1 | 1 << 6 | 1 << 8);
    CASE(v, &a, n, o, "T%u heads %u/%u d%u flags %u", s[0], s[1], s[2], s[3], flags);
  }
}

/* ---- embedding and loss ---------------------------------------------------------------------- */

static const uint32_t embed_test[][3] = {{1, 1, 1},         {7, 5, 33},       {1000, 300, 64},
                                         {513, 2048, 4096}, {3000, 1500, 40}, {2, 70000, 8},
                                         {2500, 1, 24},     {40, 1, 24}},
                      embed_bench[][3] = {{2048, 8192, 1024}};
void op_embed_fwd(visit *v, uint32_t dt) {
  EACH(s, v, embed_test, embed_bench) {
    const ps__args_embed a = {s[0], s[1], s[2], dt, 0, s_i % 2 ? 45.254834f : 0.0f, -1};
    const uint64_t table = (uint64_t)s[1] * s[2];
    if (!wanted(v, table))
      continue;
    const op_operand o[] = {op_ints(s[0], 0, s[1], true), in(dt, table, 1),
                            out(dt, (uint64_t)s[0] * s[2], exact)};
    CASE(v, &a, 3, o, "T%u V%u D%u", s[0], s[1], s[2]);
  }
}
void op_embed_bwd(visit *v, uint32_t dt) {
  EACH(s, v, embed_test, embed_bench)
  for (uint32_t add = 0; add < (v->sizes == OP_BENCH ? 1 : 2); add++) {
    /* small ids are the frequent ones */
    const int32_t pad = v->sizes == OP_BENCH || s_i % 3 == 0 ? -1 : (int32_t)(s_i % 3 - 1);
    const ps__args_embed a = {s[0], s[1], s[2], dt, add, s_i % 2 ? 45.254834f : 0.0f, pad};
    const uint64_t table = (uint64_t)s[1] * s[2];
    if (!wanted(v, table))
      continue;
    const op_operand o[] = {op_ints(s[0], 0, s[1], true), in(dt, (uint64_t)s[0] * s[2], 1),
                            sum(add, dt, table, row_sums(dt, s[0]))};
    CASE(v, &a, 3, o, "T%u V%u D%u add %u pad %d", s[0], s[1], s[2], add, pad);
  }
}

static const uint32_t loss_test[][2] = {{1, 1},     {3, 7},      {17, 1000},
                                        {5, 32003}, {9, 128256}, {300, 512}},
                      loss_bench[][2] = {{2048, 8192}};
/* z-loss and label smoothing, and both. The coefficients are large, so that a wrong one shows. */
static const float loss_terms[][2] = {{0, 0}, {1e-2f, 0}, {0, 0.1f}, {3e-2f, 0.3f}};
void op_cross_entropy(visit *v, uint32_t dt) {
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
          op_drawn(PS_READ_WRITE, dt, n, 6, grad), op_ints(r, r > 2 ? -1 : 0, vocab, false),
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

/* ---- scores ---------------------------------------------------------------------------------- */

/* Every third row has a target; of pairs, row 3 i + 1 is the rejected one of row 3 i. */
static void draw_targets(int32_t *target, const ps__args_score_loss *a) {
  for (uint32_t i = 0; i < a->rows; i++) {
    const float number = (float)i / 16 - 1;
    target[i] = -1;
    if (a->problem == PS_PROBLEM_PAIRS && i % 3 < 2 && i / 3 * 3 + 1 < a->rows)
      target[i] = i % 3 ? 1 : -2;
    else if (a->problem == PS_PROBLEM_PAIRS || i % 3)
      continue;
    else if (a->problem == PS_PROBLEM_REGRESSION)
      memcpy(&target[i], &number, sizeof number);
    else
      target[i] =
          (int32_t)(i * 2654435761u %
                    (a->problem == PS_PROBLEM_MULTI_LABEL ? (uint32_t)(1ull << a->cols) : a->cols));
  }
}

static const uint32_t scores_test[][2] = {{1, 1}, {7, 3}, {50, 31}, {9, 1000}},
                      scores_bench[][2] = {{8192, 1}};
void op_score_loss(visit *v, uint32_t dt) {
  /* fp64 inside: one rounding, and that of the product with the scale */
  const op_tolerance grad = {1, 1e-6, 1e-7}, loss = {0, 1e-6, 1e-6};
  EACH(s, v, scores_test, scores_bench) {
    for (uint32_t problem = PS_PROBLEM_SINGLE_LABEL; problem <= PS_PROBLEM_EMBEDDING; problem++) {
      const bool one = problem == PS_PROBLEM_REGRESSION || problem == PS_PROBLEM_PAIRS,
                 trained = problem != PS_PROBLEM_EMBEDDING;
      const ps__args_score_loss a = {s[0], one ? 1 : s[1], dt, problem};
      const uint64_t n = (uint64_t)a.rows * a.cols;
      if ((problem == PS_PROBLEM_MULTI_LABEL && a.cols > PS_MAX_LABEL_BITS) || !wanted(v, n))
        continue;
      const op_operand o[] = {op_drawn(PS_READ, dt, n, 3, grad), op_ints(a.rows, -1, 1, false),
                              in(PS_F32, 1, 1), out(PS_F32, 2ull * a.rows, loss), out(dt, n, grad)};
      *(float *)o[2].init = 1.0f / 64;
      draw_targets(o[1].init, &a);
      CASE(v, &a, trained ? 5 : 4, o, "%s %ux%u", ps_problem_name(problem), a.rows, a.cols);
    }
  }
}

/* ---- attention against a cache --------------------------------------------------------------- */

/* rows, sequences, rows of the cache, heads, kv heads, head_dim, window. Rows are dealt out to the
 * sequences one by one; each sequence ends at a place of its own. */
static const uint32_t cached_test[][7] = {{1, 1, 1, 1, 1, 2, 0},        {1, 1, 300, 4, 1, 64, 0},
                                          {3, 3, 200, 8, 2, 16, 7},     {5, 2, 40, 6, 2, 80, 16},
                                          {70, 3, 100, 4, 4, 32, 0},    {2, 2, 130, 24, 2, 128, 0},
                                          {1, 1, 2000, 2, 2, 256, 0},   {4, 4, 64, 3, 3, 6, 0},
                                          {2, 1, 1100, 16, 2, 24, 900}, {3, 1, 70, 10, 1, 512, 0},
                                          {1, 1, 9, 2, 1, 268, 0}},
                      cached_bench[][7] = {{1, 1, 4096, 32, 8, 128, 0}};
void op_attention_cached(visit *v, uint32_t dt) {
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
                      op_ints(rows, 0, 1, false),
                      out(dt, (uint64_t)rows * s[3] * s[5], t),
                      out(PS_F32, (uint64_t)rows * s[3], t_lse),
                      op_ints(rows, 0, 1, false),
                      op_drawn(PS_READ_WRITE, dt, n, 1, exact)};
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
