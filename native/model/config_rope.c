/* config_rope.c - RoPE as config.json has it. */
#include "model/family.h"
#include "model/rope.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* "longrope" for the names that it has had in the family. A text has one position a token for all
 * three axes of M-RoPE (arXiv 2409.12191), which is plain RoPE then. */
static const char *new_name(const ps__config_reader *r, const ps_model_config *c,
                            const char *type) {
  const char *const *old = ps__family_at(c->family)->longrope_names;
  if (type && r->outer && !strcmp(type, "mrope"))
    return "default";
  for (; type && old && *old; old++)
    if (!strcmp(type, *old))
      return "longrope";
  return type;
}

/* Whether RoPE's parameters say nothing of a scaling: transformers 5 takes "default". */
static bool has_no_scaling(const ps__json *s) {
  for (size_t i = 0; i < ps__json_length(s); i++)
    if (ps__json_type(ps__json_at(s, i)) != PS_JSON_NULL &&
        strcmp(ps__json_key(s, i), "rope_theta") &&
        strcmp(ps__json_key(s, i), "partial_rotary_factor"))
      return false;
  return true;
}

/* The type under its two names, which must agree. */
static ps_status read_rope_type(const ps__config_reader *r, const ps_model_config *c,
                                const ps__json *s, const char **out) {
  const ps__json *t = ps__config_field(s, "rope_type"), *old = ps__config_field(s, "type");
  const char *type = new_name(r, c, ps__json_string(t ? t : old, NULL)),
             *old_type = new_name(r, c, ps__json_string(old, NULL));
  if (!type && has_no_scaling(s))
    type = "default";
  if (!type)
    return ps__fail(PS_EFORMAT,
                    "%s: the RoPE parameters have no rope_type: \"default\", \"linear\", "
                    "\"llama3\", \"yarn\", \"longrope\" or \"dynamic\" is needed",
                    r->path);
  if (old && (!old_type || strcmp(type, old_type)))
    return ps__fail(PS_EFORMAT,
                    "%s: the RoPE parameters' rope_type is \"%.60s\", but their type is %s%.60s%s: "
                    "they must agree",
                    r->path, type, old_type ? "\"" : "", old_type ? old_type : ps__config_kind(old),
                    old_type ? "\"" : "");
  *out = type;
  return PS_OK;
}

/* A scaling needs all of @keys, which end with NULL. */
static ps_status need_keys(const ps__config_reader *r, const ps__json *s, const char *type,
                           const char *const *keys) {
  for (; *keys; keys++)
    if (!ps__config_field(s, *keys))
      return ps__fail(PS_EFORMAT, "%s: %s is missing: rope_type \"%s\" needs it", r->path, *keys,
                      type);
  return PS_OK;
}

/* linear and dynamic */
static ps_status read_factor(const ps__config_reader *r, const ps__json *s, ps_model_config *c) {
  static const char *const needed[] = {"factor", NULL};
  PS_TRY(need_keys(r, s, c->rope.kind == PS_ROPE_LINEAR ? "linear" : "dynamic", needed));
  return ps__config_number(r, s, "factor", 0, &c->rope.factor);
}

static ps_status read_llama3(const ps__config_reader *r, const ps__json *s, ps_model_config *c) {
  static const char *const needed[] = {"factor", "low_freq_factor", "high_freq_factor",
                                       "original_max_position_embeddings", NULL};
  PS_TRY(need_keys(r, s, "llama3", needed));
  PS_TRY(ps__config_number(r, s, needed[0], 0, &c->rope.factor));
  PS_TRY(ps__config_number(r, s, needed[1], 0, &c->rope.low_freq_factor));
  PS_TRY(ps__config_number(r, s, needed[2], 0, &c->rope.high_freq_factor));
  return ps__config_uint(r, s, needed[3], PS__CONFIG_REQUIRED, &c->rope.original_positions);
}

static ps_status read_yarn(const ps__config_reader *r, const ps__json *s, ps_model_config *c) {
  static const char *const needed[] = {"factor", NULL};
  uint32_t truncate = 1;
  PS_TRY(need_keys(r, s, "yarn", needed));
  PS_TRY(ps__config_number(r, s, "factor", 0, &c->rope.factor));
  PS_TRY(ps__config_number(r, s, "attention_factor", 0, &c->rope.attention_factor));
  PS_TRY(ps__config_number(r, s, "beta_fast", 0, &c->rope.beta_fast));
  PS_TRY(ps__config_number(r, s, "beta_slow", 0, &c->rope.beta_slow));
  PS_TRY(ps__config_number(r, s, "mscale", 0, &c->rope.mscale));
  PS_TRY(ps__config_number(r, s, "mscale_all_dim", 0, &c->rope.mscale_all_dim));
  PS_TRY(ps__config_bool(r, s, "truncate", true, &truncate));
  c->rope.keep_fraction = !truncate;
  return ps__config_uint(r, s, "original_max_position_embeddings", 0, &c->rope.original_positions);
}

