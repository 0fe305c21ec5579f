/* granite.c - Granite: Llama's block with multipliers of the embedding, the attention scores, what
 * a layer adds to the residual stream, and the logits. Defaults are those of transformers'
 * GraniteConfig (4.57): 1, for the attention scores too. */
#include "model/family.h"

static ps_status read_granite(const ps__config_reader *r, ps_model_config *c) {
  double embedding = 0, attention = 0, residual = 0, logits = 0;
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(ps__config_positive(r, "embedding_multiplier", 1, &embedding));
  PS_TRY(ps__config_positive(r, "attention_multiplier", 1, &attention));
  PS_TRY(ps__config_positive(r, "residual_multiplier", 1, &residual));
  PS_TRY(ps__config_positive(r, "logits_scaling", 1, &logits));
  if (logits < 1e-6)
    return ps__fail(PS_EFORMAT, "%s: logits_scaling is %g: it must be 1e-6 to 1e6", r->path,
                    logits);
  c->embedding_scale = (float)embedding;
  c->attention_scale = (float)attention;
  c->residual_scale = (float)residual;
  c->logit_scale = (float)(1.0 / logits);
  return PS_OK;
}

static const char *const own_keys[] = {"embedding_multiplier", "attention_multiplier",
                                       "residual_multiplier", "logits_scaling", NULL};

const ps__family ps__family_granite = {.model_type = "granite",
                                       .architecture = "GraniteForCausalLM",
                                       .classifier_of = "",
                                       .own_keys = own_keys,
                                       .read = read_granite,
                                       .decoder = &ps__decoder_llama};
