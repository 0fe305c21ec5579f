/* block.c - the pre-norm decoder block of Llama, Qwen2 and Qwen3 as tables of ops. */
#include "model/block.h"
#include "model/rope.h"
#include "core/core.h"
#include <string.h>

const char *const ps__saved_name[PS__N_SAVED] = {"x", "qkv", "q", "kv", "attn_out", "h", "gate_up"};

enum {
  F_NORM1,
  F_QKV,
  F_SPLIT,
  F_ATTN,
  F_OPROJ,
  F_NORM2,
  F_GU,
  F_SWIGLU,
  F_DOWN,
  B_DWDOWN,
  B_DS,
  B_SWIGLU,
  B_DWGU,
  B_DN2,
  B_NORM2,
  B_DWO,
  B_DO,
  B_ATTN,
  B_SPLIT,
  B_BIAS,
  B_DWQKV,
  B_DN1,
  B_NORM1
};

#define T_R(id)   {PS__SYM_TENSOR, PS__T_##id, PS_READ}
#define T_W(id)   {PS__SYM_TENSOR, PS__T_##id, PS_WRITE}
#define T_RW(id)  {PS__SYM_TENSOR, PS__T_##id, PS_READ_WRITE}
#define PRE_R(id) {PS__SYM_PREFIX, PS__T_##id, PS_READ}
#define PRE_W(id) {PS__SYM_PREFIX, PS__T_##id, PS_WRITE}
#define P(id)     {PS__SYM_PARAM, PS__P_##id, PS_READ}
#define G(id)     {PS__SYM_GRAD, PS__P_##id, PS_WRITE}
#define DOC       {PS__SYM_DOC, 0, PS_READ}
#define POS       {PS__SYM_POS, 0, PS_READ}

static void add_op(ps__block_op *list, uint32_t *n, const ps_kernel *k, int what,
                   const ps__sym *sym, size_t n_syms) {
  ps__block_op *op = &list[(*n)++];
  op->kernel = k;
  op->what = (uint8_t)what;
  op->n_syms = (uint8_t)n_syms;
  memcpy(op->sym, sym, n_syms * sizeof *sym);
}
#define OP(list, n, kernel, what, ...)                                                             \
  do {                                                                                             \
    const ps__sym s_[] = {__VA_ARGS__};                                                            \
    add_op(list, n, &kernel, what, s_, sizeof s_ / sizeof *s_);                                    \
  } while (0)

static void build_forward(ps__block *b) {
  ps__block_op *f = b->fwd;
  uint32_t *n = &b->n_fwd;
  OP(f, n, ps__k_rmsnorm_fwd, F_NORM1, T_R(X), P(NORM1), T_W(N1));
  if (b->cfg.qkv_bias)
    OP(f, n, ps__k_gemm, F_QKV, T_R(N1), P(WQKV), T_W(QKV), P(BQKV));
  else
    OP(f, n, ps__k_gemm, F_QKV, T_R(N1), P(WQKV), T_W(QKV));
  if (b->cfg.qk_norm)
    OP(f, n, ps__k_qkv_split_fwd, F_SPLIT, T_R(QKV), POS, T_W(Q), T_W(KV), P(QNORM), P(KNORM));
  else
    OP(f, n, ps__k_qkv_split_fwd, F_SPLIT, T_R(QKV), POS, T_W(Q), T_W(KV));
  OP(f, n, ps__k_attention_fwd, F_ATTN, T_R(Q), PRE_R(KV), DOC, T_W(O), T_W(LSE));
  OP(f, n, ps__k_gemm, F_OPROJ, T_R(O), P(WO), T_W(H), T_R(X));
  OP(f, n, ps__k_rmsnorm_fwd, F_NORM2, T_R(H), P(NORM2), T_W(N2));
  OP(f, n, ps__k_gemm, F_GU, T_R(N2), P(WGU), T_W(GU));
  OP(f, n, ps__k_glu_fwd, F_SWIGLU, T_R(GU), T_W(S));
  OP(f, n, ps__k_gemm, F_DOWN, T_R(S), P(WDOWN), T_W(Y), T_R(H));
}

/* The norms' outputs are read here although they are never saved: the step builder puts the forward
 * op that makes a missing tensor in front of its first use. */
