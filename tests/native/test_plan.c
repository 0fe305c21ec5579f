/* test_plan.c - plans beyond the planner's search space: random decisions, executed.
 *
 * A spec may keep, send away or recompute every saved tensor of every (layer, chunk) by itself,
 * keep any units' parameters and gradients on the device and issue transfers any number of steps
 * ahead. Whatever it says, the memory map must hold together, every access must lie in its
 * tensor's lifetime, and losses, gradient norms, weights and state must be the bits of the
 * plan that keeps parameters, gradients and saved activations on the device. Memory is poisoned
 * with NaN before the run (and between steps, where they are run one by one), so that a read of
 * what this step did not write shows.
 * Usage: test_plan [all: every case, with more decisions | few, threads: some of the cases, for
 * sanitizers: under ThreadSanitizer each takes seconds] */
#include "random_specs.h"

#ifdef PS_SANITIZED
/* 13 is prime to the numbers of models, shapes and FP8's of both, as 11 is */
enum { SPECS_A_CASE = 1, CASE_STRIDE = 13, LEAST = 50, N_MAPS = 3, PASSING = 0 };
#else
/* 11 is prime to the numbers of models, shapes and FP8's of both: all are met, in every recipe */
enum { SPECS_A_CASE = 1, CASE_STRIDE = 11, LEAST = 60, N_MAPS = 6, PASSING = 1 };
#endif
enum { N_STEPS = 3, SPECS_OF_ALL = 3 };

static char root[200];
static bool direct_io; /* in the root: specs may have a disk */
static uint32_t n_specs_so_far, n_passing_to_disk;

/* ---- one training ---------------------------------------------------------------------------- */

typedef struct outcome {
  double loss[N_STEPS], norm[N_STEPS];
  uint64_t state; /* hash of weights, master weights and state in host memory */
} outcome;

/* The trainer's host ops, now and then late. */
static ps_status slow_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch) {
  const uint64_t x = mix64(launch->op * 31 + launch->step);
  if (x % 4 == 0)
    usleep((useconds_t)(x >> 32) % 300);
  return ps__trainer_hook(ctx, what, unit, launch);
}

static outcome train(const model *m, ps_plan *plan, bool one_by_one) {
  outcome o = {.state = 0};
  ps_train_config c = {0};
  ps_train_config_init(&c);
  c.nesterov = plan->cfg.optimizer == PS_OPTIMIZER_SGD && plan->cfg.clip_norm > 0;
  c.lr = 1e-2;
  c.batch_fn = fill_batch;
  c.disk = plan->at->disk == PS__NO_PLACE ? NULL : root;
  ps_trainer *t;
  CHECK(ps_trainer_create(&t, m->dir, plan, &c, NULL, NULL) == PS_OK);
  plan->hooks.fn = slow_hook;
  poison(t, true);
  if (!one_by_one)
    CHECK(ps_trainer_submit(t, N_STEPS) == PS_OK);
  for (int i = 0; i < N_STEPS; i++) {
    ps_step_metrics metrics;
    if (one_by_one)
      CHECK(ps_trainer_submit(t, 1) == PS_OK);
    CHECK(ps_trainer_wait(t, &metrics) == PS_OK);
    o.loss[i] = metrics.loss;
    o.norm[i] = metrics.grad_norm;
    if (one_by_one)
      poison(t, false);
  }
  o.state = hash_state(t);
  ps_trainer_destroy(t);
  return o;
}

/* ---- the step as built ----------------------------------------------------------------------- */

static void check_step(const ps__step *s) {
  CHECK(ps__step_valid(s));
  uint64_t end[PS_MAX_PLACES] = {0};
  for (size_t i = 0; i < s->n_vt; i++)
    if (s->vt[i].offset + s->vt[i].bytes > end[s->vt[i].space])
      end[s->vt[i].space] = s->vt[i].offset + s->vt[i].bytes;
  for (uint32_t space = 0; space < s->at->n_places; space++) {
    CHECK(ps__memmap_valid(s->vt, s->n_vt, space, s->space_bytes[space]));
    CHECK(s->space_bytes[space] < end[space] + 256);
  }
}

