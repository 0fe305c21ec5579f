/* test_train.c - training under failure: the Nth allocation, read, write or thread start fails, the
 * data ends in an error in the middle of a run, the loss or a gradient is not finite, a run is
 * cancelled at any moment. Each time an error with a message comes back, nothing leaks, and weights
 * on the host are those of the last complete step. And who may end what when: plans and data
 * outlive their trainer, a batch function does not wait for itself. */
#include "tiny_model.h"
#include "plan/plan_impl.h"
#include "train/trainer.h"
#include <math.h>
#include <penstock/generate.h>
#include <penstock/resume.h>
#include <penstock/train.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

#ifdef PS_SANITIZED
enum { STRIDE = 997, STEP = 13, N_CANCELS = 8, N_READS = 4, RECIPE_STEP = 4, CLIP_STEP = 2 };
#else
enum { STRIDE = 97, STEP = 1, N_CANCELS = 150, N_READS = 40, RECIPE_STEP = 1, CLIP_STEP = 1 };
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

static ps_plan_config plan_config(uint32_t recipe, bool clip) {
  return (ps_plan_config){.struct_bytes = sizeof(ps_plan_config),
                          .recipe = recipe,
                          .seq_len = SEQ_LEN,
                          .tokens_per_step = SEQ_LEN * SEQUENCES,
                          .chunk_tokens = SEQ_LEN,
                          .chunks_per_round = 2,
                          .clip = clip,
                          .n_threads = 2,
                          .reserve_bytes = 1 << 20};
}

static ps_train_config train_config(ps_dataset *ds, bool clip) {
  ps_train_config c = {0};
  ps_train_config_init(&c);
  c.lr = 1e-2;
  c.clip_norm = clip ? 0.5 : 0;
  c.dataset = ds;
  return c;
}

/* The plan without a cap (everything is resident, updates included), the tightest (everything
 * streams, updates on the host), one that streams everything and updates on the device all the
 * same, or one that streams everything and updates on the host, with clipping in two parts.
 * STATE_STREAMED, of some tests: streams the state alone, and updates on the device. */
typedef enum placement {
  RESIDENT,
  TIGHT,
  STREAMED,
  IN_PARTS,
  N_PLACEMENTS,
  STATE_STREAMED = N_PLACEMENTS
} placement;

static ps_plan *make_streamed_plan(const ps_plan_config *cfg, placement where) {
  const bool there = where != IN_PARTS;
  ps_plan *plan;
  ps__layout layout;
  ps__spec spec;
  CHECK(ps__layout_init(&layout, cfg->seq_len, SEQUENCES, cfg->chunk_tokens, cfg->chunks_per_round,
                        0) == PS_OK);
  CHECK(ps__spec_init(&spec, params, &layout) == PS_OK);
  spec.recipe = (ps_recipe)cfg->recipe;
  spec.optimizer = (ps_optimizer)cfg->optimizer;
  spec.chunk_tokens = layout.chunk_tokens;
  spec.chunks_per_round = layout.chunks_per_round;
  spec.first_round_chunks = layout.first_round_chunks;
  spec.head_slice = SEQ_LEN;
  spec.clip = cfg->clip != 0;
  spec.param_lead = spec.saved_lead = spec.saved_lag = spec.grad_lag = spec.sum_lag = 1;
  memset(spec.param_resident, where == STATE_STREAMED, spec.n_units);
  memset(spec.update_streamed, there, spec.n_units);
  memset(spec.update_split, !there && spec.clip && ps__optimizers[spec.optimizer].splits,
         spec.n_units);
  CHECK(ps__plan_from_spec(&plan, &model, cfg, &hw, &spec) == PS_OK);
  ps__spec_free(&spec);
  ps__layout_free(&layout);
  return plan;
}

static ps_plan *make_plan_of(ps_plan_config cfg, placement where) {
  ps_plan *plan;
  uint64_t host, val_tokens = cfg.val_tokens;
  if (where >= STREAMED)
    return make_streamed_plan(&cfg, where);
  cfg.val_tokens = 0;
  if (where == TIGHT)
    CHECK(ps_plan_smallest(&model, &cfg, &hw, &cfg.device_mem_bytes, &host) == PS_OK &&
          cfg.device_mem_bytes > 0);
  cfg.val_tokens = val_tokens;
  CHECK(ps_plan_create(&plan, &model, &cfg, &hw) == PS_OK);
  return plan;
}

static ps_plan *make_plan(uint32_t recipe, bool clip, placement where) {
  return make_plan_of(plan_config(recipe, clip), where);
}

static ps_dataset *open_shard(void) {
  const char *paths[] = {shard};
  ps_dataset *ds;
  CHECK(ps_dataset_open(&ds, paths, 1, VOCAB) == PS_OK);
  return ds;
}

static ps_trainer *make_trainer(ps_plan *plan, const ps_train_config *c) {
  ps_trainer *t;
  CHECK(ps_trainer_create(&t, model_dir, plan, c, NULL, NULL) == PS_OK);
  return t;
}

