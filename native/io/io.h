/* io.h - what the files of native/io share. Internal. */
#ifndef PS_IO_H
#define PS_IO_H
#include "core/core.h"

enum { PS__MAX_HEADER_BYTES = 100000000, PS__MAX_DIMS = 8 };

/* "DIR/NAME" in memory of its own; NULL when memory is out. */
char *ps__path_join(const char *dir, const char *name);

/* Parts of a PS_* call that fail by themselves, not through ps__write_all: asks fault injection, then does it, and names the
 * file on failure. */
ps_status ps__sync(int fd, const char *path);
ps_status ps__rename(const char *from, const char *to);
ps_status ps__sync_dir(const char *dir);

#endif
