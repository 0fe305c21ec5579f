/* head.c - the head as a layer definition: final norm, logits, loss, and their backward passes.
 *
 * The logits of all of a chunk's tokens would take more memory than anything else, so they are made
 * slice by slice. A slice's gradient overwrites the normed rows, whose last use it is.
 *
 * The gradient of a `score`'s columns, which stands in lm_head's place, has a tensor of its own,
 * because that of a pair is made of both documents' scores. A slice of pairs is a whole chunk.
 * With LoRA `score` is trained and saved with the adapters. A model for embeddings has no product:
 * its logits are the normed rows. */
#include "core/core.h"
#include "model/decoder.h"
#include "model/product.h"
#include <math.h>

/* A head under construction: T tokens, S of them in a slice, D dim, V vocab. */
typedef struct head {
  ps_model *m;
  ps__layer_def *d;
  uint32_t v, dim;
  bool forward_only; /* where no layer is trained nothing goes back: the loss is all that is asked
                      * for */
  bool frozen;       /* its weights have no gradient */
  float alpha;
  ps__args_cross_entropy loss;
  ps__args_score_loss score; /* problem 0: none */
  uint8_t x;                 /* [T,D]  the last block's output */
  uint8_t n1;                /* [T,D]  normed, then its gradient */
  uint8_t row_loss;          /* [T,columns] fp32 */
  uint8_t z;                 /* [S,V]  logits, then their gradient; scores */
  uint8_t gz;                /* [S,V]  the logits' gradient: z, but of scores */
  uint8_t dx;                /* [T,D] */
  uint16_t w_norm, w;
  ps__product p;
  ps__operand nx, dz; /* FP8: nx.q [T,D], nx.qt [D,S], dz.q [S,V], dz.qt [V,S] */
} head;

static void define_tensors(head *h, bool fp8) {
  ps_model *m = h->m;
  ps__layer_def *d = h->d;
  h->x = ps__def_tensor(d, "x", PS__ROWS_TOKEN, h->dim, m->dt);
  h->n1 = ps__def_tensor(d, "norm", PS__ROWS_TOKEN, h->dim, m->dt);
  h->row_loss = ps__def_tensor(
      d, "row_loss", PS__ROWS_TOKEN,
      h->score.problem ? 2 : ps__loss_columns(m->loss.z_loss, m->loss.label_smoothing), PS_F32);
  h->z = h->gz = h->n1;
  if (h->score.problem != PS_PROBLEM_EMBEDDING)
    h->z = h->gz = ps__def_tensor(d, "logits", PS__ROWS_SLICE, h->v, m->dt);
  if (h->v && ps__has_score(&m->cfg))
    h->gz = ps__def_tensor(d, "dscores", PS__ROWS_SLICE, h->v, m->dt);
  h->dx = ps__def_tensor(d, "dx", PS__ROWS_TOKEN, h->dim, m->dt);
  d->input = h->x;
  d->grad = h->forward_only ? PS__NONE : h->dx;
  d->loss = h->row_loss;
  d->logits = h->z;
  if (!fp8)
    return;
  h->nx.q = ps__def_tensor(d, "norm_fp8", PS__ROWS_TOKEN, h->dim, PS__E4M3);
  h->nx.qt = ps__def_tensor(d, "norm_fp8_columns", PS__ROWS_SLICE, h->dim, PS__E4M3);
  h->nx.scale = ps__def_tensor(d, "scale", PS__ROWS_ONE, 2, PS_F32);
  h->dz.q = ps__def_tensor(d, "dlogits_fp8", PS__ROWS_SLICE, h->v, PS__E5M2);
  h->dz.qt = ps__def_tensor(d, "dlogits_fp8_columns", PS__ROWS_SLICE, h->v, PS__E5M2);
  h->dz.scale = ps__def_tensor(d, "scale", PS__ROWS_ONE, 2, PS_F32);
}

static void define_params(head *h, const ps__decoder *decoder) {
  const ps_model *m = h->m;
  ps__layer_def *d = h->d;
  h->w_norm = ps__def_param(d, "model.norm.weight", PS_PARAM_NORM, h->dim, 0);
  ps__def_what(d, "final norm");
  ps__def_init(d, 1.0 - (double)decoder->norm_offset, 0);
  if (h->score.problem == PS_PROBLEM_EMBEDDING)
    return;
  if (ps__has_score(&m->cfg)) {
    if (m->lora.rank)
      ps__def_adapter_unit(d, ps__is_frozen(m));
    h->frozen = ps__is_frozen(m);
    h->w = ps__def_param(d, PS__SCORE, PS_PARAM_MATRIX, h->v, h->dim);
    ps__def_what(d, "head");
    return;
  }
  h->frozen = m->cfg.tied_embeddings ? m->unit[0].frozen : ps__base_is_frozen(m);
  h->w = m->cfg.tied_embeddings ? ps__def_tied(d, (uint64_t)h->v * h->dim, h->frozen)
                                : ps__def_param(d, "lm_head.weight", PS_PARAM_MATRIX, h->v, h->dim);
  ps__def_what(d, "head");
}

