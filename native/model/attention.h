/* attention.h - attention as a half of a block. */
#ifndef PS_MODEL_ATTENTION_H
#define PS_MODEL_ATTENTION_H
#include "model/decoder.h"

/* Biases and norms of q and k are there where the config has them. */
typedef struct ps__attention_names {
  const char *q, *k, *v; /* k and v NULL: on disk q has all three */
  const char *q_bias, *k_bias, *v_bias;
  const char *q_norm, *k_norm;
  const char *o;
  const char *o_bias, *sinks; /* of families that may have them */
} ps__attention_names;

extern const ps__half_kind ps__attention;
extern const ps__attention_names ps__attention_usual; /* as most families have them */
#endif
