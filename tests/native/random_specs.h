/* random_specs.h - tiny models, and random decisions for their steps: far outside what the planner
 * would choose. And what a test of them needs: batches, poisoned memory, the state as a hash. */
#ifndef PS_TESTS_RANDOM_SPECS_H
#define PS_TESTS_RANDOM_SPECS_H
#include "tiny_model.h"
#include "train/trainer.h"

enum { MAX_LEAD = 4 };

/* ---- models ---------------------------------------------------------------------------------- */

typedef struct model {
  const char *name, *json;
  char dir[256];
  ps_model_config cfg;
  ps_lora lora;
  ps_model *made;
} model;

#define COMMON                                                                                     \
  "\"vocab_size\":96,\"num_hidden_layers\":3,\"hidden_act\":\"silu\",\"max_position_embeddings\":" \
  "4096,\"rms_norm_eps\":1e-5,"                                                                    \
  "\"rope_theta\":10000.0,"
static model models[] = {
    {.name = "llama",
     .json = "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\"," COMMON
             "\"hidden_size\":32,\"intermediate_size\":64,\"num_attention_heads\":4,\"num_key_"
             "value_heads\":2,\"tie_word_embeddings\":false}"},
    {.name = "llama-tied-scaled",
     .json = "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\"," COMMON
             "\"hidden_size\":32,\"intermediate_size\":64,\"num_attention_heads\":4,\"num_key_"
             "value_heads\":4,\"tie_word_embeddings\":true,"
             "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
             "\"high_freq_factor\":4.0,"
             "\"original_max_position_embeddings\":64}}"},
    {.name = "qwen2-tied",
     .json = "{\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\"," COMMON
             "\"hidden_size\":32,\"intermediate_size\":64,\"num_attention_heads\":4,\"num_key_"
             "value_heads\":1,\"tie_word_embeddings\":true,"
             "\"use_sliding_window\":false}"},
    {.name = "qwen2",
     .json = "{\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\"," COMMON
             "\"hidden_size\":32,\"intermediate_size\":64,\"num_attention_heads\":4,\"num_key_"
             "value_heads\":2,\"tie_word_embeddings\":false,"
             "\"use_sliding_window\":false}"},
    {.name = "qwen3",
     .json =
         "{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\"," COMMON
         "\"hidden_size\":32,\"intermediate_size\":64,\"num_attention_heads\":4,\"num_key_value_"
         "heads\":2,\"head_dim\":16,"
         "\"tie_word_embeddings\":false,\"attention_bias\":false,\"use_sliding_window\":false}"},
    /* tied, and blocks read what others have made */
    {.name = "gemma4",
     .json = "{\"architectures\":[\"Gemma4ForCausalLM\"],\"model_type\":\"gemma4_text\",\"vocab_"
             "size\":96,\"num_hidden_layers\":4,\"hidden_size\":32,\"intermediate_size\":64,\"num_"
             "attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":16,\"global_head_dim\":16,"
             "\"num_global_key_value_heads\":1,\"attention_k_eq_v\":true,\"layer_types\":["
             "\"sliding_attention\",\"full_attention\",\"sliding_attention\",\"full_attention\"],"
             "\"sliding_window\":9,\"num_kv_shared_layers\":2,\"use_double_wide_mlp\":true,"
             "\"hidden_size_per_layer_input\":16,\"vocab_size_per_layer_input\":96}"},
    {.name = "qwen2-lora",
     .lora = {.rank = 3, .targets = PS_LORA_ALL, .alpha = 6},
     .json = "{\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\"," COMMON
             "\"hidden_size\":32,\"intermediate_size\":64,\"num_attention_heads\":4,\"num_key_"
             "value_heads\":2,\"tie_word_embeddings\":false,"
             "\"use_sliding_window\":false}"},
    /* FP8's cases leave this one out */
    {.name = "qwen3-moe",
     .json = "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\"," COMMON
             "\"hidden_size\":32,\"intermediate_size\":64,\"num_attention_heads\":4,\"num_key_"
             "value_heads\":2,\"head_dim\":16,\"moe_intermediate_size\":24,\"num_experts\":6,"
             "\"num_experts_per_tok\":2,\"norm_topk_prob\":true,\"mlp_only_layers\":[1]}"},
};
enum { N_MODELS = sizeof models / sizeof *models, N_FP8_MODELS = N_MODELS - 1 };

static inline void make_model(model *m, const char *root) {
  snprintf(m->dir, sizeof m->dir, "%s/%s", root, m->name);
  tiny_model_write(m->dir, m->json, &m->cfg);
}

/* ---- a training ------------------------------------------------------------------------------ */

static inline ps_status fill_batch(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                                   uint64_t n) {
  uint64_t state = mix64(step + 1);
  (void)user;
  for (uint64_t i = 0; i < n; i++) {
    tokens[i] = (int32_t)rnd_below(&state, 96);
    targets[i] = rnd_below(&state, 9) ? (int32_t)rnd_below(&state, 96) : -1;
  }
  return PS_OK;
}

