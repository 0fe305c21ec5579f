/* adamw.c - which variant runs, the constants of an update, and the driver over a unit.
 * Contract: optim.h.
 *
 * The generator of the stochastic rounding. With G the Weyl increment 0x9e3779b97f4a7c15 and mix
 * the finalizer of splitmix64 (adamw_impl.h), all modulo 2^64:
 *   key              = mix(mix(seed + G) + (step + 1) * G)
 *   word[group, a]   = mix(key + (2 * group + a + 1) * G),  group = element / 4,  a = 0 for w, 1
 *   for m word[group, 2]   = word[group, 0] ^ word[group, 1] for v: uniform, and independent of
 *   either of the two 16 bits for x[a] = word[group, a] >> 16 * (element % 4)
 * so that one step reads a run of the splitmix64 sequence from a place that seed and step
 * choose. It needs no state and no order: any thread may do any element. In a vector the place
 * advances by one addition, and a word's four pieces already lie where its four elements do. */
#include "optim/adamw_impl.h"
#include "core/core.h"
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

static ps__adamw_fn variant(ps__simd simd, ps_recipe recipe, ps__adamw_part part) {
#if defined(__x86_64__)
  ps__simd best = ps__simd_best();
  /* a wish for more than the CPU has gets what it has: the bits are the same */
  if (simd > best)
    simd = best;
  if (simd == PS_SIMD_AVX512)
    return ps__adamw_avx512[recipe][part];
  if (simd == PS_SIMD_AVX2)
    return ps__adamw_avx2[recipe][part];
#endif
  return ps__adamw_scalar[recipe][part];
}

static uint64_t sr_key(uint64_t seed, uint64_t step) {
  return ps__sr_mix(ps__sr_mix(seed + PS__SR_GAMMA) + (step + 1) * PS__SR_GAMMA);
}

uint64_t ps__sr_random(uint64_t seed, uint64_t step, uint64_t element) {
  uint64_t word[3], r = 0;
  ps__sr_words(word, sr_key(seed, step), element);
  for (int a = 0; a < 3; a++)
    r |= (word[a] >> (16 * (element % 4)) & 0xffffu) << (16 * a);
  return r;
}

void ps__adamw_bias_correction(ps__adamw_scalars *s, uint64_t t) {
  s->c1 = (float)(1.0 / (1.0 - pow((double)s->beta1, (double)t)));
  s->c2 = (float)(1.0 / (1.0 - pow((double)s->beta2, (double)t)));
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
__attribute__((noinline)) static ps__adamw_k constants(const ps__adamw_scalars *s, float decay,
                                                       uint64_t element0) {
  return (ps__adamw_k){.lr = s->lr,
                       .lr_decay = s->lr * decay,
                       .beta1 = s->beta1,
                       .beta1_rest = 1.0f - s->beta1,
                       .beta2 = s->beta2,
                       .beta2_rest = 1.0f - s->beta2,
                       .eps = s->eps,
                       .grad_scale = s->grad_scale,
                       .c1 = s->c1,
                       .c2 = s->c2,
                       .sr_key = sr_key(s->seed, s->step),
                       .element = element0};
}

ps__adamw_k ps__adamw_constants(const ps__adamw_scalars *s, float decay, uint64_t element0) {
  const unsigned mode = enter_mode();
  const ps__adamw_k k = constants(s, decay, element0);
  leave_mode(mode);
  return k;
}

double ps__adamw_bytes(ps_recipe recipe, ps__adamw_part part) {
  static const double bytes[PS_N_RECIPES][PS_N_ADAMW_PARTS] = {
      [PS_RECIPE_FP32] = {28, 20, 20},
      [PS_RECIPE_FP32_MASTER] = {28, 20, 18},
      [PS_RECIPE_BF16] = {14, 10, 10}};
  return bytes[recipe][part];
}

void ps__adamw_update(ps__simd simd, ps_recipe recipe, ps__adamw_part part, uint64_t n, void *w,
                      uint16_t *w_bf16, const void *grad, void *m, void *v, float decay,
                      uint64_t element0, const ps__adamw_scalars *s) {
  const unsigned mode = enter_mode();
  const ps__adamw_k k = constants(s, decay, element0);
  if (part == PS_ADAMW_MOMENTS)
    w = w_bf16 = m; /* not touched: something to count from */
  variant(simd, recipe, part)(n, w, w_bf16, grad, m, v, &k);
  leave_mode(mode);
}

/* ---- a unit on a pool ------------------------------------------------------------------------ */

typedef struct unit_job {
  ps__simd simd;
  ps_recipe recipe;
  ps__adamw_part part;
  const ps__adamw_segment *segments;
  char *w, *m, *v;
  const char *grad;
  uint16_t *w_bf16;
  uint64_t element0;
  const ps__adamw_scalars *s;
} unit_job;

static uint64_t n_blocks(const ps__adamw_segment *s) { return (s->n + BLOCK - 1) / BLOCK; }

static void unit_task(void *arg, int64_t task, uint32_t worker) {
  const unit_job *j = arg;
  const ps__adamw_segment *s = j->segments;
  uint64_t block = (uint64_t)task;
  while (block >= n_blocks(s))
    block -= n_blocks(s++);
  uint64_t first = s->first + block * BLOCK, left = s->n - block * BLOCK,
           n = left < BLOCK ? left : BLOCK;
  size_t state = j->recipe == PS_RECIPE_BF16 ? 2 : 4, grad = j->recipe == PS_RECIPE_FP32 ? 4 : 2;
  ps__adamw_update(j->simd, j->recipe, j->part, n, j->w ? j->w + first * state : NULL,
                   j->w_bf16 ? j->w_bf16 + first : NULL, j->grad + first * grad,
                   j->m + first * state, j->v + first * state, s->decay, j->element0 + first, j->s);
}

void ps__adamw_unit(ps__pool *pool, ps_recipe recipe, ps__adamw_part part,
                    const ps__adamw_segment *segments, uint32_t n_segments, void *w,
                    uint16_t *w_bf16, const void *grad, void *m, void *v, uint64_t unit_element0,
                    const ps__adamw_scalars *s) {
  unit_job job = {.simd = ps__simd_best(),
                  .recipe = recipe,
                  .part = part,
                  .segments = segments,
                  .w = w,
                  .m = m,
                  .v = v,
                  .grad = grad,
                  .w_bf16 = recipe == PS_RECIPE_FP32_MASTER ? w_bf16 : NULL,
                  .element0 = unit_element0,
                  .s = s};
  uint64_t tasks = 0;
  for (uint32_t i = 0; i < n_segments; i++)
    tasks += n_blocks(&segments[i]);
  ps__pool_run(pool, (int64_t)tasks, unit_task, &job);
}
