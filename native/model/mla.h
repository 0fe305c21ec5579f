/* mla.h - multi-head latent attention as a half of a block. */
#ifndef PS_MODEL_MLA_H
#define PS_MODEL_MLA_H
#include "model/decoder.h"

typedef struct ps__mla_names {
  const char *q; /* without q_rank */
  const char *q_a, *q_norm, *q_b;
  const char *kv_a, *kv_norm, *kv_b;
  const char *o;
} ps__mla_names;

extern const ps__half_kind ps__mla;
extern const ps__mla_names ps__mla_usual; /* DeepSeek's */
#endif
