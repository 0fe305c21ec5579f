/* pace.h - an engine whose ops take the time that they are told, on a clock of its own: for tests
 * of what depends on how fast a machine is. Ops run as ever, as fast as they can. Their times are
 * those of the schedule: an op starts when its stream is free, what it awaits has ended and its
 * step was submitted, and it takes what ps__pace.ns() says. So times depend on no load and no
 * thread. Ops that run together do not slow each other. */
#ifndef PS_ENGINE_PACE_H
#define PS_ENGINE_PACE_H
#include "engine/engine.h"

typedef struct ps__pace {
  void *user;
  /* The engine's run is @run from here on; no step is in flight. */
  void (*begin)(void *user, const ps_run *run);
  /* How long an op takes in step @step of the run. Called on its driver's thread. */
  uint64_t (*ns)(void *user, const ps_run *run, uint64_t op, uint64_t step);
} ps__pace;

enum { PS__PACED_STEPS = 128 }; /* in flight at most */

/* What a paced run knows of its ops. */
typedef struct ps__paced {
  uint64_t *end;  /* [PS__PACED_STEPS][n_ops] */
  uint64_t *from; /* [PS__PACED_STEPS]: when a step was submitted */
  uint32_t *op;   /* [n_ops], stream after stream, by position */
  uint32_t first[PS_MAX_STREAMS];
} ps__paced;

/* ps__engine_pace() - before the first run; @pace is borrowed until the engine is closed. */
void ps__engine_pace(ps_engine *engine, const ps__pace *pace);

/* Of an engine that is paced; run.c and drive.c call them.
 * ps__paced_create() - PS_ENOMEM. ps__paced_begin() - the run has the engine from now on.
 * ps__paced_submit() - steps [@first, @end) are submitted. ps__paced_waited() - the caller knows
 * that the first @n_steps are done.
 * ps__paced_op() - the times of an op whose waits are satisfied. @ev: NULL, or gets them. */
ps_status ps__paced_create(ps_run *run);
void ps__paced_destroy(ps_run *run);
void ps__paced_begin(ps_run *run);
void ps__paced_submit(ps_run *run, uint64_t first, uint64_t end);
void ps__paced_waited(ps_run *run, uint64_t n_steps);
void ps__paced_op(ps_run *run, const ps__resolved *s, uint64_t step, uint64_t since,
                  ps_trace_event *ev);
#endif
