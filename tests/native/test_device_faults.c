/* test_device_faults.c - trainings on three devices in which one op fails in the second step:
 * rounds on devices, parameters in pieces, and a ring of layers, directly and by the host; with
 * updates on the host, and on the devices that hold the units' state. The first step is done, the
 * second ends in one sentence with the op's name, place in the model and stream, and nothing hangs
 * or leaks. Usage: test_device_faults [all: every op, not every 23rd] */
#include "tiny_model.h"
#include "train/trainer.h"

enum { N_DEVICES = 3, SEQ_LEN = 8, SEQUENCES = 5, VOCAB = 96 };
#ifdef PS_SANITIZED
enum { STRIDE = 31, EACH_CLIPPING = 0 };
#else
enum {
  STRIDE = 23,
  EACH_CLIPPING = 1
}; /* prime to what repeats: all of a block's ops are met, and all devices */
#endif

static const char config_json[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"vocab_size\":96,"
    "\"hidden_size\":32,\"intermediate_size\":48,\"num_hidden_layers\":4,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":1,\"head_dim\":16,\"hidden_act\":\"silu\",\"max_position_embeddings\":"
    "64,\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"tie_word_embeddings\":true}";

static char root[256], model_dir[300];
static ps_model_config config;
static ps_model *model;

/* ---- plans ----------------------------------------------------------------------------------- */

typedef struct layout {
  const char *name;
  bool pieces, by_host;
  uint32_t ring_blocks;
  bool stay; /* the pieces of totals, on their devices */
  bool held; /* the state, on the device that updates the unit */
} layout;
static const layout layouts[] = {
    {.name = "rounds on devices"},
    {.name = "in pieces", .pieces = true},
    {.name = "in pieces, totals stay", .pieces = true, .stay = true},
    {.name = "a ring", .ring_blocks = 1},
    {.name = "a ring by the host", .by_host = true, .ring_blocks = 1},
    {.name = "rounds that hold state", .held = true},
    {.name = "a ring that holds state", .ring_blocks = 1, .held = true}};

static ps_plan *make_plan(const layout *how, bool clip) {
  ps_hardware hw = {.struct_bytes = sizeof hw};
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  const ps_plan_config cfg = {PLAN_DEFAULTS,
                              .recipe = PS_RECIPE_FP32,
                              .seq_len = SEQ_LEN,
                              .tokens_per_step = SEQ_LEN * SEQUENCES,
                              .chunk_tokens = SEQ_LEN,
                              .chunks_per_round = 1,
                              .head_slice_tokens = SEQ_LEN,
                              .clip_norm = clip ? 0.5 : 0,
                              .n_threads = 2,
                              .n_devices = N_DEVICES,
                              .layout =
                                  how->ring_blocks ? PS_LAYOUT_RING : PS_LAYOUT_DATA_PARALLEL};
  ps__layout cut;
  ps__spec s;
  ps_plan *plan;
  CHECK(ps__layout_init(&cut, SEQ_LEN, SEQUENCES, SEQ_LEN, 1, 0, 0) == PS_OK);
  CHECK(ps__spec_init(&s, model, &cut) == PS_OK);
  s.recipe = PS_RECIPE_FP32;
  s.chunk_tokens = cut.chunk_tokens;
  s.chunks_per_round = cut.chunks_per_round;
  s.first_round_chunks = cut.first_round_chunks;
  s.first_rounds = cut.first_rounds;
  s.head_slice = SEQ_LEN;
  s.clip = clip;
  s.n_devices = N_DEVICES;
  s.ring_blocks = how->ring_blocks;
  s.ring_by_host = how->by_host;
  s.param_lead = s.saved_lead = s.saved_lag = s.grad_lag = s.sum_lag = 1;
  for (uint32_t u = 1; u < s.n_units; u++) /* unit 0 is the tied embedding */
    s.in_pieces[u] = how->pieces;
  for (uint32_t u = 1; u < s.n_units; u++)
    s.grad_resident[u] = how->stay;
  memset(s.update_streamed, how->held, s.n_units);
  memset(s.state_held, how->held, s.n_units);
  CHECK(ps__plan_from_spec(&plan, &config, &cfg, &hw, &s) == PS_OK);
  ps__spec_free(&s);
  ps__layout_free(&cut);
  return plan;
}

/* ---- a failing op ---------------------------------------------------------------------------- */

static const ps_kernel *whole;
static ps_status fail_as = PS_EIO;
static ps_status fail_second(const ps_launch *l) {
  return l->step == 1 ? ps__fail(fail_as, "injected") : whole->fn[PS_BACKEND_CPU](l);
}

static ps_status fill_batch(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                            uint64_t n) {
  uint64_t state = mix64(step + 1);
  for (uint64_t i = 0; i < n; i++) {
    tokens[i] = (int32_t)rnd_below(&state, VOCAB);
    targets[i] = (int32_t)rnd_below(&state, VOCAB);
  }
  return PS_OK;
}

/* A device that fails: where the others update units, what they copied then is of no step, and no
 * weights are read. */
static void test_failed_device(const layout *how) {
  ps_plan *plan = make_plan(how, true);
  ps__oplist *l = &plan->schedule->list;
  ps_train_config c = {0};
  ps_trainer *t;
  ps_step_metrics m;
  ps_param_info p;
  float *x;
  size_t i = 0;
  while (l->ops[i].stream != plan->at->dev[1].compute)
    i++;
  ps_kernel broken = *l->ops[i].kernel;
  whole = l->ops[i].kernel;
  broken.fn[PS_BACKEND_CPU] = fail_second;
  l->ops[i].kernel = &broken;
  fail_as = PS_EDEVICE;
  ps_train_config_init(&c);
  c.batch_fn = fill_batch;
  CHECK(ps_trainer_create(&t, model_dir, plan, &c, NULL, NULL) == PS_OK);
  CHECK(ps_trainer_submit(t, 2) == PS_OK && ps_trainer_wait(t, &m) == PS_OK);
  CHECK(ps_trainer_wait(t, &m) == PS_EDEVICE);
  CHECK(!!strstr(ps_last_error(), "are lost: go on from the last checkpoint") == how->held);
  CHECK(ps_model_param(model, 0, &p) == PS_OK && (x = malloc(p.n * sizeof *x)));
  if (how->held)
    CHECK_FAILS(ps_trainer_read_param(t, 0, x, p.n), PS_ESTATE, "a device failed, and what others");
  else
    CHECK(ps_trainer_read_param(t, 0, x, p.n) == PS_OK);
  free(x);
  const ps_status end = ps_trainer_destroy(t);
  CHECK(end == PS_OK || end == PS_EDEVICE);
  l->ops[i].kernel = whole;
  fail_as = PS_EIO;
  ps_plan_destroy(plan);
}

/* Two steps and one behind them. Returns the first one's loss; @st is how the second ended. */
static double train(ps_plan *plan, ps_status *st) {
  ps_train_config c = {0};
  ps_trainer *t;
  ps_step_metrics m;
  ps_train_config_init(&c);
  c.batch_fn = fill_batch;
  CHECK(ps_trainer_create(&t, model_dir, plan, &c, NULL, NULL) == PS_OK);
  CHECK(ps_trainer_submit(t, 3) == PS_OK);
  CHECK(ps_trainer_wait(t, &m) == PS_OK && m.step == 0);
  const double loss = m.loss;
  *st = ps_trainer_wait(t, &m);
  if (*st == PS_OK)
    CHECK(ps_trainer_wait(t, &m) == PS_OK);
  const ps_status end = ps_trainer_destroy(t);
  CHECK(end == PS_OK || end == *st);
  return loss;
}

static unsigned test_ops(const layout *how, bool clip, unsigned stride) {
  const int64_t before = ps__live_allocations();
  ps_plan *plan = make_plan(how, clip);
  ps__oplist *l = &plan->schedule->list;
  ps_status st;
  const double healthy = train(plan, &st);
  unsigned n = 0, on_device[N_DEVICES] = {0};
  CHECK(st == PS_OK && healthy > 0);
  for (size_t i = 0; i < l->n_ops; i++) {
    ps__op *op = &l->ops[i];
    if (!op->kernel || i % stride)
      continue;
    ps_kernel broken = *op->kernel;
    char where[200], stream[64];
    whole = op->kernel;
    broken.fn[PS_BACKEND_CPU] = fail_second;
    op->kernel = &broken;
    const double loss = train(plan, &st);
    op->kernel = whole;
    snprintf(where, sizeof where, "injected (op %zu, %s", i, whole->name);
    snprintf(stream, sizeof stream, ", stream %s, of the run's step 2",
             plan->at->stream[op->stream].name);
    if (st != PS_EIO || loss != healthy || !strstr(ps_last_error(), where) ||
        !strstr(ps_last_error(), stream)) {
      printf("%s, clipping %s: \"%s\", expected \"%s...%s\"; loss %g of %g\n", how->name,
             clip ? "on" : "off", ps_last_error(), where, stream, loss, healthy);
      CHECK(!"a failed op is named");
    }
    for (uint32_t d = 0; d < N_DEVICES; d++)
      on_device[d] += op->stream == plan->at->dev[d].compute;
    n++;
  }
  for (uint32_t d = 0; d < N_DEVICES; d++)
    CHECK(on_device[d] > 0);
  const double again = train(plan, &st);
  CHECK(st == PS_OK && again == healthy);
  ps_plan_destroy(plan);
  CHECK(ps__live_allocations() == before);
  return n;
}

int main(int argc, char **argv) {
  const bool all = argc > 1 && !strcmp(argv[1], "all");
  const char *tmp = getenv("TMPDIR");
  unsigned n = 0;
  snprintf(root, sizeof root, "%s/penstock-test-faults-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(root));
  snprintf(model_dir, sizeof model_dir, "%s/model", root);
  tiny_model_write(model_dir, config_json, &config);
  CHECK(ps_model_create(&model, &config) == PS_OK);
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
    for (int clip = 0; clip < 2; clip++)
      if (all || EACH_CLIPPING || clip == (int)i % 2)
        n += test_ops(&layouts[i], clip, all ? 1 : STRIDE);
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
    test_failed_device(&layouts[i]);
  ps_model_destroy(model);
  remove_folder(model_dir);
  CHECK(rmdir(root) == 0);
  printf("ok %u ops of three devices fail, one at a time, and are named\n", n);
  printf("ok after a device has failed, weights that the others updated are not read\n");
  return 0;
}
