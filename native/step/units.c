/* units.c - the units' tensors, the layer passes, and parameters on their way to the device. */
#include "step/emit.h"

/* Whether anything of the unit's gradient is copied to the host. */
static bool grad_goes_to_host(const ps__builder *b, uint32_t unit) {
  const ps__spec *spec = b->s->spec;
  if (b->s->model->unit[unit].frozen || spec->checked)
    return false;
  return !ps__total_on_device(spec, unit) || spec->keep_grads ||
         (!spec->grad_resident[unit] && ps__n_contributions(b, unit) > 1);
}

static uint32_t make_state(ps__builder *b, uint32_t unit, uint32_t k, uint32_t place) {
  const uint64_t bytes = ps__unit_bytes(b, unit, b->s->recipe->state[k]);
  const bool disk = place == b->s->at->disk;
  const uint64_t sectors = (bytes + PS__SECTOR_BYTES - 1) / PS__SECTOR_BYTES;
  const uint32_t vt = ps__vt_persistent(b, place, disk ? sectors * PS__SECTOR_BYTES : bytes);
  if (vt != PS__NO_VT)
    b->s->vt[vt].sectors = disk;
  return vt;
}

static void make_unit_host(ps__builder *b, uint32_t unit) {
  ps__step *s = b->s;
  ps__unit_host *h = &s->unit_host[unit];
  const bool frozen = s->model->unit[unit].frozen;
  h->n = s->model->unit[unit].n;
  const uint64_t weights = ps__unit_bytes(b, unit, ps__weights_as(b, unit)),
                 updated = ps__unit_bytes(b, unit, s->recipe->updated);
  const bool updated_here = !frozen && !s->spec->checked;
  h->weights = ps__vt_persistent(b, b->s->at->host, weights);
  h->master = ps__has_master(s->spec->recipe) && updated_here
                  ? ps__vt_persistent(b, b->s->at->host, updated)
                  : PS__NO_VT;
  h->grad = grad_goes_to_host(b, unit) && !ps__grad_passes(s->spec, unit)
                ? ps__vt_persistent(b, b->s->at->host, ps__unit_bytes(b, unit, s->recipe->grad))
                : PS__NO_VT;
  const bool on_device = s->spec->update_resident[unit],
             on_disk = s->spec->state_on_disk[unit] && updated_here;
  const uint32_t place = ps__state_on_device(s->spec, unit)
                             ? b->dev[ps__updater(s->spec, unit)].at.place
                         : on_disk ? s->at->disk
                                   : s->at->host;
  b->n_on_disk += on_disk;
  for (uint32_t k = 0; k < PS_MAX_STATES; k++)
    h->state[k] = k < ps__optimizers[s->spec->optimizer].n_states && updated_here
                      ? make_state(b, unit, k, place)
                      : PS__NO_VT;
  for (uint32_t d = 0; d < ps__n_devices(b); d++)
    h->device_weights[d] = s->spec->param_resident[unit] && ps__may_read(s->spec, unit, d)
                               ? ps__vt_persistent(b, b->dev[d].at.place, weights)
                               : PS__NO_VT;
  h->device_master = on_device && h->master != PS__NO_VT
                         ? ps__vt_persistent(b, b->on->at.place, updated)
                         : PS__NO_VT;
}

/* The layer passes of rounds @i, @i + n and so on, where n run at once. Without a ring these run
 * side by side. In a ring each is so many passes behind the one before as a device has blocks in
 * turn: then every device has one round's pass at a time, in the order of the rounds. The backward
 * passes begin after the heads of all rounds, which thus run at once. */
static void make_passes(ps__builder *b, uint32_t i) {
  const uint32_t layers = b->s->spec->n_layers, n_rounds = b->s->layout->n_rounds,
                 behind = b->s->spec->ring_blocks,
                 at_once = n_rounds < ps__n_devices(b) ? n_rounds : ps__n_devices(b);
  ps__pass *v = b->flight[i].pass;
  uint32_t slot = i * behind;
  for (uint32_t r = i; r < n_rounds; r += ps__n_devices(b)) {
    *v++ = (ps__pass){PS__PASS_EMBED, r, 0, slot++};
    for (uint32_t l = 1; l <= layers; l++)
      *v++ = (ps__pass){PS__PASS_BLOCK, r, l, slot++};
    *v++ = (ps__pass){PS__PASS_HEAD, r, layers + 1, slot++};
    slot += (at_once - 1) * behind;
    for (uint32_t l = layers; l >= 1 && l >= b->first_trained; l--)
      *v++ = (ps__pass){PS__PASS_BLOCK_BACK, r, l, slot++};
    *v++ = (ps__pass){PS__PASS_EMBED_BACK, r, 0, slot++};
  }
  b->flight[i].n_passes = (uint32_t)(v - b->flight[i].pass);
}

