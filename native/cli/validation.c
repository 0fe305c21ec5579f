/* validation.c - the validation of `penstock train`: its data, how often it comes, its results. */
#include "cli/cli.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The defaults: about 20 validations a run, each at most 1/16 as many tokens as were trained on
 * since the one before. A forward pass is a third of a step's work, so this costs about 2%. */
enum { VALIDATIONS = 20, LEAST_EVERY = 10, MOST_EVERY = 1000, TOKENS_PART = 16 };
static const uint64_t MOST_TOKENS = 1 << 20;

static bool exists(const char *folder, const char *name) {
  struct stat sb;
  char *path = cli_path_join(folder, name);
  const bool there = path && stat(path, &sb) == 0;
  free(path);
  return there;
}

/* FOLDER/val, of a mix with the folder's share as its weight. */
static char *split_of(const char *folder, double share) {
  char *path = NULL;
  if (share > 0)
    return asprintf(&path, "%s/val:%.17g", folder, share) < 0 ? NULL : path;
  return cli_path_join(folder, "val");
}

/* The validation splits of those of --data that are folders of the data tool. */
static int find_splits(cli_job *job, const ps_dataset *train) {
  const uint32_t n_parts = ps_dataset_n_weighted(train);
  for (uint32_t i = 0; i < (n_parts ? n_parts : job->data.n); i++) {
    ps_dataset_part part = {.struct_bytes = sizeof part};
    if (n_parts)
      ps_dataset_weighted(train, i, job->plan_config.seq_len, &part);
    const char *folder = n_parts ? part.path : job->data.item[i];
    if (!exists(folder, "dataset.json") || !exists(folder, "val/val-00000.bin"))
      continue;
    const char **grown = realloc(job->val.item, (job->val.n + 1) * sizeof *grown);
    char *path = split_of(folder, part.share);
    if (grown)
      job->val.item = grown;
    if (!grown || !path) {
      free(path);
      return cli_fail(CLI_FAILED, "out of memory");
    }
    job->val.item[job->val.n++] = path;
  }
  job->val_found = job->val.n > 0;
  return CLI_OK;
}

void cli_val_free(cli_job *job) {
  for (uint32_t i = 0; job->val_found && i < job->val.n; i++)
    free((char *)job->val.item[i]);
  free(job->val.item);
}

static int refuse_without_data(const cli_job *job) {
  if (!job->val_every && !job->plan_config.val_tokens)
    return CLI_OK;
  return cli_fail(
      CLI_REFUSED,
      "--val-%s is given without validation data: give --val SHARDS, or a --data folder "
      "that penstock data wrote with --val-fraction",
      job->val_every ? "every" : "tokens");
}

static uint64_t between(uint64_t x, uint64_t least, uint64_t most) {
  x = x > least ? x : least;
  return x < most ? x : most;
}

void cli_val_choose(cli_job *job, uint64_t steps, const ps_dataset *val) {
  const uint64_t sequences = job->plan_config.tokens_per_step / job->plan_config.seq_len,
                 step = sequences ? sequences : 1,
                 have = ps_dataset_n_sequences(val, job->plan_config.seq_len) *
                        job->plan_config.seq_len;
  if (!job->val_every)
    job->val_every = between(between(steps / VALIDATIONS, LEAST_EVERY, MOST_EVERY), 1, steps);
  if (!job->plan_config.val_tokens) {
    const uint64_t tokens = step * job->plan_config.seq_len,
                   some = between(job->val_every * tokens / TOKENS_PART, tokens, MOST_TOKENS);
    job->plan_config.val_tokens = between(some, job->plan_config.seq_len, have);
  }
}

