/* optimizers.c - the table of optimizers. A row here, its step in a header of its name and its
 * line in PS__OPTIMIZERS (update_impl.h) are all that an optimizer is. */
#include "core/core.h"
#include "optim/update_impl.h"

enum { WHOLE = 0, SPLITS = 1 };
#define CONSTANTS(NAME, name, n, parts) NAME##_STATES = n, NAME##_SPLITS = parts,
enum { PS__OPTIMIZERS(CONSTANTS) };

const ps__optimizer ps__optimizers[PS_N_OPTIMIZERS] = {
    [PS_OPTIMIZER_ADAMW] = {.name = "adamw",
                            .op_name = {"adamw", "adamw", "adamw_moments"},
                            .n_states = ADAMW_STATES,
                            .splits = ADAMW_SPLITS},
};

const char *ps_optimizer_name(ps_optimizer optimizer) {
  return (unsigned)optimizer < PS_N_OPTIMIZERS ? ps__optimizers[optimizer].name : "unknown";
}

uint64_t ps__state_bytes(ps_optimizer optimizer, ps_recipe recipe) {
  return ps__optimizers[optimizer].n_states * ps_dtype_bytes(ps__state_dtype(recipe));
}

double ps__update_bytes(ps_optimizer optimizer, ps_recipe recipe, ps__update_part part) {
  const uint64_t e = ps_dtype_bytes(ps__state_dtype(recipe)),
                 state = ps__state_bytes(optimizer, recipe),
                 grad = ps_dtype_bytes(ps__grad_dtype(recipe)),
                 copy = recipe == PS_RECIPE_FP32_MASTER ? 2 : 0;
  return (double)(part == PS_UPDATE_WHOLE     ? 2 * e + copy + 2 * state + grad
                  : part == PS_UPDATE_WEIGHTS ? 2 * e + copy + state + grad
                                              : 2 * state + grad);
}

uint32_t ps__update_operands(ps_optimizer optimizer, ps_recipe recipe, ps__update_part part,
                             bool header, ps__operand_access out[PS_N_OPERANDS]) {
  const bool weights = part != PS_UPDATE_STATE;
  const uint32_t state = part == PS_UPDATE_WEIGHTS ? PS_READ : PS_READ_WRITE;
  uint32_t n = 0;
  if (weights)
    out[n++] = (ps__operand_access){PS_OPERAND_WEIGHTS, PS_READ_WRITE};
  for (uint32_t k = 0; k < ps__optimizers[optimizer].n_states; k++)
    out[n++] = (ps__operand_access){PS_OPERAND_STATE + k, state};
  out[n++] = (ps__operand_access){PS_OPERAND_GRAD, PS_READ};
  if (weights && recipe == PS_RECIPE_FP32_MASTER)
    out[n++] = (ps__operand_access){PS_OPERAND_COPY, PS_WRITE};
  out[n++] = (ps__operand_access){PS_OPERAND_GATE, PS_READ};
  if (header)
    out[n++] = (ps__operand_access){PS_OPERAND_HEADER, PS_READ};
  return n;
}

void *ps__operand_ptr(const ps__operand_access *operands, uint32_t n, uint32_t operand,
                      void *const *ptr) {
  for (uint32_t i = 0; i < n; i++)
    if (operands[i].operand == operand)
      return ptr[i];
  return NULL;
}

ps__arrays ps__arrays_of(const ps__operand_access *operands, uint32_t n, void *const *ptr) {
  ps__arrays a = {.w = ps__operand_ptr(operands, n, PS_OPERAND_WEIGHTS, ptr),
                  .w_bf16 = ps__operand_ptr(operands, n, PS_OPERAND_COPY, ptr),
                  .grad = ps__operand_ptr(operands, n, PS_OPERAND_GRAD, ptr)};
  for (uint32_t k = 0; k < PS_MAX_STATES; k++)
    a.state[k] = ps__operand_ptr(operands, n, PS_OPERAND_STATE + k, ptr);
  return a;
}
