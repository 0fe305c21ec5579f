/* candidates.c - the search space: its candidates, what each costs at least and about. */
#include "plan/candidates.h"
#include "optim/optim.h"
#include <stdio.h>
#include <string.h>

enum { LARGE_STEP_OPS = 60000 };
/* A search space is large where the steps of its usual candidates have more ops in all. */
static const double LARGE_SPACE_OPS = 2e8;
/* On a GPU also where they have more on average, however few candidates there are (a pinned round):
 * the local search gains up to a tenth of such a step. */
static const double LONG_STEP_OPS = 6000;

const ps__residency ps__residencies[PS__N_RESIDENCIES] = {
    {0, 0, 0, 0, 0, 0, 0},   {0, 0, 1, 0, 0, 0, 0},   {8, 0, 1, 0, 0, 0, 0},
    {16, 0, 1, 0, 0, 0, 0},  {32, 0, 1, 0, 0, 0, 0},  {8, 8, 1, 0, 0, 0, 0},
    {16, 16, 1, 0, 0, 0, 0}, {32, 16, 1, 0, 0, 0, 0}, {32, 32, 1, 0, 0, 0, 0},
    {32, 32, 1, 1, 0, 0, 0}, {0, 0, 1, 0, 4, 0, 0},   {0, 0, 1, 0, 8, 0, 0},
    {0, 0, 1, 0, 16, 0, 0},  {0, 0, 1, 0, 32, 0, 0},  {0, 0, 0, 0, 0, 1, 0},
    {0, 0, 1, 0, 0, 1, 0},   {16, 0, 1, 0, 0, 1, 0},  {32, 0, 1, 0, 0, 1, 0},
    {0, 32, 1, 0, 0, 1, 0},  {16, 32, 1, 0, 0, 1, 0}, {32, 32, 1, 0, 0, 1, 0},
    {0, 0, 0, 0, 0, 1, 16},  {0, 0, 1, 0, 0, 1, 16},  {0, 0, 0, 0, 0, 1, 32},
    {0, 0, 1, 0, 0, 1, 32},  {0, 32, 1, 0, 0, 1, 32}};

/* ---- a candidate ----------------------------------------------------------------------------- */

ps_status ps__candidate_spec(const ps__search_space *sp, const ps__candidate *m,
                             const ps__layout *l, ps__spec *out) {
  return ps__decide(sp, l, m,
                    ps__embed_on_host(sp, &sp->microbatch[m->microbatch].layout, &m->keep), out);
}

ps_status ps__search_space_shorten(ps__search_space *sp) {
  for (uint32_t i = 0; i < sp->n_microbatches; i++) {
    ps__microbatch *mb = &sp->microbatch[i];
    const ps__layout *l = &mb->layout;
    const uint32_t n = sp->plan->at->n_devices, more_firsts = (l->first_rounds - 1) / n * n,
                   evaluated = PS__ROUNDS_EVALUATED * n + more_firsts;
    if (l->n_rounds < evaluated + n)
      continue;
    /* the others keep their devices */
    const uint32_t left_out = (l->n_rounds - evaluated) / n * n;
    const ps__round *usual = &l->round[l->first_rounds];
    uint64_t tokens = 0;
    for (uint32_t c = 0; c < usual->n_chunks; c++)
      tokens += l->chunk[usual->first_chunk + c].n_tokens;
    PS_TRY(ps__layout_init(&mb->shorter, l->seq_len,
                           l->n_sequences - left_out * (tokens / l->seq_len), l->chunk_tokens,
                           l->chunks_per_round, l->first_round_chunks, l->first_rounds));
    mb->n_left_out = mb->shorter.n_left_out = left_out;
  }
  return PS_OK;
}

double ps__offloaded_part_bytes(const ps__search_space *sp, const ps__candidate *m) {
  const uint32_t n = ps__is_ring(sp->plan)
                         ? sp->plan->at->n_devices
                         : ps__rounds_at_once(sp, &sp->microbatch[m->microbatch].layout);
  return ps__saved_part_bytes(sp, m) * n;
}

double ps__saved_part_bytes(const ps__search_space *sp, const ps__candidate *m) {
  const ps__layout *l = &sp->microbatch[m->microbatch].layout;
  double bytes = 0;
  for (uint32_t layer = ps__first_saving(sp->plan->model) + 1;
       layer < ps__head_layer(sp->plan->model); layer++) {
    const ps__layer_def *d = ps__layer_of(sp->plan->model, layer);
    for (uint32_t c = 0; c < l->round[0].n_chunks && c < l->chunks_per_round; c++)
      for (uint32_t i = 0; i < d->n_saved; i++)
        bytes += (double)ps__saved_bytes(&d->saved[i], l->chunk[c].n_tokens);
  }
  /* in a ring a device has its blocks' part of each round that runs at once */
  if (ps__is_ring(sp->plan))
    bytes *= (double)ps__rounds_at_once(sp, l) / sp->plan->at->n_devices;
  return bytes / PS__SAVED_PARTS;
}