static void build_backward(ps__block *b) {
  ps__block_op *o = b->bwd;
  uint32_t *n = &b->n_bwd;
  OP(o, n, ps__k_gemm, B_DS, T_R(DY), P(WDOWN), T_W(DS));
  OP(o, n, ps__k_glu_bwd, B_SWIGLU, T_RW(DS), T_RW(GU)); /* leaves s in ds */
  OP(o, n, ps__k_gemm, B_DWDOWN, T_R(DY), T_R(DS), G(WDOWN));
  OP(o, n, ps__k_gemm, B_DWGU, T_R(GU), T_R(N2), G(WGU));
  OP(o, n, ps__k_gemm, B_DN2, T_R(GU), P(WGU), T_W(DN2));
  OP(o, n, ps__k_rmsnorm_bwd, B_NORM2, T_R(H), P(NORM2), T_R(DN2), T_RW(DY), G(NORM2));
  OP(o, n, ps__k_gemm, B_DWO, T_R(DY), T_R(O), G(WO));
  OP(o, n, ps__k_gemm, B_DO, T_R(DY), P(WO), T_W(DO));
  OP(o, n, ps__k_attention_bwd, B_ATTN, T_R(Q), PRE_R(KV), DOC, T_R(O), T_R(LSE), T_R(DO), T_W(DQ),
     PRE_W(DKV));
  if (b->cfg.qk_norm)
    OP(o, n, ps__k_qkv_split_bwd, B_SPLIT, T_R(DQ), T_R(DKV), POS, T_W(DQKV), T_R(QKV), P(QNORM),
       P(KNORM), G(QNORM), G(KNORM));
  else
    OP(o, n, ps__k_qkv_split_bwd, B_SPLIT, T_R(DQ), T_R(DKV), POS, T_W(DQKV));
  if (b->cfg.qkv_bias)
    OP(o, n, ps__k_colsum, B_BIAS, T_R(DQKV), G(BQKV));
  OP(o, n, ps__k_gemm, B_DWQKV, T_R(DQKV), T_R(N1), G(WQKV));
  OP(o, n, ps__k_gemm, B_DN1, T_R(DQKV), P(WQKV), T_W(DN1));
  OP(o, n, ps__k_rmsnorm_bwd, B_NORM1, T_R(X), P(NORM1), T_R(DN1), T_RW(DY), G(NORM1));
}

static void describe_tensors(ps__block *b) {
  const ps_model_config *c = &b->cfg;
  const uint64_t e = ps_dtype_bytes((ps_dtype)b->dt), a = (uint64_t)c->n_heads * c->head_dim,
                 k = (uint64_t)c->n_kv_heads * c->head_dim, d = c->dim, f = c->ffn_dim;
  const bool qk = c->qk_norm != 0;
  const ps__tensor_info t[PS__N_TENSORS] = {
      [PS__T_X] = {"x", d * e, false, PS__SAVED_X},
      [PS__T_N1] = {"norm1", d * e, false, -1},
      [PS__T_QKV] = {"qkv", (a + 2 * k) * e, false, qk ? PS__SAVED_QKV : -1},
      [PS__T_Q] = {"q", a * e, false, qk ? -1 : PS__SAVED_Q},
      [PS__T_KV] = {"kv", 2 * k * e, true, qk ? -1 : PS__SAVED_KV},
      [PS__T_O] = {"attn_out", a * e, false, PS__SAVED_O},
      [PS__T_LSE] = {"lse", 4ull * c->n_heads, false, PS__SAVED_O},
      [PS__T_H] = {"h", d * e, false, PS__SAVED_H},
      [PS__T_N2] = {"norm2", d * e, false, -1},
      [PS__T_GU] = {"gate_up", 2 * f * e, false, PS__SAVED_GU},
      [PS__T_S] = {"swiglu", f * e, false, -1},
      [PS__T_Y] = {"y", d * e, false, -1},
      [PS__T_DY] = {"dy", d * e, false, -1},
      [PS__T_DS] = {"dswiglu", f * e, false, -1},
      [PS__T_DN2] = {"dnorm2", d * e, false, -1},
      [PS__T_DO] = {"dattn_out", a * e, false, -1},
      [PS__T_DQ] = {"dq", a * e, false, -1},
      [PS__T_DKV] = {"dkv", 2 * k * 4, true, -1},
      [PS__T_DQKV] = {"dqkv", (a + 2 * k) * e, false, -1},
      [PS__T_DN1] = {"dnorm1", d * e, false, -1},
  };
  memcpy(b->tensor, t, sizeof t);
  for (int i = 0; i < PS__N_TENSORS; i++)
    if (t[i].saved >= 0) {
      b->has_saved[t[i].saved] = true;
      b->saved_row_bytes[t[i].saved] += t[i].row_bytes;
    }
}

