/* usage.c - device memory and the PCIe link, as NVML reports them. NVML comes with the driver and
 * is opened at run time. */
#include "backends/cuda/driver.h"
#include "backends/cuda/probe.h"
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

enum { MAX_DEVICES = 64, MAX_PROCESSES = 256 };

/* As NVML's interface defines them (nvmlMemory_t, nvmlProcessInfo_t of the functions' third
 * version). */
typedef struct memory_info {
  unsigned long long total, free, used;
} memory_info;
typedef struct process_info {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} process_info;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct {
  int (*Init_v2)(void);
  int (*DeviceGetHandleByPciBusId_v2)(const char *, void **);
  int (*DeviceGetMemoryInfo)(void *, memory_info *);
  int (*DeviceGetComputeRunningProcesses_v3)(void *, unsigned *, process_info *);
  int (*DeviceGetMaxPcieLinkGeneration)(void *, unsigned *);
  int (*DeviceGetMaxPcieLinkWidth)(void *, unsigned *);
} nvml; /* written once */
static bool there;
static bool looked[MAX_DEVICES];
/* used when the GPU was first looked at, which is before its context; 0 is a figure too */
static uint64_t before[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void open_once(void) {
  void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib)
    return;
  *(void **)&nvml.Init_v2 = dlsym(lib, "nvmlInit_v2");
  *(void **)&nvml.DeviceGetHandleByPciBusId_v2 = dlsym(lib, "nvmlDeviceGetHandleByPciBusId_v2");
  *(void **)&nvml.DeviceGetMemoryInfo = dlsym(lib, "nvmlDeviceGetMemoryInfo");
  *(void **)&nvml.DeviceGetComputeRunningProcesses_v3 =
      dlsym(lib, "nvmlDeviceGetComputeRunningProcesses_v3");
  *(void **)&nvml.DeviceGetMaxPcieLinkGeneration = dlsym(lib, "nvmlDeviceGetMaxPcieLinkGeneration");
  *(void **)&nvml.DeviceGetMaxPcieLinkWidth = dlsym(lib, "nvmlDeviceGetMaxPcieLinkWidth");
  there = nvml.Init_v2 && nvml.DeviceGetHandleByPciBusId_v2 && nvml.DeviceGetMemoryInfo &&
          nvml.Init_v2() == 0;
}

static bool open_device(const ps__cuda_driver *cu, uint32_t device, void **handle) {
  CUdevice dev;
  char id[32] = "";
  pthread_once(&once, open_once);
  return there && cu->DeviceGet(&dev, (int)device) == CUDA_SUCCESS &&
         cu->DeviceGetPCIBusId(id, sizeof id, dev) == CUDA_SUCCESS &&
         nvml.DeviceGetHandleByPciBusId_v2(id, handle) == 0;
}

/* This process's entry in the list; false where the list does not show it. */
static bool own_entry(void *handle, uint64_t *out) {
  process_info list[MAX_PROCESSES];
  unsigned n = MAX_PROCESSES;
  if (!nvml.DeviceGetComputeRunningProcesses_v3 ||
      nvml.DeviceGetComputeRunningProcesses_v3(handle, &n, list) != 0)
    return false;
  for (unsigned i = 0; i < n && i < MAX_PROCESSES; i++)
    if (list[i].pid == (unsigned)getpid() && list[i].used != ~0ull) {
      *out = list[i].used;
      return true;
    }
  return false;
}

/* In bytes: what the whole GPU has in use, by NVML; without it by the driver's figure for the
 * current context. */
static ps_status used_in_all(const ps__cuda_driver *cu, uint32_t device, uint64_t *out) {
  void *handle;
  memory_info m;
  size_t free_bytes, total;
  if (open_device(cu, device, &handle) && nvml.DeviceGetMemoryInfo(handle, &m) == 0) {
    *out = m.used;
    return PS_OK;
  }
  PS_TRY(cu->MemGetInfo(&free_bytes, &total) == CUDA_SUCCESS
             ? PS_OK
             : ps__fail(PS_EDEVICE, "the driver does not say how much GPU memory is used"));
  *out = total - free_bytes;
  return PS_OK;
}

void ps__cuda_usage_begin(const ps__cuda_driver *cu, uint32_t device, uint64_t *others) {
  void *handle;
  memory_info m;
  pthread_mutex_lock(&lock);
  if (device < MAX_DEVICES && !looked[device] && open_device(cu, device, &handle) &&
      nvml.DeviceGetMemoryInfo(handle, &m) == 0) {
    looked[device] = true;
    before[device] = m.used;
  }
  *others = device < MAX_DEVICES ? before[device] : 0;
  pthread_mutex_unlock(&lock);
}

ps_status ps__cuda_memory_used(uint32_t device, uint64_t *out_bytes) {
  const ps__cuda_driver *cu;
  void *handle;
  uint64_t others, all;
  PS_TRY(ps__cuda_driver_open(&cu));
  if (open_device(cu, device, &handle) && own_entry(handle, out_bytes))
    return PS_OK;
  ps__cuda_usage_begin(cu, device, &others);
  PS_TRY(used_in_all(cu, device, &all));
  *out_bytes = all > others ? all - others : 0;
  return PS_OK;
}

double ps__cuda_link_bytes_per_s(const ps__cuda_driver *cu, uint32_t device) {
  /* a lane of generation 1 to 6: transfers of a bit a second times the share that its encoding
   * leaves, by the PCI Express specifications */
  static const double lane[] = {0,
                                2.5e9 * 8 / 10,
                                5e9 * 8 / 10,
                                8e9 * 128 / 130,
                                16e9 * 128 / 130,
                                32e9 * 128 / 130,
                                64e9 * 236 / 256};
  void *handle;
  unsigned generation = 0, width = 0;
  if (!open_device(cu, device, &handle) || !nvml.DeviceGetMaxPcieLinkGeneration ||
      !nvml.DeviceGetMaxPcieLinkWidth ||
      nvml.DeviceGetMaxPcieLinkGeneration(handle, &generation) != 0 ||
      nvml.DeviceGetMaxPcieLinkWidth(handle, &width) != 0 ||
      generation >= sizeof lane / sizeof *lane)
    return 0;
  return lane[generation] * width / 8;
}
