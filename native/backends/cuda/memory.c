/* memory.c - spaces and copies of the CUDA backend.
 *
 * Device spaces: one cuMemAlloc of exactly the bytes asked for, zeroed like fresh host memory.
 * Host spaces: an exact mmap with huge pages where the kernel has them, preferred on the GPUs' NUMA
 * nodes, touched by all CPUs at once and pinned in ranges of 1 GiB, once for all GPUs. The ranges
 * begin after what is not pinned. */
#include "backends/cuda/device.h"
#include "backends/cuda/probe.h"
#include "engine/pin.h"
#include <stdatomic.h>
#include <unistd.h>

static const uint64_t PIN_BYTES = (uint64_t)1 << 30;
static const uint64_t TOUCH_BYTES = (uint64_t)64 << 20;

/* ---- device spaces --------------------------------------------------------------------------- */

ps_status ps__cuda_zero(const ps__cuda_driver *cu, CUdeviceptr p, uint64_t bytes) {
  PS__CUDA_TRY(cu, MemsetD8(p, 0, bytes));
  PS__CUDA_TRY(cu, StreamSynchronize(NULL));
  return PS_OK;
}

static ps_status map_device(ps__device *dev, uint32_t space, uint64_t bytes, ps__mapping *out) {
  const ps__cuda_driver *cu = dev->cu;
  CUdeviceptr p = 0;
  CUresult r = ps__fault_hit(PS_FAULT_ALLOC) ? CUDA_ERROR_OUT_OF_MEMORY : cu->MemAlloc(&p, bytes);
  if (r == CUDA_ERROR_OUT_OF_MEMORY) {
    size_t free_bytes = 0, total = 0;
    char want[32], have[32], all[32];
    cu->MemGetInfo(&free_bytes, &total);
    return ps__fail(PS_ENOMEM,
                    "space %u: %s of GPU memory refused, %s of %s are free: lower %s, or "
                    "end what else uses this "
                    "GPU",
                    space, ps__format_bytes(want, bytes), ps__format_bytes(have, free_bytes),
                    ps__format_bytes(all, total), ps__field("device_mem_bytes"));
  }
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(cu, r, "cuMemAlloc");
  const ps_status st = ps__cuda_zero(cu, p, bytes);
  if (st != PS_OK) {
    cu->MemFree(p);
    return st;
  }
  ps__live_add(1);
  *out = (ps__mapping){.addr = (void *)(uintptr_t)p, .bytes = bytes};
  return PS_OK;
}

/* ---- host spaces ----------------------------------------------------------------------------- */

typedef struct touch_job {
  char *p;
  uint64_t bytes, page;
} touch_job;

static void touch_task(void *arg, int64_t task, uint32_t worker) {
  const touch_job *j = arg;
  uint64_t at = (uint64_t)task * TOUCH_BYTES,
           end = at + TOUCH_BYTES < j->bytes ? at + TOUCH_BYTES : j->bytes;
  for (; at < end; at += j->page)
    *(volatile char *)(j->p + at) = 0;
}

void ps__cuda_place(uint32_t device, void *p, uint64_t bytes) {
  ps__device one = {.n_gpus = 1};
  if (ps__cuda_driver_open(&one.cu) == PS_OK &&
      one.cu->DeviceGet(&one.gpu[0].dev, (int)device) == CUDA_SUCCESS)
    ps__cuda_prefer_nodes(&one, p, bytes);
}

static ps_status touch(void *p, uint64_t bytes) {
  uint32_t n = ps__n_cpus();
  touch_job j = {p, bytes, (uint64_t)sysconf(_SC_PAGESIZE)};
  ps__pool *pool;
  PS_TRY(ps__pool_create(&pool, n > 64 ? 64 : n, "ps-touch"));
  ps__pool_run(pool, (int64_t)((bytes + TOUCH_BYTES - 1) / TOUCH_BYTES), touch_task, &j);
  ps__pool_destroy(pool);
  return PS_OK;
}

