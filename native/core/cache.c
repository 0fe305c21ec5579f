/* cache.c - the user's cache: $XDG_CACHE_HOME/penstock, or ~/.cache/penstock. */
#include "core/core.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

ps_status ps_cache_path(char *out, uint64_t room, const char *name) {
  if (!out || !room || !name)
    return ps__fail(PS_EINVAL, "ps_cache_path: out, room and name must be given");
  const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  const bool own = xdg && xdg[0];
  if (!own && !(home && home[0]))
    return ps__fail(PS_ESTATE, "there is no cache: neither XDG_CACHE_HOME nor HOME is set");
  const char *folder = own ? xdg : home, *below = own ? "penstock" : ".cache/penstock";
  const char *slash = folder[strlen(folder) - 1] == '/' ? "" : "/";
  const int n = snprintf(NULL, 0, "%s%s%s/%s", folder, slash, below, name);
  if (n < 0 || (uint64_t)n >= room)
    return ps__fail(PS_EINVAL, "the path of %s in the cache has %d bytes, there is room for %llu",
                    name, n, (unsigned long long)room - 1);
  snprintf(out, room, "%s%s%s/%s", folder, slash, below, name);
  return PS_OK;
}

/* Make the folder of @path and those above it. */
static ps_status make_folders(const char *path) {
  char *part = ps__malloc(strlen(path) + 1);
  ps_status st = part ? PS_OK : ps__fail(PS_ENOMEM, "%s: no memory left for a path", path);
  for (const char *s = path; st == PS_OK && (s = strchr(s + 1, '/'));) {
    struct stat sb;
    memcpy(part, path, (size_t)(s - path));
    part[s - path] = 0;
    int failed = mkdir(part, 0777) == 0 ? 0 : errno;
    if (failed == EEXIST)
      failed = stat(part, &sb) != 0 ? errno : S_ISDIR(sb.st_mode) ? 0 : ENOTDIR;
    if (failed)
      st = ps__fail(PS_EIO, "%s: %s", part, strerror(failed));
  }
  ps__free(part);
  return st;
}

ps_status ps__cache_write(const char *path, const char *text, size_t bytes) {
  PS_TRY(make_folders(path));
  return ps__replace_text(path, text, bytes);
}
