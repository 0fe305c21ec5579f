/* test_cuda_ops.c - every CUDA op against the CPU function of the same kernel; then, with
 * "time", its speed at 8B shapes. Usage: test_cuda_ops [short | time | speed [seed [part of a
 * name]]]; short for a sanitizer, speed without the cases.
 *
 * Each case runs the GPU twice from the same fresh random inputs, outputs and scratch poisoned,
 * guard bytes around every buffer; the two runs must agree bit for bit, inputs must be as they
 * were, and outputs within the tolerance of the case:
 *   |gpu - cpu| <= ulps * ulp(dt, value) + rel * |cpu| + of_max * max|cpu|
 * where `ulps` is 1 for bf16 (two fp32 results that differ a little round to neighbours at
 * worst) and the others come from depth of sums times 2^-24, as said beside each. Exit code 0:
 * all well, or no device (with the reason). */
#include <stdio.h>
#ifndef PS_CUDA
int main(void) {
  printf("ok skipped: built without CUDA\n");
  return 0;
}
#else
#  include "core/core.h"
#  include "kernels/cpu/cpu.h"
#  include "kernels/cuda/cuda_ops.h"
#  include "model/rope.h"
#  include <cuda_runtime_api.h>
#  include <math.h>
#  include <stdlib.h>
#  include <string.h>
#  include <time.h>

enum { GUARD = 256, MAX_BUF = 10, WORKERS = 2 };
typedef struct tolerance {
  double ulps, rel, of_max;
} tolerance;
typedef struct buffer {
  char mode;   /* r, w (poisoned before) or u (updated) */
  uint32_t dt; /* PS_F32, PS_BF16, or I32, F64 */
  size_t n;
  void *init;
  tolerance tol;
} buffer;
enum { I32 = 10, F64 = 11 };

static ps__cuda_exec g_exec;
static ps__cpu_exec g_cpu;
static char *g_arena; /* device memory for the cases, taken from the front by each */
static size_t g_arena_bytes;
static int g_failed, g_passed;
static bool g_short;       /* without the largest cases and the products: for a sanitizer */
static const char *g_part; /* in the names of what is timed, NULL: all */
static uint64_t g_seed;

