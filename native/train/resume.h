/* resume.h - a checkpoint as the trainer's files see it. Internal. */
#ifndef PS_TRAIN_RESUME_H
#define PS_TRAIN_RESUME_H
#include "io/io.h"
#include "train/trainer.h"
#include <penstock/resume.h>

struct ps_checkpoint {
  char *dir;
  ps_checkpoint_info info;
  ps_train_config train; /* the settings alone */
  ps_tensor_file *state[PS_MAX_STATES];
};

/* The stem of an optimizer's state k: PyTorch's name for it. */
extern const char *const ps__state_names[PS_N_OPTIMIZERS][PS_MAX_STATES];
/* What the manifest says of settings: a field of ps_train_config, of ps_checkpoint_info. */
typedef struct ps__setting {
  const char *key, *option; /* option: the user's name for it */
  enum { PS__U32, PS__I32, PS__U64, PS__F64 } kind;
  size_t offset;
  bool fixed; /* another value than the checkpoint's is refused, not only reported */
} ps__setting;
extern const ps__setting ps__train_settings[], ps__batch_settings[]; /* a NULL key ends them */
/* The settings of a trainer's own run. */
void ps__checkpoint_info_of(const ps_trainer *t, ps_checkpoint_info *out);
/* Its configuration; NAN for what its optimizer does not know. */
ps_train_config ps__checkpoint_settings(const ps_trainer *t);
/* Check that trainer @t may go on from @c; report what differs and is allowed. PS_EINVAL. */
ps_status ps__resume_check(const ps_trainer *t, const ps_checkpoint *c);
/* Read the optimizer's state from @c. The device spaces are warm. */
ps_status ps__resume_load(ps_trainer *t, const ps_checkpoint *c, ps_progress_fn progress,
                          void *progress_user);
#endif
