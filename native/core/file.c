/* file.c - whole reads and writes. */
#include "core.h"
#include <errno.h>
#include <string.h>
#include <unistd.h>

static const size_t MAX_PIECE = (size_t)1 << 30; /* the kernel moves at most 2 GiB - 4 KiB a call */

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
