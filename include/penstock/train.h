/* penstock/train.h - train a model directory by a plan: steps, metrics, parameters, saving.
 *
 * A trainer owns an engine with two spaces, device and host. Weights, gradients and optimizer
 * state are host-resident. The step's program streams them to the device as the plan says; what
 * the plan keeps device-resident stays there for the whole run.
 *
 *   ps_train_config cfg;
 *   ps_train_config_init(&cfg);
 *   cfg.dataset = dataset;
 *   ps_trainer_create(&t, "model", plan, &cfg, NULL, NULL);
 *   ps_trainer_submit(t, 2);                      two steps in flight: they overlap
 *   for (uint64_t i = 0; i < n_steps; i++) {
 *     ps_trainer_wait(t, &metrics);               the metrics of step i
 *     if (i + 2 < n_steps) ps_trainer_submit(t, 1);
 *   }
 *   ps_trainer_save(t, "trained", PS_BF16);       no step is in flight any more
 *   ps_trainer_destroy(t);
 *
 * Threads: one thread at a time calls the functions of a trainer. Six functions may be called by
 * any thread, at any time from create to destroy: ps_trainer_cancel(), ps_trainer_ask_stop(),
 * ps_trainer_steps_done(), ps_trainer_at_rest(), ps_trainer_switching() and ps_trainer_where(). */
#ifndef PENSTOCK_TRAIN_H
#define PENSTOCK_TRAIN_H
#include "tensors.h"
#include "data.h"
#include "hosts.h"
#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_trainer ps_trainer;

/* The learning rate's schedule. Each begins with warmup_steps that rise linearly to lr. */
typedef enum ps_lr_kind {
  PS_LR_KIND_CONSTANT = 0, /* lr */
  PS_LR_KIND_COSINE = 1,   /* falls to min_lr at total_steps, half a cosine wave */
  PS_LR_KIND_LINEAR = 2,   /* falls to min_lr at total_steps, linearly */
  /* warmup-stable-decay: lr, then falls to min_lr linearly over the last decay_steps */
  PS_LR_KIND_WSD = 3
} ps_lr_kind;

/* ps_batch_fn() - the caller's function that fills the batch of one step.
 * @step      0-based, first_step included. Steps come in order. One whose gradient is not finite is
 *            asked for once more, to find the chunk.
 * @tokens    [n_tokens], sequence after sequence of seq_len tokens; each a token id.
 * @targets   [n_tokens], the token to predict at each position. The loss does not count a target of
 *            -1 or -100.
 * Threads: a thread of the engine calls it, one call at a time, possibly a step ahead of compute.
 *          A GPU waits for the batch, and what is queued behind that may fill the GPU's queue. The
 *          thread that fills the queue then holds the driver's lock until the batch is there. A
 *          call of CUDA would wait for that lock for ever, so neither the function nor a thread
 *          that it waits for may call CUDA.
 * Errors:  a negative return stops the run, and ps_trainer_wait() returns it. An id that is not in
 *          the vocabulary is PS_EFORMAT. A batch without a counted target is PS_ENUMERIC. */
typedef ps_status (*ps_batch_fn)(void *user, uint64_t step, int32_t *tokens, int32_t *targets,
                                 uint64_t n_tokens);

/* Parameters that get no weight decay, as bits. */
enum {
  PS_NO_DECAY_NORM = 1,      /* weights of norms */
  PS_NO_DECAY_BIAS = 2,      /* biases */
  PS_NO_DECAY_EMBEDDING = 4, /* the input embedding; with tied embeddings the lm_head with it */
  PS_NO_DECAY_ALL = 7        /* of the bits above */
};

/* Whether a trainer plans again where its steps take another time than planned, while it goes on,
 * and switches between two steps (ps_trainer_switch()). */
typedef enum ps_replan {
  PS_REPLAN_OFF = 0,
  /* by plans that cut a step as the first one does: the bits are those of a training that does not
   * switch */
  PS_REPLAN_AUTO = 1,
  /* also by plans that cut it otherwise, where these are faster: sums then have another order, and
   * the bits change */
  PS_REPLAN_CUT = 2,
  PS_N_REPLANS = 3
} ps_replan;

