/* backend.h - what a backend implements: one const table of functions.
 *
 * A DEVICE is what a backend opens for one engine: the memory of its spaces, its streams and
 * their counters. The engine owns the threads. A DRIVER is one of these threads: it takes the
 * ops of its streams in program order, and driver() says which streams share one. On the CPU
 * every stream has a driver of its own, and the backend's functions block that thread. A backend
 * with submission queues gives all its device streams one driver, and its functions enqueue on
 * the stream and return. For each op the driver calls
 *     begin(), stamp(), wait()... , stamp(), copy() or the kernel with launch.exec = exec(),
 *     stamp(), signal()
 * A failed kernel or copy stops the run. A driver submits the ops of all its streams in program
 * order, and every wait is for an earlier op of that order. So a driver never waits for itself. */
#ifndef PS_ENGINE_BACKEND_H
#define PS_ENGINE_BACKEND_H
#include "core/core.h"
#include <penstock/engine.h>

typedef struct ps__device ps__device; /* each backend's own */

typedef struct ps__mapping {
  void *addr; /* what kernels get */
  void *host; /* what the host may touch; NULL when it may not */
  uint64_t bytes;
} ps__mapping;

struct ps__net_device; /* hosts/net.h */

enum { PS__CALLER = UINT32_MAX }; /* wait(): for the calling thread, not for a stream */
enum { PS__STAMP_QUEUED, PS__STAMP_START, PS__STAMP_END };

