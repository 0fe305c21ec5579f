/* update_avx2.c - updates, 8 elements at a time, bf16 16: update_vector.h in AVX2. */
#if defined(__x86_64__)
#  include "optim/update_impl.h"
#  include <immintrin.h>
#  include <stdbool.h>

#  define TARGET        __attribute__((target("avx2")))
#  define VEC           __m256
#  define VECI          __m256i
#  define V(name)       _mm256_##name
#  define BITS(x)       _mm256_castps_si256(x)
#  define FLOATS(x)     _mm256_castsi256_ps(x)
#  define XOR(a, b)     _mm256_xor_si256(a, b)
#  define AND(a, b)     _mm256_and_si256(a, b)
#  define AND_NOT(a, b) _mm256_andnot_si256(a, b)
#  define SET64(x)      _mm256_set1_epi64x((long long)(x))
#  define FIRST_WORDS   _mm256_set_epi64x(6, 4, 2, 0)
#  define TABLE         ps__update_avx2
enum { LANES = 8 };

TARGET static inline __m256 canonical(__m256 x) {
  return _mm256_blendv_ps(x, FLOATS(_mm256_set1_epi32((int)PS__QUIET_NAN)),
                          _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

TARGET static inline __m256 sign_of(__m256 x) {
  const __m256i sign = AND(BITS(x), _mm256_set1_epi32((int)0x80000000u));
  const __m256 one = _mm256_or_ps(FLOATS(sign), _mm256_set1_ps(1.0f));
  return _mm256_blendv_ps(x, one, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ));
}

/* Whether a lane of either is a NaN. */
TARGET static inline bool any_nan(__m256 a, __m256 b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}

TARGET static inline __m256 load_bf16(const uint16_t *p) {
  return FLOATS(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

/* The upper halves of bits + add. */
TARGET static inline void store_upper(uint16_t *p, __m256 x, __m256i add) {
  __m256i bits = _mm256_srli_epi32(_mm256_add_epi32(BITS(x), add), 16);
  _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(bits),
                                                  _mm256_extracti128_si256(bits, 1)));
}

TARGET static inline __m256i load_bits(const uint16_t *p) {
  return _mm256_loadu_si256((const __m256i *)p);
}
TARGET static inline void store_bits(uint16_t *p, __m256i x) {
  _mm256_storeu_si256((__m256i *)p, x);
}

/* The odd 16-bit pieces of @odd, the even ones of @even. */
TARGET static inline __m256i odd_halves(__m256i even, __m256i odd) {
  return _mm256_blend_epi16(even, odd, 0xaa);
}

/* a * b modulo 2^64, from 32-bit products. */
TARGET static inline __m256i mul64(__m256i a, uint64_t b) {
  __m256i b_low = SET64(b & 0xffffffffu), b_high = SET64(b >> 32);
  __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b_low),
                                   _mm256_mul_epu32(a, b_high));
  return _mm256_add_epi64(_mm256_mul_epu32(a, b_low), _mm256_slli_epi64(cross, 32));
}

TARGET static inline __m256i load_signed(const void *p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
}
TARGET static inline __m256i load_unsigned(const void *p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
}
/* The lowest bytes. */
TARGET static inline void store_bytes(void *p, __m256i x) {
  const __m256i low = _mm256_shuffle_epi8(x, _mm256_set1_epi32(0x0c080400));
  _mm_storel_epi64(
      p, _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
/* The 16-bit pieces of the first or the second half of @words. */
TARGET static inline __m256i pieces(__m256i words, int half) {
  return _mm256_cvtepu16_epi32(half ? _mm256_extracti128_si256(words, 1)
                                    : _mm256_castsi256_si128(words));
}
/* -1 where x is 0. */
TARGET static inline __m256i is_zero(__m256i x) {
  return _mm256_cmpeq_epi32(x, _mm256_setzero_si256());
}

#  include "optim/update_vector.h"
#else
typedef int ps__update_avx2_is_for_x86_64; /* an empty file is not C */
#endif
