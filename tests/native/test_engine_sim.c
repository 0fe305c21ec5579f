/* test_engine_sim.c - the simulator against figures worked out by hand; traces, simulated and
 * real, against program order. */
#include "engine/sim.h"
#include "random_program.h"
#include <math.h>
#include <unistd.h>

enum { SLOT = 8 };
static ps_status nothing(const ps_launch *l) { return PS_OK; }
static const ps_kernel k_plain = {
    .name = "plain \"quoted\"\n", .op_class = PS_CLASS_GEMM, .fn = {nothing}};

/* An op whose cost is its work: flops ns alone, and bytes hundredths of resource 0. */
static void add(ps_program *p, uint32_t stream, double ns, double percent, uint32_t n,
                const ps_access *a) {
  ps_op op = {.kernel = &k_plain,
              .stream = stream,
              .access = a,
              .n_access = n,
              .work = {.flops = ns, .bytes = percent}};
  CHECK(ps_program_add(p, &op, NULL) == PS_OK);
}
static ps_access slot(uint32_t mode, uint64_t i) { return (ps_access){0, mode, i * SLOT, SLOT}; }

static void price(void *user, const ps_op_view *op, ps_sim_cost *out) {
  out->ns = op->work.flops;
  out->demand[0] = op->work.bytes / 100;
}

static ps_schedule *compile(ps_program *p) {
  ps_schedule *s;
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  ps_program_destroy(p);
  return s;
}

/* Times of the events, one after the other, against a table {queued, start, end}. */
static void expect(ps_schedule *s, uint64_t n_steps, const uint64_t (*times)[3],
                   double last_step_end) {
  ps_trace_event ev[64];
  double end[16];
  CHECK(ps_sim_run(s, price, NULL, n_steps, ev, end) == PS_OK);
  for (uint64_t i = 0; i < n_steps * ps_schedule_n_ops(s); i++) {
    if (ev[i].queued_ns != times[i][0] || ev[i].start_ns != times[i][1] ||
        ev[i].end_ns != times[i][2])
      printf("event %llu: %llu %llu %llu\n", (unsigned long long)i,
             (unsigned long long)ev[i].queued_ns, (unsigned long long)ev[i].start_ns,
             (unsigned long long)ev[i].end_ns);
    CHECK(ev[i].queued_ns == times[i][0] && ev[i].start_ns == times[i][1] &&
          ev[i].end_ns == times[i][2]);
    CHECK(ev[i].step == i / ps_schedule_n_ops(s) && ev[i].op == i % ps_schedule_n_ops(s));
  }
  CHECK(fabs(end[n_steps - 1] - last_step_end) < 1e-6);
  CHECK(ps_schedule_destroy(s) == PS_OK);
}

/* Two ops that use 100% each of one resource, 100 ns and 300 ns alone: both at half speed until
 * 200, when the short one ends; the long one has 200 ns left and runs them alone: it ends at
 * 400. */
static void test_shared_resource(void) {
  ps_program *p;
  CHECK(ps_program_create(&p, 1, 2) == PS_OK);
  add(p, 0, 100, 100, 1, (ps_access[]){slot(PS_WRITE, 0)});
  add(p, 1, 300, 100, 1, (ps_access[]){slot(PS_WRITE, 1)});
  expect(compile(p), 1, (const uint64_t[][3]){{0, 0, 200}, {0, 0, 400}}, 400);
  /* 60% + 60% = 1.2: both take 1.2 times as long until the first ends at 120; then 200 of 300 ns
   * are left. */
  CHECK(ps_program_create(&p, 1, 2) == PS_OK);
  add(p, 0, 100, 60, 1, (ps_access[]){slot(PS_WRITE, 0)});
  add(p, 1, 300, 60, 1, (ps_access[]){slot(PS_WRITE, 1)});
  expect(compile(p), 1, (const uint64_t[][3]){{0, 0, 120}, {0, 0, 320}}, 320);
  /* 40% + 60% fit beside each other; a third that uses nothing is never slowed. */
  CHECK(ps_program_create(&p, 1, 3) == PS_OK);
  add(p, 0, 100, 40, 1, (ps_access[]){slot(PS_WRITE, 0)});
  add(p, 1, 300, 60, 1, (ps_access[]){slot(PS_WRITE, 1)});
  add(p, 2, 50, 0, 1, (ps_access[]){slot(PS_WRITE, 2)});
  expect(compile(p), 1, (const uint64_t[][3]){{0, 0, 100}, {0, 0, 300}, {0, 0, 50}}, 300);
  printf("ok ops that share a resource slow each other down\n");
}

