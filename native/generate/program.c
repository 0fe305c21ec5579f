/* program.c - a step of generation as a program of the engine.
 *
 *   io, host   fill the batch, look the tokens up in the embedding
 *   h2d        the first streamed blocks; batch and rows; the other streamed blocks, each as soon
 *              as the block two before it has computed
 *              Experts on demand (docs/design/generation.md): instead of copies, compute has an op
 *              that reads what it lacks from the host's memory
 *   compute    the blocks, the rows that logits are made of, the head
 *   d2h, host  logits, the next tokens
 * Beside a training whose embedding is on the device, compute looks the tokens up there.
 * The engine derives the waits. So the next step's first streamed blocks come in while this step
 * computes its last blocks, and while its tokens are drawn. */
#include "generate/generate.h"
#include <string.h>

typedef struct builder {
  const ps__gen_plan *p;
  ps_program *out;
  ps__gen_hooks *hooks;
  uint32_t program, rows; /* of the step */
  uint32_t n_ops;
  uint32_t streamed; /* blocks, from the first, whose copies have been added where they need any */
  uint32_t layer, x; /* the layer whose ops are added; which residual stream has its input */
  uint32_t products; /* of the layer's experts, so far */
  uint64_t cached;   /* BYTES from the caches' start to that of the layer's next op */
} builder;

typedef struct hook_args {
  ps__gen_hooks *hooks;
  uint32_t what, program;
} hook_args;

static ps_status run_hook(const ps_launch *l) {
  const hook_args *a = l->args;
  return a->hooks->fn(a->hooks->ctx, (ps__gen_hook)a->what, a->program, l);
}
static const ps_kernel fill_kernel = {
    .name = "fill", .op_class = PS_CLASS_IO, .fn = {run_hook, NULL}};
static const ps_kernel sample_kernel = {
    .name = "sample", .op_class = PS_CLASS_OTHER, .fn = {run_hook, NULL}};

static ps_status add(builder *b, const ps_kernel *k, uint32_t stream, const void *args,
                     uint32_t args_bytes, const ps_access *access, uint32_t n) {
  const ps_op op = {.kernel = k,
                    .args = args,
                    .args_bytes = args_bytes,
                    .stream = stream,
                    .access = access,
                    .n_access = n,
                    .work = k && k->info ? k->info->work(args) : (ps_work){0},
                    .tag = {.layer = (int32_t)b->layer, .round = -1, .chunk = -1, .phase = 0}};
  b->n_ops++;
  return ps_program_add(b->out, &op, NULL);
}

static ps_status add_copy(builder *b, uint32_t stream, uint32_t from, uint64_t src, uint32_t to,
                          uint64_t dst, uint64_t bytes) {
  const ps_access access[] = {{from, PS_READ, src, bytes}, {to, PS_WRITE, dst, bytes}};
  return add(b, NULL, stream, NULL, 0, access, 2);
}

static ps_status add_hook(builder *b, ps__gen_hook what, const ps_access access[2]) {
  const hook_args args = {b->hooks, what, b->program};
  return add(b, what == PS__GEN_FILL ? &fill_kernel : &sample_kernel, b->p->at->host_ops, &args,
             sizeof args, access, 2);
}

/* ---- weights --------------------------------------------------------------------------------- */

/* The copy of a unit's weights to where ops read them; nothing where they are there. */
static ps_status copy_unit(builder *b, uint32_t layer, uint32_t unit) {
  const ps__gen_plan *p = b->p;
  if (!ps__gen_is_moved(p, unit))
    return PS_OK;
  const ps__gen_at from = ps__gen_source(p, layer, unit), to = ps__gen_weights(p, layer, unit);
  return add_copy(b, p->at->dev[0].to_device, from.space, from.offset, to.space, to.offset,
                  ps__stored_bytes(ps__gen_storage(p, unit), p->model->unit[unit].n));
}

