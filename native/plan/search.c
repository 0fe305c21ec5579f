/* search.c - the fastest plan under both caps, among a fixed family of plans.
 *
 * The family does not depend on the caps: chunk sizes x chunks a round x how much of the saved activations stays on the
 * device (rungs, filled from the layers that the backward pass needs first) x what becomes of the rest x streamed units,
 * resident ones, or resident with their optimizer state x transfers just in time or issued ahead. Each member has an exact memory map; those that fit are
 * simulated and the fastest wins. A larger cap only admits more members, so more memory never gives a slower plan. */
#include "plan_impl.h"
#include "../kernels/cuda/scratch.h"
#include <string.h>

enum { N_RUNGS = 4, MAX_SIZES = 6, LARGE_STEP_OPS = 20000 };

/* What becomes of saved tensors that do not stay on the device. */
typedef enum rest_policy { REST_HOST_X, REST_DEVICE_X, REST_HOST_ATTENTION, REST_HOST_ALL, N_RESTS } rest_policy;

/* What of the units stays on the device: nothing, parameters and gradients, or the optimizer's state too. */
typedef enum residency { STREAMED, WITHOUT_STATE, WITH_STATE, N_RESIDENCIES } residency;

typedef struct candidate {
  uint64_t chunk_tokens, chunks_per_round;
  uint32_t rung, rest, resident, ahead;
} candidate;

typedef struct search {
  ps_plan *plan;
  bool sizes_only;
  ps__search_result *out;
  ps__layout layout;
  double best_ns;
  uint64_t device_cap, host_cap, machine; /* machine: host memory in all */
  uint64_t best_miss;
} search;

uint32_t ps__stream_threads(const ps_plan *plan, uint32_t stream) {
  return stream == PS__S_HOST || (stream == PS__S_COMPUTE && plan->hw.backend == PS_BACKEND_CPU) ? plan->hw.n_threads : 1;
}

/* The scratch of a stream and the products' workspace are one allocation (native/backends/cuda/cuda.c), in the driver's units of 2 MiB. */
uint64_t ps__device_overhead(const ps_plan *plan, const ps__step *s, uint64_t *scratch) {
  *scratch = 0;
  if (plan->hw.backend != PS_BACKEND_CUDA) return 0;
  for (uint32_t i = 0; i < PS__N_STREAMS; i++) {
    const uint64_t blas = i == PS__S_COMPUTE ? ps__cuda_workspace_bytes(plan->hw.compute_capability) : 0;
    if (!ps__stream_on_host(i)) *scratch += ps__arena_round(s->scratch_bytes[i] + blas);
  }
  return *scratch + plan->hw.device_overhead_bytes;
}

uint64_t ps__host_overhead(const ps_plan *plan, const ps__step *s, uint64_t *scratch, uint64_t *trace) {
  *scratch = 0;
  for (uint32_t i = 0; i < PS__N_STREAMS; i++)
    if (plan->hw.backend == PS_BACKEND_CPU || ps__stream_on_host(i)) *scratch += (uint64_t)s->scratch_bytes[i] * ps__stream_threads(plan, i);
  /* the trace, and what the program, the schedule and the run keep for each op */
  *trace = s->n_op * ((uint64_t)plan->cfg.trace_steps * sizeof(ps_trace_event) + 512);
  /* tokens and targets of a batch as the source fills them */
  return *scratch + *trace + plan->cfg.reserve_bytes + 8 * s->layout->n_tokens;
}

/* Fates of the saved items of a chunk that does not stay on the device. */
static int rest_fate(uint32_t rest, int item) {
  if (item == PS__ITEM_X) return rest == REST_DEVICE_X ? PS_FATE_DEVICE : PS_FATE_HOST;
  if (rest == REST_HOST_ALL) return PS_FATE_HOST;
  if (rest == REST_HOST_ATTENTION && item != PS__ITEM_H && item != PS__ITEM_GU) return PS_FATE_HOST;
  return PS_FATE_RECOMPUTE;
}

