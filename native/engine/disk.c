/* disk.c - files on drives as the memory of a place: which directories serve, stripes, direct I/O.
 *
 * Threads with pread() and pwrite() keep a few large requests in flight on each drive. More would
 * gain nothing: bench/LOG.md has the figures. */
#include "engine/disk.h"
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

static const char NAME[] = "penstock-disk"; /* of the file, while it is opened */
static const uint64_t STRIPE = 4ull << 20;
enum { BOUNCE = 1 << 20 };

typedef struct drive {
  int dir_fd, fd; /* -1: not open. The lock is the directory's */
  char *dir;
} drive;

struct ps__disk {
  uint32_t n;
  uint64_t bytes;
  drive drive[PS_MAX_DRIVES];
};

/* ---- which directories serve ----------------------------------------------------------------- */

ps_status ps__disk_dirs(const char *text, char **copy, const char *dir[PS_MAX_DRIVES],
                        uint32_t *n) {
  char *own = ps__strdup(text);
  if (!own)
    return ps__fail(PS_ENOMEM, "out of memory for the names of %s", ps__field("disk"));
  uint32_t found = 0;
  for (char *at = own, *end; at; at = end) {
    end = strchr(at, ',');
    if (end)
      *end++ = 0;
    if (!*at || found == PS_MAX_DRIVES) {
      ps__free(own);
      return ps__fail(PS_EINVAL, "%s %.200s: give 1 to %d directories, separated by commas",
                      ps__field("disk"), text, PS_MAX_DRIVES);
    }
    dir[found++] = at;
  }
  *copy = own;
  *n = found;
  return PS_OK;
}

/* What the file system is, where it does not serve; NULL: it may. */
static const char *unfit(const struct statfs *fs) {
  static const struct {
    uint32_t magic;
    const char *what;
  } type[] = {
      {0x01021994, "is in memory (tmpfs)"},   {0x858458f6, "is in memory (ramfs)"},
      {0x6969, "is on a network (NFS)"},      {0xff534d42, "is on a network (CIFS)"},
      {0xfe534d42, "is on a network (SMB)"},  {0x517b, "is on a network (SMB)"},
      {0x01021997, "is on a network (9p)"},   {0x00c36400, "is on a network (Ceph)"},
      {0x5346414f, "is on a network (AFS)"},  {0x0bd00bd0, "is on a network (Lustre)"},
      {0x47504653, "is on a network (GPFS)"}, {0x65735546, "is on FUSE, which may be a network"}};
  for (size_t i = 0; i < sizeof type / sizeof *type; i++)
    if ((uint32_t)fs->f_type == type[i].magic)
      return type[i].what;
  return NULL;
}

/* BYTES of each drive's file. */
static uint64_t file_bytes(uint64_t bytes, uint32_t n) {
  return ((bytes + STRIPE - 1) / STRIPE + n - 1) / n * STRIPE;
}

