/* tensor_file.h - the tensors of safetensors files as they are read (safetensors.c, fused.c,
 * quantized.c, tensor_file.c). */
#ifndef PS_IO_TENSOR_FILE_H
#define PS_IO_TENSOR_FILE_H
#include "io/io.h"

typedef struct data_file {
  char *path;
  int fd;
  uint64_t data_start;
} data_file;

typedef struct tensor {
  char *name;
  ps_tensor_info info;
  uint64_t begin; /* the byte of the file where its data begins */
  uint32_t file;
  bool mapped;      /* the index names it */
  bool passed_over; /* it belongs to a quantized tensor: no model has it as a parameter */
  const struct tensor *scales;     /* of a quantized tensor; NULL: it is not quantized */
  uint64_t scale_rows, scale_cols; /* that one scale is of */
  uint64_t row_stride;             /* BYTES from row to row in the file; 0: rows have no gaps */
  bool transposed;                 /* the file has [shape[1], shape[0]] */
  uint64_t expert;                 /* gpt-oss: which one it is of */
} tensor;

struct ps_tensor_file {
  data_file *files;
  size_t n_files, cap_files;
  tensor *tensors;
  size_t n, cap;
  uint64_t *by_name; /* indices sorted by name */
  bool initialised;  /* by models/init_model.py, as a file's metadata says */
  bool fused;        /* a layer's experts were one tensor */
  uint32_t names;    /* the layout of names that the files have (tower.h) */
};

/* ps__tensors_split() - puts the tensors of each expert in the place of those that have a layer's
 * experts, by the names of the family that the config.json of @dir has, and sets f->fused where
 * there is one; by_name is then to be made anew. Errors: PS_ENOMEM; PS_EFORMAT: more than @most
 * tensors. */
ps_status ps__tensors_split(ps_tensor_file *f, const char *dir, size_t most);

/* ps__tensors_part() - @part is the @i-th of tensor @at: the first takes the whole's place, others
 * follow all tensors. Takes part->name, also where it fails. Errors: PS_ENOMEM. */
ps_status ps__tensors_part(ps_tensor_file *f, size_t at, uint64_t i, const tensor *part);

/* ps__tensors_pair() - finds the scales of tensors in FP8, and what else belongs to them. The last
 * step of opening. Errors: PS_EFORMAT: scales of another shape or dtype. */
ps_status ps__tensors_pair(ps_tensor_file *f);

/* ps__tensors_dequantize() - ps_tensors_read() of @t, which has scales; the range is within it. */
ps_status ps__tensors_dequantize(const ps_tensor_file *f, const tensor *t, uint64_t first,
                                 uint64_t n, ps_dtype dtype, void *dst);

/* ps__mxfp4_blocks() - whether @t has the blocks of a layer's experts in MXFP4, as files have them.
 * ps__mxfp4_pair() - ps__tensors_pair() of an expert's tensor in MXFP4.
 * ps__mxfp4_read() - ps__tensors_dequantize() of one. */
bool ps__mxfp4_blocks(const tensor *t);
bool ps__is_mxfp4(const tensor *t);
ps_status ps__mxfp4_pair(ps_tensor_file *f, tensor *t);
ps_status ps__mxfp4_read(const ps_tensor_file *f, const tensor *t, uint64_t first, uint64_t n,
                         ps_dtype dtype, void *dst);
/* ps__tensors_slice() - puts each layer's part in the place of tensors that all layers share
 * (sliced.c). @any: there are such, and by_name is to be made anew. Errors: as ps__tensors_split().
 * ps__tensors_read_strided() - ps_tensors_read() of @t, which has gaps between rows. */
ps_status ps__tensors_slice(ps_tensor_file *f, size_t most, bool *any);
ps_status ps__tensors_read_strided(const ps_tensor_file *f, const tensor *t, uint64_t first,
                                   uint64_t n, ps_dtype dtype, void *dst);
/* ps__tensors_read_transposed() - ps_tensors_read() of @t, which the file has transposed. */
ps_status ps__tensors_read_transposed(const ps_tensor_file *f, const tensor *t, uint64_t first,
                                      uint64_t n, ps_dtype dtype, void *dst);

#endif
