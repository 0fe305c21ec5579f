/* cuda.c - the CUDA backend: streams, waits, signals and failures (device.h says how). */
#include "backends/cuda/device.h"
#include "backends/cuda/probe.h"
#include "kernels/cuda/scratch.h"
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

static const uint64_t SPIN_NS = 20000, SLEEP_NS = 20000, HEALTH_NS = 16000000;
static const uint64_t GIVEN_UP = INT64_MAX; /* at least any value, by the sign of the difference */

static _Atomic bool without_mem_ops;
void ps__cuda_without_mem_ops(bool without) { atomic_store(&without_mem_ops, without); }

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
  CUcontext old;
  if (!dev)
    return;
  if (dev->ctx) {
    dev->cu->CtxPushCurrent(dev->ctx);
    for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
      close_stream(dev, &dev->stream[i]);
    if (dev->words)
      dev->cu->MemFreeHost(dev->words);
    dev->cu->CtxPopCurrent(&old);
    dev->cu->DevicePrimaryCtxRelease(dev->dev);
  }
  ps__unmap(dev, sizeof *dev);
}

static int attribute(const ps__device *dev, CUdevice_attribute what) {
  int value = 0;
  return dev->cu->DeviceGetAttribute(&value, what, dev->dev) == CUDA_SUCCESS ? value : 0;
}

/* Contexts, drivers and events here are those of one GPU. */
static ps_status find_gpu(ps__device *dev) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < dev->cfg.n_places; i++)
    if (dev->cfg.place[i].kind == PS_PLACE_DEVICE && n++ == 0)
      dev->gpu = dev->cfg.place[i].device;
  return n == 1 ? PS_OK
                : ps__fail(PS_EINVAL, "engine: %u places are GPUs: the cuda backend has one", n);
}

