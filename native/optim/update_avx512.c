/* update_avx512.c - updates, 16 elements at a time, bf16 32: update_vector.h in AVX-512. */
#if defined(__x86_64__)
#  include "optim/update_impl.h"
#  include <immintrin.h>
#  include <stdbool.h>

#  define TARGET        __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#  define VEC           __m512
#  define VECI          __m512i
#  define V(name)       _mm512_##name
#  define BITS(x)       _mm512_castps_si512(x)
#  define FLOATS(x)     _mm512_castsi512_ps(x)
#  define XOR(a, b)     _mm512_xor_si512(a, b)
#  define AND(a, b)     _mm512_and_si512(a, b)
#  define AND_NOT(a, b) _mm512_andnot_si512(a, b)
#  define SET64(x)      _mm512_set1_epi64((long long)(x))
#  define FIRST_WORDS   _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0)
#  define TABLE         ps__update_avx512
enum { LANES = 16 };

TARGET static inline __m512 canonical(__m512 x) {
  return FLOATS(_mm512_mask_mov_epi32(BITS(x), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                      _mm512_set1_epi32((int)PS__QUIET_NAN)));
}

TARGET static inline __m512 sign_of(__m512 x) {
  const __m512i sign = AND(BITS(x), _mm512_set1_epi32((int)0x80000000u)),
                one = _mm512_or_si512(sign, _mm512_castps_si512(_mm512_set1_ps(1.0f)));
  return FLOATS(
      _mm512_mask_mov_epi32(BITS(x), _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ), one));
}

/* Whether a lane of either is a NaN. */
TARGET static inline bool any_nan(__m512 a, __m512 b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
}

TARGET static inline __m512 load_bf16(const uint16_t *p) {
  return FLOATS(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

/* The upper halves of bits + add. */
TARGET static inline void store_upper(uint16_t *p, __m512 x, __m512i add) {
  _mm256_storeu_si256((__m256i *)p,
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(BITS(x), add), 16)));
}

TARGET static inline __m512i load_bits(const uint16_t *p) { return _mm512_loadu_si512(p); }
TARGET static inline void store_bits(uint16_t *p, __m512i x) { _mm512_storeu_si512(p, x); }

/* The odd 16-bit pieces of @odd, the even ones of @even. */
TARGET static inline __m512i odd_halves(__m512i even, __m512i odd) {
  return _mm512_mask_mov_epi16(even, 0xaaaaaaaau, odd);
}

TARGET static inline __m512i mul64(__m512i a, uint64_t b) {
  return _mm512_mullo_epi64(a, SET64(b));
}

TARGET static inline __m512i load_signed(const void *p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(p));
}
TARGET static inline __m512i load_unsigned(const void *p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
}
/* The lowest bytes. */
TARGET static inline void store_bytes(void *p, __m512i x) {
  _mm_storeu_si128(p, _mm512_cvtepi32_epi8(x));
}
/* The 16-bit pieces of the first or the second half of @words. */
TARGET static inline __m512i pieces(__m512i words, int half) {
  return _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64(words, 1)
                                    : _mm512_castsi512_si256(words));
}
/* -1 where x is 0. */
TARGET static inline __m512i is_zero(__m512i x) {
  return _mm512_movm_epi32(_mm512_testn_epi32_mask(x, x));
}

#  include "optim/update_vector.h"
#else
typedef int ps__update_avx512_is_for_x86_64; /* an empty file is not C */
#endif
