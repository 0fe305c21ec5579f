/* sensors_shim.c - preloaded (LD_PRELOAD) by tests/test_gpu_sensors.py into a training on the CPU
 * backend: the arena of each device gets the sensors of a GPU, which driver_standin.c makes up in
 * NVML's place. Compiled with native/backends/cuda/nvml.c, as the library reads them. */
#include "backends/cuda/nvml.h"
#include <stdio.h>

ps_status ps_hardware_gpu_state(ps_gpu_state *out, uint32_t backend, uint32_t device) {
  char id[32];
  snprintf(id, sizeof id, "0000:%02x:00.0", device);
  *out = (ps_gpu_state){.struct_bytes = sizeof *out};
  ps__nvml_state(ps__nvml_gpu_at(id), out);
  return PS_OK;
}
