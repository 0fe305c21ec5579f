/* intervals.c - cut every space at every boundary of a declared range. */
#include "engine/schedule.h"

/* Sort ascending, by bytes from the lowest; a byte that all keys share costs one pass of reading.
 * Returns @keys or @other, whichever holds the result. */
static uint64_t *radix_sort(uint64_t *keys, uint64_t *other, size_t n) {
  for (unsigned shift = 0; shift < 64; shift += 8) {
    size_t count[256] = {0};
    for (size_t i = 0; i < n; i++)
      count[keys[i] >> shift & 255]++;
    if (n == 0 || count[keys[0] >> shift & 255] == n)
      continue;
    for (size_t b = 0, at = 0; b < 256; b++) {
      size_t c = count[b];
      count[b] = at;
      at += c;
    }
    for (size_t i = 0; i < n; i++)
      other[count[keys[i] >> shift & 255]++] = keys[i];
    uint64_t *t = keys;
    keys = other;
    other = t;
  }
  return keys;
}

static size_t unique(uint64_t *keys, size_t n) {
  size_t m = 0;
  for (size_t i = 0; i < n; i++)
    if (m == 0 || keys[m - 1] != keys[i])
      keys[m++] = keys[i];
  return m;
}

/* The index of @key, which is there. */
static uint32_t find(const uint64_t *keys, size_t n, uint64_t key) {
  const uint64_t *base = keys;
  while (n > 1) {
    size_t half = n / 2;
    base = base[half] <= key ? base + half : base;
    n -= half;
  }
  return (uint32_t)(base - keys);
}

static void cut_space(ps__intervals *s, const ps__oplist *l, uint32_t space, uint64_t *keys,
                      uint64_t *other) {
  size_t n = 0;
  for (size_t i = 0; i < l->n_access; i++)
    if (l->access[i].space == space) {
      keys[n++] = l->access[i].offset;
      keys[n++] = l->access[i].offset + l->access[i].bytes;
    }
  keys = radix_sort(keys, other, n);
  n = unique(keys, n);
  for (size_t i = 0; i < l->n_access; i++)
    if (l->access[i].space == space) {
      s->first[i] = (uint32_t)s->n_intervals + find(keys, n, l->access[i].offset);
      s->end[i] =
          (uint32_t)s->n_intervals + find(keys, n, l->access[i].offset + l->access[i].bytes);
    }
  s->n_intervals += n; /* n boundaries make n - 1 intervals; one number stays unused */
}

ps_status ps__intervals_cut(ps__intervals *out, const ps__oplist *l) {
  ps__intervals s = {0};
  if (l->n_access >= (size_t)1 << 30)
    return ps__fail(PS_EINVAL, "a program has at most %d accesses", 1 << 30);
  uint64_t *keys = ps__malloc(2 * l->n_access * sizeof *keys);
  uint64_t *other = ps__malloc(2 * l->n_access * sizeof *other);
  s.first = ps__malloc(l->n_access * sizeof *s.first);
  s.end = ps__malloc(l->n_access * sizeof *s.end);
  bool ok = keys && other && s.first && s.end;
  for (uint32_t space = 0; ok && space < l->n_spaces; space++)
    cut_space(&s, l, space, keys, other);
  ps__free(keys);
  ps__free(other);
  if (!ok) {
    ps__intervals_free(&s);
    return ps__fail(PS_ENOMEM, "schedule: out of memory for the intervals of %zu accesses",
                    l->n_access);
  }
  *out = s;
  return PS_OK;
}

void ps__intervals_free(ps__intervals *s) {
  ps__free(s->first);
  ps__free(s->end);
}
