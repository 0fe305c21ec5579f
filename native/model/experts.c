/* experts.c - a router and its experts as a half of a block: mixture of experts, dropless.
 *
 *   p = softmax(x W_router),  the k largest of a token choose its experts and are their weights w
 *   g|u = x W_gate|up of each,  s = w act(g) u,  y = the sum of the k rows s W_down
 *
 * With router_sigmoid p = sigmoid(x W_router), and p + bias chooses. With shared_dim y has an MLP
 * that every token goes through added to it.
 *
 * The weight stands before W_down: then what an expert gives is neither saved nor made again, and
 * the router's gradient does not read it. Rows of the experts are sorted by expert: k times the
 * columns of a tensor with rows of tokens. The choice is saved with the block's input, and made
 * again with it alone.
 *
 * gpt-oss has biases on the logits, on g|u and on what an expert gives, and another gate
 * (kernels/ops.h, moe_clamp_glu).
 *
 * Gemma 4 has norms N of its own around the experts and after the shared ones, of the residual
 * stream h, and a factor on an expert's weights:
 *   y = N(shared(x)) + N(experts(N(h))),  p = softmax(D^-1/2 N(h) W_router),  w = c[e] p / sum p */
#include "model/experts.h"
#include "core/core.h"
#include "model/block.h"
#include <math.h>

/* What all tokens have: y + (act(g) u) W_down, S shared_dim; with a gate that is times sigmoid(x w)
 * (Qwen). */
typedef struct shared_experts {
  uint32_t n; /* S; 0: there are none */
  bool gated;
  uint8_t gu;          /* [T,2S]  gate and up; then its gradient */
  uint8_t s, ds;       /* [T,S]   as of an MLP */
  uint8_t z, dz;       /* [T,D]   s W_down, and its gradient; else y and the half's dy */
  uint8_t gate, dgate; /* [T,1]  gated: x w */
  uint8_t y;           /* [T,D]   what they give, and the residual stream; beside: N(z) alone */
  uint16_t w_gu, w_down, w_gate, w_post;
  ps__product gu_p, down_p, gate_p;
} shared_experts;

/* T tokens, E experts, k of a token, R = kT rows, I expert dim, D dim. */
typedef struct experts {
  uint32_t e, k, n_expert; /* n_expert: I */
  uint8_t logits;          /* [T,E]   fp32 */
  uint8_t ids, chosen;     /* [T,k]   u16, fp32: the choice */
  uint8_t weights;         /* [T,k]   fp32: chosen or, with a factor an expert, of it */
  uint8_t offsets;         /* [E+1]   the experts' first rows */
  uint8_t slot;            /* [T,k]   where rows lie */
  uint8_t xr;              /* [R,D]   the rows' input */
  uint8_t gu;              /* [R,2I]  gate and up; then its gradient */
  uint8_t s;               /* [R,I]   weighted gated product */
  uint8_t z;               /* [R,D]   what the experts give */
  uint8_t dz;              /* [R,D]   gradient of z */
  uint8_t ds;              /* [R,I]   gradient of s; then s */
  uint8_t dxr;             /* [R,D]   gradient of xr */
  uint8_t dweights;        /* [T,k]   fp32 */
  uint8_t dlogits;         /* [T,E] */
  bool biased;
  uint16_t w_router, w_bias, w_gu, w_down, b_router, b_gu, b_down;
  ps__product router_p;
  shared_experts shared;
  /* what the router and the rows read, [T,D], and its gradient: the half's x and dx or, beside an
   * MLP, norms of the residual stream */
  ps__operand route_x, rows_x;
  uint8_t route_dx, rows_dx;
  float route_alpha;
  bool beside;
  uint8_t out, dout; /* [T,D]  what the experts give, and its gradient; else y and dy */
  uint16_t w_norm, w_post, w_route_norm, w_factor;
} experts;

const ps__experts_names ps__experts_usual = {.router = "mlp.gate.weight",
                                             .gate = "mlp.experts.%u.gate_proj.weight",
                                             .up = "mlp.experts.%u.up_proj.weight",
                                             .down = "mlp.experts.%u.down_proj.weight"};
