/* save.c - writes the model as a Hugging Face directory, as a whole or not at all (io/stage.c). */
#include "train/adapter.h"
#include "train/arrays.h"
#include "io/io.h"
#include "model/family.h"
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

static ps_status write_config(const ps_trainer *t, const ps__stage *stage, const char *dir,
                              ps_dtype dtype) {
  ps__jsonw *w;
  PS_TRY(ps__config_fill(&w, &t->plan->model->cfg, t->model_dir, dtype));
  const ps_status st = ps__stage_write_json(stage, dir, "config.json", w);
  ps__jsonw_free(w);
  return st;
}

/* Copies file @name of the model directory, where there is one. */
static ps_status copy_small(const ps_trainer *t, const ps__stage *stage, const char *dir,
                            const char *name) {
  char *from = NULL, *to = ps__path_join(dir, name);
  ps_status st = to ? ps__model_path(&from, t->model_dir, name)
                    : ps__fail(PS_ENOMEM, "%s: no memory left to write %s", dir, name);
  bool exists = false;
  if (st == PS_OK)
    st = ps__path_exists(from, &exists);
  struct stat sb;
  int in = -1, out = -1;
  if (st == PS_OK && exists)
    st = ps__open_input(&in, &sb, from);
  if (in >= 0)
    st = ps__stage_create(&out, stage, name, to);
  if (out >= 0)
    st = copy_bytes(in, (uint64_t)sb.st_size, from, out, to);
  if (out >= 0 && close(out) != 0 && st == PS_OK)
    st = ps__fail(PS_EIO, "%s: closing it failed: %s", to, strerror(errno));
  if (in >= 0)
    close(in);
  ps__free(from);
  ps__free(to);
  return st;
}

/* Copies the files of the model directory's folder of chat templates. */
static ps_status copy_templates(const ps_trainer *t, const ps__stage *stage, const char *dir) {
  char *from, name[NAME_MAX + sizeof PS__TEMPLATES + 1];
  struct stat sb;
  PS_TRY(ps__model_path(&from, t->model_dir, PS__TEMPLATES));
  DIR *d = opendir(from);
  ps_status st = d || errno == ENOENT || errno == ENOTDIR
                     ? PS_OK
                     : ps__fail(PS_EIO, "%s: cannot be read: %s", from, strerror(errno));
  errno = 0;
  for (const struct dirent *e; d && st == PS_OK && (e = readdir(d)); errno = 0) {
    if (e->d_name[0] == '.' || fstatat(dirfd(d), e->d_name, &sb, 0) != 0 || !S_ISREG(sb.st_mode))
      continue;
    snprintf(name, sizeof name, PS__TEMPLATES "/%s", e->d_name);
    st = copy_small(t, stage, dir, name);
  }
  if (d && st == PS_OK && errno)
    st = ps__fail(PS_EIO, "%s: cannot be read: %s", from, strerror(errno));
  if (d)
    closedir(d);
  ps__free(from);
  return st;
}

ps_status ps__trainer_write_config(ps_trainer *t, ps__stage *stage, const char *dir,
                                   ps_dtype dtype) {
  for (const char *const *name = ps__tokenizer_files; *name; name++)
    PS_TRY(copy_small(t, stage, dir, *name));
  PS_TRY(copy_templates(t, stage, dir));
  PS_TRY(copy_small(t, stage, dir, "generation_config.json"));
  PS_TRY(write_config(t, stage, dir, dtype));
  return ps__has_adapters(t) ? ps__adapter_write_config(t, stage, dir) : PS_OK;
}

/* Files of gpt-oss and Gemma 4 always have their experts fused. */
static bool is_always_fused(const ps_trainer *t) {
  const char *family = ps_model_family_name(t->plan->model->cfg.family);
  return !strcmp(family, "gpt_oss") || !strcmp(family, "gemma4_text");
}

/* Whether the model was read from files with fused experts: it is written as it was read. */
static bool was_fused(const ps_trainer *t) {
  ps_tensor_file *f;
  if (is_always_fused(t))
    return true;
  if (!t->plan->model->cfg.n_experts || ps_tensors_open(&f, t->model_dir) != PS_OK)
    return false;
  const bool fused = ps__tensors_fused(f);
  ps_tensors_close(f);
  return fused;
}

/* Asks @ready, NULL for yes. */
static ps_status ask(const ps__stage *stage, const char *dir, ps_ready_fn ready, void *user) {
  const ps_status st = ready ? ready(user, ps__stage_path(stage), ps__stage_target(stage)) : PS_OK;
  return st == PS_OK ? PS_OK : ps__fail(st, "%s: the caller does not let it be replaced", dir);
}

static ps_status save(ps_trainer *t, const char *dir, ps_dtype given, uint64_t max_shard_bytes,
                      ps_ready_fn ready, void *user) {
  ps__stage *stage;
  if (!t || !dir || !*dir)
    return ps__fail(PS_EINVAL, "ps_trainer_save: trainer and dir must be given");
  const bool mxfp4 = (uint32_t)given == PS_SAVE_MXFP4;
  PS_TRY(ps_model_config_saves_as(&t->plan->model->cfg, given));
  if (mxfp4 && ps__has_adapters(t))
    return ps__fail(PS_EINVAL, "mxfp4 is for a whole model: adapters are saved in bf16 or fp32");
  const ps_dtype dtype = mxfp4 ? PS_BF16 : given;
  PS_TRY(ps__trainer_idle(t));
  PS_TRY(ps__stage_open(&stage, dir));
  const ps__array weights = {ps__weights_stem(t), dtype, PS__ARRAY_UPDATED};
  ps__output o = {.stage = stage,
                  .dir = dir,
                  .array = &weights,
                  .n_arrays = 1,
                  .fused = !ps__has_adapters(t) && was_fused(t),
                  .merged = !ps__has_adapters(t),
                  .mxfp4 = mxfp4,
                  .max_file_bytes = max_shard_bytes};
  ps_status st = ps__trainer_write_config(t, stage, dir, given);
  if (st == PS_OK)
    st = ps__stage_write_record(stage, dir);
  if (st == PS_OK)
    st = ps__trainer_write_arrays(t, &o);
  ps__free(o.hashed);
  if (st == PS_OK && mxfp4)
    ps__log(PS_LOG_WARN,
            "%s: experts are saved in MXFP4, which changes their weights by %.2f%% (root mean "
            "square, of theirs)",
            dir, 100 * o.rounding);
  if (st == PS_OK)
    st = ask(stage, dir, ready, user);
  if (st == PS_OK)
    return ps__stage_commit(stage);
  ps__stage_abort(stage);
  return st;
}

static const uint64_t MAX_SHARD_BYTES = 5000000000;

ps_status ps__trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype,
                           uint64_t max_shard_bytes) {
  return save(t, dir, dtype, max_shard_bytes, NULL, NULL);
}

ps_status ps_trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype) {
  return save(t, dir, dtype, MAX_SHARD_BYTES, NULL, NULL);
}

ps_status ps_trainer_save_when(ps_trainer *t, const char *dir, ps_dtype dtype, ps_ready_fn ready,
                               void *user) {
  return save(t, dir, dtype, MAX_SHARD_BYTES, ready, user);
}

ps_status ps_model_dir_tidy(const char *dir) {
  if (!dir || !*dir)
    return ps__fail(PS_EINVAL, "ps_model_dir_tidy: dir must be given");
  return ps__stage_tidy(dir);
}