/* What is quantized of a layer's weights, for its ops. */
static ps_status dequantize_layer(builder *b, uint32_t layer) {
  const ps__gen_plan *p = b->p;
  const ps_model *m = p->model;
  const ps__layer *l = &m->layer[layer];
  const ps__storage plain = ps__weight_storage(m);
  for (uint32_t u = l->first_unit; u < l->first_unit + l->n_units; u++) {
    if (!m->unit[u].base)
      continue;
    const uint64_t n = m->unit[u].n;
    const ps__args_dequantize args = {n, m->unit[u].base, plain.dtype};
    const ps__gen_at from = ps__gen_weights(p, layer, u), to = ps__gen_dense(p, layer, u);
    const ps_access access[2] = {
        {from.space, PS_READ, from.offset, ps__stored_bytes(ps__gen_storage(p, u), n)},
        {to.space, PS_WRITE, to.offset, ps__stored_bytes(plain, n)}};
    PS_TRY(add(b, &ps__k_dequantize, p->at->dev[0].compute, &args, sizeof args, access, 2));
  }
  return PS_OK;
}

/* Of a layer's units those that are copied in each step, or the others. */
static ps_status copy_layer(builder *b, uint32_t layer, bool streamed) {
  const ps__layer *l = &b->p->model->layer[layer];
  for (uint32_t u = l->first_unit; u < l->first_unit + l->n_units; u++)
    if (ps__gen_streams(b->p, layer, u) == streamed)
      PS_TRY(copy_unit(b, layer, u));
  return PS_OK;
}

static bool fetches(const builder *b) {
  return b->p->experts.n_slots && b->p->experts.fetches[b->program];
}

/* The copies of the next streamed block, unless all have been added. */
static ps_status stream_next(builder *b) {
  const ps__gen_plan *p = b->p;
  while (b->streamed < p->report.n_blocks && (fetches(b) || !p->block[b->streamed].streamed))
    b->streamed++;
  return b->streamed < p->report.n_blocks ? copy_layer(b, ++b->streamed, true) : PS_OK;
}

static ps_access weights_of(const builder *b, const ps__span_def *span) {
  const ps__gen_plan *p = b->p;
  const uint32_t unit = ps__unit_of_span(p->model, b->layer, span);
  const ps__storage w =
      p->model->unit[unit].base ? ps__weight_storage(p->model) : ps__gen_storage(p, unit);
  const ps__gen_at at = p->model->unit[unit].base ? ps__gen_dense(p, b->layer, unit)
                                                  : ps__gen_weights(p, b->layer, unit);
  return (ps_access){at.space, PS_READ, at.offset + ps__stored_at(w, span->offset),
                     ps__stored_bytes(w, span->n)};
}

/* ---- experts on demand ----------------------------------------------------------------------- */

static uint32_t place_of(const builder *b) { return b->p->at->dev[0].place; }

/* The table of the running block, of which products read the slots of experts alone. */
static ps_access table_of(const builder *b, bool all) {
  const ps__gen_plan *p = b->p;
  const uint32_t e = p->model->cfg.n_experts;
  return (ps_access){place_of(b), all ? PS_READ_WRITE : PS_READ,
                     p->map.device.tables + p->block[b->layer - 1].index * p->experts.table_bytes,
                     4 * (all ? ps__fetch_words(e, p->experts.n_slots) : e)};
}
static ps_access slots_of(const builder *b, uint32_t product, uint32_t mode) {
  const ps__gen_experts *x = &b->p->experts;
  return (ps_access){place_of(b), mode, ps__gen_slots_at(b->p, b->layer, product),
                     x->n_slots * x->bytes[product]};
}

/* Tables and counts of blocks lie one after the other. */
static ps_access counts_of(const builder *b, uint32_t block, uint32_t n, uint32_t mode) {
  return (ps_access){place_of(b), mode, b->p->map.device.counts + 16ull * block, 16ull * n};
}

/* A step that streams overwrites caches: they have nothing any more. */
static ps_status forget_overwritten(builder *b) {
  const ps__gen_plan *p = b->p;
  if (!p->experts.n_slots || fetches(b))
    return PS_OK;
  const ps__args_fill fill = {ps__gen_overwritten(p) * p->experts.table_bytes};
  const ps_access access = {place_of(b), PS_WRITE, p->map.device.tables, fill.bytes};
  return add(b, &ps__k_fill_zero, p->at->dev[0].compute, &fill, sizeof fill, &access, 1);
}

/* Puts the counts so far where the generator reads them. */
static ps_status copy_counts(builder *b) {
  const ps__gen_plan *p = b->p;
  const ps_access from = counts_of(b, 0, p->experts.n_blocks, PS_READ);
  return fetches(b) ? add_copy(b, p->at->dev[0].to_host, from.space, from.offset, p->at->host,
                               p->map.host.counts, from.bytes)
                    : PS_OK;
}

