/* passes.c - one chunk through one unit, as the unit's layer definition says: forward and backward
 * passes with recomputation. */
#include "step/chunk_pass.h"
#include <string.h>

uint32_t *ps__saved_entry(ps__builder *b, uint32_t *table, uint32_t layer, uint32_t c,
                          uint32_t tensor) {
  return &table[(((size_t)layer - 1) * b->s->spec->n_chunks + c) * b->s->model->max_tensors +
                tensor];
}

static const ps__layer_def *layer_of(const ps__builder *b, uint32_t layer) {
  return ps__layer_of(b->s->model, layer);
}

static const ps__attention_group *group_of(const ps__builder *b, uint32_t c) {
  return &b->s->layout->group[ps__chunk_of(b, c)->group];
}

/* The chunk of the round whose entries hold the group's shared tensors: the group's first. */
static uint32_t group_first(const ps__builder *b, uint32_t c) {
  return group_of(b, c)->first_chunk - b->in->round->first_chunk;
}

static bool last_of_group(const ps__builder *b, uint32_t c) {
  const ps__attention_group *g = group_of(b, c);
  return b->in->round->first_chunk + c == g->first_chunk + g->n_chunks - 1;
}

static bool is_group(const ps__layer_def *d, uint32_t tensor) {
  return ps__rows_of_group(d->tensor[tensor].rows);
}

static bool is_state(const ps__layer_def *d, uint32_t tensor) {
  return d->tensor[tensor].rows == PS__ROWS_STATE;
}

static uint32_t home_chunk(const ps__builder *b, const ps__layer_def *d, uint32_t c,
                           uint32_t tensor) {
  return is_group(d, tensor) ? group_first(b, c) : c;
}

ps_tag ps__chunk_tag(const ps__builder *b, uint32_t unit, uint32_t c, int phase) {
  return (ps_tag){.layer = (int32_t)unit,
                  .round = (int32_t)b->in->round_idx,
                  .chunk = (int32_t)(b->in->round->first_chunk + c),
                  .phase = phase};
}

static int policy_of(const ps__builder *b, uint32_t layer, uint32_t c, uint32_t tensor) {
  const ps__layer_def *d = layer_of(b, layer);
  const int saved = d->tensor[tensor].saved;
  if (saved == PS__NONE || layer < b->first_trained)
    return PS_POLICY_RECOMPUTE; /* below the first trained layer nothing goes back */
  if (is_state(d, tensor) && group_of(b, c)->n_chunks == 1)
    return PS_POLICY_RECOMPUTE; /* nothing reads it */
  const int policy =
      *ps__spec_policy(b->s->spec, layer - 1, home_chunk(b, d, c, tensor), (uint32_t)saved);
  if (policy != PS_POLICY_HOST_FIRST_ROUND)
    return policy;
  return b->in->round_idx < b->s->layout->first_rounds ? PS_POLICY_HOST : PS_POLICY_RECOMPUTE;
}

uint64_t ps__chunk_tensor_bytes(const ps__builder *b, const ps__layer_def *d, uint32_t c,
                                uint32_t tensor) {
  const uint64_t row = d->tensor[tensor].row_bytes;
  switch (d->tensor[tensor].rows) {
  case PS__ROWS_GROUP: return row * group_of(b, c)->n_rows;
  case PS__ROWS_STATE: return row * (group_of(b, c)->n_chunks + 1);
  case PS__ROWS_CARRY:
  case PS__ROWS_ONE:
  case PS__ROWS_PASS:
  case PS__ROWS_STEP: return row;
  default: return row * ps__chunk_of(b, c)->n_tokens;
  }
}

/* ---- what passes between blocks -------------------------------------------------------------- */

static bool has_carried(const ps__layer_def *d, uint32_t carried) {
  bool has = false;
  for (uint32_t t = 0; t < d->n_tensors; t++)
    has |= d->tensor[t].carried == carried;
  return has;
}

/* Its life ends with the backward pass of the first block that has it and is trained or, where none
 * is, with the forward pass of the last one. */
void ps__carried_init(ps__builder *b) {
  const uint32_t head = ps__head_layer(b->s->model);
  for (uint32_t i = 1; i < PS__N_CARRIED; i++) {
    uint32_t end = b->first_trained > 1 ? b->first_trained : 1;
    while (end < head && !has_carried(layer_of(b, end), i))
      end++;
    for (uint32_t l = head; end >= head && l-- > 1;)
      end = has_carried(layer_of(b, l), i) ? l : end;
    b->carried_end[i] = end;
  }
}

static uint32_t *carried_entry(const ps__builder *b, const ps__layer_def *d, uint32_t c,
                               uint32_t tensor) {
  return &b->in->carried[(size_t)d->tensor[tensor].carried * b->s->spec->n_chunks +
                         home_chunk(b, d, c, tensor)];
}

