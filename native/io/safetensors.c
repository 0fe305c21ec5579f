/* safetensors.c - reads safetensors: one file, or a directory's files with their index.
 *
 * A file is a little-endian u64 N, N bytes of JSON (the header), and the data. All of these are
 * checked before any tensor is read:
 *   - N is within the file.
 *   - Each tensor's shape times its dtype is its byte range.
 *   - The byte ranges together cover the data, without a hole or an overlap.
 * Headers and indexes are read as events, in pieces. A table of the tensors stays in memory, about
 * 200 bytes each. This reader is stricter than the safetensors library: it refuses duplicate
 * tensors and more than 8 dimensions, and has the limits below. */
#include <penstock/tensors.h>

#include "core/dtype.h"
#include "io/tensor_file.h"
#include "io/tower.h"
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  /* takes 26 MB of memory; the largest dense model that a config may describe has 49,155 */
  MAX_TENSORS = 1 << 17,
  MAX_TEXT = 1 << 20, /* bytes of a name or of a metadata value */
  MAX_FILES = 1 << 16
};

static const struct {
  const char *name;
  uint32_t bits;
} dtypes[] = {{"F32", 32},        {"BF16", 16},      {"F16", 16},    {"F64", 64},    {"I64", 64},
              {"I32", 32},        {"I16", 16},       {"I8", 8},      {"U64", 64},    {"U32", 32},
              {"U16", 16},        {"U8", 8},         {"BOOL", 8},    {"C64", 64},    {"F8_E4M3", 8},
              {"F8_E5M2", 8},     {"F8_E8M0", 8},    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
              {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};

static uint32_t dtype_bits(const char *name) {
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
    if (!strcmp(name, dtypes[i].name))
      return dtypes[i].bits;
  return 0;
}

static ps_status no_memory(const char *path) {
  return ps__fail(PS_ENOMEM, "%s: no memory left to read its header", path);
}

/* ---- one tensor of a header ------------------------------------------------------------------ */

/* A tensor's entry as it is read, before it is checked. */
typedef struct entry {
  const char *path, *name;
  bool has_dtype, has_shape, has_offsets;
  char dtype[48];
  uint64_t shape[PS__MAX_DIMS], offset[2];
  size_t n_dims, n_offsets;
} entry;

/* The array that began with @e: at most @room whole numbers are kept, *n counts them all; false
 * where one is something else. */
static ps_status read_numbers(ps__json_scan *s, uint64_t *out, size_t room, size_t *n,
                              bool *whole) {
  ps__json_event e;
  *whole = true;
  for (*n = 0;; ++*n) {
    uint64_t value = 0;
    PS_TRY(ps__json_scan_next(s, &e));
    if (e.end)
      return PS_OK;
    *whole = e.kind == PS_JSON_NUMBER && ps__json_text_uint64(e.text, e.bytes, &value);
    if (!*whole)
      return PS_OK;
    if (*n < room)
      out[*n] = value;
  }
}

static ps_status read_shape(ps__json_scan *s, const ps__json_event *e, entry *t) {
  bool whole;
  if (e->kind != PS_JSON_ARRAY)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": shape is missing or not a list", t->path,
                    t->name);
  PS_TRY(read_numbers(s, t->shape, PS__MAX_DIMS, &t->n_dims, &whole));
  if (!whole)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": shape[%zu] is not a whole number below 2^64",
                    t->path, t->name, t->n_dims);
  if (t->n_dims > PS__MAX_DIMS)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": shape has %zu dimensions, at most %d are read",
                    t->path, t->name, t->n_dims, PS__MAX_DIMS);
  t->has_shape = true;
  return PS_OK;
}

static ps_status bad_offsets(const entry *t) {
  return ps__fail(PS_EFORMAT,
                  "%s: tensor \"%s\": data_offsets is missing or not two whole numbers below 2^64",
                  t->path, t->name);
}

static ps_status read_offsets(ps__json_scan *s, const ps__json_event *e, entry *t) {
  bool whole = false;
  if (e->kind == PS_JSON_ARRAY)
    PS_TRY(read_numbers(s, t->offset, 2, &t->n_offsets, &whole));
  if (!whole || t->n_offsets != 2)
    return bad_offsets(t);
  t->has_offsets = true;
  return PS_OK;
}