static uint64_t layer_bytes(const ps__search_space *sp, uint32_t layer) {
  const ps__layer *l = &sp->plan->model->layer[layer];
  uint64_t bytes = 0;
  for (uint32_t u = l->first_unit; u < l->first_unit + l->n_units; u++)
    bytes += ps__unit_bytes(sp, u);
  return bytes;
}

double ps__unit_part_bytes(const ps__search_space *sp) {
  double bytes = 0;
  for (uint32_t u = 0; u < sp->plan->model->n_units; u++)
    bytes += (double)ps__unit_bytes(sp, u);
  return bytes / PS__UNIT_PARTS / (ps__is_ring(sp->plan) ? sp->plan->at->n_devices : 1);
}

double ps__total_part_bytes(const ps__search_space *sp, const ps__candidate *m) {
  const ps__layout *l = &sp->microbatch[m->microbatch].layout;
  const ps_dtype dt = sp->plan->model->dt;
  const uint32_t n =
      ps__contributions_of(l, ps__head_slice(sp->plan, l->chunk_tokens), dt, false).by_chunk;
  const bool low = n > 2 && (ps__sum_mode(1, n, n, dt) & PS_LOW_WRITE);
  if (!ps__totals_may_stay(sp->plan))
    return ps__unit_part_bytes(sp);
  return ps__unit_part_bytes(sp) *
         (1 + (low ? 1.0 / ps__stored_each(ps__weight_storage(sp->plan->model)) : 0)) /
         sp->plan->at->n_devices;
}

enum { OPS_BESIDE = 1 << 20 }; /* of steps that are evaluated at once; about 1.3 KB each */

uint32_t ps__search_space_workers(const ps__search_space *sp, uint32_t n) {
  const uint32_t n_cpus = sp->plan->most_workers ? sp->plan->most_workers : ps__n_cpus();
  size_t most = 1;
  for (uint32_t i = 0; i < sp->n_microbatches; i++)
    if (sp->microbatch[i].n_ops > most)
      most = sp->microbatch[i].n_ops;
  const size_t beside = OPS_BESIDE / most > 0 ? OPS_BESIDE / most : 1;
  if (n > n_cpus)
    n = n_cpus;
  return n < beside ? n : (uint32_t)beside;
}

/* ---- what a configuration costs in any case -------------------------------------------------- */

/* The most bytes alive on the device in the head of a round of device 0. Without:
 *   - saved activations;
 *   - the parameters of the head and of the last layer, which may be among those that stay;
 *   - one gradient of the last layer;
 *   - with several devices, the head's gradient.
 * Every candidate of the configuration has the same
 * tensors there, and beside them its own saved activations of the round and what stays. So all of
 * these are alive at once. The head's gradient is in the bytes: a total that stays is a tensor of
 * its own beside the contribution that the pass makes, but in the first round, where it counts
 * once. With several devices it is left out, and the bound is so much lower. */
static ps_status boundary_bytes(const ps__search_space *sp, const ps__step *s, uint32_t round,
                                uint64_t *out) {
  const uint32_t layers = sp->plan->model->cfg.n_layers, of_head = s->at->n_devices > 1 ? 2 : 1;
  uint64_t alive = 0, most = 0;
  int64_t *change = ps__calloc(s->n_op + 1, sizeof *change);
  if (!change)
    return ps__fail(PS_ENOMEM, "out of memory for a plan's size");
  for (size_t i = 0; i < s->n_vt; i++) {
    const ps__vt *t = &s->vt[i];
    if (t->space != s->at->dev[0].place || t->persistent)
      continue;
    change[t->first] += (int64_t)t->bytes;
    change[t->last] -= (int64_t)t->bytes;
  }
  for (size_t i = 0; i < s->n_op; i++) {
    const ps__vop *op = &s->op[i];
    alive += (uint64_t)change[i];
    if (op->tag.phase == PS__PHASE_HEAD && op->tag.round == (int32_t)round &&
        op->stream == s->at->dev[0].compute && alive > most)
      most = alive;
  }
  ps__free(change);
  const uint64_t apart = ps__saved_of_round(sp, s->layout, round) +
                         of_head * layer_bytes(sp, layers + 1) + 2 * layer_bytes(sp, layers) +
                         (ps__tied(sp->plan->model) ? of_head * ps__unit_bytes(sp, 0) : 0);
  *out = most > apart ? most - apart : 0;
  return PS_OK;
}

/* Ops that a candidate may lack: they are not on compute streams. What it fetches, sends and adds
 * on the host depends on what stays on the device. */
