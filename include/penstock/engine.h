/* penstock/engine.h - the dataflow engine: ops with declared reads and writes, on streams, over
 * arenas of memory.
 *
 * How it works
 *   A PROGRAM is what one step does: ops in program order. Each op names a stream, a kernel, and
 *   the byte ranges of arenas ("spaces") that it reads and writes. Nobody wires an event: the
 *   engine derives every dependency from program order and the declared accesses.
 *
 *   COMPILING a program yields a SCHEDULE: for each stream a list of {waits, launch, signal}. It
 *   cuts every space into intervals, at every boundary of a declared range. It derives the hazards
 *   on intervals: read after write, write after read, write after write. It drops waits that a
 *   stream's own order or an earlier wait implies. It compiles two consecutive steps and keeps the
 *   second, whose waits on the step before let consecutive steps overlap safely.
 *
 *   An ENGINE owns the memory of the spaces and one counter a stream, which only grows.
 *   Op i of a stream with n ops brings the counter to step*n + i + 1. Waiting for another stream is
 *   waiting for a value of its counter.
 *
 *   A RUN replays a schedule step after step. Between its first and its last step nothing is
 *   allocated, looked up or locked. ps_sim_run() executes the same schedule on a virtual clock; the
 *   planner minimises the time that it gives.
 *
 * Places, links, spaces and streams are numbered, not named. A PLACE is the host or a device. A
 * space lies at a place, a stream runs at a place, and a LINK leads from one place to another. The
 * configuration says how many there are of each, and what each is.
 *
 *   A link says that its stream copies from one place to another, and runs nothing else, which
 *   ps_run_create() checks. A stream without links runs kernels, and copies between its place and
 *   hosts. So a program for one device may have no links at all. Copies from device to device need
 *   them. On CUDA a device's stream without links takes up to 32 MiB of its memory for cuBLASLt.
 *
 * Example: an array goes to the device, 1 is added to it there, and it comes back, ten times.
 * "docs/own-kernel.md" goes on from here to kernels on a GPU.
 *
 *   #include <penstock/engine.h>
 *   #include <stdio.h>
 *
 *   enum { DEVICE, HOST };      // places, and the space at each
 *   enum { COMPUTE, UP, DOWN }; // streams
 *   enum { N = 1024, BYTES = 4 * N };
 *
 *   static ps_status add_one(const ps_launch *l) { // ptr[i] is the address of the op's access i
 *     float *x = l->ptr[0];
 *     for (int i = 0; i < N; i++)
 *       x[i] += 1;
 *     return PS_OK;
 *   }
 *   static const ps_kernel kernel = {.name = "add_one", .fn = {[PS_BACKEND_CPU] = add_one}};
 *
 *   int main(void) {
 *     const ps_access up[] = {{HOST, PS_READ, 0, BYTES}, {DEVICE, PS_WRITE, 0, BYTES}};
 *     const ps_access x = {DEVICE, PS_READ_WRITE, 0, BYTES};
 *     const ps_access down[] = {{DEVICE, PS_READ, 0, BYTES}, {HOST, PS_WRITE, 0, BYTES}};
 *     const ps_tag tag = {-1, -1, -1, -1, NULL}; // no layer, round, chunk, phase
 *     const ps_op op[] = { // without a kernel: a copy
 *         {.stream = UP, .access = up, .n_access = 2, .tag = tag},
 *         {.kernel = &kernel, .stream = COMPUTE, .access = &x, .n_access = 1, .tag = tag},
 *         {.stream = DOWN, .access = down, .n_access = 2, .tag = tag}};
 *     const ps_engine_config machine = {
 *         .struct_bytes = sizeof machine, .n_places = 2, .n_links = 2, .n_spaces = 2,
 *         .n_streams = 3,
 *         .place = {[DEVICE] = {.kind = PS_PLACE_DEVICE}, [HOST] = {.kind = PS_PLACE_HOST}},
 *         .link = {{.from = HOST, .to = DEVICE, .stream = UP},
 *                  {.from = DEVICE, .to = HOST, .stream = DOWN}},
 *         .space = {[DEVICE] = {.bytes = BYTES, .place = DEVICE},
 *                   [HOST] = {.bytes = BYTES, .place = HOST}},
 *         .stream = {[COMPUTE] = {.place = DEVICE, .n_threads = 1, .name = "compute"},
 *                    [UP] = {.place = DEVICE, .n_threads = 1, .name = "up"},
 *                    [DOWN] = {.place = DEVICE, .n_threads = 1, .name = "down"}}};
 *     const ps_run_config how = {.struct_bytes = sizeof how};
 *     ps_program *program = NULL;
 *     ps_schedule *schedule = NULL;
 *     ps_engine *engine = NULL;
 *     ps_run *run = NULL;
 *     ps_status st = ps_program_create(&program, 2, 3);
 *     for (int i = 0; st == PS_OK && i < 3; i++)
 *       st = ps_program_add(program, &op[i], NULL);
 *     if (st == PS_OK)
 *       st = ps_schedule_compile(&schedule, program);
 *     if (st == PS_OK)
 *       st = ps_engine_create(&engine, &machine);
 *     if (st == PS_OK)
 *       st = ps_run_create(&run, engine, schedule, &how);
 *     if (st == PS_OK)
 *       st = ps_run_submit(run, 10); // the program, ten times
 *     if (st == PS_OK)
 *       st = ps_run_wait(run, 10);
 *     if (st == PS_OK)
 *       printf("%g\n", ((float *)ps_engine_space(engine, HOST))[0]); // 10
 *     else
 *       fprintf(stderr, "%s\n", ps_last_error());
 *     ps_run_destroy(run);
 *     ps_engine_close(engine);
 *     ps_schedule_destroy(schedule);
 *     ps_program_destroy(program);
 *     return st != PS_OK;
 *   }
 *
 * Memory: all bytes of a space are zero when its engine has been created, and keep their values
 * from step to step and from run to run. So what a program needs at its start is written to a host
 * space through ps_engine_space() before the first step, and its first ops copy it up. What is to
 * be copied up once, and not in each step, is a program of its own, whose run comes first. A space
 * begins at a multiple of 4,096 bytes on hosts and of 256 on GPUs. Where an op needs its operands
 * aligned, the program chooses offsets that are.
 *
 * Steps in flight: a submitted step is in flight until all its ops have ended. Any number of steps
 * may be. A stream runs its ops in program order. An op begins when the stream's op before it has
 * ended and its hazards allow. A stream may thus be many steps ahead of one that touches none of
 * its bytes. Two streams that take turns with the same bytes are at most a step apart.
 *
 * Loading ahead: copies to the device, kernels, and copies to the host have a stream each, and
 * consecutive chunks have different ranges (slots) of the device's space. With both copies on one
 * stream, the next chunk goes up only after the last one has come down.
 *
 * Threads: distinct objects are independent. One thread at a time uses an object, except where a
 * function says otherwise. An object is destroyed when no thread is inside a call on it.
 * Processes: engines, runs and trainers have threads and belong to the process that made them. The
 * child of a fork() may not call anything on them.
 * Errors: a function that returns ps_status says why in ps_last_error(), and writes its outputs
 * only on PS_OK. */