static ps_status make_spec(const search *s, const candidate *c, ps__spec *spec) {
  const ps_plan *plan = s->plan;
  PS_TRY(ps__spec_init(spec, &plan->model, &s->layout));
  spec->recipe = (ps_recipe)plan->cfg.recipe;
  spec->backend = plan->hw.backend;
  spec->cudnn_version = plan->hw.cudnn_version;
  spec->deterministic = plan->cfg.deterministic != 0;
  spec->one_document = plan->cfg.one_document != 0;
  spec->chunk_tokens = c->chunk_tokens;
  spec->chunks_per_round = s->layout.chunks_per_round;
  spec->head_slice = plan->cfg.head_slice_tokens;
  spec->clip = plan->cfg.clip != 0;
  spec->param_lead = spec->saved_lead = spec->saved_lag = spec->grad_lag = c->ahead;
  spec->keep_grads = plan->cfg.keep_grads != 0;
  for (uint32_t u = 0; u < spec->n_units; u++) {
    const bool several = s->layout.n_rounds > 1 || (u == 0 && plan->model.tied_embeddings);
    spec->param_resident[u] = c->resident != STREAMED;
    spec->grad_resident[u] = c->resident != STREAMED && several;
    spec->update_resident[u] = c->resident == WITH_STATE;
  }
  const uint64_t cells = (uint64_t)spec->n_layers * spec->n_chunks, stay = cells * c->rung / N_RUNGS;
  for (uint64_t i = 0; i < cells; i++) {
    const uint32_t layer = spec->n_layers - 1 - (uint32_t)(i / spec->n_chunks), chunk = spec->n_chunks - 1 - (uint32_t)(i % spec->n_chunks);
    for (int item = 0; item < PS__N_ITEMS; item++)
      *ps__spec_fate(spec, layer, chunk, item) = (uint8_t)(i < stay ? PS_FATE_DEVICE : rest_fate(c->rest, item));
  }
  return PS_OK;
}

static double compute_busy_ns(const ps__step *s, const ps__cost_model *m) {
  double ns = 0;
  for (size_t i = 0; i < s->n_op; i++)
    if (s->op[i].stream == PS__S_COMPUTE) ns += ps__cost_ns(m, s->op[i].kernel, PS__S_COMPUTE, s->op[i].work);
  return ns;
}

double ps__steady_ns(const ps__step *s, const ps__cost_model *m, const double end[PS__SIM_STEPS]) {
  const double last = end[PS__SIM_STEPS - 1] - end[PS__SIM_STEPS - 2], busy = compute_busy_ns(s, m);
  return last > busy ? last : busy;
}

static ps_status simulate(const ps__step *step, ps__cost_model *m, double *step_ns) {
  ps_program *program = NULL;
  ps_schedule *schedule = NULL;
  double end[PS__SIM_STEPS];
  ps_status st = ps__step_program(step, &program);
  if (st == PS_OK) st = ps_schedule_compile(&schedule, program);
  if (st == PS_OK) st = ps_sim_run(schedule, ps__cost, m, PS__SIM_STEPS, NULL, end);
  if (st == PS_OK) *step_ns = ps__steady_ns(step, m, end);
  ps_program_destroy(program);
  (void)ps_schedule_destroy(schedule);
  return st;
}

/* On the CPU backend the device's arena is host memory too. */
static uint64_t host_taken(const search *s, uint64_t device, uint64_t host) {
  return host + (s->plan->hw.backend == PS_BACKEND_CPU ? device : 0);
}

static uint64_t miss(const search *s, uint64_t device, uint64_t host) {
  return (device > s->device_cap ? device - s->device_cap : 0) + (host > s->host_cap ? host - s->host_cap : 0);
}

static void note_sizes(search *s, uint64_t device, uint64_t host) {
  ps__search_result *r = s->out;
  const bool machine = host_taken(s, device, host) <= s->machine;
  if (machine && host <= s->host_cap && (r->smallest_device == 0 || device < r->smallest_device)) r->smallest_device = device;
  if (machine && device <= s->device_cap && (r->smallest_host == 0 || host < r->smallest_host)) r->smallest_host = host;
  if (r->any_device == 0 || miss(s, device, host) < s->best_miss) {
    r->any_device = device;
    r->any_host = host;
    s->best_miss = miss(s, device, host);
  }
}

static ps_status keep_best(search *s, const candidate *c, const ps__spec *spec, double ns) {
  ps_plan *plan = s->plan;
  ps__layout layout;
  PS_TRY(ps__layout_init(&layout, plan->cfg.seq_len, plan->cfg.tokens_per_step / plan->cfg.seq_len, c->chunk_tokens, c->chunks_per_round));
  ps__spec copy;
  const ps_status st = ps__spec_copy(&copy, spec);
  if (st != PS_OK) {
    ps__layout_free(&layout);
    return st;
  }
  ps__layout_free(&plan->layout);
  ps__spec_free(&plan->spec);
  plan->layout = layout;
  plan->spec = copy;
  s->best_ns = ns;
  return PS_OK;
}

static bool fits(const search *s, uint64_t device, uint64_t host) {
  return device <= s->device_cap && host <= s->host_cap && host_taken(s, device, host) <= s->machine;
}

