/* policy.c - the decisions of a candidate: the policy of each saved activation, what stays
 * on the device, where updates run. */
#include "plan/candidates.h"
#include <string.h>

bool ps__among(const ps__search_space *sp, uint32_t unit, uint32_t parts) {
  uint32_t layer = sp->plan->model->unit[unit].layer;
  if (ps__is_ring(sp->plan) && ps__is_block(sp->plan->model, layer))
    layer = 1 + (layer - 1) / sp->plan->at->n_devices; /* among its device's */
  return (layer + 1) * parts / PS__UNIT_PARTS != layer * parts / PS__UNIT_PARTS;
}

bool ps__takes_pieces(const ps_plan *plan, uint32_t unit) {
  const bool dealt =
      ps__is_ring(plan) && plan->model->unit[unit].layer != ps__head_layer(plan->model);
  return ps__may_take_pieces(plan) && !dealt && !(unit == 0 && ps__tied(plan->model));
}

uint8_t ps__from_host_first(const ps_plan *plan) {
  return plan->hw.link[PS_LINK_PEER].bytes_per_s < plan->hw.link[PS_LINK_H2D].bytes_per_s
             ? PS__UNIT_PARTS
             : 0;
}

bool ps__params_stay(const ps__search_space *sp, const ps__residency *r, uint32_t unit) {
  return ps__among(sp, unit, r->params) ||
         (r->head && sp->plan->model->unit[unit].layer == ps__head_layer(sp->plan->model));
}

uint32_t ps__blocks_of(const ps__search_space *sp, const ps__residency *r) {
  const uint32_t layers = sp->plan->model->cfg.n_layers, first = ps__first_trained(sp->plan->model),
                 frozen = first > 1 ? first - 1 : 0,
                 n = frozen < layers ? (layers - frozen) * r->blocks / PS__UNIT_PARTS : 0,
                 last = n ? frozen + n : 0;
  return last < 255 ? last : 255;
}

bool ps__drops_input(const ps__search_space *sp, const ps__residency *r, uint32_t layer) {
  const uint32_t first = ps__first_saving(sp->plan->model),
                 pair = layer > first ? (layer - first) / 2 : 0;
  return layer > first && (layer - first) % 2 &&
         (pair + 1) * r->again / PS__UNIT_PARTS != pair * r->again / PS__UNIT_PARTS;
}

static void set_policy(const ps__layer_def *d, uint32_t set, uint8_t to, uint8_t *policy) {
  for (uint32_t i = 0; i < d->n_saved; i++)
    if (d->saved[i].set == set)
      policy[i] = to;
}

/* A chunk that only the first round has. The device memory belongs to what every round has, so the
 * chunk's input is offloaded, unless it is made again. More of it is offloaded by a fraction of its
 * own, and the rest is recomputed. */
static void allocate_extra(ps__policy_allocator *d, const ps__layer_def *layer, uint32_t n_tokens,
                           bool again, uint8_t *policy) {
  if (!again)
    set_policy(layer, 0,
               d->host_fraction > 0 || d->extra_fraction > 0 ? PS_POLICY_HOST : PS_POLICY_DEVICE,
               policy);
  for (uint32_t i = 1; i < layer->n_sets; i++)
    d->extra += d->extra_fraction * (double)ps__saved_set_bytes(layer, i, n_tokens);
  for (uint32_t i = 1; i < layer->n_sets && d->extra_fraction > 0; i++) {
    const double bytes = (double)ps__saved_set_bytes(layer, i, n_tokens);
    if (bytes == 0 || d->extra < bytes / 2)
      continue;
    d->extra -= bytes;
    set_policy(layer, i, PS_POLICY_HOST, policy);
  }
}

