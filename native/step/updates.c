/* updates.c - the optimizer of each unit. It runs on the host; on the device, where all its state
 * is; or on the device with weights that come for the update and go back after it, and with state
 * that does the same or stays there. With clipping
 * it runs after the whole norm, without clipping after the unit's total. On the host it may run in
 * two parts: what the next forward pass waits for, then the rest. */
#include "step/emit.h"
#include <string.h>

static uint32_t n_states(const ps__builder *b) {
  return ps__optimizers[b->s->spec->optimizer].n_states;
}

static void send_to_host(ps__builder *b, uint32_t from, uint32_t host, ps_tag tag) {
  ps__emit_copy(b, b->on->at.to_host, ps__whole(b, from, PS_READ), ps__whole(b, host, PS_WRITE),
                tag);
  b->last_sent = host;
}

/* The device's copy of the batch header tells an update on the device without clipping whether the
 * host gave the step up. It is not sent before it is needed: the copy waits for the last update of
 * the step before, and what comes after it on the stream would wait too. */
static uint32_t send_header(ps__builder *b, ps_tag tag) {
  const uint64_t bytes = sizeof(ps__batch_header);
  if (b->header != PS__NO_VT)
    return b->header;
  b->header = ps__vt_new(b, b->on->at.place, bytes);
  ps__emit_copy(b, b->on->at.to_device, ps__part(b->s->batch, PS_READ, 0, bytes),
                ps__whole(b, b->header, PS_WRITE), ps__about(tag, "the batch's header"));
  return b->header;
}

/* The norm's half of stats comes to the device. */
static uint32_t send_norm(ps__builder *b, ps_tag tag) {
  const uint32_t there = ps__vt_new(b, b->on->at.place, 64);
  ps__emit_copy(b, b->on->at.to_device, ps__part(b->s->stats, PS_READ, 64, 64),
                ps__whole(b, there, PS_WRITE), ps__about(tag, "the norm"));
  return there;
}

/* Before this step's norm overwrites it: that of the step before. */
static uint32_t send_last_norm(ps__builder *b, ps_tag tag) {
  if (b->last_norm == PS__NO_VT)
    b->last_norm = send_norm(b, tag);
  return b->last_norm;
}

/* A streamed unit's state, master copy and weights come to the device. Weights that its last
 * layer pass fetched are there already and stay, and so does state that is held. */
static void stream_in(ps__builder *b, uint32_t unit) {
  const ps__unit_host *h = &b->s->unit_host[unit];
  ps__update_tensors *at = &b->unit[unit].updated;
  const ps_tag tag = ps__unit_tag(b, unit, PS__PHASE_UPDATE);
  uint32_t *weights = &b->on->unit[unit].weights;
  at->weights =
      *weights != PS__NO_VT ? *weights : ps__bring(b, h->weights, ps__about(tag, "weights"));
  if (!b->s->spec->param_resident[unit])
    *weights = PS__NO_VT;
  if (h->master != PS__NO_VT)
    at->master = ps__bring(b, h->master, ps__about(tag, "master weights"));
  for (uint32_t k = 0; k < n_states(b); k++)
    at->state[k] = b->s->spec->state_held[unit]
                       ? h->state[k]
                       : ps__bring(b, h->state[k], ps__about(tag, "optimizer state"));
}

/* Weights go first: the next step's forward pass waits for them. */
static void stream_out(ps__builder *b, uint32_t unit) {
  const ps__unit_host *h = &b->s->unit_host[unit];
  const ps__update_tensors *at = &b->unit[unit].updated;
  const ps_tag tag = ps__unit_tag(b, unit, PS__PHASE_UPDATE);
  const bool resident = b->s->spec->param_resident[unit], master = h->master != PS__NO_VT;
  const uint32_t lag = b->s->spec->grad_lag,
                 n_moved = b->s->spec->state_held[unit] ? 0 : n_states(b);
  if (!resident || !master || ps__in_halves(b->s->spec->recipe))
    send_to_host(b, at->weights, h->weights, ps__about(tag, "weights"));
  if (master)
    send_to_host(b, at->master, h->master, ps__about(tag, "master weights"));
  for (uint32_t k = 0; k < n_moved; k++)
    send_to_host(b, at->state[k], h->state[k], ps__about(tag, "optimizer state"));
  if (!resident)
    ps__vt_free_late(b, at->weights, lag);
  ps__vt_free_late(b, at->master, lag);
  for (uint32_t k = 0; k < n_moved; k++)
    ps__vt_free_late(b, at->state[k], lag);
}

/* What an update's gate looks at: where it runs on the device @scale, which is the norm's half of
 * stats or, without clipping, the unit's sums of squares. */
