/* test_caps.c - what plans are said to take and to lack: a candidate's bounds of memory and time
 * are such and count what they can, the caps hold for what runs in the place of the plan's step,
 * and a GPU without attention for rows with several documents is told.
 * Usage: test_caps [all: more candidates, more caps of pinned memory | bounds: no plans that are
 * searched for, which take minutes under a sanitizer] */
#include "check.h"
#include "plan/evaluate.h"

#ifdef PS_SANITIZED /* searches take minutes there */
enum { PINNED_MIB = 1, CANDIDATE_STRIDE = 4999 };
#else
enum { PINNED_MIB = 16, CANDIDATE_STRIDE = 499 };
#endif
enum { SEQ_LEN = 64, SEQUENCES = 8 };
static bool everything; /* asked for */

static const ps_model_config model = {
    MODEL_DEFAULTS,        .vocab_size = 64,      .n_layers = 4,  .dim = 32,
    .n_kv_heads = 2,       .n_heads = 2,          .head_dim = 16, .ffn_dim = 64,
    .max_positions = 4096, .rope = {.theta = 1e4}};
static ps_hardware hw;

static ps_plan_config config(void) {
  return (ps_plan_config){PLAN_DEFAULTS,           .recipe = PS_RECIPE_BF16,
                          .seq_len = SEQ_LEN,      .tokens_per_step = SEQ_LEN * SEQUENCES,
                          .chunk_tokens = SEQ_LEN, .clip_norm = 1,
                          .n_threads = 2,          .reserve_bytes = 1 << 20};
}

/* ---- bounds ---------------------------------------------------------------------------------- */

/* Frozen blocks have no gradient that saved activations could lie in: where no block has one, all
 * that is offloaded counts, beside the weights. So does that of two devices' rounds at once. */
static void check_candidate(const ps__search_space *sp, const ps__candidate *m, bool no_grads) {
  const ps_plan *p = sp->plan;
  const ps__layout *l = &sp->microbatch[m->microbatch].layout;
  const uint32_t host = p->at->host;
  ps__step_hooks hooks;
  ps__spec spec;
  ps__step s;
  uint64_t scratch, trace;
  CHECK(ps__candidate_spec(sp, m, l, &spec) == PS_OK);
  CHECK(ps__step_build(&s, p->model, l, &spec, &hooks) == PS_OK);
  const uint64_t over = ps__host_overhead(p, &s, &p->guests, &scratch, &trace);
  /* what an arena is rounded up by is more than all gradients of so small a model */
  const uint64_t arena = s.space_bytes[host];
  CHECK(m->bytes[PS__HOST_MEM] <=
        (ps__kind_of(&m->keep) == PS__KIND_USUAL ? ps__arena_round(arena) : arena) + over);
  const uint64_t pinned = ps__pinned_bytes(arena, s.pageable_bytes);
  CHECK(m->bytes[PS__PINNED_MEM] <= pinned);
  CHECK(m->bytes[PS__DEVICE_MEM] <=
        ps__largest_device(s.at, s.space_bytes) +
            ps__device_overhead(&p->hw, p->model->fp8.on, s.at, s.scratch_bytes, &scratch) +
            ps__net_memory(p) + ps__page_table_bytes(&p->hw, pinned));
  const uint64_t apart =
      sp->microbatch[m->microbatch].base[ps__embed_on_host(sp, l, &m->keep)].host_bytes;
  const uint32_t at_once = p->at->n_devices;
  CHECK(!no_grads || l->n_rounds != at_once || l->n_chunks % at_once ||
        m->bytes[PS__HOST_MEM] >=
            apart + p->model->n_elements * 2 + at_once * s.saved_bytes[PS_POLICY_HOST]);
  ps__step_free(&s);
  ps__spec_free(&spec);
}

static double least_ns(const ps__search_space *sp, const ps__candidate *m) {
  const ps__layout *l = &sp->microbatch[m->microbatch].layout;
  ps__evaluation_arrays arrays = {0};
  ps__step_hooks hooks;
  ps__spec spec;
  ps__step s;
  double ns;
  CHECK(ps__candidate_spec(sp, m, l, &spec) == PS_OK);
  CHECK(ps__step_build(&s, sp->plan->model, l, &spec, &hooks) == PS_OK);
  CHECK(ps__least_ns(&sp->plan->hw, &s, &arrays, &ns) == PS_OK);
  ps__evaluation_arrays_free(&arrays);
  ps__step_free(&s);
  ps__spec_free(&spec);
  return ns;
}

