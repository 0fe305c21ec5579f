/* engine.c - open a device, reserve its spaces, keep one thread a driver. */
#include "engine/engine.h"
#include "engine/pin.h"
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

static const uint64_t SPACE_UNIT_BYTES = (uint64_t)2 << 20, PAGEABLE_UNIT_BYTES = 64 << 10;

static ps_status check_place(const ps_engine_config *cfg, const ps__backend *const *backends,
                             uint32_t i) {
  const ps_place *p = &cfg->place[i];
  if (p->kind > PS_PLACE_DISK)
    return ps__fail(PS_EINVAL, "engine: place %u: kind %u is unknown", i, p->kind);
  if (p->backend >= PS_N_BACKENDS)
    return ps__fail(PS_EINVAL, "engine: place %u: backend %u is unknown", i, p->backend);
  if (p->kind != PS_PLACE_DEVICE && p->backend != PS_BACKEND_CPU)
    return ps__fail(PS_EINVAL, "engine: place %u: backend %u, but the %s's is %d", i, p->backend,
                    p->kind == PS_PLACE_HOST ? "host" : "disk", PS_BACKEND_CPU);
  for (uint32_t k = 0; k < i; k++)
    if (p->kind == PS_PLACE_DEVICE && cfg->place[k].kind == PS_PLACE_DEVICE &&
        cfg->place[k].backend != p->backend)
      return ps__fail(PS_EINVAL, "engine: place %u: backend %u, but that of place %u is %u", i,
                      p->backend, k, cfg->place[k].backend);
  if (!backends[p->backend])
    return ps__fail(PS_EDEVICE, "this library was built without CUDA: install the CUDA toolkit "
                                "(12.4 or newer) and run make CUDA=1, or "
                                "use the cpu backend");
  return PS_OK;
}

static ps_status check_link(const ps_engine_config *cfg, uint32_t i) {
  const ps_link *k = &cfg->link[i];
  if (k->from >= cfg->n_places || k->to >= cfg->n_places || k->from == k->to)
    return ps__fail(PS_EINVAL, "engine: link %u: from %u to %u: no two of %u places", i, k->from,
                    k->to, cfg->n_places);
  if (k->stream >= cfg->n_streams)
    return ps__fail(PS_EINVAL, "engine: link %u: stream %u is not below %u", i, k->stream,
                    cfg->n_streams);
  return PS_OK;
}

static ps_status check_space(const ps_engine_config *cfg, uint32_t i) {
  const ps_space_config *s = &cfg->space[i];
  if (s->place >= cfg->n_places)
    return ps__fail(PS_EINVAL, "engine: space %u: place %u is not below %u", i, s->place,
                    cfg->n_places);
  if (s->bytes > (uint64_t)1 << 48)
    return ps__fail(PS_EINVAL, "engine: space %u: bytes %llu is past 256 TiB", i,
                    (unsigned long long)s->bytes);
  if (s->pageable_bytes > s->bytes ||
      (s->pageable_bytes && cfg->place[s->place].kind != PS_PLACE_HOST))
    return ps__fail(PS_EINVAL,
                    "engine: space %u: pageable_bytes %llu: at most the %llu of a host's "
                    "space are possible",
                    i, (unsigned long long)s->pageable_bytes, (unsigned long long)s->bytes);
  return PS_OK;
}