/* ---- a layer's ops --------------------------------------------------------------------------- */

/* Whether the running layer is on the host: the embedding, unless its table is on the device. */
static bool on_host(const builder *b) { return b->layer == 0 && !ps__gen_looks_up_there(b->p); }

/* A block's input and output are the two residual streams; the first one is what an embedding on
 * the device makes. */
static ps_access tensor_of(const builder *b, const ps__layer_def *d, ps__sym y, uint32_t rows) {
  const ps__gen_plan *p = b->p;
  const bool block = ps__is_block(p->model, b->layer), host = on_host(b);
  const uint64_t bytes = ps__gen_tensor_bytes(d, y.id, rows) - y.skip;
  if (block && y.id == d->input)
    return (ps_access){p->at->dev[0].place, y.mode, p->map.device.x[b->x] + y.skip, bytes};
  if (ps__in(d->carried, y.id))
    return (ps_access){
        p->at->dev[0].place, y.mode,
        p->map.device.carried + ps__gen_carried_offset(p, d->tensor[y.id].carried) + y.skip, bytes};
  if ((block || (b->layer == 0 && !host)) && y.id == d->output)
    return (ps_access){p->at->dev[0].place, y.mode, p->map.device.x[block && !b->x] + y.skip,
                       bytes};
  return (ps_access){host ? p->at->host : p->at->dev[0].place, y.mode,
                     (host ? p->map.host.tensors : p->map.device.tensors) +
                         ps__gen_tensor_offset(p, d, y.id) + y.skip,
                     bytes};
}

static ps_status batch_of(const builder *b, ps__sym y, uint32_t rows, ps_access *out) {
  const ps__gen_plan *p = b->p;
  const ps__gen_batch *batch = &p->map.batch;
  const bool host = on_host(b);
  uint64_t at;
  switch (y.id) {
  case PS__BATCH_TOKENS: at = batch->tokens; break;
  case PS__BATCH_DOC_START: at = batch->sequence; break;
  case PS__BATCH_POSITION: at = batch->position; break;
  default: return ps__fail(PS_EINTERNAL, "an op of generation asks for field %u of a batch", y.id);
  }
  *out = (ps_access){host ? p->at->host : p->at->dev[0].place, PS_READ,
                     (host ? p->map.host.batch : p->map.device.batch) + at, 4ull * rows};
  return PS_OK;
}

/* What the layer's rows chose comes to the cache. */
static ps_status add_fetch(builder *b, const ps__layer_def *d, uint32_t rows) {
  const ps__gen_plan *p = b->p;
  const ps__gen_experts *x = &p->experts;
  const ps_model_config *c = &p->model->cfg;
  const ps__gen_at from[2] = {ps__gen_experts_at(p, b->layer, 0),
                              ps__gen_experts_at(p, b->layer, 1)};
  const ps__args_moe_fetch args = {.n_tokens = rows,
                                   .n_used = c->n_experts_used,
                                   .n_experts = c->n_experts,
                                   .n_slots = x->n_slots,
                                   .bytes = {x->bytes[0], x->bytes[1]}};
  ps_access access[8] = {tensor_of(b, d, PS__R((uint8_t)d->expert_ids), rows),
                         {0},
                         table_of(b, true),
                         counts_of(b, p->block[b->layer - 1].index, 1, PS_READ_WRITE),
                         {from[0].space, PS_READ, from[0].offset, c->n_experts * x->bytes[0]},
                         slots_of(b, 0, PS_READ_WRITE),
                         {from[1].space, PS_READ, from[1].offset, c->n_experts * x->bytes[1]},
                         slots_of(b, 1, PS_READ_WRITE)};
  PS_TRY(batch_of(b, PS__B(PS__BATCH_POSITION), rows, &access[1]));
  return add(b, &ps__k_moe_fetch, p->at->dev[0].compute, &args, sizeof args, access, 8);
}

