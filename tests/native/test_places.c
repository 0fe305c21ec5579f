/* test_places.c - two devices beside a host, on the CPU backend: results and traces against program
 * order, caps and refusals place by place. Usage: test_places [programs, default 300] [seed] */
#define RP_SPACES 3
#include "engine/pin.h"
#include "random_program.h"

/* Places, and the spaces of the same numbers. */
enum { HOST, DEVICE_0, DEVICE_1, N_PLACES };
enum { HOST_OPS, COMPUTE_0, COMPUTE_1, TO_0, TO_1, ACROSS, BACK, N_STREAMS };
enum { N_OPS_STREAMS = TO_0 };
static const ps_link links[] = {{HOST, DEVICE_0, TO_0, 0},
                                {HOST, DEVICE_1, TO_1, 1},
                                {DEVICE_0, DEVICE_1, ACROSS, 2},
                                {DEVICE_0, HOST, BACK, 0},
                                {DEVICE_1, HOST, BACK, 1}};
enum { N_LINKS = sizeof links / sizeof *links };
static const uint32_t place_of[N_STREAMS] = {HOST,     DEVICE_0, DEVICE_1, DEVICE_0,
                                             DEVICE_1, DEVICE_0, HOST};

#include "places.h"

static ps_engine *open_engine(void) {
  const ps_engine_config cfg = places_config();
  ps_engine *e;
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  return e;
}

/* ---- programs -------------------------------------------------------------------------------- */

/* The host's value goes to both devices; both compute; the second also uses the first one's result,
 * and its own goes back to the host. */
static ps_program *exchange(void) {
  ps_program *p = empty();
  add_mix(p, HOST_OPS, 1, (ps_access[]){range(HOST, PS_READ_WRITE, 0)});
  add_copy(p, TO_0, range(HOST, PS_READ, 0), range(DEVICE_0, PS_WRITE, 0));
  add_copy(p, TO_1, range(HOST, PS_READ, 0), range(DEVICE_1, PS_WRITE, 0));
  add_mix(p, COMPUTE_0, 2,
          (ps_access[]){range(DEVICE_0, PS_READ, 0), range(DEVICE_0, PS_READ_WRITE, 8)});
  add_mix(p, COMPUTE_1, 2,
          (ps_access[]){range(DEVICE_1, PS_READ, 0), range(DEVICE_1, PS_READ_WRITE, 8)});
  add_copy(p, ACROSS, range(DEVICE_0, PS_READ, 8), range(DEVICE_1, PS_WRITE, 16));
  add_mix(p, COMPUTE_1, 2,
          (ps_access[]){range(DEVICE_1, PS_READ, 16), range(DEVICE_1, PS_READ_WRITE, 8)});
  add_copy(p, BACK, range(DEVICE_1, PS_READ, 8), range(HOST, PS_WRITE, 8));
  return p;
}

