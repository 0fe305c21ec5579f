/* save.c - the model as a Hugging Face directory: all of it, or nothing.
 *
 * A directory that does not exist yet is written under a temporary name beside it and renamed when complete. Into one that
 * exists (a run's own folder, an earlier save) every file is first written whole under a temporary name; then the tensors take
 * their final names (ps_tensors_finish: the old model, the new one, or for a moment none, never a mixture), then the small
 * files, config.json last. config.json says the dtype that the tensors have: a reader that trusts it would round them otherwise. */
#include "trainer.h"
#include "io/io.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE = 1 << 20 /* elements converted at a time */, MAX_PATH = 4096 };

/* What goes along from the model directory where it is there; config.json must be. */
static const char *const small_file[] = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
                                         "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja",
                                         "config.json"};
enum { N_SMALL = sizeof small_file / sizeof *small_file };

/* ---- tensors -------------------------------------------------------------------------------------------------------------------- */

static ps_status append_param(ps_trainer *t, ps_tensor_writer *w, const ps_param_info *p, ps_dtype dtype, void *buffer) {
  bool fp32;
  const char *src = ps__truth(t, p->unit, p->offset, &fp32);
  for (uint64_t first = 0; first < p->n; first += PIECE) {
    const uint64_t n = p->n - first < PIECE ? p->n - first : PIECE;
    const void *data = src + first * (fp32 ? 4 : 2);
    if (fp32 && dtype == PS_BF16) ps__convert_f32_to_bf16(buffer, data, n);
    if (!fp32 && dtype == PS_F32) ps__convert_bf16_to_f32(buffer, data, n);
    PS_TRY(ps_tensors_append(w, fp32 == (dtype == PS_F32) ? data : buffer, n * ps_dtype_bytes(dtype)));
  }
  return PS_OK;
}

static ps_status save_tensors(ps_trainer *t, const char *dir, ps_dtype dtype) {
  const ps_model_config *m = &t->plan->model;
  const uint32_t n = ps_model_n_params(m);
  ps_param_info *params = ps__calloc(n, sizeof *params);
  ps_tensor_spec *specs = ps__calloc(n, sizeof *specs);
  void *buffer = ps__malloc(4ull * PIECE);
  ps_tensor_writer *w = NULL;
  ps_status st = params && specs && buffer ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for saving");
  for (uint32_t i = 0; st == PS_OK && i < n; i++) {
    st = ps_model_param(m, i, &params[i]);
    specs[i] = (ps_tensor_spec){.name = params[i].name, .dtype = dtype, .n_dims = params[i].n_dims,
                                .shape = {params[i].shape[0], params[i].shape[1]}};
  }
  if (st == PS_OK) st = ps_tensors_create(&w, dir, "model", specs, n, 5000000000ull, NULL, 0);
  if (st == PS_OK) {
    for (uint32_t i = 0; st == PS_OK && i < n; i++) st = append_param(t, w, &params[i], dtype, buffer);
    if (st == PS_OK) st = ps_tensors_finish(w);
    else ps_tensors_abort(w);
  }
  ps__free(params);
  ps__free(specs);
  ps__free(buffer);
  return st;
}

/* ---- small files ---------------------------------------------------------------------------------------------------------------- */

static ps_status small_path(char path[MAX_PATH], const char *dir, uint32_t i, bool partial) {
  const int n = snprintf(path, MAX_PATH, partial ? "%s/.%s.part" : "%s/%s", dir, small_file[i]);
  return n < MAX_PATH ? PS_OK : ps__fail(PS_EINVAL, "%.200s...: the path is too long", dir);
}

static ps_status copy_bytes(int in, const char *from, int out, const char *to) {
  char buffer[16384];
  struct stat sb;
  if (fstat(in, &sb) != 0) return ps__fail(PS_EIO, "%s: cannot be looked at: %s", from, strerror(errno));
  for (uint64_t at = 0, size = (uint64_t)sb.st_size; at < size;) {
    const uint64_t n = size - at < sizeof buffer ? size - at : sizeof buffer;
    PS_TRY(ps__pread_all(in, from, buffer, n, at));
    PS_TRY(ps__write_all(out, to, buffer, n));
    at += n;
  }
  return ps__sync(out, to);
}

