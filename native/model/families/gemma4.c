/* gemma4.c - Gemma 4 (text): Gemma 3's block, but norms multiply by w, scores have no scale, v is
 * normed too, and a number multiplies a block's output. Layers with full attention have heads of
 * their own width, k as v where attention_k_eq_v says so, and RoPE of their own. With
 * enable_moe_block every layer has experts beside its MLP. Defaults are those of transformers'
 * Gemma4TextConfig and Gemma4UnifiedTextConfig (5.24). */
#include "model/attention.h"
#include "model/experts.h"
#include "model/family.h"
#include "model/mlp.h"
#include "model/per_layer.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const uint8_t SLIDING = PS_LAYER_WINDOW | PS_LAYER_LOCAL_ROPE;

/* ---- what is refused ------------------------------------------------------------------------- */

/* A part of E2B and E4B, which the unified model has not. */
static ps_status refuse_per_layer(const ps__config_reader *r) {
  uint32_t n;
  PS_TRY(ps__config_uint(r, r->j, "hidden_size_per_layer_input", 0, &n));
  if (n)
    return ps__fail(PS_EFORMAT,
                    "%s: hidden_size_per_layer_input is %u: this family has no embeddings of each "
                    "layer, only 0 is supported",
                    r->path, n);
  return PS_OK;
}

static ps_status check_direction(const ps__config_reader *r) {
  const ps__json *v = ps__config_field(r->j, "use_bidirectional_attention");
  const char *name = ps__json_string(v, NULL);
  if (!v || (name && !strcmp(name, "vision"))) /* of text it says nothing */
    return PS_OK;
  return ps__fail(PS_EFORMAT,
                  "%s: use_bidirectional_attention is %s%.60s%s: only \"vision\" and null are "
                  "supported",
                  r->path, name ? "\"" : "", name ? name : ps__config_kind(v), name ? "\"" : "");
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* The last layer's attention is full whatever layer_types says, as in transformers. */
static ps_status read_layers(const ps__config_reader *r, uint32_t window, ps_model_config *c) {
  uint32_t sliding;
  bool given = false;
  PS_TRY(ps__config_window(r, window, &c->window));
  PS_TRY(ps__config_layer_types(r, c, SLIDING, &given, &sliding));
  for (uint32_t i = 0; !given && i < c->n_layers; i++)
    c->layer_flags[i] = (i + 1) % 6 ? SLIDING : 0;
  sliding = 0;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const bool slides = c->layer_flags[i] && i + 1 < c->n_layers;
    c->layer_flags[i] = slides ? SLIDING : PS_LAYER_GLOBAL;
    sliding += slides;
  }
  return ps__config_needs_window(r, c, sliding, "sliding_window is null");
}

/* The last layers have no keys and values of their own. */
static ps_status read_shared(const ps__config_reader *r, ps_model_config *c) {
  uint32_t n;
  PS_TRY(ps__config_uint(r, r->j, "num_kv_shared_layers", 0, &n));
  PS_TRY(ps__config_bool(r, r->j, "use_double_wide_mlp", false, &c->double_wide_mlp));
  if (n >= c->n_layers)
    return ps__fail(PS_EFORMAT,
                    "%s: num_kv_shared_layers is %u: it must be below num_hidden_layers, %u",
                    r->path, n, c->n_layers);
  for (uint32_t i = c->n_layers - n; i < c->n_layers; i++)
    c->layer_flags[i] |= PS_LAYER_SHARED_KV;
  if (!n)
    c->double_wide_mlp = 0; /* of these layers alone */
  return PS_OK;
}

/* Of E2B and E4B. */
static ps_status read_per_layer_inputs(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(ps__config_uint(r, r->j, "hidden_size_per_layer_input", 256, &c->per_layer_dim));
  if (!c->per_layer_dim)
    return PS_OK;
  PS_TRY(ps__config_uint(r, r->j, "vocab_size_per_layer_input", 262144, &c->per_layer_vocab));
  if (c->per_layer_vocab < c->vocab_size)
    return ps__fail(PS_EFORMAT,
                    "%s: vocab_size_per_layer_input is %u: it must be at least vocab_size, %u",
                    r->path, c->per_layer_vocab, c->vocab_size);
  return PS_OK;
}

