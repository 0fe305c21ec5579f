/* checkpoint.c - writes checkpoints, beside the steps that follow.
 *
 * ps_trainer_checkpoint_begin() starts a thread. That thread writes the tensors with some more
 * (arrays.c), each part of the state after the last update that the checkpoint has, while the next
 * update of the part waits (hold.c). Then come the manifest and the rename that makes the
 * checkpoint whole. Whatever fails leaves no checkpoint, and training goes on. */
#include "engine/engine.h"
#include "train/adapter.h"
#include "train/arrays.h"
#include "train/resume.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* A file: threads hash files, so there are many more of these than threads. */
static const uint64_t FILE_BYTES = 256000000;

struct ps__writing {
  ps__thread *thread;
  ps_trainer *t;
  char *dir;
  uint64_t n_steps; /* of the run */
  uint64_t begin_ns;
  ps_status st;
  char message[1024];
  ps_checkpoint_report report;
  _Atomic uint32_t over;
};

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

/* The data's paths, without links where they can be resolved. */
static void write_data(ps__jsonw *w, const ps_dataset *ds) {
  char real[PATH_MAX];
  const char *path;
  ps__jsonw_array(w, "data");
  for (uint64_t i = 0; (path = ps__dataset_path(ds, i)); i++)
    ps__jsonw_string(w, NULL, realpath(path, real) ? real : path);
  ps__jsonw_end(w);
}

static ps_status fill_manifest(ps__writing *c, const ps__stage *stage, const ps__output *o,
                               ps__jsonw *w) {
  const ps_trainer *t = c->t;
  ps__settings now = ps__settings_of(t, c->n_steps);
  const ps_checkpoint_info *const info = &now.info;
  PS_TRY(ps__hold_await_reported(t->hold));
  now.info.n_skipped = ps__skips_before(t);
  now.info.grad_norm = ps__norm_before(t);
  ps__jsonw_object(w, NULL);
  ps__jsonw_string(w, "format", "penstock checkpoint");
  ps__jsonw_uint(w, "version", 1);
  ps__jsonw_string(w, "penstock", ps_version());
  ps__jsonw_uint(w, "serial", c->report.serial);
  if (t->run_id) {
    char id[24];
    snprintf(id, sizeof id, "%016llx", (unsigned long long)t->run_id);
    ps__jsonw_string(w, "run_id", id);
  }
  ps__jsonw_uint(w, "step", info->step);
  ps__jsonw_uint(w, "n_updates", info->n_updates);
  ps__jsonw_uint(w, "n_skipped", info->n_skipped);
  if (isfinite(info->grad_norm))
    ps__jsonw_number(w, "grad_norm", info->grad_norm);
  ps__jsonw_uint(w, "sequences_read", ps_plan_sequences_before(t->plan, info->step));
  ps__jsonw_string(w, "recipe", ps__recipes[info->recipe].name);
  if (info->state_bits)
    ps__jsonw_uint(w, "state_bits", info->state_bits);
  ps__jsonw_string(w, "optimizer", ps_optimizer_name((ps_optimizer)info->optimizer));
  if (t->run_text)
    ps__jsonw_string(w, "run", t->run_text);
  if (ps__has_adapters(t)) {
    char hex[65];
    PS_TRY(ps__base_hash(c->t, hex));
    ps__jsonw_string(w, "base_sha256", hex);
  }
  write_data(w, t->cfg.dataset);
  PS_TRY(ps__data_write(c->t, w));
  write_settings(w, "batch", ps__batch_settings, &now);
  write_settings(w, "training", ps__train_settings, &now);
  PS_TRY(ps__manifest_files(w, stage, o->hashed, o->n_hashed, &c->report.bytes));
  ps__jsonw_end(w);
  return PS_OK;
}

static ps_status write_manifest(ps__writing *c, const ps__stage *stage, const ps__output *o) {
  ps__jsonw *w;
  PS_TRY(ps__jsonw_create(&w));
  ps_status st = fill_manifest(c, stage, o, w);
  if (st == PS_OK)
    st = ps__stage_write_json(stage, c->dir, PS__MANIFEST, w);
  ps__jsonw_free(w);
  return st;
}

/* ---- the writer's thread --------------------------------------------------------------------- */

/* Whether host ops may wait for the writer while it reads a device's memory, and a device for these
 * host ops. Not with clipping: blocks whose state is on a device are updated before the other
 * blocks, and the submitting thread waits before each. */
