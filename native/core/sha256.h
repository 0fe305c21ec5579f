/* sha256.h - SHA-256 of a file's bytes, for manifests. */
#ifndef PS_CORE_SHA256_H
#define PS_CORE_SHA256_H
#include <penstock/status.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ps__sha256 {
  uint32_t state[8];
  uint64_t bytes;
  uint8_t rest[64]; /* the bytes past the last whole block of 64 */
} ps__sha256;

/* exported for tests */
PS_API void ps__sha256_begin(ps__sha256 *h);
PS_API void ps__sha256_add(ps__sha256 *h, const void *data, size_t bytes);
/* @hex: 64 digits and a terminator. */
PS_API void ps__sha256_end(ps__sha256 *h, char hex[65]);
/* Whole blocks of 64 bytes, without the CPU's own instructions. */
PS_API void ps__sha256_blocks_portable(uint32_t state[8], const uint8_t *p, size_t n_blocks);

#endif
