/* run.c - runs from their caller's side: a schedule bound to an engine, its steps, its end. */
#include "engine/pace.h"

/* ---- binding --------------------------------------------------------------------------------- */

/* Along which link a stream's copy goes, as the configuration counts them; n_links: along none. */
static uint32_t link_of(const ps_engine_config *cfg, uint32_t stream, const ps_access *access) {
  const uint32_t from = cfg->space[access[0].space].place, to = cfg->space[access[1].space].place;
  uint32_t i = 0;
  while (i < cfg->n_links &&
         (cfg->link[i].stream != stream || cfg->link[i].from != from || cfg->link[i].to != to))
    i++;
  return i;
}

/* Copies of a link reach pinned memory alone. */
static ps_status check_pinned(const ps_engine_config *cfg, const ps__op *op, size_t i,
                              const ps_access *access) {
  for (uint32_t a = 0; a < op->n_access; a++) {
    const uint64_t pageable = cfg->space[access[a].space].pageable_bytes;
    if (access[a].offset < pageable)
      return ps__fail(PS_EINVAL,
                      "run: op %zu (%s) copies byte %llu of space %u, of which the first %llu are "
                      "not pinned",
                      i, ps__op_name(op), (unsigned long long)access[a].offset, access[a].space,
                      (unsigned long long)pageable);
  }
  return PS_OK;
}

/* What an op does to the disk: PS_READ, PS_WRITE or 0. */
static uint32_t disk_mode(const ps_engine *e, const ps__op *op, const ps_access *access) {
  if (op->kernel || e->disk_space == PS__NO_SPACE)
    return 0;
  return access[0].space == e->disk_space   ? PS_READ
         : access[1].space == e->disk_space ? PS_WRITE
                                            : 0;
}

static ps_status check_sectors(const ps_engine *e, const ps__op *op, const ps_access *access,
                               size_t i) {
  for (uint32_t a = 0; a < op->n_access && disk_mode(e, op, access); a++)
    if (access[a].offset % PS__DISK_ALIGN || access[a].bytes % PS__DISK_ALIGN)
      return ps__fail(PS_EINVAL,
                      "run: op %zu (%s) copies %llu bytes at %llu, and copies of a disk are of "
                      "whole sectors of %d bytes",
                      i, ps__op_name(op), (unsigned long long)access[a].bytes,
                      (unsigned long long)access[a].offset, PS__DISK_ALIGN);
  return PS_OK;
}

/* An op runs where its stream does: it touches that place and hosts; on a stream of links it copies
 * along one of them. */
static ps_status check_place(const ps_engine *e, const ps__oplist *l, size_t i) {
  const ps_engine_config *cfg = &e->cfg;
  const ps__op *op = &l->ops[i];
  const ps_access *access = &l->access[op->access];
  const ps_place *place = ps__stream_place(cfg, op->stream);
  if (op->kernel && !op->kernel->fn[place->backend])
    return ps__fail(PS_EINVAL, "run: kernel %s (op %zu) has no function on stream %u of backend %s",
                    op->kernel->name, i, op->stream, e->backends[place->backend]->name);
  if (ps__has_links(cfg, op->stream))
    return !op->kernel && link_of(cfg, op->stream, access) < cfg->n_links
               ? disk_mode(e, op, access) ? check_sectors(e, op, access, i)
                                          : check_pinned(cfg, op, i, access)
               : ps__fail(PS_EINVAL, "run: op %zu (%s) is no copy along a link of stream %u", i,
                          ps__op_name(op), op->stream);
  for (uint32_t a = 0; a < op->n_access; a++) {
    const ps_place *touched = ps__space_place(cfg, access[a].space);
    if (touched != place && touched->kind != PS_PLACE_HOST)
      return ps__fail(PS_EINVAL,
                      "run: op %zu (%s) of stream %u at place %u touches space %u, which is at "
                      "place %u, a device",
                      i, ps__op_name(op), op->stream, cfg->stream[op->stream].place,
                      access[a].space, cfg->space[access[a].space].place);
  }
  return PS_OK;
}

