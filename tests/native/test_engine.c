/* test_engine.c - the engine's contract: what is refused, what fails, how it stops, what it
 * leaves behind. */
#include "engine/turn.h"
#include "random_program.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

static ps_engine_config config(uint32_t n_streams, uint64_t bytes) {
  ps_engine_config cfg = {
      .struct_bytes = sizeof cfg, .n_places = 2, .n_spaces = 2, .n_streams = n_streams};
  cfg.place[0] = (ps_place){.kind = PS_PLACE_DEVICE};
  cfg.place[1] = (ps_place){.kind = PS_PLACE_HOST};
  cfg.space[0] = (ps_space_config){.bytes = bytes, .place = 0};
  cfg.space[1] = (ps_space_config){.bytes = bytes, .place = 1};
  for (uint32_t i = 0; i < n_streams; i++) {
    cfg.stream[i] = (ps_stream_config){.place = 0, .n_threads = 1, .scratch_bytes = 100};
    snprintf(cfg.stream[i].name, sizeof cfg.stream[i].name, "s%u", i);
  }
  return cfg;
}

static ps_engine *open_engine(uint32_t n_streams) {
  ps_engine_config cfg = config(n_streams, 4096);
  ps_engine *e;
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  return e;
}

static ps_run_config run_config(uint32_t trace_steps) {
  return (ps_run_config){.struct_bytes = sizeof(ps_run_config), .trace_steps = trace_steps};
}

static ps_access at(uint32_t space, uint32_t mode, uint64_t offset) {
  return (ps_access){space, mode, offset, 8};
}

static void add(ps_program *p, const ps_kernel *k, uint32_t stream, const void *args,
                uint32_t args_bytes, ps_access a) {
  ps_op op = {.kernel = k,
              .args = args,
              .args_bytes = args_bytes,
              .stream = stream,
              .access = &a,
              .n_access = 1,
              .tag = {.layer = 3, .round = 1, .chunk = 2}};
  CHECK(ps_program_add(p, &op, NULL) == PS_OK);
}

static ps_status nothing(const ps_launch *l) { return PS_OK; }
static const ps_kernel k_nothing = {.name = "nothing", .op_class = PS_CLASS_OTHER, .fn = {nothing}};

/* ---- refusals -------------------------------------------------------------------------------- */

static void test_program_checks(void) {
  ps_program *p = (ps_program *)8;
  CHECK_FAILS(ps_program_create(&p, 0, 1), PS_EINVAL, "n_spaces");
  CHECK_FAILS(ps_program_create(&p, 1, PS_MAX_STREAMS + 1), PS_EINVAL, "n_streams");
  CHECK(p == (ps_program *)8 && ps_program_create(&p, 2, 2) == PS_OK);
  ps_access a[3] = {at(0, PS_READ, 0), at(0, PS_WRITE, 8), at(1, PS_WRITE, 0)};
  ps_op op = {.kernel = &k_nothing, .access = a, .n_access = 3};
  op.stream = 2;
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "stream 2");
  op.stream = 0;
  a[1].space = 2;
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "space 2");
  a[1] = at(0, PS_WRITE, 7);
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "accesses 0 and 1 overlap");
  a[1] = at(0, 4, 8);
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "mode 4");
  a[1] = (ps_access){0, PS_WRITE, 8, 0};
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "bytes is 0");
  a[1] = (ps_access){0, PS_WRITE, UINT64_MAX - 3, 8};
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "overflows");
  a[1] = at(0, PS_READ, 4); /* two reads may overlap */
  CHECK(ps_program_add(p, &op, NULL) == PS_OK);
  op.n_access = PS_MAX_ACCESSES + 1;
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "n_access");
  op.n_access = 1;
  op.args_bytes = 4;
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "args");
  const ps_kernel nameless = {.fn = {nothing}};
  op = (ps_op){.kernel = &nameless, .access = a, .n_access = 1};
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "name of its kernel is NULL");
  op = (ps_op){.access = a, .n_access = 2};
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "copy");
  a[1] = (ps_access){1, PS_WRITE, 0, 9};
  CHECK_FAILS(ps_program_add(p, &op, NULL), PS_EINVAL, "copy");
  a[1].bytes = 8;
  uint64_t idx = 99;
  CHECK(ps_program_add(p, &op, &idx) == PS_OK && idx == 1 && ps_program_n_ops(p) == 2);
  ps_program_destroy(p);
  ps_program_destroy(NULL);
  printf("ok a program refuses bad ops by field\n");
}

