/* test_replan.c - a training that plans again by itself and switches: alone, and with another task.
 * And what may happen meanwhile: kills, cancels, failures, checkpoints, validations, samples.
 * Usage: test_replan [train ROOT SEED: a training that switches at each step, to be killed |
 * few: on one device, for sanitizers | threads: the same without the search for another cut, whose
 * threads are those of the searches for other rates, for ThreadSanitizer] */
#include "hosts_ranks.h"
#include "random_specs.h"
#include "train/replan.h"
#include <penstock/checkpoint.h>
#include <math.h>
#include <penstock/generate.h>
#include <signal.h>
#include <sys/wait.h>

#ifdef PS_SANITIZED
enum { N_CANCELS = 6, N_KILLS = 2, CAP_MIB = 8192 }; /* a sanitizer keeps what is freed */
#else
enum { N_CANCELS = 20, N_KILLS = 6, CAP_MIB = 384 };
#endif
enum { MOST_STEPS = 8000, STEPS_AFTER = 3 };
static const uint64_t HOST_CAP = (uint64_t)CAP_MIB << 20;

static char root[200], shard[300], folder[300];

/* ---- by itself ------------------------------------------------------------------------------- */

static ps_plan_config tiny_config(uint32_t n_hosts) {
  return (ps_plan_config){PLAN_DEFAULTS,
                          .recipe = PS_RECIPE_BF16,
                          .seq_len = 16,
                          .tokens_per_step = 16 * 4 * n_hosts,
                          .chunk_tokens = 16,
                          .chunks_per_round = 2,
                          .head_slice_tokens = 16,
                          .clip_norm = 0.5,
                          .host_mem_bytes = HOST_CAP,
                          .n_hosts = n_hosts,
                          .n_threads = 2};
}

/* A plan that streams everything and fetches nothing ahead: others are faster. @any_cut: the user
 * has left the cut to the planner. */
static ps_plan *slow_plan(uint32_t n_hosts, bool any_cut) {
  ps_plan_config cfg = tiny_config(n_hosts);
  ps_hardware hw = {.struct_bytes = sizeof hw};
  ps__layout layout;
  ps__spec spec;
  ps_plan *plan;
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  hw.link[PS_LINK_NETWORK].bytes_per_s = 1e12;
  CHECK(ps__layout_init(&layout, 16, 4, 16, 2, 0, 0) == PS_OK);
  resident_spec(&spec, &models[0], &cfg, &layout);
  memset(spec.param_resident, 0, spec.n_units);
  memset(spec.grad_resident, 0, spec.n_units);
  spec.embed_on_host = true;
  spec.n_hosts = n_hosts;
  if (any_cut)
    cfg.chunk_tokens = cfg.chunks_per_round = 0;
  CHECK(ps__plan_from_spec(&plan, &models[0].cfg, &cfg, &hw, &spec) == PS_OK);
  ps__spec_free(&spec);
  ps__layout_free(&layout);
  return plan;
}

/* The machine that is observed: not that of the plan. */
static void inject_other(const ps_plan *plan) {
  ps_hardware rates = plan->hw;
  rates.optimizer_bytes_per_s *= 0.9;
  ps__replan_inject(&rates);
}

static char said[4][400];
static uint32_t n_said, n_stays;
static void hear(void *user, ps_log_level level, const char *message) {
  (void)user;
  n_stays += level == PS_LOG_INFO && strstr(message, ": the plan stays: by the rates of this run");
  /* the rest is what steps took beside the plan */
  if (level == PS_LOG_WARN && n_said < 4 && !strstr(message, ": steps take "))
    snprintf(said[n_said++], sizeof said[0], "%s", message);
}

/* A task's training: its losses, and when it switched. */
typedef struct record {
  double loss[MOST_STEPS];
  uint64_t n, switched, state, chunk_tokens; /* the last: of the plan at the end */
} record;

/* @out->n 0: until STEPS_AFTER steps after a switch, or a plan is said to stay; else so many. Two
 * steps are in flight. */
