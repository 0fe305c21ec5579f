/* fused.c - a layer's experts as one tensor. transformers 5 may save gate_up_proj [E,2I,D] and
 * down_proj [E,D,I]. Here they are the tensors of each expert, as other files have them: each is a
 * range of the fused tensor. Fused files of all families have the same names, the others have those
 * of their family.
 *
 * gpt-oss has no other files. Its matrices are transposed, [E,D,2I] and [E,I,D], with the columns
 * of gate and up by turns; or they are MXFP4 (mxfp4.c), then not transposed: gate_up_proj_blocks
 * [E,2I,D/32,16] with gate_up_proj_scales [E,2I,D/32]. Here an expert has gate_up_proj [2I,D] and
 * down_proj [D,I].
 *
 * Gemma 4 has no other files either. Its fused tensors are experts.gate_up_proj and
 * experts.down_proj, without "mlp" before. */
#include "io/tensor_file.h"
#include "core/core.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_NAME = 512 /* of an expert's tensor */ };

/* Of a family's files without fused tensors: what stands for "mlp.experts", and an expert's
 * products. @up NULL: gpt-oss. */
typedef struct family {
  const char *experts, *down, *gate, *up, *end;
} family;
static const family usual = {"mlp.experts", "down_proj", "gate_proj", "up_proj", ".weight"},
                    mixtral = {"block_sparse_moe.experts", "w2", "w1", "w3", ".weight"},
                    gpt_oss = {"mlp.experts", "down_proj", "gate_up_proj", NULL, ""},
                    gemma = {"experts", "down_proj", "gate_proj", "up_proj", ".weight"};

static ps_status no_memory(const char *name) {
  return ps__fail(PS_ENOMEM, "no memory left for the experts of tensor %s", name);
}

static const family *family_of(const char *dir) {
  ps__json *j = NULL;
  char *path;
  if (ps__model_path(&path, dir, "config.json") != PS_OK)
    return &usual;
  const char *type = NULL;
  if (ps__json_read_file(&j, path, PS__MAX_CONFIG_BYTES) == PS_OK)
    type = ps__json_string(ps__json_get(j, "model_type"), NULL);
  const family *of = type && !strcmp(type, "mixtral")   ? &mixtral
                     : type && !strcmp(type, "gpt_oss") ? &gpt_oss
                                                        : &usual;
  ps__json_free(j);
  ps__free(path);
  return of;
}

/* Whether @name ends with @end, after a dot: *stem is then the length of what comes before. */
static bool ends_with(const char *name, const char *end, size_t *stem) {
  const size_t n = strlen(name), m = strlen(end);
  *stem = n - m;
  return n > m && name[n - m - 1] == '.' && !strcmp(name + n - m, end);
}

/* Tensors of an expert in @t, which is fused; 0: it is not. *stem: the length of its name before
 * "mlp.experts" or, in Gemma 4, "experts". */
static uint32_t fused_in(const tensor *t, size_t *stem) {
  if (ps__mxfp4_blocks(t))
    return ends_with(t->name, "mlp.experts.down_proj_blocks", stem)      ? 1
           : ends_with(t->name, "mlp.experts.gate_up_proj_blocks", stem) ? 2
                                                                         : 0;
  static const char *const starts[] = {"mlp.experts", "experts"};
  for (size_t i = 0; t->info.n_dims == 3 && i < 2; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s.down_proj", starts[i]);
    if (ends_with(t->name, name, stem))
      return 1;
    snprintf(name, sizeof name, "%s.gate_up_proj", starts[i]);
    if (t->info.shape[1] % 2 == 0 && ends_with(t->name, name, stem))
      return 2;
  }
  return 0;
}

/* gpt-oss: expert @i of @of, in @out. */
static void cut_transposed(tensor *out, const tensor *of, uint64_t i) {
  const bool blocks = ps__mxfp4_blocks(of);
  const uint64_t bytes = of->info.bytes / of->info.shape[0];
  out->info.n_dims = 2;
  out->info.shape[0] = of->info.shape[blocks ? 1 : 2];
  out->info.shape[1] = blocks ? of->info.shape[2] * PS__MXFP4_BLOCK : of->info.shape[1];
  out->info.shape[2] = out->info.shape[3] = 0;
  out->info.n = out->info.shape[0] * out->info.shape[1];
  out->info.bytes = bytes;
  out->begin += i * bytes;
  out->transposed = !blocks;
  out->expert = i;
  if (blocks)
    snprintf(out->info.dtype, sizeof out->info.dtype, PS__MXFP4);
}

