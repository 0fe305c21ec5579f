/* olmo2.c - OLMo 2: norms after attention and MLP instead of before, RMSNorm over the whole rows of
 * q and k. Defaults are those of transformers' Olmo2Config (4.57). */
#include "model/family.h"

const ps__family ps__family_olmo2 = {.model_type = "olmo2",
                                     .architecture = "Olmo2ForCausalLM",
                                     .default_norm_eps = 1e-5,
                                     .qk_norm = 2,
                                     .read = ps__config_full_attention};
