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
  ps__step_hooks hooks;
  ps__layout layout;
  ps__spec spec;
  ps__step step;
  ps_schedule *schedule;
  _Atomic(ps_run *) run; /* NULL before the first replay; paused between two */
  uint64_t n_steps;      /* of the run so far */
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
  const uint64_t n = r->layout.n_sequences, last = r->whole->n_sequences - n;
  return group * n < last ? group * n : last;
}

static ps_status load(ps__replay *r, const ps_launch *l) {
  const uint64_t group = l->step - r->first;
  if (group == 0)
    PS_TRY(ps__batch_read(r->t, r->run_step, r->whole, &r->valid));
  ps__batch_fill_part(r->t, &r->step, first_sequence(r, group) * r->layout.seq_len, r->valid,
                      l->ptr[0]);
  return PS_OK;
}

static void look(ps__replay *r, const ps_launch *l) {
  const double *sum = l->ptr[0];
  for (size_t i = 0; i < r->step.n_checks && !r->found; i++)
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

static void free_step(ps__replay *r) {
  ps__step_free(&r->step);
  ps__spec_free(&r->spec);
  ps__layout_free(&r->layout);
}

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
  ps__spec *s = &r->spec;
  PS_TRY(ps__spec_init_beside(s, p->model, &r->layout, of));
  s->clip = s->checked = true;
  memcpy(s->param_resident, of->param_resident, s->n_units);
  memcpy(s->update_resident, of->update_resident, s->n_units);
  memcpy(s->update_streamed, of->update_streamed, s->n_units);
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

static ps_status emit(ps__replay *r, saved where) {
  const ps_plan *p = r->t->plan;
  const ps__layout *l = &p->layout;
  const uint64_t n = group_sequences(p);
  PS_TRY(ps__layout_init(&r->layout, l->seq_len, n, l->chunk_tokens, l->chunks_per_round, 0, 0));
  ps_status st = decide(r, where);
  if (st == PS_OK)
    st = ps__step_emit(&r->step, p->model, &r->layout, &r->spec, &r->hooks);
  return st == PS_OK ? ps__step_map_over(&r->step, &p->step) : st;
}

/* PS_EBUDGET: it takes more than the training has. */
static ps_status check_room(const ps__replay *r) {
  const ps_plan *p = r->t->plan;
  const uint64_t tables = 512ull * r->step.n_op, cap = p->cfg.host_mem_bytes;
  char need[32], there[32];
  for (uint32_t i = 0; i < p->at->n_places; i++) {
    const uint64_t bytes = r->step.space_bytes[i], arena = ps__arena_round(p->step.space_bytes[i]);
    if (bytes <= arena)
      continue;
    ps__format_bytes_apart(need, bytes, there, arena);
    return ps__fail(PS_EBUDGET, "a chunk with its checks takes %s of %s memory, the plan has %s",
                    need, i == p->at->host ? "host" : "device", there);
  }
  for (uint32_t i = 0; i < p->at->n_streams; i++)
    if (r->step.scratch_bytes[i] > p->step.scratch_bytes[i])
      return ps__fail(PS_EBUDGET, "a check takes %zu bytes of scratch, the plan has %zu",
                      r->step.scratch_bytes[i], p->step.scratch_bytes[i]);
  if (!cap || p->report.host_used_bytes + tables <= cap)
    return PS_OK;
  ps__format_bytes_apart(need, tables, there, cap - p->report.host_used_bytes);
  return ps__fail(PS_EBUDGET, "the tables of its ops take %s of host memory, the cap leaves %s",
                  need, there);
}

static ps_status build(ps__replay *r) {
  ps_program *program = NULL;
  ps_status st = PS_EBUDGET;
  for (saved where = INPUTS_HERE; where < N_SAVED && st == PS_EBUDGET; where++) {
    free_step(r);
    st = emit(r, where);
    if (st == PS_OK)
      st = check_room(r);
  }
  if (st == PS_OK)
    st = ps__step_program(&r->step, &program);
  if (st == PS_OK)
    st = ps_schedule_compile(&r->schedule, program);
  ps_program_destroy(program);
  return st;
}

/* ---- running --------------------------------------------------------------------------------- */

static ps_status begin(ps__replay *r) {
  const ps_run_config cfg = {.struct_bytes = sizeof cfg};
  ps_run *run = atomic_load(&r->run);
  if (run)
    return ps__run_go_on(run);
  PS_TRY(ps__run_create(&run, r->t->engine, r->schedule, &cfg));
  atomic_store(&r->run, run);
  /* a cancel may have come before there was a run to stop */
  if (atomic_load(&r->t->cancelled))
    ps_run_cancel(run);
  return PS_OK;
}

static ps_status run_groups(ps__replay *r) {
  const uint64_t n = (r->whole->n_sequences + r->layout.n_sequences - 1) / r->layout.n_sequences;
  char message[512];
  ps_status st = PS_OK;
  PS_TRY(begin(r));
  r->first = r->n_steps;
  for (uint64_t i = 0; i < n && st == PS_OK && !r->found; i++) {
    st = ps_run_submit(r->run, 1);
    if (st == PS_OK)
      st = ps_run_wait(r->run, ++r->n_steps);
  }
  snprintf(message, sizeof message, "%s", st == PS_OK ? "" : ps_last_error());
  const ps_status paused = ps__run_pause(r->run);
  return st == PS_OK ? paused : ps__fail(st, "%s", message);
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
  const ps__check *c = &r->step.check[r->check];
  const ps__layout *l = &r->layout;
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
  ps__replay *r = atomic_load(&t->replay);
  const ps__layout *whole = ps__step_size_at(t->plan, t->cfg.first_step + run_step).layout;
  if (!r) {
    r = ps__calloc(1, sizeof *r);
    if (!r)
      return ps__fail(PS_ENOMEM, "out of memory");
    r->t = t;
    r->hooks = (ps__step_hooks){r, hook};
    r->whole = whole;
    atomic_store(&t->replay, r);
  }
  if (!r->schedule)
    PS_TRY(build(r));
  r->run_step = run_step;
  r->whole = whole;
  r->found = false;
  return run_groups(r);
}

void ps__replay_say(ps_trainer *t, uint64_t run_step, uint64_t n_later, char *text, size_t room) {
  char later[64] = "";
  text[0] = 0;
  if (atomic_load(&t->cancelled))
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

void ps__replay_cancel(ps__replay *r) {
  ps_run *run = r ? atomic_load(&r->run) : NULL;
  if (run)
    ps_run_cancel(run);
}

ps_run *ps__replay_run(const ps__replay *r) { return r ? atomic_load(&r->run) : NULL; }

void ps__replay_destroy(ps__replay *r) {
  if (!r)
    return;
  (void)ps_run_destroy(r->run);
  (void)ps_schedule_destroy(r->schedule);
  free_step(r);
  ps__free(r);
}
