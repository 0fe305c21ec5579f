/* passes.c - one chunk through one unit: a block's forward and backward pass with recomputation,
 * the head and the loss. */
#include "step/emit.h"
#include <string.h>

const ps__chunk *ps__chunk_of(const ps__builder *b, uint32_t c) {
  return &b->s->layout->chunk[b->round->first_chunk + c];
}

uint32_t *ps__saved_entry(ps__builder *b, uint32_t *table, uint32_t layer, uint32_t c,
                          uint32_t tensor) {
  return &table[(((size_t)layer - 1) * b->s->spec->n_chunks + c) * PS__N_TENSORS + tensor];
}

static const ps__attention_group *group_of(const ps__builder *b, uint32_t c) {
  return &b->s->layout->group[ps__chunk_of(b, c)->group];
}

/* The chunk of the round whose entries hold the group's shared tensors: the group's first. */
static uint32_t group_first(const ps__builder *b, uint32_t c) {
  return group_of(b, c)->first_chunk - b->round->first_chunk;
}

static ps_tag chunk_tag(const ps__builder *b, uint32_t unit, uint32_t c, int phase) {
  return (ps_tag){(int32_t)unit, (int32_t)b->round_idx, (int32_t)(b->round->first_chunk + c),
                  phase};
}

static int policy_of(const ps__builder *b, uint32_t layer, uint32_t c, uint32_t tensor) {
  const ps__tensor_info *t = &b->s->block.tensor[tensor];
  if (t->saved < 0)
    return PS_POLICY_RECOMPUTE;
  const int policy =
      *ps__spec_policy(b->s->spec, layer - 1, t->group ? group_first(b, c) : c, t->saved);
  return policy != PS_POLICY_HOST_FIRST_ROUND ? policy
         : b->round_idx == 0                  ? PS_POLICY_HOST
                                              : PS_POLICY_RECOMPUTE;
}

static uint64_t tensor_bytes(const ps__builder *b, uint32_t c, uint32_t tensor) {
  const ps__tensor_info *t = &b->s->block.tensor[tensor];
  return t->row_bytes * (t->group ? group_of(b, c)->n_rows : ps__chunk_of(b, c)->n_tokens);
}

/* The chunk's own rows of a tensor: all of it, unless it is a group tensor. */
static ps__vaccess own_rows(const ps__builder *b, uint32_t c, uint32_t tensor, uint32_t vt,
                            uint32_t mode) {
  const ps__tensor_info *t = &b->s->block.tensor[tensor];
  const ps__chunk *k = ps__chunk_of(b, c);
  return ps__part(vt, mode, t->group ? t->row_bytes * k->row0 : 0, t->row_bytes * k->n_tokens);
}

/* Host memory for a saved activation that block @from made. In the first round it is an alias of
 * the block's gradient on the host: that has no contribution yet, and the update that read the last
 * step's gradient came before the block's forward pass, unless it was split. The gradient is needed
 * from the block's backward pass on, when the activation is fetched for the last time. With several
 * contributions a round the first one would come amid the backward pass: then there is no alias. */
static uint32_t host_of_saved(ps__builder *b, uint32_t from, uint64_t bytes) {
  const uint32_t grad = b->s->unit_host[from].grad;
  ps__unit_progress *u = &b->unit[from];
  const bool free = b->round_idx == 0 && b->round->n_chunks <= b->s->sums.additions && from > 0 &&
                    grad != PS__NO_VT && !b->s->spec->update_split[from];
  if (!free || u->alias_bytes + bytes > b->s->vt[grad].bytes)
    return ps__vt_new(b, PS__SPACE_HOST, bytes);
  const uint64_t at = u->alias_bytes;
  u->alias_bytes += (bytes + 255) / 256 * 256;
  return ps__vt_alias(b, grad, at, bytes);
}

