/* state.c - what a trainer does next: it starts, goes on or is idle, or an error has stopped it. */
#include "train/trainer.h"
#include <string.h>

/* ---- starting and going on ------------------------------------------------------------------- */

ps_run_config ps__trainer_run_config(const ps_trainer *t, const ps__step_size *size) {
  const uint64_t begin = t->cfg.first_step + t->n_started, from = t->cfg.trace_from,
                 to = t->cfg.trace_to ? t->cfg.trace_to : UINT64_MAX;
  const bool traced = size->schedule == t->plan->schedule && to > begin;
  return (ps_run_config){.struct_bytes = sizeof(ps_run_config),
                         .trace_steps = traced ? t->plan->cfg.trace_steps : 0,
                         .trace_from = from > begin ? from - begin : 0,
                         .trace_to = traced && t->cfg.trace_to ? to - begin : 0};
}

/* Run the prologue, if the plan has one, and create the run of steps. This happens at the first
 * submit, so that parameters written until then count. */
static ps_status start_run(ps_trainer *t) {
  ps_program *prologue = NULL;
  ps_schedule *once = NULL;
  ps_run *run = NULL;
  const ps_run_config untraced = {.struct_bytes = sizeof untraced},
                      cfg = ps__trainer_run_config(t, &t->size);
  PS_TRY(ps__step_prologue(&t->plan->step, !t->resumed, &prologue));
  ps_status st = PS_OK;
  if (prologue) {
    st = ps_schedule_compile(&once, prologue);
    if (st == PS_OK)
      st = ps__run_create(&run, t->engine, once, &untraced);
    if (st == PS_OK)
      st = ps_run_submit(run, 1);
    if (st == PS_OK)
      st = ps_run_wait(run, 1);
    ps_run_destroy(run);
    (void)ps_schedule_destroy(once);
    ps_program_destroy(prologue);
  }
  return st == PS_OK ? ps__turn_begin(&t->turns, &t->run, t->size.schedule, &cfg) : st;
}

ps_status ps__trainer_go_on(ps_trainer *t) { return t->run ? ps__run_go_on(t->run) : start_run(t); }

ps_status ps__trainer_pause(ps_trainer *t) {
  if (!t->run)
    PS_TRY(ps__trainer_go_on(t));
  return ps__run_pause(t->run);
}

/* ---- may it be called? ---------------------------------------------------------------------- */

ps_status ps__trainer_outside_ops(const ps_trainer *t) {
  return ps__engine_drives(t->engine)
             ? ps__fail(PS_ESTATE, "a batch function cannot step its own trainer, which waits for "
                                   "the batch: step the trainer on another thread")
             : PS_OK;
}

ps_status ps__trainer_idle(ps_trainer *t) {
  if (t->torn)
    return ps__fail(PS_ESTATE, "an error came while weights moved to the places of another plan: "
                               "go on from the last checkpoint");
  if (t->unordered)
    return ps__fail(PS_ESTATE, "a device failed, and what others then copied to the host is in no "
                               "order: go on from the last checkpoint");
  if (t->sticky == PS_OK && t->n_reported != t->n_submitted)
    return ps__fail(PS_ESTATE, "%llu steps are in flight: wait for them first",
                    (unsigned long long)(t->n_submitted - t->n_reported));
  return PS_OK;
}

/* ---- errors ---------------------------------------------------------------------------------- */

/* Of a message, for the last addition. */
enum { LAST_BYTES = 192 };

/* What is known of weights that are not finite; @buf is room for it. @mixed: updates of the
 * step that is reported next have begun, and may be what broke them. */
static const char *about_weights(const ps_trainer *t, bool mixed, char buf[192]) {
  if (t->plan->cfg.forward_only)
    return "has weights that are not finite: this model is damaged, take another one";
  if (!mixed && !t->n_changed)
    return "had weights that are not finite before training: this model is damaged, take another "
           "one";
  if (mixed && !t->n_changed)
    snprintf(buf, 192,
             "has weights that are not finite: the model was damaged before training, or this "
             "step's updates broke it: look at the model, or lower %s",
             ps__field("lr"));
  else
    snprintf(buf, 192, "has weights that are not finite%s: lower %s, or add %s",
             mixed ? "" : " since the step before", ps__field("lr"), ps__field("warmup_steps"));
  return buf;
}

/* Says which weights are not finite, or adds where the first number came from that is not. */
static void explain_nonfinite(ps_trainer *t, bool mixed) {
  char *message = t->sticky_message, buf[192];
  const size_t bytes = sizeof t->sticky_message - LAST_BYTES, used = strlen(message);
  ps_param_info p;
  if (ps__trainer_find_nonfinite(t, &p)) {
    snprintf(message, bytes, "step %llu: %s %s",
             (unsigned long long)(t->cfg.first_step + t->n_reported + 1), p.name,
             about_weights(t, mixed, buf));
  } else if (t->skips.stopped_at) {
    (void)ps__run_pause(t->run); /* it has failed: the engine is free for another one */
    ps__replay_say(t, t->skips.stopped_at - 1, 0, message + used, bytes - used);
  }
}

/* After one of several devices has failed, the others run what they were given in no order
 * (engine/backend.h). Where they update units, they copy weights to the host. */
static bool copies_in_no_order(const ps_trainer *t, ps_status st) {
  bool any = false;
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++)
    any |= ps__updated_on_device(&t->plan->spec, u);
  return st == PS_EDEVICE && t->plan->at->n_devices > 1 && any;
}

/* Keeps the error that stops the trainer, and adds what it means for the weights. */
static void keep_error(ps_trainer *t, ps_status st) {
  char *message = t->sticky_message;
  const size_t bytes = sizeof t->sticky_message;
  t->sticky = st;
  snprintf(message, bytes - PS__ADDED_BYTES, "%s", ps_last_error());
  if (t->run)
    ps__run_rest(t->run); /* from here on weights may be read and saved */
  ps__hold_stop(t->hold, false);
  const bool mixed =
      !t->plan->cfg.forward_only && atomic_load(&t->updating) > atomic_load(&t->ended);
  if (st == PS_ENUMERIC)
    explain_nonfinite(t, mixed);
  t->unordered = copies_in_no_order(t, st);
  if (t->unordered)
    snprintf(message + strlen(message), LAST_BYTES,
             "; weights that the other devices updated are lost: go on from the last checkpoint");
  else if (mixed)
    snprintf(message + strlen(message), LAST_BYTES,
             "; this was during a step's updates: some weights, also in a model that is saved now, "
             "may be one step ahead of the others");
}

ps_status ps__trainer_stop(ps_trainer *t, ps_status st) {
  if (t->sticky == PS_OK)
    keep_error(t, ps__trainer_hosts_failed(t, st));
  return ps__fail(t->sticky, "%s", t->sticky_message);
}
