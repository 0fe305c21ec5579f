/* resume.c - opens checkpoints and checks them, and reads them into a new trainer. */
#include "train/resume.h"
#include "io/tower.h"
#include "train/adapter.h"
#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>

enum { PIECE_BYTES = 4 << 20 };

/* ---- opening --------------------------------------------------------------------------------- */

static ps_status bad_entry(const char *path, const char *key) {
  return ps__fail(PS_EFORMAT, "%s: \"%s\" is missing or has another type: the manifest is damaged",
                  path, key);
}

static bool read_setting(const ps__json *value, const ps__setting *s, void *at) {
  uint64_t n;
  const double x = value ? ps__json_number(value, NAN) : NAN;
  if (!value || (ps__json_type(value) != PS_JSON_NUMBER && ps__json_type(value) != PS_JSON_NULL))
    return false;
  switch (s->kind) {
  case PS__F64: *(double *)at = x; return true;
  case PS__I32:
    if (!(x >= -1 && x <= INT32_MAX && x == floor(x)))
      return false;
    *(int32_t *)at = (int32_t)x;
    return true;
  default:
    if (!ps__json_uint64(value, &n) || (s->kind == PS__U32 && n > UINT32_MAX))
      return false;
    if (s->kind == PS__U32)
      *(uint32_t *)at = (uint32_t)n;
    else
      *(uint64_t *)at = n;
    return true;
  }
}

static ps_status read_settings(const ps__json *j, const char *path, const ps__setting *s,
                               void *base) {
  for (; s->key; s++) {
    const ps__json *value = ps__json_get(j, s->key);
    if (!(s->newer && !value) && !read_setting(value, s, (char *)base + s->offset))
      return bad_entry(path, s->key);
  }
  return PS_OK;
}

static ps_status read_count(const ps__json *j, const char *path, const char *key, uint64_t *out) {
  const ps__json *value = ps__json_get(j, key);
  return value && ps__json_uint64(value, out) ? PS_OK : bad_entry(path, key);
}

static ps_status read_names(ps_checkpoint *c, const ps__json *j, const char *path) {
  const char *recipe = ps__json_string(ps__json_get(j, "recipe"), NULL),
             *optimizer = ps__json_string(ps__json_get(j, "optimizer"), NULL);
  ps_optimizer o;
  c->of.info.recipe = 0;
  while (recipe && c->of.info.recipe < PS_N_RECIPES &&
         strcmp(ps__recipes[c->of.info.recipe].name, recipe) != 0)
    c->of.info.recipe++;
  if (!recipe || c->of.info.recipe == PS_N_RECIPES)
    return bad_entry(path, "recipe");
  if (ps__json_get(j, "state_bits")) {
    uint64_t bits;
    PS_TRY(read_count(j, path, "state_bits", &bits));
    if (bits != 8)
      return bad_entry(path, "state_bits");
    c->of.info.state_bits = 8;
  }
  if (!optimizer || ps_optimizer_parse(&o, optimizer) != PS_OK)
    return bad_entry(path, "optimizer");
  c->of.info.optimizer = o;
  return PS_OK;
}

