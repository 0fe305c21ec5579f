/* retire.c - the old directory of a save: what the new one lacks moves there, all else goes. */
#include "io/stage.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool ps__retire(int from, int to, bool top, bool fresh) {
  DIR *d = ps__list(from);
  bool all = d != NULL;
  (void)fchmod(from, 0700);
  for (const char *e; d && (e = ps__next_name(d));) {
    struct stat a, b;
    bool gone;
    int replaced = 0;
    if (top)
      replaced = fresh ? ps__superseded(to, e) : ps__in_model(e);
    if (top && (strcmp(e, PS__MODEL_PENDING) == 0 || strcmp(e, PS__MODEL_NOTE) == 0))
      replaced = 1;
    if (replaced)
      gone = replaced > 0 && ps__remove_tree(from, e);
    else if (fstatat(from, e, &a, AT_SYMLINK_NOFOLLOW) != 0)
      gone = errno == ENOENT;
    else if (fstatat(to, e, &b, AT_SYMLINK_NOFOLLOW) != 0)
      gone = errno == ENOENT && renameat(from, e, to, e) == 0;
    else if (S_ISDIR(a.st_mode) && S_ISDIR(b.st_mode)) {
      const int x = openat(from, e, PS__DIR_FLAGS), y = openat(to, e, PS__DIR_FLAGS);
      gone = x >= 0 && y >= 0 && ps__retire(x, y, false, fresh) &&
             unlinkat(from, e, AT_REMOVEDIR) == 0;
      if (x >= 0)
        close(x);
      if (y >= 0)
        close(y);
    } else if (S_ISDIR(a.st_mode) || S_ISDIR(b.st_mode))
      gone = false;
    else
      gone = fresh && !ps__same_file(&a, &b) ? renameat(from, e, to, e) == 0
                                             : unlinkat(from, e, 0) == 0;
    all = all && gone;
  }
  all = all && errno == 0;
  if (d)
    closedir(d);
  return all;
}
