/* hunyuan.c - Hunyuan dense: Llama's block with norms on the heads of q and k after RoPE. Defaults
 * are those of transformers' HunYuanDenseV1Config (5.24). */
#include "model/attention.h"
#include "model/family.h"
#include "model/mlp.h"

static const ps__attention_names names = {.q = "self_attn.q_proj.weight",
                                          .k = "self_attn.k_proj.weight",
                                          .v = "self_attn.v_proj.weight",
                                          .q_norm = "self_attn.query_layernorm.weight",
                                          .k_norm = "self_attn.key_layernorm.weight",
                                          .o = "self_attn.o_proj.weight"};
static const ps__half_use attention = PS__FIRST_HALF(0, ps__attention, names),
                          mlp = PS__SECOND_HALF(0, ps__mlp, ps__mlp_usual);

static const ps__decoder decoder = {.half = {&attention, &mlp}};

const ps__family ps__family_hunyuan = {.model_type = "hunyuan_v1_dense",
                                       .architecture = "HunYuanDenseV1ForCausalLM",
                                       .has_default_pad = true,
                                       .default_pad = 0,
                                       .default_norm_eps = 1e-5,
                                       .qk_norm = 3,
                                       .has_ntk_alpha = true,
                                       .read = ps__config_full_attention,
                                       .decoder = &decoder};
