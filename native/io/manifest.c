/* manifest.c - the files of a directory with their bytes and SHA-256s: written, and checked. */
#include "io/stage.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_FILES = 100000 };

/* A file to be read, and what came of it. */
typedef struct entry {
  char *path, *name;
  uint64_t bytes;
  char hex[65];
  bool known; /* bytes and hex are given: the file is not read */
  ps_status st;
  char message[512];
} entry;

typedef struct entries {
  entry *item;
  size_t n, cap;
} entries;

static void free_entries(entries *e) {
  for (size_t i = 0; i < e->n; i++) {
    ps__free(e->item[i].path);
    ps__free(e->item[i].name);
  }
  ps__free(e->item);
}

static ps_status no_memory(const char *dir) {
  return ps__fail(PS_ENOMEM, "%s: no memory left for its manifest", dir);
}

/* Takes @path over. */
static ps_status add(entries *e, const char *dir, char *path, const char *name, uint64_t bytes) {
  char *copy = PS_GROW(e->item, e->n, e->cap) && path ? ps__strdup(name) : NULL;
  if (!copy) {
    ps__free(path);
    return no_memory(dir);
  }
  e->item[e->n++] = (entry){.path = path, .name = copy, .bytes = bytes};
  return PS_OK;
}

static ps_status hash_file(entry *e, char *buffer) {
  struct stat sb;
  int fd;
  PS_TRY(ps__open_input(&fd, &sb, e->path));
  e->bytes = (uint64_t)sb.st_size;
  const ps_status st = ps__hash_open(fd, e->path, e->bytes, buffer, e->hex);
  close(fd);
  return st;
}

static void hash_task(void *arg, int64_t task, uint32_t worker) {
  entry *e = &((entries *)arg)->item[task];
  if (e->known)
    return;
  char *buffer = ps__malloc(PS__HASH_PIECE);
  e->st = buffer ? hash_file(e, buffer) : no_memory(e->path);
  if (e->st != PS_OK)
    snprintf(e->message, sizeof e->message, "%s", ps_last_error());
  ps__free(buffer);
}

