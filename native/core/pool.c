/* pool.c - a pool of threads for data-parallel loops. */
#include "core/core.h"
#include <stdatomic.h>

/* A job is published by setting n_left. A worker that lowers n_left from r to r-1 has claimed task
 * n - r. The caller cannot return while a claimed task is unfinished, so that a worker with a
 * claimed task may read the job without a lock. A worker that comes late finds n_left 0, or claims
 * a task of a newer job, which does no harm. A thread that helps is such a worker, without a number
 * of its own. */
typedef struct worker {
  ps__pool *pool;
  ps__thread *thread;
  uint32_t idx;
} worker;

struct ps__pool {
  ps__counter start; /* number of the job */
  ps__counter done;  /* number of the last job that a worker other than the caller finished */
  _Alignas(64) _Atomic int64_t n_left;
  _Alignas(64) _Atomic int64_t n_finished;
  _Alignas(64) ps__task_fn fn; /* the job */
  void *arg;
  int64_t n_tasks;
  uint64_t job;
  _Atomic uint32_t stop;
  /* Workers from this index on take no task. A worker that is late may see another job's limit,
   * which costs speed alone. */
  _Atomic uint32_t limit;
  _Atomic(ps__pool *) first; /* which all threads help before each task; NULL: none */
  bool shared;
  uint32_t n_threads;
  worker workers[]; /* n_threads - 1 */
};

static void help_first(ps__pool *p) {
  ps__pool *first = atomic_load_explicit(&p->first, memory_order_relaxed);
  if (first)
    ps__pool_help(first);
}

/* Claim and run tasks until none is left. True: the last task of job *job ended in this call. */
static bool work(ps__pool *p, uint32_t idx, uint64_t *job) {
  bool last = false;
  int64_t left = atomic_load_explicit(&p->n_left, memory_order_relaxed);
  while (left > 0) {
    help_first(p);
    if (!atomic_compare_exchange_weak_explicit(&p->n_left, &left, left - 1, memory_order_acq_rel,
                                               memory_order_relaxed))
      continue;
    int64_t n = p->n_tasks;
    *job = p->job;
    p->fn(p->arg, n - left, idx);
    last = atomic_fetch_add_explicit(&p->n_finished, 1, memory_order_acq_rel) + 1 == n;
    left = last ? 0 : atomic_load_explicit(&p->n_left, memory_order_relaxed);
  }
  return last;
}

static void worker_main(void *arg) {
  worker *w = arg;
  ps__pool *p = w->pool;
  uint64_t job = 0;
  for (uint64_t seen = 0;;) {
    if (!ps__counter_wait(&p->start, seen + 1, &p->stop) || atomic_load(&p->stop))
      return;
    seen = atomic_load(&p->start.value);
    if (w->idx < atomic_load_explicit(&p->limit, memory_order_relaxed) && work(p, w->idx, &job))
      ps__counter_signal(&p->done, job);
  }
}

ps_status ps__pool_create(ps__pool **out, uint32_t n_threads, const char *name) {
  if (n_threads == 0 || n_threads > 4096)
    return ps__fail(PS_EINVAL, "pool %s: n_threads %u is not in 1..4096", name, n_threads);
  void *memory; /* mapped: the struct is aligned to cache lines */
  size_t bytes = sizeof(ps__pool) + (n_threads - 1) * sizeof(worker);
  PS_TRY(ps__map(&memory, bytes, name));
  ps__pool *p = memory;
  ps__counter_init(&p->start);
  ps__counter_init(&p->done);
  p->n_threads = n_threads;
  for (uint32_t i = 0; i + 1 < n_threads; i++) {
    p->workers[i] = (worker){.pool = p, .idx = i + 1};
    ps_status st = ps__thread_start(&p->workers[i].thread, worker_main, &p->workers[i], name);
    if (st != PS_OK) {
      ps__pool_destroy(p);
      return st;
    }
  }
  *out = p;
  return PS_OK;
}

void ps__pool_destroy(ps__pool *p) {
  if (!p)
    return;
  atomic_store(&p->stop, 1);
  ps__counter_wake(&p->start);
  for (uint32_t i = 0; i + 1 < p->n_threads; i++)
    ps__thread_join(p->workers[i].thread);
  ps__unmap(p, sizeof(ps__pool) + (p->n_threads - 1) * sizeof(worker));
}

uint32_t ps__pool_size(const ps__pool *p) { return p->n_threads; }

void ps__pool_share(ps__pool *p) { p->shared = true; }

void ps__pool_help(ps__pool *p) {
  uint64_t job;
  if (work(p, p->n_threads, &job))
    ps__counter_signal(&p->done, job);
}

void ps__pool_help_first(ps__pool *p, ps__pool *first) {
  atomic_store_explicit(&p->first, first, memory_order_relaxed);
}

void ps__pool_run(ps__pool *p, int64_t n_tasks, ps__task_fn fn, void *arg) {
  ps__pool_run_some(p, p->n_threads, n_tasks, fn, arg);
}

void ps__pool_run_some(ps__pool *p, uint32_t n_threads, int64_t n_tasks, ps__task_fn fn,
                       void *arg) {
  if (n_tasks <= 1 || (!p->shared && (p->n_threads == 1 || n_threads == 1))) {
    for (int64_t i = 0; i < n_tasks; i++) {
      help_first(p);
      fn(arg, i, 0);
    }
    return;
  }
  p->fn = fn;
  p->arg = arg;
  p->n_tasks = n_tasks;
  uint64_t job = ++p->job, last_job;
  atomic_store_explicit(&p->limit, n_threads, memory_order_relaxed);
  atomic_store_explicit(&p->n_finished, 0, memory_order_relaxed);
  atomic_store_explicit(&p->n_left, n_tasks, memory_order_release);
  ps__counter_signal(&p->start, job);
  if (!work(p, 0, &last_job))
    ps__counter_wait(&p->done, job, NULL);
}
