/* fuzz_config.c - config.json: what is read must pass the check of configurations, and have
 * sizes that can be asked for. */
#include "fuzz.h"
#include <penstock/model.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  ps_model_config cfg = {.struct_bytes = sizeof cfg};
  ps_status st = ps_model_config_read(&cfg, fuzz_file("config.json", data, bytes));
  fuzz_check(st);
  if (st != PS_OK)
    return 0;
  if (ps_model_config_check(&cfg, "input") != PS_OK)
    abort();
  ps_model *m;
  st = ps_model_create(&m, &cfg);
  fuzz_check(st);
  if (st != PS_OK)
    return 0;
  ps_param_info info;
  const uint32_t n = ps_model_n_params(m), last = n < 64 ? n : 64;
  for (uint32_t i = 0; i < last; i++)
    if (ps_model_param(m, i, &info) != PS_OK || ps_model_find(m, info.name) != i)
      abort();
  ps_flops flops;
  fuzz_check(ps_model_flops(m, 4096, &flops));
  if (!ps_model_n_elements(m))
    abort();
  ps_model_destroy(m);
  return 0;
}