static void test_engine_checks(void) {
  ps_engine *e = (ps_engine *)8;
  ps_engine_config cfg = config(2, 4096);
  cfg.struct_bytes--;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "struct_bytes");
  cfg = config(2, 4096);
  cfg.place[0].backend = PS_BACKEND_CUDA + 5;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "place 0: backend 6 is unknown");
  cfg = config(2, 4096);
  cfg.stream[1].n_threads = 0;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "stream 1: n_threads 0");
  cfg = config(2, 4096);
  cfg.space[1].bytes = (uint64_t)1 << 47; /* more than a process can address */
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_ENOMEM, "space 1: 128.0 TiB");
  CHECK(e == (ps_engine *)8);
  e = open_engine(2);
  CHECK(ps_engine_space_bytes(e, 0) == 2 << 20 && ps_engine_space_bytes(e, 2) == 0 &&
        ps_engine_space(e, 2) == NULL);
  CHECK((uintptr_t)ps_engine_space(e, 1) % 4096 == 0);
  CHECK(ps_engine_close(e) == PS_OK && ps_engine_close(NULL) == PS_OK);
  printf("ok an engine refuses bad configurations by field\n");
}

static void test_run_checks(void) {
  static const ps_kernel lacking = {
      .name = "lacking", .op_class = PS_CLASS_OTHER, .fn = {NULL, nothing}};
  ps_engine *e = open_engine(2);
  ps_program *p;
  ps_schedule *s;
  ps_run *r = (ps_run *)8, *r2;
  ps_run_config rc = run_config(0), bad = {.struct_bytes = 1};
  CHECK(ps_program_create(&p, 2, 2) == PS_OK);
  add(p, &k_nothing, 0, NULL, 0, at(0, PS_WRITE, (2 << 20) - 8));
  CHECK(ps_schedule_compile(&s, p) == PS_OK && ps_schedule_space_bytes(s, 0) == 2 << 20);
  CHECK_FAILS(ps_run_create(&r, e, s, &bad), PS_EINVAL, "struct_bytes");
  CHECK(ps_run_create(&r, e, s, &rc) == PS_OK);
  CHECK_FAILS(ps_run_create(&r2, e, s, &rc), PS_EBUSY, "run");
  CHECK_FAILS(ps_engine_close(e), PS_EBUSY, "run");
  CHECK_FAILS(ps_schedule_destroy(s), PS_EBUSY, "run");
  CHECK_FAILS(ps_run_wait(r, 1), PS_EINVAL, "0 submitted");
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_schedule_destroy(NULL) == PS_OK);
  add(p, &k_nothing, 0, NULL, 0, at(0, PS_WRITE, 2 << 20));
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  CHECK_FAILS(ps_run_create(&r, e, s, &rc), PS_EINVAL, "space 0");
  CHECK(ps_schedule_destroy(s) == PS_OK);
  ps_program_destroy(p);
  CHECK(ps_program_create(&p, 2, 2) == PS_OK);
  add(p, &lacking, 0, NULL, 0, at(0, PS_WRITE, 0));
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  CHECK_FAILS(ps_run_create(&r, e, s, &rc), PS_EINVAL, "lacking");
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  ps_program_destroy(p);
  printf("ok a run refuses what does not fit its engine; closing is busy while it lives\n");
}

/* ---- what ops get ---------------------------------------------------------------------------- */

static ps_status see_launch(const ps_launch *l) {
  bool ok = (uintptr_t)l->args % 16 == 0 && *(const uint32_t *)l->args == 77 && l->n_ptr == 1 &&
            l->stream == 1 && l->op == 0 && l->backend == PS_BACKEND_CPU;
  *(uint64_t *)l->ptr[0] += ok ? 1 : 1000;
  return PS_OK;
}
static const ps_kernel k_see = {.name = "see", .op_class = PS_CLASS_OTHER, .fn = {see_launch}};

