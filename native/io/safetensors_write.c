/* safetensors_write.c - writes a safetensors file, or several with an index.
 *
 * All headers follow from the specs. A file's header is therefore written first, and its data after
 * it, piece by piece: by appending to one file after the other, or by several threads, each of
 * which writes a file. The files lie in a stage (stage.c), which replaces those of an earlier
 * save. */
#include <penstock/tensors.h>

#include "core/dtype.h"
#include "io/io.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { MAX_SHARDS = 99999, FLUSH_BYTES = 16 << 20 };

typedef struct shard {
  char *path;        /* its final path, for messages */
  uint64_t first, n; /* its specs are [first, first + n) */
  uint64_t bytes;    /* of its data */
} shard;

struct ps_tensor_writer {
  char *dir, *stem;
  ps__stage *stage;
  bool own_stage;
  ps_tensor_spec *specs; /* names are copies */
  uint64_t n;
  const char *const *meta; /* borrowed, until create returns */
  uint32_t n_meta;
  shard *shards;
  size_t n_shards, cap_shards;
  char *index_text; /* NULL where there is one file */
  size_t index_bytes;
  size_t at;              /* the shard that is being appended to */
  bool begun;             /* the first shard was opened for appending */
  int fd;                 /* open on that shard; -1: writing has failed or not begun */
  uint64_t written;       /* bytes of that shard's data */
  _Atomic size_t n_whole; /* shards that ps__tensors_end() has closed */
  char **headers;
  size_t *header_bytes;
};

static ps_status no_memory(const char *dir) {
  return ps__fail(PS_ENOMEM, "%s: no memory left to prepare writing", dir);
}

/* The JSON that was written could not be read back. */
static ps_status bad_names(const char *dir) {
  return ps__fail(PS_EINVAL,
                  "%s: names of tensors and of metadata must be UTF-8, and each used once (%s)",
                  dir, ps_last_error());
}

/* BYTES of an element; 0: not one of a ps_dtype, nor of bytes (PS__U8). */
static uint64_t each(uint32_t dtype) {
  return dtype < PS_N_DTYPES || dtype == PS__U8 ? ps__dtypes[dtype].bytes : 0;
}

/* BYTES that its data is aligned to. Some dtypes have less than a byte an element. */
static uint64_t alignment(const ps_tensor_spec *s) {
  uint64_t n = 1, to = 8;
  if (!s->file_dtype)
    return each(s->dtype);
  for (uint32_t i = 0; i < s->n_dims; i++)
    n *= s->shape[i];
  while (to > 1 && (!n || s->bytes / n < to))
    to /= 2;
  return to;
}

static uint64_t spec_bytes(const ps_tensor_spec *s) {
  if (s->file_dtype)
    return s->bytes;
  uint64_t n = each(s->dtype);
  for (uint32_t i = 0; i < s->n_dims; i++)
    n *= s->shape[i]; /* checked by copy_specs */
  return n;
}

/* ---- preparing ------------------------------------------------------------------------------- */

static ps_status check_spec(const char *dir, const ps_tensor_spec *s, uint64_t i) {
  if (!s->name || !*s->name || !strcmp(s->name, "__metadata__"))
    return ps__fail(PS_EINVAL, "%s: tensor %" PRIu64 " has no usable name", dir, i);
  uint64_t n = s->file_dtype ? 1 : each(s->dtype);
  if (!n)
    return ps__fail(PS_EINVAL, "%s: tensor \"%s\": %u is no ps_dtype", dir, s->name, s->dtype);
  if (s->n_dims > PS__MAX_DIMS)
    return ps__fail(PS_EINVAL, "%s: tensor \"%s\": has %u dimensions, at most %d are written", dir,
                    s->name, s->n_dims, PS__MAX_DIMS);
  for (uint32_t k = 0; k < s->n_dims; k++)
    if (__builtin_mul_overflow(n, s->shape[k], &n) || n > INT64_MAX)
      return ps__fail(PS_EINVAL, "%s: tensor \"%s\": its shape has more than 2^63 bytes", dir,
                      s->name);
  return PS_OK;
}