/* What rules candidates out: the bound of their time, and the work of the same one that keeps all
 * saved activations on the device. */
static void check_least_time(const ps__search_space *sp, const ps__candidate *m) {
  ps__candidate all = *m;
  all.device = PS__SAVED_PARTS;
  all.host = 0;
  const double own = least_ns(sp, m), most = own * (1 + 1e-9); /* sums in another order */
  CHECK(m->bound_ns <= most);
  CHECK(least_ns(sp, &all) <= most);
}

/* A search that is to end evaluates nothing more, also on a slower machine. */
static void check_abandon(const ps__search_space *sp, ps_plan *p) {
  static ps__search s; /* 48 KB */
  const _Atomic uint32_t end = 1;
  double ns;
  s.plan = p;
  memcpy(&s.space, sp, sizeof s.space);
  p->abandon = &end;
  CHECK_FAILS(ps__evaluate_on(&s, &sp->candidate[0], &p->hw, &ns), PS_ECANCELLED, "was ended");
  p->abandon = NULL;
}

static void test_bounds(uint32_t n_frozen, uint32_t lora_rank, uint32_t backend, uint32_t clip_by,
                        uint32_t n_devices) {
  ps_plan_config cfg = config();
  ps_hardware machine = hw;
  static ps__search_space sp; /* 48 KB */
  ps_plan *p;
  cfg.n_frozen_layers = n_frozen;
  cfg.clip_by = clip_by;
  cfg.n_devices = n_devices;
  cfg.layout = n_devices > 1 ? PS_LAYOUT_DATA_PARALLEL : PS_LAYOUT_AUTO;
  if (lora_rank)
    cfg.lora = (ps_lora){.rank = lora_rank, .targets = PS_LORA_ALL, .alpha = 8};
  machine.backend = backend;
  CHECK(ps__plan_new(&p, &model, &cfg, &machine) == PS_OK);
  CHECK(ps__search_space_init(&sp, p, 0, &p->hooks) == PS_OK && sp.n_candidates > 100);
  uint64_t most = 0;
  /* candidates whose gradients have no memory on the host; whose totals pass; and some of whose
   * inputs are made again */
  uint32_t n_blocks = 0, n_passing = 0, n_again = 0;
  const size_t stride = everything ? CANDIDATE_STRIDE : 10 * CANDIDATE_STRIDE + 9;
  for (size_t i = 0; i < sp.n_candidates; i += everything ? 29 : n_devices > 1 ? 101 : 293) {
    check_candidate(&sp, &sp.candidate[i], lora_rank > 0);
    if (everything || i % 2)
      check_least_time(&sp, &sp.candidate[i]);
    n_blocks += sp.candidate[i].keep.blocks > 0;
    n_passing += sp.candidate[i].keep.passing;
    n_again += sp.candidate[i].keep.again > 0;
    if (sp.candidate[i].host > most)
      most = sp.candidate[i].host;
  }
  CHECK(most > PS__SAVED_PARTS / 2);
  CHECK((n_blocks > 0) == (backend == PS_BACKEND_CUDA && n_devices == 1));
  check_abandon(&sp, p);
  CHECK((n_passing > 0) == (clip_by == PS_CLIP_BY_PREVIOUS));
  CHECK((n_again > 0) == (clip_by == PS_CLIP_BY_PREVIOUS) && n_again <= n_passing);
  ps__search_space_free(&sp);
  p->cfg.pinned_mem_bytes = 1;
  for (p->staging = 0; p->staging <= PS__STAGE_ALL; p->staging++) {
    CHECK(ps__search_space_init(&sp, p, 0, &p->hooks) == PS_OK && sp.n_candidates > 100);
    for (size_t i = p->staging; i < sp.n_candidates; i += stride)
      check_candidate(&sp, &sp.candidate[i], false);
    ps__search_space_free(&sp);
  }
  CHECK(ps_plan_destroy(p) == PS_OK);
}

/* Two devices have a round each, of which the first has a chunk more: an input that is made again
 * is so in that chunk, too. */