/* 0xff everywhere is NaN in both dtypes. Weights and the optimizer's state are left alone: they
 * come first in their space, but for what lies between them: host-resident gradients, and
 * on the device the weights that each step fetches anew. */
static inline void poison(ps_trainer *t, bool first) {
  const ps__step *s = &t->plan->step;
  uint64_t state_end[PS_MAX_PLACES] = {0};
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++) {
    const ps__unit_host *h = &s->unit_host[u];
    const bool stay = ps__weights_stay(&t->plan->spec, u);
    enum { N_STATE = 3 + PS_MAX_STATES + PS_MAX_DEVICES };
    uint32_t state[N_STATE] = {h->weights, h->master, h->device_master, h->state[0], h->state[1]};
    for (uint32_t d = 0; d < PS_MAX_DEVICES; d++)
      state[3 + PS_MAX_STATES + d] =
          stay && d < t->plan->at->n_devices ? h->device_weights[d] : PS__NO_VT;
    for (int i = 0; i < N_STATE; i++)
      if (state[i] != PS__NO_VT) {
        const ps__vt *v = &s->vt[state[i]];
        if (v->offset + v->bytes > state_end[v->space])
          state_end[v->space] = v->offset + v->bytes;
      }
    if (h->grad != PS__NO_VT)
      memset(ps__array_at(t, u, PS__ARRAY_GRAD, 0), 0xff, s->vt[h->grad].bytes);
  }
  /* nothing is there yet: the prologue comes with the first step */
  for (uint32_t d = 0; first && d < t->plan->at->n_devices; d++)
    state_end[t->plan->at->dev[d].place] = 0;
  /* the last step's norm may clip the next one */
  ps__step_stats *stats = (ps__step_stats *)(void *)(t->host + s->vt[s->stats].offset),
                 kept = *stats;
  for (uint32_t space = 0; space < t->plan->at->n_places && space != t->plan->at->disk; space++)
    memset((char *)ps_engine_space(t->engine, space) + state_end[space], 0xff,
           ps_engine_space_bytes(t->engine, space) - state_end[space]);
  *stats = kept;
}

static inline uint64_t hash(uint64_t h, const void *p, uint64_t bytes) {
  const uint64_t *w = p; /* arrays on the host are multiples of 64 elements */
  for (uint64_t i = 0; i < bytes / 8; i++)
    h = mix64(h ^ w[i]);
  return h;
}

static inline uint64_t hash_state(const ps_trainer *t) {
  const ps__step *s = &t->plan->step;
  uint64_t h = 0;
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++) {
    const ps__unit_host *at = &s->unit_host[u];
    /* with master weights only these are copied to the host from weights that stay on the device:
     * what travels is there */
    const bool stay = ps__weights_stay(&t->plan->spec, u) && at->master != PS__NO_VT;
    uint32_t d = 0; /* the first device that has the unit */
    while (stay && at->device_weights[d] == PS__NO_VT)
      d++;
    const uint32_t kept[2 + PS_MAX_STATES] = {stay ? at->device_weights[d] : at->weights,
                                              at->master, at->state[0], at->state[1]};
    for (int i = 0; i < 2 + PS_MAX_STATES; i++)
      if (kept[i] != PS__NO_VT && s->vt[kept[i]].space == t->plan->at->disk) {
        const uint32_t what = PS__ARRAY_STATE + (uint32_t)i - 2;
        const uint64_t bytes = ps__array_bytes(t, u, what, at->n);
        void *there = malloc(bytes);
        CHECK(there && ps__array_read(t, u, what, 0, at->n, there) == PS_OK);
        h = hash(h, there, bytes);
        free(there);
      } else if (kept[i] != PS__NO_VT) {
        const ps__vt *v = &s->vt[kept[i]];
        h = hash(h, (char *)ps_engine_space(t->engine, v->space) + v->offset, v->bytes);
      }
  }
  return h;
}

/* ---- specs ----------------------------------------------------------------------------------- */

static inline void resident_spec(ps__spec *spec, const model *m, const ps_plan_config *cfg,
                                 const ps__layout *l) {
  CHECK(ps__spec_init(spec, m->made, l) == PS_OK);
  spec->recipe = ps__plan_row(cfg);
  spec->optimizer = (ps_optimizer)cfg->optimizer;
  spec->chunk_tokens = cfg->chunk_tokens;
  spec->chunks_per_round = l->chunks_per_round;
  spec->first_round_chunks = l->first_round_chunks;
  spec->first_rounds = l->first_rounds;
  spec->head_slice = cfg->head_slice_tokens;
  spec->clip = cfg->clip_norm > 0 && cfg->clip_by == PS_CLIP_BY_STEP;
  spec->clip_previous = cfg->clip_by == PS_CLIP_BY_PREVIOUS;
  memset(spec->param_resident, 1, spec->n_units);
  for (uint32_t u = 0; u < spec->n_units; u++)
    spec->grad_resident[u] = !m->made->unit[u].frozen;
  memset(spec->policy, PS_POLICY_DEVICE, (size_t)spec->n_layers * spec->n_chunks * spec->n_saved);
}