static ps_status read_dtype(const ps__json_event *e, entry *t) {
  if (e->kind != PS_JSON_STRING || strlen(e->text) != e->bytes)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": dtype is missing or not a string", t->path,
                    t->name);
  snprintf(t->dtype, sizeof t->dtype, "%s", e->text);
  t->has_dtype = true;
  return PS_OK;
}

static ps_status read_entry(ps__json_scan *s, entry *t) {
  for (;;) {
    ps__json_event e;
    PS_TRY(ps__json_scan_next(s, &e));
    if (e.end)
      return PS_OK;
    const bool shape = !strcmp(e.key, "shape"), dtype = !strcmp(e.key, "dtype"),
               offsets = !strcmp(e.key, "data_offsets");
    if ((shape && t->has_shape) || (dtype && t->has_dtype) || (offsets && t->has_offsets))
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": %s appears twice", t->path, t->name, e.key);
    if (shape)
      PS_TRY(read_shape(s, &e, t));
    else if (dtype)
      PS_TRY(read_dtype(&e, t));
    else if (offsets)
      PS_TRY(read_offsets(s, &e, t));
    else
      PS_TRY(ps__json_scan_skip(s, &e));
  }
}

static ps_status check_shape_and_dtype(const entry *t, ps_tensor_info *info) {
  const uint32_t bits = dtype_bits(t->dtype);
  uint64_t total;
  if (!t->has_shape)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": shape is missing or not a list", t->path,
                    t->name);
  if (!t->has_dtype)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": dtype is missing or not a string", t->path,
                    t->name);
  info->n_dims = (uint32_t)t->n_dims;
  info->n = 1;
  for (uint32_t i = 0; i < info->n_dims; i++) {
    info->shape[i] = t->shape[i];
    if (__builtin_mul_overflow(info->n, t->shape[i], &info->n))
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": its shape has more than 2^64 elements",
                      t->path, t->name);
  }
  if (!bits)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": dtype \"%.40s\" is unknown", t->path, t->name,
                    t->dtype);
  if (__builtin_mul_overflow(info->n, (uint64_t)bits, &total))
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": its shape has more than 2^64 bits", t->path,
                    t->name);
  if (total % 8)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": %" PRIu64 " elements of %s are not whole bytes",
                    t->path, t->name, info->n, t->dtype);
  snprintf(info->dtype, sizeof info->dtype, "%.11s", t->dtype);
  info->bytes = total / 8;
  return PS_OK;
}

/* Fills in *out, but for its name. Its begin is then relative to the start of all data. */
static ps_status check_entry(const entry *t, uint64_t data_bytes, tensor *out) {
  const uint64_t begin = t->offset[0], end = t->offset[1];
  PS_TRY(check_shape_and_dtype(t, &out->info));
  if (!t->has_offsets)
    return bad_offsets(t);
  if (begin > end)
    return ps__fail(PS_EFORMAT,
                    "%s: tensor \"%s\": data_offsets are %" PRIu64 " to %" PRIu64
                    ": they run backwards",
                    t->path, t->name, begin, end);
  if (end > data_bytes)
    return ps__fail(PS_EFORMAT,
                    "%s: tensor \"%s\": data_offsets are %" PRIu64 " to %" PRIu64
                    ", the file has %" PRIu64 " bytes of data: it may be truncated, fetch it again",
                    t->path, t->name, begin, end, data_bytes);
  if (end - begin != out->info.bytes)
    return ps__fail(PS_EFORMAT,
                    "%s: tensor \"%s\": data_offsets span %" PRIu64
                    " bytes, its shape and dtype need %" PRIu64,
                    t->path, t->name, end - begin, out->info.bytes);
  out->begin = begin;
  return PS_OK;
}

