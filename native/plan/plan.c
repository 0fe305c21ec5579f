/* plan.c - a plan from its configuration: defaults, the search, the memory map of the run, the
 * report, and refusals in words. */
#include "plan/plan_impl.h"
#include "engine/schedule.h"
#include "hardware/hardware_impl.h"
#include "hosts/hosts.h"
#include <string.h>

const char *ps_plan_stream_name(const ps_plan *plan, uint32_t stream) {
  return plan && stream < plan->at->n_streams ? plan->at->stream[stream].name : NULL;
}

void ps__plan_engine(const ps_plan *p, ps_engine_config *out) {
  const ps_plan_report *r = &p->report;
  const ps__caps cap = ps__plan_caps(p);
  const uint64_t beside[PS__N_MEMS] = {[PS__DEVICE_MEM] =
                                           r->device_used_bytes - r->device_arena_bytes,
                                       [PS__HOST_MEM] = r->host_used_bytes - r->host_arena_bytes};
  ps__engine_of(out, &p->hw, p->at, p->step.space_bytes, cap.given, beside, p->step.scratch_bytes);
  out->deterministic = p->cfg.deterministic;
}

/* Tokens whose logits take about 32 MiB, on a GPU 512 MiB: a power of two of at least 64. It
 * follows from the vocabulary, never from a cap. A slice reads the lm_head twice and its gradient's
 * sum once, so on a GPU it must have a few hundred FLOP for each byte of them. */
static uint64_t default_head_slice(const ps_model_config *m, ps_dtype dt, uint32_t backend) {
  const uint64_t bytes = backend == PS_BACKEND_CUDA ? 512u << 20 : 32u << 20;
  uint64_t rows = 64;
  while (rows < 4096 && rows * 2 * m->vocab_size * ps_dtype_bytes(dt) <= bytes)
    rows *= 2;
  return rows;
}

uint64_t ps__head_slice(const ps_plan *plan, uint64_t chunk_tokens) {
  uint64_t rows = plan->cfg.head_slice_tokens;
  if (plan->head_slice_given || plan->hw.backend != PS_BACKEND_CUDA)
    return rows;
  while (rows < 4096 && rows * PS__MOST_ADDITIONS < chunk_tokens)
    rows *= 2;
  return rows;
}

/* Within these ranges nothing that is kept in 32 bits can wrap. */
static ps_status check_ranges(const ps_plan_config *c) {
  const struct {
    const char *name;
    uint64_t value, most;
  } field[] = {{"seq_len", c->seq_len, PS_MAX_ROWS},
               {"tokens_per_step", c->tokens_per_step, PS_MAX_STEP_TOKENS},
               {"chunk_tokens", c->chunk_tokens, PS_MAX_ROWS},
               {"chunks_per_round", c->chunks_per_round, PS_MAX_CHUNKS},
               {"first_round_chunks", c->first_round_chunks, PS_MAX_CHUNKS},
               {"first_rounds", c->first_rounds, PS_MAX_CHUNKS},
               {"head_slice_tokens", c->head_slice_tokens, PS_MAX_ROWS},
               {"val_tokens", c->val_tokens, PS_MAX_STEP_TOKENS},
               {"sample_sequences", c->sample_sequences, PS_MAX_SEQUENCES},
               {"sample_context", c->sample_context, PS_MAX_ROWS},
               {"n_threads", c->n_threads, PS_MAX_THREADS},
               {"trace_steps", c->trace_steps, PS_MAX_TRACE_STEPS},
               {"n_devices", c->n_devices, PS_MAX_DEVICES},
               {"n_hosts", c->n_hosts, PS_MAX_HOSTS}};
  for (size_t i = 0; i < sizeof field / sizeof *field; i++)
    if (field[i].value > field[i].most)
      return ps__fail(PS_EINVAL, "%s is %llu: at most %llu is possible", field[i].name,
                      (unsigned long long)field[i].value, (unsigned long long)field[i].most);
  return PS_OK;
}

