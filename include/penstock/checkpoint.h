/* penstock/checkpoint.h - checkpoints: the complete state of a trainer on disk, and trainers that
 * go on from one.
 *
 * A checkpoint is a directory:
 *   config.json, tokenizer files      as in a model directory
 *   model*.safetensors                the weights; of a recipe with a master copy, the master, in
 *                                     fp32
 *   adapter_*                         with LoRA instead of these: the adapters, in PEFT's layout.
 *                                     The manifest names the frozen weights by their SHA-256
 *   STATE*.safetensors                the optimizer's states, under their parameters' names. STATE
 *                                     is exp_avg and exp_avg_sq (adamw), exp_avg (lion),
 *                                     momentum_buffer (sgd). State in 8 bits is one row of bytes a
 *                                     parameter: its blocks, as they lie in memory
 *   manifest.json                     step, settings, the run, the data's paths and hashes, serial,
 *                                     and bytes and SHA-256 of every other file
 * So it is a model directory too. State is kept by parameter: a trainer resumes with another plan,
 * under other caps and on another backend. With the batch cut as before (ps_checkpoint_info), k + k
 * steps give the bits of 2k steps. docs/checkpoints.md is the user's page.
 *
 * Names of checkpoints in a folder are step-00000100 and alike. */
#ifndef PENSTOCK_CHECKPOINT_H
#define PENSTOCK_CHECKPOINT_H
#include "train.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_checkpoint ps_checkpoint; /* one that was opened, and checked */

typedef struct ps_checkpoint_info {
  uint32_t struct_bytes; /* sizeof(ps_checkpoint_info) */
  uint32_t recipe, optimizer, n_frozen_layers;
  uint64_t step;      /* steps that were trained: the next step's number */
  uint64_t n_updates; /* that made the optimizer's state; skipped steps count */
  uint64_t n_skipped; /* steps that were skipped (ps_non_finite) */
  uint64_t bytes;     /* BYTES of its files, the manifest apart */
  /* The batch and its cut, as in ps_plan_config. */
  uint64_t seq_len, tokens_per_step;
  uint64_t chunk_tokens, chunks_per_round, first_round_chunks, first_rounds, head_slice_tokens;
  uint64_t n_sequences; /* of the dataset, at seq_len; 0: the data came from a batch function */
  double z_loss, label_smoothing, clip_norm;
  double router_aux_loss, router_z_loss; /* as they were in force */
  int32_t document_token, document_end_token;
  uint64_t data_mix; /* ps_dataset_mix() of the dataset */
  ps_lora lora;
  uint32_t fp8_bf16_first, fp8_bf16_last, fp8_bf16_down, fp8_head, fp8_fast_accumulation;
  uint32_t n_hosts; /* that trained; on others the training goes on with other bits */
  uint32_t non_finite;
  uint32_t state_bits; /* 0: as the recipe says; 8 */
  uint32_t clip_by, reserved;
  double grad_norm; /* of the last step; NAN: not known */
} ps_checkpoint_info;

/* What writing a checkpoint took. Seconds count from ps_trainer_checkpoint_begin(). */
typedef struct ps_checkpoint_report {
  uint32_t struct_bytes; /* sizeof(ps_checkpoint_report) */
  uint32_t reserved;
  uint64_t step, bytes; /* as in ps_checkpoint_info */
  uint64_t serial;      /* the newest checkpoint of a folder has the highest */
  double held_s;        /* until the state was read, and updates waited for nothing any more */
  double durable_s;     /* until the checkpoint was on the disk under its name */
  double waited_s;      /* for which updates waited; added up over the streams that run them */
} ps_checkpoint_report;

/* ps_trainer_checkpoint_begin() - begin to write the state after all steps that are submitted so
 * far as directory @dir, whose parent must exist. An older checkpoint of this run in @dir is
 * replaced.
 *
 * Threads of the library write while these steps end and further ones run. There is no second copy
 * of the state. Each unit of the model is written between its updates of two steps. An update that
 * comes to a unit before the writers waits.
 *
 * Whatever ends the write, @dir is a whole checkpoint or is as it was; penstock/tensors.h says
 * how. The checkpoint gets its name after the caller has come back for a further step or for the
 * end, so that what the caller writes about a step is older than its checkpoint. A failure of the
 * write stops no step. An error of a later step leaves the checkpoint alone. A cancel, or an error
 * of one of its steps, gives it up. ps_trainer_destroy() completes it.
 * Blocks: no. In a run whose updates do not wait for the norm, and whose plan has some of them
 *         on the device, the next ps_trainer_submit() blocks until these units are written.
 * Errors: PS_EBUSY: the checkpoint before was not ended. PS_EINVAL: @dir is a checkpoint of another
 *         run. PS_ESTATE: an error has stopped the trainer. PS_ENOMEM, PS_EDEVICE: no thread could
 *         be started. */
PS_API ps_status ps_trainer_checkpoint_begin(ps_trainer *t, const char *dir);
/* ps_trainer_checkpoints_check() - whether no other run than @t's has written checkpoints into
 * @folder, which need not exist. A run that goes on from a checkpoint is the run that wrote it.
 * Errors: PS_EINVAL names one of another run. PS_ENOMEM. */
