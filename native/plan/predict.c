/* predict.c - how long a step takes: what its ops cost, and a simulation of a few steps. */
#include "engine/sim.h"
#include "plan/plan_impl.h"
#include <assert.h>
#include <string.h>

/* Whether an op costs what it did with another number of threads for sums. */
static inline bool costs_as_before(ps__cost_model *m, const ps_op_view *op,
                                   const ps_sim_cost *before) {
  ps_sim_cost now;
  ps__cost(m, op, &now);
  return now.ns == before->ns && now.kind == before->kind && now.slower == before->slower &&
         !memcmp(now.demand, before->demand, sizeof now.demand) &&
         now.idle_gain == before->idle_gain && now.idle_most == before->idle_most;
}

void ps__step_costs(const ps__step *s, ps__cost_model *m, bool again, ps_sim_cost *out) {
  m->over_nccl = s->spec->over_nccl && ps__exchanges(s->spec);
  for (size_t i = 0; i < s->n_op; i++) {
    const ps_op_view view = {.kernel = s->op[i].kernel,
                             .args = s->args + s->op[i].args,
                             .stream = s->op[i].stream,
                             .work = s->op[i].work};
    if (!again || ps__costs_by_threads(m, view.stream))
      ps__cost(m, &view, &out[i]);
    else
      assert(costs_as_before(m, &view, &out[i]));
  }
  if (m->over_nccl)
    ps__cost_exchanges(m, s, out);
}

/* ns of a step in the steady state, from the ends of the simulated steps. It is at least the work
 * of every stream, and of every shared resource: the first steps put off work that their ends do
 * not count. (Ops that idle_gain shortens count in full: it is at most 1, so that idle time costs
 * more than it gains.) */
double ps__steady_ns(const ps__step *s, const ps_sim_cost *cost,
                     const double end[PS__SIM_STEADY + 1]) {
  double stream[PS_MAX_STREAMS] = {0}, resource[PS_SIM_RESOURCES] = {0},
         most = end[PS__SIM_STEADY] - end[PS__SIM_STEADY - 1];
  for (size_t i = 0; i < s->n_op; i++) {
    stream[s->op[i].stream] += cost[i].ns;
    for (int d = 0; d < PS_SIM_DEMANDS && cost[i].demand[d] > 0; d++)
      resource[cost[i].resource[d]] += cost[i].ns * cost[i].demand[d];
  }
  for (uint32_t i = 0; i < s->at->n_streams; i++)
    if (stream[i] > most)
      most = stream[i];
  for (int r = 0; r < PS_SIM_RESOURCES; r++)
    if (resource[r] > most)
      most = resource[r];
  return most;
}

/* As many steps as ps__steady_ns() needs. */
ps_status ps__simulate_steady(const ps__sim *sim, const ps__sim_told *told) {
  return ps__sim_steps(sim, PS__SIM_STEADY + 1, PS__SIM_STEPS - PS__SIM_STEADY - 1, told);
}

ps_status ps__step_predict(const ps__step *s, const ps_schedule *schedule, ps__cost_model *m,
                           ps_trace_event *events, double *out_ns) {
  ps_sim_cost *cost = ps__malloc((s->n_op + 1) * sizeof *cost);
  if (!cost)
    return ps__fail(PS_ENOMEM, "out of memory for the costs of %zu ops", s->n_op);
  double end[PS__SIM_STEADY + 1];
  const ps__sim_told told = {.events = events, .step_end_ns = end};
  ps__sim *sim = NULL;
  ps__step_costs(s, m, false, cost);
  ps_status st = ps__sim_create(&sim, schedule);
  if (st == PS_OK)
    st = ps__sim_set_costs(sim, cost, UINT64_MAX);
  if (st == PS_OK)
    st = ps__simulate_steady(sim, &told);
  if (st == PS_OK)
    *out_ns = ps__steady_ns(s, cost, end);
  ps__sim_destroy(sim);
  ps__free(cost);
  return st;
}
