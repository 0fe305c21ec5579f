/* test_engine_hazards.c - derived dependencies against oracles that know only program order.
 * Usage: test_engine_hazards [programs, default 10000] [seed] */
#include "random_program.h"

static ps_engine *engine_of(uint32_t n_streams) {
  ps_engine_config cfg = {
      .struct_bytes = sizeof cfg, .n_places = 1, .n_spaces = RP_SPACES, .n_streams = n_streams};
  for (uint32_t i = 0; i < RP_SPACES; i++)
    cfg.space[i].bytes = RP_SPACE_BYTES;
  for (uint32_t i = 0; i < n_streams; i++)
    cfg.stream[i].n_threads = 1;
  ps_engine *e;
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  return e;
}

/* Execute on threads and one after the other: the same bytes? */
static bool same_as_serial(ps_engine *e, const ps_program *p, unsigned rules, uint64_t seed) {
  uint8_t memory[RP_SPACES][RP_SPACE_BYTES];
  for (uint32_t s = 0; s < RP_SPACES; s++) {
    for (uint32_t i = 0; i < RP_SPACE_BYTES; i++)
      memory[s][i] = (uint8_t)mix64(seed + s * 1000 + i);
    memcpy(ps_engine_space(e, s), memory[s], RP_SPACE_BYTES);
  }
  ps_schedule *sch;
  ps_run *run;
  uint64_t n_steps = 2 + seed % 2;
  CHECK(ps__schedule_compile_masked(&sch, p, rules) == PS_OK);
  CHECK(ps_run_create(&run, e, sch, &(ps_run_config){.struct_bytes = sizeof(ps_run_config)}) ==
        PS_OK);
  CHECK(ps_run_submit(run, 1) == PS_OK && ps_run_submit(run, n_steps - 1) == PS_OK);
  CHECK(ps_run_wait(run, n_steps) == PS_OK && ps_run_steps_done(run) == n_steps);
  ps_run_destroy(run);
  CHECK(ps_schedule_destroy(sch) == PS_OK);
  rp_serial(p, memory, n_steps);
  for (uint32_t s = 0; s < RP_SPACES; s++)
    if (memcmp(memory[s], ps_engine_space(e, s), RP_SPACE_BYTES) != 0)
      return false;
  return true;
}

/* ---- without luck: reachability over streams' order and waits, RP_STEPS steps unrolled ------- */

typedef struct bits {
  uint64_t w[(RP_STEPS * RP_MAX_OPS + 63) / 64];
} bits;
static void bits_set(bits *b, uint64_t i) { b->w[i / 64] |= 1ull << (i % 64); }
static bool bits_get(const bits *b, uint64_t i) { return b->w[i / 64] >> (i % 64) & 1; }

typedef struct proof {
  uint64_t unordered;  /* conflicting pairs without an order */
  uint64_t redundant;  /* waits of the steady state that other orders imply */
  uint64_t groundless; /* waits for an op that there is no conflict with */
} proof;

/* The op at a position of a stream. */
static uint64_t op_at(const ps_program *p, uint32_t stream, uint64_t position) {
  for (uint64_t i = 0; i < p->list.n_ops; i++)
    if (p->list.ops[i].stream == stream && p->list.ops[i].position == position)
      return i;
  CHECK(!"a wait for an op that is not there");
  return 0;
}

static proof prove(const ps_program *p, unsigned rules) {
  ps_schedule *sch;
  CHECK(ps__schedule_compile_masked(&sch, p, rules) == PS_OK);
  static bits before[RP_STEPS * RP_MAX_OPS];
  memset(before, 0, sizeof before);
  uint64_t n = p->list.n_ops, pred[PS_MAX_STREAMS + 1];
  int64_t last[PS_MAX_STREAMS];
  proof f = {0};
  memset(last, -1, sizeof last);
  for (uint64_t v = 0; v < RP_STEPS * n; v++) {
    ps_op_view op;
    uint32_t n_pred = 0;
    CHECK(ps_schedule_op(sch, v % n, &op) == PS_OK && op.n_wait < op.stream + PS_MAX_STREAMS);
    for (uint32_t i = 0; i < op.n_wait; i++) {
      const ps_wait *w = &op.wait[i];
      CHECK(w->stream != op.stream && w->steps_back <= 1 && w->value >= 1);
      uint64_t u = op_at(p, w->stream, w->value - 1);
      f.groundless += !rp_conflict(p, u, v % n);
      if (v / n < w->steps_back)
        continue;
      pred[n_pred] = (v / n - w->steps_back) * n + u;
      CHECK(pred[n_pred] < v); /* or the run would stand still */
      n_pred++;
    }
    if (last[op.stream] >= 0)
      pred[n_pred++] = (uint64_t)last[op.stream];
    last[op.stream] = (int64_t)v;
    for (uint32_t i = 0; i < n_pred; i++) {
      for (size_t k = 0; k < sizeof(bits) / 8; k++)
        before[v].w[k] |= before[pred[i]].w[k];
      bits_set(&before[v], pred[i]);
    }
    if (v / n == RP_STEPS - 1)
      for (uint32_t i = 0; i < op.n_wait; i++) {
        bool implied = false;
        for (uint32_t j = 0; j < n_pred; j++)
          implied |= j != i && bits_get(&before[pred[j]], pred[i]);
        f.redundant += implied;
      }
  }
  for (uint64_t i = 0; i < n; i++)
    for (uint64_t j = 0; j < n; j++)
      if (rp_conflict(p, i, j))
        for (uint64_t a = 0; a < RP_STEPS; a++)
          for (uint64_t b = a + (j <= i); b < RP_STEPS; b++)
            f.unordered += !bits_get(&before[b * n + j], a * n + i);
  CHECK(ps_schedule_destroy(sch) == PS_OK);
  return f;
}