#ifndef PENSTOCK_ENGINE_H
#define PENSTOCK_ENGINE_H
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  PS_MAX_PLACES = 16,
  PS_MAX_DEVICES = 8, /* of a plan */
  PS_MAX_LINKS = 80,
  PS_MAX_SPACES = 16,
  PS_MAX_STREAMS = 48,
  PS_MAX_ACCESSES = 12,
  PS_MAX_DRIVES = 8, /* of an engine */
  PS_NAME_BYTES = 32
};

struct CUstream_st; /* of the CUDA headers: *cudaStream_t */
typedef struct ps_engine ps_engine;
typedef struct ps_program ps_program;
typedef struct ps_schedule ps_schedule;
typedef struct ps_run ps_run;

/* ---- ops ------------------------------------------------------------------------------------- */

typedef enum ps_access_mode { PS_READ = 1, PS_WRITE = 2, PS_READ_WRITE = 3 } ps_access_mode;

/* A range of a space: [offset, offset + bytes), in BYTES; bytes > 0. Ranges of different ops may
 * overlap in any way. */
typedef struct ps_access {
  uint32_t space;
  uint32_t mode; /* ps_access_mode */
  uint64_t offset;
  uint64_t bytes;
} ps_access;

/* By which of a kernel's functions an op runs. Streams of a host run PS_BACKEND_CPU's; those of a
 * device run what its place says. */
enum { PS_BACKEND_CPU = 0, PS_BACKEND_CUDA = 1, PS_N_BACKENDS = 2 };

