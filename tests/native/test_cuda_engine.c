/* test_cuda_engine.c - the CUDA backend against the oracle of random_program.h; how it fails and
 * stops. Usage: test_cuda_engine [programs, default 2000] [seed]. Without a GPU it says why and
 * skips. */
#ifndef PS_CUDA
#  include "check.h"
#  include <penstock/engine.h>
int main(void) {
  ps_engine_config cfg = {.struct_bytes = sizeof cfg, .n_places = 1, .n_spaces = 1, .n_streams = 1};
  cfg.place[0] = (ps_place){.kind = PS_PLACE_DEVICE, .backend = PS_BACKEND_CUDA};
  ps_engine *e;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EDEVICE, "make CUDA=1");
  printf("ok skipped: built without CUDA, which an engine refuses in words\n");
  return 0;
}
#else
#  include "backends/list.h"
#  include "engine/engine.h"
#  include "engine/pin.h"
#  include "hosts/net.h"
#  include <penstock/engine.h>
ps_status mix_cuda(const ps_launch *l);
ps_status work_cuda(const ps_launch *l);
ps_status stray_cuda(const ps_launch *l);
_Bool work_on_default_stream(uint64_t ns);
_Bool mix_load(void);
#  define RP_CUDA_FN mix_cuda
#  include "random_program.h"
#  include <stdatomic.h>
#  include <sys/wait.h>

void ps__cuda_without_mem_ops(bool without);

enum { COMPUTE, H2D, D2H, HOST_A, HOST_B, N_STREAMS, HOST_STREAMS = 1 << HOST_A | 1 << HOST_B };
enum { DEVICE, HOST };

static ps_engine_config config(uint64_t bytes) {
  ps_engine_config cfg = {
      .struct_bytes = sizeof cfg, .n_places = 2, .n_spaces = 2, .n_streams = N_STREAMS};
  cfg.place[DEVICE] = (ps_place){.kind = PS_PLACE_DEVICE, .backend = PS_BACKEND_CUDA};
  cfg.place[HOST] = (ps_place){.kind = PS_PLACE_HOST};
  cfg.space[DEVICE] = (ps_space_config){.bytes = bytes, .place = DEVICE};
  cfg.space[HOST] = (ps_space_config){.bytes = bytes, .place = HOST};
  for (uint32_t i = 0; i < N_STREAMS; i++)
    cfg.stream[i] = (ps_stream_config){
        .place = HOST_STREAMS >> i & 1 ? HOST : DEVICE, .n_threads = 1, .scratch_bytes = 4096};
  return cfg;
}

static ps_engine *open_engine(uint64_t bytes) {
  const ps_engine_config cfg = config(bytes);
  ps_engine *e;
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  return e;
}

static ps_run *start(ps_engine *e, ps_schedule *s, uint32_t trace_steps) {
  ps_run *r;
  CHECK(ps_run_create(&r, e, s,
                      &(ps_run_config){.struct_bytes = sizeof(ps_run_config),
                                       .trace_steps = trace_steps}) == PS_OK);
  return r;
}

static void add(ps_program *p, const ps_kernel *k, uint32_t stream, uint64_t args, uint32_t space,
                uint32_t mode, uint64_t offset) {
  ps_access a = {space, mode, offset, 8};
  ps_op op = {.kernel = k,
              .args = &args,
              .args_bytes = 8,
              .stream = stream,
              .access = &a,
              .n_access = 1,
              .tag = {.layer = 3, .round = 1, .chunk = 2}};
  CHECK(ps_program_add(p, &op, NULL) == PS_OK);
}

static void add_copy(ps_program *p, uint32_t stream, uint32_t from, uint64_t src, uint32_t to,
                     uint64_t dst, uint64_t bytes) {
  ps_access a[2] = {{from, PS_READ, src, bytes}, {to, PS_WRITE, dst, bytes}};
  CHECK(ps_program_add(
            p, &(ps_op){.stream = stream, .access = a, .n_access = 2, .tag = {-1, -1, -1, 0}},
            NULL) == PS_OK);
}

static ps_program *program(void) {
  ps_program *p;
  CHECK(ps_program_create(&p, 2, N_STREAMS) == PS_OK);
  return p;
}

static ps_schedule *compiled(ps_program *p) {
  ps_schedule *s;
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  ps_program_destroy(p);
  return s;
}

