/* penstock/model.h - a model: its configuration, its parameters, and where each lies in its unit.
 *
 * A model is a list of LAYERS, each of one UNIT or of several that follow each other:
 *   - layer 0 is the embedding;
 *   - layers 1..L are the blocks. A block's experts are a unit of their own, after that of its
 *     other weights. So are a router's correction bias, which is not trained, LoRA's adapters, and
 *     matrices of a quantized base;
 *   - layer L+1 is the head: the final norm and lm_head, with tied embeddings the norm alone. Of a
 *     classifier or a reward model it has `score` in lm_head's place.
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
/* What ps_trainer_save() takes in a dtype's place for gpt-oss: bf16, but experts' matrices in
 * MXFP4, as they are published. hidden_size and intermediate_size are multiples of 32. */
enum { PS_SAVE_MXFP4 = 100 };

/* Recipes: the dtypes of weights, gradients and optimizer state, and the bytes of a parameter on
 * the host with AdamW's two states, gradients included:
 *   FP32         16  all fp32, on the device too
 *   FP32_MASTER  16  fp32 weights (the master copy) and state; bf16 gradients and a bf16 copy of
 *                    the weights; bf16 on the device
 *   BF16          8  all bf16; the optimizer's stores are rounded stochastically
 *   FP24_MASTER   9  as BF16, and the next 8 bits of each weight: together they are a master copy
 *                    of 24 bits, which is what the optimizer updates; bf16 on the device
 *   FP8           8  as BF16; the products of most blocks multiply e4m3 and e5m2 operands, each
 *                    tensor with a scale of its own (docs/design/fp8.md)
 *   FP8_MASTER   16  as FP32_MASTER, with such products
 * State may be in 8 bits instead, ps_plan_config.state_bits. */
typedef enum ps_recipe {
  PS_RECIPE_FP32 = 0,
  PS_RECIPE_FP32_MASTER = 1,
  PS_RECIPE_BF16 = 2,
  PS_RECIPE_FP24_MASTER = 3,
  PS_RECIPE_FP8 = 4,
  PS_RECIPE_FP8_MASTER = 5,
  PS_N_RECIPES = 6
} ps_recipe;
PS_API const char *ps_recipe_name(ps_recipe recipe); /* "fp32-master", "bf16" */
/* ps_recipe_parse() - a recipe by its name. Errors: PS_EINVAL names the value. */
PS_API ps_status ps_recipe_parse(ps_recipe *out, const char *name);

/* ps_model_family_name() - the families that can be trained, by ps_model_config.family, under
 * their "model_type" in config.json: "llama", "gemma2". Static storage; NULL past the last. */
PS_API const char *ps_model_family_name(uint32_t family);

/* ---- configuration --------------------------------------------------------------------------- */

/* RoPE frequencies: inv_freq[i] = theta^(-2i/rotary_dim), then scaled as transformers'
 * modeling_rope_utils does. */
typedef enum ps_rope_scaling {
  PS_ROPE_NONE = 0,
  PS_ROPE_LINEAR = 1,   /* divided by factor */
  PS_ROPE_LLAMA3 = 2,   /* long wavelengths divided by factor, short ones kept, linear between */
  PS_ROPE_YARN = 3,     /* arXiv 2309.00071 */
  PS_ROPE_LONGROPE = 4, /* each frequency divided by its own factor, arXiv 2402.13753 */
  /* a larger theta past max_position_embeddings: a model of longer sequences is refused */
  PS_ROPE_DYNAMIC = 5,
  /* the frequencies of all of head_dim, divided by factor: theta^(-2i/head_dim). The first
   * rotary_dim/2 pairs (i, i + head_dim/2) are turned (Gemma 4) */
  PS_ROPE_PROPORTIONAL = 6
} ps_rope_scaling;

enum { PS_ROPE_PAIRS = 128, PS_MAX_LAYERS = 4096 };

/* The largest coefficient of a router's terms of the loss. */
#define PS_MAX_ROUTER_LOSS 1.0

/* Fields have config.json's names; a kind reads those that it names. A number that config.json may
 * lack is 0 where it does, and then transformers' default counts. */
