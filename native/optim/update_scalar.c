/* update_scalar.c - updates one element at a time: the reference that the vector variants must
 * match, their tails, and what runs on a CPU without AVX2. Contract, NaN rule and rounding:
 * optim.h. Compiled without FMA contraction. */
#include "core/dtype.h"
#include <math.h>
#include <string.h>

#define STEP        static inline __attribute__((always_inline))
#define REAL        float
#define STEP_K      ps__update_k
#define ADD(a, b)   ((a) + (b))
#define SUB(a, b)   ((a) - (b))
#define MUL(a, b)   ((a) * (b))
#define DIV(a, b)   ((a) / (b))
#define SQRT(a)     sqrtf(a)
#define SIGN(a)     sign_of(a)
#define CONST(x)    (x)
#define MOST(a, b)  ((a) > (b) ? (a) : (b))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
static inline float sign_of(float x) { return x != x || x == 0 ? x : copysignf(1.0f, x); }
#include "optim/steps.h"

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static inline float canonical(float x) { return x != x ? float_of(PS__QUIET_NAN) : x; }

/* The words of a group, and the 16 bits of element @e of it for array @a: 0 for w, 1 + j for state
 * j. */
typedef struct group {
  uint64_t word[1 + PS_MAX_STATES];
} group;
static inline uint32_t random_of(const group *g, uint32_t a, uint64_t e) {
  return (uint32_t)(g->word[a] >> (16 * (e % 4))) & 0xffffu;
}

/* Rounded stochastically where @dt is bf16: infinities and the one NaN have 16 zero bits at the
 * end, so that adding r < 2^16 leaves them. */
static inline void store(void *p, uint32_t dt, uint64_t i, float x, uint32_t r) {
  if (dt == PS_BF16)
    ((uint16_t *)p)[i] = (uint16_t)((bits_of(x) + r) >> 16);
  else
    ((float *)p)[i] = x;
}

/* A master copy of 24 bits: @high has the upper 16, rounded to nearest, and @low the difference as
 * a signed byte, which is the lower 8 of the 24. The last 8 of @bits are dropped. */
static inline float merged(const void *high, const void *low, uint64_t i) {
  return float_of(((uint32_t)((const uint16_t *)high)[i] << 16) +
                  ((uint32_t)((const int8_t *)low)[i] << 8));
}
static inline void split(void *high, void *low, uint64_t i, uint32_t bits) {
  ((uint16_t *)high)[i] = (uint16_t)((bits + 0x8000u) >> 16);
  ((uint8_t *)low)[i] = (uint8_t)(bits >> 8);
}
static inline float load_weight(const ps__recipe *r, const ps__arrays *a, uint64_t i) {
  if (r->updated.dtype != PS__I8)
    return ps__load1_f32(a->w, r->updated.dtype, i);
  return merged(a->copy, a->w, i);
}
static inline void store_weight(const ps__recipe *r, const ps__arrays *a, uint64_t i, float w,
                                uint32_t random) {
  if (r->updated.dtype == PS__I8) {
    split(a->copy, a->w, i, bits_of(w) + (random & 0xffu));
    return;
  }
  store(a->w, r->updated.dtype, i, w, random);
  if (r->updated.dtype != r->weights.dtype)
    ps__store1_f32(a->copy, r->weights.dtype, i, w);
}

/* ---- state in 8 bits ------------------------------------------------------------------------- */

/* @n elements of the block at @p. */
static inline void load_block(uint32_t dtype, const void *p, uint64_t n, float *x) {
  float scale;
  memcpy(&scale, (const char *)p + PS__STATE_BLOCK, sizeof scale);
  for (uint64_t i = 0; i < n; i++) {
    const int m = ((const int8_t *)p)[i];
    x[i] = dtype == PS__U8 ? read_v((float)((const uint8_t *)p)[i], scale)
           : m < 0         ? -read_m((float)-m, scale)
                           : read_m((float)m, scale);
  }
}

/* @x, @n canonical numbers, rounded with 16 bits each. */
static inline void store_block(uint32_t dtype, void *p, uint64_t n, const float *x,
                               const uint16_t *random) {
  uint32_t most = 0;
  for (uint64_t i = 0; i < n; i++)
    most = MOST(bits_of(x[i]) & 0x7fffffffu, most);
  const float scale = dtype == PS__U8 ? canonical(sqrtf(float_of(most))) : float_of(most);
  for (uint64_t i = 0; i < n; i++) {
    const float size = float_of(bits_of(x[i]) & 0x7fffffffu);
    const uint32_t level = ((uint32_t)fixed_level(dtype == PS__U8 ? PS__LEVELS_V : PS__LEVELS_M,
                                                  dtype == PS__U8 ? sqrtf(size) : size, scale) +
                            random[i]) >>
                           16;
    ((uint8_t *)p)[i] = (uint8_t)(dtype == PS__U8       ? level + (level == 0 && bits_of(size))
                                  : bits_of(x[i]) >> 31 ? 0 - level
                                                        : level);
  }
  memcpy((char *)p + PS__STATE_BLOCK, &scale, sizeof scale);
}

