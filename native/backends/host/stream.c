/* stream.c - streams that run on host threads. */
#include "backends/host/stream.h"
#include <string.h>

ps_status ps__host_stream_open(ps__host_stream *s, const ps_stream_config *cfg, uint32_t idx) {
  char what[64];
  ps__counter_init(&s->counter);
  s->exec.scratch_bytes = ((size_t)cfg->scratch_bytes + 63) / 64 * 64;
  s->scratch_total = (uint64_t)s->exec.scratch_bytes * cfg->n_threads;
  snprintf(what, sizeof what, "scratch of stream %u (%s)", idx, cfg->name);
  void *scratch;
  PS_TRY(ps__map(&scratch, s->scratch_total, what));
  s->exec.scratch = scratch;
  return ps__pool_create(&s->exec.pool, cfg->n_threads, cfg->name[0] ? cfg->name : "ps-pool");
}

void ps__host_stream_close(ps__host_stream *s) {
  ps__pool_destroy(s->exec.pool);
  ps__unmap(s->exec.scratch, s->scratch_total);
}

/* copy: dst[0..bytes) = src[0..bytes), in pieces divided among the stream's threads.
 * bytes 2*bytes of memory traffic; any number of threads gives the same bits. */
typedef struct copy_job {
  char *dst;
  const char *src;
  uint64_t bytes;
} copy_job;
static const uint64_t COPY_PIECE_BYTES = (uint64_t)1 << 20;

static void copy_piece(void *arg, int64_t task, uint32_t worker) {
  const copy_job *j = arg;
  uint64_t at = (uint64_t)task * COPY_PIECE_BYTES, left = j->bytes - at;
  memcpy(j->dst + at, j->src + at, left < COPY_PIECE_BYTES ? left : COPY_PIECE_BYTES);
}

void ps__host_stream_copy(ps__host_stream *s, void *dst, const void *src, uint64_t bytes) {
  copy_job j = {dst, src, bytes};
  ps__pool_run(s->exec.pool, (int64_t)((bytes + COPY_PIECE_BYTES - 1) / COPY_PIECE_BYTES),
               copy_piece, &j);
}

void ps__host_stamp(int what, ps_trace_event *ev) {
  uint64_t now = ps__now_ns();
  if (what == PS__STAMP_QUEUED)
    ev->queued_ns = now;
  else if (what == PS__STAMP_START)
    ev->start_ns = now;
  else
    ev->end_ns = now;
}
