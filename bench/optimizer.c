/* optimizer.c - measures the host's optimizers, and compares them with a copy on the same threads.
 *
 *   build/bench/optimizer [--optimizer NAME] [--params N] [--reps N] [--threads N[,N...]]
 *
 * For each optimizer (or the one given), recipe, instruction set, number of threads and part of the
 * update (the whole; where it splits, weights; state): parameters a second, bytes a second (the
 * bytes that must move: ps__update_bytes()) and the copy's bytes a second (read plus written). Copy
 * and update take turns, so that both see the same machine; medians after one warm-up. The copy is
 * the better of a plain loop of vector moves (memcpy) and one with non-temporal stores. One JSON
 * object a line. */
#include "core/core.h"
#include "optim/optim.h"
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#  include <emmintrin.h>
#endif

enum { TASK_ELEMENTS = 16384, MAX_REPS = 101, MAX_THREAD_COUNTS = 8 };

typedef struct state {
  uint64_t n;
  char *w, *m, *v, *grad;
  uint16_t *copy;
  ps__simd simd;
  ps__update u;
  int streaming; /* copy with non-temporal stores */
} state;

static void update_task(void *arg, int64_t task, uint32_t worker) {
  state *st = arg;
  uint64_t first = (uint64_t)task * TASK_ELEMENTS,
           n = st->n - first < TASK_ELEMENTS ? st->n - first : TASK_ELEMENTS;
  const ps__arrays all = {.w = st->w, .copy = st->copy, .grad = st->grad, .state = {st->m, st->v}},
                   a = ps__arrays_from(&all, st->u.recipe, first);
  ps__update_elements(st->simd, &st->u, n, &a, 0.1f, first);
}

static void copy_task(void *arg, int64_t task, uint32_t worker) {
  state *st = arg; /* w is copied to m: 4 n bytes each */
  size_t first = (size_t)task * TASK_ELEMENTS * 16, total = st->n * 4,
         n = total - first < TASK_ELEMENTS * 16 ? total - first : TASK_ELEMENTS * 16;
#if defined(__x86_64__)
  if (st->streaming) {
    const __m128i *src = (const __m128i *)(st->w + first);
    __m128i *dst = (__m128i *)(st->m + first);
    for (size_t i = 0; i + 4 <= n / 16; i += 4)
      for (size_t j = 0; j < 4; j++)
        _mm_stream_si128(dst + i + j, _mm_load_si128(src + i + j));
    _mm_sfence();
    return;
  }
#endif
  memcpy(st->m + first, st->w + first, n);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *t, int n) {
  qsort(t, (size_t)n, sizeof *t, ascending);
  return n % 2 ? t[n / 2] : 0.5 * (t[n / 2 - 1] + t[n / 2]);
}

static double seconds(ps__pool *pool, int64_t tasks, ps__task_fn fn, state *st) {
  uint64_t t0 = ps__now_ns();
  ps__pool_run(pool, tasks, fn, st);
  return (double)(ps__now_ns() - t0) * 1e-9;
}

static void measure(ps__pool *pool, state *st, int reps) {
  static const char *const simd_names[] = {"scalar", "avx2", "avx512"};
  static const char *const part_names[] = {"whole", "weights", "state"};
  double update[MAX_REPS], copy[2][MAX_REPS];
  int64_t copy_tasks = (int64_t)((st->n * 4 + TASK_ELEMENTS * 16 - 1) / (TASK_ELEMENTS * 16)),
          tasks = (int64_t)((st->n + TASK_ELEMENTS - 1) / TASK_ELEMENTS);
  memset(st->m, 0, st->n * 4);
  memset(st->v, 0, st->n * 4);
  for (int r = -1; r < reps; r++) { /* -1: warm-up */
    int rep = r < 0 ? 0 : r;
    for (st->streaming = 0; st->streaming < 2; st->streaming++)
      copy[st->streaming][rep] = seconds(pool, copy_tasks, copy_task, st);
    memset(st->m, 0, st->n * 4); /* the copy wrote there */
    st->u.step = (uint64_t)(r + 1);
    update[rep] = seconds(pool, tasks, update_task, st);
  }
  double plain = median(copy[0], reps), nontemporal = median(copy[1], reps),
         t = median(update, reps);
  double copy_gb_s = 8.0 * (double)st->n / (plain < nontemporal ? plain : nontemporal) * 1e-9;
  double bytes = ps__update_bytes(st->u.optimizer, st->u.recipe, st->u.part) * (double)st->n,
         gb_s = bytes / t * 1e-9;
  printf("{\"bench\":\"optimizer\",\"optimizer\":\"%s\",\"recipe\":\"%s\",\"state_bits\":%u,"
         "\"simd\":\"%s\",\"part\":\"%s\",\"threads\":%"
         "u,\"params\":%llu,\"reps\":%d,\"gparam_s\":%.3f,"
         "\"gb_s\":%.2f,\"copy_gb_s\":%.2f,\"of_copy\":%.3f}\n",
         ps_optimizer_name(st->u.optimizer), ps__recipes[st->u.recipe].name,
         ps__recipes[st->u.recipe].state_bits, simd_names[st->simd], part_names[st->u.part],
         ps__pool_size(pool), (unsigned long long)st->n, reps, (double)st->n / t * 1e-9, gb_s,
         copy_gb_s, gb_s / copy_gb_s);
  fflush(stdout);
}