/* Load (100 ns) into one slot, compute (50 ns) on it. One slot: a load waits until the compute
 * before has read it, a step takes 150. */
static void test_pipeline(void) {
  ps_program *p;
  CHECK(ps_program_create(&p, 1, 2) == PS_OK);
  add(p, 0, 100, 0, 1, (ps_access[]){slot(PS_WRITE, 0)});
  add(p, 1, 50, 0, 1, (ps_access[]){slot(PS_READ, 0)});
  expect(compile(p), 3,
         (const uint64_t[][3]){{0, 0, 100},
                               {0, 100, 150},
                               {100, 150, 250},
                               {150, 250, 300},
                               {250, 300, 400},
                               {300, 400, 450}},
         450);
  /* Two slots in turn, two loads and computes a step: loads never wait, the step is 2 x 100 once
   * the pipe is full, and the last compute ends 50 after the last load. */
  CHECK(ps_program_create(&p, 1, 2) == PS_OK);
  for (uint64_t i = 0; i < 2; i++) {
    add(p, 0, 100, 0, 1, (ps_access[]){slot(PS_WRITE, i)});
    add(p, 1, 50, 0, 1, (ps_access[]){slot(PS_READ, i)});
  }
  expect(compile(p), 2,
         (const uint64_t[][3]){{0, 0, 100},
                               {0, 100, 150},
                               {100, 100, 200},
                               {150, 200, 250},
                               {200, 200, 300},
                               {250, 300, 350},
                               {300, 300, 400},
                               {350, 400, 450}},
         450);
  /* The same with computes of 150 ns: they are the bottleneck and follow each other without a
   * gap; load 3 (of step 1) waits for compute 1 (ends 250), load 4 for compute 2 (ends 400). */
  CHECK(ps_program_create(&p, 1, 2) == PS_OK);
  for (uint64_t i = 0; i < 2; i++) {
    add(p, 0, 100, 0, 1, (ps_access[]){slot(PS_WRITE, i)});
    add(p, 1, 150, 0, 1, (ps_access[]){slot(PS_READ, i)});
  }
  expect(compile(p), 2,
         (const uint64_t[][3]){{0, 0, 100},
                               {0, 100, 250},
                               {100, 100, 200},
                               {250, 250, 400},
                               {200, 250, 350},
                               {400, 400, 550},
                               {350, 400, 500},
                               {550, 550, 700}},
         700);
  printf("ok a pipeline fills, runs and stalls as by hand\n");
}

/* A stream that idled for the first 2e8 ns has idled 1 - e^-2 of the time, by weights that fall
 * by e every 1e8: with a gain of a half its op of 6e7 ns takes 6e7 / (1 + (1 - e^-2) / 2). At
 * the end of that the share is e^-0.6 (and so on) of it, and the next op starts at once. Where
 * the gain ends at a fifth, the first takes 6e7 / 1.2. */
static void gaining_price(void *user, const ps_op_view *op, ps_sim_cost *out) {
  out->ns = op->work.flops;
  out->idle_gain = op->stream == 0 ? ((double *)user)[0] : 0;
  out->idle_most = ((double *)user)[1];
}
static void test_idle_gain(void) {
  ps_program *p;
  ps_trace_event ev[3];
  double gain[2] = {0.5, 1}, ends[2] = {0.5, 0.2}, bad[2][2] = {{1.5, 1}, {0.5, 1.5}};
  CHECK(ps_program_create(&p, 1, 2) == PS_OK);
  add(p, 1, 2e8, 0, 1, (ps_access[]){slot(PS_WRITE, 0)});
  add(p, 0, 6e7, 0, 1, (ps_access[]){slot(PS_READ, 0)});
  add(p, 0, 6e7, 0, 1, (ps_access[]){slot(PS_READ, 0)});
  ps_schedule *s = compile(p);
  CHECK(ps_sim_run(s, gaining_price, gain, 1, ev, NULL) == PS_OK);
  const double idle = 1 - exp(-2), first = 6e7 / (1 + 0.5 * idle), left = idle * exp(-first / 1e8),
               second = 6e7 / (1 + 0.5 * left);
  CHECK(ev[0].end_ns == 200000000 && ev[1].start_ns == ev[0].end_ns &&
        ev[2].start_ns == ev[1].end_ns);
  CHECK(fabs((double)(ev[1].end_ns - ev[1].start_ns) - first) < 2 &&
        fabs((double)(ev[2].end_ns - ev[2].start_ns) - second) < 2);
  CHECK(ps_sim_run(s, gaining_price, ends, 1, ev, NULL) == PS_OK &&
        ev[1].end_ns - ev[1].start_ns == 50000000);
  CHECK(ps_sim_run(s, gaining_price, bad[0], 1, ev, NULL) == PS_EINVAL &&
        ps_sim_run(s, gaining_price, bad[1], 1, ev, NULL) == PS_EINVAL);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  printf("ok a stream that rested runs faster by its ops' gain\n");
}

