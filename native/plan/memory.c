/* memory.c - how many bytes of each arena a trace's ops used, over time.
 *
 * A tensor is in use from the start of the first op that touches it to the end of the last one.
 * The engine's waits keep two tensors of the same memory from being in use at once, so what is in
 * use never exceeds the arena. Tensors that outlive steps always count. An alias lies in another
 * tensor's memory and does not count. */
#include "plan/plan_impl.h"
#include <stdlib.h>
#include <string.h>

typedef struct change {
  uint64_t ns;
  int64_t bytes;
  uint32_t space;
} change;

/* What ends comes before what begins at the same time. */
static int by_space_and_time(const void *pa, const void *pb) {
  const change *a = pa, *b = pb;
  if (a->space != b->space)
    return a->space < b->space ? -1 : 1;
  if (a->ns != b->ns)
    return a->ns < b->ns ? -1 : 1;
  return a->bytes < b->bytes ? -1 : a->bytes > b->bytes;
}

typedef struct use {
  uint64_t from, to;
} use; /* of a tensor in a step; to 0: none */

/* When each tensor is in use in the step whose events these are. */
static void find_uses(const ps__step *s, const ps_trace_event *events, use *uses) {
  memset(uses, 0, s->n_vt * sizeof *uses);
  for (size_t i = 0; i < s->n_op; i++) {
    const ps__vop *op = &s->op[i];
    for (uint32_t a = op->access; a < op->access + op->n_access; a++) {
      use *u = &uses[s->access[a].vt];
      if (!u->to || events[i].start_ns < u->from)
        u->from = events[i].start_ns;
      if (events[i].end_ns > u->to)
        u->to = events[i].end_ns;
    }
  }
}

static size_t add_changes(const ps__step *s, const use *uses, change *out) {
  size_t n = 0;
  for (size_t i = 0; i < s->n_vt; i++) {
    const ps__vt *t = &s->vt[i];
    if (t->persistent || t->alias_of || !uses[i].to)
      continue;
    out[n++] = (change){uses[i].from, (int64_t)t->bytes, t->space};
    out[n++] = (change){uses[i].to, -(int64_t)t->bytes, t->space};
  }
  return n;
}

static uint64_t persistent_bytes(const ps__step *s, uint32_t space) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < s->n_vt; i++)
    if (s->vt[i].persistent && s->vt[i].space == space)
      bytes += s->vt[i].bytes;
  return bytes;
}

static const char *name_of(const ps_plan *p, uint32_t space) {
  static const char *const device[PS_MAX_DEVICES] = {
      "device 0 arena", "device 1 arena", "device 2 arena", "device 3 arena",
      "device 4 arena", "device 5 arena", "device 6 arena", "device 7 arena"};
  if (space == p->at->host)
    return "host arena";
  return p->at->n_devices == 1 ? "device arena" : device[space];
}

/* A gauge for each space: its value at every time at which it changes. */
static uint64_t count(const ps_plan *p, const change *list, size_t n, uint64_t begin,
                      ps_trace_gauge *out, uint64_t room) {
  uint64_t found = 0;
  for (uint32_t space = 0; space < p->at->n_places && space != p->at->disk; space++) {
    uint64_t bytes = persistent_bytes(&p->step, space);
    const ps_trace_gauge first = {name_of(p, space), begin, bytes};
    if (found < room)
      out[found] = first;
    found++;
    for (size_t i = 0; i < n; i++) {
      if (list[i].space != space)
        continue;
      bytes += (uint64_t)list[i].bytes;
      if (i + 1 < n && list[i + 1].space == space && list[i + 1].ns == list[i].ns)
        continue;
      if (found < room)
        out[found] = (ps_trace_gauge){name_of(p, space), list[i].ns, bytes};
      found++;
    }
  }
  return found;
}

ps_status ps_plan_memory(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                         ps_trace_gauge *gauges, uint64_t room, uint64_t *n_gauges) {
  if (!plan || !events || !n_gauges || (!gauges && room))
    return ps__fail(PS_EINVAL, "ps_plan_memory: plan, events, gauges and n_gauges must be given");
  PS_TRY(ps__plan_check_events(plan, events, n));
  const ps__step *s = &plan->step;
  const uint64_t n_steps = n / s->n_op;
  change *list = ps__malloc((2 * s->n_vt * n_steps + 1) * sizeof *list);
  use *uses = ps__malloc((s->n_vt + 1) * sizeof *uses);
  ps_status st = list && uses
                     ? PS_OK
                     : ps__fail(PS_ENOMEM, "out of memory for the uses of %zu tensors", s->n_vt);
  if (st == PS_OK) {
    size_t m = 0;
    uint64_t begin = UINT64_MAX;
    for (uint64_t k = 0; k < n_steps; k++) {
      find_uses(s, events + k * s->n_op, uses);
      m += add_changes(s, uses, list + m);
    }
    for (uint64_t i = 0; i < n; i++)
      begin = events[i].start_ns < begin ? events[i].start_ns : begin;
    qsort(list, m, sizeof *list, by_space_and_time);
    *n_gauges = count(plan, list, m, begin, gauges, room);
  }
  ps__free(list);
  ps__free(uses);
  return st;
}
