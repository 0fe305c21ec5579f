/* measure.c - a GPU's rates by running the kernels on realistic values, all of them in turn. */
#include "backends/cuda/bench.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/scratch.h"
#include <string.h>

static const uint64_t MARGIN = 64ull << 20;

/* Values as in a model: about N(0, 0.02) in bf16, from the sum of four uniform numbers. */
static ps_status fill(ps__bench *b) {
  uint16_t *p = (uint16_t *)(void *)place(b, 0);
  uint64_t x = 88172645463325252ull;
  for (uint64_t i = 0; i < COPY / 2; i++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    const float four =
        (float)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48)) / 65536.0f -
        2.0f;
    p[i] = ps__f32_to_bf16(0.035f * four);
  }
  for (uint32_t i = 1; i < b->host->places.n; i++)
    memcpy(place(b, i), p, COPY);
  return ps__bench_fill_values(b);
}

/* The kernels of bf16 products and attention are loaded by now. What the GPU loses for those of FP8
 * besides is fp8_overhead_bytes. */
static ps_status measure_fp8(ps__bench *b, double seconds) {
  uint64_t before, after;
  PS_TRY(ps__cuda_memory_used(b->hw->device, &before));
  PS_TRY(ps__bench_fp8(b, seconds));
  PS_TRY(ps__cuda_memory_used(b->hw->device, &after));
  if (b->hw->gemm_fp8[0].rows)
    b->hw->fp8_overhead_bytes = after > before ? ps_round_up(after - before, 2u << 20) : 0;
  return PS_OK;
}

/* The ops of a usual step come first, attention between products: what the GPU loses for them is
 * device_overhead_bytes. Plans count @b's memory and the page tables of pinned memory themselves.
 * FP8's products follow those in bf16, because the clock is then that of a GPU under load. */
static ps_status measure(ps__bench *b, double seconds, bool profile) {
  ps_hardware *hw = b->hw;
  uint64_t used = 0;
  double full;
  PS_TRY(fill(b));
  PS_TRY(ps__bench_prepare(b));
  PS_TRY(ps__bench_products(b, seconds, &full));
  PS_TRY(ps__bench_idle(b, seconds, full));
  if (profile) {
    PS_TRY(measure_fp8(b, seconds));
    PS_TRY(ps__bench_grouped(b, seconds));
    PS_TRY(ps__bench_delta(b, seconds));
    PS_TRY(ps__bench_heads512(b, seconds));
  }
  PS_TRY(ps__bench_bandwidths(b, seconds));
  PS_TRY(ps__cuda_memory_used(hw->device, &used));
  const uint64_t elsewhere = b->memory_bytes + hw->fp8_overhead_bytes +
                             ps__cuda_table_bytes((uint64_t)b->n_pinned * 2 * COPY);
  hw->device_overhead_bytes =
      ps_round_up((used > elsewhere ? used - elsewhere : 0) + MARGIN, 2u << 20);
  PS_TRY(ps__bench_attention(b, seconds));
  return ps__bench_memory(b, seconds);
}

/* After the load of a step in bf16. */
static ps_status measure_extra(ps__bench *b, ps__extra extra, double seconds) {
  PS_TRY(fill(b));
  PS_TRY(ps__bench_prepare(b));
  PS_TRY(ps__bench_load(b, seconds));
  switch (extra) {
  case PS__EXTRA_FP8: return measure_fp8(b, seconds);
  case PS__EXTRA_EXPERTS: return ps__bench_grouped(b, seconds);
  case PS__EXTRA_DELTA: return ps__bench_delta(b, seconds);
  default: return ps__bench_heads512(b, seconds);
  }
}

