/* disk_shim.c - preloaded (LD_PRELOAD) by tests/save_sweep.py and tests/test_faults.py: counts a
 * program's disk calls, and kills the process at the Nth that changes something, or fails the Nth
 * of all, or writes half of what the Nth write was asked for. Refuses RENAME_EXCHANGE when told to.
 * A program that does not know of it is told by the environment:
 *   DISK_SHIM_FSYNC_MS  every fsync takes so long
 *   DISK_SHIM_WRITE_MS  every write to a file below DISK_SHIM_UNDER takes so long, and then reads
 *                       what it writes
 *   DISK_SHIM_FAIL      the Nth call fails, 0: none; only calls on files below DISK_SHIM_UNDER
 *                       count
 *   DISK_SHIM_KILL      instead: the process is killed at the Nth call that changes something
 *   DISK_SHIM_ERRNO     what it fails with, 0: ENOSPC where it writes, else EIO
 *   DISK_SHIM_LOG       a file that gets a line a call: its name and its file
 *   DISK_SHIM_HOLD_KIB  the process holds so much more memory from its start on */
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
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
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

/* ---- of a program that only has the environment ---------------------------------------------- */

static const char *under;
static int given_error, log_fd = -1;

__attribute__((constructor)) static void hold_by_environment(void) {
  const char *kib = getenv("DISK_SHIM_HOLD_KIB");
  static void *volatile held;
  const size_t bytes = kib ? strtoul(kib, NULL, 10) << 10 : 0;
  if (bytes && (held = malloc(bytes)))
    memset(held, 1, bytes);
}