static void test_launch(void) {
  ps_engine_config cfg = config(2, (uint64_t)40 << 20);
  cfg.stream[1].n_threads = 3;
  ps_engine *e;
  ps_program *p;
  ps_schedule *s;
  ps_run *r;
  ps_run_config rc = run_config(0);
  uint32_t args = 77;
  uint64_t peak = 1, bytes = ((uint64_t)9 << 20) + 13; /* 10 pieces over 3 threads */
  CHECK(ps_engine_create(&e, &cfg) == PS_OK && ps_program_create(&p, 2, 2) == PS_OK);
  add(p, &k_see, 1, &args, sizeof args, at(1, PS_READ_WRITE, 16));
  ps_op copy = {.stream = 1,
                .access = (ps_access[]){{1, PS_READ, 0, bytes}, {0, PS_WRITE, 5, bytes}},
                .n_access = 2};
  CHECK(ps_program_add(p, &copy, NULL) == PS_OK && ps_schedule_compile(&s, p) == PS_OK);
  ps_program_destroy(p); /* a schedule lives on without its program */
  CHECK(ps_engine_space_peak(e, 0, &peak) == PS_OK && peak == 0);
  char *from = ps_engine_space(e, 1), *to = ps_engine_space(e, 0);
  for (uint64_t i = 0; i < bytes; i++)
    from[i] = (char)mix64(i);
  memset(from + 16, 0, 8);
  CHECK(ps_run_create(&r, e, s, &rc) == PS_OK && ps_run_submit(r, 5) == PS_OK &&
        ps_run_wait(r, 5) == PS_OK);
  CHECK(*(uint64_t *)(from + 16) == 5 && memcmp(from, to + 5, bytes) == 0);
  ps_run_destroy(r);
  /* touched up to there; a huge page counts whole */
  CHECK(ps_engine_space_peak(e, 0, &peak) == PS_OK && peak >= bytes + 5 &&
        peak <= (uint64_t)10 << 20);
  CHECK_FAILS(ps_engine_space_peak(e, 2, &peak), PS_EINVAL, "space 2");
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  printf("ok ops get arguments and addresses; copies copy; the peak is what was touched\n");
}

static void test_empty(void) {
  ps_engine *e = open_engine(3);
  ps_program *p;
  ps_schedule *s;
  ps_run *r;
  ps_run_config rc = run_config(2);
  uint64_t n = 9;
  CHECK(ps_program_create(&p, 1, 3) == PS_OK && ps_schedule_compile(&s, p) == PS_OK);
  CHECK(ps_run_create(&r, e, s, &rc) == PS_OK && ps_run_submit(r, 4) == PS_OK &&
        ps_run_wait(r, 4) == PS_OK);
  CHECK(ps_run_steps_done(r) == 4 && ps_run_trace(r, NULL, 0, &n) == PS_OK && n == 0);
  ps_run_destroy(r);
  CHECK(ps_sim_run(s, (ps_sim_cost_fn)0, NULL, 1, NULL, NULL) == PS_EINVAL);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  ps_program_destroy(p);
  printf("ok an empty program runs\n");
}

/* Every stream but the first waits for the first one's op, which knows all of them. */
static void test_waiters(void) {
  ps_program *p;
  ps_schedule *s;
  CHECK(ps_program_create(&p, 1, PS_MAX_STREAMS) == PS_OK);
  for (uint32_t i = 0; i < PS_MAX_STREAMS; i++)
    add(p, &k_see, i, NULL, 0, at(0, i ? PS_READ : PS_WRITE, 0));
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  CHECK(s->list.ops[0].waiters == (1ull << PS_MAX_STREAMS) - 2);
  ps_program_destroy(p);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  printf("ok an op knows all streams that wait for it\n");
}

/* ---- stopping -------------------------------------------------------------------------------- */

static ps_status fail_at_2(const ps_launch *l) {
  return l->step == 2 ? ps_error_set(PS_ENUMERIC, "the loss\nis not finite") : PS_OK;
}
static ps_status fail_silently(const ps_launch *l) { return l->step == 2 ? PS_EIO : PS_OK; }
static const ps_kernel k_fail = {.name = "brittle", .op_class = PS_CLASS_OTHER, .fn = {fail_at_2}},
                       k_silent = {
                           .name = "mute", .op_class = PS_CLASS_OTHER, .fn = {fail_silently}};

