/* outputs.c - makes folders for output, replaces files in them, locks the run directory; opens
 * input files. */
#include "cli/cli.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

int cli_disk_free(const char *path, uint64_t *bytes) {
  struct statvfs fs = {0};
  char *place = strdup(path);
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
  *bytes = fs.f_blocks ? (uint64_t)fs.f_bavail * fs.f_frsize : UINT64_MAX;
  return CLI_OK;
}

char *cli_path_join(const char *folder, const char *name) {
  size_t bytes = strlen(folder) + strlen(name) + 2;
  char *path = malloc(bytes);
  if (path)
    snprintf(path, bytes, "%s%s%s", folder,
             folder[0] && folder[strlen(folder) - 1] == '/' ? "" : "/", name);
  return path;
}

/* Remove the last @n components of @path. */
static void unmake(char *path, unsigned n) {
  for (; n; n--) {
    rmdir(path);
    char *slash = strrchr(path, '/');
    if (!slash)
      return;
    *slash = 0;
  }
}

/* Make @path and its parents. *n_made: how many of its last components were made. Returns 0 or an
 * errno; on an error every folder that was made is removed. */
static int make_all(char *path, unsigned *n_made) {
  *n_made = 0;
  for (char *c = path + 1;; c++) {
    if (*c && *c != '/')
      continue;
    char kept = *c;
    *c = 0;
    struct stat st;
    int failed = mkdir(path, 0777) == 0 ? 0 : errno;
    if (failed == EEXIST)
      failed = stat(path, &st) != 0 ? errno : S_ISDIR(st.st_mode) ? 0 : ENOTDIR;
    else if (!failed)
      ++*n_made;
    if (failed) {
      char *slash = strrchr(path, '/');
      if (slash) {
        *slash = 0;
        unmake(path, *n_made);
      }
      return failed;
    }
    *c = kept;
    if (!kept)
      return 0;
  }
}

/* A copy without trailing slashes. */
static char *without_slashes(const char *path) {
  char *copy = strdup(path);
  for (size_t n = copy ? strlen(copy) : 0; n > 1 && copy[n - 1] == '/'; n--)
    copy[n - 1] = 0;
  return copy;
}

int cli_folder_make(const char *path) {
  char *copy = without_slashes(path);
  unsigned n_made;
  int failed = copy ? make_all(copy, &n_made) : ENOMEM;
  free(copy);
  return failed;
}

/* A copy of the path up to its last component; "" for a component of the working directory or of
 * the root. */
static char *parent_of(const char *path) {
  char *copy = without_slashes(path), *slash = copy ? strrchr(copy, '/') : NULL;
  if (copy)
    *(slash ? slash : copy) = 0;
  return copy;
}

int cli_folder_make_parent(const char *path) {
  char *parent = parent_of(path);
  unsigned n_made;
  const int failed = !parent ? ENOMEM : parent[0] ? make_all(parent, &n_made) : 0;
  free(parent);
  return failed;
}

void cli_folder_note(cli_progress *p, const char *path, const char *option) {
  struct stat st;
  char *parent = parent_of(path);
  if (parent && parent[0] && stat(parent, &st) != 0 && errno == ENOENT)
    cli_progress_note(p, "--%s %s: its parent %s does not exist and will be made", option, path,
                      parent);
  free(parent);
}

int cli_folder_check(const char *path, const char *option) {
  char *copy = without_slashes(path), *probe = NULL;
  unsigned n_made = 0;
  int failed = copy ? make_all(copy, &n_made) : ENOMEM;
  if (!failed) {
    /* a file without a name: it is gone however this process ends */
    int fd = open(copy, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
      probe = cli_path_join(copy, ".penstock-XXXXXX");
      fd = probe ? mkstemp(probe) : -1;
      if (fd >= 0)
        unlink(probe);
    }
    failed = fd < 0 ? (errno ? errno : ENOMEM) : 0;
    if (fd >= 0)
      close(fd);
    unmake(copy, n_made);
  }
  free(probe);
  free(copy);
  return failed ? cli_fail(CLI_REFUSED, "--%s %s cannot be written: %s", option, path,
                           strerror(failed))
                : CLI_OK;
}

