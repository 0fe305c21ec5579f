/* block.c - the residual stream of a block, the norms around its halves, and their order. */
#include "model/block.h"
#include "core/core.h"
#include "model/per_layer.h"
#include <math.h>

/* ---- what halves call ------------------------------------------------------------------------ */

static uint8_t tokens(const ps__block *b, const char *name) {
  return ps__def_tensor(b->d, name, PS__ROWS_TOKEN, b->dim, b->m->dt);
}

uint8_t ps__half_tokens(const ps__half *h, const char *name, uint64_t cols) {
  return ps__def_tensor(h->b->d, name, PS__ROWS_TOKEN, cols, h->b->m->dt);
}

uint16_t ps__half_norm(const ps__half *h, const char *name, const char *what, uint32_t n) {
  ps__layer_def *d = h->b->d;
  if (!name)
    return 0;
  const uint16_t span = ps__def_param(d, name, PS_PARAM_NORM, n, 0);
  ps__def_what(d, what);
  ps__def_init(d, 1.0 - (double)h->b->decoder->norm_offset, 0);
  return span;
}

uint16_t ps__half_residual(const ps__half *h, const char *name, const char *what, uint32_t n_in) {
  ps__layer_def *d = h->b->d;
  const uint16_t span = ps__def_param(d, name, PS_PARAM_MATRIX, h->b->dim, n_in);
  ps__def_what(d, what);
  ps__def_init(d, 0, 0.02 / sqrt(2.0 * h->b->m->cfg.n_layers));
  return span;
}

void ps__half_site(ps__half *h, uint32_t i, uint32_t n_out, uint32_t n_in) {
  h->b->site[i].n_out = n_out;
  h->b->site[i].n_in = n_in;
  h->b->site[i].cut = 0;
}

void ps__half_x_site(ps__half *h, uint32_t i, uint32_t n_out) {
  ps__half_site(h, i, n_out, h->b->dim);
  h->x_sites |= 1u << i;
}

void ps__half_x_site_cut(ps__half *h, uint32_t i, uint32_t n_out, uint32_t cut) {
  ps__half_x_site(h, i, n_out);
  h->b->site[i].cut = cut;
}

bool ps__half_adapts(const ps__half *h, uint32_t i) { return h->b->lora[i].n_out > 0; }

void ps__half_input(const ps__half *h, bool backward) {
  const ps__block *b = h->b;
  const ps__operand x = h->x;
  const ps__args_rmsnorm_quantize q = {.norm = b->norm,
                                       .dt_q = PS__E4M3,
                                       .forms = backward ? PS_FORM_COLS : PS_FORM_ROWS,
                                       .count = backward || ps__counts_forward(b->m) ? x.count : 0};
  if (h->fp8 && h->pre && !h->stores_x) {
    if (backward && ps__base_is_frozen(b->m))
      return;
    PS__DEF_OP(b->d, backward, false, ps__k_rmsnorm_quantize, q, PS__R(h->in), PS__P(h->w_norm),
               PS__W(backward ? x.scale_t : x.scale), PS__W(backward ? x.qt : x.q),
               PS__SYM_IF(q.count, PS__FLUSHED));
    return;
  }
  if (h->pre && !backward)
    PS__FWD(b->d, ps__k_rmsnorm_fwd, b->norm, PS__R(h->in), PS__P(h->w_norm), PS__W(x.stored));
  if (h->fp8)
    ps__quantize_x(b->m, b->d, x, b->dim, backward);
}

void ps__half_project(const ps__half *h, const ps__product *p, ps__operand act, uint32_t i) {
  const ps__block *b = h->b;
  const float scale = b->m->cfg.residual_scale;
  ps__product_forward(b->m, b->d, p, act, h->y, scale, h->has_bias ? h->b_out : PS__NONE,
                      h->residual);
  ps__lora_forward(b->m, b->d, &b->lora[i], act.stored, (ps__columns){h->y, b->dim, 0}, scale);
}

ps__columns ps__half_dy_columns(const ps__half *h) { return (ps__columns){h->dy, h->b->dim, 0}; }

/* ---- the block ------------------------------------------------------------------------------- */

/* The half of a list that layers with @flags have. */
static const ps__half_use *use_of(const ps__half_use *list, uint32_t flags) {
  while ((list->flags & flags) != list->flags)
    list++;
  return list;
}

