/* delta.h - a gated delta-net as a half of a block, in attention's place. */
#ifndef PS_MODEL_DELTA_H
#define PS_MODEL_DELTA_H
#include "model/decoder.h"

/* On disk the inputs are four matrices, or two whose rows are grouped by key head: */
typedef struct ps__delta_names {
  const char *qkv, *z, *b, *a; /* z NULL: grouped, qkv has q, k, v and z, and b has b and a */
  const char *conv, *a_log, *dt_bias, *norm;
  const char *out;
} ps__delta_names;

extern const ps__half_kind ps__delta;
extern const ps__delta_names ps__delta_qwen3_5, ps__delta_qwen3_next;
#endif
