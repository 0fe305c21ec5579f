/* adamw_scalar.c - AdamW one element at a time: the reference that the vector variants must
 * match, their tails, and what runs on a CPU without AVX2. Math, NaN rule and rounding: optim.h.
 * Compiled without FMA contraction. */
#include "optim/adamw_impl.h"
#include "kernels/ops.h"
#include <math.h>
#include <string.h>

static inline float canonical(float x) {
  uint32_t nan = PS__QUIET_NAN;
  if (x != x)
    memcpy(&x, &nan, sizeof x);
  return x;
}

static inline void step(const ps__adamw_k *k, float grad, float *w, float *m, float *v) {
  float g = grad * k->grad_scale;
  float m1 = k->beta1 * *m + k->beta1_rest * g;
  float v1 = k->beta2 * *v + k->beta2_rest * (g * g);
  float d = (m1 * k->c1) / (sqrtf(v1 * k->c2) + k->eps);
  *w = canonical((*w - k->lr_decay * *w) - k->lr * d);
  *m = canonical(m1);
  *v = canonical(v1);
}

/* Stochastic rounding. Infinities and the one NaN have 16 zero bits at the end, so that adding r
 * < 2^16 leaves them. */
static inline uint16_t round_sr(float x, uint64_t word, uint64_t element) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + ((uint32_t)(word >> (16 * (element % 4))) & 0xffffu)) >> 16);
}

PS__ADAMW_INLINE void update_fp32(uint64_t n, void *w_, uint16_t *w_bf16, const void *grad_,
                                  void *m_, void *v_, const ps__adamw_k *k, ps__adamw_part part) {
  float *w = w_, *m = m_, *v = v_;
  const float *grad = grad_;
  for (uint64_t i = 0; i < n; i++) {
    float wf = part == PS_ADAMW_MOMENTS ? 0 : w[i], mf = m[i], vf = v[i];
    step(k, grad[i], &wf, &mf, &vf);
    if (part != PS_ADAMW_MOMENTS)
      w[i] = wf;
    if (part == PS_ADAMW_WEIGHTS)
      continue;
    m[i] = mf;
    v[i] = vf;
  }
}

PS__ADAMW_INLINE void update_master(uint64_t n, void *w_, uint16_t *w_bf16, const void *grad_,
                                    void *m_, void *v_, const ps__adamw_k *k, ps__adamw_part part) {
  float *w = w_, *m = m_, *v = v_;
  const uint16_t *grad = grad_;
  for (uint64_t i = 0; i < n; i++) {
    float wf = part == PS_ADAMW_MOMENTS ? 0 : w[i], mf = m[i], vf = v[i];
    step(k, ps__bf16_to_f32(grad[i]), &wf, &mf, &vf);
    if (part != PS_ADAMW_MOMENTS) {
      w[i] = wf;
      w_bf16[i] = ps__f32_to_bf16(wf);
    }
    if (part == PS_ADAMW_WEIGHTS)
      continue;
    m[i] = mf;
    v[i] = vf;
  }
}

PS__ADAMW_INLINE void update_bf16(uint64_t n, void *w_, uint16_t *w_bf16, const void *grad_,
                                  void *m_, void *v_, const ps__adamw_k *k, ps__adamw_part part) {
  uint16_t *w = w_, *m = m_, *v = v_;
  const uint16_t *grad = grad_;
  uint64_t word[3];
  ps__sr_words(word, k->sr_key, k->element);
  for (uint64_t i = 0; i < n; i++) {
    uint64_t e = k->element + i;
    if (e % 4 == 0)
      ps__sr_words(word, k->sr_key, e);
    float wf = part == PS_ADAMW_MOMENTS ? 0 : ps__bf16_to_f32(w[i]), mf = ps__bf16_to_f32(m[i]),
          vf = ps__bf16_to_f32(v[i]);
    step(k, ps__bf16_to_f32(grad[i]), &wf, &mf, &vf);
    if (part != PS_ADAMW_MOMENTS)
      w[i] = round_sr(wf, word[0], e);
    if (part == PS_ADAMW_WEIGHTS)
      continue;
    m[i] = round_sr(mf, word[1], e);
    v[i] = round_sr(vf, word[2], e);
  }
}

PS__ADAMW_PARTS(, update_fp32)
PS__ADAMW_PARTS(, update_master)
PS__ADAMW_PARTS(, update_bf16)
const ps__adamw_fn ps__adamw_scalar[PS_N_RECIPES][PS_N_ADAMW_PARTS] = {
    [PS_RECIPE_FP32] = PS__ADAMW_ROW(update_fp32),
    [PS_RECIPE_FP32_MASTER] = PS__ADAMW_ROW(update_master),
    [PS_RECIPE_BF16] = PS__ADAMW_ROW(update_bf16)};