/* What FP8 asks of the model, the batch and the GPU. */
static ps_status check_fp8(const ps_plan *p) {
  const ps_plan_config *c = &p->cfg;
  const ps_model_config *m = &p->model->cfg;
  const char *const recipe = ps__recipes[c->recipe].name;
  const struct {
    const char *name;
    uint64_t value;
  } sixteens[] = {{"hidden_size", m->dim},
                  {"intermediate_size", m->ffn_dim},
                  {"query heads times head_dim", (uint64_t)m->n_heads * m->head_dim},
                  {"query, key and value heads times head_dim",
                   ((uint64_t)m->n_heads + 2 * (uint64_t)m->n_kv_heads) * m->head_dim},
                  {"--seq-len", c->seq_len},
                  {"--chunk-tokens", c->chunk_tokens}};
  if (!ps__recipes[c->recipe].fp8)
    return c->fp8_bf16_first || c->fp8_bf16_last || c->fp8_bf16_down || c->fp8_head ||
                   c->fp8_fast_accumulation
               ? ps__fail(PS_EINVAL,
                          "--fp8 says what FP8 computes and how, but the recipe %s "
                          "has no FP8: give --recipe fp8 or fp8-master, or leave it out",
                          recipe)
               : PS_OK;
  if (c->fp8_head && (m->vocab_size % 16 || c->head_slice_tokens % 16))
    return ps__fail(PS_EINVAL,
                    "%s is %llu, no multiple of 16, which the head's products of FP8 operands "
                    "need: %s",
                    m->vocab_size % 16 ? "vocab_size" : "--head-slice-tokens",
                    (unsigned long long)(m->vocab_size % 16 ? m->vocab_size : c->head_slice_tokens),
                    m->vocab_size % 16 ? "leave out --fp8 head" : "give a multiple of 16");
  for (size_t i = 0; i < sizeof sixteens / sizeof *sixteens; i++)
    if (sixteens[i].value % 16)
      return ps__fail(PS_EINVAL,
                      "%s is %llu, no multiple of 16, which products of FP8 operands need: give "
                      "%s--recipe %s",
                      sixteens[i].name, (unsigned long long)sixteens[i].value,
                      sixteens[i].name[0] == '-' ? "a multiple of 16, or " : "",
                      ps__recipes[ps__recipes[c->recipe].arrays].name);
  if ((uint64_t)c->fp8_bf16_first + c->fp8_bf16_last >= m->n_layers)
    return ps__fail(PS_EINVAL,
                    "the first %u and the last %u blocks stay in bf16, and the model has %u: none "
                    "would compute in FP8; lower --fp8 bf16-first or --fp8 bf16-last",
                    c->fp8_bf16_first, c->fp8_bf16_last, m->n_layers);
  if (c->lora.rank)
    return ps__fail(
        PS_EINVAL,
        "LoRA with FP8 is not supported, because adapters read activations that FP8 does "
        "not store: give --recipe %s",
        ps__recipes[ps__recipes[c->recipe].arrays].name);
  if (p->hw.backend == PS_BACKEND_CUDA && p->hw.compute_capability < 89)
    return ps__fail(
        PS_EINVAL,
        "%s has compute capability %u.%u, and FP8 needs 8.9 (RTX 40, H100) or more: give "
        "--recipe %s",
        p->hw.device_name, p->hw.compute_capability / 10, p->hw.compute_capability % 10,
        ps__recipes[ps__recipes[c->recipe].arrays].name);
  return PS_OK;
}

