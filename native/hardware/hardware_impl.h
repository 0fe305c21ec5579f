/* hardware_impl.h - what the files of native/hardware share. */
#ifndef PS_HARDWARE_IMPL_H
#define PS_HARDWARE_IMPL_H
#include "backends/cuda/probe.h"
#include "core/core.h"

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

/* ps__hardware_slow_host() - all rates of @hw that take the host's memory or its links to devices,
 * times @by: what a plan loses where these are slower than measured. */
void ps__hardware_slow_host(ps_hardware *hw, double by);

/* What ps_hardware_get() (cache.c) is made of. Each looks at the fields of @ask that it needs, and
 * measures within its caps.
 * ps__hardware_note() - give the caller a line, if it wants one.
 * ps__hardware_measure() - ps_hardware_measure(), with PS_HARDWARE_IN_FULL ps_hardware_profile().
 * ps__hardware_ample() - whether the machine has the memory that measuring takes in full. Rates
 * that are PS_MEASURED_TIGHT may then be measured anew. */
void ps__hardware_note(const ps_hardware_ask *ask, ps_hardware_note note, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
ps_status ps__hardware_measure(ps_hardware *out, const ps_hardware_ask *ask);
bool ps__hardware_ample(const ps_hardware *hw, uint64_t host_mem_bytes);
/* ps__hardware_extra() - rates that some plans need beside those of ps_hardware_measure(), measured
 * where @hw lacks them. Where cuBLASLt has no products of FP8, or the host has too little memory,
 * or the cap of device memory is too low, a line of the log says so, @hw stays as it is, and the
 * next call tries again. Takes 256 MiB of host memory, 3.6 GiB of device memory, and 8 s; half a
 * minute more where the GPU's FP8 products were never timed. On an error @hw is untouched.
 * ps__hardware_lacks() - whether it would measure: @hw is of a GPU that computes such, has measured
 * rates, and not these. */
ps_status ps__hardware_extra(ps_hardware *hw, const ps_hardware_ask *ask, ps__extra extra);
bool ps__hardware_lacks(const ps_hardware *hw, ps__extra extra);
/* ps__hardware_disk() - the rates of ask->disk, as ps_hardware_ask says (disk.c). PS_EINVAL,
 * PS_EBUDGET, PS_EBUSY, PS_EIO: a directory does not serve. */
ps_status ps__hardware_disk(ps_hardware *hw, const ps_hardware_ask *ask);
/* ps__hardware_peers() - what a plan for ask->n_devices GPUs from hw->device on needs beside the
 * rates of one: link[PS_LINK_PEER], n_gpus, gpus_contention and gpus_compute_speed. Fields that @hw
 * has stay as they are; the others are measured. With one GPU and on the CPU backend nothing
 * happens. A line of the log tells of each of these:
 *   - Two GPUs cannot access each other's memory: the rate of PS_LINK_PEER becomes 0.
 *   - The cap of device memory is less than ps_hardware_measure_bytes() and 256 MiB, or less than
 *     4.3 GiB and 1 GiB a GPU is left of the host's: n_gpus and its rates stay as they are.
 *   - A GPU has less than a context and 4.4 GiB: gpus_compute_speed is 0, and the next call tries
 *     again.
 * Takes 15 cases of 0.4 s, and 5 s of products. Errors: as ps_hardware_gpus_check(); PS_ENOMEM.
 * ps__hardware_measure_gpus() - n_gpus, gpus_contention and gpus_compute_speed of it, with CUDA. */
ps_status ps__hardware_peers(ps_hardware *hw, const ps_hardware_ask *ask);
ps_status ps__hardware_measure_gpus(ps_hardware *hw, const ps_hardware_ask *ask);
/* Measurements that a machine's file keeps, the oldest first (kept.c). */
enum { PS__KEPT = 16 };
typedef struct ps__measurement {
  uint64_t unix_s; /* when it was made */
  ps_rates_of of;
  ps_hardware hw; /* its rates alone count */
} ps__measurement;
typedef struct ps__kept {
  uint32_t n;
  ps__measurement entry[PS__KEPT];
} ps__kept;
/* ps__kept_read() - what the file at @path keeps. A file of before has one measurement: its rates,
 *     of @hw. 0 where there is none.
 * ps__kept_add() - @hw, made now; the oldest goes.
 * ps__kept_rates() - the rates of @hw by the measurements (penstock/hardware.h). */
void ps__kept_read(ps__kept *out, const char *path, const ps_hardware *hw);
void ps__kept_add(ps__kept *k, const ps_hardware *hw, ps_rates_of of);
void ps__kept_rates(const ps__kept *k, ps_hardware *hw);

/* ps__hardware_text() - @hw as the text of its file, into memory, with the measurements that it
 * keeps, or NULL. The caller frees @out.
 * ps__hardware_kept() - the measurements in the file at @path; 0 where it has none, or others than
 * this version's.
 * ps__hardware_median() - each rate of @hw becomes the median of those that @n measurements know;
 * one that none knows stays. A table that has other shapes than that of @hw is left out. */
ps_status ps__hardware_text(ps__jsonw **out, const ps_hardware *hw, const ps__kept *kept);
/* ps__hardware_moved() - of the rate that differs most among the @n measurements @of, whose medians
 * @hw has: the largest less the smallest, over the median. @key: its name in the file. */
double ps__hardware_moved(const ps_hardware *hw, const ps_hardware *of, uint32_t n,
                          const char **key);
uint32_t ps__hardware_kept(ps__kept *out, const char *path);
void ps__hardware_median(ps_hardware *hw, const ps_hardware *const *of, uint32_t n);

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