static ps_status open_context(ps__device *dev) {
  int n = 0;
  PS_TRY(ps__cuda_driver_open(&dev->cu));
  PS__CUDA_TRY(dev->cu, DeviceGetCount(&n));
  if (dev->gpu >= (uint32_t)n)
    return ps__fail(PS_EDEVICE,
                    "GPU %u is asked for, %d visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
                    dev->gpu, n);
  PS__CUDA_TRY(dev->cu, DeviceGet(&dev->dev, (int)dev->gpu));
  PS_TRY(ps__cuda_supported(dev->cu, dev->dev, dev->gpu));
  if (!attribute(dev, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING))
    return ps__fail(PS_EDEVICE,
                    "GPU %u has no unified addresses with the host, which the cuda backend needs",
                    dev->gpu);
  dev->mem_ops = attribute(dev, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) &&
                 !atomic_load(&without_mem_ops);
  dev->host_pointers = attribute(dev, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
  dev->numa_node = ps__cuda_numa_node(dev->cu, dev->dev);
  if (!dev->mem_ops)
    ps__log(PS_LOG_WARN,
            "GPU %u has no 64-bit stream memory operations: waits between host and GPU cost more",
            dev->gpu);
  CUcontext ctx;
  uint64_t others;
  if (!ps__cuda_usage_begin(dev->cu, dev->gpu, &others))
    ps__log(PS_LOG_WARN,
            "NVML (libnvidia-ml.so.1) does not show GPU %u: its clock, power and temperature are "
            "unknown, and memory of other processes on it counts as this one's",
            dev->gpu);
  CUresult r = dev->cu->DevicePrimaryCtxRetain(&ctx, dev->dev);
  if (r == CUDA_ERROR_OUT_OF_MEMORY)
    return ps__fail(PS_ENOMEM, "GPU %u has no memory left for a context: end what else uses it",
                    dev->gpu);
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(dev->cu, r, "cuDevicePrimaryCtxRetain");
  dev->ctx = ctx;
  return PS_OK;
}

static ps_status device_memory(ps__device *dev, CUdeviceptr *out, size_t bytes, uint32_t idx) {
  char text[32];
  if (ps__fault_hit(PS_FAULT_ALLOC) || dev->cu->MemAlloc(out, bytes) != CUDA_SUCCESS) {
    *out = 0;
    return ps__fail(PS_ENOMEM,
                    "stream %u (%s): %s of GPU memory for scratch refused: lower --device-mem, or "
                    "end what else uses this "
                    "GPU",
                    idx, dev->cfg.stream[idx].name, ps__format_bytes(text, bytes));
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
      10u * (uint32_t)attribute(dev, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
  s->exec = (ps__cuda_exec){.scratch_bytes =
                                ((size_t)cfg->scratch_bytes * cfg->n_threads + 255) / 256 * 256,
                            .device = (int)dev->gpu,
                            .n_sms = attribute(dev, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
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
  CUdeviceptr words;
  PS__CUDA_TRY(dev->cu, MemHostAlloc(&dev->words, PS_MAX_STREAMS * WORD_BYTES,
                                     CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
  PS__CUDA_TRY(dev->cu, MemHostGetDevicePointer(&words, dev->words, 0));
  memset(dev->words, 0, PS_MAX_STREAMS * WORD_BYTES);
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
    ps__cuda_stream *s = &dev->stream[i];
    s->word = (_Atomic uint64_t *)(void *)((char *)dev->words + i * WORD_BYTES);
    s->word_dev = words + i * WORD_BYTES;
    if (ps__runs_on_host(&dev->cfg, i))
      PS_TRY(ps__host_stream_open(&s->host, &dev->cfg.stream[i], i));
    else
      PS_TRY(open_device_stream(dev, i));
  }
  return PS_OK;
}

static ps_status cuda_open(ps__device **out, const ps_engine_config *cfg) {
  void *memory;
  CUcontext old;
  PS_TRY(ps__map(&memory, sizeof(ps__device), "CUDA device"));
  ps__device *dev = memory;
  dev->cfg = *cfg;
  ps_status st = find_gpu(dev);
  if (st == PS_OK)
    st = open_context(dev);
  if (st == PS_OK) {
    dev->cu->CtxPushCurrent(dev->ctx);
    st = open_streams(dev);
    dev->cu->CtxPopCurrent(&old);
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
  dev->cu->CtxSetCurrent(dev->ctx); /* a failure shows at the thread's first call */
  prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);
}

/* The last host stream to give up releases every device stream that waits for a host stream; every
 * device stream then comes to its end. No earlier host stream may do so, for two reasons. An order
 * between two device ops may hold only by way of a host op (schedule.c drops implied waits). And
 * the copies to the host of the steps before must be complete before the given-up step reads that
 * memory and copies it again. No host stream waits for the given-up step. */
static void cuda_leave(ps__device *dev, uint32_t driver) {
  uint32_t n_host = 0;
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    n_host += !dev->stream[i].stream;
  if (!dev->stream[driver].stream) {
    if (atomic_fetch_add(&dev->n_left, 1) + 1 < n_host)
      return;
    for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
      if (!dev->stream[i].stream)
        atomic_store_explicit(dev->stream[i].word, GIVEN_UP, memory_order_release);
    return;
  }
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    if (dev->stream[i].stream) {
      CUresult r = dev->cu->StreamSynchronize(dev->stream[i].stream);
      if (r != CUDA_SUCCESS)
        ps__cuda_note_error(dev, r, "cuStreamSynchronize");
    }
}

static uint64_t cuda_counter(ps__device *dev, uint32_t stream) {
  ps__cuda_stream *s = &dev->stream[stream];
  return s->stream ? atomic_load_explicit(s->word, memory_order_acquire)
                   : atomic_load(&s->host.counter.value);
}

static void cuda_wake(ps__device *dev) { /* a thread that polls words reads its flag too */
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    ps__counter_wake(&dev->stream[i].host.counter);
}

/* ---- failures -------------------------------------------------------------------------------- */

void ps__cuda_note_error(ps__device *dev, CUresult r, const char *call) {
  int none = CUDA_SUCCESS;
  const char *nobody = NULL;
  atomic_compare_exchange_strong(&dev->failed_call, &nobody, call);
  atomic_compare_exchange_strong(&dev->error, &none, (int)r);
}

/* A failed kernel or copy makes every later call fail, a query too. */
static ps_status cuda_health(ps__device *dev) {
  CUcontext old;
  if (atomic_load(&dev->error) == CUDA_SUCCESS &&
      dev->cu->CtxPushCurrent(dev->ctx) == CUDA_SUCCESS) {
    for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
      CUresult r =
          dev->stream[i].stream ? dev->cu->StreamQuery(dev->stream[i].stream) : CUDA_SUCCESS;
      if (r != CUDA_SUCCESS && r != CUDA_ERROR_NOT_READY) {
        ps__cuda_note_error(dev, r, "a kernel or a copy before cuStreamQuery");
        break;
      }
    }
    dev->cu->CtxPopCurrent(&old);
  }
  int error = atomic_load(&dev->error);
  if (error == CUDA_SUCCESS)
    return PS_OK;
  (void)ps__cuda_fail(dev->cu, (CUresult)error, atomic_load(&dev->failed_call));
  return ps__fail(PS_EDEVICE, "the GPU failed, start anew in another process: %s", ps_last_error());
}

static void monitor_main(void *arg) {
  ps__device *dev = arg;
  while (!atomic_load(&dev->run_over) && cuda_health(dev) == PS_OK)
    nanosleep(&(struct timespec){.tv_nsec = (long)HEALTH_NS}, NULL);
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
    if (atomic_load_explicit(s->word, memory_order_acquire) >= value)
      return true;
    if (abort_flag && atomic_load(abort_flag) != 0)
      return false;
    if (atomic_load(&dev->error) != CUDA_SUCCESS)
      return atomic_load_explicit(s->word, memory_order_acquire) >= value;
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

static bool submitted(ps__device *dev, CUresult r, const char *call) {
  if (r != CUDA_SUCCESS)
    ps__cuda_note_error(dev, r, call);
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
  CUstream waiter = stream == PS__CALLER ? NULL : dev->stream[stream].stream;
  if (!waiter)
    return a->stream ? watch(dev, a, value, abort_flag)
                     : ps__counter_wait(&a->host.counter, value, abort_flag);
  if (a->stream)
    return submitted(
        dev, dev->cu->StreamWaitEvent(waiter, event_at(dev, a, value), CU_EVENT_WAIT_DEFAULT),
        "cuStreamWaitEvent");
  if (!dev->mem_ops)
    return ps__counter_wait(&a->host.counter, value, abort_flag);
  if (atomic_load_explicit(a->word, memory_order_acquire) >= value)
    return true;
  return submitted(dev,
                   dev->cu->StreamWaitValue64(waiter, a->word_dev, value, CU_STREAM_WAIT_VALUE_GEQ),
                   "cuStreamWaitValue64");
}

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
    submitted(dev, dev->cu->EventRecord(event, s->stream), "cuEventRecord");
  if (op->note == PS__NO_EVENT)
    return;
  if (dev->mem_ops)
    submitted(
        dev,
        dev->cu->StreamWriteValue64(s->stream, s->word_dev, value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue64");
  else
    submitted(dev, dev->cu->LaunchHostFunc(s->stream, write_note, &dev->notes[op->note]),
              "cuLaunchHostFunc");
}

static ps_status cuda_memory(ps__device *dev, uint64_t *out_bytes) {
  CUcontext old;
  PS__CUDA_TRY(dev->cu, CtxPushCurrent(dev->ctx));
  const ps_status st = ps__cuda_memory_used(dev->gpu, out_bytes);
  dev->cu->CtxPopCurrent(&old);
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
    .prepare = cuda_prepare,
    .finish = cuda_finish,
    .warm = ps__cuda_warm,
    .memory = cuda_memory,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .signal = cuda_signal,
    .wait = cuda_wait,
    .counter = cuda_counter,
    .stamp = ps__cuda_stamp,
    .settle = ps__cuda_settle,
    .health = cuda_health,
    .profile = ps__cuda_profile,
    .profiled = ps__cuda_profiled,
    .range_push = ps__cuda_range_push,
    .range_pop = ps__cuda_range_pop,
    .wake = cuda_wake,
};
