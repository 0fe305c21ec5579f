/* decoder.c - the dense decoder as layer definitions: embedding and block. */
#include "model/decoder.h"
#include "core/core.h"
#include "model/lora.h"
#include "model/product.h"
#include "model/rope.h"
#include <math.h>
#include <stdio.h>

/* ---- arguments, but for what a chunk decides (ps__op_info.bind) ------------------------------ */

static ps__args_attention attention_args(const ps_model *m, uint32_t flags) {
  return (ps__args_attention){.n_heads = m->cfg.n_heads,
                              .n_kv_heads = m->cfg.n_kv_heads,
                              .head_dim = m->cfg.head_dim,
                              .dt = m->dt,
                              .sequence_rows = (uint32_t)m->seq_len,
                              .window = flags & PS_LAYER_WINDOW ? m->cfg.window : 0,
                              .scale = m->cfg.attention_scale,
                              .softcap = m->cfg.attention_softcap};
}

static ps_status qkv_args(ps__args_qkv *out, const ps_model *m, uint32_t flags, float offset) {
  const ps_model_config *c = &m->cfg;
  ps_rope rope = c->rope;
  if (flags & PS_LAYER_LOCAL_ROPE)
    rope = (ps_rope){.rotary_dim = c->rope.rotary_dim, .theta = c->local_rope_theta};
  if (!rope.rotary_dim)
    rope.rotary_dim = c->head_dim;
  if (flags & PS_LAYER_NO_ROPE)
    rope.rotary_dim = 0;
  *out = (ps__args_qkv){.n_heads = c->n_heads,
                        .n_kv_heads = c->n_kv_heads,
                        .head_dim = c->head_dim,
                        .dt = m->dt,
                        .qk_norm = c->qk_norm,
                        .eps = c->norm_eps,
                        .norm_offset = offset};
  return ps__rope_table(out, &rope, c->max_positions, m->seq_len);
}

/* ---- the block ------------------------------------------------------------------------------- */

/* A block under construction. T tokens, D dim, A heads x head_dim, K kv_heads x head_dim, F ffn
 * dim. Tensors and spans by index in the definition. */
typedef struct block {
  ps_model *m;
  const ps__decoder *names;
  ps__layer_def *d;
  uint32_t dim, a, k, f;
  bool pre1, post1, pre2, post2; /* which norms there are */
  uint8_t x;                     /* [T,D]      block input */
  uint8_t n1;                    /* [T,D]      normed input of attention */
  uint8_t qkv;                   /* [T,A+2K]   fused product */
  uint8_t q;                     /* [T,A]      after RoPE (and QK-norm) */
  uint8_t kv;                    /* [group,2K] keys and values after RoPE */
  uint8_t o;                     /* [T,A]      attention output */
  uint8_t lse;                   /* [T,heads]  fp32 log-sum-exp */
  uint8_t po;                    /* [T,D]      with a post norm: what it norms */
  uint8_t h;                     /* [T,D]      residual stream after attention */
  uint8_t n2;                    /* [T,D]      normed input of the MLP */
  uint8_t gu; /* [T,2F]     gate and up; the backward pass overwrites it with its gradient */
  uint8_t gu_mx, gu_mx_scale; /* the same as an MX tensor, which is saved in the place of gu */
  uint8_t s;                  /* [T,F]      gated product */
  uint8_t py;                 /* [T,D]      with a post norm: what it norms */
  uint8_t y;                  /* [T,D]      block output */
  uint8_t dy;    /* [T,D]      gradient of the residual stream: dY, overwritten with dX */
  uint8_t dpost; /* [T,D]      gradient of po or py */
  uint8_t ds;    /* [T,F]      gradient of s, then overwritten with s */
  uint8_t dn2;   /* [T,D] */
  uint8_t dout;  /* [T,A] */
  uint8_t dq;    /* [T,A] */
  uint8_t dkv;   /* [group,2K] fp32; the chunks of the group add to it */
  uint8_t dqkv;  /* [T,A+2K] */
  uint8_t dn1;   /* [T,D] */
  uint16_t w_norm1, w_qkv, b_qkv, w_qnorm, w_knorm, w_o, w_post1, w_norm2, w_gu, w_down, w_post2;
  ps__adapter lora[PS_N_LORA_TARGETS]; /* by target */
  bool fp8, down_fp8, mx;              /* mx: there is a gu_mx, which the backward pass reads */
  ps__product qkv_p, o_p, gu_p, down_p;
  ps__operand qkv_x, o_x, gu_x, down_x;     /* what the products multiply */
  ps__operand qkv_dy, o_dy, gu_dy, down_dy; /* their gradients */
} block;

