/* driver_standin.c - what test_cuda_bad_input.py and test_nvml.py put in the place of NVIDIA's
 * driver, NVML and cuBLASLt: a machine whose GPU has something wrong with it. Nothing computes;
 * memory of the "device" is addresses only. The environment says what is wrong:
 *   STANDIN_VERSION     what cuDriverGetVersion tells (13000)        STANDIN_INIT    the result
 *                       of cuInit (0)
 *   STANDIN_GPUS        GPUs to be seen (1)                          STANDIN_CAPABILITY  their
 *                       compute capability (90)
 *   STANDIN_PIN, STANDIN_ALLOC, STANDIN_CONTEXT  results of cuMemHostRegister, cuMemAlloc of 1
 *   MiB or more, cuDevicePrimaryCtxRetain (0) STANDIN_GIB, STANDIN_USED_GIB  GiB of device
 *   memory (80), and how many other processes hold (0)
 *   STANDIN_USED_MIB    more of it, in MiB (0)
 *   STANDIN_PROCESSES   NVML's list: "own:300,4321:20" are MiB of this process and of process 4321
 *                       (an empty list)
 *   STANDIN_CLOCK, STANDIN_POWER, STANDIN_TEMPERATURE, STANDIN_ENERGY, STANDIN_GENERATION,
 *   STANDIN_WIDTH  what NVML's sensors say, in NVML's units: a value for each GPU, between commas.
 *   Where it is empty or missing the sensor says that it is not supported. STANDIN_ENERGY=5+300
 *   is a counter that grows by 300 W
 * Types are as wide as the driver's interface has them; results are its numbers, 0 being
 * success. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

static int nothing(void) { return 0; }

/* ---- the driver ------------------------------------------------------------------------------ */

enum { ATTRIBUTE_SMS = 16, ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76 };

int cuInit(unsigned flags) { return (int)setting("STANDIN_INIT", 0); }
int cuDriverGetVersion(int *version) {
  *version = (int)setting("STANDIN_VERSION", 13000);
  return 0;
}
int cuGetErrorName(int result, const char **name) {
  *name = result == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == 100 ? "CUDA_ERROR_NO_DEVICE"
                          : "CUDA_ERROR_OF_THE_STANDIN";
  return 0;
}
int cuGetErrorString(int result, const char **text) {
  *text = result == 2 ? "out of memory" : "as the stand-in was told";
  return 0;
}
int cuDeviceGetCount(int *n) {
  *n = (int)setting("STANDIN_GPUS", 1);
  return 0;
}
int cuDeviceGet(int *device, int idx) {
  *device = idx;
  return idx < setting("STANDIN_GPUS", 1) ? 0 : 101; /* CUDA_ERROR_INVALID_DEVICE */
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  const int capability = (int)setting("STANDIN_CAPABILITY", 90);
  *value = attribute == ATTRIBUTE_MAJOR   ? capability / 10
           : attribute == ATTRIBUTE_MINOR ? capability % 10
           : attribute == ATTRIBUTE_SMS   ? 132
                                          : 1;
  return 0;
}
int cuDeviceGetName(char *name, int bytes, int device) {
  snprintf(name, (size_t)bytes,
           device && setting("STANDIN_OTHER", 0) ? "Other GPU" : "Stand-in GPU");
  return 0;
}
int cuDeviceTotalMem(size_t *bytes, int device) {
  *bytes = (size_t)setting("STANDIN_GIB", 80) << 30;
  return 0;
}
int cuMemGetInfo(size_t *free_bytes, size_t *total) {
  cuDeviceTotalMem(total, 0);
  *free_bytes = *total - ((size_t)setting("STANDIN_USED_GIB", 0) << 30) -
                ((size_t)setting("STANDIN_USED_MIB", 0) << 20);
  return 0;
}
int cuDeviceGetPCIBusId(char *id, int bytes, int device) {
  snprintf(id, (size_t)bytes, "0000:%02x:00.0", (unsigned)device);
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)1;
  return (int)setting("STANDIN_CONTEXT", 0);
}
int cuMemAlloc(unsigned long long *address, size_t bytes) {
  static unsigned long long next = 1ull << 40;
  if (bytes >= 1u << 20 && setting("STANDIN_ALLOC", 0))
    return (int)setting("STANDIN_ALLOC", 0);
  *address = next;
  next += bytes + 4096;
  return 0;
}
int cuMemHostAlloc(void **p, size_t bytes, unsigned flags) {
  *p = calloc(1, bytes);
  return *p ? 0 : 2;
}
int cuMemHostGetDevicePointer(unsigned long long *address, void *p, unsigned flags) {
  *address = (unsigned long long)(uintptr_t)p;
  return 0;
}
int cuMemHostRegister(void *p, size_t bytes, unsigned flags) {
  return (int)setting("STANDIN_PIN", 0);
}
int cuStreamCreate(void **stream, unsigned flags) {
  *stream = (void *)1;
  return 0;
}

