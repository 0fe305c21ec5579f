/* adamw_vector.h - AdamW over vectors, for adamw_avx2.c and adamw_avx512.c, which say before it
 * what a vector is:
 *   TARGET              the instruction set
 *   LANES, VEC, VECI    fp32 a vector; the types of vectors of fp32 and of integers
 *   V(name)             the intrinsic of that name; BITS(x), FLOATS(x) reinterpret; XOR(a, b),
 *                       AND(a, b), SET64(x)
 *   FIRST_WORDS         64-bit lanes 0, 2, 4, ...: the first words of a vector's groups, two
 *                       words a group; TABLE: the functions' table
 *   canonical(), any_nan(), load_bf16(), store_upper(), load_bits(), store_bits(), odd_halves(),
 *   mul64(): where the sets differ
 * Same bits as adamw_scalar.c: every operation is the same IEEE operation in the same order
 * (divide and square root are exact), no FMA. What is left over goes to the scalar variant.
 * Bytes: ps__adamw_bytes(). */

typedef struct consts {
  VEC lr, lr_decay, beta1, beta1_rest, beta2, beta2_rest, eps, grad_scale, c1, c2;
} consts;

TARGET static inline consts broadcast(const ps__adamw_k *k) {
  return (consts){V(set1_ps)(k->lr),         V(set1_ps)(k->lr_decay),   V(set1_ps)(k->beta1),
                  V(set1_ps)(k->beta1_rest), V(set1_ps)(k->beta2),      V(set1_ps)(k->beta2_rest),
                  V(set1_ps)(k->eps),        V(set1_ps)(k->grad_scale), V(set1_ps)(k->c1),
                  V(set1_ps)(k->c2)};
}

TARGET static inline void step(const consts *c, VEC grad, VEC *w, VEC *m, VEC *v) {
  VEC g = V(mul_ps)(grad, c->grad_scale);
  VEC m1 = V(add_ps)(V(mul_ps)(c->beta1, *m), V(mul_ps)(c->beta1_rest, g));
  VEC v1 = V(add_ps)(V(mul_ps)(c->beta2, *v), V(mul_ps)(c->beta2_rest, V(mul_ps)(g, g)));
  VEC root = V(add_ps)(V(sqrt_ps)(V(mul_ps)(v1, c->c2)), c->eps);
  VEC d = V(div_ps)(V(mul_ps)(m1, c->c1), root);
  *w = V(sub_ps)(V(sub_ps)(*w, V(mul_ps)(c->lr_decay, *w)), V(mul_ps)(c->lr, d));
  *m = m1;
  *v = v1;
}

/* A NaN anywhere in a step ends in w, so that looking at w is enough; without w, at both others. */
TARGET PS__ADAMW_INLINE void canonical3(ps__adamw_part part, VEC *w, VEC *m, VEC *v) {
  const bool nan = part == PS_ADAMW_MOMENTS ? any_nan(*m, *v) : any_nan(*w, *w);
  if (__builtin_expect(!nan, 1))
    return;
  *w = canonical(*w);
  *m = canonical(*m);
  *v = canonical(*v);
}

TARGET static inline VECI nearest_even(VEC x) { /* what to add to round to nearest even */
  VECI odd = AND(V(srli_epi32)(BITS(x), 16), V(set1_epi32)(1));
  return V(add_epi32)(odd, V(set1_epi32)(0x7fff));
}

TARGET static inline VECI mix(VECI z) {
  z = mul64(XOR(z, V(srli_epi64)(z, 30)), PS__SR_MUL1);
  z = mul64(XOR(z, V(srli_epi64)(z, 27)), PS__SR_MUL2);
  return XOR(z, V(srli_epi64)(z, 31));
}

/* fp32 and fp32-master, whose gradient is bf16 and whose weights have a copy. */
TARGET PS__ADAMW_INLINE void update_wide(ps_recipe recipe, uint64_t n, float *w, uint16_t *w_bf16,
                                         const void *grad, float *m, float *v, const ps__adamw_k *k,
                                         ps__adamw_part part) {
  const bool master = recipe == PS_RECIPE_FP32_MASTER;
  const uint64_t grad_bytes = master ? 2 : 4;
  const consts c = broadcast(k);
  uint64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const void *g = (const char *)grad + i * grad_bytes;
    ps__adamw_prefetch(part, w + i, m + i, v + i, g);
    VEC m1 = V(loadu_ps)(m + i), v1 = V(loadu_ps)(v + i),
        w1 = part == PS_ADAMW_MOMENTS ? m1 : V(loadu_ps)(w + i);
    step(&c, master ? load_bf16(g) : V(loadu_ps)(g), &w1, &m1, &v1);
    canonical3(part, &w1, &m1, &v1);
    if (part != PS_ADAMW_MOMENTS)
      V(storeu_ps)(w + i, w1);
    if (part != PS_ADAMW_MOMENTS && master)
      store_upper(w_bf16 + i, w1, nearest_even(w1));
    if (part == PS_ADAMW_WEIGHTS)
      continue;
    V(storeu_ps)(m + i, m1);
    V(storeu_ps)(v + i, v1);
  }
  ps__adamw_scalar[recipe][part](n - i, w + i, master ? w_bf16 + i : NULL,
                                 (const char *)grad + i * grad_bytes, m + i, v + i, k);
}

