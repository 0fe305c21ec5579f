/* turn.c - runs that take turns on one engine. */
#include "engine/turn.h"
#include <sched.h>

ps_status ps__turn_begin(ps__turns *all, ps_run **run, ps_schedule *schedule,
                         const ps_run_config *cfg) {
  const ps_run_config plain = {.struct_bytes = sizeof plain};
  if (*run)
    return ps__run_go_on(*run);
  if (all->n == PS__MAX_TURNS)
    return ps__fail(PS_EINTERNAL, "more than %d runs take turns on an engine", PS__MAX_TURNS);
  PS_TRY(ps__run_create(run, all->engine, schedule, cfg ? cfg : &plain));
  atomic_store(&all->run[all->n++], *run);
  /* a cancel may have come before there was a run to stop */
  if (atomic_load(&all->cancelled))
    ps_run_cancel(*run);
  return PS_OK;
}

ps_status ps__turn_steps(ps_run *run, uint64_t n_steps) {
  PS_TRY(ps_run_submit(run, n_steps));
  return ps_run_wait(run, ps__run_submitted(run));
}

ps_status ps__turn_end(ps_run *run, ps_status st) {
  char message[1024];
  snprintf(message, sizeof message, "%s", st == PS_OK ? "" : ps_last_error());
  const ps_status paused = ps__run_pause(run);
  return st == PS_OK ? paused : ps__fail(st, "%s", message);
}

/* ---- what any thread may call, and a signal handler ------------------------------------------ */

static void look_begin(ps__turns *all) { atomic_fetch_add(&all->n_looking, 1); }
static void look_end(ps__turns *all) { atomic_fetch_sub(&all->n_looking, 1); }

void ps__turns_stop(ps__turns *all) {
  look_begin(all);
  for (uint32_t i = 0; i < PS__MAX_TURNS; i++) {
    ps_run *run = atomic_load(&all->run[i]);
    if (run)
      ps_run_cancel(run);
  }
  look_end(all);
}

void ps__turns_cancel(ps__turns *all) {
  atomic_store(&all->cancelled, 1);
  ps__turns_stop(all);
}

bool ps__turns_at_rest(ps__turns *all) {
  bool at_rest = true;
  look_begin(all);
  for (uint32_t i = 0; i < PS__MAX_TURNS && at_rest; i++) {
    const ps_run *run = atomic_load(&all->run[i]);
    at_rest = !run || ps_run_at_rest(run);
  }
  look_end(all);
  return at_rest;
}

void ps__turns_where(ps__turns *all, char *text, uint64_t bytes) {
  if (bytes)
    text[0] = 0;
  look_begin(all);
  for (uint32_t i = 0; i < PS__MAX_TURNS && bytes && !text[0]; i++) {
    const ps_run *run = atomic_load(&all->run[i]);
    if (run) /* of a paused run there is nothing to say */
      ps_run_where(run, text, bytes);
  }
  look_end(all);
}

/* ---- the end --------------------------------------------------------------------------------- */

/* Who looks after a run's place is empty does not find the run; who began before is awaited. */
static ps_status close_run(ps__turns *all, _Atomic(ps_run *) *at) {
  ps_run *run = atomic_load(at);
  atomic_store(at, NULL);
  while (atomic_load(&all->n_looking))
    sched_yield(); /* it takes microseconds */
  const ps_status st = ps_run_destroy(run);
  if (st != PS_OK)
    atomic_store(at, run);
  return st;
}

ps_status ps__turns_close(ps__turns *all) {
  for (; all->n; all->n--)
    PS_TRY(close_run(all, &all->run[all->n - 1]));
  return PS_OK;
}