static bool reads_beside_waits(const ps_trainer *t) {
  const ps__spec *spec = &t->plan->spec;
  bool reads = false, waits = false;
  for (uint32_t u = 0; u < spec->n_units && !spec->clip; u++) {
    const bool frozen = t->plan->model->unit[u].frozen;
    reads |= !frozen && ps__state_on_device(spec, u);
    waits |= !frozen && !ps__updated_on_device(spec, u);
  }
  return reads && waits;
}

/* Nothing is read any more: also where writing failed, and what is frozen. */
static void release_all(ps_trainer *t) {
  ps__hold_release_all(t->hold);
  ps__engine_awaited(t->engine, false);
}

static double seconds_since(uint64_t begin_ns) { return (double)(ps__now_ns() - begin_ns) * 1e-9; }

static ps_status write_arrays(ps__writing *c, ps__stage *stage, ps__output *o) {
  const ps_trainer *t = c->t;
  ps__array array[1 + PS_MAX_STATES] = {
      {ps__weights_stem(t), ps__updated_dtype(t->plan->spec.recipe), PS__ARRAY_UPDATED}};
  *o = (ps__output){.stage = stage,
                    .dir = c->dir,
                    .array = array,
                    .n_arrays = 1 + ps__optimizers[t->plan->spec.optimizer].n_states,
                    .max_file_bytes = FILE_BYTES,
                    .held = true};
  for (uint32_t k = 0; k + 1 < o->n_arrays; k++)
    array[1 + k] = (ps__array){ps__state_names[t->plan->spec.optimizer][k],
                               ps__state_dtype(t->plan->spec.recipe, k), PS__ARRAY_STATE + k};
  const ps_status st = ps__trainer_write_arrays(c->t, o);
  c->report.held_s = seconds_since(c->begin_ns);
  release_all(c->t);
  return st;
}

/* The folder that the checkpoint is in says its serial. */
static ps_status find_serial(ps__writing *c) {
  char folder[PATH_MAX];
  const char *slash = strrchr(c->dir, '/');
  snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - c->dir) : 1, slash ? c->dir : ".");
  return ps__checkpoints_next_serial(slash == c->dir ? "/" : folder, c->t->serial,
                                     &c->report.serial);
}

static ps_status write_all(ps__writing *c, ps__stage *stage) {
  ps__output o = {0};
  ps_status st = write_arrays(c, stage, &o);
  if (st == PS_OK)
    st = ps__trainer_write_config(c->t, stage, c->dir, ps__updated_dtype(c->t->plan->spec.recipe));
  if (st == PS_OK)
    st = find_serial(c);
  if (st == PS_OK)
    st = write_manifest(c, stage, &o);
  if (st == PS_OK)
    st = ps__hold_await_seen(c->t->hold);
  ps__free(o.hashed);
  return st;
}

static ps_status write_checkpoint(ps__writing *c) {
  ps__stage *stage;
  ps_status st = ps__stage_open(&stage, c->dir);
  if (st != PS_OK) {
    release_all(c->t);
    return st;
  }
  st = write_all(c, stage);
  if (st == PS_OK)
    return ps__stage_commit(stage);
  ps__stage_abort(stage);
  return st;
}

static void write_beside(void *arg) {
  ps__writing *c = arg;
  c->st = write_checkpoint(c);
  if (c->st != PS_OK)
    snprintf(c->message, sizeof c->message, "%s", ps_last_error());
  c->report.durable_s = seconds_since(c->begin_ns);
  c->report.waited_s = (double)ps__hold_waited_ns(c->t->hold) * 1e-9;
  atomic_store(&c->over, 1);
}

/* ---- the caller ------------------------------------------------------------------------------ */

static void free_writing(ps__writing *c) {
  ps__free(c->dir);
  ps__free(c);
}

static ps_status start(ps_trainer *t, const char *dir) {
  ps__writing *c = ps__calloc(1, sizeof *c);
  if (!c || !(c->dir = ps__strdup(dir))) {
    ps__free(c);
    return ps__fail(PS_ENOMEM, "%s: no memory left to write it", dir);
  }
  c->t = t;
  c->n_steps = t->n_submitted;
  c->report.struct_bytes = sizeof c->report;
  c->report.step = t->cfg.first_step + c->n_steps;
  c->begin_ns = ps__now_ns();
  ps__skips_mark(t, c->n_steps);
  ps__engine_awaited(t->engine, reads_beside_waits(t));
  ps__hold_begin(t->hold, c->n_steps);
  const ps_status st = ps__thread_start(&c->thread, write_beside, c, "ps-checkpoint");
  if (st != PS_OK) {
    release_all(t);
    free_writing(c);
    return st;
  }
  t->writing = c;
  return PS_OK;
}

