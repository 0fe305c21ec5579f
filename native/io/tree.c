/* tree.c - directories as a save sees them: lists them, links what is no model of an old one into a
 * new one, and removes the old one. */
#include "io/stage.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/xattr.h>
#include <unistd.h>

DIR *ps__list(int dir) {
  const int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
  if (!d && fd >= 0)
    close(fd);
  return d;
}

const char *ps__next_name(DIR *d) {
  struct dirent *e;
  do
    errno = 0;
  while ((e = readdir(d)) && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0));
  return e ? e->d_name : NULL;
}

bool ps__starts_with(const char *name, const char *prefix) {
  return strncmp(name, prefix, strlen(prefix)) == 0;
}

static bool add_name(ps__names *names, const char *name) {
  if (PS_GROW(names->item, names->n, names->cap) && (names->item[names->n] = ps__strdup(name))) {
    names->n++;
    return true;
  }
  errno = ENOMEM;
  return false;
}

/* The names of @dir, whose own name is @folder, or "". */
static bool add_names(int dir, const char *folder, ps__names *out) {
  DIR *d = ps__list(dir);
  bool done = d != NULL;
  for (const char *e; done && (e = ps__next_name(d));) {
    char path[NAME_MAX + sizeof PS__TEMPLATES + 1];
    const bool templates = !*folder && strcmp(e, PS__TEMPLATES) == 0;
    const int inner = templates ? openat(dir, e, PS__DIR_FLAGS) : -1;
    snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", e);
    if (templates && inner < 0 && errno != ENOTDIR && errno != ELOOP)
      done = false; /* it may have files, which would be lost */
    else
      done = inner >= 0 ? add_names(inner, e, out) : add_name(out, path);
    if (inner >= 0)
      close(inner);
  }
  const int why = errno;
  done = done && why == 0;
  if (d)
    closedir(d);
  errno = why;
  return done;
}

bool ps__list_names(int dir, ps__names *out) {
  *out = (ps__names){0};
  if (add_names(dir, "", out))
    return true;
  const int why = errno;
  ps__free_names(out);
  errno = why;
  return false;
}

void ps__free_names(ps__names *names) {
  for (size_t i = 0; i < names->n; i++)
    ps__free(names->item[i]);
  ps__free(names->item);
  *names = (ps__names){0};
}

bool ps__make_folder_of(int dir, const char *name) {
  return !ps__starts_with(name, PS__TEMPLATES "/") || mkdirat(dir, PS__TEMPLATES, 0777) == 0 ||
         errno == EEXIST;
}

bool ps__same_file(const struct stat *a, const struct stat *b) {
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

bool ps__is_at(int fd, int at, const char *path) {
  struct stat a, b;
  return fstat(fd, &a) == 0 && fstatat(at, path, &b, AT_SYMLINK_NOFOLLOW) == 0 &&
         ps__same_file(&a, &b);
}

bool ps__remove_tree(int at, const char *name) {
  if (unlinkat(at, name, 0) == 0 || errno == ENOENT)
    return true;
  const int fd = openat(at, name, PS__DIR_FLAGS);
  DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
  if (!d) {
    if (fd >= 0)
      close(fd);
    return false;
  }
  (void)fchmod(fd, 0700); /* the copy of a read-only folder is read-only too */
  for (const char *e; (e = ps__next_name(d));)
    (void)ps__remove_tree(fd, e);
  closedir(d);
  return unlinkat(at, name, AT_REMOVEDIR) == 0;
}

bool ps__lock(int fd, int how) {
  while (flock(fd, how) != 0)
    if (errno != EINTR)
      return false;
  return true;
}

/* ---- into the new directory ------------------------------------------------------------------ */

static bool copy_attributes(int from, int to) {
  char names[4096], value[4096];
  const ssize_t n = flistxattr(from, names, sizeof names);
  if (n < 0)
    return errno == ENOTSUP;
  for (const char *a = names; a < names + n; a += strlen(a) + 1) {
    const ssize_t k = fgetxattr(from, a, value, sizeof value);
    /* the system sets these itself */
    const bool policy = ps__starts_with(a, "security.") || ps__starts_with(a, "trusted.");
    if ((k < 0 || fsetxattr(to, a, value, (size_t)k, 0) != 0) && !policy)
      return false;
  }
  return true;
}

bool ps__copy_folder_attributes(int from, int to) {
  struct stat a, b;
  if (fstat(from, &a) != 0 || fstat(to, &b) != 0)
    return false;
  if ((a.st_uid != b.st_uid || a.st_gid != b.st_gid) && fchown(to, a.st_uid, a.st_gid) != 0)
    return false;
  return copy_attributes(from, to) && fchmod(to, a.st_mode & 07777) == 0 &&
         futimens(to, (const struct timespec[2]){a.st_atim, a.st_mtim}) == 0;
}

static bool carry_folder(int from, int to) {
  DIR *d = ps__list(from);
  bool done = d != NULL;
  for (const char *e; done && (e = ps__next_name(d));)
    done = ps__carry_tree(from, to, e);
  done = done && errno == 0;
  if (d)
    closedir(d);
  return done && ps__copy_folder_attributes(from, to) && fsync(to) == 0;
}

bool ps__carry_tree(int from, int to, const char *name) {
  struct stat sb, parent;
  if (!ps__make_folder_of(to, name))
    return false;
  if (fstatat(from, name, &sb, AT_SYMLINK_NOFOLLOW) != 0)
    return errno == ENOENT;
  /* a mount point cannot be carried */
  if (fstat(from, &parent) != 0 || sb.st_dev != parent.st_dev)
    return false;
  if (!S_ISDIR(sb.st_mode))
    return linkat(from, name, to, name, 0) == 0 || errno == ENOENT;
  const int a = openat(from, name, PS__DIR_FLAGS);
  const int b = a >= 0 && mkdirat(to, name, 0700) == 0 ? openat(to, name, PS__DIR_FLAGS) : -1;
  const bool done = b >= 0 && carry_folder(a, b);
  if (a >= 0)
    close(a);
  if (b >= 0)
    close(b);
  return done;
}
