/* prepare.c - what a run needs between its first and last step, made before the first.
 *
 * EVENTS. Each op that another stream of its GPU awaits has two events, used by the parity of the
 * step: op X of step k records event (X, k mod 2). Waits for it are submitted in step k or k+1
 * (ps_wait.steps_back is 0 or 1). Reuse is safe because one thread submits everything in program
 * order, step after step:
 * - A wait for (X,k) is submitted after the record of (X,k), since all waits point back in that
 *   order.
 * - It is submitted before the record of (X,k+2), which belongs to a later step than any wait for
 *   (X,k).
 * - cuStreamWaitEvent() binds to the latest record at the time of the call. A later record of the
 *   event changes nothing for submitted waits, however far the GPU lags. */
#include "backends/cuda/device.h"
#include <stdatomic.h>

static ps_status check_op(const ps__device *dev, const ps_schedule *s, size_t i) {
  const ps__op *op = &s->list.ops[i];
  bool on_host = ps__runs_on_host(&dev->cfg, op->stream);
  uint32_t n_host = 0;
  for (uint32_t a = 0; a < op->n_access; a++) {
    uint32_t space = s->list.access[op->access + a].space;
    n_host += ps__space_place(&dev->cfg, space)->kind != PS_PLACE_DEVICE; /* a disk is a host's */
  }
  if (!on_host && op->kernel && n_host && !dev->host_pointers)
    return ps__fail(
        PS_EINVAL, "run: op %zu (%s) touches host memory, which kernels of this GPU cannot address",
        i, ps__op_name(op));
  if (on_host && n_host < op->n_access)
    return ps__fail(PS_EINVAL,
                    "run: op %zu (%s) on host stream %u touches GPU memory: give it a device "
                    "stream",
                    i, ps__op_name(op), op->stream);
  if (!on_host && !op->kernel && n_host == 2)
    return ps__fail(PS_EINVAL,
                    "run: op %zu (copy) on device stream %u copies host memory to host memory: "
                    "give it a host stream",
                    i, op->stream);
  return PS_OK;
}

/* The streams that wait for an op of @s by an event. */
static uint64_t waits_by_event(const ps__device *dev, const ps__cuda_stream *s) {
  uint64_t set = 0;
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    if (dev->stream[i].stream && (dev->stream[i].gpu == s->gpu || !dev->mem_ops))
      set |= 1ull << i;
  return set;
}

/* Number the events and notes of the ops that need them. */
static void number(ps__device *dev, const ps_schedule *s, uint64_t *n_notes) {
  uint64_t by_event[PS_MAX_STREAMS];
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    by_event[i] = waits_by_event(dev, &dev->stream[i]);
  uint32_t n_events = 0, notes = 0;
  for (size_t i = 0; i < s->list.n_ops; i++) {
    const ps__op *op = &s->list.ops[i];
    ps__cuda_stream *st = &dev->stream[op->stream];
    if (!st->stream)
      continue;
    bool last = op->position + 1 == st->n_ops;
    st->ops[op->position] = (ps__cuda_op){.event = PS__NO_EVENT, .note = PS__NO_EVENT};
    if (op->waiters & by_event[op->stream]) {
      st->ops[op->position].event = n_events;
      n_events += 2;
    }
    if ((op->waiters & ~by_event[op->stream]) || last) {
      if (dev->notes)
        dev->notes[notes] =
            (ps__cuda_note){.word = st->word, .value = op->position + 1, .n_ops = st->n_ops};
      st->ops[op->position].note = notes++;
    }
  }
  dev->n_events = n_events;
  *n_notes = notes;
}

/* An event is of the GPU that records it. */
static ps_status make_events(ps__device *dev) {
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
    const ps__cuda_stream *s = &dev->stream[i];
    if (s->stream)
      ps__cuda_turn_to(dev, s->gpu);
    for (uint64_t k = 0; s->stream && k < s->n_ops; k++)
      for (uint32_t e = 0; s->ops[k].event != PS__NO_EVENT && e < 2; e++)
        PS__CUDA_TRY(dev->cu,
                     EventCreate(&dev->events[s->ops[k].event + e], CU_EVENT_DISABLE_TIMING));
  }
  return PS_OK;
}

static ps_status reserve(ps__device *dev, const ps_schedule *s) {
  for (uint32_t i = 0; i < s->list.n_streams; i++) {
    ps__cuda_stream *st = &dev->stream[i];
    st->n_ops = s->list.stream_n_ops[i];
    st->ops = st->stream ? ps__calloc(st->n_ops, sizeof *st->ops) : NULL;
    if (st->stream && !st->ops)
      return ps__fail(PS_ENOMEM, "run: out of memory for the %llu ops of stream %u",
                      (unsigned long long)st->n_ops, i);
  }
  uint64_t n_notes;
  number(dev, s, &n_notes);
  dev->notes = ps__calloc(n_notes, sizeof *dev->notes);
  dev->events = ps__calloc(dev->n_events, sizeof *dev->events);
  if (!dev->notes || !dev->events)
    return ps__fail(PS_ENOMEM, "run: out of memory for %llu events",
                    (unsigned long long)dev->n_events);
  number(dev, s, &n_notes); /* again, to fill the notes */
  return make_events(dev);
}

static void release(ps__device *dev) {
  for (uint64_t i = 0; i < dev->n_events && dev->events; i++)
    if (dev->events[i])
      dev->cu->EventDestroy(dev->events[i]);
  ps__free(dev->events);
  ps__free(dev->notes);
  dev->events = NULL;
  dev->notes = NULL;
  dev->n_events = 0;
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
    ps__free(dev->stream[i].ops);
    dev->stream[i].ops = NULL;
    dev->stream[i].n_ops = 0;
  }
}

static ps_status prepare(ps__device *dev, const ps_schedule *s) {
  PS_TRY(ps__cuda_prepare_ops(dev, s));
  PS_TRY(reserve(dev, s));
  return ps__cuda_trace_prepare(dev, s);
}

ps_status ps__cuda_prepare(ps__device *dev, const ps_schedule *s, uint64_t trace_steps) {
  for (size_t i = 0; i < s->list.n_ops; i++)
    PS_TRY(check_op(dev, s, i));
  bool submits = false;
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
    ps__counter_init(&dev->stream[i].host.counter);
    atomic_store(dev->stream[i].word, 0);
    atomic_store(&dev->stream[i].kept, 0);
    atomic_store(&dev->stream[i].n_submitted, 0);
    submits |= dev->stream[i].stream != NULL;
  }
  atomic_store(&dev->n_left, 0);
  atomic_store(&dev->n_begun, 0);
  atomic_store(&dev->submits, submits);
  dev->current = NULL;
  dev->schedule = s;
  dev->trace_steps = trace_steps;
  PS_TRY(ps__cuda_push(dev, &dev->gpu[0]));
  ps_status st = prepare(dev, s);
  ps__cuda_pop(dev);
  if (st != PS_OK)
    ps__cuda_finish(dev);
  return st;
}

void ps__cuda_finish(ps__device *dev) {
  if (dev->stuck || ps__cuda_push(dev, &dev->gpu[0]) != PS_OK)
    return; /* what is left of the run is never released */
  ps__cuda_trace_finish(dev);
  release(dev);
  ps__cuda_pop(dev);
}
