/* per_layer.h - per-layer embeddings (Gemma 4 E2B, E4B): what a block adds after its second half
 * (docs/design/carried.md, "Per-layer embeddings").
 *
 *   p = (norm(x0 W_context^T / sqrt(D)) + sqrt(e) table[id]) / sqrt(2)                     [T, e]
 *   y = r + post(s W_out^T),  s = gelu(r W_in^T) p           r: the stream after the second half
 *
 * x0 is what the first block gets. W_context and the table are a block's own: rows and columns of
 * what is one tensor on disk. The norm's weights are one for all blocks. */
#ifndef PS_MODEL_PER_LAYER_H
#define PS_MODEL_PER_LAYER_H
#include "model/block.h"

typedef struct ps__per_layer_names {
  const char *in, *out, *post; /* of the block */
  /* what this block has of tensors that all share; the norm is the first block's (io/sliced.c) */
  const char *context, *table, *norm;
} ps__per_layer_names;

/* T tokens, D dim, e per_layer_dim. */
typedef struct ps__per_layer {
  const ps__per_layer_names *names;
  uint32_t e;
  bool first, last; /* of the blocks */
  uint16_t w_in, w_out, w_post, w_context, w_table, w_norm;
  uint8_t in, to;            /* [T,D] the residual stream before and after */
  uint8_t x0, dx0;           /* [T,D] carried */
  uint8_t weights, dweights; /* [e] of the norm, carried */
  uint8_t context;           /* [T,e] x0 W_context^T / sqrt(D) */
  uint8_t rows;              /* [T,e] looked up */
  uint8_t gate, p;           /* [T,e] r W_in^T; p times sqrt(2) */
  uint8_t gp, s;             /* [T,2e] both; [T,e] */
  uint8_t z;                 /* [T,D] s W_out^T */
  uint8_t dz, ds, dgate, dp, dcontext;
} ps__per_layer;

/* In this order, as a half's functions; without names, or where the model has none, all do nothing.
 * ps__per_layer_begin() - sizes.
 * ps__per_layer_params() - a unit of its own.
 * ps__per_layer_tensors() - @in: the residual stream; returns the block's output.
 * ps__per_layer_forward(), ps__per_layer_backward() - ops.
 * ps__per_layer_end() - the last ops of the backward pass: the first block's. */
void ps__per_layer_begin(ps__block *b, ps__per_layer *t);
void ps__per_layer_params(ps__block *b, ps__per_layer *t);
uint8_t ps__per_layer_tensors(ps__block *b, ps__per_layer *t, uint8_t in);
void ps__per_layer_forward(const ps__block *b, const ps__per_layer *t);
void ps__per_layer_backward(const ps__block *b, const ps__per_layer *t);
void ps__per_layer_end(const ps__block *b, const ps__per_layer *t);
#endif
