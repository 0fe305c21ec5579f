/* tiny_model.h - a model directory with random weights and a token shard, written by the library
 * itself, for native tests. */
#ifndef PS_TESTS_TINY_MODEL_H
#define PS_TESTS_TINY_MODEL_H
#include "folder.h"
#include <penstock/tensors.h>
#include <sys/stat.h>
#include <unistd.h>

/* Write @json as DIR/config.json and random fp32 weights (matrices within 0.2 of 0, norms of 1).
 * @cfg gets the configuration. */
static inline void tiny_model_write(const char *dir, const char *json, ps_model_config *cfg) {
  char path[512];
  CHECK(mkdir(dir, 0755) == 0);
  snprintf(path, sizeof path, "%s/config.json", dir);
  FILE *f = fopen(path, "w");
  CHECK(f && fputs(json, f) >= 0 && fclose(f) == 0);
  *cfg = (ps_model_config){.struct_bytes = sizeof *cfg};
  CHECK(ps_model_config_read(cfg, dir) == PS_OK);
  ps_model *m;
  CHECK(ps_model_create(&m, cfg) == PS_OK);
  const uint32_t n = ps_model_n_params(m);
  ps_param_info *info = calloc(n, sizeof *info);
  ps_tensor_spec *spec = calloc(n, sizeof *spec);
  CHECK(info && spec);
  for (uint32_t i = 0; i < n; i++) {
    CHECK(ps_model_param(m, i, &info[i]) == PS_OK);
    spec[i] = (ps_tensor_spec){.name = info[i].name,
                               .dtype = PS_F32,
                               .n_dims = info[i].n_dims,
                               .shape = {info[i].shape[0], info[i].shape[1]}};
  }
  ps_tensor_writer *w;
  CHECK(ps_tensors_create(&w, dir, "model", spec, n, 0, NULL, 0) == PS_OK);
  uint64_t state = 7;
  for (uint32_t i = 0; i < n; i++)
    for (uint64_t k = 0; k < info[i].n; k++) {
      const float x = ((float)rnd_below(&state, 1 << 16) / 65536 - 0.5f) * 0.4f,
                  value = info[i].role == PS_PARAM_NORM ? 1 + x : x;
      CHECK(ps_tensors_append(w, &value, sizeof value) == PS_OK);
    }
  CHECK(ps_tensors_finish(w) == PS_OK);
  free(info);
  free(spec);
  ps_model_destroy(m);
}

/* An llm.c gpt-2 shard of @n random tokens below @vocab. */
static inline void tiny_shard_write(const char *path, uint32_t n, uint32_t vocab) {
  const int32_t header[256] = {20240520, 1, (int32_t)n};
  uint64_t state = 11;
  FILE *f = fopen(path, "wb");
  CHECK(f && fwrite(header, sizeof header, 1, f) == 1);
  for (uint32_t i = 0; i < n; i++) {
    const uint16_t token = (uint16_t)rnd_below(&state, vocab);
    CHECK(fwrite(&token, sizeof token, 1, f) == 1);
  }
  CHECK(fclose(f) == 0);
}

#endif