/* Two ops of two kinds, the first slowed by the second as @user says. */
static void slowing_price(void *user, const ps_op_view *op, ps_sim_cost *out) {
  static double table[2][1 << PS_SIM_KINDS];
  for (int k = 0; k < 1 << PS_SIM_KINDS; k++)
    table[0][k] = table[1][k] = 1;
  table[0][3] = *(double *)user;
  out->ns = op->work.flops;
  out->kind = 1u << op->stream;
  out->slower = table[op->stream];
}
static void test_slowdown(void) {
  ps_program *p;
  ps_trace_event ev[2];
  double three = 3, bad = 0.5;
  CHECK(ps_program_create(&p, 1, 2) == PS_OK);
  add(p, 0, 300, 0, 1, (ps_access[]){slot(PS_WRITE, 0)});
  add(p, 1, 300, 0, 1, (ps_access[]){slot(PS_WRITE, 1)});
  ps_schedule *s = compile(p);
  /* the second runs as if alone; the first does a third of its work meanwhile, and the rest
   * alone */
  CHECK(ps_sim_run(s, slowing_price, &three, 1, ev, NULL) == PS_OK && ev[0].end_ns == 500 &&
        ev[1].end_ns == 300);
  CHECK(ps_sim_run(s, slowing_price, &bad, 1, ev, NULL) == PS_EINVAL);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  printf("ok ops of a kind slow those of another\n");
}

static void bad_price(void *user, const ps_op_view *op, ps_sim_cost *out) {
  out->ns = *(double *)user;
}

/* Demands on the resources after the last. */
static void nowhere_price(void *user, const ps_op_view *op, ps_sim_cost *out) {
  out->demand[0] = 0.5;
  out->resource[0] = PS_SIM_RESOURCES;
}

/* One field that is out of range, by number. */
static void wrong_price(void *user, const ps_op_view *op, ps_sim_cost *out) {
  static const double slower[1 << PS_SIM_KINDS] = {0.5};
  const int field = *(const int *)user;
  out->ns = 1;
  out->idle_gain = field == 0 ? 2 : 0;
  out->idle_most = field == 1 ? -1 : 0;
  out->demand[0] = field == 2 ? 1.5 : 0;
  out->kind = field == 3 ? 1u << PS_SIM_KINDS : 0;
  out->slower = field == 4 ? slower : NULL;
}

static void test_refusals(void) {
  static const char *const field[] = {"idle_gain is 2", "idle_most is -1", "demand[0] is 1.5",
                                      "kind is 32", "slower"};
  ps_program *p;
  CHECK(ps_program_create(&p, 1, 1) == PS_OK);
  add(p, 0, 1, 0, 1, (ps_access[]){slot(PS_WRITE, 0)});
  ps_schedule *s = compile(p);
  double bad[] = {-1, NAN, INFINITY}, end = 7;
  for (int i = 0; i < 3; i++)
    CHECK_FAILS(ps_sim_run(s, bad_price, &bad[i], 1, NULL, &end), PS_EINVAL, "op 0");
  CHECK_FAILS(ps_sim_run(s, nowhere_price, NULL, 1, NULL, &end), PS_EINVAL, "resource[0] is 40");
  for (int i = 0; i < 5; i++)
    CHECK_FAILS(ps_sim_run(s, wrong_price, &i, 1, NULL, &end), PS_EINVAL, field[i]);
  double aeon = 1e20, year = 3.2e16; /* ns; a trace's clock ends after 584 years */
  ps_trace_event event[300];
  CHECK_FAILS(ps_sim_run(s, bad_price, &aeon, 1, event, &end), PS_EINVAL, "op 0");
  CHECK_FAILS(ps_sim_run(s, bad_price, &year, 300, event, NULL), PS_EINVAL, "300 steps");
  CHECK(ps_sim_run(s, bad_price, &year, 200, event, NULL) == PS_OK &&
        event[199].end_ns == 6400000000000000000u);
  CHECK_FAILS(ps_sim_run(s, NULL, NULL, 1, NULL, NULL), PS_EINVAL, "cost");
  for (int64_t nth = 1; nth <= 2; nth++) {
    ps__fault_arm(PS_FAULT_ALLOC, nth);
    CHECK_FAILS(ps_sim_run(s, price, NULL, 1, NULL, NULL), PS_ENOMEM, "memory");
  }
  ps__fault_arm(PS_FAULT_ALLOC, 0);
  CHECK(end == 7 && ps_schedule_destroy(s) == PS_OK);
  printf("ok the simulator refuses costs that are none\n");
}

