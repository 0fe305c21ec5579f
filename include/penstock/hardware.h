/* penstock/hardware.h - what this machine does: the rates the cost model uses, measured or
 * estimated, and its limits. */
#ifndef PENSTOCK_HARDWARE_H
#define PENSTOCK_HARDWARE_H
#include "engine.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PS_MAX_GEMM_RATES = 6, PS_MAX_ATTENTION_RATES = 12, PS_MAX_THREAD_RATES = 6 };

/* Products of a chunk of @rows rows (tokens) with a model's weights in bf16; rows 0 ends a
 * table. Between two entries a rate is linear in log rows; before the first and behind the last
 * it is theirs. */
typedef struct ps_gemm_rate {
  uint32_t rows, reserved;
  double forward_flops_per_s; /* Y = X W^T */
  double dgrad_flops_per_s;   /* dX = dY W */
  double wgrad_flops_per_s;   /* dW = dY^T X: the rows are what is summed over */
} ps_gemm_rate;

/* Attention of a chunk in bf16: 4*head_dim FLOP a visible pair forward, 10*head_dim backward;
 * rows 0 ends a table. Four kinds of entries:
 *   whole    kv_rows = rows, packed 1: one sequence, known to be one document
 *   packed   kv_rows = rows, packed 2 or more sequences of rows / packed each, known to be a
 *            document each
 *   found    kv_rows = rows, found 1: packed documents of rows / packed each that the kernel
 *            finds: for a run whose sequences may hold several. On the
 *            CPU backend that is as packed
 *   slice    kv_rows > rows: the last rows of a sequence, on the keys of all before them
 * Where there is no entry of found the packed ones count for it, and where there is none of
 * these the whole ones. The rate of other lengths of a sequence is linear in its logarithm
 * between entries of a kind, and that of the nearest outside them. A slice's is that of a
 * sequence of its rows times a factor, which is linear in log(kv_rows / rows) from 1 at 1
 * through the slice entries' (an entry's rate over that of a whole sequence of its rows). So
 * every entry is met exactly, and between two entries rates lie between theirs. */
typedef struct ps_attention_rate {
  uint32_t rows, kv_rows, packed, found;
  double forward_flops_per_s, backward_flops_per_s;
} ps_attention_rate;

typedef struct ps_thread_rate {
  uint32_t threads, reserved; /* threads 0 ends a table */
  double bytes_per_s;
} ps_thread_rate;

/* Rates of each unit running alone, unless said; bytes are those of one direction of a copy,
 * reads plus writes elsewhere. Zero means unknown and is refused by the planner, but for what is
 * filled from other rates: the tables from gemm_flops_per_s and attention's of bf16, accumulate
 * and sumsq from the optimizer's, both in one pass from accumulate's, gather from the memory's.
 * On the CPU backend the host's n_threads compute and a "device" copy is a copy in host memory. */
/* What a host op and copies get of the host's memory at the same time. */
enum {
  PS_CONTENTION_H2D = 1,
  PS_CONTENTION_D2H = 2,
  PS_CONTENTION_SUMS = 4,
  PS_CONTENTION_OPTIMIZER = 8,
  PS_MAX_CONTENTION_RATES = 16
};
typedef struct ps_contention_rate {
  /* which of these run: sums or the optimizer, alone or beside copies; 0 behind the last entry */
  uint32_t kinds;
  uint32_t threads; /* that the sums or the optimizer run on */
  /* a copy that is not among them: alone */
  double h2d_bytes_per_s, d2h_bytes_per_s, host_bytes_per_s;
} ps_contention_rate;

/* Where rates come from. PS_MEASURED_TIGHT: from ps_hardware_measure() in less memory than it
 * takes in full. */
typedef enum ps_measured { PS_ESTIMATED = 0, PS_MEASURED = 1, PS_MEASURED_TIGHT = 2 } ps_measured;

