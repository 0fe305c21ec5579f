/* json_scan.c - strict JSON as a sequence of events: RFC 8259, UTF-8 validated, at most 64 levels.
 *
 * The text comes from memory, or from a file that is read in pieces, so that a document of any size
 * takes the memory of its longest key and value. Strings are unescaped. Numbers keep their text, so
 * that integers up to 2^64-1 are exact. Unlike some other readers this one refuses NaN, Infinity, a
 * byte order mark, lone surrogates, and NUL in a key. It does not find duplicate keys. */
#include "core/core.h"
#include <inttypes.h>
#include <string.h>

enum { MAX_DEPTH = 64, PIECE_BYTES = 1 << 16 };

struct ps__json_scan {
  const char *start, *p, *end; /* the text in memory, and the next character to read */
  uint64_t before;             /* bytes of the document before start */
  uint64_t line;
  int fd;                /* -1: the whole text is in memory */
  uint64_t offset, left; /* of the file's text after end */
  char *piece;
  ps_status failed; /* reading the file failed */
  const char *name;
  char *text; /* key and value of the event */
  size_t n, cap, max_text;
  uint64_t objects; /* bit d: the container at depth d is an object */
  uint32_t depth;
  /* the document has begun; nothing was read of the innermost container */
  bool begun, first;
};

typedef struct place {
  uint64_t line, byte;
} place;

static place here(const ps__json_scan *s) {
  return (place){s->line, s->before + (uint64_t)(s->p - s->start)};
}

static ps_status fail_at(const ps__json_scan *s, place at, const char *what) {
  if (s->failed != PS_OK)
    return s->failed;
  return ps__fail(PS_EFORMAT, "%s: line %" PRIu64 ": %s (byte %" PRIu64 ")", s->name, at.line, what,
                  at.byte);
}

static ps_status fail(const ps__json_scan *s, const char *what) {
  return fail_at(s, here(s), what);
}

ps_status ps__json_scan_fail(const ps__json_scan *s, const char *what) { return fail(s, what); }

/* ---- characters ------------------------------------------------------------------------------ */

/* The next character; -1 at the end of the text, and where reading fails. */
static int peek(ps__json_scan *s) {
  if (s->p < s->end)
    return (unsigned char)*s->p;
  if (s->left == 0 || s->failed != PS_OK)
    return -1;
  const size_t n = s->left < PIECE_BYTES ? (size_t)s->left : PIECE_BYTES;
  s->failed = ps__pread_all(s->fd, s->name, s->piece, n, s->offset);
  if (s->failed != PS_OK)
    return -1;
  s->before += (uint64_t)(s->end - s->start);
  s->start = s->p = s->piece;
  s->end = s->piece + n;
  s->offset += n;
  s->left -= n;
  return (unsigned char)*s->p;
}

static int take(ps__json_scan *s) {
  const int c = peek(s);
  if (c >= 0)
    s->p++;
  s->line += c == '\n';
  return c;
}

static bool take_if(ps__json_scan *s, char c) {
  if (peek(s) != c)
    return false;
  s->p++;
  return true;
}

static void skip_space(ps__json_scan *s) {
  for (int c = peek(s); c == ' ' || c == '\t' || c == '\n' || c == '\r'; c = peek(s))
    take(s);
}

static ps_status put(ps__json_scan *s, const char *bytes, size_t n) {
  if (n > s->max_text || s->n > s->max_text - n) {
    char what[80];
    snprintf(what, sizeof what, "a string or number is longer than %zu bytes", s->max_text);
    return fail(s, what);
  }
  while (s->cap - s->n < n + 1) /* and the NUL */
    if (!PS_GROW(s->text, s->cap, s->cap))
      return ps__fail(PS_ENOMEM, "%s: no memory left to read it", s->name);
  memcpy(s->text + s->n, bytes, n);
  s->n += n;
  s->text[s->n] = 0;
  return PS_OK;
}

/* ---- strings --------------------------------------------------------------------------------- */

static bool hex4(ps__json_scan *s, uint32_t *out) {
  *out = 0;
  for (int i = 0; i < 4; i++) {
    const int c = peek(s), d = c >= '0' && c <= '9'   ? c - '0'
                               : c >= 'a' && c <= 'f' ? c - 'a' + 10
                               : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                      : -1;
    if (d < 0)
      return false;
    *out = *out * 16 + (uint32_t)d;
    s->p++;
  }
  return true;
}

static ps_status put_utf8(ps__json_scan *s, uint32_t c) {
  char b[4];
  size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const unsigned char lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
  for (size_t i = n; i-- > 1; c >>= 6)
    b[i] = (char)(0x80 | (c & 63));
  b[0] = (char)(lead[n] | c);
  return put(s, b, n);
}

