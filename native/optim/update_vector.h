/* update_vector.h - updates over vectors, for update_avx2.c and update_avx512.c, which say before
 * it what a vector is:
 *   TARGET              the instruction set
 *   LANES, VEC, VECI    fp32 a vector; the types of vectors of fp32 and of integers
 *   V(name)             the intrinsic of that name; BITS(x), FLOATS(x) reinterpret; XOR(a, b),
 *                       AND(a, b), SET64(x)
 *   FIRST_WORDS         64-bit lanes 0, 2, 4, ...: the first words of a vector's groups, two
 *                       words a group; TABLE: the functions' table
 *   canonical(), sign_of(), any_nan(), load_bf16(), store_upper(), load_bits(), store_bits(),
 *   odd_halves(), mul64(): where the sets differ
 * Same bits as update_scalar.c: steps.h is the arithmetic of both (divide and square root are
 * exact), no FMA. What is left over goes to the scalar variant. Bytes: ps__update_bytes(). */

/* ps__update_k's numbers, in all lanes. */
#define VECTOR(name) VEC name;
typedef struct vector_k {
  PS__UPDATE_NUMBERS(VECTOR)
  bool nesterov;
} vector_k;

#define STEP      TARGET static inline __attribute__((always_inline))
#define REAL      VEC
#define STEP_K    vector_k
#define ADD(a, b) V(add_ps)(a, b)
#define SUB(a, b) V(sub_ps)(a, b)
#define MUL(a, b) V(mul_ps)(a, b)
#define DIV(a, b) V(div_ps)(a, b)
#define SQRT(a)   V(sqrt_ps)(a)
#define SIGN(a)   sign_of(a)
#include "optim/steps.h"

#define BROADCAST(name) .name = V(set1_ps)(k->name),
TARGET static inline vector_k broadcast(const ps__update_k *k) {
  return (vector_k){PS__UPDATE_NUMBERS(BROADCAST).nesterov = k->nesterov};
}

/* The weights and the state of a vector of elements. */
typedef struct elements {
  VEC w, s[PS_MAX_STATES];
} elements;

/* Whether a step left a NaN: where there is a new weight, looking at that is enough. */
TARGET PS__UPDATE_INLINE bool found_nan(uint32_t n_states, ps__update_part part,
                                        const elements *x) {
  return part == PS_UPDATE_STATE ? any_nan(x->s[0], x->s[n_states - 1]) : any_nan(x->w, x->w);
}

TARGET PS__UPDATE_INLINE void canonical_all(uint32_t n_states, elements *x) {
  x->w = canonical(x->w);
  EACH_STATE(j, x->s[j] = canonical(x->s[j]));
}

TARGET static inline VECI nearest_even(VEC x) { /* what to add to round to nearest even */
  VECI odd = AND(V(srli_epi32)(BITS(x), 16), V(set1_epi32)(1));
  return V(add_epi32)(odd, V(set1_epi32)(0x7fff));
}

TARGET static inline VECI mix(VECI z) {
  z = mul64(XOR(z, V(srli_epi64)(z, 30)), PS__MIX_MUL1);
  z = mul64(XOR(z, V(srli_epi64)(z, 27)), PS__MIX_MUL2);
  return XOR(z, V(srli_epi64)(z, 31));
}

/* What is left over, from element @i on. */
static void update_tail(uint64_t n, uint64_t i, const ps__arrays *a, const ps__update_k *k,
                        ps_optimizer optimizer, ps_recipe recipe, ps__update_part part) {
  const ps__arrays rest = ps__arrays_from(a, recipe, i);
  ps__update_k tail = *k;
  tail.element += i;
  ps__update_scalar[optimizer][recipe][part](n - i, &rest, &tail);
}

/* Weights and state in fp32; the gradient is fp32 or bf16, and the copy, if there is one, bf16. */
TARGET PS__UPDATE_INLINE void update_wide(ps_recipe recipe, uint64_t n, const ps__arrays *a,
                                          const ps__update_k *k, ps_optimizer optimizer,
                                          ps__update_part part) {
  const ps__recipe r = ps__recipe_of(recipe);
  const uint32_t n_states = ps__n_states(optimizer);
  const uint64_t grad_bytes = ps__dtypes[r.grad.dtype].bytes;
  const ps__arrays at = *a; /* registers: stores may change what a points to */
  const vector_k c = broadcast(k);
  uint64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    float *const w = (float *)at.w + i;
    const void *g = (const char *)at.grad + i * grad_bytes;
    ps__update_prefetch(n_states, part, &at, i * 4, i * grad_bytes);
    elements x;
    EACH_STATE(j, x.s[j] = V(loadu_ps)((float *)at.state[j] + i));
    x.w = part == PS_UPDATE_STATE ? x.s[0] : V(loadu_ps)(w);
    step(optimizer, &c, MUL(r.grad.dtype == PS_F32 ? V(loadu_ps)(g) : load_bf16(g), c.grad_scale),
         &x.w, x.s);
    if (__builtin_expect(found_nan(n_states, part, &x), 0))
      canonical_all(n_states, &x);
    if (part != PS_UPDATE_STATE)
      V(storeu_ps)(w, x.w);
    if (part != PS_UPDATE_STATE && r.updated.dtype != r.weights.dtype)
      store_upper((uint16_t *)at.copy + i, x.w, nearest_even(x.w));
    if (part != PS_UPDATE_WEIGHTS)
      EACH_STATE(j, V(storeu_ps)((float *)at.state[j] + i, x.s[j]));
  }
  update_tail(n, i, a, k, optimizer, recipe, part);
}

