/* adamw_avx2.c - AdamW, 8 elements at a time. Same bits as adamw_scalar.c: every operation is the same IEEE operation in the
 * same order (divide and square root are exact), no FMA. What is left over goes to the scalar variant. */
#if defined(__x86_64__)
#include "adamw_impl.h"
#include <immintrin.h>
#include <stdbool.h>

#define TARGET __attribute__((target("avx2")))

typedef struct consts {
  __m256 lr, lr_decay, beta1, beta1_rest, beta2, beta2_rest, eps, grad_scale, c1, c2;
} consts;

TARGET static inline consts broadcast(const ps__adamw_k *k) {
  consts c = {_mm256_set1_ps(k->lr), _mm256_set1_ps(k->lr_decay), _mm256_set1_ps(k->beta1), _mm256_set1_ps(k->beta1_rest),
              _mm256_set1_ps(k->beta2), _mm256_set1_ps(k->beta2_rest), _mm256_set1_ps(k->eps), _mm256_set1_ps(k->grad_scale),
              _mm256_set1_ps(k->c1), _mm256_set1_ps(k->c2)};
  return c;
}

TARGET static inline __m256 canonical(__m256 x) {
  __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32((int)PS__QUIET_NAN));
  return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

TARGET static inline void step(const consts *c, __m256 grad, __m256 *w, __m256 *m, __m256 *v) {
  __m256 g = _mm256_mul_ps(grad, c->grad_scale);
  __m256 m1 = _mm256_add_ps(_mm256_mul_ps(c->beta1, *m), _mm256_mul_ps(c->beta1_rest, g));
  __m256 v1 = _mm256_add_ps(_mm256_mul_ps(c->beta2, *v), _mm256_mul_ps(c->beta2_rest, _mm256_mul_ps(g, g)));
  __m256 root = _mm256_add_ps(_mm256_sqrt_ps(_mm256_mul_ps(v1, c->c2)), c->eps);
  __m256 d = _mm256_div_ps(_mm256_mul_ps(m1, c->c1), root);
  __m256 w1 = _mm256_sub_ps(_mm256_sub_ps(*w, _mm256_mul_ps(c->lr_decay, *w)), _mm256_mul_ps(c->lr, d));
  *w = w1;
  *m = m1;
  *v = v1;
}

/* Whether a lane of either is a NaN. */
TARGET static inline bool any_nan(__m256 a, __m256 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0; }

/* A NaN anywhere in a step ends in w, so that looking at w is enough; without w, at both others. */
TARGET PS__ADAMW_INLINE void canonical3(ps__adamw_part part, __m256 *w, __m256 *m, __m256 *v) {
  const bool nan = part == PS_ADAMW_MOMENTS ? any_nan(*m, *v) : any_nan(*w, *w);
  if (__builtin_expect(!nan, 1)) return;
  *w = canonical(*w);
  *m = canonical(*m);
  *v = canonical(*v);
}

TARGET static inline __m256 load_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

/* The upper halves of bits + add. */
TARGET static inline void store_upper(uint16_t *p, __m256 x, __m256i add) {
  __m256i bits = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(x), add), 16);
  _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}

TARGET static inline __m256i nearest_even(__m256 x) { /* what to add to round to nearest even */
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
}

/* a * b modulo 2^64, from 32-bit products. */
TARGET static inline __m256i mul64(__m256i a, uint64_t b) {
  __m256i b_low = _mm256_set1_epi64x((long long)(b & 0xffffffffu)), b_high = _mm256_set1_epi64x((long long)(b >> 32));
  __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b_low), _mm256_mul_epu32(a, b_high));
  return _mm256_add_epi64(_mm256_mul_epu32(a, b_low), _mm256_slli_epi64(cross, 32));
}

TARGET static inline __m256i mix(__m256i z) {
  z = mul64(_mm256_xor_si256(z, _mm256_srli_epi64(z, 30)), PS__SR_MUL1);
  z = mul64(_mm256_xor_si256(z, _mm256_srli_epi64(z, 27)), PS__SR_MUL2);
  return _mm256_xor_si256(z, _mm256_srli_epi64(z, 31));
}

TARGET PS__ADAMW_INLINE void update_fp32(uint64_t n, void *w_, uint16_t *w_bf16, const void *grad_, void *m_, void *v_, const ps__adamw_k *k, ps__adamw_part part) {
  float *w = w_, *m = m_, *v = v_;
  const float *grad = grad_;
  const consts c = broadcast(k);
  uint64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    ps__adamw_prefetch(part, w + i, m + i, v + i, grad + i);
    __m256 w1 = part == PS_ADAMW_MOMENTS ? _mm256_setzero_ps() : _mm256_loadu_ps(w + i), m1 = _mm256_loadu_ps(m + i), v1 = _mm256_loadu_ps(v + i);
    step(&c, _mm256_loadu_ps(grad + i), &w1, &m1, &v1);
    canonical3(part, &w1, &m1, &v1);
    if (part != PS_ADAMW_MOMENTS) _mm256_storeu_ps(w + i, w1);
    if (part == PS_ADAMW_WEIGHTS) continue;
    _mm256_storeu_ps(m + i, m1);
    _mm256_storeu_ps(v + i, v1);
  }
  ps__adamw_scalar[PS_RECIPE_FP32][part](n - i, w + i, NULL, grad + i, m + i, v + i, k);
}

