/* decide.c - the decisions of a member: fates of saved tensors, what stays on the device, where
 * updates run. */
#include "plan/candidates.h"
#include <string.h>

bool ps__among(uint32_t unit, uint32_t parts) {
  return (unit + 1) * parts / PS__UNIT_PARTS != unit * parts / PS__UNIT_PARTS;
}

bool ps__params_stay(const ps__family *f, const ps__residency *r, uint32_t unit) {
  return ps__among(unit, r->params) || (r->head && unit == f->plan->model.n_layers + 1);
}

/* x has to be somewhere; attention costs the most time a byte to do again; of the others, whose
 * products cost about the same a byte, the early ones first. q and kv come from one product: one
 * without the other saves nothing. */
const uint8_t ps__item_group[PS__N_GROUPS][2] = {
    {PS__ITEM_X, PS__N_ITEMS}, {PS__ITEM_O, PS__N_ITEMS}, {PS__ITEM_QKV, PS__N_ITEMS},
    {PS__ITEM_Q, PS__ITEM_KV}, {PS__ITEM_H, PS__N_ITEMS}, {PS__ITEM_GU, PS__N_ITEMS}};

uint64_t ps__group_bytes(const ps__block *b, int i, uint32_t n_tokens) {
  uint64_t bytes = 0;
  for (int k = 0; k < 2; k++)
    if (ps__item_group[i][k] < PS__N_ITEMS && b->has_item[ps__item_group[i][k]])
      bytes += b->item_row_bytes[ps__item_group[i][k]] * n_tokens;
  return bytes;
}

static void set_fate(const ps__block *b, int i, uint8_t to, uint8_t fate[PS__N_ITEMS]) {
  for (int k = 0; k < 2; k++)
    if (ps__item_group[i][k] < PS__N_ITEMS && b->has_item[ps__item_group[i][k]])
      fate[ps__item_group[i][k]] = to;
}

/* A chunk that the first round has more than the others: the memory is dealt out to what every
 * round has, so that its x goes home, more of it by its own share, and the rest is done again. */
static void deal_extra(ps__dealer *d, const ps__block *b, uint32_t n_tokens,
                       uint8_t fate[PS__N_ITEMS]) {
  fate[PS__ITEM_X] = d->host_share > 0 || d->extra_share > 0 ? PS_FATE_HOST : PS_FATE_DEVICE;
  for (int i = 1; i < PS__N_GROUPS; i++)
    d->extra += d->extra_share * (double)ps__group_bytes(b, i, n_tokens);
  for (int i = 1; i < PS__N_GROUPS && d->extra_share > 0; i++) {
    const double bytes = (double)ps__group_bytes(b, i, n_tokens);
    if (bytes == 0 || d->extra < bytes / 2)
      continue;
    d->extra -= bytes;
    set_fate(b, i, PS_FATE_HOST, fate);
  }
}

void ps__deal(ps__dealer *d, const ps__block *b, uint32_t n_tokens, bool extra, bool turn,
              uint8_t fate[PS__N_ITEMS]) {
  memset(fate, PS_FATE_RECOMPUTE, PS__N_ITEMS);
  if (turn && d->device_share > 0) {
    for (int i = 0; i < PS__N_GROUPS; i++)
      set_fate(b, i, PS_FATE_DEVICE, fate);
    return;
  }
  if (extra && d->device_share < 1) {
    deal_extra(d, b, n_tokens, fate);
    return;
  }
  for (int i = 0; i < PS__N_GROUPS; i++) {
    const double bytes = (double)ps__group_bytes(b, i, n_tokens);
    d->device += d->device_share * bytes;
    d->host += d->host_share * bytes;
  }
  for (int i = 0; i < PS__N_GROUPS; i++) {
    const double bytes = (double)ps__group_bytes(b, i, n_tokens);
    uint8_t to = PS_FATE_RECOMPUTE;
    if (bytes == 0)
      continue;
    if (d->host_share > 0 && d->host >= bytes / 2)
      to = PS_FATE_HOST;
    else if (i == 0 || d->device_share >= 1 || (d->device_share > 0 && d->device >= bytes / 2))
      to = PS_FATE_DEVICE;
    if (to == PS_FATE_HOST)
      d->host -= bytes;
    if (to == PS_FATE_DEVICE)
      d->device -= bytes;
    if (to == PS_FATE_RECOMPUTE && !d->extras) {
      d->extra += d->extra_share * bytes;
      if (d->extra >= bytes / 2 && d->extra_share > 0) {
        d->extra -= bytes;
        to = PS_FATE_FIRST;
      }
    }
    set_fate(b, i, to, fate);
  }
}

ps__dealer ps__dealer_of(const ps__layout *l, const ps__member *m) {
  return (ps__dealer){.extras = l->first_round_chunks > l->chunks_per_round,
                      .device_share = (double)m->device / PS__SHARES,
                      .host_share = (double)m->host / PS__SHARES,
                      .extra_share = (double)m->extra / PS__SHARES};
}

