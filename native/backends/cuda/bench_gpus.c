/* bench_gpus.c - copies of several GPUs at once, alone and beside the host's work: how they divide
 * the host's memory bandwidth. */
#include "backends/cuda/bench.h"
#include <string.h>

enum { H2D, D2H };

typedef struct gpu {
  CUdevice dev;
  CUcontext ctx;
  CUdeviceptr memory; /* 2 * COPY: what comes, what goes */
  CUstream stream[2];
  CUevent event[2][IN_FLIGHT];
  ps__host_places places;
} gpu;

typedef struct bench {
  const ps__cuda_driver *cu;
  const ps__host_work *host;
  uint32_t n, n_pinned;
  gpu gpu[PS_MAX_DEVICES];
} bench;

static ps_status turn_to(const bench *b, const gpu *g) {
  PS__CUDA_TRY(b->cu, CtxSetCurrent(g->ctx));
  return PS_OK;
}

static ps_status make_context(const bench *b, uint32_t device, gpu *g) {
  uint64_t others;
  CUcontext ctx;
  PS__CUDA_TRY(b->cu, DeviceGet(&g->dev, (int)device));
  ps__cuda_usage_begin(b->cu, device, &others);
  PS__CUDA_TRY(b->cu, DevicePrimaryCtxRetain(&ctx, g->dev));
  g->ctx = ctx;
  return PS_OK;
}

static ps_status open_gpu(const bench *b, gpu *g) {
  PS_TRY(turn_to(b, g));
  PS__CUDA_TRY(b->cu, MemAlloc(&g->memory, 2 * COPY));
  for (int way = 0; way < 2; way++) {
    PS__CUDA_TRY(b->cu, StreamCreate(&g->stream[way], CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < IN_FLIGHT; i++)
      PS__CUDA_TRY(b->cu, EventCreate(&g->event[way][i], CU_EVENT_DEFAULT));
  }
  return PS_OK;
}

static void close_gpu(const bench *b, const gpu *g) {
  b->cu->CtxSetCurrent(g->ctx);
  for (int way = 0; way < 2; way++) {
    for (int i = 0; i < IN_FLIGHT; i++)
      if (g->event[way][i])
        b->cu->EventDestroy(g->event[way][i]);
    if (g->stream[way])
      b->cu->StreamDestroy(g->stream[way]);
  }
  if (g->memory)
    b->cu->MemFree(g->memory);
}

/* For all contexts that are there. False: the system refuses it. */
static bool pin(bench *b) {
  const ps__host_places *all = &b->host->places;
  CUresult r = b->cu->CtxSetCurrent(b->gpu[0].ctx);
  for (; r == CUDA_SUCCESS && b->n_pinned < all->n; b->n_pinned += r == CUDA_SUCCESS)
    r = b->cu->MemHostRegister(all->first + b->n_pinned * all->stride, 2 * COPY,
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  return r == CUDA_SUCCESS;
}

static ps_status measure_share(bench *b, const ps_hardware *hw, double seconds,
                               const ps__host_load *load, uint32_t copies,
                               ps_contention_rate *out) {
  ps__flow flow[2 * PS_MAX_DEVICES];
  uint32_t n = 0;
  double host;
  for (uint32_t i = 0; i < b->n; i++)
    for (int way = 0; way < 2; way++)
      if (copies & (way == D2H ? PS_CONTENTION_D2H : PS_CONTENTION_H2D))
        flow[n++] =
            (ps__flow){.ctx = b->gpu[i].ctx,
                       .stream = b->gpu[i].stream[way],
                       .event = b->gpu[i].event[way],
                       .device = (char *)(uintptr_t)b->gpu[i].memory + (way == D2H ? COPY : 0),
                       .places = &b->gpu[i].places,
                       .to_host = way == D2H};
  ps_status st = ps__bench_share(b->cu, seconds, load, flow, n, &host);
  for (uint32_t i = 0; i < n; i++) { /* also after an error: what is in flight uses the memory */
    const CUresult r = b->cu->CtxSetCurrent(flow[i].ctx) == CUDA_SUCCESS
                           ? b->cu->StreamSynchronize(flow[i].stream)
                           : CUDA_ERROR_INVALID_CONTEXT;
    if (st == PS_OK && r != CUDA_SUCCESS)
      st = ps__cuda_fail(b->cu, r, "cuStreamSynchronize");
  }
  if (st == PS_OK)
    *out = ps__bench_rates(hw, copies | (load ? load->kind : 0), load, flow, n, host);
  return st;
}

static ps_status measure(bench *b, ps_hardware *hw, double seconds) {
  const uint32_t both = PS_CONTENTION_H2D | PS_CONTENTION_D2H;
  ps_contention_rate found[PS_MAX_CONTENTION_RATES] = {{0}};
  uint32_t n = 0;
  for (uint32_t i = 0; i < b->n; i++)
    PS_TRY(open_gpu(b, &b->gpu[i]));
  if (!pin(b))
    return PS_OK; /* a training says why it cannot pin */
  for (uint32_t l = 0; l <= b->host->n_loads && n + both <= PS_MAX_CONTENTION_RATES; l++)
    for (uint32_t copies = PS_CONTENTION_H2D; copies <= both; copies++)
      PS_TRY(measure_share(b, hw, seconds, l ? &b->host->load[l - 1] : NULL, copies, &found[n++]));
  hw->n_gpus = b->n;
  memcpy(hw->gpus_contention, found, sizeof found);
  return PS_OK;
}

ps_status ps__cuda_measure_gpus(ps_hardware *hw, uint32_t n, double seconds,
                                const ps__host_work *host) {
  bench b = {.host = host, .n = n};
  const ps__host_places *all = &host->places;
  CUcontext old;
  ps_status st = ps__cuda_driver_open(&b.cu);
  for (uint32_t i = 0; i < n && st == PS_OK; i++) {
    b.gpu[i].places =
        (ps__host_places){all->first + i * (all->n / n) * all->stride, all->stride, all->n / n};
    st = make_context(&b, hw->device + i, &b.gpu[i]);
  }
  if (st == PS_OK && b.cu->CtxPushCurrent(b.gpu[0].ctx) == CUDA_SUCCESS) {
    st = measure(&b, hw, seconds);
    b.cu->CtxSetCurrent(b.gpu[0].ctx);
    for (uint32_t i = 0; i < b.n_pinned; i++)
      b.cu->MemHostUnregister(all->first + i * all->stride);
    for (uint32_t i = 0; i < n; i++)
      close_gpu(&b, &b.gpu[i]);
    b.cu->CtxPopCurrent(&old);
  }
  for (uint32_t i = 0; i < n; i++)
    if (b.gpu[i].ctx)
      b.cu->DevicePrimaryCtxRelease(b.gpu[i].dev);
  return st;
}
