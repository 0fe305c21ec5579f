/* valid.c - the invariants of a memory map and of a step: asserted in builds with DEBUG=1 or a
 * sanitizer, called by tests. Both functions only read.
 *
 * Tables come from malloc(), not ps__malloc(): a fault that a test injects must fail the code under
 * test, not its check. Where memory runs out a check says "valid". */
#include "step/step.h"
#include <stdlib.h>
#include <string.h>

/* ---- the memory map -------------------------------------------------------------------------- */

/* A tensor's life begins or ends before op @op. */
typedef struct event {
  uint32_t op, id;
  bool begins;
} event;

static int by_op(const void *pa, const void *pb) {
  const event *a = pa, *b = pb;
  if (a->op != b->op)
    return a->op < b->op ? -1 : 1;
  if (a->begins != b->begins)
    return a->begins ? 1 : -1;
  return a->id < b->id ? -1 : a->id > b->id;
}

static uint64_t end_of(const ps__vt *t) { return t->offset + t->bytes; }

static bool is_placed(const ps__vt *t, uint32_t space) {
  return t->space == space && t->bytes > 0 && (t->persistent || t->first < t->last);
}

/* How many tensors the memory of @t passes through: 0 where @t has its own. More than
 * PS__MAX_ALIAS_DEPTH: a chain that is too long, or that ends nowhere. */
static uint32_t depth_of(const ps__vt *vt, size_t n, const ps__vt *t) {
  uint32_t depth = 0;
  for (; t->alias_of && depth <= PS__MAX_ALIAS_DEPTH; depth++) {
    if (t->alias_of > n)
      return UINT32_MAX;
    t = &vt[t->alias_of - 1];
  }
  return depth;
}

/* Tensors that are alive, by offset: none overlaps another. */
typedef struct alive_list {
  uint32_t *id;
  size_t n;
} alive_list;

