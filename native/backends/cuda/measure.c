/* measure.c - facts of a GPU, and its rates by running the kernels on realistic values. */
#include "backends/cuda/driver.h"
#include "backends/cuda/probe.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/scratch.h"
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

/* One chunk of an 8B model: what a long step is made of. */
enum { TOKENS = 8192, DIM = 4096, FFN = 14336, HEADS = 32, KV_HEADS = 8, HEAD_DIM = 128 };
enum { N_BUFFERS = 4 };
static const uint64_t BUFFER = 256ull << 20, PINNED = 256ull << 20, MARGIN = 64ull << 20;

uint32_t ps__cuda_n_devices(void) {
  const ps__cuda_driver *cu;
  int n = 0;
  if (ps__cuda_driver_open(&cu) != PS_OK) return 0;
  if (cu->DeviceGetCount(&n) != CUDA_SUCCESS || n <= 0) {
    (void)ps__fail(PS_EDEVICE, "the CUDA driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use the cpu backend");
    return 0;
  }
  return (uint32_t)n;
}

ps_status ps__cuda_facts(ps_hardware *hw) {
  const ps__cuda_driver *cu;
  CUdevice dev;
  int n = 0, major = 0, minor = 0, sms = 0;
  size_t total = 0;
  uint64_t others = 0;
  PS_TRY(ps__cuda_driver_open(&cu));
  if (cu->DeviceGetCount(&n) != CUDA_SUCCESS || hw->device >= (uint32_t)n)
    return ps__fail(PS_EDEVICE, "GPU %u is asked for, %d visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES", hw->device, n);
  CUresult r = cu->DeviceGet(&dev, (int)hw->device);
  if (r == CUDA_SUCCESS) r = cu->DeviceGetName(hw->device_name, sizeof hw->device_name, dev);
  if (r == CUDA_SUCCESS) r = cu->DeviceTotalMem(&total, dev);
  if (r == CUDA_SUCCESS) r = cu->DeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, dev);
  if (r == CUDA_SUCCESS) r = cu->DeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, dev);
  if (r == CUDA_SUCCESS) r = cu->DeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, dev);
  if (r != CUDA_SUCCESS) return ps__cuda_fail(cu, r, "cuDeviceGetAttribute");
  PS_TRY(ps__cuda_supported(cu, dev, hw->device));
  ps__cuda_usage_begin(cu, hw->device, &others);
  hw->compute_capability = (uint32_t)(10 * major + minor);
  hw->n_sms = (uint32_t)sms;
  hw->device_memory_bytes = total > others ? total - others : 0;
  hw->cudnn_version = ps__cuda_cudnn_version();
  return PS_OK;
}

/* ---- rates ------------------------------------------------------------------------------------------------------------------ */

typedef struct bench {
  const ps__cuda_driver *cu;
  ps_hardware *hw;
  CUstream copy;             /* a second stream; exec.stream is the first */
  CUdeviceptr memory;        /* buffers, scratch, workspace */
  char *buffer[N_BUFFERS];   /* BUFFER bytes of device memory each */
  void *pinned[2];           /* PINNED / 2 bytes each */
  ps__cuda_exec exec;
} bench;

typedef ps_status (*case_fn)(bench *b);

static ps_status launch(bench *b, const ps_kernel *k, const void *args, void *const *ptr, uint32_t n) {
  const ps_launch l = {.args = args, .ptr = ptr, .n_ptr = n, .exec = &b->exec};
  return k->fn[PS_BACKEND_CUDA](&l);
}

static ps_status settle(bench *b) {
  CUresult r = b->cu->StreamSynchronize(b->exec.stream);
  if (r == CUDA_SUCCESS) r = b->cu->StreamSynchronize(b->copy);
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(b->cu, r, "cuStreamSynchronize");
}

