/* The planner's search for random configurations, most of them odd: it ends within a bounded
 * time and memory, and what it plans keeps to its caps. Under UBSan: no number wraps. What it rules
 * candidates out by are bounds: of random candidates, too.
 * PENSTOCK_SEARCHES=N: so many instead of 3 (1 under a sanitizer), from PENSTOCK_SEED on.
 * Usage: test_search [all: 8 searches, of which some take long] */
#include "check.h"
#include "plan/evaluate.h"
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#ifdef PS_SANITIZED
enum { SLOWER = 20, MOST_TOKENS = 1 << 17 };
#else
enum { SLOWER = 1, MOST_TOKENS = 1 << 22 };
#endif
/* plan.h has the longest that was seen; on a busy machine other work takes the caches */
static const double MOST_CPU_S = 120;
static const uint64_t MOST_BYTES = 3ull << 30;

static uint32_t one_of(uint64_t *state, uint32_t n, const uint32_t *of) {
  return of[rnd_below(state, n)];
}
#define ONE_OF(...) one_of(state, sizeof((uint32_t[]){__VA_ARGS__}) / 4, (uint32_t[]){__VA_ARGS__})

static ps_model_config random_model(uint64_t *state) {
  const uint32_t kv = ONE_OF(1, 2, 4);
  return (ps_model_config){MODEL_DEFAULTS,
                           .vocab_size = ONE_OF(64, 257, 4096, 151936),
                           .n_layers = ONE_OF(1, 2, 3, 7, 16),
                           .dim = 16 * ONE_OF(1, 2, 7, 16),
                           .n_kv_heads = kv,
                           .n_heads = kv * ONE_OF(1, 2),
                           .head_dim = 16 * ONE_OF(1, 2, 4),
                           .ffn_dim = 16 * ONE_OF(1, 3, 8, 172),
                           .max_positions = 1 << 20,
                           .tied_embeddings = rnd_below(state, 2),
                           .rope = {.theta = 1e4}};
}

static ps_model_config small_model(uint32_t n_layers) {
  return (ps_model_config){MODEL_DEFAULTS, .vocab_size = 4096, .n_layers = n_layers,
                           .dim = 256,     .n_kv_heads = 2,    .n_heads = 4,
                           .head_dim = 64, .ffn_dim = 1024,    .rope = {.theta = 1e4}};
}

static ps_plan_config random_config(uint64_t *state) {
  const uint64_t seq = ONE_OF(1, 3, 17, 64, 127, 512, 1025, 4096, 8191, 33000, 100001);
  ps_plan_config c = {PLAN_DEFAULTS,
                      .recipe = rnd_below(state, 3),
                      .seq_len = seq,
                      .clip_norm = rnd_below(state, 2),
                      .one_document = rnd_below(state, 2),
                      .trace_steps = 2,
                      .n_devices = ONE_OF(1, 1, 2, 3, 4, 8),
                      .reserve_bytes = 1 << 28};
  c.tokens_per_step = seq * ONE_OF(1, 3, 8, 33, 64, 512, 4097);
  if (c.tokens_per_step > MOST_TOKENS)
    c.tokens_per_step = seq;
  if (rnd_below(state, 3) == 0)
    c.chunk_tokens = rnd_below(state, 2) ? seq * ONE_OF(1, 2, 3) : 1 + seq / ONE_OF(2, 3, 7, 100);
  if (c.chunk_tokens > seq)
    c.chunk_tokens = c.chunk_tokens / seq * seq;
  if (rnd_below(state, 4) == 0)
    c.chunks_per_round = ONE_OF(1, 2, 5, 100);
  if (rnd_below(state, 8) == 0)
    c.head_slice_tokens = ONE_OF(1, 64, 1000000);
  if (rnd_below(state, 4) == 0) {
    c.first_round_chunks = ONE_OF(0, 2, 3, 50);
    c.first_rounds = ONE_OF(0, 1, 2, 9);
  }
  return c;
}

