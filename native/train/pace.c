/* pace.c - what a paced trainer's ops cost: the planner's costs, by the description of the plan
 * that the trainer was created with. */
#include "train/pace.h"
#include "core/mix64.h"
#include "engine/pace.h"
#include <assert.h>

enum { SIMULATED = 4, STEADY = 2 };

struct ps__machine {
  ps__pace pace;
  ps_trainer *t;
  ps__slow slow;
  ps_hardware hw;
  ps__cost_model model; /* for the plan that runs */
  uint64_t *ns[2];      /* [ops of the run]: as simulated, on hw and on slow.other */
};

static ps__slow wanted;
static bool paced;

void ps__trainer_pace(const ps__slow *slow) {
  paced = slow != NULL;
  if (slow)
    wanted = *slow;
}

static ps__cost_model model_of(const struct ps__machine *m, const ps_hardware *hw) {
  const ps_plan *p = m->t->plan;
  return ps__cost_model_of(hw, p->model->fp8.on, p->at, hw->n_threads, p->spec.sum_threads);
}

/* What ops of a steady step take on @hw; NULL: it cannot be simulated. */
static uint64_t *simulate(const struct ps__machine *m, const ps_hardware *hw, const ps_run *run) {
  const uint64_t n = run->schedule->list.n_ops;
  ps__cost_model model = model_of(m, hw);
  double end[SIMULATED];
  uint64_t *ns = ps__calloc(n + 1, sizeof *ns);
  ps_trace_event *events = ps__calloc(SIMULATED * n + 1, sizeof *events);
  const bool there =
      ns && events && ps_sim_run(run->schedule, ps__cost, &model, SIMULATED, events, end) == PS_OK;
  for (uint64_t i = 0; there && i < n; i++)
    ns[i] = events[STEADY * n + i].end_ns - events[STEADY * n + i].start_ns;
  ps__free(events);
  if (there)
    return ns;
  ps__free(ns);
  return NULL;
}

static void begin(void *user, const ps_run *run) {
  struct ps__machine *m = user;
  m->model = model_of(m, &m->hw);
  for (int i = 0; i < 2 && m->slow.other; i++) {
    ps__free(m->ns[i]);
    m->ns[i] = simulate(m, i ? m->slow.other : &m->hw, run);
    assert(m->ns[i]);
  }
}

/* The step of the training that a step of a run is, or comes after. */
static uint64_t step_of(const ps_trainer *t, const ps_run *run, uint64_t step) {
  return t->cfg.first_step + (run == t->run ? t->run_first + step : atomic_load(&t->ended));
}

static bool is_slow(const struct ps__machine *m, uint64_t step) {
  return step >= m->slow.from && step < m->slow.to;
}

static double slower(const struct ps__machine *m, const ps_op_view *op, uint64_t step) {
  const ps__places *at = m->t->plan->at;
  if (!is_slow(m, step))
    return 1;
  if (ps__link_of(at, op->stream))
    switch (ps__direction(at, op->stream)) {
    case PS__TO_DEVICE: return m->slow.h2d;
    case PS__TO_HOST: return m->slow.d2h;
    case PS__FROM_DISK:
    case PS__TO_DISK: return m->slow.disk > 0 ? m->slow.disk : 1;
    default: return 1;
    }
  return op->kernel && op->kernel->op_class == PS_CLASS_OPTIMIZER ? m->slow.host : 1;
}

/* Of what the simulation says: more or less, by chance. */
static uint64_t scattered(const struct ps__machine *m, const ps_op_view *op, uint64_t idx,
                          uint64_t step) {
  const ps__places *at = m->t->plan->at;
  const double chance = (double)(ps__mix64(idx << 32 ^ step) >> 11) * 0x1p-53;
  const bool scatters = ps__link_of(at, op->stream) || ps__stream_on_host(at, op->stream);
  return (uint64_t)((double)m->ns[is_slow(m, step)][idx] *
                        (scatters ? 1 + m->slow.scatter * (2 * chance - 1) : 1) +
                    0.5);
}

static uint64_t op_ns(void *user, const ps_run *run, uint64_t op, uint64_t step) {
  struct ps__machine *m = user;
  ps_op_view view;
  ps_sim_cost cost = {0};
  (void)ps_schedule_op(run->schedule, op, &view);
  if (m->slow.other)
    return scattered(m, &view, op, step_of(m->t, run, step));
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

void ps__pace_free(ps_trainer *t) {
  for (int i = 0; i < 2 && t->machine; i++)
    ps__free(t->machine->ns[i]);
  ps__free(t->machine);
}
