/* test_train.c - training under failure: the Nth allocation, read, write or thread start fails, the
 * data ends in an error in the middle of a run, the loss or a gradient is not finite. Each time an
 * error with a message comes back, nothing leaks, and weights on the host are those of the last
 * complete step. */
#include "train_pieces.h"

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
  ps_train_config c = train_config(data_opened);
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

/* Returns how many places were made to fail: the first ones, then every @stride-th or, where that
 * is more, a sixteenth further each time. */
static int64_t fail_nth(int kind, ps_status (*run)(void), int64_t stride) {
  const int64_t live = ps__live_allocations();
  const int files = open_files();
  int64_t places = 0;
  for (int64_t n = 1;; n += n < N_FIRST ? 1 : stride > n / 16 ? stride : n / 16, places++) {
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
  const ps_train_config c = train_config(ds);
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
  const ps_train_config c = train_config(ds);
  for (uint64_t i = 0; i <= MOST; i++) {
    ps_trainer *t = make_trainer(plan, &c);
    train_steps(t, i);
    expected[i] = weights(t);
    CHECK(i == 0 || expected[i] != expected[i - 1]);
    ps_trainer_destroy(t);
  }
  for (uint64_t i = 0; i < N_READS; i++)
    read_fails(plan, ds, clip, 1 + i * 5 % (MOST * SEQUENCES + SEQUENCES), expected);
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
  ps_train_config c = train_config(NULL);
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
  ps_train_config c = train_config(NULL);
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
  const ps_train_config c = train_config(ds);
  ps_trainer *t = make_trainer(plan, &c);
  ps_step_metrics m;
  fill_param(t, "lm_head.weight", 3e38f);
  const uint64_t before = weights(t);
  CHECK(ps_trainer_submit(t, 4) == PS_OK);
  CHECK(ps_trainer_wait(t, &m) == PS_ENUMERIC && strstr(ps_last_error(), "step 1: ") &&
        strstr(ps_last_error(), "lower lr"));
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
  ps_train_config c = train_config(ds);
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
  const ps_train_config c = train_config(ds);
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
  snprintf(text, sizeof text, "of chunk 0 (sequence 0), in the backward pass of layer %d (op ",
           layer);
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

static void all(void) {
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
}

int main(void) { return run_trainings(all); }