static void end_carried(ps__builder *b, uint32_t layer, uint32_t c, bool backward) {
  const ps__layer_def *d = layer_of(b, layer);
  const bool ends = backward || layer < b->first_trained,
             group_over = backward ? ps__chunk_of(b, c)->row0 == 0 : last_of_group(b, c);
  for (uint32_t t = 0; ends && t < d->n_tensors; t++) {
    if (!ps__in(d->carried, t) || b->carried_end[d->tensor[t].carried] != layer ||
        (is_group(d, t) && !group_over))
      continue;
    ps__vt_drop(b, carried_entry(b, d, c, t), 0);
  }
}

/* ---- bytes and rows -------------------------------------------------------------------------- */

/* The chunk's row of a state; with @before that of the chunk before it, of the first one row 0. */
static ps__vaccess state_row(const ps__builder *b, const ps__layer_def *d, uint32_t c,
                             uint32_t tensor, uint32_t vt, uint32_t mode, bool before) {
  const uint64_t row = d->tensor[tensor].row_bytes;
  const uint32_t idx = c - group_first(b, c);
  if (before && idx == 0)
    mode = PS_WRITE; /* not read: nobody has written it */
  return ps__part(vt, mode, row * (idx + !before), row);
}

/* The chunk's own rows of a tensor: all of it, unless it is a group tensor. */
static ps__vaccess own_rows(const ps__builder *b, const ps__layer_def *d, uint32_t c,
                            uint32_t tensor, uint32_t vt, uint32_t mode) {
  const uint64_t row = d->tensor[tensor].row_bytes;
  const ps__chunk *k = ps__chunk_of(b, c);
  if (is_state(d, tensor))
    return state_row(b, d, c, tensor, vt, mode, false);
  if (d->tensor[tensor].rows != PS__ROWS_GROUP)
    return ps__part(vt, mode, 0, ps__chunk_tensor_bytes(b, d, c, tensor));
  return ps__part(vt, mode, row * k->row0, row * k->n_tokens);
}

/* Host memory for a saved activation that layer @from made. In round 0 it is an alias of the
 * gradient of the layer's largest unit on the host. That has no contribution yet, and the update
 * that read the last step's gradient came before the layer's forward pass, unless it was split. The
 * gradient is needed from the layer's backward pass on, when the activation is fetched for the last
 * time. With several contributions a round the first one would come amid the backward pass: then
 * there is no alias. */
static uint32_t host_of_saved(ps__builder *b, uint32_t from, uint64_t bytes) {
  const uint32_t unit = ps__lending_unit(b->s->model, from), grad = b->s->unit_host[unit].grad;
  ps__unit_progress *u = &b->unit[unit];
  const bool free = b->in->round_idx == 0 && b->in->round->n_chunks <= b->s->sums.additions &&
                    from > 0 && grad != PS__NO_VT && !b->s->spec->update_split[unit] &&
                    !ps__stages_total(b->s->spec, unit);
  if (!free || u->alias_bytes + bytes > b->s->vt[grad].bytes)
    return ps__vt_new(b, b->s->at->host, bytes);
  const uint64_t at = u->alias_bytes;
  u->alias_bytes += (bytes + 255) / 256 * 256;
  return ps__vt_alias(b, grad, at, bytes);
}

void ps__send_saved(ps__builder *b, uint32_t layer, uint32_t c, uint32_t tensor, uint32_t vt) {
  const ps__layer_def *d = layer_of(b, layer);
  if (policy_of(b, layer, c, tensor) != PS_POLICY_HOST)
    return;
  uint32_t *away = ps__saved_entry(b, b->in->away, layer, home_chunk(b, d, c, tensor), tensor);
  if (*away == PS__NO_VT)
    *away = host_of_saved(b, (int)tensor == d->input ? layer - 1 : layer,
                          ps__chunk_tensor_bytes(b, d, c, tensor));
  ps__emit_copy(b, b->on->at.to_host, own_rows(b, d, c, tensor, vt, PS_READ),
                own_rows(b, d, c, tensor, *away, PS_WRITE),
                ps__about(ps__chunk_tag(b, layer, c, PS__PHASE_FORWARD),
                          d->saved[d->tensor[tensor].saved].name));
}

void ps__send_input(ps__builder *b, uint32_t layer, uint32_t c) {
  if (layer <= b->s->spec->n_layers)
    ps__send_saved(b, layer, c, (uint32_t)layer_of(b, layer)->input, b->in->x[c]);
}

/* The gradient of chunk @c goes to the layer below, if that has a backward pass. The embedding is
 * on the device of the first block. */
void ps__chunk_hand_back(ps__builder *b, uint32_t layer, uint32_t c, int phase) {
  if (layer > 1 && layer > b->first_trained)
    ps__hand_on(b, layer - 1, true, c, b->s->spec->grad_lag,
                ps__about(ps__chunk_tag(b, layer, c, phase), "gradients of activations"));
}

/* ---- binding and emitting a layer's ops ------------------------------------------------------ */

typedef struct listed {
  const ps__op_def *op;
  bool recompute;
} listed; /* recompute: the op runs for the second time */