static ps_status copy_specs(ps_tensor_writer *w, const ps_tensor_spec *specs, uint64_t n) {
  uint64_t total = 0;
  w->specs = ps__calloc(n, sizeof *w->specs);
  if (!w->specs)
    return no_memory(w->dir);
  for (uint64_t i = 0; i < n; i++) {
    PS_TRY(check_spec(w->dir, &specs[i], i));
    if (__builtin_add_overflow(total, spec_bytes(&specs[i]), &total) || total > INT64_MAX)
      return ps__fail(PS_EINVAL, "%s: the tensors have more than 2^63 bytes together", w->dir);
    w->specs[i] = specs[i];
    w->specs[i].name = ps__strdup(specs[i].name);
    w->specs[i].file_dtype = specs[i].file_dtype ? ps__strdup(specs[i].file_dtype) : NULL;
    w->n = i + 1;
    if (!w->specs[i].name || (specs[i].file_dtype && !w->specs[i].file_dtype))
      return no_memory(w->dir);
  }
  return PS_OK;
}

/* Whether the spec begins a shard: after @last its shard would be too large, or a tensor that is
 * written as it is would not be aligned there. */
static bool begins_shard(const ps_tensor_spec *s, const shard *last, uint64_t max_bytes) {
  const uint64_t bytes = spec_bytes(s);
  if (!last || !last->n)
    return !last;
  return (max_bytes && (bytes > max_bytes || last->bytes > max_bytes - bytes)) ||
         (s->file_dtype && last->bytes % alignment(s));
}

/* Cuts the specs into shards, in order, as Hugging Face does: a tensor larger than the limit has
 * a shard of its own. */
static ps_status cut_shards(ps_tensor_writer *w, uint64_t max_bytes) {
  for (uint64_t i = 0; i < w->n || w->n_shards == 0; i++) {
    uint64_t bytes = i < w->n ? spec_bytes(&w->specs[i]) : 0;
    shard *last = w->n_shards ? &w->shards[w->n_shards - 1] : NULL;
    if (i < w->n ? begins_shard(&w->specs[i], last, max_bytes) : !last) {
      if (!PS_GROW(w->shards, w->n_shards, w->cap_shards))
        return no_memory(w->dir);
      last = &w->shards[w->n_shards++];
      *last = (shard){.first = i};
    }
    if (i == w->n)
      break; /* no tensors: one empty file */
    if (last->bytes % alignment(&w->specs[i]))
      return ps__fail(
          PS_EINVAL,
          "%s: tensor \"%s\" would not be aligned in its file: put fp32 tensors before bf16 ones",
          w->dir, w->specs[i].name);
    last->n++;
    last->bytes += bytes;
  }
  if (w->n_shards > MAX_SHARDS)
    return ps__fail(PS_EINVAL,
                    "%s: %zu files would be needed, at most %d are written: raise the shard size",
                    w->dir, w->n_shards, (int)MAX_SHARDS);
  return PS_OK;
}

static void shard_name(const ps_tensor_writer *w, size_t k, char *buf, size_t bytes) {
  if (w->n_shards == 1)
    snprintf(buf, bytes, "%s.safetensors", w->stem);
  else
    snprintf(buf, bytes, "%s-%05zu-of-%05zu.safetensors", w->stem, k + 1, w->n_shards);
}

/* What @j has written, which the strict reader reads back: it refuses names that are not UTF-8, or
 * that are used twice. */
static ps_status text_of(const ps_tensor_writer *w, ps__jsonw *j, const char *path,
                         const char **text, size_t *bytes) {
  ps__json *back = NULL;
  *text = ps__jsonw_text(j, bytes);
  const ps_status st = *text ? ps__json_parse(&back, *text, *bytes, path) : no_memory(w->dir);
  ps__json_free(back);
  return st == PS_EFORMAT ? bad_names(w->dir) : st;
}

