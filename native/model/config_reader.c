/* config_reader.c - values of config.json by key, what several families read alike, and values that
 * are written as they are. */
#include "model/family.h"
#include <math.h>
#include <string.h>

const ps__json *ps__config_field(const ps__json *j, const char *key) {
  const ps__json *v = ps__json_get(j, key);
  return v && ps__json_type(v) != PS_JSON_NULL ? v : NULL;
}

const char *ps__config_kind(const ps__json *v) {
  static const char *const names[] = {"null",     "true or false", "a number",
                                      "a string", "a list",        "an object"};
  return names[ps__json_type(v)];
}

/* The default of a key that @from lacks: the reader's own, of the model's own object. */
static double absent(const ps__config_reader *r, const ps__json *from, const char *key,
                     double fallback) {
  const ps__config_default *d = from == r->j && !ps__json_get(from, key) ? r->absent : NULL;
  for (; d && d->key; d++)
    if (!strcmp(d->key, key))
      return d->value;
  return fallback;
}

/* Is @v, unless it is NULL, of @type? @what: as a message says it. */
static ps_status of_type(const ps__config_reader *r, const char *key, const ps__json *v,
                         ps__json_kind type, const char *what) {
  if (!v || ps__json_type(v) == type)
    return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be %s", r->path, key, ps__config_kind(v),
                  what);
}

ps_status ps__config_uint(const ps__config_reader *r, const ps__json *from, const char *key,
                          uint32_t fallback, uint32_t *out) {
  const ps__json *v = ps__config_field(from, key);
  uint64_t u;
  fallback = (uint32_t)absent(r, from, key, fallback);
  if (!v) {
    if (fallback == PS__CONFIG_REQUIRED)
      return ps__fail(PS_EFORMAT, "%s: %s is missing: the config must give it", r->path, key);
    *out = fallback;
    return PS_OK;
  }
  PS_TRY(of_type(r, key, v, PS_JSON_NUMBER, "a whole number"));
  if (!ps__json_uint64(v, &u) || u >= UINT32_MAX)
    return ps__fail(PS_EFORMAT,
                    "%s: %s is %.40s: it must be a whole number (without a point or an exponent), "
                    "not negative and below 2^32",
                    r->path, key, ps__json_number_text(v));
  *out = (uint32_t)u;
  return PS_OK;
}

ps_status ps__config_number(const ps__config_reader *r, const ps__json *from, const char *key,
                            double fallback, double *out) {
  const ps__json *v = ps__config_field(from, key);
  PS_TRY(of_type(r, key, v, PS_JSON_NUMBER, "a number"));
  *out = ps__json_number(v, absent(r, from, key, fallback));
  return PS_OK;
}

ps_status ps__config_positive(const ps__config_reader *r, const char *key, double fallback,
                              double *out) {
  PS_TRY(ps__config_number(r, r->j, key, fallback, out));
  if (*out > 0 && *out <= 1e6)
    return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: %s is %g: it must be above 0 and at most 1e6", r->path, key,
                  *out);
}

ps_status ps__config_bool(const ps__config_reader *r, const ps__json *from, const char *key,
                          bool fallback, uint32_t *out) {
  const ps__json *v = ps__config_field(from, key);
  PS_TRY(of_type(r, key, v, PS_JSON_BOOL, "true or false"));
  *out = ps__json_bool(v, fallback);
  return PS_OK;
}

ps_status ps__config_token(const ps__config_reader *r, const char *key, uint32_t vocab,
                           int32_t *out) {
  const ps__json *v = ps__config_field(r->j, key);
  uint64_t id;
  if (!v && r->outer)
    v = ps__config_field(r->outer, key);
  if (v && ps__json_type(v) == PS_JSON_ARRAY)
    v = ps__json_at(v, 0);
  if (v && ps__json_type(v) != PS_JSON_NULL)
    PS_TRY(of_type(r, key, v, PS_JSON_NUMBER, "a token id or a list of them"));
  *out = v && ps__json_uint64(v, &id) && id < vocab ? (int32_t)id : -1;
  return PS_OK;
}

