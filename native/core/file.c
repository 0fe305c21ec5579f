/* file.c - opens, reads and writes files, and replaces a file as a whole. */
#include "core/core.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static const size_t MAX_PIECE = (size_t)1 << 30; /* the kernel moves at most 2 GiB - 4 KiB a call */

static const char *what_it_is(mode_t mode) {
  return S_ISDIR(mode)    ? "a directory"
         : S_ISFIFO(mode) ? "a named pipe (FIFO)"
         : S_ISCHR(mode)  ? "a character device"
         : S_ISBLK(mode)  ? "a block device"
                          : "a socket";
}

ps_status ps__fail_to_open(const char *path, int failed) {
  char folder[512];
  if (failed != ENOENT || path[0] == '/' || !getcwd(folder, sizeof folder))
    return ps__fail(PS_EIO, "%s: cannot be opened: %s", path, strerror(failed));
  return ps__fail(PS_EIO, "%s: cannot be opened: %s (relative to the working directory: %s/%s)",
                  path, strerror(failed), strcmp(folder, "/") == 0 ? "" : folder, path);
}

ps_status ps__open_input(int *fd, struct stat *sb, const char *path) {
  int f = -1, failed = EIO;
  if (!ps__fault_hit(PS_FAULT_READ)) {
    /* O_NONBLOCK: a pipe opens at once, with or without a writer */
    f = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    failed = errno;
  }
  if (f < 0 && failed == ENXIO)
    return ps__fail(PS_EIO, "%s: is a socket or a device: a regular file is needed", path);
  if (f < 0)
    return ps__fail_to_open(path, failed);
  ps_status st = PS_OK;
  if (fstat(f, sb) != 0)
    st = ps__fail(PS_EIO, "%s: cannot be read: %s", path, strerror(errno));
  else if (!S_ISREG(sb->st_mode))
    st = ps__fail(PS_EIO, "%s: is %s: a regular file is needed", path, what_it_is(sb->st_mode));
  if (st == PS_OK)
    *fd = f;
  else
    close(f);
  return st;
}

ps_status ps__pread_all(int fd, const char *path, void *dst, size_t bytes, uint64_t offset) {
  char *p = dst;
  size_t left = bytes;
  if (offset > INT64_MAX || bytes > INT64_MAX - offset)
    return ps__fail(PS_EIO, "%s: offset %llu is past what a file can hold", path,
                    (unsigned long long)offset);
  while (left > 0) {
    ssize_t n;
    if (ps__fault_hit(PS_FAULT_READ)) {
      n = -1;
      errno = EIO;
    } else {
      n = pread(fd, p, left < MAX_PIECE ? left : MAX_PIECE, (off_t)offset);
    }
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0)
      return ps__fail(PS_EIO, "%s: reading %zu bytes at offset %llu failed: %s", path, left,
                      (unsigned long long)offset, strerror(errno));
    if (n == 0)
      return ps__fail(PS_EIO, "%s: ends at byte %llu, %zu bytes before it should", path,
                      (unsigned long long)offset, left);
    p += n;
    left -= (size_t)n;
    offset += (uint64_t)n;
  }
  return PS_OK;
}

ps_status ps__write_all(int fd, const char *path, const void *src, size_t bytes) {
  const char *p = src;
  size_t left = bytes;
  while (left > 0) {
    ssize_t n;
    if (ps__fault_hit(PS_FAULT_WRITE)) {
      n = -1;
      errno = ENOSPC;
    } else {
      n = write(fd, p, left < MAX_PIECE ? left : MAX_PIECE);
    }
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0)
      return ps__fail(PS_EIO, "%s: writing %zu bytes failed: %s", path, left, strerror(errno));
    p += n;
    left -= (size_t)n;
  }
  return PS_OK;
}

ps_status ps__path_exists(const char *path, bool *exists) {
  const bool found = access(path, F_OK) == 0;
  if (!found && errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG)
    return ps__fail(PS_EIO, "%s: cannot be read: %s", path, strerror(errno));
  *exists = found;
  return PS_OK;
}

ps_status ps__model_path(char **out, const char *dir, const char *name) {
  const size_t n = strlen(dir), bytes = n + strlen(name) + sizeof "//" PS__MODEL_PENDING;
  const char *slash = n && dir[n - 1] == '/' ? "" : "/";
  char *path = ps__malloc(bytes);
  bool pending = false;
  if (!path)
    return ps__fail(PS_ENOMEM, "%s: no memory left for a path", dir);
  snprintf(path, bytes, "%s%s" PS__MODEL_PENDING "/%s", dir, slash, name);
  const ps_status st = ps__path_exists(path, &pending);
  if (st != PS_OK) {
    ps__free(path);
    return st;
  }
  if (!pending)
    snprintf(path, bytes, "%s%s%s", dir, slash, name);
  *out = path;
  return PS_OK;
}

ps_status ps__replace_begin(int *fd, char **temporary, const char *path) {
  const size_t bytes = strlen(path) + 32;
  uint64_t x;
  struct stat sb;
  if (lstat(path, &sb) == 0 && !S_ISREG(sb.st_mode))
    return ps__fail(PS_EIO, "%s: exists and is no regular file: choose another name", path);
  if (getrandom(&x, sizeof x, 0) != sizeof x)
    return ps__fail(PS_EIO, "%s: no random number for a temporary name: %s", path, strerror(errno));
  char *name = ps__malloc(bytes);
  if (!name)
    return ps__fail(PS_ENOMEM, "%s: no memory left to write it", path);
  snprintf(name, bytes, "%s.%016llx.part", path, (unsigned long long)x);
  const int f = ps__fault_hit(PS_FAULT_WRITE)
                    ? (errno = EIO, -1)
                    : open(name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (f < 0) {
    const ps_status st = ps__fail(PS_EIO, "%s: cannot be written: %s", path, strerror(errno));
    ps__free(name);
    return st;
  }
  *fd = f;
  *temporary = name;
  return PS_OK;
}

ps_status ps__replace_end(int fd, char *temporary, const char *path, ps_status st) {
  if (close(fd) != 0 && st == PS_OK)
    st = ps__fail(PS_EIO, "%s: closing it failed: %s", path, strerror(errno));
  if (st == PS_OK && rename(temporary, path) != 0)
    st = ps__fail(PS_EIO, "%s: cannot be replaced: %s", path, strerror(errno));
  if (st != PS_OK)
    (void)unlink(temporary);
  ps__free(temporary);
  return st;
}

ps_status ps__replace_text(const char *path, const char *text, size_t bytes) {
  char *temporary;
  int fd;
  if (!text)
    return ps__fail(PS_ENOMEM, "out of memory for %s", path);
  PS_TRY(ps__replace_begin(&fd, &temporary, path));
  return ps__replace_end(fd, temporary, path, ps__write_all(fd, path, text, bytes));
}