/* The hook that an op calls; -1: none. */
static int hook_of(const ps__step *s, size_t op) {
  const ps__vop *o = &s->op[op];
  const bool hook = o->kernel && o->args_bytes == sizeof(ps__args_hook) &&
                    (!o->kernel->info || !o->kernel->info->work);
  return hook ? (int)((const ps__args_hook *)(const void *)(s->args + o->args))->what : -1;
}
/* An update on the host has the rate of its part. */
static void check_update_rates(const ps__step *s) {
  for (size_t i = 0; i < s->n_op; i++) {
    const int what = hook_of(s, i);
    const ps__rate rate = ps__op_rate(s->op[i].kernel);
    if (what == PS__HOOK_UPDATE_STATE)
      CHECK(rate == PS__RATE_OPTIMIZER_STATE);
    else if (what == PS__HOOK_UPDATE) {
      const ps__args_hook *a = (const void *)(s->args + s->op[i].args);
      CHECK(rate ==
            (s->spec->update_split[a->unit] ? PS__RATE_OPTIMIZER_WEIGHTS : PS__RATE_OPTIMIZER));
    } else
      CHECK(rate != PS__RATE_OPTIMIZER && rate != PS__RATE_OPTIMIZER_WEIGHTS);
  }
}
/* The scale of a span is made once a step, by each device that has rounds. */
static void check_scales(const ps__step *s) {
  uint32_t n = 0, expected = 0;
  for (size_t i = 0; i < s->n_op; i++)
    n += s->op[i].kernel == &ps__k_fp8_scale && s->op[i].tag.what;
  for (uint32_t l = 0; l < s->model->n_layers; l++)
    for (uint32_t i = 0; i < ps__layer_of(s->model, l)->n_fwd; i++)
      expected += ps__layer_of(s->model, l)->fwd[i].kernel == &ps__k_fp8_scale &&
                  ps__layer_of(s->model, l)->fwd[i].what;
  CHECK(n >= expected && n <= expected * s->at->n_devices);
}
/* A total whose pieces stay on their devices goes to the host once, and comes back for an update on
 * a device alone, whole. No device has more of it than its piece before. */
static void check_pieces_stay(const ps__step *s) {
  for (uint32_t u = 0; u < s->spec->n_units; u++) {
    uint64_t sent = 0, fetched = 0;
    if (!s->spec->in_pieces[u] || !s->spec->grad_resident[u] || s->model->unit[u].frozen ||
        ps__grad_passes(s->spec, u))
      continue;
    for (size_t i = 0; i < s->n_op; i++) {
      const ps__vaccess *a = &s->access[s->op[i].access];
      if (s->op[i].kernel)
        continue;
      sent += a[1].vt == s->unit_host[u].grad ? a[1].bytes : 0;
      CHECK(a[1].vt != s->unit_host[u].grad || s->vt[a[0].vt].bytes == a[0].bytes ||
            ps__unit_contributions(s->model, &s->sums, u) == 1);
      fetched += a[0].vt == s->unit_host[u].grad ? a[0].bytes : 0;
    }
    const uint64_t whole = s->vt[s->unit_host[u].grad].bytes;
    CHECK(sent == whole && fetched == (ps__updated_on_device(s->spec, u) ? whole : 0));
  }
}
/* The step ends with the report, which awaits the last of the weights and state that each device's
 * stream copies to the host, and of the state that goes to the disk; and with the state of the
 * units whose updates are split, from the last one back. */
static void check_report(const ps__step *s) {
  size_t end = s->n_op;
  for (uint32_t u = 0; u < s->spec->n_units; u++)
    if (s->spec->update_split[u])
      CHECK(hook_of(s, --end) == PS__HOOK_UPDATE_STATE &&
            s->op[end].tag.layer == (int32_t)s->model->unit[u].layer);
  const ps__vop *report = &s->op[end - 1];
  /* after stats, and the counters */
  uint32_t stored = PS__NO_VT, n = ps__n_counters(s->model) ? 2 : 1;
  for (size_t i = 0; i < s->n_op; i++)
    stored = s->op[i].stream == s->at->disk_write ? s->access[s->op[i].access].vt : stored;
  for (uint32_t d = 0; d < s->at->n_devices; d++) {
    uint32_t last = PS__NO_VT;
    for (size_t i = 0; i < s->n_op; i++)
      for (uint32_t u = 0; s->op[i].stream == s->at->dev[d].to_host && u < s->spec->n_units; u++) {
        const uint32_t to = s->access[s->op[i].access + 1].vt;
        const ps__unit_host *h = &s->unit_host[u];
        if (to == h->weights || to == h->master || to == h->state[0] || to == h->state[1])
          last = to;
      }
    CHECK(last == PS__NO_VT || s->access[report->access + n++].vt == last);
  }
  CHECK(strcmp(report->kernel->name, "report") == 0 &&
        report->n_access == n + (stored != PS__NO_VT));
  CHECK(stored == PS__NO_VT || s->access[report->access + n].vt == stored);
}

/* Freed at the op after the last use where nothing is issued ahead or freed late: no byte is
 * held for longer than it is needed. */
static void check_tight(const ps__step *s) {
  uint32_t *last = calloc(s->n_vt, sizeof *last);
  CHECK(last);
  for (size_t i = 0; i < s->n_op; i++)
    for (uint32_t j = 0; j < s->op[i].n_access; j++)
      last[s->access[s->op[i].access + j].vt] = (uint32_t)i + 1;
  for (size_t i = 0; i < s->n_vt; i++)
    CHECK(s->vt[i].persistent || last[i] > 0);
  free(last);
}

