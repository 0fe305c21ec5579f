/* json.c - a small strict JSON reader: RFC 8259, UTF-8 validated, duplicate keys refused, at most 64 levels.
 *
 * The text is copied once; strings are unescaped in place (never longer than they were), numbers keep their text, so that
 * integers up to 2^64-1 are exact. An object of many keys carries an index sorted by key: duplicates are found and keys
 * looked up in O(log n), which matters for checkpoints of 10^5 tensors.
 * Stricter than some: NaN, Infinity, a byte order mark, lone surrogates and NUL in a key are refused. */
#include "core.h"
#include <inttypes.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_DEPTH = 64, INDEX_FROM = 8 };

struct ps__json {
  ps__json_kind kind;
  bool truth;
  size_t n;                  /* bytes of a string or number; members of an array or object */
  union {
    const char *text;        /* string, number */
    struct member *members;  /* array, object */
  };
  uint32_t *sorted;          /* objects of INDEX_FROM keys or more: member numbers by key */
};

struct member {
  const char *key; /* NULL in arrays */
  size_t key_bytes;
  ps__json value;
};

typedef struct root {
  ps__json node; /* first: a root is its node */
  char *buffer;
} root;

typedef struct parser {
  char *p, *end;      /* in the private copy */
  char *start;
  const char *source; /* the untouched text, for line numbers */
  const char *name;
  uint32_t depth;
} parser;

static ps_status fail_at(const parser *s, const char *at, const char *what) {
  size_t line = 1, offset = (size_t)(at - s->start);
  for (size_t i = 0; i < offset; i++) line += s->source[i] == '\n';
  return ps__fail(PS_EFORMAT, "%s: line %zu: %s (byte %zu)", s->name, line, what, offset);
}

static ps_status no_memory(const parser *s) { return ps__fail(PS_ENOMEM, "%s: no memory left to read it", s->name); }

/* Length of the well-formed UTF-8 sequence at p (Unicode table 3-7: no overlong forms, no surrogates), 0 when malformed. */
static size_t utf8_length(const unsigned char *p, const unsigned char *end) {
  size_t left = (size_t)(end - p);
  unsigned char lo = 0x80, hi = 0xBF;
  size_t n;
  if (p[0] < 0x80) return 1;
  if (p[0] >= 0xC2 && p[0] <= 0xDF) n = 2;
  else if (p[0] >= 0xE0 && p[0] <= 0xEF) n = 3;
  else if (p[0] >= 0xF0 && p[0] <= 0xF4) n = 4;
  else return 0;
  if (left < n) return 0;
  if (p[0] == 0xE0) lo = 0xA0;
  if (p[0] == 0xED) hi = 0x9F;
  if (p[0] == 0xF0) lo = 0x90;
  if (p[0] == 0xF4) hi = 0x8F;
  if (p[1] < lo || p[1] > hi) return 0;
  for (size_t i = 2; i < n; i++)
    if (p[i] < 0x80 || p[i] > 0xBF) return 0;
  return n;
}

static void skip_space(parser *s) {
  while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r')) s->p++;
}

static int hex4(const char *p, const char *end) {
  int v = 0;
  if (end - p < 4) return -1;
  for (int i = 0; i < 4; i++) {
    char c = p[i];
    int d = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (d < 0) return -1;
    v = v * 16 + d;
  }
  return v;
}

static char *put_utf8(char *w, uint32_t c) {
  if (c < 0x80) {
    *w++ = (char)c;
  } else if (c < 0x800) {
    *w++ = (char)(0xC0 | c >> 6);
    *w++ = (char)(0x80 | (c & 63));
  } else if (c < 0x10000) {
    *w++ = (char)(0xE0 | c >> 12);
    *w++ = (char)(0x80 | (c >> 6 & 63));
    *w++ = (char)(0x80 | (c & 63));
  } else {
    *w++ = (char)(0xF0 | c >> 18);
    *w++ = (char)(0x80 | (c >> 12 & 63));
    *w++ = (char)(0x80 | (c >> 6 & 63));
    *w++ = (char)(0x80 | (c & 63));
  }
  return w;
}

