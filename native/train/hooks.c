/* hooks.c - the host ops of a step: its batch, its loss, the gradient norm, the updates, the
 * report. */
#include "train/routing.h"
#include <math.h>

/* ---- clipping by the step before ------------------------------------------------------------- */

/* Whether step @run_step has no norm before it that would clip it. */
static bool updates_nothing(const ps_trainer *t, uint64_t run_step) {
  return t->unclipped && run_step == 0;
}

/* ---- batch ----------------------------------------------------------------------------------- */

static ps_status load_batch(ps_trainer *t, const ps_launch *l) {
  uint64_t valid;
  PS_TRY(ps__batch_read(t, l->step, t->size.layout, &valid));
  ps__batch_fill_part(t, t->size.step, 0, valid, l->ptr[0]);
  if (!t->plan->cfg.hosts)
    PS_TRY(ps__batch_check_valid(t, l->step, valid));
  /* the gates of updates on the device stay closed where none may update */
  *(ps__batch_header *)l->ptr[0] = (ps__batch_header){
      .valid_tokens = valid, .step = updates_nothing(t, l->step) ? 0 : l->step + 1};
  /* units are updated while the step goes on */
  if (!ps__waits_for_norm(t->plan))
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
  const uint32_t v = ps__head_columns(&m->cfg), n = slice_rows(t, first);
  const char *row = l->ptr[0];
  for (uint32_t i = 0; i < n; i++) {
    ps__logits_of(m, t->logits, row + (size_t)i * v * ps_dtype_bytes(m->dt));
    PS_TRY(t->plan->cfg.logits_fn(t->plan->cfg.logits_user, t->cfg.first_step + l->step, first + i,
                                  t->logits, v));
  }
  return PS_OK;
}

/* ---- loss and norm --------------------------------------------------------------------------- */

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
  const bool scores = t->plan->model->cfg.problem != PS_PROBLEM_LANGUAGE,
             terms_too = n_columns > 1 && !scores;
  const double loss = mean[0], e = terms_too ? (double)terms->label_smoothing : 0,
               z_loss = terms_too ? (double)terms->z_loss * mean[1] : 0;
  t->skips.loss_bad = batch->valid_tokens && !isfinite(loss);
  if (t->skips.loss_bad)
    PS_TRY(ps__loss_is_bad(t, l->step, loss, row, n_columns));
  ps__step_stats *stats = l->ptr[2];
  stats->loss = loss;
  stats->z_loss = z_loss;
  stats->right = scores ? mean[1] : NAN;
  stats->objective = terms_too ? (1 - e) * loss + e * mean[2] + z_loss : loss;
  stats->valid_tokens = batch->valid_tokens;
  return PS_OK;
}

/* Ops get the half of stats that they are about, on the host or on the device. */
static ps__step_stats *stats_of(void *second_half) {
  return (ps__step_stats *)(void *)((char *)second_half - offsetof(ps__step_stats, norm));
}

/* As torch.nn.utils.clip_grad_norm_. */
static float clip_scale(const ps_trainer *t, double norm) {
  const double scale = t->plan->cfg.clip_norm / (norm + 1e-6);
  return t->plan->cfg.clip_norm > 0 && scale < 1 ? (float)scale : 1.0f;
}

void ps__clip_begin(ps_trainer *t, double norm) {
  ps__step_stats *stats =
      (ps__step_stats *)(void *)(t->host + t->plan->step.vt[t->plan->step.stats].offset);
  atomic_store(&t->skips.norm, norm);
  if (!ps__clips_by_previous(t->plan))
    return;
  t->unclipped = !isfinite(norm);
  t->clip_scale[0] = stats->clip_scale = t->unclipped ? 0 : clip_scale(t, norm);
  if (t->unclipped)
    ps__log(PS_LOG_WARN,
            "step %llu updates nothing: %s previous clips by the norm of the step before, and "
            "there is none yet",
            (unsigned long long)(t->cfg.first_step + 1), ps__field("clip_by"));
}

static ps_status grad_norm(ps_trainer *t, const ps_launch *l) {
  const double *slots = l->ptr[0];
  double sum = 0;
  ps_status st;
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++)
    sum += ps__unit_sumsq(t, slots + (size_t)u * ps__norm_slots(t->plan->model), u);
  const bool bad = ps__step_is_bad(t, l->step, slots, sum, &st);
  PS_TRY(st);
  const double norm = sqrt(sum);
  ps__step_stats *half = stats_of(l->ptr[1]);
  half->norm = norm;
  /* the gates of this step's updates stay closed: half->step is an earlier step's */
  if (bad)
    return PS_OK;
  half->clip_scale = clip_scale(t, norm);
  t->clip_scale[(l->step + 1) % 2] = half->clip_scale;
  if (ps__waits_for_norm(t->plan))
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
                  .recipe = ps__recipes[t->plan->spec.recipe].arrays,
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