/* Hash of all parameters on the host. */
static uint64_t weights(ps_trainer *t) {
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

static void train_steps(ps_trainer *t, uint64_t n) {
  ps_step_metrics m;
  CHECK(ps_trainer_submit(t, n) == PS_OK);
  for (uint64_t i = 0; i < n; i++)
    CHECK(ps_trainer_wait(t, &m) == PS_OK && m.step == i && isfinite(m.loss));
}

static int open_files(void) {
  DIR *d = opendir("/proc/self/fd");
  int n = 0;
  CHECK(d);
  while (readdir(d))
    n++;
  closedir(d);
  return n;
}

/* Entries of a folder whose name contains @part; -1: no such folder. */
static int count_names(const char *folder, const char *part) {
  DIR *d = opendir(folder);
  int n = 0;
  if (!d)
    return -1;
  for (struct dirent *e; (e = readdir(d));)
    n += strstr(e->d_name, part) != NULL;
  closedir(d);
  return n;
}

/* ---- fail the Nth ---------------------------------------------------------------------------- */

typedef enum stage { PLANNING, TRAINER, STEPS, SAVE_NEW, SAVE_OVER, ALL } stage;
static stage reached;
static ps_plan *plan_made; /* what train_and_save() uses */
static ps_dataset *data_opened;

static const int32_t prompt_ids[] = {3, 1, 4, 1, 5};
static const ps_generate_request prompt = {
    .tokens = prompt_ids, .n_tokens = 5, .max_new_tokens = 3, .top_p = 1};
static int take_token(void *user, uint64_t request, int32_t token) {
  (void)user;
  CHECK(request == 0 && token >= 0 && token < VOCAB);
  return 0;
}

static ps_status train_and_save(void) {
  ps_trainer *t = NULL;
  ps_train_config c = train_config(data_opened, true);
  ps_step_metrics m;
  ps_validation v;
  c.val_dataset = data_opened;
  reached = TRAINER;
  PS_TRY(ps_trainer_create(&t, model_dir, plan_made, &c, NULL, NULL));
  reached = STEPS;
  ps_status st = ps_trainer_submit(t, 2);
  for (int i = 0; st == PS_OK && i < 2; i++)
    st = ps_trainer_wait(t, &m);
  if (st == PS_OK)
    st = ps_trainer_validate(t, &v);
  if (st == PS_OK)
    st = ps_trainer_sample(t, &prompt, 1, take_token, NULL, NULL);
  if (st == PS_OK) {
    reached = SAVE_NEW;
    st = ps_trainer_save(t, new_dir, PS_F32);
  }
  if (st == PS_OK) {
    reached = SAVE_OVER;
    st = ps_trainer_save(t, old_dir, PS_BF16);
  }
  if (st == PS_OK)
    reached = ALL;
  ps_trainer_destroy(t);
  return st;
}

static ps_status read_and_plan(void) {
  ps_model_config m = {.struct_bytes = sizeof m};
  ps_plan_config cfg = plan_config(PS_RECIPE_BF16, true);
  const char *paths[] = {shard};
  ps_dataset *ds = NULL;
  ps_plan *plan = NULL;
  cfg.sample_sequences = 2;
  cfg.sample_context = 8;
  reached = PLANNING;
  PS_TRY(ps_model_config_read(&m, model_dir));
  PS_TRY(ps_dataset_open(&ds, paths, 1, VOCAB));
  const ps_status st = ps_plan_create(&plan, &m, &cfg, &hw);
  ps_plan_destroy(plan);
  ps_dataset_close(ds);
  if (st == PS_OK)
    reached = ALL;
  return st;
}

/* A model directory that is whole: it can be opened, has all tensors, and no temporary file. */
static void check_whole(const char *dir) {
  ps_model_config m = {.struct_bytes = sizeof m};
  ps_tensor_file *f;
  CHECK(count_names(dir, ".part") == 0 && count_names(dir, "safetensors") == 1);
  CHECK(ps_model_config_read(&m, dir) == PS_OK && ps_tensors_open(&f, dir) == PS_OK);
  CHECK(ps_tensors_count(f) == ps_model_n_params(params));
  ps_tensors_close(f);
}

/* The disk after a failure in stage @s: the new directory is whole or not there (it may be there
 * when bringing its name to the disk failed last of all), the old one is whole. */
static void check_files(stage s) {
  const int n_new = count_names(root, "new");
  CHECK(count_names(root, ".part") == 0 && (s < SAVE_NEW    ? n_new == 0
                                            : s == SAVE_NEW ? n_new <= 1
                                                            : n_new == 1));
  if (n_new)
    check_whole(new_dir);
  check_whole(old_dir);
}

/* Returns how many places were made to fail: the first hundred, then every @stride-th or, where
 * that is more, a sixteenth further each time. */
static int64_t fail_nth(int kind, ps_status (*run)(void), int64_t stride) {
  const int64_t live = ps__live_allocations();
  const int files = open_files();
  int64_t places = 0;
  for (int64_t n = 1;; n += n < 100 ? 1 : stride > n / 16 ? stride : n / 16, places++) {
    ps__fault_arm(kind, n);
    const ps_status st = run();
    const int64_t calls = ps__fault_count(kind);
    ps__fault_arm(kind, 0);
    if (calls < n)
      CHECK(st == PS_OK && reached == ALL);
    else
      CHECK(st < 0 && ps_last_error()[0] && reached < ALL);
    CHECK(ps__live_allocations() == live && open_files() == files);
    check_files(reached == ALL && run == read_and_plan ? PLANNING : reached);
    remove_folder(new_dir);
    if (calls < n)
      return places;
  }
}

static void test_fail_nth(void) {
  static const char *const name[] = {[PS_FAULT_ALLOC] = "allocation",
                                     [PS_FAULT_READ] = "read",
                                     [PS_FAULT_WRITE] = "write",
                                     [PS_FAULT_THREAD] = "thread start"};
  data_opened = open_shard();
  ps_plan_config cfg = plan_config(PS_RECIPE_BF16, true);
  cfg.val_tokens = VAL_TOKENS;
  cfg.sample_sequences = 1;
  cfg.sample_context = 8;
  plan_made = make_plan_of(cfg, RESIDENT);
  /* the planner's search does the same for each candidate: strides will do */
  for (int kind = 0; kind < PS_FAULT_KINDS; kind++) {
    const int64_t n = fail_nth(kind, read_and_plan, STRIDE),
                  m = fail_nth(kind, train_and_save, STEP);
    CHECK(m > 0);
    printf("ok fail the nth %s: %lld places of planning, %lld of training and saving\n", name[kind],
           (long long)n, (long long)m);
  }
  ps_plan_destroy(plan_made);
  ps_dataset_close(data_opened);
}

/* ---- an error in the middle ------------------------------------------------------------------ */

/* Sequence @n of the run cannot be read: the steps before it complete, and are all that
 * the host and a save know of. */
static void read_fails(ps_plan *plan, ps_dataset *ds, bool clip, uint64_t n,
                       const uint64_t *expected) {
  const ps_train_config c = train_config(ds, clip);
  ps_trainer *t = make_trainer(plan, &c);
  ps_step_metrics m;
  const uint64_t whole = (n - 1) / SEQUENCES;
  ps__fault_arm(PS_FAULT_READ, (int64_t)n);
  CHECK(ps_trainer_submit(t, 8) == PS_OK);
  for (uint64_t i = 0; i < whole; i++)
    CHECK(ps_trainer_wait(t, &m) == PS_OK && m.step == i);
  CHECK_FAILS(ps_trainer_wait(t, &m), PS_EIO, shard);
  ps__fault_arm(PS_FAULT_READ, 0);
  CHECK(ps_trainer_steps_done(t) == whole && ps_trainer_submit(t, 1) == PS_EIO &&
        ps_trainer_wait(t, &m) == PS_EIO);
  CHECK(weights(t) == expected[whole]);
  CHECK(ps_trainer_save(t, new_dir, PS_F32) == PS_OK);
  remove_folder(new_dir);
  ps_trainer_destroy(t);
}

static void test_read_fails(bool clip, placement where) {
  enum { MOST = 6 };
  uint64_t expected[MOST + 1];
  ps_dataset *ds = open_shard();
  ps_plan *plan = make_plan(PS_RECIPE_BF16, clip, where);
  const ps_train_config c = train_config(ds, clip);
  for (uint64_t i = 0; i <= MOST; i++) {
    ps_trainer *t = make_trainer(plan, &c);
    train_steps(t, i);
    expected[i] = weights(t);
    CHECK(i == 0 || expected[i] != expected[i - 1]);
    ps_trainer_destroy(t);
  }
  for (uint64_t i = 0; i < N_READS; i++)
    read_fails(plan, ds, clip, 1 + i * 7 % (MOST * SEQUENCES + SEQUENCES), expected);
  ps_plan_destroy(plan);
  ps_dataset_close(ds);
}

/* Tokens past the vocabulary, from a source that nobody checked before. */
static ps_status alien_batch(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                             uint64_t n) {
  for (uint64_t i = 0; i < n; i++)
    tokens[i] = targets[i] = (int32_t)(i % VOCAB);
  if (step == *(const uint64_t *)user)
    tokens[n - 1] = VOCAB;
  return PS_OK;
}

static void test_alien_token(void) {
  ps_plan *plan = make_plan(PS_RECIPE_FP32, true, RESIDENT);
  uint64_t when = 2;
  ps_train_config c = train_config(NULL, true);
  c.batch_fn = alien_batch;
  c.batch_user = &when;
  ps_trainer *t = make_trainer(plan, &c);
  ps_step_metrics m;
  CHECK(ps_trainer_submit(t, 5) == PS_OK && ps_trainer_wait(t, &m) == PS_OK &&
        ps_trainer_wait(t, &m) == PS_OK);
  CHECK_FAILS(ps_trainer_wait(t, &m), PS_EFORMAT, "step 3, sequence 3, position 15: token 96");
  ps_trainer_destroy(t);
  ps_plan_destroy(plan);
}

/* Every third target is not counted, under the value that is asked for. */
static ps_status sparse_batch(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                              uint64_t n) {
  (void)step;
  for (uint64_t i = 0; i < n; i++) {
    tokens[i] = (int32_t)(i % VOCAB);
    targets[i] = i % 3 == 1 ? *(const int32_t *)user : tokens[i];
  }
  return PS_OK;
}

static void test_targets_not_counted(void) {
  ps_plan *plan = make_plan(PS_RECIPE_FP32, true, RESIDENT);
  int32_t mark;
  ps_train_config c = train_config(NULL, true);
  ps_step_metrics m[2];
  uint64_t bits[2];
  c.batch_fn = sparse_batch;
  c.batch_user = &mark;
  for (int i = 0; i < 2; i++) {
    mark = i ? -100 : -1;
    ps_trainer *t = make_trainer(plan, &c);
    CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m[i]) == PS_OK);
    bits[i] = weights(t);
    ps_trainer_destroy(t);
  }
  CHECK(m[0].valid_tokens == m[0].tokens - (m[0].tokens + 1) / 3 &&
        m[1].valid_tokens == m[0].valid_tokens);
  CHECK(m[0].loss == m[1].loss && bits[0] == bits[1]);
  static const struct {
    int32_t mark;
    const char *says;
  } bad[] = {{-2, "position 1: target -2 is no id of the vocabulary of 96: -1 or -100"},
             {VOCAB, "position 1: target 96 is no id"}};
  for (size_t i = 0; i < 2; i++) {
    mark = bad[i].mark;
    ps_trainer *t = make_trainer(plan, &c);
    CHECK(ps_trainer_submit(t, 1) == PS_OK);
    CHECK_FAILS(ps_trainer_wait(t, &m[0]), PS_EFORMAT, bad[i].says);
    ps_trainer_destroy(t);
  }
  ps_plan_destroy(plan);
}

