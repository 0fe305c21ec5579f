/* tensor_file.h - the tensors of safetensors files as they are read (safetensors.c, fused.c). */
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
  bool mapped; /* the index names it */
} tensor;

struct ps_tensor_file {
  data_file *files;
  size_t n_files, cap_files;
  tensor *tensors;
  size_t n, cap;
  uint64_t *by_name; /* indices sorted by name */
  bool initialised;  /* by models/init_model.py, as a file's metadata says */
  bool fused;        /* a layer's experts were one tensor */
};

/* ps__tensors_split() - puts the tensors of each expert in the place of those that have a layer's
 * experts, and sets f->fused where there is one; by_name is then to be made anew. Errors:
 * PS_ENOMEM; PS_EFORMAT: more than @most tensors. */
ps_status ps__tensors_split(ps_tensor_file *f, size_t most);

#endif