/* An entry of per_layer_config: the layer, and its heads. */
static ps_status read_entry(const ps__config_reader *r, const ps_model_config *c,
                            const ps__json *all, size_t i, uint32_t *head_dim, uint32_t *kv_heads) {
  const char *key = ps__json_key(all, i);
  const ps__json *entry = ps__json_at(all, i);
  char *end = NULL;
  const unsigned long layer = strtoul(key, &end, 10);
  if (end == key || *end || layer >= c->n_layers || !(c->layer_flags[layer] & PS_LAYER_GLOBAL) ||
      ps__json_type(entry) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT,
                    "%s: per_layer_config has \"%.40s\", %s: objects for layers with "
                    "full_attention, of %u, are supported",
                    r->path, key, ps__config_kind(entry), c->n_layers);
  for (size_t k = 0; k < ps__json_length(entry); k++)
    if (strcmp(ps__json_key(entry, k), "head_dim") &&
        strcmp(ps__json_key(entry, k), "num_key_value_heads"))
      return ps__fail(PS_EFORMAT,
                      "%s: per_layer_config.%.40s has %.60s: only head_dim and num_key_value_heads "
                      "are supported",
                      r->path, key, ps__json_key(entry, k));
  PS_TRY(ps__config_uint(r, entry, "head_dim", c->head_dim, head_dim));
  return ps__config_uint(r, entry, "num_key_value_heads", c->n_kv_heads, kv_heads);
}

/* As transformers 5 writes the heads of full layers: by layer, and then nothing else counts. */
static ps_status read_per_layer(const ps__config_reader *r, const ps__json *all,
                                ps_model_config *c) {
  uint32_t n_global = 0;
  if (ps__json_type(all) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: per_layer_config is %s: it must be an object", r->path,
                    ps__config_kind(all));
  for (size_t i = 0; i < ps__json_length(all); i++) {
    uint32_t head_dim, kv_heads;
    PS_TRY(read_entry(r, c, all, i, &head_dim, &kv_heads));
    if (i && (head_dim != c->global_head_dim || kv_heads != c->global_kv_heads))
      return ps__fail(PS_EFORMAT,
                      "%s: per_layer_config.%.40s has %u kv heads of %u, and another layer %u of "
                      "%u: layers with full_attention must be alike",
                      r->path, ps__json_key(all, i), kv_heads, head_dim, c->global_kv_heads,
                      c->global_head_dim);
    c->global_head_dim = head_dim;
    c->global_kv_heads = kv_heads;
  }
  for (uint32_t i = 0; i < c->n_layers; i++)
    n_global += (c->layer_flags[i] & PS_LAYER_GLOBAL) != 0;
  if (ps__json_length(all) != n_global)
    return ps__fail(PS_EFORMAT,
                    "%s: per_layer_config has %zu layers, and %u have full_attention: it must have "
                    "all of these",
                    r->path, ps__json_length(all), n_global);
  return PS_OK;
}

static ps_status read_heads(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *all = ps__config_field(r->j, "per_layer_config");
  PS_TRY(ps__config_bool(r, r->j, "attention_k_eq_v", false, &c->shared_keys));
  c->global_kv_heads = c->n_kv_heads;
  if (all)
    return read_per_layer(r, all, c);
  PS_TRY(ps__config_uint(r, r->j, "global_head_dim", 512, &c->global_head_dim));
  if (!c->shared_keys) /* transformers reads the next field with it alone */
    return PS_OK;
  return ps__config_uint(r, r->j, "num_global_key_value_heads", c->n_kv_heads, &c->global_kv_heads);
}

/* ---- RoPE ------------------------------------------------------------------------------------ */

