/* input.c - files of a dataset. */
#include "io/input.h"
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

void ps__input_identify(ps__input *f, const struct stat *sb) {
  f->bytes = (uint64_t)sb->st_size;
  f->device = sb->st_dev;
  f->inode = sb->st_ino;
}

/* The CRC-32 of zip and PNG (reflected polynomial 0xEDB88320) of the file's first bytes. */
ps_status ps__input_crc(const ps__input *f, uint32_t *out) {
  uint32_t table[256], crc = UINT32_MAX;
  uint8_t piece[PS__INPUT_PIECE];
  const uint64_t n = f->bytes < PS__INPUT_CRC_BYTES ? f->bytes : PS__INPUT_CRC_BYTES;
  for (uint32_t i = 0; i < 256; i++) {
    table[i] = i;
    for (int k = 0; k < 8; k++)
      table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320u : 0);
  }
  for (uint64_t done = 0; done < n;) {
    const uint64_t m = n - done < PS__INPUT_PIECE ? n - done : PS__INPUT_PIECE;
    PS_TRY(ps__pread_all(f->fd, f->path, piece, m, done));
    for (uint64_t i = 0; i < m; i++)
      crc = crc >> 8 ^ table[(crc ^ piece[i]) & 255];
    done += m;
  }
  *out = ~crc;
  return PS_OK;
}

/* The file's descriptor. Where the file is opened for this call, it must be the one that was
 * checked. */
ps_status ps__input_take(const ps__input *f, int *fd) {
  struct stat sb;
  *fd = f->fd;
  if (f->fd >= 0)
    return PS_OK;
  PS_TRY(ps__open_input(fd, &sb, f->path));
  if (sb.st_dev == f->device && sb.st_ino == f->inode && (uint64_t)sb.st_size == f->bytes)
    return PS_OK;
  close(*fd);
  return ps__fail(PS_EIO,
                  "%s: is no longer the file of %" PRIu64
                  " bytes that was opened: do not change shards while a run reads them",
                  f->path, f->bytes);
}

/* Closes what ps__input_take() has opened. Replaces the error of a failed read by a clearer one, if
 * the file was cut off. */
ps_status ps__input_leave(const ps__input *f, int fd, ps_status st) {
  struct stat sb;
  if (st == PS_EIO && fstat(fd, &sb) == 0 && (uint64_t)sb.st_size < f->bytes)
    st = ps__fail(PS_EIO,
                  "%s: was cut from %" PRIu64 " to %" PRIu64
                  " bytes while it was in use: write it again",
                  f->path, f->bytes, (uint64_t)sb.st_size);
  if (fd != f->fd)
    close(fd);
  return st;
}

void ps__input_shut(ps__input *f) {
  if (f->fd >= 0)
    close(f->fd);
  f->fd = -1;
}
