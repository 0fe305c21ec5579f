/* saved.c - which model is in --out: whether it is the one that was there when the run began, and
 * whether this run saved it.
 *
 * saved-model.txt in the run directory has a paragraph for each model that may be in --out:
 *   step 12, bf16
 *   /path/of/out
 *   NAME BYTES bytes MTIME           of each file of the model
 * It is written when the new model is whole, before that takes its place: however a run ends, the
 * model in --out is in a paragraph. Where the run directory cannot be written, the new model itself
 * gets the file, as .penstock-note, with a line "run /path/of/run-dir" on top. */
#include "cli/cli.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PENDING  ".penstock-new" /* a whole new model, which comes before the files in --out */
#define OWN_NOTE ".penstock-note"
#define MAX_NOTE (1 << 24)

bool cli_is_model_file(const char *name) {
  size_t n = strlen(name);
  return strcmp(name, "config.json") == 0 || strcmp(name, PENDING) == 0 ||
         strstr(name, ".safetensors.index.json") ||
         (n > strlen(".safetensors") &&
          strcmp(name + n - strlen(".safetensors"), ".safetensors") == 0);
}

static int select_model_file(const struct dirent *e) { return cli_is_model_file(e->d_name); }

static void put_file(FILE *f, const char *name, const struct stat *st) {
  fprintf(f, "%s %lld bytes %lld.%09ld\n", name, (long long)st->st_size,
          (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec);
}

/* The path @as and the model's files in @dir, a line each. *out is the caller's to free, and NULL
 * where there is no model. Returns 0 or an errno. */
static int describe(char **out, const char *dir, const char *as) {
  struct dirent **entry = NULL;
  size_t bytes;
  const int n = scandir(dir, &entry, select_model_file, alphasort);
  int failed = n < 0 && errno != ENOENT && errno != ENOTDIR ? errno : 0;
  char *text = NULL;
  FILE *f = n > 0 ? open_memstream(&text, &bytes) : NULL;
  if (n > 0 && !f)
    failed = ENOMEM;
  if (f)
    fprintf(f, "%s\n", as);
  for (int i = 0; i < n; i++) {
    struct stat st;
    char *file = cli_path_join(dir, entry[i]->d_name);
    const bool known = file && stat(file, &st) == 0;
    if (known && f)
      put_file(f, entry[i]->d_name, &st);
    else if (!failed)
      failed = file ? errno : ENOMEM;
    free(file);
    free(entry[i]);
  }
  free(entry);
  if (f && fclose(f) != 0 && !failed)
    failed = ENOMEM;
  if (failed)
    free(text);
  else
    *out = text;
  return failed;
}

/* ---- the model that was there when the run began --------------------------------------------- */

static int look(char **out, const char *dir) {
  char *real = realpath(dir, NULL);
  *out = NULL;
  if (!real)
    return errno == ENOENT || errno == ENOTDIR ? 0 : errno;
  const int failed = describe(out, real, real);
  free(real);
  return failed;
}

int cli_out_note_seen(cli_job *job) {
  free(job->out_seen);
  job->out_seen = NULL;
  const int failed = look(&job->out_seen, job->out);
  return failed ? cli_fail(CLI_REFUSED, "--out %s cannot be read, and may have a model: %s",
                           job->out, strerror(failed))
                : CLI_OK;
}

bool cli_out_seen_pending(const cli_job *job) {
  return job->out_seen && strstr(job->out_seen, "\n" PENDING " ");
}

/* ---- the model that this run has saved ------------------------------------------------------- */

static char *read_note(const char *folder, const char *name) {
  char *path = cli_path_join(folder, name), *text = NULL;
  struct stat sb;
  FILE *f = path ? fopen(path, "rb") : NULL;
  if (f && fstat(fileno(f), &sb) == 0 && S_ISREG(sb.st_mode) && sb.st_size < MAX_NOTE &&
      (text = malloc((size_t)sb.st_size + 1)))
    text[fread(text, 1, (size_t)sb.st_size, f)] = 0;
  if (f)
    fclose(f);
  free(path);
  return text;
}

/* The line @line of a file is that of a file of the model in @dir. */
static bool is_there(const char *dir, const char *line, size_t n) {
  static const char *const places[] = {PENDING "/", ""};
  char name[NAME_MAX + 1], rest[NAME_MAX + 64] = "", *text = NULL;
  size_t at = n, bytes;
  for (int blanks = 0; at > 0 && blanks < 3;)
    blanks += line[--at] == ' ';
  if (at == 0 || at > NAME_MAX)
    return false;
  snprintf(name, sizeof name, "%.*s", (int)at, line);
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    struct stat st;
    snprintf(rest, sizeof rest, "%s%s", places[i], name);
    char *path = cli_path_join(dir, rest);
    const bool found = path && stat(path, &st) == 0;
    free(path);
    if (!found)
      continue;
    FILE *f = open_memstream(&text, &bytes);
    if (!f)
      return false;
    put_file(f, name, &st);
    const bool same = fclose(f) == 0 && bytes == n + 1 && memcmp(text, line, n) == 0;
    free(text);
    return same;
  }
  return false;
}

/* Whether the paragraph is of the model in @dir. @run: it must name this run's directory. @moved:
 * the model may have been saved elsewhere, and be here by now. */