static void need(cudaError_t e, const char *what) {
  if (e == cudaSuccess)
    return;
  printf("FAIL %s: %s\n", what, cudaGetErrorString(e));
  exit(1);
}
static double uniform(void) {
  g_seed ^= g_seed << 13, g_seed ^= g_seed >> 7, g_seed ^= g_seed << 17;
  return (double)(g_seed >> 11) * 0x1p-53;
}
/* variance 1 */
static float normal(void) {
  return (float)((uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7320508);
}
static size_t dt_bytes(uint32_t dt) { return dt == F64 ? 8 : dt == PS_BF16 ? 2 : 4; }
static double value(const void *p, uint32_t dt, size_t i) {
  return dt == PS_BF16 ? ps__bf16_to_f32(((const uint16_t *)p)[i])
         : dt == F64   ? ((const double *)p)[i]
                       : ((const float *)p)[i];
}
static double ulp(double v, uint32_t dt) {
  int e;
  frexp(v, &e);
  return ldexp(1.0, e - (dt == PS_BF16 ? 8 : dt == F64 ? 53 : 24));
}

/* n values of N(0, scale^2), as dt. */
static buffer random_buf(char mode, uint32_t dt, size_t n, float scale, tolerance tol) {
  buffer b = {mode, dt, n, malloc(n * dt_bytes(dt) + 1), tol};
  for (size_t i = 0; i < n; i++) {
    const float x = normal() * scale;
    if (dt == PS_BF16)
      ((uint16_t *)b.init)[i] = ps__f32_to_bf16(x);
    else
      ((float *)b.init)[i] = x;
  }
  return b;
}
static const tolerance exact = {0, 0, 0};
static buffer in(uint32_t dt, size_t n, float scale) {
  return random_buf('r', dt, n, scale, exact);
}
static buffer ints(size_t n, int64_t lo, int64_t hi, bool skewed) {
  buffer b = {'r', I32, n, malloc(n * 4 + 1), exact};
  for (size_t i = 0; i < n; i++) {
    double u = uniform();
    ((int32_t *)b.init)[i] =
        (int32_t)(lo + (int64_t)((skewed ? u * u * u : u) * (double)(hi - lo)));
  }
  return b;
}

/* Bit patterns of any size, denormals and zeros too; infinities in kind 1 and 2 of 4, NaNs in 2. */
static buffer special(uint32_t dt, size_t n, size_t kind) {
  buffer b = random_buf('r', dt, n, 1, exact);
  const size_t bytes = dt_bytes(dt);
  for (size_t i = 0; i < n; i++) {
    const uint32_t exponent = (uint32_t)(uniform() * 255), rare = (uint32_t)(uniform() * 1000);
    uint32_t u = (uint32_t)(uniform() * 0x1p23) | (uniform() < 0.5 ? 1u << 31 : 0) |
                 (rare % 5 ? exponent : 0) << 23;
    if (rare == 7)
      u &= 1u << 31;
    if (kind % 4 >= 1 && kind % 4 <= 2 && rare == 8)
      u = 0x7f800000u | (u & 1u << 31);
    if (kind % 4 == 2 && rare == 9)
      u = 0x7fc10000u;
    if (bytes == 2)
      u >>= 16;
    memcpy((char *)b.init + i * bytes, &u, bytes);
  }
  return b;
}

static size_t compare(const buffer *b, const void *cpu, const void *gpu, char *why,
                      size_t why_bytes) {
  double max = 0.0;
  size_t bad = 0;
  if (b->dt == I32)
    return 0;
  for (size_t i = 0; i < b->n; i++)
    max = fmax(max, fabs(value(cpu, b->dt, i)));
  for (size_t i = 0; i < b->n; i++) {
    const double c = value(cpu, b->dt, i), g = value(gpu, b->dt, i);
    if (c == g || (isnan(c) && isnan(g)))
      continue;
    const double limit = b->tol.ulps * ulp(fmax(fabs(c), fabs(g)), b->dt) + b->tol.rel * fabs(c) +
                         b->tol.of_max * max;
    if (fabs(c - g) <= limit)
      continue;
    if (!bad++)
      snprintf(why, why_bytes, "element %zu: cpu %.9g gpu %.9g, limit %.3g", i, c, g, limit);
  }
  return bad;
}

/* Runs the CUDA op once on fresh copies; out[i] = buffer i as it came back. False (and a line)
 * when a guard or an input changed. */
static bool run_gpu(const char *name, const ps_kernel *k, ps_op_fn fn, const void *args,
                    const buffer *b, uint32_t n, void **out) {
  void *ptr[MAX_BUF];
  char *at = g_arena;
  const size_t scratch = ps__op_scratch(k, PS_BACKEND_CUDA, args, NULL);
  for (uint32_t i = 0; i < n; i++) {
    const size_t bytes = b[i].n * dt_bytes(b[i].dt), room = ps__round_up(bytes, 256) + 2 * GUARD;
    need(cudaMemset(at, 0x5a, room), "guards");
    ptr[i] = at + GUARD;
    if (b[i].mode == 'w')
      need(cudaMemset(ptr[i], 0xcd, bytes), "poison");
    else
      need(cudaMemcpy(ptr[i], b[i].init, bytes, cudaMemcpyHostToDevice), "input");
    at += room;
  }
  need(cudaMemset(at, 0xff, scratch + 256), "scratch");
  g_exec.scratch = at;
  g_exec.scratch_bytes = scratch;
  if ((size_t)(at - g_arena) + scratch + 256 > g_arena_bytes) {
    printf("FAIL %s: test arena too small\n", name);
    exit(1);
  }
  /* the stream does not wait for the default one, which filled them */
  need(cudaDeviceSynchronize(), "inputs");
  const ps_launch l = {.args = args, .ptr = ptr, .n_ptr = n, .exec = &g_exec};
  if (fn(&l) != PS_OK) {
    printf("FAIL %s: %s\n", name, ps_last_error());
    return false;
  }
  const cudaError_t e = cudaDeviceSynchronize();
  need(e, name);
  unsigned char guard[256];
  need(cudaMemcpy(guard, at + scratch, 256, cudaMemcpyDeviceToHost), "scratch guard");
  bool ok = true;
  for (int i = 0; i < 256; i++)
    ok = ok && guard[i] == 0xff;
  if (!ok)
    printf("FAIL %s: wrote behind its scratch\n", name);
  for (uint32_t i = 0; i < n; i++) {
    const size_t bytes = b[i].n * dt_bytes(b[i].dt), room = ps__round_up(bytes, 256) + 2 * GUARD;
    unsigned char *all = malloc(room);
    need(cudaMemcpy(all, (char *)ptr[i] - GUARD, room, cudaMemcpyDeviceToHost), "result");
    for (size_t j = 0; j < room && ok; j++)
      if ((j < GUARD || j >= GUARD + bytes) && all[j] != 0x5a)
        ok = false, printf("FAIL %s: wrote outside of buffer %u\n", name, i);
    if (b[i].mode == 'r' && memcmp(all + GUARD, b[i].init, bytes) != 0)
      ok = false, printf("FAIL %s: changed input %u\n", name, i);
    out[i] = malloc(bytes + 1);
    memcpy(out[i], all + GUARD, bytes);
    free(all);
  }
  return ok;
}

static void check(const char *name, const ps_kernel *k, ps_op_fn fn, const void *args, buffer *b,
                  uint32_t n) {
  void *cpu[MAX_BUF], *first[MAX_BUF] = {0}, *second[MAX_BUF] = {0};
  char why[200] = "";
  bool ok = run_gpu(name, k, fn, args, b, n, first) && run_gpu(name, k, fn, args, b, n, second);
  for (uint32_t i = 0; i < n; i++) {
    const size_t bytes = b[i].n * dt_bytes(b[i].dt);
    cpu[i] = aligned_alloc(64, ps__round_up(bytes + 1, 64));
    if (b[i].mode == 'w')
      memset(cpu[i], 0xab, bytes);
    else
      memcpy(cpu[i], b[i].init, bytes);
  }
  g_cpu.scratch_bytes = ps__round_up(ps__op_scratch(k, PS_BACKEND_CPU, args, NULL), 64);
  g_cpu.scratch = aligned_alloc(64, g_cpu.scratch_bytes * WORKERS + 64);
  const ps_launch l = {.args = args, .ptr = cpu, .n_ptr = n, .exec = &g_cpu};
  if (ok && k->fn[PS_BACKEND_CPU](&l) != PS_OK)
    ok = false, printf("FAIL %s: cpu: %s\n", name, ps_last_error());
  for (uint32_t i = 0; ok && i < n; i++) {
    if (b[i].mode == 'r')
      continue;
    if (memcmp(first[i], second[i], b[i].n * dt_bytes(b[i].dt)) != 0)
      ok = false, printf("FAIL %s: output %u differs between two runs\n", name, i);
    const size_t bad = ok ? compare(&b[i], cpu[i], first[i], why, sizeof why) : 0;
    if (bad)
      ok = false, printf("FAIL %s: output %u: %zu of %zu wrong; %s\n", name, i, bad, b[i].n, why);
  }
  free(g_cpu.scratch);
  for (uint32_t i = 0; i < n; i++)
    free(cpu[i]), free(first[i]), free(second[i]), free(b[i].init);
  ok ? g_passed++ : g_failed++;
}
#  define CHECK(k, op, args, ...)                                                                  \
    do {                                                                                           \
      buffer bufs_[] = {__VA_ARGS__};                                                              \
      check(name, &ps__k_##k, ps__cuda_##op, args, bufs_,                                          \
            (uint32_t)(sizeof bufs_ / sizeof *bufs_));                                             \
    } while (0)
static void done(const char *family, int failed_before) {
  if (g_failed == failed_before)
    printf("ok %s\n", family);
}

/* ---- cases ----------------------------------------------------------------------------------- */

/* Sums over n rows in two orders, of terms of both signs: depth of at most 300 additions of
 * magnitude up to the sum of all terms' sizes, 0.64 n where the largest result is about 3
 * sqrt(n): 300 * 2^-24 * 0.2 sqrt(n), twice; errors being random, a tenth. */
static tolerance row_sums(uint32_t dt, double n) {
  return (tolerance){dt == PS_BF16, 4e-7, 1e-6 + 8e-7 * sqrt(n)};
}

static void test_rmsnorm(uint32_t dt) {
  static const uint32_t shape[][2] = {{1, 1},     {1, 4096},   {3, 8},     {7, 1000},
                                      {9, 33},    {257, 4096}, {33, 5120}, {5, 12288},
                                      {2100, 64}, {2049, 40},  {600, 8192}};
  const int before = g_failed;
  /* 12288 columns: 100 additions deep at most, 6e-6 of the mean square, half of that in rstd */
  const tolerance row = {dt == PS_BF16, 3e-6, 3e-6};
  for (size_t s = 0; s < sizeof shape / sizeof *shape; s++)
    for (uint32_t flags = 0; flags < 4; flags++) {
      const uint32_t r = shape[s][0], c = shape[s][1];
      const ps__args_rmsnorm a = {.rows = r,
                                  .cols = c,
                                  .dt = dt,
                                  .accumulate_dw = flags & 1,
                                  .add_dx = flags >> 1,
                                  .eps = 1e-5f,
                                  .weight_offset = s % 2 ? 1.0f : 0.0f,
                                  .has_residual = flags == 1};
      const size_t n = (size_t)r * c;
      char name[96];
      snprintf(name, sizeof name, "rmsnorm dt%u %ux%u flags %u", dt, r, c, flags);
      if (!flags)
        CHECK(rmsnorm_fwd, rmsnorm_fwd, &a, in(dt, n, 2), in(dt, c, 1),
              random_buf('w', dt, n, 1, row));
      if (a.has_residual)
        CHECK(rmsnorm_fwd, rmsnorm_fwd, &a, in(dt, n, 2), in(dt, c, 1),
              random_buf('w', dt, n, 1, row), in(dt, n, 2));
      /* the gradient of one column is 0 but for eps: there is only rounding to compare */
      if (c == 1)
        continue;
      CHECK(rmsnorm_bwd, rmsnorm_bwd, &a, in(dt, n, 2), in(dt, c, 1), in(dt, n, 1),
            random_buf(a.add_dx ? 'u' : 'w', dt, n, 1, row),
            random_buf(a.accumulate_dw ? 'u' : 'w', dt, c, 1, row_sums(dt, r)));
    }
  done(dt ? "rmsnorm bf16" : "rmsnorm fp32", before);
}

static void test_glu(uint32_t dt) {
  static const uint32_t shape[][2] = {{1, 1},     {1, 14336},  {3, 7},
                                      {65, 1000}, {130, 4097}, {300, 2048}};
  const int before = g_failed;
  /* fp32: exp 2 ulp, quotient and products; 1 + x(1 - sig) cancels near x = -1.28: of the
   * largest. bf16: exp within 1e-5 */
  const tolerance tol = dt == PS_BF16 ? (tolerance){1, 2e-5, 2e-6} : (tolerance){0, 1e-6, 2e-7};
  for (size_t s = 0; s < sizeof shape / sizeof *shape; s++) {
    const uint32_t t = shape[s][0], f = shape[s][1];
    const ps__args_glu a = {t, f, dt, s % 2 ? PS_GLU_GELU_TANH : PS_GLU_SILU};
    const size_t n = (size_t)t * f;
    char name[96];
    snprintf(name, sizeof name, "glu dt%u %ux%u", dt, t, f);
    CHECK(glu_fwd, glu_fwd, &a, in(dt, 2 * n, 4), random_buf('w', dt, n, 1, tol));
    CHECK(glu_bwd, glu_bwd, &a, random_buf('u', dt, n, 1, tol), random_buf('u', dt, 2 * n, 4, tol));
  }
  done(dt ? "glu bf16" : "glu fp32", before);
}

static void test_qkv(uint32_t dt) {
  static const uint32_t shape[][4] = {{1, 1, 1, 2},      {5, 4, 2, 16},  {33, 8, 2, 64},
                                      {130, 32, 8, 128}, {9, 3, 1, 80},  {7, 5, 5, 6},
                                      {40, 4, 1, 256},   {3, 2, 1, 512}, {2100, 2, 1, 32},
                                      {70, 64, 8, 128},  {9, 11, 4, 320}};
  const int before = g_failed;
  for (size_t s = 0; s < sizeof shape / sizeof *shape; s++)
    for (uint32_t flags = 0; flags < 6; flags++) {
      const uint32_t t = shape[s][0], hq = shape[s][1], hk = shape[s][2], d = shape[s][3],
                     norm = flags % 3;
      ps__args_qkv a = {.n_tokens = t,
                        .n_heads = hq,
                        .n_kv_heads = hk,
                        .head_dim = d,
                        .dt = dt,
                        .qk_norm = norm,
                        .accumulate_dw = flags / 3,
                        .eps = 1e-6f,
                        .norm_offset = s % 4 ? 0.0f : 1.0f};
      const size_t of_q = ps__q_norm_elements(&a), of_k = ps__k_norm_elements(&a);
      const bool row = norm == PS_QK_NORM_ROW;
      /* by turns all of a head, half of it, and nothing */
      const uint32_t part = s % 4 == 3 ? 0 : s % 4 == 2 ? d / 4 * 2 : d;
      const ps__rope rope = {.kind = (uint32_t)(s % 3),
                             .rotary_dim = part < 2 * PS_ROPE_PAIRS ? part : 2 * PS_ROPE_PAIRS,
                             .original_positions = 8192,
                             .theta = 5e5,
                             .factor = 8,
                             .low_freq_factor = 1,
                             .high_freq_factor = 4};
      g_failed += ps__rope_table(&a, &rope, 1) != PS_OK;
      if (s % 2)
        a.attention_factor = 1.25f;
      const size_t A = (size_t)hq * d * t, K = (size_t)hk * d * t;
      /* cos and sin within an ulp on either side: of the pair. With norm 3e-6 as rmsnorm; bf16
       * then rounds before the rotation too: an ulp, 2^-7, of the partner at worst */
      const tolerance out = dt == PS_BF16 ? (tolerance){1, 0, norm ? 0x1p-7 : 1e-6}
                                          : (tolerance){0, 0, norm ? 4e-6 : 5e-7};
      const tolerance back = dt == PS_BF16 ? (tolerance){1, 0, norm ? 1e-5 : 1e-6}
                                           : (tolerance){0, 0, norm ? 1e-5 : 5e-7};
      char name[96];
      snprintf(name, sizeof name, "qkv dt%u T%u heads %u/%u d%u flags %u", dt, t, hq, hk, d, flags);
      buffer f[] = {in(dt, A + 2 * K, 1),
                    ints(t, 0, 1048576, false),
                    random_buf('w', dt, A, 1, out),
                    random_buf('w', dt, 2 * K, 1, out),
                    in(dt, of_q, 1),
                    in(dt, of_k, 1)};
      check(name, &ps__k_qkv_split_fwd, ps__cuda_qkv_split_fwd, &a, f, norm ? 6 : 4);
      const char m = a.accumulate_dw ? 'u' : 'w';
      buffer g[] = {in(dt, A, 1),
                    in(PS_F32, 2 * K, 1),
                    ints(t, 0, 1048576, false),
                    random_buf('w', dt, A + 2 * K, 1, back),
                    in(dt, A + 2 * K, 1),
                    in(dt, of_q, 1),
                    in(dt, of_k, 1),
                    random_buf(m, dt, of_q, 1, row_sums(dt, (double)t * (row ? 1 : hq))),
                    random_buf(m, dt, of_k, 1, row_sums(dt, (double)t * (row ? 1 : hk)))};
      check(name, &ps__k_qkv_split_bwd, ps__cuda_qkv_split_bwd, &a, g, norm ? 9 : 4);
    }
  done(dt ? "qkv bf16" : "qkv fp32", before);
}

static void test_embedding(uint32_t dt) {
  static const uint32_t shape[][3] = {{1, 1, 1},         {7, 5, 33},       {1000, 300, 64},
                                      {513, 2048, 4096}, {3000, 1500, 40}, {2, 70000, 8},
                                      {2500, 1, 24}};
  const int before = g_failed;
  for (size_t s = 0; s < sizeof shape / sizeof *shape; s++)
    for (uint32_t acc = 0; acc < 2; acc++) {
      const uint32_t t = shape[s][0], v = shape[s][1], d = shape[s][2];
      const ps__args_embed a = {t, v, d, dt, acc};
      char name[96];
      snprintf(name, sizeof name, "embed dt%u T%u V%u D%u acc %u", dt, t, v, d, acc);
      CHECK(embed_fwd, embed_fwd, &a, ints(t, 0, v, true), in(dt, (size_t)v * d, 1),
            random_buf('w', dt, (size_t)t * d, 1, exact));
      CHECK(embed_bwd, embed_bwd, &a, ints(t, 0, v, true), in(dt, (size_t)t * d, 1),
            random_buf(acc ? 'u' : 'w', dt, (size_t)v * d, 1, exact));
    }
  done(dt ? "embedding bf16, the cpu's bits" : "embedding fp32, the cpu's bits", before);
}

static void test_cross_entropy(uint32_t dt) {
  static const uint32_t shape[][2] = {{1, 1},     {3, 7},      {17, 1000},
                                      {5, 32003}, {9, 128256}, {300, 512}};
  const int before = g_failed;
  /* bf16 exponents: 3e-6 at terms that matter, 2e-5 at 60 below the largest, nothing below
   * 1e-38; fp32: 1e-6 an exponent, sums of up to 128 terms a thread, and what cancels at the
   * target */
  const tolerance grad = dt == PS_BF16 ? (tolerance){1, 2e-5, 1e-7} : (tolerance){0, 1e-5, 1e-6},
                  loss = {0, 5e-6, 2e-6};
  for (size_t s = 0; s < sizeof shape / sizeof *shape; s++) {
    const uint32_t r = shape[s][0], v = shape[s][1];
    const ps__args_cross_entropy a = {r, v, dt};
    char name[96];
    snprintf(name, sizeof name, "cross_entropy dt%u %ux%u", dt, r, v);
    buffer scale = in(PS_F32, 1, 1);
    *(float *)scale.init = 1.0f / 1024;
    buffer z = random_buf('u', dt, (size_t)r * v, 6, grad), t = ints(r, r > 2 ? -1 : 0, v, false);
    /* most of every other vector, and whole stretches, masked; the target not */
    for (size_t i = 0; s % 2 && i < (size_t)r * v; i++) {
      const bool masked = i / 8 % 2 || i % v < v / 3,
                 own = (int64_t)(i % v) == ((int32_t *)t.init)[i / v];
      if (masked && !own && dt == PS_BF16)
        ((uint16_t *)z.init)[i] = 0xff80;
      if (masked && !own && dt == PS_F32)
        ((uint32_t *)z.init)[i] = 0xff800000u;
    }
    CHECK(cross_entropy, cross_entropy, &a, z, t, scale, random_buf('w', PS_F32, r, 1, loss));
  }
  done(dt ? "cross_entropy bf16" : "cross_entropy fp32", before);
}

static void test_reduce(uint32_t dt) {
  static const uint64_t length[] = {
      1, 7, 1023, 1025, 65536, 65537, 200003, (1 << 24) + 4099, (1 << 25) + 77};
  static const uint32_t shape[][3] = {{1, 1, 1},         {3, 17, 20},      {64, 104, 104},
                                      {65, 33, 48},      {1000, 515, 515}, {5000, 40, 64},
                                      {8192, 1024, 1536}};
  int before = g_failed;
  char name[96];
  for (size_t s = 0; s < sizeof length / sizeof *length; s++) {
    const uint64_t n = length[s];
    if (g_short && n > 300000)
      continue;
    const ps__args_sumsq q = {.n = n, .dt = dt};
    const ps__args_accumulate c = {.n = n, .dt = dt};
    const ps__args_fill z = {n};
    snprintf(name, sizeof name, "sumsq, accumulate, fill_zero dt%u n %llu", dt,
             (unsigned long long)n);
    CHECK(sumsq, sumsq, &q, in(dt, n, 3), ((buffer){'w', F64, 1, malloc(8), exact}));
    CHECK(sumsq, sumsq, &q, special(dt, n, s), ((buffer){'w', F64, 1, malloc(8), exact}));
    CHECK(accumulate, accumulate, &c, in(dt, n, 1), random_buf('u', dt, n, 3, exact));
    for (uint32_t low = PS_LOW_READ; dt == PS_BF16 && low <= PS_DITHER; low++) {
      const ps__args_accumulate k = {
          .n = n, .first = 1000003 * s, .dt = dt, .mode = low, .index = 5 + low};
      buffer bytes = random_buf(low & PS_LOW_WRITE ? 'u' : 'r', PS_F32, (n + 3) / 4, 1, exact);
      for (uint64_t i = 0; i < (n + 3) / 4 * 4; i++)
        ((uint8_t *)bytes.init)[i] = (uint8_t)(i * 2654435761u >> 13);
      CHECK(accumulate, accumulate, &k, in(dt, n, 1), random_buf('u', dt, n, 3, exact), bytes);
    }
    if (n < 300000)
      CHECK(fill_zero, fill_zero, &z, random_buf('u', PS_F32, (n + 3) / 4, 1, exact));
  }
  done(dt ? "sumsq, accumulate bf16, the cpu's bits" : "sumsq, accumulate fp32, the cpu's bits",
       before);
  before = g_failed;
  for (size_t s = 0; s < sizeof shape / sizeof *shape; s++)
    for (uint32_t acc = 0; acc < 2; acc++) {
      const ps__args_colsum a = {shape[s][0], shape[s][1], shape[s][2], dt, acc};
      snprintf(name, sizeof name, "colsum dt%u %ux%u ld %u acc %u", dt, a.rows, a.cols, a.ld, acc);
      CHECK(colsum, colsum, &a, in(dt, (size_t)a.rows * a.ld, 1),
            random_buf(acc ? 'u' : 'w', dt, a.cols, 1, row_sums(dt, a.rows)));
    }
  done(dt ? "colsum bf16" : "colsum fp32", before);
}

static void test_gemm(uint32_t dt) {
  static const uint32_t shape[][3] = {{1, 1, 1},       {8, 16, 32},   {17, 33, 5},
                                      {128, 256, 64},  {1, 512, 128}, {200, 72, 300},
                                      {256, 128, 1024}};
  const int before = g_failed;
  for (size_t s = 0; s < sizeof shape / sizeof *shape; s++)
    for (uint32_t t = 0; t < 4; t++)
      for (uint32_t f = 0; f < 6; f++) {
        const uint32_t m = shape[s][0], n = shape[s][1], k = shape[s][2], pad = s % 2 ? 8 : 0,
                       dt_c = f == 5 ? PS_F32 : dt;
        ps__args_gemm a = {.m = m,
                           .n = n,
                           .k = k,
                           .trans_a = t & 1,
                           .trans_b = t >> 1,
                           .accumulate = f == 1,
                           .has_bias = f == 2 || f == 4,
                           .has_residual = f == 3 || f == 4,
                           .dt_a = dt,
                           .dt_b = dt,
                           .dt_c = dt_c};
        a.lda = (a.trans_a ? m : k) + pad, a.ldb = (a.trans_b ? k : n) + pad, a.ldc = n + pad;
        /* partial sums of K products near their result's size, in fp32, truncated by tensor
         * cores at worst; bf16 then an ulp; and with an addend cuBLASLt's kernels may round the
         * product to bf16 first (matmul.cu): half an ulp of a product, which is at most twice
         * the largest output here, addends being in [-1, 1] */
        const bool twice = dt_c == PS_BF16 && (a.accumulate || a.has_bias || a.has_residual);
        const tolerance tol = {dt_c == PS_BF16, 1e-6, 1e-6 + 1e-6 * sqrt(k) + (twice ? 0x1p-8 : 0)};
        char name[96];
        snprintf(name, sizeof name, "gemm dt%u->%u %ux%ux%u trans %u form %u", dt, dt_c, m, n, k, t,
                 f);
        /* C is updated where its rows have a margin, which must stay as it is: one row of poison
         * would not compare */
        buffer b[5] = {
            in(dt, (size_t)a.lda * (a.trans_a ? k : m), 1),
            in(dt, (size_t)a.ldb * (a.trans_b ? n : k), 1),
            random_buf(a.accumulate || pad ? 'u' : 'w', dt_c, (size_t)a.ldc * m, 1, tol)};
        uint32_t nb = 3;
        if (a.has_bias)
          b[nb++] = in(dt_c, n, 1);
        if (a.has_residual)
          b[nb++] = in(dt_c, (size_t)a.ldc * m, 1);
        check(name, &ps__k_gemm, ps__cuda_gemm, &a, b, nb);
      }
  done(dt ? "gemm bf16" : "gemm fp32", before);
}

/* A process that finds the algorithm in the cache times nothing and gets the bits of the one
 * that timed it. */
static void test_gemm_cache(void *workspace, size_t workspace_bytes) {
  enum { M = 512, N = 384, K = 640 };
  const ps__args_gemm a = {.m = M,
                           .n = N,
                           .k = K,
                           .lda = K,
                           .ldb = K,
                           .ldc = N,
                           .trans_b = 1,
                           .dt_a = PS_BF16,
                           .dt_b = PS_BF16,
                           .dt_c = PS_BF16};
  static uint16_t out[2][M * N];
  char folder[] = "/tmp/penstock-test-cuda-XXXXXX", command[64];
  void *ptr[3] = {g_arena, g_arena + (1 << 20), g_arena + (2 << 20)};
  const ps_launch l = {.args = &a, .ptr = ptr, .n_ptr = 3, .exec = &g_exec};
  ps__cuda_blas *const before = g_exec.blas;
  buffer x = in(PS_BF16, M * K, 1), y = in(PS_BF16, N * K, 1);
  need(cudaMemcpy(ptr[0], x.init, 2 * M * K, cudaMemcpyHostToDevice), "a");
  need(cudaMemcpy(ptr[1], y.init, 2 * N * K, cudaMemcpyHostToDevice), "b");
  need(cudaDeviceSynchronize(), "inputs");
  bool ok = mkdtemp(folder) != NULL;
  for (int turn = 0; turn < 2 && ok; turn++) {
    ok = ps__cuda_blas_create(&g_exec.blas, workspace, workspace_bytes) == PS_OK &&
         ps__cuda_blas_use_cache(g_exec.blas, folder) == PS_OK && ps__cuda_gemm_tuned(&l) == turn &&
         ps__cuda_tune_gemm(&l) == PS_OK && ps__cuda_gemm_tuned(&l) && ps__cuda_gemm(&l) == PS_OK;
    need(cudaDeviceSynchronize(), "gemm");
    need(cudaMemcpy(out[turn], ptr[2], sizeof out[0], cudaMemcpyDeviceToHost), "c");
    ps__cuda_blas_save_cache(g_exec.blas);
    ps__cuda_blas_destroy(g_exec.blas);
  }
  g_exec.blas = before;
  ok = ok && memcmp(out[0], out[1], sizeof out[0]) == 0;
  snprintf(command, sizeof command, "rm -r %s", folder);
  ok = system(command) == 0 && ok;
  printf(ok ? "ok the next process takes the chosen algorithms from the cache\n"
            : "FAIL gemm cache: %s\n",
         ps_last_error());
  ok ? g_passed++ : g_failed++;
  free(x.init), free(y.init);
}

/* Out of range: NaN rows and losses, nothing written elsewhere (cuda_ops.h). */
static void test_out_of_range(void) {
  const int32_t id[4] = {1, -5, 3, 99};
  void *ptr[3] = {g_arena, g_arena + 4096, g_arena + 8192};
  float out[16];
  const ps__args_embed a = {4, 4, 4, PS_F32, 0};
  need(cudaMemset(g_arena, 0, 16384), "clear");
  need(cudaMemcpy(ptr[0], id, sizeof id, cudaMemcpyHostToDevice), "ids");
  const ps_launch l = {.args = &a, .ptr = ptr, .n_ptr = 3, .exec = &g_exec};
  need(cudaDeviceSynchronize(), "inputs");
  const ps_status st = ps__cuda_embed_fwd(&l);
  need(cudaDeviceSynchronize(), "embed_fwd");
  need(cudaMemcpy(out, ptr[2], sizeof out, cudaMemcpyDeviceToHost), "out");
  const bool ok = st == PS_OK && out[0] == 0 && isnan(out[4]) && out[8] == 0 && isnan(out[15]);
  printf(ok ? "ok ids out of range\n" : "FAIL ids out of range\n");
  ok ? g_passed++ : g_failed++;
}

/* ---- speed ----------------------------------------------------------------------------------- */

static double g_copy;
static cudaEvent_t g_from, g_to;
static char *at_mib(size_t mib) { return g_arena + (mib << 20); }

static double ms_of(ps_op_fn fn, const ps_launch *l) {
  float ms = 0;
  enum { REPEAT = 20 };
  for (int i = 0; i < REPEAT + 3; i++) {
    if (i == 3)
      need(cudaEventRecord(g_from, g_exec.stream), "event");
    if (fn(l) != PS_OK) {
      printf("FAIL timing: %s\n", ps_last_error());
      g_failed++;
      return 1;
    }
  }
  need(cudaEventRecord(g_to, g_exec.stream), "event");
  need(cudaEventSynchronize(g_to), "timing");
  need(cudaEventElapsedTime(&ms, g_from, g_to), "timing");
  return ms / REPEAT;
}
/* ptr: MiB into the arena. */
static void speed(const char *name, ps_op_fn fn, const void *args, uint32_t n, const size_t *mib,
                  double bytes, double flops) {
  void *ptr[MAX_BUF];
  if (g_part && !strstr(name, g_part))
    return;
  for (uint32_t i = 0; i < n; i++)
    ptr[i] = at_mib(mib[i]);
  const ps_launch l = {.args = args, .ptr = ptr, .n_ptr = n, .exec = &g_exec};
  const double ms = ms_of(fn, &l);
  if (flops > 0)
    printf("%-34s %8.1f us %7.1f TFLOP/s\n", name, ms * 1e3, flops / ms * 1e-9);
  else
    printf("%-34s %8.1f us %7.0f GB/s  %3.0f%% of copy\n", name, ms * 1e3, bytes / ms * 1e-6,
           100 * bytes / ms * 1e-6 / g_copy);
}
#  define AT(...)                                                                                  \
    (sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t)), (size_t[]) { __VA_ARGS__ }

