/* test_hardware.c - this machine's rates: kept in the user's cache, what is told of them, and what
 * is measured when a plan first needs it.
 * Usage: test_hardware [threads: what several threads measure, for ThreadSanitizer, under which all
 * rates take minutes] */
#include "check.h"
#include "hardware/arena.h"
#include "hardware/hardware_impl.h"
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct told {
  uint32_t n[PS_HARDWARE_NOT_KEPT + 1];
  char line[512]; /* the last */
} told;

static void tell(void *user, ps_hardware_note note, const char *line) {
  told *t = user;
  t->n[note]++;
  snprintf(t->line, sizeof t->line, "%s", line);
}

#ifdef PS_SANITIZED /* measuring takes half a minute there: once is enough; a rate may stay 0 */
enum { N_THREADS = 2, ANEW = 0, SLOWEST = -1 };
#else
enum { N_THREADS = 1, ANEW = 1, SLOWEST = 100000000 /* bytes/s */ };
#endif

static void rates_are_measured_once(ps_hardware *first) {
  char folder[] = "/tmp/penstock-hardware-XXXXXX", path[512];
  ps_hardware again;
  told t = {.line = ""};
  ps_hardware_ask ask = {.struct_bytes = sizeof ask,
                         .backend = PS_BACKEND_CPU,
                         .n_threads = N_THREADS,
                         .n_devices = 4, /* of the CPU backend: arenas, which have no rates */
                         .fp8 = 1,
                         .seconds = 0.05,
                         .note = tell,
                         .user = &t};
  CHECK(mkdtemp(folder) && setenv("XDG_CACHE_HOME", folder, 1) == 0);
  for (uint32_t i = 0; i < 2; i++) {
    CHECK(ps_hardware_get(i ? &again : first, &ask) == PS_OK);
    CHECK(t.n[PS_HARDWARE_MEASURES] == 1 && t.n[PS_HARDWARE_NOT_KEPT] == 0);
  }
  CHECK(first->measured == PS_MEASURED && memcmp(first, &again, sizeof again) == 0);
  CHECK(ps_hardware_cache_path(path, sizeof path, first) == PS_OK && unlink(path) == 0);
  snprintf(path, sizeof path, "%s/penstock", folder);
  CHECK(rmdir(path) == 0 && rmdir(folder) == 0);
}

static double sums_now(ps_hardware_ask *ask, ps_hardware_how how) {
  ps_hardware hw;
  ask->how = how;
  CHECK(ps_hardware_get(&hw, ask) == PS_OK);
  ask->how = PS_HARDWARE_ONCE;
  return hw.accumulate_bytes_per_s;
}

/* A run's rates count before those measured, until the machine is measured anew; of several the
 * median. The file of before, without measurements, is one. */
