/* config.c - Hugging Face config.json to ps_model_config; names of dtypes and recipes.
 *
 * Defaults are those of transformers' LlamaConfig, Qwen2Config and Qwen3Config (4.57), which
 * differ. Whatever would change the math and is not computed here is refused by name rather than
 * ignored. */
#include <penstock/model.h>

#include "core/core.h"
#include <errno.h>
#include <float.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>

/* Limits on what a config may say. They keep every product within 2^63: a block has fewer than
 * 2^45 elements (2^20 * 2^22 * 3 + 4 * 2^20 * 2^20), the model fewer than 2^58. */
enum {
  MAX_VOCAB = 1 << 24,
  MAX_LAYERS = 1 << 12,
  MAX_DIM = 1 << 20, /* hidden_size, and heads x head_dim */
  MAX_HEADS = 1 << 14,
  MAX_HEAD_DIM = 1 << 12,
  MAX_FFN = 1 << 22,
  MAX_POSITIONS = 1 << 30
};

size_t ps_dtype_bytes(ps_dtype dtype) { return dtype == PS_F32 ? 4 : dtype == PS_BF16 ? 2 : 0; }

static const char *const recipe_names[PS_N_RECIPES] = {"fp32", "fp32-master", "bf16"};

const char *ps_recipe_name(ps_recipe recipe) {
  return (unsigned)recipe < PS_N_RECIPES ? recipe_names[recipe] : "unknown";
}

ps_status ps_recipe_parse(ps_recipe *out, const char *name) {
  for (int i = 0; name && i < PS_N_RECIPES; i++)
    if (!strcmp(name, recipe_names[i])) {
      *out = (ps_recipe)i;
      return PS_OK;
    }
  return ps__fail(PS_EINVAL, "the state recipe \"%.40s\" is unknown: use fp32, fp32-master or bf16",
                  name ? name : "");
}

/* ---- checking -------------------------------------------------------------------------------- */

static ps_status in_range(const char *name, const char *field, uint32_t value, uint32_t lo,
                          uint32_t hi) {
  if (value >= lo && value <= hi)
    return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: %s is %u: it must be %u to %u", name, field, value, lo, hi);
}

static ps_status check_sizes(const ps_model_config *c, const char *name) {
  PS_TRY(in_range(name, "vocab_size", c->vocab_size, 1, MAX_VOCAB));
  PS_TRY(in_range(name, "num_hidden_layers", c->n_layers, 1, MAX_LAYERS));
  PS_TRY(in_range(name, "hidden_size", c->dim, 1, MAX_DIM));
  PS_TRY(in_range(name, "intermediate_size", c->ffn_dim, 1, MAX_FFN));
  PS_TRY(in_range(name, "num_attention_heads", c->n_heads, 1, MAX_HEADS));
  PS_TRY(in_range(name, "num_key_value_heads", c->n_kv_heads, 1, MAX_HEADS));
  PS_TRY(in_range(name, "head_dim", c->head_dim, 2, MAX_HEAD_DIM));
  PS_TRY(in_range(name, "max_position_embeddings", c->max_positions, 0, MAX_POSITIONS));
  if (c->head_dim % 2)
    return ps__fail(PS_EFORMAT, "%s: head_dim is %u: it must be even, RoPE turns pairs", name,
                    c->head_dim);
  if (c->n_heads % c->n_kv_heads)
    return ps__fail(
        PS_EFORMAT,
        "%s: num_attention_heads is %u: it must be a multiple of num_key_value_heads, %u", name,
        c->n_heads, c->n_kv_heads);
  if ((uint64_t)c->n_heads * c->head_dim > MAX_DIM)
    return ps__fail(PS_EFORMAT,
                    "%s: num_attention_heads x head_dim is %u x %u: at most %u together", name,
                    c->n_heads, c->head_dim, (unsigned)MAX_DIM);
  return PS_OK;
}

