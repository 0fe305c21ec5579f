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
  if (ps_model_config_check(&cfg, "input") != PS_OK || !ps_model_n_elements(&cfg))
    abort();
  ps_param_info info;
  uint32_t n = ps_model_n_params(&cfg), last = n < 64 ? n : 64;
  for (uint32_t i = 0; i < last; i++)
    if (ps_model_param(&cfg, i, &info) != PS_OK)
      abort();
  ps_flops flops;
  fuzz_check(ps_model_flops(&cfg, 4096, &flops));
  return 0;
}