static void what_trainings_saw_is_remembered(const ps_hardware *first) {
  char folder[] = "/tmp/penstock-hardware-XXXXXX", path[512];
  ps_hardware hw;
  ps_hardware_ask ask = {.struct_bytes = sizeof ask,
                         .backend = PS_BACKEND_CPU,
                         .n_threads = N_THREADS,
                         .seconds = 0.05};
  CHECK(mkdtemp(folder) && setenv("XDG_CACHE_HOME", folder, 1) == 0);
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, N_THREADS) == PS_OK);
  CHECK(ps_hardware_cache_path(path, sizeof path, &hw) == PS_OK);
  hw.measured = PS_MEASURED;
  CHECK(ps_hardware_remember(&hw, PS_RATES_RUN) == PS_OK && access(path, F_OK) != 0);
  *strrchr(path, '/') = 0;
  CHECK(mkdir(path, 0700) == 0);
  CHECK(ps_hardware_cache_path(path, sizeof path, first) == PS_OK);
  CHECK(ps_hardware_write(first, path) == PS_OK);
  const double sums = first->accumulate_bytes_per_s;
  static const struct {
    ps_rates_of of;
    double saw, then; /* over what was measured */
  } step[] = {{PS_RATES_ARENA, 0.7, 0.7},
              {PS_RATES_RUN, 0.25, 0.25},
              {PS_RATES_RUN, 0.5, 0.375},
              {PS_RATES_RUN, 0.4, 0.4},
              {PS_RATES_ARENA, 0.9, 0.4}};
  for (size_t i = 0; i < sizeof step / sizeof *step; i++) {
    hw = *first;
    hw.accumulate_bytes_per_s = step[i].saw * sums;
    CHECK(ps_hardware_remember(&hw, step[i].of) == PS_OK);
    CHECK(fabs(sums_now(&ask, PS_HARDWARE_ONCE) / sums - step[i].then) < 1e-9);
  }
  hw.measured = PS_ESTIMATED;
  hw.accumulate_bytes_per_s = 1;
  CHECK(ps_hardware_remember(&hw, PS_RATES_RUN) == PS_OK);
  CHECK(fabs(sums_now(&ask, PS_HARDWARE_ONCE) / sums - 0.4) < 1e-9);
  CHECK(ps_hardware_get(&hw, &ask) == PS_OK &&
        hw.optimizer_bytes_per_s == first->optimizer_bytes_per_s);
  if (ANEW) {
    const double anew = sums_now(&ask, PS_HARDWARE_ANEW), now = sums_now(&ask, PS_HARDWARE_ONCE);
    CHECK(now == anew && anew > 0.5 * sums); /* the mean of both that were measured */
  }
  ps__kept *k = malloc(sizeof *k);
  for (uint32_t i = 0; i < PS__KEPT; i++)
    CHECK(ps_hardware_remember(first, PS_RATES_RUN) == PS_OK);
  CHECK(k && ps__hardware_kept(k, path) == PS__KEPT && k->entry[0].of == PS_RATES_RUN &&
        k->entry[0].unix_s > 1700000000);
  free(k);
  CHECK_FAILS(ps_hardware_remember(NULL, PS_RATES_RUN), PS_EINVAL, "must be given");
  CHECK(unlink(path) == 0);
  snprintf(path, sizeof path, "%s/penstock", folder);
  CHECK(rmdir(path) == 0 && rmdir(folder) == 0);
}

/* Of a machine whose rates are nowhere, a cap of its memory leaves estimates. */
static void a_cap_leaves_estimates(void) {
  told t = {.line = ""};
  ps_hardware hw;
  ps_hardware_ask ask = {.struct_bytes = sizeof ask,
                         .n_threads = 1,
                         .host_mem_bytes = 1 << 20,
                         .note = tell,
                         .user = &t};
  CHECK(ps_hardware_get(&hw, &ask) == PS_OK && hw.measured == PS_ESTIMATED);
  CHECK(t.n[PS_HARDWARE_ESTIMATES] == 1 && t.n[PS_HARDWARE_MEASURES] == 0);
  CHECK(strstr(t.line, "of host memory at least") && strstr(t.line, "rates are estimated"));
  memset(&hw, 7, sizeof hw);
  const ps_hardware before = hw;
  ask.how = PS_HARDWARE_IN_FULL;
  CHECK_FAILS(ps_hardware_get(&hw, &ask), PS_EBUDGET, "of host memory at least");
  CHECK(memcmp(&before, &hw, sizeof hw) == 0);
}

