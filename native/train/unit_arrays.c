/* unit_arrays.c - a unit's arrays, wherever they lie: the one place that knows. */
#include "train/trainer.h"
#include <string.h>

static uint32_t vt_of(const ps_trainer *t, uint32_t unit, uint32_t what) {
  const ps__unit_host *h = &t->plan->step.unit_host[unit];
  switch (what) {
  case PS__ARRAY_UPDATED: return h->master != PS__NO_VT ? h->master : h->weights;
  case PS__ARRAY_WEIGHTS: return h->weights;
  case PS__ARRAY_GRAD: return h->grad;
  default: return h->state[what - PS__ARRAY_STATE];
  }
}

ps__storage ps__array_storage(const ps_trainer *t, uint32_t unit, uint32_t what) {
  const ps__recipe *r = t->plan->step.recipe;
  const ps__storage weights = ps__unit_storage(t->plan->model, unit, r->weights);
  switch (what) {
  case PS__ARRAY_UPDATED: return t->plan->model->unit[unit].frozen ? weights : r->updated;
  case PS__ARRAY_WEIGHTS: return weights;
  case PS__ARRAY_GRAD: return r->grad;
  default: return r->state[what - PS__ARRAY_STATE];
  }
}

ps_dtype ps__array_dtype(const ps_trainer *t, uint32_t unit, uint32_t what) {
  return (ps_dtype)ps__array_storage(t, unit, what).dtype;
}

uint64_t ps__array_bytes(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t n) {
  return ps__stored_bytes(ps__array_storage(t, unit, what), n);
}

/* BYTES from the array's beginning to element @first, with which a block begins. */
static uint64_t array_offset(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t first) {
  return ps__stored_at(ps__array_storage(t, unit, what), first);
}

void *ps__array_at(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t first) {
  const uint32_t vt = vt_of(t, unit, what);
  if (vt == PS__NO_VT || t->plan->step.vt[vt].space != t->plan->at->host)
    return NULL;
  return t->host + t->plan->step.vt[vt].offset + array_offset(t, unit, what, first);
}

ps_status ps__array_read(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t first,
                         uint64_t n, void *dst) {
  const uint64_t bytes = ps__array_bytes(t, unit, what, n);
  const void *src = ps__array_at(t, unit, what, first);
  const ps__vt *v = &t->plan->step.vt[vt_of(t, unit, what)];
  if (!src)
    return ps__engine_read(t->engine, v->space, v->offset + array_offset(t, unit, what, first), dst,
                           bytes);
  memcpy(dst, src, bytes);
  return PS_OK;
}

ps_status ps__array_write(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t first,
                          uint64_t n, const void *src) {
  const uint64_t bytes = ps__array_bytes(t, unit, what, n);
  void *dst = ps__array_at(t, unit, what, first);
  const ps__vt *v = &t->plan->step.vt[vt_of(t, unit, what)];
  if (!dst)
    return ps__engine_write(t->engine, v->space, v->offset + array_offset(t, unit, what, first),
                            src, bytes);
  memcpy(dst, src, bytes);
  return PS_OK;
}
