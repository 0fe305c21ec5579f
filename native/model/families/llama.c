/* llama.c - Llama 2 and 3: pre-norm blocks, grouped queries, SwiGLU, RoPE. Defaults are those of
 * transformers' LlamaConfig (4.57). */
#include "model/decoder.h"
#include "model/family.h"

/* Qwen's biases and norms of q and k are there where the config has them. */
ps_status ps__describe_llama(ps_model *m) {
  static const ps__decoder names = {PS__DECODER_NAMES,
                                    PS__DECODER_PRE_NORMS,
                                    .q_bias = "self_attn.q_proj.bias",
                                    .k_bias = "self_attn.k_proj.bias",
                                    .v_bias = "self_attn.v_proj.bias",
                                    .q_norm = "self_attn.q_norm.weight",
                                    .k_norm = "self_attn.k_norm.weight"};
  return ps__describe_decoder(m, &names);
}

const ps__family ps__family_llama = {.model_type = "llama",
                                     .architecture = "LlamaForCausalLM",
                                     .read = ps__config_full_attention,
                                     .describe = ps__describe_llama};
