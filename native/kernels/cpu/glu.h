/* glu.h - the gated activation and its slope, for what computes with them. Include it after
 * core/vec.h. */
#ifndef PS_KERNELS_CPU_GLU_H
#define PS_KERNELS_CPU_GLU_H
#include "core/vec.h"

/* 1 + exp(-k(x)): both activations are x * sigmoid(k(x)), silu with k = x, and gelu_tanh, which is
 * x/2 (1 + tanh(y)), with k = 2y = 2 sqrt(2/pi) (x + 0.044715 x^3). */
#define GELU_A 1.5957691216057308f
#define GELU_B 0.044715f
PS_VEC void glu_below(ps__v *below, const ps__v *x, uint32_t activation) {
  const ps__v k = activation == PS_ACTIVATION_SILU ? *x : (*x * *x * GELU_B + 1.0f) * *x * GELU_A;
  *below = 1.0f + ps__v_exp(-k);
}
/* x times the derivative of k. */
PS_VEC void glu_slope(ps__v *slope, const ps__v *x, uint32_t activation) {
  *slope = activation == PS_ACTIVATION_SILU ? *x : (*x * *x * (3.0f * GELU_B) + 1.0f) * *x * GELU_A;
}

/* The statement rows(j, first, end, dtype, activation) of a job's dtype and activation, each a
 * constant. */
#define GLU_ROWS(rows, j, first, end)                                                              \
  do {                                                                                             \
    if ((j)->activation == PS_ACTIVATION_SILU)                                                     \
      PS__BY_DTYPE((j)->dt, DT, rows(j, first, end, DT, PS_ACTIVATION_SILU));                      \
    else                                                                                           \
      PS__BY_DTYPE((j)->dt, DT, rows(j, first, end, DT, PS_ACTIVATION_GELU_TANH));                 \
  } while (0)

#endif
