/* adapter.c - reads an adapter's directory as PEFT writes it, and refuses what would be another
 * math than y = x W^T + s (x A^T) B^T. */
#include "model/adapter.h"
#include "core/core.h"
#include "io/io.h"
#include "model/lora.h"
#include <math.h>
#include <string.h>
#include <strings.h>

enum { MAX_CONFIG_BYTES = 1 << 20 };

void ps__peft_name(char out[PS__PEFT_NAME_BYTES], const char *name) {
  snprintf(out, PS__PEFT_NAME_BYTES, PS__PEFT_PREFIX "%s", name);
}

/* ---- adapter_config.json --------------------------------------------------------------------- */

/* Keys whose math is not supported, unless they are absent, null, false, "", [] or {}. */
static const char *const unsupported[] = {"use_dora",
                                          "use_qalora",
                                          "lora_bias",
                                          "fan_in_fan_out",
                                          "rank_pattern",
                                          "alpha_pattern",
                                          "layer_replication",
                                          "trainable_token_indices",
                                          "target_parameters",
                                          "alora_invocation_tokens",
                                          NULL};

static bool is_unset(const ps__json *v) {
  if (!v)
    return true;
  switch (ps__json_type(v)) {
  case PS_JSON_NULL: return true;
  case PS_JSON_BOOL: return !ps__json_bool(v, true);
  case PS_JSON_STRING: return !*ps__json_string(v, NULL);
  case PS_JSON_ARRAY:
  case PS_JSON_OBJECT: return ps__json_length(v) == 0;
  default: return false;
  }
}

static ps_status check_supported(const ps__json *j, const char *path) {
  static const char *const changing[] = {"pissa", "olora", "corda", "loftq", NULL};
  const char *type = ps__json_string(ps__json_get(j, "peft_type"), NULL),
             *bias = ps__json_string(ps__json_get(j, "bias"), NULL),
             *init = ps__json_string(ps__json_get(j, "init_lora_weights"), NULL);
  if (!type || strcmp(type, "LORA") != 0)
    return ps__fail(PS_EFORMAT, "%s: peft_type is %s: LORA alone is read", path,
                    type ? type : "missing");
  if (bias && strcmp(bias, "none") != 0)
    return ps__fail(PS_EFORMAT, "%s: bias is \"%.40s\": \"none\" alone is supported", path, bias);
  for (const char *const *c = changing; init && *c; c++)
    if (strncmp(init, *c, strlen(*c)) == 0)
      return ps__fail(PS_EFORMAT,
                      "%s: init_lora_weights is \"%.40s\", which changes the base model too: "
                      "convert the adapter with PEFT first",
                      path, init);
  for (const char *const *key = unsupported; *key; key++)
    if (!is_unset(ps__json_get(j, *key)))
      return ps__fail(PS_EFORMAT, "%s: %s is set, which is not supported", path, *key);
  return PS_OK;
}

/* What adapter_config.json says beside ps_lora. */
typedef struct config {
  double dropout;
  bool all_layers; /* each target is in every layer */
  char base[256];  /* base_model_name_or_path; "": it names none */
} config;

/* Names of modules alone, and no choice of layers. */
static bool in_all_layers(const ps__json *j) {
  const ps__json *targets = ps__json_get(j, "target_modules");
  bool plain = targets && ps__json_type(targets) == PS_JSON_ARRAY;
  for (size_t i = 0; plain && i < ps__json_length(targets); i++) {
    const char *name = ps__json_string(ps__json_at(targets, i), NULL);
    plain = name && !strchr(name, '.');
  }
  return plain && is_unset(ps__json_get(j, "layers_to_transform")) &&
         is_unset(ps__json_get(j, "exclude_modules"));
}