/* Stream 0 fails while streams 1..3 sleep in waits for it. */
static void test_error(const ps_kernel *k, ps_status code, const char *why) {
  ps_engine *e = open_engine(4);
  ps_program *p;
  ps_schedule *s;
  ps_run *r;
  ps_run_config rc = run_config(8);
  CHECK(ps_program_create(&p, 2, 4) == PS_OK);
  add(p, &k_nothing, 1, NULL, 0, at(0, PS_WRITE, 8));
  add(p, k, 0, NULL, 0, at(0, PS_READ_WRITE, 0));
  for (uint32_t i = 1; i < 4; i++)
    add(p, &k_nothing, i, NULL, 0, at(0, PS_READ, 0));
  CHECK(ps_schedule_compile(&s, p) == PS_OK && ps_run_create(&r, e, s, &rc) == PS_OK &&
        ps_run_submit(r, 100) == PS_OK);
  CHECK_FAILS(ps_run_wait(r, 100), code, why);
  CHECK(strstr(ps_last_error(), "layer 3, round 1, chunk 2, of the run's step 3") &&
        strstr(ps_last_error(), "(op 1, "));
  CHECK(ps_run_steps_done(r) == 2 && ps_run_submit(r, 1) == code && ps_run_wait(r, 3) == code);
  CHECK(ps_run_wait(r, 2) == PS_OK); /* steps before the failing one are whole */
  /* the other streams come to rest by themselves */
  for (uint64_t n = 0, until = ps__now_ns() + 300000000000u;;) {
    ps_status st = ps_run_trace(r, NULL, 0, &n);
    CHECK(st == PS_OK || (st == PS_ESTATE && ps__now_ns() < until));
    if (st == PS_OK) {
      /* two steps of 5 ops, and in the third perhaps the op that does not wait */
      CHECK(n >= 10 && n <= 11);
      break;
    }
    sched_yield();
  }
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  ps_program_destroy(p);
}

static ps_status slow(const ps_launch *l) {
  usleep(300);
  return PS_OK;
}
static const ps_kernel k_slow = {.name = "slow", .op_class = PS_CLASS_OTHER, .fn = {slow}};
static ps_run *volatile to_cancel;
static void cancel_later(void *arg) {
  usleep(3000);
  ps_run_cancel(arg);
}
static void on_alarm(int sig) { ps_run_cancel(to_cancel); }

static void test_cancel(bool by_signal) {
  ps_engine *e = open_engine(3);
  ps_program *p;
  ps_schedule *s;
  ps_run *r;
  ps_run_config rc = run_config(0);
  ps__thread *t = NULL;
  CHECK(ps_program_create(&p, 2, 3) == PS_OK);
  add(p, &k_slow, 0, NULL, 0, at(0, PS_WRITE, 0));
  add(p, &k_nothing, 1, NULL, 0, at(0, PS_READ, 0));
  add(p, &k_nothing, 2, NULL, 0, at(0, PS_READ, 0));
  CHECK(ps_schedule_compile(&s, p) == PS_OK && ps_run_create(&r, e, s, &rc) == PS_OK &&
        ps_run_submit(r, 1000000) == PS_OK);
  if (by_signal) {
    to_cancel = r;
    signal(SIGALRM, on_alarm);
    ualarm(3000, 0);
  } else {
    CHECK(ps__thread_start(&t, cancel_later, r, "cancel") == PS_OK);
  }
  CHECK_FAILS(ps_run_wait(r, 1000000), PS_ECANCELLED, "cancelled");
  CHECK(ps_run_submit(r, 1) == PS_ECANCELLED && ps_run_steps_done(r) < 1000000);
  ps__thread_join(t);
  ps_run_destroy(r);
  /* the engine is as good as new */
  CHECK(ps_run_create(&r, e, s, &rc) == PS_OK && ps_run_submit(r, 3) == PS_OK);
  CHECK(ps_run_wait(r, 3) == PS_OK && ps_run_steps_done(r) == 3);
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  ps_program_destroy(p);
}

/* Step 4 fails on stream 0 as soon as it may, while stream 2 is steps behind: it must still end
 * steps 0 to 3, and begin none. */
static _Atomic uint64_t n_late;
static ps_status late(const ps_launch *l) {
  usleep(2000);
  n_late++;
  return PS_OK;
}
static ps_status fail_at_4(const ps_launch *l) {
  return l->step == 4 ? ps__fail(PS_EIO, "the data ends") : PS_OK;
}
static const ps_kernel k_late = {.name = "late", .op_class = PS_CLASS_OTHER, .fn = {late}},
                       k_fail_4 = {.name = "reader", .op_class = PS_CLASS_OTHER, .fn = {fail_at_4}};

