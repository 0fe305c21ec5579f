/* test_train_beside.c - what runs beside the steps of a training: checkpoints and resuming, skipped
 * steps, validations, a batch ramp. The bits are those of a training without, and failures leave
 * the training and what was written before whole.
 * Usage: test_train_beside [all: every placement with every recipe and optimizer] */
#include "train_pieces.h"
#include "backends/list.h"

static bool everything; /* asked for; else some placements, by turns */

/* ---- checkpoints ----------------------------------------------------------------------------- */

static _Atomic long write_ns; /* every write takes so long before it reads the data */
static _Atomic uint64_t n_writes;

/* The library's too: the program's symbol comes first. */
ssize_t write(int fd, const void *data, size_t bytes) {
  const long ns = atomic_load(&write_ns);
  atomic_fetch_add(&n_writes, 1);
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

/* The state after 2k steps of @before; unless @after is NULL with a stop after k of them, from
 * which @after goes on. */
static uint64_t train_in_parts(const ps_plan_config *cfg, ps_plan *before, ps_plan *after) {
  enum { HALF = 3 };
  uint64_t beside = 0;
  ps_dataset *ds = open_shard();
  ps_train_config c = train_config(ds);
  c.lr_kind = PS_LR_KIND_COSINE;
  c.total_steps = 2 * HALF;
  c.warmup_steps = 2;
  c.seed = 7;
  c.shuffle = 1;
  ps_step_metrics m;
  ps_trainer *t = make_trainer(before, &c);
  if (after) {
    ps_checkpoint *from;
    beside = checkpoint_beside(t, HALF, 2 * HALF, new_dir);
    CHECK(ps_trainer_destroy(t) == PS_OK);
    CHECK(ps_checkpoint_open(&from, new_dir) == PS_OK);
    CHECK(ps_trainer_resume(&t, model_dir, after, &c, from, NULL, NULL) == PS_OK);
    ps_checkpoint_close(from);
    remove_folder(new_dir);
  }
  for (uint64_t i = after ? HALF : 0; i < 2 * HALF; i++)
    CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK && m.step == i);
  const uint64_t state = take_state(t, new_dir);
  CHECK(!after || beside == state);
  CHECK(ps_trainer_destroy(t) == PS_OK);
  CHECK(ps_dataset_close(ds) == PS_OK);
  return state;
}

static _Atomic uint64_t awaited[2], n_before; /* calls; writes before the first of the latter */

static void note_awaited(ps__device *dev, bool on) {
  (void)dev;
  if (atomic_fetch_add(&awaited[on], 1) == 0 && !on)
    atomic_store(&n_before, atomic_load(&n_writes));
}

static const ps__backend *backends[PS_N_BACKENDS] = {[PS_BACKEND_CPU] = &ps__backend_cpu};

/* What the library calls in place of ps_engine_create(), by native/build.mk. */
ps_status __wrap_ps_engine_create(ps_engine **out, const ps_engine_config *cfg) {
  return ps__engine_create(out, cfg, backends);
}

/* Where some units' state is on the device, the backend hears when all of it was read: not as late
 * as when the files are written. The CPU's backend need not hear of it, and is made to. */
static void test_awaited(void) {
  ps_dataset *ds = open_shard();
  ps_plan *plan = make_plan(PS_RECIPE_BF16, false, MIXED);
  const ps_train_config c = train_config(ds);
  ps__backend noting = ps__backend_cpu;
  noting.awaited = note_awaited;
  backends[PS_BACKEND_CPU] = &noting;
  ps_trainer *t = make_trainer(plan, &c);
  train_steps(t, 1);
  atomic_store(&n_writes, 0);
  atomic_store(&awaited[false], 0); /* calls as the engine was filled */
  CHECK(ps_trainer_checkpoint(t, new_dir) == PS_OK);
  CHECK(awaited[true] == 1 && awaited[false] > 0);
  CHECK(n_writes - n_before > 10); /* tensors of other blocks were yet to be written */
  remove_folder(new_dir);
  CHECK(ps_trainer_destroy(t) == PS_OK);
  backends[PS_BACKEND_CPU] = &ps__backend_cpu;
  ps_plan_destroy(plan);
  CHECK(ps_dataset_close(ds) == PS_OK);
  printf("ok a device may be held back again once its state was read\n");
}

/* Every recipe with every optimizer, and in 8 bits with one, clipped or not by turns, so that each
 * of both meets both. A placement is resumed by the next: of a pair one, by turns. The checkpoint
 * is written while its run goes on to the same bits. */
