/* product.h - a block's matrix products as ops of its definition, in the dtype of activations or in
 * FP8 (docs/design/fp8.md).
 *
 *   Y = alpha X W^T,  dX = alpha dY W,  dW = alpha dY^T X;  X [T, n_in], Y [T, n_out]
 *
 * In FP8 each op reads quantized tensors. X and dY are then ps__operands, which the caller has made
 * by the ops below, or by one that computes and quantizes. */
#ifndef PS_MODEL_PRODUCT_H
#define PS_MODEL_PRODUCT_H
#include "model/model.h"

/* A product's weights; tensors by index in the definition. */
typedef struct ps__product {
  uint32_t n_out, n_in;
  uint16_t w;
  bool fp8;
  uint8_t w8, w8t;  /* FP8: in forms ROWS and COLS, of a layer pass */
  uint8_t w8_scale; /* theirs, of a step */
} ps__product;

/* X or dY.
 *   stored  in the dtype of activations; that alone without FP8
 *   q, qt   forms ROWS and COLS, with their scales; scale_t may be scale
 *   count   of ps__def_counted(), for the op of the backward pass that writes qt. Of frozen weights
 *           that op writes q; X is counted forward (ps__counts_forward()). 0: not counted */
typedef struct ps__operand {
  uint8_t stored, q, scale, qt, scale_t;
  uint32_t count;
} ps__operand;

/* ps__def_product() - the product of the span @w; makes the tensors of its weights. */
ps__product ps__def_product(ps__layer_def *d, uint16_t w, uint32_t n_out, uint32_t n_in, bool fp8);
/* ps__def_x(), ps__def_dy() - the quantized tensors of an X or a dY of @cols columns, whose values
 * are in @stored. An X's two forms have scales of their own, since the forward pass makes the one
 * and the backward pass the other. Without @fp8 there are none. */
ps__operand ps__def_x(ps__layer_def *d, uint8_t stored, uint32_t cols, bool fp8);
ps__operand ps__def_dy(ps__layer_def *d, uint8_t stored, uint32_t cols, bool fp8);

/* ps__quantize_x() - X's form for the forward pass, or for @backward.
 * ps__quantize_dy() - both forms.
 * Form COLS is for dW: frozen weights have none of X and of dY. */
void ps__quantize_x(const ps_model *m, ps__layer_def *d, ps__operand x, uint32_t cols,
                    bool backward);
void ps__quantize_dy(const ps_model *m, ps__layer_def *d, ps__operand dy, uint32_t cols);

/* The products. @bias: a span, or PS__NONE. @residual: a tensor that is added, or PS__NONE. */
void ps__product_forward(const ps_model *m, ps__layer_def *d, const ps__product *p, ps__operand x,
                         uint8_t y, float alpha, int bias, int residual);
void ps__product_dx(const ps_model *m, ps__layer_def *d, const ps__product *p, ps__operand dy,
                    uint8_t dx, float alpha, bool accumulate);
void ps__product_dw(const ps_model *m, ps__layer_def *d, const ps__product *p, ps__operand dy,
                    ps__operand x, float alpha);
/* ps__gemm_fp8_args() - of a product of @role, PS_GEMM_FORWARD or PS_GEMM_DGRAD, with X or dY of
 * the chunk's rows. WGRAD: m is to be set. */
ps__args_gemm_fp8 ps__gemm_fp8_args(const ps_model *m, uint32_t role, uint32_t n, uint32_t k,
                                    float alpha);
/* ps__name_product() - the op that was added last works on what the product's weights are for. */
void ps__name_product(ps__layer_def *d, bool backward, const ps__product *p);
#endif
