/* cuda_trainings.h - a tiny training on the GPU whose plan a test decides, and what it leaves; with
 * the argument "cpu" on the CPU backend, which shows that the test holds. */
#ifndef PS_TESTS_CUDA_TRAININGS_H
#define PS_TESTS_CUDA_TRAININGS_H
#include "tiny_model.h"
#include "train/trainer.h"

enum { SEQ_LEN = 64, VOCAB = 512, N_STEPS = 4, FAILS_AT = 3, NEVER = 1000 };

static const char config_json[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"vocab_size\":512,\"num_"
    "hidden_layers\":3,\"hidden_act\":\"silu\","
    "\"max_position_embeddings\":512,\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"hidden_size\":"
    "256,\"intermediate_size\":512,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":64,\"tie_word_embeddings\":"
    "false}";

static char root[256], model_dir[300];
static ps_model_config model;
static ps_model *params; /* of it */
static ps_hardware hw;

/* A plan of whole sequences. @cfg: what it has beside them. @decide gets the spec, and @how. */
static inline ps_plan *make_plan_of(ps_plan_config cfg, uint32_t sequences,
                                    void (*decide)(ps__spec *s, const void *how), const void *how) {
  ps_plan *plan;
  ps__layout layout;
  ps__spec s;
  cfg.struct_bytes = sizeof cfg;
  cfg.seq_len = cfg.chunk_tokens = cfg.head_slice_tokens = SEQ_LEN;
  cfg.tokens_per_step = SEQ_LEN * sequences;
  cfg.n_threads = hw.n_threads;
  cfg.deterministic = cfg.one_document = 1;
  CHECK(ps__layout_init(&layout, SEQ_LEN, sequences, cfg.chunk_tokens, cfg.chunks_per_round, 0,
                        0) == PS_OK);
  CHECK(ps__spec_init(&s, params, &layout) == PS_OK);
  s.recipe = ps__plan_row(&cfg);
  s.optimizer = (ps_optimizer)cfg.optimizer;
  s.backend = hw.backend;
  s.cudnn_version = hw.cudnn_version;
  s.deterministic = s.one_document = true;
  s.chunk_tokens = layout.chunk_tokens;
  s.chunks_per_round = layout.chunks_per_round;
  s.first_round_chunks = layout.first_round_chunks;
  s.first_rounds = layout.first_rounds;
  s.head_slice = SEQ_LEN;
  s.clip = cfg.clip_norm > 0;
  decide(&s, how);
  CHECK(ps__plan_from_spec(&plan, &model, &cfg, &hw, &s) == PS_OK);
  ps__spec_free(&s);
  ps__layout_free(&layout);
  return plan;
}

typedef struct outcome {
  double loss[N_STEPS], norm[N_STEPS];
  uint64_t parameters, state; /* hashes; state 0 where it is on the device */
} outcome;

static inline ps_status fill_batch(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                                   uint64_t n) {
  uint64_t state = mix64(step + 1);
  if (step == *(const uint64_t *)user)
    return ps__fail(PS_EIO, "no more data");
  for (uint64_t i = 0; i < n; i++) {
    tokens[i] = (int32_t)rnd_below(&state, VOCAB);
    targets[i] = rnd_below(&state, 9) ? (int32_t)rnd_below(&state, VOCAB) : -1;
  }
  return PS_OK;
}

static inline uint64_t hash(uint64_t h, const void *p, uint64_t bytes) {
  const uint32_t *w = p;
  for (uint64_t i = 0; i < bytes / 4; i++)
    h = mix64(h ^ w[i]);
  return h;
}

static inline void hash_state(ps_trainer *t, outcome *o) {
  for (uint32_t i = 0; i < ps_model_n_params(params); i++) {
    ps_param_info p;
    CHECK(ps_model_param(params, i, &p) == PS_OK);
    float *x = malloc(p.n * sizeof *x);
    CHECK(x && ps_trainer_read_param(t, i, x, p.n) == PS_OK);
    o->parameters = hash(o->parameters, x, p.n * sizeof *x);
    free(x);
  }
  const ps__step *s = &t->plan->step;
  for (uint32_t u = 0; u < s->spec->n_units && !s->spec->update_resident[u]; u++) {
    for (uint32_t k = 0; k < ps__optimizers[s->spec->optimizer].n_states; k++) {
      const ps__vt *v = &s->vt[s->unit_host[u].state[k]];
      o->state = hash(o->state, t->host + v->offset, v->bytes);
    }
  }
}

/* @n steps; with @more submitted behind them, which end in the source's error. */
static inline outcome train(ps_plan *plan, uint64_t n, uint64_t more) {
  outcome o = {.parameters = 0};
  uint64_t fails_at = more ? n : NEVER;
  ps_train_config c = {0};
  ps_trainer *t;
  ps_step_metrics m;
  ps_train_config_init(&c);
  c.lr = 1e-2;
  c.batch_fn = fill_batch;
  c.batch_user = &fails_at;
  CHECK(ps_trainer_create(&t, model_dir, plan, &c, NULL, NULL) == PS_OK);
  CHECK(ps_trainer_submit(t, n + more) == PS_OK);
  for (uint64_t i = 0; i < n; i++) {
    CHECK(ps_trainer_wait(t, &m) == PS_OK);
    o.loss[i] = m.loss;
    o.norm[i] = m.grad_norm;
  }
  if (more)
    CHECK_FAILS(ps_trainer_wait(t, &m), PS_EIO, "no more data");
  hash_state(t, &o);
  ps_trainer_destroy(t);
  return o;
}

/* Says what differs. */
static inline bool same(const outcome *a, const outcome *b) {
  const bool loss = memcmp(a->loss, b->loss, sizeof a->loss) == 0,
             norm = memcmp(a->norm, b->norm, sizeof a->norm) == 0,
             parameters = a->parameters == b->parameters,
             state = !a->state || !b->state || a->state == b->state;
  if (!loss || !norm || !parameters || !state)
    printf("differ:%s%s%s%s\n", loss ? "" : " losses", norm ? "" : " norms",
           parameters ? "" : " parameters", state ? "" : " state");
  return loss && norm && parameters && state;
}

/* Makes the model, and runs @tests; without a GPU it says why and skips. */
static inline int run_trainings(int argc, char **argv, void (*tests)(bool brief, bool cpu)) {
  const bool cpu = argc > 1 && strcmp(argv[1], "cpu") == 0,
             brief = argc > 1 && strcmp(argv[1], "short") == 0;
  const char *tmp = getenv("TMPDIR");
  hw.struct_bytes = sizeof hw;
  const ps_status st = ps_hardware_estimate(&hw, cpu ? PS_BACKEND_CPU : PS_BACKEND_CUDA, 0, 2);
  if (st == PS_EDEVICE) {
    printf("ok skipped: %s\n", ps_last_error());
    return 0;
  }
  CHECK(st == PS_OK);
  snprintf(root, sizeof root, "%s/penstock-test-cuda-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(root));
  snprintf(model_dir, sizeof model_dir, "%s/model", root);
  tiny_model_write(model_dir, config_json, &model);
  CHECK(ps_model_create(&params, &model) == PS_OK);
  const int64_t live = ps__live_allocations();
  tests(brief, cpu);
  CHECK(!cpu || ps__live_allocations() == live);
  ps_model_destroy(params);
  remove_folder(model_dir);
  CHECK(rmdir(root) == 0);
  return 0;
}

#endif