static ps_status check_rope(const ps_model_config *c, const char *name) {
  if (!(c->rope_theta >= 1.0 && c->rope_theta <= 1e15))
    return ps__fail(PS_EFORMAT, "%s: rope_theta is %g: it must be 1 to 1e15", name, c->rope_theta);
  if (c->rope_scaling == PS_ROPE_NONE)
    return PS_OK;
  if (!(c->rope_factor >= 1.0f && c->rope_factor <= 1e6f))
    return ps__fail(PS_EFORMAT, "%s: the RoPE scaling's factor is %g: it must be 1 to 1e6", name,
                    (double)c->rope_factor);
  if (c->rope_scaling == PS_ROPE_LINEAR)
    return PS_OK;
  if (!(c->rope_low_freq > 0.0f && c->rope_low_freq < c->rope_high_freq &&
        c->rope_high_freq <= 1e6f))
    return ps__fail(PS_EFORMAT,
                    "%s: the RoPE scaling's low_freq_factor is %g and its high_freq_factor %g: 0 < "
                    "low < high <= 1e6 is needed",
                    name, (double)c->rope_low_freq, (double)c->rope_high_freq);
  return in_range(name, "the RoPE scaling's original_max_position_embeddings",
                  c->rope_original_positions, 1, MAX_POSITIONS);
}

ps_status ps_model_config_check(const ps_model_config *c, const char *name) {
  if (!c)
    return ps__fail(PS_EINVAL, "%s: no model config was given", name ? name : "model config");
  if (!name)
    name = "model config";
  if (c->struct_bytes != sizeof *c)
    return ps__fail(PS_EINVAL,
                    "%s: struct_bytes is %u, this library's ps_model_config has %zu: set it to "
                    "sizeof(ps_model_config)",
                    name, c->struct_bytes, sizeof *c);
  PS_TRY(in_range(name, "arch", c->arch, PS_ARCH_LLAMA, PS_ARCH_QWEN3));
  PS_TRY(check_sizes(c, name));
  PS_TRY(in_range(name, "tie_word_embeddings", c->tied_embeddings, 0, 1));
  PS_TRY(in_range(name, "qkv_bias", c->qkv_bias, 0, 1));
  PS_TRY(in_range(name, "qk_norm", c->qk_norm, 0, 1));
  PS_TRY(in_range(name, "rope_scaling", c->rope_scaling, PS_ROPE_NONE, PS_ROPE_LLAMA3));
  if (!(c->norm_eps >= FLT_MIN && c->norm_eps <= 1.0f))
    return ps__fail(PS_EFORMAT,
                    "%s: rms_norm_eps is %g: it must be above 0 (1.2e-38 in fp32) and at most 1",
                    name, (double)c->norm_eps);
  int32_t ids[2] = {c->bos_token_id, c->eos_token_id};
  for (int i = 0; i < 2; i++)
    if (ids[i] < -1 || ids[i] >= (int64_t)c->vocab_size)
      return ps__fail(PS_EFORMAT, "%s: %s is %d: it must be below vocab_size, %u (-1 for none)",
                      name, i ? "eos_token_id" : "bos_token_id", ids[i], c->vocab_size);
  return check_rope(c, name);
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct reader {
  const ps__json *j;
  const char *path;
} reader;

/* The value of a key; NULL when absent, and null counts as absent. */
static const ps__json *field(const ps__json *j, const char *key) {
  const ps__json *v = ps__json_get(j, key);
  return v && ps__json_type(v) != PS_JSON_NULL ? v : NULL;
}

static const char *kind_name(const ps__json *v) {
  static const char *const names[] = {"null",     "true or false", "a number",
                                      "a string", "a list",        "an object"};
  return names[ps__json_type(v)];
}

/* An unsigned integer. @fallback is used when the key is absent; UINT32_MAX means that it must
 * be there. */
static ps_status get_uint(const reader *r, const ps__json *from, const char *key, uint32_t fallback,
                          uint32_t *out) {
  const ps__json *v = field(from, key);
  uint64_t u;
  if (!v) {
    if (fallback == UINT32_MAX)
      return ps__fail(PS_EFORMAT, "%s: %s is missing: the config must give it", r->path, key);
    *out = fallback;
    return PS_OK;
  }
  if (ps__json_type(v) != PS_JSON_NUMBER)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be a whole number", r->path, key,
                    kind_name(v));
  if (!ps__json_uint64(v, &u) || u >= UINT32_MAX)
    return ps__fail(PS_EFORMAT,
                    "%s: %s is %.40s: it must be a whole number (without a point or an exponent), "
                    "not negative and below 2^32",
                    r->path, key, ps__json_number_text(v));
  *out = (uint32_t)u;
  return PS_OK;
}

