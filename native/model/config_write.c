/* config_write.c - config.json beside weights that are saved: as the model has it, but for
 *  - the dtype of the saved tensors, because readers convert tensors to the dtype that it names;
 *  - tie_word_embeddings where a head of its own is saved: transformers 4 would not read it;
 *  - RoPE, by the names of transformers 4 beside rope_parameters, which it ignores. transformers 5
 *    reads both;
 *  - quantization, as what is saved has none;
 *  - longrope's attention factor, where transformers 4 and 5 would take different ones;
 *  - what says that the model is a classifier, where the file is a language model's.
 * Of a vision-language model the first two and quantization change alone, in text_config too. */
#include "core/core.h"
#include "core/dtype.h"
#include "io/io.h"
#include "model/config_tower.h"
#include "model/family.h"
#include "model/rope.h"
#include <math.h>
#include <string.h>

static const char THETA[] = "rope_theta", PARTIAL[] = "partial_rotary_factor",
                  LOCAL[] = "rope_local_base_freq", ORIGINAL[] = "original_max_position_embeddings",
                  SCALING[] = "rope_scaling", PARAMETERS[] = "rope_parameters",
                  FACTOR[] = "attention_factor", TIE[] = "tie_word_embeddings";

/* ---- RoPE ------------------------------------------------------------------------------------ */

static bool is_longrope(const ps_model_config *c) { return c->rope.kind == PS_ROPE_LONGROPE; }

/* How much longer than at first the context is; 0: unknown. */
static double ratio_of(const ps_model_config *c) {
  const uint32_t original = c->rope.original_positions;
  return original ? (double)c->max_positions / original : 0;
}

/* The attention factor to write into RoPE's parameters @s; 0: none. */
static double attention_factor(const ps_model_config *c, const ps__json *s) {
  const double ratio = ratio_of(c);
  if (!is_longrope(c) || ps__config_field(s, FACTOR))
    return 0;
  if (c->rope.attention_factor > 0)
    return c->rope.attention_factor;
  if (c->rope.factor == 0 || ratio == 0 || c->rope.factor == ratio)
    return 0;
  return ps__longrope_attention_factor(ratio, c->rope.original_positions);
}

static bool is_old_key(const ps_model_config *c, const char *key) {
  return !strcmp(key, THETA) || !strcmp(key, SCALING) || !strcmp(key, PARTIAL) ||
         !strcmp(key, LOCAL) || (is_longrope(c) && !strcmp(key, ORIGINAL));
}

static void write_parameters(ps__jsonw *w, const ps_model_config *c, const ps__json *s) {
  const double by = ps__config_field(s, "full_attention") ? 0 : attention_factor(c, s);
  ps__jsonw_object(w, PARAMETERS);
  ps__config_copy_all(w, s);
  if (by > 0)
    ps__jsonw_number(w, FACTOR, by);
  ps__jsonw_end(w);
}

/* rope_scaling from parameters of either layout. Where has_type_alone, transformers 4 takes "type"
 * for "rope_type", and of a longrope three keys: it refuses what these cannot say. */
static void write_scaling(ps__jsonw *w, const ps_model_config *c, const ps__json *s) {
  const bool alone = ps__family_at(c->family)->has_type_alone,
             three = alone && is_longrope(c) && !(c->rope.attention_factor > 0) &&
                     (c->rope.factor == 0 || c->rope.factor == ratio_of(c));
  const ps__json *new_type = ps__config_field(s, "rope_type"),
                 *type = new_type ? new_type : ps__config_field(s, "type");
  const double by = attention_factor(c, s);
  ps__jsonw_object(w, SCALING);
  if (alone)
    ps__jsonw_string(w, "type", is_longrope(c) ? "longrope" : ps__json_string(type, NULL));
  for (size_t i = 0; i < ps__json_length(s); i++) {
    const char *key = ps__json_key(s, i);
    const bool is_type = !strcmp(key, "type") || !strcmp(key, "rope_type"),
               factors = !strcmp(key, "short_factor") || !strcmp(key, "long_factor");
    if (!is_old_key(c, key) && !(alone && is_type) && (!three || factors))
      ps__config_copy(w, key, ps__json_at(s, i));
  }
  if (by > 0)
    ps__jsonw_number(w, FACTOR, by);
  ps__jsonw_end(w);
}