static ps_status read_config(ps_lora *out, config *c, const ps__json *j, const char *path) {
  uint64_t rank = 0;
  const ps__json *r = ps__json_get(j, "r");
  if (ps__json_type(j) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: is no JSON object", path);
  PS_TRY(check_supported(j, path));
  if (!r || !ps__json_uint64(r, &rank) || !rank || rank > UINT32_MAX)
    return ps__fail(PS_EFORMAT, "%s: r is no whole number of at least 1", path);
  *out = (ps_lora){.rank = (uint32_t)rank,
                   .targets = PS_LORA_ALL, /* until the tensors say which */
                   .rslora = ps__json_bool(ps__json_get(j, "use_rslora"), false),
                   .alpha = ps__json_number(ps__json_get(j, "lora_alpha"), NAN)};
  if (ps__lora_check(out) != PS_OK)
    return ps__fail(PS_EFORMAT, "%s: lora_alpha is %g: a number above 0 and up to %g is needed",
                    path, out->alpha, PS_MAX_LORA_ALPHA);
  const char *base = ps__json_string(ps__json_get(j, "base_model_name_or_path"), NULL);
  *c = (config){.dropout = ps__json_number(ps__json_get(j, "lora_dropout"), 0),
                .all_layers = in_all_layers(j)};
  snprintf(c->base, sizeof c->base, "%s", base ? base : "");
  return PS_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* The target whose A or B is tensor @name; PS_N_LORA_TARGETS: of none. */
static uint32_t target_of(const char *name) {
  const size_t n = strlen(name);
  for (uint32_t k = 0; k < PS_N_LORA_TARGETS; k++) {
    char end[64];
    const size_t m =
        (size_t)snprintf(end, sizeof end, ".%s.lora_A.weight", ps__lora_target_name(k));
    if (n > m &&
        (strcmp(name + n - m, end) == 0 || (end[m - 8] = 'B', strcmp(name + n - m, end) == 0)))
      return k;
  }
  return PS_N_LORA_TARGETS;
}

/* The targets that the file's names have: ".q_proj.lora_A.weight". A tensor that is no matrix of
 * LoRA's may be one that takes the place of the model's own. */
static ps_status find_targets(ps_lora *lora, const ps_tensor_file *f, const char *dir) {
  lora->targets = 0;
  for (uint64_t i = 0; i < ps_tensors_count(f); i++) {
    ps_tensor_info info;
    PS_TRY(ps_tensors_info(f, i, &info));
    const uint32_t k = target_of(info.name);
    if (k == PS_N_LORA_TARGETS && (strstr(info.name, ".lora_") ||
                                   strncmp(info.name, PS__PEFT_PREFIX, sizeof PS__PEFT_PREFIX - 1)))
      return ps__fail(PS_EFORMAT,
                      "%s: tensor %.200s is no LoRA matrix of a projection in a decoder's block",
                      dir, info.name);
    if (k < PS_N_LORA_TARGETS)
      lora->targets |= 1u << k;
  }
  return lora->targets ? PS_OK : ps__fail(PS_EFORMAT, "%s: the adapter has no tensors", dir);
}

/* Refuse weights that PEFT has written as a pickle. */
static ps_status check_pickle(const char *dir) {
  char *path = ps__path_join(dir, "adapter_model.bin"),
       *safe = ps__path_join(dir, "adapter_model.safetensors");
  bool pickle = false, has_safe = false;
  ps_status st = path && safe ? PS_OK : PS_ENOMEM;
  if (st == PS_OK)
    st = ps__path_exists(path, &pickle);
  if (st == PS_OK)
    st = ps__path_exists(safe, &has_safe);
  if (st == PS_OK && pickle && !has_safe)
    st = ps__fail(PS_EFORMAT,
                  "%s: is a pickle, which is not read: load the adapter in PEFT and save it with "
                  "save_pretrained(..., safe_serialization=True)",
                  path);
  ps__free(path);
  ps__free(safe);
  return st;
}

/* What the config says, and the tensors, which the caller closes. */
static ps_status open_adapter(ps_lora *lora, config *c, ps_tensor_file **out, const char *dir) {
  char *path;
  ps__json *j = NULL;
  ps_lora read = {0};
  ps_tensor_file *f = NULL;
  PS_TRY(ps__model_path(&path, dir, "adapter_config.json"));
  ps_status st = ps__json_read_file(&j, path, MAX_CONFIG_BYTES);
  if (st == PS_OK)
    st = read_config(&read, c, j, path);
  ps__json_free(j);
  ps__free(path);
  if (st == PS_OK)
    st = check_pickle(dir);
  if (st == PS_OK)
    st = ps__tensors_open(&f, dir, "adapter_model");
  if (st == PS_OK)
    st = find_targets(&read, f, dir);
  if (st != PS_OK) {
    ps_tensors_close(f);
    return st;
  }
  *lora = read;
  *out = f;
  return PS_OK;
}

ps_status ps_adapter_read(ps_lora *out, const char *dir) {
  ps_tensor_file *f;
  config c;
  if (!out || !dir || !*dir)
    return ps__fail(PS_EINVAL, "ps_adapter_read: out and dir must be given");
  PS_TRY(open_adapter(out, &c, &f, dir));
  ps_tensors_close(f);
  return PS_OK;
}

/* ---- is it of this model? -------------------------------------------------------------------- */

static ps_status check_tensor(const ps_tensor_file *f, uint64_t idx, const char *dir,
                              const ps_param_info *p) {
  ps_tensor_info info;
  PS_TRY(ps_tensors_info(f, idx, &info));
  const uint64_t rows = info.n_dims ? info.shape[0] : 0,
                 columns = info.n_dims > 1 ? info.shape[1] : 1;
  if (info.n_dims == p->n_dims && rows == p->shape[0] && columns == p->shape[1])
    return PS_OK;
  return ps__fail(PS_EINVAL,
                  "%s: tensor %s is [%llu, %llu], and this model needs [%llu, %llu]: the adapter "
                  "is of another model or rank",
                  dir, info.name, (unsigned long long)rows, (unsigned long long)columns,
                  (unsigned long long)p->shape[0], (unsigned long long)p->shape[1]);
}

/* Tensor @idx of the file is one of the model's adapters, or takes the place of one of the model's
 * own. */
static ps_status check_known(const ps_model *m, const ps_tensor_file *f, uint64_t idx,
                             const char *dir, uint64_t *n_saved) {
  ps_tensor_info info;
  PS_TRY(ps_tensors_info(f, idx, &info));
  const char *name = info.name;
  if (strncmp(name, PS__PEFT_PREFIX, sizeof PS__PEFT_PREFIX - 1) == 0)
    name += sizeof PS__PEFT_PREFIX - 1;
  const uint32_t param = ps_model_find(m, name);
  if (m->cfg.tied_embeddings &&
      (strcmp(name, "lm_head.weight") == 0 || (param < m->n_params && m->param[param].unit == 0)))
    return ps__fail(PS_EINVAL,
                    "%s: has a tensor %s (modules_to_save), but this model's embedding and head "
                    "are one tensor, which such an adapter would part: it is not supported",
                    dir, info.name);
  if (param == UINT32_MAX && !strcmp(name, PS__SCORE))
    return ps__fail(PS_EINVAL,
                    "%s: was trained on labelled data (it has tensor %s), and is used with a "
                    "language model here: give labelled data, or another adapter",
                    dir, info.name);
  if (name == info.name || param == UINT32_MAX)
    return ps__fail(PS_EINVAL,
                    "%s: tensor %.200s has no place in this model: the adapter is of another model",
                    dir, info.name);
  *n_saved += !m->unit[m->param[param].unit].adapter;
  return check_tensor(f, idx, dir, &m->param[param]);
}

/* A parameter of the adapters may be missing where not all layers have the same modules, and where
 * its partner is missing too. */
static ps_status check_there(const ps_tensor_file *f, const char *dir, const ps_param_info *p,
                             bool all_layers) {
  char name[PS__PEFT_NAME_BYTES], partner[PS__PEFT_NAME_BYTES];
  ps__peft_name(name, p->name);
  ps__peft_name(partner, p->name);
  all_layers |= !strcmp(p->name, PS__SCORE); /* which has no partner */
  char *part = partner + strlen(partner) - strlen("A.weight");
  *part = *part == 'A' ? 'B' : 'A';
  if (ps_tensors_find(f, name) != UINT64_MAX ||
      (!all_layers && ps_tensors_find(f, partner) == UINT64_MAX))
    return PS_OK;
  if (!strcmp(p->name, PS__SCORE))
    return ps__fail(PS_EINVAL,
                    "%s: has no head for labels (tensor %s): give an adapter that was trained on "
                    "labelled data, or data without labels",
                    dir, name);
  return ps__fail(PS_EINVAL, "%s: has no tensor %s: the adapter is of another model", dir, name);
}

static ps_status check_adapter(const ps_model *m, const ps_lora *lora, const config *c,
                               const ps_tensor_file *f, const char *dir, uint64_t *n_saved) {
  const ps_lora *want = &m->lora;
  char has[PS_LORA_NAMES_BYTES], needs[PS_LORA_NAMES_BYTES];
  if (lora->rank != want->rank || lora->alpha != want->alpha || lora->rslora != want->rslora)
    return ps__fail(PS_EINVAL,
                    "%s: has LoRA rank %u and alpha %g%s, and the plan was made for %u and %g%s: "
                    "plan for the adapter's",
                    dir, lora->rank, lora->alpha, lora->rslora ? " (rslora)" : "", want->rank,
                    want->alpha, want->rslora ? " (rslora)" : "");
  if (lora->targets != want->targets) {
    (void)ps_lora_targets_text(has, sizeof has, lora->targets);
    (void)ps_lora_targets_text(needs, sizeof needs, want->targets);
    return ps__fail(PS_EINVAL,
                    "%s: has LoRA targets %s, and the plan was made for %s: plan for "
                    "the adapter's",
                    dir, has, needs);
  }
  for (uint32_t i = 0; i < m->n_params; i++)
    if (m->unit[m->param[i].unit].adapter)
      PS_TRY(check_there(f, dir, &m->param[i], c->all_layers));
  for (uint64_t i = 0; i < ps_tensors_count(f); i++)
    PS_TRY(check_known(m, f, i, dir, n_saved));
  return PS_OK;
}

/* ---- is it of this base? --------------------------------------------------------------------- */

enum { MARK_PIECES = 4, MARK_ELEMENTS = 512 };

static ps_status mark_param(ps__sha256 *h, const ps_param_info *p, ps_tensor_file *f) {
  uint16_t values[MARK_ELEMENTS];
  const uint64_t idx = ps_tensors_find(f, p->name), n = p->n < MARK_ELEMENTS ? p->n : MARK_ELEMENTS;
  ps__sha256_add(h, p->name, strlen(p->name));
  for (uint64_t k = 0; k < MARK_PIECES; k++) {
    PS_TRY(ps_tensors_read(f, idx, (p->n - n) / (MARK_PIECES - 1) * k, n, PS_BF16, values));
    ps__sha256_add(h, values, n * sizeof *values);
  }
  return PS_OK;
}

ps_status ps__base_mark(const ps_model *m, ps_tensor_file *f, char hex[65]) {
  ps__sha256 h;
  ps__sha256_begin(&h);
  for (uint32_t i = 0; i < m->n_params; i++)
    if (!m->unit[m->param[i].unit].adapter)
      PS_TRY(mark_param(&h, &m->param[i], f));
  ps__sha256_end(&h, hex);
  return PS_OK;
}

/* The last part of a path, without slashes at its end. */
static const char *last_part(const char *path, size_t *n) {
  size_t end = strlen(path), at;
  while (end > 1 && path[end - 1] == '/')
    end--;
  for (at = end; at > 0 && path[at - 1] != '/'; at--)
    ;
  *n = end - at;
  return path + at;
}

static ps_status check_base(const ps_model *m, const config *c, const char *dir,
                            const char *base_dir, ps_tensor_file *base, const ps_tensor_file *f) {
  char has[65], is[65];
  size_t n, k;
  PS_TRY(ps__tensors_metadata(f, PS__BASE_MARK, has, sizeof has));
  if (has[0]) {
    PS_TRY(ps__base_mark(m, base, is));
    return strcmp(has, is) == 0
               ? PS_OK
               : ps__fail(
                     PS_EINVAL,
                     "%s: was trained beside a model (%.200s) with other weights than %s: give "
                     "that model (PEFT loads an adapter beside any)",
                     dir, c->base, base_dir);
  }
  const char *named = last_part(c->base, &n), *given = last_part(base_dir, &k);
  if (n && (n != k || strncasecmp(named, given, n) != 0))
    ps__log(PS_LOG_WARN,
            "%s: names the model %.200s, and is used with %s: its tensors fit, but whether the "
            "weights are that model's cannot be told",
            dir, c->base, base_dir);
  return PS_OK;
}

/* An adapter makes up for what its base lost when it was quantized. */
static ps_status note_base(const ps_model *m, const ps_tensor_file *f, const char *dir) {
  const char *const now = ps_base_name((ps_base)m->lora.base);
  char was[16];
  PS_TRY(ps__tensors_metadata(f, PS__BASE_DTYPE, was, sizeof was));
  if (was[0] && strcmp(was, now) != 0)
    ps__log(PS_LOG_WARN,
            "%s: was trained beside a base in %s, and is used beside one in %s: its loss may be "
            "another",
            dir, was, now);
  return PS_OK;
}

ps_status ps__adapter_open_for(const ps_model *m, const char *dir, const char *base_dir,
                               ps_tensor_file *base, ps_tensor_file **out, ps__adapter_info *what) {
  ps_lora lora;
  config c;
  ps_tensor_file *f;
  uint64_t n_saved = 0;
  PS_TRY(open_adapter(&lora, &c, &f, dir));
  ps_status st = check_adapter(m, &lora, &c, f, dir, &n_saved);
  if (st == PS_OK && base)
    st = check_base(m, &c, dir, base_dir, base, f);
  if (st == PS_OK)
    st = note_base(m, f, dir);
  if (st == PS_OK) {
    *out = f;
    *what = (ps__adapter_info){c.dropout, n_saved};
  } else
    ps_tensors_close(f);
  return st;
}

static ps_status check_for(const ps_model *m, const char *dir, const char *base_dir) {
  ps_tensor_file *base, *f;
  ps__adapter_info what;
  PS_TRY(ps_tensors_open(&base, base_dir));
  ps_status st = ps__model_check_tensors(m, base, base_dir, true);
  if (st == PS_OK)
    st = ps__adapter_open_for(m, dir, base_dir, base, &f, &what);
  if (st == PS_OK)
    ps_tensors_close(f);
  ps_tensors_close(base);
  return st;
}

/* An adapter with a `score` makes a classifier of a language model. */
static ps_status take_score(ps_model_config *cfg, const char *dir) {
  ps_tensor_file *f;
  ps_tensor_info info = {0};
  PS_TRY(ps__tensors_open(&f, dir, "adapter_model"));
  const uint64_t idx = ps_tensors_find(f, PS__PEFT_PREFIX PS__SCORE);
  ps_status st = idx == UINT64_MAX ? PS_OK : ps_tensors_info(f, idx, &info);
  ps_tensors_close(f);
  if (st != PS_OK || !info.n_dims || cfg->problem)
    return st;
  return ps_model_config_score(cfg,
                               info.shape[0] == 1 ? PS_PROBLEM_REGRESSION : PS_PROBLEM_SINGLE_LABEL,
                               info.shape[0] > PS_MAX_LABELS ? 0 : (uint32_t)info.shape[0]);
}

ps_status ps_adapter_check(const char *dir, const char *base_dir) {
  ps_model_config cfg;
  ps_lora lora;
  ps_model *m;
  if (!dir || !*dir || !base_dir || !*base_dir)
    return ps__fail(PS_EINVAL, "ps_adapter_check: dir and base_dir must be given");
  PS_TRY(ps_model_config_read(&cfg, base_dir));
  PS_TRY(ps_adapter_read(&lora, dir));
  PS_TRY(take_score(&cfg, dir));
  PS_TRY(ps__model_create(&m, &cfg, PS_F32, 0, 0, NULL, NULL, &lora));
  const ps_status st = check_for(m, dir, base_dir);
  ps_model_destroy(m);
  return st;
}