static void define_loss(head *h) {
  if (h->score.problem) {
    const bool scores = ps__has_score(&h->m->cfg);
    PS__SLICE(h->d, ps__k_score_loss, h->score, PS__R(h->z), PS__B(PS__BATCH_TARGETS),
              PS__B(PS__BATCH_SCALE), PS__W(h->row_loss), PS__SYM_IF(scores, PS__W(h->gz)));
    return;
  }
  PS__SLICE(h->d, ps__k_cross_entropy, h->loss, PS__RW(h->z), PS__B(PS__BATCH_TARGETS),
            PS__B(PS__BATCH_SCALE), PS__W(h->row_loss));
}

/* z = alpha n1 W^T; dW = alpha dz^T n1; dn1 = alpha dz W */
static void define_slices(head *h) {
  ps__args_gemm logits = ps__gemm_args(0, h->v, h->dim, false, true, h->m->dt),
                dw = ps__gemm_args(h->v, h->dim, 0, true, false, h->m->dt),
                dn = ps__gemm_args(0, h->dim, h->v, false, false, h->m->dt);
  logits.alpha = dw.alpha = dn.alpha = h->alpha;
  PS__SLICE(h->d, ps__k_gemm, logits, PS__R(h->n1), PS__P(h->w), PS__W(h->z));
  define_loss(h);
  PS__SLICE(h->d, ps__k_gemm, dw, PS__R(h->gz), PS__R(h->n1), PS__G(h->w));
  if (!h->forward_only)
    PS__SLICE(h->d, ps__k_gemm, dn, PS__R(h->gz), PS__P(h->w), PS__W(h->n1));
}

/* ---- FP8 -------------------------------------------------------------------------------------
 * The scope of a scale is the chunk, never a slice. n1's is made before the slices. The gradient of
 * the logits is known slice by slice alone, so its scale follows from a bound: |dz| is at most
 * 1/valid tokens, and with z-loss 1 + 2 z_loss log-sum-exp times as much. That is counted for a
 * log-sum-exp of up to 64; what is larger saturates. */

static float dz_headroom(const ps_model *m) {
  int e;
  frexpf(1 + 2 * 64 * m->loss.z_loss, &e);
  return m->loss.z_loss > 0 ? ldexpf(1, e) : 1;
}

/* Before the slices: n1 in form ROWS, W, and the scale of dz. */
static void define_operands(head *h) {
  const uint32_t dt = h->m->dt;
  const ps__args_fp8_scale n = {.cols = h->dim, .dt = dt, .dt_q = PS__E4M3},
                           of_w = {.rows = h->v, .cols = h->dim, .dt = dt, .dt_q = PS__E4M3},
                           bound = {.rows = 1,
                                    .cols = 1,
                                    .dt = PS_F32,
                                    .dt_q = PS__E5M2,
                                    .headroom = dz_headroom(h->m)};
  const ps__args_quantize
      x = {.cols = h->dim, .dt = dt, .dt_q = PS__E4M3, .forms = PS_FORM_ROWS, .given = 1},
      w = {.rows = h->v,
           .cols = h->dim,
           .dt = dt,
           .dt_q = PS__E4M3,
           .given = 1,
           .forms = h->forward_only ? PS_FORM_ROWS : PS_FORM_ROWS | PS_FORM_COLS};
  PS__FWD(h->d, ps__k_fp8_scale, n, PS__R(h->n1), PS__W(h->nx.scale));
  PS__FWD(h->d, ps__k_quantize, x, PS__R(h->n1), PS__R(h->nx.scale), PS__W(h->nx.q));
  PS__FWD(h->d, ps__k_fp8_scale, of_w, PS__P(h->w), PS__W(h->p.w8_scale));
  PS__FWD(h->d, ps__k_quantize, w, PS__P(h->w), PS__R(h->p.w8_scale), PS__W(h->p.w8),
          PS__SYM_IF(!h->forward_only, PS__W(h->p.w8t)));
  if (!h->forward_only)
    PS__FWD(h->d, ps__k_fp8_scale, bound, PS__B(PS__BATCH_SCALE), PS__W(h->dz.scale));
}