static void fill_arena(void) { /* bf16 N(0, 1) all over; ids and positions at the first MiB's */
  const size_t chunk = 64u << 20;
  buffer b = random_buf('r', PS_BF16, chunk / 2, 1, exact);
  need(cudaMemcpy(g_arena, b.init, chunk, cudaMemcpyHostToDevice), "fill");
  for (size_t at = chunk; at + chunk <= g_arena_bytes; at += chunk)
    need(cudaMemcpy(g_arena + at, g_arena, chunk, cudaMemcpyDeviceToDevice), "fill");
  free(b.init);
  buffer id = ints(8192, 0, 128256, true), pos = ints(8192, 0, 8192, false);
  const float scale = 1.0f / 8192;
  need(cudaMemcpy(at_mib(0), id.init, 32768, cudaMemcpyHostToDevice), "ids");
  need(cudaMemcpy(at_mib(1), pos.init, 32768, cudaMemcpyHostToDevice), "positions");
  need(cudaMemcpy(at_mib(2), &scale, 4, cudaMemcpyHostToDevice), "scale");
  free(id.init), free(pos.init);
  need(cudaDeviceSynchronize(), "fill");
}

static void speeds_gemm(const char *name, ps__args_gemm a) {
  void *ptr[] = {at_mib(64), at_mib(1024), at_mib(2048)};
  char line[64];
  if (g_part && !strstr(name, g_part))
    return;
  a.dt_a = a.dt_b = a.dt_c = PS_BF16;
  const double flops = 2.0 * a.m * a.n * a.k;
  snprintf(line, sizeof line, "%s first candidate", name);
  speed(line, ps__cuda_gemm, &a, AT(64, 1024, 2048), 0, flops);
  if (ps__cuda_tune_gemm(&(ps_launch){.args = &a, .ptr = ptr, .n_ptr = 3, .exec = &g_exec}) !=
      PS_OK)
    printf("FAIL tune: %s\n", ps_last_error()), g_failed++;
  snprintf(line, sizeof line, "%s tuned", name);
  speed(line, ps__cuda_gemm, &a, AT(64, 1024, 2048), 0, flops);
}