static void train_until(const model *m, ps_plan *plan, ps_hosts *hosts, uint32_t replan,
                        record *out) {
  const char *paths[] = {shard};
  uint64_t n_submitted = 0, done = 0, end = out->n ? out->n : MOST_STEPS;
  ps_train_config c = {0};
  ps_step_metrics metrics;
  ps_trainer *t;
  ps_train_config_init(&c);
  CHECK(ps_dataset_open(&c.dataset, paths, 1, 96) == PS_OK);
  plan->cfg.hosts = hosts;
  c.replan = replan;
  out->switched = 0;
  CHECK(ps_trainer_create(&t, m->dir, plan, &c, NULL, NULL) == PS_OK);
  while (done < end) {
    for (; n_submitted < done + 2 && n_submitted < end; n_submitted++)
      CHECK(ps_trainer_submit(t, 1) == PS_OK);
    CHECK(ps_trainer_wait(t, &metrics) == PS_OK && metrics.step == done);
    CHECK(metrics.host_peak_bytes <= HOST_CAP);
    out->loss[done++] = metrics.loss;
    if (!out->switched && metrics.n_switches) {
      CHECK(metrics.switch_s > 0 && ps_trainer_plan(t) != plan);
      out->switched = done;
      end = out->n ? end : done + STEPS_AFTER;
    }
    if (replan && !metrics.n_switches && !out->n)
      usleep(10000);
    if (n_stays && !out->n)
      end = n_submitted;
  }
  out->n = done;
  out->state = hash_state(t);
  out->chunk_tokens = ps_trainer_plan(t)->layout.chunk_tokens;
  CHECK(ps_trainer_destroy(t) == PS_OK);
  CHECK(ps_dataset_close(c.dataset) == PS_OK);
}

static void test_by_itself(void) {
  static record with, without;
  ps_plan *plan = slow_plan(1, false);
  inject_other(plan);
  ps_log_set(hear, NULL);
  n_said = 0;
  train_until(&models[0], plan, NULL, PS_REPLAN_AUTO, &with);
  CHECK(with.switched && n_said == 1 && strstr(said[0], "the switch took"));
  without.n = with.n;
  train_until(&models[0], plan, NULL, PS_REPLAN_OFF, &without);
  CHECK(!without.switched && with.state == without.state);
  CHECK(memcmp(with.loss, without.loss, with.n * sizeof *with.loss) == 0);
  const uint64_t switched = with.switched;
  with.n = 2; /* a run that ends while a plan is searched for */
  train_until(&models[0], plan, NULL, PS_REPLAN_CUT, &with);
  ps_log_set(NULL, NULL);
  ps__replan_inject(NULL);
  ps_plan_destroy(plan);
  printf("ok a training switches by itself, after %llu steps, with the same bits\n",
         (unsigned long long)switched);
}

/* The plan is the fastest for the rates, of which one is a little less now. */
static void test_stays(void) {
  ps_plan *slow = slow_plan(1, false), *fastest;
  ps_hardware rates = slow->hw;
  static record of;
  rates.optimizer_bytes_per_s *= 0.9;
  CHECK(ps__plan_again(&fastest, slow, &rates, false, NULL) == PS_OK);
  rates.optimizer_bytes_per_s *= 0.999;
  ps__replan_inject(&rates);
  ps_log_set(hear, NULL);
  n_said = n_stays = 0;
  train_until(&models[0], fastest, NULL, PS_REPLAN_AUTO, &of);
  ps_log_set(NULL, NULL);
  CHECK(!of.switched && n_stays == 1 && n_said == 0);
  n_stays = 0;
  ps__replan_inject(NULL);
  ps_plan_destroy(fastest);
  ps_plan_destroy(slow);
  printf("ok where a search gains too little a line says so, and the plan stays\n");
}