/* A span begins at the tensor whose name ends in `first`; it has n elements. */
static bool find_span(const ps_model_config *cfg, const char *first, uint64_t n,
                      ps__span_info *out) {
  ps_param_info p;
  for (uint32_t i = 0; i < ps_model_n_params(cfg); i++) {
    if (ps_model_param(cfg, i, &p) != PS_OK || p.unit != 1)
      continue;
    const size_t len = strlen(p.name), want = strlen(first);
    if (len < want || strcmp(p.name + len - want, first) != 0)
      continue;
    out->offset = p.offset;
    out->n = n;
    return true;
  }
  return false;
}

/* What qkv_split's arguments are for every chunk. */
static ps_status describe_qkv(ps__block *b, uint64_t seq_len) {
  const ps_model_config *m = &b->cfg;
  const ps__rope rope = {.kind = m->rope_scaling,
                         .rotary_dim = m->head_dim,
                         .original_positions = m->rope_original_positions,
                         .max_positions = m->max_positions,
                         .theta = m->rope_theta,
                         .factor = (double)m->rope_factor,
                         .low_freq_factor = (double)m->rope_low_freq,
                         .high_freq_factor = (double)m->rope_high_freq};
  b->qkv = (ps__args_qkv){.n_heads = m->n_heads,
                          .n_kv_heads = m->n_kv_heads,
                          .head_dim = m->head_dim,
                          .dt = b->dt,
                          .qk_norm = m->qk_norm,
                          .eps = m->norm_eps};
  return ps__rope_table(&b->qkv, &rope, seq_len);
}

ps_status ps__block_init(ps__block *b, const ps_model_config *cfg, ps_dtype dt, uint64_t seq_len) {
  memset(b, 0, sizeof *b);
  b->cfg = *cfg;
  b->dt = dt;
  PS_TRY(describe_qkv(b, seq_len));
  describe_tensors(b);
  const uint64_t d = cfg->dim, a = (uint64_t)cfg->n_heads * cfg->head_dim,
                 k = (uint64_t)cfg->n_kv_heads * cfg->head_dim, f = cfg->ffn_dim;
  bool ok = find_span(cfg, ".input_layernorm.weight", d, &b->span[PS__P_NORM1]) &&
            find_span(cfg, ".q_proj.weight", (a + 2 * k) * d, &b->span[PS__P_WQKV]) &&
            find_span(cfg, ".o_proj.weight", d * a, &b->span[PS__P_WO]) &&
            find_span(cfg, ".post_attention_layernorm.weight", d, &b->span[PS__P_NORM2]) &&
            find_span(cfg, ".gate_proj.weight", 2 * f * d, &b->span[PS__P_WGU]) &&
            find_span(cfg, ".down_proj.weight", d * f, &b->span[PS__P_WDOWN]);
  if (cfg->qkv_bias)
    ok = ok && find_span(cfg, ".q_proj.bias", a + 2 * k, &b->span[PS__P_BQKV]);
  if (cfg->qk_norm)
    ok = ok && find_span(cfg, ".q_norm.weight", cfg->head_dim, &b->span[PS__P_QNORM]) &&
         find_span(cfg, ".k_norm.weight", cfg->head_dim, &b->span[PS__P_KNORM]);
  if (!ok)
    return ps__fail(PS_EINTERNAL, "the block's parameter table lacks a tensor that its ops need");
  build_forward(b);
  build_backward(b);
  return PS_OK;
}

ps__args_gemm ps__gemm_args(uint32_t m, uint32_t n, uint32_t k, bool trans_a, bool trans_b,
                            uint32_t dt) {
  return (ps__args_gemm){.m = m,
                         .n = n,
                         .k = k,
                         .lda = trans_a ? m : k,
                         .ldb = trans_b ? k : n,
                         .ldc = n,
                         .trans_a = trans_a,
                         .trans_b = trans_b,
                         .dt_a = (uint8_t)dt,
                         .dt_b = (uint8_t)dt,
                         .dt_c = (uint8_t)dt};
}