/* Makes a header: its length, the JSON, and spaces up to a multiple of 8. */
static ps_status make_header(ps_tensor_writer *w, size_t k) {
  const shard *s = &w->shards[k];
  uint64_t at = 0;
  ps__jsonw *j = NULL;
  PS_TRY(ps__jsonw_create(&j));
  ps__jsonw_object(j, NULL);
  ps__jsonw_object(j, "__metadata__");
  ps__jsonw_string(j, "format", "pt");
  for (uint32_t i = 0; i < w->n_meta; i++)
    ps__jsonw_string(j, w->meta[2 * i], w->meta[2 * i + 1]);
  ps__jsonw_end(j);
  for (uint64_t i = s->first; i < s->first + s->n; i++) {
    const ps_tensor_spec *t = &w->specs[i];
    ps__jsonw_object(j, t->name);
    ps__jsonw_string(j, "dtype", t->file_dtype ? t->file_dtype : ps__dtypes[t->dtype].file_name);
    ps__jsonw_array(j, "shape");
    for (uint32_t d = 0; d < t->n_dims; d++)
      ps__jsonw_uint(j, NULL, t->shape[d]);
    ps__jsonw_end(j);
    ps__jsonw_array(j, "data_offsets");
    ps__jsonw_uint(j, NULL, at);
    ps__jsonw_uint(j, NULL, at += spec_bytes(t));
    ps__jsonw_end(j);
    ps__jsonw_end(j);
  }
  ps__jsonw_end(j);
  size_t bytes = 0;
  const char *text;
  ps_status st = text_of(w, j, s->path, &text, &bytes);
  const size_t padded = (bytes + 7) / 8 * 8;
  if (st == PS_OK && padded > PS__MAX_HEADER_BYTES)
    st = ps__fail(PS_EINVAL,
                  "%s: its header would have %zu bytes, at most %d are allowed: write more shards",
                  s->path, padded, PS__MAX_HEADER_BYTES);
  if (st == PS_OK && !(w->headers[k] = ps__malloc(8 + padded)))
    st = no_memory(w->dir);
  if (st == PS_OK) {
    for (int i = 0; i < 8; i++)
      w->headers[k][i] = (char)((uint64_t)padded >> 8 * i);
    memcpy(w->headers[k] + 8, text, bytes);
    memset(w->headers[k] + 8 + bytes, ' ', padded - bytes);
    w->header_bytes[k] = 8 + padded;
  }
  ps__jsonw_free(j);
  return st;
}

/* Makes the index. It is made for a single file too, because reading it back finds duplicate
 * names. */
static ps_status make_index(ps_tensor_writer *w) {
  uint64_t total = 0;
  char name[300];
  ps__jsonw *j = NULL;
  PS_TRY(ps__jsonw_create(&j));
  for (size_t k = 0; k < w->n_shards; k++)
    total += w->shards[k].bytes;
  ps__jsonw_object(j, NULL);
  ps__jsonw_object(j, "metadata");
  ps__jsonw_uint(j, "total_size", total);
  ps__jsonw_end(j);
  ps__jsonw_object(j, "weight_map");
  for (size_t k = 0; k < w->n_shards; k++) {
    shard_name(w, k, name, sizeof name);
    for (uint64_t i = 0; i < w->shards[k].n; i++)
      ps__jsonw_string(j, w->specs[w->shards[k].first + i].name, name);
  }
  ps__jsonw_end(j);
  ps__jsonw_end(j);
  const char *text;
  ps_status st = text_of(w, j, w->dir, &text, &w->index_bytes);
  if (st == PS_OK && w->n_shards > 1 && !(w->index_text = ps__strdup(text)))
    st = no_memory(w->dir);
  ps__jsonw_free(j);
  return st;
}

static ps_status plan_files(ps_tensor_writer *w) {
  char name[300];
  w->headers = ps__calloc(w->n_shards, sizeof *w->headers);
  w->header_bytes = ps__calloc(w->n_shards, sizeof *w->header_bytes);
  if (!w->headers || !w->header_bytes)
    return no_memory(w->dir);
  for (size_t k = 0; k < w->n_shards; k++) {
    shard_name(w, k, name, sizeof name);
    w->shards[k].path = ps__path_join(w->dir, name);
    if (!w->shards[k].path)
      return PS_ENOMEM;
    PS_TRY(make_header(w, k));
  }
  return make_index(w);
}

/* Opens the stage, and checks that the disk has room. Files that will be replaced stay until the
 * end, and so do not count as free. */
