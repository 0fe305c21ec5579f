/* engine.h - engines and runs from the inside. */
#ifndef PS_ENGINE_ENGINE_H
#define PS_ENGINE_ENGINE_H
#include "engine/backend.h"
#include "engine/disk.h"
#include "engine/schedule.h"

enum { PS__NO_SPACE = UINT32_MAX };

/* A thread that issues the ops of its streams: those whose backend driver() is @number. */
typedef struct ps__driver {
  struct ps_engine *engine;
  ps__thread *thread;
  uint32_t number;
  ps__counter parked; /* the number of runs this driver has left */
} ps__driver;

struct ps_engine {
  ps_engine_config cfg;
  const ps__backend *const *backends; /* [PS_N_BACKENDS]; NULL: it is not built in */
  const ps__backend *backend;         /* that of the devices; without a device the host's */
  ps__device *device;
  ps__mapping space[PS_MAX_SPACES];
  ps__disk *disk; /* NULL: there is none, or it has no bytes */
  uint32_t
      disk_space; /* its space, whose addresses are reserved and hold no memory; or PS__NO_SPACE */
  ps_run *run;    /* the one that the drivers are given, or NULL */
  uint32_t n_living;   /* runs, paused ones among them */
  uint64_t n_runs;     /* that began or went on */
  ps__counter started; /* the number of runs handed to the drivers */
  _Atomic uint32_t stop;
  uint32_t n_drivers;
  ps__driver driver[PS_MAX_STREAMS];
  /* of a paced engine (pace.h): until when each stream's op runs, and what time it is for the
   * caller. NULL: times are the system's. */
  const struct ps__pace *pace;
  _Atomic uint64_t stream_ns[PS_MAX_STREAMS];
  uint64_t caller_ns;
};

/* An op as a driver sees it: everything resolved. */
typedef struct ps__resolved {
  ps_op_fn fn; /* NULL: a copy of bytes */
  const void *args;
  void *const *ptr;
  const ps_wait *wait;
  void *exec;
  uint64_t op, position, bytes;
  uint32_t n_ptr, n_wait, stream;
  uint32_t disk; /* PS_READ, PS_WRITE: a copy from the disk, to it; 0: neither */
} ps__resolved;

/* Where a driver is, and its order to leave at the next op. */
typedef struct ps__progress {
  _Alignas(64) _Atomic uint64_t at; /* the step */
  _Atomic uint32_t leave;
} ps__progress;

struct ps_run {
  ps__counter allowed;    /* steps submitted, which drivers may execute */
  _Atomic uint64_t limit; /* steps that come to their end: from here on they stop (run.c) */
  _Atomic uint32_t stop;  /* limit was lowered */
  _Atomic uint32_t idle;  /* drivers without a step leave: the run stops or pauses */
  _Atomic uint32_t paused;
  _Atomic uint64_t first; /* step that the streams' counters count from: the last pause's */
  _Atomic int error;      /* the first failure's status */
  _Atomic uint32_t told;  /* message is written, before limit is lowered */
  char message[1024];
  ps__progress progress[PS_MAX_STREAMS + 1]; /* of each driver, and of the caller */
  ps_engine *engine;
  ps_schedule *schedule;
  uint64_t trace_steps, trace_from, trace_to, start_ns;
  ps__resolved *steps; /* n_ops, driver after driver */
  void **ptrs;
  size_t driver_first[PS_MAX_STREAMS + 1];
  /* trace_steps x n_ops, absolute times; end_ns 0: never executed */
  ps_trace_event *events;
  struct ps__paced *paced; /* of a paced engine */
};

/* ps__engine_create() - ps_engine_create() with these backends (backends/list.c). */
ps_status ps__engine_create(ps_engine **out, const ps_engine_config *cfg,
                            const ps__backend *const backends[PS_N_BACKENDS]);
/* ps__engine_warm() - backend.h's warm(), before anything is put into the device spaces.
 * PS_EBUSY while a run lives. */
