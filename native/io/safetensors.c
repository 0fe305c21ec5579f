/* safetensors.c - reading safetensors: one file, or a directory's set with its index.
 *
 * A file: u64 little-endian N, N bytes of JSON, then the data to the end of the file. Checked whole before anything is
 * read: N against the file, each tensor's shape times dtype against its byte range, and that the ranges in order cover the
 * data from its first byte to its last without a hole or an overlap.
 * Stricter than the safetensors library: duplicate keys are refused, shapes have at most 8 dimensions. */
#include <penstock/checkpoint.h>

#include "io.h"
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct data_file {
  char *path;
  int fd;
  uint64_t data_start;
} data_file;

typedef struct tensor {
  char *name;
  ps_tensor_info info;
  uint64_t begin; /* byte in the file */
  uint32_t file;
} tensor;

struct ps_tensor_file {
  data_file *files;
  size_t n_files, cap_files;
  tensor *tensors;
  size_t n, cap;
  uint64_t *by_name; /* indices sorted by name */
};

static const struct {
  const char *name;
  uint32_t bits;
} dtypes[] = {{"F32", 32},     {"BF16", 16},        {"F16", 16},        {"F64", 64},     {"I64", 64},     {"I32", 32}, {"I16", 16},
              {"I8", 8},       {"U64", 64},         {"U32", 32},        {"U16", 16},     {"U8", 8},       {"BOOL", 8}, {"C64", 64},
              {"F8_E4M3", 8},  {"F8_E5M2", 8},      {"F8_E8M0", 8},     {"F6_E2M3", 6},  {"F6_E3M2", 6},  {"F4", 4},
              {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};

static uint32_t dtype_bits(const char *name) {
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
    if (!strcmp(name, dtypes[i].name)) return dtypes[i].bits;
  return 0;
}

static ps_status no_memory(const char *path) { return ps__fail(PS_ENOMEM, "%s: no memory left to read its header", path); }

/* ---- one tensor of a header --------------------------------------------------------------------------------------------- */

static ps_status parse_shape(const char *path, const char *name, const ps__json *shape, ps_tensor_info *info) {
  if (!shape || ps__json_type(shape) != PS_JSON_ARRAY)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": shape is missing or not a list", path, name);
  if (ps__json_length(shape) > PS__MAX_DIMS)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": shape has %zu dimensions, at most %d are read", path, name,
                    ps__json_length(shape), PS__MAX_DIMS);
  info->n_dims = (uint32_t)ps__json_length(shape);
  info->n = 1;
  for (uint32_t i = 0; i < info->n_dims; i++) {
    if (!ps__json_uint64(ps__json_at(shape, i), &info->shape[i]))
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": shape[%u] is not a whole number below 2^64", path, name, i);
    if (__builtin_mul_overflow(info->n, info->shape[i], &info->n))
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": its shape has more than 2^64 elements", path, name);
  }
  return PS_OK;
}

static ps_status parse_dtype(const char *path, const char *name, const ps__json *v, ps_tensor_info *info) {
  const char *dtype = ps__json_string(v, NULL);
  if (!dtype) return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": dtype is missing or not a string", path, name);
  uint32_t bits = dtype_bits(dtype);
  uint64_t total;
  if (!bits) return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": dtype \"%.40s\" is unknown", path, name, dtype);
  if (__builtin_mul_overflow(info->n, (uint64_t)bits, &total))
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": its shape has more than 2^64 bits", path, name);
  if (total % 8)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": %" PRIu64 " elements of %s are not whole bytes", path, name, info->n, dtype);
  snprintf(info->dtype, sizeof info->dtype, "%s", dtype);
  info->bytes = total / 8;
  return PS_OK;
}

