/* dtype.c - sizes and names of dtypes and recipes. */
#include <penstock/model.h>

#include "core/core.h"
#include <string.h>

size_t ps_dtype_bytes(ps_dtype dtype) { return dtype == PS_F32 ? 4 : dtype == PS_BF16 ? 2 : 0; }

static const char *const recipe_names[PS_N_RECIPES] = {"fp32", "fp32-master", "bf16"};

const char *ps_recipe_name(ps_recipe recipe) {
  return (unsigned)recipe < PS_N_RECIPES ? recipe_names[recipe] : "unknown";
}

ps_status ps_recipe_parse(ps_recipe *out, const char *name) {
  for (int i = 0; name && i < PS_N_RECIPES; i++)
    if (!strcmp(name, recipe_names[i])) {
      *out = (ps_recipe)i;
      return PS_OK;
    }
  return ps__fail(PS_EINVAL, "the state recipe \"%.40s\" is unknown: use fp32, fp32-master or bf16",
                  name ? name : "");
}
