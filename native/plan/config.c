/* config.c - a plan without decisions: the defaults of its configuration, and what it may not
 * be. */
#include "hardware/hardware_impl.h"
#include "hosts/hosts.h"
#include "hosts/net.h"
#include "plan/plan_impl.h"
#include <math.h>
#include <string.h>

void ps_plan_config_init(ps_plan_config *c) {
  memset(c, 0, sizeof *c);
  c->struct_bytes = sizeof *c;
  c->recipe = c->fp8_bf16_first = c->fp8_bf16_last = PS_DEFAULT;
  c->lora.alpha = NAN;
  c->clip_norm = 1;
  c->router_aux_loss = NAN;
  c->document_token = c->document_end_token = -1;
  c->trace_steps = 2;
}

void ps_plan_config_resolve(ps_plan_config *c) {
  if (c->recipe == PS_DEFAULT)
    c->recipe = c->lora.rank ? PS_RECIPE_FP32_MASTER : PS_RECIPE_BF16;
  const uint32_t ends = c->recipe < PS_N_RECIPES && ps__recipes[c->recipe].fp8 ? 1 : 0;
  if (c->fp8_bf16_first == PS_DEFAULT)
    c->fp8_bf16_first = ends;
  if (c->fp8_bf16_last == PS_DEFAULT)
    c->fp8_bf16_last = ends;
  if (isnan(c->lora.alpha))
    c->lora.alpha = 2.0 * c->lora.rank;
  if (c->lora.rank && !c->lora.targets)
    c->lora.targets = PS_LORA_ALL;
}

/* Tokens whose logits take about 32 MiB, on a GPU 512 MiB: a power of two of at least 64. It
 * follows from the vocabulary or the labels, never from a cap. A slice reads the lm_head twice and
 * its gradient's sum once, so on a GPU it must have a few hundred FLOP for each byte of them. */
