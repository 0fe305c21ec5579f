/* checkpoints.c - the checkpoints of `penstock train`: which one a run goes on from, and writing
 * them. A checkpoint that cannot be written is a warning, and the run goes on. */
#include "cli/cli.h"
#include <errno.h>
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
      return cli_fail_status(st, true);
  }
  (void)ps_checkpoint_get_info(*out, &info);
  if (job->steps && info.step > job->steps) {
    const int code = cli_fail(CLI_REFUSED,
                              "%s is of step %llu, past --steps %llu: raise --steps, or give an "
                              "older checkpoint",
                              ps_checkpoint_dir(*out), (unsigned long long)info.step,
                              (unsigned long long)job->steps);
    ps_checkpoint_close(*out);
    *out = NULL;
    return code;
  }
  job->first_step = info.step;
  take(&job->tokens_per_step, info.tokens_per_step);
  take(&job->chunk_tokens, info.chunk_tokens);
  take(&job->chunks_per_round, info.chunks_per_round);
  if (job->chunk_tokens == info.chunk_tokens && job->chunks_per_round == info.chunks_per_round)
    take(&job->first_round_chunks, info.first_round_chunks);
  take(&job->head_slice_tokens, info.head_slice_tokens);
  return CLI_OK;
}

static bool write_one(const cli_job *job, ps_trainer *t, uint64_t step, const char *folder,
                      char path[PATH_MAX]) {
  const int failed = cli_folder_make(folder);
  ps_status st = PS_OK;
  if (failed)
    fprintf(stderr, "penstock: %s cannot be made: %s\n", folder, strerror(failed));
  else if ((st = ps_checkpoint_path(path, PATH_MAX, folder, step)) == PS_OK)
    st = ps_trainer_checkpoint(t, path);
  if (st != PS_OK)
    cli_fail_status(st, false);
  if (failed || st != PS_OK)
    return false;
  if (ps_checkpoints_prune(folder, job->keep) != PS_OK)
    cli_fail_status(PS_EIO, false);
  return true;
}

void cli_checkpoint(cli_job *job, ps_trainer *t, cli_progress *p, uint64_t step) {
  char path[PATH_MAX], *folder = folder_of(job);
  const double before = cli_now_s();
  cli_progress_end(p);
  const bool written = folder && write_one(job, t, step, folder, path);
  free(folder);
  if (written) {
    job->checkpointed = step;
    cli_progress_note(p, "checkpoint %s, in %.1f s", path, cli_now_s() - before);
    return;
  }
  cli_fail(CLI_FAILED,
           job->checkpointed
               ? "no checkpoint of step %llu was written; the run goes on, and the newest "
                 "checkpoint is of step %llu"
               : "no checkpoint of step %llu was written; the run goes on without any",
           (unsigned long long)step, (unsigned long long)job->checkpointed);
}

/* ---- metrics.jsonl of a resumed run ---------------------------------------------------------- */

/* The lines of the steps before @first. What follows is trained again. */
static size_t whole_lines(const char *text, size_t bytes, uint64_t first) {
  size_t kept = 0;
  for (size_t at = 0; at < bytes;) {
    const char *end = memchr(text + at, '\n', bytes - at);
    unsigned long long step;
    if (!end || sscanf(text + at, "{\"step\": %llu,", &step) != 1 || step >= first)
      break;
    kept = at = (size_t)(end - text) + 1;
  }
  return kept;
}

int cli_metrics_keep(const char *path, uint64_t first_step, FILE **out) {
  struct stat sb;
  FILE *old = first_step ? fopen(path, "rb") : NULL;
  char *text = NULL;
  size_t n = 0;
  if (first_step && !old && errno != ENOENT)
    return cli_fail(CLI_FAILED, "%s cannot be read: %s", path, strerror(errno));
  if (old && fstat(fileno(old), &sb) == 0 && (text = malloc((size_t)sb.st_size + 1)))
    n = whole_lines(text, fread(text, 1, (size_t)sb.st_size, old), first_step);
  const bool failed = old && (!text || ferror(old));
  if (old)
    fclose(old);
  int code = failed ? cli_fail(CLI_FAILED, "%s cannot be read", path) : CLI_OK;
  if (n)
    text[n - 1] = 0; /* cli_file_replace() ends the last line */
  if (code == CLI_OK)
    code = cli_file_replace(path, n ? text : NULL, out);
  free(text);
  return code;
}
