/* test_cuda_ops.c - every CUDA op of the table of cases (op_cases.h) against the CPU function of
 * the same kernel; then, with "time", its speed at 8B shapes. Usage: test_cuda_ops [short | time |
 * speed [seed [part of a name]]]; short for a sanitizer, speed without the cases, with a part of a
 * name those ops alone.
 *
 * Each case runs the GPU twice from the same inputs, outputs and scratch poisoned, guard bytes
 * around every buffer; the two runs must agree bit for bit, inputs must be as they were, and
 * outputs the CPU's bits or within the tolerance of the case around the CPU's. Exit code 0: all
 * well, or no device (with the reason). */
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
#  include "op_cases.h"
#  include "model/rope.h"
#  include <cuda_runtime_api.h>
#  include <math.h>
#  include <stdlib.h>
#  include <string.h>
#  include <time.h>

enum { GUARD = 256, WORKERS = 2 };

static ps__cuda_exec g_exec;
static ps__cpu_exec g_cpu;
static char *g_arena; /* device memory for the cases, taken from the front by each */
static size_t g_arena_bytes;
static int g_failed, g_passed;
static int g_capability;
static bool g_short;       /* without the largest cases and the products: for a sanitizer */
static const char *g_part; /* in the names of what is tested and timed, NULL: all */

static void need(cudaError_t e, const char *what) {
  if (e == cudaSuccess)
    return;
  printf("FAIL %s: %s\n", what, cudaGetErrorString(e));
  exit(1);
}
/* Elements of the operand that differ by more than its tolerance, 0 where the bits are asked for
 * and are the same. */
static size_t compare(const op_operand *b, bool same_bits, const void *cpu, const void *gpu,
                      char *why, size_t why_bytes) {
  const op_tolerance t = same_bits ? (op_tolerance){0} : b->tolerance;
  double max = 0.0;
  size_t bad = 0;
  if (b->dt == OP_I32)
    return 0;
  for (size_t i = 0; i < b->n; i++)
    max = fmax(max, fabs(op_value(cpu, b->dt, i)));
  for (size_t i = 0; i < b->n; i++) {
    const double c = op_value(cpu, b->dt, i), g = op_value(gpu, b->dt, i);
    if (c == g || (isnan(c) && isnan(g)))
      continue;
    const double limit =
        t.ulps * op_ulp(fmax(fabs(c), fabs(g)), b->dt) + t.rel * fabs(c) + t.of_max * max;
    if (fabs(c - g) <= limit)
      continue;
    if (!bad++)
      snprintf(why, why_bytes, "element %zu: cpu %.9g gpu %.9g, limit %.3g", i, c, g, limit);
  }
  return bad;
}

/* Runs the CUDA op once on fresh copies; out[i] = buffer i as it came back. False (and a line)
 * when a guard or an input changed. */
