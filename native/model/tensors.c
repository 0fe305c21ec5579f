/* tensors.c - whether the tensors on disk are a model's: all of them, no other, the same shapes. */
#include "model/model.h"
#include "core/core.h"
#include "core/dtype.h"
#include "io/io.h"
#include "io/tower.h"
#include "model/family.h"
#include <stdlib.h>
#include <string.h>

static ps_status check_tensor(const char *dir, const ps_tensor_info *info, const ps_param_info *p) {
  const bool ok = info->n_dims == p->n_dims && info->shape[0] == p->shape[0] &&
                  (p->n_dims < 2 || info->shape[1] == p->shape[1]) &&
                  (p->n_dims < 3 || info->shape[2] == p->shape[2]);
  if (ok)
    return PS_OK;
  return ps__fail(
      PS_EFORMAT,
      "%s: tensor %s has %u dimensions beginning [%llu, %llu], config.json asks for [%llu%s%.0llu]",
      dir, p->name, info->n_dims, (unsigned long long)(info->n_dims ? info->shape[0] : 0),
      (unsigned long long)(info->n_dims > 1 ? info->shape[1] : 1), (unsigned long long)p->shape[0],
      p->n_dims > 1 ? ", " : "", (unsigned long long)(p->n_dims > 1 ? p->shape[1] : 0));
}

int ps_model_carries(const ps_model *m, const char *name) {
  return m && name && m->cfg.multimodal && !ps__name_is_of_text(name);
}

/* Whether @name is of a layer that predicts several tokens at once: past the last, or mtp.*
 * (Qwen3.5). transformers passes over these too. */
static bool is_mtp(const ps_model *m, const char *name) {
  static const char of_layer[] = "model.layers.";
  const ps__family *family = ps__family_at(m->cfg.family);
  const size_t n = sizeof of_layer - 1;
  if (!family || !family->has_mtp)
    return false;
  if (!strncmp(name, "mtp.", 4))
    return true;
  return !strncmp(name, of_layer, n) && name[n] >= '0' && name[n] <= '9' &&
         strtoul(name + n, NULL, 10) >= m->cfg.n_layers;
}

/* Whether @name is of keys and values that a layer has not, but those of another: files may have
 * them, and transformers passes over them too. */
static bool is_unused_kv(const ps_model *m, const char *name) {
  static const char *const rest[] = {".self_attn.k_proj.weight", ".self_attn.v_proj.weight",
                                     ".self_attn.k_norm.weight"};
  static const char of_layer[] = "model.layers.";
  char *end = NULL;
  if (strncmp(name, of_layer, sizeof of_layer - 1))
    return false;
  const unsigned long layer = strtoul(name + sizeof of_layer - 1, &end, 10);
  bool any = false;
  for (size_t i = 0; i < sizeof rest / sizeof *rest; i++)
    any |= !strcmp(end, rest[i]);
  return any && layer < m->cfg.n_layers && m->cfg.layer_flags[layer] & PS_LAYER_SHARED_KV;
}

/* A tensor that the model does not know is refused: without it the math would be another model's.
 * Passed over are rotary tables of old files, which are derived, a tied head, a head in whose place
 * the model has another, scales of quantized weights, layers past the last, unused keys and values,
 * and the other parts of a vision-language model. */
static ps_status check_unknown(const ps_model *m, const ps_tensor_file *f, const char *dir) {
  for (uint64_t i = 0; i < ps_tensors_count(f); i++) {
    ps_tensor_info info;
    PS_TRY(ps_tensors_info(f, i, &info));
    if (ps_model_find(m, info.name) == UINT32_MAX && !strstr(info.name, "rotary_emb.inv_freq") &&
        !(m->cfg.tied_embeddings && strcmp(info.name, "lm_head.weight") == 0) &&
        !ps__is_idle_head(&m->cfg, info.name) && !ps__tensors_passed_over(f, i) &&
        !is_mtp(m, info.name) && !is_unused_kv(m, info.name) && !ps_model_carries(m, info.name))
      return ps__fail(PS_EFORMAT,
                      "%s: tensor %s is not part of the model that config.json describes", dir,
                      info.name);
    if (ps_model_carries(m, info.name) && ps__tensors_has_scales(f, i))
      return ps__fail(PS_EFORMAT,
                      "%s: tensor %s of another part than the text model is quantized: what is "
                      "saved has no quantization_config, use the unquantized model",
                      dir, info.name);
  }
  return PS_OK;
}

