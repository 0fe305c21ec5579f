/* stage.c - replaces the model of a directory as a whole: whatever ends a save, the directory holds
 * the old model or the new one.
 *
 * The new model is written into a directory of its own, the stage, and brought to the disk there.
 * How the stage takes DIR's place depends on DIR:
 *   - DIR does not exist: the stage takes its name.
 *   - DIR exists: the stage gets links to all that DIR has besides its model (files as links,
 *     folders as new ones), and DIR's mode, owner and attributes. Then the two change places in one
 *     call (RENAME_EXCHANGE). Then the old directory is removed; files that came into it meanwhile
 *     move to the new one.
 *   - The two cannot change places: the file system has no such call, DIR is a mount point or the
 *     working directory, its parent cannot be written, or a file in it cannot be linked. The stage
 *     then becomes DIR/.penstock-new, which from that moment is DIR's model: a reader looks for
 *     each file there first (ps__model_path). The old model's files are removed, config.json first.
 *     The new ones move up, config.json last. A program that does not know .penstock-new so finds a
 *     whole model or no config.json. The next save completes a move that was cut off (pending.c).
 *
 * Names, where BASE is DIR's own name and X is random:
 *   DIR/.penstock-save-X           a stage. The next save removes one that was left.
 *   PARENT/.BASE.penstock-save-X   the same
 *   PARENT/.BASE.penstock-old-X    a stage about to change places, or the old directory. Of one
 *                                  that was left, files that are no model and not in DIR go back to
 *                                  DIR.
 *   DIR/.penstock-new              see above. While it has a file .replacing, files of the old
 *                                  model may still be in DIR.
 * A save holds a lock (flock) on its directory. models/model_dir.py, which stands alone, uses the
 * same names in the same way. */
#include "io/stage.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#define OURS ".penstock-"
#define SAVE ".penstock-save-"
#define OLD  ".penstock-old-"

struct ps__stage {
  char target[PATH_MAX], parent[PATH_MAX]; /* DIR and its parent, without links */
  const char *base;                        /* DIR's name in its parent */
  char path[PATH_MAX];
  int fd; /* open on the stage, which it locks */
  mode_t mode;
  bool beside;         /* in DIR's parent */
  uint64_t need_bytes; /* that will be written */
};

/* ---- leftovers ------------------------------------------------------------------------------- */

/* Removes @name in @at, which a save has left, unless that save still runs. The files of an old
 * directory that are no model go back to @dir. */
static void clear_one(int at, const char *name, bool old, int dir) {
  struct stat sb, own;
  const int fd = openat(at, name, PS__DIR_FLAGS);
  if (fd < 0)
    return;
  bool trusted = fstat(fd, &sb) == 0 && sb.st_uid == geteuid(); /* or of DIR's owner */
  trusted = trusted || (dir >= 0 && fstat(dir, &own) == 0 && sb.st_uid == own.st_uid);
  if (trusted && ps__lock(fd, LOCK_EX | LOCK_NB) && ps__is_at(fd, at, name)) {
    bool cleared = true;
    if (!old)
      cleared = ps__remove_tree(at, name);
    else if (dir >= 0)
      cleared = ps__retire(fd, dir, true, false) && unlinkat(at, name, AT_REMOVEDIR) == 0;
    if (!cleared)
      ps__log(PS_LOG_WARN, "%s, left by a save that was cut off, cannot be removed", name);
  }
  close(fd);
}

static void clear_leftovers(const ps__stage *s, int dir) {
  char save[NAME_MAX + 32], old[NAME_MAX + 32];
  snprintf(save, sizeof save, ".%s" SAVE, s->base);
  snprintf(old, sizeof old, ".%s" OLD, s->base);
  DIR *d = dir >= 0 ? ps__list(dir) : NULL;
  for (const char *e; d && (e = ps__next_name(d));)
    if (ps__starts_with(e, SAVE))
      clear_one(dir, e, false, dir);
  if (d)
    closedir(d);
  d = opendir(s->parent);
  for (const char *e; d && (e = ps__next_name(d));)
    if (ps__starts_with(e, save) || ps__starts_with(e, old))
      clear_one(dirfd(d), e, ps__starts_with(e, old), dir);
  if (d)
    closedir(d);
}

