/* arena.c - the rates of a training's host memory, measured on its arena. */
#include "hardware/arena.h"
#include "hardware/loads.h"
#include <math.h>
#include <time.h>

enum {
  IN = PS_CONTENTION_H2D,
  OUT = PS_CONTENTION_D2H,
  SUMS = PS_CONTENTION_SUMS,
  ADAMW = PS_CONTENTION_OPTIMIZER,
  BOTH = IN | OUT
};
const uint32_t ps__arena_case[PS__ARENA_CASES] = {SUMS,       ADAMW,       IN,          OUT,
                                                  BOTH,       SUMS | IN,   SUMS | OUT,  SUMS | BOTH,
                                                  ADAMW | IN, ADAMW | OUT, ADAMW | BOTH};

/* Of the four arrays of a place. The least still keeps all threads busy with a sixteenth of it. */
static const uint64_t MOST_BUFFER = 1ull << 30, LEAST_BUFFER = 4ull << 20;

uint64_t ps__arena_least_bytes(const ps__arena *a) {
  const uint64_t least = a->n_places * 4ull * LEAST_BUFFER;
  return a->device && least < 2ull * PS__COPY_BYTES ? 2ull * PS__COPY_BYTES : least;
}

static double wait_for(double seconds) {
  const uint64_t begin = ps__now_ns();
  const double ns = seconds * 1e9;
  const struct timespec t = {(time_t)seconds, (long)(ns - 1e9 * (double)(time_t)seconds)};
  (void)nanosleep(&t, NULL);
  return (double)(ps__now_ns() - begin) * 1e-9;
}

static ps_status alone(const ps__host_load *l, double seconds, ps_contention_rate *out) {
  PS_TRY(l->start(l->arg));
  wait_for(seconds / 2);
  const double before = l->bytes(l->arg), s = wait_for(seconds / 2);
  *out = (ps_contention_rate){
      .kinds = l->kind, .threads = l->threads, .host_bytes_per_s = (l->bytes(l->arg) - before) / s};
  l->stop(l->arg);
  return PS_OK;
}

/* Pages get memory when they are first written: before anything is timed. */
static void touch_set(void *arg, int64_t set, uint32_t worker) {
  const ps__host_bench *b = arg;
  (void)worker;
  for (uint64_t at = 0; at < b->set_bytes; at += 4096)
    *(volatile char *)(b->memory + (uint64_t)set * b->set_bytes + at) = 0;
}

static ps_status run_cases(const ps__arena *a, const ps__host_work *work, double seconds,
                           ps_contention_rate out[PS__ARENA_CASES], uint32_t *n) {
#ifdef PS_CUDA
  if (a->device) {
    *n = PS__ARENA_CASES;
    return ps__cuda_measure_arena(a->hw, a->device, work, ps__arena_case, *n, seconds, out);
  }
#endif
  *n = work->n_loads;
  for (uint32_t i = 0; i < *n; i++)
    PS_TRY(alone(&work->load[i], seconds, &out[i]));
  return PS_OK;
}

ps_status ps__arena_measure(const ps__arena *a, double seconds,
                            ps_contention_rate out[PS__ARENA_CASES], uint32_t *n) {
  char need[32], have[32];
  const uint64_t least = ps__arena_least_bytes(a), page = 4096;
  if (!a->n_places || a->host_bytes < least)
    return ps__fail(PS_EBUDGET, "measuring an arena in %u places takes %s, it has %s", a->n_places,
                    ps__format_bytes(need, least), ps__format_bytes(have, a->host_bytes));
  ps__host_bench b = {.memory = a->host,
                      .set_bytes = a->host_bytes / a->n_places / page * page,
                      .n_sets = a->n_places,
                      .beside_gpu = a->hw->backend == PS_BACKEND_CUDA};
  b.bytes = b.set_bytes / 4 / page * page;
  if (b.bytes > MOST_BUFFER)
    b.bytes = MOST_BUFFER;
  ps__host_places at = {.first = a->host, .n = 1};
  if (a->device) { /* copies take all of it, in pieces */
    at.stride = 2ull * PS__COPY_BYTES;
    at.n = (uint32_t)(a->host_bytes / at.stride);
  }
  ps__host_loads l = {.n = 0};
  ps_status st = ps__pool_create(&b.exec.pool, a->hw->n_threads, "arena");
  if (st == PS_OK && a->hw->backend == PS_BACKEND_CPU)
    ps__pool_run(b.exec.pool, b.n_sets, touch_set, &b);
  if (st == PS_OK)
    st = ps__host_loads_create(&l, &b, a->hw->n_threads, 1);
  const ps__host_work work = {at, l.load, l.n};
  if (st == PS_OK)
    st = run_cases(a, &work, seconds, out, n);
  ps__host_loads_destroy(&l);
  ps__pool_destroy(b.exec.pool);
  return st;
}

/* ---- beside what is known -------------------------------------------------------------------- */

