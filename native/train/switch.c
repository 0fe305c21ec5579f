/* switch.c - another plan for the steps that follow: between two steps all that outlives a step
 * moves, inside the arenas, from where the old plan has it to where the new one does.
 *
 * The copies are a program of the engine (step/moves.h), so their waits are derived from what they
 * read and write, and each stream copies what is its own. It is made before anything is touched: a
 * switch that has no room leaves all as it was. The run of the copies is not among the trainer's
 * turns, because a cancel half-way would leave weights in neither place. */
#include "generate/generate.h"
#include "step/moves.h"
#include "train/observed.h"
#include <string.h>

/* ---- may it be? ------------------------------------------------------------------------------ */

static bool same_ramp(const ps__guests *a, const ps__guests *b) {
  bool same = a->n_ramp == b->n_ramp;
  for (uint32_t i = 0; same && i < a->n_ramp; i++)
    same = a->ramp[i].n_steps == b->ramp[i].n_steps &&
           a->ramp[i].n_sequences == b->ramp[i].n_sequences;
  return same;
}

static bool same_lora(const ps_lora *a, const ps_lora *b) {
  return a->rank == b->rank && a->targets == b->targets && a->rslora == b->rslora &&
         a->base == b->base && a->alpha == b->alpha;
}

static bool same_on_disk(const ps_plan *a, const ps_plan *b) {
  bool same = (a->at->disk == PS__NO_PLACE) == (b->at->disk == PS__NO_PLACE);
  for (uint32_t u = 0; same && u < a->model->n_units && u < b->model->n_units; u++)
    same = ps__on_disk(a, u) == ps__on_disk(b, u);
  return same;
}

/* Both are plans of one training: what a user asked for is the same. */
static ps_status check_same(const ps_plan *a, const ps_plan *b) {
  const ps_plan_config *x = &a->cfg, *y = &b->cfg;
  const struct {
    const char *what;
    bool same;
  } each[] = {
      {"the model", memcmp(&a->model->cfg, &b->model->cfg, sizeof a->model->cfg) == 0 &&
                        a->model->n_frozen == b->model->n_frozen},
      {"adapters", same_lora(&a->model->lora, &b->model->lora)},
      {"fp8", x->fp8_bf16_first == y->fp8_bf16_first && x->fp8_bf16_last == y->fp8_bf16_last &&
                  x->fp8_bf16_down == y->fp8_bf16_down && x->fp8_head == y->fp8_head &&
                  x->fp8_fast_accumulation == y->fp8_fast_accumulation},
      {"recipe", x->recipe == y->recipe && x->state_bits == y->state_bits},
      {"optimizer", x->optimizer == y->optimizer},
      {"clip_norm",
       x->clip_norm == y->clip_norm && x->clip_by == y->clip_by && x->non_finite == y->non_finite},
      {"the loss", memcmp(&a->model->loss, &b->model->loss, sizeof a->model->loss) == 0},
      {"seq_len", x->seq_len == y->seq_len},
      {"tokens_per_step", a->layout.n_tokens == b->layout.n_tokens},
      {"what is on the disk", same_on_disk(a, b)},
      {"n_devices", a->at == b->at},
      {"the threads", a->hw.n_threads == b->hw.n_threads},
      {"backend", a->hw.backend == b->hw.backend && a->hw.device == b->hw.device},
      {"keep_grads", x->keep_grads == y->keep_grads},
      {"logits_fn", x->logits_fn == y->logits_fn && x->logits_user == y->logits_user},
      {"hosts", x->hosts == y->hosts},
      {"the documents",
       x->document_token == y->document_token && x->document_end_token == y->document_end_token},
      {"one_document", x->one_document == y->one_document},
      {"deterministic", x->deterministic == y->deterministic},
      {"trace_steps", x->trace_steps == y->trace_steps},
      {"val_tokens", x->val_tokens == y->val_tokens},
      {"samples",
       x->sample_sequences == y->sample_sequences && x->sample_context == y->sample_context},
      {"the batch ramp", same_ramp(&a->guests, &b->guests)},
  };
  for (size_t i = 0; i < sizeof each / sizeof *each; i++)
    if (!each[i].same)
      return ps__fail(PS_EINVAL, "the plans differ in more than their decisions: in %s",
                      each[i].what);
  return PS_OK;
}

/* The arenas and scratch that there are hold the plan. */
static ps_status check_room(const ps_trainer *t, const ps_plan *p) {
  char need[32], there[32];
  for (uint32_t i = 0; i < p->at->n_places; i++) {
    const uint64_t bytes = ps_engine_space_bytes(t->engine, i);
    if (p->step.space_bytes[i] <= bytes)
      continue;
    ps__format_bytes_apart(need, p->step.space_bytes[i], there, bytes);
    return ps__fail(PS_EBUDGET,
                    "the arenas leave no room to move: the plan takes %s of %s, and %s "
                    "are reserved",
                    need, i == p->at->host ? "host memory" : "a device", there);
  }
  for (uint32_t i = 0; i < p->at->n_streams; i++)
    if (p->step.scratch_bytes[i] > t->engine->cfg.stream[i].scratch_bytes)
      return ps__fail(PS_EBUDGET,
                      "the arenas leave no room to move: stream %s takes %zu bytes of scratch, and "
                      "%llu are reserved",
                      ps_plan_stream_name(p, i), p->step.scratch_bytes[i],
                      (unsigned long long)t->engine->cfg.stream[i].scratch_bytes);
  return PS_OK;
}