/* What the unit's update by the run's step @id - 1 looks at. @gate: half of stats, or where no
 * update waits for the norm the unit's norms. @header, @last_norm: NULL where the update is on the
 * host, which knows both. On a GPU all are on the device. */
static ps__update_gate gate_of(const ps_trainer *t, uint32_t unit, uint64_t id, void *gate,
                               const ps__batch_header *header, void *last_norm) {
  const float *scale = !ps__clips_by_previous(t->plan) ? NULL
                       : last_norm                     ? &stats_of(last_norm)->clip_scale
                                                       : &t->clip_scale[(id - 1) % 2];
  if (ps__waits_for_norm(t->plan))
    return (ps__update_gate){
        .step = &stats_of(gate)->step, .expected = id, .scale = &stats_of(gate)->clip_scale};
  return (ps__update_gate){.step = header ? &header->step : NULL,
                           .expected = id,
                           .scale = scale,
                           .sumsq = gate,
                           .n_sumsq = t->plan->model->unit[unit].n_spans};
}

/* Rows of a chunk's tokens, with the update of the step before, if there was one and the host
 * did not give it up. The step's first op waits for them, so threads that update help. */
static ps_status gather(ps_trainer *t, uint32_t chunk, const ps_launch *l) {
  const ps__cpu_exec *exec = l->exec;
  ps__update u = update_of(t, l->step ? l->step - 1 : 0);
  const ps__update_gate gate = gate_of(t, 0, l->step, l->ptr[1], NULL, NULL);
  const bool updated = l->step && !updates_nothing(t, l->step - 1) && ps__gate_open(&gate);
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
  const uint32_t n_operands = ps__update_operands(u.optimizer, u.recipe, part,
                                                  on_device && !ps__waits_for_norm(p), operand);
  const ps__arrays a = ps__arrays_of(operand, n_operands, l->ptr);
  const ps__update_gate gate =
      gate_of(t, unit, l->step + 1, ps__operand_ptr(operand, n_operands, PS_OPERAND_GATE, l->ptr),
              ps__operand_ptr(operand, n_operands, PS_OPERAND_HEADER, l->ptr),
              on_device && ps__clips_by_previous(p) ? l->ptr[n_operands] : NULL);
  if (backend == PS_BACKEND_CPU && !ps__gate_open(&gate))
    return gate.step && *gate.step != gate.expected ? PS_OK
                                                    : ps__unit_is_bad(t, l->step, unit, gate.sumsq);
  if (updates_nothing(t, l->step))
    return PS_OK;
  if (unit == 0 && t->rows) {
    if (gate.scale)
      u.grad_scale = *gate.scale;
    ps__rows_update(t, ((const ps__cpu_exec *)l->exec)->pool, (uint32_t)l->step + 1, &u);
    return PS_OK;
  }
  return ps__update_unit[backend](l->exec, &u, t->segments + first, n, &a, t->first_element[unit],
                                  &gate);
}

/* Whether what the update makes of the part is where it stays only once the report runs: it is sent
 * there by a copy, which the report waits for. */
static bool made_by_report(const ps_trainer *t, uint32_t unit, uint32_t part) {
  return ps__updated_on_device(&t->plan->spec, unit) ||
         (part == PS__PART_STATE && t->plan->spec.state_on_disk[unit]);
}

/* On a GPU the submitting thread awaits a part before it launches the part's update. Such an update
 * is done later than this: REPORT says so. An update on the host awaits the part on its stream,
 * which the GPU may wait for, while the writer calls the driver: awaited() of engine/backend.h is
 * for that. */
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
    if (writes[p] && !made_by_report(t, unit, p))
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
        here += (double)counter[((size_t)d * m->n_layers + l) * ps__n_counters(m) + k];
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
  r->right = stats->right;
  r->norm = stats->norm;
  r->lr = ps__lr_at(&t->lr, t->cfg.first_step + l->step);
  r->valid_tokens = stats->valid_tokens;
  r->skipped = t->skips.now;
  r->n_skipped = atomic_load(&t->skips.n);
  if (ps__counts_flushed(t->plan->model))
    report_flushed(t, l->ptr[1], r);
  if (ps__counts_routed(t->plan->model))
    ps__routing_report(t, l->ptr[1], r);
  r->end_ns = ps__engine_now(t->engine, l->stream);
  atomic_store(&t->ended, l->step + 1);
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++)
    for (uint32_t p = 0; p < PS__N_PARTS; p++)
      if (made_by_report(t, u, p))
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