/* Random ops, each where its stream may run it; one at every place at least. */
static ps_program *random_ops(uint64_t seed) {
  uint64_t r = mix64(seed);
  ps_program *p = empty();
  for (uint32_t stream = HOST_OPS; stream <= COMPUTE_1; stream++)
    add_mix(p, stream, 1, (ps_access[]){range(place_of[stream], PS_READ_WRITE, 0)});
  while (ps_program_n_ops(p) < 24)
    add_random(p, &r);
  return p;
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* Every event is of its op's stream, and ops that must keep their order do not overlap in time. */
static void check_trace(const ps_program *p, ps_run *run, uint64_t n_steps) {
  static ps_trace_event ev[RP_STEPS * RP_MAX_OPS];
  const uint64_t n_ops = ps_program_n_ops(p);
  uint64_t n, of_place[N_PLACES] = {0};
  CHECK(ps_run_trace(run, ev, RP_STEPS * RP_MAX_OPS, &n) == PS_OK && n == n_steps * n_ops);
  for (uint64_t j = 0; j < n; j++) {
    CHECK(ev[j].stream == p->list.ops[ev[j].op].stream);
    of_place[place_of[ev[j].stream]]++;
    for (uint64_t i = 0; i < j; i++)
      CHECK(!rp_conflict(p, i % n_ops, j % n_ops) || ev[i].end_ns <= ev[j].start_ns);
  }
  for (uint32_t i = 0; i < N_PLACES; i++)
    CHECK(of_place[i] > 0);
}

/* Whether @n_steps leave the bytes that ops one after the other leave. */
static bool same_as_serial(ps_engine *e, const ps_program *p, unsigned rules, uint64_t seed) {
  uint8_t memory[RP_SPACES][RP_SPACE_BYTES];
  ps_schedule *s;
  ps_run *run;
  fill(memory, seed);
  for (uint32_t i = 0; i < N_PLACES; i++)
    memcpy(ps_engine_space(e, i), memory[i], RP_SPACE_BYTES);
  CHECK(ps__schedule_compile_masked(&s, p, rules) == PS_OK);
  CHECK(ps_run_create(&run, e, s,
                      &(ps_run_config){.struct_bytes = sizeof(ps_run_config),
                                       .trace_steps = RP_STEPS}) == PS_OK);
  CHECK(ps_run_submit(run, RP_STEPS) == PS_OK && ps_run_wait(run, RP_STEPS) == PS_OK);
  if (rules == PS__RULES_ALL)
    check_trace(p, run, RP_STEPS);
  CHECK(ps_run_destroy(run) == PS_OK && ps_schedule_destroy(s) == PS_OK);
  rp_serial(p, memory, RP_STEPS);
  bool same = true;
  for (uint32_t i = 0; i < N_PLACES; i++)
    same = same && memcmp(memory[i], ps_engine_space(e, i), RP_SPACE_BYTES) == 0;
  return same;
}

static void test_exchange(void) {
  ps_engine *e = open_engine();
  ps_program *p = exchange();
  CHECK(same_as_serial(e, p, PS__RULES_ALL, 1));
  ps_program_destroy(p);
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok two devices compute on the host's values and on each other's\n");
}

static void test_random(uint64_t n_programs, uint64_t seed) {
  ps_engine *e = open_engine();
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < n_programs; i++) {
    ps_program *p = random_ops(seed + i);
    CHECK(same_as_serial(e, p, PS__RULES_ALL, seed + i));
#ifndef PS_SANITIZED /* its races are meant */
    wrong += !same_as_serial(e, p, PS__RULES_ALL & ~PS__RULE_RAW, seed + i);
#endif
    ps_program_destroy(p);
  }
#ifndef PS_SANITIZED
  CHECK(wrong > 0);
#endif
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok %llu random programs on two devices; without read after write %llu ran wrong\n",
         (unsigned long long)n_programs, (unsigned long long)wrong);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void refused(ps_engine *e, ps_program *p, const char *says) {
  ps_schedule *s;
  ps_run *run;
  const ps_run_config rc = {.struct_bytes = sizeof rc};
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  CHECK_FAILS(ps_run_create(&run, e, s, &rc), PS_EINVAL, says);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  ps_program_destroy(p);
}

static void test_ops_stay_at_their_place(void) {
  ps_engine *e = open_engine();
  ps_program *p = empty();
  add_mix(p, COMPUTE_0, 1, (ps_access[]){range(DEVICE_1, PS_READ_WRITE, 0)});
  refused(e, p, "op 0 (mix) of stream 1 at place 1 touches space 2, which is at place 2, a device");
  p = empty();
  add_mix(p, HOST_OPS, 1, (ps_access[]){range(DEVICE_0, PS_READ_WRITE, 0)});
  refused(e, p, "op 0 (mix) of stream 0 at place 0 touches space 1, which is at place 1, a device");
  p = empty();
  add_copy(p, ACROSS, range(DEVICE_1, PS_READ, 0), range(DEVICE_0, PS_WRITE, 0));
  refused(e, p, "op 0 (copy) is no copy along a link of stream 5");
  p = empty();
  add_mix(p, TO_0, 1, (ps_access[]){range(DEVICE_0, PS_READ_WRITE, 0)});
  refused(e, p, "op 0 (mix) is no copy along a link of stream 3");
  CHECK(ps_engine_close(e) == PS_OK);
  printf("ok ops stay at their stream's place, copies on their links\n");
}

