/* decoder.h - the dense decoder: what Llama and its relatives have in common, as one description
 * with options.
 *
 *   attention:  h = x + scale post(o W_o),    o = attention(norm(x) W_qkv)
 *   MLP:        y = h + scale post(s W_down), s = act(g) u,  g|u = norm(h) W_gate|up
 *
 * norm and post are RMSNorms; where a block has none, the identity. scale is residual_scale. A
 * family whose layers are not of this kind describes them itself, with native/model/define.h. */
#ifndef PS_MODEL_DECODER_H
#define PS_MODEL_DECODER_H
#include "model/model.h"

/* Names of a block's parameters after "model.layers.N.". NULL: the block has none, but for k, v and
 * up, see there. Names outside blocks are fixed: model.embed_tokens.weight, model.norm.weight,
 * lm_head.weight. */
typedef struct ps__decoder {
  const char *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm;
  const char *q, *k, *v; /* k and v NULL: on disk q has all three */
  const char *q_bias, *k_bias, *v_bias;
  const char *q_norm, *k_norm;
  const char *o;
  const char *gate, *up; /* up NULL: on disk gate has both */
  const char *down;
  float norm_offset;           /* added to the weights of all norms (Gemma: 1) */
  bool rounds_embedding_scale; /* to the dtype of the activations (Gemma) */
} ps__decoder;

/* The names that most families have. */
#define PS__DECODER_NAMES                                                                          \
  .q = "self_attn.q_proj.weight", .k = "self_attn.k_proj.weight", .v = "self_attn.v_proj.weight",  \
  .o = "self_attn.o_proj.weight", .gate = "mlp.gate_proj.weight", .up = "mlp.up_proj.weight",      \
  .down = "mlp.down_proj.weight"
#define PS__DECODER_PRE_NORMS                                                                      \
  .attention_norm = "input_layernorm.weight", .mlp_norm = "post_attention_layernorm.weight"

/* ps__describe_decoder() - the embedding, a definition for each kind of block that the config's
 * layer_flags ask for, the head. Biases and norms of q and k are there where the config has them.
 * Errors: PS_ENOMEM; PS_EINVAL names what ps__rope_table() refuses. */
ps_status ps__describe_decoder(ps_model *m, const ps__decoder *names);
/* ps__describe_head() - final norm, logits and loss, and their backward passes (head.c). */
ps_status ps__describe_head(ps_model *m, const ps__decoder *names);
/* ps__norm_args() - of a norm over the residual stream. */
static inline ps__args_rmsnorm ps__norm_args(const ps_model *m, const ps__decoder *names) {
  return (ps__args_rmsnorm){
      .cols = m->cfg.dim, .dt = m->dt, .eps = m->cfg.norm_eps, .weight_offset = names->norm_offset};
}
#endif
