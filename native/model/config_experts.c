/* config_experts.c - what families with experts read of config.json. */
#include "model/family.h"
#include <string.h>

/* transformers writes either name. */
static ps_status read_count(const ps__config_reader *r, const ps__experts_defaults *d,
                            uint32_t *out) {
  static const char *const keys[] = {"num_experts", "num_local_experts"};
  const uint32_t fallback = d->n_experts;
  uint32_t n[2];
  if (d->count_key)
    return ps__config_uint(r, r->j, d->count_key, fallback, out);
  for (int i = 0; i < 2; i++)
    PS_TRY(ps__config_uint(r, r->j, keys[i], fallback, &n[i]));
  const bool there[] = {ps__config_field(r->j, keys[0]), ps__config_field(r->j, keys[1])};
  if (there[0] && there[1] && n[0] != n[1])
    return ps__fail(PS_EFORMAT, "%s: num_experts is %u and num_local_experts %u: they must agree",
                    r->path, n[0], n[1]);
  *out = there[1] ? n[1] : n[0];
  return PS_OK;
}

/* What changes the math and is not computed. */
static ps_status refuse(const ps__config_reader *r, const ps__experts_defaults *d) {
  static const char *const keys[] = {
      "router_jitter_noise", "capacity_factor", "expert_capacity", "moe_capacity_factor",
      "expert_dropout", "num_shared_experts", "shared_expert_intermediate_size",
      /* which families with shared experts read */
      "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor"};
  static const double neutral[] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1};
  for (size_t i = 0; i < (d->has_shared ? 7 : sizeof keys / sizeof *keys); i++) {
    double x = 0;
    PS_TRY(ps__config_number(r, r->j, keys[i], neutral[i], &x));
    if (d->shared_dim && !strcmp(keys[i], "shared_expert_intermediate_size"))
      continue;
    if (x != neutral[i] && x != 0)
      return ps__fail(PS_EFORMAT, "%s: %s is %g: it is not supported, remove it or set it to %g",
                      r->path, keys[i], x, neutral[i]);
  }
  return PS_OK;
}

ps_status ps__config_experts(const ps__config_reader *r, const ps__experts_defaults *d,
                             ps_model_config *c) {
  const char *used_key = d->used_key ? d->used_key : "num_experts_per_tok";
  double aux = 0;
  uint32_t silent;
  PS_TRY(refuse(r, d));
  PS_TRY(read_count(r, d, &c->n_experts));
  PS_TRY(ps__config_uint(r, r->j, used_key, d->n_used, &c->n_experts_used));
  PS_TRY(ps__config_number(r, r->j, "router_aux_loss_coef", d->aux_loss, &aux));
  PS_TRY(ps__config_bool(r, r->j, "output_router_logits", false, &silent)); /* means nothing here */
  if (!(aux >= 0 && aux <= PS_MAX_ROUTER_LOSS))
    return ps__fail(PS_EFORMAT, "%s: router_aux_loss_coef is %g: it must be 0 to %g", r->path, aux,
                    PS_MAX_ROUTER_LOSS);
  c->router_aux_loss = (float)aux;
  c->norm_topk_prob = 1;
  if (!d->always_renorm)
    PS_TRY(ps__config_bool(r, r->j, "norm_topk_prob", d->renorm_by_default, &c->norm_topk_prob));
  if (d->shared_dim)
    PS_TRY(
        ps__config_uint(r, r->j, "shared_expert_intermediate_size", d->shared_dim, &c->shared_dim));
  if (d->dim_key)
    return ps__config_uint(r, r->j, d->dim_key, d->dim, &c->expert_dim);
  c->expert_dim = c->ffn_dim;
  return PS_OK;
}

ps_status ps__config_sparse_layers(const ps__config_reader *r, ps_model_config *c) {
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
