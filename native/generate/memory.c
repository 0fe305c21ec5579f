/* memory.c - what generation takes of both memories, and where everything lies. */
#include "generate/generate.h"
#include <string.h>

enum { ALIGN = 256 };
static uint64_t aligned(uint64_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }
static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* ---- weights --------------------------------------------------------------------------------- */

static uint64_t unit_bytes(const ps__gen_plan *p, uint32_t unit) {
  return aligned(p->model->unit[unit].n * ps_dtype_bytes(p->model->dt));
}

uint64_t ps__gen_unit_offset(const ps__gen_plan *p, uint32_t layer, uint32_t unit) {
  const ps__layer *l = &p->model->layer[layer];
  const uint32_t end = unit < l->first_unit ? l->first_unit + l->n_units : unit;
  uint64_t at = 0;
  for (uint32_t u = l->first_unit; u < end; u++)
    at += unit_bytes(p, u);
  return at;
}

static uint64_t layer_bytes(const ps__gen_plan *p, uint32_t layer) {
  const ps__layer *l = &p->model->layer[layer];
  const bool tied = layer == ps__head_layer(p->model) && ps__tied(p->model);
  return ps__gen_unit_offset(p, layer, l->first_unit + l->n_units) + (tied ? unit_bytes(p, 0) : 0);
}

uint64_t ps__gen_layer_at(const ps__gen_plan *p, uint32_t layer, uint32_t *space) {
  const uint32_t head = ps__head_layer(p->model);
  *space = layer ? p->at->device : p->at->host;
  if (layer == 0)
    return p->map.host.embedding;
  if (layer == head)
    return p->map.device.head;
  const uint32_t block = layer - 1, before = ps__gen_before(p, block);
  if (ps__gen_is_resident(p, block))
    return p->map.device.resident + before * p->report.block_bytes;
  *space = p->at->host;
  return p->map.host.streamed + (block - before) * p->report.block_bytes;
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
  return d->tensor[t].row_bytes * (d->tensor[t].rows == PS__ROWS_ONE ? 1 : rows);
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
    at += used ? aligned(ps__gen_tensor_bytes(d, i, rows)) : 0;
  }
  return at;
}