static ps_status get_number(const reader *r, const ps__json *from, const char *key, double fallback,
                            double *out) {
  const ps__json *v = field(from, key);
  if (v && ps__json_type(v) != PS_JSON_NUMBER)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be a number", r->path, key, kind_name(v));
  *out = ps__json_number(v, fallback);
  return PS_OK;
}

static ps_status get_bool(const reader *r, const char *key, bool fallback, uint32_t *out) {
  const ps__json *v = field(r->j, key);
  if (v && ps__json_type(v) != PS_JSON_BOOL)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be true or false", r->path, key,
                    kind_name(v));
  *out = ps__json_bool(v, fallback);
  return PS_OK;
}

/* A token id: a number, or a list whose first one is taken; -1 when absent, negative or past the
 * vocabulary (it is only used when text is sampled). */
static ps_status get_token(const reader *r, const char *key, uint32_t vocab, int32_t *out) {
  const ps__json *v = field(r->j, key);
  uint64_t id;
  if (v && ps__json_type(v) == PS_JSON_ARRAY)
    v = ps__json_at(v, 0);
  if (v && ps__json_type(v) != PS_JSON_NUMBER && ps__json_type(v) != PS_JSON_NULL)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be a token id or a list of them", r->path,
                    key, kind_name(v));
  *out = v && ps__json_uint64(v, &id) && id < vocab ? (int32_t)id : -1;
  return PS_OK;
}

static ps_status read_arch(const reader *r, uint32_t *out) {
  static const char *const classes[] = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"};
  static const char *const types[] = {"llama", "qwen2", "qwen3"};
  const ps__json *a = field(r->j, "architectures"), *t = field(r->j, "model_type");
  const char *class = ps__json_string(a ? ps__json_at(a, 0) : NULL, NULL),
             *type = ps__json_string(t, NULL);
  if (!a && !t)
    return ps__fail(PS_EFORMAT,
                    "%s: architectures and model_type are missing: the config must give one",
                    r->path);
  if (a && (!class || ps__json_length(a) != 1))
    return ps__fail(PS_EFORMAT,
                    "%s: architectures must be a list of one name, such as [\"LlamaForCausalLM\"]",
                    r->path);
  if (t && !type)
    return ps__fail(PS_EFORMAT, "%s: model_type is %s: it must be a string", r->path, kind_name(t));
  for (uint32_t i = 0; i < 3; i++) {
    if (class ? strcmp(class, classes[i]) : strcmp(type, types[i]))
      continue;
    if (type && strcmp(type, types[i]))
      return ps__fail(PS_EFORMAT,
                      "%s: model_type is \"%.60s\" but architectures says %s: they must agree",
                      r->path, type, class);
    *out = i;
    return PS_OK;
  }
  return ps__fail(PS_EFORMAT,
                  "%s: %s is \"%.60s\": LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM "
                  "(llama, qwen2, qwen3) "
                  "can be trained",
                  r->path, class ? "architectures" : "model_type", class ? class : type);
}

