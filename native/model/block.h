/* block.h - a block of the decoder: two halves on a residual stream
 * (docs/design/block.md, "The block").
 *
 *   h = x + scale post(f(norm(x)))   f: the first half, such as attention
 *   y = h + scale post(g(norm(h)))   g: the second half, such as an MLP
 *
 * norm and post are RMSNorms; where a half has none, the identity. scale is residual_scale. Where
 * the decoder has a layer_scale, the block's output is y times that.
 *
 * The block has the residual stream, these norms and the order. A half has all else: parameters,
 * LoRA sites, tensors, FP8 operands, saved activations, ops. It is a ps__half_kind, and nothing
 * outside its file asks which kind it is. */
#ifndef PS_MODEL_BLOCK_H
#define PS_MODEL_BLOCK_H
#include "model/decoder.h"
#include "model/lora.h"
#include "model/product.h"

/* Ranks of saved activations, of all halves: ps__saved_def.rank. Attention costs the most time a
 * byte to recompute. What a post norm of the MLP norms comes next: 2F FLOPs an element. The
 * products of the others cost about the same a byte: the early ones come first. */
typedef enum ps__rank {
  PS__RANK_INPUT,
  PS__RANK_ATTENTION,
  PS__RANK_MLP_OUT,
  PS__RANK_QKV,
  PS__RANK_ATTENTION_OUT,
  PS__RANK_GATE_UP,
  PS__RANK_EXPANDED /* products of few columns: what latents are expanded to */
} ps__rank;

/* A block under construction. T tokens, D dim. Tensors and spans by index in the definition. */
typedef struct ps__block {
  ps_model *m;
  const ps__decoder *decoder;
  ps__layer_def *d;
  uint32_t dim, flags;   /* flags: PS_LAYER_* */
  bool fp8;              /* products multiply FP8 operands, where a half has such */
  ps__args_rmsnorm norm; /* of a norm over the residual stream */
  uint16_t w_scale;      /* [1] where the decoder has a layer_scale */
  uint8_t dy;            /* [T,D] gradient of the residual stream: dY, overwritten with dX */
  struct {
    uint32_t n_out, n_in; /* n_out 0: the block has no such target */
    uint32_t cut;         /* ps__adapter.cut */
  } site[PS_N_LORA_TARGETS];
  ps__adapter lora[PS_N_LORA_TARGETS]; /* by target */
} ps__block;

/* A half under construction. */
typedef struct ps__half {
  ps__block *b;
  const ps__half_use *use;
  void *own;        /* the kind's own, zeroed at first: sizes, tensors, spans, products */
  bool pre, post;   /* which norms there are */
  bool fp8;         /* products multiply FP8 operands */
  uint32_t x_sites; /* LoRA targets, by bit, whose adapters read x */
  bool stores_x;    /* x is stored: without FP8, for kinds with stores_x, and where one reads it */
  uint16_t w_norm, w_post;
  uint8_t in, to; /* [T,D] the residual stream before and after the half */
  ps__operand x;  /* [T,D] the half's input, norm(in) or in; a norm is stored with stores_x */
  uint8_t y;      /* [T,D] what the half writes: scale f(x), and in where there is no post */
  int residual;   /* a tensor that y has in it, `in`; PS__NONE with a post norm */
  bool has_bias;  /* ps__half_project() adds the span b_out; only where residual_scale is 1 */
  uint16_t b_out;
  uint8_t dy; /* [T,D] gradient of y */
  uint8_t dx; /* [T,D] gradient of x, which the half writes or, with adds_dx, adds to */
  bool adds_dx;
} ps__half;

/* What a half is. The functions are called for the first half, then for the second, one after the
 * other in this order; backward for the second half first. */
