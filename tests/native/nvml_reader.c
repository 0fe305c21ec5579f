/* nvml_reader.c - what test_nvml.py runs with the stand-in in NVML's place: native/backends/cuda/
 * nvml.c, on a build without CUDA too.
 *
 *   nvml_reader BEFORE NOW      each a list of settings of the stand-in: "NAME=VALUE NAME=VALUE"
 * prints what the GPU lost between the two, then the sensors, as JSON: a line. */
#include "backends/cuda/nvml.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static void set(char *settings) {
  for (char *s = strtok(settings, " "); s; s = strtok(NULL, " ")) {
    char *value = strchr(s, '=');
    *value++ = 0;
    setenv(s, value, 1);
  }
}

int main(int argc, char **argv) {
  ps__nvml_memory before, now;
  ps_gpu_state state = {0};
  if (argc != 3)
    return 2;
  set(argv[1]);
  ps__nvml_gpu *gpu = ps__nvml_gpu_at("0000:00:00.0");
  const bool known = ps__nvml_memory_of(gpu, &before);
  set(argv[2]);
  uint64_t lost = 0;
  if (known && ps__nvml_memory_of(gpu, &now))
    lost = ps__nvml_lost(&before, &now);
  void *standin = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  const int *calls = standin ? dlsym(standin, "standin_nvml_calls") : NULL;
  const int calls_before = calls ? *calls : 0;
  ps__nvml_state(gpu, &state);
  const int calls_made = calls ? *calls - calls_before : 0;
  printf("{\"known\": %d, \"lost\": %llu, \"calls\": %d, \"link\": %g, ", known,
         (unsigned long long)lost, calls_made, ps__nvml_link_bytes_per_s(gpu));
  printf("\"clock_mhz\": %g, \"power_w\": %g, \"temperature_c\": %g, \"energy_j\": %g}\n",
         state.clock_mhz, state.power_w, state.temperature_c, state.energy_j);
  return 0;
}