/* Seconds of a call, over the second half of the time: a few calls in flight, so that the GPU never waits for the host. */
static ps_status time_case(bench *b, case_fn fn, double seconds, double *out) {
  uint64_t n = 0, half = 0;
  PS_TRY(fn(b));
  PS_TRY(settle(b));
  const uint64_t begin = ps__now_ns();
  uint64_t at_half = begin, now = begin;
  while (n - half < 4 || (double)(now - begin) < seconds * 1e9) {
    for (int i = 0; i < 4; i++, n++) PS_TRY(fn(b));
    PS_TRY(settle(b));
    now = ps__now_ns();
    if (!half && (double)(now - begin) >= seconds * 0.5e9) {
      half = n;
      at_half = now;
    }
  }
  *out = (double)(now - at_half) * 1e-9 / (double)(n - half);
  return PS_OK;
}

static ps_status run_gemm(bench *b, uint32_t dt) {
  const ps__args_gemm g = {.m = TOKENS, .n = dt == PS_BF16 ? FFN : DIM, .k = DIM, .lda = DIM, .ldb = DIM, .ldc = dt == PS_BF16 ? FFN : DIM,
                           .trans_b = 1, .dt_a = (uint8_t)dt, .dt_b = (uint8_t)dt, .dt_c = (uint8_t)dt};
  void *ptr[3] = {b->buffer[0], b->buffer[1], b->buffer[2]};
  return launch(b, &ps__k_gemm, &g, ptr, 3);
}
static ps_status case_gemm_bf16(bench *b) { return run_gemm(b, PS_BF16); }
static ps_status case_gemm_f32(bench *b) { return run_gemm(b, PS_F32); }

static const ps__args_attention attention = {.n_tokens = TOKENS, .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .dt = PS_BF16,
                                             .one_document = 1};
enum { ATT_BYTES = TOKENS * HEADS * HEAD_DIM * 2 }; /* q, o, d_o, dq each; kv half of it, dkv as much */

static ps_status case_attention(bench *b) {
  void *ptr[5] = {b->buffer[0], b->buffer[1], b->buffer[3], b->buffer[2], b->buffer[2] + ATT_BYTES};
  return launch(b, &ps__k_attention_fwd, &attention, ptr, 5);
}
static ps_status case_attention_bwd(bench *b) {
  void *ptr[8] = {b->buffer[0], b->buffer[1], b->buffer[3], b->buffer[2], b->buffer[2] + ATT_BYTES, b->buffer[0] + ATT_BYTES,
                  b->buffer[1] + ATT_BYTES, b->buffer[1] + 2 * ATT_BYTES};
  return launch(b, &ps__k_attention_bwd, &attention, ptr, 8);
}

static ps_status case_norm(bench *b) {
  const ps__args_rmsnorm a = {.rows = TOKENS, .cols = DIM, .dt = PS_BF16, .eps = 1e-5f};
  void *ptr[3] = {b->buffer[0], b->buffer[1], b->buffer[2]};
  return launch(b, &ps__k_rmsnorm_fwd, &a, ptr, 3);
}
static ps_status case_small(bench *b) {
  const ps__args_rmsnorm a = {.rows = 1, .cols = 1024, .dt = PS_BF16, .eps = 1e-5f};
  void *ptr[3] = {b->buffer[0], b->buffer[1], b->buffer[2]};
  for (int i = 0; i < 100; i++) PS_TRY(launch(b, &ps__k_rmsnorm_fwd, &a, ptr, 3));
  return PS_OK;
}

static ps_status copy(bench *b, CUstream stream, void *dst, const void *src) {
  const CUresult r = b->cu->MemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, PINNED / 2, stream);
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(b->cu, r, "cuMemcpyAsync");
}
static ps_status case_h2d(bench *b) { return copy(b, b->exec.stream, b->buffer[2], b->pinned[0]); }
static ps_status case_d2h(bench *b) { return copy(b, b->copy, b->pinned[1], b->buffer[3]); }
static ps_status case_both(bench *b) {
  PS_TRY(case_h2d(b));
  return case_d2h(b);
}

