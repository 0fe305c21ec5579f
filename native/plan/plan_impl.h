/* plan_impl.h - what a plan is, for the planner and the trainer. */
#ifndef PS_PLAN_IMPL_H
#define PS_PLAN_IMPL_H
#include "step/step.h"
#include <stdatomic.h>

struct ps_plan {
  ps_model_config model;
  ps_plan_config cfg;    /* as given, defaults filled in */
  bool head_slice_given; /* else cfg's is the least: see ps__head_slice() */
  ps_hardware hw;
  ps__layout layout;
  ps__spec spec;
  ps__step_hooks hooks; /* filled by the trainer */
  ps__step step;
  ps_schedule *schedule;
  ps_plan_report report;
  double hfu_flops; /* a step: model FLOPs and all recomputation */
  char *text, *json;
  _Atomic uint32_t in_use; /* 1: a trainer has it */
};

/* ps__plan_from_spec() - the plan of decisions made elsewhere, without a search and without
 * caps. @spec is copied; it must be made for the layout that its own chunk_tokens and
 * chunks_per_round give. Errors: as ps_plan_create(), PS_EBUDGET aside. */
ps_status ps__plan_from_spec(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                             const ps_hardware *hw, const ps__spec *spec);

/* ---- cost.c: what an op costs, for the simulator --------------------------------------------- */
enum { PS__RES_CPUS = 0, PS__RES_MEMORY = 1, PS__RES_LINK = 2 };
typedef struct ps__cost_model {
  const ps_hardware *hw;
  ps_dtype dt;
  uint32_t n_threads;
  /* of sums at home on the plan's threads for them: times that of those on all */
  double sum_speed;
  /* ps_sim_cost.slower of copies to the device, to the host, sums and the optimizer */
  double slower[PS_SIM_KINDS][1 << PS_SIM_KINDS];
} ps__cost_model;
ps__cost_model ps__cost_model_of(const ps_hardware *hw, ps_dtype dt, uint32_t n_threads,
                                 uint32_t sum_threads);
/* ps__sum_threads() - the @i-th number of threads that sums were measured on, all of the host
 * stream's first; 0: none. ps__sum_speed() - how fast they are on so many alone: times as fast
 * as on all. */
uint32_t ps__sum_threads(const ps_hardware *hw, uint32_t i);
double ps__sum_speed(const ps_hardware *hw, uint32_t threads);
void ps__cost(void *model, const ps_op_view *op, ps_sim_cost *out); /* a ps_sim_cost_fn */
/* The same of a virtual op: ns alone on the machine. @args: as the kernel takes them, read for
 * products and attention. */
double ps__cost_ns(const ps__cost_model *m, const ps_kernel *kernel, uint32_t stream,
                   const void *args, ps_work work);

/* ---- search.c -------------------------------------------------------------------------------- */
/* simulated steps; the one with a step before and behind it is the steady state: the updates of
 * the last run beside nothing */
enum { PS__SIM_STEPS = 3, PS__SIM_STEADY = 1 };
typedef struct ps__search_result {
  uint64_t smallest_device, smallest_host; /* BYTES of caps that would do; 0 where nothing does */
  uint64_t any_device, any_host;           /* the plan that misses the caps least */
  uint32_t n_candidates, n_feasible;
} ps__search_result;
/* Tokens of a slice of the head and loss where chunks have so many: as given; by default, on a
 * GPU, as many as make a chunk at most PS__MOST_ADDITIONS slices (up to 4096 tokens), so that
 * the lm_head's gradient leaves the device no more often than the blocks'. */
uint64_t ps__head_slice(const ps_plan *plan, uint64_t chunk_tokens);
/* What is known of the candidates of a search space (memo.c). */
typedef struct ps__memo ps__memo;
ps_status ps__memo_create(ps__memo **out); /* PS_ENOMEM */
void ps__memo_destroy(ps__memo *memo);     /* NULL is a no-op */
/* Find the fastest spec under the caps (sizes_only: just the smallest caps). On PS_OK with
 * n_feasible > 0 and not sizes_only, layout and spec of the plan are set. plan->model, cfg, hw
 * are set before. */
ps_status ps__find_plan(ps_plan *plan, ps__memo *memo, bool sizes_only, ps__search_result *out);
/* ---- evaluate.c ------------------------------------------------------------------------------ */
/* ns of a step in the steady state, from when the simulated steps ended: never less than any
 * stream works, or than a shared resource is drawn on, since what the first steps put off does
 * not count there. (Ops that an idle_gain shortens count in full: it is at most 1, so that idle
 * time costs more than it gains.) */
double ps__steady_ns(const ps__step *s, ps__cost_model *m, const double end[PS__SIM_STEPS]);
/* Host bytes that a step needs besides its arena. */
uint64_t ps__host_overhead(const ps_plan *plan, const ps__step *s, uint64_t *scratch,
                           uint64_t *trace);
/* Device bytes that a step needs besides its arena: CUDA's scratch with the products' workspace,
 * and its overhead. */
uint64_t ps__device_overhead(const ps_plan *plan, const ps__step *s, uint64_t *scratch);
static inline uint64_t ps__arena_round(uint64_t bytes) {
  return (bytes + (2u << 20) - 1) >> 21 << 21;
}
/* Threads that a stream's ops may use. */
uint32_t ps__stream_threads(const ps_plan *plan, uint32_t stream);
#endif