static double cpu_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Without caps and, where that can be planned, under some a little above the least. */
static void plan_one(uint64_t *state, uint64_t seed, const ps_hardware *cpu) {
  const ps_model_config model = random_model(state);
  ps_plan_config cfg = random_config(state);
  ps_hardware hw = *cpu;
  cfg.layout = seed % 2 && cfg.n_devices > 1 && cfg.n_devices <= model.n_layers ? PS_LAYOUT_RING
                                                                                : PS_LAYOUT_AUTO;
  hw.backend = rnd_below(state, 4) ? PS_BACKEND_CUDA : PS_BACKEND_CPU;
  hw.op_ns = 3500;
  hw.host_memory_bytes = 0;
  for (int capped = 0; capped < 2; capped++) {
    const double begin = cpu_s();
    ps_plan *plan = NULL;
    ps_plan_report r = {.struct_bytes = sizeof r};
    if (capped) {
      uint64_t device, host;
      CHECK(ps_plan_smallest(&model, &cfg, &hw, &device, &host) == PS_OK);
      if (rnd_below(state, 2))
        cfg.device_mem_bytes = device + device / ONE_OF(1, 8, 64);
      else
        cfg.host_mem_bytes = host + host / ONE_OF(1, 8, 64);
    }
    const ps_status st = ps_plan_create(&plan, &model, &cfg, &hw);
    if (st == PS_OK) {
      CHECK(ps_plan_get_report(plan, &r) == PS_OK);
      CHECK(!cfg.device_mem_bytes || r.device_used_bytes <= cfg.device_mem_bytes);
      CHECK(!cfg.host_mem_bytes || r.host_used_bytes <= cfg.host_mem_bytes);
      CHECK(r.step_s > 0);
    } else
      CHECK(st == PS_EBUDGET ||
            (st == PS_EINVAL && strstr(ps_last_error(), "lower tokens_per_step")));
    ps_plan_destroy(plan);
    printf("seed %llu%s: %.1f s\n", (unsigned long long)seed, capped ? " under a cap" : "",
           cpu_s() - begin);
    fflush(stdout);
    CHECK(cpu_s() - begin < MOST_CPU_S * SLOWER);
    if (st != PS_OK)
      return;
  }
}

/* ---- bounds ---------------------------------------------------------------------------------- */

/* The work of a step of @m: no simulation of it is shorter. @taken: BYTES, arenas not rounded
 * up. */
static double take(const ps__search_space *sp, const ps__candidate *m, ps__evaluation_arrays *a,
                   uint64_t taken[PS__N_MEMS]) {
  const ps_plan *p = sp->plan;
  uint64_t arena[PS_MAX_PLACES], scratch, trace;
  ps__step_hooks hooks;
  ps__spec spec;
  ps__step s;
  double ns;
  CHECK(ps__candidate_spec(sp, m, &sp->microbatch[m->microbatch].layout, &spec) == PS_OK);
  CHECK(ps__step_emit_in(&s, &a->step, p->model, &sp->microbatch[m->microbatch].layout, &spec,
                         &hooks) == PS_OK);
  for (uint32_t i = 0; i < p->at->n_places; i++)
    arena[i] = ps__memmap_bound(s.vt, s.n_vt, (uint32_t)s.n_op, i);
  const uint64_t host = arena[p->at->host];
  taken[PS__PINNED_MEM] = ps__pinned_bytes(host, s.pageable_bytes);
  taken[PS__HOST_MEM] = host + ps__host_overhead(p, &s, &p->guests, &scratch, &trace);
  taken[PS__DEVICE_MEM] =
      ps__largest_device(s.at, arena) +
      ps__device_overhead(&p->hw, p->model->fp8.on, s.at, s.scratch_bytes, &scratch) +
      ps__net_memory(p) + ps__page_table_bytes(&p->hw, taken[PS__PINNED_MEM]);
  CHECK(ps__least_ns(&p->hw, &s, a, &ns) == PS_OK);
  ps__step_leave(&s, &a->step);
  ps__spec_free(&spec);
  return ns;
}

/* A candidate is not ruled out by more than it takes: neither by its own bounds nor by the work of
 * the one that keeps all saved activations on the device. */
