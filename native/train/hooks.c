/* hooks.c - the host ops of a step: its batch, its loss, the gradient norm, the updates, the
 * report. */
#include "train/trainer.h"
#include <math.h>
#include <string.h>

/* ---- batch ----------------------------------------------------------------------------------- */

enum { NOT_COUNTED = -1, TORCH_NOT_COUNTED = -100 /* ignore_index of torch.nn.CrossEntropyLoss */ };

void ps__batch_uncount(const ps_trainer *t, uint64_t i) {
  const uint64_t s = t->plan->cfg.seq_len;
  for (uint64_t k = i * s; k < (i + 1) * s; k++)
    t->targets[k] = NOT_COUNTED;
}

/* A plan that trains nothing measures the data. A pass over it begins with a step, and counts each
 * sequence once: its last step reads what it lacks from the data's beginning, and does not count
 * it. A mix has no end. Gives the place in the order of reading of sequence @pos of the steps. */
static uint64_t place_of(const ps_trainer *t, uint64_t pos, bool *counts) {
  const uint64_t of_step = t->plan->layout.n_sequences * t->plan->cfg.n_hosts,
                 n = ps_dataset_n_sequences(t->cfg.dataset, t->plan->cfg.seq_len),
                 of_pass = (n + of_step - 1) / of_step * of_step;
  *counts = true;
  if (!t->plan->cfg.forward_only || ps_dataset_n_weighted(t->cfg.dataset))
    return pos;
  *counts = pos % of_pass < n;
  return pos / of_pass * n + pos % of_pass % n;
}

static ps_status read_dataset(ps_trainer *t, uint64_t step, uint64_t n) {
  /* of the step's sequences the first are rank 0's */
  const uint64_t s = t->plan->cfg.seq_len,
                 first = ps_plan_sequences_before(t->plan, step) + t->rank * n;
  for (uint64_t i = 0; i < n; i++) {
    bool counts;
    const uint64_t pos = place_of(t, first + i, &counts),
                   window = ps_dataset_at(t->cfg.dataset, s, pos, t->cfg.seed, (int)t->cfg.shuffle);
    PS_TRY(ps_dataset_read(t->cfg.dataset, s, window, t->tokens + i * s, t->targets + i * s,
                           t->begins + i * s));
    if (!counts)
      ps__batch_uncount(t, i);
  }
  return PS_OK;
}

/* Checks the first @n tokens and targets, and brings the targets that are not counted to the one
 * value that kernels know. @what: the batch's name. */
static ps_status check_batch(const ps_trainer *t, const char *what, uint64_t n, uint64_t *valid) {
  const uint64_t s = t->plan->cfg.seq_len;
  const int32_t vocab = (int32_t)t->plan->model->cfg.vocab_size;
  *valid = 0;
  for (uint64_t i = 0; i < n; i++) {
    const int32_t token = t->tokens[i],
                  target = t->targets[i] == TORCH_NOT_COUNTED ? NOT_COUNTED : t->targets[i];
    if (token < 0 || token >= vocab)
      return ps__fail(PS_EFORMAT,
                      "%s, sequence %llu, position %llu: token %d is no id of the vocabulary of %d",
                      what, (unsigned long long)(i / s), (unsigned long long)(i % s), token, vocab);
    if (target < NOT_COUNTED || target >= vocab)
      return ps__fail(PS_EFORMAT,
                      "%s, sequence %llu, position %llu: target %d is no id of the vocabulary of "
                      "%d: -1 or -100 says that a target is not counted",
                      what, (unsigned long long)(i / s), (unsigned long long)(i % s), target,
                      vocab);
    t->targets[i] = target;
    *valid += target >= 0;
  }
  return PS_OK;
}

/* A document begins at token @i of the batch: at its sequence's start, where a mask says so, at a
 * document token, and after a document end token. */
static bool document_begins(const ps_trainer *t, uint64_t i) {
  return i % t->plan->cfg.seq_len == 0 || t->begins[i] || t->tokens[i] == t->cfg.document_token ||
         t->tokens[i - 1] == t->cfg.document_end_token;
}