static void unpin(ps__device *dev, char *p, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += PIN_BYTES)
    dev->cu->MemHostUnregister(p + at);
}

static CUresult pin_range(const ps__device *dev, char *p, uint64_t bytes) {
  return dev->cu->MemHostRegister(p, bytes,
                                  CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
}

/* Of less than a range: how much of @p can be pinned, to 16 MiB. Nothing of it is afterwards. */
static uint64_t pins_more(const ps__device *dev, char *p, uint64_t bytes) {
  const uint64_t least = 16 << 20;
  uint64_t done = 0, at[8];
  uint32_t n = 0;
  for (uint64_t part = PIN_BYTES / 2; part >= least; part /= 2)
    if (done + part <= bytes && pin_range(dev, p + done, part) == CUDA_SUCCESS) {
      at[n++] = done;
      done += part;
    }
  while (n > 0)
    dev->cu->MemHostUnregister(p + at[--n]);
  return done;
}

static ps_status pin_refused(ps__device *dev, uint32_t space, uint64_t bytes, uint64_t done,
                             CUresult r) {
  const char *name = NULL;
  dev->cu->GetErrorName(r, &name);
  return ps__pin_refuse(space, bytes, done, name ? name : "?");
}

static ps_status pin(ps__device *dev, uint32_t space, char *p, uint64_t bytes) {
  char have[32], want[32];
  for (uint64_t at = 0; at < bytes; at += PIN_BYTES) {
    uint64_t n = bytes - at < PIN_BYTES ? bytes - at : PIN_BYTES;
    const uint64_t limit = ps__pin_limited(at + n);
    const CUresult r = limit ? CUDA_ERROR_OUT_OF_MEMORY : pin_range(dev, p + at, n);
    if (r != CUDA_SUCCESS) {
      const uint64_t done = limit ? limit : at + pins_more(dev, p + at, n);
      unpin(dev, p, at);
      return pin_refused(dev, space, bytes, done, r);
    }
    if ((at / PIN_BYTES + 1) % 16 == 0)
      ps__log(PS_LOG_INFO, "pinned %s of %s of host memory", ps__format_bytes(have, at + n),
              ps__format_bytes(want, bytes));
  }
  return PS_OK;
}

static ps_status map_host(ps__device *dev, uint32_t space, uint64_t bytes, ps__mapping *out) {
  const uint64_t pageable = dev->cfg.space[space].pageable_bytes;
  char what[32];
  void *p;
  snprintf(what, sizeof what, "space %u", space);
  PS_TRY(ps__map(&p, bytes, what));
  ps__cuda_prefer_nodes(dev, p, bytes);
  ps_status st = touch(p, bytes);
  if (st == PS_OK)
    st = pin(dev, space, (char *)p + pageable, bytes - pageable);
  if (st == PS_OK)
    *out = (ps__mapping){.addr = p, .host = p, .bytes = bytes};
  else
    ps__unmap(p, bytes);
  return st;
}

ps_status ps__cuda_map(ps__device *dev, uint32_t space, uint64_t bytes, ps__mapping *out) {
  ps__mapping m = {0};
  if (bytes) {
    PS_TRY(ps__cuda_push(dev, ps__cuda_gpu_at(dev, dev->cfg.space[space].place)));
    const bool host = ps__space_place(&dev->cfg, space)->kind == PS_PLACE_HOST;
    ps_status st = host ? map_host(dev, space, bytes, &m) : map_device(dev, space, bytes, &m);
    ps__cuda_pop(dev);
    PS_TRY(st);
  }
  dev->space[space] = *out = m;
  return PS_OK;
}

/* The number of the host's space that @p is in; n_spaces: it is in none. */
static uint32_t host_space_of(const ps__device *dev, const void *p) {
  uint32_t i = 0;
  for (; i < dev->cfg.n_spaces; i++) {
    const ps__mapping *m = &dev->space[i];
    if (m->host && (uintptr_t)p >= (uintptr_t)m->host &&
        (uintptr_t)p - (uintptr_t)m->host < m->bytes)
      break;
  }
  return i;
}

/* The GPU whose memory @p is in; the first one where it is in none's. */
static const ps__cuda_gpu *gpu_of(const ps__device *dev, const void *p) {
  for (uint32_t i = 0; i < dev->cfg.n_spaces; i++) {
    const ps__mapping *m = &dev->space[i];
    if (m->addr && !m->host && (uintptr_t)p >= (uintptr_t)m->addr &&
        (uintptr_t)p - (uintptr_t)m->addr < m->bytes)
      return ps__cuda_gpu_at(dev, dev->cfg.space[i].place);
  }
  return &dev->gpu[0];
}

void ps__cuda_unmap(ps__device *dev, const ps__mapping *m) {
  if (!m->addr || dev->stuck)
    return;
  if (ps__cuda_push(dev, gpu_of(dev, m->addr)) != PS_OK)
    return;
  if (m->host) {
    const uint64_t pageable = dev->cfg.space[host_space_of(dev, m->host)].pageable_bytes;
    unpin(dev, (char *)m->host + pageable, m->bytes - pageable);
    ps__unmap(m->host, m->bytes);
  } else {
    dev->cu->MemFree((CUdeviceptr)(uintptr_t)m->addr);
    ps__live_add(-1);
  }
  ps__cuda_pop(dev);
}

/* All of it: a device space is one allocation of the driver's, a host space is touched to its
 * end. */
ps_status ps__cuda_peak(ps__device *dev, const ps__mapping *m, uint64_t *out_bytes) {
  *out_bytes = m->bytes;
  return PS_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* BYTES from @p to the end of its pinned range, or to where pinned memory begins: one copy may not
 * reach over two. */
static uint64_t left_in_range(const ps__device *dev, const void *p, uint64_t bytes) {
  const uint32_t space = host_space_of(dev, p);
  if (space == dev->cfg.n_spaces)
    return bytes;
  const uint64_t pageable = dev->cfg.space[space].pageable_bytes,
                 at = (uint64_t)((uintptr_t)p - (uintptr_t)dev->space[space].host),
                 left = at < pageable ? pageable - at : PIN_BYTES - (at - pageable) % PIN_BYTES;
  return left < bytes ? left : bytes;
}

ps_status ps__cuda_copy_on(const ps__device *dev, CUstream on, void *dst, const void *src,
                           uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    uint64_t n = left_in_range(dev, (const char *)src + at, bytes - at);
    n = left_in_range(dev, (char *)dst + at, n);
    PS__CUDA_TRY(dev->cu, MemcpyAsync((CUdeviceptr)(uintptr_t)dst + at,
                                      (CUdeviceptr)(uintptr_t)src + at, n, on));
    at += n;
  }
  return PS_OK;
}

/* copy: between device and pinned host memory, inside a device or between two, in its stream's
 * order. bytes: 2*bytes of traffic. */
ps_status ps__cuda_copy(ps__device *dev, uint32_t stream, void *dst, const void *src,
                        uint64_t bytes) {
  ps__cuda_stream *s = &dev->stream[stream];
  if (!s->stream) {
    ps__host_stream_copy(&s->host, dst, src, bytes);
    return PS_OK;
  }
  return ps__cuda_copy_on(dev, s->stream, dst, src, bytes);
}

static ps_status transfer(ps__device *dev, void *dst, const void *src, uint64_t bytes) {
  PS_TRY(ps__cuda_copy_on(dev, NULL, dst, src, bytes));
  PS__CUDA_TRY(dev->cu, StreamSynchronize(NULL));
  return PS_OK;
}

ps_status ps__cuda_transfer(ps__device *dev, void *dst, const void *src, uint64_t bytes) {
  const ps__cuda_gpu *gpu = gpu_of(dev, src);
  PS_TRY(ps__cuda_push(dev, gpu == &dev->gpu[0] ? gpu_of(dev, dst) : gpu));
  const ps_status st = transfer(dev, dst, src, bytes);
  ps__cuda_pop(dev);
  return st;
}
