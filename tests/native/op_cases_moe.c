/* op_cases_moe.c - the cases of the ops of experts. */
#include "op_families.h"

/* T, E, k. By turns routing is even, and skewed so that many experts have no row. */
static const uint32_t moe_test[][3] = {{1, 1, 1},    {5, 3, 2},     {33, 64, 8}, {40, 128, 8},
                                       {7, 512, 16}, {130, 16, 16}, {257, 8, 2}, {65, 100, 4}},
                      moe_bench[][3] = {{2048, 64, 8}};

/* What the router chose, and where rows lie: operands of the ops after it. */
typedef struct chosen {
  uint32_t t, e, k;
  uint16_t *ids;
  int32_t *offsets, *slot;
} chosen;

static void choose(chosen *c, const uint32_t *s, bool skewed) {
  const size_t rows = (size_t)s[0] * s[2];
  *c = (chosen){s[0], s[1], s[2], malloc(2 * rows + 1), calloc(s[1] + 1, 4), malloc(4 * rows)};
  for (size_t i = 0; i < rows; i++) {
    const size_t first = i - i % c->k;
    double u = op_uniform();
    uint32_t id = (uint32_t)((skewed ? u * u * u : u) * c->e);
    for (size_t j = first; j < i; j++)
      if (c->ids[j] == id) { /* taken: the next one, and look again */
        id = (id + 1) % c->e;
        j = first - 1;
      }
    c->ids[i] = (uint16_t)id;
    c->offsets[id + 1]++;
  }
  int32_t next[PS_MAX_EXPERTS];
  for (uint32_t e = 0; e < c->e; e++)
    next[e] = c->offsets[e], c->offsets[e + 1] += c->offsets[e];
  for (size_t i = 0; i < rows; i++)
    c->slot[i] = next[c->ids[i]]++;
}
static void forget(chosen *c) {
  free(c->ids);
  free(c->offsets);
  free(c->slot);
}
static op_operand copied(uint32_t dt, uint64_t n, const void *from) {
  op_operand b = {PS_READ, dt, n, malloc(n * op_dtype_bytes(dt) + 1), exact};
  memcpy(b.init, from, n * op_dtype_bytes(dt));
  return b;
}
static op_operand ids_of(const chosen *c) { return copied(OP_U16, (uint64_t)c->t * c->k, c->ids); }
static op_operand slots_of(const chosen *c) {
  return copied(OP_I32, (uint64_t)c->t * c->k, c->slot);
}
static op_operand offsets_of(const chosen *c) { return copied(OP_I32, c->e + 1, c->offsets); }
/* positive, below 1 */
static op_operand weights(uint64_t n) {
  op_operand b = in(PS_F32, n, 1);
  for (uint64_t i = 0; i < n; i++)
    ((float *)b.init)[i] = (float)op_uniform();
  return b;
}

/* exp is 2 ulp off, the sum is at most 512 / 16 + 4 additions deep */
static const op_tolerance of_softmax = {0, 4e-6, 1e-7};

