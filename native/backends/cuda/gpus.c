/* gpus.c - the GPUs of an engine: their contexts, what they can do, access to each other.
 *
 * Each GPU has its primary context, which the CUDA runtime and the libraries use too. One thread
 * submits the ops of all GPUs and makes the context of an op's GPU current before it. Pinned host
 * memory is registered once, for all contexts. */
#include "backends/cuda/device.h"
#include "backends/cuda/probe.h"
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Atomic bool without_mem_ops, share_gpu;
void ps__cuda_without_mem_ops(bool without) { atomic_store(&without_mem_ops, without); }
void ps__cuda_share_gpu(bool share) { atomic_store(&share_gpu, share); }

/* ---- contexts -------------------------------------------------------------------------------- */

CUresult ps__cuda_turn_to(const ps__device *dev, const ps__cuda_gpu *gpu) {
  return dev->cu->CtxSetCurrent(gpu->ctx);
}

ps_status ps__cuda_push(const ps__device *dev, const ps__cuda_gpu *gpu) {
  PS__CUDA_TRY(dev->cu, CtxPushCurrent(gpu->ctx));
  return PS_OK;
}

void ps__cuda_pop(const ps__device *dev) {
  CUcontext old;
  dev->cu->CtxPopCurrent(&old);
}

const ps__cuda_gpu *ps__cuda_gpu_at(const ps__device *dev, uint32_t place) {
  for (uint32_t i = 0; i < dev->n_gpus; i++)
    if (dev->gpu[i].place == place)
      return &dev->gpu[i];
  return &dev->gpu[0];
}

CUresult ps__cuda_ask(const ps__device *dev, const ps__cuda_gpu *gpu) {
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
    const ps__cuda_stream *s = &dev->stream[i];
    const CUresult r = s->gpu == gpu && s->stream ? dev->cu->StreamQuery(s->stream) : CUDA_SUCCESS;
    if (r != CUDA_SUCCESS && r != CUDA_ERROR_NOT_READY)
      return r;
  }
  return CUDA_SUCCESS;
}

void ps__cuda_note_error(ps__device *dev, const ps__cuda_gpu *gpu, CUresult r, const char *call) {
  int none = CUDA_SUCCESS;
  const char *nobody = NULL;
  const ps__cuda_gpu *no_gpu = NULL;
  /* a call for one GPU may return what another one's failure is */
  for (uint32_t i = 0; dev->n_gpus > 1 && i < dev->n_gpus && ps__cuda_ask(dev, gpu) == CUDA_SUCCESS;
       i++)
    if (ps__cuda_ask(dev, &dev->gpu[i]) != CUDA_SUCCESS)
      gpu = &dev->gpu[i];
  atomic_compare_exchange_strong(&dev->failed_gpu, &no_gpu, gpu);
  atomic_compare_exchange_strong(&dev->failed_call, &nobody, call);
  atomic_compare_exchange_strong(&dev->error, &none, (int)r);
}

int ps__cuda_attribute(const ps__device *dev, const ps__cuda_gpu *gpu, CUdevice_attribute what) {
  int value = 0;
  return dev->cu->DeviceGetAttribute(&value, what, gpu->dev) == CUDA_SUCCESS ? value : 0;
}

static ps_status find_gpus(ps__device *dev) {
  int visible = 0;
  PS__CUDA_TRY(dev->cu, DeviceGetCount(&visible));
  const bool shared = visible > 0 && atomic_load(&share_gpu);
  for (uint32_t i = 0; i < dev->cfg.n_places; i++) {
    const ps_place *p = &dev->cfg.place[i];
    if (p->kind != PS_PLACE_DEVICE)
      continue;
    if (dev->n_gpus == PS_MAX_DEVICES)
      return ps__fail(PS_EINVAL, "engine: more than %d places are GPUs", PS_MAX_DEVICES);
    for (uint32_t k = 0; k < dev->n_gpus && !shared; k++)
      if (dev->gpu[k].number == p->device)
        return ps__fail(PS_EINVAL, "engine: places %u and %u are both GPU %u", dev->gpu[k].place, i,
                        p->device);
    const uint32_t number = shared ? dev->n_gpus % (uint32_t)visible : p->device;
    dev->gpu[dev->n_gpus++] = (ps__cuda_gpu){.place = i, .number = number};
  }
  return PS_OK;
}

