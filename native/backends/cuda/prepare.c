/* prepare.c - what a run needs between its first and last step, made before the first.
 *
 * EVENTS. Each op that another device stream awaits has two events, used by the parity of the step:
 * op X of step k records event (X, k mod 2). Waits for it are submitted in step k or k+1
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
#include <string.h>

static ps_status check_op(const ps__device *dev, const ps_schedule *s, size_t i) {
  const ps__op *op = &s->list.ops[i];
  bool on_host = ps__runs_on_host(&dev->cfg, op->stream);
  uint32_t n_host = 0;
  for (uint32_t a = 0; a < op->n_access; a++) {
    uint32_t space = s->list.access[op->access + a].space;
    n_host += ps__space_place(&dev->cfg, space)->kind == PS_PLACE_HOST;
  }
  if (!on_host && op->kernel && n_host && !dev->host_pointers)
    return ps__fail(
        PS_EINVAL, "run: op %zu (%s) touches host memory, which kernels of this GPU cannot address",
        i, ps__op_name(op));
  if (!on_host && !op->kernel && n_host == 2)
    return ps__fail(PS_EINVAL,
                    "run: op %zu (copy) on device stream %u copies host memory to host memory: "
                    "give it a host stream",
                    i, op->stream);
  return PS_OK;
}

/* Number the events and notes of the ops that need them. */
static void number(ps__device *dev, const ps_schedule *s, uint64_t *n_notes) {
  uint64_t host_streams = 0;
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    host_streams |= (uint64_t)ps__runs_on_host(&dev->cfg, i) << i;
  uint32_t n_events = 0, notes = 0;
  for (size_t i = 0; i < s->list.n_ops; i++) {
    const ps__op *op = &s->list.ops[i];
    ps__cuda_stream *st = &dev->stream[op->stream];
    if (!st->stream)
      continue;
    bool last = op->position + 1 == st->n_ops;
    st->ops[op->position] = (ps__cuda_op){.event = PS__NO_EVENT, .note = PS__NO_EVENT};
    if (op->waiters & ~host_streams) {
      st->ops[op->position].event = n_events;
      n_events += 2;
    }
    if ((op->waiters & host_streams) || last) {
      if (dev->notes)
        dev->notes[notes] =
            (ps__cuda_note){.word = st->word, .value = op->position + 1, .n_ops = st->n_ops};
      st->ops[op->position].note = notes++;
    }
  }
  dev->n_events = n_events;
  *n_notes = notes;
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
  for (uint64_t i = 0; i < dev->n_events; i++)
    PS__CUDA_TRY(dev->cu, EventCreate(&dev->events[i], CU_EVENT_DISABLE_TIMING));
  return PS_OK;
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
  CUcontext old;
  for (size_t i = 0; i < s->list.n_ops; i++)
    PS_TRY(check_op(dev, s, i));
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
    ps__counter_init(&dev->stream[i].host.counter);
    atomic_store(dev->stream[i].word, 0);
  }
  atomic_store(&dev->n_left, 0);
  dev->trace_steps = trace_steps;
  PS__CUDA_TRY(dev->cu, CtxPushCurrent(dev->ctx));
  ps_status st = prepare(dev, s);
  dev->cu->CtxPopCurrent(&old);
  if (st != PS_OK)
    ps__cuda_finish(dev);
  return st;
}

void ps__cuda_finish(ps__device *dev) {
  CUcontext old;
  dev->cu->CtxPushCurrent(dev->ctx);
  ps__cuda_trace_finish(dev);
  release(dev);
  dev->cu->CtxPopCurrent(&old);
}
