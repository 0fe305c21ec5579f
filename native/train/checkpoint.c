/* checkpoint.c - writes checkpoints, and names, finds and removes them in a folder. */
#include "train/resume.h"
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIECE_BYTES = 4 << 20 };                 /* of state that comes from the device, at a time */
static const uint64_t SHARD_BYTES = 1000000000; /* a file; several threads hash the files */

const char *const ps__state_names[PS_N_OPTIMIZERS][PS_MAX_STATES] = {
    [PS_OPTIMIZER_ADAMW] = {"exp_avg", "exp_avg_sq"},
    [PS_OPTIMIZER_LION] = {"exp_avg"},
    [PS_OPTIMIZER_SGD] = {"momentum_buffer"},
};

#define TRAIN(key, option, kind, fixed) {#key, option, kind, offsetof(ps_train_config, key), fixed}
const ps__setting ps__train_settings[] = {
    TRAIN(lr_kind, "lr-schedule", PS__U32, false),
    TRAIN(lr, "lr", PS__F64, false),
    TRAIN(min_lr, "min-lr", PS__F64, false),
    TRAIN(warmup_steps, "warmup-steps", PS__U64, false),
    TRAIN(total_steps, "steps", PS__U64, false),
    TRAIN(decay_steps, "decay-steps", PS__U64, false),
    TRAIN(beta1, "beta1", PS__F64, false),
    TRAIN(beta2, "beta2", PS__F64, false),
    TRAIN(eps, "eps", PS__F64, false),
    TRAIN(momentum, "momentum", PS__F64, false),
    TRAIN(nesterov, "nesterov", PS__U32, false),
    TRAIN(weight_decay, "weight-decay", PS__F64, false),
    TRAIN(clip_norm, "clip-norm", PS__F64, false),
    TRAIN(seed, "seed", PS__U64, true),
    TRAIN(shuffle, "shuffle", PS__U32, true),
    TRAIN(document_token, "document-token", PS__I32, true),
    TRAIN(document_end_token, "document-end-token", PS__I32, true),
    {.key = NULL},
};