typedef struct ps_hardware {
  uint32_t struct_bytes; /* sizeof(ps_hardware) */
  uint32_t backend;      /* PS_BACKEND_* that runs the compute stream */
  /* threads of host ops (CPU backend: of compute too) that these rates are for */
  uint32_t n_threads;
  uint32_t n_cpus;             /* CPUs the process may use: affinity and cgroup quota */
  uint32_t measured;           /* ps_measured */
  uint32_t device;             /* CUDA: which of the visible GPUs */
  uint32_t compute_capability; /* CUDA: 10 * major + minor */
  uint32_t n_sms;              /* CUDA */
  uint32_t cudnn_version;      /* CUDA: as cudnnGetVersion(), 91900 for 9.19; 0: none was found */
  uint32_t driver_version;     /* CUDA: as cuDriverGetVersion(), 13000 for 13.0 */
  uint32_t cublaslt_version;   /* CUDA: as cublasLtGetVersion(); 0: none was found */
  /* CUDA: of the flash-attn-4 that is built in, 40000036 for 4.0.0b36; 0: none is */
  uint32_t flash4_version;
  char name[64]; /* CPU model as the system reports it */
  /* GPU model as the driver reports it; empty on the CPU backend */
  char device_name[64];
  /* by storage dtype, a large product: in fp32 of all products, in bf16 the table's where there
   * is none */
  double gemm_flops_per_s[PS_N_DTYPES];
  /* forward, one whole sequence; fp32 and bf16 as above */
  double attention_flops_per_s[PS_N_DTYPES];
  double attention_bwd_flops_per_s[PS_N_DTYPES]; /* backward */
  ps_gemm_rate gemm[PS_MAX_GEMM_RATES];
  ps_attention_rate attention[PS_MAX_ATTENTION_RATES];
  double elementwise_bytes_per_s;          /* norms and the like, through device memory */
  double h2d_bytes_per_s, d2h_bytes_per_s; /* a copy to the device, to the host */
  double duplex_bytes_per_s;               /* each of the two while both run */
  double optimizer_bytes_per_s;            /* AdamW on the host, all threads */
  double accumulate_bytes_per_s;           /* gradient sums on the host */
  double accumulate_sumsq_bytes_per_s;     /* both in one pass: the last contribution's */
  double sumsq_bytes_per_s;                /* sums of squares on the host */
  /* rows of the embedding gathered by the io stream's threads (a quarter of n_threads, 1 to 4),
   * beside a GPU while the optimizer runs; all else of the io stream */
  double gather_bytes_per_s;
  /* CUDA, 0..1: products and attention run faster by this times the share of the time that the
   * GPU idles: it is bound by its power, and what it saves while it rests it spends on its
   * clock. 0: it is not, or unknown */
  double idle_gain;
  /* CUDA, 0..1: but by no more than this: the clock has a highest value */
  double idle_most;
  /* host memory bandwidth that copies and host ops share */
  double memory_bytes_per_s;
  /* CUDA: how they divide it, as measured, sums on several numbers of threads, of which the
   * planner chooses one; empty: unknown, in proportion to what each asks for */
  ps_contention_rate contention[PS_MAX_CONTENTION_RATES];
  double op_ns; /* fixed cost of an op on the compute stream */
  /* for MFU: dense peak of the GPU, by a sourced table; measured GEMM rate on a CPU; 0: unknown */
  double peak_flops_per_s;
  /* physical memory, cgroup and SLURM limits: the smallest */
  uint64_t host_memory_bytes;
  /* CUDA: of the GPU, less what other processes hold now */
  uint64_t device_memory_bytes;
  /* CUDA: what context, kernels and libraries take of it, as the driver reports it */
  uint64_t device_overhead_bytes;
  /* Ceilings as the driver tells them; 0: unknown. */
  double device_peak_bytes_per_s; /* CUDA: device memory's clock times its width */
  /* CUDA: of the PCIe link, each way, encoding taken off */
  double link_peak_bytes_per_s;
  /* For people, by ps_hardware_profile() alone; 0: not measured. */
  ps_thread_rate optimizer_by_threads[PS_MAX_THREAD_RATES];
  double first_touch_bytes_per_s; /* fresh host memory, by all CPUs */
  double pin_bytes_per_s;         /* CUDA: touched host memory pinned for the GPU */
  /* CUDA: from and to host memory that is not pinned */
  double pageable_h2d_bytes_per_s, pageable_d2h_bytes_per_s;
  /* CUDA: both at once beside products */
  double loaded_h2d_bytes_per_s, loaded_d2h_bytes_per_s;
  double loaded_gemm_flops_per_s; /* CUDA: those products */
} ps_hardware;

