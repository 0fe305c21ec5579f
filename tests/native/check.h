/* check.h - what native tests share: a check that says where, and random numbers. */
#ifndef PS_TESTS_CHECK_H
#define PS_TESTS_CHECK_H
#include "core/core.h"
#include "core/mix64.h"
#include <stdlib.h>
#include <string.h>

#define CHECK(cond)                                                                                \
  do {                                                                                             \
    if (!(cond)) {                                                                                 \
      printf("FAIL %s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #cond, ps_last_error());     \
      fflush(stdout);                                                                              \
      _Exit(1);                                                                                    \
    }                                                                                              \
  } while (0)
#define CHECK_FAILS(call, code, text) CHECK((call) == (code) && strstr(ps_last_error(), text))

/* The first fields of a ps_plan_config of zeros: no document tokens. */
#define PLAN_DEFAULTS                                                                              \
  .struct_bytes = sizeof(ps_plan_config), .document_token = -1, .document_end_token = -1

/* The first fields of a ps_model_config: no tokens with a meaning, an epsilon of the norms. */
#define MODEL_DEFAULTS                                                                             \
  .struct_bytes = sizeof(ps_model_config), .bos_token_id = -1, .eos_token_id = -1,                 \
  .pad_token_id = -1, .norm_eps = 1e-5f

/* splitmix64 */
static inline uint64_t mix64(uint64_t x) { return ps__mix64(x + PS__MIX_GAMMA); }

static inline uint64_t rnd(uint64_t *state) { return mix64((*state)++); }
static inline uint32_t rnd_below(uint64_t *state, uint32_t n) { return (uint32_t)(rnd(state) % n); }

#endif