static ps_status add_op(builder *b, const ps__layer_def *d, const ps__op_def *op, uint32_t rows) {
  const ps__gen_plan *p = b->p;
  _Alignas(16) char args[PS__ARGS_BYTES];
  ps_access access[PS_MAX_ACCESSES];
  uint32_t n = 0, args_bytes = op->args_bytes;
  const ps_kernel *k = ps__gen_op(op, rows, args);
  const bool cached = k->info->from_slots && fetches(b) && p->block[b->layer - 1].streamed;
  if (cached && b->products == 0)
    PS_TRY(add_fetch(b, d, rows));
  for (uint32_t i = 0; i < op->n_syms; i++) {
    const ps__sym y = op->sym[i];
    if (ps__sym_is_tensor(y) && d->tensor[y.id].rows == PS__ROWS_STATE)
      continue; /* the cache has it */
    if (ps__sym_is_tensor(y))
      access[n] = tensor_of(b, d, y, rows);
    else if (y.kind == PS__SYM_PARAM && cached)
      access[n] = slots_of(b, b->products, PS_READ);
    else if (y.kind == PS__SYM_PARAM)
      access[n] = weights_of(b, &d->span[y.id]);
    else if (y.kind == PS__SYM_BATCH)
      PS_TRY(batch_of(b, y, rows, &access[n]));
    else
      return ps__fail(PS_EINTERNAL, "op %s of generation writes a gradient", k->name);
    n++;
  }
  if (k->info->cache_bytes) {
    const ps__sym position = PS__B(PS__BATCH_POSITION);
    const uint64_t bytes = ps__gen_cache_bytes(p, op);
    PS_TRY(batch_of(b, position, rows, &access[n++]));
    access[n++] = (ps_access){place_of(b), PS_READ_WRITE, p->map.device.cache + b->cached, bytes};
    b->cached += bytes;
  }
  if (cached) {
    ps__args_grouped_slots of_slots = {.n_slots = p->experts.n_slots};
    memcpy(&of_slots.product, args, sizeof of_slots.product);
    memcpy(args, &of_slots, args_bytes = sizeof of_slots);
    k = k->info->from_slots;
    access[n++] = table_of(b, false);
    b->products++;
  }
  return add(b, k, on_host(b) ? p->at->host_ops : p->at->dev[0].compute, args, args_bytes, access,
             n);
}

static ps_status add_layer(builder *b, uint32_t rows) {
  const ps__layer_def *d = ps__layer_of(b->p->model, b->layer);
  b->products = 0;
  b->cached = ps__is_block(b->p->model, b->layer) ? ps__gen_cache_offset(b->p, b->layer) : 0;
  PS_TRY(dequantize_layer(b, b->layer));
  for (uint32_t i = 0, n = ps__gen_n_ops(d); i < n; i++)
    PS_TRY(add_op(b, d, &d->fwd[i], rows));
  return PS_OK;
}

/* ---- the step -------------------------------------------------------------------------------- */

static ps_status add_input(builder *b) {
  const ps__gen_plan *p = b->p;
  const ps__gen_map *m = &p->map;
  const ps__layer_def *d = ps__layer_of(p->model, 0);
  const ps_access fill[] = {{p->at->host, PS_READ, m->host.state, 64},
                            {p->at->host, PS_WRITE, m->host.batch, m->batch.bytes}};
  PS_TRY(forget_overwritten(b));
  for (uint32_t i = 0; i < PS__GEN_SLOTS; i++)
    PS_TRY(stream_next(b));
  PS_TRY(add_hook(b, PS__GEN_FILL, fill));
  if (on_host(b))
    PS_TRY(add_layer(b, b->rows));
  PS_TRY(add_copy(b, p->at->dev[0].to_device, p->at->host, m->host.batch + m->batch.for_device,
                  p->at->dev[0].place, m->device.batch + m->batch.for_device,
                  m->batch.bytes - m->batch.for_device));
  if (!on_host(b))
    return add_layer(b, b->rows);
  const uint32_t y = (uint32_t)d->output;
  return add_copy(b, p->at->dev[0].to_device, p->at->host,
                  m->host.tensors + ps__gen_tensor_offset(p, d, y), p->at->dev[0].place,
                  m->device.x[0], ps__gen_tensor_bytes(d, y, b->rows));
}

