/* config_latent.c - what families with latent attention (MLA) read of config.json: its sizes, and
 * experts with shared ones, groups and a scale, as DeepSeek's models have them. */
#include "model/family.h"
#include <math.h>
#include <string.h>

ps_status ps__config_latent(const ps__config_reader *r, const ps__latent_defaults *d,
                            ps_model_config *c) {
  uint32_t nope = 0, head_dim = 0;
  PS_TRY(ps__config_uint(r, r->j, "num_key_value_heads", c->n_heads, &c->n_kv_heads));
  PS_TRY(ps__config_uint(r, r->j, "kv_lora_rank", d->kv_rank, &c->kv_rank));
  PS_TRY(ps__config_uint(r, r->j, "q_lora_rank", 0, &c->q_rank));
  if (!ps__json_get(r->j, "q_lora_rank"))
    c->q_rank = d->q_rank; /* null stands for none */
  else if (ps__config_field(r->j, "q_lora_rank") && !c->q_rank)
    return ps__fail(PS_EFORMAT, "%s: q_lora_rank is 0: it must be above 0, or null for none",
                    r->path);
  PS_TRY(ps__config_uint(r, r->j, "qk_nope_head_dim", d->nope_dim, &nope));
  PS_TRY(ps__config_uint(r, r->j, "qk_rope_head_dim", d->rotary_dim, &c->rope.rotary_dim));
  PS_TRY(ps__config_uint(r, r->j, "v_head_dim", d->value_dim, &c->value_dim));
  PS_TRY(ps__config_in_range(r->path, "kv_lora_rank", c->kv_rank, 1, UINT32_MAX));
  PS_TRY(ps__config_in_range(r->path, "qk_nope_head_dim", nope, 1, 1 << 12));
  PS_TRY(
      ps__config_in_range(r->path, "qk_rope_head_dim", c->rope.rotary_dim, 2, 2 * PS_ROPE_PAIRS));
  if (c->rope.rotary_dim % 2)
    return ps__fail(PS_EFORMAT, "%s: qk_rope_head_dim is %u: it must be even, RoPE turns pairs",
                    r->path, c->rope.rotary_dim);
  c->head_dim = nope + c->rope.rotary_dim;
  /* transformers writes the part that RoPE turns under this name */
  PS_TRY(ps__config_uint(r, r->j, "head_dim", c->rope.rotary_dim, &head_dim));
  if (head_dim != c->rope.rotary_dim && head_dim != c->head_dim)
    return ps__fail(PS_EFORMAT, "%s: head_dim is %u: it must be qk_rope_head_dim, %u, or absent",
                    r->path, head_dim, c->rope.rotary_dim);
  return PS_OK;
}

/* YaRN makes scores larger by the square of its mscale (arXiv 2309.00071, section 3.4). */
void ps__config_latent_scale(ps_model_config *c) {
  const ps_rope *s = &c->rope;
  if (s->kind != PS_ROPE_YARN || s->mscale_all_dim == 0)
    return;
  const double m = s->factor <= 1 ? 1 : 0.1 * s->mscale_all_dim * log(s->factor) + 1;
  c->attention_scale = (float)(m * m / sqrt(c->head_dim));
}

/* Experts of all layers from first_k_dense_replace on. */
static ps_status read_sparse_layers(const ps__config_reader *r, const ps__latent_defaults *d,
                                    ps_model_config *c) {
  uint32_t dense = 0, every = 0;
  PS_TRY(ps__config_uint(r, r->j, "first_k_dense_replace", d->n_dense, &dense));
  PS_TRY(ps__config_uint(r, r->j, "moe_layer_freq", 1, &every));
  PS_TRY(ps__config_in_range(r->path, "moe_layer_freq", every, 1, 1));
  if (dense >= c->n_layers)
    return ps__fail(PS_EFORMAT,
                    "%s: first_k_dense_replace is %u: it must be below num_hidden_layers, %u, as a "
                    "model of this family has experts",
                    r->path, dense, c->n_layers);
  for (uint32_t i = dense; i < c->n_layers; i++)
    c->layer_flags[i] |= PS_LAYER_EXPERTS;
  return PS_OK;
}

ps_status ps__config_shared_experts(const ps__config_reader *r, const ps__latent_defaults *d,
                                    const ps__experts_defaults *e, ps_model_config *c) {
  uint32_t n_shared = 0;
  double scale = 0;
  PS_TRY(read_sparse_layers(r, d, c));
  PS_TRY(ps__config_experts(r, e, c));
  PS_TRY(ps__config_bool(r, r->j, "norm_topk_prob", d->norm_topk_prob, &c->norm_topk_prob));
  PS_TRY(ps__config_uint(r, r->j, "n_shared_experts", d->n_shared, &n_shared));
  PS_TRY(ps__config_positive(r, "routed_scaling_factor", d->router_scale, &scale));
  PS_TRY(ps__config_uint(r, r->j, "n_group", d->n_groups, &c->n_expert_groups));
  PS_TRY(ps__config_uint(r, r->j, "topk_group", d->n_groups_used, &c->n_groups_used));
  PS_TRY(ps__config_in_range(r->path, "n_shared_experts", n_shared, 1, 1024));
  PS_TRY(ps__config_in_range(r->path, "moe_intermediate_size", c->expert_dim, 1, 1 << 22));
  PS_TRY(ps__config_in_range(r->path, "n_shared_experts x moe_intermediate_size",
                             n_shared * c->expert_dim, 1, 1 << 22));
  c->shared_dim = n_shared * c->expert_dim;
  c->router_scale = (float)scale;
  if (c->n_expert_groups == 1 && c->n_groups_used == 1)
    c->n_expert_groups = c->n_groups_used = 0; /* a choice from all */
  return PS_OK;
}
