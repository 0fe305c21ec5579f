/* delta.c - a gated delta-net as a half of a block (Yang et al. 2024, arXiv 2412.06464), as
 * Qwen3-Next and Qwen3.5 have it.
 *
 *   u = x W_qkv,  z = x W_z,  b|a = x W_ba
 *   o = delta(conv(u), b|a),  y = (norm(o) silu(z)) W_out
 *
 * From a chunk of a sequence to the next pass the last rows of u and the states of the value heads,
 * and backward their gradients. Both are saved with the block's input and never made again:
 * it would take all chunks before.
 *
 * b and a are a few columns that decide how fast a state decays: their product is in bf16 in FP8
 * recipes too. */
#include "model/delta.h"
#include "model/block.h"
#include <math.h>

/* T tokens, C channels of q, k and v, Z of the values and of the gate, nv value heads, W taps. */
typedef struct delta {
  uint32_t c, z_dim, n_ba; /* n_ba: 2 nv */
  bool grouped;            /* W_qkv has z, and its rows and those of W_ba are grouped by key head */
  ps__args_conv conv;
  ps__args_delta rule;
  ps__args_gated_norm norm;
  ps__args_heads qkvz, heads_ba;
  uint8_t all, all_ba;     /* grouped: [T,C+Z], [T,2nv] the products */
  uint8_t dall, dall_ba;   /* their gradients */
  uint8_t u, z, ba;        /* [T,C], [T,Z], [T,2nv] */
  uint8_t qkv;             /* [T,C] after the convolution */
  uint8_t o, g;            /* [T,Z] before and after the norm with the gate */
  uint8_t window, state;   /* [W-1,C], fp32 [nv,dk,dv]: what a chunk leaves to the next */
  uint8_t dwindow, dstate; /* their gradients, fp32 */
  uint8_t dg, d_o, dz;     /* [T,Z] */
  uint8_t dqkv, du, dba;   /* [T,C], [T,C], [T,2nv] */
  uint16_t w_qkv, w_z, w_ba, w_conv, w_a_log, w_dt_bias, w_norm, w_out;
  ps__product qkv_p, z_p, ba_p, out_p;
  ps__operand qkv_dy, z_dy, out_x, out_dy;
} delta;

#define NAMES                                                                                      \
  .conv = "linear_attn.conv1d.weight", .a_log = "linear_attn.A_log",                               \
  .dt_bias = "linear_attn.dt_bias", .norm = "linear_attn.norm.weight",                             \
  .out = "linear_attn.out_proj.weight"
const ps__delta_names ps__delta_qwen3_5 = {.qkv = "linear_attn.in_proj_qkv.weight",
                                           .z = "linear_attn.in_proj_z.weight",
                                           .b = "linear_attn.in_proj_b.weight",
                                           .a = "linear_attn.in_proj_a.weight",
                                           NAMES},
                      ps__delta_qwen3_next = {.qkv = "linear_attn.in_proj_qkvz.weight",
                                              .b = "linear_attn.in_proj_ba.weight",
                                              NAMES};

static ps_status begin(ps__half *h) {
  delta *t = h->own;
  const ps__delta_names *n = h->use->names;
  const ps_model *m = h->b->m;
  const ps_model_config *c = &m->cfg;
  const uint32_t nk = c->linear_key_heads, nv = c->linear_value_heads, dk = c->linear_key_dim,
                 dv = c->linear_value_dim, share = nk ? nv / nk : 0;
  t->c = 2 * nk * dk + nv * dv;
  t->z_dim = nv * dv;
  t->n_ba = 2 * nv;
  t->grouped = !n->z;
  t->conv = (ps__args_conv){.channels = t->c, .width = c->linear_conv_width, .dt = m->dt};
  t->rule = (ps__args_delta){
      .n_key_heads = nk, .n_value_heads = nv, .key_dim = dk, .value_dim = dv, .dt = m->dt};
  t->norm = (ps__args_gated_norm){.n_heads = nv, .head_dim = dv, .dt = m->dt, .eps = c->norm_eps};
  t->qkvz = (ps__args_heads){
      .n_groups = nk, .width = {dk, dk, share * dv, share * dv}, .n_first = 3, .dt = m->dt};
  t->heads_ba =
      (ps__args_heads){.n_groups = nk, .width = {share, share}, .n_first = 2, .dt = m->dt};
  return PS_OK;
}

/* ---- what there is --------------------------------------------------------------------------- */

