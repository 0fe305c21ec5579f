/* update.c - which variant runs, the constants of an update, and the driver over a unit.
 * Contract: optim.h.
 *
 * The generator of the stochastic rounding. With G the Weyl increment 0x9e3779b97f4a7c15 and mix
 * the finalizer of splitmix64 (core/mix64.h), all modulo 2^64:
 *   key              = mix(mix(seed + G) + (step + 1) * G)
 *   word[group, a]   = mix(key + (2 * group + a + 1) * G),  group = element / 4,
 *                      a = 0 for w, 1 for state[0]
 *   word[group, 2]   = word[group, 0] ^ word[group, 1] for state[1]: uniform, and independent of
 *                      either of the two
 *   16 bits for x[a] = word[group, a] >> 16 * (element % 4)
 * so that one step reads a run of the splitmix64 sequence from a place that seed and step
 * choose. It needs no state and no order: any thread may do any element. In a vector the place
 * advances by one addition, and a word's four pieces already lie where its four elements do. */
#include "optim/update_impl.h"
#include "core/core.h"
#include <assert.h>
#include <math.h>
#if defined(__x86_64__)
#  include <xmmintrin.h>
#endif

/* elements a task: at 10 to 28 bytes each, 160 to 448 KiB, some 15 to 50 us */
enum { BLOCK = 16384 };

ps__simd ps__simd_best(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return PS_SIMD_AVX512;
  if (__builtin_cpu_supports("avx2"))
    return PS_SIMD_AVX2;
#endif
  return PS_SIMD_SCALAR;
}

static const ps__update_table *table(ps__simd simd) {
#if defined(__x86_64__)
  ps__simd best = ps__simd_best();
  /* a wish for more than the CPU has gets what it has: the bits are the same */
  if (simd > best)
    simd = best;
  if (simd == PS_SIMD_AVX512)
    return &ps__update_avx512;
  if (simd == PS_SIMD_AVX2)
    return &ps__update_avx2;
#endif
  return &ps__update_scalar;
}

static uint64_t sr_key(uint64_t seed, uint64_t step) {
  return ps__mix64(ps__mix64(seed + PS__MIX_GAMMA) + (step + 1) * PS__MIX_GAMMA);
}

uint64_t ps__sr_random(uint64_t seed, uint64_t step, uint64_t element) {
  uint64_t word[3], r = 0;
  ps__sr_words(word, sr_key(seed, step), element);
  for (int a = 0; a < 3; a++)
    r |= (word[a] >> (16 * (element % 4)) & 0xffffu) << (16 * a);
  return r;
}

void ps__update_correct(ps__update *u, uint64_t t) {
  u->c1 = (float)(1.0 / (1.0 - pow((double)u->beta1, (double)t)));
  u->c2 = (float)(1.0 / (1.0 - pow((double)u->beta2, (double)t)));
}

/* Round to nearest, denormals kept: a thread inherits its mode from its maker, and programs
 * built with -ffast-math (or that ask for flushing) change it. Returns the mode to put back. */
static unsigned enter_mode(void) {
#if defined(__x86_64__)
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x1f80);
  return mode;
#else
  return 0;
#endif
}
static void leave_mode(unsigned mode) {
#if defined(__x86_64__)
  _mm_setcsr(mode);
#endif
}

/* Not inlined, so that no arithmetic moves ahead of the change of mode below. */
__attribute__((noinline)) static ps__update_k constants(const ps__update *u, float decay,
                                                        uint64_t element0) {
  return (ps__update_k){.lr = u->lr,
                        .lr_decay = u->lr * decay,
                        .beta1 = u->beta1,
                        .beta1_rest = 1.0f - u->beta1,
                        .beta2 = u->beta2,
                        .beta2_rest = 1.0f - u->beta2,
                        .eps = u->eps,
                        .grad_scale = u->grad_scale,
                        .c1 = u->c1,
                        .c2 = u->c2,
                        .decay = decay,
                        .momentum = u->momentum,
                        .nesterov = u->nesterov,
                        .sr_key = sr_key(u->seed, u->step),
                        .element = element0};
}

ps__update_k ps__update_constants(const ps__update *u, float decay, uint64_t element0) {
  const unsigned mode = enter_mode();
  const ps__update_k k = constants(u, decay, element0);
  leave_mode(mode);
  return k;
}

void ps__update_elements(ps__simd simd, const ps__update *u, uint64_t n, const ps__arrays *a,
                         float decay, uint64_t element0) {
  assert(u->recipe < PS__N_ROWS);
  const ps__update_fn update = (*table(simd))[u->optimizer][u->recipe][u->part];
  assert(update);
  const unsigned mode = enter_mode();
  const ps__update_k k = constants(u, decay, element0);
  update(n, a, &k);
  leave_mode(mode);
}

/* ---- a unit on a pool ------------------------------------------------------------------------ */

typedef struct unit_job {
  ps__simd simd;
  const ps__update *u;
  const ps__segment *segments;
  const ps__arrays *a;
  uint64_t element0;
} unit_job;

static uint64_t n_blocks(const ps__segment *s) { return (s->n + BLOCK - 1) / BLOCK; }

static void unit_task(void *arg, int64_t task, uint32_t worker) {
  const unit_job *j = arg;
  const ps__segment *s = j->segments;
  uint64_t block = (uint64_t)task;
  while (block >= n_blocks(s))
    block -= n_blocks(s++);
  const uint64_t first = s->first + block * BLOCK, left = s->n - block * BLOCK,
                 n = left < BLOCK ? left : BLOCK;
  const ps__arrays a = ps__arrays_from(j->a, j->u->recipe, first);
  ps__update_elements(j->simd, j->u, n, &a, s->decay, j->element0 + first);
}

void ps__update_on_pool(ps__pool *pool, const ps__update *u, const ps__segment *segments,
                        uint32_t n_segments, const ps__arrays *a, uint64_t unit_element0) {
  unit_job job = {
      .simd = ps__simd_best(), .u = u, .segments = segments, .a = a, .element0 = unit_element0};
  uint64_t tasks = 0;
  for (uint32_t i = 0; i < n_segments; i++)
    tasks += n_blocks(&segments[i]);
  ps__pool_run(pool, (int64_t)tasks, unit_task, &job);
}

/* ---- a unit as an op ------------------------------------------------------------------------- */

bool ps__gate_open(const ps__update_gate *gate) {
  if (gate->step && *gate->step != gate->expected)
    return false;
  for (uint32_t i = 0; gate->sumsq && i < gate->n_sumsq; i++)
    if (!isfinite(gate->sumsq[i]))
      return false;
  return true;
}

ps_status ps__cpu_update_unit(void *exec, const ps__update *u, const ps__segment *segments,
                              uint32_t n_segments, const ps__arrays *a, uint64_t unit_element0,
                              const ps__update_gate *gate) {
  const ps__cpu_exec *cpu = exec;
  ps__update scaled = *u;
  if (!ps__gate_open(gate))
    return PS_OK;
  if (gate->scale)
    scaled.grad_scale = *gate->scale;
  ps__update_on_pool(cpu->pool, &scaled, segments, n_segments, a, unit_element0);
  return PS_OK;
}