ps__args_embed ps__gen_pick(const ps__gen_plan *p, uint32_t rows) {
  const ps__layer_def *head = ps__layer_of(p->model, ps__head_layer(p->model));
  return (ps__args_embed){
      .n_tokens = p->rows[1],
      .vocab = rows,
      .dim = (uint32_t)(head->tensor[head->input].row_bytes / ps_dtype_bytes(p->model->dt)),
      .dt = p->model->dt};
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
    need_scratch(p, p->at->compute, &ps__k_embed_fwd, &pick);
    for (uint32_t l = 0; l < p->model->n_layers; l++) {
      const ps__layer_def *d = ps__layer_of(p->model, l);
      for (uint32_t i = 0, n = ps__gen_n_ops(d); i < n; i++) {
        _Alignas(16) char args[PS__ARGS_BYTES];
        const ps_kernel *k =
            ps__gen_op(&d->fwd[i], d->logits != PS__NONE ? p->rows[1] : p->rows[program], args);
        need_scratch(p, l ? p->at->compute : p->at->host_ops, k, args);
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
  b->for_device = b->sequence = take(&b->bytes, rows);
  b->position = take(&b->bytes, rows);
  b->out = take(&b->bytes, 4ull * p->rows[1]);
}

/* BYTES of a block's keys and values: those of the op that caches. */
static uint64_t cache_bytes(const ps__gen_plan *p) {
  const ps_model_config *c = &p->model->cfg;
  return aligned(p->cfg.n_sequences * p->cfg.context * 2 * c->n_kv_heads * c->head_dim *
                 ps_dtype_bytes(p->model->dt));
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
  }
  r->cache_bytes = r->n_blocks * cache_bytes(p);
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
  uint64_t tensors = 0;
  place_batch(p);
  for (uint32_t l = 1; l < m->n_layers; l++)
    tensors = larger(tensors,
                     ps__gen_tensor_offset(p, ps__layer_of(m, l), ps__layer_of(m, l)->n_tensors));
  map->device.batch = take(&map->device.bytes, map->batch.bytes);
  for (uint32_t i = 0; i < 2; i++)
    map->device.x[i] = take(&map->device.bytes, map->x_bytes);
  map->device.tensors = take(&map->device.bytes, tensors);
  p->report.activation_bytes = map->device.bytes;
  map->device.cache = take(&map->device.bytes, p->report.cache_bytes);
  map->device.head = take(&map->device.bytes, p->report.head_bytes);
  map->host.batch = take(&map->host.bytes, map->batch.bytes);
  map->host.tensors = take(&map->host.bytes, ps__gen_tensor_offset(p, first, first->n_tensors));
  map->host.logits =
      take(&map->host.bytes, ps__gen_tensor_bytes(head, (uint32_t)head->logits, p->rows[1]));
  map->host.state = take(&map->host.bytes, 64);
  map->host.embedding = take(&map->host.bytes, layer_bytes(p, 0));
}

static uint64_t with_blocks(const ps__gen_plan *p, uint32_t resident) {
  const uint32_t n = p->report.n_blocks, slots = resident == n ? 0 : (uint32_t)PS__GEN_SLOTS;
  return ps__arena_round(p->map.device.bytes +
                         (uint64_t)(resident + slots) * p->report.block_bytes);
}

/* All that the device holds with so many blocks resident: the others are in the host's arena. */
static uint64_t device_bytes(const ps__gen_plan *p, uint32_t resident) {
  const uint64_t streamed = (p->report.n_blocks - resident) * p->report.block_bytes;
  return with_blocks(p, resident) + p->report.overhead_bytes +
         ps__page_table_bytes(&p->hw, p->map.host.bytes + streamed);
}

static ps_status refuse_device(const ps__gen_plan *p, uint64_t cap) {
  const ps_generate_report *r = &p->report;
  char need[32], given[32], act[32], cache[32], head[32], block[32], over[32];
  ps__format_bytes_apart(need, r->least_device_bytes, given, cap);
  return ps__fail(
      PS_EBUDGET,
      "generation needs %s of device memory, %s given: %s for the head, 2 x %s for blocks, %s for "
      "the KV cache of %llu x %llu tokens, %s for %u rows, %s for kernels, libraries and page "
      "tables: raise --device-mem, or lower --context, --batch or --prefill-tokens",
      need, given, ps__format_bytes(head, r->head_bytes), ps__format_bytes(block, r->block_bytes),
      ps__format_bytes(cache, r->cache_bytes), (unsigned long long)p->cfg.n_sequences,
      (unsigned long long)p->cfg.context, ps__format_bytes(act, r->activation_bytes), most_rows(p),
      ps__format_bytes(over, r->overhead_bytes));
}

/* As many blocks resident as fit; one or two blocks are never streamed, as they would take the room
 * of the slots. */
static ps_status choose(ps__gen_plan *p) {
  ps_generate_report *r = &p->report;
  uint64_t scratch;
  const uint64_t cap = ps__device_cap(&p->hw, p->cfg.device_mem_bytes);
  r->overhead_bytes = ps__device_overhead(&p->hw, p->at, p->scratch_bytes, &scratch);
  r->least_device_bytes = device_bytes(p, r->n_blocks <= PS__GEN_SLOTS ? r->n_blocks : 0);
  r->n_resident = r->n_blocks;
  while (cap && r->n_resident && device_bytes(p, r->n_resident) > cap)
    r->n_resident--;
  if (cap && (device_bytes(p, r->n_resident) > cap || r->least_device_bytes > cap))
    return refuse_device(p, cap);
  const uint32_t streamed = r->n_blocks - r->n_resident;
  ps__gen_map *map = &p->map;
  map->device.resident = take(&map->device.bytes, r->n_resident * r->block_bytes);
  map->device.slot = take(&map->device.bytes, streamed ? PS__GEN_SLOTS * r->block_bytes : 0);
  map->host.streamed = take(&map->host.bytes, streamed * r->block_bytes);
  for (uint32_t b = 0; b < r->n_blocks; b++)
    r->streamed_bytes += ps__gen_is_resident(p, b) ? 0 : layer_bytes(p, b + 1);
  r->overhead_bytes += ps__page_table_bytes(&p->hw, map->host.bytes);
  r->device_used_bytes = ps__arena_round(map->device.bytes) + r->overhead_bytes;
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
                  "generation needs %s of host memory, and the machine has %s: lower --context, "
                  "--batch or --prefill-tokens (the KV cache of %llu x %llu tokens takes %s), or "
                  "take a machine with more memory",
                  needs, there, (unsigned long long)p->cfg.n_sequences,
                  (unsigned long long)p->cfg.context, ps__format_bytes(cache, r->cache_bytes));
}

