/* test_observed.c - what a run tells of its machine: how long its steps take beside the plan, and
 * its rates. Trainings are paced (train/pace.h), so that times are exact.
 * Usage: test_observed [all: every way of sharing memory, and of healing] */
#include "train_pieces.h"
#include "engine/sim.h"
#include "plan/speeds.h"
#include "train/observed.h"
#include "train/pace.h"

/* ---- paced trainings ------------------------------------------------------------------------- */

/* A machine whose ops do not slow each other, and take time for their work alone. */
static ps_hardware roomy(void) {
  ps_hardware h = hw;
  h.n_cpus = 1 << 20;
  h.memory_bytes_per_s = 1e18;
  h.op_ns = 20;
  h.link[PS_LINK_H2D].bytes_per_s = h.link[PS_LINK_D2H].bytes_per_s =
      h.link[PS_LINK_H2D].duplex_bytes_per_s = 4e9;
  h.optimizer_bytes_per_s = h.optimizer_weights_bytes_per_s = h.optimizer_state_bytes_per_s = 8e9;
  h.accumulate_bytes_per_s = h.accumulate_sumsq_bytes_per_s = h.sumsq_bytes_per_s = 8e9;
  h.elementwise_bytes_per_s = h.gather_bytes_per_s = 8e9;
  for (int dt = 0; dt < PS_N_DTYPES; dt++) {
    h.gemm[dt][0].rows = h.attention[dt][0].rows = 0; /* no tables */
    h.gemm_flops_per_s[dt] = h.attention_flops_per_s[dt] = h.attention_bwd_flops_per_s[dt] = 4e10;
  }
  return h;
}

static ps_plan *paced_plan(placement where, uint32_t trace_steps) {
  const ps_hardware was = hw;
  ps_plan_config c = plan_config(PS_RECIPE_FP32, true);
  c.trace_steps = trace_steps;
  hw = roomy();
  ps_plan *plan = make_plan_of(c, where);
  hw = was;
  return plan;
}

static ps_trainer *paced_trainer(ps_plan *plan, ps_dataset *ds, const ps__slow *slow) {
  ps_train_config c = train_config(ds);
  ps__trainer_pace(slow);
  ps_trainer *t = make_trainer(plan, &c);
  ps__trainer_pace(NULL);
  return t;
}

/* Two steps are in flight, as in a training by the command. */
static void next_step(ps_trainer *t, ps_step_metrics *m) {
  const uint64_t in_flight = ps_trainer_steps_submitted(t) - ps_trainer_steps_done(t);
  CHECK(ps_trainer_submit(t, 2 - in_flight) == PS_OK);
  CHECK(ps_trainer_wait(t, m) == PS_OK);
}

static double off(double a, double b) { return fabs(a / b - 1); }

static void test_paced(void) {
  ps_dataset *ds = open_shard();
  ps_step_metrics m;
  for (placement where = 0; where < N_PLACEMENTS; where++) {
    ps_plan *plan = paced_plan(where, 2);
    ps_trainer *t =
        paced_trainer(plan, ds, &(ps__slow){.h2d = 2, .d2h = 2, .host = 2, .from = 5, .to = 8});
    for (int i = 0; i < 12; i++) {
      next_step(t, &m);
      const bool begins = i == 0 || i == 8, slow = i >= 5 && i < 8;
      CHECK(slow ? m.step_s > 1.05 * m.predicted_step_s
                 : begins || off(m.step_s, m.predicted_step_s) < 1e-3);
    }
    CHECK(ps_trainer_destroy(t) == PS_OK && ps_plan_destroy(plan) == PS_OK);
  }
  CHECK(ps_dataset_close(ds) == PS_OK);
  printf("ok a paced step takes the time that is planned, and more on a slower machine\n");
}

/* ---- speeds ---------------------------------------------------------------------------------- */

/* 1B in bf16 on an H200 whose caps let parameters, activations and updates travel. */
static ps_plan *plan_of(const char *model, const ps_hardware *gpu, uint32_t n) {
  ps_model_config m = {.struct_bytes = sizeof m};
  const ps_plan_config c = {PLAN_DEFAULTS,
                            .recipe = PS_RECIPE_BF16,
                            .seq_len = 4096,
                            .tokens_per_step = 16 * 4096,
                            .chunk_tokens = 4096,
                            .chunks_per_round = 4,
                            .device_mem_bytes = 3ull << 30,
                            .n_devices = n,
                            .layout = PS_LAYOUT_DATA_PARALLEL,
                            .clip_norm = 0.5};
  ps_plan *plan;
  CHECK(ps_model_config_read(&m, model) == PS_OK);
  m.n_layers = 4;
  CHECK(ps_plan_create(&plan, &m, &c, gpu) == PS_OK);
  return plan;
}

