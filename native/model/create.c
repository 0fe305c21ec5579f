/* create.c - a model made from its config: by its family's description. */
#include "core/core.h"
#include "model/family.h"
#include "model/lora.h"
#include "model/model.h"

ps_status ps__model_create(ps_model **out, const ps_model_config *cfg, ps_dtype dt,
                           uint64_t seq_len, uint32_t n_frozen, const ps__loss_terms *loss,
                           const ps__fp8 *fp8, const ps_lora *lora) {
  const ps__family *family = ps__family_at(cfg->family);
  ps_model *m = NULL;
  if (!family)
    return ps__fail(PS_EINVAL, "family %u of the model's configuration is unknown", cfg->family);
  PS_TRY(ps__model_begin(&m, cfg, dt, seq_len));
  m->family = family->model_type;
  m->n_frozen = n_frozen;
  if (loss)
    m->loss = *loss;
  if (fp8)
    m->fp8 = *fp8;
  ps_status st = lora ? ps__lora_check(lora) : PS_OK;
  if (st == PS_OK && lora)
    m->lora = *lora;
  if (st == PS_OK)
    st = ps__describe_decoder(m, family->decoder);
  if (st != PS_OK) {
    ps_model_destroy(m);
    return st;
  }
  PS_TRY(ps__model_finish(&m));
  *out = m;
  return PS_OK;
}

ps_status ps_model_create(ps_model **out, const ps_model_config *cfg) {
  if (!out)
    return ps__fail(PS_EINVAL, "ps_model_create: no place for the result was given");
  PS_TRY(ps_model_config_check(cfg, "model"));
  return ps__model_create(out, cfg, PS_F32, 0, 0, NULL, NULL, NULL);
}

ps_status ps_lora_targets_all(uint32_t *out, const ps_model_config *cfg) {
  const ps_lora any = {.rank = PS__SPAN_ALIGN, .alpha = 1, .targets = PS_LORA_ALL};
  ps_model *m;
  if (!out)
    return ps__fail(PS_EINVAL, "ps_lora_targets_all: no place for the result was given");
  PS_TRY(ps_model_config_check(cfg, "model"));
  PS_TRY(ps__model_create(&m, cfg, PS_F32, 0, 0, NULL, NULL, &any));
  *out = m->lora.targets;
  ps_model_destroy(m);
  return PS_OK;
}