const ps__experts_names ps__experts_deepseek = {
    .router = "mlp.gate.weight",
    .gate = "mlp.experts.%u.gate_proj.weight",
    .up = "mlp.experts.%u.up_proj.weight",
    .down = "mlp.experts.%u.down_proj.weight",
    .bias = "mlp.gate.e_score_correction_bias",
    .shared_gate = "mlp.shared_experts.gate_proj.weight",
    .shared_up = "mlp.shared_experts.up_proj.weight",
    .shared_down = "mlp.shared_experts.down_proj.weight"};
const ps__experts_names ps__experts_qwen = {.router = "mlp.gate.weight",
                                            .gate = "mlp.experts.%u.gate_proj.weight",
                                            .up = "mlp.experts.%u.up_proj.weight",
                                            .down = "mlp.experts.%u.down_proj.weight",
                                            .shared_gate = "mlp.shared_expert.gate_proj.weight",
                                            .shared_up = "mlp.shared_expert.up_proj.weight",
                                            .shared_down = "mlp.shared_expert.down_proj.weight",
                                            .shared_router = "mlp.shared_expert_gate.weight"};

static ps_status begin(ps__half *h) {
  experts *t = h->own;
  const ps_model_config *c = &h->b->m->cfg;
  const float scale = c->residual_scale;
  const ps__experts_names *n = h->use->names;
  t->biased = n->router_bias;
  t->beside = n->norm;
  t->route_alpha = t->beside ? 1 / sqrtf((float)h->b->dim) : 0;
  t->e = c->n_experts;
  t->k = c->n_experts_used;
  t->n_expert = c->expert_dim;
  t->shared.n = c->shared_dim;
  t->shared.gated = n->shared_router;
  if (c->router_sigmoid && (h->b->m->loss.router_aux > 0 || h->b->m->loss.router_z > 0))
    return ps__fail(PS_EINVAL,
                    "the router's loss terms are %g (aux) and %g (z), and this model's router has "
                    "sigmoids: they must be 0, its correction bias balances",
                    (double)h->b->m->loss.router_aux, (double)h->b->m->loss.router_z);
  if (scale != 0.0f && scale != 1.0f)
    return ps__fail(PS_EINVAL, "experts in a model with a residual_multiplier of %g: it must be 1",
                    (double)scale);
  if (t->biased != (c->glu_limit > 0))
    return ps__fail(PS_EINVAL,
                    "glu_limit is %g: it is above 0 where experts have biases, and 0 "
                    "elsewhere",
                    (double)c->glu_limit);
  if (t->beside && !t->shared.n)
    return ps__fail(PS_EINVAL, "shared_dim is 0: it must be ffn_dim where experts stand beside an "
                               "MLP");
  return ps__check_experts(1, t->e, t->k, "experts");
}

/* ---- what there is --------------------------------------------------------------------------- */

/* In the first unit: the experts' unit has two operands, whose experts may move one by one. */
static void define_biases(ps__half *h) {
  experts *t = h->own;
  const ps__experts_names *n = h->use->names;
  ps__layer_def *d = h->b->d;
  t->b_router = ps__def_param(d, n->router_bias, PS_PARAM_BIAS, t->e, 0);
  ps__def_what(d, "router bias");
  t->b_gu = ps__def_param(d, n->gate_bias, PS_PARAM_BIAS, t->e, 2 * t->n_expert);
  ps__def_what(d, "experts' gate_up bias");
  t->b_down = ps__def_param(d, n->down_bias, PS_PARAM_BIAS, t->e, h->b->dim);
  ps__def_what(d, "experts' down bias");
}

/* The shared experts are read with the block, since all tokens have them. */
static void define_shared_params(ps__half *h) {
  experts *t = h->own;
  shared_experts *e = &t->shared;
  const ps__experts_names *n = h->use->names;
  ps__layer_def *d = h->b->d;
  e->w_gu = ps__def_param(d, n->shared_gate, PS_PARAM_MATRIX, e->n, h->b->dim);
  ps__def_what(d, "shared experts' gate_up");
  ps__def_param_after(d, n->shared_up, PS_PARAM_MATRIX, e->n, h->b->dim);
  e->w_down = ps__half_residual(h, n->shared_down, "shared experts' down", e->n);
  if (!e->gated)
    return;
  e->w_gate = ps__def_param(d, n->shared_router, PS_PARAM_MATRIX, 1, h->b->dim);
  ps__def_what(d, "shared expert's gate");
}

