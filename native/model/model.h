/* model.h - a model: its units with their layer definitions, and its parameters. */
#ifndef PS_MODEL_MODEL_H
#define PS_MODEL_MODEL_H
#include "core/blocks.h"
#include "model/define.h"
#include <penstock/tensors.h>

/* A layer: the embedding is layer 0, the blocks are 1..L, the head is L+1. */
typedef struct ps__layer {
  const ps__layer_def *def;
  uint32_t def_idx; /* its place in ps_model.def */
  uint32_t first_unit, n_units;
} ps__layer;

/* A unit of the model: of one layer (ps__unit_def). */
typedef struct ps__unit {
  uint32_t layer, first_param, n_params, n_spans;
  const ps__span_def *span; /* [n_spans], the layer's */
  uint64_t n;               /* elements with padding */
  bool frozen, adapter;     /* adapter, exact, base: as in ps__unit_def */
  bool exact;
  uint32_t base;
  /* What the contributions to the unit's gradient come from: chunks; slices of chunks. Where the
   * unit's own layer has both, the chunks' parts are in the slices' contributions. */
  bool by_chunk, by_slice;
} ps__unit;

/* Terms of the loss beside the cross-entropy: coefficients, 0: none (ops.h). Those of routers are
 * the mean over the blocks that have one. */
typedef struct ps__loss_terms {
  float z_loss, label_smoothing;
  float router_aux, router_z;
} ps__loss_terms;

/* Which products multiply FP8 operands: those of all blocks, but for the first @bf16_first and the
 * last @bf16_last blocks and, with bf16_down, all down projections; with head, the head's too. With
 * fast, forward products sum with fast accumulation. */
typedef struct ps__fp8 {
  bool on;
  uint32_t bf16_first, bf16_last;
  bool bf16_down, head, fast;
} ps__fp8;
static inline bool ps__fp8_block(const ps__fp8 *f, uint32_t block, uint32_t n_blocks) {
  return f->on && block >= f->bf16_first && (uint64_t)block + f->bf16_last < n_blocks;
}

struct ps_model {
  ps_model_config cfg;
  const char *family; /* its name, for messages; NULL: no family describes the model */
  ps_dtype dt;        /* of activations and of parameters on the device */
  uint64_t seq_len;   /* of a training sequence; 0: unknown */
  uint32_t n_frozen;  /* layers from the embedding on whose units are frozen */
  ps__loss_terms loss;
  ps__fp8 fp8;
  ps_lora lora; /* rank 0: no adapters. With adapters all other units are frozen */
  /* distinct definitions; owned */
  ps__layer_def **def;
  uint32_t n_defs, n_layers, n_units, n_params; /* n_layers: blocks, embedding, head */
  size_t cap_defs, cap_layers, cap_units, cap_params;
  ps__layer *layer;
  ps__unit *unit;
  ps_param_info *param;
  uint32_t *bucket, n_buckets; /* parameters by the hash of their names; UINT32_MAX: free */
  uint64_t n_elements;         /* without padding */
  uint64_t n_trained;          /* of them, those of units that are not frozen */
  uint32_t max_tensors, max_saved, max_counted; /* of any definition */
  uint32_t max_spans;                           /* of any unit */
};

/* ps__model_create() - as ps_model_create(), with what the definitions of ops depend on. The units
 * of the first @n_frozen layers are frozen.
 * @loss  NULL: no terms beside the cross-entropy.
 * @fp8   NULL: no FP8.
 * @lora  adapters for the blocks' projections; NULL or rank 0: none. The model keeps it with
 *        PS_LORA_ALL resolved. Errors: PS_EINVAL: what is wrong with it.
 * ps__model_begin(), ps__model_finish() - the same around a description: for models that no family
 * describes. ps__model_finish() frees the model on an error. */
ps_status ps__model_create(ps_model **out, const ps_model_config *cfg, ps_dtype dt,
                           uint64_t seq_len, uint32_t n_frozen, const ps__loss_terms *loss,
                           const ps__fp8 *fp8, const ps_lora *lora);
ps_status ps__model_begin(ps_model **out, const ps_model_config *cfg, ps_dtype dt,
                          uint64_t seq_len);
ps_status ps__model_finish(ps_model **m);
/* ps__model_add_def() - an empty definition, which the model owns. Errors: PS_ENOMEM. */
ps_status ps__model_add_def(ps_model *m, ps__layer_def **out);
/* ps__model_add_layer() - the model's next layer; @prefix comes before the names of its parameters.
 * Finishes the definition when it is used for the first time. Errors: the definition's; PS_ENOMEM;
 * PS_EINTERNAL for a name that is too long. */
ps_status ps__model_add_layer(ps_model *m, ps__layer_def *def, const char *prefix);
/* ps__model_config_read() - as ps_model_config_read(), with its warnings or without.
 * ps__model_own_head() - whether @dir has an lm_head.weight with other values than its embedding
 * (tied.c). Errors: PS_ENOMEM; PS_EIO and PS_EFORMAT where the values cannot be read. */