/* Measuring that is asked for is not announced. */
static void without_a_cache_the_run_goes_on(void) {
  char path[64];
  told t = {.line = ""};
  ps_hardware hw;
  const ps_hardware_ask ask = {.struct_bytes = sizeof ask,
                               .n_threads = 1,
                               .how = PS_HARDWARE_ANEW,
                               .seconds = 0.05,
                               .note = tell,
                               .user = &t};
  if (!ANEW)
    return;
  CHECK(unsetenv("XDG_CACHE_HOME") == 0 && unsetenv("HOME") == 0);
  CHECK_FAILS(ps_cache_path(path, sizeof path, "a.json"), PS_ESTATE, "neither XDG_CACHE_HOME nor");
  CHECK(ps_hardware_get(&hw, &ask) == PS_OK && hw.measured == PS_MEASURED);
  CHECK(t.n[PS_HARDWARE_MEASURES] == 0 && t.n[PS_HARDWARE_NOT_KEPT] == 1 &&
        strstr(t.line, "not cached: set XDG_CACHE_HOME"));
  CHECK(setenv("HOME", "/h", 1) == 0 && ps_cache_path(path, sizeof path, "a.json") == PS_OK);
  CHECK(strcmp(path, "/h/.cache/penstock/a.json") == 0);
  CHECK_FAILS(ps_cache_path(path, 10, "b.json"), PS_EINVAL, "there is room for 9");
}

