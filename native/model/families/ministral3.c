/* ministral3.c - Ministral 3: Mistral's block; past the original context q grows with the position.
 * Defaults are those of transformers' Ministral3Config (5.24). */
#include "model/family.h"

/* What absent parameters of RoPE mean. */
static const ps_rope default_rope = {.kind = PS_ROPE_YARN,
                                     .original_positions = 16384,
                                     .theta = 1e6,
                                     .factor = 16,
                                     .beta_fast = 32,
                                     .beta_slow = 1,
                                     .mscale = 1,
                                     .mscale_all_dim = 1};

static ps_status read_ministral3(const ps__config_reader *r, ps_model_config *c) {
  static const char BETA[] = "llama_4_scaling_beta";
  const ps__json *rope = ps__config_field(r->j, "rope_parameters");
  if (!rope)
    rope = ps__config_field(r->j, "rope_scaling");
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(ps__config_window(r, 0, &c->window));
  for (uint32_t i = 0; c->window && i < c->n_layers; i++)
    c->layer_flags[i] = PS_LAYER_WINDOW;
  if (!rope) {
    c->rope = default_rope;
    c->position_beta = 0.1;
    return PS_OK;
  }
  if (!ps__config_field(rope, BETA))
    return ps__fail(PS_EFORMAT, "%s: %s is missing in RoPE's parameters: the family needs it",
                    r->path, BETA);
  PS_TRY(ps__config_number(r, rope, BETA, 0, &c->position_beta));
  return ps__config_uint(r, rope, "original_max_position_embeddings", 0,
                         &c->rope.original_positions);
}

static const char *const own_keys[] = {"sliding_window", NULL};

const ps__family ps__family_ministral3 = {.model_type = "ministral3",
                                          .architecture = "Ministral3ForCausalLM",
                                          .has_default_pad = true,
                                          .default_pad = 11,
                                          .default_kv_heads = 8,
                                          .default_head_dim = 128,
                                          .default_rope_theta = 1e6,
                                          .default_norm_eps = 1e-5,
                                          .is_of_5 = true,
                                          .own_keys = own_keys,
                                          .read = read_ministral3,
                                          .decoder = &ps__decoder_llama};