static uint64_t default_head_slice(const ps_model_config *m, ps_dtype dt, uint32_t backend) {
  const uint64_t bytes = backend == PS_BACKEND_CUDA ? 512u << 20 : 32u << 20;
  uint64_t rows = 64;
  while (rows < 4096 && rows * 2 * ps__head_columns(m) * ps_dtype_bytes(dt) <= bytes)
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

/* Fields that are a switch. */
static ps_status check_switches(const ps_plan_config *c) {
  const struct {
    const char *name;
    uint32_t value;
  } field[] = {{"fp8_bf16_down", c->fp8_bf16_down},
               {"fp8_head", c->fp8_head},
               {"fp8_fast_accumulation", c->fp8_fast_accumulation},
               {"forward_only", c->forward_only}};
  for (size_t i = 0; i < sizeof field / sizeof *field; i++)
    if (field[i].value > 1)
      return ps__fail(PS_EINVAL, "%s is %u: 0 or 1 is needed", field[i].name, field[i].value);
  return PS_OK;
}

/* Rows and columns of the products of FP8 operands. */
static ps_status check_fp8_sizes(const ps_plan_config *c, const ps_model_config *m) {
  const struct {
    const char *name;
    uint64_t value;
    bool given; /* by the caller, who may give another */
  } sixteens[] = {
      {"hidden_size", m->dim, false},
      {"intermediate_size", m->ffn_dim, false},
      {"query heads times head_dim", (uint64_t)m->n_heads * m->head_dim, false},
      {"query, key and value heads times head_dim",
       ((uint64_t)m->n_heads + 2 * (uint64_t)m->n_kv_heads) * m->head_dim, false},
      {"query heads times global_head_dim", (uint64_t)m->n_heads * m->global_head_dim, false},
      {"query, key and value heads times global_head_dim",
       ((uint64_t)m->n_heads + (2 - m->shared_keys) * (uint64_t)m->global_kv_heads) *
           m->global_head_dim,
       false},
      {"linear_num_value_heads times linear_value_head_dim",
       (uint64_t)m->linear_value_heads * m->linear_value_dim, false},
      {"twice linear_num_key_heads times linear_key_head_dim",
       2 * (uint64_t)m->linear_key_heads * m->linear_key_dim, false},
      {"q_lora_rank", m->q_rank, false},
      {"kv_lora_rank", m->kv_rank, false},
      {"qk_rope_head_dim", m->kv_rank ? m->rope.rotary_dim : 0, false},
      {"query heads times v_head_dim", (uint64_t)m->n_heads * m->value_dim, false},
      {ps__field("seq_len"), c->seq_len, true},
      {ps__field("chunk_tokens"), c->chunk_tokens, true}};
  for (size_t i = 0; i < sizeof sixteens / sizeof *sixteens; i++)
    if (sixteens[i].value % 16)
      return ps__fail(PS_EINVAL,
                      "%s is %llu, no multiple of 16, which products of FP8 operands need: give "
                      "%s%s %s",
                      sixteens[i].name, (unsigned long long)sixteens[i].value,
                      sixteens[i].given ? "a multiple of 16, or " : "", ps__field("recipe"),
                      ps__recipes[ps__recipes[c->recipe].arrays].name);
  return PS_OK;
}

/* What FP8 asks of the model, the batch and the GPU. */
static ps_status check_fp8(const ps_plan *p, const ps_model_config *m) {
  const ps_plan_config *c = &p->cfg;
  const char *const recipe = ps__recipes[c->recipe].name;
  if (!ps__recipes[c->recipe].fp8)
    return c->fp8_bf16_first || c->fp8_bf16_last || c->fp8_bf16_down || c->fp8_head ||
                   c->fp8_fast_accumulation
               ? ps__fail(PS_EINVAL,
                          "%s says what FP8 computes and how, but the recipe %s "
                          "has no FP8: give %s fp8 or fp8-master, or leave it out",
                          ps__field("fp8_*"), recipe, ps__field("recipe"))
               : PS_OK;
  if (c->fp8_head && (m->vocab_size % 16 || c->head_slice_tokens % 16))
    return ps__fail(PS_EINVAL,
                    "%s is %llu, no multiple of 16, which the head's products of FP8 operands "
                    "need: %s%s",
                    m->vocab_size % 16 ? "vocab_size" : ps__field("head_slice_tokens"),
                    (unsigned long long)(m->vocab_size % 16 ? m->vocab_size : c->head_slice_tokens),
                    m->vocab_size % 16 ? "leave out " : "give a multiple of 16",
                    m->vocab_size % 16 ? ps__field("fp8_head") : "");
  PS_TRY(check_fp8_sizes(c, m));
  if ((uint64_t)c->fp8_bf16_first + c->fp8_bf16_last >= m->n_layers)
    return ps__fail(PS_EINVAL,
                    "the first %u and the last %u blocks stay in bf16, and the model has %u: none "
                    "would compute in FP8; lower %s or %s",
                    c->fp8_bf16_first, c->fp8_bf16_last, m->n_layers, ps__field("fp8_bf16_first"),
                    ps__field("fp8_bf16_last"));
  if (p->hw.backend == PS_BACKEND_CUDA && p->hw.compute_capability < 89)
    return ps__fail(
        PS_EINVAL,
        "%s has compute capability %u.%u, and FP8 needs 8.9 (RTX 40, H100) or more: give "
        "%s %s",
        p->hw.device_name, p->hw.compute_capability / 10, p->hw.compute_capability % 10,
        ps__field("recipe"), ps__recipes[ps__recipes[c->recipe].arrays].name);
  return PS_OK;
}

static bool link_known(const ps_hardware *hw, ps_link_kind kind, uint32_t from, uint32_t to) {
  const ps_link_rate *r = &hw->link[kind];
  return r->from == from && r->to == to && r->bytes_per_s > 0 && r->duplex_bytes_per_s > 0;
}

/* Hosts, devices, and how these share a step. */
static ps_status check_places(ps_plan *p, const ps_model_config *m) {
  ps_plan_config *c = &p->cfg;
  if (c->n_devices == 0)
    c->n_devices = 1;
  if (c->hosts) {
    c->n_hosts = c->hosts->n;
    c->transport = ps__hosts_wants_net(c->hosts) ? PS_TRANSPORT_NCCL : PS_TRANSPORT_TCP;
  }
  if (c->n_hosts == 0)
    c->n_hosts = 1;
  p->disk_first = UINT32_MAX;
  if (c->forward_only || c->disk_mem_bytes == 0)
    c->disk_mem_bytes = 0, c->disk_tbw = 0;
  p->at = ps__places_with(c->n_devices, c->n_hosts, c->disk_mem_bytes > 0);
  if (!(c->disk_tbw >= 0))
    return ps__fail(PS_EINVAL, "%s is %g: give the TB that the drives are rated for",
                    ps__field("disk_tbw"), c->disk_tbw);
  if (c->transport >= PS_N_TRANSPORTS)
    return ps__fail(PS_EINVAL, "transport %u is unknown: 0 is auto, 1 NCCL, 2 TCP", c->transport);
  if (c->layout >= PS_N_LAYOUTS)
    return ps__fail(PS_EINVAL, "layout %u is unknown: 0 is auto, 1 is data-parallel, 2 is ring",
                    c->layout);
  if (c->layout == PS_LAYOUT_AUTO &&
      (c->n_devices == 1 || m->n_layers < c->n_devices || ps__has_carried(m)))
    c->layout = PS_LAYOUT_DATA_PARALLEL;
  if (c->layout == PS_LAYOUT_RING && c->n_devices == 1)
    return ps__fail(PS_EINVAL,
                    "%s ring deals layers to several GPUs, and %s is 1: raise "
                    "%s, or leave %s out",
                    ps__field("layout"), ps__field("n_devices"), ps__field("n_devices"),
                    ps__field("layout"));
  if (c->layout == PS_LAYOUT_RING && ps__has_carried(m))
    return ps__fail(PS_EINVAL,
                    "%s ring deals layers to several GPUs, and layers of this model read what "
                    "others have made (num_kv_shared_layers, hidden_size_per_layer_input): leave "
                    "%s out",
                    ps__field("layout"), ps__field("layout"));
  if (c->layout == PS_LAYOUT_RING && m->n_layers < c->n_devices)
    return ps__fail(PS_EINVAL,
                    "%s ring: %u blocks cannot be dealt to %u GPUs: lower %s, or leave "
                    "%s out",
                    ps__field("layout"), m->n_layers, c->n_devices, ps__field("n_devices"),
                    ps__field("layout"));
  return PS_OK;
}

static ps_status check_documents(const ps_plan_config *c, uint32_t vocab_size) {
  const int32_t begins = c->document_token, ends = c->document_end_token,
                larger = begins > ends ? begins : ends;
  if (begins >= 0 && ends >= 0)
    return ps__fail(PS_EINVAL,
                    "%s %d and %s %d exclude each other: give the "
                    "first if the token begins documents, the second if it ends them",
                    ps__field("document_token"), begins, ps__field("document_end_token"), ends);
  if (larger >= 0 && (uint32_t)larger >= vocab_size)
    return ps__fail(PS_EINVAL,
                    "%s %d is past the model's vocabulary of %u: give the id that its "
                    "tokenizer has for it",
                    ps__field(begins >= 0 ? "document_token" : "document_end_token"), larger,
                    vocab_size);
  if (larger >= 0 && c->one_document)
    return ps__fail(PS_EINVAL,
                    "one_document says that a sequence is one document, and document token %d that "
                    "it has several: leave one of the two out",
                    larger);
  return PS_OK;
}

/* The loss, what is trained, and the clipping. */
static ps_status check_training(ps_plan_config *c, const ps_model_config *m) {
  if (c->optimizer >= PS_N_OPTIMIZERS)
    return ps__fail(PS_EINVAL, "optimizer %u is unknown: use " PS__OPTIMIZER_NAMES, c->optimizer);
  if (c->non_finite > PS_NON_FINITE_SKIP)
    return ps__fail(PS_EINVAL, "non_finite is %u: ps_non_finite ends at %d", c->non_finite,
                    PS_NON_FINITE_SKIP);
  if (!(c->clip_norm >= 0))
    return ps__fail(PS_EINVAL, "clip_norm %g must not be negative; 0 means no clipping",
                    c->clip_norm);
  if (c->clip_by > PS_CLIP_BY_PREVIOUS)
    return ps__fail(PS_EINVAL, "clip_by is %u: ps_clip_by ends at %d", c->clip_by,
                    PS_CLIP_BY_PREVIOUS);
  if (c->clip_by == PS_CLIP_BY_PREVIOUS && !(c->clip_norm > 0) && !c->forward_only)
    return ps__fail(PS_EINVAL, "%s previous clips to %s, which is 0: raise it, or leave %s out",
                    ps__field("clip_by"), ps__field("clip_norm"), ps__field("clip_by"));
  if (c->clip_by == PS_CLIP_BY_PREVIOUS && c->non_finite == PS_NON_FINITE_SKIP)
    return ps__fail(PS_EINVAL,
                    "%s previous updates units before the whole norm is known, and %s skip needs "
                    "it: leave one of the two out",
                    ps__field("clip_by"), ps__field("non_finite"));
  if (!(c->z_loss >= 0 && c->z_loss <= PS_MAX_Z_LOSS))
    return ps__fail(PS_EINVAL, "%s %g: give a number from 0 to %g", ps__field("z_loss"), c->z_loss,
                    PS_MAX_Z_LOSS);
  if (!(c->label_smoothing >= 0 && c->label_smoothing < 1))
    return ps__fail(PS_EINVAL, "%s %g: give a number from 0 to below 1",
                    ps__field("label_smoothing"), c->label_smoothing);
  if (c->router_aux_loss < 0 || c->router_aux_loss > PS_MAX_ROUTER_LOSS)
    return ps__fail(PS_EINVAL, "%s %g: give a number from 0 to %g", ps__field("router_aux_loss"),
                    c->router_aux_loss, PS_MAX_ROUTER_LOSS);
  if (!(c->router_z_loss >= 0 && c->router_z_loss <= PS_MAX_ROUTER_LOSS))
    return ps__fail(PS_EINVAL, "%s %g: give a number from 0 to %g", ps__field("router_z_loss"),
                    c->router_z_loss, PS_MAX_ROUTER_LOSS);
  if ((c->router_aux_loss > 0 || c->router_z_loss > 0) && !m->n_experts)
    return ps__fail(PS_EINVAL, "%s is %g and %s %g, and the model has no experts: leave both out",
                    ps__field("router_aux_loss"), c->router_aux_loss, ps__field("router_z_loss"),
                    c->router_z_loss);
  if (c->forward_only && (c->router_aux_loss > 0 || c->router_z_loss > 0))
    return ps__fail(PS_EINVAL, "%s is %g and %s %g: a plan that trains nothing has neither",
                    ps__field("router_aux_loss"), c->router_aux_loss, ps__field("router_z_loss"),
                    c->router_z_loss);
  if (c->lora.rank && c->n_frozen_layers)
    return ps__fail(PS_EINVAL,
                    "%u layers would be frozen, but with LoRA all of the model is: give either "
                    "frozen layers or a LoRA rank",
                    c->n_frozen_layers);
  if (!c->forward_only)
    return m->dropout > 0
               ? ps__fail(PS_EINVAL,
                          "the model's config.json has a dropout of %g (attention_dropout, "
                          "resid_pdrop or embd_pdrop): training has no dropout, set it to 0",
                          (double)m->dropout)
               : PS_OK;
  if (c->z_loss > 0 || c->label_smoothing > 0)
    return ps__fail(PS_EINVAL,
                    "z_loss is %g and label_smoothing %g: a plan that trains nothing "
                    "has neither",
                    c->z_loss, c->label_smoothing);
  if (c->val_tokens)
    return ps__fail(PS_EINVAL, "val_tokens is %llu: a plan that trains nothing has no validation",
                    (unsigned long long)c->val_tokens);
  c->clip_norm = 0;
  c->clip_by = PS_CLIP_BY_STEP;
  c->non_finite = PS_NON_FINITE_STOP;
  return PS_OK;
}

/* What a head that is no language model's goes together with. */
static ps_status check_head(const ps_plan_config *c, const ps_model_config *m) {
  const char *const problem = ps_problem_name(m->problem);
  const struct {
    const char *name;
    bool given;
  } of_language[] = {{ps__field("fp8_head"), c->fp8_head != 0},
                     {ps__field("z_loss"), c->z_loss > 0},
                     {ps__field("label_smoothing"), c->label_smoothing > 0},
                     {ps__field("sample_sequences"), c->sample_sequences > 0}};
  if (!m->problem)
    return PS_OK;
  for (size_t i = 0; i < sizeof of_language / sizeof *of_language; i++)
    if (of_language[i].given)
      return ps__fail(PS_EINVAL,
                      "%s is for language models, and this model's head is for %s: "
                      "leave it out",
                      of_language[i].name, problem);
  if (m->problem == PS_PROBLEM_EMBEDDING && !c->forward_only)
    return ps__fail(PS_EINVAL, "a model for embeddings is not trained: plan with forward_only");
  if (m->problem == PS_PROBLEM_PAIRS && c->chunk_tokens && c->chunk_tokens < c->seq_len)
    return ps__fail(
        PS_EINVAL,
        "%s %llu cuts sequences of %llu tokens, and both documents of a pair must be in "
        "one chunk: give a multiple of %s",
        ps__field("chunk_tokens"), (unsigned long long)c->chunk_tokens,
        (unsigned long long)c->seq_len, ps__field("seq_len"));
  return PS_OK;
}

/* Sequences, and how a step is cut. */
static ps_status check_batch(ps_plan_config *c, const ps_model_config *m) {
  if (c->seq_len == 0)
    return ps__fail(PS_EINVAL, "the sequence length is 0: it must be at least 1 token");
  if (m->max_positions && c->seq_len > m->max_positions)
    return ps__fail(PS_EINVAL,
                    "sequences of %llu tokens are longer than the model's max_position_embeddings "
                    "%u: lower %s, or raise that in config.json",
                    (unsigned long long)c->seq_len, m->max_positions, ps__field("seq_len"));
  if (c->tokens_per_step == 0)
    c->tokens_per_step = 8 * c->seq_len;
  if (c->logits_fn && c->tokens_per_step > UINT32_MAX)
    return ps__fail(PS_EINVAL, "tokens per step are %llu: with logits_fn at most %u are possible",
                    (unsigned long long)c->tokens_per_step, UINT32_MAX);
  if (c->tokens_per_step < c->seq_len)
    return ps__fail(PS_EINVAL,
                    "%llu tokens per step are less than one sequence of %llu tokens: raise "
                    "%s",
                    (unsigned long long)c->tokens_per_step, (unsigned long long)c->seq_len,
                    ps__field("tokens_per_step"));
  if (c->tokens_per_step / c->seq_len < c->n_hosts)
    return ps__fail(PS_EINVAL,
                    "tokens per step %llu are %llu sequences of %llu tokens, for %u hosts: raise "
                    "%s, as each host needs one at least",
                    (unsigned long long)c->tokens_per_step,
                    (unsigned long long)(c->tokens_per_step / c->seq_len),
                    (unsigned long long)c->seq_len, c->n_hosts, ps__field("tokens_per_step"));
  c->tokens_per_step = c->tokens_per_step / c->seq_len / c->n_hosts * c->seq_len; /* a host's */
  /* without a ring each device takes whole sequences */
  if (c->layout == PS_LAYOUT_AUTO && c->tokens_per_step / c->seq_len < c->n_devices)
    c->layout = PS_LAYOUT_RING;
  if (c->chunk_tokens >= c->seq_len && c->chunk_tokens % c->seq_len)
    return ps__fail(PS_EINVAL,
                    "%s %llu: give a multiple of the %llu tokens of a sequence, or "
                    "fewer than these",
                    ps__field("chunk_tokens"), (unsigned long long)c->chunk_tokens,
                    (unsigned long long)c->seq_len);
  return PS_OK;
}

/* Updates of state in 8 bits take more arithmetic than memory: ns of AdamW's element, by part, on a
 * thread with AVX-512 (bench/log/2026-11-28-8-bit-state.md); where the whole update was measured,
 * which is of fp32 on a CPU and of bf16 beside a GPU, as much more or less. */
static void limit_updates(ps_hardware *hw, const ps_plan_config *c) {
  static const double ns[PS_N_UPDATE_PARTS] = {1.6, 0.8, 1.2};
  const uint32_t row =
      ps__row_of(hw->backend == PS_BACKEND_CPU ? PS_RECIPE_FP32 : PS_RECIPE_BF16, 8);
  const double rate_8_bits = hw->optimizer_8_bits_bytes_per_s,
               measured_ns = rate_8_bits > 0
                                 ? 1e9 *
                                       ps__update_bytes(PS_OPTIMIZER_ADAMW, row, PS_UPDATE_WHOLE) /
                                       rate_8_bits
                                 : 0,
               by = measured_ns > 0 ? measured_ns / ns[PS_UPDATE_WHOLE] : 1.0 / hw->n_threads;
  double *const rate[PS_N_UPDATE_PARTS] = {&hw->optimizer_bytes_per_s,
                                           &hw->optimizer_weights_bytes_per_s,
                                           &hw->optimizer_state_bytes_per_s};
  const ps_optimizer optimizer = (ps_optimizer)c->optimizer;
  for (int part = 0; part < PS_N_UPDATE_PARTS; part++) {
    const double bytes = ps__update_bytes(optimizer, ps__plan_row(c), (ps__update_part)part),
                 each = by * ns[part] * ps__optimizers[optimizer].n_states / PS_MAX_STATES,
                 most = 1e9 * bytes / each;
    if (*rate[part] > most)
      *rate[part] = most;
  }
}

/* All that needs no model but its configuration @m: a model is only made of what may be one. Fills
 * in defaults. */
static ps_status check_config(ps_plan *p, const ps_model_config *m) {
  ps_plan_config *c = &p->cfg;
  ps_plan_config_resolve(c);
  PS_TRY(check_ranges(c));
  PS_TRY(check_switches(c));
  if (c->recipe >= PS_N_RECIPES)
    return ps__fail(PS_EINVAL, "recipe %u is unknown: use " PS__RECIPE_NAMES, c->recipe);
  if (c->state_bits != 0 && c->state_bits != 8)
    return ps__fail(PS_EINVAL, "%s is %u: give 8, or leave it out, and the recipe says it",
                    ps__field("state_bits"), c->state_bits);
  PS_TRY(check_places(p, m));
  PS_TRY(check_head(c, m));
  PS_TRY(check_fp8(p, m));
  PS_TRY(check_documents(c, m->vocab_size));
  PS_TRY(check_training(c, m));
  PS_TRY(check_batch(c, m));
  const ps_hardware *hw = &p->hw;
  const ps_dtype dt = (ps_dtype)ps__recipes[c->recipe].weights.dtype;
  if (!(hw->gemm_flops_per_s[dt] > 0) || !(hw->attention_flops_per_s[dt] > 0) ||
      !(hw->attention_bwd_flops_per_s[dt] > 0) || !(hw->elementwise_bytes_per_s > 0) ||
      !link_known(hw, PS_LINK_H2D, PS_PLACE_HOST, PS_PLACE_DEVICE) ||
      !link_known(hw, PS_LINK_D2H, PS_PLACE_DEVICE, PS_PLACE_HOST) ||
      !(hw->optimizer_bytes_per_s > 0) || hw->n_threads == 0 || hw->n_cpus == 0)
    return ps__fail(PS_EINVAL, "the hardware description lacks a rate: fill it by "
                               "ps_hardware_measure() or ps_hardware_estimate()");
  if (c->n_threads)
    p->hw.n_threads = c->n_threads;
  if (c->state_bits == 8)
    limit_updates(&p->hw, c);
  p->head_slice_given = c->head_slice_tokens != 0;
  if (!p->head_slice_given)
    c->head_slice_tokens = default_head_slice(m, dt, hw->backend);
  if (c->reserve_bytes == 0)
    c->reserve_bytes = ps__host_reserve(&p->hw);
  return PS_OK;
}

/* A plan without a model. */
static ps_status begin(ps_plan **out, const ps_model_config *m, const ps_plan_config *cfg,
                       const ps_hardware *hw) {
  ps_plan *p = ps__calloc(1, sizeof *p);
  if (!p)
    return ps__fail(PS_ENOMEM, "out of memory for a plan");
  p->cfg = *cfg;
  p->hw = *hw;
  p->asked = (ps__asked_cut){cfg->chunk_tokens, cfg->chunks_per_round, cfg->first_round_chunks,
                             cfg->first_rounds, cfg->head_slice_tokens};
  ps__hardware_complete(&p->hw);
  const ps_status st = check_config(p, m);
  if (st == PS_OK)
    *out = p;
  else
    ps__free(p);
  return st;
}

ps_status ps__plan_new_of(ps_plan **out, ps_model *m, const ps_plan_config *cfg,
                          const ps_hardware *hw) {
  ps_plan *p;
  const ps_status st = begin(&p, &m->cfg, cfg, hw);
  if (st == PS_OK) {
    p->model = m;
    *out = p;
  } else {
    ps_model_destroy(m);
  }
  return st;
}

ps_status ps__plan_model(ps_model **out, const ps_model_config *model, const ps_plan_config *cfg) {
  const double own = cfg->lora.rank || cfg->forward_only ? 0 : (double)model->router_aux_loss;
  const ps__loss_terms loss = {
      .z_loss = (float)cfg->z_loss,
      .label_smoothing = (float)cfg->label_smoothing,
      .router_aux = (float)(isnan(cfg->router_aux_loss) ? own : cfg->router_aux_loss),
      .router_z = (float)cfg->router_z_loss};
  const ps__fp8 fp8 = {.on = ps__recipes[cfg->recipe].fp8,
                       .bf16_first = cfg->fp8_bf16_first,
                       .bf16_last = cfg->fp8_bf16_last,
                       .bf16_down = cfg->fp8_bf16_down != 0,
                       .head = cfg->fp8_head != 0,
                       .fast = cfg->fp8_fast_accumulation != 0};
  return ps__model_create(out, model, (ps_dtype)ps__recipes[cfg->recipe].weights.dtype,
                          cfg->seq_len, cfg->forward_only ? UINT32_MAX : cfg->n_frozen_layers,
                          &loss, &fp8, &cfg->lora);
}

/* A block of state in 8 bits is of one parameter, so that it has one update. */
static ps_status check_blocks(const ps_plan *p) {
  const ps_model *m = p->model;
  for (uint32_t i = 0; p->cfg.state_bits == 8 && i < m->n_params; i++)
    if (!m->unit[m->param[i].unit].frozen && m->param[i].offset % PS__STATE_BLOCK)
      return ps__fail(PS_EINVAL,
                      "%s begins at element %llu of its unit, and with %s 8 parameters begin at "
                      "multiples of %d: leave %s out",
                      m->param[i].name, (unsigned long long)m->param[i].offset,
                      ps__field("state_bits"), PS__STATE_BLOCK, ps__field("state_bits"));
  return PS_OK;
}

ps_status ps__plan_new(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                       const ps_hardware *hw) {
  ps_plan *p;
  if (!model || !cfg || !hw || model->struct_bytes != sizeof *model ||
      cfg->struct_bytes != sizeof *cfg || hw->struct_bytes != sizeof *hw)
    return ps__fail(PS_EINVAL,
                    "ps_plan_create: model, cfg and hw must be given, each with struct_bytes set");
  if (hw->backend >= PS_N_BACKENDS)
    return ps__fail(PS_EINVAL,
                    "ps_hardware.backend is %u: PS_BACKEND_CPU (0) or PS_BACKEND_CUDA (1)",
                    hw->backend);
  PS_TRY(ps_model_config_check(model, "model"));
  PS_TRY(begin(&p, model, cfg, hw));
  ps_status st = ps__plan_model(&p->model, model, &p->cfg);
  if (st == PS_OK && !p->cfg.forward_only && p->model->n_trained == 0)
    st = ps__fail(PS_EINVAL,
                  "%u layers would be frozen, but the model has %u with embedding and head: "
                  "one at least must be trained",
                  p->cfg.n_frozen_layers, p->model->n_layers);
  if (st == PS_OK && !p->cfg.forward_only)
    st = check_blocks(p);
  if (st == PS_OK)
    *out = p;
  else
    ps_plan_destroy(p);
  return st;
}

ps_status ps_plan_destroy(ps_plan *p) {
  if (!p)
    return PS_OK;
  if (atomic_load(&p->in_use))
    return ps__fail(PS_EBUSY, "plan: a trainer still uses it: destroy the trainer first");
  PS_TRY(ps_schedule_destroy(p->schedule));
  ps__guests_free(&p->guests);
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