static ps_status check_stream(const ps_engine_config *cfg, uint32_t i) {
  const ps_stream_config *s = &cfg->stream[i];
  if (s->place >= cfg->n_places)
    return ps__fail(PS_EINVAL, "engine: stream %u: place %u is not below %u", i, s->place,
                    cfg->n_places);
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

static uint64_t arena_bytes(const ps_space_config *s) {
  return (s->bytes + SPACE_UNIT_BYTES - 1) / SPACE_UNIT_BYTES * SPACE_UNIT_BYTES;
}

/* What a place's spaces and overhead take is within its cap. */
static ps_status check_cap(const ps_engine_config *cfg, uint32_t i) {
  const ps_place *p = &cfg->place[i];
  uint64_t arenas = 0;
  char spaces[32], overhead[32], cap[32];
  for (uint32_t k = 0; k < cfg->n_spaces; k++)
    if (cfg->space[k].place == i)
      arenas += arena_bytes(&cfg->space[k]);
  if (!p->cap_bytes || (arenas <= p->cap_bytes && p->overhead_bytes <= p->cap_bytes - arenas))
    return PS_OK;
  return ps__fail(PS_EBUDGET,
                  "engine: place %u: spaces of %s and an overhead of %s exceed its cap of %s", i,
                  ps__format_bytes(spaces, arenas), ps__format_bytes(overhead, p->overhead_bytes),
                  ps__format_bytes(cap, p->cap_bytes));
}

/* At most one disk, with one space, and directories where it is. */
static ps_status check_disk(const ps_engine_config *cfg) {
  uint32_t n_disks = 0, n_spaces = 0;
  for (uint32_t i = 0; i < cfg->n_places; i++)
    n_disks += cfg->place[i].kind == PS_PLACE_DISK;
  for (uint32_t i = 0; i < cfg->n_spaces; i++)
    n_spaces += ps__space_place(cfg, i)->kind == PS_PLACE_DISK;
  if (n_disks > 1 || n_spaces > 1)
    return ps__fail(PS_EINVAL, "engine: %u disks with %u spaces: one with one is possible", n_disks,
                    n_spaces);
  if (cfg->n_drives > PS_MAX_DRIVES || (n_spaces && !cfg->n_drives))
    return ps__fail(PS_EINVAL, "engine: n_drives %u: a disk has 1 to %d directories", cfg->n_drives,
                    PS_MAX_DRIVES);
  for (uint32_t i = 0; i < cfg->n_drives; i++)
    if (!cfg->drive[i])
      return ps__fail(PS_EINVAL, "engine: drive %u has no directory", i);
  return PS_OK;
}

static ps_status check_counts(const ps_engine_config *cfg) {
  const struct {
    const char *name;
    uint32_t n, least, most;
  } count[] = {{"n_places", cfg->n_places, 1, PS_MAX_PLACES},
               {"n_links", cfg->n_links, 0, PS_MAX_LINKS},
               {"n_spaces", cfg->n_spaces, 1, PS_MAX_SPACES},
               {"n_streams", cfg->n_streams, 1, PS_MAX_STREAMS}};
  for (size_t i = 0; i < sizeof count / sizeof *count; i++)
    if (count[i].n < count[i].least || count[i].n > count[i].most)
      return ps__fail(PS_EINVAL, "engine: %s %u is not in %u..%u", count[i].name, count[i].n,
                      count[i].least, count[i].most);
  return PS_OK;
}

static ps_status check_config(const ps_engine_config *cfg, const ps__backend *const *backends) {
  if (cfg->struct_bytes != sizeof *cfg)
    return ps__fail(PS_EINVAL, "engine: struct_bytes is %u, this library's is %zu",
                    cfg->struct_bytes, sizeof *cfg);
  PS_TRY(check_counts(cfg));
  for (uint32_t i = 0; i < cfg->n_places; i++)
    PS_TRY(check_place(cfg, backends, i));
  for (uint32_t i = 0; i < cfg->n_links; i++)
    PS_TRY(check_link(cfg, i));
  for (uint32_t i = 0; i < cfg->n_spaces; i++)
    PS_TRY(check_space(cfg, i));
  PS_TRY(check_disk(cfg));
  for (uint32_t i = 0; i < cfg->n_streams; i++)
    PS_TRY(check_stream(cfg, i));
  for (uint32_t i = 0; i < cfg->n_places; i++)
    PS_TRY(check_cap(cfg, i));
  return PS_OK;
}

static uint32_t backend_of(const ps_engine_config *cfg) {
  for (uint32_t i = 0; i < cfg->n_places; i++)
    if (cfg->place[i].kind == PS_PLACE_DEVICE)
      return cfg->place[i].backend;
  return PS_BACKEND_CPU;
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
  for (uint64_t n = 1; ps__counter_wait(&e->started, n, &e->stop); n++) {
    ps__run_drive(e->run, (uint32_t)(d - e->driver));
    e->backend->leave(e->device, d->number);
    ps__counter_signal(&d->parked, n);
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
    ps__counter_init(&d->parked);
    PS_TRY(ps__thread_start(&d->thread, driver_main, d,
                            e->cfg.stream[s].name[0] ? e->cfg.stream[s].name : "ps-stream"));
    e->n_drivers++;
  }
  return PS_OK;
}

/* Addresses of the disk's space, so that an op's operands there have some. Nobody touches them. */
static ps_status reserve_addresses(ps__mapping *m, uint64_t bytes) {
  void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return ps__fail(PS_ENOMEM, "engine: %llu bytes of addresses for the disk were refused: %s",
                    (unsigned long long)bytes, strerror(errno));
  *m = (ps__mapping){.addr = p, .bytes = bytes};
  return PS_OK;
}

/* The disk comes first: what it lacks is said before memory is reserved. */
static ps_status open_disk(ps_engine *e) {
  e->disk_space = PS__NO_SPACE;
  for (uint32_t i = 0; i < e->cfg.n_spaces; i++)
    if (ps__space_place(&e->cfg, i)->kind == PS_PLACE_DISK)
      e->disk_space = i;
  const uint64_t bytes =
      e->disk_space == PS__NO_SPACE ? 0 : arena_bytes(&e->cfg.space[e->disk_space]);
  if (!bytes)
    return PS_OK;
  PS_TRY(ps__disk_check(e->cfg.drive, e->cfg.n_drives, bytes));
  PS_TRY(reserve_addresses(&e->space[e->disk_space], bytes));
  return ps__disk_open(&e->disk, e->cfg.drive, e->cfg.n_drives, bytes);
}

static void release(ps_engine *e) {
  atomic_store(&e->stop, 1);
  ps__counter_wake(&e->started);
  for (uint32_t i = 0; i < e->n_drivers; i++)
    ps__thread_join(e->driver[i].thread);
  for (uint32_t i = 0; i < e->cfg.n_spaces && e->device; i++)
    if (i != e->disk_space)
      e->backend->unmap(e->device, &e->space[i]);
  if (e->disk_space != PS__NO_SPACE && e->space[e->disk_space].addr)
    munmap(e->space[e->disk_space].addr, e->space[e->disk_space].bytes);
  ps__disk_close(e->disk);
  e->backend->close(e->device);
  ps__unmap(e, sizeof *e);
}

static ps_status acquire(ps_engine *e) {
  ps__pin_begin();
  PS_TRY(open_disk(e));
  PS_TRY(e->backend->open(&e->device, &e->cfg));
  for (uint32_t i = 0; i < e->cfg.n_spaces; i++)
    if (i != e->disk_space)
      PS_TRY(e->backend->map(e->device, i, arena_bytes(&e->cfg.space[i]), &e->space[i]));
  return start_drivers(e);
}

ps_status ps__engine_create(ps_engine **out, const ps_engine_config *cfg,
                            const ps__backend *const backends[PS_N_BACKENDS]) {
  PS_TRY(check_config(cfg, backends));
  void *memory; /* mapped: counters are aligned to cache lines */
  PS_TRY(ps__map(&memory, sizeof(ps_engine), "engine"));
  ps_engine *e = memory;
  e->cfg = *cfg;
  for (uint32_t i = 0; i < cfg->n_spaces; i++)
    e->cfg.space[i].pageable_bytes -= cfg->space[i].pageable_bytes % PAGEABLE_UNIT_BYTES;
  e->backends = backends;
  e->backend = backends[backend_of(cfg)];
  ps__counter_init(&e->started);
  ps_status st = acquire(e);
  e->cfg.n_drives = 0; /* the caller's */
  if (st == PS_OK)
    *out = e;
  else
    release(e);
  return st;
}

ps_status ps__engine_warm(ps_engine *e, const ps_schedule *schedule) {
  if (e->n_living)
    return ps__fail(PS_EBUSY, "engine: a run lives");
  return e->backend->warm ? e->backend->warm(e->device, schedule) : PS_OK;
}

ps_status ps__engine_memory(ps_engine *e, uint32_t place, uint64_t *out_bytes) {
  *out_bytes = 0;
  return e->backend->memory ? e->backend->memory(e->device, place, out_bytes) : PS_OK;
}

ps_status ps__engine_net(ps_engine *e, const struct ps__net_device *lanes) {
  return e->backend->use_net
             ? e->backend->use_net(e->device, lanes)
             : ps__fail(PS_EDEVICE, "the %s backend has no device for NCCL", e->backend->name);
}

ps_status ps__engine_profile(ps_engine *e, bool on) {
  return e->backend->profile ? e->backend->profile(e->device, on) : PS_OK;
}

static ps_status transfer(ps_engine *e, void *dst, const void *src, uint64_t bytes) {
  if (e->backend->transfer)
    return e->backend->transfer(e->device, dst, src, bytes);
  memcpy(dst, src, bytes);
  return PS_OK;
}

ps_status ps__engine_read(ps_engine *e, uint32_t space, uint64_t offset, void *dst,
                          uint64_t bytes) {
  if (space == e->disk_space)
    return ps__disk_move(e->disk, false, offset, dst, bytes);
  return transfer(e, dst, (const char *)e->space[space].addr + offset, bytes);
}

ps_status ps__engine_write(ps_engine *e, uint32_t space, uint64_t offset, const void *src,
                           uint64_t bytes) {
  if (space == e->disk_space)
    return ps__disk_move(e->disk, true, offset, (void *)(uintptr_t)src, bytes);
  return transfer(e, (char *)e->space[space].addr + offset, src, bytes);
}

void ps__engine_awaited(ps_engine *e, bool on) {
  if (e->backend->awaited)
    e->backend->awaited(e->device, on);
}

ps_status ps_engine_close(ps_engine *e) {
  if (!e)
    return PS_OK;
  if (e->n_living)
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

uint64_t ps_engine_space_pinned(const ps_engine *e, uint32_t space) {
  return space < e->cfg.n_spaces && ps__space_place(&e->cfg, space)->kind == PS_PLACE_HOST
             ? e->space[space].bytes - e->cfg.space[space].pageable_bytes
             : 0;
}

ps_status ps_engine_space_peak(const ps_engine *e, uint32_t space, uint64_t *out_bytes) {
  if (space >= e->cfg.n_spaces)
    return ps__fail(PS_EINVAL, "engine: space %u is not below %u", space, e->cfg.n_spaces);
  if (space == e->disk_space) {
    *out_bytes = e->space[space].bytes;
    return PS_OK;
  }
  return e->backend->peak(e->device, &e->space[space], out_bytes);
}