ps_status ps__cuda_find_gpu(const ps__cuda_driver *cu, ps__cuda_gpu *gpu) {
  int n = 0;
  PS__CUDA_TRY(cu, DeviceGetCount(&n));
  if (gpu->number >= (uint32_t)n)
    return ps__fail(PS_EDEVICE,
                    "GPU %u is asked for, %d visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
                    gpu->number, n);
  PS__CUDA_TRY(cu, DeviceGet(&gpu->dev, (int)gpu->number));
  return ps__cuda_supported(cu, gpu->dev, gpu->number);
}

ps_status ps__cuda_retain(const ps__cuda_driver *cu, ps__cuda_gpu *gpu, bool *seen) {
  uint64_t others;
  CUcontext ctx;
  *seen = ps__cuda_usage_begin(cu, gpu->number, &others);
  const CUresult r = cu->DevicePrimaryCtxRetain(&ctx, gpu->dev);
  if (r == CUDA_ERROR_OUT_OF_MEMORY)
    return ps__fail(PS_ENOMEM, "GPU %u has no memory left for a context: end what else uses it",
                    gpu->number);
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(cu, r, "cuDevicePrimaryCtxRetain");
  gpu->ctx = ctx;
  return PS_OK;
}

static ps_status open_context(ps__device *dev, ps__cuda_gpu *gpu) {
  bool seen;
  PS_TRY(ps__cuda_find_gpu(dev->cu, gpu));
  if (!ps__cuda_attribute(dev, gpu, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING))
    return ps__fail(PS_EDEVICE,
                    "GPU %u has no unified addresses with the host, which the cuda backend needs",
                    gpu->number);
  const bool mem_ops =
      ps__cuda_attribute(dev, gpu, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) &&
      !atomic_load(&without_mem_ops);
  if (!mem_ops)
    ps__log(PS_LOG_WARN,
            "GPU %u has no 64-bit stream memory operations: waits between host and GPU cost more",
            gpu->number);
  dev->mem_ops &= mem_ops;
  dev->host_pointers &=
      ps__cuda_attribute(dev, gpu, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) !=
      0;
  const ps_status st = ps__cuda_retain(dev->cu, gpu, &seen);
  if (!seen)
    ps__log(PS_LOG_WARN,
            "NVML (libnvidia-ml.so.1) does not show GPU %u: its clock, power and temperature are "
            "unknown, and memory of other processes on it counts as this one's",
            gpu->number);
  return st;
}

ps_status ps__cuda_reach(const ps__cuda_driver *cu, CUdevice a, CUdevice b, CUcontext to,
                         bool *access) {
  int can = 0;
  *access = false;
  if (cu->DeviceCanAccessPeer(&can, a, b) != CUDA_SUCCESS || !can)
    return PS_OK;
  const CUresult r = cu->CtxEnablePeerAccess(to, 0);
  *access = r == CUDA_SUCCESS || r == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  return *access || r == CUDA_ERROR_TOO_MANY_PEERS ? PS_OK
                                                   : ps__cuda_fail(cu, r, "cuCtxEnablePeerAccess");
}

static ps_status reach_each_other(ps__device *dev) {
  PS_TRY(ps__cuda_push(dev, &dev->gpu[0]));
  ps_status st = PS_OK;
  for (uint32_t i = 0; i < dev->n_gpus; i++)
    for (uint32_t k = 0; k < dev->n_gpus && st == PS_OK; k++) {
      bool access;
      if (dev->gpu[i].number == dev->gpu[k].number)
        continue;
      ps__cuda_turn_to(dev, &dev->gpu[i]);
      st = ps__cuda_reach(dev->cu, dev->gpu[i].dev, dev->gpu[k].dev, dev->gpu[k].ctx, &access);
    }
  ps__cuda_pop(dev);
  return st;
}

