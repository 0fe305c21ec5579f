/* test_cuda_ops.c - every CUDA op of the table of cases (op_cases.h) against the CPU function of
 * the same kernel. Usage: test_cuda_ops [short | all [seed [part of a name]]]; short for a
 * sanitizer, with a part of a name those ops alone.
 *
 * Each case runs the GPU twice from the same inputs, outputs and scratch poisoned, guard bytes
 * around every buffer; the two runs must agree bit for bit, inputs must be as they were, and
 * outputs the CPU's bits or within the tolerance of the case around the CPU's. Ops with kernels for
 * less shared memory run with these too, and must give the same bits. Exit code 0: all well, or no
 * device (with the reason). */
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
#  include <cuda_runtime_api.h>
#  include <math.h>
#  include <stdlib.h>
#  include <string.h>
#  include <time.h>

enum { GUARD = 256, WORKERS = 2, RUNS = 4 };
/* Of the runs: ps__cuda_exec.shared_bytes. The device's; what a block has with compute capability
 * 8.0; with 8.6, 8.9 and 12.0. */
static const size_t g_shared_bytes[RUNS] = {0, 0, 163 << 10, 99 << 10};

static ps__cuda_exec g_exec;
static ps__cpu_exec g_cpu;
static char *g_arena; /* device memory for the cases, taken from the front by each */
static size_t g_arena_bytes;
static int g_failed, g_passed;
static int g_capability;
static bool g_short;       /* without the largest cases and the products: for a sanitizer */
static const char *g_part; /* in the names of what is tested, NULL: all */

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
  for (size_t i = 0; i < b->n; i++)
    max = fmax(max, fabs(op_value(cpu, b->dt, i)));
  for (size_t i = 0; i < b->n; i++) {
    const double c = op_value(cpu, b->dt, i), g = op_value(gpu, b->dt, i);
    if (c == g || (isnan(c) && isnan(g)))
      continue;
    const double limit = (t.ulps > 0 ? t.ulps * op_ulp(fmax(fabs(c), fabs(g)), b->dt) : 0) +
                         t.rel * fabs(c) + t.of_max * max;
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

static bool has_kernels_by_shared_bytes(const ps_kernel *k) {
  return k == &ps__k_delta_fwd || k == &ps__k_delta_bwd;
}

static void check(void *user, const op_case *c) {
  const op_operand *b = c->operand;
  const uint32_t n = c->n_operands, runs = has_kernels_by_shared_bytes(c->kernel) ? RUNS : 2;
  const bool same_bits = wanted_bits(c);
  void *cpu[OP_MAX_OPERANDS], *gpu[RUNS][OP_MAX_OPERANDS] = {0};
  char why[200] = "", name[160];
  snprintf(name, sizeof name, "%s %s %s", c->kernel->name, (const char *)user, c->name);
  bool ok = true;
  for (uint32_t r = 0; r < runs; r++) {
    g_exec.shared_bytes = g_shared_bytes[r];
    ok = ok && run_gpu(name, c, gpu[r]);
  }
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
    for (uint32_t r = 1; r < runs; r++)
      if (memcmp(gpu[0][i], gpu[r][i], b[i].n * op_dtype_bytes(b[i].dt)) != 0)
        ok = false, printf("FAIL %s: output %u differs between run 0 and run %u\n", name, i, r);
    const size_t bad = ok ? compare(&b[i], same_bits, cpu[i], gpu[0][i], why, sizeof why) : 0;
    if (bad)
      ok = false, printf("FAIL %s: output %u: %zu of %llu wrong; %s\n", name, i, bad,
                         (unsigned long long)b[i].n, why);
  }
  free(g_cpu.scratch);
  for (uint32_t i = 0; i < n; i++)
    free(cpu[i]);
  for (uint32_t r = 0; r < runs; r++)
    for (uint32_t i = 0; i < n; i++)
      free(gpu[r][i]);
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
  g_part = argc > 3 ? argv[3] : NULL;
  setvbuf(stdout, NULL, _IOLBF, 0); /* under a sanitizer that runs out of its time, too */
  g_short = argc > 1 && strcmp(argv[1], "short") == 0;
  const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL);
  printf("seed %llu\n", (unsigned long long)seed);
  g_arena_bytes = (size_t)4 << 30;
  void *workspace;
  cudaStream_t stream;
  int minor, n_sms;
  need(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, 0), "processors");
  need(cudaDeviceGetAttribute(&g_capability, cudaDevAttrComputeCapabilityMajor, 0), "capability");
  need(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "capability");
  g_capability = 10 * g_capability + minor;
  need(cudaMalloc((void **)&g_arena, g_arena_bytes), "4 GiB of device memory");
  need(cudaMalloc(&workspace, 32u << 20), "workspace");
  need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  g_exec = (ps__cuda_exec){.stream = stream, .n_sms = n_sms};
  if (ps__cuda_blas_create(&g_exec.blas, workspace, 32u << 20) != PS_OK ||
      ps__pool_create(&g_cpu.pool, WORKERS, "test") != PS_OK) {
    printf("FAIL %s\n", ps_last_error());
    return 1;
  }
  run_cases(workspace, seed);
  printf("%s %d cases passed, %d failed\n", g_failed ? "FAIL" : "ok", g_passed, g_failed);
  ps__cuda_blas_destroy(g_exec.blas);
  ps__pool_destroy(g_cpu.pool);
  return g_failed != 0;
}
#endif
