/* per_layer.c - per-layer embeddings as the last part of a block. Products are in bf16 in FP8
 * recipes: they are small. p / sqrt(2) is a factor of the product after it. */
#include "model/per_layer.h"
#include "core/core.h"
#include <math.h>

static const float HALF = 0.70710678f; /* 1 / sqrt(2) */

void ps__per_layer_begin(ps__block *b, ps__per_layer *t) {
  *t = (ps__per_layer){.names = b->decoder->per_layer,
                       .e = b->decoder->per_layer ? b->m->cfg.per_layer_dim : 0,
                       .first = b->flags & PS__BLOCK_FIRST,
                       .last = b->flags & PS__BLOCK_LAST};
}

/* A matrix of the residual stream's or of the table's; tables stay plain under a quantized base. */
static uint16_t matrix(ps__block *b, const char *name, const char *what, uint64_t rows,
                       uint64_t cols) {
  const uint16_t span = ps__def_param(b->d, name, PS_PARAM_MATRIX, rows, cols);
  ps__def_what(b->d, what);
  return span;
}

void ps__per_layer_params(ps__block *b, ps__per_layer *t) {
  const ps__per_layer_names *n = t->names;
  if (!t->e)
    return;
  ps__def_base(b->d, 0);
  ps__def_unit(b->d, ps__base_is_frozen(b->m));
  t->w_in = matrix(b, n->in, "per-layer gate", t->e, b->dim);
  t->w_out = matrix(b, n->out, "per-layer out", b->dim, t->e);
  ps__def_init(b->d, 0, 0.02 / sqrt(2.0 * b->m->cfg.n_layers));
  t->w_post = ps__def_param(b->d, n->post, PS_PARAM_NORM, b->dim, 0);
  ps__def_what(b->d, "per-layer norms");
  t->w_context = matrix(b, n->context, "per-layer context", t->e, b->dim);
  t->w_table = matrix(b, n->table, "per-layer table", b->m->cfg.per_layer_vocab, t->e);
  if (t->first) {
    t->w_norm = ps__def_param(b->d, n->norm, PS_PARAM_NORM, t->e, 0);
    ps__def_what(b->d, "per-layer norms");
  }
}

static uint8_t tokens(ps__block *b, const char *name, uint64_t cols) {
  return ps__def_tensor(b->d, name, PS__ROWS_TOKEN, cols, b->m->dt);
}

static uint8_t carried(ps__block *b, const char *name, ps__row_kind rows, uint64_t cols,
                       ps__carried as) {
  const uint8_t t = ps__def_tensor(b->d, name, rows, cols, b->m->dt);
  ps__def_carried(b->d, t, as);
  return t;
}

uint8_t ps__per_layer_tensors(ps__block *b, ps__per_layer *t, uint8_t in) {
  if (!t->e)
    return in;
  t->in = in;
  t->x0 = carried(b, "x0", PS__ROWS_TOKEN, b->dim, PS__CARRIED_X0);
  t->dx0 = carried(b, "dx0", PS__ROWS_TOKEN, b->dim, PS__CARRIED_DX0);
  t->weights = carried(b, "per_layer_norm", PS__ROWS_ONE, t->e, PS__CARRIED_NORM);
  t->dweights = carried(b, "dper_layer_norm", PS__ROWS_ONE, t->e, PS__CARRIED_DNORM);
  t->context = tokens(b, "context", t->e);
  t->rows = tokens(b, "rows", t->e);
  t->p = tokens(b, "per_layer", t->e);
  t->gate = tokens(b, "per_layer_gate", t->e);
  t->gp = tokens(b, "gate_per_layer", 2ull * t->e);
  t->s = tokens(b, "gated_per_layer", t->e);
  t->z = tokens(b, "per_layer_out", b->dim);
  t->dz = tokens(b, "dper_layer_out", b->dim);
  t->ds = tokens(b, "dgated_per_layer", t->e);
  t->dgate = tokens(b, "dper_layer_gate", t->e);
  t->dp = tokens(b, "dper_layer", t->e);
  t->dcontext = tokens(b, "dcontext", t->e);
  return t->to = tokens(b, "y", b->dim);
}

/* ---- ops ------------------------------------------------------------------------------------- */

static ps__product product(uint16_t w, uint32_t n_out, uint32_t n_in) {
  return (ps__product){.n_out = n_out, .n_in = n_in, .w = w};
}
static ps__operand plain(uint8_t tensor) { return (ps__operand){.stored = tensor}; }

static ps__args_embed embed_args(const ps__block *b, const ps__per_layer *t) {
  float scale = sqrtf((float)t->e), stored;
  ps__convert(&stored, b->m->dt, &scale, PS_F32, 1); /* as transformers rounds it */
  ps__convert(&scale, PS_F32, &stored, b->m->dt, 1);
  return (ps__args_embed){.vocab = b->m->cfg.per_layer_vocab,
                          .dim = t->e,
                          .dt = b->m->dt,
                          .scale = scale,
                          .pad = b->m->cfg.pad_token_id};
}
static ps__args_rmsnorm norm_args(const ps__block *b, const ps__per_layer *t) {
  ps__args_rmsnorm a = b->norm;
  a.cols = t->e;
  return a;
}
static ps__args_heads pair_args(const ps__block *b, const ps__per_layer *t) {
  return (ps__args_heads){.n_groups = 1, .width = {t->e, t->e}, .n_first = 1, .dt = b->m->dt};
}
static ps__args_glu gate_args(const ps__block *b, const ps__per_layer *t) {
  return (ps__args_glu){.ffn_dim = t->e, .dt = b->m->dt, .activation = b->m->cfg.activation};
}
static float context_scale(const ps__block *b) { return 1.0f / sqrtf((float)b->dim); }