/* ---- not finite ------------------------------------------------------------------------------ */

static uint32_t param_named(const char *name) {
  const uint32_t i = ps_model_find(params, name);
  CHECK(i != UINT32_MAX);
  return i;
}

static void fill_param(ps_trainer *t, const char *name, float value) {
  const uint32_t idx = param_named(name);
  ps_param_info p;
  CHECK(ps_model_param(params, idx, &p) == PS_OK);
  float *x = malloc(p.n * sizeof *x);
  CHECK(x);
  for (uint64_t k = 0; k < p.n; k++)
    x[k] = k % 3 ? value : -value;
  CHECK(ps_trainer_write_param(t, idx, x, p.n) == PS_OK);
  free(x);
}

/* The loss becomes infinite or NaN; nothing of that step is updated. */
static void test_bad_loss(ps_dataset *ds, uint32_t recipe, bool clip, placement where) {
  ps_plan *plan = make_plan(recipe, clip, where);
  const ps_train_config c = train_config(ds, clip);
  ps_trainer *t = make_trainer(plan, &c);
  ps_step_metrics m;
  fill_param(t, "lm_head.weight", 3e38f);
  const uint64_t before = weights(t);
  CHECK(ps_trainer_submit(t, 4) == PS_OK);
  CHECK(ps_trainer_wait(t, &m) == PS_ENUMERIC && strstr(ps_last_error(), "step 1: ") &&
        strstr(ps_last_error(), "--lr"));
  if (clip)
    CHECK(strstr(ps_last_error(), "the loss is infinite") ||
          strstr(ps_last_error(), "the loss is not a number"));
  CHECK(weights(t) == before && ps_trainer_steps_done(t) == 0);
  ps_trainer_destroy(t);
  ps_plan_destroy(plan);
}

/* A learning rate that throws the weights away: the steps before stand, the one that is not
 * finite does not count. */
static void test_bad_rate(ps_dataset *ds, placement where) {
  ps_plan *plan = make_plan(PS_RECIPE_FP32, true, where);
  ps_train_config c = train_config(ds, true);
  c.lr = 1e36;
  c.weight_decay = 0;
  ps_trainer *t = make_trainer(plan, &c);
  ps_step_metrics m;
  char text[16];
  uint64_t n = 0;
  CHECK(ps_trainer_submit(t, 20) == PS_OK);
  ps_status st;
  while ((st = ps_trainer_wait(t, &m)) == PS_OK)
    n++;
  snprintf(text, sizeof text, "step %llu", (unsigned long long)n + 1);
  CHECK(st == PS_ENUMERIC && n >= 1 && strstr(ps_last_error(), text) &&
        ps_trainer_steps_done(t) == n);
  const uint64_t after = weights(t);
  ps_trainer_destroy(t);
  t = make_trainer(plan, &c);
  train_steps(t, n);
  CHECK(weights(t) == after);
  ps_trainer_destroy(t);
  ps_plan_destroy(plan);
}

/* up * down is 1e41 and the gate's output about 1e-41: the block's output is of order 1, but d
 * loss / d gate, which has the factor up * down, leaves fp32. */
