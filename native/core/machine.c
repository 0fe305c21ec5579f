/* machine.c - the CPUs and the memory that this process may use, and the memory that it holds. */
#include "core/core.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __GLIBC__
#  include <malloc.h>
#endif

/* The first line of a small file, without its newline. */
static bool read_line(const char *path, char *line, int bytes) {
  FILE *f = fopen(path, "re");
  if (!f)
    return false;
  bool ok = fgets(line, bytes, f) != NULL;
  fclose(f);
  if (ok)
    line[strcspn(line, "\n")] = 0;
  return ok;
}

/* The path of this process in the cgroup hierarchy that has @controller ("" is version 2's). */
static bool cgroup_path(const char *controller, char *path, size_t bytes) {
  FILE *f = fopen("/proc/self/cgroup", "re");
  char line[1024];
  bool found = false;
  while (f && !found && fgets(line, sizeof line, f)) {
    line[strcspn(line, "\n")] = 0;
    char *list = strchr(line, ':');
    char *where = list ? strchr(list + 1, ':') : NULL;
    if (!where)
      continue;
    *where++ = 0;
    list++;
    if (*controller == 0) {
      found = *list == 0;
    } else {
      for (char *save, *name = strtok_r(list, ",", &save); name && !found;
           name = strtok_r(NULL, ",", &save))
        found = strcmp(name, controller) == 0;
    }
    if (found)
      snprintf(path, bytes, "%s", where);
  }
  if (f)
    fclose(f);
  return found;
}

/* Call @visit with each folder from the process's own cgroup up to the hierarchy's root at @mount.
 * In a container the path may be the host's. Folders that do not exist are passed over; the root is
 * the container's. */
static void walk_cgroup(const char *mount, const char *controller,
                        void (*visit)(const char *dir, void *arg), void *arg) {
  char path[1024], dir[1200];
  if (!cgroup_path(controller, path, sizeof path))
    return;
  for (;;) {
    snprintf(dir, sizeof dir, "%s%s", mount, strcmp(path, "/") == 0 ? "" : path);
    visit(dir, arg);
    char *slash = strrchr(path, '/');
    if (!slash || path[0] == 0 || strcmp(path, "/") == 0)
      return;
    *slash = 0;
  }
}

static void cpu_quota_v2(const char *dir, void *arg) {
  char path[1300], line[128];
  double *cpus = arg;
  double quota, period;
  snprintf(path, sizeof path, "%s/cpu.max", dir);
  if (read_line(path, line, sizeof line) && sscanf(line, "%lf %lf", &quota, &period) == 2 &&
      period > 0 && quota / period < *cpus)
    *cpus = quota / period;
}

static void cpu_quota_v1(const char *dir, void *arg) {
  char path[1300], line[128];
  double *cpus = arg;
  snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", dir);
  if (!read_line(path, line, sizeof line))
    return;
  double quota = atof(line);
  snprintf(path, sizeof path, "%s/cpu.cfs_period_us", dir);
  if (quota <= 0 || !read_line(path, line, sizeof line))
    return;
  double period = atof(line);
  if (period > 0 && quota / period < *cpus)
    *cpus = quota / period;
}

static long n_cpus_by_affinity(void) {
  long fallback = sysconf(_SC_NPROCESSORS_ONLN);
  for (int n = 1024; n <= 1 << 17; n *= 4) {
    cpu_set_t *set = CPU_ALLOC(n);
    if (!set)
      break;
    int err = sched_getaffinity(0, CPU_ALLOC_SIZE(n), set);
    int count = err ? 0 : CPU_COUNT_S(CPU_ALLOC_SIZE(n), set);
    CPU_FREE(set);
    if (count > 0)
      return count;
    if (err && errno != EINVAL)
      break;
  }
  return fallback;
}

uint32_t ps__n_cpus(void) {
  double cpus = (double)n_cpus_by_affinity();
  walk_cgroup("/sys/fs/cgroup", "", cpu_quota_v2, &cpus);
  walk_cgroup("/sys/fs/cgroup/cpu", "cpu", cpu_quota_v1, &cpus);
  uint32_t n = (uint32_t)cpus;
  n += (double)n < cpus; /* a quota of a part of a CPU counts as one */
  return n ? n : 1;
}

static void lower_to_file(const char *dir, const char *name, uint64_t *limit) {
  char path[1300], line[128];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  if (!read_line(path, line, sizeof line) || line[0] < '0' || line[0] > '9') /* "max" */
    return;
  uint64_t bytes = strtoull(line, NULL, 10);
  if (bytes > 0 && bytes < *limit)
    *limit = bytes;
}

static void memory_v2(const char *dir, void *arg) { lower_to_file(dir, "memory.max", arg); }
static void memory_v1(const char *dir, void *arg) {
  lower_to_file(dir, "memory.limit_in_bytes", arg);
}

uint64_t ps__host_memory_limit(void) {
  uint64_t limit = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
  walk_cgroup("/sys/fs/cgroup", "", memory_v2, &limit);
  walk_cgroup("/sys/fs/cgroup/memory", "memory", memory_v1, &limit);
  const char *slurm = getenv("SLURM_MEM_PER_NODE"); /* MiB; 0 means the whole node */
  uint64_t mib = slurm ? strtoull(slurm, NULL, 10) : 0;
  if (mib > 0 && mib <= UINT64_MAX >> 20 && mib << 20 < limit)
    limit = mib << 20;
  return limit;
}

/* A field of /proc/self/status or /proc/meminfo, "VmRSS:   1234 kB". */
static uint64_t field_bytes(const char *path, const char *field) {
  FILE *f = fopen(path, "re");
  char line[256];
  uint64_t bytes = 0;
  size_t n = strlen(field);
  while (f && fgets(line, sizeof line, f))
    if (strncmp(line, field, n) == 0) {
      bytes = strtoull(line + n, NULL, 10) * 1024;
      break;
    }
  if (f)
    fclose(f);
  return bytes;
}

uint64_t ps__resident_bytes(void) { return field_bytes("/proc/self/status", "VmRSS:"); }

static uint64_t process_bytes;
static void read_process(void) { process_bytes = ps__resident_bytes(); }

uint64_t ps__process_bytes(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_process);
  return process_bytes;
}

uint64_t ps__resident_peak_bytes(void) { return field_bytes("/proc/self/status", "VmHWM:"); }

uint64_t ps__host_memory_free(void) {
  const uint64_t limit = ps__host_memory_limit(), held = ps__resident_bytes(),
                 system = field_bytes("/proc/meminfo", "MemAvailable:");
  const uint64_t within = limit > held ? limit - held : 0;
  return system < within ? system : within;
}

void ps__resident_peak_reset(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
  if (fd < 0)
    /* the peak of the process's whole life remains, which is an upper bound */
    return;
  ssize_t ignored = write(fd, "5", 1);
  (void)ignored;
  close(fd);
}