static void write_value(ps__jsonw *w, const char *key, const ps__json *j);

static void write_children(ps__jsonw *w, const ps__json *j) {
  for (size_t i = 0; i < ps__json_length(j); i++)
    write_value(w, ps__json_type(j) == PS_JSON_OBJECT ? ps__json_key(j, i) : NULL, ps__json_at(j, i));
  ps__jsonw_end(w);
}

static void write_value(ps__jsonw *w, const char *key, const ps__json *j) {
  uint64_t whole;
  switch (ps__json_type(j)) {
    case PS_JSON_OBJECT: ps__jsonw_object(w, key); write_children(w, j); break;
    case PS_JSON_ARRAY: ps__jsonw_array(w, key); write_children(w, j); break;
    case PS_JSON_STRING: ps__jsonw_string(w, key, ps__json_string(j, NULL)); break;
    case PS_JSON_BOOL: ps__jsonw_bool(w, key, ps__json_bool(j, false)); break;
    case PS_JSON_NUMBER:
      if (ps__json_uint64(j, &whole)) ps__jsonw_uint(w, key, whole);
      else ps__jsonw_number(w, key, ps__json_number(j, 0));
      break;
    default: ps__jsonw_number(w, key, NAN); break; /* null */
  }
}

static bool is_dtype_key(const char *key) { return strcmp(key, "torch_dtype") == 0 || strcmp(key, "dtype") == 0; }

/* config.json of @from with the dtype of the saved tensors under whichever of its two names is in use. */
static ps_status write_config(const char *from, int out, const char *to, ps_dtype dtype) {
  ps__json *config = NULL;
  ps__jsonw *w = NULL;
  const char *const name = dtype == PS_BF16 ? "bfloat16" : "float32";
  bool named = false;
  PS_TRY(ps__json_read_file(&config, from, PS__MAX_CONFIG_BYTES));
  ps_status st = ps__jsonw_create(&w);
  if (st == PS_OK) {
    ps__jsonw_object(w, NULL);
    for (size_t i = 0; i < ps__json_length(config); i++) {
      const char *key = ps__json_key(config, i);
      if (is_dtype_key(key)) ps__jsonw_string(w, key, name);
      else write_value(w, key, ps__json_at(config, i));
      named |= is_dtype_key(key);
    }
    if (!named) ps__jsonw_string(w, "torch_dtype", name);
    ps__jsonw_end(w);
    size_t n;
    const char *text = ps__jsonw_text(w, &n);
    st = text ? ps__write_all(out, to, text, n) : ps__fail(PS_ENOMEM, "out of memory for %s", to);
    if (st == PS_OK) st = ps__sync(out, to);
    ps__jsonw_free(w);
  }
  ps__json_free(config);
  return st;
}

/* Copy small file @i under its temporary name; *made says whether there is such a file now. */
static ps_status copy_small(const char *from_dir, const char *to_dir, uint32_t i, ps_dtype dtype, bool *made) {
  char from[MAX_PATH], to[MAX_PATH];
  PS_TRY(small_path(from, from_dir, i, false));
  PS_TRY(small_path(to, to_dir, i, true));
  int in;
  struct stat sb;
  if (i + 1 < N_SMALL && access(from, F_OK) != 0 && errno == ENOENT) return PS_OK;
  PS_TRY(ps__open_input(&in, &sb, from));
  const int out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  *made = out >= 0;
  ps_status st = out < 0 ? ps__fail(PS_EIO, "%s: cannot be written: %s", to, strerror(errno))
                 : i + 1 < N_SMALL ? copy_bytes(in, from, out, to) : write_config(from, out, to, dtype);
  if (out >= 0 && close(out) != 0 && st == PS_OK) st = ps__fail(PS_EIO, "%s: closing it failed: %s", to, strerror(errno));
  close(in);
  return st;
}