static void define_norms(ps__half *h) {
  experts *t = h->own;
  const ps__experts_names *n = h->use->names;
  const uint32_t dim = h->b->dim;
  t->w_route_norm = ps__half_norm(h, n->router_scale, "router's norm", dim);
  t->w_factor = ps__half_norm(h, n->expert_scale, "experts' factors", t->e);
  t->w_norm = ps__half_norm(h, n->norm, "experts' norm", dim);
  t->w_post = ps__half_norm(h, n->post_norm, "experts' post norm", dim);
  t->shared.w_post = ps__half_norm(h, n->shared_post_norm, "shared experts' post norm", dim);
}

static void define_params(ps__half *h) {
  experts *t = h->own;
  const ps__experts_names *n = h->use->names;
  const uint32_t dim = h->b->dim;
  ps__layer_def *d = h->b->d;
  ps__def_base(d, PS_BASE_PLAIN);
  t->w_router = ps__def_param(d, n->router, PS_PARAM_MATRIX, t->e, dim);
  ps__def_what(d, "router");
  if (t->biased)
    define_biases(h);
  if (t->shared.n)
    define_shared_params(h);
  if (t->beside)
    define_norms(h);
}

/* The experts are a unit of their own. All of gate and up is one span, and so is all of down: each
 * is one operand of a product. */
static void define_units(ps__half *h) {
  experts *t = h->own;
  const ps__experts_names *n = h->use->names;
  const uint32_t dim = h->b->dim;
  const double out = 0.02 / sqrt(2.0 * h->b->m->cfg.n_layers); /* as ps__half_residual() */
  ps__layer_def *d = h->b->d;
  if (h->b->m->cfg.router_sigmoid) { /* it has no gradient, and stays as it is */
    ps__def_exact_unit(d);
    t->w_bias = ps__def_param(d, n->bias, PS_PARAM_BIAS, t->e, 0);
    ps__def_what(d, "router's correction bias");
  }
  ps__def_base(d, h->b->m->lora.base);
  ps__def_unit(d, ps__base_is_frozen(h->b->m));
  for (uint32_t e = 0; e < t->e; e++) {
    const char *gate = ps__def_name(d, n->gate, e);
    const uint32_t rows = n->up ? t->n_expert : 2 * t->n_expert;
    if (e == 0)
      t->w_gu = ps__def_param(d, gate, PS_PARAM_MATRIX, rows, dim);
    else
      ps__def_param_after(d, gate, PS_PARAM_MATRIX, rows, dim);
    if (n->up)
      ps__def_param_after(d, ps__def_name(d, n->up, e), PS_PARAM_MATRIX, rows, dim);
  }
  ps__def_what(d, "experts' gate_up");
  for (uint32_t e = 0; e < t->e; e++) {
    const char *down = ps__def_name(d, n->down, e);
    if (e == 0)
      t->w_down = ps__def_param(d, down, PS_PARAM_MATRIX, dim, t->n_expert);
    else
      ps__def_param_after(d, down, PS_PARAM_MATRIX, dim, t->n_expert);
    ps__def_init(d, 0, out);
  }
  ps__def_what(d, "experts' down");
}

static void define_sites(ps__half *h) { (void)h; }

static uint8_t tokens_of(const ps__half *h, const char *name, uint64_t cols, uint32_t dt) {
  return ps__def_tensor(h->b->d, name, PS__ROWS_TOKEN, cols, dt);
}

static void define_shared_tensors(ps__half *h) {
  experts *t = h->own;
  shared_experts *e = &t->shared;
  const uint32_t dim = h->b->dim;
  ps__layer_def *d = h->b->d;
  e->gu = ps__half_tokens(h, "shared_gate_up", 2 * (uint64_t)e->n);
  e->s = ps__half_tokens(h, "shared_glu", e->n);
  e->ds = ps__half_tokens(h, "dshared_glu", e->n);
  e->z = e->y = ps__half_tokens(h, "shared_y", dim);
  e->dz = h->dy;
  e->gu_p = ps__def_product(d, e->w_gu, 2 * e->n, dim, false);
  e->down_p = ps__def_product(d, e->w_down, dim, e->n, false);
  if (e->gated || t->beside) {
    e->z = ps__half_tokens(h, "shared_out", dim);
    e->dz = ps__half_tokens(h, "dshared_out", dim);
  }
  if (!e->gated)
    return;
  e->gate = ps__half_tokens(h, "shared_gate", 1);
  e->dgate = ps__half_tokens(h, "dshared_gate", 1);
  e->gate_p = ps__def_product(d, e->w_gate, 1, dim, false);
}

