/* defaults.c - what a training does where the user gives no option for it. A run that goes on takes
 * it from its checkpoint: no default of a newer version changes a run. */
#include "cli/cli.h"
#include <math.h>

/* Of data whose masks mark documents, and of one stream. */
enum { EPOCHS_OF_RECORDS = 3, EPOCHS_OF_A_STREAM = 1 };
/* Steps that the default of --tokens-per-step leaves in a run; steps below which a run gets a line.
 */
enum { LEAST_STEPS = 100, FEW_STEPS = 10 };
static const double warmup = 0.03, checkpoint_s = 1800;

typedef enum trained { ALL_WEIGHTS, FRESH_WEIGHTS, ADAPTERS } trained;
static const char *const words[] = {"all weights of a trained model", "fresh weights", "LoRA"};
/* Of fresh weights: the optimizer's (ps_optimizer_default()). */
static const double rates[][PS_N_OPTIMIZERS] = {
    [ALL_WEIGHTS] =
        {[PS_OPTIMIZER_ADAMW] = 1e-5, [PS_OPTIMIZER_LION] = 3e-6, [PS_OPTIMIZER_SGD] = 1e-3},
    [ADAPTERS] =
        {[PS_OPTIMIZER_ADAMW] = 2e-4, [PS_OPTIMIZER_LION] = 6e-5, [PS_OPTIMIZER_SGD] = 1e-3},
};

int cli_defaults_check(const cli_job *job) {
  if (job->train_config.total_steps && !isnan(job->epochs))
    return cli_fail(CLI_REFUSED, "--steps and --epochs both say how long to train: leave one out");
  if (job->warmup_given && !isnan(job->warmup_ratio))
    return cli_fail(CLI_REFUSED, "--warmup-steps and --warmup-ratio both say how long the learning "
                                 "rate rises: leave one out");
  if (job->out && job->no_save && job->no_save_given)
    return cli_fail(CLI_REFUSED, "--out says where to save the model, and --no-save not to: leave "
                                 "one out");
  return CLI_OK;
}

int cli_defaults_out(cli_job *job) {
  job->run_dir = job->run_dir ? job->run_dir : job->out ? job->out : ".";
  if (job->out || job->no_save)
    return CLI_OK;
  job->out = job->default_out = cli_path_join(job->run_dir, "model");
  return job->out ? CLI_OK : cli_fail(CLI_FAILED, "out of memory");
}

/* ---- before the plan ------------------------------------------------------------------------- */

static trained what_is_trained(const cli_job *job) {
  ps_tensor_file *f = NULL;
  if (job->plan_config.lora.rank)
    return ADAPTERS;
  if (job->train_config.init_weights)
    return FRESH_WEIGHTS;
  if (ps_tensors_open(&f, job->model) != PS_OK)
    return ALL_WEIGHTS; /* the trainer says what is wrong with the files */
  const trained what = ps_tensors_initialised(f) ? FRESH_WEIGHTS : ALL_WEIGHTS;
  ps_tensors_close(f);
  return what;
}

/* What the checkpoint's run has had, where the user says nothing. */
static void take(cli_job *job, const ps_train_config *then) {
  ps_train_config *c = &job->train_config;
  if (!job->lr_schedule_given) {
    c->lr_kind = then->lr_kind;
    c->decay_steps = c->decay_steps ? c->decay_steps : then->decay_steps;
    c->min_lr = job->min_lr_given ? c->min_lr : then->min_lr;
  }
  c->lr = isnan(c->lr) ? then->lr : c->lr;
  if (!job->warmup_given && isnan(job->warmup_ratio)) {
    c->warmup_steps = then->warmup_steps;
    job->warmup_given = true;
  }
  if (!c->total_steps && isnan(job->epochs))
    c->total_steps = then->total_steps;
  c->shuffle = job->shuffle_given ? c->shuffle : then->shuffle != 0;
  job->lr_schedule_given = job->shuffle_given = true;
}

int cli_defaults_read(cli_job *job, const ps_checkpoint *from) {
  ps_train_config *c = &job->train_config;
  job->records = job->data_marks_documents;
  if (from) {
    ps_train_config then = {.struct_bytes = sizeof then};
    const ps_status st = ps_checkpoint_config(from, &then);
    if (st != PS_OK)
      return cli_fail_status(st, true);
    take(job, &then);
  }
  if (!job->lr_schedule_given)
    c->lr_kind = PS_LR_KIND_COSINE;
  if (!job->shuffle_given)
    c->shuffle = job->records;
  if (isnan(c->lr)) {
    const trained what = what_is_trained(job);
    c->lr = what == FRESH_WEIGHTS
                ? ps_optimizer_default((ps_optimizer)job->plan_config.optimizer, PS_HYPER_LR)
                : rates[what][job->plan_config.optimizer];
    job->lr_of = words[what];
  }
  return CLI_OK;
}

static double epochs_of(const cli_job *job) {
  return !isnan(job->epochs) ? job->epochs : job->records ? EPOCHS_OF_RECORDS : EPOCHS_OF_A_STREAM;
}

