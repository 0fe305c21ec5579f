/* memmap.c - offsets for tensors with lifetimes: greedy, the longest-lived first, each at the
 * lowest offset that fits, or the highest for those marked high. */
#include "step/step.h"
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256 }; /* ps__memmap_aligned() */

/* A tensor that has its place, in a list sorted by begin. @end is rounded up to ALIGN: the next
 * tensor may begin there. @reach is the largest end up to here in the list. */
typedef struct placed {
  uint64_t begin, end, reach;
  uint32_t first, last;
} placed;
typedef struct keyed {
  uint64_t duration, bytes;
  uint32_t id;
} keyed;

static int by_duration(const void *pa, const void *pb) {
  const keyed *a = pa, *b = pb;
  if (a->duration != b->duration)
    return a->duration < b->duration ? 1 : -1;
  if (a->bytes != b->bytes)
    return a->bytes < b->bytes ? 1 : -1;
  return a->id < b->id ? -1 : a->id > b->id;
}

static uint64_t align_up(uint64_t x) { return ps__memmap_aligned(x); }
static uint64_t align_for(const ps__vt *t, uint64_t x) {
  return t->sectors ? (x + PS__SECTOR_BYTES - 1) / PS__SECTOR_BYTES * PS__SECTOR_BYTES : x;
}

static uint64_t align_down(const ps__vt *t, uint64_t x) {
  const uint64_t by = t->sectors ? PS__SECTOR_BYTES : ALIGN;
  return x / by * by;
}

