/* save.c - saves the trained model: checks --out before a run, and tries again where it cannot be
 * written at the end. */
#include "cli/cli.h"
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- before the run -------------------------------------------------------------------------- */

static bool has_file(const char *folder, const char *name) {
  char *path = cli_path_join(folder, name);
  const bool has = path && access(path, F_OK) == 0;
  free(path);
  return has;
}

/* The model's tokenizer would replace one that the user put there. */
static int check_tokenizer(const cli_job *job, const char *path) {
  if (has_file(path, "tokenizer.json") && has_file(job->model, "tokenizer.json"))
    return cli_fail(CLI_REFUSED,
                    "--out %s has a tokenizer.json, which the model's would replace: give another "
                    "directory, or replace it with --force",
                    path);
  return CLI_OK;
}

int cli_out_check_empty(const cli_job *job, const char *path) {
  if (has_file(path, "dataset.json")) /* whose tokenizer the model's would replace */
    return cli_fail(CLI_REFUSED, "--out %s has a data set (dataset.json): give another directory",
                    path);
  if (job->force)
    return CLI_OK;
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
    if (cli_is_model_file(e->d_name))
      code = cli_fail(
          CLI_REFUSED,
          "--out %s already has a model (%s): give another directory, or replace it with --force",
          path, e->d_name);
  }
  if (d)
    closedir(d);
  if (failed)
    return cli_fail(CLI_REFUSED, "--out %s cannot be listed, and may have a model: %s", path,
                    strerror(failed));
  return code == CLI_OK ? check_tokenizer(job, path) : code;
}

/* ---- room ------------------------------------------------------------------------------------ */

int cli_model_elements(const cli_job *job, uint64_t *n) {
  ps_model *m;
  const ps_status st = ps_model_create(&m, &job->config);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  *n = ps_model_n_elements(m);
  ps_model_destroy(m);
  return CLI_OK;
}

/* The disk of @path has room for the model. */
static int check_space(const cli_job *job, const char *path) {
  uint64_t room, n = 0;
  char a[32], b[32];
  int code = cli_disk_free(path, &room);
  if (code != CLI_OK || job->plan_config.lora.rank) /* an adapter is small */
    return code;
  code = cli_model_elements(job, &n);
  const uint64_t need = n * (job->save_dtype == PS_F32 ? 4 : 2); /* of MXFP4 at most */
  if (code != CLI_OK || need <= room)
    return code;
  return cli_fail(
      CLI_REFUSED,
      "--out %s: the model takes %s and the disk has %s free: make room, or give another "
      "directory%s",
      path, cli_bytes(a, need), cli_bytes(b, room), job->default_out ? ", or --no-save" : "");
}

int cli_out_check(const cli_job *job, const char *path) {
  const int code = check_space(job, path);
  return code == CLI_OK ? cli_folder_check(path, "out") : code;
}

/* ---- a save that fails ----------------------------------------------------------------------- */

static const double longest_pause_s = 10;

static bool at_terminal(void) {
  return isatty(STDIN_FILENO) && isatty(STDERR_FILENO) && tcgetpgrp(STDIN_FILENO) == getpgrp();
}

/* Sleep. False: the run was asked to stop meanwhile. */
static bool pause_s(double seconds) {
  const int asked = cli_interrupts();
  for (const double until = cli_now_s() + seconds; cli_now_s() < until;) {
    if (cli_interrupts() != asked)
      return false;
    poll(NULL, 0, 50);
  }
  return true;
}

/* Read a line from the terminal. False: its input has ended, or Ctrl-C came (*stop). @asked: how
 * often Ctrl-C had come before the question. */
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

typedef enum answer { TRY_AGAIN, GIVE_UP, NO_ANSWER } answer;

/* @path, which this takes, is --out from now on. False: out of memory. */
static bool save_elsewhere(cli_job *job, cli_run_result *r, char *path) {
  if (!path)
    return false;
  free(r->other_out);
  free(job->out_seen);
  free(job->out_tried);
  job->out_seen = job->out_tried = NULL;
  job->out = r->other_out = path;
  return true;
}

static answer ask(cli_job *job, cli_run_result *r) {
  char line[4096];
  bool stop = false;
  for (;;) {
    const int asked = cli_interrupts();
    fprintf(stderr,
            "penstock: press Enter to try again, type another directory to save there, or q "
            "to give the model up: ");
    fflush(stderr);
    if (!read_line(line, sizeof line, asked, &stop))
      return stop ? GIVE_UP : NO_ANSWER;
    if (strcmp(line, "q") == 0)
      return GIVE_UP;
    if (!line[0])
      return TRY_AGAIN;
    if (cli_out_check(job, line) != CLI_OK || cli_out_check_empty(job, line) != CLI_OK)
      continue;
    if (!save_elsewhere(job, r, strdup(line)))
      return GIVE_UP;
    if (cli_out_note_seen(job) == CLI_OK)
      return TRY_AGAIN;
  }
}

