/* recipe.c - the table of recipes. */
#include "optim/recipe.h"
#include "core/core.h"
#include <string.h>

#define ROW_OF(NAME, fp8_, name_, ARRAYS, weights_, updated_, grad_, state0, state1, rounding_)    \
  [PS_RECIPE_##NAME] = {.name = name_,                                                             \
                        .weights = PS__STORED_##weights_,                                          \
                        .updated = PS__STORED_##updated_,                                          \
                        .grad = PS__STORED_##grad_,                                                \
                        .state = {PS__STORED_##state0, PS__STORED_##state1},                       \
                        .rounding = rounding_,                                                     \
                        .arrays = PS_RECIPE_##ARRAYS,                                              \
                        .fp8 = fp8_},
#define ROW(NAME, name_, ...) ROW_OF(NAME, false, name_, NAME, __VA_ARGS__)
#define FP8_ROW(NAME, ...)    ROW_OF(NAME, true, __VA_ARGS__)
const ps__recipe ps__recipes[PS_N_RECIPES] = {PS__RECIPES(ROW) PS__FP8_RECIPES(FP8_ROW)};

#define ONE_DTYPE(NAME, name, weights, updated, grad, state0, state1, rounding)                    \
  _Static_assert(PS_##weights == PS_##grad, name ": an op of a layer has one dtype");
PS__RECIPES(ONE_DTYPE)

_Static_assert((int)PS_RECIPE_FP8 == PS__N_UPDATE_RECIPES, "FP8's recipes are the last");

const char *ps_recipe_name(ps_recipe recipe) {
  return (unsigned)recipe < PS_N_RECIPES ? ps__recipes[recipe].name : "unknown";
}

ps_status ps_recipe_parse(ps_recipe *out, const char *name) {
  for (int i = 0; name && i < PS_N_RECIPES; i++)
    if (!strcmp(name, ps__recipes[i].name)) {
      *out = (ps_recipe)i;
      return PS_OK;
    }
  return ps__fail(PS_EINVAL, "the state recipe \"%.40s\" is unknown: use " PS__RECIPE_NAMES,
                  name ? name : "");
}