static ps_status begin(ps__block *b, ps__half *half) {
  for (ps__half *h = half; h < half + PS__HALVES; h++) {
    h->b = b;
    h->use = use_of(b->decoder->half[h - half], b->flags);
    h->pre = h->use->norm;
    h->post = h->use->post_norm;
    h->fp8 = b->fp8 && h->use->kind->counted;
    h->own = ps__calloc(1, h->use->kind->own_bytes);
    if (!h->own)
      return ps__fail(PS_ENOMEM, "out of memory for a layer's definition");
    PS_TRY(h->use->kind->begin(h));
  }
  return PS_OK;
}

/* In the order in which they lie in the unit. */
static void define_params(ps__block *b, ps__half *half, ps__per_layer *after) {
  ps__def_unit(b->d, ps__base_is_frozen(b->m));
  ps__def_base(b->d, b->m->lora.base);
  for (ps__half *h = half; h < half + PS__HALVES; h++) {
    const ps__half_kind *kind = h->use->kind;
    h->w_norm = ps__half_norm(h, h->use->norm, kind->norm, b->dim);
    kind->params(h);
    h->w_post = ps__half_norm(h, h->use->post_norm, kind->post_norm, b->dim);
  }
  if (b->decoder->layer_scale) {
    b->w_scale = ps__def_param(b->d, b->decoder->layer_scale, PS_PARAM_CONSTANT, 1, 0);
    ps__def_what(b->d, "layer scale");
  }
  for (ps__half *h = half; h < half + PS__HALVES; h++)
    if (h->use->kind->units)
      h->use->kind->units(h);
  ps__per_layer_params(b, after);
}

/* The LoRA targets that the block has. */
static uint32_t find_sites(ps__block *b, ps__half *half) {
  uint32_t there = 0;
  for (ps__half *h = half; h < half + PS__HALVES; h++)
    h->use->kind->sites(h);
  for (uint32_t i = 0; i < PS_N_LORA_TARGETS; i++)
    there |= (uint32_t)(b->site[i].n_out > 0) << i;
  return there;
}

/* The adapters' unit, by target. A block may lack targets that others have. */
static void define_adapters(ps__block *b, ps__half *half) {
  const uint32_t there = find_sites(b, half) & b->m->lora.targets;
  if (!b->m->lora.rank || !there)
    return;
  ps__def_adapter_unit(b->d, ps__is_frozen(b->m));
  for (uint32_t i = 0; i < PS_N_LORA_TARGETS; i++)
    if (there >> i & 1)
      ps__lora_define(b->m, b->d, i, b->site[i].n_out, b->site[i].n_in, b->site[i].cut,
                      &b->lora[i]);
}

static bool stores_x(const ps__half *h) {
  bool read = !h->fp8 || h->use->kind->stores_x;
  for (uint32_t i = 0; i < PS_N_LORA_TARGETS; i++)
    read |= h->x_sites >> i & 1 && ps__half_adapts(h, i);
  return read;
}

/* A post norm's input has one gradient tensor for both halves: one is done before the other
 * begins. */
static void define_tensors(ps__block *b, ps__half *half, ps__per_layer *after) {
  ps__layer_def *d = b->d;
  uint8_t stream = tokens(b, "x");
  d->input = stream;
  d->grad = b->dy = tokens(b, "dy");
  const uint8_t dpost = half[0].post || half[1].post ? tokens(b, "dpost") : 0;
  for (ps__half *h = half; h < half + PS__HALVES; h++) {
    const bool last = h == half + PS__HALVES - 1;
    h->in = stream;
    h->dy = h->post ? dpost : b->dy;
    h->dx = h->pre ? tokens(b, "dnorm") : b->dy;
    h->adds_dx = !h->pre;
    h->stores_x = stores_x(h);
    h->x = ps__def_x(d, !h->pre ? stream : h->stores_x ? tokens(b, "norm") : 0, b->dim, h->fp8);
    h->use->kind->tensors(h);
    h->y = h->post ? tokens(b, h->use->kind->out) : 0;
    h->to = stream = tokens(b, !last ? "h" : after->e ? "r" : "y");
    h->residual = h->post ? PS__NONE : (int)h->in;
    if (!h->post)
      h->y = h->to;
  }
  d->output = ps__per_layer_tensors(b, after, stream);
}