/* Larger chunks would be faster: by auto a line says so, by cut they are taken. */
static void test_cut(void) {
  static record with[2];
  ps_log_set(hear, NULL);
  for (uint32_t i = 0; i < 2; i++) {
    ps_plan *plan = slow_plan(1, true);
    bool told = false;
    inject_other(plan);
    n_said = 0;
    train_until(&models[0], plan, NULL, i ? PS_REPLAN_CUT : PS_REPLAN_AUTO, &with[i]);
    for (uint32_t k = 0; k < n_said; k++)
      told |= strstr(said[k], "replan cut does it") != NULL;
    CHECK(with[i].switched && told == !i && (with[i].chunk_tokens == 16) == !i);
    CHECK(fabs(with[i].loss[with[i].n - 1] - with[i].loss[0]) < 1);
    ps_plan_destroy(plan);
  }
  ps_log_set(NULL, NULL);
  ps__replan_inject(NULL);
  printf("ok another cut is named, and taken where it may change the bits\n");
}

static record of_rank[2][2]; /* without, with; by rank */

static void train_rank(rank *r, ps_hosts *h) {
  ps_plan *plan = slow_plan(2, false);
  record *out = &of_rank[r->count][r->rank];
  if (r->count && r->rank == 0)
    inject_other(plan);
  pthread_barrier_wait(r->together);
  if (!r->count)
    out->n = of_rank[1][r->rank].n;
  train_until(&models[0], plan, h, r->count ? PS_REPLAN_AUTO : PS_REPLAN_OFF, out);
  ps_plan_destroy(plan);
}

static void test_two_tasks(void) {
  run_ranks(2, train_rank, PS_F32, 1);
  ps__replan_inject(NULL);
  run_ranks(2, train_rank, PS_F32, 0);
  for (int i = 0; i < 2; i++) {
    const record *with = &of_rank[1][i], *without = &of_rank[0][i];
    CHECK(with->switched && with->switched == of_rank[1][0].switched);
    CHECK(with->n == of_rank[1][0].n && with->state == without->state);
    CHECK(memcmp(with->loss, without->loss, with->n * sizeof *with->loss) == 0);
  }
  printf("ok two tasks switch at the same step, with the same bits\n");
}

/* ---- tasks that disagree --------------------------------------------------------------------- */

/* Settings of rank 1 that change the math, of which rank 0 has others. */
static const struct {
  const char *says;
  double z_loss, label_smoothing, clip_norm, beta2, weight_decay, lr;
  float router_aux;
  uint32_t lr_kind, clip_by;
  uint64_t warmup_steps;
} disagreements[] = {{"rank 1 has z-loss = 0.0001", .z_loss = 1e-4},
                     {"rank 1 has label-smoothing = 0.25", .label_smoothing = 0.25},
                     {"rank 1 has router-aux-loss = 0.5", .router_aux = 0.5f},
                     {"rank 1 has clip-norm = 2, and rank 0 has clip-norm = 0.5", .clip_norm = 2},
                     {"rank 1 has beta2 = 0.5", .beta2 = 0.5},
                     {"rank 1 has weight-decay = 0.75", .weight_decay = 0.75},
                     {"rank 1 has warmup-steps = 7", .warmup_steps = 7},
                     {"rank 1 has lr = 0.1, and", .lr = 0.1},
                     {"rank 1 has lr-schedule = cosine, and rank 0 has lr-schedule = constant",
                      .lr_kind = PS_LR_KIND_COSINE},
                     {"rank 1 has clip-by = previous, and rank 0 has clip-by = step",
                      .clip_by = PS_CLIP_BY_PREVIOUS}};
enum { N_DISAGREEMENTS = sizeof disagreements / sizeof *disagreements };