#define BATCH(key, option, kind, fixed)                                                            \
  {#key, option, kind, offsetof(ps_checkpoint_info, key), fixed}
const ps__setting ps__batch_settings[] = {
    BATCH(n_frozen_layers, "frozen layers", PS__U32, true),
    BATCH(seq_len, "seq-len", PS__U64, true),
    BATCH(tokens_per_step, "tokens-per-step", PS__U64, true),
    BATCH(n_sequences, "number of sequences in the data", PS__U64, true),
    BATCH(chunk_tokens, "chunk-tokens", PS__U64, false),
    BATCH(chunks_per_round, "chunks-per-round", PS__U64, false),
    BATCH(first_round_chunks, "first-round-chunks", PS__U64, false),
    BATCH(head_slice_tokens, "head-slice-tokens", PS__U64, false),
    {.key = NULL},
};

void ps__checkpoint_info_of(const ps_trainer *t, ps_checkpoint_info *out) {
  const ps_plan_config *c = &t->plan->cfg;
  const ps_plan_report *r = &t->plan->report;
  *out = (ps_checkpoint_info){
      .struct_bytes = sizeof *out,
      .recipe = c->recipe,
      .optimizer = c->optimizer,
      .n_frozen_layers = c->n_frozen_layers,
      .step = t->cfg.first_step + t->n_reported,
      .n_updates = t->n_updates + t->n_reported,
      .seq_len = c->seq_len,
      .tokens_per_step = r->tokens_per_step,
      .chunk_tokens = r->chunk_tokens,
      .chunks_per_round = r->chunks_per_round,
      .first_round_chunks = r->first_round_chunks,
      .head_slice_tokens = r->head_slice_tokens,
      .n_sequences = t->cfg.dataset ? ps_dataset_n_sequences(t->cfg.dataset, c->seq_len) : 0,
  };
}

ps_train_config ps__checkpoint_settings(const ps_trainer *t) {
  ps_train_config c = t->cfg;
  const struct {
    ps_hyper hyper;
    double *value;
  } hypers[] = {{PS_HYPER_BETA1, &c.beta1},
                {PS_HYPER_BETA2, &c.beta2},
                {PS_HYPER_EPS, &c.eps},
                {PS_HYPER_MOMENTUM, &c.momentum},
                {PS_HYPER_WEIGHT_DECAY, &c.weight_decay}};
  for (size_t i = 0; i < sizeof hypers / sizeof *hypers; i++)
    if (isnan(ps_optimizer_default((ps_optimizer)c.optimizer, hypers[i].hyper)))
      *hypers[i].value = NAN;
  return c;
}

/* ---- states ---------------------------------------------------------------------------------- */

static ps_status append_state(ps_trainer *t, ps_tensor_writer *w, const ps_param_info *p,
                              uint32_t k, void *buffer) {
  const ps__vt *vt = &t->plan->step.vt[t->plan->step.unit_host[p->unit].state[k]];
  const uint64_t element = ps_dtype_bytes(t->plan->step.recipe->state[k]), n = p->n * element,
                 first = vt->offset + p->offset * element;
  if (vt->space == t->plan->at->host)
    return ps_tensors_append(w, t->host + first, n);
  for (uint64_t at = 0; at < n; at += PIECE_BYTES) {
    const uint64_t m = n - at < PIECE_BYTES ? n - at : PIECE_BYTES;
    PS_TRY(ps__engine_read(t->engine, vt->space, first + at, buffer, m));
    PS_TRY(ps_tensors_append(w, buffer, m));
  }
  return PS_OK;
}

static ps_status append_states(ps_trainer *t, ps_tensor_writer *w, uint32_t k, void *buffer) {
  const ps_model *m = t->plan->model;
  for (uint32_t i = 0; i < m->n_params; i++)
    if (!m->unit[m->param[i].unit].frozen)
      PS_TRY(append_state(t, w, &m->param[i], k, buffer));
  return PS_OK;
}

static ps_status write_state(ps_trainer *t, ps__stage *stage, const char *dir, uint32_t k) {
  const ps_model *m = t->plan->model;
  ps_tensor_spec *specs = ps__calloc(m->n_params, sizeof *specs);
  void *buffer = ps__malloc(PIECE_BYTES);
  ps_tensor_writer *w = NULL;
  uint32_t n = 0;
  ps_status st = specs && buffer ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for a checkpoint");
  for (uint32_t i = 0; st == PS_OK && i < m->n_params; i++) {
    const ps_param_info *p = &m->param[i];
    if (!m->unit[p->unit].frozen)
      specs[n++] = (ps_tensor_spec){.name = p->name,
                                    .dtype = t->plan->step.recipe->state[k],
                                    .n_dims = p->n_dims,
                                    .shape = {p->shape[0], p->shape[1]}};
  }
  if (st == PS_OK)
    st = ps__tensors_create(&w, stage, dir, ps__state_names[t->plan->spec.optimizer][k], specs, n,
                            SHARD_BYTES, NULL, 0);
  if (st == PS_OK) {
    st = append_states(t, w, k, buffer);
    if (st == PS_OK)
      st = ps_tensors_finish(w);
    else
      ps_tensors_abort(w);
  }
  ps__free(specs);
  ps__free(buffer);
  return st;
}

/* ---- the manifest ---------------------------------------------------------------------------- */

static void write_settings(ps__jsonw *w, const char *key, const ps__setting *s, const void *base) {
  ps__jsonw_object(w, key);
  for (; s->key; s++) {
    const void *at = (const char *)base + s->offset;
    switch (s->kind) {
    case PS__U32: ps__jsonw_uint(w, s->key, *(const uint32_t *)at); break;
    case PS__I32: ps__jsonw_number(w, s->key, *(const int32_t *)at); break;
    case PS__U64: ps__jsonw_uint(w, s->key, *(const uint64_t *)at); break;
    default: ps__jsonw_number(w, s->key, *(const double *)at); break;
    }
  }
  ps__jsonw_end(w);
}

static ps_status fill_manifest(const ps_trainer *t, const ps__stage *stage, ps__jsonw *w) {
  ps_checkpoint_info info;
  const ps_train_config settings = ps__checkpoint_settings(t);
  ps__checkpoint_info_of(t, &info);
  ps__jsonw_object(w, NULL);
  ps__jsonw_string(w, "format", "penstock checkpoint");
  ps__jsonw_uint(w, "version", 1);
  ps__jsonw_string(w, "penstock", ps_version());
  ps__jsonw_uint(w, "step", info.step);
  ps__jsonw_uint(w, "n_updates", info.n_updates);
  ps__jsonw_uint(w, "sequences_read", info.step * t->plan->layout.n_sequences);
  ps__jsonw_string(w, "recipe", ps__recipes[info.recipe].name);
  ps__jsonw_string(w, "optimizer", ps_optimizer_name((ps_optimizer)info.optimizer));
  write_settings(w, "batch", ps__batch_settings, &info);
  write_settings(w, "training", ps__train_settings, &settings);
  PS_TRY(ps__manifest_files(w, stage));
  ps__jsonw_end(w);
  return PS_OK;
}

static ps_status write_manifest(const ps_trainer *t, const ps__stage *stage, const char *dir) {
  ps__jsonw *w;
  size_t n;
  int fd = -1;
  char *path = ps__path_join(dir, PS__MANIFEST);
  ps_status st = path ? ps__jsonw_create(&w) : ps__fail(PS_ENOMEM, "out of memory for %s", dir);
  if (st != PS_OK) {
    ps__free(path);
    return st;
  }
  st = fill_manifest(t, stage, w);
  const char *text = st == PS_OK ? ps__jsonw_text(w, &n) : NULL;
  if (st == PS_OK && !text)
    st = ps__fail(PS_ENOMEM, "out of memory for %s", path);
  if (st == PS_OK)
    st = ps__stage_create(&fd, stage, PS__MANIFEST, path);
  if (st == PS_OK)
    st = ps__write_all(fd, path, text, n);
  if (st == PS_OK)
    st = ps__sync(fd, path);
  if (fd >= 0 && close(fd) != 0 && st == PS_OK)
    st = ps__fail(PS_EIO, "%s: closing it failed: %s", path, strerror(errno));
  ps__jsonw_free(w);
  ps__free(path);
  return st;
}

/* ---- the checkpoint -------------------------------------------------------------------------- */

static ps_status write_all(ps_trainer *t, ps__stage *stage, const char *dir) {
  PS_TRY(ps__trainer_write_model(t, stage, dir, t->plan->step.recipe->updated, SHARD_BYTES));
  for (uint32_t k = 0; k < ps__optimizers[t->plan->spec.optimizer].n_states; k++)
    PS_TRY(write_state(t, stage, dir, k));
  return write_manifest(t, stage, dir);
}

/* The last step's updates have ended, also those that its report does not wait for. */
static ps_status check_whole(ps_trainer *t) {
  PS_TRY(ps__trainer_idle(t));
  if (t->sticky != PS_OK || atomic_load(&t->cancelled) ||
      (t->run && ps_run_wait(t->run, t->n_reported) != PS_OK))
    return ps__fail(PS_ESTATE, "an error or a cancel has stopped the trainer: optimizer states may "
                               "be of two steps, and no checkpoint is written");
  return PS_OK;
}

ps_status ps_trainer_checkpoint(ps_trainer *t, const char *dir) {
  ps__stage *stage;
  if (!t || !dir || !*dir)
    return ps__fail(PS_EINVAL, "ps_trainer_checkpoint: trainer and dir must be given");
  PS_TRY(check_whole(t));
  PS_TRY(ps__stage_open(&stage, dir));
  const ps_status st = write_all(t, stage, dir);
  if (st == PS_OK)
    return ps__stage_commit(stage);
  ps__stage_abort(stage);
  return st;
}

/* ---- a folder of checkpoints ----------------------------------------------------------------- */

#define PREFIX "step-"

ps_status ps_checkpoint_path(char *path, uint64_t bytes, const char *folder, uint64_t step) {
  const int n = snprintf(path, bytes, "%s/" PREFIX "%08llu", folder, (unsigned long long)step);
  return n >= 0 && (uint64_t)n < bytes
             ? PS_OK
             : ps__fail(PS_EINVAL, "%.200s...: the path is too long", folder);
}

/* PREFIX and 8 digits, or more where the step has more. */
static bool is_checkpoint(const char *name, uint64_t *step) {
  const size_t k = sizeof PREFIX - 1, n = strlen(name);
  if (strncmp(name, PREFIX, k) != 0 || n < k + 8 || n > k + 18 ||
      strspn(name + k, "0123456789") != n - k)
    return false;
  *step = strtoull(name + k, NULL, 10);
  return true;
}

typedef struct found {
  char *name;
  uint64_t step;
} found;

static int newest_first(const void *a, const void *b) {
  const uint64_t x = ((const found *)a)->step, y = ((const found *)b)->step;
  return (x < y) - (x > y);
}

static void free_list(found *list, size_t n) {
  for (size_t i = 0; i < n; i++)
    ps__free(list[i].name);
  ps__free(list);
}

/* The checkpoints of @folder by name, newest first. None where it does not exist. */
static ps_status list_folder(const char *folder, found **out, size_t *n) {
  found *list = NULL;
  size_t cap = 0;
  uint64_t step;
  ps_status st = PS_OK;
  *n = 0;
  DIR *d = opendir(folder);
  if (!d && errno != ENOENT)
    return ps__fail(PS_EIO, "%s: cannot be read: %s", folder, strerror(errno));
  errno = 0;
  for (const struct dirent *e; d && st == PS_OK && (e = readdir(d)); errno = 0) {
    if (!is_checkpoint(e->d_name, &step))
      continue;
    void *items = list;
    const bool grown = ps__grow(&items, *n, &cap, sizeof *list);
    list = items;
    if (grown && (list[*n].name = ps__strdup(e->d_name)))
      list[(*n)++].step = step;
    else
      st = ps__fail(PS_ENOMEM, "%s: no memory left to list it", folder);
  }
  if (d && st == PS_OK && errno)
    st = ps__fail(PS_EIO, "%s: cannot be read: %s", folder, strerror(errno));
  if (d)
    closedir(d);
  if (st == PS_OK && *n)
    qsort(list, *n, sizeof *list, newest_first);
  if (st == PS_OK)
    *out = list;
  else
    free_list(list, *n);
  return st;
}

static ps_status open_in(ps_checkpoint **out, const char *folder, const char *name) {
  char *path = ps__path_join(folder, name);
  const ps_status st = path ? ps_checkpoint_open(out, path)
                            : ps__fail(PS_ENOMEM, "%s: no memory left for a path", folder);
  ps__free(path);
  return st;
}

ps_status ps_checkpoint_latest(ps_checkpoint **out, const char *folder) {
  found *list;
  size_t n;
  if (!out || !folder)
    return ps__fail(PS_EINVAL, "ps_checkpoint_latest: out and folder must be given");
  *out = NULL;
  PS_TRY(list_folder(folder, &list, &n));
  ps_status st = PS_OK;
  for (size_t i = 0; i < n; i++) {
    st = open_in(out, folder, list[i].name);
    if (st != PS_EFORMAT && st != PS_EIO)
      break;
    ps__log(PS_LOG_WARN, "%s/%s is no whole checkpoint and is passed over: %s", folder,
            list[i].name, ps_last_error());
  }
  if (st == PS_EFORMAT || st == PS_EIO)
    st = ps__fail(PS_EFORMAT, "%s: none of its %zu checkpoints is whole; of the oldest: %s", folder,
                  n, ps_last_error());
  free_list(list, n);
  return st;
}

ps_status ps_checkpoints_prune(const char *folder, uint64_t keep) {
  found *list;
  size_t n;
  if (!folder)
    return ps__fail(PS_EINVAL, "ps_checkpoints_prune: folder must be given");
  ps__stage_clear(folder, PREFIX);
  PS_TRY(list_folder(folder, &list, &n));
  ps_status st = PS_OK;
  for (size_t i = n; st == PS_OK && i-- > keep;)
    st = ps__stage_remove(folder, list[i].name);
  free_list(list, n);
  return st;
}
