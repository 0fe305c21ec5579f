/* family.c - the families of models that can be trained. */
#include "model/family.h"

static const ps__family *const families[] = {
    &ps__family_llama,     &ps__family_qwen2,   &ps__family_qwen3,  &ps__family_mistral,
    &ps__family_ministral, &ps__family_phi3,    &ps__family_olmo2,  &ps__family_gemma2,
    &ps__family_gemma3,    &ps__family_granite, &ps__family_smollm3};

const ps__family *ps__family_at(uint32_t idx) {
  return idx < sizeof families / sizeof *families ? families[idx] : NULL;
}

const char *ps_model_family_name(uint32_t family) {
  const ps__family *f = ps__family_at(family);
  return f ? f->model_type : NULL;
}