ps_status ps__cuda_gpus_open(ps__device *dev) {
  PS_TRY(ps__cuda_driver_open(&dev->cu));
  PS_TRY(find_gpus(dev));
  dev->mem_ops = dev->host_pointers = true;
  for (uint32_t i = 0; i < dev->n_gpus; i++)
    PS_TRY(open_context(dev, &dev->gpu[i]));
  return dev->n_gpus > 1 ? reach_each_other(dev) : PS_OK;
}

void ps__cuda_gpus_close(ps__device *dev) {
  for (uint32_t i = 0; i < dev->n_gpus; i++)
    if (dev->gpu[i].ctx)
      dev->cu->DevicePrimaryCtxRelease(dev->gpu[i].dev);
}

/* ---- host memory near them ------------------------------------------------------------------- */

/* A wish, like huge pages. Where the GPUs hang on several nodes, pages alternate between these. */
void ps__cuda_prefer_nodes(const ps__device *dev, void *p, uint64_t bytes) {
  enum { MPOL_PREFERRED_ = 1, MPOL_INTERLEAVE_ = 3, BITS = 8 * sizeof(unsigned long) };
  unsigned long mask = 0;
  for (uint32_t i = 0; i < dev->n_gpus; i++) {
    const int node = ps__cuda_numa_node(dev->cu, dev->gpu[i].dev);
    if (node < 0 || node >= BITS)
      return;
    mask |= 1ul << node;
  }
  (void)syscall(SYS_mbind, p, bytes, mask & (mask - 1) ? MPOL_INTERLEAVE_ : MPOL_PREFERRED_, &mask,
                (unsigned long)BITS + 1, 0u);
}

/* ---- several GPUs, before there is an engine ------------------------------------------------- */

ps_status ps__cuda_gpus_check(uint32_t device, uint32_t n) {
  const ps__cuda_driver *cu;
  int visible = 0;
  char first[64] = "", name[64] = "";
  PS_TRY(ps__cuda_driver_open(&cu));
  PS__CUDA_TRY(cu, DeviceGetCount(&visible));
  const uint32_t used = atomic_load(&share_gpu) ? 1 : n;
  if ((uint64_t)device + used > (uint64_t)visible)
    return ps__fail(PS_EINVAL,
                    "%u GPUs are asked for, from GPU %u on, and %d are visible: give fewer, or "
                    "look at nvidia-smi and CUDA_VISIBLE_DEVICES",
                    n, device, visible);
  for (uint32_t i = 0; i < used; i++) {
    CUdevice dev;
    PS__CUDA_TRY(cu, DeviceGet(&dev, (int)(device + i)));
    PS__CUDA_TRY(cu, DeviceGetName(i ? name : first, sizeof name, dev));
    if (i && strcmp(name, first) != 0)
      return ps__fail(PS_EINVAL,
                      "GPU %u is a %s, and GPU %u a %s: GPUs that train together must be of one "
                      "model: choose them with CUDA_VISIBLE_DEVICES",
                      device, first, device + i, name);
  }
  return PS_OK;
}

