/* gaps.c - measures the time between two kernels of a stream, alone and beside copies.
 *
 * usage: gaps [cuda | cpu]      (default: cuda where this build has it)
 *
 * A step runs kernels of 20 us each in a row. A kernel notes its own start and end with its
 * processor's nanosecond clock, so that gaps are measured without any mark between kernels. Ways to
 * launch them:
 *   marks      an op of the engine a kernel, with the trace's two marks an op
 *   ops        the same without a trace
 *   launches   one op of the engine launches all kernels
 *   dependent  the same with programmatic dependent launch (CUDA; compute capability 9.0)
 *   graph      the same as one CUDA graph
 * Beside them run no copies, copies to the device, to the host, or both ways. Prints a JSON object
 * for each way and each kind of copies: the gaps' mean and quantiles in us. */
#include "gaps.h"
#include "engine/engine.h"
#include "kernels/ops.h"
#include <stdlib.h>
#include <string.h>

enum { DEVICE, HOST };
enum { COMPUTE, H2D, D2H, N_STREAMS };
enum { ALONE, TO_DEVICE, TO_HOST, BOTH, N_BESIDE };

/* Copies of a step take longer than its kernels, so that the last step's kernels have copies beside
 * them. */
static struct {
  uint32_t backend, n_kernels, n_copies, n_steps;
  uint64_t copy_bytes, spin_ns;
} size;

static ps_engine *engine;

static void must(ps_status st) {
  if (st == PS_OK)
    return;
  fprintf(stderr, "gaps: %s: %s\n", ps_status_name(st), ps_last_error());
  exit(1);
}

/* ---- kernels --------------------------------------------------------------------------------- */

static ps_status work_cpu(const ps_launch *launch) {
  const gaps_args *a = launch->args;
  for (uint32_t i = a->first; i < a->first + a->n; i++) {
    a->stamps[i].start = ps__now_ns();
    while (ps__now_ns() - a->stamps[i].start < a->spin_ns)
      ;
    a->stamps[i].end = ps__now_ns();
  }
  return PS_OK;
}
static ps_status clear_cpu(const ps_launch *launch) {
  const gaps_args *a = launch->args;
  memset(a->stamps, 0, a->n * sizeof *a->stamps);
  return PS_OK;
}
#ifdef PS_CUDA
static const ps__op_info work_info = {.prepare = gaps_prepare_cuda};
static const ps_kernel k_work = {.name = "work",
                                 .fn = {work_cpu, gaps_work_cuda},
                                 .info = &work_info},
                       k_clear = {.name = "clear", .fn = {clear_cpu, gaps_clear_cuda}};
#else
static const ps_kernel k_work = {.name = "work", .fn = {work_cpu, NULL}},
                       k_clear = {.name = "clear", .fn = {clear_cpu, NULL}};
#endif

/* ---- the program ----------------------------------------------------------------------------- */

static uint64_t stamps_bytes(void) {
  return (size.n_kernels * sizeof(gaps_stamp) + 4095) / 4096 * 4096;
}

static void add(ps_program *p, const ps_kernel *k, gaps_args args) {
  const ps_access access = {DEVICE, PS_WRITE, args.first * sizeof(gaps_stamp),
                            args.n * sizeof(gaps_stamp)};
  args.stamps = engine->space[DEVICE].addr;
  args.spin_ns = size.spin_ns;
  must(ps_program_add(p,
                      &(ps_op){.kernel = k,
                               .args = &args,
                               .args_bytes = sizeof args,
                               .stream = COMPUTE,
                               .access = &access,
                               .n_access = 1},
                      NULL));
}

/* What goes each way has memory of its own. */
static void add_copies(ps_program *p, uint32_t stream) {
  const uint64_t at = stream == H2D ? 0 : size.copy_bytes;
  const ps_access on_host = {HOST, stream == H2D ? PS_READ : PS_WRITE, at, size.copy_bytes},
                  on_device = {DEVICE, stream == H2D ? PS_WRITE : PS_READ, stamps_bytes() + at,
                               size.copy_bytes};
  const ps_access access[2] = {stream == H2D ? on_host : on_device,
                               stream == H2D ? on_device : on_host};
  for (uint32_t i = 0; i < size.n_copies; i++)
    must(ps_program_add(p, &(ps_op){.stream = stream, .access = access, .n_access = 2}, NULL));
}

static ps_schedule *schedule(bool one_by_one, uint32_t how, int beside) {
  ps_program *p;
  ps_schedule *s;
  must(ps_program_create(&p, 2, N_STREAMS));
  add(p, &k_clear, (gaps_args){.n = size.n_kernels});
  if (beside == TO_DEVICE || beside == BOTH)
    add_copies(p, H2D);
  if (beside == TO_HOST || beside == BOTH)
    add_copies(p, D2H);
  for (uint32_t i = 0; i < (one_by_one ? size.n_kernels : 1); i++)
    add(p, &k_work, (gaps_args){.first = i, .n = one_by_one ? 1 : size.n_kernels, .how = how});
  must(ps_schedule_compile(&s, p));
  ps_program_destroy(p);
  return s;
}

