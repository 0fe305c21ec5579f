/* trainer.h - the trainer's structure, shared by its files. Internal. */
#ifndef PS_TRAIN_TRAINER_H
#define PS_TRAIN_TRAINER_H
#include "engine/turn.h"
#include "plan/plan_impl.h"
#include "optim/optim.h"
#include "train/hold.h"
#include <penstock/checkpoint.h>

enum { PS__RING = 64 }; /* steps that may be submitted and not yet reported */

enum { PS__WHY_BYTES = 256 };
enum { PS__ADDED_BYTES = 512 }; /* of a message: what is left for additions */
/* How the step's tokens were spread over experts. A row is a token with one of its experts.
 *   load, entropy, n_unused  as in ps_step_metrics
 *   unused_steps             the most steps in a row that an expert, the named one, got no token
 *   most                     the largest part of a block's rows that an expert, the named one,
 *                            got */
typedef struct ps__routing {
  double load, entropy, most;
  uint64_t n_unused, unused_steps;
  uint32_t unused_layer, unused_expert, most_layer, most_expert;
} ps__routing;

typedef struct ps__step_record {
  double loss, z_loss, objective, right, norm, lr;
  uint64_t valid_tokens, submit_ns, end_ns, skipped, n_skipped;
  uint64_t stop; /* as in ps_step_metrics, and so are the next two */
  double flushed, flushed_most;
  const ps__counted *flushed_in; /* the tensor that flushed_most is of, and its layer */
  uint32_t flushed_layer;
  ps__routing routing;
  bool gradient_bad;       /* of a skipped step: the gradient is not finite, and the loss is */
  char why[PS__WHY_BYTES]; /* it was skipped */
} ps__step_record;

/* Steps that were skipped. NORM writes it, on the host stream. A checkpoint marks a step before it
 * is submitted, and reads how many of the steps before it were skipped. */
typedef struct ps__skips {
  _Atomic uint64_t n;
  uint64_t in_a_row;
  double bad_loss;     /* the last loss that was not finite, */
  uint64_t bad_row;    /* and the first token of the step whose loss was not */
  bool loss_bad, now;  /* of the running step: its loss is not finite; it is skipped */
  uint64_t stopped_at; /* 1 + the run's step whose gradient stopped the run; 0: none did */
  _Atomic uint64_t mark, marked; /* marked: mark + 1 after NORM of the marked step has run */
  uint64_t n_before_mark;
  /* the norm of the last step, and of that before the marked one; NAN: there is none */
  _Atomic double norm;
  double norm_before_mark;
} ps__skips;

/* The validation that runs, and its run. */
typedef struct ps__validation {
  ps_run *run;  /* NULL before the first validation */
  double sum;   /* of the losses of the tokens so far */
  double right; /* of a `score`: the sum of what is right */
  uint64_t n_valid;
} ps__validation;

typedef struct ps__rows ps__rows;
typedef struct ps__replay ps__replay;     /* replay.c */
typedef struct ps__stage ps__stage;       /* io/io.h */
typedef struct ps__writing ps__writing;   /* checkpoint.c */
typedef struct ps__observer ps__observer; /* observed.h */
typedef struct ps__replan ps__replan;     /* replan.c */

/* Where steps wait for those before them: another plan begins there (border.c).
 *   next    1 + that step of the trainer; 0: there is none
 *   agreed  the last one that tasks of several hosts agreed on
 *   state   PS__REPLAN_*: what this task tells the others
 *   cross   called once steps from there on are to begin */
enum { PS__REPLAN_IDLE, PS__REPLAN_SEARCHES, PS__REPLAN_FOUND };
typedef struct ps__border {
  _Atomic uint64_t next, agreed;
  _Atomic uint32_t state;
  ps_status (*cross)(struct ps_trainer *t);
} ps__border;

