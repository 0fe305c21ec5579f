/* settings.c - what a checkpoint's manifest says of its run, in the manifest's order. */
#include "train/resume.h"
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

const char *const ps__state_names[PS_N_OPTIMIZERS][PS_MAX_STATES] = {
    [PS_OPTIMIZER_ADAMW] = {"exp_avg", "exp_avg_sq"},
    [PS_OPTIMIZER_LION] = {"exp_avg"},
    [PS_OPTIMIZER_SGD] = {"momentum_buffer"},
};
_Static_assert(PS_N_OPTIMIZERS == 3, "a new optimizer: name its states above, else no checkpoint");

/* ---- values in words ------------------------------------------------------------------------- */

static void say_word(char *out, size_t bytes, const char *const *words, uint32_t n, uint32_t i) {
  if (i < n)
    snprintf(out, bytes, "%s", words[i]);
  else
    snprintf(out, bytes, "%u", i);
}

static void say_schedule(char *out, size_t bytes, uint32_t value) {
  static const char *const words[] = {[PS_LR_KIND_CONSTANT] = "constant",
                                      [PS_LR_KIND_COSINE] = "cosine",
                                      [PS_LR_KIND_LINEAR] = "linear",
                                      [PS_LR_KIND_WSD] = "wsd"};
  say_word(out, bytes, words, sizeof words / sizeof *words, value);
}

static void say_clip_by(char *out, size_t bytes, uint32_t value) {
  static const char *const words[] = {
      [PS_CLIP_BY_STEP] = "step", [PS_CLIP_BY_PREVIOUS] = "previous"};
  say_word(out, bytes, words, sizeof words / sizeof *words, value);
}

static void say_non_finite(char *out, size_t bytes, uint32_t value) {
  static const char *const words[] = {[PS_NON_FINITE_STOP] = "stop", [PS_NON_FINITE_SKIP] = "skip"};
  say_word(out, bytes, words, sizeof words / sizeof *words, value);
}

static void say_no_decay(char *out, size_t bytes, uint32_t value) {
  snprintf(out, bytes, "%s%s%s%s", value & PS_NO_DECAY_NORM ? ",norm" : "",
           value & PS_NO_DECAY_BIAS ? ",bias" : "",
           value & PS_NO_DECAY_EMBEDDING ? ",embedding" : "", value ? "" : ",none");
  memmove(out, out + 1, strlen(out));
}

static void say_base(char *out, size_t bytes, uint32_t value) {
  snprintf(out, bytes, "%s", ps_base_name((ps_base)value));
}

static void say_targets(char *out, size_t bytes, uint32_t value) {
  if (ps_lora_targets_text(out, bytes, value) != PS_OK)
    snprintf(out, bytes, "%u", value);
}

static void say_flag(char *out, size_t bytes, uint32_t value) {
  snprintf(out, bytes, "%s", value ? "true" : "false");
}

static void say_token(char *out, size_t bytes, uint32_t value) {
  if (value > INT32_MAX)
    snprintf(out, bytes, "none");
  else
    snprintf(out, bytes, "%u", value);
}

/* The fewest digits that read back as @value: "1e-05", not "1.0000000000000001e-05". */
static void say_double(char out[PS__SETTING_TEXT], double value) {
  for (int digits = 6; digits <= 17; digits++) {
    snprintf(out, PS__SETTING_TEXT, "%.*g", digits, value);
    if (strtod(out, NULL) == value)
      return;
  }
}

void ps__setting_text(char out[PS__SETTING_TEXT], const ps__setting *s, const void *base) {
  const void *at = (const char *)base + s->offset;
  const uint32_t *u32 = at;
  if (s->say)
    s->say(out, PS__SETTING_TEXT, *u32);
  else if (s->kind == PS__U64)
    snprintf(out, PS__SETTING_TEXT, "%llu", (unsigned long long)*(const uint64_t *)at);
  else if (s->kind == PS__F64)
    say_double(out, *(const double *)at);
  else
    snprintf(out, PS__SETTING_TEXT, "%u", *u32);
}

