/* test_step.c - the checks of a step and of its memory map: each test breaks one invariant of a
 * valid step, sees the check fail, and mends it. */
#include "check.h"
#include "step/step.h"
#include <stdio.h>

enum { SEQ_LEN = 64, N_SEQUENCES = 24 };

static const ps_model_config model = {
    MODEL_DEFAULTS,        .vocab_size = 64,      .n_layers = 3,  .dim = 32,
    .n_kv_heads = 2,       .n_heads = 2,          .head_dim = 16, .ffn_dim = 32,
    .max_positions = 4096, .rope = {.theta = 1e4}};

typedef struct built {
  ps__layout layout;
  ps__spec spec;
  ps__step_hooks hooks;
  ps_model *model;
  ps__step step;
} built;

/* 24 rounds of bf16, all saved activations offloaded. Totals have 24 contributions and low bytes.
 * In the first round the offloaded activations are aliases of gradients. */
static void build(built *b, uint32_t n_hosts) {
  CHECK(ps__model_create(&b->model, &model, PS_BF16, SEQ_LEN, 0, NULL, NULL, NULL) == PS_OK);
  CHECK(ps__layout_init(&b->layout, SEQ_LEN, N_SEQUENCES, SEQ_LEN, 1, 0, 0) == PS_OK);
  CHECK(ps__spec_init(&b->spec, b->model, &b->layout) == PS_OK);
  b->spec.recipe = PS_RECIPE_BF16;
  b->spec.chunk_tokens = SEQ_LEN;
  b->spec.chunks_per_round = b->spec.first_round_chunks = 1;
  b->spec.head_slice = SEQ_LEN;
  b->spec.clip = true;
  b->spec.n_hosts = n_hosts;
  b->spec.param_lead = b->spec.saved_lead = b->spec.saved_lag = b->spec.grad_lag = 1;
  memset(b->spec.policy, PS_POLICY_HOST,
         (size_t)b->spec.n_layers * b->spec.n_chunks * b->spec.n_saved);
  CHECK(ps__step_build(&b->step, b->model, &b->layout, &b->spec, &b->hooks) == PS_OK);
}

static void destroy(built *b) {
  ps__step_free(&b->step);
  ps_model_destroy(b->model);
  ps__spec_free(&b->spec);
  ps__layout_free(&b->layout);
}

static bool map_valid(const ps__step *s) {
  for (uint32_t space = 0; space < ps__places_of(1, 1)->n_places; space++)
    if (!ps__memmap_valid(s->vt, s->n_vt, space, s->space_bytes[space]))
      return false;
  return true;
}

/* @field takes @value for one check, which must fail. */
#define CATCHES(valid, s, field, value)                                                            \
  do {                                                                                             \
    const __typeof__(field) kept_ = (field);                                                       \
    (field) = (value);                                                                             \
    CHECK(!valid(s));                                                                              \
    (field) = kept_;                                                                               \
    CHECK(valid(s));                                                                               \
  } while (0)

static size_t first_where(const ps__step *s, bool alias, bool persistent) {
  for (size_t i = 0; i < s->n_vt; i++)
    if ((s->vt[i].alias_of != 0) == alias && s->vt[i].persistent == persistent)
      return i;
  CHECK(!"a tensor of this kind");
  return 0;
}

/* A copy to the device and a tensor that it writes. */
static size_t first_fetch(const ps__step *s) {
  for (size_t i = 0; i < s->n_op; i++)
    if (s->op[i].stream == ps__places_of(1, 1)->dev[0].to_device)
      return i;
  CHECK(!"a copy to the device");
  return 0;
}

static size_t op_of(const ps__step *s, const ps_kernel *kernel) {
  for (size_t i = 0; i < s->n_op; i++)
    if (s->op[i].kernel == kernel)
      return i;
  CHECK(!"an op of this kernel");
  return 0;
}