static void define_params(ps__half *h) {
  delta *t = h->own;
  const ps__delta_names *n = h->use->names;
  const uint32_t dim = h->b->dim, nv = t->rule.n_value_heads;
  ps__layer_def *d = h->b->d;
  t->w_qkv = ps__def_param(d, n->qkv, PS_PARAM_MATRIX, t->c + (t->grouped ? t->z_dim : 0), dim);
  ps__def_what(d, "delta qkv");
  if (!t->grouped) {
    t->w_z = ps__def_param(d, n->z, PS_PARAM_MATRIX, t->z_dim, dim);
    ps__def_what(d, "delta z");
  }
  t->w_ba = ps__def_param(d, n->b, PS_PARAM_MATRIX, t->grouped ? t->n_ba : nv, dim);
  ps__def_what(d, "delta b and a");
  if (!t->grouped)
    ps__def_param_after(d, n->a, PS_PARAM_MATRIX, nv, dim);
  t->w_conv = ps__def_channels(d, n->conv, t->c, t->conv.width);
  ps__def_what(d, "convolution");
  ps__def_init_uniform(d, 1.0 / sqrt(t->conv.width));
  t->w_a_log = ps__def_param(d, n->a_log, PS_PARAM_BIAS, nv, 0);
  ps__def_what(d, "decay");
  ps__def_init(d, log(16) - 1, 1); /* mean and deviation of ln U(0, 16) */
  t->w_dt_bias = ps__def_param(d, n->dt_bias, PS_PARAM_BIAS, nv, 0);
  ps__def_what(d, "decay");
  ps__def_init(d, 1, 0);
  t->w_norm = ps__def_param(d, n->norm, PS_PARAM_NORM, t->rule.value_dim, 0);
  ps__def_what(d, "norm with a gate");
  t->w_out = ps__half_residual(h, n->out, "delta out", t->z_dim);
}

/* Qwen3-Next has two targets in the place of four. The rows of their B are grouped as those of
 * their W are. */
static void define_sites(ps__half *h) {
  const delta *t = h->own;
  const uint32_t nv = t->rule.n_value_heads;
  if (t->grouped) {
    ps__half_x_site(h, PS__TARGET_IN_QKVZ, t->c + t->z_dim);
    ps__half_x_site(h, PS__TARGET_IN_BA, t->n_ba);
  } else {
    ps__half_x_site(h, PS__TARGET_IN_QKV, t->c);
    ps__half_x_site(h, PS__TARGET_IN_Z, t->z_dim);
    ps__half_x_site(h, PS__TARGET_IN_B, nv);
    ps__half_x_site(h, PS__TARGET_IN_A, nv);
  }
  ps__half_site(h, PS__TARGET_OUT, h->b->dim, t->z_dim);
}

static void define_products(ps__half *h) {
  delta *t = h->own;
  const uint32_t dim = h->b->dim, n_qkv = t->c + (t->grouped ? t->z_dim : 0);
  ps__layer_def *d = h->b->d;
  t->qkv_p = ps__def_product(d, t->w_qkv, n_qkv, dim, h->fp8);
  t->qkv_dy = ps__def_dy(d, t->grouped ? t->dall : t->du, n_qkv, h->fp8);
  if (!t->grouped) {
    t->z_p = ps__def_product(d, t->w_z, t->z_dim, dim, h->fp8);
    t->z_dy = ps__def_dy(d, t->dz, t->z_dim, h->fp8);
  }
  t->ba_p = ps__def_product(d, t->w_ba, t->n_ba, dim, false);
  t->out_p = ps__def_product(d, t->w_out, dim, t->z_dim, h->fp8);
  t->out_x = ps__def_x(d, t->g, t->z_dim, h->fp8);
  t->out_dy = ps__def_dy(d, h->dy, dim, h->fp8);
}

static void define_tensors(ps__half *h) {
  delta *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  const uint64_t window = (uint64_t)(t->conv.width - 1) * t->c,
                 state = (uint64_t)t->z_dim * t->rule.key_dim;
  if (t->grouped) {
    t->all = ps__half_tokens(h, "delta_qkvz", t->c + t->z_dim);
    t->all_ba = ps__half_tokens(h, "delta_ba_by_head", t->n_ba);
    t->dall = ps__half_tokens(h, "ddelta_qkvz", t->c + t->z_dim);
    t->dall_ba = ps__half_tokens(h, "ddelta_ba_by_head", t->n_ba);
  }
  t->u = ps__half_tokens(h, "delta_qkv", t->c);
  t->z = ps__half_tokens(h, "delta_z", t->z_dim);
  t->ba = ps__half_tokens(h, "delta_ba", t->n_ba);
  t->qkv = ps__half_tokens(h, "conv", t->c);
  t->o = ps__half_tokens(h, "delta_out", t->z_dim);
  t->g = ps__half_tokens(h, "gated", t->z_dim);
  t->window = ps__def_tensor(d, "window", PS__ROWS_STATE, window, b->m->dt);
  t->state = ps__def_tensor(d, "state", PS__ROWS_STATE, state, PS_F32);
  t->dwindow = ps__def_tensor(d, "dwindow", PS__ROWS_CARRY, window, PS_F32);
  t->dstate = ps__def_tensor(d, "dstate", PS__ROWS_CARRY, state, PS_F32);
  t->dg = ps__half_tokens(h, "dgated", t->z_dim);
  t->d_o = ps__half_tokens(h, "ddelta_out", t->z_dim);
  t->dz = ps__half_tokens(h, "ddelta_z", t->z_dim);
  t->dqkv = ps__half_tokens(h, "dconv", t->c);
  t->du = ps__half_tokens(h, "ddelta_qkv", t->c);
  t->dba = ps__half_tokens(h, "ddelta_ba", t->n_ba);
  define_products(h);
}