static bool device_init(ps__builder *b, uint32_t d) {
  const ps__step *s = b->s;
  ps__on_device *on = &b->dev[d];
  const uint32_t n_units = s->model->n_units;
  const size_t n_rounds = s->layout->n_rounds / ps__n_devices(b) + 1;
  ps__pass **pass = &b->flight[d].pass;
  on->unit = ps__calloc(n_units, sizeof *on->unit);
  *pass = ps__calloc(n_rounds * (2 * s->spec->n_layers + 3), sizeof **pass);
  if (!on->unit || !*pass)
    return false;
  for (uint32_t u = 0; u < n_units; u++)
    on->unit[u] = (ps__unit_copy){.weights = s->unit_host[u].device_weights[d],
                                  .dense = PS__NO_VT,
                                  .grad = PS__NO_VT,
                                  .fetched = ps__weights_stay(s->spec, u)};
  make_passes(b, d);
  return true;
}

ps_status ps__units_init(ps__builder *b) {
  ps__step *s = b->s;
  const uint32_t n_units = s->model->n_units;
  s->unit_host = ps__calloc(n_units, sizeof *s->unit_host);
  b->unit = ps__calloc(n_units, sizeof *b->unit);
  b->coming = ps__calloc(n_units, sizeof *b->coming);
  b->leaving = ps__calloc(n_units, sizeof *b->leaving);
  bool ok = s->unit_host && b->unit && b->coming && b->leaving;
  for (uint32_t u = 0; ok && u < n_units; u++) {
    make_unit_host(b, u);
    b->unit[u] = (ps__unit_progress){.total = PS__NO_VT,
                                     .low = PS__NO_VT,
                                     .sums = PS__NO_VT,
                                     .updated = {PS__NO_VT, PS__NO_VT, {PS__NO_VT, PS__NO_VT}}};
    for (uint32_t d = 0; d < PS_MAX_DEVICES; d++)
      b->unit[u].piece[d] = b->unit[u].low_piece[d] = PS__NO_VT;
  }
  b->first_trained = ps__first_trained(s->model);
  for (uint32_t d = 0; ok && d < ps__n_devices(b); d++)
    ok = device_init(b, d);
  return ok ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for the step's units");
}

/* Whether @unit is one of the block below, which runs forward again beside pass @v. */
static bool is_below(const ps__builder *b, const ps__pass *v, uint32_t unit) {
  const uint32_t below = ps__layer_again(b, v);
  return below > 0 && b->s->model->unit[unit].layer == below;
}

/* Whether a layer pass reads the parameters of unit @unit. A pass reads those of its own layer, and
 * of the one below where that runs forward again; the head of a tied model also reads the table.
 * The embedding's backward pass, and an embedding on the host, read none. */
static bool pass_reads(const ps__builder *b, const ps__pass *v, uint32_t unit) {
  if (v->kind == PS__PASS_EMBED_BACK || (v->kind == PS__PASS_EMBED && b->s->spec->embed_on_host))
    return false;
  const uint32_t layer = b->s->model->unit[unit].layer;
  return layer == v->layer || is_below(b, v, unit) ||
         (unit == 0 && v->kind == PS__PASS_HEAD && ps__tied(b->s->model));
}

/* What may be among them, in the order in which they are fetched: the layer's units, then the
 * table, or those of the block below. */
static uint32_t pass_unit(const ps__builder *b, const ps__pass *v, uint32_t i) {
  const ps__layer *l = &b->s->model->layer[v->layer];
  const uint32_t below = ps__layer_again(b, v);
  if (i < l->n_units)
    return l->first_unit + i;
  return below ? b->s->model->layer[below].first_unit + i - l->n_units : 0;
}
static uint32_t n_pass_units(const ps__builder *b, const ps__pass *v) {
  const uint32_t below = ps__layer_again(b, v);
  return b->s->model->layer[v->layer].n_units + (v->kind == PS__PASS_HEAD) +
         (below ? b->s->model->layer[below].n_units : 0);
}

/* Whether parameters of @unit that pass @v reads are kept for the forward pass of the device's next
 * round; in a ring, of the next rounds that run at once. */