static ps_status read_manifest(ps_checkpoint *c, const ps__json *j, const char *path) {
  uint64_t version;
  const char *format = ps__json_string(ps__json_get(j, "format"), NULL);
  if (!format || strcmp(format, "penstock checkpoint") != 0)
    return ps__fail(PS_EFORMAT, "%s: is no checkpoint's manifest", path);
  PS_TRY(read_count(j, path, "version", &version));
  if (version != 1)
    return ps__fail(PS_EFORMAT,
                    "%s: is of version %llu, and version 1 is read: take the penstock "
                    "that wrote it",
                    path, (unsigned long long)version);
  PS_TRY(read_count(j, path, "serial", &c->serial));
  c->run_id = ps__manifest_run_id(j);
  PS_TRY(read_count(j, path, "step", &c->of.info.step));
  PS_TRY(read_count(j, path, "n_updates", &c->of.info.n_updates));
  if (c->of.info.n_updates > c->of.info.step || (c->of.info.step && !c->of.info.n_updates))
    return ps__fail(PS_EFORMAT,
                    "%s: \"n_updates\" is %llu after %llu steps: the manifest is damaged", path,
                    (unsigned long long)c->of.info.n_updates, (unsigned long long)c->of.info.step);
  const char *base = ps__json_string(ps__json_get(j, "base_sha256"), NULL);
  snprintf(c->base_hash, sizeof c->base_hash, "%s", base ? base : "");
  if (ps__json_get(j, "n_skipped")) /* older checkpoints count none */
    PS_TRY(read_count(j, path, "n_skipped", &c->of.info.n_skipped));
  c->of.info.grad_norm = ps__json_number(ps__json_get(j, "grad_norm"), NAN);
  PS_TRY(read_count(j, path, "sequences_read", &c->sequences_read));
  PS_TRY(read_names(c, j, path));
  const ps__json *batch = ps__json_get(j, "batch");
  /* Older checkpoints have no first_rounds: only the first round was larger. They have no
   * fp8_fast_accumulation either: all trainings in FP8 had it, but for those with fp8_exact. */
  c->of.info.first_rounds = 1;
  c->of.info.fp8_fast_accumulation = ps__recipes[c->of.info.recipe].fp8 &&
                                     ps__json_number(ps__json_get(batch, "fp8_exact"), 0) != 1;
  if (ps__json_number(ps__json_get(batch, "fp8_saved_gate_up"), 0) != 0)
    return ps__fail(
        PS_EFORMAT,
        "%s was written with fp8-saved-gate-up, which this version has no more: begin a "
        "new run with %s %s",
        c->dir, ps__field("model_dir"), c->dir);
  PS_TRY(read_settings(batch, path, ps__batch_settings, &c->of));
  PS_TRY(read_settings(ps__json_get(j, "training"), path, ps__train_settings, &c->of));
  PS_TRY(ps__data_read(c, j, path));
  return ps__manifest_check(j, path, c->dir, &c->of.info.bytes);
}

static ps_status check_listed(const ps__json *manifest, const char *dir, const char *name) {
  return ps__manifest_lists(manifest, name)
             ? PS_OK
             : ps__fail(PS_EFORMAT,
                        "%s: " PS__MANIFEST " does not list %s, which a checkpoint needs: the "
                        "manifest is damaged, or the file was put there later",
                        dir, name);
}

/* Open the arrays of a stem, which are all of @dtype, those of other parts than the text model
 * and correction biases, which are exact, apart, and in files that the manifest lists. */
static ps_status open_listed(ps_tensor_file **out, const ps_checkpoint *c, const ps__json *manifest,
                             const char *stem, ps_dtype dtype) {
  const char *const needed = ps__dtypes[dtype].file_name, *path;
  char single[64], index[80];
  ps_tensor_file *f;
  ps_tensor_info info;
  PS_TRY(ps__tensors_open(&f, c->dir, stem));
  ps_status st = PS_OK;
  snprintf(single, sizeof single, "%s.safetensors", stem);
  snprintf(index, sizeof index, "%.63s.index.json", single);
  for (uint64_t k = 0; st == PS_OK && (path = ps__tensors_path(f, k)); k++) {
    const char *name = strrchr(path, '/') + 1;
    st = check_listed(manifest, c->dir, name);
    if (st == PS_OK && strcmp(name, single) != 0)
      st = check_listed(manifest, c->dir, index);
  }
  for (uint64_t i = 0; st == PS_OK && i < ps_tensors_count(f); i++) {
    st = ps_tensors_info(f, i, &info);
    if (st == PS_OK && ps__name_is_of_text(info.name) && strcmp(info.dtype, needed) != 0 &&
        !strstr(info.name, ".e_score_correction_bias"))
      st = ps__fail(
          PS_EFORMAT, "%s: tensor %.200s of %s is %s, and a checkpoint of recipe %s has %s there",
          c->dir, info.name, stem, info.dtype, ps__recipes[c->of.info.recipe].name, needed);
  }
  if (st == PS_OK)
    *out = f;
  else
    ps_tensors_close(f);
  return st;
}

static uint32_t row_of(const ps_checkpoint *c) {
  return ps__row_of(c->of.info.recipe, c->of.info.state_bits);
}