void ps__send_saved(ps__builder *b, uint32_t layer, uint32_t c, uint32_t tensor, uint32_t vt) {
  if (policy_of(b, layer, c, tensor) != PS_POLICY_HOST)
    return;
  const bool group = b->s->block.tensor[tensor].group;
  uint32_t *away = ps__saved_entry(b, b->away, layer, group ? group_first(b, c) : c, tensor);
  if (*away == PS__NO_VT)
    *away = host_of_saved(b, tensor == PS__T_X ? layer - 1 : layer, tensor_bytes(b, c, tensor));
  ps__emit_copy(b, PS__S_D2H, own_rows(b, c, tensor, vt, PS_READ),
                own_rows(b, c, tensor, *away, PS_WRITE), chunk_tag(b, layer, c, PS__PHASE_FORWARD));
}

/* ---- binding and emitting a block's ops ------------------------------------------------------ */

typedef struct chunk_pass {
  uint32_t layer, c;
  ps__chunk_shape shape;
  uint32_t bound[PS__N_TENSORS]; /* device tensors */
  uint32_t keep;                 /* bit set: tensors that the caller frees */
} chunk_pass;

typedef struct listed {
  const ps__block_op *op;
  bool recompute;
} listed; /* recompute: the op runs for the second time */

static void emit_block_op(ps__builder *b, chunk_pass *p, const ps__block_op *op, int phase) {
  ps__step *s = b->s;
  const ps__unit_progress *u = &b->unit[p->layer];
  const ps__chunk *k = ps__chunk_of(b, p->c);
  const ps__batch_chunk fields = ps__batch_chunk_of(k->n_tokens);
  const uint64_t e = ps_dtype_bytes(s->dt);
  ps__vaccess access[PS__OP_MAX_SYMS];
  for (int i = 0; i < op->n_syms; i++) {
    const ps__sym y = op->sym[i];
    uint32_t mode = y.mode;
    switch (y.kind) {
    case PS__SYM_TENSOR: access[i] = own_rows(b, p->c, y.id, p->bound[y.id], mode); break;
    case PS__SYM_PREFIX:
      if (mode == PS_WRITE && !p->shape.first_dkv)
        mode = PS_READ_WRITE;
      access[i] = ps__part(p->bound[y.id], mode, 0,
                           s->block.tensor[y.id].row_bytes * (k->row0 + k->n_tokens));
      break;
    case PS__SYM_PARAM:
      access[i] =
          ps__part(u->weights, mode, s->block.span[y.id].offset * e, s->block.span[y.id].n * e);
      break;
    case PS__SYM_GRAD:
      access[i] = ps__part(u->grad, p->shape.first_grad ? PS_WRITE : PS_READ_WRITE,
                           s->block.span[y.id].offset * e, s->block.span[y.id].n * e);
      break;
    case PS__SYM_DOC:
      access[i] = ps__part(b->batch[p->c], PS_READ, fields.doc_start, 4ull * k->n_tokens);
      break;
    default:
      access[i] = ps__part(b->batch[p->c], PS_READ, fields.position, 4ull * k->n_tokens);
      break;
    }
  }
  _Alignas(16) char args[PS__ARGS_BYTES];
  ps__block_op_args(op, &p->shape, args);
  ps__emit(b, op->kernel, PS__S_COMPUTE, args, op->args_bytes, access, op->n_syms,
           chunk_tag(b, p->layer, p->c, phase));
}

static bool is_tensor(ps__sym y) { return y.kind == PS__SYM_TENSOR || y.kind == PS__SYM_PREFIX; }

/* Emit a list: tensors that an op writes and nobody made are made; a tensor dies after its last
 * use in the list. */
