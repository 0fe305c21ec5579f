/* eval.c - `penstock eval`: the loss of a model on data, without training. */
#include "cli/cli.h"
#include <math.h>
#include <string.h>

typedef struct result {
  double nll, right, seconds; /* nll: the sum of the tokens' losses; right: of a `score` */
  uint64_t tokens, counted, left_out;
} result;

/* Sequences of a pass over the data; 0: a mix, which has no end. */
static uint64_t n_sequences(const cli_job *job, const ps_dataset *ds) {
  return ps_dataset_n_weighted(ds) ? 0 : ps_dataset_n_sequences(ds, job->plan_config.seq_len);
}

/* Every sequence once: the trainer does not count what the last step has more. */
static uint64_t steps_of_pass(const cli_job *job, const ps_dataset *ds) {
  const uint64_t n = job->report.n_sequences,
                 all = ps_dataset_n_sequences(ds, job->plan_config.seq_len),
                 steps = (n_sequences(job, ds) ? all + n - 1 : all) / n;
  return steps ? steps : 1;
}

/* Tokens that were read, and those of the data that were not: in sequences past the last step, and
 * at the ends of shards, where they fill no sequence. The last token of a shard is a target
 * alone. */
static void count_tokens(const cli_job *job, const ps_dataset *ds, result *r) {
  const uint64_t seq_len = job->plan_config.seq_len, n_steps = job->train_config.total_steps;
  const uint64_t all = n_sequences(job, ds), passes = n_steps / steps_of_pass(job, ds),
                 rest = n_steps % steps_of_pass(job, ds) * job->report.n_sequences,
                 targets = ps_dataset_n_tokens(ds) - ps_dataset_n_shards(ds);
  if (!all) {
    r->tokens = n_steps * job->report.n_sequences * seq_len;
    return;
  }
  r->tokens = (passes * all + rest) * seq_len;
  const uint64_t read = (passes ? all : rest) * seq_len;
  r->left_out = targets > read ? targets - read : 0;
}

/* Two steps are in flight: the second one's batch comes in while the first one computes. */
static int run_steps(const cli_job *job, ps_trainer *t, result *r) {
  const uint64_t n_steps = job->train_config.total_steps;
  ps_status st = ps_trainer_submit(t, n_steps < 2 ? n_steps : 2);
  for (uint64_t i = 0; st == PS_OK && i < n_steps; i++) {
    ps_step_metrics m;
    st = ps_trainer_wait(t, &m);
    if (st != PS_OK)
      break;
    r->nll += m.valid_tokens ? m.loss * (double)m.valid_tokens : 0;
    r->right += m.valid_tokens ? m.right * (double)m.valid_tokens : 0;
    r->counted += m.valid_tokens;
    r->seconds += m.step_s;
    if (i + 2 < n_steps)
      st = ps_trainer_submit(t, 1);
  }
  if (st == PS_OK && !r->counted)
    return cli_fail(CLI_FAILED,
                    "the data has no target in %llu step%s: give other data, or more "
                    "--steps",
                    (unsigned long long)n_steps, n_steps == 1 ? "" : "s");
  return st == PS_OK ? CLI_OK : cli_fail_status(st, false);
}

static void show(const cli_job *job, const result *r) {
  const double loss = r->nll / (double)r->counted, right = r->right / (double)r->counted;
  char text[96];
  if (job->json) {
    cli_json j = {.out = stdout};
    cli_json_open(&j, NULL, '{');
    cli_json_number(&j, "loss", loss);
    if (cli_right(job))
      cli_json_number(&j, cli_right(job), right);
    else
      cli_json_number(&j, "perplexity", exp(loss));
    cli_json_count(&j, "tokens", r->tokens);
    cli_json_count(&j, "valid_tokens", r->counted);
    cli_json_count(&j, "left_out_tokens", r->left_out);
    cli_json_count(&j, "steps", job->train_config.total_steps);
    cli_json_number(&j, "tokens_per_s", (double)r->tokens / r->seconds);
    cli_json_count(&j, "device_used_bytes", job->report.device_used_bytes);
    cli_json_count(&j, "host_used_bytes", job->report.host_used_bytes);
    cli_json_close(&j, '}');
    putchar('\n');
    return;
  }
  printf("loss %.6f, %s, over %llu %s of %llu tokens; %.0f tokens/s\n", loss,
         cli_right_text(job, right, loss, text), (unsigned long long)r->counted,
         !cli_right(job)                           ? "targets"
         : job->config.problem == PS_PROBLEM_PAIRS ? "pairs"
                                                   : "documents",
         (unsigned long long)r->tokens, (double)r->tokens / r->seconds);
  if (r->left_out)
    printf("left out: %llu tokens of the data that are in no whole sequence of a step\n",
           (unsigned long long)r->left_out);
}

