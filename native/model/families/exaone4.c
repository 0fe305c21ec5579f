/* exaone4.c - EXAONE 4: norms after attention and MLP instead of before, norms on the heads of q
 * and k. Where there is a sliding window, all layers but every fourth have it, and the others have
 * no RoPE. Defaults are those of transformers' Exaone4Config (5.24). */
#include "model/family.h"

static ps_status read_exaone4(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *pattern = ps__config_field(r->j, "sliding_window_pattern");
  uint32_t every = 4, sliding;
  bool given = false;
  PS_TRY(ps__config_window(r, 4096, &c->window));
  PS_TRY(ps__config_layer_types(r, c, PS_LAYER_WINDOW, &given, &sliding));
  PS_TRY(ps__config_needs_window(r, c, sliding, "sliding_window is null"));
  if (!c->window)
    return PS_OK;
  if (!given && pattern && ps__json_type(pattern) == PS_JSON_STRING)
    return ps__fail(PS_EFORMAT,
                    "%s: sliding_window_pattern is a string: give layer_types in its place, as "
                    "transformers needs it too",
                    r->path);
  if (!given)
    PS_TRY(ps__config_uint(r, r->j, "sliding_window_pattern", 4, &every));
  PS_TRY(ps__config_in_range(r->path, "sliding_window_pattern", every, 1, UINT32_MAX));
  for (uint32_t i = 0; i < c->n_layers; i++) {
    if (!given && (i + 1) % every)
      c->layer_flags[i] |= PS_LAYER_WINDOW;
    if (!(c->layer_flags[i] & PS_LAYER_WINDOW))
      c->layer_flags[i] |= PS_LAYER_NO_ROPE;
  }
  return PS_OK;
}

static const char *const own_keys[] = {"sliding_window", "sliding_window_pattern", NULL};

const ps__family ps__family_exaone4 = {.model_type = "exaone4",
                                       .architecture = "Exaone4ForCausalLM",
                                       .default_kv_heads = 32,
                                       .default_norm_eps = 1e-5,
                                       .qk_norm = 1,
                                       .own_keys = own_keys,
                                       .read = read_exaone4,
                                       .decoder = &ps__decoder_olmo2};
