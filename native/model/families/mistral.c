/* mistral.c - Mistral and Ministral: Llama's blocks with sliding windows. Defaults are those of
 * transformers' MistralConfig and MinistralConfig (4.57). */
#include "model/family.h"

/* Without layer_types all layers have the window. transformers reads a Mistral config with
 * layer_types as a Ministral one. */
static ps_status read_windows(const ps__config_reader *r, ps_model_config *c) {
  uint32_t sliding;
  bool given = false;
  PS_TRY(ps__config_window(r, 4096, &c->window));
  PS_TRY(ps__config_layer_types(r, c, PS_LAYER_WINDOW, &given, &sliding));
  PS_TRY(ps__config_needs_window(r, c, sliding, "sliding_window is null"));
  for (uint32_t i = 0; !given && c->window && i < c->n_layers; i++)
    c->layer_flags[i] = PS_LAYER_WINDOW;
  return PS_OK;
}

static const char *const own_keys[] = {"sliding_window", NULL};

const ps__family ps__family_mistral = {.model_type = "mistral",
                                       .architecture = "MistralForCausalLM",
                                       .default_kv_heads = 8,
                                       .own_keys = own_keys,
                                       .read = read_windows,
                                       .decoder = &ps__decoder_llama};
const ps__family ps__family_ministral = {.model_type = "ministral",
                                         .architecture = "MinistralForCausalLM",
                                         .default_kv_heads = 8,
                                         .own_keys = own_keys,
                                         .read = read_windows,
                                         .decoder = &ps__decoder_llama};