static void disagree(rank *r, ps_hosts *h) {
  const char *paths[] = {shard};
  ps_plan *plan = slow_plan(2, false);
  ps_train_config c = {0};
  ps_trainer *t = NULL;
  plan->cfg.hosts = h;
  ps_train_config_init(&c);
  c.total_steps = 40; /* a schedule that decays needs it */
  CHECK(ps_dataset_open(&c.dataset, paths, 1, 96) == PS_OK);
  if (r->rank == 1) {
    const __typeof__(*disagreements) *d = &disagreements[r->count];
    plan->cfg.z_loss = d->z_loss;
    plan->cfg.label_smoothing = d->label_smoothing;
    plan->model->loss.router_aux = d->router_aux;
    plan->cfg.clip_norm = d->clip_norm > 0 ? d->clip_norm : plan->cfg.clip_norm;
    c.beta2 = d->beta2 > 0 ? d->beta2 : c.beta2;
    c.weight_decay = d->weight_decay > 0 ? d->weight_decay : c.weight_decay;
    plan->cfg.clip_by = d->clip_by;
    c.lr = d->lr > 0 ? d->lr : c.lr;
    c.lr_kind = d->lr_kind;
    c.warmup_steps = d->warmup_steps;
  }
  CHECK_FAILS(ps_trainer_create(&t, models[0].dir, plan, &c, NULL, NULL), PS_EINVAL,
              disagreements[r->count].says);
  CHECK(ps_dataset_close(c.dataset) == PS_OK);
  ps_plan_destroy(plan);
}

static void test_disagreements(void) {
  for (uint32_t i = 0; i < N_DISAGREEMENTS; i++)
    run_ranks(2, disagree, PS_F32, i);
  printf("ok tasks with other terms of the loss, clipping or updates are refused\n");
}

/* ---- what happens meanwhile ------------------------------------------------------------------ */

/* Random decisions; of 0 the arenas and scratch hold all others'. With several devices, on which
 * units' state may lie. */
enum { N_PLANS = 6, MOST_DEVICES = 2 };
static uint32_t n_devices = 1;
static ps_plan *plan_number(uint32_t number) {
  ps_plan_config cfg = tiny_config(1);
  ps_hardware hw = {.struct_bytes = sizeof hw};
  uint64_t state = 77 + number;
  ps__layout layout;
  ps__spec spec;
  ps_plan *plan;
  cfg.host_mem_bytes = 0;
  cfg.val_tokens = 5 * 16;
  cfg.sample_sequences = 1;
  cfg.sample_context = 12;
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  CHECK(ps__layout_init(&layout, 16, 4, 16, 2, 0, 0) == PS_OK);
  resident_spec(&spec, &models[0], &cfg, &layout);
  do
    randomize(&spec, &models[0], &layout, &state);
  while (spec.n_devices != n_devices);
  spec.keep_grads = false;
  CHECK(ps__plan_from_spec(&plan, &models[0].cfg, &cfg, &hw, &spec) == PS_OK);
  ps__spec_free(&spec);
  ps__layout_free(&layout);
  return plan;
}

static ps_plan *first_plan(void) {
  ps_plan *plan = plan_number(0);
  uint64_t held = plan->report.held_state_units;
  for (uint32_t i = 1; i < N_PLANS; i++) {
    ps_plan *other = plan_number(i);
    held += other->report.held_state_units;
    ps__step_widen(&plan->step, &other->step);
    ps_plan_destroy(other);
  }
  CHECK(held > 0);
  return plan;
}

static void switch_to(ps_trainer *t, uint32_t number) {
  ps_plan *plan = plan_number(number % N_PLANS);
  CHECK(ps_trainer_switch(t, plan) == PS_OK);
}

typedef struct training {
  ps_plan *plan;
  ps_dataset *data;
  ps_trainer *t;
} training;

static void open_training(training *a, const ps_checkpoint *from) {
  const char *paths[] = {shard};
  ps_train_config c = {0};
  ps_train_config_init(&c);
  a->plan = first_plan();
  CHECK(ps_dataset_open(&a->data, paths, 1, 96) == PS_OK);
  c.dataset = c.val_dataset = a->data;
  CHECK((from ? ps_trainer_resume(&a->t, models[0].dir, a->plan, &c, from, NULL, NULL)
              : ps_trainer_create(&a->t, models[0].dir, a->plan, &c, NULL, NULL)) == PS_OK);
}

static void close_training(training *a) {
  CHECK(ps_trainer_destroy(a->t) == PS_OK && ps_plan_destroy(a->plan) == PS_OK);
  CHECK(ps_dataset_close(a->data) == PS_OK);
}

static void step_once(ps_trainer *t) {
  ps_step_metrics m;
  CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK);
}