static ps_status may_switch(ps_trainer *t, const ps_plan *p) {
  if (ps_trainer_checkpoint_running(t))
    return ps__fail(PS_EBUSY, "a checkpoint is being written: end it first");
  PS_TRY(check_same(t->plan, p));
  return check_room(t, p);
}

/* ---- what a switch needs, made before anything is touched ------------------------------------ */

typedef struct change {
  ps_schedule *moves; /* NULL: nothing moves */
  uint64_t moved_bytes;
  ps__rows *rows; /* of an embedding that comes to the host */
  struct ps_generator *sampler;
} change;

static void change_free(change *c) {
  (void)ps_schedule_destroy(c->moves);
  ps__rows_destroy(c->rows);
  ps_generator_destroy(c->sampler);
}

static ps_status compile_moves(const ps__moves *copies, const ps__places *at, change *c) {
  ps_program *program = NULL;
  if (!copies->n)
    return PS_OK;
  PS_TRY(ps__moves_program(copies, at, &program));
  const ps_status st = ps_schedule_compile(&c->moves, program);
  ps_program_destroy(program);
  for (size_t i = 0; i < copies->n; i++)
    c->moved_bytes += copies->move[i].bytes;
  return st;
}

static ps_status plan_moves(const ps_trainer *t, const ps_plan *p, change *c) {
  uint64_t space[PS_MAX_PLACES] = {0};
  ps__moves all, copies;
  for (uint32_t i = 0; i < p->at->n_places; i++)
    space[i] = ps_engine_space_bytes(t->engine, i);
  PS_TRY(ps__step_moves(&t->plan->step, &p->step, &all));
  ps_status st = ps__moves_order(&all, p->at, space, PS__PIECE_BYTES, &copies);
  ps__moves_free(&all);
  PS_TRY(st);
  st = compile_moves(&copies, p->at, c);
  ps__moves_free(&copies);
  return st;
}

/* The rows of an embedding that comes to the host have the last step's update. */
static ps_status prepare(ps_trainer *t, ps_plan *p, change *c) {
  PS_TRY(plan_moves(t, p, c));
  if (p->spec.embed_on_host && !t->rows)
    PS_TRY(ps__rows_create(&c->rows, ps__embed_args_of(p->model), p->step.recipe->state[0].block,
                           (uint32_t)t->n_started));
  return p->sampling ? ps__generator_beside(&c->sampler, p->sampling, &t->turns) : PS_OK;
}

/* ---- the switch ------------------------------------------------------------------------------ */

static ps_status run_moves(ps_trainer *t, const change *c) {
  const ps_run_config untraced = {.struct_bytes = sizeof untraced};
  ps_run *run = NULL;
  if (!c->moves)
    return PS_OK;
  PS_TRY(ps__run_create(&run, t->engine, c->moves, &untraced));
  t->torn = true;
  ps_status st = ps_run_submit(run, 1);
  if (st == PS_OK)
    st = ps_run_wait(run, 1);
  (void)ps_run_destroy(run);
  t->torn = st != PS_OK;
  return st;
}

static ps_status take_plan(ps_trainer *t, ps_plan *p, change *c) {
  const bool embed_on_host = p->spec.embed_on_host;
  PS_TRY(ps__turns_close(&t->turns));
  t->run = t->val.run = NULL;
  ps__replay_destroy(t->replay);
  t->replay = NULL;
  struct ps_generator *old = t->sampler;
  t->sampler = c->sampler;
  c->sampler = NULL;
  ps_generator_destroy(old);
  if (c->rows || !embed_on_host) {
    ps__rows_destroy(t->rows);
    t->rows = c->rows;
    c->rows = NULL;
  }
  ps__observer_destroy(t->observer); /* what it knows is of the old plan */
  t->observer = NULL;
  ps__trainer_leave_plan(t);
  t->plan = p;
  t->owns_plan = true;
  ps__trainer_join_plan(t);
  t->n_switches++;
  t->switched_at = t->n_started;
  t->size = ps__step_size_at(p, t->cfg.first_step + t->n_started);
  t->run_first = t->n_started;
  const ps_run_config cfg = ps__trainer_run_config(t, &t->size);
  PS_TRY(ps__observer_create(&t->observer, t));
  return ps__turn_begin(&t->turns, &t->run, t->size.schedule, &cfg);
}

/* Returns the error that leaves all as it was. An error that does not has stopped the trainer. */
static ps_status carry_out(ps_trainer *t, ps_plan *p, change *c) {
  PS_TRY(ps__trainer_pause(t));
  ps_status st = run_moves(t, c);
  if (st != PS_OK && !t->torn) { /* the copies did not begin */
    (void)ps__trainer_go_on(t);
    return st;
  }
  if (st == PS_OK)
    st = take_plan(t, p, c);
  return st == PS_OK ? PS_OK : ps__trainer_stop(t, st);
}

ps_status ps__trainer_switch(ps_trainer *t, ps_plan *plan) {
  change c = {0};
  uint32_t unused = 0;
  PS_TRY(may_switch(t, plan));
  if (!atomic_compare_exchange_strong(&plan->in_use, &unused, 1))
    return ps__fail(PS_EBUSY, "ps_trainer_switch: a trainer runs this plan: make another one");
  const uint64_t begin = ps__now_ns();
  atomic_store(&t->switching, 1);
  ps_status st = prepare(t, plan, &c);
  if (st == PS_OK)
    st = carry_out(t, plan, &c);
  t->switch_s += (double)(ps__now_ns() - begin) * 1e-9;
  change_free(&c);
  atomic_store(&t->switching, 0);
  if (t->plan != plan)
    atomic_store(&plan->in_use, 0);
  return st;
}
