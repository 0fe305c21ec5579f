/* Generation from C: the same tokens wherever blocks lie and however rows are cut, drawing, ending
 * a text or a call, and what is refused. test_cuda_generate.c runs the same on a GPU.
 * Usage: test_generate [few: in bf16 alone, for sanitizers] */
#include "generate/generate.h"
#include "tiny_model.h"
#include <math.h>

#ifdef PS_SANITIZED
enum { DIM = 256, FFN = 512, NEW = 6 };
#else
enum { DIM = 256, FFN = 1024, NEW = 24 };
#endif
enum { VOCAB = 96, BLOCKS = 5, PROMPTS = 5, CONTEXT = 64 };

static char root[256], model_dir[300], config[1024];
static ps_model_config model;
static ps_hardware hw;
static bool on_cpu;

/* ---- prompts --------------------------------------------------------------------------------- */

typedef struct result {
  int32_t token[PROMPTS][NEW];
  uint64_t n[PROMPTS];
  uint64_t stop_after; /* tokens of prompt 1; 0: all */
  bool cancel;
} result;

static int32_t prompt[PROMPTS][32];
static ps_generate_request request[PROMPTS];

static void make_prompts(void) {
  static const uint64_t length[PROMPTS] = {1, 7, 30, 3, 12};
  uint64_t state = 3;
  for (uint32_t i = 0; i < PROMPTS; i++) {
    for (uint64_t k = 0; k < length[i]; k++)
      prompt[i][k] = (int32_t)rnd_below(&state, VOCAB);
    request[i] = (ps_generate_request){.tokens = prompt[i],
                                       .n_tokens = length[i],
                                       .max_new_tokens = NEW - i,
                                       .temperature = i % 2 ? 1.0 : 0.0,
                                       .top_p = 0.9,
                                       .top_k = 40,
                                       .seed = 100 + i};
  }
}

static int take(void *user, uint64_t i, int32_t token) {
  result *r = user;
  CHECK(i < PROMPTS && r->n[i] < request[i].max_new_tokens && token >= 0 && token < VOCAB);
  r->token[i][r->n[i]++] = token;
  if (r->cancel && i == 2)
    return -1;
  return i == 1 && r->stop_after && r->n[i] == r->stop_after;
}

static ps_generate_config config_of(uint32_t dtype, uint64_t batch) {
  return (ps_generate_config){.struct_bytes = sizeof(ps_generate_config),
                              .dtype = dtype,
                              .n_sequences = batch,
                              .context = CONTEXT,
                              .deterministic = 1};
}

static result run(const ps_generate_config *cfg, ps_generate_report *report) {
  ps_generator *g;
  ps_generate_stats stats;
  result r = {.cancel = false};
  CHECK(ps_generator_create(&g, model_dir, cfg, &hw, NULL, NULL) == PS_OK);
  CHECK(ps_generator_run(g, request, PROMPTS, take, &r, &stats) == PS_OK);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < PROMPTS; i++) {
    CHECK(r.n[i] == request[i].max_new_tokens);
    sum += r.n[i];
  }
  CHECK(stats.new_tokens == sum && stats.decoded_tokens == sum - PROMPTS);
  *report = *ps_generator_report(g);
  ps_generator_destroy(g);
  return r;
}