static uint64_t ops_of_units(const ps__step *s) {
  uint64_t n = 0;
  for (size_t i = 0; i < s->n_op; i++)
    n += !ps__is_compute(s->at, s->op[i].stream);
  return n;
}

static ps_status measure_base(const ps__search_space *sp, ps__microbatch *mb, bool embed_on_host,
                              ps__step_hooks *hooks, ps__step_arrays *arrays) {
  const ps__candidate all = {.device = PS__SAVED_PARTS,
                             .from_host = ps__from_host_first(sp->plan),
                             .staging = sp->plan->staging};
  ps__microbatch_base *base = &mb->base[embed_on_host];
  ps__spec spec;
  ps__step s;
  uint64_t scratch, trace, boundary[2] = {0};
  *base = (ps__microbatch_base){0};
  PS_TRY(ps__decide(sp, &mb->layout, &all, embed_on_host, &spec));
  ps_status st = ps__step_emit_in(&s, arrays, sp->plan->model, &mb->layout, &spec, hooks);
  if (st == PS_OK) {
    size_t n_compute = 0;
    for (size_t i = 0; i < s.n_op; i++) {
      const ps__vop *op = &s.op[i];
      const double ns = ps__cost_ns(&sp->cost, op->kernel, op->stream, s.args + op->args, op->work);
      n_compute += op->stream == sp->plan->at->dev[0].compute;
      if (op->stream == sp->plan->at->dev[0].compute)
        base->compute_ns += ns;
      if (op->stream == sp->plan->at->dev[0].compute && op->tag.phase == PS__PHASE_FORWARD)
        base->forward_ns[0] += ns;
      if (op->stream == sp->plan->at->dev[0].compute && op->tag.phase == PS__PHASE_FORWARD &&
          op->tag.round == 0)
        base->forward_ns[1] += ns;
      if (op->stream == sp->plan->at->dev[0].to_device && op->tag.chunk >= 0 && op->tag.layer < 0)
        base->batch_bytes += (uint64_t)op->work.bytes;
    }
    /* in a ring not all saved activations of device 0 are alive at its head */
    if (!ps__is_ring(sp->plan))
      st = boundary_bytes(sp, &s, 0, &boundary[0]);
    if (st == PS_OK && s.at->n_devices == 1 && mb->layout.n_rounds > 1)
      st = boundary_bytes(sp, &s, 1, &boundary[1]);
    for (uint32_t i = 0; i < 2; i++)
      base->device_bytes[i] = ps__device_overhead(&sp->plan->hw, sp->plan->model->fp8.on, s.at,
                                                  s.scratch_bytes, &scratch) +
                              ps__net_memory(sp->plan) + boundary[i];
    base->host_bytes = ps__host_overhead(sp->plan, &s, &sp->plan->guests, &scratch, &trace) -
                       ops_of_units(&s) * ps__bytes_an_op(sp->plan);
    mb->n_ops = s.n_op;
    mb->coarse |=
        s.n_op > LARGE_STEP_OPS || (double)n_compute * sp->plan->hw.op_ns > base->compute_ns / 4;
    ps__step_leave(&s, arrays);
  }
  ps__spec_free(&spec);
  return st;
}

/* Whether the search space may have candidates of this residency: totals and state may have to be
 * on the host, and the CPU backend's device has no processor of its own. */
static bool admits(const ps__search_space *sp, const ps__residency *r) {
  if (r->state && sp->plan->disk_first != UINT32_MAX)
    return false;
  if (r->blocks && (sp->plan->hw.backend != PS_BACKEND_CUDA || sp->plan->cfg.keep_grads ||
                    ps__blocks_of(sp, r) == 0))
    return false;
  if (r->passing &&
      (ps__waits_for_norm(sp->plan) || sp->plan->cfg.keep_grads || sp->plan->model->n_trained == 0))
    return false;
  if (r->again && (ps__is_ring(sp->plan) || sp->plan->model->lora.base ||
                   ps__has_delta_nets(&sp->plan->model->cfg) ||
                   ps__first_saving(sp->plan->model) + 2 > sp->plan->model->cfg.n_layers))
    return false;
  return !ps__totals_on_host(sp->plan) || !(r->grads || r->state || r->blocks);
}

/* Whether a candidate of the configuration has the embedding on the device. */
static bool any_on_device(const ps__search_space *sp, const ps__microbatch *mb) {
  for (uint32_t r = 0; r < PS__N_RESIDENCIES; r++)
    if (admits(sp, &ps__residencies[r]) && !ps__embed_on_host(sp, &mb->layout, &ps__residencies[r]))
      return true;
  return false;
}

static ps_status measure_microbatch(const ps__search_space *sp, ps__microbatch *mb,
                                    ps__step_hooks *hooks, ps__step_arrays *arrays) {
  for (uint32_t on_host = !any_on_device(sp, mb); on_host <= !ps__tied(sp->plan->model); on_host++)
    PS_TRY(measure_base(sp, mb, on_host, hooks, arrays));
  return PS_OK;
}