/* A norm's weights; a fresh model's norm multiplies by 1. */
static uint16_t norm_param(block *b, const char *name, const char *what, uint32_t n) {
  if (!name)
    return 0;
  const uint16_t span = ps__def_param(b->d, name, PS_PARAM_NORM, n, 0);
  ps__def_what(b->d, what);
  ps__def_init(b->d, 1.0 - (double)b->names->norm_offset, 0);
  return span;
}

/* A matrix that writes into the residual stream. A fresh model's is smaller the more layers there
 * are, as in GPT-2 (Radford et al. 2019, section 2.3). */
static uint16_t residual_param(block *b, const char *name, const char *what, uint32_t n_in) {
  const uint16_t span = ps__def_param(b->d, name, PS_PARAM_MATRIX, b->dim, n_in);
  ps__def_what(b->d, what);
  ps__def_init(b->d, 0, 0.02 / sqrt(2.0 * b->m->cfg.n_layers));
  return span;
}

/* In the order in which they lie in the unit. */
static void define_params(block *b) {
  const ps__decoder *n = b->names;
  const ps_model_config *c = &b->m->cfg;
  const bool row_norm = c->qk_norm == PS_QK_NORM_ROW;
  ps__layer_def *d = b->d;
  b->w_norm1 = norm_param(b, n->attention_norm, "attention norm", b->dim);
  b->w_qkv = ps__def_param(d, n->q, PS_PARAM_MATRIX, n->k ? b->a : b->a + 2 * b->k, b->dim);
  ps__def_what(d, "qkv");
  if (n->k) {
    ps__def_param_after(d, n->k, PS_PARAM_MATRIX, b->k, b->dim);
    ps__def_param_after(d, n->v, PS_PARAM_MATRIX, b->k, b->dim);
  }
  if (c->qkv_bias) {
    b->b_qkv = ps__def_param(d, n->q_bias, PS_PARAM_BIAS, b->a, 0);
    ps__def_what(d, "qkv bias");
    ps__def_param_after(d, n->k_bias, PS_PARAM_BIAS, b->k, 0);
    ps__def_param_after(d, n->v_bias, PS_PARAM_BIAS, b->k, 0);
  }
  if (c->qk_norm) {
    b->w_qnorm = norm_param(b, n->q_norm, "q and k norm", row_norm ? b->a : c->head_dim);
    b->w_knorm = norm_param(b, n->k_norm, "q and k norm", row_norm ? b->k : c->head_dim);
  }
  b->w_o = residual_param(b, n->o, "o", b->a);
  b->w_post1 = norm_param(b, n->attention_post_norm, "attention post norm", b->dim);
  b->w_norm2 = norm_param(b, n->mlp_norm, "mlp norm", b->dim);
  b->w_gu = ps__def_param(d, n->gate, PS_PARAM_MATRIX, n->up ? b->f : 2 * b->f, b->dim);
  ps__def_what(d, "gate_up");
  if (n->up)
    ps__def_param_after(d, n->up, PS_PARAM_MATRIX, b->f, b->dim);
  b->w_down = residual_param(b, n->down, "down", b->f);
  b->w_post2 = norm_param(b, n->mlp_post_norm, "mlp post norm", b->dim);
}

/* The adapters' unit. Phi-3 has q, k, v and gate, up as one target each. */
static ps_status define_adapters(block *b) {
  const bool qkv = !b->names->k, gu = !b->names->up;
  const struct {
    bool there;
    uint32_t n_out, n_in;
  } site[PS_N_LORA_TARGETS] = {
      {!qkv, b->a, b->dim},   {!qkv, b->k, b->dim},
      {!qkv, b->k, b->dim},   {true, b->dim, b->a},
      {!gu, b->f, b->dim},    {!gu, b->f, b->dim},
      {true, b->dim, b->f},   {qkv, b->a + 2 * b->k, b->dim},
      {gu, 2 * b->f, b->dim},
  };
  uint32_t there = 0;
  if (!b->m->lora.rank)
    return PS_OK;
  for (uint32_t i = 0; i < PS_N_LORA_TARGETS; i++)
    there |= (uint32_t)site[i].there << i;
  PS_TRY(ps__lora_resolve(b->m, there));
  ps__def_adapter_unit(b->d, ps__is_frozen(b->m));
  for (uint32_t i = 0; i < PS_N_LORA_TARGETS; i++)
    ps__lora_define(b->m, b->d, i, site[i].n_out, site[i].n_in, &b->lora[i]);
  return PS_OK;
}