static void test_again_in_a_larger_round(void) {
  ps_plan_config cfg = config();
  static ps__search_space sp; /* 48 KB */
  ps_plan *p;
  uint32_t n = 0;
  cfg.clip_by = PS_CLIP_BY_PREVIOUS;
  cfg.n_devices = 2;
  cfg.layout = PS_LAYOUT_DATA_PARALLEL;
  cfg.tokens_per_step = 3 * SEQ_LEN;
  cfg.chunks_per_round = 1;
  cfg.first_round_chunks = 2;
  CHECK(ps__plan_new(&p, &model, &cfg, &hw) == PS_OK);
  CHECK(ps__search_space_init(&sp, p, 0, &p->hooks) == PS_OK);
  for (size_t i = 0; i < sp.n_candidates; i++)
    if (sp.candidate[i].keep.again && n++ % 10 == 0)
      check_candidate(&sp, &sp.candidate[i], false);
  CHECK(n > 100);
  ps__search_space_free(&sp);
  CHECK(ps_plan_destroy(p) == PS_OK);
}

/* All that a step of the candidate takes on the device and on the host, arenas not rounded up, is
 * its bound or more. So is its time. */
static void check_all_bounds(const ps__search_space *sp, const ps__candidate *m) {
  const ps_plan *p = sp->plan;
  const ps__layout *l = &sp->microbatch[m->microbatch].layout;
  ps__step_hooks hooks;
  ps__spec spec;
  ps__step s;
  uint64_t scratch, trace;
  check_candidate(sp, m, false);
  check_least_time(sp, m);
  CHECK(ps__candidate_spec(sp, m, l, &spec) == PS_OK);
  CHECK(ps__step_build(&s, p->model, l, &spec, &hooks) == PS_OK);
  CHECK(m->bytes[PS__HOST_MEM] <=
        s.space_bytes[p->at->host] + ps__host_overhead(p, &s, &p->guests, &scratch, &trace));
  ps__step_free(&s);
  ps__spec_free(&spec);
}

/* Each of these had candidates that took less than their bound said: two rounds, of which the first
 * has no totals in its head, and the second is smaller; slices of a sequence, whose keys and values
 * are one tensor; a frozen table on the host, which no update reads. */
static const struct cut {
  uint32_t seq_len, sequences, chunk_tokens, a_round, n_layers, dim, vocab, n_frozen, grads;
} cuts[] = {
    {64, 3, 64, 2, .n_layers = 4, .dim = 32, .vocab = 64, .grads = 32},
    {4096, 2, 2048, 4, .n_layers = 16, .dim = 16, .vocab = 64},
    {64, 2, 64, 2, .n_layers = 4, .dim = 32, .vocab = 1 << 17, .n_frozen = 3},
};

static void test_bounds_of_a_cut(const struct cut *c) {
  ps_model_config m = model;
  ps_plan_config cfg = config();
  ps_hardware machine = {.struct_bytes = sizeof machine};
  static ps__search_space sp; /* 48 KB */
  ps_plan *p;
  uint32_t n = 0;
  CHECK(ps_hardware_of_gpu(&machine, "h200") == PS_OK);
  m.n_layers = c->n_layers;
  m.dim = c->dim, m.ffn_dim = 2 * c->dim;
  m.vocab_size = c->vocab;
  cfg.seq_len = c->seq_len;
  cfg.tokens_per_step = (uint64_t)c->sequences * c->seq_len;
  cfg.chunk_tokens = c->chunk_tokens;
  cfg.chunks_per_round = c->a_round;
  cfg.n_frozen_layers = c->n_frozen;
  CHECK(ps__plan_new(&p, &m, &cfg, &machine) == PS_OK);
  CHECK(ps__search_space_init(&sp, p, UINT64_MAX, &p->hooks) == PS_OK);
  for (size_t i = 0; i < sp.n_candidates; i++) {
    const ps__candidate *of = &sp.candidate[i];
    if (of->keep.grads >= c->grads && n++ % (everything ? 3 : 7) == 0)
      check_all_bounds(&sp, of);
  }
  CHECK(n > 50);
  ps__search_space_free(&sp);
  CHECK(ps_plan_destroy(p) == PS_OK);
}

/* ---- pinned memory --------------------------------------------------------------------------- */

/* What an engine of the plan would pin is what the plan says, within the cap. */
static ps_plan_report report_of(ps_plan *p) {
  ps_engine_config e;
  ps_plan_report r;
  ps__plan_engine(p, &e);
  const ps_space_config *s = &e.space[p->at->host];
  CHECK(ps_plan_get_report(p, &r) == PS_OK);
  CHECK(s->bytes - s->pageable_bytes == r.pinned_bytes && r.pinned_bytes <= r.pinned_mem_bytes);
  CHECK(r.pageable_bytes + r.pinned_bytes == r.host_arena_bytes);
  CHECK(r.all_pinned_step_s > 0 && r.all_pinned_step_s <= r.step_s * (1 + 1e-9));
  return r;
}

