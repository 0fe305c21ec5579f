/* json_echo.c - for tests/test_json.py: parse, then write the tree back with the library's own
 * writer. */
#include "core/core.h"
#include <string.h>

static void echo(ps__jsonw *w, const char *key, const ps__json *j) {
  uint64_t u;
  switch (ps__json_type(j)) {
  case PS_JSON_NULL: ps__jsonw_string(w, key, NULL); break;
  case PS_JSON_BOOL: ps__jsonw_bool(w, key, ps__json_bool(j, false)); break;
  case PS_JSON_STRING: ps__jsonw_string(w, key, ps__json_string(j, NULL)); break;
  case PS_JSON_NUMBER:
    if (ps__json_uint64(j, &u))
      ps__jsonw_uint(w, key, u);
    else
      ps__jsonw_number(w, key, ps__json_number(j, 0));
    break;
  case PS_JSON_ARRAY:
  case PS_JSON_OBJECT: {
    bool object = ps__json_type(j) == PS_JSON_OBJECT;
    if (object)
      ps__jsonw_object(w, key);
    else
      ps__jsonw_array(w, key);
    for (size_t i = 0; i < ps__json_length(j); i++)
      echo(w, ps__json_key(j, i), ps__json_at(j, i));
    ps__jsonw_end(w);
  }
  }
}

/* 0 and the text in @out (of @cap bytes); a status when it was refused; 1 when it does not fit. */
PS_API int t_json_echo(const char *text, size_t bytes, char *out, size_t cap) {
  ps__json *j = NULL;
  ps__jsonw *w = NULL;
  PS_TRY(ps__json_parse(&j, text, bytes, "doc.json"));
  int st = ps__jsonw_create(&w);
  if (st == PS_OK) {
    echo(w, NULL, j);
    size_t n = 0;
    const char *s = ps__jsonw_text(w, &n);
    st = s && n < cap ? 0 : 1;
    if (st == 0)
      memcpy(out, s, n + 1);
  }
  ps__jsonw_free(w);
  ps__json_free(j);
  return st;
}

/* Whether ps__json_get() finds the value that @key's position has, for every key of the root
 * object. */
PS_API int t_json_lookup(const char *text, size_t bytes) {
  ps__json *j = NULL;
  PS_TRY(ps__json_parse(&j, text, bytes, "doc.json"));
  int bad = ps__json_get(j, "no such key") != NULL;
  for (size_t i = 0; i < ps__json_length(j); i++)
    bad |= ps__json_get(j, ps__json_key(j, i)) != ps__json_at(j, i);
  ps__json_free(j);
  return bad;
}
