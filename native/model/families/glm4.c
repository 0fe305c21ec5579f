/* glm4.c - GLM-4: norms before and after attention and MLP, biases on q, k and v, RoPE on
 * neighbours in half of a head; on disk gate and up are one matrix. Defaults are those of
 * transformers' Glm4Config (5.24). */
#include "model/attention.h"
#include "model/family.h"
#include "model/mlp.h"

static const ps__mlp_names mlp_names = {.gate = "mlp.gate_up_proj.weight",
                                        .down = "mlp.down_proj.weight"};
static const ps__half_use attention = {.kind = &ps__attention,
                                       .names = &ps__attention_usual,
                                       .norm = "input_layernorm.weight",
                                       .post_norm = "post_self_attn_layernorm.weight"},
                          mlp = {.kind = &ps__mlp,
                                 .names = &mlp_names,
                                 .norm = "post_attention_layernorm.weight",
                                 .post_norm = "post_mlp_layernorm.weight"};

static const ps__decoder decoder = {.half = {&attention, &mlp}};

const ps__family ps__family_glm4 = {.model_type = "glm4",
                                    .architecture = "Glm4ForCausalLM",
                                    .has_default_pad = true,
                                    .default_pad = 151329,
                                    .default_kv_heads = 2,
                                    .default_head_dim = 128,
                                    .default_norm_eps = 1.5625e-7,
                                    .has_qkv_bias_only = true,
                                    .has_partial_rope = true,
                                    .default_partial_rope = 0.5,
                                    .interleaved_rope = true,
                                    .read = ps__config_full_attention,
                                    .decoder = &decoder};
