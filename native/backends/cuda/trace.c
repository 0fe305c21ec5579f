/* trace.c - when device ops ran, without a synchronize: two timing events an op, read when the run
 * is at rest.
 *
 * A field holds PENDING until settle() replaces it. GPU times become host times by two base events,
 * one recorded when the run is made, one in settle(). A base event is recorded on an idle stream
 * between two readings of the host's clock; the best of several pairs is a few us apart.
 * cuEventElapsedTime() gives milliseconds as float with 24 bits. So times are taken from the
 * earliest event of the trace, where they are short, and the distance of the earliest event to the
 * second base places all of them. A run of 1 s or more also gives the ratio of the two clocks. Each
 * GPU has a clock, and base events, of its own.
 * While ops run, the second base event is recorded on a stream of its own.
 * queued is the time when the stream was free for the op and the op was submitted. */
#include "backends/cuda/device.h"

static const uint64_t PENDING = UINT64_MAX;

/* @gpu: NULL: of any GPU. */
static CUstream any_stream(const ps__device *dev, const ps__cuda_gpu *gpu) {
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    if (dev->stream[i].stream && (!gpu || dev->stream[i].gpu == gpu))
      return dev->stream[i].stream;
  return NULL;
}

/* Record @event on an idle stream; *at_ns is then the host's time of the event. */
static ps_status set_base(const ps__device *dev, CUstream stream, CUevent event, uint64_t *at_ns) {
  const ps__cuda_driver *cu = dev->cu;
  uint64_t best = UINT64_MAX, before, after;
  /* the last pair may be a poor one: go on until a pair is near the best */
  for (int i = 0; i < 8; i++) {
    before = ps__now_ns();
    PS__CUDA_TRY(cu, EventRecord(event, stream));
    PS__CUDA_TRY(cu, EventSynchronize(event));
    after = ps__now_ns();
    *at_ns = before + (after - before) / 2;
    if (i >= 3 && after - before <= best + best / 4)
      break;
    best = after - before < best ? after - before : best;
  }
  return PS_OK;
}

ps_status ps__cuda_trace_prepare(ps__device *dev, const ps_schedule *s) {
  dev->n_ops = s->list.n_ops;
  if (!dev->trace_steps || !any_stream(dev, NULL) || !dev->n_ops)
    return PS_OK;
  dev->n_timing =
      dev->trace_steps <= SIZE_MAX / 32 / dev->n_ops ? 2 * dev->trace_steps * dev->n_ops : 0;
  dev->timing = dev->n_timing ? ps__calloc(dev->n_timing, sizeof *dev->timing) : NULL;
  if (!dev->timing)
    return ps__fail(PS_ENOMEM, "run: out of memory for a trace of %llu steps",
                    (unsigned long long)dev->trace_steps);
  for (uint64_t i = 0; i < dev->n_timing; i++) {
    const ps__cuda_stream *at = &dev->stream[s->list.ops[i / 2 % dev->n_ops].stream];
    if (!at->stream)
      continue;
    ps__cuda_turn_to(dev, at->gpu);
    PS__CUDA_TRY(dev->cu, EventCreate(&dev->timing[i], CU_EVENT_DEFAULT));
  }
  for (uint32_t i = 0; i < dev->n_gpus; i++) {
    ps__cuda_gpu *gpu = &dev->gpu[i];
    const CUstream stream = any_stream(dev, gpu);
    if (!stream)
      continue;
    ps__cuda_turn_to(dev, gpu);
    PS__CUDA_TRY(dev->cu, StreamCreate(&gpu->side, CU_STREAM_NON_BLOCKING));
    PS__CUDA_TRY(dev->cu, EventCreate(&gpu->now, CU_EVENT_DEFAULT));
    PS__CUDA_TRY(dev->cu, EventCreate(&gpu->base, CU_EVENT_DEFAULT));
    PS_TRY(set_base(dev, stream, gpu->base, &gpu->base_ns));
  }
  return PS_OK;
}