static void wrong_asks_are_refused(void) {
  ps_hardware hw;
  const ps_hardware_ask wrong[] = {{.struct_bytes = 8},
                                   {.struct_bytes = sizeof *wrong, .how = PS_N_HARDWARE_HOWS},
                                   {.struct_bytes = sizeof *wrong, .seconds = -1},
                                   {.struct_bytes = sizeof *wrong, .backend = PS_N_BACKENDS}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    CHECK_FAILS(ps_hardware_get(&hw, &wrong[i]), PS_EINVAL, "");
}

/* ---- the memory of an arena ------------------------------------------------------------------ */

static bool near(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

/* What was measured takes the place of what was known, and what was not follows: sums on fewer
 * threads, and both parts of an update. */
static void rates_of_an_arena_replace_those_known(void) {
  const uint32_t sums = PS_CONTENTION_SUMS, adamw = PS_CONTENTION_OPTIMIZER,
                 both = PS_CONTENTION_H2D | PS_CONTENTION_D2H;
  ps_hardware hw = {
      .optimizer_bytes_per_s = 90e9,
      .optimizer_state_bytes_per_s = 80e9,
      .accumulate_bytes_per_s = 110e9,
      .sumsq_bytes_per_s = 60e9,
      .gather_bytes_per_s = 10e9,
      .link = {[PS_LINK_H2D] = {0, 1, 50e9, 40e9}, [PS_LINK_D2H] = {1, 0, 55e9, 40e9}},
      .contention = {{sums, 4, 50e9, 55e9, 100e9},
                     {sums | both, 4, 30e9, 35e9, 50e9},
                     {sums | both, 2, 40e9, 45e9, 30e9},
                     {adamw, 4, 50e9, 55e9, 90e9}},
      .gpus_contention = {{sums | both, 4, 20e9, 20e9, 40e9}}};
  const ps_contention_rate seen[] = {{sums, 4, 0, 0, 99e9},
                                     {adamw, 4, 0, 0, 72e9},
                                     {PS_CONTENTION_H2D, 0, 49e9, 0, 0},
                                     {both, 0, 38e9, 36e9, 0},
                                     {sums | both, 4, 30e9, 28e9, 60e9},
                                     {adamw | both, 4, 1e9, 1e9, 1e9}};
  enum { N = sizeof seen / sizeof *seen };
  CHECK(near(ps__arena_differs(&hw, seen, 1).part, 0.01));
  const ps_rate_difference most = ps__arena_differs(&hw, seen, N);
  CHECK(near(most.part, 0.2) && most.kinds == adamw && most.kind == adamw &&
        near(most.seen_bytes_per_s, 72e9) && near(most.known_bytes_per_s, 90e9));
  ps__arena_adopt(&hw, seen, N);
  CHECK(near(hw.contention[0].host_bytes_per_s, 99e9) && near(hw.accumulate_bytes_per_s, 108.9e9));
  CHECK(near(hw.contention[1].d2h_bytes_per_s, 28e9) &&
        near(hw.contention[1].host_bytes_per_s, 60e9));
  CHECK(near(hw.contention[2].d2h_bytes_per_s, 36e9) &&
        near(hw.contention[2].host_bytes_per_s, 36e9) &&
        near(hw.contention[2].h2d_bytes_per_s, 40e9));
  CHECK(near(hw.optimizer_bytes_per_s, 72e9) && near(hw.optimizer_state_bytes_per_s, 64e9) &&
        near(hw.gather_bytes_per_s, 8e9) && near(hw.sumsq_bytes_per_s, 59.4e9));
  CHECK(near(hw.link[PS_LINK_H2D].bytes_per_s, 49e9) &&
        near(hw.link[PS_LINK_D2H].bytes_per_s, 55e9) &&
        near(hw.link[PS_LINK_H2D].duplex_bytes_per_s, 36e9));
  CHECK(near(hw.gpus_contention[0].host_bytes_per_s, 48e9));
  CHECK(ps__arena_differs(&hw, seen, 3).part < 1e-9 && !ps__arena_differs(&hw, seen, 0).kind);
}

static void an_arena_that_is_measured_stays_zero(void) {
  enum { BYTES = 33 << 20 };
  ps_hardware hw;
  ps_contention_rate seen[PS__ARENA_CASES];
  char *arena;
  uint32_t n = 9;
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  CHECK(ps__map((void **)&arena, BYTES, "an arena") == PS_OK);
  const ps__arena a = {.hw = &hw, .host = arena, .host_bytes = BYTES, .n_places = 2};
  CHECK(ps__arena_measure(&a, 0.1, seen, &n) == PS_OK && n == 2);
  for (uint32_t i = 0; i < n; i++)
    CHECK(seen[i].kinds == ps__arena_case[i] && seen[i].threads == 2 &&
          seen[i].host_bytes_per_s > SLOWEST && seen[i].h2d_bytes_per_s == 0);
  for (size_t i = 0; i < BYTES; i++)
    if (arena[i]) {
      CHECK(!"a byte is not zero");
      break;
    }
  const ps__arena small = {.hw = &hw, .host = arena, .host_bytes = BYTES, .n_places = 3};
  CHECK_FAILS(ps__arena_measure(&small, 0.02, seen, &n), PS_EBUDGET, "in 3 places takes 48.0 MiB");
  ps__unmap(arena, BYTES);
}

static void rates_of_several_passes_are_their_medians(void) {
  ps_hardware pass[3], hw;
  const char *key = "";
  for (int i = 0; i < 3; i++) {
    CHECK(ps_hardware_estimate(&pass[i], PS_BACKEND_CPU, 0, 2) == PS_OK);
    pass[i].accumulate_bytes_per_s = (double[]){8e9, 1e9, 4e9}[i];
    pass[i].gemm[PS_BF16][0] = (ps_gemm_rate){32, 0, 1e9 + i, 1e9, 1e9};
  }
  hw = pass[2];
  ps__hardware_median(&hw, (const ps_hardware *[]){&pass[0], &pass[1], &pass[2]}, 3);
  CHECK(hw.accumulate_bytes_per_s == 4e9 && hw.gemm[PS_BF16][0].forward_flops_per_s == 1e9 + 1);
  CHECK(near(ps__hardware_moved(&hw, pass, 3, &key), 7.0 / 4) &&
        strcmp(key, "accumulate_bytes_per_s") == 0);
}

/* ---- what a GPU's plans need later ----------------------------------------------------------- */

static void fp8_is_measured_where_a_gpu_has_it_and_its_rates_are_missing(void) {
  const ps_hardware gpu = {
      .backend = PS_BACKEND_CUDA, .compute_capability = 90, .measured = PS_MEASURED};
  ps_hardware other[] = {gpu, gpu, gpu, gpu};
  other[0].backend = PS_BACKEND_CPU;
  other[1].compute_capability = 86;
  other[2].measured = PS_ESTIMATED;
  other[3].gemm_fp8[0].rows = 256;
  CHECK(ps__hardware_lacks(&gpu, PS__EXTRA_FP8));
  for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
    const ps_hardware before = other[i];
    CHECK(!ps__hardware_lacks(&other[i], PS__EXTRA_FP8));
    CHECK(ps__hardware_extra(&other[i], &(ps_hardware_ask){.fp8 = 1}, PS__EXTRA_FP8) == PS_OK);
    CHECK(memcmp(&before, &other[i], sizeof before) == 0);
  }
}

/* Of what some models have. */
static void rates_are_measured_later_where_a_gpu_lacks_them(void) {
  static const ps__extra rates[] = {PS__EXTRA_EXPERTS, PS__EXTRA_DELTA, PS__EXTRA_HEADS512};
  const ps_hardware gpu = {
      .backend = PS_BACKEND_CUDA, .compute_capability = 80, .measured = PS_MEASURED};
  ps_hardware other[] = {gpu, gpu, gpu};
  other[0].backend = PS_BACKEND_CPU;
  other[1].measured = PS_ESTIMATED;
  other[2].gemm_grouped[0].rows = 64;
  other[2].delta[0].heads = 16;
  other[2].heads512_attention_flops_per_s = 1;
  for (const ps__extra *r = rates; r < rates + sizeof rates / sizeof *rates; r++) {
    CHECK(ps__hardware_lacks(&gpu, *r));
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
      const ps_hardware before = other[i];
      CHECK(!ps__hardware_lacks(&other[i], *r));
      CHECK(ps__hardware_extra(&other[i], &(ps_hardware_ask){0}, *r) == PS_OK);
      CHECK(memcmp(&before, &other[i], sizeof before) == 0);
    }
  }
}

