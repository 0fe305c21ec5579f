/* vec.h - 16 fp32 lanes in the compiler's vector extension: one AVX-512, two AVX2 or four
 * SSE/NEON registers.
 *
 * Lanes are explicit so that sums have one order on every machine. Use inside functions marked
 * PS_CLONES. Vectors go to functions by address (all are inlined) and ps__v_* macros give them
 * back as values: passing them by value to a function of another instruction set is an error in
 * clang and an ABI note in gcc. */
#ifndef PS_CORE_VEC_H
#define PS_CORE_VEC_H
#include "core/dtype.h"
#include <stdint.h>
#include <string.h>

/* A function compiled for several instruction sets, chosen at load. Give it to static functions
 * only, with names that no other file uses: clang 14 names the chooser so that other files do
 * not find it, yet collide with it. ifuncs do not work under sanitizers, nor outside glibc.
 * PS_BASELINE is for tests that compare. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(PS_SANITIZED) && !defined(PS_BASELINE)
#  define PS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#  define PS_CLONES
#endif

enum { PS_LANES = 16 };
typedef float ps__v __attribute__((vector_size(64)));
typedef int32_t ps__vi __attribute__((vector_size(64)));
typedef uint32_t ps__vu __attribute__((vector_size(64)));
typedef uint16_t ps__vh __attribute__((vector_size(32)));
#define PS_VEC static inline __attribute__((always_inline))

#define ps__v_set(x) ((ps__v){0} + (float)(x))
#define ps__v_select(mask, a, b)                                                                   \
  ((ps__v)(((ps__vi)(mask) & (ps__vi)(a)) | (~(ps__vi)(mask) & (ps__vi)(b))))
#define ps__v_max(a, b)                                                                            \
  ({                                                                                               \
    ps__v a_ = (a), b_ = (b);                                                                      \
    ps__v_select(a_ > b_, a_, b_);                                                                 \
  })

/* Loads and stores of 16 elements at any alignment: elements i .. i+15 of an array of dtype dt.
 * Give a constant dt (PS__BY_DTYPE below), so that the branch goes away. bf16 is rounded to nearest
 * even, NaN stays a quiet NaN: the same as ps__f32_to_bf16. */
PS_VEC void ps__v_get_to(ps__v *v, const void *base, uint32_t dt, size_t i) {
  if (dt == PS_BF16) {
    ps__vh h;
    memcpy(&h, (const uint16_t *)base + i, sizeof h);
    *v = (ps__v)(__builtin_convertvector(h, ps__vu) << 16);
  } else {
    memcpy(v, (const float *)base + i, sizeof *v);
  }
}
/* The 16 bits of a lane as bf16, zeros above them. */
PS_VEC void ps__v_bf16_of(ps__vu *bits, const ps__v *v) {
  ps__vu u = (ps__vu)*v, nan = (ps__vu)((ps__vi)(u & 0x7fffffffu) > 0x7f800000);
  ps__vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, q = (u >> 16) | 0x40u;
  *bits = (nan & q) | (~nan & r);
}
PS_VEC void ps__v_put_from(void *base, uint32_t dt, size_t i, const ps__v *v) {
  if (dt == PS_BF16) {
    ps__vu bits;
    ps__v_bf16_of(&bits, v);
    ps__vh h = __builtin_convertvector(bits, ps__vh);
    memcpy((uint16_t *)base + i, &h, sizeof h);
  } else {
    memcpy((float *)base + i, v, sizeof *v);
  }
}
#define ps__v_get(base, dt, i)                                                                     \
  ({                                                                                               \
    ps__v v_;                                                                                      \
    ps__v_get_to(&v_, base, dt, i);                                                                \
    v_;                                                                                            \
  })
#define ps__v_put(base, dt, i, v)                                                                  \
  ({                                                                                               \
    ps__v p_ = (v);                                                                                \
    ps__v_put_from(base, dt, i, &p_);                                                              \
  })
#define ps__v_load(p)     ps__v_get(p, PS_F32, 0)
#define ps__v_store(p, v) ps__v_put(p, PS_F32, 0, v)

/* The statement for a dtype @dt, with the constant @DT in its place. Each dtype is a line here, and
 * a case in the functions above. */
#define PS__BY_DTYPE(dt, DT, ...)                                                                  \
  do {                                                                                             \
    switch (dt) {                                                                                  \
      PS__DTYPE_CASE(PS_F32, DT, __VA_ARGS__)                                                      \
      PS__DTYPE_CASE(PS_BF16, DT, __VA_ARGS__)                                                     \
    }                                                                                              \
  } while (0)
#define PS__DTYPE_CASE(of, DT, ...)                                                                \
case of: {                                                                                         \
  enum { DT = of };                                                                                \
  __VA_ARGS__;                                                                                     \
} break;

/* Ends of rows: the n < 16 elements from i on, through 16 floats in memory; lanes past n read as
 * fill. */