static ps_status check_metadata(ps_tensor_file *f, ps__json_scan *s, const ps__json_event *begin,
                                const char *path) {
  if (begin->kind != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: __metadata__ is not an object", path);
  for (;;) {
    ps__json_event e;
    PS_TRY(ps__json_scan_next(s, &e));
    if (e.end)
      return PS_OK;
    if (e.kind != PS_JSON_STRING)
      return ps__fail(PS_EFORMAT, "%s: __metadata__: \"%.60s\" is not a string", path, e.key);
    f->initialised |= !strcmp(e.key, "penstock_initialised_by");
  }
}

/* ---- one file -------------------------------------------------------------------------------- */

static int by_range(const void *a, const void *b) {
  const tensor *x = a, *y = b;
  if (x->begin != y->begin)
    return x->begin < y->begin ? -1 : 1;
  return (x->info.bytes > y->info.bytes) - (x->info.bytes < y->info.bytes);
}

/* Checks that the file's tensors, sorted by place, cover its data without a hole or an overlap. */
static ps_status check_coverage(const char *path, const tensor *t, size_t n, uint64_t data_bytes) {
  uint64_t at = 0;
  for (size_t i = 0; i < n; i++) {
    if (t[i].begin != at)
      return ps__fail(PS_EFORMAT,
                      "%s: tensor \"%s\": its data starts at byte %" PRIu64 " where byte %" PRIu64
                      " was due: the tensors %s",
                      path, t[i].name, t[i].begin, at,
                      t[i].begin < at ? "overlap" : "leave a hole");
    at += t[i].info.bytes;
  }
  if (at != data_bytes)
    return ps__fail(PS_EFORMAT,
                    "%s: the tensors end at byte %" PRIu64 " of the data, the file has %" PRIu64,
                    path, at, data_bytes);
  return PS_OK;
}

static ps_status add_tensor(ps_tensor_file *f, ps__json_scan *s, const ps__json_event *e,
                            uint64_t data_bytes) {
  const char *path = f->files[f->n_files - 1].path;
  if (f->n == MAX_TENSORS)
    return ps__fail(
        PS_EFORMAT,
        "%s: tensor \"%.100s\" is one more than the %d that are read: it may not be a model's file",
        path, e->key, MAX_TENSORS);
  char *name = PS_GROW(f->tensors, f->n, f->cap) ? ps__strdup(e->key) : NULL;
  if (!name)
    return no_memory(path);
  tensor *t = &f->tensors[f->n++];
  *t = (tensor){.name = name, .file = (uint32_t)(f->n_files - 1), .info = {.name = name}};
  if (e->kind != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": its entry is not an object", path, name);
  entry read = {.path = path, .name = name};
  PS_TRY(read_entry(s, &read));
  return check_entry(&read, data_bytes, t);
}

static int compare_tensor_names(const void *a, const void *b) {
  return strcmp(((const tensor *)a)->name, ((const tensor *)b)->name);
}

static ps_status add_tensors(ps_tensor_file *f, ps__json_scan *s, uint64_t data_bytes) {
  const size_t first = f->n;
  const data_file *d = &f->files[f->n_files - 1];
  ps__json_event e;
  PS_TRY(ps__json_scan_next(s, &e)); /* the object: the header begins with { */
  for (;;) {
    PS_TRY(ps__json_scan_next(s, &e));
    if (e.end)
      break;
    if (!strcmp(e.key, "__metadata__"))
      PS_TRY(check_metadata(f, s, &e, d->path));
    else
      PS_TRY(add_tensor(f, s, &e, data_bytes));
  }
  PS_TRY(ps__json_scan_next(s, &e)); /* the document's end */
  const size_t n = f->n - first;
  if (n == 0)
    return check_coverage(d->path, NULL, 0, data_bytes);
  tensor *t = f->tensors + first;
  qsort(t, n, sizeof *t, compare_tensor_names);
  for (size_t i = 1; i < n; i++)
    if (!strcmp(t[i].name, t[i - 1].name))
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" appears twice in its header", d->path,
                      t[i].name);
  qsort(t, n, sizeof *t, by_range);
  PS_TRY(check_coverage(d->path, t, n, data_bytes));
  for (size_t i = 0; i < n; i++)
    t[i].begin += d->data_start;
  return PS_OK;
}

