/* memory.c - what generation takes of both memories, and where everything lies. */
#include "generate/generate.h"
#include "hardware/hardware_impl.h"
#include <string.h>

enum { ALIGN = 256 };
static uint64_t aligned(uint64_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }
static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* ---- weights --------------------------------------------------------------------------------- */

/* BYTES that generation keeps of a unit: none where the unit is on the device anyway. */
static uint64_t unit_bytes(const ps__gen_plan *p, uint32_t unit) {
  return ps__gen_is_moved(p, unit)
             ? aligned(ps__stored_bytes(ps__gen_storage(p, unit), p->model->unit[unit].n))
             : 0;
}

/* From the layer's first unit up to @end. */
static uint64_t dense_before(const ps__gen_plan *p, uint32_t layer, uint32_t end) {
  uint64_t at = 0;
  for (uint32_t u = p->model->layer[layer].first_unit; u < end; u++)
    if (p->model->unit[u].base)
      at += aligned(ps__stored_bytes(ps__weight_storage(p->model), p->model->unit[u].n));
  return at;
}

ps__gen_at ps__gen_dense(const ps__gen_plan *p, uint32_t layer, uint32_t unit) {
  return (ps__gen_at){p->at->dev[0].place, p->map.device.dense + dense_before(p, layer, unit)};
}

uint64_t ps__gen_dense_bytes(const ps__gen_plan *p, uint32_t layer) {
  const ps__layer *l = &p->model->layer[layer];
  return dense_before(p, layer, l->first_unit + l->n_units);
}

/* Experts on demand lie apart from their layer's other units. */
static bool is_apart(const ps__gen_plan *p, uint32_t layer, uint32_t unit) {
  return p->experts.n_slots && unit == ps__gen_experts_unit(p, layer);
}

/* From the layer's first byte on. A tied head has the embedding's unit after its own. */
static uint64_t unit_offset(const ps__gen_plan *p, uint32_t layer, uint32_t unit) {
  const ps__layer *l = &p->model->layer[layer];
  const uint32_t end = unit < l->first_unit ? l->first_unit + l->n_units : unit;
  uint64_t at = 0;
  for (uint32_t u = l->first_unit; u < end && !is_apart(p, layer, unit); u++)
    at += is_apart(p, layer, u) ? 0 : unit_bytes(p, u);
  return at;
}

bool ps__gen_streams(const ps__gen_plan *p, uint32_t layer, uint32_t unit) {
  return ps__is_block(p->model, layer) && p->block[layer - 1].streamed &&
         (!p->experts.n_slots || is_apart(p, layer, unit));
}

/* BYTES of what a streamed block copies: its experts, or all of it. */
static uint64_t streamed_stride(const ps__gen_plan *p) {
  return p->experts.n_slots ? p->experts.unit_bytes : p->report.block_bytes;
}

/* Without experts that lie apart. */
static uint64_t layer_bytes(const ps__gen_plan *p, uint32_t layer) {
  const ps__layer *l = &p->model->layer[layer];
  const bool tied = layer == ps__head_layer(p->model) && ps__tied(p->model);
  return unit_offset(p, layer, l->first_unit + l->n_units) + (tied ? unit_bytes(p, 0) : 0);
}

ps__gen_at ps__gen_weights(const ps__gen_plan *p, uint32_t layer, uint32_t unit) {
  if (!ps__gen_is_moved(p, unit) || (layer == 0 && p->beside.weights))
    return p->beside.weights[unit];
  if (layer == 0)
    return (ps__gen_at){p->at->host, p->map.host.embedding};
  ps__gen_at at = {p->at->dev[0].place, unit_offset(p, layer, unit)};
  const ps__gen_block *b = &p->block[layer - 1];
  if (layer == ps__head_layer(p->model))
    at.offset += p->map.device.head;
  else if (ps__gen_streams(p, layer, unit))
    at.offset += p->map.device.buffer + b->index % PS__GEN_SLOTS * streamed_stride(p);
  else
    at.offset += p->map.device.resident + b->stays;
  return at;
}

ps__gen_at ps__gen_source(const ps__gen_plan *p, uint32_t layer, uint32_t unit) {
  if (p->beside.weights)
    return p->beside.weights[unit];
  return (ps__gen_at){p->at->host, p->map.host.streamed +
                                       p->block[layer - 1].index * streamed_stride(p) +
                                       unit_offset(p, layer, unit)};
}

