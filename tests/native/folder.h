/* folder.h - folders that native tests make. */
#ifndef PS_TESTS_FOLDER_H
#define PS_TESTS_FOLDER_H
#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

/* Remove a folder of files; one that is not there is no error. */
static inline void remove_folder(const char *folder) {
  DIR *d = opendir(folder);
  if (!d)
    return;
  for (struct dirent *e; (e = readdir(d));)
    if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
      CHECK(unlinkat(dirfd(d), e->d_name, 0) == 0);
  closedir(d);
  CHECK(rmdir(folder) == 0);
}

/* Whether a file there can be written past the page cache. */
static inline bool has_direct_io(const char *folder) {
  char path[300];
  snprintf(path, sizeof path, "%s/try", folder);
  const int fd = open(path, O_RDWR | O_CREAT | O_DIRECT, 0600);
  const bool has = fd >= 0 && posix_fallocate(fd, 0, 4096) == 0;
  if (fd >= 0)
    close(fd);
  (void)unlink(path);
  return has;
}

#endif
