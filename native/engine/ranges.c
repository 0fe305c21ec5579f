/* ranges.c - names of ops for profilers. */
#include "engine/ranges.h"
#include <stdio.h>

/* ---- names ----------------------------------------------------------------------------------- */

ps__range_path ps__range_path_of(const ps__op *op, uint64_t step) {
  const ps_tag *t = &op->tag;
  ps__range_path path = {.number = {step}, .n = 1};
  if (!op->kernel || t->round < 0 || t->layer < 0 || t->chunk < 0)
    return path;
  path.number[PS__RANGE_ROUND] = (uint64_t)t->round;
  path.number[PS__RANGE_LAYER] = (uint64_t)t->layer;
  path.number[PS__RANGE_CHUNK] = (uint64_t)t->chunk;
  path.n = PS__RANGE_LEVELS;
  return path;
}

uint32_t ps__range_common(const ps__range_path *a, const ps__range_path *b) {
  uint32_t n = 0;
  while (n < a->n && n < b->n && a->number[n] == b->number[n])
    n++;
  return n;
}

void ps__range_name(char text[PS__RANGE_TEXT], const ps__range_path *path, uint32_t level) {
  static const char *const name[PS__RANGE_LEVELS] = {"step", "round", "layer", "chunk"};
  snprintf(text, PS__RANGE_TEXT, "%s %llu", name[level], (unsigned long long)path->number[level]);
}

void ps__range_op_name(char text[PS__RANGE_TEXT], const ps__op *op, const char *stream) {
  const ps_tag *t = &op->tag;
  const bool placed = ps__range_path_of(op, 0).n == PS__RANGE_LEVELS;
  size_t n = 0;
#define SAY(...)                                                                                   \
  n += n < PS__RANGE_TEXT ? (size_t)snprintf(text + n, PS__RANGE_TEXT - n, __VA_ARGS__) : 0
  SAY("%s", op->kernel ? op->kernel->name : stream);
  if (t->what || !op->kernel)
    SAY(" %s", t->what ? t->what : "copy");
  if (!placed && t->layer >= 0)
    SAY(" of layer %d", t->layer);
  if (!op->kernel && t->round >= 0)
    SAY(", round %d", t->round);
  if (!op->kernel && t->chunk >= 0)
    SAY(", chunk %d", t->chunk);
#undef SAY
}

/* ---- a thread's ranges ----------------------------------------------------------------------- */

void ps__ranges_begin(ps__ranges *r, const ps__backend *backend) {
  *r = (ps__ranges){.backend = backend->profiled && backend->profiled() ? backend : NULL};
}

void ps__ranges_enter(ps__ranges *r, const ps__op *op, const char *stream, uint64_t step) {
  char text[PS__RANGE_TEXT];
  if (!r->backend)
    return;
  const ps__range_path to = ps__range_path_of(op, step);
  const uint32_t common = ps__range_common(&r->open, &to);
  r->backend->range_pop(r->open.n - common);
  for (uint32_t i = common; i < to.n; i++) {
    ps__range_name(text, &to, i);
    r->backend->range_push(text);
  }
  r->open = to;
  ps__range_op_name(text, op, stream);
  r->backend->range_push(text);
}

void ps__ranges_leave(ps__ranges *r) {
  if (r->backend)
    r->backend->range_pop(1);
}

void ps__ranges_end(ps__ranges *r) {
  if (r->backend)
    r->backend->range_pop(r->open.n);
  r->open.n = 0;
}