/* Logits: drawn; with many ties; with a NaN, infinities and rows of NaN alone. */
static op_operand logits_of(const uint32_t *s, uint32_t kind) {
  op_operand b = in(PS_F32, (uint64_t)s[0] * s[1], 2);
  float *x = b.init;
  for (uint64_t i = 0; i < b.n && kind; i++)
    x[i] = kind == 1 ? rintf(x[i]) * 0.5f : i % 7 == 3 ? NAN : i % 11 == 5 ? -INFINITY : x[i];
  for (uint32_t e = 0; kind == 1 && e < s[1]; e++)
    x[e] = e % 2 ? 0.0f : -0.0f; /* a row of equal logits */
  for (uint32_t e = 0; kind == 2 && e < s[1]; e++) {
    x[e] = NAN;
    if (s[0] > 1)
      x[s[1] + e] = -INFINITY;
    if (s[0] > 2)
      x[2 * (size_t)s[1] + e] = e == s[1] / 2 ? INFINITY : 1.0f;
  }
  return b;
}
/* Groups of a router: the most that the shape allows, by turns half of them or all but one. */
static void group(ps__args_moe_route *a, uint32_t i) {
  for (uint32_t n = 16; n > 1; n /= 2)
    if (a->n_experts % n == 0 && a->n_experts / n >= 2) {
      const uint32_t each = a->n_experts / n, least = (a->n_used + each - 1) / each,
                     used = i % 2 ? n / 2 : n - 1;
      a->n_groups = n;
      a->n_groups_used = used > least ? used : least;
      return;
    }
}
void op_moe_route(visit *v, uint32_t dt) {
  EACH(s, v, moe_test, moe_bench)
  for (uint32_t kind = 0; kind < (dt != PS_F32 ? 0 : v->sizes == OP_BENCH ? 1 : 7); kind++) {
    ps__args_moe_route a = {
        .n_tokens = s[0], .n_experts = s[1], .n_used = s[2], .renorm = (s_i + kind) % 2};
    const uint64_t n = (uint64_t)s[0] * s[2];
    if (kind > 2) { /* with sigmoids, a bias, groups and a scale by turns */
      a.sigmoid = kind > 3;
      a.has_bias = kind > 4;
      a.dt = kind == 5 ? PS_BF16 : PS_F32;
      a.scale = kind % 2 ? 2.5f : 0;
      if (kind != 4)
        group(&a, kind / 2);
    }
    const op_operand o[] = {logits_of(s, kind < 3    ? kind
                                         : kind == 4 ? 2
                                                     : 0),
                            out(OP_U16, n, exact), out(PS_F32, n, of_softmax),
                            in(a.dt, a.has_bias ? s[1] : 0, 0.5f)};
    CASE(v, &a, 3 + a.has_bias, o, "%u tokens, %u of %u, logits %u", s[0], s[2], s[1], kind);
    if (!a.has_bias)
      free(o[3].init);
  }
}

/* u64 in the bits of f64: integers from 1.0's bits on, whose differences are ulps. */
static op_operand counts(uint32_t n) {
  op_operand b = {PS_READ_WRITE, OP_F64, n, malloc(8 * (size_t)n), exact};
  for (uint32_t e = 0; e < n; e++)
    ((uint64_t *)b.init)[e] = 0x3ff0000000000000u + e;
  return b;
}
static double score(double x, bool sigmoid) { return sigmoid ? 1 / (1 + exp(-x)) : exp(x); }
void op_moe_route_bwd(visit *v, uint32_t dt) {
  EACH(s, v, moe_test, moe_bench)
  for (uint32_t terms = 0; terms < (v->sizes == OP_BENCH ? 1 : 7); terms++) {
    const bool sigmoid = terms > 4; /* 4: a scale */
    const ps__args_moe_route_bwd a = {.n_tokens = s[0],
                                      .n_experts = s[1],
                                      .n_used = s[2],
                                      .renorm = (s_i + terms) % 2,
                                      .dt = dt,
                                      .count = terms & 1,
                                      .aux = terms < 4 && terms & 1 ? 20.0f * (float)s[1] : 0,
                                      .z_loss = terms < 4 && terms & 2 ? 3 : 0,
                                      .step_tokens = 3 * s[0],
                                      .sigmoid = sigmoid,
                                      .scale = terms > 3 ? 1.5f : 0};
    const uint64_t n = (uint64_t)s[0] * s[1], r = (uint64_t)s[0] * s[2];
    chosen c;
    choose(&c, s, s_i % 2);
    op_operand o[] = {logits_of(s, 0), ids_of(&c),
                      weights(r),      in(PS_F32, r, 1),
                      offsets_of(&c),  out(dt, n, (op_tolerance){dt != PS_F32, 4e-6, 2e-6}),
                      counts(s[1])};
    /* the weights are those of the logits */
    for (uint32_t t = 0; t < s[0]; t++) {
      const float *x = (const float *)o[0].init + (size_t)t * s[1];
      double all = 0, used = 0;
      for (uint32_t e = 0; e < s[1]; e++)
        all += sigmoid ? 0 : exp(x[e]);
      for (uint32_t j = 0; j < s[2]; j++)
        used += score(x[c.ids[t * s[2] + j]], sigmoid);
      for (uint32_t j = 0; j < s[2]; j++)
        ((float *)o[2].init)[t * s[2] + j] =
            (float)((terms > 3 ? 1.5 : 1) * score(x[c.ids[t * s[2] + j]], sigmoid) /
                    (a.renorm  ? used
                     : sigmoid ? 1
                               : all));
    }
    CASE(v, &a, 6 + a.count, o, "%u tokens, %u of %u, terms %u", s[0], s[2], s[1], terms);
    if (!a.count)
      free(o[6].init);
    forget(&c);
  }
}

