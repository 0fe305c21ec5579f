/* test_train_ends.c - trainings that are ended: a run is cancelled at any moment, and its weights
 * are those of the last complete step. And who may end what when: plans and data outlive their
 * trainer, a batch function does not wait for itself. */
#include "train_pieces.h"

/* ---- cancel ---------------------------------------------------------------------------------- */

static ps_trainer *volatile to_cancel;
static void on_alarm(int sig) { ps_trainer_cancel(to_cancel); }

typedef struct canceller {
  ps_trainer *t;
  uint32_t after_us;
} canceller;
static void cancel_later(void *arg) {
  const canceller *c = arg;
  usleep(c->after_us);
  ps_trainer_cancel(c->t);
}

/* Weights after each of the first steps of a run: of as many as a run that is to be cancelled
 * gets. */
enum { N_KNOWN = 40 };
static uint64_t known[N_KNOWN];
static void know_steps(ps_plan *plan, const ps_train_config *c) {
  ps_trainer *t = make_trainer(plan, c);
  ps_step_metrics m;
  for (int i = 0; i < N_KNOWN; i++) {
    known[i] = weights(t);
    CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK);
  }
  ps_trainer_destroy(t);
}

/* Weights are of the last step that is done, or the error says that they may be of two. */
static bool said_if_of_two(ps_trainer *t, const char *error) {
  if (strstr(error, "one step ahead of the others"))
    return true;
  CHECK(ps_trainer_steps_done(t) < N_KNOWN && weights(t) == known[ps_trainer_steps_done(t)]);
  return false;
}

/* Steps go on being submitted until the cancel is felt. Returns whether it came amid updates. */
static bool cancelled_run(ps_plan *plan, const ps_train_config *c, uint32_t after_us,
                          bool by_signal) {
  ps_trainer *t = make_trainer(plan, c);
  canceller who = {t, after_us};
  ps__thread *thread = NULL;
  timer_t timer;
  const uint64_t begin_ns = ps__now_ns();
  if (by_signal) {
    const struct itimerspec when = {.it_value = {0, (long)after_us * 1000 + 1}};
    to_cancel = t;
    CHECK(timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0 &&
          timer_settime(timer, 0, &when, NULL) == 0);
  } else {
    CHECK(ps__thread_start(&thread, cancel_later, &who, "cancel") == PS_OK);
  }
  ps_step_metrics m;
  ps_status st = PS_OK;
  for (int i = 0; st == PS_OK; i++) {
    /* on a machine that has no time for the other thread */
    if (i == N_KNOWN - 4)
      ps_trainer_cancel(t);
    st = ps_trainer_submit(t, i ? 1 : 2);
    if (st == PS_OK)
      st = ps_trainer_wait(t, &m);
  }
  CHECK(st == PS_ECANCELLED && ps_last_error()[0]);
  /* steps of a millisecond: a hang is what this is for */
  CHECK(ps__now_ns() - begin_ns < 300000000000u);
  ps_trainer_cancel(t); /* once more does no harm */
  CHECK(ps_trainer_wait(t, &m) == PS_ECANCELLED && weights(t) != 0);
  const bool amid = said_if_of_two(t, ps_last_error());
  if (by_signal)
    CHECK(timer_delete(timer) == 0);
  ps__thread_join(thread);
  ps_trainer_destroy(t);
  return amid;
}

/* A cancel out of an op of the third step, which then takes its time: that step is done where
 * the op is behind its updates, or is the report, which says that they are. */
static ps__hook cancel_in;
static ps_status cancelling_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch) {
  if (what == cancel_in && launch->step == 2) {
    ps_trainer_cancel(ctx);
    usleep(10000);
  }
  return ps__trainer_hook(ctx, what, unit, launch);
}

static void test_cancel_behind_updates(ps_dataset *ds) {
  static const ps__hook in[] = {PS__HOOK_REPORT, PS__HOOK_UPDATE_STATE};
  ps_plan *plan = make_plan(PS_RECIPE_BF16, true, IN_PARTS);
  const ps_train_config c = train_config(ds);
  know_steps(plan, &c);
  for (int i = 0; i < 2; i++) {
    ps_trainer *t = make_trainer(plan, &c);
    ps_step_metrics m;
    uint64_t n;
    cancel_in = in[i];
    plan->hooks.fn = cancelling_hook;
    CHECK(ps_trainer_submit(t, 3) == PS_OK);
    for (int k = 0; k < 3; k++)
      CHECK(ps_trainer_wait(t, &m) == PS_OK && m.step == (uint64_t)k);
    CHECK(ps_trainer_trace(t, NULL, 0, &n) == PS_OK); /* nothing is under way any more */
    CHECK(ps_trainer_steps_done(t) == 3 && weights(t) == known[3]);
    CHECK(ps_trainer_submit(t, 1) == PS_ECANCELLED && !strstr(ps_last_error(), "one step ahead") &&
          weights(t) == known[3]);
    ps_trainer_destroy(t);
  }
  ps_plan_destroy(plan);
  printf("ok a step that is cancelled behind its updates is done\n");
}

