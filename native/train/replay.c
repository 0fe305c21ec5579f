/* replay.c - where the values of a step first were not finite.
 *
 * The norm says of which parameter the gradient is not finite, but not which chunk made it so: the
 * total is a sum over all chunks. So the step is run again, one attention group after the other, in
 * a step of its own over the plan's (step/over.c): with the weights that training has, in the
 * memory of its paused step, and with a check after each op of a layer (ps__spec.checked). It
 * writes no weights and no state. It is made when a gradient is not finite for the first time.
 * Until then it takes nothing. */
#include "train/trainer.h"
#include <math.h>
#include <string.h>

struct ps__replay {
  ps_trainer *t;
  ps__guest guest;
  ps_run *run; /* NULL before the first replay */
  /* what is run again: step run_step of the trainer, which has this layout; its first group is step
   * first of the run */
  uint64_t run_step, first, valid;
  const ps__layout *whole;
  bool found;
  uint64_t group;
  size_t check;
};

/* ---- host ops -------------------------------------------------------------------------------- */

/* The last group may reach back into the one before, so that all have one size. */
static uint64_t first_sequence(const ps__replay *r, uint64_t group) {
  const uint64_t n = r->guest.layout.n_sequences, last = r->whole->n_sequences - n;
  return group * n < last ? group * n : last;
}

static ps_status load(ps__replay *r, const ps_launch *l) {
  const uint64_t group = l->step - r->first;
  if (group == 0)
    PS_TRY(ps__batch_read(r->t, r->run_step, r->whole, &r->valid));
  ps__batch_fill_part(r->t, &r->guest.step, first_sequence(r, group) * r->guest.layout.seq_len,
                      r->valid, l->ptr[0]);
  return PS_OK;
}

static void look(ps__replay *r, const ps_launch *l) {
  const double *sum = l->ptr[0];
  for (size_t i = 0; i < r->guest.step.n_checks && !r->found; i++)
    if (!isfinite(sum[i])) {
      r->found = true;
      r->check = i;
      r->group = l->step - r->first;
    }
}

static ps_status hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *l) {
  (void)unit;
  if (what == PS__HOOK_LOAD)
    return load(ctx, l);
  if (what == PS__HOOK_REPORT)
    look(ctx, l);
  return PS_OK; /* the loss of the step stays as it was */
}

/* ---- the step -------------------------------------------------------------------------------- */

/* Where saved activations are, which changes no bits: all recomputed but the blocks' inputs, which
 * are on the device, or on the host; or as in the plan's rounds. The first that fits is taken. */
typedef enum saved { INPUTS_HERE, INPUTS_ON_HOST, AS_PLANNED, N_SAVED } saved;

static void choose_policies(ps__spec *s, const ps__spec *of, saved where) {
  for (uint32_t l = 0; l < s->n_layers && where != INPUTS_HERE; l++) {
    const ps__layer_def *d = ps__layer_of(s->model, l + 1);
    const uint32_t input = (uint32_t)d->tensor[d->input].saved;
    for (uint32_t c = 0; c < s->n_chunks; c++)
      if (where == AS_PLANNED)
        memcpy(ps__spec_policy(s, l, c, 0), ps__spec_policy(of, l, c, 0), s->n_saved);
      else
        *ps__spec_policy(s, l, c, input) = PS_POLICY_HOST;
  }
}

static ps_status decide(ps__replay *r, saved where) {
  const ps_plan *p = r->t->plan;
  const ps__spec *of = &p->spec;
  ps__spec *s = &r->guest.spec;
  PS_TRY(ps__spec_init_beside(s, p->model, &r->guest.layout, of));
  s->clip = s->checked = true;
  memcpy(s->param_resident, of->param_resident, s->n_units);
  memcpy(s->update_resident, of->update_resident, s->n_units);
  memcpy(s->update_streamed, of->update_streamed, s->n_units);
  memcpy(s->state_held, of->state_held, s->n_units);
  if (of->ring_blocks) /* the first device lacks parameters that others have: it fetches all */
    memset(s->param_resident, 0, s->n_units);
  s->ring_blocks = 0;
  choose_policies(s, of, where);
  return PS_OK;
}

/* Sequences of a group: those of a chunk, or a part of them that divides a chunk, so that no step
 * of a batch ramp has fewer, and only the last group may have sequences of two chunks. */
static uint64_t group_sequences(const ps_plan *p) {
  const ps__layout *l = &p->layout;
  const uint64_t a_chunk = l->chunk_tokens / l->seq_len ? l->chunk_tokens / l->seq_len : 1;
  uint64_t n = a_chunk < l->n_sequences ? a_chunk : l->n_sequences;
  for (uint32_t i = 0; i < p->guests.n_ramp; i++)
    if (p->guests.ramp[i].n_sequences < n)
      n = p->guests.ramp[i].n_sequences;
  while (a_chunk % n)
    n--;
  return n;
}

static ps_status place(ps__replay *r, saved where) {
  const ps_plan *p = r->t->plan;
  const ps__layout *l = &p->layout;
  ps__guest *g = &r->guest;
  PS_TRY(ps__layout_init(&g->layout, l->seq_len, group_sequences(p), l->chunk_tokens,
                         l->chunks_per_round, 0, 0));
  PS_TRY(decide(r, where));
  return ps__guest_place(g, p->model, &g->spec, &g->hooks, &p->step);
}

