/* mla.c - multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as a half of a block.
 *
 *   c_q = x W_qa,  q = norm(c_q) W_qb    or  q = x W_q
 *   c|k_r = x W_kva,  k_n|v = norm(c) W_kvb
 *   o = attention(q_n|rope(q_r), k_n|rope(k_r), v),  y = o W_o
 *
 * k_r is one head's, which all heads share. What is saved first is c_q and c: keys and values are
 * many times as wide, and cost a product of few columns to make again. Values are padded to the
 * width of keys, so attention has one width; o is cut before W_o. */
#include "model/mla.h"
#include "core/core.h"
#include "model/block.h"
#include "model/rope.h"

/* T tokens, H heads of d = dn + dr, values of dv; r_q and r_kv ranks. */
typedef struct mla {
  uint32_t h, d, dn, dr, dv, r_q, r_kv;
  ps__args_attention args;
  ps__args_mla heads, back; /* back: of mla_turn in the backward pass */
  ps__args_rmsnorm q_norm, kv_norm;
  uint8_t cq;        /* [T,r_q]       with r_q */
  uint8_t nq;        /* [T,r_q]       its norm */
  uint8_t xq;        /* [T,H d]       before RoPE */
  uint8_t c, nc;     /* [T,r_kv]      the latent, its norm */
  uint8_t kr;        /* [T,dr]        before RoPE */
  uint8_t kvb;       /* [T,H (dn+dv)] */
  uint8_t q;         /* [T,H d] */
  uint8_t kv;        /* [group,2 H d] keys and padded values */
  uint8_t o, lse;    /* [T,H d], [T,H] fp32 */
  uint8_t oc;        /* [T,H dv]      o without padding; o where dv is d */
  uint8_t doc, dout; /* gradients of oc and o */
  uint8_t dq, dkv;   /* [T,H d], [group,2 H d] fp32 */
  uint8_t dxq, dkvb, dkr;
  uint8_t dnq, dcq, dnc, dc;
  uint16_t w_q, w_qa, w_qnorm, w_qb, w_c, w_kr, w_kvnorm, w_kvb, w_o;
  ps__product q_p, qa_p, qb_p, c_p, kr_p, kvb_p, o_p;
  ps__operand nq_x, nc_x, oc_x;                          /* of nq, nc, oc */
  ps__operand xq_dy, cq_dy, c_dy, kr_dy, kvb_dy, out_dy; /* of dxq, dcq, dc, dkr, dkvb, dy */
} mla;

const ps__mla_names ps__mla_usual = {.q = "self_attn.q_proj.weight",
                                     .q_a = "self_attn.q_a_proj.weight",
                                     .q_norm = "self_attn.q_a_layernorm.weight",
                                     .q_b = "self_attn.q_b_proj.weight",
                                     .kv_a = "self_attn.kv_a_proj_with_mqa.weight",
                                     .kv_norm = "self_attn.kv_a_layernorm.weight",
                                     .kv_b = "self_attn.kv_b_proj.weight",
                                     .o = "self_attn.o_proj.weight"};

/* Latents' norms have an eps of their own, whatever rms_norm_eps says. */
static ps__args_rmsnorm norm_of(const ps__half *h, uint32_t cols) {
  return (ps__args_rmsnorm){
      .cols = cols, .dt = h->b->m->dt, .eps = 1e-6f, .weight_offset = h->b->decoder->norm_offset};
}

static ps_status heads_args(mla *t, const ps_model *m) {
  const ps_model_config *c = &m->cfg;
  ps__args_qkv rope = {0};
  PS_TRY(ps__rope_table(&rope, &c->rope, c->max_positions, m->seq_len));
  t->heads = (ps__args_mla){.n_heads = t->h,
                            .nope_dim = t->dn,
                            .rotary_dim = t->dr,
                            .value_dim = t->dv,
                            .dt = m->dt,
                            .interleaved = c->interleaved_rope,
                            .attention_factor = rope.attention_factor};
  for (int i = 0; i < PS_ROPE_PAIRS; i++)
    t->heads.inv_freq[i] = rope.inv_freq[i];
  t->back = t->heads;
  t->back.inverse = 1;
  return PS_OK;
}

