/* test_draw.c - the numbers of weights that are drawn: against their formula in double, and the
 * bits of each instruction set against the library's. */
#include "check.h"
#include "core/dtype.h"
#include "train/draw.h"
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

static const double PI = 3.14159265358979323846;

/* splitmix64's first number from @seed on (Steele, Lea and Flood 2014, figure 17) */
static uint64_t first_of(uint64_t seed) {
  uint64_t z = seed + UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

static double expected(const ps__draw *d, uint64_t first, uint64_t i) {
  const uint64_t word = first_of(first_of(d->seed) ^ (first + i / 2 * 2));
  const double a = (double)(word >> 40), b = (double)(word & 0xffffff), all = 1 << 24;
  if (d->uniform)
    return d->mean + 2 * sqrt(3) * d->std * ((i % 2 ? b : a) - (1 << 23) + 0.5) / all;
  const double r = d->std * sqrt(-2 * log((a + 1) / all)), angle = 2 * PI * b / all;
  return d->mean + r * (i % 2 ? sin(angle) : cos(angle));
}

/* @n numbers of fp32 and of bf16. A number of fp32 may be off by draw.h's 2e-6 std and by roundings
 * of sums with the mean; one of bf16 is that number, rounded. */
static void check_numbers(const ps__draw *d, uint64_t first, uint64_t n) {
  enum { AFTER = 8 };
  float *x = malloc((n + AFTER) * sizeof *x), back;
  uint16_t *half = malloc((n + AFTER) * sizeof *half), rounded;
  memset(x, 0x55, (n + AFTER) * sizeof *x);
  memset(half, 0x55, (n + AFTER) * sizeof *half);
  ps__draw_numbers(d, first, n, x, PS_F32);
  ps__draw_numbers(d, first, n, half, PS_BF16);
  for (uint64_t i = 0; i < n; i++) {
    const double y = expected(d, first, i);
    CHECK(fabs(x[i] - y) <= 2e-6 * d->std + 0x1p-23 * (fabs(y) + fabs(d->mean)));
    ps__dtypes[PS_BF16].from_f32(&rounded, &x[i], 1);
    CHECK(half[i] == rounded);
  }
  memset(&back, 0x55, sizeof back);
  for (uint64_t i = n; i < n + AFTER; i++)
    CHECK(memcmp(&x[i], &back, sizeof back) == 0 && half[i] == 0x5555);
  free(x);
  free(half);
}

static void test_formula(void) {
  static const uint64_t counts[] = {1, 2, 31, 32, 33, 100000, 65537}, firsts[] = {0, 7, 1ull << 62};
  for (int uniform = 0; uniform < 2; uniform++)
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
      for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++) {
        const float mean = 0.25f * (float)f;
        const ps__draw d = {.seed = c + 3, .mean = mean, .std = 0.02f, .uniform = uniform};
        check_numbers(&d, firsts[f], counts[c]);
      }
  printf("ok drawn numbers are those of their formula, in fp32 and bf16\n");
}

/* Without a spread every number is the mean, exactly: norms are drawn so. */
static void test_constant(void) {
  float x[100];
  const ps__draw d = {.seed = 1, .mean = 1.0f};
  ps__draw_numbers(&d, 0, 100, x, PS_F32);
  for (int i = 0; i < 100; i++)
    CHECK(x[i] == 1.0f);
  printf("ok numbers without a spread are the mean\n");
}

/* A part that is drawn alone is the same as in one call: parts are drawn by several threads. */
static void test_parts(void) {
  enum { N = 4096, PART = 512 };
  float whole[N], part[PART];
  const ps__draw d = {.seed = 5, .std = 1.0f};
  ps__draw_numbers(&d, 100, N, whole, PS_F32);
  for (uint64_t i = 0; i < N; i += PART) {
    ps__draw_numbers(&d, 100 + i, PART, part, PS_F32);
    CHECK(memcmp(part, whole + i, sizeof part) == 0);
  }
  printf("ok parts of a sequence are the sequence\n");
}

