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

/* Each decoder_sparse_step-th layer has experts, but for those of mlp_only_layers. */
static ps_status read_sparse_layers(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *dense = ps__config_field(r->j, "mlp_only_layers");
  uint32_t every = 0;
  PS_TRY(ps__config_uint(r, r->j, "decoder_sparse_step", 1, &every));
  PS_TRY(ps__config_in_range(r->path, "decoder_sparse_step", every, 1, UINT32_MAX));
  if (dense && ps__json_type(dense) != PS_JSON_ARRAY)
    return ps__fail(PS_EFORMAT, "%s: mlp_only_layers is %s: it must be a list", r->path,
                    ps__config_kind(dense));
  for (uint32_t i = 0; i < c->n_layers; i++)
    if ((i + 1) % every == 0)
      c->layer_flags[i] |= PS_LAYER_EXPERTS;
  for (size_t i = 0; i < ps__json_length(dense); i++) {
    const ps__json *x = ps__json_at(dense, i);
    uint64_t layer;
    if (ps__json_type(x) != PS_JSON_NUMBER || !ps__json_uint64(x, &layer) || layer >= c->n_layers)
      return ps__fail(PS_EFORMAT,
                      "%s: mlp_only_layers[%zu] must be a layer below num_hidden_layers, %u",
                      r->path, i, c->n_layers);
    c->layer_flags[layer] &= (uint8_t)~PS_LAYER_EXPERTS;
  }
  return PS_OK;
}

static ps_status read_qwen3_moe(const ps__config_reader *r, ps_model_config *c) {
  uint32_t windows;
  PS_TRY(ps__config_full_attention(r, c));
  PS_TRY(ps__config_bool(r, r->j, "use_sliding_window", false, &windows));
  if (windows)
    return ps__fail(PS_EFORMAT,
                    "%s: use_sliding_window is true: windows are not supported with experts of "
                    "this family, set it to false",
                    r->path);
  PS_TRY(read_sparse_layers(r, c));
  PS_TRY(ps__config_experts(r, &defaults, c));
  if (ps__n_sparse(c))
    return PS_OK;
  return ps__fail(PS_EFORMAT,
                  "%s: no layer has experts by mlp_only_layers and decoder_sparse_step: name the "
                  "model qwen3",
                  r->path);
}

static const ps__half_use attention = {.kind = &ps__attention,
                                       .names = &ps__attention_usual,
                                       .norm = "input_layernorm.weight"},
                          second[] = {{.flags = PS_LAYER_EXPERTS,
                                       .kind = &ps__experts,
                                       .names = &ps__experts_usual,
                                       .norm = "post_attention_layernorm.weight"},
                                      {.kind = &ps__mlp,
                                       .names = &ps__mlp_usual,
                                       .norm = "post_attention_layernorm.weight"}};

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
