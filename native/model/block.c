/* block.c - the pre-norm decoder block of Llama, Qwen2 and Qwen3 as tables of ops. */
#include "model/block.h"
#include "model/rope.h"
#include "core/core.h"
#include <string.h>

const char *const ps__saved_name[PS__N_SAVED] = {"x", "qkv", "q", "kv", "attn_out", "h", "gate_up"};

#define T_R(id)   {PS__SYM_TENSOR, PS__T_##id, PS_READ}
#define T_W(id)   {PS__SYM_TENSOR, PS__T_##id, PS_WRITE}
#define T_RW(id)  {PS__SYM_TENSOR, PS__T_##id, PS_READ_WRITE}
#define PRE_R(id) {PS__SYM_PREFIX, PS__T_##id, PS_READ}
#define PRE_W(id) {PS__SYM_PREFIX, PS__T_##id, PS_WRITE}
#define P(id)     {PS__SYM_PARAM, PS__P_##id, PS_READ}
#define G(id)     {PS__SYM_GRAD, PS__P_##id, PS_WRITE}
#define DOC       {PS__SYM_DOC, 0, PS_READ}
#define POS       {PS__SYM_POS, 0, PS_READ}

static void add_op(ps__block_op *list, uint32_t *n, const ps_kernel *k, const void *args,
                   size_t args_bytes, const ps__sym *sym, size_t n_syms) {
  ps__block_op *op = &list[(*n)++];
  op->kernel = k;
  op->n_syms = (uint8_t)n_syms;
  op->args_bytes = (uint16_t)args_bytes;
  memcpy(op->sym, sym, n_syms * sizeof *sym);
  memcpy(op->args, args, args_bytes);
}
#define OP(list, n, kernel, args, ...)                                                             \
  do {                                                                                             \
    const ps__sym s_[] = {__VA_ARGS__};                                                            \
    add_op(list, n, &kernel, &args, sizeof args, s_, sizeof s_ / sizeof *s_);                      \
  } while (0)

/* ---- arguments, but for what a chunk decides (ps__op_info.bind) ------------------------------ */

static ps__args_rmsnorm norm_args(const ps__block *b, bool backward) {
  return (ps__args_rmsnorm){
      .cols = b->cfg.dim, .dt = b->dt, .add_dx = backward, .eps = b->cfg.norm_eps};
}

static ps__args_attention attention_args(const ps__block *b, uint64_t seq_len) {
  return (ps__args_attention){.n_heads = b->cfg.n_heads,
                              .n_kv_heads = b->cfg.n_kv_heads,
                              .head_dim = b->cfg.head_dim,
                              .dt = b->dt,
                              .sequence_rows = (uint32_t)seq_len};
}

/* Y = X W^T, with a residual or a bias. */
static ps__args_gemm forward_args(const ps__block *b, uint32_t n, uint32_t k, bool residual,
                                  bool bias) {
  ps__args_gemm g = ps__gemm_args(0, n, k, false, true, b->dt);
  g.has_residual = residual;
  g.has_bias = bias;
  return g;
}

/* dX = dY W, with W[n_out, n_in]. */
static ps__args_gemm input_grad_args(const ps__block *b, uint32_t n_out, uint32_t n_in) {
  return ps__gemm_args(0, n_in, n_out, false, false, b->dt);
}

/* dW (+)= dY^T X. */
static ps__args_gemm weight_grad_args(const ps__block *b, uint32_t n_out, uint32_t n_in) {
  return ps__gemm_args(n_out, n_in, 0, true, false, b->dt);
}

static ps_status qkv_args(ps__args_qkv *out, const ps__block *b, uint64_t seq_len) {
  const ps_model_config *m = &b->cfg;
  ps_rope rope = m->rope;
  if (!rope.rotary_dim)
    rope.rotary_dim = m->head_dim;
  *out = (ps__args_qkv){.n_heads = m->n_heads,
                        .n_kv_heads = m->n_kv_heads,
                        .head_dim = m->head_dim,
                        .dt = b->dt,
                        .qk_norm = m->qk_norm,
                        .eps = m->norm_eps};
  return ps__rope_table(out, &rope, m->max_positions, seq_len);
}

/* ---- the ops --------------------------------------------------------------------------------- */

