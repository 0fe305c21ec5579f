/* config.c - Hugging Face config.json to ps_model_config: what all families have. What a family
 * adds is in native/model/families/. Whatever would change the math and is not computed here is
 * refused by name rather than ignored. */
#include "kernels/ops.h"
#include "model/config_tower.h"
#include "model/family.h"
#include "model/model.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* Limits on what a config may say. They keep every product within 2^63: a block has fewer than
 * 2^45 elements (2^20 * 2^22 * 3 + 4 * 2^20 * 2^20), the model fewer than 2^58. */
enum {
  MAX_VOCAB = 1 << 24,
  MAX_DIM = 1 << 20, /* hidden_size, and heads x head_dim */
  MAX_HEADS = 1 << 14,
  MAX_HEAD_DIM = 1 << 12,
  MAX_FFN = 1 << 22,
  MAX_POSITIONS = 1 << 30
};

/* ---- checking -------------------------------------------------------------------------------- */

static ps_status check_sizes(const ps_model_config *c, const char *name) {
  PS_TRY(ps__config_in_range(name, "vocab_size", c->vocab_size, 1, MAX_VOCAB));
  PS_TRY(ps__config_in_range(name, "num_hidden_layers", c->n_layers, 1, PS_MAX_LAYERS));
  PS_TRY(ps__config_in_range(name, "hidden_size", c->dim, 1, MAX_DIM));
  PS_TRY(ps__config_in_range(name, "intermediate_size", c->ffn_dim, 1, MAX_FFN));
  PS_TRY(ps__config_in_range(name, "num_attention_heads", c->n_heads, 1, MAX_HEADS));
  PS_TRY(ps__config_in_range(name, "num_key_value_heads", c->n_kv_heads, 1, MAX_HEADS));
  PS_TRY(ps__config_in_range(name, "head_dim", c->head_dim, 2, MAX_HEAD_DIM));
  PS_TRY(ps__config_in_range(name, "max_position_embeddings", c->max_positions, 0, MAX_POSITIONS));
  if (c->head_dim % 2)
    return ps__fail(PS_EFORMAT, "%s: head_dim is %u: it must be even, RoPE turns pairs", name,
                    c->head_dim);
  if (c->n_heads % c->n_kv_heads)
    return ps__fail(
        PS_EFORMAT,
        "%s: num_attention_heads is %u: it must be a multiple of num_key_value_heads, %u", name,
        c->n_heads, c->n_kv_heads);
  if ((uint64_t)c->n_heads * c->head_dim > MAX_DIM)
    return ps__fail(PS_EFORMAT,
                    "%s: num_attention_heads x head_dim is %u x %u: at most %u together", name,
                    c->n_heads, c->head_dim, (unsigned)MAX_DIM);
  return PS_OK;
}

/* Heads of layers with PS_LAYER_GLOBAL. */
static ps_status check_global(const ps_model_config *c, const char *name) {
  uint32_t flags = 0;
  for (uint32_t l = 0; l < c->n_layers; l++)
    flags |= c->layer_flags[l];
  PS_TRY(ps__config_in_range(name, "value_norm", c->value_norm, 0, 1));
  PS_TRY(ps__config_in_range(name, "attention_k_eq_v", c->shared_keys, 0, 1));
  if (!(flags & PS_LAYER_GLOBAL))
    return PS_OK;
  PS_TRY(ps__config_in_range(name, "global_head_dim", c->global_head_dim, 2, MAX_HEAD_DIM));
  PS_TRY(ps__config_in_range(name, "num_global_key_value_heads", c->global_kv_heads, 1, MAX_HEADS));
  if (c->global_head_dim % 2 || (uint64_t)c->n_heads * c->global_head_dim > MAX_DIM)
    return ps__fail(PS_EFORMAT,
                    "%s: global_head_dim is %u: it must be even, and at most %u together with "
                    "num_attention_heads, %u",
                    name, c->global_head_dim, (unsigned)MAX_DIM, c->n_heads);
  if (c->n_heads % c->global_kv_heads)
    return ps__fail(PS_EFORMAT,
                    "%s: num_attention_heads is %u: it must be a multiple of "
                    "num_global_key_value_heads, %u",
                    name, c->n_heads, c->global_kv_heads);
  if ((c->value_norm && c->qk_norm != 1) || (c->shared_keys && (!c->value_norm || c->qkv_bias)))
    return ps__fail(PS_EFORMAT,
                    "%s: attention_k_eq_v is %u, value_norm %u, qk_norm %u and qkv_bias %u: the "
                    "first needs the second and no biases, the second norms over heads",
                    name, c->shared_keys, c->value_norm, c->qk_norm, c->qkv_bias);
  return PS_OK;
}

