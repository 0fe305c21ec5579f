/* phi3.c - Phi-3 and Phi-4: Llama's block, on disk with q, k, v as one matrix and gate, up as one;
 * longrope, RoPE on a part of the head, a window in all layers. Defaults are those of transformers'
 * Phi3Config (4.57). */
#include "model/decoder.h"
#include "model/family.h"

static ps_status read_phi3(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(ps__config_window(r, 0, &c->window));
  for (uint32_t i = 0; c->window && i < c->n_layers; i++)
    c->layer_flags[i] = PS_LAYER_WINDOW;
  return PS_OK;
}

static ps_status describe(ps_model *m) {
  static const ps__decoder names = {
      PS__DECODER_PRE_NORMS, .q = "self_attn.qkv_proj.weight", .o = "self_attn.o_proj.weight",
      .gate = "mlp.gate_up_proj.weight", .down = "mlp.down_proj.weight"};
  return ps__describe_decoder(m, &names);
}

static const char *const own_keys[] = {"sliding_window", NULL};
static const char *const longrope_names[] = {"su", "yarn", NULL};

const ps__family ps__family_phi3 = {.model_type = "phi3",
                                    .architecture = "Phi3ForCausalLM",
                                    .has_default_pad = true,
                                    .default_pad = 32000,
                                    .default_original_positions = 4096,
                                    .default_norm_eps = 1e-5,
                                    .has_partial_rope = true,
                                    .longrope_names = longrope_names,
                                    .own_keys = own_keys,
                                    .read = read_phi3,
                                    .describe = describe};
