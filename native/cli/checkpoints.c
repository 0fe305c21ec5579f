/* checkpoints.c - the checkpoints of `penstock train`: which one a run goes on from, and when the
 * next is written. A checkpoint that cannot be written is a warning, and the run goes on. */
#include "cli/cli.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static char *folder_of(const cli_job *job) { return cli_path_join(job->run_dir, "checkpoints"); }

static int find_newest(const cli_job *job, ps_checkpoint **out) {
  char *folder = folder_of(job);
  const bool must = strcmp(job->resume, "latest") == 0;
  if (!folder)
    return cli_fail(CLI_FAILED, "out of memory");
  const ps_status st = ps_checkpoint_latest(out, folder);
  int code = st == PS_OK ? CLI_OK : cli_fail_status(st, true);
  struct stat sb;
  if (code == CLI_OK && !*out && lstat(folder, &sb) == 0 && S_ISLNK(sb.st_mode) &&
      stat(folder, &sb) != 0)
    code = cli_fail(CLI_REFUSED,
                    "%s is a link to what is not there: mount its disk, or remove the link to "
                    "begin anew",
                    folder);
  if (code == CLI_OK && !*out && must)
    code = cli_fail(CLI_REFUSED,
                    "--resume latest: %s has no checkpoint: give --resume auto, which then begins "
                    "anew, or the directory of a checkpoint",
                    folder);
  free(folder);
  return code;
}

/* What decides how sums are rounded is the checkpoint's, unless the user chooses otherwise. */
static void take(uint64_t *option, uint64_t value) { *option = *option ? *option : value; }