/* The first block gives x0 and the norm's weights to all, itself among them. */
static void define_shared(const ps__block *b, const ps__per_layer *t) {
  const ps__args_heads rows = {.n_groups = 1, .width = {b->dim}, .n_first = 1, .dt = b->m->dt};
  const ps__args_fill weights = {t->e * ps_dtype_bytes(b->m->dt)};
  PS__FWD(b->d, ps__k_heads_split, rows, PS__R((uint8_t)b->d->input), PS__W(t->x0));
  PS__FWD(b->d, ps__k_copy_bytes, weights, PS__P(t->w_norm), PS__W(t->weights));
}

void ps__per_layer_forward(const ps__block *b, const ps__per_layer *t) {
  const ps_model *m = b->m;
  ps__layer_def *d = b->d;
  const ps__product context = product(t->w_context, t->e, b->dim),
                    in = product(t->w_in, t->e, b->dim), out = product(t->w_out, b->dim, t->e);
  ps__args_rmsnorm norm = t->e ? norm_args(b, t) : b->norm, post = b->norm;
  norm.has_residual = post.has_residual = true;
  if (!t->e)
    return;
  const ps__args_embed embed = embed_args(b, t);
  const ps__args_heads pair = pair_args(b, t);
  const ps__args_glu gate = gate_args(b, t);
  if (t->first)
    define_shared(b, t);
  ps__product_forward(m, d, &context, plain(t->x0), t->context, context_scale(b), PS__NONE,
                      PS__NONE);
  PS__FWD(d, ps__k_embed_fwd, embed, PS__B(PS__BATCH_TOKENS), PS__P(t->w_table), PS__W(t->rows));
  PS__FWD(d, ps__k_rmsnorm_fwd, norm, PS__R(t->context), PS__R(t->weights), PS__W(t->p),
          PS__R(t->rows));
  ps__product_forward(m, d, &in, plain(t->in), t->gate, 0, PS__NONE, PS__NONE);
  PS__FWD(d, ps__k_heads_join, pair, PS__R(t->gate), PS__R(t->p), PS__W(t->gp));
  PS__FWD(d, ps__k_glu_fwd, gate, PS__R(t->gp), PS__W(t->s));
  ps__product_forward(m, d, &out, plain(t->s), t->z, HALF, PS__NONE, PS__NONE);
  PS__FWD(d, ps__k_rmsnorm_fwd, post, PS__R(t->z), PS__P(t->w_post), PS__W(t->to), PS__R(t->in));
}

/* From dp to the table, the context's matrix, x0 and the norm's weights. */
static void define_context_backward(const ps__block *b, const ps__per_layer *t) {
  const ps_model *m = b->m;
  ps__layer_def *d = b->d;
  const ps__product context = product(t->w_context, t->e, b->dim);
  const ps__args_embed embed = embed_args(b, t);
  const ps__args_rmsnorm norm = norm_args(b, t);
  PS__BWD(d, ps__k_embed_bwd, embed, PS__B(PS__BATCH_TOKENS), PS__R(t->dp), PS__G(t->w_table));
  PS__BWD(d, ps__k_rmsnorm_bwd, norm, PS__R(t->context), PS__R(t->weights), PS__R(t->dp),
          PS__W(t->dcontext), PS__W(t->dweights));
  ps__product_dw(m, d, &context, plain(t->dcontext), plain(t->x0), context_scale(b));
  ps__product_dx(m, d, &context, plain(t->dcontext), t->dx0, context_scale(b), !t->last);
}

void ps__per_layer_backward(const ps__block *b, const ps__per_layer *t) {
  const ps_model *m = b->m;
  ps__layer_def *d = b->d;
  const ps__product in = product(t->w_in, t->e, b->dim), out = product(t->w_out, b->dim, t->e);
  if (!t->e)
    return;
  const ps__args_glu gate = gate_args(b, t);
  const ps__args_heads pair = pair_args(b, t);
  PS__BWD(d, ps__k_rmsnorm_bwd, b->norm, PS__R(t->z), PS__P(t->w_post), PS__R(b->dy), PS__W(t->dz),
          PS__G(t->w_post));
  ps__product_dx(m, d, &out, plain(t->dz), t->ds, HALF, false);
  PS__BWD(d, ps__k_glu_bwd, gate, PS__RW(t->ds), PS__RW(t->gp)); /* leaves s in ds */
  ps__product_dw(m, d, &out, plain(t->dz), plain(t->ds), HALF);
  PS__BWD(d, ps__k_heads_split, pair, PS__R(t->gp), PS__W(t->dgate), PS__W(t->dp));
  ps__product_dw(m, d, &in, plain(t->dgate), plain(t->in), 0);
  ps__product_dx(m, d, &in, plain(t->dgate), b->dy, 0, true);
  if (!ps__base_is_frozen(m)) /* else p is constant */
    define_context_backward(b, t);
}

/* x0 is the first block's input. */
void ps__per_layer_end(const ps__block *b, const ps__per_layer *t) {
  const ps__args_accumulate add = {.n = b->dim, .dt = b->m->dt};
  const ps__args_colsum weights = {.rows = 1, .cols = t->e, .ld = t->e, .dt = b->m->dt};
  if (!t->e || !t->first || ps__base_is_frozen(b->m))
    return;
  PS__BWD(b->d, ps__k_accumulate, add, PS__R(t->dx0), PS__RW(b->dy));
  PS__BWD(b->d, ps__k_colsum, weights, PS__R(t->dweights), PS__G(t->w_norm));
}