/* ---- bounds ---------------------------------------------------------------------------------- */

/* Rounds of device 0, which has the most. */
static uint32_t device_rounds(const ps__search_space *sp, const ps__layout *l) {
  const uint32_t n = sp->plan->at->n_devices;
  return (l->n_rounds + n - 1) / n;
}

static double larger(double a, double b) { return a > b ? a : b; }

/* BYTES of a step on device 0's links, in host memory and in device memory, by where units are.
 * Half of what is fetched in each round is for its forward pass. */
typedef struct traffic {
  double to_device, to_host, host_ops, device_sums, device_updates, updates;
  double blocks; /* parameters of the streamed blocks, once */
  /* what the prefetch distance saves at most (passes_led()), by its number */
  double fetched_ahead[PS__N_AHEADS];
} traffic;

/* How many of the @passes of the layer in each round find its parameters there because of the
 * prefetch distance, in a step at most. Layer passes are as make_passes() in step/units.c numbers
 * them. Towards the end of a round those of the next one are due four times as early: with few
 * layers all of them are. In a ring rounds run behind each other, and what one of them has used
 * last another one still uses. */
static double passes_led(const ps__search_space *sp, const ps__layout *l, uint32_t layer,
                         bool table_on_host, uint32_t ahead, double passes) {
  const ps_model *m = sp->plan->model;
  const bool ring = ps__is_ring(sp->plan);
  const uint32_t layers = m->cfg.n_layers;
  const uint32_t trained = ps__first_trained(m), first = trained > 1 ? trained : 1;
  const uint32_t lead = 4 * ahead; /* layer passes by which a fetch comes before its use, at most */
  const uint32_t backward = first <= layers ? layers - first + 1 : 0;
  const uint32_t a_round = layers + 3 + backward; /* its layer passes */
  const uint32_t last = ps__is_block(m, layer) && layer >= first ? 2 * layers + 2 - layer
                        : layer == 0 && ps__tied(m)              ? layers + 1
                                                                 : layer;
  /* layer passes by which rounds of other devices still use the layer */
  const uint32_t behind = ring ? ps__rounds_at_once(sp, l) - 1 : 0;
  /* the first block's come with the rows of an embedding on the host: one pass sooner */
  const uint32_t sooner = table_on_host + behind;
  const double rounds = device_rounds(sp, l);
  const bool in_round = ring && passes > 1 && layers + 1 - layer <= ahead;
  const double again = layers + sooner <= lead ? passes : a_round + layer - last <= lead + sooner;
  return again * (rounds - 1) + in_round * rounds;
}

/* BYTES of the embedding rows of device 0's tokens. */
static double lookups_of_device(const ps__search_space *sp, const ps__layout *l) {
  const uint32_t next = ps__is_ring(sp->plan) ? 1 : sp->plan->at->n_devices;
  double tokens = 0;
  for (uint32_t r = 0; r < l->n_rounds; r += next)
    for (uint32_t c = 0; c < l->round[r].n_chunks; c++)
      tokens += l->chunk[l->round[r].first_chunk + c].n_tokens;
  return ps__lookup_bytes(sp, l) * tokens / (double)l->n_tokens;
}