static ps_status begin(ps__half *h) {
  mla *t = h->own;
  const ps_model *m = h->b->m;
  const ps_model_config *c = &m->cfg;
  t->h = c->n_heads;
  t->d = c->head_dim;
  t->dr = c->rope.rotary_dim;
  t->dn = t->d - t->dr;
  t->dv = c->value_dim;
  t->r_q = c->q_rank;
  t->r_kv = c->kv_rank;
  if ((uint64_t)t->r_kv * h->b->dim % PS__SPAN_ALIGN)
    return ps__fail(PS_EINVAL,
                    "kv_lora_rank x hidden_size is %u x %u: the product must be a multiple of %d",
                    t->r_kv, h->b->dim, PS__SPAN_ALIGN);
  const ps_lora *lora = &m->lora;
  if (lora->targets != PS_LORA_ALL && lora->targets & PS_LORA_KV_A_PROJ &&
      (uint64_t)t->r_kv * lora->rank % PS__SPAN_ALIGN)
    return ps__fail(PS_EINVAL,
                    "kv_lora_rank x %s is %u x %u: for target kv_a_proj_with_mqa the product must "
                    "be a multiple of %d",
                    ps__field("lora.rank"), t->r_kv, lora->rank, PS__SPAN_ALIGN);
  t->args = (ps__args_attention){.n_heads = t->h,
                                 .n_kv_heads = t->h,
                                 .head_dim = t->d,
                                 .dt = m->dt,
                                 .sequence_rows = (uint32_t)m->seq_len,
                                 .scale = c->attention_scale,
                                 .value_dim = t->dv};
  t->q_norm = norm_of(h, t->r_q);
  t->kv_norm = norm_of(h, t->r_kv);
  return heads_args(t, m);
}

/* ---- what there is --------------------------------------------------------------------------- */

static uint16_t matrix(ps__layer_def *d, const char *name, const char *what, uint32_t n_out,
                       uint32_t n_in) {
  const uint16_t span = ps__def_param(d, name, PS_PARAM_MATRIX, n_out, n_in);
  ps__def_what(d, what);
  return span;
}

static void define_params(ps__half *h) {
  mla *t = h->own;
  const ps__mla_names *n = h->use->names;
  const uint32_t dim = h->b->dim;
  ps__layer_def *d = h->b->d;
  if (t->r_q) {
    t->w_qa = matrix(d, n->q_a, "q_a", t->r_q, dim);
    t->w_qnorm = ps__half_norm(h, n->q_norm, "latents' norm", t->r_q);
    t->w_qb = matrix(d, n->q_b, "q_b", t->h * t->d, t->r_q);
  } else {
    t->w_q = matrix(d, n->q, "q", t->h * t->d, dim);
  }
  t->w_c = matrix(d, n->kv_a, "kv_a", t->r_kv + t->dr, dim);
  t->w_kr = ps__def_split(d, (uint64_t)t->r_kv * dim);
  t->w_kvnorm = ps__half_norm(h, n->kv_norm, "latents' norm", t->r_kv);
  t->w_kvb = matrix(d, n->kv_b, "kv_b", t->h * (t->dn + t->dv), t->r_kv);
  t->w_o = ps__half_residual(h, n->o, "o", t->h * t->dv);
}

static void define_sites(ps__half *h) {
  const mla *t = h->own;
  if (t->r_q) {
    ps__half_x_site(h, PS__TARGET_Q_A, t->r_q);
    ps__half_site(h, PS__TARGET_Q_B, t->h * t->d, t->r_q);
  } else {
    ps__half_x_site(h, PS__TARGET_Q, t->h * t->d);
  }
  ps__half_x_site_cut(h, PS__TARGET_KV_A, t->r_kv + t->dr, t->r_kv);
  ps__half_site(h, PS__TARGET_KV_B, t->h * (t->dn + t->dv), t->r_kv);
  ps__half_site(h, PS__TARGET_O, h->b->dim, t->h * t->dv);
}

static void define_products(ps__half *h) {
  mla *t = h->own;
  const uint32_t dim = h->b->dim;
  ps__layer_def *d = h->b->d;
  if (t->r_q) {
    t->qa_p = ps__def_product(d, t->w_qa, t->r_q, dim, h->fp8);
    t->qb_p = ps__def_product(d, t->w_qb, t->h * t->d, t->r_q, h->fp8);
    t->nq_x = ps__def_x(d, t->nq, t->r_q, h->fp8);
    t->cq_dy = ps__def_dy(d, t->dcq, t->r_q, h->fp8);
  } else {
    t->q_p = ps__def_product(d, t->w_q, t->h * t->d, dim, h->fp8);
  }
  t->c_p = ps__def_product(d, t->w_c, t->r_kv, dim, h->fp8);
  t->kr_p = ps__def_product(d, t->w_kr, t->dr, dim, h->fp8);
  t->kvb_p = ps__def_product(d, t->w_kvb, t->h * (t->dn + t->dv), t->r_kv, h->fp8);
  t->o_p = ps__def_product(d, t->w_o, dim, t->h * t->dv, h->fp8);
  t->nc_x = ps__def_x(d, t->nc, t->r_kv, h->fp8);
  t->oc_x = ps__def_x(d, t->oc, t->h * t->dv, h->fp8);
  t->xq_dy = ps__def_dy(d, t->dxq, t->h * t->d, h->fp8);
  t->c_dy = ps__def_dy(d, t->dc, t->r_kv, h->fp8);
  t->kr_dy = ps__def_dy(d, t->dkr, t->dr, h->fp8);
  t->kvb_dy = ps__def_dy(d, t->dkvb, t->h * (t->dn + t->dv), h->fp8);
  t->out_dy = ps__def_dy(d, h->dy, dim, h->fp8);
}

