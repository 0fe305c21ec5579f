/* experts.h - a router and its experts as a half of a block (docs/design/experts.md). */
#ifndef PS_MODEL_EXPERTS_H
#define PS_MODEL_EXPERTS_H
#include "model/decoder.h"

/* Those of experts have the expert's number in the place of "%u". With biases, of which there are
 * all or none, gate has the rows of gate and up by turns, and up is NULL; an expert's bias is a row
 * of its bias tensor. */
typedef struct ps__experts_names {
  const char *router, *gate, *up, *down;
  const char *router_bias, *gate_bias, *down_bias;
  const char *bias;                                  /* with router_sigmoid */
  const char *shared_gate, *shared_up, *shared_down; /* with shared_dim */
  const char *shared_router; /* its sigmoid gates what the shared expert gives; NULL: none */
  /* of ps__experts_beside alone: norms before the experts, after them and after the shared ones,
   * and the factors of the router's input and of an expert's weights */
  const char *norm, *post_norm, *shared_post_norm, *router_scale, *expert_scale;
} ps__experts_names;

extern const ps__half_kind ps__experts;
/* Gemma 4's: an MLP, which is the shared experts, and beside it experts and a router that read the
 * residual stream through norms of their own. */
extern const ps__half_kind ps__experts_beside;
extern const ps__experts_names ps__experts_usual; /* as most families have them */
extern const ps__experts_names ps__experts_deepseek;
extern const ps__experts_names ps__experts_qwen; /* with a gate of the shared expert */
#endif
