/* attention_isa.h - vector lanes, exp2 and the two micro-kernels of attention, for the
 * instruction set ATT_ISA (512, 2, 0). A template: included once by each attention_<isa>.c.
 * Every function carries ATT_FN, so that the file may be compiled without any -m flag. */
#include "kernels/cpu/attention_job.h"
#include <math.h>
#include <string.h>
#if ATT_ISA
#  include <immintrin.h>
#endif

#if ATT_ISA == 512
#  define ATT_TARGET __attribute__((target("avx512f")))
/* lanes of a vector; vectors of a row that a micro-kernel holds: 16 accumulators of 32
 * registers */
enum { VL = 16, NV = 4 };
typedef __m512 vf;
#  define v_set(x)       _mm512_set1_ps(x)
#  define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#  define v_max(a, b)    _mm512_max_ps(a, b) /* b where either is NaN */
#elif ATT_ISA == 2
#  define ATT_TARGET     __attribute__((target("avx2,fma")))
enum { VL = 8, NV = 3 }; /* 12 accumulators of 16 registers */
typedef __m256 vf;
#  define v_set(x)       _mm256_set1_ps(x)
#  define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#  define v_max(a, b)    _mm256_max_ps(a, b)
#else
#  define ATT_TARGET
enum { VL = 4, NV = 2 };
typedef float vf __attribute__((vector_size(16)));
#  define v_set(x)       ((vf){(x), (x), (x), (x)})
#  define v_fma(a, b, c) ((a) * (b) + (c))
#  define v_max(a, b)    v_pick((a) > (b), a, b)
#endif
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef float v4 __attribute__((vector_size(16)));
#define ATT_FN             static ATT_TARGET
#define ATT_INLINE         static inline ATT_TARGET __attribute__((always_inline))
#define v_pick(mask, a, b) ((vf)(((vi)(mask) & (vi)(a)) | (~(vi)(mask) & (vi)(b))))