typedef struct ps_rope {
  uint32_t kind;               /* ps_rope_scaling */
  uint32_t rotary_dim;         /* elements of a head that are rotated; 0: head_dim */
  uint32_t original_positions; /* original_max_position_embeddings: llama3, yarn, longrope */
  uint32_t keep_fraction;      /* yarn: truncate is false */
  double theta, factor;
  double low_freq_factor, high_freq_factor;                       /* llama3 */
  double attention_factor;                                        /* yarn, longrope */
  double beta_fast, beta_slow, mscale, mscale_all_dim;            /* yarn */
  double short_factor[PS_ROPE_PAIRS], long_factor[PS_ROPE_PAIRS]; /* longrope: rotary_dim / 2 */
} ps_rope;

/* The function of the gated MLP: act(gate) * up. */
typedef enum ps_activation {
  PS_ACTIVATION_SILU = 0,
  PS_ACTIVATION_GELU_TANH = 1 /* GELU's tanh approximation */
} ps_activation;

/* What sets one layer apart, a bit set. 0: its attention sees all of the document's earlier tokens
 * and has RoPE, and its second half is an MLP. */
enum {
  PS_LAYER_WINDOW = 1,     /* sees ps_model_config.window tokens, its own among them */
  PS_LAYER_NO_ROPE = 2,    /* SmolLM3 */
  PS_LAYER_LOCAL_ROPE = 4, /* RoPE with local_rope_theta and no scaling (Gemma 3) */
  PS_LAYER_EXPERTS = 8,    /* experts and their router in the MLP's place */
  PS_LAYER_GLOBAL = 16,    /* heads as global_head_dim, global_kv_heads and shared_keys say */
  PS_LAYER_LINEAR = 32,    /* a gated delta-net in attention's place (Qwen3.5) */
  PS_LAYER_SHARED_KV = 64, /* no keys and values of its own: it has those of the last layer without
                            * this flag whose other flags are the same (Gemma 4 E2B, E4B) */
  PS_LAYER_FLAGS = 127
};

/* What a model is for. All but a language model have an own head. SINGLE_LABEL to PAIRS have
 * `score`, a matrix [n_labels, dim] without a bias, whose product with the last token's state are
 * a document's scores. A batch's target then stands at that token, and -1 at all others:
 *   SINGLE_LABEL  the label, 0 to n_labels - 1; loss: cross-entropy
 *   MULTI_LABEL   the document's labels as bits, label 0 the lowest; n_labels is at most 31. Loss:
 *                 the mean over labels of the binary cross-entropy
 *   REGRESSION    the bits of an fp32 number; n_labels is 1. Loss: the squared error
 *   PAIRS         two documents of a sequence, one of which is chosen: the target at the last token
 *                 of the rejected one is d, how many tokens before it the chosen one ends; there
 *                 the target is -1 - d. n_labels is 1. Loss: -log sigmoid(chosen - rejected)
 *   EMBEDDING     no head: the states after the final norm are what a plan's logits_fn gets.
 *                 n_labels is 0. It is not trained
 * The loss is the mean over a step's documents, or pairs. */
typedef enum ps_problem {
  PS_PROBLEM_LANGUAGE = 0,
  PS_PROBLEM_SINGLE_LABEL = 1,
  PS_PROBLEM_MULTI_LABEL = 2,
  PS_PROBLEM_REGRESSION = 3,
  PS_PROBLEM_PAIRS = 4,
  PS_PROBLEM_EMBEDDING = 5,
  PS_N_PROBLEMS = 6
} ps_problem;
enum { PS_MAX_LABELS = 65536, PS_MAX_LABEL_BITS = 31 };
/* ps_problem_name() - "single-label", "pairs"; NULL past the last. */
PS_API const char *ps_problem_name(uint32_t problem);
/* ps_problem_figure() - what ps_step_metrics.right is of: "accuracy", "mean_absolute_error"; NULL
 * where a model has no `score`. */
PS_API const char *ps_problem_figure(uint32_t problem);

/* The fields mean what Hugging Face's names mean. ps_model_config_check() checks them. A scale or
 * a cap of 0 stands for none. */
