/* penstock/engine.h - the dataflow engine: ops with declared reads and writes, on streams, over
 * arenas of memory.
 *
 * How it works
 *   A PROGRAM is what one step does: ops in program order. Each op names its stream, a kernel,
 *   and the byte ranges of arenas ("spaces") that it reads and writes. Nobody wires an event:
 *   program order and the declared accesses say it all. COMPILING a program cuts every space at
 *   every boundary of a declared range into intervals, derives the hazards on intervals (read after
 *   write, write after read, write after write), drops what a stream's own order or an earlier
 *   wait already implies, and yields a SCHEDULE: for each stream a list of {waits, launch,
 *   signal}. Two consecutive steps are compiled and the second is kept: its waits on the step
 *   before are what makes consecutive steps overlap safely. An ENGINE owns the spaces' memory
 *   and one timeline a stream: a counter that only grows. Op i of a stream with n ops brings the
 *   counter to step*n + i + 1; waiting for another stream is waiting for a value of its counter.
 *   A RUN replays a schedule step after step: nothing is allocated, looked up or locked between
 *   its first and last step. The same schedule also runs on a virtual clock (ps_sim_run), which
 *   is what the planner minimises.
 *
 * Spaces and streams are numbered, not named: what a space is (host, device) and what a stream
 * runs on is configuration. Threads: distinct objects are independent; one object is used by one
 * thread at a time, except where said. Nobody may be inside a call of an object that is being
 * destroyed. Processes: engines, runs and trainers have threads and belong to the process that
 * made them. The child of a fork() may not call anything on them. */
#ifndef PENSTOCK_ENGINE_H
#define PENSTOCK_ENGINE_H
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PS_MAX_SPACES = 8, PS_MAX_STREAMS = 16, PS_MAX_ACCESSES = 12, PS_NAME_BYTES = 32 };

typedef struct ps_engine ps_engine;
typedef struct ps_program ps_program;
typedef struct ps_schedule ps_schedule;
typedef struct ps_run ps_run;

/* ---- ops ------------------------------------------------------------------------------------- */

typedef enum ps_access_mode { PS_READ = 1, PS_WRITE = 2, PS_READ_WRITE = 3 } ps_access_mode;

/* A range of a space: [offset, offset+bytes), BYTES. bytes > 0. Ranges of different ops may
 * overlap in any way. */
typedef struct ps_access {
  uint32_t space;
  uint32_t mode; /* ps_access_mode */
  uint64_t offset;
  uint64_t bytes;
} ps_access;

/* What a kernel gets when it runs. Everything is borrowed for the call. */
typedef struct ps_launch {
  const void *args; /* the op's argument block, as copied by ps_program_add() */
  void *const *ptr; /* ptr[i] = address of access i */
  uint32_t n_ptr;
  uint32_t stream;
  uint64_t step; /* 0 for the run's first step */
  uint64_t op;   /* index of the op in program order */
  void *exec;    /* where to run: on the CPU backend a ps__cpu_exec (threads and scratch) */
} ps_launch;

/* Runs an op. Host streams and the CPU backend: returns when the work is done. A negative return
 * stops the run; set the message first (library code: ps__fail). */
typedef ps_status (*ps_op_fn)(const ps_launch *launch);

/* Work an op causes, for the cost model; 0 where it has none. */
typedef struct ps_work {
  double flops; /* floating-point operations */
  /* bytes moved through the memory of the unit that runs it, reads plus writes */
  double bytes;
  /* the part of flops that counts as model FLOPs (docs/design.md, "Metrics"); the rest is
   * recomputation */
  double model_flops;
} ps_work;

typedef enum ps_op_class {
  PS_CLASS_OTHER = 0, /* fixed cost only */
  PS_CLASS_GEMM = 1,
  PS_CLASS_ATTENTION = 2,
  /* bandwidth-bound kernels: norms, rope, swiglu, embedding, cross-entropy */
  PS_CLASS_ELEMENTWISE = 3,
  PS_CLASS_COPY = 4,      /* between spaces */
  PS_CLASS_OPTIMIZER = 5, /* host optimizer and host gradient sums */
  PS_CLASS_IO = 6,
  PS_N_CLASSES = 7
} ps_op_class;

/* ps_op_engine() - the engine whose op the calling thread runs, NULL outside ops. Inside one, to
 * wait for another thread's call on the same run or trainer can be to wait for that very op. */
PS_API ps_engine *ps_op_engine(void);

/* A kernel: one const object for each, shared by every op that runs it. A NULL kernel in ps_op
 * means a copy: access 0 is read, access 1 of the same length is written, by the backend's own
 * copy function. */