/* ---- traces of random programs --------------------------------------------------------------- */

static void random_price(void *user, const ps_op_view *op, ps_sim_cost *out) {
  uint64_t r = mix64(*(uint64_t *)user + op->position * 64 + op->stream);
  out->ns = (double)(r % 100); /* zero too */
  for (int i = 0; i < PS_SIM_DEMANDS; i++) {
    out->demand[i] = (double)(mix64(r + (uint64_t)i) % 101) / 100;
    out->resource[i] = (uint8_t)(mix64(r + 64 + (uint64_t)i) % PS_SIM_RESOURCES);
  }
}

/* Events [n_steps x n_ops] of whole steps, the first of them step @first: order, and every
 * conflicting pair apart. */
static void check_trace(const ps_program *p, const ps_trace_event *ev, uint64_t n_steps,
                        uint64_t first) {
  uint64_t n = p->list.n_ops;
  for (uint64_t a = 0; a < n * n_steps; a++) {
    CHECK(ev[a].step == first + a / n && ev[a].op == a % n &&
          ev[a].stream == p->list.ops[a % n].stream);
    CHECK(ev[a].queued_ns <= ev[a].start_ns && ev[a].start_ns <= ev[a].end_ns);
    for (uint64_t b = a + 1; b < n * n_steps; b++)
      if (ev[a].stream == ev[b].stream || rp_conflict(p, a % n, b % n))
        CHECK(ev[a].end_ns <= ev[b].start_ns);
  }
}

/* Of four steps the first three are told as in @ev and @end, and nothing of the fourth. */
static void check_first_steps(const ps_schedule *s, uint64_t seed, const ps_trace_event *ev,
                              const double end[4]) {
  static ps_trace_event told[4 * RP_MAX_OPS];
  ps_sim_cost cost[RP_MAX_OPS] = {0};
  const uint64_t n_ops = ps_schedule_n_ops(s);
  double ends[4] = {0};
  for (uint64_t i = 0; i < n_ops; i++) {
    ps_op_view op;
    CHECK(ps_schedule_op(s, i, &op) == PS_OK);
    random_price(&seed, &op, &cost[i]);
  }
  memset(told, 0xff, sizeof told);
  CHECK(ps__sim_run(s, cost, 3, 1, told, ends) == PS_OK);
  CHECK(memcmp(told, ev, 3 * n_ops * sizeof *ev) == 0 && memcmp(ends, end, 3 * sizeof *end) == 0);
  CHECK(ends[3] == 0 && (n_ops == 0 || told[3 * n_ops].end_ns == UINT64_MAX));
}