/* The temporary file @i takes its final name, or goes. */
static ps_status end_small(const char *dir, uint32_t i, bool keep) {
  char part[MAX_PATH], final[MAX_PATH];
  PS_TRY(small_path(part, dir, i, true));
  PS_TRY(small_path(final, dir, i, false));
  const ps_status st = keep ? ps__rename(part, final) : PS_OK;
  if (!keep || st != PS_OK) unlink(part);
  return st;
}

/* ---- directories ---------------------------------------------------------------------------------------------------------------- */

static bool same_dir(const char *a, const char *b) {
  struct stat x, y;
  return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static ps_status save_into(ps_trainer *t, const char *dir, ps_dtype dtype) {
  bool made[N_SMALL] = {false};
  ps_status st = PS_OK;
  const uint32_t first = same_dir(dir, t->model_dir) ? N_SMALL - 1 : 0; /* the others are there already */
  for (uint32_t i = first; st == PS_OK && i < N_SMALL; i++) st = copy_small(t->model_dir, dir, i, dtype, &made[i]);
  if (st == PS_OK) st = save_tensors(t, dir, dtype);
  for (uint32_t i = 0; i < N_SMALL; i++) {
    const ps_status end = made[i] ? end_small(dir, i, st == PS_OK) : PS_OK;
    if (st == PS_OK) st = end;
  }
  return st == PS_OK ? ps__sync_dir(dir) : st;
}

static void remove_stage(const char *dir) {
  DIR *d = opendir(dir);
  if (!d) return;
  for (struct dirent *e; (e = readdir(d));) unlinkat(dirfd(d), e->d_name, 0); /* fails for . and .. */
  closedir(d);
  rmdir(dir);
}

/* The temporary directory beside @dir: one that was not there, since a save that was cut off may have left its own. */
static ps_status make_stage(char stage[MAX_PATH], const char *dir) {
  for (int i = 0; i < 1000; i++) {
    if (snprintf(stage, MAX_PATH, "%s.part%d", dir, i) >= MAX_PATH) return ps__fail(PS_EINVAL, "%.200s...: the path is too long", dir);
    if (mkdir(stage, 0777) == 0) return PS_OK;
    if (errno != EEXIST) break;
  }
  return ps__fail(PS_EIO, "%s: cannot be made: %s", dir, strerror(errno));
}

static ps_status save_new(ps_trainer *t, const char *dir, ps_dtype dtype) {
  char stage[MAX_PATH];
  PS_TRY(make_stage(stage, dir));
  ps_status st = save_into(t, stage, dtype);
  if (st == PS_OK) st = ps__rename(stage, dir);
  if (st != PS_OK) {
    remove_stage(stage);
    return st;
  }
  char *slash = strrchr(stage, '/'); /* the directory that the name is in */
  if (slash) slash[slash == stage] = 0;
  return ps__sync_dir(slash ? stage : ".");
}

ps_status ps_trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype) {
  char plain[MAX_PATH];
  struct stat sb;
  if (!t || !dir || !*dir || ps_dtype_bytes(dtype) == 0)
    return ps__fail(PS_EINVAL, "ps_trainer_save: trainer, dir and a known dtype must be given");
  PS_TRY(ps__trainer_idle(t));
  size_t n = strlen(dir);
  if (n >= sizeof plain) return ps__fail(PS_EINVAL, "%.200s...: the path is too long", dir);
  memcpy(plain, dir, n + 1);
  while (n > 1 && plain[n - 1] == '/') plain[--n] = 0;
  if (stat(plain, &sb) != 0) return errno == ENOENT ? save_new(t, plain, dtype) : ps__fail(PS_EIO, "%s: %s", plain, strerror(errno));
  if (!S_ISDIR(sb.st_mode)) return ps__fail(PS_EIO, "%s: is a file: a model is saved into a directory", plain);
  return save_into(t, plain, dtype);
}
