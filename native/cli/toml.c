/* toml.c - the reader of toml.h: one pass, which copies each text into one block of memory. */
#include "cli/toml.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
  const char *at, *end;
  uint32_t line;
  /* What is decoded: no text is longer than its source, and each has a NUL. */
  char *out;
  const char **table, **key, **value; /* lists that grow: tables; the table's keys; an array */
  uint32_t n_tables, n_keys, n_values;
  char *error;
} reader;

__attribute__((format(printf, 2, 3))) static int fail(reader *r, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  const int n = snprintf(r->error, 256, "%u: ", r->line);
  vsnprintf(r->error + n, 256 - (size_t)n, fmt, ap);
  va_end(ap);
  return -1;
}

static int append(reader *r, const char ***list, uint32_t *n, const char *text) {
  if ((*n & (*n - 1)) == 0) { /* 0 or a power of two: the list is full */
    const char **grown = realloc(*list, (*n ? 2 * (size_t)*n : 1) * sizeof **list);
    if (!grown)
      return fail(r, "out of memory");
    *list = grown;
  }
  (*list)[(*n)++] = text;
  return 0;
}

static bool has(const char *const *list, uint32_t n, const char *text) {
  for (uint32_t i = 0; i < n; i++)
    if (strcmp(list[i], text) == 0)
      return true;
  return false;
}

/* ---- characters ------------------------------------------------------------------------------ */

static int peek(const reader *r) { return r->at < r->end ? (unsigned char)*r->at : -1; }
static bool digit(int c) { return c >= '0' && c <= '9'; }
static bool bare(int c) {
  return digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-';
}

static void spaces(reader *r) {
  while (peek(r) == ' ' || peek(r) == '\t')
    r->at++;
}

/* A line end, or the end of the text. */
static bool line_ends(const reader *r) {
  return r->at == r->end || *r->at == '\n' ||
         (*r->at == '\r' && r->end - r->at > 1 && r->at[1] == '\n');
}

/* Spaces, a comment and the line's end. */
static int end_line(reader *r) {
  spaces(r);
  if (peek(r) == '#')
    while (!line_ends(r)) {
      const int c = peek(r);
      if ((c < ' ' && c != '\t') || c == 0x7f)
        return fail(r, "a comment has a control character");
      r->at++;
    }
  if (!line_ends(r))
    return fail(r, "the line goes on after its end: give one key = value or [table] a line");
  if (r->at < r->end)
    r->at += *r->at == '\r' ? 2 : 1;
  r->line++;
  return 0;
}

const char *cli_not_utf8(const char *at, const char *end) {
  while (at < end) {
    const unsigned char c = (unsigned char)*at;
    const int more = c < 0x80 ? 0 : c < 0xc2 ? -1 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : c < 0xf5 ? 3 : -1;
    if (more < 0 || end - at <= more)
      return at;
    for (int i = 1; i <= more; i++)
      if (((unsigned char)at[i] & 0xc0) != 0x80)
        return at;
    const unsigned char d = more ? (unsigned char)at[1] : 0;
    if ((c == 0xe0 && d < 0xa0) || (c == 0xed && d > 0x9f) || (c == 0xf0 && d < 0x90) ||
        (c == 0xf4 && d > 0x8f))
      return at; /* too long, a surrogate, or past U+10FFFF */
    at += more + 1;
  }
  return end;
}

/* ---- names ----------------------------------------------------------------------------------- */

static int read_name(reader *r, const char *what, const char **out) {
  *out = r->out;
  while (bare(peek(r)))
    *r->out++ = *r->at++;
  if (r->out == *out)
    return fail(r, "%s is missing or is no bare name: letters, digits, - and _ make one", what);
  *r->out++ = 0;
  spaces(r);
  if (peek(r) == '.')
    return fail(r, "%s is dotted: write [table], and its keys under it", what);
  return 0;
}

static int read_table(reader *r) {
  const char *name;
  r->at++;
  spaces(r);
  if (peek(r) == '[')
    return fail(r, "[[...]] is an array of tables, which a run has not: write [table]");
  if (read_name(r, "the table's name", &name) != 0)
    return -1;
  if (peek(r) != ']')
    return fail(r, "the table's name does not end with ]");
  r->at++;
  if (has(r->table, r->n_tables, name))
    return fail(r, "the table [%.64s] stands here for the second time", name);
  r->n_keys = 0;
  return append(r, &r->table, &r->n_tables, name);
}