/* yarn and longrope. A value of 0 stands for transformers' default. */
static ps_status check_rope_lengths(const ps_model_config *c, const char *name) {
  const ps_rope *r = &c->rope;
  static const char *const field[] = {"attention_factor", "beta_fast", "beta_slow", "mscale",
                                      "mscale_all_dim"};
  const double value[] = {r->attention_factor, r->beta_fast, r->beta_slow, r->mscale,
                          r->mscale_all_dim};
  for (size_t i = 0; i < sizeof value / sizeof *value; i++)
    if (!(value[i] >= 0.0 && value[i] <= 1e6))
      return ps__fail(PS_EFORMAT, "%s: the RoPE scaling's %s is %g: it must be 0 to 1e6", name,
                      field[i], value[i]);
  PS_TRY(ps__config_in_range(name, "the RoPE scaling's original_max_position_embeddings",
                             r->original_positions, 0, MAX_POSITIONS));
  if (!c->max_positions && (r->kind == PS_ROPE_LONGROPE || !r->original_positions))
    return ps__fail(PS_EFORMAT, "%s: max_position_embeddings is missing: the RoPE scaling needs it",
                    name);
  if (r->kind == PS_ROPE_YARN && r->theta == 1.0)
    return ps__fail(PS_EFORMAT, "%s: rope_theta is 1: yarn divides by its logarithm", name);
  if (r->kind == PS_ROPE_YARN)
    return PS_OK;
  const uint32_t n = (r->rotary_dim ? r->rotary_dim : c->head_dim) / 2;
  for (uint32_t i = 0; i < n && i < PS_ROPE_PAIRS; i++)
    for (int k = 0; k < 2; k++) {
      const double x = k ? r->long_factor[i] : r->short_factor[i];
      if (!(x > 0.0 && x <= 1e6))
        return ps__fail(PS_EFORMAT, "%s: %s[%u] is %g: it must be above 0 and at most 1e6", name,
                        k ? "long_factor" : "short_factor", i, x);
    }
  if (r->attention_factor == 0.0 && !r->original_positions && !(r->factor >= 1.0))
    return ps__fail(PS_EFORMAT,
                    "%s: factor is missing: rope_type \"longrope\" needs it, attention_factor or "
                    "original_max_position_embeddings",
                    name);
  return PS_OK;
}

static ps_status check_rope(const ps_model_config *c, const char *name) {
  const ps_rope *r = &c->rope;
  if (!(r->theta >= 1.0 && r->theta <= 1e15))
    return ps__fail(PS_EFORMAT, "%s: rope_theta is %g: it must be 1 to 1e15", name, r->theta);
  PS_TRY(ps__config_in_range(name, "the RoPE scaling's kind", r->kind, PS_ROPE_NONE,
                             PS_ROPE_PROPORTIONAL));
  const uint32_t head = r->kind == PS_ROPE_PROPORTIONAL ? c->global_head_dim : c->head_dim,
                 rotary = r->rotary_dim ? r->rotary_dim : head;
  if (rotary % 2 || rotary > head)
    return ps__fail(PS_EFORMAT,
                    "%s: head_dim x partial_rotary_factor is %u: it must be even and at most "
                    "head_dim, %u",
                    name, rotary, head);
  if (r->kind == PS_ROPE_NONE)
    return PS_OK;
  if (r->kind != PS_ROPE_LONGROPE && !(r->factor >= 1.0 && r->factor <= 1e6))
    return ps__fail(PS_EFORMAT, "%s: the RoPE scaling's factor is %g: it must be 1 to 1e6", name,
                    r->factor);
  if (r->kind == PS_ROPE_YARN || r->kind == PS_ROPE_LONGROPE)
    return check_rope_lengths(c, name);
  if (r->kind == PS_ROPE_DYNAMIC && !c->max_positions)
    return ps__fail(PS_EFORMAT,
                    "%s: max_position_embeddings is missing: rope_type \"dynamic\" "
                    "needs it",
                    name);
  if (r->kind != PS_ROPE_LLAMA3)
    return PS_OK;
  if (!(r->low_freq_factor > 0.0 && r->low_freq_factor < r->high_freq_factor &&
        r->high_freq_factor <= 1e6))
    return ps__fail(PS_EFORMAT,
                    "%s: the RoPE scaling's low_freq_factor is %g and its high_freq_factor %g: 0 < "
                    "low < high <= 1e6 is needed",
                    name, r->low_freq_factor, r->high_freq_factor);
  return ps__config_in_range(name, "the RoPE scaling's original_max_position_embeddings",
                             r->original_positions, 1, MAX_POSITIONS);
}

