/* olmo2.c - OLMo 2: norms after attention and MLP instead of before, RMSNorm over the whole rows of
 * q and k. Defaults are those of transformers' Olmo2Config (4.57). */
#include "model/decoder.h"
#include "model/family.h"

static ps_status describe(ps_model *m) {
  static const ps__decoder names = {
      PS__DECODER_NAMES, .attention_post_norm = "post_attention_layernorm.weight",
      .mlp_post_norm = "post_feedforward_layernorm.weight", .q_norm = "self_attn.q_norm.weight",
      .k_norm = "self_attn.k_norm.weight"};
  return ps__describe_decoder(m, &names);
}

const ps__family ps__family_olmo2 = {.model_type = "olmo2",
                                     .architecture = "Olmo2ForCausalLM",
                                     .has_default_pad = true,
                                     .default_pad = 1,
                                     .default_norm_eps = 1e-5,
                                     .qk_norm = 2,
                                     .read = ps__config_full_attention,
                                     .describe = describe};
