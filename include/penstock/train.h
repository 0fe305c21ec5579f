/* penstock/train.h - training a model directory under a plan: the loop, its metrics, parameters,
 * saving.
 *
 * The trainer owns an engine with two spaces (device, host). Parameters, gradients and optimizer
 * state live at home in the host space; a step's program streams them. Steps overlap: submit
 * several, then take their metrics one by one. Weights at home are valid whenever no step is in
 * flight. */
#ifndef PENSTOCK_TRAIN_H
#define PENSTOCK_TRAIN_H
#include "checkpoint.h"
#include "data.h"
#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_trainer ps_trainer;

typedef enum ps_lr_kind {
  PS_LR_KIND_CONSTANT = 0,
  PS_LR_KIND_COSINE = 1,
  PS_LR_KIND_LINEAR = 2,
  PS_LR_KIND_WSD = 3
} ps_lr_kind;

/* Fills the batch of one step: n_tokens tokens and targets, sequence after sequence (seq_len
 * each); a target of -1 or
 * -100 is not counted, another one that is no token id is PS_EFORMAT. Runs on the io stream, one
 * call at a time, possibly a step ahead. A negative return stops the run. */
typedef ps_status (*ps_batch_fn)(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                                 uint64_t n_tokens);

enum { PS_MAX_STEPS = 1000000000 }; /* of a run, a schedule, a warmup; more is PS_EINVAL */

typedef struct ps_train_config {
  uint32_t struct_bytes;                           /* sizeof(ps_train_config) */
  uint32_t lr_kind;                                /* ps_lr_kind */
  double lr, min_lr;                               /* peak and floor */
  uint64_t warmup_steps, total_steps, decay_steps; /* total_steps: length of the schedule */
  double beta1, beta2, eps, weight_decay;          /* decay on matrices only */
  /* global gradient norm limit; 0: none. Must agree with the plan's clip */
  double clip_norm;
  uint64_t seed; /* of stochastic rounding and of the data order */
  /* steps done before: schedule, data position and the random bits of rounding go on from
   * there. Moments are zero at first, and the correction of their bias counts updates since
   * then */
  uint64_t first_step;
  /* this token begins a new document (attention does not cross, positions restart); -1: none;
   * the token that ENDS one, as eos, is given in document_end_token instead */
  int32_t document_token;
  int32_t document_end_token; /* the token after this one begins a new document; -1: none */
  /* visit the dataset's sequences in a seeded order instead of front to back */
  uint32_t shuffle;
  uint32_t trace_steps; /* keep the trace of the last so many steps */
  /* 1: draw the weights from the seed instead of reading them: the model directory needs
   * config.json only */
  uint32_t init_weights;
  uint32_t reserved;
  ps_dataset *dataset; /* borrowed until destroy; or NULL with batch_fn */
  ps_batch_fn batch_fn;
  void *batch_user;
} ps_train_config;

/* ps_train_config_init() - the defaults: lr 3e-4 constant, betas 0.9/0.95, eps 1e-8, decay 0.1,
 * clip 1.0, no documents. */
PS_API void ps_train_config_init(ps_train_config *cfg);

/* ps_train_config_check() - what is wrong with @cfg for a model, whatever the plan and the data:
 * ranges, schedules, document tokens. ps_trainer_create() asks it too. A warmup that is longer
 * than total_steps is said by ps_log_fn as a warning. PS_EINVAL names the field. */
PS_API ps_status ps_train_config_check(const ps_train_config *cfg, const ps_model_config *model);

/* One step's figures. */
typedef struct ps_step_metrics {
  uint64_t step; /* 0-based, first_step included */
  double loss;   /* mean over valid tokens, nats */
  uint64_t tokens, valid_tokens;
  double grad_norm; /* global, before clipping */
  double lr;
  /* from the end of the step before (its last parameter at home) to the end of this one */
  double step_s;
  double predicted_step_s;
  double tokens_per_s;
  double mfu, hfu; /* of ps_hardware.peak_flops_per_s; 0 when unknown */
  /* measured: highest page ever touched; on CUDA device_peak_bytes is the most that the driver
   * reported for the process */
  uint64_t device_peak_bytes, host_arena_peak_bytes;
  /* resident set of the process at its peak since the trainer was created (VmHWM, which is
   * reset then), minus the CPU backend's device arena */
  uint64_t host_peak_bytes;
} ps_step_metrics;

/* ps_trainer_create() - reserve the arenas that @plan mapped and load @model_dir's weights into
 * their home. @plan is borrowed until destroy. The model directory must have the configuration
 * the plan was made for. Blocks while loading; @progress (may be NULL) hears of bytes done,
 * stage by stage: each stage's first call has another @what. Errors: PS_EFORMAT, PS_EIO (weights
 * missing, wrong shape or dtype: named), PS_ENOMEM, PS_EINVAL; PS_EBUSY another trainer runs
 * @plan. */
typedef void (*ps_progress_fn)(void *user, const char *what, uint64_t done_bytes,
                               uint64_t total_bytes);
PS_API ps_status ps_trainer_create(ps_trainer **out, const char *model_dir, ps_plan *plan,
                                   const ps_train_config *cfg, ps_progress_fn progress,
                                   void *progress_user);