static void test_steps_before_the_error(void) {
  ps_engine *e = open_engine(3);
  ps_program *p;
  ps_schedule *s;
  ps_run *r;
  ps_run_config rc = run_config(0);
  CHECK(ps_program_create(&p, 2, 3) == PS_OK);
  add(p, &k_fail_4, 0, NULL, 0, at(0, PS_WRITE, 0));
  add(p, &k_nothing, 1, NULL, 0, at(0, PS_WRITE, 4));
  add(p, &k_late, 2, NULL, 0, at(0, PS_READ_WRITE, 4));
  CHECK(ps_schedule_compile(&s, p) == PS_OK && ps_run_create(&r, e, s, &rc) == PS_OK);
  n_late = 0;
  CHECK(ps_run_submit(r, 6) == PS_OK);
  CHECK_FAILS(ps_run_wait(r, 6), PS_EIO, "the data ends (op 0, reader");
  CHECK(ps_run_steps_done(r) == 4 && ps_run_wait(r, 4) == PS_OK && ps_run_wait(r, 5) == PS_EIO &&
        ps_run_wait(r, 9) == PS_EIO);
  ps_run_destroy(r);
  CHECK(n_late == 4);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  ps_program_destroy(p);
}

/* ---- fail the Nth ---------------------------------------------------------------------------- */

static ps_status whole_life(void) {
  ps_engine_config cfg = config(3, 4096);
  cfg.stream[2].n_threads = 3;
  ps_run_config rc = run_config(2);
  ps_engine *e = NULL;
  ps_program *p = NULL;
  ps_schedule *s = NULL;
  ps_run *r = NULL;
  ps_status st = ps_program_create(&p, 2, 3);
  for (uint32_t i = 0; st == PS_OK && i < 200; i++) {
    ps_access a = at(i % 2, 1 + i % 3, i % 11 * 4);
    st = ps_program_add(p,
                        &(ps_op){.kernel = &k_nothing,
                                 .args = &i,
                                 .args_bytes = 4,
                                 .stream = i % 3,
                                 .access = &a,
                                 .n_access = 1},
                        NULL);
  }
  if (st == PS_OK)
    st = ps_schedule_compile(&s, p);
  if (st == PS_OK)
    st = ps_engine_create(&e, &cfg);
  if (st == PS_OK)
    st = ps_run_create(&r, e, s, &rc);
  if (st == PS_OK)
    st = ps_run_submit(r, 2);
  if (st == PS_OK)
    st = ps_run_wait(r, 2);
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  ps_program_destroy(p);
  return st;
}

static void test_fail_nth(int kind, ps_status code) {
  int64_t before = ps__live_allocations(), nth = 1;
  for (;; nth++) {
    ps__fault_arm(kind, nth);
    ps_status st = whole_life();
    ps__fault_arm(kind, 0);
    CHECK(ps__live_allocations() == before);
    if (st == PS_OK)
      break;
    CHECK(st == code);
  }
  CHECK(nth > 4);
  printf("ok fail the nth %s: %lld places\n",
         kind == PS_FAULT_ALLOC ? "allocation" : "thread start", (long long)nth - 1);
}

/* A run allocates nothing between its first and its last step. */
static void test_no_allocation(void) {
  ps_engine *e = open_engine(3);
  ps_program *p = rp_make(5, 3);
  ps_schedule *s;
  ps_run *r;
  ps_run_config rc = run_config(2);
  CHECK(ps_schedule_compile(&s, p) == PS_OK && ps_run_create(&r, e, s, &rc) == PS_OK);
  ps__fault_arm(PS_FAULT_ALLOC, 0);
  CHECK(ps_run_submit(r, 50) == PS_OK && ps_run_wait(r, 50) == PS_OK &&
        ps__fault_count(PS_FAULT_ALLOC) == 0);
  ps_run_destroy(r);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(e) == PS_OK);
  ps_program_destroy(p);
  printf("ok nothing is allocated while a run runs\n");
}

/* ---- life cycle ------------------------------------------------------------------------------ */

static ps_run *lived;
static ps_engine *lived_on;
static _Atomic uint32_t asking;