ps__gen_at ps__gen_experts_at(const ps__gen_plan *p, uint32_t layer, uint32_t i) {
  const ps__span_def *span = ps__gen_experts_span(ps__layer_of(p->model, layer), i);
  ps__gen_at at = ps__gen_source(p, layer, ps__gen_experts_unit(p, layer));
  at.offset += ps__stored_at(ps__weight_storage(p->model), span->offset);
  return at;
}

/* ---- ops and tensors ------------------------------------------------------------------------- */

const ps_kernel *ps__gen_op(const ps__op_def *op, uint32_t rows, void *args) {
  const ps_kernel *k =
      op->kernel->info->in_generation ? op->kernel->info->in_generation : op->kernel;
  const ps__chunk_shape shape = {.n_tokens = rows, .first_grad = true};
  memcpy(args, op->args, op->args_bytes);
  k->info->bind(args, &shape);
  return k;
}

uint32_t ps__gen_n_ops(const ps__layer_def *d) {
  for (uint32_t i = 0; i < d->n_fwd && d->logits != PS__NONE; i++)
    if (ps__uses(&d->fwd[i], d->logits, PS_WRITE))
      return i + 1;
  return d->n_fwd;
}

uint64_t ps__gen_tensor_bytes(const ps__layer_def *d, uint32_t t, uint32_t rows) {
  const uint32_t kind = d->tensor[t].rows;
  return d->tensor[t].row_bytes * (kind == PS__ROWS_STATE ? 0 : kind == PS__ROWS_ONE ? 1 : rows);
}

static uint32_t most_rows(const ps__gen_plan *p) {
  return (uint32_t)larger(p->rows[0], p->rows[1]);
}
static uint32_t layer_rows(const ps__gen_plan *p, const ps__layer_def *d) {
  return d->logits != PS__NONE ? p->rows[1] : most_rows(p);
}

uint64_t ps__gen_tensor_offset(const ps__gen_plan *p, const ps__layer_def *d, uint32_t t) {
  const uint32_t n = ps__gen_n_ops(d), rows = layer_rows(p, d);
  uint64_t at = 0;
  for (uint32_t i = 0; i < t; i++) {
    bool used = false;
    for (uint32_t k = 0; k < n; k++)
      used |= ps__uses(&d->fwd[k], (int)i, PS_READ_WRITE);
    at += used && !ps__in(d->carried, i) ? aligned(ps__gen_tensor_bytes(d, i, rows)) : 0;
  }
  return at;
}

ps__args_embed ps__gen_pick(const ps__gen_plan *p, uint32_t rows) {
  const ps__layer_def *head = ps__layer_of(p->model, ps__head_layer(p->model));
  return (ps__args_embed){
      .n_tokens = p->rows[1],
      .vocab = rows,
      .dim = (uint32_t)(head->tensor[head->input].row_bytes / ps_dtype_bytes(p->model->dt)),
      .dt = p->model->dt,
      .pad = -1};
}

/* ---- scratch --------------------------------------------------------------------------------- */

static void need_scratch(ps__gen_plan *p, uint32_t stream, const ps_kernel *k, const void *args) {
  const ps__scratch_target target = {.deterministic = p->cfg.deterministic != 0,
                                     .cudnn_version = p->hw.cudnn_version};
  const uint32_t backend =
      ps__stream_on_host(p->at, stream) ? (uint32_t)PS_BACKEND_CPU : p->hw.backend;
  p->scratch_bytes[stream] =
      larger(p->scratch_bytes[stream], ps__op_scratch(k, backend, args, &target));
}

static void count_scratch(ps__gen_plan *p) {
  for (uint32_t program = 0; program < 2; program++) {
    const ps__args_embed pick = ps__gen_pick(p, p->rows[program]);
    need_scratch(p, p->at->dev[0].compute, &ps__k_embed_fwd, &pick);
    for (uint32_t l = 0; l < p->model->n_layers; l++) {
      const ps__layer_def *d = ps__layer_of(p->model, l);
      for (uint32_t i = 0, n = ps__gen_n_ops(d); i < n; i++) {
        _Alignas(16) char args[PS__ARGS_BYTES];
        const ps_kernel *k =
            ps__gen_op(&d->fwd[i], d->logits != PS__NONE ? p->rows[1] : p->rows[program], args);
        need_scratch(p, l || ps__gen_looks_up_there(p) ? p->at->dev[0].compute : p->at->host_ops, k,
                     args);
      }
    }
  }
}

/* ---- both maps ------------------------------------------------------------------------------- */