void ps__stage_clear(const char *parent, const char *prefix) {
  char start[NAME_MAX + 32];
  snprintf(start, sizeof start, ".%s", prefix);
  DIR *d = opendir(parent);
  for (const char *e; d && (e = ps__next_name(d));)
    if (ps__starts_with(e, start) && strstr(e, SAVE))
      clear_one(dirfd(d), e, false, -1);
  if (d)
    closedir(d);
}

/* ---- opening --------------------------------------------------------------------------------- */

static ps_status too_long(const char *dir) {
  return ps__fail(PS_EINVAL, "%.200s...: the path is too long", dir);
}

/* FOLDER/.BASE, the kind, and 16 random digits */
static ps_status random_path(char path[PATH_MAX], const char *folder, const char *base,
                             const char *kind) {
  uint64_t x;
  if (getrandom(&x, sizeof x, 0) != sizeof x)
    return ps__fail(PS_EIO, "the system has no random numbers: %s", strerror(errno));
  const int n = snprintf(path, PATH_MAX, "%s/%s%s%s%016llx", folder, *base ? "." : "", base, kind,
                         (unsigned long long)x);
  return n < PATH_MAX ? PS_OK : too_long(folder);
}

/* Find @dir's path and its parent's, without links. */
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
    return ps__fail(PS_EIO, "%s: is a link to a directory that does not exist", dir);
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

/* The working directory is @dir or lies in it. After an exchange this process, and the shell that
 * started it, would be in the old directory. */
static bool works_in(const char *dir) {
  char cwd[PATH_MAX];
  const size_t n = strlen(dir);
  return getcwd(cwd, sizeof cwd) && strncmp(cwd, dir, n) == 0 && (cwd[n] == 0 || cwd[n] == '/');
}

