/* deepseek.c - DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash (glm4_moe_lite): latent attention, and
 * experts beside shared ones after the first layers. Defaults are those of transformers' configs
 * (5.24). */
#include "model/experts.h"
#include "model/family.h"
#include "model/mla.h"
#include "model/mlp.h"
#include <string.h>

static const ps__half_use first = PS__FIRST_HALF(0, ps__mla, ps__mla_usual),
                          second[] = {
                              PS__SECOND_HALF(PS_LAYER_EXPERTS, ps__experts, ps__experts_deepseek),
                              PS__SECOND_HALF(0, ps__mlp, ps__mlp_usual)};
static const ps__decoder decoder = {.half = {&first, second}};

/* A key that is @want, absent or null. */
static ps_status must_be(const ps__config_reader *r, const char *key, const char *want) {
  const ps__json *v = ps__config_field(r->j, key);
  const char *text = ps__json_string(v, NULL);
  if (!v || (text && !strcmp(text, want)))
    return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: %s is \"%.60s\": only \"%s\" is supported in this family",
                  r->path, key, text ? text : ps__config_kind(v), want);
}

/* ---- DeepSeek-V2 ----------------------------------------------------------------------------- */

static const ps__latent_defaults of_v2 = {.kv_rank = 512,
                                          .q_rank = 1536,
                                          .nope_dim = 128,
                                          .rotary_dim = 64,
                                          .value_dim = 128,
                                          .n_shared = 2,
                                          .n_groups = 1,
                                          .n_groups_used = 1,
                                          .router_scale = 1};
static const ps__experts_defaults experts_of_v2 = {.n_experts = 64,
                                                   .n_used = PS__CONFIG_REQUIRED,
                                                   .count_key = "n_routed_experts",
                                                   .has_shared = true,
                                                   .dim_key = "moe_intermediate_size",
                                                   .dim = 1407};

static ps_status read_v2(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *method = ps__config_field(r->j, "topk_method");
  const char *name = ps__json_string(method, NULL);
  const bool grouped = name && !strcmp(name, "group_limited_greedy");
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(must_be(r, "scoring_func", "softmax"));
  if (method && !grouped && (!name || strcmp(name, "greedy")))
    return ps__fail(
        PS_EFORMAT,
        "%s: topk_method is \"%.60s\": only \"greedy\" and \"group_limited_greedy\" are "
        "supported in this family",
        r->path, name ? name : ps__config_kind(method));
  PS_TRY(ps__config_shared_experts(r, &of_v2, &experts_of_v2, c));
  if (c->norm_topk_prob)
    return ps__fail(PS_EFORMAT,
                    "%s: norm_topk_prob is true: transformers ignores it in this family and "
                    "DeepSeek's own code does not, set it to false",
                    r->path);
  if (!grouped)
    c->n_expert_groups = c->n_groups_used = 0;
  ps__config_latent_scale(c);
  return PS_OK;
}

const ps__family ps__family_deepseek_v2 = {.model_type = "deepseek_v2",
                                           .architecture = "DeepseekV2ForCausalLM",
                                           .latent = &of_v2,
                                           .has_experts = true,
                                           .interleaved_rope = true,
                                           .read = read_v2,
                                           .decoder = &decoder};

/* ---- sigmoid routing ------------------------------------------------------------------------- */

static ps_status read_sigmoid(const ps__config_reader *r, const ps__latent_defaults *d,
                              const ps__experts_defaults *e, ps_model_config *c) {
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(must_be(r, "scoring_func", "sigmoid"));
  PS_TRY(must_be(r, "topk_method", "noaux_tc"));
  PS_TRY(ps__config_shared_experts(r, d, e, c));
  PS_TRY(ps__config_bool(r, r->j, "rope_interleave", true, &c->interleaved_rope));
  if (c->router_aux_loss > 0)
    return ps__fail(PS_EFORMAT,
                    "%s: router_aux_loss_coef is %g: it must be 0, this family's router balances "
                    "by its correction bias",
                    r->path, (double)c->router_aux_loss);
  c->router_sigmoid = 1;
  ps__config_latent_scale(c);
  return PS_OK;
}