static ps__vaccess span_access(const ps__builder *b, const ps__chunk_pass *p, ps__sym y) {
  const ps__span_def *span = &p->d->span[y.id];
  const uint32_t unit = ps__unit_of_span(b->s->model, p->layer, span);
  const ps__unit_copy *u = &b->on->unit[unit];
  const ps__recipe *r = b->s->recipe;
  if (y.kind == PS__SYM_PARAM && u->dense != PS__NO_VT)
    return ps__elements(u->dense, y.mode, r->weights, span->offset, span->n);
  if (y.kind == PS__SYM_PARAM)
    return ps__elements(u->weights, y.mode, ps__unit_storage(b->s->model, unit, r->weights),
                        span->offset, span->n);
  return ps__elements(u->grad, p->shape.first_grad ? PS_WRITE : PS_READ_WRITE, r->grad,
                      span->offset, span->n);
}

static ps__vaccess batch_access(const ps__builder *b, const ps__chunk_pass *p, ps__sym y) {
  const ps__batch_chunk f = ps__batch_chunk_of(ps__chunk_of(b, p->c)->n_tokens);
  const uint64_t at[] = {[PS__BATCH_TOKENS] = f.tokens,
                         [PS__BATCH_TARGETS] = f.targets,
                         [PS__BATCH_DOC_START] = f.doc_start,
                         [PS__BATCH_POSITION] = f.position,
                         [PS__BATCH_SCALE] = f.scale};
  if (y.id == PS__BATCH_SCALE)
    return ps__part(*ps__batch_of(b, p->c), PS_READ, f.scale, 4);
  return ps__part(*ps__batch_of(b, p->c), PS_READ, at[y.id] + 4ull * p->slice_row,
                  4ull * p->shape.n_tokens);
}

static bool is_counter(ps__sym y) { return y.kind == PS__SYM_FLUSHED || y.kind == PS__SYM_ROUTED; }

static ps__vaccess counter_access(const ps__builder *b, const ps__chunk_pass *p, ps__sym y) {
  const ps_model *m = b->s->model;
  const uint64_t first = 8ull * ps__n_counters(m) * p->layer, routed = 8ull * ps__routed_at(m);
  return y.kind == PS__SYM_FLUSHED
             ? ps__part(b->on->counters, PS_READ_WRITE, first, 8ull * ps__n_flushed(m))
             : ps__part(b->on->counters, PS_READ_WRITE, first + routed, 8ull * m->cfg.n_experts);
}

static ps__vaccess tensor_access(const ps__builder *b, const ps__chunk_pass *p, ps__sym y,
                                 bool sliced) {
  const ps__tensor_def *t = &p->d->tensor[y.id];
  const uint32_t vt = p->bound[y.id];
  if (y.skip)
    return ps__part(vt, y.mode, y.skip, ps__chunk_tensor_bytes(b, p->d, p->c, y.id) - y.skip);
  if (y.kind == PS__SYM_BEFORE)
    return state_row(b, p->d, p->c, y.id, vt, y.mode, true);
  if (ps__in(p->d->grad_carried, y.id) && y.mode == PS_WRITE && !ps__in(p->fresh, y.id))
    y.mode = PS_READ_WRITE;
  if (t->rows == PS__ROWS_CARRY)
    return ps__whole(b, vt, p->shape.first_dkv ? PS_WRITE : PS_READ_WRITE);
  if (y.kind == PS__SYM_PREFIX)
    return ps__part(vt, y.mode == PS_WRITE && !p->shape.first_dkv ? PS_READ_WRITE : y.mode, 0,
                    t->row_bytes * (p->shape.row0 + p->shape.n_tokens));
  if (sliced && t->rows == PS__ROWS_TOKEN)
    return ps__part(vt, y.mode, t->row_bytes * p->slice_row, t->row_bytes * p->shape.n_tokens);
  if (t->rows == PS__ROWS_SLICE)
    return ps__whole(b, vt, y.mode);
  return own_rows(b, p->d, p->c, y.id, vt, y.mode);
}

/* A sum of squares of what @op wrote: it is not finite where a value is not. */
static void check_result(ps__builder *b, const ps__chunk_pass *p, const ps__op_def *op, ps__sym y,
                         const ps__vaccess *written, int phase) {
  ps__step *s = b->s;
  const bool tensor = ps__sym_is_tensor(y);
  const ps_dtype dt = tensor ? p->d->tensor[y.id].dt : s->dt;
  const ps__args_sumsq a = {.n = written->bytes / ps_dtype_bytes(dt), .dt = dt};
  const ps_tag tag = ps__chunk_tag(b, p->layer, p->c, phase);
  if (!PS_GROW(s->check, s->n_checks, s->cap_checks)) {
    s->out_of_memory = true;
    return;
  }
  const ps__vaccess access[2] = {ps__part(written->vt, PS_READ, written->offset, written->bytes),
                                 ps__part(b->checks, PS_WRITE, 8 * s->n_checks, 8)};
  s->check[s->n_checks++] = (ps__check){tag, op->kernel};
  ps__emit(b, &ps__k_sumsq, b->on->at.compute, &a, sizeof a, access, 2, tag);
}

/* A frozen parameter's gradient that no op reads is not checked, and neither are FP8 values: they
 * are finite where what they were made of is. */