/* Copies inside the host's memory are no link's, and have a name where something awaits them. */
static void check_traced(ps_plan *p, const ps_plan_report *r) {
  enum { STEPS = 2, ROOM = 64 };
  ps_trace_event *events = calloc(STEPS * r->n_ops, sizeof *events);
  double end[STEPS];
  ps_throughput t;
  ps_stall stall[ROOM];
  uint64_t n;
  CHECK(events && ps_plan_simulate(p, STEPS, events, end) == PS_OK);
  CHECK(ps_plan_throughput(p, events, STEPS * r->n_ops, &t) == PS_OK && t.h2d_bytes_per_s > 0);
  CHECK(ps_plan_stalls(p, events, STEPS * r->n_ops, stall, ROOM, &n) == PS_OK && n > 0);
  bool staged = false;
  for (uint64_t i = 0; i < n && i < ROOM; i++)
    staged |= strcmp(stall[i].what, "copies to or from staging memory") == 0;
  CHECK(staged);
  free(events);
}

/* From a cap with which optimizer state alone is not pinned down to the least one, one byte below
 * which is refused with both figures. */
static void test_pinned(uint32_t lora_rank) {
  ps_model_config m = model;
  ps_plan_config cfg = config();
  ps_plan *p;
  uint64_t least = 0;
  char says[160];
  m.vocab_size = 2048;
  m.dim = 128, m.n_heads = 8, m.ffn_dim = 512;
  cfg.clip_norm = 0;
  cfg.chunks_per_round = everything ? 0 : 4;
  cfg.device_mem_bytes = 6 << 20;
  if (lora_rank)
    cfg.lora = (ps_lora){.rank = lora_rank, .targets = PS_LORA_ALL, .alpha = 8};
  cfg.pinned_mem_bytes = 1;
  CHECK(ps_plan_create(&p, &m, &cfg, &hw) == PS_EBUDGET);
  CHECK(strstr(ps_last_error(), "of host memory must be pinned, 1 B can be: raise pinned_mem_"));
  CHECK(sscanf(strstr(ps_last_error(), "plan pins "), "plan pins %llu",
               (unsigned long long *)&least));
  cfg.pinned_mem_bytes = least - 1;
  snprintf(says, sizeof says, "plan pins %llu bytes", (unsigned long long)least);
  CHECK_FAILS(ps_plan_create(&p, &m, &cfg, &hw), PS_EBUDGET, says);
  uint32_t staged[3] = {0}; /* caps with plans that stage nothing, totals, weights */
  uint64_t most = UINT64_MAX;
  const uint32_t first = lora_rank && !everything ? PINNED_MIB : 1;
  for (uint32_t mib = 0; mib <= PINNED_MIB; mib += mib ? mib : first) {
    cfg.pinned_mem_bytes = least + ((uint64_t)mib << 20);
    CHECK(ps_plan_create(&p, &m, &cfg, &hw) == PS_OK);
    const ps_plan_report r = report_of(p);
    CHECK(strstr(ps_plan_text(p), "pinned memory ") && strstr(ps_plan_text(p), "if all could be"));
    staged[r.staged_weight_units ? 2 : r.staged_total_units ? 1 : 0]++;
    if (r.staged_weight_units)
      check_traced(p, &r);
    CHECK(!r.staged_bytes == !(r.staged_weight_units || r.staged_total_units));
    most = r.pageable_bytes < most ? r.pageable_bytes : most;
    CHECK(ps_plan_destroy(p) == PS_OK);
  }
  CHECK(PINNED_MIB < 16 || (staged[0] && staged[2] && (staged[1] || lora_rank) && most > 0));
}

/* ---- planning again -------------------------------------------------------------------------- */

