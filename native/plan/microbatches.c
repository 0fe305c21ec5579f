/* microbatches.c - the micro-batch configurations of the search space: how many tokens a chunk has,
 * and how many chunks a round and a first round. */
#include "optim/optim.h"
#include "plan/candidates.h"
#include <math.h>

enum { MAX_CHUNKS = 8, MAX_ROUNDS = 8, MAX_FIRSTS = 3, MOST_STEP_OPS = 250000, OPS_A_CELL = 30 };

/* Whether all tensors of a chunk together take less than an eighth of the largest unit's
 * parameters. Such a chunk saves almost no memory over the next size, and costs many times the
 * ops. */
static bool needlessly_small(const ps__search_space *sp, uint64_t chunk_tokens) {
  const ps__layer_def *block = ps__layer_of(sp->plan->model, 1);
  uint64_t row = 0, unit = 0;
  for (uint32_t t = 0; t < block->n_tensors; t++)
    if (!ps__in(block->of_pass, t) && !ps__in(block->of_step, t))
      row += block->tensor[t].row_bytes;
  for (uint32_t u = 0; u < sp->plan->model->n_units; u++)
    if (ps__unit_bytes(sp, u) > unit)
      unit = ps__unit_bytes(sp, u);
  return chunk_tokens * row < unit / 8;
}

static uint32_t add_number(uint64_t *list, uint32_t n, uint64_t value) {
  for (uint32_t i = 0; i < n; i++)
    if (list[i] == value)
      return n;
  list[n] = value;
  return n + 1;
}

/* About how many ops a step of such chunks has: 36 a block and chunk, 8 an adapter of it, 8 a slice
 * of the head. */
static double step_ops(const ps__search_space *sp, uint64_t chunk_tokens) {
  const ps_plan_config *cfg = &sp->plan->cfg;
  const uint64_t slices = (chunk_tokens + cfg->head_slice_tokens - 1) / cfg->head_slice_tokens;
  const double sequences = (double)(cfg->tokens_per_step / cfg->seq_len),
               a_chunk = (double)(chunk_tokens / cfg->seq_len);
  const double chunks =
      a_chunk >= 1 ? ceil(sequences / a_chunk)
                   : sequences * (double)((cfg->seq_len + chunk_tokens - 1) / chunk_tokens);
  const ps_lora *lora = &sp->plan->model->lora;
  const int block = 36 + 8 * (lora->rank ? __builtin_popcount(lora->targets) : 0);
  return chunks * ((double)block * sp->plan->model->cfg.n_layers + 8.0 * (double)slices);
}

/* Chunk sizes: whole sequences where one fits, slices of one where it does not. */
static uint32_t chunk_sizes(const ps__search_space *sp, uint64_t list[MAX_CHUNKS]) {
  static const uint64_t target[] = {256, 1024, 4096, 8192, 16384, 32768, 65536};
  const ps_plan_config *cfg = &sp->plan->cfg;
  /* the two largest are for long sequences: attention is faster on longer slices. With experts on a
   * GPU 32768 tokens are for short ones too: an expert's last tile is half empty */
  const bool large = cfg->seq_len > 16384 ||
                     (sp->plan->model->cfg.n_experts && sp->plan->hw.backend == PS_BACKEND_CUDA);
  const uint32_t n_targets = cfg->seq_len > 32768 ? 7 : large ? 6 : 5;
  uint32_t n = 0;
  /* a pair of documents is in one chunk */
  const bool whole = sp->plan->model->cfg.problem == PS_PROBLEM_PAIRS;
  if (cfg->chunk_tokens)
    return add_number(list, 0, cfg->chunk_tokens);
  for (uint32_t i = 0; i < n_targets; i++) {
    const bool slices = target[i] < cfg->seq_len && !whole;
    uint64_t tokens = slices                     ? target[i]
                      : target[i] < cfg->seq_len ? cfg->seq_len
                                                 : target[i] / cfg->seq_len * cfg->seq_len;
    if (tokens > cfg->tokens_per_step)
      tokens = cfg->tokens_per_step;
    /* between 4096 and 16384 only a GPU's memory makes a difference */
    if (target[i] == 8192 && sp->plan->hw.backend == PS_BACKEND_CPU)
      continue;
    /* a plan of so many ops takes minutes to find */
    const bool many =
        cfg->tokens_per_step / tokens * sp->plan->model->cfg.n_layers * OPS_A_CELL > MOST_STEP_OPS;
    if ((many || needlessly_small(sp, tokens)) && tokens < cfg->tokens_per_step &&
        i + 1 < n_targets)
      continue;
    n = add_number(list, n, tokens);
  }
  return n;
}

