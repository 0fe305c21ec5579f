/* product.c - a block's matrix products as ops of its definition. */
#include "model/product.h"

void ps__name_product(ps__layer_def *d, bool backward, const ps__product *p) {
  ps__op_def *op = backward ? d->bwd : d->fwd;
  const uint32_t n = backward ? d->n_bwd : d->n_fwd;
  if (d->status == PS_OK && n)
    op[n - 1].what = d->span[p->w].what;
}

/* {scale, amax} */
static uint8_t scale_tensor(ps__layer_def *d, ps__row_kind rows) {
  return ps__def_tensor(d, "scale", rows, 2, PS_F32);
}

ps__product ps__def_product(ps__layer_def *d, uint16_t w, uint32_t n_out, uint32_t n_in, bool fp8) {
  ps__product p = {.n_out = n_out, .n_in = n_in, .w = w, .fp8 = fp8};
  const uint64_t n = (uint64_t)n_out * n_in;
  if (!fp8)
    return p;
  p.w8 = ps__def_tensor(d, "weights_fp8", PS__ROWS_PASS, n, PS__E4M3);
  p.w8_scale = scale_tensor(d, PS__ROWS_STEP);
  p.w8t = ps__def_tensor(d, "weights_fp8_columns", PS__ROWS_PASS, n, PS__E4M3);
  return p;
}

ps__operand ps__def_x(ps__layer_def *d, uint8_t stored, uint32_t cols, bool fp8) {
  ps__operand x = {.stored = stored};
  if (!fp8)
    return x;
  x.q = ps__def_tensor(d, "x_fp8", PS__ROWS_TOKEN, cols, PS__E4M3);
  x.scale = scale_tensor(d, PS__ROWS_ONE);
  x.qt = ps__def_tensor(d, "x_fp8_columns", PS__ROWS_TOKEN, cols, PS__E4M3);
  x.scale_t = scale_tensor(d, PS__ROWS_ONE);
  return x;
}

ps__operand ps__def_dy(ps__layer_def *d, uint8_t stored, uint32_t cols, bool fp8) {
  ps__operand dy = {.stored = stored};
  if (!fp8)
    return dy;
  dy.q = ps__def_tensor(d, "dy_fp8", PS__ROWS_TOKEN, cols, PS__E5M2);
  dy.qt = ps__def_tensor(d, "dy_fp8_columns", PS__ROWS_TOKEN, cols, PS__E5M2);
  dy.scale = dy.scale_t = scale_tensor(d, PS__ROWS_ONE);
  return dy;
}

void ps__quantize_x(const ps_model *m, ps__layer_def *d, ps__operand x, uint32_t cols,
                    bool backward) {
  const ps__args_quantize a = {.cols = cols,
                               .dt = m->dt,
                               .dt_q = PS__E4M3,
                               .forms = backward ? PS_FORM_COLS : PS_FORM_ROWS,
                               .count = backward || ps__counts_forward(m) ? x.count : 0};
  if (backward && ps__base_is_frozen(m))
    return;
  PS__DEF_OP(d, backward, false, ps__k_quantize, a, PS__R(x.stored),
             PS__W(backward ? x.scale_t : x.scale), PS__W(backward ? x.qt : x.q),
             PS__SYM_IF(a.count, PS__FLUSHED));
}

void ps__quantize_dy(const ps_model *m, ps__layer_def *d, ps__operand dy, uint32_t cols) {
  const bool dw = !ps__base_is_frozen(m);
  const ps__args_quantize a = {.cols = cols,
                               .dt = m->dt,
                               .dt_q = PS__E5M2,
                               .forms = dw ? PS_FORM_ROWS | PS_FORM_COLS : PS_FORM_ROWS,
                               .count = dy.count};
  PS__BWD(d, ps__k_quantize, a, PS__R(dy.stored), PS__W(dy.scale), PS__W(dy.q),
          PS__SYM_IF(dw, PS__W(dy.qt)), PS__SYM_IF(a.count, PS__FLUSHED));
}