TARGET PS__ADAMW_INLINE void update_fp32(uint64_t n, void *w, uint16_t *w_bf16, const void *grad,
                                         void *m, void *v, const ps__adamw_k *k,
                                         ps__adamw_part part) {
  update_wide(PS_RECIPE_FP32, n, w, w_bf16, grad, m, v, k, part);
}

TARGET PS__ADAMW_INLINE void update_master(uint64_t n, void *w, uint16_t *w_bf16, const void *grad,
                                           void *m, void *v, const ps__adamw_k *k,
                                           ps__adamw_part part) {
  update_wide(PS_RECIPE_FP32_MASTER, n, w, w_bf16, grad, m, v, k, part);
}

/* bf16, two vectors at a time: the even elements and the odd ones. So a load is one shift and
 * one AND, and a store one shift and one merge, without a shuffle; a word's four 16-bit pieces
 * are in place for its four elements. */
typedef struct pair {
  VEC even, odd;
} pair;

TARGET static inline pair load_pair(const uint16_t *p) {
  VECI x = load_bits(p);
  return (pair){FLOATS(V(slli_epi32)(x, 16)), FLOATS(AND(x, V(set1_epi32)((int)0xffff0000u)))};
}

TARGET static inline void store_pair(uint16_t *p, pair x, VECI r) {
  VECI even = V(add_epi32)(BITS(x.even), AND(r, V(set1_epi32)(0xffff))),
       odd = V(add_epi32)(BITS(x.odd), V(srli_epi32)(r, 16));
  store_bits(p, odd_halves(V(srli_epi32)(even, 16), odd));
}

TARGET PS__ADAMW_INLINE void update_bf16(uint64_t n, void *w_, uint16_t *w_bf16, const void *grad_,
                                         void *m_, void *v_, const ps__adamw_k *k,
                                         ps__adamw_part part) {
  /* vectors begin at a group of four */
  const uint64_t to_group = (0 - k->element) % 4, head = to_group < n ? to_group : n;
  uint16_t *w = w_, *m = m_, *v = v_;
  const uint16_t *grad = grad_;
  const consts c = broadcast(k);
  const VECI gamma = SET64(PS__SR_GAMMA), next = SET64(LANES * PS__SR_GAMMA);
  VECI sr = V(add_epi64)(SET64(k->sr_key + (2 * ((k->element + head) / 4) + 1) * PS__SR_GAMMA),
                         mul64(FIRST_WORDS, PS__SR_GAMMA));
  if (head)
    ps__adamw_scalar[PS_RECIPE_BF16][part](head, w, NULL, grad, m, v, k);
  uint64_t i = head;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    ps__adamw_prefetch(part, w + i, m + i, v + i, grad + i);
    pair m1 = load_pair(m + i), v1 = load_pair(v + i), g1 = load_pair(grad + i),
         w1 = part == PS_ADAMW_MOMENTS ? m1 : load_pair(w + i);
    step(&c, g1.even, &w1.even, &m1.even, &v1.even);
    step(&c, g1.odd, &w1.odd, &m1.odd, &v1.odd);
    const bool nan = part == PS_ADAMW_MOMENTS ? any_nan(m1.even, m1.odd) || any_nan(v1.even, v1.odd)
                                              : any_nan(w1.even, w1.odd);
    if (__builtin_expect(nan, 0)) {
      canonical3(part, &w1.even, &m1.even, &v1.even);
      canonical3(part, &w1.odd, &m1.odd, &v1.odd);
    }
    const VECI for_w = mix(sr);
    if (part != PS_ADAMW_MOMENTS)
      store_pair(w + i, w1, for_w);
    if (part != PS_ADAMW_WEIGHTS) {
      const VECI for_m = mix(V(add_epi64)(sr, gamma));
      store_pair(m + i, m1, for_m);
      store_pair(v + i, v1, XOR(for_w, for_m));
    }
    sr = V(add_epi64)(sr, next); /* LANES / 2 groups of 2 words on */
  }
  ps__adamw_k tail = *k;
  tail.element += i;
  ps__adamw_scalar[PS_RECIPE_BF16][part](n - i, w + i, NULL, grad + i, m + i, v + i, &tail);
}

PS__ADAMW_PARTS(TARGET, update_fp32)
PS__ADAMW_PARTS(TARGET, update_master)
PS__ADAMW_PARTS(TARGET, update_bf16)
const ps__adamw_fn TABLE[PS_N_RECIPES][PS_N_ADAMW_PARTS] = {
    [PS_RECIPE_FP32] = PS__ADAMW_ROW(update_fp32),
    [PS_RECIPE_FP32_MASTER] = PS__ADAMW_ROW(update_master),
    [PS_RECIPE_BF16] = PS__ADAMW_ROW(update_bf16)};
