/* hash64.h - a fast hash of bytes, which tells copies from each other. It is no protection against
 * bytes that somebody chose. */
#ifndef PS_CORE_HASH64_H
#define PS_CORE_HASH64_H
#include <stdint.h>
#include <string.h>

/* The hash of @bytes at @data after what @h has seen: 8 bytes at a time, the rest filled up with
 * zeros. For each h a word of 8 bytes gives a hash of its own, and for each word an h does. So data
 * of the same length that differ in one word never have the same hash. */
static inline uint64_t ps__hash64(uint64_t h, const void *data, uint64_t bytes) {
  const char *at = data;
  for (; bytes; at += 8, bytes -= bytes < 8 ? bytes : 8) {
    uint64_t word = 0;
    memcpy(&word, at, bytes < 8 ? bytes : 8);
    h = (h ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    h ^= h >> 32;
  }
  return h;
}

#endif