/* ---- an update ------------------------------------------------------------------------------- */

/* @n elements, at most a block, from element @first of @a on. */
PS__UPDATE_INLINE void update_some(uint32_t recipe, uint64_t first, uint64_t n, const ps__arrays *a,
                                   const ps__update_k *k, ps_optimizer optimizer,
                                   ps__update_part part) {
  const ps__recipe r = ps__recipe_of(recipe);
  const uint32_t n_states = ps__n_states(optimizer);
  const bool blocks = r.state[0].block > 1, rounds = blocks || r.updated.dtype != PS_F32;
  float s[PS_MAX_STATES][PS__STATE_BLOCK];
  uint16_t random[PS_MAX_STATES][PS__STATE_BLOCK];
  group g = {{0}};
  if (blocks)
    EACH_STATE(j, load_block(r.state[j].dtype,
                             (char *)a->state[j] + ps__stored_at(r.state[j], first), n, s[j]));
  for (uint64_t b = 0; b < n; b++) {
    const uint64_t i = first + b, e = k->element + i;
    if (rounds && (b == 0 || e % 4 == 0))
      ps__sr_words(g.word, k->sr_key, e);
    float w = part == PS_UPDATE_STATE ? 0 : load_weight(&r, a, i), x[PS_MAX_STATES] = {0};
    EACH_STATE(j, x[j] = blocks ? s[j][b] : ps__load1_f32(a->state[j], r.state[j].dtype, i));
    step(optimizer, k, ps__load1_f32(a->grad, r.grad.dtype, i) * k->grad_scale, &w, x);
    if (part != PS_UPDATE_STATE)
      store_weight(&r, a, i, canonical(w), random_of(&g, 0, e));
    if (part == PS_UPDATE_WEIGHTS)
      continue;
    EACH_STATE(j, s[j][b] = canonical(x[j]); random[j][b] = (uint16_t)random_of(&g, 1 + j, e));
    if (!blocks)
      EACH_STATE(j, store(a->state[j], r.state[j].dtype, i, s[j][b], random[j][b]));
  }
  if (blocks && part != PS_UPDATE_WEIGHTS)
    EACH_STATE(j,
               store_block(r.state[j].dtype, (char *)a->state[j] + ps__stored_at(r.state[j], first),
                           n, s[j], random[j]));
}

PS__UPDATE_INLINE void update_as(uint32_t recipe, uint64_t n, const ps__arrays *a,
                                 const ps__update_k *k, ps_optimizer optimizer,
                                 ps__update_part part) {
  for (uint64_t i = 0; i < n; i += PS__STATE_BLOCK)
    update_some(recipe, i, n - i < PS__STATE_BLOCK ? n - i : PS__STATE_BLOCK, a, k, optimizer,
                part);
}

#define PS__UPDATE_ATTRIBUTES
PS__OPTIMIZERS(PS__UPDATE_DEFINE)
const ps__update_table ps__update_scalar = {PS__OPTIMIZERS(PS__UPDATE_ROWS)};

/* ---- conversions ----------------------------------------------------------------------------- */

void ps__stored_to_f32(ps__storage as, float *dst, const void *src, uint64_t n) {
  if (as.block == 1)
    ps__convert(dst, PS_F32, src, as.dtype, n);
  for (uint64_t i = 0; as.block > 1 && i < n; i += as.block)
    load_block(as.dtype, (const char *)src + ps__stored_at(as, i),
               n - i < as.block ? n - i : as.block, dst + i);
}

void ps__stored_from_f32(ps__storage as, void *dst, const float *src, uint64_t n) {
  uint16_t half[PS__STATE_BLOCK];
  float x[PS__STATE_BLOCK];
  for (uint32_t i = 0; i < PS__STATE_BLOCK; i++)
    half[i] = 0x8000;
  if (as.block == 1)
    ps__convert(dst, (ps_dtype)as.dtype, src, PS_F32, n);
  for (uint64_t i = 0; as.block > 1 && i < n; i += as.block) {
    const uint64_t m = n - i < as.block ? n - i : as.block;
    for (uint64_t b = 0; b < m; b++)
      x[b] = canonical(src[i + b]);
    store_block(as.dtype, (char *)dst + ps__stored_at(as, i), m, x, half);
  }
}

void ps__master_merge(float *dst, const void *high, const void *low, uint64_t n) {
  for (uint64_t i = 0; i < n; i++)
    dst[i] = merged(high, low, i);
}

void ps__master_split(void *high, void *low, const float *src, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    const uint32_t bits = bits_of(canonical(src[i]));
    split(high, low, i, bits + 0x7fu + (bits >> 8 & 1u));
  }
}
