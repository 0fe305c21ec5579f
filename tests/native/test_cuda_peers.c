/* test_cuda_peers.c - three device places on one GPU or on two, beside a host: random programs with
 * copies between all of them against program order; an error on the host; what is refused. Usage:
 * test_cuda_peers [programs, default 400] [seed]. Without a GPU it says why and skips. */
#ifndef PS_CUDA
#  include <stdio.h>
int main(void) {
  printf("ok skipped: built without CUDA\n");
  return 0;
}
#else
#  include <penstock/engine.h>
ps_status mix_cuda(const ps_launch *l);
_Bool mix_load(void);
#  define RP_CUDA_FN mix_cuda
#  define RP_SPACES  4
#  include "random_program.h"
#  include "engine/engine.h"

void ps__cuda_share_gpu(bool share);
void ps__cuda_without_mem_ops(bool without);

/* Places, and the spaces of the same numbers. */
enum { DEVICE_0, DEVICE_1, DEVICE_2, HOST, N_PLACES };
enum {
  COMPUTE_0,
  COMPUTE_1,
  COMPUTE_2,
  HOST_A,
  HOST_B,
  TO_0,
  TO_1,
  TO_2,
  FROM_0,
  FROM_1,
  FROM_2,
  PEERS_0,
  PEERS_1,
  PEERS_2,
  N_STREAMS
};
enum { N_OPS_STREAMS = TO_0 };
static const ps_link links[] = {{HOST, DEVICE_0, TO_0, 0},        {HOST, DEVICE_1, TO_1, 1},
                                {HOST, DEVICE_2, TO_2, 2},        {DEVICE_0, HOST, FROM_0, 0},
                                {DEVICE_1, HOST, FROM_1, 1},      {DEVICE_2, HOST, FROM_2, 2},
                                {DEVICE_0, DEVICE_1, PEERS_0, 3}, {DEVICE_0, DEVICE_2, PEERS_0, 3},
                                {DEVICE_1, DEVICE_0, PEERS_1, 4}, {DEVICE_1, DEVICE_2, PEERS_1, 4},
                                {DEVICE_2, DEVICE_0, PEERS_2, 5}, {DEVICE_2, DEVICE_1, PEERS_2, 5}};
enum { N_LINKS = sizeof links / sizeof *links };
static const uint32_t place_of[N_STREAMS] = {DEVICE_0, DEVICE_1, DEVICE_2, HOST,     HOST,
                                             DEVICE_0, DEVICE_1, DEVICE_2, DEVICE_0, DEVICE_1,
                                             DEVICE_2, DEVICE_0, DEVICE_1, DEVICE_2};

#  include "places.h"

static ps_engine_config config(void) {
  ps_engine_config cfg = places_config();
  for (uint32_t i = 0; i < HOST; i++) {
    cfg.place[i].backend = PS_BACKEND_CUDA;
    cfg.place[i].device = i;
  }
  return cfg;
}

static ps_engine *open_engine(void) {
  const ps_engine_config cfg = config();
  ps_engine *e;
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  return e;
}

/* ---- programs -------------------------------------------------------------------------------- */

/* Random ops, each where its stream may run it. @brittle: the last one is on the host, and fails in
 * the second step. */
static ps_status fail_later(const ps_launch *l) {
  return l->step == 1 ? ps__fail(PS_ENUMERIC, "no second step") : PS_OK;
}
static const ps_kernel k_fail = {.name = "brittle", .op_class = PS_CLASS_OTHER, .fn = {fail_later}};

static ps_program *random_ops(uint64_t seed, bool brittle) {
  uint64_t r = mix64(seed);
  ps_program *p = empty();
  while (ps_program_n_ops(p) < RP_MAX_OPS - 1)
    add_random(p, &r);
  if (brittle) {
    const ps_access a = range(HOST, PS_READ_WRITE, 0);
    const ps_op op = {.kernel = &k_fail, .stream = HOST_A, .access = &a, .n_access = 1};
    CHECK(ps_program_add(p, &op, NULL) == PS_OK);
  }
  return p;
}

/* ---- runs ------------------------------------------------------------------------------------ */

static ps_run *start(ps_engine *e, ps_schedule *s, uint32_t trace_steps) {
  const ps_run_config rc = {.struct_bytes = sizeof rc, .trace_steps = trace_steps};
  ps_run *run;
  CHECK(ps_run_create(&run, e, s, &rc) == PS_OK);
  return run;
}