static ps_plan *plan_on_gpus(const ps_hardware *gpu, uint32_t n) {
  return plan_of("models/1b.json", gpu, n);
}
static ps_plan *plan_on_gpu(const ps_hardware *gpu) { return plan_on_gpus(gpu, 1); }

static double fraction_of(uint64_t *state) { return (double)(rnd(state) >> 11) * 0x1p-53; }

static double normal_of(uint64_t *state) {
  const double a = sqrt(-2 * log(1 - fraction_of(state)));
  return a * cos(2 * M_PI * fraction_of(state));
}

/* Three steps of the plan in a row on a machine @is; returns the steady step's ns. The times of
 * copies and host ops scatter: the standard deviation of their logarithms is @scatter. */
static double simulate_scattered(const ps_plan *plan, const ps_hardware *is, double scatter,
                                 uint64_t *state, ps_trace_event *events) {
  const size_t n = plan->step.n_op;
  double end[4];
  ps__cost_model m =
      ps__cost_model_of(is, plan->model->fp8.on, plan->at, is->n_threads, plan->spec.sum_threads);
  ps_sim_cost *cost = calloc(n, sizeof *cost);
  ps_trace_event *all = calloc(4 * n, sizeof *all);
  ps__step_costs(&plan->step, &m, false, cost);
  for (size_t i = 0; i < n && scatter > 0; i++) {
    const uint32_t s = plan->step.op[i].stream;
    if (ps__link_of(plan->at, s) || ps__stream_on_host(plan->at, s))
      cost[i].ns *= exp(scatter * normal_of(state));
  }
  CHECK(ps__sim_run(plan->schedule, cost, 4, 0, all, end) == PS_OK);
  memcpy(events, all + n, 3 * n * sizeof *events);
  free(all);
  free(cost);
  return end[2] - end[1];
}

static double simulate(const ps_plan *plan, const ps_hardware *is, ps_trace_event *events) {
  return simulate_scattered(plan, is, 0, NULL, events);
}

/* A machine whose memory and clock are slower: by other factors for what runs alone and together.
 */
static ps_hardware slower(const ps_hardware *gpu) {
  ps_hardware h = *gpu;
  h.link[PS_LINK_H2D].bytes_per_s *= 0.7;
  h.link[PS_LINK_D2H].bytes_per_s *= 0.85;
  h.link[PS_LINK_H2D].duplex_bytes_per_s *= 0.75;
  h.optimizer_bytes_per_s *= 0.8;
  h.optimizer_weights_bytes_per_s *= 0.8;
  h.optimizer_state_bytes_per_s *= 0.8;
  h.accumulate_bytes_per_s *= 0.75;
  h.accumulate_sumsq_bytes_per_s *= 0.75;
  h.sumsq_bytes_per_s *= 0.75;
  for (ps_contention_rate *e = h.contention; e->kinds; e++) {
    e->h2d_bytes_per_s *= 0.65;
    e->d2h_bytes_per_s *= 0.8;
    e->host_bytes_per_s *= e->kinds & PS_CONTENTION_SUMS ? 0.75 : 0.8;
  }
  for (int i = 0; i < PS_MAX_GEMM_RATES; i++) {
    h.gemm[PS_BF16][i].forward_flops_per_s *= 0.93;
    h.gemm[PS_BF16][i].dgrad_flops_per_s *= 0.93;
    h.gemm[PS_BF16][i].wgrad_flops_per_s *= 0.93;
  }
  for (int i = 0; i < PS_MAX_ATTENTION_RATES; i++) {
    h.attention[PS_BF16][i].forward_flops_per_s *= 0.95;
    h.attention[PS_BF16][i].backward_flops_per_s *= 0.95;
  }
  return h;
}

