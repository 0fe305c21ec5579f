/* sample.c - text with the weights of the training as they are between two steps.
 *
 * The steps of training pause, and the plan's programs of generation (plan/sampling.c) run on the
 * same engine: in the memory that the paused steps use, with the weights where training keeps them.
 * They write no weights, no state and no norm. */
#include "generate/generate.h"
#include "train/trainer.h"

static ps_status generate(ps_trainer *t, const ps_generate_request *requests, uint64_t n,
                          ps_token_fn fn, void *user, ps_generate_stats *stats) {
  char message[1024];
  PS_TRY(ps__trainer_pause(t));
  const ps_status st = ps_generator_run(t->sampler, requests, n, fn, user, stats);
  const bool goes_on = st == PS_OK || st == PS_EINVAL || st == PS_ENUMERIC ||
                       (st == PS_ECANCELLED && !atomic_load(&t->turns.cancelled));
  if (!goes_on)
    return ps__trainer_stop(t, st);
  snprintf(message, sizeof message, "%s", st == PS_OK ? "" : ps_last_error());
  const ps_status back = ps__trainer_go_on(t);
  if (back != PS_OK)
    return ps__trainer_stop(t, back);
  return st == PS_OK ? PS_OK : ps__fail(st, "%s", message);
}

ps_status ps_trainer_sample(ps_trainer *t, const ps_generate_request *requests, uint64_t n,
                            ps_token_fn fn, void *user, ps_generate_stats *stats) {
  if (!t || !requests || !fn)
    return ps__fail(PS_EINVAL, "ps_trainer_sample: trainer, requests and fn must be given");
  if (!t->sampler)
    return ps__fail(PS_EINVAL, "ps_trainer_sample: the plan was made without sample_sequences: "
                               "plan anew");
  PS_TRY(ps__trainer_outside_ops(t));
  if (t->sticky != PS_OK)
    return ps__trainer_stop(t, t->sticky);
  PS_TRY(ps__trainer_idle(t));
  return generate(t, requests, n, fn, user, stats);
}