static void check_bounds(const ps__search_space *sp, const ps__candidate *m,
                         ps__evaluation_arrays *a) {
  ps__candidate all = *m;
  uint64_t taken[PS__N_MEMS], unused[PS__N_MEMS];
  const double most = take(sp, m, a, taken) * (1 + 1e-9); /* sums in another order */
  for (uint32_t i = 0; i < PS__N_MEMS; i++)
    CHECK(m->bytes[i] <= taken[i]);
  CHECK(m->bound_ns <= most);
  all.device = PS__SAVED_PARTS;
  all.host = 0;
  CHECK(take(sp, &all, a, unused) <= most);
}

/* The same where the candidate holds the state of its first @held blocks: with caps that it keeps
 * to exactly, it is not ruled out. */
static void check_bounds_holding(ps__search *s, const ps__search_space *sp, const ps__candidate *m,
                                 uint8_t held, ps__evaluation_arrays *a) {
  ps__candidate holding = *m;
  uint64_t bytes[PS__N_MEMS];
  holding.held = held;
  CHECK(m->bound_ns <= take(sp, &holding, a, s->cap) * (1 + 1e-9));
  memcpy(bytes, m->bytes, sizeof bytes);
  ps__hold_all_that_fit(s, m, bytes, false);
  for (uint32_t i = 0; i < PS__N_MEMS; i++)
    CHECK(bytes[i] <= s->cap[i]);
}

/* Of one random model and step a few candidates. */
static uint32_t check_some_bounds(uint64_t seed, const ps_hardware *cpu) {
  enum { CANDIDATES = 12, MOST_OPS = 20000 };
  uint64_t at = mix64(seed), *state = &at;
  const ps_model_config model = random_model(state);
  ps_plan_config cfg = random_config(state);
  ps_hardware hw = *cpu;
  static ps__search_space sp; /* 48 KB */
  static ps__search search;
  ps__evaluation_arrays arrays = {0};
  ps_plan *p;
  uint32_t n = 0;
  cfg.seq_len = ONE_OF(1, 17, 64, 127, 512, 1025, 8191);
  cfg.tokens_per_step = cfg.seq_len * ONE_OF(1, 2, 3, 5, 8, 13);
  cfg.chunk_tokens = rnd_below(state, 2) ? 1 + cfg.seq_len / ONE_OF(2, 3, 7) : 0;
  cfg.chunk_tokens = cfg.chunk_tokens < cfg.seq_len ? cfg.chunk_tokens : 0;
  cfg.clip_by = cfg.clip_norm > 0 ? rnd_below(state, 2) : 0;
  cfg.layout = cfg.n_devices > 1 ? rnd_below(state, 2) && cfg.n_devices <= model.n_layers
                                       ? PS_LAYOUT_RING
                                       : PS_LAYOUT_DATA_PARALLEL
                                 : PS_LAYOUT_AUTO;
  if (rnd_below(state, 3) == 0)
    cfg.lora = (ps_lora){.rank = 4, .targets = PS_LORA_ALL, .alpha = 8};
  else if (rnd_below(state, 3) == 0)
    cfg.n_frozen_layers = 1 + rnd_below(state, model.n_layers + 1);
  if (rnd_below(state, 2))
    CHECK(ps_hardware_of_gpu(&hw, "h200") == PS_OK);
  cfg.pinned_mem_bytes = rnd_below(state, 2);
  CHECK(ps__plan_new(&p, &model, &cfg, &hw) == PS_OK);
  p->staging = cfg.pinned_mem_bytes ? rnd_below(state, PS__STAGE_ALL + 1) : PS__STAGE_NONE;
  p->holds = rnd_below(state, 2) && ps__may_hold(p);
  memset(&search, 0, sizeof search);
  search.plan = p;
  ps__held_init(&search);
  CHECK(ps__search_space_init(&sp, p, rnd_below(state, 2) ? 0 : UINT64_MAX, &p->hooks) == PS_OK);
  for (uint32_t i = 0; i < CANDIDATES; i++) {
    const ps__candidate *m = &sp.candidate[rnd(state) % sp.n_candidates];
    if (sp.microbatch[m->microbatch].n_ops > MOST_OPS)
      continue;
    if (p->holds)
      check_bounds_holding(&search, &sp, m, (uint8_t)(1 + rnd_below(state, model.n_layers)),
                           &arrays);
    else
      check_bounds(&sp, m, &arrays);
    n++;
  }
  ps__evaluation_arrays_free(&arrays);
  ps__search_space_free(&sp);
  CHECK(ps_plan_destroy(p) == PS_OK);
  return n;
}

