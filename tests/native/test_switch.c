/* test_switch.c - another plan while training goes on.
 *
 * Moves between two random memory maps are carried out on bytes. Then trainings switch at random
 * steps between plans of random decisions, and have the bits of the training that never switched.
 * What no step may read any more is poisoned with NaN after each switch.
 * Usage: test_switch [all: 200 switches more, of every case | few: without the searches under full
 * caps | threads: random plans alone, for ThreadSanitizer, under which searches take minutes] */
#include "random_specs.h"
#include "step/moves.h"
#include <math.h>

#ifdef PS_SANITIZED
enum { CASE_STRIDE = 11, N_MAPS = 300, LEAST_SWITCHES = 3, AGAIN_STRIDE = 3 };
#else
/* prime to the numbers of devices, optimizers and models */
enum { CASE_STRIDE = 5, N_MAPS = 1000, LEAST_SWITCHES = 10, AGAIN_STRIDE = 1 };
#endif

/* ---- moves ----------------------------------------------------------------------------------- */

enum { SPACE = 64 << 10, MOST_TENSORS = 24, UNIT = 256 };

static unsigned char memory[PS_MAX_PLACES][SPACE], expected[PS_MAX_PLACES][SPACE];

/* @n tensors of @bytes one after the other in random order with random gaps, each in a space of
 * @where; false: they do not fit. */
static bool lay_out(uint64_t *state, uint32_t n, const uint64_t *bytes, const uint32_t *where,
                    uint64_t *at) {
  uint32_t order[MOST_TENSORS];
  uint64_t end[PS_MAX_PLACES] = {0};
  for (uint32_t i = 0; i < n; i++)
    order[i] = i;
  for (uint32_t i = n; i-- > 1;) {
    const uint32_t k = rnd_below(state, i + 1), x = order[i];
    order[i] = order[k], order[k] = x;
  }
  for (uint32_t i = 0; i < n; i++) {
    uint64_t *e = &end[where[order[i]]];
    *e += (uint64_t)UNIT * (rnd_below(state, 3) ? 0 : rnd_below(state, 4));
    at[order[i]] = *e;
    *e += (bytes[order[i]] + UNIT - 1) / UNIT * UNIT;
    if (*e > SPACE)
      return false;
  }
  return true;
}

/* The copies of @copies, one after the other. */
static void copy_all(const ps__moves *copies, const ps__places *at, uint64_t piece) {
  for (size_t i = 0; i < copies->n; i++) {
    const ps__move *m = &copies->move[i];
    CHECK(m->bytes && m->bytes <= piece && m->src + m->bytes <= SPACE &&
          m->dst + m->bytes <= SPACE);
    CHECK(m->from != m->to || m->src + m->bytes <= m->dst || m->dst + m->bytes <= m->src);
    CHECK(m->from == m->to || m->from == at->host || m->to == at->host);
    memcpy(memory[m->to] + m->dst, memory[m->from] + m->src, m->bytes);
  }
}

/* Tensors go from one random map to another: in their space, to the other one, or to both. */
static bool move_once(const ps__places *at, uint64_t *state, bool *no_room) {
  uint64_t bytes[2 * MOST_TENSORS], src[MOST_TENSORS], dst[MOST_TENSORS], space[PS_MAX_PLACES];
  uint32_t from[MOST_TENSORS], to[MOST_TENSORS];
  const uint32_t n = 1 + rnd_below(state, MOST_TENSORS - 1), all_host = rnd_below(state, 3) == 0;
  const uint64_t piece = UNIT * (1 + rnd_below(state, 40));
  ps__moves all = {0}, copies;
  ps__move move[MOST_TENSORS];
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t d = at->dev[rnd_below(state, at->n_devices)].place;
    bytes[i] = 1 + rnd_below(state, 2 * SPACE / (1 + n));
    from[i] = all_host || rnd_below(state, 2) ? at->host : d;
    to[i] = all_host || rnd_below(state, 2) ? at->host : from[i] == at->host ? d : from[i];
  }
  if (!lay_out(state, n, bytes, from, src) || !lay_out(state, n, bytes, to, dst))
    return false;
  for (uint32_t i = 0; i < n; i++)
    move[i] = (ps__move){from[i], to[i], src[i], dst[i], bytes[i]};
  for (uint32_t i = 0; i < at->n_places; i++) {
    space[i] = SPACE;
    for (size_t k = 0; k < SPACE; k++)
      memory[i][k] = (unsigned char)mix64(k * 31 + i);
  }
  for (uint32_t i = 0; i < n; i++)
    memcpy(expected[to[i]] + dst[i], memory[from[i]] + src[i], bytes[i]);
  all = (ps__moves){move, n, n};
  const ps_status st = ps__moves_order(&all, at, space, piece, &copies);
  *no_room = st == PS_EBUDGET;
  CHECK(st == PS_OK || (*no_room && strstr(ps_last_error(), "leave no room to move")));
  if (st != PS_OK)
    return true;
  copy_all(&copies, at, piece);
  for (uint32_t i = 0; i < n; i++)
    CHECK(memcmp(memory[to[i]] + dst[i], expected[to[i]] + dst[i], bytes[i]) == 0);
  ps__moves_free(&copies);
  return true;
}

