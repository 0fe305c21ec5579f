/* hooks.c - the host ops of a step: its batch, its loss, the gradient norm, the updates, the
 * report. */
#include "train/trainer.h"
#ifdef PS_CUDA
#  include "optim/cuda_adamw.h"
#endif
#include <math.h>
#include <string.h>

/* ---- batch ----------------------------------------------------------------------------------- */

static ps_status read_dataset(ps_trainer *t, uint64_t step) {
  const uint64_t s = t->plan->cfg.seq_len, n = t->plan->layout.n_sequences,
                 windows = ps_dataset_n_sequences(t->cfg.dataset, s);
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t window =
        ps_dataset_order(windows, step * n + i, t->cfg.seed, (int)t->cfg.shuffle);
    PS_TRY(ps_dataset_read(t->cfg.dataset, s, window, t->tokens + i * s, t->targets + i * s));
  }
  return PS_OK;
}

enum { NOT_COUNTED = -1, TORCH_NOT_COUNTED = -100 /* ignore_index of torch.nn.CrossEntropyLoss */ };

/* Checks tokens and targets, and brings the targets that are not counted to the one value that
 * kernels know. */
static ps_status check_batch(const ps_trainer *t, uint64_t step, uint64_t *valid) {
  const uint64_t n = t->plan->layout.n_tokens, s = t->plan->cfg.seq_len;
  const int32_t vocab = (int32_t)t->plan->model.vocab_size;
  *valid = 0;
  for (uint64_t i = 0; i < n; i++) {
    const int32_t token = t->tokens[i],
                  target = t->targets[i] == TORCH_NOT_COUNTED ? NOT_COUNTED : t->targets[i];
    if (token < 0 || token >= vocab)
      return ps__fail(
          PS_EFORMAT,
          "step %llu, sequence %llu, position %llu: token %d is no id of the vocabulary of %d",
          (unsigned long long)step, (unsigned long long)(i / s), (unsigned long long)(i % s), token,
          vocab);
    if (target < NOT_COUNTED || target >= vocab)
      return ps__fail(PS_EFORMAT,
                      "step %llu, sequence %llu, position %llu: target %d is no id of the "
                      "vocabulary of %d: -1 or -100 says "
                      "that a target is not counted",
                      (unsigned long long)step, (unsigned long long)(i / s),
                      (unsigned long long)(i % s), target, vocab);
    t->targets[i] = target;
    *valid += target >= 0;
  }
  if (*valid == 0)
    return ps__fail(PS_ENUMERIC, "step %llu has no valid target: its loss is undefined",
                    (unsigned long long)step);
  return PS_OK;
}

/* Where each token's document begins, in rows of its group: at its sequence's start, at a
 * document token, or behind a document end token. */
static void fill_block(const ps_trainer *t, const ps__chunk *k, float scale, char *block) {
  const ps__batch_block at = ps__batch_block_of(k->n_tokens);
  const uint64_t s = t->plan->cfg.seq_len;
  int32_t *doc = (int32_t *)(void *)(block + at.doc_start),
          *pos = (int32_t *)(void *)(block + at.position);
  memcpy(block + at.tokens, t->tokens + k->first_token, 4ull * k->n_tokens);
  memcpy(block + at.targets, t->targets + k->first_token, 4ull * k->n_tokens);
  memcpy(block + at.scale, &scale, sizeof scale);
  int64_t start = k->row0;
  /* a slice: the document may have begun before */
  for (uint64_t i = k->first_token; k->row0 && i-- > k->first_token - k->row0;) {
    const bool begins = i == k->first_token - k->row0 || t->tokens[i] == t->cfg.document_token ||
                        t->tokens[i - 1] == t->cfg.document_end_token;
    if (!begins)
      continue;
    start = (int64_t)(i - (k->first_token - k->row0));
    break;
  }
  for (uint32_t i = 0; i < k->n_tokens; i++) {
    const uint64_t g = k->first_token + i;
    const bool sequence = g % s == 0;
    const bool document = t->tokens[g] == t->cfg.document_token ||
                          (!sequence && t->tokens[g - 1] == t->cfg.document_end_token);
    if (sequence || document)
      start = (int64_t)k->row0 + i;
    doc[i] = (int32_t)start;
    pos[i] = (int32_t)((int64_t)k->row0 + i - start);
  }
}