void ps__cuda_trace_finish(ps__device *dev) {
  for (uint64_t i = 0; i < dev->n_timing && dev->timing; i++)
    if (dev->timing[i])
      dev->cu->EventDestroy(dev->timing[i]);
  for (uint32_t i = 0; i < dev->n_gpus; i++) {
    ps__cuda_gpu *gpu = &dev->gpu[i];
    if (gpu->base)
      dev->cu->EventDestroy(gpu->base);
    if (gpu->now)
      dev->cu->EventDestroy(gpu->now);
    if (gpu->side)
      dev->cu->StreamDestroy(gpu->side);
    gpu->base = gpu->now = NULL;
    gpu->side = NULL;
  }
  ps__free(dev->timing);
  dev->timing = NULL;
  dev->n_timing = 0;
}

void ps__cuda_stamp(ps__device *dev, uint32_t stream, int what, ps_trace_event *ev) {
  ps__cuda_stream *s = &dev->stream[stream];
  if (!s->stream || what == PS__STAMP_QUEUED) {
    ps__host_stamp(what, ev); /* on a device stream: when it was submitted */
    return;
  }
  uint64_t at = ev->step % dev->trace_steps * dev->n_ops + ev->op;
  CUresult r = dev->cu->EventRecord(dev->timing[2 * at + (what == PS__STAMP_END)], s->stream);
  if (r != CUDA_SUCCESS)
    ps__cuda_note_error(dev, s->gpu, r, "cuEventRecord");
  else if (what == PS__STAMP_END)
    ev->end_ns = PENDING;
}

/* ms from one event to another; false when the device failed before it recorded one of them. */
static bool elapsed(const ps__device *dev, CUevent from, CUevent to, double *ms) {
  float f;
  if (dev->cu->EventElapsedTime(&f, from, to) != CUDA_SUCCESS)
    return false;
  *ms = (double)f;
  return true;
}

/* How a GPU's times become the host's. */
typedef struct clock_of_gpu {
  CUevent now, first; /* first: NULL where the GPU has no pending event, or failed */
  uint64_t now_ns, first_ns;
  double scale;
} clock_of_gpu;

/* The start and the end of an op that @e is of. */
static const CUevent *timing_of(const ps__device *dev, const ps_trace_event *e) {
  return &dev->timing[2 * (e->step % dev->trace_steps * dev->n_ops + e->op)];
}

static bool pending_on(const ps__device *dev, const ps_trace_event *e, const ps__cuda_gpu *gpu) {
  return e->end_ns == PENDING && dev->stream[e->stream].gpu == gpu;
}

/* The earliest start of a pending event of the GPU, and its host time by @c->now. */
static void place(const ps__device *dev, const ps__cuda_gpu *gpu, const ps_trace_event *events,
                  uint64_t n, clock_of_gpu *c) {
  double most = -1, ms, run_ms;
  for (uint64_t i = 0; i < n; i++)
    if (pending_on(dev, &events[i], gpu) &&
        elapsed(dev, timing_of(dev, &events[i])[0], c->now, &ms) && ms > most) {
      most = ms;
      c->first = timing_of(dev, &events[i])[0];
    }
  c->scale = 1;
  if (elapsed(dev, gpu->base, c->now, &run_ms) && run_ms >= 1000)
    c->scale = (double)(c->now_ns - gpu->base_ns) / (run_ms * 1e6);
  c->first_ns = c->first ? c->now_ns - (uint64_t)(most * 1e6 * c->scale) : c->now_ns;
}

