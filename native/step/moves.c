/* moves.c - tensors from one memory map to another, in arenas that have both.
 *
 * Moves are cut into pieces. A piece may be copied once nothing else is left to be read where it
 * goes to. Where all that are left wait for each other, one of them leaves its place for a slot:
 * memory that neither map needs now, because between two steps only tensors that outlive a step are
 * of value. A piece that would overlap itself goes through a slot too. */
#include "step/moves.h"
#include <stdlib.h>

enum { ALIGN = 256, FEW_SLOTS = 16, MOST_SLOTS = 64, LEAST_DIRECT = 256 << 10 };
static const size_t MOST_PIECES = 1 << 22;

void ps__moves_free(ps__moves *m) {
  ps__free(m->move);
  *m = (ps__moves){0};
}

static ps_status add(ps__moves *m, ps__move one) {
  if (!PS_GROW(m->move, m->n, m->cap))
    return ps__fail(PS_ENOMEM, "out of memory for the moves of a memory map");
  m->move[m->n++] = one;
  return PS_OK;
}

static bool stays(const ps__move *m) { return m->from == m->to && m->src == m->dst; }

static uint64_t shift_of(const ps__move *m) {
  if (m->from != m->to)
    return UINT64_MAX;
  return m->src > m->dst ? m->src - m->dst : m->dst - m->src;
}

/* ---- what is free ---------------------------------------------------------------------------- */

typedef struct range {
  uint64_t begin, end;
} range;

typedef struct slot {
  uint32_t space;
  uint64_t at;
  bool taken;
} slot;

/* Slots of one size, in all spaces. */
typedef struct slots {
  slot slot[PS_MAX_PLACES * MOST_SLOTS];
  uint32_t n, n_free, next;
  uint64_t bytes;
} slots;