static uint64_t take(uint64_t *end, uint64_t bytes) {
  const uint64_t at = *end;
  *end += aligned(bytes);
  return at;
}

static void place_batch(ps__gen_plan *p) {
  ps__gen_batch *b = &p->map.batch;
  const uint64_t rows = 4ull * most_rows(p);
  b->tokens = take(&b->bytes, rows);
  b->sequence = take(&b->bytes, rows);
  b->for_device =
      ps__gen_looks_up_there(p) || p->model->cfg.per_layer_dim ? b->tokens : b->sequence;
  b->position = take(&b->bytes, rows);
  b->out = take(&b->bytes, 4ull * p->rows[1]);
}

uint64_t ps__gen_cache_bytes(const ps__gen_plan *p, const ps__op_def *op) {
  _Alignas(16) char args[PS__ARGS_BYTES];
  const ps_kernel *k = ps__gen_op(op, 1, args);
  return k->info->cache_bytes ? aligned(p->cfg.n_sequences * k->info->cache_bytes(args)) : 0;
}

/* Whether @op leaves something to the next chunk, whose size no sequence's length changes. */
static bool has_state(const ps__layer_def *d, const ps__op_def *op) {
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (d->tensor[t].rows == PS__ROWS_STATE && ps__uses(op, (int)t, PS_WRITE))
      return true;
  return false;
}

/* Of a block's ops, in whose order they lie; 0 where they are another block's. */
static uint64_t caches_of(const ps__gen_plan *p, uint32_t layer) {
  const ps__layer_def *d = ps__layer_of(p->model, layer);
  uint64_t bytes = 0;
  for (uint32_t i = 0, n = ps__gen_n_ops(d); i < n; i++)
    bytes += ps__gen_cache_bytes(p, &d->fwd[i]);
  return p->model->cfg.layer_flags[layer - 1] & PS_LAYER_SHARED_KV ? 0 : bytes;
}

uint64_t ps__gen_cache_offset(const ps__gen_plan *p, uint32_t layer) {
  const uint32_t of = ps__kv_source(&p->model->cfg, layer - 1) + 1;
  uint64_t at = 0;
  for (uint32_t l = 1; l < of; l++)
    at += caches_of(p, l);
  return at;
}

uint64_t ps__gen_carried_offset(const ps__gen_plan *p, uint32_t carried) {
  uint64_t bytes[PS__N_CARRIED] = {0}, at = 0;
  for (uint32_t of = 0; of < p->model->n_defs; of++) {
    const ps__layer_def *d = p->model->def[of];
    for (uint32_t i = 0; i < d->n_fwd; i++)
      for (uint32_t k = 0; k < d->fwd[i].n_syms; k++) {
        const ps__sym y = d->fwd[i].sym[k];
        if (ps__sym_is_tensor(y) && ps__in(d->carried, y.id))
          bytes[d->tensor[y.id].carried] = aligned(ps__gen_tensor_bytes(d, y.id, most_rows(p)));
      }
  }
  for (uint32_t i = 0; i < carried; i++)
    at += bytes[i];
  return at;
}

static void count_caches(ps__gen_plan *p, uint32_t layer) {
  const ps__layer_def *d = ps__layer_of(p->model, layer);
  if (!caches_of(p, layer))
    return;
  for (uint32_t i = 0, n = ps__gen_n_ops(d); i < n; i++) {
    const uint64_t bytes = ps__gen_cache_bytes(p, &d->fwd[i]);
    p->report.cache_bytes += bytes;
    p->report.state_bytes += has_state(d, &d->fwd[i]) ? bytes : 0;
  }
}

static void measure(ps__gen_plan *p) {
  const ps_model *m = p->model;
  ps_generate_report *r = &p->report;
  r->n_blocks = m->n_layers - 2;
  r->head_bytes = layer_bytes(p, ps__head_layer(m));
  r->weights_bytes = r->head_bytes;
  for (uint32_t l = 1; l <= r->n_blocks; l++) {
    r->block_bytes = larger(r->block_bytes, layer_bytes(p, l));
    r->weights_bytes += layer_bytes(p, l);
    p->n_moved += layer_bytes(p, l) > 0;
    p->n_ops += ps__gen_n_ops(ps__layer_of(m, l));
    p->dense_bytes += ps__gen_dense_bytes(p, l);
    r->dense_bytes = larger(r->dense_bytes, ps__gen_dense_bytes(p, l));
    count_caches(p, l);
  }
  for (uint32_t l = 0; l < m->n_layers; l++) {
    const ps__layer_def *d = ps__layer_of(m, l);
    if (d->output != PS__NONE)
      p->map.x_bytes = larger(p->map.x_bytes,
                              aligned(ps__gen_tensor_bytes(d, (uint32_t)d->output, most_rows(p))));
  }
}