/* Experts are chosen from groups: 0 where they are chosen from all. */
static ps_status check_groups(const ps_model_config *c, const char *name) {
  const uint32_t n = c->n_expert_groups, least = c->router_sigmoid ? 2 : 1;
  if (!n)
    return ps__config_in_range(name, "topk_group without n_group", c->n_groups_used, 0, 0);
  PS_TRY(ps__config_in_range(name, "n_group", n, 1, c->n_experts));
  PS_TRY(ps__config_in_range(name, "topk_group", c->n_groups_used, 1, n));
  if (c->n_experts % n || c->n_experts / n < least)
    return ps__fail(PS_EFORMAT,
                    "%s: n_group is %u: it must divide the %u experts into groups of at least %u",
                    name, n, c->n_experts, least);
  if ((uint64_t)c->n_groups_used * (c->n_experts / n) < c->n_experts_used)
    return ps__fail(PS_EFORMAT,
                    "%s: topk_group is %u: so many groups have %u experts, and num_experts_per_tok "
                    "is %u",
                    name, c->n_groups_used, c->n_groups_used * (c->n_experts / n),
                    c->n_experts_used);
  return PS_OK;
}

static ps_status check_experts(const ps_model_config *c, const char *name) {
  if (!ps__n_sparse(c) && !c->n_experts)
    return PS_OK;
  PS_TRY(ps__config_in_range(name, "num_experts", c->n_experts, 1, PS_MAX_EXPERTS));
  PS_TRY(
      ps__config_in_range(name, "num_experts_per_tok", c->n_experts_used, 1, PS_MAX_EXPERTS_USED));
  PS_TRY(ps__config_in_range(name, "the experts' intermediate size", c->expert_dim, 1, MAX_FFN));
  PS_TRY(ps__config_in_range(name, "norm_topk_prob", c->norm_topk_prob, 0, 1));
  PS_TRY(ps__config_in_range(name, "the shared experts' intermediate size", c->shared_dim, 0,
                             MAX_FFN));
  PS_TRY(ps__config_in_range(name, "router_sigmoid", c->router_sigmoid, 0, 1));
  if (!(c->router_scale >= 0 && c->router_scale <= 1e6f))
    return ps__fail(PS_EFORMAT, "%s: routed_scaling_factor is %g: it must be 0 (none) to 1e6", name,
                    (double)c->router_scale);
  PS_TRY(check_groups(c, name));
  if (c->n_experts_used > c->n_experts)
    return ps__fail(PS_EFORMAT, "%s: num_experts_per_tok is %u: it must be at most num_experts, %u",
                    name, c->n_experts_used, c->n_experts);
  if ((double)c->n_experts * c->expert_dim * c->dim > 0x1p40)
    return ps__fail(PS_EFORMAT,
                    "%s: %u experts of %u x %u are too large: at most 2^40 elements a matrix", name,
                    c->n_experts, c->expert_dim, c->dim);
  if (!(c->router_aux_loss >= 0 && c->router_aux_loss <= (float)PS_MAX_ROUTER_LOSS))
    return ps__fail(PS_EFORMAT, "%s: router_aux_loss_coef is %g: it must be 0 to %g", name,
                    (double)c->router_aux_loss, PS_MAX_ROUTER_LOSS);
  return PS_OK;
}

/* Latent attention. */
static ps_status check_latent(const ps_model_config *c, const char *name) {
  const uint32_t rotary = c->rope.rotary_dim;
  if (!ps__family_at(c->family)->latent)
    return ps__config_in_range(name, "a rank or v_head_dim in a family without latent attention",
                               c->kv_rank | c->value_dim | c->q_rank, 0, 0);
  PS_TRY(ps__config_in_range(name, "kv_lora_rank", c->kv_rank, 1, MAX_DIM));
  PS_TRY(ps__config_in_range(name, "q_lora_rank", c->q_rank, 0, MAX_DIM));
  PS_TRY(ps__config_in_range(name, "qk_rope_head_dim", rotary, 2, 2 * PS_ROPE_PAIRS));
  PS_TRY(ps__config_in_range(name, "v_head_dim", c->value_dim, 1, MAX_HEAD_DIM));
  if (rotary % 2 || rotary >= c->head_dim)
    return ps__fail(PS_EFORMAT,
                    "%s: qk_rope_head_dim is %u: it must be even, and qk_nope_head_dim above 0",
                    name, rotary);
  if (c->value_dim > c->head_dim)
    return ps__fail(PS_EFORMAT,
                    "%s: v_head_dim is %u: it must be at most qk_nope_head_dim + qk_rope_head_dim, "
                    "%u, as values are padded to that width",
                    name, c->value_dim, c->head_dim);
  if (c->n_kv_heads != c->n_heads || c->qkv_bias || c->qk_norm)
    return ps__fail(PS_EFORMAT,
                    "%s: num_key_value_heads is %u: latent attention has as many as "
                    "num_attention_heads, %u, without biases and norms of heads",
                    name, c->n_kv_heads, c->n_heads);
  return PS_OK;
}

