/* folder.h - folders that native tests make. */
#ifndef PS_TESTS_FOLDER_H
#define PS_TESTS_FOLDER_H
#include "check.h"
#include <dirent.h>
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

#endif
