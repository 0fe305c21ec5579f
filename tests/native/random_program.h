/* random_program.h - random programs whose result depends on the order of their ops, and two
 * oracles that know nothing but program order: one executes the ops one after the other, one
 * compares the ranges of every pair. */
#ifndef PS_TESTS_RANDOM_PROGRAM_H
#define PS_TESTS_RANDOM_PROGRAM_H
#include "check.h"
#include "engine/schedule.h"
#include <sched.h>
#include <unistd.h>

enum { RP_SPACE_BYTES = 96, RP_MAX_OPS = 40, RP_STEPS = 3 };
#ifndef RP_SPACES /* test_places has three */
#  define RP_SPACES 2
#endif

typedef struct rp_args {
  uint32_t n_access, delay_seed;
  uint8_t mode[4], bytes[4];
} rp_args;

/* Everything written becomes a hash of the op, the step and everything read. */
static inline void rp_compute(const rp_args *a, void *const *ptr, uint64_t op, uint64_t step) {
  uint64_t h = mix64(op * 977 + step);
  for (uint32_t i = 0; i < a->n_access; i++)
    for (uint32_t b = 0; (a->mode[i] & PS_READ) && b < a->bytes[i]; b++)
      h = (h ^ ((uint8_t *)ptr[i])[b]) * 0x100000001b3u;
  for (uint32_t i = 0; i < a->n_access; i++)
    for (uint32_t b = 0; (a->mode[i] & PS_WRITE) && b < a->bytes[i]; b++)
      ((uint8_t *)ptr[i])[b] = (uint8_t)mix64(h + i * 64 + b);
}

static inline void rp_delay(uint32_t seed, uint64_t step, uint64_t op) {
  uint64_t r = mix64(seed + step * 131 + op * 7919);
  if (r % 64 == 0)
    usleep((useconds_t)(r >> 32) % 40);
  else if (r % 64 < 6)
    sched_yield();
  else if (r % 64 < 20)
    for (volatile uint32_t i = 0; i < (uint32_t)(r >> 32) % 600; i++)
      ;
}

static inline ps_status rp_run(const ps_launch *l) {
  const rp_args *a = l->args;
  rp_delay(a->delay_seed, l->step, l->op * 2);
  rp_compute(a, l->ptr, l->op, l->step);
  rp_delay(a->delay_seed, l->step, l->op * 2 + 1);
  return PS_OK;
}
#ifndef RP_CUDA_FN /* the same on the device: test_cuda_engine has one */
#  define RP_CUDA_FN NULL
#endif
static const ps_kernel rp_kernel = {
    .name = "mix",
    .op_class = PS_CLASS_OTHER,
    .fn = {[PS_BACKEND_CPU] = rp_run, [PS_BACKEND_CUDA] = RP_CUDA_FN}};

static inline ps_access rp_range(uint64_t *r, uint32_t grain, uint32_t mode) {
  uint32_t cells = RP_SPACE_BYTES / grain, first = rnd_below(r, cells);
  uint32_t n = 1 + rnd_below(r, grain == 1 ? 20 : 2);
  n = n > cells - first ? cells - first : n;
  return (ps_access){.space = rnd_below(r, RP_SPACES),
                     .mode = mode,
                     .offset = (uint64_t)first * grain,
                     .bytes = (uint64_t)n * grain};
}

static inline bool rp_overlap(const ps_access *a, const ps_access *b) {
  return a->space == b->space && a->offset < b->offset + b->bytes &&
         b->offset < a->offset + a->bytes;
}

/* Ops of the streams in @host_streams stay in space 1, copies of the others touch space 0: what
 * a device's rules ask. */
static inline ps_program *rp_make_for(uint64_t seed, uint32_t n_streams, uint32_t host_streams) {
  static const uint32_t grains[] = {1, 1, 8, 16, 24};
  uint64_t r = mix64(seed);
  uint32_t n_ops = 5 + rnd_below(&r, RP_MAX_OPS - 4), grain = grains[rnd_below(&r, 5)];
  ps_program *p;
  CHECK(ps_program_create(&p, RP_SPACES, n_streams) == PS_OK);
  while (ps_program_n_ops(p) < n_ops) {
    rp_args args = {.delay_seed = (uint32_t)rnd(&r)};
    ps_access access[4];
    ps_op op = {.stream = rnd_below(&r, n_streams), .access = access};
    bool on_host = host_streams >> op.stream & 1;
    if (rnd_below(&r, 4) == 0) { /* a copy */
      access[0] = rp_range(&r, grain, PS_READ);
      access[1] = rp_range(&r, grain, PS_WRITE);
      access[0].bytes = access[1].bytes =
          access[0].bytes < access[1].bytes ? access[0].bytes : access[1].bytes;
      op.n_access = 2;
      if (on_host)
        access[0].space = access[1].space = 1;
      else if (host_streams && access[0].space == 1 && access[1].space == 1)
        access[1].space = 0;
      if (rp_overlap(&access[0], &access[1]))
        continue;
    } else {
      for (uint32_t want = 1 + rnd_below(&r, 4), i = 0; i < want; i++) {
        ps_access a = rp_range(&r, grain, 1 + rnd_below(&r, 3));
        bool clash = false;
        if (on_host)
          a.space = 1;
        for (uint32_t j = 0; j < op.n_access; j++)
          clash |= ((a.mode | access[j].mode) & PS_WRITE) && rp_overlap(&a, &access[j]);
        if (clash)
          continue;
        args.mode[op.n_access] = (uint8_t)a.mode;
        args.bytes[op.n_access] = (uint8_t)a.bytes;
        access[op.n_access++] = a;
      }
      args.n_access = op.n_access;
      op.kernel = &rp_kernel;
      op.args = &args;
      op.args_bytes = sizeof args;
    }
    CHECK(ps_program_add(p, &op, NULL) == PS_OK);
  }
  return p;
}

static inline ps_program *rp_make(uint64_t seed, uint32_t n_streams) {
  return rp_make_for(seed, n_streams, 0);
}

/* The first oracle. */
static inline void rp_serial(const ps_program *p, uint8_t memory[RP_SPACES][RP_SPACE_BYTES],
                             uint64_t n_steps) {
  for (uint64_t step = 0; step < n_steps; step++)
    for (uint64_t i = 0; i < p->list.n_ops; i++) {
      const ps__op *op = &p->list.ops[i];
      const ps_access *a = p->list.access + op->access;
      void *ptr[4];
      for (uint32_t k = 0; k < op->n_access; k++)
        ptr[k] = memory[a[k].space] + a[k].offset;
      if (op->kernel)
        rp_compute((const rp_args *)(p->list.args + op->args), ptr, i, step);
      else
        memcpy(ptr[1], ptr[0], a[0].bytes);
    }
}

/* The second: must ops i and j of a program keep their order? */
static inline bool rp_conflict(const ps_program *p, uint64_t i, uint64_t j) {
  const ps__op *x = &p->list.ops[i], *y = &p->list.ops[j];
  for (uint32_t a = 0; a < x->n_access; a++)
    for (uint32_t b = 0; b < y->n_access; b++) {
      const ps_access *u = &p->list.access[x->access + a], *v = &p->list.access[y->access + b];
      if (((u->mode | v->mode) & PS_WRITE) && rp_overlap(u, v))
        return true;
    }
  return false;
}

#endif
