/* llama.c - Llama 2 and 3: pre-norm blocks, grouped queries, SwiGLU, RoPE. Defaults are those of
 * transformers' LlamaConfig (4.57). */
#include "model/family.h"

uint32_t ps__llama_block_params(const ps_model_config *c, ps__param_def p[PS__MAX_UNIT_PARAMS]) {
  const uint64_t d = c->dim, f = c->ffn_dim, a = (uint64_t)c->n_heads * c->head_dim,
                 k = (uint64_t)c->n_kv_heads * c->head_dim;
  uint32_t n = 0;
  p[n++] = (ps__param_def){"input_layernorm.weight", PS_PARAM_NORM, 1, d, 1, false};
  p[n++] = (ps__param_def){"self_attn.q_proj.weight", PS_PARAM_MATRIX, 2, a, d, false};
  p[n++] = (ps__param_def){"self_attn.k_proj.weight", PS_PARAM_MATRIX, 2, k, d, true};
  p[n++] = (ps__param_def){"self_attn.v_proj.weight", PS_PARAM_MATRIX, 2, k, d, true};
  if (c->qkv_bias) {
    p[n++] = (ps__param_def){"self_attn.q_proj.bias", PS_PARAM_BIAS, 1, a, 1, false};
    p[n++] = (ps__param_def){"self_attn.k_proj.bias", PS_PARAM_BIAS, 1, k, 1, true};
    p[n++] = (ps__param_def){"self_attn.v_proj.bias", PS_PARAM_BIAS, 1, k, 1, true};
  }
  if (c->qk_norm) {
    p[n++] = (ps__param_def){"self_attn.q_norm.weight", PS_PARAM_NORM, 1, c->head_dim, 1, false};
    p[n++] = (ps__param_def){"self_attn.k_norm.weight", PS_PARAM_NORM, 1, c->head_dim, 1, false};
  }
  p[n++] = (ps__param_def){"self_attn.o_proj.weight", PS_PARAM_MATRIX, 2, d, a, false};
  p[n++] = (ps__param_def){"post_attention_layernorm.weight", PS_PARAM_NORM, 1, d, 1, false};
  p[n++] = (ps__param_def){"mlp.gate_proj.weight", PS_PARAM_MATRIX, 2, f, d, false};
  p[n++] = (ps__param_def){"mlp.up_proj.weight", PS_PARAM_MATRIX, 2, f, d, true};
  p[n++] = (ps__param_def){"mlp.down_proj.weight", PS_PARAM_MATRIX, 2, d, f, false};
  return n;
}

const ps__family ps__family_llama = {.model_type = "llama",
                                     .architecture = "LlamaForCausalLM",
                                     .read = ps__config_full_attention,
                                     .block_params = ps__llama_block_params};