ps_status ps__config_pad(const ps__config_reader *r, const ps__family *family, ps_model_config *c) {
  const ps__json *v = ps__config_field(r->j, "pad_token_id");
  const char *text = ps__json_number_text(v);
  uint64_t id;
  c->pad_token_id = -1;
  if (!ps__json_get(r->j, "pad_token_id") && family->has_default_pad &&
      family->default_pad < c->vocab_size)
    c->pad_token_id = (int32_t)family->default_pad;
  if (!v)
    return PS_OK;
  if (!text)
    return ps__fail(PS_EFORMAT, "%s: pad_token_id is %s: it must be a token id, or null for none",
                    r->path, ps__config_kind(v));
  const bool from_end = text[0] == '-';
  if (!ps__json_text_uint64(text + from_end, strlen(text + from_end), &id) ||
      id > c->vocab_size - (from_end ? 0u : 1u))
    return ps__fail(PS_EFORMAT,
                    "%s: pad_token_id is %.40s: it must be a token id below vocab_size, %u, or "
                    "null for none; transformers refuses it too",
                    r->path, text, c->vocab_size);
  c->pad_token_id = (int32_t)(from_end && id ? c->vocab_size - id : id);
  return PS_OK;
}

ps_status ps__config_in_range(const char *name, const char *field, uint32_t value, uint32_t lo,
                              uint32_t hi) {
  if (value >= lo && value <= hi)
    return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: %s is %u: it must be %u to %u", name, field, value, lo, hi);
}

/* Entry @i of layer_types; NULL where it is no string. */
static const char *layer_type(const ps__json *types, size_t i) {
  return ps__json_string(ps__json_at(types, i), NULL);
}

static ps_status read_layer_types(const ps__config_reader *r, const ps_model_config *c,
                                  const ps__json **out) {
  const ps__json *types = ps__config_field(r->j, "layer_types");
  PS_TRY(of_type(r, "layer_types", types, PS_JSON_ARRAY, "a list"));
  if (types && ps__json_length(types) != c->n_layers)
    return ps__fail(PS_EFORMAT,
                    "%s: layer_types has %zu entries: it must have num_hidden_layers, %u", r->path,
                    ps__json_length(types), c->n_layers);
  *out = types;
  return PS_OK;
}

ps_status ps__config_full_attention(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *types = NULL;
  PS_TRY(read_layer_types(r, c, &types));
  for (size_t i = 0; i < ps__json_length(types); i++) {
    const char *type = layer_type(types, i);
    if (!type || strcmp(type, "full_attention"))
      return ps__fail(PS_EFORMAT,
                      "%s: layer_types[%zu] is \"%.60s\": only \"full_attention\" is supported",
                      r->path, i, type ? type : "not a string");
  }
  return PS_OK;
}

ps_status ps__config_layer_types(const ps__config_reader *r, ps_model_config *c, uint8_t flags,
                                 bool *given, uint32_t *sliding) {
  const ps__json *types = NULL;
  PS_TRY(read_layer_types(r, c, &types));
  *given = types != NULL;
  *sliding = 0;
  for (size_t i = 0; i < ps__json_length(types); i++) {
    const char *type = layer_type(types, i);
    const bool slides = type && !strcmp(type, "sliding_attention");
    if (!slides && (!type || strcmp(type, "full_attention")))
      return ps__fail(PS_EFORMAT,
                      "%s: layer_types[%zu] is \"%.60s\": only \"full_attention\" and "
                      "\"sliding_attention\" are supported",
                      r->path, i, type ? type : "not a string");
    if (slides)
      c->layer_flags[i] |= flags;
    *sliding += slides;
  }
  return PS_OK;
}

