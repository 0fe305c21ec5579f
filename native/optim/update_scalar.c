/* update_scalar.c - updates one element at a time: the reference that the vector variants must
 * match, their tails, and what runs on a CPU without AVX2. Contract, NaN rule and rounding:
 * optim.h. Compiled without FMA contraction. */
#include "kernels/ops.h"
#include <math.h>
#include <string.h>

#define STEP      static inline __attribute__((always_inline))
#define REAL      float
#define STEP_K    ps__update_k
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))
#define DIV(a, b) ((a) / (b))
#define SQRT(a)   sqrtf(a)
#define SIGN(a)   sign_of(a)
static inline float sign_of(float x) { return x != x || x == 0 ? x : copysignf(1.0f, x); }
#include "optim/steps.h"

static inline float canonical(float x) {
  uint32_t nan = PS__QUIET_NAN;
  if (x != x)
    memcpy(&x, &nan, sizeof x);
  return x;
}

/* Stochastic rounding. Infinities and the one NaN have 16 zero bits at the end, so that adding r
 * < 2^16 leaves them. */
static inline uint16_t round_sr(float x, uint64_t word, uint64_t element) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + ((uint32_t)(word >> (16 * (element % 4))) & 0xffffu)) >> 16);
}

/* One element, of fp32 state. */
PS__UPDATE_INLINE float update_one(const ps__arrays *a, uint64_t i, float grad,
                                   const ps__update_k *k, ps_optimizer optimizer,
                                   ps__update_part part) {
  const uint32_t n_states = ps__n_states(optimizer);
  float w = part == PS_UPDATE_STATE ? 0 : ((float *)a->w)[i], s[PS_MAX_STATES] = {0};
  EACH_STATE(j, s[j] = ((float *)a->state[j])[i]);
  step(optimizer, k, grad * k->grad_scale, &w, s);
  w = canonical(w);
  if (part != PS_UPDATE_STATE)
    ((float *)a->w)[i] = w;
  if (part != PS_UPDATE_WEIGHTS)
    EACH_STATE(j, ((float *)a->state[j])[i] = canonical(s[j]));
  return w;
}

PS__UPDATE_INLINE void update_fp32(uint64_t n, const ps__arrays *a, const ps__update_k *k,
                                   ps_optimizer optimizer, ps__update_part part) {
  for (uint64_t i = 0; i < n; i++)
    (void)update_one(a, i, ((const float *)a->grad)[i], k, optimizer, part);
}

PS__UPDATE_INLINE void update_master(uint64_t n, const ps__arrays *a, const ps__update_k *k,
                                     ps_optimizer optimizer, ps__update_part part) {
  for (uint64_t i = 0; i < n; i++) {
    const float grad = ps__bf16_to_f32(((const uint16_t *)a->grad)[i]),
                w = update_one(a, i, grad, k, optimizer, part);
    if (part != PS_UPDATE_STATE)
      a->w_bf16[i] = ps__f32_to_bf16(w);
  }
}

PS__UPDATE_INLINE void update_bf16(uint64_t n, const ps__arrays *a, const ps__update_k *k,
                                   ps_optimizer optimizer, ps__update_part part) {
  const uint32_t n_states = ps__n_states(optimizer);
  uint16_t *const w = a->w;
  uint64_t word[1 + PS_MAX_STATES];
  ps__sr_words(word, k->sr_key, k->element);
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t e = k->element + i;
    if (e % 4 == 0)
      ps__sr_words(word, k->sr_key, e);
    float wf = part == PS_UPDATE_STATE ? 0 : ps__bf16_to_f32(w[i]), s[PS_MAX_STATES] = {0};
    EACH_STATE(j, s[j] = ps__bf16_to_f32(((uint16_t *)a->state[j])[i]));
    const float grad = ps__bf16_to_f32(((const uint16_t *)a->grad)[i]);
    step(optimizer, k, grad * k->grad_scale, &wf, s);
    if (part != PS_UPDATE_STATE)
      w[i] = round_sr(canonical(wf), word[0], e);
    if (part != PS_UPDATE_WEIGHTS)
      EACH_STATE(j, ((uint16_t *)a->state[j])[i] = round_sr(canonical(s[j]), word[1 + j], e));
  }
}

#define PS__UPDATE_ATTRIBUTES
PS__OPTIMIZERS(PS__UPDATE_DEFINE)
const ps__update_table ps__update_scalar = {PS__OPTIMIZERS(PS__UPDATE_ROWS)};
