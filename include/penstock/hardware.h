/* penstock/hardware.h - what this machine does: the rates the cost model uses, measured or estimated, and its limits. */
#ifndef PENSTOCK_HARDWARE_H
#define PENSTOCK_HARDWARE_H
#include "engine.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rates of each unit running alone, unless said; bytes are those of one direction of a copy, reads plus writes elsewhere. Zero means
 * unknown and is refused by the planner. On the CPU backend the host's n_threads compute and a "device" copy is a copy in host memory. */
typedef struct ps_hardware {
  uint32_t struct_bytes; /* sizeof(ps_hardware) */
  uint32_t backend;      /* PS_BACKEND_* that runs the compute stream */
  uint32_t n_threads;    /* threads of host ops (CPU backend: of compute too) that these rates are for */
  uint32_t n_cpus;       /* CPUs the process may use: affinity and cgroup quota */
  uint32_t measured;     /* 1: by ps_hardware_measure(); 0: a built-in estimate */
  uint32_t device;       /* CUDA: which of the visible GPUs */
  uint32_t compute_capability; /* CUDA: 10 * major + minor */
  uint32_t n_sms;              /* CUDA */
  uint32_t cudnn_version;      /* CUDA: as cudnnGetVersion(), 91900 for 9.19; 0: none was found */
  uint32_t reserved;
  char name[64];                            /* CPU model as the system reports it */
  char device_name[64];                     /* GPU model as the driver reports it; empty on the CPU backend */
  double gemm_flops_per_s[PS_N_DTYPES];     /* large GEMM under sustained load, by storage dtype */
  double attention_flops_per_s[PS_N_DTYPES];     /* forward, 4*head_dim FLOP a visible pair */
  double attention_bwd_flops_per_s[PS_N_DTYPES]; /* backward, 10*head_dim FLOP a visible pair */
  double elementwise_bytes_per_s;           /* norms and the like, of device memory */
  double h2d_bytes_per_s, d2h_bytes_per_s;  /* a copy to the device, to the host */
  double duplex_bytes_per_s;                /* each of the two while both run */
  double optimizer_bytes_per_s;             /* host optimizer and gradient sums */
  double memory_bytes_per_s;                /* host memory bandwidth that copies and host ops share */
  double op_ns;                             /* fixed cost of an op on the compute stream */
  double peak_flops_per_s;                  /* for MFU: dense peak of the GPU, by a sourced table; measured GEMM rate on a CPU; 0: unknown */
  uint64_t host_memory_bytes;               /* physical memory, cgroup and SLURM limits: the smallest */
  uint64_t device_memory_bytes;             /* CUDA: of the GPU, less what other processes hold now */
  uint64_t device_overhead_bytes;           /* CUDA: what context, kernels and libraries take of it, as the driver reports it */
} ps_hardware;

/* ps_hardware_estimate() - facts as the system and the driver report them, and rates from core counts and clocks alone.
 * Errors: PS_EINVAL; on CUDA PS_EDEVICE when there is no such device. */
PS_API ps_status ps_hardware_estimate(ps_hardware *out, uint32_t backend, uint32_t device, uint32_t n_threads);

/* ps_hardware_measure() - the same facts, and rates timed with the kernels themselves on realistic values: GEMM, attention both ways, a
 * norm, copies both ways, an optimizer update; about @seconds in all. On CUDA the context is made and the libraries are loaded, and
 * device_overhead_bytes is what that took. n_threads 0: all CPUs (CUDA: two less, which feed the GPU and its copies, where there are
 * four). Blocks. Errors: PS_EINVAL, PS_ENOMEM, PS_EDEVICE. */
PS_API ps_status ps_hardware_measure(ps_hardware *out, uint32_t backend, uint32_t device, uint32_t n_threads, double seconds);

/* ps_hardware_read() / _write() - rates as JSON; facts are taken anew from the machine. A file of another machine (CPU, GPU, CPU count or
 * thread count differ) is PS_ESTATE. */
PS_API ps_status ps_hardware_read(ps_hardware *out, const char *path, uint32_t backend, uint32_t device, uint32_t n_threads);
PS_API ps_status ps_hardware_write(const ps_hardware *hw, const char *path);

/* ps_hardware_describe() - a machine as a file of ps_hardware_write() describes it, facts and rates, whatever this one is: to plan for it. Errors: PS_EIO,
 * PS_EFORMAT names the field. */
PS_API ps_status ps_hardware_describe(ps_hardware *out, const char *path);

/* ps_hardware_n_gpus() - GPUs that the CUDA backend can use: 0 without CUDA in this build, a driver or a GPU (ps_last_error() says which). */
PS_API uint32_t ps_hardware_n_gpus(void);

/* ps_hardware_peak() - dense bf16 peak in FLOP/s of a GPU by its name, from a table of NVIDIA's figures; 0 when it is not in it. */
PS_API double ps_hardware_peak(const char *device_name);

#ifdef __cplusplus
}
#endif
#endif