/* The rates that the step used are found again; the description that comes out gives its time. */
static void test_speeds(void) {
  static ps_hardware gpu, is, seen; /* too large for a stack together */
  static ps__speeds speeds[3], all;
  gpu.struct_bytes = sizeof gpu;
  CHECK(ps_hardware_describe(&gpu, "docs/hardware-h200.json") == PS_OK);
  ps_plan *plan = plan_on_gpu(&gpu);
  is = slower(&gpu);
  ps_trace_event *events = calloc(3 * plan->step.n_op, sizeof *events);
  seen = gpu;
  const double as_described = simulate(plan, &gpu, events);
  CHECK(ps__speeds_measure(&speeds[1], plan, &gpu, events) == PS_OK);
  for (int r = 0; r < PS__N_SPEEDS; r++)
    for (int k = 0; k < PS__SPEED_SETS; k++)
      CHECK(speeds[1].of[r][k].ns == 0 || off(speeds[1].of[r][k].speed, 1) < 1e-3);
  const double ns = simulate(plan, &is, events);
  CHECK(ns > 1.05 * as_described);
  CHECK(ps__speeds_measure(&speeds[0], plan, &gpu, events) == PS_OK);
  speeds[2] = speeds[0];
  ps__speeds_median(&all, speeds, 3); /* of which one is of a quiet machine */
  ps__speeds_apply(&seen, &all);
  const struct {
    double seen, is;
    int resource;
  } rates[] = {
#define RATE(field, resource) {seen.field, is.field, resource}
      RATE(link[PS_LINK_H2D].bytes_per_s, PS__SPEED_H2D),
      RATE(link[PS_LINK_D2H].bytes_per_s, PS__SPEED_D2H),
      RATE(optimizer_bytes_per_s, PS__SPEED_UPDATES),
      RATE(optimizer_weights_bytes_per_s, PS__SPEED_UPDATES_WEIGHTS),
      RATE(optimizer_state_bytes_per_s, PS__SPEED_UPDATES_STATE),
      RATE(accumulate_bytes_per_s, PS__SPEED_ACCUMULATE),
      RATE(accumulate_sumsq_bytes_per_s, PS__SPEED_ACCUMULATE_SUMSQ),
      RATE(gemm[PS_BF16][2].wgrad_flops_per_s, PS__SPEED_GEMM),
      RATE(attention[PS_BF16][1].backward_flops_per_s, PS__SPEED_ATTENTION_BWD),
      RATE(elementwise_bytes_per_s, PS__SPEED_ELEMENTWISE),
      RATE(link[PS_LINK_PEER].bytes_per_s, PS__SPEED_PEERS),
      RATE(gemm_fp8_flops_per_s, PS__SPEED_GEMM_FP8)};
#undef RATE
  int n_ran = 0;
  for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
    bool ran = false;
    for (int k = 0; k < PS__SPEED_SETS; k++)
      ran |= all.of[rates[i].resource][k].ns > 0;
    n_ran += ran;
    /* what did not run takes the speed of its kind, or keeps its rate */
    CHECK(rates[i].seen == rates[i].is || off(rates[i].seen, rates[i].is) < 0.02);
  }
  CHECK(n_ran >= 8); /* the plan has no second device, no FP8, and whole updates or parts */
  for (int i = 0; is.contention[i].kinds; i++) { /* copies beside sums, and beside updates */
    const ps_contention_rate *a = &seen.contention[i], *b = &is.contention[i];
    CHECK(all.of[PS__SPEED_H2D][a->kinds].ns < 5e7 ||
          off(a->h2d_bytes_per_s, b->h2d_bytes_per_s) < 0.02);
    CHECK(off(a->host_bytes_per_s, b->host_bytes_per_s) < 0.02);
  }
  CHECK(off(simulate(plan, &seen, events), ns) < 0.01);
  free(events);
  CHECK(ps_plan_destroy(plan) == PS_OK);
  printf("ok rates are found from the marks of a step, and tell its time\n");
}

/* A model whose blocks have ops that others' do not, and the rates of these, of which a description
 * may have none. */
typedef struct family_case {
  const char *what, *config;
  void (*slow_down)(ps_hardware *is);
  size_t forward, backward; /* offsets in ps_hardware */
} family_case;

static void slow_delta(ps_hardware *is) {
  ps__delta_rates(is, is->delta);
  is->delta[0].forward_elements_per_s *= 0.7;
  is->delta[0].backward_elements_per_s *= 0.6;
}
static void slow_plain(ps_hardware *is) {
  is->heads512_attention_flops_per_s = 0.7 * ps__plain_rate(is, false);
  is->heads512_attention_bwd_flops_per_s = 0.6 * ps__plain_rate(is, true);
}

#define SIZES                                                                                      \
  "\"vocab_size\": 4096, \"hidden_size\": 1024, \"intermediate_size\": 2048, "                     \
  "\"num_attention_heads\": 8, \"num_key_value_heads\": 2}"
static const family_case families[] = {
    {"delta-nets", "{\"model_type\": \"qwen3_5_text\", \"num_hidden_layers\": 4, " SIZES,
     slow_delta, offsetof(ps_hardware, delta[0].forward_elements_per_s),
     offsetof(ps_hardware, delta[0].backward_elements_per_s)},
    {"heads of 512",
     "{\"model_type\": \"gemma4_text\", \"num_hidden_layers\": 4, \"global_head_dim\": 512, "
     "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\"], \"hidden_size_per_layer_input\": 0, \"num_kv_shared_layers\": 0, " SIZES,
     slow_plain, offsetof(ps_hardware, heads512_attention_flops_per_s),
     offsetof(ps_hardware, heads512_attention_bwd_flops_per_s)}};

static double rate_at(const ps_hardware *h, size_t offset) {
  double rate;
  memcpy(&rate, (const char *)h + offset, sizeof rate);
  return rate;
}

