/* nvml.h - NVIDIA's management library: device memory as nvidia-smi shows it, sensors, the link.
 *
 * The library comes with the driver and is opened at run time. Where it, a function or a sensor is
 * missing, a figure is unknown, and no function here fails. A call takes microseconds of a CPU,
 * sometimes a millisecond, and no time of the GPU. Threads: any. */
#ifndef PS_BACKENDS_CUDA_NVML_H
#define PS_BACKENDS_CUDA_NVML_H
#include "core/core.h"
#include <penstock/hardware.h>

typedef struct ps__nvml_gpu ps__nvml_gpu; /* NVML's own handle */

/* ps__nvml_gpu_at() - the GPU with this PCI bus id, for the life of the process; NULL: unknown. */
ps__nvml_gpu *ps__nvml_gpu_at(const char *pci_bus_id);

/* BYTES of a GPU's memory. */
typedef struct ps__nvml_memory {
  uint64_t used; /* by all; more than nvidia-smi's memory.used by what the driver always reserves */
  /* In the list of processes: this one's entry, those of all others. listed: both are known, as the
   * list has this process. In containers it may lack it. */
  uint64_t own, others;
  bool listed;
} ps__nvml_memory;
/* ps__nvml_memory_of() - false: unknown. */
bool ps__nvml_memory_of(ps__nvml_gpu *gpu, ps__nvml_memory *out);

/* ps__nvml_lost() - BYTES that the GPU has lost to this process since @before, which is from before
 * the process's context: by how much nvidia-smi's memory.used has grown for it. Changes of other
 * processes are not counted where the list shows them, and counted where it does not. */
uint64_t ps__nvml_lost(const ps__nvml_memory *before, const ps__nvml_memory *now);

/* ps__nvml_state() - the sensors into @out, which is zeros. */
void ps__nvml_state(ps__nvml_gpu *gpu, ps_gpu_state *out);

/* ps__nvml_link_bytes_per_s() - each way, at the best that GPU and slot do; 0: unknown. */
double ps__nvml_link_bytes_per_s(ps__nvml_gpu *gpu);

#endif
