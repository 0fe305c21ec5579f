/* recipe.h - the table of recipes: how a unit's arrays are stored. A header for C, C++ and CUDA. */
#ifndef PS_OPTIM_RECIPE_H
#define PS_OPTIM_RECIPE_H
#include "core/storage.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { PS_MAX_STATES = 2 }; /* an optimizer; one more needs 16 more random bits an element */

/* How the optimizer stores updated weights and states that are narrower than fp32. */
typedef enum ps__rounding { PS__TO_NEAREST, PS__STOCHASTIC } ps__rounding;

typedef struct ps__recipe {
  const char *name;
  /* Weights on the host, the link and the device (copies do not convert); activations. Plain. */
  ps__storage weights;
  /* The weights that the optimizer updates. Of another dtype than `weights`: they are an array of
   * their own, the master copy, and `weights` are its copy, rounded to nearest even. */
  ps__storage updated;
  /* Gradients and their totals, on the device, the link and the host. They are stored as
   * `weights` are, because an op of a layer has one dtype. */
  ps__storage grad;
  ps__storage state[PS_MAX_STATES];
  ps__rounding rounding;
  /* The recipe of the same arrays without FP8, whose code the optimizer runs; of others their
   * own. */
  ps_recipe arrays;
  bool fp8; /* products of most blocks have FP8 operands (model/product.h) */
} ps__recipe;

/* PS__STORED_NAME: a ps__storage that the rows of recipes call NAME. A plain one has the name of
 * its dtype. */
#define PS__STORED_F32  {PS_F32, 1, 0}
#define PS__STORED_BF16 {PS_BF16, 1, 0}

/* X(NAME, "name", weights, updated, grad, state[0], state[1], rounding): PS_RECIPE_NAME, which
 * users call "name". */
#define PS__RECIPES(X)                                                                             \
  X(FP32, "fp32", F32, F32, F32, F32, F32, PS__TO_NEAREST)                                         \
  X(FP32_MASTER, "fp32-master", BF16, F32, BF16, F32, F32, PS__TO_NEAREST)                         \
  X(BF16, "bf16", BF16, BF16, BF16, BF16, BF16, PS__STOCHASTIC)
/* Those with FP8: X(NAME, "name", ARRAYS, then as above). To the optimizer they are ARRAYS. */
#define PS__FP8_RECIPES(X)                                                                         \
  X(FP8, "fp8", BF16, BF16, BF16, BF16, BF16, BF16, PS__STOCHASTIC)                                \
  X(FP8_MASTER, "fp8-master", FP32_MASTER, BF16, F32, BF16, F32, F32, PS__TO_NEAREST)
/* The names of PS__RECIPES in the same order, for macros with arguments of their own. */
#define PS__EACH_RECIPE(X, ...)                                                                    \
  X(FP32, __VA_ARGS__) X(FP32_MASTER, __VA_ARGS__) X(BF16, __VA_ARGS__)
/* How many those are. They come first: updates are of recipes below PS__N_UPDATE_RECIPES. */
#define PS__ONE_MORE(...) +1
enum { PS__N_UPDATE_RECIPES = PS__EACH_RECIPE(PS__ONE_MORE, ) };
/* For messages. */
#define PS__RECIPE_NAMES "fp32, fp32-master, bf16, fp8 or fp8-master"
extern const ps__recipe ps__recipes[PS_N_RECIPES];

static inline bool ps__has_master(ps_recipe recipe) {
  return ps__recipes[recipe].updated.dtype != ps__recipes[recipe].weights.dtype;
}

#ifdef __cplusplus
}
#endif
#endif
