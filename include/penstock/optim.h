/* penstock/optim.h - the optimizers: what a plan counts of each, and what a trainer is told.
 *
 * An optimizer keeps state[k], k < n_states, of every parameter besides the weight: fp32, in
 * recipe bf16 bf16. docs/design.md has the table of optimizers. */
#ifndef PENSTOCK_OPTIM_H
#define PENSTOCK_OPTIM_H
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ps_optimizer { PS_OPTIMIZER_ADAMW = 0, PS_N_OPTIMIZERS = 1 } ps_optimizer;
PS_API const char *ps_optimizer_name(ps_optimizer optimizer); /* "adamw" */

#ifdef __cplusplus
}
#endif
#endif
