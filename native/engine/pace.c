/* pace.c - the virtual clock of a paced engine. */
#include "engine/pace.h"

void ps__engine_pace(ps_engine *e, const ps__pace *pace) {
  e->pace = pace;
  e->caller_ns = ps__now_ns();
}

uint64_t ps__engine_now(const ps_engine *e, uint32_t stream) {
  if (!e->pace)
    return ps__now_ns();
  return stream == PS__CALLER ? e->caller_ns : atomic_load(&e->stream_ns[stream]);
}

ps_status ps__paced_create(ps_run *r) {
  const ps__oplist *l = &r->schedule->list;
  ps__paced *p = ps__calloc(1, sizeof *p);
  if (p) {
    p->end = ps__calloc(PS__PACED_STEPS * (l->n_ops + 1), sizeof *p->end);
    p->from = ps__calloc(PS__PACED_STEPS, sizeof *p->from);
    p->op = ps__calloc(l->n_ops + 1, sizeof *p->op);
  }
  r->paced = p;
  if (!p || !p->end || !p->from || !p->op)
    return ps__fail(PS_ENOMEM, "run: out of memory for the times of %zu ops", l->n_ops);
  for (uint32_t s = 0; s + 1 < l->n_streams; s++)
    p->first[s + 1] = p->first[s] + (uint32_t)l->stream_n_ops[s];
  for (size_t i = 0; i < l->n_ops; i++)
    p->op[p->first[l->ops[i].stream] + l->ops[i].position] = (uint32_t)i;
  return PS_OK;
}

void ps__paced_destroy(ps_run *r) {
  if (!r->paced)
    return;
  ps__free(r->paced->end);
  ps__free(r->paced->from);
  ps__free(r->paced->op);
  ps__free(r->paced);
}

void ps__paced_begin(ps_run *r) {
  ps_engine *e = r->engine;
  for (uint32_t s = 0; s < PS_MAX_STREAMS; s++)
    if (atomic_load(&e->stream_ns[s]) > e->caller_ns)
      e->caller_ns = atomic_load(&e->stream_ns[s]);
  for (uint32_t s = 0; s < PS_MAX_STREAMS; s++)
    atomic_store(&e->stream_ns[s], e->caller_ns);
  e->pace->begin(e->pace->user, r);
}

void ps__paced_submit(ps_run *r, uint64_t first, uint64_t end) {
  for (uint64_t step = first; step < end; step++)
    r->paced->from[step % PS__PACED_STEPS] = r->engine->caller_ns;
}

static uint64_t *end_of(const ps_run *r, uint64_t step, uint64_t op) {
  return &r->paced->end[step % PS__PACED_STEPS * r->schedule->list.n_ops + op];
}

void ps__paced_waited(ps_run *r, uint64_t n_steps) {
  const ps__oplist *l = &r->schedule->list;
  for (uint32_t s = 0; s < l->n_streams && n_steps; s++) {
    if (!l->stream_n_ops[s])
      continue;
    const uint64_t last = r->paced->op[r->paced->first[s] + l->stream_n_ops[s] - 1],
                   end = *end_of(r, n_steps - 1, last);
    if (end > r->engine->caller_ns)
      r->engine->caller_ns = end;
  }
}

void ps__paced_op(ps_run *r, const ps__resolved *s, uint64_t step, uint64_t since,
                  ps_trace_event *ev) {
  const ps__paced *p = r->paced;
  ps_engine *e = r->engine;
  const uint64_t from = p->from[step % PS__PACED_STEPS],
                 free = atomic_load(&e->stream_ns[s->stream]), queued = free > from ? free : from;
  uint64_t start = queued;
  for (uint32_t i = 0; i < s->n_wait; i++) {
    const ps_wait *w = &s->wait[i];
    if (w->steps_back > since)
      continue;
    const uint64_t end =
        *end_of(r, step - w->steps_back, p->op[p->first[w->stream] + w->value - 1]);
    start = end > start ? end : start;
  }
  const uint64_t end = start + e->pace->ns(e->pace->user, r, s->op, step);
  *end_of(r, step, s->op) = end;
  atomic_store(&e->stream_ns[s->stream], end);
  if (ev) {
    ev->queued_ns = queued;
    ev->start_ns = start;
    ev->end_ns = end;
  }
}