static ps_status nothing(const ps_launch *l) { return PS_OK; }
static const ps_kernel k_work = {.name = "work",
                                 .op_class = PS_CLASS_OTHER,
                                 .fn = {nothing, work_cuda}},
                       k_stray = {.name = "stray",
                                  .op_class = PS_CLASS_OTHER,
                                  .fn = {nothing, stray_cuda}};

/* ---- device memory, in and out by a program of copies ---------------------------------------- */

/* space DEVICE [0, bytes) and space HOST [at, at + bytes) */
static void move(ps_engine *e, bool in, uint64_t at, uint64_t bytes) {
  ps_program *p = program();
  add_copy(p, in ? H2D : D2H, in ? HOST : DEVICE, in ? at : 0, in ? DEVICE : HOST, in ? 0 : at,
           bytes);
  ps_schedule *s = compiled(p);
  ps_run *r = start(e, s, 0);
  CHECK(ps_run_submit(r, 1) == PS_OK && ps_run_wait(r, 1) == PS_OK);
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK);
}

/* The same way on a lane of the exchange with other hosts. */
static void move_on_lanes(const ps__net_device *n, void *device, void *host, uint64_t bytes) {
  bool idle = false;
  CHECK(n->api->enter(n->user) == PS_OK);
  CHECK(n->api->copy(n->user, PS__LANE_IN, device, host, bytes) == PS_OK);
  while (!idle)
    CHECK(n->api->idle(n->user, &idle) == PS_OK);
  memset(host, 0, bytes);
  CHECK(n->api->copy(n->user, PS__LANE_OUT, host, device, bytes) == PS_OK);
  for (idle = false; !idle;)
    CHECK(n->api->idle(n->user, &idle) == PS_OK);
  n->api->leave(n->user);
}

/* Host memory is pinned in ranges: a copy that reaches over the seam of two. */
static void test_seam(void) {
  enum { BYTES = 100001 };
  uint64_t seam = (uint64_t)1 << 30, at = seam - 40003;
  ps_engine *e = open_engine(seam + ((uint64_t)2 << 20));
  unsigned char *p = (unsigned char *)ps_engine_space(e, HOST) + at;
  for (uint32_t i = 0; i < BYTES; i++)
    p[i] = (unsigned char)mix64(i);
  move(e, true, at, BYTES);
  memset(p, 0, BYTES);
  move(e, false, at, BYTES);
  for (uint32_t i = 0; i < BYTES; i++)
    CHECK(p[i] == (unsigned char)mix64(i));
  printf("ok a copy over the seam of two pinned ranges\n");

  ps__net_device lanes;
  void *device;
  CHECK(ps__backend_net(PS_BACKEND_CUDA, 0, &lanes) == PS_OK);
  CHECK(ps__engine_net(e, &lanes) == PS_OK);
  CHECK(lanes.api->enter(lanes.user) == PS_OK);
  CHECK(lanes.api->reserve(lanes.user, false, BYTES, &device) == PS_OK);
  lanes.api->leave(lanes.user);
  move_on_lanes(&lanes, device, p, BYTES);
  lanes.api->close(lanes.user, true);
  for (uint32_t i = 0; i < BYTES; i++)
    CHECK(p[i] == (unsigned char)mix64(i));
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok the same on the lanes of the exchange with other hosts\n");
}

/* ---- hazards --------------------------------------------------------------------------------- */

enum { AWAY = 4096 }; /* where the host keeps the device's image */

static bool same_as_serial(ps_engine *e, const ps_program *p, unsigned rules, uint64_t seed,
                           uint64_t n_steps, uint32_t trace_steps) {
  uint8_t memory[RP_SPACES][RP_SPACE_BYTES], *host = ps_engine_space(e, HOST);
  for (uint32_t s = 0; s < RP_SPACES; s++) {
    for (uint32_t i = 0; i < RP_SPACE_BYTES; i++)
      memory[s][i] = (uint8_t)mix64(seed + s * 1000 + i);
    memcpy(host + (s == DEVICE ? AWAY : 0), memory[s], RP_SPACE_BYTES);
  }
  move(e, true, AWAY, RP_SPACE_BYTES);
  ps_schedule *sch;
  CHECK(ps__schedule_compile_masked(&sch, p, rules) == PS_OK);
  ps_run *run = start(e, sch, trace_steps);
  CHECK(ps_run_submit(run, 1) == PS_OK && ps_run_submit(run, n_steps - 1) == PS_OK);
  CHECK(ps_run_wait(run, n_steps) == PS_OK && ps_run_steps_done(run) == n_steps);
  ps_run_destroy(run);
  CHECK(ps_schedule_destroy(sch) == PS_OK);
  move(e, false, AWAY, RP_SPACE_BYTES);
  rp_serial(p, memory, n_steps);
  return memcmp(memory[HOST], host, RP_SPACE_BYTES) == 0 &&
         memcmp(memory[DEVICE], host + AWAY, RP_SPACE_BYTES) == 0;
}