/* ---- random cases ---------------------------------------------------------------------------- */

/* Shapes: one sequence a chunk, packed with an uneven last chunk and round, a long sequence in
 * even and uneven slices; then totals that are dithered or have low bytes: more rounds than
 * PS__MOST_NEAREST and PS__MOST_DITHERED, rounds of more chunks than PS__MOST_ADDITIONS, both. */
typedef struct shape {
  uint32_t seq_len, n_sequences, chunk_tokens, chunks_per_round, first_round_chunks, first_rounds;
} shape;
static const shape shapes[] = {
    {24, 4, 24, 4, 0, 0},  {24, 5, 24, 2, 3, 0}, {16, 7, 32, 2, 0, 0},  {16, 5, 48, 1, 0, 0},
    {64, 2, 16, 4, 0, 0},  {64, 3, 16, 4, 8, 0}, {56, 3, 24, 3, 0, 0},  {40, 2, 16, 6, 0, 0},
    {32, 3, 96, 1, 0, 0},  {8, 6, 8, 1, 2, 0},   {4, 20, 4, 10, 0, 0},  {36, 5, 4, 9, 0, 0},
    {38, 3, 4, 10, 20, 0}, {4, 18, 4, 1, 0, 0},  {4, 40, 4, 10, 20, 0}, {4, 170, 4, 10, 0, 0},
    {24, 9, 24, 1, 2, 2},  {8, 11, 16, 1, 2, 3}, {64, 7, 16, 4, 8, 2},  {4, 90, 4, 10, 20, 3},
};
/* FP8 needs multiples of 16. */
static const shape fp8_shapes[] = {
    {32, 4, 32, 4, 0, 0},  {48, 5, 48, 2, 3, 0}, {16, 7, 32, 2, 0, 0},   {64, 3, 16, 4, 8, 0},
    {112, 3, 48, 3, 0, 0}, {80, 2, 32, 6, 0, 0}, {16, 20, 16, 10, 0, 0}, {16, 40, 16, 10, 20, 0},
    {32, 18, 32, 1, 0, 0}, {16, 5, 48, 1, 0, 0}, {144, 2, 64, 10, 0, 0}, {16, 11, 16, 2, 3, 3},
};
enum {
  N_SHAPES = sizeof shapes / sizeof *shapes,
  N_FP8_SHAPES = sizeof fp8_shapes / sizeof *fp8_shapes,
  N_PLAIN_CASES = N_MODELS * N_SHAPES * PS_RECIPE_FP8,
  N_CASES = N_PLAIN_CASES + N_FP8_MODELS * N_FP8_SHAPES
};

/* A case of FP8: models, shapes; the recipes, and what stays in bf16, in
 * turn. */
static const model *fp8_case(uint32_t idx, const shape **sh, ps_plan_config *cfg) {
  *sh = &fp8_shapes[idx / N_FP8_MODELS];
  cfg->recipe = PS_RECIPE_FP8 + idx % 2;
  cfg->fp8_bf16_first = idx / 2 % 2;
  cfg->fp8_bf16_last = idx / 4 % 2;
  cfg->fp8_bf16_down = idx % 3 == 1;
  cfg->fp8_head = idx % 3 == 2;
  cfg->fp8_fast_accumulation = idx % 2;
  if (cfg->fp8_head)
    cfg->head_slice_tokens = 16;
  return &models[idx % N_FP8_MODELS];
}

static void describe(const model *m, const ps_plan_config *cfg, const ps__spec *s, int which) {
  printf("case: %u devices, ring of %u%s, %s %s recipe %u clip %u seq %llu x %llu, chunk %llu, "
         "round %llu, spec "
         "%d, leads %u %u "
         "lags %u %u; clip by %u, totals %s, lag %u\n",
         s->n_devices, s->ring_blocks, s->ring_by_host ? " by the host" : "", m->name,
         ps_optimizer_name(s->optimizer), cfg->recipe, cfg->clip_norm > 0,
         (unsigned long long)cfg->seq_len,
         (unsigned long long)(cfg->tokens_per_step / cfg->seq_len),
         (unsigned long long)cfg->chunk_tokens, (unsigned long long)cfg->chunks_per_round, which,
         s->param_lead, s->saved_lead, s->saved_lag, s->grad_lag, cfg->clip_by,
         s->passing_grads ? "pass" : "stay", s->update_lag);
  printf("%u blocks kept across rounds%s\n", s->blocks_kept,
         s->embed_on_host ? ", embedding on the host" : "");
  for (uint32_t u = 0; u < s->n_units; u++) {
    printf("unit %u param %u grad %u update %u streamed %u held %u split %u in pieces %u\n", u,
           s->param_resident[u], s->grad_resident[u], s->update_resident[u], s->update_streamed[u],
           s->state_held[u], s->update_split[u], s->in_pieces[u]);
  }
  for (uint32_t layer = 0; layer < s->n_layers; layer++)
    for (uint32_t c = 0; c < s->n_chunks; c++) {
      printf("layer %u chunk %u:", layer, c);
      for (uint32_t saved = 0; saved < s->n_saved; saved++)
        printf(" %s=%u", ps__layer_of(m->made, layer + 1)->saved[saved].name,
               *ps__spec_policy(s, layer, c, saved));
      printf("\n");
    }
}