struct ps_trainer {
  ps_plan *plan;
  bool owns_plan; /* plan came by a switch (switch.c) */
  /* a switch has failed between its first copy and its last: weights are in neither place */
  bool torn;
  bool unordered;                   /* a device failed beside others that update units: state.c */
  uint64_t n_switches, switched_at; /* the last one: after so many steps */
  double switch_s;                  /* SECONDS of switches since the step that was reported last */
  _Atomic uint32_t switching;       /* 1 during a switch */
  ps_train_config cfg;
  uint32_t rank;              /* among the hosts */
  char *model_dir, *run_text; /* run_text: ps_train_config.run, or NULL */
  ps_engine *engine;
  ps__turns turns;             /* of its runs and its guests' */
  ps_run *run;                 /* of the steps of one size; NULL before the first submit */
  _Atomic uint64_t stop_asked; /* ps_trainer_ask_stop() */
  /* updating: 1 + the last step of the run whose updates may have begun. ended: 1 + the last step
   * whose report ran. Where the two differ, host-resident weights may be of two steps. */
  _Atomic uint64_t updating, ended;
  ps_status sticky; /* the error that stopped the trainer */
  char sticky_message[1024];
  struct ps__machine *machine; /* of a paced trainer (pace.h); else NULL */
  char *host;                  /* the host space */
  /* BYTES: the most device memory that the GPU has lost to the process; 0 on the CPU backend */
  uint64_t device_peak;
  bool warned; /* the user was told that device_peak is past the cap */
  /* of all GPUs: the sum of their energy counters, 0: one is unknown; when they were last read, and
   * the mean power before that */
  double energy_j, mean_w;
  uint64_t energy_ns;
  uint64_t *unused; /* [n_layers][n_experts]: steps in a row without a token; NULL: no experts */
  uint64_t unused_said;      /* ps__routing.unused_steps of the last warning */
  bool most_said;            /* the user was told that an expert gets most rows */
  double flushed_said;       /* ps_step_metrics.fp8_flushed_most of the last warning */
  int32_t *tokens, *targets; /* a step's batch as the data source fills it */
  uint8_t *begins;           /* 1: the dataset's mask begins a document here; else 0 */
  float *logits;             /* of a token, for logits_fn; else NULL */
  ps__segment *segments;     /* parts with one weight decay, unit by unit */
  uint32_t *first_segment;   /* [n_units + 1] */
  uint64_t *first_element;   /* [n_units]: global index of a unit's first element */
  ps__rows *rows;            /* of an embedding on the host, else NULL */
  /* The io stream's pool, from the first gather on. It ends after that of the host stream, whose
   * threads help it. */
  _Atomic(ps__pool *) gathering;
  ps__hold *hold;       /* between updates and the checkpoint that is written */
  ps__writing *writing; /* that checkpoint, until ps_trainer_checkpoint_end(); else NULL */
  uint64_t serial;      /* of the newest checkpoint that this run began from or wrote; 0: none */
  /* Random, and that of the checkpoint which the run began from; 0: that one says none. */
  uint64_t run_id;
  ps_contention_rate *arena_rates; /* [n_arena_rates], of the host's arena: arena.c */
  uint32_t n_arena_rates;          /* 0: they were not measured */
  ps__lr_schedule lr;
  uint64_t n_updates; /* that made the optimizer's state before this run; 0: it begins at zero */
  bool resumed;       /* the optimizer's state was loaded, on the device too */
  ps__validation val;
  struct ps_generator *sampler; /* of the plan's samples; NULL: none */
  ps__replay *replay;           /* NULL before the first one */
  ps__observer *observer;       /* of the plan that runs */
  ps__replan *replan;           /* NULL: the trainer does not plan again */
  ps__border border;
  char base_hash[65];               /* ps__base_hash(); empty before its first call */
  char base_mark[65];               /* of the model that was read; "": none was */
  struct ps__data_mark *data_marks; /* of the dataset's shards; NULL before the first use */
  ps__skips skips;
  /* Where the step before clips: the scale of the updates of step s of the trainer is at [s % 2]. A
   * gather of step s + 1 still makes updates of step s, and NORM of step s sets the other one.
   * unclipped: step 0 has no norm before it, and updates nothing. */
  float clip_scale[2];
  bool unclipped;
  uint64_t n_submitted, last_end_ns;
  /* Of a batch ramp: what the steps of the run are made of, which step of the trainer is its first,
   * and how many steps were given to runs (stages.c). */
  ps__step_size size;
  uint64_t run_first, n_started;
  _Atomic uint64_t n_reported;
  uint64_t n_changed; /* reported steps that were not skipped */
  ps__step_record ring[PS__RING];
};