void op_moe_index(visit *v, uint32_t dt) {
  EACH(s, v, moe_test, moe_bench)
  for (uint32_t skewed = 0; skewed < (dt != PS_F32 ? 0 : 2); skewed++) {
    const ps__args_moe_index a = {s[0], s[1], s[2]};
    const uint64_t r = (uint64_t)s[0] * s[2];
    chosen c;
    choose(&c, s, skewed);
    if (skewed && s_i == 1) /* no expert has this number */
      c.ids[0] = 3;
    const op_operand o[] = {ids_of(&c), out(OP_I32, s[1] + 1, exact), out(OP_I32, r, exact)};
    CASE(v, &a, 3, o, "%u tokens, %u of %u, skewed %u", s[0], s[2], s[1], skewed);
    forget(&c);
  }
}

void op_moe_gather(visit *v, uint32_t dt) {
  EACH(s, v, moe_test, moe_bench) {
    const ps__args_moe_rows a = {.n_tokens = s[0], .n_used = s[2], .dim = 8 + 33 * s_i, .dt = dt};
    chosen c;
    choose(&c, s, s_i % 2);
    const op_operand o[] = {in(dt, (uint64_t)s[0] * a.dim, 1), slots_of(&c),
                            out(dt, (uint64_t)s[0] * s[2] * a.dim, exact)};
    CASE(v, &a, 3, o, "%u tokens, %u of %u, dim %u", s[0], s[2], s[1], a.dim);
    forget(&c);
  }
}
void op_moe_combine(visit *v, uint32_t dt) {
  /* up to 17 additions of terms of both signs */
  const op_tolerance t = {dt != PS_F32, 1e-6, 1e-6};
  EACH(s, v, moe_test, moe_bench)
  for (uint32_t form = 0; form < (v->sizes == OP_BENCH ? 1 : 4); form++) {
    const ps__args_moe_rows a = {.n_tokens = s[0],
                                 .n_used = s[2],
                                 .dim = 8 + 33 * s_i,
                                 .dt = dt,
                                 .accumulate = form == 1,
                                 .has_residual = form >= 2,
                                 .has_bias = form == 3};
    const uint64_t n = (uint64_t)s[0] * a.dim;
    uint32_t n_o = 3;
    chosen c;
    choose(&c, s, s_i % 2);
    op_operand o[7] = {in(dt, n * s[2], 1), slots_of(&c), sum(a.accumulate, dt, n, t)};
    if (a.has_residual)
      o[n_o++] = in(dt, n, 1);
    if (a.has_bias) {
      o[n_o++] = in(dt, (uint64_t)s[1] * a.dim, 1);
      o[n_o++] = weights((uint64_t)s[0] * s[2]);
      o[n_o++] = ids_of(&c);
    }
    CASE(v, &a, n_o, o, "%u tokens, %u of %u, form %u", s[0], s[2], s[1], form);
    forget(&c);
  }
}

/* T, E, k, N, K */
static const uint32_t grouped_test[][5] = {{1, 1, 1, 1, 1},     {5, 3, 2, 7, 9},
                                           {40, 16, 4, 33, 40}, {130, 4, 2, 96, 64},
                                           {600, 2, 1, 40, 72}, {9, 32, 8, 24, 16}},
                      grouped_bench[][5] = {{2048, 64, 8, 2048, 1024}};
static void grouped(visit *v, uint32_t dt, uint32_t roles) {
  EACH(s, v, grouped_test, grouped_bench)
  for (uint32_t form = 0; form < roles; form++) {
    const ps__args_gemm_grouped a = {.n_tokens = s[0],
                                     .n_used = s[2],
                                     .n_out = s[3],
                                     .n_in = s[4],
                                     .n_experts = s[1],
                                     .dt = dt,
                                     .role = form < 3 ? form : PS_GEMM_WGRAD,
                                     .accumulate = form == 3};
    const uint64_t r = (uint64_t)s[0] * s[2], w = (uint64_t)s[1] * s[3] * s[4];
    const uint64_t sums = form == 0 ? s[4] : form == 1 ? s[3] : r;
    const op_tolerance t = {dt != PS_F32, 1e-6, 1e-6 + 1e-6 * sqrt((double)sums)};
    chosen c;
    choose(&c, s, s_i % 2);
    const op_operand o[] = {in(dt, r * (form == 0 ? s[4] : s[3]), 1),
                            in(dt, form < 2 ? w : r * s[4], 1), offsets_of(&c),
                            form < 2 ? out(dt, r * (form == 0 ? s[3] : s[4]), t)
                                     : sum(a.accumulate, dt, w, t)};
    CASE(v, &a, 4, o, "%u tokens, %u of %u, %ux%u, form %u", s[0], s[2], s[1], s[3], s[4], form);
    forget(&c);
  }
}
void op_gemm_grouped(visit *v, uint32_t dt) { grouped(v, dt, v->sizes == OP_BENCH ? 3 : 4); }
void op_gemm_grouped_rows(visit *v, uint32_t dt) { grouped(v, dt, 1); }