ATT_INLINE vf v_load(const float *p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
ATT_INLINE void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
ATT_INLINE vi v_load_i(const int32_t *p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}

/* x where lo <= at <= hi, else -inf. */
ATT_INLINE vf v_hide(vf x, vi at, vi lo, vi hi) {
#if ATT_ISA == 512
  __mmask16 see = _mm512_cmple_epi32_mask((__m512i)lo, (__m512i)at) &
                  _mm512_cmple_epi32_mask((__m512i)at, (__m512i)hi);
  return _mm512_mask_blend_ps(see, v_set(-INFINITY), x);
#else
  return v_pick((lo <= at) & (at <= hi), x, v_set(-INFINITY));
#endif
}

/* 2^x for x <= 128: x = n + f, |f| <= 1/2; 2^f by a polynomial of degree 6 fitted in relative
 * error (2e-9), Horner with the machine's multiply-add, at most 1 ulp off. -inf gives 0, and so
 * does all below -126; NaN stays NaN. */
ATT_INLINE vf v_exp2(vf x) {
  const vf lo = v_set(-127.0f);
  x = v_max(lo, x); /* NaN passes */
#if ATT_ISA == 512
  vf n = _mm512_roundscale_ps(x, 8), f = x - n;
#else
  const vf magic = v_set(12582912.0f); /* 1.5 * 2^23 */
  vf t = x + magic, n = t - magic, f = x - n;
#endif
  vf p = v_fma(v_set(0.00015353362f), f, v_set(0.0013398874f));
  p = v_fma(p, f, v_set(0.0096184369f));
  p = v_fma(p, f, v_set(0.055503324f));
  p = v_fma(p, f, v_set(0.24022648f));
  p = v_fma(p, f, v_set(0.69314718f));
  p = v_fma(p, f, v_set(1.0f));
  /* n = -127 gives the exponent field 0: a factor of zero */
#if ATT_ISA == 512
  vi e = (vi)_mm512_cvtps_epi32(n);
#else
  vi e = (vi)t - 0x4b400000;
#endif
  return p * (vf)((e + 127) << 23);
}

/* tanh(x), at most 2 ulp off: x + x^3 p(x^2) with Cephes' tanhf polynomial below 0.625, else
 * 1 - 2 / (e^2|x| + 1) with x's sign. NaN stays NaN. */
ATT_INLINE vf v_tanh(vf x) {
  const vf low = v_set(-10.0f);
  vf size = v_max(x, -x);    /* |x|; NaN passes, here and below */
  size = -v_max(low, -size); /* tanh is 1 from 9.1 on */
  vf z = x * x;
  vf p = v_fma(v_set(-5.70498872745e-3f), z, v_set(2.06390887954e-2f));
  p = v_fma(p, z, v_set(-5.37397155531e-2f));
  p = v_fma(p, z, v_set(1.33314422036e-1f));
  p = v_fma(p, z, v_set(-3.33332819422e-1f));
  vf near = v_fma(p * z, x, x);
  vf far = v_set(1.0f) - v_set(2.0f) / (v_exp2(size * v_set(2.88539008f)) + v_set(1.0f));
  const vi sign = (vi)x & (vi)v_set(-0.0f);
  far = (vf)((vi)far | sign);
  return v_pick(size < v_set(0.625f), near, far);
}

/* Rows c..c+3 of a product, nv <= NV vectors wide: C[m,:] = row_scale[m] * C[m,:] + sum over k
 * of a[m*am + k*ak] * B[k,:]. A row_scale of NULL stands for zeros, without reading C. */
ATT_INLINE void rows4(const int nv, int64_t n_k, const float *a, size_t am, size_t ak,
                      const float *b, size_t ldb, float *c, size_t ldc, const float *row_scale) {
  vf acc[ATT_ROWS][NV];
#pragma GCC unroll 4
  for (int m = 0; m < ATT_ROWS; m++)
#pragma GCC unroll 4
    for (int n = 0; n < nv; n++)
      acc[m][n] = v_set(0.0f);
  if (row_scale) {
#pragma GCC unroll 4
    for (int m = 0; m < ATT_ROWS; m++) {
      vf s = v_set(row_scale[m]);
#pragma GCC unroll 4
      for (int n = 0; n < nv; n++)
        acc[m][n] = v_load(c + (size_t)m * ldc + n * VL) * s;
    }
  }
  for (int64_t k = 0; k < n_k; k++, a += ak, b += ldb) {
    vf row[NV];
#pragma GCC unroll 4
    for (int n = 0; n < nv; n++)
      row[n] = v_load(b + n * VL);
#pragma GCC unroll 4
    for (int m = 0; m < ATT_ROWS; m++) {
      vf x = v_set(a[(size_t)m * am]);
#pragma GCC unroll 4
      for (int n = 0; n < nv; n++)
        acc[m][n] = v_fma(x, row[n], acc[m][n]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < ATT_ROWS; m++)
#pragma GCC unroll 4
    for (int n = 0; n < nv; n++)
      v_store(c + (size_t)m * ldc + n * VL, acc[m][n]);
}

/* The same for rows of any number of vectors. */
ATT_INLINE void rows4_wide(int nv, int64_t n_k, const float *a, size_t am, size_t ak,
                           const float *b, size_t ldb, float *c, size_t ldc,
                           const float *row_scale) {
  for (int n; nv > 0; nv -= n, b += n * VL, c += n * VL) {
    n = nv < NV ? nv : NV;
    switch (n) {
    case 1: rows4(1, n_k, a, am, ak, b, ldb, c, ldc, row_scale); break;
    case 2: rows4(2, n_k, a, am, ak, b, ldb, c, ldc, row_scale); break;
#if ATT_ISA
    case 3: rows4(3, n_k, a, am, ak, b, ldb, c, ldc, row_scale); break;
#endif
#if ATT_ISA == 512
    case 4: rows4(4, n_k, a, am, ak, b, ldb, c, ldc, row_scale); break;
#endif
    }
  }
}
/* C = or (add) += the product. */
static const float att_ones[ATT_ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
#define att_keep(add) ((add) ? att_ones : NULL)
/* A row-major (a row for each m), or A transposed (a row for each k). */
static ATT_TARGET __attribute__((noinline)) void mul_n(int nv, int64_t n_k, const float *a,
                                                       size_t lda, const float *b, size_t ldb,
                                                       float *c, size_t ldc,
                                                       const float *row_scale) {
  rows4_wide(nv, n_k, a, lda, 1, b, ldb, c, ldc, row_scale);
}
static ATT_TARGET __attribute__((noinline)) void mul_t(int nv, int64_t n_k, const float *a,
                                                       size_t lda, const float *b, size_t ldb,
                                                       float *c, size_t ldc,
                                                       const float *row_scale) {
  rows4_wide(nv, n_k, a, 1, lda, b, ldb, c, ldc, row_scale);
}

/* dst[c][r] = src[r][c] * scale for ATT_TILE rows and n_cols (a multiple of 4) columns; dst has
 * ATT_TILE columns. */
ATT_FN void transpose(float *dst, const float *src, size_t ld, size_t n_cols, float scale) {
  v4 s = {scale, scale, scale, scale};
  for (size_t r = 0; r < ATT_TILE; r += 4)
    for (size_t c = 0; c < n_cols; c += 4) {
      v4 x[4], lo0, hi0, lo1, hi1;
      for (int i = 0; i < 4; i++)
        memcpy(&x[i], src + (r + i) * ld + c, sizeof(v4));
      lo0 = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5),
      hi0 = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
      lo1 = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5),
      hi1 = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
      x[0] = __builtin_shufflevector(lo0, lo1, 0, 1, 4, 5) * s,
      x[1] = __builtin_shufflevector(lo0, lo1, 2, 3, 6, 7) * s;
      x[2] = __builtin_shufflevector(hi0, hi1, 0, 1, 4, 5) * s,
      x[3] = __builtin_shufflevector(hi0, hi1, 2, 3, 6, 7) * s;
      for (int i = 0; i < 4; i++)
        memcpy(dst + (c + i) * ATT_TILE + r, &x[i], sizeof(v4));
    }
}

/* Rows first .. first+ATT_TILE-1 of a matrix, columns col .. col+head_dim-1, as fp32 into
 * dst[ATT_TILE][hp]; rows outside [0, n_rows) and columns past head_dim are zero. */
ATT_FN void load_tile(float *dst, const ps__att_job *j, const void *src, size_t ld, size_t col,
                      int64_t first, int64_t n_rows) {
  size_t d = j->a.head_dim;
  for (int64_t r = 0; r < ATT_TILE; r++, dst += j->hp) {
    size_t n = first + r >= 0 && first + r < n_rows ? d : 0;
    if (n)
      ps__load_f32(dst, ps__celem(src, j->a.dt, (size_t)(first + r) * ld + col), j->a.dt, n);
    memset(dst + n, 0, (j->hp - n) * sizeof *dst);
  }
}