static ps_status open_arrays(ps_checkpoint *c, const ps__json *manifest) {
  ps_tensor_file *weights;
  PS_TRY(check_listed(manifest, c->dir, "config.json"));
  if (c->of.info.lora.rank)
    PS_TRY(check_listed(manifest, c->dir, "adapter_config.json"));
  PS_TRY(open_listed(&weights, c, manifest, c->of.info.lora.rank ? "adapter_model" : "model",
                     ps__updated_dtype(row_of(c))));
  ps_tensors_close(weights);
  for (uint32_t k = 0; k < ps__optimizers[c->of.info.optimizer].n_states; k++)
    PS_TRY(open_listed(&c->state[k], c, manifest, ps__state_names[c->of.info.optimizer][k],
                       ps__state_dtype(row_of(c), k)));
  return PS_OK;
}

static ps_status open_checked(ps_checkpoint *c) {
  char *path;
  ps__json *j = NULL;
  struct stat sb;
  if (stat(c->dir, &sb) != 0)
    return ps__fail(PS_EIO, "%s: cannot be read: %s", c->dir, strerror(errno));
  if (!S_ISDIR(sb.st_mode))
    return ps__fail(PS_EFORMAT, "%s: is no directory, and a checkpoint is one", c->dir);
  PS_TRY(ps__model_path(&path, c->dir, PS__MANIFEST));
  ps_status st = PS_OK;
  if (stat(path, &sb) != 0)
    st = ps__fail(errno == ENOENT ? PS_EFORMAT : PS_EIO, "%s: cannot be read: %s", path,
                  strerror(errno));
  if (st == PS_OK)
    st = ps__json_read_file(&j, path, PS__MAX_MANIFEST_BYTES);
  if (st == PS_OK)
    st = read_manifest(c, j, path);
  if (st == PS_OK)
    st = open_arrays(c, j);
  ps__json_free(j);
  ps__free(path);
  return st;
}

ps_status ps_checkpoint_open(ps_checkpoint **out, const char *dir) {
  if (!out || !dir || !*dir)
    return ps__fail(PS_EINVAL, "ps_checkpoint_open: out and dir must be given");
  ps_checkpoint *c = ps__calloc(1, sizeof *c);
  if (!c || !(c->dir = ps__strdup(dir))) {
    ps__free(c);
    return ps__fail(PS_ENOMEM, "%s: no memory left to open it", dir);
  }
  c->of.info.struct_bytes = sizeof c->of.info;
  c->of.info.n_hosts = 1; /* of older ones, whose manifests do not say it */
  ps_train_config_init(&c->of.train);
  const ps_status st = open_checked(c);
  if (st == PS_OK)
    *out = c;
  else
    ps_checkpoint_close(c);
  return st;
}

void ps_checkpoint_close(ps_checkpoint *c) {
  if (!c)
    return;
  for (uint32_t k = 0; k < PS_MAX_STATES; k++)
    ps_tensors_close(c->state[k]);
  ps__free(c->data);
  ps__free(c->dir);
  ps__free(c);
}

const char *ps_checkpoint_dir(const ps_checkpoint *c) { return c ? c->dir : ""; }

ps_status ps_checkpoint_get_info(const ps_checkpoint *c, ps_checkpoint_info *out) {
  if (!c || !out || out->struct_bytes != sizeof *out)
    return ps__fail(PS_EINVAL, "ps_checkpoint_get_info: checkpoint and out with its struct_bytes "
                               "must be given");
  *out = c->of.info;
  return PS_OK;
}

ps_status ps_checkpoint_config(const ps_checkpoint *c, ps_train_config *cfg) {
  if (!c || !cfg)
    return ps__fail(PS_EINVAL, "ps_checkpoint_config: checkpoint and cfg must be given");
  *cfg = c->of.train;
  return PS_OK;
}

/* ---- may it go on? --------------------------------------------------------------------------- */

static double value_of(const ps__setting *s, const void *base) {
  const void *at = (const char *)base + s->offset;
  switch (s->kind) {
  case PS__U32: return *(const uint32_t *)at;
  case PS__I32: return *(const int32_t *)at;
  case PS__U64: return (double)*(const uint64_t *)at;
  default: return *(const double *)at;
  }
}

