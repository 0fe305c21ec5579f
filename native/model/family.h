/* family.h - what a family of models is: how its config.json reads and what layers it has. A family
 * is one file of native/model/families/ and one line of the table in families/list.c. */
#ifndef PS_MODEL_FAMILY_H
#define PS_MODEL_FAMILY_H
#include "core/core.h"
#include "model/decoder.h"
#include <penstock/model.h>

/* ---- reading config.json --------------------------------------------------------------------- */

typedef struct ps__family ps__family;
typedef struct ps__config_default {
  const char *key;
  double value;
} ps__config_default;
typedef struct ps__config_reader {
  const ps__json *j; /* the whole object; of a vision-language model the text model's */
  const char *path;  /* for messages */
  bool warn;         /* of what is read in one of several ways */
  /* of a vision-language model the whole object, else NULL; and what absent keys of @j mean in
   * place of the family's defaults */
  const ps__json *outer;
  const ps__config_default *absent;
} ps__config_reader;

enum { PS__CONFIG_REQUIRED = UINT32_MAX }; /* a fallback that is none: the key must be there */

/* ps__config_field() - the value of a key; NULL where it is absent or null. */
const ps__json *ps__config_field(const ps__json *j, const char *key);
/* ps__config_is_quantization() - whether @key of config.json describes quantized weights. */
bool ps__config_is_quantization(const char *key);
/* ps__config_check_quantization() - whether what it says of them is read. Errors: PS_EFORMAT. */
ps_status ps__config_check_quantization(const ps__config_reader *r);
/* ps__config_kind() - what a value is, in words: "a list". */
const char *ps__config_kind(const ps__json *v);
/* The value of @key in @from, @fallback where it is absent. Errors: PS_EFORMAT names file, key and
 * value where it has another type or, for an unsigned integer, is not below 2^32. */
ps_status ps__config_uint(const ps__config_reader *r, const ps__json *from, const char *key,
                          uint32_t fallback, uint32_t *out);
ps_status ps__config_number(const ps__config_reader *r, const ps__json *from, const char *key,
                            double fallback, double *out);
ps_status ps__config_bool(const ps__config_reader *r, const ps__json *from, const char *key,
                          bool fallback, uint32_t *out);
/* ps__config_positive() - a number of the config above 0 and at most 1e6. */
ps_status ps__config_positive(const ps__config_reader *r, const char *key, double fallback,
                              double *out);
/* ps__config_token() - a token id, or the first of a list; -1 where it is absent, negative or past
 * the vocabulary. Token ids serve sampling alone. */
ps_status ps__config_token(const ps__config_reader *r, const char *key, uint32_t vocab,
                           int32_t *out);
/* ps__config_pad() - pad_token_id, which as in PyTorch may count from the vocabulary's end (-1: its
 * last token), or the default of @family where the vocabulary has it. Goes by vocab_size of @c.
 * Errors: PS_EFORMAT where it is no token of the vocabulary. */
ps_status ps__config_pad(const ps__config_reader *r, const ps__family *family, ps_model_config *c);
/* ps__config_in_range() - PS_EFORMAT where @value of @field is not in @lo..@hi. */
ps_status ps__config_in_range(const char *name, const char *field, uint32_t value, uint32_t lo,
                              uint32_t hi);
/* ps__config_rope() - theta and scaling, from rope_theta and rope_scaling or, as transformers 5
 * writes them, from rope_parameters (config_rope.c). Goes by the family of @c. */
ps_status ps__config_rope(const ps__config_reader *r, ps_model_config *c);
/* ps__config_copy() - @j as it is, under @key; ps__config_copy_all() - all that is in it.
 * ps__config_fill() - config.json of @model_dir, from which @c was read, as it is beside weights of
 * type @dtype (config_write.c), into a writer that the caller frees. Where @c is not multimodal and
 * the file is, the config of the text model alone. Errors: PS_EIO, PS_EFORMAT, PS_ENOMEM. */