static bool is_of(const char *part, size_t bytes, const char *dir, const char *run, bool moved,
                  cli_saved_model *m) {
  bool path = false, file = false, own = !run;
  *m = (cli_saved_model){.step = UINT64_MAX};
  for (const char *end = part + bytes; part < end;) {
    const char *stop = memchr(part, '\n', (size_t)(end - part));
    const size_t n = (size_t)((stop ? stop : end) - part);
    unsigned long long step;
    if (path) {
      if (!is_there(dir, part, n))
        return false;
      file = true;
    } else if (*part == '/') {
      path = moved || (n == strlen(dir) && memcmp(part, dir, n) == 0);
      if (!path)
        return false;
    } else if (n > 4 && memcmp(part, "run ", 4) == 0)
      own = own || (n - 4 == strlen(run) && memcmp(part + 4, run, n - 4) == 0);
    else if (sscanf(part, "step %llu, %7[a-z0-9]", &step, m->dtype) == 2)
      m->step = step;
    part += n + 1;
  }
  return path && file && own;
}

int cli_out_is_other(const cli_job *job, const char *dir, bool *is) {
  char *now, *real;
  cli_saved_model m;
  const int failed = look(&now, dir);
  *is = now && (!job->out_seen || strcmp(now, job->out_seen) != 0);
  /* a save that failed may have come so far that its model counts */
  if (*is && job->out_tried && (real = realpath(dir, NULL))) {
    *is = !is_of(job->out_tried, strlen(job->out_tried), real, NULL, false, &m);
    free(real);
  }
  free(now);
  return failed;
}

/* The first paragraph of @text that is of the model in @dir, with its line end; NULL: none. */
static char *find_in(const char *text, const char *dir, const char *run, bool moved,
                     cli_saved_model *m) {
  for (const char *part = text; part && *part;) {
    const char *end = strstr(part, "\n\n");
    const size_t n = end ? (size_t)(end - part) + 1 : strlen(part);
    if (is_of(part, n, dir, run, moved, m))
      return strndup(part, n);
    part = end ? end + 2 : NULL;
  }
  return NULL;
}

/* The paragraph of the model in @out, which is the caller's to free; NULL: this run saved none that
 * is there. */
static char *find(const cli_job *job, const char *out, cli_saved_model *m) {
  static const char *const inside[] = {PENDING "/" OWN_NOTE, OWN_NOTE};
  char *dir = realpath(out, NULL), *run = realpath(job->run_dir, NULL);
  char *text = read_note(job->run_dir, "saved-model.txt");
  /* the default of --out is in the run directory, and moves with it */
  char *found = dir ? find_in(text, dir, NULL, job->default_out != NULL, m) : NULL;
  for (size_t i = 0; i < sizeof inside / sizeof *inside && dir && run && !found; i++) {
    free(text);
    text = read_note(dir, inside[i]);
    found = find_in(text, dir, run, false, m);
  }
  free(text);
  free(run);
  free(dir);
  return found;
}

bool cli_out_is_own(const cli_job *job, cli_saved_model *m) {
  char *found = find(job, job->out, m);
  free(found);
  return found != NULL;
}

/* ---- the note -------------------------------------------------------------------------------- */

static bool sync_folder(const char *path) {
  const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL); /* some disks know no such call */
  if (fd >= 0)
    close(fd);
  return ok;
}

/* Into the run directory, and to the disk, before the model takes its place. */
static bool write_note(const cli_job *job, const char *text) {
  FILE *f = NULL;
  char *path = cli_path_join(job->run_dir, "saved-model.txt");
  const bool replaced = path && cli_file_replace(path, text, &f) == CLI_OK;
  const bool synced = replaced && fsync(fileno(f)) == 0;
  if (f)
    fclose(f);
  free(path);
  return synced && sync_folder(job->run_dir);
}

/* Into the new model. */
static bool write_own_note(const cli_job *job, const char *from, const char *text) {
  char *path = cli_path_join(from, OWN_NOTE), *run = realpath(job->run_dir, NULL);
  FILE *f = path && run ? fopen(path, "wxe") : NULL;
  bool ok =
      f && fprintf(f, "run %s\n%s\n", run, text) > 0 && fflush(f) == 0 && fsync(fileno(f)) == 0;
  if (f)
    ok = fclose(f) == 0 && ok;
  free(path);
  free(run);
  return ok && sync_folder(from);
}

/* The paragraph of @model, then that of @before, which may be NULL. */
static bool note(const cli_job *job, const char *from, const char *model, const char *before,
                 uint64_t step) {
  static const char *const dtypes[] = {
      [PS_F32] = "fp32", [PS_BF16] = "bf16", [CLI_MXFP4] = "mxfp4"};
  char *text = NULL;
  size_t bytes;
  FILE *f = open_memstream(&text, &bytes);
  if (!f)
    return false;
  fprintf(f, "step %llu, %s\n%s", (unsigned long long)step, dtypes[job->save_dtype], model);
  if (before)
    fprintf(f, "\n%s", before);
  bool noted = fclose(f) == 0 && bytes;
  if (noted) {
    text[bytes - 1] = 0; /* cli_file_replace() ends the line */
    noted = write_note(job, text) || write_own_note(job, from, text);
  }
  free(text);
  return noted;
}

void cli_out_note(cli_job *job, const char *from, const char *dir, uint64_t step) {
  cli_saved_model m;
  char *folder = cli_path_join(job->run_dir, "checkpoints"), *before = find(job, dir, &m);
  const bool goes_on = !folder || access(folder, F_OK) == 0 || errno != ENOENT;
  free(job->out_tried);
  job->out_tried = NULL;
  const bool known = describe(&job->out_tried, from, dir) == 0 && job->out_tried;
  if (goes_on && !(known && note(job, from, job->out_tried, before, step)))
    fprintf(stderr,
            "penstock: what is saved in %s cannot be noted: to go on with --resume auto, add "
            "--force\n",
            job->out);
  free(folder);
  free(before);
}