static void test_bad_gradient(ps_dataset *ds, int layer, placement where) {
  ps_plan *plan = make_plan(PS_RECIPE_FP32, true, where);
  const ps_train_config c = train_config(ds, true);
  ps_trainer *t = make_trainer(plan, &c);
  ps_step_metrics m;
  char name[64], text[128];
  static const struct {
    const char *what;
    float value;
  } part[] = {{"gate", 1e-42f}, {"up", 1e36f}, {"down", 1e6f}};
  for (int i = 0; i < 3; i++) {
    snprintf(name, sizeof name, "model.layers.%d.mlp.%s_proj.weight", layer, part[i].what);
    fill_param(t, name, part[i].value);
  }
  snprintf(text, sizeof text,
           "step 1: the gradient of layer %d is not finite, first in model.layers.%d.", layer,
           layer);
  const uint64_t before = weights(t);
  CHECK(ps_trainer_submit(t, 3) == PS_OK);
  CHECK_FAILS(ps_trainer_wait(t, &m), PS_ENUMERIC, text);
  snprintf(text, sizeof text,
           "of chunk 0 (sequences 0 to 0), in the backward pass of layer %d (op ", layer);
  CHECK(strstr(ps_last_error(), text) && weights(t) == before && ps_trainer_steps_done(t) == 0);
  ps_trainer_destroy(t);
  ps_plan_destroy(plan);
}

static void test_not_finite(void) {
  ps_dataset *ds = open_shard();
  for (int i = 0; i < 2 * N_PLACEMENTS; i++)
    for (uint32_t recipe = (uint32_t)i % RECIPE_STEP; recipe < PS_N_RECIPES; recipe += RECIPE_STEP)
      test_bad_loss(ds, recipe, i & 1, (placement)(i / 2));
  printf("ok a loss that is not finite stops the run before anything of its step is updated\n");
  for (placement where = 0; where < N_PLACEMENTS; where++)
    test_bad_rate(ds, where);
  printf("ok after a learning rate that is too high the last complete step stands\n");
  for (int i = 0; i < 2 * N_PLACEMENTS; i++)
    test_bad_gradient(ds, i & 1, (placement)(i / 2));
  printf("ok a gradient that is not finite names step and unit, and nothing is updated\n");
  ps_dataset_close(ds);
}

/* ---- cancel ---------------------------------------------------------------------------------- */

static ps_trainer *volatile to_cancel;
static void on_alarm(int sig) { ps_trainer_cancel(to_cancel); }

typedef struct canceller {
  ps_trainer *t;
  uint32_t after_us;
} canceller;
static void cancel_later(void *arg) {
  const canceller *c = arg;
  usleep(c->after_us);
  ps_trainer_cancel(c->t);
}

/* Weights after each of the first steps of a run: of as many as a run that is to be cancelled
 * gets. */
enum { N_KNOWN = 200 };
static uint64_t known[N_KNOWN];
static void know_steps(ps_plan *plan, const ps_train_config *c) {
  ps_trainer *t = make_trainer(plan, c);
  ps_step_metrics m;
  for (int i = 0; i < N_KNOWN; i++) {
    known[i] = weights(t);
    CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK);
  }
  ps_trainer_destroy(t);
}

/* Weights are of the last step that is done, or the error says that they may be of two. */
static bool said_if_of_two(ps_trainer *t, const char *error) {
  if (strstr(error, "one step ahead of the others"))
    return true;
  CHECK(ps_trainer_steps_done(t) < N_KNOWN && weights(t) == known[ps_trainer_steps_done(t)]);
  return false;
}

/* Steps go on being submitted until the cancel is felt. Returns whether it came amid updates. */
static bool cancelled_run(ps_plan *plan, const ps_train_config *c, uint32_t after_us,
                          bool by_signal) {
  ps_trainer *t = make_trainer(plan, c);
  canceller who = {t, after_us};
  ps__thread *thread = NULL;
  timer_t timer;
  const uint64_t begin_ns = ps__now_ns();
  if (by_signal) {
    const struct itimerspec when = {.it_value = {0, (long)after_us * 1000 + 1}};
    to_cancel = t;
    CHECK(timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0 &&
          timer_settime(timer, 0, &when, NULL) == 0);
  } else {
    CHECK(ps__thread_start(&thread, cancel_later, &who, "cancel") == PS_OK);
  }
  ps_step_metrics m;
  ps_status st = PS_OK;
  for (int i = 0; st == PS_OK; i++) {
    /* on a machine that has no time for the other thread */
    if (i == N_KNOWN - 4)
      ps_trainer_cancel(t);
    st = ps_trainer_submit(t, i ? 1 : 2);
    if (st == PS_OK)
      st = ps_trainer_wait(t, &m);
  }
  CHECK(st == PS_ECANCELLED && ps_last_error()[0]);
  /* steps of a millisecond: a hang is what this is for */
  CHECK(ps__now_ns() - begin_ns < 5000000000u);
  ps_trainer_cancel(t); /* once more does no harm */
  CHECK(ps_trainer_wait(t, &m) == PS_ECANCELLED && weights(t) != 0);
  const bool amid = said_if_of_two(t, ps_last_error());
  if (by_signal)
    CHECK(timer_delete(timer) == 0);
  ps__thread_join(thread);
  ps_trainer_destroy(t);
  return amid;
}

/* A cancel out of an op of the third step, which then takes its time: that step is done where
 * the op is behind its updates, or is the report, which says that they are. */
static ps__hook cancel_in;
static ps_status cancelling_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch) {
  if (what == cancel_in && launch->step == 2) {
    ps_trainer_cancel(ctx);
    usleep(10000);
  }
  return ps__trainer_hook(ctx, what, unit, launch);
}

static void test_cancel_behind_updates(ps_dataset *ds) {
  static const ps__hook in[] = {PS__HOOK_REPORT, PS__HOOK_UPDATE_STATE};
  ps_plan *plan = make_plan(PS_RECIPE_BF16, true, IN_PARTS);
  const ps_train_config c = train_config(ds, true);
  know_steps(plan, &c);
  for (int i = 0; i < 2; i++) {
    ps_trainer *t = make_trainer(plan, &c);
    ps_step_metrics m;
    uint64_t n;
    cancel_in = in[i];
    plan->hooks.fn = cancelling_hook;
    CHECK(ps_trainer_submit(t, 3) == PS_OK);
    for (int k = 0; k < 3; k++)
      CHECK(ps_trainer_wait(t, &m) == PS_OK && m.step == (uint64_t)k);
    CHECK(ps_trainer_trace(t, NULL, 0, &n) == PS_OK); /* nothing is under way any more */
    CHECK(ps_trainer_steps_done(t) == 3 && weights(t) == known[3]);
    CHECK(ps_trainer_submit(t, 1) == PS_ECANCELLED && !strstr(ps_last_error(), "one step ahead") &&
          weights(t) == known[3]);
    ps_trainer_destroy(t);
  }
  ps_plan_destroy(plan);
  printf("ok a step that is cancelled behind its updates is done\n");
}