/* They are found from the estimates, and other rates do not move. */
static void test_family(const family_case *c) {
  static ps_hardware gpu, is, seen;
  static ps__speeds speeds;
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/family.json", root);
  FILE *f = fopen(path, "w");
  CHECK(f && fputs(c->config, f) >= 0 && fclose(f) == 0);
  gpu.struct_bytes = sizeof gpu;
  CHECK(ps_hardware_describe(&gpu, "docs/hardware-h200.json") == PS_OK);
  memset(gpu.delta, 0, sizeof gpu.delta);
  gpu.heads512_attention_flops_per_s = gpu.heads512_attention_bwd_flops_per_s = 0;
  is = seen = gpu;
  c->slow_down(&is);
  ps_plan *plan = plan_of(path, &gpu, 1);
  ps_trace_event *events = calloc(3 * plan->step.n_op, sizeof *events);
  const double ns = simulate(plan, &is, events);
  CHECK(ps__speeds_measure(&speeds, plan, &gpu, events) == PS_OK);
  ps__speeds_apply(&seen, &speeds);
  CHECK(off(rate_at(&seen, c->forward), rate_at(&is, c->forward)) < 0.02);
  CHECK(off(rate_at(&seen, c->backward), rate_at(&is, c->backward)) < 0.02);
  CHECK(off(seen.elementwise_bytes_per_s, gpu.elementwise_bytes_per_s) < 0.02);
  CHECK(off(seen.attention[PS_BF16][0].forward_flops_per_s,
            gpu.attention[PS_BF16][0].forward_flops_per_s) < 0.05);
  CHECK(off(simulate(plan, &seen, events), ns) < 0.01);
  free(events);
  CHECK(ps_plan_destroy(plan) == PS_OK && unlink(path) == 0);
  printf("ok the rates of %s are found\n", c->what);
}

/* Times of ops that scatter are not taken for sets that are twice as fast and others that stand. */
static void test_scatter(void) {
  static ps_hardware gpu;
  static ps__speeds seen;
  uint64_t state = 5;
  double most = 0;
  gpu.struct_bytes = sizeof gpu;
  CHECK(ps_hardware_describe(&gpu, "docs/hardware-h200.json") == PS_OK);
  ps_plan *plan = plan_on_gpu(&gpu);
  ps_trace_event *events = calloc(3 * plan->step.n_op, sizeof *events);
  for (int i = 0; i < 6; i++) {
    (void)simulate_scattered(plan, &gpu, 0.25, &state, events);
    CHECK(ps__speeds_measure(&seen, plan, &gpu, events) == PS_OK);
    for (int r = 0; r <= PS__SPEED_ACCUMULATE_SUMSQ; r++)
      for (int k = 0; k < PS__SPEED_SETS; k++)
        if (seen.of[r][k].n >= 10)
          most = fmax(most, off(seen.of[r][k].speed, 1));
  }
  free(events);
  CHECK(most < 0.4);
  CHECK(ps_plan_destroy(plan) == PS_OK);
  printf("ok ops that scatter tell speeds near their mean\n");
}

/* Two GPUs that copy at once beside the host's ops, and what is slow when they do. */
static void measure_two(ps_hardware *hw, double h2d, double d2h, double host) {
  static const uint32_t sets[] = {1, 2, 3, 5, 6, 7, 9, 10, 11};
  hw->n_gpus = 2;
  hw->link[PS_LINK_PEER].bytes_per_s = 2e11;
  for (uint32_t i = 0; i < sizeof sets / sizeof *sets; i++)
    hw->gpus_contention[i] = (ps_contention_rate){
        sets[i], sets[i] < 4 ? 0 : hw->n_threads, (sets[i] & 2 ? 25e9 : 40e9) * h2d,
        (sets[i] & 1 ? 30e9 : 45e9) * d2h, sets[i] < 4 ? 0 : (sets[i] < 8 ? 80e9 : 90e9) * host};
}

/* The table of as many GPUs changes, and the one of one GPU says what it said of its copies. */
static void test_two_gpus(void) {
  static ps_hardware gpus, is, seen;
  static ps__speeds speeds;
  gpus.struct_bytes = sizeof gpus;
  CHECK(ps_hardware_describe(&gpus, "docs/hardware-h200.json") == PS_OK);
  is = gpus;
  measure_two(&gpus, 1, 1, 1);
  measure_two(&is, 0.8, 0.9, 0.85);
  ps_plan *plan = plan_on_gpus(&gpus, 2);
  ps_trace_event *events = calloc(3 * plan->step.n_op, sizeof *events);
  const double ns = simulate(plan, &is, events);
  CHECK(ps__speeds_measure(&speeds, plan, &gpus, events) == PS_OK);
  seen = gpus;
  ps__speeds_apply(&seen, &speeds);
  CHECK(off(simulate(plan, &seen, events), ns) < 0.01);
  for (int i = 0; i < PS_MAX_CONTENTION_RATES; i++) {
    const ps_contention_rate *a = &seen.contention[i], *b = &gpus.contention[i],
                             *c = &seen.gpus_contention[i], *d = &is.gpus_contention[i];
    CHECK(!b->kinds ||
          (a->h2d_bytes_per_s == b->h2d_bytes_per_s && a->d2h_bytes_per_s == b->d2h_bytes_per_s &&
           off(a->host_bytes_per_s, b->host_bytes_per_s) < 0.01));
    CHECK(!c->kinds || speeds.of[PS__SPEED_H2D][c->kinds].ns < 5e7 ||
          off(c->h2d_bytes_per_s, d->h2d_bytes_per_s) < 0.02);
    CHECK(!c->kinds || speeds.of[PS__SPEED_ACCUMULATE][c->kinds].ns < 5e7 ||
          off(c->host_bytes_per_s, d->host_bytes_per_s) < 0.02);
  }
  free(events);
  CHECK(ps_plan_destroy(plan) == PS_OK);
  printf("ok two GPUs tell of their own table\n");
}

