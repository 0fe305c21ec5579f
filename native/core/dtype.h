/* dtype.h - the table of dtypes: what an element takes, what others call it, and conversions. A
 * header for C, C++ and CUDA. */
#ifndef PS_CORE_DTYPE_H
#define PS_CORE_DTYPE_H
#include <penstock/model.h>
#include <stdbool.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Beside those of weights and activations (ps_dtype): dtypes of files, which are converted when
 * they are read; and dtypes of quantized tensors (kernels/ops.h, "FP8").
 *   PS__E4M3  torch.float8_e4m3fn: 448 is the largest number, no infinity, one NaN
 *   PS__E5M2  torch.float8_e5m2: 57344 is the largest number; infinities as IEEE has them
 * and integers: of tensors that say where rows lie, of state in 8 bits and the low bits of a master
 * copy (optim/recipe.h), of bytes in files (PS__U8), and of 4 bits in blocks. They have a size, and
 * no conversions. */
typedef enum ps__other_dtype {
  PS__F16 = PS_N_DTYPES,
  PS__N_FILE_DTYPES,
  PS__E4M3 = PS__N_FILE_DTYPES,
  PS__E5M2,
  PS__UINT16,
  PS__INT32,
  PS__I8,
  PS__U8,
  PS__NF4,  /* a byte has two, in blocks with a scale (core/blocks.h) */
  PS__E2M1, /* the same */
  PS__N_DTYPES
} ps__other_dtype;

typedef struct ps__dtype {
  const char *name;       /* ours: "bf16" */
  const char *file_name;  /* in safetensors: "BF16"; NULL: files with it are refused */
  const char *torch_name; /* in config.json: "bfloat16" */
  uint32_t bytes;
  /* Sums of many terms lose too much in it: totals of gradients keep the next 8 bits beside them,
   * or are dithered (kernels/ops.h, "How a contribution is added"). */
  bool low_bytes;
  /* n elements to fp32, exactly; and from fp32, rounded to nearest even, a NaN staying one. What
   * is larger than the largest number of E4M3 or E5M2 becomes that number, infinity too. No
   * overlap. Bandwidth-bound, single-threaded: callers split.
   * from_f32 is NULL for dtypes of files alone, both for integers. */
  void (*to_f32)(float *dst, const void *src, size_t n);
  void (*from_f32)(void *dst, const float *src, size_t n);
} ps__dtype;
extern const ps__dtype ps__dtypes[PS__N_DTYPES];

/* The dtype that safetensors calls @file_name; PS__N_FILE_DTYPES: none of the table's. */
uint32_t ps__dtype_of_file(const char *file_name);

/* ps__convert() - @n elements of dtype @from to dtype @to, by way of fp32. No overlap. */
void ps__convert(void *dst, ps_dtype to, const void *src, uint32_t from, size_t n);

static inline float ps__bf16_to_f32(uint16_t h) {
  union {
    uint32_t u;
    float f;
  } v;
  v.u = (uint32_t)h << 16;
  return v.f;
}
/* Round to nearest even; NaN stays a quiet NaN. */
static inline uint16_t ps__f32_to_bf16(float f) {
  union {
    float f;
    uint32_t u;
  } v;
  v.f = f;
  if ((v.u & 0x7fffffffu) > 0x7f800000u)
    return (uint16_t)((v.u >> 16) | 0x40u);
  return (uint16_t)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}
/* Element i of an array. */
static inline float ps__load1_f32(const void *base, uint32_t dt, size_t i) {
  return dt == PS_BF16 ? ps__bf16_to_f32(((const uint16_t *)base)[i]) : ((const float *)base)[i];
}
static inline void ps__store1_f32(void *base, uint32_t dt, size_t i, float x) {
  if (dt == PS_BF16)
    ((uint16_t *)base)[i] = ps__f32_to_bf16(x);
  else
    ((float *)base)[i] = x;
}

#ifdef __cplusplus
}
#endif
#endif