/* Every expert with a row has a slot, in an order of its own. */
void op_gemm_grouped_slots(visit *v, uint32_t dt) {
  EACH(s, v, grouped_test, grouped_bench) {
    const uint32_t n_slots = s[1] < s[0] * s[2] ? s[1] : s[0] * s[2];
    const ps__args_grouped_slots a = {.product = {.n_tokens = s[0],
                                                  .n_used = s[2],
                                                  .n_out = s[3],
                                                  .n_in = s[4],
                                                  .n_experts = s[1],
                                                  .dt = dt},
                                      .n_slots = n_slots};
    const uint64_t r = (uint64_t)s[0] * s[2];
    const op_tolerance t = {dt != PS_F32, 1e-6, 1e-6 + 1e-6 * sqrt((double)s[4])};
    chosen c;
    choose(&c, s, s_i % 2);
    uint32_t *slot_of = calloc(s[1], 4), next = n_slots;
    for (uint32_t e = 0; e < s[1]; e++)
      if (c.offsets[e + 1] > c.offsets[e])
        slot_of[e] = next--;
    const op_operand o[] = {in(dt, r * s[4], 1), in(dt, (uint64_t)n_slots * s[3] * s[4], 1),
                            offsets_of(&c), out(dt, r * s[3], t), copied(OP_I32, s[1], slot_of)};
    CASE(v, &a, 5, o, "%u tokens, %u of %u, %ux%u, %u slots", s[0], s[2], s[1], s[3], s[4],
         n_slots);
    free(slot_of);
    forget(&c);
  }
}

/* A cache that has been in use: some slots are free, several were used by the same launch. */
static op_operand fetched(const uint32_t *s, uint32_t n_slots) {
  const uint32_t n = (uint32_t)ps__fetch_words(s[1], n_slots), at = s[1] + n_slots;
  op_operand b = {PS_READ_WRITE, OP_I32, n, calloc(n, 4), exact};
  uint32_t *x = b.init;
  for (uint32_t i = 0; i < n_slots * 2 / 3; i++) {
    const uint32_t e = (i * 7 + 3) % s[1];
    if (x[e])
      continue;
    x[e] = i + 1;
    x[s[1] + i] = e + 1;
    x[at + i] = 1 + (uint32_t)(op_uniform() * 5);
  }
  x[n - 2] = 6;
  return b;
}
/* Three tokens of four are there. */
void op_moe_fetch(visit *v, uint32_t dt) {
  EACH(s, v, moe_test, moe_bench)
  for (uint32_t some = 0; some < 2; some++) {
    const uint64_t r = (uint64_t)s[0] * s[2], least = r < s[1] ? r : s[1], n[] = {8 + 2 * s_i, 16};
    const ps__args_moe_fetch a = {.n_tokens = s[0],
                                  .n_used = s[2],
                                  .n_experts = s[1],
                                  .n_slots = (uint32_t)(some ? least : (least + s[1] + 1) / 2),
                                  .bytes = {n[0] * op_dtype_bytes(dt), n[1] * op_dtype_bytes(dt)}};
    chosen c;
    choose(&c, s, s_i % 2);
    op_operand o[] = {ids_of(&c),
                      op_ints(s[0], 0, 100, false),
                      fetched(s, a.n_slots),
                      counts(2),
                      in(dt, n[0] * s[1], 1),
                      op_drawn(PS_READ_WRITE, dt, n[0] * a.n_slots, 1, exact),
                      in(dt, n[1] * s[1], 1),
                      op_drawn(PS_READ_WRITE, dt, n[1] * a.n_slots, 1, exact)};
    for (uint32_t t = 0; t < s[0]; t++)
      if (((int32_t *)o[1].init)[t] >= 75)
        ((int32_t *)o[1].init)[t] = -1;
    CASE(v, &a, 8, o, "%u tokens, %u of %u, %u slots", s[0], s[2], s[1], a.n_slots);
    forget(&c);
  }
}

