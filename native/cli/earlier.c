/* earlier.c - what an earlier run has left in the run directory: refuses it, or moves it aside, and
 * removes what kills have left. */
#include "cli/cli.h"
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* all that a run writes into its directory: the checkpoints first, last the default of --out */
static const char *const files[] = {"checkpoints",     "metrics.jsonl", "samples.jsonl",
                                    "plan.json",       "run.toml",      "summary.json",
                                    "saved-model.txt", "timeline.json", "model"};
enum { N_FILES = sizeof files / sizeof *files, MAX_EARLIER = 100000 };

/* *has: RUN_DIR/checkpoints has a checkpoint. Returns 0 or an errno. */
static int find_checkpoints(const cli_job *job, bool *has) {
  char *folder = cli_path_join(job->run_dir, files[0]);
  DIR *d = folder ? opendir(folder) : NULL;
  int failed = d ? 0 : folder ? errno : ENOMEM;
  free(folder);
  if (failed == ENOENT || failed == ENOTDIR)
    return 0;
  while (d && !*has) {
    errno = 0;
    const struct dirent *e = readdir(d);
    failed = e ? 0 : errno;
    if (!e)
      break;
    *has = strncmp(e->d_name, "step-", 5) == 0;
  }
  if (d)
    closedir(d);
  return failed;
}

/* The same of the metrics of a step. */
static int find_metrics(const cli_job *job, bool *has) {
  struct stat sb;
  char *path = cli_path_join(job->run_dir, files[1]);
  const int failed = !path ? ENOMEM : stat(path, &sb) == 0 ? 0 : errno;
  *has = !failed && sb.st_size > 0;
  free(path);
  return failed == ENOENT || failed == ENOTDIR ? 0 : failed;
}

/* The run goes on from a checkpoint of its run directory, or was asked to. */
static bool goes_on_here(const cli_job *job) {
  char *from, *slash, *folder;
  if (!job->resume || strcmp(job->resume, "auto") == 0 || strcmp(job->resume, "latest") == 0)
    return job->resume != NULL;
  folder = cli_path_join(job->run_dir, files[0]);
  char *real = folder ? realpath(folder, NULL) : NULL;
  from = realpath(job->resume, NULL);
  if (from && (slash = strrchr(from, '/')))
    *slash = 0;
  const bool here = real && from && strcmp(real, from) == 0;
  free(folder);
  free(real);
  free(from);
  return here;
}

/* @path lies in the checkpoints, which --force moves. */
static bool is_moved(const cli_job *job, const char *path) {
  char *folder = cli_path_join(job->run_dir, files[0]);
  char *real = folder ? realpath(folder, NULL) : NULL, *at = realpath(path, NULL);
  const size_t n = real ? strlen(real) : 0;
  const bool is = n && at && strncmp(at, real, n) == 0 && (!at[n] || at[n] == '/');
  free(folder);
  free(real);
  free(at);
  return is;
}

/* What --force cannot move aside without harm. */
static int check_move(const cli_job *job) {
  struct stat sb;
  char *folder = cli_path_join(job->run_dir, files[0]);
  const bool is_link = folder && lstat(folder, &sb) == 0 && S_ISLNK(sb.st_mode);
  free(folder);
  if (is_link)
    return cli_fail(CLI_REFUSED,
                    "%s/checkpoints is a link, which --force does not move: give another "
                    "--run-dir, or move that run's files yourself",
                    job->run_dir);
  if (is_moved(job, job->model))
    return cli_fail(CLI_REFUSED,
                    "%s %s is among the checkpoints that --force moves aside, and saving reads it: "
                    "give another --run-dir",
                    job->model_option, job->model);
  return CLI_OK;
}

