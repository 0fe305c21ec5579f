/* adapter.c - a trainer's adapters: loaded and saved in PEFT's layout; the hash of what they are
 * for. */
#include "train/adapter.h"
#include "train/arrays.h"
#include "core/sha256.h"
#include <string.h>

static bool is_adapter(const ps_trainer *t, const ps_param_info *p) {
  return t->plan->model->unit[p->unit].adapter;
}

/* ---- loading --------------------------------------------------------------------------------- */

ps_status ps__adapter_open(ps_trainer *t, const char *dir, ps_tensor_file *base,
                           ps_tensor_file *weights, ps_tensor_file **out) {
  ps__adapter_info what;
  if (weights)
    PS_TRY(ps__base_mark(t->plan->model, weights, t->base_mark));
  if (!dir)
    return PS_OK;
  PS_TRY(ps__adapter_open_for(t->plan->model, dir, t->model_dir, base, out, &what));
  if (t->plan->cfg.forward_only)
    return PS_OK;
  if (what.n_saved)
    return ps__fail(PS_EINVAL,
                    "%s: has %llu tensors in place of the model's own (modules_to_save), which are "
                    "not trained: make a model of both with penstock merge, and train that",
                    dir, (unsigned long long)what.n_saved);
  if (what.dropout > 0)
    ps__log(PS_LOG_WARN, "%s: lora_dropout is %g, and training goes on without dropout", dir,
            what.dropout);
  return PS_OK;
}

ps_status ps__adapter_load(ps_trainer *t, ps_tensor_file *f) {
  const ps_model *m = t->plan->model;
  char name[PS__PEFT_NAME_BYTES];
  for (uint32_t i = 0; i < m->n_params; i++) {
    if (!is_adapter(t, &m->param[i]))
      continue;
    ps__peft_name(name, m->param[i].name);
    PS_TRY(ps__trainer_load_param(t, f, ps_tensors_find(f, name), &m->param[i]));
  }
  return PS_OK;
}

/* ---- saving ---------------------------------------------------------------------------------- */

/* Names of modules. In a vision-language model other parts have modules of the same names, so there
 * it is a pattern of the text model's alone. @names: with commas, overwritten. */
static void fill_targets(const ps_trainer *t, ps__jsonw *w, char *names) {
  char pattern[PS_LORA_NAMES_BYTES + 96];
  if (t->plan->model->cfg.multimodal) {
    for (char *at = names; (at = strchr(at, ','));)
      *at = '|';
    snprintf(pattern, sizeof pattern,
             "model\\.language_model\\.layers\\.\\d+\\.(self_attn|linear_attn|mlp)\\.(%s)", names);
    ps__jsonw_string(w, "target_modules", pattern);
    return;
  }
  ps__jsonw_array(w, "target_modules");
  for (char *next = names, *at; (at = strsep(&next, ","));)
    ps__jsonw_string(w, NULL, at);
  ps__jsonw_end(w);
}

/* The fields of PEFT's LoraConfig that say something; it has defaults for the others. */
static void fill_config(const ps_trainer *t, ps__jsonw *w) {
  const ps_lora *l = &t->plan->model->lora;
  char names[PS_LORA_NAMES_BYTES];
  (void)ps_lora_targets_text(names, sizeof names, l->targets);
  ps__jsonw_object(w, NULL);
  ps__jsonw_string(w, "peft_type", "LORA");
  if (ps__has_score(&t->plan->model->cfg)) {
    ps__jsonw_string(w, "task_type", "SEQ_CLS");
    ps__jsonw_array(w, "modules_to_save");
    ps__jsonw_string(w, NULL, "score");
    ps__jsonw_end(w);
  } else {
    ps__jsonw_string(w, "task_type", "CAUSAL_LM");
  }
  ps__jsonw_string(w, "base_model_name_or_path", t->model_dir);
  ps__jsonw_uint(w, "r", l->rank);
  ps__jsonw_number(w, "lora_alpha", l->alpha);
  ps__jsonw_number(w, "lora_dropout", 0);
  ps__jsonw_bool(w, "use_rslora", l->rslora != 0);
  ps__jsonw_bool(w, "use_dora", false);
  ps__jsonw_bool(w, "fan_in_fan_out", false);
  ps__jsonw_bool(w, "inference_mode", true);
  ps__jsonw_bool(w, "init_lora_weights", true);
  ps__jsonw_string(w, "bias", "none");
  fill_targets(t, w, names);
  ps__jsonw_end(w);
}

ps_status ps__adapter_write_config(const ps_trainer *t, const ps__stage *stage, const char *dir) {
  ps__jsonw *w;
  PS_TRY(ps__jsonw_create(&w));
  fill_config(t, w);
  const ps_status st = ps__stage_write_json(stage, dir, "adapter_config.json", w);
  ps__jsonw_free(w);
  return st;
}

/* ---- the base model's hash ------------------------------------------------------------------- */

typedef struct hash_job {
  const ps_trainer *t;
  char (*hex)[65]; /* [n_params] */
} hash_job;

static void hash_param(void *arg, int64_t task, uint32_t worker) {
  const hash_job *j = arg;
  const ps_param_info *p = &j->t->plan->model->param[task];
  ps__sha256 h;
  (void)worker;
  if (is_adapter(j->t, p))
    return;
  ps__sha256_begin(&h);
  ps__sha256_add(&h, ps__array_at(j->t, p->unit, PS__ARRAY_UPDATED, p->offset),
                 ps__array_bytes(j->t, p->unit, PS__ARRAY_UPDATED, p->n));
  ps__sha256_end(&h, j->hex[task]);
}

ps_status ps__base_hash(ps_trainer *t, char hex[65]) {
  const uint32_t n = t->plan->model->n_params;
  ps__pool *pool;
  ps__sha256 h;
  if (!t->base_hash[0]) {
    hash_job j = {t, ps__calloc(n, sizeof *j.hex)};
    if (!j.hex)
      return ps__fail(PS_ENOMEM, "out of memory for the base model's hash");
    const ps_status st = ps__pool_create(&pool, ps__cpus_beside_training(), "ps-hash");
    if (st != PS_OK) {
      ps__free(j.hex);
      return st;
    }
    ps__pool_run(pool, n, hash_param, &j);
    ps__pool_destroy(pool);
    ps__sha256_begin(&h);
    for (uint32_t i = 0; i < n; i++)
      ps__sha256_add(&h, j.hex[i], strlen(j.hex[i]));
    ps__sha256_end(&h, t->base_hash);
    ps__free(j.hex);
  }
  memcpy(hex, t->base_hash, sizeof t->base_hash);
  return PS_OK;
}
