/* program.c - a step of generation as a program of the engine.
 *
 *   io, host   fill the batch, look the tokens up in the embedding
 *   h2d        the first streamed blocks; batch and rows; the other streamed blocks, each as soon
 *              as the block two before it has computed
 *   compute    the blocks, the rows that logits are made of, the head
 *   d2h, host  logits, the next tokens
 * The engine derives the waits. So the next step's first streamed blocks come in while this step
 * computes its last blocks, and while its tokens are drawn. */
#include "generate/generate.h"
#include <string.h>

typedef struct builder {
  const ps__gen_plan *p;
  ps_program *out;
  ps__gen_hooks *hooks;
  uint32_t program, rows; /* of the step */
  uint32_t streamed;      /* streamed blocks whose copies have been added */
  uint32_t layer, x;      /* the layer whose ops are added; which residual stream has its input */
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

static uint32_t n_streamed(const ps__gen_plan *p) {
  return p->report.n_blocks - p->report.n_resident;
}
static uint64_t slot_at(const ps__gen_plan *p, uint32_t i) {
  return p->map.device.slot + i % PS__GEN_SLOTS * p->report.block_bytes;
}

/* The copy of the next streamed block, unless all have been added. */
static ps_status stream_next(builder *b) {
  const ps__gen_plan *p = b->p;
  if (b->streamed == n_streamed(p))
    return PS_OK;
  const uint32_t i = b->streamed++;
  return add_copy(b, p->at->to_device, p->at->host,
                  p->map.host.streamed + i * p->report.block_bytes, p->at->device, slot_at(p, i),
                  p->report.block_bytes);
}

static ps_access weights_of(const builder *b, const ps__span_def *span) {
  const ps__gen_plan *p = b->p;
  const size_t e = ps_dtype_bytes(p->model->dt);
  uint32_t space;
  uint64_t at = ps__gen_layer_at(p, b->layer, &space);
  if (b->layer && space == p->at->host) { /* a streamed block: in its slot */
    at = slot_at(p, b->layer - 1 - ps__gen_before(p, b->layer - 1));
    space = p->at->device;
  }
  const uint32_t unit = ps__unit_of_span(p->model, b->layer, span);
  return (ps_access){space, PS_READ, at + ps__gen_unit_offset(p, b->layer, unit) + span->offset * e,
                     span->n * e};
}

/* ---- a layer's ops --------------------------------------------------------------------------- */

/* Tensors of the embedding are on the host. A block's input and output are the two residual
 * streams. */
static ps_access tensor_of(const builder *b, const ps__layer_def *d, ps__sym y, uint32_t rows) {
  const ps__gen_plan *p = b->p;
  const bool host = b->layer == 0, block = ps__is_block(p->model, b->layer);
  uint64_t at;
  if (block && y.id == d->input)
    at = p->map.device.x[b->x];
  else if (block && y.id == d->output)
    at = p->map.device.x[!b->x];
  else
    at = (host ? p->map.host.tensors : p->map.device.tensors) + ps__gen_tensor_offset(p, d, y.id);
  return (ps_access){host ? p->at->host : p->at->device, y.mode, at + y.skip,
                     ps__gen_tensor_bytes(d, y.id, rows) - y.skip};
}

static ps_status batch_of(const builder *b, ps__sym y, uint32_t rows, ps_access *out) {
  const ps__gen_plan *p = b->p;
  const ps__gen_batch *batch = &p->map.batch;
  const bool host = b->layer == 0;
  uint64_t at;
  switch (y.id) {
  case PS__BATCH_TOKENS: at = batch->tokens; break;
  case PS__BATCH_DOC_START: at = batch->sequence; break;
  case PS__BATCH_POSITION: at = batch->position; break;
  default: return ps__fail(PS_EINTERNAL, "an op of generation asks for field %u of a batch", y.id);
  }
  *out = (ps_access){host ? p->at->host : p->at->device, PS_READ,
                     (host ? p->map.host.batch : p->map.device.batch) + at, 4ull * rows};
  return PS_OK;
}

static ps_status add_op(builder *b, const ps__layer_def *d, const ps__op_def *op, uint32_t rows) {
  const ps__gen_plan *p = b->p;
  _Alignas(16) char args[PS__ARGS_BYTES];
  ps_access access[PS_MAX_ACCESSES];
  uint32_t n = 0;
  const ps_kernel *k = ps__gen_op(op, rows, args);
  for (; n < op->n_syms; n++) {
    const ps__sym y = op->sym[n];
    if (ps__sym_is_tensor(y))
      access[n] = tensor_of(b, d, y, rows);
    else if (y.kind == PS__SYM_PARAM)
      access[n] = weights_of(b, &d->span[y.id]);
    else if (y.kind == PS__SYM_BATCH)
      PS_TRY(batch_of(b, y, rows, &access[n]));
    else
      return ps__fail(PS_EINTERNAL, "op %s of generation writes a gradient", k->name);
  }
  if (k->info->caches) {
    const uint64_t bytes = p->report.cache_bytes / p->report.n_blocks;
    const ps__sym position = PS__B(PS__BATCH_POSITION);
    PS_TRY(batch_of(b, position, rows, &access[n++]));
    access[n++] = (ps_access){p->at->device, PS_READ_WRITE,
                              p->map.device.cache + (b->layer - 1) * bytes, bytes};
  }
  return add(b, k, b->layer ? p->at->compute : p->at->host_ops, args, op->args_bytes, access, n);
}

static ps_status add_layer(builder *b, uint32_t rows) {
  const ps__layer_def *d = ps__layer_of(b->p->model, b->layer);
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
  for (uint32_t i = 0; i < PS__GEN_SLOTS; i++)
    PS_TRY(stream_next(b));
  PS_TRY(add_hook(b, PS__GEN_FILL, fill));
  PS_TRY(add_layer(b, b->rows));
  PS_TRY(add_copy(b, p->at->to_device, p->at->host, m->host.batch + m->batch.for_device,
                  p->at->device, m->device.batch + m->batch.for_device,
                  m->batch.bytes - m->batch.for_device));
  const uint32_t y = (uint32_t)d->output;
  return add_copy(b, p->at->to_device, p->at->host,
                  m->host.tensors + ps__gen_tensor_offset(p, d, y), p->at->device, m->device.x[0],
                  ps__gen_tensor_bytes(d, y, b->rows));
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
      {p->at->device, PS_READ, m->device.batch + m->batch.out, 4ull * n},
      {p->at->device, PS_READ, m->device.x[b->x], b->rows * row},
      {p->at->device, PS_WRITE, m->device.tensors + ps__gen_tensor_offset(p, d, x), n * row}};
  PS_TRY(add(b, &ps__k_embed_fwd, p->at->compute, &pick, sizeof pick, access, 3));
  PS_TRY(add_layer(b, n));
  PS_TRY(add_copy(b, p->at->to_host, p->at->device, at, p->at->host, m->host.logits, logits));
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
    if (!ps__gen_is_resident(p, b->layer - 1))
      PS_TRY(stream_next(b));
  }
  return add_output(b);
}

ps_status ps__gen_program(ps_program **out, const ps__gen_plan *p, uint32_t program,
                          ps__gen_hooks *hooks) {
  builder b = {.p = p, .hooks = hooks, .program = program, .rows = p->rows[program]};
  PS_TRY(ps_program_create(&b.out, p->at->n_places, p->at->n_streams));
  const ps_status st = build(&b);
  if (st != PS_OK)
    ps_program_destroy(b.out);
  else
    *out = b.out;
  return st;
}