static void test_memmap(ps__step *s) {
  CHECK(map_valid(s));
  const size_t alias = first_where(s, true, false), kept = first_where(s, false, true);
  ps__vt *a = &s->vt[alias];
  const ps__vt *owner = &s->vt[a->alias_of - 1];
  /* two that are alive at once, one moved onto the other */
  size_t other = kept + 1;
  while (!(s->vt[other].persistent && s->vt[other].space == s->vt[kept].space))
    other++;
  CATCHES(map_valid, s, s->vt[other].offset, s->vt[kept].offset);
  CATCHES(map_valid, s, s->vt[other].offset, s->space_bytes[s->vt[other].space]);
  CATCHES(map_valid, s, a->offset, owner->offset + owner->bytes);
  CATCHES(map_valid, s, a->bytes, owner->bytes + 1);
  CATCHES(map_valid, s, a->space, (uint8_t)ps__places_of(1, 1)->dev[0].place);
  /* two aliases of one gradient, alive at once */
  for (size_t i = alias + 1; i < s->n_vt; i++) {
    ps__vt *b = &s->vt[i];
    if (b->alias_of == a->alias_of && b->first < a->last) {
      CATCHES(map_valid, s, b->offset, a->offset);
      printf("ok a broken memory map is caught\n");
      return;
    }
  }
  CHECK(!"two aliases of one gradient");
}

/* Two tensors, one after the other in memory or in time, and overlapping by a byte in both. */
static void test_two_tensors(void) {
  ps__vt vt[2] = {{.bytes = 512, .offset = 0, .first = 0, .last = 4},
                  {.bytes = 256, .offset = 512, .first = 3, .last = 6}};
  CHECK(ps__memmap_valid(vt, 2, ps__places_of(1, 1)->dev[0].place, 768));
  CHECK(!ps__memmap_valid(vt, 2, ps__places_of(1, 1)->dev[0].place, 767));
  vt[1].offset = 511; /* the first one's last byte */
  CHECK(!ps__memmap_valid(vt, 2, ps__places_of(1, 1)->dev[0].place, 768));
  vt[1].first = 4; /* the first one has ended */
  CHECK(ps__memmap_valid(vt, 2, ps__places_of(1, 1)->dev[0].place, 768));
  vt[1] = (ps__vt){.bytes = 256, .offset = 0, .first = 0, .last = 1};
  vt[0].offset = 255; /* the second one's last byte */
  CHECK(!ps__memmap_valid(vt, 2, ps__places_of(1, 1)->dev[0].place, 768));
  vt[0].offset = 256;
  CHECK(ps__memmap_valid(vt, 2, ps__places_of(1, 1)->dev[0].place, 768));
  printf("ok two tensors may share memory or time, not both\n");
}

static bool four_valid(const ps__vt *vt) {
  return ps__memmap_valid(vt, 4, ps__places_of(1, 1)->dev[0].place, 1024);
}

/* Two aliases of an alias, as saved activations lie in a gradient that lies over another step's. */
static void test_chain(void) {
  ps__vt vt[4] = {{.bytes = 1024, .last = UINT32_MAX, .persistent = true},
                  {.bytes = 512, .offset = 256, .last = 5, .alias_of = 1},
                  {.bytes = 128, .offset = 256, .first = 1, .last = 4, .alias_of = 2},
                  {.bytes = 128, .offset = 384, .first = 2, .last = 5, .alias_of = 2}};
  CATCHES(four_valid, vt, vt[3].offset, 300); /* onto the alias beside it */
  CATCHES(four_valid, vt, vt[2].offset, 0);   /* in the first owner, not in the second */
  CATCHES(four_valid, vt, vt[3].offset, 700); /* past its owner */
  CATCHES(four_valid, vt, vt[3].last, 6);     /* it outlives its owner */
  CATCHES(four_valid, vt, vt[3].alias_of, 4); /* it owns itself */
  CATCHES(four_valid, vt, vt[3].alias_of, 5); /* there is no such tensor */
  CATCHES(four_valid, vt, vt[1].alias_of, 3); /* two own each other */
  vt[3] = (ps__vt){.bytes = 64, .offset = 256, .first = 2, .last = 4, .alias_of = 3};
  CHECK(!four_valid(vt)); /* a chain of three */
  printf("ok aliases of an alias are checked\n");
}