ps_status ps__model_config_read(ps_model_config *out, const char *path, bool warn);
ps_status ps__model_own_head(const char *dir, bool *out);
/* ps__model_check_tensors() - check that the tensors of @f, opened from @dir, are the model's: no
 * other tensor, the same shapes; with @weights all but adapters', else all of units that are
 * trained. Errors: PS_EFORMAT names the tensor. */
ps_status ps__model_check_tensors(const ps_model *m, const ps_tensor_file *f, const char *dir,
                                  bool weights);
/* ps__model_note_weights() - warn of what @f, which has passed the check, has: norm weights that
 * all have their initial value, where models/init_model.py did not write them; weights in FP8.
 * Errors: PS_EIO. */
ps_status ps__model_note_weights(const ps_model *m, ps_tensor_file *f, const char *dir);
/* ps__is_frozen() - whether the next layer to be added is frozen, its adapters too.
 * ps__base_is_frozen() - whether its own parameters are. */
static inline bool ps__is_frozen(const ps_model *m) { return m->n_layers < m->n_frozen; }
static inline bool ps__base_is_frozen(const ps_model *m) {
  return ps__is_frozen(m) || m->lora.rank > 0;
}
/* ps__counts_forward() - whether the flushed values of its products' X are counted in the forward
 * pass: beside adapters, as the backward pass does not quantize X. */
static inline bool ps__counts_forward(const ps_model *m) {
  return m->lora.rank > 0 && !ps__is_frozen(m);
}

static inline const ps__layer_def *ps__layer_of(const ps_model *m, uint32_t layer) {
  return m->layer[layer].def;
}
/* ps__weight_storage() - of weights where ops read them, and of their gradients; not of exact
 * units. */
static inline ps__storage ps__weight_storage(const ps_model *m) { return ps__plain(m->dt); }
/* ps__unit_storage() - of a unit's weights on the host and the link, where these are @plain.
 * ps__weights_bytes() - BYTES of all units' weights there, without padding. */
static inline ps__storage ps__unit_storage(const ps_model *m, uint32_t unit, ps__storage plain) {
  const uint32_t base = m->unit[unit].base;
  if (m->unit[unit].exact)
    return ps__plain(PS_F32);
  return base ? ps__base_storage(base, plain.dtype) : plain;
}
static inline uint64_t ps__weights_bytes(const ps_model *m) {
  const ps__storage plain = ps__weight_storage(m);
  uint64_t bytes = ps__stored_bytes(plain, m->n_elements);
  for (uint32_t u = 0; u < m->n_units; u++)
    bytes -= ps__stored_bytes(plain, m->unit[u].n) -
             ps__stored_bytes(ps__unit_storage(m, u, plain), m->unit[u].n);
  return bytes;
}
static inline uint32_t ps__head_layer(const ps_model *m) { return m->n_layers - 1; }
static inline bool ps__is_block(const ps_model *m, uint32_t layer) {
  return layer > 0 && layer < ps__head_layer(m);
}
/* ps__unit_of_span() - which unit of the model a layer's span is of. */
static inline uint32_t ps__unit_of_span(const ps_model *m, uint32_t layer,
                                        const ps__span_def *span) {
  return span->of_embedding ? 0 : m->layer[layer].first_unit + span->unit;
}
/* ps__lending_unit() - the unit whose gradient's memory on the host holds saved activations of the
 * layer's first round (host_of_saved() in native/step/passes.c): the largest. */
static inline uint32_t ps__lending_unit(const ps_model *m, uint32_t layer) {
  const ps__layer *l = &m->layer[layer];
  uint32_t best = l->first_unit;
  for (uint32_t u = l->first_unit; u < l->first_unit + l->n_units; u++)
    if (m->unit[u].n > m->unit[best].n)
      best = u;
  return best;
}
/* ps__sliced_unit() - the unit that the head's slices add to: one of the head's or, with tied
 * embeddings, the embedding's. */
static inline uint32_t ps__sliced_unit(const ps_model *m) {
  uint32_t u = m->layer[ps__head_layer(m)].first_unit;
  while (u < m->n_units && !m->unit[u].by_slice)
    u++;
  return u < m->n_units ? u : 0;
}
/* ps__tied() - whether the head multiplies with the embedding's table. */
static inline bool ps__tied(const ps_model *m) {
  const ps__layer_def *d = ps__layer_of(m, ps__head_layer(m));
  for (uint32_t i = 0; i < d->n_spans; i++)
    if (d->span[i].of_embedding)
      return true;
  return false;
}
/* ps__head_columns() - what the head makes of a token: logits of the vocabulary, scores, or the
 * normed state itself.
 * ps__has_score() - whether the head is a `score`. */
