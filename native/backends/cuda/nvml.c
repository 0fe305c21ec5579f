/* nvml.c - opens NVML and asks it. */
#include "backends/cuda/nvml.h"
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

enum { MAX_PROCESSES = 256, CLOCK_SM = 1, SENSOR_GPU = 0 };

/* As NVML's interface defines them: nvmlMemory_t, and nvmlProcessInfo_t of the functions' third
 * version. */
typedef struct memory_info {
  unsigned long long total, free, used;
} memory_info;
typedef struct process_info {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} process_info;

/* clang-format off */
#define CALLS(X)                                                                                   \
  X(Init_v2, (void))                                                                               \
  X(DeviceGetHandleByPciBusId_v2, (const char *, ps__nvml_gpu **))                                 \
  X(DeviceGetMemoryInfo, (ps__nvml_gpu *, memory_info *))                                          \
  X(DeviceGetComputeRunningProcesses_v3, (ps__nvml_gpu *, unsigned *, process_info *))             \
  X(DeviceGetClockInfo, (ps__nvml_gpu *, int, unsigned *))                                         \
  X(DeviceGetPowerUsage, (ps__nvml_gpu *, unsigned *))                                             \
  X(DeviceGetTemperature, (ps__nvml_gpu *, int, unsigned *))                                       \
  X(DeviceGetTotalEnergyConsumption, (ps__nvml_gpu *, unsigned long long *))                       \
  X(DeviceGetMaxPcieLinkGeneration, (ps__nvml_gpu *, unsigned *))                                  \
  X(DeviceGetMaxPcieLinkWidth, (ps__nvml_gpu *, unsigned *))
/* clang-format on */

#define FIELD(name, args) int(*name) args;
static struct {
  CALLS(FIELD)
} nvml; /* written once */
#undef FIELD
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool there;

static void open_once(void) {
  void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib)
    return;
#define FIND(name, args) *(void **)&nvml.name = dlsym(lib, "nvml" #name);
  CALLS(FIND)
#undef FIND
  there = nvml.Init_v2 && nvml.DeviceGetHandleByPciBusId_v2 && nvml.Init_v2() == 0;
}

ps__nvml_gpu *ps__nvml_gpu_at(const char *pci_bus_id) {
  ps__nvml_gpu *gpu = NULL;
  pthread_once(&once, open_once);
  return there && nvml.DeviceGetHandleByPciBusId_v2(pci_bus_id, &gpu) == 0 ? gpu : NULL;
}

static void read_processes(ps__nvml_gpu *gpu, ps__nvml_memory *out) {
  process_info list[MAX_PROCESSES];
  unsigned n = MAX_PROCESSES;
  if (!nvml.DeviceGetComputeRunningProcesses_v3 ||
      nvml.DeviceGetComputeRunningProcesses_v3(gpu, &n, list) != 0)
    return;
  for (unsigned i = 0; i < n && i < MAX_PROCESSES; i++) {
    if (list[i].used == ~0ull) /* the driver does not say */
      continue;
    const bool own = list[i].pid == (unsigned)getpid();
    *(own ? &out->own : &out->others) += list[i].used;
    out->listed |= own;
  }
}

bool ps__nvml_memory_of(ps__nvml_gpu *gpu, ps__nvml_memory *out) {
  memory_info m;
  *out = (ps__nvml_memory){0};
  if (!gpu || !nvml.DeviceGetMemoryInfo || nvml.DeviceGetMemoryInfo(gpu, &m) != 0)
    return false;
  out->used = m.used;
  read_processes(gpu, out);
  return true;
}

uint64_t ps__nvml_lost(const ps__nvml_memory *before, const ps__nvml_memory *now) {
  /* a list without this process may hold it under another number, so nothing in it is used */
  const uint64_t others = now->listed ? before->others : 0,
                 others_now = now->listed ? now->others : 0;
  const uint64_t taken = now->used + others, not_ours = before->used + others_now,
                 lost = taken > not_ours ? taken - not_ours : 0;
  return lost > now->own ? lost : now->own;
}

static double reading(int (*call)(ps__nvml_gpu *, unsigned *), ps__nvml_gpu *gpu) {
  unsigned value = 0;
  return call && call(gpu, &value) == 0 ? value : 0;
}

void ps__nvml_state(ps__nvml_gpu *gpu, ps_gpu_state *out) {
  unsigned value = 0;
  unsigned long long millijoules = 0;
  if (!gpu)
    return;
  out->power_w = 1e-3 * reading(nvml.DeviceGetPowerUsage, gpu);
  if (nvml.DeviceGetClockInfo && nvml.DeviceGetClockInfo(gpu, CLOCK_SM, &value) == 0)
    out->clock_mhz = value;
  if (nvml.DeviceGetTemperature && nvml.DeviceGetTemperature(gpu, SENSOR_GPU, &value) == 0)
    out->temperature_c = value;
  if (nvml.DeviceGetTotalEnergyConsumption &&
      nvml.DeviceGetTotalEnergyConsumption(gpu, &millijoules) == 0)
    out->energy_j = 1e-3 * (double)millijoules;
}

double ps__nvml_link_bytes_per_s(ps__nvml_gpu *gpu) {
  /* a lane of generation 1 to 6: transfers of a bit a second times the share that its encoding
   * leaves, by the PCI Express specifications */
  static const double lane[] = {0,
                                2.5e9 * 8 / 10,
                                5e9 * 8 / 10,
                                8e9 * 128 / 130,
                                16e9 * 128 / 130,
                                32e9 * 128 / 130,
                                64e9 * 236 / 256};
  if (!gpu)
    return 0;
  const double generation = reading(nvml.DeviceGetMaxPcieLinkGeneration, gpu),
               width = reading(nvml.DeviceGetMaxPcieLinkWidth, gpu);
  const size_t g = (size_t)generation;
  return g < sizeof lane / sizeof *lane ? lane[g] * width / 8 : 0;
}