/* Without z_p where qkv_p has z. */
static void define_counted(ps__half *h, bool of_gradients) {
  delta *t = h->own;
  ps__layer_def *d = h->b->d;
  if (!of_gradients) {
    h->x.count = ps__def_counted(d, h->x.qt, "the input of a delta-net");
    t->out_x.count = ps__def_counted(d, t->out_x.qt, "the gated norm of a delta-net");
    return;
  }
  t->qkv_dy.count = ps__def_counted(d, t->qkv_dy.qt, "the gradient of a delta-net's q, k and v");
  if (!t->grouped)
    t->z_dy.count = ps__def_counted(d, t->z_dy.qt, "the gradient of a delta-net's z");
  t->out_dy.count = ps__def_counted(d, t->out_dy.qt, "the gradient of a delta-net's output");
}

static void define_saved(ps__half *h) {
  const delta *t = h->own;
  ps__layer_def *d = h->b->d;
  ps__def_saved(d, t->window, "x", PS__RANK_INPUT);
  ps__def_saved(d, t->state, "x", PS__RANK_INPUT);
  ps__def_saved(d, t->u, "qkv", PS__RANK_QKV);
  ps__def_saved(d, t->z, "qkv", PS__RANK_QKV);
  ps__def_saved(d, t->ba, "qkv", PS__RANK_QKV);
  ps__def_saved(d, t->o, "attn_out", PS__RANK_ATTENTION);
}

/* ---- ops ------------------------------------------------------------------------------------- */

/* What the products of x write, or the gradients of that: as in delta.qkv_p, z_p and ba_p. */
typedef struct inputs {
  ps__shared qkv, z, ba;
} inputs;

static inputs inputs_of(const ps__half *h, uint8_t qkv, uint8_t z, uint8_t ba) {
  const delta *t = h->own;
  const ps__adapter *lora = h->b->lora;
  return (inputs){.qkv = {qkv,
                          t->qkv_p.n_out,
                          2,
                          {{&lora[PS__TARGET_IN_QKV], 0}, {&lora[PS__TARGET_IN_QKVZ], 0}}},
                  .z = {z, t->z_dim, 1, {{&lora[PS__TARGET_IN_Z], 0}}},
                  .ba = {ba,
                         t->n_ba,
                         3,
                         {{&lora[PS__TARGET_IN_B], 0},
                          {&lora[PS__TARGET_IN_A], t->rule.n_value_heads},
                          {&lora[PS__TARGET_IN_BA], 0}}}};
}

static void forward(const ps__half *h, const ps__product *p, const ps__shared *y) {
  ps__product_forward(h->b->m, h->b->d, p, h->x, y->tensor, 0, PS__NONE, PS__NONE);
  ps__lora_forward_shared(h->b->m, h->b->d, h->x.stored, y);
}

static void define_inputs(const ps__half *h) {
  const delta *t = h->own;
  ps__layer_def *d = h->b->d;
  const inputs y = inputs_of(h, t->grouped ? t->all : t->u, t->z, t->grouped ? t->all_ba : t->ba);
  ps__half_input(h, false);
  forward(h, &t->qkv_p, &y.qkv);
  if (!t->grouped)
    forward(h, &t->z_p, &y.z);
  forward(h, &t->ba_p, &y.ba);
  if (!t->grouped)
    return;
  PS__FWD(d, ps__k_heads_split, t->qkvz, PS__R(t->all), PS__W(t->u), PS__W(t->z));
  PS__FWD(d, ps__k_heads_split, t->heads_ba, PS__R(t->all_ba), PS__W(t->ba));
}

