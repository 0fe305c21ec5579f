/* penstock/optim.h - the optimizers: what a plan counts of each, and what a trainer is told.
 *
 * An optimizer keeps one or two numbers of state for every trained parameter. They are in bf16 with
 * the recipes BF16, FP24_MASTER and FP8, in fp32 with the others, and in 8 bits with
 * ps_plan_config.state_bits. Formulas and bytes: docs/design/optimizers.md, "Optimizers".
 *   ADAMW  two states. lr, beta1, beta2, eps, weight_decay (decoupled)
 *   LION   one state. lr, beta1, beta2, weight_decay (decoupled)
 *   SGD    with momentum, one state, as torch.optim.SGD with dampening 0. lr, momentum, nesterov,
 *          weight_decay (added to the gradient) */
#ifndef PENSTOCK_OPTIM_H
#define PENSTOCK_OPTIM_H
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ps_optimizer {
  PS_OPTIMIZER_ADAMW = 0,
  PS_OPTIMIZER_LION = 1,
  PS_OPTIMIZER_SGD = 2,
  PS_N_OPTIMIZERS = 3
} ps_optimizer;
/* ps_optimizer_name() - "adamw", "lion", "sgd"; "unknown" past the last.
 * ps_optimizer_parse() - an optimizer by its name. Errors: PS_EINVAL names the value. */
PS_API const char *ps_optimizer_name(ps_optimizer optimizer);
PS_API ps_status ps_optimizer_parse(ps_optimizer *out, const char *name);

/* The hyperparameters of an optimizer: fields of ps_train_config of the same names. */
typedef enum ps_hyper {
  PS_HYPER_LR = 0,
  PS_HYPER_BETA1 = 1,
  PS_HYPER_BETA2 = 2,
  PS_HYPER_EPS = 3,
  PS_HYPER_MOMENTUM = 4,
  PS_HYPER_NESTEROV = 5,
  PS_HYPER_WEIGHT_DECAY = 6,
  PS_N_HYPERS = 7
} ps_hyper;
/* ps_optimizer_default() - the optimizer's default of @hyper; NAN where it has no @hyper. */
PS_API double ps_optimizer_default(ps_optimizer optimizer, ps_hyper hyper);

#ifdef __cplusplus
}
#endif
#endif
