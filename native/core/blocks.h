/* blocks.h - weights in blocks that share a scale: how a frozen base is stored (ps_base). What a
 * block's bytes are is in storage.h. A header for C, C++ and CUDA; the functions are for the host.
 *
 *   fp8    x = q s            s = amax / 448 in fp32, of 64 weights; q = x / s in e4m3
 *   nf4    x = value[q] s     s = amax in bf16, of 64 weights; value[q] is nearest to x / s. Values
 *                             are those of arXiv 2305.14314, appendix E. Of bf16 weights s is exact
 *   mxfp4  x = q s            s = 2^(floor(log2(amax)) - 2) as e8m0, of 32 weights (OCP
 *                             Microscaling Formats 1.0, section 6.3), or 2 s where amax is above
 *                             6 s, the largest q, and the sum of squared errors is less;
 *                             q = x / s in e2m1. What was MXFP4 becomes the same weights again
 *
 * q is rounded to nearest, of e4m3 and e2m1 to even and saturated. Where a weight is not finite,
 * the block's scale is not, and neither are its weights. */
#ifndef PS_CORE_BLOCKS_H
#define PS_CORE_BLOCKS_H
#include "core/fp8.h"
#include "core/storage.h"
#ifdef __cplusplus
extern "C" {
#endif

#define PS__NF4_VALUES                                                                             \
  {-1.0f,                                                                                          \
   -0.6961928009986877f,                                                                           \
   -0.5250730514526367f,                                                                           \
   -0.39491748809814453f,                                                                          \
   -0.28444138169288635f,                                                                          \
   -0.18477343022823334f,                                                                          \
   -0.09105003625154495f,                                                                          \
   0.0f,                                                                                           \
   0.07958029955625534f,                                                                           \
   0.16093020141124725f,                                                                           \
   0.24611230194568634f,                                                                           \
   0.33791524171829224f,                                                                           \
   0.44070982933044434f,                                                                           \
   0.5626170039176941f,                                                                            \
   0.7229568362236023f,                                                                            \
   1.0f}

/* ps__base_storage() - how weights of @base lie; plain @dt where that is PS_BASE_PLAIN. */
static inline ps__storage ps__base_storage(uint32_t base, uint32_t dt) {
  const ps__storage fp8 = {PS__E4M3, 64, 4, 0}, nf4 = {PS__NF4, 64, 2, 1},
                    mxfp4 = {PS__E2M1, 32, 1, 1};
  return base == PS_BASE_FP8     ? fp8
         : base == PS_BASE_NF4   ? nf4
         : base == PS_BASE_MXFP4 ? mxfp4
                                 : ps__plain(dt);
}

/* An element's value before it is scaled: of e4m3, and of e2m1, whose code has 4 bits. */
PS__HD float ps__e4m3_value(uint32_t code) {
  const float size = ps__bits_float((code & 0x7f) << 20) * 0x1p120f;
  return (code & 0x7f) == 0x7f ? ps__bits_float(0x7fc00000u)
                               : ps__bits_float(ps__float_bits(size) | (code & 0x80) << 24);
}
PS__HD float ps__e2m1_value(uint32_t code) {
  const float size = ps__bits_float((code & 7) << 22) * 0x1p126f;
  return ps__bits_float(ps__float_bits(size) | (code & 8) << 28);
}
/* A power of two; 255 is NaN. */
PS__HD float ps__e8m0_value(uint32_t e) {
  return ps__bits_float(e == 0 ? 1u << 22 : e == 255 ? 0x7fc00000u : e << 23);
}

/* ps__blocks_quantize() - @n elements, whole blocks.
 * ps__blocks_dequantize() - back to fp32. Single-threaded: callers split. */
void ps__blocks_quantize(void *dst, ps__storage as, const float *x, size_t n);
void ps__blocks_dequantize(float *x, ps__storage as, const void *src, size_t n);

#ifdef __cplusplus
}
#endif
#endif