/* *other: the run directory has another run's files, and they may be moved aside. */
static int check(const cli_job *job, bool *other) {
  bool checkpoints = false, metrics = false;
  *other = false;
  if (goes_on_here(job))
    return CLI_OK;
  int failed = find_checkpoints(job, &checkpoints);
  failed = failed ? failed : find_metrics(job, &metrics);
  if (failed)
    return cli_fail(CLI_REFUSED,
                    "the run directory %s cannot be read, and may have another run: %s",
                    job->run_dir, strerror(failed));
  *other = checkpoints || metrics;
  if (!*other || job->force)
    return *other ? check_move(job) : CLI_OK;
  if (checkpoints)
    return cli_fail(CLI_REFUSED,
                    "the run directory %s has checkpoints of another run: go on from its newest "
                    "one with --resume auto, give another --run-dir, or begin anew with --force, "
                    "which moves that run's files into a folder earlier-N there",
                    job->run_dir);
  return cli_fail(
      CLI_REFUSED,
      "the run directory %s has metrics of another run, which left no checkpoint: "
      "give another --run-dir, or begin anew with --force, which moves that run's files "
      "into a folder earlier-N there",
      job->run_dir);
}

int cli_earlier_check(const cli_job *job) {
  bool other;
  return check(job, &other);
}

/* Makes RUN_DIR/earlier-N, whose path the caller frees; NULL after a message. */
static char *make_earlier(const cli_job *job) {
  char name[32];
  for (unsigned n = 1; n < MAX_EARLIER; n++) {
    snprintf(name, sizeof name, "earlier-%u", n);
    char *path = cli_path_join(job->run_dir, name);
    if (path && mkdir(path, 0777) == 0)
      return path;
    const int failed = path ? errno : ENOMEM;
    if (failed != EEXIST)
      cli_fail(CLI_FAILED, "%s/%s cannot be made: %s", job->run_dir, name, strerror(failed));
    free(path);
    if (failed != EEXIST)
      return NULL;
  }
  cli_fail(CLI_FAILED, "%s has %u earlier runs: give another --run-dir", job->run_dir, MAX_EARLIER);
  return NULL;
}

int cli_earlier_move(const cli_job *job, cli_progress *p) {
  bool other;
  int code = check(job, &other);
  if (code != CLI_OK || !other)
    return code;
  char *earlier = make_earlier(job);
  if (!earlier)
    return CLI_FAILED;
  const int n = job->default_out ? N_FILES : N_FILES - 1;
  for (int i = 0; i < n && code == CLI_OK; i++) {
    char *from = cli_path_join(job->run_dir, files[i]), *to = cli_path_join(earlier, files[i]);
    if (!from || !to || (rename(from, to) != 0 && errno != ENOENT))
      code = cli_fail(CLI_FAILED, "%s/%s cannot be moved into %s: %s", job->run_dir, files[i],
                      earlier, strerror(from && to ? errno : ENOMEM));
    free(from);
    free(to);
  }
  if (code == CLI_OK)
    cli_progress_note(p, "the earlier run's files in %s are now in %s", job->run_dir, earlier);
  else
    rmdir(earlier); /* where nothing was moved */
  free(earlier);
  return code;
}

/* @name is FILE.X.part, as cli_file_replace() names it, of a file of a run. */
static bool is_part(const char *name) {
  for (int i = 0; i < N_FILES; i++) {
    const size_t n = strlen(files[i]);
    if (strncmp(name, files[i], n) == 0 && name[n] == '.' &&
        strspn(name + n + 1, "0123456789abcdef") == 16 && strcmp(name + n + 17, ".part") == 0)
      return true;
  }
  return false;
}

void cli_leftovers_clear(const cli_job *job, bool locked) {
  char *folder = cli_path_join(job->run_dir, files[0]);
  if (folder && access(folder, F_OK) == 0)
    (void)ps_checkpoints_prune(folder, UINT64_MAX); /* none but what was cut off */
  free(folder);
  DIR *d = locked ? opendir(job->run_dir) : NULL;
  for (const struct dirent *e; d && (e = readdir(d));)
    if (is_part(e->d_name))
      (void)unlinkat(dirfd(d), e->d_name, 0);
  if (d)
    closedir(d);
  if (job->out)
    (void)ps_model_dir_tidy(job->out); /* the save says what cannot be written */
}