/* Two tensors change places: in a circle, through the memory that is left. */
static void test_circle(const ps__places *at) {
  const uint64_t half = SPACE / 2;
  uint64_t space[PS_MAX_PLACES] = {[0] = SPACE, [1] = SPACE};
  ps__moves copies;
  for (int room = 0; room < 2; room++) {
    const uint64_t n = half - (room ? UNIT : 0);
    ps__move move[2] = {{at->host, at->host, 0, half, n}, {at->host, at->host, half, 0, n}};
    const ps__moves all = {move, 2, 2};
    space[at->dev[0].place] = 0;
    const ps_status st = ps__moves_order(&all, at, space, SPACE, &copies);
    CHECK(st == (room ? PS_OK : PS_EBUDGET));
    if (room) {
      for (size_t k = 0; k < SPACE; k++)
        memory[at->host][k] = (unsigned char)mix64(k);
      copy_all(&copies, at, SPACE);
      for (size_t k = 0; k < n; k++)
        CHECK(memory[at->host][k] == (unsigned char)mix64(half + k) &&
              memory[at->host][half + k] == (unsigned char)mix64(k));
      ps__moves_free(&copies);
    }
  }
}

static void test_moves(void) {
  uint64_t state = 41;
  uint32_t n = 0, n_refused = 0;
  for (int i = 0; i < N_MAPS; i++) {
    bool no_room = false;
    n += move_once(ps__places_of(1 + (uint32_t)i % 2, 1), &state, &no_room);
    n_refused += no_room;
  }
  test_circle(ps__places_of(1, 1));
  CHECK(n > N_MAPS / 2 && n_refused < n / 50);
  printf("ok %u random maps: no byte is overwritten before it was read (%u have no room)\n", n,
         n_refused);
}

/* ---- trainings ------------------------------------------------------------------------------- */

enum { N_STEPS = 6, N_SPECS = 4 };

typedef struct outcome {
  double loss[N_STEPS], norm[N_STEPS];
  uint64_t state;
} outcome;

typedef struct switching {
  const model *m;
  ps_plan_config cfg;
  ps__layout layout;
  ps__spec spec[N_SPECS];
  ps_hardware hw;
} switching;

static ps_plan *plan_of(const switching *s, uint32_t i) {
  ps_plan *plan;
  CHECK(ps__plan_from_spec(&plan, &s->m->cfg, &s->cfg, &s->hw, &s->spec[i]) == PS_OK);
  return plan;
}

static ps_train_config train_config(const switching *s) {
  ps_train_config c = {0};
  ps_train_config_init(&c);
  c.nesterov = s->cfg.optimizer == PS_OPTIMIZER_SGD && s->cfg.clip_norm > 0;
  c.lr = 1e-2;
  c.batch_fn = fill_batch;
  return c;
}

/* The caller's plan has arenas that hold every other one. */
static ps_plan *widest_plan(const switching *s) {
  ps_plan *first = plan_of(s, 0);
  for (uint32_t i = 1; i < N_SPECS; i++) {
    ps_plan *other = plan_of(s, i);
    ps__step_widen(&first->step, &other->step);
    ps_plan_destroy(other);
  }
  return first;
}