/* PS_EBUDGET: it takes more than the training has. */
static ps_status check_room(const ps__replay *r) {
  const ps_plan *p = r->t->plan;
  const uint64_t tables = 512ull * r->guest.step.n_op, cap = p->cfg.host_mem_bytes;
  char need[32], there[32];
  for (uint32_t i = 0; i < p->at->n_places; i++) {
    const uint64_t bytes = r->guest.step.space_bytes[i],
                   arena = ps__arena_round(p->step.space_bytes[i]);
    if (bytes <= arena)
      continue;
    ps__format_bytes_apart(need, bytes, there, arena);
    return ps__fail(PS_EBUDGET, "a chunk with its checks takes %s of %s memory, the plan has %s",
                    need, i == p->at->host ? "host" : "device", there);
  }
  for (uint32_t i = 0; i < p->at->n_streams; i++)
    if (r->guest.step.scratch_bytes[i] > p->step.scratch_bytes[i])
      return ps__fail(PS_EBUDGET, "a check takes %zu bytes of scratch, the plan has %zu",
                      r->guest.step.scratch_bytes[i], p->step.scratch_bytes[i]);
  if (!cap || p->report.host_used_bytes + tables <= cap)
    return PS_OK;
  ps__format_bytes_apart(need, tables, there, cap - p->report.host_used_bytes);
  return ps__fail(PS_EBUDGET, "the tables of its ops take %s of host memory, the cap leaves %s",
                  need, there);
}

static ps_status build(ps__replay *r) {
  ps_status st = PS_EBUDGET;
  for (saved where = INPUTS_HERE; where < N_SAVED && st == PS_EBUDGET; where++) {
    ps__guest_free(&r->guest);
    st = place(r, where);
    if (st == PS_OK)
      st = check_room(r);
  }
  return st == PS_OK ? ps__guest_compile(&r->guest) : st;
}

/* ---- running --------------------------------------------------------------------------------- */

static ps_status run_groups(ps__replay *r) {
  const uint64_t of = r->guest.layout.n_sequences, n = (r->whole->n_sequences + of - 1) / of;
  ps_status st = PS_OK;
  PS_TRY(ps__turn_begin(&r->t->turns, &r->run, r->guest.schedule, NULL));
  r->first = ps__run_submitted(r->run);
  for (uint64_t i = 0; i < n && st == PS_OK && !r->found; i++)
    st = ps__turn_steps(r->run, 1);
  return ps__turn_end(r->run, st);
}

static const char *pass_name(const ps_tag *tag) {
  switch (tag->phase) {
  case PS__PHASE_FORWARD: return "the forward pass of ";
  case PS__PHASE_BACKWARD: return "the backward pass of ";
  case PS__PHASE_RECOMPUTE: return "the recomputation of ";
  default: return "";
  }
}

static void say_found(const ps__replay *r, char *text, size_t room) {
  const ps__check *c = &r->guest.step.check[r->check];
  const ps__layout *l = &r->guest.layout;
  const uint64_t sequence = first_sequence(r, r->group);
  char where[96], layer[32];
  /* of a group's sequences the last are those that no group before it had */
  uint64_t chunk = (sequence + l->n_sequences - 1) * l->seq_len / l->chunk_tokens;
  if (l->n_chunks > 1) {
    const ps__chunk *k = &l->chunk[c->tag.chunk];
    chunk = r->group * l->n_chunks + (uint64_t)c->tag.chunk;
    snprintf(where, sizeof where, "sequence %llu, positions %u to %u", (unsigned long long)sequence,
             k->row0, k->row0 + k->n_tokens - 1);
  } else if (l->n_sequences == 1)
    snprintf(where, sizeof where, "sequence %llu", (unsigned long long)sequence);
  else
    snprintf(where, sizeof where, "sequences %llu to %llu", (unsigned long long)sequence,
             (unsigned long long)(sequence + l->n_sequences - 1));
  snprintf(text, room,
           "; run again chunk by chunk, the first value that is not finite is of chunk %llu (%s), "
           "in %s%s (op %s)",
           (unsigned long long)chunk, where, pass_name(&c->tag),
           ps__layer_name(r->t, (uint32_t)c->tag.layer, layer), c->kernel->name);
}

static ps_status replay(ps_trainer *t, uint64_t run_step) {
  ps__replay *r = t->replay;
  const ps__layout *whole = ps__step_size_at(t->plan, t->cfg.first_step + run_step).layout;
  if (!r) {
    r = ps__calloc(1, sizeof *r);
    if (!r)
      return ps__fail(PS_ENOMEM, "out of memory");
    r->t = t;
    r->guest.hooks = (ps__step_hooks){r, hook};
    r->whole = whole;
    t->replay = r;
  }
  if (!r->guest.schedule)
    PS_TRY(build(r));
  r->run_step = run_step;
  r->whole = whole;
  r->found = false;
  return run_groups(r);
}

void ps__replay_say(ps_trainer *t, uint64_t run_step, uint64_t n_later, char *text, size_t room) {
  char later[64] = "";
  text[0] = 0;
  if (atomic_load(&t->turns.cancelled))
    return;
  const ps_status st = replay(t, run_step);
  if (n_later)
    snprintf(later, sizeof later, " with the weights of %llu step%s later",
             (unsigned long long)n_later, n_later == 1 ? "" : "s");
  if (st != PS_OK)
    snprintf(text, room, "; which chunk it was is not known: %s", ps_last_error());
  else if (t->replay->found)
    say_found(t->replay, text, room);
  else
    snprintf(text, room,
             "; run again chunk by chunk%s, every value is finite: the sum over chunks is not, or "
             "the run again has other values",
             later);
}

void ps__replay_destroy(ps__replay *r) {
  if (!r)
    return;
  ps__guest_free(&r->guest);
  ps__free(r);
}