static bool same(const outcome *a, const outcome *b) { return memcmp(a, b, sizeof *a) == 0; }

/* How many devices have ops of the head. */
static uint32_t devices_of_head(const ps__step *s) {
  bool has[PS_MAX_DEVICES] = {false};
  uint32_t n = 0;
  for (uint32_t d = 0; d < s->at->n_devices; d++) {
    for (size_t i = 0; i < s->n_op; i++)
      has[d] |= s->op[i].stream == s->at->dev[d].compute && s->op[i].tag.phase == PS__PHASE_HEAD;
    n += has[d];
  }
  return n;
}

/* In a ring: one device has a head of one section, and several have one of more. */
static void check_heads(const ps__step *s, uint32_t sections) {
  const uint32_t n = devices_of_head(s),
                 most = sections < s->at->n_devices ? sections : s->at->n_devices;
  CHECK(n <= most && (sections == 1 || n > 1));
}

/* 18 chunks in sections of 4, on two devices: they take turns, and the device that has not the last
 * block begins, and has the last section of 2 chunks too. */
static void check_turns(const ps__step *s) {
  const uint32_t last = ps__device_of(s->spec, s->spec->n_layers, 0);
  for (size_t i = 0; i < s->n_op; i++)
    for (uint32_t d = 0; d < 2; d++)
      CHECK(s->op[i].stream != s->at->dev[d].compute || s->op[i].tag.phase != PS__PHASE_HEAD ||
            s->op[i].tag.chunk < 0 ||
            d == (last + 1 + (17 - (uint32_t)s->op[i].tag.chunk) / 4) % 2);
}

/* The state of some units; the updates of these are on the host. */
static void put_on_disk(ps__spec *spec, uint64_t *state) {
  spec->disk = true;
  spec->disk_lead = rnd_below(state, MAX_LEAD);
  for (uint32_t u = 1; u < spec->n_units; u++)
    if (!spec->model->unit[u].frozen && rnd_below(state, 3)) {
      spec->state_on_disk[u] = 1;
      spec->update_resident[u] = spec->update_streamed[u] = spec->state_held[u] =
          spec->update_split[u] = 0;
    }
}

/* @n_specs random specs give the bits of everything on the device.
 * @sections  0: specs of any layout; else of a ring whose head has so many */
static void check_specs(const model *m, const shape *sh, ps_plan_config cfg, int n_specs,
                        uint32_t sections, uint64_t *state) {
  ps_hardware hw = {.struct_bytes = sizeof hw};
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  cfg.seq_len = sh->seq_len;
  cfg.tokens_per_step = (uint64_t)sh->seq_len * sh->n_sequences;
  cfg.chunk_tokens = sh->chunk_tokens;
  cfg.chunks_per_round = sh->chunks_per_round;
  cfg.lora = m->lora;
  cfg.router_aux_loss = m->cfg.n_experts ? 0.5 : 0;
  ps__layout layout;
  ps__spec spec;
  ps_plan *plan;
  CHECK(ps__layout_init(&layout, cfg.seq_len, sh->n_sequences, cfg.chunk_tokens,
                        cfg.chunks_per_round, sh->first_round_chunks, sh->first_rounds) == PS_OK);
  resident_spec(&spec, m, &cfg, &layout);
  CHECK(ps__plan_from_spec(&plan, &m->cfg, &cfg, &hw, &spec) == PS_OK);
  check_step(&plan->step);
  const outcome expected = train(m, plan, false);
  for (int i = 0; i < N_STEPS; i++)
    CHECK(expected.loss[i] > 0 && expected.norm[i] > 0);
  ps_plan_destroy(plan);
  for (int i = 0; i < n_specs; i++) {
    do
      randomize(&spec, m, &layout, state);
    while (sections && !spec.ring_blocks);
    if (direct_io && ++n_specs_so_far % 8 == 0)
      put_on_disk(&spec, state);
    CHECK(ps__plan_from_spec(&plan, &m->cfg, &cfg, &hw, &spec) == PS_OK);
    if (sections)
      check_heads(&plan->step, sections);
    if (sections == 5 && layout.n_chunks == 18 && spec.n_devices == 2)
      check_turns(&plan->step);
    check_step(&plan->step);
    check_tight(&plan->step);
    check_pieces_stay(&plan->step);
    check_report(&plan->step);
    check_update_rates(&plan->step);
    check_scales(&plan->step);
    static uint32_t turn;
    n_passing_to_disk += spec.disk && spec.passing_grads;
    const outcome got = train(m, plan, turn++ % 2 == 0);
    if (!same(&got, &expected)) {
      describe(m, &cfg, &spec, i);
      for (int k = 0; k < N_STEPS; k++)
        printf("step %d: loss %.17g, %.17g expected; norm %.17g, %.17g expected\n", k, got.loss[k],
               expected.loss[k], got.norm[k], expected.norm[k]);
      CHECK(!"the same bits as with everything on the device");
    }
    ps_plan_destroy(plan);
  }
  ps__spec_free(&spec);
  ps__layout_free(&layout);
}