/* Everything but the blocks' weights, which are last in both spaces. */
static void place(ps__gen_plan *p) {
  const ps_model *m = p->model;
  const ps__layer_def *head = ps__layer_of(m, ps__head_layer(m)), *first = ps__layer_of(m, 0);
  ps__gen_map *map = &p->map;
  const uint64_t drawn = (uint64_t)p->hw.n_threads * m->cfg.vocab_size;
  uint64_t tensors = 0;
  place_batch(p);
  map->device.bytes = aligned(p->beside.used[p->at->dev[0].place]);
  map->host.bytes = aligned(p->beside.used[p->at->host]);
  for (uint32_t l = ps__gen_looks_up_there(p) ? 0 : 1; l < m->n_layers; l++)
    tensors = larger(tensors,
                     ps__gen_tensor_offset(p, ps__layer_of(m, l), ps__layer_of(m, l)->n_tensors));
  map->device.batch = take(&map->device.bytes, map->batch.bytes);
  for (uint32_t i = 0; i < 2; i++)
    map->device.x[i] = take(&map->device.bytes, map->x_bytes);
  map->device.tensors = take(&map->device.bytes, tensors);
  map->device.carried = take(&map->device.bytes, ps__gen_carried_offset(p, PS__N_CARRIED));
  p->report.activation_bytes = map->device.bytes - aligned(p->beside.used[p->at->dev[0].place]);
  map->device.cache = take(&map->device.bytes, p->report.cache_bytes);
  map->device.dense = take(&map->device.bytes, p->report.dense_bytes);
  map->device.head = take(&map->device.bytes, p->report.head_bytes);
  map->host.batch = take(&map->host.bytes, map->batch.bytes);
  map->host.tensors = take(&map->host.bytes, ps__gen_tensor_offset(p, first, first->n_tensors));
  map->host.logits =
      take(&map->host.bytes, ps__gen_tensor_bytes(head, (uint32_t)head->logits, p->rows[1]));
  map->host.state = take(&map->host.bytes, 64);
  map->host.drawn = take(&map->host.bytes, 4 * p->cfg.n_sequences * p->cfg.context);
  map->host.values = take(&map->host.bytes, drawn * sizeof(float));
  map->host.candidates = take(&map->host.bytes, drawn * sizeof(ps__gen_candidate));
  if (!p->beside.weights)
    map->host.embedding = take(&map->host.bytes, layer_bytes(p, 0));
}

/* The device's arena with @kept of the blocks that are moved. */
static uint64_t with_blocks(const ps__gen_plan *p, uint32_t kept) {
  const uint32_t slots = kept == p->n_moved ? 0 : (uint32_t)PS__GEN_SLOTS;
  return ps__arena_round(p->map.device.bytes + (uint64_t)(kept + slots) * p->report.block_bytes);
}

/* All that the device holds with so many blocks kept: the others are in the host's arena. Beside a
 * training it is the arena alone. */
static uint64_t device_bytes(const ps__gen_plan *p, uint32_t kept) {
  const uint64_t streamed = (p->n_moved - kept) * p->report.block_bytes,
                 arena = with_blocks(p, kept);
  return p->beside.weights ? arena
                           : arena + p->report.overhead_bytes +
                                 ps__page_table_bytes(&p->hw, p->map.host.bytes + streamed);
}

static ps_status refuse_device(const ps__gen_plan *p, uint64_t cap) {
  const ps_generate_report *r = &p->report;
  char need[32], given[32], act[32], cache[32], head[32], block[32], over[32], dense[64] = "";
  ps__format_bytes_apart(need, r->least_device_bytes, given, cap);
  if (r->dense_bytes)
    snprintf(dense, sizeof dense, "%s for a dequantized one, ",
             ps__format_bytes(over, r->dense_bytes));
  return ps__fail(
      PS_EBUDGET,
      "generation needs %s of device memory, %s given: %s for the head, 2 x %s for blocks, %s%s "
      "for "
      "the KV cache of %llu x %llu tokens, %s for %u rows, %s for kernels, libraries and page "
      "tables: raise %s, or lower %s, %s or %s",
      need, given, ps__format_bytes(head, r->head_bytes), ps__format_bytes(block, r->block_bytes),
      dense, ps__format_bytes(cache, r->cache_bytes), (unsigned long long)p->cfg.n_sequences,
      (unsigned long long)p->cfg.context, ps__format_bytes(act, r->activation_bytes), most_rows(p),
      ps__format_bytes(over, r->overhead_bytes), ps__field("device_mem_bytes"),
      ps__field("context"), ps__field("n_sequences"), ps__field("prefill_tokens"));
}

