/* optimizers.c - the table of optimizers: their hyperparameters, what each stores and moves, and
 * the operands of the update as an op. */
#include "core/core.h"
#include "optim/optim.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WHOLE = 0, SPLITS = 1 };
#define ROW(NAME, name_, n, parts, state_op)                                                       \
  [PS_OPTIMIZER_##NAME] = {.name = #name_, .n_states = n, .splits = parts},
const ps__optimizer ps__optimizers[PS_N_OPTIMIZERS] = {PS__OPTIMIZERS(ROW)};

typedef struct hyper {
  bool known; /* to the optimizer */
  double preset, least, below;
} hyper;
#define HYPER(preset, least, below) {true, preset, least, below}
static const hyper hypers[PS_N_OPTIMIZERS][PS_N_HYPERS] = {
    [PS_OPTIMIZER_ADAMW] = {[PS_HYPER_LR] = HYPER(3e-4, -INFINITY, INFINITY),
                            [PS_HYPER_BETA1] = HYPER(0.9, 0, 1),
                            [PS_HYPER_BETA2] = HYPER(0.95, 0, 1),
                            [PS_HYPER_EPS] = HYPER(1e-8, 1e-38, INFINITY),
                            [PS_HYPER_WEIGHT_DECAY] = HYPER(0.1, 0, INFINITY)},
    /* A third of AdamW's rate and three times its decay, as the paper advises. A beta2 of 0 would
     * leave NaNs in the state that are not in the weight (steps.h). */
    [PS_OPTIMIZER_LION] = {[PS_HYPER_LR] = HYPER(1e-4, -INFINITY, INFINITY),
                           [PS_HYPER_BETA1] = HYPER(0.9, 0, 1),
                           [PS_HYPER_BETA2] = HYPER(0.99, 1e-6, 1),
                           [PS_HYPER_WEIGHT_DECAY] = HYPER(0.3, 0, INFINITY)},
    /* PyTorch's, but for the momentum, which is 0 there. */
    [PS_OPTIMIZER_SGD] = {[PS_HYPER_LR] = HYPER(1e-3, -INFINITY, INFINITY),
                          [PS_HYPER_MOMENTUM] = HYPER(0.9, 0, 1),
                          [PS_HYPER_NESTEROV] = HYPER(0, 0, 2),
                          [PS_HYPER_WEIGHT_DECAY] = HYPER(0, 0, INFINITY)},
};
static const char *const hyper_name[PS_N_HYPERS] = {
    [PS_HYPER_LR] = "lr",
    [PS_HYPER_BETA1] = "beta1",
    [PS_HYPER_BETA2] = "beta2",
    [PS_HYPER_EPS] = "eps",
    [PS_HYPER_MOMENTUM] = "momentum",
    [PS_HYPER_NESTEROV] = "nesterov",
    [PS_HYPER_WEIGHT_DECAY] = "weight_decay",
};

double ps_optimizer_default(ps_optimizer optimizer, ps_hyper h) {
  const bool known = (unsigned)optimizer < PS_N_OPTIMIZERS && (unsigned)h < PS_N_HYPERS &&
                     hypers[optimizer][h].known;
  return known ? hypers[optimizer][h].preset : NAN;
}

/* A hyperparameter that the optimizer does not know: which ones do. */
static ps_status not_its(ps_optimizer optimizer, int h) {
  char who[64] = "";
  for (int o = 0; o < PS_N_OPTIMIZERS; o++)
    if (hypers[o][h].known)
      snprintf(who + strlen(who), sizeof who - strlen(who), "%s%s", who[0] ? " and " : "",
               ps__optimizers[o].name);
  return ps__fail(PS_EINVAL, "%s is of %s %s, and the optimizer is %s: leave it out",
                  ps__field(hyper_name[h]), ps__field("optimizer"), who,
                  ps__optimizers[optimizer].name);
}

ps_status ps__hypers_resolve(ps_optimizer optimizer, double value[PS_N_HYPERS]) {
  for (int h = 0; h < PS_N_HYPERS; h++) {
    const hyper *of = &hypers[optimizer][h];
    if (isnan(value[h])) {
      value[h] = of->preset;
      continue;
    }
    if (!of->known)
      return not_its(optimizer, h);
    /* as updates see it */
    if ((float)value[h] >= (float)of->least && (float)value[h] < (float)of->below)
      continue;
    if (isinf(of->below))
      return ps__fail(PS_EINVAL, "%s %g of %s must be finite and at least %g",
                      ps__field(hyper_name[h]), value[h], ps__optimizers[optimizer].name,
                      of->least);
    return ps__fail(PS_EINVAL, "%s %g of %s must be at least %g and below %g",
                    ps__field(hyper_name[h]), value[h], ps__optimizers[optimizer].name, of->least,
                    of->below);
  }
  if (value[PS_HYPER_NESTEROV] > 0 && !(value[PS_HYPER_MOMENTUM] > 0))
    return ps__fail(PS_EINVAL, "%s needs a %s above 0", ps__field("nesterov"),
                    ps__field("momentum"));
  return PS_OK;
}

ps_status ps_optimizer_parse(ps_optimizer *out, const char *name) {
  for (int i = 0; name && i < PS_N_OPTIMIZERS; i++)
    if (!strcmp(name, ps__optimizers[i].name)) {
      *out = (ps_optimizer)i;
      return PS_OK;
    }
  return ps__fail(PS_EINVAL, "the optimizer \"%.40s\" is unknown: use " PS__OPTIMIZER_NAMES,
                  name ? name : "");
}

const char *ps_optimizer_name(ps_optimizer optimizer) {
  return (unsigned)optimizer < PS_N_OPTIMIZERS ? ps__optimizers[optimizer].name : "unknown";
}

uint64_t ps__state_bytes(ps_optimizer optimizer, uint32_t recipe, uint64_t n) {
  uint64_t bytes = 0;
  for (uint32_t k = 0; k < ps__optimizers[optimizer].n_states; k++)
    bytes += ps__stored_bytes(ps__recipes[recipe].state[k], n);
  return bytes;
}

uint64_t ps__master_bytes(uint32_t recipe, uint64_t n) {
  return ps__has_master(recipe) ? ps__stored_bytes(ps__recipes[recipe].updated, n) : 0;
}

double ps__state_each(ps_optimizer optimizer, uint32_t recipe) {
  double bytes = 0;
  for (uint32_t k = 0; k < ps__optimizers[optimizer].n_states; k++)
    bytes += ps__stored_each(ps__recipes[recipe].state[k]);
  return bytes;
}

double ps__update_bytes(ps_optimizer optimizer, uint32_t recipe, ps__update_part part) {
  const ps__recipe *r = &ps__recipes[recipe];
  const double w = ps__stored_each(r->updated), grad = ps__stored_each(r->grad),
               copy = !ps__has_master(recipe)      ? 0
                      : r->updated.dtype == PS__I8 ? 2 * ps__stored_each(r->weights)
                                                   : ps__stored_each(r->weights),
               state = ps__state_each(optimizer, recipe);
  return part == PS_UPDATE_WHOLE     ? 2 * w + copy + 2 * state + grad
         : part == PS_UPDATE_WEIGHTS ? 2 * w + copy + state + grad
                                     : 2 * state + grad;
}

uint32_t ps__update_operands(ps_optimizer optimizer, uint32_t recipe, ps__update_part part,
                             bool header, ps__operand_access out[PS_N_OPERANDS]) {
  const bool weights = part != PS_UPDATE_STATE;
  const uint32_t state = part == PS_UPDATE_WEIGHTS ? PS_READ : PS_READ_WRITE;
  uint32_t n = 0;
  if (weights)
    out[n++] = (ps__operand_access){PS_OPERAND_WEIGHTS, PS_READ_WRITE};
  for (uint32_t k = 0; k < ps__optimizers[optimizer].n_states; k++)
    out[n++] = (ps__operand_access){PS_OPERAND_STATE + k, state};
  out[n++] = (ps__operand_access){PS_OPERAND_GRAD, PS_READ};
  if (weights && ps__has_master(recipe))
    out[n++] = (ps__operand_access){
        PS_OPERAND_COPY, ps__recipes[recipe].updated.dtype == PS__I8 ? PS_READ_WRITE : PS_WRITE};
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
                  .copy = ps__operand_ptr(operands, n, PS_OPERAND_COPY, ptr),
                  .grad = ps__operand_ptr(operands, n, PS_OPERAND_GRAD, ptr)};
  for (uint32_t k = 0; k < PS_MAX_STATES; k++)
    a.state[k] = ps__operand_ptr(operands, n, PS_OPERAND_STATE + k, ptr);
  return a;
}
