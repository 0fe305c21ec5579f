/* penstock/model.h - a model: its configuration, its parameters, and where each lies in its unit.
 *
 * A model is a list of UNITS:
 *   - unit 0 is the embedding;
 *   - units 1..L are the blocks;
 *   - unit L+1 is the head: the final norm and lm_head, with tied embeddings the norm alone.
 * A unit's parameters are one contiguous range of elements, which is what a transfer moves. Its
 * gradient and its optimizer state have the same layout. */
#ifndef PENSTOCK_MODEL_H
#define PENSTOCK_MODEL_H
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ps_dtype { PS_F32 = 0, PS_BF16 = 1, PS_N_DTYPES = 2 } ps_dtype;
PS_API size_t ps_dtype_bytes(ps_dtype dtype); /* 4, 2; 0 for an unknown one */

/* Recipes: the dtypes of weights, gradients and optimizer state, and the bytes of a parameter on
 * the host with AdamW's two states, gradients included:
 *   FP32         16  all fp32, on the device too
 *   FP32_MASTER  16  fp32 weights (the master copy) and state; bf16 gradients and a bf16 copy of
 *                    the weights; bf16 on the device
 *   BF16          8  all bf16; the optimizer's stores are rounded stochastically */
typedef enum ps_recipe {
  PS_RECIPE_FP32 = 0,
  PS_RECIPE_FP32_MASTER = 1,
  PS_RECIPE_BF16 = 2,
  PS_N_RECIPES = 3
} ps_recipe;
PS_API const char *ps_recipe_name(ps_recipe recipe); /* "fp32", "fp32-master", "bf16" */
/* ps_recipe_parse() - a recipe by its name. Errors: PS_EINVAL names the value. */
PS_API ps_status ps_recipe_parse(ps_recipe *out, const char *name);

/* ps_model_family_name() - the families that can be trained, by ps_model_config.family, under
 * their "model_type" in config.json: "llama", "qwen2", "qwen3". Static storage; NULL past the
 * last. */
PS_API const char *ps_model_family_name(uint32_t family);

/* RoPE frequencies: inv_freq[i] = theta^(-2i/head_dim), then scaled.
 *   LINEAR  divides by factor.
 *   LLAMA3  as transformers' modeling_rope_utils: wavelengths above original/low_freq have their
 *           frequency divided by factor, those below original/high_freq keep it, linear between. */
typedef enum ps_rope_scaling {
  PS_ROPE_NONE = 0,
  PS_ROPE_LINEAR = 1,
  PS_ROPE_LLAMA3 = 2
} ps_rope_scaling;

/* The fields mean what Hugging Face's names mean. ps_model_config_check() checks them. */
typedef struct ps_model_config {
  uint32_t struct_bytes; /* sizeof(ps_model_config) */
  uint32_t family;       /* by ps_model_family_name() */
  uint32_t vocab_size, n_layers, dim, n_heads, n_kv_heads, head_dim, ffn_dim;
  uint32_t max_positions;   /* max_position_embeddings; 0 when the config has none */
  uint32_t tied_embeddings; /* tie_word_embeddings */
  /* Biases on q, k and v (Qwen2). Llama's attention_bias is refused: it has a bias on o too. */
  uint32_t qkv_bias;
  uint32_t qk_norm;      /* RMSNorm over head_dim on q and k before RoPE (Qwen3) */
  uint32_t rope_scaling; /* ps_rope_scaling */
  uint32_t rope_original_positions;
  int32_t bos_token_id, eos_token_id; /* -1 when the config has none */
  float norm_eps;
  float rope_factor, rope_low_freq, rope_high_freq;
  double rope_theta;
} ps_model_config;

/* ps_model_config_read() - from DIR/config.json or from a config file itself. Architectures:
 * LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM (dense). Refused by name is a feature
 * that changes the math and is not supported: sliding windows in use, other activations, other RoPE
 * types, quantized weights. A file of more than 1 MiB is refused too. Errors: PS_EIO; PS_EFORMAT
 * names file, field, value and limit. */
PS_API ps_status ps_model_config_read(ps_model_config *out, const char *path);
/* ps_model_config_check() - whether all fields are in range. Errors: PS_EFORMAT, PS_EINVAL name
 * @name_for_messages, field, value and limit. */
PS_API ps_status ps_model_config_check(const ps_model_config *cfg, const char *name_for_messages);

/* ---- parameters ------------------------------------------------------------------------------ */

typedef enum ps_param_role {
  PS_PARAM_MATRIX = 0, /* has weight decay */
  PS_PARAM_NORM = 1,   /* RMSNorm weight: no weight decay by default */
  PS_PARAM_BIAS = 2    /* no weight decay by default */
} ps_param_role;

enum { PS_PARAM_NAME_BYTES = 96 };
/* One tensor under its Hugging Face name, e.g. "model.layers.3.self_attn.q_proj.weight". */
typedef struct ps_param_info {
  char name[PS_PARAM_NAME_BYTES];
  uint32_t unit, role; /* ps_param_role */
  uint32_t n_dims;     /* 1 or 2 */
  uint32_t reserved;
  uint64_t shape[2]; /* row-major, shape[1] = 1 for a vector */
  /* ELEMENTS from the start of the unit. No alignment is promised: q, k, v and gate, up follow each
   * other without a gap, so that each is one fused matrix. */
  uint64_t offset;
  uint64_t n; /* elements */
} ps_param_info;

/* ps_model_n_units() - n_layers + 2. ps_model_unit_elements() - elements of a unit with its zero
 * padding, a multiple of 64. ps_model_n_params() - tensors of the model. */
PS_API uint32_t ps_model_n_units(const ps_model_config *cfg);
PS_API uint64_t ps_model_unit_elements(const ps_model_config *cfg, uint32_t unit);
PS_API uint32_t ps_model_n_params(const ps_model_config *cfg);
/* ps_model_param() - tensor @idx, in unit order. Errors: PS_EINVAL past the last. */
PS_API ps_status ps_model_param(const ps_model_config *cfg, uint32_t idx, ps_param_info *out);
/* ps_model_n_elements() - parameters of the model: without padding, tied ones once. */
PS_API uint64_t ps_model_n_elements(const ps_model_config *cfg);

/* ---- model FLOPs (formulas: docs/design.md, "Metrics") --------------------------------------- */
typedef struct ps_flops {
  double layer_matmul, attn_fwd, attn_bwd, head; /* one sequence */
  /* all of it: L (3 layer_matmul + attn_fwd + attn_bwd) + head */
  double sequence;
} ps_flops;
/* ps_model_flops() - model FLOPs of a sequence of @seq_len tokens. Errors: PS_EINVAL for 0. */
PS_API ps_status ps_model_flops(const ps_model_config *cfg, uint64_t seq_len, ps_flops *out);

#ifdef __cplusplus
}
#endif
#endif