/* The sequences of the run where --steps is not given. */
static double sequences_of(const cli_job *job, const ps_dataset *ds) {
  return epochs_of(job) * (double)ps_dataset_n_sequences(ds, job->plan_config.seq_len);
}

int cli_defaults_tokens(cli_job *job, const ps_dataset *ds) {
  if (job->plan_config.tokens_per_step || job->plan_config.forward_only)
    return CLI_OK;
  int code = cli_job_prepare(job);
  uint64_t tokens = 0;
  const ps_status st = code == CLI_OK ? ps_plan_enough_tokens(&job->config, &job->plan_config,
                                                              &job->hardware, &tokens)
                                      : PS_OK;
  if (code != CLI_OK || st != PS_OK)
    return code != CLI_OK ? code : cli_fail_status(st, true);
  /* down to the least of ps_plan_enough_tokens() while the run has too few steps */
  const uint64_t each = (uint64_t)job->device.n_gpus * (job->task.n_hosts ? job->task.n_hosts : 1);
  while (ds && !job->train_config.total_steps && tokens / job->plan_config.seq_len > 8 &&
         tokens / job->plan_config.seq_len / 2 >= each &&
         sequences_of(job, ds) * (double)job->plan_config.seq_len < (double)tokens * LEAST_STEPS)
    tokens /= 2;
  job->plan_config.tokens_per_step = tokens;
  return CLI_OK;
}

uint64_t cli_expected_steps(const cli_job *job, const ps_dataset *ds) {
  const uint64_t sequences = job->plan_config.tokens_per_step / job->plan_config.seq_len;
  const double steps = sequences_of(job, ds) / (double)(sequences ? sequences : 1);
  return job->train_config.total_steps ? job->train_config.total_steps
         : steps < 1                   ? 1
                                       : (uint64_t)steps;
}

/* ---- after the plan -------------------------------------------------------------------------- */

static void choose_steps(cli_job *job, const ps_dataset *ds) {
  uint64_t *steps = &job->train_config.total_steps;
  const bool whole = !isnan(job->epochs) || job->records; /* all of them are read */
  const uint64_t n = (uint64_t)(sequences_of(job, ds) + 0.5);
  (void)ps_plan_steps_of(job->plan, n, steps);
  *steps += !*steps || (whole && ps_plan_sequences_before(job->plan, *steps) < n);
  *steps = *steps < job->first_step ? job->first_step : *steps;
}

static void choose_warmup(cli_job *job) {
  const double ratio = !isnan(job->warmup_ratio)                          ? job->warmup_ratio
                       : job->train_config.lr_kind == PS_LR_KIND_CONSTANT ? 0
                                                                          : warmup;
  if (!job->warmup_given)
    job->train_config.warmup_steps =
        (uint64_t)ceil(ratio * (double)job->train_config.total_steps - 1e-9);
}

int cli_defaults_run(cli_job *job, const ps_dataset *ds) {
  uint64_t *steps = &job->train_config.total_steps;
  job->steps_chosen = !*steps;
  if (job->steps_chosen)
    choose_steps(job, ds);
  if (*steps > PS_MAX_STEPS)
    return cli_fail(CLI_REFUSED, "--epochs %g are %llu steps: at most %d are possible",
                    epochs_of(job), (unsigned long long)*steps, PS_MAX_STEPS);
  choose_warmup(job);
  const double left_s = (double)(*steps - job->first_step) * job->report.step_s;
  if (!job->checkpoint_given && left_s > checkpoint_s) {
    job->checkpoint_every.seconds = checkpoint_s;
    job->checkpoint_chosen = true;
  }
  return CLI_OK;
}

void cli_defaults_note(const cli_job *job, cli_progress *p) {
  const ps_train_config *c = &job->train_config;
  cli_progress_note(p, "%llu step%s, lr %g%s%s, %s after %llu step%s of warm-up, sequences %s",
                    (unsigned long long)c->total_steps, c->total_steps == 1 ? "" : "s", c->lr,
                    job->lr_of ? " for " : "", job->lr_of ? job->lr_of : "",
                    cli_lr_schedules[c->lr_kind], (unsigned long long)c->warmup_steps,
                    c->warmup_steps == 1 ? "" : "s", c->shuffle ? "shuffled" : "in their order");
  if (job->steps_chosen && c->total_steps < FEW_STEPS)
    cli_progress_note(p,
                      "the run has %llu step%s: lower --tokens-per-step (%llu now), or raise "
                      "--epochs, for a training that learns more",
                      (unsigned long long)c->total_steps, c->total_steps == 1 ? "" : "s",
                      (unsigned long long)job->report.tokens_per_step);
  else if (job->steps_chosen && c->total_steps < LEAST_STEPS && job->lr_of == words[ALL_WEIGHTS])
    cli_progress_note(p,
                      "%llu steps at this learning rate change a model little: for a small set of "
                      "examples raise --lr (%g, say), or --epochs",
                      (unsigned long long)c->total_steps, 10 * c->lr);
}