static void test_step(ps__step *s) {
  CHECK(ps__step_valid(s));
  const size_t fetch = first_fetch(s);
  ps__vop *op = &s->op[fetch];
  ps__vaccess *to = &s->access[op->access + 1];
  ps__vt *t = &s->vt[to->vt];
  CATCHES(ps__step_valid, s, to->offset, to->offset + 1);
  CATCHES(ps__step_valid, s, to->bytes, 0);
  CATCHES(ps__step_valid, s, to->vt, (uint32_t)s->n_vt);
  CATCHES(ps__step_valid, s, to->mode, PS_READ); /* then nobody has written it */
  CATCHES(ps__step_valid, s, op->stream, (uint32_t)ps__places_of(1, 1)->dev[0].to_host);
  CATCHES(ps__step_valid, s, t->first, (uint32_t)fetch + 1);
  CATCHES(ps__step_valid, s, t->last, (uint32_t)fetch);
  CATCHES(ps__step_valid, s, t->last, UINT32_MAX); /* never freed */
  /* a total that lacks a contribution, and one whose contributions change places */
  ps__vop *sum = &s->op[op_of(s, &ps__k_accumulate_host)];
  ps__args_accumulate *args = (ps__args_accumulate *)(void *)(s->args + sum->args);
  CATCHES(ps__step_valid, s, args->index, args->index + 1);
  CATCHES(ps__step_valid, s, sum->kernel, &ps__k_sumsq_host);
  /* a gradient that is used while saved activations lie in its memory */
  ps__vt *alias = &s->vt[first_where(s, true, false)];
  CATCHES(ps__step_valid, s, alias->last, (uint32_t)s->n_op);
  printf("ok a broken step is caught\n");
}

/* Chunks of each round, where a chunk is a sequence. */
static void test_first_rounds(void) {
  static const struct {
    uint32_t n_chunks, a_round, first, first_rounds;
    uint32_t n_rounds, firsts, round[6];
  } cases[] = {
      {7, 1, 2, 0, 6, 1, {2, 1, 1, 1, 1, 1}},
      {7, 1, 2, 1, 6, 1, {2, 1, 1, 1, 1, 1}},
      {7, 1, 2, 2, 5, 2, {2, 2, 1, 1, 1}},
      {7, 2, 3, 2, 3, 2, {3, 3, 1}},
      {6, 2, 3, 2, 2, 2, {3, 3}},
      {5, 1, 3, 4, 2, 2, {3, 2}},
      {4, 2, 2, 3, 2, 1, {2, 2}},
      {4, 2, 0, 3, 2, 1, {2, 2}},
      {2, 1, 9, 3, 1, 1, {2}},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ps__layout l;
    CHECK(ps__layout_init(&l, SEQ_LEN, cases[i].n_chunks, SEQ_LEN, cases[i].a_round, cases[i].first,
                          cases[i].first_rounds) == PS_OK);
    CHECK(l.n_rounds == cases[i].n_rounds && l.first_rounds == cases[i].firsts);
    uint32_t first = 0;
    for (uint32_t r = 0; r < l.n_rounds; first += l.round[r++].n_chunks)
      CHECK(l.round[r].first_chunk == first && l.round[r].n_chunks == cases[i].round[r]);
    CHECK(first == cases[i].n_chunks);
    ps__layout_free(&l);
  }
  printf("ok first rounds are as many and as large as asked for\n");
}

/* The first or last op of the unit that op @of is about; n_op: there is none. */
static size_t find_op(const ps__step *s, const ps__vop *of, const char *name, bool last) {
  size_t found = s->n_op;
  for (size_t i = 0; i < s->n_op && (last || found == s->n_op); i++) {
    const ps__vop *op = &s->op[i];
    if (op->kernel && strcmp(op->kernel->name, name) == 0 && op->tag.layer == of->tag.layer &&
        op->tag.chunk == of->tag.chunk)
      found = i;
  }
  return found;
}

/* The host's stream adds a unit's last contribution, and its exchange is issued, before that stream
 * waits for the exchange of the unit before. */
static void test_exchanges(void) {
  built b = {0};
  build(&b, 2);
  const ps__step *s = &b.step;
  uint32_t n = 0;
  for (size_t i = 0, before = 0; i < s->n_op; i++) {
    if (!s->op[i].kernel || strcmp(s->op[i].kernel->name, "exchange_totals"))
      continue;
    if (n++) {
      const size_t squares = find_op(s, &s->op[before], "sumsq_host", false);
      const size_t added = find_op(s, &s->op[i], "accumulate_host", true);
      CHECK(squares < s->n_op && added < s->n_op);
      CHECK(added < squares && i < squares);
    }
    before = i;
  }
  CHECK(n == b.model->n_units);
  destroy(&b);
  printf("ok a unit's exchange runs beside the next unit's sums\n");
}

int main(void) {
  built b = {0};
  const int64_t before = ps__live_allocations();
  test_first_rounds();
  test_exchanges();
  build(&b, 1);
  test_two_tensors();
  test_chain();
  test_memmap(&b.step);
  test_step(&b.step);
  destroy(&b);
  CHECK(ps__live_allocations() == before);
  return 0;
}
