/* train_pieces.h - a tiny training on the CPU, in pieces that native tests of trainings share: its
 * folder, options, plans of all placements, its weights as a hash. */
#ifndef PS_TESTS_TRAIN_PIECES_H
#define PS_TESTS_TRAIN_PIECES_H
#include "tiny_model.h"
#include "plan/plan_impl.h"
#include "train/trainer.h"
#include <math.h>
#include <penstock/generate.h>
#include <penstock/checkpoint.h>
#include <penstock/train.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

#ifdef PS_SANITIZED
enum {
  STRIDE = 997,
  STEP = 13,
  N_FIRST = 8,
  N_CANCELS = 5,
  N_READS = 4,
  RECIPE_STEP = 4,
  CLIP_STEP = 2
};
#else
enum {
  STRIDE = 97,
  STEP = 1,
  N_FIRST = 100,
  N_CANCELS = 50,
  N_READS = 7,
  RECIPE_STEP = 1,
  CLIP_STEP = 1
};
#endif
enum { SEQ_LEN = 16, SEQUENCES = 4, VOCAB = 96, MAX_PARAMS = 64, VAL_TOKENS = 7 * SEQ_LEN };

static const char config_json[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"vocab_size\":96,\"num_"
    "hidden_layers\":2,\"hidden_act\":\"silu\","
    "\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"hidden_size\":"
    "32,\"intermediate_size\":64,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"tie_word_embeddings\":false}";

static char root[256], model_dir[300], shard[300], new_dir[300], old_dir[300];
static ps_model_config model;
static ps_model *params; /* of it */
static ps_hardware hw;

/* ---- pieces ---------------------------------------------------------------------------------- */

/* @recipe: a row of ps__recipes. */
static inline ps_plan_config plan_config(uint32_t recipe, bool clip) {
  return (ps_plan_config){PLAN_DEFAULTS,
                          .recipe = recipe % PS_N_RECIPES,
                          .state_bits = ps__recipes[recipe].state_bits,
                          .seq_len = SEQ_LEN,
                          .tokens_per_step = SEQ_LEN * SEQUENCES,
                          .chunk_tokens = SEQ_LEN,
                          .chunks_per_round = 2,
                          .clip_norm = clip ? 0.5 : 0,
                          .n_threads = 2,
                          .reserve_bytes = 1 << 20};
}

static inline ps_train_config train_config(ps_dataset *ds) {
  ps_train_config c = {0};
  ps_train_config_init(&c);
  c.lr = 1e-2;
  c.dataset = ds;
  return c;
}

/* Where a plan keeps things. It is made of these decisions, not searched for: under the caps that a
 * model of this size can be given, a search leaves all of it on the device. */
typedef enum placement {
  RESIDENT, /* weights, totals, state and activations stay on the device, which updates */
  TIGHT,    /* everything streams, activations are recomputed, updates are on the host */
  STREAMED, /* the same, but the device updates: its state streams too */
  IN_PARTS, /* as TIGHT, and with clipping updates are in two parts */
  HELD,     /* two devices hold the state of what each updates, rounds run on them */
  N_PLACEMENTS,
  /* of some tests */
  STATE_STREAMED = N_PLACEMENTS, /* weights stay, state streams */
  MIXED, /* the device holds the state of the first block, which it updates; else as TIGHT */
  FOUND  /* what a search without caps finds */
} placement;

static inline void place(ps__spec *s, placement where) {
  const bool all = where == RESIDENT, held = where == HELD;
  memset(s->param_resident, all || where == STATE_STREAMED, s->n_units);
  memset(s->grad_resident, all, s->n_units);
  memset(s->update_resident, all, s->n_units);
  if (all)
    memset(s->policy, PS_POLICY_DEVICE, (size_t)s->n_layers * s->n_chunks * s->n_saved);
  s->n_devices = held ? 2 : 1;
  memset(s->update_streamed, where == STREAMED || where == STATE_STREAMED || held, s->n_units);
  memset(s->state_held, held, s->n_units);
  for (uint32_t u = 0; u < s->n_units && where == MIXED; u++)
    s->update_streamed[u] = s->state_held[u] = params->unit[u].layer == 1;
  memset(s->update_split, where == IN_PARTS && s->clip && ps__optimizers[s->optimizer].splits,
         s->n_units);
}

static inline ps_plan *make_plan_of(ps_plan_config cfg, placement where) {
  ps_plan *plan;
  ps__layout layout;
  ps__spec spec;
  if (where == FOUND) {
    CHECK(ps_plan_create(&plan, &model, &cfg, &hw) == PS_OK);
    return plan;
  }
  CHECK(ps__layout_init(&layout, cfg.seq_len, SEQUENCES, cfg.chunk_tokens, cfg.chunks_per_round, 0,
                        0) == PS_OK);
  CHECK(ps__spec_init(&spec, params, &layout) == PS_OK);
  spec.recipe = ps__plan_row(&cfg);
  spec.optimizer = (ps_optimizer)cfg.optimizer;
  spec.chunk_tokens = layout.chunk_tokens;
  spec.chunks_per_round = layout.chunks_per_round;
  spec.first_round_chunks = layout.first_round_chunks;
  spec.first_rounds = layout.first_rounds;
  spec.head_slice = SEQ_LEN;
  spec.clip = cfg.clip_norm > 0 || cfg.non_finite == PS_NON_FINITE_SKIP;
  spec.param_lead = spec.saved_lead = spec.saved_lag = spec.grad_lag = spec.sum_lag = 1;
  place(&spec, where);
  CHECK(ps__plan_from_spec(&plan, &model, &cfg, &hw, &spec) == PS_OK);
  ps__spec_free(&spec);
  ps__layout_free(&layout);
  return plan;
}

static inline ps_plan *make_plan(uint32_t recipe, bool clip, placement where) {
  return make_plan_of(plan_config(recipe, clip), where);
}

static inline ps_dataset *open_shard(void) {
  const char *paths[] = {shard};
  ps_dataset *ds;
  CHECK(ps_dataset_open(&ds, paths, 1, VOCAB) == PS_OK);
  return ds;
}

static inline ps_trainer *make_trainer(ps_plan *plan, const ps_train_config *c) {
  ps_trainer *t;
  CHECK(ps_trainer_create(&t, model_dir, plan, c, NULL, NULL) == PS_OK);
  return t;
}

/* Hash of all parameters on the host. */
static inline uint64_t weights(ps_trainer *t) {
  uint64_t h = 0;
  for (uint32_t i = 0; i < ps_model_n_params(params); i++) {
    ps_param_info p;
    CHECK(ps_model_param(params, i, &p) == PS_OK);
    float *x = malloc(p.n * sizeof *x);
    CHECK(x && ps_trainer_read_param(t, i, x, p.n) == PS_OK);
    for (uint64_t k = 0; k < p.n; k++) {
      uint32_t bits;
      memcpy(&bits, &x[k], sizeof bits);
      h = mix64(h ^ bits);
    }
    free(x);
  }
  return h;
}

static inline void train_steps(ps_trainer *t, uint64_t n) {
  ps_step_metrics m;
  CHECK(ps_trainer_submit(t, n) == PS_OK);
  for (uint64_t i = 0; i < n; i++)
    CHECK(ps_trainer_wait(t, &m) == PS_OK && m.step == i && isfinite(m.loss));
}

static inline int open_files(void) {
  DIR *d = opendir("/proc/self/fd");
  int n = 0;
  CHECK(d);
  while (readdir(d))
    n++;
  closedir(d);
  return n;
}

/* Entries of a folder whose name contains @part; -1: no such folder. */
static inline int count_names(const char *folder, const char *part) {
  DIR *d = opendir(folder);
  int n = 0;
  if (!d)
    return -1;
  for (struct dirent *e; (e = readdir(d));)
    n += strstr(e->d_name, part) != NULL;
  closedir(d);
  return n;
}

/* Make the folder with model and data, run @tests, and see that nothing is left. */
static inline int run_trainings(void (*tests)(void)) {
  const char *tmp = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/penstock-test-train-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(root));
  snprintf(model_dir, sizeof model_dir, "%s/model", root);
  snprintf(shard, sizeof shard, "%s/shard.bin", root);
  snprintf(new_dir, sizeof new_dir, "%s/new", root);
  snprintf(old_dir, sizeof old_dir, "%s/old", root);
  tiny_model_write(model_dir, config_json, &model);
  CHECK(ps_model_create(&params, &model) == PS_OK);
  tiny_model_write(old_dir, config_json, &model);
  tiny_shard_write(shard, 5000, VOCAB);
  hw.struct_bytes = sizeof hw;
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  const int64_t live = ps__live_allocations();
  tests();
  CHECK(ps__live_allocations() == live);
  remove_folder(model_dir);
  remove_folder(old_dir);
  CHECK(unlink(shard) == 0 && rmdir(root) == 0);
  return 0;
}

#endif