/* ---- on memory that ops share ---------------------------------------------------------------- */

/* What memory of @bytes_per_s leaves to a copy each way, a sum and an update, of which @kinds run:
 * each loses in proportion to a power of its own. */
static void share_memory(double bytes_per_s, ps_contention_rate *e) {
  double *const rate[] = {&e->h2d_bytes_per_s, &e->d2h_bytes_per_s, &e->host_bytes_per_s};
  static const uint32_t bits[] = {PS_CONTENTION_H2D, PS_CONTENTION_D2H,
                                  PS_CONTENTION_SUMS | PS_CONTENTION_OPTIMIZER};
  static const double power[] = {1.1, 0.6, 1};
  double all = 0;
  for (int i = 0; i < 3; i++)
    all += e->kinds & bits[i] ? *rate[i] : 0;
  for (int i = 0; i < 3 && all > bytes_per_s; i++)
    if (e->kinds & bits[i])
      *rate[i] *= pow(bytes_per_s / all, power[i]);
}

/* A machine with so much memory bandwidth, of which another program takes a part: ops alone are
 * slower by that, and more so together. @measured: as a table of contention. */
static ps_hardware sharing(bool measured, double bytes_per_s, double alone) {
  static const uint32_t sets[] = {4, 5, 6, 7, 8, 9, 10, 11};
  ps_hardware h = roomy();
  h.memory_bytes_per_s = measured ? h.memory_bytes_per_s : bytes_per_s;
  h.link[PS_LINK_H2D].bytes_per_s *= 0.5 + alone / 2;
  h.optimizer_bytes_per_s = h.optimizer_weights_bytes_per_s = h.optimizer_state_bytes_per_s *=
      alone;
  h.accumulate_bytes_per_s = h.accumulate_sumsq_bytes_per_s = h.sumsq_bytes_per_s *= alone;
  for (uint32_t i = 0; measured && i < sizeof sets / sizeof *sets; i++) {
    h.contention[i] =
        (ps_contention_rate){sets[i], h.n_threads, h.link[PS_LINK_H2D].bytes_per_s,
                             h.link[PS_LINK_D2H].bytes_per_s, h.optimizer_bytes_per_s};
    share_memory(bytes_per_s, &h.contention[i]);
  }
  return h;
}

typedef struct shared {
  const char *name;
  bool measured; /* contention */
  placement where;
  double memory, alone, scatter;
} shared;

static const shared shares[] = {{"in parts", true, IN_PARTS, 8e9, 0.8, 0},
                                {"in parts, ops that scatter", true, IN_PARTS, 8e9, 0.8, 0.2},
                                {"state too", true, FOUND, 6e9, 0.6, 0.2},
                                {"by bandwidth alone", false, IN_PARTS, 8e9, 0.8, 0},
                                {"by bandwidth, ops that scatter", false, FOUND, 8e9, 1, 0.05}};

/* From step 6 on copies, sums and updates share a slower memory. By the run's rates a step takes
 * what steps take, and another plan's step what it takes on that machine. */
