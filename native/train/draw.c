/* draw.c - random numbers for weights, 32 at a time: 1.4 ns a number of bf16 on one core of an AMD
 * EPYC with AVX-512, where libm's functions one at a time take 8.4 ns
 * (bench/log/2026-11-25-drawn-weights.md). */
#include "train/draw.h"
#include "core/dtype.h"
#include "core/mix64.h"
#include "core/vec.h"
#include <math.h>

enum { PAIRS = PS_LANES };

/* the first number of splitmix64 from @seed on */
static uint64_t first_of(uint64_t seed) { return ps__mix64(seed + PS__MIX_GAMMA); }

/* ln(u) of 2^-24 <= u <= 1: u = 2^e (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2), and the polynomial
 * of Cephes' logf in f. */
PS_VEC void log_to(ps__v *y, const ps__v *u) {
  const ps__vu bits = (ps__vu)*u;
  const ps__vi e = (ps__vi)(bits - 0x3f3504f3u) >> 23;
  const ps__v n = __builtin_convertvector(e, ps__v), f = (ps__v)(bits - ((ps__vu)e << 23)) - 1.0f,
              ff = f * f;
  ps__v p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  p = p * f * ff - 2.12194440e-4f * n - 0.5f * ff; /* ln 2 in two parts, as for ps__v_exp_to */
  *y = f + p + 0.693359375f * n;
}

/* cos and sin of 2 pi k / 2^24, 0 <= k < 2^24: whole quarters of a turn are taken off k, which is
 * exact; then the polynomials of Cephes' cosf and sinf for at most an eighth of a turn. */
PS_VEC void turn_to(ps__v *cosine, ps__v *sine, const ps__vi *k) {
  const ps__vi quarter = (*k + (1 << 21)) >> 22;
  const ps__v x =
      __builtin_convertvector(*k - (quarter << 22), ps__v) * (6.2831853071795864769f / 16777216.0f);
  const ps__v z = x * x;
  const ps__v s = ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
  const ps__v p = (z * 2.4433157118e-5f - 1.3887316255e-3f) * z + 4.1666645683e-2f;
  const ps__v c = p * z * z - 0.5f * z + 1.0f;
  const ps__vi odd = -(quarter & 1);
  const ps__vu minus_s = (ps__vu)(quarter & 2) << 30, minus_c = (ps__vu)((quarter + 1) & 2) << 30;
  *sine = (ps__v)((ps__vu)ps__v_select(odd, c, s) ^ minus_s);
  *cosine = (ps__v)((ps__vu)ps__v_select(odd, s, c) ^ minus_c);
}

PS_VEC void sqrt_to(ps__v *y, const ps__v *x) {
  float t[PS_LANES];
  memcpy(t, x, sizeof t);
  for (int j = 0; j < PS_LANES; j++)
    t[j] = sqrtf(t[j]);
  memcpy(y, t, sizeof t);
}

/* PAIRS pairs of numbers from the words of elements @first, @first + 2, ... */
PS_CLONES static void draw_pairs(const ps__draw *d, uint64_t key, uint64_t first,
                                 float out[2 * PAIRS]) {
  int32_t upper[PAIRS], lower[PAIRS];
  float even[PAIRS], odd[PAIRS];
  for (int j = 0; j < PAIRS; j++) {
    const uint64_t word = first_of(key ^ (first + 2 * (uint64_t)j));
    upper[j] = (int32_t)(word >> 40);
    lower[j] = (int32_t)(word & 0xffffff);
  }
  ps__vi a, b;
  memcpy(&a, upper, sizeof a);
  memcpy(&b, lower, sizeof b);
  ps__v x, y;
  if (d->uniform) {
    const float width = 2 * sqrtf(3.0f) * d->std / 16777216.0f;
    x = d->mean + width * (__builtin_convertvector(a, ps__v) - 8388607.5f);
    y = d->mean + width * (__builtin_convertvector(b, ps__v) - 8388607.5f);
  } else {
    ps__v r, u = __builtin_convertvector(a + 1, ps__v) * (1.0f / 16777216.0f);
    log_to(&r, &u);
    r = r * -2.0f;
    sqrt_to(&r, &r);
    turn_to(&x, &y, &b);
    x = d->mean + d->std * r * x;
    y = d->mean + d->std * r * y;
  }
  memcpy(even, &x, sizeof even);
  memcpy(odd, &y, sizeof odd);
  for (int j = 0; j < PAIRS; j++) {
    out[2 * j] = even[j];
    out[2 * j + 1] = odd[j];
  }
}

void ps__draw_numbers(const ps__draw *d, uint64_t first, uint64_t n, void *dst, ps_dtype dt) {
  const uint64_t key = first_of(d->seed), bytes = ps_dtype_bytes(dt);
  for (uint64_t i = 0; i < n; i += 2 * PAIRS) {
    float out[2 * PAIRS];
    draw_pairs(d, key, first + i, out);
    ps__dtypes[dt].from_f32((char *)dst + i * bytes, out,
                            n - i < 2 * PAIRS ? (size_t)(n - i) : 2 * PAIRS);
  }
}