/* Beside an MLP; else the half's own tensors serve. */
static void define_beside(ps__half *h) {
  experts *t = h->own;
  const uint32_t dim = h->b->dim;
  t->weights = t->beside ? tokens_of(h, "scaled_weights", t->k, PS_F32) : t->chosen;
  t->rows_x = t->route_x = h->x;
  t->rows_dx = t->route_dx = h->dx;
  t->dout = h->dy;
  if (!t->beside)
    return;
  t->rows_x.stored = ps__half_tokens(h, "expert_norm", dim);
  t->route_x.stored = ps__half_tokens(h, "router_norm", dim);
  t->rows_dx = ps__half_tokens(h, "dexpert_norm", dim);
  t->route_dx = ps__half_tokens(h, "drouter_norm", dim);
  t->out = ps__half_tokens(h, "experts_out", dim);
  t->dout = ps__half_tokens(h, "dexperts_out", dim);
}

static void define_tensors(ps__half *h) {
  experts *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  const uint64_t k = t->k;
  t->logits = tokens_of(h, "router_logits", t->e, PS_F32);
  t->ids = tokens_of(h, "expert_ids", k, PS__UINT16);
  d->expert_ids = t->ids;
  t->chosen = tokens_of(h, "expert_weights", k, PS_F32);
  t->offsets = ps__def_tensor(d, "expert_offsets", PS__ROWS_ONE, (uint64_t)t->e + 1, PS__INT32);
  t->slot = tokens_of(h, "expert_slots", k, PS__INT32);
  t->xr = ps__half_tokens(h, "expert_x", k * b->dim);
  t->gu = ps__half_tokens(h, "gate_up", k * 2 * t->n_expert);
  t->s = ps__half_tokens(h, "glu", k * t->n_expert);
  t->z = ps__half_tokens(h, "expert_y", k * b->dim);
  t->dz = ps__half_tokens(h, "dexpert_y", k * b->dim);
  t->ds = ps__half_tokens(h, "dglu", k * t->n_expert);
  t->dxr = ps__half_tokens(h, "dexpert_x", k * b->dim);
  t->dweights = tokens_of(h, "dexpert_weights", k, PS_F32);
  t->dlogits = ps__half_tokens(h, "drouter_logits", t->e);
  t->router_p = ps__def_product(d, t->w_router, t->e, b->dim, false);
  define_beside(h);
  if (t->shared.n)
    define_shared_tensors(h);
}

/* The choice is saved with the block's input: under its name, so with its policy. */
static void define_saved(ps__half *h) {
  const experts *t = h->own;
  ps__layer_def *d = h->b->d;
  ps__def_saved(d, t->ids, "x", PS__RANK_INPUT);
  ps__def_saved(d, t->chosen, "x", PS__RANK_INPUT);
  ps__def_saved(d, t->gu, "gate_up", PS__RANK_GATE_UP);
  if (t->shared.n)
    ps__def_saved(d, t->shared.gu, "gate_up", PS__RANK_GATE_UP);
  if (t->beside) { /* norms of the two make y */
    ps__def_saved(d, t->shared.z, "mlp_out", PS__RANK_MLP_OUT);
    ps__def_saved(d, t->out, "mlp_out", PS__RANK_MLP_OUT);
  }
}

/* ---- ops ------------------------------------------------------------------------------------- */

static ps__args_gemm_grouped product(const ps__half *h, uint32_t role, uint32_t n_out,
                                     uint32_t n_in) {
  const experts *t = h->own;
  return (ps__args_gemm_grouped){.n_used = t->k,
                                 .n_out = n_out,
                                 .n_in = n_in,
                                 .n_experts = t->e,
                                 .dt = h->b->m->dt,
                                 .role = role};
}
static ps__args_moe_rows rows_of(const ps__half *h) {
  const experts *t = h->own;
  return (ps__args_moe_rows){.n_used = t->k, .dim = h->b->dim, .dt = h->b->m->dt};
}
static ps__args_moe_glu gate_of(const ps__half *h) {
  const experts *t = h->own;
  const ps_model *m = h->b->m;
  return (ps__args_moe_glu){
      .n_used = t->k, .expert_dim = t->n_expert, .dt = m->dt, .activation = m->cfg.activation};
}