static void test_bounds(uint64_t first, uint64_t n, const ps_hardware *cpu) {
  uint64_t checked = 0;
  for (uint64_t seed = first; seed < first + n; seed++)
    checked += check_some_bounds(seed, cpu);
  CHECK(checked > n);
  printf("ok %llu candidates take as much memory and time as their bounds say, or more\n",
         (unsigned long long)checked);
}

/* More of a share than an int can count would fit: the device gets what it gets without a cap. */
static void test_a_cap_far_beyond(const ps_hardware *cpu) {
  const ps_model_config model = {
      MODEL_DEFAULTS, .vocab_size = 64, .n_layers = 2, .dim = 16,           .n_kv_heads = 1,
      .n_heads = 1,   .head_dim = 16,   .ffn_dim = 16, .max_positions = 64, .rope = {.theta = 1e4}};
  const ps_plan_config cfg = {PLAN_DEFAULTS,        .recipe = PS_RECIPE_BF16, .seq_len = 1,
                              .tokens_per_step = 8, .chunk_tokens = 1,        .chunks_per_round = 4,
                              .clip_norm = 1,       .reserve_bytes = 1 << 28};
  static ps__search search;
  ps__search_watch watch = {0};
  ps__search_result out = {0};
  ps__candidate m[2];
  ps_hardware hw = *cpu;
  ps_plan *p;
  hw.backend = PS_BACKEND_CUDA;
  hw.host_memory_bytes = 0;
  CHECK(ps__plan_new(&p, &model, &cfg, &hw) == PS_OK && ps__memo_create(&search.memo) == PS_OK);
  search.plan = p;
  search.watch = &watch;
  search.machine = UINT64_MAX;
  search.out = &out;
  ps__held_init(&search);
  CHECK(ps__search_space_init(&search.space, p, UINT64_MAX, &p->hooks) == PS_OK);
  for (int i = 0; i < 2; i++) {
    double ns;
    uint64_t taken;
    memset(search.cap, 255, sizeof search.cap);
    if (i)
      search.cap[PS__DEVICE_MEM] = 1ull << 50;
    m[i] = search.space.candidate[0];
    CHECK(ps__fill_device(&search, &m[i], 0, &ns, &taken) == PS_OK && ns > 0);
  }
  CHECK(m[0].device == m[1].device && m[1].device == PS__SAVED_PARTS - m[1].host);
  ps__evaluation_arrays_free(&search.arrays);
  ps__search_space_free(&search.space);
  ps__memo_destroy(search.memo);
  CHECK(ps_plan_destroy(p) == PS_OK);
  printf("ok a cap of 2^50 bytes is as none\n");
}

