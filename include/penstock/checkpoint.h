/* penstock/checkpoint.h - tensors on disk: safetensors files in Hugging Face's directory layout.
 *
 * DIR/model.safetensors, or DIR/model.safetensors.index.json with
 * model-0000i-of-0000n.safetensors. Reading takes F32, BF16 and F16 and converts; a tensor may
 * lie in any file.
 *
 * A model in a directory is replaced as a whole, whatever ends a save. The new one is written
 * into a directory of its own beside DIR, brought to the disk, and changes places with DIR in
 * one call. Where that cannot be (no RENAME_EXCHANGE on this file system, DIR is a mount point
 * or the working directory, its parent cannot be written), the new one becomes DIR/.penstock-new
 * in one call, and its files then move up, config.json last. While that folder is there, it
 * counts: each file is looked for there before DIR. All of Penstock reads so; other programs
 * find a whole model, or for a moment no config.json, and the next save completes what was cut
 * off. Leftovers of a save that was killed are called .DIR.penstock-* or DIR/.penstock-*; the
 * next save into DIR removes them. */
#ifndef PENSTOCK_CHECKPOINT_H
#define PENSTOCK_CHECKPOINT_H
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* one safetensors file, or a directory's set of them */
typedef struct ps_tensor_file ps_tensor_file;

typedef struct ps_tensor_info {
  const char *name; /* owned by the file object */
  char dtype[12];   /* as in the header: "BF16" */
  uint32_t n_dims;  /* <= 8 */
  uint64_t shape[8];
  uint64_t n, bytes; /* elements; bytes in the file */
} ps_tensor_info;

/* ps_tensors_open() - open @path: a .safetensors file, or a model directory. Headers are checked
 * whole: lengths, dtypes, shapes against byte ranges, order, holes, overlaps, duplicate names,
 * the index against the files. Nothing of the data is read. At most 131,072 tensors, headers of
 * 100,000,000 bytes and metadata values of 1 MiB are read, in some 200 bytes of memory a tensor.
 * @out owned by the caller, released by ps_tensors_close(). Errors: PS_EIO, PS_EFORMAT (file,
 * tensor, value, limit). */
PS_API ps_status ps_tensors_open(ps_tensor_file **out, const char *path);
PS_API void ps_tensors_close(ps_tensor_file *f);
PS_API uint64_t ps_tensors_count(const ps_tensor_file *f);
PS_API ps_status ps_tensors_info(const ps_tensor_file *f, uint64_t idx, ps_tensor_info *out);
/* ps_tensors_find() - index of a name, or UINT64_MAX. */
PS_API uint64_t ps_tensors_find(const ps_tensor_file *f, const char *name);

/* ps_tensors_read() - elements [first, first+n) of tensor @idx, converted to @dtype (round to
 * nearest even), into @dst. Reads with pread, never maps. Errors: PS_EINVAL, PS_EIO (a truncated
 * file: names it), PS_EFORMAT (dtype not convertible). */
PS_API ps_status ps_tensors_read(ps_tensor_file *f, uint64_t idx, uint64_t first, uint64_t n,
                                 ps_dtype dtype, void *dst);

typedef struct ps_tensor_writer ps_tensor_writer;

/* A tensor to be written; data arrives later, in this order. */
typedef struct ps_tensor_spec {
  const char *name; /* borrowed for the call */
  uint32_t dtype;   /* ps_dtype */
  uint32_t n_dims;
  uint64_t shape[8];
} ps_tensor_spec;

/* ps_tensors_create() - begin writing @n tensors into DIR as @stem ("model" gives
 * model.safetensors or shards of at most
 * @max_shard_bytes with an index; 0: one file). DIR, which is made when missing, stays as it is
 * until ps_tensors_finish(). Metadata {"format":"pt"} plus the @n_meta string pairs @meta[2*i],
 * @meta[2*i+1]. @out owned by the caller, ended by ps_tensors_finish() or ps_tensors_abort(). */
PS_API ps_status ps_tensors_create(ps_tensor_writer **out, const char *dir, const char *stem,
                                   const ps_tensor_spec *specs, uint64_t n,
                                   uint64_t max_shard_bytes, const char *const *meta,
                                   uint32_t n_meta);
/* ps_tensors_append() - the next @bytes of data, in the order of the specs; may be called in
 * pieces of any size. */
PS_API ps_status ps_tensors_append(ps_tensor_writer *w, const void *data, uint64_t bytes);
/* ps_tensors_finish() - what was written takes the place of an earlier save's files of the same
 * stem, all at once; other files in DIR stay. Frees the writer. PS_ESTATE when data is missing.
 * On an error DIR is as it was, unless the message says that the new tensors count. */
PS_API ps_status ps_tensors_finish(ps_tensor_writer *w);
/* removes what was written, and nothing else; NULL is a no-op */
PS_API void ps_tensors_abort(ps_tensor_writer *w);

#ifdef __cplusplus
}
#endif
#endif