/* Fills everything of *t but its name; begin relative to the data. */
static ps_status parse_tensor(const char *path, const char *name, const ps__json *v, uint64_t data_bytes, tensor *t) {
  uint64_t end;
  if (ps__json_type(v) != PS_JSON_OBJECT) return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": its entry is not an object", path, name);
  PS_TRY(parse_shape(path, name, ps__json_get(v, "shape"), &t->info));
  PS_TRY(parse_dtype(path, name, ps__json_get(v, "dtype"), &t->info));
  const ps__json *o = ps__json_get(v, "data_offsets");
  if (!o || ps__json_type(o) != PS_JSON_ARRAY || ps__json_length(o) != 2 || !ps__json_uint64(ps__json_at(o, 0), &t->begin) ||
      !ps__json_uint64(ps__json_at(o, 1), &end))
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": data_offsets is missing or not two whole numbers below 2^64", path, name);
  if (t->begin > end)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": data_offsets are %" PRIu64 " to %" PRIu64 ": they run backwards", path, name, t->begin, end);
  if (end > data_bytes)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": data_offsets are %" PRIu64 " to %" PRIu64 ", the file has %" PRIu64
                    " bytes of data: it may be truncated, fetch it again", path, name, t->begin, end, data_bytes);
  if (end - t->begin != t->info.bytes)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": data_offsets span %" PRIu64 " bytes, its shape and dtype need %" PRIu64, path,
                    name, end - t->begin, t->info.bytes);
  return PS_OK;
}

static ps_status check_metadata(const char *path, const ps__json *v) {
  if (ps__json_type(v) != PS_JSON_OBJECT) return ps__fail(PS_EFORMAT, "%s: __metadata__ is not an object", path);
  for (size_t i = 0; i < ps__json_length(v); i++)
    if (!ps__json_string(ps__json_at(v, i), NULL))
      return ps__fail(PS_EFORMAT, "%s: __metadata__: \"%.60s\" is not a string", path, ps__json_key(v, i));
  return PS_OK;
}

/* ---- one file ----------------------------------------------------------------------------------------------------------- */

static int by_range(const void *a, const void *b) {
  const tensor *x = a, *y = b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  return (x->info.bytes > y->info.bytes) - (x->info.bytes < y->info.bytes);
}

/* The tensors [from, n) of the file, sorted by place, cover its data exactly. */
static ps_status check_coverage(const char *path, const tensor *t, size_t n, uint64_t data_bytes) {
  uint64_t at = 0;
  for (size_t i = 0; i < n; i++) {
    if (t[i].begin != at)
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": its data starts at byte %" PRIu64 " where byte %" PRIu64 " was due: the tensors %s",
                      path, t[i].name, t[i].begin, at, t[i].begin < at ? "overlap" : "leave a hole");
    at += t[i].info.bytes;
  }
  if (at != data_bytes)
    return ps__fail(PS_EFORMAT, "%s: the tensors end at byte %" PRIu64 " of the data, the file has %" PRIu64, path, at, data_bytes);
  return PS_OK;
}

static ps_status add_tensors(ps_tensor_file *f, const char *path, const ps__json *header, uint64_t data_bytes) {
  size_t first = f->n;
  uint64_t data_start = f->files[f->n_files - 1].data_start;
  for (size_t i = 0; i < ps__json_length(header); i++) {
    const char *name = ps__json_key(header, i);
    if (!strcmp(name, "__metadata__")) {
      PS_TRY(check_metadata(path, ps__json_at(header, i)));
      continue;
    }
    tensor t = {.file = (uint32_t)(f->n_files - 1)};
    PS_TRY(parse_tensor(path, name, ps__json_at(header, i), data_bytes, &t));
    void *tensors = f->tensors;
    bool grown = ps__grow(&tensors, f->n, &f->cap, sizeof *f->tensors);
    f->tensors = tensors;
    t.name = grown ? ps__strdup(name) : NULL;
    if (!t.name) return no_memory(path);
    t.info.name = t.name;
    f->tensors[f->n++] = t;
  }
  if (f->n > first) qsort(f->tensors + first, f->n - first, sizeof *f->tensors, by_range);
  PS_TRY(check_coverage(path, f->tensors + first, f->n - first, data_bytes));
  for (size_t i = first; i < f->n; i++) f->tensors[i].begin += data_start;
  return PS_OK;
}

