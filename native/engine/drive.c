/* drive.c - the drivers' side of a run: replay a schedule step after step, and stop. */
#include "engine/pace.h"
#include "engine/ranges.h"
#include <sched.h>

/* ---- stopping -----------------------------------------------------------------------------------
 * An op that fails in step k stops step k and every later step. The steps before k never wait for
 * those. They go on to their end, so that half-made updates become whole. A cancel stops all steps.
 *
 * Each driver (and the caller, which waits like one) stores the number of its step and then reads
 * the limit. The stopping thread lowers the limit and then reads where each driver is. At least one
 * of the two sees the other's store, so no thread sleeps for an op that will not come. */

/* Everything here may run in a signal handler. */
void ps__run_stop(ps_run *r, uint64_t step) {
  uint64_t limit = atomic_load(&r->limit);
  while (step < limit && !atomic_compare_exchange_weak(&r->limit, &limit, step))
    ;
  atomic_store(&r->stop, 1);
  atomic_store(&r->idle, 1);
  for (uint32_t i = 0; i <= PS_MAX_STREAMS; i++)
    if (atomic_load(&r->progress[i].at) >= step)
      atomic_store(&r->progress[i].leave, 1);
  r->engine->backend->wake(r->engine->device);
  ps__counter_wake(&r->allowed);
}

size_t ps__describe_tag(char *text, size_t room, const ps_tag *tag) {
  const char *const name[3] = {"layer", "round", "chunk"};
  const int32_t value[3] = {tag->layer, tag->round, tag->chunk};
  size_t n = 0;
  text[0] = 0;
  for (int i = 0; i < 3; i++)
    if (value[i] >= 0)
      n += (size_t)snprintf(text + n, room - n, ", %s %d", name[i], value[i]);
  return n;
}

/* The same, and where there are several devices ", stream compute 1", which says of which one. */
static void describe_op(char *text, size_t room, const ps_engine *e, const ps__op *op) {
  const size_t n = ps__describe_tag(text, room, &op->tag);
  uint32_t n_devices = 0;
  for (uint32_t i = 0; i < e->cfg.n_places; i++)
    n_devices += e->cfg.place[i].kind == PS_PLACE_DEVICE;
  if (n_devices > 1)
    snprintf(text + n, room - n, ", stream %s", e->cfg.stream[op->stream].name);
}

static void fail_op(ps_run *r, const ps__resolved *s, uint64_t step, ps_status code) {
  int none = PS_OK;
  if (atomic_compare_exchange_strong(&r->error, &none, code)) {
    const ps__op *op = &r->schedule->list.ops[s->op];
    const char *why = ps_last_error();
    char where[128];
    describe_op(where, sizeof where, r->engine, op);
    snprintf(r->message, sizeof r->message, "%s (op %llu, %s%s, of the run's step %llu)",
             why[0] ? why : ps_status_name(code), (unsigned long long)s->op, ps__op_name(op), where,
             (unsigned long long)step + 1);
    atomic_store(&r->told, 1);
  }
  /* another stream failed this very moment and is writing its message */
  while (!atomic_load(&r->told))
    sched_yield();
  ps__run_stop(r, step);
}

uint64_t ps_run_steps_done(const ps_run *r) {
  const ps__oplist *l = &r->schedule->list;
  const uint64_t first = atomic_load(&r->first);
  uint64_t done = ps__run_submitted(r);
  for (uint32_t s = 0; s < l->n_streams && !atomic_load(&r->paused); s++) {
    uint64_t n = l->stream_n_ops[s] ? first + r->engine->backend->counter(r->engine->device, s) /
                                                  l->stream_n_ops[s]
                                    : done;
    done = n < done ? n : done;
  }
  return done;
}

/* The stream whose op is named where a device failed: that device's first one that computes. */
static uint32_t stream_of_failure(const ps_engine *e, const ps__oplist *l) {
  const uint32_t place = e->backend->failed ? e->backend->failed(e->device) : 0;
  uint32_t first = l->n_streams;
  for (uint32_t s = l->n_streams; s-- > 0;)
    if (!ps__runs_on_host(&e->cfg, s) && !ps__has_links(&e->cfg, s) && l->stream_n_ops[s] &&
        (e->cfg.stream[s].place == place || first == l->n_streams ||
         e->cfg.stream[first].place != place))
      first = s;
  return first < l->n_streams ? first : l->n_streams - 1;
}

/* A device failed, as the last error of this thread says: nothing that it has not ended will end.
 * Which op it was is known as far as the counters tell. */
void ps__run_fail_device(ps_run *r, ps_status code) {
  const ps_engine *e = r->engine;
  const ps__oplist *l = &r->schedule->list;
  uint64_t done = ps_run_steps_done(r);
  int none = PS_OK;
  if (atomic_compare_exchange_strong(&r->error, &none, code)) {
    const uint32_t stream = stream_of_failure(e, l);
    uint64_t n = l->stream_n_ops[stream] ? l->stream_n_ops[stream] : 1,
             at = e->backend->counter(e->device, stream);
    size_t i = 0;
    while (i + 1 < l->n_ops && (l->ops[i].stream != stream || l->ops[i].position != at % n))
      i++;
    char where[128];
    describe_op(where, sizeof where, e, &l->ops[i]);
    snprintf(r->message, sizeof r->message, "%s (at or after op %zu, %s%s, of the run's step %llu)",
             ps_last_error(), i, ps__op_name(&l->ops[i]), where,
             (unsigned long long)(atomic_load(&r->first) + at / n + 1));
    atomic_store(&r->told, 1);
  }
  while (!atomic_load(&r->told))
    sched_yield();
  ps__run_stop(r, done);
}