void ps__config_copy(ps__jsonw *w, const char *key, const ps__json *j);
void ps__config_copy_all(ps__jsonw *w, const ps__json *j);
ps_status ps__config_fill(ps__jsonw **out, const ps_model_config *c, const char *model_dir,
                          ps_dtype dtype);
/* ps__config_full_attention() - PS_EFORMAT where layer_types names another kind of attention. */
ps_status ps__config_full_attention(const ps__config_reader *r, ps_model_config *c);
/* ps__config_layer_types() - layer_types, where it is there: a layer with "sliding_attention" gets
 * @flags and, in *sliding, counts. *given: the list is there. Errors: PS_EFORMAT for another length
 * than num_hidden_layers, or another kind of attention. */
ps_status ps__config_layer_types(const ps__config_reader *r, ps_model_config *c, uint8_t flags,
                                 bool *given, uint32_t *sliding);
/* ps__config_window() - sliding_window, @fallback where it is absent and 0 where it is null. */
ps_status ps__config_window(const ps__config_reader *r, uint32_t fallback, uint32_t *out);
/* ps__config_sliding_layers() - gives @flags to the layers with windows, of sliding_window, 4096 by
 * default: those that layer_types calls sliding or, where it is absent, all but every @pattern-th.
 * ps__config_local_rope() - local_rope_theta, from @key, NULL for none, or, as transformers 5
 * writes it, from rope_parameters.sliding_attention. @fallback where it is absent. */
ps_status ps__config_sliding_layers(const ps__config_reader *r, ps_model_config *c, uint8_t flags,
                                    uint32_t pattern);
ps_status ps__config_local_rope(const ps__config_reader *r, const char *key, double fallback,
                                ps_model_config *c);
/* ps__config_needs_window() - PS_EFORMAT where @sliding layers have sliding attention, but the
 * config has no sliding_window for them, for @why. */
ps_status ps__config_needs_window(const ps__config_reader *r, const ps_model_config *c,
                                  uint32_t sliding, const char *why);

/* ps__score_class() - the name of the family's classifier; NULL: it has none.
 * ps__score_read() - problem and n_labels of a config whose architecture is that. Errors:
 * PS_EFORMAT.
 * ps__score_check() - whether they are in range. Errors: PS_EINVAL.
 * ps__score_is_new() - whether @c has a `score` that the config file, @config, does not know;
 * ps__score_key() - a key that says which; ps__score_write() - these keys. */
enum { PS__CLASS_BYTES = 96 };
const char *ps__score_class(const ps__family *family, char name[PS__CLASS_BYTES]);
ps_status ps__score_read(const ps__config_reader *r, ps_model_config *c);
ps_status ps__score_check(const ps_model_config *c, const char *name);
bool ps__score_is_new(const ps_model_config *c, const ps__json *config);
bool ps__score_key(const char *key);
void ps__score_write(ps__jsonw *w, const ps_model_config *c);

/* ps__config_experts() - the five fields of experts, from n_experts to router_aux_loss. The
 * family says which layers have experts. Refuses groups, capacity and jitter, and shared experts
 * where the family has none. */
typedef struct ps__experts_defaults { /* of absent keys */
  uint32_t n_experts, n_used;
  const char *count_key; /* of n_experts; NULL: num_experts, or num_local_experts */
  const char *used_key;  /* of n_experts_used; NULL: num_experts_per_tok */
  bool has_shared;       /* shared experts, groups and a scale: ps__config_shared_experts() */
  uint32_t shared_dim;   /* shared_expert_intermediate_size; 0: no key of the family */
  bool renorm_by_default;
  bool always_renorm;  /* norm_topk_prob is no key of the family: true */
  const char *dim_key; /* of expert_dim, which is @dim without it; NULL: it is ffn_dim */
  uint32_t dim;
  double aux_loss;
} ps__experts_defaults;
ps_status ps__config_experts(const ps__config_reader *r, const ps__experts_defaults *d,
                             ps_model_config *c);
/* ps__config_sparse_layers() - PS_LAYER_EXPERTS for each decoder_sparse_step-th layer, but for
 * those of mlp_only_layers. */
ps_status ps__config_sparse_layers(const ps__config_reader *r, ps_model_config *c);