static ps_status check_known(const ps_model *m, const ps_tensor_file *f, const char *dir,
                             bool weights) {
  for (uint32_t i = 0; i < m->n_params; i++) {
    const ps_param_info *p = &m->param[i];
    const ps__unit *u = &m->unit[p->unit];
    ps_tensor_info info;
    const uint64_t idx = ps_tensors_find(f, p->name);
    if (idx == UINT64_MAX && (weights ? u->adapter : u->frozen))
      continue;
    const bool head = weights && !strcmp(p->name, PS__SCORE);
    if (idx == UINT64_MAX && head && !u->frozen)
      continue; /* a trainer draws it */
    if (idx == UINT64_MAX && head)
      return ps__fail(
          PS_EINVAL,
          "%s: has no head for %s (tensor %s): train it on labelled data first, or give "
          "data without labels",
          dir, ps_problem_name(m->cfg.problem), p->name);
    if (idx == UINT64_MAX)
      return ps__fail(PS_EFORMAT, "%s: tensor %s is missing from its safetensors", dir, p->name);
    PS_TRY(ps_tensors_info(f, idx, &info));
    PS_TRY(check_tensor(dir, &info, p));
    PS_TRY(ps__tensors_check_dtype(f, idx));
  }
  return PS_OK;
}

ps_status ps__model_check_tensors(const ps_model *m, const ps_tensor_file *f, const char *dir,
                                  bool weights) {
  PS_TRY(check_unknown(m, f, dir));
  return check_known(m, f, dir, weights);
}

/* Whether all elements of the norm's weight have their initial value. */
static ps_status is_fresh(ps_tensor_file *f, const ps_param_info *p, bool *fresh) {
  float x[512];
  const uint64_t idx = ps_tensors_find(f, p->name), room = sizeof x / sizeof *x;
  for (uint64_t at = 0; *fresh && at < p->n; at += room) {
    const uint64_t n = p->n - at < room ? p->n - at : room;
    PS_TRY(ps_tensors_read(f, idx, at, n, PS_F32, x));
    for (uint64_t i = 0; i < n; i++)
      *fresh = *fresh && x[i] == p->init_mean;
  }
  return PS_OK;
}

ps_status ps__model_note_weights(const ps_model *m, ps_tensor_file *f, const char *dir) {
  bool fresh = !ps_tensors_initialised(f);
  for (uint32_t i = 0; fresh && i < m->n_params; i++)
    if (m->param[i].role == PS_PARAM_NORM)
      PS_TRY(is_fresh(f, &m->param[i], &fresh));
  if (fresh)
    ps__log(PS_LOG_WARN,
            "%s: every norm weight has its initial value: the weights look freshly initialised, "
            "as a text class of transformers saves them that was opened on a multimodal model",
            dir);
  if (ps__tensors_quantized(f))
    ps__log(PS_LOG_WARN,
            "%s: FP8 weights are read as their values times their scales, which bf16 rounds by at "
            "most 0.2%%; what is saved has no scales",
            dir);
  return PS_OK;
}

ps_status ps_model_check_tensors(const ps_model *m, const ps_tensor_file *f, const char *name) {
  if (!m || !f || !name)
    return ps__fail(PS_EINVAL, "ps_model_check_tensors: model, file and name must be given");
  return ps__model_check_tensors(m, f, name, true);
}
