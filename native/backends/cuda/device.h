/* device.h - the CUDA backend from the inside.
 *
 * Device streams are CUDA streams, of one GPU or of several. One thread submits the ops of all of
 * them in program order, and makes the context of an op's GPU current before it (gpus.c). Host
 * streams are the CPU backend's. A WORD is a stream's counter in pinned memory, which others read.
 * Who waits how:
 *   device for device   on one GPU an event, recorded after the awaited op (prepare.c)
 *   GPU for GPU         the awaited stream writes its word, and the other waits until the word is
 *                       at least the value. An event of a GPU that failed may never come; a word
 *                       can be written by the host
 *   device for host     the device stream waits until the host stream's word is at least the value
 *   host for device     the device stream writes its word, and the host thread polls the word: it
 *                       spins for 20 us, then looks every 20 us. With the slack of the kernel's
 *                       timer the latency is under 100 us. A device cannot wake a thread.
 *   host for host       the counter's futex
 * A word is compared as the hardware does, by the sign of a 64-bit difference.
 *
 * When a run stops, the last host stream to give up lets the device streams go, in program order
 * (engine/release.h). After a GPU has failed there is no order left to keep: all words become
 * INT64_MAX, those of device streams too, so that the other GPUs come to their end.
 *
 * Virtual GPUs of old drivers have no 64-bit stream memory operations. There a device stream's wait
 * for a host stream blocks the submitting thread: correct, but late. The words of device streams
 * are then written by cuLaunchHostFunc, 6 us when idle and up to 270 us under load. GPU waits for
 * GPU by an event.
 *
 * Submitting cannot deadlock, though a full CUDA queue blocks the submitting thread and streams may
 * share a hardware queue. All submitted ops come earlier in program order than all others, and
 * waits only point back in that order. But a blocked submitting thread holds the driver's lock. A
 * host stream's thread that the GPU waits for must therefore not call the driver. So host streams
 * only read words, and a separate thread asks for the device's health.
 *
 * The host stream that exchanges totals over NCCL does call the driver (net.c), and what it queues
 * may share a hardware queue with the engine's streams. Then a device stream's wait for a host
 * stream blocks the submitting thread too, outside the driver. So all that is queued comes to its
 * end without that host stream. The same holds while a host op may wait for a thread that reads
 * device memory (awaited()), because that thread calls the driver. */
#ifndef PS_BACKENDS_CUDA_DEVICE_H
#define PS_BACKENDS_CUDA_DEVICE_H
#include "backends/cuda/driver.h"
#include "backends/host/stream.h"
#include "engine/schedule.h"
#include "kernels/cuda/cuda_exec.h"

/* What cuLaunchHostFunc gets where words are written by it: the next value, and how much is
 * added each step. */
typedef struct ps__cuda_note {
  _Atomic uint64_t *word;
  uint64_t value, n_ops;
} ps__cuda_note;

/* An op of a device stream, by position. */
typedef struct ps__cuda_op {
  /* index of the first of its two events, or PS__NO_EVENT: no device stream awaits it by one */
  uint32_t event;
  /* index of its note, or PS__NO_EVENT: nobody awaits its word */
  uint32_t note;
} ps__cuda_op;
enum { PS__NO_EVENT = UINT32_MAX };

/* A place that is a device. In tests several places may be one GPU (ps__cuda_share_gpu()). */
typedef struct ps__cuda_gpu {
  uint32_t place, number; /* number: which of the visible GPUs */
  CUdevice dev;
  CUcontext ctx; /* the primary one */
  CUevent base;  /* a trace's, and where it stands on the host's clock */
  uint64_t base_ns;
  CUstream side; /* of a trace: idle but for now, which places marks while ops run */
  CUevent now;
} ps__cuda_gpu;

typedef struct ps__cuda_stream {
  ps__host_stream host;         /* zero on device streams */
  CUstream stream;              /* NULL on host streams */
  const ps__cuda_gpu *gpu;      /* NULL on host streams */
  _Atomic uint64_t n_submitted; /* ops of a device stream, since the run has the engine */
  CUdeviceptr scratch;
  ps__cuda_exec exec;
  /* its counter, pinned; on host streams a copy of the stream's counter for the device */
  _Atomic uint64_t *word;
  CUdeviceptr word_dev;
  _Atomic uint64_t kept; /* what the word was when it was given up (leave.c) */
  uint64_t n_ops;        /* of a step of the run */
  ps__cuda_op *ops;      /* device streams, by position */
} ps__cuda_stream;

struct ps__device {
  const ps__cuda_driver *cu;
  ps_engine_config cfg;
  ps__cuda_gpu gpu[PS_MAX_DEVICES];
  uint32_t n_gpus;
  const ps__cuda_gpu *current; /* whose context the submitting thread has made current */
  /* of all GPUs: stream memory operations; kernels may use the host's addresses of pinned memory */
  bool mem_ops, host_pointers;
  /* CUresult of the first call that failed inside a run, where no status could say so; and of which
   * GPU it was. Written before error. */
  _Atomic int error;
  const char *_Atomic failed_call;
  const ps__cuda_gpu *_Atomic failed_gpu;
  bool stuck; /* a stream did not come to its end: what it may use is never released */
  /* while a run lives: asks the driver every few ms whether the device has failed */
  ps__thread *monitor;
  _Atomic bool run_over;
  _Atomic uint32_t n_left;     /* host streams that have given up the run */
  _Atomic bool submits;        /* the submitting thread is in the run */
  _Atomic uint64_t n_begun;    /* 1 + the number of the last device op that was begun */
  bool net;                    /* a host stream calls the driver (net.c) */
  _Atomic bool awaited;        /* a host op may wait for a thread that calls the driver */
  const ps_schedule *schedule; /* borrowed for one run */
  ps__mapping space[PS_MAX_SPACES];
  void *words;
  ps__cuda_stream stream[PS_MAX_STREAMS];
  /* reserved by prepare() for one run */
  CUevent *events;
  ps__cuda_note *notes;
  CUevent *timing; /* trace_steps x n_ops x {start, end}; NULL for ops of host streams */
  uint64_t n_events, n_timing, n_ops, trace_steps;
};