/* The keys that transformers 4 has in place of @parameters. */
static void write_old_keys(ps__jsonw *w, const ps_model_config *c, const ps__json *config,
                           const ps__json *parameters) {
  const ps__json *full = ps__config_field(parameters, "full_attention"),
                 *s = full ? full : parameters;
  const char *const either[] = {THETA, PARTIAL};
  for (size_t i = 0; i < 2; i++) {
    const ps__json *inner = ps__config_field(s, either[i]),
                   *value = inner ? inner : ps__config_field(config, either[i]);
    if (value)
      ps__config_copy(w, either[i], value);
  }
  if (ps__family_at(c->family)->local_rope_key)
    ps__jsonw_number(w, LOCAL, c->local_rope_theta);
  if (is_longrope(c))
    ps__jsonw_uint(w, ORIGINAL, c->rope.original_positions);
  const char *type = ps__json_string(ps__config_field(s, "rope_type"), NULL);
  if (c->rope.kind == PS_ROPE_NONE && (!type || !strcmp(type, "default")))
    ps__jsonw_number(w, SCALING, NAN); /* null */
  else
    write_scaling(w, c, s);
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* What an MXFP4 model of gpt-oss says of its weights. */
static void write_mxfp4(ps__jsonw *w) {
  static const char *const plain[] = {"model.layers.*.self_attn", "model.layers.*.mlp.router",
                                      "model.embed_tokens", "lm_head"};
  ps__jsonw_object(w, "quantization_config");
  ps__jsonw_string(w, "quant_method", "mxfp4");
  ps__jsonw_array(w, "modules_to_not_convert");
  for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
    ps__jsonw_string(w, NULL, plain[i]);
  ps__jsonw_end(w);
  ps__jsonw_end(w);
}

static bool is_dtype_key(const char *key) {
  return strcmp(key, "torch_dtype") == 0 || strcmp(key, "dtype") == 0;
}

static void fill(ps__jsonw *w, const ps__json *config, const ps_model_config *c, ps_dtype as) {
  const bool mxfp4 = (uint32_t)as == PS_SAVE_MXFP4;
  const char *const name = ps__dtypes[mxfp4 ? PS_BF16 : as].torch_name;
  const ps__json *parameters = ps__config_field(config, PARAMETERS);
  const bool new_score = ps__score_is_new(c, config);
  bool named = false;
  if (!ps__json_length(parameters) || ps__family_at(c->family)->is_of_5)
    parameters = NULL;
  ps__jsonw_object(w, NULL);
  for (size_t i = 0; i < ps__json_length(config); i++) {
    const char *key = ps__json_key(config, i);
    const ps__json *value = ps__json_at(config, i);
    if (ps__config_is_quantization(key) || (new_score && ps__score_key(key)))
      continue;
    if (is_dtype_key(key))
      ps__jsonw_string(w, key, name);
    else if (!c->tied_embeddings && !strcmp(key, TIE))
      ps__jsonw_bool(w, key, false);
    else if (parameters && !strcmp(key, PARAMETERS))
      write_parameters(w, c, parameters);
    else if (!parameters && !strcmp(key, SCALING) && c->rope.kind != PS_ROPE_NONE)
      write_scaling(w, c, value);
    else if (!parameters || !is_old_key(c, key))
      ps__config_copy(w, key, value);
    named |= is_dtype_key(key);
  }
  if (parameters)
    write_old_keys(w, c, config, parameters);
  if (new_score)
    ps__score_write(w, c);
  if (!named)
    ps__jsonw_string(w, "torch_dtype", name);
  if (!c->tied_embeddings && !ps__json_get(config, TIE) &&
      ps__family_at(c->family)->tied_by_default)
    ps__jsonw_bool(w, TIE, false);
  if (mxfp4)
    write_mxfp4(w);
  ps__jsonw_end(w);
}

/* A vision-language model's @j: the whole or, under @key, its text_config. RoPE stays as it is. */
static bool fill_whole(ps__jsonw *w, const char *at, const ps__json *j, const ps_model_config *c,
                       const char *dtype) {
  bool named = false;
  ps__jsonw_object(w, at);
  for (size_t i = 0; i < ps__json_length(j); i++) {
    const char *key = ps__json_key(j, i);
    const bool text = !at && !strcmp(key, "text_config");
    if (ps__config_is_quantization(key))
      continue;
    if (is_dtype_key(key))
      ps__jsonw_string(w, key, dtype);
    else if (!c->tied_embeddings && !strcmp(key, TIE))
      ps__jsonw_bool(w, key, false);
    else if (text)
      named |= fill_whole(w, key, ps__json_at(j, i), c, dtype);
    else
      ps__config_copy(w, key, ps__json_at(j, i));
    named |= is_dtype_key(key);
  }
  if (!at && !named)
    ps__jsonw_string(w, "torch_dtype", dtype);
  if (!at && !c->tied_embeddings && !ps__json_get(j, TIE))
    ps__jsonw_bool(w, TIE, false);
  ps__jsonw_end(w);
  return named;
}

static ps_status fill_any(ps__jsonw *w, const ps__json *config, const char *path,
                          const ps_model_config *c, ps_dtype dtype) {
  const ps__tower *tower;
  const ps__json *text;
  ps__json *alone;
  PS_TRY(ps__tower_find(&(ps__config_reader){.j = config, .path = path}, &tower, &text));
  if (!tower) {
    fill(w, config, c, dtype);
  } else if (c->multimodal) {
    (void)fill_whole(w, NULL, config, c, ps__dtypes[dtype].torch_name);
  } else {
    PS_TRY(ps__tower_text_alone(&alone, tower, config, text, c));
    fill(w, alone, c, dtype);
    ps__json_free(alone);
  }
  return PS_OK;
}

ps_status ps__config_fill(ps__jsonw **out, const ps_model_config *c, const char *model_dir,
                          ps_dtype dtype) {
  ps__json *config = NULL;
  ps__jsonw *w = NULL;
  char *from;
  PS_TRY(ps__model_path(&from, model_dir, "config.json"));
  ps_status st = ps__json_read_file(&config, from, PS__MAX_CONFIG_BYTES);
  if (st == PS_OK)
    st = ps__jsonw_create(&w);
  if (st == PS_OK)
    st = fill_any(w, config, from, c, dtype);
  ps__json_free(config);
  ps__free(from);
  if (st == PS_OK)
    *out = w;
  else
    ps__jsonw_free(w);
  return st;
}

ps_status ps_model_config_saves_as(const ps_model_config *c, uint32_t dtype) {
  const ps__family *family = c ? ps__family_at(c->family) : NULL;
  if (!family || (dtype != PS_SAVE_MXFP4 && !ps_dtype_bytes((ps_dtype)dtype)))
    return ps__fail(PS_EINVAL,
                    "a model's config and a dtype must be given, PS_F32, PS_BF16 or PS_SAVE_MXFP4");
  if (dtype != PS_SAVE_MXFP4)
    return PS_OK;
  if (strcmp(family->model_type, "gpt_oss"))
    return ps__fail(PS_EINVAL, "mxfp4 is for gpt_oss alone: a model of %s is saved in bf16 or fp32",
                    family->model_type);
  if (c->dim % PS__MXFP4_BLOCK || c->expert_dim % PS__MXFP4_BLOCK)
    return ps__fail(PS_EINVAL,
                    "mxfp4 has blocks of %d numbers of a row: hidden_size, %u, and "
                    "intermediate_size, %u, must be multiples of it",
                    (int)PS__MXFP4_BLOCK, c->dim, c->expert_dim);
  return PS_OK;
}

ps_status ps_model_config_write(const ps_model_config *cfg, const char *model_dir, ps_dtype dtype,
                                const char *path) {
  ps__jsonw *w;
  if (!cfg || !model_dir || !path)
    return ps__fail(PS_EINVAL, "ps_model_config_write: cfg, model_dir and path must be given");
  PS_TRY(ps_model_config_saves_as(cfg, dtype));
  PS_TRY(ps_model_config_check(cfg, "ps_model_config_write"));
  PS_TRY(ps__config_fill(&w, cfg, model_dir, dtype));
  return ps__jsonw_replace(w, path);
}
