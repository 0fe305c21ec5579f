/* engine_overhead.c - measures what the engine costs an op.
 *
 * usage: engine_overhead [steps]
 *
 * Three cases: empty ops on one stream; empty ops of a step shaped like a training step, on five
 * streams; compiling 100,000 ops with three accesses each, over as many ranges. Prints one JSON
 * object a case: the best, the median and the worst of 9 runs. */
#include "core/core.h"
#include <penstock/engine.h>
#include <stdlib.h>
#include <string.h>

static ps_status empty(const ps_launch *l) {
  (void)l;
  return PS_OK;
}
static const ps_kernel k_empty = {
    .name = "empty", .op_class = PS_CLASS_OTHER, .fn = {[PS_BACKEND_CPU] = empty}};

static void must(ps_status st) {
  if (st == PS_OK)
    return;
  fprintf(stderr, "%s: %s\n", ps_status_name(st), ps_last_error());
  exit(1);
}

enum { COMPUTE, H2D, D2H, OPTIMIZER, DATA, N_STREAMS, TILE_BYTES = 4096 };

static void add(ps_program *p, uint32_t stream, const ps_access *a, uint32_t n) {
  must(ps_program_add(p, &(ps_op){.kernel = &k_empty, .stream = stream, .access = a, .n_access = n},
                      NULL));
}

static ps_access at(uint32_t space, uint32_t mode, uint64_t tile) {
  return (ps_access){space, mode, tile * TILE_BYTES, TILE_BYTES};
}

static ps_program *one_stream(void) {
  ps_program *p;
  must(ps_program_create(&p, 2, N_STREAMS));
  for (uint64_t i = 0; i < 2000; i++)
    add(p, COMPUTE, (ps_access[]){at(0, PS_READ, i % 7), at(0, PS_READ_WRITE, 8 + i % 5)}, 2);
  return p;
}

/* The forward and backward pass over layers and chunks. Each layer's weights are copied from the
 * host (space 1) to one of two buffers on the device (space 0). Its gradient is copied to the host
 * from one of two buffers. An activation a chunk is offloaded and fetched again. The optimizer
 * updates the layer, and the data stream delivers tokens. A layer has 12 and 20 compute ops a
 * chunk. */