/* BYTES/s from GPU @a to @b, 0 where they have no access. The current context is @a's. */
static ps_status rate_between(const ps__cuda_driver *cu, CUdevice a, CUdevice b, CUcontext to,
                              CUdeviceptr src, CUdeviceptr dst, uint64_t bytes, double *out) {
  enum { COPIES = 16 };
  CUstream stream;
  uint64_t begin = 0;
  bool access;
  *out = 0;
  PS_TRY(ps__cuda_reach(cu, a, b, to, &access));
  if (!access)
    return PS_OK;
  PS__CUDA_TRY(cu, StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUresult r = CUDA_SUCCESS;
  for (int i = 0; i <= COPIES && r == CUDA_SUCCESS; i++) { /* the first one is not counted */
    r = cu->MemcpyAsync(dst, src, bytes, stream);
    if (i == 0 && r == CUDA_SUCCESS)
      r = cu->StreamSynchronize(stream);
    if (i == 0)
      begin = ps__now_ns();
  }
  if (r == CUDA_SUCCESS)
    r = cu->StreamSynchronize(stream);
  *out = COPIES * (double)bytes / ((double)(ps__now_ns() - begin) * 1e-9);
  cu->StreamDestroy(stream);
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(cu, r, "copies between GPUs");
}

enum { PEER_BYTES = 64 << 20 };
typedef struct peer {
  CUdevice dev;
  CUcontext ctx;
  CUdeviceptr memory; /* PEER_BYTES to send, and as many to receive */
} peer;

static ps_status open_peer(const ps__cuda_driver *cu, uint32_t device, peer *p) {
  CUcontext old;
  uint64_t others;
  PS__CUDA_TRY(cu, DeviceGet(&p->dev, (int)device));
  ps__cuda_usage_begin(cu, device, &others);
  CUcontext ctx;
  PS__CUDA_TRY(cu, DevicePrimaryCtxRetain(&ctx, p->dev));
  p->ctx = ctx;
  PS__CUDA_TRY(cu, CtxPushCurrent(p->ctx));
  const CUresult r = cu->MemAlloc(&p->memory, 2ull * PEER_BYTES);
  cu->CtxPopCurrent(&old);
  if (r != CUDA_SUCCESS)
    p->memory = 0;
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(cu, r, "cuMemAlloc");
}

static void close_peer(const ps__cuda_driver *cu, const peer *p) {
  CUcontext old;
  if (!p->ctx)
    return;
  cu->CtxPushCurrent(p->ctx);
  if (p->memory)
    cu->MemFree(p->memory);
  cu->CtxPopCurrent(&old);
  cu->DevicePrimaryCtxRelease(p->dev);
}

/* All pairs must have access. The rate is that of the slowest one. */
static ps_status rate_of_all(const ps__cuda_driver *cu, const peer *p, uint32_t n, double *out) {
  double slowest = 0;
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t k = 0; k < n; k++) {
      CUcontext old;
      double rate = 0;
      if (i == k)
        continue;
      PS__CUDA_TRY(cu, CtxPushCurrent(p[i].ctx));
      const ps_status st = rate_between(cu, p[i].dev, p[k].dev, p[k].ctx, p[i].memory,
                                        p[k].memory + PEER_BYTES, PEER_BYTES, &rate);
      cu->CtxPopCurrent(&old);
      PS_TRY(st);
      if (!(rate > 0)) {
        *out = 0;
        return PS_OK;
      }
      slowest = slowest > 0 && slowest < rate ? slowest : rate;
    }
  *out = slowest;
  return PS_OK;
}

ps_status ps__cuda_peers(uint32_t device, uint32_t n, bool *out) {
  const ps__cuda_driver *cu;
  CUdevice dev[PS_MAX_DEVICES];
  PS_TRY(ps__cuda_driver_open(&cu));
  *out = true;
  if (atomic_load(&share_gpu))
    return PS_OK;
  for (uint32_t i = 0; i < n; i++)
    PS__CUDA_TRY(cu, DeviceGet(&dev[i], (int)(device + i)));
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t k = 0; k < n; k++) {
      int can = 1;
      if (i != k)
        PS__CUDA_TRY(cu, DeviceCanAccessPeer(&can, dev[i], dev[k]));
      if (can)
        continue;
      ps__log(PS_LOG_WARN,
              "GPU %u cannot access the memory of GPU %u: each GPU reads all parameters from host "
              "memory, and the host adds the gradients",
              device + i, device + k);
      *out = false;
      return PS_OK;
    }
  return PS_OK;
}

ps_status ps__cuda_peer_rate(uint32_t device, uint32_t n, double *out) {
  const ps__cuda_driver *cu;
  peer p[PS_MAX_DEVICES] = {{.memory = 0}};
  PS_TRY(ps__cuda_driver_open(&cu));
  ps_status st = PS_OK;
  for (uint32_t i = 0; i < n && st == PS_OK; i++)
    st = open_peer(cu, device + i, &p[i]);
  if (st == PS_OK)
    st = rate_of_all(cu, p, n, out);
  for (uint32_t i = 0; i < n; i++)
    close_peer(cu, &p[i]);
  return st;
}