static void define_tensors(ps__half *h) {
  mla *t = h->own;
  const ps__block *b = h->b;
  const uint32_t hd = t->h * t->d, expanded = t->h * (t->dn + t->dv);
  ps__layer_def *d = b->d;
  if (t->r_q) {
    t->cq = ps__half_tokens(h, "q_latent", t->r_q);
    t->nq = ps__half_tokens(h, "q_latent_norm", t->r_q);
    t->dnq = ps__half_tokens(h, "dq_latent_norm", t->r_q);
    t->dcq = ps__half_tokens(h, "dq_latent", t->r_q);
  }
  t->xq = ps__half_tokens(h, "q_raw", hd);
  t->c = ps__half_tokens(h, "latent", t->r_kv);
  t->nc = ps__half_tokens(h, "latent_norm", t->r_kv);
  t->kr = ps__half_tokens(h, "k_rope", t->dr);
  t->kvb = ps__half_tokens(h, "kv_raw", expanded);
  t->q = ps__half_tokens(h, "q", hd);
  t->kv = ps__def_tensor(d, "kv", PS__ROWS_GROUP, 2 * (uint64_t)hd, b->m->dt);
  t->o = ps__half_tokens(h, "attn_out", hd);
  t->lse = ps__def_tensor(d, "lse", PS__ROWS_TOKEN, t->h, PS_F32);
  t->dout = ps__half_tokens(h, "dattn_out", hd);
  t->oc = t->dv < t->d ? ps__half_tokens(h, "attn_values", t->h * t->dv) : t->o;
  t->doc = t->dv < t->d ? ps__half_tokens(h, "dattn_values", t->h * t->dv) : t->dout;
  t->dq = ps__half_tokens(h, "dq", hd);
  t->dkv = ps__def_tensor(d, "dkv", PS__ROWS_GROUP, 2 * (uint64_t)hd, PS_F32);
  t->dxq = ps__half_tokens(h, "dq_raw", hd);
  t->dkvb = ps__half_tokens(h, "dkv_raw", expanded);
  t->dkr = ps__half_tokens(h, "dk_rope", t->dr);
  t->dnc = ps__half_tokens(h, "dlatent_norm", t->r_kv);
  t->dc = ps__half_tokens(h, "dlatent", t->r_kv);
  define_products(h);
}

static void define_counted(ps__half *h, bool of_gradients) {
  mla *t = h->own;
  ps__layer_def *d = h->b->d;
  if (!of_gradients) {
    h->x.count = ps__def_counted(d, h->x.qt, "the input of the latents");
    if (t->r_q)
      t->nq_x.count = ps__def_counted(d, t->nq_x.qt, "q's latent");
    t->nc_x.count = ps__def_counted(d, t->nc_x.qt, "the latent of k and v");
    t->oc_x.count = ps__def_counted(d, t->oc_x.qt, "the output of attention");
    return;
  }
  t->xq_dy.count = ps__def_counted(d, t->xq_dy.qt, "the gradient of q");
  if (t->r_q)
    t->cq_dy.count = ps__def_counted(d, t->cq_dy.qt, "the gradient of q's latent");
  t->c_dy.count = ps__def_counted(d, t->c_dy.qt, "the gradient of the latent of k and v");
  t->kr_dy.count = ps__def_counted(d, t->kr_dy.qt, "the gradient of k's rotated part");
  t->kvb_dy.count = ps__def_counted(d, t->kvb_dy.qt, "the gradient of k and v");
  t->out_dy.count = ps__def_counted(d, t->out_dy.qt, "the gradient of o's output");
}

/* kr is made again with kv: its product is small, and nothing else of the backward pass reads
 * it. */
