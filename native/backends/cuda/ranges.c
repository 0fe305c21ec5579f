/* ranges.c - ranges and names of streams for an attached profiler, by NVTX, whose headers come with
 * the CUDA toolkit. Without a profiler its functions do nothing. */
#include "backends/cuda/device.h"
#include <nvtx3/nvToolsExtCuda.h>
#include <pthread.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static nvtxDomainHandle_t domain; /* NULL: no profiler is attached; written once */

static void open_domain(void) { domain = nvtxDomainCreateA("penstock"); }

bool ps__cuda_profiled(void) {
  pthread_once(&once, open_domain);
  return domain != NULL;
}

void ps__cuda_range_push(const char *name) {
  const nvtxEventAttributes_t range = {.version = NVTX_VERSION,
                                       .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                                       .messageType = NVTX_MESSAGE_TYPE_ASCII,
                                       .message.ascii = name};
  nvtxDomainRangePushEx(domain, &range);
}

void ps__cuda_range_pop(uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    nvtxDomainRangePop(domain);
}

void ps__cuda_name_stream(CUstream stream, const char *name) { nvtxNameCuStreamA(stream, name); }

ps_status ps__cuda_profile(ps__device *dev, bool on) {
  CUresult (*const tell)(void) = on ? dev->cu->ProfilerStart : dev->cu->ProfilerStop;
  if (!tell)
    return ps__fail(PS_EDEVICE, "the CUDA driver here cannot tell a profiler when to record");
  PS_TRY(ps__cuda_push(dev, &dev->gpu[0]));
  const CUresult r = tell();
  ps__cuda_pop(dev);
  return r == CUDA_SUCCESS ? PS_OK
                           : ps__cuda_fail(dev->cu, r, on ? "cuProfilerStart" : "cuProfilerStop");
}