/* What the observer and a search take beside steps counts against the host's cap. */
static void test_replan(void) {
  ps_plan_config cfg = config();
  ps_plan *with, *without;
  CHECK(ps_plan_create(&without, &model, &cfg, &hw) == PS_OK);
  cfg.replan = 1;
  CHECK(ps_plan_create(&with, &model, &cfg, &hw) == PS_OK);
  const ps_plan_report *a = &with->report, *b = &without->report;
  CHECK(a->n_ops == b->n_ops && a->step_s == b->step_s);
  CHECK(a->host_used_bytes - b->host_used_bytes >=
        (24 << 20) + a->n_ops * (3 * sizeof(ps_trace_event) + (5 << 10)));
  cfg.host_mem_bytes = a->host_used_bytes - 1; /* which the plan without has room in */
  CHECK(ps_plan_destroy(with) == PS_OK && ps_plan_destroy(without) == PS_OK);
  const ps_status st = ps_plan_create(&with, &model, &cfg, &hw);
  CHECK(st == PS_EBUDGET || with->report.host_used_bytes <= cfg.host_mem_bytes);
  if (st == PS_OK)
    CHECK(ps_plan_destroy(with) == PS_OK);
  printf("ok what planning again takes counts against the host's cap\n");
}

/* ---- state on the device --------------------------------------------------------------------- */

/* What a GPU has of the state of the first blocks, which are alike: its part, and the first GPU the
 * most. */
static void check_parts(ps_plan *p) {
  static ps__search s;
  const uint32_t n_devices = p->at->n_devices;
  memset(&s, 0, sizeof s);
  s.plan = p;
  ps__held_init(&s);
  for (uint32_t n = 1; n <= p->spec.n_layers; n++)
    CHECK(s.held_there[n] == s.held_bytes[(n + n_devices - 1) / n_devices] &&
          s.held_bytes[n] == n * s.held_bytes[1] && s.held_bytes[1] > 0);
}

/* A plan for other rates of a training that goes on: it holds state where @p does, or more or less
 * of it, in the arenas of @p. */
static void check_again(const ps_plan *p, const ps_hardware *of) {
  ps_hardware rates = *of;
  ps_plan *next;
  rates.optimizer_bytes_per_s /= 2;
  CHECK(ps_plan_again(&next, p, &rates, 0) == PS_OK && next->report.held_state_units > 0);
  for (uint32_t u = 0; u < p->spec.n_units; u++) {
    const uint32_t was = p->step.vt[p->step.unit_host[u].state[0]].space,
                   is = next->step.vt[next->step.unit_host[u].state[0]].space;
    CHECK(is == was || is == p->at->host || was == p->at->host);
  }
  for (uint32_t i = 0; i < p->at->n_places; i++)
    CHECK(next->step.space_bytes[i] <= ps__plan_reserved(p, i));
  CHECK(ps_plan_destroy(next) == PS_OK);
}

/* With room on the GPUs, state of the first blocks stays there where no other plan fits: under the
 * least cap of the host that is told, which is that of plans that hold none. Several GPUs have a
 * part of these blocks each, in either layout.
 * @clip_by  whether totals may pass; where not, they wait for the norm on the GPU
 * @room     BYTES of each GPU for the state of two of four blocks
 * @most     so many halves of a block's state less still have a plan */
static void test_held(uint32_t clip_by, uint64_t room, uint32_t n_devices, uint32_t layout,
                      uint32_t most) {
  ps_model_config m = model;
  ps_plan_config cfg = config();
  ps_hardware gpu = {.struct_bytes = sizeof gpu};
  ps_plan *p;
  uint64_t device, least;
  m.dim = 512, m.ffn_dim = 2048, m.n_heads = 8, m.n_kv_heads = 8, m.head_dim = 64;
  CHECK(ps_hardware_of_gpu(&gpu, "h200") == PS_OK);
  cfg.clip_by = clip_by;
  cfg.chunks_per_round = SEQUENCES / n_devices;
  cfg.n_devices = n_devices;
  cfg.layout = layout;
  CHECK(ps_plan_smallest(&m, &cfg, &gpu, &device, &least) == PS_OK);
  cfg.device_mem_bytes = device + room;
  CHECK(ps_plan_smallest(&m, &cfg, &gpu, &device, &least) == PS_OK);
  const uint64_t block = 2 * 2 * (4 * 512 * 512 + 3 * 512 * 2048);
  for (uint32_t i = 0; i <= most; i += i ? most - 1 : 1) {
    cfg.host_mem_bytes = least - i * block / 2;
    CHECK(ps_plan_create(&p, &m, &cfg, &gpu) == PS_OK);
    const ps_plan_report *o = &p->report;
    uint64_t there = 0, on[PS_MAX_DEVICES] = {0};
    for (uint32_t u = 0; u < p->spec.n_units; u++) {
      const ps__vt *v = &p->step.vt[p->step.unit_host[u].state[0]];
      there += v->space != p->at->host;
      CHECK((v->space != p->at->host) == p->spec.state_held[u]);
      on[v->space] += v->space != p->at->host;
      CHECK(v->space == p->at->host || layout != PS_LAYOUT_RING ||
            v->space == ps__device_of(&p->spec, p->model->unit[u].layer, 0));
    }
    check_parts(p);
    if (i == most)
      check_again(p, &gpu);
    for (uint32_t d = 1; d < n_devices; d++)
      CHECK(on[d] <= on[d - 1] && on[d] + 1 >= on[d - 1]);
    CHECK(there == o->held_state_units && there <= o->streamed_update_units);
    CHECK((there > 0) == (i > 0) && 2 * there >= i);
    CHECK((there > 0) == !!strstr(ps_plan_text(p), "staying there"));
    CHECK(o->host_used_bytes <= cfg.host_mem_bytes && o->device_used_bytes <= cfg.device_mem_bytes);
    CHECK(ps_plan_destroy(p) == PS_OK);
  }
  cfg.host_mem_bytes = least - 4 * block;
  CHECK_FAILS(ps_plan_create(&p, &m, &cfg, &gpu), PS_EBUDGET, "the smallest plan takes");
}

