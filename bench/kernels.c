/* kernels.c - measures each CPU kernel and compares it with this machine's peak.
 *
 * usage: kernels [threads [gemm | elementwise]]     (default: all CPUs of this process, both kinds)
 *
 * Prints a JSON object for each kernel and shape: ms (the best of the repeats), the rate, its unit,
 * and the fraction of the peak. The peak is measured in the same run: memcpy on the same threads
 * (bytes read plus written), and OpenBLAS's own threading on the same product. Products of experts
 * have the process's CPU time, as other work takes the cores. */
#include "../tests/native/op_cases.h"
#include "kernels/cpu/cpu.h"
#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef PS_BLAS_WHEEL
#  define BLAS(name) scipy_##name
#else
#  define BLAS(name) name
#endif

enum { REPEATS = 15, ARENA_BYTES = 640 << 20 };
static ps__cpu_exec exec;
static char *arena;
static uint32_t n_threads;
static double copy_gb_s;

static void copy_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  memcpy(arena + first, arena + ARENA_BYTES / 2 + first, (size_t)(end - first));
}

static double best_ms(void (*fn)(void *), void *arg) {
  double best = 1e30;
  for (int r = 0; r < REPEATS + 2; r++) {
    uint64_t t0 = ps__now_ns();
    fn(arg);
    double ms = (double)(ps__now_ns() - t0) * 1e-6;
    if (r >= 2 && ms < best)
      best = ms;
  }
  return best;
}

static void copy_run(void *arg) { ps__cpu_rows(&exec, *(int64_t *)arg, 1 << 20, copy_task, NULL); }

/* One launch; operands lie one after another in the arena, each of the bytes given. */
typedef struct call {
  const ps_kernel *kernel;
  const void *args;
  void *ptr[OP_MAX_OPERANDS];
  uint32_t n_ptr;
} call;

static void call_run(void *arg) {
  const call *c = arg;
  ps_launch l = {.args = c->args, .ptr = c->ptr, .n_ptr = c->n_ptr, .exec = &exec};
  if (c->kernel->fn[PS_BACKEND_CPU](&l) != PS_OK) {
    fprintf(stderr, "kernels: %s: %s\n", c->kernel->name, ps_last_error());
    exit(1);
  }
}

static call prepare(const ps_kernel *kernel, const void *args, const size_t *bytes, uint32_t n) {
  call c = {.kernel = kernel, .args = args, .n_ptr = n};
  size_t at = 0;
  for (uint32_t i = 0; i < n; i++) {
    c.ptr[i] = arena + at;
    at += ps__round_up(bytes[i], 4096);
  }
  size_t need = ps__round_up(ps__op_scratch(kernel, PS_BACKEND_CPU, args, NULL), 64);
  if (at > ARENA_BYTES || need > exec.scratch_bytes) {
    fprintf(stderr, "kernels: %s needs %zu bytes and %zu of scratch\n", kernel->name, at, need);
    exit(1);
  }
  return c;
}

/* A bandwidth-bound kernel on the operands of its case. The rate counts the bytes that its
 * description says. */
static void bench_case(void *user, const op_case *k) {
  const uint32_t dt = *(const uint32_t *)user;
  size_t bytes[OP_MAX_OPERANDS];
  for (uint32_t i = 0; i < k->n_operands; i++)
    bytes[i] = k->operand[i].n * op_dtype_bytes(k->operand[i].dt);
  call c = prepare(k->kernel, k->args, bytes, k->n_operands);
  for (uint32_t i = 0; i < k->n_operands; i++)
    if (k->operand[i].init)
      memcpy(c.ptr[i], k->operand[i].init, bytes[i]);
  const double ms = best_ms(call_run, &c), rate = k->kernel->info->work(k->args).bytes / ms * 1e-6;
  printf("{\"kernel\": \"%s\", \"shape\": \"%s\", \"dtype\": \"%s\", \"threads\": %u, \"ms\": "
         "%.4f, \"rate\": %.2f, \"unit\": \"GB/s\", \"of_copy\": %.3f}\n",
         k->kernel->name, k->name, ps__dtypes[dt].name, n_threads, ms, rate, rate / copy_gb_s);
  fflush(stdout);
}

