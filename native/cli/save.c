/* save.c - saves the trained model: checks --out before a run, and tries again where it cannot be
 * written at the end. */
#include "cli/cli.h"
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* ---- before the run -------------------------------------------------------------------------- */

/* @name is a file of a model. So is .penstock-new, which a save that was cut off leaves. */
static bool is_model_file(const char *name) {
  size_t n = strlen(name);
  return strcmp(name, "config.json") == 0 || strcmp(name, ".penstock-new") == 0 ||
         strstr(name, ".safetensors.index.json") ||
         (n > strlen(".safetensors") &&
          strcmp(name + n - strlen(".safetensors"), ".safetensors") == 0);
}

int cli_out_check_empty(const cli_job *job, const char *path) {
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
    if (is_model_file(e->d_name))
      code = cli_fail(
          CLI_REFUSED,
          "--out %s already has a model (%s): give another directory, or replace it with --force",
          path, e->d_name);
  }
  if (d)
    closedir(d);
  return failed ? cli_fail(CLI_REFUSED, "--out %s cannot be listed, and may have a model: %s", path,
                           strerror(failed))
                : code;
}

/* ---- the model that a run has saved before --------------------------------------------------- */

static int select_model_file(const struct dirent *e) { return is_model_file(e->d_name); }

/* What is in @out now: its path, and name, bytes and time of each file of the model. The caller
 * frees it; NULL: there is no model, or it cannot be told. */
static char *describe_model(const char *out) {
  char *path = realpath(out, NULL), *text = NULL;
  struct dirent **entry = NULL;
  size_t bytes;
  int n = path ? scandir(path, &entry, select_model_file, alphasort) : -1;
  FILE *f = n > 0 ? open_memstream(&text, &bytes) : NULL;
  bool whole = f && fputs(path, f) >= 0;
  for (int i = 0; i < n; i++) {
    char *file = cli_path_join(path, entry[i]->d_name);
    struct stat st;
    whole = whole && file && stat(file, &st) == 0 &&
            fprintf(f, "\n%s %lld bytes %lld.%09ld", entry[i]->d_name, (long long)st.st_size,
                    (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec) > 0;
    free(file);
    free(entry[i]);
  }
  free(entry);
  free(path);
  if (f && fclose(f) == 0 && whole)
    return text;
  free(text);
  return NULL;
}

static char *note_path(const cli_job *job) {
  return cli_path_join(job->run_dir, "saved-model.txt");
}

/* Notes what was saved, where the run has checkpoints to go on from. Without the note the model is
 * only kept more carefully. */
static void note_model(const cli_job *job) {
  char *folder = cli_path_join(job->run_dir, "checkpoints"), *path = note_path(job),
       *text = describe_model(job->out);
  if (folder && access(folder, F_OK) == 0 && path && text)
    (void)cli_file_replace(path, text, NULL);
  free(folder);
  free(path);
  free(text);
}

bool cli_out_is_own(const cli_job *job) {
  char *path = note_path(job), *text = describe_model(job->out);
  const size_t bytes = text ? strlen(text) : 0;
  char *noted = malloc(bytes + 2);
  FILE *f = path && text && noted ? fopen(path, "rb") : NULL;
  const bool own = f && fread(noted, 1, bytes + 2, f) == bytes + 1 && noted[bytes] == '\n' &&
                   memcmp(noted, text, bytes) == 0;
  if (f)
    fclose(f);
  free(noted);
  free(path);
  free(text);
  return own;
}

/* ---- room ------------------------------------------------------------------------------------ */

/* The file system of @path, or of the nearest parent that exists, has room for the model. */
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
  if (job->lora.rank) /* an adapter is small */
    return CLI_OK;
  ps_model *m;
  const ps_status st = ps_model_create(&m, &job->config);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  const uint64_t need = ps_model_n_elements(m) * ps_dtype_bytes((ps_dtype)job->save_dtype),
                 room = (uint64_t)fs.f_bavail * fs.f_frsize;
  ps_model_destroy(m);
  if (fs.f_blocks == 0 || need <= room) /* some file systems do not say */
    return CLI_OK;
  return cli_fail(
      CLI_REFUSED,
      "--out %s: the model takes %s and the disk has %s free: make room, or give another "
      "directory",
      path, cli_bytes(a, need), cli_bytes(b, room));
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
    free(r->other_out);
    if (!(r->other_out = strdup(line)))
      return GIVE_UP;
    job->out = r->other_out;
    return TRY_AGAIN;
  }
}

/* Save. @aloud: print why it failed. */
static ps_status save_once(const cli_job *job, ps_trainer *t, bool aloud) {
  const int failed = cli_folder_make_parent(job->out);
  cli_saving(CLI_SAVES_MODEL);
  const ps_status st = failed ? PS_EIO : ps_trainer_save(t, job->out, (ps_dtype)job->save_dtype);
  cli_saving(CLI_SAVES_NOTHING);
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
  cli_progress_note(p, "saving %s, %safter %llu complete steps", job->out,
                    r->failed ? "as the error left the model " : "",
                    (unsigned long long)(job->first_step + r->n_done));
  for (;;) {
    const ps_status st = save_once(job, t, asking || !until);
    r->saved = st == PS_OK;
    if (r->saved) {
      note_model(job);
      return CLI_OK;
    }
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
