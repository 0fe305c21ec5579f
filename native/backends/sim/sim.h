/* sim.h - the simulator, for costs that are known already, and with steps that run after those that
 * count. */
#ifndef PS_BACKENDS_SIM_SIM_H
#define PS_BACKENDS_SIM_SIM_H
#include <penstock/engine.h>

/* ps__sim_run() - as ps_sim_run(), of ops that cost @cost, [n_ops] in program order. The simulation
 * ends when the first @n_steps steps are over.
 * @n_after  steps that follow and run beside the last ones; they get no events and no ends */
ps_status ps__sim_run(const ps_schedule *schedule, const ps_sim_cost *cost, uint64_t n_steps,
                      uint64_t n_after, ps_trace_event *events, double *step_end_ns);
#endif