/* Finds where the data starts. */
static ps_status check_header(data_file *d, uint64_t file_bytes) {
  unsigned char raw[8];
  char brace = 0;
  uint64_t n = 0;
  if (file_bytes < 8)
    return ps__fail(PS_EFORMAT,
                    "%s: has %" PRIu64
                    " bytes, a safetensors file has at least 8: it may be truncated",
                    d->path, file_bytes);
  PS_TRY(ps__pread_all(d->fd, d->path, raw, 8, 0));
  for (int i = 0; i < 8; i++)
    n |= (uint64_t)raw[i] << 8 * i;
  if (memcmp(raw, "version ", 8) == 0) /* no length of a header */
    return ps__fail(PS_EFORMAT,
                    "%s: is a pointer of Git LFS, not the weights: run git lfs pull where it was "
                    "cloned",
                    d->path);
  if (n > PS__MAX_HEADER_BYTES)
    return ps__fail(PS_EFORMAT,
                    "%s: its header claims %" PRIu64
                    " bytes, at most %d are allowed: it may not be a safetensors file",
                    d->path, n, PS__MAX_HEADER_BYTES);
  if (n > file_bytes - 8)
    return ps__fail(PS_EFORMAT,
                    "%s: its header claims %" PRIu64 " bytes, the file has %" PRIu64
                    ": it may be truncated, fetch it again",
                    d->path, n, file_bytes);
  if (n)
    PS_TRY(ps__pread_all(d->fd, d->path, &brace, 1, 8));
  if (brace != '{')
    return ps__fail(PS_EFORMAT, "%s: its header does not start with {", d->path);
  d->data_start = 8 + n;
  return PS_OK;
}

/* Opens the file. Frees @path or keeps it, on failure too. */
static ps_status add_file(ps_tensor_file *f, char *path) {
  if (!PS_GROW(f->files, f->n_files, f->cap_files)) {
    ps_status st = no_memory(path);
    ps__free(path);
    return st;
  }
  data_file *d = &f->files[f->n_files++];
  *d = (data_file){.path = path, .fd = -1};
  struct stat sb;
  PS_TRY(ps__open_input(&d->fd, &sb, path));
  PS_TRY(check_header(d, (uint64_t)sb.st_size));
  ps__json_scan *scan = NULL;
  PS_TRY(ps__json_scan_file(&scan, d->fd, 8, d->data_start - 8, MAX_TEXT, path));
  const ps_status st = add_tensors(f, scan, (uint64_t)sb.st_size - d->data_start);
  ps__json_scan_close(scan);
  return st;
}

/* ---- the files of a directory ---------------------------------------------------------------- */

static int compare_names(const void *a, const void *b, void *tensors) {
  const tensor *t = tensors;
  return strcmp(t[*(const uint64_t *)a].name, t[*(const uint64_t *)b].name);
}

static ps_status make_index(ps_tensor_file *f, const char *path) {
  f->by_name = ps__malloc(f->n * sizeof *f->by_name);
  if (!f->by_name)
    return no_memory(path);
  for (size_t i = 0; i < f->n; i++)
    f->by_name[i] = i;
  if (f->n)
    qsort_r(f->by_name, f->n, sizeof *f->by_name, compare_names, f->tensors);
  for (size_t i = 1; i < f->n; i++) {
    const tensor *a = &f->tensors[f->by_name[i - 1]], *b = &f->tensors[f->by_name[i]];
    if (!strcmp(a->name, b->name))
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" is also in %s", f->files[b->file].path,
                      b->name, f->files[a->file].path);
  }
  return PS_OK;
}

/* By the names of a text model whose experts, and layers' parts, are a tensor each. */
static ps_status name_anew(ps_tensor_file *f, const char *path) {
  PS_TRY(ps__tensors_rename(f));
  bool sliced;
  PS_TRY(ps__tensors_split(f, path, MAX_TENSORS));
  PS_TRY(ps__tensors_slice(f, MAX_TENSORS, &sliced));
  if (!f->fused && !f->names && !sliced)
    return PS_OK;
  ps__free(f->by_name);
  f->by_name = NULL;
  return make_index(f, path);
}

static const char *base_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

/* ---- an index ----
 * It is read twice: first for the files that it names, then for the file of each tensor. */

typedef struct weight_index {
  const char *path;
  int fd;
  uint64_t bytes;
} weight_index;

typedef struct names {
  char **item;
  size_t n, cap;
} names;

