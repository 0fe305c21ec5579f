/* sim.h - the simulator in parts: for costs that are known already, for several runs of one
 * schedule with other costs, and with steps that run after those that count. */
#ifndef PS_ENGINE_SIM_H
#define PS_ENGINE_SIM_H
#include <penstock/engine.h>

typedef struct ps__sim ps__sim;

/* ps__sim_create() - a simulation of @schedule, borrowed until ps__sim_destroy(). Its ops have no
 * costs yet. Errors: PS_ENOMEM. */
ps_status ps__sim_create(ps__sim **out, const ps_schedule *schedule);
void ps__sim_destroy(ps__sim *sim);

/* ps__sim_set_costs() - what ops cost from now on.
 * @cost     [n_ops] in program order. What cost[i].slower points to is borrowed until the stream's
 *           costs are set again, or ps__sim_destroy()
 * @streams  bit s: of stream s. Other streams' ops keep the costs that they have.
 * Errors: PS_EINVAL; ps__sim_steps() must not follow then. */
ps_status ps__sim_set_costs(ps__sim *sim, const ps_sim_cost *cost, uint64_t streams);

/* The start of an op in a step: its time is asked for. */
typedef struct ps__sim_start {
  uint64_t step, op;
  uint64_t ns;
} ps__sim_start;

/* What is asked for. Pointers may be NULL. */
typedef struct ps__sim_told {
  ps_trace_event *events; /* [n_steps][n_ops] */
  double *step_end_ns;    /* [n_steps] */
  ps__sim_start *start;   /* [n_starts] */
  uint32_t n_starts;
} ps__sim_told;

/* ps__sim_steps() - simulate until the first @n_steps steps are over. All ops have costs.
 * @n_after  steps that follow and run beside the last ones; nothing is told of them
 * Errors: PS_EINVAL: more time than a clock holds. */
ps_status ps__sim_steps(const ps__sim *sim, uint64_t n_steps, uint64_t n_after,
                        const ps__sim_told *told);

/* ps__sim_run() - all of this at once. Errors: PS_EINVAL, PS_ENOMEM. */
ps_status ps__sim_run(const ps_schedule *schedule, const ps_sim_cost *cost, uint64_t n_steps,
                      uint64_t n_after, ps_trace_event *events, double *step_end_ns);
#endif