/* gpus.c */
ps_status ps__cuda_gpus_open(ps__device *dev);
void ps__cuda_gpus_close(ps__device *dev);
/* ps__cuda_find_gpu() - gpu->dev of GPU gpu->number, on which the library must run. PS_EDEVICE.
 * ps__cuda_retain() - make its primary context, or find it. DevicePrimaryCtxRelease() gives it
 * back. *seen: NVML shows the GPU. PS_ENOMEM, PS_EDEVICE. */
ps_status ps__cuda_find_gpu(const ps__cuda_driver *cu, ps__cuda_gpu *gpu);
ps_status ps__cuda_retain(const ps__cuda_driver *cu, ps__cuda_gpu *gpu, bool *seen);
/* That of a place; the first one where the place is none of a GPU. */
const ps__cuda_gpu *ps__cuda_gpu_at(const ps__device *dev, uint32_t place);
/* ps__cuda_turn_to() - make a GPU's context the calling thread's current one, in place of another
 * one. Between ps__cuda_push() and ps__cuda_pop(), which keep the caller's. */
CUresult ps__cuda_turn_to(const ps__device *dev, const ps__cuda_gpu *gpu);
ps_status ps__cuda_push(const ps__device *dev, const ps__cuda_gpu *gpu);
void ps__cuda_pop(const ps__device *dev);
int ps__cuda_attribute(const ps__device *dev, const ps__cuda_gpu *gpu, CUdevice_attribute what);
/* Pages of @p come from the NUMA nodes of the engine's GPUs as long as these have some. */
void ps__cuda_prefer_nodes(const ps__device *dev, void *p, uint64_t bytes);
/* leave.c */
void ps__cuda_leave(ps__device *dev, uint32_t driver);
/* The value that the stream's word has reached, as far as it is known. */
uint64_t ps__cuda_reached(const ps__cuda_stream *s);
/* ps__cuda_let_others_go() - after a GPU has failed, again and again until the run is over. */
void ps__cuda_let_others_go(ps__device *dev);

/* memory.c */
ps_status ps__cuda_map(ps__device *dev, uint32_t space, uint64_t bytes, ps__mapping *out);
void ps__cuda_unmap(ps__device *dev, const ps__mapping *m);
ps_status ps__cuda_peak(ps__device *dev, const ps__mapping *m, uint64_t *out_bytes);
/* Zeros in the current context, and returns when they are there: cuMemsetD8 itself may return
 * earlier, and the engine's streams do not wait for it. */
ps_status ps__cuda_zero(const ps__cuda_driver *cu, CUdeviceptr p, uint64_t bytes);
ps_status ps__cuda_transfer(ps__device *dev, void *dst, const void *src, uint64_t bytes);
ps_status ps__cuda_copy(ps__device *dev, uint32_t stream, void *dst, const void *src,
                        uint64_t bytes);
/* The same on a CUDA stream of the caller's, whose context is current. A copy that reaches over two
 * pinned ranges of host memory is queued as two. */
ps_status ps__cuda_copy_on(const ps__device *dev, CUstream on, void *dst, const void *src,
                           uint64_t bytes);
/* prepare.c */
ps_status ps__cuda_prepare(ps__device *dev, const ps_schedule *schedule, uint64_t trace_steps);
void ps__cuda_finish(ps__device *dev);
/* warm.c */
/* the context is current */
ps_status ps__cuda_prepare_ops(ps__device *dev, const ps_schedule *schedule);
ps_status ps__cuda_warm(ps__device *dev, const ps_schedule *schedule);
/* trace.c */
ps_status ps__cuda_trace_prepare(ps__device *dev, const ps_schedule *schedule);
void ps__cuda_trace_finish(ps__device *dev);
void ps__cuda_stamp(ps__device *dev, uint32_t stream, int what, ps_trace_event *ev);
void ps__cuda_settle(ps__device *dev, ps_trace_event *events);
ps_status ps__cuda_marks(ps__device *dev, ps_trace_event *events);
/* ranges.c */
ps_status ps__cuda_profile(ps__device *dev, bool on);
bool ps__cuda_profiled(void);
void ps__cuda_range_push(const char *name);
void ps__cuda_range_pop(uint32_t n);
void ps__cuda_name_stream(CUstream stream, const char *name);
/* net.c */
ps_status ps__cuda_net(uint32_t number, struct ps__net_device *out);
ps_status ps__cuda_use_net(ps__device *dev, const struct ps__net_device *lanes);
/* gpus.c */
/* ps__cuda_ask() - what a GPU's streams say of it: a failed kernel or copy makes every later call
 * fail, a query too. ps__cuda_note_error() - health() will say so. @gpu: that of the stream that
 * the call was for. */
CUresult ps__cuda_ask(const ps__device *dev, const ps__cuda_gpu *gpu);
void ps__cuda_note_error(ps__device *dev, const ps__cuda_gpu *gpu, CUresult r, const char *call);
/* for tests: engines opened from now on do without, as if the device could not */
void ps__cuda_without_mem_ops(bool without);

#endif