/* ps_trainer_destroy() - waits for what is in flight; plan and dataset may be destroyed
 * afterwards. NULL is a no-op. PS_ESTATE inside its own batch function: the trainer then lives
 * on. */
PS_API ps_status ps_trainer_destroy(ps_trainer *t);

/* Threads: one thread at a time calls the functions of a trainer. Any thread may call
 * ps_trainer_cancel(), steps_done(), at_rest() and where(), at any time from create to destroy. */

/* ps_trainer_submit() - queue @n more steps. They run in order on the engine's threads, and the
 * end of one overlaps with the beginning of the next.
 * Blocks: the first call, until what stays on the device is there; later calls never.
 * Errors: PS_EBUSY: more than 64 steps would be submitted and not reported: wait for some first.
 *         PS_ESTATE: the call is made inside the trainer's own batch function.
 *         PS_ENOMEM, PS_EDEVICE: the run cannot start (the first call alone).
 *         After an error that stops the trainer (see wait) that same error.
 *         On an error no step is queued. */
PS_API ps_status ps_trainer_submit(ps_trainer *t, uint64_t n);
/* ps_trainer_wait() - wait for the oldest step that is not reported yet, and report it.
 * @out  on PS_OK the step's metrics; untouched on error.
 * Blocks: until all weights of that step are in host memory.
 * Errors that stop the trainer:
 *         PS_ENUMERIC: the loss or a gradient is not finite; the message names step and layer.
 *         PS_ECANCELLED: see ps_trainer_cancel(). PS_EDEVICE: the device failed.
 *         What the dataset or the batch function returned.
 * Errors that do not: PS_ESTATE: every submitted step is reported, or the call is made inside the
 *         trainer's own batch function.
 * When a step fails, the steps before it are completed, and wait reports them first. The next wait
 * returns the error, and so does every later submit and wait. Nothing is in flight then: weights
 * can be read and saved. They are those after ps_trainer_steps_done() steps, with two exceptions,
 * which the message states:
 *   - The device failed, or a cancel came, while the optimizer ran. Some weights may then be one
 *     step ahead of the others.
 *   - clip_norm is 0 and a gradient is not finite. Layers above the one named are one step
 *   ahead. */
PS_API ps_status ps_trainer_wait(ps_trainer *t, ps_step_metrics *out);
/* ps_trainer_cancel() - stop every step that is not complete, for good: no further op starts. The
 * wait for the first of these steps returns PS_ECANCELLED. A step is complete once all its weights
 * are in host memory. NULL is a no-op.
 * Threads: any, and signal handlers. Blocks: no; ops that run are not awaited. */
PS_API void ps_trainer_cancel(ps_trainer *t);
/* ps_trainer_steps_done() - how many steps wait has reported; first_step is not counted. */
PS_API uint64_t ps_trainer_steps_done(const ps_trainer *t);
/* ps_trainer_at_rest() - 1: no op runs or will run, and ps_trainer_destroy() waits for none. */
PS_API int ps_trainer_at_rest(const ps_trainer *t);
/* ps_trainer_where() - what each stream has done and what it waits for, a line a stream, for a
 * person who asks why nothing moves (see ps_run_where()). @text gets at most @bytes, the terminator
 * included; "" before the first submit. */
PS_API void ps_trainer_where(const ps_trainer *t, char *text, uint64_t bytes);

/* Parameters at home, by index of ps_model_param(), as fp32 (converted where the recipe stores
 * bf16; master weights where there are). @n elements expected. PS_ESTATE while steps are in
 * flight. read gradient: the last step's total, divided by valid tokens, before clipping. */
PS_API ps_status ps_trainer_read_param(ps_trainer *t, uint32_t param, float *dst, uint64_t n);
PS_API ps_status ps_trainer_write_param(ps_trainer *t, uint32_t param, const float *src,
                                        uint64_t n);
PS_API ps_status ps_trainer_read_grad(ps_trainer *t, uint32_t param, float *dst, uint64_t n);

/* ps_trainer_save() - the model as a Hugging Face directory (tokenizer files copied from the
 * model directory, config.json with the dtype set, safetensors bf16 or fp32 as @dtype, tied head
 * omitted). @dir is made when missing, its parent must be there. Whatever ends a save (a kill, a
 * power cut, a full disk, any call that fails), @dir holds the whole old model, or nothing where
 * there was none, or the whole new one: penstock/checkpoint.h says how. What else is in @dir
 * stays, also its tokenizer where the model directory has none; so do @dir's mode and owner.
 * @dir may be the model directory. Until the end the disk holds both models. Several saves into
 * one @dir at a time are each whole; the last to end counts. On PS_OK the new model is on the
 * disk. Errors: PS_EIO (what could not be written, and why; the new model counts only where the
 * message says so), PS_ENOMEM, PS_ESTATE while steps are in flight. */
PS_API ps_status ps_trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype);

/* ps_trainer_trace() - as ps_run_trace(), of the steps kept. */
PS_API ps_status ps_trainer_trace(const ps_trainer *t, ps_trace_event *events, uint64_t room,
                                  uint64_t *n);

#ifdef __cplusplus
}
#endif
#endif
