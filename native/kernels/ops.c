/* ops.c - the list of ops. */
#include "kernels/ops.h"
#include <string.h>

#define ADDRESS(op) &ps__k_##op,
static const ps_kernel *const ops[] = {PS__OPS(ADDRESS)};

const ps_kernel *ps__op_by_name(const char *name) {
  for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
    if (strcmp(ops[i]->name, name) == 0)
      return ops[i];
  return NULL;
}