/* That of full layers. */
static ps_status read_global_rope(const ps__config_reader *r, const ps__json *s,
                                  ps_model_config *c) {
  const char *type = ps__json_string(ps__config_field(s, "rope_type"), NULL);
  double partial = 0;
  if (s && (!type || strcmp(type, "proportional")))
    return ps__fail(PS_EFORMAT,
                    "%s: rope_parameters.full_attention has rope_type \"%.60s\": only "
                    "\"proportional\" is supported there",
                    r->path, type ? type : "missing");
  PS_TRY(ps__config_number(r, s, "rope_theta", 1e6, &c->rope.theta));
  PS_TRY(ps__config_number(r, s, "factor", 1, &c->rope.factor));
  PS_TRY(ps__config_number(r, s, "partial_rotary_factor", s ? 1 : 0.25, &partial));
  const double pairs = floor(partial * c->global_head_dim / 2);
  if (!(partial > 0 && partial <= 1 && pairs >= 1 && pairs <= PS_ROPE_PAIRS))
    return ps__fail(PS_EFORMAT,
                    "%s: partial_rotary_factor is %g in rope_parameters.full_attention, which "
                    "turns %g pairs of a head of %u: 1 to %d pairs are supported",
                    r->path, partial, pairs, c->global_head_dim, PS_ROPE_PAIRS);
  c->rope.kind = PS_ROPE_PROPORTIONAL;
  c->rope.rotary_dim = 2 * (uint32_t)pairs;
  return PS_OK;
}

static ps_status read_rope(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *all = ps__config_field(r->j, "rope_parameters"),
                 *full = ps__config_field(all, "full_attention"),
                 *sliding = ps__config_field(all, "sliding_attention");
  double partial = 1;
  static const char *const old[] = {"rope_scaling", "rope_theta", "partial_rotary_factor"};
  for (size_t i = 0; i < sizeof old / sizeof *old; i++)
    if (ps__config_field(r->j, old[i]))
      return ps__fail(PS_EFORMAT, "%s: %s is set: RoPE is read from rope_parameters alone", r->path,
                      old[i]);
  if (all && (!full || !sliding || ps__json_type(full) != PS_JSON_OBJECT ||
              ps__json_type(sliding) != PS_JSON_OBJECT))
    return ps__fail(PS_EFORMAT,
                    "%s: rope_parameters needs full_attention and sliding_attention, an object "
                    "each",
                    r->path);
  PS_TRY(read_global_rope(r, full, c));
  PS_TRY(ps__config_number(r, sliding, "partial_rotary_factor", 1, &partial));
  if (partial != 1)
    return ps__fail(PS_EFORMAT,
                    "%s: partial_rotary_factor is %g in rope_parameters.sliding_attention: only 1 "
                    "is supported there",
                    r->path, partial);
  return ps__config_local_rope(r, NULL, 10000.0, c);
}

/* ---- experts --------------------------------------------------------------------------------- */

static const ps__experts_defaults experts_of = {.n_experts = PS__CONFIG_REQUIRED,
                                                .n_used = PS__CONFIG_REQUIRED,
                                                .count_key = "num_experts",
                                                .used_key = "top_k_experts",
                                                .dim_key = "moe_intermediate_size",
                                                .dim = PS__CONFIG_REQUIRED,
                                                .always_renorm = true};

/* Without enable_moe_block the fields of experts mean nothing. The MLP beside them is what other
 * families call shared experts. */
static ps_status read_experts(const ps__config_reader *r, bool may_have, ps_model_config *c) {
  static const char *const foreign[] = {"num_local_experts", "n_routed_experts"};
  uint32_t is_sparse, n;
  for (int i = 0; i < 2; i++) {
    PS_TRY(ps__config_uint(r, r->j, foreign[i], 0, &n));
    if (n)
      return ps__fail(PS_EFORMAT, "%s: %s is %u: this family has num_experts", r->path, foreign[i],
                      n);
  }
  PS_TRY(ps__config_bool(r, r->j, "enable_moe_block", false, &is_sparse));
  if (!is_sparse)
    return PS_OK;
  if (!may_have)
    return ps__fail(PS_EFORMAT, "%s: enable_moe_block is true: this family has no experts",
                    r->path);
  PS_TRY(ps__config_experts(r, &experts_of, c));
  if (c->n_experts_used > c->n_experts)
    return ps__fail(PS_EFORMAT, "%s: top_k_experts is %u: it must be at most num_experts, %u",
                    r->path, c->n_experts_used, c->n_experts);
  c->shared_dim = c->ffn_dim;
  for (uint32_t i = 0; i < c->n_layers; i++)
    c->layer_flags[i] |= PS_LAYER_EXPERTS;
  return PS_OK;
}

/* ---- the family ------------------------------------------------------------------------------ */

