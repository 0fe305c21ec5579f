/* hardware_impl.h - what the files of native/hardware share. */
#ifndef PS_HARDWARE_IMPL_H
#define PS_HARDWARE_IMPL_H
#include "core/core.h"
#include <penstock/hardware.h>

/* ps__hardware_facts() - clear *hw, then fill in what the system and the driver report. Errors:
 * PS_EINVAL, PS_EDEVICE. */
ps_status ps__hardware_facts(ps_hardware *hw, uint32_t backend, uint32_t device,
                             uint32_t n_threads);

/* ps__hardware_estimate_gpu() - rates of the GPU and its link from peaks, by the GPU's name where
 * it is known; the peaks of @hw that are 0 are estimated too. */
void ps__hardware_estimate_gpu(ps_hardware *hw);
/* ps__hardware_complete() - fill the rates that may be missing from those that may not
 * (penstock/hardware.h). */
void ps__hardware_complete(ps_hardware *hw);
/* ps__hardware_measure_gpus() - n_gpus, gpus_contention and gpus_compute_speed of @hw, with CUDA;
 * nothing but a line where memory is short (ps_hardware_peers()). */
ps_status ps__hardware_measure_gpus(ps_hardware *hw, uint32_t n, uint64_t host_mem_bytes);
/* ps__hardware_room() - BYTES that measuring may take of @host_mem_bytes, the cap of the whole
 * process (0: none), and of what the system has. */
uint64_t ps__hardware_room(uint64_t host_mem_bytes);
/* ps__hardware_fits() - whether measuring may take @takes of the GPU's memory under
 * @device_mem_bytes, 0: no cap. */
static inline bool ps__hardware_fits(uint64_t takes, uint64_t device_mem_bytes) {
  return !device_mem_bytes || takes <= device_mem_bytes;
}
/* A reading of the CPUs of this process; n_cpus 0: the kernel does not say. */
typedef struct ps__cpu_use {
  double all_s, own_s; /* CPU seconds that all processes, and that this one, have used on them */
  double at_s;
  uint32_t n_cpus;
} ps__cpu_use;
/* ps__other_work_percent() - other_work_percent of what was measured since @before. */
ps__cpu_use ps__cpu_use_now(void);
uint32_t ps__other_work_percent(const ps__cpu_use *before);
/* ps__host_reserve() - BYTES that the process holds besides arenas, scratch and tables. */
uint64_t ps__host_reserve(const ps_hardware *hw);
#endif
