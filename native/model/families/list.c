/* list.c - the families of models that can be trained. ps_model_config.family is an index. */
#include "model/family.h"

#define FAMILIES(X)                                                                                \
  X(llama)                                                                                         \
  X(qwen2)                                                                                         \
  X(qwen3)                                                                                         \
  X(mistral)                                                                                       \
  X(ministral)                                                                                     \
  X(phi3)                                                                                          \
  X(olmo2)                                                                                         \
  X(olmo3)                                                                                         \
  X(gemma)                                                                                         \
  X(seed_oss)                                                                                      \
  X(exaone4)                                                                                       \
  X(hunyuan)                                                                                       \
  X(glm4)                                                                                          \
  X(ministral3)                                                                                    \
  X(gemma2)                                                                                        \
  X(gemma3)                                                                                        \
  X(granite)                                                                                       \
  X(smollm3)                                                                                       \
  X(olmoe)                                                                                         \
  X(qwen3_moe)                                                                                     \
  X(mixtral)                                                                                       \
  X(gpt_oss)                                                                                       \
  X(deepseek_v2)                                                                                   \
  X(deepseek_v3)                                                                                   \
  X(glm4_moe_lite)                                                                                 \
  X(gemma4)                                                                                        \
  X(gemma4_unified)                                                                                \
  X(qwen3_5)                                                                                       \
  X(qwen3_5_moe)                                                                                   \
  X(qwen3_next)
#define DECLARE(name) extern const ps__family ps__family_##name;
#define ENTRY(name)   &ps__family_##name,

FAMILIES(DECLARE)
static const ps__family *const families[] = {FAMILIES(ENTRY)};

const ps__family *ps__family_at(uint32_t idx) {
  return idx < sizeof families / sizeof *families ? families[idx] : NULL;
}

const char *ps_model_family_name(uint32_t family) {
  const ps__family *f = ps__family_at(family);
  return f ? f->model_type : NULL;
}