ps_status ps_trainer_checkpoint_begin(ps_trainer *t, const char *dir) {
  if (!t || !dir || !*dir)
    return ps__fail(PS_EINVAL, "ps_trainer_checkpoint_begin: trainer and dir must be given");
  if (t->writing)
    return ps__fail(PS_EBUSY, "%s is being written: end it with ps_trainer_checkpoint_end() first",
                    t->writing->dir);
  if (t->sticky != PS_OK || atomic_load(&t->turns.cancelled))
    return ps__fail(PS_ESTATE, "an error or a cancel has stopped the trainer: optimizer states may "
                               "be of two steps, and no checkpoint is written");
  if (t->cfg.first_step && t->n_updates + t->n_submitted == 0)
    return ps__fail(PS_ESTATE,
                    "no step was trained, and step %llu of a checkpoint needs an optimizer state: "
                    "train a step first",
                    (unsigned long long)t->cfg.first_step);
  PS_TRY(ps__checkpoint_check_owner(dir, t->run_id));
  return start(t, dir);
}

ps_status ps_trainer_checkpoints_check(const ps_trainer *t, const char *folder) {
  if (!t || !folder)
    return ps__fail(PS_EINVAL, "ps_trainer_checkpoints_check: trainer and folder must be given");
  return ps__checkpoints_check_owner(folder, t->run_id);
}

int ps_trainer_checkpoint_running(const ps_trainer *t) {
  return t && t->writing && !atomic_load(&t->writing->over);
}

ps_status ps_trainer_checkpoint_end(ps_trainer *t, ps_checkpoint_report *out) {
  if (!t || (out && out->struct_bytes != sizeof *out))
    return ps__fail(PS_EINVAL, "ps_trainer_checkpoint_end: trainer, and struct_bytes of a report, "
                               "must be given");
  ps__writing *c = t->writing;
  if (!c)
    return ps__fail(PS_ESTATE, "no checkpoint is being written");
  if (ps__engine_drives(t->engine))
    return ps__fail(PS_ESTATE, "a batch function cannot end a checkpoint, which waits for the "
                               "batch: end it on another thread");
  if (t->run && ps__trainer_run_wait(t, c->n_steps) != PS_OK)
    ps__hold_stop(t->hold, false); /* updates that did not come do not come any more */
  ps__hold_seen(t->hold, c->n_steps);
  ps__thread_join(c->thread);
  t->writing = NULL;
  const ps_status st = c->st;
  if (st == PS_OK) {
    t->serial = c->report.serial;
    if (out)
      *out = c->report;
  } else
    (void)ps__fail(st, "%s", c->message);
  free_writing(c);
  return st;
}

void ps__trainer_await_written_steps(ps_trainer *t) {
  if (t->writing)
    (void)ps__trainer_run_wait(t, t->writing->n_steps); /* a failure is the checkpoint's too */
}

void ps__trainer_end_writing(ps_trainer *t) {
  if (!t->writing)
    return;
  ps__hold_seen(t->hold, t->writing->n_steps);
  ps__hold_stop(t->hold, false);
  if (ps_trainer_checkpoint_end(t, NULL) != PS_OK && !atomic_load(&t->turns.cancelled))
    ps__log(PS_LOG_WARN, "the checkpoint that was being written is lost: %s", ps_last_error());
}

/* The last step's updates have ended, also those that its report does not wait for. */
static ps_status check_whole(ps_trainer *t) {
  PS_TRY(ps__trainer_idle(t));
  if (t->sticky == PS_OK && t->run && ps__trainer_run_wait(t, t->n_reported) != PS_OK)
    return ps__fail(PS_ESTATE, "an error or a cancel has stopped the trainer: optimizer states may "
                               "be of two steps, and no checkpoint is written");
  return PS_OK;
}

ps_status ps_trainer_checkpoint(ps_trainer *t, const char *dir) {
  if (!t || !dir || !*dir)
    return ps__fail(PS_EINVAL, "ps_trainer_checkpoint: trainer and dir must be given");
  PS_TRY(check_whole(t));
  PS_TRY(ps_trainer_checkpoint_begin(t, dir));
  return ps_trainer_checkpoint_end(t, NULL);
}

uint64_t ps_trainer_steps_submitted(const ps_trainer *t) { return t ? t->n_submitted : 0; }