enum { PS_MAX_STEPS = 1000000000 }; /* limit of every count of steps; more is PS_EINVAL */

/* What a training is asked for beside its plan. What the plan counts on is asked there: optimizer,
 * clipping, documents, traced steps, hosts, logits (ps_plan_config). */
typedef struct ps_train_config {
  uint32_t struct_bytes; /* sizeof(ps_train_config) */
  uint32_t lr_kind;      /* ps_lr_kind */
  /* Hyperparameters of the plan's optimizer (penstock/optim.h). NAN: its default. One that the
   * optimizer does not know is PS_EINVAL. lr is the learning rate's peak. */
  double lr, beta1, beta2, eps, momentum, weight_decay;
  double min_lr; /* the learning rate's floor */
  /* total_steps is the schedule's length, counted from step 0. decay_steps is for WSD alone. */
  uint64_t warmup_steps, total_steps, decay_steps;
  uint64_t seed; /* of stochastic rounding, of shuffling and of weights that are drawn */
  /* Steps that were trained before. Schedule, data order and random bits go on from there. With
   * ps_trainer_create() the optimizer's state begins at zero, and its bias correction counts the
   * updates of this run. penstock/checkpoint.h goes on with the state of a checkpoint. */
  uint64_t first_step;
  uint32_t nesterov; /* 1: SGD with Nesterov's momentum */
  uint32_t shuffle;  /* 1: read the dataset's sequences in an order drawn from seed */
  /* Steps [trace_from, trace_to) of the training alone are traced, as first_step counts them;
   * trace_to 0: all from trace_from on. */
  uint64_t trace_from, trace_to;
  /* 1: draw the weights from seed. The model directory then needs config.json alone. */
  uint32_t init_weights;
  uint32_t no_decay; /* PS_NO_DECAY_*: which parameters get no weight decay */
  /* With a plan that has adapters: the directory of those to go on training, in PEFT's layout
   * (penstock/adapter.h), borrowed for the call. NULL: fresh ones, whose A is drawn from seed and
   * whose B is zero. */
  const char *adapter_dir;
  /* With a plan that has a disk (ps_plan_config.disk_mem_bytes): up to PS_MAX_DRIVES directories,
   * separated by commas, each on a drive of its own; borrowed for the call. A file there, without a
   * name, has the state that the plan puts on the disk, and is gone with the process. A directory
   * serves one training at a time. Else NULL. */
  const char *disk;
  uint64_t max_skips; /* with PS_NON_FINITE_SKIP: so many steps in a row may be skipped */
  /* 1: the plan's rates of host memory are taken as they are. 0: they are measured on the arena
   * before weights are loaded, for 2 s at most (ps_trainer_arena()). Bits do not depend on it. */
  uint32_t trust_rates;
  uint32_t replan; /* ps_replan */
  /* ps_trainer_resume(): 1: where the checkpoint's recipe or state_bits are not the plan's, weights
   * and state are converted, rounded to nearest. */
  uint32_t convert_state, reserved;
  /* Exactly one of dataset and batch_fn is given. Both are borrowed until destroy. Several hosts
   * take a dataset, of which each trainer reads its part of every step. With a plan that
   * is forward_only, a pass over a dataset without weights begins with a step and counts each
   * sequence once: the last step's other sequences do not count, and a step may have no target. */
  ps_dataset *dataset;
  ps_batch_fn batch_fn;
  void *batch_user;
  /* What the run is, for the manifests of its checkpoints: its TOML file, or the command that
   * started it; NULL: unknown. Borrowed for the call that creates the trainer. */
  const char *run;
  /* What ps_trainer_validate() reads; NULL: nothing. The plan must be made with val_tokens.
   * Borrowed until destroy. */
  ps_dataset *val_dataset;
} ps_train_config;

/* ps_train_config_init() - fill in struct_bytes and the defaults: the optimizer's own
 * hyperparameters (all NAN), a constant learning rate, no decay of norms and biases, at most 10
 * skipped steps in a row. */
PS_API void ps_train_config_init(ps_train_config *cfg);

