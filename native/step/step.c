/* step.c - the order of a step: rounds of forward passes, head and backward passes; then
 * updates. */
#include "engine/schedule.h"
#include "step/emit.h"
#include <assert.h>
#include <string.h>

/* ---- spec ------------------------------------------------------------------------------------ */

static ps_status spec_alloc(ps__spec *s) {
  const size_t policies = (size_t)s->n_layers * s->n_chunks * s->n_saved;
  s->param_resident = ps__calloc(s->n_units, 1);
  s->grad_resident = ps__calloc(s->n_units, 1);
  s->update_resident = ps__calloc(s->n_units, 1);
  s->update_streamed = ps__calloc(s->n_units, 1);
  s->state_held = ps__calloc(s->n_units, 1);
  s->update_split = ps__calloc(s->n_units, 1);
  s->in_pieces = ps__calloc(s->n_units, 1);
  s->stage_weights = ps__calloc(s->n_units, 1);
  s->state_on_disk = ps__calloc(s->n_units, 1);
  s->policy = ps__calloc(policies, 1);
  if (s->param_resident && s->grad_resident && s->update_resident && s->update_streamed &&
      s->state_held && s->update_split && s->in_pieces && s->stage_weights && s->state_on_disk &&
      s->policy) {
    memset(s->policy, PS_POLICY_RECOMPUTE, policies);
    return PS_OK;
  }
  ps__spec_free(s);
  return ps__fail(PS_ENOMEM, "out of memory for a plan of %u layers and %u chunks", s->n_layers,
                  s->n_chunks);
}

ps_status ps__spec_init(ps__spec *s, const ps_model *m, const ps__layout *l) {
  memset(s, 0, sizeof *s);
  s->model = m;
  s->n_devices = s->n_hosts = 1;
  s->n_units = m->n_units;
  s->n_layers = m->cfg.n_layers;
  s->n_saved = m->max_saved;
  s->n_chunks = l->max_round_chunks;
  PS_TRY(spec_alloc(s));
  for (uint32_t layer = 0; layer < s->n_layers; layer++) {
    const ps__layer_def *d = ps__layer_of(m, layer + 1);
    for (uint32_t c = 0; c < s->n_chunks; c++)
      *ps__spec_policy(s, layer, c, (uint32_t)d->tensor[d->input].saved) = PS_POLICY_DEVICE;
  }
  return PS_OK;
}

ps_status ps__spec_init_beside(ps__spec *s, const ps_model *m, const ps__layout *l,
                               const ps__spec *of) {
  PS_TRY(ps__spec_init(s, m, l));
  s->recipe = of->recipe;
  s->optimizer = of->optimizer;
  s->backend = of->backend;
  s->cudnn_version = of->cudnn_version;
  s->deterministic = of->deterministic;
  s->one_document = of->one_document;
  s->n_devices = of->n_devices;
  s->n_hosts = of->n_hosts;
  s->over_nccl = of->over_nccl;
  s->ring_blocks = of->ring_blocks;
  s->ring_by_host = of->ring_by_host;
  s->chunk_tokens = l->chunk_tokens;
  s->chunks_per_round = l->chunks_per_round;
  s->first_round_chunks = l->first_round_chunks;
  s->first_rounds = l->first_rounds;
  s->head_slice = of->head_slice;
  s->embed_on_host = of->embed_on_host;
  s->pageable = of->pageable;
  s->stage_totals = of->stage_totals;
  s->pinned_weights = of->pinned_weights;
  memcpy(s->stage_weights, of->stage_weights, of->n_units);
  s->disk = of->disk;
  return PS_OK;
}

