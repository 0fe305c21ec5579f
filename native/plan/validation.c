/* validation.c - the validation beside a training: a forward-only step in the memory of the plan's
 * step, which runs while no step of training is in flight.
 *
 * Nothing of the plan follows from it where the plan holds it (beside.c), so that a training gives
 * the same bits with and without a validation. What is chosen here changes no bits either: how many
 * chunks a round has, and how far ahead parameters are fetched. */
#include "plan/plan_impl.h"

enum { MOST_LEAD = 2 };

/* The same parameters are on the device as between two steps of training; all others are
 * streamed. */
static ps_status decide(const ps_model *m, ps__guest *g, const ps__spec *of, uint32_t lead) {
  ps__spec *s = &g->spec;
  PS_TRY(ps__spec_init_beside(s, m, &g->layout, of));
  s->param_lead = lead;
  for (uint32_t u = 0; u < s->n_units; u++)
    s->param_resident[u] = ps__weights_stay(of, u);
  return PS_OK;
}

/* The step with @chunks a round. *fits: it takes no more memory than the arenas of training. */
static ps_status try_step(const ps__over *o, ps__val *v, uint64_t sequences, uint64_t chunks,
                          uint32_t lead, bool *fits) {
  const ps__layout *l = o->layout;
  ps__guest *g = &v->guest;
  ps__guest_free(g);
  PS_TRY(ps__layout_init(&g->layout, l->seq_len, sequences, l->chunk_tokens, chunks, 0, 0));
  PS_TRY(decide(v->model, g, o->spec, lead));
  PS_TRY(ps__guest_place(g, v->model, &g->spec, &g->hooks, o->step));
  *fits = true;
  for (uint32_t i = 0; i < o->plan->at->n_places; i++)
    *fits &= ps__arena_round(g->step.space_bytes[i]) <= ps__arena_round(o->step->space_bytes[i]);
  return PS_OK;
}

/* The more chunks a round has, the fewer bytes cross the link. Without any prefetch the link is
 * idle half of the time, so that is the last resort. Where nothing fits, the smallest step is
 * left. */
static ps_status find_step(const ps__over *o, ps__val *v, uint64_t sequences) {
  const ps__layout *l = o->layout;
  const uint64_t n = (sequences * l->seq_len + l->chunk_tokens - 1) / l->chunk_tokens,
                 most = n > l->n_chunks ? l->n_chunks : n;
  bool fits = false;
  for (uint32_t lead = MOST_LEAD + 1; lead-- > 0;)
    for (uint64_t chunks = most, last = 0; chunks != last; chunks = (chunks + 1) / 2) {
      PS_TRY(try_step(o, v, sequences, chunks, lead, &fits));
      if (fits)
        return PS_OK;
      last = chunks;
    }
  return PS_OK;
}

/* As many steps as needed for steps no larger than those of training, of equal size but for the
 * last. Gives their sequences. */
static uint64_t cut(const ps__over *o, ps__val *v) {
  const uint64_t n = o->plan->cfg.val_tokens / o->plan->cfg.seq_len;
  v->n_sequences = n ? n : 1;
  v->n_steps = (v->n_sequences + o->layout->n_sequences - 1) / o->layout->n_sequences;
  return (v->n_sequences + v->n_steps - 1) / v->n_steps;
}

ps_status ps__plan_validation(const ps__over *o, ps__guests *out) {
  ps_plan_config cfg = o->plan->cfg;
  cfg.forward_only = 1;
  cfg.router_aux_loss = cfg.router_z_loss = 0;
  cfg.z_loss = cfg.label_smoothing = 0; /* the cross-entropy alone, as penstock eval */
  ps__val *v = out->val = ps__calloc(1, sizeof *v);
  if (!v)
    return ps__fail(PS_ENOMEM, "out of memory for the validation");
  PS_TRY(ps__plan_model(&v->model, &o->plan->model->cfg, &cfg));
  PS_TRY(find_step(o, v, cut(o, v)));
  if (o->run) {
    PS_TRY(ps__guest_compile(&v->guest));
    PS_TRY(ps__guest_predict(&v->guest, &o->plan->hw));
  }
  ps__step_widen(o->step, &v->guest.step);
  return PS_OK;
}