/* What a kernel gets when it runs. Everything is borrowed for the call; what the kernel queues on a
 * CUDA stream may use the addresses until the op is done there. */
typedef struct ps_launch {
  const void *args; /* the op's argument block, as ps_program_add() copied it */
  /* [n_ptr]: the address of each access, in their order. Of a GPU's space it is a device address.
   * Lengths are not here: what the kernel needs of them stands in args */
  void *const *ptr;
  uint32_t n_ptr;
  uint32_t stream;
  uint64_t step;    /* 0 for the run's first step, as in traces; messages count from 1 */
  uint64_t op;      /* index of the op in program order */
  uint32_t backend; /* PS_BACKEND_*: whose function of the kernel this call is */
  uint32_t reserved;
  void *exec; /* opaque: for the functions below */
} ps_launch;

/* What a kernel may use of the stream that runs it, inside its own call alone. */
/* Threads of the stream, >= 1: ps_stream_config.n_threads. On a CUDA stream 1, whatever that is. */
PS_API uint32_t ps_launch_n_threads(const ps_launch *launch);
/* ps_launch_parallel() - call @task(@arg, i, thread) once for each i in 0..@n_tasks-1, on the
 * stream's threads; returns when all are done. Threads take tasks in any order: a result must not
 * depend on @thread, 0..ps_launch_n_threads()-1, which chooses scratch. No task may call this
 * function. On a CUDA stream all tasks run on the calling thread. */
typedef void (*ps_task_fn)(void *arg, int64_t task, uint32_t thread);
PS_API void ps_launch_parallel(const ps_launch *launch, int64_t n_tasks, ps_task_fn task,
                               void *arg);
/* ps_launch_scratch() - scratch memory of the stream's @thread, undefined at first, for this op
 * alone. On a CUDA stream it is device memory that all threads' scratch makes together, for thread
 * 0, aligned to 256 bytes; else host memory aligned to 64.
 * @bytes  gets its BYTES, at least ps_stream_config.scratch_bytes; may be NULL.
 * NULL and 0 bytes: the stream has none, or no such thread. */
PS_API void *ps_launch_scratch(const ps_launch *launch, uint32_t thread, uint64_t *bytes);
/* ps_launch_cuda_stream() - the cudaStream_t (CUstream) to queue the kernel's work on; NULL on
 * streams that are not CUDA's. The primary context of the stream's GPU is current, so the CUDA
 * runtime works too. The kernel does not wait for the stream, and queues nothing elsewhere. */
PS_API struct CUstream_st *ps_launch_cuda_stream(const ps_launch *launch);

/* Runs an op, on a thread of the engine, once in each step. On host streams and on the CPU backend
 * it returns when the work is done; on a CUDA stream it queues the work and returns. A negative
 * status stops the run, whose message quotes what the op gave ps_error_set(), else the status. Work
 * that fails on the GPU later stops the run too, with PS_EDEVICE and CUDA's words. */
typedef ps_status (*ps_op_fn)(const ps_launch *launch);

/* Work an op causes. The engine does not read it: it is for cost models, and may stay 0. */
typedef struct ps_work {
  double flops; /* floating-point operations */
  /* bytes moved through the memory of the processor that runs it, reads plus writes */
  double bytes;
  /* the part of flops that counts as model FLOPs (docs/design/training.md, "Metrics"); the rest is
   * recomputation */
  double model_flops;
} ps_work;

/* For cost models and the categories of traces; PS_CLASS_OTHER does where neither matters. */
typedef enum ps_op_class {
  PS_CLASS_OTHER = 0, /* fixed cost only */
  PS_CLASS_GEMM = 1,
  PS_CLASS_ATTENTION = 2,
  /* bandwidth-bound kernels: norms, RoPE, GLU, embedding, cross-entropy, sums on the device */
  PS_CLASS_ELEMENTWISE = 3,
  PS_CLASS_COPY = 4,      /* between spaces */
  PS_CLASS_OPTIMIZER = 5, /* host optimizer and host gradient sums */
  PS_CLASS_IO = 6,
  PS_N_CLASSES = 7
} ps_op_class;

/* ps_op_engine() - the engine whose op the calling thread runs; NULL outside ops. An op must not
 * wait for another thread's call on the same run or trainer: the call may be waiting for the op. */
PS_API ps_engine *ps_op_engine(void);

/* A kernel: one const object for each, shared by every op that runs it. A NULL kernel in ps_op
 * means a copy: access 0 is read, access 1 of the same length is written, by the backend's own
 * copy function. */