/* Whether a member with these sizes, or larger ones, could matter: as a plan, or as the smallest one. */
static bool worth_mapping(const search *s, uint64_t device, uint64_t host, double busy_ns) {
  if (!s->sizes_only) return fits(s, device, host) && (s->best_ns == 0 || busy_ns < s->best_ns);
  const ps__search_result *r = s->out;
  return r->any_device == 0 || (host <= s->host_cap && (r->smallest_device == 0 || device < r->smallest_device)) ||
         (device <= s->device_cap && (r->smallest_host == 0 || host < r->smallest_host)) || miss(s, device, host) < s->best_miss;
}

/* Work that grows from one stage to the next, each ruling members out before the next: emission, the bytes alive at once, the memory
 * map, the simulation. What is ruled out could not have won, so the result is that of the whole family. */
static ps_status look_at(search *s, const candidate *c, ps__spec *spec, ps__step *step) {
  ps_plan *plan = s->plan;
  ps__cost_model m = {&plan->hw, (ps_dtype)step->dt, plan->hw.n_threads};
  uint64_t size[PS__N_SPACES], scratch, trace;
  const uint64_t overhead[PS__N_SPACES] = {[PS__SPACE_DEVICE] = ps__device_overhead(plan, step, &scratch),
                                           [PS__SPACE_HOST] = ps__host_overhead(plan, step, &scratch, &trace)};
  const double busy = s->sizes_only ? 0 : compute_busy_ns(step, &m);
  s->out->n_candidates++;
  if (!s->sizes_only && s->best_ns > 0 && busy >= s->best_ns) return PS_OK;
  for (uint32_t i = 0; i < PS__N_SPACES; i++) {
    size[i] = ps__memmap_bound(step->vt, step->n_vt, (uint32_t)step->n_op, i);
    if (size[i] == UINT64_MAX) return ps__fail(PS_ENOMEM, "out of memory for a plan's size");
    size[i] = ps__arena_round(size[i]) + overhead[i];
  }
  if (!worth_mapping(s, size[PS__SPACE_DEVICE], size[PS__SPACE_HOST], busy)) return PS_OK;
  PS_TRY(ps__step_map(step));
  const uint64_t device = ps__arena_round(step->space_bytes[PS__SPACE_DEVICE]) + overhead[PS__SPACE_DEVICE];
  const uint64_t host = ps__arena_round(step->space_bytes[PS__SPACE_HOST]) + overhead[PS__SPACE_HOST];
  note_sizes(s, device, host);
  if (!fits(s, device, host)) return PS_OK;
  s->out->n_feasible++;
  if (s->sizes_only) return PS_OK;
  double ns = 0;
  PS_TRY(simulate(step, &m, &ns));
  return s->best_ns == 0 || ns < s->best_ns ? keep_best(s, c, spec, ns) : PS_OK;
}

static ps_status look_at_member(search *s, const candidate *c) {
  ps_plan *plan = s->plan;
  ps__spec spec;
  ps__step step;
  PS_TRY(make_spec(s, c, &spec));
  ps_status st = ps__step_emit(&step, &plan->model, &s->layout, &spec, &plan->hooks);
  if (st == PS_OK) {
    st = look_at(s, c, &spec, &step);
    ps__step_free(&step);
  }
  ps__spec_free(&spec);
  return st;
}

static ps_status look_at_sizes(search *s, uint64_t chunk_tokens, uint64_t chunks_per_round) {
  const ps_plan_config *cfg = &s->plan->cfg;
  PS_TRY(ps__layout_init(&s->layout, cfg->seq_len, cfg->tokens_per_step / cfg->seq_len, chunk_tokens, chunks_per_round));
  const bool large = (uint64_t)s->layout.n_chunks * s->plan->model.n_layers * 30 > LARGE_STEP_OPS;
  ps_status st = PS_OK;
  candidate c = {.chunk_tokens = chunk_tokens, .chunks_per_round = chunks_per_round};
  /* least recomputation first: it is what rules out most of the others */
  for (uint32_t down = 0; st == PS_OK && down <= N_RUNGS; down++) {
    c.rung = N_RUNGS - down;
    const uint32_t rests = c.rung == N_RUNGS ? 1 : N_RESTS; /* nothing is left over on the last rung */
    if (large && c.rung % 2) continue;
    for (uint32_t r = rests; st == PS_OK && r-- > 0;)
      for (c.resident = STREAMED; st == PS_OK && c.resident < (s->plan->hw.backend == PS_BACKEND_CUDA ? WITH_STATE : N_RESIDENCIES); c.resident++)
        for (c.ahead = 0; st == PS_OK && c.ahead < 2; c.ahead++) {
          c.rest = r;
          st = look_at_member(s, &c);
        }
  }
  ps__layout_free(&s->layout);
  return st;
}