static bool run_gpu(const char *name, const op_case *c, void **out) {
  const op_operand *b = c->operand;
  const uint32_t n = c->n_operands;
  void *ptr[OP_MAX_OPERANDS];
  char *at = g_arena;
  const size_t scratch = ps__op_scratch(c->kernel, PS_BACKEND_CUDA, c->args, NULL);
  for (uint32_t i = 0; i < n; i++) {
    const size_t bytes = b[i].n * op_dtype_bytes(b[i].dt),
                 room = ps__round_up(bytes, 256) + 2 * GUARD;
    need(cudaMemset(at, 0x5a, room), "guards");
    ptr[i] = at + GUARD;
    if (b[i].mode == PS_WRITE)
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
  const ps_launch l = {.args = c->args, .ptr = ptr, .n_ptr = n, .exec = &g_exec};
  if (c->kernel->fn[PS_BACKEND_CUDA](&l) != PS_OK) {
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
    const size_t bytes = b[i].n * op_dtype_bytes(b[i].dt),
                 room = ps__round_up(bytes, 256) + 2 * GUARD;
    unsigned char *all = malloc(room);
    need(cudaMemcpy(all, (char *)ptr[i] - GUARD, room, cudaMemcpyDeviceToHost), "result");
    for (size_t j = 0; j < room && ok; j++)
      if ((j < GUARD || j >= GUARD + bytes) && all[j] != 0x5a)
        ok = false, printf("FAIL %s: wrote outside of buffer %u\n", name, i);
    if (b[i].mode == PS_READ && memcmp(all + GUARD, b[i].init, bytes) != 0)
      ok = false, printf("FAIL %s: changed input %u\n", name, i);
    out[i] = malloc(bytes + 1);
    memcpy(out[i], all + GUARD, bytes);
    free(all);
  }
  return ok;
}

static bool wanted_bits(const op_case *c) {
  for (uint32_t i = 0; i < n_op_table; i++)
    if (op_table[i].kernel == c->kernel)
      return op_table[i].same_bits;
  return false;
}

static void check(void *user, const op_case *c) {
  const op_operand *b = c->operand;
  const uint32_t n = c->n_operands;
  const bool same_bits = wanted_bits(c);
  void *cpu[OP_MAX_OPERANDS], *first[OP_MAX_OPERANDS] = {0}, *second[OP_MAX_OPERANDS] = {0};
  char why[200] = "", name[160];
  snprintf(name, sizeof name, "%s %s %s", c->kernel->name, (const char *)user, c->name);
  bool ok = run_gpu(name, c, first) && run_gpu(name, c, second);
  for (uint32_t i = 0; i < n; i++) {
    const size_t bytes = b[i].n * op_dtype_bytes(b[i].dt);
    cpu[i] = aligned_alloc(64, ps__round_up(bytes + 1, 64));
    if (b[i].mode == PS_WRITE)
      memset(cpu[i], 0xab, bytes);
    else
      memcpy(cpu[i], b[i].init, bytes);
  }
  g_cpu.scratch_bytes = ps__round_up(ps__op_scratch(c->kernel, PS_BACKEND_CPU, c->args, NULL), 64);
  g_cpu.scratch = aligned_alloc(64, g_cpu.scratch_bytes * WORKERS + 64);
  const ps_launch l = {.args = c->args, .ptr = cpu, .n_ptr = n, .exec = &g_cpu};
  if (ok && c->kernel->fn[PS_BACKEND_CPU](&l) != PS_OK)
    ok = false, printf("FAIL %s: cpu: %s\n", name, ps_last_error());
  for (uint32_t i = 0; ok && i < n; i++) {
    if (b[i].mode == PS_READ)
      continue;
    if (memcmp(first[i], second[i], b[i].n * op_dtype_bytes(b[i].dt)) != 0)
      ok = false, printf("FAIL %s: output %u differs between two runs\n", name, i);
    const size_t bad = ok ? compare(&b[i], same_bits, cpu[i], first[i], why, sizeof why) : 0;
    if (bad)
      ok = false, printf("FAIL %s: output %u: %zu of %llu wrong; %s\n", name, i, bad,
                         (unsigned long long)b[i].n, why);
  }
  free(g_cpu.scratch);
  for (uint32_t i = 0; i < n; i++)
    free(cpu[i]), free(first[i]), free(second[i]);
  ok ? g_passed++ : g_failed++;
}

static void test_table(uint64_t seed) {
  for (uint32_t dt = PS_F32; dt < PS_N_DTYPES; dt++)
    for (uint32_t i = 0; i < n_op_table; i++) {
      const int before = g_failed;
      const ps_kernel *k = op_table[i].kernel;
      /* products need the tools that a sanitizer leaves out; those of FP8 a GPU of 8.9 or later */
      if (!k->fn[PS_BACKEND_CUDA] || (g_part && !strstr(k->name, g_part)) ||
          (g_short && (k == &ps__k_gemm || k == &ps__k_gemm_fp8)) ||
          (k == &ps__k_gemm_fp8 && g_capability < 89))
        continue;
      op_cases(i, dt, g_short ? OP_SMALL : OP_ALL, seed, check, (void *)ps__dtypes[dt].name);
      if (g_failed == before)
        printf("ok %s %s\n", k->name, ps__dtypes[dt].name);
    }
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
  static uint16_t x[M * K], y[N * K];
  for (int i = 0; i < M * K; i++)
    x[i] = ps__f32_to_bf16(op_normal());
  for (int i = 0; i < N * K; i++)
    y[i] = ps__f32_to_bf16(op_normal());
  need(cudaMemcpy(ptr[0], x, sizeof x, cudaMemcpyHostToDevice), "a");
  need(cudaMemcpy(ptr[1], y, sizeof y, cudaMemcpyHostToDevice), "b");
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
}

/* Out of range: NaN rows and losses, nothing written elsewhere (cuda_ops.h). */
static void test_out_of_range(void) {
  const int32_t id[4] = {1, -5, 3, 99};
  void *ptr[3] = {g_arena, g_arena + 4096, g_arena + 8192};
  float out[16];
  const ps__args_embed a = {4, 4, 4, PS_F32, 0, 0, -1};
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
  void *ptr[OP_MAX_OPERANDS];
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
  uint16_t *values = malloc(chunk);
  for (size_t i = 0; i < chunk / 2; i++)
    values[i] = ps__f32_to_bf16(op_normal());
  need(cudaMemcpy(g_arena, values, chunk, cudaMemcpyHostToDevice), "fill");
  for (size_t at = chunk; at + chunk <= g_arena_bytes; at += chunk)
    need(cudaMemcpy(g_arena + at, g_arena, chunk, cudaMemcpyDeviceToDevice), "fill");
  free(values);
  static int32_t id[8192], pos[8192]; /* ids skewed as words are */
  for (int i = 0; i < 8192; i++)
    id[i] = (int32_t)(128255 * pow(i / 8192.0, 3)), pos[i] = i * 2053 % 8192;
  const float scale = 1.0f / 8192;
  need(cudaMemcpy(at_mib(0), id, sizeof id, cudaMemcpyHostToDevice), "ids");
  need(cudaMemcpy(at_mib(1), pos, sizeof pos, cudaMemcpyHostToDevice), "positions");
  need(cudaMemcpy(at_mib(2), &scale, 4, cudaMemcpyHostToDevice), "scale");
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

/* The ops that quantize, on bf16 values; and products of FP8 operands. */
static void speeds_fp8(void) {
  enum { T = 8192, D = 4096, F = 14336 };
  const double x = (double)T * D, s = (double)T * F;
  ps__args_quantize a = {
      .rows = T, .cols = D, .dt = PS_BF16, .dt_q = PS__E4M3, .forms = PS_FORM_ROWS};
  speed("quantize, rows", ps__cuda_quantize, &a, AT(64, 8, 256), 5 * x, 0);
  a.forms = PS_FORM_COLS;
  speed("quantize, columns", ps__cuda_quantize, &a, AT(64, 8, 256), 5 * x, 0);
  a.forms = PS_FORM_ROWS | PS_FORM_COLS;
  speed("quantize, both", ps__cuda_quantize, &a, AT(64, 8, 256, 512), 6 * x, 0);
  a.given = 1;
  speed("quantize, both, scale given", ps__cuda_quantize, &a, AT(64, 8, 256, 512), 4 * x, 0);
  const ps__args_fp8_scale scale = {.rows = T, .cols = D, .dt = PS_BF16, .dt_q = PS__E4M3};
  speed("fp8_scale", ps__cuda_fp8_scale, &scale, AT(64, 8), 2 * x, 0);
  ps__args_rmsnorm_quantize norm = {.norm = {.rows = T, .cols = D, .dt = PS_BF16, .eps = 1e-5f},
                                    .dt_q = PS__E4M3,
                                    .forms = PS_FORM_ROWS};
  speed("rmsnorm_quantize, rows", ps__cuda_rmsnorm_quantize, &norm, AT(64, 1024, 8, 256), 5 * x, 0);
  norm.forms = PS_FORM_COLS;
  speed("rmsnorm_quantize, columns", ps__cuda_rmsnorm_quantize, &norm, AT(64, 1024, 8, 256), 5 * x,
        0);
  const ps__args_glu_quantize glu = {.n_tokens = T,
                                     .ffn_dim = F,
                                     .dt = PS_BF16,
                                     .activation = PS_ACTIVATION_SILU,
                                     .dt_q = PS__E4M3,
                                     .forms = PS_FORM_ROWS};
  speed("glu_quantize, rows", ps__cuda_glu_quantize, &glu, AT(64, 8, 1024), 9 * s, 0);
  ps__args_glu_quantize back = glu;
  back.dt_q = PS__E5M2;
  speed("glu_bwd_quantize", ps__cuda_glu_bwd_quantize, &back, AT(64, 512, 8, 1280, 1792, 9, 2304),
        17 * s, 0);
  static const uint32_t shape[][3] = {{T, 2 * F, D}, {T, D, 2 * F}, {2 * F, D, T}};
  for (uint32_t i = 0; i < 4 && g_capability >= 89; i++) {
    static const char *const name[] = {"gate/up fwd, FP8", "gate/up dgrad, FP8",
                                       "gate/up wgrad, FP8", "gate/up fwd, FP8, fast sums"};
    const uint32_t role = i % 3;
    const ps__args_gemm_fp8 g = {.m = shape[role][0],
                                 .n = shape[role][1],
                                 .k = shape[role][2],
                                 .role = (uint8_t)role,
                                 .dt_a = role ? PS__E5M2 : PS__E4M3,
                                 .dt_b = PS__E4M3,
                                 .dt_c = PS_BF16,
                                 .fast = i == 3};
    void *ptr[] = {at_mib(64), at_mib(8), at_mib(512), at_mib(9), at_mib(1024)};
    if (g_part && !strstr(name[i], g_part))
      continue;
    if (ps__cuda_tune_gemm_fp8(&(ps_launch){.args = &g, .ptr = ptr, .n_ptr = 5, .exec = &g_exec}) !=
        PS_OK)
      printf("FAIL tune: %s\n", ps_last_error()), g_failed++;
    speed(name[i], ps__cuda_gemm_fp8, &g, AT(64, 8, 512, 9, 1024), 0, 2.0 * g.m * g.n * g.k);
  }
  fill_arena();
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
  speed("rmsnorm_fwd", ps__cuda_rmsnorm_fwd, &(ps__args_rmsnorm){T, D, PS_BF16, 0, 0, 1e-5f, 0, 0},
        AT(64, 1024, 256), 2 * x, 0);
  speed("rmsnorm_bwd", ps__cuda_rmsnorm_bwd, &(ps__args_rmsnorm){T, D, PS_BF16, 0, 0, 1e-5f, 0, 0},
        AT(64, 1024, 256, 512, 1040), 3 * x, 0);
  speed("rmsnorm_bwd add_dx", ps__cuda_rmsnorm_bwd,
        &(ps__args_rmsnorm){T, D, PS_BF16, 1, 1, 1e-5f, 0, 0}, AT(64, 1024, 256, 512, 1040), 4 * x,
        0);
  speed("glu_fwd", ps__cuda_glu_fwd, &(ps__args_glu){T, F, PS_BF16, PS_ACTIVATION_SILU},
        AT(64, 1024), 6.0 * T * F, 0);
  speed("glu_bwd", ps__cuda_glu_bwd, &(ps__args_glu){T, F, PS_BF16, PS_ACTIVATION_SILU},
        AT(1024, 64), 12.0 * T * F, 0);
  speeds_fp8();
  ps__args_qkv q = {
      .n_tokens = T, .n_heads = 32, .n_kv_heads = 8, .head_dim = 128, .dt = PS_BF16, .eps = 1e-6f};
  g_failed += ps__rope_table(&q, &(ps_rope){.rotary_dim = 128, .theta = 5e5}, 0, 1) != PS_OK;
  const double A = T * 4096.0, K = T * 1024.0;
  speed("qkv_split_fwd", ps__cuda_qkv_split_fwd, &q, AT(64, 1, 512, 768), 4 * (A + 2 * K), 0);
  speed("qkv_split_bwd", ps__cuda_qkv_split_bwd, &q, AT(64, 256, 1, 512), 4 * A + 12 * K, 0);
  q.qk_norm = 1;
  speed("qkv_split_fwd, norm", ps__cuda_qkv_split_fwd, &q, AT(64, 1, 512, 768, 1024, 1025),
        4 * (A + 2 * K), 0);
  speed("qkv_split_bwd, norm", ps__cuda_qkv_split_bwd, &q,
        AT(64, 256, 1, 512, 768, 1024, 1025, 1030, 1031), 6 * A + 14 * K, 0);
  speed("embed_fwd", ps__cuda_embed_fwd, &(ps__args_embed){T, V, D, PS_BF16, 0, 0, -1},
        AT(0, 1024, 64), 2 * x, 0);
  speed("embed_bwd, all rows", ps__cuda_embed_bwd, &(ps__args_embed){T, V, D, PS_BF16, 0, 0, -1},
        AT(0, 64, 1024), x + 2.0 * V * D, 0);
  speed("embed_bwd, accumulate", ps__cuda_embed_bwd, &(ps__args_embed){T, V, D, PS_BF16, 1, 0, -1},
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
    speed(name, ps__cuda_cross_entropy,
          &(ps__args_cross_entropy){.rows = rows, .vocab = V, .dt = PS_BF16}, AT(1024, 0, 2, 8),
          4.0 * rows * V, 0);
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

static void run_cases(void *workspace, uint64_t seed) {
  test_table(seed);
  if (g_part)
    return;
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
  printf("seed %llu\n", (unsigned long long)seed);
  g_arena_bytes = (size_t)4 << 30;
  void *workspace;
  cudaStream_t stream;
  int minor;
  need(cudaDeviceGetAttribute(&g_capability, cudaDevAttrComputeCapabilityMajor, 0), "capability");
  need(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "capability");
  g_capability = 10 * g_capability + minor;
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
    run_cases(workspace, seed);
  printf("%s %d cases passed, %d failed\n", g_failed ? "FAIL" : "ok", g_passed, g_failed);
  if (timed)
    speeds();
  ps__cuda_blas_destroy(g_exec.blas);
  ps__pool_destroy(g_cpu.pool);
  return g_failed != 0;
}
#endif
