/* stages.c - the steps of a batch ramp: one run for all steps of a size, one after the other on the
 * same engine and in the same memory. A run of the next size begins when the steps of the last size
 * are reported; steps that are submitted before wait here. So they do before another plan. */
#include "train/trainer.h"

/* The first step of the trainer after those that are as large as its step @n. */
static uint64_t end_of(const ps_trainer *t, uint64_t n) {
  const uint64_t end = ps__step_size_at(t->plan, t->cfg.first_step + n).end_step;
  return end == UINT64_MAX ? end : end - t->cfg.first_step;
}

/* The last run is paused for good. */
static ps_status next_run(ps_trainer *t) {
  const ps__step_size size = ps__step_size_at(t->plan, t->cfg.first_step + t->n_started);
  const ps_run_config cfg = ps__trainer_run_config(t, &size);
  ps_run *run = NULL;
  PS_TRY(ps__turn_end(t->run, PS_OK));
  PS_TRY(ps__turn_begin(&t->turns, &run, size.schedule, &cfg));
  t->size = size;
  t->run_first = t->n_started;
  t->run = run;
  return PS_OK;
}

/* Where steps of the next size come, or of another plan, the caller waits for those before. */
static ps_status start_more(ps_trainer *t) {
  if (t->n_started >= ps__border_at(t))
    PS_TRY(t->border.cross(t));
  uint64_t end = end_of(t, t->run_first);
  if (t->n_started == end) {
    PS_TRY(next_run(t));
    end = end_of(t, t->run_first);
  }
  const uint64_t border = ps__border_at(t);
  if (border > t->n_started && border < end)
    end = border;
  const uint64_t last = t->n_submitted < end ? t->n_submitted : end;
  PS_TRY(ps_run_submit(t->run, last - t->n_started));
  t->n_started = last;
  return PS_OK;
}

ps_status ps__trainer_start_steps(ps_trainer *t) {
  while (t->n_started < t->n_submitted &&
         ((t->n_started < end_of(t, t->run_first) && t->n_started < ps__border_at(t)) ||
          t->n_reported == t->n_started))
    PS_TRY(start_more(t));
  return PS_OK;
}

ps_status ps__trainer_run_wait(ps_trainer *t, uint64_t n) {
  while (n > t->n_started) {
    if (t->sticky != PS_OK) /* no step begins after an error */
      return ps__trainer_stop(t, t->sticky);
    PS_TRY(start_more(t));
  }
  return n > t->run_first ? ps_run_wait(t->run, n - t->run_first) : PS_OK;
}
