/* params.c - the model's tensors, and where each lies in its unit.
 *
 * A unit is one run of elements. RUNS follow each other, each starting at a multiple of 64
 * elements (128 or 256 bytes) with zero padding before it; the tensors of a run follow each
 * other without a gap, so that q, k, v (and gate, up) are one matrix:
 *   embedding  embed_tokens
 *   block      input_layernorm | q k v | q k v biases | q_norm | k_norm | o |
 *              post_attention_layernorm | gate up | down
 *   head       norm | lm_head unless tied
 * The config must have passed ps_model_config_check(): then no product here overflows. */
#include "model/family.h"
#include <inttypes.h>
#include <string.h>

enum { ALIGN_ELEMENTS = 64 };

/* The parameters of a block; 0: the configuration's family is unknown (ps_model_config_check()). */
static uint32_t block_layout(const ps_model_config *c, ps__param_def s[PS__MAX_UNIT_PARAMS]) {
  const ps__family *family = ps__family_at(c->family);
  return family && family->block_params ? family->block_params(c, s) : 0;
}

static uint32_t unit_layout(const ps_model_config *c, uint32_t unit,
                            ps__param_def s[PS__MAX_UNIT_PARAMS]) {
  if (unit == 0) {
    s[0] = (ps__param_def){
        "model.embed_tokens.weight", PS_PARAM_MATRIX, 2, c->vocab_size, c->dim, false};
    return 1;
  }
  if (unit <= c->n_layers)
    return block_layout(c, s);
  s[0] = (ps__param_def){"model.norm.weight", PS_PARAM_NORM, 1, c->dim, 1, false};
  s[1] = (ps__param_def){"lm_head.weight", PS_PARAM_MATRIX, 2, c->vocab_size, c->dim, false};
  return c->tied_embeddings ? 1 : 2;
}

static uint64_t round_up(uint64_t n) {
  return (n + ALIGN_ELEMENTS - 1) / ALIGN_ELEMENTS * ALIGN_ELEMENTS;
}

/* Offset of tensor @k of a layout of @n; k == n gives the end. */
static uint64_t param_offset(const ps__param_def *s, uint32_t n, uint32_t k) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < k; i++)
    at = (s[i].fused ? at : round_up(at)) + s[i].rows * s[i].cols;
  return k < n && s[k].fused ? at : round_up(at);
}

uint32_t ps_model_n_units(const ps_model_config *cfg) { return cfg->n_layers + 2; }

uint64_t ps_model_unit_elements(const ps_model_config *cfg, uint32_t unit) {
  ps__param_def s[PS__MAX_UNIT_PARAMS];
  if (unit >= ps_model_n_units(cfg))
    return 0;
  uint32_t n = unit_layout(cfg, unit, s);
  return param_offset(s, n, n);
}

uint32_t ps_model_n_params(const ps_model_config *cfg) {
  ps__param_def s[PS__MAX_UNIT_PARAMS];
  return 1 + cfg->n_layers * block_layout(cfg, s) + (cfg->tied_embeddings ? 1 : 2);
}

ps_status ps_model_param(const ps_model_config *cfg, uint32_t idx, ps_param_info *out) {
  ps__param_def s[PS__MAX_UNIT_PARAMS];
  uint32_t per_block = block_layout(cfg, s), total = ps_model_n_params(cfg), unit = 0, k = 0;
  if (!per_block)
    return ps__fail(PS_EINVAL, "family %u of the model's configuration is unknown", cfg->family);
  if (idx >= total)
    return ps__fail(PS_EINVAL, "parameter %u was asked for: the model has %u", idx, total);
  if (idx > 0) {
    unit = 1 + (idx - 1) / per_block;
    if (unit > cfg->n_layers)
      unit = cfg->n_layers + 1;
    k = idx - 1 - (unit - 1) * per_block;
  }
  uint32_t n = unit_layout(cfg, unit, s);
  ps_param_info p = {
      .unit = unit, .role = s[k].role, .n_dims = s[k].n_dims, .shape = {s[k].rows, s[k].cols}};
  p.n = s[k].rows * s[k].cols;
  p.offset = param_offset(s, n, k);
  if (unit >= 1 && unit <= cfg->n_layers)
    snprintf(p.name, sizeof p.name, "model.layers.%u.%s", unit - 1, s[k].name);
  else
    snprintf(p.name, sizeof p.name, "%s", s[k].name);
  *out = p;
  return PS_OK;
}

uint64_t ps_model_n_elements(const ps_model_config *cfg) {
  ps__param_def s[PS__MAX_UNIT_PARAMS];
  uint64_t sum = 0;
  const uint32_t unit[3] = {0, 1, cfg->n_layers + 1};
  const uint64_t times[3] = {1, cfg->n_layers, 1};
  for (int i = 0; i < 3; i++) {
    uint32_t n = unit_layout(cfg, unit[i], s);
    for (uint32_t k = 0; k < n; k++)
      sum += times[i] * s[k].rows * s[k].cols;
  }
  return sum;
}

/* docs/design.md, "Metrics": S seqlen, D dim, A heads*head_dim, K kv_heads*head_dim, F ffn dim,
 * V vocab, L layers. */
ps_status ps_model_flops(const ps_model_config *cfg, uint64_t seq_len, ps_flops *out) {
  if (seq_len == 0)
    return ps__fail(PS_EINVAL, "seq_len is 0: it must be at least 1");
  double s = (double)seq_len, d = cfg->dim, a = (double)cfg->n_heads * cfg->head_dim,
         k = (double)cfg->n_kv_heads * cfg->head_dim;
  ps_flops f = {.layer_matmul = 2 * s * (2 * d * a + 2 * d * k + 3 * d * cfg->ffn_dim),
                .attn_fwd = 0.5 * 4 * s * s * a,
                .attn_bwd = 0.5 * 8 * s * s * a,
                .head = 6 * s * d * cfg->vocab_size};
  f.sequence = cfg->n_layers * (3 * f.layer_matmul + f.attn_fwd + f.attn_bwd) + f.head;
  *out = f;
  return PS_OK;
}