static void define_saved(ps__half *h) {
  const mla *t = h->own;
  ps__layer_def *d = h->b->d;
  ps__def_saved(d, t->c, "latent", PS__RANK_QKV);
  if (t->r_q)
    ps__def_saved(d, t->cq, "latent", PS__RANK_QKV);
  ps__def_saved(d, t->q, "q", t->r_q ? PS__RANK_EXPANDED : PS__RANK_QKV);
  ps__def_saved(d, t->kv, "kv", PS__RANK_EXPANDED);
  ps__def_saved(d, t->o, "attn_out", PS__RANK_ATTENTION);
  ps__def_saved(d, t->lse, "attn_out", PS__RANK_ATTENTION);
}

/* ---- ops ------------------------------------------------------------------------------------- */

/* The forms of an X or a dY in which FP8 products read it. */
static void quantize_x(const ps__half *h, ps__operand x, uint32_t cols, bool backward) {
  if (h->fp8)
    ps__quantize_x(h->b->m, h->b->d, x, cols, backward);
}

static void quantize_dy(const ps__half *h, ps__operand dy, uint32_t cols) {
  if (h->fp8)
    ps__quantize_dy(h->b->m, h->b->d, dy, cols);
}

/* Of a tensor of @cols columns. */
static ps__columns all(uint8_t tensor, uint32_t cols) { return (ps__columns){tensor, cols, 0}; }

static void forward(const ps__half *h, const ps__product *p, ps__operand x, uint8_t y) {
  ps__product_forward(h->b->m, h->b->d, p, x, y, 0, PS__NONE, PS__NONE);
}

/* A product that target @i adapts. */
static void forward_adapted(const ps__half *h, const ps__product *p, uint32_t i, ps__operand x,
                            uint8_t y) {
  forward(h, p, x, y);
  ps__lora_forward(h->b->m, h->b->d, &h->b->lora[i], x.stored, all(y, p->n_out), 0);
}

static void define_forward(ps__half *h) {
  const mla *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  ps__half_input(h, false);
  if (t->r_q) {
    forward_adapted(h, &t->qa_p, PS__TARGET_Q_A, h->x, t->cq);
    PS__FWD(d, ps__k_rmsnorm_fwd, t->q_norm, PS__R(t->cq), PS__P(t->w_qnorm), PS__W(t->nq));
    quantize_x(h, t->nq_x, t->r_q, false);
    forward_adapted(h, &t->qb_p, PS__TARGET_Q_B, t->nq_x, t->xq);
  } else {
    forward_adapted(h, &t->q_p, PS__TARGET_Q, h->x, t->xq);
  }
  PS__FWD(d, ps__k_mla_turn, t->heads, PS__R(t->xq), PS__B(PS__BATCH_POSITION), PS__W(t->q));
  forward(h, &t->c_p, h->x, t->c);
  forward(h, &t->kr_p, h->x, t->kr);
  ps__lora_forward_cut(b->m, d, &b->lora[PS__TARGET_KV_A], h->x.stored, all(t->c, t->r_kv),
                       all(t->kr, t->dr));
  PS__FWD(d, ps__k_rmsnorm_fwd, t->kv_norm, PS__R(t->c), PS__P(t->w_kvnorm), PS__W(t->nc));
  quantize_x(h, t->nc_x, t->r_kv, false);
  forward_adapted(h, &t->kvb_p, PS__TARGET_KV_B, t->nc_x, t->kvb);
  PS__FWD(d, ps__k_mla_kv_fwd, t->heads, PS__R(t->kvb), PS__R(t->kr), PS__B(PS__BATCH_POSITION),
          PS__W(t->kv));
  PS__FWD(d, ps__k_attention_fwd, t->args, PS__R(t->q), PS__PRE_R(t->kv),
          PS__B(PS__BATCH_DOC_START), PS__W(t->o), PS__W(t->lse));
  if (t->oc != t->o)
    PS__FWD(d, ps__k_mla_cut, t->heads, PS__R(t->o), PS__W(t->oc));
  quantize_x(h, t->oc_x, t->o_p.n_in, false);
  ps__half_project(h, &t->o_p, t->oc_x, PS__TARGET_O);
}

/* From dy to dout. */
static void define_o_backward(const ps__half *h) {
  const mla *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  const float scale = b->m->cfg.residual_scale;
  const ps__columns dy = ps__half_dy_columns(h);
  const ps__adapter *lora = &b->lora[PS__TARGET_O];
  quantize_dy(h, t->out_dy, b->dim);
  quantize_x(h, t->oc_x, t->o_p.n_in, true);
  ps__product_dw(b->m, d, &t->o_p, t->out_dy, t->oc_x, scale);
  ps__product_dx(b->m, d, &t->o_p, t->out_dy, t->doc, scale, false);
  ps__lora_input_grad(b->m, d, lora, dy, scale, t->doc);
  ps__lora_weight_grads(b->m, d, lora, dy, scale, t->oc);
  if (t->oc != t->o)
    PS__BWD(d, ps__k_mla_pad, t->heads, PS__R(t->doc), PS__W(t->dout));
}