static traffic unit_traffic(const ps__search_space *sp, const ps__layout *l,
                            const ps__residency *r) {
  const ps_model *m = sp->plan->model;
  const double update = ps__update_bytes((ps_optimizer)sp->plan->cfg.optimizer,
                                         ps__plan_row(&sp->plan->cfg), PS_UPDATE_WHOLE);
  const uint32_t n_units = m->n_units, first_trained = ps__first_trained(m),
                 rounds = device_rounds(sp, l);
  const double share = 1.0 / sp->plan->at->n_devices, /* of the step's tokens, at least */
      rows = ps__is_ring(sp->plan) ? 1 : share;       /* of the embedding's */
  const bool table_on_host = ps__embed_on_host(sp, l, r);
  const ps__contributions sums = ps__contributions_of(l, ps__head_slice(sp->plan, l->chunk_tokens),
                                                      sp->plan->model->dt, false);
  traffic t = {0};
  /* Its rows' gradients are copied to the host; a frozen one has none. The first block's inputs,
   * which the saved activations count, are not copied: where the embedding is frozen this is
   * negative. */
  if (table_on_host) {
    t.to_device = rows * ps__lookup_bytes(sp, l);
    t.to_host = m->unit[0].frozen ? -lookups_of_device(sp, l) : rows * 4.0 * (double)l->n_tokens;
  }
  if (table_on_host && !m->unit[0].frozen) {
    t.host_ops = 3 * ps__lookup_bytes(sp, l) + ps__table_bytes(sp);
    t.updates = update * (double)m->unit[0].n;
  }
  for (uint32_t u = table_on_host; u < n_units; u++) {
    /* at least */
    const uint32_t layer = m->unit[u].layer;
    const double bytes = (double)ps__unit_bytes(sp, u), n = (double)m->unit[u].n,
                 passes =
                     layer < first_trained || layer == 0 || layer + 1 >= ps__head_layer(m) ? 1 : 2;
    const uint32_t contributions = ps__unit_contributions(m, &sums, u);
    const bool in_blocks = layer > 0 && layer <= ps__blocks_of(sp, r),
               grads = (ps__among(sp, u, r->grads) || in_blocks) && contributions > 1,
               frozen = m->unit[u].frozen, stays = ps__params_stay(sp, r, u);
    const double added = ps__sum_bytes(n, contributions, contributions, sp->plan->model->dt);
    /* in pieces the other devices bring the rest, and add the contributions */
    const bool pieces = ps__takes_pieces(sp->plan, u) && !ps__from_host_first(sp->plan);
    const double part = pieces ? share : 1;
    /* in a ring a device has no part of the others' blocks, and all rounds of its own */
    const bool dealt = ps__is_ring(sp->plan) && layer != ps__head_layer(m);
    /* the head of one round is shared, and device 0 may have no part of it */
    const bool shared = ps__is_ring(sp->plan) && !dealt && l->n_rounds == 1;
    /* its state may be held: then neither its update nor, with one device, its sums are the host's
     * work, and state does not cross the link */
    const bool may_hold = sp->plan->holds && ps__is_block(m, layer),
               sums_may_leave = may_hold && !ps__totals_on_host(sp->plan);
    if (ps__dealt_to(sp->plan, layer) != 0 || shared) {
      t.host_ops += frozen || pieces ? 0 : added;
      t.updates += frozen || may_hold ? 0 : update * n;
      continue;
    }
    if (!stays && (frozen || !r->state))
      t.to_device += part * passes * bytes * rounds;
    else if (stays && !frozen && !r->state && !sums_may_leave)
      t.to_device += part * bytes;
    if ((frozen || !r->state) && !stays && ps__is_block(m, layer))
      t.blocks += bytes;
    for (uint32_t ahead = 0; ahead < PS__N_AHEADS && (frozen || !r->state) && !stays; ahead++)
      t.fetched_ahead[ahead] +=
          part * bytes * passes_led(sp, l, layer, table_on_host, ahead, passes);
    if (frozen)
      continue;
    const bool streamed = in_blocks && !r->state;
    const double state = (double)ps__unit_state_bytes(sp, u);
    if (streamed && !may_hold) {
      t.to_device += state;
      t.to_host += state;
    }
    /* in a ring the slices of a shared head may be other devices', but no chunk of the embedding */
    double sent_bytes_factor = dealt && layer ? contributions : share * contributions;
    if (dealt && sent_bytes_factor > (m->unit[u].by_chunk ? sums.by_chunk : 0))
      sent_bytes_factor = m->unit[u].by_chunk ? sums.by_chunk : 0;
    t.to_host += r->state || streamed               ? bytes
                 : grads || (may_hold && r->blocks) ? bytes
                 : pieces                           ? share * bytes * rounds
                                                    : sent_bytes_factor * bytes;
    if (pieces)
      t.to_device += share * bytes * (rounds - 1);
    if (grads)
      t.device_sums += added;
    else if (!pieces && !r->state && !sums_may_leave)
      t.host_ops += added;
    if (r->state || (streamed && !may_hold))
      t.device_updates += update * n;
    else if (!may_hold)
      t.updates += update * n;
  }
  t.host_ops += t.updates;
  return t;
}

/* unit_traffic() without the parameters that are not fetched again between two rounds:
 *   - as many bytes as saved activations leave room for (ps__spec.blocks_kept);
 *   - the first @ahead blocks, whose next layer pass is fetched for before the last one is over. */
static traffic with_kept_parameters(const ps__search_space *sp, const traffic *of,
                                    const ps__layout *l, const ps__saved_sums *s, uint32_t ahead) {
  traffic t = *of;
  const double kept = larger((double)s->device_bytes, (double)(ahead * layer_bytes(sp, 1)));
  t.to_device -= (device_rounds(sp, l) - 1) * (kept < t.blocks ? kept : t.blocks);
  return t;
}

/* The same for the bound: by what ps__spec.blocks_kept leaves room for, and by what the prefetch
 * distance keeps. */
static traffic with_most_kept(const ps__search_space *sp, const traffic *of, const ps__layout *l,
                              const ps__saved_sums *s, uint32_t ahead) {
  traffic t = *of;
  t.to_device -= t.fetched_ahead[ahead] +
                 (device_rounds(sp, l) - 1) * (s->room_bytes < t.blocks ? s->room_bytes : t.blocks);
  t.to_device = larger(t.to_device, 0);
  return t;
}