static uint32_t run_case(uint32_t idx, int n_specs, uint64_t *state) {
  const model *m = &models[idx % N_MODELS];
  const shape *sh = &shapes[idx / N_MODELS % N_SHAPES];
  ps_plan_config cfg = {.struct_bytes = sizeof cfg,
                        .document_end_token = -1,
                        .recipe = idx / (N_MODELS * N_SHAPES),
                        .head_slice_tokens = rnd_below(state, 4) ? 10 + rnd_below(state, 30)
                                                                 : 1 + rnd_below(state, 3),
                        .clip_norm = rnd_below(state, 2) ? 0.5 : 0,
                        .document_token = 5,
                        .n_threads = 2,
                        .optimizer = (idx + idx / N_MODELS) % PS_N_OPTIMIZERS};
  cfg.clip_by = cfg.clip_norm > 0 && rnd_below(state, 2) ? PS_CLIP_BY_PREVIOUS : PS_CLIP_BY_STEP;
  if (idx >= N_PLAIN_CASES)
    m = fp8_case(idx - N_PLAIN_CASES, &sh, &cfg);
  check_specs(m, sh, cfg, n_specs, 0, state);
  return (uint32_t)n_specs;
}

static uint32_t layout_chunks(const shape *sh) {
  return sh->n_sequences * ((sh->seq_len + sh->chunk_tokens - 1) / sh->chunk_tokens);
}

/* Steps of one round, whose head the devices of a ring share: in sections of whole contributions,
 * each of PS__MOST_ADDITIONS slices; of a tied model of as many chunks, too. Where the head has no
 * gradients, a section is a chunk. The fourth shape's first chunk in the head's order is one slice,
 * so no contribution but the last ends with a chunk. */
