/* test_observed.c - what a run tells of its machine: how long its steps take beside the plan, and
 * its rates. Trainings are paced (train/pace.h), so that times are exact. */
#include "train_pieces.h"
#include "train/observed.h"
#include "train/pace.h"

/* ---- paced trainings ------------------------------------------------------------------------- */

/* A machine whose ops do not slow each other. */
static ps_hardware roomy(void) {
  ps_hardware h = hw;
  h.n_cpus = 1 << 20;
  h.memory_bytes_per_s = 1e18;
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
  ps_train_config c = train_config(ds, true);
  c.trace_steps = plan->cfg.trace_steps;
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
    ps_trainer *t = paced_trainer(plan, ds, &(ps__slow){2, 2, 2, 5, 8});
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

static void tests(void) { test_paced(); }

int main(void) { return run_trainings(tests); }