static void test_random(const char *how, uint64_t n_programs, uint64_t seed) {
  ps_engine *e = open_engine(4 * AWAY);
  for (uint64_t i = 0; i < n_programs; i++) {
    ps_program *p = rp_make_for(seed + i, N_STREAMS, HOST_STREAMS);
    if (!same_as_serial(e, p, PS__RULES_ALL, seed + i, 2 + i % 6, i % 3)) {
      printf("FAIL program %llu %s\n", (unsigned long long)(seed + i), how);
      exit(1);
    }
    ps_program_destroy(p);
  }
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok random programs on GPU and host streams %s: %llu\n", how,
         (unsigned long long)n_programs);
}

static void test_mutation(const char *name, unsigned rule, uint64_t n_programs, uint64_t seed) {
  uint64_t wrong = 0;
  ps_engine *e = open_engine(4 * AWAY);
  for (uint64_t n = 0; n < n_programs; n++) {
    ps_program *p = rp_make_for(seed + n, N_STREAMS, HOST_STREAMS);
    wrong += !same_as_serial(e, p, PS__RULES_ALL & ~rule, seed + n, 3, 0);
    ps_program_destroy(p);
  }
  CHECK(ps_engine_close(e) == PS_OK);
  printf("%s without rule %s: of %llu programs %llu ran wrong\n", wrong ? "ok" : "FAIL", name,
         (unsigned long long)n_programs, (unsigned long long)wrong);
  CHECK(wrong > 0);
}

/* ---- refusals, errors, cancel ---------------------------------------------------------------- */

static void test_refusals(void) {
  ps_engine *e = open_engine(4096);
  ps_run *r;
  ps_run_config rc = {.struct_bytes = sizeof rc};
  ps_program *p = program();
  add(p, &k_work, HOST_A, 0, DEVICE, PS_WRITE, 0);
  ps_schedule *s = compiled(p);
  CHECK_FAILS(ps_run_create(&r, e, s, &rc), PS_EINVAL,
              "op 0 (work) of stream 3 at place 1 touches space 0");
  CHECK(ps_schedule_destroy(s) == PS_OK);
  p = program();
  add_copy(p, H2D, HOST, 0, HOST, 8, 8);
  s = compiled(p);
  CHECK_FAILS(ps_run_create(&r, e, s, &rc), PS_EINVAL, "host memory to host memory");
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_space(e, DEVICE) == NULL &&
        ps_engine_space(e, HOST) != NULL);
  ps_engine_config cfg = {.struct_bytes = sizeof cfg, .n_places = 1, .n_spaces = 1, .n_streams = 1};
  cfg.place[0] = (ps_place){.kind = PS_PLACE_DEVICE, .backend = PS_BACKEND_CUDA, .device = 99};
  cfg.stream[0].n_threads = 1;
  ps_engine *none;
  CHECK_FAILS(ps_engine_create(&none, &cfg), PS_EDEVICE, "GPU 99");
  cfg.place[0].device = 0;
  cfg.space[0].bytes = (uint64_t)1 << 46;
  CHECK_FAILS(ps_engine_create(&none, &cfg), PS_ENOMEM, "lower device_mem_bytes");
  cfg.n_places = 2;
  cfg.place[1] = cfg.place[0];
  CHECK_FAILS(ps_engine_create(&none, &cfg), PS_EINVAL, "places 0 and 1 are both GPU 0");
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok what the GPU cannot do is refused by op, GPU and bytes\n");
}

/* Copies reach over ranges of pinned memory that begin after what is not pinned; the caller's reach
 * what is not pinned too. More than can be pinned is refused with how much could be. */