ps_status ps__spec_copy(ps__spec *dst, const ps__spec *src) {
  *dst = *src;
  PS_TRY(spec_alloc(dst));
  memcpy(dst->param_resident, src->param_resident, src->n_units);
  memcpy(dst->grad_resident, src->grad_resident, src->n_units);
  memcpy(dst->update_resident, src->update_resident, src->n_units);
  memcpy(dst->update_streamed, src->update_streamed, src->n_units);
  memcpy(dst->state_held, src->state_held, src->n_units);
  memcpy(dst->update_split, src->update_split, src->n_units);
  memcpy(dst->in_pieces, src->in_pieces, src->n_units);
  memcpy(dst->stage_weights, src->stage_weights, src->n_units);
  memcpy(dst->state_on_disk, src->state_on_disk, src->n_units);
  memcpy(dst->policy, src->policy, (size_t)src->n_layers * src->n_chunks * src->n_saved);
  return PS_OK;
}

void ps__spec_free(ps__spec *s) {
  ps__free(s->param_resident);
  ps__free(s->grad_resident);
  ps__free(s->update_resident);
  ps__free(s->update_streamed);
  ps__free(s->state_held);
  ps__free(s->update_split);
  ps__free(s->in_pieces);
  ps__free(s->stage_weights);
  ps__free(s->state_on_disk);
  ps__free(s->policy);
  s->param_resident = s->grad_resident = s->update_resident = s->update_streamed = s->state_held =
      s->update_split = s->in_pieces = s->stage_weights = s->state_on_disk = s->policy = NULL;
}

/* ---- rounds ---------------------------------------------------------------------------------- */

static void emit_loss(ps__builder *b) {
  ps__step *s = b->s;
  const ps__vaccess access[3] = {ps__part(s->batch, PS_READ, 0, sizeof(ps__batch_header)),
                                 ps__whole(b, s->row_loss, PS_READ),
                                 ps__part(s->stats, PS_WRITE, 0, 64)};
  const bool exchanges = ps__exchanges(s->spec);
  const double bytes = (double)(ps__loss_row_bytes(s->model) * s->layout->n_tokens);
  ps__emit_hook(b, PS__HOOK_LOSS, 0, exchanges ? b->s->at->net : b->s->at->host_ops, access, 3,
                ps__bytes_work(exchanges ? 0 : bytes),
                (ps_tag){.layer = -1, .round = -1, .chunk = -1, .phase = PS__PHASE_HEAD});
}

/* Whether the head's slices add to a unit of another layer: the table of a tied model. */
static bool slices_add_elsewhere(const ps_model *m) {
  const ps__unit *sliced = &m->unit[ps__sliced_unit(m)];
  return sliced->by_slice && sliced->layer != ps__head_layer(m);
}

static void head_grads_begin(ps__builder *b) {
  ps__layer_grads_begin(b, ps__head_layer(b->s->model));
  if (slices_add_elsewhere(b->s->model))
    ps__grad_begin(b, ps__sliced_unit(b->s->model));
  b->in->head_slices = 0;
  b->in->head_norm = false;
}

static void head_grads_end(ps__builder *b, bool more) {
  ps__layer_grads_end(b, ps__head_layer(b->s->model), more);
  if (slices_add_elsewhere(b->s->model))
    ps__grad_end(b, ps__sliced_unit(b->s->model), more);
}

static void head_pass(ps__builder *b) {
  const ps__step *s = b->s;
  const uint32_t n = b->in->round->n_chunks, head = ps__head_layer(s->model);
  for (uint32_t j = 0; j < s->spec->saved_lead; j++)
    ps__fetch_saved(b, j);
  for (uint32_t c = n; c-- > 0;) {
    const bool goes_on = c + 1 < n && ps__head_goes_on(b, c);
    if (goes_on)
      head_grads_end(b, true);
    b->on = ps__at_chunk(b, b->in, head, c);
    if (goes_on || c + 1 == n)
      head_grads_begin(b);
    ps__head_chunk(b, c);
  }
  if (b->in->round_idx + 1 == s->layout->n_rounds) {
    emit_loss(b);
    if (!s->spec->clip) /* before the first total is complete */
      ps__disk_read_ahead(b, s->model->layer[head].first_unit);
  }
  head_grads_end(b, false);
}

