/* penstock/model.h - what a model is: its configuration, its parameters, and where they live at
 * home.
 *
 * A model is a list of UNITS: unit 0 is the embedding, units 1..L are the blocks, unit L+1 is
 * the head (final norm and lm_head; with tied embeddings only the norm). A unit's parameters are
 * one contiguous run of elements, which is what crosses the link; its gradient and its optimizer
 * state have the same layout. */
#ifndef PENSTOCK_MODEL_H
#define PENSTOCK_MODEL_H
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ps_dtype { PS_F32 = 0, PS_BF16 = 1, PS_N_DTYPES = 2 } ps_dtype;
PS_API size_t ps_dtype_bytes(ps_dtype dtype); /* 4, 2; 0 for an unknown one */

/* How state is kept. Bytes a parameter at home, gradients included:
 *   FP32         weights, gradients, moments fp32; fp32 on the device
 *                16
 *   FP32_MASTER  weights and moments fp32, a bf16 copy of the weights, bf16 gradients; bf16 on
 *                the device   16
 *   BF16         everything bf16, stores of the optimizer rounded stochastically
 *                8 */
typedef enum ps_recipe {
  PS_RECIPE_FP32 = 0,
  PS_RECIPE_FP32_MASTER = 1,
  PS_RECIPE_BF16 = 2,
  PS_N_RECIPES = 3
} ps_recipe;
PS_API const char *ps_recipe_name(ps_recipe recipe); /* "fp32", "fp32-master", "bf16" */
PS_API ps_status ps_recipe_parse(ps_recipe *out, const char *name);

/* ps_model_family_name() - the families that can be trained, by ps_model_config.family, under
 * their "model_type" in config.json: "llama", "qwen2", "qwen3". Static storage; NULL past the
 * last. */
PS_API const char *ps_model_family_name(uint32_t family);

/* RoPE frequencies: inv_freq[i] = theta^(-2i/head_dim), then scaled. LINEAR divides by factor.
 * LLAMA3 as transformers' modeling_rope_utils: wavelengths above original/low_freq are divided
 * by factor, below original/high_freq kept, linear between. */
typedef enum ps_rope_scaling {
  PS_ROPE_NONE = 0,
  PS_ROPE_LINEAR = 1,
  PS_ROPE_LLAMA3 = 2
} ps_rope_scaling;

/* Fields carry the Hugging Face names' meaning. Checked by ps_model_config_check(). */
typedef struct ps_model_config {
  uint32_t struct_bytes; /* sizeof(ps_model_config) */
  uint32_t family;       /* by ps_model_family_name() */
  uint32_t vocab_size, n_layers, dim, n_heads, n_kv_heads, head_dim, ffn_dim;
  uint32_t max_positions;   /* max_position_embeddings; 0 when the config has none */
  uint32_t tied_embeddings; /* tie_word_embeddings */
  /* biases on q, k, v (Qwen2; Llama's attention_bias is refused: it also puts one on o) */
  uint32_t qkv_bias;
  uint32_t qk_norm;      /* RMSNorm over head_dim on q and k before RoPE (Qwen3) */
  uint32_t rope_scaling; /* ps_rope_scaling */
  uint32_t rope_original_positions;
  int32_t bos_token_id, eos_token_id; /* -1 when the config has none */
  float norm_eps;
  float rope_factor, rope_low_freq, rope_high_freq;
  double rope_theta;
} ps_model_config;

/* ps_model_config_read() - from DIR/config.json or a config file itself; architectures
 * LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM (dense). A feature that would change
 * the math and is not supported (sliding window in use, other activations, other rope types,
 * quantized weights) is refused by name, and so is a file of more than 1 MiB. Errors: PS_EIO;
 * PS_EFORMAT names file, field, value, limit. */
PS_API ps_status ps_model_config_read(ps_model_config *out, const char *path);
PS_API ps_status ps_model_config_check(const ps_model_config *cfg, const char *name_for_messages);

/* ---- parameters ------------------------------------------------------------------------------ */

typedef enum ps_param_role {
  PS_PARAM_MATRIX = 0, /* decays */
  PS_PARAM_NORM = 1,   /* RMSNorm weight: no decay by default */
  PS_PARAM_BIAS = 2    /* no decay by default */
} ps_param_role;

enum { PS_PARAM_NAME_BYTES = 96 };
/* One tensor under its Hugging Face name, e.g. "model.layers.3.self_attn.q_proj.weight". */
typedef struct ps_param_info {
  char name[PS_PARAM_NAME_BYTES];
  uint32_t unit, role; /* ps_param_role */
  uint32_t n_dims;     /* 1 or 2 */
  uint32_t reserved;
  uint64_t shape[2]; /* row-major, shape[1] = 1 for a vector */
  /* ELEMENTS from the start of the unit; a multiple of 1: q,k,v and gate,up follow each other
   * without a gap, so that they are one fused matrix */
  uint64_t offset;
  uint64_t n; /* elements */
} ps_param_info;

/* ps_model_n_units() - n_layers + 2. ps_model_unit_elements() - elements of a unit, rounded up
 * to 64 with zero padding. */
PS_API uint32_t ps_model_n_units(const ps_model_config *cfg);
PS_API uint64_t ps_model_unit_elements(const ps_model_config *cfg, uint32_t unit);
PS_API uint32_t ps_model_n_params(const ps_model_config *cfg); /* tensors */
PS_API ps_status ps_model_param(const ps_model_config *cfg, uint32_t idx, ps_param_info *out);
/* parameters, padding not counted, tied ones once */
PS_API uint64_t ps_model_n_elements(const ps_model_config *cfg);

/* ---- model FLOPs (formulas: docs/design.md, "Metrics") --------------------------------------- */
typedef struct ps_flops {
  double layer_matmul, attn_fwd, attn_bwd, head; /* one sequence */
  /* the whole: L (3 matmul + attn fwd + attn bwd) + head */
  double sequence;
} ps_flops;
PS_API ps_status ps_model_flops(const ps_model_config *cfg, uint64_t seq_len, ps_flops *out);

#ifdef __cplusplus
}
#endif
#endif
