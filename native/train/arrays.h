/* arrays.h - writes weights and optimizer states as safetensors, with several threads: for saves
 * and for checkpoints. Internal. */
#ifndef PS_TRAIN_ARRAYS_H
#define PS_TRAIN_ARRAYS_H
#include "io/io.h"
#include "train/trainer.h"

typedef struct ps__array {
  const char *stem; /* of its files' names */
  ps_dtype dtype;   /* in the files; of a state, that in memory */
  uint32_t what;    /* PS__ARRAY_UPDATED: of all parameters; PS__ARRAY_STATE + k: of trained ones */
} ps__array;

typedef struct ps__output {
  ps__stage *stage;
  const char *dir; /* for messages */
  const ps__array *array;
  uint32_t n_arrays;
  uint64_t max_file_bytes;
  bool fused;         /* a layer's experts are one tensor, as in the files that were read */
  bool merged;        /* layers' parts of a tensor that all share are that tensor (io/sliced.c) */
  bool mxfp4;         /* with fused: experts of gpt-oss in MXFP4, the other tensors in bf16 */
  bool held;          /* steps run meanwhile: each part is awaited and released (hold.h) */
  ps__hashed *hashed; /* out, owned by the caller: the tensors' files */
  size_t n_hashed;
  double rounding; /* out, with mxfp4: the experts' root mean square error, relative to theirs */
} ps__output;

/* How parameters stand in a file's tensor (forms.c). */
typedef enum ps__form {
  PS__FORM_PLAIN,
  PS__FORM_TRANSPOSED,
  PS__FORM_BLOCKS, /* of MXFP4 */
  PS__FORM_SCALES,
  PS__FORM_ROWS,   /* of all layers' parts, one after the other */
  PS__FORM_COLUMNS /* the same, side by side */
} ps__form;
/* ps__form_spec() - the spec of @form of the fused tensor [experts, rows, cols] of parameters @p,
 * whose name is in @name of @bytes and may become longer.
 * ps__form_write() - write @p, of which @buffer has room for @room numbers. error[0] and [1] are
 * added the squares of what MXFP4 changes and of all numbers. PS_EIO, PS_EDEVICE, PS_ENOMEM;
 * PS_ECANCELLED once *@failed is set. */
void ps__form_spec(ps_tensor_spec *spec, ps__form form, const ps_param_info *p, uint32_t n_experts,
                   char *name, size_t bytes);
ps_status ps__form_write(const ps_trainer *t, ps__tensors_file *f, const ps__array *a,
                         const ps_param_info *p, ps__form form, float *buffer, uint64_t room,
                         const _Atomic uint32_t *failed, double error[2]);
/* ps__form_write_merged() - write the parts that all layers have of the tensor of @p, the first
 * layer's. The rest as ps__form_write(). */
ps_status ps__form_write_merged(const ps_trainer *t, ps__tensors_file *f, const ps__array *a,
                                const ps_param_info *p, ps__form form, float *buffer, uint64_t room,
                                const _Atomic uint32_t *failed);

/* CPUs for what runs beside the steps: half of all, because training has work for the others. */
uint32_t ps__cpus_beside_training(void);
/* Write the arrays' files and indexes into the stage, and bring them to the disk. The files are
 * written in the order in which their units are updated. PS_EIO, PS_ENOMEM, PS_EDEVICE; where held
 * PS_ESTATE and PS_ECANCELLED too. @o->hashed is NULL or the caller's in any case. */
ps_status ps__trainer_write_arrays(ps_trainer *t, ps__output *o);
#endif