/* A product that target @i adapts: dW, and dx, to which it adds where @adds. */
static void backward_adapted(const ps__half *h, const ps__product *p, uint32_t i, ps__operand dy,
                             ps__operand x, uint8_t dx, bool adds) {
  const ps__block *b = h->b;
  const ps__columns of = all(dy.stored, p->n_out);
  ps__product_dw(b->m, b->d, p, dy, x, 0);
  ps__product_dx(b->m, b->d, p, dy, dx, 0, adds);
  ps__lora_input_grad(b->m, b->d, &b->lora[i], of, 0, dx);
  ps__lora_weight_grads(b->m, b->d, &b->lora[i], of, 0, x.stored);
}

/* From the latents' gradients to dx. */
static void define_latent_backward(const ps__half *h) {
  const mla *t = h->own;
  const ps__block *b = h->b;
  const ps__product *cut[] = {&t->c_p, &t->kr_p};
  const ps__operand dy[] = {t->c_dy, t->kr_dy};
  for (int i = 0; i < 2; i++) {
    quantize_dy(h, dy[i], cut[i]->n_out);
    ps__product_dw(b->m, b->d, cut[i], dy[i], h->x, 0);
    ps__product_dx(b->m, b->d, cut[i], dy[i], h->dx, 0, true);
  }
  ps__lora_backward_cut(b->m, b->d, &b->lora[PS__TARGET_KV_A], h->x.stored, all(t->dc, t->r_kv),
                        all(t->dkr, t->dr), h->dx);
}

static void define_backward(ps__half *h) {
  const mla *t = h->own;
  const ps__block *b = h->b;
  ps__layer_def *d = b->d;
  define_o_backward(h);
  PS__BWD(d, ps__k_attention_bwd, t->args, PS__R(t->q), PS__PRE_R(t->kv),
          PS__B(PS__BATCH_DOC_START), PS__R(t->o), PS__R(t->lse), PS__R(t->dout), PS__W(t->dq),
          PS__PRE_W(t->dkv));
  PS__BWD(d, ps__k_mla_turn, t->back, PS__R(t->dq), PS__B(PS__BATCH_POSITION), PS__W(t->dxq));
  PS__BWD(d, ps__k_mla_kv_bwd, t->heads, PS__R(t->dkv), PS__B(PS__BATCH_POSITION), PS__W(t->dkvb),
          PS__W(t->dkr));
  quantize_dy(h, t->kvb_dy, t->kvb_p.n_out);
  quantize_x(h, t->nc_x, t->r_kv, true);
  backward_adapted(h, &t->kvb_p, PS__TARGET_KV_B, t->kvb_dy, t->nc_x, t->dnc, false);
  PS__BWD(d, ps__k_rmsnorm_bwd, t->kv_norm, PS__R(t->c), PS__P(t->w_kvnorm), PS__R(t->dnc),
          PS__W(t->dc), PS__G(t->w_kvnorm));
  quantize_dy(h, t->xq_dy, t->h * t->d);
  if (t->r_q) {
    quantize_x(h, t->nq_x, t->r_q, true);
    backward_adapted(h, &t->qb_p, PS__TARGET_Q_B, t->xq_dy, t->nq_x, t->dnq, false);
    PS__BWD(d, ps__k_rmsnorm_bwd, t->q_norm, PS__R(t->cq), PS__P(t->w_qnorm), PS__R(t->dnq),
            PS__W(t->dcq), PS__G(t->w_qnorm));
    quantize_dy(h, t->cq_dy, t->r_q);
  }
  ps__half_input(h, true);
  if (t->r_q)
    backward_adapted(h, &t->qa_p, PS__TARGET_Q_A, t->cq_dy, h->x, h->dx, h->adds_dx);
  else
    backward_adapted(h, &t->q_p, PS__TARGET_Q, t->xq_dy, h->x, h->dx, h->adds_dx);
  define_latent_backward(h);
}

const ps__half_kind ps__mla = {.norm = "attention norm",
                               .post_norm = "attention post norm",
                               .out = "attn_proj",
                               .out_rank = PS__RANK_ATTENTION_OUT,
                               .own_bytes = sizeof(mla),
                               PS__HALF_FUNCTIONS,
                               .counted = define_counted};
