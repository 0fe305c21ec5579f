/* order.c - the order in which sequences are read: a keyed permutation of 0..n-1, computed from the
 * position alone.
 *
 * The permutation is a balanced Feistel network of 8 rounds over 2h bits: the smallest even number
 * that holds n-1, at least 8. A result of n or more goes through the network again until it is
 * below n ("cycle walking"), which keeps the map a bijection of 0..n-1. The domain is below 4n (256
 * for small n), so that at most 4 passes are expected, each of 8 multiplications and shifts. */
#include "core/mix64.h"
#include <penstock/data.h>

enum { ROUNDS = 8, MIN_HALF_BITS = 4 };

static uint64_t feistel(uint64_t x, uint32_t half_bits, uint64_t key) {
  uint64_t mask = (UINT64_C(1) << half_bits) - 1, left = x >> half_bits, right = x & mask;
  for (uint64_t r = 1; r <= ROUNDS; r++) {
    uint64_t next = left ^ (ps__mix64(right + ps__mix64(key + r * PS__MIX_GAMMA)) & mask);
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

uint64_t ps_dataset_order(uint64_t n_sequences, uint64_t pos, uint64_t seed, int shuffle) {
  if (n_sequences == 0)
    return 0;
  uint64_t x = pos % n_sequences, epoch = pos / n_sequences;
  if (!shuffle || n_sequences == 1)
    return x;
  uint32_t half_bits = MIN_HALF_BITS;
  while (half_bits < 32 && (n_sequences - 1) >> 2 * half_bits)
    half_bits++;
  uint64_t key = ps__mix64(ps__mix64(seed) + PS__MIX_GAMMA * (epoch + 1));
  do
    x = feistel(x, half_bits, key);
  while (x >= n_sequences);
  return x;
}
