/* fuzz_shards.c - a shard of tokens: the first and the last sequence of three lengths are read. */
#include "fuzz.h"
#include <penstock/data.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  const char *path = fuzz_file("data.bin", data, bytes);
  ps_dataset *ds = NULL;
  ps_status st = ps_dataset_open(&ds, &path, 1, 1000);
  fuzz_check(st);
  static const uint64_t lengths[] = {1, 7, 64};
  for (int i = 0; st == PS_OK && i < 3; i++) {
    int32_t tokens[64], targets[64];
    uint64_t n = ps_dataset_n_sequences(ds, lengths[i]);
    if (!n)
      continue;
    const uint64_t at[] = {0, n - 1};
    for (int k = 0; k < 2; k++) {
      ps_status read = ps_dataset_read(ds, lengths[i], at[k], tokens, targets, NULL);
      fuzz_check(read);
      for (uint64_t t = 0; read == PS_OK && t < lengths[i]; t++)
        if (tokens[t] < 0 || tokens[t] >= 1000)
          abort();
    }
  }
  ps_dataset_close(ds);
  return 0;
}
