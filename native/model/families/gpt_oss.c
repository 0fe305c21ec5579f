/* gpt_oss.c - gpt-oss: sinks in attention, a window in every other layer, YaRN, biases everywhere,
 * experts with a gate that clamps. Defaults are those of transformers' GptOssConfig (5.24). */
#include "model/attention.h"
#include "model/experts.h"
#include "model/family.h"

/* What absent parameters of RoPE mean. */
static const ps_rope default_rope = {.kind = PS_ROPE_YARN,
                                     .original_positions = 4096,
                                     .keep_fraction = 1,
                                     .theta = 150000,
                                     .factor = 32,
                                     .beta_fast = 32,
                                     .beta_slow = 1};

static const ps__experts_defaults defaults = {
    .n_experts = 128, .n_used = 4, .always_renorm = true, .aux_loss = 0.001};

/* Files of the first release have the window and the context's length under other names as well. */
static ps_status read_counts(const ps__config_reader *r, ps_model_config *c) {
  uint32_t used = 0;
  PS_TRY(ps__config_uint(r, r->j, "experts_per_token", c->n_experts_used, &used));
  if (used != c->n_experts_used && !ps__config_field(r->j, "num_experts_per_tok"))
    c->n_experts_used = used;
  if (used != c->n_experts_used)
    return ps__fail(PS_EFORMAT,
                    "%s: experts_per_token is %u and num_experts_per_tok %u: they must agree",
                    r->path, used, c->n_experts_used);
  return PS_OK;
}

static ps_status read_layers(const ps__config_reader *r, ps_model_config *c) {
  bool given = false;
  uint32_t sliding = 0;
  PS_TRY(ps__config_window(r, 128, &c->window));
  PS_TRY(ps__config_layer_types(r, c, PS_LAYER_WINDOW, &given, &sliding));
  for (uint32_t i = 0; i < c->n_layers; i++) {
    if (!given && i % 2 == 0) {
      c->layer_flags[i] |= PS_LAYER_WINDOW;
      sliding++;
    }
    c->layer_flags[i] |= PS_LAYER_EXPERTS;
  }
  return ps__config_needs_window(r, c, sliding, "sliding_window is null");
}

/* The router's loss acts in transformers only with output_router_logits, which no published file
 * sets: their coefficient, 0.9, was never meant to be trained with. */
static ps_status read_gpt_oss(const ps__config_reader *r, ps_model_config *c) {
  double alpha = 0, limit = 0;
  uint32_t with_loss = 0;
  PS_TRY(read_layers(r, c));
  PS_TRY(ps__config_experts(r, &defaults, c));
  PS_TRY(read_counts(r, c));
  PS_TRY(ps__config_bool(r, r->j, "output_router_logits", false, &with_loss));
  if (!with_loss)
    c->router_aux_loss = 0;
  PS_TRY(ps__config_positive(r, "swiglu_alpha", 1.702, &alpha));
  PS_TRY(ps__config_positive(r, "swiglu_limit", 7, &limit));
  c->glu_alpha = (float)alpha;
  c->glu_limit = (float)limit;
  c->o_bias = c->qkv_bias;
  c->attention_sinks = 1;
  if (!ps__config_field(r->j, "rope_parameters") && !ps__config_field(r->j, "rope_scaling")) {
    const double theta = c->rope.theta;
    c->rope = default_rope;
    c->rope.theta = theta;
  }
  return PS_OK;
}

static const ps__experts_names names = {.router = "mlp.router.weight",
                                        .gate = "mlp.experts.%u.gate_up_proj",
                                        .down = "mlp.experts.%u.down_proj",
                                        .router_bias = "mlp.router.bias",
                                        .gate_bias = "mlp.experts.gate_up_proj_bias",
                                        .down_bias = "mlp.experts.down_proj_bias"};
static const ps__half_use attention = PS__FIRST_HALF(0, ps__attention, ps__attention_usual),
                          experts = PS__SECOND_HALF(0, ps__experts, names);

static const ps__decoder decoder = {.half = {&attention, &experts}};

static const char *const own_keys[] = {"sliding_window", "swiglu_limit", "swiglu_alpha", NULL};

const ps__family ps__family_gpt_oss = {.model_type = "gpt_oss",
                                       .architecture = "GptOssForCausalLM",
                                       .default_kv_heads = 8,
                                       .default_head_dim = 64,
                                       .default_rope_theta = 150000,
                                       .default_norm_eps = 1e-5,
                                       .has_experts = true,
                                       .has_qkv_bias_only = true,
                                       .own_keys = own_keys,
                                       .read = read_gpt_oss,
                                       .decoder = &decoder};