static int evaluate(cli_job *job) {
  ps_dataset *ds = NULL;
  ps_trainer *t = NULL;
  result r = {0};
  int code = cli_gpus_check(&job->device);
  if (code == CLI_OK)
    code = cli_job_check(job);
  if (code == CLI_OK)
    code = cli_open_data(job, &ds);
  job->plan_config.forward_only = true;
  if (code == CLI_OK)
    code = cli_job_plan(job);
  if (code == CLI_OK && !job->train_config.total_steps)
    job->train_config.total_steps = steps_of_pass(job, ds);
  if (code == CLI_OK) {
    count_tokens(job, ds, &r);
    const ps_train_config cfg = cli_train_config(job, ds, NULL, false);
    cli_warnings(!job->quiet);
    ps_status st = ps_trainer_create(&t, job->model, job->plan, &cfg, NULL, NULL);
    if (st != PS_OK && cli_job_pins_less(job)) {
      code = cli_job_plan_pinned(job);
      if (code == CLI_OK)
        st = ps_trainer_create(&t, job->model, job->plan, &cfg, NULL, NULL);
    }
    if (code == CLI_OK)
      code = st == PS_OK ? run_steps(job, t, &r) : cli_fail_status(st, true);
  }
  ps_trainer_destroy(t);
  ps_dataset_close(ds);
  if (code == CLI_OK)
    show(job, &r);
  return code;
}

/* The options of a training that say what is computed, and where. */
static const char kept[] =
    "config model data steps seq-len device-mem host-mem recipe fp8 fp8-bf16-first "
    "fp8-bf16-last fp8-bf16-down fp8-head fp8-fast-accumulation adapter base-dtype backend "
    "tokens-per-step chunk-tokens gpu gpus layout threads json chunks-per-round "
    "head-slice-tokens document-token deterministic quiet document-end-token";

/* Those whose text in train speaks of training. */
static const struct {
  const char *name, *help;
} said[] = {
    {"steps", "steps to compute (default: once through the data)"},
    {"adapter", "a LoRA adapter of the model, in PEFT's layout: the loss is that of both together"},
    {"base-dtype", "how the frozen matrices beside an adapter are kept and streamed: bf16 "
                   "(default), fp8, nf4 or mxfp4, such as the adapter was trained beside"},
    {"gpus", "compute on the first N visible GPUs, which must be of one type (default 1); with "
             "--backend cpu on an arena in place of each"},
};

int cli_eval(int argc, char **argv) {
  cli_job job;
  cli_option options[CLI_MAX_OPTIONS];
  cli_job_init(&job);
  job.plan_config.clip_norm = 0;
  job.plan_config.trace_steps = 0;
  cli_job_options(&job, options, true);
  size_t n = 0;
  for (size_t i = 0; options[i].name; i++) {
    if (!cli_among(kept, options[i].name))
      continue;
    options[n] = options[i];
    for (size_t k = 0; k < sizeof said / sizeof *said; k++)
      if (!strcmp(options[n].name, said[k].name))
        options[n].help = said[k].help;
    if (!strcmp(options[n].name, "steps"))
      options[n].table = ""; /* a run's file has the steps of a training */
    n++;
  }
  options[n] = (cli_option){.name = NULL};
  const cli_command command = {
      .usage = "eval --model DIR --data SHARDS... --seq-len N [--device-mem SIZE] [--host-mem "
               "SIZE] [OPTIONS]",
      .about =
          "Prints the model's loss and perplexity on the data: the mean over all targets,\n"
          "however the data is cut into steps; of a classifier or a reward model the loss and\n"
          "the accuracy, or the mean absolute error. Tokens at a shard's end that fill no "
          "sequence\n"
          "are left out, and counted. Memory is planned for the forward pass alone. Nothing\n"
          "is written.",
      .example = "penstock eval --model trained --data validation/ --seq-len 4096",
      .options = options,
      .job = &job,
      .hint = cli_job_hint,
  };
  int code = cli_job_parse(&command, argc, argv);
  if (code == CLI_OK)
    code = evaluate(&job);
  cli_job_free(&job);
  return code < 0 ? CLI_OK : code;
}