/* The bound of a candidate's time: no stream and no shared resource works less. The simulator,
 * which judges candidates, keeps to both. */
static double bound_of(const ps__search_space *sp, const ps__microbatch_base *base,
                       const ps__saved_sums *s, const traffic *t) {
  const ps_hardware *hw = sp->cost.hw;
  const double in_rate = hw->link[PS_LINK_H2D].bytes_per_s,
               out_rate = hw->link[PS_LINK_D2H].bytes_per_s,
               both_rate = 2 * hw->link[PS_LINK_H2D].duplex_bytes_per_s;
  const double h2d_bytes = t->to_device + s->offloaded_bytes + (double)base->batch_bytes,
               d2h_bytes = t->to_host + s->offloaded_bytes;
  const double device_rate =
      hw->backend == PS_BACKEND_CPU ? hw->optimizer_bytes_per_s : hw->elementwise_bytes_per_s;
  const double compute =
      base->compute_ns + s->recompute_ns +
      (t->device_sums / hw->elementwise_bytes_per_s + t->device_updates / device_rate) * 1e9;
  const double h2d = h2d_bytes / in_rate * 1e9, d2h = d2h_bytes / out_rate * 1e9;
  double sums_rate = larger(hw->accumulate_bytes_per_s, hw->accumulate_sumsq_bytes_per_s);
  for (uint32_t i = 1; ps__sum_threads(hw, i); i++)
    sums_rate = larger(sums_rate, sums_rate * ps__sum_speed(hw, ps__sum_threads(hw, i)));
  const double host =
      (t->updates / hw->optimizer_bytes_per_s + (t->host_ops - t->updates) / sums_rate) * 1e9;
  double bound = larger(larger(compute, host), larger(h2d, d2h));
  if (hw->backend == PS_BACKEND_CPU) {
    const double all =
                     sp->cost.n_threads < hw->n_cpus ? (double)sp->cost.n_threads / hw->n_cpus : 1,
                 one = 1.0 / hw->n_cpus;
    bound = larger(bound, (compute + host) * all + (h2d + d2h) * one);
  } else {
    bound = larger(bound, (h2d_bytes + d2h_bytes) / both_rate * 1e9);
  }
  return larger(bound, ps__disk_ns(hw, ps__disk_bytes(sp->plan)));
}

/* The estimate of a candidate's time. The forward passes of all rounds are taken as one fluid, and
 * so are the backward passes: each takes as long as the slowest of compute, link and host memory.
 * Of the updates, what their cover does not hide is added: the first forward pass with clipping,
 * the last backward pass without. Transfers that are not issued ahead are hidden by nothing. */
static double estimate_of(const ps__search_space *sp, const ps__microbatch_base *base,
                          const ps__saved_sums *s, const traffic *t, uint32_t ahead) {
  const ps_hardware *hw = sp->cost.hw;
  const double in_rate = hw->link[PS_LINK_H2D].bytes_per_s,
               out_rate = hw->link[PS_LINK_D2H].bytes_per_s,
               both_rate = 2 * hw->link[PS_LINK_H2D].duplex_bytes_per_s;
  const double ns = 1e9, fetched = t->to_device / 2, offloaded = s->offloaded_bytes,
               sums = t->host_ops - t->updates, n = sp->plan->at->n_devices;
  const double forward = base->forward_ns[0],
               backward = base->compute_ns - forward + s->recompute_ns;
  const double f_h2d = fetched / in_rate * ns, f_d2h = offloaded / out_rate * ns;
  const double b_h2d = (fetched + offloaded) / in_rate * ns, b_d2h = t->to_host / out_rate * ns;
  const double f_both = (fetched + offloaded) / both_rate * ns,
               b_both = (fetched + offloaded + t->to_host) / both_rate * ns;
  double b_memory = (n * (fetched + offloaded + t->to_host) + sums) / hw->memory_bytes_per_s * ns,
         f_memory = n > 1 ? n * (fetched + offloaded) / hw->memory_bytes_per_s * ns : 0;
  const ps_contention_rate *gpus = ps__gpus_copies(hw, sp->plan->at->n_devices);
  if (gpus) {
    b_memory =
        larger((fetched + offloaded) / gpus->h2d_bytes_per_s, t->to_host / gpus->d2h_bytes_per_s) *
        ns;
    f_memory = larger(fetched / gpus->h2d_bytes_per_s, offloaded / gpus->d2h_bytes_per_s) * ns;
  }
  const double b_sums = sums / hw->accumulate_bytes_per_s * ns;
  const double disk = ps__disk_ns(hw, ps__disk_bytes(sp->plan)),
               updates = larger(t->updates / hw->optimizer_bytes_per_s * ns, disk),
               first_round = forward > 0 ? base->forward_ns[1] / forward : 1;
  double passes =
      larger(larger(larger(forward, f_both), larger(f_h2d, f_d2h)), f_memory) +
      larger(larger(larger(backward, b_both), larger(b_h2d, b_d2h)), larger(b_memory, b_sums));
  if (ahead == 0)
    passes = forward + backward + f_h2d + f_d2h + b_h2d + b_d2h;
  const double hidden = ps__waits_for_norm(sp->plan) ? base->forward_ns[1] : backward * first_round;
  return passes + (updates > hidden ? updates - hidden : 0);
}