/* What stands between a model that is whole and its place in --out. */
typedef struct placing {
  cli_job *job;
  uint64_t step;
  bool other; /* --out has a model that was not there when the run began */
} placing;

static ps_status may_place(void *user, const char *from, const char *dir) {
  placing *p = user;
  if (cli_out_is_other(p->job, dir, &p->other))
    return PS_EIO;
  if (p->other)
    return PS_EBUSY;
  cli_out_note(p->job, from, dir, p->step);
  return PS_OK;
}

/* Save. @aloud: print why it failed. *other: --out has another model by now, and nothing else is
 * wrong. */
static ps_status save_once(cli_job *job, ps_trainer *t, uint64_t step, bool aloud, bool *other) {
  placing p = {.job = job, .step = step};
  const int failed = cli_folder_make_parent(job->out);
  ps_status st = failed ? PS_EIO : PS_OK;
  if (!failed && cli_out_is_other(job, job->out, &p.other) == 0 && p.other)
    st = PS_EBUSY; /* before all is written */
  cli_saving(CLI_SAVES_MODEL);
  if (st == PS_OK)
    st = ps_trainer_save_when(t, job->out, cli_save_dtype(job), may_place, &p);
  cli_saving(CLI_SAVES_NOTHING);
  *other = p.other;
  if (failed && aloud)
    cli_fail(CLI_FAILED, "%s cannot be made: %s", job->out, strerror(failed));
  else if (st != PS_OK && aloud && !p.other)
    cli_fail_status(st, false);
  return st;
}

/* The first of OUT-2, OUT-3, ... that is free. The caller frees it; NULL: out of memory. */
static char *free_path_beside(const char *out) {
  struct stat sb;
  char *path = strdup(out), *end, *beside = NULL;
  for (end = path ? path + strlen(path) : NULL; end && end > path + 1 && end[-1] == '/'; end--)
    end[-1] = 0;
  const char *slash = path ? strrchr(path, '/') : NULL, *name = slash ? slash + 1 : path;
  if (path && (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)) {
    char *real = realpath(path, NULL);
    free(path);
    path = real;
  }
  const size_t bytes = path ? strlen(path) + 16 : 0;
  if (path && (beside = malloc(bytes)))
    for (unsigned n = 2; snprintf(beside, bytes, "%s-%u", path, n), lstat(beside, &sb) == 0; n++)
      continue;
  free(path);
  return beside;
}

/* Another run has saved its model into --out meanwhile: neither may be lost. */
static bool save_beside(cli_job *job, cli_run_result *r) {
  char *path = free_path_beside(job->out);
  if (!path) {
    cli_fail(CLI_FAILED, "out of memory");
    return false;
  }
  cli_fail(CLI_FAILED,
           "--out %s has a model that was not there when this run began: it stays, and this run's "
           "model is saved in %s",
           job->out, path);
  r->beside = true;
  return save_elsewhere(job, r, path);
}

int cli_save(cli_job *job, ps_trainer *t, cli_progress *p, cli_run_result *r) {
  double until = 0, pause = 1;
  bool asking = at_terminal();
  if (cli_interrupts() > 1)
    return cli_fail(CLI_INTERRUPTED, "stopped at once; nothing is saved");
  const uint64_t n = job->first_step + r->n_done;
  cli_progress_note(p, "saving %s, %safter %llu complete step%s", job->out,
                    r->failed ? "as the error left the model " : "", (unsigned long long)n,
                    n == 1 ? "" : "s");
  for (;;) {
    bool other;
    const ps_status st = save_once(job, t, job->first_step + r->n_done, asking || !until, &other);
    r->saved = st == PS_OK;
    if (r->saved)
      return CLI_OK;
    if (other && save_beside(job, r))
      continue;
    if (st != PS_EIO)
      return CLI_FAILED;
    const answer said = asking ? ask(job, r) : NO_ANSWER;
    if (said == GIVE_UP)
      return CLI_FAILED;
    if (said == TRY_AGAIN)
      continue;
    asking = false;
    if (!until && job->save_wait > 0) {
      cli_fail(CLI_FAILED,
               "the model is kept in memory, and saving is tried again for %.0f s: make room, or "
               "give the model up with Ctrl-C",
               job->save_wait);
      until = cli_now_s() + job->save_wait;
    }
    const double left = until - cli_now_s();
    if (left <= 0 || !pause_s(left < pause ? left : pause))
      return until ? cli_fail(CLI_FAILED, "the model was not saved") : CLI_FAILED;
    pause = 2 * pause < longest_pause_s ? 2 * pause : longest_pause_s;
  }
}
