/* nonfinite.c - a step whose loss or gradient is not finite: the run stops, or the step is skipped.
 *
 * A step is skipped by NORM: it does not put the step's number beside the norm, so the gates of all
 * updates of the step stay closed, on the host and on the device (optim/optim.h). Messages count
 * steps from 1, as the log does. */
#include "train/trainer.h"
#include <math.h>

const char *ps__layer_name(const ps_trainer *t, uint32_t layer, char buf[32]) {
  const ps_model *m = t->plan->model;
  if (layer == 0)
    return "the embedding";
  if (layer == ps__head_layer(m))
    return "the head";
  snprintf(buf, 32, "layer %u", layer - 1);
  return buf;
}

/* The parameter whose gradient is not finite, from above, as gradients flow: where it began.
 * @sumsq: of the unit's spans. */
static const char *param_name(const ps_trainer *t, uint32_t unit, const double *sumsq) {
  const ps_model *m = t->plan->model;
  const ps__unit *u = &m->unit[unit];
  uint32_t span = u->n_spans - 1, i = u->first_param;
  while (span > 0 && isfinite(sumsq[span]))
    span--;
  while (i + 1 < u->first_param + u->n_params && m->param[i].offset != u->span[span].offset)
    i++;
  return m->param[i].name;
}

double ps__unit_sumsq(const ps_trainer *t, const double *slots, uint32_t unit) {
  const ps__unit *u = &t->plan->model->unit[unit];
  double sum = 0;
  for (uint32_t i = 0; i < u->n_spans && !u->frozen; i++)
    sum += slots[i];
  return sum;
}

static bool skips(const ps_trainer *t) { return t->plan->cfg.non_finite == PS_NON_FINITE_SKIP; }

/* " after 10 steps in a row that were skipped" */
static const char *after_skips(const ps_trainer *t, char buf[64]) {
  buf[0] = 0;
  if (skips(t))
    snprintf(buf, 64, ", after %llu steps in a row that were skipped",
             (unsigned long long)t->cfg.max_skips);
  return buf;
}

static void describe_loss(const ps_trainer *t, char text[PS__WHY_BYTES]) {
  const ps__skips *k = &t->skips;
  const ps__layout *l = t->size.layout;
  const uint64_t s = l->seq_len;
  uint32_t chunk = 0;
  if (k->bad_row == l->n_tokens) {
    snprintf(text, PS__WHY_BYTES, "the loss of another host's part is not finite");
    return;
  }
  while (chunk + 1 < l->n_chunks && l->chunk[chunk + 1].first_token <= k->bad_row)
    chunk++;
  snprintf(text, PS__WHY_BYTES, "the loss is %s, first in chunk %u (sequence %llu, position %llu)",
           isnan(k->bad_loss) ? "not a number"
           : k->bad_loss > 0  ? "infinite"
                              : "minus infinity",
           chunk, (unsigned long long)(k->bad_row / s), (unsigned long long)(k->bad_row % s));
}

static void describe_gradient(const ps_trainer *t, uint32_t unit, const double *sumsq,
                              char text[PS__WHY_BYTES]) {
  char buf[32];
  snprintf(text, PS__WHY_BYTES, "the gradient of %s is not finite, first in %s",
           ps__layer_name(t, t->plan->model->unit[unit].layer, buf), param_name(t, unit, sumsq));
}

static ps_status fail_loss(const ps_trainer *t, uint64_t run_step) {
  char why[PS__WHY_BYTES], buf[64];
  describe_loss(t, why);
  if (t->plan->cfg.forward_only)
    return ps__fail(PS_ENUMERIC, "step %llu: %s: look at the data, or give %s fp32",
                    (unsigned long long)(t->cfg.first_step + run_step + 1), why,
                    ps__field("recipe"));
  return ps__fail(PS_ENUMERIC,
                  "step %llu: %s%s; nothing was updated in this step: lower %s, or look at the "
                  "data",
                  (unsigned long long)(t->cfg.first_step + run_step + 1), why, after_skips(t, buf),
                  ps__field("lr"));
}

ps_status ps__loss_is_bad(ps_trainer *t, uint64_t run_step, double loss, const float *row,
                          uint64_t n_columns) {
  ps__skips *k = &t->skips;
  k->bad_loss = loss;
  k->bad_row = 0;
  while (k->bad_row < t->size.layout->n_tokens && isfinite(row[k->bad_row * n_columns]))
    k->bad_row++;
  return skips(t) ? PS_OK : fail_loss(t, run_step);
}

ps_status ps__unit_is_bad(ps_trainer *t, uint64_t run_step, uint32_t unit, const double *sumsq) {
  char why[PS__WHY_BYTES], after[64];
  describe_gradient(t, unit, sumsq, why);
  t->skips.stopped_at = run_step + 1;
  return ps__fail(PS_ENUMERIC, "step %llu: %s%s; %s: lower %s, or look at the data",
                  (unsigned long long)(t->cfg.first_step + run_step + 1), why,
                  after_skips(t, after),
                  ps__waits_for_norm(t->plan) ? "nothing was updated in this step"
                                              : "the units above it are updated, the others not",
                  ps__field("lr"));
}

/* The unit whose gradient is not finite, from above, as gradients flow: where it began. */
static uint32_t bad_unit(const ps_trainer *t, const double *slots) {
  uint32_t u = t->plan->spec.n_units;
  while (u-- > 1)
    if (!isfinite(ps__unit_sumsq(t, slots + (size_t)u * ps__norm_slots(t->plan->model), u)))
      return u;
  return 0;
}

bool ps__step_is_bad(ps_trainer *t, uint64_t run_step, const double *slots, double sum,
                     ps_status *st) {
  ps__skips *k = &t->skips;
  const bool bad = k->loss_bad || !isfinite(sum);
  *st = PS_OK;
  if (run_step == atomic_load(&k->mark)) {
    k->n_before_mark = atomic_load(&k->n);
    k->norm_before_mark = atomic_load(&k->norm);
    atomic_store(&k->marked, run_step + 1);
  }
  atomic_store(&k->norm, sqrt(sum));
  k->now = bad;
  k->in_a_row = bad ? k->in_a_row + 1 : 0;
  if (!bad)
    return false;
  const uint32_t u = bad_unit(t, slots);
  const double *of_unit = slots + (size_t)u * ps__norm_slots(t->plan->model);
  if (skips(t) && k->in_a_row <= t->cfg.max_skips) {
    ps__step_record *r = &t->ring[run_step % PS__RING];
    atomic_fetch_add(&k->n, 1);
    r->gradient_bad = !k->loss_bad;
    if (k->loss_bad)
      describe_loss(t, r->why);
    else
      describe_gradient(t, u, of_unit, r->why);
  } else
    *st = k->loss_bad ? fail_loss(t, run_step) : ps__unit_is_bad(t, run_step, u, of_unit);
  return true;
}

void ps__skips_mark(ps_trainer *t, uint64_t step) { atomic_store(&t->skips.mark, step); }

uint64_t ps__skips_before(const ps_trainer *t) {
  const uint64_t n = atomic_load(&t->skips.n); /* before it grows, the mark is made */
  return atomic_load(&t->skips.marked) == atomic_load(&t->skips.mark) + 1 ? t->skips.n_before_mark
                                                                          : n;
}

double ps__norm_before(const ps_trainer *t) {
  const double norm = atomic_load(&t->skips.norm); /* before it changes, the mark is made */
  return atomic_load(&t->skips.marked) == atomic_load(&t->skips.mark) + 1
             ? t->skips.norm_before_mark
             : norm;
}