typedef struct ps_kernel {
  const char *name;
  uint32_t op_class; /* ps_op_class */
  /* by backend; NULL: the kernel does not run there, and ps_run_create() refuses it by name */
  ps_op_fn fn[PS_N_BACKENDS];
  /* What the library says of its own kernels (native/kernels/ops.h). NULL in a caller's kernel: its
   * scratch is what ps_stream_config.scratch_bytes says, and nothing prepares it. */
  const struct ps__op_info *info;
} ps_kernel;

/* Where an op belongs in the model, for traces and messages. -1 where a field does not apply: a tag
 * of zeros says layer 0, round 0, chunk 0.
 *   layer  0 the embedding, 1..L the blocks, L+1 the head
 *   round  of the step
 *   chunk  of the step; negative: the op is about the layer's unit -1 - chunk
 *   phase  the caller's own classification; a plan's ops have PS__PHASE_* (native/step/step.h)
 *   what   static text: what the op works on or moves, such as "qkv" or "weights". NULL: nothing to
 *          say beside the kernel's name */
typedef struct ps_tag {
  int32_t layer;
  int32_t round;
  int32_t chunk;
  int32_t phase;
  const char *what;
} ps_tag;

typedef struct ps_op {
  /* NULL: a copy. Borrowed until the last schedule made from the program is destroyed */
  const ps_kernel *kernel;
  const void *args; /* copied: args_bytes BYTES, to an address that is a multiple of 16 */
  uint32_t args_bytes;
  uint32_t stream;
  const ps_access *access; /* copied */
  uint32_t n_access;       /* <= PS_MAX_ACCESSES */
  ps_work work;
  ps_tag tag;
} ps_op;

/* ---- program --------------------------------------------------------------------------------- */

/* ps_program_create() - an empty program over @n_spaces spaces and @n_streams streams.
 * @out  on PS_OK owned by the caller, released by ps_program_destroy().
 * Errors: PS_EINVAL names the number and its limit (PS_MAX_SPACES, PS_MAX_STREAMS); PS_ENOMEM. */
PS_API ps_status ps_program_create(ps_program **out, uint32_t n_spaces, uint32_t n_streams);
/* ps_program_destroy() - NULL is a no-op. Schedules made from the program live on. */
PS_API void ps_program_destroy(ps_program *program);

/* ps_program_add() - append an op.
 * @op   borrowed for the call; its arguments and accesses are copied.
 * @idx  gets the op's index in program order; may be NULL.
 * Errors: PS_ENOMEM; PS_EINVAL names the field:
 *   - a stream or space out of range, an empty or overflowing range;
 *   - a copy that has not exactly two accesses of equal length;
 *   - two accesses of the op that overlap where one writes. */
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

/* ps_schedule_destroy() - NULL is a no-op. Errors: PS_EBUSY while a run of the schedule lives. */
PS_API ps_status ps_schedule_destroy(ps_schedule *schedule);

PS_API uint32_t ps_schedule_n_streams(const ps_schedule *schedule);
PS_API uint32_t ps_schedule_n_spaces(const ps_schedule *schedule);
PS_API uint64_t ps_schedule_n_ops(const ps_schedule *schedule);
/* Waits of a step, all streams together. */
PS_API uint64_t ps_schedule_n_waits(const ps_schedule *schedule);
PS_API uint64_t ps_schedule_stream_n_ops(const ps_schedule *schedule, uint32_t stream);
/* BYTES of a space that the ops touch: the end of the highest range. */
PS_API uint64_t ps_schedule_space_bytes(const ps_schedule *schedule, uint32_t space);

/* One op of a schedule. The pointers are valid as long as the schedule lives. */
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
/* ps_schedule_op() - op @idx in program order. Errors: PS_EINVAL where there is none. */
PS_API ps_status ps_schedule_op(const ps_schedule *schedule, uint64_t idx, ps_op_view *out);

/* ---- engine ---------------------------------------------------------------------------------- */

/* A DISK is files in the directories of ps_engine_config.drive, at most one place of an engine with
 * one space. No kernel touches the space. Copies along links between the disk and a host read and
 * write the files by direct I/O, past the page cache. Their offsets and bytes are multiples of
 * 4096, and their streams run at the host. */
