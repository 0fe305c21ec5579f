/* hog.c - other work beside a training: threads that copy host memory at a chosen rate.
 *
 * usage: hog [--threads N] [--gb-per-s X] [--seconds S] [--mib M]
 *   --threads N    that copy (default 3)
 *   --gb-per-s X   bytes that all of them copy, in GB a second; memory moves twice as many, as each
 *                  is read and written (default 0: as many as they can)
 *   --seconds S    how long (default 0: until SIGTERM or SIGINT)
 *   --mib M        of each thread's two buffers, between which it copies (default 256: more than
 *                  caches hold)
 *
 * At the end one line of JSON on stdout says what was reached: "threads", "seconds", "gb_per_s",
 * "asked_gb_per_s". Exit status: 0; 1 where something failed; 2 for a wrong option. */
#include "core/core.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_THREADS = 1024, PIECE = 1 << 20 };

static _Atomic bool over;

typedef struct copier {
  pthread_t thread;
  char *from, *to;
  uint64_t bytes, copied; /* of a buffer; so far */
  double bytes_per_s;     /* 0: as many as it can */
} copier;

static void on_signal(int number) {
  (void)number;
  atomic_store(&over, true);
}

static double now_s(void) { return (double)ps__now_ns() * 1e-9; }

/* A piece is copied when its time has come. A thread that falls behind does not catch up by more
 * than a tenth of a second, which would be a burst. */
static void *copy_on(void *arg) {
  copier *c = arg;
  double due = now_s();
  for (uint64_t at = 0; !atomic_load(&over); at = at + 2 * PIECE <= c->bytes ? at + PIECE : 0) {
    memcpy(c->to + at, c->from + at, PIECE);
    c->copied += PIECE;
    if (!(c->bytes_per_s > 0))
      continue;
    const double now = now_s();
    due += PIECE / c->bytes_per_s;
    due = due < now - 0.1 ? now - 0.1 : due;
    if (due > now)
      nanosleep(&(struct timespec){(time_t)(due - now),
                                   (long)((due - now - (double)(time_t)(due - now)) * 1e9)},
                NULL);
  }
  return NULL;
}

static bool begin(copier *c, uint64_t bytes, double bytes_per_s) {
  *c = (copier){
      .from = malloc(bytes), .to = malloc(bytes), .bytes = bytes, .bytes_per_s = bytes_per_s};
  if (!c->from || !c->to)
    return false;
  memset(c->from, 1, bytes);
  memset(c->to, 2, bytes);
  return true;
}

static int run(uint32_t n, double gb_per_s, double seconds, uint64_t bytes) {
  static copier copiers[MOST_THREADS];
  uint64_t copied = 0;
  uint32_t n_started = 0;
  for (uint32_t i = 0; i < n; i++)
    if (!begin(&copiers[i], bytes, gb_per_s * 1e9 / n)) {
      fprintf(stderr, "hog: no memory for %u threads with two buffers of %llu MiB\n", n,
              (unsigned long long)(bytes >> 20));
      return 1;
    }
  const double from = now_s();
  while (n_started < n &&
         pthread_create(&copiers[n_started].thread, NULL, copy_on, &copiers[n_started]) == 0)
    n_started++;
  if (n_started < n) {
    fprintf(stderr, "hog: only %u of %u threads could be started\n", n_started, n);
    atomic_store(&over, true);
  }
  while (!atomic_load(&over) && (seconds <= 0 || now_s() - from < seconds))
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  const double took = now_s() - from;
  atomic_store(&over, true);
  for (uint32_t i = 0; i < n_started; i++)
    pthread_join(copiers[i].thread, NULL);
  for (uint32_t i = 0; i < n; i++) {
    copied += copiers[i].copied;
    free(copiers[i].from);
    free(copiers[i].to);
  }
  printf("{\"threads\": %u, \"seconds\": %.3f, \"gb_per_s\": %.3f, \"asked_gb_per_s\": %.3f}\n", n,
         took, (double)copied / took * 1e-9, gb_per_s);
  return n_started < n;
}

int main(int argc, char **argv) {
  double threads = 3, gb_per_s = 0, seconds = 0, mib = 256;
  const struct {
    const char *name;
    double *value, least, most;
  } options[] = {{"--threads", &threads, 1, MOST_THREADS},
                 {"--gb-per-s", &gb_per_s, 0, 1e6},
                 {"--seconds", &seconds, 0, 1e9},
                 {"--mib", &mib, 1, 1 << 20}};
  for (int i = 1; i < argc; i += 2) {
    bool known = false;
    for (size_t k = 0; k < sizeof options / sizeof *options; k++) {
      char *end = NULL;
      if (strcmp(argv[i], options[k].name) || i + 1 == argc)
        continue;
      const double x = strtod(argv[i + 1], &end);
      if (end == argv[i + 1] || *end || !(x >= options[k].least && x <= options[k].most)) {
        fprintf(stderr, "hog: %s %s: give %g to %g\n", argv[i], argv[i + 1], options[k].least,
                options[k].most);
        return 2;
      }
      *options[k].value = x;
      known = true;
    }
    if (!known) {
      fprintf(stderr, "hog: %s: give --threads N, --gb-per-s X, --seconds S or --mib M\n", argv[i]);
      return 2;
    }
  }
  signal(SIGTERM, on_signal);
  signal(SIGINT, on_signal);
  return run((uint32_t)threads, gb_per_s, seconds, (uint64_t)mib << 20);
}