static void test_cancel(void) {
  ps_dataset *ds = open_shard();
  uint64_t state = 5;
  test_cancel_behind_updates(ds);
  signal(SIGALRM, on_alarm);
  for (int i = 0; i < 2 * N_PLACEMENTS; i++) {
    const bool clip = i & 1;
    ps_plan *plan = make_plan(PS_RECIPE_BF16, clip, (placement)(i / 2));
    const ps_train_config c = train_config(ds);
    int amid = 0;
    know_steps(plan, &c);
    for (int k = 0; k < N_CANCELS; k++)
      amid += cancelled_run(plan, &c, k < 3 ? 0 : rnd_below(&state, 6000), k & 1);
    CHECK(!clip || amid < N_CANCELS);
    printf("  %s clipping, %d of %d cancels came amid updates\n", clip ? "with" : "without", amid,
           N_CANCELS);
    ps_plan_destroy(plan);
  }
  signal(SIGALRM, SIG_DFL);
  ps_dataset_close(ds);
  printf("ok a run is cancelled at any moment, by a thread and by a signal handler\n");
}

/* ---- life cycle ------------------------------------------------------------------------------ */

static ps_trainer *stepped;
static _Atomic uint32_t n_created, asking;

/* A batch function steps and ends its own trainer, while the caller waits for the batch. */
static ps_status misusing_batch(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                                uint64_t n) {
  ps_step_metrics m;
  CHECK_FAILS(ps_trainer_wait(stepped, &m), PS_ESTATE,
              "a batch function cannot step its own trainer");
  CHECK_FAILS(ps_trainer_submit(stepped, 1), PS_ESTATE,
              "a batch function cannot step its own trainer");
  CHECK_FAILS(ps_trainer_destroy(stepped), PS_ESTATE, "an op of it cannot close it");
  CHECK(!ps_trainer_at_rest(stepped) && ps_op_engine());
  for (uint64_t i = 0; i < n; i++)
    tokens[i] = targets[i] = (int32_t)(i % VOCAB);
  return PS_OK;
}

static void test_own_batch(void) {
  ps_plan *plan = make_plan(PS_RECIPE_FP32, true, RESIDENT);
  ps_train_config c = train_config(NULL);
  c.batch_fn = misusing_batch;
  stepped = make_trainer(plan, &c);
  CHECK(ps_trainer_at_rest(stepped) && !ps_op_engine());
  train_steps(stepped, 3);
  CHECK(ps_trainer_at_rest(stepped) && ps_trainer_destroy(stepped) == PS_OK &&
        ps_plan_destroy(plan) == PS_OK);
}

typedef struct owned {
  ps_plan *plan;
  ps_dataset *ds;
  ps_trainer *t;
} owned;

static void create_one(void *arg) {
  owned *o = arg;
  const ps_train_config c = train_config(o->ds);
  if (ps_trainer_create(&o->t, model_dir, o->plan, &c, NULL, NULL) == PS_OK)
    atomic_fetch_add(&n_created, 1);
  else
    CHECK(strstr(ps_last_error(), "another trainer runs this plan"));
}

static void ask(void *arg) {
  const owned *o = arg;
  char text[1024];
  for (uint64_t done = 0; atomic_load(&asking);) {
    const uint64_t now = ps_trainer_steps_done(o->t);
    CHECK(now >= done);
    done = now;
    ps_trainer_where(o->t, text, sizeof text);
    CHECK_FAILS(ps_plan_destroy(o->plan), PS_EBUSY, "a trainer still uses it");
    CHECK_FAILS(ps_dataset_close(o->ds), PS_EBUSY, "1 trainer(s) still read it");
  }
}

static void end_when_free(void *arg) {
  owned *o = arg;
  while (ps_plan_destroy(o->plan) == PS_EBUSY)
    usleep(10);
  while (ps_dataset_close(o->ds) == PS_EBUSY)
    usleep(10);
}

static void test_life(void) {
  owned o[2] = {{.plan = make_plan(PS_RECIPE_FP32, true, TIGHT), .ds = open_shard()}};
  ps__thread *thread[2];
  o[1] = o[0];
  atomic_store(&n_created, 0);
  for (int i = 0; i < 2; i++)
    CHECK(ps__thread_start(&thread[i], create_one, &o[i], "create") == PS_OK);
  for (int i = 0; i < 2; i++)
    ps__thread_join(thread[i]);
  CHECK(atomic_load(&n_created) == 1);
  if (!o[0].t)
    o[0].t = o[1].t;
  atomic_store(&asking, 1);
  CHECK(ps__thread_start(&thread[0], ask, &o[0], "ask") == PS_OK);
  train_steps(o[0].t, 20);
  atomic_store(&asking, 0);
  ps__thread_join(thread[0]);
  CHECK(ps_trainer_submit(o[0].t, 2) == PS_OK);
  CHECK(ps__thread_start(&thread[0], end_when_free, &o[0], "end") == PS_OK);
  CHECK(ps_trainer_destroy(o[0].t) == PS_OK);
  ps__thread_join(thread[0]);
}

static void all(void) {
  test_cancel();
  test_own_batch();
  for (int i = 0; i < 5; i++)
    test_life();
  printf("ok plan and data are busy while a trainer uses them, a batch function does not wait for "
         "itself\n");
}

int main(void) { return run_trainings(all); }