static bool same_value(const ps__setting *s, const void *a, const void *b) {
  const double x = value_of(s, a), y = value_of(s, b);
  if (s->kind == PS__U64)
    return *(const uint64_t *)(const void *)((const char *)a + s->offset) ==
           *(const uint64_t *)(const void *)((const char *)b + s->offset);
  return x == y || (isnan(x) && isnan(y));
}

/* The name of the field that lets a new run begin from the checkpoint's weights. */
static const char *begin_with(const ps_checkpoint *c) {
  return ps__field(c->of.info.lora.rank ? "adapter_dir" : "model_dir");
}

/* Refuse what differs and must not. */
static ps_status check_fixed(const ps_checkpoint *c, const ps__setting *s, const void *now,
                             const void *then) {
  char was[PS__SETTING_TEXT], is[PS__SETTING_TEXT];
  while (s->key && (!s->fixed || same_value(s, now, then)))
    s++;
  if (!s->key)
    return PS_OK;
  ps__setting_text(was, s, then);
  ps__setting_text(is, s, now);
  return ps__fail(PS_EINVAL,
                  "%s was written with %s %s, and this run has %s: give the checkpoint's, or begin "
                  "a new run with %s %s",
                  c->dir, s->option, was, is, begin_with(c), c->dir);
}

/* Refuse hosts that cannot train all sequences of the checkpoint's steps: each has equally many. */
static ps_status check_hosts(const ps_checkpoint *c, const ps_checkpoint_info *now) {
  const ps_checkpoint_info *then = &c->of.info;
  const uint64_t n = now->seq_len ? then->tokens_per_step / now->seq_len : 0;
  if (now->seq_len != then->seq_len || now->tokens_per_step == then->tokens_per_step ||
      n % now->n_hosts == 0)
    return PS_OK;
  return ps__fail(PS_EINVAL,
                  "%s was written with %llu sequences a step, which %u hosts cannot share equally: "
                  "give a number of hosts that divides them",
                  c->dir, (unsigned long long)n, now->n_hosts);
}

/* Report what differs and may. */
static void report_changes(const ps_checkpoint *c, const ps__setting *s, const void *now,
                           const void *then) {
  char was[PS__SETTING_TEXT], is[PS__SETTING_TEXT];
  for (; s->key; s++) {
    if (s->fixed || same_value(s, now, then))
      continue;
    ps__setting_text(was, s, then);
    ps__setting_text(is, s, now);
    ps__log(PS_LOG_WARN,
            "%s was written with %s %s, and this run has %s: it goes on with other bits than the "
            "run that was not stopped",
            c->dir, s->option, was, is);
  }
}

ps_status ps__resume_check_names(const ps_plan *plan, const ps_checkpoint *c, bool convert) {
  const ps_plan_config *cfg = &plan->cfg;
  const ps__recipe *now = &ps__recipes[ps__plan_row(cfg)], *then = &ps__recipes[row_of(c)];
  if (now != then && !convert)
    return ps__fail(PS_EINVAL,
                    "%s was written with recipe %s%s, and this run has %s%s: give the "
                    "checkpoint's, convert with %s, or begin a new run with %s %s",
                    c->dir, then->name, then->state_bits ? " and state in 8 bits" : "", now->name,
                    now->state_bits ? " and state in 8 bits" : "", ps__field("convert_state"),
                    begin_with(c), c->dir);
  if (cfg->optimizer != c->of.info.optimizer)
    return ps__fail(PS_EINVAL,
                    "%s was written with optimizer %s, and this run has %s: give the checkpoint's, "
                    "or begin a new run with %s %s",
                    c->dir, ps_optimizer_name((ps_optimizer)c->of.info.optimizer),
                    ps_optimizer_name((ps_optimizer)cfg->optimizer), begin_with(c), c->dir);
  return PS_OK;
}