/* ---- candidates ------------------------------------------------------------------------------ */

/* @special: those for short host memory, else the usual ones. */
static ps_status add_candidates(ps__search_space *sp, uint32_t idx, bool special) {
  ps__microbatch *mb = &sp->microbatch[idx];
  ps__recompute_table *table = NULL;
  uint32_t *of_chunk = NULL;
  const uint32_t step = mb->coarse ? 3 : 1;
  ps_status st = ps__recompute_tables(sp, mb, &table, &of_chunk);
  traffic t[PS__N_RESIDENCIES];
  const ps__microbatch_base *base[PS__N_RESIDENCIES];
  uint64_t stays[PS__N_RESIDENCIES], totals[PS__N_RESIDENCIES], host[PS__N_RESIDENCIES],
      free[PS__N_RESIDENCIES];
  for (uint32_t r = 0; r < PS__N_RESIDENCIES; r++) {
    t[r] = unit_traffic(sp, &mb->layout, &ps__residencies[r]);
    base[r] = &mb->base[ps__embed_on_host(sp, &mb->layout, &ps__residencies[r])];
    stays[r] = ps__staying_bytes(sp, &mb->layout, &ps__residencies[r], &totals[r]);
    host[r] = base[r]->host_bytes + ps__host_state_bytes(sp, &mb->layout, &ps__residencies[r]);
    free[r] = ps__pageable_bytes(sp, &mb->layout, &ps__residencies[r]);
  }
  for (uint32_t d = 0; st == PS_OK && d <= PS__SAVED_PARTS; d += PS__DEVICE_GRID * step)
    for (uint32_t h = 0; st == PS_OK && d + h <= PS__SAVED_PARTS; h += PS__HOST_GRID * step) {
      ps__candidate m = {.microbatch = (uint8_t)idx,
                         .device = (uint8_t)d,
                         .host = (uint8_t)h,
                         .from_host = ps__from_host_first(sp->plan),
                         .staging = sp->plan->staging,
                         .disk = (uint8_t)sp->plan->disk_level};
      ps__saved_sums s = {0};
      int again = -1; /* the residency's that s is of */
      for (uint32_t i = 0; st == PS_OK && i < PS__N_RESIDENCIES * PS__N_AHEADS; i++) {
        m.residency = (uint8_t)(i / PS__N_AHEADS);
        m.keep = ps__residencies[m.residency];
        if (!admits(sp, &m.keep) || (ps__kind_of(&m.keep) != PS__KIND_USUAL) != special ||
            (m.keep.passing && mb->layout.n_rounds > sp->plan->at->n_devices))
          continue;
        if (again != m.keep.again)
          ps__sum_saved(sp, mb, &m, table, of_chunk, &s);
        again = m.keep.again;
        m.streamed = (uint8_t)ps__blocks_of(sp, &m.keep);
        m.ahead = (uint8_t)(i % PS__N_AHEADS);
        const traffic now = with_kept_parameters(sp, &t[m.residency], &mb->layout, &s, m.ahead);
        const traffic least = with_most_kept(sp, &t[m.residency], &mb->layout, &s, m.ahead);
        m.bound_ns = bound_of(sp, base[m.residency], &s, &least);
        m.estimate_ns = larger(m.bound_ns, estimate_of(sp, base[m.residency], &s, &now, m.ahead));
        const uint64_t saved = m.keep.passing ? s.unaliased_bytes : s.host_bytes,
                       arena = host[m.residency] - base[m.residency]->host_bytes + saved,
                       pinned = arena > free[m.residency] ? arena - free[m.residency] : 0;
        const ps__microbatch_base *at = base[m.residency];
        const uint64_t in_first = at->device_bytes[0] + s.device_bytes,
                       in_second = at->device_bytes[1] + s.second_bytes + totals[m.residency];
        m.bytes[PS__DEVICE_MEM] = stays[m.residency] +
                                  (in_first > in_second ? in_first : in_second) +
                                  ps__page_table_bytes(&sp->plan->hw, pinned);
        m.bytes[PS__HOST_MEM] = host[m.residency] + saved;
        m.bytes[PS__PINNED_MEM] = pinned;
        if (!ps__grow((void **)&sp->candidate, sp->n_candidates, &sp->cap_candidates,
                      sizeof *sp->candidate))
          st = ps__fail(PS_ENOMEM, "out of memory for the search space");
        else
          sp->candidate[sp->n_candidates++] = m;
      }
    }
  ps__free(table);
  ps__free(of_chunk);
  return st;
}