/* ps_train_config_check() - check @cfg, for a plan with this optimizer, without data: ranges and
 * schedule. ps_trainer_create() makes the same checks. A warmup longer than total_steps is logged
 * as a warning.
 * Errors: PS_EINVAL names the field, its value and the limit. */
PS_API ps_status ps_train_config_check(const ps_train_config *cfg, ps_optimizer optimizer);

/* What a step did and what it took. */
typedef struct ps_step_metrics {
  uint64_t step; /* 0-based, first_step included */
  double loss;   /* cross-entropy, mean over the counted targets, in nats; NaN: there is none */
  /* With z-loss or label smoothing (ps_plan_config): what was minimized, and the z-loss in it, both
   * as means. Else loss, and 0. */
  double objective, z_loss;
  /* Of a model with a `score` (ps_problem): the fraction of documents, labels or pairs that are
   * judged right; of regression the mean absolute error. NAN of a language model */
  double right;
  uint64_t tokens, valid_tokens; /* of the batch; those whose target is counted */
  double grad_norm;              /* global L2 norm before clipping */
  double lr;                     /* the learning rate that the update used */
  /* Seconds from the end of the step before to the end of this one. A step ends when all its
   * weights are in host memory. */
  double step_s;
  double predicted_step_s; /* the plan's prediction */
  /* Switches to another plan so far, and the seconds that those before this step took, which step_s
   * has too. */
  uint64_t n_switches;
  double switch_s;
  double tokens_per_s;
  /* Fractions of ps_hardware.peak_flops_per_s; 0 where that is unknown. mfu counts the model's
   * FLOPs, hfu also those of recomputation. */
  double mfu, hfu;
  uint64_t skipped;   /* 1: the step was skipped, as its loss or its gradient was not finite */
  uint64_t n_skipped; /* steps that were skipped so far, also before a resume */
  /* BYTES at their peak so far. CUDA: what the GPU has lost to this process. CPU backend: the
   * device arena up to its highest page that was written. */
  uint64_t device_peak_bytes, host_arena_peak_bytes;
  /* BYTES of the process's resident set (VmHWM) at its peak since ps_trainer_create(), which resets
   * the peak; without the CPU backend's device arena. */
  uint64_t host_peak_bytes;
  /* BYTES a second over step_s: the step's copies to the device and to the host; what its updates
   * on the host read and write. Bytes are the plan's. */
  double h2d_bytes_per_s, d2h_bytes_per_s, update_bytes_per_s;
  /* Of ps_gpu_state, read once a step in ps_trainer_wait(), one GPU after another. Of several GPUs:
   * the lowest clock, the sum of their power, the highest temperature. 0: unknown, of one GPU at
   * least. Of several hosts each reads its own GPUs. */
  double gpu_clock_mhz, gpu_power_w, gpu_temperature_c;
  /* JOULES of the step, by the GPUs' energy counters: the mean power of all GPUs since the step
   * before was waited for, times step_s. 0: a GPU has no counter. */
  double gpu_energy_j;
  /* With FP8: which part, from 0 to 1, of the activations and gradients that blocks multiply was
   * not 0 and became 0 when it was quantized; then the largest such part of one tensor of a layer.
   * From PS_FLUSHED_WARNS on a warning names that tensor. */
  double fp8_flushed, fp8_flushed_most;
  /* With experts, of the step's tokens on this host: the largest over the blocks of the most tokens
   * of an expert over their mean; the entropy of the experts' parts over its maximum, the mean of
   * the blocks; experts without a token, of all blocks. Warnings name the worst. */
  double expert_load, expert_entropy;
  uint64_t experts_unused;
  /* 1 + the first rank whose task asked to stop before this step was computed; 0: none did
   * (ps_trainer_ask_stop()). */
  uint64_t stop;
  /* GPUs that gpu_clock_mhz to gpu_energy_j are of: all of this host's that the plan uses. 0: none
   * of the four is known. */
  uint64_t n_gpus_read;
  /* Seconds that a step of the plan takes by the rates that this run has now, simulated. They are
   * read from the trace of some steps, now and then. 0: none were read yet, or the trace keeps less
   * than two steps. */
  double expected_step_s;
} ps_step_metrics;
#define PS_FLUSHED_WARNS 0.01

