/* mlp.h - the gated MLP as a half of a block. */
#ifndef PS_MODEL_MLP_H
#define PS_MODEL_MLP_H
#include "model/decoder.h"

typedef struct ps__mlp_names {
  const char *gate, *up; /* up NULL: on disk gate has both */
  const char *down;
} ps__mlp_names;

extern const ps__half_kind ps__mlp;
extern const ps__mlp_names ps__mlp_usual; /* as most families have them */
#endif
