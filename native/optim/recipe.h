/* recipe.h - the table of recipes: how a unit's arrays are stored. A header for C, C++ and CUDA. */
#ifndef PS_OPTIM_RECIPE_H
#define PS_OPTIM_RECIPE_H
#include "core/storage.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { PS_MAX_STATES = 2 }; /* an optimizer; one more needs 16 more random bits an element */

/* A row of the table: a recipe, with its state as the recipe says or in 8 bits. What the optimizer
 * updates is rounded stochastically where it is narrower than fp32 (optim.h). */
typedef struct ps__recipe {
  const char *name; /* the recipe's */
  /* Weights on the host, the link and the device (copies do not convert); activations. Plain. */
  ps__storage weights;
  /* The weights that the optimizer updates. Of another dtype than `weights`: they are an array of
   * their own, the master copy. Of PS__I8, that array has the master's low bits, and `weights` its
   * high bits; else `weights` are its copy, rounded to nearest even. */
  ps__storage updated;
  /* Gradients and their totals, on the device, the link and the host. They are stored as
   * `weights` are, because an op of a layer has one dtype. */
  ps__storage grad;
  ps__storage state[PS_MAX_STATES];
  /* The row of the same arrays without FP8, whose code the optimizer runs; of others their own. */
  uint32_t arrays;
  uint32_t state_bits; /* 8, or 0: as the recipe says */
  bool fp8;            /* products of most blocks have FP8 operands (model/product.h) */
} ps__recipe;

/* PS__STORED_NAME: a ps__storage that the rows of recipes call NAME. A plain one has the name of
 * its dtype. LOW8: bits 8 to 15 of an fp32 number whose lowest 8 bits are 0. */
#define PS__STORED_F32  {PS_F32, 1, 0, 0}
#define PS__STORED_BF16 {PS_BF16, 1, 0, 0}
#define PS__STORED_LOW8 {PS__I8, 1, 0, 0}
/* PS__STATE_NAME: the storage of state[0] and state[1]. In 8 bits (bits8.h), a block has an fp32
 * scale; as long as spans are aligned it belongs to one parameter (plan/config.c). */
enum { PS__STATE_BLOCK = PS__SPAN_ALIGN };
#define PS__STATE_F32  {PS__STORED_F32, PS__STORED_F32}
#define PS__STATE_BF16 {PS__STORED_BF16, PS__STORED_BF16}
#define PS__STATE_8BIT {{PS__I8, PS__STATE_BLOCK, 4, 0}, {PS__U8, PS__STATE_BLOCK, 4, 0}}

/* X(NAME, "name", weights, updated, grad, state): PS_RECIPE_NAME, which users call "name". */
#define PS__RECIPES(X)                                                                             \
  X(FP32, "fp32", F32, F32, F32, F32)                                                              \
  X(FP32_MASTER, "fp32-master", BF16, F32, BF16, F32)                                              \
  X(BF16, "bf16", BF16, BF16, BF16, BF16)                                                          \
  X(FP24_MASTER, "fp24-master", BF16, LOW8, BF16, BF16)
/* Those with FP8: X(NAME, "name", ARRAYS, then as above). To the optimizer they are ARRAYS. */
#define PS__FP8_RECIPES(X)                                                                         \
  X(FP8, "fp8", BF16, BF16, BF16, BF16, BF16)                                                      \
  X(FP8_MASTER, "fp8-master", FP32_MASTER, BF16, F32, BF16, F32)

/* The rows: PS__ROW_NAME and PS__ROW_NAME_8BIT. Those of state as the recipe says come first, so
 * that a ps_recipe is a row. */
enum { PS__8BIT = PS_N_RECIPES, PS__N_ROWS = 2 * PS_N_RECIPES };
#define PS__ROW_NAMES(NAME, ...)                                                                   \
  PS__ROW_##NAME = PS_RECIPE_##NAME, PS__ROW_##NAME##_8BIT = PS__8BIT + PS_RECIPE_##NAME,
enum { PS__RECIPES(PS__ROW_NAMES) PS__FP8_RECIPES(PS__ROW_NAMES) };
static inline uint32_t ps__row_of(uint32_t recipe, uint32_t state_bits) {
  return recipe + (state_bits == 8 ? PS__8BIT : 0);
}
/* The names of PS__RECIPES, once as they are and once in 8 bits, for macros with arguments of their
 * own: the rows that have an update. */
#define PS__EACH_ROW(X, ...)                                                                       \
  X(FP32, __VA_ARGS__)                                                                             \
  X(FP32_MASTER, __VA_ARGS__)                                                                      \
  X(BF16, __VA_ARGS__)                                                                             \
  X(FP24_MASTER, __VA_ARGS__)                                                                      \
  X(FP32_8BIT, __VA_ARGS__)                                                                        \
  X(FP32_MASTER_8BIT, __VA_ARGS__)                                                                 \
  X(BF16_8BIT, __VA_ARGS__)                                                                        \
  X(FP24_MASTER_8BIT, __VA_ARGS__)
/* For messages. */
#define PS__RECIPE_NAMES "fp32, fp32-master, bf16, fp24-master, fp8 or fp8-master"
extern const ps__recipe ps__recipes[PS__N_ROWS];

static inline bool ps__has_master(uint32_t row) {
  return ps__recipes[row].updated.dtype != ps__recipes[row].weights.dtype;
}
/* Whether `updated` has the low bits of a master copy, whose high bits are `weights`. */
static inline bool ps__in_halves(uint32_t row) { return ps__recipes[row].updated.dtype == PS__I8; }
/* The dtype of what the optimizer updates in files, whole numbers of which are read and written. */
static inline ps_dtype ps__updated_dtype(uint32_t row) {
  const uint32_t dtype = ps__recipes[row].updated.dtype;
  return dtype == PS__I8 ? PS_F32 : (ps_dtype)dtype;
}

/* That of its state k: blocks are bytes there. */
static inline ps_dtype ps__state_dtype(uint32_t row, uint32_t k) {
  const ps__storage as = ps__recipes[row].state[k];
  return as.block > 1 ? (ps_dtype)PS__U8 : (ps_dtype)as.dtype;
}

#ifdef __cplusplus
}
#endif
#endif
