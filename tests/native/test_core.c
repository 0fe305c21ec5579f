/* test_core.c - status, memory, files, threads, counters, pools, machine facts. */
#include "core/core.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(cond)                                                                                \
  do {                                                                                             \
    if (!(cond)) {                                                                                 \
      printf("FAIL %s:%d: %s (%s)\n", __FILE__, __LINE__, #cond, ps_last_error());                 \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

static char logged[256];
static void log_line_fn(void *user, ps_log_level level, const char *message) {
  (void)level;
  snprintf(logged, sizeof logged, "%s%s", (const char *)user, message);
  /* must not call the log function again, nor wait for its own lock */
  ps__fail(PS_EINVAL, "from inside the log function");
}

static void test_status(void) {
  CHECK(strcmp(ps_status_name(PS_EBUDGET), "PS_EBUDGET") == 0 &&
        strcmp(ps_status_name(5), "PS_E?") == 0);
  CHECK(ps__fail(PS_EIO, "a\nb %d", 7) == PS_EIO && strcmp(ps_last_error(), "a b 7") == 0);
  CHECK(ps__fail(PS_EIO, "op: %s", ps_last_error()) == PS_EIO &&
        strcmp(ps_last_error(), "op: a b 7") == 0);
  ps_log_set(log_line_fn, "> ");
  ps__log(PS_LOG_INFO, "line %d", 1);
  CHECK(strcmp(logged, "> line 1") == 0);
  ps_log_set(NULL, NULL);
  char buf[32];
  CHECK(strcmp(ps__format_bytes(buf, 3), "3 B") == 0);
  CHECK(strcmp(ps__format_bytes(buf, (uint64_t)512 << 20), "512.0 MiB") == 0);
  CHECK(strcmp(ps__format_bytes(buf, UINT64_MAX), "16.0 EiB") == 0);
  const struct {
    uint64_t x, y;
    const char *a, *b;
  } apart[] = {{3 << 20, 2 << 20, "3.0 MiB", "2.0 MiB"},
               {2097152, 2097152 - 4096, "2.000 MiB", "1.996 MiB"},
               {2097152, 2097151, "2097152 B", "2097151 B"},
               {100, 99, "100 B", "99 B"},
               {7 << 20, 7 << 20, "7.0 MiB", "7.0 MiB"}};
  for (size_t i = 0; i < sizeof apart / sizeof *apart; i++) {
    char other[32];
    ps__format_bytes_apart(buf, apart[i].x, other, apart[i].y);
    CHECK(strcmp(buf, apart[i].a) == 0 && strcmp(other, apart[i].b) == 0);
  }
  CHECK(ps_abi_size("ps_op") > 0 && ps_abi_size("nothing") == 0 && ps_abi_size(NULL) == 0);
  printf("ok status\n");
}

static void test_memory(void) {
  int64_t before = ps__live_allocations();
  int *items = NULL;
  size_t cap = 0;
  for (int i = 0; i < 1000; i++) {
    CHECK(ps__grow((void **)&items, (size_t)i, &cap, sizeof *items));
    items[i] = i;
  }
  CHECK(items[999] == 999 && ps__live_allocations() == before + 1);
  ps__free(items);
  void *p = (void *)1;
  CHECK(ps__map(&p, ((size_t)5 << 20) + 1, "arena") == PS_OK &&
        (uintptr_t)p % ((size_t)2 << 20) == 0);
  CHECK(((char *)p)[(size_t)5 << 20] == 0);
  ps__unmap(p, ((size_t)5 << 20) + 1);
  p = (void *)1;
  CHECK(ps__map(&p, SIZE_MAX - 5, "too much") == PS_ENOMEM && p == (void *)1 &&
        strstr(ps_last_error(), "too much"));
  ps__fault_arm(PS_FAULT_ALLOC, 2);
  void *a = ps__malloc(8), *b = ps__malloc(8), *c = ps__malloc(8);
  CHECK(a && !b && c && ps__fault_count(PS_FAULT_ALLOC) == 3);
  ps__fault_arm(PS_FAULT_ALLOC, 0);
  ps__free(a);
  ps__free(c);
  CHECK(ps__live_allocations() == before);
  printf("ok memory\n");
}

static void test_files(void) {
  char path[] = "/tmp/ps_test_core_XXXXXX", text[8];
  int fd = mkstemp(path);
  CHECK(fd >= 0 && ps__write_all(fd, path, "01234567", 8) == PS_OK);
  CHECK(ps__pread_all(fd, path, text, 4, 4) == PS_OK && memcmp(text, "4567", 4) == 0);
  CHECK(ps__pread_all(fd, path, text, 4, 6) == PS_EIO && strstr(ps_last_error(), "2 bytes before"));
  ps__fault_arm(PS_FAULT_READ, 1);
  CHECK(ps__pread_all(fd, path, text, 4, 4) == PS_EIO && strstr(ps_last_error(), path));
  close(fd);
  unlink(path);
  CHECK(ps__write_all(fd, path, "0", 1) == PS_EIO);
  printf("ok files\n");
}

/* Two threads pass a counter back and forth: every lost wake-up hangs. */
typedef struct ping {
  ps__counter *mine, *theirs;
  uint64_t n;
} ping;
static void ping_main(void *arg) {
  ping *p = arg;
  for (uint64_t i = 1; i <= p->n; i++) {
    ps__counter_signal(p->mine, i);
    CHECK(ps__counter_wait(p->theirs, i, NULL));
  }
}

static void wait_for_abort(void *arg) {
  void **a = arg;
  CHECK(!ps__counter_wait(a[0], 5, a[1]));
}

static void test_counters(uint64_t n) {
  static ps__counter t[2];
  ps__counter_init(&t[0]);
  ps__counter_init(&t[1]);
  ping a = {&t[0], &t[1], n}, b = {&t[1], &t[0], n};
  ps__thread *ta, *tb, *tc;
  CHECK(ps__thread_start(&ta, ping_main, &a, "ping") == PS_OK &&
        ps__thread_start(&tb, ping_main, &b, "pong") == PS_OK);
  ps__thread_join(ta);
  ps__thread_join(tb);
  _Atomic uint32_t stop = 0;
  ps__counter_init(&t[0]);
  void *args[] = {&t[0], &stop};
  CHECK(ps__thread_start(&tc, wait_for_abort, args, "sleeper") == PS_OK);
  usleep(2000);
  atomic_store(&stop, 1);
  ps__counter_wake(&t[0]);
  ps__thread_join(tc);
  printf("ok counters\n");
}

typedef struct sums {
  int64_t *seen;
  _Atomic int64_t total;
  uint32_t n_workers;
} sums;
static void sum_task(void *arg, int64_t task, uint32_t worker) {
  sums *s = arg;
  CHECK(worker < s->n_workers);
  s->seen[task]++;
  atomic_fetch_add(&s->total, task);
}

static void own_task(void *arg, int64_t task, uint32_t worker) {
  CHECK(worker == 0);
  sum_task(arg, task, worker);
}

static void test_pools(int rounds) {
  int64_t before = ps__live_allocations();
  for (uint32_t n_threads = 1; n_threads <= 5; n_threads++) {
    ps__pool *p;
    CHECK(ps__pool_create(&p, n_threads, "pool") == PS_OK && ps__pool_size(p) == n_threads);
    for (int r = 0; r < rounds; r++) {
      int64_t n = (r * 7) % 40, seen[40] = {0};
      sums s = {seen, 0, n_threads};
      const uint32_t some = 1 + (uint32_t)r % (n_threads + 1);
      if (some > n_threads)
        ps__pool_run(p, n, sum_task, &s);
      else
        ps__pool_run_some(p, some, n, some == 1 ? own_task : sum_task, &s);
      CHECK(s.total == n * (n - 1) / 2);
      for (int64_t i = 0; i < 40; i++)
        CHECK(seen[i] == (i < n));
    }
    ps__pool_destroy(p);
  }
  ps__pool *p = NULL;
  ps__fault_arm(PS_FAULT_THREAD, 3);
  CHECK(ps__pool_create(&p, 5, "pool") == PS_EDEVICE && p == NULL);
  ps__fault_arm(PS_FAULT_THREAD, 0);
  CHECK(ps__live_allocations() == before);
  printf("ok pools\n");
}

/* Two tasks that each wait for the other to begin: two threads must run them. */
typedef struct meeting {
  _Atomic int n_begun, n_met;
} meeting;

static void meet_task(void *arg, int64_t task, uint32_t worker) {
  meeting *m = arg;
  const uint64_t until = ps__now_ns() + 300000000000u;
  atomic_fetch_add(&m->n_begun, 1);
  while (atomic_load(&m->n_begun) < 2 && ps__now_ns() < until)
    sched_yield();
  atomic_fetch_add(&m->n_met, atomic_load(&m->n_begun) >= 2);
}

typedef struct helpers {
  ps__pool *pool;
  _Atomic int stop;
  int64_t n_wrong;
} helpers;

static void help_main(void *arg) {
  helpers *h = arg;
  while (!atomic_load(&h->stop)) {
    int64_t seen[40] = {0};
    sums s = {seen, 0, ps__pool_size(h->pool)};
    ps__pool_run(h->pool, 40, sum_task, &s);
    h->n_wrong += s.total != 40 * 39 / 2;
  }
}

/* A pool of one thread runs what needs two, because another pool's workers help it. */
static void test_pools_help(int rounds) {
  for (uint32_t n_threads = 1; n_threads <= 3; n_threads++) {
    ps__pool *p;
    helpers h = {0};
    ps__thread *thread;
    CHECK(ps__pool_create(&p, 1, "pool") == PS_OK &&
          ps__pool_create(&h.pool, n_threads, "helpers") == PS_OK);
    ps__pool_help(p); /* it runs nothing */
    ps__pool_share(p);
    ps__pool_help_first(h.pool, p);
    CHECK(ps__thread_start(&thread, help_main, &h, "help") == PS_OK);
    for (int r = 0; r < rounds; r++) {
      int64_t n = (r * 7) % 40, seen[40] = {0};
      sums s = {seen, 0, 2}; /* numbers of workers: p's, and that of all helpers */
      meeting m = {0};
      ps__pool_run(p, n, sum_task, &s);
      CHECK(s.total == n * (n - 1) / 2);
      for (int64_t i = 0; i < 40; i++)
        CHECK(seen[i] == (i < n));
      ps__pool_run(p, 2, meet_task, &m);
      CHECK(m.n_met == 2);
    }
    atomic_store(&h.stop, 1);
    ps__thread_join(thread);
    CHECK(h.n_wrong == 0);
    ps__pool_destroy(h.pool);
    ps__pool_destroy(p);
  }
  printf("ok pools that help\n");
}

static void test_machine(void) {
  CHECK(ps__n_cpus() >= 1 && ps__n_cpus() <= (uint32_t)sysconf(_SC_NPROCESSORS_CONF));
  uint64_t limit = ps__host_memory_limit();
  CHECK(limit > (uint64_t)64 << 20 && limit < (uint64_t)1 << 50);
  setenv("SLURM_MEM_PER_NODE", "32", 1);
  CHECK(ps__host_memory_limit() == (uint64_t)32 << 20);
  unsetenv("SLURM_MEM_PER_NODE");
  CHECK(ps__resident_bytes() > 0 && ps__resident_peak_bytes() >= ps__resident_bytes() / 2);
  printf("ok machine\n");
}

int main(int argc, char **argv) {
  int scale = argc > 1 ? atoi(argv[1]) : 1;
  test_status();
  test_memory();
  test_files();
  test_counters((uint64_t)(20000 / scale));
  test_pools(4000 / scale);
  test_pools_help(1000 / scale);
  test_machine();
  return 0;
}