__attribute__((constructor)) static void arm_by_environment(void) {
  const char *kill_text = getenv("DISK_SHIM_KILL");
  const char *nth_text = kill_text ? kill_text : getenv("DISK_SHIM_FAIL"),
             *error = getenv("DISK_SHIM_ERRNO");
  const char *log = getenv("DISK_SHIM_LOG");
  if (!nth_text)
    return;
  under = getenv("DISK_SHIM_UNDER");
  given_error = error ? atoi(error) : 0;
  if (log)
    log_fd =
        (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  disk_shim_arm(kill_text ? KILL : FAIL, atol(nth_text));
}

/* The file of a call by descriptor, by name, or by a name below a descriptor. */
static void file_of(int fd, const char *path, char *out, size_t room) {
  char link[64];
  ssize_t n = 0;
  if (!path || path[0] != '/') {
    if (fd == AT_FDCWD)
      snprintf(link, sizeof link, "/proc/self/cwd");
    else
      snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = syscall(SYS_readlinkat, AT_FDCWD, link, out, room - 1);
    n = n < 0 ? 0 : n;
  }
  snprintf(out + n, room - (size_t)n, "%s%s", path && path[0] != '/' ? "/" : "", path ? path : "");
}

/* Whether the call's file lies below DISK_SHIM_UNDER; also where there is none. A line of the log
 * gets @name, unless it is NULL. */
static bool counts(const char *name, int fd, const char *path) {
  char file[8192];
  const int before = errno;
  bool result = true;
  if (under) {
    file_of(fd, path, file, sizeof file - 64);
    result = strncmp(file, under, strlen(under)) == 0;
    if (result && name && log_fd >= 0) {
      char line[8192 + 64];
      const int n = snprintf(line, sizeof line, "%s %s\n", name, file);
      syscall(SYS_write, log_fd, line, (size_t)n);
    }
  }
  errno = before;
  return result;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Whether the call fails (or, in mode SHORT, is a short one). */
static bool hit(kind k, const char *name, int fd, const char *path) {
  if (!atomic_load(&armed))
    return false;
  const int what = atomic_load(&mode);
  if (what == COUNT || (what == SHORT && k != WRITES) || (what == KILL && k == LOOKS))
    return false;
  if (!counts(name, fd, path))
    return false;
  if (atomic_fetch_add(&n_calls, 1) + 1 != atomic_load(&nth))
    return false;
  if (what == KILL)
    syscall(SYS_exit_group, 99);
  errno = given_error ? given_error : k == WRITES ? ENOSPC : EIO;
  return true;
}

#define REAL(name)                                                                                 \
  static __typeof__(name) *real;                                                                   \
  if (!real)                                                                                       \
  real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
/* AT: the descriptor and the name that say which file it is. */
#define AT(fd, path) fd, path
#define OF(fd)       fd, NULL
#define BY(path)     AT_FDCWD, path
#define SHIM(kind, file, result, failed, name, params, ...)                                        \
  result name params {                                                                             \
    REAL(name);                                                                                    \
    return hit(kind, #name, file) ? failed : real(__VA_ARGS__);                                    \
  }
#define OPEN(name, file, params, ...)                                                              \
  int name params {                                                                                \
    va_list list;                                                                                  \
    va_start(list, flags);                                                                         \
    const mode_t m = va_arg(list, mode_t);                                                         \
    va_end(list);                                                                                  \
    REAL(name);                                                                                    \
    return hit(flags & O_CREAT ? CHANGES : LOOKS, #name, file) ? -1 : real(__VA_ARGS__, m);        \
  }

OPEN(open, BY(p), (const char *p, int flags, ...), p, flags)
OPEN(open64, BY(p), (const char *p, int flags, ...), p, flags)
OPEN(openat, AT(d, p), (int d, const char *p, int flags, ...), d, p, flags)
OPEN(openat64, AT(d, p), (int d, const char *p, int flags, ...), d, p, flags)
SHIM(CHANGES, BY(p), int, -1, mkdir, (const char *p, mode_t m), p, m)
SHIM(CHANGES, AT(d, p), int, -1, mkdirat, (int d, const char *p, mode_t m), d, p, m)
SHIM(CHANGES, BY(a), int, -1, rename, (const char *a, const char *b), a, b)
SHIM(CHANGES, AT(c, a), int, -1, renameat, (int c, const char *a, int d, const char *b), c, a, d, b)
SHIM(CHANGES, BY(p), int, -1, unlink, (const char *p), p)
SHIM(CHANGES, AT(d, p), int, -1, unlinkat, (int d, const char *p, int f), d, p, f)
SHIM(CHANGES, BY(p), int, -1, rmdir, (const char *p), p)
SHIM(CHANGES, BY(a), int, -1, link, (const char *a, const char *b), a, b)
SHIM(CHANGES, AT(c, a), int, -1, linkat, (int c, const char *a, int d, const char *b, int f), c, a,
     d, b, f)
SHIM(LOOKS, BY(p), int, -1, stat, (const char *p, struct stat *b), p, b)
SHIM(LOOKS, BY(p), int, -1, stat64, (const char *p, struct stat64 *b), p, b)
SHIM(LOOKS, BY(p), int, -1, lstat, (const char *p, struct stat *b), p, b)
SHIM(LOOKS, BY(p), int, -1, lstat64, (const char *p, struct stat64 *b), p, b)
SHIM(LOOKS, OF(d), int, -1, fstat, (int d, struct stat *b), d, b)
SHIM(LOOKS, OF(d), int, -1, fstat64, (int d, struct stat64 *b), d, b)
SHIM(LOOKS, AT(d, p), int, -1, fstatat, (int d, const char *p, struct stat *b, int f), d, p, b, f)
SHIM(LOOKS, AT(d, p), int, -1, fstatat64, (int d, const char *p, struct stat64 *b, int f), d, p, b,
     f)
SHIM(LOOKS, AT(d, p), int, -1, faccessat, (int d, const char *p, int m, int f), d, p, m, f)
SHIM(LOOKS, BY(p), int, -1, access, (const char *p, int m), p, m)
SHIM(CHANGES, OF(d), int, -1, fchmod, (int d, mode_t m), d, m)
SHIM(CHANGES, OF(d), int, -1, fchown, (int d, uid_t u, gid_t g), d, u, g)
SHIM(CHANGES, OF(d), int, -1, futimens, (int d, const struct timespec t[2]), d, t)
SHIM(CHANGES, OF(d), int, -1, ftruncate, (int d, off_t n), d, n)
SHIM(WRITES, OF(d), ssize_t, -1, pwrite, (int d, const void *p, size_t n, off_t at), d, p, n, at)
SHIM(LOOKS, OF(d), ssize_t, -1, pread, (int d, void *p, size_t n, off_t at), d, p, n, at)
SHIM(LOOKS, BY(p), int, -1, statvfs, (const char *p, struct statvfs *b), p, b)
SHIM(LOOKS, BY(p), char *, NULL, realpath, (const char *p, char *b), p, b)
SHIM(CHANGES, OF(d), FILE *, NULL, fdopen, (int d, const char *m), d, m)
SHIM(LOOKS, OF(d), int, -1, flock, (int d, int o), d, o)
SHIM(LOOKS, BY(p), DIR *, NULL, opendir, (const char *p), p)
SHIM(LOOKS, OF(d), DIR *, NULL, fdopendir, (int d), d)
SHIM(LOOKS, OF(dirfd(d)), struct dirent *, NULL, readdir, (DIR * d), d)
SHIM(LOOKS, OF(dirfd(d)), struct dirent64 *, NULL, readdir64, (DIR * d), d)

/* Sleeps as many milliseconds as the environment says. */
static void take_time(const char *variable) {
  const char *ms = getenv(variable);
  const long n = ms ? atol(ms) : 0;
  struct timespec left = {n / 1000, n % 1000 * 1000000};
  while (n && nanosleep(&left, &left) != 0)
    continue;
}

int fsync(int fd) {
  REAL(fsync);
  take_time("DISK_SHIM_FSYNC_MS");
  return hit(LOOKS, "fsync", OF(fd)) ? -1 : real(fd);
}

int renameat2(int c, const char *a, int d, const char *b, unsigned flags) {
  REAL(renameat2);
  if (hit(CHANGES, "renameat2", AT(d, b)))
    return -1;
  if (flags & RENAME_EXCHANGE && atomic_load(&exchange_error)) {
    errno = atomic_load(&exchange_error);
    return -1;
  }
  return real(c, a, d, b, flags);
}

/* What fails to close is closed all the same. */
int close(int fd) {
  REAL(close);
  const bool failed = hit(LOOKS, "close", OF(fd));
  const int why = errno, result = real(fd);
  if (failed)
    errno = why;
  return failed ? -1 : result;
}

ssize_t write(int fd, const void *data, size_t bytes) {
  REAL(write);
  if (under && counts(NULL, OF(fd)))
    take_time("DISK_SHIM_WRITE_MS");
  if (!hit(WRITES, "write", OF(fd)))
    return real(fd, data, bytes);
  return atomic_load(&mode) == SHORT && bytes > 1 ? real(fd, data, bytes / 2) : -1;
}

/* The C library writes by itself: it finds a full disk. */
static void fill(FILE *f) {
  const int full = (int)syscall(SYS_openat, AT_FDCWD, "/dev/full", O_WRONLY | O_CLOEXEC, 0);
  syscall(SYS_dup3, full, fileno(f), 0);
  syscall(SYS_close, full);
}

int fflush(FILE *f) {
  REAL(fflush);
  if (!f || fileno(f) < 0 || !hit(WRITES, "fflush", OF(fileno(f))))
    return real(f);
  const int kept = (int)syscall(SYS_fcntl, fileno(f), F_DUPFD_CLOEXEC, 0), why = errno;
  fill(f);
  real(f);
  syscall(SYS_dup3, kept, fileno(f), O_CLOEXEC);
  syscall(SYS_close, kept);
  errno = why;
  return EOF;
}

int fclose(FILE *f) {
  REAL(fclose);
  if (fileno(f) < 0 || !hit(WRITES, "fclose", OF(fileno(f))))
    return real(f);
  const int why = errno;
  fill(f);
  real(f);
  errno = why;
  return EOF;
}