/* The state after each step of a training that does not switch. */
enum { N_KNOWN = 40 };
static uint64_t known[N_KNOWN + 1];
static void know_states(void) {
  training a;
  open_training(&a, NULL);
  for (int i = 1; i <= N_KNOWN; i++) {
    step_once(a.t);
    known[i] = hash_state(a.t);
  }
  close_training(&a);
}

static int take_token(void *user, uint64_t request, int32_t token) {
  uint64_t *h = user;
  *h = mix64(*h ^ (uint64_t)token << 8 ^ request);
  return 0;
}

/* Validation and samples after each step, with a switch before or without. */
static uint64_t beside(bool switches) {
  const int32_t prompt[] = {3, 1, 4};
  const ps_generate_request request = {
      .tokens = prompt, .n_tokens = 3, .max_new_tokens = 6, .top_p = 1};
  ps_validation v;
  training a;
  uint64_t h = 0, bits;
  open_training(&a, NULL);
  for (uint32_t i = 1; i <= 4; i++) {
    step_once(a.t);
    if (switches)
      switch_to(a.t, i);
    CHECK(ps_trainer_validate(a.t, &v) == PS_OK);
    memcpy(&bits, &v.loss, sizeof bits);
    h = mix64(h ^ bits);
    CHECK(ps_trainer_sample(a.t, &request, 1, take_token, &h, NULL) == PS_OK);
    CHECK(hash_state(a.t) == known[i]);
  }
  close_training(&a);
  return h;
}

/* What a watchdog asks from its own thread. */
static _Atomic bool asks, has_seen;
static void watch_switches(void *arg) {
  while (atomic_load(&asks))
    if (ps_trainer_switching(arg))
      atomic_store(&has_seen, true);
}

static void test_watched(void) {
  ps__thread *thread;
  training a;
  open_training(&a, NULL);
  atomic_store(&asks, true);
  CHECK(ps__thread_start(&thread, watch_switches, a.t, "watch") == PS_OK);
  for (uint32_t i = 0; i < 1000 && !atomic_load(&has_seen); i++)
    switch_to(a.t, i);
  atomic_store(&asks, false);
  ps__thread_join(thread);
  CHECK(atomic_load(&has_seen) && !ps_trainer_switching(a.t));
  close_training(&a);
  printf("ok another thread sees that a trainer switches\n");
}

static void test_beside(void) {
  CHECK(beside(true) == beside(false));
  printf("ok validations and samples after a switch are those without\n");
}

/* While a checkpoint is written a switch is refused; later it is not. */
static void test_checkpoint(void) {
  training a;
  char dir[400];
  float grad[96];
  ps_param_info p;
  open_training(&a, NULL);
  step_once(a.t);
  ps_plan *next = plan_number(1);
  snprintf(dir, sizeof dir, "%s/one", folder);
  CHECK(ps_trainer_submit(a.t, 1) == PS_OK);
  CHECK_FAILS(ps_trainer_switch(a.t, next), PS_ESTATE, "in flight");
  CHECK(ps_trainer_checkpoint_begin(a.t, dir) == PS_OK);
  ps_step_metrics m;
  CHECK(ps_trainer_wait(a.t, &m) == PS_OK);
  const ps_status st = ps_trainer_switch(a.t, next); /* the writer may have ended */
  CHECK(st == PS_OK || (st == PS_EBUSY && strstr(ps_last_error(), "is being written")));
  CHECK(ps_trainer_checkpoint_end(a.t, NULL) == PS_OK);
  if (st != PS_OK)
    CHECK(ps_trainer_switch(a.t, next) == PS_OK);
  CHECK(hash_state(a.t) == known[2]);
  CHECK(ps_model_param(models[0].made, 1, &p) == PS_OK && p.n <= 96);
  CHECK_FAILS(ps_trainer_read_grad(a.t, 1, grad, p.n), PS_ESTATE, "gradients are gone");
  step_once(a.t);
  CHECK(hash_state(a.t) == known[3]);
  ps_plan_config cfg = tiny_config(1); /* a plan of another training */
  ps_hardware hw = {.struct_bytes = sizeof hw};
  cfg.clip_norm = 0;
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  CHECK(ps_plan_create(&next, &models[0].cfg, &cfg, &hw) == PS_OK);
  CHECK_FAILS(ps_trainer_switch(a.t, next), PS_EINVAL, "in clip_norm");
  CHECK(ps_plan_destroy(next) == PS_OK);
  close_training(&a);
  remove_folder(dir);
  printf("ok a switch waits for a checkpoint, and other plans are refused\n");
}