/* The states k in 8 bits: every trained parameter has its blocks, and there is nothing else. */
static ps_status check_blocks(const ps_trainer *t, const ps_checkpoint *c, uint32_t k) {
  const ps_model *m = t->plan->model;
  const ps__storage as = ps__recipes[row_of(c)].state[k];
  uint64_t n = 0;
  for (uint32_t i = 0; i < m->n_params; i++) {
    ps_tensor_info info;
    const uint64_t bytes = ps__stored_bytes(as, m->param[i].n),
                   idx = ps_tensors_find(c->state[k], m->param[i].name);
    if (m->unit[m->param[i].unit].frozen)
      continue;
    n++;
    if (idx == UINT64_MAX)
      return ps__fail(PS_EFORMAT, "%s: the state of %s is missing", c->dir, m->param[i].name);
    PS_TRY(ps_tensors_info(c->state[k], idx, &info));
    if (info.n != bytes)
      return ps__fail(PS_EFORMAT, "%s: the state of %s has %llu bytes, and its blocks are %llu",
                      c->dir, m->param[i].name, (unsigned long long)info.n,
                      (unsigned long long)bytes);
  }
  return n == ps_tensors_count(c->state[k])
             ? PS_OK
             : ps__fail(PS_EFORMAT,
                        "%s: there is state of parameters that the model does not train", c->dir);
}

ps_status ps__resume_check(ps_trainer *t, const ps_checkpoint *c) {
  ps_model_config m;
  ps__settings now = ps__settings_of(t, 0);
  PS_TRY(ps__model_config_read(&m, c->dir, false));
  PS_TRY(ps__trainer_match_head(t, &m));
  if (m.tied_embeddings != t->plan->model->cfg.tied_embeddings)
    return ps__fail(PS_EINVAL,
                    "%s has the head tied to the embedding, and %s has an lm_head.weight of its "
                    "own, which older versions ignored: begin a new run, or give the model without "
                    "lm_head.weight",
                    c->dir, t->model_dir);
  if (memcmp(&m, &t->plan->model->cfg, sizeof m) != 0)
    return ps__fail(PS_EINVAL, "%s is of another model than %s: give its own model directory",
                    c->dir, t->model_dir);
  /* beside adapters, init_weights draws the frozen weights, which the checkpoint lacks */
  if (t->cfg.first_step || (t->cfg.init_weights && !ps__has_adapters(t)))
    return ps__fail(PS_EINVAL,
                    "%s says at which step and with which weights the run goes on: "
                    "first_step %llu and init_weights %u must be 0",
                    c->dir, (unsigned long long)t->cfg.first_step, t->cfg.init_weights);
  PS_TRY(check_hosts(c, &now.info));
  PS_TRY(check_fixed(c, ps__batch_settings, &now, &c->of));
  PS_TRY(check_fixed(c, ps__train_settings, &now, &c->of));
  const uint64_t read = ps_plan_sequences_before(t->plan, c->of.info.step);
  if (read != c->sequences_read)
    return ps__fail(PS_EINVAL,
                    "%s was written after %llu sequences, and with this run's batch ramp step %llu "
                    "ends after %llu: give the checkpoint's %s%s",
                    c->dir, (unsigned long long)c->sequences_read,
                    (unsigned long long)c->of.info.step, (unsigned long long)read,
                    ps__field("ramp"),
                    now.info.n_hosts == c->of.info.n_hosts ? "" : " or number of hosts");
  PS_TRY(ps__data_check(t, c));
  for (uint32_t k = 0; k < ps__optimizers[c->of.info.optimizer].n_states; k++)
    PS_TRY(c->of.info.state_bits == 8 ? check_blocks(t, c, k)
                                      : ps__trainer_check_tensors(t, c->state[k], c->dir, false));
  if (now.train.lr_kind == PS_LR_KIND_CONSTANT) /* the schedule's length changes nothing */
    now.train.total_steps = c->of.train.total_steps;
  if (!c->run_id && t->plan->model->cfg.pad_token_id >= 0 && !ps__has_adapters(t))
    ps__log(PS_LOG_WARN,
            "%s is of an older version, which trained the embedding's row of pad_token_id %d from "
            "the input too: the run goes on with other bits",
            c->dir, (int)t->plan->model->cfg.pad_token_id);
  report_changes(c, ps__batch_settings, &now, &c->of);
  report_changes(c, ps__train_settings, &now, &c->of);
  return PS_OK;
}

