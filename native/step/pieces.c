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

/* Piece @i of @of: multiples of 64 elements, the last ones smaller or empty. */
static piece piece_of(const ps__builder *b, uint32_t unit, uint32_t i, uint32_t of) {
  const uint64_t n = b->s->unit_host[unit].n, each = ((n + of - 1) / of + 63) / 64 * 64;
  const uint64_t first = i * each < n ? i * each : n;
  return (piece){first, n - first < each ? n - first : each};
}

static ps__vaccess part_of(uint32_t vt, uint32_t mode, piece p, uint64_t element_bytes) {
  return ps__part(vt, mode, p.first * element_bytes, p.n * element_bytes);
}

void ps__fetch_pieces(ps__builder *b, uint32_t unit, uint32_t n_running) {
  const uint64_t e = ps_dtype_bytes(b->s->recipe->weights);
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_FORWARD), "weights");
  for (uint32_t d = 0; d < n_running; d++) {
    const piece p = piece_of(b, unit, d, n_running);
    if (p.n)
      ps__emit_copy(b, b->dev[d].at.to_device,
                    part_of(b->s->unit_host[unit].weights, PS_READ, p, e),
                    part_of(b->dev[d].unit[unit].weights, PS_WRITE, p, e), tag);
  }
  /* in each turn every device sends to another one */
  for (uint32_t turn = 1; turn < n_running; turn++)
    for (uint32_t d = 0; d < n_running; d++) {
      const piece p = piece_of(b, unit, d, n_running);
      const ps__on_device *to = &b->dev[(d + turn) % n_running];
      if (p.n)
        ps__emit_copy(b, b->dev[d].at.to_peers,
                      part_of(b->dev[d].unit[unit].weights, PS_READ, p, e),
                      part_of(to->unit[unit].weights, PS_WRITE, p, e), tag);
    }
}

/* A new tensor on device @d, and the copy of elements @p of host tensor @host to it. */
static uint32_t bring_piece(ps__builder *b, uint32_t d, uint32_t host, piece p, uint64_t e,
                            ps_tag tag) {
  const uint32_t vt = ps__vt_new(b, b->dev[d].at.place, p.n * e);
  ps__emit_copy(b, b->dev[d].at.to_device, part_of(host, PS_READ, p, e), ps__whole(b, vt, PS_WRITE),
                tag);
  return vt;
}

void ps__begin_pieces(ps__builder *b, uint32_t unit) {
  ps__unit_progress *u = &b->unit[unit];
  const uint64_t e = ps_dtype_bytes(b->s->recipe->grad);
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients");
  if (u->contribution == 0 || u->piece[0] != PS__NO_VT)
    return;
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    const piece p = piece_of(b, unit, d, ps__n_devices(b));
    if (p.n == 0)
      continue;
    u->piece[d] = bring_piece(b, d, b->s->unit_host[unit].grad, p, e, tag);
    if (u->low != PS__NO_VT)
      u->low_piece[d] = bring_piece(b, d, u->low, p, 1, tag);
  }
  ps__vt_free(b, u->low);
  u->low = PS__NO_VT;
}

/* The running device's contribution to piece @p of device @d, on that device; *sent: it is a tensor
 * of its own, which the caller frees. */
static ps__vaccess piece_there(ps__builder *b, uint32_t unit, uint32_t d, piece p, uint32_t *sent) {
  const uint32_t grad = b->on->unit[unit].grad;
  const uint64_t e = ps_dtype_bytes(b->s->recipe->grad);
  *sent = PS__NO_VT;
  if (b->on == &b->dev[d])
    return part_of(grad, PS_READ, p, e);
  *sent = ps__vt_new(b, b->dev[d].at.place, p.n * e);
  ps__emit_copy(b, b->on->at.to_peers, part_of(grad, PS_READ, p, e), ps__whole(b, *sent, PS_WRITE),
                ps__about(ps__unit_tag(b, unit, PS__PHASE_BACKWARD), "gradients"));
  return ps__whole(b, *sent, PS_READ);
}

/* Contribution i > 0 to piece @p, which device @d adds. */
static void add_piece(ps__builder *b, uint32_t unit, uint32_t d, piece p, uint32_t i) {
  ps__unit_progress *u = &b->unit[unit];
  const uint32_t mode = ps__sum_mode_of(b, unit, i);
  uint32_t sent, n = 2;
  const ps__args_accumulate a = {
      .n = p.n, .first = p.first, .dt = b->s->recipe->grad, .mode = mode, .index = i};
  ps__vaccess access[3] = {
      piece_there(b, unit, d, p, &sent),
      ps__part(u->piece[d], PS_READ_WRITE, 0, p.n * ps_dtype_bytes(b->s->recipe->grad))};
  if ((mode & PS_LOW_WRITE) && u->low_piece[d] == PS__NO_VT)
    u->low_piece[d] = ps__vt_new(b, b->dev[d].at.place, p.n);
  if (u->low_piece[d] != PS__NO_VT)
    access[n++] = ps__whole(b, u->low_piece[d], ps__low_access(mode));
  ps__emit(b, &ps__k_accumulate, b->dev[d].at.sums, &a, sizeof a, access, n,
           ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients"));
  ps__vt_free_late(b, sent, b->s->spec->grad_lag);
  if (u->low_piece[d] != PS__NO_VT && !(mode & PS_LOW_WRITE)) {
    ps__vt_free(b, u->low_piece[d]);
    u->low_piece[d] = PS__NO_VT;
  }
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
  const uint64_t e = ps_dtype_bytes(b->s->recipe->grad);
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_BACKWARD), "gradients");
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    const piece p = piece_of(b, unit, d, ps__n_devices(b));
    if (p.n == 0)
      continue;
    b->on = &b->dev[d];
    b->in = &b->flight[d];
    ps__emit_copy(b, b->on->at.to_host, ps__part(u->piece[d], PS_READ, 0, p.n * e),
                  part_of(b->s->unit_host[unit].grad, PS_WRITE, p, e), tag);
    if (u->low_piece[d] != PS__NO_VT) {
      if (u->low == PS__NO_VT)
        u->low = ps__vt_new(b, b->s->at->host, b->s->unit_host[unit].n);
      ps__emit_copy(b, b->on->at.to_host, ps__whole(b, u->low_piece[d], PS_READ),
                    part_of(u->low, PS_WRITE, p, 1), tag);
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
