/* decoder.h - the decoder: what Llama and its relatives have in common, as one description. A
 * family says which halves its blocks have, under which names, and which norms stand around them.
 *
 * A family whose layers are no such blocks describes them with native/model/define.h. */
#ifndef PS_MODEL_DECODER_H
#define PS_MODEL_DECODER_H
#include "model/model.h"

typedef struct ps__half_kind ps__half_kind; /* model/block.h */

/* A half of some layers' blocks. Names are those of parameters after "model.layers.N.". */
typedef struct ps__half_use {
  uint32_t flags; /* of the layers that have all of these PS_LAYER_*; 0: of all others */
  const ps__half_kind *kind;
  const void *names;            /* the kind's own: ps__attention_names, ps__mlp_names */
  const char *norm, *post_norm; /* before the half, after it; NULL: none */
} ps__half_use;
/* The halves of a block with Llama's norms, which stand before them. */
#define PS__FIRST_HALF(flags_, kind_, names_)                                                      \
  {.flags = flags_, .kind = &kind_, .names = &names_, .norm = "input_layernorm.weight"}
#define PS__SECOND_HALF(flags_, kind_, names_)                                                     \
  {.flags = flags_, .kind = &kind_, .names = &names_, .norm = "post_attention_layernorm.weight"}

/* A layer has the first use in each list whose flags it has. So a list ends with flags 0. Names
 * outside blocks are fixed: model.embed_tokens.weight, model.norm.weight, lm_head.weight. */
enum { PS__HALVES = 2 };
typedef struct ps__decoder {
  const ps__half_use *half[PS__HALVES];
  float norm_offset;                           /* added to the weights of all norms (Gemma: 1) */
  bool rounds_embedding_scale;                 /* to the dtype of the activations (Gemma) */
  const struct ps__per_layer_names *per_layer; /* of per-layer embeddings; NULL: none (Gemma 4) */
  const char *layer_scale; /* a number by which a block's output is multiplied; it is not
                            * trained. NULL: none (Gemma 4) */
} ps__decoder;

/* ps__describe_decoder() - the embedding, a definition for each kind of block that the config's
 * layer_flags ask for, the head. Errors: PS_ENOMEM; those of ps__describe_block(); PS_EINVAL names
 * a LoRA target that no block has. */
ps_status ps__describe_decoder(ps_model *m, const ps__decoder *decoder);
/* ps__describe_head() - final norm, logits and loss, and their backward passes (head.c). */
ps_status ps__describe_head(ps_model *m, const ps__decoder *decoder);
/* ps__norm_args() - of a norm over the residual stream. */
static inline ps__args_rmsnorm ps__norm_args(const ps_model *m, const ps__decoder *decoder) {
  return (ps__args_rmsnorm){.cols = m->cfg.dim,
                            .dt = m->dt,
                            .eps = m->cfg.norm_eps,
                            .weight_offset = decoder->norm_offset};
}
#endif