/* ---- strings --------------------------------------------------------------------------------- */

static void put_utf8(reader *r, uint32_t c) {
  const int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  static const unsigned char first[] = {0, 0xc0, 0xe0, 0xf0};
  *r->out++ = (char)(first[more] | c >> (6 * more));
  for (int i = more; i-- > 0;)
    *r->out++ = (char)(0x80 | (c >> (6 * i) & 0x3f));
}

/* \uXXXX or \UXXXXXXXX, of which the u is read. */
static int read_code(reader *r, int digits) {
  uint32_t c = 0;
  for (int i = 0; i < digits; i++, r->at++) {
    const int h = peek(r), low = h | 0x20;
    if (!digit(h) && !(low >= 'a' && low <= 'f'))
      return fail(r, "\\%c needs %d hexadecimal digits", digits == 4 ? 'u' : 'U', digits);
    c = c << 4 | (uint32_t)(digit(h) ? h - '0' : low - 'a' + 10);
  }
  if (!c || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
    return fail(r, "U+%04X cannot stand in a string", c);
  put_utf8(r, c);
  return 0;
}

static int read_escape(reader *r) {
  static const char from[] = "btnfr\"\\", to[] = "\b\t\n\f\r\"\\";
  const int c = peek(r);
  r->at += c >= 0;
  if (c == 'u' || c == 'U')
    return read_code(r, c == 'u' ? 4 : 8);
  const char *is = c > 0 ? strchr(from, c) : NULL;
  if (!is)
    return fail(r, "a \\ in a string is followed by none of b, t, n, f, r, \", \\, u and U");
  *r->out++ = to[is - from];
  return 0;
}

/* "..." with escapes, or '...' without. */
static int read_string(reader *r, const char **out) {
  const char quote = *r->at++;
  *out = r->out;
  if (r->end - r->at > 1 && r->at[0] == quote && r->at[1] == quote)
    return fail(r, "%c%c%c begins a string of several lines: write one line", quote, quote, quote);
  for (;;) {
    const int c = peek(r);
    if (c < 0 || c == '\n' || c == '\r')
      return fail(r, "the string has no %c at its end", quote);
    if ((c < ' ' && c != '\t') || c == 0x7f)
      return fail(r, "the string has a control character");
    r->at++;
    if (c == quote)
      break;
    if (c != '\\' || quote == '\'')
      *r->out++ = (char)c;
    else if (read_escape(r) != 0)
      return -1;
  }
  *r->out++ = 0;
  return 0;
}

/* ---- numbers and values ---------------------------------------------------------------------- */

/* Digits with single underscores between them. */
static bool read_digits(reader *r) {
  if (!digit(peek(r)))
    return false;
  while (digit(peek(r))) {
    *r->out++ = *r->at++;
    if (peek(r) == '_') {
      r->at++;
      if (!digit(peek(r)))
        return false;
    }
  }
  return true;
}

static void copy(reader *r) { *r->out++ = *r->at++; }

static bool read_number(reader *r) {
  if (peek(r) == '+' || peek(r) == '-')
    copy(r);
  const bool zero = peek(r) == '0';
  const char *first = r->at;
  if (!read_digits(r) || (zero && r->at - first > 1))
    return false;
  if (peek(r) == '.') {
    copy(r);
    if (!read_digits(r))
      return false;
  }
  if (peek(r) == 'e' || peek(r) == 'E') {
    copy(r);
    if (peek(r) == '+' || peek(r) == '-')
      copy(r);
    if (!read_digits(r))
      return false;
  }
  *r->out++ = 0;
  return true;
}

static bool skip_word(reader *r, const char *word) {
  const size_t n = strlen(word);
  if ((size_t)(r->end - r->at) < n || memcmp(r->at, word, n) != 0)
    return false;
  r->at += n;
  return true;
}

/* What may follow a value. */
static bool value_ends(const reader *r) {
  const int c = peek(r);
  return line_ends(r) || c == ' ' || c == '\t' || c == '#' || c == ',' || c == ']';
}

static int read_value(reader *r, const char **out, cli_toml_kind *kind) {
  const int c = peek(r);
  bool ok = true;
  *out = r->out;
  if (c == '"' || c == '\'') {
    *kind = CLI_TOML_STRING;
    if (read_string(r, out) != 0)
      return -1;
  } else if (c == 't' || c == 'f') {
    *kind = CLI_TOML_BOOL;
    *out = c == 't' ? "true" : "false";
    ok = skip_word(r, *out);
  } else {
    *kind = CLI_TOML_NUMBER;
    ok = read_number(r);
  }
  return ok && value_ends(r) ? 0
                             : fail(r, "the value is no string in quotes, no decimal number and "
                                       "neither true nor false");
}

/* Spaces, comments and line ends between an array's values. */
static int gap(reader *r) {
  for (;;) {
    spaces(r);
    if (r->at == r->end || (*r->at != '#' && !line_ends(r)))
      return 0;
    if (end_line(r) != 0)
      return -1;
  }
}

static int read_array(reader *r, cli_toml_item *item) {
  r->at++;
  for (;;) {
    const char *value;
    cli_toml_kind kind;
    if (gap(r) != 0)
      return -1;
    if (peek(r) == ']')
      break;
    if (peek(r) == '[' || peek(r) == '{')
      return fail(r, "an array has an array or a table in it, which no option takes");
    if (read_value(r, &value, &kind) != 0 || append(r, &r->value, &r->n_values, value) != 0 ||
        gap(r) != 0)
      return -1;
    if (r->n_values > 1 && kind != item->kind)
      return fail(r, "the array has values of two kinds");
    item->kind = kind;
    if (peek(r) == ',')
      r->at++;
    else if (peek(r) != ']')
      return fail(r, "the array has neither , nor ] after a value");
  }
  r->at++;
  return 0;
}

static int read_item(reader *r, cli_toml_item *item) {
  *item = (cli_toml_item){.line = r->line};
  if (read_name(r, "the key", &item->key) != 0)
    return -1;
  if (peek(r) != '=')
    return fail(r, "the key %.64s has no = after it", item->key);
  if (!r->n_tables)
    return fail(r, "the key %.64s stands before any [table]", item->key);
  if (has(r->key, r->n_keys, item->key))
    return fail(r, "the key %.64s stands in [%.64s] for the second time", item->key,
                r->table[r->n_tables - 1]);
  item->table = r->table[r->n_tables - 1];
  r->at++;
  spaces(r);
  r->n_values = 0;
  item->array = peek(r) == '[';
  if (peek(r) == '{')
    return fail(r, "the value of %.64s is an inline table, which no option takes", item->key);
  const char *value;
  if (append(r, &r->key, &r->n_keys, item->key) != 0 ||
      (item->array ? read_array(r, item)
                   : read_value(r, &value, &item->kind) != 0 ||
                         append(r, &r->value, &r->n_values, value) != 0))
    return -1;
  item->n = r->n_values;
  item->value = r->value;
  return 0;
}

static int read_lines(reader *r, cli_toml_fn take, void *user) {
  while (r->at < r->end) {
    cli_toml_item item = {.line = 0};
    spaces(r);
    int code = 0;
    if (peek(r) == '[')
      code = read_table(r);
    else if (peek(r) != '#' && !line_ends(r))
      code = read_item(r, &item);
    if (code == 0)
      code = end_line(r);
    if (code == 0 && item.line)
      code = take(user, &item);
    if (code != 0)
      return code;
  }
  return 0;
}

int cli_toml_read(const char *text, size_t bytes, cli_toml_fn take, void *user, char **storage,
                  char error[256]) {
  reader r = {.at = text, .end = text + bytes, .line = 1, .error = error};
  error[0] = 0;
  *storage = NULL;
  if (bytes > CLI_TOML_MAX_BYTES)
    return fail(&r, "the text has %zu bytes: at most %d are possible", bytes, CLI_TOML_MAX_BYTES);
  const char *wrong = cli_not_utf8(text, text + bytes);
  if (wrong < r.end) {
    for (const char *c = text; c < wrong; c++)
      r.line += *c == '\n';
    return fail(&r, "the line is not UTF-8");
  }
  r.out = *storage = malloc(2 * bytes + 1);
  const int code = r.out ? read_lines(&r, take, user) : fail(&r, "out of memory");
  free(r.table);
  free(r.key);
  free(r.value);
  return code;
}