/* Whether the steps leave the bytes that ops one after the other leave. */
static bool same_as_serial(ps_engine *e, const ps_program *p, unsigned rules, uint64_t seed) {
  uint8_t memory[RP_SPACES][RP_SPACE_BYTES], got[RP_SPACE_BYTES];
  ps_schedule *s;
  fill(memory, seed);
  for (uint32_t i = 0; i < N_PLACES; i++)
    CHECK(ps__engine_write(e, i, 0, memory[i], RP_SPACE_BYTES) == PS_OK);
  CHECK(ps__schedule_compile_masked(&s, p, rules) == PS_OK);
  ps_run *run = start(e, s, seed % 2 ? RP_STEPS : 0);
  CHECK(ps_run_submit(run, RP_STEPS) == PS_OK && ps_run_wait(run, RP_STEPS) == PS_OK);
  CHECK(ps_run_destroy(run) == PS_OK && ps_schedule_destroy(s) == PS_OK);
  rp_serial(p, memory, RP_STEPS);
  bool same = true;
  for (uint32_t i = 0; i < N_PLACES; i++) {
    CHECK(ps__engine_read(e, i, 0, got, RP_SPACE_BYTES) == PS_OK);
    same = same && memcmp(memory[i], got, RP_SPACE_BYTES) == 0;
  }
  return same;
}

static void test_random(const char *how, uint64_t n_programs, uint64_t seed) {
  ps_engine *e = open_engine();
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < n_programs; i++) {
    ps_program *p = random_ops(seed + i, false);
    if (!same_as_serial(e, p, PS__RULES_ALL, seed + i)) {
      printf("FAIL program %llu %s\n", (unsigned long long)(seed + i), how);
      exit(1);
    }
    wrong += !same_as_serial(e, p, PS__RULES_ALL & ~PS__RULE_RAW, seed + i);
    ps_program_destroy(p);
  }
  CHECK(wrong > 0 && ps_engine_close(e) == PS_OK);
  printf("ok %llu random programs on three device places %s; without read after write %llu ran "
         "wrong\n",
         (unsigned long long)n_programs, how, (unsigned long long)wrong);
}

/* All devices come to their end after a host op has failed, and the engine runs on. */
static void test_host_error(uint64_t n_programs, uint64_t seed) {
  ps_engine *e = open_engine();
  for (uint64_t i = 0; i < n_programs; i++) {
    ps_program *p = random_ops(seed + i, true);
    ps_schedule *s;
    CHECK(ps_schedule_compile(&s, p) == PS_OK);
    ps_run *run = start(e, s, 0);
    CHECK(ps_run_submit(run, 20) == PS_OK);
    CHECK_FAILS(ps_run_wait(run, 20), PS_ENUMERIC, "no second step");
    CHECK(ps_run_steps_done(run) == 1 && ps_run_destroy(run) == PS_OK);
    CHECK(ps_schedule_destroy(s) == PS_OK);
    ps_program_destroy(p);
  }
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok after an error on the host all devices come to their end, and the engine runs on\n");
}

static void test_refusals(void) {
  ps_engine_config cfg = config();
  ps_engine *e;
  cfg.stream[FROM_0].place = HOST;
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  ps_program *p = empty();
  ps_schedule *s;
  ps_run *run;
  const ps_run_config rc = {.struct_bytes = sizeof rc};
  add_copy(p, FROM_0, range(DEVICE_0, PS_READ, 0), range(HOST, PS_WRITE, 0));
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  CHECK_FAILS(ps_run_create(&run, e, s, &rc), PS_EINVAL, "on host stream 8 touches GPU memory");
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  ps_program_destroy(p);
  ps__cuda_share_gpu(false);
  cfg = config();
  cfg.place[DEVICE_2].device = 99;
  CHECK(ps_engine_create(&e, &cfg) == PS_EDEVICE);
  CHECK(strstr(ps_last_error(), "GPU 99 is asked for") ||
        strstr(ps_last_error(), "GPU 1 is asked"));
  cfg.place[DEVICE_2].device = 0;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "places 0 and 2 are both GPU 0");
  ps__cuda_share_gpu(true);
  printf("ok what several GPUs cannot do is refused by op, place and GPU\n");
}

int main(int argc, char **argv) {
  const uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 400,
                 seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  const int64_t before = ps__live_allocations();
  const ps_engine_config cfg = config();
  ps_engine *e;
  ps__cuda_share_gpu(true);
  const ps_status st = ps_engine_create(&e, &cfg);
  if (st == PS_EDEVICE) {
    printf("ok skipped: %s\n", ps_last_error());
    return 0;
  }
  CHECK(st == PS_OK && mix_load() && ps_engine_close(e) == PS_OK);
  test_random("with stream memory operations", n, seed);
  test_host_error(n / 4 + 1, seed);
  test_refusals();
  ps__cuda_without_mem_ops(true);
  test_random("without them", n / 4 + 1, seed);
  CHECK(ps__live_allocations() == before);
  return 0;
}
#endif