typedef struct ps_model_config {
  uint32_t struct_bytes; /* sizeof(ps_model_config) */
  uint32_t family;       /* by ps_model_family_name() */
  /* n_layers: blocks (num_hidden_layers) */
  uint32_t vocab_size, n_layers, dim, n_heads, n_kv_heads, head_dim, ffn_dim;
  uint32_t max_positions;   /* max_position_embeddings; 0 when the config has none */
  uint32_t tied_embeddings; /* tie_word_embeddings */
  uint32_t activation;      /* ps_activation */
  /* Biases on q, k and v (Qwen2). Llama's attention_bias is refused: it has a bias on o too. */
  uint32_t qkv_bias;
  /* RMSNorm on q and k before RoPE: 0 none; 1 over each head (Qwen3, Gemma 3); 2 over the whole
   * row of all heads (OLMo 2). 3: over each head, after RoPE (Hunyuan) */
  uint32_t qk_norm;
  uint32_t window;                    /* sliding_window, for layers with PS_LAYER_WINDOW */
  int32_t bos_token_id, eos_token_id; /* -1 when the config has none */
  /* Its row of the embedding gets no gradient from the lookup, as in transformers; of the head's
   * rows, with tied embeddings, it does. Weight decay goes on. -1: no such row. */
  int32_t pad_token_id;
  float norm_eps;
  float attention_scale;   /* of the scores; 0: 1/sqrt(head_dim) */
  float attention_softcap; /* scores become cap tanh(score / cap) (Gemma 2) */
  float logit_softcap;     /* the same of the logits */
  float embedding_scale;   /* of the looked-up rows (Gemma, Granite) */
  float residual_scale;    /* of what a layer adds to the residual stream (Granite) */
  float logit_scale;       /* of the logits, before the cap (Granite: 1 / logits_scaling) */
  float dropout;           /* the largest in config.json: a plan of training refuses it */
  /* Layers with PS_LAYER_EXPERTS; 0 in models without such layers:
   *   n_experts, n_experts_used  in all, at most 512; of each token, at most 16
   *   expert_dim                 as ffn_dim, of an expert
   *   norm_topk_prob             1: the weights of a token's experts are divided by their sum
   *   router_aux_loss            router_aux_loss_coef; what training takes unless told otherwise
   *   shared_dim                 as ffn_dim, of the experts that every token has, in Gemma 4 of the
   *                              MLP beside the experts; 0: there are none. Qwen's output is
   *                              multiplied by the sigmoid of a gate
   *   n_expert_groups, n_groups_used  experts are chosen from so many groups of them; 0: from all
   *   router_sigmoid             1: scores are sigmoids of the logits, and the choice is that of
   *                              score plus e_score_correction_bias; else a softmax
   *   router_scale               of the weights (routed_scaling_factor); 0: none */
  uint32_t n_experts, n_experts_used, expert_dim, norm_topk_prob;
  float router_aux_loss;
  /* 1: config.json is of a vision-language model, whose text model this is. A save carries the
   * other parts over. With 0 in place of what was read, ps_model_config_write() writes the config
   * of the text model alone */
  uint32_t multimodal;
  uint32_t interleaved_rope; /* RoPE turns neighbours (2i, 2i+1), not (i, i + half) (GLM-4) */
  uint32_t reserved;         /* 0 */
  /* gpt-oss. o_bias: with qkv_bias, a bias on o too. attention_sinks: each head has a learned logit
   * in its softmax, of a key without a value. glu_limit above 0: experts, their gate and up and
   * their router have biases, and the gate is (u + 1) g sigmoid(glu_alpha g), with g cut above at
   * glu_limit and u at glu_limit on both sides */
  uint32_t o_bias, attention_sinks;
  float glu_alpha, glu_limit;
  uint32_t problem, n_labels; /* ps_problem, which says what n_labels may be; 0: of a language
                               * model */
  uint32_t value_norm;        /* 1: RMSNorm on v over each head, without weights (Gemma 4) */
  /* Layers with PS_LAYER_GLOBAL (Gemma 4); 0 in models without such layers:
   *   global_head_dim, global_kv_heads  in place of head_dim and n_kv_heads. config.rope is theirs
   *   shared_keys                       1: v is the norm of what k is the norm of; no v_proj */
  uint32_t global_head_dim, global_kv_heads, shared_keys;
  /* q is multiplied by 1 + beta ln(1 + floor(position / rope.original_positions)) (Ministral 3);
   * 0: it is not */
  double position_beta;
  double local_rope_theta;
  /* Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): kv_rank 0: there is none.
   *   kv_rank, q_rank  kv_lora_rank; q_lora_rank, 0 where q has one projection
   *   value_dim        v_head_dim, at most head_dim, which is qk_nope_head_dim + qk_rope_head_dim;
   *                    rope.rotary_dim is the latter */
  uint32_t kv_rank, q_rank, value_dim;
  uint32_t shared_dim, n_expert_groups, n_groups_used, router_sigmoid;
  float router_scale;
  /* 1: attention's output is multiplied by the sigmoid of a gate, which q_proj has beside q: head
   * by head 2 head_dim rows (Qwen3.5) */
  uint32_t attention_gate;
  /* Layers with PS_LAYER_LINEAR: linear_num_key_heads, linear_num_value_heads, linear_key_head_dim,
   * linear_value_head_dim, linear_conv_kernel_dim; 0 in models without such layers */
  uint32_t linear_key_heads, linear_value_heads, linear_key_dim, linear_value_dim,
      linear_conv_width;
  uint32_t double_wide_mlp; /* 1: ffn_dim of layers with PS_LAYER_SHARED_KV counts twice */
  /* Per-layer embeddings (Gemma 4 E2B, E4B): hidden_size_per_layer_input, 0: there are none;
   * vocab_size_per_layer_input */
  uint32_t per_layer_dim, per_layer_vocab;
  ps_rope rope;
  uint8_t layer_flags[PS_MAX_LAYERS]; /* PS_LAYER_*, by block from 0 */
} ps_model_config;

