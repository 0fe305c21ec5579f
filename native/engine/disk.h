/* disk.h - the memory of a place of kind PS_PLACE_DISK: files on one or several drives.
 *
 * A file lies in each directory. Its name is gone as soon as it is open, so a process that ends in
 * any way leaves nothing behind. Consecutive stripes of the space go to the drives in turn.
 * Training reads and writes by direct I/O, past the page cache, whole sectors of PS__DISK_ALIGN
 * bytes. */
#ifndef PS_ENGINE_DISK_H
#define PS_ENGINE_DISK_H
#include "core/core.h"
#include <penstock/engine.h>

enum { PS__DISK_ALIGN = 4096 };
typedef struct ps__disk ps__disk;

/* ps__disk_dirs() - the directories in @text, separated by commas; they point into @copy, which the
 * caller frees. PS_EINVAL: none, or too many. PS_ENOMEM.
 * ps__disk_check() - refuse directories that cannot hold @bytes together: one that is not there, is
 * on a network's or a memory's file system, is given twice, or has too little room. Makes nothing.
 * PS_EINVAL, PS_EBUDGET, PS_EIO.
 * ps__disk_open() - the same, then lock the directories and reserve the room. Bytes are zeros.
 * PS_EBUSY: another process has a directory. PS_EIO, PS_ENOMEM. */
ps_status ps__disk_dirs(const char *text, char **copy, const char *dir[PS_MAX_DRIVES], uint32_t *n);
ps_status ps__disk_check(const char *const *dir, uint32_t n, uint64_t bytes);
ps_status ps__disk_open(ps__disk **out, const char *const *dir, uint32_t n, uint64_t bytes);
void ps__disk_close(ps__disk *d); /* NULL is a no-op */

/* ps__disk_run() - move @bytes between @memory and the space from @offset on, in pieces on the
 * threads of @launch; NULL: on the calling one. All three are multiples of PS__DISK_ALIGN.
 * ps__disk_move() - the same of any bytes, on the calling thread. Where a sector is written in part
 * nobody else writes it meanwhile.
 * Both block, and any number of threads may call. PS_EIO names directory and errno; PS_ENOMEM. */
ps_status ps__disk_run(ps__disk *d, bool write, uint64_t offset, void *memory, uint64_t bytes,
                       const ps_launch *launch);
ps_status ps__disk_move(ps__disk *d, bool write, uint64_t offset, void *memory, uint64_t bytes);
#endif