ps_work ps__gemm_work(const ps__args_gemm *g) {
  const double flops = 2.0 * g->m * g->n * g->k;
  const double bytes = (double)ps_dtype_bytes((ps_dtype)g->dt_a) *
                       ((double)g->m * g->k + (double)g->n * g->k + (double)g->m * g->n);
  return (ps_work){.flops = flops, .bytes = bytes, .model_flops = flops};
}

static uint32_t put_gemm(void *args, ps_work *work, ps__args_gemm g) {
  *work = ps__gemm_work(&g);
  memcpy(args, &g, sizeof g);
  return sizeof g;
}

static uint32_t put_qkv(const ps__block *b, const ps__chunk_shape *c, void *args, ps_work *work,
                        bool backward) {
  ps__args_qkv a = b->qkv;
  a.n_tokens = c->n_tokens;
  a.accumulate_dw = backward && !c->first_grad;
  *work =
      ps__bytes_work((double)c->n_tokens * b->tensor[PS__T_QKV].row_bytes * (backward ? 3.0 : 2.0));
  memcpy(args, &a, sizeof a);
  return sizeof a;
}

static uint32_t put_attention(const ps__block *b, const ps__chunk_shape *c, void *args,
                              ps_work *work, bool backward) {
  const ps_model_config *m = &b->cfg;
  const ps__args_attention a = {.n_tokens = c->n_tokens,
                                .row0 = c->row0,
                                .n_heads = m->n_heads,
                                .n_kv_heads = m->n_kv_heads,
                                .head_dim = m->head_dim,
                                .dt = b->dt,
                                .accumulate_dkv = backward && !c->first_dkv,
                                .document_rows = c->document_rows};
  const double width = (double)m->n_heads * m->head_dim;
  /* Forward: 2 products of 2 FLOP a pair and element. Backward: 5 products, of which the recomputed
   * scores are no model work. */
  work->flops = c->pairs * width * (backward ? 10.0 : 4.0);
  work->model_flops = c->pairs * width * (backward ? 8.0 : 4.0);
  work->bytes = (double)c->n_tokens * b->tensor[PS__T_Q].row_bytes * (backward ? 5.0 : 2.0);
  memcpy(args, &a, sizeof a);
  return sizeof a;
}

static uint32_t put_norm(const ps__block *b, const ps__chunk_shape *c, void *args, ps_work *work,
                         bool backward) {
  const ps__args_rmsnorm a = {.rows = c->n_tokens,
                              .cols = b->cfg.dim,
                              .dt = b->dt,
                              .accumulate_dw = backward && !c->first_grad,
                              .add_dx = backward,
                              .eps = b->cfg.norm_eps};
  *work =
      ps__bytes_work((double)c->n_tokens * b->tensor[PS__T_X].row_bytes * (backward ? 4.0 : 2.0));
  memcpy(args, &a, sizeof a);
  return sizeof a;
}

static uint32_t put_glu(const ps__block *b, const ps__chunk_shape *c, void *args, ps_work *work,
                        bool backward) {
  const ps__args_glu a = {.n_tokens = c->n_tokens, .ffn_dim = b->cfg.ffn_dim, .dt = b->dt};
  *work =
      ps__bytes_work((double)c->n_tokens * b->tensor[PS__T_S].row_bytes * (backward ? 6.0 : 3.0));
  memcpy(args, &a, sizeof a);
  return sizeof a;
}