static void emit_list(ps__builder *b, chunk_pass *p, const listed *list, uint32_t n, int phase,
                      bool send) {
  uint32_t last_use[PS__N_TENSORS] = {0};
  for (uint32_t i = 0; i < n; i++)
    for (int j = 0; j < list[i].op->n_syms; j++)
      if (is_tensor(list[i].op->sym[j]))
        last_use[list[i].op->sym[j].id] = i;
  for (uint32_t i = 0; i < n; i++) {
    const ps__block_op *op = list[i].op;
    for (int j = 0; j < op->n_syms; j++)
      if (is_tensor(op->sym[j]) && p->bound[op->sym[j].id] == PS__NO_VT)
        p->bound[op->sym[j].id] =
            ps__vt_new(b, PS__SPACE_DEVICE, tensor_bytes(b, p->c, op->sym[j].id));
    emit_block_op(b, p, op, list[i].recompute ? PS__PHASE_RECOMPUTE : phase);
    for (int j = 0; j < op->n_syms; j++) {
      const uint32_t id = op->sym[j].id;
      if (!is_tensor(op->sym[j]))
        continue;
      if (send && (op->sym[j].mode & PS_WRITE))
        ps__send_saved(b, p->layer, p->c, id, p->bound[id]);
      if (last_use[id] != i || (p->keep >> id & 1) || p->bound[id] == PS__NO_VT)
        continue;
      const bool to_host = send && policy_of(b, p->layer, p->c, id) == PS_POLICY_HOST;
      ps__vt_free_late(b, p->bound[id], to_host ? b->s->spec->saved_lag : 0);
      p->bound[id] = PS__NO_VT;
    }
  }
}

static chunk_pass begin_chunk_pass(ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__chunk *k = ps__chunk_of(b, c);
  const ps__attention_group *g = group_of(b, c);
  chunk_pass p = {.layer = layer, .c = c};
  p.shape = (ps__chunk_shape){
      .n_tokens = k->n_tokens,
      .row0 = k->row0,
      .first_grad = ps__contribution_begins(b, c),
      .first_dkv = k - b->s->layout->chunk == g->first_chunk + g->n_chunks - 1,
      .document_rows = b->s->spec->one_document ? (uint32_t)b->s->layout->seq_len : 0};
  for (int t = 0; t < PS__N_TENSORS; t++)
    p.bound[t] = PS__NO_VT;
  return p;
}

static bool last_of_group(const ps__builder *b, uint32_t c) {
  const ps__attention_group *g = group_of(b, c);
  return b->round->first_chunk + c == g->first_chunk + g->n_chunks - 1;
}

void ps__forward_chunk(ps__builder *b, uint32_t layer, uint32_t c) {
  ps__block *block = &b->s->block;
  chunk_pass p = begin_chunk_pass(b, layer, c);
  uint32_t *kv = ps__saved_entry(b, b->kept, layer, group_first(b, c), PS__T_KV);
  if (*kv == PS__NO_VT)
    *kv = ps__vt_new(b, PS__SPACE_DEVICE, tensor_bytes(b, c, PS__T_KV));
  p.bound[PS__T_X] = b->x[c];
  p.bound[PS__T_KV] = *kv;
  p.keep = 1u << PS__T_X | 1u << PS__T_KV | 1u << PS__T_Y;
  for (uint32_t t = 0; t < PS__N_TENSORS; t++)
    if (block->tensor[t].saved >= 0 && policy_of(b, layer, c, t) == PS_POLICY_DEVICE)
      p.keep |= 1u << t;
  listed list[PS__MAX_FWD];
  for (uint32_t i = 0; i < block->n_fwd; i++)
    list[i] = (listed){&block->fwd[i], false};
  emit_list(b, &p, list, block->n_fwd, PS__PHASE_FORWARD, true);

  for (uint32_t t = 0; t < PS__N_TENSORS; t++)
    if ((p.keep >> t & 1) && t != PS__T_KV && t != PS__T_X && t != PS__T_Y)
      *ps__saved_entry(b, b->kept, layer, c, t) = p.bound[t];
  if (policy_of(b, layer, c, PS__T_X) == PS_POLICY_DEVICE)
    *ps__saved_entry(b, b->kept, layer, c, PS__T_X) = b->x[c];
  else
    ps__vt_free_late(b, b->x[c], b->s->spec->saved_lag);
  const int kv_policy = policy_of(b, layer, c, PS__T_KV);
  if (last_of_group(b, c) && kv_policy != PS_POLICY_DEVICE) {
    ps__vt_free_late(b, *kv, kv_policy == PS_POLICY_HOST ? b->s->spec->saved_lag : 0);
    *kv = PS__NO_VT;
  }
  b->x[c] = p.bound[PS__T_Y];
  if (layer < b->s->cfg->n_layers)
    ps__send_saved(b, layer + 1, c, PS__T_X, b->x[c]);
  ps__tick(b);
}