/* Values as in a model: about N(0, 0.02) in bf16, from the sum of four uniform numbers. In buffer 3 zeros, which are doc_start too. */
static ps_status fill(bench *b) {
  uint16_t *p = b->pinned[0];
  uint64_t x = 88172645463325252ull;
  for (uint64_t i = 0; i < PINNED / 4; i++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    const float sum = (float)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48)) / 65536.0f - 2.0f;
    p[i] = ps__f32_to_bf16(0.035f * sum);
  }
  memset(b->pinned[1], 0, PINNED / 2);
  for (int i = 0; i < N_BUFFERS; i++)
    for (uint64_t at = 0; at < BUFFER; at += PINNED / 2) PS_TRY(copy(b, b->exec.stream, b->buffer[i] + at, b->pinned[i == 3]));
  return settle(b);
}

/* The load in a loop on a thread of its own, until told to stop. */
typedef struct loader {
  const ps__host_load *load;
  _Atomic uint32_t stop;
  _Atomic uint64_t n;
} loader;

static void load_main(void *arg) {
  loader *l = arg;
  while (!atomic_load(&l->stop)) {
    l->load->run(l->load->arg);
    atomic_fetch_add(&l->n, 1);
  }
}

static ps_status measure_memory(bench *b, double seconds, const ps__host_load *load) {
  loader l = {.load = load};
  ps__thread *thread;
  double s = 0;
  PS_TRY(ps__thread_start(&thread, load_main, &l, "ps-load"));
  while (!atomic_load(&l.n)) sched_yield(); /* until its threads are at work */
  const uint64_t n0 = atomic_load(&l.n), t0 = ps__now_ns();
  const ps_status st = time_case(b, case_both, seconds, &s);
  const double taken = (double)(ps__now_ns() - t0) * 1e-9, done = (double)(atomic_load(&l.n) - n0) * load->bytes;
  atomic_store(&l.stop, 1);
  ps__thread_join(thread);
  if (st == PS_OK) b->hw->memory_bytes_per_s = done / taken + (double)PINNED / s;
  return st;
}

static ps_status measure(bench *b, double seconds) {
  ps_hardware *hw = b->hw;
  const double pairs = 0.5 * TOKENS * TOKENS * HEADS * HEAD_DIM;
  double s;
  PS_TRY(fill(b));
  PS_TRY(time_case(b, case_gemm_bf16, 0.4 * seconds, &s));
  hw->gemm_flops_per_s[PS_BF16] = 2.0 * TOKENS * FFN * DIM / s;
  PS_TRY(time_case(b, case_attention, 0.1 * seconds, &s));
  hw->attention_flops_per_s[PS_BF16] = hw->attention_flops_per_s[PS_F32] = 4 * pairs / s;
  PS_TRY(time_case(b, case_attention_bwd, 0.15 * seconds, &s)); /* on the forward pass's output and log-sum-exp */
  hw->attention_bwd_flops_per_s[PS_BF16] = hw->attention_bwd_flops_per_s[PS_F32] = 10 * pairs / s;
  PS_TRY(time_case(b, case_norm, 0.05 * seconds, &s));
  hw->elementwise_bytes_per_s = 4.0 * TOKENS * DIM / s;
  PS_TRY(time_case(b, case_small, 0.02 * seconds, &s));
  hw->op_ns = s * 1e7;
  PS_TRY(time_case(b, case_h2d, 0.06 * seconds, &s));
  hw->h2d_bytes_per_s = (double)(PINNED / 2) / s;
  PS_TRY(time_case(b, case_d2h, 0.06 * seconds, &s));
  hw->d2h_bytes_per_s = (double)(PINNED / 2) / s;
  PS_TRY(time_case(b, case_both, 0.06 * seconds, &s));
  hw->duplex_bytes_per_s = (double)(PINNED / 2) / s;
  PS_TRY(time_case(b, case_gemm_f32, 0.1 * seconds, &s));
  hw->gemm_flops_per_s[PS_F32] = 2.0 * TOKENS * DIM * DIM / s;
  return PS_OK;
}

