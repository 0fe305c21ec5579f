/* resume.h - a checkpoint as the trainer's files see it. Internal. */
#ifndef PS_TRAIN_RESUME_H
#define PS_TRAIN_RESUME_H
#include "io/io.h"
#include "train/trainer.h"
#include <penstock/checkpoint.h>

enum { PS__MAX_MANIFEST_BYTES = 64 << 20 };

/* What a checkpoint says of its run, and what one of a running trainer would. */
typedef struct ps__settings {
  ps_checkpoint_info info;
  ps_train_config train; /* the settings alone */
} ps__settings;

struct ps_checkpoint {
  char *dir;
  uint64_t serial; /* 0: of a manifest that has none */
  uint64_t run_id; /* of the run that wrote it; 0: an older version did */
  ps__settings of;
  uint64_t sequences_read; /* by the steps before of.info.step */
  char base_hash[65]; /* of the weights that an adapter's checkpoint lacks; "": it lacks none */
  ps_tensor_file *state[PS_MAX_STATES];
  ps__data_mark *data; /* [n_data] of the shards that its run read; NULL: it does not say */
  uint64_t n_data;
};

/* What a manifest says of its run (settings.c).
 * The stem of an optimizer's state k: PyTorch's name for it. */
extern const char *const ps__state_names[PS_N_OPTIMIZERS][PS_MAX_STATES];
/* What the manifest says of a setting: a field of ps__settings. */
typedef struct ps__setting {
  const char *key, *option; /* option: the user's name for it */
  enum { PS__U32, PS__I32, PS__U64, PS__F64 } kind;
  size_t offset;
  bool fixed; /* another value than the checkpoint's is refused, not only reported */
  bool newer; /* a manifest without it was written before there was a choice: it has the default */
  void (*say)(char *out, size_t bytes,
              uint32_t value); /* in the option's words; NULL: as numbers */
} ps__setting;
enum { PS__SETTING_TEXT = 320 };
/* The setting's value in @base, as its user writes it. */
void ps__setting_text(char out[PS__SETTING_TEXT], const ps__setting *s, const void *base);
extern const ps__setting ps__train_settings[], ps__batch_settings[]; /* a NULL key ends them */
/* The settings of a trainer's own run after @n_steps of its steps; NAN for what its optimizer does
 * not know. */
ps__settings ps__settings_of(const ps_trainer *t, uint64_t n_steps);
/* The serial of @folder's next checkpoint, which is above @after too (folder.c). PS_EIO,
 * PS_ENOMEM. */
ps_status ps__checkpoints_next_serial(const char *folder, uint64_t after, uint64_t *out);
/* Write what tells the shards apart into the manifest; read it; check that the trainer's shards are
 * those (data_record.c). PS_EINVAL names a shard that differs. PS_EFORMAT, PS_EIO, PS_ENOMEM. */
ps_status ps__data_write(ps_trainer *t, ps__jsonw *w);
ps_status ps__data_read(ps_checkpoint *c, const ps__json *manifest, const char *path);
ps_status ps__data_check(ps_trainer *t, const ps_checkpoint *c);
/* The run that a manifest names; 0: it names none (settings.c). */
uint64_t ps__manifest_run_id(const ps__json *manifest);
/* Refuse a checkpoint in @dir that another run than @run_id wrote: PS_EINVAL (folder.c). */
ps_status ps__checkpoint_check_owner(const char *dir, uint64_t run_id);
ps_status ps__checkpoints_check_owner(const char *folder, uint64_t run_id); /* all of @folder */
/* Check that a trainer of @plan may, by recipe, unless @convert, and by optimizer, before its
 * settings are checked, which are the optimizer's. PS_EINVAL. */
ps_status ps__resume_check_names(const ps_plan *plan, const ps_checkpoint *c, bool convert);
/* Check that trainer @t may go on from @c; report what differs and is allowed. PS_EINVAL. */
ps_status ps__resume_check(ps_trainer *t, const ps_checkpoint *c);
/* Read the optimizer's state from @c. The device spaces are warm. */
ps_status ps__resume_load(ps_trainer *t, const ps_checkpoint *c, ps_progress_fn progress,
                          void *progress_user);
#endif