static ps_status prepare_place(ps_tensor_writer *w) {
  uint64_t need = w->index_bytes;
  struct statvfs fs;
  char a[32], b[32];
  for (size_t k = 0; k < w->n_shards; k++)
    need += w->shards[k].bytes + w->header_bytes[k];
  w->own_stage = !w->stage;
  if (w->own_stage)
    PS_TRY(ps__stage_open(&w->stage, w->dir));
  need = ps__stage_need(w->stage, need);
  if (statvfs(ps__stage_path(w->stage), &fs) == 0 && fs.f_blocks > 0 &&
      need / fs.f_frsize >= fs.f_bavail)
    return ps__fail(PS_EIO, "%s: needs %s of disk, %s are free: free some or choose another place",
                    w->dir, ps__format_bytes(a, need),
                    ps__format_bytes(b, (uint64_t)fs.f_bavail * fs.f_frsize));
  return PS_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

static ps_status create_shard(int *fd, const ps_tensor_writer *w, size_t k) {
  const char *path = w->shards[k].path;
  return ps__stage_create(fd, w->stage, strrchr(path, '/') + 1, path);
}

static ps_status open_shard(ps_tensor_writer *w) {
  PS_TRY(create_shard(&w->fd, w, w->at));
  w->begun = true;
  w->written = 0;
  return ps__write_all(w->fd, w->shards[w->at].path, w->headers[w->at], w->header_bytes[w->at]);
}

static ps_status close_file(int fd, const char *path, ps_status st) {
  if (st == PS_OK)
    st = ps__sync(fd, path);
  if (close(fd) != 0 && st == PS_OK)
    st = ps__fail(PS_EIO, "%s: closing it failed: %s", path, strerror(errno));
  return st;
}

static ps_status close_shard(ps_tensor_writer *w) {
  const int fd = w->fd;
  w->fd = -1;
  return close_file(fd, w->shards[w->at].path, PS_OK);
}

static ps_status prepare(ps_tensor_writer *w, const char *dir, const char *stem,
                         const ps_tensor_spec *specs, uint64_t n, uint64_t max_shard_bytes) {
  if (!(w->dir = ps__strdup(dir)) || !(w->stem = ps__strdup(stem)))
    return no_memory(dir);
  PS_TRY(copy_specs(w, specs, n));
  PS_TRY(cut_shards(w, max_shard_bytes));
  PS_TRY(plan_files(w));
  return prepare_place(w);
}

ps_status ps__tensors_create(ps_tensor_writer **out, ps__stage *stage, const char *dir,
                             const char *stem, const ps_tensor_spec *specs, uint64_t n,
                             uint64_t max_shard_bytes, const char *const *meta, uint32_t n_meta) {
  if (!out || !dir || !*dir || !stem || (n && !specs) || (n_meta && !meta))
    return ps__fail(PS_EINVAL, "ps_tensors_create: an argument is NULL or empty");
  if (!*stem || strlen(stem) > 200 || strchr(stem, '/'))
    return ps__fail(PS_EINVAL, "%s: \"%.40s\" cannot be the stem of a file name", dir, stem);
  ps_tensor_writer *w = ps__calloc(1, sizeof *w);
  if (!w)
    return no_memory(dir);
  w->fd = -1;
  w->stage = stage;
  w->meta = meta;
  w->n_meta = n_meta;
  ps_status st = prepare(w, dir, stem, specs, n, max_shard_bytes);
  if (st != PS_OK) {
    ps_tensors_abort(w);
    return st;
  }
  w->meta = NULL;
  *out = w;
  return PS_OK;
}

ps_status ps_tensors_create(ps_tensor_writer **out, const char *dir, const char *stem,
                            const ps_tensor_spec *specs, uint64_t n, uint64_t max_shard_bytes,
                            const char *const *meta, uint32_t n_meta) {
  return ps__tensors_create(out, NULL, dir, stem, specs, n, max_shard_bytes, meta, n_meta);
}

ps_status ps_tensors_append(ps_tensor_writer *w, const void *data, uint64_t bytes) {
  const char *p = data;
  if (!w->begun)
    PS_TRY(open_shard(w));
  while (bytes > 0) {
    shard *s = &w->shards[w->at];
    if (w->written == s->bytes) {
      if (w->at + 1 == w->n_shards)
        return ps__fail(PS_ESTATE, "%s: %" PRIu64 " bytes more were appended than the tensors have",
                        w->dir, bytes);
      if (w->fd >= 0)
        PS_TRY(close_shard(w));
      w->at++;
      PS_TRY(open_shard(w));
      continue;
    }
    if (w->fd < 0)
      return ps__fail(PS_ESTATE, "%s: writing failed before, abort it", w->dir);
    uint64_t m = s->bytes - w->written < bytes ? s->bytes - w->written : bytes;
    PS_TRY(ps__write_all(w->fd, s->path, p, m));
    w->written += m;
    p += m;
    bytes -= m;
  }
  return PS_OK;
}

/* ---- files in any order, by several threads -------------------------------------------------- */

uint64_t ps__tensors_n_files(const ps_tensor_writer *w) { return w->n_shards; }

void ps__tensors_in_file(const ps_tensor_writer *w, uint64_t k, uint64_t *first, uint64_t *n) {
  *first = w->shards[k].first;
  *n = w->shards[k].n;
}

/* The disk begins to write early, so that the last fsync() finds little left. */
static void flush_early(ps__tensors_file *f, bool all) {
  if (f->bytes - f->flushed < (all ? 1 : FLUSH_BYTES))
    return;
  (void)sync_file_range(f->fd, (off_t)f->flushed, (off_t)(f->bytes - f->flushed),
                        SYNC_FILE_RANGE_WRITE);
  f->flushed = f->bytes;
}

static ps_status put(ps__tensors_file *f, const void *data, uint64_t bytes) {
  ps__sha256_add(&f->sha, data, bytes);
  PS_TRY(ps__write_all(f->fd, f->path, data, bytes));
  f->bytes += bytes;
  flush_early(f, false);
  return PS_OK;
}

ps_status ps__tensors_begin(ps__tensors_file *f, ps_tensor_writer *w, uint64_t k) {
  *f = (ps__tensors_file){.writer = w, .path = w->shards[k].path, .fd = -1};
  f->left = w->shards[k].bytes;
  ps__sha256_begin(&f->sha);
  PS_TRY(create_shard(&f->fd, w, k));
  return put(f, w->headers[k], w->header_bytes[k]);
}

ps_status ps__tensors_put(ps__tensors_file *f, const void *data, uint64_t bytes) {
  if (bytes > f->left)
    return ps__fail(PS_ESTATE, "%s: more bytes were given than its tensors have", f->path);
  f->left -= bytes;
  return put(f, data, bytes);
}

ps_status ps__tensors_end(ps__tensors_file *f, ps_status st, ps__hashed *out) {
  if (f->fd < 0)
    return st;
  if (st == PS_OK && f->left)
    st = ps__fail(PS_ESTATE, "%s: %" PRIu64 " bytes of data are still missing", f->path, f->left);
  flush_early(f, true);
  st = close_file(f->fd, f->path, st);
  if (st != PS_OK)
    return st;
  out->bytes = f->bytes;
  snprintf(out->name, sizeof out->name, "%s", strrchr(f->path, '/') + 1);
  ps__sha256_end(&f->sha, out->hex);
  atomic_fetch_add(&f->writer->n_whole, 1);
  return PS_OK;
}

/* ---- ending ---------------------------------------------------------------------------------- */

static ps_status write_index(ps_tensor_writer *w) {
  char name[300], path[600];
  int fd;
  snprintf(name, sizeof name, "%s.safetensors.index.json", w->stem);
  snprintf(path, sizeof path, "%.250s/%s", w->dir, name);
  PS_TRY(ps__stage_create(&fd, w->stage, name, path));
  return close_file(fd, path, ps__write_all(fd, path, w->index_text, w->index_bytes));
}

/* Writes the last shards where they have only empty tensors, which no data has begun. */
static ps_status finish_data(ps_tensor_writer *w) {
  if (atomic_load(&w->n_whole) == w->n_shards)
    return PS_OK;
  if (!w->begun)
    PS_TRY(open_shard(w));
  for (;;) {
    const shard *s = &w->shards[w->at];
    if (w->fd < 0)
      return ps__fail(PS_ESTATE, "%s: writing failed before, abort it", w->dir);
    if (w->written != s->bytes)
      return ps__fail(PS_ESTATE, "%s: %" PRIu64 " of %" PRIu64 " bytes of data are still missing",
                      s->path, s->bytes - w->written, s->bytes);
    PS_TRY(close_shard(w));
    if (w->at + 1 == w->n_shards)
      return PS_OK;
    w->at++;
    PS_TRY(open_shard(w));
  }
}

ps_status ps_tensors_finish(ps_tensor_writer *w) {
  if (!w)
    return ps__fail(PS_EINVAL, "ps_tensors_finish: no writer was given");
  ps_status st = finish_data(w);
  if (st == PS_OK && w->n_shards > 1)
    st = write_index(w);
  if (st == PS_OK && w->own_stage) {
    st = ps__stage_commit(w->stage);
    w->stage = NULL;
  }
  ps_tensors_abort(w); /* frees it */
  return st;
}

void ps_tensors_abort(ps_tensor_writer *w) {
  if (!w)
    return;
  if (w->fd >= 0)
    close(w->fd);
  if (w->own_stage)
    ps__stage_abort(w->stage);
  for (size_t k = 0; k < w->n_shards; k++) {
    ps__free(w->shards[k].path);
    if (w->headers)
      ps__free(w->headers[k]);
  }
  for (uint64_t i = 0; i < w->n; i++) {
    ps__free((char *)w->specs[i].name);
    ps__free((char *)w->specs[i].file_dtype);
  }
  ps__free(w->specs);
  ps__free(w->shards);
  ps__free(w->headers);
  ps__free(w->header_bytes);
  ps__free(w->index_text);
  ps__free(w->dir);
  ps__free(w->stem);
  ps__free(w);
}