static void define_fp8_slices(head *h) {
  ps__layer_def *d = h->d;
  const ps__args_quantize dz = {.cols = h->v,
                                .dt = h->m->dt,
                                .dt_q = PS__E5M2,
                                .forms = h->frozen ? PS_FORM_ROWS : PS_FORM_ROWS | PS_FORM_COLS,
                                .given = 1},
                          x = {.cols = h->dim,
                               .dt = h->m->dt,
                               .dt_q = PS__E4M3,
                               .forms = PS_FORM_COLS,
                               .given = 1};
  const ps__args_gemm_fp8 logits = ps__gemm_fp8_args(h->m, PS_GEMM_FORWARD, h->v, h->dim, h->alpha),
                          dn = ps__gemm_fp8_args(h->m, PS_GEMM_DGRAD, h->dim, h->v, h->alpha);
  ps__args_gemm_fp8 dw = ps__gemm_fp8_args(h->m, PS_GEMM_WGRAD, h->dim, 0, h->alpha);
  dw.m = h->v;
  PS__SLICE(d, ps__k_gemm_fp8, logits, PS__R(h->nx.q), PS__R(h->nx.scale), PS__R(h->p.w8),
            PS__R(h->p.w8_scale), PS__W(h->z));
  ps__name_product(d, false, &h->p);
  define_loss(h);
  if (h->forward_only)
    return;
  PS__SLICE(d, ps__k_quantize, dz, PS__R(h->z), PS__R(h->dz.scale), PS__W(h->dz.q),
            PS__SYM_IF(!h->frozen, PS__W(h->dz.qt)));
  if (!h->frozen) {
    PS__SLICE(d, ps__k_quantize, x, PS__R(h->n1), PS__R(h->nx.scale), PS__W(h->nx.qt));
    PS__SLICE(d, ps__k_gemm_fp8, dw, PS__R(h->dz.qt), PS__R(h->dz.scale), PS__R(h->nx.qt),
              PS__R(h->nx.scale), PS__G(h->w));
  }
  PS__SLICE(d, ps__k_gemm_fp8, dn, PS__R(h->dz.q), PS__R(h->dz.scale), PS__R(h->p.w8t),
            PS__R(h->p.w8_scale), PS__W(h->n1));
  ps__name_product(d, false, &h->p);
}

ps_status ps__describe_head(ps_model *m, const ps__decoder *decoder) {
  const ps_model_config *c = &m->cfg;
  const bool fp8 = m->fp8.on && m->fp8.head;
  const ps__args_rmsnorm norm = ps__norm_args(m, decoder);
  head h = {.m = m,
            .v = ps__head_columns(c),
            .dim = c->dim,
            .alpha = c->logit_scale,
            .forward_only = ps__is_frozen(m),
            .loss = {.vocab = c->vocab_size,
                     .dt = m->dt,
                     .softcap = c->logit_softcap,
                     .z_loss = m->loss.z_loss,
                     .label_smoothing = m->loss.label_smoothing},
            .score = {.cols = ps__head_columns(c), .dt = m->dt, .problem = c->problem}};
  PS_TRY(ps__model_add_def(m, &h.d));
  ps__def_unit(h.d, ps__base_is_frozen(m));
  define_tensors(&h, fp8);
  define_params(&h, decoder);
  if (c->problem == PS_PROBLEM_EMBEDDING) {
    PS__SLICE(h.d, ps__k_rmsnorm_fwd, norm, PS__R(h.x), PS__P(h.w_norm), PS__W(h.n1));
    define_loss(&h);
    return ps__model_add_layer(m, h.d, "");
  }
  h.p = ps__def_product(h.d, h.w, h.v, h.dim, fp8);
  PS__FWD(h.d, ps__k_rmsnorm_fwd, norm, PS__R(h.x), PS__P(h.w_norm), PS__W(h.n1));
  if (fp8) {
    define_operands(&h);
    define_fp8_slices(&h);
  } else
    define_slices(&h);
  if (!h.forward_only)
    PS__FWD(h.d, ps__k_rmsnorm_bwd, norm, PS__R(h.x), PS__P(h.w_norm), PS__R(h.n1), PS__W(h.dx),
            PS__G(h.w_norm));
  return ps__model_add_layer(m, h.d, "");
}