static uint32_t add_size(uint64_t *list, uint32_t n, uint64_t value) {
  for (uint32_t i = 0; i < n; i++)
    if (list[i] == value) return n;
  list[n] = value;
  return n + 1;
}

/* A chunk whose tensors, all of them at once, take less than an eighth of the largest unit's parameters saves next to no memory over the
 * next size and costs four times the ops. */
static ps_status needlessly_small(const ps_plan *plan, uint64_t chunk_tokens, bool *out) {
  const ps_dtype dt = plan->cfg.recipe == PS_RECIPE_FP32 ? PS_F32 : PS_BF16;
  ps__block block;
  PS_TRY(ps__block_init(&block, &plan->model, dt));
  uint64_t row = 0, unit = 0;
  for (int t = 0; t < PS__N_TENSORS; t++) row += block.tensor[t].row_bytes;
  for (uint32_t u = 0; u < ps_model_n_units(&plan->model); u++) {
    const uint64_t bytes = ps_model_unit_elements(&plan->model, u) * ps_dtype_bytes(dt);
    if (bytes > unit) unit = bytes;
  }
  *out = chunk_tokens * row < unit / 8;
  return PS_OK;
}

/* Chunks of about 256, 1024, 4096 and 16384 tokens: whole sequences where one fits, slices of one where not. */
static ps_status chunk_sizes(const ps_plan *plan, uint64_t list[MAX_SIZES], uint32_t *n) {
  const ps_plan_config *cfg = &plan->cfg;
  *n = 0;
  if (cfg->chunk_tokens) {
    list[(*n)++] = cfg->chunk_tokens;
    return PS_OK;
  }
  for (uint64_t target = 256; target <= 16384; target *= 4) {
    uint64_t size = target < cfg->seq_len ? target : target / cfg->seq_len * cfg->seq_len;
    if (size > cfg->tokens_per_step) size = cfg->tokens_per_step;
    bool small;
    PS_TRY(needlessly_small(plan, size, &small));
    if (small && size < cfg->tokens_per_step && target < 16384) continue;
    *n = add_size(list, *n, size);
  }
  return PS_OK;
}

static uint32_t round_sizes(const ps_plan_config *cfg, uint64_t chunk_tokens, uint64_t list[MAX_SIZES]) {
  if (cfg->chunks_per_round) {
    list[0] = cfg->chunks_per_round;
    return 1;
  }
  const uint64_t per_seq = chunk_tokens >= cfg->seq_len ? 1 : (cfg->seq_len + chunk_tokens - 1) / chunk_tokens;
  const uint64_t all = chunk_tokens >= cfg->seq_len ? (cfg->tokens_per_step + chunk_tokens - 1) / chunk_tokens
                                                     : cfg->tokens_per_step / cfg->seq_len * per_seq;
  uint32_t n = add_size(list, 0, per_seq);
  if (all > 4 * per_seq) n = add_size(list, n, 4 * per_seq);
  return add_size(list, n, all);
}

ps_status ps__search(ps_plan *plan, bool sizes_only, ps__search_result *out) {
  memset(out, 0, sizeof *out);
  search s = {.plan = plan, .sizes_only = sizes_only, .out = out,
              .device_cap = plan->cfg.device_bytes ? plan->cfg.device_bytes : UINT64_MAX,
              .host_cap = plan->cfg.host_bytes ? plan->cfg.host_bytes : UINT64_MAX,
              .machine = plan->hw.host_memory_bytes ? plan->hw.host_memory_bytes : UINT64_MAX};
  if (plan->hw.backend == PS_BACKEND_CUDA && plan->hw.device_memory_bytes && plan->hw.device_memory_bytes < s.device_cap)
    s.device_cap = plan->hw.device_memory_bytes;
  uint64_t chunks[MAX_SIZES], rounds[MAX_SIZES];
  uint32_t n_chunks;
  PS_TRY(chunk_sizes(plan, chunks, &n_chunks));
  for (uint32_t i = 0; i < n_chunks; i++) {
    const uint32_t n_rounds = round_sizes(&plan->cfg, chunks[i], rounds);
    for (uint32_t j = 0; j < n_rounds; j++) PS_TRY(look_at_sizes(&s, chunks[i], rounds[j]));
  }
  return PS_OK;
}