static ps__vaccess gate_access(const ps__builder *b, uint32_t unit, uint32_t scale) {
  const ps__step *s = b->s;
  if (ps__updated_on_device(s->spec, unit))
    return ps__whole(b, scale, PS_READ);
  if (s->spec->clip)
    return ps__part(s->stats, PS_READ, 64, 64);
  return ps__part(s->norms, PS_READ, (uint64_t)unit * ps__norm_slots(s->model) * 8,
                  ps__norm_slots(s->model) * 8);
}

/* The op itself: on the host stream over host memory, or on compute over device memory. Where the
 * norm of the step before clips an update on the device, the op reads that after its operands. On
 * the host the trainer has it from the last NORM, which ran on the same stream. */
static void emit_update(ps__builder *b, uint32_t unit, ps__update_part part,
                        const ps__update_tensors *at, uint32_t grad, uint32_t scale) {
  const ps__spec *spec = b->s->spec;
  const bool on_device = ps__updated_on_device(spec, unit), master = at->master != PS__NO_VT;
  const ps_tag tag = ps__unit_tag(b, unit, PS__PHASE_UPDATE);
  ps__operand_access operand[PS_N_OPERANDS];
  ps__vaccess access[PS_N_OPERANDS + 1];
  uint32_t n =
      ps__update_operands(spec->optimizer, spec->recipe, part, on_device && !spec->clip, operand);
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t mode = operand[i].mode;
    switch (operand[i].operand) {
    case PS_OPERAND_WEIGHTS:
      access[i] = ps__whole(b, master ? at->master : at->weights, mode);
      break;
    case PS_OPERAND_GRAD: access[i] = ps__whole(b, grad, mode); break;
    case PS_OPERAND_COPY: access[i] = ps__whole(b, at->weights, mode); break;
    case PS_OPERAND_GATE: access[i] = gate_access(b, unit, scale); break;
    case PS_OPERAND_HEADER: access[i] = ps__whole(b, send_header(b, tag), mode); break;
    default: access[i] = ps__whole(b, at->state[operand[i].operand - PS_OPERAND_STATE], mode);
    }
  }
  if (on_device && spec->clip_previous)
    access[n++] = ps__whole(b, send_last_norm(b, tag), PS_READ);
  ps__emit_hook(b, part == PS_UPDATE_STATE ? PS__HOOK_UPDATE_STATE : PS__HOOK_UPDATE, unit,
                on_device ? b->on->at.compute : b->s->at->host_ops, access, n,
                ps__bytes_work(ps__update_bytes(spec->optimizer, spec->recipe, part) *
                               (double)b->s->unit_host[unit].n),
                tag);
}

static ps__update_tensors on_host(const ps__unit_host *h) {
  ps__update_tensors at = {.weights = h->weights, .master = h->master};
  memcpy(at.state, h->state, sizeof at.state);
  return at;
}

/* @clip_scale: the norm's half of stats on the device; PS__NO_VT without clipping, or where no unit
 * is updated on the device. */
static void update(ps__builder *b, uint32_t unit, uint32_t clip_scale) {
  const ps__step *s = b->s;
  const ps__unit_host *h = &s->unit_host[unit];
  ps__unit_progress *u = &b->unit[unit];
  const ps__update_part part = ps__update_part_of(s->spec, unit);
  const ps__update_tensors host = on_host(h);
  if (s->model->unit[unit].frozen)
    return;
  ps__disk_read_ahead(b, unit);
  if (s->spec->state_on_disk[unit]) {
    ps__update_tensors at = host;
    ps__disk_take(b, unit, at.state);
    emit_update(b, unit, part, &at, h->grad, PS__NO_VT);
    ps__disk_store(b, unit);
    ps__end_host_total(b, unit, s->spec->update_lag);
    return;
  }
  if (!ps__updated_on_device(s->spec, unit)) {
    emit_update(b, unit, part, &host, h->grad, PS__NO_VT);
    ps__end_host_total(b, unit, s->spec->update_lag);
    return;
  }
  if (s->spec->update_resident[unit]) {
    u->updated = host; /* its states are the device's */
    u->updated.weights = h->device_weights[0];
    u->updated.master = h->device_master;
  } else if (u->updated.weights == PS__NO_VT)
    stream_in(b, unit);
  emit_update(b, unit, part, &u->updated, u->total, s->spec->clip ? clip_scale : u->sums);
  ps__vt_free(b, u->total);
  ps__vt_free(b, u->sums);
  const ps_tag tag = ps__unit_tag(b, unit, PS__PHASE_UPDATE);
  if (s->spec->update_streamed[unit])
    stream_out(b, unit);
  else {
    if (h->master == PS__NO_VT || ps__in_halves(s->spec->recipe))
      send_to_host(b, h->device_weights[0], h->weights, ps__about(tag, "weights"));
    if (h->master != PS__NO_VT)
      send_to_host(b, h->device_master, h->master, ps__about(tag, "master weights"));
  }
}

