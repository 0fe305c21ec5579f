/* mixtral.c - Mixtral: Mistral's block with experts in all layers. Defaults are those of
 * transformers' MixtralConfig (5.24). */
#include "model/attention.h"
#include "model/experts.h"
#include "model/family.h"

static const ps__experts_defaults defaults = {
    .n_experts = 8, .n_used = 2, .always_renorm = true, .aux_loss = 0.001};

static ps_status read_mixtral(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(ps__config_window(r, 0, &c->window));
  for (uint32_t i = 0; i < c->n_layers; i++)
    c->layer_flags[i] = c->window ? PS_LAYER_EXPERTS | PS_LAYER_WINDOW : PS_LAYER_EXPERTS;
  return ps__config_experts(r, &defaults, c);
}

static const ps__experts_names names = {.router = "block_sparse_moe.gate.weight",
                                        .gate = "block_sparse_moe.experts.%u.w1.weight",
                                        .up = "block_sparse_moe.experts.%u.w3.weight",
                                        .down = "block_sparse_moe.experts.%u.w2.weight"};
static const ps__half_use attention = PS__FIRST_HALF(0, ps__attention, ps__attention_usual),
                          experts = PS__SECOND_HALF(0, ps__experts, names);

static const ps__decoder decoder = {.half = {&attention, &experts}};

static const char *const own_keys[] = {"sliding_window", NULL};

const ps__family ps__family_mixtral = {.model_type = "mixtral",
                                       .architecture = "MixtralForCausalLM",
                                       .default_kv_heads = 8,
                                       .default_rope_theta = 1e6,
                                       .default_norm_eps = 1e-5,
                                       .has_experts = true,
                                       .own_keys = own_keys,
                                       .read = read_mixtral,
                                       .decoder = &decoder};