enum { PS_BACKEND_CPU = 0, PS_BACKEND_CUDA = 1, PS_N_BACKENDS = 2 };
typedef struct ps_kernel {
  const char *name;
  uint32_t op_class; /* ps_op_class */
  /* by backend; NULL: the kernel does not run there, and ps_run_create() refuses it by name */
  ps_op_fn fn[PS_N_BACKENDS];
  /* What the library says of its own kernels (native/kernels/ops.h). NULL in a caller's kernel,
   * which then needs no scratch and no preparation. */
  const struct ps__op_info *info;
} ps_kernel;

/* Where an op belongs in the model, for traces and messages; -1 where it does not apply. */
typedef struct ps_tag {
  int32_t layer;
  int32_t round;
  int32_t chunk;
  int32_t phase; /* the caller's own classification: the model uses ps_phase of model.h */
} ps_tag;

typedef struct ps_op {
  /* borrowed until the last schedule made from the program is destroyed; NULL: a copy */
  const ps_kernel *kernel;
  const void *args; /* copied, args_bytes of it, aligned to 16 */
  uint32_t args_bytes;
  uint32_t stream;
  const ps_access *access; /* copied */
  uint32_t n_access;       /* <= PS_MAX_ACCESSES */
  ps_work work;
  ps_tag tag;
} ps_op;

/* ---- program --------------------------------------------------------------------------------- */

/* ps_program_create() - an empty program over @n_spaces spaces and @n_streams streams.
 * @out on PS_OK owned by the caller, released by ps_program_destroy(). Errors: PS_EINVAL,
 * PS_ENOMEM. */
PS_API ps_status ps_program_create(ps_program **out, uint32_t n_spaces, uint32_t n_streams);
/* NULL is a no-op; schedules made from it live on */
PS_API void ps_program_destroy(ps_program *program);

/* ps_program_add() - append an op. @idx, may be NULL, gets its index in program order. Errors:
 * PS_EINVAL names the field (stream or space out of range, an empty or overflowing range, a copy
 * with other than two accesses of equal length, two accesses of one op that overlap where one
 * writes); PS_ENOMEM. */
PS_API ps_status ps_program_add(ps_program *program, const ps_op *op, uint64_t *idx);
PS_API uint64_t ps_program_n_ops(const ps_program *program);

/* ---- schedule -------------------------------------------------------------------------------- */

/* One wait: until stream's counter reaches (step - steps_back) * n_ops(stream) + value. A wait
 * on a step before the first one is satisfied. */
typedef struct ps_wait {
  uint32_t stream;
  uint32_t steps_back; /* 0 or 1 */
  uint64_t value;      /* 1 + position of the awaited op in its stream's list */
} ps_wait;

/* ps_schedule_compile() - derive the hazards of @program repeated step after step. Pure; O(ops x
 * accesses x intervals an access touches). @out on PS_OK owned by the caller, released by
 * ps_schedule_destroy(). Errors: PS_EINVAL, PS_ENOMEM. */
PS_API ps_status ps_schedule_compile(ps_schedule **out, const ps_program *program);

/* ps_schedule_destroy() - NULL is a no-op. PS_EBUSY while a run of it lives. */
PS_API ps_status ps_schedule_destroy(ps_schedule *schedule);

PS_API uint32_t ps_schedule_n_streams(const ps_schedule *schedule);
PS_API uint32_t ps_schedule_n_spaces(const ps_schedule *schedule);
PS_API uint64_t ps_schedule_n_ops(const ps_schedule *schedule);
/* after implied ones were dropped */
PS_API uint64_t ps_schedule_n_waits(const ps_schedule *schedule);
PS_API uint64_t ps_schedule_stream_n_ops(const ps_schedule *schedule, uint32_t stream);
/* Bytes of a space that the ops touch: the end of the highest range. */
PS_API uint64_t ps_schedule_space_bytes(const ps_schedule *schedule, uint32_t space);

/* A read-only view of one op of a schedule; pointers live as long as the schedule. */
typedef struct ps_op_view {
  const ps_kernel *kernel;
  const void *args;
  const ps_access *access;
  const ps_wait *wait;
  uint32_t n_access, n_wait, stream, args_bytes;
  uint64_t position; /* in its stream's list */
  ps_work work;
  ps_tag tag;
} ps_op_view;
PS_API ps_status ps_schedule_op(const ps_schedule *schedule, uint64_t idx, ps_op_view *out);

/* ---- engine ---------------------------------------------------------------------------------- */