/* The inputs of block @layer, counted from 0, are made again. */
static inline void drop_inputs(ps__spec *spec, uint32_t layer) {
  const ps__layer_def *d = ps__layer_of(spec->model, layer + 1);
  for (uint32_t c = 0; c < spec->n_chunks; c++)
    *ps__spec_policy(spec, layer, c, (uint32_t)d->tensor[d->input].saved) = PS_POLICY_RECOMPUTE;
}

/* Every decision by itself; a bias of the draw (mostly one policy, or an even mix) reaches the
 * corners too. */
static inline void randomize(ps__spec *spec, const model *m, const ps__layout *l, uint64_t *state) {
  const ps__contributions sums = ps__contributions_of(
      l, spec->head_slice, (ps_dtype)ps__recipes[spec->recipe].grad.dtype, false);
  const uint32_t favour = rnd_below(state, 4);
  const bool may_split = spec->clip && ps__optimizers[spec->optimizer].splits;
  spec->keep_grads = rnd_below(state, 2) != 0;
  spec->passing_grads = !spec->clip && !spec->keep_grads && rnd_below(state, 2);
  spec->update_lag = spec->passing_grads ? rnd_below(state, 3 * MAX_LEAD) : 0;
  spec->param_lead = rnd_below(state, MAX_LEAD);
  spec->saved_lead = rnd_below(state, MAX_LEAD);
  spec->saved_lag = rnd_below(state, MAX_LEAD);
  spec->grad_lag = rnd_below(state, MAX_LEAD);
  spec->sum_lag = rnd_below(state, 3 * MAX_LEAD);
  spec->sum_threads = rnd_below(state, 3);
  spec->blocks_kept = rnd_below(state, spec->n_layers + 1);
  spec->disk = false;
  memset(spec->state_on_disk, 0, spec->n_units);
  for (uint32_t u = 0; u < spec->n_units; u++) {
    spec->param_resident[u] = rnd_below(state, 2) != 0;
    if (m->made->unit[u].frozen) {
      spec->grad_resident[u] = spec->update_resident[u] = spec->update_streamed[u] =
          spec->state_held[u] = spec->update_split[u] = 0;
      continue;
    }
    spec->grad_resident[u] = rnd_below(state, 2) != 0;
    /* an update on the device needs parameters and the gradient's total there */
    const bool several = ps__unit_contributions(m->made, &sums, u) > 1;
    spec->update_resident[u] =
        spec->param_resident[u] && (spec->grad_resident[u] || !several) && rnd_below(state, 2);
    spec->update_streamed[u] = !spec->update_resident[u] && rnd_below(state, 2);
    spec->state_held[u] = spec->update_streamed[u] && rnd_below(state, 2);
    spec->update_split[u] = may_split && !ps__updated_on_device(spec, u) && rnd_below(state, 2);
  }
  /* half of the specs have several devices, on which weights are not the only copy */
  spec->n_devices = rnd_below(state, 2) ? 1 : 2 + rnd_below(state, 3);
  memset(spec->update_resident, 0, spec->n_devices > 1 ? spec->n_units : 0);
  spec->embed_on_host = !m->cfg.tied_embeddings && rnd_below(state, 2);
  /* half of these are rings, where devices have one to three blocks in turn */
  spec->ring_blocks = spec->n_devices > 1 && rnd_below(state, 2) ? 1 + rnd_below(state, 3) : 0;
  if (ps__has_carried(&m->cfg))
    spec->ring_blocks = 0;
  spec->ring_by_host = spec->ring_blocks && rnd_below(state, 2);
  for (uint32_t u = 0; u < spec->n_units; u++)
    spec->in_pieces[u] = spec->n_devices > 1 && rnd_below(state, 3) &&
                         !(u == 0 && (m->cfg.tied_embeddings || spec->embed_on_host)) &&
                         !(spec->ring_blocks && m->made->unit[u].layer != ps__head_layer(m->made));
  /* and so are totals that are not in pieces */
  for (uint32_t u = 0; u < spec->n_units && spec->n_devices > 1; u++)
    spec->grad_resident[u] &= spec->in_pieces[u];
  if (spec->embed_on_host)
    spec->param_resident[0] = spec->grad_resident[0] = spec->update_resident[0] =
        spec->update_streamed[0] = spec->state_held[0] = spec->update_split[0] = 0;
  for (uint32_t layer = 0; layer < spec->n_layers; layer++)
    for (uint32_t c = 0; c < spec->n_chunks; c++)
      for (uint32_t saved = 0; saved < spec->n_saved; saved++) {
        uint32_t policy =
            favour < 3 && rnd_below(state, 4) ? favour : rnd_below(state, PS_N_POLICIES);
        /* a block's input is kept somewhere, or dropped in all chunks (below) */
        if (saved == 0 && policy >= PS_POLICY_RECOMPUTE)
          policy = rnd_below(state, 2);
        *ps__spec_policy(spec, layer, c, saved) = (uint8_t)policy;
      }
  for (uint32_t layer = ps__first_saving(m->made) + 1; layer < spec->n_layers; layer++)
    if (!spec->ring_blocks && !ps__input_again(spec, layer) && rnd_below(state, 2))
      drop_inputs(spec, layer);
}

#endif
