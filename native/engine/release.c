/* release.c - host ops that will not run are let go in program order. */
#include "engine/release.h"

/* Waits for the device ops that @op of step @step awaits. Host ops that it awaits come before it in
 * program order: they have run, or were let go. */
static bool await_devices(const ps__release *r, const ps__op *op, uint64_t step) {
  for (uint32_t i = 0; i < op->n_wait; i++) {
    const ps_wait *w = &r->schedule->waits[op->wait + i];
    if (w->steps_back > step || r->on_host(r->user, w->stream))
      continue;
    const uint64_t n = r->schedule->list.stream_n_ops[w->stream];
    if (!r->await(r->user, w->stream, (step - w->steps_back) * n + w->value))
      return false;
  }
  return true;
}

void ps__release_in_order(const ps__release *r) {
  const ps__oplist *l = &r->schedule->list;
  uint64_t reached[PS_MAX_STREAMS] = {0}, step = UINT64_MAX;
  for (uint32_t s = 0; s < l->n_streams; s++)
    if (l->stream_n_ops[s] && r->on_host(r->user, s)) {
      reached[s] = r->reached(r->user, s);
      const uint64_t at = reached[s] / l->stream_n_ops[s];
      step = at < step ? at : step;
    }
  for (; step != UINT64_MAX; step++)
    for (size_t i = 0; i < l->n_ops; i++) {
      const ps__op *op = &l->ops[i];
      const uint64_t value = step * l->stream_n_ops[op->stream] + op->position + 1;
      if (!r->on_host(r->user, op->stream) || value <= reached[op->stream])
        continue;
      if (!r->needed(r->user, step * l->n_ops + i) || !await_devices(r, op, step))
        return;
      r->let_go(r->user, op->stream, value);
    }
}