PS_API ps_status ps_trainer_checkpoints_check(const ps_trainer *t, const char *folder);
/* ps_trainer_checkpoint_running() - 1 while ps_trainer_checkpoint_end() would block. */
PS_API int ps_trainer_checkpoint_running(const ps_trainer *t);
/* ps_trainer_checkpoint_end() - wait until the checkpoint that was begun is on the disk.
 * @out    NULL, or a report whose struct_bytes the caller has set. It is filled in on PS_OK.
 * Blocks: the steps that it is of must have been submitted, and need not have been waited for.
 * Errors: PS_EIO: what could not be written, and why. PS_ENOMEM. PS_EDEVICE. PS_ECANCELLED.
 *         PS_ESTATE: none was begun; an error stopped the run before the checkpoint's last step
 *         ended; or a batch function called. */
PS_API ps_status ps_trainer_checkpoint_end(ps_trainer *t, ps_checkpoint_report *out);
/* ps_trainer_checkpoint() - begin and end, with no step in flight: the state after
 * ps_trainer_steps_done() steps.
 * Errors: those of both. PS_ESTATE: steps are in flight. */
PS_API ps_status ps_trainer_checkpoint(ps_trainer *t, const char *dir);
/* ps_trainer_steps_submitted() - how many steps were submitted since create. */
PS_API uint64_t ps_trainer_steps_submitted(const ps_trainer *t);

/* ps_checkpoint_open() - open @dir and check all its files against the manifest. Several threads
 * read them.
 * @out    owned by the caller, released by ps_checkpoint_close().
 * Errors: PS_EFORMAT names the file that is damaged, cut off, missing or not in the manifest, or
 *         the tensor whose dtype is not the recipe's. PS_EIO, PS_ENOMEM. */
PS_API ps_status ps_checkpoint_open(ps_checkpoint **out, const char *dir);
/* ps_checkpoint_latest() - open the newest whole checkpoint in @folder: that with the highest
 * serial, which is the one written last, whatever its step. One that is damaged gets a
 * warning in the log. *out is NULL where @folder has none at all, or does not exist.
 * Errors: PS_EFORMAT: there are checkpoints, and none is whole. PS_EIO, PS_ENOMEM. */
PS_API ps_status ps_checkpoint_latest(ps_checkpoint **out, const char *folder);
PS_API void ps_checkpoint_close(ps_checkpoint *c);            /* NULL is a no-op */
PS_API const char *ps_checkpoint_dir(const ps_checkpoint *c); /* valid until close */
/* ps_checkpoint_get_info() - fill in @out, whose struct_bytes the caller has set.
 * Errors: PS_EINVAL. */
PS_API ps_status ps_checkpoint_get_info(const ps_checkpoint *c, ps_checkpoint_info *out);
/* ps_checkpoint_config() - set @cfg to the checkpoint's settings: schedule, hyperparameters, seed,
 * shuffle. Data is not among them. */
PS_API ps_status ps_checkpoint_config(const ps_checkpoint *c, ps_train_config *cfg);

/* ps_checkpoint_path() - FOLDER/step-00000100, for a step. PS_EINVAL: @bytes are too few. */
PS_API ps_status ps_checkpoint_path(char *path, uint64_t bytes, const char *folder, uint64_t step);
/* ps_checkpoints_prune() - remove all but the @keep newest checkpoints of the run that wrote the
 * newest one in @folder, and what calls that were cut off have left. Those of other runs stay, and
 * so do those whose manifest cannot be read. Errors: PS_EIO. */
PS_API ps_status ps_checkpoints_prune(const char *folder, uint64_t keep);

/* ps_trainer_resume() - as ps_trainer_create(), but weights, state and step are @c's. The model
 * directory gives config.json and the tokenizer alone, and with adapters the frozen weights.
 * @c    borrowed for the call.
 * @cfg  first_step must be 0, and init_weights too unless the plan has adapters. Where one of these
 *       settings differs from the checkpoint's, the log gets a warning: the training goes on, with
 *       other bits.
 *         - learning rate, its floor, schedule, warmup and decay; total_steps, unless the schedule
 *           is constant;
 *         - beta1, beta2, eps, momentum, nesterov, weight_decay, no_decay, each where the optimizer
 *           has it;
 *         - clip_norm, clip_by, non_finite, max_skips; the plan's z-loss and label smoothing;
 *         - the plan's cut of the batch; the number of hosts.
 * Errors: those of ps_trainer_create(). PS_EINVAL where one of these differs from the checkpoint's;
 *         the message says which:
 *         - recipe and state_bits, unless @cfg has convert_state;
 *         - the model, optimizer, frozen layers, LoRA's rank, alpha, targets and rslora,
 *           and what computes in FP8;
 *         - with adapters, the frozen weights (by their SHA-256);
 *         - seq_len, tokens_per_step, the batch ramp as far as it was run;
 *         - seed, shuffle, document tokens, the weights of a mix, and the data: each shard's bytes,
 *           in order. Of large data samples are compared. */
PS_API ps_status ps_trainer_resume(ps_trainer **out, const char *model_dir, ps_plan *plan,
                                   const ps_train_config *cfg, const ps_checkpoint *c,
                                   ps_progress_fn progress, void *progress_user);

#ifdef __cplusplus
}
#endif
#endif