static void test_caps(void) {
  const uint64_t arena = 2 << 20;
  for (uint32_t i = 0; i < N_PLACES; i++) {
    ps_engine_config cfg = places_config();
    ps_engine *e;
    char says[96];
    for (uint32_t k = 0; k < N_PLACES; k++) {
      cfg.place[k].cap_bytes = arena + 1000 * (k + 1);
      cfg.place[k].overhead_bytes = 1000 * (k + 1);
    }
    CHECK(ps_engine_create(&e, &cfg) == PS_OK && ps_engine_close(e) == PS_OK);
    cfg.place[i].overhead_bytes++;
    snprintf(says, sizeof says, "place %u: spaces of 2.0 MiB and an overhead of", i);
    CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EBUDGET, says);
    cfg.place[i].overhead_bytes--;
    cfg.space[cfg.n_spaces++] = (ps_space_config){.bytes = 1, .place = i};
    snprintf(says, sizeof says, "place %u: spaces of 4.0 MiB", i);
    CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EBUDGET, says);
  }
  printf("ok each place has a cap of its own\n");
}

/* Of the host's space all but the first 128 KiB are pinned: links copy from and to these alone. */
static void test_pageable(void) {
  enum { PART = 128 << 10, UNIT = 2 << 20 };
  ps_engine_config cfg = places_config();
  ps_engine *e;
  cfg.space[HOST] = (ps_space_config){.bytes = UNIT, .pageable_bytes = PART + 1000, .place = HOST};
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  CHECK(ps_engine_space_pinned(e, HOST) == UNIT - PART && ps_engine_space_pinned(e, DEVICE_0) == 0);
  for (int out = 0; out < 2; out++) {
    ps_program *p = empty();
    const ps_access there = range(HOST, out ? PS_READ : PS_WRITE, PART - 8),
                    device = range(DEVICE_0, out ? PS_WRITE : PS_READ, 0);
    add_copy(p, out ? TO_0 : BACK, out ? there : device, out ? device : there);
    refused(e, p, "op 0 (copy) copies byte 131064 of space 0, of which the first 131072 are not");
  }
  CHECK(ps_engine_close(e) == PS_OK);
  ps__pin_limit(UNIT - PART);
  CHECK(ps_engine_create(&e, &cfg) == PS_OK && ps_engine_close(e) == PS_OK);
  ps__pin_limit(UNIT - PART - 1);
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EDEVICE, "pinning stopped at 1.9 MiB of 1.9 MiB");
  CHECK(ps_pinned_at_most() == UNIT - PART - 1);
  ps__pin_limit(0);
  CHECK(ps_engine_create(&e, &cfg) == PS_OK && ps_pinned_at_most() == 0);
  CHECK(ps_engine_close(e) == PS_OK);
  cfg.space[HOST].pageable_bytes = UNIT + 1;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "space 0: pageable_bytes 2097153");
  cfg = places_config();
  cfg.space[DEVICE_0].pageable_bytes = 1;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "space 1: pageable_bytes 1");
  printf("ok links copy from and to pinned memory alone\n");
}

static void test_configurations(void) {
  ps_engine *e;
  ps_engine_config cfg = places_config();
  cfg.n_places = 0;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "n_places 0 is not in 1..16");
  cfg = places_config();
  cfg.n_links = PS_MAX_LINKS + 1;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "n_links 81 is not in 0..80");
  cfg = places_config();
  cfg.place[2].kind = 3;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "place 2: kind 3 is unknown");
  cfg = places_config();
  cfg.place[HOST].backend = PS_BACKEND_CUDA;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "place 0: backend 1, but the host's is 0");
  cfg = places_config();
  cfg.place[DEVICE_1].backend = PS_BACKEND_CUDA;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "place 2: backend 1, but that of place 1");
  cfg = places_config();
  cfg.link[1].to = HOST;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "link 1: from 0 to 0");
  cfg = places_config();
  cfg.link[4].from = 3;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "link 4: from 3 to 0: no two of 3 places");
  cfg = places_config();
  cfg.link[0].stream = N_STREAMS;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "link 0: stream 7 is not below 7");
  cfg = places_config();
  cfg.space[1].place = 3;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "space 1: place 3 is not below 3");
  cfg = places_config();
  cfg.stream[6].place = 9;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "stream 6: place 9 is not below 3");
  printf("ok an engine refuses places and links by number\n");
}

int main(int argc, char **argv) {
  const uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 300,
                 seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  const int64_t before = ps__live_allocations();
  test_exchange();
  test_random(n, seed);
  test_ops_stay_at_their_place();
  test_caps();
  test_pageable();
  test_configurations();
  CHECK(ps__live_allocations() == before);
  return 0;
}