/* Tensor @i of those that are in @of. */
static ps_status make_slice(tensor *out, const tensor *of, const family *as, size_t stem,
                            uint64_t i, uint32_t each) {
  char name[MAX_NAME];
  const uint64_t rows = of->info.shape[1] / each, cols = of->info.shape[2];
  const bool down = strstr(of->name + stem, "down_proj");
  const char *what = down ? as->down : as->up && i % 2 ? as->up : as->gate;
  snprintf(name, sizeof name, "%.*s%s.%" PRIu64 ".%s%s", (int)stem, of->name, as->experts, i / each,
           what, as->end);
  *out = *of;
  out->name = ps__strdup(name);
  out->info.name = out->name;
  if (!as->up) {
    cut_transposed(out, of, i);
    return out->name ? PS_OK : no_memory(of->name);
  }
  out->info.n_dims = 2;
  out->info.shape[0] = rows;
  out->info.shape[1] = cols;
  out->info.shape[2] = 0;
  out->info.n = rows * cols;
  out->info.bytes = of->info.bytes / of->info.shape[0] / each;
  out->begin += i * out->info.bytes;
  return out->name ? PS_OK : no_memory(of->name);
}

ps_status ps__tensors_part(ps_tensor_file *f, size_t at, uint64_t i, const tensor *part) {
  if (i && !PS_GROW(f->tensors, f->n, f->cap)) {
    ps__free(part->name);
    return ps__fail(PS_ENOMEM, "no memory left for the parts of tensors in %s",
                    f->files[part->file].path);
  }
  f->tensors[i ? f->n++ : at] = *part;
  return PS_OK;
}

static ps_status split(ps_tensor_file *f, size_t most, const family *as, size_t at, size_t stem,
                       uint32_t each) {
  const tensor of = f->tensors[at];
  const uint64_t n = of.info.shape[0] * each;
  if (!of.info.n || n > most - f->n)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" has %" PRIu64 " experts: too many, or empty",
                    f->files[of.file].path, of.name, of.info.shape[0]);
  for (uint64_t i = 0; i < n; i++) {
    tensor t;
    PS_TRY(make_slice(&t, &of, as, stem, i, each));
    PS_TRY(ps__tensors_part(f, at, i, &t));
  }
  ps__free(of.name);
  return PS_OK;
}

/* The router's name is the family's too. */
static ps_status rename_router(tensor *t, const family *as) {
  char name[MAX_NAME];
  size_t stem;
  if (as != &mixtral || !ends_with(t->name, "mlp.gate.weight", &stem))
    return PS_OK;
  snprintf(name, sizeof name, "%.*sblock_sparse_moe.gate.weight", (int)stem, t->name);
  char *copy = ps__strdup(name);
  if (!copy)
    return no_memory(t->name);
  ps__free(t->name);
  t->info.name = t->name = copy;
  return PS_OK;
}

ps_status ps__tensors_split(ps_tensor_file *f, const char *dir, size_t most) {
  const family *as = NULL;
  const size_t n = f->n;
  for (size_t i = 0; i < n; i++) {
    size_t stem = 0;
    const uint32_t each = fused_in(&f->tensors[i], &stem);
    if (each && !as)
      as = strncmp(f->tensors[i].name + stem, "mlp.", 4) ? &gemma : family_of(dir);
    if (each && as->up && ps__mxfp4_blocks(&f->tensors[i]))
      return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" is in MXFP4, which is read of gpt_oss alone",
                      f->files[f->tensors[i].file].path, f->tensors[i].name);
    if (each)
      PS_TRY(split(f, most, as, i, stem, as->up ? each : 1));
  }
  f->fused = as;
  for (size_t i = 0; as && i < f->n; i++)
    PS_TRY(rename_router(&f->tensors[i], as));
  return PS_OK;
}

uint32_t ps__fused_name(char *out, size_t bytes, const char *param) {
  static const struct {
    const char *end, *fused;
    uint32_t each;
  } names[] = {{"mlp.experts.0.gate_proj.weight", "mlp.experts.gate_up_proj", 2},
               {"mlp.experts.0.down_proj.weight", "mlp.experts.down_proj", 1},
               {"block_sparse_moe.experts.0.w1.weight", "mlp.experts.gate_up_proj", 2},
               {"block_sparse_moe.experts.0.w2.weight", "mlp.experts.down_proj", 1},
               {"block_sparse_moe.gate.weight", "mlp.gate.weight", 0},
               {"mlp.experts.0.gate_up_proj", "mlp.experts.gate_up_proj", 1},
               {"mlp.experts.0.down_proj", "mlp.experts.down_proj", 1},
               {"experts.0.gate_proj.weight", "experts.gate_up_proj", 2},
               {"experts.0.down_proj.weight", "experts.down_proj", 1}};
  size_t stem;
  for (size_t k = 0; k < sizeof names / sizeof *names; k++)
    if (ends_with(param, names[k].end, &stem)) {
      snprintf(out, bytes, "%.*s%s", (int)stem, param, names[k].fused);
      return names[k].each;
    }
  snprintf(out, bytes, "%s", param);
  return 0;
}

bool ps__fused_transposed(const char *param) {
  size_t stem;
  return ends_with(param, "gate_up_proj", &stem) || ends_with(param, "down_proj", &stem);
}