/* Where each token's document begins, in rows of its group. */
static void fill_block(const ps_trainer *t, const ps__chunk *k, float scale, char *block) {
  const ps__batch_chunk at = ps__batch_chunk_of(k->n_tokens);
  int32_t *doc = (int32_t *)(void *)(block + at.doc_start),
          *pos = (int32_t *)(void *)(block + at.position);
  memcpy(block + at.tokens, t->tokens + k->first_token, 4ull * k->n_tokens);
  memcpy(block + at.targets, t->targets + k->first_token, 4ull * k->n_tokens);
  memcpy(block + at.scale, &scale, sizeof scale);
  int64_t start = k->row0;
  /* a slice: the document may have begun before */
  for (uint64_t i = k->first_token; k->row0 && i-- > k->first_token - k->row0;) {
    if (!document_begins(t, i))
      continue;
    start = (int64_t)(i - (k->first_token - k->row0));
    break;
  }
  for (uint32_t i = 0; i < k->n_tokens; i++) {
    if (document_begins(t, k->first_token + i))
      start = (int64_t)k->row0 + i;
    doc[i] = (int32_t)start;
    pos[i] = (int32_t)((int64_t)k->row0 + i - start);
  }
}

void ps__batch_scale(const ps__step *s, uint64_t valid, void *batch) {
  const float scale = valid ? (float)(1.0 / (double)valid) : 0;
  for (uint32_t i = 0; i < s->layout->n_chunks; i++)
    memcpy((char *)batch + s->batch_offset[i] +
               ps__batch_chunk_of(s->layout->chunk[i].n_tokens).scale,
           &scale, sizeof scale);
}

void ps__batch_fill_part(const ps_trainer *t, const ps__step *s, uint64_t first, uint64_t valid,
                         void *batch) {
  const float scale = valid ? (float)(1.0 / (double)valid) : 0;
  for (uint32_t i = 0; i < s->layout->n_chunks; i++) {
    ps__chunk k = s->layout->chunk[i];
    k.first_token += first;
    fill_block(t, &k, scale, (char *)batch + s->batch_offset[i]);
  }
}

ps_status ps__batch_fill(const ps_trainer *t, const char *what, const ps__step *s, void *batch,
                         uint64_t *valid) {
  PS_TRY(check_batch(t, what, s->layout->n_tokens, valid));
  ps__batch_fill_part(t, s, 0, *valid, batch);
  return PS_OK;
}

static void name_step(const ps_trainer *t, uint64_t run_step, char what[32]) {
  snprintf(what, 32, "step %llu", /* as in the log */
           (unsigned long long)(t->cfg.first_step + run_step + 1));
}

static ps_status read_batch(ps_trainer *t, uint64_t run_step, const ps__layout *l) {
  const uint64_t step = t->cfg.first_step + run_step;
  return t->cfg.batch_fn
             ? t->cfg.batch_fn(t->cfg.batch_user, step, t->tokens, t->targets, l->n_tokens)
             : read_dataset(t, step, l->n_sequences);
}

ps_status ps__batch_read(ps_trainer *t, uint64_t run_step, const ps__layout *l, uint64_t *valid) {
  char what[32];
  name_step(t, run_step, what);
  PS_TRY(read_batch(t, run_step, l));
  return check_batch(t, what, l->n_tokens, valid);
}

ps_status ps__batch_check_valid(const ps_trainer *t, uint64_t run_step, uint64_t valid) {
  char what[32];
  name_step(t, run_step, what);
  return valid || (t->plan->cfg.forward_only && t->cfg.dataset)
             ? PS_OK
             : ps__fail(PS_ENUMERIC,
                        "%s has no valid target: its loss is undefined; mask fewer of its "
                        "tokens, or raise --tokens-per-step",
                        what);
}