static ps__args_moe_clamp_glu clamp_of(const ps__half *h) {
  const experts *t = h->own;
  const ps_model *m = h->b->m;
  return (ps__args_moe_clamp_glu){.n_used = t->k,
                                  .n_experts = t->e,
                                  .expert_dim = t->n_expert,
                                  .dt = m->dt,
                                  .alpha = m->cfg.glu_alpha,
                                  .limit = m->cfg.glu_limit};
}
static ps__args_moe_bias bias_of(const ps__half *h, uint32_t cols) {
  const experts *t = h->own;
  return (ps__args_moe_bias){.n_used = t->k, .n_experts = t->e, .cols = cols, .dt = h->b->m->dt};
}

/* A norm of what the half begins with, and of its gradient. */
static void define_norm(const ps__half *h, uint16_t w, ps__operand x) {
  PS__FWD(h->b->d, ps__k_rmsnorm_fwd, h->b->norm, PS__R(h->in), PS__P(w), PS__W(x.stored));
}
static void define_norm_backward(const ps__half *h, uint16_t w, uint8_t dx) {
  ps__args_rmsnorm norm = h->b->norm;
  norm.add_dx = true;
  PS__BWD(h->b->d, ps__k_rmsnorm_bwd, norm, PS__R(h->in), PS__P(w), PS__R(dx), PS__RW(h->b->dy),
          PS__G(w));
}
static ps__args_moe_scale factor_of(const ps__half *h) {
  const experts *t = h->own;
  return (ps__args_moe_scale){.n_used = t->k, .n_experts = t->e, .dt = h->b->m->dt};
}

static void define_route(const ps__half *h) {
  const experts *t = h->own;
  const ps_model *m = h->b->m;
  ps__layer_def *d = h->b->d;
  ps__args_gemm logits = ps__gemm_args(0, t->e, h->b->dim, false, true, m->dt);
  logits.dt_c = PS_F32; /* a near-tie of bf16 logits would be one that rounding decides */
  logits.alpha = t->route_alpha;
  const bool corrected = m->cfg.router_sigmoid;
  const ps__args_moe_route route = {.n_experts = t->e,
                                    .n_used = t->k,
                                    .renorm = m->cfg.norm_topk_prob,
                                    .sigmoid = m->cfg.router_sigmoid,
                                    .has_bias = corrected,
                                    .dt = PS_F32,
                                    .n_groups = m->cfg.n_expert_groups,
                                    .n_groups_used = m->cfg.n_groups_used,
                                    .scale = m->cfg.router_scale};
  const ps__args_moe_index index = {.n_experts = t->e, .n_used = t->k};
  if (t->beside)
    define_norm(h, t->w_route_norm, t->route_x);
  PS__FWD(d, ps__k_gemm, logits, PS__R(t->route_x.stored), PS__P(t->w_router), PS__W(t->logits));
  if (t->biased) {
    const ps__args_add_bias bias = {.cols = t->e, .dt = m->dt};
    PS__FWD(d, ps__k_add_bias, bias, PS__RW(t->logits), PS__P(t->b_router));
  }
  PS__FWD(d, ps__k_moe_route, route, PS__R(t->logits), PS__W(t->ids), PS__W(t->chosen),
          PS__SYM_IF(corrected, PS__P(t->w_bias)));
  if (t->beside) {
    const ps__args_moe_scale factor = factor_of(h);
    PS__FWD(d, ps__k_moe_scale, factor, PS__R(t->chosen), PS__R(t->ids), PS__P(t->w_factor),
            PS__W(t->weights));
  }
  PS__FWD(d, ps__k_moe_index, index, PS__R(t->ids), PS__W(t->offsets), PS__W(t->slot));
}

static ps__args_glu shared_glu_of(const ps__half *h) {
  const ps_model *m = h->b->m;
  return (ps__args_glu){.ffn_dim = m->cfg.shared_dim, .dt = m->dt, .activation = m->cfg.activation};
}
static ps__args_sigmoid_gate shared_gate_of(const ps__half *h, bool has_residual) {
  return (ps__args_sigmoid_gate){
      .cols = h->b->dim, .n_gates = 1, .dt = h->b->m->dt, .has_residual = has_residual};
}
static ps__operand stored(uint8_t tensor) { return (ps__operand){.stored = tensor}; }

