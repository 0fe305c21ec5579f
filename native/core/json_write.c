/* json_write.c - writes JSON into memory, on one line, with Python's separators.
 *
 * The output is always valid JSON. Bytes that are not UTF-8 become U+FFFD. After a misuse (a key
 * missing in an object, a key in an array, a second root, an end too many), or when memory ran out,
 * ps__jsonw_text() returns NULL. */
#include "core/core.h"
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

struct ps__jsonw {
  char *text;
  size_t n, cap;
  bool failed, rooted;
  uint32_t depth;
  bool object[MAX_DEPTH]; /* what each open level is */
  bool some[MAX_DEPTH];   /* it has a member */
};

ps_status ps__jsonw_create(ps__jsonw **out) {
  ps__jsonw *w = ps__calloc(1, sizeof *w);
  if (!w)
    return ps__fail(PS_ENOMEM, "no memory left for a JSON writer");
  *out = w;
  return PS_OK;
}

void ps__jsonw_free(ps__jsonw *w) {
  if (!w)
    return;
  ps__free(w->text);
  ps__free(w);
}

static void put(ps__jsonw *w, const char *s, size_t n) {
  if (w->failed)
    return;
  if (w->cap - w->n <= n) { /* one byte stays for the NUL */
    size_t cap = w->cap ? w->cap : 256;
    while (cap - w->n <= n)
      cap *= 2;
    char *p = ps__realloc(w->text, cap);
    if (!p) {
      w->failed = true;
      return;
    }
    w->text = p;
    w->cap = cap;
  }
  memcpy(w->text + w->n, s, n);
  w->n += n;
  w->text[w->n] = 0;
}

static void put_text(ps__jsonw *w, const char *s) { put(w, s, strlen(s)); }

static void put_string(ps__jsonw *w, const char *value) {
  put(w, "\"", 1);
  for (const unsigned char *s = (const unsigned char *)value; *s;) {
    char esc[8];
    size_t n = ps__utf8_length(s);
    if (n == 0) {
      put_text(w, "\\ufffd");
      s++;
      continue;
    }
    if (*s == '"' || *s == '\\') {
      esc[0] = '\\';
      esc[1] = (char)*s;
      put(w, esc, 2);
    } else if (*s == '\n') {
      put_text(w, "\\n");
    } else if (*s < 0x20) {
      snprintf(esc, sizeof esc, "\\u%04x", *s);
      put_text(w, esc);
    } else {
      put(w, (const char *)s, n);
    }
    s += n;
  }
  put(w, "\"", 1);
}

/* Writes what precedes a value: a separator and the key. */
static void begin(ps__jsonw *w, const char *key) {
  if (w->depth == 0) {
    if (w->rooted || key)
      w->failed = true;
    w->rooted = true;
    return;
  }
  uint32_t d = w->depth - 1;
  if (w->object[d] != (key != NULL))
    w->failed = true;
  if (w->some[d])
    put_text(w, ", ");
  w->some[d] = true;
  if (key) {
    put_string(w, key);
    put_text(w, ": ");
  }
}

static void open_level(ps__jsonw *w, const char *key, bool object) {
  begin(w, key);
  if (w->depth == MAX_DEPTH) {
    w->failed = true;
    return;
  }
  w->object[w->depth] = object;
  w->some[w->depth] = false;
  w->depth++;
  put_text(w, object ? "{" : "[");
}

void ps__jsonw_object(ps__jsonw *w, const char *key) { open_level(w, key, true); }
void ps__jsonw_array(ps__jsonw *w, const char *key) { open_level(w, key, false); }

void ps__jsonw_end(ps__jsonw *w) {
  if (w->depth == 0) {
    w->failed = true;
    return;
  }
  w->depth--;
  put_text(w, w->object[w->depth] ? "}" : "]");
}

void ps__jsonw_string(ps__jsonw *w, const char *key, const char *value) {
  begin(w, key);
  if (value)
    put_string(w, value);
  else
    put_text(w, "null");
}

void ps__jsonw_uint(ps__jsonw *w, const char *key, uint64_t value) {
  char buf[24];
  snprintf(buf, sizeof buf, "%" PRIu64, value);
  begin(w, key);
  put_text(w, buf);
}

/* The fewest digits that read back as the same double, with a decimal point whatever the
 * caller's locale. */
void ps__jsonw_number(ps__jsonw *w, const char *key, double value) {
  char buf[40] = "null";
  begin(w, key);
  if (isfinite(value)) {
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c) {
      w->failed = true;
      return;
    }
    locale_t old = uselocale(c);
    for (int digits = 6; digits <= 17; digits++) {
      snprintf(buf, sizeof buf, "%.*g", digits, value);
      if (strtod(buf, NULL) == value)
        break;
    }
    uselocale(old);
    freelocale(c);
  }
  put_text(w, buf);
}

void ps__jsonw_number_text(ps__jsonw *w, const char *key, const char *text) {
  begin(w, key);
  put_text(w, text);
}

void ps__jsonw_bool(ps__jsonw *w, const char *key, bool value) {
  begin(w, key);
  put_text(w, value ? "true" : "false");
}

const char *ps__jsonw_text(ps__jsonw *w, size_t *bytes) {
  if (w->failed || w->depth != 0 || !w->rooted)
    return NULL;
  if (bytes)
    *bytes = w->n;
  return w->text;
}

static ps_status write_out(ps__jsonw *w, const char *path,
                           ps_status (*write)(const char *path, const char *text, size_t bytes)) {
  size_t bytes = 0;
  const char *text = ps__jsonw_text(w, &bytes);
  const ps_status st = write(path, text, bytes);
  ps__jsonw_free(w);
  return st;
}
ps_status ps__jsonw_replace(ps__jsonw *w, const char *path) {
  return write_out(w, path, ps__replace_text);
}
ps_status ps__jsonw_cache(ps__jsonw *w, const char *path) {
  return write_out(w, path, ps__cache_write);
}