/* ps_progress_fn() - the caller's function that ps_trainer_create() calls while it works.
 * @what  the stage, such as "loading weights"; a static string. The first call of a stage has
 *        another @what than the call before.
 * @total_bytes  0: the stage is not counted in bytes */
typedef void (*ps_progress_fn)(void *user, const char *what, uint64_t done_bytes,
                               uint64_t total_bytes);

/* ps_trainer_create() - reserve the arenas of @plan, and load the weights into host memory.
 * @out        on PS_OK a trainer that the caller owns and ps_trainer_destroy() releases.
 * @model_dir  in Hugging Face layout. Its config.json must be the model that @plan was made for.
 * @plan       borrowed until destroy. One trainer at a time runs a plan.
 * @cfg        borrowed for the call.
 * @progress   or NULL. The model directory is checked before the first call.
 * Blocks: while memory is reserved and weights are read, which may take minutes.
 * Errors: PS_EFORMAT, PS_EIO: a tensor is missing, unknown or of another shape or dtype, or a file
 *         cannot be read; the message names it. PS_EINVAL: @cfg, or @plan is of another model.
 *         PS_EBUSY: another trainer runs @plan. PS_ENOMEM, PS_EDEVICE: the machine refused.
 *         PS_EBUDGET: the device's driver and libraries take more than the cap leaves. */
PS_API ps_status ps_trainer_create(ps_trainer **out, const char *model_dir, ps_plan *plan,
                                   const ps_train_config *cfg, ps_progress_fn progress,
                                   void *progress_user);
/* ps_trainer_destroy() - end the run and release the trainer. NULL is a no-op. The plan and the
 * dataset may be destroyed afterwards.
 * Blocks: until the ops that run have ended.
 * Errors: PS_ESTATE: the call is made inside the trainer's own batch function. The trainer then
 *         stays as it is. */
PS_API ps_status ps_trainer_destroy(ps_trainer *t);

/* ps_trainer_submit() - queue @n more steps. They run in order on the engine's threads, and the
 * end of one overlaps with the beginning of the next.
 * Blocks: the first call, until device-resident weights and state are on the device; a call
 *         for whose steps the trainer first switches to another plan; a call during a checkpoint,
 *         as ps_trainer_checkpoint_begin() says. No other call blocks.
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
 * can be read and saved. They are those after ps_trainer_steps_done() steps, with three exceptions,
 * which the message states:
 *   - The error or a cancel came while the optimizer ran. Some weights may then be one step ahead
 *     of the others. Where updates do not wait for the norm (clip_norm 0, PS_CLIP_BY_PREVIOUS) it
 *     runs during the whole step.
 *   - Updates do not wait for the norm and a gradient is not finite. Layers above the one named are
 *     a step ahead.
 *   - PS_EDEVICE with several GPUs, of which some update units (ps_plan_report.held_state_units).
 *     Weights are lost: what reads or saves them fails with PS_ESTATE. Go on from the last
 *     checkpoint. This also holds where a validation or a switch fails so. */
PS_API ps_status ps_trainer_wait(ps_trainer *t, ps_step_metrics *out);
/* The result of a validation. */
typedef struct ps_validation {
  double loss, perplexity;       /* mean over the counted targets, in nats; its exponential */
  double right;                  /* as ps_step_metrics.right */
  uint64_t tokens, valid_tokens; /* read; those whose target is counted */
  double seconds;                /* that training waited */
} ps_validation;

/* ps_trainer_validate() - the loss on the first ps_plan_report.val_tokens tokens of val_dataset,
 * with the weights as they are, in the memory of training. A training gives the same bits with and
 * without validations. A loss that is not finite is no error.
 * @out  on PS_OK the result; untouched on error.
 * Blocks: until the validation is done.
 * Errors that stop the trainer, as those of wait do: what the dataset returned, PS_ECANCELLED,
 *         PS_EDEVICE, PS_ENOMEM. The weights are those of the last step.
 * Errors that do not: PS_ESTATE: steps are in flight, or the call is made inside the trainer's own
 *         batch function. PS_EINVAL: there is no val_dataset, or no target in it is counted. */