typedef enum ps_space_kind { PS_SPACE_HOST = 0, PS_SPACE_DEVICE = 1 } ps_space_kind;
typedef enum ps_stream_kind {
  PS_STREAM_COMPUTE = 0, /* kernels on the device */
  PS_STREAM_H2D = 1,
  PS_STREAM_D2H = 2,
  PS_STREAM_HOST = 3, /* host threads: optimizer, data, callbacks */
} ps_stream_kind;

typedef struct ps_space_config {
  uint64_t bytes; /* BYTES of arena, rounded up to 2 MiB; may be 0 */
  uint32_t kind;  /* ps_space_kind */
  uint32_t reserved;
} ps_space_config;

typedef struct ps_stream_config {
  uint32_t kind;      /* ps_stream_kind */
  uint32_t n_threads; /* threads that an op of this stream may use, >= 1 */
  /* scratch memory for EACH of those threads; counted as host memory by the planner */
  uint64_t scratch_bytes;
  char name[PS_NAME_BYTES];
} ps_stream_config;

typedef struct ps_engine_config {
  uint32_t struct_bytes; /* sizeof(ps_engine_config) */
  uint32_t backend;      /* PS_BACKEND_CPU or PS_BACKEND_CUDA */
  uint32_t n_spaces, n_streams;
  uint32_t device; /* CUDA: which of the visible GPUs */
  /* CUDA: 1 for the same bits in every run, at some speed; the CPU backend always is */
  uint32_t deterministic;
  ps_space_config space[PS_MAX_SPACES];
  ps_stream_config stream[PS_MAX_STREAMS];
} ps_engine_config;

/* ps_engine_create() - reserve every space and start the streams' threads.
 * @cfg borrowed for the call. @out on PS_OK an engine owned by the caller, released by
 * ps_engine_close(); untouched on error. Blocks: yes (first touch happens later, by whoever
 * writes). Errors: PS_EINVAL names the field; PS_ENOMEM names the space and its bytes;
 * PS_EDEVICE a thread could not start, or CUDA: not built in, no driver, one that is too old, no
 * GPU, refused to pin. Partial work is undone. CUDA: device spaces are allocated and zeroed,
 * host spaces touched by all threads and pinned (seconds). Streams of kind HOST run on threads
 * and may only touch host spaces; the others are CUDA streams, fed by one thread. */
PS_API ps_status ps_engine_create(ps_engine **out, const ps_engine_config *cfg);

/* ps_engine_close() - stop the threads and unmap the spaces. NULL is a no-op. PS_EBUSY while a
 * run lives. */
PS_API ps_status ps_engine_close(ps_engine *engine);

/* ps_engine_space() - the host-visible address of a space, NULL when the backend has none or
 * @space is out of range. On the CPU backend every space has one. The caller may touch it while
 * no run is in flight, or inside its own host ops. */
PS_API void *ps_engine_space(ps_engine *engine, uint32_t space);
PS_API uint64_t ps_engine_space_bytes(const ps_engine *engine, uint32_t space);

/* ps_engine_space_peak() - BYTES up to the end of the highest page of the space that was ever
 * touched, as the kernel reports it (mincore on the CPU backend). Not from the plan. On CUDA the
 * whole space: it is allocated, or touched and pinned, before the engine is there. */
PS_API ps_status ps_engine_space_peak(const ps_engine *engine, uint32_t space, uint64_t *out_bytes);

/* ---- run ------------------------------------------------------------------------------------- */

typedef struct ps_run_config {
  uint32_t struct_bytes; /* sizeof(ps_run_config) */
  uint32_t trace_steps;  /* keep the trace of the last so many steps; 0 keeps none */
} ps_run_config;

/* ps_run_create() - bind @schedule to @engine: addresses are resolved, the trace reserved.
 * Engine and schedule are borrowed until ps_run_destroy(). One run an engine at a time
 * (PS_EBUSY). Errors: PS_EINVAL (more spaces or streams than the engine has, a range past a
 * space, a kernel without a function on this backend, named); PS_ENOMEM. */
PS_API ps_status ps_run_create(ps_run **out, ps_engine *engine, ps_schedule *schedule,
                               const ps_run_config *cfg);

/* ps_run_submit() - let the streams execute @n_steps more steps; returns at once. Steps overlap
 * as far as hazards allow. Errors: the sticky error of the run. */
PS_API ps_status ps_run_submit(ps_run *run, uint64_t n_steps);

/* ps_run_wait() - block until @n_steps steps, counted from the run's start, are complete on
 * every stream. When an op of step k fails, steps from k on stop at their next op and the ones
 * before k are completed: waiting for no more than k steps succeeds. Errors: PS_EINVAL (more
 * than were submitted); PS_ESTATE inside an op of the run; the sticky error: the first failing
 * op's status, with a message that says why and names the op, its layer and chunk. */