/* What the routed experts' rows are added to: the residual stream, and what the shared experts
 * give. PS__NONE: nothing. */
static int define_shared(const ps__half *h) {
  const experts *t = h->own;
  const shared_experts *e = &t->shared;
  const ps_model *m = h->b->m;
  ps__layer_def *d = h->b->d;
  const ps__args_glu glu = shared_glu_of(h);
  const ps__args_sigmoid_gate gate = shared_gate_of(h, h->residual != PS__NONE);
  if (!e->n)
    return h->residual;
  ps__product_forward(m, d, &e->gu_p, h->x, e->gu, 0, PS__NONE, PS__NONE);
  PS__FWD(d, ps__k_glu_fwd, glu, PS__R(e->gu), PS__W(e->s));
  ps__product_forward(m, d, &e->down_p, stored(e->s), e->z, 0, PS__NONE,
                      e->z == e->y ? h->residual : PS__NONE);
  if (t->beside) {
    PS__FWD(d, ps__k_rmsnorm_fwd, h->b->norm, PS__R(e->z), PS__P(e->w_post), PS__W(e->y));
    return PS__NONE;
  }
  if (!e->gated)
    return e->y;
  ps__product_forward(m, d, &e->gate_p, h->x, e->gate, 0, PS__NONE, PS__NONE);
  PS__FWD(d, ps__k_sigmoid_gate_fwd, gate, PS__R(e->z), PS__R(e->gate), PS__W(e->y),
          PS__SYM_IF(gate.has_residual, PS__R((uint8_t)h->residual)));
  return e->y;
}

/* From dy to dx, to which it adds; beside an MLP nothing else writes dx. */
static void define_shared_backward(const ps__half *h) {
  const experts *t = h->own;
  const shared_experts *e = &t->shared;
  const ps_model *m = h->b->m;
  ps__layer_def *d = h->b->d;
  const ps__args_glu glu = shared_glu_of(h);
  const ps__args_sigmoid_gate gate = shared_gate_of(h, false);
  if (!e->n)
    return;
  if (e->gated)
    PS__BWD(d, ps__k_sigmoid_gate_bwd, gate, PS__R(e->z), PS__R(e->gate), PS__R(h->dy),
            PS__W(e->dz), PS__W(e->dgate));
  if (t->beside)
    PS__BWD(d, ps__k_rmsnorm_bwd, h->b->norm, PS__R(e->z), PS__P(e->w_post), PS__R(h->dy),
            PS__W(e->dz), PS__G(e->w_post));
  ps__product_dx(m, d, &e->down_p, stored(e->dz), e->ds, 0, false);
  PS__BWD(d, ps__k_glu_bwd, glu, PS__RW(e->ds), PS__RW(e->gu)); /* leaves s in ds */
  ps__product_dw(m, d, &e->down_p, stored(e->dz), stored(e->ds), 0);
  ps__product_dw(m, d, &e->gu_p, stored(e->gu), h->x, 0);
  ps__product_dx(m, d, &e->gu_p, stored(e->gu), h->dx, 0, !t->beside);
  if (!e->gated)
    return;
  ps__product_dw(m, d, &e->gate_p, stored(e->dgate), h->x, 0);
  ps__product_dx(m, d, &e->gate_p, stored(e->dgate), h->dx, 0, true);
}

