/* arena.c - a training's own host memory beside what its plan takes it to do. */
#include "cli/cli.h"

/* From here on a rate is told. */
static const double TOLD = 0.05;

static const char *work_of(uint32_t kind) {
  switch (kind) {
  case PS_CONTENTION_H2D: return "copies to the device";
  case PS_CONTENTION_D2H: return "copies to the host";
  case PS_CONTENTION_SUMS: return "sums of gradients";
  default: return "updates";
  }
}

static const char *beside(uint32_t kinds) {
  static const uint32_t both = PS_CONTENTION_H2D | PS_CONTENTION_D2H;
  if ((kinds & both) == both)
    return " beside copies both ways";
  switch (kinds) {
  case 0: return "";
  case PS_CONTENTION_H2D: return " beside copies to the device";
  case PS_CONTENTION_D2H: return " beside copies to the host";
  case PS_CONTENTION_SUMS: return " beside sums of gradients";
  case PS_CONTENTION_OPTIMIZER: return " beside updates";
  default:
    return kinds & PS_CONTENTION_SUMS ? " beside a copy and sums of gradients"
                                      : " beside a copy and updates";
  }
}

void cli_arena_note(ps_trainer *t, cli_progress *p) {
  ps_rate_difference most;
  ps_hardware rates;
  if (ps_trainer_arena(t, &rates, &most) != PS_OK || !most.kind)
    return;
  (void)ps_hardware_remember(&rates, PS_RATES_ARENA); /* the next run's plan begins with them */
  if (most.part <= TOLD)
    return;
  cli_progress_note(p,
                    "host memory is not as it was measured: %s%s run at %.1f GB/s in this run's "
                    "memory, the plan takes %.1f",
                    work_of(most.kind), beside(most.kinds & ~most.kind),
                    most.seen_bytes_per_s * 1e-9, most.known_bytes_per_s * 1e-9);
}

/* Steps that are shorter show what launches and other work take, and not what memory does. */
static const double LONG_STEP_S = 0.1;

void cli_rates_remember(const ps_trainer *t) {
  ps_plan_report report;
  ps_hardware rates;
  if (ps_plan_get_report(ps_trainer_plan(t), &report) == PS_OK && report.step_s >= LONG_STEP_S &&
      ps_trainer_rates(t, &rates) == PS_OK)
    (void)ps_hardware_remember(&rates, PS_RATES_RUN);
}
