/* held.c - optimizer state on the device, of blocks whose weights are streamed: the way out where
 * the host is too small for every other plan, and the device has memory left.
 *
 * A candidate holds the state of its first blocks (ps__candidate.held). The search space has none
 * that does: as many blocks as the caps ask for follow from what a candidate takes without. Bytes
 * of candidates in the search space are thus those without, and what fits is told with.
 *
 * Several devices of a host divide the blocks among them, in either layout (ps__updater()): so many
 * more blocks are held under the same cap. */
#include "optim/optim.h"
#include "plan/evaluate.h"
#include <string.h>

bool ps__may_hold(const ps_plan *p) {
  return p->hw.backend == PS_BACKEND_CUDA && p->cfg.n_hosts == 1 && p->model->n_trained > 0;
}

static uint32_t most_blocks(const ps_plan *p) {
  return p->model->cfg.n_layers < 255 ? p->model->cfg.n_layers : 255;
}

/* BYTES of a block's totals on the host that a candidate may lack because it holds the block's
 * state: with one contribution a step the gradient goes to the update on the device and has no
 * total on the host. With several devices totals are complete on the host. */
static uint64_t total_bytes(const ps_plan *p, uint32_t block) {
  const ps__layer *l = &p->model->layer[block];
  const ps__storage w = ps__weight_storage(p->model);
  uint64_t bytes = 0;
  for (uint32_t u = l->first_unit; u < l->first_unit + l->n_units && !ps__totals_on_host(p); u++)
    bytes += p->model->unit[u].frozen ? 0 : ps__stored_bytes(w, p->model->unit[u].n);
  return bytes;
}

static uint64_t block_bytes(const ps_plan *p, uint32_t block) {
  const ps__recipe *r = &ps__recipes[ps__plan_row(&p->cfg)];
  const ps__layer *l = &p->model->layer[block];
  uint64_t bytes = 0;
  for (uint32_t u = l->first_unit; u < l->first_unit + l->n_units; u++)
    for (uint32_t k = 0; k < ps__optimizers[p->cfg.optimizer].n_states; k++)
      if (!p->model->unit[u].frozen && !ps__on_disk(p, u))
        bytes += ps__memmap_aligned(ps__stored_bytes(r->state[k], p->model->unit[u].n));
  return bytes;
}

void ps__held_init(ps__search *s) {
  uint64_t on[PS_MAX_DEVICES] = {0};
  for (uint32_t n = 1; n <= most_blocks(s->plan); n++) {
    const uint64_t bytes = block_bytes(s->plan, n);
    uint64_t *here = &on[ps__updater_of_layer(n, s->plan->at->n_devices)];
    *here += bytes;
    s->held_bytes[n] = s->held_bytes[n - 1] + bytes;
    s->held_totals[n] = s->held_totals[n - 1] + total_bytes(s->plan, n);
    s->held_there[n] = s->held_there[n - 1] > *here ? s->held_there[n - 1] : *here;
  }
}

/* The most blocks whose state is at most @bytes on a device; the fewest whose state is at least
 * @bytes. */
static uint8_t blocks_within(const ps__search *s, uint64_t bytes) {
  uint32_t n = most_blocks(s->plan);
  while (n > 0 && s->held_there[n] > bytes)
    n--;
  return (uint8_t)n;
}
static uint8_t blocks_for(const ps__search *s, uint64_t bytes) {
  uint32_t n = 0;
  while (n < most_blocks(s->plan) && s->held_bytes[n] < bytes)
    n++;
  return (uint8_t)n;
}

uint8_t ps__blocks_to_hold(const ps__search *s, uint8_t held, const uint64_t bytes[PS__N_MEMS]) {
  const uint64_t host = s->cap[PS__HOST_MEM], most = host < s->machine ? host : s->machine;
  if (!s->plan->holds)
    return held;
  return bytes[PS__HOST_MEM] > most
             ? blocks_for(s, s->held_bytes[held] + bytes[PS__HOST_MEM] - most)
             : held;
}

/* BYTES of totals on the host that the candidate lacks because it holds the state of @n blocks, or
 * more. With several rounds the totals have to lie somewhere until the update: where not on the
 * host, then on the device, which has room for fewer blocks then. So @likely takes off none. */
static uint64_t totals_lacked(const ps__search *s, const ps__candidate *m, uint8_t n, bool likely) {
  const bool one_round = s->space.microbatch[m->microbatch].layout.n_rounds == 1;
  return one_round || !likely ? s->held_totals[n] : 0;
}

/* BYTES of pinned memory that the candidate may lack because it holds the state of @n blocks. What
 * need not be pinned is not in the bound: under a cap state, and totals that are staged, but not of
 * blocks that are updated on the device in any case. */
static uint64_t pinned_bytes(const ps__search *s, const ps__candidate *m, uint8_t n, bool likely) {
  const bool state = !s->plan->cfg.pinned_mem_bytes || m->keep.blocks,
             totals = m->staging < PS__STAGE_TOTALS || m->keep.blocks;
  return (state ? s->held_bytes[n] : 0) + (totals ? totals_lacked(s, m, n, likely) : 0);
}

static uint64_t without(uint64_t bytes, uint64_t by) { return bytes > by ? bytes - by : 0; }

void ps__hold_all_that_fit(const ps__search *s, const ps__candidate *m, uint64_t bytes[PS__N_MEMS],
                           bool likely) {
  const uint64_t cap = s->cap[PS__DEVICE_MEM], all = bytes[PS__PINNED_MEM],
                 apart = without(bytes[PS__DEVICE_MEM], ps__page_table_bytes(&s->plan->hw, all));
  uint64_t device = apart, pinned = all;
  uint8_t n = 0;
  if (!s->plan->holds || apart >= cap)
    return;
  /* first as if nothing were pinned: then page tables are those of what is pinned at least */
  for (int i = 0; i < 2 && device < cap; i++) {
    n = blocks_within(s, cap == UINT64_MAX ? cap : cap - device);
    pinned = without(all, pinned_bytes(s, m, n, likely));
    device = apart + ps__page_table_bytes(&s->plan->hw, pinned);
  }
  bytes[PS__DEVICE_MEM] = device;
  bytes[PS__PINNED_MEM] = pinned;
  bytes[PS__HOST_MEM] =
      without(bytes[PS__HOST_MEM], s->held_bytes[n] + totals_lacked(s, m, n, likely));
}

void ps__without_held(const ps__search *s, const ps__candidate *m, uint64_t bytes[PS__N_MEMS]) {
  const uint64_t there = s->held_there[m->held];
  bytes[PS__DEVICE_MEM] -= there < bytes[PS__DEVICE_MEM] ? there : bytes[PS__DEVICE_MEM];
  bytes[PS__HOST_MEM] += s->held_bytes[m->held];
}

enum { TRIES = 6 };

ps_status ps__evaluate_holding(ps__search *s, ps__candidate *m, ps__evaluation *e) {
  PS_TRY(ps__evaluate_begin(s, m, e));
  for (int i = 0; s->plan->holds && i < TRIES; i++) {
    ps_status st = ps__fits(s, e->bytes) ? ps__evaluate_map(s, e) : PS_OK;
    const uint8_t held = ps__blocks_to_hold(s, m->held, e->bytes);
    if (st == PS_OK && (held == m->held || e->bytes[PS__DEVICE_MEM] > s->cap[PS__DEVICE_MEM]))
      return PS_OK;
    ps__evaluation_end(s, e);
    m->held = held;
    PS_TRY(st);
    PS_TRY(ps__evaluate_begin(s, m, e));
  }
  return PS_OK;
}