static void define_forward(ps__half *h) {
  const experts *t = h->own;
  ps__layer_def *d = h->b->d;
  const uint32_t dim = h->b->dim, n = t->n_expert;
  const ps__args_gemm_grouped gate_up = product(h, PS_GEMM_FORWARD, 2 * n, dim),
                              down = product(h, PS_GEMM_FORWARD, dim, n);
  const ps__args_moe_rows gather = rows_of(h);
  const ps__args_moe_glu gate = gate_of(h);
  ps__args_moe_rows combine = gather;
  combine.has_bias = t->biased;
  ps__half_input(h, false);
  define_route(h);
  const int residual = define_shared(h);
  combine.has_residual = residual != PS__NONE;
  if (t->beside)
    define_norm(h, t->w_norm, t->rows_x);
  PS__FWD(d, ps__k_moe_gather, gather, PS__R(t->rows_x.stored), PS__R(t->slot), PS__W(t->xr));
  PS__FWD(d, ps__k_gemm_grouped, gate_up, PS__R(t->xr), PS__P(t->w_gu), PS__R(t->offsets),
          PS__W(t->gu));
  if (t->biased) {
    const ps__args_moe_clamp_glu clamp = clamp_of(h);
    PS__FWD(d, ps__k_moe_clamp_glu, clamp, PS__R(t->gu), PS__P(t->b_gu), PS__R(t->ids),
            PS__R(t->weights), PS__R(t->slot), PS__W(t->s));
  } else {
    PS__FWD(d, ps__k_moe_glu, gate, PS__R(t->gu), PS__R(t->weights), PS__R(t->slot), PS__W(t->s));
  }
  PS__FWD(d, ps__k_gemm_grouped, down, PS__R(t->s), PS__P(t->w_down), PS__R(t->offsets),
          PS__W(t->z));
  PS__FWD(d, ps__k_moe_combine, combine, PS__R(t->z), PS__R(t->slot),
          PS__W(t->beside ? t->out : h->y),
          PS__SYM_IF(combine.has_residual, PS__R((uint8_t)residual)),
          PS__SYM_IF(t->biased, PS__P(t->b_down)), PS__SYM_IF(t->biased, PS__R(t->weights)),
          PS__SYM_IF(t->biased, PS__R(t->ids)));
  if (t->beside) {
    ps__args_rmsnorm post = h->b->norm;
    post.has_residual = true;
    PS__FWD(d, ps__k_rmsnorm_fwd, post, PS__R(t->out), PS__P(t->w_post), PS__W(h->y),
            PS__R(t->shared.y));
  }
}

/* From the gradients of weights to those of the router and, on top of the experts', of x. */
static void define_route_backward(const ps__half *h) {
  const experts *t = h->own;
  const ps_model *m = h->b->m;
  ps__layer_def *d = h->b->d;
  const float blocks = (float)ps__n_sparse(&m->cfg);
  const ps__args_moe_route_bwd route = {.n_experts = t->e,
                                        .n_used = t->k,
                                        .renorm = m->cfg.norm_topk_prob,
                                        .dt = m->dt,
                                        .count = 1,
                                        .sigmoid = m->cfg.router_sigmoid,
                                        .scale = m->cfg.router_scale,
                                        .aux = m->loss.router_aux * (float)t->e / blocks,
                                        .z_loss = m->loss.router_z / blocks};
  const ps__operand dlogits = {.stored = t->dlogits};
  if (t->beside) {
    const ps__args_moe_scale factor = factor_of(h);
    PS__BWD(d, ps__k_moe_scale_bwd, factor, PS__R(t->chosen), PS__R(t->ids), PS__P(t->w_factor),
            PS__RW(t->dweights), PS__G(t->w_factor));
  }
  PS__BWD(d, ps__k_moe_route_bwd, route, PS__R(t->logits), PS__R(t->ids), PS__R(t->chosen),
          PS__R(t->dweights), PS__R(t->offsets), PS__W(t->dlogits), PS__ROUTED);
  const ps__args_colsum bias = {.cols = t->e, .ld = t->e, .dt = m->dt};
  if (t->biased)
    PS__BWD(d, ps__k_colsum, bias, PS__R(t->dlogits), PS__G(t->b_router));
  ps__product_dw(m, d, &t->router_p, dlogits, t->route_x, t->route_alpha);
  ps__product_dx(m, d, &t->router_p, dlogits, t->route_dx, t->route_alpha, !t->beside);
  if (t->beside)
    define_norm_backward(h, t->w_route_norm, t->route_dx);
}