static bool kept_across_rounds(const ps__builder *b, const ps__pass *v, uint32_t unit) {
  const uint32_t n = ps__n_devices(b),
                 round = b->s->spec->ring_blocks ? v->round / n * n : v->round;
  return v->kind == PS__PASS_BLOCK_BACK && round + n < b->s->layout->n_rounds &&
         b->s->model->unit[unit].layer <= b->s->spec->blocks_kept;
}

/* Whether the running device lacks the unit's parameters for its layer pass @v. Memory for them is
 * made. */
static bool must_fetch(ps__builder *b, const ps__pass *v, uint32_t unit) {
  ps__unit_copy *u = &b->on->unit[unit];
  const bool resident = b->s->spec->param_resident[unit];
  u->pins++;
  if (resident ? u->fetched : u->weights != PS__NO_VT)
    return false;
  u->fetched = true;
  if (!resident) {
    u->weights = ps__vt_new(b, b->on->at.place, ps__unit_bytes(b, unit, ps__weights_as(b, unit)));
    if (u->weights != PS__NO_VT)
      b->s->vt[u->weights].high = kept_across_rounds(b, v, unit);
  }
  return true;
}

static bool is_shared(const ps__builder *b, uint32_t idx) {
  return ps__is_shared(b, &b->flight[0].pass[idx]);
}

/* Layer pass @idx has a turn for each round that has it; where it is shared, for each device. Turn
 * @i is that of the next ops: its round and its device. */
static uint32_t n_turns(const ps__builder *b, uint32_t idx) {
  return is_shared(b, idx) ? ps__n_devices(b) : ps__n_running(b, idx);
}
static const ps__pass *turn_to(ps__builder *b, uint32_t i, uint32_t idx) {
  const bool shared = is_shared(b, idx);
  b->in = &b->flight[shared ? 0 : i];
  b->on = shared ? &b->dev[i] : ps__at_layer(b, b->in, b->in->pass[idx].layer);
  return &b->in->pass[idx];
}

/* Parameters that are not pinned are copied to staging memory by the io stream, whose ops are as
 * early as the copies to the device, and from there to those of the layer pass's @n turns whose
 * device lacks them (@missing). So much at a time: one part is copied while the one before crosses
 * the link. */
enum { STAGED_BYTES = 64 << 20 };
static void fetch_staged(ps__builder *b, uint32_t idx, uint32_t unit, const bool *missing,
                         uint32_t n) {
  const uint32_t weights = b->s->unit_host[unit].weights;
  const uint64_t all = ps__unit_bytes(b, unit, ps__weights_as(b, unit));
  turn_to(b, 0, idx);
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_FORWARD), "weights");
  for (uint64_t at = 0; at < all; at += STAGED_BYTES) {
    const uint64_t bytes = all - at < STAGED_BYTES ? all - at : STAGED_BYTES;
    const uint32_t staged = ps__vt_new(b, b->s->at->host, bytes);
    ps__stage(b, b->s->at->io, ps__part(weights, PS_READ, at, bytes),
              ps__part(staged, PS_WRITE, 0, bytes), tag);
    for (uint32_t i = 0; i < n; i++) {
      if (!missing[i])
        continue;
      turn_to(b, i, idx);
      ps__emit_copy(b, b->on->at.to_device, ps__part(staged, PS_READ, 0, bytes),
                    ps__part(b->on->unit[unit].weights, PS_WRITE, at, bytes), tag);
    }
    ps__vt_free(b, b->staged);
    b->staged = staged;
  }
}

/* For layer pass @idx. A unit in pieces is fetched to all devices that have a turn where one lacks
 * it: those that have it get the same bytes again. Where some devices have no section of a shared
 * head, it comes whole to the others. */
static void fetch_unit(ps__builder *b, uint32_t idx, uint32_t unit) {
  const bool shared = is_shared(b, idx);
  const uint32_t n = n_turns(b, idx);
  const bool staged = b->s->spec->stage_weights[unit];
  bool in_pieces = b->s->spec->in_pieces[unit] && n > 1, any = false, lacks[PS_MAX_DEVICES] = {0};
  for (uint32_t i = 0; shared && i < n; i++)
    in_pieces &= b->has_head[i];
  for (uint32_t i = 0; i < n; i++) {
    const ps__pass *v = turn_to(b, i, idx);
    if (shared && !b->has_head[i])
      continue;
    const bool missing = lacks[i] = must_fetch(b, v, unit);
    any |= missing;
    if (missing && !in_pieces && !staged)
      ps__emit_copy(b, b->on->at.to_device, ps__whole(b, b->s->unit_host[unit].weights, PS_READ),
                    ps__whole(b, b->on->unit[unit].weights, PS_WRITE),
                    ps__about(ps__unit_tag(b, unit, PS__PHASE_FORWARD), "weights"));
  }
  if (any && staged)
    fetch_staged(b, idx, unit, lacks, n);
  else if (any && in_pieces)
    ps__fetch_pieces(b, unit, n);
  turn_to(b, 0, 0);
}