static uint8_t tokens(block *b, const char *name, uint64_t cols) {
  return ps__def_tensor(b->d, name, PS__ROWS_TOKEN, cols, b->m->dt);
}
static uint8_t tokens_if(block *b, bool there, const char *name, uint64_t cols) {
  return there ? tokens(b, name, cols) : 0;
}

static void define_tensors(block *b) {
  ps__layer_def *d = b->d;
  b->x = tokens(b, "x", b->dim);
  b->n1 = tokens_if(b, b->pre1 && !b->fp8, "norm1", b->dim);
  b->qkv = tokens(b, "qkv", b->a + 2 * b->k);
  b->q = tokens(b, "q", b->a);
  b->kv = ps__def_tensor(d, "kv", PS__ROWS_GROUP, 2 * b->k, b->m->dt);
  b->o = tokens(b, "attn_out", b->a);
  b->lse = ps__def_tensor(d, "lse", PS__ROWS_TOKEN, b->m->cfg.n_heads, PS_F32);
  b->po = tokens_if(b, b->post1, "attn_proj", b->dim);
  b->h = tokens(b, "h", b->dim);
  b->n2 = tokens_if(b, b->pre2 && !b->fp8, "norm2", b->dim);
  b->gu = tokens(b, "gate_up", 2 * b->f);
  if (b->mx) {
    b->gu_mx = ps__def_tensor(d, "gate_up_mx", PS__ROWS_TOKEN, 2 * b->f, PS__E4M3);
    b->gu_mx_scale =
        ps__def_tensor(d, "gate_up_mx_scale", PS__ROWS_TOKEN, 2 * b->f / PS__MX_VALUES, PS__E8M0);
  }
  b->s = tokens_if(b, !b->down_fp8, "glu", b->f);
  b->py = tokens_if(b, b->post2, "mlp_out", b->dim);
  b->y = tokens(b, "y", b->dim);
  b->dy = tokens(b, "dy", b->dim);
  b->dpost = tokens_if(b, b->post1 || b->post2, "dpost", b->dim);
  b->ds = tokens(b, "dglu", b->f);
  b->dn2 = tokens_if(b, b->pre2, "dnorm2", b->dim);
  b->dout = tokens(b, "dattn_out", b->a);
  b->dq = tokens(b, "dq", b->a);
  b->dkv = ps__def_tensor(d, "dkv", PS__ROWS_GROUP, 2 * b->k, PS_F32);
  b->dqkv = tokens(b, "dqkv", b->a + 2 * b->k);
  b->dn1 = tokens_if(b, b->pre1, "dnorm1", b->dim);
  d->input = b->x;
  d->output = b->y;
  d->grad = b->dy;
}

/* A half's products begin at its norm, or at its input where there is none. */
static void define_products(block *b) {
  ps__layer_def *d = b->d;
  const uint32_t qkv = b->a + 2 * b->k;
  const uint8_t dproduct1 = b->post1 ? b->dpost : b->dy, dproduct2 = b->post2 ? b->dpost : b->dy;
  b->qkv_p = ps__def_product(d, b->w_qkv, qkv, b->dim, b->fp8);
  b->o_p = ps__def_product(d, b->w_o, b->dim, b->a, b->fp8);
  b->gu_p = ps__def_product(d, b->w_gu, 2 * b->f, b->dim, b->fp8);
  b->down_p = ps__def_product(d, b->w_down, b->dim, b->f, b->down_fp8);
  b->qkv_x = ps__def_x(d, b->pre1 ? b->n1 : b->x, b->dim, b->fp8);
  b->o_x = ps__def_x(d, b->o, b->a, b->fp8);
  b->gu_x = ps__def_x(d, b->pre2 ? b->n2 : b->h, b->dim, b->fp8);
  b->down_x = ps__def_x(d, b->s, b->f, b->down_fp8);
  b->qkv_dy = ps__def_dy(d, b->dqkv, qkv, b->fp8);
  b->o_dy = ps__def_dy(d, dproduct1, b->dim, b->fp8);
  b->gu_dy = ps__def_dy(d, b->gu, 2 * b->f, b->fp8);
  b->down_dy = ps__def_dy(d, dproduct2, b->dim, b->down_fp8);
}