static ps_status check_binding(const ps_engine *e, const ps_schedule *s, const ps_run_config *cfg) {
  const ps__oplist *l = &s->list;
  if (cfg->struct_bytes != sizeof *cfg)
    return ps__fail(PS_EINVAL, "run: struct_bytes is %u, this library's is %zu", cfg->struct_bytes,
                    sizeof *cfg);
  if (l->n_spaces > e->cfg.n_spaces || l->n_streams > e->cfg.n_streams)
    return ps__fail(PS_EINVAL,
                    "run: the schedule uses %u spaces and %u streams, the engine has %u and %u",
                    l->n_spaces, l->n_streams, e->cfg.n_spaces, e->cfg.n_streams);
  for (uint32_t i = 0; i < l->n_spaces; i++)
    if (l->space_bytes[i] > e->space[i].bytes)
      return ps__fail(
          PS_EINVAL, "run: the schedule uses %llu bytes of space %u, the engine has %llu",
          (unsigned long long)l->space_bytes[i], i, (unsigned long long)e->space[i].bytes);
  for (size_t i = 0; i < l->n_ops; i++)
    PS_TRY(check_place(e, l, i));
  return PS_OK;
}

static uint32_t driver_of(const ps_engine *e, uint32_t stream) {
  uint32_t i = 0, number = e->backend->driver(&e->cfg, stream);
  while (e->driver[i].number != number)
    i++;
  return i;
}

static void resolve(ps_run *r) {
  const ps_engine *e = r->engine;
  const ps__oplist *l = &r->schedule->list;
  uint32_t driver[PS_MAX_STREAMS];
  size_t next[PS_MAX_STREAMS] = {0};
  for (uint32_t s = 0; s < l->n_streams; s++) {
    driver[s] = driver_of(e, s);
    r->driver_first[driver[s] + 1] += l->stream_n_ops[s];
  }
  for (uint32_t d = 0; d < PS_MAX_STREAMS; d++)
    r->driver_first[d + 1] += r->driver_first[d];
  for (size_t i = 0; i < l->n_ops; i++) {
    const ps__op *op = &l->ops[i];
    void **ptr = r->ptrs + op->access;
    for (uint32_t a = 0; a < op->n_access; a++)
      ptr[a] =
          (char *)e->space[l->access[op->access + a].space].addr + l->access[op->access + a].offset;
    uint32_t d = driver[op->stream];
    r->steps[r->driver_first[d] + next[d]++] = (ps__resolved){
        .fn = op->kernel ? op->kernel->fn[ps__stream_place(&e->cfg, op->stream)->backend] : NULL,
        .args = l->args + op->args,
        .ptr = ptr,
        .wait = r->schedule->waits + op->wait,
        .exec = e->backend->exec(e->device, op->stream),
        .op = i,
        .position = op->position,
        .bytes = op->kernel ? 0 : l->access[op->access].bytes,
        .n_ptr = op->n_access,
        .n_wait = op->n_wait,
        .stream = op->stream,
        .disk = disk_mode(e, op, &l->access[op->access])};
  }
}

static void release(ps_run *r) {
  ps__free(r->steps);
  ps__free(r->ptrs);
  ps__free(r->events);
  ps__paced_destroy(r);
  ps__unmap(r, sizeof *r);
}

/* Gives the engine to a run. Its streams count their ops from the next step on. */
static ps_status begin(ps_run *r) {
  ps_engine *e = r->engine;
  if (e->run)
    return ps__fail(PS_EBUSY, "run: the engine has a run already");
  PS_TRY(e->backend->prepare(e->device, r->schedule, r->trace_steps));
  atomic_store(&r->first, atomic_load(&r->allowed.value));
  atomic_store(&r->paused, 0);
  /* a cancel may come at any time: it stores stop before idle */
  atomic_store(&r->idle, 0);
  if (atomic_load(&r->stop))
    atomic_store(&r->idle, 1);
  if (r->paced)
    ps__paced_begin(r);
  e->run = r;
  ps__counter_signal(&e->started, ++e->n_runs);
  return PS_OK;
}

