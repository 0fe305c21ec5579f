/* stage.h - what stage.c needs of directories and of a model's files. Internal to native/io.
 *
 * The functions of type bool return false where a system call failed; errno says why. */
#ifndef PS_IO_STAGE_H
#define PS_IO_STAGE_H
#include "io/io.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

enum { PS__DIR_FLAGS = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, PS__MAX_TRIES = 100 };

/* In a saved model: the files beside its weights that the save wrote, as in a manifest. */
#define PS__RECORD "penstock.json"
/* in DIR/.penstock-new while files of the old model may still be in DIR */
#define PS__REPLACING ".replacing"

/* what a run notes in a model that it saves (native/cli/saved.c); it ends with that model */
#define PS__MODEL_NOTE ".penstock-note"

/* ---- which files are a model's (model_files.c) ----------------------------------------------- */
/* *stem: the length of @name without @end */
bool ps__ends_with(const char *name, const char *end, size_t *stem);
bool ps__in_model(const char *name);
bool ps__in_tokenizer(const char *name);
/* Whether @dir has @name: 1 or 0; -1: the disk does not say. */
int ps__exists_in(int dir, const char *name);
/* Whether the whole model in @dir replaces file @name of an older model. Weights of one stem are
 * replaced together, and so are the files of a tokenizer. 1, 0 or -1, as ps__exists_in(). */
int ps__superseded(int dir, const char *name);
/* The same for file @name of @dir, which the model in @fresh is about to replace. Of a tokenizer's
 * files those that @fresh lacks stay, unless an earlier save has written them. */
int ps__replaced(int dir, int fresh, const char *name);
/* Warn of each file of a tokenizer that stays though @fresh brings a tokenizer without it. */
ps_status ps__warn_kept(int dir, int fresh, const char *path);
/* Whether a save has written file @name of @dir, and nobody has changed it since: its record or its
 * manifest says so (record.c). 1, 0 or -1, as ps__exists_in(). */
int ps__recorded(int dir, const char *name);
/* ps__hash_open() - SHA-256 of the first @bytes of the open file @path (record.c).
 * @buffer  PS__HASH_PIECE BYTES. @hex gets the sum, terminator included. PS_EIO. */
enum { PS__HASH_PIECE = 1 << 20 };
ps_status ps__hash_open(int fd, const char *path, uint64_t bytes, char *buffer, char hex[65]);

/* ---- directories (tree.c) -------------------------------------------------------------------- */
DIR *ps__list(int dir);
/* The next name that is not . or .. ; NULL at the end. errno is then 0, or the error that ended the
 * list early. */
const char *ps__next_name(DIR *d);
bool ps__starts_with(const char *name, const char *prefix);
/* The names in a directory. The folder of chat templates is not one of them, its files are:
 * PS__TEMPLATES/NAME. */
typedef struct ps__names {
  char **item;
  size_t n, cap;
} ps__names;
bool ps__list_names(int dir, ps__names *out); /* nothing to free where it fails */
void ps__free_names(ps__names *names);
/* Make the folder that @name of @dir lies in, where @name is PS__TEMPLATES/NAME. */
bool ps__make_folder_of(int dir, const char *name);
/* @fd is open on the file that @path names, relative to @at. */
bool ps__is_at(int fd, int at, const char *path);
bool ps__same_file(const struct stat *a, const struct stat *b);
/* flock() that is not ended by signals */
bool ps__lock(int fd, int how);
bool ps__remove_tree(int at, const char *name);
/* Give @to the owner, mode, times and extended attributes of @from. */
bool ps__copy_folder_attributes(int from, int to);
/* Bring @name of @from into @to as well: files as links, folders as new ones. */
bool ps__carry_tree(int from, int to, const char *name);
/* Empty @from, whose place @to has taken. Files that @to does not know move there. @top: the two
 * are model directories, not folders in them. @fresh: @to took the place just now, so that a file
 * which differs here was changed after it was carried. Where it is false, @from may also be a stage
 * that never took its place, and its model is dropped. False: something stays in @from
 * (retire.c). */
bool ps__retire(int from, int to, bool top, bool fresh);

/* ---- DIR/.penstock-new moves up into DIR (pending.c) ----------------------------------------- */
/* Move the files of @pending, which is DIR/.penstock-new, into @dir, and remove it. It may be
 * called again after any failure. @path is DIR, for messages. PS_EIO. */
ps_status ps__move_pending(int dir, int pending, const char *path);
/* Complete the move of an earlier save, or wait for one that another process makes. PS_EIO. */
ps_status ps__finish_pending(int dir, const char *path);

#endif