/* Those that stay are spread evenly over the blocks that are moved. */
static void spread_blocks(ps__gen_plan *p) {
  const uint32_t n = p->report.n_blocks;
  uint32_t moved = 0, streamed = 0, kept = 0;
  for (uint32_t b = 0; b < n; b++) {
    if (layer_bytes(p, b + 1) == 0)
      continue;
    const uint64_t before = (uint64_t)moved * p->n_kept / p->n_moved,
                   with = (uint64_t)++moved * p->n_kept / p->n_moved;
    const bool stays = with > before;
    p->block[b] =
        (ps__gen_block){!stays, stays ? 0 : streamed, stays ? kept * p->report.block_bytes : 0};
    *(stays ? &kept : &streamed) += 1;
    p->report.streamed_bytes += stays ? 0 : layer_bytes(p, b + 1);
  }
  p->report.n_resident = n - streamed;
}

static void place_blocks(ps__gen_plan *p) {
  ps_generate_report *r = &p->report;
  ps__gen_map *map = &p->map;
  const uint32_t streamed = p->n_moved - p->n_kept;
  map->device.resident = take(&map->device.bytes, p->n_kept * r->block_bytes);
  map->device.buffer = take(&map->device.bytes, streamed ? PS__GEN_SLOTS * r->block_bytes : 0);
  if (!p->beside.weights)
    map->host.streamed = take(&map->host.bytes, streamed * r->block_bytes);
  r->prefill_streamed_bytes = r->streamed_bytes;
}

/* ---- experts on demand ----------------------------------------------------------------------- */

/* Everything of the blocks but their experts. */
static uint64_t dense_bytes(const ps__gen_plan *p) {
  uint64_t bytes = 0;
  for (uint32_t l = 1; l <= p->report.n_blocks; l++)
    bytes += layer_bytes(p, l);
  return bytes;
}

/* The caches, or the buffers over them where those are larger. */
static uint64_t slots_bytes(const ps__gen_plan *p) {
  const ps__gen_experts *x = &p->experts;
  return larger(x->n_blocks * x->slots_bytes, ps__gen_buffer_bytes(p));
}

static void size_experts(ps__gen_plan *p, uint32_t n_slots) {
  ps__gen_size_slots(&p->experts, p, n_slots);
  for (uint32_t i = 0; i < 2; i++)
    p->experts.fetches[i] = n_slots >= ps__gen_least_slots(p, i);
}

/* All that the device holds with caches of @n_slots. */
static uint64_t with_slots(ps__gen_plan *p, uint32_t n_slots) {
  const ps__gen_experts *x = &p->experts;
  size_experts(p, n_slots);
  const uint64_t arena = p->map.device.bytes + aligned(dense_bytes(p)) +
                         x->n_blocks * x->table_bytes + aligned(16ull * x->n_blocks) +
                         slots_bytes(p);
  return p->beside.weights
             ? ps__arena_round(arena)
             : ps__arena_round(arena) + p->report.overhead_bytes +
                   ps__page_table_bytes(&p->hw, p->map.host.bytes + x->n_blocks * x->unit_bytes);
}

static ps_status refuse_slots(ps__gen_plan *p, uint32_t least, uint64_t cap) {
  char need[32], given[32];
  ps__format_bytes_apart(need, with_slots(p, least), given, cap);
  return ps__fail(
      PS_EBUDGET,
      "experts on demand need %u slots in each of %u blocks and so %s of device memory, "
      "%s given: raise %s, lower %s, or let %s be auto",
      least, p->experts.n_blocks, need, given, ps__field("device_mem_bytes"),
      ps__field("n_sequences"), ps__field("experts"));
}

/* Beside the arena: scratch, a piece of a tensor while it is loaded, programs, and what the process
 * has anyway. */
static uint64_t host_bytes(const ps__gen_plan *p, uint64_t arena) {
  return ps__arena_round(arena) + ps__host_scratch(&p->hw, p->at, p->scratch_bytes) +
         512ull * 64 * p->report.n_blocks + ps__host_reserve(&p->hw);
}