static ps_status load_batch(ps_trainer *t, const ps_launch *l) {
  uint64_t valid;
  char what[32];
  name_step(t, l->step, what);
  PS_TRY(read_batch(t, l->step, t->size.layout));
  PS_TRY(ps__batch_fill(t, what, t->size.step, l->ptr[0], &valid));
  if (!t->cfg.hosts)
    PS_TRY(ps__batch_check_valid(t, l->step, valid));
  *(ps__batch_header *)l->ptr[0] = (ps__batch_header){.valid_tokens = valid, .step = l->step + 1};
  /* units are updated while the step goes on */
  if (!t->plan->cfg.clip)
    atomic_store(&t->updating, l->step + 1);
  return PS_OK;
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* The head's slices end with the chunk. */
static uint32_t slice_rows(const ps_trainer *t, uint64_t first) {
  const ps__chunk *k = t->size.layout->chunk;
  while (first >= k->first_token + k->n_tokens)
    k++;
  const uint64_t left = k->first_token + k->n_tokens - first, rows = t->plan->spec.head_slice;
  return (uint32_t)(left < rows ? left : rows);
}

static ps_status give_logits(ps_trainer *t, uint64_t first, const ps_launch *l) {
  const ps_model *m = t->plan->model;
  const uint32_t v = m->cfg.vocab_size, n = slice_rows(t, first);
  const char *row = l->ptr[0];
  for (uint32_t i = 0; i < n; i++) {
    ps__logits_of(m, t->logits, row + (size_t)i * v * ps_dtype_bytes(m->dt));
    PS_TRY(
        t->cfg.logits_fn(t->cfg.logits_user, t->cfg.first_step + l->step, first + i, t->logits, v));
  }
  return PS_OK;
}

/* ---- loss and norm --------------------------------------------------------------------------- */

double ps__sum_rows(const float *row, uint64_t n, uint64_t n_columns) {
  double sum = 0;
  for (uint64_t i = 0; i < n; i++)
    sum += row[i * n_columns];
  return sum;
}

static ps_status sum_loss(ps_trainer *t, const ps_launch *l) {
  const ps__batch_header *batch = l->ptr[0];
  const uint64_t n = t->size.layout->n_tokens, n_columns = ps__loss_row_bytes(t->plan->model) / 4;
  const ps__loss_terms *terms = &t->plan->model->loss;
  const float *row = l->ptr[1];
  double mean[3] = {0};
  for (uint64_t c = 0; c < n_columns; c++)
    mean[c] = ps__sum_rows(row + c, n, n_columns);
  PS_TRY(ps__sum_losses(t, l, mean));
  for (uint64_t c = 0; c < n_columns; c++)
    mean[c] /= (double)batch->valid_tokens;
  const double loss = mean[0], e = n_columns > 1 ? (double)terms->label_smoothing : 0,
               z_loss = (double)terms->z_loss * mean[1];
  t->skips.loss_bad = batch->valid_tokens && !isfinite(loss);
  if (t->skips.loss_bad)
    PS_TRY(ps__loss_is_bad(t, l->step, loss, row, n_columns));
  ps__step_stats *stats = l->ptr[2];
  stats->loss = loss;
  stats->z_loss = z_loss;
  stats->objective = n_columns > 1 ? (1 - e) * loss + e * mean[2] + z_loss : loss;
  stats->valid_tokens = batch->valid_tokens;
  return PS_OK;
}

/* Ops get the half of stats that they are about, on the host or on the device. */
static ps__step_stats *stats_of(void *second_half) {
  return (ps__step_stats *)(void *)((char *)second_half - offsetof(ps__step_stats, norm));
}

static ps_status grad_norm(ps_trainer *t, const ps_launch *l) {
  const double *slots = l->ptr[0];
  double sum = 0;
  ps_status st;
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++)
    sum += ps__unit_sumsq(t, slots + (size_t)u * ps__norm_slots(t->plan->model), u);
  const bool bad = ps__step_is_bad(t, l->step, slots, sum, &st);
  PS_TRY(st);
  /* as torch.nn.utils.clip_grad_norm_ */
  const double norm = sqrt(sum), scale = t->cfg.clip_norm / (norm + 1e-6);
  ps__step_stats *half = stats_of(l->ptr[1]);
  half->norm = norm;
  /* the gates of this step's updates stay closed: half->step is an earlier step's */
  if (bad)
    return PS_OK;
  half->clip_scale = t->cfg.clip_norm > 0 && scale < 1 ? (float)scale : 1.0f;
  if (t->plan->cfg.clip)
    atomic_store(&t->updating, l->step + 1);
  half->step = l->step + 1;
  return PS_OK;
}

/* ---- updates --------------------------------------------------------------------------------- */

/* The run's step @run_step. The correction of AdamW's bias counts the updates that made the state:
 * this run's, and in a resumed run those before it. */
static ps__update update_of(const ps_trainer *t, uint64_t run_step) {
  const uint64_t step = t->cfg.first_step + run_step;
  ps__update u = {.optimizer = t->plan->spec.optimizer,
                  .recipe = ps__recipes[t->plan->cfg.recipe].arrays,
                  .lr = (float)ps__lr_at(&t->lr, step),
                  .beta1 = (float)t->cfg.beta1,
                  .beta2 = (float)t->cfg.beta2,
                  .eps = (float)t->cfg.eps,
                  .momentum = (float)t->cfg.momentum,
                  .nesterov = t->cfg.nesterov != 0,
                  .grad_scale = 1.0f,
                  .seed = t->cfg.seed,
                  .step = step};
  ps__update_correct(&u, t->n_updates + run_step + 1);
  return u;
}

