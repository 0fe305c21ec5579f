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

/* ps__cuda_gpus_check() - ps_hardware_gpus_check() (penstock/hardware.h). */
ps_status ps__cuda_gpus_check(uint32_t device, uint32_t n);
/* ps__cuda_peers() - whether each of the @n GPUs from @device on can access the memory of each
 * other one; if not, a line says which cannot. Makes no context.
 * ps__cuda_peer_rate() - BYTES/s of copies from one to another, of the slowest pair; 0 where one
 * has no access. Takes 128 MiB of each GPU meanwhile. */
ps_status ps__cuda_peers(uint32_t device, uint32_t n, bool *out);
ps_status ps__cuda_peer_rate(uint32_t device, uint32_t n, double *out);
/* ps__cuda_share_gpu() - for tests: from now on an engine's devices take the visible GPUs in turn,
 * so that several devices can be tested on one GPU. The devices of a GPU share its memory. */
void ps__cuda_share_gpu(bool share);

/* ps__cuda_place() - prefer the GPU's NUMA node for pages of @p that are touched from now on, as
 * the engine's host spaces do. Other nodes serve when that node has no pages left. */
void ps__cuda_place(uint32_t device, void *p, uint64_t bytes);

/* Host work that runs beside copies. */
typedef struct ps__host_load {
  void *arg;
  uint32_t kind, threads;        /* PS_CONTENTION_*; the threads it takes */
  ps_status (*start)(void *arg); /* returns when it is at work */
  double (*bytes)(void *arg);    /* read and written since */
  void (*stop)(void *arg);
} ps__host_load;

/* Host memory to copy from and to. Each place in turn has a copy each way, because host memory is
 * not equally fast everywhere: NUMA nodes, some hidden by a virtual machine. */
enum { PS__COPY_BYTES = 128 << 20 };
typedef struct ps__host_places {
  char *first;     /* 2 * PS__COPY_BYTES, page-aligned */
  uint64_t stride; /* BYTES to the next */
  uint32_t n;
} ps__host_places;

/* ps__cuda_driver_there() - whether there is a driver, usable or not. */
bool ps__cuda_driver_there(void);

/* ps__cuda_measure() - the GPU's rates and device_overhead_bytes into @hw; with @profile also
 * every ps__extra, FP8 on GPUs of compute capability 8.9 and later.
 * @seconds  of each of PS__CUDA_CASES cases (PS__CUDA_MORE_CASES more with @profile). The first
 *           two cases are load that is not counted, and last up to 5 s: a large GPU is bound by its
 *           power, and its clock falls only after some seconds. Of every other case the second half
 *           counts.
 * @host     places to copy from and to, and loads: gradient sums, on all threads first, and the
 *           optimizer. Each load runs beside copies, to measure how they divide the host's memory
 *           bandwidth (contention). memory_bytes_per_s is the whole bandwidth beside the first
 *           load.
 * Products are measured with attention between them and attention with products between, as in a
 * step. Takes 3.6 GiB of device memory meanwhile and pins @host's places. CUDA has no fp32
 * attention: its rate is bf16's. Errors: PS_EDEVICE, PS_ENOMEM. */
enum { PS__CUDA_CASES = 26, PS__CUDA_CASES_A_LOAD = 4, PS__CUDA_MORE_CASES = 14 };
typedef struct ps__host_work {
  ps__host_places places;
  const ps__host_load *load;
  uint32_t n_loads;
} ps__host_work;
ps_status ps__cuda_measure(ps_hardware *hw, double seconds, bool profile,
                           const ps__host_work *host);
/* ps__cuda_measure_bytes() - what the GPU of @hw loses to the process meanwhile, at most: 3.6 GiB,
 * and 1 GiB for the context and the kernels, or device_overhead_bytes where that is more. */
uint64_t ps__cuda_measure_bytes(const ps_hardware *hw);

/* ps__cuda_measure_extra() - rates that ps__cuda_measure() leaves out without @profile: up to 5 s
 * of load, then the cases of @seconds. Where cuBLASLt lacks a product of FP8, a line says so and
 * those rates stay as they are. Takes of @host one place, and device memory and errors as above. */
typedef enum ps__extra {
  PS__EXTRA_FP8,      /* FP8 products, fp8_attention_speed, fp8_overhead_bytes: 6 cases */
  PS__EXTRA_EXPERTS,  /* gemm_grouped: 4 cases */
  PS__EXTRA_DELTA,    /* delta: 3 cases */
  PS__EXTRA_HEADS512, /* heads512_attention_flops_per_s and its backward: 1 case */
  PS__N_EXTRAS
} ps__extra;
ps_status ps__cuda_measure_extra(ps_hardware *hw, ps__extra extra, double seconds,
                                 const ps__host_work *host);

/* ps__cuda_measure_gpus() - what @n GPUs from hw->device on do at once:
 *   n_gpus, gpus_contention  copies of all of them, alone and beside each load, @seconds a case;
 *                            left as they are where hw->n_gpus is @n
 *   gpus_compute_speed       products and attention on all of them beside copies both ways, over
 *                            those on one alone: 5 s, of which 2.5 s are load that does not count.
 *                            Where a GPU lacks memory or fails, a line says so, and it is 0
 * @host has equally many places for each GPU, GPU after GPU. Takes 4.4 GiB of device memory on each
 * GPU and pins @host's places meanwhile; where pinning is refused, @hw stays as it is. Contexts in
 * which kernels ran are kept. Errors: PS_EDEVICE, PS_ENOMEM. */
ps_status ps__cuda_measure_gpus(ps_hardware *hw, uint32_t n, double seconds,
                                const ps__host_work *host);

/* ps__cuda_measure_arena() - a row of @out for each of the @n @kinds: what copies to and from
 * @host's places, and its load of that kind, get while they run; @seconds a row, of which the
 * second half counts. The places are pinned and hold zeros, and still do afterwards.
 * @device  256 MiB of GPU hw->device, which become zeros. Errors: PS_EDEVICE. */
ps_status ps__cuda_measure_arena(const ps_hardware *hw, void *device, const ps__host_work *host,
                                 const uint32_t *kinds, uint32_t n, double seconds,
                                 ps_contention_rate *out);

/* ps__cuda_memory_used() - BYTES that GPU @device has lost to this process: what the whole GPU
 * has in use now, less what it had in use before the first context, as nvidia-smi's memory.used
 * shows it. That is more than the process's entry in the driver's list, which lacks page tables.
 * Changes of other processes count where the list does not show them. Without NVML the figure is
 * all that is in use. */
ps_status ps__cuda_memory_used(uint32_t device, uint64_t *out_bytes);

/* ps__cuda_state() - the sensors of GPU @device into @out, which is zeros and stays so where there
 * is no driver, no such GPU or no NVML. */
void ps__cuda_state(uint32_t device, ps_gpu_state *out);

#endif
