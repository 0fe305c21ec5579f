/* cuda.c - the CUDA backend: streams, waits, signals and failures (device.h says how). */
#include "backends/cuda/device.h"
#include "backends/cuda/probe.h"
#include "backends/list.h"
#include "kernels/cuda/scratch.h"
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

static const uint64_t SPIN_NS = 20000, SLEEP_NS = 20000, HEALTH_NS = 16000000;

/* ---- open and close -------------------------------------------------------------------------- */

static void close_stream(ps__device *dev, ps__cuda_stream *s) {
  ps__host_stream_close(&s->host);
  ps__cuda_blas_destroy(s->exec.blas);
  if (s->scratch) {
    dev->cu->MemFree(s->scratch);
    ps__live_add(-1);
  }
  if (s->stream)
    dev->cu->StreamDestroy(s->stream);
}

static void cuda_close(ps__device *dev) {
  if (!dev)
    return;
  if (dev->stuck) { /* the driver would wait for the stream; the process has to end */
    ps__log(PS_LOG_WARN, "a GPU did not come to its end after a failure: GPU memory and pinned "
                         "memory stay taken until the process ends");
    for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
      ps__host_stream_close(&dev->stream[i].host);
    return;
  }
  if (dev->n_gpus && dev->gpu[0].ctx) {
    dev->cu->CtxPushCurrent(dev->gpu[0].ctx);
    for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
      if (dev->stream[i].gpu)
        ps__cuda_turn_to(dev, dev->stream[i].gpu);
      close_stream(dev, &dev->stream[i]);
    }
    if (dev->words)
      dev->cu->MemFreeHost(dev->words);
    ps__cuda_pop(dev);
  }
  ps__cuda_gpus_close(dev);
  ps__unmap(dev, sizeof *dev);
}

static ps_status device_memory(ps__device *dev, CUdeviceptr *out, size_t bytes, uint32_t idx) {
  char text[32];
  if (ps__fault_hit(PS_FAULT_ALLOC) || dev->cu->MemAlloc(out, bytes) != CUDA_SUCCESS) {
    *out = 0;
    return ps__fail(PS_ENOMEM,
                    "stream %u (%s): %s of GPU memory for scratch refused: lower %s, or "
                    "end what else uses this "
                    "GPU",
                    idx, dev->cfg.stream[idx].name, ps__format_bytes(text, bytes),
                    ps__field("device_mem_bytes"));
  }
  ps__live_add(1);
  return PS_OK;
}

