/* driver.c - open the CUDA driver at run time. */
#include "backends/cuda/driver.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static ps__cuda_driver driver; /* functions only; written once */
static ps_status opened;
static bool there; /* the driver's library, whatever it can do */
static char why[256];

typedef CUresult (*find_fn)(const char *, void **, int, cuuint64_t,
                            CUdriverProcAddressQueryResult *);

static void refuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void refuse(const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(why, sizeof why, fmt, ap);
  va_end(ap);
  opened = PS_EDEVICE;
}

static void open_once(void) {
  /* stays open: the driver cannot be unloaded */
  void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    refuse("no CUDA driver here (%s): install NVIDIA's driver, or use the cpu backend", dlerror());
    return;
  }
  there = true;
  void *symbol = dlsym(lib, "cuGetProcAddress_v2");
  find_fn find;
  *(void **)&find = symbol;
  if (!symbol) {
    refuse("the CUDA driver here is older than 12.0, this library was built for CUDA %d.%d: update "
           "NVIDIA's driver, or build with an "
           "older toolkit",
           CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);
    return;
  }
  const char *missing = NULL;
#define PS__FIND(name)                                                                             \
  if (find("cu" #name, (void **)&driver.name, CUDA_VERSION, CU_GET_PROC_ADDRESS_DEFAULT, NULL) !=  \
          CUDA_SUCCESS ||                                                                          \
      !driver.name)                                                                                \
    missing = "cu" #name;
  PS__CUDA_CALLS(PS__FIND)
#undef PS__FIND
  *(void **)&driver.ProfilerStart = dlsym(lib, "cuProfilerStart");
  *(void **)&driver.ProfilerStop = dlsym(lib, "cuProfilerStop");
  int version = 0;
  if (driver.DriverGetVersion)
    driver.DriverGetVersion(&version);
  /* inside a major version older drivers serve newer toolkits */
  if (version / 1000 < CUDA_VERSION / 1000 || missing) {
    refuse("the CUDA driver here supports CUDA %d.%d, this library was built for %d.%d%s%s: update "
           "NVIDIA's driver, or build with "
           "the driver's toolkit",
           version / 1000, version % 1000 / 10, CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10,
           missing ? " and lacks " : "", missing ? missing : "");
    return;
  }
  CUresult r = driver.Init(0);
  const char *name = NULL, *text = NULL;
  if (r == CUDA_SUCCESS)
    return;
  driver.GetErrorName(r, &name);
  driver.GetErrorString(r, &text);
  refuse("the CUDA driver found no usable GPU (%s: %s): look at nvidia-smi and "
         "CUDA_VISIBLE_DEVICES, or use the cpu backend",
         name ? name : "?", text ? text : "?");
}

bool ps__cuda_driver_there(void) {
  pthread_once(&once, open_once);
  return there;
}

ps_status ps__cuda_driver_open(const ps__cuda_driver **out) {
  pthread_once(&once, open_once);
  if (opened != PS_OK)
    return ps__fail(opened, "%s", why);
  *out = &driver;
  return PS_OK;
}

/* PS_CUDA_ARCH: the words of CUDA_ARCH that this library was built with, "80 90". */
static bool has_code(int capability) {
  int built = 0;
  for (const char *p = PS_CUDA_ARCH; *p;) {
    char *end;
    built = (int)strtol(p, &end, 10);
    if (end == p)
      break;
    if (built / 10 == capability / 10 && built <= capability)
      return true;
    p = end + strspn(end, "abcdefghijklmnopqrstuvwxyz ");
  }
  return built <= capability; /* the last one is PTX as well */
}

ps_status ps__cuda_supported(const ps__cuda_driver *cu, CUdevice device, uint32_t idx) {
  int major = 0, minor = 0;
  PS__CUDA_TRY(cu,
               DeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  PS__CUDA_TRY(cu,
               DeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
  if (major < 8)
    return ps__fail(PS_EDEVICE,
                    "GPU %u has compute capability %d.%d, bf16 needs 8.0 or newer: take another "
                    "GPU (%s), or the cpu backend",
                    idx, major, minor, ps__field("device"));
  if (!has_code(10 * major + minor))
    return ps__fail(PS_EDEVICE,
                    "GPU %u has compute capability %d.%d, this library was built for "
                    "CUDA_ARCH=\"%s\": build it with make "
                    "CUDA_ARCH=%d%d",
                    idx, major, minor, PS_CUDA_ARCH, major, minor);
  return PS_OK;
}

ps_status ps__cuda_fail(const ps__cuda_driver *cu, CUresult r, const char *call) {
  const char *name = NULL, *text = NULL;
  cu->GetErrorName(r, &name);
  cu->GetErrorString(r, &text);
  const bool memory = r == CUDA_ERROR_OUT_OF_MEMORY;
  return ps__fail(memory ? PS_ENOMEM : PS_EDEVICE, "%s: %s (%s)%s%s",
                  name ? name : "an unknown CUDA error", text ? text : "?", call,
                  memory ? ": end what else uses this GPU, or lower " : "",
                  memory ? ps__field("device_mem_bytes") : "");
}
