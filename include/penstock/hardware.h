/* penstock/hardware.h - what a machine can do: its facts and limits, and the rates that the cost
 * model of the planner uses. Rates are measured or estimated. */
#ifndef PENSTOCK_HARDWARE_H
#define PENSTOCK_HARDWARE_H
#include "engine.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PS_MAX_GEMM_RATES = 6, PS_MAX_ATTENTION_RATES = 12, PS_MAX_DELTA_RATES = 4 };

/* Products of a chunk's rows (tokens) with a model's weights. rows 0 ends a table. Between two
 * entries a rate is linear in log(rows); outside them it is the nearest entry's. */
typedef struct ps_gemm_rate {
  uint32_t rows, reserved;
  double forward_flops_per_s; /* Y = X W^T */
  double dgrad_flops_per_s;   /* dX = dY W */
  double wgrad_flops_per_s;   /* dW = dY^T X: the sum is over the rows */
} ps_gemm_rate;

/* Attention of a chunk: 4*head_dim FLOP a visible pair forward, 10*head_dim backward.
 * rows 0 ends a table. There are four kinds of entries:
 *   whole    kv_rows = rows, packed 1: one sequence that is known to be one document
 *   packed   kv_rows = rows, packed >= 2: sequences of rows / packed, each known to be a document
 *   found    kv_rows = rows, found 1: packed documents of rows / packed that the kernel finds, for
 *            runs whose sequences may hold several; on the CPU backend the same as packed
 *   slice    kv_rows > rows: the last rows of a sequence, on the keys of all rows before them
 * How the table is read:
 *   - Without entries of the kind found, the packed ones serve; without packed ones, the whole.
 *   - The rate of a sequence length is linear in its logarithm between entries of a kind, and the
 *     nearest entry's outside them.
 *   - A slice's rate is that of a sequence of its rows times a factor. The factor is linear in
 *     log(kv_rows / rows): 1 at 1, then through the slice entries. An entry's factor is its rate
 *     over that of a whole sequence of its rows.
 * So the table gives every entry exactly, and between two entries a rate between theirs. */
typedef struct ps_attention_rate {
  uint32_t rows, kv_rows, packed, found;
  double forward_flops_per_s, backward_flops_per_s;
} ps_attention_rate;

/* The gated delta rule of a chunk, by its value heads; heads 0 ends a table. A rate is in elements
 * of states a second: a row updates key_dim * value_dim of them in each value head. It is not in
 * FLOPs, because the kernels' arithmetic depends on how they cut the rows. The rows of a chunk
 * follow each other, also those of several sequences. So the rate depends on heads, which run in
 * parallel, and not on rows. It is measured with heads of 128 by 128, as models have them (on the
 * CPU 128 by 64), and serves all widths. Between two entries it is linear in log(heads); outside
 * them it is the nearest entry's. */
typedef struct ps_delta_rate {
  uint32_t heads, reserved;
  double forward_elements_per_s, backward_elements_per_s;
} ps_delta_rate;

/* Contention: the rates that a host op and copies have when they use the host's memory at the same
 * time. */
enum {
  PS_CONTENTION_H2D = 1,
  PS_CONTENTION_D2H = 2,
  PS_CONTENTION_SUMS = 4,
  PS_CONTENTION_OPTIMIZER = 8,
  PS_MAX_CONTENTION_RATES = 16
};
typedef struct ps_contention_rate {
  /* PS_CONTENTION_*: sums or the optimizer, alone or beside copies; of several GPUs also copies
   * alone; 0 ends a table */
  uint32_t kinds;
  uint32_t threads; /* of the sums or the optimizer; 0: copies alone */
  /* A copy that is not among the kinds has its rate alone. */
  double h2d_bytes_per_s, d2h_bytes_per_s, host_bytes_per_s;
} ps_contention_rate;

