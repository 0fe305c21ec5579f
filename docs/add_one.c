/* add_one.c - a program on Penstock's engine: a kernel adds one to 1,024 numbers, in each of ten
 * steps. docs/build.md says how to compile it. */
#include <penstock/engine.h>
#include <stdio.h>

/* Runs on a thread of the stream. ptr[i] is the address of the op's access i. */
static ps_status add_one(const ps_launch *l) {
  float *x = l->ptr[0];
  for (int i = 0; i < 1024; i++)
    x[i] += 1;
  return PS_OK;
}
static const ps_kernel kernel = {
    .name = "add_one", .op_class = PS_CLASS_OTHER, .fn = {[PS_BACKEND_CPU] = add_one}};

/* One place, the host; one space of 4,096 bytes; one stream. */
static ps_status run(void) {
  const ps_access x = {.space = 0, .mode = PS_READ_WRITE, .offset = 0, .bytes = 4096};
  const ps_op op = {.kernel = &kernel, .stream = 0, .access = &x, .n_access = 1};
  const ps_engine_config cfg = {.struct_bytes = sizeof cfg,
                                .n_places = 1,
                                .n_spaces = 1,
                                .n_streams = 1,
                                .space = {{.bytes = 4096}},
                                .stream = {{.n_threads = 1, .name = "compute"}}};
  const ps_run_config how = {.struct_bytes = sizeof how};
  ps_program *program = NULL;
  ps_schedule *schedule = NULL;
  ps_engine *engine = NULL;
  ps_run *r = NULL;
  ps_status st = ps_program_create(&program, 1, 1);
  if (st == PS_OK)
    st = ps_program_add(program, &op, NULL);
  if (st == PS_OK)
    st = ps_schedule_compile(&schedule, program);
  if (st == PS_OK)
    st = ps_engine_create(&engine, &cfg);
  if (st == PS_OK)
    st = ps_run_create(&r, engine, schedule, &how);
  if (st == PS_OK)
    st = ps_run_submit(r, 10);
  if (st == PS_OK)
    st = ps_run_wait(r, 10);
  if (st == PS_OK)
    printf("%g\n", ((float *)ps_engine_space(engine, 0))[0]);
  else
    fprintf(stderr, "%s\n", ps_last_error());
  ps_run_destroy(r);
  ps_engine_close(engine);
  ps_schedule_destroy(schedule);
  ps_program_destroy(program);
  return st;
}

int main(void) { return run() == PS_OK ? 0 : 1; }