/* Small numbers of both signs in every 4 bytes, valid as bf16 pairs too. */
static void fill_arena(void) {
  uint16_t *p = (uint16_t *)arena;
  uint32_t x = 1;
  for (size_t i = 0; i < ARENA_BYTES / 2; i++) {
    x = x * 1664525u + 1013904223u;
    p[i] = ps__f32_to_bf16((float)(int32_t)x * 4.6e-10f);
  }
}

static void bench_elementwise(uint32_t dt) {
  for (uint32_t i = 0; i < n_op_table; i++)
    if (op_table[i].kernel->op_class != PS_CLASS_GEMM)
      op_cases(i, dt, OP_BENCH, 1, bench_case, &dt);
  fill_arena();
}

static void blas_run(void *arg) {
  const call *c = arg;
  const ps__args_gemm *a = c->args;
  ps__cpu_sgemm(a->trans_a, a->trans_b, (int)a->m, (int)a->n, (int)a->k, 1.0f, c->ptr[0],
                (int)a->lda, c->ptr[1], (int)a->ldb, 0.0f, c->ptr[2], (int)a->ldc);
}

/* Measures our threading, then OpenBLAS's own, in blocks of runs. After a product OpenBLAS's
 * workers spin for a while; in turns of one run each they would take the cores from ours. */
static void bench_gemm(uint32_t m, uint32_t n, uint32_t k, uint8_t ta, uint8_t tb, uint8_t dt) {
  const ps__args_gemm a = ps__gemm_args(m, n, k, ta, tb, dt);
  size_t e = 4; /* room for OpenBLAS's fp32 product too */
  call c = prepare(&ps__k_gemm, &a, (size_t[]){e * m * k, e * k * n, e * m * n}, 3);
  double ours = 1e30, blas = 1e30, flops = 2.0 * m * n * k;
  for (int turn = 0; turn < 2 * REPEATS; turn++) {
    const bool theirs = turn >= REPEATS, warm = turn % REPEATS == 0;
    double *best = theirs ? &blas : &ours;
    BLAS(openblas_set_num_threads)(theirs ? (int)n_threads : 1);
    uint64_t t0 = ps__now_ns();
    theirs ? blas_run(&c) : call_run(&c);
    double ns = (double)(ps__now_ns() - t0);
    if (!warm && ns < *best)
      *best = ns;
  }
  BLAS(openblas_set_num_threads)(1);
  printf("{\"kernel\": \"gemm\", \"shape\": \"%ux%ux%u%s%s\", \"dtype\": \"%s\", \"threads\": %u, "
         "\"ms\": %.4f, \"rate\": %.2f, \"unit\": \"GFLOP/s\", \"openblas_f32\": %.2f, "
         "\"of_openblas\": %.3f}\n",
         m, n, k, ta ? " ta" : "", tb ? " tb" : "", ps__dtypes[dt].name, n_threads, ours * 1e-6,
         flops / ours, flops / blas, blas / ours);
  fflush(stdout);
}

