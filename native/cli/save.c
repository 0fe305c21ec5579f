/* save.c - keeping the trained model: what is asked of --out before a run, and what happens
 * where it cannot be written at the end. */
#include "cli/cli.h"
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* ---- before the run -------------------------------------------------------------------------- */

/* Is @name one of those that a model directory has? A save that was cut off may have left
 * .penstock-new, which is a model too. */
static bool is_models(const char *name) {
  size_t n = strlen(name);
  return strcmp(name, "config.json") == 0 || strcmp(name, ".penstock-new") == 0 ||
         strstr(name, ".safetensors.index.json") ||
         (n > strlen(".safetensors") &&
          strcmp(name + n - strlen(".safetensors"), ".safetensors") == 0);
}

static int check_empty(const char *path) {
  DIR *d = opendir(path);
  /* cli_folder_check() says what is wrong with a file */
  if (!d && (errno == ENOENT || errno == ENOTDIR))
    return CLI_OK;
  int failed = d ? 0 : errno, code = CLI_OK;
  while (d && code == CLI_OK) {
    errno = 0;
    const struct dirent *e = readdir(d);
    failed = e ? 0 : errno;
    if (!e)
      break;
    if (is_models(e->d_name))
      code = cli_fail(
          CLI_REFUSED,
          "--out %s has a model already (%s): choose another directory, or replace it with --force",
          path, e->d_name);
  }
  if (d)
    closedir(d);
  return failed ? cli_fail(CLI_REFUSED, "--out %s: whether it has a model cannot be seen: %s", path,
                           strerror(failed))
                : code;
}

/* Of the file system that @path is on, or will be. */
static int check_space(const cli_job *job, const char *path) {
  struct statvfs fs = {0};
  char a[32], b[32], *place = strdup(path);
  if (!place)
    return cli_fail(CLI_FAILED, "out of memory");
  while (statvfs(place, &fs) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
    char *slash = strrchr(place, '/');
    if (slash > place)
      *slash = 0;
    else
      strcpy(place, slash ? "/" : ".");
  }
  free(place);
  const uint64_t need =
                     ps_model_n_elements(&job->config) * ps_dtype_bytes((ps_dtype)job->save_dtype),
                 room = (uint64_t)fs.f_bavail * fs.f_frsize;
  if (fs.f_blocks == 0 || need <= room) /* some file systems do not say */
    return CLI_OK;
  return cli_fail(CLI_REFUSED,
                  "--out %s: the model takes %s and there are %s free on that disk: make room, or "
                  "give another directory",
                  path, cli_bytes(a, need), cli_bytes(b, room));
}

int cli_out_check(const cli_job *job, const char *path) {
  int code = job->force ? CLI_OK : check_empty(path);
  if (code == CLI_OK)
    code = check_space(job, path);
  return code == CLI_OK ? cli_folder_check(path, "out") : code;
}

/* ---- a save that fails ----------------------------------------------------------------------- */

static const double longest_pause_s = 10;

static bool at_terminal(void) {
  return isatty(STDIN_FILENO) && isatty(STDERR_FILENO) && tcgetpgrp(STDIN_FILENO) == getpgrp();
}

/* Sleeps, false where the run was asked to stop meanwhile. */
static bool pause_s(double seconds) {
  const int asked = cli_interrupts();
  for (const double until = cli_now_s() + seconds; cli_now_s() < until;) {
    if (cli_interrupts() != asked)
      return false;
    poll(NULL, 0, 50);
  }
  return true;
}

/* A line from the terminal; false where there is none any more, or after Ctrl-C (*stop), which
 * @asked times had come before the question. */
static bool read_line(char *line, size_t room, int asked, bool *stop) {
  struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
  while (poll(&in, 1, 100) <= 0)
    if ((*stop = cli_interrupts() != asked))
      return false;
  const ssize_t n = read(STDIN_FILENO, line, room - 1);
  if (n <= 0)
    return false;
  line[n] = 0;
  line[strcspn(line, "\n")] = 0;
  return true;
}

typedef enum answer { TRY_AGAIN, GIVE_UP, NOBODY_THERE } answer;

static answer ask(cli_job *job, cli_run_result *r) {
  char line[4096];
  bool stop = false;
  for (;;) {
    const int asked = cli_interrupts();
    fprintf(stderr, "penstock: Enter tries again, the name of another directory saves there, q "
                    "gives the model up: ");
    fflush(stderr);
    if (!read_line(line, sizeof line, asked, &stop))
      return stop ? GIVE_UP : NOBODY_THERE;
    if (strcmp(line, "q") == 0)
      return GIVE_UP;
    if (!line[0])
      return TRY_AGAIN;
    if (cli_out_check(job, line) != CLI_OK)
      continue;
    free(r->other_out);
    if (!(r->other_out = strdup(line)))
      return GIVE_UP;
    job->out = r->other_out;
    return TRY_AGAIN;
  }
}

/* Says why when it fails and @aloud. */
static ps_status save_once(const cli_job *job, ps_trainer *t, bool aloud) {
  const int failed = cli_folder_make_parent(job->out);
  cli_saving(true);
  const ps_status st = failed ? PS_EIO : ps_trainer_save(t, job->out, (ps_dtype)job->save_dtype);
  cli_saving(false);
  if (failed && aloud)
    cli_fail(CLI_FAILED, "%s cannot be made: %s", job->out, strerror(failed));
  else if (st != PS_OK && aloud)
    cli_fail_status(st, false);
  return st;
}

int cli_save(cli_job *job, ps_trainer *t, cli_progress *p, cli_run_result *r) {
  double until = 0, pause = 1;
  bool asking = at_terminal();
  if (cli_interrupts() > 1)
    return cli_fail(CLI_INTERRUPTED, "stopped at once; nothing is saved");
  cli_progress_note(p, "saving %s, after %llu complete steps", job->out,
                    (unsigned long long)r->n_done);
  for (;;) {
    const ps_status st = save_once(job, t, asking || !until);
    r->saved = st == PS_OK;
    if (r->saved)
      return CLI_OK;
    if (st != PS_EIO)
      return CLI_FAILED;
    const answer said = asking ? ask(job, r) : NOBODY_THERE;
    if (said == GIVE_UP)
      return CLI_FAILED;
    if (said == TRY_AGAIN)
      continue;
    asking = false;
    if (!until && job->save_wait > 0) {
      cli_fail(CLI_FAILED,
               "the model is kept in memory, and saving is tried again for %.0f s: make room, or "
               "give it up with Ctrl-C",
               job->save_wait);
      until = cli_now_s() + job->save_wait;
    }
    const double left = until - cli_now_s();
    if (left <= 0 || !pause_s(left < pause ? left : pause))
      return until ? cli_fail(CLI_FAILED, "the model was not saved") : CLI_FAILED;
    pause = 2 * pause < longest_pause_s ? 2 * pause : longest_pause_s;
  }
}
