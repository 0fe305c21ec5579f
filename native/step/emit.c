/* emit.c - emitting virtual tensors and ops. Memory that runs out is noted in the step once, and
 * checked at the end. */
#include "step/emit.h"
#include <string.h>

static uint32_t new_vt(ps__builder *b, ps__vt t) {
  ps__step *s = b->s;
  if (!PS_GROW(s->vt, s->n_vt, s->cap_vt)) {
    s->out_of_memory = true;
    return PS__NO_VT;
  }
  s->vt[s->n_vt] = t;
  return (uint32_t)s->n_vt++;
}

uint32_t ps__vt_new(ps__builder *b, uint32_t space, uint64_t bytes) {
  return new_vt(b, (ps__vt){.bytes = bytes,
                            .first = (uint32_t)b->s->n_op,
                            .last = UINT32_MAX,
                            .space = (uint8_t)space});
}

uint32_t ps__vt_persistent(ps__builder *b, uint32_t space, uint64_t bytes) {
  return new_vt(b, (ps__vt){.bytes = bytes,
                            .first = 0,
                            .last = UINT32_MAX,
                            .space = (uint8_t)space,
                            .persistent = true});
}

uint32_t ps__vt_alias(ps__builder *b, uint32_t by, uint64_t offset, uint64_t bytes) {
  return new_vt(b, (ps__vt){.bytes = bytes,
                            .offset = offset,
                            .first = (uint32_t)b->s->n_op,
                            .last = UINT32_MAX,
                            .alias_of = by + 1,
                            .space = b->s->vt[by].space});
}

void ps__vt_free(ps__builder *b, uint32_t vt) {
  if (vt != PS__NO_VT)
    b->s->vt[vt].last = (uint32_t)b->s->n_op;
}

void ps__vt_free_late(ps__builder *b, uint32_t vt, uint32_t steps) {
  if (vt == PS__NO_VT)
    return;
  if (steps == 0) {
    ps__vt_free(b, vt);
    return;
  }
  if (!PS_GROW(b->on->late, b->on->n_late, b->on->cap_late)) {
    b->s->out_of_memory = true;
    return;
  }
  b->on->late[b->on->n_late++] = (ps__late_free){vt, b->on->clock + steps};
}

void ps__tick(ps__builder *b) {
  size_t kept = 0;
  b->on->clock++;
  for (size_t i = 0; i < b->on->n_late; i++) {
    if (b->on->late[i].when <= b->on->clock)
      ps__vt_free(b, b->on->late[i].vt);
    else
      b->on->late[kept++] = b->on->late[i];
  }
  b->on->n_late = kept;
}

void ps__flush_late(ps__builder *b) {
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    for (size_t i = 0; i < b->dev[d].n_late; i++)
      ps__vt_free(b, b->dev[d].late[i].vt);
    b->dev[d].n_late = 0;
  }
}

ps__vaccess ps__whole(const ps__builder *b, uint32_t vt, uint32_t mode) {
  return (ps__vaccess){vt, mode, 0, vt == PS__NO_VT ? 0 : b->s->vt[vt].bytes};
}

ps__vaccess ps__part(uint32_t vt, uint32_t mode, uint64_t offset, uint64_t bytes) {
  return (ps__vaccess){vt, mode, offset, bytes};
}

static bool push_args(ps__step *s, const void *args, uint32_t bytes) {
  const size_t want = (bytes + 15) / 16 * 16;
  while (s->n_args + want > s->cap_args) {
    const size_t cap = s->cap_args ? s->cap_args * 2 : 4096;
    char *p = ps__realloc(s->args, cap);
    if (!p)
      return false;
    s->args = p;
    s->cap_args = cap;
  }
  memcpy(s->args + s->n_args, args, bytes);
  s->n_args += want;
  return true;
}

/* On CUDA the scratch of device streams is device memory. Attention's is an upper bound: what a
 * library really takes is asked when the run is opened. */
static size_t scratch_bytes(const ps__step *s, const ps_kernel *kernel, uint32_t stream,
                            const void *args) {
  const ps__spec *spec = s->spec;
  const ps__scratch_target target = {spec->deterministic, spec->cudnn_version};
  return ps__op_scratch(kernel, ps__stream_on_host(s->at, stream) ? PS_BACKEND_CPU : spec->backend,
                        args, &target);
}

