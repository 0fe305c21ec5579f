/* head.c - one chunk through the head, slice by slice: logits, loss and their gradients. */
#include "step/chunk_pass.h"

/* Sets to zero what the head's ops that run once a chunk, such as the final norm's, would have
 * written of a unit's gradient. */
static void zero_chunk_grads(ps__builder *b, const ps__chunk_pass *p, uint32_t unit) {
  for (uint32_t i = 0; i < p->d->n_fwd; i++)
    for (uint32_t j = 0; j < p->d->fwd[i].n_syms; j++) {
      const ps__sym y = p->d->fwd[i].sym[j];
      if (p->d->fwd[i].sliced || y.kind != PS__SYM_GRAD ||
          ps__unit_of_span(b->s->model, p->layer, &p->d->span[y.id]) != unit)
        continue;
      const ps__span_def *span = &p->d->span[y.id];
      const ps__vaccess zero =
          ps__elements(b->on->unit[unit].grad, PS_WRITE, b->s->recipe->grad, span->offset, span->n);
      const ps__args_fill fill = {zero.bytes};
      ps__emit(b, &ps__k_fill_zero, b->on->at.compute, &fill, sizeof fill, &zero, 1,
               ps__about(ps__unit_tag(b, unit, PS__PHASE_HEAD), "gradients"));
    }
}

/* Slices of a contribution are counted over the round, so a contribution may end amid a chunk,
 * before that chunk's own ops have written their gradients: these are then set to zero. */
static void end_full_contribution(ps__builder *b, const ps__chunk_pass *p, uint32_t unit) {
  const bool own = b->s->model->unit[unit].layer == p->layer;
  if (!b->s->model->unit[unit].by_slice || b->in->head_slices == 0 ||
      b->in->head_slices % b->s->sums.additions)
    return;
  if (own && !b->in->head_norm)
    zero_chunk_grads(b, p, unit);
  ps__grad_end(b, unit, true);
  ps__grad_begin(b, unit);
  if (own)
    b->in->head_norm = false;
}

static void free_slices(ps__builder *b, ps__chunk_pass *p) {
  for (uint32_t t = 0; t < p->d->n_tensors; t++)
    if (p->d->tensor[t].rows == PS__ROWS_SLICE)
      ps__vt_drop(b, &p->bound[t], 0);
}

/* The slice's logits go to the host before the loss's op turns them into their gradient. */
static void give_logits(ps__builder *b, const ps__chunk_pass *p) {
  const uint32_t from = p->bound[p->d->logits],
                 first = (uint32_t)ps__chunk_of(b, p->c)->first_token + p->slice_row;
  const ps_tag tag = ps__chunk_tag(b, p->layer, p->c, PS__PHASE_HEAD);
  const ps__vaccess device = ps__whole(b, from, PS_READ);
  const uint32_t host = ps__vt_new(b, b->s->at->host, device.bytes);
  ps__emit_copy(b, b->on->at.to_host, device, ps__whole(b, host, PS_WRITE), tag);
  const ps__vaccess read = ps__whole(b, host, PS_READ);
  ps__emit_hook(b, PS__HOOK_LOGITS, first, b->s->at->host_ops, &read, 1,
                ps__bytes_work((double)read.bytes), tag);
  ps__vt_free(b, host);
}

/* The ops from @i on that run slice by slice; returns the first after them. Tensors that the slices
 * fill row by row are made before. */
static uint32_t emit_slices(ps__builder *b, ps__chunk_pass *p, uint32_t i) {
  const ps__layer_def *d = p->d;
  const ps__chunk_shape whole = p->shape;
  const uint32_t rows = (uint32_t)b->s->spec->head_slice, unit = ps__sliced_unit(b->s->model);
  uint32_t end = i;
  for (; end < d->n_fwd && d->fwd[end].sliced; end++)
    for (uint32_t j = 0; j < d->fwd[end].n_syms; j++) {
      const ps__sym y = d->fwd[end].sym[j];
      if (ps__sym_is_tensor(y) && d->tensor[y.id].rows != PS__ROWS_SLICE &&
          p->bound[y.id] == PS__NO_VT)
        p->bound[y.id] = ps__vt_new(b, b->on->at.place, ps__chunk_tensor_bytes(b, d, p->c, y.id));
    }
  for (p->slice_row = 0; p->slice_row < whole.n_tokens; p->slice_row += rows) {
    const uint32_t left = whole.n_tokens - p->slice_row;
    end_full_contribution(b, p, unit);
    p->shape.first_grad = b->in->head_slices++ % b->s->sums.additions == 0;
    p->shape.n_tokens = left < rows ? left : rows;
    for (uint32_t k = i; k < end; k++) {
      ps__chunk_make_tensors(b, p, &d->fwd[k]);
      ps__chunk_emit(b, p, &d->fwd[k], PS__PHASE_HEAD);
      if (b->s->spec->keep_logits && ps__uses(&d->fwd[k], d->logits, PS_WRITE) &&
          !ps__uses(&d->fwd[k], d->logits, PS_READ))
        give_logits(b, p);
    }
    free_slices(b, p);
  }
  p->slice_row = 0;
  p->shape = whole;
  return end;
}

void ps__head_chunk(ps__builder *b, uint32_t c) {
  ps__step *s = b->s;
  const ps__chunk *k = ps__chunk_of(b, c);
  const uint32_t head = ps__head_layer(s->model);
  ps__chunk_pass p = ps__chunk_begin(b, head, c);
  const ps__layer_def *d = p.d;
  p.bound[d->input] = b->in->x[c];
  for (uint32_t i = 0; i < d->n_fwd;) {
    if (d->fwd[i].sliced) {
      i = emit_slices(b, &p, i);
      continue;
    }
    p.shape.first_grad = !b->in->head_norm;
    if (!ps__chunk_done(&p, &d->fwd[i])) {
      ps__chunk_make_tensors(b, &p, &d->fwd[i]);
      ps__chunk_emit(b, &p, &d->fwd[i], PS__PHASE_HEAD);
    }
    i++;
  }
  ps__chunk_keep_of_pass(b, &p);
  b->in->dy[c] = d->grad == PS__NONE ? PS__NO_VT : p.bound[d->grad];
  const uint32_t row_loss = p.bound[d->loss];
  const uint64_t row_bytes = ps__loss_row_bytes(s->model);
  ps__emit_copy(
      b, b->on->at.to_host, ps__whole(b, row_loss, PS_READ),
      ps__part(s->row_loss, PS_WRITE, row_bytes * k->first_token, row_bytes * k->n_tokens),
      ps__about(ps__chunk_tag(b, head, c, PS__PHASE_HEAD), "losses"));
  b->in->head_norm = true;
  /* where the slices' gradient is another layer's (tied embeddings), every chunk adds to these */
  if (s->model->unit[ps__sliced_unit(s->model)].layer != head && c && ps__contribution_ends(b, c) &&
      !ps__head_goes_on(b, c - 1)) {
    ps__layer_grads_end(b, head, true);
    ps__layer_grads_begin(b, head);
    b->in->head_norm = false;
  }
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if ((int)t != d->grad && (int)t != d->loss && !ps__in(d->of_pass, t) && !ps__in(d->of_step, t))
      ps__vt_free(b, p.bound[t]);
  ps__vt_free_late(b, row_loss, s->spec->saved_lag);
  ps__chunk_hand_back(b, head, c, PS__PHASE_HEAD);
  ps__tick(b);
}