/* The sum of a row is of up to 8 + 33 * 7 terms of both signs. */
static void gate(visit *v, uint32_t dt, bool backward) {
  EACH(s, v, moe_test, moe_bench) {
    const ps__args_moe_glu a = {
        .n_tokens = s[0],
        .n_used = s[2],
        .expert_dim = v->sizes == OP_BENCH ? 1024 : 8 + (s_i % 2 ? 33 : 40) * s_i,
        .dt = dt,
        .activation = s_i % 2 ? PS_ACTIVATION_GELU_TANH : PS_ACTIVATION_SILU};
    const uint64_t r = (uint64_t)s[0] * s[2], n = r * a.expert_dim;
    const op_tolerance t = glu_tolerance(dt, a.activation);
    chosen c;
    choose(&c, s, s_i % 2);
    if (backward) {
      const op_operand o[] = {op_drawn(PS_READ_WRITE, dt, n, 1, t),
                              op_drawn(PS_READ_WRITE, dt, 2 * n, 4, t), weights(r), slots_of(&c),
                              out(PS_F32, r, (op_tolerance){0, 2e-6, 4e-6})};
      CASE(v, &a, 5, o, "%u tokens, %u of %u, dim %u", s[0], s[2], s[1], a.expert_dim);
    } else {
      const op_operand o[] = {in(dt, 2 * n, 4), weights(r), slots_of(&c), out(dt, n, t)};
      CASE(v, &a, 4, o, "%u tokens, %u of %u, dim %u", s[0], s[2], s[1], a.expert_dim);
    }
    forget(&c);
  }
}
void op_moe_glu(visit *v, uint32_t dt) { gate(v, dt, false); }
void op_moe_glu_bwd(visit *v, uint32_t dt) { gate(v, dt, true); }

/* ---- with a factor an expert ----------------------------------------------------------------- */

static void scales(visit *v, uint32_t dt, bool backward) {
  EACH(s, v, moe_test, moe_bench)
  for (uint32_t add = 0; add < (backward && v->sizes != OP_BENCH ? 2 : 1); add++) {
    const ps__args_moe_scale a = {s[0], s[2], s[1], dt, add};
    const uint64_t r = (uint64_t)s[0] * s[2];
    chosen c;
    choose(&c, s, s_i % 2);
    const op_operand o[] = {weights(r), ids_of(&c), in(dt, s[1], 1),
                            backward ? op_drawn(PS_READ_WRITE, PS_F32, r, 1, exact)
                                     : out(PS_F32, r, exact),
                            sum(add, dt, s[1], row_sums(dt, (double)r))};
    CASE(v, &a, backward ? 5 : 4, o, "%u tokens, %u of %u, add %u", s[0], s[2], s[1], add);
    forget(&c);
  }
}
void op_moe_scale(visit *v, uint32_t dt) { scales(v, dt, false); }
void op_moe_scale_bwd(visit *v, uint32_t dt) { scales(v, dt, true); }

/* ---- with biases ----------------------------------------------------------------------------- */

void op_add_bias(visit *v, uint32_t dt) {
  EACH(s, v, moe_test, moe_bench) {
    const ps__args_add_bias a = {s[0], s[1], dt};
    const op_operand o[] = {
        op_drawn(PS_READ_WRITE, PS_F32, (uint64_t)s[0] * s[1], 1, (op_tolerance){0}),
        in(dt, s[1], 1)};
    CASE(v, &a, 2, o, "%u rows of %u", s[0], s[1]);
  }
}

/* A limit that cuts a third of the values. Next to it a rounding decides whether one is cut: so
 * gate and up are multiples of 1/8, and their biases of 1/16. */
