/* olmo2.c - OLMo 2 and 3: norms after attention and MLP instead of before, RMSNorm over the whole
 * rows of q and k. In OLMo 3 all layers but every fourth have a window, and RoPE without scaling.
 * Defaults are those of transformers' Olmo2Config (4.57) and Olmo3Config (5.24). */
#include "model/attention.h"
#include "model/family.h"
#include "model/mlp.h"

static const ps__half_use attention = {.kind = &ps__attention,
                                       .names = &ps__attention_usual,
                                       .post_norm = "post_attention_layernorm.weight"},
                          mlp = {.kind = &ps__mlp,
                                 .names = &ps__mlp_usual,
                                 .post_norm = "post_feedforward_layernorm.weight"};

/* A rope_theta beside rope_scaling is that of the layers without windows alone. */
static ps_status read_olmo3(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(ps__config_local_rope(r, NULL, 500000.0, c));
  return ps__config_sliding_layers(r, c, PS_LAYER_WINDOW | PS_LAYER_LOCAL_ROPE, 4);
}

const ps__decoder ps__decoder_olmo2 = {.half = {&attention, &mlp}};

const ps__family ps__family_olmo2 = {.model_type = "olmo2",
                                     .architecture = "Olmo2ForCausalLM",
                                     .has_default_pad = true,
                                     .default_pad = 1,
                                     .default_norm_eps = 1e-5,
                                     .qk_norm = 2,
                                     .has_type_alone = true,
                                     .read = ps__config_full_attention,
                                     .decoder = &ps__decoder_olmo2};

static const char *const olmo3_keys[] = {"sliding_window", NULL};

const ps__family ps__family_olmo3 = {.model_type = "olmo3",
                                     .architecture = "Olmo3ForCausalLM",
                                     .has_default_pad = true,
                                     .default_pad = 1,
                                     .default_norm_eps = 1e-5,
                                     .default_rope_theta = 500000.0,
                                     .qk_norm = 2,
                                     .has_local_rope = true,
                                     .own_keys = olmo3_keys,
                                     .read = read_olmo3,
                                     .decoder = &ps__decoder_olmo2};
