/* pending.c - moves DIR/.penstock-new, which is a whole new model, up into DIR (see stage.c). */
#include "io/stage.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static ps_status move_failed(const char *dir, const char *name) {
  const int why = errno;
  return ps__fail(PS_EIO,
                  "%s: the new model is complete in %s/%s and counts, but %s cannot be replaced: "
                  "%s; the next save into %s tries again",
                  dir, dir, PS__MODEL_PENDING, name, strerror(why), dir);
}

static ps_status remove_replaced(int dir, int pending, const char *path) {
  const int config = ps__exists_in(pending, "config.json");
  if (config < 0 || (config && unlinkat(dir, "config.json", 0) != 0 && errno != ENOENT))
    return move_failed(path, "config.json");
  ps_status st = PS_OK;
  ps__names names;
  if (!ps__list_names(dir, &names))
    return move_failed(path, "the old model");
  /* The record says which files are the old model's: it goes last. */
  for (int last = 0; last < 2; last++)
    for (size_t i = 0; st == PS_OK && i < names.n; i++) {
      const char *e = names.item[i];
      const int replaced = last == (strcmp(e, PS__RECORD) == 0) ? ps__replaced(dir, pending, e) : 0;
      if (replaced < 0 || (replaced && unlinkat(dir, e, 0) != 0 && errno != ENOENT))
        st = move_failed(path, e);
    }
  ps__free_names(&names);
  (void)unlinkat(dir, PS__TEMPLATES, AT_REMOVEDIR); /* unless some stay */
  if (st == PS_OK)
    st = ps__sync_open_dir(dir, path);
  if (st == PS_OK && unlinkat(pending, PS__REPLACING, 0) != 0)
    st = move_failed(path, PS__REPLACING);
  return st == PS_OK ? ps__sync_open_dir(pending, path) : st;
}

static ps_status move_up(int dir, int pending, const char *name, const char *path) {
  return ps__make_folder_of(dir, name) &&
                 (renameat(pending, name, dir, name) == 0 || errno == ENOENT)
             ? PS_OK
             : move_failed(path, name);
}

/* An index moves after its shards, and config.json moves last. */
static ps_status move_all(int dir, int pending, const char *path) {
  ps_status st = PS_OK;
  ps__names names;
  if (!ps__list_names(pending, &names))
    return move_failed(path, "the old model");
  for (int now = 0; now < 3; now++)
    for (size_t i = 0; st == PS_OK && i < names.n; i++) {
      const char *e = names.item[i];
      size_t stem;
      const int order = strcmp(e, "config.json") == 0                        ? 2
                        : ps__ends_with(e, ".safetensors.index.json", &stem) ? 1
                                                                             : 0;
      if (order == now)
        st = move_up(dir, pending, e, path);
    }
  ps__free_names(&names);
  if (st == PS_OK && unlinkat(pending, PS__TEMPLATES, AT_REMOVEDIR) != 0 && errno != ENOENT)
    st = move_failed(path, PS__TEMPLATES);
  return st;
}

ps_status ps__move_pending(int dir, int pending, const char *path) {
  const int replacing = ps__exists_in(pending, PS__REPLACING);
  ps_status st = PS_OK;
  if (replacing < 0)
    st = move_failed(path, "the old model");
  if (replacing > 0)
    st = remove_replaced(dir, pending, path);
  if (st == PS_OK)
    st = move_all(dir, pending, path);
  if (st == PS_OK)
    st = ps__sync_open_dir(dir, path);
  if (st == PS_OK && unlinkat(dir, PS__MODEL_PENDING, AT_REMOVEDIR) != 0 && errno != ENOENT)
    st = move_failed(path, PS__MODEL_PENDING);
  return st;
}

ps_status ps__finish_pending(int dir, const char *path) {
  for (int i = 0; i < PS__MAX_TRIES; i++) {
    const int pending = openat(dir, PS__MODEL_PENDING, PS__DIR_FLAGS);
    if (pending < 0)
      return errno == ENOENT ? PS_OK
                             : ps__fail(PS_EIO, "%s/%s: cannot be opened: %s", path,
                                        PS__MODEL_PENDING, strerror(errno));
    (void)ps__lock(pending, LOCK_EX); /* without locks on this file system nobody is waited for */
    const bool ours = ps__is_at(pending, dir, PS__MODEL_PENDING);
    const ps_status st = ours ? ps__move_pending(dir, pending, path) : PS_OK;
    close(pending);
    if (ours)
      return st;
  }
  return ps__fail(PS_EIO,
                  "%s/%s is replaced again and again: wait for the other saves into %s to end",
                  path, PS__MODEL_PENDING, path);
}