static ps_status hash_all(entries *e) {
  ps__pool *pool;
  const uint32_t cpus = ps__n_cpus();
  if (!e->n)
    return PS_OK;
  PS_TRY(ps__pool_create(&pool, e->n < cpus ? (uint32_t)e->n : cpus, "ps-hash"));
  ps__pool_run(pool, (int64_t)e->n, hash_task, e);
  ps__pool_destroy(pool);
  for (size_t i = 0; i < e->n; i++)
    if (e->item[i].st != PS_OK)
      return ps__fail(e->item[i].st, "%s", e->item[i].message);
  return PS_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b) {
  return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

static ps_status list_stage(entries *e, const char *dir) {
  ps__names names = {0};
  const int fd = open(dir, PS__DIR_FLAGS);
  ps_status st = fd >= 0 && ps__list_names(fd, &names)
                     ? PS_OK
                     : ps__fail(errno == ENOMEM ? PS_ENOMEM : PS_EIO, "%s: cannot be read: %s", dir,
                                strerror(errno));
  if (fd >= 0)
    close(fd);
  for (size_t i = 0; st == PS_OK && i < names.n; i++)
    st = add(e, dir, ps__path_join(dir, names.item[i]), names.item[i], 0);
  ps__free_names(&names);
  return st;
}

static void take_known(entry *e, const ps__hashed *known, size_t n_known) {
  for (size_t k = 0; k < n_known && !e->known; k++)
    if (strcmp(known[k].name, e->name) == 0) {
      e->known = true;
      e->bytes = known[k].bytes;
      memcpy(e->hex, known[k].hex, sizeof e->hex);
    }
}

ps_status ps__manifest_files(ps__jsonw *w, const ps__stage *s, const ps__hashed *known,
                             size_t n_known, uint64_t *bytes) {
  entries e = {0};
  ps_status st = list_stage(&e, ps__stage_path(s));
  *bytes = 0;
  for (size_t i = 0; i < e.n; i++)
    take_known(&e.item[i], known, n_known);
  if (st == PS_OK)
    st = hash_all(&e);
  if (st == PS_OK) {
    qsort(e.item, e.n, sizeof *e.item, by_name);
    ps__jsonw_array(w, "files");
    for (size_t i = 0; i < e.n; i++) {
      ps__jsonw_object(w, NULL);
      ps__jsonw_string(w, "name", e.item[i].name);
      ps__jsonw_uint(w, "bytes", e.item[i].bytes);
      ps__jsonw_string(w, "sha256", e.item[i].hex);
      ps__jsonw_end(w);
      *bytes += e.item[i].bytes;
    }
    ps__jsonw_end(w);
  }
  free_entries(&e);
  return st;
}

/* Whether the stage has a file of a tokenizer. No record is needed without one. */
static ps_status has_tokenizer(const ps__stage *s, bool *has) {
  entries e = {0};
  const ps_status st = list_stage(&e, ps__stage_path(s));
  *has = false;
  for (size_t i = 0; i < e.n; i++)
    *has |= ps__in_tokenizer(e.item[i].name);
  free_entries(&e);
  return st;
}

ps_status ps__stage_write_record(const ps__stage *s, const char *dir) {
  ps__jsonw *w;
  uint64_t bytes;
  bool needed;
  PS_TRY(has_tokenizer(s, &needed));
  if (!needed)
    return PS_OK;
  PS_TRY(ps__jsonw_create(&w));
  ps__jsonw_object(w, NULL);
  ps__jsonw_string(w, "format", "penstock model");
  ps__jsonw_string(w, "penstock", ps_version());
  ps_status st = ps__manifest_files(w, s, NULL, 0, &bytes);
  ps__jsonw_end(w);
  if (st == PS_OK)
    st = ps__stage_write_json(s, dir, PS__RECORD, w);
  ps__jsonw_free(w);
  return st;
}

/* ---- checking -------------------------------------------------------------------------------- */

static ps_status add_listed(entries *e, const ps__json *file, const char *path, const char *dir,
                            size_t i) {
  const char *name = ps__json_string(ps__json_get(file, "name"), NULL);
  const char *hex = ps__json_string(ps__json_get(file, "sha256"), NULL);
  const ps__json *bytes = ps__json_get(file, "bytes");
  const char *last =
      name && ps__starts_with(name, PS__TEMPLATES "/") ? strchr(name, '/') + 1 : name;
  uint64_t n;
  char *at;
  struct stat sb;
  if (!last || !*last || *last == '.' || strchr(last, '/') || !hex || strlen(hex) != 64 || !bytes ||
      !ps__json_uint64(bytes, &n))
    return ps__fail(PS_EFORMAT, "%s: files[%zu] has no usable name, bytes and sha256", path, i);
  PS_TRY(ps__model_path(&at, dir, name));
  ps_status st = PS_OK;
  if (stat(at, &sb) != 0)
    st = errno == ENOENT ? ps__fail(PS_EFORMAT, "%s: is missing, but %s lists it", at, path)
                         : ps__fail(PS_EIO, "%s: cannot be read: %s", at, strerror(errno));
  else if ((uint64_t)sb.st_size != n)
    st = ps__fail(PS_EFORMAT, "%s: has %lld bytes, %s says %llu", at, (long long)sb.st_size, path,
                  (unsigned long long)n);
  if (st == PS_OK)
    return add(e, dir, at, name, n);
  ps__free(at);
  return st;
}

static ps_status check_listed(const entries *e, const ps__json *files, const char *path) {
  for (size_t i = 0; i < e->n; i++) {
    const char *hex = ps__json_string(ps__json_get(ps__json_at(files, i), "sha256"), NULL);
    if (strcmp(hex, e->item[i].hex) != 0)
      return ps__fail(PS_EFORMAT, "%s: its bytes are damaged: SHA-256 %.16s..., %s says %.16s...",
                      e->item[i].path, e->item[i].hex, path, hex);
  }
  return PS_OK;
}

bool ps__manifest_lists(const ps__json *manifest, const char *name) {
  const ps__json *files = ps__json_get(manifest, "files");
  for (size_t i = 0; files && i < ps__json_length(files); i++) {
    const char *has = ps__json_string(ps__json_get(ps__json_at(files, i), "name"), NULL);
    if (has && strcmp(has, name) == 0)
      return true;
  }
  return false;
}

ps_status ps__manifest_check(const ps__json *manifest, const char *path, const char *dir,
                             uint64_t *bytes) {
  const ps__json *files = ps__json_get(manifest, "files");
  entries e = {0};
  if (!files || ps__json_type(files) != PS_JSON_ARRAY || ps__json_length(files) == 0 ||
      ps__json_length(files) > MAX_FILES)
    return ps__fail(PS_EFORMAT, "%s: has no list \"files\": it is no checkpoint's manifest", path);
  ps_status st = PS_OK;
  for (size_t i = 0; st == PS_OK && i < ps__json_length(files); i++)
    st = add_listed(&e, ps__json_at(files, i), path, dir, i);
  if (st == PS_OK)
    st = hash_all(&e);
  if (st == PS_OK)
    st = check_listed(&e, files, path);
  *bytes = 0;
  for (size_t i = 0; i < e.n; i++)
    *bytes += e.item[i].bytes;
  free_entries(&e);
  return st;
}