/* Fields whose presence means another model than the one we compute. */
static ps_status refuse_foreign(const reader *r, uint32_t arch) {
  static const char *const objects[] = {"quantization_config", "compression_config"};
  static const char *const counts[] = {"num_experts", "num_local_experts", "n_routed_experts",
                                       "moe_intermediate_size"};
  uint32_t n, bias, mlp_bias;
  double x = 0;
  for (size_t i = 0; i < 2; i++)
    if (field(r->j, objects[i]))
      return ps__fail(
          PS_EFORMAT,
          "%s: %s is set: quantized weights cannot be trained, use the unquantized model", r->path,
          objects[i]);
  for (size_t i = 0; i < 4; i++) {
    PS_TRY(get_uint(r, r->j, counts[i], 0, &n));
    if (n)
      return ps__fail(PS_EFORMAT,
                      "%s: %s is %u: mixtures of experts are not supported, use a dense model",
                      r->path, counts[i], n);
  }
  PS_TRY(get_uint(r, r->j, "pretraining_tp", 1, &n));
  if (n > 1)
    return ps__fail(PS_EFORMAT, "%s: pretraining_tp is %u: only 1 is supported", r->path, n);
  PS_TRY(get_bool(r, "attention_bias", false, &bias));
  PS_TRY(get_bool(r, "mlp_bias", false, &mlp_bias));
  if (bias && arch != PS_ARCH_QWEN2) /* Qwen2 has its biases whatever this says */
    return ps__fail(PS_EFORMAT,
                    "%s: attention_bias is true: it puts a bias on o_proj, which is not supported",
                    r->path);
  if (mlp_bias)
    return ps__fail(PS_EFORMAT, "%s: mlp_bias is true: biases in the MLP are not supported",
                    r->path);
  PS_TRY(get_number(r, r->j, "attention_dropout", 0, &x));
  if (x != 0)
    return ps__fail(PS_EFORMAT,
                    "%s: attention_dropout is %g: dropout is not supported, set it to 0", r->path,
                    x);
  const ps__json *act = field(r->j, "hidden_act");
  const char *name = ps__json_string(act, NULL);
  if (act && !name)
    return ps__fail(PS_EFORMAT, "%s: hidden_act is %s: it must be \"silu\"", r->path,
                    kind_name(act));
  if (act && strcmp(name, "silu") && strcmp(name, "swish"))
    return ps__fail(PS_EFORMAT, "%s: hidden_act is \"%.60s\": only \"silu\" is supported", r->path,
                    name);
  return PS_OK;
}

/* Sliding windows: in use when layer_types says so, or by Qwen's use_sliding_window from layer
 * max_window_layers on. */
static ps_status refuse_windows(const reader *r, uint32_t arch, uint32_t n_layers) {
  const ps__json *types = field(r->j, "layer_types");
  uint32_t use, window, from;
  if (types && ps__json_type(types) != PS_JSON_ARRAY)
    return ps__fail(PS_EFORMAT, "%s: layer_types is %s: it must be a list", r->path,
                    kind_name(types));
  if (types && ps__json_length(types) != n_layers)
    return ps__fail(PS_EFORMAT,
                    "%s: layer_types has %zu entries: it must have num_hidden_layers, %u", r->path,
                    ps__json_length(types), n_layers);
  for (size_t i = 0; i < ps__json_length(types); i++) {
    const char *type = ps__json_string(ps__json_at(types, i), NULL);
    if (!type || strcmp(type, "full_attention"))
      return ps__fail(PS_EFORMAT,
                      "%s: layer_types[%zu] is \"%.60s\": only \"full_attention\" is supported",
                      r->path, i, type ? type : "not a string");
  }
  if (arch == PS_ARCH_LLAMA || types)
    return PS_OK;
  PS_TRY(get_bool(r, "use_sliding_window", false, &use));
  if (!use)
    return PS_OK;
  PS_TRY(get_uint(r, r->j, "sliding_window", 4096, &window));
  PS_TRY(get_uint(r, r->j, "max_window_layers", 28, &from));
  bool null_window = ps__json_get(r->j, "sliding_window") && !field(r->j, "sliding_window");
  if (from >= n_layers || null_window)
    return PS_OK;
  return ps__fail(PS_EFORMAT,
                  "%s: use_sliding_window is true from layer %u of %u: sliding windows are not "
                  "supported, set it to "
                  "false to train with full attention",
                  r->path, from, n_layers);
}