/* Whether the host has room for all experts. A training has them. */
static bool host_holds(const ps__gen_plan *p, uint64_t device) {
  if (p->beside.weights)
    return true;
  const uint64_t cap = p->cfg.host_mem_bytes, has = p->hw.host_memory_bytes,
                 need = host_bytes(p, p->map.host.bytes +
                                          p->experts.n_blocks * (p->experts.unit_bytes + ALIGN));
  return cap ? need <= cap : !has || need + (p->hw.backend == PS_BACKEND_CPU ? device : 0) <= has;
}

/* The largest caches that fit, where they make a decode step faster than blocks that are streamed
 * whole do. What the programs that do not fetch need has room in any case. */
static ps_status choose_experts(ps__gen_plan *p, uint64_t cap) {
  ps__gen_experts *x = &p->experts;
  const ps__gen_experts none = *x;
  const uint32_t asked = p->cfg.experts, all = p->model->cfg.n_experts;
  const bool must = asked == PS_EXPERTS_ON_DEMAND;
  if (must && !x->n_blocks)
    return ps__fail(PS_EINVAL, "%s is on-demand: the model has no experts: give auto",
                    ps__field("experts"));
  if (must && p->model->lora.base)
    return ps__fail(PS_EINVAL,
                    "%s is on-demand: experts of a quantized base are not fetched one by one: give "
                    "auto",
                    ps__field("experts"));
  if (p->model->lora.base || !x->n_blocks || asked == PS_EXPERTS_WHOLE || p->beside.pageable ||
      p->n_kept == p->n_moved)
    return PS_OK;
  const uint32_t least = ps__gen_least_slots(p, PS__GEN_DECODE);
  const ps__gen_step whole = ps__gen_predict(p, 0);
  uint32_t n = all;
  while (n >= least && with_slots(p, n) > cap)
    n--;
  if (n < least && must)
    return refuse_slots(p, least, cap);
  const ps__gen_step fetched = ps__gen_predict(p, n);
  const bool faster = whole.seconds > 0 ? fetched.seconds < whole.seconds
                                        : fetched.copied_bytes < whole.copied_bytes;
  if (n < least || (!must && !(faster && host_holds(p, with_slots(p, n)))))
    *x = none;
  else
    size_experts(p, n);
  return PS_OK;
}

static void place_experts(ps__gen_plan *p) {
  const ps__gen_experts *x = &p->experts;
  ps_generate_report *r = &p->report;
  ps__gen_map *map = &p->map;
  uint64_t at = 0;
  uint32_t streamed = 0;
  for (uint32_t b = 0; b < r->n_blocks; b++) {
    const bool sparse = ps__gen_experts_unit(p, b + 1) != PS__GEN_NO_UNIT;
    p->block[b] = (ps__gen_block){sparse, sparse ? streamed++ : 0, at};
    at += layer_bytes(p, b + 1);
  }
  map->device.resident = take(&map->device.bytes, at);
  map->device.tables = take(&map->device.bytes, x->n_blocks * x->table_bytes);
  map->device.counts = take(&map->device.bytes, 16ull * x->n_blocks);
  map->device.slots = map->device.buffer = take(&map->device.bytes, slots_bytes(p));
  map->host.counts = take(&map->host.bytes, 16ull * x->n_blocks);
  if (!p->beside.weights)
    map->host.streamed = take(&map->host.bytes, x->n_blocks * x->unit_bytes);
  r->n_resident = r->n_blocks - x->n_blocks;
  r->prefill_streamed_bytes = x->fetches[PS__GEN_PREFILL] ? 0 : x->n_blocks * x->unit_bytes;
}

/* As many blocks stay as fit; one or two blocks are never streamed, as they would take the room of
 * the buffers. Beside a training the arena is the limit, unless it is too small for the least. */
