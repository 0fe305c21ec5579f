/* qwen3_5.c - Qwen3.5 and Qwen3-Next: most layers have a gated delta-net, the others attention with
 * a gate on its output. Norms multiply by 1 + w, but for those of the delta-nets. Defaults are
 * those of transformers' Qwen3_5TextConfig, Qwen3_5MoeTextConfig and Qwen3NextConfig (5.24). */
#include "model/attention.h"
#include "model/delta.h"
#include "model/experts.h"
#include "model/family.h"
#include "model/mlp.h"
#include <string.h>

/* Without layer_types every full_attention_interval-th layer has attention. */
static ps_status read_layers(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *types = ps__config_field(r->j, "layer_types");
  uint32_t every = 0;
  PS_TRY(ps__config_uint(r, r->j, "full_attention_interval", 4, &every));
  PS_TRY(ps__config_in_range(r->path, "full_attention_interval", every, 1, UINT32_MAX));
  if (types && (ps__json_type(types) != PS_JSON_ARRAY || ps__json_length(types) != c->n_layers))
    return ps__fail(PS_EFORMAT,
                    "%s: layer_types is %s of %zu: it must be a list of num_hidden_layers, %u",
                    r->path, ps__config_kind(types), ps__json_length(types), c->n_layers);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const char *type = ps__json_string(ps__json_at(types, i), NULL);
    const bool full = types
                          ? type && (!strcmp(type, "full_attention") || !strcmp(type, "attention"))
                          : (i + 1) % every == 0;
    if (types && !full && (!type || (strcmp(type, "linear_attention") && strcmp(type, "mamba"))))
      return ps__fail(PS_EFORMAT,
                      "%s: layer_types[%u] is \"%.60s\": only \"full_attention\" and "
                      "\"linear_attention\" are supported",
                      r->path, i, type ? type : "not a string");
    if (!full)
      c->layer_flags[i] |= PS_LAYER_LINEAR;
  }
  return PS_OK;
}

static ps_status read_delta(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(ps__config_uint(r, r->j, "linear_num_key_heads", 16, &c->linear_key_heads));
  PS_TRY(ps__config_uint(r, r->j, "linear_num_value_heads", 32, &c->linear_value_heads));
  PS_TRY(ps__config_uint(r, r->j, "linear_key_head_dim", 128, &c->linear_key_dim));
  PS_TRY(ps__config_uint(r, r->j, "linear_value_head_dim", 128, &c->linear_value_dim));
  PS_TRY(ps__config_uint(r, r->j, "linear_conv_kernel_dim", 4, &c->linear_conv_width));
  c->attention_gate = 1;
  return read_layers(r, c);
}

static ps_status read_next(const ps__config_reader *r, ps_model_config *c) {
  static const ps__experts_defaults defaults = {.n_experts = 512,
                                                .n_used = 10,
                                                .renorm_by_default = true,
                                                .shared_dim = 512,
                                                .dim_key = "moe_intermediate_size",
                                                .dim = 512,
                                                .aux_loss = 0.001};
  PS_TRY(read_delta(r, c));
  PS_TRY(ps__config_sparse_layers(r, c));
  return ps__config_experts(r, &defaults, c);
}

/* All layers have experts, and their weights are always divided by their sum. */
static ps_status read_3_5_moe(const ps__config_reader *r, ps_model_config *c) {
  static const ps__experts_defaults defaults = {.n_experts = 256,
                                                .n_used = 8,
                                                .shared_dim = 512,
                                                .always_renorm = true,
                                                .dim_key = "moe_intermediate_size",
                                                .dim = 512,
                                                .aux_loss = 0.001};
  PS_TRY(read_delta(r, c));
  for (uint32_t i = 0; i < c->n_layers; i++)
    c->layer_flags[i] |= PS_LAYER_EXPERTS;
  return ps__config_experts(r, &defaults, c);
}

#define GATED PS__FIRST_HALF(0, ps__attention, ps__attention_usual)
static const ps__half_use
    first_3_5[] = {PS__FIRST_HALF(PS_LAYER_LINEAR, ps__delta, ps__delta_qwen3_5), GATED},
    first_next[] = {PS__FIRST_HALF(PS_LAYER_LINEAR, ps__delta, ps__delta_qwen3_next), GATED},
    second[] = {PS__SECOND_HALF(PS_LAYER_EXPERTS, ps__experts, ps__experts_qwen),
                PS__SECOND_HALF(0, ps__mlp, ps__mlp_usual)};

static const ps__decoder qwen3_5 = {.half = {first_3_5, second}, .norm_offset = 1.0f},
                         qwen3_next = {.half = {first_next, second}, .norm_offset = 1.0f};

/* Published files have them, without effect. */
static const char *const own_keys[] = {"use_sliding_window", "sliding_window", NULL};

#define OF_ALL                                                                                     \
  .default_head_dim = 256, .has_partial_rope = true, .default_partial_rope = 0.25, .qk_norm = 1,   \
  .has_mtp = true
const ps__family ps__family_qwen3_5 = {.model_type = "qwen3_5_text",
                                       .architecture = "Qwen3_5ForCausalLM",
                                       .default_kv_heads = 4,
                                       .has_mrope = true,
                                       OF_ALL,
                                       .is_of_5 = true,
                                       .read = read_delta,
                                       .decoder = &qwen3_5};
const ps__family ps__family_qwen3_5_moe = {.model_type = "qwen3_5_moe_text",
                                           .architecture = "Qwen3_5MoeForCausalLM",
                                           .default_kv_heads = 2,
                                           .default_ffn_dim = 512,
                                           .has_experts = true,
                                           .has_mrope = true,
                                           OF_ALL,
                                           .is_of_5 = true,
                                           .read = read_3_5_moe,
                                           .decoder = &qwen3_5};
const ps__family ps__family_qwen3_next = {.model_type = "qwen3_next",
                                          .architecture = "Qwen3NextForCausalLM",
                                          .default_kv_heads = 2,
                                          .default_ffn_dim = 5632,
                                          .has_experts = true,
                                          OF_ALL,
                                          .own_keys = own_keys,
                                          .read = read_next,
                                          .decoder = &qwen3_next};