static uint64_t number(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

/* Plans under several caps that share evaluations are those made alone. */
static void test_shared_evaluations(const ps_hardware *hw) {
  const ps_model_config m = small_model(7);
  ps_plan_config c = {PLAN_DEFAULTS, .seq_len = 256, .tokens_per_step = 2048,
                      .reserve_bytes = 1 << 28};
  ps_plan_report all = {.struct_bytes = sizeof all}, r = all;
  ps_evaluations *shared;
  CHECK(ps_evaluations_create(&shared) == PS_OK);
  /* all of what a plan takes that has no cap, then less */
  for (uint32_t i = 0; i < (SLOWER > 1 ? 2 : 4); i++) {
    ps_plan *alone = NULL, *sharing = NULL;
    c.device_mem_bytes = all.device_used_bytes / 8 * (8 - 2 * i);
    CHECK(ps_plan_create(&alone, &m, &c, hw) == PS_OK);
    CHECK(ps_plan_create_sharing(&sharing, shared, &m, &c, hw) == PS_OK);
    CHECK(!strcmp(ps_plan_json(alone), ps_plan_json(sharing)));
    CHECK(ps_plan_get_report(sharing, &r) == PS_OK &&
          (i == 0 || r.device_used_bytes < all.device_used_bytes));
    all = i == 0 ? r : all;
    CHECK(ps_plan_destroy(alone) == PS_OK && ps_plan_destroy(sharing) == PS_OK);
  }
  ps_plan *plan = NULL;
  c.device_mem_bytes = 4096; /* nothing fits: the least caps share them too */
  CHECK_FAILS(ps_plan_create_sharing(&plan, shared, &m, &c, hw), PS_EBUDGET, "device memory");
  c.seq_len = 128;
  CHECK_FAILS(ps_plan_create_sharing(&plan, shared, &m, &c, hw), PS_EINVAL, "only the caps");
  CHECK(!plan);
  ps_evaluations_destroy(shared);
  ps_evaluations_destroy(NULL);
  printf("ok plans that share evaluations are those made alone\n");
}

/* How many candidates of another kind the search space has, on a GPU whose host has so much. */
static size_t n_of_other_kinds(uint32_t n_layers, uint32_t n_sequences, uint64_t host_bytes) {
  static ps__search_space sp; /* 48 KB */
  const ps_model_config model = small_model(n_layers);
  const ps_plan_config cfg = {PLAN_DEFAULTS,  .recipe = PS_RECIPE_BF16,
                              .seq_len = 256, .tokens_per_step = 256 * n_sequences,
                              .clip_norm = 1, .reserve_bytes = 1 << 28};
  ps_hardware hw = {.struct_bytes = sizeof hw};
  ps_plan *p;
  size_t n = 0;
  CHECK(ps_hardware_of_gpu(&hw, "h200") == PS_OK);
  CHECK(ps__plan_new(&p, &model, &cfg, &hw) == PS_OK);
  CHECK(ps__search_space_init(&sp, p, host_bytes, &p->hooks) == PS_OK);
  for (size_t i = 0; i < sp.n_candidates; i++)
    n += ps__kind_of(&sp.candidate[i].keep) != PS__KIND_USUAL;
  ps__search_space_free(&sp);
  CHECK(ps_plan_destroy(p) == PS_OK);
  return n;
}

/* More memory of the host takes no candidate away, where a search does not evaluate all. */
static void test_kinds(void) {
  const size_t n_large = n_of_other_kinds(16, 64, 1);
  CHECK(n_large > 0 && n_of_other_kinds(16, 64, UINT64_MAX) == n_large);
  CHECK(n_of_other_kinds(2, 1, 1) > 0 && n_of_other_kinds(2, 1, UINT64_MAX) == 0);
  printf("ok a large search space has candidates of all kinds, however much the host has\n");
}

int main(int argc, char **argv) {
  const bool all = argc > 1 && !strcmp(argv[1], "all");
  /* the second takes as long as ten others */
  const uint64_t first = number("PENSTOCK_SEED", all || SLOWER > 1 ? 1 : 5),
                 n = number("PENSTOCK_SEARCHES", all          ? 8
                                                 : SLOWER > 1 ? 1
                                                              : 2);
  ps_hardware hw = {.struct_bytes = sizeof hw};
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  const int64_t before = ps__live_allocations();
  test_bounds(first, all ? 1000 : SLOWER > 1 ? 4 : 60, &hw);
  test_a_cap_far_beyond(&hw);
  test_shared_evaluations(&hw);
  test_kinds();
  for (uint64_t seed = first; seed < first + n; seed++) {
    uint64_t state = mix64(seed);
    plan_one(&state, seed, &hw);
  }
  CHECK(ps__live_allocations() == before);
  CHECK(SLOWER > 1 || ps__resident_peak_bytes() < MOST_BYTES);
  printf("ok %llu random searches end in time, within their caps, the largest in %llu MiB\n",
         (unsigned long long)n, (unsigned long long)(ps__resident_peak_bytes() >> 20));
  return 0;
}