static ps_status misuse(const ps_launch *l) {
  CHECK_FAILS(ps_run_wait(lived, 1), PS_ESTATE, "an op of it cannot wait for it");
  CHECK_FAILS(ps_run_destroy(lived), PS_ESTATE, "an op of it cannot close it");
  CHECK_FAILS(ps_engine_close(lived_on), PS_EBUSY, "run");
  CHECK(ps_op_engine() == lived_on && !ps_run_at_rest(lived));
  return PS_OK;
}

static void ask(void *arg) {
  char text[512];
  for (uint64_t done = 0; atomic_load(&asking);) {
    const uint64_t now = ps_run_steps_done(lived);
    CHECK(now >= done);
    done = now;
    ps_run_where(lived, text, sizeof text);
    CHECK(strstr(text, "then misuse") || strstr(text, "submitted steps ended"));
  }
}

static void test_life(void) {
  static const ps_kernel k_misuse = {.name = "misuse", .op_class = PS_CLASS_OTHER, .fn = {misuse}};
  ps_program *p;
  ps_schedule *s;
  ps_run_config rc = run_config(0);
  ps__thread *thread;
  lived_on = open_engine(2);
  CHECK(ps_program_create(&p, 2, 2) == PS_OK);
  for (uint32_t i = 0; i < 2; i++)
    add(p, &k_misuse, i, NULL, 0, at(0, PS_WRITE, 8 * i));
  CHECK(ps_schedule_compile(&s, p) == PS_OK && ps_run_create(&lived, lived_on, s, &rc) == PS_OK);
  CHECK(!ps_op_engine() && ps_run_at_rest(lived));
  atomic_store(&asking, 1);
  CHECK(ps__thread_start(&thread, ask, NULL, "ask") == PS_OK);
  for (uint64_t n = 1; n <= 200; n++)
    CHECK(ps_run_submit(lived, 1) == PS_OK && (n % 20 || ps_run_wait(lived, n) == PS_OK));
  atomic_store(&asking, 0);
  ps__thread_join(thread);
  CHECK(ps_run_at_rest(lived) && ps_run_destroy(lived) == PS_OK && ps_run_destroy(NULL) == PS_OK);
  CHECK(ps_schedule_destroy(s) == PS_OK && ps_engine_close(lived_on) == PS_OK);
  ps_program_destroy(p);
}

/* ---- pausing --------------------------------------------------------------------------------- */

/* The result depends on the order and on the number of the run's step. */
static ps_status fold(const ps_launch *l) {
  uint64_t *x = l->ptr[0];
  *x = *x * 6364136223846793005u + l->op * 31 + l->step + 1;
  return PS_OK;
}
static const ps_kernel k_fold = {.name = "fold", .op_class = PS_CLASS_OTHER, .fn = {fold}};

static ps_schedule *folding(uint32_t n_ops, uint64_t offset) {
  ps_program *p;
  ps_schedule *s;
  CHECK(ps_program_create(&p, 1, 4) == PS_OK);
  for (uint32_t i = 0; i < n_ops; i++)
    add(p, &k_fold, i % 4, NULL, 0, at(0, PS_READ_WRITE, offset));
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  ps_program_destroy(p);
  return s;
}

static uint64_t value_at(ps_engine *e, uint64_t offset) {
  uint64_t x;
  memcpy(&x, (const char *)ps_engine_space(e, 0) + offset, sizeof x);
  return x;
}