/* What moves bytes from one memory to another: the rows of ps_hardware.link.
 *   H2D, D2H  a copy to a device, to its host
 *   PEER      copies from one device to others, one at a time. What a device receives from several
 *             at once is taken to be no limit. ps_hardware_get() measures it. Rate 0: not known, or
 *             devices cannot access each other's memory: then each of several devices fetches all
 *             from the host.
 *   NETWORK   what a host sends to the others, and as much it receives, while they add gradients. A
 *             file may state it. Else tasks that train together measure it before they plan
 *             (ps_hosts_measure() in hosts.h). It depends on the other machines, so this machine's
 *             file does not keep it; a file of its own may (ps_hosts_rate_write()). Rate 0: not
 *             known, and plans take no time for exchanges.
 *   DISK_READ, DISK_WRITE  direct I/O of large pieces of the drives of ps_hardware_ask.disk, which
 *             ps_hardware_get() measures; writes past the drive's cache, as far as that takes. Rate
 *             0: not known, and plans take a PCIe 4.0 drive's. */
typedef enum ps_link_kind {
  PS_LINK_H2D = 0,
  PS_LINK_D2H = 1,
  PS_LINK_PEER = 2,
  PS_LINK_NETWORK = 3,
  PS_LINK_DISK_READ = 4,
  PS_LINK_DISK_WRITE = 5,
  PS_N_LINKS = 6
} ps_link_kind;
typedef struct ps_link_rate {
  uint32_t from, to;  /* ps_place_kind; of PEER two devices, of NETWORK two hosts */
  double bytes_per_s; /* of one copy alone */
  /* of each while the link back copies too; PEER, NETWORK: 0; of both DISK links together */
  double duplex_bytes_per_s;
} ps_link_rate;

/* A rate that was seen beside the one that is known for the same work. */
typedef struct ps_rate_difference {
  uint32_t kinds; /* PS_CONTENTION_*: what ran at once */
  uint32_t kind;  /* one of them: whose rate it is; 0: nothing was compared */
  double part;    /* |seen / known - 1| */
  double seen_bytes_per_s, known_bytes_per_s;
} ps_rate_difference;

/* Where rates come from. PS_MEASURED_TIGHT: measured in less memory than ps_hardware_measure()
 * takes in full. */
typedef enum ps_measured { PS_ESTIMATED = 0, PS_MEASURED = 1, PS_MEASURED_TIGHT = 2 } ps_measured;

/* A machine. Unless a field says otherwise:
 *   - a rate is that of an op or a copy that runs alone;
 *   - bytes are those of one direction of a copy, and elsewhere those read plus those written;
 *   - a rate of 0 is unknown, and the planner refuses it.
 * Some rates are filled from others where they are 0: accumulate and sumsq from the optimizer's;
 * accumulate_sumsq from accumulate's; gather from the memory's; a CPU's peak from its products;
 * those of FP8 from bf16's.
 * On the CPU backend n_threads of the host compute, and a "device" copy is one in host memory. */