static void test_cancel(void) {
  ps_dataset *ds = open_shard();
  uint64_t state = 5;
  test_cancel_behind_updates(ds);
  signal(SIGALRM, on_alarm);
  for (int i = 0; i < 2 * N_PLACEMENTS; i++) {
    const bool clip = i & 1;
    ps_plan *plan = make_plan(PS_RECIPE_BF16, clip, (placement)(i / 2));
    const ps_train_config c = train_config(ds, clip);
    int amid = 0;
    know_steps(plan, &c);
    for (int k = 0; k < N_CANCELS; k++)
      amid += cancelled_run(plan, &c, k < 3 ? 0 : rnd_below(&state, 6000), k & 1);
    CHECK(!clip || amid < N_CANCELS);
    printf("  %s clipping, %d of %d cancels came amid updates\n", clip ? "with" : "without", amid,
           N_CANCELS);
    ps_plan_destroy(plan);
  }
  signal(SIGALRM, SIG_DFL);
  ps_dataset_close(ds);
  printf("ok a run is cancelled at any moment, by a thread and by a signal handler\n");
}

/* ---- life cycle ------------------------------------------------------------------------------ */

static ps_trainer *stepped;
static _Atomic uint32_t n_created, asking;

/* A batch function steps and ends its own trainer, while the caller waits for the batch. */
static ps_status misusing_batch(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                                uint64_t n) {
  ps_step_metrics m;
  CHECK_FAILS(ps_trainer_wait(stepped, &m), PS_ESTATE,
              "a batch function cannot step its own trainer");
  CHECK_FAILS(ps_trainer_submit(stepped, 1), PS_ESTATE,
              "a batch function cannot step its own trainer");
  CHECK_FAILS(ps_trainer_destroy(stepped), PS_ESTATE, "an op of it cannot close it");
  CHECK(!ps_trainer_at_rest(stepped) && ps_op_engine());
  for (uint64_t i = 0; i < n; i++)
    tokens[i] = targets[i] = (int32_t)(i % VOCAB);
  return PS_OK;
}

static void test_own_batch(void) {
  ps_plan *plan = make_plan(PS_RECIPE_FP32, true, RESIDENT);
  ps_train_config c = train_config(NULL, true);
  c.batch_fn = misusing_batch;
  stepped = make_trainer(plan, &c);
  CHECK(ps_trainer_at_rest(stepped) && !ps_op_engine());
  train_steps(stepped, 3);
  CHECK(ps_trainer_at_rest(stepped) && ps_trainer_destroy(stepped) == PS_OK &&
        ps_plan_destroy(plan) == PS_OK);
}

typedef struct owned {
  ps_plan *plan;
  ps_dataset *ds;
  ps_trainer *t;
} owned;

static void create_one(void *arg) {
  owned *o = arg;
  const ps_train_config c = train_config(o->ds, true);
  if (ps_trainer_create(&o->t, model_dir, o->plan, &c, NULL, NULL) == PS_OK)
    atomic_fetch_add(&n_created, 1);
  else
    CHECK(strstr(ps_last_error(), "another trainer runs this plan"));
}

static void ask(void *arg) {
  const owned *o = arg;
  char text[1024];
  for (uint64_t done = 0; atomic_load(&asking);) {
    const uint64_t now = ps_trainer_steps_done(o->t);
    CHECK(now >= done);
    done = now;
    ps_trainer_where(o->t, text, sizeof text);
    CHECK_FAILS(ps_plan_destroy(o->plan), PS_EBUSY, "a trainer still uses it");
    CHECK_FAILS(ps_dataset_close(o->ds), PS_EBUSY, "1 trainer(s) still read it");
  }
}

static void end_when_free(void *arg) {
  owned *o = arg;
  while (ps_plan_destroy(o->plan) == PS_EBUSY)
    usleep(10);
  while (ps_dataset_close(o->ds) == PS_EBUSY)
    usleep(10);
}

static void test_life(void) {
  owned o[2] = {{.plan = make_plan(PS_RECIPE_FP32, true, TIGHT), .ds = open_shard()}};
  ps__thread *thread[2];
  o[1] = o[0];
  atomic_store(&n_created, 0);
  for (int i = 0; i < 2; i++)
    CHECK(ps__thread_start(&thread[i], create_one, &o[i], "create") == PS_OK);
  for (int i = 0; i < 2; i++)
    ps__thread_join(thread[i]);
  CHECK(atomic_load(&n_created) == 1);
  if (!o[0].t)
    o[0].t = o[1].t;
  atomic_store(&asking, 1);
  CHECK(ps__thread_start(&thread[0], ask, &o[0], "ask") == PS_OK);
  train_steps(o[0].t, 20);
  atomic_store(&asking, 0);
  ps__thread_join(thread[0]);
  CHECK(ps_trainer_submit(o[0].t, 2) == PS_OK);
  CHECK(ps__thread_start(&thread[0], end_when_free, &o[0], "end") == PS_OK);
  CHECK(ps_trainer_destroy(o[0].t) == PS_OK);
  ps__thread_join(thread[0]);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static _Atomic long write_ns; /* every write takes so long before it reads the data */

/* The library's too: the program's symbol comes first. */
ssize_t write(int fd, const void *data, size_t bytes) {
  const long ns = atomic_load(&write_ns);
  if (ns)
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
  return syscall(SYS_write, fd, data, bytes);
}

/* Hash of the weights and states in a checkpoint, which is then removed. */
static uint64_t take_state(ps_trainer *t, const char *dir) {
  uint64_t h = 0;
  CHECK(ps_trainer_checkpoint(t, dir) == PS_OK);
  static const char *const files[] = {"model", "exp_avg", "exp_avg_sq", "momentum_buffer"};
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    char path[400], buffer[4096];
    snprintf(path, sizeof path, "%s/%s.safetensors", dir, files[i]);
    FILE *f = fopen(path, "rb");
    for (size_t n; f && (n = fread(buffer, 1, sizeof buffer, f)) > 0;)
      for (size_t k = 0; k < n; k++)
        h = mix64(h ^ (uint64_t)buffer[k] ^ i << 8);
    if (f)
      fclose(f);
  }
  remove_folder(dir);
  return h;
}

static double updates_waited_s; /* for checkpoints, of all runs */

/* A checkpoint of @k steps that is written while the run goes on to its end. The writers are slow,
 * so that updates come to parts of the state which are not written yet. */
static uint64_t checkpoint_beside(ps_trainer *t, uint64_t k, uint64_t n, const char *dir) {
  ps_checkpoint_report r = {.struct_bytes = sizeof r};
  ps_step_metrics m;
  train_steps(t, k - 1);
  atomic_store(&write_ns, 100000);
  CHECK(ps_trainer_submit(t, 1) == PS_OK);
  CHECK(ps_trainer_checkpoint_begin(t, dir) == PS_OK && ps_trainer_steps_submitted(t) == k);
  for (uint64_t i = k; i < n; i++)
    CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK && m.step == i - 1);
  CHECK(ps_trainer_wait(t, &m) == PS_OK);
  CHECK(ps_trainer_checkpoint_end(t, &r) == PS_OK && r.step == k && r.held_s <= r.durable_s);
  atomic_store(&write_ns, 0);
  updates_waited_s += r.waited_s;
  char end[320];
  snprintf(end, sizeof end, "%s/end", root);
  return take_state(t, end);
}

