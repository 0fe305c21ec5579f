/* bench_time.c - how long kernels and copies take on a GPU that is bound by its power. */
#include "backends/cuda/bench.h"

ps_status ps__bench_launch(ps__bench *b, const ps_kernel *k, const void *args, void *const *ptr,
                           uint32_t n) {
  const ps_launch l = {.args = args, .ptr = ptr, .n_ptr = n, .exec = &b->exec};
  return k->fn[PS_BACKEND_CUDA](&l);
}

ps_status ps__bench_settle(ps__bench *b) {
  CUresult r = b->cu->StreamSynchronize(b->exec.stream);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamSynchronize(b->in);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamSynchronize(b->out);
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(b->cu, r, "cuStreamSynchronize");
}

ps_status ps__bench_copy(ps__bench *b, CUstream stream, void *dst, const void *src) {
  PS__CUDA_TRY(b->cu,
               MemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, COPY, stream));
  return PS_OK;
}
ps_status ps__bench_copy_in(ps__bench *b) {
  return ps__bench_copy(b, b->in, value(b, COPIED), place(b, b->n_copied[0]++));
}
ps_status ps__bench_copy_out(ps__bench *b) {
  return ps__bench_copy(b, b->out, place(b, b->n_copied[1]++) + COPY, value(b, Y));
}
ps_status ps__bench_copy_both(ps__bench *b) {
  PS_TRY(ps__bench_copy_in(b));
  return ps__bench_copy_out(b);
}

ps_status ps__bench_time_case(ps__bench *b, ps__bench_fn fn, double seconds, double *out) {
  uint64_t n = 0, half = 0;
  PS_TRY(fn(b));
  PS_TRY(ps__bench_settle(b));
  const uint64_t begin = ps__now_ns();
  uint64_t at_half = begin;
  while (n - half < 4 || seconds_since(begin) < seconds) {
    for (int i = 0; i < 4; i++, n++)
      PS_TRY(fn(b));
    PS_TRY(ps__bench_settle(b));
    if (!half && seconds_since(begin) >= seconds / 2) {
      half = n;
      at_half = ps__now_ns();
    }
  }
  *out = seconds_since(at_half) / (double)(n - half);
  return PS_OK;
}

typedef struct counts {
  uint32_t part[MAX_PARTS], between, copies;
} counts;

static ps_status submit_turn(ps__bench *b, const ps__timed *t, const counts *n,
                             const CUevent *event) {
  for (uint32_t i = 0; i < n->copies; i++)
    PS_TRY(ps__bench_copy_both(b));
  PS__CUDA_TRY(b->cu, EventRecord(event[0], b->exec.stream));
  for (uint32_t p = 0; p < t->n_parts; p++) {
    for (uint32_t i = 0; i < n->part[p]; i++)
      PS_TRY(t->part(b, t->arg, p));
    PS__CUDA_TRY(b->cu, EventRecord(event[p + 1], b->exec.stream));
  }
  for (uint32_t i = 0; i < n->between; i++)
    PS_TRY(t->between(b));
  return PS_OK;
}

ps_status ps__bench_add_elapsed(const ps__bench *b, CUevent from, CUevent to, double *seconds) {
  float ms = 0;
  PS__CUDA_TRY(b->cu, EventElapsedTime(&ms, from, to));
  *seconds += ms * 1e-3;
  return PS_OK;
}

/* How often a turn repeats each part, so that a part is long beside an event, and what runs between
 * turns. The first call of each kernel loads what the kernel needs. */
static ps_status choose_counts(ps__bench *b, const ps__timed *t, counts *n) {
  static const double least = 5e-3, shortest = 1e-5;
  double turn = 0, s = 0;
  *n = (counts){0};
  for (uint32_t p = 0; p < t->n_parts + 2u * (t->between != NULL); p++) {
    for (int i = 0; i < 2; i++) {
      const uint64_t t0 = ps__now_ns();
      PS_TRY(p < t->n_parts    ? t->part(b, t->arg, p)
             : p == t->n_parts ? t->between(b)
                               : ps__bench_copy_both(b));
      PS_TRY(ps__bench_settle(b));
      s = seconds_since(t0) > shortest ? seconds_since(t0) : shortest;
    }
    if (p < t->n_parts) {
      n->part[p] = s < least ? (uint32_t)(least / s) + 1 : 1;
      turn += n->part[p] * s;
    } else if (p == t->n_parts) {
      n->between = (uint32_t)(t->share * turn / s + 0.5) + (t->share * turn < s / 2);
      turn += n->between * s;
    } else {
      n->copies = (uint32_t)(COPIES_SHARE * turn / s + 0.5);
    }
  }
  return PS_OK;
}

ps_status ps__bench_time_parts(ps__bench *b, const ps__timed *t, double seconds,
                               double out[MAX_PARTS]) {
  double total[MAX_PARTS] = {0};
  uint32_t counted = 0;
  counts c;
  PS_TRY(choose_counts(b, t, &c));
  const uint64_t begin = ps__now_ns();
  PS_TRY(submit_turn(b, t, &c, b->event[0]));
  for (uint64_t n = 1; counted < 2 || seconds_since(begin) < seconds; n++) {
    const CUevent *last = b->event[(n - 1) & 1];
    PS_TRY(submit_turn(b, t, &c, b->event[n & 1]));
    PS__CUDA_TRY(b->cu, EventSynchronize(last[t->n_parts]));
    if (seconds_since(begin) < seconds / 2)
      continue;
    for (uint32_t p = 0; p < t->n_parts; p++)
      PS_TRY(ps__bench_add_elapsed(b, last[p], last[p + 1], &total[p]));
    counted++;
  }
  for (uint32_t p = 0; p < t->n_parts; p++)
    out[p] = total[p] / counted / c.part[p];
  return ps__bench_settle(b);
}
