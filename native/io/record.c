/* record.c - whether a file is as a save has written it, by the hashes that the save left there. */
#include "core/sha256.h"
#include "io/stage.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RECORD_BYTES = 64 << 20 };

ps_status ps__hash_open(int fd, const char *path, uint64_t bytes, char *buffer, char hex[65]) {
  ps__sha256 h;
  ps__sha256_begin(&h);
  ps_status st = PS_OK;
  for (uint64_t at = 0; st == PS_OK && at < bytes; at += PS__HASH_PIECE) {
    const uint64_t n = bytes - at < PS__HASH_PIECE ? bytes - at : PS__HASH_PIECE;
    st = ps__pread_all(fd, path, buffer, n, at);
    if (st == PS_OK)
      ps__sha256_add(&h, buffer, n);
  }
  ps__sha256_end(&h, hex);
  return st;
}

/* Open file @name of @dir. 0: there is no such file; -1: the disk does not say. */
static int open_in(int *fd, struct stat *sb, int dir, const char *name) {
  *fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (*fd < 0)
    return errno == ENOENT || errno == ELOOP || errno == ENOTDIR ? 0 : -1;
  const int is = fstat(*fd, sb) != 0 ? -1 : S_ISREG(sb->st_mode);
  if (is != 1)
    close(*fd);
  return is;
}

/* *out: JSON file @name of @dir; NULL where it is missing or no JSON. False: the disk cannot read
 * it. */
static bool read_in(ps__json **out, int dir, const char *name) {
  struct stat sb;
  int fd;
  *out = NULL;
  const int is = open_in(&fd, &sb, dir, name);
  if (is != 1)
    return is == 0;
  const bool small = sb.st_size <= MAX_RECORD_BYTES;
  char *text = small ? ps__malloc((size_t)sb.st_size) : NULL;
  const bool read = text && ps__pread_all(fd, name, text, (size_t)sb.st_size, 0) == PS_OK;
  if (read && ps__json_parse(out, text, (size_t)sb.st_size, name) != PS_OK)
    *out = NULL;
  ps__free(text);
  close(fd);
  return read || !small;
}

static int is_unchanged(int dir, const char *name, uint64_t bytes, const char *hex) {
  struct stat sb;
  char now[65];
  int fd, is = open_in(&fd, &sb, dir, name);
  if (is != 1)
    return is;
  char *buffer = ps__malloc(PS__HASH_PIECE);
  if ((uint64_t)sb.st_size != bytes)
    is = 0;
  else if (!buffer || ps__hash_open(fd, "a recorded file", bytes, buffer, now) != PS_OK)
    is = -1;
  else
    is = strcmp(now, hex) == 0;
  ps__free(buffer);
  close(fd);
  return is;
}

static int listed_unchanged(const ps__json *files, int dir, const char *name) {
  for (size_t i = 0; files && i < ps__json_length(files); i++) {
    const ps__json *file = ps__json_at(files, i), *bytes = ps__json_get(file, "bytes");
    const char *has = ps__json_string(ps__json_get(file, "name"), NULL),
               *hex = ps__json_string(ps__json_get(file, "sha256"), NULL);
    uint64_t n;
    if (has && hex && strcmp(has, name) == 0 && bytes && ps__json_uint64(bytes, &n))
      return is_unchanged(dir, name, n, hex);
  }
  return 0;
}

int ps__recorded(int dir, const char *name) {
  static const char *const records[] = {PS__RECORD, PS__MANIFEST};
  int is = 0;
  for (size_t k = 0; is == 0 && k < sizeof records / sizeof *records; k++) {
    ps__json *j;
    is = read_in(&j, dir, records[k]) ? listed_unchanged(ps__json_get(j, "files"), dir, name) : -1;
    ps__json_free(j);
  }
  return is;
}