/* The state after 2k steps; with a stop after k of them that goes on with another placement. */
static uint64_t train_in_parts(const ps_plan_config *cfg, placement before, placement after,
                               bool stops) {
  enum { HALF = 3 };
  uint64_t beside = 0;
  ps_dataset *ds = open_shard();
  ps_plan *plan = make_plan_of(*cfg, before);
  ps_train_config c = train_config(ds, cfg->clip != 0);
  c.optimizer = cfg->optimizer;
  c.lr_kind = PS_LR_KIND_COSINE;
  c.total_steps = 2 * HALF;
  c.warmup_steps = 2;
  c.seed = 7;
  c.shuffle = 1;
  ps_step_metrics m;
  ps_trainer *t = make_trainer(plan, &c);
  if (stops) {
    ps_checkpoint *from;
    beside = checkpoint_beside(t, HALF, 2 * HALF, new_dir);
    CHECK(ps_trainer_destroy(t) == PS_OK);
    ps_plan_destroy(plan);
    plan = make_plan_of(*cfg, after);
    CHECK(ps_checkpoint_open(&from, new_dir) == PS_OK);
    CHECK(ps_trainer_resume(&t, model_dir, plan, &c, from, NULL, NULL) == PS_OK);
    ps_checkpoint_close(from);
    remove_folder(new_dir);
  }
  for (uint64_t i = stops ? HALF : 0; i < 2 * HALF; i++)
    CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK && m.step == i);
  const uint64_t state = take_state(t, new_dir);
  CHECK(!stops || beside == state);
  CHECK(ps_trainer_destroy(t) == PS_OK);
  ps_plan_destroy(plan);
  CHECK(ps_dataset_close(ds) == PS_OK);
  return state;
}

/* Every recipe and optimizer, with and without clipping; each placement is resumed by the next. The
 * checkpoint is written while its run goes on to the same bits. */
static void test_resume(void) {
  unsigned n = 0;
  for (uint32_t o = 0; o < PS_N_OPTIMIZERS; o++)
    for (uint32_t r = o % RECIPE_STEP; r < PS_N_RECIPES; r += RECIPE_STEP)
      for (int clip = (int)o % CLIP_STEP; clip < 2; clip += CLIP_STEP) {
        ps_plan_config cfg = plan_config(r, clip);
        cfg.optimizer = o;
        cfg.head_slice_tokens = SEQ_LEN;
        const uint64_t whole = train_in_parts(&cfg, TIGHT, TIGHT, false);
        for (int p = 0; p < N_PLACEMENTS; p += STEP, n++)
          CHECK(train_in_parts(&cfg, (placement)p, (placement)((p + 1) % N_PLACEMENTS), true) ==
                whole);
      }
  CHECK(updates_waited_s > 0 || CLIP_STEP > 1); /* sanitized builds write few checkpoints */
  printf(
      "ok %u resumed trainings have the bits of those that were not stopped; updates waited %.2f "
      "s for their checkpoints\n",
      n, updates_waited_s);
}

/* ---- skipped steps --------------------------------------------------------------------------- */

/* Steps of the run whose loss or gradient is made infinite, as bits. */
static uint64_t bad_loss, bad_gradient;

static ps_status spoiling_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch) {
  const uint64_t step = (uint64_t)1 << launch->step;
  if (what == PS__HOOK_LOSS && (bad_loss & step))
    ((float *)launch->ptr[1])[3] = INFINITY;
  if (what == PS__HOOK_NORM && (bad_gradient & step))
    ((double *)launch->ptr[0])[ps__norm_slots(((ps_trainer *)ctx)->plan->model)] = NAN;
  return ps__trainer_hook(ctx, what, unit, launch);
}

static ps_trainer *make_spoiled(ps_plan *plan, ps_train_config *c) {
  c->non_finite = PS_NON_FINITE_SKIP;
  ps_trainer *t = make_trainer(plan, c);
  plan->hooks.fn = spoiling_hook;
  return t;
}

/* Of a skipped step whose gradient was spoiled on its way to the norm: no op made it so. */
static uint64_t n_clean;
static void hear(void *user, ps_log_level level, const char *message) {
  (void)user;
  n_clean += level == PS_LOG_WARN && strstr(message, "is skipped: the gradient of layer 0 is") &&
             strstr(message, "run again chunk by chunk") && strstr(message, "value is finite");
}

/* The state after @n steps. */
static uint64_t train_spoiled(ps_plan *plan, uint32_t optimizer, uint64_t n, uint64_t n_skipped) {
  ps_dataset *ds = open_shard();
  ps_train_config c = train_config(ds, true);
  ps_step_metrics m;
  c.optimizer = optimizer;
  ps_trainer *t = make_spoiled(plan, &c);
  CHECK(ps_trainer_submit(t, n) == PS_OK);
  for (uint64_t i = 0; i < n; i++) {
    const bool bad = (bad_loss | bad_gradient) >> i & 1;
    CHECK(ps_trainer_wait(t, &m) == PS_OK && m.step == i && m.skipped == bad);
    CHECK(isfinite(m.loss) == !(bad_loss >> i & 1) && (bad || isfinite(m.grad_norm)));
  }
  CHECK(m.n_skipped == n_skipped);
  const uint64_t state = take_state(t, new_dir);
  CHECK(ps_trainer_destroy(t) == PS_OK && ps_dataset_close(ds) == PS_OK);
  return state;
}

/* Every recipe and optimizer: a step that is skipped leaves all weights and states, and the next
 * one goes on, wherever the state is. */
static void test_skipped(void) {
  uint64_t n_plans = 0;
  n_clean = 0;
  ps_log_set(hear, NULL);
  for (uint32_t recipe = 0; recipe < PS_N_RECIPES; recipe += RECIPE_STEP)
    for (uint32_t o = 0; o < PS_N_OPTIMIZERS; o += RECIPE_STEP) {
      ps_plan_config cfg = plan_config(recipe, true);
      uint64_t want[3], got[3];
      cfg.optimizer = o;
      for (placement p = 0; p <= STATE_STREAMED; p++) {
        bad_loss = 1 << 2;
        bad_gradient = 1 << 3;
        n_plans++;
        ps_plan *plan = make_plan_of(cfg, p);
        got[0] = train_spoiled(plan, o, 2, 0);
        got[1] = train_spoiled(plan, o, 4, 2);
        got[2] = train_spoiled(plan, o, 5, 2);
        ps_plan_destroy(plan);
        CHECK(got[0] == got[1] && got[1] != got[2]);
        if (!p)
          memcpy(want, got, sizeof want);
        CHECK(memcmp(want, got, sizeof want) == 0);
      }
    }
  ps_log_set(NULL, NULL);
  CHECK(n_clean == 2 * n_plans); /* of two of the three trainings */
  printf(
      "ok a step that is not finite is skipped: weights and states stay, and the next goes on\n");
}