/* Of layers with PS_LAYER_LINEAR. */
static ps_status check_delta(const ps_model_config *c, const char *name) {
  PS_TRY(ps__config_in_range(name, "attention_gate", c->attention_gate, 0, 1));
  bool any = false;
  for (uint32_t l = 0; l < c->n_layers; l++)
    any |= c->layer_flags[l] & PS_LAYER_LINEAR;
  if (c->attention_gate && c->qkv_bias)
    return ps__fail(PS_EFORMAT, "%s: qkv_bias is 1: it must be 0 with a gate of attention", name);
  if (!any)
    return PS_OK;
  PS_TRY(ps__config_in_range(name, "linear_num_key_heads", c->linear_key_heads, 1, MAX_HEADS));
  PS_TRY(ps__config_in_range(name, "linear_num_value_heads", c->linear_value_heads, 1, MAX_HEADS));
  PS_TRY(ps__config_in_range(name, "linear_key_head_dim", c->linear_key_dim, 1, PS_MAX_DELTA_DIM));
  PS_TRY(
      ps__config_in_range(name, "linear_value_head_dim", c->linear_value_dim, 1, PS_MAX_DELTA_DIM));
  PS_TRY(ps__config_in_range(name, "linear_conv_kernel_dim", c->linear_conv_width, 2, PS_MAX_CONV));
  if (c->linear_value_heads % c->linear_key_heads ||
      c->linear_value_heads / c->linear_key_heads > PS_MAX_DELTA_SHARE)
    return ps__fail(PS_EFORMAT,
                    "%s: linear_num_value_heads is %u: it must be 1 to %d times "
                    "linear_num_key_heads, %u",
                    name, c->linear_value_heads, PS_MAX_DELTA_SHARE, c->linear_key_heads);
  return PS_OK;
}

/* Of layers with PS_LAYER_SHARED_KV. */
static ps_status check_shared(const ps_model_config *c, const char *name) {
  bool any = false;
  PS_TRY(ps__config_in_range(name, "use_double_wide_mlp", c->double_wide_mlp, 0, 1));
  for (uint32_t l = 0; l < c->n_layers; l++) {
    any |= c->layer_flags[l] & PS_LAYER_SHARED_KV;
    if (ps__kv_source(c, l) == PS__NO_BLOCK)
      return ps__fail(PS_EFORMAT,
                      "%s: num_kv_shared_layers: layer %u has no keys and values of its own, and "
                      "no layer before it of the same type has: lower it",
                      name, l);
  }
  if (any && (c->qk_norm != 1 || c->qkv_bias || c->attention_gate || c->kv_rank))
    return ps__fail(PS_EFORMAT,
                    "%s: num_kv_shared_layers is above 0: it needs norms of q and k over heads, "
                    "and no biases, gate or latent of attention",
                    name);
  if (any && c->double_wide_mlp && (c->shared_dim || 2 * (uint64_t)c->ffn_dim > MAX_FFN))
    return ps__fail(PS_EFORMAT,
                    "%s: use_double_wide_mlp is true: layers without experts of at most %d columns "
                    "can have it, and intermediate_size is %u",
                    name, MAX_FFN / 2, c->ffn_dim);
  return PS_OK;
}

static ps_status check_per_layer(const ps_model_config *c, const char *name) {
  PS_TRY(ps__config_in_range(name, "hidden_size_per_layer_input", c->per_layer_dim, 0, MAX_DIM));
  if (!c->per_layer_dim)
    return PS_OK;
  if (!ps__family_at(c->family)->decoder->per_layer)
    return ps__fail(PS_EFORMAT, "%s: hidden_size_per_layer_input is %u: this family has none", name,
                    c->per_layer_dim);
  return ps__config_in_range(name, "vocab_size_per_layer_input", c->per_layer_vocab, c->vocab_size,
                             MAX_VOCAB);
}

static bool scale_ok(float x) { return x >= 0.0f && x <= 1e6f; }

static ps_status check_layers(const ps_model_config *c, const char *name) {
  static const char *const field[] = {
      "the scale of the attention scores", "attn_logit_softcapping",
      "final_logit_softcapping",           "the scale of the embedding",
      "the scale of the residual stream",  "the scale of the logits"};
  const float scale[] = {c->attention_scale, c->attention_softcap, c->logit_softcap,
                         c->embedding_scale, c->residual_scale,    c->logit_scale};
  uint32_t flags = 0;
  for (size_t i = 0; i < sizeof scale / sizeof *scale; i++)
    if (!scale_ok(scale[i]))
      return ps__fail(PS_EFORMAT, "%s: %s is %g: it must be 0 (none) to 1e6", name, field[i],
                      (double)scale[i]);
  for (uint32_t l = 0; l < c->n_layers; l++)
    flags |= c->layer_flags[l];
  PS_TRY(ps__config_in_range(name, "layer_flags", flags, 0, PS_LAYER_FLAGS));
  PS_TRY(check_shared(c, name));
  PS_TRY(check_per_layer(c, name));
  if (flags & PS_LAYER_WINDOW)
    PS_TRY(ps__config_in_range(name, "sliding_window", c->window, 1, MAX_POSITIONS));
  if ((flags & PS_LAYER_LOCAL_ROPE) && !(c->local_rope_theta >= 1.0 && c->local_rope_theta <= 1e15))
    return ps__fail(PS_EFORMAT, "%s: rope_local_base_freq is %g: it must be 1 to 1e15", name,
                    c->local_rope_theta);
  return PS_OK;
}