static ps_status load_batch(ps_trainer *t, const ps_launch *l) {
  const uint64_t step = t->cfg.first_step + l->step;
  const ps__layout *layout = &t->plan->layout;
  uint64_t valid;
  PS_TRY(t->cfg.batch_fn
             ? t->cfg.batch_fn(t->cfg.batch_user, step, t->tokens, t->targets, layout->n_tokens)
             : read_dataset(t, step));
  PS_TRY(check_batch(t, step, &valid));
  for (uint32_t i = 0; i < layout->n_chunks; i++)
    fill_block(t, &layout->chunk[i], (float)(1.0 / (double)valid),
               (char *)l->ptr[0] + t->plan->step.batch_offset[i]);
  *(ps__batch_header *)l->ptr[0] = (ps__batch_header){.valid_tokens = valid, .step = l->step + 1};
  /* units are updated while the step goes on */
  if (!t->plan->cfg.clip)
    atomic_store(&t->updating, l->step + 1);
  return PS_OK;
}

/* ---- loss and norm --------------------------------------------------------------------------- */

static ps_status sum_loss(const ps_trainer *t, const ps_launch *l) {
  const ps__batch_header *batch = l->ptr[0];
  const float *row = l->ptr[1];
  double sum = 0;
  for (uint64_t i = 0; i < t->plan->layout.n_tokens; i++)
    sum += row[i];
  const double loss = sum / (double)batch->valid_tokens;
  if (!isfinite(loss))
    return ps__fail(PS_ENUMERIC,
                    "step %llu: the loss is %s; nothing was updated in this step: lower --lr, or "
                    "look at the data",
                    (unsigned long long)(t->cfg.first_step + l->step),
                    isnan(loss) ? "not a number"
                    : loss > 0  ? "infinite"
                                : "minus infinity");
  ps__step_stats *stats = l->ptr[2];
  stats->loss = loss;
  stats->valid_tokens = batch->valid_tokens;
  return PS_OK;
}

static const char *unit_name(const ps_trainer *t, uint32_t unit, char buf[32]) {
  if (unit == 0)
    return "the embedding";
  if (unit > t->plan->model.n_layers)
    return "the head";
  snprintf(buf, 32, "layer %u", unit - 1);
  return buf;
}

static double unit_sumsq(const ps_trainer *t, const double *slots, uint32_t unit) {
  ps__run_info run[PS__NORM_SLOTS];
  const uint32_t n = ps__unit_runs(&t->plan->step.block, &t->plan->model, unit, run);
  double sum = 0;
  for (uint32_t i = 0; i < n; i++)
    sum += slots[i];
  return sum;
}

static ps_status not_finite(const ps_trainer *t, const ps_launch *l, uint32_t unit) {
  char buf[32];
  return ps__fail(
      PS_ENUMERIC,
      "step %llu: the gradient of %s is not finite; %s: lower --lr, or look at the data",
      (unsigned long long)(t->cfg.first_step + l->step), unit_name(t, unit, buf),
      t->plan->cfg.clip ? "nothing was updated in this step"
                        : "the units above it are updated, the others not");
}

/* Ops get the half of stats that they are about, at home or on the device. */
static ps__step_stats *stats_of(void *second_half) {
  return (ps__step_stats *)(void *)((char *)second_half - offsetof(ps__step_stats, norm));
}

