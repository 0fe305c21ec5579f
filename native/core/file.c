/* file.c - whole reads and writes. */
#include "core.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
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

ps_status ps__open_input(int *fd, struct stat *sb, const char *path) {
  int f = -1, failed = EIO;
  if (!ps__fault_hit(PS_FAULT_READ)) {
    f = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* O_NONBLOCK: a pipe without a writer opens at once */
    failed = errno;
  }
  if (f < 0 && failed == ENXIO) return ps__fail(PS_EIO, "%s: is a socket or a device: a regular file is needed", path);
  if (f < 0) return ps__fail(PS_EIO, "%s: cannot be opened: %s", path, strerror(failed));
  ps_status st = PS_OK;
  if (fstat(f, sb) != 0) st = ps__fail(PS_EIO, "%s: cannot be looked at: %s", path, strerror(errno));
  else if (!S_ISREG(sb->st_mode)) st = ps__fail(PS_EIO, "%s: is %s: a regular file is needed", path, what_it_is(sb->st_mode));
  if (st == PS_OK) *fd = f;
  else close(f);
  return st;
}

ps_status ps__pread_all(int fd, const char *path, void *dst, size_t bytes, uint64_t offset) {
  char *p = dst;
  size_t left = bytes;
  if (offset > INT64_MAX || bytes > INT64_MAX - offset)
    return ps__fail(PS_EIO, "%s: offset %llu is past what a file can hold", path, (unsigned long long)offset);
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
      return ps__fail(PS_EIO, "%s: reading %zu bytes at offset %llu failed: %s", path, left, (unsigned long long)offset,
                      strerror(errno));
    if (n == 0)
      return ps__fail(PS_EIO, "%s: ends at byte %llu, %zu bytes before it should", path, (unsigned long long)offset, left);
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