static void test_traces(uint64_t n_programs) {
  static ps_trace_event ev[4 * RP_MAX_OPS], again[4 * RP_MAX_OPS];
  for (uint64_t seed = 0; seed < n_programs; seed++) {
    uint32_t n_streams = 1 + (uint32_t)(seed % 5);
    ps_program *p = rp_make(seed + 77, n_streams);
    ps_schedule *s;
    CHECK(ps_schedule_compile(&s, p) == PS_OK);
    uint64_t n_ops = ps_schedule_n_ops(s), n = 0;
    double end[4];
    CHECK(ps_sim_run(s, random_price, &seed, 4, ev, end) == PS_OK);
    check_trace(p, ev, 4, 0);
    for (uint64_t i = 0; i < 4 * n_ops; i++)
      CHECK((double)ev[i].end_ns <= end[ev[i].step] + 0.5);
    CHECK(ps_sim_run(s, random_price, &seed, 4, again, NULL) == PS_OK &&
          memcmp(ev, again, 4 * n_ops * sizeof *ev) == 0);
    check_first_steps(s, seed, ev, end);

    ps_engine_config cfg = {
        .struct_bytes = sizeof cfg, .n_places = 1, .n_spaces = RP_SPACES, .n_streams = n_streams};
    for (uint32_t i = 0; i < n_streams; i++)
      cfg.stream[i].n_threads = 1;
    cfg.space[0].bytes = cfg.space[1].bytes = RP_SPACE_BYTES;
    ps_engine *e;
    ps_run *r;
    CHECK(ps_engine_create(&e, &cfg) == PS_OK);
    CHECK(ps_run_create(
              &r, e, s,
              &(ps_run_config){.struct_bytes = sizeof(ps_run_config), .trace_steps = 3}) == PS_OK);
    CHECK(ps_run_submit(r, 2) == PS_OK && ps_run_wait(r, 2) == PS_OK); /* fewer than are kept */
    CHECK(ps_run_trace(r, ev, 4 * RP_MAX_OPS, &n) == PS_OK && n == 2 * n_ops);
    check_trace(p, ev, 2, 0);
    CHECK(ps_run_submit(r, 5) == PS_OK && ps_run_wait(r, 7) == PS_OK);
    CHECK_FAILS(ps_run_trace(r, ev, 3 * n_ops - 1, &n), PS_EINVAL, "room");
    CHECK(ps_run_trace(r, ev, 3 * n_ops, &n) == PS_OK && n == 3 * n_ops);
    check_trace(p, ev, 3, 4);
    ps_run_destroy(r);
    CHECK(ps_engine_close(e) == PS_OK && ps_schedule_destroy(s) == PS_OK);
    ps_program_destroy(p);
  }
  printf("ok traces, simulated and real, keep every conflict apart: %llu programs\n",
         (unsigned long long)n_programs);
}

static void test_json(void) {
  ps_program *p;
  CHECK(ps_program_create(&p, 1, 2) == PS_OK);
  add(p, 0, 1500, 0, 1, (ps_access[]){slot(PS_WRITE, 0)});
  add(p, 1, 2000, 0, 1, (ps_access[]){slot(PS_READ, 0)});
  ps_schedule *s = compile(p);
  ps_trace_event ev[2];
  CHECK(ps_sim_run(s, price, NULL, 1, ev, NULL) == PS_OK);
  char dir[] = "/tmp/ps_trace_XXXXXX", path[64];
  CHECK(mkdtemp(dir));
  snprintf(path, sizeof path, "%s/t.json", dir);
  const char *names[] = {"compute",
                         "h2d \xff\xc3\xa9"}; /* a byte that is no UTF-8, and an e acute */
  CHECK(ps_trace_write_json(path, s, ev, 2, names, NULL, 0) == PS_OK);
  ps__json *j;
  CHECK(ps__json_read_file(&j, path, 1 << 20) == PS_OK);
  const ps__json *list = ps__json_get(j, "traceEvents"),
                 *last = ps__json_at(list, ps__json_length(list) - 1);
  size_t bytes;
  CHECK(ps__json_length(list) == 1 + 2 * 2 + 2);
  CHECK(strcmp(ps__json_string(ps__json_get(ps__json_get(ps__json_at(list, 3), "args"), "name"),
                               &bytes),
               "h2d \xef\xbf\xbd\xc3\xa9") == 0);
  CHECK(strcmp(ps__json_string(ps__json_get(last, "name"), &bytes), "plain \"quoted\"\n") == 0);
  CHECK(ps__json_number(ps__json_get(last, "ts"), 0) == 1.5 &&
        ps__json_number(ps__json_get(last, "dur"), 0) == 2.0);
  CHECK(ps__json_number(ps__json_get(ps__json_get(last, "args"), "wait_us"), 0) == 1.5);
  ps__json_free(j);
  unlink(path);
  rmdir(dir);
  CHECK_FAILS(ps_trace_write_json(path, s, ev, 2, names, NULL, 0), PS_EIO, path);
  ev[1].op = 2;
  CHECK_FAILS(ps_trace_write_json(path, s, ev, 2, names, NULL, 0), PS_EINVAL, "event 1");
  CHECK(ps_schedule_destroy(s) == PS_OK);
  printf("ok a trace is written as JSON\n");
}

int main(int argc, char **argv) {
  int64_t before = ps__live_allocations();
  test_shared_resource();
  test_idle_gain();
  test_slowdown();
  test_pipeline();
  test_refusals();
  test_traces(argc > 1 ? strtoull(argv[1], NULL, 10) : 300);
  test_json();
  CHECK(ps__live_allocations() == before);
  return 0;
}