/* The pass of a head that devices share ends on all of them. */
static void end_pass(ps__builder *b, const ps__in_flight *in) {
  const bool shared = ps__is_shared(b, in->now);
  for (uint32_t d = 0; d < (shared ? ps__n_devices(b) : 1); d++) {
    if (shared && !b->has_head[d])
      continue;
    if (shared)
      b->on = &b->dev[d];
    ps__end_layer_pass(b);
    ps__pass_done(b, in->n_done);
  }
}

static void backward_pass(ps__builder *b, uint32_t layer) {
  const uint32_t n = b->in->round->n_chunks, layers = b->s->spec->n_layers;
  ps__make_room(b, layer, true);
  ps__layer_grads_begin(b, layer);
  for (uint32_t c = n; c-- > 0;) {
    const uint32_t j = (layers - layer) * n + (n - 1 - c);
    for (uint32_t k = 0; k <= b->s->spec->saved_lead; k++)
      ps__fetch_saved(b, j + k);
    ps__backward_chunk(b, layer, c);
    if (!ps__contribution_ends(b, c))
      continue;
    ps__layer_grads_end(b, layer, c > 0);
    if (c)
      ps__layer_grads_begin(b, layer);
  }
}

/* The next layer pass of a round begins, if it is in slot @slot. */
static bool begin_pass(const ps__builder *b, ps__in_flight *in, uint32_t slot) {
  if (in->n_done == in->n_passes || in->pass[in->n_done].slot != slot)
    return false;
  in->now = &in->pass[in->n_done];
  in->round_idx = in->now->round;
  in->round = &b->s->layout->round[in->round_idx];
  return true;
}

static void run_pass(ps__builder *b, ps__in_flight *in) {
  const ps__pass *v = in->now;
  const uint32_t n = in->round->n_chunks;
  b->in = in;
  b->on = ps__at_layer(b, in, v->layer);
  ps__dequantize(b, in->n_done);
  switch (v->kind) {
  case PS__PASS_EMBED:
    for (uint32_t c = 0; c < n; c++)
      ps__embed_forward(b, c);
    break;
  case PS__PASS_BLOCK:
    ps__make_room(b, v->layer, false);
    for (uint32_t c = 0; c < n; c++)
      ps__forward_chunk(b, v->layer, c);
    break;
  case PS__PASS_HEAD: head_pass(b); break;
  case PS__PASS_BLOCK_BACK: backward_pass(b, v->layer); break;
  case PS__PASS_EMBED_BACK:
    ps__add_waiting(b);
    for (uint32_t c = n; c-- > 0;) {
      if (!b->s->spec->embed_on_host && ps__contribution_begins(b, c))
        ps__layer_grads_begin(b, 0);
      ps__embed_backward(b, c);
      if (!b->s->spec->embed_on_host && ps__contribution_ends(b, c))
        ps__layer_grads_end(b, 0, c > 0);
    }
    b->embedded++;
    break;
  }
  end_pass(b, in);
  in->n_done++;
}

/* Layer passes slot by slot: program order is that of the sums of gradients, in which round r comes
 * before round r + 1. In a ring the later round of a slot comes first: what the other one sends to
 * its device then has memory of its own. */