/* The op that makes two of them counts the second one after the first. */
static void define_counted(block *b) {
  const struct {
    ps__operand *x;
    bool fp8;
    const char *what;
  } counted[] = {{&b->qkv_x, b->fp8, "the input of q, k and v"},
                 {&b->o_x, b->fp8, "the output of attention"},
                 {&b->gu_x, b->fp8, "the input of gate and up"},
                 {&b->gu_dy, b->fp8, "the gradient of gate and up"},
                 {&b->down_x, b->down_fp8, "the gated product"},
                 {&b->qkv_dy, b->fp8, "the gradient of q, k and v"},
                 {&b->o_dy, b->fp8, "the gradient of o's output"},
                 {&b->down_dy, b->down_fp8, "the gradient of down's output"}};
  for (size_t i = 0; i < sizeof counted / sizeof *counted; i++)
    if (counted[i].fp8)
      counted[i].x->count = ps__def_counted(b->d, counted[i].x->qt, counted[i].what);
}

/* Attention costs the most time a byte to recompute. What a post norm of the MLP norms comes next:
 * 2F FLOPs an element. The products of the others cost about the same a byte: the early ones come
 * first. Without QK-norm q and kv come from one product, so that one without the other saves
 * nothing; with it, they come from qkv, which the norms' backward passes read too. Where a post
 * norm stands before h, it makes h from what it norms. A gate-and-up product that is saved as an MX
 * tensor has half of the others' bytes. */
static void define_saved(block *b) {
  ps__layer_def *d = b->d;
  ps__def_saved(d, b->x, "x", 0);
  if (b->m->cfg.qk_norm) {
    ps__def_saved(d, b->qkv, "qkv", 4);
  } else {
    ps__def_saved(d, b->q, "q", 4);
    ps__def_saved(d, b->kv, "kv", 4);
  }
  ps__def_saved(d, b->o, "attn_out", 1);
  ps__def_saved(d, b->lse, "attn_out", 1);
  if (b->post1)
    ps__def_saved(d, b->po, "attn_proj", 5);
  else
    ps__def_saved(d, b->h, "h", 5);
  if (b->mx) {
    ps__def_saved(d, b->gu_mx, "gate_up", 3);
    ps__def_saved(d, b->gu_mx_scale, "gate_up", 3);
  } else {
    ps__def_saved(d, b->gu, "gate_up", 6);
  }
  if (b->post2)
    ps__def_saved(d, b->py, "mlp_out", 2);
}

/* An output that several targets share, or its gradient: the columns of each. Others have none. */
typedef struct shared {
  uint8_t tensor;
  uint32_t cols, n;
  struct {
    uint32_t target, first;
  } part[4];
} shared;

enum { Q, K, V, O, GATE, UP, DOWN, QKV, GATE_UP }; /* numbers of the bits of PS_LORA_* */

static shared qkv_parts(const block *b, uint8_t tensor) {
  return (shared){tensor, b->a + 2 * b->k, 4, {{Q, 0}, {K, b->a}, {V, b->a + b->k}, {QKV, 0}}};
}
static shared gate_up_parts(const block *b, uint8_t tensor) {
  return (shared){tensor, 2 * b->f, 3, {{GATE, 0}, {UP, b->f}, {GATE_UP, 0}}};
}
static ps__columns columns_of(const shared *s, uint32_t i) {
  return (ps__columns){s->tensor, s->cols, s->part[i].first};
}
static ps__columns whole(const block *b, uint8_t tensor) {
  return (ps__columns){tensor, b->dim, 0};
}

static void adapt_shared(block *b, uint8_t x, shared y) {
  for (uint32_t i = 0; i < y.n; i++)
    ps__lora_forward(b->m, b->d, &b->lora[y.part[i].target], x, columns_of(&y, i), 1);
}