/* W in the form of the pass; its scale, once a step. */
static void quantize_w(const ps_model *m, ps__layer_def *d, const ps__product *p, bool backward) {
  const ps__args_quantize a = {.rows = p->n_out,
                               .cols = p->n_in,
                               .dt = m->dt,
                               .dt_q = PS__E4M3,
                               .forms = backward ? PS_FORM_COLS : PS_FORM_ROWS,
                               .given = 1};
  const ps__args_fp8_scale s = {.rows = p->n_out, .cols = p->n_in, .dt = m->dt, .dt_q = PS__E4M3};
  if (!backward)
    PS__FWD(d, ps__k_fp8_scale, s, PS__P(p->w), PS__W(p->w8_scale));
  PS__DEF_OP(d, backward, false, ps__k_quantize, a, PS__P(p->w), PS__R(p->w8_scale),
             PS__W(backward ? p->w8t : p->w8));
}

ps__args_gemm_fp8 ps__gemm_fp8_args(const ps_model *m, uint32_t role, uint32_t n, uint32_t k,
                                    float alpha) {
  return (ps__args_gemm_fp8){.n = n,
                             .k = k,
                             .role = (uint8_t)role,
                             .dt_a = role == PS_GEMM_FORWARD ? PS__E4M3 : PS__E5M2,
                             .dt_b = PS__E4M3,
                             .dt_c = (uint8_t)m->dt,
                             .fast = role == PS_GEMM_FORWARD && m->fp8.fast,
                             .alpha = alpha};
}

void ps__product_forward(const ps_model *m, ps__layer_def *d, const ps__product *p, ps__operand x,
                         uint8_t y, float alpha, int bias, int residual) {
  const ps__sym b = PS__SYM_IF(bias != PS__NONE, PS__P((uint16_t)bias)),
                r = PS__SYM_IF(residual != PS__NONE, PS__R((uint8_t)residual));
  if (!p->fp8) {
    ps__args_gemm g = ps__gemm_args(0, p->n_out, p->n_in, false, true, m->dt);
    g.alpha = alpha;
    g.has_bias = bias != PS__NONE;
    g.has_residual = residual != PS__NONE;
    PS__FWD(d, ps__k_gemm, g, PS__R(x.stored), PS__P(p->w), PS__W(y), b, r);
    return;
  }
  ps__args_gemm_fp8 g = ps__gemm_fp8_args(m, PS_GEMM_FORWARD, p->n_out, p->n_in, alpha);
  g.has_bias = bias != PS__NONE;
  g.has_residual = residual != PS__NONE;
  quantize_w(m, d, p, false);
  PS__FWD(d, ps__k_gemm_fp8, g, PS__R(x.q), PS__R(x.scale), PS__R(p->w8), PS__R(p->w8_scale),
          PS__W(y), b, r);
  ps__name_product(d, false, p);
}

void ps__product_dx(const ps_model *m, ps__layer_def *d, const ps__product *p, ps__operand dy,
                    uint8_t dx, float alpha, bool accumulate) {
  const ps__sym out = accumulate ? PS__RW(dx) : PS__W(dx);
  if (!p->fp8) {
    ps__args_gemm g = ps__gemm_args(0, p->n_in, p->n_out, false, false, m->dt);
    g.alpha = alpha;
    g.accumulate = accumulate;
    PS__BWD(d, ps__k_gemm, g, PS__R(dy.stored), PS__P(p->w), out);
    return;
  }
  ps__args_gemm_fp8 g = ps__gemm_fp8_args(m, PS_GEMM_DGRAD, p->n_in, p->n_out, alpha);
  g.accumulate = accumulate;
  quantize_w(m, d, p, true);
  PS__BWD(d, ps__k_gemm_fp8, g, PS__R(dy.q), PS__R(dy.scale), PS__R(p->w8t), PS__R(p->w8_scale),
          out);
  ps__name_product(d, true, p);
}

void ps__product_dw(const ps_model *m, ps__layer_def *d, const ps__product *p, ps__operand dy,
                    ps__operand x, float alpha) {
  if (!p->fp8) {
    ps__args_gemm g = ps__gemm_args(p->n_out, p->n_in, 0, true, false, m->dt);
    g.alpha = alpha;
    PS__BWD(d, ps__k_gemm, g, PS__R(dy.stored), PS__R(x.stored), PS__G(p->w));
    return;
  }
  ps__args_gemm_fp8 g = ps__gemm_fp8_args(m, PS_GEMM_WGRAD, p->n_in, 0, alpha);
  g.m = p->n_out;
  PS__BWD(d, ps__k_gemm_fp8, g, PS__R(dy.qt), PS__R(dy.scale_t), PS__R(x.qt), PS__R(x.scale_t),
          PS__G(p->w));
}