void ps__allocate_policies(ps__policy_allocator *d, const ps__layer_def *layer, uint32_t n_tokens,
                           bool extra, bool boundary, bool again, uint8_t *policy) {
  memset(policy, PS_POLICY_RECOMPUTE, layer->n_saved);
  if (boundary && d->device_fraction > 0 && !again) {
    for (uint32_t i = 0; i < layer->n_sets; i++)
      set_policy(layer, i, PS_POLICY_DEVICE, policy);
    return;
  }
  if (extra && d->device_fraction < 1) {
    allocate_extra(d, layer, n_tokens, again, policy);
    return;
  }
  for (uint32_t i = again; i < layer->n_sets; i++) {
    const double bytes = (double)ps__saved_set_bytes(layer, i, n_tokens);
    d->device += d->device_fraction * bytes;
    d->host += again ? 0 : d->host_fraction * bytes;
  }
  for (uint32_t i = again; i < layer->n_sets; i++) {
    const double bytes = (double)ps__saved_set_bytes(layer, i, n_tokens);
    uint8_t to = PS_POLICY_RECOMPUTE;
    if (bytes == 0)
      continue;
    if (d->host_fraction > 0 && d->host >= bytes / 2)
      to = PS_POLICY_HOST;
    else if (i == 0 || d->device_fraction >= 1 ||
             (d->device_fraction > 0 && d->device >= bytes / 2))
      to = PS_POLICY_DEVICE;
    if (to == PS_POLICY_HOST)
      d->host -= bytes;
    if (to == PS_POLICY_DEVICE)
      d->device -= bytes;
    if (to == PS_POLICY_RECOMPUTE && !d->extras) {
      d->extra += d->extra_fraction * bytes;
      if (d->extra >= bytes / 2 && d->extra_fraction > 0) {
        d->extra -= bytes;
        to = PS_POLICY_HOST_FIRST_ROUND;
      }
    }
    set_policy(layer, i, to, policy);
  }
}

void ps__policy_allocators_of(const ps__layout *l, const ps__candidate *m,
                              ps__policy_allocator out[PS_MAX_DEVICES]) {
  for (uint32_t d = 0; d < PS_MAX_DEVICES; d++)
    out[d] = (ps__policy_allocator){.extras = l->first_round_chunks > l->chunks_per_round,
                                    .device_fraction = (double)m->device / PS__SAVED_PARTS,
                                    .host_fraction = (double)m->host / PS__SAVED_PARTS,
                                    .extra_fraction = (double)m->extra / PS__SAVED_PARTS};
}

double ps__lookup_bytes(const ps__search_space *sp, const ps__layout *l) {
  return (double)l->n_tokens * sp->plan->model->cfg.dim * ps_dtype_bytes(sp->plan->model->dt);
}
double ps__table_bytes(const ps__search_space *sp) {
  const ps_model *m = sp->plan->model;
  return (double)ps__stored_bytes(ps__weight_storage(m), (uint64_t)m->cfg.vocab_size * m->cfg.dim);
}

bool ps__embed_on_host(const ps__search_space *sp, const ps__layout *l, const ps__residency *r) {
  const double to_device = ps__params_stay(sp, r, 0) ? 1 : l->n_rounds,
               to_host = ps__among(sp, 0, r->grads) ? 1 : l->n_rounds;
  return !ps__tied(sp->plan->model) && !r->state &&
         2 * ps__lookup_bytes(sp, l) < (to_device + to_host) * ps__table_bytes(sp);
}

bool ps__at_boundary(const ps__search_space *sp, const ps__layout *l, uint32_t layer, uint32_t c) {
  return layer + 1 == sp->plan->model->cfg.n_layers &&
         (c + 1 == l->chunks_per_round || c + 1 == l->max_round_chunks);
}

/* How many blocks are kept across rounds. At that boundary, below a block, the saved activations of
 * the blocks above it are gone; parameters take their place as long as there is room. */
static uint32_t blocks_kept(const ps__search_space *sp, const ps__layout *layout,
                            const ps__spec *s) {
  uint64_t room = 0, kept = 0;
  for (uint32_t l = ps__first_saving(sp->plan->model); l < s->n_layers; l++) {
    const ps__layer_def *d = ps__layer_of(sp->plan->model, l + 1);
    for (uint32_t c = 0; c < layout->chunks_per_round; c++)
      for (uint32_t i = 0; i < d->n_saved; i++)
        if (*ps__spec_policy(s, l, c, i) == PS_POLICY_DEVICE)
          room += ps__saved_bytes(&d->saved[i], layout->chunk[c].n_tokens);
  }
  for (uint32_t u = 0; u < s->n_units; u++) {
    const ps__unit *unit = &sp->plan->model->unit[u];
    if (!ps__is_block(sp->plan->model, unit->layer))
      continue;
    if (!s->param_resident[u])
      kept += ps__unit_bytes(sp, u);
    if (kept > room)
      return unit->layer - 1;
  }
  return s->n_layers;
}