PS_API ps_status ps_trainer_validate(ps_trainer *t, ps_validation *out);
/* ps_trainer_arena() - what this trainer's own host memory does beside what its plan takes it to
 * do, as measured when the trainer was created. Memory is not equally fast everywhere, nor a
 * machine the same every day.
 * @rates  the plan's machine with the measured rates in their place; NULL: not asked for
 * @most   the rate that differs most. Its kind is 0, and @rates the plan's machine, where nothing
 *         was measured: with trust_rates, and where caches would be measured, in an arena of less
 *         than 4 GiB (CPU backend: 256 MiB).
 * Errors: PS_EINVAL. */
PS_API ps_status ps_trainer_arena(const ps_trainer *t, ps_hardware *rates,
                                  ps_rate_difference *most);
/* ps_trainer_switch() - from the next step on train by @plan, of the same model and configuration.
 * Weights and optimizer state move to its places inside the arenas that are reserved. Losses,
 * weights and state are the bits of a training that did not switch, where chunks and rounds are the
 * same (ps_plan_again()).
 * @plan  on PS_OK the trainer owns it, as on an error after which ps_trainer_plan() names it. The
 *        plan before, if the caller's, may be destroyed.
 * Blocks: while what moves is copied. It is not felt by ps_trainer_cancel() meanwhile.
 * Errors that stop the trainer: PS_EDEVICE; PS_ENOMEM after the copies. Where a copy failed,
 *         nothing can be read or saved any more.
 * Errors that leave all as it was: PS_EINVAL: @plan is of another training. PS_EBUSY: another
 *         trainer has it, or a checkpoint is being written. PS_EBUDGET: the reserved memory is too
 *         small for it. PS_ENOMEM. PS_ESTATE: as of ps_trainer_validate().
 * ps_trainer_plan() - the plan of the step that is reported next; with ps_train_config.replan it
 * changes in ps_trainer_submit() and in ps_trainer_wait(). Borrowed until then.
 * ps_trainer_take_plan() - the same plan, which the caller owns from here on: it is destroyed after
 * the trainer runs another one, or has ended. */
PS_API ps_status ps_trainer_switch(ps_trainer *t, ps_plan *plan);
PS_API ps_plan *ps_trainer_plan(const ps_trainer *t);
PS_API ps_plan *ps_trainer_take_plan(ps_trainer *t);
/* ps_trainer_rates() - the plan's machine with the rates that the steps of this training have, as
 * far as they used them: ps_hardware_remember() keeps them. PS_EINVAL; PS_ESTATE: too few steps
 * were observed, and *out is untouched. */
PS_API ps_status ps_trainer_rates(const ps_trainer *t, ps_hardware *out);
/* ps_trainer_cancel() - stop every step that is not complete, for good: no further op starts. The
 * wait for the first of these steps returns PS_ECANCELLED. A step is complete once all its weights
 * are in host memory. NULL is a no-op.
 * Threads: any, and signal handlers. Blocks: no; ops that run are not awaited. */
PS_API void ps_trainer_cancel(ps_trainer *t);
/* ps_trainer_ask_stop() - tell the tasks of all hosts that this one is to stop: the metrics of the
 * same step say so in each of them. A step that a task has submitted needs all tasks. So each goes
 * on to the step after the one that says so, and submits no further one.
 * Threads: any, and signal handlers. */
PS_API void ps_trainer_ask_stop(ps_trainer *t);
/* ps_trainer_steps_done() - how many steps wait has reported; first_step is not counted. */
PS_API uint64_t ps_trainer_steps_done(const ps_trainer *t);
/* ps_trainer_at_rest() - 1: no op of steps, validations, samples or a step run again runs, and
 * none will before the next call: ps_trainer_destroy() waits for none. */
PS_API int ps_trainer_at_rest(const ps_trainer *t);
/* ps_trainer_switching() - 1 while the trainer switches to another plan: no step ends meanwhile. */
PS_API int ps_trainer_switching(const ps_trainer *t);
/* ps_trainer_where() - what each stream has done and what it waits for, a line a stream, for a
 * person who asks why nothing moves (see ps_run_where()). @text gets at most @bytes, the terminator
 * included; "" before the first submit. */