static void emit_rounds(ps__builder *b) {
  const uint32_t n = ps__n_devices(b);
  uint32_t n_left = 0, n_done = 0;
  ps__counts_begin(b);
  for (uint32_t i = 0; i < n; i++)
    n_left += b->flight[i].n_passes;
  for (uint32_t slot = 0; n_done < n_left && !b->s->out_of_memory; slot++) {
    const uint32_t n_leaving = b->n_leaving;
    bool runs[PS_MAX_DEVICES];
    for (uint32_t i = 0; i < n; i++)
      n_done += runs[i] = begin_pass(b, &b->flight[i], slot);
    if (runs[0])
      ps__fetch_ahead(b, b->flight[0].n_done);
    for (uint32_t i = 0; i < n; i++) {
      const uint32_t next = b->s->spec->ring_blocks ? n - 1 - i : i;
      if (runs[next])
        run_pass(b, &b->flight[next]);
    }
    b->on = b->dev;
    b->in = b->flight;
    ps__send_pieces(b, n_leaving);
  }
  ps__send_pieces(b, b->n_leaving);
  ps__vt_free(b, b->staged);
  ps__end_rounds(b);
  ps__flush_late(b);
  ps__exchanges_end(b);
  ps__counts_end(b);
  ps__emit_updates(b);
}

/* Persistent tensors of the host that no link touches, and NCCL does not. What runs beside a step
 * copies nothing else: the prologue, a step of the same decisions, one that only goes forward. */
static void mark_pageable(ps__step *s) {
  for (size_t i = 0; i < s->n_vt; i++)
    s->vt[i].pageable = s->vt[i].persistent && !s->vt[i].alias_of && s->vt[i].space == s->at->host;
  for (size_t i = 0; i < s->n_op; i++) {
    const ps__vop *op = &s->op[i];
    if (!ps__link_of(s->at, op->stream) && !(op->stream == s->at->net && s->spec->over_nccl))
      continue;
    for (uint32_t a = op->access; a < op->access + op->n_access; a++) {
      ps__vt *t = &s->vt[s->access[a].vt];
      while (t->alias_of)
        t = &s->vt[t->alias_of - 1];
      t->pageable = false;
    }
  }
  for (uint32_t u = 0; u < s->spec->n_units; u++) {
    const ps__unit_host *h = &s->unit_host[u];
    if (ps__weights_stay(s->spec, u) || s->spec->pinned_weights)
      s->vt[h->weights].pageable = false;
    if (s->spec->update_resident[u] && h->master != PS__NO_VT)
      s->vt[h->master].pageable = false;
  }
  for (size_t i = 0; i < s->n_vt; i++)
    if (s->vt[i].pageable)
      s->pageable_bytes += ps__memmap_aligned(s->vt[i].bytes);
}

static void count_saved(ps__step *s) {
  for (uint32_t layer = ps__first_saving(s->model); layer < s->spec->n_layers; layer++) {
    const ps__layer_def *d = ps__layer_of(s->model, layer + 1);
    for (uint32_t c = 0; c < s->layout->round[0].n_chunks; c++)
      for (uint32_t i = 0; i < d->n_saved; i++)
        s->saved_bytes[*ps__spec_policy(s->spec, layer, c, i)] +=
            ps__saved_bytes(&d->saved[i], s->layout->chunk[c].n_tokens);
  }
}

static bool device_init(ps__on_device *on, const ps__step *s) {
  const size_t of_step = (size_t)s->model->n_layers * s->model->max_tensors;
  on->header = on->last_norm = on->clip_scale = on->last_sent = PS__NO_VT;
  on->batch = ps__malloc(s->layout->n_chunks * sizeof *on->batch);
  on->of_step = ps__malloc(of_step * sizeof *on->of_step);
  if (!on->batch || !on->of_step)
    return false;
  for (size_t i = 0; i < of_step; i++)
    on->of_step[i] = PS__NO_VT;
  for (size_t i = 0; i < PS__SET_BITS; i++)
    on->of_pass[0][i] = on->of_pass[1][i] = PS__NO_VT;
  return true;
}

