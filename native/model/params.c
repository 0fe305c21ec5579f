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
#include <penstock/model.h>

#include "core/core.h"
#include <inttypes.h>
#include <string.h>

enum { ALIGN_ELEMENTS = 64, MAX_UNIT_PARAMS = 16 };

/* One tensor of a unit's layout: which name, its shape, and whether it starts a new run. */
typedef struct slot {
  const char *name;
  uint32_t role, n_dims;
  uint64_t rows, cols;
  bool fused; /* follows the slot before it without a gap */
} slot;

static uint32_t block_layout(const ps_model_config *c, slot s[MAX_UNIT_PARAMS]) {
  uint64_t d = c->dim, f = c->ffn_dim, a = (uint64_t)c->n_heads * c->head_dim,
           k = (uint64_t)c->n_kv_heads * c->head_dim;
  uint32_t n = 0;
  s[n++] = (slot){"input_layernorm.weight", PS_PARAM_NORM, 1, d, 1, false};
  s[n++] = (slot){"self_attn.q_proj.weight", PS_PARAM_MATRIX, 2, a, d, false};
  s[n++] = (slot){"self_attn.k_proj.weight", PS_PARAM_MATRIX, 2, k, d, true};
  s[n++] = (slot){"self_attn.v_proj.weight", PS_PARAM_MATRIX, 2, k, d, true};
  if (c->qkv_bias) {
    s[n++] = (slot){"self_attn.q_proj.bias", PS_PARAM_BIAS, 1, a, 1, false};
    s[n++] = (slot){"self_attn.k_proj.bias", PS_PARAM_BIAS, 1, k, 1, true};
    s[n++] = (slot){"self_attn.v_proj.bias", PS_PARAM_BIAS, 1, k, 1, true};
  }
  if (c->qk_norm) {
    s[n++] = (slot){"self_attn.q_norm.weight", PS_PARAM_NORM, 1, c->head_dim, 1, false};
    s[n++] = (slot){"self_attn.k_norm.weight", PS_PARAM_NORM, 1, c->head_dim, 1, false};
  }
  s[n++] = (slot){"self_attn.o_proj.weight", PS_PARAM_MATRIX, 2, d, a, false};
  s[n++] = (slot){"post_attention_layernorm.weight", PS_PARAM_NORM, 1, d, 1, false};
  s[n++] = (slot){"mlp.gate_proj.weight", PS_PARAM_MATRIX, 2, f, d, false};
  s[n++] = (slot){"mlp.up_proj.weight", PS_PARAM_MATRIX, 2, f, d, true};
  s[n++] = (slot){"mlp.down_proj.weight", PS_PARAM_MATRIX, 2, d, f, false};
  return n;
}

static uint32_t unit_layout(const ps_model_config *c, uint32_t unit, slot s[MAX_UNIT_PARAMS]) {
  if (unit == 0) {
    s[0] = (slot){"model.embed_tokens.weight", PS_PARAM_MATRIX, 2, c->vocab_size, c->dim, false};
    return 1;
  }
  if (unit <= c->n_layers)
    return block_layout(c, s);
  s[0] = (slot){"model.norm.weight", PS_PARAM_NORM, 1, c->dim, 1, false};
  s[1] = (slot){"lm_head.weight", PS_PARAM_MATRIX, 2, c->vocab_size, c->dim, false};
  return c->tied_embeddings ? 1 : 2;
}

static uint64_t round_up(uint64_t n) {
  return (n + ALIGN_ELEMENTS - 1) / ALIGN_ELEMENTS * ALIGN_ELEMENTS;
}

/* Offset of slot @k of a layout of @n; k == n gives the end. */
static uint64_t slot_offset(const slot *s, uint32_t n, uint32_t k) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < k; i++)
    at = (s[i].fused ? at : round_up(at)) + s[i].rows * s[i].cols;
  return k < n && s[k].fused ? at : round_up(at);
}

uint32_t ps_model_n_units(const ps_model_config *cfg) { return cfg->n_layers + 2; }

uint64_t ps_model_unit_elements(const ps_model_config *cfg, uint32_t unit) {
  slot s[MAX_UNIT_PARAMS];
  if (unit >= ps_model_n_units(cfg))
    return 0;
  uint32_t n = unit_layout(cfg, unit, s);
  return slot_offset(s, n, n);
}

uint32_t ps_model_n_params(const ps_model_config *cfg) {
  slot s[MAX_UNIT_PARAMS];
  return 1 + cfg->n_layers * block_layout(cfg, s) + (cfg->tied_embeddings ? 1 : 2);
}

ps_status ps_model_param(const ps_model_config *cfg, uint32_t idx, ps_param_info *out) {
  slot s[MAX_UNIT_PARAMS];
  uint32_t per_block = block_layout(cfg, s), total = ps_model_n_params(cfg), unit = 0, k = 0;
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
  p.offset = slot_offset(s, n, k);
  if (unit >= 1 && unit <= cfg->n_layers)
    snprintf(p.name, sizeof p.name, "model.layers.%u.%s", unit - 1, s[k].name);
  else
    snprintf(p.name, sizeof p.name, "%s", s[k].name);
  *out = p;
  return PS_OK;
}

uint64_t ps_model_n_elements(const ps_model_config *cfg) {
  slot s[MAX_UNIT_PARAMS];
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