static void emit(ps__builder *b, const ps_kernel *kernel, uint32_t stream, const void *args,
                 uint32_t args_bytes, const ps__vaccess *access, uint32_t n_access, ps_work work,
                 ps_tag tag) {
  ps__step *s = b->s;
  ps__vop op = {.kernel = kernel,
                .stream = stream,
                .args = (uint32_t)s->n_args,
                .args_bytes = args_bytes,
                .access = (uint32_t)s->n_access,
                .n_access = n_access,
                .work = work,
                .tag = tag};
  if (s->out_of_memory)
    return;
  if (args_bytes && !push_args(s, args, args_bytes))
    goto out;
  for (uint32_t i = 0; i < n_access; i++) {
    if (!PS_GROW(s->access, s->n_access, s->cap_access))
      goto out;
    s->access[s->n_access++] = access[i];
  }
  if (!PS_GROW(s->op, s->n_op, s->cap_op))
    goto out;
  s->op[s->n_op++] = op;
  s->model_flops += work.model_flops;
  if (kernel) {
    const size_t scratch = scratch_bytes(s, kernel, stream, args);
    if (scratch > s->scratch_bytes[stream])
      s->scratch_bytes[stream] = scratch;
    if (tag.phase == PS__PHASE_RECOMPUTE)
      s->recompute_flops += work.flops;
    else if (kernel->op_class == PS_CLASS_ATTENTION)
      s->recompute_flops += work.flops - work.model_flops;
  }
  return;
out:
  s->out_of_memory = true;
}

void ps__emit(ps__builder *b, const ps_kernel *kernel, uint32_t stream, const void *args,
              uint32_t args_bytes, const ps__vaccess *access, uint32_t n_access, ps_tag tag) {
  ps_work work = kernel->info->work(args);
  if (tag.phase == PS__PHASE_RECOMPUTE)
    work.model_flops = 0;
  emit(b, kernel, stream, args, args_bytes, access, n_access, work, tag);
}

void ps__emit_copy(ps__builder *b, uint32_t stream, ps__vaccess from, ps__vaccess to, ps_tag tag) {
  const ps__vaccess access[2] = {from, to};
  b->s->copied_bytes[ps__direction(b->s->at, stream)] += from.bytes;
  emit(b, NULL, stream, NULL, 0, access, 2, (ps_work){.bytes = (double)from.bytes}, tag);
}

/* Reads and writes host memory: twice the bytes. */
void ps__stage(ps__builder *b, uint32_t stream, ps__vaccess from, ps__vaccess to, ps_tag tag) {
  const ps__vaccess access[2] = {from, to};
  b->s->staged_bytes += from.bytes;
  emit(b, NULL, stream, NULL, 0, access, 2, (ps_work){.bytes = 2.0 * (double)from.bytes}, tag);
}

uint32_t ps__bring(ps__builder *b, uint32_t host, ps_tag tag) {
  const ps__vaccess from = ps__whole(b, host, PS_READ);
  const uint32_t vt = ps__vt_new(b, b->on->at.place, from.bytes);
  ps__emit_copy(b, b->on->at.to_device, from, ps__whole(b, vt, PS_WRITE), tag);
  return vt;
}

uint32_t ps__host_total(ps__builder *b, uint32_t unit) {
  uint32_t *grad = &b->s->unit_host[unit].grad;
  if (*grad == PS__NO_VT && ps__grad_passes(b->s->spec, unit))
    *grad = ps__vt_new(b, b->s->at->host, ps__unit_bytes(b, unit, b->s->recipe->grad));
  return *grad;
}

void ps__end_host_total(ps__builder *b, uint32_t unit, uint32_t lag) {
  if (ps__grad_passes(b->s->spec, unit))
    ps__vt_drop(b, &b->s->unit_host[unit].grad, lag);
}

const ps__chunk *ps__chunk_of(const ps__builder *b, uint32_t c) {
  return &b->s->layout->chunk[b->in->round->first_chunk + c];
}

ps_tag ps__unit_tag(const ps__builder *b, uint32_t unit, int phase) {
  const ps_model *m = b->s->model;
  const uint32_t layer = m->unit[unit].layer, place = unit - m->layer[layer].first_unit;
  return (ps_tag){.layer = (int32_t)layer,
                  .round = (int32_t)b->in->round_idx,
                  .chunk = -1 - (int32_t)place,
                  .phase = phase};
}

uint32_t ps__sum_mode_of(const ps__builder *b, uint32_t unit, uint32_t i) {
  return ps__sum_mode(i, ps__n_contributions(b, unit),
                      ps__unit_contributions(b->s->model, &b->s->of_step, unit),
                      (ps_dtype)b->s->recipe->grad.dtype);
}

