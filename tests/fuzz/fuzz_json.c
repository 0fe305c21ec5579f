/* fuzz_json.c - the JSON reader: what it takes is walked to its end. */
#include "fuzz.h"
#include "core/core.h"

static void walk(const ps__json *j) {
  uint64_t u;
  (void)ps__json_uint64(j, &u);
  (void)ps__json_number(j, 0);
  (void)ps__json_bool(j, false);
  const char *s = ps__json_string(j, NULL);
  if (s)
    (void)strlen(s);
  for (size_t i = 0; i < ps__json_length(j); i++) {
    const char *key = ps__json_key(j, i);
    if (key && !ps__json_get(j, key))
      abort();
    walk(ps__json_at(j, i));
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  ps__json *j = NULL;
  ps_status st = ps__json_parse(&j, (const char *)data, bytes, "input");
  fuzz_check(st);
  if (st == PS_OK)
    walk(j);
  ps__json_free(j);
  return 0;
}