/* ---- backward -------------------------------------------------------------------------------- */

static void fetch_tensor(ps__builder *b, uint32_t layer, uint32_t c, uint32_t tensor) {
  uint32_t *away = ps__saved_entry(b, b->away, layer, c, tensor);
  uint32_t *kept = ps__saved_entry(b, b->kept, layer, c, tensor);
  if (*away == PS__NO_VT)
    return;
  *kept = ps__vt_new(b, PS__SPACE_DEVICE, b->s->vt[*away].bytes);
  ps__emit_copy(b, PS__S_H2D, ps__whole(b, *away, PS_READ), ps__whole(b, *kept, PS_WRITE),
                chunk_tag(b, layer, c, PS__PHASE_BACKWARD));
  ps__vt_free(b, *away);
  *away = PS__NO_VT;
}

/* Backward chunk passes of a round are numbered in their order: the last layer first, in each layer
 * the last chunk first. */
void ps__fetch_saved(ps__builder *b, uint32_t step_idx) {
  const uint32_t n = b->round->n_chunks, layers = b->s->cfg->n_layers;
  if (step_idx >= n * layers)
    return;
  const uint32_t layer = layers - step_idx / n, c = n - 1 - step_idx % n;
  if (last_of_group(b, c))
    fetch_tensor(b, layer, group_first(b, c), PS__T_KV);
  for (uint32_t t = 0; t < PS__N_TENSORS; t++)
    if (t != PS__T_KV)
      fetch_tensor(b, layer, c, t);
}

/* Puts the op on the list, and before it the ops that make what it reads. */
static void list_with_sources(const ps__block *block, const ps__block_op *op, uint32_t recompute,
                              uint32_t *done, uint32_t *have, listed *list, uint32_t *n) {
  for (int j = 0; j < op->n_syms; j++) {
    const ps__sym y = op->sym[j];
    if (!is_tensor(y) || !(y.mode & PS_READ) || (*have >> y.id & 1))
      continue;
    for (uint32_t i = 0; i < block->n_fwd; i++) {
      if (!(recompute >> i & 1) || (*done >> i & 1))
        continue;
      bool makes = false;
      for (int k = 0; k < block->fwd[i].n_syms; k++)
        makes |= block->fwd[i].sym[k].kind == PS__SYM_TENSOR && block->fwd[i].sym[k].id == y.id &&
                 (block->fwd[i].sym[k].mode & PS_WRITE);
      if (!makes)
        continue;
      *done |= 1u << i;
      list_with_sources(block, &block->fwd[i], recompute, done, have, list, n);
      list[(*n)++] = (listed){&block->fwd[i], true};
    }
    *have |= 1u << y.id;
  }
}

static uint32_t tensors_at_hand(const chunk_pass *p) {
  uint32_t have = 0;
  for (uint32_t t = 0; t < PS__N_TENSORS; t++)
    if (p->bound[t] != PS__NO_VT)
      have |= 1u << t;
  return have;
}

static void bind_kept(ps__builder *b, chunk_pass *p) {
  for (uint32_t t = 0; t < PS__N_TENSORS; t++) {
    const bool group = b->s->block.tensor[t].group;
    if (b->s->block.tensor[t].saved < 0 && !group)
      continue;
    p->bound[t] = *ps__saved_entry(b, b->kept, p->layer, group ? group_first(b, p->c) : p->c, t);
  }
}

