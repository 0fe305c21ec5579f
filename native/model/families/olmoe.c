/* olmoe.c - OLMoE: Llama's block with experts in all layers and RMSNorm over the whole rows of q
 * and k. Defaults are those of transformers' OlmoeConfig (5.24). */
#include "model/attention.h"
#include "model/experts.h"
#include "model/family.h"

static const ps__experts_defaults defaults = {.n_experts = 64, .n_used = 8, .aux_loss = 0.01};

static ps_status read_olmoe(const ps__config_reader *r, ps_model_config *c) {
  double clip = 0;
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(ps__config_number(r, r->j, "clip_qkv", 0, &clip));
  if (clip != 0)
    return ps__fail(PS_EFORMAT,
                    "%s: clip_qkv is %g: clipping q, k and v is not supported, set it to null",
                    r->path, clip);
  for (uint32_t i = 0; i < c->n_layers; i++)
    c->layer_flags[i] = PS_LAYER_EXPERTS;
  return ps__config_experts(r, &defaults, c);
}

static const ps__half_use attention = PS__FIRST_HALF(0, ps__attention, ps__attention_usual),
                          experts = PS__SECOND_HALF(0, ps__experts, ps__experts_usual);

static const ps__decoder decoder = {.half = {&attention, &experts}};

static const char *const own_keys[] = {"clip_qkv", NULL};

const ps__family ps__family_olmoe = {.model_type = "olmoe",
                                     .architecture = "OlmoeForCausalLM",
                                     .classifier_of = "",
                                     .has_default_pad = true,
                                     .default_pad = 1,
                                     .default_norm_eps = 1e-5,
                                     .qk_norm = 2,
                                     .has_experts = true,
                                     .own_keys = own_keys,
                                     .read = read_olmoe,
                                     .decoder = &decoder};
