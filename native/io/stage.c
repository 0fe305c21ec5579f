/* stage.c - a directory's model replaced as a whole: whatever ends a save, the directory holds the
 * old model or the new one.
 *
 * The new model is written into a directory of its own, the stage, and made durable there. Then
 * - where DIR does not exist, the stage takes its name;
 * - else the stage gets links to all that DIR has besides its model (files linked, folders made
 *   anew), DIR's mode, owner and attributes, and the two change places in one call
 *   (RENAME_EXCHANGE). Then the old directory is removed; what came into it meanwhile goes into
 *   the new one;
 * - where the two cannot change places (no such call on this file system; DIR is a mount point or
 *   the working directory, or its parent cannot be written; something in it can have no second
 *   link), the stage becomes DIR/.penstock-new. From then on that is DIR's model: a reader looks
 *   for each file there first (ps__model_path). The old model's files are removed, config.json
 *   first, and the new ones move up, config.json last; so who does not know of .penstock-new
 *   finds a whole model or no config.json. The next save does the rest of a move that was cut off.
 *
 * Names, BASE being DIR's own and X random:
 *   DIR/.penstock-save-X            a stage: a leftover is removed by the next save
 *   PARENT/.BASE.penstock-save-X    the same
 *   PARENT/.BASE.penstock-old-X     a stage about to change places, or the old directory: of a
 *                                   leftover what is no model and not in DIR goes back there, the
 *                                   rest is removed
 *   DIR/.penstock-new               see above; while it has a file .replacing, old files may still
 *                                   be in DIR
 * Each belongs to a save as long as that holds a lock (flock) on it. models/init_model.py does the
 * same with the same names. */
#include "io/io.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define OURS      ".penstock-"
#define SAVE      ".penstock-save-"
#define OLD       ".penstock-old-"
#define REPLACING ".replacing"
enum { DIR_FLAGS = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, MAX_TRIES = 100 };

struct ps__stage {
  char target[PATH_MAX], parent[PATH_MAX]; /* DIR without links, and what it is in */
  const char *base;                        /* DIR's name in its parent */
  char path[PATH_MAX];
  int fd; /* of the stage, locked */
  mode_t mode;
  bool beside; /* in DIR's parent */
};

/* ---- which files are the model's ------------------------------------------------------------- */

const char *const ps__tokenizer_files[] = {"tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "vocab.json",
                                           "merges.txt",
                                           "tokenizer.model",
                                           "added_tokens.json",
                                           "chat_template.jinja",
                                           NULL};

static bool in_tokenizer(const char *name) {
  for (const char *const *f = ps__tokenizer_files; *f; f++)
    if (strcmp(*f, name) == 0)
      return true;
  return false;
}

static bool ends_with(const char *name, const char *end, size_t *stem) {
  const size_t n = strlen(name), k = strlen(end);
  if (n <= k || strcmp(name + n - k, end) != 0)
    return false;
  *stem = n - k;
  return true;
}

/* Length of STEM in STEM.safetensors, STEM-0000i-of-0000n.safetensors, STEM.safetensors.index.json;
 * of other names 0. */
