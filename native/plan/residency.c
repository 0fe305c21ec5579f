/* residency.c - what a residency takes of the memories: the bounds of candidates' bytes, but for
 * saved activations. */
#include "optim/optim.h"
#include "plan/candidates.h"

uint64_t ps__unit_state_bytes(const ps__search_space *sp, uint32_t unit) {
  const uint32_t recipe = ps__plan_row(&sp->plan->cfg);
  const uint64_t n = sp->plan->model->unit[unit].n;
  return ps__state_bytes((ps_optimizer)sp->plan->cfg.optimizer, recipe, n) +
         ps__master_bytes(recipe, n);
}

uint64_t ps__staying_bytes(const ps__search_space *sp, const ps__layout *l, const ps__residency *r,
                           uint64_t *totals) {
  const ps__contributions sums = ps__contributions_of(l, ps__head_slice(sp->plan, l->chunk_tokens),
                                                      sp->plan->model->dt, false);
  uint64_t bytes = 0;
  *totals = 0;
  for (uint32_t u = ps__embed_on_host(sp, l, r); u < sp->plan->model->n_units; u++) {
    const uint32_t layer = sp->plan->model->unit[u].layer;
    if (ps__dealt_to(sp->plan, layer) != 0)
      continue;
    const bool in_blocks = layer > 0 && layer <= ps__blocks_of(sp, r),
               grads = ps__among(sp, u, r->grads) || in_blocks;
    const bool several = ps__unit_contributions(sp->plan->model, &sums, u) > 1;
    if (ps__params_stay(sp, r, u))
      bytes += ps__unit_bytes(sp, u);
    if (r->state && !sp->plan->model->unit[u].frozen)
      bytes += ps__unit_state_bytes(sp, u);
    if (grads && several && l->n_rounds > 1)
      *totals += ps__unit_bytes(sp, u);
  }
  return bytes;
}

/* BYTES of optimizer state that the host does not have because the disk has it. */
static uint64_t on_disk_bytes(const ps__search_space *sp) {
  const ps_plan *p = sp->plan;
  uint64_t n = 0;
  for (uint32_t u = 0; u < p->model->n_units; u++)
    n += ps__on_disk(p, u) ? p->model->unit[u].n : 0;
  return ps__state_bytes((ps_optimizer)p->cfg.optimizer, ps__plan_row(&p->cfg), n);
}

/* Of parameters, optimizer state and gradients. Where state is on the device, so are gradients. Of
 * gradients that pass the one that stays counts, and none that is under way. */
uint64_t ps__host_state_bytes(const ps__search_space *sp, const ps__layout *l,
                              const ps__residency *r) {
  const ps_plan_config *c = &sp->plan->cfg;
  const ps_model *m = sp->plan->model;
  const uint32_t recipe = ps__plan_row(c);
  const ps__storage w = ps__weight_storage(m);
  const uint64_t n = m->n_trained, master = ps__master_bytes(recipe, n),
                 stays = r->passing
                             ? ps__embed_on_host(sp, l, r) && !m->unit[0].frozen ? m->unit[0].n : 0
                             : n,
                 grads = !r->state || c->keep_grads ? ps__stored_bytes(w, stays) : 0,
                 states = r->state ? 0
                                   : ps__state_bytes((ps_optimizer)c->optimizer, recipe, n) -
                                         on_disk_bytes(sp);
  uint64_t on_device = 0;
  for (uint32_t layer = 1; layer <= ps__blocks_of(sp, r); layer++)
    for (uint32_t u = m->layer[layer].first_unit;
         u < m->layer[layer].first_unit + m->layer[layer].n_units; u++)
      on_device += m->unit[u].frozen ? 0 : ps__unit_bytes(sp, u);
  return ps__weights_bytes(m) + master + grads + states - on_device;
}

/* What of the host's arena need not be pinned, at most. */
uint64_t ps__pageable_bytes(const ps__search_space *sp, const ps__layout *l,
                            const ps__residency *r) {
  const ps_model *m = sp->plan->model;
  const bool embed_on_host = ps__embed_on_host(sp, l, r);
  uint64_t bytes = 0;
  if (!sp->plan->cfg.pinned_mem_bytes)
    return 0;
  for (uint32_t u = 0; u < m->n_units; u++) {
    const uint32_t layer = m->unit[u].layer;
    const bool free = u == 0 && embed_on_host, trained = !m->unit[u].frozen,
               streamed = layer > 0 && layer <= ps__blocks_of(sp, r);
    if (free || ps__among(sp, u, ps__stages_weights(sp->plan)))
      bytes += ps__memmap_aligned(ps__unit_bytes(sp, u));
    if (trained &&
        (free || (sp->plan->staging >= PS__STAGE_TOTALS && !streamed && !r->state && !r->passing)))
      bytes += ps__memmap_aligned(ps__unit_bytes(sp, u));
    if (trained && !r->state && !streamed)
      bytes += ps__memmap_aligned(ps__unit_state_bytes(sp, u)) + 256 * PS_MAX_STATES;
  }
  return bytes;
}