/* @stride: of the models in a case, by turns. */
static void test_shared_head(uint32_t stride, int n_specs, uint64_t *state) {
  static const struct {
    shape sh;
    uint32_t slice, recipe, sections, sections_tied;
    bool fp8_head;
  } cases[] = {
      {{72, 1, 4, 18, 0, 0}, 2, PS_RECIPE_BF16, 5, 3, false},
      {{72, 1, 4, 18, 0, 0}, 4, PS_RECIPE_FP32_MASTER, 3, 3, false},
      {{9, 17, 9, 17, 0, 0}, 3, PS_RECIPE_BF16, 3, 3, false},
      {{38, 1, 4, 10, 0, 0}, 2, PS_RECIPE_BF16, 1, 1, false},
      {{72, 1, 4, 18, 0, 0}, 2, PS_RECIPE_FP32, 1, 1, false},
      {{160, 1, 4, 40, 0, 0}, 1, PS_RECIPE_BF16, 20, 5, false}, /* totals with low bytes */
      {{144, 1, 16, 9, 0, 0}, 16, PS_RECIPE_FP8, 2, 2, false},
      {{144, 1, 16, 9, 0, 0}, 16, PS_RECIPE_FP8, 2, 2, true},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (uint32_t k = 0; k < N_MODELS; k++) {
      const model *m = &models[k];
      const ps_plan_config cfg = {.struct_bytes = sizeof cfg,
                                  .document_end_token = -1,
                                  .recipe = cases[i].recipe,
                                  .head_slice_tokens = cases[i].slice,
                                  .fp8_head = cases[i].fp8_head,
                                  .clip_norm = (i + k / 2) % 2 ? 0.5 : 0,
                                  .document_token = 5,
                                  .n_threads = 2};
      if (ps__has_carried(&m->cfg)) /* no ring */
        continue;
      if ((i + k) % stride || (cases[i].recipe >= PS_RECIPE_FP8 && k >= N_FP8_MODELS))
        continue;
      check_specs(m, &cases[i].sh, cfg, n_specs,
                  m->lora.rank             ? layout_chunks(&cases[i].sh)
                  : m->cfg.tied_embeddings ? cases[i].sections_tied
                                           : cases[i].sections,
                  state);
    }
  printf("ok devices of a ring share the head of one round\n");
}

/* ---- state is counted ------------------------------------------------------------------------ */

typedef struct counted {
  uint64_t host, device, in, out; /* BYTES: of state at either place; copied a step */
} counted;

static counted count(const model *m, ps_optimizer optimizer, ps_recipe recipe, bool resident,
                     bool streamed, bool held) {
  const ps_plan_config cfg = {
      PLAN_DEFAULTS,          .recipe = recipe,   .optimizer = optimizer, .seq_len = 32,
      .tokens_per_step = 128, .chunk_tokens = 32, .chunks_per_round = 4,  .head_slice_tokens = 32,
      .clip_norm = 1,         .n_threads = 2};
  ps_hardware hw = {.struct_bytes = sizeof hw};
  ps__layout layout;
  ps__spec spec;
  ps_plan *plan;
  counted c = {0};
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  CHECK(ps__layout_init(&layout, 32, 4, 32, 4, 0, 0) == PS_OK);
  resident_spec(&spec, m, &cfg, &layout);
  memset(spec.update_resident, resident, spec.n_units);
  memset(spec.update_streamed, streamed, spec.n_units);
  memset(spec.state_held, held, spec.n_units);
  CHECK(ps__plan_from_spec(&plan, &m->cfg, &cfg, &hw, &spec) == PS_OK);
  for (uint32_t u = 0; u < spec.n_units; u++)
    for (int k = 0; k < PS_MAX_STATES; k++) {
      const uint32_t vt = plan->step.unit_host[u].state[k];
      if (vt != PS__NO_VT)
        *(plan->step.vt[vt].space == plan->at->host ? &c.host : &c.device) +=
            plan->step.vt[vt].bytes;
    }
  c.in = plan->step.copied_bytes[0];
  c.out = plan->step.copied_bytes[1];
  ps_plan_destroy(plan);
  ps__spec_free(&spec);
  ps__layout_free(&layout);
  return c;
}

/* Wherever state is, a parameter has as much as the table says, and where it is streamed as much
 * crosses the link each way. */
static void test_state_is_counted(void) {
  const model *m = &models[0];
  uint64_t n = 0; /* with what pads units */
  for (uint32_t u = 0; u < m->made->n_units; u++)
    n += m->made->unit[u].n;
  for (int i = 0; i < PS_N_OPTIMIZERS * PS_N_RECIPES; i++) {
    const ps_optimizer o = (ps_optimizer)(i / PS_N_RECIPES);
    const ps_recipe recipe = (ps_recipe)(i % PS_N_RECIPES);
    const uint64_t each =
        (o == PS_OPTIMIZER_ADAMW ? 2u : 1u) * ps__dtypes[ps__recipes[recipe].state[0].dtype].bytes;
    const counted host = count(m, o, recipe, false, false, false),
                  device = count(m, o, recipe, true, false, false),
                  streamed = count(m, o, recipe, false, true, false),
                  held = count(m, o, recipe, false, true, true),
                  adamw = count(m, PS_OPTIMIZER_ADAMW, recipe, false, true, false);
    CHECK(ps__state_bytes(o, recipe, n) == n * each);
    CHECK(host.host == n * each && host.device == 0);
    CHECK(device.host == 0 && device.device == n * each);
    CHECK(streamed.host == n * each && streamed.device == 0);
    CHECK(held.host == 0 && held.device == n * each);
    CHECK(streamed.in - held.in == n * each && streamed.out - held.out == n * each);
    const uint64_t less = ps__state_bytes(PS_OPTIMIZER_ADAMW, recipe, n) - n * each;
    CHECK(adamw.in - streamed.in == less && adamw.out - streamed.out == less);
  }
  printf("ok every optimizer's state is counted, in memory and on the link\n");
}

/* ---- the memory map against the rule, word by word ------------------------------------------- */

static uint64_t naive_fit(const ps__vt *vt, const uint32_t *placed, size_t n, const ps__vt *t,
                          uint64_t base) {
  uint64_t at = base;
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t i = 0; i < n; i++) {
      const ps__vt *o = &vt[placed[i]];
      if (o->last <= t->first || t->last <= o->first || o->offset >= at + t->bytes ||
          o->offset + o->bytes <= at)
        continue;
      at = (o->offset + o->bytes + 255) / 256 * 256;
      moved = true;
    }
  }
  return at;
}

