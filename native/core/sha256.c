/* sha256.c - SHA-256 (FIPS 180-4), portable and with the CPU's own instructions. */
#include "core/sha256.h"
#include <stdbool.h>
#include <string.h>
#if defined(__x86_64__)
#  include <cpuid.h>
#  include <immintrin.h>
#  include <stdatomic.h>
#endif

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, unsigned n) { return x >> n | x << (32 - n); }

void ps__sha256_blocks_portable(uint32_t state[8], const uint8_t *p, size_t n_blocks) {
  for (; n_blocks; n_blocks--, p += 64) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
      w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 |
             p[4 * i + 3];
    for (int i = 16; i < 64; i++) {
      const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3,
                     s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
      const uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25),
                     choice = (v[4] & v[5]) ^ (~v[4] & v[6]), t1 = v[7] + s1 + choice + K[i] + w[i],
                     s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22),
                     majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      memmove(v + 1, v, 7 * sizeof *v);
      v[4] += t1;
      v[0] = t1 + s0 + majority;
    }
    for (int i = 0; i < 8; i++)
      state[i] += v[i];
  }
}

#if defined(__x86_64__)
/* The instructions keep the state as (A,B,E,F) and (C,D,G,H), and make two rounds a call. */
__attribute__((target("sha,sse4.1,ssse3"))) static void blocks_ni(uint32_t state[8],
                                                                  const uint8_t *p,
                                                                  size_t n_blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bll, 0x0405060700010203ll);
  const __m128i dcba = _mm_loadu_si128((const __m128i *)(const void *)state),
                hgfe = _mm_loadu_si128((const __m128i *)(const void *)(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; n_blocks; n_blocks--, p += 64) {
    const __m128i abef0 = abef, cdgh0 = cdgh;
    __m128i w[4];
#  pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i < 4)
        w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)), swap);
      else {
        const __m128i w7 = _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4);
        w[i & 3] = _mm_sha256msg2_epu32(
            _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]), w7), w[(i + 3) & 3]);
      }
      __m128i wk =
          _mm_add_epi32(w[i & 3], _mm_loadu_si128((const __m128i *)(const void *)(K + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      wk = _mm_shuffle_epi32(wk, 0x0e);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, wk);
    }
    abef = _mm_add_epi32(abef, abef0);
    cdgh = _mm_add_epi32(cdgh, cdgh0);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

/* __builtin_cpu_supports() of clang 16 does not know "sha". cpuid is slow in a virtual machine: it
 * is asked once. */
static bool has_ni(void) {
  enum { UNKNOWN, NO, YES };
  static _Atomic int answer;
  int known = atomic_load_explicit(&answer, memory_order_relaxed);
  if (known == UNKNOWN) {
    unsigned a, b = 0, c, d;
    const bool sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
    known = sha && __builtin_cpu_supports("sse4.1") ? YES : NO;
    atomic_store_explicit(&answer, known, memory_order_relaxed);
  }
  return known == YES;
}

static void blocks(uint32_t state[8], const uint8_t *p, size_t n) {
  if (has_ni())
    blocks_ni(state, p, n);
  else
    ps__sha256_blocks_portable(state, p, n);
}
#else
static void blocks(uint32_t state[8], const uint8_t *p, size_t n) {
  ps__sha256_blocks_portable(state, p, n);
}
#endif

void ps__sha256_begin(ps__sha256 *h) {
  *h = (ps__sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                              0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void ps__sha256_add(ps__sha256 *h, const void *data, size_t bytes) {
  const uint8_t *p = data;
  const size_t used = h->bytes % 64, room = 64 - used;
  h->bytes += bytes;
  if (used && bytes < room) {
    memcpy(h->rest + used, p, bytes);
    return;
  }
  if (used) {
    memcpy(h->rest + used, p, room);
    blocks(h->state, h->rest, 1);
    p += room;
    bytes -= room;
  }
  blocks(h->state, p, bytes / 64);
  if (bytes % 64)
    memcpy(h->rest, p + bytes / 64 * 64, bytes % 64);
}

void ps__sha256_end(ps__sha256 *h, char hex[65]) {
  const uint64_t bits = h->bytes * 8;
  uint8_t end[72] = {0x80};
  const size_t pad = (h->bytes % 64 < 56 ? 56 : 120) - h->bytes % 64;
  for (int i = 0; i < 8; i++)
    end[pad + i] = (uint8_t)(bits >> (56 - 8 * i));
  ps__sha256_add(h, end, pad + 8);
  for (int i = 0; i < 64; i++)
    hex[i] = "0123456789abcdef"[h->state[i / 8] >> (28 - 4 * (i % 8)) & 15];
  hex[64] = 0;
}