uint32_t ps__block_op_args(const ps__block *b, const ps__block_op *op, const ps__chunk_shape *c,
                           void *args, ps_work *work) {
  const ps_model_config *m = &b->cfg;
  const uint32_t t = c->n_tokens, d = m->dim, a = m->n_heads * m->head_dim,
                 k = m->n_kv_heads * m->head_dim, f = m->ffn_dim;
  *work = (ps_work){0};
  ps__args_gemm g;
  switch (op->what) {
  case F_NORM1:
  case F_NORM2: return put_norm(b, c, args, work, false);
  case B_NORM1:
  case B_NORM2: return put_norm(b, c, args, work, true);
  case F_SPLIT: return put_qkv(b, c, args, work, false);
  case B_SPLIT: return put_qkv(b, c, args, work, true);
  case F_ATTN: return put_attention(b, c, args, work, false);
  case B_ATTN: return put_attention(b, c, args, work, true);
  case F_SWIGLU: return put_glu(b, c, args, work, false);
  case B_SWIGLU: return put_glu(b, c, args, work, true);
  case B_BIAS: {
    const ps__args_colsum s = {
        .rows = t, .cols = a + 2 * k, .ld = a + 2 * k, .dt = b->dt, .accumulate = !c->first_grad};
    *work = ps__bytes_work((double)t * b->tensor[PS__T_QKV].row_bytes);
    memcpy(args, &s, sizeof s);
    return sizeof s;
  }
  /* products with weights: Y = X W^T */
  case F_QKV:
    g = ps__gemm_args(t, a + 2 * k, d, false, true, b->dt);
    g.has_bias = m->qkv_bias != 0;
    break;
  case F_OPROJ:
    g = ps__gemm_args(t, d, a, false, true, b->dt);
    g.has_residual = 1;
    break;
  case F_GU: g = ps__gemm_args(t, 2 * f, d, false, true, b->dt); break;
  case F_DOWN:
    g = ps__gemm_args(t, d, f, false, true, b->dt);
    g.has_residual = 1;
    break;
  /* gradients of inputs: dX = dY W */
  case B_DS: g = ps__gemm_args(t, f, d, false, false, b->dt); break;
  case B_DN2: g = ps__gemm_args(t, d, 2 * f, false, false, b->dt); break;
  case B_DO: g = ps__gemm_args(t, a, d, false, false, b->dt); break;
  case B_DN1: g = ps__gemm_args(t, d, a + 2 * k, false, false, b->dt); break;
  /* gradients of weights: dW (+)= dY^T X */
  case B_DWDOWN:
    g = ps__gemm_args(d, f, t, true, false, b->dt);
    g.accumulate = !c->first_grad;
    break;
  case B_DWGU:
    g = ps__gemm_args(2 * f, d, t, true, false, b->dt);
    g.accumulate = !c->first_grad;
    break;
  case B_DWO:
    g = ps__gemm_args(d, a, t, true, false, b->dt);
    g.accumulate = !c->first_grad;
    break;
  /* B_DWQKV */
  default:
    g = ps__gemm_args(a + 2 * k, d, t, true, false, b->dt);
    g.accumulate = !c->first_grad;
    break;
  }
  return put_gemm(args, work, g);
}

uint32_t ps__block_recompute(const ps__block *b, uint32_t need, uint32_t have) {
  uint32_t ops = 0;
  need &= ~have;
  for (int i = (int)b->n_fwd - 1; i >= 0; i--) {
    const ps__block_op *op = &b->fwd[i];
    bool makes = false;
    for (int s = 0; s < op->n_syms; s++)
      makes |= op->sym[s].kind == PS__SYM_TENSOR && (op->sym[s].mode & PS_WRITE) &&
               (need >> op->sym[s].id & 1);
    if (!makes)
      continue;
    ops |= 1u << i;
    for (int s = 0; s < op->n_syms; s++)
      if (op->sym[s].kind <= PS__SYM_PREFIX && !(op->sym[s].mode & PS_WRITE))
        need |= 1u << op->sym[s].id & ~have;
  }
  return ops;
}

uint32_t ps__block_backward_needs(const ps__block *b) {
  uint32_t made = 1u << PS__T_X, reads = 0;
  for (uint32_t i = 0; i < b->n_fwd; i++)
    for (int s = 0; s < b->fwd[i].n_syms; s++)
      if (b->fwd[i].sym[s].kind == PS__SYM_TENSOR && (b->fwd[i].sym[s].mode & PS_WRITE))
        made |= 1u << b->fwd[i].sym[s].id;
  for (uint32_t i = 0; i < b->n_bwd; i++)
    for (int s = 0; s < b->bwd[i].n_syms; s++)
      if (b->bwd[i].sym[s].kind <= PS__SYM_PREFIX && (b->bwd[i].sym[s].mode & PS_READ))
        reads |= 1u << b->bwd[i].sym[s].id;
  return reads & made;
}