/* The header's text, freed by the caller. */
static ps_status read_header(data_file *d, uint64_t file_bytes, char **text, size_t *bytes) {
  unsigned char raw[8];
  uint64_t n = 0;
  if (file_bytes < 8)
    return ps__fail(PS_EFORMAT, "%s: has %" PRIu64 " bytes, a safetensors file has at least 8: it may be truncated", d->path, file_bytes);
  PS_TRY(ps__pread_all(d->fd, d->path, raw, 8, 0));
  for (int i = 0; i < 8; i++) n |= (uint64_t)raw[i] << 8 * i;
  if (n > PS__MAX_HEADER_BYTES)
    return ps__fail(PS_EFORMAT, "%s: its header claims %" PRIu64 " bytes, at most %d are allowed: it may not be a safetensors file",
                    d->path, n, PS__MAX_HEADER_BYTES);
  if (n > file_bytes - 8)
    return ps__fail(PS_EFORMAT, "%s: its header claims %" PRIu64 " bytes, the file has %" PRIu64 ": it may be truncated, fetch it again",
                    d->path, n, file_bytes);
  char *p = ps__malloc((size_t)n);
  if (!p) return no_memory(d->path);
  ps_status st = ps__pread_all(d->fd, d->path, p, (size_t)n, 8);
  if (st == PS_OK && (n == 0 || p[0] != '{')) st = ps__fail(PS_EFORMAT, "%s: its header does not start with {", d->path);
  if (st != PS_OK) {
    ps__free(p);
    return st;
  }
  d->data_start = 8 + n;
  *text = p;
  *bytes = (size_t)n;
  return PS_OK;
}

/* Opens the file; takes @path over, also on failure. */
static ps_status add_file(ps_tensor_file *f, char *path) {
  void *files = f->files;
  bool grown = ps__grow(&files, f->n_files, &f->cap_files, sizeof *f->files);
  f->files = files;
  if (!grown) {
    ps_status st = no_memory(path);
    ps__free(path);
    return st;
  }
  data_file *d = &f->files[f->n_files++];
  *d = (data_file){.path = path, .fd = -1};
  struct stat sb;
  PS_TRY(ps__open_input(&d->fd, &sb, path));
  char *text = NULL;
  size_t bytes = 0;
  PS_TRY(read_header(d, (uint64_t)sb.st_size, &text, &bytes));
  ps__json *header = NULL;
  ps_status st = ps__json_parse(&header, text, bytes, path);
  ps__free(text);
  if (st == PS_OK) st = add_tensors(f, path, header, (uint64_t)sb.st_size - d->data_start);
  ps__json_free(header);
  return st;
}

/* ---- a directory's set -------------------------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b, void *tensors) {
  const tensor *t = tensors;
  return strcmp(t[*(const uint64_t *)a].name, t[*(const uint64_t *)b].name);
}

static ps_status make_index(ps_tensor_file *f, const char *path) {
  f->by_name = ps__malloc(f->n * sizeof *f->by_name);
  if (!f->by_name) return no_memory(path);
  for (size_t i = 0; i < f->n; i++) f->by_name[i] = i;
  if (f->n) qsort_r(f->by_name, f->n, sizeof *f->by_name, compare_names, f->tensors);
  for (size_t i = 1; i < f->n; i++) {
    const tensor *a = &f->tensors[f->by_name[i - 1]], *b = &f->tensors[f->by_name[i]];
    if (!strcmp(a->name, b->name))
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" is also in %s", f->files[b->file].path, b->name, f->files[a->file].path);
  }
  return PS_OK;
}

static const char *base_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

static int compare_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

/* Opens each file that the map names once. */
static ps_status open_mapped(ps_tensor_file *f, const char *dir, const char *index, const ps__json *map) {
  size_t n = ps__json_length(map);
  const char **names = ps__malloc((n ? n : 1) * sizeof *names);
  if (!names) return no_memory(index);
  ps_status st = PS_OK;
  for (size_t i = 0; i < n && st == PS_OK; i++) {
    size_t bytes = 0;
    names[i] = ps__json_string(ps__json_at(map, i), &bytes);
    if (!names[i] || !bytes || strlen(names[i]) != bytes || strchr(names[i], '/'))
      st = ps__fail(PS_EFORMAT, "%s: weight_map: \"%.90s\" must name a file of the same folder", index, ps__json_key(map, i));
  }
  if (st == PS_OK) qsort(names, n, sizeof *names, compare_text);
  for (size_t i = 0; i < n && st == PS_OK; i++) {
    if (i && !strcmp(names[i], names[i - 1])) continue;
    char *path = ps__path_join(dir, names[i]);
    st = path ? add_file(f, path) : PS_ENOMEM;
  }
  ps__free(names);
  return st;
}

