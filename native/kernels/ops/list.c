/* ops.c - the list of ops. */
#include "kernels/ops.h"
#include <string.h>

#define ADDRESS(op) &ps__k_##op,
static const ps_kernel *const ops[] = {PS__OPS(ADDRESS)};

const ps_kernel *ps__op_at(uint32_t i) { return i < sizeof ops / sizeof *ops ? ops[i] : NULL; }

const ps_kernel *ps__op_by_name(const char *name) {
  const ps_kernel *k;
  for (uint32_t i = 0; (k = ps__op_at(i)) && strcmp(k->name, name) != 0; i++)
    ;
  return k;
}
