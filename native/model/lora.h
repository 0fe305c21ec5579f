/* lora.h - LoRA (arXiv 2106.09685, section 4.1): low-rank adapters beside frozen projections.
 *
 *   y  = x W^T + s (x A^T) B^T          A[rank, n_in], B[n_out, rank]
 *   s  = alpha / rank; with rslora alpha / sqrt(rank) (arXiv 2312.03732)
 *   z  = x A^T,  dz = s dY B            [T, rank] each
 *   dB = s dY^T z,  dA = dz^T x,  dX = dY W + dz A
 *
 * All of it is products. Those with B add to columns of the projection's output, or read columns of
 * its gradient: q, k and v are one output, and so are gate and up. A fresh adapter has B = 0, and A
 * as PEFT draws it: uniform over [-1/sqrt(n_in), 1/sqrt(n_in)]. */
#ifndef PS_MODEL_LORA_H
#define PS_MODEL_LORA_H
#include "model/model.h"

/* Targets by number: that of their bit, PS_LORA_*. */
enum {
  PS__TARGET_Q,
  PS__TARGET_K,
  PS__TARGET_V,
  PS__TARGET_O,
  PS__TARGET_GATE,
  PS__TARGET_UP,
  PS__TARGET_DOWN,
  PS__TARGET_QKV,
  PS__TARGET_GATE_UP,
  PS__TARGET_Q_A,
  PS__TARGET_Q_B,
  PS__TARGET_KV_A,
  PS__TARGET_KV_B,
  PS__TARGET_IN_QKV,
  PS__TARGET_IN_Z,
  PS__TARGET_IN_B,
  PS__TARGET_IN_A,
  PS__TARGET_OUT,
  PS__TARGET_IN_QKVZ,
  PS__TARGET_IN_BA
};

/* An adapter of a layer under construction; n_out 0: there is none. Tensors and spans by index. */
typedef struct ps__adapter {
  uint32_t n_out, n_in, rank, cut; /* cut: rows of B, of those of an output of two tensors the first
                                    * one has; 0: the output is one */
  uint16_t a, b, b_rest;
  uint8_t z, dz; /* [T,rank] */
} ps__adapter;

/* Columns of a tensor of @cols columns: an adapter's output, or its gradient. */
typedef struct ps__columns {
  uint8_t tensor;
  uint32_t cols, first;
} ps__columns;

/* An output that several targets share, or its gradient: @n adapters, and the first column of each.
 * Those that are none (n_out 0) are passed over. */
typedef struct ps__shared {
  uint8_t tensor;
  uint32_t cols, n;
  struct {
    const ps__adapter *adapter;
    uint32_t first;
  } part[4];
} ps__shared;

/* The name of target i and its bit, e.g. "q_proj"; NULL past the last. */
const char *ps__lora_target_name(uint32_t i);
/* Check rank, alpha and targets, whatever the model. PS_EINVAL. */
ps_status ps__lora_check(const ps_lora *l);
/* Turn PS_LORA_ALL into the targets @there; PS_EINVAL where the model lacks a target. */
ps_status ps__lora_resolve(ps_model *m, uint32_t there);

/* Add the adapter of target @i, where it is one of the model's, to the unit. The rank may be larger
 * than n_out and n_in. @cut: ps__adapter.cut, a multiple of PS__SPAN_ALIGN / rank. */
void ps__lora_define(const ps_model *m, ps__layer_def *d, uint32_t i, uint32_t n_out, uint32_t n_in,
                     uint32_t cut, ps__adapter *out);
/* z = x A^T, y += scale s z B^T. @x: a tensor of n_in columns. @scale: of the projection's own
 * product. Without an adapter this and what follows do nothing. */
void ps__lora_forward(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint8_t x,
                      ps__columns y, float scale);
/* dz = scale s dY B, dX += dz A. */
void ps__lora_input_grad(const ps_model *m, ps__layer_def *d, const ps__adapter *a, ps__columns dy,
                         float scale, uint8_t dx);
/* dB (+)= scale s dY^T z, dA (+)= dz^T x. After ps__lora_input_grad(), which makes dz. */
void ps__lora_weight_grads(const ps_model *m, ps__layer_def *d, const ps__adapter *a,
                           ps__columns dy, float scale, uint8_t x);
/* The same where @x is made in the backward pass: z is made from it there. */
void ps__lora_weight_grads_late(const ps_model *m, ps__layer_def *d, const ps__adapter *a,
                                ps__columns dy, float scale, uint8_t x);
/* The adapter of an output that is two tensors, with scale 1.
 * ps__lora_input_grad() and ps__lora_weight_grads() of it. */
void ps__lora_forward_cut(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint8_t x,
                          ps__columns y, ps__columns rest);
void ps__lora_backward_cut(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint8_t x,
                           ps__columns dy, ps__columns rest, uint8_t dx);
/* ps__lora_forward() of all adapters that share an output.
 * ps__lora_input_grad() and ps__lora_weight_grads() of them, one adapter after the other. */
void ps__lora_forward_shared(const ps_model *m, ps__layer_def *d, uint8_t x, const ps__shared *y);
void ps__lora_backward_shared(const ps_model *m, ps__layer_def *d, uint8_t x, const ps__shared *dy,
                              uint8_t dx);
#endif
