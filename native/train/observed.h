/* observed.h - what a run tells of its machine: how long its steps take beside the plan, what they
 * wait for, and at which rates its ops run now.
 *
 * The trace has marks of each op of the last steps. ps_trainer_wait() copies those of three steps
 * in a row, now and then, and at once where steps take another time than planned. From the middle
 * one it tells how fast each resource is over the plan's description (plan/speeds.h).
 *
 * Threads: all of this runs on the thread that waits for the trainer's steps. */
#ifndef PS_TRAIN_OBSERVED_H
#define PS_TRAIN_OBSERVED_H
#include "train/trainer.h"

/* How long steps take beside the plan. Times are medians of the last steps that compare: those that
 * began while the step before ran, beside no checkpoint. */
typedef struct ps__notice {
  uint64_t step;      /* of the training, 0-based: the last one that counts */
  uint64_t since;     /* the first of the steps that take this time */
  double planned_s;   /* of the plan that runs */
  double measured_s;  /* median */
  double expected_s;  /* simulated with the run's rates; 0: no marks of these steps yet */
  ps_stall wait;      /* which explains the most of the difference; what "": not known */
  double wait_plan_s; /* the same wait as planned */
  /* steps take another time than planned, by more than PS__NOTICED, and the run's rates explain
   * most of that: expected_s is nearer to measured_s than half the difference. Planning again may
   * gain */
  bool replan;
} ps__notice;
#define PS__NOTICED 0.03

/* ps__observer_create() - for the trainer's plan. Without a trace of two steps no marks are read.
 * PS_ENOMEM. ps__observer_destroy(): NULL is a no-op. Both while no step is in flight. After a
 * switch to another plan the observer is destroyed, and a new one created: it knows nothing. */
ps_status ps__observer_create(ps__observer **out, const ps_trainer *t);
void ps__observer_destroy(ps__observer *o);
/* ps__observer_step() - step t->n_reported is done, and took @step_s; before it is reported. Says a
 * line where steps begin to take another time than planned. */
void ps__observer_step(ps_trainer *t, double step_s);
/* ps__observed_expected_s() - seconds of a step, simulated with the run's rates; 0: unknown. */
double ps__observed_expected_s(const ps_trainer *t);

/* ps__observed_notice() - how steps compare now. false: too few have compared, *out is untouched.
 */
bool ps__observed_notice(const ps_trainer *t, ps__notice *out);
/* ps__observed_hardware() - the plan's description with the rates that the run has now. What the
 * run has not used keeps its rate. PS_ESTATE: no marks were read yet; *out is untouched. */
ps_status ps__observed_hardware(const ps_trainer *t, ps_hardware *out);
#endif