/* From ds and gu to their gradients, and to dweights. */
static void define_gate_backward(const ps__half *h) {
  const experts *t = h->own;
  ps__layer_def *d = h->b->d;
  const uint32_t dim = h->b->dim;
  if (!t->biased) {
    const ps__args_moe_glu gate = gate_of(h);
    PS__BWD(d, ps__k_moe_glu_bwd, gate, PS__RW(t->ds), PS__RW(t->gu), PS__R(t->weights),
            PS__R(t->slot), PS__W(t->dweights)); /* leaves s in ds */
    return;
  }
  const ps__args_moe_clamp_glu gate = clamp_of(h);
  const ps__args_moe_bias dot = bias_of(h, dim), of_gu = bias_of(h, 2 * t->n_expert);
  ps__args_moe_bias of_down = dot;
  of_down.weighted = 1;
  PS__BWD(d, ps__k_moe_clamp_glu_bwd, gate, PS__RW(t->ds), PS__RW(t->gu), PS__P(t->b_gu),
          PS__R(t->ids), PS__R(t->weights), PS__R(t->slot), PS__W(t->dweights)); /* s in ds */
  PS__BWD(d, ps__k_moe_bias_dot, dot, PS__R(h->dy), PS__P(t->b_down), PS__R(t->ids),
          PS__RW(t->dweights));
  PS__BWD(d, ps__k_moe_bias_sum, of_gu, PS__R(t->gu), PS__R(t->offsets), PS__R(t->slot),
          PS__R(t->weights), PS__G(t->b_gu));
  PS__BWD(d, ps__k_moe_bias_sum, of_down, PS__R(t->dz), PS__R(t->offsets), PS__R(t->slot),
          PS__R(t->weights), PS__G(t->b_down));
}

static void define_backward(ps__half *h) {
  const experts *t = h->own;
  ps__layer_def *d = h->b->d;
  const uint32_t dim = h->b->dim, n = t->n_expert;
  const ps__args_gemm_grouped down_dx = product(h, PS_GEMM_DGRAD, dim, n),
                              down_dw = product(h, PS_GEMM_WGRAD, dim, n),
                              gate_up_dx = product(h, PS_GEMM_DGRAD, 2 * n, dim),
                              gate_up_dw = product(h, PS_GEMM_WGRAD, 2 * n, dim);
  const ps__args_moe_rows gather = rows_of(h);
  ps__args_moe_rows combine = gather;
  combine.accumulate = h->adds_dx;
  if (t->beside)
    PS__BWD(d, ps__k_rmsnorm_bwd, h->b->norm, PS__R(t->out), PS__P(t->w_post), PS__R(h->dy),
            PS__W(t->dout), PS__G(t->w_post));
  PS__BWD(d, ps__k_moe_gather, gather, PS__R(t->dout), PS__R(t->slot), PS__W(t->dz));
  PS__BWD(d, ps__k_gemm_grouped, down_dx, PS__R(t->dz), PS__P(t->w_down), PS__R(t->offsets),
          PS__W(t->ds));
  define_gate_backward(h);
  PS__BWD(d, ps__k_gemm_grouped, down_dw, PS__R(t->dz), PS__R(t->ds), PS__R(t->offsets),
          PS__G(t->w_down));
  ps__half_input(h, true);
  PS__BWD(d, ps__k_gemm_grouped, gate_up_dw, PS__R(t->gu), PS__R(t->xr), PS__R(t->offsets),
          PS__G(t->w_gu));
  PS__BWD(d, ps__k_gemm_grouped, gate_up_dx, PS__R(t->gu), PS__P(t->w_gu), PS__R(t->offsets),
          PS__W(t->dxr));
  PS__BWD(d, ps__k_moe_combine, combine, PS__R(t->dxr), PS__R(t->slot),
          h->adds_dx ? PS__RW(t->rows_dx) : PS__W(t->rows_dx));
  if (t->beside)
    define_norm_backward(h, t->w_norm, t->rows_dx);
  define_shared_backward(h);
  define_route_backward(h);
}

const ps__half_kind ps__experts = {.norm = "experts' norm",
                                   .post_norm = "experts' post norm",
                                   .out = "experts_out",
                                   .out_rank = PS__RANK_MLP_OUT,
                                   .own_bytes = sizeof(experts),
                                   PS__HALF_FUNCTIONS,
                                   .units = define_units,
                                   .counted = NULL}, /* in bf16 whatever the recipe */
    ps__experts_beside = {.norm = "mlp norm",
                          .post_norm = "mlp post norm",
                          .out = "mlp_out",
                          .out_rank = PS__RANK_MLP_OUT,
                          .makes_out = true,
                          .own_bytes = sizeof(experts),
                          PS__HALF_FUNCTIONS,
                          .units = define_units,
                          .counted = NULL};
