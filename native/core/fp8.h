/* fp8.h - a number to FP8, for the CPU, for GPUs without an instruction for it, and for tests. */
#ifndef PS_CORE_FP8_H
#define PS_CORE_FP8_H
#include "core/dtype.h"
#include <string.h>

/* a function of host and device */
#ifdef __CUDACC__
#  define PS__HD static __host__ __device__ __forceinline__
#else
#  define PS__HD static inline
#endif

PS__HD uint32_t ps__float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
PS__HD float ps__bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

/* @x as a code of @dt (PS__E4M3, PS__E5M2), rounded to nearest even and saturated; NaN is 0x7f.
 * A code has a sign, an exponent of bias @bias and @m bits of fraction; below 2^(1 - bias) it is
 * subnormal. A normal number is rounded by an addition to its bits, a subnormal one by an addition
 * to a number whose last bit is the least subnormal. */
PS__HD uint32_t ps__fp8_encode(float x, uint32_t dt) {
  const uint32_t m = dt == PS__E4M3 ? 3 : 2, bias = dt == PS__E4M3 ? 7 : 15;
  const uint32_t largest = dt == PS__E4M3 ? 0x43e00000u /* 448 */ : 0x47600000u /* 57344 */;
  const uint32_t u = ps__float_bits(x), sign = u >> 24 & 0x80, size = u & 0x7fffffffu;
  const uint32_t shift = 23 - m, magic = (127 + 24 - bias - m) << 23;
  const uint32_t normal = ((size + (1u << (shift - 1)) - 1 + (size >> shift & 1)) >> shift) -
                          ((127 - bias) << m),
                 subnormal = ps__float_bits(ps__bits_float(size) + ps__bits_float(magic)) - magic,
                 most = ((largest >> shift) - ((127 - bias) << m));
  uint32_t code = size < (128 - bias) << 23 ? subnormal : normal;
  code = size >= largest ? most : code;
  return size > 0x7f800000u ? 0x7f : code | sign;
}
#endif
