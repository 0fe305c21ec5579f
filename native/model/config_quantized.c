/* config_quantized.c - quantized weights as config.json describes them: FP8 with scales is read
 * (io/quantized.c), and MXFP4 of gpt-oss (io/mxfp4.c); all else is refused. */
#include "model/family.h"
#include <string.h>

enum { BLOCK = 128 /* rows and columns that share a scale, as io/quantized.c reads them */ };

/* @method  quant_method. Some say more by a second key, whose value must then be FP8's. */
static const struct {
  const char *method, *key, *value;
} fp8[] = {
    {"fp8", NULL, NULL},        /* DeepSeek, Qwen, Mistral: blocks or one scale a tensor */
    {"fbgemm_fp8", NULL, NULL}, /* Llama: a scale a row */
    {"modelopt", "quant_algo", "FP8"},
    {"compressed-tensors", "format", "float-quantized"},
};

bool ps__config_is_quantization(const char *key) {
  return !strcmp(key, "quantization_config") || !strcmp(key, "compression_config");
}

static const char *string_at(const ps__json *j, const char *key) {
  const char *text = ps__json_string(ps__config_field(j, key), NULL);
  return text ? text : "not given";
}

static ps_status check(const ps__config_reader *r, const char *object, const ps__json *j) {
  const char *method = string_at(j, "quant_method");
  const ps__json *block = ps__config_field(j, "weight_block_size");
  size_t i = 0;
  if (!strcmp(method, "mxfp4") && !strcmp(string_at(r->j, "model_type"), "gpt_oss"))
    return PS_OK;
  while (i < sizeof fp8 / sizeof *fp8 &&
         (strcmp(method, fp8[i].method) ||
          (fp8[i].key && strcmp(string_at(j, fp8[i].key), fp8[i].value))))
    i++;
  if (i == sizeof fp8 / sizeof *fp8)
    return ps__fail(PS_EFORMAT,
                    "%s: %s: quant_method is %.40s: of quantized weights only FP8 with scales is "
                    "read (fp8, fbgemm_fp8, modelopt, compressed-tensors in float-quantized), and "
                    "mxfp4 of gpt_oss: use the unquantized model",
                    r->path, object, method);
  for (size_t k = 0; block && k < 2; k++)
    if (ps__json_length(block) != 2 || ps__json_number(ps__json_at(block, k), 0) != BLOCK)
      return ps__fail(PS_EFORMAT, "%s: %s: weight_block_size must be [%d, %d]", r->path, object,
                      BLOCK, BLOCK);
  return PS_OK;
}

ps_status ps__config_check_quantization(const ps__config_reader *r) {
  for (size_t i = 0; i < ps__json_length(r->j); i++) {
    const char *key = ps__json_key(r->j, i);
    const ps__json *value = ps__config_field(r->j, key);
    if (!value || !ps__config_is_quantization(key))
      continue;
    if (ps__json_type(value) != PS_JSON_OBJECT)
      return ps__fail(PS_EFORMAT, "%s: %s is %s: it must be an object", r->path, key,
                      ps__config_kind(value));
    PS_TRY(check(r, key, value));
  }
  return PS_OK;
}
