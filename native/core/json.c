/* json.c - reads a JSON document as a tree, for documents that are small or needed as a whole.
 *
 * All texts lie in one buffer that is never longer than the document. A value takes 16 bytes, 24
 * with its key. An object of many keys has an index sorted by key, by which duplicates are found
 * and keys are looked up in O(log n). */
#include "core/core.h"
#include <inttypes.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { INDEX_FROM = 8 };

struct ps__json {
  union {
    const char *text; /* string, number */
    ps__json *items;  /* array */
    /* object; with INDEX_FROM members or more, the index (uint32_t each) follows them in memory */
    struct member *members;
  };
  uint32_t n; /* bytes of a string or number; members of an array or object */
  uint8_t kind;
  bool boolean;
};

struct member {
  const char *key;
  ps__json value;
};

typedef struct root {
  ps__json node; /* first: a root is its node */
  char *buffer;
} root;

typedef struct builder {
  ps__json_scan *scan;
  char *text; /* the next free byte of the buffer */
  const char *name;
} builder;

static ps_status no_memory(const char *name) {
  return ps__fail(PS_ENOMEM, "%s: no memory left to read it", name);
}

/* Each text is shorter than its place in the document: quotes, or what ends a number, make room
 * for the NUL. */
static const char *keep_text(builder *b, const char *text, size_t bytes) {
  char *at = b->text;
  memcpy(at, text, bytes);
  at[bytes] = 0;
  b->text += bytes + 1;
  return at;
}

static uint32_t *index_of(const ps__json *o) { return (uint32_t *)(void *)(o->members + o->n); }

static int compare_members(const void *a, const void *b, void *members) {
  const struct member *m = members;
  return strcmp(m[*(const uint32_t *)a].key, m[*(const uint32_t *)b].key);
}

static ps_status fail_duplicate(const builder *b, const char *key) {
  char what[160];
  snprintf(what, sizeof what, "the key \"%.100s\" appears twice in the object that ends here", key);
  return ps__json_scan_fail(b->scan, what);
}

/* Frees the room that the object does not need, refuses duplicate keys, and makes the index of a
 * large object. */
static ps_status finish_object(const builder *b, ps__json *o) {
  const bool indexed = o->n >= INDEX_FROM;
  struct member *m =
      o->n ? ps__realloc(o->members, o->n * (sizeof *m + (indexed ? sizeof(uint32_t) : 0))) : NULL;
  if (o->n == 0)
    return PS_OK;
  if (!m)
    return no_memory(b->name);
  o->members = m;
  if (!indexed) {
    for (size_t i = 1; i < o->n; i++)
      for (size_t k = 0; k < i; k++)
        if (!strcmp(m[i].key, m[k].key))
          return fail_duplicate(b, m[i].key);
    return PS_OK;
  }
  uint32_t *sorted = index_of(o);
  for (uint32_t i = 0; i < o->n; i++)
    sorted[i] = i;
  qsort_r(sorted, o->n, sizeof *sorted, compare_members, m);
  for (size_t i = 1; i < o->n; i++)
    if (!compare_members(&sorted[i - 1], &sorted[i], m))
      return fail_duplicate(b, m[sorted[i]].key);
  return PS_OK;
}

static ps_status build(builder *b, const ps__json_event *e, ps__json *out);

/* On failure too, *out holds what was made so far, so that the caller can free it. */
static ps_status build_members(builder *b, ps__json *out) {
  const bool object = out->kind == PS_JSON_OBJECT;
  size_t cap = 0;
  for (;;) {
    ps__json_event e;
    PS_TRY(ps__json_scan_next(b->scan, &e));
    if (e.end)
      break;
    if (out->n == UINT32_MAX)
      return ps__json_scan_fail(b->scan, "too many members in one array or object");
    void *members = out->members;
    const bool grown =
        ps__grow(&members, out->n, &cap, object ? sizeof *out->members : sizeof *out->items);
    out->members = members;
    if (!grown)
      return no_memory(b->name);
    ps__json *value = object ? &out->members[out->n].value : &out->items[out->n];
    if (object)
      out->members[out->n].key = keep_text(b, e.key, e.key_bytes);
    *value = (ps__json){.kind = PS_JSON_NULL};
    out->n++; /* counted before it is built: on failure it is freed with its parent */
    PS_TRY(build(b, &e, value));
  }
  if (object)
    return finish_object(b, out);
  ps__json *items = out->n ? ps__realloc(out->items, out->n * sizeof *items) : NULL;
  if (out->n && !items)
    return no_memory(b->name);
  out->items = items;
  return PS_OK;
}

static ps_status build(builder *b, const ps__json_event *e, ps__json *out) {
  *out = (ps__json){.kind = (uint8_t)e->kind, .boolean = e->boolean};
  if (e->kind == PS_JSON_ARRAY || e->kind == PS_JSON_OBJECT)
    return build_members(b, out);
  if (!e->text)
    return PS_OK;
  if (memchr(e->text, 0, e->bytes)) /* the tree's texts are C strings */
    return ps__json_scan_fail(b->scan, "the string that ends here contains the character U+0000");
  out->text = keep_text(b, e->text, e->bytes);
  out->n = (uint32_t)e->bytes;
  return PS_OK;
}

