/* attention.c - attention as a half of a block.
 *
 *   q|k|v = x W_qkv + b,  o = attention(rope(norm(q)), rope(norm(k)), v),  y = o W_o
 *
 * Without keys and values of its own the product is q alone, and kv is what another block carries
 * here (ps__def_carried()); its gradient, too, is added to what the others give.
 *
 * Biases, sinks and the norms of q, k and v are there where the config has them. With shared_keys v
 * is the norm of k's columns, and the product is q|k. With a gate W_q has one beside q, head by
 * head, and y = (o sigmoid(gate)) W_o. */
#include "model/attention.h"
#include "core/core.h"
#include "model/block.h"
#include "model/rope.h"

/* T tokens, A heads x head_dim, K kv_heads x head_dim, of the layer. */
typedef struct attention {
  uint32_t a, k, n_qkv; /* n_qkv: A+2K, with shared keys A+K */
  uint32_t n_q, n_all;  /* columns of W_q: A, with a gate 2A; of the whole product */
  bool shared_keys, gated;
  bool own_kv; /* k, v and their norms */
  ps__args_attention args;
  ps__args_qkv split;
  ps__args_heads heads; /* with a gate */
  ps__args_sigmoid_gate gate_args;
  uint8_t all;   /* [T,n_all]  fused product, which has the gate; without one qkv */
  uint8_t gate;  /* [T,A] */
  uint8_t og;    /* [T,A]      o times the gate's sigmoid; without one o */
  uint8_t qkv;   /* [T,n_qkv] */
  uint8_t q;     /* [T,A]      after RoPE (and QK-norm) */
  uint8_t kv;    /* [group,2K] keys and values after RoPE */
  uint8_t o;     /* [T,A]      attention output */
  uint8_t lse;   /* [T,heads]  fp32 log-sum-exp */
  uint8_t dog;   /* [T,A]      gradient of og; without a gate dout */
  uint8_t dout;  /* [T,A] */
  uint8_t dgate; /* [T,A] */
  uint8_t dq;    /* [T,A] */
  uint8_t dkv;   /* [group,2K] fp32; the chunks of the group add to it */
  uint8_t dqkv;  /* [T,n_qkv] */
  uint8_t dall;  /* [T,n_all] */
  uint16_t w_qkv, b_qkv, w_qnorm, w_knorm, w_o, sinks;
  ps__product qkv_p, o_p;
  ps__operand o_x, qkv_dy, o_dy;
} attention;

const ps__attention_names ps__attention_usual = {.q = "self_attn.q_proj.weight",
                                                 .k = "self_attn.k_proj.weight",
                                                 .v = "self_attn.v_proj.weight",
                                                 .q_bias = "self_attn.q_proj.bias",
                                                 .k_bias = "self_attn.k_proj.bias",
                                                 .v_bias = "self_attn.v_proj.bias",
                                                 .q_norm = "self_attn.q_norm.weight",
                                                 .k_norm = "self_attn.k_norm.weight",
                                                 .o = "self_attn.o_proj.weight",
                                                 .o_bias = "self_attn.o_proj.bias",
                                                 .sinks = "self_attn.sinks"};

/* ---- arguments, but for what a chunk decides (ps__op_info.bind) ------------------------------ */

