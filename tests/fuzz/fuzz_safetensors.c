/* fuzz_safetensors.c - a safetensors file: every tensor that is listed can be found and its ends
 * read, as fp32. */
#include "fuzz.h"
#include <penstock/tensors.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  ps_tensor_file *f = NULL;
  ps_status st = ps_tensors_open(&f, fuzz_file("model.safetensors", data, bytes));
  fuzz_check(st);
  for (uint64_t i = 0; st == PS_OK && i < ps_tensors_count(f); i++) {
    ps_tensor_info info;
    float x[4];
    if (ps_tensors_info(f, i, &info) != PS_OK || ps_tensors_find(f, info.name) != i)
      abort();
    uint64_t n = info.n < 4 ? info.n : 4;
    if (n)
      fuzz_check(ps_tensors_read(f, i, 0, n, PS_F32, x)),
          fuzz_check(ps_tensors_read(f, i, info.n - n, n, PS_F32, x));
  }
  ps_tensors_close(f);
  return 0;
}
