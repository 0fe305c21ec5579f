/* validation.c - the validation beside a training: a forward-only step in the memory of the plan's
 * step, which runs while no step of training is in flight.
 *
 * Nothing of the plan follows from it where the plan holds it (beside.c), so that a training gives
 * the same bits with and without a validation. What is chosen here changes no bits either: how many
 * chunks a round has, and how far ahead parameters are fetched. */
#include "plan/plan_impl.h"

enum { MOST_LEAD = 2 };

static void free_step(ps_plan *v) {
  ps__step_free(&v->step);
  ps__spec_free(&v->spec);
  ps__layout_free(&v->layout);
}

/* The same parameters are on the device as between two steps of training; all others are
 * streamed. */
static ps_status decide(ps_plan *v, const ps__spec *of, uint32_t lead) {
  ps__spec *s = &v->spec;
  PS_TRY(ps__spec_init_beside(s, v->model, &v->layout, of));
  s->param_lead = lead;
  for (uint32_t u = 0; u < s->n_units; u++)
    s->param_resident[u] = ps__weights_stay(of, u);
  return PS_OK;
}

/* The step with @chunks a round. *fits: it takes no more memory than the arenas of @p have. On an
 * error nothing is left to free. */
static ps_status try_step(const ps_plan *p, ps_plan *v, uint64_t chunks, uint32_t lead,
                          bool *fits) {
  const uint64_t sequences = v->cfg.tokens_per_step / v->cfg.seq_len;
  PS_TRY(
      ps__layout_init(&v->layout, v->cfg.seq_len, sequences, p->layout.chunk_tokens, chunks, 0, 0));
  ps_status st = decide(v, &p->spec, lead);
  if (st == PS_OK)
    st = ps__step_emit(&v->step, v->model, &v->layout, &v->spec, &v->hooks);
  if (st == PS_OK)
    st = ps__step_map_over(&v->step, &p->step);
  if (st != PS_OK) {
    free_step(v);
    return st;
  }
  *fits = true;
  for (uint32_t i = 0; i < p->at->n_places; i++)
    *fits &= ps__arena_round(v->step.space_bytes[i]) <= ps__arena_round(p->step.space_bytes[i]);
  return PS_OK;
}

/* The more chunks a round has, the fewer bytes cross the link. Without any prefetch the link is
 * idle half of the time, so that is the last resort. Where nothing fits, the smallest step is
 * left. */
static ps_status find_step(const ps_plan *p, ps_plan *v) {
  const uint64_t n = (v->cfg.tokens_per_step + p->layout.chunk_tokens - 1) / p->layout.chunk_tokens,
                 most = n > p->layout.n_chunks ? p->layout.n_chunks : n;
  bool fits = false;
  for (uint32_t lead = MOST_LEAD + 1; lead-- > 0;)
    for (uint64_t chunks = most, last = 0; chunks != last; chunks = (chunks + 1) / 2) {
      free_step(v);
      PS_TRY(try_step(p, v, chunks, lead, &fits));
      if (fits)
        return PS_OK;
      last = chunks;
    }
  return PS_OK;
}

/* As many steps as needed for steps no larger than those of training, of equal size but for the
 * last. */
static void cut(ps_plan *p, uint64_t *sequences) {
  const uint64_t n = p->cfg.val_tokens / p->cfg.seq_len, all = n ? n : 1;
  p->val_sequences = all;
  p->val_steps = (all + p->layout.n_sequences - 1) / p->layout.n_sequences;
  *sequences = (all + p->val_steps - 1) / p->val_steps;
}

ps_status ps__plan_validation(ps_plan *p, bool run) {
  ps_plan_config cfg = p->cfg;
  uint64_t sequences;
  cut(p, &sequences);
  cfg.forward_only = 1;
  cfg.val_tokens = cfg.trace_steps = 0;
  cfg.sample_sequences = cfg.sample_context = 0;
  cfg.n_ramp = 0;
  cfg.z_loss = cfg.label_smoothing = 0; /* the cross-entropy alone, as penstock eval */
  cfg.tokens_per_step = cfg.n_hosts * sequences * cfg.seq_len; /* one of the hosts validates */
  PS_TRY(ps__plan_new(&p->val, &p->model->cfg, &cfg, &p->hw));
  ps_program *program = NULL;
  PS_TRY(find_step(p, p->val));
  if (!run) {
    ps__step_widen(&p->step, &p->val->step);
    return PS_OK;
  }
  ps_status st = ps__step_program(&p->val->step, &program);
  if (st == PS_OK)
    st = ps_schedule_compile(&p->val->schedule, program);
  ps_program_destroy(program);
  if (st == PS_OK)
    st = ps__plan_predict(p->val);
  if (st == PS_OK)
    ps__step_widen(&p->step, &p->val->step);
  return st;
}