/* ---- failures -------------------------------------------------------------------------------- */

/* Each allocation of a switch fails: all stays as it was, or what follows the copies has stopped
 * the trainer, and its weights are those of the last step. */
static void test_faults(void) {
  uint32_t n = 0, n_stopped = 0;
  const int64_t before = ps__live_allocations();
  bool failed = true;
  for (int64_t at = 1; failed; at++) {
    training a;
    ps_step_metrics m;
    open_training(&a, NULL);
    step_once(a.t);
    ps_plan *next = plan_number((uint32_t)at % N_PLANS);
    ps__fault_arm(PS_FAULT_ALLOC, at);
    const ps_status st = ps_trainer_switch(a.t, next);
    failed = ps__fault_count(PS_FAULT_ALLOC) >= at;
    ps__fault_arm(PS_FAULT_ALLOC, 0);
    CHECK(failed ? st == PS_ENOMEM : st == PS_OK);
    CHECK(hash_state(a.t) == known[1]);
    if (ps_trainer_plan(a.t) != next)
      CHECK(ps_plan_destroy(next) == PS_OK);
    if (ps_trainer_submit(a.t, 1) == PS_OK) {
      CHECK(ps_trainer_wait(a.t, &m) == PS_OK && hash_state(a.t) == known[2]);
    } else
      n_stopped++;
    n += failed;
    close_training(&a);
  }
  CHECK(n > 5 && n_stopped < n && ps__live_allocations() == before);
  printf("ok %u failed allocations of a switch leave the weights, %u stop the trainer\n", n,
         n_stopped);
}

typedef struct canceller {
  ps_trainer *t;
  uint32_t after_us;
} canceller;
static void cancel_later(void *arg) {
  const canceller *c = arg;
  usleep(c->after_us);
  ps_trainer_cancel(c->t);
}

/* A cancel at any moment of a training that switches at each step. */
static void test_cancel(void) {
  uint64_t state = 3;
  uint32_t n_of_two = 0;
  for (int i = 0; i < N_CANCELS; i++) {
    training a;
    ps__thread *thread;
    ps_step_metrics m;
    open_training(&a, NULL);
    canceller who = {a.t, rnd_below(&state, 60000)};
    CHECK(ps__thread_start(&thread, cancel_later, &who, "cancel") == PS_OK);
    ps_status st = PS_OK;
    uint32_t n = 0;
    while (st == PS_OK && n < N_KNOWN) {
      st = ps_trainer_submit(a.t, 1);
      if (st == PS_OK)
        st = ps_trainer_wait(a.t, &m);
      n += st == PS_OK;
      ps_plan *next = st == PS_OK ? plan_number(n % N_PLANS) : NULL;
      if (next)
        st = ps_trainer_switch(a.t, next);
      if (next && ps_trainer_plan(a.t) != next)
        CHECK(ps_plan_destroy(next) == PS_OK);
    }
    ps__thread_join(thread);
    CHECK(st == PS_OK || st == PS_ECANCELLED);
    const bool of_two = ps_trainer_submit(a.t, 1) == PS_ECANCELLED &&
                        strstr(ps_last_error(), "one step ahead of the others");
    CHECK(of_two || n == 0 || hash_state(a.t) == known[n]);
    n_of_two += of_two;
    close_training(&a);
  }
  CHECK(n_of_two < N_CANCELS);
  printf("ok a cancel at any moment of switches leaves the weights of the last step\n");
}

/* ---- kills ----------------------------------------------------------------------------------- */

/* Goes on from the newest checkpoint to the last known step, with as many devices as @seed says. It
 * switches after each step, and writes a checkpoint after every second one. */