static bool flight_init(ps__in_flight *in, const ps__step *s) {
  const ps__spec *spec = s->spec;
  const size_t saved = (size_t)spec->n_layers * spec->n_chunks * s->model->max_tensors,
               room = (size_t)s->at->n_devices * spec->n_chunks;
  in->x = ps__malloc(spec->n_chunks * sizeof *in->x);
  in->dy = ps__malloc(spec->n_chunks * sizeof *in->dy);
  in->next_x = ps__malloc(room * sizeof *in->next_x);
  in->next_dy = ps__malloc(room * sizeof *in->next_dy);
  in->kept = ps__malloc(saved * sizeof *in->kept);
  in->away = ps__malloc(saved * sizeof *in->away);
  in->again = ps__malloc(saved * sizeof *in->again);
  in->carried = ps__malloc((size_t)PS__N_CARRIED * spec->n_chunks * sizeof *in->carried);
  in->rows_host = PS__NO_VT;
  if (!in->x || !in->dy || !in->next_x || !in->next_dy || !in->kept || !in->away || !in->again ||
      !in->carried)
    return false;
  for (size_t i = 0; i < (size_t)PS__N_CARRIED * spec->n_chunks; i++)
    in->carried[i] = PS__NO_VT;
  for (size_t i = 0; i < room; i++)
    in->next_x[i] = in->next_dy[i] = PS__NO_VT;
  for (size_t i = 0; i < saved; i++)
    in->kept[i] = in->away[i] = in->again[i] = PS__NO_VT;
  return true;
}

static bool builder_init(ps__builder *b) {
  ps__step *s = b->s;
  const uint32_t n_chunks = s->layout->n_chunks;
  b->on = b->dev;
  b->in = b->flight;
  b->gathered = ps__calloc(n_chunks, sizeof *b->gathered);
  s->batch_offset = ps__calloc(n_chunks, sizeof *s->batch_offset);
  bool ok = b->gathered && s->batch_offset;
  for (uint32_t d = 0; d < s->at->n_devices; d++) {
    b->dev[d].at = s->at->dev[d];
    ok = ok && device_init(&b->dev[d], s) && flight_init(&b->flight[d], s);
  }
  return ok;
}

static void builder_free(ps__builder *b) {
  for (uint32_t d = 0; d < PS_MAX_DEVICES; d++) {
    ps__on_device *on = &b->dev[d];
    ps__in_flight *in = &b->flight[d];
    ps__free(on->unit);
    ps__free(on->late);
    ps__free(on->batch);
    ps__free(on->of_step);
    ps__free(in->pass);
    ps__free(in->waiting);
    ps__free(in->x);
    ps__free(in->dy);
    ps__free(in->next_x);
    ps__free(in->next_dy);
    ps__free(in->kept);
    ps__free(in->away);
    ps__free(in->again);
    ps__free(in->carried);
  }
  ps__free(b->head_at);
  ps__free(b->gathered);
  ps__free(b->unit);
  ps__free(b->coming);
  ps__free(b->leaving);
}

/* An input that is made again is so in all its chunks, and comes from a saved one. */
static ps_status check_inputs(const ps__spec *spec) {
  for (uint32_t l = ps__first_saving(spec->model); l < spec->n_layers; l++) {
    const ps__layer_def *d = ps__layer_of(spec->model, l + 1);
    const bool again = ps__input_again(spec, l + 1);
    bool ok = !again || (l > ps__first_saving(spec->model) && !ps__input_again(spec, l) &&
                         !spec->ring_blocks);
    for (uint32_t c = 0; c < spec->n_chunks; c++)
      ok &= (*ps__spec_policy(spec, l, c, (uint32_t)d->tensor[d->input].saved) >=
             PS_POLICY_RECOMPUTE) == again;
    if (!ok)
      return ps__fail(PS_EINTERNAL, "block %u: its input cannot be made again", l);
  }
  return PS_OK;
}