static void test_shared(const shared *c) {
  static ps_hardware busy, seen;
  const ps_hardware was = hw;
  ps_dataset *ds = open_shard();
  ps_step_metrics m;
  double mean = 0, next_s;
  hw = sharing(c->measured, 12e9, 1);
  busy = sharing(c->measured, c->memory, c->alone);
  ps_plan_config cfg = plan_config(PS_RECIPE_FP32, true);
  cfg.trace_steps = 2;
  ps_plan *plan = make_plan_of(cfg, c->where), *next;
  hw = was;
  const ps__slow slow = {.from = 5, .to = 1000, .other = &busy, .scatter = c->scatter};
  ps_trainer *t = paced_trainer(plan, ds, &slow);
  for (int i = 0; i < 60; i++) {
    next_step(t, &m);
    mean += i >= 20 ? m.step_s / 40 : 0;
  }
  CHECK(off(m.expected_step_s, mean) < 0.02 && mean > 1.03 * m.predicted_step_s);
  CHECK(ps__observed_hardware(t, &seen) == PS_OK);
  CHECK(ps_plan_again(&next, plan, &seen, 0) == PS_OK);
  CHECK(ps_plan_step_at(next, &busy, &next_s) == PS_OK);
  CHECK(off(next->report.step_s, next_s) < 0.02);
  CHECK(ps_plan_destroy(next) == PS_OK);
  CHECK(ps_trainer_destroy(t) == PS_OK && ps_plan_destroy(plan) == PS_OK);
  CHECK(ps_dataset_close(ds) == PS_OK);
  printf("ok on memory that ops share a step takes what the run's rates say: %s\n", c->name);
}

/* ---- what is said ---------------------------------------------------------------------------- */

static char lines[8][512];
static int n_lines;

static void keep_line(void *user, ps_log_level level, const char *line) {
  if (level >= PS_LOG_WARN && n_lines < 8)
    snprintf(lines[n_lines++], sizeof *lines, "%s", line);
}

typedef struct noticed {
  const char *name;
  placement where;
  ps__slow slow;
  const char *says[2]; /* parts of the first line */
} noticed;

/* Slow from step 6 on, as people count, and fast again from step 31. */
static const noticed cases[] = {
    {"a link", STREAMED, {4, 1, 1, 5, 30, NULL, 0, 0}, {"37% longer than", "for optimizer state"}},
    {"host memory", IN_PARTS, {1, 1, 6, 5, 30, NULL, 0, 0}, {"128% longer than", "for parameters"}},
    {"nothing", STREAMED, {1, 1, 1, 5, 30, NULL, 0, 0}, {NULL, NULL}}};

/* @full: the host's cap has no room for marks, which the plan does not count. */
static void test_notice(const noticed *c, uint32_t trace_steps, bool full) {
  ps_dataset *ds = open_shard();
  ps_plan *plan = paced_plan(c->where, trace_steps);
  plan->cfg.host_mem_bytes =
      plan->report.host_used_bytes + 3 * plan->step.n_op * sizeof(ps_trace_event) - full;
  ps_trainer *t = paced_trainer(plan, ds, &c->slow);
  ps_step_metrics m;
  ps__notice n;
  ps_hardware seen = {0};
  n_lines = 0;
  ps_log_set(keep_line, NULL);
  CHECK(!ps__observed_notice(t, &n) && ps__observed_hardware(t, &seen) == PS_ESTATE);
  for (int i = 0; i < 60; i++) {
    next_step(t, &m);
    const bool marked = trace_steps > 1 && !full, slow = i >= 15 && i < 30, fast = i >= 40;
    if (marked && (slow || fast)) /* what is expected is what is measured */
      CHECK(off(m.expected_step_s, m.step_s) < 0.02);
    CHECK(marked || m.expected_step_s == 0);
    if (i == 25 && c->says[0]) {
      CHECK(ps__observed_notice(t, &n) && n.replan == marked && n.since == 5);
      CHECK(off(n.measured_s, m.step_s) < 0.01 && off(n.planned_s, m.predicted_step_s) < 1e-9);
    }
    if (i == 25 && marked) {
      CHECK(ps__observed_hardware(t, &seen) == PS_OK);
      CHECK(off(seen.link[PS_LINK_H2D].bytes_per_s,
                plan->hw.link[PS_LINK_H2D].bytes_per_s / c->slow.h2d) < 0.02);
      CHECK(off(seen.link[PS_LINK_D2H].bytes_per_s,
                plan->hw.link[PS_LINK_D2H].bytes_per_s / c->slow.d2h) < 0.02);
    }
  }
  ps_log_set(NULL, NULL);
  CHECK(n_lines == (c->says[0] ? 2 : 0));
  CHECK(!n_lines || strstr(lines[0], "since step 6"));
  for (int i = 0; i < 2 && c->says[i]; i++)
    CHECK(strstr(lines[0], c->says[i]) || trace_steps < 2 || full);
  CHECK(!n_lines || strstr(lines[1], "as planned, since step 31"));
  CHECK(ps__observed_notice(t, &n) && !n.replan);
  CHECK(ps_trainer_destroy(t) == PS_OK && ps_plan_destroy(plan) == PS_OK);
  CHECK(ps_dataset_close(ds) == PS_OK);
}

static void test_notices(void) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    test_notice(&cases[i], 2, false);
    printf("ok what is noticed once, and its end, where this becomes slow: %s\n", cases[i].name);
  }
  test_notice(&cases[0], 0, false);
  test_notice(&cases[0], 2, true);
  printf("ok without a trace, or room for it, it is noticed without a cause\n");
}

