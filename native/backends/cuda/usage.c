/* usage.c - what a GPU has lost to this process, and its sensors. */
#include "backends/cuda/driver.h"
#include "backends/cuda/nvml.h"
#include "backends/cuda/probe.h"
#include <pthread.h>

enum { MAX_DEVICES = 64 };

/* What is kept of a GPU from the first look at it on, which comes before its context. */
typedef struct first_look {
  bool looked;
  ps__nvml_gpu *gpu; /* NULL: NVML is not there */
  ps__nvml_memory before;
} first_look;
static first_look kept[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static first_look look_at(const ps__cuda_driver *cu, uint32_t device) {
  CUdevice dev;
  char id[32] = "";
  if (device >= MAX_DEVICES)
    return (first_look){0};
  pthread_mutex_lock(&lock);
  first_look *f = &kept[device];
  if (!f->looked && cu->DeviceGet(&dev, (int)device) == CUDA_SUCCESS &&
      cu->DeviceGetPCIBusId(id, sizeof id, dev) == CUDA_SUCCESS) {
    f->gpu = ps__nvml_gpu_at(id);
    f->looked = true;
    if (!ps__nvml_memory_of(f->gpu, &f->before))
      f->gpu = NULL;
  }
  const first_look out = *f;
  pthread_mutex_unlock(&lock);
  return out;
}

bool ps__cuda_usage_begin(const ps__cuda_driver *cu, uint32_t device, uint64_t *others) {
  const first_look f = look_at(cu, device);
  *others = f.before.used;
  return f.gpu != NULL;
}

ps_status ps__cuda_memory_used(uint32_t device, uint64_t *out_bytes) {
  const ps__cuda_driver *cu;
  ps__nvml_memory now;
  size_t free_bytes, total;
  PS_TRY(ps__cuda_driver_open(&cu));
  const first_look f = look_at(cu, device);
  if (f.gpu && ps__nvml_memory_of(f.gpu, &now)) {
    *out_bytes = ps__nvml_lost(&f.before, &now);
    return PS_OK;
  }
  if (cu->MemGetInfo(&free_bytes, &total) != CUDA_SUCCESS)
    return ps__fail(PS_EDEVICE, "the driver does not say how much GPU memory is used");
  *out_bytes = total - free_bytes;
  return PS_OK;
}

void ps__cuda_state(uint32_t device, ps_gpu_state *out) {
  const ps__cuda_driver *cu;
  if (ps__cuda_driver_open(&cu) == PS_OK)
    ps__nvml_state(look_at(cu, device).gpu, out);
}

double ps__cuda_link_bytes_per_s(const ps__cuda_driver *cu, uint32_t device) {
  return ps__nvml_link_bytes_per_s(look_at(cu, device).gpu);
}
