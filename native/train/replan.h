/* replan.h - a training that plans again where its steps take another time than planned.
 *
 * ps_trainer_wait() looks at each step that is reported. Where the run's rates are known and steps
 * are not as planned, a thread in the background searches for a plan at these rates, with the same
 * cut and in the same arenas (ps_plan_again()). Where that is enough of a gain, the steps that come
 * later switch to it: those before the border end first.
 *
 * Tasks of several hosts switch at the same step. Each says in COUNT, which all of them run,
 * whether it searches or has found a plan. The border is some steps after the first COUNT in which
 * none searches and one at least has found. It is known to all by then, and none has begun steps
 * from it on.
 *
 * Threads: that of ps_trainer_wait(); ps__border_said() those of the engine. */
#ifndef PS_TRAIN_REPLAN_H
#define PS_TRAIN_REPLAN_H
#include "train/trainer.h"

/* ps__replan_create() - where the configuration asks for it, and plans of this training can be made
 * again. Else t->replan stays NULL, and a line says why. PS_ENOMEM.
 * ps__replan_destroy() - ends the search, if one runs. No run of the trainer lives.
 * ps__replan_step() - a step was reported: begin a search, or judge what one has found. */
ps_status ps__replan_create(ps_trainer *t);
void ps__replan_destroy(ps_trainer *t);
void ps__replan_step(ps_trainer *t);

/* For tests alone: trainers take @rates for what was observed, at once; NULL: no more. */
PS_API void ps__replan_inject(const ps_hardware *rates);
#endif