static int fill(state *st) {
  struct {
    void **at;
    const char *what;
  } maps[] = {{(void **)&st->w, "weights"},
              {(void **)&st->m, "state[0]"},
              {(void **)&st->v, "state[1]"},
              {(void **)&st->grad, "gradients"},
              {(void **)&st->copy, "bf16 weights"}};
  for (size_t i = 0; i < sizeof maps / sizeof *maps; i++)
    if (ps__map(maps[i].at, st->n * 4, maps[i].what) != PS_OK)
      return 0;
  /* finite, of order 1, in both readings (fp32, and two bf16 each) */
  for (uint64_t i = 0; i < st->n; i++) {
    uint32_t r = (uint32_t)ps__sr_random(1, 2, i) & 0x007f007fu;
    ((uint32_t *)st->w)[i] = 0x3f803f80u | r;
    ((uint32_t *)st->grad)[i] = 0x3c003c00u | r;
  }
  memset(st->copy, 0, st->n * 2);
  return 1;
}

static int usage(void) {
  fprintf(stderr,
          "usage: optimizer [--optimizer NAME] [--params N>=1] [--reps 1..%d] "
          "[--threads N[,N...]]\n",
          MAX_REPS);
  return 2;
}

/* By its defaults; what an optimizer does not know is not read. */
static ps__update update_of(ps_optimizer o) {
  ps__update u = {.optimizer = o,
                  .lr = (float)ps_optimizer_default(o, PS_HYPER_LR),
                  .beta1 = (float)ps_optimizer_default(o, PS_HYPER_BETA1),
                  .beta2 = (float)ps_optimizer_default(o, PS_HYPER_BETA2),
                  .eps = (float)ps_optimizer_default(o, PS_HYPER_EPS),
                  .momentum = (float)ps_optimizer_default(o, PS_HYPER_MOMENTUM),
                  .grad_scale = 1.0f,
                  .seed = 1};
  ps__update_correct(&u, 1);
  return u;
}

static void measure_optimizer(ps__pool *pool, state *st, ps_optimizer o, int reps) {
  st->u = update_of(o);
  for (uint32_t row = 0; row < PS__N_ROWS; row++)
    for (int simd = 0; ps__recipes[row].arrays == row && simd <= (int)ps__simd_best(); simd++) {
      st->u.recipe = row;
      st->simd = (ps__simd)simd;
      for (int part = 0; part < (ps__optimizers[o].splits ? PS_N_UPDATE_PARTS : 1); part++) {
        st->u.part = (ps__update_part)part;
        measure(pool, st, reps);
      }
    }
}

int main(int argc, char **argv) {
  state st = {.n = 64u << 20};
  ps_optimizer only = PS_N_OPTIMIZERS; /* all */
  long threads[MAX_THREAD_COUNTS] = {1, 2}, reps = 7;
  int n_threads = 2;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 >= argc)
      return usage();
    if (!strcmp(argv[i], "--optimizer")) {
      if (ps_optimizer_parse(&only, argv[i + 1]) != PS_OK) {
        fprintf(stderr, "optimizer: %s\n", ps_last_error());
        return 2;
      }
    } else if (!strcmp(argv[i], "--params"))
      st.n = strtoull(argv[i + 1], NULL, 10);
    else if (!strcmp(argv[i], "--reps"))
      reps = strtol(argv[i + 1], NULL, 10);
    else if (!strcmp(argv[i], "--threads")) {
      n_threads = 0;
      for (char *p = argv[i + 1]; p && n_threads < MAX_THREAD_COUNTS;
           p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
        threads[n_threads++] = strtol(p, NULL, 10);
    } else
      return usage();
  }
  for (int i = 0; i < n_threads; i++)
    if (threads[i] < 1 || threads[i] > 1024)
      return usage();
  if (st.n < 1 || reps < 1 || reps > MAX_REPS)
    return usage();
  st.n = (st.n + 15) / 16 * 16; /* whole cache lines for the copy */
  if (!fill(&st)) {
    fprintf(stderr, "optimizer: %s\n", ps_last_error());
    return 1;
  }
  for (int t = 0; t < n_threads; t++) {
    ps__pool *pool;
    if (ps__pool_create(&pool, (uint32_t)threads[t], "bench") != PS_OK) {
      fprintf(stderr, "optimizer: %s\n", ps_last_error());
      return 1;
    }
    for (int o = 0; o < PS_N_OPTIMIZERS; o++)
      if (only == PS_N_OPTIMIZERS || (int)only == o)
        measure_optimizer(pool, &st, (ps_optimizer)o, (int)reps);
    ps__pool_destroy(pool);
  }
  return 0;
}
