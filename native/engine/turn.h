/* turn.h - runs that take turns on one engine: those of a training and of its guests, or of the
 * programs of a generation. At most one run has the engine; all others are paused. */
#ifndef PS_ENGINE_TURN_H
#define PS_ENGINE_TURN_H
#include "engine/engine.h"

enum { PS__MAX_TURNS = 80 };

/* Runs live until ps__turns_close(), because a cancel may come at any time: it waits for those that
 * look at them. All zero but for the engine: there is none. */
typedef struct ps__turns {
  ps_engine *engine;
  _Atomic uint32_t cancelled; /* no run takes a step any more */
  uint32_t n;
  _Atomic(ps_run *) run[PS__MAX_TURNS]; /* [n], in the order of their first turns */
  _Atomic uint32_t n_looking;           /* threads that look at runs now */
} ps__turns;

/* ps__turn_begin() - give the engine, which no run has, to *@run. The first time *@run is NULL, and
 * is created from @schedule. @cfg: NULL is the default. Errors: those of ps__run_create() and of
 * ps__run_go_on().
 * ps__turn_steps() - let @run execute @n_steps more steps, and wait for them. Its sticky error.
 * ps__turn_end() - take the engine back, once all steps of @run are done. @st: how the turn went so
 * far. Returns that error and keeps its message, or else the run's sticky error. */
ps_status ps__turn_begin(ps__turns *all, ps_run **run, ps_schedule *schedule,
                         const ps_run_config *cfg);
ps_status ps__turn_steps(ps_run *run, uint64_t n_steps);
ps_status ps__turn_end(ps_run *run, ps_status st);

/* ps__turns_cancel() - cancel all runs, also those that are created later.
 * ps__turns_stop() - cancel the runs that there are.
 * ps__turns_at_rest(), ps__turns_where() - of the run that has the engine: ps_run_at_rest() and
 * ps_run_where(). At rest, and an empty text, where none has.
 * Threads: any, and signal handlers; ps__turns_where() no signal handler. */
void ps__turns_cancel(ps__turns *all);
void ps__turns_stop(ps__turns *all);
bool ps__turns_at_rest(ps__turns *all);
void ps__turns_where(ps__turns *all, char *text, uint64_t bytes);
/* ps__turns_close() - destroy all runs; others may take turns after that. A cancel, and a look, may
 * come meanwhile. Errors: those of ps_run_destroy(); then all live on. */
ps_status ps__turns_close(ps__turns *all);
#endif