struct ps__half_kind {
  const char *norm, *post_norm; /* what their ops work on, as ps_tag.what */
  const char *out;              /* y as a saved activation, where a post norm reads it */
  ps__rank out_rank;            /* y's, wherever it is saved */
  bool makes_out;               /* y is made again from what the half saves: it is not saved */
  bool stores_x;                /* in FP8 too, where some products read x in bf16 */
  size_t own_bytes;             /* of ps__half.own */
  /* its sizes and arguments, from the config. Errors: PS_EINVAL names what it cannot compute */
  ps_status (*begin)(ps__half *h);
  /* spans, in the order in which they lie in the unit, without the block's norms */
  void (*params)(ps__half *h);
  /* units of its own, after the block's first one; NULL: it has none */
  void (*units)(ps__half *h);
  /* ps__half_site() for each LoRA target */
  void (*sites)(ps__half *h);
  /* tensors but for those of ps__half; products; operands */
  void (*tensors)(ps__half *h);
  /* ps__def_counted() of its FP8 operands: of X's and what their ops make along with them or, with
   * @of_gradients, of the others. Called with FP8 alone, in two turns. NULL: the half has no FP8
   * products, and stays in bf16 */
  void (*counted)(ps__half *h, bool of_gradients);
  /* ps__def_saved() of its tensors, without y */
  void (*saved)(ps__half *h);
  /* from x, which ps__half_input() makes, to y */
  void (*forward)(ps__half *h);
  /* from dy to dx. Where it reads x, it calls ps__half_input() anew before */
  void (*backward)(ps__half *h);
};

/* All of a kind's functions but counted, where its file calls them so. */
#define PS__HALF_FUNCTIONS                                                                         \
  .begin = begin, .params = define_params, .sites = define_sites, .tensors = define_tensors,       \
  .saved = define_saved, .forward = define_forward, .backward = define_backward

/* ps__block_targets() - adds the LoRA targets, by bit, that a block of layers with @flags has.
 * ps__describe_block() - the definition of such a block. The model's targets are resolved.
 * Errors: PS_ENOMEM; PS_EINVAL of the halves. */
ps_status ps__block_targets(ps_model *m, const ps__decoder *decoder, uint32_t flags,
                            uint32_t *targets);
ps_status ps__describe_block(ps_model *m, const ps__decoder *decoder, uint32_t flags, bool fp8,
                             ps__layer_def **out);

/* ---- what halves call ------------------------------------------------------------------------ */
/* ps__half_tokens() - a tensor [T, @cols] in the dtype of activations. */
uint8_t ps__half_tokens(const ps__half *h, const char *name, uint64_t cols);
/* ps__half_norm() - the weights of a norm over @n elements, which begin as a factor of 1. @name
 * NULL: there is none, and the result is 0.
 * ps__half_residual() - a matrix [D, @n_in] that writes into the residual stream. A fresh model's
 * is smaller the more layers there are, as in GPT-2 (Radford et al. 2019, section 2.3). */
uint16_t ps__half_norm(const ps__half *h, const char *name, const char *what, uint32_t n);
uint16_t ps__half_residual(const ps__half *h, const char *name, const char *what, uint32_t n_in);
/* ps__half_site() - the half has LoRA target @i, a projection of @n_in columns to @n_out.
 * ps__half_x_site() - a projection of x.
 * ps__half_x_site_cut() - of x, to two tensors, the first one of @cut columns. */
void ps__half_site(ps__half *h, uint32_t i, uint32_t n_out, uint32_t n_in);
void ps__half_x_site(ps__half *h, uint32_t i, uint32_t n_out);
void ps__half_x_site_cut(ps__half *h, uint32_t i, uint32_t n_out, uint32_t cut);
/* ps__half_adapts() - whether the block has an adapter of target @i. */
bool ps__half_adapts(const ps__half *h, uint32_t i);
/* ps__half_input() - x in the form that a pass needs. Where it is stored, the backward pass has a
 * norm made again by the forward op. */
void ps__half_input(const ps__half *h, bool backward);
/* ps__half_project() - y = in + scale act W^T, the adapter of target @i included: the last op of a
 * half that ends with a product. */
void ps__half_project(const ps__half *h, const ps__product *p, ps__operand act, uint32_t i);
/* ps__half_dy_columns() - dy as an adapter reads it. */
ps__columns ps__half_dy_columns(const ps__half *h);
#endif