/* ps__trainer_measure_arena() - the rates of the host's arena, which is zeros and stays so. Where
 * they cannot be measured, a line of the log says why, and the training goes on (arena.c). */
void ps__trainer_measure_arena(ps_trainer *t);
/* config.c
 * ps__trainer_check_config() - whether the configuration is one, and fits the plan. PS_EINVAL and
 * the errors of ps_dataset_check() say what is wrong.
 * ps__trainer_resolve_hypers() - the optimizer's defaults for what is NAN. PS_EINVAL: one that
 * is given is out of range. */
ps_status ps__trainer_check_config(const ps_plan *plan, const ps_train_config *c);
ps_status ps__trainer_resolve_hypers(ps_train_config *c, uint32_t optimizer);

/* Give submitted steps to the run, and to the run of the next size once the steps of the last one
 * are reported (stages.c). Errors: those of ps__run_create() and ps_run_submit().
 * ps__trainer_run_wait() - wait until the first @n steps of the trainer are done. */
ps_status ps__trainer_start_steps(ps_trainer *t);
ps_status ps__trainer_run_wait(ps_trainer *t, uint64_t n);
/* The host ops of a step's program (hooks.c).
 * ps__clip_begin() - the first step's updates are clipped by @norm, where that of the step before
 * clips. NAN: there is none, and the first step updates nothing. After memory is reserved. */
void ps__clip_begin(ps_trainer *t, double norm);
ps_status ps__trainer_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch);
/* Check the batch that t->tokens, targets and begins hold, and fill in the batch of step @s, but
 * its header. @what names the batch in messages. @valid: targets that are counted (batch.c). */
ps_status ps__batch_fill(const ps_trainer *t, const char *what, const ps__step *s, void *batch,
                         uint64_t *valid);
/* ps__batch_read() - read and check the batch of step @run_step of this trainer, of layout @l, into
 * t->tokens, targets and begins. @valid: as above.
 * ps__batch_uncount() - no target of sequence @i of the batch counts.
 * ps__batch_fill_part() - fill in the batch of step @s from token @first of them on. @valid: of all
 * tokens (batch.c). */
ps_status ps__batch_read(ps_trainer *t, uint64_t run_step, const ps__layout *l, uint64_t *valid);
void ps__batch_uncount(const ps_trainer *t, uint64_t i);
void ps__batch_fill_part(const ps_trainer *t, const ps__step *s, uint64_t first, uint64_t valid,
                         void *batch);
/* ps__batch_check_valid() - PS_ENUMERIC where the batch of a step has no valid target.
 * ps__batch_scale() - the chunks' scales: one over the step's valid targets (batch.c). */
ps_status ps__batch_check_valid(const ps_trainer *t, uint64_t run_step, uint64_t valid);
void ps__batch_scale(const ps__step *s, uint64_t valid, void *batch);
/* Among the trainers of other hosts (hosts.c); all are no-ops without other hosts.
 * ps__count_targets(), ps__exchange_totals() - the hooks COUNT and EXCHANGE.
 * ps__sum_losses() - sums of this host's losses become those of all hosts, in their order.
 * ps__trainer_open_net(), ps__trainer_close_net() - the way of the totals over NCCL, where that was
 * chosen and is not open yet: after the engine is there, before any run; after the last run.
 * ps__trainer_agree(), ps__trainer_agree_weights() - PS_EINVAL where tasks have another model,
 * data, plan or options; other weights or state. The first before memory is reserved.
 * ps__trainer_join_hosts() - a failure of another task stops this trainer's runs, until
 * ps__trainer_leave_hosts().
 * ps__trainer_hosts_failed() - an error @st of this trainer: it ends the other tasks. Where it is
 * another task's failure, that is returned instead. */
