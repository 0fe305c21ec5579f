/* qwen3_moe.c - Qwen3-MoE: Qwen3's block; some layers have experts, the others an MLP. Defaults are
 * those of transformers' Qwen3MoeConfig (5.24). */
#include "model/attention.h"
#include "model/experts.h"
#include "model/family.h"
#include "model/mlp.h"

static const ps__experts_defaults defaults = {.n_experts = 128,
                                              .n_used = 8,
                                              .dim_key = "moe_intermediate_size",
                                              .dim = 768,
                                              .aux_loss = 0.001};

static ps_status read_qwen3_moe(const ps__config_reader *r, ps_model_config *c) {
  uint32_t windows;
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(ps__config_bool(r, r->j, "use_sliding_window", false, &windows));
  if (windows)
    return ps__fail(PS_EFORMAT,
                    "%s: use_sliding_window is true: windows are not supported with experts of "
                    "this family, set it to false",
                    r->path);
  PS_TRY(ps__config_sparse_layers(r, c));
  PS_TRY(ps__config_experts(r, &defaults, c));
  if (ps__n_sparse(c))
    return PS_OK;
  return ps__fail(PS_EFORMAT,
                  "%s: no layer has experts by mlp_only_layers and decoder_sparse_step: name the "
                  "model qwen3",
                  r->path);
}

static const ps__half_use attention = PS__FIRST_HALF(0, ps__attention, ps__attention_usual),
                          second[] = {
                              PS__SECOND_HALF(PS_LAYER_EXPERTS, ps__experts, ps__experts_usual),
                              PS__SECOND_HALF(0, ps__mlp, ps__mlp_usual)};

static const ps__decoder decoder = {.half = {&attention, second}};

static const char *const own_keys[] = {"use_sliding_window", "sliding_window", NULL};

const ps__family ps__family_qwen3_moe = {.model_type = "qwen3_moe",
                                         .architecture = "Qwen3MoeForCausalLM",
                                         .default_kv_heads = 4,
                                         .qk_norm = 1,
                                         .has_experts = true,
                                         .own_keys = own_keys,
                                         .read = read_qwen3_moe,
                                         .decoder = &decoder};
