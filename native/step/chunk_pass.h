/* chunk_pass.h - a chunk on its way through a unit: what passes.c gives to head.c. */
#ifndef PS_STEP_CHUNK_PASS_H
#define PS_STEP_CHUNK_PASS_H
#include "step/emit.h"

/* A chunk on its way through a layer.
 *   slice_row  of a sliced op: the slice's first row in the chunk; shape has its rows
 *   bound      device tensors
 *   keep       tensors that the caller frees
 *   fresh      gradients that pass between blocks and that no block has written of the chunk, or
 *              of its group */
typedef struct ps__chunk_pass {
  const ps__layer_def *d;
  uint32_t layer, c, slice_row;
  ps__chunk_shape shape;
  uint32_t bound[PS__SET_BITS];
  ps__set keep, fresh;
} ps__chunk_pass;

/* ps__chunk_begin() - chunk @c of the round before it enters layer @layer; nothing is bound but
 * tensors that outlive a chunk.
 * ps__chunk_tag() - the tag of what is emitted for it.
 * ps__chunk_tensor_bytes() - BYTES of a tensor of the layer for the chunk, or for its group.
 * ps__chunk_make_tensors() - those that @op uses and nobody made are made.
 * ps__chunk_emit() - emits @op.
 * ps__chunk_done() - whether a chunk before has run @op for the whole layer pass, or step.
 * ps__chunk_keep_of_pass() - what is for the whole layer pass, or step, stays for the chunks after;
 * what passes between blocks, for other blocks.
 * ps__chunk_hand_back() - the gradient of the chunk goes to the layer below. */
ps__chunk_pass ps__chunk_begin(ps__builder *b, uint32_t layer, uint32_t c);
ps_tag ps__chunk_tag(const ps__builder *b, uint32_t unit, uint32_t c, int phase);
uint64_t ps__chunk_tensor_bytes(const ps__builder *b, const ps__layer_def *d, uint32_t c,
                                uint32_t tensor);
void ps__chunk_make_tensors(ps__builder *b, ps__chunk_pass *p, const ps__op_def *op);
void ps__chunk_emit(ps__builder *b, const ps__chunk_pass *p, const ps__op_def *op, int phase);
bool ps__chunk_done(const ps__chunk_pass *p, const ps__op_def *op);
void ps__chunk_keep_of_pass(ps__builder *b, const ps__chunk_pass *p);
void ps__chunk_hand_back(ps__builder *b, uint32_t layer, uint32_t c, int phase);
#endif
