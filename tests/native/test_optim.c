/* test_optim.c - the host optimizer: same bits from every variant, any cut and any number of
 * threads; the random generator; how arrays are stored.
 * Usage: test_optim [threads: what several threads do, for ThreadSanitizer] */
#undef NDEBUG /* core/storage.h asserts */
#include "core/core.h"
#include "kernels/ops.h"
#include "optim/optim.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#  include <xmmintrin.h>
#endif

#define CHECK(cond, ...)                                                                           \
  do {                                                                                             \
    if (!(cond)) {                                                                                 \
      printf("FAIL %s:%d %s: ", __FILE__, __LINE__, #cond);                                        \
      printf(__VA_ARGS__);                                                                         \
      printf("\n");                                                                                \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

/* Lengths, and offsets of the first element, that are tried. A sanitizer finds what it looks for in
 * fewer of them. */
#ifdef PS_SANITIZED
enum { STRIDE = 13 };
#else
enum { STRIDE = 1 };
#endif
/* Of the offsets a count takes a third: 3 is prime to the lengths of vectors, so that each rest
 * behind the last whole vector comes with each offset. */
enum { AT_STRIDE = 3 };

/* xorshift64: shares nothing with the generator under test */
static uint64_t rng_state = 88172645463325252ull;
static uint32_t rng(void) {
  rng_state ^= rng_state << 13;
  rng_state ^= rng_state >> 7;
  rng_state ^= rng_state << 17;
  return (uint32_t)(rng_state >> 16);
}
static uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
static float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

static const ps__update base = {.lr = 1e-2f,
                                .beta1 = 0.9f,
                                .beta2 = 0.95f,
                                .eps = 1e-8f,
                                .momentum = 0.9f,
                                .grad_scale = 0.37f,
                                .c1 = 3.7f,
                                .c2 = 5.1f,
                                .seed = 42,
                                .step = 7};
/* Every optimizer in every row that has an update; SGD with and without nesterov. */
#define ROW(NAME, ...) PS__ROW_##NAME,
static const uint32_t rows[] = {PS__EACH_ROW(ROW, )};
enum { N_ROWS = sizeof rows / sizeof *rows, N_CASES = (PS_N_OPTIMIZERS + 1) * N_ROWS };
static ps__update case_of(int i) {
  ps__update u = base;
  u.nesterov = i / N_ROWS == PS_N_OPTIMIZERS;
  u.optimizer = u.nesterov ? PS_OPTIMIZER_SGD : (ps_optimizer)(i / N_ROWS);
  u.recipe = rows[i % N_ROWS];
  return u;
}
static bool in_blocks(uint32_t row) { return ps__recipes[row].state[0].block > 1; }
#define EACH_CASE(u)                                                                               \
  for (int i_##u = 0; i_##u < N_CASES; i_##u++)                                                    \
    for (ps__update u = case_of(i_##u), *once = &u; once; once = NULL)
static const char *name_of(const ps__update *u) {
  static char text[64];
  snprintf(text, sizeof text, "%s %s%s", ps_optimizer_name(u->optimizer),
           ps__recipes[u->recipe].name, in_blocks(u->recipe) ? ", 8 bits" : "");
  return text;
}

/* State of one update with room before and after: what lies outside [0, n) must not change. */
enum { MAX_N = 40000, ROOM = 64 };
typedef struct arrays {
  unsigned char w[4 * MAX_N], m[4 * MAX_N], v[4 * MAX_N], grad[4 * MAX_N];
  uint16_t copy[MAX_N];
} arrays;
static arrays start, want, got;
static size_t n_used = MAX_N; /* elements that are filled, copied and compared */

static void copy_used(arrays *to, const arrays *from) {
  memcpy(to->w, from->w, 4 * n_used);
  memcpy(to->m, from->m, 4 * n_used);
  memcpy(to->v, from->v, 4 * n_used);
  memcpy(to->grad, from->grad, 4 * n_used);
  memcpy(to->copy, from->copy, 2 * n_used);
}

static bool same_used(const arrays *a, const arrays *b) {
  return !memcmp(a->w, b->w, 4 * n_used) && !memcmp(a->m, b->m, 4 * n_used) &&
         !memcmp(a->v, b->v, 4 * n_used) && !memcmp(a->grad, b->grad, 4 * n_used) &&
         !memcmp(a->copy, b->copy, 2 * n_used);
}

static const uint32_t specials[] = {0,           0x80000000u, 1,           0x80000001u, 0x007fffffu,
                                    0x00800000u, 0x7f7fffffu, 0xff7fffffu, 0x7f800000u, 0xff800000u,
                                    0x7fc00000u, 0xffc00000u, 0x7f810000u, 0xff8f0000u, 0x7fc10000u,
                                    0x7f800001u, 0x3f800000u, 0x00010000u, 0x00000fffu};

/* @odd: one value in so many is a special one, 0 for none. Second moments are made non-negative
 * only without specials. */
static void fill_one(unsigned char *p, int is_bf16, int positive, uint32_t odd) {
  for (size_t i = 0; i < n_used; i++) {
    uint32_t u = (rng() & 0x807fffffu) | ((100u + rng() % 40u) << 23);
    if (odd && rng() % odd == 0)
      u = specials[rng() % (sizeof specials / sizeof *specials)];
    else if (positive)
      u &= 0x7fffffffu;
    if (is_bf16) {
      uint16_t h = (uint16_t)(u >> 16);
      memcpy(p + 2 * i, &h, 2);
    } else
      memcpy(p + 4 * i, &u, 4);
  }
}

static void fill(uint32_t recipe, uint32_t odd) {
  const ps__recipe *r = &ps__recipes[recipe];
  fill_one(start.w, r->updated.dtype == PS_BF16, 0, odd);
  fill_one(start.m, r->state[0].dtype == PS_BF16, 0, odd);
  fill_one(start.v, r->state[1].dtype == PS_BF16, 1, odd);
  fill_one(start.grad, r->grad.dtype == PS_BF16, 0, odd);
  memset(start.copy, 0xa5, sizeof start.copy);
  if (r->updated.dtype == PS__I8) /* a part of the weight */
    fill_one((unsigned char *)start.copy, 1, 0, odd);
}

static ps__arrays arrays_of(arrays *a, uint32_t recipe) {
  return (ps__arrays){.w = a->w,
                      .copy = ps__has_master(recipe) ? a->copy : NULL,
                      .grad = a->grad,
                      .state = {a->m, a->v}};
}

static void update(arrays *a, ps__simd simd, const ps__update *u, uint64_t first, uint64_t n,
                   float decay, uint64_t element0) {
  const ps__arrays all = arrays_of(a, u->recipe), from = ps__arrays_from(&all, u->recipe, first);
  ps__update_elements(simd, u, n, &from, decay, element0);
}

static void test_simd_same_bits(void) {
  EACH_CASE(u)
  for (uint64_t n = 0; n < 200; n = n < 70 ? n + STRIDE : n + 43)
    for (uint64_t at = n % AT_STRIDE; at < 9; at += AT_STRIDE) {
      const uint64_t element0 = rng() * (in_blocks(u.recipe) ? 4ull : 3ull) + at,
                     first = ROOM + (in_blocks(u.recipe) ? 0 : at);
      fill(u.recipe, at % 2 ? 3 : 0);
      copy_used(&want, &start);
      update(&want, PS_SIMD_SCALAR, &u, first, n, 0.1f, element0);
      for (int simd = 1; simd <= (int)ps__simd_best(); simd++) {
        copy_used(&got, &start);
        update(&got, (ps__simd)simd, &u, first, n, 0.1f, element0);
        CHECK(same_used(&got, &want), "%s simd %d n %d offset %d", name_of(&u), simd, (int)n,
              (int)at);
      }
    }
  printf("ok simd_same_bits (best %d)\n", (int)ps__simd_best());
}

/* The weights' part leaves the whole's weights and touches no state; the state's part after it
 * leaves the whole's bits, and touches no weight. */
static void test_parts(const ps__update *whole, ps__simd simd, uint64_t n, uint64_t at) {
  const uint64_t element0 = rng() * 3ull + at, first = ROOM + (in_blocks(whole->recipe) ? 0 : at);
  ps__update weights = *whole, state = *whole;
  weights.part = PS_UPDATE_WEIGHTS;
  state.part = PS_UPDATE_STATE;
  fill(whole->recipe, at % 2 ? 3 : 0);
  copy_used(&want, &start);
  update(&want, simd, whole, first, n, 0.1f, element0);
  copy_used(&got, &start);
  update(&got, simd, &weights, first, n, 0.1f, element0);
  CHECK(!memcmp(got.w, want.w, 4 * n_used) && !memcmp(got.copy, want.copy, 2 * n_used),
        "weights: %s simd %d n %d offset %d", name_of(whole), (int)simd, (int)n, (int)at);
  CHECK(!memcmp(got.m, start.m, 4 * n_used) && !memcmp(got.v, start.v, 4 * n_used),
        "weights touched state: %s simd %d n %d", name_of(whole), (int)simd, (int)n);
  const ps__arrays all = {.grad = got.grad, .state = {got.m, got.v}},
                   from = ps__arrays_from(&all, whole->recipe, first);
  ps__update_elements(simd, &state, n, &from, 0.1f, element0);
  CHECK(same_used(&got, &want), "state: %s simd %d n %d offset %d", name_of(whole), (int)simd,
        (int)n, (int)at);
}

static void test_parts_leave_the_same_bits(void) {
  EACH_CASE(u)
  for (int simd = 0; ps__optimizers[u.optimizer].splits && simd <= (int)ps__simd_best(); simd++)
    for (uint64_t n = 0; n < 200; n = n < 70 ? n + STRIDE : n + 43)
      for (uint64_t at = n % AT_STRIDE; at < 5; at += AT_STRIDE)
        test_parts(&u, (ps__simd)simd, n, at);
  printf("ok parts_leave_the_same_bits\n");
}

/* Every NaN of the result is the one NaN, in each of w, m, v and the copy, whatever went in. */
static void test_nan_is_canonical(void) {
  EACH_CASE(u)
  for (int simd = 0; u.recipe == PS_RECIPE_FP32_MASTER && simd <= (int)ps__simd_best(); simd++) {
    int seen = 0;
    fill(u.recipe, 2);
    got = start;
    update(&got, (ps__simd)simd, &u, 0, MAX_N, 0.1f, 0);
    const unsigned char *all[3] = {got.w, got.m, got.v};
    for (uint32_t a = 0; a < 1 + ps__optimizers[u.optimizer].n_states; a++)
      for (size_t i = 0; i < MAX_N; i++) {
        float x;
        memcpy(&x, all[a] + 4 * i, 4);
        if (!isnan(x))
          continue;
        seen++;
        CHECK(bits_of(x) == 0x7fc00000u, "%s array %u element %d bits %08x", name_of(&u), a, (int)i,
              bits_of(x));
        if (a == 0)
          CHECK(got.copy[i] == 0x7fc0, "copy %04x", got.copy[i]);
      }
    CHECK(seen > 1000, "%s: only %d NaN", name_of(&u), seen);
  }
  printf("ok nan_is_canonical\n");
}

/* One update against arithmetic written out here, with the documented generator. */
static uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
static uint16_t expect_bits(float x, uint64_t key, uint64_t element, uint64_t a) {
  const uint64_t golden = 0x9e3779b97f4a7c15ull,
                 first = mix(key + (2 * (element / 4) + 1) * golden),
                 second = mix(key + (2 * (element / 4) + 2) * golden);
  const uint64_t word = a == 0 ? first : a == 1 ? second : first ^ second;
  return (uint16_t)((bits_of(x) + (uint32_t)(word >> (element % 4 * 16) & 0xffff)) >> 16);
}
static void test_formula_bf16(void) {
  const uint64_t element0 = 0x123456789ull, golden = 0x9e3779b97f4a7c15ull;
  uint64_t key = mix(mix(base.seed + golden) + (base.step + 1) * golden);
  fill(PS_RECIPE_BF16, 0);
  got = start;
  ps__update u = base;
  u.recipe = PS_RECIPE_BF16;
  update(&got, ps__simd_best(), &u, 0, 5000, 0.25f, element0);
  for (uint64_t i = 0; i < 5000; i++) {
    float x[4];
    const unsigned char *from[4] = {start.w, start.m, start.v, start.grad},
                        *to[3] = {got.w, got.m, got.v};
    for (int a = 0; a < 4; a++) {
      uint16_t h;
      memcpy(&h, from[a] + 2 * i, 2);
      x[a] = float_of((uint32_t)h << 16);
    }
    /* volatile: one */
    volatile float g = x[3] * base.grad_scale, gg = g * g, mb = base.beta1 * x[1],
                   mg = (1.0f - base.beta1) * g;
    /* rounding each */
    volatile float vb = base.beta2 * x[2], vg = (1.0f - base.beta2) * gg, m = mb + mg, v = vb + vg;
    volatile float top = m * base.c1, under = v * base.c2, root = sqrtf(under),
                   den = root + base.eps, d = top / den;
    volatile float ld = base.lr * 0.25f, wd = ld * x[0], kept = x[0] - wd, moved = base.lr * d,
                   w = kept - moved;
    float y[3] = {w, m, v};
    for (uint64_t a = 0; a < 3; a++) {
      uint16_t h, e = expect_bits(y[a], key, element0 + i, a);
      memcpy(&h, to[a] + 2 * i, 2);
      CHECK(h == e, "element %d array %d: %04x, expected %04x", (int)i, (int)a, h, e);
      uint64_t r = ps__sr_random(base.seed, base.step, element0 + i) >> (16 * a) & 0xffff;
      CHECK((uint16_t)((bits_of(y[a]) + r) >> 16) == e, "ps__sr_random disagrees");
    }
  }
  printf("ok formula_bf16\n");
}

static void test_threads_and_cuts(void) {
  static const ps__segment
      anywhere[] = {{3, 20001, 0.1f}, {20004, 64, 0.0f}, {20068, 0, 0.5f}, {20068, 19000, 0.1f}},
      blocks[] = {{0, 20001, 0.1f}, {20032, 64, 0.0f}, {20096, 0, 0.5f}, {20096, 19000, 0.1f}};
  EACH_CASE(u) {
    const ps__segment *const segments = in_blocks(u.recipe) ? blocks : anywhere;
    const uint64_t unit0 = in_blocks(u.recipe) ? 776 : 777,
                   cut = in_blocks(u.recipe) ? 15 * PS__STATE_BLOCK : 1009;
    const ps__arrays a = arrays_of(&got, u.recipe);
    ps__update weights = u, state = u;
    weights.part = PS_UPDATE_WEIGHTS;
    state.part = PS_UPDATE_STATE;
    fill(u.recipe, 50);
    want = start;
    for (int s = 0; s < 4; s++) /* cut differently */
      for (uint64_t i = 0; i < segments[s].n; i += cut) {
        uint64_t n = segments[s].n - i < cut ? segments[s].n - i : cut,
                 first = segments[s].first + i;
        update(&want, ps__simd_best(), &u, first, n, segments[s].decay, unit0 + first);
      }
    for (uint32_t threads = 1; threads <= 4; threads++) {
      ps__pool *pool = NULL;
      CHECK(ps__pool_create(&pool, threads, "test") == PS_OK, "%s", ps_last_error());
      got = start;
      ps__update_on_pool(pool, &u, segments, 4, &a, unit0);
      CHECK(!memcmp(&got, &want, sizeof got), "%s threads %u", name_of(&u), threads);
      if (ps__optimizers[u.optimizer].splits) {
        got = start;
        ps__update_on_pool(pool, &weights, segments, 4, &a, unit0);
        ps__update_on_pool(pool, &state, segments, 4, &a, unit0);
        CHECK(!memcmp(&got, &want, sizeof got), "in two parts: %s threads %u", name_of(&u),
              threads);
      }
      ps__pool_destroy(pool);
    }
  }
  printf("ok threads_and_cuts\n");
}

static void test_denormals_kept_in_any_mode(void) {
#if defined(__x86_64__)
  EACH_CASE(u)
  for (int simd = 0; u.recipe == PS_RECIPE_FP32 && simd <= (int)ps__simd_best(); simd++) {
    fill(PS_RECIPE_FP32, 0);
    for (size_t i = 0; i < MAX_N; i++) {
      uint32_t m = rng() & 0x007fffffu;
      memcpy(start.m + 4 * i, &m, 4);
    }
    want = got = start;
    update(&want, (ps__simd)simd, &u, 0, 1000, 0.1f, 0);
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040 | 0x6000); /* flush, denormals are zero, round toward zero */
    update(&got, (ps__simd)simd, &u, 0, 1000, 0.1f, 0);
    unsigned after = _mm_getcsr();
    _mm_setcsr(mode);
    CHECK((after & 0xffc0u) == ((mode | 0xe040u) & 0xffc0u), "mode not put back: %x", after);
    CHECK(!memcmp(&got, &want, sizeof got), "%s simd %d", name_of(&u), simd);
  }
#endif
  printf("ok denormals_kept_in_any_mode\n");
}

/* Chi-square against uniform: mean bins-1, variance 2(bins-1); 6 sigma both ways, a chance of
 * 2e-9 for a good generator (and the seeds are fixed: it passes always or never). */
static void chi_square(const uint32_t *count, size_t bins, double total, const char *what) {
  double chi = 0, expected = total / (double)bins;
  for (size_t i = 0; i < bins; i++)
    chi += (count[i] - expected) * (count[i] - expected) / expected;
  double sigma = (chi - (double)(bins - 1)) / sqrt(2.0 * (double)(bins - 1));
  CHECK(fabs(sigma) < 6, "%s: %.1f sigma", what, sigma);
}

static void test_generator_uniform(void) {
  static uint32_t lane[3][65536], pair[5][65536];
  const uint64_t n = 1u << 21;
  for (int along = 0; along < 3; along++) { /* along elements, steps, seeds */
    memset(lane, 0, sizeof lane);
    memset(pair, 0, sizeof pair);
    uint64_t before = 0;
    for (uint64_t i = 0; i < n; i++) {
      uint64_t r = ps__sr_random(along == 2 ? i : 5, along == 1 ? i : 3, along == 0 ? i : 1000);
      CHECK(r >> 48 == 0, "more than 48 bits");
      for (int a = 0; a < 3; a++)
        lane[a][r >> (16 * a) & 0xffff]++;
      pair[0][(r >> 8 & 0xff) << 8 | (r >> 24 & 0xff)]++;      /* w with m */
      pair[1][(r >> 24 & 0xff) << 8 | (r >> 40 & 0xff)]++;     /* m with v */
      pair[2][(r >> 8 & 0xff) << 8 | (before >> 8 & 0xff)]++;  /* w with the w before */
      pair[3][(r >> 40 & 0xff) << 8 | (before >> 8 & 0xff)]++; /* v with the w before */
      pair[4][(r >> 8 & 0xff) << 8 | (r >> 40 & 0xff)]++;      /* w with v */
      before = r;
    }
    for (int a = 0; a < 3; a++)
      chi_square(lane[a], 65536, (double)n, "lane");
    for (int a = 0; a < 5; a++)
      chi_square(pair[a], 65536, (double)n, "pair");
  }
  printf("ok generator_uniform\n");
}

/* Moments decay by 1e-3 a step where rounding to nearest would not move them. */
static void test_rounding_is_unbiased(void) {
  enum { N = 1 << 15, STEPS = 1000 };
  static uint16_t w[N], m[N], v[N], grad[N];
  ps__update u = {.optimizer = PS_OPTIMIZER_ADAMW,
                  .recipe = PS_RECIPE_BF16,
                  .beta1 = 0.9f,
                  .beta2 = 0.999f,
                  .eps = 1e-8f,
                  .grad_scale = 1,
                  .c1 = 1,
                  .c2 = 1,
                  .seed = 11};
  const ps__arrays a = {.w = w, .grad = grad, .state = {m, v}};
  CHECK(ps__f32_to_bf16(0.999f) == ps__f32_to_bf16(1.0f), "nearest would move");
  for (int i = 0; i < N; i++)
    v[i] = ps__f32_to_bf16(1.0f);
  ps__update_elements(ps__simd_best(), &u, N, &a, 0, 0);
  double mean = 0;
  for (int i = 0; i < N; i++)
    mean += ps__bf16_to_f32(v[i]) / (double)N;
  /* one rounding between neighbours 2^-8 apart: variance at most 2^-18 an element; 6 sigma of
   * the mean, plus the generator's grain (the probability of rounding up is exact to 2^-16 of
   * the spacing) */
  CHECK(fabs(mean - 0.999) < 6 * ldexp(1, -9) / sqrt(N) + ldexp(1, -24), "mean %.6f", mean);
  for (u.step = 1; u.step < STEPS; u.step++)
    ps__update_elements(ps__simd_best(), &u, N, &a, 0, 0);
  mean = 0;
  for (int i = 0; i < N; i++)
    mean += ps__bf16_to_f32(v[i]) / (double)N;
  /* a martingale around 0.999^t: each step adds a variance of at most 2^-18, so at the end sigma
   * of the mean is at most sqrt(STEPS * 2^-18 / N); truncation below 2^-24 of the value a step
   * is far below it */
  CHECK(fabs(mean - pow(0.999, STEPS)) < 6 * sqrt(STEPS * ldexp(1, -18) / N),
        "mean %.6f after %d steps, %.6f expected", mean, STEPS, pow(0.999, STEPS));
  printf("ok rounding_is_unbiased\n");
}

/* Every master copy of 24 bits has halves that give it back, and the high one is the nearest bf16;
 * what lies between two goes to the nearer, ties to even. Levels that an update stored are fixed
 * points of the way to fp32 and back. */
static void test_conversions(void) {
  enum { N = 1 << 16 };
  static float x[N], back[N];
  static uint16_t high[N];
  static int8_t low[N];
  for (uint32_t first = 0; first < 1u << 24; first += N) {
    for (uint32_t i = 0; i < N; i++)
      x[i] = float_of((first + i) << 8);
    ps__master_split(high, low, x, N);
    ps__master_merge(back, high, low, N);
    for (uint32_t i = 0; i < N; i++) {
      const bool tie = ((first + i) & 0xff) == 0x80;
      if (isnan(x[i]))
        continue;
      CHECK(bits_of(back[i]) == bits_of(x[i]), "%08x", bits_of(x[i]));
      CHECK(tie || high[i] == ps__f32_to_bf16(x[i]), "%08x", bits_of(x[i]));
    }
  }
  static const uint32_t rounded[][2] = {{0x3f80107f, 0x3f801000}, {0x3f801080, 0x3f801000},
                                        {0x3f801180, 0x3f801200}, {0x3f801081, 0x3f801100},
                                        {0xff8000ff, 0x7fc00000}, {0x7f7fffff, 0x7f800000}};
  for (int i = 0; i < 6; i++) {
    x[0] = float_of(rounded[i][0]);
    ps__master_split(high, low, x, 1);
    ps__master_merge(back, high, low, 1);
    CHECK(bits_of(back[0]) == rounded[i][1], "%08x: %08x", rounded[i][0], bits_of(back[0]));
  }
  ps__update u = base;
  u.recipe = PS__ROW_FP32_8BIT;
  fill(u.recipe, 0);
  update(&start, ps__simd_best(), &u, 0, N / 4 + 7, 0, 0);
  for (int k = 0; k < 2; k++) {
    const ps__storage as = ps__recipes[u.recipe].state[k];
    const void *const state = k ? start.v : start.m;
    memcpy(got.m, state, sizeof got.m);
    ps__stored_to_f32(as, x, state, N / 4 + 7);
    ps__stored_from_f32(as, got.m, x, N / 4 + 7);
    CHECK(!memcmp(got.m, state, sizeof got.m), "state %d", k);
  }
  printf("ok conversions give back what was stored\n");
}

static bool aborts(ps__storage s, uint64_t first) {
  int status = 0;
  const pid_t child = fork();
  if (child == 0) {
    (void)!freopen("/dev/null", "w", stderr);
    _exit((int)(ps__stored_at(s, first) & 1));
  }
  return waitpid(child, &status, 0) == child && WIFSIGNALED(status);
}

/* The slices of an array lie one after the other and are the whole of it, wherever it is cut at a
 * block's border; a slice that begins elsewhere is a bug. */
static void test_storage(void) {
  static const struct {
    ps__storage as;
    uint64_t block_bytes, of_1000; /* BYTES */
  } of[] = {{PS__STORED_F32, 4, 4000},
            {PS__STORED_BF16, 2, 2000},
            {{PS__E4M3, 128, 4, 0}, 132, 8 * 132},
            {{PS__E4M3, 32, 2, 0}, 34, 32 * 34},
            {{PS_BF16, 64, 4, 0}, 132, 16 * 132}};
  for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
    const ps__storage s = of[i].as;
    CHECK(ps__stored_bytes(s, 0) == 0 && ps__stored_at(s, 0) == 0, "case %zu", i);
    CHECK(ps__stored_bytes(s, 1) == of[i].block_bytes, "case %zu", i);
    CHECK(ps__stored_bytes(s, s.block) == of[i].block_bytes, "case %zu", i);
    CHECK(ps__stored_bytes(s, 1000) == of[i].of_1000, "case %zu", i);
    CHECK(ps__stored_each(s) * s.block == (double)of[i].block_bytes, "case %zu", i);
    for (uint64_t cut = 0; cut <= 1000; cut += s.block) {
      CHECK(ps__stored_at(s, cut) == ps__stored_bytes(s, cut), "case %zu at %d", i, (int)cut);
      CHECK(ps__stored_at(s, cut) + ps__stored_bytes(s, 1000 - cut) == of[i].of_1000,
            "case %zu at %d", i, (int)cut);
    }
    CHECK(aborts(s, s.block + 1) == (s.block > 1) && !aborts(s, s.block), "case %zu", i);
  }
  for (int i = 0; i < PS__N_ROWS; i++) {
    const ps__recipe *r = &ps__recipes[i];
    const ps__storage as[] = {r->weights, r->updated, r->grad, r->state[0], r->state[1]};
    for (size_t k = 0; k < sizeof as / sizeof *as; k++)
      CHECK(PS__SPAN_ALIGN % as[k].block == 0, "%s: spans begin inside blocks", r->name);
  }
  printf("ok slices of stored arrays add up\n");
}

int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "threads")) {
    test_threads_and_cuts();
    return 0;
  }
  test_storage();
  test_conversions();
  n_used = 512; /* of updates of at most 200 elements, with room before and behind */
  test_simd_same_bits();
  test_parts_leave_the_same_bits();
  n_used = MAX_N;
  test_nan_is_canonical();
  test_formula_bf16();
  test_threads_and_cuts();
  test_denormals_kept_in_any_mode();
  test_generator_uniform();
  test_rounding_is_unbiased();
  return 0;
}