static void define_counted(ps__block *b, ps__half *half) {
  for (int of_gradients = 0; of_gradients < 2; of_gradients++)
    for (ps__half *h = half; h < half + PS__HALVES; h++)
      if (h->fp8)
        h->use->kind->counted(h, of_gradients);
}

/* What a half writes is saved, but for the block's output. Where a post norm stands before the
 * residual stream, it makes that from what it norms. */
static void define_saved(ps__block *b, ps__half *half) {
  ps__def_saved(b->d, half[0].in, "x", PS__RANK_INPUT);
  for (ps__half *h = half; h < half + PS__HALVES; h++) {
    h->use->kind->saved(h);
    if (h->y != b->d->output && !h->use->kind->makes_out)
      ps__def_saved(b->d, h->y, h->post ? h->use->kind->out : "h", h->use->kind->out_rank);
  }
}

/* Norms' outputs are read in the backward pass although they are never saved: the step builder puts
 * the forward op that makes a missing tensor in front of its first use. */
static void define_ops(ps__block *b, ps__half *half, const ps__per_layer *after) {
  ps__args_rmsnorm post = b->norm, pre = b->norm;
  const ps__args_layer_scale scale = {.cols = b->dim, .dt = b->m->dt};
  post.has_residual = true;
  pre.add_dx = true;
  for (ps__half *h = half; h < half + PS__HALVES; h++) {
    h->use->kind->forward(h);
    if (h->post)
      PS__FWD(b->d, ps__k_rmsnorm_fwd, post, PS__R(h->y), PS__P(h->w_post), PS__W(h->to),
              PS__R(h->in));
  }
  ps__per_layer_forward(b, after);
  if (b->decoder->layer_scale) {
    PS__FWD(b->d, ps__k_layer_scale_fwd, scale, PS__RW((uint8_t)b->d->output), PS__P(b->w_scale));
    PS__BWD(b->d, ps__k_layer_scale_bwd, scale, PS__RW(b->dy), PS__P(b->w_scale),
            PS__G(b->w_scale));
  }
  ps__per_layer_backward(b, after);
  for (ps__half *h = half + PS__HALVES; h-- > half;) {
    if (h->post)
      PS__BWD(b->d, ps__k_rmsnorm_bwd, b->norm, PS__R(h->y), PS__P(h->w_post), PS__R(b->dy),
              PS__W(h->dy), PS__G(h->w_post));
    h->use->kind->backward(h);
    if (h->pre)
      PS__BWD(b->d, ps__k_rmsnorm_bwd, pre, PS__R(h->in), PS__P(h->w_norm), PS__R(h->dx),
              PS__RW(b->dy), PS__G(h->w_norm));
  }
  ps__per_layer_end(b, after);
}

static ps_status define(ps__block *b, ps__half *half) {
  PS_TRY(ps__model_add_def(b->m, &b->d));
  ps__per_layer after;
  PS_TRY(begin(b, half));
  ps__per_layer_begin(b, &after);
  define_params(b, half, &after);
  define_adapters(b, half);
  define_tensors(b, half, &after);
  define_counted(b, half);
  define_saved(b, half);
  define_ops(b, half, &after);
  return PS_OK;
}

static ps__block block_of(ps_model *m, const ps__decoder *decoder, uint32_t flags, bool fp8) {
  return (ps__block){.m = m,
                     .decoder = decoder,
                     .dim = m->cfg.dim,
                     .flags = flags,
                     .fp8 = fp8,
                     .norm = ps__norm_args(m, decoder)};
}

static void end(ps__half *half) {
  for (int i = 0; i < PS__HALVES; i++)
    ps__free(half[i].own);
}

ps_status ps__block_targets(ps_model *m, const ps__decoder *decoder, uint32_t flags,
                            uint32_t *targets) {
  ps__block b = block_of(m, decoder, flags, false);
  ps__half half[PS__HALVES] = {{0}};
  const ps_status st = begin(&b, half);
  if (st == PS_OK)
    *targets |= find_sites(&b, half);
  end(half);
  return st;
}

ps_status ps__describe_block(ps_model *m, const ps__decoder *decoder, uint32_t flags, bool fp8,
                             ps__layer_def **out) {
  ps__block b = block_of(m, decoder, flags, fp8);
  ps__half half[PS__HALVES] = {{0}};
  const ps_status st = define(&b, half);
  end(half);
  if (st == PS_OK)
    *out = b.d;
  return st;
}