/* ---- the caps -------------------------------------------------------------------------------- */

/* The plan as it would be where the GPU has @there bytes and the user gave @given. */
static ps_status beside(const ps_plan *of, uint64_t there, uint64_t given) {
  ps_plan p;
  memcpy(&p, of, sizeof p);
  p.hw.backend = PS_BACKEND_CUDA;
  p.hw.device_memory_bytes = there;
  p.cfg.device_mem_bytes = given;
  return ps__plan_beside_check(&p);
}

static void test_beside(bool ramp, bool val) {
  const ps_ramp_stage stage = {SEQ_LEN, 3};
  ps_plan_config cfg = config();
  ps_plan *p;
  const char *with = ramp ? val ? "with the batch ramp and validation " : "with the batch ramp "
                          : "with validation ";
  cfg.ramp = &stage;
  cfg.n_ramp = ramp;
  cfg.val_tokens = val ? 2 * SEQ_LEN : 0;
  CHECK(ps_plan_create(&p, &model, &cfg, &hw) == PS_OK);
  const uint64_t used = p->report.device_used_bytes;
  const bool guests = ramp || val; /* the search has seen to the plan's own step */
  CHECK(beside(p, 0, 0) == PS_OK && beside(p, used, 0) == PS_OK && beside(p, used, used) == PS_OK);
  CHECK((beside(p, used - 1, 0) == PS_EBUDGET) == guests);
  if (guests) {
    CHECK(strstr(ps_last_error(), with) && strstr(ps_last_error(), "this GPU has "));
    CHECK_FAILS(beside(p, used - 1, used), PS_EBUDGET, "this GPU has ");
    CHECK_FAILS(beside(p, used, used - 1), PS_EBUDGET, "raise device_mem_bytes, or ");
    CHECK_FAILS(beside(p, 0, used - 1), PS_EBUDGET, with);
    p->cfg.host_mem_bytes = p->report.host_used_bytes - 1;
    CHECK_FAILS(ps__plan_beside_check(p), PS_EBUDGET, "raise host_mem_bytes, or ");
  }
  CHECK(ps_plan_destroy(p) == PS_OK);
}

/* ---- documents ------------------------------------------------------------------------------- */

static const struct documents_case {
  uint32_t sm, head_dim, window;
  float softcap;
  const char *flash, *says; /* NULL: nothing is lacking */
} documents[] = {
    {.sm = 89, .head_dim = 128, .flash = "", .says = "build with FLASH_ATTN=1"},
    {.sm = 89, .head_dim = 64, .flash = "120", .says = "on compute capability 8.9, and this build"},
    {.sm = 80, .head_dim = 64, .flash = "86", .says = "on compute capability 8.0, and this build"},
    {.sm = 89, .head_dim = 128, .flash = "80 120", .says = NULL},
    {.sm = 86, .head_dim = 64, .flash = "80", .says = NULL},
    {.sm = 120, .head_dim = 128, .flash = "80", .says = NULL}, /* translated */
    {.sm = 120, .head_dim = 128, .flash = "", .says = "12.0, and this build lacks it"},
    {.sm = 90, .head_dim = 256, .flash = "", .says = NULL},
    {.sm = 100, .head_dim = 128, .flash = "", .says = NULL},
    {.sm = 89, .head_dim = 256, .flash = "80", .says = "head_dim: train on one document"},
    {.sm = 89, .head_dim = 64, .window = 8, .flash = "80", .says = "windows: train on one"},
    {.sm = 89, .head_dim = 64, .window = SEQ_LEN, .flash = "80", .says = NULL}, /* hides nothing */
    {.sm = 89, .head_dim = 64, .softcap = 50, .flash = "80", .says = "soft cap: train on one"},
};

