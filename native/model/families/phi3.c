/* phi3.c - Phi-3 and Phi-4: Llama's block, on disk with q, k, v as one matrix and gate, up as one;
 * longrope, RoPE on a part of the head, a window in all layers. Defaults are those of transformers'
 * Phi3Config (4.57). */
#include "model/attention.h"
#include "model/family.h"
#include "model/mlp.h"

static ps_status read_phi3(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(ps__config_window(r, 0, &c->window));
  for (uint32_t i = 0; c->window && i < c->n_layers; i++)
    c->layer_flags[i] = PS_LAYER_WINDOW;
  return PS_OK;
}

static const ps__attention_names attention_names = {.q = "self_attn.qkv_proj.weight",
                                                    .o = "self_attn.o_proj.weight"};
static const ps__mlp_names mlp_names = {.gate = "mlp.gate_up_proj.weight",
                                        .down = "mlp.down_proj.weight"};
static const ps__half_use attention = PS__FIRST_HALF(0, ps__attention, attention_names),
                          mlp = PS__SECOND_HALF(0, ps__mlp, mlp_names);

static const ps__decoder decoder = {.half = {&attention, &mlp}};

static const char *const own_keys[] = {"sliding_window", NULL};
static const char *const longrope_names[] = {"su", "yarn", NULL};

const ps__family ps__family_phi3 = {.model_type = "phi3",
                                    .architecture = "Phi3ForCausalLM",
                                    .has_default_pad = true,
                                    .default_pad = 32000,
                                    .default_original_positions = 4096,
                                    .default_norm_eps = 1e-5,
                                    .has_partial_rope = true,
                                    .has_type_alone = true,
                                    .longrope_names = longrope_names,
                                    .own_keys = own_keys,
                                    .read = read_phi3,
                                    .decoder = &decoder};