int cli_resume_open(cli_job *job, ps_checkpoint **out) {
  ps_plan_config *c = &job->plan_config;
  ps_checkpoint_info info = {.struct_bytes = sizeof info};
  *out = NULL;
  if (!job->resume)
    return CLI_OK;
  if (strcmp(job->resume, "latest") == 0 || strcmp(job->resume, "auto") == 0) {
    const int code = find_newest(job, out);
    if (code != CLI_OK || !*out)
      return code;
  } else {
    const ps_status st = ps_checkpoint_open(out, job->resume);
    if (st != PS_OK)
      return cli_fail_given("--resume", st);
  }
  (void)ps_checkpoint_get_info(*out, &info);
  if (job->train_config.total_steps && info.step > job->train_config.total_steps) {
    const int code = cli_fail(CLI_REFUSED,
                              "%s is of step %llu, past --steps %llu: raise --steps, or give an "
                              "older checkpoint",
                              ps_checkpoint_dir(*out), (unsigned long long)info.step,
                              (unsigned long long)job->train_config.total_steps);
    ps_checkpoint_close(*out);
    *out = NULL;
    return code;
  }
  job->first_step = info.step;
  job->checkpoints.newest = strdup(ps_checkpoint_dir(*out));
  take(&c->tokens_per_step, info.tokens_per_step);
  take(&c->chunk_tokens, info.chunk_tokens);
  take(&c->chunks_per_round, info.chunks_per_round);
  if (c->chunk_tokens == info.chunk_tokens && c->chunks_per_round == info.chunks_per_round)
    take(&c->first_round_chunks, info.first_round_chunks);
  if (c->first_round_chunks == info.first_round_chunks)
    take(&c->first_rounds, info.first_rounds);
  take(&c->head_slice_tokens, info.head_slice_tokens);
  return CLI_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

static bool wanted(const cli_job *job) {
  return job->checkpoint_every.steps || job->checkpoint_every.seconds > 0;
}

/* One sentence: the step, the cause, and what there is. */
static void not_written(const cli_job *job, uint64_t step, const char *why) {
  static const char *const then[2][2] = {{"the run goes on, without any checkpoint so far",
                                          "the run goes on, and the newest checkpoint is "},
                                         {"there is no checkpoint", "the newest checkpoint is "}};
  const char *newest = job->checkpoints.newest;
  cli_fail(CLI_FAILED, "no checkpoint of step %llu was written: %s; %s%s", (unsigned long long)step,
           why, then[job->checkpoints.run_over][newest != NULL], newest ? newest : "");
}

static void begin(cli_job *job, ps_trainer *t, uint64_t step, const char *folder) {
  cli_checkpoints *c = &job->checkpoints;
  char path[PATH_MAX], why[PATH_MAX + 64];
  const int failed = cli_folder_make(folder);
  if (failed)
    snprintf(why, sizeof why, "%s cannot be made: %s", folder, strerror(failed));
  else if (ps_checkpoint_path(path, sizeof path, folder, step) != PS_OK)
    snprintf(why, sizeof why, "%s", ps_last_error());
  else if (!(c->writing = strdup(path)))
    snprintf(why, sizeof why, "out of memory");
  else if (ps_trainer_checkpoint_begin(t, path) != PS_OK)
    snprintf(why, sizeof why, "%s", ps_last_error());
  else
    return;
  free(c->writing);
  c->writing = NULL;
  not_written(job, step, why);
}

/* The disk has room for @n checkpoints of the whole model and for the model itself. Those of
 * adapters are small. */
static bool has_room(const cli_job *job, uint64_t n) {
  const uint32_t recipe = job->plan_config.recipe;
  const bool wide = recipe != PS_RECIPE_BF16 && recipe != PS_RECIPE_FP8; /* a master copy */
  const double state = job->plan_config.state_bits == 8          ? 1.1
                       : wide && recipe != PS_RECIPE_FP24_MASTER ? 4
                                                                 : 2,
               bytes = (wide ? 4 : 2) +
                       state * (job->plan_config.optimizer == PS_OPTIMIZER_ADAMW ? 2 : 1);
  uint64_t elements, room;
  if (job->plan_config.lora.rank)
    return true;
  return cli_disk_free(job->run_dir, &room) == CLI_OK &&
         cli_model_elements(job, &elements) == CLI_OK &&
         ((double)n * bytes + 4) * (double)elements <= (double)room;
}

void cli_checkpoint_note(cli_job *job, cli_progress *p) {
  if (job->checkpoint_chosen && !has_room(job, job->keep + 1)) {
    cli_progress_note(p,
                      "the disk of %s has no room for %llu checkpoints beside the model: the run "
                      "writes none before it is stopped",
                      job->run_dir, (unsigned long long)job->keep + 1);
    job->checkpoint_every = (cli_every){0};
    job->checkpoint_chosen = false;
  } else if (job->checkpoint_chosen)
    cli_progress_note(p, "a checkpoint every %.0f minutes: --checkpoint-every 0 writes none",
                      job->checkpoint_every.seconds / 60);
  else if (!wanted(job) && (job->resume || job->keep != CLI_KEEP))
    cli_progress_note(p, "this run writes no checkpoint%s: --checkpoint-every N says how often to",
                      job->checkpoint_given ? "" : " before it is stopped");
}

uint64_t cli_checkpoint_room(const cli_job *job, uint64_t step, uint64_t noted, uint64_t n) {
  const cli_checkpoints *c = &job->checkpoints;
  const uint64_t every = job->checkpoint_every.steps;
  if (!every)
    return n;
  uint64_t left = every - step % every;
  if (c->writing && c->begun > noted)
    left--;
  return left < n ? left : n;
}

void cli_checkpoint_due(cli_job *job, ps_trainer *t, cli_progress *p, uint64_t step, bool now) {
  cli_checkpoints *c = &job->checkpoints;
  const cli_every *every = &job->checkpoint_every;
  const bool chosen = !wanted(job) || job->checkpoint_chosen; /* not the user's wish */
  if ((!wanted(job) && (!now || job->checkpoint_given)) || step == c->begun)
    return;
  if (now && chosen && !has_room(job, 1)) {
    not_written(job, step, "the disk has no room for it beside the model");
    return;
  }
  if (!now && every->steps && step % every->steps)
    return;
  /* an interval counts from the begin of the last checkpoint, but two do not run at once */
  if (!now && !every->steps && (cli_now_s() < c->due_s || c->writing))
    return;
  cli_checkpoint_end(job, t, p, true);
  char *folder = folder_of(job);
  c->begun = step;
  c->due_s = cli_now_s() + every->seconds;
  if (folder)
    begin(job, t, step, folder);
  else
    not_written(job, step, "out of memory");
  free(folder);
}

static void written(cli_job *job, cli_progress *p, const ps_checkpoint_report *r) {
  cli_checkpoints *c = &job->checkpoints;
  char size[32], *folder = folder_of(job);
  free(c->newest);
  c->newest = c->writing;
  cli_progress_end(p);
  cli_progress_note(p,
                    "checkpoint %s: %s on the disk after %.1f s (%.2f GB/s), for which updates "
                    "waited %.1f s",
                    c->newest, cli_bytes(size, r->bytes), r->durable_s,
                    (double)r->bytes * 1e-9 / r->durable_s, r->waited_s);
  if (!folder || ps_checkpoints_prune(folder, job->keep) != PS_OK)
    cli_fail_status(folder ? PS_EIO : PS_ENOMEM, false);
  free(folder);
}

void cli_checkpoint_end(cli_job *job, ps_trainer *t, cli_progress *p, bool wait) {
  cli_checkpoints *c = &job->checkpoints;
  ps_checkpoint_report r = {.struct_bytes = sizeof r};
  if (!c->writing || (!wait && ps_trainer_checkpoint_running(t)))
    return;
  cli_saving(CLI_SAVES_CHECKPOINT);
  const ps_status st = ps_trainer_checkpoint_end(t, &r);
  cli_saving(CLI_SAVES_NOTHING);
  if (st == PS_OK)
    written(job, p, &r);
  else {
    cli_progress_end(p);
    not_written(job, c->begun, ps_last_error());
    free(c->writing);
  }
  c->writing = NULL;
}