static double *rate_at(ps_contention_rate *r, uint32_t kind) {
  return kind == IN    ? &r->h2d_bytes_per_s
         : kind == OUT ? &r->d2h_bytes_per_s
                       : &r->host_bytes_per_s;
}

/* The rate of @hw for work of @kind in the row of @kinds; NULL: it has none. */
static double *known_at(ps_hardware *hw, uint32_t kinds, uint32_t kind) {
  for (ps_contention_rate *r = hw->contention;
       r < hw->contention + PS_MAX_CONTENTION_RATES && r->kinds; r++)
    if (r->kinds == kinds) /* the first is on all threads */
      return rate_at(r, kind);
  switch (kinds) {
  case IN: return &hw->link[PS_LINK_H2D].bytes_per_s;
  case OUT: return &hw->link[PS_LINK_D2H].bytes_per_s;
  case BOTH: return &hw->link[kind == IN ? PS_LINK_H2D : PS_LINK_D2H].duplex_bytes_per_s;
  case SUMS: return &hw->accumulate_bytes_per_s;
  case ADAMW: return &hw->optimizer_bytes_per_s;
  default: return NULL;
  }
}

double ps__arena_known(const ps_hardware *hw, uint32_t kinds, uint32_t kind) {
  const double *known = known_at((ps_hardware *)(uintptr_t)hw, kinds, kind); /* is only read */
  return known ? *known : 0;
}

/* seen / known of one rate of a row; 0: one of them is unknown. */
static double ratio(const ps_hardware *hw, const ps_contention_rate *seen, uint32_t kind) {
  ps_contention_rate row = *seen;
  const double known = row.kinds & kind ? ps__arena_known(hw, row.kinds, kind) : 0;
  return known > 0 && *rate_at(&row, kind) > 0 ? *rate_at(&row, kind) / known : 0;
}

ps_rate_difference ps__arena_differs(const ps_hardware *hw, const ps_contention_rate *seen,
                                     uint32_t n) {
  ps_rate_difference most = {0};
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t kind = IN; kind <= ADAMW; kind *= 2) {
      const double r = ratio(hw, &seen[i], kind);
      ps_contention_rate row = seen[i];
      if (r > 0 && (!most.kind || fabs(r - 1) > most.part))
        most = (ps_rate_difference){row.kinds, kind, fabs(r - 1), *rate_at(&row, kind),
                                    *rate_at(&row, kind) / r};
    }
  return most;
}

static void scale(double *rate, double by) { *rate *= by > 0 ? by : 1; }

/* What a row says of those that were not measured: sums on fewer threads, and several GPUs. */
static void scale_alike(ps_hardware *hw, const ps_contention_rate *seen) {
  bool first = true;
  for (int i = 0; i < PS_MAX_CONTENTION_RATES; i++) {
    ps_contention_rate *one = &hw->contention[i], *several = &hw->gpus_contention[i];
    if (several->kinds == seen->kinds)
      scale(&several->host_bytes_per_s, ratio(hw, seen, seen->kinds & (SUMS | ADAMW)));
    if (one->kinds != seen->kinds)
      continue;
    for (uint32_t kind = IN; kind <= ADAMW && !first; kind *= 2)
      if (seen->kinds & kind)
        scale(rate_at(one, kind), ratio(hw, seen, kind));
    first = false;
  }
}

void ps__arena_adopt(ps_hardware *hw, const ps_contention_rate *seen, uint32_t n) {
  const ps_hardware before = *hw;
  double sums = 0, adamw = 0;
  for (uint32_t i = 0; i < n; i++) {
    sums = seen[i].kinds == SUMS ? ratio(&before, &seen[i], SUMS) : sums;
    adamw = seen[i].kinds == ADAMW ? ratio(&before, &seen[i], ADAMW) : adamw;
    scale_alike(hw, &seen[i]);
  }
  scale(&hw->accumulate_bytes_per_s, sums);
  scale(&hw->accumulate_sumsq_bytes_per_s, sums);
  scale(&hw->sumsq_bytes_per_s, sums);
  scale(&hw->memory_bytes_per_s, sums);
  scale(&hw->optimizer_bytes_per_s, adamw);
  scale(&hw->optimizer_weights_bytes_per_s, adamw);
  scale(&hw->optimizer_state_bytes_per_s, adamw);
  scale(&hw->gather_bytes_per_s, adamw);
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t kind = IN; kind <= ADAMW; kind *= 2) {
      ps_contention_rate row = seen[i];
      double *known = row.kinds & kind ? known_at(hw, row.kinds, kind) : NULL;
      if (known && *rate_at(&row, kind) > 0)
        *known = *rate_at(&row, kind);
    }
  ps_link_rate *in = &hw->link[PS_LINK_H2D], *out = &hw->link[PS_LINK_D2H];
  if (out->duplex_bytes_per_s < in->duplex_bytes_per_s)
    in->duplex_bytes_per_s = out->duplex_bytes_per_s;
  out->duplex_bytes_per_s = in->duplex_bytes_per_s;
}