static ps_status pin(ps__bench *b) {
  CUresult r = CUDA_SUCCESS;
  for (; r == CUDA_SUCCESS && b->n_pinned < b->host->places.n; b->n_pinned += r == CUDA_SUCCESS)
    r = b->cu->MemHostRegister(place(b, b->n_pinned), 2 * COPY,
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(b->cu, r, "measuring the GPU");
}

uint64_t ps__bench_memory_bytes(const ps_hardware *hw) {
  return ps_round_up(VALUES + SUMS + ps__bench_scratch(hw) +
                         ps__cuda_workspace_bytes(hw->compute_capability),
                     2u << 20);
}

uint64_t ps__cuda_measure_bytes(const ps_hardware *hw) {
  const uint64_t kernels = 1ull << 30, overhead = hw->device_overhead_bytes;
  return ps__bench_memory_bytes(hw) + (overhead > kernels ? overhead : kernels);
}

ps_status ps__bench_open(ps__bench *b) {
  const size_t workspace = ps__cuda_workspace_bytes(b->hw->compute_capability);
  const uint64_t scratch = ps__bench_scratch(b->hw);
  b->memory_bytes = ps__bench_memory_bytes(b->hw);
  CUresult r = b->cu->MemAlloc(&b->memory, b->memory_bytes);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamCreate(&b->exec.stream, CU_STREAM_NON_BLOCKING);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamCreate(&b->in, CU_STREAM_NON_BLOCKING);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamCreate(&b->out, CU_STREAM_NON_BLOCKING);
  for (int i = 0; r == CUDA_SUCCESS && i < 2 * (MAX_PARTS + 1); i++)
    r = b->cu->EventCreate(&b->event[0][0] + i, CU_EVENT_DEFAULT);
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(b->cu, r, "measuring the GPU");
  b->values = (char *)(uintptr_t)b->memory;
  b->sums = b->values + VALUES;
  b->exec.scratch = b->sums + SUMS;
  b->exec.scratch_bytes = scratch;
  b->exec.device = (int)b->hw->device;
  b->exec.n_sms = (int)b->hw->n_sms;
  PS_TRY(ps__cublaslt_open());
  return ps__cuda_blas_create(&b->exec.blas, b->sums + SUMS + scratch, workspace);
}

void ps__bench_close(ps__bench *b) {
  ps__cuda_blas_destroy(b->exec.blas);
  for (int i = 0; i < 2 * (MAX_PARTS + 1); i++)
    if ((&b->event[0][0])[i])
      b->cu->EventDestroy((&b->event[0][0])[i]);
  if (b->exec.stream)
    b->cu->StreamDestroy(b->exec.stream);
  if (b->in)
    b->cu->StreamDestroy(b->in);
  if (b->out)
    b->cu->StreamDestroy(b->out);
  if (b->memory)
    b->cu->MemFree(b->memory);
}

/* @extra PS__N_EXTRAS: all rates, with @profile all extras. */
static ps_status on_gpu(ps_hardware *hw, ps__extra extra, double seconds, bool profile,
                        const ps__host_work *host) {
  ps__bench b = {.hw = hw, .host = host};
  CUdevice dev;
  CUcontext ctx, old;
  PS_TRY(ps__cuda_driver_open(&b.cu));
  CUresult r = b.cu->DeviceGet(&dev, (int)hw->device);
  /* kept: a context that is made again would load its kernels again */
  if (r == CUDA_SUCCESS)
    r = b.cu->DevicePrimaryCtxRetain(&ctx, dev);
  if (r == CUDA_SUCCESS)
    r = b.cu->CtxPushCurrent(ctx);
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(b.cu, r, "cuDevicePrimaryCtxRetain");
  ps_status st = ps__bench_open(&b);
  if (st == PS_OK)
    st = pin(&b);
  if (st == PS_OK)
    st = extra < PS__N_EXTRAS ? measure_extra(&b, extra, seconds) : measure(&b, seconds, profile);
  ps__bench_close(&b);
  for (uint32_t i = 0; i < b.n_pinned; i++)
    b.cu->MemHostUnregister(place(&b, i));
  b.cu->CtxPopCurrent(&old);
  return st;
}

ps_status ps__cuda_measure(ps_hardware *hw, double seconds, bool profile,
                           const ps__host_work *host) {
  return on_gpu(hw, PS__N_EXTRAS, seconds, profile, host);
}

ps_status ps__cuda_measure_extra(ps_hardware *hw, ps__extra extra, double seconds,
                                 const ps__host_work *host) {
  return on_gpu(hw, extra, seconds, false, host);
}
