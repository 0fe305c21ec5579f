/* paths.c - joins paths, renames files, and brings them to the disk. */
#include "io/io.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

char *ps__path_join(const char *dir, const char *name) {
  size_t n = strlen(dir), k = strlen(name);
  char *p = ps__malloc(n + k + 2);
  if (!p) {
    ps__fail(PS_ENOMEM, "%s: no memory left for a path", dir);
    return NULL;
  }
  memcpy(p, dir, n);
  if (n == 0 || dir[n - 1] != '/')
    p[n++] = '/';
  memcpy(p + n, name, k + 1);
  return p;
}

static bool injected(void) {
  if (!ps__fault_hit(PS_FAULT_WRITE))
    return false;
  errno = EIO;
  return true;
}

ps_status ps__sync(int fd, const char *path) {
  if (!injected() && fsync(fd) == 0)
    return PS_OK;
  return ps__fail(PS_EIO, "%s: bringing it to the disk failed: %s", path, strerror(errno));
}

ps_status ps__rename(const char *from, const char *to) {
  if (!injected() && rename(from, to) == 0)
    return PS_OK;
  return ps__fail(PS_EIO, "%s: cannot be renamed to its final name: %s", to, strerror(errno));
}

ps_status ps__sync_open_dir(int fd, const char *dir) {
  /* EINVAL: this file system cannot sync directories */
  if (!injected() && (fsync(fd) == 0 || errno == EINVAL))
    return PS_OK;
  return ps__fail(PS_EIO, "%s: bringing it to the disk failed: %s", dir, strerror(errno));
}

ps_status ps__sync_dir(const char *dir) {
  int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0)
    return ps__fail(PS_EIO, "%s: cannot be opened: %s", dir, strerror(errno));
  const ps_status st = ps__sync_open_dir(fd, dir);
  close(fd);
  return st;
}
