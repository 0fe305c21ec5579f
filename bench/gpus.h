/* gpus.h - what bench/gpus.c and bench/gpus_flows.c share: the GPUs, and the cases. A FLOW is
 * copies or products that follow each other on one stream of a GPU. */
#ifndef PS_BENCH_GPUS_H
#define PS_BENCH_GPUS_H
#include "backends/cuda/device.h"
#include "backends/cuda/nvml.h"

#define MIB ((uint64_t)1 << 20)

/* Offsets in each GPU's memory, in MiB: operands and result of products; what copies read and
 * write; workspace. */
enum { A = 0, B = 64, C = 176, IN = 512, OUT = 1024, SENT = 1536, RECEIVED = 2048, WORK = 2560 };
enum { AREA_MIB = 512, DEVICE_MIB = 4096 };
/* Host memory: pinned, for copies; an array of a host op, and the part of it that a call takes. */
enum { PINNED_MIB = 4096, ARRAY_MIB = 1024, PART_MIB = 64, N_ARRAYS = 4 };

enum { H2D, D2H, SEND, RECEIVE, COMPUTE, N_KINDS };
enum { IN_FLIGHT = 4 };

typedef struct gpu {
  CUdevice dev;
  CUcontext ctx;
  ps__nvml_gpu *nvml;
  CUdeviceptr memory;
  char *host; /* pinned: the first half is read, the second written */
  CUstream stream[N_KINDS];
  CUevent event[N_KINDS][IN_FLIGHT];
  ps__cuda_exec exec;
} gpu;

/* A host op in a loop: sums of bf16 gradients, or AdamW over bf16. */
typedef struct load {
  const char *name;
  bool adamw;
  uint32_t n_threads;
  ps__pool *pool; /* from here on: while it runs */
  ps__thread *thread;
  _Atomic uint32_t stop;
  _Atomic uint64_t n; /* calls */
} load;

enum { NO_PEERS, PAIR, RING }; /* RING: each GPU sends to the next, the last to the first */
typedef struct spec {
  bool in_table;
  double time; /* of the seconds that were asked for */
  uint32_t peers, from, to, copy_mib;
  bool by_receiver;                 /* whose streams the copies between GPUs are on */
  uint32_t ways, n_host, n_product; /* of 1 << H2D | 1 << D2H, on the first n_host GPUs; products */
  load *load;
} spec;

extern struct bench {
  const ps__cuda_driver *cu;
  gpu gpu[PS_MAX_DEVICES];
  uint32_t n_gpus;
  double seconds;
  char *host;            /* PINNED_MIB */
  char *array[N_ARRAYS]; /* totals or weights, gradients, moments */
  bool pinned;           /* host is pinned now */
  bool stuck;            /* a GPU does not finish its work: nothing more can be measured */
  uint32_t n_failed;
} bench;

/* Pinned memory of each GPU, in whole copies of 64 MiB each way: no copy lies in two pinned
 * ranges. */
static inline uint64_t bench_host_mib(void) { return PINNED_MIB / bench.n_gpus / 128 * 128; }

/* gpus.c: bench_failed() prints the last error as that of @what. bench_turn_to() makes a GPU's
 * context current. */
double since(uint64_t t); /* SECONDS */
void bench_failed(const char *what);
ps_status bench_turn_to(uint32_t i);

/* gpus_flows.c: bench_multiply() queues a product. bench_settle() waits for all streams, but not
 * for ever. bench_case() measures a case and prints it, or its error. bench_table() prints the
 * cases of the table. bench_fill() writes @bytes, whole parts, with values as in a model. */
ps_status bench_multiply(const gpu *g);
ps_status bench_settle(void);
void bench_case(spec s);
void bench_table(void);
void bench_fill(ps__pool *pool, char *p, uint64_t bytes);

#endif