static const ps__latent_defaults of_v3 = {.kv_rank = 512,
                                          .q_rank = 1536,
                                          .nope_dim = 128,
                                          .rotary_dim = 64,
                                          .value_dim = 128,
                                          .n_dense = 3,
                                          .n_shared = 1,
                                          .n_groups = 8,
                                          .n_groups_used = 4,
                                          .router_scale = 2.5,
                                          .norm_topk_prob = true};
static const ps__experts_defaults experts_of_v3 = {.n_experts = 256,
                                                   .n_used = 8,
                                                   .count_key = "n_routed_experts",
                                                   .has_shared = true,
                                                   .dim_key = "moe_intermediate_size",
                                                   .dim = 2048};
static ps_status read_v3(const ps__config_reader *r, ps_model_config *c) {
  return read_sigmoid(r, &of_v3, &experts_of_v3, c);
}
const ps__family ps__family_deepseek_v3 = {.model_type = "deepseek_v3",
                                           .architecture = "DeepseekV3ForCausalLM",
                                           .latent = &of_v3,
                                           .has_mtp = true,
                                           .has_experts = true,
                                           .read = read_v3,
                                           .decoder = &decoder};

static const ps__latent_defaults of_glm = {.kv_rank = 512,
                                           .q_rank = 768,
                                           .nope_dim = 192,
                                           .rotary_dim = 64,
                                           .value_dim = 256,
                                           .n_dense = 1,
                                           .n_shared = 1,
                                           .n_groups = 1,
                                           .n_groups_used = 1,
                                           .router_scale = 1.8,
                                           .norm_topk_prob = true};
static const ps__experts_defaults experts_of_glm = {.n_experts = 64,
                                                    .n_used = 4,
                                                    .count_key = "n_routed_experts",
                                                    .has_shared = true,
                                                    .dim_key = "moe_intermediate_size",
                                                    .dim = 1536};

/* mlp_layer_types, "dense" or "sparse" by layer, counts; transformers reads no
 * first_k_dense_replace here. */
static ps_status read_mlp_types(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *types = ps__config_field(r->j, "mlp_layer_types");
  uint32_t dense = 0;
  PS_TRY(ps__config_uint(r, r->j, "first_k_dense_replace", of_glm.n_dense, &dense));
  if (!types && dense != of_glm.n_dense)
    return ps__fail(PS_EFORMAT,
                    "%s: first_k_dense_replace is %u: transformers ignores it in this family, give "
                    "mlp_layer_types",
                    r->path, dense);
  if (!types)
    return PS_OK;
  if (ps__json_type(types) != PS_JSON_ARRAY || ps__json_length(types) != c->n_layers)
    return ps__fail(PS_EFORMAT,
                    "%s: mlp_layer_types must be a list of num_hidden_layers, %u, entries", r->path,
                    c->n_layers);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const char *type = ps__json_string(ps__json_at(types, i), NULL);
    const bool sparse = type && !strcmp(type, "sparse");
    if (!sparse && (!type || strcmp(type, "dense")))
      return ps__fail(PS_EFORMAT,
                      "%s: mlp_layer_types[%u] is \"%.60s\": it must be \"dense\" or \"sparse\"",
                      r->path, i, type ? type : "not a string");
    c->layer_flags[i] &= (uint8_t)~PS_LAYER_EXPERTS;
    c->layer_flags[i] |= sparse ? PS_LAYER_EXPERTS : 0;
  }
  return PS_OK;
}

static ps_status read_glm(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(read_sigmoid(r, &of_glm, &experts_of_glm, c));
  return read_mlp_types(r, c);
}
const ps__family ps__family_glm4_moe_lite = {.model_type = "glm4_moe_lite",
                                             .architecture = "Glm4MoeLiteForCausalLM",
                                             .latent = &of_glm,
                                             .has_mtp = true,
                                             .has_experts = true,
                                             .default_norm_eps = 1e-5,
                                             .is_of_5 = true,
                                             .read = read_glm,
                                             .decoder = &decoder};
