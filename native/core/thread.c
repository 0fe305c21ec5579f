/* thread.c - threads, time, and counters that only grow, on a futex. */
#include "core/core.h"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t ps__now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- threads --------------------------------------------------------------------------------- */

struct ps__thread {
  pthread_t id;
  void (*fn)(void *);
  void *arg;
  sem_t ready; /* posted when the thread has mapped all that its start takes */
  char name[16];
};

/* threads of the library, and the caller's, that do not sleep on a counter */
static _Atomic int n_awake = 1;

static void *thread_main(void *arg) {
  ps__thread *t = arg;
  pthread_setname_np(pthread_self(), t->name);
  /* The thread's first touch of thread-local data. In a library that was opened at run time it
   * calls malloc, which maps 64 MiB of address space or more for a thread's first allocation. */
  ps__clear_error();
  sem_post(&t->ready);
  t->fn(t->arg);
  atomic_fetch_sub_explicit(&n_awake, 1, memory_order_relaxed);
  return NULL;
}

/* Kernels and their libraries need some stack. The system's size (ulimit -s) counts, unless it is
 * tiny. */
enum { LEAST_STACK_BYTES = 1 << 20 };
static int start(ps__thread *t) {
  pthread_attr_t attr;
  size_t bytes;
  int err = pthread_attr_init(&attr);
  if (err)
    return err;
  if (pthread_attr_getstacksize(&attr, &bytes) == 0 && bytes < LEAST_STACK_BYTES)
    err = pthread_attr_setstacksize(&attr, LEAST_STACK_BYTES);
  if (!err)
    err = pthread_create(&t->id, &attr, thread_main, t);
  pthread_attr_destroy(&attr);
  return err;
}

ps_status ps__thread_start(ps__thread **out, void (*fn)(void *), void *arg, const char *name) {
  ps__thread *t = ps__calloc(1, sizeof *t);
  if (!t)
    return ps__fail(PS_ENOMEM, "thread %s: out of memory", name);
  t->fn = fn;
  t->arg = arg;
  sem_init(&t->ready, 0, 0);
  snprintf(t->name, sizeof t->name, "%s", name);
  sigset_t all, before; /* the program's own threads handle signals */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  atomic_fetch_add_explicit(&n_awake, 1, memory_order_relaxed);
  int err = ps__fault_hit(PS_FAULT_THREAD) ? EAGAIN : start(t);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (err) {
    atomic_fetch_sub_explicit(&n_awake, 1, memory_order_relaxed);
    ps__free(t);
    return ps__fail(PS_EDEVICE, "thread %s could not be started: %s", name, strerror(err));
  }
  while (sem_wait(&t->ready) != 0) /* EINTR: a signal handler ran */
    continue;
  ps__live_add(1);
  *out = t;
  return PS_OK;
}

void ps__thread_join(ps__thread *t) {
  if (!t)
    return;
  pthread_join(t->id, NULL);
  ps__live_add(-1);
  ps__free(t);
}

/* Linux keeps this for each thread, and a thread inherits it from the one that starts it. Where it
 * is refused, the thread runs as others do. */
void ps__thread_background(void) {
  enum { LOWEST = 19 };
  (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), LOWEST);
}

bool ps__cores_idle(void) {
  static _Atomic int n_cpus;
  int n = atomic_load_explicit(&n_cpus, memory_order_relaxed);
  if (n == 0) {
    n = (int)ps__n_cpus();
    atomic_store_explicit(&n_cpus, n, memory_order_relaxed);
  }
  return atomic_load_explicit(&n_awake, memory_order_relaxed) <= n;
}

/* ---- counters -----------------------------------------------------------------------------------
 * A sleeper lowers next_wake to the value that it waits for, then reads value once more. The
 * signaller stores value, then reads next_wake. All four accesses are sequentially consistent, so
 * that at least one of the two sees the other's store.
 *
 * The signaller resets next_wake before it changes wake_word. A sleeper whose request was reset
 * with those of others has read the old wake_word. It therefore does not sleep, but checks value
 * again and, if need be, lowers next_wake again. */

enum { SPINS = 256 }; /* 3 to 12 us: about the time of sleeping and waking */

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void futex(_Atomic uint32_t *word, int what, uint32_t value) {
  syscall(SYS_futex, (uint32_t *)word, what | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

void ps__counter_init(ps__counter *t) {
  atomic_init(&t->value, 0);
  atomic_init(&t->next_wake, UINT64_MAX);
  atomic_init(&t->wake_word, 0);
}

void ps__counter_wake(ps__counter *t) {
  int saved = errno; /* a signal handler may call this, by ps_run_cancel() */
  atomic_fetch_add(&t->wake_word, 1);
  futex(&t->wake_word, FUTEX_WAKE, INT_MAX);
  errno = saved;
}

void ps__counter_signal(ps__counter *t, uint64_t value) {
  atomic_store(&t->value, value);
  if (value >= atomic_load(&t->next_wake)) {
    atomic_store(&t->next_wake, UINT64_MAX);
    ps__counter_wake(t);
  }
}

static void request_wake(ps__counter *t, uint64_t value) {
  uint64_t lowest = atomic_load(&t->next_wake);
  while (value < lowest && !atomic_compare_exchange_weak(&t->next_wake, &lowest, value))
    ;
}

bool ps__counter_wait(ps__counter *t, uint64_t value, const _Atomic uint32_t *abort_flag) {
  if (atomic_load_explicit(&t->value, memory_order_acquire) >= value)
    return true;
  for (int spins = SPINS; spins > 0 && ps__cores_idle(); spins--) {
    relax();
    if (atomic_load_explicit(&t->value, memory_order_acquire) >= value)
      return true;
  }
  for (;;) {
    uint32_t word = atomic_load(&t->wake_word);
    request_wake(t, value);
    if (atomic_load(&t->value) >= value)
      return true;
    if (abort_flag && atomic_load(abort_flag) != 0)
      return false;
    atomic_fetch_sub_explicit(&n_awake, 1, memory_order_relaxed);
    futex(&t->wake_word, FUTEX_WAIT, word);
    atomic_fetch_add_explicit(&n_awake, 1, memory_order_relaxed);
  }
}
