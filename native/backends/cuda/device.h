/* device.h - the CUDA backend from the inside.
 *
 * Device streams are CUDA streams. One thread submits their ops in program order. Host streams are
 * the CPU backend's. A WORD is a stream's counter in pinned memory, which the other side reads. Who
 * waits how:
 *   device for device   an event, recorded after the awaited op (events below)
 *   device for host     the device stream waits until the host stream's word is at least the value
 *   host for device     the device stream writes its word, and the host thread polls the word: it
 *                       spins for 20 us, then looks every 20 us. With the slack of the kernel's
 *                       timer the latency is under 100 us. A device cannot wake a thread.
 *   host for host       the counter's futex
 * A word is compared as the hardware does, by the sign of a 64-bit difference. When all host
 * streams have given up, their words are INT64_MAX.
 *
 * Virtual GPUs of old drivers have no 64-bit stream memory operations. There a device stream's wait
 * for a host stream blocks the submitting thread: correct, but late. The words of device streams
 * are then written by cuLaunchHostFunc, 6 us when idle and up to 270 us under load.
 *
 * Submitting cannot deadlock, though a full CUDA queue blocks the submitting thread and streams may
 * share a hardware queue. All submitted ops come earlier in program order than all others, and
 * waits only point back in that order. But a blocked submitting thread holds the driver's lock. A
 * host stream's thread that the GPU waits for must therefore not call the driver. So host streams
 * only read words, and a separate thread asks for the device's health. */
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
  /* index of the first of its two events, or PS__NO_EVENT: no other device stream awaits it */
  uint32_t event;
  /* index of its note, or PS__NO_EVENT: neither a host stream nor the caller awaits it */
  uint32_t note;
} ps__cuda_op;
enum { PS__NO_EVENT = UINT32_MAX };

typedef struct ps__cuda_stream {
  ps__host_stream host; /* zero on device streams */
  CUstream stream;      /* NULL on host streams */
  CUdeviceptr scratch;
  ps__cuda_exec exec;
  /* its counter, pinned; on host streams a copy of the stream's counter for the device */
  _Atomic uint64_t *word;
  CUdeviceptr word_dev;
  uint64_t n_ops;   /* of a step of the run */
  ps__cuda_op *ops; /* device streams, by position */
} ps__cuda_stream;

struct ps__device {
  const ps__cuda_driver *cu;
  ps_engine_config cfg;
  uint32_t gpu; /* which of the visible ones: that of the only place that is a device */
  CUdevice dev;
  CUcontext ctx;
  /* stream memory operations; kernels may use the host's addresses of pinned memory */
  bool mem_ops, host_pointers;
  int numa_node; /* of the GPU, or -1 */
  /* CUresult of the first call that failed inside a run, where no status could say so */
  _Atomic int error;
  const char *_Atomic failed_call;
  /* while a run lives: asks the driver every few ms whether the device has failed */
  ps__thread *monitor;
  _Atomic bool run_over;
  _Atomic uint32_t n_left; /* host streams that have given up the run */
  ps__mapping space[PS_MAX_SPACES];
  void *words;
  ps__cuda_stream stream[PS_MAX_STREAMS];
  /* reserved by prepare() for one run */
  CUevent *events;
  ps__cuda_note *notes;
  CUevent *timing; /* trace_steps x n_ops x {start, end}; NULL for ops of host streams */
  CUevent base;    /* and where it stands on the host's clock */
  uint64_t base_ns, n_events, n_timing, n_ops, trace_steps;
};

/* memory.c */
ps_status ps__cuda_map(ps__device *dev, uint32_t space, uint64_t bytes, ps__mapping *out);
void ps__cuda_unmap(ps__device *dev, const ps__mapping *m);
ps_status ps__cuda_peak(ps__device *dev, const ps__mapping *m, uint64_t *out_bytes);
ps_status ps__cuda_transfer(ps__device *dev, void *dst, const void *src, uint64_t bytes);
ps_status ps__cuda_copy(ps__device *dev, uint32_t stream, void *dst, const void *src,
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
/* ranges.c */
ps_status ps__cuda_profile(ps__device *dev, bool on);
bool ps__cuda_profiled(void);
void ps__cuda_range_push(const char *name);
void ps__cuda_range_pop(uint32_t n);
void ps__cuda_name_stream(CUstream stream, const char *name);
/* cuda.c */
void ps__cuda_note_error(ps__device *dev, CUresult r, const char *call); /* health() will say so */
/* for tests: engines opened from now on do without, as if the device could not */
void ps__cuda_without_mem_ops(bool without);

#endif