static ps_status check_spec(const ps_model *model, const ps__spec *spec) {
  if (spec->embed_on_host && (ps__tied(model) || spec->param_resident[0] ||
                              spec->grad_resident[0] || ps__updated_on_device(spec, 0)))
    return ps__fail(PS_EINTERNAL, "the embedding cannot be on the host and on the device");
  if (spec->n_devices == 0 || spec->n_devices > PS_MAX_DEVICES)
    return ps__fail(PS_EINTERNAL, "a step has 1 to %d devices, not %u", PS_MAX_DEVICES,
                    spec->n_devices);
  if (spec->ring_blocks && (spec->n_devices == 1 || spec->checked || ps__has_carried(&model->cfg)))
    return ps__fail(PS_EINTERNAL, "one device, a checked step, and blocks that read what others "
                                  "have made, have no ring");
  if ((spec->clip && (spec->clip_previous || spec->passing_grads)) ||
      (spec->keep_grads && spec->passing_grads))
    return ps__fail(PS_EINTERNAL, "totals pass only where no update waits for the norm and no "
                                  "gradient is kept; clipping is by one norm");
  PS_TRY(check_inputs(spec));
  for (uint32_t u = 0; u < spec->n_units; u++) {
    if ((spec->n_devices > 1 || spec->n_hosts > 1) &&
        ((spec->grad_resident[u] && !spec->in_pieces[u]) || spec->update_resident[u]))
      return ps__fail(PS_EINTERNAL,
                      "unit %u: with several devices or hosts, weights come from the host, and "
                      "totals that are not in pieces are there",
                      u);
    if (spec->n_hosts > 1 && ps__updated_on_device(spec, u))
      return ps__fail(PS_EINTERNAL, "unit %u: with several hosts, updates are on the host", u);
    if (spec->in_pieces[u] &&
        (spec->n_devices == 1 || (u == 0 && (ps__tied(model) || spec->embed_on_host)) ||
         (spec->ring_blocks && model->unit[u].layer != ps__head_layer(model))))
      return ps__fail(PS_EINTERNAL, "unit %u cannot be cut into pieces", u);
    if (model->unit[u].frozen &&
        (spec->grad_resident[u] || ps__updated_on_device(spec, u) || spec->update_split[u]))
      return ps__fail(PS_EINTERNAL, "unit %u is frozen: it has no gradient and no update", u);
    if (spec->state_on_disk[u] && (!spec->disk || u == 0 || model->unit[u].frozen ||
                                   ps__updated_on_device(spec, u) || spec->update_split[u]))
      return ps__fail(PS_EINTERNAL, "unit %u: its state cannot be on the disk", u);
    if (spec->update_resident[u] && spec->update_streamed[u])
      return ps__fail(PS_EINTERNAL, "unit %u: its state is on the device and comes to it", u);
    if (spec->state_held[u] && !spec->update_streamed[u])
      return ps__fail(PS_EINTERNAL, "unit %u: its state stays on the device, its update is not", u);
    if (spec->update_split[u] &&
        (!spec->clip || !ps__optimizers[spec->optimizer].splits || ps__updated_on_device(spec, u) ||
         (u == 0 && spec->embed_on_host)))
      return ps__fail(PS_EINTERNAL, "unit %u: its update cannot be split", u);
  }
  return PS_OK;
}

ps_status ps__step_emit(ps__step *s, const ps_model *model, const ps__layout *layout,
                        const ps__spec *spec, ps__step_hooks *hooks) {
  ps__step_arrays none = {0};
  return ps__step_emit_in(s, &none, model, layout, spec, hooks);
}