typedef enum ps_place_kind {
  PS_PLACE_HOST = 0,
  PS_PLACE_DEVICE = 1,
  PS_PLACE_DISK = 2
} ps_place_kind;

typedef struct ps_place {
  uint32_t kind;    /* ps_place_kind */
  uint32_t backend; /* PS_BACKEND_* of its streams: CPU for a host, the same for all devices */
  uint32_t device;  /* CUDA: which of the visible GPUs */
  uint32_t reserved;
  /* BYTES that its spaces, each rounded up to 2 MiB, and overhead_bytes may take; 0: no cap */
  uint64_t cap_bytes;
  /* BYTES that it takes besides: scratch, context, kernels, libraries. The caller's figure, which
   * counts against the cap; the engine does not measure it */
  uint64_t overhead_bytes;
} ps_place;

typedef struct ps_link {
  uint32_t from, to; /* places */
  uint32_t stream;   /* whose copies take this link; a stream of links runs nothing else */
  uint32_t resource; /* a number for cost functions: what the planner counts as one bandwidth; the
                      * engine does not read it */
} ps_link;

typedef struct ps_space_config {
  uint64_t bytes; /* BYTES of arena, rounded up to 2 MiB; may be 0 */
  /* Of a host's space: the first so many BYTES, rounded down to 64 KiB, are not pinned. No copy of
   * a link touches them. */
  uint64_t pageable_bytes;
  uint32_t place;
  uint32_t reserved;
} ps_space_config;

typedef struct ps_stream_config {
  /* where its ops run. Of a stream of links: a device's end of them, where there is one. CUDA
   * requires that, the CPU backend does not */
  uint32_t place;
  /* threads that an op of this stream may use, 1..4096; of a CUDA stream they count for
   * scratch_bytes alone */
  uint32_t n_threads;
  /* BYTES of scratch for EACH of those threads. Host streams and the CPU backend have it in host
   * memory; a CUDA stream has that of all its threads as one range of device memory. */
  uint64_t scratch_bytes;
  char name[PS_NAME_BYTES];
} ps_stream_config;

typedef struct ps_engine_config {
  uint32_t struct_bytes; /* sizeof(ps_engine_config) */
  uint32_t n_places, n_links, n_spaces, n_streams;
  /* CUDA: 1 for the same bits in every run, at a lower speed. The CPU backend always gives them */
  uint32_t deterministic;
  /* directories of the disk's files, borrowed for the call: each on a drive of its own */
  uint32_t n_drives;
  const char *drive[PS_MAX_DRIVES];
  ps_place place[PS_MAX_PLACES];
  ps_link link[PS_MAX_LINKS];
  ps_space_config space[PS_MAX_SPACES];
  ps_stream_config stream[PS_MAX_STREAMS];
} ps_engine_config;

/* ps_engine_create() - reserve every space and start the streams' threads.
 * @cfg  borrowed for the call.
 * @out  on PS_OK an engine owned by the caller, released by ps_engine_close().
 * CPU: pages get memory when they are first written; a device is an arena in host memory. CUDA: at
 * most PS_MAX_DEVICES devices, each another GPU; their spaces are allocated and zeroed; host spaces
 * are touched by all threads and pinned for all GPUs, but for pageable_bytes. Streams of a host run
 * on threads; those of devices are CUDA streams, all fed by one thread.
 * Blocks: yes; with CUDA for seconds. Partial work is undone on errors.
 * Errors: PS_EINVAL: the message names the field.
 *         PS_EBUDGET: spaces and overhead of a place exceed its cap; the message names the place.
 *         PS_ENOMEM: the message names the space and its bytes.
 *         PS_EINVAL, PS_EBUDGET, PS_EBUSY, PS_EIO: a directory of the disk does not serve; the
 *         message says why.
 *         PS_EDEVICE: a thread did not start; or CUDA is not built in, has no driver, too old a
 *         driver or no GPU, or refused to pin (ps_pinned_at_most()). */
PS_API ps_status ps_engine_create(ps_engine **out, const ps_engine_config *cfg);

/* ps_engine_close() - stop the threads and unmap the spaces. NULL is a no-op. Errors: PS_EBUSY
 * while a run lives; the engine then stays as it is. */
PS_API ps_status ps_engine_close(ps_engine *engine);

/* ps_engine_space() - the address of a space for the host; valid until ps_engine_close(). NULL for
 * a GPU's device space, a disk's, and where @space is out of range. The caller may touch the memory
 * while no step is in flight, or inside its own host ops. */