static void speeds(void) {
  enum { T = 8192, D = 4096, F = 14336, V = 128256, LAYER = 218112000 };
  const double x = 2.0 * T * D;
  need(cudaEventCreate(&g_from), "event");
  need(cudaEventCreate(&g_to), "event");
  fill_arena();
  float ms;
  for (int i = 0; i < 13; i++) {
    if (i == 3)
      need(cudaEventRecord(g_from, g_exec.stream), "event");
    need(cudaMemcpyAsync(at_mib(1088), at_mib(64), 1u << 30, cudaMemcpyDeviceToDevice,
                         g_exec.stream),
         "copy");
  }
  need(cudaEventRecord(g_to, g_exec.stream), "event");
  need(cudaEventSynchronize(g_to), "copy");
  need(cudaEventElapsedTime(&ms, g_from, g_to), "copy");
  g_copy = 2.0 * (1u << 30) * 10 / ms * 1e-6;
  printf("%-34s %8.1f us %7.0f GB/s (read + write)\n", "copy of 1 GiB, device to device", ms * 100,
         g_copy);
  g_exec.scratch = at_mib(16);
  g_exec.scratch_bytes = 32u << 20;
  speed("fill_zero 436 MB", ps__cuda_fill_zero, &(ps__args_fill){2ull * LAYER}, AT(64), 2.0 * LAYER,
        0);
  fill_arena();
  speed("rmsnorm_fwd", ps__cuda_rmsnorm_fwd, &(ps__args_rmsnorm){T, D, PS_BF16, 0, 0, 1e-5f},
        AT(64, 1024, 256), 2 * x, 0);
  speed("rmsnorm_bwd", ps__cuda_rmsnorm_bwd, &(ps__args_rmsnorm){T, D, PS_BF16, 0, 0, 1e-5f},
        AT(64, 1024, 256, 512, 1040), 3 * x, 0);
  speed("rmsnorm_bwd add_dx", ps__cuda_rmsnorm_bwd, &(ps__args_rmsnorm){T, D, PS_BF16, 1, 1, 1e-5f},
        AT(64, 1024, 256, 512, 1040), 4 * x, 0);
  speed("glu_fwd", ps__cuda_glu_fwd, &(ps__args_glu){T, F, PS_BF16}, AT(64, 1024), 6.0 * T * F, 0);
  speed("glu_bwd", ps__cuda_glu_bwd, &(ps__args_glu){T, F, PS_BF16}, AT(1024, 64), 12.0 * T * F, 0);
  ps__args_qkv q = {
      .n_tokens = T, .n_heads = 32, .n_kv_heads = 8, .head_dim = 128, .dt = PS_BF16, .eps = 1e-6f};
  g_failed += ps__rope_table(&q, &(ps__rope){.rotary_dim = 128, .theta = 5e5}, 1) != PS_OK;
  const double A = T * 4096.0, K = T * 1024.0;
  speed("qkv_split_fwd", ps__cuda_qkv_split_fwd, &q, AT(64, 1, 512, 768), 4 * (A + 2 * K), 0);
  speed("qkv_split_bwd", ps__cuda_qkv_split_bwd, &q, AT(64, 256, 1, 512), 4 * A + 12 * K, 0);
  q.qk_norm = 1;
  speed("qkv_split_fwd, norm", ps__cuda_qkv_split_fwd, &q, AT(64, 1, 512, 768, 1024, 1025),
        4 * (A + 2 * K), 0);
  speed("qkv_split_bwd, norm", ps__cuda_qkv_split_bwd, &q,
        AT(64, 256, 1, 512, 768, 1024, 1025, 1030, 1031), 6 * A + 14 * K, 0);
  speed("embed_fwd", ps__cuda_embed_fwd, &(ps__args_embed){T, V, D, PS_BF16, 0}, AT(0, 1024, 64),
        2 * x, 0);
  speed("embed_bwd, all rows", ps__cuda_embed_bwd, &(ps__args_embed){T, V, D, PS_BF16, 0},
        AT(0, 64, 1024), x + 2.0 * V * D, 0);
  speed("embed_bwd, accumulate", ps__cuda_embed_bwd, &(ps__args_embed){T, V, D, PS_BF16, 1},
        AT(0, 64, 1024), 3 * x, 0);
  speed("accumulate, a layer", ps__cuda_accumulate,
        &(ps__args_accumulate){.n = LAYER, .dt = PS_BF16}, AT(64, 1024), 6.0 * LAYER, 0);
  speed("accumulate, low bytes", ps__cuda_accumulate,
        &(ps__args_accumulate){.n = LAYER, .dt = PS_BF16, .mode = PS_LOW_READ | PS_LOW_WRITE},
        AT(64, 1024, 2048), 8.0 * LAYER, 0);
  speed("sumsq, a layer", ps__cuda_sumsq, &(ps__args_sumsq){.n = LAYER, .dt = PS_BF16}, AT(64, 8),
        2.0 * LAYER, 0);
  speed("colsum 8192x6144", ps__cuda_colsum, &(ps__args_colsum){T, 6144, 6144, PS_BF16, 1},
        AT(64, 8), 2.0 * T * 6144, 0);
  fill_arena();
  /* from 64 to 256 rows what a run leaves in L2 helps the next, as a product does */
  for (uint32_t rows = 64; rows <= 2048; rows *= rows < 512 ? 2 : 4) {
    char name[64];
    snprintf(name, sizeof name, "cross_entropy %ux128256", rows);
    speed(name, ps__cuda_cross_entropy, &(ps__args_cross_entropy){rows, V, PS_BF16},
          AT(1024, 0, 2, 8), 4.0 * rows * V, 0);
  }
  fill_arena();
  speeds_gemm(
      "qkv fwd",
      (ps__args_gemm){.m = T, .n = 6144, .k = D, .lda = D, .ldb = D, .ldc = 6144, .trans_b = 1});
  speeds_gemm(
      "gate/up fwd",
      (ps__args_gemm){.m = T, .n = 2 * F, .k = D, .lda = D, .ldb = D, .ldc = 2 * F, .trans_b = 1});
  speeds_gemm("down dgrad", (ps__args_gemm){.m = T, .n = F, .k = D, .lda = D, .ldb = F, .ldc = F});
  speeds_gemm("gate/up wgrad", (ps__args_gemm){.m = 2 * F,
                                               .n = D,
                                               .k = T,
                                               .lda = 2 * F,
                                               .ldb = D,
                                               .ldc = D,
                                               .trans_a = 1,
                                               .accumulate = 1});
}

