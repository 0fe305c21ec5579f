/* smollm3.c - SmolLM3: Llama's block; some layers have no RoPE, and may have a window instead.
 * Defaults are those of transformers' SmolLM3Config (4.57). */
#include "model/family.h"

/* no_rope_layers says for each layer whether it HAS RoPE; without it each interval-th has none. */
static ps_status read_rope_layers(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *list = ps__config_field(r->j, "no_rope_layers");
  uint32_t interval = 0;
  PS_TRY(ps__config_uint(r, r->j, "no_rope_layer_interval", 4, &interval));
  PS_TRY(ps__config_in_range(r->path, "no_rope_layer_interval", interval, 1, UINT32_MAX));
  if (list && ps__json_type(list) != PS_JSON_ARRAY)
    return ps__fail(PS_EFORMAT, "%s: no_rope_layers is %s: it must be a list", r->path,
                    ps__config_kind(list));
  if (list && ps__json_length(list) != c->n_layers)
    return ps__fail(PS_EFORMAT,
                    "%s: no_rope_layers has %zu entries: it must have num_hidden_layers, %u",
                    r->path, ps__json_length(list), c->n_layers);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const ps__json *x = ps__json_at(list, i);
    uint64_t has_rope = (i + 1) % interval != 0;
    if (list &&
        (ps__json_type(x) != PS_JSON_NUMBER || !ps__json_uint64(x, &has_rope) || has_rope > 1))
      return ps__fail(PS_EFORMAT,
                      "%s: no_rope_layers[%u] must be 1 for a layer with RoPE or 0 for one without",
                      r->path, i);
    if (!has_rope)
      c->layer_flags[i] |= PS_LAYER_NO_ROPE;
  }
  return PS_OK;
}

/* Without layer_types the layers without RoPE have the window, if there is one. */
static ps_status read_smollm3(const ps__config_reader *r, ps_model_config *c) {
  uint32_t use, sliding;
  bool given = false;
  PS_TRY(read_rope_layers(r, c));
  PS_TRY(ps__config_bool(r, r->j, "use_sliding_window", false, &use));
  PS_TRY(ps__config_window(r, 0, &c->window));
  if (!use)
    c->window = 0;
  PS_TRY(ps__config_layer_types(r, c, PS_LAYER_WINDOW, &given, &sliding));
  PS_TRY(ps__config_needs_window(r, c, sliding,
                                 use ? "sliding_window is null" : "use_sliding_window is false"));
  for (uint32_t i = 0; !given && c->window && i < c->n_layers; i++)
    if (c->layer_flags[i] & PS_LAYER_NO_ROPE)
      c->layer_flags[i] |= PS_LAYER_WINDOW;
  return PS_OK;
}

static const char *const own_keys[] = {"no_rope_layers", "no_rope_layer_interval",
                                       "use_sliding_window", "sliding_window", NULL};

const ps__family ps__family_smollm3 = {.model_type = "smollm3",
                                       .architecture = "SmolLM3ForCausalLM",
                                       .has_default_pad = true,
                                       .default_pad = 128004,
                                       .default_kv_heads = 4,
                                       .default_rope_theta = 2e6,
                                       .tied_by_default = true,
                                       .own_keys = own_keys,
                                       .read = read_smollm3,
                                       .decoder = &ps__decoder_llama};
