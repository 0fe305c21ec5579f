/* qwen.c - Qwen2 (biases on q, k, v) and Qwen3 (RMSNorm on the heads of q and k); the blocks are
 * Llama's otherwise. Defaults are those of transformers' Qwen2Config and Qwen3Config (4.57). */
#include "model/family.h"

/* Windows are in use by layer_types or, without it, by use_sliding_window from layer
 * max_window_layers on. */
static ps_status refuse_windows(const ps__config_reader *r, ps_model_config *c) {
  uint32_t use, window, from;
  PS_TRY(ps__config_full_attention(r, c));
  if (ps__config_field(r->j, "layer_types"))
    return PS_OK;
  PS_TRY(ps__config_bool(r, "use_sliding_window", false, &use));
  if (!use)
    return PS_OK;
  PS_TRY(ps__config_uint(r, r->j, "sliding_window", 4096, &window));
  PS_TRY(ps__config_uint(r, r->j, "max_window_layers", 28, &from));
  const bool null_window =
      ps__json_get(r->j, "sliding_window") && !ps__config_field(r->j, "sliding_window");
  if (from >= c->n_layers || null_window)
    return PS_OK;
  return ps__fail(PS_EFORMAT,
                  "%s: use_sliding_window is true from layer %u of %u: sliding windows are not "
                  "supported, set it to false to train with full attention",
                  r->path, from, c->n_layers);
}

const ps__family ps__family_qwen2 = {.model_type = "qwen2",
                                     .architecture = "Qwen2ForCausalLM",
                                     .default_kv_heads = 32,
                                     .has_qkv_bias = true,
                                     .read = refuse_windows,
                                     .block_params = ps__llama_block_params};
const ps__family ps__family_qwen3 = {.model_type = "qwen3",
                                     .architecture = "Qwen3ForCausalLM",
                                     .default_kv_heads = 32,
                                     .default_head_dim = 128,
                                     .has_qk_norm = true,
                                     .read = refuse_windows,
                                     .block_params = ps__llama_block_params};