/* ps__config_latent() - the sizes of latent attention's heads, in place of those that other
 * families have (config_latent.c).
 * ps__config_latent_scale() - the scale of its scores, which RoPE's scaling changes.
 * ps__config_shared_experts() - as ps__config_experts(), with shared experts, groups and the scale
 * of weights; the first layers, first_k_dense_replace, have none. */
typedef struct ps__latent_defaults { /* of absent keys */
  uint32_t kv_rank, q_rank, nope_dim, rotary_dim, value_dim;
  uint32_t n_dense, n_shared, n_groups, n_groups_used;
  double router_scale;
  bool norm_topk_prob;
} ps__latent_defaults;
ps_status ps__config_latent(const ps__config_reader *r, const ps__latent_defaults *d,
                            ps_model_config *c);
void ps__config_latent_scale(ps_model_config *c);
ps_status ps__config_shared_experts(const ps__config_reader *r, const ps__latent_defaults *d,
                                    const ps__experts_defaults *e, ps_model_config *c);

/* ---- a family -------------------------------------------------------------------------------- */

struct ps__family {
  const char *model_type, *architecture; /* config.json's "model_type", "architectures"[0] */
  /* whose ...ForSequenceClassification the family's is; NULL: the architecture's. "": there is
   * none in transformers */
  const char *classifier_of;
  /* What transformers takes for absent keys. 0: num_attention_heads, hidden_size over it, no
   * original_max_position_embeddings, 10000, 1e-6 */
  uint32_t default_kv_heads, default_head_dim, default_original_positions;
  uint32_t default_ffn_dim; /* 0: intermediate_size must be there */
  double default_rope_theta, default_norm_eps;
  bool has_default_pad; /* where pad_token_id is absent: default_pad. Else there is none then */
  uint32_t default_pad;
  bool tied_by_default;
  bool has_experts;
  bool has_qkv_bias;      /* whatever attention_bias says */
  bool has_qkv_bias_only; /* attention_bias, true by default, says whether; there is none on o */
  bool has_partial_rope;
  double default_partial_rope;  /* partial_rotary_factor; 0: 1 */
  bool interleaved_rope;        /* as ps_model_config.interleaved_rope */
  bool has_mrope;               /* a text model's file may name M-RoPE, which is plain RoPE there */
  bool has_ntk_alpha;           /* rope_type "dynamic" with alpha is a larger theta, always */
  bool has_local_rope;          /* layers with sliding attention have RoPE of their own */
  const char *local_rope_key;   /* its theta's in transformers 4; NULL: none */
  bool has_own_rope;            /* read() reads RoPE; ps__config_rope() is not called */
  uint32_t qk_norm;             /* as ps_model_config.qk_norm */
  uint32_t activation;          /* ps_activation, the one that is computed */
  const char *activation_alias; /* its older name in config.json; NULL: none */
  const char *activation_key;   /* NULL: "hidden_act" */
  const ps__latent_defaults *latent; /* it has latent attention; NULL: none */
  bool has_mtp;        /* files may have layers past the last, for several tokens at once */
  bool is_of_5;        /* transformers 4 does not have it: its config.json needs no older keys */
  bool has_type_alone; /* transformers 4 refuses more in rope_scaling than type and the factors */
  const char *const *longrope_names; /* old ones, which transformers still reads; then NULL */
  const char *const *own_keys; /* which of config.c's keys of some families it reads; then NULL */
  /* reads the family's own keys into @c and refuses what would change the math; the keys that
   * all families have are in @c already */
  ps_status (*read)(const ps__config_reader *r, ps_model_config *c);
  const ps__decoder *decoder; /* what the layers are */
};

/* ps__family_at() - by ps_model_config.family; NULL past the last. */
const ps__family *ps__family_at(uint32_t idx);
/* Decoders for families with their names: Llama's, whose norms stand before the halves
 * (families/llama.c), and that of OLMo 2, whose norms stand after them (families/olmo2.c). */
extern const ps__decoder ps__decoder_llama, ps__decoder_olmo2;
#endif
