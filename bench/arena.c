/* arena.c - measures the host's memory as a training has it: by place in an arena, before it is
 * pinned, while it is pinned, and after.
 *
 * usage: arena [--gib X] [--places N] [--seconds S] [--rounds N] [--every S] [--backend cpu|cuda]
 *              [--gpu N] [--threads N] [--json FILE]
 *   --gib X       the arena (default: three quarters of the memory that is free, at most 84)
 *   --places N    equal parts of it, each measured by itself (default 16)
 *   --seconds S   of each rate of each place (default 0.2)
 *   --rounds N    the pinned arena is measured so many times (default 2), --every S seconds from
 *                 one begin to the next (default 0: one after the other). So a training or another
 *                 guest may run beside it, and a machine that slows down when it is warm shows it
 *   --json FILE   all rates as JSON besides; -: on stdout in place of the tables
 *
 * Each row of a table is a place, each column a rate in GB/s: bytes of one direction of copies, and
 * those read and written by the host's ops. "sums" adds bf16 gradients, "adamw" is the whole update
 * in bf16. Under "all, sums" both copies and sums run at once, under "all, adamw" both copies and
 * the update. The row "file" is the machine's description in the user's cache, where there is one.
 * On the CPU backend, and while the arena is not pinned, the host's ops run alone.
 *
 * A place's memory is touched by all threads in turn before the first measurement, as the engine
 * does. Exit status: 0; 1 where something failed; 2 for a wrong option. */
#include "hardware/arena.h"
#include "hardware/hardware_impl.h"
#include "core/core.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef PS_CUDA
#  include "backends/cuda/driver.h"
#  include "backends/cuda/probe.h"
#endif

enum { MAX_PLACES = 256, TOUCH_BYTES = 16 << 20 };

static struct {
  ps_hardware hw, file;
  bool has_file;
  char *arena;
  uint64_t bytes, pinned;
  void *device;
  uint32_t n_places;
  double seconds, begin_s;
  FILE *json; /* NULL: none */
  bool tables;
} run;

static ps_contention_rate rates[MAX_PLACES][PS__ARENA_CASES];

/* ---- the arena ------------------------------------------------------------------------------- */

static void touch_task(void *arg, int64_t task, uint32_t worker) {
  (void)arg, (void)worker;
  for (uint64_t at = (uint64_t)task * TOUCH_BYTES, end = at + TOUCH_BYTES;
       at < end && at < run.bytes; at += 4096)
    *(volatile char *)(run.arena + at) = 0;
}

static ps_status map_arena(void) {
  ps__pool *pool;
  PS_TRY(ps__map((void **)&run.arena, run.bytes, "the arena"));
#ifdef PS_CUDA
  if (run.hw.backend == PS_BACKEND_CUDA)
    ps__cuda_place(run.hw.device, run.arena, run.bytes);
#endif
  PS_TRY(ps__pool_create(&pool, run.hw.n_cpus > 64 ? 64 : run.hw.n_cpus, "touch"));
  ps__pool_run(pool, (int64_t)((run.bytes + TOUCH_BYTES - 1) / TOUCH_BYTES), touch_task, NULL);
  ps__pool_destroy(pool);
  return PS_OK;
}

#ifdef PS_CUDA
static const uint64_t PIN_BYTES = 1ull << 30;
static const ps__cuda_driver *cu;

