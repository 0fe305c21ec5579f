/* net.c - lanes of a GPU for NCCL: streams, events and memory beside those of an engine. They hold
 * the GPU's primary context, so they may be there before the engine that uses them. */
#include "backends/cuda/device.h"
#include "backends/cuda/probe.h"
#include "hosts/net.h"
#include "kernels/cuda/hosts_add.h"

enum { BLOCKS = 4 };

typedef struct lanes {
  ps__device *dev; /* that uses them; NULL: none yet */
  const ps__cuda_driver *cu;
  ps__cuda_gpu gpu; /* of no place */
  CUstream lane[PS__N_LANES];
  CUevent mark[PS__N_MARKS];
  CUdeviceptr device[BLOCKS];
  void *host[BLOCKS];
  uint32_t n_device, n_host;
} lanes;

static ps_status net_enter(void *user) {
  const lanes *n = user;
  PS__CUDA_TRY(n->cu, CtxPushCurrent(n->gpu.ctx));
  return PS_OK;
}

static void net_leave(void *user) {
  const lanes *n = user;
  CUcontext ctx;
  n->cu->CtxPopCurrent(&ctx);
}

static ps_status net_reserve(void *user, bool on_host, uint64_t bytes, void **out) {
  lanes *n = user;
  if ((on_host ? n->n_host : n->n_device) == BLOCKS)
    return ps__fail(PS_EINTERNAL, "the lanes have no room for another block");
  if (ps__fault_hit(PS_FAULT_ALLOC))
    return ps__fail(PS_ENOMEM, "memory for the exchange with other hosts refused");
  if (on_host) {
    PS__CUDA_TRY(n->cu, MemHostAlloc(&n->host[n->n_host], bytes, CU_MEMHOSTALLOC_PORTABLE));
    *out = n->host[n->n_host++];
  } else {
    PS__CUDA_TRY(n->cu, MemAlloc(&n->device[n->n_device], bytes));
    *out = (void *)(uintptr_t)n->device[n->n_device++];
  }
  ps__live_add(1);
  return PS_OK;
}

static void net_release(void *user, void *p) {
  lanes *n = user;
  uint32_t i = 0;
  while (i < n->n_host && n->host[i] != p)
    i++;
  if (i == n->n_host)
    return;
  n->cu->MemFreeHost(p);
  n->host[i] = n->host[--n->n_host];
  ps__live_add(-1);
}

static void *net_stream(void *user, uint32_t lane) { return ((lanes *)user)->lane[lane]; }

static ps_status net_copy(void *user, uint32_t lane, void *dst, const void *src, uint64_t bytes) {
  const lanes *n = user;
  if (n->dev)
    return ps__cuda_copy_on(n->dev, n->lane[lane], dst, src, bytes);
  PS__CUDA_TRY(n->cu, MemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, bytes,
                                  n->lane[lane]));
  return PS_OK;
}

static ps_status net_add(void *user, uint32_t lane, const ps__net_add *a) {
  return ps__cuda_hosts_add(((lanes *)user)->lane[lane], a->mine, a->received, a->stride_bytes,
                            a->n, a->rank, a->n_hosts, a->dt);
}

static ps_status net_mark(void *user, uint32_t lane, uint32_t mark) {
  const lanes *n = user;
  PS__CUDA_TRY(n->cu, EventRecord(n->mark[mark], n->lane[lane]));
  return PS_OK;
}

static ps_status net_after(void *user, uint32_t lane, uint32_t mark) {
  const lanes *n = user;
  PS__CUDA_TRY(n->cu, StreamWaitEvent(n->lane[lane], n->mark[mark], CU_EVENT_WAIT_DEFAULT));
  return PS_OK;
}

static ps_status net_passed(void *user, uint32_t mark, bool *out) {
  const lanes *n = user;
  const CUresult r = n->cu->EventQuery(n->mark[mark]);
  *out = r == CUDA_SUCCESS;
  return r == CUDA_SUCCESS || r == CUDA_ERROR_NOT_READY
             ? PS_OK
             : ps__cuda_fail(n->cu, r, "cuEventQuery of the exchange with other hosts");
}

