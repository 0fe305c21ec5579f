/* qwen.c - Qwen2 (biases on q, k, v) and Qwen3 (RMSNorm on the heads of q and k); the blocks are
 * Llama's otherwise. Defaults are those of transformers' Qwen2Config and Qwen3Config (4.57). */
#include "model/family.h"

/* Windows are in use by layer_types or, without it, by use_sliding_window from layer
 * max_window_layers on. Without use_sliding_window there is no window, whatever sliding_window
 * says. */
static ps_status read_windows(const ps__config_reader *r, ps_model_config *c) {
  uint32_t use, from, sliding;
  bool given = false;
  PS_TRY(ps__config_bool(r, r->j, "use_sliding_window", false, &use));
  PS_TRY(ps__config_window(r, 4096, &c->window));
  if (!use)
    c->window = 0;
  PS_TRY(ps__config_layer_types(r, c, PS_LAYER_WINDOW, &given, &sliding));
  PS_TRY(ps__config_needs_window(r, c, sliding,
                                 use ? "sliding_window is null" : "use_sliding_window is false"));
  PS_TRY(ps__config_uint(r, r->j, "max_window_layers", 28, &from));
  for (uint32_t i = from; !given && c->window && i < c->n_layers; i++)
    c->layer_flags[i] = PS_LAYER_WINDOW;
  return PS_OK;
}

static const char *const own_keys[] = {"use_sliding_window", "sliding_window", NULL};

const ps__family ps__family_qwen2 = {.model_type = "qwen2",
                                     .architecture = "Qwen2ForCausalLM",
                                     .default_kv_heads = 32,
                                     .has_qkv_bias = true,
                                     .own_keys = own_keys,
                                     .read = read_windows,
                                     .decoder = &ps__decoder_llama};
const ps__family ps__family_qwen3 = {.model_type = "qwen3",
                                     .architecture = "Qwen3ForCausalLM",
                                     .default_kv_heads = 32,
                                     .default_head_dim = 128,
                                     .qk_norm = 1,
                                     .own_keys = own_keys,
                                     .read = read_windows,
                                     .decoder = &ps__decoder_llama};