/* ---- the tests ------------------------------------------------------------------------------- */

static void test_random(uint64_t n_programs, uint64_t seed) {
  uint64_t waits = 0, ops = 0;
  for (uint32_t n_streams = 1; n_streams <= 5; n_streams++) {
    ps_engine *e = engine_of(n_streams);
    for (uint64_t i = n_streams - 1; i < n_programs; i += 5) {
      ps_program *p = rp_make(seed + i, n_streams);
      ps_schedule *sch;
      CHECK(ps_schedule_compile(&sch, p) == PS_OK);
      waits += ps_schedule_n_waits(sch);
      ops += ps_schedule_n_ops(sch);
      CHECK(ps_schedule_destroy(sch) == PS_OK);
      proof f = prove(p, PS__RULES_ALL);
      if (f.unordered || f.redundant || f.groundless ||
          !same_as_serial(e, p, PS__RULES_ALL, seed + i)) {
        printf("FAIL program %llu on %u streams: %llu pairs unordered, %llu waits redundant, %llu "
               "groundless\n",
               (unsigned long long)(seed + i), n_streams, (unsigned long long)f.unordered,
               (unsigned long long)f.redundant, (unsigned long long)f.groundless);
        exit(1);
      }
      ps_program_destroy(p);
    }
    CHECK(ps_engine_close(e) == PS_OK);
  }
  printf("ok random programs: %llu, with %llu ops and %llu waits; every conflict ordered, no wait "
         "to spare\n",
         (unsigned long long)n_programs, (unsigned long long)ops, (unsigned long long)waits);
}

/* Without any one rule the proof must fail, and so must an execution (which is a data race: not
 * under ThreadSanitizer). */
static void test_mutation(const char *name, unsigned rule, uint64_t n_programs, uint64_t seed) {
  uint64_t unproved = 0, wrong = 0, n = 0;
  ps_engine *e = engine_of(4);
  for (; n < n_programs; n++) {
    ps_program *p = rp_make(seed + n, 4);
    unproved += prove(p, PS__RULES_ALL & ~rule).unordered > 0;
#ifndef PS_SANITIZED
    wrong += !same_as_serial(e, p, PS__RULES_ALL & ~rule, seed + n);
#endif
    ps_program_destroy(p);
  }
  CHECK(ps_engine_close(e) == PS_OK);
  printf("%s without rule %s: of %llu programs %llu lack an order, %llu ran wrong\n",
         unproved ? "ok" : "FAIL", name, (unsigned long long)n, (unsigned long long)unproved,
         (unsigned long long)wrong);
  CHECK(unproved > n_programs / 4);
#ifndef PS_SANITIZED
  CHECK(wrong > 0);
#endif
}

int main(int argc, char **argv) {
  uint64_t n_programs = argc > 1 ? strtoull(argv[1], NULL, 10) : 10000,
           seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  int64_t before = ps__live_allocations();
  test_random(n_programs, seed);
  uint64_t n = n_programs < 1000 ? n_programs : 1000;
  test_mutation("read after write", PS__RULE_RAW, n, seed);
  test_mutation("write after read", PS__RULE_WAR, n, seed);
  test_mutation("write after write", PS__RULE_WAW, n, seed);
  test_mutation("the step before", PS__RULE_CROSS_STEP, n, seed);
  CHECK(ps__live_allocations() == before);
  return 0;
}
