/* model.h - a model: its units with their layer definitions, and its parameters. */
#ifndef PS_MODEL_MODEL_H
#define PS_MODEL_MODEL_H
#include "model/define.h"

typedef struct ps__unit_def {
  const ps__layer_def *layer;
  uint32_t def; /* its place in ps_model.def */
  uint64_t n;   /* elements with padding, as the layer's */
  uint32_t first_param, n_params;
  /* What the contributions to the unit's gradient come from: chunks; slices of chunks. Where the
   * unit's own layer has both, the chunks' parts are in the slices' contributions. */
  bool by_chunk, by_slice;
} ps__unit_def;

struct ps_model {
  ps_model_config cfg;
  ps_dtype dt;      /* of activations and of parameters on the device */
  uint64_t seq_len; /* of a training sequence; 0: unknown */
  /* distinct definitions; owned */
  ps__layer_def **def;
  uint32_t n_defs, n_units, n_params;
  size_t cap_defs, cap_units, cap_params;
  ps__unit_def *unit;
  ps_param_info *param;
  uint32_t *bucket, n_buckets; /* parameters by the hash of their names; UINT32_MAX: free */
  uint64_t n_elements;         /* without padding */
  /* the most of any definition */
  uint32_t max_tensors, max_saved, max_spans;
};

/* ps__model_create() - as ps_model_create(), with what the definitions of ops depend on.
 * ps__model_begin(), ps__model_finish() - the same around a description: for models that no family
 * describes. ps__model_finish() frees the model on an error. */
ps_status ps__model_create(ps_model **out, const ps_model_config *cfg, ps_dtype dt,
                           uint64_t seq_len);
ps_status ps__model_begin(ps_model **out, const ps_model_config *cfg, ps_dtype dt,
                          uint64_t seq_len);
ps_status ps__model_finish(ps_model **m);
/* ps__model_add_def() - an empty definition, which the model owns. Errors: PS_ENOMEM. */
ps_status ps__model_add_def(ps_model *m, ps__layer_def **out);
/* ps__model_add_unit() - the model's next unit; @prefix comes before the names of its parameters.
 * Finishes the definition when it is used for the first time. Errors: the definition's; PS_ENOMEM;
 * PS_EINTERNAL for a name that is too long. */
ps_status ps__model_add_unit(ps_model *m, ps__layer_def *layer, const char *prefix);

static inline const ps__layer_def *ps__layer_of(const ps_model *m, uint32_t unit) {
  return m->unit[unit].layer;
}
static inline uint32_t ps__head_unit(const ps_model *m) { return m->n_units - 1; }
/* ps__sliced_unit() - the unit that the head's slices add to: the head's or, with tied embeddings,
 * the embedding's. */
static inline uint32_t ps__sliced_unit(const ps_model *m) {
  return m->unit[ps__head_unit(m)].by_slice ? ps__head_unit(m) : 0;
}
/* ps__own_spans() - spans of the unit's own parameters; they come before tied ones. */
static inline uint32_t ps__own_spans(const ps_model *m, uint32_t unit) {
  const ps__layer_def *d = m->unit[unit].layer;
  uint32_t n = 0;
  while (n < d->n_spans && !d->span[n].of_embedding)
    n++;
  return n;
}
/* ps__embed_args_of() - the arguments of the embedding's lookup, but for n_tokens. */
static inline const ps__args_embed *ps__embed_args_of(const ps_model *m) {
  return (const ps__args_embed *)(const void *)m->unit[0].layer->fwd[0].args;
}

/* ps__gemm_args() - C[m,n] = op(A) op(B), without gaps between rows. */
ps__args_gemm ps__gemm_args(uint32_t m, uint32_t n, uint32_t k, bool trans_a, bool trans_b,
                            uint32_t dt);
#endif