static ps_status open_index(ps_tensor_file *f, const char *dir, const char *index) {
  ps__json *j = NULL;
  PS_TRY(ps__json_read_file(&j, index, PS__MAX_HEADER_BYTES));
  const ps__json *map = ps__json_get(j, "weight_map");
  ps_status st = PS_OK;
  if (!map || ps__json_type(map) != PS_JSON_OBJECT || ps__json_length(map) == 0)
    st = ps__fail(PS_EFORMAT, "%s: weight_map is missing, empty or not an object", index);
  if (st == PS_OK) st = open_mapped(f, dir, index, map);
  if (st == PS_OK) st = make_index(f, index);
  for (size_t i = 0; st == PS_OK && i < ps__json_length(map); i++) {
    const char *name = ps__json_key(map, i), *file = ps__json_string(ps__json_at(map, i), NULL);
    uint64_t idx = ps_tensors_find(f, name);
    if (idx == UINT64_MAX || strcmp(base_name(f->files[f->tensors[idx].file].path), file))
      st = ps__fail(PS_EFORMAT, "%s: weight_map puts tensor \"%s\" into %s, which does not have it", index, name, file);
  }
  ps__json_free(j);
  return st;
}

/* As transformers: model.safetensors when it is there, else the index. */
static ps_status open_dir(ps_tensor_file *f, const char *dir) {
  char *single = ps__path_join(dir, "model.safetensors"), *index = NULL;
  if (!single) return PS_ENOMEM;
  if (access(single, F_OK) == 0) {
    PS_TRY(add_file(f, single));
    return make_index(f, dir);
  }
  ps__free(single);
  index = ps__path_join(dir, "model.safetensors.index.json");
  if (!index) return PS_ENOMEM;
  ps_status st = PS_OK;
  if (access(index, F_OK) == 0) st = open_index(f, dir, index);
  else st = ps__fail(PS_EIO, "%s: has neither model.safetensors nor model.safetensors.index.json: is it a model directory?", dir);
  ps__free(index);
  return st;
}

ps_status ps_tensors_open(ps_tensor_file **out, const char *path) {
  if (!out || !path) return ps__fail(PS_EINVAL, "ps_tensors_open: no path or no place for the result was given");
  struct stat sb;
  if (stat(path, &sb) != 0) return ps__fail(PS_EIO, "%s: cannot be opened: %s", path, strerror(errno));
  ps_tensor_file *f = ps__calloc(1, sizeof *f);
  if (!f) return no_memory(path);
  ps_status st;
  if (S_ISDIR(sb.st_mode)) {
    st = open_dir(f, path);
  } else {
    char *copy = ps__strdup(path);
    st = copy ? add_file(f, copy) : no_memory(path);
    if (st == PS_OK) st = make_index(f, path);
  }
  if (st != PS_OK) {
    ps_tensors_close(f);
    return st;
  }
  *out = f;
  return PS_OK;
}

void ps_tensors_close(ps_tensor_file *f) {
  if (!f) return;
  for (size_t i = 0; i < f->n; i++) ps__free(f->tensors[i].name);
  for (size_t i = 0; i < f->n_files; i++) {
    if (f->files[i].fd >= 0) close(f->files[i].fd);
    ps__free(f->files[i].path);
  }
  ps__free(f->tensors);
  ps__free(f->files);
  ps__free(f->by_name);
  ps__free(f);
}

/* ---- what is in it ------------------------------------------------------------------------------------------------------ */