/* s->p is behind "\u". Reads one code point, two escapes when it is a surrogate pair. */
static ps_status parse_unicode(parser *s, uint32_t *out) {
  int hi = hex4(s->p, s->end);
  if (hi < 0) return fail_at(s, s->p, "four hexadecimal digits must follow \\u");
  if (hi >= 0xDC00 && hi <= 0xDFFF) return fail_at(s, s->p, "a low surrogate stands alone");
  s->p += 4;
  *out = (uint32_t)hi;
  if (hi < 0xD800 || hi > 0xDBFF) return PS_OK;
  if (s->end - s->p < 6 || s->p[0] != '\\' || s->p[1] != 'u') return fail_at(s, s->p, "a high surrogate stands alone");
  int lo = hex4(s->p + 2, s->end);
  if (lo < 0xDC00 || lo > 0xDFFF) return fail_at(s, s->p, "a high surrogate stands alone");
  s->p += 6;
  *out = 0x10000 + (((uint32_t)hi - 0xD800) << 10) + ((uint32_t)lo - 0xDC00);
  return PS_OK;
}

/* s->p is at the opening quote. The result is NUL-terminated: its closing quote is overwritten. */
static ps_status parse_string(parser *s, const char **text, size_t *bytes) {
  char *begin = ++s->p, *w = begin;
  for (;;) {
    if (s->p == s->end) return fail_at(s, begin - 1, "a string is not closed");
    unsigned char c = (unsigned char)*s->p;
    if (c == '"') break;
    if (c < 0x20) return fail_at(s, s->p, "a control character stands in a string unescaped");
    if (c != '\\') {
      *w++ = *s->p++;
      continue;
    }
    if (++s->p == s->end) return fail_at(s, begin - 1, "a string is not closed");
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char e = *s->p;
    const char *k = e ? strchr(from, e) : NULL;
    if (k) {
      *w++ = to[k - from];
      s->p++;
    } else if (e == 'u') {
      uint32_t code = 0;
      s->p++;
      PS_TRY(parse_unicode(s, &code));
      w = put_utf8(w, code);
    } else {
      return fail_at(s, s->p, "an unknown escape in a string");
    }
  }
  *w = 0;
  s->p++;
  *text = begin;
  *bytes = (size_t)(w - begin);
  return PS_OK;
}

static bool digit(const parser *s) { return s->p < s->end && *s->p >= '0' && *s->p <= '9'; }

static ps_status parse_number(parser *s, ps__json *out) {
  const char *begin = s->p;
  if (*s->p == '-') s->p++;
  if (!digit(s)) return fail_at(s, begin, "a value is expected");
  if (*s->p == '0') s->p++;
  else
    while (digit(s)) s->p++;
  if (digit(s)) return fail_at(s, begin, "a number starts with a superfluous zero");
  if (s->p < s->end && *s->p == '.') {
    s->p++;
    if (!digit(s)) return fail_at(s, begin, "a digit must follow the decimal point");
    while (digit(s)) s->p++;
  }
  if (s->p < s->end && (*s->p == 'e' || *s->p == 'E')) {
    s->p++;
    if (s->p < s->end && (*s->p == '+' || *s->p == '-')) s->p++;
    if (!digit(s)) return fail_at(s, begin, "a digit must follow the exponent's e");
    while (digit(s)) s->p++;
  }
  *out = (ps__json){.kind = PS_JSON_NUMBER, .n = (size_t)(s->p - begin), .text = begin};
  return PS_OK;
}

static ps_status parse_word(parser *s, const char *word, ps__json value, ps__json *out) {
  size_t n = strlen(word);
  if ((size_t)(s->end - s->p) < n || memcmp(s->p, word, n)) return fail_at(s, s->p, "a value is expected");
  s->p += n;
  *out = value;
  return PS_OK;
}

static int compare_bytes(const char *a, size_t na, const char *b, size_t nb) {
  int c = memcmp(a, b, na < nb ? na : nb);
  return c ? c : (na > nb) - (na < nb);
}

static int compare_members(const void *a, const void *b, void *members) {
  const struct member *m = members, *x = m + *(const uint32_t *)a, *y = m + *(const uint32_t *)b;
  return compare_bytes(x->key, x->key_bytes, y->key, y->key_bytes);
}

static ps_status fail_duplicate(const parser *s, const struct member *m) {
  char what[160];
  snprintf(what, sizeof what, "the key \"%.100s\" appears twice in one object", m->key);
  return fail_at(s, m->key, what);
}