/* ---- a drive --------------------------------------------------------------------------------- */

/* Optimizer state but the embedding's is on the disk. */
static ps_plan *plan_on_disk(void) {
  const ps_hardware was = hw;
  ps_plan_config c = plan_config(PS_RECIPE_FP32, true);
  ps_plan *plan, *found;
  ps__spec spec;
  c.trace_steps = 2;
  hw = roomy();
  hw.link[PS_LINK_DISK_READ].bytes_per_s = hw.link[PS_LINK_DISK_WRITE].bytes_per_s = 2e9;
  hw.link[PS_LINK_DISK_READ].duplex_bytes_per_s = hw.link[PS_LINK_DISK_WRITE].duplex_bytes_per_s =
      4e9;
  found = make_plan_of(c, FOUND);
  CHECK(ps__spec_copy(&spec, &found->spec) == PS_OK);
  CHECK(ps_plan_destroy(found) == PS_OK);
  spec.disk = true;
  spec.disk_lead = 1;
  for (uint32_t u = 1; u < spec.n_units; u++) {
    spec.state_on_disk[u] = 1;
    spec.update_resident[u] = spec.update_streamed[u] = spec.state_held[u] = spec.update_split[u] =
        0;
  }
  c.disk_mem_bytes = 1 << 30;
  CHECK(ps__plan_from_spec(&plan, &model, &c, &hw, &spec) == PS_OK);
  ps__disk_level_set(plan, PS__DISK_LEVELS); /* as the search would */
  ps__spec_free(&spec);
  hw = was;
  return plan;
}

static ps_trainer *trainer_on_disk(ps_plan *plan, ps_dataset *ds, const ps__slow *slow) {
  ps_train_config c = train_config(ds);
  ps_trainer *t;
  c.disk = root;
  ps__trainer_pace(slow);
  const ps_status st = ps_trainer_create(&t, model_dir, plan, &c, NULL, NULL);
  ps__trainer_pace(NULL);
  CHECK(st == PS_OK || strstr(ps_last_error(), "direct I/O") || strstr(ps_last_error(), "tmpfs"));
  return st == PS_OK ? t : NULL;
}

/* A drive that is ten times slower from step 4 on, as people count: it is said, steps take what the
 * run's rates say, and a plan made again is made for that drive. */
static void test_slow_drive(void) {
  static ps_hardware seen;
  const ps__slow slow = {1, 1, 1, 3, 1000, NULL, 0, 10};
  ps_dataset *ds = open_shard();
  ps_plan *plan = plan_on_disk(), *next;
  ps_trainer *t = trainer_on_disk(plan, ds, &slow);
  ps_step_metrics m = {0};
  n_lines = 0;
  ps_log_set(keep_line, NULL);
  for (int i = 0; t && i < 40; i++)
    next_step(t, &m);
  ps_log_set(NULL, NULL);
  if (t) {
    CHECK(n_lines == 1 && strstr(lines[0], "longer than the planned"));
    CHECK(strstr(lines[0], "the disk reads 0.2 GB/s, planned 2 GB/s, and writes 0.2 GB/s"));
    CHECK(m.step_s > 1.1 * m.predicted_step_s && off(m.expected_step_s, m.step_s) < 0.02);
    CHECK(ps__observed_hardware(t, &seen) == PS_OK);
    CHECK(off(seen.link[PS_LINK_DISK_READ].bytes_per_s, 2e8) < 0.02);
    CHECK(off(seen.link[PS_LINK_DISK_WRITE].bytes_per_s, 2e8) < 0.02);
    CHECK(off(seen.link[PS_LINK_DISK_WRITE].duplex_bytes_per_s, 4e8) < 0.02);
    CHECK(ps_plan_again(&next, plan, &seen, 0) == PS_OK);
    CHECK(next->disk_first == plan->disk_first && next->report.step_s < 1.03 * m.step_s);
    CHECK(ps_plan_destroy(next) == PS_OK && ps_trainer_destroy(t) == PS_OK);
  }
  CHECK(ps_plan_destroy(plan) == PS_OK && ps_dataset_close(ds) == PS_OK);
  printf("ok a drive that becomes slow is %s\n", t ? "said" : "not tested without direct I/O");
}

/* ---- healing --------------------------------------------------------------------------------- */

enum { HEAL_FROM = 5, HEAL_TO = 120, HEAL_STEPS = 220 };

/* Steps up to @end. While a search runs, which takes longer than steps, they wait for it: ever
 * longer, as its threads have a low priority and other work may keep them waiting. Returns the last
 * one. */
static ps_step_metrics run_to(ps_trainer *t, uint64_t end, uint64_t n_switches) {
  ps_step_metrics m = {0};
  long ns = 20000000;
  while (ps_trainer_steps_done(t) < end) {
    next_step(t, &m);
    if (atomic_load(&t->border.state) != PS__REPLAN_SEARCHES) {
      ns = 20000000;
      continue;
    }
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
    ns = ns < 500000000 ? 2 * ns : 999999999;
  }
  CHECK(m.n_switches == n_switches);
  return m;
}

