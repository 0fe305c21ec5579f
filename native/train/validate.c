/* validate.c - the loss on data that is not trained on, between two steps.
 *
 * The steps of training pause, and the steps of the plan's validation (plan/validation.c) run on
 * the same engine: in the memory that the paused steps use, with the weights where training keeps
 * them.
 * A validation writes no weights, no state and no norm: a training gives the same bits with it. */
#include "train/trainer.h"
#include <math.h>
#include <string.h>

ps_status ps__validation_check(const ps_plan *plan, const ps_dataset *ds) {
  const ps__val *v = plan->guests.val;
  if (!v)
    return ps__fail(PS_EINVAL, "val_dataset is given, but the plan was made without val_tokens: "
                               "plan anew");
  if (plan->cfg.one_document && ps_dataset_marks_documents(ds))
    return ps__fail(PS_EINVAL,
                    "the validation data's masks say where documents begin, but the plan was made "
                    "for one document a sequence: plan without one_document");
  PS_TRY(ps_dataset_check(ds, plan->cfg.seq_len));
  PS_TRY(ps__check_labels(plan, ds, "the validation data"));
  const uint64_t have = ps_dataset_n_sequences(ds, plan->cfg.seq_len), need = v->n_sequences;
  return have >= need ? PS_OK
                      : ps__fail(PS_EINVAL,
                                 "a validation reads %llu sequences of %llu tokens, but its data "
                                 "has %llu: lower %s",
                                 (unsigned long long)need, (unsigned long long)plan->cfg.seq_len,
                                 (unsigned long long)have, ps__field("val_tokens"));
}

/* The same sequences in each validation: the data's first, of a mix by weight. What the last step
 * lacks is read from the beginning again, and does not count. */
static ps_status load(ps_trainer *t, const ps_launch *l) {
  const ps__val *v = t->plan->guests.val;
  const ps__layout *layout = &v->guest.layout;
  const uint64_t s = layout->seq_len, n = layout->n_sequences, step = l->step % v->n_steps;
  uint64_t valid;
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t pos = step * n + i, all = v->n_sequences;
    PS_TRY(ps_dataset_read(t->cfg.val_dataset, s,
                           ps_dataset_at(t->cfg.val_dataset, s, pos % all, 0, 0), t->tokens + i * s,
                           t->targets + i * s, t->begins + i * s));
    if (pos >= all)
      ps__batch_uncount(t, i);
  }
  PS_TRY(ps__batch_fill(t, "validation", &v->guest.step, l->ptr[0], &valid));
  memset(t->begins, 0, layout->n_tokens); /* a batch function of training does not write it */
  *(ps__batch_header *)l->ptr[0] = (ps__batch_header){.valid_tokens = valid};
  return PS_OK;
}

/* As a step's loss, and as penstock eval adds up its steps: a mean over the step's targets. */
static void add_loss(ps_trainer *t, const ps_launch *l) {
  const ps__batch_header *batch = l->ptr[0];
  const double n = (double)batch->valid_tokens;
  if (!batch->valid_tokens)
    return;
  const uint64_t n_tokens = t->plan->guests.val->guest.layout.n_tokens;
  const bool scores = ps__has_score(&t->plan->model->cfg);
  const float *row = l->ptr[1];
  t->val.sum += ps__sum_rows(row, n_tokens, scores ? 2 : 1) / n * n;
  if (scores)
    t->val.right += ps__sum_rows(row + 1, n_tokens, 2);
  t->val.n_valid += batch->valid_tokens;
}

ps_status ps__validation_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch) {
  (void)unit;
  if (what == PS__HOOK_LOAD)
    return load(ctx, launch);
  if (what == PS__HOOK_LOSS)
    add_loss(ctx, launch);
  return PS_OK; /* the norm and the report of the last step of training stay */
}

static ps_status run_steps(ps_trainer *t) {
  const ps__val *v = t->plan->guests.val;
  PS_TRY(ps__trainer_pause(t));
  PS_TRY(ps__turn_begin(&t->turns, &t->val.run, v->guest.schedule, NULL));
  PS_TRY(ps__turn_end(t->val.run, ps__turn_steps(t->val.run, v->n_steps)));
  return ps__trainer_go_on(t);
}

ps_status ps_trainer_validate(ps_trainer *t, ps_validation *out) {
  if (!t || !out)
    return ps__fail(PS_EINVAL, "ps_trainer_validate: trainer and out must be given");
  if (!t->cfg.val_dataset)
    return ps__fail(PS_EINVAL, "ps_trainer_validate: the trainer has no val_dataset");
  PS_TRY(ps__trainer_outside_ops(t));
  if (t->sticky != PS_OK)
    return ps__trainer_stop(t, t->sticky);
  PS_TRY(ps__trainer_idle(t));
  const uint64_t start = ps__now_ns();
  t->val.sum = t->val.right = 0;
  t->val.n_valid = 0;
  const ps_status st = run_steps(t);
  if (st != PS_OK)
    return ps__trainer_stop(t, st);
  if (t->val.n_valid == 0)
    return ps__fail(PS_EINVAL,
                    "the validation data has no target in its first %llu tokens: give "
                    "other data, or raise %s",
                    (unsigned long long)t->plan->report.val_tokens, ps__field("val_tokens"));
  *out = (ps_validation){.loss = t->val.sum / (double)t->val.n_valid,
                         .tokens = t->plan->report.val_tokens,
                         .valid_tokens = t->val.n_valid};
  out->perplexity = exp(out->loss);
  out->right = ps__has_score(&t->plan->model->cfg) ? t->val.right / (double)t->val.n_valid : NAN;
  out->seconds = (double)(ps__now_ns() - start) * 1e-9;
  return PS_OK;
}