static op_operand on_grid(uint32_t mode, uint32_t dt, uint64_t n, float scale, float step,
                          op_tolerance t) {
  op_operand b = op_drawn(mode, dt, n, scale, t);
  for (uint64_t i = 0; i < n; i++)
    ps__store1_f32(b.init, dt, i, rintf(ps__load1_f32(b.init, dt, i) / step) * step);
  return b;
}
static void clamp_gate(visit *v, uint32_t dt, bool backward) {
  EACH(s, v, moe_test, moe_bench) {
    const ps__args_moe_clamp_glu a = {
        .n_tokens = s[0],
        .n_used = s[2],
        .n_experts = s[1],
        .expert_dim = v->sizes == OP_BENCH ? 1024 : 8 + (s_i % 2 ? 33 : 40) * s_i,
        .dt = dt,
        .alpha = 1.702f,
        .limit = 2.03f};
    const uint64_t r = (uint64_t)s[0] * s[2], n = r * a.expert_dim;
    const op_tolerance t = glu_tolerance(dt, PS_ACTIVATION_GELU_TANH);
    chosen c;
    choose(&c, s, s_i % 2);
    const op_operand bias = on_grid(PS_READ, dt, 2ull * s[1] * a.expert_dim, 1, 0.0625f, exact);
    if (backward) {
      const op_operand o[] = {op_drawn(PS_READ_WRITE, dt, n, 1, t),
                              on_grid(PS_READ_WRITE, dt, 2 * n, 2, 0.125f, t),
                              bias,
                              ids_of(&c),
                              weights(r),
                              slots_of(&c),
                              out(PS_F32, r, (op_tolerance){0, 2e-6, 4e-6})};
      CASE(v, &a, 7, o, "%u tokens, %u of %u, dim %u", s[0], s[2], s[1], a.expert_dim);
    } else {
      const op_operand o[] = {on_grid(PS_READ, dt, 2 * n, 2, 0.125f, exact),
                              bias,
                              ids_of(&c),
                              weights(r),
                              slots_of(&c),
                              out(dt, n, t)};
      CASE(v, &a, 6, o, "%u tokens, %u of %u, dim %u", s[0], s[2], s[1], a.expert_dim);
    }
    forget(&c);
  }
}
void op_moe_clamp_glu(visit *v, uint32_t dt) { clamp_gate(v, dt, false); }
void op_moe_clamp_glu_bwd(visit *v, uint32_t dt) { clamp_gate(v, dt, true); }

static ps__args_moe_bias bias_args(const visit *v, const uint32_t *s, uint32_t i, uint32_t dt) {
  return (ps__args_moe_bias){.n_tokens = s[0],
                             .n_used = s[2],
                             .n_experts = s[1],
                             .cols = v->sizes == OP_BENCH ? 2048 : 8 + (i % 2 ? 53 : 56) * i,
                             .dt = dt};
}
void op_moe_bias_dot(visit *v, uint32_t dt) {
  EACH(s, v, moe_test, moe_bench) {
    const ps__args_moe_bias a = bias_args(v, s, (uint32_t)s_i, dt);
    const uint64_t r = (uint64_t)s[0] * s[2];
    chosen c;
    choose(&c, s, s_i % 2);
    const op_operand o[] = {in(dt, (uint64_t)s[0] * a.cols, 1), in(dt, (uint64_t)s[1] * a.cols, 1),
                            ids_of(&c),
                            op_drawn(PS_READ_WRITE, PS_F32, r, 1, row_sums(PS_F32, a.cols))};
    CASE(v, &a, 4, o, "%u tokens, %u of %u, %u columns", s[0], s[2], s[1], a.cols);
    forget(&c);
  }
}
void op_moe_bias_sum(visit *v, uint32_t dt) {
  EACH(s, v, moe_test, moe_bench)
  for (uint32_t form = 0; form < (v->sizes == OP_BENCH ? 1 : 2); form++) {
    ps__args_moe_bias a = bias_args(v, s, (uint32_t)s_i, dt);
    const uint64_t r = (uint64_t)s[0] * s[2];
    a.weighted = a.accumulate = form;
    chosen c;
    choose(&c, s, s_i % 2);
    const op_operand o[] = {
        in(dt, r * a.cols, 1), offsets_of(&c), slots_of(&c), weights(r),
        sum(a.accumulate, dt, (uint64_t)s[1] * a.cols, row_sums(dt, (double)r))};
    CASE(v, &a, 5, o, "%u tokens, %u of %u, %u columns, form %u", s[0], s[2], s[1], a.cols, form);
    forget(&c);
  }
}
