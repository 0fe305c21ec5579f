/* storage.h - how an array of a unit (weights, master copy, optimizer state, gradients, totals) is
 * stored: what its elements take in memory, on links and in files. A header for C, C++ and CUDA. */
#ifndef PS_CORE_STORAGE_H
#define PS_CORE_STORAGE_H
#include "core/dtype.h"
#include <assert.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Elements lie in blocks, one block after the other: a block's elements, then its scale. The last
 * block is whole, also where the array ends inside it. */
typedef struct ps__storage {
  uint32_t dtype;       /* of an element: a row of ps__dtypes */
  uint32_t block;       /* ELEMENTS that share a scale; 1 where there is none */
  uint32_t scale_bytes; /* BYTES of a block's scale */
  uint32_t halves;      /* 1: a byte has two elements, the first in its low bits */
} ps__storage;

/* Spans of a unit, and the pieces that devices have of it, begin at multiples of so many ELEMENTS,
 * which are whole blocks of every recipe. */
enum { PS__SPAN_ALIGN = 64 };
static inline uint64_t ps__span_round(uint64_t n) {
  return (n + PS__SPAN_ALIGN - 1) / PS__SPAN_ALIGN * PS__SPAN_ALIGN;
}

/* Elements of @dtype and nothing else. */
static inline ps__storage ps__plain(uint32_t dtype) {
  const ps__storage s = {dtype, 1, 0, 0};
  return s;
}

static inline uint64_t ps__block_bytes(ps__storage s) {
  return ((uint64_t)s.block * ps__dtypes[s.dtype].bytes >> s.halves) + s.scale_bytes;
}
/* BYTES of @n elements from the beginning of a block on. */
static inline uint64_t ps__stored_bytes(ps__storage s, uint64_t n) {
  return (n + s.block - 1) / s.block * ps__block_bytes(s);
}
/* BYTES from the array's beginning to element @first, with which a block begins. */
static inline uint64_t ps__stored_at(ps__storage s, uint64_t first) {
  assert(first % s.block == 0);
  return first / s.block * ps__block_bytes(s);
}
/* BYTES of an element in a large array: a rate. */
static inline double ps__stored_each(ps__storage s) {
  return (double)ps__block_bytes(s) / (double)s.block;
}

#ifdef __cplusplus
}
#endif
#endif
