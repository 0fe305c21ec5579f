/* labels.c - models with a `score`: the head follows from the labels of the data. */
#include "cli/cli.h"
#include <math.h>
#include <stdio.h>

int cli_take_labels(cli_job *job, const ps_dataset *ds, const char *option) {
  uint32_t n;
  const uint32_t problem = ps_dataset_problem(ds, &n);
  if (problem) {
    const ps_status st = ps_model_config_score(&job->config, problem, n);
    return st == PS_OK ? CLI_OK : cli_fail(CLI_REFUSED, "%s: %s", option, ps_last_error());
  }
  return job->config.problem
             ? cli_fail(CLI_REFUSED,
                        "%s has no labels, and the head of %s is for %s: write shards of labelled "
                        "texts with penstock data --problem %s",
                        option, job->model, ps_problem_name(job->config.problem),
                        ps_problem_name(job->config.problem))
             : CLI_OK;
}

const char *cli_right(const cli_job *job) { return ps_problem_figure(job->config.problem); }

const char *cli_right_text(const cli_job *job, double right, double loss, char text[96]) {
  const char *const what = cli_right(job);
  if (!what)
    snprintf(text, 96, "perplexity %.4g", exp(loss));
  else if (job->config.problem == PS_PROBLEM_REGRESSION)
    snprintf(text, 96, "mean absolute error %.6g", right);
  else
    snprintf(text, 96, "accuracy %.2f%%", 100 * right);
  return text;
}
