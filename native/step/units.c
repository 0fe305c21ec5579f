/* units.c - parameters on their way to the device, gradients on their way to the host. */
#include "step/emit.h"
#include <assert.h>
#include <string.h>

static uint64_t unit_bytes(const ps__builder *b, uint32_t unit, ps_dtype dtype) {
  return b->s->unit_host[unit].n * ps_dtype_bytes(dtype);
}

ps_tag ps__unit_tag(const ps__builder *b, uint32_t unit, int phase) {
  const ps_model *m = b->s->model;
  const uint32_t layer = m->unit[unit].layer, place = unit - m->layer[layer].first_unit;
  return (ps_tag){.layer = (int32_t)layer,
                  .round = (int32_t)b->in->round_idx,
                  .chunk = -1 - (int32_t)place,
                  .phase = phase};
}

static uint32_t n_contributions(const ps__builder *b, uint32_t unit) {
  return ps__unit_contributions(b->s->model, &b->s->sums, unit);
}

/* Whether anything of the unit's gradient is copied to the host. */
static bool grad_goes_to_host(const ps__builder *b, uint32_t unit) {
  const ps__spec *spec = b->s->spec;
  if (b->s->model->unit[unit].frozen || spec->checked)
    return false;
  return !ps__updated_on_device(spec, unit) || spec->keep_grads ||
         (!spec->grad_resident[unit] && n_contributions(b, unit) > 1);
}