bool ps__contribution_begins(const ps__builder *b, uint32_t c) {
  return (b->in->round->n_chunks - 1 - c) % b->s->sums.additions == 0;
}
bool ps__contribution_ends(const ps__builder *b, uint32_t c) {
  return c == 0 || ps__contribution_begins(b, c - 1);
}

/* ---- host ops: the kernel calls the hook of the plan, which the trainer sets
 * ------------------- */
static ps_status run_hook(const ps_launch *l) {
  const ps__args_hook *a = l->args;
  if (!a->hooks->fn)
    return ps__fail(PS_ESTATE, "a plan's schedule runs under a trainer only");
  return a->hooks->fn(a->hooks->ctx, (ps__hook)a->what, a->unit, l);
}

static const ps__op_info part_info[PS_N_UPDATE_PARTS] = {
    [PS_UPDATE_WHOLE] = {.rate = PS__RATE_OPTIMIZER},
    [PS_UPDATE_WEIGHTS] = {.rate = PS__RATE_OPTIMIZER_WEIGHTS},
    [PS_UPDATE_STATE] = {.rate = PS__RATE_OPTIMIZER_STATE}};
#define UPDATE_KERNEL(part, name_)                                                                 \
  [part] = {.name = name_,                                                                         \
            .op_class = PS_CLASS_OPTIMIZER,                                                        \
            .fn = {run_hook, run_hook},                                                            \
            .info = &part_info[part]}
#define UPDATE_KERNELS(NAME, update, n_states, parts, update_state)                                \
  [PS_OPTIMIZER_##NAME] = {UPDATE_KERNEL(PS_UPDATE_WHOLE, #update),                                \
                           UPDATE_KERNEL(PS_UPDATE_WEIGHTS, #update),                              \
                           UPDATE_KERNEL(PS_UPDATE_STATE, update_state)},
static const ps_kernel update_kernel[PS_N_OPTIMIZERS][PS_N_UPDATE_PARTS] = {
    PS__OPTIMIZERS(UPDATE_KERNELS)};

static const ps_kernel hook_kernel[] = {
    [PS__HOOK_LOAD] = {.name = "load_batch", .op_class = PS_CLASS_IO, .fn = {run_hook, run_hook}},
    [PS__HOOK_COUNT] = {.name = "count_targets",
                        .op_class = PS_CLASS_OTHER,
                        .fn = {run_hook, run_hook}},
    [PS__HOOK_EXCHANGE] = {.name = "exchange_totals",
                           .op_class = PS_CLASS_OTHER,
                           .fn = {run_hook, run_hook}},
    [PS__HOOK_LOGITS] = {.name = "logits", .op_class = PS_CLASS_OTHER, .fn = {run_hook, run_hook}},
    [PS__HOOK_LOSS] = {.name = "loss", .op_class = PS_CLASS_OTHER, .fn = {run_hook, run_hook}},
    [PS__HOOK_NORM] = {.name = "grad_norm", .op_class = PS_CLASS_OTHER, .fn = {run_hook, run_hook}},
    [PS__HOOK_GATHER] = {.name = "embed_gather",
                         .op_class = PS_CLASS_IO,
                         .fn = {run_hook, run_hook}},
    [PS__HOOK_REPORT] = {.name = "report", .op_class = PS_CLASS_OTHER, .fn = {run_hook, run_hook}},
};

void ps__emit_hook(ps__builder *b, ps__hook what, uint32_t unit, uint32_t stream,
                   const ps__vaccess *access, uint32_t n_access, ps_work work, ps_tag tag) {
  const ps__args_hook a = {b->hooks, what, unit};
  const bool updates = what == PS__HOOK_UPDATE || what == PS__HOOK_UPDATE_STATE;
  const ps__update_part part = what == PS__HOOK_UPDATE_STATE ? PS_UPDATE_STATE
                               : updates                     ? ps__update_part_of(b->s->spec, unit)
                                                             : PS_UPDATE_WHOLE;
  const ps_kernel *kernel =
      updates ? &update_kernel[b->s->spec->optimizer][part] : &hook_kernel[what];
  if (updates && stream == b->s->at->host_ops)
    b->s->update_bytes += work.bytes;
  emit(b, kernel, stream, &a, sizeof a, access, n_access, work, tag);
}

bool ps__is_host_update(const ps__step *s, const ps__vop *op) {
  const ps_kernel *k = update_kernel[s->spec->optimizer];
  bool is_update = false;
  for (int part = 0; part < PS_N_UPDATE_PARTS; part++)
    is_update = is_update || op->kernel == &k[part];
  return is_update && op->stream == s->at->host_ops;
}