/* ---- the settings ---------------------------------------------------------------------------- */

#define TRAIN(key, option, kind, fixed)                                                            \
  {#key, option, kind, offsetof(ps__settings, train.key), fixed, false, NULL}
#define PLAN(key, option, kind, fixed)                                                             \
  {#key, option, kind, offsetof(ps__settings, info.key), fixed, false, NULL}
#define NEWER(of, key, option, kind)                                                               \
  {#key, option, kind, offsetof(ps__settings, of.key), false, true, NULL}
#define WORD(of, key, option, newer, say)                                                          \
  {#key, option, PS__U32, offsetof(ps__settings, of.key), false, newer, say}
#define FIXED(of, key, option, kind, newer, say)                                                   \
  {#key, option, kind, offsetof(ps__settings, of.key), true, newer, say}
const ps__setting ps__train_settings[] = {
    WORD(train, lr_kind, "lr-schedule", false, say_schedule),
    TRAIN(lr, "lr", PS__F64, false),
    TRAIN(min_lr, "min-lr", PS__F64, false),
    TRAIN(warmup_steps, "warmup-steps", PS__U64, false),
    TRAIN(total_steps, "steps", PS__U64, false),
    TRAIN(decay_steps, "decay-steps", PS__U64, false),
    TRAIN(beta1, "beta1", PS__F64, false),
    TRAIN(beta2, "beta2", PS__F64, false),
    TRAIN(eps, "eps", PS__F64, false),
    TRAIN(momentum, "momentum", PS__F64, false),
    WORD(train, nesterov, "nesterov", false, say_flag),
    TRAIN(weight_decay, "weight-decay", PS__F64, false),
    WORD(train, no_decay, "no-decay", true, say_no_decay),
    PLAN(clip_norm, "clip-norm", PS__F64, false),
    WORD(info, clip_by, "clip-by", true, say_clip_by),
    WORD(info, non_finite, "non-finite", true, say_non_finite),
    NEWER(train, max_skips, "max-skips", PS__U64),
    TRAIN(seed, "seed", PS__U64, true),
    FIXED(train, shuffle, "shuffle", PS__U32, false, say_flag),
    FIXED(info, document_token, "document-token", PS__I32, false, say_token),
    FIXED(info, document_end_token, "document-end-token", PS__I32, false, say_token),
    {.key = NULL},
};

#define LORA(key, option, kind, say)                                                               \
  {"lora_" #key, option, kind, offsetof(ps__settings, info.lora.key), true, true, say}
const ps__setting ps__batch_settings[] = {
    PLAN(n_frozen_layers, "frozen layers", PS__U32, true),
    PLAN(seq_len, "seq-len", PS__U64, true),
    PLAN(tokens_per_step, "tokens-per-step", PS__U64, true),
    PLAN(n_sequences, "number of sequences in the data", PS__U64, true),
    FIXED(info, data_mix, "weights of the data", PS__U64, true, NULL),
    PLAN(chunk_tokens, "chunk-tokens", PS__U64, false),
    PLAN(chunks_per_round, "chunks-per-round", PS__U64, false),
    PLAN(first_round_chunks, "first-round-chunks", PS__U64, false),
    NEWER(info, first_rounds, "first-rounds", PS__U64),
    PLAN(head_slice_tokens, "head-slice-tokens", PS__U64, false),
    LORA(rank, "lora-rank", PS__U32, NULL),
    LORA(alpha, "lora-alpha", PS__F64, NULL),
    LORA(targets, "lora-targets", PS__U32, say_targets),
    LORA(rslora, "lora-rslora", PS__U32, say_flag),
    LORA(base, "base-dtype", PS__U32, say_base),
    FIXED(info, fp8_bf16_first, "fp8-bf16-first", PS__U32, true, NULL),
    FIXED(info, fp8_bf16_last, "fp8-bf16-last", PS__U32, true, NULL),
    FIXED(info, fp8_bf16_down, "fp8-bf16-down", PS__U32, true, say_flag),
    FIXED(info, fp8_head, "fp8-head", PS__U32, true, say_flag),
    FIXED(info, fp8_fast_accumulation, "fp8-fast-accumulation", PS__U32, true, say_flag),
    NEWER(info, n_hosts, "number of hosts", PS__U32),
    NEWER(info, z_loss, "z-loss", PS__F64),
    NEWER(info, label_smoothing, "label-smoothing", PS__F64),
    NEWER(info, router_aux_loss, "router-aux-loss", PS__F64),
    NEWER(info, router_z_loss, "router-z-loss", PS__F64),
    {.key = NULL},
};

static ps_checkpoint_info info_of(const ps_trainer *t, uint64_t n_steps) {
  const ps_plan_config *c = &t->plan->cfg;
  const ps_plan_report *r = &t->plan->report;
  return (ps_checkpoint_info){
      .struct_bytes = sizeof(ps_checkpoint_info),
      .recipe = c->recipe,
      .state_bits = c->state_bits,
      .optimizer = c->optimizer,
      .n_frozen_layers = c->n_frozen_layers,
      .step = t->cfg.first_step + n_steps,
      .n_updates = t->n_updates + n_steps,
      .seq_len = c->seq_len,
      .tokens_per_step = r->tokens_per_step,
      .chunk_tokens = r->chunk_tokens,
      .chunks_per_round = r->chunks_per_round,
      .first_round_chunks = r->first_round_chunks,
      .first_rounds = r->first_rounds,
      .head_slice_tokens = r->head_slice_tokens,
      .lora = t->plan->model->lora,
      .fp8_bf16_first = c->fp8_bf16_first,
      .fp8_bf16_last = c->fp8_bf16_last,
      .fp8_bf16_down = c->fp8_bf16_down,
      .fp8_head = c->fp8_head,
      .fp8_fast_accumulation = c->fp8_fast_accumulation,
      .n_hosts = c->n_hosts,
      .z_loss = c->z_loss,
      .label_smoothing = c->label_smoothing,
      .router_aux_loss = (double)t->plan->model->loss.router_aux,
      .router_z_loss = c->router_z_loss,
      .clip_norm = c->clip_norm,
      .non_finite = c->non_finite,
      .clip_by = c->clip_by,
      .grad_norm = NAN,
      .document_token = c->document_token,
      .document_end_token = c->document_end_token,
      .n_sequences = t->cfg.dataset ? ps_dataset_n_sequences(t->cfg.dataset, c->seq_len) : 0,
      .data_mix = t->cfg.dataset ? ps_dataset_mix(t->cfg.dataset) : 0,
  };
}

ps__settings ps__settings_of(const ps_trainer *t, uint64_t n_steps) {
  ps__settings s = {info_of(t, n_steps), t->cfg};
  const struct {
    ps_hyper hyper;
    double *value;
  } hypers[] = {{PS_HYPER_BETA1, &s.train.beta1},
                {PS_HYPER_BETA2, &s.train.beta2},
                {PS_HYPER_EPS, &s.train.eps},
                {PS_HYPER_MOMENTUM, &s.train.momentum},
                {PS_HYPER_WEIGHT_DECAY, &s.train.weight_decay}};
  for (size_t i = 0; i < sizeof hypers / sizeof *hypers; i++)
    if (isnan(ps_optimizer_default((ps_optimizer)s.info.optimizer, hypers[i].hyper)))
      *hypers[i].value = NAN;
  return s;
}

uint64_t ps__manifest_run_id(const ps__json *manifest) {
  const char *id = ps__json_string(ps__json_get(manifest, "run_id"), NULL);
  return id && strlen(id) == 16 && strspn(id, "0123456789abcdef") == 16 ? strtoull(id, NULL, 16)
                                                                        : 0;
}