/* The mean, deviation and fourth moment (3 for a normal distribution) of a million numbers, each
 * within 5 of its own standard errors. */
static void test_moments(void) {
  enum { N = 1 << 20 };
  float *x = malloc(N * sizeof *x);
  const ps__draw d = {.seed = 11, .std = 1.0f};
  double m1 = 0, m2 = 0, m4 = 0;
  ps__draw_numbers(&d, 0, N, x, PS_F32);
  for (int i = 0; i < N; i++) {
    const double y = x[i];
    m1 += y / N, m2 += y * y / N, m4 += y * y * y * y / N;
  }
  CHECK(fabs(m1) < 5 / sqrt(N) && fabs(m2 - 1) < 5 * sqrt(2.0 / N) &&
        fabs(m4 - 3) < 5 * sqrt(96.0 / N));
  free(x);
  printf("ok a million numbers have the moments of a normal distribution\n");
}

typedef void draw_numbers(const ps__draw *d, uint64_t first, uint64_t n, void *dst, ps_dtype dt);
draw_numbers draw_sse2, draw_avx2, draw_avx512f; /* draw_set.c */

/* Bit i: this processor runs the code of sets[i]. sse2 stands for PS_CLONES' "default". */
enum { N_SETS = 3 };
static const struct {
  const char *name;
  draw_numbers *draw;
} sets[N_SETS] = {{"sse2", draw_sse2}, {"avx2", draw_avx2}, {"avx512f", draw_avx512f}};
static uint32_t sets_here(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return 1u | (__builtin_cpu_supports("avx2") ? 2u : 0) |
         (__builtin_cpu_supports("avx512f") ? 4u : 0);
#else
  return 1;
#endif
}

/* The bits that sets[@set] draws, from its output's element @offset on, are the library's. */
static void check_set(size_t set, const ps__draw *d, uint64_t first, uint64_t n, size_t offset,
                      ps_dtype dt) {
  const size_t bytes = ps_dtype_bytes(dt), all = (offset + n + 1) * bytes;
  char *expect = malloc(all), *got = malloc(all);
  memset(expect, 0x55, all);
  memset(got, 0x55, all);
  ps__draw_numbers(d, first, n, expect + offset * bytes, dt);
  sets[set].draw(d, first, n, got + offset * bytes, dt);
  for (size_t i = 0; i < all; i += bytes)
    if (memcmp(expect + i, got + i, bytes)) {
      printf(
          "FAIL %s: number %zu of %llu from %llu on, %s, %s, has other bits than the library's\n",
          sets[set].name, i / bytes - offset, (unsigned long long)n, (unsigned long long)first,
          ps__dtypes[dt].name, d->uniform ? "uniform" : "normal");
      fflush(stdout);
      _Exit(1);
    }
  free(expect);
  free(got);
}

static void test_instruction_sets(void) {
  static const struct {
    uint64_t first, n;
    size_t offset;
  } parts[] = {{0, 1, 0},   {1, 2, 1},    {7, 31, 3},          {33, 32, 5},
               {2, 33, 15}, {99, 333, 7}, {1ull << 62, 63, 9}, {12345, 1 << 18, 1}};
  for (size_t set = 0; set < N_SETS; set++) {
    if (!(sets_here() >> set & 1))
      continue;
    for (uint32_t i = 0; i < 8; i++) { /* bit 0: dtype; 1: distribution; 2: a mean */
      const ps_dtype dt = i & 1 ? PS_BF16 : PS_F32;
      const ps__draw d = {
          .seed = i, .mean = i & 4 ? 0.3f : 0.0f, .std = 0.02f, .uniform = i >> 1 & 1};
      for (size_t p = 0; p < sizeof parts / sizeof *parts; p++)
        check_set(set, &d, parts[p].first, parts[p].n, parts[p].offset, dt);
    }
    printf("ok numbers drawn with %s have the library's bits\n", sets[set].name);
  }
}

int main(void) {
  test_formula();
  test_constant();
  test_parts();
  test_moments();
  test_instruction_sets();
  return 0;
}
