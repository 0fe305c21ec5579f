/* hold.c - updates wait for a checkpoint's writer, and the writer for updates, part by part. */
#include "train/hold.h"

typedef struct part {
  ps__counter made;    /* steps whose update of the part is done */
  ps__counter written; /* 1 + the n_steps of the last checkpoint that has read the part */
} part;

struct ps__hold {
  ps__counter reported;     /* steps whose report ran */
  ps__counter seen;         /* steps that the caller has seen */
  _Atomic uint64_t n_steps; /* whose state is held; UINT64_MAX: nothing was ever held */
  _Atomic uint64_t waited_ns;
  _Atomic uint32_t stopped, cancelled;
  uint32_t n_parts;
  part part[]; /* [unit][part] */
};

static size_t bytes_of(uint32_t n_parts) { return sizeof(ps__hold) + n_parts * sizeof(part); }

ps_status ps__hold_create(ps__hold **out, uint32_t n_units) {
  const uint32_t n = n_units * PS__N_PARTS;
  void *memory; /* mapped: counters are aligned to cache lines */
  PS_TRY(ps__map(&memory, bytes_of(n), "hold"));
  ps__hold *h = memory;
  h->n_parts = n;
  atomic_init(&h->n_steps, UINT64_MAX);
  ps__counter_init(&h->reported);
  ps__counter_init(&h->seen);
  for (uint32_t i = 0; i < n; i++) {
    ps__counter_init(&h->part[i].made);
    ps__counter_init(&h->part[i].written);
  }
  *out = h;
  return PS_OK;
}

void ps__hold_destroy(ps__hold *h) {
  if (h)
    ps__unmap(h, bytes_of(h->n_parts));
}

static part *part_of(ps__hold *h, uint32_t unit, uint32_t p) {
  return &h->part[unit * PS__N_PARTS + p];
}

ps_status ps__hold_check(const ps__hold *h) {
  return atomic_load(&h->cancelled) ? ps__fail(PS_ECANCELLED, "the run was cancelled") : PS_OK;
}

/* ---- updates --------------------------------------------------------------------------------- */

ps_status ps__hold_wait(ps__hold *h, uint32_t unit, uint32_t p, uint64_t step) {
  const uint64_t n_steps = atomic_load_explicit(&h->n_steps, memory_order_acquire);
  ps__counter *written = &part_of(h, unit, p)->written;
  if (step < n_steps || atomic_load_explicit(&written->value, memory_order_acquire) > n_steps)
    return PS_OK;
  const uint64_t begin = ps__now_ns();
  const bool free_now = ps__counter_wait(written, n_steps + 1, &h->cancelled);
  atomic_fetch_add(&h->waited_ns, ps__now_ns() - begin);
  return free_now ? PS_OK : ps__hold_check(h);
}

void ps__hold_made(ps__hold *h, uint32_t unit, uint32_t p, uint64_t step) {
  ps__counter_signal(&part_of(h, unit, p)->made, step + 1);
}

void ps__hold_reported(ps__hold *h, uint64_t step) { ps__counter_signal(&h->reported, step + 1); }

void ps__hold_seen(ps__hold *h, uint64_t n_steps) {
  if (n_steps > atomic_load(&h->seen.value))
    ps__counter_signal(&h->seen, n_steps);
}

/* ---- the writer ------------------------------------------------------------------------------ */

void ps__hold_begin(ps__hold *h, uint64_t n_steps) {
  atomic_store(&h->waited_ns, 0);
  atomic_store(&h->n_steps, n_steps);
}

static ps_status await(ps__hold *h, ps__counter *c) {
  const uint64_t n_steps = atomic_load(&h->n_steps);
  PS_TRY(ps__hold_check(h));
  if (ps__counter_wait(c, n_steps, &h->stopped))
    return PS_OK;
  PS_TRY(ps__hold_check(h));
  return ps__fail(PS_ESTATE, "an error has stopped the run before the checkpoint's step was whole");
}

ps_status ps__hold_await(ps__hold *h, uint32_t unit, uint32_t p) {
  return await(h, &part_of(h, unit, p)->made);
}

ps_status ps__hold_await_reported(ps__hold *h) { return await(h, &h->reported); }

ps_status ps__hold_await_seen(ps__hold *h) {
  PS_TRY(ps__hold_await_reported(h));
  /* an error of a later step does not matter: who ends the checkpoint says that it was seen */
  return ps__counter_wait(&h->seen, atomic_load(&h->n_steps), &h->cancelled) ? PS_OK
                                                                             : ps__hold_check(h);
}

void ps__hold_release(ps__hold *h, uint32_t unit, uint32_t p) {
  ps__counter_signal(&part_of(h, unit, p)->written, atomic_load(&h->n_steps) + 1);
}

void ps__hold_release_all(ps__hold *h) {
  for (uint32_t i = 0; i < h->n_parts; i++)
    ps__counter_signal(&h->part[i].written, atomic_load(&h->n_steps) + 1);
}

uint64_t ps__hold_waited_ns(const ps__hold *h) { return atomic_load(&h->waited_ns); }

/* A signal handler may call this. */
void ps__hold_stop(ps__hold *h, bool cancel) {
  if (cancel)
    atomic_store(&h->cancelled, 1);
  atomic_store(&h->stopped, 1);
  ps__counter_wake(&h->reported);
  ps__counter_wake(&h->seen);
  for (uint32_t i = 0; i < h->n_parts; i++) {
    ps__counter_wake(&h->part[i].made);
    ps__counter_wake(&h->part[i].written);
  }
}