/* ps_model_config_read() - from DIR/config.json or from a config file itself, of a family of
 * ps_model_family_name(). Absent keys have transformers' defaults. A field that changes the math
 * and is not supported, or that the family does not have, is refused by name. Examples: other
 * activations, other RoPE types, biases, experts or multipliers that only other families have,
 * weights that are quantized otherwise than in FP8 or MXFP4. A file of more than 1 MiB is refused.
 * Where DIR ties the head to the embedding, but its safetensors have an lm_head.weight with other
 * values, tied_embeddings is 0, with a warning (ps_log_set()). Where longrope's factor and lengths
 * disagree, the version of transformers that wrote the file decides, with a warning.
 * An architecture ...ForSequenceClassification has a `score` (ps_problem): problem_type says which
 * one, else id2label: 1 is PS_PROBLEM_REGRESSION, more are PS_PROBLEM_SINGLE_LABEL.
 * Errors: PS_EIO; PS_EFORMAT names file, field, value and limit. */
PS_API ps_status ps_model_config_read(ps_model_config *out, const char *path);
/* ps_model_config_write() - config.json of @model_dir, from which @cfg was read, as the file @path
 * beside weights of type @dtype. What changes is the dtype, tie_word_embeddings where
 * cfg->tied_embeddings is 0, architectures, id2label, label2id and problem_type where cfg has a
 * `score`, and RoPE: where the file has rope_parameters, as transformers 5 writes
 * them, it gets the keys that transformers 4 reads too. Errors: PS_EINVAL, PS_EIO, PS_EFORMAT,
 * PS_ENOMEM. */
PS_API ps_status ps_model_config_write(const ps_model_config *cfg, const char *model_dir,
                                       ps_dtype dtype, const char *path);
/* ps_model_config_saves_as() - whether a model may be saved as @dtype, a ps_dtype or PS_SAVE_MXFP4.
 * Errors: PS_EINVAL: why not. */
PS_API ps_status ps_model_config_saves_as(const ps_model_config *cfg, uint32_t dtype);
/* ps_model_config_score() - give @cfg the head of a @problem with @n_labels. A trainer draws the
 * weights of a `score` that the model directory lacks. Of a model that has one, n_labels stays:
 * there may be fewer, and with 1 it is for both regression and pairs. Not for vision-language
 * models. Errors: PS_EINVAL says what does not go together. */
PS_API ps_status ps_model_config_score(ps_model_config *cfg, uint32_t problem, uint32_t n_labels);
/* ps_model_config_check() - whether all fields are in range. Errors: PS_EFORMAT, PS_EINVAL name
 * @name_for_messages, field, value and limit. */
PS_API ps_status ps_model_config_check(const ps_model_config *cfg, const char *name_for_messages);

/* ---- parameters ------------------------------------------------------------------------------ */

