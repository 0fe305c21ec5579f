/* steps.h - the optimizers' arithmetic of one element, or of a vector of them, written once for
 * all that runs it: so the order of operations is the same everywhere.
 *
 * Who includes this says before it what a number is (update_scalar.c, update_vector.h,
 * cuda/update.cu):
 *   STEP                what a step function begins with: static inline and the like
 *   REAL                fp32, or a vector of them; STEP_K: the constants, ps__update_k's fields
 *   ADD SUB MUL DIV SQRT  one IEEE operation each, never contracted
 *   CONST(x)            a number; MOST(a, b), LEAST(a, b): the larger, the smaller; b if a is NaN
 *   SIGN                -1 or 1; zeros and NaNs are left as they are
 * A step gets the scaled gradient, the weight and the state, and leaves the new weight and state
 * in their place. It uses nothing but these operations. A NaN in the new state is one in the new
 * weight too: the vector variants look for NaNs there alone. */
#ifndef PS_OPTIM_STEPS_H
#define PS_OPTIM_STEPS_H
#include "optim/update_impl.h"

#include "optim/adamw.h"
#include "optim/bits8.h"
#include "optim/lion.h"
#include "optim/sgd.h"

/* The step of an optimizer that the compiler knows. */
#define PS__STEP_CASE(NAME, name, n_states, parts, state_op)                                       \
case PS_OPTIMIZER_##NAME: step_##name(k, g, w, s); break;
STEP void step(ps_optimizer optimizer, const STEP_K *k, REAL g, REAL *w, REAL *s) {
  switch (optimizer) {
    PS__OPTIMIZERS(PS__STEP_CASE)
  default: break;
  }
}
#endif