typedef struct ps_hardware {
  uint32_t struct_bytes;       /* sizeof(ps_hardware) */
  uint32_t backend;            /* PS_BACKEND_* that runs the compute stream */
  uint32_t n_threads;          /* of host ops that the rates are for; CPU backend: of compute too */
  uint32_t n_cpus;             /* CPUs that the process may use: affinity and cgroup quota */
  uint32_t measured;           /* ps_measured */
  uint32_t device;             /* CUDA: which of the visible GPUs */
  uint32_t compute_capability; /* CUDA: 10 * major + minor */
  uint32_t n_sms;              /* CUDA */
  uint32_t cudnn_version;      /* CUDA: as cudnnGetVersion(), 91900 for 9.19; 0: none was found */
  uint32_t driver_version;     /* CUDA: as cuDriverGetVersion(), 13000 for 13.0 */
  uint32_t cublaslt_version;   /* CUDA: as cublasLtGetVersion(); 0: none was found */
  uint32_t flash4_version; /* CUDA: of the flash-attn-4 built in, 40000036 for 4.0.0b36; 0: none */
  char name[64];           /* CPU model as the system reports it */
  char device_name[64];    /* GPU model as the driver reports it; empty on the CPU backend */
  /* By storage dtype: a large product, and one whole sequence. They are the rates of all products
   * and of all attention of a dtype whose table is empty. */
  double gemm_flops_per_s[PS_N_DTYPES];
  double attention_flops_per_s[PS_N_DTYPES];     /* forward */
  double attention_bwd_flops_per_s[PS_N_DTYPES]; /* backward */
  /* the same by shape */
  ps_gemm_rate gemm[PS_N_DTYPES][PS_MAX_GEMM_RATES];
  ps_attention_rate attention[PS_N_DTYPES][PS_MAX_ATTENTION_RATES];
  /* Products of FP8 operands: a large one, and by shape. ps_hardware_get() and
   * ps_hardware_profile() measure them, on GPUs of compute capability 8.9 and later. An empty
   * table: the rates by shape are those of bf16 in proportion. 0: on the CPU backend, which
   * multiplies them in fp32, bf16's rate; on CUDA 1.75 times that, an estimate. All are rates
   * without fast accumulation (ps_plan_config). */
  double gemm_fp8_flops_per_s;
  ps_gemm_rate gemm_fp8[PS_MAX_GEMM_RATES];
  /* CUDA: products of bf16 an expert (mixture of experts), by the rows that an expert has on
   * average, with a random number of rows each. ps_hardware_get() with a model that has experts and
   * ps_hardware_profile() measure them. An empty table: the rate of a product of
   * as many rows, less half a tile of 128 rows an expert. */
  ps_gemm_rate gemm_grouped[PS_MAX_GEMM_RATES];
  /* CUDA: the speed of attention between products of FP8 operands, over that between bf16 ones. A
   * GPU that is bound by its power lowers its clock for FP8 products, and attention computes at the
   * same clock. 0: unknown, and taken as 1. */
  double fp8_attention_speed;
  /* CUDA: the speed of attention with heads of 64, over that with as many values in heads of 128,
   * forward and backward. The first pair is measured with a sequence of 8,192 tokens, between as
   * many products as in the table. The second pair is for 131,072 tokens and more, where products
   * are few: measured with 32,768 tokens between few products, over the table's speed there.
   * Attention with heads of 64 or fewer has the table's rates times this. Between the two lengths
   * it follows the logarithm of the keys a row, beyond them it is that of the nearer. Wider heads
   * have the table's rates, which are those of heads of 128. 0: unknown. Without the second
   * pair the first holds for all lengths; without the first the speed is 1. */
  double heads64_attention_speed, heads64_attention_bwd_speed;
  double heads64_long_attention_speed, heads64_long_attention_bwd_speed;
  /* CUDA: attention with heads of 512, and of all above 256, which no library has: the plain
   * kernels', by 4 and 10 FLOPs as above. 0: an estimate from elementwise_bytes_per_s. */
  double heads512_attention_flops_per_s, heads512_attention_bwd_flops_per_s;
  /* The delta rule, of all dtypes. On the CPU backend an entry has as many heads as there are
   * threads: a key head with its value heads is one thread's. An empty table: an estimate from what
   * an H200 takes, by the GPU's SMs and memory; of a CPU by its products. */
  ps_delta_rate delta[PS_MAX_DELTA_RATES];
  double elementwise_bytes_per_s; /* norms and the like, through device memory */
  ps_link_rate link[PS_N_LINKS];  /* ps_link_kind */
  double optimizer_bytes_per_s;   /* AdamW on the host, all threads */
  /* Of an update in two parts, each measured alone and over the bytes that it moves. Reads take
   * more time than writes, and the weights' part mostly reads. 0: the whole update's rate. */
  double optimizer_weights_bytes_per_s, optimizer_state_bytes_per_s;
  /* A whole update of state in 8 bits, which takes more arithmetic than memory. 0: not measured;
   * plans take what a thread did on another machine. */
  double optimizer_8_bits_bytes_per_s;
  double accumulate_bytes_per_s;       /* gradient sums on the host */
  double accumulate_sumsq_bytes_per_s; /* a sum and its squares in one pass: the last sum's */
  double sumsq_bytes_per_s;            /* sums of squares on the host */
  /* BYTES per second at which the io stream gathers rows of the embedding and runs its other ops.
   * The stream has 1 thread where n_threads is below 8, else n_threads / 2. On CUDA it is measured
   * beside the optimizer, whose threads help; caches may have some of the rows. */
  double gather_bytes_per_s;
  /* CUDA, 0..1: products and attention take 1 / (1 + idle_gain * idle) of their time, where idle
   * is the fraction of the time that the GPU idled before. idle_most bounds the product, as the
   * clock has a highest value. 0: the GPU is not bound by its power, or unknown. */
  double idle_gain;
  double idle_most;          /* CUDA, 0..1 */
  double memory_bytes_per_s; /* host memory bandwidth that copies and host ops divide */
  /* CUDA: how copies and host ops divide it, as measured, with sums on several numbers of threads
   * of which the planner chooses one. Empty: in proportion to what each takes alone. */
  ps_contention_rate contention[PS_MAX_CONTENTION_RATES];
  /* CUDA: contention while n_gpus GPUs copy at once. An entry has the rates of each GPU; entries
   * without copies are in contention alone. n_gpus 0: not measured, and the copies of several GPUs
   * divide memory_bytes_per_s. */
  uint32_t n_gpus;
  /* Of the CPUs, what other processes took while the rates were measured, if more than a tenth; 0:
   * less, or unknown. Rates are then too low: predicted times are too long, and MFU on a CPU, whose
   * peak is one of the rates, is too high. */
  uint32_t other_work_percent;
  /* How far rates moved while ps_hardware_profile() measured: of the one that moved most, the
   * largest of three passes less the smallest, over the median, which counts; 0: unknown. */
  uint32_t moved_percent, reserved;
  ps_contention_rate gpus_contention[PS_MAX_CONTENTION_RATES];
  /* CUDA, at most 1: the speed of products and attention on n_gpus GPUs at once, over that on one
   * alone, beside copies both ways. It is that of the slowest GPU, for which a step waits. It is a
   * factor on both in plans for as many GPUs. 0: unknown, and taken as 1. */
  double gpus_compute_speed;
  double op_ns; /* fixed cost of an op on the compute stream */
  /* Dense peak for MFU: on CUDA the GPU's, from a table with sources; on a CPU the measured GEMM
   * rate. 0: unknown. */
  double peak_flops_per_s;
  uint64_t host_memory_bytes;     /* the least of physical memory, cgroup and SLURM limits */
  uint64_t device_memory_bytes;   /* CUDA: of the GPU, less what other processes hold now */
  uint64_t device_overhead_bytes; /* CUDA: what the GPU loses to context, kernels, libraries */
  /* CUDA: what it loses besides to the kernels of FP8 products. Plans in FP8 count both. 0 also in
   * files that were written before the field was: there device_overhead_bytes has FP8's part. */
  uint64_t fp8_overhead_bytes;
  /* Ceilings as the driver reports them; 0: unknown. */
  double device_peak_bytes_per_s; /* CUDA: device memory's clock times its width */
  double link_peak_bytes_per_s;   /* CUDA: of the PCIe link, each way, without encoding */
} ps_hardware;