static bool same(const result *a, const result *b) {
  return !memcmp(a->token, b->token, sizeof a->token) && !memcmp(a->n, b->n, sizeof a->n);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_same_tokens(uint32_t dtype) {
  ps_generate_config cfg = config_of(dtype, PROMPTS);
  ps_generate_report all, r;
  const result resident = run(&cfg, &all);
  CHECK(all.n_resident == BLOCKS && !all.streamed_bytes);
  uint32_t fewest = BLOCKS;
  for (uint64_t cap = all.least_device_bytes; cap < all.device_used_bytes; cap += 2 << 20) {
    cfg.device_mem_bytes = cap;
    const result streamed = run(&cfg, &r);
    CHECK(same(&resident, &streamed) && r.device_used_bytes <= cap);
    fewest = r.n_resident < fewest ? r.n_resident : fewest;
  }
  cfg.device_mem_bytes = all.least_device_bytes - 1;
  CHECK_FAILS(ps_generate_plan(&r, &model, &cfg, &hw), PS_EBUDGET, "of device memory");
  printf("ok %s: the same tokens with %u to %u of %d blocks resident\n",
         dtype == PS_F32 ? "fp32" : "bf16", fewest, BLOCKS, BLOCKS);
  if (!on_cpu)
    return; /* products of other row counts may round differently */
  cfg = config_of(dtype, 2);
  cfg.prefill_tokens = 5;
  const result cut = run(&cfg, &r);
  CHECK(same(&resident, &cut));
  printf("ok the same tokens in batches of 2, 5 tokens of prompts a step\n");
}

/* Without caps, both memories must fit into the machine's: on the CPU backend together. */
static void test_machine(void) {
  const ps_generate_config cfg = config_of(PS_F32, PROMPTS);
  ps_hardware small = hw;
  ps_generate_report r;
  small.host_memory_bytes = 0; /* unknown */
  CHECK(ps_generate_plan(&r, &model, &cfg, &small) == PS_OK);
  const uint64_t need = r.host_used_bytes + (on_cpu ? r.device_used_bytes : 0);
  small.host_memory_bytes = need + (64u << 20); /* the process may have grown meanwhile */
  CHECK(ps_generate_plan(&r, &model, &cfg, &small) == PS_OK);
  small.host_memory_bytes = need / 2;
  CHECK_FAILS(ps_generate_plan(&r, &model, &cfg, &small), PS_EBUDGET, "and the machine has");
  printf("ok a machine with too little memory is refused\n");
}

static void test_ends(void) {
  const ps_generate_config cfg = config_of(PS_F32, PROMPTS);
  ps_generate_report report;
  const result free_run = run(&cfg, &report);
  ps_generator *g;
  result r = {.stop_after = 2};
  CHECK(ps_generator_create(&g, model_dir, &cfg, &hw, NULL, NULL) == PS_OK);
  CHECK(ps_generator_run(g, request, PROMPTS, take, &r, NULL) == PS_OK);
  CHECK(r.n[1] == 2 && r.n[0] == free_run.n[0] &&
        !memcmp(r.token[2], free_run.token[2], sizeof r.token[2]));
  r = (result){.cancel = true};
  CHECK_FAILS(ps_generator_run(g, request, PROMPTS, take, &r, NULL), PS_ECANCELLED, "stopped");
  ps_generate_request one = request[3];
  one.stop_tokens = &free_run.token[3][1];
  one.n_stop_tokens = 1;
  r = (result){.cancel = false};
  CHECK(ps_generator_run(g, &one, 1, take, &r, NULL) == PS_OK);
  CHECK(r.n[0] == (free_run.token[3][0] == free_run.token[3][1] ? 0 : 1));
  one.tokens = &(int32_t){VOCAB};
  one.n_tokens = 1;
  CHECK_FAILS(ps_generator_run(g, &one, 1, take, &r, NULL), PS_EINVAL, "not in the vocabulary");
  ps_generator_destroy(g);
  printf("ok a caller, a stop token and a refusal end what they should\n");
}

static int32_t drawn(const float *logits, ps_generate_request r, uint64_t index) {
  ps__gen_candidate scratch[4];
  return ps__gen_draw(logits, 4, &r, index, scratch);
}

static void test_draws(void) {
  const float logits[] = {1, 3, 3, -INFINITY};
  const ps_generate_request free_draw = {.temperature = 1, .top_p = 1};
  ps_generate_request r = free_draw;
  r.temperature = 0;
  CHECK(drawn(logits, r, 0) == 1); /* the lower of equal ones */
  uint32_t n[4] = {0};
  for (uint64_t i = 0; i < 4000; i++)
    n[drawn(logits, free_draw, i)]++;
  /* weights e^-2, 1, 1: 0.063, 0.468, 0.468; 6 deviations of 4,000 draws */
  CHECK(abs((int)n[0] - 254) < 92 && abs((int)n[1] - 1873) < 190 && !n[3]);
  r = free_draw;
  r.top_k = 2;
  for (uint64_t i = 0; i < 200; i++)
    CHECK(drawn(logits, r, i) == 1 || drawn(logits, r, i) == 2);
  r = free_draw;
  r.top_p = 0.4; /* the first alone has 0.468 */
  for (uint64_t i = 0; i < 200; i++)
    CHECK(drawn(logits, r, i) == 1);
  r.temperature = 1e-6; /* no overflow */
  CHECK(drawn(logits, r, 0) == 1);
  const float nan[] = {1, NAN, 0, 0}, none[] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY},
              most[] = {INFINITY, 0, 0, 0};
  CHECK(drawn(nan, free_draw, 0) == -1 && drawn(none, free_draw, 0) == -1 &&
        drawn(most, free_draw, 0) == -1);
  printf("ok draws\n");
}

int main(int argc, char **argv) {
  const bool few = argc > 1 && strcmp(argv[1], "few") == 0; /* for sanitizers */
  on_cpu = !(argc > 1 && strcmp(argv[1], "cuda") == 0);
  const char *tmp = getenv("TMPDIR");
  hw.struct_bytes = sizeof hw;
  const ps_status st = ps_hardware_estimate(&hw, on_cpu ? PS_BACKEND_CPU : PS_BACKEND_CUDA, 0, 2);
  if (!on_cpu && st == PS_EDEVICE) {
    printf("ok skipped: %s\n", ps_last_error());
    return 0;
  }
  CHECK(st == PS_OK);
  snprintf(config, sizeof config,
           "{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\",\"vocab_size\":%d,"
           "\"num_hidden_layers\":%d,\"hidden_act\":\"silu\",\"max_position_embeddings\":4096,"
           "\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"hidden_size\":%d,"
           "\"intermediate_size\":%d,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
           "\"head_dim\":16,\"tie_word_embeddings\":true,\"attention_bias\":false,"
           "\"use_sliding_window\":false}",
           VOCAB, BLOCKS, DIM, FFN);
  snprintf(root, sizeof root, "%s/penstock-test-generate-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(root));
  snprintf(model_dir, sizeof model_dir, "%s/model", root);
  tiny_model_write(model_dir, config, &model);
  make_prompts();
  const int64_t live = ps__live_allocations();
  test_draws();
  if (!few)
    test_same_tokens(PS_F32);
  test_same_tokens(PS_BF16);
  test_machine();
  test_ends();
  CHECK(!on_cpu || ps__live_allocations() == live);
  remove_folder(model_dir);
  CHECK(rmdir(root) == 0);
  return 0;
}
