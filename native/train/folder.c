/* folder.c - names, finds and removes the checkpoints in a folder. The newest is the one with the
 * highest serial in its manifest: a checkpoint gets the number after those of its folder and of the
 * checkpoint that its run began from. A step's number would say less: a run that goes on from an
 * older checkpoint leaves later steps of another run behind. */
#include "train/resume.h"
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "step-"

ps_status ps_checkpoint_path(char *path, uint64_t bytes, const char *folder, uint64_t step) {
  const int n = snprintf(path, bytes, "%s/" PREFIX "%08llu", folder, (unsigned long long)step);
  return n >= 0 && (uint64_t)n < bytes
             ? PS_OK
             : ps__fail(PS_EINVAL, "%.200s...: the path is too long", folder);
}

/* PREFIX and 8 digits, or more where the step has more. */
static bool is_checkpoint(const char *name, uint64_t *step) {
  const size_t k = sizeof PREFIX - 1, n = strlen(name);
  if (strncmp(name, PREFIX, k) != 0 || n < k + 8 || n > k + 18 ||
      strspn(name + k, "0123456789") != n - k)
    return false;
  *step = strtoull(name + k, NULL, 10);
  return true;
}

typedef struct found {
  char *name;
  uint64_t step, serial, run_id;
  bool unread; /* the disk cannot read its manifest */
} found;

static int newest_first(const void *a, const void *b) {
  const found *x = a, *y = b;
  if (x->serial != y->serial)
    return x->serial < y->serial ? 1 : -1;
  return (x->step < y->step) - (x->step > y->step);
}

static void free_list(found *list, size_t n) {
  for (size_t i = 0; i < n; i++)
    ps__free(list[i].name);
  ps__free(list);
}

/* Read what the manifest of checkpoint @dir says of its order. The serial is 0 where the manifest
 * is missing or damaged, or where the disk cannot read it. PS_ENOMEM. */
static ps_status read_order(const char *dir, found *f) {
  char *path = NULL;
  ps__json *j = NULL;
  bool exists = false;
  ps_status st = ps__model_path(&path, dir, PS__MANIFEST);
  if (st == PS_OK)
    st = ps__path_exists(path, &exists);
  if (st == PS_OK && exists)
    st = ps__json_read_file(&j, path, PS__MAX_MANIFEST_BYTES);
  const ps__json *value = j ? ps__json_get(j, "serial") : NULL;
  if (!value || !ps__json_uint64(value, &f->serial))
    f->serial = 0;
  f->run_id = j ? ps__manifest_run_id(j) : 0;
  f->unread = st == PS_EIO;
  ps__json_free(j);
  ps__free(path);
  return st == PS_ENOMEM ? st : PS_OK;
}

static ps_status read_listed(const char *folder, found *f) {
  char *dir = ps__path_join(folder, f->name);
  const ps_status st =
      dir ? read_order(dir, f) : ps__fail(PS_ENOMEM, "%s: no memory left to list it", folder);
  ps__free(dir);
  return st;
}

/* The checkpoints of @folder, newest first. None where it does not exist. */
static ps_status list_folder(const char *folder, found **out, size_t *n) {
  found *list = NULL;
  size_t cap = 0;
  uint64_t step;
  ps_status st = PS_OK;
  *n = 0;
  DIR *d = opendir(folder);
  if (!d && errno != ENOENT)
    return ps__fail(PS_EIO, "%s: cannot be read: %s", folder, strerror(errno));
  errno = 0;
  for (const struct dirent *e; d && st == PS_OK && (e = readdir(d)); errno = 0) {
    if (!is_checkpoint(e->d_name, &step))
      continue;
    char *name = PS_GROW(list, *n, cap) ? ps__strdup(e->d_name) : NULL;
    if (name) {
      list[*n] = (found){.name = name, .step = step};
      st = read_listed(folder, &list[(*n)++]);
    } else
      st = ps__fail(PS_ENOMEM, "%s: no memory left to list it", folder);
  }
  if (d && st == PS_OK && errno)
    st = ps__fail(PS_EIO, "%s: cannot be read: %s", folder, strerror(errno));
  if (d)
    closedir(d);
  if (st == PS_OK && *n)
    qsort(list, *n, sizeof *list, newest_first);
  if (st == PS_OK)
    *out = list;
  else
    free_list(list, *n);
  return st;
}

