/* dtype.c - the table of dtypes and their conversions. */
#include "core/dtype.h"
#include "core/fp8.h"
#include "core/vec.h"
#include <string.h>

PS_CLONES static void dtype_bf16_to_f32(float *dst, const void *src, size_t n) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(dst, PS_F32, i, n, ps__v_read(src, PS_BF16, i, n, 0.0f));
}

PS_CLONES static void dtype_f32_to_bf16(void *dst, const float *src, size_t n) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(dst, PS_BF16, i, n, ps__v_read(src, PS_F32, i, n, 0.0f));
}

static void f32_to_f32(float *dst, const void *src, size_t n) { memcpy(dst, src, n * sizeof *dst); }
static void f32_from_f32(void *dst, const float *src, size_t n) {
  memcpy(dst, src, n * sizeof *src);
}

static float f16_one(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3FF, bits;
  if (exponent == 31)
    bits = sign | 0x7F800000 | fraction << 13;
  else if (exponent)
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  else if (!fraction)
    bits = sign;
  else { /* subnormal: shift the leading one out */
    int shift = __builtin_clz(fraction) - 21;
    bits = sign | (uint32_t)(113 - shift) << 23 | (fraction << shift & 0x3FF) << 13;
  }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static void f16_to_f32(float *dst, const void *src, size_t n) {
  for (size_t i = 0; i < n; i++)
    dst[i] = f16_one(((const uint16_t *)src)[i]);
}

/* ---- FP8 ----------------------------------------------------------------------------------------
 * Both have a sign, an exponent and @m bits of fraction; subnormals below 2^(1 - bias). */

static inline float fp8_decode(const uint32_t m, const uint32_t bias, uint32_t code) {
  const uint32_t size = code & 0x7f, sign = (code & 0x80) << 24, fraction = size & ((1u << m) - 1);
  const uint32_t normal = (size << (23 - m)) + ((127 - bias) << 23),
                 subnormal =
                     ps__float_bits((float)fraction * ps__bits_float((128 - bias - m) << 23));
  return ps__bits_float((size >> m ? normal : subnormal) | sign);
}

PS_CLONES static void dtype_e4m3_to_f32(float *dst, const void *src, size_t n) {
  const uint8_t *q = src;
  for (size_t i = 0; i < n; i++)
    dst[i] = (q[i] & 0x7f) == 0x7f ? ps__bits_float(0x7fc00000u) : fp8_decode(3, 7, q[i]);
}
PS_CLONES static void dtype_f32_to_e4m3(void *dst, const float *src, size_t n) {
  for (size_t i = 0; i < n; i++)
    ((uint8_t *)dst)[i] = (uint8_t)ps__fp8_encode(src[i], PS__E4M3);
}
PS_CLONES static void dtype_e5m2_to_f32(float *dst, const void *src, size_t n) {
  const uint8_t *q = src;
  for (size_t i = 0; i < n; i++) {
    const uint32_t size = q[i] & 0x7f, sign = (uint32_t)(q[i] & 0x80) << 24;
    const float special = ps__bits_float(sign | (size > 0x7c ? 0x7fc00000u : 0x7f800000u));
    dst[i] = size >= 0x7c ? special : fp8_decode(2, 15, q[i]);
  }
}
PS_CLONES static void dtype_f32_to_e5m2(void *dst, const float *src, size_t n) {
  for (size_t i = 0; i < n; i++)
    ((uint8_t *)dst)[i] = (uint8_t)ps__fp8_encode(src[i], PS__E5M2);
}

/* Choosers of PS_CLONES have no constant address everywhere. */
static void e4m3_to_f32(float *dst, const void *src, size_t n) { dtype_e4m3_to_f32(dst, src, n); }
static void e4m3_from_f32(void *dst, const float *src, size_t n) { dtype_f32_to_e4m3(dst, src, n); }
static void e5m2_to_f32(float *dst, const void *src, size_t n) { dtype_e5m2_to_f32(dst, src, n); }
static void e5m2_from_f32(void *dst, const float *src, size_t n) { dtype_f32_to_e5m2(dst, src, n); }
static void bf16_to_f32(float *dst, const void *src, size_t n) { dtype_bf16_to_f32(dst, src, n); }
static void bf16_from_f32(void *dst, const float *src, size_t n) { dtype_f32_to_bf16(dst, src, n); }

const ps__dtype ps__dtypes[PS__N_DTYPES] = {
    [PS_F32] = {.name = "fp32",
                .file_name = "F32",
                .torch_name = "float32",
                .bytes = 4,
                .to_f32 = f32_to_f32,
                .from_f32 = f32_from_f32},
    [PS_BF16] = {.name = "bf16",
                 .file_name = "BF16",
                 .torch_name = "bfloat16",
                 .bytes = 2,
                 .low_bytes = true,
                 .to_f32 = bf16_to_f32,
                 .from_f32 = bf16_from_f32},
    [PS__F16] = {.name = "fp16",
                 .file_name = "F16",
                 .torch_name = "float16",
                 .bytes = 2,
                 .to_f32 = f16_to_f32},
    [PS__E4M3] = {.name = "e4m3",
                  .torch_name = "float8_e4m3fn",
                  .bytes = 1,
                  .to_f32 = e4m3_to_f32,
                  .from_f32 = e4m3_from_f32},
    [PS__E5M2] = {.name = "e5m2",
                  .torch_name = "float8_e5m2",
                  .bytes = 1,
                  .to_f32 = e5m2_to_f32,
                  .from_f32 = e5m2_from_f32},
    [PS__UINT16] = {.name = "u16", .torch_name = "uint16", .bytes = 2},
    [PS__INT32] = {.name = "i32", .torch_name = "int32", .bytes = 4},
    [PS__I8] = {.name = "i8", .torch_name = "int8", .bytes = 1},
    [PS__U8] = {.name = "u8", .file_name = "U8", .torch_name = "uint8", .bytes = 1},
    [PS__NF4] = {.name = "nf4", .bytes = 1},
    [PS__E2M1] = {.name = "e2m1", .bytes = 1},
};

size_t ps_dtype_bytes(ps_dtype dtype) {
  return (unsigned)dtype < PS_N_DTYPES ? ps__dtypes[dtype].bytes : 0;
}

uint32_t ps__dtype_of_file(const char *file_name) {
  uint32_t i = 0;
  while (i < PS__N_FILE_DTYPES && strcmp(file_name, ps__dtypes[i].file_name))
    i++;
  return i;
}

void ps__convert(void *dst, ps_dtype to, const void *src, uint32_t from, size_t n) {
  enum { PIECE = 1024 };
  const ps__dtype *d = &ps__dtypes[to], *s = &ps__dtypes[from];
  float piece[PIECE];
  if (from == (uint32_t)to)
    memcpy(dst, src, n * d->bytes);
  else if (to == PS_F32)
    s->to_f32(dst, src, n);
  else if (from == PS_F32)
    d->from_f32(dst, src, n);
  else
    for (size_t i = 0; i < n; i += PIECE) {
      const size_t m = n - i < PIECE ? n - i : PIECE;
      s->to_f32(piece, (const char *)src + i * s->bytes, m);
      d->from_f32((char *)dst + i * d->bytes, piece, m);
    }
}