/* The last chunk's backward pass needs the keys and values of its whole group: recomputes them. */
static void rebuild_group_kv(ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__block *block = &b->s->block;
  const uint32_t first = group_first(b, c), n = group_of(b, c)->n_chunks;
  uint32_t *kv = ps__saved_entry(b, b->kept, layer, first, PS__T_KV);
  if (*kv != PS__NO_VT)
    return;
  *kv = ps__vt_new(b, PS__SPACE_DEVICE, tensor_bytes(b, c, PS__T_KV));
  for (uint32_t i = first; i < first + n; i++) {
    chunk_pass p = begin_chunk_pass(b, layer, i);
    bind_kept(b, &p);
    const uint32_t have = tensors_at_hand(&p);
    const uint32_t recompute = ps__block_recompute(block, 1u << PS__T_KV, have & ~(1u << PS__T_KV));
    listed list[PS__MAX_FWD];
    uint32_t m = 0;
    for (uint32_t f = 0; f < block->n_fwd; f++)
      if (recompute >> f & 1)
        list[m++] = (listed){&block->fwd[f], true};
    p.keep = have | 1u << PS__T_KV;
    emit_list(b, &p, list, m, PS__PHASE_RECOMPUTE, false);
  }
}

void ps__backward_chunk(ps__builder *b, uint32_t layer, uint32_t c) {
  const ps__block *block = &b->s->block;
  const uint32_t first = group_first(b, c);
  uint32_t *kv = ps__saved_entry(b, b->kept, layer, first, PS__T_KV),
           *dkv = ps__saved_entry(b, b->kept, layer, first, PS__T_DKV);
  if (group_of(b, c)->n_chunks > 1 && last_of_group(b, c)) {
    /* all of the group's copies are due now: its keys and values may be recomputed from them */
    for (uint32_t i = first; i <= c; i++)
      for (uint32_t t = 0; *kv == PS__NO_VT && t < PS__N_TENSORS; t++)
        if (t == PS__T_X || t == PS__T_QKV)
          fetch_tensor(b, layer, i, t);
    rebuild_group_kv(b, layer, c);
  }
  chunk_pass p = begin_chunk_pass(b, layer, c);
  bind_kept(b, &p);
  p.bound[PS__T_DY] = b->dy[c];
  if (*dkv == PS__NO_VT)
    p.bound[PS__T_DKV] = *dkv = ps__vt_new(b, PS__SPACE_DEVICE, tensor_bytes(b, c, PS__T_DKV));
  p.keep = 1u << PS__T_DY;
  const bool group_over = ps__chunk_of(b, c)->row0 == 0;
  if (!group_over)
    p.keep |= 1u << PS__T_KV | 1u << PS__T_DKV;

  uint32_t have = tensors_at_hand(&p), done = 0, n = 0;
  const uint32_t recompute = ps__block_recompute(block, ps__block_backward_needs(block), have);
  listed list[PS__MAX_FWD + PS__MAX_BWD];
  for (uint32_t i = 0; i < block->n_bwd; i++) {
    list_with_sources(block, &block->bwd[i], recompute, &done, &have, list, &n);
    list[n++] = (listed){&block->bwd[i], false};
  }
  emit_list(b, &p, list, n, PS__PHASE_BACKWARD, false);
  for (uint32_t t = 0; t < PS__N_TENSORS; t++)
    if (!block->tensor[t].group)
      *ps__saved_entry(b, b->kept, layer, c, t) = PS__NO_VT;
  if (group_over)
    *kv = *dkv = PS__NO_VT;
  ps__tick(b);
}

/* ---- head ------------------------------------------------------------------------------------ */

/* Where the lm_head and its gradient are: in the head's unit after the norm, or the embedding's
 * table. */
typedef struct head_place {
  uint32_t weights, grad;
  uint64_t offset, bytes;
} head_place;

