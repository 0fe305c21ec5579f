/* arena.c - what the run's own host memory does, beside what its plan takes it to do. */
#include "hardware/arena.h"
#include "train/trainer.h"
#include <sys/mman.h>

/* Of all rates together. */
static const double SECONDS = 2;
/* In less, caches would be measured. On the CPU backend so much is measured, and memory is taken to
 * be equally fast everywhere: its pages would get memory that the training may not need yet. */
static const uint64_t LEAST_BYTES = 4ull << 30, LEAST_CPU_BYTES = 256ull << 20;
enum { PLACES = 16, CPU_PLACES = 2 };

static bool arena_of(const ps_trainer *t, ps__arena *out) {
  const ps_plan *p = t->plan;
  const bool cpu = p->hw.backend == PS_BACKEND_CPU;
  const uint32_t device = p->at->dev[0].place;
  const uint64_t not_pinned = ps_engine_space_bytes(t->engine, p->at->host) -
                              ps_engine_space_pinned(t->engine, p->at->host);
  *out = (ps__arena){.hw = &p->hw,
                     .host = (char *)t->host + not_pinned,
                     .host_bytes = ps_engine_space_pinned(t->engine, p->at->host),
                     .n_places = cpu ? CPU_PLACES : PLACES};
  if (out->host_bytes < (cpu ? LEAST_CPU_BYTES : LEAST_BYTES))
    return false;
  if (cpu)
    out->host_bytes = LEAST_CPU_BYTES;
  else if (ps_engine_space_bytes(t->engine, device) >= PS__ARENA_DEVICE_BYTES)
    out->device = t->engine->space[device].addr;
  return true;
}

void ps__trainer_measure_arena(ps_trainer *t) {
  ps__arena a;
  if (t->cfg.trust_rates || t->plan->cfg.forward_only || !arena_of(t, &a))
    return;
  t->arena_rates = ps__calloc(PS__ARENA_CASES, sizeof *t->arena_rates);
  const double seconds = SECONDS / PS__ARENA_CASES;
  if (!t->arena_rates ||
      ps__arena_measure(&a, seconds, t->arena_rates, &t->n_arena_rates) != PS_OK) {
    t->n_arena_rates = 0;
    ps__log(PS_LOG_WARN,
            "the host memory of this run was not measured: %s; its plan takes the rates of the "
            "machine's description",
            t->arena_rates ? ps_last_error() : "out of memory");
  }
  if (t->plan->hw.backend != PS_BACKEND_CPU)
    return;
  /* as if it had never been touched */
  (void)madvise(a.host, a.host_bytes, MADV_DONTNEED);
  ps__resident_peak_reset();
}

ps_status ps_trainer_arena(const ps_trainer *t, ps_hardware *rates, ps_rate_difference *most) {
  if (!t || !most)
    return ps__fail(PS_EINVAL, "ps_trainer_arena: trainer and most must be given");
  if (rates) {
    *rates = t->plan->hw;
    ps__arena_adopt(rates, t->arena_rates, t->n_arena_rates);
  }
  *most = ps__arena_differs(&t->plan->hw, t->arena_rates, t->n_arena_rates);
  return PS_OK;
}