static void test_pageable(void) {
  enum { PART = 192 << 10, AROUND = 4096 };
  const uint64_t bytes = (1ull << 30) + (4 << 20), copied = bytes - PART;
  ps_engine_config cfg = config(bytes);
  ps_engine *e;
  cfg.space[HOST].pageable_bytes = PART;
  CHECK(ps_engine_create(&e, &cfg) == PS_OK && ps_engine_space_pinned(e, HOST) == copied);
  char *host = ps_engine_space(e, HOST), back[2 * AROUND];
  for (uint64_t i = 0; i < bytes; i += 1000)
    host[i] = (char)(i / 1000 % 251);
  move(e, true, PART, copied);
  memset(host + PART, 0, copied);
  move(e, false, PART, copied);
  for (uint64_t i = 0; i < bytes; i += 1000)
    CHECK(host[i] == (char)(i / 1000 % 251));
  CHECK(ps__engine_read(e, HOST, PART - AROUND, back, sizeof back) == PS_OK);
  CHECK(memcmp(back, host + PART - AROUND, sizeof back) == 0);
  CHECK(ps_engine_close(e) == PS_OK);
  ps__pin_limit(1ull << 30);
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EDEVICE, "pinning stopped at 1.0 GiB of 1.0 GiB");
  CHECK(ps_pinned_at_most() == 1ull << 30);
  cfg.space[HOST].pageable_bytes = bytes - (1ull << 30);
  CHECK(ps_engine_create(&e, &cfg) == PS_OK && ps_pinned_at_most() == 0);
  ps__pin_limit(0);
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok part of a host's space is not pinned\n");
}

static ps_status fail_at_2(const ps_launch *l) {
  usleep(2000); /* the device streams wait for this, submitted well ahead */
  return l->step == 2 ? ps__fail(PS_ENUMERIC, "the loss is not finite") : PS_OK;
}
static const ps_kernel k_fail = {.name = "brittle", .op_class = PS_CLASS_OTHER, .fn = {fail_at_2}};

static void test_host_error(void) {
  ps_engine *e = open_engine(4096);
  ps_program *p = program();
  add(p, &k_fail, HOST_A, 0, HOST, PS_READ_WRITE, 0);
  add_copy(p, H2D, HOST, 0, DEVICE, 0, 8);
  add(p, &k_work, COMPUTE, 1000, DEVICE, PS_READ_WRITE, 0);
  add_copy(p, D2H, DEVICE, 0, HOST, 8, 8);
  add(p, &k_work, HOST_B, 0, HOST, PS_READ, 8);
  ps_schedule *s = compiled(p);
  for (int again = 0; again < 2; again++) { /* the engine is as good as new after it */
    ps_run *r = start(e, s, 4);
    CHECK(ps_run_submit(r, 100) == PS_OK);
    CHECK_FAILS(
        ps_run_wait(r, 100), PS_ENUMERIC,
        "the loss is not finite (op 0, brittle, layer 3, round 1, chunk 2, of the run's step 3");
    CHECK(ps_run_steps_done(r) == 2 && ps_run_wait(r, 2) == PS_OK &&
          ps_run_wait(r, 3) == PS_ENUMERIC);
    ps_run_destroy(r);
  }
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  printf("ok a failing host op stops the run and lets the GPU go; the steps before it are whole\n");
}

static void cancel_later(void *arg) {
  usleep(5000);
  ps_run_cancel(arg);
}

static void test_cancel(void) {
  ps_engine *e = open_engine(4096);
  ps_program *p = program();
  ps__thread *t;
  add(p, &k_work, COMPUTE, 100000, DEVICE, PS_READ_WRITE, 0);
  add_copy(p, D2H, DEVICE, 0, HOST, 0, 8);
  add(p, &k_work, HOST_A, 0, HOST, PS_READ_WRITE, 0);
  add_copy(p, H2D, HOST, 0, DEVICE, 0, 8);
  ps_schedule *s = compiled(p);
  ps_run *r = start(e, s, 0);
  CHECK(ps_run_submit(r, 1000000) == PS_OK &&
        ps__thread_start(&t, cancel_later, r, "cancel") == PS_OK);
  CHECK_FAILS(ps_run_wait(r, 1000000), PS_ECANCELLED, "cancelled");
  ps__thread_join(t);
  ps_run_destroy(r);
  r = start(e, s, 0);
  CHECK(ps_run_submit(r, 3) == PS_OK && ps_run_wait(r, 3) == PS_OK && ps_run_steps_done(r) == 3);
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  printf("ok a run is cancelled, and the engine runs on\n");
}

