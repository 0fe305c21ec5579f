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
  bool held;          /* steps run meanwhile: each part is awaited and released (hold.h) */
  ps__hashed *hashed; /* out, owned by the caller: the tensors' files */
  size_t n_hashed;
} ps__output;

/* CPUs for what runs beside the steps: half of all, because training has work for the others. */
uint32_t ps__cpus_beside_training(void);
/* Write the arrays' files and indexes into the stage, and bring them to the disk. The files are
 * written in the order in which their units are updated. PS_EIO, PS_ENOMEM, PS_EDEVICE; where held
 * PS_ESTATE and PS_ECANCELLED too. @o->hashed is NULL or the caller's in any case. */
ps_status ps__trainer_write_arrays(ps_trainer *t, ps__output *o);
#endif