static ps_status check_config(ps_plan *p) {
  ps_plan_config *c = &p->cfg;
  PS_TRY(check_ranges(c));
  if (c->n_devices == 0)
    c->n_devices = 1;
  if (c->n_hosts == 0)
    c->n_hosts = 1;
  p->at = ps__places_of(c->n_devices, c->n_hosts);
  if (c->transport >= PS_N_TRANSPORTS)
    return ps__fail(PS_EINVAL, "transport %u is unknown: 0 is auto, 1 NCCL, 2 TCP", c->transport);
  if (c->layout >= PS_N_LAYOUTS)
    return ps__fail(PS_EINVAL, "layout %u is unknown: 0 is auto, 1 is data-parallel, 2 is ring",
                    c->layout);
  if (c->layout == PS_LAYOUT_AUTO && (c->n_devices == 1 || p->model->cfg.n_layers < c->n_devices))
    c->layout = PS_LAYOUT_DATA_PARALLEL;
  if (c->layout == PS_LAYOUT_RING && c->n_devices == 1)
    return ps__fail(PS_EINVAL, "--layout ring deals layers to several GPUs, and --gpus is 1: raise "
                               "--gpus, or leave --layout out");
  if (c->layout == PS_LAYOUT_RING && p->model->cfg.n_layers < c->n_devices)
    return ps__fail(PS_EINVAL,
                    "--layout ring: %u blocks cannot be dealt to %u GPUs: lower --gpus, or leave "
                    "--layout out",
                    p->model->cfg.n_layers, c->n_devices);
  if (c->recipe >= PS_N_RECIPES)
    return ps__fail(PS_EINVAL, "recipe %u is unknown: use " PS__RECIPE_NAMES, c->recipe);
  if (c->fp8_bf16_down > 1)
    return ps__fail(PS_EINVAL, "fp8_bf16_down is %u: 0 or 1 is needed", c->fp8_bf16_down);
  if (c->fp8_head > 1)
    return ps__fail(PS_EINVAL, "fp8_head is %u: 0 or 1 is needed", c->fp8_head);
  if (c->fp8_fast_accumulation > 1)
    return ps__fail(PS_EINVAL, "fp8_fast_accumulation is %u: 0 or 1 is needed",
                    c->fp8_fast_accumulation);
  PS_TRY(check_fp8(p));
  if (c->optimizer >= PS_N_OPTIMIZERS)
    return ps__fail(PS_EINVAL, "optimizer %u is unknown: use " PS__OPTIMIZER_NAMES, c->optimizer);
  if (!(c->z_loss >= 0 && c->z_loss <= PS_MAX_Z_LOSS))
    return ps__fail(PS_EINVAL, "--z-loss %g: give a number from 0 to %g", c->z_loss, PS_MAX_Z_LOSS);
  if (!(c->label_smoothing >= 0 && c->label_smoothing < 1))
    return ps__fail(PS_EINVAL, "--label-smoothing %g: give a number from 0 to below 1",
                    c->label_smoothing);
  if (c->forward_only && (c->z_loss > 0 || c->label_smoothing > 0))
    return ps__fail(PS_EINVAL,
                    "z_loss is %g and label_smoothing %g: a plan that trains nothing "
                    "has neither",
                    c->z_loss, c->label_smoothing);
  if (c->forward_only > 1)
    return ps__fail(PS_EINVAL, "forward_only is %u: 0 or 1 is needed", c->forward_only);
  if (c->keep_logits > 1)
    return ps__fail(PS_EINVAL, "keep_logits is %u: 0 or 1 is needed", c->keep_logits);
  if (c->keep_logits && c->tokens_per_step > UINT32_MAX)
    return ps__fail(PS_EINVAL, "tokens per step are %llu: with keep_logits at most %u are possible",
                    (unsigned long long)c->tokens_per_step, UINT32_MAX);
  if (c->forward_only && c->val_tokens)
    return ps__fail(PS_EINVAL, "val_tokens is %llu: a plan that trains nothing has no validation",
                    (unsigned long long)c->val_tokens);
  if (c->lora.rank && c->n_frozen_layers)
    return ps__fail(PS_EINVAL,
                    "%u layers would be frozen, but with LoRA all of the model is: give either "
                    "frozen layers or a LoRA rank",
                    c->n_frozen_layers);
  if (!c->forward_only && p->model->cfg.dropout > 0)
    return ps__fail(PS_EINVAL,
                    "the model's config.json has a dropout of %g (attention_dropout, resid_pdrop "
                    "or embd_pdrop): training has no dropout, set it to 0",
                    (double)p->model->cfg.dropout);
  if (c->forward_only)
    c->clip = 0;
  else if (p->model->n_trained == 0)
    return ps__fail(PS_EINVAL,
                    "%u layers would be frozen, but the model has %u with embedding and head: "
                    "one at least must be trained",
                    c->n_frozen_layers, p->model->n_layers);
  if (c->seq_len == 0)
    return ps__fail(PS_EINVAL, "the sequence length is 0: it must be at least 1 token");
  if (p->model->cfg.max_positions && c->seq_len > p->model->cfg.max_positions)
    return ps__fail(PS_EINVAL,
                    "sequences of %llu tokens are longer than the model's max_position_embeddings "
                    "%u: lower --seq-len, or raise that in config.json",
                    (unsigned long long)c->seq_len, p->model->cfg.max_positions);
  if (c->tokens_per_step == 0)
    c->tokens_per_step = 8 * c->seq_len;
  if (c->tokens_per_step < c->seq_len)
    return ps__fail(PS_EINVAL,
                    "%llu tokens per step are less than one sequence of %llu tokens: raise "
                    "--tokens-per-step",
                    (unsigned long long)c->tokens_per_step, (unsigned long long)c->seq_len);
  if (c->tokens_per_step / c->seq_len < c->n_hosts)
    return ps__fail(PS_EINVAL,
                    "tokens per step %llu are %llu sequences of %llu tokens, for %u hosts: raise "
                    "--tokens-per-step, as each host needs one at least",
                    (unsigned long long)c->tokens_per_step,
                    (unsigned long long)(c->tokens_per_step / c->seq_len),
                    (unsigned long long)c->seq_len, c->n_hosts);
  c->tokens_per_step = c->tokens_per_step / c->seq_len / c->n_hosts * c->seq_len; /* a host's */
  /* without a ring each device takes whole sequences */
  if (c->layout == PS_LAYOUT_AUTO && c->tokens_per_step / c->seq_len < c->n_devices)
    c->layout = PS_LAYOUT_RING;
  if (c->chunk_tokens >= c->seq_len && c->chunk_tokens % c->seq_len)
    return ps__fail(PS_EINVAL,
                    "--chunk-tokens %llu: give a multiple of the %llu tokens of a sequence, or "
                    "fewer than these",
                    (unsigned long long)c->chunk_tokens, (unsigned long long)c->seq_len);
  const ps_hardware *hw = &p->hw;
  const ps_dtype dt = ps__recipes[c->recipe].weights;
  if (!(hw->gemm_flops_per_s[dt] > 0) || !(hw->attention_flops_per_s[dt] > 0) ||
      !(hw->attention_bwd_flops_per_s[dt] > 0) || !(hw->elementwise_bytes_per_s > 0) ||
      !(hw->h2d_bytes_per_s > 0) || !(hw->d2h_bytes_per_s > 0) || !(hw->duplex_bytes_per_s > 0) ||
      !(hw->optimizer_bytes_per_s > 0) || hw->n_threads == 0 || hw->n_cpus == 0)
    return ps__fail(PS_EINVAL, "the hardware description lacks a rate: fill it by "
                               "ps_hardware_measure() or ps_hardware_estimate()");
  if (c->n_threads)
    p->hw.n_threads = c->n_threads;
  p->head_slice_given = c->head_slice_tokens != 0;
  if (!p->head_slice_given)
    c->head_slice_tokens = default_head_slice(&p->model->cfg, dt, hw->backend);
  if (c->reserve_bytes == 0)
    c->reserve_bytes = ps__host_reserve(&p->hw);
  return PS_OK;
}