/* to = from + scale post(act W^T): the end of a half. */
static void define_projection(block *b, const ps__product *p, ps__operand act, uint32_t target,
                              bool post, uint8_t normed, uint16_t w_post, uint8_t from,
                              uint8_t to) {
  const float scale = b->m->cfg.residual_scale;
  const uint8_t y = post ? normed : to;
  ps__args_rmsnorm norm = ps__norm_args(b->m, b->names);
  norm.has_residual = true;
  ps__product_forward(b->m, b->d, p, act, y, scale, PS__NONE, post ? PS__NONE : from);
  ps__lora_forward(b->m, b->d, &b->lora[target], act.stored, whole(b, y), scale);
  if (post)
    PS__FWD(b->d, ps__k_rmsnorm_fwd, norm, PS__R(normed), PS__P(w_post), PS__W(to), PS__R(from));
}

/* The X of a half's first product in the form that a pass needs: the norm of @in, or @in itself. In
 * bf16 the backward pass has the norm made again by the forward op. */
static void define_normed(block *b, bool pre, uint8_t in, uint16_t w_norm, ps__operand x,
                          bool backward) {
  const ps__args_rmsnorm norm = ps__norm_args(b->m, b->names);
  const ps__args_rmsnorm_quantize q = {.norm = norm,
                                       .dt_q = PS__E4M3,
                                       .forms = backward ? PS_FORM_COLS : PS_FORM_ROWS,
                                       .count = backward ? x.count : 0};
  if (b->fp8 && pre)
    PS__DEF_OP(b->d, backward, false, ps__k_rmsnorm_quantize, q, PS__R(in), PS__P(w_norm),
               PS__W(backward ? x.scale_t : x.scale), PS__W(backward ? x.qt : x.q),
               PS__SYM_IF(q.count, PS__FLUSHED));
  else if (b->fp8)
    ps__quantize_x(b->m, b->d, x, b->dim, backward);
  else if (pre && !backward)
    PS__FWD(b->d, ps__k_rmsnorm_fwd, norm, PS__R(in), PS__P(w_norm), PS__W(x.stored));
}

/* The forward pass reads gu itself. So its values are those without an MX tensor, and gu_mx is made
 * where it is saved or recomputed; where it is saved, by the op that reads gu anyhow. The backward
 * pass takes both the gradient and s from gu_mx, wherever that was: bits depend on no policy. */
static void define_gate(block *b) {
  const ps__args_glu glu = {.ffn_dim = b->f, .dt = b->m->dt, .activation = b->m->cfg.activation};
  const ps__args_glu_quantize q = {.ffn_dim = glu.ffn_dim,
                                   .dt = glu.dt,
                                   .activation = glu.activation,
                                   .dt_q = PS__E4M3,
                                   .forms = PS_FORM_ROWS};
  const ps__args_quantize_mx mx = {.cols = 2 * b->f, .dt = b->m->dt};
  ps__args_glu_quantize both = q;
  both.mx = true;
  if (b->mx)
    PS__FWD(b->d, ps__k_quantize_mx, mx, PS__R(b->gu), PS__W(b->gu_mx), PS__W(b->gu_mx_scale));
  if (b->down_fp8)
    PS__FWD(b->d, ps__k_glu_quantize, q, PS__R(b->gu), PS__W(b->down_x.scale), PS__W(b->down_x.q));
  else
    PS__FWD(b->d, ps__k_glu_fwd, glu, PS__R(b->gu), PS__W(b->s));
  if (b->mx)
    PS__JOINT(b->d, 2, ps__k_glu_quantize, both, PS__R(b->gu), PS__W(b->gu_mx),
              PS__W(b->gu_mx_scale), PS__W(b->down_x.scale), PS__W(b->down_x.q));
}

