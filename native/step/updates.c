/* updates.c - the optimizer of each unit. It runs on the host; on the device, where all its state
 * is; or on the device with weights that come for the update and go back after it, and with state
 * that does the same or stays there. Of several devices one updates the unit (ps__updater()), and
 * its total comes from the host too. With clipping the update runs after the whole norm, without
 * clipping after the unit's total. On the host it may run in two parts: what the next forward pass
 * waits for, then the rest. */
#include "step/emit.h"
#include <string.h>

static uint32_t n_states(const ps__builder *b) {
  return ps__optimizers[b->s->spec->optimizer].n_states;
}

static ps__on_device *updater(ps__builder *b, uint32_t unit) {
  return &b->dev[ps__updater(b->s->spec, unit)];
}

static void send_to_host(ps__builder *b, uint32_t from, uint32_t host, ps_tag tag) {
  ps__emit_copy(b, b->on->at.to_host, ps__whole(b, from, PS_READ), ps__whole(b, host, PS_WRITE),
                tag);
  b->on->last_sent = host;
}

/* The device's copy of the batch header tells an update on the device without clipping whether the
 * host gave the step up. It is not sent before it is needed: the copy waits for the last update of
 * the step before, and what comes after it on the stream would wait too. */
static uint32_t send_header(ps__builder *b, ps_tag tag) {
  const uint64_t bytes = sizeof(ps__batch_header);
  uint32_t *header = &b->on->header;
  if (*header != PS__NO_VT)
    return *header;
  *header = ps__vt_new(b, b->on->at.place, bytes);
  ps__emit_copy(b, b->on->at.to_device, ps__part(b->s->batch, PS_READ, 0, bytes),
                ps__whole(b, *header, PS_WRITE), ps__about(tag, "the batch's header"));
  return *header;
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
  if (b->on->last_norm == PS__NO_VT)
    b->on->last_norm = send_norm(b, tag);
  return b->on->last_norm;
}

/* A total that is complete on the host comes to the device, and without clipping its sums of
 * squares do. */
static void bring_total(ps__builder *b, uint32_t unit) {
  const ps__step *s = b->s;
  ps__unit_progress *u = &b->unit[unit];
  const ps_tag tag = ps__unit_tag(b, unit, PS__PHASE_UPDATE);
  const uint32_t slots = ps__norm_slots(s->model);
  const uint64_t sums = 8ull * s->model->unit[unit].n_spans;
  u->total = ps__bring(b, s->unit_host[unit].grad, ps__about(tag, "gradients"));
  ps__end_host_total(b, unit, s->spec->update_lag);
  if (s->spec->clip)
    return;
  u->sums = ps__vt_new(b, b->on->at.place, 8ull * slots);
  ps__emit_copy(b, b->on->at.to_device, ps__part(s->norms, PS_READ, 8ull * slots * unit, sums),
                ps__part(u->sums, PS_WRITE, 0, sums), ps__about(tag, "sums of squares"));
}

/* Whether the device that updates the unit has its parameters in memory of their own. */
static bool is_resident_there(const ps__builder *b, uint32_t unit) {
  return b->s->unit_host[unit].device_weights[ps__updater(b->s->spec, unit)] != PS__NO_VT;
}

/* A streamed unit's state, master copy and weights come to the device that updates it. Weights that
 * its last layer pass there fetched stay, and so does state that is held. */
static void stream_in(ps__builder *b, uint32_t unit) {
  ps__on_device *running = b->on;
  b->on = updater(b, unit);
  const ps__unit_host *h = &b->s->unit_host[unit];
  ps__update_tensors *at = &b->unit[unit].updated;
  const ps_tag tag = ps__unit_tag(b, unit, PS__PHASE_UPDATE);
  ps__unit_copy *here = &b->on->unit[unit];
  if (here->weights == PS__NO_VT)
    at->weights = ps__bring(b, h->weights, ps__about(tag, "weights"));
  else
    at->weights = here->weights;
  if (!is_resident_there(b, unit))
    here->weights = PS__NO_VT;
  else if (!here->fetched) /* of several devices one may have had no layer pass that reads them */
    ps__emit_copy(b, b->on->at.to_device, ps__whole(b, h->weights, PS_READ),
                  ps__whole(b, at->weights, PS_WRITE), ps__about(tag, "weights"));
  if (h->master != PS__NO_VT)
    at->master = ps__bring(b, h->master, ps__about(tag, "master weights"));
  for (uint32_t k = 0; k < n_states(b); k++)
    at->state[k] = b->s->spec->state_held[unit]
                       ? h->state[k]
                       : ps__bring(b, h->state[k], ps__about(tag, "optimizer state"));
  if (!ps__total_on_device(b->s->spec, unit))
    bring_total(b, unit);
  b->on = running;
}