PS_API void ps_trainer_where(const ps_trainer *t, char *text, uint64_t bytes);

/* ps_trainer_read_param(), ps_trainer_write_param(), ps_trainer_read_grad() - one parameter, or its
 * gradient, as fp32.
 * @param     index as in ps_model_param(). @n must be its number of elements.
 * A parameter's value is that of the master copy where there is one. Reading converts bf16 to fp32;
 * writing rounds to nearest even. A gradient is the last step's total, divided by the number of
 * counted targets, before clipping.
 * Errors: PS_EINVAL: @param or @n.
 *         PS_ESTATE: steps are in flight; or a device-resident parameter is written after the first
 *         step; or the gradient stays on the device, and the plan was made without keep_grads. */
PS_API ps_status ps_trainer_read_param(ps_trainer *t, uint32_t param, float *dst, uint64_t n);
PS_API ps_status ps_trainer_write_param(ps_trainer *t, uint32_t param, const float *src,
                                        uint64_t n);
PS_API ps_status ps_trainer_read_grad(ps_trainer *t, uint32_t param, float *dst, uint64_t n);

/* ps_trainer_save() - write the model as a Hugging Face directory: safetensors in @dtype (PS_F32,
 * PS_BF16 or, of gpt-oss, PS_SAVE_MXFP4, whose rounding is logged as a warning), config.json with
 * that dtype, and the model directory's tokenizer files. A tied head is left out.
 * @dir  is made when it is missing; its parent must exist. It may be the model directory. Other
 *       files in @dir stay, and so do its mode and owner. Its tokenizer stays where the model
 *       directory has none.
 * Whatever ends a save (a kill, a power cut, a full disk), @dir holds the whole old model or the
 * whole new one; penstock/tensors.h says how. On PS_OK the new model is on the disk. Until then
 * the disk holds both models. Of several saves into one @dir at a time each is whole, and the last
 * to end counts.
 * Errors: PS_EIO: what could not be written, and why. @dir holds the old model, unless the message
 *         says that it holds the new one. PS_ENOMEM. PS_ESTATE: steps are in flight. PS_EINVAL:
 *         why the model is not saved as @dtype. */
PS_API ps_status ps_trainer_save(ps_trainer *t, const char *dir, ps_dtype dtype);
/* ps_trainer_save_when() - the same, but @ready is asked when the new model is whole on the disk,
 * in directory @from, just before it becomes the model of @dir. Both paths are absolute and without
 * links. An error that @ready returns is that of the save, and @dir stays as it is. */
typedef ps_status (*ps_ready_fn)(void *user, const char *from, const char *dir);
PS_API ps_status ps_trainer_save_when(ps_trainer *t, const char *dir, ps_dtype dtype,
                                      ps_ready_fn ready, void *user);
/* ps_model_dir_tidy() - complete a save into @dir that was cut off, and remove what such saves have
 * left in @dir and beside it. A save that still runs is left alone. @dir need not exist; its parent
 * must. Errors: PS_EIO, PS_ENOMEM. PS_EINVAL: the path is too long. */
PS_API ps_status ps_model_dir_tidy(const char *dir);

/* ps_trainer_trace() - the ops of the last steps, as many as the plan's trace_steps; see
 * ps_run_trace(). During a batch ramp none: the plan's schedule is that of the steps after it.
 * Errors: PS_ESTATE: no step was submitted yet. */
PS_API ps_status ps_trainer_trace(const ps_trainer *t, ps_trace_event *events, uint64_t room,
                                  uint64_t *n);

/* ps_trainer_profile() - tell an attached profiler to record from here on (@on 1), or no more (0).
 * Nsight Systems waits for it with --capture-range=cudaProfilerApi. On the CPU backend, and without
 * a profiler, nothing happens.
 * Errors: PS_ESTATE: steps are in flight. PS_EDEVICE: the driver refused. */
PS_API ps_status ps_trainer_profile(ps_trainer *t, int on);

#ifdef __cplusplus
}
#endif
#endif