static ps_program *training(void) {
  enum {
    L = 16,
    C = 4,
    FWD = 12,
    BWD = 20,
    W = 0,
    G = 2,
    ACT = 4,
    X = 8,
    OUT = 16,
    HOST_W = 0,
    HOST_G = 32,
    HOST_A = 64,
    TOK = 400
  };
  ps_program *p;
  must(ps_program_create(&p, 2, N_STREAMS));
  add(p, DATA, (ps_access[]){at(1, PS_WRITE, TOK)}, 1);
  add(p, H2D, (ps_access[]){at(1, PS_READ, TOK), at(0, PS_WRITE, OUT)}, 2);
  for (uint64_t l = 0; l < L; l++) {
    add(p, H2D, (ps_access[]){at(1, PS_READ, HOST_W + l), at(0, PS_WRITE, W + l % 2)}, 2);
    for (uint64_t c = 0; c < C; c++) {
      for (int i = 0; i < FWD; i++)
        add(p, COMPUTE,
            (ps_access[]){at(0, PS_READ, W + l % 2), at(0, PS_READ_WRITE, X + c),
                          at(0, PS_WRITE, ACT + c)},
            3);
      add(p, D2H, (ps_access[]){at(0, PS_READ, ACT + c), at(1, PS_WRITE, HOST_A + l * C + c)}, 2);
    }
  }
  for (uint64_t l = L; l-- > 0;) {
    add(p, H2D, (ps_access[]){at(1, PS_READ, HOST_W + l), at(0, PS_WRITE, W + l % 2)}, 2);
    for (uint64_t c = C; c-- > 0;) {
      add(p, H2D, (ps_access[]){at(1, PS_READ, HOST_A + l * C + c), at(0, PS_WRITE, ACT + c)}, 2);
      for (int i = 0; i < BWD; i++)
        add(p, COMPUTE,
            (ps_access[]){at(0, PS_READ, W + l % 2), at(0, PS_READ, ACT + c),
                          at(0, PS_READ_WRITE, G + l % 2)},
            3);
    }
    add(p, D2H, (ps_access[]){at(0, PS_READ, G + l % 2), at(1, PS_WRITE, HOST_G + l)}, 2);
    add(p, OPTIMIZER, (ps_access[]){at(1, PS_READ, HOST_G + l), at(1, PS_READ_WRITE, HOST_W + l)},
        2);
  }
  return p;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void measure(const char *name, ps_program *p, uint32_t trace_steps, uint64_t n_steps) {
  ps_engine_config cfg = {
      .struct_bytes = sizeof cfg, .n_places = 1, .n_spaces = 2, .n_streams = N_STREAMS};
  cfg.space[0].bytes = cfg.space[1].bytes = 4 << 20;
  for (uint32_t i = 0; i < N_STREAMS; i++)
    cfg.stream[i].n_threads = 1;
  ps_engine *e;
  ps_schedule *s;
  must(ps_engine_create(&e, &cfg));
  uint64_t t0 = ps__now_ns();
  must(ps_schedule_compile(&s, p));
  uint64_t compile_ns = ps__now_ns() - t0;
  double ns[9];
  uint64_t n_ops = ps_schedule_n_ops(s);
  ps_run *r;
  must(ps_run_create(
      &r, e, s,
      &(ps_run_config){.struct_bytes = sizeof(ps_run_config), .trace_steps = trace_steps}));
  for (uint64_t i = 0; i < 9; i++) {
    t0 = ps__now_ns();
    must(ps_run_submit(r, n_steps));
    must(ps_run_wait(r, n_steps * (i + 1)));
    ns[i] = (double)(ps__now_ns() - t0) / (double)(n_steps * n_ops);
  }
  ps_run_destroy(r);
  qsort(ns, 9, sizeof *ns, ascending);
  printf("{\"bench\": \"engine_overhead\", \"program\": \"%s\", \"traced\": %u, \"ops\": %llu, "
         "\"waits\": %llu, \"cpus\": %u, "
         "\"compile_ns_per_op\": %.0f, \"ns_per_op_best\": %.0f, \"ns_per_op_median\": %.0f, "
         "\"ns_per_op_worst\": %.0f}\n",
         name, trace_steps, (unsigned long long)n_ops, (unsigned long long)ps_schedule_n_waits(s),
         ps__n_cpus(), (double)compile_ns / (double)n_ops, ns[0], ns[4], ns[8]);
  must(ps_schedule_destroy(s));
  must(ps_engine_close(e));
}

static void measure_compile(void) {
  enum { N_OPS = 100000 };
  ps_program *p;
  ps_schedule *s;
  must(ps_program_create(&p, 2, N_STREAMS));
  uint64_t t0 = ps__now_ns();
  for (uint64_t i = 0; i < N_OPS; i++)
    add(p, (uint32_t)(i % 7 % N_STREAMS),
        (ps_access[]){at(0, PS_READ, i * 31 % 9973), at(1, PS_READ_WRITE, i),
                      at(0, PS_WRITE, 10000 + i * 17 % 20011)},
        3);
  uint64_t t1 = ps__now_ns();
  must(ps_schedule_compile(&s, p));
  uint64_t t2 = ps__now_ns();
  printf("{\"bench\": \"engine_compile\", \"ops\": %d, \"accesses\": %d, \"waits\": %llu, "
         "\"add_ms\": %.1f, \"compile_ms\": %.1f}\n",
         N_OPS, 3 * N_OPS, (unsigned long long)ps_schedule_n_waits(s), (double)(t1 - t0) / 1e6,
         (double)(t2 - t1) / 1e6);
  must(ps_schedule_destroy(s));
  ps_program_destroy(p);
}

int main(int argc, char **argv) {
  uint64_t n_steps = argc > 1 ? strtoull(argv[1], NULL, 10) : 20;
  ps_program *one = one_stream(), *five = training();
  measure("one stream", one, 0, n_steps);
  measure("one stream", one, 2, n_steps);
  measure("training on five streams", five, 0, n_steps);
  measure("training on five streams", five, 2, n_steps);
  measure_compile();
  ps_program_destroy(one);
  ps_program_destroy(five);
  return 0;
}