/* How many layer passes ahead of pass @now the copies for pass @next may be issued. Towards the end
 * of a round its saved activations are gone, so the next round's first units come earlier, the
 * large embedding among them. */
static uint32_t lead_of(const ps__builder *b, uint32_t now, uint32_t next) {
  const uint32_t lead = b->s->spec->param_lead;
  const ps__pass *pass = b->flight[0].pass;
  return pass[next].round > pass[now].round ? 4 * lead : lead;
}

/* For layer pass @idx of all rounds that have it. */
static void fetch_pass(ps__builder *b, uint32_t idx) {
  const ps__pass *v = &b->flight[0].pass[idx];
  const ps__layer *l = &b->s->model->layer[v->layer];
  for (uint32_t i = 0; i < n_pass_units(b, v); i++)
    if (pass_reads(b, v, pass_unit(b, v, i)))
      fetch_unit(b, idx, pass_unit(b, v, i));
  if (v->kind == PS__PASS_BLOCK_BACK && v->round + 1 == b->s->layout->n_rounds)
    for (uint32_t i = 0; i < l->n_units; i++)
      ps__fetch_total(b, l->first_unit + i);
}

void ps__fetch_ahead(ps__builder *b, uint32_t pass_idx) {
  turn_to(b, 0, 0);
  while (b->next_fetch < b->flight[0].n_passes &&
         b->next_fetch <= pass_idx + lead_of(b, pass_idx, b->next_fetch)) {
    const uint32_t idx = b->next_fetch++, n = ps__n_running(b, idx);
    const bool embeds = b->flight[0].pass[idx].kind == PS__PASS_EMBED,
               gathers = embeds && b->s->spec->embed_on_host;
    for (uint32_t i = 0; embeds && i < n; i++)
      ps__copy_batch(b, turn_to(b, i, idx)->round);
    /* The first block's parameters come before the gathered rows: gathering takes longer, and
     * neither is of use alone. */
    fetch_pass(b, gathers ? b->next_fetch++ : idx);
    for (uint32_t i = 0; gathers && i < n; i++)
      ps__gather_round(b, turn_to(b, i, idx)->round);
    turn_to(b, 0, 0);
  }
}

/* The ops are on the compute stream, and follow the pass before: all passes of a device have the
 * same memory for what they dequantize. */
void ps__dequantize(ps__builder *b, uint32_t pass_idx) {
  const ps__pass *v = &b->in->pass[pass_idx];
  const ps__storage plain = b->s->recipe->weights;
  for (uint32_t i = 0; i < n_pass_units(b, v); i++) {
    const uint32_t unit = pass_unit(b, v, i), base = b->s->model->unit[unit].base;
    ps__unit_copy *u = &b->on->unit[unit];
    if (!base || !pass_reads(b, v, unit))
      continue;
    const ps__args_dequantize a = {b->s->model->unit[unit].n, base, plain.dtype};
    ps_tag tag = ps__unit_tag(
        b, unit, v->kind == PS__PASS_BLOCK_BACK ? PS__PHASE_BACKWARD : PS__PHASE_FORWARD);
    tag.round = (int32_t)v->round;
    u->dense = ps__vt_new(b, b->on->at.place, ps__unit_bytes(b, unit, plain));
    const ps__vaccess access[2] = {ps__whole(b, u->weights, PS_READ),
                                   ps__whole(b, u->dense, PS_WRITE)};
    ps__emit(b, &ps__k_dequantize, b->on->at.compute, &a, sizeof a, access, 2,
             ps__about(tag, "weights"));
  }
}

void ps__pass_done(ps__builder *b, uint32_t pass_idx) {
  const ps__pass *v = &b->in->pass[pass_idx];
  for (uint32_t i = 0; i < n_pass_units(b, v); i++) {
    const uint32_t unit = pass_unit(b, v, i);
    ps__unit_copy *u = &b->on->unit[unit];
    if (pass_reads(b, v, unit))
      ps__vt_drop(b, &u->dense, 0);
    /* the next layer pass is that of the block below */
    if (!pass_reads(b, v, unit) || --u->pins > 0 || b->s->spec->param_resident[unit] ||
        kept_across_rounds(b, v, unit) || is_below(b, v, unit))
      continue;
    ps__vt_drop(b, &u->weights, 0);
  }
}