/* What the unit's update by the run's step @id - 1 looks at. @gate: half of stats, or without
 * clipping the unit's norms; @header: NULL where there is none. On a GPU both are on the device. */
static ps__update_gate gate_of(const ps_trainer *t, uint32_t unit, uint64_t id, void *gate,
                               const ps__batch_header *header) {
  if (t->plan->cfg.clip)
    return (ps__update_gate){
        .step = &stats_of(gate)->step, .expected = id, .scale = &stats_of(gate)->clip_scale};
  return (ps__update_gate){.step = header ? &header->step : NULL,
                           .expected = id,
                           .sumsq = gate,
                           .n_sumsq = t->plan->model->unit[unit].n_spans};
}

ps__arrays ps__arrays_on_host(const ps_trainer *t, uint32_t unit) {
  const ps__unit_host *h = &t->plan->step.unit_host[unit];
  ps__arrays a = {.w = ps__array_at(t, unit, PS__ARRAY_UPDATED, 0),
                  .copy =
                      h->master != PS__NO_VT ? ps__array_at(t, unit, PS__ARRAY_WEIGHTS, 0) : NULL,
                  .grad = ps__array_at(t, unit, PS__ARRAY_GRAD, 0)};
  for (uint32_t k = 0; k < ps__optimizers[t->plan->spec.optimizer].n_states; k++)
    a.state[k] = ps__array_at(t, unit, PS__ARRAY_STATE + k, 0);
  return a;
}

/* Rows of a chunk's tokens, with the update of the step before, if there was one and the host
 * did not give it up. The step's first op waits for them, so threads that update help. */
static ps_status gather(ps_trainer *t, uint32_t chunk, const ps_launch *l) {
  const ps__cpu_exec *exec = l->exec;
  ps__update u = update_of(t, l->step ? l->step - 1 : 0);
  const ps__update_gate gate = gate_of(t, 0, l->step, l->ptr[1], NULL);
  const bool updated = l->step && ps__gate_open(&gate);
  for (uint32_t p = 0; updated && p < PS__N_PARTS; p++)
    PS_TRY(ps__hold_wait(t->hold, 0, p, l->step - 1));
  if (updated && gate.scale)
    u.grad_scale = *gate.scale;
  if (!atomic_load(&t->gathering)) {
    ps__pool_share(exec->pool);
    atomic_store(&t->gathering, exec->pool);
  }
  ps__rows_gather(t, exec->pool, updated ? (uint32_t)l->step : 0, &u, l->ptr[0],
                  t->size.layout->chunk[chunk].n_tokens, l->ptr[2]);
  return PS_OK;
}

/* A step that the host gave up updates nothing, which counts where ops run on although one
 * before them failed: on GPUs. Without clipping that is known from the batch: of a step that was
 * given up later, units may be updated, as of one that fails half-way. */
static ps_status update_unit(ps_trainer *t, uint32_t unit, ps__update_part part,
                             const ps_launch *l) {
  const ps_plan *p = t->plan;
  const bool on_device = ps__updated_on_device(&p->spec, unit);
  const uint32_t backend = on_device ? p->hw.backend : PS_BACKEND_CPU,
                 first = t->first_segment[unit], n = t->first_segment[unit + 1] - first;
  ps__update u = update_of(t, l->step);
  u.part = part;
  ps__operand_access operand[PS_N_OPERANDS];
  const uint32_t n_operands =
      ps__update_operands(u.optimizer, u.recipe, part, on_device && !p->cfg.clip, operand);
  const ps__arrays a = ps__arrays_of(operand, n_operands, l->ptr);
  const ps__update_gate gate =
      gate_of(t, unit, l->step + 1, ps__operand_ptr(operand, n_operands, PS_OPERAND_GATE, l->ptr),
              ps__operand_ptr(operand, n_operands, PS_OPERAND_HEADER, l->ptr));
  if (backend == PS_BACKEND_CPU && !ps__gate_open(&gate))
    return gate.step && *gate.step != gate.expected ? PS_OK
                                                    : ps__unit_is_bad(t, l->step, unit, gate.sumsq);
  if (unit == 0 && t->rows) {
    if (gate.scale)
      u.grad_scale = *gate.scale;
    ps__rows_update(t, ((const ps__cpu_exec *)l->exec)->pool, (uint32_t)l->step + 1, &u);
    return PS_OK;
  }
  return ps__update_unit[backend](l->exec, &u, t->segments + first, n, &a, t->first_element[unit],
                                  &gate);
}

/* On a GPU the submitting thread awaits a part before it launches the part's update: no stream that
 * the GPU waits for may depend on the writer, which calls the driver (backends/cuda/device.h). Such
 * an update is done later than this: REPORT says so. */