uint64_t ps_tensors_count(const ps_tensor_file *f) { return f->n; }

ps_status ps_tensors_info(const ps_tensor_file *f, uint64_t idx, ps_tensor_info *out) {
  if (idx >= f->n) return ps__fail(PS_EINVAL, "tensor %" PRIu64 " was asked for: %s has %zu", idx, f->files[0].path, f->n);
  *out = f->tensors[idx].info;
  return PS_OK;
}

uint64_t ps_tensors_find(const ps_tensor_file *f, const char *name) {
  size_t lo = 0, hi = f->n;
  while (lo < hi) {
    size_t mid = lo + (hi - lo) / 2;
    int c = strcmp(name, f->tensors[f->by_name[mid]].name);
    if (c == 0) return f->by_name[mid];
    if (c < 0) hi = mid;
    else lo = mid + 1;
  }
  return UINT64_MAX;
}

/* ---- reading with conversion -------------------------------------------------------------------------------------------- */

static float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3FF, bits;
  if (exponent == 31) bits = sign | 0x7F800000 | fraction << 13;
  else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
  else if (!fraction) bits = sign;
  else { /* subnormal: shift the leading one out */
    int shift = __builtin_clz(fraction) - 21;
    bits = sign | (uint32_t)(113 - shift) << 23 | (fraction << shift & 0x3FF) << 13;
  }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static float bf16_to_f32(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

/* Round to nearest even; a NaN stays one. */
static uint16_t f32_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

enum { KIND_F32, KIND_BF16, KIND_F16 };

static void convert(const void *src, int kind, ps_dtype dtype, void *dst, size_t n) {
  const float *f = src;
  const uint16_t *h = src;
  for (size_t i = 0; i < n; i++) {
    float v = kind == KIND_F32 ? f[i] : kind == KIND_BF16 ? bf16_to_f32(h[i]) : f16_to_f32(h[i]);
    if (dtype == PS_F32) ((float *)dst)[i] = v;
    else ((uint16_t *)dst)[i] = f32_to_bf16(v);
  }
}

ps_status ps_tensors_read(ps_tensor_file *f, uint64_t idx, uint64_t first, uint64_t n, ps_dtype dtype, void *dst) {
  size_t to = ps_dtype_bytes(dtype);
  if (idx >= f->n) return ps__fail(PS_EINVAL, "tensor %" PRIu64 " was asked for: there are %zu", idx, f->n);
  const tensor *t = &f->tensors[idx];
  const data_file *d = &f->files[t->file];
  if (!to) return ps__fail(PS_EINVAL, "%s: tensor \"%s\": %d is no ps_dtype", d->path, t->name, (int)dtype);
  if (first > t->info.n || n > t->info.n - first)
    return ps__fail(PS_EINVAL, "%s: tensor \"%s\": elements %" PRIu64 " to %" PRIu64 " were asked for, it has %" PRIu64, d->path,
                    t->name, first, first + n, t->info.n);
  int kind = !strcmp(t->info.dtype, "F32") ? KIND_F32 : !strcmp(t->info.dtype, "BF16") ? KIND_BF16 : KIND_F16;
  if (kind == KIND_F16 && strcmp(t->info.dtype, "F16"))
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": dtype is %s, only F32, BF16 and F16 are converted", d->path, t->name, t->info.dtype);
  size_t from = kind == KIND_F32 ? 4 : 2;
  uint64_t at = t->begin + first * from;
  if ((kind == KIND_F32 && dtype == PS_F32) || (kind == KIND_BF16 && dtype == PS_BF16))
    return ps__pread_all(d->fd, d->path, dst, n * from, at);
  _Alignas(64) char piece[16384];
  for (uint64_t done = 0; done < n;) {
    uint64_t m = n - done < sizeof piece / from ? n - done : sizeof piece / from;
    PS_TRY(ps__pread_all(d->fd, d->path, piece, m * from, at + done * from));
    convert(piece, kind, dtype, (char *)dst + done * to, m);
    done += m;
  }
  return PS_OK;
}