/* A stray write ends the context: in a process of its own. */
static void stray(void) {
  ps_engine *e = open_engine(4096);
  ps_program *p = program();
  add(p, &k_work, HOST_A, 0, HOST, PS_WRITE, 0);
  add(p, &k_stray, COMPUTE, 0, DEVICE, PS_WRITE, 0);
  add_copy(p, D2H, DEVICE, 0, HOST, 8, 8);
  add(p, &k_work, HOST_B, 0, HOST, PS_READ, 8);
  ps_schedule *s = compiled(p);
  ps_run *r = start(e, s, 2);
  CHECK(ps_run_submit(r, 50) == PS_OK);
  CHECK_FAILS(ps_run_wait(r, 50), PS_EDEVICE, "the GPU failed");
  printf("  says: %s\n", ps_last_error());
  CHECK(strstr(ps_last_error(),
               "at or after op 1, stray, layer 3, round 1, chunk 2, of the run's step 3") &&
        ps_run_steps_done(r) <= 2);
  ps_run_destroy(r);
  ps_run_config rc = {.struct_bytes = sizeof rc};
  CHECK_FAILS(ps_run_create(&r, e, s, &rc), PS_EDEVICE, "start anew");
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
}

static void test_device_error(const char *self) {
  int status = 0;
  fflush(stdout);
  pid_t child = fork(); /* before anything of CUDA is called in this process */
  CHECK(child >= 0);
  if (child == 0) {
    execl(self, self, "--stray", (char *)NULL);
    _Exit(127);
  }
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  printf("ok a stray write stops the run, named, and the engine for good\n");
}

/* ---- traces ---------------------------------------------------------------------------------- */

static ps_status doze(const ps_launch *l) {
  usleep(500);
  return PS_OK;
}
static const ps_kernel k_doze = {
    .name = "doze", .op_class = PS_CLASS_OTHER, .fn = {doze, work_cuda}};

/* A warm-up leaves zeros. Beside other work on the GPU they come late: nothing that a run writes
 * may be zeroed after it. */
static void test_zeros_come_first(void) {
  enum { BUSY_NS = 100000000, VALUE = 42 };
  ps_engine *e = open_engine(4096);
  unsigned char *host = ps_engine_space(e, HOST);
  ps_program *p = program();
  add_copy(p, D2H, DEVICE, 0, HOST, 0, 8);
  ps_schedule *s = compiled(p);
  CHECK(work_on_default_stream(BUSY_NS) && ps__engine_warm(e, s) == PS_OK);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  host[0] = VALUE;
  move(e, true, 0, 8);
  const struct timespec longer = {.tv_nsec = 2 * BUSY_NS};
  nanosleep(&longer, NULL);
  host[0] = 0;
  move(e, false, 0, 8);
  CHECK(host[0] == VALUE);
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok what a run writes is not zeroed late\n");
}

static _Atomic bool is_open, was_read;
static ps_status wait_for_gate(const ps_launch *l) {
  while (!atomic_load(&is_open))
    usleep(1000);
  return PS_OK;
}
static const ps_kernel k_gate = {.name = "gate", .op_class = PS_CLASS_OTHER, .fn = {wait_for_gate}};

static void read_beside(void *engine) {
  char there[8];
  CHECK(ps__engine_read(engine, DEVICE, 1024, there, sizeof there) == PS_OK);
  atomic_store(&was_read, true);
}

/* The GPU has more to do than its queue takes, and waits for a host op. That op waits for a thread
 * that reads device memory, as an update waits for a checkpoint's writer. */
static void test_read_that_is_awaited(void) {
  enum { N_WORK = 5000, PATIENCE_MS = 10000 };
  ps_engine *e = open_engine(4096);
  ps_program *p = program();
  ps__thread *t;
  add(p, &k_gate, HOST_A, 0, HOST, PS_READ_WRITE, 0);
  add_copy(p, H2D, HOST, 0, DEVICE, 0, 8);
  for (uint32_t i = 0; i < N_WORK; i++)
    add(p, &k_work, COMPUTE, 0, DEVICE, PS_READ_WRITE, 0);
  ps_schedule *s = compiled(p);
  ps_run *r = start(e, s, 0);
  ps__engine_awaited(e, true);
  CHECK(ps_run_submit(r, 1) == PS_OK);
  usleep(200000); /* the queue is full by now, if it is filled */
  CHECK(ps__thread_start(&t, read_beside, e, "reader") == PS_OK);
  for (int i = 0; i < PATIENCE_MS && !atomic_load(&was_read); i++)
    usleep(1000);
  const bool in_time = atomic_load(&was_read);
  atomic_store(&is_open, true);
  ps__thread_join(t);
  ps__engine_awaited(e, false);
  CHECK(ps_run_wait(r, 1) == PS_OK);
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  CHECK(in_time);
  printf("ok device memory is read while a host op waits for that, and the GPU for the op\n");
}

