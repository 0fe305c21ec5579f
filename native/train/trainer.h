/* trainer.h - the trainer's insides, shared by its files. */
#ifndef PS_TRAIN_TRAINER_H
#define PS_TRAIN_TRAINER_H
#include "engine/engine.h"
#include "plan/plan_impl.h"
#include "optim/optim.h"
#include <penstock/train.h>

enum { PS__RING = 64 }; /* steps submitted and not yet reported, at most */

typedef struct ps__step_record {
  double loss, norm, lr;
  uint64_t valid_tokens, submit_ns, end_ns;
} ps__step_record;

typedef struct ps__rows ps__rows;

struct ps_trainer {
  ps_plan *plan;
  ps_train_config cfg;
  char *model_dir;
  ps_engine *engine;
  /* lives until destroy, also after an error brought it to rest: a cancel may come at any time */
  _Atomic(ps_run *) run;
  _Atomic uint32_t cancelled;
  /* 1 + the run's last step whose updates may have begun, and whose report ran: where these
   * differ, weights at home may be of two steps */
  _Atomic uint64_t updating, ended;
  ps_status sticky;
  char sticky_message[1024];
  char *host; /* the host space */
  /* BYTES of device memory that the driver reported at most; 0 on the CPU backend */
  uint64_t device_peak;
  bool warned;               /* that it is past the cap */
  int32_t *tokens, *targets; /* a step's batch as the source fills it */
  ps__segment *segments;     /* of all units */
  uint32_t *first_segment;   /* [n_units + 1] */
  uint64_t *first_element;   /* [n_units]: global index of a unit's first element */
  ps__rows *rows;            /* of an embedding at home, else NULL */
  ps__lr_schedule lr;
  uint64_t n_submitted, last_end_ns;
  _Atomic uint64_t n_reported;
  ps__step_record ring[PS__RING];
};

/* What the program's host ops do (hooks.c). */
ps_status ps__trainer_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch);
/* Open the model directory's tensors, all that the model has and no others, in its shapes; then
 * read them into their homes (params.c). @out is the caller's. */
ps_status ps__trainer_open_weights(const ps_trainer *t, ps_tensor_file **out);
ps_status ps__trainer_load(ps_trainer *t, ps_tensor_file *f, ps_progress_fn progress,
                           void *progress_user);
/* The first parameter at home with a value that is not finite; false where there is none
 * (params.c). */
bool ps__trainer_find_nonfinite(const ps_trainer *t, ps_param_info *out);
/* Or draw them (init.c). */
ps_status ps__trainer_init(ps_trainer *t, ps_progress_fn progress, void *progress_user);
/* The bf16 copy that travels follows its master, where there is one (params.c). */
void ps__trainer_refresh_copy(const ps_trainer *t, const ps_param_info *p);
/* Element @offset of a unit's parameters in the array that holds the truth: the master where
 * there is one (params.c). */
void *ps__master_at(const ps_trainer *t, uint32_t unit, uint64_t offset, bool *fp32);
static inline void *ps__host_at(const ps_trainer *t, uint32_t vt) {
  return t->host + t->plan->step.vt[vt].offset;
}
/* The unit's arrays in host memory that an update works on (hooks.c). */
ps__arrays ps__arrays_on_host(const ps_trainer *t, uint32_t unit);
/* An embedding at home by rows (rows.c): which of them have which step's update. @id: 1 + the
 * run's step whose update @u is; to gather 0, as no update is to be made. Update and gather may
 * run at once, of the same id; what an id asks for has ended before the next id comes. Errors of
 * create: PS_ENOMEM. */
ps_status ps__rows_create(ps__rows **out, uint64_t n_rows, uint64_t dim);
void ps__rows_destroy(ps__rows *r); /* NULL is a no-op */
void ps__rows_update(const ps_trainer *t, ps__pool *pool, uint32_t id, const ps__update *u);
/* Rows of token[n_tokens] into @out, each with its update. */
void ps__rows_gather(const ps_trainer *t, ps__pool *pool, uint32_t id, const ps__update *u,
                     const int32_t *token, uint64_t n_tokens, void *out);
/* PS_OK when no step is in flight; an error first brings the run to rest (trainer.c). */
ps_status ps__trainer_idle(ps_trainer *t);
/* exported for tests */
PS_API ps_status ps__trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype,
                                  uint64_t max_shard_bytes);
#endif
