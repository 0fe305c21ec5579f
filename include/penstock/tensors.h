/* penstock/tensors.h - tensors on disk: safetensors files in Hugging Face's directory layout.
 *
 * A directory DIR holds its tensors in model.safetensors, or in several files
 * model-0000i-of-0000n.safetensors with model.safetensors.index.json. A tensor may lie in any file.
 * Reading takes F32, BF16, F16, and FP8 with scales, and converts them. Checkpoints, with optimizer
 * state, are in penstock/checkpoint.h.
 *
 * A model in a directory is replaced as a whole, whatever ends a save:
 *   1. The new model is written into a directory of its own beside DIR, and brought to the disk.
 *   2. That directory and DIR change places in one system call.
 * Some places do not allow step 2: the file system has no RENAME_EXCHANGE, DIR is a mount point or
 * the working directory, or DIR's parent cannot be written. There the new model becomes
 * DIR/.penstock-new in one call, and its files then move up into DIR, config.json last.
 *
 * While DIR/.penstock-new exists it counts: all of Penstock looks for each file there before DIR.
 * Other programs find a whole model or, for a moment, no config.json. The next save into DIR
 * completes a move that was cut off. It also removes what a save that was killed has left, which is
 * named .DIR.penstock-* or DIR/.penstock-*. */
#ifndef PENSTOCK_TENSORS_H
#define PENSTOCK_TENSORS_H
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* one safetensors file, or all of a directory */
typedef struct ps_tensor_file ps_tensor_file;

typedef struct ps_tensor_info {
  const char *name; /* valid until ps_tensors_close() */
  char dtype[12];   /* as in the file's header: "BF16" */
  uint32_t n_dims;  /* at most 8 */
  uint64_t shape[8];
  uint64_t n, bytes; /* elements; BYTES in the file */
} ps_tensor_info;

/* ps_tensors_open() - open @path, a .safetensors file or a model directory, and check all headers:
 * lengths, dtypes, shapes against byte ranges, order, holes, overlaps, duplicate names, the index
 * against the files. No tensor's data is read. A layer's experts that are one tensor, [E,2I,D] or
 * [E,D,I], as transformers 5 may save them, are here a tensor for each expert and projection.
 * @out    owned by the caller, released by ps_tensors_close().
 * Limits: 131,072 tensors, 100,000,000 bytes a header, 1 MiB a metadata value. A tensor takes about
 *         200 bytes of memory.
 * Errors: PS_EIO. PS_EFORMAT names the file, the tensor, the value and the limit. PS_ENOMEM. */
PS_API ps_status ps_tensors_open(ps_tensor_file **out, const char *path);
/* ps_tensors_close() - NULL is a no-op. */
PS_API void ps_tensors_close(ps_tensor_file *f);
/* ps_tensors_initialised() - 1: models/init_model.py wrote the files, so their weights are fresh on
 * purpose. Files that a training saved say so no more. */
PS_API int ps_tensors_initialised(const ps_tensor_file *f);
PS_API uint64_t ps_tensors_count(const ps_tensor_file *f);
/* ps_tensors_info() - describe tensor @idx, below ps_tensors_count(). Errors: PS_EINVAL. */
PS_API ps_status ps_tensors_info(const ps_tensor_file *f, uint64_t idx, ps_tensor_info *out);
/* ps_tensors_find() - the index of the tensor of that name; UINT64_MAX where there is none. */
PS_API uint64_t ps_tensors_find(const ps_tensor_file *f, const char *name);

/* ps_tensors_read() - read elements [first, first+n) of tensor @idx into @dst, converted to @dtype,
 * rounded to nearest even. The file is read by pread and never mapped. A tensor in FP8 is its
 * values times their scales, in fp32 before @dtype: one scale a tensor, a row, or a block of
 * 128 x 128, in tensor NAME_scale_inv or NAME_scale.
 * Errors: PS_EINVAL: @idx or the range. PS_EIO: reading failed, or the file is truncated; the
 *         message names it. PS_EFORMAT: the tensor's dtype cannot be converted. */
PS_API ps_status ps_tensors_read(ps_tensor_file *f, uint64_t idx, uint64_t first, uint64_t n,
                                 ps_dtype dtype, void *dst);

