/* io.h - what the files of native/io share. Internal. */
#ifndef PS_IO_H
#define PS_IO_H
#include "core/core.h"
#include <penstock/checkpoint.h>
#include <penstock/data.h>

enum { PS__MAX_HEADER_BYTES = 100000000, PS__MAX_DIMS = 8 };

/* "DIR/NAME" in memory of its own; NULL when memory is out. */
char *ps__path_join(const char *dir, const char *name);

/* Parts of a PS_* call that fail by themselves, not through ps__write_all: asks fault injection,
 * then does it, and names the file on failure. */
ps_status ps__sync(int fd, const char *path);
ps_status ps__rename(const char *from, const char *to);
ps_status ps__sync_dir(const char *dir);
ps_status ps__sync_open_dir(int fd, const char *dir);

/* ---- a directory's model, replaced as a whole (stage.c) -------------------------------------- */
typedef struct ps__stage ps__stage;
/* Begin: clears what saves that were cut off left, and makes an empty directory for the new
 * model of @dir, which need not be there (its parent must). Released by commit or abort. PS_EIO,
 * PS_EINVAL, PS_ENOMEM. */
ps_status ps__stage_open(ps__stage **out, const char *dir);
/* where the new model's files are written, each brought to the disk */
const char *ps__stage_path(const ps__stage *s);
/* What was written becomes DIR's model at once; what else DIR has stays. Frees the stage. On an
 * error DIR has the old model, or, where the message says so, the new one. */
ps_status ps__stage_commit(ps__stage *s);
void ps__stage_abort(ps__stage *s); /* removes it; NULL is a no-op */
/* Open @name in the stage, for @what in messages. PS_EIO. */
ps_status ps__stage_create(int *fd, const ps__stage *s, const char *name, const char *what);
/* the names of a tokenizer's files, which are replaced together; ends with NULL */
extern const char *const ps__tokenizer_files[];

/* ps_tensors_create() into a stage, which stays the caller's; ps_tensors_finish() then commits
 * nothing. */
ps_status ps__tensors_create(ps_tensor_writer **out, ps__stage *stage, const char *dir,
                             const char *stem, const ps_tensor_spec *specs, uint64_t n,
                             uint64_t max_shard_bytes, const char *const *meta, uint32_t n_meta);

/* A trainer reads @ds from use to leave; closing it meanwhile is PS_EBUSY. NULL is a no-op. */
void ps__dataset_use(ps_dataset *ds);
void ps__dataset_leave(ps_dataset *ds);

#endif