/* @m is the plan's from here on, also after an error. */
static ps_status plan_of(ps_plan **out, ps_model *m, const ps_plan_config *cfg,
                         const ps_hardware *hw) {
  ps_plan *p = ps__calloc(1, sizeof *p);
  if (!p) {
    ps_model_destroy(m);
    return ps__fail(PS_ENOMEM, "out of memory for a plan");
  }
  p->model = m;
  p->cfg = *cfg;
  p->hw = *hw;
  ps__hardware_complete(&p->hw);
  const ps_status st = check_config(p);
  if (st != PS_OK) {
    ps_plan_destroy(p);
    return st;
  }
  *out = p;
  return PS_OK;
}

ps_status ps__plan_new(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                       const ps_hardware *hw) {
  if (!model || !cfg || !hw || model->struct_bytes != sizeof *model ||
      cfg->struct_bytes != sizeof *cfg || hw->struct_bytes != sizeof *hw)
    return ps__fail(PS_EINVAL,
                    "ps_plan_create: model, cfg and hw must be given, each with struct_bytes set");
  if (hw->backend >= PS_N_BACKENDS)
    return ps__fail(PS_EINVAL,
                    "ps_hardware.backend is %u: PS_BACKEND_CPU (0) or PS_BACKEND_CUDA (1)",
                    hw->backend);
  PS_TRY(ps_model_config_check(model, "model"));
  ps_model *m;
  /* check_config() names a recipe that there is not */
  const ps_dtype dt = cfg->recipe < PS_N_RECIPES ? ps__recipes[cfg->recipe].weights : PS_F32;
  const ps__loss_terms loss = {(float)cfg->z_loss, (float)cfg->label_smoothing};
  /* check_fp8() refuses adapters beside it */
  const bool has_fp8 = cfg->recipe < PS_N_RECIPES && ps__recipes[cfg->recipe].fp8;
  const ps__fp8 fp8 = {.on = has_fp8 && !cfg->lora.rank,
                       .bf16_first = cfg->fp8_bf16_first,
                       .bf16_last = cfg->fp8_bf16_last,
                       .bf16_down = cfg->fp8_bf16_down != 0,
                       .head = cfg->fp8_head != 0,
                       .fast = cfg->fp8_fast_accumulation != 0};
  PS_TRY(ps__model_create(&m, model, dt, cfg->seq_len,
                          cfg->forward_only ? UINT32_MAX : cfg->n_frozen_layers, &loss, &fp8,
                          &cfg->lora));
  return plan_of(out, m, cfg, hw);
}