static uint32_t head_unit(const ps__builder *b) {
  return b->s->cfg->tied_embeddings ? 0 : b->s->cfg->n_layers + 1;
}

static head_place find_head(const ps__builder *b) {
  const ps__step *s = b->s;
  const uint32_t unit = head_unit(b);
  ps__span_info span[PS__MAX_UNIT_SPANS];
  const uint32_t n = ps__unit_spans(&s->block, s->cfg, unit, span);
  const uint64_t e = ps_dtype_bytes(s->dt);
  return (head_place){b->unit[unit].weights, b->unit[unit].grad, span[n - 1].offset * e,
                      span[n - 1].n * e};
}

/* Slices of a contribution are counted over the round, so a contribution may end amid a chunk,
 * before that chunk has a gradient of the final norm: the norm's gradient is then set to zero. */
static void end_full_contribution(ps__builder *b) {
  const uint32_t unit = head_unit(b);
  const uint64_t norm_bytes = b->s->cfg->dim * ps_dtype_bytes(b->s->dt);
  if (b->head_slices == 0 || b->head_slices % b->s->sums.additions)
    return;
  if (unit > 0 && !b->head_norm) {
    const ps__args_fill fill = {norm_bytes};
    const ps__vaccess zero = ps__part(b->unit[unit].grad, PS_WRITE, 0, norm_bytes);
    ps__emit(b, &ps__k_fill_zero, PS__S_COMPUTE, &fill, sizeof fill, &zero, 1,
             ps__unit_tag(b, unit, PS__PHASE_HEAD));
  }
  ps__grad_end(b, unit, true);
  ps__grad_begin(b, unit);
  if (unit > 0)
    b->head_norm = false;
}

static void head_slice(ps__builder *b, uint32_t c, uint32_t row, uint32_t rows, uint32_t n1,
                       uint32_t row_loss) {
  ps__step *s = b->s;
  end_full_contribution(b);
  const bool first = b->head_slices++ % s->sums.additions == 0;
  const ps__batch_chunk fields = ps__batch_chunk_of(ps__chunk_of(b, c)->n_tokens);
  const uint32_t d = s->cfg->dim, v = s->cfg->vocab_size;
  const uint64_t e = ps_dtype_bytes(s->dt), norm_at = (uint64_t)row * d * e,
                 norm_bytes = (uint64_t)rows * d * e;
  const head_place h = find_head(b);
  const ps_tag tag = chunk_tag(b, s->cfg->n_layers + 1, c, PS__PHASE_HEAD);
  const uint64_t z_bytes = (uint64_t)rows * v * e;
  const uint32_t z = ps__vt_new(b, PS__SPACE_DEVICE, z_bytes);

  ps__args_gemm g = ps__gemm_args(rows, v, d, false, true, s->dt);
  const ps__vaccess logits[3] = {ps__part(n1, PS_READ, norm_at, norm_bytes),
                                 ps__part(h.weights, PS_READ, h.offset, h.bytes),
                                 ps__whole(b, z, PS_WRITE)};
  ps__emit(b, &ps__k_gemm, PS__S_COMPUTE, &g, sizeof g, logits, 3, tag);

  const ps__args_cross_entropy ce = {.rows = rows, .vocab = v, .dt = s->dt};
  const ps__vaccess loss[4] = {
      ps__whole(b, z, PS_READ_WRITE),
      ps__part(b->batch[c], PS_READ, fields.targets + 4ull * row, 4ull * rows),
      ps__part(b->batch[c], PS_READ, fields.scale, 4),
      ps__part(row_loss, PS_WRITE, 4ull * row, 4ull * rows)};
  ps__emit(b, &ps__k_cross_entropy, PS__S_COMPUTE, &ce, sizeof ce, loss, 4, tag);

  g = ps__gemm_args(v, d, rows, true, false, s->dt);
  g.accumulate = !first;
  const ps__vaccess dw[3] = {ps__whole(b, z, PS_READ), ps__part(n1, PS_READ, norm_at, norm_bytes),
                             ps__part(h.grad, first ? PS_WRITE : PS_READ_WRITE, h.offset, h.bytes)};
  ps__emit(b, &ps__k_gemm, PS__S_COMPUTE, &g, sizeof g, dw, 3, tag);

  /* this is the last use of the slice's normed rows: their gradient overwrites them */
  g = ps__gemm_args(rows, d, v, false, false, s->dt);
  const ps__vaccess dn[3] = {ps__whole(b, z, PS_READ),
                             ps__part(h.weights, PS_READ, h.offset, h.bytes),
                             ps__part(n1, PS_WRITE, norm_at, norm_bytes)};
  ps__emit(b, &ps__k_gemm, PS__S_COMPUTE, &g, sizeof g, dn, 3, tag);
  ps__vt_free(b, z);
}