static void run_cases(void *workspace) {
  for (uint32_t dt = 0; dt < 2; dt++) {
    test_reduce(dt);
    test_rmsnorm(dt);
    test_glu(dt);
    test_qkv(dt);
    test_embedding(dt);
    test_cross_entropy(dt);
    if (!g_short)
      test_gemm(dt);
  }
  test_out_of_range();
  if (!g_short)
    test_gemm_cache(workspace, 32u << 20);
}

int main(int argc, char **argv) {
  int n = 0;
  const cudaError_t e = cudaGetDeviceCount(&n);
  if (e != cudaSuccess || n == 0) {
    printf("ok skipped: no CUDA device: %s\n",
           e != cudaSuccess ? cudaGetErrorString(e) : "none found");
    return 0;
  }
  const bool timed = argc > 1 && (strcmp(argv[1], "time") == 0 || strcmp(argv[1], "speed") == 0);
  g_part = argc > 3 ? argv[3] : NULL;
  g_short = argc > 1 && strcmp(argv[1], "short") == 0;
  const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL);
  g_seed = seed * 0x9e3779b97f4a7c15u | 1;
  printf("seed %llu\n", (unsigned long long)seed);
  g_arena_bytes = (size_t)4 << 30;
  void *workspace;
  cudaStream_t stream;
  need(cudaMalloc((void **)&g_arena, g_arena_bytes), "4 GiB of device memory");
  need(cudaMalloc(&workspace, 32u << 20), "workspace");
  need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  g_exec = (ps__cuda_exec){.stream = stream, .n_sms = 0};
  if (ps__cuda_blas_create(&g_exec.blas, workspace, 32u << 20) != PS_OK ||
      ps__pool_create(&g_cpu.pool, WORKERS, "test") != PS_OK) {
    printf("FAIL %s\n", ps_last_error());
    return 1;
  }
  if (!timed || strcmp(argv[1], "speed") != 0)
    run_cases(workspace);
  printf("%s %d cases passed, %d failed\n", g_failed ? "FAIL" : "ok", g_passed, g_failed);
  if (timed)
    speeds();
  ps__cuda_blas_destroy(g_exec.blas);
  ps__pool_destroy(g_cpu.pool);
  return g_failed != 0;
}
#endif