/* The highest place from @base to @ceiling; the lowest of all where there is none. */
static uint64_t naive_high(const ps__vt *vt, const uint32_t *placed, size_t n, const ps__vt *t,
                           uint64_t base, uint64_t ceiling) {
  if (base + t->bytes > ceiling)
    return naive_fit(vt, placed, n, t, base);
  uint64_t at = (ceiling - t->bytes) / 256 * 256;
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t i = 0; i < n; i++) {
      const ps__vt *o = &vt[placed[i]];
      if (o->last <= t->first || t->last <= o->first || o->offset >= at + t->bytes ||
          o->offset + o->bytes <= at)
        continue;
      if (o->offset < base + t->bytes)
        return naive_fit(vt, placed, n, t, base);
      at = (o->offset - t->bytes) / 256 * 256;
      moved = true;
    }
  }
  return at;
}

/* Longest-lived first, then largest, then first made; each at its lowest offset, or its highest. */
static const ps__vt *rank_of;
static int by_rank(const void *pa, const void *pb) {
  const uint32_t ia = *(const uint32_t *)pa, ib = *(const uint32_t *)pb;
  const ps__vt *a = &rank_of[ia], *b = &rank_of[ib];
  const uint32_t da = a->last - a->first, db = b->last - b->first;
  if (da != db)
    return da < db ? 1 : -1;
  if (a->bytes != b->bytes)
    return a->bytes < b->bytes ? 1 : -1;
  return ia < ib ? -1 : 1;
}

static void test_memmap(void) {
  enum { MOST = 3000 };
  static ps__vt vt[MOST];
  static uint32_t order[MOST];
  uint64_t state = 3;
  for (int round = 0; round < N_MAPS; round++) {
    const uint32_t n = round % 3 ? 700 + rnd_below(&state, MOST - 700) : 50,
                   n_ops = 300 + rnd_below(&state, 20000);
    uint64_t base = 0, peak = 0;
    for (uint32_t i = 0; i < n; i++) {
      const uint32_t first = rnd_below(&state, n_ops),
                     longest = rnd_below(&state, 5) ? 1 + n_ops / 50 : n_ops;
      const uint32_t life = 1 + rnd_below(&state, longest);
      vt[i] = (ps__vt){.bytes = 1 + rnd_below(&state, 1 << (4 + rnd_below(&state, 14))),
                       .first = first,
                       .last = first + life < n_ops ? first + life : n_ops,
                       .persistent = i < 3,
                       .high = round % 2 && i >= 3 && rnd_below(&state, 4) == 0};
      order[i] = i;
      if (!vt[i].persistent)
        continue;
      base = (base + vt[i].bytes + 255) / 256 * 256;
    }
    const uint64_t got = ps__memmap(vt, n, 0);
    CHECK(ps__memmap_valid(vt, n, 0, got));
    const uint64_t bound = ps__memmap_bound(vt, n, n_ops, 0), ceiling = bound + bound / 64;
    CHECK(bound <= got);
    rank_of = vt;
    qsort(order + 3, n - 3, sizeof *order, by_rank);
    for (uint32_t k = 3; k < n; k++) {
      const ps__vt *t = &vt[order[k]];
      CHECK(t->offset == (t->high ? naive_high(vt, order + 3, k - 3, t, base, ceiling)
                                  : naive_fit(vt, order + 3, k - 3, t, base)));
      const uint64_t end = vt[order[k]].offset + vt[order[k]].bytes;
      if (end > peak)
        peak = end;
    }
    CHECK(got == peak);
  }
  printf("ok the memory map is the greedy one, and no smaller than what is alive at once\n");
}

/* ---- state on several devices ---------------------------------------------------------------- */

/* Each unit's state is on one device, which updates it. Layers take turns. */
static void check_held(const ps__step *s) {
  uint32_t n_updates = 0;
  for (uint32_t u = 0; u < s->spec->n_units; u++) {
    const uint32_t layer = s->model->unit[u].layer, d = layer ? (layer - 1) % s->at->n_devices : 0;
    CHECK(s->vt[s->unit_host[u].state[0]].space ==
          (s->spec->state_held[u] ? s->at->dev[d].place : s->at->host));
  }
  for (size_t i = 0; i < s->n_op; i++) {
    const ps__args_hook *a = (const void *)(s->args + s->op[i].args);
    if (hook_of(s, i) != PS__HOOK_UPDATE)
      continue;
    const uint32_t state = s->vt[s->unit_host[a->unit].state[0]].space;
    CHECK(s->op[i].stream == (state == s->at->host ? s->at->host_ops : s->at->dev[state].compute));
    n_updates++;
  }
  CHECK(n_updates == s->spec->n_units);
}

/* The first @blocks hold their state on 2 or 3 devices, which train to the bits of one that has
 * everything: rounds on devices, and rings in which a block's device updates it and in which
 * another one does. Some parameters are resident, and totals pass where they may. */
