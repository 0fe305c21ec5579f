/* io.h - functions of native/io that native/train and other files of native/io use. Internal. */
#ifndef PS_IO_H
#define PS_IO_H
#include "core/core.h"
#include "core/sha256.h"
#include <penstock/tensors.h>
#include <penstock/data.h>

#define PS__MANIFEST "manifest.json"
/* a folder of a tokenizer with chat templates under other names than the default one */
#define PS__TEMPLATES "additional_chat_templates"
enum { PS__MAX_HEADER_BYTES = 100000000, PS__MAX_DIMS = 8 };

/* "DIR/NAME" in memory that the caller frees; NULL: no memory is left. */
char *ps__path_join(const char *dir, const char *name);

/* fsync() and rename() with fault injection. The message of a failure names the file. */
ps_status ps__sync(int fd, const char *path);
ps_status ps__rename(const char *from, const char *to);
ps_status ps__sync_dir(const char *dir);
ps_status ps__sync_open_dir(int fd, const char *dir);

/* ---- a directory's model, replaced as a whole (stage.c) -------------------------------------- */
typedef struct ps__stage ps__stage;
/* Begin to replace the model of @dir: remove what saves that were cut off have left, and make an
 * empty directory for the new model. @dir need not exist; its parent must. The stage is released by
 * commit or abort. PS_EIO, PS_EINVAL, PS_ENOMEM. */
ps_status ps__stage_open(ps__stage **out, const char *dir);
/* The directory into which the caller writes the new model's files and brings them to the disk. */
const char *ps__stage_path(const ps__stage *s);
/* @dir's path, absolute and without links. */
const char *ps__stage_target(const ps__stage *s);
/* Complete a save into @dir that was cut off, and remove what others have left. PS_EIO, PS_EINVAL,
 * PS_ENOMEM. */
ps_status ps__stage_tidy(const char *dir);
/* Make what was written the model of @dir, at once, and free the stage. Other files of @dir stay.
 * On an error @dir has the old model or, where the message says so, the new one. */
ps_status ps__stage_commit(ps__stage *s);
void ps__stage_abort(ps__stage *s); /* removes it; NULL is a no-op */
/* Remove what saves into directories PARENT/PREFIX... that were cut off have left. */
void ps__stage_clear(const char *parent, const char *prefix);
/* Remove directory @name of @parent. A kill on the way leaves what ps__stage_clear() removes. */
ps_status ps__stage_remove(const char *parent, const char *name);
/* Create @name in the stage, which may be PS__TEMPLATES/NAME. Messages name @what. PS_EIO. */
ps_status ps__stage_create(int *fd, const ps__stage *s, const char *name, const char *what);
/* Create @name in the stage with the text that @w was given, and bring it to the disk. Messages
 * name the file in @dir. PS_EIO, PS_ENOMEM. */
ps_status ps__stage_write_json(const ps__stage *s, const char *dir, const char *name, ps__jsonw *w);
/* Count @bytes that will be written into the stage; returns all that were counted so far. */
uint64_t ps__stage_need(ps__stage *s, uint64_t bytes);
/* the names of a tokenizer's files, which are replaced together; NULL ends the list */
extern const char *const ps__tokenizer_files[];

/* ps_tensors_create() into a stage of the caller. ps_tensors_finish() then does not commit it. */
ps_status ps__tensors_create(ps_tensor_writer **out, ps__stage *stage, const char *dir,
                             const char *stem, const ps_tensor_spec *specs, uint64_t n,
                             uint64_t max_shard_bytes, const char *const *meta, uint32_t n_meta);

/* The files of a writer may be written in any order and by several threads, instead of by
 * ps_tensors_append(). Each is begun, gets its data in the order of its specs, and is ended by one
 * thread. All of them come before ps_tensors_finish(). */
typedef struct ps__hashed { /* a file, for the manifest */
  char name[256], hex[65];
  uint64_t bytes;
} ps__hashed;
typedef struct ps__tensors_file {
  ps_tensor_writer *writer;
  const char *path; /* for messages */
  int fd;
  ps__sha256 sha;
  uint64_t bytes, left, flushed; /* written; data to come; on their way to the disk */
} ps__tensors_file;
uint64_t ps__tensors_n_files(const ps_tensor_writer *w);
/* File @k has specs *first to *first + *n - 1. */
void ps__tensors_in_file(const ps_tensor_writer *w, uint64_t k, uint64_t *first, uint64_t *n);
/* ps__tensors_end() comes after each begin, also a failed one. PS_EIO. */
ps_status ps__tensors_begin(ps__tensors_file *f, ps_tensor_writer *w, uint64_t k);
ps_status ps__tensors_put(ps__tensors_file *f, const void *data, uint64_t bytes);
/* Close the file. Where @st is PS_OK, bring it to the disk and fill in @out. Returns @st or its own
 * error. */
ps_status ps__tensors_end(ps__tensors_file *f, ps_status st, ps__hashed *out);

/* ps__tensors_fused() - whether the files have a layer's experts as one tensor. */
bool ps__tensors_fused(const ps_tensor_file *f);
/* ps__tensors_quantized() - whether the files have weights in FP8 with scales (quantized.c). */
bool ps__tensors_quantized(const ps_tensor_file *f);
/* ps__tensors_keep_blocks() - whether tensor @idx is e4m3 with scales that blocks of PS_BASE_FP8
 * have (core/blocks.h): then its weights in blocks are those that ps_tensors_read() reads, bit for
 * bit.
 * ps__tensors_read_blocks() - all of it as such blocks, into @dst. Errors: as ps_tensors_read(). */