static ps_status choose(ps__gen_plan *p) {
  ps_generate_report *r = &p->report;
  const bool beside = p->beside.weights != NULL;
  uint64_t scratch, cap = ps__caps_of(&p->hw, p->cfg.device_mem_bytes, 0, 0).holds[PS__DEVICE_MEM];
  r->overhead_bytes =
      beside ? 0 : ps__device_overhead(&p->hw, false, p->at, p->scratch_bytes, &scratch);
  r->least_device_bytes = device_bytes(p, p->n_moved <= PS__GEN_SLOTS ? p->n_moved : 0);
  if (beside)
    cap = larger(ps__arena_round(p->beside.arena[p->at->dev[0].place]), r->least_device_bytes);
  p->n_kept = p->n_moved;
  while (cap && p->n_kept && device_bytes(p, p->n_kept) > cap)
    p->n_kept--;
  if (cap && (device_bytes(p, p->n_kept) > cap || r->least_device_bytes > cap))
    return refuse_device(p, cap);
  spread_blocks(p);
  const ps__gen_step whole = ps__gen_predict(p, 0);
  PS_TRY(choose_experts(p, cap));
  const ps__gen_step step = ps__gen_predict(p, p->experts.n_slots);
  if (p->experts.n_slots)
    place_experts(p);
  else
    place_blocks(p);
  if (!beside)
    r->overhead_bytes += ps__page_table_bytes(&p->hw, p->map.host.bytes);
  r->device_used_bytes = ps__arena_round(p->map.device.bytes) + r->overhead_bytes;
  r->weights_bytes = (uint64_t)step.read_bytes;
  r->streamed_bytes = (uint64_t)step.copied_bytes;
  r->decode_s = step.seconds;
  r->whole_decode_s = whole.seconds;
  r->n_experts = p->experts.n_blocks ? p->model->cfg.n_experts : 0;
  r->n_slots = p->experts.n_slots;
  r->expert_bytes = p->experts.bytes[0] + p->experts.bytes[1];
  return PS_OK;
}

/* On the CPU backend the device's memory is the host's, too. */
static ps_status check_machine(const ps__gen_plan *p) {
  const ps_generate_report *r = &p->report;
  const uint64_t has = p->hw.host_memory_bytes,
                 need = r->host_used_bytes +
                        (p->hw.backend == PS_BACKEND_CPU ? r->device_used_bytes : 0);
  char needs[32], there[32], cache[32];
  if (!has || need <= has)
    return PS_OK;
  ps__format_bytes_apart(needs, need, there, has);
  return ps__fail(PS_EBUDGET,
                  "generation needs %s of host memory, and the machine has %s: lower %s, "
                  "%s or %s (the KV cache of %llu x %llu tokens takes %s), or "
                  "take a machine with more memory",
                  needs, there, ps__field("context"), ps__field("n_sequences"),
                  ps__field("prefill_tokens"), (unsigned long long)p->cfg.n_sequences,
                  (unsigned long long)p->cfg.context, ps__format_bytes(cache, r->cache_bytes));
}

static ps_status check_host(ps__gen_plan *p) {
  const uint64_t cap = p->cfg.host_mem_bytes;
  char need[32], given[32], streamed[32], embedding[32];
  ps_generate_report *r = &p->report;
  r->host_used_bytes = host_bytes(p, p->map.host.bytes);
  if (!cap || r->host_used_bytes <= cap)
    return check_machine(p);
  ps__format_bytes_apart(need, r->host_used_bytes, given, cap);
  return ps__fail(
      PS_EBUDGET,
      "generation needs %s of host memory, %s given: %s for streamed blocks, %s for the "
      "embedding: raise %s, or raise %s so that fewer blocks are "
      "streamed",
      need, given,
      ps__format_bytes(streamed, p->experts.n_slots ? p->experts.n_blocks * p->experts.unit_bytes
                                                    : r->streamed_bytes),
      ps__format_bytes(embedding, layer_bytes(p, 0)), ps__field("host_mem_bytes"),
      ps__field("device_mem_bytes"));
}

/* ---- the configuration ----------------------------------------------------------------------- */