int cli_val_open(cli_job *job, const ps_dataset *train, ps_dataset **out) {
  const bool none = job->val.n == 1 && strcmp(job->val.item[0], "none") == 0;
  *out = NULL;
  int code = job->val.n ? CLI_OK : find_splits(job, train);
  if (code != CLI_OK || none || !job->val.n)
    return code != CLI_OK ? code : refuse_without_data(job);
  ps_status st = ps_dataset_open(out, job->val.item, job->val.n, job->config.vocab_size);
  if (st != PS_OK)
    return job->val_found ? cli_fail_status(st, true) : cli_fail_given("--val", st);
  st = ps_dataset_check(*out, job->plan_config.seq_len);
  if (st != PS_OK)
    return cli_fail_given("validation:", st);
  code = cli_take_labels(job, *out, "the validation data");
  if (code != CLI_OK)
    return code;
  job->data_marks_documents |= ps_dataset_marks_documents(*out) != 0;
  return CLI_OK;
}

void cli_val_note(const cli_job *job, cli_progress *p) {
  if (job->plan_config.val_tokens)
    cli_progress_note(p,
                      "validation on %" PRIu64 " tokens of %s%s every %" PRIu64
                      " steps and at the end; --val none leaves it out",
                      job->report.val_tokens, job->val.item[0],
                      job->val.n > 1 ? " and the others" : "", job->val_every);
}

uint64_t cli_val_next(const cli_job *job, uint64_t step) {
  return job->plan_config.val_tokens ? step / job->val_every * job->val_every + job->val_every
                                     : UINT64_MAX;
}

bool cli_val_due(const cli_job *job, uint64_t step) {
  return job->plan_config.val_tokens &&
         (step % job->val_every == 0 || step == job->train_config.total_steps);
}

int cli_validate(const cli_job *job, ps_trainer *t, cli_progress *p, cli_run_result *r,
                 uint64_t step, ps_validation *out) {
  char text[96];
  const ps_status st = ps_trainer_validate(t, out);
  if (st != PS_OK) {
    cli_progress_end(p);
    return st == PS_ECANCELLED ? CLI_INTERRUPTED : cli_fail_status(st, false);
  }
  r->n_validations++;
  r->val_s += out->seconds;
  r->val_last = *out;
  r->val_step = step;
  p->val_loss = out->loss;
  cli_progress_note(p, "step %" PRIu64 ": validation loss %.4f, %s, in %.1f s", step, out->loss,
                    cli_right_text(job, out->right, out->loss, text), out->seconds);
  return CLI_OK;
}

void cli_val_metrics(const cli_job *job, cli_json *j, const ps_validation *v) {
  char name[64];
  cli_json_number(j, "val_loss", v->loss);
  if (cli_right(job)) {
    snprintf(name, sizeof name, "val_%s", cli_right(job));
    cli_json_number(j, name, v->right);
  } else {
    cli_json_number(j, "val_perplexity", v->perplexity);
  }
  cli_json_count(j, "val_tokens", v->tokens);
  cli_json_count(j, "val_valid_tokens", v->valid_tokens);
  cli_json_number(j, "val_s", v->seconds);
}

static double share(const cli_run_result *r) { return r->wall_s > 0 ? r->val_s / r->wall_s : 0; }

void cli_val_summary_print(const cli_job *job, FILE *out, const cli_run_result *r) {
  char text[96];
  if (r->n_validations)
    fprintf(out,
            "validation      loss %.4f, %s after step %" PRIu64 "; %" PRIu64
            " validation%s took %.1f s, %.1f%% of the run\n",
            r->val_last.loss, cli_right_text(job, r->val_last.right, r->val_last.loss, text),
            r->val_step, r->n_validations, r->n_validations == 1 ? "" : "s", r->val_s,
            100 * share(r));
}

void cli_val_summary_json(const cli_job *job, cli_json *j, const cli_run_result *r) {
  if (!r->n_validations)
    return;
  cli_json_count(j, "validations", r->n_validations);
  cli_json_count(j, "val_step", r->val_step);
  cli_val_metrics(job, j, &r->val_last);
  cli_json_number(j, "val_total_s", r->val_s);
  cli_json_number(j, "val_share", share(r));
}