bool ps__tensors_keep_blocks(const ps_tensor_file *f, uint64_t idx);
ps_status ps__tensors_read_blocks(const ps_tensor_file *f, uint64_t idx, void *dst);
/* ps__tensors_passed_over() - whether tensor @idx is the scales of another, or one that only
 * quantized products need. */
bool ps__tensors_passed_over(const ps_tensor_file *f, uint64_t idx);
/* ps__tensors_has_scales() - whether tensor @idx is quantized. */
bool ps__tensors_has_scales(const ps_tensor_file *f, uint64_t idx);
/* ps__tensors_check_dtype() - whether ps_tensors_read() converts tensor @idx. PS_EFORMAT. */
ps_status ps__tensors_check_dtype(const ps_tensor_file *f, uint64_t idx);
/* ps__fused_name() - the name in such files of the tensor that begins with parameter @param, in
 * @out of @bytes. Returns how many of an expert's parameters are in it; 0: @param is no expert's.
 */
uint32_t ps__fused_name(char *out, size_t bytes, const char *param);
/* ps__fused_transposed() - whether @param is an expert's of gpt-oss, whose fused tensors have
 * matrices transposed, and which has no other files (fused.c).
 * ps__tensors_transposed() - whether tensor @idx is cut from one: ranges of it are slow to read. */
bool ps__fused_transposed(const char *param);
bool ps__tensors_transposed(const ps_tensor_file *f, uint64_t idx);
/* ps__sliced_name() - of a parameter that is a layer's part of a tensor that all layers share, that
 * tensor's name, in @out of @bytes, and how its parts stand in it (sliced.c). */
typedef enum ps__slices {
  PS__SLICES_NONE,
  PS__SLICES_ROWS,
  PS__SLICES_COLUMNS,
  PS__SLICES_WHOLE /* one layer has all of it */
} ps__slices;
ps__slices ps__sliced_name(char *out, size_t bytes, const char *param);
/* ---- MXFP4 (mxfp4.c) ----
 * ps__mxfp4_encode() - 32 numbers as a byte of scale, which is returned, and 16 of elements. */
#define PS__MXFP4 "MXFP4"
enum { PS__MXFP4_BLOCK = 32, PS__MXFP4_BYTES = 16 };
uint8_t ps__mxfp4_encode(const float *x, uint8_t *out);
/* ps__mxfp4_decode() - the 32 numbers again, with at most one rounding, of numbers past fp32's. */
void ps__mxfp4_decode(float *x, const uint8_t *q, uint8_t scale);
/* ps_tensors_open() of a directory's files of another stem. */
ps_status ps__tensors_open(ps_tensor_file **out, const char *path, const char *stem);
/* The value of @key in the metadata of the first file, of at most @bytes - 1 bytes; "" where there
 * is none. PS_EIO, PS_ENOMEM. */
ps_status ps__tensors_metadata(const ps_tensor_file *f, const char *key, char *out, size_t bytes);
/* The path of its file @k; NULL: there are no more. */
const char *ps__tensors_path(const ps_tensor_file *f, uint64_t k);

/* ---- a directory's manifest (manifest.c) ----------------------------------------------------- */
/* Write the array "files" of the object that @w is in: name, bytes and SHA-256 of each file of the
 * stage. @known has those of @n_known files, which are not read again. *bytes: of all files
 * together. PS_EIO, PS_ENOMEM. */
ps_status ps__manifest_files(ps__jsonw *w, const ps__stage *s, const ps__hashed *known,
                             size_t n_known, uint64_t *bytes);
/* Write a record of the stage's files into it, where it has files of a tokenizer. By it the next
 * save tells which files of the directory a user has put there. PS_EIO, PS_ENOMEM. */
ps_status ps__stage_write_record(const ps__stage *s, const char *dir);
/* Whether @manifest lists file @name. */
bool ps__manifest_lists(const ps__json *manifest, const char *name);
/* Check that directory @dir has the files of @manifest, with their bytes and SHA-256s.
 * PS_EFORMAT names a file that differs or is missing, or the manifest @path where it is no
 * manifest. PS_EIO, PS_ENOMEM. *bytes: of all files together. */
ps_status ps__manifest_check(const ps__json *manifest, const char *path, const char *dir,
                             uint64_t *bytes);

/* Path of data file @i of a dataset, in order; NULL: there are no more. Valid until close. */
const char *ps__dataset_path(const ps_dataset *ds, uint64_t i);
/* A hash of the data, to compare copies on several hosts by: the bytes of all shards and mask files
 * in their order, and of a mix the shares. Of more than 4 GiB it reads samples of 64 MiB in all,
 * spread evenly, and each file's size, beginning and end. *bytes: of all files together. PS_EIO. */
ps_status ps__dataset_hash(const ps_dataset *ds, uint64_t *hash, uint64_t *bytes);
/* What tells a shard, with its mask file, from another. */
typedef struct ps__data_mark {
  uint64_t bytes, hash;
} ps__data_mark;
/* The marks of all shards, in order. Of more than 256 MiB of data the hashes are of samples of 16
 * MiB in all, as ps__dataset_hash() takes them. PS_EIO. */
ps_status ps__dataset_marks(const ps_dataset *ds, ps__data_mark *out);
/* Count a trainer that reads @ds, from use to leave; ps_dataset_close() meanwhile is PS_EBUSY. NULL
 * is a no-op. */
void ps__dataset_use(ps_dataset *ds);
void ps__dataset_leave(ps_dataset *ds);

#endif
