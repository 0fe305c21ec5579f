/* Models of very many tensors, as a mixture of experts has: parameters are found by name in a
 * time that does not depend on their number, and a plan takes no longer for them. */
#include "check.h"
#include "plan/plan_impl.h"
#include <math.h>
#include <penstock/tensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LAYERS = 32, EXPERTS = 195, ROWS = 64, COLS = 64, SEQ_LEN = 2048 };
#ifdef PS_SANITIZED
enum { SLOWER = 20, TIMES = 1 };
#else
enum { SLOWER = 1, TIMES = 5 };
#endif
static const double MOST_OPEN_S = 1.0, MOST_TIMES = 2.0;

static double cpu_s(void) {
  struct timespec t;
  CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t) == 0);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static ps_model_config config_8b(void) {
  return (ps_model_config){MODEL_DEFAULTS,  .vocab_size = 128256, .n_layers = LAYERS,
                           .dim = 4096,     .n_heads = 32,        .n_kv_heads = 8,
                           .head_dim = 128, .ffn_dim = 14336,     .rope = {.theta = 5e5}};
}

/* 8B whose blocks have three small matrices more for each of EXPERTS experts, in a frozen unit of
 * their own. No op uses them: what is measured is what their number costs. */
static ps_model *many_tensors(void) {
  static char name[3 * EXPERTS][48];
  static const char *const matrix[] = {"gate", "up", "down"};
  const ps_model_config cfg = config_8b();
  ps_model *m;
  CHECK(ps__model_create(&m, &cfg, PS_BF16, SEQ_LEN, 0, NULL, NULL, NULL) == PS_OK);
  ps__layer_def *block = m->def[1];
  ps__def_unit(block, true);
  for (int i = 0; i < 3 * EXPERTS; i++) {
    snprintf(name[i], sizeof name[i], "mlp.experts.%d.%s_proj.weight", i / 3, matrix[i % 3]);
    if (i == 0)
      ps__def_param(block, name[i], PS_PARAM_MATRIX, ROWS, COLS);
    else
      ps__def_param_after(block, name[i], PS_PARAM_MATRIX, ROWS, COLS);
  }
  m->n_layers = m->n_units = m->n_params = 0;
  m->n_elements = m->n_trained = 0;
  ps__free(m->bucket);
  CHECK(ps__model_add_layer(m, m->def[0], "model.") == PS_OK);
  for (int l = 0; l < LAYERS; l++) {
    char prefix[32];
    snprintf(prefix, sizeof prefix, "model.layers.%d.", l);
    CHECK(ps__model_add_layer(m, block, prefix) == PS_OK);
  }
  CHECK(ps__model_add_layer(m, m->def[2], "") == PS_OK);
  CHECK(ps__model_finish(&m) == PS_OK);
  return m;
}

static void test_names(ps_model *m) {
  const double from = cpu_s();
  ps_param_info p;
  for (uint32_t i = 0; i < m->n_params; i++)
    CHECK(ps_model_param(m, i, &p) == PS_OK && ps_model_find(m, p.name) == i);
  CHECK(ps_model_find(m, "model.layers.0.mlp.experts.195.up_proj.weight") == UINT32_MAX);
  const double took = cpu_s() - from;
  CHECK(m->n_params > 19000 && took < SLOWER * MOST_OPEN_S / 10);
  printf("ok %u parameters are found by name in %.1f ms\n", m->n_params, 1e3 * took);
}

/* A file of as many tensors, a few bytes each, is opened, and every tensor is found. */
static void test_opening(ps_model *m) {
  const char *tmp = getenv("TMPDIR");
  char dir[256], file[300];
  snprintf(dir, sizeof dir, "%s/penstock-test-model-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(dir));
  ps_tensor_spec *spec = calloc(m->n_params, sizeof *spec);
  CHECK(spec);
  for (uint32_t i = 0; i < m->n_params; i++)
    spec[i] =
        (ps_tensor_spec){.name = m->param[i].name, .dtype = PS_BF16, .n_dims = 1, .shape = {4, 1}};
  ps_tensor_writer *w;
  CHECK(ps_tensors_create(&w, dir, "model", spec, m->n_params, 0, NULL, 0) == PS_OK);
  for (uint32_t i = 0; i < m->n_params; i++)
    CHECK(ps_tensors_append(w, "penstock", 8) == PS_OK);
  CHECK(ps_tensors_finish(w) == PS_OK);
  const double from = cpu_s();
  ps_tensor_file *f;
  ps_tensor_info info;
  CHECK(ps_tensors_open(&f, dir) == PS_OK && ps_tensors_count(f) == m->n_params);
  for (uint32_t i = 0; i < m->n_params; i++) {
    const uint64_t at = ps_tensors_find(f, m->param[i].name);
    CHECK(at != UINT64_MAX && ps_tensors_info(f, at, &info) == PS_OK);
    CHECK(ps_model_find(m, info.name) == i);
  }
  const double took = cpu_s() - from;
  ps_tensors_close(f);
  CHECK(took < SLOWER * MOST_OPEN_S);
  free(spec);
  snprintf(file, sizeof file, "%s/model.safetensors", dir);
  CHECK(unlink(file) == 0 && rmdir(dir) == 0);
  printf("ok a file of as many tensors is opened and checked in %.0f ms\n", 1e3 * took);
}

static double plan_s(ps_model *m) {
  const ps_plan_config cfg = {PLAN_DEFAULTS,
                              .recipe = PS_RECIPE_BF16,
                              .device_mem_bytes = 24ull << 30,
                              .host_mem_bytes = 100ull << 30,
                              .seq_len = SEQ_LEN,
                              .tokens_per_step = 32 * SEQ_LEN,
                              .chunk_tokens = 8 * SEQ_LEN,
                              .clip_norm = 1,
                              .reserve_bytes = 1 << 28};
  ps_hardware hw = {.struct_bytes = sizeof hw};
  ps_plan *plan;
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 16) == PS_OK);
  hw.host_memory_bytes = 0;
  const double from = cpu_s();
  CHECK(ps__plan_of_model(&plan, m, &cfg, &hw) == PS_OK);
  const double took = cpu_s() - from;
  CHECK(ps_plan_destroy(plan) == PS_OK);
  return took;
}

int main(void) {
  const ps_model_config cfg = config_8b();
  double few = INFINITY, many = INFINITY; /* the least of several: other work on the machine */
  ps_model *m = many_tensors(), *plain;
  test_names(m);
  test_opening(m);
  for (int i = 0; i < TIMES; i++) {
    CHECK(ps__model_create(&plain, &cfg, PS_BF16, SEQ_LEN, 0, NULL, NULL, NULL) == PS_OK);
    few = fmin(few, plan_s(plain));
    many = fmin(many, plan_s(m));
    m = i + 1 < TIMES ? many_tensors() : NULL;
  }
  CHECK(many < MOST_TIMES * few);
  printf("ok a plan of them takes %.2f s, one of 8B %.2f s\n", many, few);
  return 0;
}