/* Reads the code point after "\u"; a surrogate pair has two escapes. */
static ps_status read_unicode(ps__json_scan *s) {
  const place at = here(s);
  uint32_t hi, lo;
  if (!hex4(s, &hi))
    return fail_at(s, at, "four hexadecimal digits must follow \\u");
  if (hi >= 0xDC00 && hi <= 0xDFFF)
    return fail_at(s, at, "a low surrogate stands alone");
  if (hi < 0xD800 || hi > 0xDBFF)
    return put_utf8(s, hi);
  if (!take_if(s, '\\') || !take_if(s, 'u') || !hex4(s, &lo) || lo < 0xDC00 || lo > 0xDFFF)
    return fail_at(s, at, "a high surrogate stands alone");
  return put_utf8(s, 0x10000 + ((hi - 0xD800) << 10) + (lo - 0xDC00));
}

static ps_status read_escape(ps__json_scan *s, place string) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  const place at = here(s);
  const int c = take(s);
  if (c < 0)
    return fail_at(s, string, "a string is not closed");
  if (c == 'u')
    return read_unicode(s);
  const char *k = c ? strchr(from, c) : NULL;
  return k ? put(s, &to[k - from], 1) : fail_at(s, at, "an unknown escape in a string");
}

/* One well-formed sequence of several bytes (Unicode table 3-7: no overlong forms, no
 * surrogates). */
static ps_status read_utf8(ps__json_scan *s) {
  const place at = here(s);
  unsigned char b[4] = {(unsigned char)take(s)}, lo = 0x80, hi = 0xBF;
  const size_t n = b[0] >= 0xC2 && b[0] <= 0xDF   ? 2
                   : b[0] >= 0xE0 && b[0] <= 0xEF ? 3
                   : b[0] >= 0xF0 && b[0] <= 0xF4 ? 4
                                                  : 0;
  if (b[0] == 0xE0)
    lo = 0xA0;
  if (b[0] == 0xED)
    hi = 0x9F;
  if (b[0] == 0xF0)
    lo = 0x90;
  if (b[0] == 0xF4)
    hi = 0x8F;
  bool good = n > 0;
  for (size_t i = 1; good && i < n; i++) {
    const int c = take(s);
    good = c >= lo && c <= hi;
    b[i] = (unsigned char)c;
    lo = 0x80;
    hi = 0xBF;
  }
  return good ? put(s, (const char *)b, n) : fail_at(s, at, "the text is not UTF-8");
}

static ps_status read_string(ps__json_scan *s) {
  const place at = here(s);
  s->p++; /* the quote */
  for (;;) {
    const int c = peek(s);
    if (c == '"')
      break;
    if (c < 0)
      return fail_at(s, at, "a string is not closed");
    if (c < 0x20)
      return fail(s, "a control character stands in a string unescaped");
    if (c == '\\') {
      s->p++;
      PS_TRY(read_escape(s, at));
    } else if (c >= 0x80) {
      PS_TRY(read_utf8(s));
    } else {
      const char *p = s->p;
      while (p < s->end && *p >= 0x20 && *p < 0x7F && *p != '"' && *p != '\\')
        p++;
      p += p == s->p; /* 0x7F */
      PS_TRY(put(s, s->p, (size_t)(p - s->p)));
      s->p = p;
    }
  }
  s->p++;
  return put(s, "", 0);
}

/* ---- numbers and words ----------------------------------------------------------------------- */

static bool digit(ps__json_scan *s) {
  const int c = peek(s);
  return c >= '0' && c <= '9';
}

static ps_status put_next(ps__json_scan *s) {
  const char c = (char)take(s);
  return put(s, &c, 1);
}

static ps_status read_digits(ps__json_scan *s, place at, const char *missing) {
  if (!digit(s))
    return fail_at(s, at, missing);
  while (digit(s))
    PS_TRY(put_next(s));
  return PS_OK;
}

static ps_status read_number(ps__json_scan *s) {
  const place at = here(s);
  if (peek(s) == '-')
    PS_TRY(put_next(s));
  if (peek(s) == '0') {
    PS_TRY(put_next(s));
    if (digit(s))
      return fail_at(s, at, "a number starts with a superfluous zero");
  } else {
    PS_TRY(read_digits(s, at, "a value is expected"));
  }
  if (peek(s) == '.') {
    PS_TRY(put_next(s));
    PS_TRY(read_digits(s, at, "a digit must follow the decimal point"));
  }
  if (peek(s) == 'e' || peek(s) == 'E') {
    PS_TRY(put_next(s));
    if (peek(s) == '+' || peek(s) == '-')
      PS_TRY(put_next(s));
    PS_TRY(read_digits(s, at, "a digit must follow the exponent's e"));
  }
  return s->failed;
}

static ps_status read_word(ps__json_scan *s, const char *word) {
  const place at = here(s);
  for (; *word; word++)
    if (!take_if(s, *word))
      return fail_at(s, at, "a value is expected");
  return PS_OK;
}

/* ---- events ---------------------------------------------------------------------------------- */

static ps_status begin_container(ps__json_scan *s, bool object) {
  if (s->depth == MAX_DEPTH)
    return fail(s, "arrays and objects are nested more than 64 deep");
  s->p++;
  s->objects = (s->objects & ~(UINT64_C(1) << s->depth)) | (uint64_t)object << s->depth;
  s->depth++;
  s->first = true;
  return PS_OK;
}