ps_status ps_model_config_check(const ps_model_config *c, const char *name) {
  if (!c)
    return ps__fail(PS_EINVAL, "%s: no model config was given", name ? name : "model config");
  if (!name)
    name = "model config";
  if (c->struct_bytes != sizeof *c)
    return ps__fail(PS_EINVAL,
                    "%s: struct_bytes is %u, this library's ps_model_config has %zu: set it to "
                    "sizeof(ps_model_config)",
                    name, c->struct_bytes, sizeof *c);
  if (!ps__family_at(c->family))
    return ps__fail(PS_EINVAL, "%s: family is %u: there is none with this number", name, c->family);
  PS_TRY(check_sizes(c, name));
  PS_TRY(check_global(c, name));
  PS_TRY(ps__config_in_range(name, "tie_word_embeddings", c->tied_embeddings, 0, 1));
  PS_TRY(ps__config_in_range(name, "qkv_bias", c->qkv_bias, 0, 1));
  PS_TRY(ps__config_in_range(name, "qk_norm", c->qk_norm, 0, PS_QK_NORM_LATE));
  PS_TRY(ps__config_in_range(name, "activation", c->activation, 0, PS_ACTIVATION_GELU_TANH));
  if (!(c->norm_eps >= FLT_MIN && c->norm_eps <= 1.0f))
    return ps__fail(PS_EFORMAT,
                    "%s: rms_norm_eps is %g: it must be above 0 (1.2e-38 in fp32) and at most 1",
                    name, (double)c->norm_eps);
  static const char *const of_id[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
  const int32_t ids[] = {c->bos_token_id, c->eos_token_id, c->pad_token_id};
  for (int i = 0; i < 3; i++)
    if (ids[i] < -1 || ids[i] >= (int64_t)c->vocab_size)
      return ps__fail(PS_EFORMAT, "%s: %s is %d: it must be below vocab_size, %u (-1 for none)",
                      name, of_id[i], ids[i], c->vocab_size);
  if (!(c->dropout >= 0 && c->dropout <= 1))
    return ps__fail(PS_EFORMAT, "%s: dropout is %g: it must be 0 to 1", name, (double)c->dropout);
  PS_TRY(ps__config_in_range(name, "multimodal", c->multimodal, 0, 1));
  PS_TRY(ps__config_in_range(name, "interleaved_rope", c->interleaved_rope, 0, 1));
  PS_TRY(ps__config_in_range(name, "reserved", c->reserved, 0, 0));
  PS_TRY(ps__config_in_range(name, "o_bias", c->o_bias, 0, c->qkv_bias));
  PS_TRY(ps__config_in_range(name, "attention_sinks", c->attention_sinks, 0, 1));
  if (!(c->glu_limit >= 0 && c->glu_limit <= 1e6f && c->glu_alpha >= 0 && c->glu_alpha <= 1e6f) ||
      (c->glu_limit > 0) != (c->glu_alpha > 0))
    return ps__fail(PS_EFORMAT,
                    "%s: swiglu_limit is %g and swiglu_alpha %g: both must be above 0 and at most "
                    "1e6, or 0 for none",
                    name, (double)c->glu_limit, (double)c->glu_alpha);
  if (!(c->position_beta >= 0 && c->position_beta <= 1e6) ||
      (c->position_beta > 0 && !c->rope.original_positions))
    return ps__fail(PS_EFORMAT,
                    "%s: llama_4_scaling_beta is %g and original_max_position_embeddings %u: the "
                    "first must be 0 to 1e6, and the second above 0 with it",
                    name, c->position_beta, c->rope.original_positions);
  PS_TRY(check_layers(c, name));
  PS_TRY(check_experts(c, name));
  PS_TRY(ps__score_check(c, name));
  PS_TRY(check_delta(c, name));
  PS_TRY(check_rope(c, name));
  return check_latent(c, name);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The model types of all families, as "llama, qwen2, ...". */
static const char *family_names(char *text, size_t bytes) {
  size_t at = 0;
  const ps__family *f;
  for (uint32_t i = 0; (f = ps__family_at(i)) && at < bytes; i++)
    at += (size_t)snprintf(text + at, bytes - at, "%s%s", i ? ", " : "", f->model_type);
  return text;
}

static ps_status find_named(const char *model_type, uint32_t *out) {
  const ps__family *f;
  for (*out = 0; (f = ps__family_at(*out)); ++*out)
    if (!strcmp(f->model_type, model_type))
      return PS_OK;
  return ps__fail(PS_EINTERNAL, "there is no family \"%s\"", model_type);
}

static ps_status find_family(const ps__config_reader *r, uint32_t *out) {
  const ps__json *a = ps__config_field(r->j, "architectures"),
                 *t = ps__config_field(r->j, "model_type");
  const char *class = ps__json_string(a ? ps__json_at(a, 0) : NULL, NULL),
             *type = ps__json_string(t, NULL);
  char names[512];
  if (!a && !t)
    return ps__fail(PS_EFORMAT,
                    "%s: architectures and model_type are missing: the config must give one",
                    r->path);
  if (a && (!class || ps__json_length(a) != 1))
    return ps__fail(PS_EFORMAT,
                    "%s: architectures must be a list of one name, such as [\"LlamaForCausalLM\"]",
                    r->path);
  if (t && !type)
    return ps__fail(PS_EFORMAT, "%s: model_type is %s: it must be a string", r->path,
                    ps__config_kind(t));
  const ps__family *f;
  for (uint32_t i = 0; (f = ps__family_at(i)); i++) {
    char score[PS__CLASS_BYTES];
    const char *classifier = ps__score_class(f, score);
    if (class ? strcmp(class, f->architecture) && (!classifier || strcmp(class, classifier))
              : strcmp(type, f->model_type))
      continue;
    if (type && strcmp(type, f->model_type))
      return ps__fail(PS_EFORMAT,
                      "%s: model_type is \"%.60s\" but architectures says %s: they must agree",
                      r->path, type, class);
    *out = i;
    return PS_OK;
  }
  return ps__fail(PS_EFORMAT, "%s: %s is \"%.60s\": the model types that can be trained are %s",
                  r->path, class ? "architectures" : "model_type", class ? class : type,
                  family_names(names, sizeof names));
}

/* Keys that change the math of the families that have them, and the value that changes nothing;
 * null and false never do. */
static const struct {
  const char *key;
  double neutral; /* NAN: every number counts */
} family_keys[] = {{"sliding_window", NAN},
                   {"use_sliding_window", NAN},
                   {"sliding_window_pattern", NAN},
                   {"no_rope_layers", NAN},
                   {"swiglu_limit", NAN},
                   {"swiglu_alpha", NAN},
                   {"no_rope_layer_interval", NAN},
                   {"rope_local_base_freq", NAN},
                   {"query_pre_attn_scalar", NAN},
                   {"attn_logit_softcapping", NAN},
                   {"final_logit_softcapping", NAN},
                   {"use_bidirectional_attention", NAN},
                   {"clip_qkv", NAN},
                   {"attention_multiplier", NAN},
                   {"embedding_multiplier", 1},
                   {"residual_multiplier", 1},
                   {"logits_scaling", 1}};

static bool is_own_key(const ps__family *family, const char *key) {
  for (const char *const *k = family->own_keys; k && *k; k++)
    if (!strcmp(*k, key))
      return true;
  return false;
}

/* A key of another family: transformers ignores it, and the model is not what its file says. */
static ps_status refuse_keys(const ps__config_reader *r, const ps__family *family) {
  for (size_t i = 0; i < sizeof family_keys / sizeof *family_keys; i++) {
    const char *key = family_keys[i].key;
    const ps__json *v = ps__config_field(r->j, key);
    if (!v || is_own_key(family, key) ||
        (ps__json_type(v) == PS_JSON_BOOL && !ps__json_bool(v, true)) ||
        (ps__json_type(v) == PS_JSON_NUMBER && ps__json_number(v, 0) == family_keys[i].neutral))
      continue;
    const char *text = ps__json_number_text(v);
    return ps__fail(PS_EFORMAT,
                    "%s: %s is %.40s: model_type \"%s\" has no such field, remove it or name the "
                    "model's own family",
                    r->path, key, text ? text : ps__config_kind(v), family->model_type);
  }
  return PS_OK;
}

/* Fields whose presence means another model than the one we compute. */
static ps_status refuse_foreign(const ps__config_reader *r, const ps__family *family) {
  static const char *const counts[] = {"num_experts", "num_local_experts", "n_routed_experts",
                                       "moe_intermediate_size"};
  uint32_t n, bias, mlp_bias;
  PS_TRY(ps__config_check_quantization(r));
  for (size_t i = 0; i < 4 && !family->has_experts; i++) {
    PS_TRY(ps__config_uint(r, r->j, counts[i], 0, &n));
    if (n)
      return ps__fail(PS_EFORMAT,
                      "%s: %s is %u: model_type \"%s\" has no experts, name the model's own family",
                      r->path, counts[i], n, family->model_type);
  }
  PS_TRY(ps__config_bool(r, r->j, "attention_bias", false, &bias));
  PS_TRY(ps__config_bool(r, r->j, "mlp_bias", false, &mlp_bias));
  if (bias && !family->has_qkv_bias && !family->has_qkv_bias_only)
    return ps__fail(PS_EFORMAT,
                    "%s: attention_bias is true: it puts a bias on o_proj, which is not supported",
                    r->path);
  if (mlp_bias)
    return ps__fail(PS_EFORMAT, "%s: mlp_bias is true: biases in the MLP are not supported",
                    r->path);
  return refuse_keys(r, family);
}

/* It means nothing to all but training. */
static ps_status read_dropout(const ps__config_reader *r, ps_model_config *c) {
  static const char *const keys[] = {"attention_dropout", "resid_pdrop", "embd_pdrop"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
    double x = 0;
    PS_TRY(ps__config_number(r, r->j, keys[i], 0, &x));
    if (!(x >= 0 && x <= 1))
      return ps__fail(PS_EFORMAT, "%s: %s is %g: it must be 0 to 1", r->path, keys[i], x);
    c->dropout = (float)x > c->dropout ? (float)x : c->dropout;
  }
  return PS_OK;
}

static ps_status read_activation(const ps__config_reader *r, const ps__family *family,
                                 ps_model_config *c) {
  static const char *const names[] = {"silu", "gelu_pytorch_tanh"}; /* by ps_activation */
  const char *key = family->activation_key ? family->activation_key : "hidden_act",
             *want = names[family->activation];
  const ps__json *act = ps__config_field(r->j, key);
  const char *name = ps__json_string(act, NULL);
  c->activation = family->activation;
  if (act && !name)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be \"%s\"", r->path, key,
                    ps__config_kind(act), want);
  if (!act || !strcmp(name, want) ||
      (c->activation == PS_ACTIVATION_SILU && !strcmp(name, "swish")) ||
      (family->activation_alias && !strcmp(name, family->activation_alias)))
    return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: %s is \"%.60s\": only \"%s\" is supported", r->path, key, name,
                  want);
}