static ps_status read_sizes(const reader *r, ps_model_config *c) {
  bool qwen = c->arch != PS_ARCH_LLAMA;
  PS_TRY(get_uint(r, r->j, "vocab_size", UINT32_MAX, &c->vocab_size));
  PS_TRY(get_uint(r, r->j, "hidden_size", UINT32_MAX, &c->dim));
  PS_TRY(get_uint(r, r->j, "intermediate_size", UINT32_MAX, &c->ffn_dim));
  PS_TRY(get_uint(r, r->j, "num_hidden_layers", UINT32_MAX, &c->n_layers));
  PS_TRY(get_uint(r, r->j, "num_attention_heads", UINT32_MAX, &c->n_heads));
  PS_TRY(get_uint(r, r->j, "max_position_embeddings", 0, &c->max_positions));
  /* transformers: Qwen's classes default to 32 when the key is absent; null means
   * num_attention_heads everywhere. */
  bool kv_absent = !ps__json_get(r->j, "num_key_value_heads");
  PS_TRY(get_uint(r, r->j, "num_key_value_heads", qwen && kv_absent ? 32 : c->n_heads,
                  &c->n_kv_heads));
  if (field(r->j, "head_dim"))
    return get_uint(r, r->j, "head_dim", 0, &c->head_dim);
  if (c->arch == PS_ARCH_QWEN3 && !ps__json_get(r->j, "head_dim")) {
    c->head_dim = 128;
    return PS_OK;
  }
  PS_TRY(in_range(r->path, "num_attention_heads", c->n_heads, 1, MAX_HEADS));
  if (c->dim % c->n_heads)
    return ps__fail(
        PS_EFORMAT,
        "%s: hidden_size is %u: without head_dim it must be a multiple of num_attention_heads, %u",
        r->path, c->dim, c->n_heads);
  c->head_dim = c->dim / c->n_heads;
  return PS_OK;
}

/* The type under its two names; where both are there, transformers goes by the older one. */
static ps_status read_rope_type(const reader *r, const ps__json *s, const char **out) {
  const ps__json *t = field(s, "rope_type"), *old = field(s, "type");
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
                    r->path, type, old_type ? "\"" : "", old_type ? old_type : kind_name(old),
                    old_type ? "\"" : "");
  *out = type;
  return PS_OK;
}

static ps_status read_scaling(const reader *r, const ps__json *s, ps_model_config *c) {
  double factor = 0, low = 0, high = 0, partial = 0;
  const char *type = NULL;
  PS_TRY(read_rope_type(r, s, &type));
  PS_TRY(get_number(r, s, "partial_rotary_factor", 1, &partial));
  if (partial != 1)
    return ps__fail(PS_EFORMAT, "%s: partial_rotary_factor is %g: only 1 is supported", r->path,
                    partial);
  if (field(s, "mrope_section"))
    return ps__fail(PS_EFORMAT, "%s: mrope_section is set: multimodal RoPE is not supported",
                    r->path);
  if (!strcmp(type, "default"))
    return PS_OK;
  bool llama3 = !strcmp(type, "llama3");
  if (!llama3 && strcmp(type, "linear"))
    return ps__fail(PS_EFORMAT,
                    "%s: rope_type is \"%.60s\": only default, linear and llama3 are supported",
                    r->path, type);
  c->rope_scaling = llama3 ? PS_ROPE_LLAMA3 : PS_ROPE_LINEAR;
  PS_TRY(get_number(r, s, "factor", -1, &factor));
  if (!field(s, "factor"))
    return ps__fail(PS_EFORMAT, "%s: factor is missing: rope_type \"%s\" needs it", r->path, type);
  c->rope_factor = (float)factor;
  if (!llama3)
    return PS_OK;
  static const char *const needed[] = {"low_freq_factor", "high_freq_factor",
                                       "original_max_position_embeddings"};
  for (size_t i = 0; i < 3; i++)
    if (!field(s, needed[i]))
      return ps__fail(PS_EFORMAT, "%s: %s is missing: rope_type \"llama3\" needs it", r->path,
                      needed[i]);
  PS_TRY(get_number(r, s, needed[0], 0, &low));
  PS_TRY(get_number(r, s, needed[1], 0, &high));
  c->rope_low_freq = (float)low;
  c->rope_high_freq = (float)high;
  return get_uint(r, s, needed[2], UINT32_MAX, &c->rope_original_positions);
}