/* ps_hardware_estimate() - the facts that the system and the driver report, and rates from core
 * counts and clocks alone. @n_threads is as ps_hardware_measure() takes it. Errors: PS_EINVAL; on
 * CUDA PS_EDEVICE where there is no such device. */
PS_API ps_status ps_hardware_estimate(ps_hardware *out, uint32_t backend, uint32_t device,
                                      uint32_t n_threads);

/* ps_hardware_measure() - the same facts, and every rate that plans use, timed with the kernels
 * themselves on realistic values.
 * @n_threads       0: all CPUs. CUDA: two fewer where there are four or more; the two feed the GPU
 *                  and its copies.
 * @device_mem_bytes  CUDA: cap of what the GPU loses to the process, 0: none.
 * @host_mem_bytes  cap of the process's host memory, 0: none.
 * @seconds         of timing in all. 0: 1 on the CPU backend, 16 on CUDA, where the clock falls
 *                  under load. Preparation adds a few seconds. On CUDA it also adds up to 5 s of
 *                  load, and half a minute where the products of the GPU were never timed: they are
 *                  timed under load.
 * Takes, for the time that it runs: on the CPU backend 206 MB + 5 MB a thread; on CUDA 3.6 GiB of
 * device memory and 4.3 GiB of host memory. Where the cap or the system (a cgroup) leaves less, the
 * buffers are smaller and the rates PS_MEASURED_TIGHT: those of memory may then be a cache's.
 * CUDA: the context is made, the libraries are loaded, and products' algorithms are chosen as a run
 * chooses them; device_overhead_bytes is what that took. The table leaves out attention that takes
 * more scratch than plans expect, and finding documents where no library does it. The rates of
 * FP8, of experts, of the delta rule on CUDA and of heads above 256 are left to ps_hardware_get().
 * Blocks. Errors: PS_EINVAL, PS_ENOMEM, PS_EDEVICE; PS_EBUDGET where less than 38 MB + 5 MB a
 * thread are left (on CUDA 1.6 GiB), or @device_mem_bytes is less than
 * ps_hardware_measure_bytes(). */