ps_status ps__disk_check(const char *const *dir, uint32_t n, uint64_t bytes) {
  struct stat sb[PS_MAX_DRIVES];
  char need[32], there[32];
  for (uint32_t i = 0; i < n; i++) {
    struct statfs fs;
    uint64_t wanted = file_bytes(bytes, n);
    if (stat(dir[i], &sb[i]) != 0 || statfs(dir[i], &fs) != 0)
      return ps__fail(PS_EINVAL, "%s %.200s: cannot be used: %s", ps__field("disk"), dir[i],
                      strerror(errno));
    if (!S_ISDIR(sb[i].st_mode))
      return ps__fail(PS_EINVAL, "%s %.200s: is no directory", ps__field("disk"), dir[i]);
    const char *why = unfit(&fs);
    if (why)
      return ps__fail(PS_EINVAL, "%s %.200s: %s: give a directory on a drive of this machine",
                      ps__field("disk"), dir[i], why);
    for (uint32_t k = 0; k < i; k++) {
      if (sb[k].st_dev != sb[i].st_dev)
        continue;
      wanted += file_bytes(bytes, n);
      if (sb[k].st_ino == sb[i].st_ino)
        return ps__fail(PS_EINVAL, "%s: %.200s is given twice: give each drive once",
                        ps__field("disk"), dir[i]);
    }
    const uint64_t room = (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize;
    if (room >= wanted)
      continue;
    ps__format_bytes_apart(need, wanted, there, room);
    return ps__fail(PS_EBUDGET,
                    "%s %.200s: %s are needed there, and its file system has %s left: free some, "
                    "or lower %s",
                    ps__field("disk"), dir[i], need, there, ps__field("disk_mem_bytes"));
  }
  return PS_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

static ps_status failed(const drive *d, const char *what, int error) {
  return ps__fail(PS_EIO, "%s %.200s: %s: %s", ps__field("disk"), d->dir, what, strerror(error));
}

static ps_status lock(drive *d) {
  d->dir_fd = open(d->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (d->dir_fd < 0)
    return failed(d, "cannot be opened", errno);
  while (flock(d->dir_fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK)
      return ps__fail(PS_EBUSY, "%s %.200s: another run uses it: give each run a directory",
                      ps__field("disk"), d->dir);
    if (errno != EINTR)
      return failed(d, "cannot be locked", errno);
  }
  return PS_OK;
}

static ps_status make_file(drive *d, uint64_t bytes) {
  if (ps__fault_hit(PS_FAULT_WRITE))
    return failed(d, "no file can be made there", EIO);
  (void)unlinkat(d->dir_fd, NAME, 0); /* of a process that ended between the next two calls */
  d->fd =
      openat(d->dir_fd, NAME, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | O_DIRECT, 0600);
  const int error = errno;
  (void)unlinkat(d->dir_fd, NAME, 0);
  if (d->fd < 0 && error == EINVAL)
    return ps__fail(PS_EINVAL,
                    "%s %.200s: its file system has no direct I/O: give a directory on ext4, XFS "
                    "or another that has it",
                    ps__field("disk"), d->dir);
  if (d->fd < 0)
    return failed(d, "no file can be made there", error);
  int st = ps__fault_hit(PS_FAULT_WRITE) ? (errno = ENOSPC, -1) : 0;
  while (st == 0 && (st = fallocate(d->fd, 0, 0, (off_t)bytes)) != 0 && errno == EINTR)
    st = 0;
  return st == 0 ? PS_OK : failed(d, "no room can be reserved there", errno);
}

ps_status ps__disk_open(ps__disk **out, const char *const *dir, uint32_t n, uint64_t bytes) {
  PS_TRY(ps__disk_check(dir, n, bytes));
  ps__disk *d = ps__calloc(1, sizeof *d);
  if (!d)
    return ps__fail(PS_ENOMEM, "out of memory for the disk's table");
  d->bytes = bytes;
  for (uint32_t i = 0; i < n; i++)
    d->drive[i].dir_fd = d->drive[i].fd = -1;
  d->n = n;
  ps_status st = PS_OK;
  for (uint32_t i = 0; st == PS_OK && i < n; i++) {
    d->drive[i].dir = ps__strdup(dir[i]);
    st = d->drive[i].dir ? lock(&d->drive[i])
                         : ps__fail(PS_ENOMEM, "out of memory for the disk's table");
    if (st == PS_OK)
      st = make_file(&d->drive[i], file_bytes(bytes, n));
  }
  if (st == PS_OK)
    *out = d;
  else
    ps__disk_close(d);
  return st;
}

void ps__disk_close(ps__disk *d) {
  if (!d)
    return;
  for (uint32_t i = 0; i < d->n; i++) {
    if (d->drive[i].fd >= 0)
      close(d->drive[i].fd);
    if (d->drive[i].dir_fd >= 0)
      close(d->drive[i].dir_fd);
    ps__free(d->drive[i].dir);
  }
  ps__free(d);
}

/* ---- reading and writing --------------------------------------------------------------------- */

static ssize_t once(const drive *d, bool write, void *memory, size_t bytes, uint64_t at) {
  if (ps__fault_hit(write ? PS_FAULT_WRITE : PS_FAULT_READ)) {
    errno = EIO;
    return -1;
  }
  return write ? pwrite(d->fd, memory, bytes, (off_t)at) : pread(d->fd, memory, bytes, (off_t)at);
}

/* Inside a stripe. A request that was cut short goes on from its last whole sector. */
static ps_status move_piece(const drive *d, bool write, char *memory, uint64_t bytes, uint64_t at) {
  while (bytes > 0) {
    const ssize_t n = once(d, write, memory, bytes, at);
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0)
      return failed(d, write ? "writing failed" : "reading failed", errno);
    const uint64_t whole = (uint64_t)n / PS__DISK_ALIGN * PS__DISK_ALIGN;
    if (!whole)
      return ps__fail(PS_EIO, "%s %.200s: %s ended after %zd of %llu bytes", ps__field("disk"),
                      d->dir, write ? "writing" : "reading", n, (unsigned long long)bytes);
    memory += whole;
    bytes -= whole;
    at += whole;
  }
  return PS_OK;
}

typedef struct job {
  ps__disk *d;
  bool write;
  char *memory;
  uint64_t offset, bytes;
  _Atomic uint32_t failed;
  ps_status st; /* the first failure's, with its message */
  char message[512];
} job;

static void move_task(void *arg, int64_t task, uint32_t worker) {
  job *j = arg;
  const uint64_t first = j->offset / STRIPE + (uint64_t)task, begin = first * STRIPE,
                 from = begin > j->offset ? begin : j->offset, end = begin + STRIPE,
                 to = end < j->offset + j->bytes ? end : j->offset + j->bytes;
  (void)worker;
  if (atomic_load(&j->failed))
    return;
  const ps_status st =
      move_piece(&j->d->drive[first % j->d->n], j->write, j->memory + (from - j->offset), to - from,
                 first / j->d->n * STRIPE + (from - begin));
  uint32_t none = 0;
  if (st != PS_OK && atomic_compare_exchange_strong(&j->failed, &none, 1)) {
    snprintf(j->message, sizeof j->message, "%s", ps_last_error());
    j->st = st;
  }
}

ps_status ps__disk_run(ps__disk *d, bool write, uint64_t offset, void *memory, uint64_t bytes,
                       const ps_launch *launch) {
  job j = {.d = d, .write = write, .memory = memory, .offset = offset, .bytes = bytes};
  const int64_t n = (int64_t)((offset + bytes + STRIPE - 1) / STRIPE - offset / STRIPE);
  if (launch)
    ps_launch_parallel(launch, n, move_task, &j);
  else
    for (int64_t i = 0; i < n; i++)
      move_task(&j, i, 0);
  return j.st == PS_OK ? PS_OK : ps__fail(j.st, "%s", j.message);
}

/* By way of a buffer of whole sectors. */
static ps_status bounce(ps__disk *d, bool write, uint64_t offset, char *memory, uint64_t bytes,
                        char *buffer) {
  while (bytes > 0) {
    const uint64_t begin = offset / PS__DISK_ALIGN * PS__DISK_ALIGN, skip = offset - begin,
                   room = BOUNCE - skip, n = bytes < room ? bytes : room,
                   all = (skip + n + PS__DISK_ALIGN - 1) / PS__DISK_ALIGN * PS__DISK_ALIGN;
    if (!write || skip || (skip + n) % PS__DISK_ALIGN)
      PS_TRY(ps__disk_run(d, false, begin, buffer, all, NULL));
    if (write) {
      memcpy(buffer + skip, memory, n);
      PS_TRY(ps__disk_run(d, true, begin, buffer, all, NULL));
    } else
      memcpy(memory, buffer + skip, n);
    memory += n;
    offset += n;
    bytes -= n;
  }
  return PS_OK;
}

ps_status ps__disk_move(ps__disk *d, bool write, uint64_t offset, void *memory, uint64_t bytes) {
  char *own = ps__malloc(BOUNCE + PS__DISK_ALIGN);
  if (!own)
    return ps__fail(PS_ENOMEM, "out of memory for a piece of the disk");
  const uintptr_t past = (uintptr_t)own % PS__DISK_ALIGN;
  const ps_status st =
      bounce(d, write, offset, memory, bytes, own + (past ? PS__DISK_ALIGN - past : 0));
  ps__free(own);
  return st;
}