static ps_status read(const ps__config_reader *r, uint32_t window, ps_model_config *c) {
  double cap = 0;
  PS_TRY(check_direction(r));
  PS_TRY(read_layers(r, window, c));
  PS_TRY(read_shared(r, c));
  PS_TRY(read_heads(r, c));
  PS_TRY(ps__config_in_range(r->path, "global_head_dim", c->global_head_dim, 2, 4096));
  PS_TRY(read_rope(r, c));
  if (ps__config_field(r->j, "final_logit_softcapping"))
    PS_TRY(ps__config_positive(r, "final_logit_softcapping", 0, &cap));
  c->logit_softcap = (float)cap;
  c->attention_scale = 1.0f;
  c->embedding_scale = (float)sqrt((double)c->dim);
  c->value_norm = 1;
  return PS_OK;
}

static ps_status read_gemma4(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(read_per_layer_inputs(r, c));
  PS_TRY(read(r, 512, c));
  return read_experts(r, true, c);
}

static ps_status read_unified(const ps__config_reader *r, ps_model_config *c) {
  PS_TRY(refuse_per_layer(r));
  PS_TRY(read(r, 1024, c));
  return read_experts(r, false, c);
}

static const ps__experts_names names_of_experts = {
    .router = "router.proj.weight",
    .gate = "experts.%u.gate_proj.weight",
    .up = "experts.%u.up_proj.weight",
    .down = "experts.%u.down_proj.weight",
    .shared_gate = "mlp.gate_proj.weight",
    .shared_up = "mlp.up_proj.weight",
    .shared_down = "mlp.down_proj.weight",
    .norm = "pre_feedforward_layernorm_2.weight",
    .post_norm = "post_feedforward_layernorm_2.weight",
    .shared_post_norm = "post_feedforward_layernorm_1.weight",
    .router_scale = "router.scale",
    .expert_scale = "router.per_expert_scale"};

static const char PRE[] = "pre_feedforward_layernorm.weight",
                  POST[] = "post_feedforward_layernorm.weight";
static const ps__half_use attention = {.kind = &ps__attention,
                                       .names = &ps__attention_usual,
                                       .norm = "input_layernorm.weight",
                                       .post_norm = "post_attention_layernorm.weight"},
                          second[] = {{.flags = PS_LAYER_EXPERTS,
                                       .kind = &ps__experts_beside,
                                       .names = &names_of_experts,
                                       .norm = PRE,
                                       .post_norm = POST},
                                      {.kind = &ps__mlp,
                                       .names = &ps__mlp_usual,
                                       .norm = PRE,
                                       .post_norm = POST}};

static const ps__per_layer_names per_layer = {.in = "per_layer_input_gate.weight",
                                              .out = "per_layer_projection.weight",
                                              .post = "post_per_layer_input_norm.weight",
                                              .context = "per_layer_model_projection.weight",
                                              .table = "embed_tokens_per_layer.weight",
                                              .norm = "per_layer_projection_norm.weight"};

static const ps__decoder decoder = {.half = {&attention, second},
                                    .rounds_embedding_scale = true,
                                    .per_layer = &per_layer,
                                    .layer_scale = "layer_scalar"};

static const char *const own_keys[] = {"sliding_window", "final_logit_softcapping",
                                       "use_bidirectional_attention", NULL};

#define FAMILY(type, class, sparse, reads)                                                         \
  {.model_type = type,                                                                             \
   .architecture = class,                                                                          \
   .has_default_pad = true,                                                                        \
   .default_pad = 0,                                                                               \
   .default_kv_heads = 4,                                                                          \
   .default_head_dim = 256,                                                                        \
   .tied_by_default = true,                                                                        \
   .has_own_rope = true,                                                                           \
   .has_experts = sparse,                                                                          \
   .qk_norm = 1,                                                                                   \
   .activation = PS_ACTIVATION_GELU_TANH,                                                          \
   .activation_key = "hidden_activation",                                                          \
   .is_of_5 = true,                                                                                \
   .own_keys = own_keys,                                                                           \
   .read = reads,                                                                                  \
   .decoder = &decoder}
const ps__family ps__family_gemma4 = FAMILY("gemma4_text", "Gemma4ForCausalLM", true, read_gemma4);
const ps__family ps__family_gemma4_unified =
    FAMILY("gemma4_unified_text", "Gemma4UnifiedForCausalLM", false, read_unified);
