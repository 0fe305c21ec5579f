/* loads.h - the host's ops as measuring runs them: on buffers in sets, once or in a loop beside
 * copies. */
#ifndef PS_HARDWARE_LOADS_H
#define PS_HARDWARE_LOADS_H
#include "backends/cuda/probe.h"
#include "kernels/cpu/cpu.h"
#include "optim/optim.h"
#include <stdatomic.h>

typedef struct ps__host_bench {
  ps__cpu_exec exec;
  ps__pool *io;        /* the io stream's threads */
  char *a, *b, *c, *d; /* four buffers: those of one of the sets */
  uint64_t bytes;      /* of each */
  char *memory;        /* n_sets sets: four buffers and, beside a GPU, what copies read and write */
  uint64_t set_bytes;
  uint32_t n_sets;
  const int32_t *ids;
  double seconds; /* for each case */
  bool beside_gpu;
} ps__host_bench;

typedef void (*ps__host_case_fn)(ps__host_bench *b, const void *args);

/* ps__host_use_set() - the buffers of set @i, modulo their number.
 * ps__host_launch() - kernel @k of the CPU backend.
 * ps__host_recipe(), ps__host_dtype() - what usually trains there.
 * ps__host_update() - AdamW, or a part of it, on the whole buffers: w in a, gradients in b, moments
 *     in c and d.
 * ps__host_accumulate() - a ps__host_case_fn: adds b to a. @args: ps__args_accumulate. */
void ps__host_use_set(ps__host_bench *b, uint64_t i);
void ps__host_launch(const ps__cpu_exec *exec, const ps_kernel *k, const void *args,
                     void *const *ptr, uint32_t n);
ps_recipe ps__host_recipe(const ps__host_bench *b);
ps_dtype ps__host_dtype(const ps__host_bench *b);
void ps__host_update(ps__host_bench *b, ps__update_part part, uint32_t state_bits);
void ps__host_accumulate(ps__host_bench *b, const void *args);

/* A load: the optimizer, or sums of gradients, in a loop on a thread of its own. It works on a
 * sixteenth of a buffer at a time: long enough to keep all threads busy, short enough to be
 * counted. It takes one after the other in the buffers' second halves, in all sets in turn, so that
 * no cache holds them. */
typedef struct ps__load_loop {
  ps__host_bench whole;
  ps__host_case_fn run;
  const void *args;
  double bytes_a_run;
  ps__thread *thread;
  _Atomic uint32_t stop;
  _Atomic uint64_t n;
} ps__load_loop;
/* Of a ps__load_loop, as a ps__host_load has them. */
ps_status ps__load_start(void *arg);
double ps__load_bytes(void *arg);
void ps__load_stop(void *arg);

/* Numbers of threads on which sums are measured beside copies: all, a half, a quarter. */
enum { PS__SUM_THREADS = 3 };

/* The host's work that runs beside copies: sums on several numbers of threads, and the
 * optimizer. */
typedef struct ps__host_loads {
  ps__args_accumulate sum;
  ps__load_loop at_work[PS__SUM_THREADS + 1];
  ps__host_load load[PS__SUM_THREADS + 1];
  ps__pool *pool[PS__SUM_THREADS]; /* the first is the bench's */
  uint32_t n;
} ps__host_loads;
/* ps__host_loads_create() - loads on the sets of @b, sums on at most @n_sums numbers of threads.
 * Errors: PS_ENOMEM, PS_EDEVICE (threads); ps__host_loads_destroy() also then. */
ps_status ps__host_loads_create(ps__host_loads *l, const ps__host_bench *b, uint32_t n_threads,
                                uint32_t n_sums);
void ps__host_loads_destroy(const ps__host_loads *l);
#endif