static ps__args_attention attention_args(const ps_model *m, uint32_t flags) {
  return (ps__args_attention){.n_heads = m->cfg.n_heads,
                              .n_kv_heads = ps__layer_kv_heads(&m->cfg, flags),
                              .head_dim = ps__layer_head_dim(&m->cfg, flags),
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
    rope = (ps_rope){.rotary_dim = c->global_head_dim ? 0 : c->rope.rotary_dim,
                     .theta = c->local_rope_theta};
  if (!rope.rotary_dim)
    rope.rotary_dim = ps__layer_head_dim(c, flags);
  if (flags & PS_LAYER_NO_ROPE)
    rope.rotary_dim = 0;
  *out = (ps__args_qkv){.n_heads = c->n_heads,
                        .n_kv_heads = flags & PS_LAYER_SHARED_KV ? 0 : ps__layer_kv_heads(c, flags),
                        .head_dim = ps__layer_head_dim(c, flags),
                        .dt = m->dt,
                        .qk_norm = c->qk_norm,
                        .eps = c->norm_eps,
                        .norm_offset = offset,
                        .interleaved = c->interleaved_rope,
                        .position_original = c->position_beta > 0 ? c->rope.original_positions : 0,
                        .position_beta = (float)c->position_beta,
                        .whole_head = rope.kind == PS_ROPE_PROPORTIONAL,
                        .value_norm = c->value_norm,
                        .shared_keys = ps__layer_shares_keys(c, flags)};
  return ps__rope_table(out, &rope, c->max_positions, m->seq_len);
}

static ps_status begin(ps__half *h) {
  const ps_model_config *c = &h->b->m->cfg;
  attention *t = h->own;
  if (c->o_bias && c->residual_scale != 0.0f && c->residual_scale != 1.0f)
    return ps__fail(PS_EINVAL, "o_bias in a model with a residual_multiplier of %g: it must be 1",
                    (double)c->residual_scale);
  t->args = attention_args(h->b->m, h->b->flags);
  t->a = c->n_heads * t->args.head_dim;
  t->k = t->args.n_kv_heads * t->args.head_dim;
  t->own_kv = !(h->b->flags & PS_LAYER_SHARED_KV);
  t->shared_keys = ps__layer_shares_keys(c, h->b->flags);
  t->n_qkv = t->a + (!t->own_kv ? 0 : t->shared_keys ? 1 : 2) * t->k;
  t->gated = c->attention_gate;
  t->n_q = t->gated ? 2 * t->a : t->a;
  t->n_all = t->n_qkv - t->a + t->n_q;
  t->heads = (ps__args_heads){.n_groups = c->n_heads,
                              .width = {t->args.head_dim, t->args.head_dim},
                              .n_first = 1,
                              .tail = t->n_qkv - t->a,
                              .dt = h->b->m->dt};
  t->gate_args = (ps__args_sigmoid_gate){.cols = t->a, .n_gates = t->a, .dt = h->b->m->dt};
  return qkv_args(&t->split, h->b->m, h->b->flags, h->b->decoder->norm_offset);
}

/* ---- what there is --------------------------------------------------------------------------- */

static void define_params(ps__half *h) {
  attention *t = h->own;
  const ps__attention_names *n = h->use->names;
  const ps_model_config *c = &h->b->m->cfg;
  const bool row_norm = c->qk_norm == PS_QK_NORM_ROW;
  const uint32_t dim = h->b->dim;
  ps__layer_def *d = h->b->d;
  t->w_qkv = ps__def_param(d, n->q, PS_PARAM_MATRIX, n->k ? t->n_q : t->n_all, dim);
  ps__def_what(d, "qkv");
  if (n->k && t->own_kv) {
    ps__def_param_after(d, n->k, PS_PARAM_MATRIX, t->k, dim);
    if (!t->shared_keys)
      ps__def_param_after(d, n->v, PS_PARAM_MATRIX, t->k, dim);
  }
  if (c->qkv_bias) {
    t->b_qkv = ps__def_param(d, n->q_bias, PS_PARAM_BIAS, t->a, 0);
    ps__def_what(d, "qkv bias");
    ps__def_param_after(d, n->k_bias, PS_PARAM_BIAS, t->k, 0);
    ps__def_param_after(d, n->v_bias, PS_PARAM_BIAS, t->k, 0);
  }
  if (c->qk_norm) {
    t->w_qnorm = ps__half_norm(h, n->q_norm, "q and k norm", row_norm ? t->a : t->args.head_dim);
    if (t->own_kv)
      t->w_knorm = ps__half_norm(h, n->k_norm, "q and k norm", row_norm ? t->k : t->args.head_dim);
  }
  t->w_o = ps__half_residual(h, n->o, "o", t->a);
  h->has_bias = c->o_bias;
  if (c->o_bias) {
    h->b_out = ps__def_param(d, n->o_bias, PS_PARAM_BIAS, dim, 0);
    ps__def_what(d, "o bias");
  }
  if (c->attention_sinks) {
    t->sinks = ps__def_param(d, n->sinks, PS_PARAM_BIAS, c->n_heads, 0);
    ps__def_what(d, "sinks");
    ps__def_init(d, 0, 0.02);
  }
}

/* Phi-3 has q, k, v as one target. */
static void define_sites(ps__half *h) {
  const attention *t = h->own;
  const ps__attention_names *n = h->use->names;
  if (n->k) {
    ps__half_x_site(h, PS__TARGET_Q, t->n_q);
    if (t->own_kv)
      ps__half_x_site(h, PS__TARGET_K, t->k);
    if (t->own_kv && !t->shared_keys)
      ps__half_x_site(h, PS__TARGET_V, t->k);
  } else {
    ps__half_x_site(h, PS__TARGET_QKV, t->n_all);
  }
  ps__half_site(h, PS__TARGET_O, h->b->dim, t->a);
}

static void define_gate_tensors(ps__half *h) {
  attention *t = h->own;
  t->all = t->gated ? ps__half_tokens(h, "qkv_gate", t->n_all) : t->qkv;
  t->gate = t->gated ? ps__half_tokens(h, "gate", t->a) : 0;
  t->og = t->gated ? ps__half_tokens(h, "gated", t->a) : t->o;
  t->dog = t->gated ? ps__half_tokens(h, "dgated", t->a) : t->dout;
  t->dgate = t->gated ? ps__half_tokens(h, "dgate", t->a) : 0;
  t->dall = t->gated ? ps__half_tokens(h, "dqkv_gate", t->n_all) : t->dqkv;
}

static void define_tensors(ps__half *h) {
  attention *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  t->qkv = ps__half_tokens(h, "qkv", t->n_qkv);
  t->q = ps__half_tokens(h, "q", t->a);
  t->kv = ps__def_tensor(d, "kv", PS__ROWS_GROUP, 2 * t->k, b->m->dt);
  t->o = ps__half_tokens(h, "attn_out", t->a);
  t->lse = ps__def_tensor(d, "lse", PS__ROWS_TOKEN, b->m->cfg.n_heads, PS_F32);
  t->dout = ps__half_tokens(h, "dattn_out", t->a);
  t->dq = ps__half_tokens(h, "dq", t->a);
  t->dkv = ps__def_tensor(d, "dkv", PS__ROWS_GROUP, 2 * t->k, PS_F32);
  t->dqkv = ps__half_tokens(h, "dqkv", t->n_qkv);
  if (b->flags & (PS_LAYER_SHARED_KV | PS__BLOCK_GIVES_KV)) {
    const bool global = b->flags & PS_LAYER_GLOBAL;
    ps__def_carried(d, t->kv, global ? PS__CARRIED_KV_GLOBAL : PS__CARRIED_KV);
    ps__def_carried(d, t->dkv, global ? PS__CARRIED_DKV_GLOBAL : PS__CARRIED_DKV);
  }
  define_gate_tensors(h);
  t->qkv_p = ps__def_product(d, t->w_qkv, t->n_all, b->dim, h->fp8);
  t->o_p = ps__def_product(d, t->w_o, b->dim, t->a, h->fp8);
  t->o_x = ps__def_x(d, t->og, t->a, h->fp8);
  t->qkv_dy = ps__def_dy(d, t->dall, t->n_all, h->fp8);
  t->o_dy = ps__def_dy(d, h->dy, b->dim, h->fp8);
}

static void define_counted(ps__half *h, bool of_gradients) {
  attention *t = h->own;
  ps__layer_def *d = h->b->d;
  if (of_gradients) {
    t->qkv_dy.count = ps__def_counted(d, t->qkv_dy.qt, "the gradient of q, k and v");
    t->o_dy.count = ps__def_counted(d, t->o_dy.qt, "the gradient of o's output");
  } else {
    h->x.count = ps__def_counted(d, h->x.qt, "the input of q, k and v");
    t->o_x.count = ps__def_counted(d, t->o_x.qt, "the output of attention");
  }
}

/* Without QK-norm q and kv come from one product, so that one without the other saves nothing; with
 * it, they come from qkv, which the norms' backward passes read too. */
static void define_saved(ps__half *h) {
  const attention *t = h->own;
  ps__layer_def *d = h->b->d;
  if (h->b->m->cfg.qk_norm || t->gated) {
    ps__def_saved(d, t->all, "qkv", PS__RANK_QKV);
  } else {
    ps__def_saved(d, t->q, "q", PS__RANK_QKV);
    ps__def_saved(d, t->kv, "kv", PS__RANK_QKV);
  }
  ps__def_saved(d, t->o, "attn_out", PS__RANK_ATTENTION);
  ps__def_saved(d, t->lse, "attn_out", PS__RANK_ATTENTION);
}

static ps__args_sink sink_args(const ps__half *h) {
  const ps_model *m = h->b->m;
  return (ps__args_sink){.n_heads = m->cfg.n_heads, .head_dim = m->cfg.head_dim, .dt = m->dt};
}

/* ---- ops ------------------------------------------------------------------------------------- */

/* The columns of q, k and v in @tensor, which has n_all. */
static ps__shared qkv_parts(const ps__half *h, uint8_t tensor) {
  const attention *t = h->own;
  const ps__adapter *lora = h->b->lora;
  return (ps__shared){tensor,
                      t->n_all,
                      4,
                      {{&lora[PS__TARGET_Q], 0},
                       {&lora[PS__TARGET_K], t->n_q},
                       {&lora[PS__TARGET_V], t->n_q + t->k},
                       {&lora[PS__TARGET_QKV], 0}}};
}

static void define_forward(ps__half *h) {
  const attention *t = h->own;
  const ps__block *b = h->b;
  const ps_model_config *c = &b->m->cfg;
  ps__layer_def *d = b->d;
  const ps__shared parts = qkv_parts(h, t->all);
  ps__half_input(h, false);
  ps__product_forward(b->m, d, &t->qkv_p, h->x, t->all, 0, c->qkv_bias ? t->b_qkv : PS__NONE,
                      PS__NONE);
  ps__lora_forward_shared(b->m, d, h->x.stored, &parts);
  if (t->gated)
    PS__FWD(d, ps__k_heads_split, t->heads, PS__R(t->all), PS__W(t->qkv), PS__W(t->gate));
  PS__FWD(d, ps__k_qkv_split_fwd, t->split, PS__R(t->qkv), PS__B(PS__BATCH_POSITION), PS__W(t->q),
          PS__SYM_IF(t->own_kv, PS__W(t->kv)), PS__SYM_IF(c->qk_norm, PS__P(t->w_qnorm)),
          PS__SYM_IF(c->qk_norm && t->own_kv, PS__P(t->w_knorm)));
  PS__FWD(d, ps__k_attention_fwd, t->args, PS__R(t->q), PS__PRE_R(t->kv),
          PS__B(PS__BATCH_DOC_START), PS__W(t->o), PS__W(t->lse));
  if (c->attention_sinks) {
    const ps__args_sink sink = sink_args(h);
    PS__FWD(d, ps__k_attention_sink, sink, PS__RW(t->o), PS__RW(t->lse), PS__P(t->sinks));
  }
  if (t->gated)
    PS__FWD(d, ps__k_sigmoid_gate_fwd, t->gate_args, PS__R(t->o), PS__R(t->gate), PS__W(t->og));
  if (h->fp8)
    ps__quantize_x(b->m, d, t->o_x, t->a, false);
  ps__half_project(h, &t->o_p, t->o_x, PS__TARGET_O);
}

/* From dy to dout, and dgate. */
static void define_o_backward(ps__half *h) {
  const attention *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  const float scale = b->m->cfg.residual_scale;
  const ps__columns dy = ps__half_dy_columns(h);
  const ps__adapter *lora = &b->lora[PS__TARGET_O];
  if (h->fp8) {
    ps__quantize_dy(b->m, d, t->o_dy, b->dim);
    ps__quantize_x(b->m, d, t->o_x, t->a, true);
  }
  const ps__args_colsum bias = {.cols = b->dim, .ld = b->dim, .dt = b->m->dt};
  if (h->has_bias)
    PS__BWD(d, ps__k_colsum, bias, PS__R(h->dy), PS__G(h->b_out));
  ps__product_dw(b->m, d, &t->o_p, t->o_dy, t->o_x, scale);
  ps__product_dx(b->m, d, &t->o_p, t->o_dy, t->dog, scale, false);
  ps__lora_input_grad(b->m, d, lora, dy, scale, t->dog);
  ps__lora_weight_grads(b->m, d, lora, dy, scale, t->og);
  if (t->gated)
    PS__BWD(d, ps__k_sigmoid_gate_bwd, t->gate_args, PS__R(t->o), PS__R(t->gate), PS__R(t->dog),
            PS__W(t->dout), PS__W(t->dgate));
}

static void define_backward(ps__half *h) {
  const attention *t = h->own;
  const ps__block *b = h->b;
  const ps_model_config *c = &b->m->cfg;
  ps__layer_def *d = b->d;
  const ps__args_colsum bias = {.cols = t->n_qkv, .ld = t->n_qkv, .dt = b->m->dt};
  const ps__shared parts = qkv_parts(h, t->dall);
  define_o_backward(h);
  if (c->attention_sinks) {
    const ps__args_sink sink = sink_args(h);
    PS__BWD(d, ps__k_attention_sink_bwd, sink, PS__R(t->o), PS__R(t->lse), PS__R(t->dout),
            PS__P(t->sinks), PS__G(t->sinks));
  }
  PS__BWD(d, ps__k_attention_bwd, t->args, PS__R(t->q), PS__PRE_R(t->kv),
          PS__B(PS__BATCH_DOC_START), PS__R(t->o), PS__R(t->lse), PS__R(t->dout), PS__W(t->dq),
          PS__PRE_W(t->dkv));
  if (c->qk_norm)
    PS__BWD(d, ps__k_qkv_split_bwd, t->split, PS__R(t->dq), PS__SYM_IF(t->own_kv, PS__R(t->dkv)),
            PS__B(PS__BATCH_POSITION), PS__W(t->dqkv), PS__R(t->qkv), PS__P(t->w_qnorm),
            PS__SYM_IF(t->own_kv, PS__P(t->w_knorm)), PS__G(t->w_qnorm),
            PS__SYM_IF(t->own_kv, PS__G(t->w_knorm)));
  else
    PS__BWD(d, ps__k_qkv_split_bwd, t->split, PS__R(t->dq), PS__R(t->dkv),
            PS__B(PS__BATCH_POSITION), PS__W(t->dqkv));
  if (c->qkv_bias)
    PS__BWD(d, ps__k_colsum, bias, PS__R(t->dqkv), PS__G(t->b_qkv));
  if (t->gated)
    PS__BWD(d, ps__k_heads_join, t->heads, PS__R(t->dqkv), PS__R(t->dgate), PS__W(t->dall));
  if (h->fp8)
    ps__quantize_dy(b->m, d, t->qkv_dy, t->n_all);
  ps__half_input(h, true);
  ps__product_dw(b->m, d, &t->qkv_p, t->qkv_dy, h->x, 0);
  ps__product_dx(b->m, d, &t->qkv_p, t->qkv_dy, h->dx, 0, h->adds_dx);
  ps__lora_backward_shared(b->m, d, h->x.stored, &parts, h->dx);
}

const ps__half_kind ps__attention = {.norm = "attention norm",
                                     .post_norm = "attention post norm",
                                     .out = "attn_proj",
                                     .out_rank = PS__RANK_ATTENTION_OUT,
                                     .own_bytes = sizeof(attention),
                                     PS__HALF_FUNCTIONS,
                                     .counted = define_counted};