static ps_status read_sizes(const ps__config_reader *r, const ps__family *family,
                            ps_model_config *c) {
  PS_TRY(ps__config_uint(r, r->j, "vocab_size", PS__CONFIG_REQUIRED, &c->vocab_size));
  PS_TRY(ps__config_uint(r, r->j, "hidden_size", PS__CONFIG_REQUIRED, &c->dim));
  PS_TRY(ps__config_uint(r, r->j, "intermediate_size",
                         family->default_ffn_dim ? family->default_ffn_dim : PS__CONFIG_REQUIRED,
                         &c->ffn_dim));
  PS_TRY(ps__config_uint(r, r->j, "num_hidden_layers", PS__CONFIG_REQUIRED, &c->n_layers));
  PS_TRY(ps__config_uint(r, r->j, "num_attention_heads", PS__CONFIG_REQUIRED, &c->n_heads));
  PS_TRY(ps__config_uint(r, r->j, "max_position_embeddings", 0, &c->max_positions));
  if (family->latent)
    return ps__config_latent(r, family->latent, c);
  /* absent keys have the family's default; null means num_attention_heads in every family */
  const bool kv_absent = !ps__json_get(r->j, "num_key_value_heads");
  PS_TRY(
      ps__config_uint(r, r->j, "num_key_value_heads",
                      kv_absent && family->default_kv_heads ? family->default_kv_heads : c->n_heads,
                      &c->n_kv_heads));
  if (ps__config_field(r->j, "head_dim"))
    return ps__config_uint(r, r->j, "head_dim", 0, &c->head_dim);
  if (family->default_head_dim && !ps__json_get(r->j, "head_dim")) {
    c->head_dim = family->default_head_dim;
    return PS_OK;
  }
  PS_TRY(ps__config_in_range(r->path, "num_attention_heads", c->n_heads, 1, MAX_HEADS));
  if (c->dim % c->n_heads)
    return ps__fail(
        PS_EFORMAT,
        "%s: hidden_size is %u: without head_dim it must be a multiple of num_attention_heads, %u",
        r->path, c->dim, c->n_heads);
  c->head_dim = c->dim / c->n_heads;
  return PS_OK;
}