ps_status ps__decide(const ps__search_space *sp, const ps__layout *layout, const ps__candidate *m,
                     bool embed_on_host, ps__spec *spec) {
  const ps_plan *plan = sp->plan;
  const ps__residency *r = &m->keep;
  PS_TRY(ps__spec_init(spec, plan->model, layout));
  spec->recipe = ps__plan_row(&plan->cfg);
  spec->optimizer = (ps_optimizer)plan->cfg.optimizer;
  spec->backend = plan->hw.backend;
  spec->cudnn_version = plan->hw.cudnn_version;
  spec->deterministic = plan->cfg.deterministic != 0;
  spec->one_document = plan->cfg.one_document != 0;
  spec->n_devices = plan->cfg.n_devices;
  spec->n_hosts = plan->cfg.n_hosts;
  spec->over_nccl = ps__net_memory(plan) > 0;
  spec->ring_blocks = ps__is_ring(plan);
  spec->ring_by_host = ps__is_ring(plan) && !(plan->hw.link[PS_LINK_PEER].bytes_per_s > 0);
  spec->chunk_tokens = layout->chunk_tokens;
  spec->chunks_per_round = layout->chunks_per_round;
  spec->first_round_chunks = layout->first_round_chunks;
  spec->first_rounds = layout->first_rounds;
  spec->head_slice = ps__head_slice(plan, layout->chunk_tokens);
  spec->clip = ps__waits_for_norm(plan);
  spec->clip_previous = ps__clips_by_previous(plan);
  spec->param_lead = spec->saved_lead = spec->saved_lag = spec->grad_lag = m->ahead;
  spec->sum_lag = m->ahead + m->sums;
  spec->sum_threads = ps__sum_threads(&plan->hw, m->threads);
  spec->passing_grads = r->passing;
  spec->update_lag = r->passing ? spec->sum_lag * layout->max_round_chunks : 0;
  spec->keep_grads = plan->cfg.keep_grads != 0;
  spec->keep_logits = plan->cfg.logits_fn != NULL;
  spec->embed_on_host = embed_on_host;
  spec->pageable = plan->cfg.pinned_mem_bytes > 0;
  spec->stage_totals = m->staging >= PS__STAGE_TOTALS;
  spec->pinned_weights = plan->cfg.sample_sequences > 0;
  spec->disk = plan->cfg.disk_mem_bytes > 0;
  spec->disk_lead = 1 + m->ahead;
  const ps__contributions sums =
      ps__contributions_of(layout, spec->head_slice, sp->plan->model->dt, false);
  const uint32_t streamed = m->held > m->streamed ? m->held : m->streamed;
  for (uint32_t u = 0; u < spec->n_units; u++) {
    const uint32_t layer = plan->model->unit[u].layer;
    const bool several = ps__unit_contributions(plan->model, &sums, u) > 1,
               table_on_host = u == 0 && embed_on_host, trained = !plan->model->unit[u].frozen;
    spec->param_resident[u] = ps__params_stay(sp, r, u) && !table_on_host;
    spec->in_pieces[u] =
        ps__takes_pieces(plan, u) && !table_on_host && !ps__among(sp, u, m->from_host);
    /* with several devices a total stays for longer than the rounds that run at once */
    const bool stays = ps__totals_on_host(plan)
                           ? spec->in_pieces[u] && layout->n_rounds > spec->n_devices
                           : several && !table_on_host;
    spec->update_resident[u] = r->state && trained;
    spec->state_on_disk[u] = ps__on_disk(plan, u);
    spec->update_streamed[u] =
        !r->state && layer > 0 && layer <= streamed && trained && !spec->state_on_disk[u];
    spec->state_held[u] = spec->update_streamed[u] && layer <= m->held;
    const bool in_blocks = r->blocks && spec->update_streamed[u];
    spec->grad_resident[u] = (ps__among(sp, u, r->grads) || in_blocks) && stays;
    const bool among = layer == ps__head_layer(plan->model)
                           ? m->split > 0
                           : layer > streamed && layer < streamed + m->split;
    spec->stage_weights[u] = ps__among(sp, u, ps__stages_weights(plan)) && !spec->in_pieces[u] &&
                             !table_on_host && !ps__updated_on_device(spec, u) &&
                             !ps__weights_stay(spec, u);
    spec->update_split[u] =
        !r->state && spec->clip && layer > 0 && among && trained && !spec->state_on_disk[u];
  }
  ps__policy_allocator of_device[PS_MAX_DEVICES];
  ps__policy_allocators_of(layout, m, of_device);
  for (uint32_t l = ps__first_saving(plan->model); l < spec->n_layers; l++)
    for (uint32_t c = 0; c < spec->n_chunks; c++)
      ps__allocate_policies(&of_device[ps__dealt_to(plan, l + 1)], ps__layer_of(plan->model, l + 1),
                            layout->chunk[c].n_tokens, c >= layout->chunks_per_round,
                            ps__at_boundary(sp, layout, l, c), ps__drops_input(sp, r, l),
                            ps__spec_policy(spec, l, c, 0));
  spec->blocks_kept = blocks_kept(sp, layout, spec);
  return PS_OK;
}
