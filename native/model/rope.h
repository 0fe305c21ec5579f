/* rope.h - the frequencies of rotary position embeddings, for every kind of scaling. */
#ifndef PS_MODEL_ROPE_H
#define PS_MODEL_ROPE_H
#include "kernels/ops.h"
#include <stdbool.h>

/* ps__rope_table() - by its head_dim fill @a's rotary_dim, attention_factor and inv_freq, in the
 * order and precision of transformers 4.57.1's modeling_rope_utils.py: fp32, a power rounded from
 * fp64.
 * @r              here rotary_dim 0 stands for no RoPE
 * @max_positions  max_position_embeddings
 * @seq_len        tokens of a training sequence; longrope takes long_factor where it is above
 *                 original_positions, and dynamic is refused where it is above @max_positions
 * Errors: PS_EINVAL names the field. */
ps_status ps__rope_table(ps__args_qkv *a, const ps_rope *r, uint32_t max_positions,
                         uint64_t seq_len);
/* ps__longrope_attention_factor() - of a context @factor times as long as @original. */
double ps__longrope_attention_factor(double factor, uint32_t original);

#endif
