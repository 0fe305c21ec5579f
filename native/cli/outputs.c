/* outputs.c - folders for output: checked before anything runs, made when there is something to write. */
#include "cli.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char *cli_path_join(const char *folder, const char *name) {
  size_t bytes = strlen(folder) + strlen(name) + 2;
  char *path = malloc(bytes);
  if (path)
    snprintf(path, bytes, "%s%s%s", folder, folder[0] && folder[strlen(folder) - 1] == '/' ? "" : "/", name);
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

/* Make @path and its parents; *n_made is how many of its last components had to be made. On failure (errno is the result)
 * nothing that was made stays. */
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
static char *plain(const char *path) {
  char *copy = strdup(path);
  for (size_t n = copy ? strlen(copy) : 0; n > 1 && copy[n - 1] == '/'; n--)
    copy[n - 1] = 0;
  return copy;
}

int cli_folder_make(const char *path) {
  char *copy = plain(path);
  unsigned n_made;
  int failed = copy ? make_all(copy, &n_made) : ENOMEM;
  free(copy);
  return failed;
}

int cli_folder_make_parent(const char *path) {
  char *copy = plain(path), *slash = copy ? strrchr(copy, '/') : NULL;
  unsigned n_made;
  int failed = copy ? 0 : ENOMEM;
  if (slash && slash != copy) {
    *slash = 0;
    failed = make_all(copy, &n_made);
  }
  free(copy);
  return failed;
}

int cli_folder_check(const char *path, const char *option) {
  char *copy = plain(path), *probe = NULL;
  unsigned n_made = 0;
  int failed = copy ? make_all(copy, &n_made) : ENOMEM;
  if (!failed) {
    probe = cli_path_join(copy, ".penstock-XXXXXX");
    int fd = probe ? mkstemp(probe) : -1;
    failed = fd < 0 ? (probe ? errno : ENOMEM) : 0;
    if (fd >= 0) {
      close(fd);
      unlink(probe);
    }
    unmake(copy, n_made);
  }
  free(probe);
  free(copy);
  return failed ? cli_fail(CLI_REFUSED, "--%s %s cannot be written: %s", option, path, strerror(failed)) : CLI_OK;
}