/* The count goes through a checkpoint; too many skips in a row stop the trainer. */
static void test_many_skipped(void) {
  ps_dataset *ds = open_shard();
  ps_plan *plan = make_plan(PS_RECIPE_BF16, true, STREAMED);
  ps_train_config c = train_config(ds, true);
  ps_checkpoint *from;
  ps_checkpoint_info info = {.struct_bytes = sizeof info};
  ps_step_metrics m;
  c.max_skips = 3;
  bad_loss = 1 << 1 | 1 << 2 | 1 << 3;
  bad_gradient = 1 << 5;
  ps_trainer *t = make_spoiled(plan, &c);
  CHECK(ps_trainer_submit(t, 5) == PS_OK);
  CHECK(ps_trainer_checkpoint_begin(t, new_dir) == PS_OK && ps_trainer_submit(t, 2) == PS_OK);
  for (int i = 0; i < 7; i++)
    CHECK(ps_trainer_wait(t, &m) == PS_OK);
  CHECK(m.n_skipped == 4 && !m.skipped && ps_trainer_checkpoint_end(t, NULL) == PS_OK);
  CHECK(ps_trainer_destroy(t) == PS_OK && ps_checkpoint_open(&from, new_dir) == PS_OK);
  CHECK(ps_checkpoint_get_info(from, &info) == PS_OK && info.step == 5 && info.n_skipped == 3);
  bad_loss = 0xf << 1;
  bad_gradient = 0;
  c.non_finite = PS_NON_FINITE_SKIP;
  CHECK(ps_trainer_resume(&t, model_dir, plan, &c, from, NULL, NULL) == PS_OK);
  plan->hooks.fn = spoiling_hook;
  ps_checkpoint_close(from);
  CHECK(ps_trainer_submit(t, 6) == PS_OK);
  for (int i = 0; i < 4; i++)
    CHECK(ps_trainer_wait(t, &m) == PS_OK);
  CHECK(m.n_skipped == 6 && m.step == 8);
  CHECK_FAILS(
      ps_trainer_wait(t, &m), PS_ENUMERIC,
      "step 10: the loss is infinite, first in chunk 0 (sequence 0, position 3), after 3 steps");
  CHECK(ps_trainer_destroy(t) == PS_OK);
  remove_folder(new_dir);
  ps_plan_destroy(plan);
  plan = make_plan(PS_RECIPE_BF16, false, TIGHT);
  c.clip_norm = 0;
  CHECK_FAILS(ps_trainer_create(&t, model_dir, plan, &c, NULL, NULL), PS_EINVAL, "plan with clip");
  ps_plan_destroy(plan);
  plan = make_plan(PS_RECIPE_BF16, true, TIGHT); /* skipping without clipping */
  bad_loss = 1 << 1;
  t = make_spoiled(plan, &c);
  CHECK(ps_trainer_submit(t, 3) == PS_OK);
  for (int i = 0; i < 3; i++)
    CHECK(ps_trainer_wait(t, &m) == PS_OK && m.skipped == (i == 1));
  CHECK(ps_trainer_destroy(t) == PS_OK);
  ps_plan_destroy(plan);
  CHECK(ps_dataset_close(ds) == PS_OK);
  printf("ok skipped steps are counted through a resume, and too many in a row stop the run\n");
}

/* ---- validation ------------------------------------------------------------------------------ */

/* The state after some steps, between which a validation comes. */
static uint64_t train_and_validate(ps_plan_config cfg, placement where, bool validates,
                                   double losses[2]) {
  ps_dataset *ds = open_shard();
  ps_train_config c = train_config(ds, cfg.clip != 0);
  ps_validation v;
  ps_step_metrics m;
  cfg.val_tokens = validates ? VAL_TOKENS : 0;
  ps_plan *plan = make_plan_of(cfg, where);
  c.val_dataset = validates ? ds : NULL;
  c.optimizer = cfg.optimizer;
  ps_trainer *t = make_trainer(plan, &c);
  for (uint64_t i = 0; i < 6; i++) {
    CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK && m.step == i);
    if (validates && i % 3 == 1)
      CHECK(ps_trainer_validate(t, &v) == PS_OK && v.tokens == 6 * SEQ_LEN &&
            (losses[i / 3] = v.loss) > 0);
  }
  const uint64_t state = take_state(t, new_dir);
  CHECK(ps_trainer_destroy(t) == PS_OK);
  ps_plan_destroy(plan);
  CHECK(ps_dataset_close(ds) == PS_OK);
  return state;
}

/* Every recipe, with and without clipping, wherever weights, masters and state are. */
static void test_validation(void) {
  for (uint32_t recipe = 0; recipe < PS_N_RECIPES; recipe += RECIPE_STEP)
    for (int clip = (int)(recipe / 4) % CLIP_STEP; clip < 2; clip += CLIP_STEP) {
      const ps_plan_config cfg = plan_config(recipe, clip);
      double want[2], got[2];
      for (placement p = 0; p <= STATE_STREAMED; p++) {
        const uint64_t state = train_and_validate(cfg, p, true, p ? got : want);
        CHECK(state == train_and_validate(cfg, p, false, NULL));
        CHECK(want[0] != want[1] && (!p || memcmp(want, got, sizeof want) == 0));
      }
    }
  printf("ok a validation has the same loss wherever the state is, and training does not see it\n");
}

/* A validation that fails stops the trainer, with the weights of the last step. */
static void test_validation_fails(void) {
  ps_dataset *ds = open_shard();
  ps_plan_config cfg = plan_config(PS_RECIPE_BF16, true);
  cfg.val_tokens = VAL_TOKENS;
  ps_train_config c = train_config(ds, true);
  c.val_dataset = ds;
  ps_plan *plan = make_plan_of(cfg, TIGHT);
  ps_validation v = {.tokens = 5};
  for (int cancels = 0; cancels < 2; cancels++) {
    ps_trainer *t = make_trainer(plan, &c);
    CHECK(ps_trainer_validate(t, &v) == PS_OK); /* before the first step */
    train_steps(t, 2);
    const uint64_t before = weights(t);
    v.tokens = 5;
    if (cancels)
      ps_trainer_cancel(t);
    else
      ps__fault_arm(PS_FAULT_READ, 5);
    CHECK_FAILS(ps_trainer_validate(t, &v), cancels ? PS_ECANCELLED : PS_EIO,
                cancels ? "cancelled" : shard);
    ps__fault_arm(PS_FAULT_READ, 0);
    CHECK(v.tokens == 5 && ps_trainer_at_rest(t) && ps_trainer_submit(t, 1) < 0 &&
          ps_trainer_validate(t, &v) < 0 && weights(t) == before);
    CHECK(ps_trainer_save(t, new_dir, PS_F32) == PS_OK);
    remove_folder(new_dir);
    CHECK(ps_trainer_destroy(t) == PS_OK);
  }
  ps_plan_destroy(plan);
  CHECK(ps_dataset_close(ds) == PS_OK);
  printf("ok a validation that fails stops training, and leaves its weights\n");
}