static void test_documents(void) {
  ps_plan_config cfg = config();
  ps_hardware gpu = {.struct_bytes = sizeof gpu};
  ps_plan *p;
  CHECK(ps_hardware_of_gpu(&gpu, "rtx4090") == PS_OK);
  CHECK(ps_plan_create(&p, &model, &cfg, &gpu) == PS_OK);
  char lack[PS__DOCUMENTS_TEXT];
  CHECK(ps__documents_lack(lack, p, NULL) && strstr(ps_plan_text(p), lack));
  CHECK(ps_plan_destroy(p) == PS_OK);
  for (size_t i = 0; i < sizeof documents / sizeof *documents; i++) {
    const struct documents_case *c = &documents[i];
    ps_model_config m = model;
    m.head_dim = c->head_dim;
    m.window = c->window;
    m.layer_flags[1] = c->window ? PS_LAYER_WINDOW : 0;
    m.attention_softcap = c->softcap;
    gpu.compute_capability = c->sm;
    for (cfg.one_document = 0; cfg.one_document < 2; cfg.one_document++) {
      CHECK(ps__plan_new(&p, &m, &cfg, &gpu) == PS_OK);
      const char *why = ps__documents_lack(lack, p, c->flash);
      CHECK(c->says && !cfg.one_document ? why && strstr(why, c->says) : !why);
      p->hw.backend = PS_BACKEND_CPU;
      CHECK(!ps__documents_lack(lack, p, c->flash));
      CHECK(ps_plan_destroy(p) == PS_OK);
    }
  }
}

int main(int argc, char **argv) {
  everything = argc > 1 && !strcmp(argv[1], "all");
  hw.struct_bytes = sizeof hw;
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  const int64_t before = ps__live_allocations();
  for (uint32_t backend = PS_BACKEND_CPU; backend <= PS_BACKEND_CUDA; backend++) {
    test_bounds(0, 0, backend, PS_CLIP_BY_STEP, 1);
    test_bounds(0, 0, backend, PS_CLIP_BY_PREVIOUS, 1);
    test_bounds(2, 0, backend, PS_CLIP_BY_STEP, 1);
    test_bounds(0, 4, backend, PS_CLIP_BY_PREVIOUS, 1);
    test_bounds(0, 4, backend, PS_CLIP_BY_PREVIOUS, 2);
  }
  test_again_in_a_larger_round();
  for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
    test_bounds_of_a_cut(&cuts[i]);
  printf("ok candidates take as much memory and time as they are said to, or more\n");
  if (argc > 1 && !strcmp(argv[1], "bounds")) {
    CHECK(ps__live_allocations() == before);
    return 0;
  }
  for (uint32_t rank = 0; rank <= (PINNED_MIB < 16 ? 0 : 4); rank += 4)
    test_pinned(rank);
  printf("ok plans pin what may be pinned, and say what that costs\n");
  test_replan();
  for (int i = 0; i < 4; i++)
    test_beside(i & 1, i & 2);
  for (uint32_t i = 0; i < 3; i++) { /* two GPUs with one way of clipping each */
    const uint32_t layout = i == 2 ? PS_LAYOUT_RING : PS_LAYOUT_DATA_PARALLEL, n = i ? 2 : 1;
    if (everything || i != 1)
      test_held(PS_CLIP_BY_STEP, 60 << 20, n, layout, i ? 7 : 2);
    if (everything || i != 2)
      test_held(PS_CLIP_BY_PREVIOUS, 40 << 20, n, layout, i ? 7 : 2);
  }
  printf("ok state stays on the device where the host is too small for any other plan\n");
  test_documents();
  printf("ok rows with several documents that a GPU has no attention for are told\n");
  printf("ok the caps hold with a batch ramp and with validation\n");
  CHECK(ps__live_allocations() == before);
  return 0;
}