PS_API ps_status ps_run_wait(ps_run *run, uint64_t n_steps);

/* ps_run_cancel() - stop at the next op boundary of every stream, in whatever step it is; any
 * thread and a signal handler may call. The run's sticky error becomes PS_ECANCELLED, unless an
 * op failed before. */
PS_API void ps_run_cancel(ps_run *run);
PS_API uint64_t ps_run_steps_done(const ps_run *run); /* any thread */
/* 1: no op runs or will: ps_run_destroy() then waits for none */
PS_API int ps_run_at_rest(const ps_run *run);

/* ps_run_where() - where each stream stands, in words: a line a stream with the op behind the
 * last one known to have ended, and what that op still waits for. To find out why nothing moves.
 * @text gets at most @bytes, terminator included. Any thread while the run lives. On CUDA a
 * device stream tells its place only where somebody awaits it, so it may be further. */
PS_API void ps_run_where(const ps_run *run, char *text, uint64_t bytes);

/* ps_run_destroy() - waits for the streams to come to rest (after an error or a cancel they stop
 * at the next op). NULL is a no-op. PS_ESTATE inside an op of the run, which then lives on. */
PS_API ps_status ps_run_destroy(ps_run *run);

/* ---- trace ----------------------------------------------------------------------------------- */

/* Times are ns since the run's start (a run) or virtual ns (the simulator). queued <= start <=
 * end: queued is when the stream reached the op, start when its waits were satisfied. */
typedef struct ps_trace_event {
  uint64_t step, op;
  uint64_t queued_ns, start_ns, end_ns;
  uint32_t stream;
  uint32_t reserved;
} ps_trace_event;

/* ps_run_trace() - copy the kept events, steps in order and program order inside a step, into
 * @events (room for @room) and their number into @n. With @events NULL only @n is written.
 * Errors: PS_ESTATE while steps are in flight; PS_EINVAL when room is too small. */
PS_API ps_status ps_run_trace(const ps_run *run, ps_trace_event *events, uint64_t room,
                              uint64_t *n);

/* ps_trace_write_json() - write events as a Chrome / Perfetto trace: one track a stream, names
 * from the kernels, tags and wait times as arguments. @stream_names has the schedule's n_streams
 * entries. Errors: PS_EIO names the file. */
PS_API ps_status ps_trace_write_json(const char *path, const ps_schedule *schedule,
                                     const ps_trace_event *events, uint64_t n,
                                     const char *const *stream_names);

/* ---- simulator ------------------------------------------------------------------------------- */

/* Resources that running ops share, for the simulator: each op alone takes cost.ns and draws
 * demand[r] of resource r (0..1 of the whole). Where running ops together draw more than 1 of a
 * resource, all that draw on it slow down in proportion. */
enum { PS_SIM_RESOURCES = 4, PS_SIM_KINDS = 4 };
typedef struct ps_sim_cost {
  double ns;
  double demand[PS_SIM_RESOURCES];
  /* one bit of PS_SIM_KINDS, or 0: what the op counts as for others while it runs */
  uint32_t kind;
  /* [1 << PS_SIM_KINDS], at least 1: how many times as long the op takes while ops of these
   * kinds run, its own among them. Borrowed until the simulation ends; NULL: none slows it */
  const double *slower;
  /* 0..1: the op takes ns / (1 + the smaller of idle_most and idle_gain * the share of the last
   * PS_SIM_IDLE_NS that its stream idled, older time counting less and less): a GPU bound by
   * its power runs the faster the more it rests, up to its highest clock */
  double idle_gain;
  double idle_most; /* 0..1 */
} ps_sim_cost;
enum { PS_SIM_IDLE_NS = 100000000 };
typedef void (*ps_sim_cost_fn)(void *user, const ps_op_view *op, ps_sim_cost *out);

/* ps_sim_run() - execute @n_steps steps of @schedule on a virtual clock. Pure and deterministic.
 * @events (may be NULL; room for n_steps * n_ops) gets the trace in ps_run_trace() order.
 * @step_end_ns (may be NULL; n_steps entries) gets when each step's last op ended. Errors:
 * PS_ENOMEM; PS_EINVAL. */
PS_API ps_status ps_sim_run(const ps_schedule *schedule, ps_sim_cost_fn cost, void *user,
                            uint64_t n_steps, ps_trace_event *events, double *step_end_ns);

#ifdef __cplusplus
}
#endif
#endif
