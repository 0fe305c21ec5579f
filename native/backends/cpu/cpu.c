/* cpu.c - the CPU backend: every stream is a thread with a pool of its own, device memory is a
 * separate arena, copies are real copies. It is complete, and the reference for every other
 * backend. */
#include "engine/pin.h"
#include "backends/host/stream.h"
#include "backends/list.h"
#include "engine/schedule.h"
#include "kernels/cpu/cpu.h"
#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct ps__device {
  uint32_t n_streams;
  const ps_engine_config *cfg; /* the engine's */
  uint32_t blas_threads;       /* held: of the streams that multiply */
  ps__host_stream stream[PS_MAX_STREAMS];
};

static void cpu_close(ps__device *dev) {
  if (!dev)
    return;
  for (uint32_t i = 0; i < dev->n_streams; i++)
    ps__host_stream_close(&dev->stream[i]);
  ps__cpu_blas_release(dev->blas_threads);
  ps__unmap(dev, sizeof *dev);
}

static ps_status cpu_open(ps__device **out, const ps_engine_config *cfg) {
  void *memory;
  PS_TRY(ps__map(&memory, sizeof(ps__device), "CPU device"));
  ps__device *dev = memory;
  dev->cfg = cfg;
  for (uint32_t i = 0; i < cfg->n_streams; i++) {
    dev->n_streams = i + 1;
    ps_status st = ps__host_stream_open(&dev->stream[i], &cfg->stream[i], i);
    if (st != PS_OK) {
      cpu_close(dev);
      return st;
    }
  }
  *out = dev;
  return PS_OK;
}

static ps_status cpu_map(ps__device *dev, uint32_t space, uint64_t bytes, ps__mapping *out) {
  char what[32];
  void *p;
  const bool host = ps__space_place(dev->cfg, space)->kind == PS_PLACE_HOST;
  const uint64_t pinned = host ? bytes - dev->cfg->space[space].pageable_bytes : 0,
                 most = ps__pin_limited(pinned);
  if (most)
    return ps__pin_refuse(space, pinned, most, "a test's limit");
  snprintf(what, sizeof what, "space %u", space);
  const ps_status st = ps__map(&p, bytes, what);
  if (st != PS_OK) {
    char why[128];
    snprintf(why, sizeof why, "%s", ps_last_error());
    return ps__fail(st, "%s: lower %s", why,
                    ps__field(host ? "host_mem_bytes" : "device_mem_bytes"));
  }
  *out = (ps__mapping){.addr = p, .host = p, .bytes = bytes};
  return PS_OK;
}

static void cpu_unmap(ps__device *dev, const ps__mapping *m) { ps__unmap(m->host, m->bytes); }

/* From the top down, 16 MiB of pages at a time, to the first page that is resident. */
static ps_status cpu_peak(ps__device *dev, const ps__mapping *m, uint64_t *out_bytes) {
  enum { PAGES = 4096 };
  unsigned char there[PAGES];
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  for (uint64_t end = m->bytes / page; end > 0;) {
    uint64_t n = end < PAGES ? end : PAGES;
    if (mincore((char *)m->host + (end - n) * page, n * page, there) != 0)
      return ps__fail(PS_EINTERNAL, "mincore failed: %s", strerror(errno));
    for (uint64_t i = n; i > 0; i--)
      if (there[i - 1] & 1) {
        *out_bytes = (end - n + i) * page;
        return PS_OK;
      }
    end -= n;
  }
  *out_bytes = 0;
  return PS_OK;
}

static uint32_t cpu_driver(const ps_engine_config *cfg, uint32_t stream) { return stream; }
static void *cpu_exec(ps__device *dev, uint32_t stream) { return &dev->stream[stream].exec; }

static ps_status cpu_copy(ps__device *dev, uint32_t stream, void *dst, const void *src,
                          uint64_t bytes) {
  ps__host_stream_copy(&dev->stream[stream], dst, src, bytes);
  return PS_OK;
}

static void cpu_signal(ps__device *dev, uint32_t stream, uint64_t value) {
  ps__counter_signal(&dev->stream[stream].counter, value);
}

static bool cpu_wait(ps__device *dev, uint32_t stream, uint32_t awaited, uint64_t value,
                     const _Atomic uint32_t *abort_flag) {
  return ps__counter_wait(&dev->stream[awaited].counter, value, abort_flag);
}

static uint64_t cpu_counter(ps__device *dev, uint32_t stream) {
  return atomic_load(&dev->stream[stream].counter.value);
}
static void cpu_stamp(ps__device *dev, uint32_t stream, int what, ps_trace_event *ev) {
  ps__host_stamp(what, ev);
}
static void cpu_settle(ps__device *dev, ps_trace_event *events) {}
static ps_status cpu_health(ps__device *dev) { return PS_OK; }

static void cpu_wake(ps__device *dev) {
  for (uint32_t i = 0; i < dev->n_streams; i++)
    ps__counter_wake(&dev->stream[i].counter);
}

static ps_status cpu_prepare(ps__device *dev, const ps_schedule *schedule, uint64_t trace_steps) {
  for (uint32_t i = 0; i < dev->n_streams; i++)
    ps__counter_init(&dev->stream[i].counter);
  return PS_OK;
}

/* Memory for products is reserved, or refused, before the first step. */
static ps_status cpu_warm(ps__device *dev, const ps_schedule *schedule) {
  uint32_t n = 0;
  bool multiplies[PS_MAX_STREAMS] = {false};
  for (size_t i = 0; i < schedule->list.n_ops; i++)
    if (schedule->list.ops[i].kernel && schedule->list.ops[i].kernel->info &&
        schedule->list.ops[i].kernel->info->blas)
      multiplies[schedule->list.ops[i].stream] = true;
  for (uint32_t i = 0; i < dev->n_streams; i++)
    n += multiplies[i] ? ps__pool_size(dev->stream[i].exec.pool) : 0;
  if (n <= dev->blas_threads)
    return PS_OK;
  PS_TRY(ps__cpu_blas_hold(n - dev->blas_threads));
  dev->blas_threads = n;
  return PS_OK;
}

static void cpu_finish(ps__device *dev) {}
static void cpu_enter(ps__device *dev) {}
static void cpu_leave(ps__device *dev, uint32_t driver) {}

const ps__backend ps__backend_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .map = cpu_map,
    .unmap = cpu_unmap,
    .peak = cpu_peak,
    .driver = cpu_driver,
    .exec = cpu_exec,
    .copy = cpu_copy,
    .prepare = cpu_prepare,
    .warm = cpu_warm,
    .finish = cpu_finish,
    .enter = cpu_enter,
    .leave = cpu_leave,
    .signal = cpu_signal,
    .wait = cpu_wait,
    .counter = cpu_counter,
    .stamp = cpu_stamp,
    .settle = cpu_settle,
    .health = cpu_health,
    .wake = cpu_wake,
};
