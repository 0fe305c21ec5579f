/* input.h - a file of a dataset: read in pieces, open or opened anew for each, and then the file
 * that was checked. */
#ifndef PS_IO_INPUT_H
#define PS_IO_INPUT_H
#include "io/io.h"
#include <sys/types.h>

enum {
  PS__INPUT_PIECE = 1 << 14,    /* read at a time, on the stack */
  PS__INPUT_CRC_BYTES = 1 << 20 /* of a shard, which the headers of files beside it know */
};

typedef struct ps__input {
  char *path; /* NULL: there is none */
  int fd;     /* -1: opened for each sequence */
  uint64_t bytes;
  dev_t device; /* device and inode tell whether the path still names this file */
  ino_t inode;
} ps__input;

struct stat;
/* ps__input_identify() - notes the file's size and which one it is.
 * ps__input_take() - its descriptor. Where it is opened for this call, it must be the file that was
 * noted. Errors: PS_EIO.
 * ps__input_leave() - closes what ps__input_take() has opened, and returns @st or, where the file
 * was cut off, a clearer error.
 * ps__input_shut() - closes it for good.
 * ps__input_crc() - the CRC-32 of zip and PNG of the first PS__INPUT_CRC_BYTES of a file that is
 * open. Errors: PS_EIO. */
void ps__input_identify(ps__input *f, const struct stat *sb);
ps_status ps__input_take(const ps__input *f, int *fd);
ps_status ps__input_leave(const ps__input *f, int fd, ps_status st);
void ps__input_shut(ps__input *f);
ps_status ps__input_crc(const ps__input *f, uint32_t *out);
#endif