/* Chunks of a round, in whole groups: one group, some, all that a device has. */
static uint32_t round_sizes(const ps__search_space *sp, uint64_t chunk_tokens,
                            uint64_t list[MAX_ROUNDS]) {
  static const uint64_t groups[] = {1, 2, 3, 4, 6, 8};
  const ps_plan_config *cfg = &sp->plan->cfg;
  if (cfg->chunks_per_round)
    return add_number(list, 0, cfg->chunks_per_round);
  const uint64_t per_seq =
      chunk_tokens >= cfg->seq_len ? 1 : (cfg->seq_len + chunk_tokens - 1) / chunk_tokens;
  const uint64_t n_groups = chunk_tokens >= cfg->seq_len
                                ? (cfg->tokens_per_step + chunk_tokens - 1) / chunk_tokens
                                : cfg->tokens_per_step / cfg->seq_len;
  const uint32_t n_devices = sp->plan->at->n_devices;
  const uint64_t all = (n_groups + n_devices - 1) / n_devices * per_seq;
  uint32_t n = 0;
  for (uint32_t i = 0; i < sizeof groups / sizeof *groups; i++)
    if (groups[i] * per_seq < all &&
        (groups[i] == 1 || groups[i] == 4 || sp->plan->hw.backend == PS_BACKEND_CUDA))
      n = add_number(list, n, groups[i] * per_seq);
  return add_number(list, n, all);
}

/* How many rounds have the size of the first: where none is given, one of each device. */
static uint64_t n_first_rounds(const ps__search_space *sp) {
  const ps_plan_config *cfg = &sp->plan->cfg;
  return cfg->first_rounds         ? cfg->first_rounds
         : cfg->first_round_chunks ? 1
                                   : sp->plan->at->n_devices;
}

/* Whether a forward pass of @tokens takes as long as the updates, both at the machine's rates. */
static bool hides_updates(const ps__search_space *sp, uint64_t tokens) {
  const ps_model *m = sp->plan->model;
  const ps_hardware *hw = &sp->plan->hw;
  const ps_plan_config *cfg = &sp->plan->cfg;
  const double flops = 2.0 * (double)m->n_elements * (double)tokens / (m->fp8.on ? 2 : 1),
               bytes = ps__update_bytes((ps_optimizer)cfg->optimizer, ps__plan_row(cfg),
                                        PS_UPDATE_WHOLE) *
                       (double)m->n_trained;
  return flops / hw->gemm_flops_per_s[m->dt] >= bytes / hw->optimizer_bytes_per_s;
}

/* Whether first rounds may have @times as many chunks as the others. On a CPU their forward passes
 * hide no updates. With several devices only where fewer chunks do not hide them all. */
static bool worth_larger(const ps__search_space *sp, uint64_t chunk_tokens, uint64_t a_round,
                         uint64_t times) {
  const ps_plan_config *cfg = &sp->plan->cfg;
  const uint64_t all = (cfg->tokens_per_step + chunk_tokens - 1) / chunk_tokens;
  return sp->plan->hw.backend == PS_BACKEND_CUDA && ps__waits_for_norm(sp->plan) &&
         n_first_rounds(sp) * times * a_round < all &&
         (sp->plan->at->n_devices == 1 || !hides_updates(sp, (times - 1) * a_round * chunk_tokens));
}

