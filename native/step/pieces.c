/* pieces.c - units in pieces, one a device. Where links between devices are faster than those to
 * the host, a unit crosses each link to the host in part; the rest comes from the other devices.
 *
 *   parameters  device d fetches piece d from the host and sends it to the others
 *   gradients   device d has piece d of the total while rounds run that add to it. Each device
 *               sends its contribution's pieces to their devices, which add them in the order of
 *               the contributions. After the last one of the rounds that run at once, the pieces
 *               of the total go to the host, and the next such rounds fetch the pieces again. With
 *               ps__spec.grad_resident the pieces stay on their devices until the step's last
 *               contribution
 *
 * The host reads and writes a total once for all these rounds. Without pieces it does so, and reads
 * and writes a contribution, for each round. The sums have the same bits, because an addition is a
 * function of total, contribution, element and the contribution's number. */
#include "step/emit.h"
#include <string.h>

/* Whether the pieces of the unit's total stay on their devices until it is complete. */
static bool stay(const ps__builder *b, uint32_t unit) {
  return b->s->spec->grad_resident[unit] && ps__n_contributions(b, unit) > 1;
}

/* Elements [first, first + n) of a unit. */
typedef struct piece {
  uint64_t first, n;
} piece;

/* Piece @i of @of: multiples of PS__SPAN_ALIGN elements, the last ones smaller or empty. */
static piece piece_of(const ps__builder *b, uint32_t unit, uint32_t i, uint32_t of) {
  const uint64_t n = b->s->unit_host[unit].n, each = ps__span_round((n + of - 1) / of);
  const uint64_t first = i * each < n ? i * each : n;
  return (piece){first, n - first < each ? n - first : each};
}

static ps__vaccess part_of(uint32_t vt, uint32_t mode, piece p, ps__storage as) {
  return ps__elements(vt, mode, as, p.first, p.n);
}
/* Of the low bytes beside a total: one an element. */
static ps__vaccess low_of(uint32_t vt, uint32_t mode, piece p) {
  return ps__part(vt, mode, p.first, p.n);
}

void ps__fetch_pieces(ps__builder *b, uint32_t unit, uint32_t n_running) {
  const ps__storage as = ps__weights_as(b, unit);
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_FORWARD), "weights");
  for (uint32_t d = 0; d < n_running; d++) {
    const piece p = piece_of(b, unit, d, n_running);
    if (p.n)
      ps__emit_copy(b, b->dev[d].at.to_device,
                    part_of(b->s->unit_host[unit].weights, PS_READ, p, as),
                    part_of(b->dev[d].unit[unit].weights, PS_WRITE, p, as), tag);
  }
  /* in each turn every device sends to another one */
  for (uint32_t turn = 1; turn < n_running; turn++)
    for (uint32_t d = 0; d < n_running; d++) {
      const piece p = piece_of(b, unit, d, n_running);
      const ps__on_device *to = &b->dev[(d + turn) % n_running];
      if (p.n)
        ps__emit_copy(b, b->dev[d].at.to_peers,
                      part_of(b->dev[d].unit[unit].weights, PS_READ, p, as),
                      part_of(to->unit[unit].weights, PS_WRITE, p, as), tag);
    }
}

/* A new tensor on device @d, and the copy of part @host of a host tensor to it. */
static uint32_t bring_piece(ps__builder *b, uint32_t d, ps__vaccess host, ps_tag tag) {
  const uint32_t vt = ps__vt_new(b, b->dev[d].at.place, host.bytes);
  ps__emit_copy(b, b->dev[d].at.to_device, host, ps__whole(b, vt, PS_WRITE), tag);
  return vt;
}

void ps__begin_pieces(ps__builder *b, uint32_t unit) {
  ps__unit_progress *u = &b->unit[unit];
  const ps__storage as = b->s->recipe->grad;
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients");
  if (u->contribution == 0 || u->piece[0] != PS__NO_VT)
    return;
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    const piece p = piece_of(b, unit, d, ps__n_devices(b));
    if (p.n == 0)
      continue;
    u->piece[d] = bring_piece(b, d, part_of(b->s->unit_host[unit].grad, PS_READ, p, as), tag);
    if (u->low != PS__NO_VT)
      u->low_piece[d] = bring_piece(b, d, low_of(u->low, PS_READ, p), tag);
  }
  ps__vt_drop(b, &u->low, 0);
}

/* The running device's contribution to piece @p of device @d, on that device; *sent: it is a tensor
 * of its own, which the caller frees. */
static ps__vaccess piece_there(ps__builder *b, uint32_t unit, uint32_t d, piece p, uint32_t *sent) {
  const uint32_t grad = b->on->unit[unit].grad;
  const ps__storage as = b->s->recipe->grad;
  *sent = PS__NO_VT;
  if (b->on == &b->dev[d])
    return part_of(grad, PS_READ, p, as);
  *sent = ps__vt_new(b, b->dev[d].at.place, ps__stored_bytes(as, p.n));
  ps__emit_copy(b, b->on->at.to_peers, part_of(grad, PS_READ, p, as), ps__whole(b, *sent, PS_WRITE),
                ps__about(ps__unit_tag(b, unit, PS__PHASE_BACKWARD), "gradients"));
  return ps__whole(b, *sent, PS_READ);
}

