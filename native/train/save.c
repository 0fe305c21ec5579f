/* save.c - writes the model as a Hugging Face directory, as a whole or not at all (io/stage.c).
 * config.json gets the dtype of the saved tensors, because readers convert tensors to the dtype
 * that config.json names. */
#include "train/trainer.h"
#include "io/io.h"
#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE = 1 << 20 /* elements converted at a time */ };

/* ---- tensors --------------------------------------------------------------------------------- */

static ps_status append_param(ps_trainer *t, ps_tensor_writer *w, const ps_param_info *p,
                              ps_dtype dtype, void *buffer) {
  const ps_dtype from = ps__master_dtype(t, p->unit);
  const char *src = ps__master_at(t, p->unit, p->offset);
  for (uint64_t first = 0; first < p->n; first += PIECE) {
    const uint64_t n = p->n - first < PIECE ? p->n - first : PIECE;
    const void *data = src + first * ps_dtype_bytes(from);
    if (dtype != from)
      ps__convert(buffer, dtype, data, from, n);
    PS_TRY(ps_tensors_append(w, dtype == from ? data : buffer, n * ps_dtype_bytes(dtype)));
  }
  return PS_OK;
}

static ps_status save_tensors(ps_trainer *t, ps__stage *stage, const char *dir, ps_dtype dtype,
                              uint64_t max_shard_bytes) {
  const uint32_t n = t->plan->model->n_params;
  const ps_param_info *params = t->plan->model->param;
  ps_tensor_spec *specs = ps__calloc(n, sizeof *specs);
  void *buffer = ps__malloc(4ull * PIECE);
  ps_tensor_writer *w = NULL;
  ps_status st = specs && buffer ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for saving");
  for (uint32_t i = 0; st == PS_OK && i < n; i++)
    specs[i] = (ps_tensor_spec){.name = params[i].name,
                                .dtype = dtype,
                                .n_dims = params[i].n_dims,
                                .shape = {params[i].shape[0], params[i].shape[1]}};
  if (st == PS_OK)
    st = ps__tensors_create(&w, stage, dir, "model", specs, n, max_shard_bytes, NULL, 0);
  if (st == PS_OK) {
    for (uint32_t i = 0; st == PS_OK && i < n; i++)
      st = append_param(t, w, &params[i], dtype, buffer);
    if (st == PS_OK)
      st = ps_tensors_finish(w);
    else
      ps_tensors_abort(w);
  }
  ps__free(specs);
  ps__free(buffer);
  return st;
}

/* ---- small files ----------------------------------------------------------------------------- */

static ps_status copy_bytes(int in, uint64_t size, const char *from, int out, const char *to) {
  char buffer[16384];
  for (uint64_t at = 0; at < size;) {
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
    write_value(w, ps__json_type(j) == PS_JSON_OBJECT ? ps__json_key(j, i) : NULL,
                ps__json_at(j, i));
  ps__jsonw_end(w);
}

static void write_value(ps__jsonw *w, const char *key, const ps__json *j) {
  switch (ps__json_type(j)) {
  case PS_JSON_OBJECT:
    ps__jsonw_object(w, key);
    write_children(w, j);
    break;
  case PS_JSON_ARRAY:
    ps__jsonw_array(w, key);
    write_children(w, j);
    break;
  case PS_JSON_STRING: ps__jsonw_string(w, key, ps__json_string(j, NULL)); break;
  case PS_JSON_BOOL: ps__jsonw_bool(w, key, ps__json_bool(j, false)); break;
  case PS_JSON_NUMBER: ps__jsonw_number_text(w, key, ps__json_number_text(j)); break;
  default: ps__jsonw_number(w, key, NAN); break; /* null */
  }
}

static bool is_dtype_key(const char *key) {
  return strcmp(key, "torch_dtype") == 0 || strcmp(key, "dtype") == 0;
}

/* Copies config.json. The dtype of the saved tensors replaces its torch_dtype or dtype. */
static ps_status write_config(const char *from, int out, const char *to, ps_dtype dtype) {
  ps__json *config = NULL;
  ps__jsonw *w = NULL;
  const char *const name = ps__dtypes[dtype].torch_name;
  bool named = false;
  PS_TRY(ps__json_read_file(&config, from, PS__MAX_CONFIG_BYTES));
  ps_status st = ps__jsonw_create(&w);
  if (st == PS_OK) {
    ps__jsonw_object(w, NULL);
    for (size_t i = 0; i < ps__json_length(config); i++) {
      const char *key = ps__json_key(config, i);
      if (is_dtype_key(key))
        ps__jsonw_string(w, key, name);
      else
        write_value(w, key, ps__json_at(config, i));
      named |= is_dtype_key(key);
    }
    if (!named)
      ps__jsonw_string(w, "torch_dtype", name);
    ps__jsonw_end(w);
    size_t n;
    const char *text = ps__jsonw_text(w, &n);
    st = text ? ps__write_all(out, to, text, n) : ps__fail(PS_ENOMEM, "out of memory for %s", to);
    if (st == PS_OK)
      st = ps__sync(out, to);
    ps__jsonw_free(w);
  }
  ps__json_free(config);
  return st;
}

/* Copies the model directory's file @name, config.json with @dtype. Only config.json must exist. */
static ps_status copy_small(ps_trainer *t, ps__stage *stage, const char *dir, const char *name,
                            ps_dtype dtype) {
  const bool config = strcmp(name, "config.json") == 0;
  char *from = NULL, *to = ps__path_join(dir, name);
  ps_status st = to ? ps__model_path(&from, t->model_dir, name) : PS_ENOMEM;
  bool exists = config;
  if (st == PS_OK && !config)
    st = ps__path_exists(from, &exists);
  struct stat sb;
  int in = -1, out = -1;
  if (st == PS_OK && exists)
    st = ps__open_input(&in, &sb, from);
  if (in >= 0)
    st = ps__stage_create(&out, stage, name, to);
  if (out >= 0)
    st = config ? write_config(from, out, to, dtype)
                : copy_bytes(in, (uint64_t)sb.st_size, from, out, to);
  if (out >= 0 && close(out) != 0 && st == PS_OK)
    st = ps__fail(PS_EIO, "%s: closing it failed: %s", to, strerror(errno));
  if (in >= 0)
    close(in);
  ps__free(from);
  ps__free(to);
  return st;
}

ps_status ps__trainer_write_model(ps_trainer *t, ps__stage *stage, const char *dir, ps_dtype dtype,
                                  uint64_t max_shard_bytes) {
  for (const char *const *name = ps__tokenizer_files; *name; name++)
    PS_TRY(copy_small(t, stage, dir, *name, dtype));
  PS_TRY(copy_small(t, stage, dir, "generation_config.json", dtype));
  PS_TRY(copy_small(t, stage, dir, "config.json", dtype));
  return save_tensors(t, stage, dir, dtype, max_shard_bytes);
}

ps_status ps__trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype,
                           uint64_t max_shard_bytes) {
  ps__stage *stage;
  if (!t || !dir || !*dir || ps_dtype_bytes(dtype) == 0)
    return ps__fail(PS_EINVAL, "ps_trainer_save: trainer, dir and a known dtype must be given");
  PS_TRY(ps__trainer_idle(t));
  PS_TRY(ps__stage_open(&stage, dir));
  const ps_status st = ps__trainer_write_model(t, stage, dir, dtype, max_shard_bytes);
  if (st == PS_OK)
    return ps__stage_commit(stage);
  ps__stage_abort(stage);
  return st;
}

ps_status ps_trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype) {
  return ps__trainer_save(t, dir, dtype, 5000000000ull);
}
