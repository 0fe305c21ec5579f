/* convert.c - fp32 <-> bf16, loads and stores by dtype, exp over arrays. Bandwidth-bound,
 * single-threaded: callers split. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

PS_CLONES static void convert_widen(float *dst, const uint16_t *src, size_t n) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(dst, PS_F32, i, n, ps__v_read(src, PS_BF16, i, n, 0.0f));
}

PS_CLONES static void convert_narrow(uint16_t *dst, const float *src, size_t n) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(dst, PS_BF16, i, n, ps__v_read(src, PS_F32, i, n, 0.0f));
}

PS_CLONES static void convert_exp(float *dst, const float *src, size_t n) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(dst, PS_F32, i, n, ps__v_exp(ps__v_read(src, PS_F32, i, n, 0.0f)));
}

void ps__convert_bf16_to_f32(float *dst, const uint16_t *src, size_t n) {
  convert_widen(dst, src, n);
}
void ps__convert_f32_to_bf16(uint16_t *dst, const float *src, size_t n) {
  convert_narrow(dst, src, n);
}
void ps__expf_array(float *dst, const float *src, size_t n) { convert_exp(dst, src, n); }

void ps__load_f32(float *dst, const void *src, uint32_t dt, size_t n) {
  if (dt == PS_BF16)
    convert_widen(dst, src, n);
  else
    memcpy(dst, src, n * sizeof(float));
}

void ps__store_f32(void *dst, uint32_t dt, const float *src, size_t n) {
  if (dt == PS_BF16)
    convert_narrow(dst, src, n);
  else
    memcpy(dst, src, n * sizeof(float));
}
