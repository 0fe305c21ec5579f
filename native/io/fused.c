/* fused.c - a layer's experts as one tensor. transformers 5 may save gate_up_proj [E,2I,D] and
 * down_proj [E,D,I]. Here they are the tensors of each expert, as other files have them: each is a
 * range of the fused tensor. */
#include "io/tensor_file.h"
#include "core/core.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_NAME = 512 /* of an expert's tensor */ };

static ps_status no_memory(const char *name) {
  return ps__fail(PS_ENOMEM, "no memory left for the experts of tensor %s", name);
}

/* Tensors of an expert in @t, which is fused; 0: it is not. *stem: the length of its name before
 * "gate_up_proj" or "down_proj". */
static uint32_t fused_in(const tensor *t, size_t *stem) {
  static const char *const ends[] = {".experts.down_proj", ".experts.gate_up_proj"};
  const size_t n = strlen(t->name);
  for (uint32_t k = 0; k < 2; k++) {
    const size_t m = strlen(ends[k]);
    if (t->info.n_dims != 3 || n <= m || strcmp(t->name + n - m, ends[k]) ||
        t->info.shape[1] % (k + 1))
      continue;
    *stem = n - m + strlen(".experts.");
    return k + 1;
  }
  return 0;
}

/* Tensor @i of the @n that are in @of. */
static ps_status make_slice(tensor *out, const tensor *of, size_t stem, uint64_t i, uint32_t each) {
  static const char *const what[2][2] = {{"down_proj"}, {"gate_proj", "up_proj"}};
  char name[MAX_NAME];
  const uint64_t rows = of->info.shape[1] / each, cols = of->info.shape[2];
  snprintf(name, sizeof name, "%.*s%" PRIu64 ".%s.weight", (int)stem, of->name, i / each,
           what[each - 1][i % each]);
  *out = *of;
  out->name = ps__strdup(name);
  out->info.name = out->name;
  out->info.n_dims = 2;
  out->info.shape[0] = rows;
  out->info.shape[1] = cols;
  out->info.shape[2] = 0;
  out->info.n = rows * cols;
  out->info.bytes = of->info.bytes / of->info.shape[0] / each;
  out->begin += i * out->info.bytes;
  return out->name ? PS_OK : no_memory(of->name);
}

/* The first slice takes the fused tensor's place, the others follow all tensors. */
static ps_status split(ps_tensor_file *f, size_t most, size_t at, size_t stem, uint32_t each) {
  const tensor of = f->tensors[at];
  const uint64_t n = of.info.shape[0] * each;
  if (!of.info.n || n > most - f->n)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" has %" PRIu64 " experts: too many, or empty",
                    f->files[of.file].path, of.name, of.info.shape[0]);
  for (uint64_t i = 0; i < n; i++) {
    tensor t;
    void *tensors = f->tensors;
    PS_TRY(make_slice(&t, &of, stem, i, each));
    const bool grown = i == 0 || ps__grow(&tensors, f->n, &f->cap, sizeof t);
    f->tensors = tensors;
    if (!grown) {
      ps__free(t.name);
      return no_memory(of.name);
    }
    f->tensors[i ? f->n++ : at] = t;
  }
  ps__free(of.name);
  return PS_OK;
}

ps_status ps__tensors_split(ps_tensor_file *f, size_t most) {
  const size_t n = f->n;
  for (size_t i = 0; i < n; i++) {
    size_t stem = 0;
    const uint32_t each = fused_in(&f->tensors[i], &stem);
    if (each)
      PS_TRY(split(f, most, i, stem, each));
    f->fused |= each > 0;
  }
  return PS_OK;
}