static void check_holding(const model *m, const ps_plan_config *cfg, const ps_hardware *hw,
                          uint32_t blocks) {
  static const struct {
    uint32_t n_devices, ring_blocks;
  } of[] = {{1, 0}, {2, 0}, {3, 0}, {2, 1}, {3, 2}};
  ps__layout layout;
  outcome expected, got;
  CHECK(ps__layout_init(&layout, cfg->seq_len, 7, cfg->chunk_tokens, cfg->chunks_per_round, 0, 0) ==
        PS_OK);
  for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
    ps__spec spec;
    ps_plan *plan;
    resident_spec(&spec, m, cfg, &layout);
    for (uint32_t u = 0; i && u < spec.n_units; u++) {
      const uint32_t layer = m->made->unit[u].layer;
      spec.grad_resident[u] = 0;
      spec.param_resident[u] = (u + i) % 2;
      spec.update_streamed[u] = spec.state_held[u] = layer > 0 && layer <= blocks;
    }
    spec.n_devices = of[i].n_devices;
    spec.ring_blocks = of[i].ring_blocks;
    spec.passing_grads = i && !spec.clip;
    spec.param_lead = spec.grad_lag = spec.update_lag = i % 2;
    CHECK(ps__plan_from_spec(&plan, &m->cfg, cfg, hw, &spec) == PS_OK);
    check_step(&plan->step);
    check_report(&plan->step);
    if (i)
      check_held(&plan->step);
    got = train(m, plan, i % 2);
    expected = i ? expected : got;
    CHECK(same(&got, &expected));
    ps_plan_destroy(plan);
    ps__spec_free(&spec);
  }
  ps__layout_free(&layout);
}

/* Every recipe, with its state as it says and in 8 bits, and every way of clipping: of these each
 * @stride-th. */
static void test_held_by_several(uint32_t stride) {
  const model *m = &models[0];
  ps_hardware hw = {.struct_bytes = sizeof hw};
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  for (uint32_t i = 0; i < 2 * PS_N_RECIPES * 3; i += stride) {
    ps_plan_config cfg = {PLAN_DEFAULTS,
                          .recipe = i / 6,
                          .state_bits = i % 2 ? 8 : 0,
                          .seq_len = 16,
                          .tokens_per_step = 7 * 16,
                          .chunk_tokens = 32,
                          .chunks_per_round = 1,
                          .head_slice_tokens = 16,
                          .clip_norm = i / 2 % 3 ? 0.5 : 0,
                          .clip_by = i / 2 % 3 == 2 ? PS_CLIP_BY_PREVIOUS : PS_CLIP_BY_STEP,
                          .n_threads = 2};
    check_holding(m, &cfg, &hw, 2 + i / 2 % 2);
  }
  printf("ok several devices hold the state of what they update, and train to the same bits\n");
}

int main(int argc, char **argv) {
  const bool all = argc > 1 && !strcmp(argv[1], "all"),
             threads = argc > 1 && !strcmp(argv[1], "threads"),
             few = argc > 1 && !strcmp(argv[1], "few");
  if (!threads)
    test_memmap();
  const char *tmp = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/penstock-test-plan-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(root));
  direct_io = has_direct_io(root);
  for (uint32_t i = 0; i < N_MODELS; i++)
    make_model(&models[i], root);
  for (uint32_t i = 0; i < N_MODELS; i++)
    CHECK(ps__model_create(&models[i].made, &models[i].cfg, PS_F32, 0, 0, NULL, NULL,
                           &models[i].lora) == PS_OK);
  if (!threads)
    test_state_is_counted();
  const int64_t before = ps__live_allocations();
  uint64_t state = 20261121;
  const uint32_t less = threads ? 9 : few ? 3 : 1, stride = all ? 1 : CASE_STRIDE * less;
  uint32_t n = 0;
  for (uint32_t i = 0; i < N_CASES; i += stride)
    n += run_case(i, all ? SPECS_OF_ALL : SPECS_A_CASE, &state);
  CHECK(n >= LEAST / less);
  test_held_by_several(all ? 1 : threads ? 17 : few ? 13 : 7);
  test_shared_head(all       ? 1
                   : threads ? 17
                   : few     ? 7
                             : 2,
                   all        ? SPECS_OF_ALL
                   : less > 1 ? 1
                              : 2,
                   &state);
  CHECK(ps__live_allocations() == before);
  CHECK(!direct_io || (int)n_passing_to_disk >= PASSING);
  printf("ok %u random plans train to the bits of the resident one%s\n", n,
         direct_io ? ", some with a disk" : "; none has a disk, as TMPDIR has no direct I/O");
  for (uint32_t i = 0; i < N_MODELS; i++)
    remove_folder(models[i].dir);
  CHECK(rmdir(root) == 0);
  return 0;
}