static ps_status check_config(ps__gen_plan *p) {
  ps_generate_config *c = &p->cfg;
  if (c->struct_bytes != sizeof *c)
    return ps__fail(PS_EINVAL, "ps_generate_config.struct_bytes is %u, not %zu", c->struct_bytes,
                    sizeof *c);
  if (c->dtype >= PS_N_DTYPES)
    return ps__fail(PS_EINVAL, "dtype %u is neither fp32 nor bf16", c->dtype);
  if (c->deterministic > 1)
    return ps__fail(PS_EINVAL, "deterministic is %u: 0 or 1 is needed", c->deterministic);
  if (c->init_weights > 1)
    return ps__fail(PS_EINVAL, "init_weights is %u: 0 or 1 is needed", c->init_weights);
  if (c->experts > PS_EXPERTS_ON_DEMAND)
    return ps__fail(PS_EINVAL, "%s is %u: 0 (auto), 1 (whole) or 2 (on-demand)",
                    ps__field("experts"), c->experts);
  if (!c->n_sequences || c->n_sequences > PS_MAX_SEQUENCES)
    return ps__fail(PS_EINVAL, "%llu sequences at once: 1 to %d are possible",
                    (unsigned long long)c->n_sequences, PS_MAX_SEQUENCES);
  if (!c->context || c->context > PS_MAX_ROWS)
    return ps__fail(PS_EINVAL, "a context of %llu tokens: 1 to %d are possible",
                    (unsigned long long)c->context, PS_MAX_ROWS);
  if (c->prefill_tokens > PS_MAX_ROWS)
    return ps__fail(PS_EINVAL, "prefill_tokens is %llu: at most %d is possible",
                    (unsigned long long)c->prefill_tokens, PS_MAX_ROWS);
  return PS_OK;
}

/* The training's units are those of the model, in its order. */
static ps_status check_units(const ps__gen_plan *p) {
  return !p->beside.weights || p->beside.n_units == p->model->n_units
             ? PS_OK
             : ps__fail(PS_EINTERNAL, "generation has %u units, the training %u", p->model->n_units,
                        p->beside.n_units);
}

static ps_status plan(ps__gen_plan *p, const ps_model_config *model) {
  const ps_generate_config *c = &p->cfg;
  PS_TRY(check_config(p));
  PS_TRY(ps_model_config_check(model, "model"));
  if (model->problem)
    return ps__fail(PS_EINVAL,
                    "the model's head is for %s: it writes no text, and penstock score prints what "
                    "it says of texts",
                    ps_problem_name(model->problem));
  PS_TRY(ps__model_create(&p->model, model, (ps_dtype)c->dtype, c->context, model->n_layers + 2,
                          NULL, NULL, &c->lora));
  PS_TRY(check_units(p));
  const uint64_t prompts = c->n_sequences * c->context,
                 wanted = c->prefill_tokens                  ? c->prefill_tokens
                          : p->hw.backend == PS_BACKEND_CUDA ? 1024
                                                             : 128;
  p->rows[0] = (uint32_t)(wanted < prompts ? wanted : prompts);
  p->rows[1] = (uint32_t)c->n_sequences;
  p->report.prefill_tokens = p->rows[0];
  if (ps__layer_of(p->model, ps__head_layer(p->model))->logits == PS__NONE)
    return ps__fail(PS_EINTERNAL, "the head of family %u makes no logits", model->family);
  p->block = ps__calloc(model->n_layers, sizeof *p->block);
  if (!p->block)
    return ps__fail(PS_ENOMEM, "out of memory for the blocks of a generation");
  measure(p);
  ps__gen_count_experts(p);
  count_scratch(p);
  place(p);
  PS_TRY(choose(p));
  return p->beside.weights ? PS_OK : check_host(p);
}

ps_status ps__gen_plan_beside(ps__gen_plan *p, const ps_model_config *model,
                              const ps_generate_config *cfg, const ps_hardware *hw,
                              const ps__gen_beside *beside) {
  *p = (ps__gen_plan){.cfg = *cfg,
                      .hw = *hw,
                      .at = beside->at ? beside->at : ps__places_of(1, 1),
                      .beside = *beside};
  const ps_status st = plan(p, model);
  if (st != PS_OK)
    ps__gen_plan_free(p);
  return st;
}

ps_status ps__gen_plan_init(ps__gen_plan *p, const ps_model_config *model,
                            const ps_generate_config *cfg, const ps_hardware *hw) {
  return ps__gen_plan_beside(p, model, cfg, hw, &(const ps__gen_beside){0});
}

void ps__gen_plan_free(ps__gen_plan *p) {
  ps_model_destroy(p->model);
  ps__free(p->beside.weights);
  ps__free(p->block);
  p->model = NULL;
  p->beside.weights = NULL;
  p->block = NULL;
}

ps_status ps_generate_plan(ps_generate_report *out, const ps_model_config *model,
                           const ps_generate_config *cfg, const ps_hardware *hw) {
  ps__gen_plan p;
  if (!out || !model || !cfg || !hw)
    return ps__fail(PS_EINVAL, "ps_generate_plan: out, model, cfg and hw must be given");
  PS_TRY(ps__gen_plan_init(&p, model, cfg, hw));
  *out = p.report;
  ps__gen_plan_free(&p);
  return PS_OK;
}