static void test_pause(void) {
  enum { STEPS = 12, TRACED = 3 };
  uint64_t want, n;
  ps_schedule *sa = folding(7, 0), *sb = folding(3, 64);
  ps_run_config rc = run_config(TRACED), plain = run_config(0);
  ps_run *a, *b = NULL;
  ps_trace_event events[TRACED * 7];
  ps_engine *e = open_engine(4);
  CHECK(ps_run_create(&a, e, sa, &rc) == PS_OK && ps_run_submit(a, STEPS) == PS_OK &&
        ps_run_wait(a, STEPS) == PS_OK && ps_run_destroy(a) == PS_OK);
  want = value_at(e, 0);
  CHECK(ps_engine_close(e) == PS_OK);

  e = open_engine(4);
  CHECK(ps_run_create(&a, e, sa, &rc) == PS_OK);
  CHECK_FAILS(ps_run_create(&b, e, sb, &plain), PS_EBUSY, "a run already");
  for (uint64_t done = 0; done < STEPS;) {
    const uint64_t k = done % 3 + 1; /* in flight when the pause is asked for */
    CHECK(ps_run_submit(a, k) == PS_OK && ps__run_pause(a) == PS_OK);
    done += k;
    CHECK(ps_run_steps_done(a) == done && ps_run_wait(a, done) == PS_OK && ps_run_at_rest(a));
    CHECK_FAILS(ps_run_submit(a, 1), PS_ESTATE, "paused");
    if (b)
      CHECK(ps__run_go_on(b) == PS_OK);
    else
      CHECK(ps_run_create(&b, e, sb, &plain) == PS_OK);
    CHECK_FAILS(ps__run_go_on(a), PS_EBUSY, "a run already");
    CHECK(ps_run_submit(b, 2) == PS_OK && ps__run_pause(b) == PS_OK && ps__run_go_on(a) == PS_OK);
    if (done % 3 == 0 && done < STEPS)
      CHECK(ps__run_pause(a) == PS_OK && ps__run_pause(a) == PS_OK && ps__run_go_on(a) == PS_OK);
  }
  CHECK(value_at(e, 0) == want && ps_run_steps_done(a) == STEPS);
  for (int paused = 0; paused < 2; paused++) { /* the trace goes past pauses */
    CHECK(ps_run_trace(a, events, TRACED * 7, &n) == PS_OK && n == TRACED * 7);
    CHECK(events[0].step == STEPS - TRACED && events[n - 1].step == STEPS - 1);
    CHECK(ps__run_pause(a) == PS_OK);
  }
  CHECK_FAILS(ps_engine_close(e), PS_EBUSY, "a run still lives");
  ps_run_cancel(a); /* a paused run stays stopped */
  CHECK_FAILS(ps__run_go_on(a), PS_ECANCELLED, "cancelled");
  CHECK(ps_run_destroy(a) == PS_OK && ps__run_go_on(b) == PS_OK && ps_run_submit(b, 1) == PS_OK);
  CHECK(ps_run_destroy(b) == PS_OK && ps_engine_close(e) == PS_OK);
  CHECK(ps_schedule_destroy(sa) == PS_OK && ps_schedule_destroy(sb) == PS_OK);
}

/* Two runs take turns. A cancel ends a run that has the engine, one that is paused, and one that is
 * created later. */
static void test_turns(void) {
  char text[256];
  ps_schedule *s = folding(7, 0);
  ps_run *a = NULL, *b = NULL, *c = NULL;
  ps__turns turns = {.engine = open_engine(4)};
  CHECK(ps__turns_at_rest(&turns));
  for (int i = 0; i < 3; i++) {
    CHECK(ps__turn_begin(&turns, &a, s, NULL) == PS_OK && ps__turn_steps(a, 2) == PS_OK);
    CHECK_FAILS(ps__turn_begin(&turns, &b, s, NULL), PS_EBUSY, "a run already");
    CHECK(ps__turn_end(a, PS_OK) == PS_OK);
    CHECK(ps__turn_begin(&turns, &b, s, NULL) == PS_OK && ps__turn_steps(b, 1) == PS_OK);
    CHECK_FAILS(ps__turn_end(b, ps__fail(PS_EIO, "its own")), PS_EIO, "its own");
    ps__turns_where(&turns, text, sizeof text);
    CHECK(turns.n == 2 && ps_run_steps_done(a) == 2 * (uint64_t)i + 2 && !text[0]);
  }
  CHECK(ps__turn_begin(&turns, &a, s, NULL) == PS_OK);
  ps__turns_cancel(&turns);
  CHECK_FAILS(ps__turn_end(a, ps__turn_steps(a, 1)), PS_ECANCELLED, "cancelled");
  CHECK_FAILS(ps__turn_begin(&turns, &b, s, NULL), PS_ECANCELLED, "cancelled");
  CHECK(ps__turn_begin(&turns, &c, s, NULL) == PS_OK);
  CHECK_FAILS(ps__turn_end(c, ps__turn_steps(c, 1)), PS_ECANCELLED, "cancelled");
  CHECK(ps__turns_at_rest(&turns) && ps_run_steps_done(a) == 6 && ps_run_steps_done(c) == 0);
  CHECK(ps__turns_close(&turns) == PS_OK && ps_engine_close(turns.engine) == PS_OK);
  CHECK(ps_schedule_destroy(s) == PS_OK);
}