typedef struct measuring {
  ps__search_space *sp;
  ps__step_hooks *hooks;
  ps_status status[PS__MAX_MICROBATCHES];
  ps__step_arrays arrays[PS__MAX_MICROBATCHES]; /* by worker */
  char why[PS__MAX_MICROBATCHES][128];          /* each thread has a last error of its own */
} measuring;

static void measure_task(void *arg, int64_t i, uint32_t worker) {
  measuring *m = arg;
  m->status[i] = measure_microbatch(m->sp, &m->sp->microbatch[i], m->hooks, &m->arrays[worker]);
  if (m->status[i] != PS_OK)
    snprintf(m->why[i], sizeof m->why[i], "%s", ps_last_error());
}

static ps_status measure_all(measuring *m) {
  const uint32_t n = m->sp->n_microbatches;
  ps__pool *pool;
  PS_TRY(ps__pool_create(&pool, ps__search_space_workers(m->sp, n), "search"));
  ps__pool_run(pool, n, measure_task, m);
  ps__pool_destroy(pool);
  for (uint32_t i = 0; i < n; i++)
    ps__step_arrays_free(&m->arrays[i]);
  for (uint32_t i = 0; i < n; i++)
    if (m->status[i] != PS_OK)
      return ps__fail(m->status[i], "%s", m->why[i]);
  return PS_OK;
}

/* All configurations are measured at once; their candidates follow in order. */
static ps_status measure_microbatches(ps__search_space *sp, ps__step_hooks *hooks) {
  if (sp->n_microbatches == 0)
    return PS_OK;
  measuring *m = ps__calloc(1, sizeof *m); /* 31 KB: stacks may be small */
  if (!m)
    return ps__fail(PS_ENOMEM, "out of memory for the search space");
  m->sp = sp;
  m->hooks = hooks;
  ps_status st = measure_all(m);
  ps__free(m);
  for (uint32_t i = 0; st == PS_OK && i < sp->n_microbatches; i++)
    st = add_candidates(sp, i, false);
  return st;
}

bool ps__search_space_is_large(const ps__search_space *sp) {
  double n = 0, ops = 0;
  for (size_t i = 0; i < sp->n_candidates; i++)
    if (ps__kind_of(&sp->candidate[i].keep) == PS__KIND_USUAL) {
      ops += (double)sp->microbatch[sp->candidate[i].microbatch].n_ops;
      n++;
    }
  return ops > LARGE_SPACE_OPS ||
         (sp->plan->hw.backend == PS_BACKEND_CUDA && ops > LONG_STEP_OPS * n);
}

/* Candidates that keep the gradients of blocks on the device are usually slower than others, and
 * where totals pass updates may hold back copies. A small search space, all of which is evaluated,
 * has some only where all others, but those with all state on the device, need more than
 * HOST_IS_SHORT of the host's memory. */
static const double HOST_IS_SHORT = 0.8;

static bool host_is_short(const ps__search_space *sp, uint64_t host_bytes) {
  uint64_t least = UINT64_MAX;
  for (size_t i = 0; i < sp->n_candidates; i++)
    if (sp->candidate[i].bytes[PS__HOST_MEM] < least && !sp->candidate[i].keep.state)
      least = sp->candidate[i].bytes[PS__HOST_MEM];
  return (double)least > HOST_IS_SHORT * (double)host_bytes;
}

ps_status ps__search_space_init(ps__search_space *sp, const ps_plan *plan, uint64_t host_bytes,
                                ps__step_hooks *hooks) {
  memset(sp, 0, sizeof *sp);
  sp->plan = plan;
  sp->cost = ps__cost_model_of(&plan->hw, plan->model->fp8.on, plan->at, plan->hw.n_threads, 0);
  PS_TRY(ps__add_microbatches(sp));
  PS_TRY(measure_microbatches(sp, hooks));
  const bool all_kinds = ps__search_space_is_large(sp) || host_is_short(sp, host_bytes);
  for (uint32_t i = 0; all_kinds && i < sp->n_microbatches; i++)
    PS_TRY(add_candidates(sp, i, true));
  return PS_OK;
}

void ps__search_space_free(ps__search_space *sp) {
  for (uint32_t i = 0; i < sp->n_microbatches; i++) {
    ps__layout_free(&sp->microbatch[i].layout);
    ps__layout_free(&sp->microbatch[i].shorter);
  }
  ps__free(sp->candidate);
}