static void check_results(ps__builder *b, const ps__chunk_pass *p, const ps__op_def *op,
                          const ps__vaccess *access, int phase) {
  for (uint32_t i = 0; i < op->n_syms; i++) {
    const ps__sym y = op->sym[i];
    const bool unread =
        ps__sym_is_tensor(y) && op->has_unread && strcmp(p->d->tensor[y.id].name, "unread") == 0;
    const bool wide = !ps__sym_is_tensor(y) || p->d->tensor[y.id].dt < PS_N_DTYPES;
    if ((y.mode & PS_WRITE) && !unread && wide && !is_counter(y))
      check_result(b, p, op, y, &access[i], phase);
  }
}

/* An op that runs again counts nothing: it lacks the counters, its last symbol. */
static uint32_t n_accesses(const ps__op_def *op, bool again) {
  return op->n_syms - (again && op->sym[op->n_syms - 1].kind == PS__SYM_FLUSHED);
}

void ps__chunk_emit(ps__builder *b, const ps__chunk_pass *p, const ps__op_def *op, int phase) {
  ps__vaccess access[PS__OP_MAX_SYMS];
  _Alignas(16) char args[PS__ARGS_BYTES];
  ps__chunk_shape shape = p->shape;
  shape.again = phase == PS__PHASE_RECOMPUTE;
  const uint32_t n = n_accesses(op, shape.again);
  for (uint32_t i = 0; i < n; i++) {
    const ps__sym y = op->sym[i];
    access[i] = y.kind == PS__SYM_BATCH ? batch_access(b, p, y)
                : is_counter(y)         ? counter_access(b, p, y)
                : ps__sym_is_tensor(y)  ? tensor_access(b, p, y, op->sliced)
                                        : span_access(b, p, y);
  }
  shape.first_grad |= op->has_unread;
  for (uint32_t i = 0; i < n; i++)
    if (ps__sym_is_tensor(op->sym[i]) && op->sym[i].mode & PS_WRITE &&
        ps__in(p->d->grad_carried, op->sym[i].id))
      shape.first_grad = ps__in(p->fresh, op->sym[i].id);
  ps__op_args(op, &shape, args);
  ps__emit(b, op->kernel, b->on->at.compute, args, op->args_bytes, access, n,
           ps__about(ps__chunk_tag(b, p->layer, p->c, phase), op->what));
  if (b->s->spec->checked)
    check_results(b, p, op, access, phase);
}

/* The tensors that an op uses and nobody made are made. */
void ps__chunk_make_tensors(ps__builder *b, ps__chunk_pass *p, const ps__op_def *op) {
  for (uint32_t j = 0; j < op->n_syms; j++) {
    const uint32_t id = op->sym[j].id;
    if (!ps__sym_is_tensor(op->sym[j]) || p->bound[id] != PS__NO_VT)
      continue;
    const uint64_t bytes = p->d->tensor[id].rows == PS__ROWS_SLICE
                               ? p->d->tensor[id].row_bytes * p->shape.n_tokens
                               : ps__chunk_tensor_bytes(b, p->d, p->c, id);
    p->bound[id] = ps__vt_new(b, b->on->at.place, bytes);
  }
}

/* Emit a list: a tensor dies after its last use in the list, and is sent to the host after its last
 * write. */
static void emit_list(ps__builder *b, ps__chunk_pass *p, const listed *list, uint32_t n, int phase,
                      bool send) {
  uint32_t last_use[PS__SET_BITS] = {0}, last_write[PS__SET_BITS] = {0};
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t j = 0; j < list[i].op->n_syms; j++) {
      const ps__sym y = list[i].op->sym[j];
      if (!ps__sym_is_tensor(y))
        continue;
      last_use[y.id] = i;
      if (y.mode & PS_WRITE)
        last_write[y.id] = i;
    }
  for (uint32_t i = 0; i < n; i++) {
    const ps__op_def *op = list[i].op;
    ps__chunk_make_tensors(b, p, op);
    ps__chunk_emit(b, p, op, list[i].recompute ? PS__PHASE_RECOMPUTE : phase);
    for (uint32_t j = 0; j < op->n_syms; j++) {
      const uint32_t id = op->sym[j].id;
      if (!ps__sym_is_tensor(op->sym[j]))
        continue;
      if (send && (op->sym[j].mode & PS_WRITE) && last_write[id] == i)
        ps__send_saved(b, p->layer, p->c, id, p->bound[id]);
      if (last_use[id] != i || ps__in(p->keep, id) || p->bound[id] == PS__NO_VT)
        continue;
      const bool to_host = send && policy_of(b, p->layer, p->c, id) == PS_POLICY_HOST;
      ps__vt_drop(b, &p->bound[id], to_host ? b->s->spec->saved_lag : 0);
    }
  }
}

static uint32_t *of_step(const ps__builder *b, uint32_t layer, uint32_t tensor) {
  return &b->on->of_step[(size_t)layer * b->s->model->max_tensors + tensor];
}

static uint32_t *of_pass(const ps__builder *b, uint32_t layer) {
  return b->on->of_pass[layer != b->in->now->layer];
}

