/* mlp.c - the gated MLP as a half of a block.
 *
 *   g|u = x W_gate|up,  s = act(g) u,  y = s W_down */
#include "model/mlp.h"
#include "model/block.h"

/* T tokens, F ffn dim. */
typedef struct mlp {
  uint32_t f;
  bool down_fp8;
  uint8_t gu; /* [T,2F] gate and up; the backward pass overwrites it with its gradient */
  uint8_t s;  /* [T,F]  gated product; with down_fp8 only where down's adapter reads it */
  uint8_t ds; /* [T,F]  gradient of s, then overwritten with s */
  uint16_t w_gu, w_down;
  ps__product gu_p, down_p;
  ps__operand down_x, gu_dy, down_dy;
} mlp;

const ps__mlp_names ps__mlp_usual = {
    .gate = "mlp.gate_proj.weight", .up = "mlp.up_proj.weight", .down = "mlp.down_proj.weight"};

static ps_status begin(ps__half *h) {
  mlp *t = h->own;
  const ps__fp8 *fp8 = &h->b->m->fp8;
  t->f = ps__layer_ffn_dim(&h->b->m->cfg, h->b->flags);
  t->down_fp8 = h->fp8 && !fp8->bf16_down;
  return PS_OK;
}

/* ---- what there is --------------------------------------------------------------------------- */

static void define_params(ps__half *h) {
  mlp *t = h->own;
  const ps__mlp_names *n = h->use->names;
  const uint32_t dim = h->b->dim;
  ps__layer_def *d = h->b->d;
  t->w_gu = ps__def_param(d, n->gate, PS_PARAM_MATRIX, n->up ? t->f : 2 * t->f, dim);
  ps__def_what(d, "gate_up");
  if (n->up)
    ps__def_param_after(d, n->up, PS_PARAM_MATRIX, t->f, dim);
  t->w_down = ps__half_residual(h, n->down, "down", t->f);
}

/* Phi-3 has gate and up as one target. */
static void define_sites(ps__half *h) {
  const mlp *t = h->own;
  const ps__mlp_names *n = h->use->names;
  if (n->up) {
    ps__half_x_site(h, PS__TARGET_GATE, t->f);
    ps__half_x_site(h, PS__TARGET_UP, t->f);
  } else {
    ps__half_x_site(h, PS__TARGET_GATE_UP, 2 * t->f);
  }
  ps__half_site(h, PS__TARGET_DOWN, h->b->dim, t->f);
}

/* Whether one op makes the gated product and quantizes it, which is then stored nowhere; likewise
 * backward with gate and up's gradient. Adapters read what is stored. */
static bool quantizes_product(const ps__half *h) {
  const mlp *t = h->own;
  return t->down_fp8 && !ps__half_adapts(h, PS__TARGET_DOWN);
}
static bool quantizes_gradient(const ps__half *h) {
  return quantizes_product(h) && !ps__half_adapts(h, PS__TARGET_GATE) &&
         !ps__half_adapts(h, PS__TARGET_UP) && !ps__half_adapts(h, PS__TARGET_GATE_UP);
}
/* Whether the forward pass counts what is flushed of the product. The op that quantizes the
 * gradient does so backward, with both forms, which nobody reads beside adapters. */
static bool counts_product(const ps__half *h) {
  return ps__counts_forward(h->b->m) && !quantizes_gradient(h);
}

static void define_tensors(ps__half *h) {
  mlp *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  t->gu = ps__half_tokens(h, "gate_up", 2 * t->f);
  t->s = quantizes_product(h) ? 0 : ps__half_tokens(h, "glu", t->f);
  t->ds = ps__half_tokens(h, "dglu", t->f);
  t->gu_p = ps__def_product(d, t->w_gu, 2 * t->f, b->dim, h->fp8);
  t->down_p = ps__def_product(d, t->w_down, b->dim, t->f, t->down_fp8);
  t->down_x = ps__def_x(d, t->s, t->f, t->down_fp8);
  t->gu_dy = ps__def_dy(d, t->gu, 2 * t->f, h->fp8);
  t->down_dy = ps__def_dy(d, h->dy, b->dim, t->down_fp8);
}

/* The op that makes gu's gradient and s together counts the second one after the first. */
static void define_counted(ps__half *h, bool of_gradients) {
  mlp *t = h->own;
  ps__layer_def *d = h->b->d;
  if (!of_gradients) {
    h->x.count = ps__def_counted(d, h->x.qt, "the input of gate and up");
    t->gu_dy.count = ps__def_counted(d, t->gu_dy.qt, "the gradient of gate and up");
    if (t->down_fp8)
      t->down_x.count = ps__def_counted(d, t->down_x.qt, "the gated product");
  } else if (t->down_fp8) {
    t->down_dy.count = ps__def_counted(d, t->down_dy.qt, "the gradient of down's output");
  }
}

static void define_saved(ps__half *h) {
  const mlp *t = h->own;
  ps__layer_def *d = h->b->d;
  ps__def_saved(d, t->gu, "gate_up", PS__RANK_GATE_UP);
}

