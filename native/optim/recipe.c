/* recipe.c - the table of recipes. */
#include "optim/recipe.h"
#include "core/core.h"
#include <string.h>

#define ROW_OF(NAME, ROW, fp8_, name_, ARRAYS, weights_, updated_, grad_, state_, bits)            \
  [PS__ROW_##NAME##ROW] = {.name = name_,                                                          \
                           .weights = PS__STORED_##weights_,                                       \
                           .updated = PS__STORED_##updated_,                                       \
                           .grad = PS__STORED_##grad_,                                             \
                           .state = PS__STATE_##state_,                                            \
                           .arrays = PS__ROW_##ARRAYS##ROW,                                        \
                           .state_bits = bits,                                                     \
                           .fp8 = fp8_},
#define BOTH(NAME, fp8, name, ARRAYS, weights, updated, grad, state)                               \
  ROW_OF(NAME, , fp8, name, ARRAYS, weights, updated, grad, state, 0)                              \
  ROW_OF(NAME, _8BIT, fp8, name, ARRAYS, weights, updated, grad, 8BIT, 8)
#define ROW(NAME, name_, ...) BOTH(NAME, false, name_, NAME, __VA_ARGS__)
#define FP8_ROW(NAME, ...)    BOTH(NAME, true, __VA_ARGS__)
const ps__recipe ps__recipes[PS__N_ROWS] = {PS__RECIPES(ROW) PS__FP8_RECIPES(FP8_ROW)};

#define ONE_DTYPE(NAME, name, weights, updated, grad, state)                                       \
  _Static_assert(PS_##weights == PS_##grad, name ": an op of a layer has one dtype");
PS__RECIPES(ONE_DTYPE)

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