/* ---- loading --------------------------------------------------------------------------------- */

/* @n elements of parameter @p's state from element @first on, which begins a block of either
 * storage, converted from @as to @to. @buffer: of fp32 numbers, then of what is converted. */
static ps_status read_state(ps_tensor_file *f, const ps_param_info *p, ps__storage as,
                            ps__storage to, uint64_t first, uint64_t n, char *buffer, void *dst) {
  const uint64_t idx = ps_tensors_find(f, p->name);
  const bool same = as.dtype == to.dtype && as.block == to.block;
  char *const blocks = same ? dst : buffer + PIECE_BYTES;
  if (as.block > 1)
    PS_TRY(ps_tensors_read(f, idx, ps__stored_at(as, first), ps__stored_bytes(as, n),
                           (ps_dtype)PS__U8, blocks));
  else
    return to.block > 1 ? ps_tensors_read(f, idx, first, n, PS_F32, buffer)
                        : ps_tensors_read(f, idx, first, n, (ps_dtype)to.dtype, dst);
  if (!same)
    ps__stored_to_f32(as, (float *)(void *)buffer, blocks, n);
  return PS_OK;
}

static ps_status load_state(ps_trainer *t, const ps_checkpoint *c, const ps_param_info *p,
                            uint32_t k, char *buffer) {
  const uint32_t what = PS__ARRAY_STATE + k;
  const ps__storage as = ps__recipes[row_of(c)].state[k], to = ps__array_storage(t, p->unit, what);
  const uint64_t piece = PIECE_BYTES / sizeof(float);
  char *const out = buffer + 2 * (uint64_t)PIECE_BYTES;
  for (uint64_t first = 0; first < p->n; first += piece) {
    const uint64_t n = p->n - first < piece ? p->n - first : piece;
    char *const there = ps__array_at(t, p->unit, what, p->offset + first), *const dst =
                                                                               there ? there : out;
    PS_TRY(read_state(c->state[k], p, as, to, first, n, buffer, dst));
    if (as.block != to.block)
      ps__stored_from_f32(to, dst, (const float *)(const void *)buffer, n);
    if (!there)
      PS_TRY(ps__array_write(t, p->unit, what, p->offset + first, n, dst));
  }
  return PS_OK;
}

/* The frozen weights that were loaded are those that the adapters were trained beside. */
static ps_status check_base(ps_trainer *t, const ps_checkpoint *c) {
  char hex[65];
  if (!ps__has_adapters(t))
    return PS_OK;
  PS_TRY(ps__base_hash(t, hex));
  return strcmp(hex, c->base_hash) == 0
             ? PS_OK
             : ps__fail(PS_EINVAL,
                        "%s has the adapters of a model with other weights than %s (SHA-256 "
                        "%.16s..., not %.16s...): give the model that it was trained with, "
                        "or with %s the version of Penstock that drew it",
                        c->dir, t->model_dir, c->base_hash, hex, ps__field("init_weights"));
}

ps_status ps__resume_load(ps_trainer *t, const ps_checkpoint *c, ps_progress_fn progress,
                          void *progress_user) {
  PS_TRY(check_base(t, c));
  const ps_model *m = t->plan->model;
  const uint32_t n_states = ps__optimizers[c->of.info.optimizer].n_states;
  const uint64_t total =
      ps__state_bytes((ps_optimizer)c->of.info.optimizer, t->plan->spec.recipe, m->n_trained);
  uint64_t done = 0;
  char *buffer = ps__malloc(3 * (size_t)PIECE_BYTES);
  ps_status st = buffer ? PS_OK : ps__fail(PS_ENOMEM, "%s: no memory left to read it", c->dir);
  for (uint32_t k = 0; st == PS_OK && k < n_states; k++)
    for (uint32_t i = 0; st == PS_OK && i < m->n_params; i++) {
      const ps_param_info *p = &m->param[i];
      if (m->unit[p->unit].frozen)
        continue;
      st = load_state(t, c, p, k, buffer);
      done += ps__stored_bytes(t->plan->step.recipe->state[k], p->n);
      if (progress)
        progress(progress_user, "loading optimizer state", done, total);
    }
  ps__free(buffer);
  return st;
}
