/* penstock/hardware.h - what this machine does: the rates the cost model uses, measured or estimated, and its limits. */
#ifndef PENSTOCK_HARDWARE_H
#define PENSTOCK_HARDWARE_H
#include "engine.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rates of the compute unit running alone with n_threads threads. Zero means unknown and is refused by the planner. */
typedef struct ps_hardware {
  uint32_t struct_bytes; /* sizeof(ps_hardware) */
  uint32_t backend;      /* PS_BACKEND_CPU */
  uint32_t n_threads;    /* compute threads these rates are for */
  uint32_t n_cpus;       /* CPUs the process may use: affinity and cgroup quota */
  uint32_t measured;     /* 1: by ps_hardware_measure(); 0: a built-in estimate */
  uint32_t reserved;
  char name[64];                            /* CPU or GPU model as the system reports it */
  double gemm_flops_per_s[PS_N_DTYPES];     /* large GEMM, by storage dtype */
  double attention_flops_per_s[PS_N_DTYPES];
  double elementwise_bytes_per_s;           /* bytes read plus written by norms and the like */
  double copy_bytes_per_s;                  /* bytes moved by a copy between spaces (counted once), one direction alone */
  double optimizer_bytes_per_s;             /* bytes read plus written by the host optimizer */
  double memory_bytes_per_s;                /* host memory bandwidth that all of these share, read plus written */
  double op_ns;                             /* fixed cost of an op */
  double peak_flops_per_s;                  /* for MFU: measured GEMM ceiling on a CPU */
  uint64_t host_memory_bytes;               /* physical memory, cgroup and SLURM limits: the smallest */
} ps_hardware;

/* ps_hardware_estimate() - rates from core count and clock alone. Errors: PS_EINVAL. */
PS_API ps_status ps_hardware_estimate(ps_hardware *out, uint32_t n_threads);

/* ps_hardware_measure() - time a GEMM, an attention, a norm, a copy and an optimizer update, about @seconds in all.
 * n_threads 0: all CPUs. Blocks. Errors: PS_ENOMEM, PS_EDEVICE. */
PS_API ps_status ps_hardware_measure(ps_hardware *out, uint32_t n_threads, double seconds);

/* ps_hardware_read() / _write() - as JSON. A file of another machine (CPU model, CPU count or thread count differ) is PS_ESTATE. */
PS_API ps_status ps_hardware_read(ps_hardware *out, const char *path, uint32_t n_threads);
PS_API ps_status ps_hardware_write(const ps_hardware *hw, const char *path);

#ifdef __cplusplus
}
#endif
#endif
