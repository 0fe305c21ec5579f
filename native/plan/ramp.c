/* ramp.c - the steps of a batch ramp: fewer tokens than a step of the plan, in the same memory.
 *
 * A step of the ramp has the plan's decisions and its cut of chunks and rounds, and fewer of them.
 * It is mapped over the plan's step, so that weights, optimizer state and all else that outlives a
 * step lie where the plan has them. The trainer goes from one step to the next and moves
 * nothing. */
#include "plan/plan_impl.h"

/* Sequences that a host has of the stage's step. What is less than one for each host is left out,
 * as it is of the plan's step. */
static uint64_t sequences_of(const ps_plan_config *c, const ps_ramp_stage *s) {
  return s->tokens_per_step / c->seq_len / c->n_hosts;
}

static ps_status check(const ps_plan *p) {
  const ps_plan_config *c = &p->cfg;
  uint64_t steps = 0;
  if (c->n_ramp > PS_MAX_RAMP || (c->n_ramp && !c->ramp))
    return ps__fail(PS_EINVAL, "the batch ramp has %u stages: at most %d are possible", c->n_ramp,
                    PS_MAX_RAMP);
  if (c->n_ramp && c->forward_only)
    return ps__fail(PS_EINVAL, "a plan that trains nothing has no batch ramp: leave it out");
  for (uint32_t i = 0; i < c->n_ramp; i++) {
    const ps_ramp_stage *s = &c->ramp[i];
    const uint64_t least = c->n_hosts * c->seq_len, most = c->n_hosts * c->tokens_per_step;
    if (s->tokens_per_step < least || sequences_of(c, s) > c->tokens_per_step / c->seq_len ||
        (c->n_hosts < 2 && s->tokens_per_step > most))
      return ps__fail(PS_EINVAL,
                      "stage %u of the batch ramp has %llu tokens a step: give from %llu, one "
                      "sequence%s, to %llu, the tokens per step",
                      i + 1, (unsigned long long)s->tokens_per_step, (unsigned long long)least,
                      c->n_hosts > 1 ? " a host" : "", (unsigned long long)most);
    if (s->n_steps == 0 || s->n_steps > PS_MAX_RAMP_STEPS - steps)
      return ps__fail(PS_EINVAL,
                      "stage %u of the batch ramp has %llu steps: give at least 1, and at most %d "
                      "in all stages",
                      i + 1, (unsigned long long)s->n_steps, PS_MAX_RAMP_STEPS);
    steps += s->n_steps;
  }
  return PS_OK;
}

static ps_status build(const ps__over *o, ps__ramp *r) {
  const ps__layout *l = o->layout;
  ps__guest *g = &r->guest;
  PS_TRY(ps__layout_init(&g->layout, l->seq_len, r->n_sequences, l->chunk_tokens,
                         l->chunks_per_round, l->first_round_chunks, l->first_rounds));
  PS_TRY(ps__guest_place(g, o->plan->model, o->spec, &o->plan->hooks, o->step));
  if (o->run) {
    PS_TRY(ps__guest_compile(g));
    PS_TRY(ps__guest_predict(g, &o->plan->hw));
  }
  ps__step_widen(o->step, &g->step);
  return PS_OK;
}

ps_status ps__plan_ramp(const ps__over *o, ps__guests *out) {
  const ps_plan_config *c = &o->plan->cfg;
  uint64_t step = 0, sequence = 0;
  PS_TRY(check(o->plan));
  if (!c->n_ramp)
    return PS_OK;
  out->ramp = ps__calloc(c->n_ramp, sizeof *out->ramp);
  if (!out->ramp)
    return ps__fail(PS_ENOMEM, "out of memory for the batch ramp");
  for (uint32_t i = 0; i < c->n_ramp; i++) {
    ps__ramp *r = &out->ramp[out->n_ramp++];
    r->n_steps = c->ramp[i].n_steps;
    r->n_sequences = sequences_of(c, &c->ramp[i]);
    r->first_step = step;
    r->first_sequence = sequence;
    step += r->n_steps;
    sequence += r->n_steps * r->n_sequences;
    PS_TRY(build(o, r));
  }
  return PS_OK;
}

ps__step_size ps__step_size_at(const ps_plan *p, uint64_t step) {
  uint64_t first = 0, sequence = 0;
  for (uint32_t i = 0; i < p->guests.n_ramp; i++) {
    const ps__ramp *r = &p->guests.ramp[i];
    if (step < r->first_step + r->n_steps)
      return (ps__step_size){.layout = &r->guest.layout,
                             .step = &r->guest.step,
                             .schedule = r->guest.schedule,
                             .first_step = r->first_step,
                             .end_step = r->first_step + r->n_steps,
                             .first_sequence = r->first_sequence,
                             .step_s = r->guest.step_s};
    first = r->first_step + r->n_steps;
    sequence = r->first_sequence + r->n_steps * r->n_sequences;
  }
  return (ps__step_size){.layout = &p->layout,
                         .step = &p->step,
                         .schedule = p->schedule,
                         .first_step = first,
                         .end_step = UINT64_MAX,
                         .first_sequence = sequence,
                         .step_s = p->report.step_s};
}

uint64_t ps_plan_sequences_before(const ps_plan *p, uint64_t step) {
  const ps__step_size s = ps__step_size_at(p, step);
  return p->cfg.n_hosts * (s.first_sequence + (step - s.first_step) * s.layout->n_sequences);
}

ps_status ps_plan_steps_of(const ps_plan *plan, uint64_t n_sequences, uint64_t *out) {
  if (!plan || !out)
    return ps__fail(PS_EINVAL, "ps_plan_steps_of: plan and out must be given");
  uint64_t steps = 0;
  n_sequences /= plan->cfg.n_hosts; /* of one host */
  for (ps__step_size s; n_sequences; steps = s.end_step) {
    s = ps__step_size_at(plan, steps);
    const uint64_t n = n_sequences / s.layout->n_sequences;
    if (s.end_step == UINT64_MAX || n < s.end_step - steps) {
      steps += n;
      break;
    }
    n_sequences -= (s.end_step - steps) * s.layout->n_sequences;
  }
  *out = steps;
  return PS_OK;
}
