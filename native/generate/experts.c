/* experts.c - experts on demand: what is cached of them, and what a step then costs. */
#include "generate/generate.h"
#include <math.h>

enum { ALIGN = 256 };
static uint64_t aligned(uint64_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

/* ---- a layer's experts ----------------------------------------------------------------------- */

const ps__span_def *ps__gen_experts_span(const ps__layer_def *d, uint32_t i) {
  for (uint32_t o = 0; o < d->n_fwd; o++) {
    const ps__op_info *info = d->fwd[o].kernel->info;
    if (!info->in_generation || !info->in_generation->info->from_slots || i--)
      continue;
    for (uint32_t s = 0; s < d->fwd[o].n_syms; s++)
      if (d->fwd[o].sym[s].kind == PS__SYM_PARAM)
        return &d->span[d->fwd[o].sym[s].id];
  }
  return NULL;
}

uint32_t ps__gen_experts_unit(const ps__gen_plan *p, uint32_t layer) {
  const ps__span_def *span = ps__gen_experts_span(ps__layer_of(p->model, layer), 0);
  const uint32_t unit = span ? ps__unit_of_span(p->model, layer, span) : PS__GEN_NO_UNIT;
  return span && ps__gen_is_moved(p, unit) ? unit : PS__GEN_NO_UNIT;
}

void ps__gen_count_experts(ps__gen_plan *p) {
  ps__gen_experts *x = &p->experts;
  for (uint32_t l = 1; ps__is_block(p->model, l); l++) {
    const uint32_t unit = ps__gen_experts_unit(p, l);
    if (unit == PS__GEN_NO_UNIT)
      continue;
    const ps__storage w = ps__gen_storage(p, unit);
    x->n_blocks++;
    x->unit_bytes = aligned(ps__stored_bytes(w, p->model->unit[unit].n));
    for (uint32_t i = 0; i < 2; i++)
      x->bytes[i] = ps__stored_bytes(w, ps__gen_experts_span(ps__layer_of(p->model, l), i)->n) /
                    p->model->cfg.n_experts;
  }
}

/* ---- caches ---------------------------------------------------------------------------------- */

void ps__gen_size_slots(ps__gen_experts *x, const ps__gen_plan *p, uint32_t n_slots) {
  x->n_slots = n_slots;
  x->table_bytes = aligned(4 * ps__fetch_words(p->model->cfg.n_experts, n_slots));
  x->slots_bytes = aligned(n_slots * x->bytes[0]) + aligned(n_slots * x->bytes[1]);
}

uint32_t ps__gen_least_slots(const ps__gen_plan *p, uint32_t i) {
  const ps_model_config *c = &p->model->cfg;
  const uint64_t rows = (uint64_t)p->rows[i] * c->n_experts_used;
  return rows < c->n_experts ? (uint32_t)rows : c->n_experts;
}

uint64_t ps__gen_buffer_bytes(const ps__gen_plan *p) {
  const ps__gen_experts *x = &p->experts;
  const uint64_t n = x->n_blocks < PS__GEN_SLOTS ? x->n_blocks : PS__GEN_SLOTS;
  return x->fetches[PS__GEN_PREFILL] ? 0 : n * x->unit_bytes;
}

uint32_t ps__gen_overwritten(const ps__gen_plan *p) {
  const ps__gen_experts *x = &p->experts;
  const uint64_t n = (ps__gen_buffer_bytes(p) + x->slots_bytes - 1) / x->slots_bytes;
  return n < x->n_blocks ? (uint32_t)n : x->n_blocks;
}

uint64_t ps__gen_slots_at(const ps__gen_plan *p, uint32_t layer, uint32_t i) {
  const ps__gen_experts *x = &p->experts;
  return p->map.device.slots + p->block[layer - 1].index * x->slots_bytes +
         (i ? aligned(x->n_slots * x->bytes[0]) : 0);
}

/* ---- what a decode step costs ---------------------------------------------------------------- */

/* With even routing a row chooses an expert of a block with probability k / E, whatever the rows
 * before chose, so the cache has it with probability slots / E. A fetch and the ops after it do not
 * overlap; streamed blocks come in beside the ops. An op takes op_ns at least. Of a quantized base
 * all is dequantized: written, and what is used of it read again. */
ps__gen_step ps__gen_predict(const ps__gen_plan *p, uint32_t n_slots) {
  const ps_model_config *c = &p->model->cfg;
  const ps__gen_experts *x = &p->experts;
  const bool base = p->model->lora.base;
  const double e = x->n_blocks ? c->n_experts : 1, k = c->n_experts_used,
               chosen = base ? e : e * (1 - pow(1 - k / e, p->rows[PS__GEN_DECODE])),
               each = (double)x->n_blocks * (double)(x->bytes[0] + x->bytes[1]),
               link = p->hw.link[PS_LINK_H2D].bytes_per_s, memory = p->hw.device_peak_bytes_per_s;
  ps__gen_step s = {.read_bytes = (double)p->report.weights_bytes - (e - chosen) * each,
                    .copied_bytes = (double)p->report.streamed_bytes};
  if (n_slots)
    s.copied_bytes = chosen * (1 - n_slots / e) * each;
  const double copies = link > 0 ? s.copied_bytes / link : 0,
               reads = memory > 0 ? (s.read_bytes + 2 * (double)p->dense_bytes) / memory : 0,
               ops = reads + 1e-9 * p->hw.op_ns * (p->n_ops + (n_slots ? x->n_blocks : 0));
  s.seconds = n_slots ? copies + ops : fmax(copies, ops);
  return s;
}