/* A chain host, copy, 300 us of GPU, copy, host: every op after the one that it waits for, and
 * as long as it takes. The host's and the GPU's clocks are held together to 30 us: an event and
 * a look at the clock are within that of each other. */
static void test_trace(void) {
  enum { SLACK_NS = 30000, STEPS = 5, KEPT = 3, N_OPS = 5 };
  ps_engine *e = open_engine(4096);
  ps_program *p = program();
  ps_trace_event ev[KEPT * N_OPS];
  uint64_t n = 0;
  add(p, &k_doze, HOST_A, 0, HOST, PS_READ_WRITE, 0);
  add_copy(p, H2D, HOST, 0, DEVICE, 0, 8);
  add(p, &k_doze, COMPUTE, 300000, DEVICE, PS_READ_WRITE, 0);
  add_copy(p, D2H, DEVICE, 0, HOST, 8, 8);
  add(p, &k_doze, HOST_B, 0, HOST, PS_READ_WRITE, 8);
  ps_schedule *s = compiled(p);
  ps_run *r = start(e, s, KEPT);
  CHECK(ps_run_submit(r, STEPS) == PS_OK && ps_run_wait(r, STEPS) == PS_OK);
  CHECK(ps_run_trace(r, ev, KEPT * N_OPS, &n) == PS_OK && n == KEPT * N_OPS);
  for (uint64_t i = 0; i < n; i++) {
    uint64_t ns = ev[i].end_ns - ev[i].start_ns;
    CHECK(ev[i].op == i % N_OPS && ev[i].step == STEPS - KEPT + i / N_OPS);
    CHECK(ev[i].queued_ns <= ev[i].start_ns && ev[i].start_ns <= ev[i].end_ns);
    CHECK(ev[i].op == 0 || ev[i].start_ns + SLACK_NS >= ev[i - 1].end_ns);
    CHECK(ev[i].op != 2 || (ns >= 299000 && ns < 600000));
  }
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  printf("ok the trace of GPU and host ops agrees with their order and lengths\n");
}

int main(int argc, char **argv) {
  bool child = argc > 1 && strcmp(argv[1], "--stray") == 0;
  uint64_t n = argc > 1 && !child ? strtoull(argv[1], NULL, 10) : 2000,
           seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  ps_engine_config cfg = {.struct_bytes = sizeof cfg, .n_places = 2, .n_spaces = 1, .n_streams = 1};
  cfg.place[1] = (ps_place){.kind = PS_PLACE_DEVICE, .backend = PS_BACKEND_CUDA};
  cfg.stream[0].n_threads = 1;
  if (!child && access("/proc/driver/nvidia/version", F_OK) == 0)
    test_device_error("/proc/self/exe");
  int64_t before = ps__live_allocations();
  ps_engine *e;
  ps_status st = ps_engine_create(&e, &cfg);
  if (st == PS_EDEVICE) {
    printf("ok skipped: %s\n", ps_last_error());
    return 0;
  }
  CHECK(st == PS_OK && mix_load());
  CHECK(ps_engine_close(e) == PS_OK);
  if (child) {
    stray();
    return 0;
  }
  test_refusals();
  test_pageable();
  test_seam();
  test_zeros_come_first();
  test_random("with stream memory operations", n, seed);
  test_mutation("read after write", PS__RULE_RAW, n / 4 + 20, seed);
  test_mutation("write after read", PS__RULE_WAR, n / 4 + 20, seed);
  test_mutation("the step before", PS__RULE_CROSS_STEP, n / 4 + 20, seed);
  test_host_error();
  test_cancel();
  test_trace();
  test_read_that_is_awaited();
  ps__cuda_without_mem_ops(true);
  test_random("without them", n / 4, seed);
  test_host_error();
  test_cancel();
  CHECK(ps__live_allocations() == before);
  return 0;
}
#endif
