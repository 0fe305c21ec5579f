/* olmo2.c - OLMo 2: norms after attention and MLP instead of before, RMSNorm over the whole rows of
 * q and k. Defaults are those of transformers' Olmo2Config (4.57). */
#include "model/attention.h"
#include "model/family.h"
#include "model/mlp.h"

static const ps__half_use attention = {.kind = &ps__attention,
                                       .names = &ps__attention_usual,
                                       .post_norm = "post_attention_layernorm.weight"},
                          mlp = {.kind = &ps__mlp,
                                 .names = &ps__mlp_usual,
                                 .post_norm = "post_feedforward_layernorm.weight"};

static const ps__decoder decoder = {.half = {&attention, &mlp}};

const ps__family ps__family_olmo2 = {.model_type = "olmo2",
                                     .architecture = "Olmo2ForCausalLM",
                                     .has_default_pad = true,
                                     .default_pad = 1,
                                     .default_norm_eps = 1e-5,
                                     .qk_norm = 2,
                                     .has_type_alone = true,
                                     .read = ps__config_full_attention,
                                     .decoder = &decoder};
