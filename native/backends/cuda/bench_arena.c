/* bench_arena.c - copies and host ops on memory that is pinned already: that of a training. */
#include "backends/cuda/bench.h"

static const ps__host_load *load_of(const ps__host_work *host, uint32_t kinds) {
  for (uint32_t i = 0; i < host->n_loads; i++)
    if (host->load[i].kind & kinds)
      return &host->load[i];
  return NULL;
}

static ps_status run(ps__bench *b, char *device, uint32_t kinds, double seconds,
                     ps_contention_rate *out) {
  const ps__host_load *load = load_of(b->host, kinds);
  const ps_hardware none = {0}; /* what does not run has no rate */
  ps__flow flow[2];
  uint32_t n = 0;
  double host;
  if (kinds & PS_CONTENTION_H2D)
    flow[n++] = (ps__flow){
        .stream = b->in, .event = b->event[0], .device = device, .places = &b->host->places};
  if (kinds & PS_CONTENTION_D2H)
    flow[n++] = (ps__flow){.stream = b->out,
                           .event = b->event[1],
                           .device = device + COPY,
                           .places = &b->host->places,
                           .to_host = true};
  PS_TRY(ps__bench_share(b->cu, seconds, load, flow, n, &host));
  PS__CUDA_TRY(b->cu, StreamSynchronize(b->in));
  PS__CUDA_TRY(b->cu, StreamSynchronize(b->out));
  *out = ps__bench_rates(&none, kinds, load, flow, n, host);
  return PS_OK;
}

static ps_status open_streams(ps__bench *b) {
  CUresult r = b->cu->StreamCreate(&b->in, CU_STREAM_NON_BLOCKING);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamCreate(&b->out, CU_STREAM_NON_BLOCKING);
  for (int i = 0; r == CUDA_SUCCESS && i < 2 * (MAX_PARTS + 1); i++)
    r = b->cu->EventCreate(&b->event[0][0] + i, CU_EVENT_DEFAULT);
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(b->cu, r, "measuring the arena");
}

/* Zeros to the device first: what copies bring back then leaves the host's memory as it is. */
static ps_status run_all(ps__bench *b, char *device, const uint32_t *kinds, uint32_t n,
                         double seconds, ps_contention_rate *out) {
  PS_TRY(open_streams(b));
  PS_TRY(ps__bench_copy(b, b->out, device + COPY, b->host->places.first));
  PS__CUDA_TRY(b->cu, StreamSynchronize(b->out));
  for (uint32_t i = 0; i < n; i++)
    PS_TRY(run(b, device, kinds[i], seconds, &out[i]));
  return PS_OK;
}

ps_status ps__cuda_measure_arena(const ps_hardware *hw, void *device, const ps__host_work *host,
                                 const uint32_t *kinds, uint32_t n, double seconds,
                                 ps_contention_rate *out) {
  ps__bench b = {.host = host};
  CUdevice dev;
  CUcontext ctx, old;
  PS_TRY(ps__cuda_driver_open(&b.cu));
  CUresult r = b.cu->DeviceGet(&dev, (int)hw->device);
  if (r == CUDA_SUCCESS)
    r = b.cu->DevicePrimaryCtxRetain(&ctx, dev);
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(b.cu, r, "cuDevicePrimaryCtxRetain");
  r = b.cu->CtxPushCurrent(ctx);
  const ps_status st = r == CUDA_SUCCESS ? run_all(&b, device, kinds, n, seconds, out)
                                         : ps__cuda_fail(b.cu, r, "cuCtxPushCurrent");
  for (int i = 0; i < 2 * (MAX_PARTS + 1); i++)
    if ((&b.event[0][0])[i])
      b.cu->EventDestroy((&b.event[0][0])[i]);
  if (b.in)
    b.cu->StreamDestroy(b.in);
  if (b.out)
    b.cu->StreamDestroy(b.out);
  if (r == CUDA_SUCCESS)
    b.cu->CtxPopCurrent(&old);
  (void)b.cu->DevicePrimaryCtxRelease(dev);
  return st;
}
