/* pace.c - what a paced trainer's ops cost: the planner's costs, by the description of the plan
 * that the trainer was created with. */
#include "train/pace.h"
#include "engine/pace.h"

struct ps__machine {
  ps__pace pace;
  ps_trainer *t;
  ps__slow slow;
  ps_hardware hw;
  ps__cost_model model; /* for the plan that runs */
};

static ps__slow wanted;
static bool paced;

void ps__trainer_pace(const ps__slow *slow) {
  paced = slow != NULL;
  if (slow)
    wanted = *slow;
}

static void begin(void *user, const ps_run *run) {
  struct ps__machine *m = user;
  const ps_plan *p = m->t->plan;
  m->model =
      ps__cost_model_of(&m->hw, p->model->fp8.on, p->at, m->hw.n_threads, p->spec.sum_threads);
}

/* The step of the training that a step of a run is, or comes after. */
static uint64_t step_of(const ps_trainer *t, const ps_run *run, uint64_t step) {
  return t->cfg.first_step + (run == t->run ? t->run_first + step : atomic_load(&t->ended));
}

static double slower(const struct ps__machine *m, const ps_op_view *op, uint64_t step) {
  const ps__places *at = m->t->plan->at;
  if (step < m->slow.from || step >= m->slow.to)
    return 1;
  if (ps__link_of(at, op->stream))
    switch (ps__direction(at, op->stream)) {
    case PS__TO_DEVICE: return m->slow.h2d;
    case PS__TO_HOST: return m->slow.d2h;
    default: return 1;
    }
  return op->kernel && op->kernel->op_class == PS_CLASS_OPTIMIZER ? m->slow.host : 1;
}

static uint64_t op_ns(void *user, const ps_run *run, uint64_t op, uint64_t step) {
  struct ps__machine *m = user;
  ps_op_view view;
  ps_sim_cost cost = {0};
  (void)ps_schedule_op(run->schedule, op, &view);
  ps__cost(&m->model, &view, &cost);
  const double work_ns = cost.ns > m->hw.op_ns ? cost.ns - m->hw.op_ns : 0;
  return (uint64_t)(cost.ns + work_ns * (slower(m, &view, step_of(m->t, run, step)) - 1) + 0.5);
}

ps_status ps__pace_attach(ps_trainer *t) {
  if ((!paced && !t->machine) || t->plan->hw.backend != PS_BACKEND_CPU)
    return PS_OK;
  if (!t->machine) {
    t->machine = ps__calloc(1, sizeof *t->machine);
    if (!t->machine)
      return ps__fail(PS_ENOMEM, "out of memory for a paced machine");
    *t->machine = (struct ps__machine){
        .pace = {t->machine, begin, op_ns}, .t = t, .slow = wanted, .hw = t->plan->hw};
  }
  ps__engine_pace(t->engine, &t->machine->pace);
  return PS_OK;
}

void ps__pace_free(ps_trainer *t) { ps__free(t->machine); }