static ps_status grad_norm(ps_trainer *t, const ps_launch *l) {
  const double *slots = l->ptr[0];
  double sum = 0;
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++)
    sum += unit_sumsq(t, slots + (size_t)u * PS__NORM_SLOTS, u);
  /* from above, as gradients flow: where it began */
  for (uint32_t u = t->plan->spec.n_units; !isfinite(sum) && u-- > 0;)
    if (!isfinite(unit_sumsq(t, slots + (size_t)u * PS__NORM_SLOTS, u)))
      return not_finite(t, l, u);
  /* as torch.nn.utils.clip_grad_norm_ */
  const double norm = sqrt(sum), scale = t->cfg.clip_norm / (norm + 1e-6);
  ps__step_stats *half = stats_of(l->ptr[1]);
  half->norm = norm;
  half->clip_scale = t->cfg.clip_norm > 0 && scale < 1 ? (float)scale : 1.0f;
  if (t->plan->cfg.clip)
    atomic_store(&t->updating, l->step + 1);
  half->step = l->step + 1;
  return PS_OK;
}

/* ---- updates --------------------------------------------------------------------------------- */

#ifdef PS_CUDA
/* Everything is on the device, the gate too. */
static ps_status update_on_gpu(const ps_trainer *t, uint32_t unit, const ps_launch *l,
                               void *const *gate, const ps__adamw_scalars *s) {
  const ps_plan *p = t->plan;
  const uint32_t first = t->first_segment[unit], n = t->first_segment[unit + 1] - first;
  ps__cuda_gate g = {.expected = l->step + 1};
  if (p->cfg.clip) {
    g.step = &stats_of(gate[0])->step;
    g.scale = &stats_of(gate[0])->clip_scale;
  } else {
    ps__run_info run[PS__NORM_SLOTS];
    g.sumsq = gate[0];
    g.n_sumsq = ps__unit_runs(&p->step.block, &p->model, unit, run);
    g.step = &((const ps__batch_header *)gate[1])->step;
  }
  return ps__cuda_adamw_unit(l->exec, (ps_recipe)p->cfg.recipe, t->segments + first, n, l->ptr[0],
                             p->cfg.recipe == PS_RECIPE_FP32_MASTER ? l->ptr[4] : NULL, l->ptr[3],
                             l->ptr[1], l->ptr[2], t->first_element[unit], s, &g);
}
#endif

/* Of the run's step @run_step. Moments begin at zero with the run, whatever steps came before
 * it, and so does the correction of their bias. */
static ps__adamw_scalars scalars_of(const ps_trainer *t, uint64_t run_step) {
  const uint64_t step = t->cfg.first_step + run_step;
  ps__adamw_scalars s = {.lr = (float)ps__lr_at(&t->lr, step),
                         .beta1 = (float)t->cfg.beta1,
                         .beta2 = (float)t->cfg.beta2,
                         .eps = (float)t->cfg.eps,
                         .grad_scale = 1.0f,
                         .seed = t->cfg.seed,
                         .step = step};
  ps__adamw_bias_correction(&s, run_step + 1);
  return s;
}

/* Is the update of the run's step @id - 1 to be made at home, by what @gate says: half of stats,
 * or without clipping the unit's norms? Sets how gradients are scaled. */
static bool to_update(const ps_trainer *t, uint32_t unit, void *gate, uint64_t id,
                      ps__adamw_scalars *s) {
  if (!t->plan->cfg.clip)
    return isfinite(unit_sumsq(t, gate, unit));
  s->grad_scale = stats_of(gate)->clip_scale;
  return stats_of(gate)->step == id;
}

/* Rows of a chunk's tokens, with the update of the step before, if there was one and the host
 * did not give it up. */
static ps_status gather(const ps_trainer *t, uint32_t chunk, const ps_launch *l) {
  const ps__cpu_exec *exec = l->exec;
  ps__adamw_scalars s = {0};
  if (l->step)
    s = scalars_of(t, l->step - 1);
  const bool updated = l->step && to_update(t, 0, l->ptr[1], l->step, &s);
  ps__rows_gather(t, exec->pool, updated ? (uint32_t)l->step : 0, &s, l->ptr[0],
                  t->plan->layout.chunk[chunk].n_tokens, l->ptr[2]);
  return PS_OK;
}

