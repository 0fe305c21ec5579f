/* engine.c - open a device, reserve its spaces, keep one thread a driver. */
#include "engine/engine.h"
#include <string.h>

static const ps__backend *const backends[PS_N_BACKENDS] = {
    [PS_BACKEND_CPU] = &ps__backend_cpu,
#ifdef PS_CUDA
    [PS_BACKEND_CUDA] = &ps__backend_cuda,
#endif
};
static const uint64_t SPACE_UNIT_BYTES = (uint64_t)2 << 20;

static ps_status check_stream(const ps_engine_config *cfg, uint32_t i) {
  const ps_stream_config *s = &cfg->stream[i];
  if (s->kind > PS_STREAM_HOST)
    return ps__fail(PS_EINVAL, "engine: stream %u: kind %u is unknown", i, s->kind);
  if (s->n_threads == 0 || s->n_threads > 4096)
    return ps__fail(PS_EINVAL, "engine: stream %u: n_threads %u is not in 1..4096", i,
                    s->n_threads);
  if (s->scratch_bytes > (uint64_t)1 << 48)
    return ps__fail(PS_EINVAL, "engine: stream %u: scratch_bytes %llu is past 256 TiB", i,
                    (unsigned long long)s->scratch_bytes);
  if (!memchr(s->name, 0, sizeof s->name))
    return ps__fail(PS_EINVAL, "engine: stream %u: name has no end", i);
  return PS_OK;
}

static ps_status check_config(const ps_engine_config *cfg) {
  if (cfg->struct_bytes != sizeof *cfg)
    return ps__fail(PS_EINVAL, "engine: struct_bytes is %u, this library's is %zu",
                    cfg->struct_bytes, sizeof *cfg);
  if (cfg->backend >= PS_N_BACKENDS)
    return ps__fail(PS_EINVAL, "engine: backend %u is unknown", cfg->backend);
  if (!backends[cfg->backend])
    return ps__fail(PS_EDEVICE, "this library was built without CUDA: install the CUDA toolkit "
                                "(12.4 or newer) and run make CUDA=1, or "
                                "use the cpu backend");
  if (cfg->n_spaces == 0 || cfg->n_spaces > PS_MAX_SPACES)
    return ps__fail(PS_EINVAL, "engine: n_spaces %u is not in 1..%d", cfg->n_spaces, PS_MAX_SPACES);
  if (cfg->n_streams == 0 || cfg->n_streams > PS_MAX_STREAMS)
    return ps__fail(PS_EINVAL, "engine: n_streams %u is not in 1..%d", cfg->n_streams,
                    PS_MAX_STREAMS);
  for (uint32_t i = 0; i < cfg->n_spaces; i++) {
    if (cfg->space[i].kind > PS_SPACE_DEVICE)
      return ps__fail(PS_EINVAL, "engine: space %u: kind %u is unknown", i, cfg->space[i].kind);
    if (cfg->space[i].bytes > (uint64_t)1 << 48)
      return ps__fail(PS_EINVAL, "engine: space %u: bytes %llu is past 256 TiB", i,
                      (unsigned long long)cfg->space[i].bytes);
  }
  for (uint32_t i = 0; i < cfg->n_streams; i++)
    PS_TRY(check_stream(cfg, i));
  return PS_OK;
}

/* The engine whose driver this thread is. */
static _Thread_local ps_engine *driven;

bool ps__engine_drives(const ps_engine *e) { return e && driven == e; }

ps_engine *ps_op_engine(void) { return driven; }

static void driver_main(void *arg) {
  ps__driver *d = arg;
  ps_engine *e = d->engine;
  driven = e;
  e->backend->enter(e->device);
  for (uint64_t n = 1; ps__timeline_wait(&e->started, n, &e->stop); n++) {
    ps__run_drive(e->run, (uint32_t)(d - e->driver));
    e->backend->leave(e->device, d->number);
    ps__timeline_signal(&d->parked, n);
  }
}

static ps_status start_drivers(ps_engine *e) {
  for (uint32_t s = 0; s < e->cfg.n_streams; s++) {
    uint32_t number = e->backend->driver(&e->cfg, s), i = 0;
    while (i < e->n_drivers && e->driver[i].number != number)
      i++;
    if (i < e->n_drivers)
      continue;
    ps__driver *d = &e->driver[e->n_drivers];
    d->engine = e;
    d->number = number;
    ps__timeline_init(&d->parked);
    PS_TRY(ps__thread_start(&d->thread, driver_main, d,
                            e->cfg.stream[s].name[0] ? e->cfg.stream[s].name : "ps-stream"));
    e->n_drivers++;
  }
  return PS_OK;
}

static void release(ps_engine *e) {
  atomic_store(&e->stop, 1);
  ps__timeline_kick(&e->started);
  for (uint32_t i = 0; i < e->n_drivers; i++)
    ps__thread_join(e->driver[i].thread);
  for (uint32_t i = 0; i < e->cfg.n_spaces && e->device; i++)
    e->backend->unmap(e->device, &e->space[i]);
  e->backend->close(e->device);
  ps__unmap(e, sizeof *e);
}

static ps_status acquire(ps_engine *e) {
  PS_TRY(e->backend->open(&e->device, &e->cfg));
  for (uint32_t i = 0; i < e->cfg.n_spaces; i++) {
    uint64_t bytes =
        (e->cfg.space[i].bytes + SPACE_UNIT_BYTES - 1) / SPACE_UNIT_BYTES * SPACE_UNIT_BYTES;
    PS_TRY(e->backend->map(e->device, i, bytes, &e->space[i]));
  }
  return start_drivers(e);
}

ps_status ps_engine_create(ps_engine **out, const ps_engine_config *cfg) {
  PS_TRY(check_config(cfg));
  void *memory; /* mapped: timelines are aligned to cache lines */
  PS_TRY(ps__map(&memory, sizeof(ps_engine), "engine"));
  ps_engine *e = memory;
  e->cfg = *cfg;
  e->backend = backends[cfg->backend];
  ps__timeline_init(&e->started);
  ps_status st = acquire(e);
  if (st == PS_OK)
    *out = e;
  else
    release(e);
  return st;
}

ps_status ps__engine_warm(ps_engine *e, const ps_schedule *schedule) {
  if (e->run)
    return ps__fail(PS_EBUSY, "engine: a run lives");
  return e->backend->warm ? e->backend->warm(e->device, schedule) : PS_OK;
}

ps_status ps__engine_memory(ps_engine *e, uint64_t *out_bytes) {
  *out_bytes = 0;
  return e->backend->memory ? e->backend->memory(e->device, out_bytes) : PS_OK;
}

ps_status ps_engine_close(ps_engine *e) {
  if (!e)
    return PS_OK;
  if (e->run)
    return ps__fail(PS_EBUSY, "engine: a run still lives");
  release(e);
  return PS_OK;
}

void *ps_engine_space(ps_engine *e, uint32_t space) {
  return space < e->cfg.n_spaces ? e->space[space].host : NULL;
}

uint64_t ps_engine_space_bytes(const ps_engine *e, uint32_t space) {
  return space < e->cfg.n_spaces ? e->space[space].bytes : 0;
}

ps_status ps_engine_space_peak(const ps_engine *e, uint32_t space, uint64_t *out_bytes) {
  if (space >= e->cfg.n_spaces)
    return ps__fail(PS_EINVAL, "engine: space %u is not below %u", space, e->cfg.n_spaces);
  return e->backend->peak(e->device, &e->space[space], out_bytes);
}