/* RoPE: rope_theta and rope_scaling at the top, or (transformers 5) both inside rope_parameters. */
static ps_status read_rope(const reader *r, ps_model_config *c) {
  const ps__json *scaling = field(r->j, "rope_scaling"),
                 *parameters = field(r->j, "rope_parameters");
  const ps__json *s = parameters ? parameters : scaling;
  double partial = 0, inner = 0;
  if (scaling && parameters)
    return ps__fail(PS_EFORMAT,
                    "%s: rope_scaling and rope_parameters are both set: keep one of them", r->path);
  if (s && ps__json_type(s) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be an object", r->path,
                    parameters ? "rope_parameters" : "rope_scaling", kind_name(s));
  PS_TRY(get_number(r, r->j, "partial_rotary_factor", 1, &partial));
  if (partial != 1)
    return ps__fail(PS_EFORMAT, "%s: partial_rotary_factor is %g: only 1 is supported", r->path,
                    partial);
  PS_TRY(get_number(r, r->j, "rope_theta", 10000.0, &c->rope_theta));
  PS_TRY(get_number(r, parameters, "rope_theta", c->rope_theta, &inner));
  if (field(r->j, "rope_theta") && inner != c->rope_theta)
    return ps__fail(PS_EFORMAT, "%s: rope_theta is %g, but %g in rope_parameters: they must agree",
                    r->path, c->rope_theta, inner);
  c->rope_theta = inner;
  return s ? read_scaling(r, s, c) : PS_OK;
}

static ps_status read_config(const reader *r, ps_model_config *out) {
  ps_model_config c = {.struct_bytes = sizeof c};
  double eps = 0;
  if (ps__json_type(r->j) != PS_JSON_OBJECT)
    return ps__fail(PS_EFORMAT, "%s: is %s: a model config must be an object", r->path,
                    kind_name(r->j));
  PS_TRY(read_arch(r, &c.arch));
  PS_TRY(refuse_foreign(r, c.arch));
  PS_TRY(read_sizes(r, &c));
  PS_TRY(get_number(r, r->j, "rms_norm_eps", 1e-6, &eps));
  c.norm_eps = (float)eps;
  PS_TRY(get_bool(r, "tie_word_embeddings", false, &c.tied_embeddings));
  PS_TRY(get_token(r, "bos_token_id", c.vocab_size, &c.bos_token_id));
  PS_TRY(get_token(r, "eos_token_id", c.vocab_size, &c.eos_token_id));
  c.qkv_bias = c.arch == PS_ARCH_QWEN2;
  c.qk_norm = c.arch == PS_ARCH_QWEN3;
  PS_TRY(read_rope(r, &c));
  PS_TRY(ps_model_config_check(&c, r->path));
  PS_TRY(refuse_windows(r, c.arch, c.n_layers));
  *out = c;
  return PS_OK;
}

ps_status ps_model_config_read(ps_model_config *out, const char *path) {
  if (!out || !path)
    return ps__fail(PS_EINVAL,
                    "ps_model_config_read: no path or no place for the result was given");
  struct stat st;
  if (stat(path, &st) != 0)
    return ps__fail(PS_EIO, "%s: cannot be opened: %s", path, strerror(errno));
  char *file = NULL;
  if (S_ISDIR(st.st_mode))
    PS_TRY(ps__model_path(&file, path, "config.json"));
  else if (!(file = ps__strdup(path)))
    return ps__fail(PS_ENOMEM, "%s: no memory left to read the config", path);
  ps__json *j = NULL;
  ps_status r = ps__json_read_file(&j, file, PS__MAX_CONFIG_BYTES);
  if (r == PS_OK)
    r = read_config(&(reader){.j = j, .path = file}, out);
  ps__json_free(j);
  ps__free(file);
  return r;
}