static double exchanged_bytes(const ps__step *s) {
  double bytes = 0;
  for (size_t i = 0; i < s->n_op; i++)
    if (s->op[i].stream == s->at->net)
      bytes += s->op[i].work.bytes;
  return bytes;
}

static void fill_report(ps_plan *p, const ps__search_result *r) {
  const ps__step *s = &p->step;
  const ps__layout *l = &p->layout;
  ps_plan_report *o = &p->report;
  o->struct_bytes = sizeof *o;
  o->n_devices = s->at->n_devices;
  o->n_hosts = p->cfg.n_hosts;
  o->layout = p->cfg.layout;
  o->exchange_bytes = exchanged_bytes(s);
  o->n_rounds = l->n_rounds;
  o->chunks_per_round = l->chunks_per_round;
  o->first_round_chunks = l->first_round_chunks;
  o->first_rounds = l->first_rounds;
  o->n_chunks = l->n_chunks;
  o->chunk_tokens = l->chunk_tokens;
  o->tokens_per_step = o->n_hosts * l->n_tokens;
  o->n_sequences = o->n_hosts * l->n_sequences;
  o->head_slice_tokens = p->spec.head_slice;
  o->device_arena_bytes = ps__arena_round(ps__largest_device(s->at, s->space_bytes));
  const uint64_t overhead = ps__device_overhead(&p->hw, p->model->fp8.on, s->at, s->scratch_bytes,
                                                &o->device_scratch_bytes) +
                            ps__net_memory(p);
  o->host_arena_bytes = ps__arena_round(s->space_bytes[s->at->host]);
  o->device_tables_bytes = ps__page_table_bytes(&p->hw, o->host_arena_bytes);
  o->device_overhead_bytes = overhead - o->device_scratch_bytes;
  o->device_used_bytes = o->device_arena_bytes + overhead + o->device_tables_bytes;
  o->host_used_bytes =
      o->host_arena_bytes + ps__host_overhead(p, s, &o->scratch_bytes, &o->trace_bytes);
  o->reserve_bytes = p->cfg.reserve_bytes;
  o->device_mem_bytes = p->cfg.device_mem_bytes;
  o->host_mem_bytes = p->cfg.host_mem_bytes;
  o->n_units = p->spec.n_units;
  for (uint32_t u = 0; u < p->spec.n_units; u++) {
    o->resident_param_units += p->spec.param_resident[u];
    o->resident_grad_units += p->spec.grad_resident[u];
    o->resident_update_units += p->spec.update_resident[u];
    o->streamed_update_units += p->spec.update_streamed[u];
    o->split_update_units += p->spec.update_split[u];
    const uint32_t layer = p->model->unit[u].layer;
    o->units_kept += p->layout.n_rounds > 1 && layer > 0 && layer <= p->spec.blocks_kept &&
                     !p->spec.param_resident[u];
  }
  o->saved_device_bytes = s->saved_bytes[PS_POLICY_DEVICE];
  o->saved_host_bytes = s->saved_bytes[PS_POLICY_HOST] + s->saved_bytes[PS_POLICY_HOST_FIRST_ROUND];
  o->saved_recompute_bytes = s->saved_bytes[PS_POLICY_RECOMPUTE];
  o->h2d_bytes = s->copied_bytes[0];
  o->d2h_bytes = s->copied_bytes[1];
  o->model_flops = s->model_flops;
  o->recompute_flops = s->recompute_flops;
  p->hfu_flops = o->model_flops + o->recompute_flops;
  o->n_ops = ps_schedule_n_ops(p->schedule);
  o->n_waits = ps_schedule_n_waits(p->schedule);
  o->n_candidates = r->n_candidates;
  o->n_feasible = r->n_feasible;
  if (!p->val)
    return;
  o->val_tokens = p->val_sequences * p->cfg.seq_len;
  o->val_step_tokens = p->val->layout.n_tokens;
  o->val_s = (double)p->val_steps * p->val->report.step_s;
}