ps__chunk_pass ps__chunk_begin(ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__chunk *k = ps__chunk_of(b, c);
  const ps__attention_group *g = group_of(b, c);
  ps__chunk_pass p = {.d = layer_of(b, layer), .layer = layer, .c = c};
  p.shape = (ps__chunk_shape){
      .n_tokens = k->n_tokens,
      .row0 = k->row0,
      .first_grad = ps__contribution_begins(b, c),
      .first_dkv = k - b->s->layout->chunk == g->first_chunk + g->n_chunks - 1,
      .document_rows = b->s->spec->one_document ? (uint32_t)b->s->layout->seq_len : 0,
      .step_tokens = (uint32_t)(b->s->layout->n_tokens * b->s->spec->n_hosts)};
  for (uint32_t t = 0; t < p.d->n_tensors; t++)
    p.bound[t] = ps__in(p.d->of_step, t)   ? *of_step(b, layer, t)
                 : ps__in(p.d->carried, t) ? *carried_entry(b, p.d, c, t)
                                           : of_pass(b, layer)[t];
  for (uint32_t t = 0; t < p.d->n_tensors; t++)
    if (ps__in(p.d->grad_carried, t) && p.bound[t] == PS__NO_VT)
      ps__put(&p.fresh, t);
    else if (ps__in(p.d->grad_carried, t) && is_group(p.d, t))
      p.shape.first_dkv = false; /* blocks after this one have added to it */
  return p;
}

/* Whether a chunk before has run the op for the whole layer pass, or step. */
bool ps__chunk_done(const ps__chunk_pass *p, const ps__op_def *op) {
  bool done = ps__op_of_pass(p->d, op);
  for (uint32_t j = 0; done && j < op->n_syms; j++)
    done = !(op->sym[j].mode & PS_WRITE) || p->bound[op->sym[j].id] != PS__NO_VT;
  return done;
}

/* What the chunk's ops made for the whole layer pass, and for the step. */
void ps__chunk_keep_of_pass(ps__builder *b, const ps__chunk_pass *p) {
  for (uint32_t t = 0; t < p->d->n_tensors; t++)
    if (ps__in(p->d->of_pass, t))
      of_pass(b, p->layer)[t] = p->bound[t];
    else if (ps__in(p->d->carried, t))
      *carried_entry(b, p->d, p->c, t) = p->bound[t];
    else if (ps__in(p->d->of_step, t))
      *of_step(b, p->layer, t) = p->bound[t];
}

void ps__end_rounds(ps__builder *b) {
  const size_t n = (size_t)b->s->model->n_layers * b->s->model->max_tensors;
  for (uint32_t d = 0; d < ps__n_devices(b); d++)
    for (size_t i = 0; i < n; i++)
      ps__vt_free(b, b->dev[d].of_step[i]);
}

void ps__end_layer_pass(ps__builder *b) {
  for (uint32_t i = 0; i < 2; i++)
    for (uint32_t t = 0; t < b->s->model->max_tensors; t++)
      ps__vt_drop(b, &b->on->of_pass[i][t], 0);
}