ps_status ps__config_window(const ps__config_reader *r, uint32_t fallback, uint32_t *out) {
  const bool is_null =
      ps__json_get(r->j, "sliding_window") && !ps__config_field(r->j, "sliding_window");
  *out = 0;
  if (is_null)
    return PS_OK;
  PS_TRY(ps__config_uint(r, r->j, "sliding_window", fallback, out));
  if (*out == 0 && ps__config_field(r->j, "sliding_window"))
    return ps__fail(PS_EFORMAT, "%s: sliding_window is 0: it must be above 0, or null for none",
                    r->path);
  return PS_OK;
}

ps_status ps__config_needs_window(const ps__config_reader *r, const ps_model_config *c,
                                  uint32_t sliding, const char *why) {
  if (!sliding || c->window)
    return PS_OK;
  return ps__fail(PS_EFORMAT,
                  "%s: layer_types has sliding_attention in %u layers, but %s: give the window, or "
                  "name them full_attention",
                  r->path, sliding, why);
}

ps_status ps__config_sliding_layers(const ps__config_reader *r, ps_model_config *c, uint8_t flags,
                                    uint32_t pattern) {
  uint32_t sliding;
  bool given = false;
  PS_TRY(ps__config_window(r, 4096, &c->window));
  PS_TRY(ps__config_layer_types(r, c, flags, &given, &sliding));
  for (uint32_t i = 0; !given && i < c->n_layers; i++)
    if ((i + 1) % pattern) {
      c->layer_flags[i] = flags;
      sliding++;
    }
  return ps__config_needs_window(r, c, sliding, "sliding_window is null");
}

ps_status ps__config_local_rope(const ps__config_reader *r, const char *key, double fallback,
                                ps_model_config *c) {
  const ps__json *local = ps__config_field(ps__config_field(r->j, "rope_parameters"),
                                           "sliding_attention"),
                 *type = ps__config_field(local, "rope_type");
  double beside = fallback;
  if (key)
    PS_TRY(ps__config_number(r, r->j, key, fallback, &beside));
  PS_TRY(ps__config_number(r, local, "rope_theta", beside, &c->local_rope_theta));
  if (key && ps__config_field(r->j, key) && c->local_rope_theta != beside)
    return ps__fail(PS_EFORMAT,
                    "%s: %s is %g, but rope_theta is %g in rope_parameters.sliding_attention: they "
                    "must agree",
                    r->path, key, beside, c->local_rope_theta);
  const char *name = ps__json_string(type, NULL);
  if (type && (!name || strcmp(name, "default")))
    return ps__fail(PS_EFORMAT,
                    "%s: rope_parameters.sliding_attention has rope_type \"%.60s\": only "
                    "\"default\" is supported there",
                    r->path, name ? name : ps__config_kind(type));
  return PS_OK;
}

/* ---- writing -------------------------------------------------------------------------------- */

void ps__config_copy_all(ps__jsonw *w, const ps__json *j) {
  for (size_t i = 0; i < ps__json_length(j); i++)
    ps__config_copy(w, ps__json_type(j) == PS_JSON_OBJECT ? ps__json_key(j, i) : NULL,
                    ps__json_at(j, i));
}

void ps__config_copy(ps__jsonw *w, const char *key, const ps__json *j) {
  switch (ps__json_type(j)) {
  case PS_JSON_OBJECT:
    ps__jsonw_object(w, key);
    ps__config_copy_all(w, j);
    ps__jsonw_end(w);
    break;
  case PS_JSON_ARRAY:
    ps__jsonw_array(w, key);
    ps__config_copy_all(w, j);
    ps__jsonw_end(w);
    break;
  case PS_JSON_STRING: ps__jsonw_string(w, key, ps__json_string(j, NULL)); break;
  case PS_JSON_BOOL: ps__jsonw_bool(w, key, ps__json_bool(j, false)); break;
  case PS_JSON_NUMBER: ps__jsonw_number_text(w, key, ps__json_number_text(j)); break;
  default: ps__jsonw_number(w, key, NAN); break; /* null */
  }
}