ps_status ps__count_targets(ps_trainer *t, const ps_launch *l);
ps_status ps__exchange_totals(ps_trainer *t, uint32_t unit, const ps_launch *l);
ps_status ps__sum_losses(ps_trainer *t, const ps_launch *l, double sum[3]);
ps_status ps__trainer_open_net(ps_trainer *t);
void ps__trainer_close_net(ps_trainer *t);
ps_status ps__trainer_agree(ps_trainer *t);
ps_status ps__trainer_agree_weights(ps_trainer *t);
void ps__trainer_join_hosts(ps_trainer *t);
void ps__trainer_leave_hosts(ps_trainer *t);
ps_status ps__trainer_hosts_failed(ps_trainer *t, ps_status st);
/* A loss or gradient that is not finite (nonfinite.c).
 * ps__loss_is_bad() - LOSS: PS_ENUMERIC, or PS_OK where the step may be skipped.
 * ps__step_is_bad() - NORM: whether the step's loss or gradient is not finite. *st gets
 * PS_ENUMERIC, or PS_OK where the step is skipped. @slots: the norms.
 * @row: the tokens' losses, @n_columns apart.
 * ps__unit_is_bad() - an update without clipping: PS_ENUMERIC. @sumsq: of the unit's spans.
 * ps__skips_mark() - a checkpoint after @step steps of this run begins; no later one is submitted.
 * ps__skips_before() - how many steps of the training were skipped before the marked one.
 * ps__norm_before() - the norm of the step before the marked one, which is reported; NAN: none. */
ps_status ps__loss_is_bad(ps_trainer *t, uint64_t run_step, double loss, const float *row,
                          uint64_t n_columns);
bool ps__step_is_bad(ps_trainer *t, uint64_t run_step, const double *slots, double sum,
                     ps_status *st);
ps_status ps__unit_is_bad(ps_trainer *t, uint64_t run_step, uint32_t unit, const double *sumsq);
/* "layer 3", "the head". */
const char *ps__layer_name(const ps_trainer *t, uint32_t layer, char buf[32]);
/* ps__replay_say() - run step @run_step of this trainer again. @text, which goes on a message, gets
 * in which chunk a value first was not finite, or why that is not known. The trainer's
 * run is paused, or has failed. @n_later: steps that have updated the weights since (replay.c).
 * ps__replay_destroy() - after its run. NULL is a no-op. */
void ps__replay_say(ps_trainer *t, uint64_t run_step, uint64_t n_later, char *text, size_t room);
void ps__replay_destroy(ps__replay *r);
double ps__unit_sumsq(const ps_trainer *t, const double *slots, uint32_t unit);
void ps__skips_mark(ps_trainer *t, uint64_t step);
uint64_t ps__skips_before(const ps_trainer *t);
double ps__norm_before(const ps_trainer *t);
/* The sum of a column of the tokens' losses, in their order (batch.c). */
double ps__sum_rows(const float *row, uint64_t n, uint64_t n_columns);
/* Check that a trainer of @plan may validate on @ds: PS_EINVAL (validate.c). */
ps_status ps__validation_check(const ps_plan *plan, const ps_dataset *ds);
/* The host ops of a validation's program (validate.c). */
ps_status ps__validation_hook(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch);
/* Open the tensors of @dir, and check that they are the model's: all of them, no other tensor, the
 * same shapes. @out is owned by the caller (params.c). */