/* ps_hardware_estimate() - facts as the system and the driver report them, and rates from core
 * counts and clocks alone. Errors: PS_EINVAL; on CUDA PS_EDEVICE when there is no such device. */
PS_API ps_status ps_hardware_estimate(ps_hardware *out, uint32_t backend, uint32_t device,
                                      uint32_t n_threads);

/* ps_hardware_measure() - the same facts, and every rate that plans rest on timed with the
 * kernels themselves on realistic values, for about
 * @seconds in all (0: 1 on the CPU backend; on CUDA 16, whose clock falls under load) besides
 * preparation: a few seconds; on a GPU whose products were never timed half a minute, for that
 * is done under load. On CUDA the context is made, the libraries are loaded, products'
 * algorithms are chosen as a run chooses them, and device_overhead_bytes is what that took; 3.6
 * GiB of device memory and 4.3 of the host's are taken for the time; attention that takes more
 * scratch than plans foresee, or finding documents where no library does it, is left out of the
 * table. n_threads 0: all CPUs (CUDA: two less, which feed the GPU and its copies, where there
 * are four). Blocks.
 * @host_mem_bytes: cap of the process's host memory, 0: none. On the CPU backend 206 MB + 5 MB a
 * thread are taken for the time; where the cap or the system (a cgroup) leaves less, smaller
 * buffers, and the rates are PS_MEASURED_TIGHT: those of memory may then be a cache's. Errors:
 * PS_EINVAL, PS_ENOMEM, PS_EDEVICE; PS_EBUDGET less than 38 MB + 5 MB a thread are left (on CUDA
 * 1.6 GiB). */
PS_API ps_status ps_hardware_measure(ps_hardware *out, uint32_t backend, uint32_t device,
                                     uint32_t n_threads, uint64_t host_mem_bytes, double seconds);

/* ps_hardware_ample() - 1 where ps_hardware_measure() with these @host_mem_bytes has the memory
 * that it takes in full, on the machine of @hw; for rates that are PS_MEASURED_TIGHT, which may
 * then be measured anew. */
PS_API int ps_hardware_ample(const ps_hardware *hw, uint64_t host_mem_bytes);

/* ps_hardware_profile() - the same at length (@seconds 0: 5; on CUDA 125, which is 2.6 s a case,
 * the host's in three quarters of the memory that is free), and what the struct has for people. */
PS_API ps_status ps_hardware_profile(ps_hardware *out, uint32_t backend, uint32_t device,
                                     uint32_t n_threads, uint64_t host_mem_bytes, double seconds);

/* ps_hardware_read() / _write() - rates as JSON; facts are taken anew from the machine. A file
 * of another machine (CPU, GPU, CPU count or thread count differ), of other libraries (driver,
 * cuDNN, cuBLASLt) or of another layout is PS_ESTATE: to be measured anew. */
PS_API ps_status ps_hardware_read(ps_hardware *out, const char *path, uint32_t backend,
                                  uint32_t device, uint32_t n_threads);
PS_API ps_status ps_hardware_write(const ps_hardware *hw, const char *path);

/* ps_hardware_describe() - a machine as a file of ps_hardware_write() describes it, facts and
 * rates, whatever this one is: to plan for it. The file may be written by hand
 * (docs/hardware-rtx4090.json) and lack what is filled from other rates or is for people;
 * "measured": 0 marks estimates. Errors: PS_EIO, PS_EFORMAT names the field. */
PS_API ps_status ps_hardware_describe(ps_hardware *out, const char *path);

/* ps_hardware_n_gpus() - GPUs that the CUDA backend can use: 0 without CUDA in this build, a
 * driver or a GPU (ps_last_error() says which). */
PS_API uint32_t ps_hardware_n_gpus(void);

/* ps_hardware_gpu_unused() - why a GPU that there seems to be (a driver is installed) cannot be
 * used: too old a driver, none visible, CUDA not in this build. Lasts until the thread's next
 * error. NULL where one can be used, or nothing speaks for one. */
PS_API const char *ps_hardware_gpu_unused(void);

/* ps_hardware_peak() - dense bf16 peak in FLOP/s of a GPU by its name, from a table of NVIDIA's
 * figures; 0 when it is not in it. */
PS_API double ps_hardware_peak(const char *device_name);

#ifdef __cplusplus
}
#endif
#endif