typedef struct ps__backend {
  const char *name;
  /* Streams with their threads, scratch and counters. @cfg is checked already. */
  ps_status (*open)(ps__device **out, const ps_engine_config *cfg);
  void (*close)(ps__device *dev); /* NULL is a no-op */
  /* Reserve a space of @bytes (a multiple of 2 MiB or 0); touched pages count in peak(). Of a
   * host's space all but pageable_bytes are pinned. PS_EDEVICE: not all of that could be
   * (engine/pin.h). */
  ps_status (*map)(ps__device *dev, uint32_t space, uint64_t bytes, ps__mapping *out);
  void (*unmap)(ps__device *dev, const ps__mapping *m);
  ps_status (*peak)(ps__device *dev, const ps__mapping *m, uint64_t *out_bytes);
  /* the number of the driver of @stream: < n_streams, and equal for streams that share one */
  uint32_t (*driver)(const ps_engine_config *cfg, uint32_t stream);
  void *(*exec)(ps__device *dev, uint32_t stream);
  ps_status (*copy)(ps__device *dev, uint32_t stream, void *dst, const void *src, uint64_t bytes);
  /* Copy @bytes between device memory and host memory that need not be pinned; blocks. Any thread,
   * also while ops run that do not touch these bytes. NULL where the host may touch all spaces. */
  ps_status (*transfer)(ps__device *dev, void *dst, const void *src, uint64_t bytes);
  /* While it is on, host ops may wait for a thread that calls transfer(), and an op that needs a
   * host stream is queued only after that stream has got there. Any thread; it is on before the
   * first op is submitted that such a host op holds back. NULL where transfer() is. */
  void (*awaited)(ps__device *dev, bool on);
  /* Before each run, while no stream is being driven: counters to 0, and what its steps need is
   * reserved, so that they need nothing more. @schedule is borrowed until finish(). PS_EINVAL
   * names an op that the backend cannot run. */
  ps_status (*prepare)(ps__device *dev, const ps_schedule *schedule, uint64_t trace_steps);
  void (*finish)(ps__device *dev); /* after each run */
  /* Load, build and choose all that the first launches of @schedule's ops would, so that the
   * first step is like the others. Device spaces are overwritten and left zero. NULL where there
   * is nothing of the kind. */
  ps_status (*warm)(ps__device *dev, const ps_schedule *schedule);
  /* BYTES of device memory that the device at @place has lost to this process; NULL where a device
   * has no memory of its own. */
  ps_status (*memory)(ps__device *dev, uint32_t place, uint64_t *out_bytes);
  /* Lanes of device @number, for host ops that use it themselves; no engine need be open. NULL
   * where a device has none. PS_EDEVICE, PS_ENOMEM. */
  ps_status (*net)(uint32_t number, struct ps__net_device *out);
  /* Before any run: ops of a host stream use @lanes, of @dev's first device. From then on nothing
   * that a device has queued waits for a host stream. The caller closes @lanes before @dev.
   * PS_EINVAL: they are of another device. */
  ps_status (*use_net)(ps__device *dev, const struct ps__net_device *lanes);
  /* On a driver's thread: enter() before its first run; leave() when a run gives its streams no
   * more ops. leave() returns when the streams are at rest. After an error or a cancel, submitted
   * device ops still run although a host op before them will not. They run in the schedule's order
   * all the same, also where two of them are ordered by way of a host op alone (engine/release.h).
   * Their results belong to steps that are given up. Where a device failed, nothing is in order. */
  void (*enter)(ps__device *dev);
  void (*leave)(ps__device *dev, uint32_t driver);
  /* On a driver's thread: what follows is op @number of @stream, counted over all streams from the
   * run's first op on. A driver's numbers grow. NULL: the backend need not know. */
  void (*begin)(ps__device *dev, uint32_t stream, uint64_t number);
  /* The counter of @stream becomes @value once the work before has ended. The schedule says which
   * streams await the op (ps__op.waiters). An op that no stream awaits needs no signal, except a
   * step's last op on the stream, which the caller awaits. */
  void (*signal)(ps__device *dev, uint32_t stream, uint64_t value);
  /* @stream (or PS__CALLER) goes on when @awaited's counter is at least @value. False when
   * *abort_flag was seen first, or when the device failed: then *abort_flag is still 0 and
   * health() says why. */
  bool (*wait)(ps__device *dev, uint32_t stream, uint32_t awaited, uint64_t value,
               const _Atomic uint32_t *abort_flag);
  uint64_t (*counter)(ps__device *dev, uint32_t stream);
  /* Put the time of this point of @stream in a field of @ev, at the latest in settle(). */
  void (*stamp)(ps__device *dev, uint32_t stream, int what, ps_trace_event *ev);
  /* the run is at rest; @events is its ring of trace_steps x n_ops */
  void (*settle)(ps__device *dev, ps_trace_event *events);
  /* @events is a copy of the events of one step, whose ops have all ended, while others run: its
   * times are put in. NULL where stamp() has done so. Blocks for some us. PS_EDEVICE. */
  ps_status (*marks)(ps__device *dev, ps_trace_event *events);
  /* PS_EDEVICE when the device failed: sticky, with the driver's words */
  ps_status (*health)(ps__device *dev);
  /* The place of the device that failed, after health() said that one did; NULL where none can. */
  uint32_t (*failed)(ps__device *dev);
  /* Begin or end the recording of a profiler that was told to wait for it, while no op runs. NULL
   * where no profiler can be told. */
  ps_status (*profile)(ps__device *dev, bool on);
  /* Ranges that an attached profiler shows on the calling thread. profiled(): whether one is
   * attached. range_push() opens a range, range_pop() closes the last @n. All three are NULL where
   * a backend has none. */
  bool (*profiled)(void);
  void (*range_push)(const char *name);
  void (*range_pop)(uint32_t n);
  /* every wait checks its abort flag again; a signal handler may call */
  void (*wake)(ps__device *dev);
} ps__backend;

/* ---- what a configuration says --------------------------------------------------------------- */

static inline const ps_place *ps__space_place(const ps_engine_config *cfg, uint32_t space) {
  return &cfg->place[cfg->space[space].place];
}
/* ps__stream_place() - where the ops of a stream run; its backend is the index of ps_kernel.fn. */
static inline const ps_place *ps__stream_place(const ps_engine_config *cfg, uint32_t stream) {
  return &cfg->place[cfg->stream[stream].place];
}
static inline bool ps__runs_on_host(const ps_engine_config *cfg, uint32_t stream) {
  return ps__stream_place(cfg, stream)->kind == PS_PLACE_HOST;
}
/* ps__has_links() - whether a stream runs the copies of links, and nothing else. */
static inline bool ps__has_links(const ps_engine_config *cfg, uint32_t stream) {
  for (uint32_t i = 0; i < cfg->n_links; i++)
    if (cfg->link[i].stream == stream)
      return true;
  return false;
}

#endif