static ps_status open_gpu(void) {
  CUdevice dev;
  CUcontext ctx;
  CUdeviceptr p;
  PS_TRY(ps__cuda_driver_open(&cu));
  PS__CUDA_TRY(cu, DeviceGet(&dev, (int)run.hw.device));
  PS__CUDA_TRY(cu, DevicePrimaryCtxRetain(&ctx, dev));
  PS__CUDA_TRY(cu, CtxPushCurrent(ctx));
  PS__CUDA_TRY(cu, MemAlloc(&p, PS__ARENA_DEVICE_BYTES));
  run.device = (void *)(uintptr_t)p;
  return PS_OK;
}
static ps_status pin(void) {
  for (; run.pinned < run.bytes; run.pinned += PIN_BYTES) {
    const uint64_t left = run.bytes - run.pinned;
    PS__CUDA_TRY(cu, MemHostRegister(run.arena + run.pinned, left < PIN_BYTES ? left : PIN_BYTES,
                                     CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
  }
  return PS_OK;
}
static void unpin(void) {
  for (uint64_t at = 0; at < run.pinned; at += PIN_BYTES)
    cu->MemHostUnregister(run.arena + at);
  run.pinned = 0;
}
#endif

/* ---- tables ---------------------------------------------------------------------------------- */

/* A column: a rate of a row of ps__arena_measure(). */
static const struct {
  uint32_t kinds, kind;
  const char *name;
} column[] = {
    {4, 4, "sums"},    {8, 8, "adamw"},      {1, 1, "h2d"},      {2, 2, "d2h"},
    {3, 1, "both in"}, {3, 2, "out"},        {7, 4, "all sums"}, {7, 1, "in"},
    {7, 2, "out"},     {11, 8, "all adamw"}, {11, 1, "in"},      {11, 2, "out"},
};
enum { N_COLUMNS = sizeof column / sizeof *column };

/* GB/s; 0: unknown. */
static double of_rows(const ps_contention_rate *r, uint32_t n, int c) {
  for (uint32_t i = 0; i < n; i++)
    if (r[i].kinds == column[c].kinds)
      return 1e-9 * (column[c].kind == PS_CONTENTION_H2D   ? r[i].h2d_bytes_per_s
                     : column[c].kind == PS_CONTENTION_D2H ? r[i].d2h_bytes_per_s
                                                           : r[i].host_bytes_per_s);
  return 0;
}
static double of_file(int c) {
  const double known = ps__arena_known(&run.file, column[c].kinds, column[c].kind);
  return run.has_file ? 1e-9 * known : 0;
}
static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static void print_cell(double gb_per_s) {
  if (gb_per_s > 0)
    printf(" %8.1f", gb_per_s);
  else
    printf(" %8s", "-");
}

static void print_table(const char *phase, uint32_t n_rows) {
  static const char *const sum_up[] = {"least", "median", "most"};
  printf("\n%s, %.0f s after the start; GB/s\n  %-10s", phase,
         (double)ps__now_ns() * 1e-9 - run.begin_s, "place");
  for (int c = 0; c < N_COLUMNS; c++)
    printf(" %8.8s", column[c].name);
  for (uint32_t i = 0; i < run.n_places; i++) {
    printf("\n  %3u %5.1f%%", i + 1, 100.0 * i / run.n_places);
    for (int c = 0; c < N_COLUMNS; c++)
      print_cell(of_rows(rates[i], n_rows, c));
  }
  for (int s = 0; s < 3; s++) {
    printf("\n  %-10s", sum_up[s]);
    for (int c = 0; c < N_COLUMNS; c++) {
      double v[MAX_PLACES];
      for (uint32_t i = 0; i < run.n_places; i++)
        v[i] = of_rows(rates[i], n_rows, c);
      qsort(v, run.n_places, sizeof *v, by_value);
      print_cell(v[s * (run.n_places - 1) / 2]);
    }
  }
  if (run.has_file) {
    printf("\n  %-10s", "file");
    for (int c = 0; c < N_COLUMNS; c++)
      print_cell(of_file(c));
  }
  printf("\n");
  fflush(stdout);
}

static void json_rates(const ps_contention_rate *r, uint32_t n) {
  fprintf(run.json, "[");
  for (uint32_t i = 0; i < n && r[i].kinds; i++)
    fprintf(run.json,
            "%s{\"kinds\": %u, \"threads\": %u, \"h2d_bytes_per_s\": %.4g, \"d2h_bytes_per_s\": "
            "%.4g, \"host_bytes_per_s\": %.4g}",
            i ? ", " : "", r[i].kinds, r[i].threads, r[i].h2d_bytes_per_s, r[i].d2h_bytes_per_s,
            r[i].host_bytes_per_s);
  fprintf(run.json, "]");
}

/* ---- a phase --------------------------------------------------------------------------------- */

static ps_status measure(const char *phase, bool first) {
  const uint64_t part = run.bytes / run.n_places / 4096 * 4096;
  const double at_s = (double)ps__now_ns() * 1e-9 - run.begin_s;
  uint32_t n = 0;
  for (uint32_t i = 0; i < run.n_places; i++) {
    const ps__arena a = {.hw = &run.hw,
                         .host = run.arena + i * part,
                         .host_bytes = part,
                         .device = run.pinned ? run.device : NULL,
                         .n_places = 1};
    PS_TRY(ps__arena_measure(&a, run.seconds, rates[i], &n));
  }
  if (run.tables)
    print_table(phase, n);
  if (!run.json)
    return PS_OK;
  fprintf(run.json, "%s\n{\"phase\": \"%s\", \"seconds_after_start\": %.1f, \"places\": [",
          first ? "" : ",", phase, at_s);
  for (uint32_t i = 0; i < run.n_places; i++) {
    fprintf(run.json, "%s\n {\"first_byte\": %" PRIu64 ", \"rates\": ", i ? "," : "", i * part);
    json_rates(rates[i], n);
    fprintf(run.json, "}");
  }
  fprintf(run.json, "]}");
  return PS_OK;
}

static ps_status measure_pinned(uint32_t n_rounds, double every_s) {
  double begin = (double)ps__now_ns() * 1e-9;
  for (uint32_t i = 0; i < n_rounds; i++) {
    char phase[32];
    const double early = begin + i * every_s - (double)ps__now_ns() * 1e-9;
    if (early > 0)
      (void)nanosleep(&(struct timespec){(time_t)early, (long)(1e9 * (early - (time_t)early))},
                      NULL);
    snprintf(phase, sizeof phase, run.device ? "pinned, round %u" : "round %u", i + 1);
    PS_TRY(measure(phase, !run.device && i == 0));
  }
  return PS_OK;
}

static ps_status measure_all(uint32_t n_rounds, double every_s) {
  PS_TRY(map_arena());
#ifdef PS_CUDA
  if (run.hw.backend == PS_BACKEND_CUDA) {
    PS_TRY(open_gpu());
    PS_TRY(measure("before pinning", true));
    const uint64_t t0 = ps__now_ns();
    PS_TRY(pin());
    if (run.tables)
      printf("\npinned in %.1f s\n", (double)(ps__now_ns() - t0) * 1e-9);
    PS_TRY(measure_pinned(n_rounds, every_s));
    unpin();
    return measure("after pinning", false);
  }
#endif
  return measure_pinned(n_rounds, every_s);
}

/* ---- options --------------------------------------------------------------------------------- */

static int usage(void) {
  fprintf(stderr,
          "usage: arena [--gib X] [--places N, 1 to %d] [--seconds S] [--rounds N] [--every "
          "S] [--backend cpu|cuda] [--gpu N] [--threads N] [--json FILE]\n",
          MAX_PLACES);
  return 2;
}

static void open_file(void) {
  char path[4096];
  run.has_file =
      ps_hardware_cache_path(path, sizeof path, &run.hw) == PS_OK &&
      ps_hardware_read(&run.file, path, run.hw.backend, run.hw.device, run.hw.n_threads) == PS_OK;
}

int main(int argc, char **argv) {
  double gib = 0, every_s = 0, number[7] = {0, 16, 0.2, 2, 0, 0, 0};
  static const char *const name[] = {"--gib",   "--places", "--seconds", "--rounds",
                                     "--every", "--gpu",    "--threads"};
  const char *backend = ps_hardware_n_gpus() ? "cuda" : "cpu", *json = NULL;
  for (int i = 1; i < argc; i += 2) {
    char *end = "";
    int k = 0;
    while (k < 7 && strcmp(argv[i], name[k]))
      k++;
    if (i + 1 == argc)
      return usage();
    if (k < 7)
      number[k] = strtod(argv[i + 1], &end);
    else if (!strcmp(argv[i], "--backend"))
      backend = argv[i + 1];
    else if (!strcmp(argv[i], "--json"))
      json = argv[i + 1];
    else
      return usage();
    if (*end || (k < 7 && !(number[k] >= 0 && number[k] < 1e6)))
      return usage();
  }
  const bool cuda = !strcmp(backend, "cuda");
  gib = number[0], run.seconds = number[2], every_s = number[4];
  run.n_places = (uint32_t)number[1];
  if ((!cuda && strcmp(backend, "cpu")) || run.n_places < 1 || run.n_places > MAX_PLACES ||
      !(run.seconds > 0))
    return usage();
  run.begin_s = (double)ps__now_ns() * 1e-9;
  ps_status st = ps_hardware_estimate(&run.hw, cuda ? PS_BACKEND_CUDA : PS_BACKEND_CPU,
                                      (uint32_t)number[5], (uint32_t)number[6]);
  const double free_gib = (double)ps__host_memory_free() / (1ull << 30);
  gib = gib > 0 ? gib : free_gib * 0.75 < 84 ? free_gib * 0.75 : 84;
  run.bytes = (uint64_t)(gib * 1024) << 20;
  run.tables = !json || strcmp(json, "-") != 0;
  run.json = !json ? NULL : run.tables ? fopen(json, "w") : stdout;
  if (json && !run.json)
    st = ps__fail(PS_EIO, "%s cannot be written", json);
  if (st == PS_OK) {
    open_file();
    if (run.tables)
      printf("%s%s%s, %u threads of %u CPUs, arena of %.1f GiB in %u places\n", run.hw.name,
             cuda ? ", " : "", run.hw.device_name, run.hw.n_threads, run.hw.n_cpus, gib,
             run.n_places);
    if (run.json)
      fprintf(run.json,
              "{\"cpu\": \"%s\", \"gpu\": \"%s\", \"n_threads\": %u, \"n_cpus\": %u, "
              "\"arena_bytes\": %" PRIu64 ", \"file\": ",
              run.hw.name, run.hw.device_name, run.hw.n_threads, run.hw.n_cpus, run.bytes);
    if (run.json)
      json_rates(run.file.contention, run.has_file ? PS_MAX_CONTENTION_RATES : 0);
    if (run.json)
      fprintf(run.json, ", \"phases\": [");
    st = measure_all((uint32_t)number[3], every_s);
    if (run.json)
      fprintf(run.json, "]}\n");
  }
  if (st != PS_OK)
    fprintf(stderr, "arena: %s\n", ps_last_error());
  if (run.json && run.json != stdout && fclose(run.json))
    return 1;
  return st == PS_OK ? 0 : 1;
}