void ps_run_cancel(ps_run *r) {
  int none = PS_OK;
  if (atomic_compare_exchange_strong(&r->error, &none, PS_ECANCELLED))
    atomic_store(&r->told, 1);
  ps__run_stop(r, 0);
}

ps_status ps__run_sticky(const ps_run *r) {
  if (!atomic_load(&r->stop))
    return PS_OK;
  int code = atomic_load(&r->error);
  return ps__fail((ps_status)code, "%s",
                  code == PS_ECANCELLED && !r->message[0] ? "the run was cancelled" : r->message);
}

/* ---- driving --------------------------------------------------------------------------------- */

/* @since: steps since the run has had the engine. */
static bool wait_all(const ps_run *r, const ps__resolved *s, uint64_t since,
                     const _Atomic uint32_t *leave) {
  const ps_engine *e = r->engine;
  for (uint32_t i = 0; i < s->n_wait; i++) {
    const ps_wait *w = &s->wait[i];
    if (w->steps_back > since)
      continue;
    uint64_t value = (since - w->steps_back) * r->schedule->list.stream_n_ops[w->stream] + w->value;
    if (!e->backend->wait(e->device, s->stream, w->stream, value, leave))
      return false;
  }
  return true;
}

static ps_status copy_disk(const ps_engine *e, const ps__resolved *s) {
  const bool write = s->disk == PS_WRITE;
  const uint64_t offset =
      (uint64_t)((const char *)s->ptr[write] - (const char *)e->space[e->disk_space].addr);
  const ps_launch threads = {.stream = s->stream, .backend = PS_BACKEND_CPU, .exec = s->exec};
  return ps__disk_run(e->disk, write, offset, s->ptr[!write], s->bytes, &threads);
}

static ps_status copy_or_call(const ps_run *r, const ps__resolved *s, uint64_t step) {
  const ps_engine *e = r->engine;
  if (s->disk)
    return copy_disk(e, s);
  if (!s->fn)
    return e->backend->copy(e->device, s->stream, s->ptr[1], s->ptr[0], s->bytes);
  ps_launch l = {.args = s->args,
                 .ptr = s->ptr,
                 .n_ptr = s->n_ptr,
                 .stream = s->stream,
                 .step = step,
                 .op = s->op,
                 .backend = ps__stream_place(&e->cfg, s->stream)->backend,
                 .exec = s->exec};
  ps__clear_error(); /* an earlier op's is not this one's */
  return s->fn(&l);
}

static ps_status launch(const ps_run *r, const ps__resolved *s, uint64_t step, ps__ranges *ranges) {
  ps__ranges_enter(ranges, &r->schedule->list.ops[s->op], r->engine->cfg.stream[s->stream].name,
                   step);
  const ps_status st = copy_or_call(r, s, step);
  ps__ranges_leave(ranges);
  return st;
}

/* One op: false when the run stops. */
static bool run_op(ps_run *r, const ps__resolved *s, uint64_t step, const _Atomic uint32_t *leave,
                   ps__ranges *ranges) {
  const ps_engine *e = r->engine;
  const uint64_t since = step - atomic_load_explicit(&r->first, memory_order_relaxed);
  ps_trace_event *ev = NULL;
  if (e->backend->begin)
    e->backend->begin(e->device, s->stream, since * r->schedule->list.n_ops + s->op);
  if (r->trace_steps && step >= r->trace_from && step < r->trace_to) {
    ev = &r->events[step % r->trace_steps * r->schedule->list.n_ops + s->op];
    ev->end_ns = 0;
    ev->step = step;
    ev->op = s->op;
    ev->stream = s->stream;
    e->backend->stamp(e->device, s->stream, PS__STAMP_QUEUED, ev);
  }
  if (!wait_all(r, s, since, leave)) {
    if (!atomic_load(leave))
      ps__run_fail_device(r, e->backend->health(e->device));
    return false;
  }
  /* awaited work may have run on only because a stream gave up: it is nothing to go by */
  if (s->n_wait && atomic_load(leave))
    return false;
  if (r->paced)
    ps__paced_op(r, s, step, since, ev);
  else if (ev)
    e->backend->stamp(e->device, s->stream, PS__STAMP_START, ev);
  ps_status st = launch(r, s, step, ranges);
  if (st < 0) {
    if (st == PS_EDEVICE && e->backend->health(e->device) != PS_OK)
      ps__run_fail_device(r, st);
    else
      fail_op(r, s, step, st);
    return false;
  }
  if (ev && !r->paced)
    e->backend->stamp(e->device, s->stream, PS__STAMP_END, ev);
  e->backend->signal(e->device, s->stream,
                     since * r->schedule->list.stream_n_ops[s->stream] + s->position + 1);
  return true;
}

static void drive(ps_run *r, uint32_t driver, ps__ranges *ranges) {
  const ps__resolved *first = r->steps + r->driver_first[driver],
                     *end = r->steps + r->driver_first[driver + 1];
  ps__progress *place = &r->progress[driver];
  ps__clear_error();
  if (first == end)
    return;
  for (uint64_t step = atomic_load(&r->first); ps__counter_wait(&r->allowed, step + 1, &r->idle);
       step++) {
    atomic_store(&place->at, step);
    if (atomic_load(&r->limit) <= step)
      return;
    for (const ps__resolved *s = first; s < end; s++)
      if (atomic_load_explicit(&place->leave, memory_order_acquire) ||
          !run_op(r, s, step, &place->leave, ranges))
        return;
  }
}

void ps__run_drive(ps_run *r, uint32_t driver) {
  ps__ranges ranges;
  ps__ranges_begin(&ranges, r->engine->backend);
  drive(r, driver, &ranges);
  ps__ranges_end(&ranges);
}