typedef enum ps_param_role {
  PS_PARAM_MATRIX = 0,
  PS_PARAM_NORM = 1, /* RMSNorm weight */
  PS_PARAM_BIAS = 2,
  PS_PARAM_CONSTANT = 3 /* not trained: its gradient is 0, and it never decays */
} ps_param_role;

enum { PS_PARAM_NAME_BYTES = 96 };
/* One tensor under its Hugging Face name, e.g. "model.layers.3.self_attn.q_proj.weight". */
typedef struct ps_param_info {
  char name[PS_PARAM_NAME_BYTES];
  uint32_t unit, role; /* ps_param_role */
  uint32_t n_dims;     /* 1 or 2, of a convolution by channel 3: [channels, 1, width] */
  uint32_t init_uniform;
  uint64_t shape[3]; /* row-major, shape[1] = 1 for a vector */
  /* ELEMENTS from the start of the unit. No alignment is promised: q, k, v and gate, up follow each
   * other without a gap, so that each is one fused matrix. */
  uint64_t offset;
  uint64_t n; /* elements */
  /* A fresh model draws it from the normal distribution N(init_mean, init_std); with init_uniform
   * from the uniform distribution of the same mean and standard deviation. */
  float init_mean, init_std;
  uint32_t exact; /* 1: its values are fp32, in files too, whatever the recipe or dtype */
  uint32_t reserved;
} ps_param_info;

/* A model of a configuration: its units and parameters. */
typedef struct ps_model ps_model;
/* ps_model_create() - Errors: those of ps_model_config_check(); PS_EINVAL names what is wrong with
 * RoPE; PS_ENOMEM. Freed by ps_model_destroy(). The other functions only read: any thread may call
 * them. */
PS_API ps_status ps_model_create(ps_model **out, const ps_model_config *cfg);
PS_API void ps_model_destroy(ps_model *m);
/* ps_model_n_units() - of a dense model n_layers + 2: one for the embedding, for each block and for
 * the head. Experts add units. The model of a plan with LoRA (ps_plan_model()) has one more for the
 * adapters of each block, and more with a quantized base.
 * ps_model_unit_elements() - elements of a unit with its zero padding, a multiple of 64.
 * ps_model_n_params() - tensors of the model. */
PS_API uint32_t ps_model_n_units(const ps_model *m);
PS_API uint64_t ps_model_unit_elements(const ps_model *m, uint32_t unit);
PS_API uint32_t ps_model_n_params(const ps_model *m);
/* ps_model_param() - tensor @idx, in unit order. Errors: PS_EINVAL past the last. */
PS_API ps_status ps_model_param(const ps_model *m, uint32_t idx, ps_param_info *out);
/* ps_model_find() - the tensor of that name; UINT32_MAX when there is none. Time: O(1). */
PS_API uint32_t ps_model_find(const ps_model *m, const char *name);
/* ps_model_n_elements() - parameters of the model: without padding, tied ones once. */
PS_API uint64_t ps_model_n_elements(const ps_model *m);

/* ---- LoRA (arXiv 2106.09685) -----------------------------------------------------------------
 * The model's own weights are frozen. Each projection W of the targets, in every block, has an
 * adapter of two matrices, A[rank, n_in] and B[n_out, rank], which are trained:
 *   y = x W^T + s (x A^T) B^T,   s = alpha / rank; with rslora alpha / sqrt(rank)
 * There is no dropout. */
