/* update_impl.h - between update.c and its variants (three here, one in cuda/): the constants of
 * one update and the tables of functions. */
#ifndef PS_UPDATE_IMPL_H
#define PS_UPDATE_IMPL_H
#include "core/mix64.h"
#include "optim/optim.h"

#define PS__QUIET_NAN 0x7fc00000u
#ifdef __cplusplus
extern "C" {
#endif

/* What is the same for every element of a call; each field is rounded to fp32 once, so that all
 * variants start alike. X(name): the numbers that steps use. */
#define PS__UPDATE_NUMBERS(X)                                                                      \
  X(lr)                                                                                            \
  X(lr_decay)                                                                                      \
  X(beta1)                                                                                         \
  X(beta1_rest) X(beta2) X(beta2_rest) X(eps) X(grad_scale) X(c1) X(c2) X(decay) X(momentum)
#define PS__UPDATE_FLOAT(name) float name;
typedef struct ps__update_k {
  PS__UPDATE_NUMBERS(PS__UPDATE_FLOAT)
  bool nesterov;
  uint64_t sr_key;  /* of seed and step */
  uint64_t element; /* global index of the first element */
} ps__update_k;
/* The constants of elements with @decay, the first of which is @element0; whatever the calling
 * thread's floating-point mode. */
ps__update_k ps__update_constants(const ps__update *u, float decay, uint64_t element0);
/* The CPU's ps__update_unit_fn. */
ps_status ps__cpu_update_unit(void *exec, const ps__update *u, const ps__segment *segments,
                              uint32_t n_segments, const ps__arrays *a, uint64_t unit_element0,
                              const ps__update_gate *gate);

/* For PS__OPTIMIZERS (optim.h): what the compiler must know. */
#define PS__N_STATES_CASE(NAME, name, n_states, parts, state_op)                                   \
case PS_OPTIMIZER_##NAME: return n_states;
PS__ANYWHERE static inline uint32_t ps__n_states(ps_optimizer optimizer) {
  switch (optimizer) {
    PS__OPTIMIZERS(PS__N_STATES_CASE)
  default: return 0;
  }
}

/* The same as ps__recipes[], always inlined: to its callers all of it is constant. */
#define PS__RECIPE_CASE(ROW, name, weights, updated, grad, state, bits)                            \
case ROW: {                                                                                        \
  const ps__recipe r = {name,                                                                      \
                        PS__STORED_##weights,                                                      \
                        PS__STORED_##updated,                                                      \
                        PS__STORED_##grad,                                                         \
                        PS__STATE_##state,                                                         \
                        ROW,                                                                       \
                        bits,                                                                      \
                        false};                                                                    \
  return r;                                                                                        \
}
#define PS__RECIPE_CASES(NAME, name, weights, updated, grad, state)                                \
  PS__RECIPE_CASE(PS__ROW_##NAME, name, weights, updated, grad, state, 0)                          \
  PS__RECIPE_CASE(PS__ROW_##NAME##_8BIT, name, weights, updated, grad, 8BIT, 8)
PS__ANYWHERE static inline __attribute__((always_inline)) ps__recipe ps__recipe_of(uint32_t row) {
  switch (row) {
    PS__RECIPES(PS__RECIPE_CASES)
  default: break;
  }
  const ps__recipe none = {
      "", PS__STORED_F32, PS__STORED_F32, PS__STORED_F32, PS__STATE_F32, PS__ROW_FP32, 0, false};
  return none;
}

/* The words of the group of four elements that @element is in: word[0] for w, word[1 + k] for
 * state[k]; the element's 16 bits start at bit 16 * (element % 4). */
PS__ANYWHERE static inline void ps__sr_words(uint64_t word[1 + PS_MAX_STATES], uint64_t key,
                                             uint64_t element) {
  for (uint64_t a = 0; a < 2; a++)
    word[a] = ps__mix64(key + (2 * (element / 4) + a + 1) * PS__MIX_GAMMA);
  word[2] = word[0] ^ word[1];
}

/* One contiguous piece, which begins with a block, by optimizer, row and part; NULL for parts that
 * an optimizer is not split into, and for rows with FP8. */
typedef void (*ps__update_fn)(uint64_t n, const ps__arrays *a, const ps__update_k *k);
typedef ps__update_fn ps__update_table[PS_N_OPTIMIZERS][PS__N_ROWS][PS_N_UPDATE_PARTS];
extern const ps__update_table ps__update_scalar;
#if defined(__x86_64__)
extern const ps__update_table ps__update_avx2;
extern const ps__update_table ps__update_avx512;
#endif

#ifndef __CUDACC__
/* The functions of a table, from update_as() that has recipe, optimizer and part as its first and
 * last arguments: inlined, so that what a recipe or a part does not need is not computed. */
#  define PS__UPDATE_INLINE static inline __attribute__((always_inline))
#  define PS__UPDATE_FN(attributes, name, OPTIMIZER, RECIPE, PART)                                 \
    attributes static void name(uint64_t n, const ps__arrays *a, const ps__update_k *k) {          \
      update_as(PS__ROW_##RECIPE, n, a, k, PS_OPTIMIZER_##OPTIMIZER, PS_UPDATE_##PART);            \
    }
#  define PS__UPDATE_FNS_WHOLE(RECIPE, attributes, OPTIMIZER, optimizer)                           \
    PS__UPDATE_FN(attributes, optimizer##_##RECIPE, OPTIMIZER, RECIPE, WHOLE)
#  define PS__UPDATE_FNS_SPLITS(RECIPE, attributes, OPTIMIZER, optimizer)                          \
    PS__UPDATE_FNS_WHOLE(RECIPE, attributes, OPTIMIZER, optimizer)                                 \
    PS__UPDATE_FN(attributes, optimizer##_##RECIPE##_weights, OPTIMIZER, RECIPE, WEIGHTS)          \
    PS__UPDATE_FN(attributes, optimizer##_##RECIPE##_state, OPTIMIZER, RECIPE, STATE)
#  define PS__UPDATE_ROW_WHOLE(RECIPE, optimizer)                                                  \
    [PS__ROW_##RECIPE] = {optimizer##_##RECIPE, NULL, NULL},
#  define PS__UPDATE_ROW_SPLITS(RECIPE, optimizer)                                                 \
    [PS__ROW_##RECIPE] = {optimizer##_##RECIPE, optimizer##_##RECIPE##_weights,                    \
                          optimizer##_##RECIPE##_state},
/* For PS__OPTIMIZERS; PS__UPDATE_ATTRIBUTES is the file's. */
#  define PS__UPDATE_DEFINE(NAME, name, n_states, parts, state_op)                                 \
    PS__EACH_ROW(PS__UPDATE_FNS_##parts, PS__UPDATE_ATTRIBUTES, NAME, name)
#  define PS__UPDATE_ROWS(NAME, name, n_states, parts, state_op)                                   \
    [PS_OPTIMIZER_##NAME] = {PS__EACH_ROW(PS__UPDATE_ROW_##parts, name)},

/* A statement for each state, the number j a constant: what it names stays in registers. */
#  define EACH_STATE(j, ...)                                                                       \
    do {                                                                                           \
      {                                                                                            \
        enum { j = 0 };                                                                            \
        __VA_ARGS__;                                                                               \
      }                                                                                            \
      if (n_states > 1) {                                                                          \
        enum { j = 1 };                                                                            \
        __VA_ARGS__;                                                                               \
      }                                                                                            \
    } while (0)
_Static_assert(PS_MAX_STATES == 2, "EACH_STATE is for two");

/* What the vector variants will read a little later: the processor's own prefetching follows
 * four arrays at once less far than its memory allows. On 14 threads of a Xeon AdamW in bf16
 * went from 125 to 139 GB/s with it, and with a word less to mix to 154; the weights' part from
 * 125 to 147 at twice the distance (bench/LOG.md). */
enum { PS__UPDATE_AHEAD = 2048 }; /* BYTES */
PS__UPDATE_INLINE void ps__update_prefetch(uint32_t n_states, ps__update_part part,
                                           const ps__arrays *a, uint64_t state_at,
                                           uint64_t grad_at) {
#  if defined(__x86_64__)
  const uint64_t at = state_at + PS__UPDATE_AHEAD;
  if (part != PS_UPDATE_STATE)
    __builtin_prefetch((const char *)a->w + at);
  EACH_STATE(j, __builtin_prefetch((const char *)a->state[j] + at));
  __builtin_prefetch((const char *)a->grad + grad_at + PS__UPDATE_AHEAD);
#  endif
}
#endif
#ifdef __cplusplus
}
#endif
#endif