ps_status ps__step_emit_in(ps__step *s, ps__step_arrays *arrays, const ps_model *model,
                           const ps__layout *layout, const ps__spec *spec, ps__step_hooks *hooks) {
  *s = (ps__step){.vt = arrays->vt,
                  .op = arrays->op,
                  .access = arrays->access,
                  .args = arrays->args,
                  .cap_vt = arrays->cap_vt,
                  .cap_op = arrays->cap_op,
                  .cap_access = arrays->cap_access,
                  .cap_args = arrays->cap_args};
  *arrays = (ps__step_arrays){0};
  s->model = model;
  s->layout = layout;
  s->spec = spec;
  s->recipe = &ps__recipes[spec->recipe];
  s->dt = (ps_dtype)s->recipe->weights.dtype;
  ps_status st = check_spec(model, spec);
  if (st != PS_OK) {
    ps__step_free(s);
    return st;
  }
  s->at = ps__places_with(spec->n_devices, spec->n_hosts, spec->disk);
  s->sums = ps__contributions_of(layout, spec->head_slice, s->dt, false);
  s->of_step = ps__contributions_of(layout, spec->head_slice, s->dt, true);
  ps__builder b = {.s = s,
                   .hooks = hooks,
                   .checks = PS__NO_VT,
                   .staged = PS__NO_VT,
                   .exchanging = PS__NO_UNIT,
                   .last_stored = PS__NO_VT,
                   .to_exchange = model->n_units};
  if (!builder_init(&b))
    st = ps__fail(PS_ENOMEM, "out of memory for the step's tables");
  if (st == PS_OK)
    st = ps__deal_head(&b);
  if (st == PS_OK)
    st = ps__units_init(&b);
  if (st == PS_OK) {
    ps__carried_init(&b);
    ps__make_batch(&b);
    if (spec->checked)
      b.checks = ps__vt_new(&b, s->at->dev[0].place, 8);
    emit_rounds(&b);
    count_saved(s);
    if (s->out_of_memory)
      st = ps__fail(PS_ENOMEM, "out of memory for a step of %zu ops", s->n_op);
    else if (spec->pageable)
      mark_pageable(s);
  }
  builder_free(&b);
  assert(st != PS_OK || ps__step_valid(s));
  if (st != PS_OK)
    ps__step_free(s);
  return st;
}

ps_status ps__step_map(ps__step *s) {
  for (uint32_t space = 0; space < s->at->n_places; space++) {
    s->space_bytes[space] = ps__memmap(s->vt, s->n_vt, space);
    if (s->space_bytes[space] == UINT64_MAX)
      return ps__fail(PS_ENOMEM, "out of memory for the memory map of %zu tensors", s->n_vt);
  }
  for (size_t i = 0; i < s->n_vt; i++)
    if (s->vt[i].alias_of)
      s->vt[i].offset += s->vt[s->vt[i].alias_of - 1].offset;
  for (uint32_t space = 0; space < s->at->n_places; space++)
    assert(ps__memmap_valid(s->vt, s->n_vt, space, s->space_bytes[space]));
  return PS_OK;
}

ps_status ps__step_build(ps__step *s, const ps_model *model, const ps__layout *layout,
                         const ps__spec *spec, ps__step_hooks *hooks) {
  PS_TRY(ps__step_emit(s, model, layout, spec, hooks));
  const ps_status st = ps__step_map(s);
  if (st != PS_OK)
    ps__step_free(s);
  return st;
}

void ps__step_leave(ps__step *s, ps__step_arrays *arrays) {
  ps__step_arrays_free(arrays);
  *arrays = (ps__step_arrays){.vt = s->vt,
                              .op = s->op,
                              .access = s->access,
                              .args = s->args,
                              .cap_vt = s->cap_vt,
                              .cap_op = s->cap_op,
                              .cap_access = s->cap_access,
                              .cap_args = s->cap_args};
  s->vt = NULL, s->op = NULL, s->access = NULL, s->args = NULL;
  ps__step_free(s);
}

void ps__step_arrays_free(ps__step_arrays *p) {
  ps__free(p->vt);
  ps__free(p->op);
  ps__free(p->access);
  ps__free(p->args);
  *p = (ps__step_arrays){0};
}

void ps__step_free(ps__step *s) {
  ps__free(s->vt);
  ps__free(s->op);
  ps__free(s->access);
  ps__free(s->args);
  ps__free(s->unit_host);
  ps__free(s->batch_offset);
  ps__free(s->check);
  memset(s, 0, sizeof *s);
}

