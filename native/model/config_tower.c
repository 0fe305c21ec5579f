/* config_tower.c - vision-language models by their config.json. What absent keys of text_config
 * mean is what transformers takes (5.24). */
#include "model/config_tower.h"
#include <math.h>
#include <string.h>

#define ABSENT(...)                                                                                \
  (const ps__config_default[]) { __VA_ARGS__, {NULL, 0} }
#define KEY(name, value) {name, value}
#define SIZES(vocab, hidden, intermediate, layers, heads, positions)                               \
  KEY("vocab_size", vocab), KEY("hidden_size", hidden), KEY("intermediate_size", intermediate),    \
      KEY("num_hidden_layers", layers), KEY("num_attention_heads", heads),                         \
      KEY("max_position_embeddings", positions)

#define TOWER(type, class, of_text, text_family, ...)                                              \
  {.model_type = type,                                                                             \
   .architecture = class,                                                                          \
   .text_type = of_text,                                                                           \
   .family = text_family,                                                                          \
   __VA_ARGS__}
static const ps__tower towers[] = {
    TOWER("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text", "gemma3_text",
          .is_default = true, .tied_by_default = true,
          .absent = ABSENT(SIZES(262208, 2304, 9216, 26, 8, 131072))),
    TOWER("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text", "gemma4_text",
          .is_default = true, .has_audio = true, .tied_by_default = true,
          .absent = ABSENT(SIZES(262144, 2304, 9216, 30, 8, 131072))),
    TOWER("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text",
          "gemma4_unified_text", .is_default = true, .has_audio = true, .tied_by_default = true,
          .absent = ABSENT(SIZES(262144, 2304, 9216, 30, 8, 262144))),
    TOWER("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "qwen2",
          .is_default = true, .flat = true,
          .absent = ABSENT(KEY("vocab_size", 152064), KEY("hidden_size", 8192),
                           KEY("intermediate_size", 29568), KEY("num_hidden_layers", 80),
                           KEY("num_attention_heads", 64), KEY("num_key_value_heads", 8),
                           KEY("max_position_embeddings", 32768), KEY("max_window_layers", 80),
                           KEY("rms_norm_eps", 1e-5), KEY("rope_theta", 1e6))),
    TOWER("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", "qwen3",
          .is_default = true,
          .absent = ABSENT(SIZES(151936, 4096, 22016, 32, 32, 128000), KEY("rope_theta", 500000))),
    TOWER("mistral3", "Mistral3ForConditionalGeneration", "mistral", "mistral", .is_default = true,
          .tied_by_default = true, .absent = ABSENT(SIZES(32000, 4096, 14336, 32, 32, 131072))),
    TOWER("mistral3", "Mistral3ForConditionalGeneration", "ministral3", "ministral3",
          .tied_by_default = true, .absent = ABSENT(SIZES(131072, 4096, 14336, 34, 32, 262144))),
    TOWER("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", "qwen3_5_text",
          .is_default = true, .absent = ABSENT(SIZES(248320, 4096, 12288, 32, 16, 32768))),
    TOWER("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text",
          "qwen3_5_moe_text", .is_default = true,
          .absent = ABSENT(KEY("vocab_size", 248320), KEY("hidden_size", 2048),
                           KEY("num_hidden_layers", 40), KEY("num_attention_heads", 16),
                           KEY("max_position_embeddings", 32768))),
};
enum { N_TOWERS = sizeof towers / sizeof *towers };

static const char *string_at(const ps__json *j, const char *key) {
  return ps__json_string(ps__config_field(j, key), NULL);
}

/* ---- finding --------------------------------------------------------------------------------- */

/* "gemma3, qwen2_5_vl, ...", each once. */
static const char *list_types(char *text, size_t bytes) {
  size_t at = 0;
  for (size_t i = 0; i < N_TOWERS && at < bytes; i++)
    if (!i || strcmp(towers[i].model_type, towers[i - 1].model_type))
      at += (size_t)snprintf(text + at, bytes - at, "%s%s", i ? ", " : "", towers[i].model_type);
  return text;
}

static ps_status refuse_other(const ps__config_reader *r) {
  static const char *const parts[] = {"text_config", "vision_config", "audio_config"};
  char types[256];
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (ps__config_field(r->j, parts[i]))
      return ps__fail(PS_EFORMAT,
                      "%s: %s is set, and model_type is \"%.60s\": of multimodal models %s are "
                      "supported, and a text class of transformers that is opened on the directory "
                      "saves random weights: docs/models.md says how the text model is saved alone",
                      r->path, parts[i],
                      string_at(r->j, "model_type") ? string_at(r->j, "model_type") : "missing",
                      list_types(types, sizeof types));
  return PS_OK;
}

static bool is_whole(const ps__tower *t, const ps__json *j) {
  const char *type = string_at(j, "model_type"),
             *class = ps__json_string(ps__json_at(ps__config_field(j, "architectures"), 0), NULL);
  return class ? !strcmp(class, t->architecture) : type && !strcmp(type, t->model_type);
}

