/* mix.c - datasets that are read in turn, by weight: what the user writes, and whose turn it is. */
#include "io/mix.h"
#include "core/core.h"
#include "core/mix64.h"
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- "A:0.7,B:0.3" --------------------------------------------------------------------------- */

static ps_status add_source(ps__sources *s, const char *path, size_t length, double weight) {
  char *copy = PS_GROW(s->item, s->n, s->cap) ? ps__calloc(length + 1, 1) : NULL;
  if (!copy)
    return ps__fail(PS_ENOMEM, "no memory left for the path of token shards");
  memcpy(copy, path, length);
  s->item[s->n++] = (ps__source){.path = copy, .weight = weight};
  return PS_OK;
}

void ps__mix_free(ps__sources *s) {
  for (size_t i = 0; i < s->n; i++)
    ps__free(s->item[i].path);
  ps__free(s->item);
}

/* A number with a point, whatever the caller's locale has. NAN: there is none, or no memory. */
static double number_at(const char *text, char **end) {
  const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  *end = (char *)text;
  if (!c)
    return NAN;
  const double value = strtod_l(text, end, c);
  freelocale(c);
  return value;
}

/* The weight at the end of the @length bytes at @part, after the last colon; NAN: there is none. */
static double weight_of(const char *part, size_t length, size_t *path_length) {
  const char *colon = memrchr(part, ':', length);
  if (!colon || colon == part || colon + 1 == part + length)
    return NAN;
  for (const char *c = colon + 1; c < part + length; c++)
    if (!strchr("0123456789.eE+-", *c))
      return NAN;
  char *end;
  const double weight = number_at(colon + 1, &end);
  *path_length = (size_t)(colon - part);
  return end == part + length ? weight : NAN;
}

/* One of the parts between commas has a weight. */
static bool has_weights(const char *text) {
  size_t path_length;
  for (const char *part = text;; part += 1) {
    const size_t length = strcspn(part, ",");
    if (!isnan(weight_of(part, length, &path_length)))
      return true;
    part += length;
    if (!*part)
      return false;
  }
}

ps_status ps__mix_parse(const char *text, ps__sources *s) {
  struct stat sb;
  size_t path_length = 0;
  const char *end = text + strlen(text);
  if (stat(text, &sb) == 0 || !has_weights(text))
    return add_source(s, text, strlen(text), 0);
  for (const char *part = text; part <= end;) {
    const size_t length = strcspn(part, ",");
    const double weight = weight_of(part, length, &path_length);
    if (!(weight > 0 && weight <= 1e9))
      return ps__fail(PS_EINVAL,
                      "%s: \"%.*s\" must be a path, a colon and a weight above 0 and at most 1e9, "
                      "as in A:0.7,B:0.3",
                      text, (int)length, part);
    PS_TRY(add_source(s, part, path_length, weight));
    part += length + 1;
  }
  return PS_OK;
}

ps_status ps__mix_check(const ps__sources *s) {
  for (size_t i = 1; i < s->n; i++)
    if ((s->item[i].weight > 0) != (s->item[0].weight > 0)) {
      const size_t without = s->item[0].weight > 0 ? i : 0;
      return ps__fail(PS_EINVAL,
                      "%s has no weight, but %s has one: give all data a weight, or none",
                      s->item[without].path, s->item[without ? 0 : i].path);
    }
  return PS_OK;
}

/* ---- turns ----------------------------------------------------------------------------------- */

size_t ps__mix_at(const ps__sources *s, uint64_t pos, uint64_t seed, int shuffle, uint64_t *count) {
  size_t k = 0;
  double rest = 0;
  for (size_t i = 0; i < s->n; i++)
    rest += s->item[i].weight;
  for (; k + 1 < s->n; k++) {
    /* in units of 2^-32; rest may be too small by rounding */
    const double share = s->item[k].weight / rest;
    const uint64_t quota = share < 1 ? (uint64_t)(share * 0x1p32 + 0.5) : UINT64_C(1) << 32,
                   phase = shuffle ? ps__mix64(seed + PS__MIX_GAMMA * (k + 1)) >> 32 : 0,
                   before = (uint64_t)(((unsigned __int128)pos * quota + phase) >> 32),
                   after = (uint64_t)(((unsigned __int128)(pos + 1) * quota + phase) >> 32);
    if (after > before) {
      *count = before;
      return k;
    }
    pos -= before;
    rest -= s->item[k].weight;
  }
  *count = pos;
  return k;
}