/* The predicted step time, and how long each stream works in a steady step. */
ps_status ps__plan_predict(ps_plan *p) {
  const uint64_t n = ps_schedule_n_ops(p->schedule);
  double step_ns, busiest = 0;
  ps_trace_event *events = ps__malloc((PS__SIM_STEADY + 1) * n * sizeof *events);
  if (!events)
    return ps__fail(PS_ENOMEM, "out of memory for the predicted trace");
  ps__cost_model m =
      ps__cost_model_of(&p->hw, p->model->fp8.on, p->step.at, p->hw.n_threads, p->spec.sum_threads);
  const ps_status st = ps__step_predict(&p->step, p->schedule, &m, events, &step_ns);
  if (st == PS_OK) {
    p->report.step_s = step_ns * 1e-9;
    for (uint64_t i = PS__SIM_STEADY * n; i < (PS__SIM_STEADY + 1) * n; i++)
      p->report.stream_busy_s[events[i].stream] +=
          (double)(events[i].end_ns - events[i].start_ns) * 1e-9;
    for (uint32_t i = 0; i < p->step.at->n_streams; i++)
      if (p->report.stream_busy_s[i] > busiest) {
        busiest = p->report.stream_busy_s[i];
        p->report.bottleneck_stream = i;
      }
  }
  ps__free(events);
  return st;
}

/* From a decided layout and spec to a plan that can run. */
static ps_status compile_plan(ps_plan *p, const ps__search_result *r) {
  PS_TRY(ps__step_build(&p->step, p->model, &p->layout, &p->spec, &p->hooks));
  ps_program *program = NULL;
  ps_status st = ps__step_program(&p->step, &program);
  if (st == PS_OK)
    st = ps_schedule_compile(&p->schedule, program);
  ps_program_destroy(program);
  if (st == PS_OK)
    p->schedule->of_plan = true;
  if (st == PS_OK)
    st = ps__plan_ramp(p, true);
  if (st == PS_OK && p->cfg.val_tokens)
    st = ps__plan_validation(p, true);
  if (st == PS_OK && p->cfg.sample_sequences)
    st = ps__plan_sampling(p);
  PS_TRY(st);
  fill_report(p, r);
  PS_TRY(ps__plan_sampling_check(p));
  return ps__plan_predict(p);
}

/* Back to a plan without decisions. */
static ps_status undo(ps_plan *p) {
  PS_TRY(ps_schedule_destroy(p->schedule));
  p->schedule = NULL;
  ps__plan_ramp_free(p);
  p->ramp = NULL;
  p->n_ramp = 0;
  (void)ps_plan_destroy(p->val);
  p->val = NULL;
  ps__plan_sampling_free(p);
  ps__step_free(&p->step);
  ps__spec_free(&p->spec);
  ps__layout_free(&p->layout);
  p->report = (ps_plan_report){0};
  return PS_OK;
}

/* Searches where ramp and validation count. @alone: training alone would fit. */
static ps_status plan_with_guests(ps_plan *p, bool alone) {
  ps__search_result r = {0};
  ps__memos m;
  PS_TRY(ps__memos_create(&m)); /* what the other searches know is without guests */
  p->counts_guests = true;
  ps_status st = alone ? ps__find_in_layouts(p, &m, &r) : PS_OK;
  if (st == PS_OK && r.step_ns == 0)
    st = ps__find_smallest_in_layouts(p, &m, &r);
  if (st == PS_OK && r.step_ns > 0) {
    st = compile_plan(p, &r);
    if (st == PS_OK)
      st = ps__plan_beside_check(p);
  } else if (st == PS_OK) {
    st = alone ? ps__plan_refuse_guests(p, &r) : ps__plan_refuse(p, &m, &r);
  }
  ps__memos_destroy(&m);
  return st;
}