ps_status ps__trainer_open_weights(const ps_trainer *t, const char *dir, ps_tensor_file **out);
/* The same check of tensors that are open. @weights: all but adapters' must be there; else all of
 * units that are trained. */
ps_status ps__trainer_check_tensors(const ps_trainer *t, const ps_tensor_file *f, const char *dir,
                                    bool weights);
/* Read parameter @p from tensor @idx of the file, into the host space (params.c). */
ps_status ps__trainer_load_param(ps_trainer *t, ps_tensor_file *f, uint64_t idx,
                                 const ps_param_info *p);
/* Read the weights into the host space, adapters apart (params.c). */
ps_status ps__trainer_load(ps_trainer *t, ps_tensor_file *f, ps_tensor_file *adapters,
                           ps_progress_fn progress, void *progress_user);
/* Find the first parameter whose host-resident values are not all finite; false: there is none
 * (host.c). */
bool ps__trainer_find_nonfinite(const ps_trainer *t, ps_param_info *out);
/* ps__trainer_match_head() - give @m, as it was read, the head that the plan's model has.
 * ps__check_labels() - whether the labels of @ds are for the plan's model. Errors: PS_EINVAL names
 * @what. Both: labels.c.
 * ps__trainer_draw_score() - the `score` that a model directory lacks (init.c).
 * ps__trainer_load_score() - a `score` that is trained beside adapters, if @f has it (params.c). */
ps_status ps__trainer_match_head(const ps_trainer *t, ps_model_config *m);
ps_status ps__check_labels(const ps_plan *plan, const ps_dataset *ds, const char *what);
ps_status ps__trainer_draw_score(ps_trainer *t, const ps_param_info *p);
ps_status ps__trainer_load_score(ps_trainer *t, ps_tensor_file *f);
/* Draw weights from the seed instead of reading them: adapters' alone, or all others (init.c). */
ps_status ps__trainer_init(ps_trainer *t, bool adapters, ps_progress_fn progress,
                           void *progress_user);
/* @n elements of a unit's UPDATED, whole numbers, from element @first on, in host memory; put
 * writes the weights that are streamed too (host.c). */
void ps__updated_get(const ps_trainer *t, uint32_t unit, uint64_t first, uint64_t n, ps_dtype dtype,
                     void *dst);
void ps__updated_put(const ps_trainer *t, uint32_t unit, uint64_t first, uint64_t n, ps_dtype dtype,
                     const void *src);
/* The arrays of a unit (unit_arrays.c). UPDATED: what the optimizer updates, the master copy where
 * there is one, else the weights; of a master copy of 24 bits the low bits alone, whose high bits
 * are WEIGHTS. STATE + k: its state k.
 * ps__array_at() - element @first, in host memory. NULL: the array is elsewhere, or there is none.
 * ps__array_read(), ps__array_write() - copy elements of an array that there is, wherever it is;
 * block. Ops that run meanwhile touch other elements. PS_EDEVICE.
 * ps__array_bytes() - BYTES of @n of its elements. */
enum { PS__ARRAY_UPDATED, PS__ARRAY_WEIGHTS, PS__ARRAY_GRAD, PS__ARRAY_STATE };
void *ps__array_at(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t first);
ps_status ps__array_read(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t first,
                         uint64_t n, void *dst);
ps_status ps__array_write(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t first,
                          uint64_t n, const void *src);
ps__storage ps__array_storage(const ps_trainer *t, uint32_t unit, uint32_t what);
ps_dtype ps__array_dtype(const ps_trainer *t, uint32_t unit, uint32_t what);
uint64_t ps__array_bytes(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t n);
/* The unit's arrays in host memory that an update works on (host.c). */
ps__arrays ps__arrays_on_host(const ps_trainer *t, uint32_t unit);
/* The rows of an embedding on the host (rows.c). Each keeps the id of its latest update.
 * @id is 1 + the run's step that update @u belongs to. A gather with @id 0 makes no update. At
 * creation it is that of the update which all rows have. @block: elements of a block of the state.
 * @args: the lookup's. Update and gather may run at once with the same id. The calls of one id end
 * before those of the next id begin. Errors of create: PS_ENOMEM. */