static ps_status read_factors(const ps__config_reader *r, const ps__json *s, const char *key,
                              uint32_t n, double *out) {
  const ps__json *list = ps__config_field(s, key);
  if (ps__json_type(list) != PS_JSON_ARRAY)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be a list of numbers", r->path, key,
                    ps__config_kind(list));
  if (ps__json_length(list) != n || n > PS_ROPE_PAIRS)
    return ps__fail(PS_EFORMAT,
                    "%s: %s has %zu entries: it must have half as many as RoPE turns elements of a "
                    "head, %u, and at most %d",
                    r->path, key, ps__json_length(list), n, PS_ROPE_PAIRS);
  for (uint32_t i = 0; i < n; i++) {
    const ps__json *x = ps__json_at(list, i);
    if (ps__json_type(x) != PS_JSON_NUMBER)
      return ps__fail(PS_EFORMAT, "%s: %s[%u] is %s: it must be a number", r->path, key, i,
                      ps__config_kind(x));
    out[i] = ps__json_number(x, 0);
  }
  return PS_OK;
}

/* The attention factor follows from factor in transformers 5, and in transformers 4 from the ratio
 * of the lengths. Where they differ, the version that wrote the file counts. */
static ps_status follow_version(const ps__config_reader *r, ps_model_config *c) {
  const ps_rope *p = &c->rope;
  const double ratio = p->original_positions ? (double)c->max_positions / p->original_positions : 0;
  const char *version = ps__json_string(ps__config_field(r->j, "transformers_version"), NULL);
  if (p->factor == 0 || p->attention_factor > 0 || !p->original_positions || !c->max_positions ||
      p->factor == ratio || (p->factor <= 1 && ratio <= 1))
    return PS_OK;
  const long major = version ? strtol(version, NULL, 10) : 0;
  if (major < 4)
    return ps__fail(PS_EFORMAT,
                    "%s: longrope's factor is %g, but max_position_embeddings / "
                    "original_max_position_embeddings is %g: transformers 5 takes the first and "
                    "transformers 4 the second, so set transformers_version or make them agree",
                    r->path, p->factor, ratio);
  if (r->warn)
    ps__log(PS_LOG_WARN,
            "%s: longrope's factor is %g, but max_position_embeddings / "
            "original_max_position_embeddings is %g: %s is taken, as by transformers %.20s, which "
            "wrote the file",
            r->path, p->factor, ratio, major > 4 ? "factor" : "the ratio", version);
  if (major > 4)
    c->rope.attention_factor = ps__longrope_attention_factor(p->factor, p->original_positions);
  return PS_OK;
}

/* transformers 4 reads original_max_position_embeddings beside rope_scaling alone, transformers 5
 * reads it in rope_parameters. */
static ps_status read_longrope(const ps__config_reader *r, const ps__json *s, ps_model_config *c) {
  static const char *const key = "original_max_position_embeddings", *const needed[] = {
                                                                         "short_factor",
                                                                         "long_factor", NULL};
  const uint32_t n = (c->rope.rotary_dim ? c->rope.rotary_dim : c->head_dim) / 2,
                 fallback = ps__family_at(c->family)->default_original_positions;
  uint32_t inner = 0, outer = 0;
  PS_TRY(need_keys(r, s, "longrope", needed));
  PS_TRY(read_factors(r, s, needed[0], n, c->rope.short_factor));
  PS_TRY(read_factors(r, s, needed[1], n, c->rope.long_factor));
  PS_TRY(ps__config_number(r, s, "factor", 0, &c->rope.factor));
  PS_TRY(ps__config_number(r, s, "attention_factor", 0, &c->rope.attention_factor));
  PS_TRY(ps__config_uint(r, s, key, 0, &inner));
  PS_TRY(ps__config_uint(r, r->j, key, 0, &outer));
  if (inner && inner != outer && (outer || !ps__config_field(r->j, "rope_parameters")))
    return ps__fail(PS_EFORMAT,
                    "%s: %s is %u in rope_scaling, and %u beside it: both must be there and agree",
                    r->path, key, inner, outer);
  c->rope.original_positions = outer ? outer : inner ? inner : fallback;
  return follow_version(r, c);
}

static const struct {
  const char *type;
  uint32_t kind;
  ps_status (*read)(const ps__config_reader *r, const ps__json *s, ps_model_config *c);
} scalings[] = {
    {"linear", PS_ROPE_LINEAR, read_factor},   {"llama3", PS_ROPE_LLAMA3, read_llama3},
    {"yarn", PS_ROPE_YARN, read_yarn},         {"longrope", PS_ROPE_LONGROPE, read_longrope},
    {"dynamic", PS_ROPE_DYNAMIC, read_factor},
};

/* theta alpha^(d/(d-2)) */
static ps_status read_alpha(const ps__config_reader *r, const ps__json *s, ps_model_config *c) {
  double alpha = 0;
  PS_TRY(ps__config_number(r, s, "alpha", 0, &alpha));
  if (!(alpha > 0 && alpha <= 1e6) || c->head_dim <= 2)
    return ps__fail(PS_EFORMAT,
                    "%s: alpha is %g in RoPE's parameters, and head_dim %u: it must be above 0 and "
                    "at most 1e6, and head_dim above 2",
                    r->path, alpha, c->head_dim);
  c->rope.theta *= pow(alpha, c->head_dim / (c->head_dim - 2.0));
  return PS_OK;
}