double ps__lookup_bytes(const ps__family *f, const ps__layout *l) {
  return (double)l->n_tokens * f->plan->model.dim * ps_dtype_bytes((ps_dtype)f->block.dt);
}
double ps__table_bytes(const ps__family *f) {
  return (double)f->plan->model.vocab_size * f->plan->model.dim *
         ps_dtype_bytes((ps_dtype)f->block.dt);
}

bool ps__embeds_at_home(const ps__family *f, const ps__layout *l, const ps__residency *r) {
  const double to_device = ps__params_stay(f, r, 0) ? 1 : l->n_rounds,
               to_host = ps__among(0, r->grads) ? 1 : l->n_rounds;
  return !f->plan->model.tied_embeddings && !r->state &&
         2 * ps__lookup_bytes(f, l) < (to_device + to_host) * ps__table_bytes(f);
}

bool ps__at_turn(const ps__family *f, const ps__layout *l, uint32_t layer, uint32_t c) {
  return layer + 1 == f->plan->model.n_layers &&
         (c + 1 == l->chunks_per_round || c + 1 == l->max_round_chunks);
}

/* As many blocks as there is room for at the lower turn: below a block the saved tensors of the
 * blocks above it are gone, and parameters take their place. */
static uint32_t turn_blocks(const ps__family *f, const ps__layout *layout, const ps__spec *s) {
  const uint64_t e = ps_dtype_bytes((ps_dtype)f->block.dt);
  uint64_t room = 0, kept = 0;
  for (uint32_t l = 0; l < s->n_layers; l++)
    for (uint32_t c = 0; c < layout->chunks_per_round; c++)
      for (int i = 0; i < PS__N_ITEMS; i++)
        if (f->block.has_item[i] && *ps__spec_fate(s, l, c, i) == PS_FATE_DEVICE)
          room += f->block.item_row_bytes[i] * layout->chunk[c].n_tokens;
  for (uint32_t u = 1; u <= s->n_layers; u++) {
    if (!s->param_resident[u])
      kept += ps_model_unit_elements(&f->plan->model, u) * e;
    if (kept > room)
      return u - 1;
  }
  return s->n_layers;
}

ps_status ps__decide(const ps__family *f, const ps__layout *layout, const ps__member *m,
                     bool embed_at_home, ps__spec *spec) {
  const ps_plan *plan = f->plan;
  const ps__residency *r = &m->keep;
  PS_TRY(ps__spec_init(spec, &plan->model, layout));
  spec->recipe = (ps_recipe)plan->cfg.recipe;
  spec->backend = plan->hw.backend;
  spec->cudnn_version = plan->hw.cudnn_version;
  spec->deterministic = plan->cfg.deterministic != 0;
  spec->one_document = plan->cfg.one_document != 0;
  spec->chunk_tokens = layout->chunk_tokens;
  spec->chunks_per_round = layout->chunks_per_round;
  spec->first_round_chunks = layout->first_round_chunks;
  spec->head_slice = ps__head_slice(plan, layout->chunk_tokens);
  spec->clip = plan->cfg.clip != 0;
  spec->param_lead = spec->saved_lead = spec->saved_lag = spec->grad_lag = m->ahead;
  spec->sum_lag = m->ahead + m->sums;
  spec->sum_threads = ps__sum_threads(&plan->hw, m->threads);
  spec->keep_grads = plan->cfg.keep_grads != 0;
  spec->embed_at_home = embed_at_home;
  const ps__contributions sums =
      ps__contributions_of(layout, spec->head_slice, (ps_dtype)f->block.dt, false);
  for (uint32_t u = 0; u < spec->n_units; u++) {
    const bool several = ps__unit_contributions(&plan->model, &sums, u) > 1,
               home = u == 0 && embed_at_home;
    spec->param_resident[u] = ps__params_stay(f, r, u) && !home;
    spec->grad_resident[u] = ps__among(u, r->grads) && several && !home;
    spec->update_resident[u] = r->state;
    spec->update_streamed[u] = !r->state && u > 0 && u <= m->streamed;
    const bool among = u == spec->n_layers + 1
                           ? m->split > 0
                           : u > m->streamed && u < (uint32_t)m->streamed + m->split;
    spec->update_split[u] = !r->state && spec->clip && u > 0 && among;
  }
  ps__dealer d = ps__dealer_of(layout, m);
  for (uint32_t l = 0; l < spec->n_layers; l++)
    for (uint32_t c = 0; c < spec->n_chunks; c++)
      ps__deal(&d, &f->block, layout->chunk[c].n_tokens, c >= layout->chunks_per_round,
               ps__at_turn(f, layout, l, c), ps__spec_fate(spec, l, c, 0));
  spec->turn_blocks = turn_blocks(f, layout, spec);
  return PS_OK;
}