static ps_status define_forward(block *b, uint32_t flags) {
  const ps_model_config *c = &b->m->cfg;
  ps__layer_def *d = b->d;
  const ps__args_attention attention = attention_args(b->m, flags);
  ps__args_qkv split;
  PS_TRY(qkv_args(&split, b->m, flags, b->names->norm_offset));
  define_normed(b, b->pre1, b->x, b->w_norm1, b->qkv_x, false);
  ps__product_forward(b->m, d, &b->qkv_p, b->qkv_x, b->qkv, 0, c->qkv_bias ? b->b_qkv : PS__NONE,
                      PS__NONE);
  adapt_shared(b, b->qkv_x.stored, qkv_parts(b, b->qkv));
  PS__FWD(d, ps__k_qkv_split_fwd, split, PS__R(b->qkv), PS__B(PS__BATCH_POSITION), PS__W(b->q),
          PS__W(b->kv), PS__SYM_IF(c->qk_norm, PS__P(b->w_qnorm)),
          PS__SYM_IF(c->qk_norm, PS__P(b->w_knorm)));
  PS__FWD(d, ps__k_attention_fwd, attention, PS__R(b->q), PS__PRE_R(b->kv),
          PS__B(PS__BATCH_DOC_START), PS__W(b->o), PS__W(b->lse));
  if (b->fp8)
    ps__quantize_x(b->m, d, b->o_x, b->a, false);
  define_projection(b, &b->o_p, b->o_x, O, b->post1, b->po, b->w_post1, b->x, b->h);
  define_normed(b, b->pre2, b->h, b->w_norm2, b->gu_x, false);
  ps__product_forward(b->m, d, &b->gu_p, b->gu_x, b->gu, 0, PS__NONE, PS__NONE);
  adapt_shared(b, b->gu_x.stored, gate_up_parts(b, b->gu));
  define_gate(b);
  define_projection(b, &b->down_p, b->down_x, DOWN, b->post2, b->py, b->w_post2, b->h, b->y);
  return PS_OK;
}

/* The gradient of a half's product, from that of the residual stream: through the post norm where
 * there is one. */
static void define_post_backward(block *b, bool post, uint8_t normed, uint16_t w_post,
                                 const ps__product *p, ps__operand dy) {
  const ps__args_rmsnorm norm = ps__norm_args(b->m, b->names);
  if (post)
    PS__BWD(b->d, ps__k_rmsnorm_bwd, norm, PS__R(normed), PS__P(w_post), PS__R(b->dy),
            PS__W(b->dpost), PS__G(w_post));
  if (p->fp8)
    ps__quantize_dy(b->m, b->d, dy, p->n_out);
}

/* The gradients of adapters that share an output, and what they add to @dx. */
static void adapt_shared_backward(block *b, uint8_t x, shared dy, uint8_t dx) {
  for (uint32_t i = 0; i < dy.n; i++) {
    const ps__adapter *a = &b->lora[dy.part[i].target];
    ps__lora_input_grad(b->m, b->d, a, columns_of(&dy, i), 1, dx);
    ps__lora_weight_grads(b->m, b->d, a, columns_of(&dy, i), 1, x);
  }
}

/* dY += the gradient of a half's input: grad W, through the norm where there is one. */
static void define_pre_backward(block *b, bool pre, shared grad, const ps__product *p,
                                ps__operand dy, uint8_t dnorm, uint8_t normed, uint8_t in,
                                uint16_t w_norm) {
  ps__args_rmsnorm norm = ps__norm_args(b->m, b->names);
  norm.add_dx = true;
  ps__product_dx(b->m, b->d, p, dy, pre ? dnorm : b->dy, 0, !pre);
  adapt_shared_backward(b, pre ? normed : in, grad, pre ? dnorm : b->dy);
  if (!pre)
    return;
  PS__BWD(b->d, ps__k_rmsnorm_bwd, norm, PS__R(in), PS__P(w_norm), PS__R(dnorm), PS__RW(b->dy),
          PS__G(w_norm));
}

/* From ds and gu to gu's gradient, and s anew: in place, or quantized. */
static void define_gate_backward(block *b) {
  const ps__args_glu glu = {.ffn_dim = b->f, .dt = b->m->dt, .activation = b->m->cfg.activation};
  const ps__args_glu_quantize q = {.ffn_dim = glu.ffn_dim,
                                   .dt = glu.dt,
                                   .activation = glu.activation,
                                   .dt_q = PS__E5M2,
                                   .count = b->gu_dy.count,
                                   .mx = b->mx};
  if (b->down_fp8) {
    PS__BWD(b->d, ps__k_glu_bwd_quantize, q, PS__R(b->ds), PS__R(b->mx ? b->gu_mx : b->gu),
            PS__SYM_IF(b->mx, PS__R(b->gu_mx_scale)), PS__W(b->gu_dy.scale), PS__W(b->gu_dy.q),
            PS__W(b->gu_dy.qt), PS__W(b->down_x.scale_t), PS__W(b->down_x.qt),
            PS__SYM_IF(q.count, PS__FLUSHED));
    return;
  }
  PS__BWD(b->d, ps__k_glu_bwd, glu, PS__RW(b->ds), PS__RW(b->gu)); /* leaves s in ds */
  if (b->fp8)
    ps__quantize_dy(b->m, b->d, b->gu_dy, 2 * b->f);
}