/* ---- ops ------------------------------------------------------------------------------------- */

/* The columns of gate and up in gu. */
static ps__shared gate_up_parts(const ps__half *h) {
  const mlp *t = h->own;
  const ps__adapter *lora = h->b->lora;
  return (ps__shared){
      t->gu,
      2 * t->f,
      3,
      {{&lora[PS__TARGET_GATE], 0}, {&lora[PS__TARGET_UP], t->f}, {&lora[PS__TARGET_GATE_UP], 0}}};
}

static void define_gate(const ps__half *h) {
  const mlp *t = h->own;
  const ps_model *m = h->b->m;
  ps__layer_def *d = h->b->d;
  const ps__args_glu glu = {.ffn_dim = t->f, .dt = m->dt, .activation = m->cfg.activation};
  const ps__args_glu_quantize q = {.ffn_dim = glu.ffn_dim,
                                   .dt = glu.dt,
                                   .activation = glu.activation,
                                   .dt_q = PS__E4M3,
                                   .forms = PS_FORM_ROWS,
                                   .count = counts_product(h) ? t->down_x.count : 0};
  if (quantizes_product(h)) {
    PS__FWD(d, ps__k_glu_quantize, q, PS__R(t->gu), PS__W(t->down_x.scale), PS__W(t->down_x.q),
            PS__SYM_IF(q.count, PS__FLUSHED));
    return;
  }
  PS__FWD(d, ps__k_glu_fwd, glu, PS__R(t->gu), PS__W(t->s));
  if (t->down_fp8)
    ps__quantize_x(m, d, t->down_x, t->f, false);
}

static void define_forward(ps__half *h) {
  const mlp *t = h->own;
  const ps__block *b = h->b;
  const ps__shared parts = gate_up_parts(h);
  ps__half_input(h, false);
  ps__product_forward(b->m, b->d, &t->gu_p, h->x, t->gu, 0, PS__NONE, PS__NONE);
  ps__lora_forward_shared(b->m, b->d, h->x.stored, &parts);
  define_gate(h);
  ps__half_project(h, &t->down_p, t->down_x, PS__TARGET_DOWN);
}

/* From ds and gu to gu's gradient, and s anew: in place, or quantized. */
static void define_gate_backward(const ps__half *h) {
  const mlp *t = h->own;
  const ps_model *m = h->b->m;
  ps__layer_def *d = h->b->d;
  const ps__args_glu glu = {.ffn_dim = t->f, .dt = m->dt, .activation = m->cfg.activation};
  const ps__args_glu_quantize q = {.ffn_dim = glu.ffn_dim,
                                   .dt = glu.dt,
                                   .activation = glu.activation,
                                   .dt_q = PS__E5M2,
                                   .count = t->gu_dy.count};
  if (quantizes_gradient(h)) {
    PS__BWD(d, ps__k_glu_bwd_quantize, q, PS__R(t->ds), PS__R(t->gu), PS__W(t->gu_dy.scale),
            PS__W(t->gu_dy.q), PS__W(t->gu_dy.qt), PS__W(t->down_x.scale_t), PS__W(t->down_x.qt),
            PS__SYM_IF(q.count, PS__FLUSHED));
    return;
  }
  PS__BWD(d, ps__k_glu_bwd, glu, PS__RW(t->ds), PS__RW(t->gu)); /* leaves s in ds */
  if (h->fp8)
    ps__quantize_dy(m, d, t->gu_dy, 2 * t->f);
}

static void define_backward(ps__half *h) {
  const mlp *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  const float scale = b->m->cfg.residual_scale;
  const ps__columns dy = ps__half_dy_columns(h);
  const ps__adapter *lora = &b->lora[PS__TARGET_DOWN];
  const ps__shared parts = gate_up_parts(h);
  ps__operand s = t->down_x;
  s.stored = t->ds;
  if (t->down_fp8)
    ps__quantize_dy(b->m, d, t->down_dy, b->dim);
  ps__product_dx(b->m, d, &t->down_p, t->down_dy, t->ds, scale, false);
  ps__lora_input_grad(b->m, d, lora, dy, scale, t->ds);
  define_gate_backward(h);
  ps__lora_weight_grads_late(b->m, d, lora, dy, scale, t->ds);
  ps__product_dw(b->m, d, &t->down_p, t->down_dy, s, scale);
  ps__half_input(h, true);
  ps__product_dw(b->m, d, &t->gu_p, t->gu_dy, h->x, 0);
  ps__product_dx(b->m, d, &t->gu_p, t->gu_dy, h->dx, 0, h->adds_dx);
  ps__lora_backward_shared(b->m, d, h->x.stored, &parts, h->dx);
}

const ps__half_kind ps__mlp = {.norm = "mlp norm",
                               .post_norm = "mlp post norm",
                               .out = "mlp_out",
                               .out_rank = PS__RANK_MLP_OUT,
                               .own_bytes = sizeof(mlp),
                               PS__HALF_FUNCTIONS,
                               .counted = define_counted};
