/* fuzz_toml.c - the reader of a run's TOML file: every text that it hands out is read to its
 * end. */
#include "cli/toml.h"
#include "fuzz.h"

static int take(void *user, const cli_toml_item *item) {
  size_t *sum = user;
  if (!strlen(item->table) || !strlen(item->key) || !item->line || (!item->array && item->n != 1))
    abort();
  for (uint32_t i = 0; i < item->n; i++) {
    const char *const end = item->value[i] + strlen(item->value[i]);
    if (item->kind == CLI_TOML_STRING && cli_not_utf8(item->value[i], end) != end)
      abort();
    *sum += strlen(item->value[i]);
  }
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  char error[256], *storage;
  size_t sum = 0;
  const int st = cli_toml_read((const char *)data, bytes, take, &sum, &storage, error);
  if ((st != 0) != (error[0] != 0) || strchr(error, '\n') || sum > 5 * bytes)
    abort();
  free(storage);
  return 0;
}