static void test_resume(void) {
  const int stride = everything ? 1 : N_PLACEMENTS;
  unsigned n = 0;
  for (uint32_t o = 0; o < PS_N_OPTIMIZERS; o++)
    for (uint32_t r = o % RECIPE_STEP; r < PS__N_ROWS; r += RECIPE_STEP) {
      if (r >= PS__8BIT && r % PS_N_OPTIMIZERS != o)
        continue;
      ps_plan_config cfg = plan_config(r, (o + r / RECIPE_STEP) % 2);
      ps_plan *plan[N_PLACEMENTS];
      cfg.optimizer = o;
      cfg.head_slice_tokens = SEQ_LEN;
      for (int p = 0; p < N_PLACEMENTS; p++)
        plan[p] = make_plan_of(cfg, (placement)p);
      const uint64_t whole = train_in_parts(&cfg, plan[TIGHT], NULL);
      for (int p = everything ? 0 : (int)(o + r) % N_PLACEMENTS; p < N_PLACEMENTS; p += stride, n++)
        CHECK(train_in_parts(&cfg, plan[p], plan[(p + 1) % N_PLACEMENTS]) == whole);
      for (int p = 0; p < N_PLACEMENTS; p++)
        ps_plan_destroy(plan[p]);
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

static ps_trainer *make_spoiled(ps_plan *plan, const ps_train_config *c) {
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
static uint64_t train_spoiled(ps_plan *plan, uint64_t n, uint64_t n_skipped) {
  ps_dataset *ds = open_shard();
  ps_train_config c = train_config(ds);
  ps_step_metrics m;
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

/* Half the pairs of recipe and optimizer, all of both among them: a step that is skipped leaves all
 * weights and states, and the next one goes on, wherever the state is. */
static void test_skipped(void) {
  uint64_t n_plans = 0;
  n_clean = 0;
  ps_log_set(hear, NULL);
  for (uint32_t recipe = 0; recipe < PS_N_RECIPES; recipe += RECIPE_STEP)
    for (uint32_t o = 0; o < PS_N_OPTIMIZERS; o += RECIPE_STEP) {
      if (!everything && (recipe + o) % 2)
        continue;
      ps_plan_config cfg = plan_config(recipe, true);
      uint64_t want[3], got[3];
      cfg.optimizer = o;
      cfg.non_finite = PS_NON_FINITE_SKIP;
      for (placement p = 0; p <= STATE_STREAMED; p++) {
        if (p && !everything && (p + recipe / 2 + o / 2) % 2)
          continue;
        bad_loss = 1 << 2;
        bad_gradient = 1 << 3;
        n_plans++;
        ps_plan *plan = make_plan_of(cfg, p);
        got[0] = train_spoiled(plan, 2, 0);
        got[1] = train_spoiled(plan, 4, 2);
        got[2] = train_spoiled(plan, 5, 2);
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
  ps_plan_config cfg = plan_config(PS_RECIPE_BF16, true);
  cfg.non_finite = PS_NON_FINITE_SKIP;
  ps_plan *plan = make_plan_of(cfg, STREAMED);
  ps_train_config c = train_config(ds);
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
  cfg.clip_norm = 0; /* skipping without clipping */
  plan = make_plan_of(cfg, TIGHT);
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
  ps_train_config c = train_config(ds);
  ps_validation v;
  ps_step_metrics m;
  cfg.val_tokens = validates ? VAL_TOKENS : 0;
  ps_plan *plan = make_plan_of(cfg, where);
  c.val_dataset = validates ? ds : NULL;
  ps_trainer *t = make_trainer(plan, &c);
  for (uint64_t i = 0; i < 6; i++) {
    CHECK(ps_trainer_submit(t, 1) == PS_OK && ps_trainer_wait(t, &m) == PS_OK && m.step == i);
    if (validates && i % 3 == 1)
      CHECK(ps_trainer_validate(t, &v) == PS_OK && v.tokens == VAL_TOKENS &&
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
      const uint64_t without = train_and_validate(cfg, RESIDENT, false, NULL);
      for (placement p = 0; p <= STATE_STREAMED; p++) {
        if (p && !everything && (p + recipe + (uint32_t)clip) % 2)
          continue;
        CHECK(train_and_validate(cfg, p, true, p ? got : want) == without);
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
  ps_train_config c = train_config(ds);
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
  const ps_train_config c = train_config(ds);
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
  ps_train_config c = train_config(ds);
  uint64_t n;
  cfg.ramp = stage;
  cfg.n_ramp = 2;
  cfg.trace_steps = 2;
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
    CHECK(t->turns.n == (steps > 4 ? 3u : 2u) && t->turns.run[t->turns.n - 1] == t->run);
    for (uint32_t i = 0; i + 1 < t->turns.n; i++)
      CHECK(ps_run_trace(t->turns.run[i], NULL, 0, &n) == PS_OK && n == 0);
    CHECK(ps_run_trace(t->run, NULL, 0, &n) == PS_OK && (n > 0) == (steps > 4));
    CHECK(ps_trainer_destroy(t) == PS_OK);
    ps_plan_destroy(plan);
  }
  CHECK(rmdir(new_dir) == 0 && ps_dataset_close(ds) == PS_OK);
  printf(
      "ok stages of a batch ramp have no trace, and destroy completes a checkpoint across them\n");
}

static void all(void) {
  test_awaited();
  test_resume();
  test_skipped();
  test_many_skipped();
  test_validation();
  test_validation_fails();
  test_checkpoint_faults();
  test_ramp();
}

int main(int argc, char **argv) {
  everything = argc > 1 && !strcmp(argv[1], "all");
  return run_trainings(all);
}