ps_status ps__run_create(ps_run **out, ps_engine *engine, ps_schedule *schedule,
                         const ps_run_config *cfg) {
  PS_TRY(check_binding(engine, schedule, cfg));
  const ps__oplist *l = &schedule->list;
  void *memory; /* mapped: counters are aligned to cache lines */
  PS_TRY(ps__map(&memory, sizeof(ps_run), "run"));
  ps_run *r = memory;
  ps__counter_init(&r->allowed);
  atomic_init(&r->limit, UINT64_MAX);
  r->engine = engine;
  r->schedule = schedule;
  r->trace_steps = cfg->trace_steps;
  r->trace_from = cfg->trace_from;
  r->trace_to = cfg->trace_to ? cfg->trace_to : UINT64_MAX;
  r->steps = ps__calloc(l->n_ops, sizeof *r->steps);
  r->ptrs = ps__calloc(l->n_access, sizeof *r->ptrs);
  if (cfg->trace_steps && l->n_ops <= SIZE_MAX / sizeof *r->events / cfg->trace_steps)
    r->events = ps__calloc(l->n_ops * cfg->trace_steps, sizeof *r->events);
  if (!r->steps || !r->ptrs || (cfg->trace_steps && !r->events)) {
    release(r);
    return ps__fail(PS_ENOMEM, "run: out of memory for %zu ops and a trace of %u steps", l->n_ops,
                    cfg->trace_steps);
  }
  resolve(r);
  r->start_ns = ps__engine_now(engine, PS__CALLER);
  ps_status st = engine->pace ? ps__paced_create(r) : PS_OK;
  if (st == PS_OK)
    st = begin(r);
  if (st != PS_OK) {
    release(r);
    return st;
  }
  atomic_fetch_add(&schedule->n_runs, 1);
  engine->n_living++;
  *out = r;
  return PS_OK;
}

ps_status ps_run_create(ps_run **out, ps_engine *engine, ps_schedule *schedule,
                        const ps_run_config *cfg) {
  if (schedule->of_plan)
    return ps__fail(PS_ESTATE, "run: a plan's schedule runs under a trainer only, on the trainer's "
                               "own engine: make a trainer of the plan");
  return ps__run_create(out, engine, schedule, cfg);
}

/* ---- the caller's side ----------------------------------------------------------------------- */

ps_status ps_run_submit(ps_run *r, uint64_t n_steps) {
  PS_TRY(ps__run_sticky(r));
  if (atomic_load(&r->paused))
    return ps__fail(PS_ESTATE, "run: it is paused and takes no steps");
  const uint64_t n_ops = r->schedule->list.n_ops ? r->schedule->list.n_ops : 1,
                 before = ps__run_submitted(r);
  if (n_steps > UINT64_MAX / n_ops - 1 - before)
    return ps__fail(PS_EINVAL, "run: %llu more steps are too many", (unsigned long long)n_steps);
  if (r->paced)
    ps__paced_submit(r, before, before + n_steps);
  ps__counter_signal(&r->allowed, before + n_steps);
  return PS_OK;
}

static bool caller_waits(ps_run *r, uint64_t n_steps) {
  const ps__oplist *l = &r->schedule->list;
  const ps_engine *e = r->engine;
  const uint64_t first = atomic_load(&r->first);
  for (uint32_t s = 0; s < l->n_streams && n_steps > first; s++)
    if (l->stream_n_ops[s] &&
        !e->backend->wait(e->device, PS__CALLER, s, (n_steps - first) * l->stream_n_ops[s],
                          &r->progress[PS_MAX_STREAMS].leave))
      return false;
  return true;
}

/* Sleep until every stream has done @n_steps, or all of the fewer steps that will be done. */
static void wait_steps(ps_run *r, uint64_t n_steps) {
  ps__progress *me = &r->progress[PS_MAX_STREAMS];
  for (;;) {
    uint64_t limit = atomic_load(&r->limit), n = n_steps < limit ? n_steps : limit;
    if (n == 0 || atomic_load(&r->paused))
      return;
    atomic_store(&me->leave, 0);
    atomic_store(&me->at, n - 1);
    if (atomic_load(&r->limit) < n)
      continue;
    if (caller_waits(r, n))
      return;
    if (!atomic_load(&me->leave))
      ps__run_fail_device(r, r->engine->backend->health(r->engine->device));
  }
}

ps_status ps_run_wait(ps_run *r, uint64_t n_steps) {
  if (ps__engine_drives(r->engine))
    return ps__fail(
        PS_ESTATE,
        "run: an op of it cannot wait for it, which would be for itself: wait on another thread");
  const uint64_t allowed = ps__run_submitted(r), n = n_steps < allowed ? n_steps : allowed;
  wait_steps(r, n);
  if (atomic_load(&r->limit) < n_steps)
    return ps__run_sticky(r);
  if (n_steps > allowed)
    return ps__fail(PS_EINVAL, "run: %llu steps awaited, %llu submitted",
                    (unsigned long long)n_steps, (unsigned long long)allowed);
  if (r->paced)
    ps__paced_waited(r, n_steps);
  return PS_OK;
}

int ps_run_at_rest(const ps_run *r) {
  const ps_engine *e = r->engine;
  if (atomic_load(&r->paused) || ps_run_steps_done(r) >= ps__run_submitted(r))
    return 1;
  if (!atomic_load(&r->stop))
    return 0;
  for (uint32_t i = 0; i < e->n_drivers; i++)
    if (atomic_load(&e->driver[i].parked.value) < e->n_runs)
      return 0;
  return 1;
}