/* Tensors that outlive a chunk's pass. */
static ps__set outlive(const ps__layer_def *d) {
  return PS__UNION(d->of_pass, d->of_step, d->carried);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* The group's tensors of @set, bound to @p: its first chunk to come makes them, in @table. */
static void bind_group(ps__builder *b, uint32_t *table, ps__chunk_pass *p, ps__set set) {
  for (uint32_t t = 0; t < p->d->n_tensors; t++) {
    if (!ps__in(set, t))
      continue;
    uint32_t *entry = ps__saved_entry(b, table, p->layer, group_first(b, p->c), t);
    if (*entry == PS__NO_VT)
      *entry = ps__vt_new(b, b->on->at.place, ps__chunk_tensor_bytes(b, p->d, p->c, t));
    p->bound[t] = *entry;
  }
}

void ps__forward_chunk(ps__builder *b, uint32_t layer, uint32_t c) {
  ps__chunk_pass p = ps__chunk_begin(b, layer, c);
  const ps__layer_def *d = p.d;
  const uint32_t input = (uint32_t)d->input, output = (uint32_t)d->output;
  if (ps__is_handed_on(b, layer, false, c))
    ps__send_input(b, layer, c);
  bind_group(b, b->in->kept, &p, d->group);
  p.bound[input] = b->in->x[c];
  ps__set saved = {{0}};
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (policy_of(b, layer, c, t) == PS_POLICY_DEVICE)
      ps__put(&saved, t);
  p.keep = PS__UNION(saved, d->group, outlive(d), ps__only(input), ps__only(output));
  listed list[PS__SET_BITS];
  uint32_t n = 0;
  for (uint32_t i = 0; i < d->n_fwd; i++)
    if (!ps__chunk_done(&p, &d->fwd[i]))
      list[n++] = (listed){&d->fwd[i], false};
  emit_list(b, &p, list, n, PS__PHASE_FORWARD, true);
  ps__chunk_keep_of_pass(b, &p);

  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (ps__in(saved, t) && !ps__in(d->group, t) && t != input)
      *ps__saved_entry(b, b->in->kept, layer, c, t) = p.bound[t];
  if (ps__in(saved, input))
    *ps__saved_entry(b, b->in->kept, layer, c, input) = b->in->x[c];
  else
    ps__vt_free_late(b, b->in->x[c], b->s->spec->saved_lag);
  for (uint32_t t = 0; t < d->n_tensors && last_of_group(b, c); t++) {
    if (!ps__in(d->group, t) || ps__in(saved, t))
      continue;
    const bool to_host = policy_of(b, layer, c, t) == PS_POLICY_HOST;
    ps__vt_drop(b, ps__saved_entry(b, b->in->kept, layer, group_first(b, c), t),
                to_host ? b->s->spec->saved_lag : 0);
  }
  end_carried(b, layer, c, false);
  b->in->x[c] = p.bound[output];
  ps__hand_on(b, layer + 1, false, c, b->s->spec->saved_lag,
              ps__about(ps__chunk_tag(b, layer, c, PS__PHASE_FORWARD), "activations"));
  if (!ps__is_handed_on(b, layer + 1, false, c))
    ps__send_input(b, layer + 1, c);
  ps__tick(b);
}

/* ---- backward -------------------------------------------------------------------------------- */

static void fetch_tensor(ps__builder *b, uint32_t layer, uint32_t c, uint32_t tensor) {
  uint32_t *away = ps__saved_entry(b, b->in->away, layer, c, tensor);
  uint32_t *kept = ps__saved_entry(b, b->in->kept, layer, c, tensor);
  if (*away == PS__NO_VT)
    return;
  *kept = ps__vt_new(b, b->on->at.place, b->s->vt[*away].bytes);
  const ps__layer_def *d = layer_of(b, layer);
  const uint64_t first = is_state(d, tensor) ? d->tensor[tensor].row_bytes : 0, /* has no values */
      bytes = b->s->vt[*away].bytes - first;
  ps__emit_copy(b, b->on->at.to_device, ps__part(*away, PS_READ, first, bytes),
                ps__part(*kept, PS_WRITE, first, bytes),
                ps__about(ps__chunk_tag(b, layer, c, PS__PHASE_BACKWARD),
                          d->saved[d->tensor[tensor].saved].name));
  ps__vt_drop(b, away, 0);
}

/* What chunk @c of @layer has saved, and what passes between blocks. */
static ps__set saved_of(const ps__builder *b, uint32_t layer, uint32_t c) {
  ps__set saved = {{0}};
  for (uint32_t t = 0; t < layer_of(b, layer)->n_tensors; t++)
    if (policy_of(b, layer, c, t) != PS_POLICY_RECOMPUTE)
      ps__put(&saved, t);
  return PS__UNION(saved, layer_of(b, layer)->carried);
}

static bool any_uses(const ps__layer_def *d, ps__set ops, uint32_t id, uint32_t mode) {
  bool any = false;
  for (uint32_t i = 0; i < d->n_fwd; i++)
    any |= ps__in(ops, i) && ps__uses(&d->fwd[i], (int)id, mode);
  return any;
}

/* The group's tensors that were not saved and that some chunk of the group needs for its output:
 * all chunks make their rows. */
static ps__set group_again(const ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__layer_def *d = layer_of(b, layer);
  const uint32_t first = group_first(b, c), n = group_of(b, c)->n_chunks;
  ps__set need = {{0}};
  for (uint32_t i = first; i < first + n && !ps__is_empty(d->group); i++) {
    const ps__set saved = saved_of(b, layer, i),
                  ops = ps__recompute(d, ps__only((uint32_t)d->output), saved);
    for (uint32_t t = 0; t < d->n_tensors; t++)
      if (is_group(d, t) && !ps__in(saved, t) && any_uses(d, ops, t, PS_READ))
        ps__put(&need, t);
  }
  return need;
}

/* The forward ops of chunk @c that run again for the layer's output, from what was saved. */
static ps__set ops_again(const ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__layer_def *d = layer_of(b, layer);
  const ps__set need = PS__UNION(ps__only((uint32_t)d->output), group_again(b, layer, c));
  return ps__recompute(d, need, saved_of(b, layer, c));
}

/* The copies stay on the host, for the layer's own backward pass. */
static void fetch_again(ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__layer_def *d = layer_of(b, layer);
  const ps__set ops = ops_again(b, layer, c);
  for (uint32_t t = 0; t < d->n_tensors; t++) {
    const uint32_t home = home_chunk(b, d, c, t),
                   away = *ps__saved_entry(b, b->in->away, layer, home, t);
    uint32_t *again = ps__saved_entry(b, b->in->again, layer, home, t);
    if (away == PS__NO_VT || *again != PS__NO_VT || !any_uses(d, ops, t, PS_READ))
      continue;
    *again = ps__vt_new(b, b->on->at.place, b->s->vt[away].bytes);
    ps__emit_copy(b, b->on->at.to_device, ps__whole(b, away, PS_READ),
                  ps__whole(b, *again, PS_WRITE),
                  ps__about(ps__chunk_tag(b, layer, c, PS__PHASE_BACKWARD),
                            d->saved[d->tensor[t].saved].name));
  }
}

/* Backward chunk passes of a round are numbered in their order: the last layer first, in each layer
 * the last chunk first. */
void ps__fetch_saved(ps__builder *b, uint32_t step_idx) {
  const uint32_t n = b->in->round->n_chunks, layers = b->s->spec->n_layers;
  if (step_idx >= n * layers)
    return;
  const uint32_t layer = layers - step_idx / n, c = n - 1 - step_idx % n;
  if (layer < b->first_trained)
    return;
  ps__on_device *on = b->on;
  b->on = ps__at_layer(b, b->in, layer);
  const ps__layer_def *d = layer_of(b, layer);
  if (last_of_group(b, c) && ps__input_again(b->s->spec, layer))
    for (uint32_t i = group_first(b, c); i <= c; i++)
      fetch_again(b, layer - 1, i);
  for (uint32_t t = 0; t < d->n_tensors && last_of_group(b, c); t++)
    if (is_group(d, t))
      fetch_tensor(b, layer, group_first(b, c), t);
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (!is_group(d, t))
      fetch_tensor(b, layer, c, t);
  b->on = on;
}

/* Puts on the list the ops that make what @op reads: forward ops below @end, in their order. */
static void list_sources(const ps__layer_def *d, const ps__op_def *op, uint32_t end,
                         ps__set recompute, ps__set *done, ps__set *have, listed *list,
                         uint32_t *n) {
  for (uint32_t j = 0; j < op->n_syms; j++) {
    const ps__sym y = op->sym[j];
    if (!ps__sym_is_tensor(y) || !(y.mode & PS_READ) || ps__in(*have, y.id))
      continue;
    for (uint32_t i = 0; i < end; i++) {
      if (!ps__in(recompute, i) || ps__in(*done, i))
        continue;
      bool makes = false;
      for (uint32_t k = 0; k < d->fwd[i].n_syms; k++)
        makes |= d->fwd[i].sym[k].kind == PS__SYM_TENSOR && d->fwd[i].sym[k].id == y.id &&
                 (d->fwd[i].sym[k].mode & PS_WRITE);
      if (!makes)
        continue;
      ps__put(done, i);
      list_sources(d, &d->fwd[i], i, recompute, done, have, list, n);
      list[(*n)++] = (listed){&d->fwd[i], true};
    }
    ps__put(have, y.id);
  }
}

static ps__set tensors_at_hand(const ps__chunk_pass *p) {
  ps__set have = {{0}};
  for (uint32_t t = 0; t < p->d->n_tensors; t++)
    if (p->bound[t] != PS__NO_VT)
      ps__put(&have, t);
  return have;
}

static void bind_kept(ps__builder *b, ps__chunk_pass *p) {
  for (uint32_t t = 0; t < p->d->n_tensors; t++)
    if ((p->d->tensor[t].saved != PS__NONE || is_group(p->d, t)) && !ps__in(p->d->carried, t))
      p->bound[t] = *ps__saved_entry(b, b->in->kept, p->layer, home_chunk(b, p->d, p->c, t), t);
}

static ps__set missing_of_group(ps__builder *b, uint32_t layer, uint32_t first) {
  const ps__layer_def *d = layer_of(b, layer);
  ps__set missing = {{0}};
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (ps__in(d->group, t) && *ps__saved_entry(b, b->in->kept, layer, first, t) == PS__NO_VT)
      ps__put(&missing, t);
  return missing;
}

/* The last chunk's backward pass needs the tensors of its whole group, such as keys and values:
 * recomputes those that are not there. */
static void rebuild_group(ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__layer_def *d = layer_of(b, layer);
  const uint32_t first = group_first(b, c), n = group_of(b, c)->n_chunks;
  const ps__set missing = missing_of_group(b, layer, first);
  if (ps__is_empty(missing))
    return;
  /* all of the group's copies are due now: it may be recomputed from them */
  for (uint32_t i = first; i < first + n; i++)
    for (uint32_t t = 0; t < d->n_tensors; t++)
      if (ps__in(d->group_sources, t) && d->tensor[t].saved != PS__NONE)
        fetch_tensor(b, layer, i, t);
  for (uint32_t i = first; i < first + n; i++) {
    ps__chunk_pass p = ps__chunk_begin(b, layer, i);
    bind_kept(b, &p);
    bind_group(b, b->in->kept, &p, missing);
    const ps__set have = tensors_at_hand(&p),
                  recompute = ps__recompute(d, missing, ps__without(have, missing));
    listed list[PS__SET_BITS];
    uint32_t m = 0;
    for (uint32_t f = 0; f < d->n_fwd; f++)
      if (ps__in(recompute, f))
        list[m++] = (listed){&d->fwd[f], true};
    p.keep = PS__UNION(have, outlive(d));
    emit_list(b, &p, list, m, PS__PHASE_RECOMPUTE, false);
    ps__chunk_keep_of_pass(b, &p);
  }
}

/* Chunk @c runs forward through @layer again, which makes the next layer's input. */
static void run_again(ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__layer_def *d = layer_of(b, layer), *next = layer_of(b, layer + 1);
  const ps__set had = saved_of(b, layer, c), ops = ops_again(b, layer, c);
  ps__chunk_pass p = ps__chunk_begin(b, layer, c);
  bind_kept(b, &p);
  ps__set made = {{0}}; /* of the group */
  for (uint32_t t = 0; t < d->n_tensors; t++) {
    if (p.bound[t] == PS__NO_VT && ps__in(had, t))
      p.bound[t] = *ps__saved_entry(b, b->in->again, layer, home_chunk(b, d, c, t), t);
    if (ps__in(d->group, t) && !ps__in(had, t) && any_uses(d, ops, t, PS_WRITE))
      ps__put(&made, t);
  }
  bind_group(b, b->in->again, &p, made);
  const ps__set at_hand = tensors_at_hand(&p);
  listed list[PS__SET_BITS];
  uint32_t n = 0;
  for (uint32_t i = 0; i < d->n_fwd; i++)
    if (ps__in(ops, i) && !ps__chunk_done(&p, &d->fwd[i]))
      list[n++] = (listed){&d->fwd[i], true};
  p.keep = PS__UNION(at_hand, outlive(d), ps__only((uint32_t)d->output));
  emit_list(b, &p, list, n, PS__PHASE_RECOMPUTE, false);
  ps__chunk_keep_of_pass(b, &p);
  *ps__saved_entry(b, b->in->kept, layer + 1, c, (uint32_t)next->input) = p.bound[d->output];
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (!is_group(d, t) || last_of_group(b, c))
      ps__vt_drop(b, ps__saved_entry(b, b->in->again, layer, home_chunk(b, d, c, t), t), 0);
}

static ps__set states_of(const ps__layer_def *d) {
  ps__set states = {{0}};
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (is_state(d, t))
      ps__put(&states, t);
  return states;
}

void ps__backward_chunk(ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__layer_def *d = layer_of(b, layer);
  const uint32_t first = group_first(b, c);
  if (last_of_group(b, c) && ps__input_again(b->s->spec, layer))
    for (uint32_t i = first; i <= c; i++)
      run_again(b, layer - 1, i);
  if (group_of(b, c)->n_chunks > 1 && last_of_group(b, c))
    rebuild_group(b, layer, c);
  ps__chunk_pass p = ps__chunk_begin(b, layer, c);
  bind_kept(b, &p);
  p.bound[d->grad] = b->in->dy[c];
  bind_group(b, b->in->kept, &p, d->grad_group);
  if (group_of(b, c)->n_chunks == 1)
    bind_group(b, b->in->kept, &p, states_of(d));
  p.keep = PS__UNION(ps__only((uint32_t)d->grad), outlive(d));
  const bool group_over = ps__chunk_of(b, c)->row0 == 0;
  if (!group_over)
    p.keep = PS__UNION(p.keep, d->group, d->grad_group);

  ps__set have = tensors_at_hand(&p), done = {{0}};
  uint32_t n = 0;
  const ps__set recompute = ps__recompute(d, d->needs, have);
  listed list[2 * PS__SET_BITS];
  for (uint32_t i = 0; i < d->n_bwd; i++) {
    if (ps__chunk_done(&p, &d->bwd[i]))
      continue;
    list_sources(d, &d->bwd[i], d->n_fwd, recompute, &done, &have, list, &n);
    list[n++] = (listed){&d->bwd[i], false};
  }
  emit_list(b, &p, list, n, PS__PHASE_BACKWARD, false);
  ps__chunk_keep_of_pass(b, &p);
  for (uint32_t t = 0; t < d->n_tensors; t++) {
    if (!is_group(d, t))
      *ps__saved_entry(b, b->in->kept, layer, c, t) = PS__NO_VT;
    else if (group_over)
      *ps__saved_entry(b, b->in->kept, layer, first, t) = PS__NO_VT;
  }
  end_carried(b, layer, c, true);
  ps__chunk_hand_back(b, layer, c, PS__PHASE_BACKWARD);
  ps__tick(b);
}

/* ---- the embedding on the device ------------------------------------------------------------- */

void ps__look_up(ps__builder *b, uint32_t c) {
  ps__chunk_pass p = ps__chunk_begin(b, 0, c);
  p.shape.first_grad = true;
  ps__chunk_make_tensors(b, &p, &p.d->fwd[0]);
  ps__chunk_emit(b, &p, &p.d->fwd[0], PS__PHASE_FORWARD);
  b->in->x[c] = p.bound[p.d->output];
}

void ps__add_rows(ps__builder *b, uint32_t c) {
  ps__chunk_pass p = ps__chunk_begin(b, 0, c);
  if (p.d->n_bwd == 0) /* frozen */
    return;
  p.bound[p.d->grad] = b->in->dy[c];
  ps__chunk_emit(b, &p, &p.d->bwd[0], PS__PHASE_BACKWARD);
}