/* Without clipping: updates the streamed units whose state has had its time to arrive. */
static void update_arrived(ps__builder *b, bool all) {
  for (; b->n_updated < b->n_coming && (all || b->coming[b->n_updated].when <= b->on->clock);
       b->n_updated++)
    update(b, b->coming[b->n_updated].unit, PS__NO_VT);
}

void ps__total_ready(ps__builder *b, uint32_t unit) {
  const ps__spec *spec = b->s->spec;
  const bool streamed = spec->update_streamed[unit];
  if (streamed && spec->param_lead)
    stream_in(b, unit);
  if (streamed && !spec->clip)
    b->coming[b->n_coming++] =
        (ps__coming){unit, b->on->clock + spec->param_lead * b->in->round->n_chunks};
  else if (!spec->clip)
    update(b, unit, PS__NO_VT);
  update_arrived(b, false);
}

static void emit_split_state(ps__builder *b, uint32_t unit) {
  const ps__unit_host *h = &b->s->unit_host[unit];
  const ps__update_tensors host = on_host(h);
  emit_update(b, unit, PS_UPDATE_STATE, &host, h->grad, PS__NO_VT);
}

/* The sums of squares go to the host, where the report looks at them. */
static void emit_checks(ps__builder *b) {
  const ps__step *s = b->s;
  const ps_tag tag = {.layer = -1, .round = -1, .chunk = -1, .phase = PS__PHASE_UPDATE};
  const uint64_t bytes = 8 * s->n_checks;
  if (s->out_of_memory)
    return;
  b->s->vt[b->checks].bytes = bytes;
  const uint32_t host = ps__vt_new(b, s->at->host, bytes);
  ps__emit_copy(b, b->on->at.to_host, ps__whole(b, b->checks, PS_READ),
                ps__whole(b, host, PS_WRITE), tag);
  const ps__vaccess report = ps__whole(b, host, PS_READ);
  ps__emit_hook(b, PS__HOOK_REPORT, 0, s->at->host_ops, &report, 1, (ps_work){0}, tag);
  ps__vt_free(b, host);
  ps__vt_free(b, b->checks);
  ps__flush_late(b);
}

void ps__emit_updates(ps__builder *b) {
  if (b->s->spec->checked) {
    emit_checks(b);
    return;
  }
  ps__step *s = b->s;
  const uint32_t n_units = s->model->n_units;
  const ps_tag tag = {.layer = -1, .round = -1, .chunk = -1, .phase = PS__PHASE_UPDATE};
  const ps__vaccess half = ps__part(s->stats, PS_WRITE, 64, 64);
  const ps__vaccess norm[2] = {ps__whole(b, s->norms, PS_READ), half};
  bool any_on_device = false;
  for (uint32_t u = 0; u < n_units; u++)
    any_on_device |= ps__updated_on_device(s->spec, u);
  update_arrived(b, true);
  if (s->spec->clip) /* before the norm is known */
    ps__disk_read_ahead(b, 0);
  ps__emit_hook(b, PS__HOOK_NORM, 0, b->s->at->host_ops, norm, 2, (ps_work){0}, tag);
  if (s->spec->clip) {
    const uint32_t scale = any_on_device ? send_norm(b, tag) : PS__NO_VT;
    /* In the order in which the forward pass needs them. Nothing waits for an embedding on the
     * host: ps__gather_round(). */
    for (uint32_t i = 0; i < n_units; i++) {
      update(b, s->spec->embed_on_host ? (i + 1) % n_units : i, scale);
      ps__tick(b);
    }
    ps__vt_free(b, scale);
  }
  ps__vt_free(b, b->header);
  ps__vt_free(b, b->last_norm);
  /* The report ends a step's updates. It comes after the host stream's updates by order. It comes
   * after the last copy of state to the host by reading it, as that stream is in order. */
  ps__vaccess report[4] = {ps__whole(b, s->stats, PS_READ)};
  uint32_t n_read = 1;
  if (s->counters != PS__NO_VT)
    report[n_read++] = ps__whole(b, s->counters, PS_READ);
  if (any_on_device)
    report[n_read++] = ps__whole(b, b->last_sent, PS_READ);
  if (b->last_stored != PS__NO_VT) /* and after the last copy to the disk */
    report[n_read++] = ps__part(b->last_stored, PS_WRITE, 0, PS__SECTOR_BYTES);
  ps__emit_hook(b, PS__HOOK_REPORT, 0, b->s->at->host_ops, report, n_read, (ps_work){0}, tag);
  ps__vt_free(b, b->last_stored);
  /* in the order in which the next step's first backward pass needs the gradients' memory */
  for (uint32_t u = n_units; u-- > 0;)
    if (s->spec->update_split[u])
      emit_split_state(b, u);
  ps__flush_late(b);
}