static void step_once(ps_trainer *t, int i, outcome *o) {
  ps_step_metrics m;
  CHECK(ps_trainer_wait(t, &m) == PS_OK && m.step == (uint64_t)i);
  o->loss[i] = m.loss;
  o->norm[i] = m.grad_norm;
}

/* Steps in ones and twos, with a switch before each with a probability of one half; @state NULL:
 * none. */
static outcome train(const switching *s, uint64_t *state, uint32_t *n_switches) {
  outcome o = {.state = 0};
  const ps_train_config c = train_config(s);
  ps_plan *plan = widest_plan(s);
  ps_trainer *t;
  CHECK(ps_trainer_create(&t, s->m->dir, plan, &c, NULL, NULL) == PS_OK);
  poison(t, true);
  for (int i = 0; i < N_STEPS;) {
    if (state && rnd_below(state, 2)) {
      CHECK(ps_trainer_switch(t, plan_of(s, rnd_below(state, N_SPECS))) == PS_OK);
      CHECK(ps_trainer_plan(t) != plan && ++*n_switches);
      poison(t, false);
    }
    const int n = state && i + 1 < N_STEPS ? 1 + (int)rnd_below(state, 2) : 1;
    CHECK(ps_trainer_submit(t, (uint64_t)n) == PS_OK);
    for (int k = 0; k < n; k++)
      step_once(t, i++, &o);
  }
  o.state = hash_state(t);
  CHECK(ps_trainer_destroy(t) == PS_OK);
  ps_plan_destroy(plan);
  return o;
}

/* Specs with the same number of devices. The same gradients are kept for reading. */
static void draw_specs(switching *s, uint32_t n_devices, uint64_t *state) {
  const bool keep = rnd_below(state, 2);
  resident_spec(&s->spec[0], s->m, &s->cfg, &s->layout);
  for (uint32_t i = 0; i < N_SPECS; i++) {
    if (i)
      CHECK(ps__spec_copy(&s->spec[i], &s->spec[0]) == PS_OK);
    do
      randomize(&s->spec[i], s->m, &s->layout, state);
    while (s->spec[i].n_devices != n_devices);
    s->spec[i].keep_grads = keep;
    s->spec[i].passing_grads &= !keep;
  }
}