static ps_status add_output(builder *b) {
  const ps__gen_plan *p = b->p;
  const ps__gen_map *m = &p->map;
  const ps__layer_def *d = ps__layer_of(p->model, b->layer);
  const uint32_t n = p->rows[1], x = (uint32_t)d->input, z = (uint32_t)d->logits;
  const uint64_t row = d->tensor[x].row_bytes, logits = ps__gen_tensor_bytes(d, z, n),
                 at = m->device.tensors + ps__gen_tensor_offset(p, d, z);
  const ps__args_embed pick = ps__gen_pick(p, b->rows);
  const ps_access access[] = {
      {p->at->dev[0].place, PS_READ, m->device.batch + m->batch.out, 4ull * n},
      {p->at->dev[0].place, PS_READ, m->device.x[b->x], b->rows * row},
      {p->at->dev[0].place, PS_WRITE, m->device.tensors + ps__gen_tensor_offset(p, d, x), n * row}};
  PS_TRY(add(b, &ps__k_embed_fwd, p->at->dev[0].compute, &pick, sizeof pick, access, 3));
  PS_TRY(add_layer(b, n));
  PS_TRY(add_copy(b, p->at->dev[0].to_host, p->at->dev[0].place, at, p->at->host, m->host.logits,
                  logits));
  PS_TRY(copy_counts(b));
  const ps_access sample[] = {{p->at->host, PS_READ, m->host.logits, logits},
                              {p->at->host, PS_READ_WRITE, m->host.state, 64}};
  return add_hook(b, PS__GEN_SAMPLE, sample);
}

static ps_status build(builder *b) {
  const ps__gen_plan *p = b->p;
  PS_TRY(add_input(b));
  for (b->layer = 1; b->layer <= p->report.n_blocks; b->layer++) {
    PS_TRY(add_layer(b, b->rows));
    b->x = !b->x;
    if (p->block[b->layer - 1].streamed)
      PS_TRY(stream_next(b));
  }
  return add_output(b);
}

/* Training has overwritten the caches: they have nothing, and nothing is counted. */
static ps_status empty_caches(builder *b) {
  const ps__gen_plan *p = b->p;
  const uint64_t end = p->map.device.counts + 16ull * p->experts.n_blocks;
  const ps__args_fill fill = {end - p->map.device.tables};
  const ps_access access = {place_of(b), PS_WRITE, p->map.device.tables, fill.bytes};
  return p->experts.n_slots
             ? add(b, &ps__k_fill_zero, p->at->dev[0].compute, &fill, sizeof fill, &access, 1)
             : PS_OK;
}

/* The head's weights and the blocks' that stay; of a tied head also the embedding's table. */
static ps_status build_load(builder *b) {
  const ps__gen_plan *p = b->p;
  const uint32_t head = ps__head_layer(p->model);
  PS_TRY(empty_caches(b));
  for (uint32_t l = 1; l <= head; l++)
    PS_TRY(copy_layer(b, l, false));
  return ps__tied(p->model) ? copy_unit(b, head, 0) : PS_OK;
}

ps_status ps__gen_program(ps_program **out, const ps__gen_plan *p, uint32_t program,
                          ps__gen_hooks *hooks) {
  const bool load = program == PS__GEN_LOAD;
  builder b = {.p = p, .hooks = hooks, .program = program, .rows = load ? 0 : p->rows[program]};
  PS_TRY(ps_program_create(&b.out, p->at->n_places, p->at->n_streams));
  const ps_status st = load ? build_load(&b) : build(&b);
  if (st == PS_OK && b.n_ops) {
    *out = b.out;
    return PS_OK;
  }
  ps_program_destroy(b.out);
  if (st == PS_OK)
    *out = NULL;
  return st;
}

ps_status ps__gen_compile(ps__gen_setup *s) {
  for (uint32_t i = 0; i < PS__GEN_PROGRAMS; i++) {
    ps_program *program = NULL;
    if (i == PS__GEN_LOAD && !s->plan.beside.weights)
      continue;
    PS_TRY(ps__gen_program(&program, &s->plan, i, &s->hooks));
    const ps_status st = program ? ps_schedule_compile(&s->schedule[i], program) : PS_OK;
    ps_program_destroy(program);
    PS_TRY(st);
  }
  return PS_OK;
}

void ps__gen_setup_free(ps__gen_setup *s) {
  for (uint32_t i = 0; i < PS__GEN_PROGRAMS; i++) {
    (void)ps_schedule_destroy(s->schedule[i]);
    s->schedule[i] = NULL;
  }
  ps__gen_plan_free(&s->plan);
}