PS_API ps_status ps_hardware_measure(ps_hardware *out, uint32_t backend, uint32_t device,
                                     uint32_t n_threads, uint64_t device_mem_bytes,
                                     uint64_t host_mem_bytes, double seconds);

/* ps_hardware_measure_bytes() - BYTES of a GPU's memory that a cap must allow for measuring @hw's
 * machine: 4.6 GiB on an H200, of which 1 GiB is for the context and the kernels. 0 on the CPU
 * backend, and where the build has no CUDA. */
PS_API uint64_t ps_hardware_measure_bytes(const ps_hardware *hw);

/* ps_hardware_profile() - ps_hardware_measure() in full: longer, and on CUDA in more memory, with
 * the rates that it leaves out. All is measured three times, pass after pass, and of each rate
 * the median counts, so that the machine need not be quiet all the time (moved_percent).
 * @seconds 0: 5; on CUDA 125, which is 0.7 s a case and pass. On CUDA the host's cases use three
 * quarters of the memory that is free. Arguments and errors otherwise as above. */
PS_API ps_status ps_hardware_profile(ps_hardware *out, uint32_t backend, uint32_t device,
                                     uint32_t n_threads, uint64_t host_mem_bytes, double seconds);

/* ps_hardware_read(), ps_hardware_write() - rates as JSON. Reading takes the facts anew from the
 * machine. Errors: PS_EIO, PS_EFORMAT; PS_ESTATE where the file must be measured anew:
 *   - it is of another machine: CPU, GPU, CPU count or thread count differ;
 *   - it is of other libraries: driver, cuDNN or cuBLASLt differ;
 *   - it has another layout. */
PS_API ps_status ps_hardware_read(ps_hardware *out, const char *path, uint32_t backend,
                                  uint32_t device, uint32_t n_threads);
PS_API ps_status ps_hardware_write(const ps_hardware *hw, const char *path);

/* ---- this machine, from the cache ------------------------------------------------------------ */

typedef enum ps_hardware_how {
  PS_HARDWARE_ONCE = 0,    /* from the cache; what it lacks is measured, and kept there */
  PS_HARDWARE_ANEW = 1,    /* ps_hardware_measure() now; added to the cache's file */
  PS_HARDWARE_IN_FULL = 2, /* ps_hardware_profile() now; added to the cache's file */
  PS_N_HARDWARE_HOWS = 3
} ps_hardware_how;

/* What ps_hardware_get() tells its caller in a line, without a name before it. */
typedef enum ps_hardware_note {
  PS_HARDWARE_MEASURES = 0,   /* measuring begins; how long it takes */
  PS_HARDWARE_OTHER_WORK = 1, /* other_work_percent of what was measured is not 0 */
  PS_HARDWARE_ESTIMATES = 2,  /* a cap leaves no room to measure: rates are estimates */
  PS_HARDWARE_NOT_KEPT = 3,   /* the cache cannot be written: the next call measures again */
  PS_HARDWARE_MOVED = 4       /* PS_HARDWARE_IN_FULL: how far rates moved meanwhile */
} ps_hardware_note;
typedef void (*ps_hardware_note_fn)(void *user, ps_hardware_note note, const char *line);