static const ps__op *op_at(const ps__oplist *l, uint32_t stream, uint64_t position) {
  size_t i = 0;
  while (i < l->n_ops && (l->ops[i].stream != stream || l->ops[i].position != position))
    i++;
  return i < l->n_ops ? &l->ops[i] : NULL;
}

void ps_run_where(const ps_run *r, char *text, uint64_t bytes) {
  const ps_engine *e = r->engine;
  const ps__oplist *l = &r->schedule->list;
  const uint64_t n_submitted = ps__run_submitted(r);
  uint64_t done[PS_MAX_STREAMS], at = 0;
  char where[96], name[160], stream[96];
#define SAY(...) at += at < bytes ? (uint64_t)snprintf(text + at, bytes - at, __VA_ARGS__) : 0
  if (bytes)
    text[0] = 0;
  if (atomic_load(&r->paused))
    return;
  const uint64_t first = atomic_load(&r->first);
  for (uint32_t s = 0; s < l->n_streams; s++)
    done[s] = e->backend->counter(e->device, s);
  for (uint32_t s = 0; s < l->n_streams; s++) {
    const uint64_t n = l->stream_n_ops[s], step = n ? done[s] / n : 0;
    const ps__op *op = n ? op_at(l, s, done[s] % n) : NULL;
    if (!op)
      continue;
    SAY("%s%s: ", at ? "\n" : "", ps_printable(stream, sizeof stream, e->cfg.stream[s].name));
    if (first + step >= n_submitted) {
      SAY("all of the %llu submitted steps ended", (unsigned long long)n_submitted);
      continue;
    }
    ps__describe_tag(where, sizeof where, &op->tag);
    SAY("step %llu, %llu of %llu ops ended, then %s%s", (unsigned long long)(first + step + 1),
        (unsigned long long)(done[s] % n), (unsigned long long)n,
        ps_printable(name, sizeof name, ps__op_name(op)), where);
    bool waits = false;
    for (uint32_t i = 0; i < op->n_wait; i++) {
      const ps_wait *w = &r->schedule->waits[op->wait + i];
      if (w->steps_back > step)
        continue;
      const uint64_t value = (step - w->steps_back) * l->stream_n_ops[w->stream] + w->value;
      if (done[w->stream] >= value)
        continue;
      SAY("; waits for %s to end %llu more",
          ps_printable(stream, sizeof stream, e->cfg.stream[w->stream].name),
          (unsigned long long)(value - done[w->stream]));
      waits = true;
    }
    SAY("%s", waits ? "" : ", which runs");
  }
#undef SAY
}

/* Until every driver has left the run. */
static void wait_parked(const ps_run *r) {
  for (uint32_t i = 0; i < r->engine->n_drivers; i++)
    ps__counter_wait(&r->engine->driver[i].parked, r->engine->n_runs, NULL);
}

void ps__run_rest(ps_run *r) {
  wait_steps(r, ps__run_submitted(r));
  ps__run_stop(r, 0);
  if (!atomic_load(&r->paused))
    wait_parked(r);
}

ps_status ps__run_pause(ps_run *r) {
  ps_engine *e = r->engine;
  if (atomic_load(&r->paused))
    return ps__run_sticky(r);
  const ps_status st = ps_run_wait(r, ps__run_submitted(r));
  atomic_store(&r->idle, 1);
  ps__counter_wake(&r->allowed);
  wait_parked(r);
  if (r->trace_steps)
    e->backend->settle(e->device, r->events);
  atomic_store(&r->paused, 1);
  e->backend->finish(e->device);
  e->run = NULL;
  return st;
}

ps_status ps__run_go_on(ps_run *r) {
  PS_TRY(ps__run_sticky(r));
  return atomic_load(&r->paused) ? begin(r) : PS_OK;
}

ps_status ps_run_destroy(ps_run *r) {
  if (!r)
    return PS_OK;
  if (ps__engine_drives(r->engine))
    return ps__fail(PS_ESTATE, "run: an op of it cannot close it, which would wait for that op: "
                               "close it on another thread");
  ps__run_rest(r);
  if (!atomic_load(&r->paused)) {
    r->engine->backend->finish(r->engine->device);
    r->engine->run = NULL;
  }
  r->engine->n_living--;
  atomic_fetch_sub(&r->schedule->n_runs, 1);
  release(r);
  return PS_OK;
}
