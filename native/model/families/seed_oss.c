/* seed_oss.c - Seed-OSS: Llama's block with biases on q, k and v. Defaults are those of
 * transformers' SeedOssConfig (5.24), dropout among them. */
#include "model/family.h"

static ps_status read_seed_oss(const ps__config_reader *r, ps_model_config *c) {
  static const char *const dropouts[] = {"attention_dropout", "residual_dropout"};
  uint32_t out_bias = 0;
  PS_TRY(ps__config_bool(r, r->j, "attention_out_bias", false, &out_bias));
  if (out_bias)
    return ps__fail(PS_EFORMAT, "%s: attention_out_bias is true: a bias on o_proj is not supported",
                    r->path);
  for (size_t i = 0; i < 2; i++) {
    double x = 0;
    PS_TRY(ps__config_number(r, r->j, dropouts[i], 0.1, &x));
    if (!(x >= 0 && x <= 1))
      return ps__fail(PS_EFORMAT, "%s: %s is %g: it must be 0 to 1", r->path, dropouts[i], x);
    c->dropout = (float)x > c->dropout ? (float)x : c->dropout;
  }
  return ps__config_full_attention(r, c);
}

const ps__family ps__family_seed_oss = {.model_type = "seed_oss",
                                        .architecture = "SeedOssForCausalLM",
                                        .has_default_pad = true,
                                        .default_pad = 1,
                                        .default_kv_heads = 8,
                                        .default_head_dim = 128,
                                        .has_qkv_bias_only = true,
                                        .read = read_seed_oss,
                                        .decoder = &ps__decoder_llama};