static ps_status reserve(bench *b, uint64_t *bytes) {
  const size_t workspace = ps__cuda_workspace_bytes(b->hw->compute_capability);
  size_t forward = 0, backward = 0;
  PS_TRY(ps__cuda_attention_prepare(&ps__k_attention_fwd, &attention, false, &forward));
  PS_TRY(ps__cuda_attention_prepare(&ps__k_attention_bwd, &attention, false, &backward));
  const uint64_t scratch = ps_round_up(forward > backward ? forward : backward, 256);
  *bytes = ps_round_up(N_BUFFERS * BUFFER + scratch + workspace, 2u << 20);
  CUresult r = b->cu->MemAlloc(&b->memory, *bytes);
  for (int i = 0; r == CUDA_SUCCESS && i < 2; i++) r = b->cu->MemHostAlloc(&b->pinned[i], PINNED / 2, 0);
  if (r == CUDA_SUCCESS) r = b->cu->StreamCreate(&b->exec.stream, CU_STREAM_NON_BLOCKING);
  if (r == CUDA_SUCCESS) r = b->cu->StreamCreate(&b->copy, CU_STREAM_NON_BLOCKING);
  if (r != CUDA_SUCCESS) return ps__cuda_fail(b->cu, r, "measuring the GPU");
  char *p = (char *)(uintptr_t)b->memory;
  for (int i = 0; i < N_BUFFERS; i++) b->buffer[i] = p + (uint64_t)i * BUFFER;
  b->exec.scratch = p + N_BUFFERS * BUFFER;
  b->exec.scratch_bytes = scratch;
  b->exec.device = (int)b->hw->device;
  b->exec.n_sms = (int)b->hw->n_sms;
  PS_TRY(ps__cublaslt_open());
  return ps__cuda_blas_create(&b->exec.blas, p + N_BUFFERS * BUFFER + scratch, workspace);
}

static void release(bench *b) {
  ps__cuda_blas_destroy(b->exec.blas);
  if (b->exec.stream) b->cu->StreamDestroy(b->exec.stream);
  if (b->copy) b->cu->StreamDestroy(b->copy);
  for (int i = 0; i < 2; i++)
    if (b->pinned[i]) b->cu->MemFreeHost(b->pinned[i]);
  if (b->memory) b->cu->MemFree(b->memory);
}

ps_status ps__cuda_measure(ps_hardware *hw, double seconds, const ps__host_load *load) {
  bench b = {.hw = hw};
  CUdevice dev;
  CUcontext ctx, old;
  uint64_t bytes = 0, used = 0;
  PS_TRY(ps__cuda_driver_open(&b.cu));
  CUresult r = b.cu->DeviceGet(&dev, (int)hw->device);
  if (r == CUDA_SUCCESS) r = b.cu->DevicePrimaryCtxRetain(&ctx, dev); /* kept: a context that is made again would load its kernels again */
  if (r == CUDA_SUCCESS) r = b.cu->CtxPushCurrent(ctx);
  if (r != CUDA_SUCCESS) return ps__cuda_fail(b.cu, r, "cuDevicePrimaryCtxRetain");
  ps_status st = reserve(&b, &bytes);
  if (st == PS_OK) st = measure(&b, 0.9 * seconds);
  if (st == PS_OK) st = measure_memory(&b, 0.1 * seconds, load);
  if (st == PS_OK) st = ps__cuda_memory_used(hw->device, &used);
  if (st == PS_OK) hw->device_overhead_bytes = ps_round_up((used > bytes ? used - bytes : 0) + MARGIN, 2u << 20);
  release(&b);
  b.cu->CtxPopCurrent(&old);
  return st;
}