static int compare_text(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Adds the name if it is new. Maps name the same file many times over. */
static ps_status add_name(names *list, const char *name, const char *path) {
  for (size_t i = list->n; i-- > 0;)
    if (!strcmp(list->item[i], name))
      return PS_OK;
  if (list->n == MAX_FILES)
    return ps__fail(PS_EFORMAT, "%s: weight_map names more than %d files", path, MAX_FILES);
  char *copy = PS_GROW(list->item, list->n, list->cap) ? ps__strdup(name) : NULL;
  if (!copy)
    return no_memory(path);
  list->item[list->n++] = copy;
  return PS_OK;
}

static ps_status take_name(names *list, const ps__json_event *e, const weight_index *x) {
  if (e->kind != PS_JSON_STRING || !e->bytes || strlen(e->text) != e->bytes || strchr(e->text, '/'))
    return ps__fail(PS_EFORMAT, "%s: weight_map: \"%.90s\" must name a file of the same folder",
                    x->path, e->key);
  return add_name(list, e->text, x->path);
}

static ps_status check_mapped(ps_tensor_file *f, const ps__json_event *e, const weight_index *x) {
  const uint64_t idx = ps_tensors_find(f, e->key);
  tensor *t = idx == UINT64_MAX ? NULL : &f->tensors[idx];
  if (!t || strcmp(base_name(f->files[t->file].path), e->text))
    return ps__fail(PS_EFORMAT,
                    "%s: weight_map puts tensor \"%.100s\" into %.100s, which does not have it",
                    x->path, e->key, e->text);
  if (t->mapped)
    return ps__fail(PS_EFORMAT, "%s: weight_map: tensor \"%.100s\" appears twice", x->path, e->key);
  t->mapped = true;
  return PS_OK;
}

/* Adds every entry of the map to @list. Where @list is NULL, checks it against the tensors of
 * @f. */
static ps_status scan_map(ps__json_scan *s, ps_tensor_file *f, names *list, const weight_index *x) {
  ps__json_event e;
  size_t n = 0;
  bool found = false;
  PS_TRY(ps__json_scan_next(s, &e));
  const bool object = e.kind == PS_JSON_OBJECT;
  while (object) {
    PS_TRY(ps__json_scan_next(s, &e));
    if (e.end)
      break;
    if (strcmp(e.key, "weight_map")) {
      PS_TRY(ps__json_scan_skip(s, &e));
      continue;
    }
    if (found)
      return ps__fail(PS_EFORMAT, "%s: weight_map appears twice", x->path);
    found = true;
    if (e.kind != PS_JSON_OBJECT)
      break;
    for (;; n++) {
      PS_TRY(ps__json_scan_next(s, &e));
      if (e.end)
        break;
      PS_TRY(list ? take_name(list, &e, x) : check_mapped(f, &e, x));
    }
  }
  if (n == 0)
    return ps__fail(PS_EFORMAT, "%s: weight_map is missing, empty or not an object", x->path);
  return ps__json_scan_next(s, &e); /* the document's end */
}

static ps_status scan_index(ps_tensor_file *f, names *list, const weight_index *x) {
  ps__json_scan *s = NULL;
  PS_TRY(ps__json_scan_file(&s, x->fd, 0, x->bytes, MAX_TEXT, x->path));
  const ps_status st = scan_map(s, f, list, x);
  ps__json_scan_close(s);
  return st;
}

/* Opens each file that the map names. */
static ps_status open_mapped(ps_tensor_file *f, const char *dir, const weight_index *x) {
  names list = {0};
  ps_status st = scan_index(f, &list, x);
  if (st == PS_OK)
    qsort(list.item, list.n, sizeof *list.item, compare_text);
  for (size_t i = 0; i < list.n && st == PS_OK; i++) {
    char *path;
    st = ps__model_path(&path, dir, list.item[i]);
    if (st == PS_OK)
      st = add_file(f, path);
  }
  for (size_t i = 0; i < list.n; i++)
    ps__free(list.item[i]);
  ps__free(list.item);
  return st;
}

static ps_status open_index(ps_tensor_file *f, const char *dir, const char *index) {
  weight_index x = {.path = index};
  struct stat sb;
  PS_TRY(ps__open_input(&x.fd, &sb, index));
  x.bytes = (uint64_t)sb.st_size;
  ps_status st = PS_OK;
  if (x.bytes > PS__MAX_HEADER_BYTES)
    st = ps__fail(PS_EFORMAT, "%s: has %" PRIu64 " bytes, at most %d are read", index, x.bytes,
                  PS__MAX_HEADER_BYTES);
  if (st == PS_OK)
    st = open_mapped(f, dir, &x);
  if (st == PS_OK)
    st = make_index(f, index);
  if (st == PS_OK)
    st = scan_index(f, NULL, &x);
  close(x.fd);
  return st;
}

/* What a directory without safetensors of @stem is, by a file that it has. */
static ps_status fail_without_weights(const char *dir, const char *stem) {
  static const char resave[] = "only safetensors are read: open the model with transformers and "
                               "save it with save_pretrained()";
  static const struct {
    const char *stem, *file, *is, *what_to_do; /* stem NULL: any */
  } kinds[] = {
      {"model", "pytorch_model.bin", "its weights are in pytorch_model.bin", resave},
      {"model", "pytorch_model.bin.index.json", "its weights are in files pytorch_model-*.bin",
       resave},
      {"adapter_model", "adapter_model.bin", "its weights are in adapter_model.bin",
       "only safetensors are read: open the adapter with PEFT and save it with save_pretrained()"},
      {"model", "zero_to_fp32.py", "it holds a checkpoint of DeepSpeed",
       "run its zero_to_fp32.py with --safe_serialization, which writes a model"},
      {"model", "adapter_config.json", "it holds an adapter", "penstock merge makes a model of it"},
      {NULL, "", "", "is it a model directory?"},
  };
  const size_t last = sizeof kinds / sizeof *kinds - 1;
  size_t k = 0;
  for (; k < last; k++) {
    char *path = strcmp(kinds[k].stem, stem) ? NULL : ps__path_join(dir, kinds[k].file);
    bool there = false;
    const ps_status st = path ? ps__path_exists(path, &there) : PS_OK;
    ps__free(path);
    PS_TRY(st);
    if (there)
      break;
  }
  return ps__fail(PS_EIO, "%s: has neither %s.safetensors nor %s.safetensors.index.json: %s%s%s",
                  dir, stem, stem, kinds[k].is, k < last ? ", and " : "", kinds[k].what_to_do);
}

/* Opens STEM.safetensors if it exists, else the index, as transformers does. Files of a save that
 * was cut off come first (ps__model_path). */
static ps_status open_dir(ps_tensor_file *f, const char *dir, const char *stem) {
  for (int i = 0; i < 4; i++) {
    char entry[300];
    snprintf(entry, sizeof entry, "%s%s.safetensors%s", i < 2 ? PS__MODEL_PENDING "/" : "", stem,
             i % 2 ? ".index.json" : "");
    char *path = ps__path_join(dir, entry);
    bool there = false;
    if (!path)
      return PS_ENOMEM;
    ps_status st = ps__path_exists(path, &there);
    if (st == PS_OK && there && i % 2 == 0) {
      PS_TRY(add_file(f, path)); /* takes the path over */
      return make_index(f, dir);
    }
    if (st == PS_OK && there)
      st = open_index(f, dir, path);
    ps__free(path);
    if (st != PS_OK || there)
      return st;
  }
  return fail_without_weights(dir, stem);
}

ps_status ps__tensors_open(ps_tensor_file **out, const char *path, const char *stem) {
  if (!out || !path)
    return ps__fail(PS_EINVAL, "ps_tensors_open: no path or no place for the result was given");
  struct stat sb;
  if (stat(path, &sb) != 0)
    return ps__fail(PS_EIO, "%s: cannot be opened: %s", path, strerror(errno));
  ps_tensor_file *f = ps__calloc(1, sizeof *f);
  if (!f)
    return no_memory(path);
  ps_status st;
  if (S_ISDIR(sb.st_mode)) {
    st = open_dir(f, path, stem);
  } else {
    char *copy = ps__strdup(path);
    st = copy ? add_file(f, copy) : no_memory(path);
    if (st == PS_OK)
      st = make_index(f, path);
  }
  if (st == PS_OK)
    st = name_anew(f, path);
  if (st == PS_OK)
    st = ps__tensors_pair(f);
  if (st != PS_OK) {
    ps_tensors_close(f);
    return st;
  }
  *out = f;
  return PS_OK;
}

ps_status ps_tensors_open(ps_tensor_file **out, const char *path) {
  return ps__tensors_open(out, path, "model");
}

void ps_tensors_close(ps_tensor_file *f) {
  if (!f)
    return;
  for (size_t i = 0; i < f->n; i++)
    ps__free(f->tensors[i].name);
  for (size_t i = 0; i < f->n_files; i++) {
    if (f->files[i].fd >= 0)
      close(f->files[i].fd);
    ps__free(f->files[i].path);
  }
  ps__free(f->tensors);
  ps__free(f->files);
  ps__free(f->by_name);
  ps__free(f);
}

/* ---- what is in it --------------------------------------------------------------------------- */

ps_status ps__tensors_metadata(const ps_tensor_file *f, const char *key, char *out, size_t bytes) {
  const char *path = f->files[0].path;
  struct stat sb;
  uint8_t length[8];
  uint64_t n = 0;
  ps__json *j = NULL;
  int fd;
  PS_TRY(ps__open_input(&fd, &sb, path));
  ps_status st = ps__pread_all(fd, path, length, sizeof length, 0);
  for (size_t i = sizeof length; st == PS_OK && i-- > 0;)
    n = n << 8 | length[i];
  if (st == PS_OK && n > PS__MAX_HEADER_BYTES)
    st = ps__fail(PS_EIO, "%s: was changed while it was read", path);
  char *header = st == PS_OK ? ps__malloc(n) : NULL;
  if (st == PS_OK && !header)
    st = no_memory(path);
  if (st == PS_OK)
    st = ps__pread_all(fd, path, header, n, sizeof length);
  if (st == PS_OK)
    st = ps__json_parse(&j, header, n, path);
  const char *value = ps__json_string(ps__json_get(ps__json_get(j, "__metadata__"), key), NULL);
  if (st == PS_OK)
    snprintf(out, bytes, "%s", value ? value : "");
  ps__json_free(j);
  ps__free(header);
  close(fd);
  return st;
}

/* ---- reading bytes --------------------------------------------------------------------------- */

ps_status ps_tensors_read_bytes(ps_tensor_file *f, uint64_t idx, uint64_t first, uint64_t n,
                                void *dst) {
  if (!f || idx >= f->n || first > f->tensors[idx].info.bytes ||
      n > f->tensors[idx].info.bytes - first)
    return ps__fail(PS_EINVAL, "ps_tensors_read_bytes: there is no such tensor, or range of it");
  const tensor *t = &f->tensors[idx];
  const data_file *d = &f->files[t->file];
  return ps__pread_all(d->fd, d->path, dst, n, t->begin + first);
}

/* ---- reading with conversion ----------------------------------------------------------------- */

ps_status ps_tensors_read(ps_tensor_file *f, uint64_t idx, uint64_t first, uint64_t n,
                          ps_dtype dtype, void *dst) {
  size_t to = (uint32_t)dtype == PS__U8 ? 1 : ps_dtype_bytes(dtype); /* bytes, of bytes alone */
  if (idx >= f->n)
    return ps__fail(PS_EINVAL, "tensor %" PRIu64 " was asked for: there are %zu", idx, f->n);
  const tensor *t = &f->tensors[idx];
  const data_file *d = &f->files[t->file];
  if (!to)
    return ps__fail(PS_EINVAL, "%s: tensor \"%s\": %d is no ps_dtype", d->path, t->name,
                    (int)dtype);
  if (first > t->info.n || n > t->info.n - first)
    return ps__fail(PS_EINVAL,
                    "%s: tensor \"%s\": elements %" PRIu64 " to %" PRIu64
                    " were asked for, it has %" PRIu64,
                    d->path, t->name, first, first + n, t->info.n);
  if ((uint32_t)dtype == PS__U8 && !strcmp(t->info.dtype, ps__dtypes[PS__U8].file_name))
    return ps__pread_all(d->fd, d->path, dst, n, t->begin + first);
  if ((uint32_t)dtype == PS__U8)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" is %s, U8 was asked for", d->path, t->name,
                    t->info.dtype);
  PS_TRY(ps__tensors_check_dtype(f, idx));
  if (t->scales)
    return ps__tensors_dequantize(f, t, first, n, dtype, dst);
  if (t->transposed)
    return ps__tensors_read_transposed(f, t, first, n, dtype, dst);
  if (t->row_stride)
    return ps__tensors_read_strided(f, t, first, n, dtype, dst);
  const uint32_t kind = ps__dtype_of_file(t->info.dtype);
  const size_t from = ps__dtypes[kind].bytes;
  uint64_t at = t->begin + first * from;
  if (kind == (uint32_t)dtype)
    return ps__pread_all(d->fd, d->path, dst, n * from, at);
  _Alignas(64) char piece[16384];
  for (uint64_t done = 0; done < n;) {
    uint64_t m = n - done < sizeof piece / from ? n - done : sizeof piece / from;
    PS_TRY(ps__pread_all(d->fd, d->path, piece, m * from, at + done * from));
    ps__convert((char *)dst + done * to, dtype, piece, kind, m);
    done += m;
  }
  return PS_OK;
}
