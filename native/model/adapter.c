/* adapter.c - reads an adapter's directory as PEFT writes it, and refuses what would be another
 * math than y = x W^T + s (x A^T) B^T. */
#include "model/adapter.h"
#include "core/core.h"
#include "io/io.h"
#include "model/lora.h"
#include <math.h>
#include <string.h>

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
                                          "modules_to_save",
                                          "layers_to_transform",
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

static ps_status read_config(ps_lora *out, double *dropout, const ps__json *j, const char *path) {
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
  *dropout = ps__json_number(ps__json_get(j, "lora_dropout"), 0);
  return PS_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* The targets that the file's names have: ".q_proj.lora_A.weight". */
static ps_status find_targets(ps_lora *lora, const ps_tensor_file *f, const char *dir) {
  lora->targets = 0;
  for (uint64_t i = 0; i < ps_tensors_count(f); i++) {
    ps_tensor_info info;
    uint32_t k = 0;
    PS_TRY(ps_tensors_info(f, i, &info));
    const size_t n = strlen(info.name);
    for (; k < PS_N_LORA_TARGETS; k++) {
      char end[64];
      const size_t m =
          (size_t)snprintf(end, sizeof end, ".%s.lora_A.weight", ps__lora_target_name(k));
      if (n > m && (strcmp(info.name + n - m, end) == 0 ||
                    (end[m - 8] = 'B', strcmp(info.name + n - m, end) == 0)))
        break;
    }
    if (k == PS_N_LORA_TARGETS)
      return ps__fail(PS_EFORMAT,
                      "%s: tensor %.200s is no LoRA matrix of a projection in a decoder's block",
                      dir, info.name);
    lora->targets |= 1u << k;
  }
  return lora->targets ? PS_OK : ps__fail(PS_EFORMAT, "%s: the adapter has no tensors", dir);
}

/* What the config says, and the tensors, which the caller closes. */
static ps_status open_adapter(ps_lora *lora, double *dropout, ps_tensor_file **out,
                              const char *dir) {
  char *path;
  ps__json *j = NULL;
  ps_lora read = {0};
  ps_tensor_file *f = NULL;
  PS_TRY(ps__model_path(&path, dir, "adapter_config.json"));
  ps_status st = ps__json_read_file(&j, path, MAX_CONFIG_BYTES);
  if (st == PS_OK)
    st = read_config(&read, dropout, j, path);
  ps__json_free(j);
  ps__free(path);
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
  double dropout;
  if (!out || !dir || !*dir)
    return ps__fail(PS_EINVAL, "ps_adapter_read: out and dir must be given");
  PS_TRY(open_adapter(out, &dropout, &f, dir));
  ps_tensors_close(f);
  return PS_OK;
}

/* ---- is it of this model? -------------------------------------------------------------------- */

static ps_status check_tensor(const ps_tensor_file *f, const char *dir, const ps_param_info *p) {
  char name[PS__PEFT_NAME_BYTES];
  ps_tensor_info info;
  ps__peft_name(name, p->name);
  const uint64_t idx = ps_tensors_find(f, name);
  if (idx == UINT64_MAX)
    return ps__fail(PS_EINVAL, "%s: has no tensor %s: the adapter is of another model", dir, name);
  PS_TRY(ps_tensors_info(f, idx, &info));
  if (info.n_dims == 2 && info.shape[0] == p->shape[0] && info.shape[1] == p->shape[1])
    return PS_OK;
  return ps__fail(PS_EINVAL,
                  "%s: tensor %s is [%llu, %llu], and this model needs [%llu, %llu]: the adapter "
                  "is of another model or rank",
                  dir, name, (unsigned long long)(info.n_dims ? info.shape[0] : 0),
                  (unsigned long long)(info.n_dims > 1 ? info.shape[1] : 1),
                  (unsigned long long)p->shape[0], (unsigned long long)p->shape[1]);
}

static ps_status check_adapter(const ps_model *m, const ps_lora *lora, const ps_tensor_file *f,
                               const char *dir) {
  const ps_lora *want = &m->lora;
  uint64_t n = 0;
  char has[160], needs[160];
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
    if (m->unit[m->param[i].unit].adapter) {
      PS_TRY(check_tensor(f, dir, &m->param[i]));
      n++;
    }
  if (ps_tensors_count(f) != n)
    return ps__fail(PS_EINVAL,
                    "%s: has %llu tensors, and this model's adapters are %llu: the "
                    "adapter is of another model",
                    dir, (unsigned long long)ps_tensors_count(f), (unsigned long long)n);
  return PS_OK;
}

ps_status ps__adapter_open_for(const ps_model *m, const char *dir, ps_tensor_file **out,
                               double *dropout) {
  ps_lora lora;
  ps_tensor_file *f;
  PS_TRY(open_adapter(&lora, dropout, &f, dir));
  const ps_status st = check_adapter(m, &lora, f, dir);
  if (st == PS_OK)
    *out = f;
  else
    ps_tensors_close(f);
  return st;
}
