/* update_vector.h - updates over vectors, for update_avx2.c and update_avx512.c, which say before
 * it what a vector is:
 *   TARGET              the instruction set
 *   LANES, VEC, VECI    fp32 a vector; the types of vectors of fp32 and of integers
 *   V(name)             the intrinsic of that name; BITS(x), FLOATS(x) reinterpret; XOR(a, b),
 *                       AND(a, b), AND_NOT(a, b), SET64(x)
 *   FIRST_WORDS         64-bit lanes 0, 2, 4, ...: the first words of a vector's groups, two
 *                       words a group; TABLE: the functions' table
 *   canonical(), sign_of(), any_nan(), load_bf16(), store_upper(), load_bits(), store_bits(),
 *   odd_halves(), mul64(), load_signed(), load_unsigned(), store_bytes(), pieces(), is_zero():
 *   where the sets differ
 * Same bits as update_scalar.c: steps.h is the arithmetic of both (divide and square root are
 * exact), no FMA. What is left over goes to the scalar variant. Bytes: ps__update_bytes(). */

/* ps__update_k's numbers, in all lanes. */
#define VECTOR(name) VEC name;
typedef struct vector_k {
  PS__UPDATE_NUMBERS(VECTOR)
  bool nesterov;
} vector_k;

#define STEP        TARGET static inline __attribute__((always_inline))
#define REAL        VEC
#define STEP_K      vector_k
#define ADD(a, b)   V(add_ps)(a, b)
#define SUB(a, b)   V(sub_ps)(a, b)
#define MUL(a, b)   V(mul_ps)(a, b)
#define DIV(a, b)   V(div_ps)(a, b)
#define SQRT(a)     V(sqrt_ps)(a)
#define SIGN(a)     sign_of(a)
#define CONST(x)    V(set1_ps)(x)
#define MOST(a, b)  V(max_ps)(a, b)
#define LEAST(a, b) V(min_ps)(a, b)
#include "optim/steps.h"
#include <string.h>

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
                        ps_optimizer optimizer, uint32_t recipe, ps__update_part part) {
  const ps__arrays rest = ps__arrays_from(a, recipe, i);
  ps__update_k tail = *k;
  tail.element += i;
  ps__update_scalar[optimizer][recipe][part](n - i, &rest, &tail);
}