PS_API void *ps_engine_space(ps_engine *engine, uint32_t space);
/* BYTES of a space, a multiple of 2 MiB; 0 where @space is out of range. */
PS_API uint64_t ps_engine_space_bytes(const ps_engine *engine, uint32_t space);

/* ps_engine_space_pinned() - BYTES of a host's space that are pinned. On the CPU backend, which
 * pins nothing, those that would be. 0 of a device's space, and where @space is out of range.
 * ps_pinned_at_most() - BYTES of host memory that could be pinned, where the calling thread's last
 * ps_engine_create() was refused because more could not be; else 0. */
PS_API uint64_t ps_engine_space_pinned(const ps_engine *engine, uint32_t space);
PS_API uint64_t ps_pinned_at_most(void);

/* ps_engine_space_peak() - BYTES up to the end of the highest page of the space that was ever
 * touched. The figure is the operating system's (mincore on the CPU backend), not a plan's. On CUDA
 * it is the whole space, all of which ps_engine_create() allocates or touches. */
PS_API ps_status ps_engine_space_peak(const ps_engine *engine, uint32_t space, uint64_t *out_bytes);

/* ---- run ------------------------------------------------------------------------------------- */

typedef struct ps_run_config {
  uint32_t struct_bytes; /* sizeof(ps_run_config) */
  uint32_t trace_steps;  /* keep the trace of the last so many steps; 0 keeps none */
  /* Steps [trace_from, trace_to) alone are traced; trace_to 0: all from trace_from on. On CUDA an
   * op of a traced step has two timing events, which cost time. */
  uint64_t trace_from, trace_to;
} ps_run_config;

/* ps_run_create() - bind @schedule to @engine: resolve addresses and reserve the trace.
 * Engine and schedule are borrowed until ps_run_destroy(). An engine has one run at a time.
 * @out  on PS_OK owned by the caller, released by ps_run_destroy().
 * An op may touch spaces of its stream's place and of hosts. On a stream of links it is a copy
 * along one of them.
 * Errors: PS_EBUSY: another run of the engine lives.
 *         PS_ESTATE: the schedule is a plan's, which only the plan's trainer runs.
 *         PS_EINVAL: the schedule has one of these, which the message names:
 *           - more spaces or streams than the engine;
 *           - a range past a space's end, or an op that touches another place;
 *           - a kernel without a function on this backend.
 *         PS_ENOMEM. */
PS_API ps_status ps_run_create(ps_run **out, ps_engine *engine, ps_schedule *schedule,
                               const ps_run_config *cfg);

/* ps_run_submit() - let the streams execute @n_steps more steps; returns at once. Steps overlap as
 * far as hazards allow. Errors: the run's sticky error. */
PS_API ps_status ps_run_submit(ps_run *run, uint64_t n_steps);

/* ps_run_wait() - block until @n_steps steps, counted from the run's start, are complete on every
 * stream. An op that fails in step k stops all streams at their next op of step k or later; the
 * steps before k are completed. Waiting for k steps or fewer then succeeds. After a cancel no wait
 * succeeds: streams stop at once, and no step counts as complete.
 * Errors: PS_EINVAL: @n_steps is more than were submitted.
 *         PS_ESTATE: the call is made inside an op of the run.
 *         The sticky error: the status of the first op that failed. The message says why and names
 *         the op, its layer and chunk. */
PS_API ps_status ps_run_wait(ps_run *run, uint64_t n_steps);

/* ps_run_cancel() - stop every stream before its next op, whatever its step. The run's sticky error
 * becomes PS_ECANCELLED, unless an op failed before. Any thread and a signal handler may call. */
PS_API void ps_run_cancel(ps_run *run);
/* Steps that every stream has completed. Any thread. */
PS_API uint64_t ps_run_steps_done(const ps_run *run);
/* 1: no op runs, and none will: ps_run_destroy() does not block. */
PS_API int ps_run_at_rest(const ps_run *run);

/* ps_run_where() - why nothing moves, in words: a line for each stream. The line names the op after
 * the last one that is known to have ended, and what that op still waits for; or it says that the
 * op runs, or that all submitted steps have ended. Steps count from 1.
 * @text  gets at most @bytes BYTES, terminator included.
 * Any thread while the run lives. On CUDA a device stream reports its place only where another
 * stream awaits it, so it may be further than the line says. */
PS_API void ps_run_where(const ps_run *run, char *text, uint64_t bytes);

