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

#define TRAIN(key, option, kind, fixed)                                                            \
  {#key, option, kind, offsetof(ps_train_config, key), fixed, false}
#define NEWER(type, key, option, kind) {#key, option, kind, offsetof(type, key), false, true}
const ps__setting ps__train_settings[] = {
    TRAIN(lr_kind, "lr-schedule", PS__U32, false),
    TRAIN(lr, "lr", PS__F64, false),
    TRAIN(min_lr, "min-lr", PS__F64, false),
    TRAIN(warmup_steps, "warmup-steps", PS__U64, false),
    TRAIN(total_steps, "steps", PS__U64, false),
    TRAIN(decay_steps, "decay-steps", PS__U64, false),
    TRAIN(beta1, "beta1", PS__F64, false),
    TRAIN(beta2, "beta2", PS__F64, false),
    TRAIN(eps, "eps", PS__F64, false),
    TRAIN(momentum, "momentum", PS__F64, false),
    TRAIN(nesterov, "nesterov", PS__U32, false),
    TRAIN(weight_decay, "weight-decay", PS__F64, false),
    NEWER(ps_train_config, no_decay, "no-decay", PS__U32),
    TRAIN(clip_norm, "clip-norm", PS__F64, false),
    NEWER(ps_train_config, non_finite, "non-finite", PS__U32),
    NEWER(ps_train_config, max_skips, "max-skips", PS__U64),
    TRAIN(seed, "seed", PS__U64, true),
    TRAIN(shuffle, "shuffle", PS__U32, true),
    TRAIN(document_token, "document-token", PS__I32, true),
    TRAIN(document_end_token, "document-end-token", PS__I32, true),
    {.key = NULL},
};

#define BATCH(key, option, kind, fixed)                                                            \
  {#key, option, kind, offsetof(ps_checkpoint_info, key), fixed, false}
#define LORA(key, kind)                                                                            \
  {"lora_" #key, "lora-" #key, kind, offsetof(ps_checkpoint_info, lora.key), true, true}
const ps__setting ps__batch_settings[] = {
    BATCH(n_frozen_layers, "frozen layers", PS__U32, true),
    BATCH(seq_len, "seq-len", PS__U64, true),
    BATCH(tokens_per_step, "tokens-per-step", PS__U64, true),
    BATCH(n_sequences, "number of sequences in the data", PS__U64, true),
    {"data_mix", "weights of the data", PS__U64, offsetof(ps_checkpoint_info, data_mix), true,
     true},
    BATCH(chunk_tokens, "chunk-tokens", PS__U64, false),
    BATCH(chunks_per_round, "chunks-per-round", PS__U64, false),
    BATCH(first_round_chunks, "first-round-chunks", PS__U64, false),
    NEWER(ps_checkpoint_info, first_rounds, "first-rounds", PS__U64),
    BATCH(head_slice_tokens, "head-slice-tokens", PS__U64, false),
    LORA(rank, PS__U32),
    LORA(alpha, PS__F64),
    LORA(targets, PS__U32),
    LORA(rslora, PS__U32),
    {"fp8_bf16_first", "fp8-bf16-first", PS__U32, offsetof(ps_checkpoint_info, fp8_bf16_first),
     true, true},
    {"fp8_bf16_last", "fp8-bf16-last", PS__U32, offsetof(ps_checkpoint_info, fp8_bf16_last), true,
     true},
    {"fp8_bf16_down", "fp8-bf16-down", PS__U32, offsetof(ps_checkpoint_info, fp8_bf16_down), true,
     true},
    {"fp8_head", "fp8-head", PS__U32, offsetof(ps_checkpoint_info, fp8_head), true, true},
    {"fp8_fast_accumulation", "fp8-fast-accumulation", PS__U32,
     offsetof(ps_checkpoint_info, fp8_fast_accumulation), true, true},
    {"n_hosts", "number of hosts", PS__U32, offsetof(ps_checkpoint_info, n_hosts), false, true},
    NEWER(ps_checkpoint_info, z_loss, "z-loss", PS__F64),
    NEWER(ps_checkpoint_info, label_smoothing, "label-smoothing", PS__F64),
    NEWER(ps_checkpoint_info, router_aux_loss, "router-aux-loss", PS__F64),
    NEWER(ps_checkpoint_info, router_z_loss, "router-z-loss", PS__F64),
    {.key = NULL},
};

void ps__checkpoint_info_of(const ps_trainer *t, uint64_t n_steps, ps_checkpoint_info *out) {
  const ps_plan_config *c = &t->plan->cfg;
  const ps_plan_report *r = &t->plan->report;
  *out = (ps_checkpoint_info){
      .struct_bytes = sizeof *out,
      .recipe = c->recipe,
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
      .n_sequences = t->cfg.dataset ? ps_dataset_n_sequences(t->cfg.dataset, c->seq_len) : 0,
      .data_mix = t->cfg.dataset ? ps_dataset_mix(t->cfg.dataset) : 0,
  };
}

ps_train_config ps__checkpoint_settings(const ps_trainer *t) {
  ps_train_config c = t->cfg;
  const struct {
    ps_hyper hyper;
    double *value;
  } hypers[] = {{PS_HYPER_BETA1, &c.beta1},
                {PS_HYPER_BETA2, &c.beta2},
                {PS_HYPER_EPS, &c.eps},
                {PS_HYPER_MOMENTUM, &c.momentum},
                {PS_HYPER_WEIGHT_DECAY, &c.weight_decay}};
  for (size_t i = 0; i < sizeof hypers / sizeof *hypers; i++)
    if (isnan(ps_optimizer_default((ps_optimizer)c.optimizer, hypers[i].hyper)))
      *hypers[i].value = NAN;
  return c;
}

uint64_t ps__manifest_run_id(const ps__json *manifest) {
  const char *id = ps__json_string(ps__json_get(manifest, "run_id"), NULL);
  return id && strlen(id) == 16 && strspn(id, "0123456789abcdef") == 16 ? strtoull(id, NULL, 16)
                                                                        : 0;
}