static int by_begin(const void *pa, const void *pb) {
  const range *a = pa, *b = pb;
  return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* The ranges of @space that no move touches, in @r, which has room for 2 n + 1. */
static size_t free_ranges(const ps__moves *all, uint32_t space, uint64_t bytes, range *r) {
  size_t n = 0, n_free = 0;
  uint64_t at = 0;
  for (size_t i = 0; i < all->n; i++) {
    const ps__move *m = &all->move[i];
    if (m->from == space)
      r[n++] = (range){m->src, m->src + m->bytes};
    if (m->to == space)
      r[n++] = (range){m->dst, m->dst + m->bytes};
  }
  qsort(r, n, sizeof *r, by_begin);
  r[n++] = (range){bytes, bytes};
  for (size_t i = 0; i < n; i++) {
    const range used = r[i];
    const uint64_t begin = (at + ALIGN - 1) / ALIGN * ALIGN, end = used.begin / ALIGN * ALIGN;
    if (end > begin)
      r[n_free++] = (range){begin, end};
    at = used.end > at ? used.end : at;
  }
  return n_free;
}

/* @s->bytes is the most that a slot may have. It becomes what a part of the largest free range has,
 * if that is less, so that there are some; 0: nothing is free. */
static ps_status find_slots(const ps__moves *all, const ps__places *at,
                            const uint64_t space[PS_MAX_PLACES], slots *s) {
  range *r = ps__malloc((2 * all->n + 1) * sizeof *r);
  uint64_t largest = 0;
  if (!r)
    return ps__fail(PS_ENOMEM, "out of memory for the moves of a memory map");
  for (uint32_t p = 0; p < at->n_places && p != at->disk; p++)
    for (size_t i = free_ranges(all, p, space[p], r); i-- > 0;)
      if (r[i].end - r[i].begin > largest)
        largest = r[i].end - r[i].begin;
  if (largest / FEW_SLOTS < s->bytes)
    s->bytes = largest / FEW_SLOTS / ALIGN * ALIGN;
  if (!s->bytes)
    s->bytes = largest < ALIGN ? 0 : ALIGN;
  for (uint32_t p = 0; p < at->n_places && p != at->disk && s->bytes; p++) {
    const size_t n = free_ranges(all, p, space[p], r);
    uint32_t here = 0;
    for (size_t i = 0; i < n; i++)
      for (; r[i].end - r[i].begin >= s->bytes && here < MOST_SLOTS; r[i].begin += s->bytes, here++)
        s->slot[s->n++] = (slot){.space = p, .at = r[i].begin};
  }
  s->n_free = s->n;
  ps__free(r);
  return PS_OK;
}

/* Whether bytes of @space can be copied to and from @other: not between two devices. */
static bool linked(const ps__places *at, uint32_t space, uint32_t other) {
  return space == other || space == at->host || other == at->host;
}

/* A free slot for bytes that come from space @from and go to @to: in one of the two, if there is
 * one. The slots take turns, so that copies of several streams overlap. */
static slot *take_slot(slots *s, const ps__places *at, const ps__move *m) {
  slot *found = NULL;
  for (uint32_t k = 0; k < s->n; k++) {
    slot *one = &s->slot[(s->next + k) % s->n];
    const bool near = one->space == m->from || one->space == m->to;
    if (one->taken || !linked(at, m->from, one->space) || !linked(at, one->space, m->to))
      continue;
    if (!found || near)
      found = one;
    if (near)
      break;
  }
  if (!found)
    return NULL;
  s->next = (uint32_t)(found - s->slot + 1) % s->n;
  found->taken = true;
  s->n_free--;
  return found;
}

static void give_slot(slots *s, slot *one) {
  one->taken = false;
  s->n_free++;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

typedef struct piece {
  ps__move m;
  size_t n_before; /* pieces whose source is not read yet and lies where this one goes to */
  slot *in;        /* it left its place for this slot; NULL: it did not */
  bool through;    /* its source and its destination overlap */
  bool done;
  uint32_t seen; /* by which look for a circle */
} piece;

typedef struct ordering {
  const ps__places *at;
  slots slots;
  piece *piece;
  size_t n, cap, n_through;
  size_t *by_dst; /* [n] pieces by destination */
  size_t *ready;  /* [n] a queue */
  size_t n_ready, n_taken;
  uint32_t n_looks; /* for circles */
  ps__moves *out;
} ordering;

/* BYTES of a piece of @m. Without a slot one that would overlap itself is as short as its shift. */
static uint64_t piece_bytes(const ordering *o, const ps__move *m, uint64_t most, bool *through) {
  const uint64_t shift = shift_of(m),
                 bytes = o->slots.bytes && o->slots.bytes < most ? o->slots.bytes : most;
  *through = false;
  if (shift >= bytes || shift >= m->bytes)
    return bytes;
  *through = shift < LEAST_DIRECT && o->slots.bytes;
  return *through ? bytes : shift;
}

static ps_status cut(ordering *o, const ps__moves *all, uint64_t most) {
  for (size_t i = 0; i < all->n; i++) {
    const ps__move *m = &all->move[i];
    bool through;
    const uint64_t bytes = piece_bytes(o, m, most, &through);
    for (uint64_t at = 0; at < m->bytes && !stays(m); at += bytes) {
      const uint64_t left = m->bytes - at, n = left < bytes ? left : bytes;
      if (o->n == MOST_PIECES)
        return ps__fail(PS_EBUDGET, "the arenas leave no room to move: too little is free in them");
      if (!PS_GROW(o->piece, o->n, o->cap))
        return ps__fail(PS_ENOMEM, "out of memory for the moves of a memory map");
      o->piece[o->n++] = (piece){.m = {m->from, m->to, m->src + at, m->dst + at, n},
                                 .through = through && shift_of(m) < n};
      o->n_through += through;
    }
  }
  return PS_OK;
}

typedef struct by_place {
  uint64_t at;
  uint32_t space;
  size_t idx;
} by_place;
static int by_space_and_place(const void *pa, const void *pb) {
  const by_place *a = pa, *b = pb;
  if (a->space != b->space)
    return a->space < b->space ? -1 : 1;
  return a->at < b->at ? -1 : a->at > b->at;
}

static ps_status sort_by_dst(ordering *o) {
  by_place *p = ps__malloc((o->n + 1) * sizeof *p);
  o->by_dst = ps__malloc((o->n + 1) * sizeof *o->by_dst);
  o->ready = ps__malloc((o->n + 1) * sizeof *o->ready);
  if (!p || !o->by_dst || !o->ready) {
    ps__free(p);
    return ps__fail(PS_ENOMEM, "out of memory for the moves of a memory map");
  }
  for (size_t i = 0; i < o->n; i++)
    p[i] = (by_place){o->piece[i].m.dst, o->piece[i].m.to, i};
  qsort(p, o->n, sizeof *p, by_space_and_place);
  for (size_t i = 0; i < o->n; i++)
    o->by_dst[i] = p[i].idx;
  ps__free(p);
  return PS_OK;
}

/* The first by destination that ends past @at of @space, or that is of a later space. */
static size_t first_past(const ordering *o, uint32_t space, uint64_t at) {
  size_t lo = 0, hi = o->n;
  while (lo < hi) {
    const size_t mid = (lo + hi) / 2;
    const ps__move *m = &o->piece[o->by_dst[mid]].m;
    if (m->to < space || (m->to == space && m->dst + m->bytes <= at))
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

/* The source of piece @i is to be read (@by 1), or was read (-1): pieces that go there wait for one
 * more or one fewer. Those that wait for none are ready. */
static void count_source(ordering *o, size_t i, int by) {
  const ps__move *m = &o->piece[i].m;
  for (size_t k = first_past(o, m->from, m->src); k < o->n; k++) {
    piece *p = &o->piece[o->by_dst[k]];
    if (p->m.to != m->from || p->m.dst >= m->src + m->bytes)
      break;
    if (p == &o->piece[i])
      continue;
    p->n_before += (size_t)by;
    if (by < 0 && p->n_before == 0)
      o->ready[o->n_ready++] = o->by_dst[k];
  }
}

/* ---- the order ------------------------------------------------------------------------------- */

static ps_status to_slot(ordering *o, piece *p, slot **in) {
  *in = take_slot(&o->slots, o->at, &p->m);
  if (!*in)
    return ps__fail(PS_EBUDGET, "the arenas leave no room to move: too little is free in them");
  return add(o->out, (ps__move){p->m.from, (*in)->space, p->m.src, (*in)->at, p->m.bytes});
}

static ps_status from_slot(ordering *o, const piece *p, slot *in) {
  give_slot(&o->slots, in);
  return add(o->out, (ps__move){in->space, p->m.to, in->at, p->m.dst, p->m.bytes});
}

static ps_status carry_out(ordering *o, size_t i) {
  piece *p = &o->piece[i];
  slot *in = p->in;
  p->done = true;
  if (in) /* its source was read before */
    return from_slot(o, p, in);
  if (p->through) {
    PS_TRY(to_slot(o, p, &in));
    PS_TRY(from_slot(o, p, in));
  } else
    PS_TRY(add(o->out, p->m));
  count_source(o, i, -1);
  return PS_OK;
}

/* A piece that is not read yet, where @p goes to; @p, if there is none. */
static size_t one_before(const ordering *o, const piece *p) {
  for (size_t i = 0; i < o->n; i++) {
    const piece *q = &o->piece[i];
    if (q != p && !q->done && !q->in && q->m.from == p->m.to && q->m.src < p->m.dst + p->m.bytes &&
        p->m.dst < q->m.src + q->m.bytes)
      return i;
  }
  return (size_t)(p - o->piece);
}

/* Nothing is ready: pieces wait for each other in a circle. One of the circle leaves its place. Of
 * a long way to the circle only a part is walked: any piece may leave, at the cost of a slot. */
static ps_status break_circle(ordering *o) {
  enum { MOST_WALKED = 256 };
  size_t i = 0;
  while (o->piece[i].done || o->piece[i].in)
    i++;
  o->n_looks++;
  for (int k = 0; k < MOST_WALKED && o->piece[i].seen != o->n_looks; k++) {
    o->piece[i].seen = o->n_looks;
    i = one_before(o, &o->piece[i]);
  }
  /* the last slot is for pieces that overlap themselves */
  if (o->slots.n_free < 1u + (o->n_through > 0))
    return ps__fail(PS_EBUDGET, "the arenas leave no room to move: too little is free in them");
  PS_TRY(to_slot(o, &o->piece[i], &o->piece[i].in));
  count_source(o, i, -1);
  return PS_OK;
}

static ps_status order(ordering *o) {
  PS_TRY(sort_by_dst(o));
  for (size_t i = 0; i < o->n; i++)
    count_source(o, i, 1);
  for (size_t i = 0; i < o->n; i++)
    if (o->piece[i].n_before == 0)
      o->ready[o->n_ready++] = i;
  while (o->n_taken < o->n)
    PS_TRY(o->n_taken < o->n_ready ? carry_out(o, o->ready[o->n_taken++]) : break_circle(o));
  return PS_OK;
}

ps_status ps__moves_order(const ps__moves *all, const ps__places *at,
                          const uint64_t space[PS_MAX_PLACES], uint64_t most, ps__moves *out) {
  ordering *o = ps__calloc(1, sizeof *o);
  if (!o)
    return ps__fail(PS_ENOMEM, "out of memory for the moves of a memory map");
  *out = (ps__moves){0};
  o->at = at;
  o->out = out;
  o->slots.bytes = most;
  ps_status st = find_slots(all, at, space, &o->slots);
  if (st == PS_OK)
    st = cut(o, all, most);
  if (st == PS_OK)
    st = order(o);
  ps__free(o->piece);
  ps__free(o->by_dst);
  ps__free(o->ready);
  ps__free(o);
  if (st != PS_OK)
    ps__moves_free(out);
  return st;
}

/* ---- what outlives a step -------------------------------------------------------------------- */

typedef struct both {
  const ps__step *from, *to;
  ps__moves *out;
} both;

static ps_status move(const both *b, uint32_t src, uint32_t dst) {
  if (src == PS__NO_VT || dst == PS__NO_VT)
    return PS_OK;
  const ps__vt *s = &b->from->vt[src], *d = &b->to->vt[dst];
  if (s->bytes != d->bytes)
    return ps__fail(PS_EINTERNAL, "a tensor of %llu bytes cannot move to one of %llu",
                    (unsigned long long)s->bytes, (unsigned long long)d->bytes);
  return add(b->out, (ps__move){s->space, d->space, s->offset, d->offset, s->bytes});
}

/* The unit's weights on a device, where they have stayed; PS__NO_VT: nowhere. */
static uint32_t stayed_at(const ps__step *s, uint32_t unit, uint32_t device) {
  return ps__weights_stay(s->spec, unit) ? s->unit_host[unit].device_weights[device] : PS__NO_VT;
}

static ps_status move_unit(const both *b, uint32_t unit) {
  const ps__unit_host *f = &b->from->unit_host[unit], *t = &b->to->unit_host[unit];
  /* beside a master copy the host's weights did not follow those that stayed on the device */
  const uint32_t stayed = stayed_at(b->from, unit, 0);
  const bool behind =
      f->master != PS__NO_VT && stayed != PS__NO_VT && !ps__in_halves(b->from->spec->recipe);
  PS_TRY(move(b, behind && !ps__weights_stay(b->to->spec, unit) ? stayed : f->weights, t->weights));
  PS_TRY(move(b, f->master, t->master));
  if (b->from->spec->keep_grads)
    PS_TRY(move(b, f->grad, t->grad));
  for (uint32_t k = 0; k < PS_MAX_STATES; k++)
    PS_TRY(move(b, f->state[k], t->state[k]));
  for (uint32_t d = 0; d < b->to->at->n_devices; d++) {
    const uint32_t here = stayed_at(b->from, unit, d);
    PS_TRY(move(b, here != PS__NO_VT ? here : f->weights, stayed_at(b->to, unit, d)));
  }
  return move(b, f->device_master != PS__NO_VT ? f->device_master : f->master, t->device_master);
}

ps_status ps__step_moves(const ps__step *from, const ps__step *to, ps__moves *out) {
  const both b = {from, to, out};
  *out = (ps__moves){0};
  ps_status st = PS_OK;
  for (uint32_t u = 0; st == PS_OK && u < from->spec->n_units; u++)
    st = move_unit(&b, u);
  if (st == PS_OK)
    st = move(&b, from->norms, to->norms);
  if (st == PS_OK)
    st = move(&b, from->stats, to->stats);
  if (st != PS_OK)
    ps__moves_free(out);
  return st;
}

/* ---- as a program ---------------------------------------------------------------------------- */

/* Inside a space the stream that computes there copies, else that of the link. */
static uint32_t stream_of(const ps__places *at, const ps__move *m) {
  if (m->from == at->host && m->to == at->host)
    return at->host_ops;
  const ps__device_at *dev = &at->dev[m->from == at->host ? m->to : m->from];
  return m->from == m->to ? dev->compute : m->from == at->host ? dev->to_device : dev->to_host;
}

ps_status ps__moves_program(const ps__moves *copies, const ps__places *at, ps_program **out) {
  ps_program *p = NULL;
  PS_TRY(ps_program_create(&p, at->n_places, at->n_streams));
  ps_status st = PS_OK;
  for (size_t i = 0; st == PS_OK && i < copies->n; i++) {
    const ps__move *m = &copies->move[i];
    const ps_access access[2] = {{m->from, PS_READ, m->src, m->bytes},
                                 {m->to, PS_WRITE, m->dst, m->bytes}};
    const ps_op op = {.stream = stream_of(at, m),
                      .access = access,
                      .n_access = 2,
                      .work = ps__bytes_work((double)m->bytes),
                      .tag = {.layer = -1, .round = -1, .chunk = -1, .phase = PS__PHASE_UPDATE}};
    st = ps_program_add(p, &op, NULL);
  }
  if (st == PS_OK)
    *out = p;
  else
    ps_program_destroy(p);
  return st;
}