/* A step that the host gave up updates nothing, which counts where ops run on although one
 * before them failed: on GPUs. Without clipping that is known from the batch: of a step that was
 * given up later, units may be updated, as of one that fails half-way. */
static ps_status update(ps_trainer *t, uint32_t unit, const ps_launch *l) {
  const ps__cpu_exec *exec = l->exec;
  const bool master = t->plan->cfg.recipe == PS_RECIPE_FP32_MASTER,
             there = ps__updated_there(&t->plan->spec, unit);
  /* half of stats; or the unit's norms and, on the device, the batch header */
  void *const *gate = l->ptr + 4 + master;
  ps__adamw_scalars s = scalars_of(t, l->step);
#ifdef PS_CUDA
  if (there && t->engine->cfg.backend == PS_BACKEND_CUDA)
    return update_on_gpu(t, unit, l, gate, &s);
#endif
  const bool clip = t->plan->cfg.clip != 0;
  if (there && !clip && ((const ps__batch_header *)gate[1])->step != l->step + 1)
    return PS_OK;
  if (!to_update(t, unit, gate[0], l->step + 1, &s))
    return clip ? PS_OK : not_finite(t, l, unit);
  if (unit == 0 && t->rows) {
    ps__rows_update(t, exec->pool, (uint32_t)l->step + 1, &s);
    return PS_OK;
  }
  const uint32_t first = t->first_segment[unit], n = t->first_segment[unit + 1] - first;
  const ps__adamw_part part = t->plan->spec.update_split[unit] ? PS_ADAMW_WEIGHTS : PS_ADAMW_WHOLE;
  ps__adamw_unit(exec->pool, (ps_recipe)t->plan->cfg.recipe, part, t->segments + first, n,
                 l->ptr[0], master ? l->ptr[4] : NULL, l->ptr[3], l->ptr[1], l->ptr[2],
                 t->first_element[unit], &s);
  return PS_OK;
}

/* What a split update left to do. */
static ps_status update_moments(const ps_trainer *t, uint32_t unit, const ps_launch *l) {
  const ps__cpu_exec *exec = l->exec;
  const uint32_t first = t->first_segment[unit], n = t->first_segment[unit + 1] - first;
  ps__adamw_scalars s = scalars_of(t, l->step);
  if (!to_update(t, unit, l->ptr[3], l->step + 1, &s))
    return PS_OK;
  ps__adamw_unit(exec->pool, (ps_recipe)t->plan->cfg.recipe, PS_ADAMW_MOMENTS, t->segments + first,
                 n, NULL, NULL, l->ptr[2], l->ptr[0], l->ptr[1], t->first_element[unit], &s);
  return PS_OK;
}

static ps_status report(ps_trainer *t, const ps_launch *l) {
  const ps__step_stats *stats = l->ptr[0];
  ps__step_record *r = &t->ring[l->step % PS__RING];
  r->loss = stats->loss;
  r->norm = stats->norm;
  r->lr = ps__lr_at(&t->lr, t->cfg.first_step + l->step);
  r->valid_tokens = stats->valid_tokens;
  r->end_ns = ps__now_ns();
  atomic_store(&t->ended, l->step + 1);
  return PS_OK;
}

ps_status ps__trainer_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch) {
  ps_trainer *t = ctx;
  switch (what) {
  case PS__HOOK_LOAD: return load_batch(t, launch);
  case PS__HOOK_LOSS: return sum_loss(t, launch);
  case PS__HOOK_NORM: return grad_norm(t, launch);
  case PS__HOOK_ADAMW: return update(t, unit, launch);
  case PS__HOOK_MOMENTS: return update_moments(t, unit, launch);
  case PS__HOOK_GATHER: return gather(t, unit, launch);
  default: return report(t, launch);
  }
}