static void define_forward(ps__half *h) {
  const delta *t = h->own;
  ps__layer_def *d = h->b->d;
  define_inputs(h);
  PS__FWD(d, ps__k_conv_fwd, t->conv, PS__R(t->u), PS__P(t->w_conv), PS__B(PS__BATCH_DOC_START),
          PS__BEFORE(t->window), PS__W(t->qkv), PS__W(t->window));
  PS__FWD(d, ps__k_delta_fwd, t->rule, PS__R(t->qkv), PS__R(t->ba), PS__P(t->w_a_log),
          PS__P(t->w_dt_bias), PS__B(PS__BATCH_DOC_START), PS__BEFORE(t->state), PS__W(t->o),
          PS__W(t->state));
  PS__FWD(d, ps__k_gated_norm_fwd, t->norm, PS__R(t->o), PS__R(t->z), PS__P(t->w_norm),
          PS__W(t->g));
  if (h->fp8)
    ps__quantize_x(h->b->m, d, t->out_x, t->z_dim, false);
  ps__half_project(h, &t->out_p, t->out_x, PS__TARGET_OUT);
}

static void backward(const ps__half *h, const ps__product *p, ps__operand dy,
                     const ps__shared *parts, bool adds) {
  const ps_model *m = h->b->m;
  ps__layer_def *d = h->b->d;
  ps__product_dw(m, d, p, dy, h->x, 0);
  ps__product_dx(m, d, p, dy, h->dx, 0, adds);
  ps__lora_backward_shared(m, d, h->x.stored, parts, h->dx);
}

/* From the gradients of u, z and ba to those of the weights and of x. */
static void define_inputs_backward(const ps__half *h) {
  const delta *t = h->own;
  ps__layer_def *d = h->b->d;
  const ps__operand dba = {.stored = t->grouped ? t->dall_ba : t->dba};
  const inputs parts = inputs_of(h, t->qkv_dy.stored, t->dz, dba.stored);
  if (t->grouped) {
    PS__BWD(d, ps__k_heads_join, t->qkvz, PS__R(t->du), PS__R(t->dz), PS__W(t->dall));
    PS__BWD(d, ps__k_heads_join, t->heads_ba, PS__R(t->dba), PS__W(t->dall_ba));
  }
  if (h->fp8)
    ps__quantize_dy(h->b->m, d, t->qkv_dy, t->qkv_p.n_out);
  if (h->fp8 && !t->grouped)
    ps__quantize_dy(h->b->m, d, t->z_dy, t->z_dim);
  ps__half_input(h, true);
  backward(h, &t->qkv_p, t->qkv_dy, &parts.qkv, h->adds_dx);
  if (!t->grouped)
    backward(h, &t->z_p, t->z_dy, &parts.z, true);
  backward(h, &t->ba_p, dba, &parts.ba, true);
}

static void define_backward(ps__half *h) {
  const delta *t = h->own;
  const ps_model *m = h->b->m;
  ps__layer_def *d = h->b->d;
  const float scale = m->cfg.residual_scale;
  const ps__columns dy = ps__half_dy_columns(h);
  const ps__adapter *lora = &h->b->lora[PS__TARGET_OUT];
  if (h->fp8) {
    ps__quantize_dy(m, d, t->out_dy, h->b->dim);
    ps__quantize_x(m, d, t->out_x, t->z_dim, true);
  }
  ps__product_dw(m, d, &t->out_p, t->out_dy, t->out_x, scale);
  ps__product_dx(m, d, &t->out_p, t->out_dy, t->dg, scale, false);
  ps__lora_input_grad(m, d, lora, dy, scale, t->dg);
  ps__lora_weight_grads(m, d, lora, dy, scale, t->g);
  PS__BWD(d, ps__k_gated_norm_bwd, t->norm, PS__R(t->o), PS__R(t->z), PS__P(t->w_norm),
          PS__R(t->dg), PS__W(t->d_o), PS__W(t->dz), PS__G(t->w_norm));
  PS__BWD(d, ps__k_delta_bwd, t->rule, PS__R(t->qkv), PS__R(t->ba), PS__P(t->w_a_log),
          PS__P(t->w_dt_bias), PS__B(PS__BATCH_DOC_START), PS__BEFORE(t->state), PS__R(t->d_o),
          PS__W(t->dstate), PS__W(t->dqkv), PS__W(t->dba), PS__G(t->w_a_log), PS__G(t->w_dt_bias));
  PS__BWD(d, ps__k_conv_bwd, t->conv, PS__R(t->u), PS__P(t->w_conv), PS__B(PS__BATCH_DOC_START),
          PS__BEFORE(t->window), PS__R(t->dqkv), PS__W(t->dwindow), PS__W(t->du), PS__G(t->w_conv));
  define_inputs_backward(h);
}

const ps__half_kind ps__delta = {.norm = "delta norm",
                                 .post_norm = "delta post norm",
                                 .out = "delta_proj",
                                 .out_rank = PS__RANK_ATTENTION_OUT,
                                 .own_bytes = sizeof(delta),
                                 PS__HALF_FUNCTIONS,
                                 .counted = define_counted,
                                 .stores_x = true};