static ps_status read_scaling(const ps__config_reader *r, const ps__json *s, ps_model_config *c) {
  const char *type = NULL;
  PS_TRY(read_rope_type(r, c, s, &type));
  if (ps__config_field(s, "mrope_section") && !r->outer && !ps__family_at(c->family)->has_mrope)
    return ps__fail(PS_EFORMAT, "%s: mrope_section is set: multimodal RoPE is not supported",
                    r->path);
  if (!strcmp(type, "default"))
    return PS_OK;
  if (!strcmp(type, "dynamic") && ps__family_at(c->family)->has_ntk_alpha &&
      ps__config_field(s, "alpha"))
    return read_alpha(r, s, c);
  for (size_t i = 0; i < sizeof scalings / sizeof *scalings; i++)
    if (!strcmp(type, scalings[i].type)) {
      c->rope.kind = scalings[i].kind;
      return scalings[i].read(r, s, c);
    }
  return ps__fail(PS_EFORMAT,
                  "%s: rope_type is \"%.60s\": only default, linear, llama3, yarn, longrope and "
                  "dynamic are supported",
                  r->path, type);
}

/* A number that stands in rope_parameters, beside them, or in both alike. */
static ps_status read_in_either(const ps__config_reader *r, const ps__json *inside, const char *key,
                                double fallback, double *out) {
  double outer = 0;
  PS_TRY(ps__config_number(r, r->j, key, fallback, &outer));
  PS_TRY(ps__config_number(r, inside, key, outer, out));
  if (ps__config_field(r->j, key) && *out != outer)
    return ps__fail(PS_EFORMAT, "%s: %s is %g, but %g in RoPE's parameters: they must agree",
                    r->path, key, outer, *out);
  return PS_OK;
}

static ps_status read_partial(const ps__config_reader *r, const ps__json *inside,
                              ps_model_config *c) {
  double partial = 0;
  const double fallback = ps__family_at(c->family)->default_partial_rope;
  PS_TRY(read_in_either(r, inside, "partial_rotary_factor", fallback > 0 ? fallback : 1, &partial));
  if (partial == 1)
    return PS_OK;
  if (!ps__family_at(c->family)->has_partial_rope)
    return ps__fail(PS_EFORMAT, "%s: partial_rotary_factor is %g: only 1 is supported", r->path,
                    partial);
  if (!(partial > 0 && partial < 1 && (uint32_t)(c->head_dim * partial) > 0))
    return ps__fail(PS_EFORMAT,
                    "%s: partial_rotary_factor is %g: it must be above 0 and at most 1, and leave "
                    "elements of a head to turn",
                    r->path, partial);
  c->rope.rotary_dim = (uint32_t)(c->head_dim * partial);
  return PS_OK;
}

/* All of RoPE from @s, the parameters in either layout; NULL: theta alone. */
static ps_status read_rope(const ps__config_reader *r, const ps__json *s, ps_model_config *c) {
  const ps__family *family = ps__family_at(c->family);
  PS_TRY(read_in_either(r, s, "rope_theta",
                        family->default_rope_theta > 0 ? family->default_rope_theta : 10000.0,
                        &c->rope.theta));
  PS_TRY(read_partial(r, s, c));
  return s ? read_scaling(r, s, c) : PS_OK;
}

/* NULL for {}, which says as much as null. */
static const ps__json *not_empty(const ps__json *s) {
  return s && ps__json_type(s) == PS_JSON_OBJECT && !ps__json_length(s) ? NULL : s;
}

ps_status ps__config_rope(const ps__config_reader *r, ps_model_config *c) {
  const ps__family *family = ps__family_at(c->family);
  const ps__json *scaling = not_empty(ps__config_field(r->j, "rope_scaling")),
                 *parameters = not_empty(ps__config_field(r->j, "rope_parameters"));
  const ps__json *s = parameters ? parameters : scaling;
  if (s && ps__json_type(s) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be an object", r->path,
                    parameters ? "rope_parameters" : "rope_scaling", ps__config_kind(s));
  const bool by_type = family->has_local_rope && ps__config_field(parameters, "full_attention");
  if (by_type)
    s = ps__config_field(parameters, "full_attention");
  ps_model_config old = *c;
  PS_TRY(read_rope(r, s, c));
  if (by_type) /* transformers does not look for truncate there */
    c->rope.keep_fraction = 0;
  if (!scaling || !parameters)
    return PS_OK;
  if (ps__json_type(scaling) == PS_JSON_OBJECT)
    PS_TRY(read_rope(
        &(ps__config_reader){.j = r->j, .path = r->path, .outer = r->outer, .absent = r->absent},
        scaling, &old));
  if (by_type)
    old.rope.keep_fraction = 0;
  if (memcmp(&old.rope, &c->rope, sizeof old.rope) != 0)
    return ps__fail(PS_EFORMAT,
                    "%s: rope_scaling and rope_parameters are both set and disagree: keep one of "
                    "them",
                    r->path);
  return PS_OK;
}