typedef struct ps_hardware_ask {
  uint32_t struct_bytes; /* sizeof(ps_hardware_ask) */
  uint32_t backend;      /* PS_BACKEND_* */
  uint32_t device;       /* CUDA: which of the visible GPUs */
  uint32_t n_threads;    /* 0: as of ps_hardware_measure() */
  uint32_t n_devices;    /* CUDA: the rates of so many GPUs from @device on together, too; 0: 1 */
  uint32_t fp8;          /* 1: the rates of FP8 products too, on a GPU that has them */
  uint32_t how;          /* ps_hardware_how */
  uint32_t reserved;
  /* Caps of what measuring may take: of what each GPU loses to the process, and of the process's
   * host memory; 0: none. PS_HARDWARE_IN_FULL has none of device memory. */
  uint64_t device_mem_bytes, host_mem_bytes;
  double seconds; /* of measuring; 0: as of the function that measures */
  /* directories of a disk (ps_train_config.disk), whose rates are measured there where the file has
   * none, or how is not PS_HARDWARE_ONCE: 3 s and up to 8 GiB written, in full 20 s and up to 256
   * GiB. NULL: no disk. The file keeps the rates of one disk. */
  const char *disk;
  /* The model to plan for, on a GPU: the rates of products of experts, of the delta rule and of
   * attention's heads above 256 too, where it has them. NULL: none of these. */
  const ps_model_config *model;
  ps_hardware_note_fn note; /* NULL: nothing is told */
  void *user;
} ps_hardware_ask;

/* ps_hardware_get() - this machine's rates. A file of the user's cache (ps_hardware_cache_path())
 * keeps them; it is measured anew where ps_hardware_read() says so, and where its rates are
 * PS_MEASURED_TIGHT and there is more memory now. Where a cap leaves no room to measure, the file's
 * rates count, else estimates. With ask->fp8, ask->model and with several GPUs, what the file
 * lacks of them is measured and added. Where a cap leaves no room for that, a line of the log says
 * so, and the rates stay as they are.
 * @ask  borrowed for the call.
 * Takes what ps_hardware_measure() takes; with CUDA also up to a minute for FP8's products, 10 s
 * for each of what ask->model needs, and 15 s and 4.4 GiB a GPU for several GPUs.
 * Threads: any; ask->note is called by this one. Of processes that measure at once each writes the
 *         file as a whole. Blocks: as long as measuring takes.
 * Errors: PS_EINVAL, PS_ENOMEM, PS_EDEVICE; several GPUs: as ps_hardware_gpus_check(). PS_EBUDGET
 *         with PS_HARDWARE_ANEW and PS_HARDWARE_IN_FULL alone. @out is untouched.
 *
 * ps_hardware_cache_path() - the path of that file for the machine @hw, of which the names of CPU
 * and GPU and the thread count matter. Machines that have one cache in common thus keep their rates
 * apart. Errors: as ps_cache_path(). */
PS_API ps_status ps_hardware_get(ps_hardware *out, const ps_hardware_ask *ask);
PS_API ps_status ps_hardware_cache_path(char *out, uint64_t room, const ps_hardware *hw);

/* How rates came to be known. */
typedef enum ps_rates_of {
  PS_RATES_QUIET = 0, /* measured while nothing else ran: ps_hardware_measure(), profile() */
  PS_RATES_ARENA =
      1,            /* measured on the memory of a training before it began (ps_trainer_arena()) */
  PS_RATES_RUN = 2, /* seen in the steps of a training */
  PS_N_RATES_OF = 3
} ps_rates_of;

/* ps_hardware_remember() - add rates that a training measured or had to this machine's file of the
 * cache, which keeps the last 16 measurements with their dates. From the next ps_hardware_get() on
 * a rate is the median of the last five of one kind: of a training's if any is newer than the last
 * that ps_hardware_get() made, else of those on a training's memory, else of its own. A median, so
 * that plans follow no single lucky or unlucky measurement.
 * @rates  of this machine, such as the plan's with what was seen in its place. The rate of the
 *         network is not kept.
 * Nothing happens where the file is missing or of another machine, and where @rates are estimates.
 * Threads: as ps_hardware_get(). Errors: PS_EINVAL, PS_ENOMEM, PS_EIO. */