enum {
  PS_LORA_Q_PROJ = 1,
  PS_LORA_K_PROJ = 2,
  PS_LORA_V_PROJ = 4,
  PS_LORA_O_PROJ = 8,
  PS_LORA_GATE_PROJ = 16,
  PS_LORA_UP_PROJ = 32,
  PS_LORA_DOWN_PROJ = 64,
  PS_LORA_QKV_PROJ = 128,     /* q, k and v where they are one matrix on disk (Phi-3) */
  PS_LORA_GATE_UP_PROJ = 256, /* gate and up, alike */
  PS_LORA_Q_A_PROJ = 512,     /* of latent attention, which has q_proj or these two */
  PS_LORA_Q_B_PROJ = 1024,
  PS_LORA_KV_A_PROJ = 2048, /* kv_a_proj_with_mqa */
  PS_LORA_KV_B_PROJ = 4096,
  PS_LORA_IN_PROJ_QKV = 8192, /* of a gated delta-net: these five (Qwen3.5) */
  PS_LORA_IN_PROJ_Z = 16384,
  PS_LORA_IN_PROJ_B = 32768,
  PS_LORA_IN_PROJ_A = 65536,
  PS_LORA_OUT_PROJ = 131072,
  PS_LORA_IN_PROJ_QKVZ = 262144, /* these two in place of the first four (Qwen3-Next) */
  PS_LORA_IN_PROJ_BA = 524288,
  PS_LORA_ALL = 1048575, /* all of these that the model has */
  PS_N_LORA_TARGETS = 20,
  PS_LORA_NAMES_BYTES = 256 /* room for the names of all */
};
#define PS_MAX_LORA_ALPHA 1e6
#define PS_MAX_LORA_RANK  65536
/* How the matrices of the blocks, which are frozen, are kept in host memory and cross the link. The
 * device dequantizes them before each layer pass: products and adapters have the recipe's dtype.
 * Norms, biases, routers, convolutions, the embedding and the head stay as the recipe has them.
 *   BYTES a weight  fp8 1.0625, nf4 0.53125, mxfp4 0.53125
 *   PS_BASE_FP8     e4m3, an fp32 scale for 64 weights of a row. FP8 weights with scales stay as
 *                   their checkpoint has them
 *   PS_BASE_NF4     NF4 (arXiv 2305.14314), the bf16 maximum of 64 weights of a row
 *   PS_BASE_MXFP4   OCP MXFP4: e2m1, a power of two for 32 weights of a row */
typedef enum ps_base {
  PS_BASE_PLAIN = 0, /* the recipe's dtype */
  PS_BASE_FP8 = 1,
  PS_BASE_NF4 = 2,
  PS_BASE_MXFP4 = 3,
  PS_N_BASES
} ps_base;
/* ps_base_name() - "bf16" (PS_BASE_PLAIN, of any recipe), "fp8", "nf4", "mxfp4"; "" past the last.
 * ps_base_parse() - from such a name. Errors: PS_EINVAL lists them. */
PS_API const char *ps_base_name(ps_base base);
PS_API ps_status ps_base_parse(uint32_t *out, const char *name);
typedef struct ps_lora {
  uint32_t rank;    /* 0: no adapters; the other fields are 0 then */
  uint32_t targets; /* PS_LORA_*, a bit set; 0 for a plan: PS_LORA_ALL */
  uint32_t rslora;
  uint32_t base; /* ps_base: of a plan; that of an adapter's directory is 0 */
  double alpha;  /* NAN for a plan: twice the rank */
} ps_lora;
/* ps_lora_targets_parse() - targets from their names with commas, "q_proj,v_proj", or from
 * "all-linear", which is PS_LORA_ALL. Errors: PS_EINVAL names the unknown one.
 * ps_lora_targets_text() - the names with commas. Errors: PS_EINVAL: @bytes are too few.
 * ps_lora_targets_all() - what PS_LORA_ALL stands for in a model. Errors: those of
 *        ps_model_create(); PS_EINVAL: a model with experts has no such thing. */
PS_API ps_status ps_lora_targets_parse(uint32_t *out, const char *names);
PS_API ps_status ps_lora_targets_text(char *buf, uint64_t bytes, uint32_t targets);
PS_API ps_status ps_lora_targets_all(uint32_t *out, const ps_model_config *cfg);

/* ---- model FLOPs (formulas: docs/design/training.md, "Metrics") ------------------------------ */
/* FLOPs of one sequence:
 *   matmul              products with the blocks' parameters in a forward pass
 *   attn_fwd, attn_bwd  attention of all blocks in a forward pass, in a backward pass
 *   head                the head's products in both passes
 *   sequence            both passes of the model: 3 matmul + attn_fwd + attn_bwd + head */
typedef struct ps_flops {
  double matmul, attn_fwd, attn_bwd, head, sequence;
} ps_flops;
/* ps_model_flops() - model FLOPs of a sequence of @seq_len tokens. Errors: PS_EINVAL where it is
 * not 1 to 2^30. */
PS_API ps_status ps_model_flops(const ps_model *m, uint64_t seq_len, ps_flops *out);

#ifdef __cplusplus
}
#endif
#endif