/* @c has its family and whether it is tied. */
static ps_status read_config(const ps__config_reader *r, ps_model_config *c) {
  const ps__family *family = ps__family_at(c->family);
  double eps = 0;
  PS_TRY(refuse_foreign(r, family));
  PS_TRY(read_sizes(r, family, c));
  PS_TRY(read_activation(r, family, c));
  PS_TRY(read_dropout(r, c));
  PS_TRY(ps__config_number(r, r->j, "rms_norm_eps",
                           family->default_norm_eps > 0 ? family->default_norm_eps : 1e-6, &eps));
  c->norm_eps = (float)eps;
  PS_TRY(ps__config_token(r, "bos_token_id", c->vocab_size, &c->bos_token_id));
  PS_TRY(ps__config_token(r, "eos_token_id", c->vocab_size, &c->eos_token_id));
  c->qkv_bias = family->has_qkv_bias;
  if (family->has_qkv_bias_only)
    PS_TRY(ps__config_bool(r, r->j, "attention_bias", true, &c->qkv_bias));
  c->interleaved_rope = family->interleaved_rope;
  c->qk_norm = family->qk_norm;
  PS_TRY(check_sizes(c, r->path)); /* bounds what the rest of reading goes over */
  PS_TRY(ps__config_pad(r, family, c));
  if (!family->has_own_rope)
    PS_TRY(ps__config_rope(r, c));
  PS_TRY(family->read(r, c));
  PS_TRY(ps__score_read(r, c));
  return ps_model_config_check(c, r->path);
}