/* The fastest plan that fits; with ramp or validation the same, where it holds them. */
static ps_status make_plan(ps_plan *p, const ps__memos *m) {
  ps__search_result r;
  const uint32_t given = p->cfg.layout;
  PS_TRY(ps__find_in_layouts(p, m, &r));
  const bool alone = r.step_ns > 0;
  if (alone) {
    PS_TRY(compile_plan(p, &r));
    if (ps__plan_beside_check(p) == PS_OK)
      return PS_OK;
    PS_TRY(undo(p));
  }
  p->cfg.layout = given;
  if (ps__plan_has_guests(p))
    return plan_with_guests(p, alone);
  PS_TRY(ps__find_smallest_in_layouts(p, m, &r));
  return r.step_ns > 0 ? compile_plan(p, &r) : ps__plan_refuse(p, m, &r);
}

/* ---- evaluations that plans share ------------------------------------------------------------ */

struct ps_evaluations {
  ps__memos memo;
  bool used; /* the rest is set */
  ps_model_config model;
  ps_plan_config cfg; /* but for the caps */
  ps_hardware hw;
};

ps_status ps_evaluations_create(ps_evaluations **out) {
  if (!out)
    return ps__fail(PS_EINVAL, "ps_evaluations_create: out is NULL");
  ps_evaluations *e = ps__calloc(1, sizeof *e);
  if (!e)
    return ps__fail(PS_ENOMEM, "out of memory for shared evaluations");
  const ps_status st = ps__memos_create(&e->memo);
  if (st == PS_OK)
    *out = e;
  else
    ps__free(e);
  return st;
}

void ps_evaluations_destroy(ps_evaluations *e) {
  if (!e)
    return;
  ps__memos_destroy(&e->memo);
  ps__free(e);
}

/* PS_EINVAL where @p is of another model, batch or machine than the plans before. */
static ps_status share(ps_evaluations *e, const ps_plan *p) {
  ps_plan_config cfg = p->cfg;
  cfg.device_mem_bytes = cfg.host_mem_bytes = 0;
  cfg.progress = NULL;
  cfg.progress_user = NULL;
  if (!e->used) {
    e->model = p->model->cfg;
    e->cfg = cfg;
    e->hw = p->hw;
    e->used = true;
  }
  if (memcmp(&e->model, &p->model->cfg, sizeof e->model) || memcmp(&e->cfg, &cfg, sizeof cfg) ||
      memcmp(&e->hw, &p->hw, sizeof e->hw))
    return ps__fail(PS_EINVAL,
                    "plan: the shared evaluations are of another model, configuration or machine: "
                    "only the caps may differ");
  return PS_OK;
}

/* The rest of making a plan, which is destroyed on an error. */
static ps_status finish_plan(ps_plan **out, ps_plan *p, ps_evaluations *shared) {
  ps_status st = share(shared, p);
  if (st == PS_OK)
    st = make_plan(p, &shared->memo);
  p->cfg.ramp = NULL; /* the caller's */
  if (st != PS_OK)
    ps_plan_destroy(p);
  else
    *out = p;
  return st;
}

ps_status ps_plan_create_sharing(ps_plan **out, ps_evaluations *shared,
                                 const ps_model_config *model, const ps_plan_config *cfg,
                                 const ps_hardware *hw) {
  ps_plan *p = NULL;
  if (!out || !shared)
    return ps__fail(PS_EINVAL, "ps_plan_create: out and the shared evaluations must be given");
  PS_TRY(ps__plan_new(&p, model, cfg, hw));
  return finish_plan(out, p, shared);
}

ps_status ps__plan_of_model(ps_plan **out, ps_model *m, const ps_plan_config *cfg,
                            const ps_hardware *hw) {
  ps_evaluations *own = NULL;
  ps_plan *p = NULL;
  ps_status st = plan_of(&p, m, cfg, hw);
  if (st == PS_OK)
    st = ps_evaluations_create(&own);
  if (st == PS_OK)
    st = finish_plan(out, p, own);
  else
    (void)ps_plan_destroy(p);
  ps_evaluations_destroy(own);
  return st;
}

ps_status ps_plan_create(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                         const ps_hardware *hw) {
  ps_evaluations *own = NULL;
  PS_TRY(ps_evaluations_create(&own));
  const ps_status st = ps_plan_create_sharing(out, own, model, cfg, hw);
  ps_evaluations_destroy(own);
  return st;
}