static ps_status net_idle(void *user, bool *out) {
  const lanes *n = user;
  *out = true;
  for (uint32_t i = 0; i < PS__N_LANES; i++) {
    const CUresult r = n->cu->StreamQuery(n->lane[i]);
    if (r != CUDA_SUCCESS && r != CUDA_ERROR_NOT_READY)
      return ps__cuda_fail(n->cu, r, "cuStreamQuery of the exchange with other hosts");
    *out = *out && r == CUDA_SUCCESS;
  }
  return PS_OK;
}

static ps_status net_memory(void *user, uint64_t *out_bytes) {
  return ps__cuda_memory_used(((const lanes *)user)->gpu.number, out_bytes);
}

static void net_close(void *user, bool at_rest) {
  lanes *n = user;
  CUcontext ctx;
  if (!at_rest) {
    if (n->dev)
      n->dev->stuck = true;
    return;
  }
  if (n->gpu.ctx && n->cu->CtxPushCurrent(n->gpu.ctx) == CUDA_SUCCESS) {
    for (uint32_t i = 0; i < PS__N_LANES; i++)
      if (n->lane[i])
        n->cu->StreamDestroy(n->lane[i]);
    for (uint32_t i = 0; i < PS__N_MARKS; i++)
      if (n->mark[i])
        n->cu->EventDestroy(n->mark[i]);
    for (uint32_t i = 0; i < n->n_device; i++)
      n->cu->MemFree(n->device[i]);
    for (uint32_t i = 0; i < n->n_host; i++)
      n->cu->MemFreeHost(n->host[i]);
    n->cu->CtxPopCurrent(&ctx);
    n->cu->DevicePrimaryCtxRelease(n->gpu.dev);
  }
  ps__live_add(-(int64_t)(n->n_device + n->n_host));
  ps__free(n);
}

static const ps__net_device_api api = {
    .enter = net_enter,
    .leave = net_leave,
    .reserve = net_reserve,
    .release = net_release,
    .stream = net_stream,
    .copy = net_copy,
    .add = net_add,
    .mark = net_mark,
    .after = net_after,
    .passed = net_passed,
    .idle = net_idle,
    .memory = net_memory,
    .close = net_close,
};

/* Their kernels go before those of the compute stream where both wait for SMs: a product takes all
 * SMs, and the next product would follow it at once. */
static ps_status open_lanes(lanes *n) {
  int least, greatest;
  PS__CUDA_TRY(n->cu, CtxGetStreamPriorityRange(&least, &greatest));
  for (uint32_t i = 0; i < PS__N_LANES; i++)
    PS__CUDA_TRY(n->cu, StreamCreateWithPriority(&n->lane[i], CU_STREAM_NON_BLOCKING, greatest));
  for (uint32_t i = 0; i < PS__N_MARKS; i++)
    PS__CUDA_TRY(n->cu, EventCreate(&n->mark[i], CU_EVENT_DISABLE_TIMING));
  ps__cuda_name_stream(n->lane[PS__LANE_NET], "nccl");
  return PS_OK;
}

static ps_status open_gpu(lanes *n) {
  bool seen; /* the engine says so where NVML does not show it */
  PS_TRY(ps__cuda_driver_open(&n->cu));
  PS_TRY(ps__cuda_find_gpu(n->cu, &n->gpu));
  PS_TRY(ps__cuda_retain(n->cu, &n->gpu, &seen));
  PS_TRY(net_enter(n));
  const ps_status st = open_lanes(n);
  net_leave(n);
  return st;
}

ps_status ps__cuda_net(uint32_t number, ps__net_device *out) {
  lanes *n = ps__calloc(1, sizeof *n);
  if (!n)
    return ps__fail(PS_ENOMEM, "out of memory for the exchange with other hosts");
  n->gpu.number = number;
  const ps_status st = open_gpu(n);
  if (st == PS_OK)
    *out = (ps__net_device){.api = &api, .user = n};
  else
    net_close(n, true);
  return st;
}

ps_status ps__cuda_use_net(ps__device *dev, const ps__net_device *given) {
  lanes *n = given->user;
  if (n->gpu.number != dev->gpu[0].number)
    return ps__fail(PS_EINVAL,
                    "NCCL was opened on GPU %u, and this training's first GPU is GPU %u: the "
                    "network is to be measured with the GPU that trains (ps_hosts_measure())",
                    n->gpu.number, dev->gpu[0].number);
  n->dev = dev;
  dev->net = true;
  return PS_OK;
}
