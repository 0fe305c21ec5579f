/* check.h - what native tests share: a check that says where, and random numbers. */
#ifndef PS_TESTS_CHECK_H
#define PS_TESTS_CHECK_H
#include "core/core.h"
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

/* splitmix64 */
static inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

static inline uint64_t rnd(uint64_t *state) { return mix64((*state)++); }
static inline uint32_t rnd_below(uint64_t *state, uint32_t n) { return (uint32_t)(rnd(state) % n); }

#endif
