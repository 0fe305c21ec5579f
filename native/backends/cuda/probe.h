/* probe.h - what a GPU is and what it does: facts from the driver, rates by running the kernels,
 * memory as the driver reports it. */
#ifndef PS_BACKENDS_CUDA_PROBE_H
#define PS_BACKENDS_CUDA_PROBE_H
#include <penstock/hardware.h>
#include <stdbool.h>

/* GPUs that the driver shows; 0 when there is none, and the last error says why. */
uint32_t ps__cuda_n_devices(void);

/* ps__cuda_facts() - name, capability, SMs, memory less what others hold, ceilings, the driver's
 * and the libraries' versions of GPU hw->device into @hw. Makes no context. Errors: PS_EDEVICE
 * no driver, no such GPU. */
ps_status ps__cuda_facts(ps_hardware *hw);

/* ps__cuda_place() - pages of @p that are touched from now on come from the GPU's NUMA node as
 * long as it has some, as the engine's host spaces do: a wish. */
void ps__cuda_place(uint32_t device, void *p, uint64_t bytes);

/* Work of the host to have beside copies. */
typedef struct ps__host_load {
  void *arg;
  uint32_t kind, threads;        /* PS_CONTENTION_*; that it runs on */
  ps_status (*start)(void *arg); /* returns when it is at work */
  double (*bytes)(void *arg);    /* read and written since */
  void (*stop)(void *arg);
} ps__host_load;

/* Host memory to copy from and to, a copy each way in each place in turn: it is not equally fast
 * everywhere (NUMA nodes, also those that a virtual machine does not show). */
enum { PS__COPY_BYTES = 128 << 20 };
typedef struct ps__host_places {
  char *first;     /* 2 * PS__COPY_BYTES, page-aligned */
  uint64_t stride; /* BYTES to the next */
  uint32_t n;
} ps__host_places;

/* ps__cuda_driver_there() - whether there is a driver, usable or not. */
bool ps__cuda_driver_there(void);

/* ps__cuda_measure() - the GPU's rates and device_overhead_bytes into @hw; with @at_length also
 * its figures for people. @seconds is for each of PS__CUDA_CASES (PS__CUDA_MORE_CASES more at
 * length), the first two being load that is not counted, since a large GPU is bound by its power
 * and its clock falls only after some seconds; of each case the second half counts. Products are
 * measured with attention between them and attention with products between, as in a step. Takes
 * 3.6 GiB of device memory for the time and pins @places, 1 GiB more of the host's at length.
 * fp32 attention does not exist on CUDA: its rate is bf16's. @load: sums of gradients, on all
 * threads first, and the optimizer, for what they and copies get of the host's memory at once
 * (memory_shares; memory_bytes_per_s is all of it beside the first). Errors: PS_EDEVICE,
 * PS_ENOMEM. */
enum { PS__CUDA_CASES = 24, PS__CUDA_CASES_A_LOAD = 4, PS__CUDA_MORE_CASES = 2 };
typedef struct ps__host_work {
  ps__host_places places;
  const ps__host_load *load;
  uint32_t n_loads;
} ps__host_work;
ps_status ps__cuda_measure(ps_hardware *hw, double seconds, bool at_length,
                           const ps__host_work *host);

/* ps__cuda_memory_used() - BYTES of GPU @device that the driver reports for this process: its
 * entry in the driver's list of processes or, where the list does not show it (containers), what
 * is used now less what was used before the first context. */
ps_status ps__cuda_memory_used(uint32_t device, uint64_t *out_bytes);

#endif