ps_status ps__rows_create(ps__rows **out, const ps__args_embed *args, uint32_t block, uint32_t id);
void ps__rows_destroy(ps__rows *r); /* NULL is a no-op */
void ps__rows_update(const ps_trainer *t, ps__pool *pool, uint32_t id, const ps__update *u);
/* Copy the rows of token[n_tokens] to @out, each after its update. */
void ps__rows_gather(const ps_trainer *t, ps__pool *pool, uint32_t id, const ps__update *u,
                     const int32_t *token, uint64_t n_tokens, void *out);
/* Write the model's files but its tensors into @stage: tokenizer, and config.json that names @dtype
 * (save.c). */
ps_status ps__trainer_write_config(ps_trainer *t, ps__stage *stage, const char *dir,
                                   ps_dtype dtype);
/* Complete the checkpoint that is being written, or after a cancel give it up. No step runs
 * (checkpoint.c).
 * ps__trainer_await_written_steps() - before that, wait for the steps that the checkpoint is of:
 * those of a batch ramp's next stage may not have begun. */
void ps__trainer_end_writing(ps_trainer *t);
void ps__trainer_await_written_steps(ps_trainer *t);
/* Create the run of steps, which takes parameters written until now to the device, or end its pause
 * (state.c). */
ps_status ps__trainer_go_on(ps_trainer *t);
/* Pause the run of steps, which is created where there is none: what stays on the device is there
 * from the first step on. A guest may take its turn then (state.c). */
ps_status ps__trainer_pause(ps_trainer *t);
/* How the steps of @size run. Those of the plan's own schedule are traced, because the plan counts
 * the memory of their trace alone (state.c). */
ps_run_config ps__trainer_run_config(const ps_trainer *t, const ps__step_size *size);
/* ps__border_at() - that step; UINT64_MAX: there is none. ps__border_set() - UINT64_MAX: none.
 * ps__border_said() - what all @n tasks told in the COUNT of the trainer's step @step
 * (border.c). */
uint64_t ps__border_at(const ps_trainer *t);
void ps__border_set(ps_trainer *t, uint64_t step);
void ps__border_said(ps_trainer *t, uint64_t step, const uint64_t *said, uint32_t n);
/* The trainer becomes what the hooks of its plan call; or they call nobody, and another trainer may
 * have the plan (plans.c). */
void ps__trainer_join_plan(ps_trainer *t);
void ps__trainer_leave_plan(ps_trainer *t);
/* ps__trainer_switch() - ps_trainer_switch(), where steps that are submitted may not have begun. No
 * step that has is not reported (switch.c). */
ps_status ps__trainer_switch(ps_trainer *t, ps_plan *plan);
/* ps__sensors_start() - the energy that later steps take counts from here on.
 * ps__sensors_read() - once a step: the sensors of the plan's GPUs into @m, which has step_s
 * (sensors.c). */
void ps__sensors_start(ps_trainer *t);
void ps__sensors_read(ps_trainer *t, ps_step_metrics *m);
/* Stop the trainer with @st, unless an earlier error has stopped it. Returns the first error
 * (state.c). */
ps_status ps__trainer_stop(ps_trainer *t, ps_status st);
/* Refuse a call by a batch function of this trainer, which would wait for itself (state.c). */
ps_status ps__trainer_outside_ops(const ps_trainer *t);
/* PS_OK where no step is in flight, else PS_ESTATE. After an error no step is, but a switch may
 * have left the weights in no place (state.c). */
ps_status ps__trainer_idle(ps_trainer *t);
/* exported for tests */
PS_API ps_status ps__trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype,
                                  uint64_t max_shard_bytes);
#endif
