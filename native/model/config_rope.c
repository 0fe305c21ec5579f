/* config_rope.c - RoPE as config.json has it. */
#include "model/family.h"
#include <string.h>

/* The type under its two names; where both are there, transformers goes by the older one. */
static ps_status read_rope_type(const ps__config_reader *r, const ps__json *s, const char **out) {
  const ps__json *t = ps__config_field(s, "rope_type"), *old = ps__config_field(s, "type");
  const char *type = ps__json_string(t ? t : old, NULL), *old_type = ps__json_string(old, NULL);
  if (!type)
    return ps__fail(
        PS_EFORMAT,
        "%s: the RoPE parameters have no rope_type: \"default\", \"linear\" or \"llama3\" is "
        "needed",
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

static ps_status read_scaling(const ps__config_reader *r, const ps__json *s, ps_model_config *c) {
  double partial = 0;
  const char *type = NULL;
  PS_TRY(read_rope_type(r, s, &type));
  PS_TRY(ps__config_number(r, s, "partial_rotary_factor", 1, &partial));
  if (partial != 1)
    return ps__fail(PS_EFORMAT, "%s: partial_rotary_factor is %g: only 1 is supported", r->path,
                    partial);
  if (ps__config_field(s, "mrope_section"))
    return ps__fail(PS_EFORMAT, "%s: mrope_section is set: multimodal RoPE is not supported",
                    r->path);
  if (!strcmp(type, "default"))
    return PS_OK;
  bool llama3 = !strcmp(type, "llama3");
  if (!llama3 && strcmp(type, "linear"))
    return ps__fail(PS_EFORMAT,
                    "%s: rope_type is \"%.60s\": only default, linear and llama3 are supported",
                    r->path, type);
  c->rope.kind = llama3 ? PS_ROPE_LLAMA3 : PS_ROPE_LINEAR;
  PS_TRY(ps__config_number(r, s, "factor", -1, &c->rope.factor));
  if (!ps__config_field(s, "factor"))
    return ps__fail(PS_EFORMAT, "%s: factor is missing: rope_type \"%s\" needs it", r->path, type);
  if (!llama3)
    return PS_OK;
  static const char *const needed[] = {"low_freq_factor", "high_freq_factor",
                                       "original_max_position_embeddings"};
  for (size_t i = 0; i < 3; i++)
    if (!ps__config_field(s, needed[i]))
      return ps__fail(PS_EFORMAT, "%s: %s is missing: rope_type \"llama3\" needs it", r->path,
                      needed[i]);
  PS_TRY(ps__config_number(r, s, needed[0], 0, &c->rope.low_freq_factor));
  PS_TRY(ps__config_number(r, s, needed[1], 0, &c->rope.high_freq_factor));
  return ps__config_uint(r, s, needed[2], PS__CONFIG_REQUIRED, &c->rope.original_positions);
}

ps_status ps__config_rope(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *scaling = ps__config_field(r->j, "rope_scaling"),
                 *parameters = ps__config_field(r->j, "rope_parameters");
  const ps__json *s = parameters ? parameters : scaling;
  double partial = 0, inner = 0;
  if (scaling && parameters)
    return ps__fail(PS_EFORMAT,
                    "%s: rope_scaling and rope_parameters are both set: keep one of them", r->path);
  if (s && ps__json_type(s) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be an object", r->path,
                    parameters ? "rope_parameters" : "rope_scaling", ps__config_kind(s));
  PS_TRY(ps__config_number(r, r->j, "partial_rotary_factor", 1, &partial));
  if (partial != 1)
    return ps__fail(PS_EFORMAT, "%s: partial_rotary_factor is %g: only 1 is supported", r->path,
                    partial);
  PS_TRY(ps__config_number(r, r->j, "rope_theta", 10000.0, &c->rope.theta));
  PS_TRY(ps__config_number(r, parameters, "rope_theta", c->rope.theta, &inner));
  if (ps__config_field(r->j, "rope_theta") && inner != c->rope.theta)
    return ps__fail(PS_EFORMAT, "%s: rope_theta is %g, but %g in rope_parameters: they must agree",
                    r->path, c->rope.theta, inner);
  c->rope.theta = inner;
  return s ? read_scaling(r, s, c) : PS_OK;
}