static void free_members(ps__json *j) {
  const bool object = j->kind == PS_JSON_OBJECT;
  if (!object && j->kind != PS_JSON_ARRAY)
    return;
  for (size_t i = 0; i < j->n; i++)
    free_members(object ? &j->members[i].value : &j->items[i]);
  ps__free(j->members);
}

void ps__json_free(ps__json *j) {
  if (!j)
    return;
  root *r = (root *)j;
  free_members(&r->node);
  ps__free(r->buffer);
  ps__free(r);
}

/* Closes @scan. */
static ps_status build_document(ps__json **out, ps__json_scan *scan, size_t bytes,
                                const char *name) {
  root *r = ps__calloc(1, sizeof *r);
  if (r)
    r->buffer = ps__malloc(bytes + 1);
  ps_status st = r && r->buffer ? PS_OK : no_memory(name);
  builder b = {.scan = scan, .text = r ? r->buffer : NULL, .name = name};
  ps__json_event e;
  if (st == PS_OK)
    st = ps__json_scan_next(scan, &e);
  if (st == PS_OK)
    st = build(&b, &e, &r->node);
  if (st == PS_OK)
    st = ps__json_scan_next(scan, &e); /* the document's end */
  ps__json_scan_close(scan);
  if (st == PS_OK)
    *out = &r->node;
  else if (r)
    ps__json_free(&r->node);
  return st;
}

static ps_status check_length(uint64_t bytes, size_t max_bytes, const char *name) {
  if (bytes <= max_bytes)
    return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: has %" PRIu64 " bytes, at most %zu are read", name, bytes,
                  max_bytes);
}

ps_status ps__json_parse(ps__json **out, const char *text, size_t bytes, const char *name) {
  ps__json_scan *scan = NULL;
  PS_TRY(check_length(bytes, UINT32_MAX, name));
  PS_TRY(ps__json_scan_text(&scan, text, bytes, name));
  return build_document(out, scan, bytes, name);
}

ps_status ps__json_read_file(ps__json **out, const char *path, size_t max_bytes) {
  int fd;
  struct stat sb;
  PS_TRY(ps__open_input(&fd, &sb, path));
  const uint64_t bytes = (uint64_t)sb.st_size;
  ps__json_scan *scan = NULL;
  ps_status st = check_length(bytes, max_bytes, path);
  if (st == PS_OK)
    st = ps__json_scan_file(&scan, fd, 0, bytes, max_bytes, path);
  if (st == PS_OK)
    st = build_document(out, scan, (size_t)bytes, path);
  close(fd);
  return st;
}

/* ---- reading the tree ------------------------------------------------------------------------ */

ps__json_kind ps__json_type(const ps__json *j) { return (ps__json_kind)j->kind; }

static bool has_members(const ps__json *j) {
  return j && (j->kind == PS_JSON_ARRAY || j->kind == PS_JSON_OBJECT);
}

size_t ps__json_length(const ps__json *j) { return has_members(j) ? j->n : 0; }

const ps__json *ps__json_at(const ps__json *j, size_t i) {
  if (i >= ps__json_length(j))
    return NULL;
  return j->kind == PS_JSON_OBJECT ? &j->members[i].value : &j->items[i];
}

const char *ps__json_key(const ps__json *j, size_t i) {
  return i < ps__json_length(j) && j->kind == PS_JSON_OBJECT ? j->members[i].key : NULL;
}

const ps__json *ps__json_get(const ps__json *j, const char *key) {
  if (!j || j->kind != PS_JSON_OBJECT)
    return NULL;
  const uint32_t *sorted = j->n >= INDEX_FROM ? index_of(j) : NULL;
  size_t lo = 0, hi = j->n;
  while (lo < hi) {
    const size_t mid = sorted ? lo + (hi - lo) / 2 : lo;
    const struct member *m = &j->members[sorted ? sorted[mid] : mid];
    const int c = strcmp(key, m->key);
    if (c == 0)
      return &m->value;
    if (sorted && c < 0)
      hi = mid;
    else
      lo = mid + 1;
  }
  return NULL;
}

const char *ps__json_string(const ps__json *j, size_t *bytes) {
  if (!j || j->kind != PS_JSON_STRING)
    return NULL;
  if (bytes)
    *bytes = j->n;
  return j->text;
}

double ps__json_number(const ps__json *j, double fallback) {
  if (!j || j->kind != PS_JSON_NUMBER)
    return fallback;
  locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* the caller's locale may write a comma */
  if (!c)
    return fallback;
  double v = strtod_l(j->text, NULL, c);
  freelocale(c);
  return v;
}

const char *ps__json_number_text(const ps__json *j) {
  return j && j->kind == PS_JSON_NUMBER ? j->text : NULL;
}

bool ps__json_uint64(const ps__json *j, uint64_t *out) {
  return j && j->kind == PS_JSON_NUMBER && ps__json_text_uint64(j->text, j->n, out);
}

bool ps__json_bool(const ps__json *j, bool fallback) {
  return j && j->kind == PS_JSON_BOOL ? j->boolean : fallback;
}