static ps_status build_forward(ps__block *b, uint64_t seq_len) {
  const ps_model_config *m = &b->cfg;
  const uint32_t d = m->dim, a = m->n_heads * m->head_dim, k = m->n_kv_heads * m->head_dim,
                 f = m->ffn_dim;
  ps__block_op *o = b->fwd;
  uint32_t *n = &b->n_fwd;
  const ps__args_rmsnorm norm = norm_args(b, false);
  const ps__args_attention attention = attention_args(b, seq_len);
  const ps__args_glu glu = {.ffn_dim = f, .dt = b->dt};
  const ps__args_gemm to_qkv = forward_args(b, a + 2 * k, d, false, m->qkv_bias),
                      to_h = forward_args(b, d, a, true, false),
                      to_gu = forward_args(b, 2 * f, d, false, false),
                      to_y = forward_args(b, d, f, true, false);
  ps__args_qkv split;
  PS_TRY(qkv_args(&split, b, seq_len));
  OP(o, n, ps__k_rmsnorm_fwd, norm, T_R(X), P(NORM1), T_W(N1));
  if (m->qkv_bias)
    OP(o, n, ps__k_gemm, to_qkv, T_R(N1), P(WQKV), T_W(QKV), P(BQKV));
  else
    OP(o, n, ps__k_gemm, to_qkv, T_R(N1), P(WQKV), T_W(QKV));
  if (m->qk_norm)
    OP(o, n, ps__k_qkv_split_fwd, split, T_R(QKV), POS, T_W(Q), T_W(KV), P(QNORM), P(KNORM));
  else
    OP(o, n, ps__k_qkv_split_fwd, split, T_R(QKV), POS, T_W(Q), T_W(KV));
  OP(o, n, ps__k_attention_fwd, attention, T_R(Q), PRE_R(KV), DOC, T_W(O), T_W(LSE));
  OP(o, n, ps__k_gemm, to_h, T_R(O), P(WO), T_W(H), T_R(X));
  OP(o, n, ps__k_rmsnorm_fwd, norm, T_R(H), P(NORM2), T_W(N2));
  OP(o, n, ps__k_gemm, to_gu, T_R(N2), P(WGU), T_W(GU));
  OP(o, n, ps__k_glu_fwd, glu, T_R(GU), T_W(S));
  OP(o, n, ps__k_gemm, to_y, T_R(S), P(WDOWN), T_W(Y), T_R(H));
  return PS_OK;
}

/* The norms' outputs are read here although they are never saved: the step builder puts the forward
 * op that makes a missing tensor in front of its first use. */
static ps_status build_backward(ps__block *b, uint64_t seq_len) {
  const ps_model_config *m = &b->cfg;
  const uint32_t d = m->dim, a = m->n_heads * m->head_dim, k = m->n_kv_heads * m->head_dim,
                 f = m->ffn_dim;
  ps__block_op *o = b->bwd;
  uint32_t *n = &b->n_bwd;
  const ps__args_rmsnorm norm = norm_args(b, true);
  const ps__args_attention attention = attention_args(b, seq_len);
  const ps__args_glu glu = {.ffn_dim = f, .dt = b->dt};
  const ps__args_colsum bias = {.cols = a + 2 * k, .ld = a + 2 * k, .dt = b->dt};
  const ps__args_gemm ds = input_grad_args(b, d, f), dn2 = input_grad_args(b, 2 * f, d),
                      dout = input_grad_args(b, d, a), dn1 = input_grad_args(b, a + 2 * k, d),
                      dw_down = weight_grad_args(b, d, f), dw_gu = weight_grad_args(b, 2 * f, d),
                      dwo = weight_grad_args(b, d, a), dw_qkv = weight_grad_args(b, a + 2 * k, d);
  ps__args_qkv split;
  PS_TRY(qkv_args(&split, b, seq_len));
  OP(o, n, ps__k_gemm, ds, T_R(DY), P(WDOWN), T_W(DS));
  OP(o, n, ps__k_glu_bwd, glu, T_RW(DS), T_RW(GU)); /* leaves s in ds */
  OP(o, n, ps__k_gemm, dw_down, T_R(DY), T_R(DS), G(WDOWN));
  OP(o, n, ps__k_gemm, dw_gu, T_R(GU), T_R(N2), G(WGU));
  OP(o, n, ps__k_gemm, dn2, T_R(GU), P(WGU), T_W(DN2));
  OP(o, n, ps__k_rmsnorm_bwd, norm, T_R(H), P(NORM2), T_R(DN2), T_RW(DY), G(NORM2));
  OP(o, n, ps__k_gemm, dwo, T_R(DY), T_R(O), G(WO));
  OP(o, n, ps__k_gemm, dout, T_R(DY), P(WO), T_W(DO));
  OP(o, n, ps__k_attention_bwd, attention, T_R(Q), PRE_R(KV), DOC, T_R(O), T_R(LSE), T_R(DO),
     T_W(DQ), PRE_W(DKV));
  if (m->qk_norm)
    OP(o, n, ps__k_qkv_split_bwd, split, T_R(DQ), T_R(DKV), POS, T_W(DQKV), T_R(QKV), P(QNORM),
       P(KNORM), G(QNORM), G(KNORM));
  else
    OP(o, n, ps__k_qkv_split_bwd, split, T_R(DQ), T_R(DKV), POS, T_W(DQKV));
  if (m->qkv_bias)
    OP(o, n, ps__k_colsum, bias, T_R(DQKV), G(BQKV));
  OP(o, n, ps__k_gemm, dw_qkv, T_R(DQKV), T_R(N1), G(WQKV));
  OP(o, n, ps__k_gemm, dn1, T_R(DQKV), P(WQKV), T_W(DN1));
  OP(o, n, ps__k_rmsnorm_bwd, norm, T_R(X), P(NORM1), T_R(DN1), T_RW(DY), G(NORM1));
  return PS_OK;
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

ps_status ps__block_init(ps__block *b, const ps_model_config *cfg, ps_dtype dt, uint64_t seq_len) {
  memset(b, 0, sizeof *b);
  b->cfg = *cfg;
  b->dt = dt;
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
  PS_TRY(build_forward(b, seq_len));
  return build_backward(b, seq_len);
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

void ps__block_op_args(const ps__block_op *op, const ps__chunk_shape *c, void *args) {
  memcpy(args, op->args, op->args_bytes);
  op->kernel->info->bind(args, c);
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
