/* stream.h - a stream that runs on host threads: every stream of the CPU backend, and the host
 * streams of the others. */
#ifndef PS_BACKENDS_HOST_STREAM_H
#define PS_BACKENDS_HOST_STREAM_H
#include "engine/backend.h"

typedef struct ps__host_stream {
  ps__counter counter;
  ps__cpu_exec exec;
  uint64_t scratch_total;
} ps__host_stream;

/* @s must be zero. After a failure ps__host_stream_close() undoes what was done. */
ps_status ps__host_stream_open(ps__host_stream *s, const ps_stream_config *cfg, uint32_t idx);
void ps__host_stream_close(ps__host_stream *s); /* a zero one is a no-op */
void ps__host_stream_copy(ps__host_stream *s, void *dst, const void *src, uint64_t bytes);
/* the time now, into the field that @what names */
void ps__host_stamp(int what, ps_trace_event *ev);

#endif