static size_t weights_stem(const char *name) {
  static const char shard[] = "-00000-of-00000";
  size_t stem, k = sizeof shard - 1;
  if (ends_with(name, ".safetensors.index.json", &stem))
    return stem;
  if (!ends_with(name, ".safetensors", &stem))
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

static bool in_model(const char *name) {
  return strcmp(name, "config.json") == 0 || strcmp(name, "generation_config.json") == 0 ||
         in_tokenizer(name) || weights_stem(name);
}

/* 1 or 0; -1: that cannot be found out. */
static int exists_in(int dir, const char *name) {
  return faccessat(dir, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0 ? 1 : errno == ENOENT ? 0 : -1;
}

/* Whether the whole model in @dir replaces an old one's file @name: weights of one stem are a set,
 * and so is a tokenizer. As exists_in(). */
static int superseded(int dir, const char *name) {
  char entry[NAME_MAX + 32];
  const int stem = (int)weights_stem(name);
  if (!in_model(name))
    return 0;
  int is = exists_in(dir, name);
  if (in_tokenizer(name))
    for (const char *const *f = ps__tokenizer_files; is == 0 && *f; f++)
      is = exists_in(dir, *f);
  if (is == 0 && stem) {
    snprintf(entry, sizeof entry, "%.*s.safetensors", stem, name);
    is = exists_in(dir, entry);
  }
  if (is == 0 && stem) {
    snprintf(entry, sizeof entry, "%.*s.safetensors.index.json", stem, name);
    is = exists_in(dir, entry);
  }
  return is;
}

/* ---- walking --------------------------------------------------------------------------------- */

static DIR *list(int dir) {
  const int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
  if (!d && fd >= 0)
    close(fd);
  return d;
}

/* The next name but . and .. ; NULL at the end, with errno 0, or another if the list broke off. */
static const char *next(DIR *d) {
  struct dirent *e;
  do
    errno = 0;
  while ((e = readdir(d)) && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0));
  return e ? e->d_name : NULL;
}

static bool starts_with(const char *name, const char *prefix) {
  return strncmp(name, prefix, strlen(prefix)) == 0;
}

static bool same_file(const struct stat *a, const struct stat *b) {
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* @fd is what @path names (seen from @at). */
static bool is_at(int fd, int at, const char *path) {
  struct stat a, b;
  return fstat(fd, &a) == 0 && fstatat(at, path, &b, AT_SYMLINK_NOFOLLOW) == 0 && same_file(&a, &b);
}

static bool remove_tree(int at, const char *name) {
  if (unlinkat(at, name, 0) == 0 || errno == ENOENT)
    return true;
  const int fd = openat(at, name, DIR_FLAGS);
  DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
  if (!d) {
    if (fd >= 0)
      close(fd);
    return false;
  }
  (void)fchmod(fd, 0700); /* a copy of a folder that nobody may write in */
  for (const char *e; (e = next(d));)
    (void)remove_tree(fd, e);
  closedir(d);
  return unlinkat(at, name, AT_REMOVEDIR) == 0;
}

/* ---- beside: carrying over what is no model, and back ---------------------------------------- */

static bool copy_attributes(int from, int to) {
  char names[4096], value[4096];
  const ssize_t n = flistxattr(from, names, sizeof names);
  if (n < 0)
    return errno == ENOTSUP;
  for (const char *a = names; a < names + n; a += strlen(a) + 1) {
    const ssize_t k = fgetxattr(from, a, value, sizeof value);
    /* The system gives its own by itself. */
    const bool policy = starts_with(a, "security.") || starts_with(a, "trusted.");
    if ((k < 0 || fsetxattr(to, a, value, (size_t)k, 0) != 0) && !policy)
      return false;
  }
  return true;
}

/* @to becomes a directory as @from is. */
static bool copy_folder_facts(int from, int to) {
  struct stat a, b;
  if (fstat(from, &a) != 0 || fstat(to, &b) != 0)
    return false;
  if ((a.st_uid != b.st_uid || a.st_gid != b.st_gid) && fchown(to, a.st_uid, a.st_gid) != 0)
    return false;
  return copy_attributes(from, to) && fchmod(to, a.st_mode & 07777) == 0 &&
         futimens(to, (const struct timespec[2]){a.st_atim, a.st_mtim}) == 0;
}

static bool carry_tree(int from, int to, const char *name);

static bool carry_folder(int from, int to) {
  DIR *d = list(from);
  bool done = d != NULL;
  for (const char *e; done && (e = next(d));)
    done = carry_tree(from, to, e);
  done = done && errno == 0;
  if (d)
    closedir(d);
  return done && copy_folder_facts(from, to) && fsync(to) == 0;
}

/* @name of @from is in @to as well. */
static bool carry_tree(int from, int to, const char *name) {
  struct stat sb, parent;
  if (fstatat(from, name, &sb, AT_SYMLINK_NOFOLLOW) != 0)
    return errno == ENOENT;
  /* A mount stays where it is. */
  if (fstat(from, &parent) != 0 || sb.st_dev != parent.st_dev)
    return false;
  if (!S_ISDIR(sb.st_mode))
    return linkat(from, name, to, name, 0) == 0 || errno == ENOENT;
  const int a = openat(from, name, DIR_FLAGS);
  const int b = a >= 0 && mkdirat(to, name, 0700) == 0 ? openat(to, name, DIR_FLAGS) : -1;
  const bool done = b >= 0 && carry_folder(a, b);
  if (a >= 0)
    close(a);
  if (b >= 0)
    close(b);
  return done;
}

static void free_names(char **names, size_t n) {
  for (size_t i = 0; i < n; i++)
    ps__free(names[i]);
  ps__free(names);
}

/* What DIR has and the new model does not replace. It is listed before anything is carried: what is
 * carried would count as the new model's. */
static ps_status list_kept(const ps__stage *s, int dir, char ***out, size_t *n) {
  char **names = NULL;
  size_t room = 0;
  DIR *d = list(dir);
  ps_status st = d ? PS_OK : ps__fail(PS_EIO, "%s: cannot be read: %s", s->target, strerror(errno));
  *n = 0;
  for (const char *e; st == PS_OK && (e = next(d));) {
    const int replaced = starts_with(e, OURS) ? 1 : superseded(s->fd, e);
    if (replaced < 0)
      st = ps__fail(PS_EIO, "%s: cannot be looked at: %s", s->path, strerror(errno));
    if (replaced)
      continue;
    void *items = names;
    const bool grown = ps__grow(&items, *n, &room, sizeof *names);
    names = items;
    if (grown && (names[*n] = ps__strdup(e)))
      ++*n;
    else
      st = ps__fail(PS_ENOMEM, "%s: no memory left to save into it", s->target);
  }
  if (st == PS_OK && errno)
    st = ps__fail(PS_EIO, "%s: cannot be read: %s", s->target, strerror(errno));
  if (d)
    closedir(d);
  if (st != PS_OK)
    free_names(names, *n);
  else
    *out = names;
  return st;
}

/* Empties @from, whose place @to has taken. What @to does not know goes there. @fresh: the place
 * was taken just now, so that a file which differs here was replaced after it was carried. Else
 * @from may also be a stage that never took its place, whose model is nobody's. False: something
 * stays. */
static bool retire(int from, int to, bool top, bool fresh) {
  DIR *d = list(from);
  bool all = d != NULL;
  (void)fchmod(from, 0700);
  for (const char *e; d && (e = next(d));) {
    struct stat a, b;
    bool gone;
    int replaced = 0;
    if (top)
      replaced = fresh ? superseded(to, e) : in_model(e);
    if (top && strcmp(e, PS__MODEL_PENDING) == 0)
      replaced = 1;
    if (replaced)
      gone = replaced > 0 && remove_tree(from, e);
    else if (fstatat(from, e, &a, AT_SYMLINK_NOFOLLOW) != 0)
      gone = errno == ENOENT;
    else if (fstatat(to, e, &b, AT_SYMLINK_NOFOLLOW) != 0)
      gone = errno == ENOENT && renameat(from, e, to, e) == 0;
    else if (S_ISDIR(a.st_mode) && S_ISDIR(b.st_mode)) {
      const int x = openat(from, e, DIR_FLAGS), y = openat(to, e, DIR_FLAGS);
      gone = x >= 0 && y >= 0 && retire(x, y, false, fresh) && unlinkat(from, e, AT_REMOVEDIR) == 0;
      if (x >= 0)
        close(x);
      if (y >= 0)
        close(y);
    } else if (S_ISDIR(a.st_mode) || S_ISDIR(b.st_mode))
      gone = false;
    else
      gone =
          fresh && !same_file(&a, &b) ? renameat(from, e, to, e) == 0 : unlinkat(from, e, 0) == 0;
    all = all && gone;
  }
  all = all && errno == 0;
  if (d)
    closedir(d);
  return all;
}

/* ---- inside: DIR/.penstock-new moves up ------------------------------------------------------ */

static ps_status move_failed(const char *dir, const char *name) {
  const int why = errno;
  return ps__fail(PS_EIO,
                  "%s: the new model is whole in %s/%s, which counts as its place, but %s cannot "
                  "be replaced: %s; "
                  "the next save into %s tries again",
                  dir, dir, PS__MODEL_PENDING, name, strerror(why), dir);
}

static ps_status remove_replaced(int dir, int pending, const char *path) {
  const int config = exists_in(pending, "config.json");
  if (config < 0 || (config && unlinkat(dir, "config.json", 0) != 0 && errno != ENOENT))
    return move_failed(path, "config.json");
  ps_status st = PS_OK;
  DIR *d = list(dir);
  if (!d)
    return move_failed(path, "the old model");
  for (const char *e; st == PS_OK && (e = next(d));) {
    const int replaced = superseded(pending, e);
    if (replaced < 0 || (replaced && unlinkat(dir, e, 0) != 0 && errno != ENOENT))
      st = move_failed(path, e);
  }
  if (st == PS_OK && errno)
    st = move_failed(path, "the old model");
  closedir(d);
  if (st == PS_OK)
    st = ps__sync_open_dir(dir, path);
  if (st == PS_OK && unlinkat(pending, REPLACING, 0) != 0)
    st = move_failed(path, REPLACING);
  return st == PS_OK ? ps__sync_open_dir(pending, path) : st;
}

static ps_status move_up(int dir, int pending, const char *name, const char *path) {
  return renameat(pending, name, dir, name) == 0 || errno == ENOENT ? PS_OK
                                                                    : move_failed(path, name);
}

/* Safe to be done again from wherever it ended. */
static ps_status move_pending(int dir, int pending, const char *path) {
  const int replacing = exists_in(pending, REPLACING);
  ps_status st = PS_OK;
  if (replacing < 0)
    st = move_failed(path, "the old model");
  if (replacing > 0)
    st = remove_replaced(dir, pending, path);
  /* An index comes after its shards, config.json after all. */
  for (int last = 0; last < 3 && st == PS_OK; last++) {
    DIR *d = list(pending);
    size_t stem;
    if (!d)
      return move_failed(path, "the old model");
    for (const char *e; st == PS_OK && (e = next(d));) {
      const int order = strcmp(e, "config.json") == 0                    ? 2
                        : ends_with(e, ".safetensors.index.json", &stem) ? 1
                                                                         : 0;
      if (order <= last)
        st = move_up(dir, pending, e, path);
    }
    if (st == PS_OK && errno)
      st = move_failed(path, "the old model");
    closedir(d);
  }
  if (st == PS_OK)
    st = ps__sync_open_dir(dir, path);
  if (st == PS_OK && unlinkat(dir, PS__MODEL_PENDING, AT_REMOVEDIR) != 0 && errno != ENOENT)
    st = move_failed(path, PS__MODEL_PENDING);
  return st;
}

static bool lock(int fd, int how) {
  while (flock(fd, how) != 0)
    if (errno != EINTR)
      return false;
  return true;
}

/* A move that was cut off goes on; one that goes on beside us is waited for. */
static ps_status settle(int dir, const char *path) {
  for (int i = 0; i < MAX_TRIES; i++) {
    const int pending = openat(dir, PS__MODEL_PENDING, DIR_FLAGS);
    if (pending < 0)
      return errno == ENOENT ? PS_OK
                             : ps__fail(PS_EIO, "%s/%s: cannot be opened: %s", path,
                                        PS__MODEL_PENDING, strerror(errno));
    (void)lock(pending, LOCK_EX); /* a file system without locks has nobody to wait for */
    const bool ours = is_at(pending, dir, PS__MODEL_PENDING);
    const ps_status st = ours ? move_pending(dir, pending, path) : PS_OK;
    close(pending);
    if (ours)
      return st;
  }
  return ps__fail(PS_EIO, "%s/%s: changes all the time: other saves into %s must end first", path,
                  PS__MODEL_PENDING, path);
}

/* ---- leftovers ------------------------------------------------------------------------------- */

/* Clears @name in @at when its save is no more. An old directory's own files go back into @dir. */
static void clear_one(int at, const char *name, bool old, int dir) {
  struct stat sb, own;
  const int fd = openat(at, name, DIR_FLAGS);
  if (fd < 0)
    return;
  bool trusted = fstat(fd, &sb) == 0 && sb.st_uid == geteuid(); /* or DIR's owner's */
  trusted = trusted || (dir >= 0 && fstat(dir, &own) == 0 && sb.st_uid == own.st_uid);
  if (trusted && lock(fd, LOCK_EX | LOCK_NB) && is_at(fd, at, name)) {
    bool cleared = true;
    if (!old)
      cleared = remove_tree(at, name);
    else if (dir >= 0)
      cleared = retire(fd, dir, true, false) && unlinkat(at, name, AT_REMOVEDIR) == 0;
    if (!cleared)
      ps__log(PS_LOG_WARN, "%s, which a save that was cut off left, cannot be removed", name);
  }
  close(fd);
}

static void clear_leftovers(const ps__stage *s, int dir) {
  char save[NAME_MAX + 32], old[NAME_MAX + 32];
  snprintf(save, sizeof save, ".%s" SAVE, s->base);
  snprintf(old, sizeof old, ".%s" OLD, s->base);
  DIR *d = dir >= 0 ? list(dir) : NULL;
  for (const char *e; d && (e = next(d));)
    if (starts_with(e, SAVE))
      clear_one(dir, e, false, dir);
  if (d)
    closedir(d);
  d = opendir(s->parent);
  for (const char *e; d && (e = next(d));)
    if (starts_with(e, save) || starts_with(e, old))
      clear_one(dirfd(d), e, starts_with(e, old), dir);
  if (d)
    closedir(d);
}

/* ---- opening --------------------------------------------------------------------------------- */

static ps_status too_long(const char *dir) {
  return ps__fail(PS_EINVAL, "%.200s...: the path is too long", dir);
}

/* "FOLDER/PREFIX and 16 random digits" */
static ps_status random_path(char path[PATH_MAX], const char *folder, const char *base,
                             const char *kind) {
  uint64_t x;
  if (getrandom(&x, sizeof x, 0) != sizeof x)
    return ps__fail(PS_EIO, "the system has no random numbers: %s", strerror(errno));
  const int n = snprintf(path, PATH_MAX, "%s/%s%s%s%016llx", folder, *base ? "." : "", base, kind,
                         (unsigned long long)x);
  return n < PATH_MAX ? PS_OK : too_long(folder);
}

/* Where @dir is or will be, free of links. */
static ps_status resolve(ps__stage *s, const char *dir, bool *exists) {
  char plain[PATH_MAX], *slash;
  struct stat sb;
  size_t n = strlen(dir);
  if (n >= sizeof plain)
    return too_long(dir);
  memcpy(plain, dir, n + 1);
  while (n > 1 && plain[n - 1] == '/')
    plain[--n] = 0;
  *exists = stat(plain, &sb) == 0;
  if (*exists && !S_ISDIR(sb.st_mode))
    return ps__fail(PS_EIO, "%s: is a file: a model is saved into a directory", dir);
  if (!*exists && errno != ENOENT)
    return ps__fail(PS_EIO, "%s: %s", dir, strerror(errno));
  if (!*exists && lstat(plain, &sb) == 0)
    return ps__fail(PS_EIO, "%s: is a link to what is not there", dir);
  if (*exists) {
    if (!realpath(plain, s->target))
      return ps__fail(PS_EIO, "%s: %s", dir, strerror(errno));
    memcpy(s->parent, s->target, sizeof s->parent);
    slash = strrchr(s->parent, '/');
    slash[slash == s->parent] = 0;
    s->base = strrchr(s->target, '/') + 1;
    return PS_OK;
  }
  slash = strrchr(plain, '/');
  const char *base = slash ? slash + 1 : plain;
  if (slash)
    *slash = 0;
  if (!realpath(!slash ? "." : slash == plain ? "/" : plain, s->parent))
    return ps__fail(PS_EIO, "%s: cannot be made: %s", dir, strerror(errno));
  if (snprintf(s->target, sizeof s->target, "%s/%s", strcmp(s->parent, "/") ? s->parent : "",
               base) >= PATH_MAX)
    return too_long(dir);
  s->base = strrchr(s->target, '/') + 1;
  return PS_OK;
}

/* The working directory is DIR or in it: after an exchange it would be the old one, also the
 * shell's that called us. */
static bool works_in(const char *dir) {
  char cwd[PATH_MAX];
  const size_t n = strlen(dir);
  return getcwd(cwd, sizeof cwd) && strncmp(cwd, dir, n) == 0 && (cwd[n] == 0 || cwd[n] == '/');
}

/* Makes the directory and locks it, before somebody else takes it for a leftover. */
static ps_status make_stage(ps__stage *s, const char *folder, const char *base) {
  struct stat sb;
  for (int i = 0;; i++) {
    PS_TRY(random_path(s->path, folder, base, SAVE));
    if (mkdir(s->path, 0777) != 0)
      return ps__fail(PS_EIO, "%s: cannot be written: %s", s->target, strerror(errno));
    s->fd = open(s->path, DIR_FLAGS);
    if (s->fd >= 0 && (lock(s->fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK) &&
        is_at(s->fd, AT_FDCWD, s->path))
      break;
    if (i == MAX_TRIES || (s->fd < 0 && errno != ENOENT)) {
      const ps_status st = ps__fail(PS_EIO, "%s: cannot be opened: %s", s->path, strerror(errno));
      (void)rmdir(s->path);
      return st;
    }
    if (s->fd >= 0)
      close(s->fd);
    s->fd = -1;
  }
  if (fstat(s->fd, &sb) != 0 || fchmod(s->fd, 0700) != 0)
    return ps__fail(PS_EIO, "%s: %s", s->path, strerror(errno));
  s->mode = sb.st_mode & 07777;
  return PS_OK;
}

/* A stage is made in DIR, since it must be on DIR's file system, and moves beside it if it can. */
static ps_status open_over(ps__stage *s) {
  char beside[PATH_MAX];
  const int dir = open(s->target, DIR_FLAGS);
  if (dir < 0)
    return ps__fail(PS_EIO, "%s: cannot be opened: %s", s->target, strerror(errno));
  ps_status st = settle(dir, s->target);
  if (st == PS_OK)
    clear_leftovers(s, dir);
  close(dir);
  if (st == PS_OK)
    st = make_stage(s, s->target, "");
  if (st != PS_OK || !*s->base || works_in(s->target))
    return st;
  PS_TRY(random_path(beside, s->parent, s->base, SAVE));
  s->beside = rename(s->path, beside) == 0;
  if (s->beside)
    memcpy(s->path, beside, sizeof beside);
  return PS_OK;
}

ps_status ps__stage_open(ps__stage **out, const char *dir) {
  bool exists;
  ps__stage *s = ps__calloc(1, sizeof *s);
  if (!s)
    return ps__fail(PS_ENOMEM, "%s: no memory left to save into it", dir);
  s->fd = -1;
  ps_status st = resolve(s, dir, &exists);
  if (st == PS_OK && exists)
    st = open_over(s);
  else if (st == PS_OK) {
    clear_leftovers(s, -1);
    st = make_stage(s, s->parent, s->base);
    s->beside = true;
  }
  if (st != PS_OK)
    ps__stage_abort(s);
  else
    *out = s;
  return st;
}

ps_status ps__stage_create(int *fd, const ps__stage *s, const char *name, const char *what) {
  const int f =
      ps__fault_hit(PS_FAULT_WRITE)
          ? (errno = EIO, -1)
          : openat(s->fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (f < 0)
    return ps__fail(PS_EIO, "%s: cannot be written: %s", what, strerror(errno));
  *fd = f;
  return PS_OK;
}

const char *ps__stage_path(const ps__stage *s) { return s->path; }

/* ---- ending ---------------------------------------------------------------------------------- */

void ps__stage_abort(ps__stage *s) {
  if (!s)
    return;
  if (s->fd >= 0) {
    /* Else it has changed places. */
    if (is_at(s->fd, AT_FDCWD, s->path))
      (void)remove_tree(AT_FDCWD, s->path);
    close(s->fd);
  }
  ps__free(s);
}

static ps_status take_name(ps__stage *s) {
  if (fchmod(s->fd, s->mode) != 0)
    return ps__fail(PS_EIO, "%s: %s", s->target, strerror(errno));
  PS_TRY(ps__rename(s->path, s->target));
  return ps__sync_dir(s->parent);
}

/* What says that these two cannot change places, rather than that the disk fails. */
static bool refused(int error) {
  static const int kinds[] = {EINVAL, ENOSYS, EOPNOTSUPP, EXDEV, EBUSY, EPERM, EACCES, EROFS};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
    if (kinds[i] == error)
      return true;
  return false;
}

/* All but the model leaves the stage again. */
static bool drop_carried(const ps__stage *s, char **names, size_t n) {
  bool all = true;
  for (size_t i = 0; i < n; i++)
    all = remove_tree(s->fd, names[i]) && all;
  return all;
}

static ps_status rename_stage(ps__stage *s, const char *kind) {
  char path[PATH_MAX];
  PS_TRY(random_path(path, s->parent, s->base, kind));
  PS_TRY(ps__rename(s->path, path));
  memcpy(s->path, path, sizeof path);
  return PS_OK;
}

static ps_status exchange_named(ps__stage *s, int dir, bool *done) {
  PS_TRY(ps__sync_open_dir(s->fd, s->path));
  PS_TRY(rename_stage(s, OLD));
  if (ps__fault_hit(PS_FAULT_WRITE))
    return ps__fail(PS_EIO, "%s: cannot be replaced: an injected fault", s->target);
  if (renameat2(AT_FDCWD, s->path, AT_FDCWD, s->target, RENAME_EXCHANGE) != 0)
    return refused(errno)
               ? rename_stage(s, SAVE)
               : ps__fail(PS_EIO, "%s: cannot be replaced: %s", s->target, strerror(errno));
  *done = true;
  /* While this may not have come to the disk, the old directory must stay whole. */
  if (ps__sync_dir(s->parent) != PS_OK)
    return ps__fail(
        PS_EIO, "%s: has the new model, but whether that outlasts a power cut is not known (%s)",
        s->target, ps_last_error());
  if (!retire(dir, s->fd, true, true) || rmdir(s->path) != 0)
    ps__log(PS_LOG_WARN,
            "%s: what it was before could not be removed and is in %s; the next save into it tries "
            "again",
            s->target, s->path);
  return PS_OK;
}

/* *done: they changed places. PS_OK without: they cannot, and the stage has the model alone. */
static ps_status exchange(ps__stage *s, int dir, bool *done) {
  char **names;
  size_t n;
  bool ready = true;
  PS_TRY(list_kept(s, dir, &names, &n));
  for (size_t i = 0; ready && i < n; i++)
    ready = carry_tree(dir, s->fd, names[i]);
  ps_status st = ready && copy_folder_facts(dir, s->fd) ? exchange_named(s, dir, done) : PS_OK;
  if (st == PS_OK && !*done && !drop_carried(s, names, n))
    st = ps__fail(PS_EIO, "%s: cannot be emptied: %s", s->path, strerror(errno));
  free_names(names, n);
  return st;
}

static ps_status move_in(ps__stage *s, int dir) {
  struct stat sb;
  const int mark =
      openat(s->fd, REPLACING, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (mark < 0 || close(mark) != 0 || fstat(dir, &sb) != 0 || fchmod(s->fd, sb.st_mode & 0777) != 0)
    return ps__fail(PS_EIO, "%s: cannot be written: %s", s->path, strerror(errno));
  PS_TRY(ps__sync_open_dir(s->fd, s->path));
  PS_TRY(settle(dir, s->target));
  while (renameat(AT_FDCWD, s->path, dir, PS__MODEL_PENDING) != 0) {
    if (errno != ENOTEMPTY && errno != EEXIST)
      return ps__fail(PS_EIO, "%s: cannot be replaced: %s", s->target, strerror(errno));
    PS_TRY(settle(dir, s->target)); /* another save's */
  }
  PS_TRY(ps__sync_open_dir(dir, s->target));
  return move_pending(dir, s->fd, s->target);
}

static ps_status commit(ps__stage *s) {
  bool done = false;
  PS_TRY(ps__sync_open_dir(s->fd, s->path));
  const int dir = open(s->target, DIR_FLAGS);
  if (dir < 0)
    return errno == ENOENT
               ? take_name(s)
               : ps__fail(PS_EIO, "%s: cannot be opened: %s", s->target, strerror(errno));
  ps_status st = s->beside ? exchange(s, dir, &done) : PS_OK;
  if (st == PS_OK && !done)
    st = move_in(s, dir);
  close(dir);
  return st;
}

ps_status ps__stage_commit(ps__stage *s) {
  const ps_status st = commit(s);
  ps__stage_abort(s); /* frees it; removes only what has not become DIR's */
  return st;
}