/* Vision-language models tie by the whole's config. Where the text model's may say so too, either
 * counts. */
static ps_status read_tied(const ps__config_reader *r, bool tied_by_default, bool either,
                           ps_model_config *c) {
  uint32_t inner = 0;
  const ps__json *from = r->outer ? r->outer : r->j;
  PS_TRY(ps__config_bool(r, from, "tie_word_embeddings", tied_by_default, &c->tied_embeddings));
  if (either)
    PS_TRY(ps__config_bool(r, r->j, "tie_word_embeddings", false, &inner));
  c->tied_embeddings |= inner;
  return PS_OK;
}

static ps_status read_whole(ps__config_reader r, ps_model_config *out) {
  const ps__tower *tower = NULL;
  const ps__json *text = NULL;
  ps_model_config c = {.struct_bytes = sizeof c};
  if (ps__json_type(r.j) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: is %s: a model config must be an object", r.path,
                    ps__config_kind(r.j));
  PS_TRY(ps__tower_find(&r, &tower, &text));
  PS_TRY(tower ? find_named(tower->family, &c.family) : find_family(&r, &c.family));
  c.multimodal = tower != NULL;
  if (tower) {
    r.outer = r.j;
    r.j = text;
    r.absent = tower->absent;
  }
  const bool tied = tower ? tower->tied_by_default : ps__family_at(c.family)->tied_by_default;
  PS_TRY(read_tied(&r, tied, tower && tower->flat, &c));
  PS_TRY(read_config(&r, &c));
  *out = c;
  return PS_OK;
}

static ps_status read_file(ps_model_config *out, const char *path, bool is_dir, bool warn) {
  char *file = NULL;
  if (is_dir)
    PS_TRY(ps__model_path(&file, path, "config.json"));
  else if (!(file = ps__strdup(path)))
    return ps__fail(PS_ENOMEM, "%s: no memory left to read the config", path);
  ps__json *j = NULL;
  ps_status r = ps__json_read_file(&j, file, PS__MAX_CONFIG_BYTES);
  if (r == PS_OK)
    r = read_whole((ps__config_reader){.j = j, .path = file, .warn = warn}, out);
  ps__json_free(j);
  ps__free(file);
  return r;
}

/* "owner/name", no path by its look; the owner is no directory here. */
static bool is_hub_id(const char *path) {
  struct stat st;
  char owner[128];
  const char *slash = strchr(path, '/');
  const size_t n = slash ? (size_t)(slash - path) : 0;
  if (!n || n >= sizeof owner || path[0] == '.' || path[0] == '~' || !slash[1] ||
      strchr(slash + 1, '/'))
    return false;
  memcpy(owner, path, n);
  owner[n] = 0;
  return stat(owner, &st) != 0;
}

ps_status ps__model_config_read(ps_model_config *out, const char *path, bool warn) {
  struct stat st;
  ps_model_config c;
  bool own_head = false;
  if (stat(path, &st) != 0)
    return is_hub_id(path)
               ? ps__fail(PS_EIO,
                          "%s: cannot be opened: %s: where it is a model of the Hugging "
                          "Face hub, run the Python command penstock, which opens it by this "
                          "name, or download it (hf download NAME --local-dir DIR) and give DIR",
                          path, strerror(errno))
               : ps__fail_to_open(path, errno);
  PS_TRY(read_file(&c, path, S_ISDIR(st.st_mode), warn));
  if (c.tied_embeddings && S_ISDIR(st.st_mode))
    PS_TRY(ps__model_own_head(path, &own_head));
  c.tied_embeddings = c.tied_embeddings && !own_head;
  if (own_head && warn)
    ps__log(PS_LOG_WARN,
            "%s: config.json ties the head to the embedding, but lm_head.weight differs from "
            "model.embed_tokens.weight: lm_head.weight is used, as with tie_word_embeddings false",
            path);
  *out = c;
  return PS_OK;
}

ps_status ps_model_config_read(ps_model_config *out, const char *path) {
  if (!out || !path)
    return ps__fail(PS_EINVAL,
                    "ps_model_config_read: no path or no place for the result was given");
  return ps__model_config_read(out, path, true);
}
