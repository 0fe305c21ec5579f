/* grads.c - gradients: the contributions of a unit, from their memory to the unit's total. */
#include "step/emit.h"

/* Whether the running contribution ends on the device: it is the last one of a total that was added
 * on the host so far, of a unit that is updated on the device. The host's total comes to the device
 * and the last addition is done there. The additions and their order stay the same, and neither
 * norm nor update waits for the host's. */
static bool ends_on_device(const ps__builder *b, uint32_t unit) {
  const uint32_t i = b->unit[unit].contribution;
  return b->s->spec->update_streamed[unit] && ps__total_on_device(b->s->spec, unit) &&
         !b->s->spec->grad_resident[unit] && i > 0 && i + 1 == ps__n_contributions(b, unit);
}

void ps__fetch_total(ps__builder *b, uint32_t unit) {
  ps__unit_progress *u = &b->unit[unit];
  const uint32_t low = u->low;
  if (u->total != PS__NO_VT || !ends_on_device(b, unit) || b->s->spec->checked)
    return;
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients");
  u->total = ps__bring(b, b->s->unit_host[unit].grad, tag);
  ps__end_host_total(b, unit, 0);
  if (low == PS__NO_VT)
    return;
  u->low = ps__bring(b, low, tag);
  ps__vt_free(b, low);
}

void ps__grad_begin(ps__builder *b, uint32_t unit) {
  ps__unit_progress *u = &b->unit[unit];
  uint32_t *grad = &b->on->unit[unit].grad;
  *grad = ps__vt_new(b, b->on->at.place, ps__unit_bytes(b, unit, b->s->recipe->grad));
  if (b->s->spec->grad_resident[unit] && !b->s->spec->in_pieces[unit] && u->contribution == 0)
    u->total = *grad;
  ps__fetch_total(b, unit);
  if (b->s->spec->in_pieces[unit] && !b->s->spec->checked)
    ps__begin_pieces(b, unit);
}

/* Copies a contribution to host tensor @to; PS__NO_VT: to a new one, which is returned. */
static uint32_t send_grad(ps__builder *b, uint32_t unit, uint32_t device_grad, uint32_t to) {
  if (to == PS__NO_VT)
    to = ps__vt_new(b, b->s->at->host, ps__unit_bytes(b, unit, b->s->recipe->grad));
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
    ps__sumsq_on_host(b, unit, i, from);
  else
    ps__add_to_total(b, unit, i, b->s->at->host, from, b->s->unit_host[unit].grad,
                     ps__unit_tag(b, unit, PS__PHASE_UPDATE));
  ps__vt_free_late(b, from, lag);
}

/* Copies contribution i to the host. The first becomes the total, the others are added to it. */
static void add_on_host(ps__builder *b, uint32_t unit, uint32_t device_grad, uint32_t i, bool total,
                        uint32_t lag) {
  const bool staged = ps__stages_total(b->s->spec, unit);
  const uint32_t to =
      send_grad(b, unit, device_grad, i == 0 && !staged ? ps__host_total(b, unit) : PS__NO_VT);
  if (i > 0) {
    add_arrived(b, unit, to, i, total, lag);
  } else if (staged) {
    ps__stage(b, b->s->at->host_ops, ps__whole(b, to, PS_READ),
              ps__whole(b, ps__host_total(b, unit), PS_WRITE),
              ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients"));
    ps__vt_free_late(b, to, lag);
  }
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
  if (!PS_GROW(in->waiting, in->n_waiting, in->cap_waiting)) {
    b->s->out_of_memory = true;
    return;
  }
  in->waiting[in->n_waiting++] =
      (ps__waiting){send_grad(b, unit, u->grad, PS__NO_VT), more ? 0 : b->s->spec->sum_lag};
  ps__vt_drop(b, &u->grad, b->s->spec->grad_lag);
}

void ps__add_waiting(ps__builder *b) {
  for (size_t i = 0; i < b->in->n_waiting; i++)
    add_arrived(b, 0, b->in->waiting[i].vt, b->unit[0].contribution++, false,
                b->in->waiting[i].lag);
  b->in->n_waiting = 0;
}

void ps__grad_end(ps__builder *b, uint32_t unit, bool more) {
  ps__step *s = b->s;
  ps__unit_progress *u = &b->unit[unit];
  uint32_t *grad = &b->on->unit[unit].grad;
  if (s->spec->checked) {
    ps__vt_drop(b, grad, 0);
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
             on_device = ps__total_on_device(s->spec, unit), ends = ends_on_device(b, unit);
  const uint32_t n = ps__n_contributions(b, unit), i = u->contribution++;
  const bool last = i + 1 == n;
  if (ends || (resident && i > 0)) {
    ps__add_to_total(b, unit, i, b->on->at.place, *grad, u->total,
                     ps__unit_tag(b, unit, PS__PHASE_BACKWARD));
    ps__vt_free(b, *grad);
  }
  /* The total is on the device where gradients are device-resident, where it ends there, and where
   * this is the only contribution. */
  const bool exchanged = ps__exchanges(s->spec), total_here = resident || ends || n == 1;
  const uint32_t leaving = resident || ends ? u->total : *grad;
  const uint32_t sums =
      last && total_here && !exchanged ? ps__sumsq_on_device(b, unit, leaving) : PS__NO_VT;
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
