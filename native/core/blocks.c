/* blocks.c - weights to blocks and back. */
#include "core/blocks.h"
#include "core/core.h"
#include <math.h>

static const float nf4[16] = PS__NF4_VALUES;

/* The largest magnitude's bits; those of a number that is not finite are larger than all others. */
static uint32_t amax_bits(const float *x, uint32_t n) {
  uint32_t most = 0;
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t size = ps__float_bits(x[i]) & 0x7fffffffu;
    most = size > most ? size : most;
  }
  return most;
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* The nearest value. Halfway it is the lower one. */
static uint32_t nf4_code(float x) {
  /* halfway between two values */
  static const double middle[15] = {
      -0.8480964004993439,  -0.6106329262256622,  -0.4599952697753906,   -0.33967943489551544,
      -0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767,
      0.1202552504837513,   0.2035212516784668,   0.2920137718319893,    0.3893125355243683,
      0.5016634166240692,   0.6427869200706482,   0.8614784181118011};
  uint32_t code = 0;
  for (uint32_t step = 8; step; step /= 2)
    code += (double)x > middle[code + step - 1] ? step : 0;
  return code;
}

static uint32_t e2m1_code(float x) {
  /* halfway between two values, and whether it goes up to the next one, which is even */
  static const float middle[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const float size = fabsf(x);
  uint32_t code = 0;
  for (uint32_t i = 0; i < 7; i++)
    code += size > middle[i] || (size == middle[i] && i % 2);
  return code | (ps__float_bits(x) >> 28 & 8);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void quantize_fp8(uint8_t *dst, const float *x, uint32_t n) {
  const float scale = ps__bits_float(amax_bits(x, n)) / 448.0f;
  for (uint32_t i = 0; i < n; i++)
    dst[i] = (uint8_t)(scale > 0 ? ps__fp8_encode(x[i] / scale, PS__E4M3) : 0);
  memcpy(dst + n, &scale, sizeof scale);
}

static void quantize_nf4(uint8_t *dst, const float *x, uint32_t n) {
  const uint16_t scale = ps__f32_to_bf16(ps__bits_float(amax_bits(x, n)));
  const float s = ps__bf16_to_f32(scale);
  for (uint32_t i = 0; i < n; i += 2) {
    const uint32_t low = nf4_code(s > 0 ? x[i] / s : 0), high = nf4_code(s > 0 ? x[i + 1] / s : 0);
    dst[i / 2] = (uint8_t)(low | high << 4);
  }
  memcpy(dst + n / 2, &scale, sizeof scale);
}

/* The sum of squared errors with scale @e, in units of that scale; @e below 255. */
static double mxfp4_error(const float *x, uint32_t n, uint32_t e) {
  const float inverse = ps__e8m0_value(254 - e);
  double sum = 0;
  for (uint32_t i = 0; i < n; i++) {
    const double of = (double)x[i] * inverse, error = of - ps__e2m1_value(e2m1_code((float)of));
    sum += error * error;
  }
  return sum;
}

static void quantize_mxfp4(uint8_t *dst, const float *x, uint32_t n) {
  const uint32_t amax = amax_bits(x, n);
  const int exponent = amax ? ilogbf(ps__bits_float(amax)) - 2 + 127 : 0;
  uint32_t e = amax >= 0x7f800000u ? 255 : exponent < 0 ? 0 : (uint32_t)exponent;
  if (e < 254 && ps__bits_float(amax) * ps__e8m0_value(254 - e) > 6)
    e += 4 * mxfp4_error(x, n, e + 1) < mxfp4_error(x, n, e);
  for (uint32_t i = 0; i < n; i += 2) {
    const float low = ldexpf(x[i], 127 - (int)e), high = ldexpf(x[i + 1], 127 - (int)e);
    dst[i / 2] = (uint8_t)(e2m1_code(low) | e2m1_code(high) << 4);
  }
  dst[n / 2] = (uint8_t)e;
}

void ps__blocks_quantize(void *dst, ps__storage as, const float *x, size_t n) {
  uint8_t *to = dst;
  for (size_t i = 0; i < n; i += as.block, to += ps__block_bytes(as))
    switch (as.dtype) {
    case PS__E4M3: quantize_fp8(to, x + i, as.block); break;
    case PS__NF4: quantize_nf4(to, x + i, as.block); break;
    default: quantize_mxfp4(to, x + i, as.block); break;
    }
}

static float scale_of(const uint8_t *scale, ps__storage as) {
  uint16_t half;
  float s;
  if (as.dtype == PS__E2M1)
    return ps__e8m0_value(*scale);
  if (as.dtype == PS__NF4) {
    memcpy(&half, scale, sizeof half);
    return ps__bf16_to_f32(half);
  }
  memcpy(&s, scale, sizeof s);
  return s;
}

void ps__blocks_dequantize(float *x, ps__storage as, const void *src, size_t n) {
  const uint8_t *from = src;
  for (size_t i = 0; i < n; i += as.block, from += ps__block_bytes(as)) {
    const float s = scale_of(from + (as.block >> as.halves), as);
    float *to = x + i;
    for (uint32_t k = 0; as.dtype == PS__E4M3 && k < as.block; k++)
      to[k] = ps__e4m3_value(from[k]) * s;
    for (uint32_t k = 0; as.halves && k < as.block; k++) {
      const uint32_t code = from[k / 2] >> 4 * (k % 2) & 15;
      to[k] = (as.dtype == PS__NF4 ? nf4[code] : ps__e2m1_value(code)) * s;
    }
  }
}