static uint32_t check_case(const model *m, uint32_t recipe, uint32_t optimizer, uint32_t n_devices,
                           int n_trainings, uint64_t *state) {
  switching s = {.m = m, .hw = {.struct_bytes = sizeof s.hw}};
  uint32_t n_switches = 0;
  CHECK(ps_hardware_estimate(&s.hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  s.cfg = (ps_plan_config){.struct_bytes = sizeof s.cfg,
                           .recipe = recipe,
                           .optimizer = optimizer,
                           .seq_len = 16,
                           .tokens_per_step = 16 * 6,
                           .chunk_tokens = 16,
                           .chunks_per_round = 2,
                           .head_slice_tokens = 16,
                           .clip_norm = rnd_below(state, 2) ? 0.5 : 0,
                           .document_token = 5,
                           .document_end_token = -1,
                           .lora = m->lora,
                           .n_threads = 2};
  s.cfg.clip_by = s.cfg.clip_norm > 0 && rnd_below(state, 2);
  CHECK(ps__layout_init(&s.layout, 16, 6, 16, 2, 0, 0) == PS_OK);
  draw_specs(&s, n_devices, state);
  const outcome want = train(&s, NULL, NULL);
  for (int i = 0; i < n_trainings; i++) {
    const outcome got = train(&s, state, &n_switches);
    for (int k = 0; k < N_STEPS; k++)
      CHECK(got.loss[k] == want.loss[k] && got.norm[k] == want.norm[k]);
    CHECK(got.state == want.state);
  }
  for (uint32_t i = 0; i < N_SPECS; i++)
    ps__spec_free(&s.spec[i]);
  ps__layout_free(&s.layout);
  return n_switches;
}

/* Every recipe and optimizer, one to four devices, with rings; the models in turn. */
static void test_switches(int n_trainings, uint32_t stride) {
  uint64_t state = 20261127;
  uint32_t n = 0, i = 0;
  for (uint32_t recipe = 0; recipe < PS_N_RECIPES; recipe++)
    for (uint32_t o = 0; o < PS_N_OPTIMIZERS; o++)
      for (uint32_t devices = 1; devices < 4; devices++, i++) {
        const model *m = &models[i % N_MODELS];
        if (i % stride || (recipe >= PS_RECIPE_FP8 && m >= models + N_FP8_MODELS))
          continue;
        n += check_case(m, recipe, o, devices, n_trainings, &state);
      }
  CHECK(n > LEAST_SWITCHES);
  printf("ok %u switches to random plans at random steps: the bits of trainings without\n", n);
}

/* ---- plans for other rates ------------------------------------------------------------------- */

/* The machine with other rates: each up to 16 times slower, or 4 times faster. */
static ps_hardware other_rates(const ps_hardware *hw, uint64_t *state) {
  ps_hardware o = *hw;
  double *const rate[] = {&o.link[PS_LINK_H2D].bytes_per_s,
                          &o.link[PS_LINK_D2H].bytes_per_s,
                          &o.link[PS_LINK_H2D].duplex_bytes_per_s,
                          &o.optimizer_bytes_per_s,
                          &o.accumulate_bytes_per_s,
                          &o.memory_bytes_per_s};
  for (size_t i = 0; i < sizeof rate / sizeof *rate; i++)
    *rate[i] *= exp2((double)rnd_below(state, 600) / 100 - 4);
  return o;
}

static uint64_t decisions(const ps_plan *p) {
  uint64_t h = p->spec.param_lead | (uint64_t)p->spec.sum_lag << 8;
  for (uint32_t u = 0; u < p->spec.n_units; u++)
    h = mix64(h ^ (uint64_t)(p->spec.param_resident[u] | p->spec.update_resident[u] << 1 |
                             p->spec.in_pieces[u] << 2));
  for (size_t i = 0; i < (size_t)p->spec.n_layers * p->spec.n_chunks * p->spec.n_saved; i++)
    h = mix64(h ^ p->spec.policy[i]);
  return h;
}

/* The plan for other rates: cut alike, in the same arenas, and no slower than the one there is. */
static ps_plan *plan_for(const ps_plan *plan, const ps_hardware *rates) {
  ps_plan *next;
  double now = 0;
  CHECK(ps_plan_again(&next, plan, rates, 0) == PS_OK);
  CHECK(ps_plan_step_at(plan, rates, &now) == PS_OK && now > 0);
  CHECK(ps__same_cut(plan, next) && next->report.step_s <= now * 1.01);
  CHECK(next->report.device_used_bytes == plan->report.device_used_bytes &&
        next->report.host_arena_bytes == plan->report.host_arena_bytes);
  for (uint32_t i = 0; i < plan->at->n_places; i++)
    CHECK(next->step.space_bytes[i] <= ps__plan_reserved(plan, i));
  return next;
}

/* With @state a plan for other rates before every third step. */
static outcome train_again(const switching *s, uint64_t *state, uint32_t *n_other) {
  const ps_train_config c = train_config(s);
  outcome o = {.state = 0};
  ps_plan *plan;
  ps_trainer *t;
  CHECK(ps_plan_create(&plan, &s->m->cfg, &s->cfg, &s->hw) == PS_OK);
  CHECK(ps_trainer_create(&t, s->m->dir, plan, &c, NULL, NULL) == PS_OK);
  poison(t, true);
  for (int i = 0; i < N_STEPS; i++) {
    if (state && i % 3 == 1) {
      const ps_hardware rates = other_rates(&s->hw, state);
      const uint64_t before = decisions(t->plan);
      CHECK(ps_trainer_switch(t, plan_for(t->plan, &rates)) == PS_OK);
      poison(t, false);
      *n_other += decisions(t->plan) != before;
    }
    CHECK(ps_trainer_submit(t, 1) == PS_OK);
    step_once(t, i, &o);
  }
  o.state = hash_state(t);
  CHECK(ps_trainer_destroy(t) == PS_OK);
  ps_plan_destroy(plan);
  return o;
}

static void test_again(void) {
  static const struct {
    uint32_t recipe, n_devices, layout, model;
  } cases[] = {{PS_RECIPE_BF16, 1, 0, 0},
               {PS_RECIPE_FP32_MASTER, 1, 0, 1},
               {PS_RECIPE_FP8_MASTER, 1, 0, 3},
               {PS_RECIPE_BF16, 2, PS_LAYOUT_DATA_PARALLEL, N_MODELS - 1}, /* experts */
               {PS_RECIPE_BF16, 2, PS_LAYOUT_RING, 4}};
  const ps_ramp_stage stage = {32, 2};
  uint64_t state = 5;
  uint32_t n_other = 0;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i += AGAIN_STRIDE) {
    switching s = {.m = &models[cases[i].model], .hw = {.struct_bytes = sizeof s.hw}};
    CHECK(ps_hardware_estimate(&s.hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
    s.cfg = (ps_plan_config){PLAN_DEFAULTS,
                             .recipe = cases[i].recipe,
                             .seq_len = 16,
                             .tokens_per_step = 16 * 4,
                             .chunk_tokens = 16,
                             .chunks_per_round = 2,
                             .head_slice_tokens = 16,
                             .clip_norm = 0.5,
                             .ramp = &stage,
                             .n_ramp = 1,
                             .n_devices = cases[i].n_devices,
                             .layout = cases[i].layout,
                             .lora = s.m->lora,
                             .n_threads = 2};
    const outcome want = train_again(&s, NULL, NULL), got = train_again(&s, &state, &n_other);
    for (int k = 0; k < N_STEPS; k++)
      CHECK(got.loss[k] == want.loss[k] && got.norm[k] == want.norm[k]);
    CHECK(got.state == want.state);
  }
  CHECK(n_other > 3 / AGAIN_STRIDE - 1);
  printf("ok plans for other rates are cut alike and fit: %u differ, and train to the same bits\n",
         n_other);
}

/* Under a cap of the device that a plan fills, whatever the rates: no arena grows. */
static void test_room(void) {
  ps_model_config larger = models[0].cfg;
  ps_hardware hw = {.struct_bytes = sizeof hw};
  uint64_t state = 9;
  ps_plan *plan;
  larger.dim = 256, larger.head_dim = 64, larger.ffn_dim = 1024, larger.vocab_size = 8192;
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  ps_plan_config cfg = {PLAN_DEFAULTS,
                        .recipe = PS_RECIPE_BF16,
                        .seq_len = 256,
                        .tokens_per_step = 256 * 6,
                        .chunk_tokens = 256,
                        .chunks_per_round = 2,
                        .device_mem_bytes = 24 << 20,
                        .host_mem_bytes = 160 << 20,
                        .reserve_bytes = 16 << 20,
                        .clip_norm = 0.5,
                        .n_threads = 2};
  CHECK(ps_plan_create(&plan, &larger, &cfg, &hw) == PS_OK);
  for (int i = 0; i < 3; i++) {
    const ps_hardware rates = other_rates(&hw, &state);
    ps_plan *next = plan_for(plan, &rates);
    ps_plan_destroy(plan);
    plan = next;
    CHECK(plan->report.host_used_bytes <= cfg.host_mem_bytes);
  }
  ps_plan_destroy(plan);
  printf("ok plans for other rates stay in the arenas under full caps\n");
}

int main(int argc, char **argv) {
  const bool all = argc > 1 && !strcmp(argv[1], "all"),
             threads = argc > 1 && !strcmp(argv[1], "threads"),
             few = argc > 1 && !strcmp(argv[1], "few");
  const char *tmp = getenv("TMPDIR");
  char root[200];
  if (!threads)
    test_moves();
  snprintf(root, sizeof root, "%s/penstock-test-switch-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(root));
  for (uint32_t i = 0; i < N_MODELS; i++)
    make_model(&models[i], root);
  for (uint32_t i = 0; i < N_MODELS; i++)
    CHECK(ps__model_create(&models[i].made, &models[i].cfg, PS_F32, 0, 0, NULL, NULL,
                           &models[i].lora) == PS_OK);
  const int64_t before = ps__live_allocations();
  test_switches(all ? 8 : 1, all ? 1 : CASE_STRIDE);
  if (!threads) {
    test_again();
    if (!few)
      test_room();
  }
  CHECK(ps__live_allocations() == before);
  for (uint32_t i = 0; i < N_MODELS; i++)
    remove_folder(models[i].dir);
  CHECK(rmdir(root) == 0);
  return 0;
}
