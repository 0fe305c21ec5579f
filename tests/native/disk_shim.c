/* disk_shim.c - preloaded (LD_PRELOAD) by tests/save_sweep.py: counts a program's disk calls, and
 * kills the process at the Nth that changes something, or fails the Nth of all, or writes half of
 * what the Nth write was asked for. Refuses RENAME_EXCHANGE when told to.
 * With DISK_SHIM_FSYNC_MS in the environment every fsync takes so long. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { COUNT, KILL, FAIL, SHORT };
typedef enum kind { LOOKS, CHANGES, WRITES } kind;
static atomic_long n_calls, nth;
static atomic_int mode, exchange_error;
static atomic_bool armed;

/* From now on: at call @n do @what; with @n 0 only count the calls that @what is for. */
void disk_shim_arm(int what, long n) {
  atomic_store(&n_calls, 0);
  atomic_store(&mode, what);
  atomic_store(&nth, n);
  atomic_store(&armed, true);
}
void disk_shim_refuse_exchange(int error) { atomic_store(&exchange_error, error); }
long disk_shim_calls(void) { return atomic_load(&n_calls); }

/* Whether the call fails (or, in mode SHORT, is a short one). */
static bool hit(kind k) {
  if (!atomic_load(&armed)) return false;
  const int what = atomic_load(&mode);
  if (what == COUNT || (what == SHORT && k != WRITES) || (what == KILL && k == LOOKS)) return false;
  if (atomic_fetch_add(&n_calls, 1) + 1 != atomic_load(&nth)) return false;
  if (what == KILL) syscall(SYS_exit_group, 99);
  errno = k == WRITES ? ENOSPC : EIO;
  return true;
}

#define REAL(name)                 \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define SHIM(kind, result, failed, name, params, ...) \
  result name params {                                \
    REAL(name);                                       \
    return hit(kind) ? failed : real(__VA_ARGS__);    \
  }
#define OPEN(name, params, ...)                                                 \
  int name params {                                                             \
    va_list list;                                                               \
    va_start(list, flags);                                                      \
    const mode_t m = va_arg(list, mode_t);                                      \
    va_end(list);                                                               \
    REAL(name);                                                                 \
    return hit(flags & O_CREAT ? CHANGES : LOOKS) ? -1 : real(__VA_ARGS__, m);  \
  }

OPEN(open, (const char *p, int flags, ...), p, flags)
OPEN(open64, (const char *p, int flags, ...), p, flags)
OPEN(openat, (int d, const char *p, int flags, ...), d, p, flags)
OPEN(openat64, (int d, const char *p, int flags, ...), d, p, flags)
SHIM(CHANGES, int, -1, mkdir, (const char *p, mode_t m), p, m)
SHIM(CHANGES, int, -1, mkdirat, (int d, const char *p, mode_t m), d, p, m)
SHIM(CHANGES, int, -1, rename, (const char *a, const char *b), a, b)
SHIM(CHANGES, int, -1, renameat, (int c, const char *a, int d, const char *b), c, a, d, b)
SHIM(CHANGES, int, -1, unlink, (const char *p), p)
SHIM(CHANGES, int, -1, unlinkat, (int d, const char *p, int f), d, p, f)
SHIM(CHANGES, int, -1, rmdir, (const char *p), p)
SHIM(CHANGES, int, -1, link, (const char *a, const char *b), a, b)
SHIM(CHANGES, int, -1, linkat, (int c, const char *a, int d, const char *b, int f), c, a, d, b, f)
SHIM(LOOKS, int, -1, stat, (const char *p, struct stat *b), p, b)
SHIM(LOOKS, int, -1, stat64, (const char *p, struct stat64 *b), p, b)
SHIM(LOOKS, int, -1, lstat, (const char *p, struct stat *b), p, b)
SHIM(LOOKS, int, -1, lstat64, (const char *p, struct stat64 *b), p, b)
SHIM(LOOKS, int, -1, fstat, (int d, struct stat *b), d, b)
SHIM(LOOKS, int, -1, fstat64, (int d, struct stat64 *b), d, b)
SHIM(LOOKS, int, -1, fstatat, (int d, const char *p, struct stat *b, int f), d, p, b, f)
SHIM(LOOKS, int, -1, fstatat64, (int d, const char *p, struct stat64 *b, int f), d, p, b, f)
SHIM(LOOKS, int, -1, faccessat, (int d, const char *p, int m, int f), d, p, m, f)
SHIM(LOOKS, int, -1, access, (const char *p, int m), p, m)
SHIM(CHANGES, int, -1, fchmod, (int d, mode_t m), d, m)
SHIM(CHANGES, int, -1, fchown, (int d, uid_t u, gid_t g), d, u, g)
SHIM(CHANGES, int, -1, futimens, (int d, const struct timespec t[2]), d, t)
SHIM(LOOKS, int, -1, flock, (int d, int o), d, o)
SHIM(LOOKS, DIR *, NULL, opendir, (const char *p), p)
SHIM(LOOKS, DIR *, NULL, fdopendir, (int d), d)
SHIM(LOOKS, struct dirent *, NULL, readdir, (DIR *d), d)
SHIM(LOOKS, struct dirent64 *, NULL, readdir64, (DIR *d), d)

int fsync(int fd) {
  REAL(fsync);
  const char *ms = getenv("DISK_SHIM_FSYNC_MS");
  const long n = ms ? atol(ms) : 0;
  struct timespec left = {n / 1000, n % 1000 * 1000000};
  while (n && nanosleep(&left, &left) != 0) continue;
  return hit(LOOKS) ? -1 : real(fd);
}

int renameat2(int c, const char *a, int d, const char *b, unsigned flags) {
  REAL(renameat2);
  if (hit(CHANGES)) return -1;
  if (flags & RENAME_EXCHANGE && atomic_load(&exchange_error)) {
    errno = atomic_load(&exchange_error);
    return -1;
  }
  return real(c, a, d, b, flags);
}

/* What fails to close is closed all the same. */
int close(int fd) {
  REAL(close);
  const bool failed = hit(LOOKS);
  const int why = errno, result = real(fd);
  if (failed) errno = why;
  return failed ? -1 : result;
}

ssize_t write(int fd, const void *data, size_t bytes) {
  REAL(write);
  if (!hit(WRITES)) return real(fd, data, bytes);
  return atomic_load(&mode) == SHORT && bytes > 1 ? real(fd, data, bytes / 2) : -1;
}
