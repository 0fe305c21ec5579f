/* speeds.h - how fast a machine's ops run over its description, from the marks of a step.
 *
 * An op's time alone follows from the description. The ops that run beside it slow it, also by the
 * description (engine/sim.h). What then remains is the speed of its resource: 1 where the machine
 * is as described. Copies, sums and updates have a speed for each set of these that runs, as they
 * do not give way to each other alike. */
#ifndef PS_PLAN_SPEEDS_H
#define PS_PLAN_SPEEDS_H
#include "plan/plan_impl.h"

/* What has a speed. The first two and those from PS__SPEED_UPDATES to PS__SPEED_ACCUMULATE_SUMSQ
 * use the host's memory. */
typedef enum ps__resource {
  PS__SPEED_H2D,
  PS__SPEED_D2H,
  PS__SPEED_UPDATES, /* on the host: whole, and in parts */
  PS__SPEED_UPDATES_WEIGHTS,
  PS__SPEED_UPDATES_STATE,
  PS__SPEED_ACCUMULATE, /* sums of gradients on the host */
  PS__SPEED_SUMSQ,
  PS__SPEED_ACCUMULATE_SUMSQ,
  PS__SPEED_GATHER,
  PS__SPEED_PEERS,
  PS__SPEED_GEMM,
  PS__SPEED_GEMM_FP8,
  PS__SPEED_GEMM_GROUPED, /* products of experts */
  PS__SPEED_ATTENTION_FWD,
  PS__SPEED_ATTENTION_BWD,
  PS__SPEED_PLAIN_FWD, /* attention with heads above 256 on a GPU */
  PS__SPEED_PLAIN_BWD,
  PS__SPEED_DELTA_FWD, /* the delta rule */
  PS__SPEED_DELTA_BWD,
  PS__SPEED_ELEMENTWISE,
  PS__SPEED_DISK_READ,
  PS__SPEED_DISK_WRITE,
  PS__N_SPEEDS
} ps__resource;

/* Sets of PS_CONTENTION_*, by which ps__speeds.of is indexed; and, where no contention was
 * measured, of elementwise ops, which then share the memory too. */
enum { PS__SPEED_WITH_ELEMENTWISE = 16, PS__SPEED_SETS = 32 };

typedef struct ps__speed {
  double speed; /* over the description's */
  double
      error;  /* of speed, as a fraction: by how far ops differ, or steps where there are several */
  double ns;  /* of ops, by the description; 0: no op of this kind ran */
  uint64_t n; /* ops */
  /* by the description, the mean by time of what ran at once: its demand on the host's memory; how
   * many times longer than alone the op takes, by all that is shared, and by all but that memory */
  double demand, slowed, slowed_by_others;
} ps__speed;

/* By what runs: copies each way, sums, updates. */
typedef struct ps__speeds {
  ps__speed of[PS__N_SPEEDS][PS__SPEED_SETS];
  uint32_t dt;          /* of products and attention */
  uint32_t n_devices;   /* of the step */
  uint32_t sum_threads; /* that its sums ran on; 0: all of the host stream's */
} ps__speeds;

/* ps__speeds_measure() - the speeds of the middle one of three steps in a row.
 * @hw      the description; the plan's step and schedule say what ran
 * @events  [3][n_ops], each step in program order
 * Errors: PS_ENOMEM.
 * ps__speeds_median() - of several steps, @n > 0.
 * ps__speeds_apply() - the description of a machine with these speeds. What did not run has the
 * speed of its kind (sums, updates), and where none of these ran either the rate of @hw. Where a
 * resource ran, but not in a set, it has its mean speed in that set. Of the two tables of
 * contention the one that holds for the step's devices changes; the other one follows the speeds of
 * host ops alone. */
ps_status ps__speeds_measure(ps__speeds *out, const ps_plan *p, const ps_hardware *hw,
                             const ps_trace_event *events);
void ps__speeds_median(ps__speeds *out, const ps__speeds *of, uint32_t n);
void ps__speeds_apply(ps_hardware *hw, const ps__speeds *s);
#endif
