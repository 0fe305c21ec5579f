/* bench.h - what measures a GPU's rates, in the shapes of an 8B model's chunks. bench_time.c times,
 * bench_compute.c has products and attention, bench_copies.c norms and copies, and measure.c takes
 * the memory and measures everything in its order. bench_gpus.c measures several GPUs at once. */
#ifndef PS_BACKENDS_CUDA_BENCH_H
#define PS_BACKENDS_CUDA_BENCH_H
#include "backends/cuda/driver.h"
#include "backends/cuda/probe.h"
#include "kernels/cuda/cuda_ops.h"

enum {
  TOKENS = 8192,
  DIM = 4096,
  HEADS = 32,
  KV_HEADS = 8,
  HEAD_DIM = 128,
  NARROW_HEAD_DIM = 64,
  WIDE_HEAD_DIM = 512
};

enum { FORWARD, DGRAD, WGRAD, MAX_PARTS };
/* of the time: about a streamed step's */
static const double COPIES_SHARE = 0.5;

/* Device memory: VALUES of bf16, of which what lies before OUT is only read; SUMS of fp32
 * results and ids. Places in MiB. */
static const uint64_t MIB = 1u << 20, VALUES = 1664ull << 20, SUMS = 544ull << 20,
                      COPY = PS__COPY_BYTES;
/* operands before OUT, of up to 16384 rows; results; what copies bring */
enum { X = 0, W = 448, Y = 560, OUT = 1008, COPIED = 1536 };
/* FP8 operands meanwhile, of the places that attention of the usual shape does not read: e5m2 up to
 * E5M2_END, of which dW of 16384 rows takes most, and e4m3 up to OUT */
enum { E5M2 = 288, E5M2_END = 560, E4M3 = 624 };
/* of up to 32768 rows and 65536 keys */
enum { Q = 0, KV = 256, D_O = 560, O = 1008, DQ = 1264 };
/* in SUMS; the log-sum-exp of 64 heads and 32768 rows takes 8 MiB */
enum { DKV = 0, LSE = 512, DOC_START = 528, SCALE = 536, OFFSETS = 540 };

typedef struct ps__bench {
  const ps__cuda_driver *cu;
  ps_hardware *hw;
  CUstream in, out; /* of copies; exec.stream computes */
  CUevent event[2][MAX_PARTS + 1];
  CUdeviceptr memory; /* values, sums, scratch, workspace */
  uint64_t memory_bytes;
  char *values, *sums;
  const ps__host_work *host;
  uint32_t n_pinned;    /* of its places */
  uint32_t n_copied[2]; /* to the device, to the host */
  uint32_t n_products;  /* that ran */
  ps__cuda_exec exec;
} ps__bench;

static inline void *value(const ps__bench *b, int at_mib) {
  return b->values + (uint64_t)at_mib * MIB;
}
static inline void *sum(const ps__bench *b, int at_mib) { return b->sums + (uint64_t)at_mib * MIB; }
static inline char *place(const ps__bench *b, uint32_t i) {
  return b->host->places.first + i % b->host->places.n * b->host->places.stride;
}

static inline double seconds_since(uint64_t t) { return (double)(ps__now_ns() - t) * 1e-9; }

/* ps__bench_open() - memory, streams and the products' library on GPU hw->device, whose context is
 * current. Before: cu, hw and host. Errors: PS_EDEVICE, PS_ENOMEM; ps__bench_close() also then.
 * ps__bench_memory_bytes() - device memory that it takes. */
ps_status ps__bench_open(ps__bench *b);
void ps__bench_close(ps__bench *b);
uint64_t ps__bench_memory_bytes(const ps_hardware *hw);

/* ps__bench_launch() - kernel @k on exec.stream.
 * ps__bench_settle() - wait for the three streams. */
ps_status ps__bench_launch(ps__bench *b, const ps_kernel *k, const void *args, void *const *ptr,
                           uint32_t n);
ps_status ps__bench_settle(ps__bench *b);

/* ---- bench_time.c ---------------------------------------------------------------------------- */

typedef ps_status (*ps__bench_fn)(ps__bench *b);

/* ps__bench_time_case() - SECONDS of a call by the host's clock, over the second half of the time:
 * a few calls in flight, so that the GPU never waits for the host. */
ps_status ps__bench_time_case(ps__bench *b, ps__bench_fn fn, double seconds, double *out);

/* A case of one or several parts, timed by events on exec.stream. Each turn of the parts is
 * followed by @between, untimed, for about @share of the turn's time. The reason: a GPU that is
 * bound by its power sets its clock by the last tenths of a second, and in a step products and
 * attention alternate. With a @between, copies run both ways meanwhile, for COPIES_SHARE of the
 * time. */
typedef struct ps__timed {
  ps_status (*part)(ps__bench *b, const void *arg, uint32_t part);
  const void *arg;
  uint32_t n_parts;
  ps__bench_fn between; /* NULL: nothing */
  double share;
} ps__timed;