/* On a machine without a GPU, what tries to measure fails. */
static void nothing_is_measured_beyond_a_cap_of_device_memory(void) {
  ps_hardware hw = {.backend = PS_BACKEND_CUDA, .compute_capability = 90, .measured = PS_MEASURED};
  const ps_hardware before = hw;
  const uint64_t takes = ps_hardware_measure_bytes(&hw);
  CHECK(ps_hardware_measure_bytes(&(ps_hardware){.backend = PS_BACKEND_CPU}) == 0);
  if (!takes) /* a build without CUDA */
    return;
  CHECK(takes > 4.5 * (1 << 30) && takes < 4.7 * (1 << 30));
  hw.device_overhead_bytes = (1ull << 30) + 5;
  CHECK(ps_hardware_measure_bytes(&hw) == takes + 5);
  hw.device_overhead_bytes = 0;
  CHECK(ps__hardware_extra(&hw, &(ps_hardware_ask){.device_mem_bytes = takes - 1}, PS__EXTRA_FP8) ==
        PS_OK);
  CHECK(memcmp(&before, &hw, sizeof hw) == 0);
  if (!ps_hardware_n_gpus())
    CHECK(ps__hardware_extra(&hw, &(ps_hardware_ask){.device_mem_bytes = takes}, PS__EXTRA_FP8) <
          0);
}

int main(int argc, char **argv) {
  ps_hardware measured;
  if (argc > 1 && !strcmp(argv[1], "threads")) {
    an_arena_that_is_measured_stays_zero();
    printf("ok an arena's rates\n");
    return 0;
  }
  rates_are_measured_once(&measured);
  what_trainings_saw_is_remembered(&measured);
  a_cap_leaves_estimates();
  without_a_cache_the_run_goes_on();
  wrong_asks_are_refused();
  fp8_is_measured_where_a_gpu_has_it_and_its_rates_are_missing();
  rates_are_measured_later_where_a_gpu_lacks_them();
  nothing_is_measured_beyond_a_cap_of_device_memory();
  rates_of_an_arena_replace_those_known();
  rates_of_several_passes_are_their_medians();
  an_arena_that_is_measured_stays_zero();
  printf("ok this machine's rates\n");
  return 0;
}