/* Scratch, followed on compute streams by the products' workspace. */
static ps_status open_device_stream(ps__device *dev, uint32_t idx) {
  ps__cuda_stream *s = &dev->stream[idx];
  const ps_stream_config *cfg = &dev->cfg.stream[idx];
  bool compute = !ps__has_links(&dev->cfg, idx);
  size_t blas_bytes = ps__cuda_workspace_bytes(
      10u *
      (uint32_t)ps__cuda_attribute(dev, s->gpu, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
  s->exec = (ps__cuda_exec){
      .scratch_bytes = ((size_t)cfg->scratch_bytes * cfg->n_threads + 255) / 256 * 256,
      .device = (int)s->gpu->number,
      .n_sms = ps__cuda_attribute(dev, s->gpu, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
      .deterministic = dev->cfg.deterministic != 0};
  PS__CUDA_TRY(dev->cu, StreamCreate(&s->stream, CU_STREAM_NON_BLOCKING));
  s->exec.stream = s->stream;
  ps__cuda_name_stream(s->stream, cfg->name);
  size_t bytes = s->exec.scratch_bytes + (compute ? blas_bytes : 0);
  if (!bytes)
    return PS_OK;
  PS_TRY(device_memory(dev, &s->scratch, bytes, idx));
  s->exec.scratch = (void *)(uintptr_t)s->scratch;
  return compute ? ps__cuda_blas_create(&s->exec.blas,
                                        (char *)s->exec.scratch + s->exec.scratch_bytes, blas_bytes)
                 : PS_OK;
}

static ps_status open_streams(ps__device *dev) {
  enum { WORD_BYTES = 64 };
  PS__CUDA_TRY(dev->cu, MemHostAlloc(&dev->words, PS_MAX_STREAMS * WORD_BYTES,
                                     CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
  memset(dev->words, 0, PS_MAX_STREAMS * WORD_BYTES);
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
    ps__cuda_stream *s = &dev->stream[i];
    s->word = (_Atomic uint64_t *)(void *)((char *)dev->words + i * WORD_BYTES);
    /* with unified addresses, which were checked, it is the same for all GPUs */
    PS__CUDA_TRY(dev->cu, MemHostGetDevicePointer(&s->word_dev, (void *)s->word, 0));
    if (ps__runs_on_host(&dev->cfg, i)) {
      PS_TRY(ps__host_stream_open(&s->host, &dev->cfg.stream[i], i));
      continue;
    }
    s->gpu = ps__cuda_gpu_at(dev, dev->cfg.stream[i].place);
    ps__cuda_turn_to(dev, s->gpu);
    PS_TRY(open_device_stream(dev, i));
  }
  return PS_OK;
}

static ps_status cuda_open(ps__device **out, const ps_engine_config *cfg) {
  void *memory;
  PS_TRY(ps__map(&memory, sizeof(ps__device), "CUDA device"));
  ps__device *dev = memory;
  dev->cfg = *cfg;
  ps_status st = ps__cuda_gpus_open(dev);
  if (st == PS_OK && (st = ps__cuda_push(dev, &dev->gpu[0])) == PS_OK) {
    st = open_streams(dev);
    ps__cuda_pop(dev);
  }
  if (st == PS_OK)
    *out = dev;
  else
    cuda_close(dev);
  return st;
}

/* ---- what the engine asks -------------------------------------------------------------------- */

/* All device streams share one driver, numbered as the first of them. */
static uint32_t cuda_driver(const ps_engine_config *cfg, uint32_t stream) {
  uint32_t first = 0;
  if (ps__runs_on_host(cfg, stream))
    return stream;
  while (ps__runs_on_host(cfg, first))
    first++;
  return first;
}

static void *cuda_exec(ps__device *dev, uint32_t stream) {
  ps__cuda_stream *s = &dev->stream[stream];
  return s->stream ? (void *)&s->exec : (void *)&s->host.exec;
}

static void cuda_enter(ps__device *dev) {
  ps__cuda_turn_to(dev, &dev->gpu[0]); /* a failure shows at the thread's first call */
  prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);
}

static void cuda_begin(ps__device *dev, uint32_t stream, uint64_t number) {
  const ps__cuda_gpu *gpu = dev->stream[stream].gpu;
  if (!gpu)
    return;
  atomic_store_explicit(&dev->n_begun, number + 1, memory_order_release);
  if (gpu != dev->current) {
    ps__cuda_turn_to(dev, gpu);
    dev->current = gpu;
  }
}

static uint64_t cuda_counter(ps__device *dev, uint32_t stream) {
  ps__cuda_stream *s = &dev->stream[stream];
  return s->stream ? ps__cuda_reached(s) : atomic_load(&s->host.counter.value);
}

static void cuda_wake(ps__device *dev) { /* a thread that polls words reads its flag too */
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    ps__counter_wake(&dev->stream[i].host.counter);
}

/* ---- failures -------------------------------------------------------------------------------- */

static uint32_t cuda_failed(ps__device *dev) {
  const ps__cuda_gpu *gpu = atomic_load(&dev->failed_gpu);
  return gpu ? gpu->place : dev->gpu[0].place;
}

static ps_status cuda_health(ps__device *dev) {
  if (atomic_load(&dev->error) == CUDA_SUCCESS && ps__cuda_push(dev, &dev->gpu[0]) == PS_OK) {
    for (uint32_t i = 0; i < dev->n_gpus; i++) {
      ps__cuda_turn_to(dev, &dev->gpu[i]);
      const CUresult r = ps__cuda_ask(dev, &dev->gpu[i]);
      if (r != CUDA_SUCCESS) {
        ps__cuda_note_error(dev, &dev->gpu[i], r, "a kernel or a copy before cuStreamQuery");
        break;
      }
    }
    ps__cuda_pop(dev);
  }
  int error = atomic_load(&dev->error);
  if (error == CUDA_SUCCESS)
    return PS_OK;
  char which[24] = "the GPU";
  if (dev->n_gpus > 1)
    snprintf(which, sizeof which, "GPU %u", ps__cuda_gpu_at(dev, cuda_failed(dev))->number);
  (void)ps__cuda_fail(dev->cu, (CUresult)error, atomic_load(&dev->failed_call));
  return ps__fail(PS_EDEVICE, "%s failed, start anew in another process: %s", which,
                  ps_last_error());
}

static void monitor_main(void *arg) {
  ps__device *dev = arg;
  for (; !atomic_load(&dev->run_over);
       nanosleep(&(struct timespec){.tv_nsec = (long)HEALTH_NS}, NULL))
    if (cuda_health(dev) != PS_OK)
      ps__cuda_let_others_go(dev);
}

static void cuda_finish(ps__device *dev) {
  atomic_store(&dev->run_over, true);
  ps__thread_join(dev->monitor);
  dev->monitor = NULL;
  ps__cuda_finish(dev);
}

static ps_status cuda_prepare(ps__device *dev, const ps_schedule *schedule, uint64_t trace_steps) {
  PS_TRY(cuda_health(dev));
  PS_TRY(ps__cuda_prepare(dev, schedule, trace_steps));
  atomic_store(&dev->run_over, false);
  const ps_status st = ps__thread_start(&dev->monitor, monitor_main, dev, "gpu-health");
  if (st != PS_OK)
    ps__cuda_finish(dev);
  return st;
}

/* ---- waits and signals ----------------------------------------------------------------------- */

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/* Wait for a word that the device writes. No call of the driver in here (device.h). */
static bool watch(ps__device *dev, const ps__cuda_stream *s, uint64_t value,
                  const _Atomic uint32_t *abort_flag) {
  uint64_t begin = 0;
  for (;;) {
    if (ps__cuda_reached(s) >= value)
      return true;
    if (abort_flag && atomic_load(abort_flag) != 0)
      return false;
    if (atomic_load(&dev->error) != CUDA_SUCCESS)
      return ps__cuda_reached(s) >= value;
    uint64_t now = ps__now_ns();
    if (!begin)
      begin = now;
    if (now - begin < SPIN_NS && ps__cores_idle()) {
      for (int i = 0; i < 16; i++)
        relax();
    } else {
      nanosleep(&(struct timespec){.tv_nsec = (long)SLEEP_NS}, NULL);
    }
  }
}

static bool submitted(ps__device *dev, const ps__cuda_stream *s, CUresult r, const char *call) {
  if (r != CUDA_SUCCESS)
    ps__cuda_note_error(dev, s->gpu, r, call);
  return r == CUDA_SUCCESS;
}

/* The event of the op that brings @s to @value; NULL when it has none. */
static CUevent event_at(const ps__device *dev, const ps__cuda_stream *s, uint64_t value) {
  uint64_t step = (value - 1) / s->n_ops, position = (value - 1) % s->n_ops;
  uint32_t event = s->ops[position].event;
  return event == PS__NO_EVENT ? NULL : dev->events[event + (step & 1)];
}

static bool cuda_wait(ps__device *dev, uint32_t stream, uint32_t awaited, uint64_t value,
                      const _Atomic uint32_t *abort_flag) {
  ps__cuda_stream *a = &dev->stream[awaited];
  const ps__cuda_stream *waiter = stream == PS__CALLER ? NULL : &dev->stream[stream];
  if (!waiter || !waiter->stream)
    return a->stream ? watch(dev, a, value, abort_flag)
                     : ps__counter_wait(&a->host.counter, value, abort_flag);
  if (a->stream && (a->gpu == waiter->gpu || !dev->mem_ops))
    return submitted(
        dev, waiter,
        dev->cu->StreamWaitEvent(waiter->stream, event_at(dev, a, value), CU_EVENT_WAIT_DEFAULT),
        "cuStreamWaitEvent");
  if (!dev->mem_ops)
    return ps__counter_wait(&a->host.counter, value, abort_flag);
  if (!a->stream && atomic_load_explicit(a->word, memory_order_acquire) >= value)
    return true;
  if (!a->stream && (dev->net || atomic_load(&dev->awaited)))
    return ps__counter_wait(&a->host.counter, value, abort_flag);
  return submitted(
      dev, waiter,
      dev->cu->StreamWaitValue64(waiter->stream, a->word_dev, value, CU_STREAM_WAIT_VALUE_GEQ),
      "cuStreamWaitValue64");
}

static void cuda_awaited(ps__device *dev, bool on) { atomic_store(&dev->awaited, on); }

static void CUDA_CB write_note(void *arg) {
  ps__cuda_note *n = arg;
  atomic_store_explicit(n->word, n->value, memory_order_release);
  n->value += n->n_ops;
}

static void cuda_signal(ps__device *dev, uint32_t stream, uint64_t value) {
  ps__cuda_stream *s = &dev->stream[stream];
  if (!s->stream) {
    /* before the counter: a thread that the counter wakes may give the word up */
    atomic_store_explicit(s->word, value, memory_order_release);
    ps__counter_signal(&s->host.counter, value);
    return;
  }
  const ps__cuda_op *op = &s->ops[(value - 1) % s->n_ops];
  CUevent event = event_at(dev, s, value);
  if (event)
    submitted(dev, s, dev->cu->EventRecord(event, s->stream), "cuEventRecord");
  /* an op that has no note is awaited by nobody who asks how many were submitted */
  if (op->note == PS__NO_EVENT)
    return;
  if (dev->mem_ops)
    submitted(
        dev, s,
        dev->cu->StreamWriteValue64(s->stream, s->word_dev, value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue64");
  else
    submitted(dev, s, dev->cu->LaunchHostFunc(s->stream, write_note, &dev->notes[op->note]),
              "cuLaunchHostFunc");
  atomic_store_explicit(&s->n_submitted, value, memory_order_release);
}

static ps_status cuda_memory(ps__device *dev, uint32_t place, uint64_t *out_bytes) {
  const ps__cuda_gpu *gpu = ps__cuda_gpu_at(dev, place);
  PS_TRY(ps__cuda_push(dev, gpu));
  const ps_status st = ps__cuda_memory_used(gpu->number, out_bytes);
  ps__cuda_pop(dev);
  return st;
}

const ps__backend ps__backend_cuda = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .map = ps__cuda_map,
    .unmap = ps__cuda_unmap,
    .peak = ps__cuda_peak,
    .driver = cuda_driver,
    .exec = cuda_exec,
    .copy = ps__cuda_copy,
    .transfer = ps__cuda_transfer,
    .awaited = cuda_awaited,
    .prepare = cuda_prepare,
    .finish = cuda_finish,
    .warm = ps__cuda_warm,
    .memory = cuda_memory,
    .net = ps__cuda_net,
    .use_net = ps__cuda_use_net,
    .enter = cuda_enter,
    .leave = ps__cuda_leave,
    .begin = cuda_begin,
    .signal = cuda_signal,
    .wait = cuda_wait,
    .counter = cuda_counter,
    .stamp = ps__cuda_stamp,
    .settle = ps__cuda_settle,
    .marks = ps__cuda_marks,
    .health = cuda_health,
    .failed = cuda_failed,
    .profile = ps__cuda_profile,
    .profiled = ps__cuda_profiled,
    .range_push = ps__cuda_range_push,
    .range_pop = ps__cuda_range_pop,
    .wake = cuda_wake,
};