/* Weights and state in fp32; the gradient is fp32 or bf16, and the copy, if there is one, bf16. */
TARGET PS__UPDATE_INLINE void update_wide(uint32_t recipe, uint64_t n, const ps__arrays *a,
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

TARGET PS__UPDATE_INLINE void update_pairs(uint32_t recipe, uint64_t n, const ps__arrays *a,
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

/* ---- other recipes: a block of PS__STATE_BLOCK elements at a time ---------------------------- */

enum { VECTORS = PS__STATE_BLOCK / LANES }; /* of a block */

/* A block's state; its random words, each for two vectors. */
typedef struct block {
  VEC s[PS_MAX_STATES][VECTORS];
  VECI word[PS_MAX_STATES][VECTORS / 2];
} block;

/* Vector @v of the block's state @p. */
TARGET PS__UPDATE_INLINE VEC load_state(ps__storage as, const char *p, uint32_t v, VEC scale) {
  if (as.dtype == PS_BF16)
    return load_bf16((const uint16_t *)p + v * LANES);
  if (as.dtype == PS__U8)
    return read_v(V(cvtepi32_ps)(load_unsigned(p + v * LANES)), scale);
  const VECI level = load_signed(p + v * LANES), sign = V(srai_epi32)(level, 31);
  const VEC x = read_m(V(cvtepi32_ps)(V(abs_epi32)(level)), scale);
  return FLOATS(XOR(BITS(x), V(slli_epi32)(sign, 31)));
}

/* All of a block's state in 8 bits, canonical: as store_block() of update_scalar.c. */
TARGET PS__UPDATE_INLINE void store_levels(bool is_v, char *p, const VEC *x, const VECI *word) {
  const VECI size_bits = V(set1_epi32)(0x7fffffff);
  const float levels = is_v ? PS__LEVELS_V : PS__LEVELS_M;
  uint32_t lane[LANES], most = 0;
  VECI largest = AND(BITS(x[0]), size_bits);
  for (uint32_t v = 1; v < VECTORS; v++)
    largest = V(max_epi32)(largest, AND(BITS(x[v]), size_bits));
  memcpy(lane, &largest, sizeof lane);
  for (uint32_t i = 0; i < LANES; i++)
    most = lane[i] > most ? lane[i] : most;
  VEC scale = FLOATS(V(set1_epi32)((int)most));
  if (is_v)
    scale = canonical(SQRT(scale));
  for (uint32_t v = 0; v < VECTORS; v++) {
    const VECI bits = AND(BITS(x[v]), size_bits), sign = V(srai_epi32)(BITS(x[v]), 31);
    const VEC size = is_v ? SQRT(FLOATS(bits)) : FLOATS(bits);
    VECI level = V(srli_epi32)(
        V(add_epi32)(V(cvttps_epi32)(fixed_level(levels, size, scale)), pieces(word[v / 2], v % 2)),
        16);
    if (is_v) /* 0 - (-1) where it is 0 and the element is not */
      level = V(sub_epi32)(level, AND_NOT(is_zero(bits), is_zero(level)));
    else
      level = V(sub_epi32)(XOR(level, sign), sign);
    store_bytes(p + v * LANES, level);
  }
  memcpy(p + PS__STATE_BLOCK, &scale, sizeof(float));
}

/* Weights i .. i + LANES - 1; @random: 16 bits of each lane. */
TARGET PS__UPDATE_INLINE VEC load_weights(const ps__recipe *r, const ps__arrays *a, uint64_t i) {
  if (r->updated.dtype == PS_F32)
    return V(loadu_ps)((const float *)a->w + i);
  if (r->updated.dtype == PS_BF16)
    return load_bf16((const uint16_t *)a->w + i);
  return FLOATS(V(add_epi32)(BITS(load_bf16((const uint16_t *)a->copy + i)),
                             V(slli_epi32)(load_signed((const int8_t *)a->w + i), 8)));
}
TARGET PS__UPDATE_INLINE void store_weights(const ps__recipe *r, const ps__arrays *a, uint64_t i,
                                            VEC w, VECI random) {
  if (r->updated.dtype == PS__I8) {
    const VECI bits = V(add_epi32)(BITS(w), AND(random, V(set1_epi32)(0xff)));
    store_upper((uint16_t *)a->copy + i, FLOATS(bits), V(set1_epi32)(0x8000));
    store_bytes((uint8_t *)a->w + i, V(srli_epi32)(bits, 8));
    return;
  }
  if (r->updated.dtype == PS_BF16)
    store_upper((uint16_t *)a->w + i, w, random);
  else
    V(storeu_ps)((float *)a->w + i, w);
  if (r->updated.dtype != r->weights.dtype)
    store_upper((uint16_t *)a->copy + i, w, nearest_even(w));
}

/* Vector @v of the block that begins with element @i, whose random words are @for_w and b->word. */
TARGET PS__UPDATE_INLINE void update_vector(const ps__recipe *r, uint32_t v, uint64_t i,
                                            const ps__arrays *a, const vector_k *c,
                                            ps_optimizer optimizer, ps__update_part part,
                                            const VEC *scale, VECI for_w, block *b) {
  const uint32_t n_states = ps__n_states(optimizer);
  const uint64_t at = i + v * LANES;
  const VEC g = r->grad.dtype == PS_F32 ? V(loadu_ps)((const float *)a->grad + at)
                                        : load_bf16((const uint16_t *)a->grad + at);
  elements x;
  EACH_STATE(j, x.s[j] = load_state(r->state[j],
                                    (const char *)a->state[j] + ps__stored_at(r->state[j], i), v,
                                    scale[j]));
  x.w = part == PS_UPDATE_STATE ? x.s[0] : load_weights(r, a, at);
  step(optimizer, c, MUL(g, c->grad_scale), &x.w, x.s);
  if (__builtin_expect(found_nan(n_states, part, &x), 0))
    canonical_all(n_states, &x);
  if (part != PS_UPDATE_STATE)
    store_weights(r, a, at, x.w, pieces(for_w, v % 2));
  EACH_STATE(j, b->s[j][v] = x.s[j]);
}

TARGET PS__UPDATE_INLINE void store_states(const ps__recipe *r, uint64_t i, const ps__arrays *a,
                                           uint32_t n_states, const block *b) {
  EACH_STATE(j, {
    char *const p = (char *)a->state[j] + ps__stored_at(r->state[j], i);
    if (r->state[j].dtype != PS_BF16)
      store_levels(r->state[j].dtype == PS__U8, p, b->s[j], b->word[j]);
    for (uint32_t v = 0; r->state[j].dtype == PS_BF16 && v < VECTORS; v++)
      store_upper((uint16_t *)p + v * LANES, b->s[j][v], pieces(b->word[j][v / 2], v % 2));
  });
}

/* Any storage of weights and state. The words of a vector's groups are not those of the next one,
 * so elements that begin inside a group go to the scalar variant. */
TARGET PS__UPDATE_INLINE void update_blocks(uint32_t recipe, uint64_t n, const ps__arrays *a,
                                            const ps__update_k *k, ps_optimizer optimizer,
                                            ps__update_part part) {
  const ps__recipe r = ps__recipe_of(recipe);
  const uint32_t n_states = ps__n_states(optimizer);
  const ps__arrays at = *a;
  const vector_k c = broadcast(k);
  const VECI gamma = SET64(PS__MIX_GAMMA), next = SET64(LANES * PS__MIX_GAMMA);
  VECI sr = V(add_epi64)(SET64(k->sr_key + (2 * (k->element / 4) + 1) * PS__MIX_GAMMA),
                         mul64(FIRST_WORDS, PS__MIX_GAMMA));
  uint64_t i = 0;
  for (; k->element % 4 == 0 && i + PS__STATE_BLOCK <= n; i += PS__STATE_BLOCK) {
    block b;
    VEC scale[PS_MAX_STATES];
    if (r.state[0].block > 1)
      EACH_STATE(j,
                 scale[j] = V(set1_ps)(*(const float *)(const void *)((const char *)at.state[j] +
                                                                      ps__stored_at(r.state[j], i) +
                                                                      PS__STATE_BLOCK)));
    for (uint32_t v = 0; v < VECTORS; v += 2) {
      const VECI for_w = mix(sr), first = mix(V(add_epi64)(sr, gamma));
      b.word[0][v / 2] = first;
      b.word[1][v / 2] = XOR(for_w, first);
      update_vector(&r, v, i, &at, &c, optimizer, part, scale, for_w, &b);
      update_vector(&r, v + 1, i, &at, &c, optimizer, part, scale, for_w, &b);
      sr = V(add_epi64)(sr, next); /* LANES / 2 groups of 2 words on */
    }
    if (part != PS_UPDATE_WEIGHTS)
      store_states(&r, i, &at, n_states, &b);
  }
  update_tail(n, i, a, k, optimizer, recipe, part);
}

TARGET PS__UPDATE_INLINE void update_as(uint32_t recipe, uint64_t n, const ps__arrays *a,
                                        const ps__update_k *k, ps_optimizer optimizer,
                                        ps__update_part part) {
  const ps__recipe r = ps__recipe_of(recipe);
  const uint32_t w = r.updated.dtype, grad = r.grad.dtype, copy = r.weights.dtype;
  const bool same = r.state[0].dtype == w;
  if (same && w == PS_F32 && (grad == PS_F32 || grad == PS_BF16) &&
      (copy == PS_F32 || copy == PS_BF16))
    update_wide(recipe, n, a, k, optimizer, part);
  else if (same && w == PS_BF16 && grad == PS_BF16 && copy == PS_BF16)
    update_pairs(recipe, n, a, k, optimizer, part);
  else
    update_blocks(recipe, n, a, k, optimizer, part);
}

#define PS__UPDATE_ATTRIBUTES TARGET
PS__OPTIMIZERS(PS__UPDATE_DEFINE)
const ps__update_table TABLE = {PS__OPTIMIZERS(PS__UPDATE_ROWS)};