static size_t place_of(const alive_list *l, const ps__vt *vt, uint64_t offset) {
  size_t lo = 0, hi = l->n;
  while (lo < hi) {
    const size_t mid = (lo + hi) / 2;
    if (vt[l->id[mid]].offset < offset)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

/* Adds or removes the event's tensor; false where it overlaps one that is alive. */
static bool apply(alive_list *l, const ps__vt *vt, event e) {
  const ps__vt *t = &vt[e.id];
  const size_t at = place_of(l, vt, t->offset);
  if (!e.begins) {
    memmove(l->id + at, l->id + at + 1, (--l->n - at) * sizeof *l->id);
    return true;
  }
  if ((at > 0 && end_of(&vt[l->id[at - 1]]) > t->offset) ||
      (at < l->n && vt[l->id[at]].offset < end_of(t)))
    return false;
  memmove(l->id + at + 1, l->id + at, (l->n++ - at) * sizeof *l->id);
  l->id[at] = e.id;
  return true;
}

/* In order of the ops: no tensor of this depth begins to live where another one is alive. Those of
 * two chains do not overlap either, because their owners do not. */
static bool no_overlaps(const ps__vt *vt, size_t n, uint32_t space, uint32_t depth) {
  event *events = malloc((2 * n + 1) * sizeof *events);
  alive_list alive = {malloc((n + 1) * sizeof *alive.id), 0};
  size_t m = 0;
  bool valid = true;
  for (size_t i = 0; events && i < n; i++) {
    if (!is_placed(&vt[i], space) || depth_of(vt, n, &vt[i]) != depth)
      continue;
    events[m++] = (event){vt[i].persistent ? 0 : vt[i].first, (uint32_t)i, true};
    if (!vt[i].persistent)
      events[m++] = (event){vt[i].last, (uint32_t)i, false};
  }
  if (events)
    qsort(events, m, sizeof *events, by_op);
  for (size_t i = 0; alive.id && valid && i < m; i++)
    valid = apply(&alive, vt, events[i]);
  free(events);
  free(alive.id);
  return valid;
}

/* An alias lies in its owner, and lives while the owner does. ps__step_map() adds offsets in the
 * order of the tensors, so an owner that is an alias itself comes first. */
static bool alias_valid(const ps__vt *vt, size_t n, uint32_t id) {
  const ps__vt *t = &vt[id];
  if (depth_of(vt, n, t) > PS__MAX_ALIAS_DEPTH)
    return false;
  const ps__vt *owner = &vt[t->alias_of - 1];
  return owner->space == t->space && (!owner->alias_of || t->alias_of <= id) &&
         t->offset >= owner->offset && end_of(t) <= end_of(owner) &&
         (owner->persistent || (t->first >= owner->first && t->last <= owner->last));
}

bool ps__memmap_valid(const ps__vt *vt, size_t n, uint32_t space, uint64_t bytes) {
  for (size_t i = 0; i < n; i++) {
    const ps__vt *t = &vt[i];
    if (is_placed(t, space) && (end_of(t) > bytes || end_of(t) < t->offset ||
                                (t->alias_of && !alias_valid(vt, n, (uint32_t)i))))
      return false;
  }
  for (uint32_t depth = 0; depth <= PS__MAX_ALIAS_DEPTH; depth++)
    if (!no_overlaps(vt, n, space, depth))
      return false;
  return true;
}

/* ---- the step -------------------------------------------------------------------------------- */

/* What the ops up to now did to a tensor, and when aliases use its memory. */
typedef struct use {
  bool written;
  uint32_t alias_first, alias_last; /* [first op, last op); none: both 0 */
} use;

static void note_aliases(const ps__step *s, use *of) {
  for (size_t i = 0; i < s->n_vt; i++) {
    const ps__vt *t = &s->vt[i];
    if (!t->alias_of)
      continue;
    use *u = &of[t->alias_of - 1];
    if (u->alias_last == 0 || t->first < u->alias_first)
      u->alias_first = t->first;
    if (t->last > u->alias_last)
      u->alias_last = t->last;
  }
}

static bool access_valid(const ps__step *s, use *of, uint32_t op, const ps__vaccess *a) {
  if (a->vt >= s->n_vt || a->bytes == 0 || (a->mode & ~PS_READ_WRITE) || !(a->mode & PS_READ_WRITE))
    return false;
  const ps__vt *t = &s->vt[a->vt];
  use *u = &of[a->vt];
  if (a->offset > t->bytes || a->bytes > t->bytes - a->offset)
    return false;
  if (!t->persistent && (op < t->first || op >= t->last))
    return false;
  if (op >= u->alias_first && op < u->alias_last)
    return false;
  if ((a->mode & PS_READ) && !t->persistent && !u->written)
    return false;
  u->written |= (a->mode & PS_WRITE) != 0;
  return true;
}

static bool is_linked(const ps__places *at, uint32_t stream, uint32_t from, uint32_t to) {
  for (uint32_t i = 0; i < at->n_links; i++)
    if (at->link[i].stream == stream && at->link[i].from == from && at->link[i].to == to)
      return true;
  return false;
}

static bool op_valid(const ps__step *s, use *of, uint32_t idx) {
  const ps__vop *op = &s->op[idx];
  const ps__vaccess *a = s->access + op->access;
  if (op->stream >= s->at->n_streams || op->n_access > PS_MAX_ACCESSES)
    return false;
  for (uint32_t i = 0; i < op->n_access; i++)
    if (!access_valid(s, of, idx, &a[i]))
      return false;
  if (op->kernel) {
    const bool link = ps__link_of(s->at, op->stream) != NULL;
    for (uint32_t i = 0; i < op->n_access; i++)
      if (link || s->vt[a[i].vt].space != s->at->stream[op->stream].place)
        return false;
    return true;
  }
  if (op->n_access != 2 || a[0].mode != PS_READ || a[1].mode != PS_WRITE ||
      a[0].bytes != a[1].bytes)
    return false;
  const ps__vt *from = &s->vt[a[0].vt], *to = &s->vt[a[1].vt];
  if (ps__stream_on_host(s->at, op->stream) && !ps__link_of(s->at, op->stream))
    return from->space == s->at->host && to->space == s->at->host;
  return is_linked(s->at, op->stream, from->space, to->space) && !from->pageable && !to->pageable;
}

/* The place of a contribution among its unit's that @op adds to the total; -1 where it adds none.
 * Sums of squares add span by span: the first span stands for all. A block's own additions have no
 * index. */
static int64_t contribution_of(const ps__step *s, const ps__vop *op) {
  const void *args = s->args + op->args;
  if (op->kernel == &ps__k_embed_bwd_host)
    return ((const ps__args_embed_host *)args)->index;
  if (op->kernel != &ps__k_accumulate && op->kernel != &ps__k_accumulate_host &&
      op->kernel != &ps__k_accumulate_sumsq_host)
    return -1;
  const ps__args_accumulate *a = args;
  return a->first || !a->index ? -1 : (int64_t)a->index;
}

/* ps__unit_tag(), read back. An op of a chunk, the embedding's, is about its layer's first unit. */
static uint32_t unit_of(const ps__step *s, const ps__vop *op) {
  const int32_t chunk = op->tag.chunk;
  return s->model->layer[op->tag.layer].first_unit + (chunk < 0 ? (uint32_t)(-1 - chunk) : 0);
}

/* Every unit's contributions are added in their order, and none is left out. The first one is the
 * total until the second comes; an embedding on the host adds the first one too. */
static bool totals_valid(const ps__step *s) {
  if (s->spec->checked) /* it has no totals */
    return true;
  uint32_t *next = calloc(s->spec->n_units, sizeof *next);
  bool valid = true;
  for (uint32_t u = 0; next && u < s->spec->n_units; u++)
    next[u] = !(u == 0 && s->spec->embed_on_host) && !s->model->unit[u].frozen;
  for (size_t i = 0; next && valid && i < s->n_op; i++) {
    const int64_t idx = contribution_of(s, &s->op[i]);
    if (idx >= 0)
      valid = idx == next[unit_of(s, &s->op[i])]++;
  }
  for (uint32_t u = 0; next && valid && u < s->spec->n_units; u++)
    valid = next[u] == ps__unit_contributions(s->model, &s->sums, u);
  free(next);
  return valid;
}

bool ps__step_valid(const ps__step *s) {
  use *of = calloc(s->n_vt + 1, sizeof *of);
  bool valid = true;
  for (size_t i = 0; valid && i < s->n_vt; i++)
    valid = s->vt[i].persistent || (s->vt[i].first <= s->vt[i].last && s->vt[i].last <= s->n_op);
  if (of && valid) {
    note_aliases(s, of);
    for (size_t i = 0; valid && i < s->n_op; i++)
      valid = op_valid(s, of, (uint32_t)i);
  }
  free(of);
  return valid && totals_valid(s);
}