static void define_mlp_backward(block *b) {
  ps__layer_def *d = b->d;
  const float scale = b->m->cfg.residual_scale;
  const ps__columns dy = whole(b, b->down_dy.stored);
  ps__operand s = b->down_x;
  s.stored = b->ds;
  define_post_backward(b, b->post2, b->py, b->w_post2, &b->down_p, b->down_dy);
  ps__product_dx(b->m, d, &b->down_p, b->down_dy, b->ds, scale, false);
  ps__lora_input_grad(b->m, d, &b->lora[DOWN], dy, scale, b->ds);
  define_gate_backward(b);
  ps__lora_weight_grads_late(b->m, d, &b->lora[DOWN], dy, scale, b->ds);
  ps__product_dw(b->m, d, &b->down_p, b->down_dy, s, scale);
  define_normed(b, b->pre2, b->h, b->w_norm2, b->gu_x, true);
  ps__product_dw(b->m, d, &b->gu_p, b->gu_dy, b->gu_x, 0);
  define_pre_backward(b, b->pre2, gate_up_parts(b, b->gu), &b->gu_p, b->gu_dy, b->dn2, b->n2, b->h,
                      b->w_norm2);
}

static ps_status define_attention_backward(block *b, uint32_t flags) {
  const ps_model_config *c = &b->m->cfg;
  const uint32_t qkv = b->a + 2 * b->k;
  ps__layer_def *d = b->d;
  const ps__args_attention attention = attention_args(b->m, flags);
  const ps__args_colsum bias = {.cols = qkv, .ld = qkv, .dt = b->m->dt};
  const float scale = c->residual_scale;
  const ps__columns dy = whole(b, b->o_dy.stored);
  ps__args_qkv split;
  PS_TRY(qkv_args(&split, b->m, flags, b->names->norm_offset));
  define_post_backward(b, b->post1, b->po, b->w_post1, &b->o_p, b->o_dy);
  if (b->fp8)
    ps__quantize_x(b->m, d, b->o_x, b->a, true);
  ps__product_dw(b->m, d, &b->o_p, b->o_dy, b->o_x, scale);
  ps__product_dx(b->m, d, &b->o_p, b->o_dy, b->dout, scale, false);
  ps__lora_input_grad(b->m, d, &b->lora[O], dy, scale, b->dout);
  ps__lora_weight_grads(b->m, d, &b->lora[O], dy, scale, b->o);
  PS__BWD(d, ps__k_attention_bwd, attention, PS__R(b->q), PS__PRE_R(b->kv),
          PS__B(PS__BATCH_DOC_START), PS__R(b->o), PS__R(b->lse), PS__R(b->dout), PS__W(b->dq),
          PS__PRE_W(b->dkv));
  if (c->qk_norm)
    PS__BWD(d, ps__k_qkv_split_bwd, split, PS__R(b->dq), PS__R(b->dkv), PS__B(PS__BATCH_POSITION),
            PS__W(b->dqkv), PS__R(b->qkv), PS__P(b->w_qnorm), PS__P(b->w_knorm), PS__G(b->w_qnorm),
            PS__G(b->w_knorm));
  else
    PS__BWD(d, ps__k_qkv_split_bwd, split, PS__R(b->dq), PS__R(b->dkv), PS__B(PS__BATCH_POSITION),
            PS__W(b->dqkv));
  if (c->qkv_bias)
    PS__BWD(d, ps__k_colsum, bias, PS__R(b->dqkv), PS__G(b->b_qkv));
  if (b->fp8)
    ps__quantize_dy(b->m, d, b->qkv_dy, qkv);
  define_normed(b, b->pre1, b->x, b->w_norm1, b->qkv_x, true);
  ps__product_dw(b->m, d, &b->qkv_p, b->qkv_dy, b->qkv_x, 0);
  define_pre_backward(b, b->pre1, qkv_parts(b, b->dqkv), &b->qkv_p, b->qkv_dy, b->dn1, b->n1, b->x,
                      b->w_norm1);
  return PS_OK;
}