/* Weights go first: the next step's forward pass waits for them. */
static void stream_out(ps__builder *b, uint32_t unit) {
  const ps__unit_host *h = &b->s->unit_host[unit];
  const ps__update_tensors *at = &b->unit[unit].updated;
  const ps_tag tag = ps__unit_tag(b, unit, PS__PHASE_UPDATE);
  const bool resident = is_resident_there(b, unit), master = h->master != PS__NO_VT;
  const uint32_t lag = b->s->spec->grad_lag,
                 n_moved = b->s->spec->state_held[unit] ? 0 : n_states(b);
  if (!ps__weights_stay(b->s->spec, unit) || !master || ps__in_halves(b->s->spec->recipe))
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

static void update_on_device(ps__builder *b, uint32_t unit) {
  const ps__step *s = b->s;
  const ps__unit_host *h = &s->unit_host[unit];
  ps__unit_progress *u = &b->unit[unit];
  const ps_tag tag = ps__unit_tag(b, unit, PS__PHASE_UPDATE);
  ps__on_device *running = b->on;
  b->on = updater(b, unit);
  if (s->spec->update_resident[unit]) {
    u->updated = on_host(h); /* its states are the device's */
    u->updated.weights = h->device_weights[0];
    u->updated.master = h->device_master;
  } else if (u->updated.weights == PS__NO_VT)
    stream_in(b, unit);
  emit_update(b, unit, ps__update_part_of(s->spec, unit), &u->updated, u->total,
              s->spec->clip ? b->on->clip_scale : u->sums);
  ps__vt_free(b, u->total);
  ps__vt_free(b, u->sums);
  if (s->spec->update_streamed[unit])
    stream_out(b, unit);
  else {
    if (h->master == PS__NO_VT || ps__in_halves(s->spec->recipe))
      send_to_host(b, h->device_weights[0], h->weights, ps__about(tag, "weights"));
    if (h->master != PS__NO_VT)
      send_to_host(b, h->device_master, h->master, ps__about(tag, "master weights"));
  }
  b->on = running;
}

static void update(ps__builder *b, uint32_t unit) {
  const ps__step *s = b->s;
  const ps__unit_host *h = &s->unit_host[unit];
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
  if (ps__updated_on_device(s->spec, unit)) {
    update_on_device(b, unit);
    return;
  }
  emit_update(b, unit, part, &host, h->grad, PS__NO_VT);
  ps__end_host_total(b, unit, s->spec->update_lag);
}

/* Without clipping: updates the streamed units whose state has had its time to arrive. */
static void update_arrived(ps__builder *b, bool all) {
  for (; b->n_updated < b->n_coming; b->n_updated++) {
    const ps__coming *next = &b->coming[b->n_updated];
    if (!all && next->when > updater(b, next->unit)->clock)
      return;
    update(b, next->unit);
  }
}

/* Where an update waits for the norm and its total is on the host, nothing comes before. */
void ps__total_ready(ps__builder *b, uint32_t unit) {
  const ps__spec *spec = b->s->spec;
  const bool streamed = spec->update_streamed[unit];
  if (streamed && spec->param_lead && (!spec->clip || ps__total_on_device(spec, unit)))
    stream_in(b, unit);
  if (streamed && !spec->clip)
    b->coming[b->n_coming++] =
        (ps__coming){unit, updater(b, unit)->clock + spec->param_lead * b->flight->round->n_chunks};
  else if (!spec->clip)
    update(b, unit);
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
  bool on_device[PS_MAX_DEVICES] = {false};
  for (uint32_t u = 0; u < n_units; u++)
    on_device[ps__updater(s->spec, u)] |= ps__updated_on_device(s->spec, u);
  update_arrived(b, true);
  if (s->spec->clip) /* before the norm is known */
    ps__disk_read_ahead(b, 0);
  ps__emit_hook(b, PS__HOOK_NORM, 0, b->s->at->host_ops, norm, 2, (ps_work){0}, tag);
  if (s->spec->clip) {
    for (uint32_t d = 0; d < ps__n_devices(b); d++) {
      b->on = &b->dev[d];
      if (on_device[d])
        b->on->clip_scale = send_norm(b, tag);
    }
    /* In the order in which the forward pass needs them. Nothing waits for an embedding on the
     * host: ps__gather_round(). */
    for (uint32_t i = 0; i < n_units; i++) {
      const uint32_t unit = s->spec->embed_on_host ? (i + 1) % n_units : i;
      update(b, unit);
      b->on = ps__updated_on_device(s->spec, unit) ? updater(b, unit) : b->dev;
      ps__tick(b);
    }
    b->on = b->dev;
  }
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    ps__vt_free(b, b->dev[d].clip_scale);
    ps__vt_free(b, b->dev[d].header);
    ps__vt_free(b, b->dev[d].last_norm);
  }
  /* The report ends a step's updates. It comes after the host stream's updates by order. It comes
   * after each device's last copy of state to the host by reading it, as those streams are in
   * order. */
  ps__vaccess report[3 + PS_MAX_DEVICES] = {ps__whole(b, s->stats, PS_READ)};
  uint32_t n_read = 1;
  if (s->counters != PS__NO_VT)
    report[n_read++] = ps__whole(b, s->counters, PS_READ);
  for (uint32_t d = 0; d < ps__n_devices(b); d++)
    if (on_device[d])
      report[n_read++] = ps__whole(b, b->dev[d].last_sent, PS_READ);
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
