/* model.c - a model's units and layers as they are described; its parameters by number and by name;
 * its FLOPs, which are those of its ops.
 *
 * The config must have passed ps_model_config_check(): then no product here overflows. */
#include "model/model.h"
#include "core/core.h"
#include "core/dtype.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- units ----------------------------------------------------------------------------------- */

ps_status ps__model_begin(ps_model **out, const ps_model_config *cfg, ps_dtype dt,
                          uint64_t seq_len) {
  ps_model *m = ps__calloc(1, sizeof *m);
  if (!m)
    return ps__fail(PS_ENOMEM, "out of memory for a model");
  m->cfg = *cfg;
  m->dt = dt;
  m->seq_len = seq_len;
  *out = m;
  return PS_OK;
}

ps_status ps__model_add_def(ps_model *m, ps__layer_def **out) {
  ps__layer_def *d = ps__calloc(1, sizeof *d);
  if (!d || !PS_GROW(m->def, m->n_defs, m->cap_defs)) {
    ps__free(d);
    return ps__fail(PS_ENOMEM, "out of memory for a layer's definition");
  }
  d->dt = m->dt;
  m->def[m->n_defs++] = d;
  *out = d;
  return PS_OK;
}

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

static ps_status add_param(ps_model *m, const ps__param_def *p, const char *prefix,
                           const ps__unit_def *of) {
  ps_param_info info = {.unit = m->n_units,
                        .role = p->role,
                        .n_dims = p->n_dims,
                        .shape = {p->rows, p->n_dims == 3 ? 1 : p->cols, p->cols},
                        .offset = p->offset,
                        .n = p->rows * p->cols,
                        .init_mean = p->init_mean,
                        .init_std = p->init_std,
                        .init_uniform = p->init_uniform,
                        .exact = of->exact};
  const int length = snprintf(info.name, sizeof info.name, "%s%s", prefix, p->name);
  if (length < 0 || (size_t)length >= sizeof info.name)
    return ps__fail(PS_EINTERNAL, "the parameter name %s%s is longer than %zu bytes", prefix,
                    p->name, sizeof info.name - 1);
  if (!PS_GROW(m->param, m->n_params, m->cap_params))
    return ps__fail(PS_ENOMEM, "out of memory for the model's parameters");
  m->param[m->n_params++] = info;
  m->n_elements += info.n;
  m->n_trained += of->frozen ? 0 : info.n;
  return PS_OK;
}

/* Which units' gradients a layer's ops add to. */
static ps_status mark_gradients(ps_model *m, uint32_t layer, const ps__op_def *op, uint32_t n_ops) {
  const ps__layer *l = &m->layer[layer];
  uint32_t sliced = UINT32_MAX;
  for (uint32_t i = 0; i < n_ops; i++)
    for (uint32_t j = 0; j < op[i].n_syms; j++) {
      if (op[i].sym[j].kind != PS__SYM_GRAD)
        continue;
      const uint32_t u = ps__unit_of_span(m, layer, &l->def->span[op[i].sym[j].id]);
      if (!op[i].sliced) {
        m->unit[u].by_chunk = true;
        continue;
      }
      if (sliced != UINT32_MAX && sliced != u)
        return ps__fail(PS_EINTERNAL, "slices of the head add to units %u and %u", sliced, u);
      m->unit[u].by_slice = true;
      sliced = u;
    }
  if (sliced != UINT32_MAX && sliced >= l->first_unit)
    m->unit[sliced].by_chunk = false;
  return PS_OK;
}

static ps_status add_unit(ps_model *m, const ps__layer_def *def, const ps__unit_def *of,
                          const char *prefix) {
  if (!PS_GROW(m->unit, m->n_units, m->cap_units))
    return ps__fail(PS_ENOMEM, "out of memory for the model's units");
  m->unit[m->n_units] = (ps__unit){.layer = m->n_layers,
                                   .first_param = m->n_params,
                                   .n_params = of->n_params,
                                   .n_spans = of->n_spans,
                                   .span = &def->span[of->first_span],
                                   .n = of->n,
                                   .frozen = of->frozen,
                                   .adapter = of->adapter,
                                   .exact = of->exact,
                                   .base = of->base};
  for (uint32_t i = 0; i < of->n_params; i++)
    PS_TRY(add_param(m, &def->param[of->first_param + i], prefix, of));
  m->max_spans = larger(m->max_spans, of->n_spans);
  m->n_units++;
  return PS_OK;
}

ps_status ps__model_add_layer(ps_model *m, ps__layer_def *def, const char *prefix) {
  uint32_t idx = 0;
  if (ps__is_empty(def->made))
    PS_TRY(ps__def_finish(def));
  if (!PS_GROW(m->layer, m->n_layers, m->cap_layers))
    return ps__fail(PS_ENOMEM, "out of memory for the model's layers");
  while (m->def[idx] != def)
    idx++;
  m->layer[m->n_layers] =
      (ps__layer){.def = def, .def_idx = idx, .first_unit = m->n_units, .n_units = def->n_units};
  for (uint32_t i = 0; i < def->n_units; i++)
    PS_TRY(add_unit(m, def, &def->unit[i], prefix));
  m->max_tensors = larger(m->max_tensors, def->n_tensors);
  m->max_saved = larger(m->max_saved, def->n_saved);
  m->max_counted = larger(m->max_counted, def->n_counted);
  PS_TRY(mark_gradients(m, m->n_layers, def->fwd, def->n_fwd));
  PS_TRY(mark_gradients(m, m->n_layers, def->bwd, def->n_bwd));
  m->n_layers++;
  return PS_OK;
}