/* All in bf16 and rounded stochastically, two vectors at a time: the even elements and the odd
 * ones. So a load is one shift and one AND, and a store one shift and one merge, without a shuffle;
 * a word's four 16-bit pieces are in place for its four elements. */
typedef struct pair {
  elements even, odd;
} pair;

TARGET static inline void load_pair(VEC *even, VEC *odd, const uint16_t *p) {
  VECI x = load_bits(p);
  *even = FLOATS(V(slli_epi32)(x, 16));
  *odd = FLOATS(AND(x, V(set1_epi32)((int)0xffff0000u)));
}

TARGET static inline void store_pair(uint16_t *p, VEC even, VEC odd, VECI r) {
  VECI e = V(add_epi32)(BITS(even), AND(r, V(set1_epi32)(0xffff))),
       o = V(add_epi32)(BITS(odd), V(srli_epi32)(r, 16));
  store_bits(p, odd_halves(V(srli_epi32)(e, 16), o));
}

TARGET PS__UPDATE_INLINE void update_pairs(ps_recipe recipe, uint64_t n, const ps__arrays *a,
                                           const ps__update_k *k, ps_optimizer optimizer,
                                           ps__update_part part) {
  const uint32_t n_states = ps__n_states(optimizer);
  /* vectors begin at a group of four */
  const uint64_t to_group = (0 - k->element) % 4, head = to_group < n ? to_group : n;
  const ps__arrays at = *a; /* registers, as above */
  const vector_k c = broadcast(k);
  const VECI gamma = SET64(PS__MIX_GAMMA), next = SET64(LANES * PS__MIX_GAMMA);
  VECI sr = V(add_epi64)(SET64(k->sr_key + (2 * ((k->element + head) / 4) + 1) * PS__MIX_GAMMA),
                         mul64(FIRST_WORDS, PS__MIX_GAMMA));
  if (head)
    ps__update_scalar[optimizer][recipe][part](head, a, k);
  uint64_t i = head;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    uint16_t *const w = (uint16_t *)at.w + i;
    ps__update_prefetch(n_states, part, &at, i * 2, i * 2);
    pair x;
    VEC g_even, g_odd;
    EACH_STATE(j, load_pair(&x.even.s[j], &x.odd.s[j], (uint16_t *)at.state[j] + i));
    load_pair(&g_even, &g_odd, (const uint16_t *)at.grad + i);
    if (part == PS_UPDATE_STATE)
      x.even.w = x.even.s[0], x.odd.w = x.odd.s[0];
    else
      load_pair(&x.even.w, &x.odd.w, w);
    step(optimizer, &c, MUL(g_even, c.grad_scale), &x.even.w, x.even.s);
    step(optimizer, &c, MUL(g_odd, c.grad_scale), &x.odd.w, x.odd.s);
    const bool nan = part == PS_UPDATE_STATE
                         ? found_nan(n_states, part, &x.even) || found_nan(n_states, part, &x.odd)
                         : any_nan(x.even.w, x.odd.w);
    if (__builtin_expect(nan, 0)) {
      canonical_all(n_states, &x.even);
      canonical_all(n_states, &x.odd);
    }
    const VECI for_w = mix(sr);
    if (part != PS_UPDATE_STATE)
      store_pair(w, x.even.w, x.odd.w, for_w);
    if (part != PS_UPDATE_WEIGHTS) {
      const VECI first = mix(V(add_epi64)(sr, gamma)),
                 for_state[PS_MAX_STATES] = {first, XOR(for_w, first)};
      EACH_STATE(j, store_pair((uint16_t *)at.state[j] + i, x.even.s[j], x.odd.s[j], for_state[j]));
    }
    sr = V(add_epi64)(sr, next); /* LANES / 2 groups of 2 words on */
  }
  update_tail(n, i, a, k, optimizer, recipe, part);
}

/* A recipe that neither of the two is for is updated one element at a time. */
TARGET PS__UPDATE_INLINE void update_as(ps_recipe recipe, uint64_t n, const ps__arrays *a,
                                        const ps__update_k *k, ps_optimizer optimizer,
                                        ps__update_part part) {
  const ps__recipe r = ps__recipe_of(recipe);
  const uint32_t w = r.updated.dtype, grad = r.grad.dtype, copy = r.weights.dtype;
  const bool same = r.state[0].dtype == w && r.state[1].dtype == w;
  if (same && w == PS_F32 && (grad == PS_F32 || grad == PS_BF16) &&
      (copy == PS_F32 || copy == PS_BF16))
    update_wide(recipe, n, a, k, optimizer, part);
  else if (same && w == PS_BF16 && grad == PS_BF16 && copy == PS_BF16 &&
           r.rounding == PS__STOCHASTIC)
    update_pairs(recipe, n, a, k, optimizer, part);
  else
    update_tail(n, 0, a, k, optimizer, recipe, part);
}

#define PS__UPDATE_ATTRIBUTES TARGET
PS__OPTIMIZERS(PS__UPDATE_DEFINE)
const ps__update_table TABLE = {PS__OPTIMIZERS(PS__UPDATE_ROWS)};