static void open_engine(void) {
  ps_engine_config cfg = {
      .struct_bytes = sizeof cfg,
      .n_places = 2,
      .n_links = 2,
      .n_spaces = 2,
      .n_streams = N_STREAMS,
      .place = {[DEVICE] = {.kind = PS_PLACE_DEVICE, .backend = size.backend},
                [HOST] = {.kind = PS_PLACE_HOST}},
      .link = {{HOST, DEVICE, H2D, 0}, {DEVICE, HOST, D2H, 0}},
      .space = {[DEVICE] = {.bytes = stamps_bytes() + 2 * size.copy_bytes, .place = DEVICE},
                [HOST] = {.bytes = 2 * size.copy_bytes, .place = HOST}},
      .stream = {[COMPUTE] = {.n_threads = 1, .name = "compute"},
                 [H2D] = {.n_threads = 1, .name = "h2d"},
                 [D2H] = {.n_threads = 1, .name = "d2h"}}};
  must(ps_engine_create(&engine, &cfg));
}

/* ---- measuring ------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void print(const char *way, const char *beside, const gaps_stamp *stamp) {
  const uint32_t n = size.n_kernels - 1;
  double *gap = malloc(n * sizeof *gap), sum = 0, work = 0;
  if (!gap)
    must(PS_ENOMEM);
  for (uint32_t i = 0; i < n; i++) {
    gap[i] = ((double)stamp[i + 1].start - (double)stamp[i].end) * 1e-3;
    sum += gap[i];
    work += (double)(stamp[i].end - stamp[i].start) * 1e-3;
  }
  qsort(gap, n, sizeof *gap, by_value);
  printf("{\"backend\": \"%s\", \"launch\": \"%s\", \"beside\": \"%s\", \"gaps\": %u, "
         "\"kernel_us\": %.3f, \"mean_us\": %.3f, \"p10_us\": %.3f, \"p50_us\": %.3f, "
         "\"p90_us\": %.3f, \"p99_us\": %.3f, \"max_us\": %.3f}\n",
         size.backend == PS_BACKEND_CUDA ? "cuda" : "cpu", way, beside, n, work / n, sum / n,
         gap[n / 10], gap[n / 2], gap[n * 9 / 10], gap[n * 99 / 100], gap[n - 1]);
  fflush(stdout);
  free(gap);
}

/* The stamps are those of the last step. */
static void measure(const char *way, bool one_by_one, uint32_t how, uint32_t trace_steps,
                    int beside) {
  static const char *const name[] = {"none", "h2d", "d2h", "both"};
  ps_schedule *s = schedule(one_by_one, how, beside);
  ps_run *r;
  must(ps_run_create(
      &r, engine, s,
      &(ps_run_config){.struct_bytes = sizeof(ps_run_config), .trace_steps = trace_steps}));
  must(ps_run_submit(r, size.n_steps));
  must(ps_run_wait(r, size.n_steps));
  gaps_stamp *stamp = malloc(size.n_kernels * sizeof *stamp);
  if (!stamp)
    must(PS_ENOMEM);
  must(ps__engine_read(engine, DEVICE, 0, stamp, size.n_kernels * sizeof *stamp));
  print(way, name[beside], stamp);
  free(stamp);
  must(ps_run_destroy(r));
  must(ps_schedule_destroy(s));
}

int main(int argc, char **argv) {
  const char *backend = argc > 1 ? argv[1] : NULL;
#ifdef PS_CUDA
  const bool gpu = !backend || strcmp(backend, "cuda") == 0;
#else
  const bool gpu = backend && strcmp(backend, "cuda") == 0;
#endif
  if (argc > 2 || (backend && !gpu && strcmp(backend, "cpu") != 0)) {
    fprintf(stderr, "usage: gaps [cuda | cpu]\n");
    return 2;
  }
  size.backend = gpu ? PS_BACKEND_CUDA : PS_BACKEND_CPU;
  size.n_kernels = gpu ? 500 : 50;
  size.n_copies = gpu ? 24 : 8;
  size.n_steps = gpu ? 12 : 4;
  size.copy_bytes = gpu ? 64 << 20 : 1 << 20;
  size.spin_ns = 20000;
  open_engine();
  for (int beside = 0; beside < N_BESIDE; beside++) {
    measure("marks", true, GAPS_LAUNCHES, 1, beside);
    measure("ops", true, GAPS_LAUNCHES, 0, beside);
    measure("launches", false, GAPS_LAUNCHES, 0, beside);
    if (gpu)
      measure("dependent", false, GAPS_DEPENDENT, 0, beside);
    if (gpu)
      measure("graph", false, GAPS_GRAPH, 0, beside);
  }
  must(ps_engine_close(engine));
  return 0;
}