/* ps_run_destroy() - wait until all submitted steps are done, or after an error or a cancel until
 * the streams have stopped, and release the run. NULL is a no-op. Errors: PS_ESTATE inside an op of
 * the run, which then lives on. */
PS_API ps_status ps_run_destroy(ps_run *run);

/* ---- trace ----------------------------------------------------------------------------------- */

/* Times in ns since the run's start, or in the simulator's virtual ns. queued <= start <= end: the
 * stream reached the op, the op's waits were satisfied, the op ended. */
typedef struct ps_trace_event {
  uint64_t step, op;
  uint64_t queued_ns, start_ns, end_ns;
  uint32_t stream;
  uint32_t reserved;
} ps_trace_event;

/* ps_run_trace() - copy the kept events: steps in order, and program order inside a step.
 * @events  has room for @room events; NULL: only @n is written.
 * @n       gets their number.
 * Errors: PS_ESTATE while steps are in flight; PS_EINVAL where @room is too small. */
PS_API ps_status ps_run_trace(const ps_run *run, ps_trace_event *events, uint64_t room,
                              uint64_t *n);

/* A gauge, such as the memory in use, has @bytes from @ns on. Gauges of one name are one track. */
typedef struct ps_trace_gauge {
  const char *name; /* static text */
  uint64_t ns;      /* as the events' times */
  uint64_t bytes;
} ps_trace_gauge;

/* ps_trace_write_json() - write events as a Chrome / Perfetto trace: a track for each stream, named
 * events for ops, with tags and wait times as arguments; and a track for each gauge.
 * @stream_names  the schedule's n_streams entries.
 * @gauges        n_gauges values; NULL: none.
 * Errors: PS_EIO names the file. */
PS_API ps_status ps_trace_write_json(const char *path, const ps_schedule *schedule,
                                     const ps_trace_event *events, uint64_t n,
                                     const char *const *stream_names, const ps_trace_gauge *gauges,
                                     uint64_t n_gauges);

/* ---- simulator ------------------------------------------------------------------------------- */

/* What an op costs in the simulator. Alone it takes `ns` and uses demand[i] of resource[i], 0..1
 * of the whole; a demand of 0 ends the list. The caller numbers the resources: CPUs, a place's
 * memory, a link's bus. Where the demands of running ops on a resource add up to more than 1, all
 * ops that use it slow down in proportion. */
enum { PS_SIM_RESOURCES = 40, PS_SIM_DEMANDS = 4, PS_SIM_KINDS = 5 };
typedef struct ps_sim_cost {
  double ns;
  double demand[PS_SIM_DEMANDS];
  uint8_t resource[PS_SIM_DEMANDS]; /* below PS_SIM_RESOURCES */
  /* bits of PS_SIM_KINDS, or 0: the kinds by which this op slows others while it runs */
  uint32_t kind;
  /* [1 << PS_SIM_KINDS] factors, each 1 or more: slower[kinds] times as long the op takes while
   * ops of these kinds run. The index has the bits of all running ops' `kind`, of this op too.
   * Borrowed until the simulation ends; NULL: none slows it */
  const double *slower;
  /* 0..1: the op takes ns / (1 + min(idle_most, idle_gain * idle)). idle is the fraction of the
   * last PS_SIM_IDLE_NS that its stream idled; older time counts less and less. A GPU that is bound
   * by its power runs the faster the more it rests, up to its highest clock. */
  double idle_gain;
  double idle_most; /* 0..1 */
} ps_sim_cost;
enum { PS_SIM_IDLE_NS = 100000000 };
typedef void (*ps_sim_cost_fn)(void *user, const ps_op_view *op, ps_sim_cost *out);

/* ps_sim_run() - execute @n_steps steps of @schedule on a virtual clock. Pure and deterministic.
 * @cost         is called once for each op of a step, with @user.
 * @events       gets the trace in ps_run_trace()'s order: n_steps * n_ops entries; may be NULL.
 * @step_end_ns  gets the time at which each step's last op ended: n_steps entries; may be NULL.
 * Errors: PS_EINVAL names an op whose cost is out of range; PS_ENOMEM. */
PS_API ps_status ps_sim_run(const ps_schedule *schedule, ps_sim_cost_fn cost, void *user,
                            uint64_t n_steps, ps_trace_event *events, double *step_end_ns);

#ifdef __cplusplus
}
#endif
#endif
