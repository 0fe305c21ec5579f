/* rope.h - the frequencies of rotary position embeddings, for every kind of scaling. */
#ifndef PS_MODEL_ROPE_H
#define PS_MODEL_ROPE_H
#include "kernels/ops.h"
#include <stdbool.h>

/* Kinds of scaling beyond ps_rope_scaling, which a ps_model_config cannot hold yet. */
enum { PS__ROPE_YARN = PS_ROPE_LLAMA3 + 1, PS__ROPE_LONGROPE, PS__ROPE_DYNAMIC };

/* Names as in config.json; what a kind does not name is not read. A number that config.json may
 * lack is 0 where it does, and then transformers' default counts. */
typedef struct ps__rope {
  uint32_t kind;                              /* ps_rope_scaling or PS__ROPE_* */
  uint32_t rotary_dim;                        /* head_dim * partial_rotary_factor; 0: no RoPE */
  uint32_t original_positions, max_positions; /* (original_)max_position_embeddings */
  double theta, factor;
  double low_freq_factor, high_freq_factor;            /* llama3 */
  double attention_factor;                             /* yarn, longrope */
  double beta_fast, beta_slow, mscale, mscale_all_dim; /* yarn */
  bool keep_fraction;                                  /* yarn: truncate is false */
  const double *short_factor, *long_factor;            /* longrope: rotary_dim/2 each; borrowed */
} ps__rope;

/* ps__rope_table() - fills @a's rotary_dim, attention_factor and inv_freq, in the order and
 * precision of transformers 4.57.1's modeling_rope_utils.py: fp32, a power rounded from fp64.
 * @seq_len: tokens of a training sequence; longrope takes long_factor where it is above
 * original_positions. Errors: PS_EINVAL names the field; dynamic is refused, for its
 * frequencies change with the length of each sequence. */
ps_status ps__rope_table(ps__args_qkv *a, const ps__rope *r, uint64_t seq_len);

#endif