/* ps__bench_time_parts() - SECONDS of each part, over the second half of the time. While a turn
 * runs the next is queued: the GPU never rests.
 * ps__bench_add_elapsed() - SECONDS between two events. */
ps_status ps__bench_time_parts(ps__bench *b, const ps__timed *t, double seconds,
                               double out[MAX_PARTS]);
ps_status ps__bench_add_elapsed(const ps__bench *b, CUevent from, CUevent to, double *seconds);

/* ---- bench_compute.c ------------------------------------------------------------------------- */

/* ps__bench_scratch() - BYTES of scratch that attention of the shapes and the delta rule take.
 * ps__bench_prepare() - plans for attention of the usual shape. Before all others.
 * ps__bench_tune_usual() - chooses the algorithms of the usual products.
 * ps__bench_usual_turn() - those products, forward and both gradients, and attention of the usual
 *     shape, forward and backward: about a block's share of each.
 * ps__bench_load() - the load of a step in bf16, until the clock is that of a long training.
 *     Nothing counts.
 * ps__bench_products() - bf16 and fp32 products, after that load. @full: SECONDS of the usual ones.
 * ps__bench_fp8() - FP8's products, where the GPU has them, and fp8_attention_speed: attention of
 *     the usual shape between products of both kinds, one after the other. So it depends on no
 *     other measurement.
 * ps__bench_grouped() - products of experts in bf16, between attention.
 * ps__bench_delta() - the delta rule, between products.
 * ps__bench_heads512() - attention with heads of 512, between products.
 * ps__bench_idle() - the gain of idle time.
 * ps__bench_attention() - attention of all shapes, and with heads of 64 that of two of them. */
uint64_t ps__bench_scratch(const ps_hardware *hw);
ps_status ps__bench_prepare(ps__bench *b);
ps_status ps__bench_tune_usual(ps__bench *b);
ps_status ps__bench_usual_turn(ps__bench *b);
ps_status ps__bench_load(ps__bench *b, double seconds);
ps_status ps__bench_products(ps__bench *b, double seconds, double *full);
ps_status ps__bench_fp8(ps__bench *b, double seconds);
ps_status ps__bench_grouped(ps__bench *b, double seconds);
ps_status ps__bench_delta(ps__bench *b, double seconds);
ps_status ps__bench_heads512(ps__bench *b, double seconds);
ps_status ps__bench_idle(ps__bench *b, double seconds, double full);
ps_status ps__bench_attention(ps__bench *b, double seconds);

/* ---- bench_copies.c -------------------------------------------------------------------------- */

/* A flow is copies of one GPU one way, a few of them queued at any time. They take the places of
 * @places in turn. A copy to the device reads a place's first COPY bytes; one to the host writes
 * its second. */
enum { IN_FLIGHT = MAX_PARTS + 1 };
typedef struct ps__flow {
  CUcontext ctx; /* of the stream; NULL: the calling thread's */
  CUstream stream;
  const CUevent *event; /* [IN_FLIGHT] */
  char *device;         /* COPY bytes */
  char *onward;         /* of a flow to the device: where it sends each copy then, COPY bytes of
                         * another GPU; NULL: nowhere */
  const ps__host_places *places;
  bool to_host;
  uint64_t n_issued, n_done, at_half;
  double bytes_per_s; /* as measured */
} ps__flow;

/* ps__bench_keep_flowing() - counts the copies that are done and queues as many again.
 * ps__bench_share() - what @n flows and a host op (@load, or NULL) get of the host's memory while
 * all of them run, over the second half of the time. It does not wait for copies that are queued at
 * the end.
 * ps__bench_rates() - an entry of contention: the mean of the flows of each way. */
ps_status ps__bench_keep_flowing(const ps__cuda_driver *cu, ps__flow *f);
ps_status ps__bench_share(const ps__cuda_driver *cu, double seconds, const ps__host_load *load,
                          ps__flow *flow, uint32_t n, double *host_bytes_per_s);
ps_contention_rate ps__bench_rates(const ps_hardware *hw, uint32_t kinds, const ps__host_load *load,
                                   const ps__flow *flow, uint32_t n, double host_bytes_per_s);

/* ps__bench_copy() - COPY bytes; ps__bench_copy_in(), _out(), _both() - to the device, to the host,
 * and one each way, on their streams.
 * ps__bench_fill_values() - the device's values, from the first place. */
ps_status ps__bench_copy(ps__bench *b, CUstream stream, void *dst, const void *src);
ps_status ps__bench_copy_in(ps__bench *b);
ps_status ps__bench_copy_out(ps__bench *b);
ps_status ps__bench_copy_both(ps__bench *b);
ps_status ps__bench_fill_values(ps__bench *b);
/* ps__bench_bandwidths() - norms, a small op, copies alone and both ways.
 * ps__bench_memory() - each load of the host alone and beside every set of copies. */
ps_status ps__bench_bandwidths(ps__bench *b, double seconds);
ps_status ps__bench_memory(ps__bench *b, double seconds);

#endif