FILE *cli_input_open(const char *option, const char *path) {
  struct stat sb = {0};
  errno = 0;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a named pipe is not waited for */
  const bool known = fd >= 0 && fstat(fd, &sb) == 0, regular = known && S_ISREG(sb.st_mode);
  FILE *f = regular ? fdopen(fd, "rb") : NULL;
  if (f)
    return f;
  errno = known && S_ISDIR(sb.st_mode) ? EISDIR : errno;
  cli_fail(CLI_REFUSED, "--%s %s cannot be read: %s", option, path,
           !known || regular || errno == EISDIR ? strerror(errno) : "it is not a regular file");
  if (fd >= 0)
    close(fd);
  return NULL;
}

int cli_file_replace(const char *path, const char *text, FILE **stays_open) {
  const size_t bytes = strlen(path) + 32;
  unsigned long long x;
  char *part = malloc(bytes);
  if (!part)
    return cli_fail(CLI_FAILED, "out of memory");
  bool ok = getrandom(&x, sizeof x, 0) == sizeof x;
  snprintf(part, bytes, "%s.%016llx.part", path, x);
  const int fd = ok ? open(part, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666) : -1;
  FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
  ok = f && (!text || (fputs(text, f) >= 0 && fputc('\n', f) >= 0)) && fflush(f) == 0;
  if (f && !(ok && stays_open))
    ok = fclose(f) == 0 && ok;
  ok = ok && rename(part, path) == 0;
  const int code =
      ok ? CLI_OK : cli_fail(CLI_FAILED, "%s cannot be written: %s", path, strerror(errno));
  if (!ok && fd >= 0)
    unlink(part);
  if (ok && stays_open)
    *stays_open = f;
  free(part);
  return code;
}

/* ---- the run directory's lock ----------------------------------------------------------------
 * The holder of the lock removes the file. A process that has locked a file whose name is gone
 * therefore opens the name again. */

static int open_lock(const char *path, bool make) {
  struct stat by_fd, by_name;
  for (;;) {
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (make ? O_CREAT : 0), 0666);
    if (fd < 0)
      return -1;
    const int err = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    const bool seen = err || (fstat(fd, &by_fd) == 0 && stat(path, &by_name) == 0);
    const int unseen = seen ? 0 : errno;
    if (err || (seen && by_fd.st_ino == by_name.st_ino && by_fd.st_dev == by_name.st_dev)) {
      errno = err;
      return fd;
    }
    close(fd);
    if (unseen && unseen != ENOENT) { /* the disk fails: trying again may never end */
      errno = unseen;
      return -1;
    }
  }
}

static int refuse_locked(const char *run_dir, int fd) {
  char text[32] = {0};
  const long pid = pread(fd, text, sizeof text - 1, 0) > 0 ? strtol(text, NULL, 10) : 0;
  close(fd);
  if (pid <= 0)
    return cli_fail(CLI_REFUSED, "--run-dir %s is in use by another run: give another directory",
                    run_dir);
  return cli_fail(
      CLI_REFUSED,
      "--run-dir %s is in use by the run with process id %ld: wait for its end, or give "
      "another directory",
      run_dir, pid);
}

int cli_run_lock(const char *run_dir, bool make, int *fd) {
  char text[32], *path = cli_path_join(run_dir, ".penstock.lock");
  if (!path)
    return cli_fail(CLI_FAILED, "out of memory");
  errno = 0;
  if (*fd < 0)
    *fd = open_lock(path, make);
  const int err = errno;
  free(path);
  if (*fd < 0)
    return !make && (err == ENOENT || err == ENOTDIR)
               ? CLI_OK
               : cli_fail(make ? CLI_FAILED : CLI_REFUSED, "--run-dir %s cannot be locked: %s",
                          run_dir, strerror(err));
  if (err == EWOULDBLOCK) {
    const int held = *fd;
    *fd = -1;
    return refuse_locked(run_dir, held);
  }
  if (err)
    fprintf(stderr, "penstock: --run-dir %s is not locked against a second run: %s\n", run_dir,
            strerror(err));
  const int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
  if (make && (ftruncate(*fd, 0) != 0 || pwrite(*fd, text, (size_t)n, 0) != n))
    return cli_fail(CLI_FAILED, "--run-dir %s: its lock cannot be written: %s", run_dir,
                    strerror(errno));
  return CLI_OK;
}

void cli_run_unlock(const char *run_dir, int fd) {
  char *path = fd >= 0 ? cli_path_join(run_dir, ".penstock.lock") : NULL;
  if (path)
    unlink(path);
  if (fd >= 0)
    close(fd);
  free(path);
}