/* The three products of experts, by CPU time: uneven routing, with counts that are no multiples. */
static void bench_grouped(uint32_t n_tokens, uint32_t n_used, uint32_t n_experts, uint32_t n_out,
                          uint32_t n_in, uint32_t dt) {
  const size_t e = ps__dtypes[dt].bytes, r = (size_t)n_tokens * n_used, x = e * r * n_in,
               y = e * r * n_out, w = e * n_experts * n_out * n_in,
               at = 4 * ((size_t)n_experts + 1);
  for (uint32_t role = PS_GEMM_FORWARD; role <= PS_GEMM_WGRAD; role++) {
    const ps__args_gemm_grouped a = {n_tokens, n_used, n_out, n_in, n_experts, dt, role, false};
    const size_t bytes[][4] = {{x, w, at, y}, {y, w, at, x}, {y, x, at, w}};
    fill_arena();
    call c = prepare(&ps__k_gemm_grouped, &a, bytes[role], 4);
    int32_t *offsets = c.ptr[2];
    offsets[0] = 0;
    for (uint32_t i = 1; i <= n_experts; i++)
      offsets[i] = (int32_t)(r * i / n_experts - (i < n_experts ? i * 7 % 11 : 0));
    double best = 1e30;
    for (int turn = 0; turn < 4 * REPEATS; turn++) {
      struct timespec t0, t1;
      clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t0);
      call_run(&c);
      clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t1);
      const double ns = 1e9 * (double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec);
      best = ns < best ? ns : best;
    }
    printf("{\"kernel\": \"gemm_grouped\", \"shape\": \"%u tokens, %u of %u, %ux%u, role %u\", "
           "\"dtype\": \"%s\", \"threads\": %u, \"cpu_ms\": %.4f, \"rate\": %.2f, \"unit\": "
           "\"GFLOP/s\"}\n",
           n_tokens, n_used, n_experts, n_out, n_in, role, ps__dtypes[dt].name, n_threads,
           best * 1e-6, 2.0 * (double)r * n_out * n_in / best);
    fflush(stdout);
  }
}

int main(int argc, char **argv) {
  void *p = NULL, *s = NULL;
  n_threads = argc > 1 ? (uint32_t)atoi(argv[1]) : ps__n_cpus();
  exec.scratch_bytes = 16 << 20;
  if (n_threads < 1 || n_threads > 1024 || ps__map(&p, ARENA_BYTES, "operands") ||
      ps__map(&s, exec.scratch_bytes * n_threads, "scratch") ||
      ps__pool_create(&exec.pool, n_threads, "bench") || ps__cpu_blas_ready(n_threads)) {
    fprintf(stderr, "kernels: %s\nusage: kernels [threads [gemm | elementwise]]\n",
            ps_last_error());
    return 2;
  }
  arena = p;
  exec.scratch = s;
  fill_arena();
  int64_t half = 128 << 20;
  copy_gb_s = 2.0 * (double)half / best_ms(copy_run, &half) * 1e-6;
  printf("{\"kernel\": \"memcpy\", \"shape\": \"128 MiB\", \"threads\": %u, \"rate\": %.2f, "
         "\"unit\": \"GB/s\"}\n",
         n_threads, copy_gb_s);
  fill_arena();
  static const uint32_t shapes[][3] = {{2048, 2048, 512},  {2048, 1024, 1024}, {2048, 5632, 1024},
                                       {1024, 2816, 2048}, {256, 1024, 384},   {64, 512, 512}};
  const char *only = argc > 2 ? argv[2] : "";
  for (uint8_t dt = PS_F32; dt < PS_N_DTYPES && strcmp(only, "elementwise"); dt++)
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
      bench_gemm(shapes[i][0], shapes[i][1], shapes[i][2], 0, 1, dt);
      if (i == 1 || i == 3)
        bench_gemm(shapes[i][0], shapes[i][1], shapes[i][2], 0, 0, dt);
      if (i == 1 || i == 3)
        bench_gemm(shapes[i][0], shapes[i][1], shapes[i][2], 1, 0, dt);
    }
  for (uint32_t dt = PS_F32; dt < PS_N_DTYPES && strcmp(only, "elementwise"); dt++) {
    bench_grouped(64, 2, 8, 96, 64, dt);
    bench_grouped(2048, 8, 128, 512, 256, dt);
  }
  fill_arena();
  for (uint32_t dt = PS_F32; dt < PS_N_DTYPES && strcmp(only, "gemm"); dt++)
    bench_elementwise(dt);
  ps__pool_destroy(exec.pool);
  ps__unmap(s, exec.scratch_bytes * n_threads);
  ps__unmap(p, ARENA_BYTES);
  return 0;
}