/* @last_end: of the op before on the event's stream; gets that of this one. */
static void settle_event(const ps__device *dev, ps_trace_event *e, const clock_of_gpu *clocks,
                         uint64_t *last_end) {
  if (e->end_ns == PENDING) {
    const clock_of_gpu *c = &clocks[dev->stream[e->stream].gpu - dev->gpu];
    double from, to;
    const bool known = c->first && elapsed(dev, c->first, timing_of(dev, e)[0], &from) &&
                       elapsed(dev, c->first, timing_of(dev, e)[1], &to);
    e->start_ns = known ? c->first_ns + (uint64_t)(from * 1e6 * c->scale) : 0;
    e->end_ns = known ? c->first_ns + (uint64_t)(to * 1e6 * c->scale) : 0; /* 0: never ran */
    if (!known)
      return;
    e->end_ns = e->end_ns < e->start_ns ? e->start_ns : e->end_ns;
    e->queued_ns = e->queued_ns < *last_end ? *last_end : e->queued_ns;
    e->queued_ns = e->queued_ns > e->start_ns ? e->start_ns : e->queued_ns;
  }
  if (e->end_ns)
    *last_end = e->end_ns;
}

static void settle(const ps__device *dev, ps_trace_event *events, const clock_of_gpu *clocks) {
  uint64_t last_end[PS_MAX_STREAMS] = {0}, oldest = UINT64_MAX;
  for (uint64_t i = 0; i < dev->n_timing / 2; i++)
    if (events[i].end_ns && events[i].step < oldest)
      oldest = events[i].step;
  for (uint64_t k = 0; oldest != UINT64_MAX && k < dev->trace_steps; k++)
    for (uint64_t op = 0; op < dev->n_ops; op++) {
      ps_trace_event *e = &events[(oldest + k) % dev->trace_steps * dev->n_ops + op];
      settle_event(dev, e, clocks, &last_end[e->stream]);
    }
}

void ps__cuda_settle(ps__device *dev, ps_trace_event *events) {
  clock_of_gpu clocks[PS_MAX_DEVICES] = {{.now = NULL}};
  if (!dev->n_timing)
    return;
  const bool pushed = ps__cuda_push(dev, &dev->gpu[0]) == PS_OK;
  for (uint32_t i = 0; i < dev->n_gpus && pushed && !dev->stuck; i++) {
    const ps__cuda_gpu *gpu = &dev->gpu[i];
    clock_of_gpu *c = &clocks[i];
    const CUstream stream = any_stream(dev, gpu);
    ps__cuda_turn_to(dev, gpu);
    /* a failed device tells no times */
    if (stream && dev->cu->EventCreate(&c->now, CU_EVENT_DEFAULT) == CUDA_SUCCESS &&
        set_base(dev, stream, c->now, &c->now_ns) == PS_OK)
      place(dev, gpu, events, dev->n_timing / 2, c);
  }
  settle(dev, events, clocks);
  for (uint32_t i = 0; i < dev->n_gpus; i++)
    if (clocks[i].now)
      dev->cu->EventDestroy(clocks[i].now);
  if (pushed)
    ps__cuda_pop(dev);
}

static ps_status marks(ps__device *dev, ps_trace_event *events) {
  clock_of_gpu clocks[PS_MAX_DEVICES] = {{.now = NULL}};
  uint64_t last_end[PS_MAX_STREAMS] = {0};
  for (uint32_t i = 0; i < dev->n_gpus; i++) {
    const ps__cuda_gpu *gpu = &dev->gpu[i];
    if (!gpu->side)
      continue;
    PS__CUDA_TRY(dev->cu, CtxSetCurrent(gpu->ctx));
    clocks[i].now = gpu->now;
    PS_TRY(set_base(dev, gpu->side, gpu->now, &clocks[i].now_ns));
    place(dev, gpu, events, dev->n_ops, &clocks[i]);
  }
  for (uint64_t op = 0; op < dev->n_ops; op++)
    settle_event(dev, &events[op], clocks, &last_end[events[op].stream]);
  return PS_OK;
}

ps_status ps__cuda_marks(ps__device *dev, ps_trace_event *events) {
  if (!dev->n_timing)
    return PS_OK;
  PS_TRY(ps__cuda_push(dev, &dev->gpu[0]));
  const ps_status st = marks(dev, events);
  ps__cuda_pop(dev);
  return st;
}