/* The first of a list that reaches past @at. */
static size_t first_past(const placed *p, size_t n, uint64_t at) {
  size_t lo = 0, hi = n;
  while (lo < hi) {
    const size_t mid = (lo + hi) / 2;
    if (p[mid].reach <= at)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

/* The lowest offset >= at where [offset, offset+bytes) overlaps nothing alive with t. */
static uint64_t lowest_fit(const placed *p, size_t n, const ps__vt *t, uint64_t at) {
  at = align_for(t, at);
  for (size_t i = first_past(p, n, at); i < n; i++) {
    if (p[i].begin >= at + t->bytes)
      break;
    if (p[i].last <= t->first || t->last <= p[i].first)
      continue;
    if (p[i].end > at)
      at = align_for(t, p[i].end);
  }
  return at;
}

/* The highest offset <= at where it overlaps nothing; UINT64_MAX: there is none from base on. */
static uint64_t highest_fit(const placed *p, size_t n, const ps__vt *t, uint64_t at,
                            uint64_t base) {
  for (size_t i = n; i-- > 0;) {
    if (p[i].begin >= at + t->bytes || p[i].end <= at || p[i].last <= t->first ||
        t->last <= p[i].first)
      continue;
    if (p[i].begin < base + t->bytes)
      return UINT64_MAX;
    at = align_down(t, p[i].begin - t->bytes);
    if (at < base)
      return UINT64_MAX;
  }
  return at;
}

/* Tensors that have their place, sorted by begin. */
typedef struct placed_list {
  placed *p;
  size_t n, cap;
} placed_list;

static bool insert(placed_list *l, placed e) {
  if (!PS_GROW(l->p, l->n, l->cap))
    return false;
  size_t lo = 0, hi = l->n;
  while (lo < hi) {
    const size_t mid = (lo + hi) / 2;
    if (l->p[mid].begin <= e.begin)
      lo = mid + 1;
    else
      hi = mid;
  }
  memmove(l->p + lo + 1, l->p + lo, (l->n - lo) * sizeof *l->p);
  e.reach = lo && l->p[lo - 1].reach > e.end ? l->p[lo - 1].reach : e.end;
  l->p[lo] = e;
  l->n++;
  for (size_t i = lo + 1; i < l->n && l->p[i].reach < e.reach; i++)
    l->p[i].reach = e.reach;
  return true;
}

/* A window of program order. Tensors alive in all of it are merged into blocks of offsets; those
 * alive in a part of it are listed one by one. */
typedef struct window {
  placed_list whole, part;
} window;
typedef struct windows {
  window *w;
  uint32_t n, ops;
} windows; /* ops: length of each window */

static void windows_free(windows *s) {
  for (uint32_t i = 0; s->w && i < s->n; i++) {
    ps__free(s->w[i].whole.p);
    ps__free(s->w[i].part.p);
  }
  ps__free(s->w);
}

static uint32_t window_of(const windows *s, uint32_t op) {
  return op / s->ops < s->n ? op / s->ops : s->n - 1;
}

static bool append_whole(window *w, placed e) {
  placed_list *l = &w->whole;
  if (l->n && e.begin <= l->p[l->n - 1].end) {
    if (e.end > l->p[l->n - 1].end)
      l->p[l->n - 1].end = l->p[l->n - 1].reach = e.end;
    return true;
  }
  if (!PS_GROW(l->p, l->n, l->cap))
    return false;
  l->p[l->n++] = e;
  return true;
}

/* Lists the tensors placed so far in the windows that they touch. l is sorted by begin. */
static bool windows_init(windows *s, const placed_list *l, uint32_t n_ops, uint32_t ops) {
  *s = (windows){.n = n_ops / ops + 1, .ops = ops};
  s->w = ps__calloc(s->n, sizeof *s->w);
  bool ok = s->w != NULL;
  for (size_t i = 0; ok && i < l->n; i++) {
    const placed e = l->p[i];
    for (uint32_t k = window_of(s, e.first); ok && k <= window_of(s, e.last - 1); k++) {
      const bool whole = e.first <= k * ops && (k + 1) * (uint64_t)ops <= e.last;
      ok = whole ? append_whole(&s->w[k], (placed){e.begin, e.end, e.end, 0, UINT32_MAX})
                 : insert(&s->w[k].part, e);
    }
  }
  return ok;
}

/* lowest_fit() over all that is placed: each list moves the offset up only past what is in the way,
 * until none does. */
static uint64_t windows_fit(const windows *s, const ps__vt *t, uint64_t base) {
  const uint32_t begin = window_of(s, t->first), end = window_of(s, t->last - 1) + 1;
  for (uint64_t at = base, before;;) {
    before = at;
    for (uint32_t k = begin; k < end; k++) {
      at = lowest_fit(s->w[k].whole.p, s->w[k].whole.n, t, at);
      at = lowest_fit(s->w[k].part.p, s->w[k].part.n, t, at);
    }
    if (at == before)
      return at;
  }
}

static uint64_t windows_highest(const windows *s, const ps__vt *t, uint64_t at, uint64_t base) {
  const uint32_t begin = window_of(s, t->first), end = window_of(s, t->last - 1) + 1;
  for (uint64_t before;;) {
    before = at;
    for (uint32_t k = begin; at != UINT64_MAX && k < end; k++) {
      at = highest_fit(s->w[k].whole.p, s->w[k].whole.n, t, at, base);
      if (at != UINT64_MAX)
        at = highest_fit(s->w[k].part.p, s->w[k].part.n, t, at, base);
    }
    if (at == before || at == UINT64_MAX)
      return at;
  }
}

static bool windows_insert(windows *s, placed e) {
  bool ok = true;
  for (uint32_t k = window_of(s, e.first); ok && k <= window_of(s, e.last - 1); k++)
    ok = insert(&s->w[k].part, e);
  return ok;
}

enum { WINDOWS = 128, SPAN = 4, FEW = 512 };
/* The ceiling of what is high: the most bytes alive at once and a 64th of it, about what holes cost
 * the 8B plans of bench/LOG.md. */
enum { CEILING_SLACK = 64 };

/* Either search gives the same offsets. While tensors are longer than a few windows, one list of
 * all is searched; for shorter ones (most of them), the lists of the windows that they touch. */
static uint64_t place_all(ps__vt *vt, const keyed *order, size_t m, uint32_t n_ops, uint64_t base,
                          uint64_t ceiling, bool *ok) {
  placed_list all = {0};
  windows w = {0};
  uint64_t peak = base;
  const uint32_t ops = n_ops / WINDOWS + 1;
  for (size_t k = 0; *ok && k < m; k++) {
    ps__vt *t = &vt[order[k].id];
    if (!w.w && m > FEW && order[k].duration <= (uint64_t)SPAN * ops)
      *ok = windows_init(&w, &all, n_ops, ops);
    if (!*ok || t->last == t->first)
      continue; /* alive for no op: any offset does */
    uint64_t at = UINT64_MAX;
    if (t->high && base + t->bytes <= ceiling) {
      const uint64_t top = align_down(t, ceiling - t->bytes);
      at = top < base ? UINT64_MAX
           : w.w      ? windows_highest(&w, t, top, base)
                      : highest_fit(all.p, all.n, t, top, base);
    }
    if (at == UINT64_MAX)
      at = w.w ? windows_fit(&w, t, base) : lowest_fit(all.p, all.n, t, base);
    t->offset = at;
    const placed e = {at, align_up(at + t->bytes), 0, t->first, t->last};
    *ok = w.w ? windows_insert(&w, e) : insert(&all, e);
    if (at + t->bytes > peak)
      peak = at + t->bytes;
  }
  windows_free(&w);
  ps__free(all.p);
  return peak;
}

uint64_t ps__memmap(ps__vt *vt, size_t n, uint32_t space) {
  keyed *order = ps__malloc((n + 1) * sizeof *order);
  uint64_t base = 0, ceiling = 0;
  uint32_t n_ops = 0;
  size_t m = 0;
  bool high = false;
  if (!order)
    return UINT64_MAX;
  for (size_t i = 0; i < n; i++)
    if (vt[i].space == space && vt[i].pageable) {
      vt[i].offset = base;
      base = align_up(base + vt[i].bytes);
    }
  for (size_t i = 0; i < n; i++) {
    if (vt[i].space != space || vt[i].bytes == 0 || vt[i].alias_of || vt[i].pageable)
      continue;
    if (!vt[i].persistent && vt[i].last > n_ops)
      n_ops = vt[i].last;
    high |= vt[i].high;
    if (vt[i].persistent) {
      vt[i].offset = align_for(&vt[i], base);
      base = align_up(vt[i].offset + vt[i].bytes);
    } else
      order[m++] = (keyed){vt[i].last - vt[i].first, vt[i].bytes, (uint32_t)i};
  }
  qsort(order, m, sizeof *order, by_duration);
  if (high)
    ceiling = ps__memmap_bound(vt, n, n_ops, space);
  bool ok = ceiling != UINT64_MAX;
  const uint64_t peak =
      ok ? place_all(vt, order, m, n_ops, base, ceiling + ceiling / CEILING_SLACK, &ok) : 0;
  ps__free(order);
  return ok ? peak : UINT64_MAX;
}

uint64_t ps__memmap_bound(const ps__vt *vt, size_t n, uint32_t n_ops, uint32_t space) {
  int64_t *change = ps__calloc((size_t)n_ops + 1, sizeof *change);
  uint64_t base = 0, alive = 0, peak = 0;
  if (!change)
    return UINT64_MAX;
  for (size_t i = 0; i < n; i++) {
    if (vt[i].space != space || vt[i].alias_of)
      continue;
    if (vt[i].persistent)
      base += vt[i].bytes;
    else {
      change[vt[i].first] += (int64_t)vt[i].bytes;
      change[vt[i].last] -= (int64_t)vt[i].bytes;
    }
  }
  for (uint32_t i = 0; i <= n_ops; i++) {
    alive += (uint64_t)change[i];
    if (alive > peak)
      peak = alive;
  }
  ps__free(change);
  return base + peak;
}