static inline uint32_t ps__head_columns(const ps_model_config *c) {
  return c->problem == PS_PROBLEM_EMBEDDING ? c->dim : c->problem ? c->n_labels : c->vocab_size;
}
static inline bool ps__has_score(const ps_model_config *c) { return c->n_labels > 0; }
#define PS__SCORE "score.weight"
/* ps__is_idle_head() - whether tensor @name is the head of a model that has another one now. */
bool ps__is_idle_head(const ps_model_config *c, const char *name);
/* Heads of a layer with @flags: their width, those of keys and values, and whether v is of k. */
static inline uint32_t ps__layer_head_dim(const ps_model_config *c, uint32_t flags) {
  return flags & PS_LAYER_GLOBAL ? c->global_head_dim : c->head_dim;
}
static inline uint32_t ps__layer_kv_heads(const ps_model_config *c, uint32_t flags) {
  return flags & PS_LAYER_GLOBAL ? c->global_kv_heads : c->n_kv_heads;
}
static inline bool ps__layer_shares_keys(const ps_model_config *c, uint32_t flags) {
  return flags & PS_LAYER_GLOBAL && c->shared_keys;
}
static inline uint32_t ps__layer_ffn_dim(const ps_model_config *c, uint32_t flags) {
  return flags & PS_LAYER_SHARED_KV && c->double_wide_mlp ? 2 * c->ffn_dim : c->ffn_dim;
}
/* What a block is beside its layer_flags: others read its keys and values; it is the first one, the
 * last one of a model with per-layer embeddings. */
enum { PS__BLOCK_GIVES_KV = 256, PS__BLOCK_FIRST = 512, PS__BLOCK_LAST = 1024 };
/* ps__kv_source() - the block whose keys and values block @l reads: itself, unless it has
 * PS_LAYER_SHARED_KV. PS__NO_BLOCK: none is alike.
 * ps__block_flags() - layer_flags and PS__BLOCK_* of block @l. */
enum { PS__NO_BLOCK = UINT32_MAX };
static inline uint32_t ps__kv_source(const ps_model_config *c, uint32_t l) {
  const uint32_t alike = c->layer_flags[l] & ~(uint32_t)PS_LAYER_SHARED_KV;
  while (l < c->n_layers && c->layer_flags[l] != alike)
    l--;
  return l < c->n_layers ? l : PS__NO_BLOCK;
}
static inline uint32_t ps__block_flags(const ps_model_config *c, uint32_t l) {
  uint32_t flags = c->layer_flags[l];
  uint32_t next = l + 1; /* that is alike */
  while (next < c->n_layers && (c->layer_flags[next] & ~(uint32_t)PS_LAYER_SHARED_KV) != flags)
    next++;
  if (next < c->n_layers && c->layer_flags[next] != flags)
    flags |= PS__BLOCK_GIVES_KV;
  if (c->per_layer_dim)
    flags |= (l == 0 ? PS__BLOCK_FIRST : 0) | (l + 1 == c->n_layers ? PS__BLOCK_LAST : 0);
  return flags;
}
/* ps__has_carried() - whether blocks read what others have made, besides the residual stream. */
static inline bool ps__has_carried(const ps_model_config *c) {
  bool any = c->per_layer_dim > 0;
  for (uint32_t l = 0; l < c->n_layers; l++)
    any |= (c->layer_flags[l] & PS_LAYER_SHARED_KV) != 0;
  return any;
}
/* ps__n_sparse() - blocks with experts. */
static inline uint32_t ps__n_sparse(const ps_model_config *c) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n += (c->layer_flags[i] & PS_LAYER_EXPERTS) != 0;
  return n;
}
/* ps__first_trained() - the first layer with a unit that is not frozen: the backward pass ends
 * there. */
static inline uint32_t ps__first_trained(const ps_model *m) {
  uint32_t u = 0;
  while (u + 1 < m->n_units && m->unit[u].frozen)
    u++;
  return m->unit[u].layer;
}
/* ps__logits_of() - a token's logits as fp32, with the model's soft cap, from what the head's op
 * wrote: z[ps__head_columns()] in the model's dtype. */
void ps__logits_of(const ps_model *m, float *out, const void *z);
/* ps__has_delta_nets() - whether layers have a gated delta-net, or attention a gate. */
static inline bool ps__has_delta_nets(const ps_model_config *c) {
  bool any = c->attention_gate;
  for (uint32_t l = 0; l < c->n_layers; l++)
    any |= c->layer_flags[l] & PS_LAYER_LINEAR;
  return any;
}
/* ps__loss_row_bytes() - what the loss's op writes for a token, BYTES. */
static inline uint64_t ps__loss_row_bytes(const ps_model *m) {
  const ps__layer_def *d = ps__layer_of(m, ps__head_layer(m));
  return d->tensor[d->loss].row_bytes;
}
/* ps__embed_args_of() - the arguments of the embedding's lookup, but for n_tokens. */
static inline const ps__args_embed *ps__embed_args_of(const ps_model *m) {
  return (const ps__args_embed *)(const void *)m->layer[0].def->fwd[0].args;
}
#endif