ps_status ps__plan_from_spec(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                             const ps_hardware *hw, const ps__spec *spec) {
  ps_plan *p = NULL;
  const ps__search_result r = {0};
  PS_TRY(ps__plan_new(&p, model, cfg, hw));
  ps_status st = ps__layout_init(
      &p->layout, p->cfg.seq_len, p->cfg.tokens_per_step / p->cfg.seq_len, spec->chunk_tokens,
      spec->chunks_per_round, spec->first_round_chunks, spec->first_rounds);
  p->cfg.n_devices = spec->n_devices;
  p->cfg.layout = spec->ring_blocks ? PS_LAYOUT_RING : PS_LAYOUT_DATA_PARALLEL;
  p->at = ps__places_of(spec->n_devices, p->cfg.n_hosts);
  if (st == PS_OK)
    st = ps__spec_copy(&p->spec, spec);
  if (st == PS_OK)
    st = compile_plan(p, &r);
  p->cfg.ramp = NULL; /* the caller's */
  if (st != PS_OK)
    ps_plan_destroy(p);
  else
    *out = p;
  return st;
}

ps_status ps_plan_destroy(ps_plan *p) {
  if (!p)
    return PS_OK;
  if (atomic_load(&p->in_use))
    return ps__fail(PS_EBUSY, "plan: a trainer still uses it: destroy the trainer first");
  PS_TRY(ps_schedule_destroy(p->schedule));
  ps__plan_ramp_free(p);
  (void)ps_plan_destroy(p->val);
  ps__plan_sampling_free(p);
  ps__step_free(&p->step);
  ps__spec_free(&p->spec);
  ps__layout_free(&p->layout);
  ps_model_destroy(p->model);
  ps__free(p->text);
  ps__free(p->json);
  ps__free(p);
  return PS_OK;
}

ps_status ps_plan_get_report(const ps_plan *plan, ps_plan_report *out) {
  if (!plan || !out)
    return ps__fail(PS_EINVAL, "ps_plan_get_report: plan and out must be given");
  *out = plan->report;
  return PS_OK;
}

ps_status ps_plan_smallest(const ps_model_config *model, const ps_plan_config *cfg,
                           const ps_hardware *hw, uint64_t *device_mem_bytes,
                           uint64_t *host_mem_bytes) {
  if (!device_mem_bytes || !host_mem_bytes)
    return ps__fail(PS_EINVAL,
                    "ps_plan_smallest: device_mem_bytes and host_mem_bytes must be given");
  if (cfg && cfg->sample_sequences)
    return ps__fail(PS_EINVAL, "the smallest caps are those of training alone: leave samples out");
  ps_plan *p = NULL;
  ps__search_result r;
  ps__memos m = {0};
  PS_TRY(ps__plan_new(&p, model, cfg, hw));
  p->counts_guests = ps__plan_has_guests(p);
  ps_status st = ps__memos_create(&m);
  if (st == PS_OK)
    st = ps__find_smallest_in_layouts(p, &m, &r);
  if (st == PS_OK && !r.smallest[PS__HOST_MEM] && p->hw.host_memory_bytes)
    st = ps__plan_least_host(p, &m, &r.smallest[PS__HOST_MEM]);
  ps__memos_destroy(&m);
  ps_plan_destroy(p);
  if (st != PS_OK)
    return st;
  *device_mem_bytes = r.smallest[PS__DEVICE_MEM];
  *host_mem_bytes = r.smallest[PS__HOST_MEM];
  return PS_OK;
}

const ps_model *ps_plan_model(const ps_plan *plan) { return plan ? plan->model : NULL; }

ps_schedule *ps_plan_schedule(ps_plan *plan) { return plan ? plan->schedule : NULL; }

ps_status ps_plan_simulate(const ps_plan *plan, uint64_t n_steps, ps_trace_event *events,
                           double *step_end_ns) {
  if (!plan)
    return ps__fail(PS_EINVAL, "ps_plan_simulate: plan is NULL");
  ps__cost_model m = ps__cost_model_of(&plan->hw, plan->model->fp8.on, plan->step.at,
                                       plan->hw.n_threads, plan->spec.sum_threads);
  return ps_sim_run(plan->schedule, ps__cost, &m, n_steps, events, step_end_ns);
}