/* The newest whole checkpoint of @folder is of @step. */
static void check_newest(const char *folder, uint64_t step) {
  ps_checkpoint *c;
  ps_checkpoint_info info = {.struct_bytes = sizeof info};
  CHECK(ps_checkpoint_latest(&c, folder) == PS_OK && c);
  CHECK(ps_checkpoint_get_info(c, &info) == PS_OK && info.step == step);
  ps_checkpoint_close(c);
}

/* Every allocation, read, write and thread start of writing a checkpoint fails, then of opening
 * one. A checkpoint that was not written leaves nothing, and the one before it is whole. */
static void test_checkpoint_faults(void) {
  char first[400], second[400];
  int64_t places[2] = {0};
  ps_dataset *ds = open_shard();
  ps_plan *plan = make_plan(PS_RECIPE_BF16, true, RESIDENT);
  const ps_train_config c = train_config(ds, true);
  ps_trainer *t = make_trainer(plan, &c);
  CHECK(mkdir(new_dir, 0777) == 0);
  CHECK(ps_checkpoint_path(first, sizeof first, new_dir, 1) == PS_OK);
  CHECK(ps_checkpoint_path(second, sizeof second, new_dir, 2) == PS_OK);
  train_steps(t, 1);
  CHECK(ps_trainer_checkpoint(t, first) == PS_OK);
  ps_step_metrics m;
  CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK);
  const int64_t live = ps__live_allocations();
  const int files = open_files();
  for (int i = 0; i < 2 * PS_FAULT_KINDS; i++) {
    const bool writes = i < PS_FAULT_KINDS;
    bool failed = true;
    for (int64_t n = 1; failed; n += STEP, places[writes] += failed) {
      ps_checkpoint *from = NULL;
      if (!writes)
        CHECK(ps_trainer_checkpoint(t, second) == PS_OK);
      ps__fault_arm(i % PS_FAULT_KINDS, n);
      const ps_status st =
          writes ? ps_trainer_checkpoint(t, second) : ps_checkpoint_open(&from, second);
      failed = ps__fault_count(i % PS_FAULT_KINDS) >= n;
      ps__fault_arm(i % PS_FAULT_KINDS, 0);
      CHECK(failed ? st < 0 && ps_last_error()[0] : st == PS_OK);
      CHECK((from != NULL) == (!writes && st == PS_OK));
      ps_checkpoint_close(from);
      CHECK(ps__live_allocations() == live && open_files() == files);
      CHECK(count_names(new_dir, "penstock") == 0);
      const bool there = access(second, F_OK) == 0;
      CHECK(there || st < 0);
      check_newest(new_dir, there ? 2 : 1);
      if (there)
        remove_folder(second);
    }
  }
  remove_folder(first);
  CHECK(rmdir(new_dir) == 0 && ps_trainer_destroy(t) == PS_OK);
  ps_plan_destroy(plan);
  CHECK(ps_dataset_close(ds) == PS_OK);
  printf("ok a checkpoint that cannot be written or read leaves the one before it: %lld and %lld "
         "places\n",
         (long long)places[1], (long long)places[0]);
}

/* ---- a batch ramp ---------------------------------------------------------------------------- */

/* The plan counts the trace of its own steps alone, so no other step has one. A checkpoint of steps
 * whose stage has not begun is completed by destroy. */
static void test_ramp(void) {
  const ps_ramp_stage stage[] = {{SEQ_LEN, 2}, {2 * SEQ_LEN, 2}};
  ps_dataset *ds = open_shard();
  ps_plan_config cfg = plan_config(PS_RECIPE_BF16, true);
  ps_train_config c = train_config(ds, true);
  uint64_t n;
  cfg.ramp = stage;
  cfg.n_ramp = 2;
  c.trace_steps = cfg.trace_steps = 2;
  CHECK(mkdir(new_dir, 0777) == 0);
  for (uint64_t steps = 3; steps <= 6; steps++) {
    ps_plan *plan = make_plan_of(cfg, RESIDENT);
    ps_trainer *t = make_trainer(plan, &c);
    char path[400];
    train_steps(t, 1);
    CHECK(ps_trainer_submit(t, steps - 1) == PS_OK);
    CHECK(ps_checkpoint_path(path, sizeof path, new_dir, steps) == PS_OK);
    CHECK(ps_trainer_checkpoint_begin(t, path) == PS_OK && ps_trainer_destroy(t) == PS_OK);
    check_newest(new_dir, steps);
    remove_folder(path);
    t = make_trainer(plan, &c);
    train_steps(t, steps);
    CHECK(t->n_past_runs == (steps > 4 ? 2u : 1u));
    for (uint32_t i = 0; i < t->n_past_runs; i++)
      CHECK(ps_run_trace(t->past_run[i], NULL, 0, &n) == PS_OK && n == 0);
    CHECK(ps_run_trace(t->run, NULL, 0, &n) == PS_OK && (n > 0) == (steps > 4));
    CHECK(ps_trainer_destroy(t) == PS_OK);
    ps_plan_destroy(plan);
  }
  CHECK(rmdir(new_dir) == 0 && ps_dataset_close(ds) == PS_OK);
  printf(
      "ok stages of a batch ramp have no trace, and destroy completes a checkpoint across them\n");
}

int main(void) {
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

  test_fail_nth();
  for (int i = 0; i < 2 * N_PLACEMENTS; i++)
    test_read_fails(i & 1, (placement)(i / 2));
  printf("ok data that cannot be read stops the run behind the last complete step, whose weights "
         "can be saved\n");
  test_alien_token();
  test_targets_not_counted();
  printf("ok targets of -1 and -100 are not counted, others that are no ids are named\n");
  printf("ok a token past the vocabulary in the middle of a run is named\n");
  test_not_finite();
  test_cancel();
  test_resume();
  test_skipped();
  test_many_skipped();
  test_validation();
  test_validation_fails();
  test_checkpoint_faults();
  test_ramp();
  test_own_batch();
  for (int i = 0; i < 5; i++)
    test_life();
  printf("ok plan and data are busy while a trainer uses them, a batch function does not wait for "
         "itself\n");
  CHECK(ps__live_allocations() == live);

  remove_folder(model_dir);
  remove_folder(old_dir);
  CHECK(unlink(shard) == 0 && rmdir(root) == 0);
  return 0;
}