/* A function by its name; what is not above does nothing, with success. */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *status) {
#define ITEM(f)                                                                                    \
  { #f, (void *)&f }
  static const struct {
    const char *name;
    void *function;
  } known[] = {ITEM(cuInit),
               ITEM(cuDriverGetVersion),
               ITEM(cuGetErrorName),
               ITEM(cuGetErrorString),
               ITEM(cuDeviceGetCount),
               ITEM(cuDeviceGet),
               ITEM(cuDeviceGetAttribute),
               ITEM(cuDeviceGetName),
               ITEM(cuDeviceTotalMem),
               ITEM(cuMemGetInfo),
               ITEM(cuDeviceGetPCIBusId),
               ITEM(cuDevicePrimaryCtxRetain),
               ITEM(cuMemAlloc),
               ITEM(cuMemHostAlloc),
               ITEM(cuMemHostGetDevicePointer),
               ITEM(cuMemHostRegister),
               ITEM(cuStreamCreate)};
#undef ITEM
  *function = (void *)&nothing;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (strcmp(known[i].name, name) == 0)
      *function = known[i].function;
  return 0;
}

/* ---- NVML: memory of the whole GPU, processes, sensors --------------------------------------- */

enum { NOT_SUPPORTED = 3 };

typedef struct memory {
  unsigned long long total, free, used;
} memory;
typedef struct process {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} process;

int standin_nvml_calls; /* since the start, by all threads */

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
  standin_nvml_calls++;
  *handle = (void *)(strtoul(strchr(id, ':') + 1, NULL, 16) + 1); /* 1 + the GPU's number */
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory *m) {
  size_t total, free_bytes;
  standin_nvml_calls++;
  cuMemGetInfo(&free_bytes, &total);
  *m = (memory){total, free_bytes, total - free_bytes};
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *n, process *list) {
  const char *at = getenv("STANDIN_PROCESSES");
  unsigned found = 0;
  standin_nvml_calls++;
  for (; at && *at && found < *n; found++) {
    const bool own = strncmp(at, "own", 3) == 0;
    char *end;
    list[found] = (process){.pid = own ? (unsigned)getpid() : (unsigned)atoi(at)};
    list[found].used = strtoull(strchr(at, ':') + 1, &end, 10) << 20;
    at = *end ? end + 1 : end;
  }
  *n = found;
  return 0;
}

/* The GPU's part of a list between commas; NULL: it is empty or missing. */
static const char *part_of(void *handle, const char *name) {
  const char *at = getenv(name);
  for (uintptr_t i = 1; at && i < (uintptr_t)handle; i++)
    at = (at = strchr(at, ',')) ? at + 1 : NULL;
  return at && *at && *at != ',' ? at : NULL;
}
static int sensor(void *handle, const char *name, unsigned *value) {
  const char *part = part_of(handle, name);
  standin_nvml_calls++;
  *value = part ? (unsigned)atol(part) : 0;
  return part ? 0 : NOT_SUPPORTED;
}
int nvmlDeviceGetClockInfo(void *handle, int which, unsigned *mhz) {
  return which == 1 ? sensor(handle, "STANDIN_CLOCK", mhz) : NOT_SUPPORTED; /* the SMs' */
}
int nvmlDeviceGetTemperature(void *handle, int which, unsigned *celsius) {
  return which == 0 ? sensor(handle, "STANDIN_TEMPERATURE", celsius) : NOT_SUPPORTED;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
  return sensor(handle, "STANDIN_POWER", milliwatts);
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
  const char *part = part_of(handle, "STANDIN_ENERGY");
  char *end = NULL;
  struct timespec now;
  double mj = part ? strtod(part, &end) : 0;
  standin_nvml_calls++;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (end && *end == '+')
    mj += atof(end) * (1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec);
  *millijoules = (unsigned long long)mj;
  return part ? 0 : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned *generation) {
  return sensor(handle, "STANDIN_GENERATION", generation);
}
int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *lanes) {
  return sensor(handle, "STANDIN_WIDTH", lanes);
}

/* ---- cuBLASLt: opens ------------------------------------------------------------------------- */

int cublasLtCreate(void **handle) {
  *handle = (void *)1;
  return 0;
}
const char *cublasLtGetStatusString(int status) { return "of the stand-in"; }
#define NOTHING(name)                                                                              \
  int cublasLt##name(void) { return nothing(); }
NOTHING(Destroy)
NOTHING(Matmul)
NOTHING(MatmulAlgoGetHeuristic)
NOTHING(MatmulDescInit_internal)
NOTHING(MatmulDescSetAttribute)
NOTHING(MatmulPreferenceInit_internal)
NOTHING(MatmulPreferenceSetAttribute)
NOTHING(MatrixLayoutInit_internal)
NOTHING(MatmulAlgoCheck)
NOTHING(GetVersion)