TARGET PS__ADAMW_INLINE void update_master(uint64_t n, void *w_, uint16_t *w_bf16, const void *grad_, void *m_, void *v_, const ps__adamw_k *k, ps__adamw_part part) {
  float *w = w_, *m = m_, *v = v_;
  const uint16_t *grad = grad_;
  const consts c = broadcast(k);
  uint64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    ps__adamw_prefetch(part, w + i, m + i, v + i, grad + i);
    __m256 w1 = part == PS_ADAMW_MOMENTS ? _mm256_setzero_ps() : _mm256_loadu_ps(w + i), m1 = _mm256_loadu_ps(m + i), v1 = _mm256_loadu_ps(v + i);
    step(&c, load_bf16(grad + i), &w1, &m1, &v1);
    canonical3(part, &w1, &m1, &v1);
    if (part != PS_ADAMW_MOMENTS) {
      _mm256_storeu_ps(w + i, w1);
      store_upper(w_bf16 + i, w1, nearest_even(w1));
    }
    if (part == PS_ADAMW_WEIGHTS) continue;
    _mm256_storeu_ps(m + i, m1);
    _mm256_storeu_ps(v + i, v1);
  }
  ps__adamw_scalar[PS_RECIPE_FP32_MASTER][part](n - i, w + i, w_bf16 + i, grad + i, m + i, v + i, k);
}

/* bf16, 16 elements at a time, as two vectors of 8: the even ones and the odd ones. So a load is one shift and one AND, and a
 * store one shift and one merge, without a shuffle; a word's four 16-bit pieces are in place for its four elements. */
typedef struct pair {
  __m256 even, odd;
} pair;

TARGET static inline pair load_pair(const uint16_t *p) {
  __m256i x = _mm256_loadu_si256((const __m256i *)p);
  pair r = {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)))};
  return r;
}

TARGET static inline void store_pair(uint16_t *p, pair x, __m256i r) {
  __m256i even = _mm256_add_epi32(_mm256_castps_si256(x.even), _mm256_and_si256(r, _mm256_set1_epi32(0xffff)));
  __m256i odd = _mm256_add_epi32(_mm256_castps_si256(x.odd), _mm256_srli_epi32(r, 16));
  _mm256_storeu_si256((__m256i *)p, _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa));
}

TARGET PS__ADAMW_INLINE void update_bf16(uint64_t n, void *w_, uint16_t *w_bf16, const void *grad_, void *m_, void *v_, const ps__adamw_k *k, ps__adamw_part part) {
  const uint64_t to_group = (0 - k->element) % 4, head = to_group < n ? to_group : n; /* vectors begin at a group of four */
  uint16_t *w = w_, *m = m_, *v = v_;
  const uint16_t *grad = grad_;
  const consts c = broadcast(k);
  const __m256i gamma = _mm256_set1_epi64x((long long)PS__SR_GAMMA), next = _mm256_set1_epi64x((long long)(8 * PS__SR_GAMMA));
  const __m256i word0 = _mm256_set1_epi64x((long long)(k->sr_key + (2 * ((k->element + head) / 4) + 1) * PS__SR_GAMMA));
  __m256i sr = _mm256_add_epi64(word0, mul64(_mm256_set_epi64x(6, 4, 2, 0), PS__SR_GAMMA));
  if (head) ps__adamw_scalar[PS_RECIPE_BF16][part](head, w, NULL, grad, m, v, k);
  uint64_t i = head;
  for (; i + 16 <= n; i += 16) {
    ps__adamw_prefetch(part, w + i, m + i, v + i, grad + i);
    pair m1 = load_pair(m + i), v1 = load_pair(v + i), g1 = load_pair(grad + i);
    pair w1 = part == PS_ADAMW_MOMENTS ? m1 : load_pair(w + i);
    step(&c, g1.even, &w1.even, &m1.even, &v1.even);
    step(&c, g1.odd, &w1.odd, &m1.odd, &v1.odd);
    const bool nan = part == PS_ADAMW_MOMENTS ? any_nan(m1.even, m1.odd) || any_nan(v1.even, v1.odd) : any_nan(w1.even, w1.odd);
    if (__builtin_expect(nan, 0)) {
      canonical3(part, &w1.even, &m1.even, &v1.even);
      canonical3(part, &w1.odd, &m1.odd, &v1.odd);
    }
    const __m256i for_w = mix(sr);
    if (part != PS_ADAMW_MOMENTS) store_pair(w + i, w1, for_w);
    if (part != PS_ADAMW_WEIGHTS) {
      const __m256i for_m = mix(_mm256_add_epi64(sr, gamma));
      store_pair(m + i, m1, for_m);
      store_pair(v + i, v1, _mm256_xor_si256(for_w, for_m));
    }
    sr = _mm256_add_epi64(sr, next); /* 4 groups of 2 words on */
  }
  ps__adamw_k tail = *k;
  tail.element += i;
  ps__adamw_scalar[PS_RECIPE_BF16][part](n - i, w + i, NULL, grad + i, m + i, v + i, &tail);
}

PS__ADAMW_PARTS(TARGET, update_fp32)
PS__ADAMW_PARTS(TARGET, update_master)
PS__ADAMW_PARTS(TARGET, update_bf16)
const ps__adamw_fn ps__adamw_avx2[PS_N_RECIPES][PS_N_ADAMW_PARTS] = {
  [PS_RECIPE_FP32] = PS__ADAMW_ROW(update_fp32), [PS_RECIPE_FP32_MASTER] = PS__ADAMW_ROW(update_master), [PS_RECIPE_BF16] = PS__ADAMW_ROW(update_bf16)};
#else
typedef int ps__adamw_avx2_is_for_x86_64; /* an empty file is not C */
#endif