__attribute__((noinline, unused)) static void ps__tail_get(float t[PS_LANES], const void *base,
                                                           uint32_t dt, size_t i, size_t n,
                                                           float fill) {
  for (size_t j = 0; j < PS_LANES; j++)
    t[j] = j >= n ? fill : ps__load1_f32(base, dt, i + j);
}
__attribute__((noinline, unused)) static void ps__tail_put(void *base, uint32_t dt, size_t i,
                                                           size_t n, const float t[PS_LANES]) {
  for (size_t j = 0; j < n && j < PS_LANES; j++)
    ps__store1_f32(base, dt, i + j, t[j]);
}
/* Elements i .. min(i+16, n)-1 of an array, missing lanes as fill; and the store. */
#define ps__v_read(base, dt, i, n, fill)                                                           \
  ({                                                                                               \
    ps__v v_;                                                                                      \
    if ((size_t)(i) + PS_LANES <= (size_t)(n))                                                     \
      ps__v_get_to(&v_, base, dt, i);                                                              \
    else {                                                                                         \
      float t_[PS_LANES];                                                                          \
      ps__tail_get(t_, base, dt, i, (size_t)(n) - (size_t)(i), fill);                              \
      memcpy(&v_, t_, sizeof v_);                                                                  \
    }                                                                                              \
    v_;                                                                                            \
  })
#define ps__v_write(base, dt, i, n, v)                                                             \
  ({                                                                                               \
    ps__v w_ = (v);                                                                                \
    if ((size_t)(i) + PS_LANES <= (size_t)(n))                                                     \
      ps__v_put_from(base, dt, i, &w_);                                                            \
    else {                                                                                         \
      float t_[PS_LANES];                                                                          \
      memcpy(t_, &w_, sizeof t_);                                                                  \
      ps__tail_put(base, dt, i, (size_t)(n) - (size_t)(i), t_);                                    \
    }                                                                                              \
    (void)0;                                                                                       \
  })

/* Lanes added as a tree: j += j+8, then 4, 2, 1. The largest lane. */
PS_VEC float ps__v_sum_of(const ps__v *v) {
  float t[PS_LANES];
  memcpy(t, v, sizeof t);
  for (int w = 8; w > 0; w /= 2)
    for (int j = 0; j < w; j++)
      t[j] += t[j + w];
  return t[0];
}
PS_VEC float ps__v_hmax_of(const ps__v *v) {
  float t[PS_LANES], m;
  memcpy(t, v, sizeof t);
  m = t[0];
  for (int j = 1; j < PS_LANES; j++)
    m = t[j] > m ? t[j] : m;
  return m;
}
#define ps__v_sum(v)                                                                               \
  ({                                                                                               \
    ps__v s_ = (v);                                                                                \
    ps__v_sum_of(&s_);                                                                             \
  })
#define ps__v_hmax(v)                                                                              \
  ({                                                                                               \
    ps__v s_ = (v);                                                                                \
    ps__v_hmax_of(&s_);                                                                            \
  })

/* exp(x), at most 2 ulp off (measured in tests/test_ops.py), subnormal results included; NaN
 * stays NaN, +inf gives inf. x = n ln2 + r, |r| <= ln2/2 with ln2 in two parts (n*hi is exact);
 * exp(r) by Taylor's polynomial of degree 7 (remainder (ln2/2)^8/8! = 5e-9, under 0.05 ulp); 2^n
 * in two factors, so that n from -150 to 128 needs no other care. */
PS_VEC void ps__v_exp_to(ps__v *y, const ps__v *arg) {
  /* 1.5 * 2^23 */
  const ps__v lo = ps__v_set(-104.0f), hi = ps__v_set(89.0f), magic = ps__v_set(12582912.0f);
  ps__v x = ps__v_select(*arg < lo, lo, *arg);
  x = ps__v_select(x > hi, hi, x);
  ps__v t = x * 1.44269504f + magic, n = t - magic;
  ps__v r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  ps__v p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  ps__vi i = (ps__vi)((ps__vu)t - 0x4b400000u), half = i >> 1;
  ps__v a = (ps__v)((ps__vu)(half + 127) << 23), b = (ps__v)((ps__vu)(i - half + 127) << 23);
  *y = p * a * b;
}
#define ps__v_exp(x)                                                                               \
  ({                                                                                               \
    ps__v x_ = (x), y_;                                                                            \
    ps__v_exp_to(&y_, &x_);                                                                        \
    y_;                                                                                            \
  })
/* tanh(x), at most 2 ulp off (measured in tests/test_ops.py): below 0.625 x + x^3 p(x^2) with the
 * polynomial of Cephes' tanhf, else 1 - 2 / (e^2|x| + 1) with x's sign. NaN stays NaN. */
PS_VEC void ps__v_tanh_to(ps__v *y, const ps__v *arg) {
  const ps__v x = *arg, z = x * x;
  const ps__vu sign = (ps__vu)x & 0x80000000u;
  const ps__v size = (ps__v)((ps__vu)x & 0x7fffffffu);
  ps__v p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const ps__v near = p * z * x + x;
  const ps__v far = 1.0f - 2.0f / (ps__v_exp(size + size) + 1.0f);
  *y = ps__v_select(size < 0.625f, near, (ps__v)((ps__vu)far | sign));
}
#define ps__v_tanh(x)                                                                              \
  ({                                                                                               \
    ps__v x_ = (x), y_;                                                                            \
    ps__v_tanh_to(&y_, &x_);                                                                       \
    y_;                                                                                            \
  })
/* The same bits for one number. */
PS_VEC float ps__tanhf(float x) {
  ps__v v = ps__v_set(x);
  ps__v_tanh_to(&v, &v);
  return v[0];
}
PS_VEC float ps__expf(float x) {
  ps__v v = ps__v_set(x);
  ps__v_exp_to(&v, &v);
  return v[0];
}

#endif