/* ---- parameters by name ---------------------------------------------------------------------- */

/* FNV-1a (draft-eastlake-fnv). */
static uint32_t hash(const char *name) {
  uint32_t h = 2166136261u;
  for (; *name; name++)
    h = (h ^ (unsigned char)*name) * 16777619u;
  return h;
}

static uint32_t *bucket_of(const ps_model *m, const char *name) {
  uint32_t at = hash(name) & (m->n_buckets - 1);
  while (m->bucket[at] != UINT32_MAX && strcmp(m->param[m->bucket[at]].name, name))
    at = (at + 1) & (m->n_buckets - 1);
  return &m->bucket[at];
}

static ps_status index_params(ps_model *m) {
  m->n_buckets = 16;
  while (m->n_buckets < 2 * m->n_params)
    m->n_buckets *= 2;
  m->bucket = ps__malloc(m->n_buckets * sizeof *m->bucket);
  if (!m->bucket)
    return ps__fail(PS_ENOMEM, "out of memory for the model's parameters");
  memset(m->bucket, 0xff, m->n_buckets * sizeof *m->bucket);
  for (uint32_t i = 0; i < m->n_params; i++) {
    uint32_t *at = bucket_of(m, m->param[i].name);
    if (*at != UINT32_MAX)
      return ps__fail(PS_EINTERNAL, "the model has two parameters of the name %s",
                      m->param[i].name);
    *at = i;
  }
  return PS_OK;
}

uint32_t ps_model_find(const ps_model *m, const char *name) {
  return m && name ? *bucket_of(m, name) : UINT32_MAX;
}

/* ---- the model ------------------------------------------------------------------------------- */

ps_status ps__model_finish(ps_model **m) {
  const ps_status st = index_params(*m);
  if (st == PS_OK)
    return PS_OK;
  ps_model_destroy(*m);
  *m = NULL;
  return st;
}

void ps_model_destroy(ps_model *m) {
  if (!m)
    return;
  for (uint32_t i = 0; i < m->n_defs; i++)
    ps__def_free(m->def[i]);
  ps__free(m->def);
  ps__free(m->layer);
  ps__free(m->unit);
  ps__free(m->param);
  ps__free(m->bucket);
  ps__free(m);
}

uint32_t ps_model_n_units(const ps_model *m) { return m->n_units; }

uint64_t ps_model_unit_elements(const ps_model *m, uint32_t unit) {
  return unit < m->n_units ? m->unit[unit].n : 0;
}

uint32_t ps_model_n_params(const ps_model *m) { return m->n_params; }

uint64_t ps_model_n_elements(const ps_model *m) { return m->n_elements; }

ps_status ps_model_param(const ps_model *m, uint32_t idx, ps_param_info *out) {
  if (idx >= m->n_params)
    return ps__fail(PS_EINVAL, "parameter %u was asked for: the model has %u", idx, m->n_params);
  *out = m->param[idx];
  return PS_OK;
}

/* ---- FLOPs ----------------------------------------------------------------------------------- */

enum { MAX_SEQUENCE = 1 << 30 };

/* Model FLOPs of the ops of one class on a whole sequence. */
static double flops_of(const ps__op_def *op, uint32_t n, ps_op_class op_class,
                       const ps__chunk_shape *sequence) {
  double flops = 0;
  for (uint32_t i = 0; i < n; i++) {
    _Alignas(16) char args[PS__ARGS_BYTES];
    if (op[i].kernel->op_class != op_class)
      continue;
    ps__op_args(&op[i], sequence, args);
    flops += op[i].kernel->info->work(args).model_flops;
  }
  return flops;
}

void ps__logits_of(const ps_model *m, float *out, const void *z) {
  const float cap = m->cfg.logit_softcap;
  const uint32_t n = ps__head_columns(&m->cfg);
  ps__convert(out, PS_F32, z, m->dt, n);
  for (uint32_t i = 0; i < n && cap > 0; i++)
    out[i] = cap * tanhf(out[i] / cap);
}

ps_status ps_model_flops(const ps_model *m, uint64_t seq_len, ps_flops *out) {
  if (seq_len == 0 || seq_len > MAX_SEQUENCE)
    return ps__fail(PS_EINVAL, "seq_len is %llu: it must be 1 to 2^30",
                    (unsigned long long)seq_len);
  const ps__chunk_shape sequence = {.n_tokens = (uint32_t)seq_len, .first_grad = true};
  ps_flops f = {0};
  for (uint32_t l = 1; l < ps__head_layer(m); l++) {
    const ps__layer_def *d = ps__layer_of(m, l);
    f.matmul += flops_of(d->fwd, d->n_fwd, PS_CLASS_GEMM, &sequence);
    f.attn_fwd += flops_of(d->fwd, d->n_fwd, PS_CLASS_ATTENTION, &sequence);
    f.attn_bwd += flops_of(d->bwd, d->n_bwd, PS_CLASS_ATTENTION, &sequence);
  }
  const ps__layer_def *head = ps__layer_of(m, ps__head_layer(m));
  f.head = flops_of(head->fwd, head->n_fwd, PS_CLASS_GEMM, &sequence);
  f.sequence = 3 * f.matmul + f.attn_fwd + f.attn_bwd + f.head;
  *out = f;
  return PS_OK;
}
