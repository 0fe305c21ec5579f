/* model_files.c - says which files of a directory are a model's. */
#include "io/stage.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

const char *const ps__tokenizer_files[] = {"tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "vocab.json",
                                           "merges.txt",
                                           "tokenizer.model",
                                           "added_tokens.json",
                                           "chat_template.jinja",
                                           "preprocessor_config.json",
                                           "video_preprocessor_config.json",
                                           "processor_config.json",
                                           "chat_template.json",
                                           NULL};

bool ps__in_tokenizer(const char *name) {
  if (ps__starts_with(name, PS__TEMPLATES "/") || strcmp(name, PS__TEMPLATES) == 0)
    return true;
  for (const char *const *f = ps__tokenizer_files; *f; f++)
    if (strcmp(*f, name) == 0)
      return true;
  return false;
}

bool ps__ends_with(const char *name, const char *end, size_t *stem) {
  const size_t n = strlen(name), k = strlen(end);
  if (n <= k || strcmp(name + n - k, end) != 0)
    return false;
  *stem = n - k;
  return true;
}

/* The length of STEM in STEM.safetensors, STEM-0000i-of-0000n.safetensors and
 * STEM.safetensors.index.json; 0 for other names. */
static size_t weights_stem(const char *name) {
  static const char shard[] = "-00000-of-00000";
  size_t stem, k = sizeof shard - 1;
  if (ps__ends_with(name, ".safetensors.index.json", &stem))
    return stem;
  if (!ps__ends_with(name, ".safetensors", &stem))
    return 0;
  if (stem <= k)
    return stem;
  for (size_t i = 0; i < k; i++) {
    const char c = name[stem - k + i];
    if (shard[i] == '0' ? c < '0' || c > '9' : c != shard[i])
      return stem;
  }
  return stem - k;
}

bool ps__in_model(const char *name) {
  return strcmp(name, "config.json") == 0 || strcmp(name, "generation_config.json") == 0 ||
         strcmp(name, PS__MANIFEST) == 0 || strcmp(name, PS__RECORD) == 0 ||
         strcmp(name, "adapter_config.json") == 0 || ps__in_tokenizer(name) || weights_stem(name);
}

int ps__exists_in(int dir, const char *name) {
  return faccessat(dir, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0 ? 1 : errno == ENOENT ? 0 : -1;
}

int ps__superseded(int dir, const char *name) {
  char entry[NAME_MAX + 32];
  const int stem = (int)weights_stem(name);
  if (!ps__in_model(name))
    return 0;
  int is = ps__exists_in(dir, name);
  if (ps__in_tokenizer(name))
    for (const char *const *f = ps__tokenizer_files; is == 0 && *f; f++)
      is = ps__exists_in(dir, *f);
  if (is == 0 && stem) {
    snprintf(entry, sizeof entry, "%.*s.safetensors", stem, name);
    is = ps__exists_in(dir, entry);
  }
  if (is == 0 && stem) {
    snprintf(entry, sizeof entry, "%.*s.safetensors.index.json", stem, name);
    is = ps__exists_in(dir, entry);
  }
  return is;
}

int ps__replaced(int dir, int fresh, const char *name) {
  int is = ps__superseded(fresh, name);
  if (is == 1 && ps__in_tokenizer(name))
    is = ps__exists_in(fresh, name);
  else
    return is;
  return is == 0 ? ps__recorded(dir, name) : is;
}

ps_status ps__warn_kept(int dir, int fresh, const char *path) {
  ps__names names;
  ps_status st = PS_OK;
  errno = 0;
  bool read = ps__list_names(dir, &names);
  for (size_t i = 0; read && i < names.n; i++) {
    const int superseded = ps__superseded(fresh, names.item[i]),
              replaced = superseded == 1 ? ps__replaced(dir, fresh, names.item[i]) : 1;
    if (superseded < 0 || replaced < 0)
      st = ps__fail(errno == ENOMEM ? PS_ENOMEM : PS_EIO, "%s: %s cannot be looked at: %s", path,
                    names.item[i], strerror(errno));
    else if (!replaced)
      ps__log(PS_LOG_WARN,
              "%s: %s was not written by Penstock and stays beside the saved tokenizer, which has "
              "no such file: remove it if it is of another tokenizer",
              path, names.item[i]);
  }
  if (!read)
    return ps__fail(errno == ENOMEM ? PS_ENOMEM : PS_EIO, "%s: cannot be read: %s", path,
                    strerror(errno));
  ps__free_names(&names);
  return st;
}