static ps_status check_whole(const ps__config_reader *r, const ps__tower *t, const ps__json *text) {
  const char *type = string_at(r->j, "model_type");
  if (type && strcmp(type, t->model_type))
    return ps__fail(PS_EFORMAT,
                    "%s: model_type is \"%.60s\" but architectures says %s: they must agree",
                    r->path, type, t->architecture);
  if (ps__config_field(r->j, "audio_config") && !t->has_audio)
    return ps__fail(PS_EFORMAT, "%s: audio_config is set: model_type \"%s\" has no such field",
                    r->path, t->model_type);
  PS_TRY(ps__config_check_quantization(r));
  if (!text || ps__json_type(text) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: text_config is %s: the text model's config is needed there",
                    r->path, text ? ps__config_kind(text) : "missing");
  return PS_OK;
}

ps_status ps__tower_find(const ps__config_reader *r, const ps__tower **out, const ps__json **text) {
  const ps__tower *whole = NULL;
  const ps__json *inner = ps__config_field(r->j, "text_config");
  const char *type = string_at(inner, "model_type");
  *out = NULL;
  for (const ps__tower *t = towers; t < towers + N_TOWERS; t++) {
    if (!is_whole(t, r->j))
      continue;
    whole = t;
    if (type ? !strcmp(type, t->text_type) : t->is_default) {
      if (!inner && t->flat)
        inner = r->j;
      PS_TRY(check_whole(r, t, inner));
      *text = inner;
      *out = t;
      return PS_OK;
    }
  }
  if (whole)
    return ps__fail(PS_EFORMAT,
                    "%s: text_config's model_type is \"%.60s\": of model_type \"%s\" it must be "
                    "\"%s\"",
                    r->path, type, whole->model_type, whole->text_type);
  return refuse_other(r);
}

/* ---- the text model alone -------------------------------------------------------------------- */

static bool is_one_of(const char *key, const char *const *list) {
  for (; *list; list++)
    if (!strcmp(key, *list))
      return true;
  return false;
}

/* RoPE's parameters without what M-RoPE adds, which text does not need. */
static void write_rope(ps__jsonw *w, const char *key, const ps__json *s) {
  static const char *const of_mrope[] = {"mrope_section", "mrope_interleaved", NULL};
  ps__jsonw_object(w, key);
  for (size_t i = 0; i < ps__json_length(s); i++) {
    const char *name = ps__json_key(s, i), *value = ps__json_string(ps__json_at(s, i), NULL);
    if (value && !strcmp(value, "mrope"))
      ps__jsonw_string(w, name, "default");
    else if (!is_one_of(name, of_mrope))
      ps__config_copy(w, name, ps__json_at(s, i));
  }
  ps__jsonw_end(w);
}

static void write_text(ps__jsonw *w, const ps__tower *tower, const ps__json *config,
                       const ps__json *text, const ps_model_config *c) {
  static const char *const left_out[] = {"model_type",          "architectures",
                                         "tie_word_embeddings", "vision_config",
                                         "image_token_id",      "vision_start_token_id",
                                         "video_token_id",      "vision_end_token_id",
                                         "vision_token_id",     NULL};
  static const char *const outer[] = {"bos_token_id", "eos_token_id",         "dtype",
                                      "torch_dtype",  "transformers_version", NULL};
  const ps__json *parameters = ps__config_field(text, "rope_parameters");
  const ps__family *family = ps__family_at(c->family);
  ps__jsonw_object(w, NULL);
  ps__jsonw_array(w, "architectures");
  ps__jsonw_string(w, NULL, family->architecture);
  ps__jsonw_end(w);
  ps__jsonw_string(w, "model_type", family->model_type);
  for (size_t i = 0; i < ps__json_length(text); i++) {
    const char *key = ps__json_key(text, i);
    const ps__json *value = ps__json_at(text, i);
    const bool is_rope = !strcmp(key, "rope_scaling") || !strcmp(key, "rope_parameters");
    if (is_rope && ps__json_type(value) == PS_JSON_OBJECT)
      write_rope(w, key, value);
    else if (!is_one_of(key, left_out))
      ps__config_copy(w, key, value);
  }
  for (const char *const *key = outer; *key && text != config; key++)
    if (!ps__json_get(text, *key) && ps__json_get(config, *key))
      ps__config_copy(w, *key, ps__json_get(config, *key));
  for (const ps__config_default *d = tower->absent; d->key; d++)
    if (!ps__json_get(text, d->key) && !ps__json_get(parameters, d->key))
      ps__jsonw_number(w, d->key, d->value);
  ps__jsonw_bool(w, "tie_word_embeddings", c->tied_embeddings);
  ps__jsonw_end(w);
}

ps_status ps__tower_text_alone(ps__json **out, const ps__tower *tower, const ps__json *config,
                               const ps__json *text, const ps_model_config *c) {
  ps__jsonw *w;
  size_t bytes = 0;
  PS_TRY(ps__jsonw_create(&w));
  write_text(w, tower, config, text, c);
  const char *made = ps__jsonw_text(w, &bytes);
  const ps_status st = made ? ps__json_parse(out, made, bytes, "the text model's config")
                            : ps__fail(PS_ENOMEM, "no memory left for the text model's config");
  ps__jsonw_free(w);
  return st;
}