/* Norms' outputs are read in the backward pass although they are never saved: the step builder puts
 * the forward op that makes a missing tensor in front of its first use. */
static ps_status describe_block(ps_model *m, const ps__decoder *names, uint32_t flags, bool fp8,
                                ps__layer_def **out) {
  const ps_model_config *c = &m->cfg;
  block b = {.m = m,
             .names = names,
             .dim = c->dim,
             .a = c->n_heads * c->head_dim,
             .k = c->n_kv_heads * c->head_dim,
             .f = c->ffn_dim,
             .fp8 = fp8,
             .down_fp8 = fp8 && !m->fp8.bf16_down,
             .mx = fp8 && m->fp8.saved_gate_up,
             .pre1 = names->attention_norm,
             .post1 = names->attention_post_norm,
             .pre2 = names->mlp_norm,
             .post2 = names->mlp_post_norm};
  PS_TRY(ps__model_add_def(m, &b.d));
  ps__def_unit(b.d, ps__base_is_frozen(m));
  define_params(&b);
  PS_TRY(define_adapters(&b));
  define_tensors(&b);
  define_products(&b);
  define_counted(&b);
  define_saved(&b);
  PS_TRY(define_forward(&b, flags));
  define_mlp_backward(&b);
  PS_TRY(define_attention_backward(&b, flags));
  *out = b.d;
  return PS_OK;
}

/* ---- embedding, model ------------------------------------------------------------------------ */

static ps_status describe_embedding(ps_model *m, const ps__decoder *names) {
  const ps_model_config *c = &m->cfg;
  float scale = c->embedding_scale, stored;
  if (names->rounds_embedding_scale) { /* to the dtype of activations */
    ps__convert(&stored, m->dt, &scale, PS_F32, 1);
    ps__convert(&scale, PS_F32, &stored, m->dt, 1);
  }
  const ps__args_embed args = {
      .vocab = c->vocab_size, .dim = c->dim, .dt = m->dt, .scale = scale, .pad = c->pad_token_id};
  ps__layer_def *d;
  PS_TRY(ps__model_add_def(m, &d));
  ps__def_unit(d, ps__base_is_frozen(m));
  const uint8_t y = ps__def_tensor(d, "y", PS__ROWS_TOKEN, c->dim, m->dt),
                dy = ps__def_tensor(d, "dy", PS__ROWS_TOKEN, c->dim, m->dt);
  const uint16_t table =
      ps__def_param(d, "embed_tokens.weight", PS_PARAM_MATRIX, c->vocab_size, c->dim);
  d->output = y;
  d->grad = dy;
  PS__FWD(d, ps__k_embed_fwd, args, PS__B(PS__BATCH_TOKENS), PS__P(table), PS__W(y));
  PS__BWD(d, ps__k_embed_bwd, args, PS__B(PS__BATCH_TOKENS), PS__R(dy), PS__G(table));
  return ps__model_add_layer(m, d, "model.");
}

ps_status ps__describe_decoder(ps_model *m, const ps__decoder *names) {
  ps__layer_def *kind[2][2][PS_LAYER_FLAGS + 1] = {{{NULL}}}; /* frozen or not; FP8 or not */
  PS_TRY(describe_embedding(m, names));
  for (uint32_t l = 0; l < m->cfg.n_layers; l++) {
    const uint32_t flags = m->cfg.layer_flags[l];
    const bool fp8 = ps__fp8_block(&m->fp8, l, m->cfg.n_layers);
    ps__layer_def **def = &kind[ps__is_frozen(m)][fp8][flags];
    char prefix[32];
    snprintf(prefix, sizeof prefix, "model.layers.%u.", l);
    if (!*def)
      PS_TRY(describe_block(m, names, flags, fp8, def));
    PS_TRY(ps__model_add_layer(m, *def, prefix));
  }
  return ps__describe_head(m, names);
}