/* ps_tensors_read_bytes() - @n BYTES of tensor @idx from byte @first on, as the file has them.
 * Errors: PS_EINVAL, PS_EIO as above. */
PS_API ps_status ps_tensors_read_bytes(ps_tensor_file *f, uint64_t idx, uint64_t first, uint64_t n,
                                       void *dst);

/* A vision-language checkpoint has tensors of a text model, and others. Tensors of the text model
 * have here the names of the text model alone, "model.layers.0...", whatever prefix they have in
 * the file.
 * ps_tensors_name_on_disk() - the name that the text model's tensor @name has in files of the
 *                             layout of @f. Errors: PS_EINVAL: @bytes are too few.
 * ps_model_carries()        - 1: @m is the text model of such a checkpoint, and tensor @name is one
 *                             of the others: a save carries it over byte for byte. */
PS_API ps_status ps_tensors_name_on_disk(const ps_tensor_file *f, const char *name, char *out,
                                         uint64_t bytes);
PS_API int ps_model_carries(const ps_model *m, const char *name);

/* ps_model_check_tensors() - whether the tensors of @f are the weights of @m: each of them, in a
 * dtype that is converted and with its shape, and no other. Passed over are rotary tables, the head
 * of a model that ties it, and what ps_model_carries(). Errors: PS_EFORMAT names @name and the
 * tensor. */
PS_API ps_status ps_model_check_tensors(const ps_model *m, const ps_tensor_file *f,
                                        const char *name);

/* ps_mxfp4_encode() - @n fp32 numbers in OCP MXFP4, 32 of them a block: 16 bytes of elements each
 * into @elements, a byte of scale into @scales. Adds to @error[0] the sum of squares of what that
 * changes, to error[1] that of the numbers. Errors: PS_EINVAL: @n is no multiple of 32. */
PS_API ps_status ps_mxfp4_encode(const float *x, uint64_t n, uint8_t *elements, uint8_t *scales,
                                 double error[2]);

typedef struct ps_tensor_writer ps_tensor_writer;

/* A tensor to be written. Its data is appended later, in the order of the specs. */
typedef struct ps_tensor_spec {
  const char *name; /* borrowed for the call */
  uint32_t dtype;   /* ps_dtype */
  uint32_t n_dims;
  uint64_t shape[8];
  /* Of a tensor that is written as a file has it: its dtype there, borrowed for the call, and the
   * BYTES of its data. NULL and 0: it is of @dtype. */
  const char *file_dtype;
  uint64_t bytes;
} ps_tensor_spec;

/* ps_tensors_create() - begin to write @n tensors into @dir, which is made when it is missing. What
 * @dir holds stays as it is until ps_tensors_finish().
 * @out   owned by the caller, ended by ps_tensors_finish() or ps_tensors_abort().
 * @stem  "model" gives model.safetensors, or files of at most @max_shard_bytes with an index.
 *        @max_shard_bytes 0: one file.
 * @meta  @n_meta pairs of strings, key and value, for the files' metadata beside {"format":"pt"}.
 * Errors: PS_EINVAL: a name, a shape, or an order that would not be aligned. PS_EIO: @dir cannot be
 *         written, or its disk is too small. PS_ENOMEM. */
PS_API ps_status ps_tensors_create(ps_tensor_writer **out, const char *dir, const char *stem,
                                   const ps_tensor_spec *specs, uint64_t n,
                                   uint64_t max_shard_bytes, const char *const *meta,
                                   uint32_t n_meta);
/* ps_tensors_append() - write the next @bytes of data, in the order of the specs. A call may carry
 * any number of bytes. Errors: PS_EIO. PS_ESTATE: more data than the specs have. */
PS_API ps_status ps_tensors_append(ps_tensor_writer *w, const void *data, uint64_t bytes);
/* ps_tensors_finish() - replace @dir's files of the same stem by what was written, all at once, and
 * free the writer. Other files in @dir stay.
 * Errors: PS_ESTATE: data is missing. PS_EIO. On an error the old files stay, unless the message
 *         says that the new tensors count. */
PS_API ps_status ps_tensors_finish(ps_tensor_writer *w);
/* ps_tensors_abort() - remove what was written, and free the writer. NULL is a no-op. */
PS_API void ps_tensors_abort(ps_tensor_writer *w);

#ifdef __cplusplus
}
#endif
#endif