static ps_status read_value(ps__json_scan *s, ps__json_event *e) {
  const int c = peek(s);
  switch (c) {
  case -1: return fail(s, "the text ends where a value is expected");
  case '"': e->kind = PS_JSON_STRING; return read_string(s);
  case '{': e->kind = PS_JSON_OBJECT; return begin_container(s, true);
  case '[': e->kind = PS_JSON_ARRAY; return begin_container(s, false);
  case 't':
  case 'f':
    e->kind = PS_JSON_BOOL;
    e->boolean = c == 't';
    return read_word(s, c == 't' ? "true" : "false");
  case 'n': e->kind = PS_JSON_NULL; return read_word(s, "null");
  default: e->kind = PS_JSON_NUMBER; return read_number(s);
  }
}

static ps_status read_key(ps__json_scan *s, ps__json_event *e) {
  const place at = here(s);
  if (peek(s) != '"')
    return fail(s, "a key in double quotes is expected");
  PS_TRY(read_string(s));
  if (memchr(s->text, 0, s->n))
    return fail_at(s, at, "a key contains the character U+0000");
  e->key_bytes = s->n;
  PS_TRY(put(s, "", 1));
  skip_space(s);
  if (!take_if(s, ':'))
    return fail(s, "a colon is expected after the key");
  skip_space(s);
  return PS_OK;
}

ps_status ps__json_scan_next(ps__json_scan *s, ps__json_event *e) {
  *e = (ps__json_event){0};
  s->n = 0;
  skip_space(s);
  if (s->depth == 0 && s->begun) {
    e->end = true;
    return peek(s) < 0 ? s->failed : fail(s, "something follows the end of the document");
  }
  const bool member = s->depth > 0, object = member && (s->objects >> (s->depth - 1) & 1);
  if (member) {
    const char close = object ? '}' : ']';
    if (peek(s) == close) {
      s->p++;
      s->depth--;
      s->first = false;
      e->end = true;
      return PS_OK;
    }
    if (!s->first) {
      if (!take_if(s, ','))
        return fail(s, object ? "a comma or } is expected" : "a comma or ] is expected");
      skip_space(s);
    }
    if (object)
      PS_TRY(read_key(s, e));
  }
  s->begun = true;
  s->first = false;
  const size_t value_at = s->n;
  PS_TRY(read_value(s, e));
  if (object)
    e->key = s->text;
  if (e->kind == PS_JSON_STRING || e->kind == PS_JSON_NUMBER) {
    e->text = s->text + value_at;
    e->bytes = s->n - value_at;
  }
  return PS_OK;
}

ps_status ps__json_scan_skip(ps__json_scan *s, const ps__json_event *begin) {
  ps__json_event e;
  if (begin->kind != PS_JSON_ARRAY && begin->kind != PS_JSON_OBJECT)
    return PS_OK;
  for (const uint32_t outside = s->depth - 1; s->depth > outside;)
    PS_TRY(ps__json_scan_next(s, &e));
  return PS_OK;
}

/* ---- opening and closing --------------------------------------------------------------------- */

static ps__json_scan *scan_create(const char *name, size_t max_text) {
  ps__json_scan *s = ps__calloc(1, sizeof *s);
  if (!s) {
    ps__fail(PS_ENOMEM, "%s: no memory left to read it", name);
    return NULL;
  }
  s->line = 1;
  s->fd = -1;
  s->name = name;
  s->max_text = max_text;
  return s;
}

ps_status ps__json_scan_text(ps__json_scan **out, const char *text, size_t bytes,
                             const char *name) {
  ps__json_scan *s = scan_create(name, SIZE_MAX);
  if (!s)
    return PS_ENOMEM;
  s->start = s->p = text;
  s->end = text + bytes;
  *out = s;
  return PS_OK;
}

ps_status ps__json_scan_file(ps__json_scan **out, int fd, uint64_t offset, uint64_t bytes,
                             size_t max_text, const char *name) {
  ps__json_scan *s = scan_create(name, max_text);
  if (!s)
    return PS_ENOMEM;
  s->fd = fd;
  s->offset = offset;
  s->left = bytes;
  s->piece = ps__malloc(PIECE_BYTES);
  s->start = s->p = s->end = s->piece;
  if (!s->piece) {
    ps__json_scan_close(s);
    return ps__fail(PS_ENOMEM, "%s: no memory left to read it", name);
  }
  *out = s;
  return PS_OK;
}

void ps__json_scan_close(ps__json_scan *s) {
  if (!s)
    return;
  ps__free(s->piece);
  ps__free(s->text);
  ps__free(s);
}

bool ps__json_text_uint64(const char *text, size_t bytes, uint64_t *out) {
  uint64_t v = 0;
  for (size_t i = 0; i < bytes; i++) {
    const char c = text[i];
    if (c < '0' || c > '9')
      return false;
    if (__builtin_mul_overflow(v, 10u, &v) || __builtin_add_overflow(v, (uint64_t)(c - '0'), &v))
      return false;
  }
  *out = v;
  return true;
}
