/* gemma.c - Gemma 1, 2 and 3 (text): norms with 1 + w before and after attention and MLP, GeGLU, a
 * scaled embedding, layers with windows between layers without. Gemma 2 has soft caps; Gemma 3 has
 * norms on the heads of q and k, and RoPE of their own in the layers with windows. Defaults are
 * those of transformers' GemmaConfig (5.24), Gemma2Config and Gemma3TextConfig (4.57). */
#include "model/attention.h"
#include "model/family.h"
#include "model/mlp.h"
#include <math.h>
#include <string.h>

static ps_status read_scales(const ps__config_reader *r, ps_model_config *c) {
  double scalar = 0;
  PS_TRY(ps__config_positive(r, "query_pre_attn_scalar", 256, &scalar));
  c->attention_scale = (float)(1.0 / sqrt(scalar));
  c->embedding_scale = (float)sqrt((double)c->dim);
  return PS_OK;
}

/* A soft cap, @fallback where it is absent; null, which is 0 here, stands for none. */
static ps_status read_cap(const ps__config_reader *r, const char *key, double fallback,
                          float *out) {
  double cap = 0;
  const bool absent = !ps__json_get(r->j, key);
  *out = absent ? (float)fallback : 0.0f;
  if (!ps__config_field(r->j, key))
    return PS_OK;
  PS_TRY(ps__config_positive(r, key, fallback, &cap));
  *out = (float)cap;
  return PS_OK;
}

static ps_status read_gemma2(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(read_scales(r, c));
  PS_TRY(read_cap(r, "attn_logit_softcapping", 50.0, &c->attention_softcap));
  PS_TRY(read_cap(r, "final_logit_softcapping", 30.0, &c->logit_softcap));
  return ps__config_sliding_layers(r, c, PS_LAYER_WINDOW, 2);
}

static ps_status read_gemma3(const ps__config_reader *r, ps_model_config *c) {
  uint32_t pattern = 0;
  PS_TRY(read_scales(r, c));
  PS_TRY(read_cap(r, "final_logit_softcapping", 0, &c->logit_softcap));
  PS_TRY(ps__config_uint(r, r->j, "sliding_window_pattern", 6, &pattern));
  PS_TRY(ps__config_in_range(r->path, "sliding_window_pattern", pattern, 1, UINT32_MAX));
  PS_TRY(ps__config_local_rope(r, "rope_local_base_freq", 10000.0, c));
  return ps__config_sliding_layers(r, c, PS_LAYER_WINDOW | PS_LAYER_LOCAL_ROPE, pattern);
}

static const ps__half_use attention = {.kind = &ps__attention,
                                       .names = &ps__attention_usual,
                                       .norm = "input_layernorm.weight",
                                       .post_norm = "post_attention_layernorm.weight"},
                          mlp = {.kind = &ps__mlp,
                                 .names = &ps__mlp_usual,
                                 .norm = "pre_feedforward_layernorm.weight",
                                 .post_norm = "post_feedforward_layernorm.weight"};

static const ps__decoder decoder = {
    .half = {&attention, &mlp}, .norm_offset = 1.0f, .rounds_embedding_scale = true};

/* Gemma 1 has norms before the halves alone, and no windows. transformers 4 took
 * hidden_activation, where it was given, and 5 does not look at it. */
static ps_status read_gemma1(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *v = ps__config_field(r->j, "hidden_activation");
  const char *name = ps__json_string(v, NULL);
  if (v && (!name || strcmp(name, "gelu_pytorch_tanh")))
    return ps__fail(PS_EFORMAT,
                    "%s: hidden_activation is \"%.60s\": only \"gelu_pytorch_tanh\" is supported",
                    r->path, name ? name : ps__config_kind(v));
  c->embedding_scale = (float)sqrt((double)c->dim);
  return ps__config_full_attention(r, c);
}

static const ps__half_use attention1 = PS__FIRST_HALF(0, ps__attention, ps__attention_usual),
                          mlp1 = PS__SECOND_HALF(0, ps__mlp, ps__mlp_usual);

static const ps__decoder decoder1 = {
    .half = {&attention1, &mlp1}, .norm_offset = 1.0f, .rounds_embedding_scale = true};

static const char *const gemma2_keys[] = {"sliding_window", "query_pre_attn_scalar",
                                          "attn_logit_softcapping", "final_logit_softcapping",
                                          NULL};
static const char *const gemma3_keys[] = {"sliding_window",          "query_pre_attn_scalar",
                                          "final_logit_softcapping", "sliding_window_pattern",
                                          "rope_local_base_freq",    NULL};

#define OF_ALL                                                                                     \
  .has_default_pad = true, .default_pad = 0, .default_head_dim = 256, .tied_by_default = true,     \
  .activation = PS_ACTIVATION_GELU_TANH
const ps__family ps__family_gemma = {.model_type = "gemma",
                                     .architecture = "GemmaForCausalLM",
                                     .default_kv_heads = 16,
                                     OF_ALL,
                                     .activation_alias = "gelu",
                                     .read = read_gemma1,
                                     .decoder = &decoder1};
const ps__family ps__family_gemma2 = {.model_type = "gemma2",
                                      .architecture = "Gemma2ForCausalLM",
                                      .default_kv_heads = 4,
                                      OF_ALL,
                                      .activation_key = "hidden_activation",
                                      .own_keys = gemma2_keys,
                                      .read = read_gemma2,
                                      .decoder = &decoder};
const ps__family ps__family_gemma3 = {.model_type = "gemma3_text",
                                      .architecture = "Gemma3ForCausalLM",
                                      .classifier_of = "Gemma3Text",
                                      .default_kv_heads = 4,
                                      .default_rope_theta = 1e6,
                                      .has_local_rope = true,
                                      .local_rope_key = "rope_local_base_freq",
                                      .qk_norm = 1,
                                      OF_ALL,
                                      .activation_key = "hidden_activation",
                                      .own_keys = gemma3_keys,
                                      .read = read_gemma3,
                                      .decoder = &decoder};
