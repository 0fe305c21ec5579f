/* tower.c - names of the text model's tensors in a vision-language checkpoint. Files of two layouts
 * have a prefix more than those of the text model alone:
 *   old   language_model.model.layers.0..., language_model.lm_head.weight
 *   new   model.language_model.layers.0..., lm_head.weight
 * Adapters have PEFT's prefix before either. Here they have the names of the text model alone. */
#include "io/tower.h"
#include "core/core.h"
#include "io/tensor_file.h"
#include <stdio.h>
#include <string.h>

static const char PEFT[] = "base_model.model.", MODEL[] = "model.";
static const struct {
  const char *on_disk, *here;
} prefix[] = {
    [PS__NAMES_OLD] = {"language_model.", ""}, [PS__NAMES_NEW] = {"model.language_model.", MODEL}};

static const char *after(const char *name, const char *start) {
  const size_t n = strlen(start);
  return strncmp(name, start, n) ? NULL : name + n;
}

/* The layout that @name is of; *rest: what follows the prefix. */
static uint32_t layout_of(const char *name, const char **rest) {
  uint32_t k = PS__NAMES_NEW;
  while (k > PS__NAMES_PLAIN && !(*rest = after(name, prefix[k].on_disk)))
    k--;
  return k;
}

ps_status ps__tensors_rename(ps_tensor_file *f) {
  for (size_t i = 0; i < f->n; i++) {
    tensor *t = &f->tensors[i];
    const char *bare = after(t->name, PEFT), *rest = NULL;
    const uint32_t layout = layout_of(bare ? bare : t->name, &rest);
    if (layout == PS__NAMES_PLAIN)
      continue;
    const size_t bytes = strlen(t->name) + 1;
    char *name = ps__malloc(bytes);
    if (!name)
      return ps__fail(PS_ENOMEM, "no memory left for the name of tensor %s", t->name);
    snprintf(name, bytes, "%s%s%s", bare ? PEFT : "", prefix[layout].here, rest);
    ps__free(t->name);
    t->name = name;
    t->info.name = name;
    f->names = layout;
  }
  return PS_OK;
}

bool ps__name_is_of_text(const char *name) {
  static const char *const starts[] = {"model.layers.", "model.embed_tokens.", "model.norm.",
                                       "lm_head."};
  const char *bare = after(name, PEFT);
  for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
    if (after(bare ? bare : name, starts[i]))
      return true;
  return false;
}

uint32_t ps__tensors_names(const ps_tensor_file *f) { return f->names; }

void ps__name_on_disk(char *out, size_t bytes, uint32_t layout, const char *name) {
  const char *bare = after(name, PEFT), *rest = bare ? bare : name,
             *here = layout == PS__NAMES_PLAIN ? NULL : after(rest, prefix[layout].here);
  snprintf(out, bytes, "%s%s%s", bare ? PEFT : "", here ? prefix[layout].on_disk : "",
           here ? here : rest);
}

ps_status ps_tensors_name_on_disk(const ps_tensor_file *f, const char *name, char *out,
                                  uint64_t bytes) {
  if (!f || !name || !out || bytes < strlen(name) + sizeof "model.language_model.")
    return ps__fail(PS_EINVAL, "ps_tensors_name_on_disk: file, name and room for it must be given");
  ps__name_on_disk(out, bytes, f->names, name);
  return PS_OK;
}