/* Refuses duplicate keys; makes the index of a large object. */
static ps_status finish_object(parser *s, ps__json *o) {
  struct member *m = o->members;
  if (o->n < INDEX_FROM) {
    for (size_t i = 1; i < o->n; i++)
      for (size_t k = 0; k < i; k++)
        if (!compare_bytes(m[i].key, m[i].key_bytes, m[k].key, m[k].key_bytes)) return fail_duplicate(s, m + i);
    return PS_OK;
  }
  o->sorted = ps__malloc(o->n * sizeof *o->sorted);
  if (!o->sorted) return no_memory(s);
  for (size_t i = 0; i < o->n; i++) o->sorted[i] = (uint32_t)i;
  qsort_r(o->sorted, o->n, sizeof *o->sorted, compare_members, m);
  for (size_t i = 1; i < o->n; i++) {
    uint32_t a = o->sorted[i - 1], b = o->sorted[i];
    if (!compare_members(&a, &b, m)) return fail_duplicate(s, m + (a > b ? a : b));
  }
  return PS_OK;
}

static ps_status parse_value(parser *s, ps__json *out);

/* s->p is behind the opening bracket. What was made so far hangs in *out also on failure, so that the caller frees it. */
static ps_status parse_members(parser *s, ps__json *out, char close) {
  size_t cap = 0;
  skip_space(s);
  if (s->p < s->end && *s->p == close) {
    s->p++;
    return PS_OK;
  }
  for (;;) {
    if (out->n == UINT32_MAX) return fail_at(s, s->p, "too many members in one array or object");
    void *members = out->members;
    bool grown = ps__grow(&members, out->n, &cap, sizeof *out->members);
    out->members = members;
    if (!grown) return no_memory(s);
    struct member m = {0};
    skip_space(s);
    if (close == '}') {
      if (s->p == s->end || *s->p != '"') return fail_at(s, s->p, "a key in double quotes is expected");
      PS_TRY(parse_string(s, &m.key, &m.key_bytes));
      if (memchr(m.key, 0, m.key_bytes)) return fail_at(s, m.key, "a key contains the character U+0000");
      skip_space(s);
      if (s->p == s->end || *s->p != ':') return fail_at(s, s->p, "a colon is expected after the key");
      s->p++;
      skip_space(s);
    }
    out->members[out->n] = m;
    out->n++; /* counted first: a half-made child is freed with its parent */
    PS_TRY(parse_value(s, &out->members[out->n - 1].value));
    skip_space(s);
    if (s->p < s->end && *s->p == ',') {
      s->p++;
      continue;
    }
    if (s->p < s->end && *s->p == close) break;
    return fail_at(s, s->p, close == '}' ? "a comma or } is expected" : "a comma or ] is expected");
  }
  s->p++;
  return close == '}' ? finish_object(s, out) : PS_OK;
}

static ps_status parse_value(parser *s, ps__json *out) {
  if (s->p == s->end) return fail_at(s, s->p, "the text ends where a value is expected");
  switch (*s->p) {
    case '"': {
      ps__json j = {.kind = PS_JSON_STRING};
      PS_TRY(parse_string(s, &j.text, &j.n));
      *out = j;
      return PS_OK;
    }
    case '{':
    case '[': {
      bool object = *s->p == '{';
      if (s->depth == MAX_DEPTH) return fail_at(s, s->p, "arrays and objects are nested more than 64 deep");
      *out = (ps__json){.kind = object ? PS_JSON_OBJECT : PS_JSON_ARRAY};
      s->p++;
      s->depth++;
      PS_TRY(parse_members(s, out, object ? '}' : ']'));
      s->depth--;
      return PS_OK;
    }
    case 't': return parse_word(s, "true", (ps__json){.kind = PS_JSON_BOOL, .truth = true}, out);
    case 'f': return parse_word(s, "false", (ps__json){.kind = PS_JSON_BOOL}, out);
    case 'n': return parse_word(s, "null", (ps__json){.kind = PS_JSON_NULL}, out);
    default: return parse_number(s, out);
  }
}

static void free_members(ps__json *j) {
  if (j->kind != PS_JSON_ARRAY && j->kind != PS_JSON_OBJECT) return;
  for (size_t i = 0; i < j->n; i++) free_members(&j->members[i].value);
  ps__free(j->members);
  ps__free(j->sorted);
}

void ps__json_free(ps__json *j) {
  if (!j) return;
  root *r = (root *)j;
  free_members(&r->node);
  ps__free(r->buffer);
  ps__free(r);
}

static ps_status parse_document(parser *s, ps__json *out) {
  for (const char *p = s->start; p < s->end;) {
    size_t n = utf8_length((const unsigned char *)p, (const unsigned char *)s->end);
    if (n == 0) return fail_at(s, p, "the text is not UTF-8");
    p += n;
  }
  skip_space(s);
  PS_TRY(parse_value(s, out));
  skip_space(s);
  return s->p == s->end ? PS_OK : fail_at(s, s->p, "something follows the end of the document");
}