/* ---- what a kernel asks of its stream -------------------------------------------------------- */

enum { ASKED_TASKS = 64 };
typedef struct asked {
  _Atomic int64_t done[ASKED_TASKS];
  _Atomic uint32_t threads; /* bits */
  char *scratch[3];
} asked;
static void asked_task(void *arg, int64_t task, uint32_t thread) {
  asked *a = arg;
  atomic_fetch_add(&a->done[task], 1);
  atomic_fetch_or(&a->threads, 1u << thread);
  memset(a->scratch[thread], (int)thread, 100);
}
static ps_status use_stream(const ps_launch *l) {
  asked *a = *(asked *const *)l->args;
  uint64_t bytes = 1;
  CHECK(ps_launch_n_threads(l) == 3 && !ps_launch_cuda_stream(l));
  CHECK(!ps_launch_scratch(l, 3, &bytes) && bytes == 0);
  for (uint32_t t = 0; t < 3; t++) {
    a->scratch[t] = ps_launch_scratch(l, t, &bytes);
    CHECK(a->scratch[t] && (uintptr_t)a->scratch[t] % 64 == 0 && bytes >= 100);
    CHECK(t == 0 || (uint64_t)(a->scratch[t] - a->scratch[t - 1]) >= bytes);
  }
  ps_launch_parallel(l, ASKED_TASKS, asked_task, a);
  return PS_OK;
}
static const ps_kernel k_use_stream = {.name = "use_stream", .fn = {use_stream}};

static void test_threads_and_scratch_of_a_kernel(void) {
  asked a = {.threads = 0}, *args = &a;
  ps_engine_config cfg = config(1, 4096);
  cfg.stream[0].n_threads = 3;
  ps_engine *e;
  ps_program *p;
  ps_schedule *s;
  ps_run *r;
  const ps_run_config how = run_config(0);
  CHECK(ps_engine_create(&e, &cfg) == PS_OK && ps_program_create(&p, 2, 1) == PS_OK);
  add(p, &k_use_stream, 0, &args, sizeof args, at(0, PS_WRITE, 0));
  CHECK(ps_schedule_compile(&s, p) == PS_OK && ps_run_create(&r, e, s, &how) == PS_OK);
  CHECK(ps_run_submit(r, 2) == PS_OK && ps_run_wait(r, 2) == PS_OK);
  for (int i = 0; i < ASKED_TASKS; i++)
    CHECK(atomic_load(&a.done[i]) == 2);
  CHECK(atomic_load(&a.threads) && atomic_load(&a.threads) < 8);
  CHECK(ps_run_destroy(r) == PS_OK && ps_engine_close(e) == PS_OK);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  ps_program_destroy(p);
  printf("ok a kernel's tasks run on its stream's threads, each with scratch of its own\n");
}

int main(void) {
  int64_t before = ps__live_allocations();
  test_program_checks();
  test_engine_checks();
  test_threads_and_scratch_of_a_kernel();
  test_run_checks();
  test_launch();
  test_empty();
  test_waiters();
  for (int i = 0; i < 50; i++) {
    test_error(&k_fail, PS_ENUMERIC, "the loss is not finite (op 1, brittle");
    test_error(&k_silent, PS_EIO, "PS_EIO");
  }
  printf("ok a failing op stops every stream and is named\n");
  for (int i = 0; i < 5; i++) {
    test_cancel(false);
    test_cancel(true);
  }
  for (int i = 0; i < 20; i++)
    test_steps_before_the_error();
  printf("ok steps before the failing one are completed\n");
  printf("ok a run is cancelled by another thread and by a signal handler\n");
  test_fail_nth(PS_FAULT_ALLOC, PS_ENOMEM);
  test_fail_nth(PS_FAULT_THREAD, PS_EDEVICE);
  test_no_allocation();
  test_life();
  for (int i = 0; i < 20; i++)
    test_pause();
  test_turns();
  printf("ok runs take turns on an engine, each as if it had not stopped\n");
  printf("ok an op neither waits for its run nor closes it; where() and steps_done() beside "
         "submit() and wait()\n");
  CHECK(ps__live_allocations() == before);
  return 0;
}