static ps_status update(ps_trainer *t, uint32_t unit, ps__update_part part, const ps_launch *l) {
  const bool writes[PS__N_PARTS] = {
      [PS__PART_WEIGHTS] = part != PS_UPDATE_STATE, [PS__PART_STATE] = part != PS_UPDATE_WEIGHTS};
  for (uint32_t p = 0; p < PS__N_PARTS; p++)
    if (writes[p])
      PS_TRY(ps__hold_wait(t->hold, unit, p, l->step));
  const ps__cpu_exec *host =
      ps__updated_on_device(&t->plan->spec, unit) ? NULL : (const ps__cpu_exec *)l->exec;
  if (host)
    ps__pool_help_first(host->pool, atomic_load(&t->gathering));
  const ps_status st = update_unit(t, unit, part, l);
  if (host)
    ps__pool_help_first(host->pool, NULL);
  PS_TRY(st);
  for (uint32_t p = 0; p < PS__N_PARTS; p++)
    if (writes[p] && !ps__updated_on_device(&t->plan->spec, unit))
      ps__hold_made(t->hold, unit, p, l->step);
  return PS_OK;
}

/* What FP8 flushed to zero: the part of all counted values, and the largest part of a tensor over
 * the step. */
static void report_flushed(const ps_trainer *t, const uint64_t *counter, ps__step_record *r) {
  const ps_model *m = t->plan->model;
  const uint32_t n_devices = t->plan->at->n_devices;
  double flushed = 0, counted = 0;
  r->flushed_most = 0;
  for (uint32_t l = ps__first_trained(m); l < m->n_layers; l++)
    for (uint32_t k = 0; k < ps__layer_of(m, l)->n_counted; k++) {
      const ps__counted *c = &ps__layer_of(m, l)->counted[k];
      const double n = (double)ps__layer_of(m, l)->tensor[c->tensor].row_bytes *
                       (double)t->size.layout->n_tokens;
      double here = 0;
      for (uint32_t d = 0; d < n_devices; d++)
        here += (double)counter[((size_t)d * m->n_layers + l) * PS__MAX_COUNTED + k];
      flushed += here;
      counted += n;
      if (here / n > r->flushed_most) {
        r->flushed_most = here / n;
        r->flushed_in = c;
        r->flushed_layer = l;
      }
    }
  r->flushed = counted > 0 ? flushed / counted : 0;
}

static ps_status report(ps_trainer *t, const ps_launch *l) {
  const ps__step_stats *stats = l->ptr[0];
  ps__step_record *r = &t->ring[l->step % PS__RING];
  r->loss = stats->loss;
  r->z_loss = stats->z_loss;
  r->objective = stats->objective;
  r->norm = stats->norm;
  r->lr = ps__lr_at(&t->lr, t->cfg.first_step + l->step);
  r->valid_tokens = stats->valid_tokens;
  r->skipped = t->skips.now;
  r->n_skipped = atomic_load(&t->skips.n);
  if (ps__counts_flushed(t->plan->model))
    report_flushed(t, l->ptr[1], r);
  r->end_ns = ps__now_ns();
  atomic_store(&t->ended, l->step + 1);
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++)
    for (uint32_t p = 0; ps__updated_on_device(&t->plan->spec, u) && p < PS__N_PARTS; p++)
      ps__hold_made(t->hold, u, p, l->step);
  ps__hold_reported(t->hold, l->step);
  return PS_OK;
}

ps_status ps__trainer_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *in_run) {
  ps_trainer *t = ctx;
  ps_launch of_trainer = *in_run, *launch = &of_trainer;
  launch->step += t->run_first;
  switch (what) {
  case PS__HOOK_LOAD: return load_batch(t, launch);
  case PS__HOOK_COUNT: return ps__count_targets(t, launch);
  case PS__HOOK_EXCHANGE: return ps__exchange_totals(t, unit, launch);
  case PS__HOOK_LOGITS: return give_logits(t, unit, launch);
  case PS__HOOK_LOSS: return sum_loss(t, launch);
  case PS__HOOK_NORM: return grad_norm(t, launch);
  case PS__HOOK_UPDATE: return update(t, unit, ps__update_part_of(&t->plan->spec, unit), launch);
  case PS__HOOK_UPDATE_STATE: return update(t, unit, PS_UPDATE_STATE, launch);
  case PS__HOOK_GATHER: return gather(t, unit, launch);
  default: return report(t, launch);
  }
}