ps_status ps__json_parse(ps__json **out, const char *text, size_t bytes, const char *name) {
  parser s = {.source = text, .name = name};
  root *r = ps__calloc(1, sizeof *r);
  if (!r) return no_memory(&s);
  r->buffer = ps__malloc(bytes + 1);
  if (!r->buffer) {
    ps__free(r);
    return no_memory(&s);
  }
  if (bytes) memcpy(r->buffer, text, bytes);
  r->buffer[bytes] = 0;
  s.start = s.p = r->buffer;
  s.end = r->buffer + bytes;
  ps_status st = parse_document(&s, &r->node);
  if (st != PS_OK) {
    ps__json_free(&r->node);
    return st;
  }
  *out = &r->node;
  return PS_OK;
}

static ps_status read_whole(int fd, uint64_t file_bytes, const char *path, size_t max_bytes, char **text, size_t *bytes) {
  if (file_bytes > max_bytes) return ps__fail(PS_EFORMAT, "%s: has %" PRIu64 " bytes, at most %zu are read", path, file_bytes, max_bytes);
  size_t n = (size_t)file_bytes;
  char *p = ps__malloc(n + 1);
  if (!p) return ps__fail(PS_ENOMEM, "%s: no memory left to read its %zu bytes", path, n);
  ps_status r = ps__pread_all(fd, path, p, n, 0);
  if (r != PS_OK) {
    ps__free(p);
    return r;
  }
  *text = p;
  *bytes = n;
  return PS_OK;
}

ps_status ps__json_read_file(ps__json **out, const char *path, size_t max_bytes) {
  int fd;
  struct stat sb;
  PS_TRY(ps__open_input(&fd, &sb, path));
  char *text = NULL;
  size_t bytes = 0;
  ps_status st = read_whole(fd, (uint64_t)sb.st_size, path, max_bytes, &text, &bytes);
  close(fd);
  if (st != PS_OK) return st;
  st = ps__json_parse(out, text, bytes, path);
  ps__free(text);
  return st;
}

/* ---- reading the tree ------------------------------------------------------------------------------------------------- */

ps__json_kind ps__json_type(const ps__json *j) { return j->kind; }

static bool has_members(const ps__json *j) { return j && (j->kind == PS_JSON_ARRAY || j->kind == PS_JSON_OBJECT); }

size_t ps__json_length(const ps__json *j) { return has_members(j) ? j->n : 0; }

const ps__json *ps__json_at(const ps__json *j, size_t i) { return i < ps__json_length(j) ? &j->members[i].value : NULL; }

const char *ps__json_key(const ps__json *j, size_t i) { return i < ps__json_length(j) ? j->members[i].key : NULL; }

const ps__json *ps__json_get(const ps__json *j, const char *key) {
  if (!j || j->kind != PS_JSON_OBJECT) return NULL;
  size_t n = strlen(key), lo = 0, hi = j->n;
  while (lo < hi) {
    size_t mid = j->sorted ? lo + (hi - lo) / 2 : lo;
    const struct member *m = &j->members[j->sorted ? j->sorted[mid] : mid];
    int c = compare_bytes(key, n, m->key, m->key_bytes);
    if (c == 0) return &m->value;
    if (j->sorted && c < 0) hi = mid;
    else lo = mid + 1;
  }
  return NULL;
}

const char *ps__json_string(const ps__json *j, size_t *bytes) {
  if (!j || j->kind != PS_JSON_STRING) return NULL;
  if (bytes) *bytes = j->n;
  return j->text;
}

double ps__json_number(const ps__json *j, double fallback) {
  if (!j || j->kind != PS_JSON_NUMBER) return fallback;
  locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* the caller's locale may write a comma */
  if (!c) return fallback;
  double v = strtod_l(j->text, NULL, c); /* stops at the delimiter behind the number: the buffer ends with NUL */
  freelocale(c);
  return v;
}

bool ps__json_uint64(const ps__json *j, uint64_t *out) {
  if (!j || j->kind != PS_JSON_NUMBER) return false;
  uint64_t v = 0;
  for (size_t i = 0; i < j->n; i++) {
    char c = j->text[i];
    if (c < '0' || c > '9') return false;
    if (__builtin_mul_overflow(v, 10u, &v) || __builtin_add_overflow(v, (uint64_t)(c - '0'), &v)) return false;
  }
  *out = v;
  return true;
}

bool ps__json_bool(const ps__json *j, bool fallback) { return j && j->kind == PS_JSON_BOOL ? j->truth : fallback; }