/* Chunks of a first round: as many as of the others, or two or three times as many where its
 * forward pass hides the last step's updates. */
static uint32_t first_sizes(const ps__search_space *sp, uint64_t chunk_tokens, uint64_t a_round,
                            uint64_t list[MAX_FIRSTS]) {
  const ps_plan_config *cfg = &sp->plan->cfg;
  uint32_t n = 0;
  if (cfg->first_round_chunks || cfg->chunks_per_round)
    return add_number(list, 0, cfg->first_round_chunks);
  for (uint64_t times = 1; times <= MAX_FIRSTS; times++)
    if (times == 1 || worth_larger(sp, chunk_tokens, a_round, times))
      n = add_number(list, n, times * a_round);
  return n;
}

/* EMIT_OPS bounds the ops of all configurations' steps, which are emitted to measure them: of the
 * chunk sizes the largest are taken, whose steps have the fewest ops. MOST_OPS bounds the ops of
 * one step: 1.3 KB an op, seconds to evaluate. */
static const double EMIT_OPS = 1.6e7, MOST_OPS = 1 << 20;

/* The first of the ascending chunk sizes that is taken. */
static ps_status first_size(const ps__search_space *sp, const uint64_t *chunk, uint32_t n,
                            uint32_t *out) {
  const ps_plan_config *cfg = &sp->plan->cfg;
  double ops = 0;
  for (*out = n; *out > 0; --*out) {
    const double a_step = step_ops(sp, chunk[*out - 1]);
    uint64_t rounds[MAX_ROUNDS];
    ops += a_step * MAX_FIRSTS * round_sizes(sp, chunk[*out - 1], rounds);
    if (a_step > MOST_OPS || (*out < n && ops > EMIT_OPS))
      break;
  }
  if (*out < n)
    return PS_OK;
  return ps__fail(PS_EINVAL,
                  "a step of %llu tokens in chunks of %llu has about %.3g million ops, at most "
                  "%.3g are planned: lower %s, or raise %s "
                  "(or %s, %llu)",
                  (unsigned long long)cfg->tokens_per_step, (unsigned long long)chunk[n - 1],
                  step_ops(sp, chunk[n - 1]) * 1e-6, MOST_OPS * 1e-6, ps__field("tokens_per_step"),
                  ps__field("chunk_tokens"), ps__field("head_slice_tokens"),
                  (unsigned long long)cfg->head_slice_tokens);
}

static ps_status add_microbatch(ps__search_space *sp, uint64_t chunk_tokens, uint64_t a_round,
                                uint64_t first) {
  const ps_plan_config *cfg = &sp->plan->cfg;
  PS_TRY(ps__layout_init(&sp->microbatch[sp->n_microbatches].layout, cfg->seq_len,
                         cfg->tokens_per_step / cfg->seq_len, chunk_tokens, a_round, first,
                         n_first_rounds(sp)));
  sp->microbatch[sp->n_microbatches++].n_ops = (size_t)step_ops(sp, chunk_tokens);
  return PS_OK;
}

ps_status ps__add_microbatches(ps__search_space *sp) {
  uint64_t chunks[MAX_CHUNKS], rounds[MAX_ROUNDS];
  const uint32_t n_chunks = chunk_sizes(sp, chunks);
  uint32_t begin;
  PS_TRY(first_size(sp, chunks, n_chunks, &begin));
  for (uint32_t i = begin; i < n_chunks; i++) {
    const uint32_t n_rounds = round_sizes(sp, chunks[i], rounds);
    for (uint32_t j = 0; j < n_rounds; j++) {
      uint64_t first[MAX_FIRSTS];
      const uint32_t n_firsts = first_sizes(sp, chunks[i], rounds[j], first);
      for (uint32_t k = 0; k < n_firsts && sp->n_microbatches < PS__MAX_MICROBATCHES; k++)
        PS_TRY(add_microbatch(sp, chunks[i], rounds[j], first[k]));
    }
  }
  return PS_OK;
}