/* Contribution i > 0 to piece @p, which device @d adds. */
static void add_piece(ps__builder *b, uint32_t unit, uint32_t d, piece p, uint32_t i) {
  ps__unit_progress *u = &b->unit[unit];
  const uint32_t mode = ps__sum_mode_of(b, unit, i);
  uint32_t sent, n = 2;
  const ps__args_accumulate a = {
      .n = p.n, .first = p.first, .dt = b->s->recipe->grad.dtype, .mode = mode, .index = i};
  ps__vaccess access[3] = {piece_there(b, unit, d, p, &sent),
                           ps__elements(u->piece[d], PS_READ_WRITE, b->s->recipe->grad, 0, p.n)};
  if ((mode & PS_LOW_WRITE) && u->low_piece[d] == PS__NO_VT)
    u->low_piece[d] = ps__vt_new(b, b->dev[d].at.place, p.n);
  if (u->low_piece[d] != PS__NO_VT)
    access[n++] = ps__whole(b, u->low_piece[d], ps__low_access(mode));
  ps__emit(b, &ps__k_accumulate, b->dev[d].at.sums, &a, sizeof a, access, n,
           ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients"));
  ps__vt_free_late(b, sent, b->s->spec->grad_lag);
  if (!(mode & PS_LOW_WRITE))
    ps__vt_drop(b, &u->low_piece[d], 0);
}

/* A new tensor on device @d, with the piece @from that is there. */
static uint32_t copy_piece(ps__builder *b, uint32_t unit, uint32_t d, ps__vaccess from) {
  const uint32_t vt = ps__vt_new(b, b->dev[d].at.place, from.bytes);
  const ps__args_fill a = {from.bytes};
  const ps__vaccess access[2] = {from, ps__whole(b, vt, PS_WRITE)};
  ps__emit(b, &ps__k_copy_bytes, b->dev[d].at.sums, &a, sizeof a, access, 2,
           ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients"));
  return vt;
}

/* Whether the first contribution's gradient goes on as device 0's piece, of which it is the
 * beginning. Where totals stay, the piece is copied out: else it would keep the memory of the whole
 * gradient for the rest of the step. */
static bool goes_on_as_piece(const ps__builder *b, uint32_t unit) {
  return b->on == b->dev && !stay(b, unit);
}

/* The first contribution is the total so far: each device gets its piece. */
static void first_pieces(ps__builder *b, uint32_t unit) {
  ps__unit_progress *u = &b->unit[unit];
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    const piece p = piece_of(b, unit, d, ps__n_devices(b));
    uint32_t sent;
    if (p.n == 0)
      continue;
    const ps__vaccess there = piece_there(b, unit, d, p, &sent);
    if (sent == PS__NO_VT)
      sent = goes_on_as_piece(b, unit) ? there.vt : copy_piece(b, unit, d, there);
    u->piece[d] = sent;
  }
}

static void send_unit(ps__builder *b, uint32_t unit) {
  ps__unit_progress *u = &b->unit[unit];
  const ps__storage as = b->s->recipe->grad;
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_BACKWARD), "gradients");
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    const piece p = piece_of(b, unit, d, ps__n_devices(b));
    if (p.n == 0)
      continue;
    b->on = &b->dev[d];
    b->in = &b->flight[d];
    ps__emit_copy(b, b->on->at.to_host, ps__elements(u->piece[d], PS_READ, as, 0, p.n),
                  part_of(ps__host_total(b, unit), PS_WRITE, p, as), tag);
    if (u->low_piece[d] != PS__NO_VT) {
      if (u->low == PS__NO_VT)
        u->low = ps__vt_new(b, b->s->at->host, b->s->unit_host[unit].n);
      ps__emit_copy(b, b->on->at.to_host, ps__whole(b, u->low_piece[d], PS_READ),
                    low_of(u->low, PS_WRITE, p), tag);
    }
    ps__vt_free_late(b, u->piece[d], b->s->spec->grad_lag);
    ps__vt_free_late(b, u->low_piece[d], b->s->spec->grad_lag);
    u->piece[d] = u->low_piece[d] = PS__NO_VT;
  }
}

void ps__send_pieces(ps__builder *b, uint32_t n) {
  ps__on_device *on = b->on;
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t unit = b->leaving[i];
    send_unit(b, unit);
    if (b->unit[unit].contribution == ps__n_contributions(b, unit))
      ps__total_on_host(b, unit);
  }
  b->n_leaving -= n;
  memmove(b->leaving, b->leaving + n, b->n_leaving * sizeof *b->leaving);
  b->on = on;
  b->in = b->flight;
}

void ps__add_pieces(ps__builder *b, uint32_t unit, bool last) {
  ps__unit_progress *u = &b->unit[unit];
  uint32_t *grad = &b->on->unit[unit].grad;
  const uint32_t i = u->contribution++;
  if (i == 0)
    first_pieces(b, unit);
  for (uint32_t d = 0; i > 0 && d < ps__n_devices(b); d++) {
    const piece p = piece_of(b, unit, d, ps__n_devices(b));
    if (p.n)
      add_piece(b, unit, d, p, i);
  }
  if (i > 0 || !goes_on_as_piece(b, unit))
    ps__vt_free_late(b, *grad, b->s->spec->grad_lag);
  *grad = PS__NO_VT;
  if (last && (!stay(b, unit) || u->contribution == ps__n_contributions(b, unit)))
    b->leaving[b->n_leaving++] = unit;
}