void ps__head_chunk(ps__builder *b, uint32_t c) {
  ps__step *s = b->s;
  const ps__chunk *k = ps__chunk_of(b, c);
  const uint32_t unit = s->cfg->n_layers + 1, t = k->n_tokens, d = s->cfg->dim;
  const uint64_t e = ps_dtype_bytes(s->dt), bytes = (uint64_t)t * d * e;
  const ps_tag tag = chunk_tag(b, unit, c, PS__PHASE_HEAD);
  const ps__args_rmsnorm fwd = {.rows = t, .cols = d, .dt = s->dt, .eps = s->cfg->norm_eps};
  const uint32_t n1 = ps__vt_new(b, PS__SPACE_DEVICE, bytes),
                 row_loss = ps__vt_new(b, PS__SPACE_DEVICE, 4ull * t);
  const ps__vaccess norm[3] = {ps__whole(b, b->x[c], PS_READ),
                               ps__part(b->unit[unit].weights, PS_READ, 0, d * e),
                               ps__whole(b, n1, PS_WRITE)};
  ps__emit(b, &ps__k_rmsnorm_fwd, PS__S_COMPUTE, &fwd, sizeof fwd, norm, 3, tag);
  for (uint32_t row = 0; row < t; row += (uint32_t)s->spec->head_slice) {
    const uint32_t rows = t - row < s->spec->head_slice ? t - row : (uint32_t)s->spec->head_slice;
    head_slice(b, c, row, rows, n1, row_loss);
  }
  ps__args_rmsnorm bwd = fwd;
  bwd.accumulate_dw = b->head_norm;
  b->dy[c] = ps__vt_new(b, PS__SPACE_DEVICE, bytes);
  const ps__vaccess back[5] = {
      ps__whole(b, b->x[c], PS_READ), ps__part(b->unit[unit].weights, PS_READ, 0, d * e),
      ps__whole(b, n1, PS_READ), ps__whole(b, b->dy[c], PS_WRITE),
      ps__part(b->unit[unit].grad, b->head_norm ? PS_READ_WRITE : PS_WRITE, 0, d * e)};
  ps__emit(b, &ps__k_rmsnorm_bwd, PS__S_COMPUTE, &bwd, sizeof bwd, back, 5, tag);
  ps__emit_copy(b, PS__S_D2H, ps__whole(b, row_loss, PS_READ),
                ps__part(s->row_loss, PS_WRITE, 4ull * k->first_token, 4ull * t), tag);
  b->head_norm = true;
  /* with tied embeddings the unit has the norm alone, which every chunk adds to */
  if (s->cfg->tied_embeddings && c && ps__contribution_ends(b, c)) {
    ps__grad_end(b, unit, true);
    ps__grad_begin(b, unit);
    b->head_norm = false;
  }
  ps__vt_free(b, n1);
  ps__vt_free(b, b->x[c]);
  ps__vt_free_late(b, row_loss, s->spec->saved_lag);
  ps__tick(b);
}
