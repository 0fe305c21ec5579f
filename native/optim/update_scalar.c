/* update_scalar.c - updates one element at a time: the reference that the vector variants must
 * match, their tails, and what runs on a CPU without AVX2. Contract, NaN rule and rounding:
 * optim.h. Compiled without FMA contraction. */
#include "core/dtype.h"
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

/* Element i of weights or state. Stochastic rounding is for bf16: infinities and the one NaN have
 * 16 zero bits at the end, so that adding r < 2^16 leaves them. */
PS__UPDATE_INLINE void store(void *p, uint32_t dt, uint64_t i, float x, ps__rounding rounding,
                             uint64_t word, uint64_t element) {
  uint32_t bits;
  if (dt != PS_BF16 || rounding != PS__STOCHASTIC) {
    ps__store1_f32(p, dt, i, x);
    return;
  }
  memcpy(&bits, &x, sizeof bits);
  ((uint16_t *)p)[i] =
      (uint16_t)((bits + ((uint32_t)(word >> (16 * (element % 4))) & 0xffffu)) >> 16);
}

PS__UPDATE_INLINE void update_as(ps_recipe recipe, uint64_t n, const ps__arrays *a,
                                 const ps__update_k *k, ps_optimizer optimizer,
                                 ps__update_part part) {
  const ps__recipe r = ps__recipe_of(recipe);
  const uint32_t n_states = ps__n_states(optimizer);
  uint64_t word[1 + PS_MAX_STATES] = {0};
  if (r.rounding == PS__STOCHASTIC)
    ps__sr_words(word, k->sr_key, k->element);
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t e = k->element + i;
    if (r.rounding == PS__STOCHASTIC && e % 4 == 0)
      ps__sr_words(word, k->sr_key, e);
    float w = part == PS_UPDATE_STATE ? 0 : ps__load1_f32(a->w, r.updated.dtype, i),
          s[PS_MAX_STATES] = {0};
    EACH_STATE(j, s[j] = ps__load1_f32(a->state[j], r.state[j].dtype, i));
    step(optimizer, k, ps__load1_f32(a->grad, r.grad.dtype, i) * k->grad_scale, &w, s);
    w = canonical(w);
    if (part != PS_UPDATE_STATE)
      store(a->w, r.updated.dtype, i, w, r.rounding, word[0], e);
    if (part != PS_UPDATE_STATE && r.updated.dtype != r.weights.dtype)
      ps__store1_f32(a->copy, r.weights.dtype, i, w);
    if (part != PS_UPDATE_WEIGHTS)
      EACH_STATE(
          j, store(a->state[j], r.state[j].dtype, i, canonical(s[j]), r.rounding, word[1 + j], e));
  }
}

#define PS__UPDATE_ATTRIBUTES
PS__OPTIMIZERS(PS__UPDATE_DEFINE)
const ps__update_table ps__update_scalar = {PS__OPTIMIZERS(PS__UPDATE_ROWS)};
