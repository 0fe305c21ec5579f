/* llama.c - Llama 2 and 3: pre-norm blocks, grouped queries, SwiGLU, RoPE. Defaults are those of
 * transformers' LlamaConfig (4.57). */
#include "model/attention.h"
#include "model/family.h"
#include "model/mlp.h"

static const ps__half_use attention = PS__FIRST_HALF(0, ps__attention, ps__attention_usual),
                          mlp = PS__SECOND_HALF(0, ps__mlp, ps__mlp_usual);

const ps__decoder ps__decoder_llama = {.half = {&attention, &mlp}};

const ps__family ps__family_llama = {.model_type = "llama",
                                     .architecture = "LlamaForCausalLM",
                                     .read = ps__config_full_attention,
                                     .decoder = &ps__decoder_llama};