/* BYTES beside the arena: scratch, the candidates of draws, the requests' tokens, a piece of a
 * tensor while it is loaded, programs, and what the process has anyway. */
static ps_status check_host(ps__gen_plan *p) {
  const uint64_t V = p->model->cfg.vocab_size, cap = p->cfg.host_mem_bytes;
  char need[32], given[32], streamed[32], embedding[32];
  ps_generate_report *r = &p->report;
  r->host_used_bytes = ps__arena_round(p->map.host.bytes) +
                       ps__host_scratch(&p->hw, p->at, p->scratch_bytes) +
                       p->hw.n_threads * V * (sizeof(ps__gen_candidate) + sizeof(float)) +
                       4 * p->cfg.n_sequences * p->cfg.context + 512ull * 64 * r->n_blocks +
                       ps__host_reserve(&p->hw);
  if (!cap || r->host_used_bytes <= cap)
    return check_machine(p);
  ps__format_bytes_apart(need, r->host_used_bytes, given, cap);
  return ps__fail(
      PS_EBUDGET,
      "generation needs %s of host memory, %s given: %s for streamed blocks, %s for the "
      "embedding: raise --host-mem, or raise --device-mem so that fewer blocks are "
      "streamed",
      need, given, ps__format_bytes(streamed, r->streamed_bytes),
      ps__format_bytes(embedding, layer_bytes(p, 0)));
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

static ps_status plan(ps__gen_plan *p, const ps_model_config *model) {
  const ps_generate_config *c = &p->cfg;
  PS_TRY(check_config(p));
  PS_TRY(ps_model_config_check(model, "model"));
  PS_TRY(ps__model_create(&p->model, model, (ps_dtype)c->dtype, c->context, model->n_layers + 2,
                          NULL, NULL, &c->lora));
  const uint64_t prompts = c->n_sequences * c->context,
                 wanted = c->prefill_tokens                  ? c->prefill_tokens
                          : p->hw.backend == PS_BACKEND_CUDA ? 1024
                                                             : 128;
  p->rows[0] = (uint32_t)(wanted < prompts ? wanted : prompts);
  p->rows[1] = (uint32_t)c->n_sequences;
  p->report.prefill_tokens = p->rows[0];
  if (ps__layer_of(p->model, ps__head_layer(p->model))->logits == PS__NONE)
    return ps__fail(PS_EINTERNAL, "the head of family %u makes no logits", model->family);
  measure(p);
  count_scratch(p);
  place(p);
  PS_TRY(choose(p));
  return check_host(p);
}

ps_status ps__gen_plan_init(ps__gen_plan *p, const ps_model_config *model,
                            const ps_generate_config *cfg, const ps_hardware *hw) {
  *p = (ps__gen_plan){.cfg = *cfg, .hw = *hw, .at = &ps__one_device};
  const ps_status st = plan(p, model);
  if (st != PS_OK)
    ps__gen_plan_free(p);
  return st;
}

void ps__gen_plan_free(ps__gen_plan *p) {
  ps_model_destroy(p->model);
  p->model = NULL;
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
