/* trainer.h - the trainer's structure, shared by its files. Internal. */
#ifndef PS_TRAIN_TRAINER_H
#define PS_TRAIN_TRAINER_H
#include "engine/engine.h"
#include "plan/plan_impl.h"
#include "optim/optim.h"
#include <penstock/train.h>

enum { PS__RING = 64 }; /* steps that may be submitted and not yet reported */

typedef struct ps__step_record {
  double loss, norm, lr;
  uint64_t valid_tokens, submit_ns, end_ns;
} ps__step_record;

typedef struct ps__rows ps__rows;
typedef struct ps__stage ps__stage; /* io/io.h */

struct ps_trainer {
  ps_plan *plan;
  ps_train_config cfg;
  char *model_dir;
  ps_engine *engine;
  /* NULL before the first submit. The run lives until destroy, also after an error, because a
   * cancel may come at any time. */
  _Atomic(ps_run *) run;
  _Atomic uint32_t cancelled;
  /* updating: 1 + the last step of the run whose updates may have begun. ended: 1 + the last step
   * whose report ran. Where the two differ, host-resident weights may be of two steps. */
  _Atomic uint64_t updating, ended;
  ps_status sticky; /* the error that stopped the trainer */
  char sticky_message[1024];
  char *host; /* the host space */
  /* BYTES: the most device memory that the driver reported; 0 on the CPU backend */
  uint64_t device_peak;
  bool warned;               /* the user was told that device_peak is past the cap */
  int32_t *tokens, *targets; /* a step's batch as the data source fills it */
  uint8_t *begins;           /* 1: the dataset's mask begins a document here; else 0 */
  ps__segment *segments;     /* parts with one weight decay, unit by unit */
  uint32_t *first_segment;   /* [n_units + 1] */
  uint64_t *first_element;   /* [n_units]: global index of a unit's first element */
  ps__rows *rows;            /* of an embedding on the host, else NULL */
  ps__lr_schedule lr;
  uint64_t n_updates; /* that made the optimizer's state before this run; 0: it begins at zero */
  bool resumed;       /* the optimizer's state was loaded, on the device too */
  uint64_t n_submitted, last_end_ns;
  _Atomic uint64_t n_reported;
  ps__step_record ring[PS__RING];
};

/* The host ops of a step's program (hooks.c). */
ps_status ps__trainer_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch);
/* Open the tensors of @dir, and check that they are the model's: all of them, no other tensor, the
 * same shapes. @out is owned by the caller (params.c). */
ps_status ps__trainer_open_weights(const ps_trainer *t, const char *dir, ps_tensor_file **out);
/* The same check of tensors that are open; those of frozen units may be missing unless @frozen. */
ps_status ps__trainer_check_tensors(const ps_trainer *t, const ps_tensor_file *f, const char *dir,
                                    bool frozen);
/* Read the weights into the host space (params.c). */
ps_status ps__trainer_load(ps_trainer *t, ps_tensor_file *f, ps_progress_fn progress,
                           void *progress_user);
/* Find the first parameter whose host-resident values are not all finite; false: there is none
 * (params.c). */
bool ps__trainer_find_nonfinite(const ps_trainer *t, ps_param_info *out);
/* Draw the weights from the seed instead of reading them (init.c). */
ps_status ps__trainer_init(ps_trainer *t, ps_progress_fn progress, void *progress_user);
/* Round the master copy, where there is one, to the weights that are streamed (params.c). */
void ps__trainer_refresh_copy(const ps_trainer *t, const ps_param_info *p);
/* Element @offset of a unit's parameters in the array that the optimizer updates: the master copy
 * where there is one, else the weights (params.c). */
void *ps__master_at(const ps_trainer *t, uint32_t unit, uint64_t offset);
/* Its dtype. */
ps_dtype ps__master_dtype(const ps_trainer *t, uint32_t unit);
/* Tensor @vt of the step in the host space. */
static inline void *ps__host_at(const ps_trainer *t, uint32_t vt) {
  return t->host + t->plan->step.vt[vt].offset;
}
/* The unit's arrays in host memory that an update works on (hooks.c). */
ps__arrays ps__arrays_on_host(const ps_trainer *t, uint32_t unit);
/* The rows of an embedding on the host (rows.c). Each keeps the id of its latest update.
 * @id is 1 + the run's step that update @u belongs to. A gather with @id 0 makes no update.
 * @args: the lookup's. Update and gather may run at once with the same id. The calls of one id end
 * before those of the next id begin. Errors of create: PS_ENOMEM. */
ps_status ps__rows_create(ps__rows **out, const ps__args_embed *args);
void ps__rows_destroy(ps__rows *r); /* NULL is a no-op */
void ps__rows_update(const ps_trainer *t, ps__pool *pool, uint32_t id, const ps__update *u);
/* Copy the rows of token[n_tokens] to @out, each after its update. */
void ps__rows_gather(const ps_trainer *t, ps__pool *pool, uint32_t id, const ps__update *u,
                     const int32_t *token, uint64_t n_tokens, void *out);
/* Write the model's files into @stage: tensors in @dtype, config.json, tokenizer (save.c). */
ps_status ps__trainer_write_model(ps_trainer *t, ps__stage *stage, const char *dir, ps_dtype dtype,
                                  uint64_t max_shard_bytes);
/* PS_OK where no step is in flight, else PS_ESTATE. After an error no step is (trainer.c). */
ps_status ps__trainer_idle(ps_trainer *t);
/* exported for tests */
PS_API ps_status ps__trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype,
                                  uint64_t max_shard_bytes);
#endif