PS_API ps_status ps_hardware_remember(const ps_hardware *rates, ps_rates_of of);

/* ps_hardware_json() - the same as a JSON object on one line, for people and programs: without the
 * layout, the backend by its name, measured as true or false.
 * @room  BYTES of @out, which is untouched on error; PS_HARDWARE_JSON_BYTES is always enough.
 * Errors: PS_EINVAL, PS_ENOMEM. */
enum { PS_HARDWARE_JSON_BYTES = 32768 };
PS_API ps_status ps_hardware_json(char *out, uint64_t room, const ps_hardware *hw);

/* ps_hardware_describe() - facts and rates of any machine from a file as ps_hardware_write() writes
 * it, to plan for that machine. The file may be written by hand: rates that are filled from others
 * may be missing. "measured": 0 marks estimates.
 * Errors: PS_EIO, PS_EFORMAT names the field. */
PS_API ps_status ps_hardware_describe(ps_hardware *out, const char *path);

/* ps_hardware_of_gpu() - an estimate of a machine with a GPU of this name, to plan for a GPU that
 * is not here. The host is a desktop with 96 GiB, or for a GPU of data centres a server with 128.
 * @name  rtx3090, rtx4090, rtx5090, a100 (80 GB), h100 or h200; case, spaces, '-' and '_' do not
 *        matter.
 * The shares of the peaks are fitted to published speeds (native/hardware/gpus.c). Errors:
 * PS_EINVAL names the GPUs that are known. */
PS_API ps_status ps_hardware_of_gpu(ps_hardware *out, const char *name);

/* What a GPU's sensors say, as its management library (NVML) reads them. 0: unknown. */
typedef struct ps_gpu_state {
  uint32_t struct_bytes, reserved; /* sizeof(ps_gpu_state) */
  double clock_mhz;                /* of the SMs */
  double power_w;                  /* of the board; the driver's mean over up to a second, by GPU */
  double temperature_c;
  double energy_j; /* that the board took since the driver was loaded, a counter */
} ps_gpu_state;

/* ps_hardware_gpu_state() - what the sensors of GPU @device say now. All fields are 0 on the CPU
 * backend and where NVML is missing (libnvidia-ml.so.1, which comes with the driver).
 * Threads: any. Blocks: four calls of NVML, without work on the GPU. Errors: PS_EINVAL: @out is
 * NULL, or the backend is unknown. */
PS_API ps_status ps_hardware_gpu_state(ps_gpu_state *out, uint32_t backend, uint32_t device);

/* ps_hardware_n_gpus() - GPUs that the CUDA backend can use. 0 where the build has no CUDA, or
 * there is no driver or no GPU; ps_last_error() says which. */
PS_API uint32_t ps_hardware_n_gpus(void);

/* ps_hardware_gpus_check() - whether the GPUs @device to @device + @n - 1 can train together.
 * Errors: PS_EINVAL: @n is not in 1..PS_MAX_DEVICES, so many are not visible, or two of them are of
 * different models. PS_EDEVICE: there is no driver, or the build has no CUDA. */
PS_API ps_status ps_hardware_gpus_check(uint32_t device, uint32_t n);

/* ps_hardware_gpu_unused() - why a GPU cannot be used although a driver is installed: the driver is
 * too old, no GPU is visible, or the build has no CUDA. NULL where a GPU can be used, or where
 * there is no driver. The text lasts until the thread's next error. */
PS_API const char *ps_hardware_gpu_unused(void);

/* ps_hardware_peak() - dense bf16 peak in FLOP/s of a GPU by its name, from a table of NVIDIA's
 * figures. 0: the table lacks it. */
PS_API double ps_hardware_peak(const char *device_name);

#ifdef __cplusplus
}
#endif
#endif
