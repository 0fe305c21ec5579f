/* stream_array.c - an array in host memory goes through a device that holds a small part of it.
 * docs/own-kernel.md explains the program, and says how to compile it with and without CUDA. */
#include <penstock/engine.h>
#include <stdio.h>

enum { DEVICE, HOST };      /* places, and the space at each */
enum { COMPUTE, UP, DOWN }; /* streams */
enum { CHUNKS = 16, CHUNK = 1 << 20, CHUNK_BYTES = 4 * CHUNK, SLOTS = 3, STEPS = 10 };

typedef struct scale_args {
  float by, plus;
  int64_t n;
} scale_args;

/* One task: 65,536 elements of x = x * by + plus. */
enum { TASK = 1 << 16 };
typedef struct scale_job {
  const scale_args *a;
  float *x;
} scale_job;
static void scale_task(void *arg, int64_t task, uint32_t thread) {
  const scale_job *j = arg;
  const int64_t first = task * TASK, end = first + TASK < j->a->n ? first + TASK : j->a->n;
  (void)thread; /* would choose ps_launch_scratch() */
  for (int64_t i = first; i < end; i++)
    j->x[i] = j->x[i] * j->a->by + j->a->plus;
}
static ps_status scale_on_cpu(const ps_launch *l) {
  scale_job j = {l->args, l->ptr[0]};
  ps_launch_parallel(l, (j.a->n + TASK - 1) / TASK, scale_task, &j);
  return PS_OK;
}

#ifdef WITH_CUDA
ps_status scale_on_cuda(const ps_launch *l); /* scale.cu */
enum { BACKEND = PS_BACKEND_CUDA };
#else
enum { BACKEND = PS_BACKEND_CPU };
#endif
static const ps_kernel scale = {.name = "scale",
                                .op_class = PS_CLASS_ELEMENTWISE,
                                .fn = {[PS_BACKEND_CPU] = scale_on_cpu,
#ifdef WITH_CUDA
                                       [PS_BACKEND_CUDA] = scale_on_cuda
#endif
                                }};

/* Chunk i: up to a slot of the device, scaled there, and down again. Nothing says that chunk i + 1
 * goes up while chunk i is scaled: the ranges do. */
static ps_status add_chunk(ps_program *program, int i) {
  static const scale_args args = {.by = 2, .plus = 1, .n = CHUNK};
  const uint64_t home = (uint64_t)i * CHUNK_BYTES, slot = (uint64_t)(i % SLOTS) * CHUNK_BYTES;
  const ps_access up[] = {{HOST, PS_READ, home, CHUNK_BYTES},
                          {DEVICE, PS_WRITE, slot, CHUNK_BYTES}},
                  x = {DEVICE, PS_READ_WRITE, slot, CHUNK_BYTES},
                  down[] = {{DEVICE, PS_READ, slot, CHUNK_BYTES},
                            {HOST, PS_WRITE, home, CHUNK_BYTES}};
  const ps_tag tag = {.layer = -1, .round = -1, .chunk = i, .phase = -1}; /* -1: has none */
  const ps_op op[] = {{.stream = UP, .access = up, .n_access = 2, .tag = tag},
                      {.kernel = &scale,
                       .args = &args,
                       .args_bytes = sizeof args,
                       .stream = COMPUTE,
                       .access = &x,
                       .n_access = 1,
                       .tag = tag},
                      {.stream = DOWN, .access = down, .n_access = 2, .tag = tag}};
  ps_status st = PS_OK;
  for (int k = 0; st == PS_OK && k < 3; k++)
    st = ps_program_add(program, &op[k], NULL);
  return st;
}

static const ps_engine_config machine = {
    .struct_bytes = sizeof machine,
    .n_places = 2,
    .n_links = 2,
    .n_spaces = 2,
    .n_streams = 3,
    .place = {[DEVICE] = {.kind = PS_PLACE_DEVICE, .backend = BACKEND},
              [HOST] = {.kind = PS_PLACE_HOST}},
    .link = {{.from = HOST, .to = DEVICE, .stream = UP},
             {.from = DEVICE, .to = HOST, .stream = DOWN}},
    .space = {[DEVICE] = {.bytes = SLOTS * CHUNK_BYTES, .place = DEVICE},
              [HOST] = {.bytes = (uint64_t)CHUNKS * CHUNK_BYTES, .place = HOST}},
    .stream = {[COMPUTE] = {.place = DEVICE, .n_threads = 2, .name = "compute"},
               [UP] = {.place = DEVICE, .n_threads = 1, .name = "up"},
               [DOWN] = {.place = DEVICE, .n_threads = 1, .name = "down"}}};

/* Every element is 2^STEPS - 1 after so many steps from 0. */
static ps_status check(ps_engine *engine) {
  const float *x = ps_engine_space(engine, HOST);
  size_t wrong = 0;
  for (size_t i = 0; i < (size_t)CHUNKS * CHUNK; i++)
    wrong += x[i] != (1 << STEPS) - 1;
  printf("%d steps, %zu elements wrong\n", STEPS, wrong);
  return wrong ? PS_EINTERNAL : PS_OK;
}

int main(int argc, char **argv) {
  const ps_run_config how = {.struct_bytes = sizeof how, .trace_steps = 2};
  const char *const streams[] = {"compute", "up", "down"};
  static ps_trace_event event[2 * 3 * CHUNKS];
  ps_program *program = NULL;
  ps_schedule *schedule = NULL;
  ps_engine *engine = NULL;
  ps_run *run = NULL;
  uint64_t n = 0;
  ps_status st = ps_program_create(&program, 2, 3);
  for (int i = 0; st == PS_OK && i < CHUNKS; i++)
    st = add_chunk(program, i);
  if (st == PS_OK)
    st = ps_schedule_compile(&schedule, program);
  if (st == PS_OK)
    st = ps_engine_create(&engine, &machine);
  if (st == PS_OK)
    st = ps_run_create(&run, engine, schedule, &how);
  if (st == PS_OK)
    st = ps_run_submit(run, STEPS);
  if (st == PS_OK)
    st = ps_run_wait(run, STEPS);
  if (st == PS_OK && argc > 1) /* the last two steps, for ui.perfetto.dev */
    st = ps_run_trace(run, event, sizeof event / sizeof *event, &n);
  if (st == PS_OK && argc > 1)
    st = ps_trace_write_json(argv[1], schedule, event, n, streams, NULL, 0);
  if (st == PS_OK)
    st = check(engine);
  else
    fprintf(stderr, "%s\n", ps_last_error());
  ps_run_destroy(run);
  ps_engine_close(engine);
  ps_schedule_destroy(schedule);
  ps_program_destroy(program);
  return st != PS_OK;
}