static uint64_t train_on(uint32_t seed) {
  ps_checkpoint *from = NULL;
  ps_checkpoint_info info = {.struct_bytes = sizeof info};
  training a;
  uint64_t step = 0;
  n_devices = 1 + seed % MOST_DEVICES;
  CHECK(ps_checkpoint_latest(&from, folder) == PS_OK);
  if (from) {
    CHECK(ps_checkpoint_get_info(from, &info) == PS_OK);
    step = info.step;
  }
  open_training(&a, from);
  ps_checkpoint_close(from);
  while (step < N_KNOWN) {
    char dir[400];
    step_once(a.t);
    switch_to(a.t, seed + (uint32_t)++step);
    CHECK(ps_checkpoint_path(dir, sizeof dir, folder, step) == PS_OK);
    if (step % 2 == 0)
      CHECK(ps_trainer_checkpoint(a.t, dir) == PS_OK);
  }
  const uint64_t state = hash_state(a.t);
  close_training(&a);
  return state;
}

/* This program again, which trains until it is killed. */
static void train_and_kill(uint32_t seed, uint32_t after_us) {
  char text[16];
  snprintf(text, sizeof text, "%u", seed);
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    execl("/proc/self/exe", "test_replan", "train", root, text, (char *)NULL);
    _exit(127);
  }
  usleep(after_us);
  kill(pid, SIGKILL);
  int status;
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

static void test_kill(void) {
  uint64_t state = 11;
  for (uint32_t i = 0; i < N_KILLS; i++)
    train_and_kill(i, 100000 + rnd_below(&state, 400000));
  CHECK(train_on(N_KILLS) == known[N_KNOWN]);
  printf("ok a training that is killed amid switches goes on to the same bits\n");
}

int main(int argc, char **argv) {
  const char *tmp = getenv("TMPDIR");
  model *m = &models[0];
  const bool child = argc == 4 && !strcmp(argv[1], "train"),
             threads = argc == 2 && !strcmp(argv[1], "threads"),
             few = threads || (argc == 2 && !strcmp(argv[1], "few"));
  if (child)
    snprintf(root, sizeof root, "%s", argv[2]);
  else {
    snprintf(root, sizeof root, "%s/penstock-test-replan-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    CHECK(mkdtemp(root));
  }
  snprintf(shard, sizeof shard, "%s/shard.bin", root);
  snprintf(folder, sizeof folder, "%s/checkpoints", root);
  if (child) {
    snprintf(m->dir, sizeof m->dir, "%s/%s", root, m->name);
    m->cfg = (ps_model_config){.struct_bytes = sizeof m->cfg};
    CHECK(ps_model_config_read(&m->cfg, m->dir) == PS_OK);
  } else {
    make_model(m, root);
    tiny_shard_write(shard, 5000, 96);
    CHECK(mkdir(folder, 0755) == 0);
  }
  CHECK(ps__model_create(&m->made, &m->cfg, PS_F32, 0, 0, NULL, NULL, &m->lora) == PS_OK);
  if (child)
    return train_on((uint32_t)atoi(argv[3])) ? 0 : 1;
  const int64_t before = ps__live_allocations();
  test_by_itself();
  test_stays();
  if (!threads)
    test_cut();
  test_two_tasks();
  test_disagreements();
  know_states();
  for (n_devices = 1; n_devices <= (few ? 1 : MOST_DEVICES); n_devices++) {
    printf("%u device%s:\n", n_devices, n_devices > 1 ? "s" : "");
    test_beside();
    test_checkpoint();
    if (n_devices > 1)
      continue;
    test_watched();
    test_faults();
    test_cancel();
  }
  test_kill();
  CHECK(ps__live_allocations() == before);
  for (uint64_t step = 0; step <= N_KNOWN; step++) {
    char dir[400];
    CHECK(ps_checkpoint_path(dir, sizeof dir, folder, step) == PS_OK);
    remove_folder(dir);
  }
  remove_folder(folder);
  remove_folder(m->dir);
  CHECK(unlink(shard) == 0 && rmdir(root) == 0);
  return 0;
}
