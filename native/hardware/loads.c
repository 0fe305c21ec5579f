/* loads.c - the host's ops as measuring runs them. */
#include "hardware/loads.h"
#include <sched.h>

void ps__host_use_set(ps__host_bench *b, uint64_t i) {
  b->a = b->memory + i % b->n_sets * b->set_bytes;
  b->b = b->a + b->bytes;
  b->c = b->b + b->bytes;
  b->d = b->c + b->bytes;
}

void ps__host_launch(const ps__cpu_exec *exec, const ps_kernel *k, const void *args,
                     void *const *ptr, uint32_t n) {
  const ps_launch l = {.args = args, .ptr = ptr, .n_ptr = n, .exec = (void *)exec};
  (void)k->fn[PS_BACKEND_CPU](&l);
}

ps_recipe ps__host_recipe(const ps__host_bench *b) {
  return b->beside_gpu ? PS_RECIPE_BF16 : PS_RECIPE_FP32;
}
ps_dtype ps__host_dtype(const ps__host_bench *b) {
  return (ps_dtype)ps__recipes[ps__host_recipe(b)].weights.dtype;
}

void ps__host_update(ps__host_bench *b, ps__update_part part, uint32_t state_bits) {
  const ps__segment seg = {0, b->bytes / ps_dtype_bytes(ps__host_dtype(b)), 0.1f};
  const ps__update u = {.optimizer = PS_OPTIMIZER_ADAMW,
                        .recipe = ps__row_of(ps__host_recipe(b), state_bits),
                        .part = part,
                        .lr = 1e-4f,
                        .beta1 = 0.9f,
                        .beta2 = 0.95f,
                        .eps = 1e-8f,
                        .grad_scale = 1,
                        .c1 = 1,
                        .c2 = 1,
                        .seed = 1};
  const ps__arrays a = {.w = b->a, .grad = b->b, .state = {b->c, b->d}};
  ps__update_on_pool(b->exec.pool, &u, &seg, 1, &a, 0);
}
static void update_whole(ps__host_bench *b, const void *args) {
  (void)args;
  ps__host_update(b, PS_UPDATE_WHOLE, 0);
}

void ps__host_accumulate(ps__host_bench *b, const void *args) {
  void *ptr[2] = {b->b, b->a};
  ps__host_launch(&b->exec, &ps__k_accumulate_host, args, ptr, 2);
}

/* ---- a load ---------------------------------------------------------------------------------- */

enum { LOAD_PARTS = 16, LOAD_TURNS = LOAD_PARTS / 2 };

static void load_main(void *arg) {
  ps__load_loop *l = arg;
  for (uint64_t n = 0; !atomic_load(&l->stop); n++) {
    ps__host_bench part = l->whole;
    const uint64_t at = part.bytes / 2 + n / part.n_sets % LOAD_TURNS * (part.bytes / LOAD_PARTS);
    ps__host_use_set(&part, n);
    part.a += at, part.b += at, part.c += at, part.d += at;
    part.bytes /= LOAD_PARTS;
    l->run(&part, l->args);
    atomic_fetch_add(&l->n, 1);
  }
}

ps_status ps__load_start(void *arg) {
  ps__load_loop *l = arg;
  atomic_store(&l->stop, 0);
  atomic_store(&l->n, 0);
  PS_TRY(ps__thread_start(&l->thread, load_main, l, "ps-load"));
  while (!atomic_load(&l->n))
    sched_yield(); /* until its threads are at work */
  return PS_OK;
}

void ps__load_stop(void *arg) {
  ps__load_loop *l = arg;
  atomic_store(&l->stop, 1);
  ps__thread_join(l->thread);
}

double ps__load_bytes(void *arg) {
  ps__load_loop *l = arg;
  return l->bytes_a_run * (double)atomic_load(&l->n);
}

ps_status ps__host_loads_create(ps__host_loads *l, const ps__host_bench *b, uint32_t n_threads,
                                uint32_t n_sums) {
  const uint64_t n_elements = b->bytes / LOAD_PARTS / ps_dtype_bytes(ps__host_dtype(b));
  ps_status st = PS_OK;
  uint32_t n = 0;
  *l = (ps__host_loads){.sum = {.n = n_elements, .dt = (uint32_t)ps__host_dtype(b)},
                        .pool = {b->exec.pool}};
  for (uint32_t i = 0; st == PS_OK && i < n_sums; i++) {
    const uint32_t threads = (n_threads + (1u << i) - 1) >> i;
    if (n && threads == l->load[n - 1].threads)
      break;
    if (i)
      st = ps__pool_create(&l->pool[i], threads, "measure");
    l->at_work[n] = (ps__load_loop){.whole = *b,
                                    .run = ps__host_accumulate,
                                    .args = &l->sum,
                                    .bytes_a_run = 3.0 * (double)b->bytes / LOAD_PARTS};
    l->at_work[n].whole.exec.pool = l->pool[i];
    l->load[n] = (ps__host_load){&l->at_work[n], PS_CONTENTION_SUMS, threads,
                                 ps__load_start, ps__load_bytes,     ps__load_stop};
    n++;
  }
  l->at_work[n] = (ps__load_loop){
      .whole = *b,
      .run = update_whole,
      .bytes_a_run = (double)n_elements *
                     ps__update_bytes(PS_OPTIMIZER_ADAMW, ps__host_recipe(b), PS_UPDATE_WHOLE)};
  l->load[n] = (ps__host_load){&l->at_work[n], PS_CONTENTION_OPTIMIZER, n_threads,
                               ps__load_start, ps__load_bytes,          ps__load_stop};
  l->n = n + 1;
  return st;
}

void ps__host_loads_destroy(const ps__host_loads *l) {
  for (uint32_t i = 1; i < PS__SUM_THREADS; i++)
    ps__pool_destroy(l->pool[i]);
}