ps_status ps__checkpoints_next_serial(const char *folder, uint64_t after, uint64_t *out) {
  found *list;
  size_t n;
  ps_status st = list_folder(folder, &list, &n);
  if (st != PS_OK)
    return st;
  *out = 1 + (n && list[0].serial > after ? list[0].serial : after);
  for (size_t i = 0; i < n && st == PS_OK; i++)
    if (list[i].unread)
      st = ps__fail(PS_EIO,
                    "%s/%s/" PS__MANIFEST " cannot be read, and says how new that checkpoint is: "
                    "remove it, or repair the disk",
                    folder, list[i].name);
  free_list(list, n);
  return st;
}

static ps_status open_in(ps_checkpoint **out, const char *folder, const char *name) {
  char *path = ps__path_join(folder, name);
  const ps_status st = path ? ps_checkpoint_open(out, path)
                            : ps__fail(PS_ENOMEM, "%s: no memory left for a path", folder);
  ps__free(path);
  return st;
}

ps_status ps_checkpoint_latest(ps_checkpoint **out, const char *folder) {
  found *list;
  size_t n;
  if (!out || !folder)
    return ps__fail(PS_EINVAL, "ps_checkpoint_latest: out and folder must be given");
  *out = NULL;
  PS_TRY(list_folder(folder, &list, &n));
  ps_status st = PS_OK;
  for (size_t i = 0; i < n; i++) {
    st = open_in(out, folder, list[i].name);
    if (st != PS_EFORMAT && st != PS_EIO)
      break;
    ps__log(PS_LOG_WARN, "%s/%s is no whole checkpoint and is passed over: %s", folder,
            list[i].name, ps_last_error());
  }
  if (st == PS_EFORMAT || st == PS_EIO)
    st = ps__fail(PS_EFORMAT, "%s: none of its %zu checkpoints is whole; of the oldest: %s", folder,
                  n, ps_last_error());
  free_list(list, n);
  return st;
}

/* A checkpoint whose manifest says nothing may be anybody's. */
static bool is_of(const found *f, uint64_t run_id) { return f->serial && f->run_id == run_id; }

static ps_status of_another_run(const char *folder, const char *slash, const char *name) {
  return ps__fail(PS_EINVAL,
                  "%s%s%s is a checkpoint of another run: go on from it, or give another folder",
                  folder, slash, name);
}

ps_status ps__checkpoint_check_owner(const char *dir, uint64_t run_id) {
  found f = {0};
  PS_TRY(read_order(dir, &f));
  return f.serial && !is_of(&f, run_id) ? of_another_run(dir, "", "") : PS_OK;
}

ps_status ps__checkpoints_check_owner(const char *folder, uint64_t run_id) {
  found *list;
  size_t n;
  ps_status st = list_folder(folder, &list, &n);
  if (st != PS_OK)
    return st == PS_EIO ? PS_OK : st; /* a checkpoint that is written says so */
  for (size_t i = 0; i < n && st == PS_OK; i++)
    if (list[i].serial && !is_of(&list[i], run_id))
      st = of_another_run(folder, "/", list[i].name);
  free_list(list, n);
  return st;
}

ps_status ps_checkpoints_prune(const char *folder, uint64_t keep) {
  found *list;
  size_t n;
  if (!folder)
    return ps__fail(PS_EINVAL, "ps_checkpoints_prune: folder must be given");
  ps__stage_clear(folder, PREFIX);
  PS_TRY(list_folder(folder, &list, &n));
  ps_status st = PS_OK;
  uint64_t older = 0;
  for (size_t i = 0; i < n; i++)
    older += is_of(&list[i], list[0].run_id);
  older = older > keep ? older - keep : 0;
  for (size_t i = n; st == PS_OK && older && i-- > 0;)
    if (is_of(&list[i], list[0].run_id)) {
      st = ps__stage_remove(folder, list[i].name);
      older--;
    }
  free_list(list, n);
  return st;
}