static void make_unit_host(ps__builder *b, uint32_t unit) {
  ps__step *s = b->s;
  ps__unit_host *h = &s->unit_host[unit];
  const bool frozen = s->model->unit[unit].frozen;
  h->n = s->model->unit[unit].n;
  const uint64_t weights = unit_bytes(b, unit, s->recipe->weights),
                 updated = unit_bytes(b, unit, s->recipe->updated);
  const bool updated_here = !frozen && !s->spec->checked;
  h->weights = ps__vt_persistent(b, b->s->at->host, weights);
  h->master = ps__has_master(s->spec->recipe) && updated_here
                  ? ps__vt_persistent(b, b->s->at->host, updated)
                  : PS__NO_VT;
  h->grad = grad_goes_to_host(b, unit)
                ? ps__vt_persistent(b, b->s->at->host, unit_bytes(b, unit, s->recipe->grad))
                : PS__NO_VT;
  const bool on_device = s->spec->update_resident[unit];
  for (uint32_t k = 0; k < PS_MAX_STATES; k++)
    h->state[k] = k < ps__optimizers[s->spec->optimizer].n_states && updated_here
                      ? ps__vt_persistent(b, on_device ? b->on->at.place : b->s->at->host,
                                          unit_bytes(b, unit, s->recipe->state[k]))
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

/* Whether a layer pass reads the parameters of unit @unit. A pass reads those of its own layer; the
 * head of a tied model also reads the table. The embedding's backward pass, and an embedding on the
 * host, read none. */
static bool pass_reads(const ps__builder *b, const ps__pass *v, uint32_t unit) {
  if (v->kind == PS__PASS_EMBED_BACK || (v->kind == PS__PASS_EMBED && b->s->spec->embed_on_host))
    return false;
  return b->s->model->unit[unit].layer == v->layer ||
         (unit == 0 && v->kind == PS__PASS_HEAD && ps__tied(b->s->model));
}

/* What may be among them, in the order in which they are fetched: the layer's units, then the
 * table. */
static uint32_t pass_unit(const ps__builder *b, const ps__pass *v, uint32_t i) {
  const ps__layer *l = &b->s->model->layer[v->layer];
  return i < l->n_units ? l->first_unit + i : 0;
}
static uint32_t n_pass_units(const ps__builder *b, const ps__pass *v) {
  return b->s->model->layer[v->layer].n_units + (v->kind == PS__PASS_HEAD);
}

uint32_t ps__sum_mode_of(const ps__builder *b, uint32_t unit, uint32_t i) {
  return ps__sum_mode(i, n_contributions(b, unit),
                      ps__unit_contributions(b->s->model, &b->s->of_step, unit),
                      b->s->recipe->grad);
}

bool ps__contribution_begins(const ps__builder *b, uint32_t c) {
  return (b->in->round->n_chunks - 1 - c) % b->s->sums.additions == 0;
}
bool ps__contribution_ends(const ps__builder *b, uint32_t c) {
  return c == 0 || ps__contribution_begins(b, c - 1);
}

/* Whether the running contribution ends on the device: it is the last one of a total that was added
 * on the host so far, of a unit that is updated on the device. The host's total comes to the device
 * and the last addition is done there. The additions and their order stay the same, and neither
 * norm nor update waits for the host's. */
static bool ends_on_device(const ps__builder *b, uint32_t unit) {
  const uint32_t i = b->unit[unit].contribution;
  return b->s->spec->update_streamed[unit] && !b->s->spec->grad_resident[unit] && i > 0 &&
         i + 1 == n_contributions(b, unit);
}

static void fetch_total(ps__builder *b, uint32_t unit) {
  ps__unit_progress *u = &b->unit[unit];
  const uint32_t low = u->low;
  if (u->total != PS__NO_VT || !ends_on_device(b, unit) || b->s->spec->checked)
    return;
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients");
  u->total = ps__bring(b, b->s->unit_host[unit].grad, tag);
  if (low == PS__NO_VT)
    return;
  u->low = ps__bring(b, low, tag);
  ps__vt_free(b, low);
}

/* Whether the parameters that pass @v reads are kept for the forward pass of the device's next
 * round; in a ring, of the next rounds that run at once. */
static bool kept_across_rounds(const ps__builder *b, const ps__pass *v) {
  const uint32_t n = ps__n_devices(b),
                 round = b->s->spec->ring_blocks ? v->round / n * n : v->round;
  return v->kind == PS__PASS_BLOCK_BACK && round + n < b->s->layout->n_rounds &&
         v->layer <= b->s->spec->blocks_kept;
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
    u->weights = ps__vt_new(b, b->on->at.place, unit_bytes(b, unit, b->s->recipe->weights));
    if (u->weights != PS__NO_VT)
      b->s->vt[u->weights].high = kept_across_rounds(b, v);
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

/* For layer pass @idx. A unit in pieces is fetched to all devices that have a turn where one lacks
 * it: those that have it get the same bytes again. Where some devices have no section of a shared
 * head, it comes whole to the others. */
static void fetch_unit(ps__builder *b, uint32_t idx, uint32_t unit) {
  const bool shared = is_shared(b, idx);
  const uint32_t n = n_turns(b, idx);
  bool in_pieces = b->s->spec->in_pieces[unit] && n > 1, any = false;
  for (uint32_t i = 0; shared && i < n; i++)
    in_pieces &= b->has_head[i];
  for (uint32_t i = 0; i < n; i++) {
    const ps__pass *v = turn_to(b, i, idx);
    if (shared && !b->has_head[i])
      continue;
    const bool missing = must_fetch(b, v, unit);
    any |= missing;
    if (missing && !in_pieces)
      ps__emit_copy(b, b->on->at.to_device, ps__whole(b, b->s->unit_host[unit].weights, PS_READ),
                    ps__whole(b, b->on->unit[unit].weights, PS_WRITE),
                    ps__about(ps__unit_tag(b, unit, PS__PHASE_FORWARD), "weights"));
  }
  if (any && in_pieces)
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
      fetch_total(b, l->first_unit + i);
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

void ps__pass_done(ps__builder *b, uint32_t pass_idx) {
  const ps__pass *v = &b->in->pass[pass_idx];
  for (uint32_t i = 0; i < n_pass_units(b, v); i++) {
    const uint32_t unit = pass_unit(b, v, i);
    ps__unit_copy *u = &b->on->unit[unit];
    if (!pass_reads(b, v, unit) || --u->pins > 0 || b->s->spec->param_resident[unit] ||
        kept_across_rounds(b, v))
      continue;
    ps__vt_free(b, u->weights);
    u->weights = PS__NO_VT;
  }
}

void ps__grad_begin(ps__builder *b, uint32_t unit) {
  ps__unit_progress *u = &b->unit[unit];
  uint32_t *grad = &b->on->unit[unit].grad;
  *grad = ps__vt_new(b, b->on->at.place, unit_bytes(b, unit, b->s->recipe->grad));
  if (b->s->spec->grad_resident[unit] && !b->s->spec->in_pieces[unit] && u->contribution == 0)
    u->total = *grad;
  fetch_total(b, unit);
  if (b->s->spec->in_pieces[unit] && !b->s->spec->checked)
    ps__begin_pieces(b, unit);
}

/* Sums of squares of the unit's spans, on the device. Returns the tensor that holds them; the
 * caller frees it. */
static uint32_t emit_sumsq_on_device(ps__builder *b, uint32_t unit, uint32_t grad) {
  ps__step *s = b->s;
  const ps__span_def *span = s->model->unit[unit].span;
  const uint32_t n = s->model->unit[unit].n_spans, slots = ps__norm_slots(s->model),
                 out = ps__vt_new(b, b->on->at.place, slots * 8);
  const uint64_t e = ps_dtype_bytes(s->recipe->grad);
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients");
  for (uint32_t i = 0; i < n; i++) {
    const ps__args_sumsq a = {.n = span[i].n, .dt = s->recipe->grad};
    const ps__vaccess access[2] = {ps__part(grad, PS_READ, span[i].offset * e, span[i].n * e),
                                   ps__part(out, PS_WRITE, i * 8, 8)};
    ps__emit(b, &ps__k_sumsq, b->on->at.compute, &a, sizeof a, access, 2, tag);
  }
  ps__emit_copy(b, b->on->at.to_host, ps__part(out, PS_READ, 0, n * 8),
                ps__part(s->norms, PS_WRITE, (uint64_t)unit * slots * 8, n * 8),
                ps__about(ps__unit_tag(b, unit, PS__PHASE_BACKWARD), "sums of squares"));
  return out;
}

/* How contribution i is added to the unit's total in @space. The first addition to a total with low
 * bytes makes them. */
static ps__args_accumulate addition(ps__builder *b, uint32_t unit, uint32_t i, uint32_t space) {
  ps__unit_progress *u = &b->unit[unit];
  const uint64_t n = b->s->unit_host[unit].n;
  const uint32_t mode = ps__sum_mode_of(b, unit, i);
  if ((mode & PS_LOW_WRITE) && u->low == PS__NO_VT)
    u->low = ps__vt_new(b, space, n);
  return (ps__args_accumulate){.n = n,
                               .dt = b->s->recipe->grad,
                               .n_threads = space == b->s->at->host ? b->s->spec->sum_threads : 0,
                               .mode = mode,
                               .index = i};
}

static void low_used(ps__builder *b, uint32_t unit, uint32_t mode) {
  if (mode & PS_LOW_WRITE)
    return;
  ps__vt_free(b, b->unit[unit].low);
  b->unit[unit].low = PS__NO_VT;
}

/* total += grad, both in @space. The caller frees @grad. */
static void emit_addition(ps__builder *b, uint32_t unit, uint32_t i, uint32_t space, uint32_t grad,
                          uint32_t total, ps_tag tag) {
  const bool on_host = space == b->s->at->host;
  const ps__args_accumulate a = addition(b, unit, i, space);
  ps__vaccess access[3] = {ps__whole(b, grad, PS_READ), ps__whole(b, total, PS_READ_WRITE)};
  const bool low = b->unit[unit].low != PS__NO_VT;
  if (low)
    access[2] = ps__whole(b, b->unit[unit].low, ps__low_access(a.mode));
  ps__emit(b, on_host ? &ps__k_accumulate_host : &ps__k_accumulate,
           on_host ? b->s->at->host_ops : b->on->at.compute, &a, sizeof a, access, low ? 3 : 2,
           ps__about(tag, "gradients"));
  low_used(b, unit, a.mode);
}

/* Sums of squares of the unit's total on the host, span by span: padding between spans is not
 * counted.
 * @staging  a contribution that is added to the total first, in the same pass. PS__NO_VT: none (an
 *           embedding on the host, whose low bytes are rounded away here). */
static void emit_sumsq_on_host(ps__builder *b, uint32_t unit, uint32_t i, uint32_t staging) {
  ps__step *s = b->s;
  const ps__span_def *span = s->model->unit[unit].span;
  const uint32_t n = s->model->unit[unit].n_spans, grad = s->unit_host[unit].grad;
  const ps_dtype dt = s->recipe->grad;
  const uint64_t e = ps_dtype_bytes(dt), at = (uint64_t)unit * ps__norm_slots(s->model) * 8;
  const bool add = staging != PS__NO_VT;
  ps__args_accumulate whole = {.dt = dt, .n_threads = s->spec->sum_threads, .mode = PS_LOW_READ};
  if (add)
    whole = addition(b, unit, i, b->s->at->host);
  const bool low = b->unit[unit].low != PS__NO_VT;
  const ps_kernel *kernel = add   ? &ps__k_accumulate_sumsq_host
                            : low ? &ps__k_round_sumsq_host
                                  : &ps__k_sumsq_host;
  for (uint32_t k = 0; k < n; k++) {
    ps__args_accumulate part = whole;
    const ps__args_sumsq squares = {.n = span[k].n, .dt = dt, .n_threads = s->spec->sum_threads};
    const uint64_t offset = span[k].offset * e, bytes = span[k].n * e;
    ps__vaccess access[4];
    uint32_t m = 0;
    part.n = span[k].n;
    part.first = span[k].offset;
    if (add)
      access[m++] = ps__part(staging, PS_READ, offset, bytes);
    access[m++] = ps__part(grad, add || low ? PS_READ_WRITE : PS_READ, offset, bytes);
    access[m++] = ps__part(s->norms, PS_WRITE, at + k * 8, 8);
    if (low)
      access[m++] = ps__part(b->unit[unit].low, PS_READ, span[k].offset, span[k].n);
    ps__emit(b, kernel, b->s->at->host_ops, add || low ? (const void *)&part : &squares,
             add || low ? sizeof part : sizeof squares, access, m,
             ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients"));
  }
  low_used(b, unit, 0);
}

/* Copies a contribution to host tensor @to; PS__NO_VT: to a new one, which is returned. */
static uint32_t send_grad(ps__builder *b, uint32_t unit, uint32_t device_grad, uint32_t to) {
  if (to == PS__NO_VT)
    to = ps__vt_new(b, b->s->at->host, unit_bytes(b, unit, b->s->recipe->grad));
  ps__emit_copy(b, b->on->at.to_host, ps__whole(b, device_grad, PS_READ),
                ps__whole(b, to, PS_WRITE),
                ps__about(ps__unit_tag(b, unit, PS__PHASE_BACKWARD), "gradients"));
  return to;
}

/* Adds contribution i > 0, host tensor @from, to the total. With the last one (@total) come the
 * sums of squares, unless other hosts add to the total first. */
static void add_arrived(ps__builder *b, uint32_t unit, uint32_t from, uint32_t i, bool total,
                        uint32_t lag) {
  if (total && !ps__exchanges(b->s->spec))
    emit_sumsq_on_host(b, unit, i, from);
  else
    emit_addition(b, unit, i, b->s->at->host, from, b->s->unit_host[unit].grad,
                  ps__unit_tag(b, unit, PS__PHASE_UPDATE));
  ps__vt_free_late(b, from, lag);
}

/* Copies contribution i to the host. The first becomes the total, the others are added to it. */
static void add_on_host(ps__builder *b, uint32_t unit, uint32_t device_grad, uint32_t i, bool total,
                        uint32_t lag) {
  const uint32_t to =
      send_grad(b, unit, device_grad, i == 0 ? b->s->unit_host[unit].grad : PS__NO_VT);
  if (i > 0)
    add_arrived(b, unit, to, i, total, lag);
}

/* The table of a tied model has the head's contributions of a round, then the embedding's, and then
 * those of the next round. Where rounds run at once, the head's contributions of all but the first
 * come before their turn. They wait on the host for the embedding's of the round before. */
static bool before_its_turn(const ps__builder *b, uint32_t unit) {
  const ps__unit *u = &b->s->model->unit[unit];
  return b->in->round_idx != b->embedded && b->in->now->kind == PS__PASS_HEAD && u->by_slice &&
         u->by_chunk && u->layer != ps__head_layer(b->s->model);
}

static void let_wait(ps__builder *b, uint32_t unit, bool more) {
  ps__in_flight *in = b->in;
  ps__unit_copy *u = &b->on->unit[unit];
  if (!ps__grow((void **)&in->waiting, in->n_waiting, &in->cap_waiting, sizeof *in->waiting)) {
    b->s->out_of_memory = true;
    return;
  }
  in->waiting[in->n_waiting++] =
      (ps__waiting){send_grad(b, unit, u->grad, PS__NO_VT), more ? 0 : b->s->spec->sum_lag};
  ps__vt_free_late(b, u->grad, b->s->spec->grad_lag);
  u->grad = PS__NO_VT;
}

void ps__add_waiting(ps__builder *b) {
  for (size_t i = 0; i < b->in->n_waiting; i++)
    add_arrived(b, 0, b->in->waiting[i].vt, b->unit[0].contribution++, false,
                b->in->waiting[i].lag);
  b->in->n_waiting = 0;
}

/* The total of this host becomes that of all hosts. Low bytes are rounded away before. The op's
 * work: BYTES that the host sends, and as many it receives (hosts/hosts.h). */
static void exchange(ps__builder *b, uint32_t unit) {
  const ps__vaccess total = ps__whole(b, b->s->unit_host[unit].grad, PS_READ_WRITE);
  const double n = b->s->spec->n_hosts, sent = 2 * (n - 1) / n * (double)total.bytes;
  if (b->unit[unit].low != PS__NO_VT)
    emit_sumsq_on_host(b, unit, 0, PS__NO_VT);
  ps__emit_hook(b, PS__HOOK_EXCHANGE, unit, b->s->at->net, &total, 1, ps__bytes_work(sent),
                ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients"));
}

static void total_complete(ps__builder *b, uint32_t unit) {
  emit_sumsq_on_host(b, unit, 0, PS__NO_VT);
  ps__total_ready(b, unit);
}

static void exchange_over(ps__builder *b) {
  const uint32_t unit = b->exchanging;
  b->exchanging = PS__NO_UNIT;
  if (unit != PS__NO_UNIT)
    total_complete(b, unit);
}

static uint32_t next_to_exchange(ps__builder *b) {
  while (b->to_exchange && b->s->model->unit[b->to_exchange - 1].frozen)
    b->to_exchange--;
  return b->to_exchange ? b->to_exchange - 1 : PS__NO_UNIT;
}

void ps__total_on_host(ps__builder *b, uint32_t unit) {
  if (!ps__exchanges(b->s->spec)) {
    total_complete(b, unit);
    return;
  }
  b->unit[unit].complete = true;
  for (uint32_t next; (next = next_to_exchange(b)) != PS__NO_UNIT && b->unit[next].complete;) {
    exchange(b, next);
    exchange_over(b);
    b->exchanging = next;
    b->to_exchange = next;
  }
}

void ps__exchanges_end(ps__builder *b) {
  assert(!ps__exchanges(b->s->spec) || next_to_exchange(b) == PS__NO_UNIT);
  exchange_over(b);
}

void ps__grad_end(ps__builder *b, uint32_t unit, bool more) {
  ps__step *s = b->s;
  ps__unit_progress *u = &b->unit[unit];
  uint32_t *grad = &b->on->unit[unit].grad;
  if (s->spec->checked) {
    ps__vt_free(b, *grad);
    *grad = PS__NO_VT;
    u->contribution++;
    return;
  }
  if (before_its_turn(b, unit)) {
    let_wait(b, unit, more);
    return;
  }
  if (s->spec->in_pieces[unit]) {
    const uint32_t idx = (uint32_t)(b->in->now - b->in->pass);
    ps__add_pieces(b, unit, !more && b->in == &b->flight[ps__n_running(b, idx) - 1]);
    return;
  }
  const bool resident = s->spec->grad_resident[unit],
             on_device = ps__updated_on_device(s->spec, unit), ends = ends_on_device(b, unit);
  const uint32_t n = n_contributions(b, unit), i = u->contribution++;
  const bool last = i + 1 == n;
  if (ends || (resident && i > 0)) {
    emit_addition(b, unit, i, b->on->at.place, *grad, u->total,
                  ps__unit_tag(b, unit, PS__PHASE_BACKWARD));
    ps__vt_free(b, *grad);
  }
  /* The total is on the device where gradients are device-resident, where it ends there, and where
   * this is the only contribution. */
  const bool exchanged = ps__exchanges(s->spec), total_here = resident || ends || n == 1;
  const uint32_t leaving = resident || ends ? u->total : *grad;
  const uint32_t sums =
      last && total_here && !exchanged ? emit_sumsq_on_device(b, unit, leaving) : PS__NO_VT;
  if (last ? !on_device || s->spec->keep_grads : !resident)
    add_on_host(b, unit, leaving, resident || ends ? 0 : i, last, more ? 0 : s->spec->sum_lag);
  if (last && on_device)
    u->total = leaving; /* stays until the update */
  else if (!resident || last)
    ps__vt_free_late(b, leaving, s->spec->grad_lag);
  *grad = PS__NO_VT;
  if (on_device && !s->spec->clip)
    u->sums = sums; /* they stay too */
  else
    ps__vt_free_late(b, sums, s->spec->grad_lag);
  if (last && exchanged)
    ps__total_on_host(b, unit);
  else if (last)
    ps__total_ready(b, unit);
}

/* Whether ops of the unit's own layer add to its gradient: what slices alone add to the embedding's
 * comes from the head. */
static bool has_own_gradient(const ps__builder *b, uint32_t unit) {
  return b->s->model->unit[unit].by_chunk || (b->s->model->unit[unit].by_slice && unit > 0);
}

void ps__layer_grads_begin(ps__builder *b, uint32_t layer) {
  const ps__layer *l = &b->s->model->layer[layer];
  for (uint32_t u = l->first_unit; u < l->first_unit + l->n_units; u++)
    if (has_own_gradient(b, u))
      ps__grad_begin(b, u);
}

void ps__layer_grads_end(ps__builder *b, uint32_t layer, bool more) {
  const ps__layer *l = &b->s->model->layer[layer];
  for (uint32_t u = l->first_unit; u < l->first_unit + l->n_units; u++)
    if (has_own_gradient(b, u))
      ps__grad_end(b, u, more);
}