ps_status ps__engine_warm(ps_engine *engine, const ps_schedule *schedule);
/* ps__engine_drives() - whether the calling thread runs ops of @engine (NULL: no): what waits
 * for them there waits for itself. */
bool ps__engine_drives(const ps_engine *engine);
/* ps__engine_memory() - BYTES of device memory that the GPU at @place has lost to this process; 0
 * where a device has no memory of its own. Any time. */
ps_status ps__engine_memory(ps_engine *engine, uint32_t place, uint64_t *out_bytes);

/* ps__engine_now() - the clock of the engine's traces, ns: ps__now_ns(), but for a paced engine.
 * @stream  whose op the calling thread runs, or PS__CALLER */
uint64_t ps__engine_now(const ps_engine *engine, uint32_t stream);

/* ps__engine_net() - backend.h's use_net(), with lanes of the engine's backend, before any run. */
ps_status ps__engine_net(ps_engine *engine, const struct ps__net_device *lanes);

/* ps__engine_profile() - backend.h's profile(). PS_EDEVICE. */
ps_status ps__engine_profile(ps_engine *engine, bool on);

/* ps__engine_read(), ps__engine_write() - copy @bytes of a space from @offset on to @dst, or from
 * @src; blocks. Ops that run meanwhile touch other bytes. PS_EDEVICE. */
ps_status ps__engine_read(ps_engine *engine, uint32_t space, uint64_t offset, void *dst,
                          uint64_t bytes);
ps_status ps__engine_write(ps_engine *engine, uint32_t space, uint64_t offset, const void *src,
                           uint64_t bytes);
/* ps__engine_awaited() - backend.h's awaited(): whether host ops may wait for a thread that calls
 * ps__engine_read(). */
void ps__engine_awaited(ps_engine *engine, bool on);

/* ps__run_create() - ps_run_create(), also of a plan's schedule: its trainer's engine runs it. */
ps_status ps__run_create(ps_run **out, ps_engine *engine, ps_schedule *schedule,
                         const ps_run_config *cfg);

/* ps__run_pause() - wait until all submitted steps are done, and release the engine: another run
 * may be created, or go on. A paused run keeps its steps and its trace. It takes no steps, and
 * nothing of it runs. Errors: the run's sticky error; the run is then paused all the same.
 * ps__run_go_on() - end the pause. Errors: PS_EBUSY: another run has the engine. The sticky error;
 * PS_ENOMEM, PS_EDEVICE: the backend refused. The run then stays paused. */
PS_API ps_status ps__run_pause(ps_run *run);
PS_API ps_status ps__run_go_on(ps_run *run);
void ps__run_rest(ps_run *run); /* wait until nobody executes anything; no step can follow */

/* ps__run_marks() - copy the events of step @step into @events, [n_ops] in program order, with
 * times as ps_run_trace() gives them. All ops of the step have ended; later steps may run. On the
 * thread that submits steps. PS_ESTATE: the step is not traced, or its place in the trace is a
 * later step's by now. PS_EDEVICE. @events is overwritten also on errors. */
ps_status ps__run_marks(ps_run *run, uint64_t step, ps_trace_event *events);

/* ---- the drivers' side (drive.c) ------------------------------------------------------------- */
void ps__run_drive(ps_run *run, uint32_t driver); /* on the driver's thread: until the run leaves */
/* ps__run_stop() - steps from @step on stop. A signal handler may call.
 * ps__run_fail_device() - the same where the device failed, as the last error of this thread says.
 * ps__run_sticky() - the error that stopped the run. */
void ps__run_stop(ps_run *run, uint64_t step);
void ps__run_fail_device(ps_run *run, ps_status code);
ps_status ps__run_sticky(const ps_run *run);
static inline uint64_t ps__run_submitted(const ps_run *run) {
  return atomic_load(&run->allowed.value);
}
/* ps__describe_tag() - ", layer 3, round 1, chunk 2": what of it applies. Returns its length. */
size_t ps__describe_tag(char *text, size_t room, const ps_tag *tag);

#endif