/* Makes the stage and locks it. Tries again where another save took it for a leftover meanwhile. */
static ps_status make_stage(ps__stage *s, const char *folder, const char *base) {
  struct stat sb;
  for (int i = 0;; i++) {
    PS_TRY(random_path(s->path, folder, base, SAVE));
    if (mkdir(s->path, 0777) != 0)
      return ps__fail(PS_EIO, "%s: cannot be written: %s", s->target, strerror(errno));
    s->fd = open(s->path, PS__DIR_FLAGS);
    if (s->fd >= 0 && (ps__lock(s->fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK) &&
        ps__is_at(s->fd, AT_FDCWD, s->path))
      break;
    if (i == PS__MAX_TRIES || (s->fd < 0 && errno != ENOENT)) {
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

/* What saves that were cut off have left in DIR. */
static ps_status tidy_dir(const ps__stage *s) {
  const int dir = open(s->target, PS__DIR_FLAGS);
  if (dir < 0)
    return ps__fail(PS_EIO, "%s: cannot be opened: %s", s->target, strerror(errno));
  const ps_status st = ps__finish_pending(dir, s->target);
  if (st == PS_OK)
    clear_leftovers(s, dir);
  close(dir);
  return st;
}

/* Makes the stage in DIR, so that it is on DIR's file system, and moves it beside DIR if it can. */
static ps_status open_over(ps__stage *s) {
  char beside[PATH_MAX];
  ps_status st = tidy_dir(s);
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

ps_status ps__stage_tidy(const char *dir) {
  bool exists;
  ps__stage *s = ps__calloc(1, sizeof *s);
  if (!s)
    return ps__fail(PS_ENOMEM, "%s: no memory left to look at it", dir);
  s->fd = -1;
  ps_status st = resolve(s, dir, &exists);
  if (st == PS_OK && exists)
    st = tidy_dir(s);
  else if (st == PS_OK)
    clear_leftovers(s, -1);
  ps__free(s);
  return st;
}

ps_status ps__stage_create(int *fd, const ps__stage *s, const char *name, const char *what) {
  const int f =
      ps__fault_hit(PS_FAULT_WRITE) ? (errno = EIO, -1)
      : !ps__make_folder_of(s->fd, name)
          ? -1
          : openat(s->fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (f < 0)
    return ps__fail(PS_EIO, "%s: cannot be written: %s", what, strerror(errno));
  *fd = f;
  return PS_OK;
}

ps_status ps__stage_write_json(const ps__stage *s, const char *dir, const char *name,
                               ps__jsonw *w) {
  size_t n;
  int fd = -1;
  const char *text = ps__jsonw_text(w, &n);
  char *path = text ? ps__path_join(dir, name) : NULL;
  ps_status st = path ? ps__stage_create(&fd, s, name, path)
                      : ps__fail(PS_ENOMEM, "%s: no memory left to write %s", dir, name);
  if (st == PS_OK)
    st = ps__write_all(fd, path, text, n);
  if (st == PS_OK)
    st = ps__sync(fd, path);
  if (fd >= 0 && close(fd) != 0 && st == PS_OK)
    st = ps__fail(PS_EIO, "%s: closing it failed: %s", path, strerror(errno));
  ps__free(path);
  return st;
}

uint64_t ps__stage_need(ps__stage *s, uint64_t bytes) { return s->need_bytes += bytes; }

const char *ps__stage_path(const ps__stage *s) { return s->path; }
const char *ps__stage_target(const ps__stage *s) { return s->target; }

/* ---- ending ---------------------------------------------------------------------------------- */

/* Bring the names in the stage to the disk. */
static ps_status sync_stage(const ps__stage *s) {
  const int fd = openat(s->fd, PS__TEMPLATES, PS__DIR_FLAGS);
  const ps_status st = fd >= 0 ? ps__sync_open_dir(fd, s->path) : PS_OK;
  if (fd >= 0)
    close(fd);
  return st == PS_OK ? ps__sync_open_dir(s->fd, s->path) : st;
}

/* List what DIR has and the new model does not replace. The list is made before anything is
 * carried, because carried files look like the new model's. */
static ps_status list_kept(const ps__stage *s, int dir, ps__names *names) {
  if (!ps__list_names(dir, names))
    return ps__fail(errno == ENOMEM ? PS_ENOMEM : PS_EIO, "%s: cannot be read: %s", s->target,
                    strerror(errno));
  size_t kept = 0;
  for (size_t i = 0; i < names->n; i++) {
    char *name = names->item[i];
    const int replaced = ps__starts_with(name, OURS) ? 1 : ps__replaced(dir, s->fd, name);
    if (replaced < 0) {
      const ps_status st = ps__fail(PS_EIO, "%s: cannot be read: %s", s->path, strerror(errno));
      ps__free_names(names);
      return st;
    }
    names->item[i] = names->item[kept];
    names->item[kept] = name;
    kept += !replaced;
  }
  for (; names->n > kept; names->n--)
    ps__free(names->item[names->n - 1]);
  return PS_OK;
}

void ps__stage_abort(ps__stage *s) {
  if (!s)
    return;
  if (s->fd >= 0) {
    /* not so after it has taken DIR's place */
    if (ps__is_at(s->fd, AT_FDCWD, s->path))
      (void)ps__remove_tree(AT_FDCWD, s->path);
    close(s->fd);
  }
  ps__free(s);
}

ps_status ps__stage_remove(const char *parent, const char *name) {
  char path[PATH_MAX], from[PATH_MAX];
  if (snprintf(from, sizeof from, "%s/%s", parent, name) >= PATH_MAX)
    return too_long(parent);
  PS_TRY(random_path(path, parent, name, SAVE));
  PS_TRY(ps__rename(from, path));
  return ps__remove_tree(AT_FDCWD, path)
             ? PS_OK
             : ps__fail(PS_EIO, "%s: cannot be removed: %s", path, strerror(errno));
}

static ps_status take_name(ps__stage *s) {
  if (fchmod(s->fd, s->mode) != 0)
    return ps__fail(PS_EIO, "%s: %s", s->target, strerror(errno));
  PS_TRY(ps__rename(s->path, s->target));
  return ps__sync_dir(s->parent);
}

/* The error says that the two cannot change places, not that the disk failed. */
static bool refused(int error) {
  static const int kinds[] = {EINVAL, ENOSYS, EOPNOTSUPP, EXDEV, EBUSY, EPERM, EACCES, EROFS};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
    if (kinds[i] == error)
      return true;
  return false;
}

/* Removes from the stage what was carried into it. */
static bool drop_carried(const ps__stage *s, const ps__names *names) {
  bool all = true;
  for (size_t i = 0; i < names->n; i++)
    all = ps__remove_tree(s->fd, names->item[i]) && all;
  (void)unlinkat(s->fd, PS__TEMPLATES, AT_REMOVEDIR); /* unless the new model has some */
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
  PS_TRY(sync_stage(s));
  PS_TRY(rename_stage(s, OLD));
  if (ps__fault_hit(PS_FAULT_WRITE))
    return ps__fail(PS_EIO, "%s: cannot be replaced: an injected fault", s->target);
  if (renameat2(AT_FDCWD, s->path, AT_FDCWD, s->target, RENAME_EXCHANGE) != 0)
    return refused(errno)
               ? rename_stage(s, SAVE)
               : ps__fail(PS_EIO, "%s: cannot be replaced: %s", s->target, strerror(errno));
  *done = true;
  /* Until the exchange is on the disk, the old directory must stay whole. */
  if (ps__sync_dir(s->parent) != PS_OK)
    return ps__fail(PS_EIO, "%s: has the new model, but it may not outlast a power cut (%s)",
                    s->target, ps_last_error());
  if (!ps__retire(dir, s->fd, true, true) || rmdir(s->path) != 0)
    ps__log(PS_LOG_WARN,
            "%s: has the new model, but the old directory could not be removed: it is %s, and the "
            "next save tries again",
            s->target, s->path);
  return PS_OK;
}

/* *done: the stage and DIR changed places. PS_OK without *done: they cannot, and the stage holds
 * the model alone again. */
static ps_status exchange(ps__stage *s, int dir, bool *done) {
  ps__names names;
  bool ready = true;
  PS_TRY(list_kept(s, dir, &names));
  for (size_t i = 0; ready && i < names.n; i++)
    ready = ps__carry_tree(dir, s->fd, names.item[i]);
  ps_status st =
      ready && ps__copy_folder_attributes(dir, s->fd) ? exchange_named(s, dir, done) : PS_OK;
  if (st == PS_OK && !*done && !drop_carried(s, &names))
    st = ps__fail(PS_EIO, "%s: cannot be emptied: %s", s->path, strerror(errno));
  ps__free_names(&names);
  return st;
}

static ps_status move_in(ps__stage *s, int dir) {
  struct stat sb;
  const int mark =
      openat(s->fd, PS__REPLACING, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (mark < 0 || close(mark) != 0 || fstat(dir, &sb) != 0 || fchmod(s->fd, sb.st_mode & 0777) != 0)
    return ps__fail(PS_EIO, "%s: cannot be written: %s", s->path, strerror(errno));
  PS_TRY(sync_stage(s));
  PS_TRY(ps__finish_pending(dir, s->target));
  while (renameat(AT_FDCWD, s->path, dir, PS__MODEL_PENDING) != 0) {
    if (errno != ENOTEMPTY && errno != EEXIST)
      return ps__fail(PS_EIO, "%s: cannot be replaced: %s", s->target, strerror(errno));
    PS_TRY(ps__finish_pending(dir, s->target)); /* another save's model came first */
  }
  PS_TRY(ps__sync_open_dir(dir, s->target));
  return ps__move_pending(dir, s->fd, s->target);
}

static ps_status commit(ps__stage *s) {
  bool done = false;
  PS_TRY(sync_stage(s));
  const int dir = open(s->target, PS__DIR_FLAGS);
  if (dir < 0)
    return errno == ENOENT
               ? take_name(s)
               : ps__fail(PS_EIO, "%s: cannot be opened: %s", s->target, strerror(errno));
  ps_status st = ps__warn_kept(dir, s->fd, s->target);
  if (st == PS_OK && s->beside)
    st = exchange(s, dir, &done);
  if (st == PS_OK && !done)
    st = move_in(s, dir);
  close(dir);
  return st;
}

ps_status ps__stage_commit(ps__stage *s) {
  const ps_status st = commit(s);
  ps__stage_abort(s); /* frees @s; after success nothing is removed */
  return st;
}