static ps_status add_ops(const ps__step *s, bool with_args, ps_program *p) {
  PS_TRY(ps__program_reserve(p, s->n_op, s->n_access, with_args ? s->n_args : 0));
  for (size_t i = 0; i < s->n_op; i++) {
    const ps__vop *v = &s->op[i];
    ps_access access[PS_MAX_ACCESSES];
    for (uint32_t j = 0; j < v->n_access; j++) {
      const ps__vaccess *a = &s->access[v->access + j];
      access[j] =
          (ps_access){s->vt[a->vt].space, a->mode, s->vt[a->vt].offset + a->offset, a->bytes};
    }
    const ps_op op = {.kernel = v->kernel,
                      .args = with_args ? s->args + v->args : NULL,
                      .args_bytes = with_args ? v->args_bytes : 0,
                      .stream = v->stream,
                      .access = access,
                      .n_access = v->n_access,
                      .work = v->work,
                      .tag = v->tag};
    PS_TRY(ps_program_add(p, &op, NULL));
  }
  return PS_OK;
}

ps_status ps__step_program(const ps__step *s, ps_program **out) {
  ps_program *p = NULL;
  PS_TRY(ps_program_create(&p, s->at->n_places, s->at->n_streams));
  const ps_status st = add_ops(s, true, p);
  if (st == PS_OK)
    *out = p;
  else
    ps_program_destroy(p);
  return st;
}

ps_status ps__step_bare_program(const ps__step *s, ps_program *p) {
  ps__program_clear(p, s->at->n_places, s->at->n_streams);
  return add_ops(s, false, p);
}

/* An op that fills device tensor @to: a copy of host tensor @from, or @kernel. */
static ps_status add_prologue_op(const ps__step *s, ps_program **p, const ps_kernel *kernel,
                                 uint32_t from, uint32_t to) {
  const ps__vt *t = &s->vt[to];
  const ps__device_at *dev = &s->at->dev[t->space];
  const ps__args_fill fill = {t->bytes};
  const ps_access write = {t->space, PS_WRITE, t->offset, t->bytes};
  const ps_access copy[2] = {
      {kernel ? 0 : s->vt[from].space, PS_READ, kernel ? 0 : s->vt[from].offset, t->bytes}, write};
  const ps_op op = {.kernel = kernel,
                    .args = kernel ? &fill : NULL,
                    .args_bytes = kernel ? sizeof fill : 0,
                    .stream = kernel ? dev->compute : dev->to_device,
                    .access = kernel ? &write : copy,
                    .n_access = kernel ? 1 : 2,
                    .tag = {.layer = -1, .round = -1, .chunk = -1, .phase = PS__PHASE_UPDATE}};
  if (!*p)
    PS_TRY(ps_program_create(p, s->at->n_places, s->at->n_streams));
  return ps_program_add(*p, &op, NULL);
}

ps_status ps__step_prologue(const ps__step *s, bool new_state, ps_program **out) {
  ps_program *p = NULL;
  ps_status st = PS_OK;
  for (uint32_t u = 0; st == PS_OK && u < s->spec->n_units; u++) {
    const ps__unit_host *h = &s->unit_host[u];
    const bool stay = ps__weights_stay(s->spec, u);
    for (uint32_t d = 0; st == PS_OK && stay && d < s->at->n_devices; d++)
      if (h->device_weights[d] != PS__NO_VT)
        st = add_prologue_op(s, &p, NULL, h->weights, h->device_weights[d]);
    if (!ps__state_on_device(s->spec, u))
      continue;
    if (st == PS_OK && h->device_master != PS__NO_VT)
      st = add_prologue_op(s, &p, NULL, h->master, h->device_master);
    for (uint32_t k = 0;
         st == PS_OK && new_state && k < ps__optimizers[s->spec->optimizer].n_states; k++)
      st = add_prologue_op(s, &p, &ps__k_fill_zero, PS__NO_VT, h->state[k]);
  }
  if (st != PS_OK)
    ps_program_destroy(p);
  else
    *out = p;
  return st;
}