typedef struct healed {
  const char *name;
  uint32_t optimizer, n_devices, layout;
  uint64_t n_switches[2]; /* while memory is slow; in all */
} healed;

/* Where a plan gains less than 2%, none is made. */
static const healed healings[] = {{"AdamW", PS_OPTIMIZER_ADAMW, 1, PS_LAYOUT_AUTO, {1, 2}},
                                  {"Lion", PS_OPTIMIZER_LION, 1, PS_LAYOUT_AUTO, {1, 2}},
                                  {"a ring of 2", PS_OPTIMIZER_ADAMW, 2, PS_LAYOUT_RING, {1, 1}}};

/* @plan: by the rates of the fast machine; @when_slow: seconds of a step by a plan for the slow
 * one. Returns the weights. */
static uint64_t train_healing(const healed *h, ps_plan *plan, double when_slow,
                              const ps__slow *slow, uint32_t replan) {
  const uint64_t *n_switches = replan ? h->n_switches : (const uint64_t[2]){0, 0};
  const double when_fast = plan->report.step_s;
  ps_dataset *ds = open_shard();
  ps_train_config cfg = train_config(ds);
  cfg.lr = 1e-4;
  cfg.replan = replan;
  ps__trainer_pace(slow);
  ps_trainer *t = make_trainer(plan, &cfg);
  ps__trainer_pace(NULL);
  ps_step_metrics m = run_to(t, HEAL_TO - 1, n_switches[0]);
  CHECK(!replan || m.step_s < 1.03 * when_slow);
  CHECK(!replan || off(m.step_s, m.predicted_step_s) < 0.01);
  m = run_to(t, HEAL_STEPS, n_switches[1]);
  CHECK(!replan || m.step_s < 1.03 * when_fast);
  while (ps_trainer_steps_done(t) < ps_trainer_steps_submitted(t))
    CHECK(ps_trainer_wait(t, &m) == PS_OK);
  const uint64_t bits = weights(t);
  CHECK(ps_trainer_destroy(t) == PS_OK && ps_dataset_close(ds) == PS_OK);
  return bits;
}

/* Host memory becomes slow and fast again. Steps take the time of a plan that is made with the true
 * rates each time, and the weights are those of a training that never switched. */
static void test_heals(const healed *h) {
  const ps__slow slow = {1, 1, 6, HEAL_FROM, HEAL_TO, NULL, 0, 0};
  const ps_hardware fast = roomy();
  ps_hardware is = fast;
  double *const slowed[] = {&is.optimizer_bytes_per_s,        &is.optimizer_weights_bytes_per_s,
                            &is.optimizer_state_bytes_per_s,  &is.accumulate_bytes_per_s,
                            &is.accumulate_sumsq_bytes_per_s, &is.sumsq_bytes_per_s};
  for (size_t i = 0; i < sizeof slowed / sizeof *slowed; i++)
    *slowed[i] /= slow.host;
  ps_plan_config c = plan_config(PS_RECIPE_FP32, true);
  c.trace_steps = 2;
  c.optimizer = h->optimizer;
  c.n_devices = h->n_devices;
  c.layout = h->layout;
  ps_plan *plan, *slow_plan;
  CHECK(ps_plan_create(&plan, &model, &c, &fast) == PS_OK);
  CHECK(ps_plan_create(&slow_plan, &model, &c, &is) == PS_OK);
  const double when_slow = slow_plan->report.step_s;
  CHECK(train_healing(h, plan, when_slow, &slow, PS_REPLAN_OFF) ==
        train_healing(h, plan, when_slow, &slow, PS_REPLAN_AUTO));
  CHECK(ps_plan_destroy(plan) == PS_OK && ps_plan_destroy(slow_plan) == PS_OK);
  printf("ok a machine that becomes slow and fast again gets its plans, the same bits: %s\n",
         h->name);
}

#ifdef PS_SANITIZED /* plans of a large model, and many searches: minutes there */
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

static bool everything; /* asked for */

static void tests(void) {
  test_paced();
  if (SANITIZED)
    return;
  test_slow_drive();
  test_speeds();
  for (size_t i = 0; i < sizeof families / sizeof *families; i++)
    test_family(&families[i]);
  test_scatter();
  test_two_gpus();
  for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
    if (everything || i % 3 == 1)
      test_shared(&shares[i]);
  test_notices();
  for (size_t i = 0; i < (everything ? sizeof healings / sizeof *healings : 1); i++)
    test_heals(&healings[i]);
}

int main(int argc, char **argv) {
  everything = argc > 1 && !strcmp(argv[1], "all");
  return run_trainings(tests);
}
