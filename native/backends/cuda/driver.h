/* driver.h - the CUDA driver's functions that the backend uses, found at run time: the library
 * loads on machines without one.
 *
 * Types and constants come from the toolkit's cuda.h, which also says, by its macros, which
 * version of a function a name means; cuGetProcAddress() is asked for that version. */
#ifndef PS_BACKENDS_CUDA_DRIVER_H
#define PS_BACKENDS_CUDA_DRIVER_H
#include "core/core.h"
#include <cuda.h>

#if CUDA_VERSION < 12040
#  error "the CUDA toolkit is older than 12.4: update it, or build with CUDA=0"
#endif

/* clang-format off */
#define PS__CUDA_CALLS(X)                                                                         \
  X(Init) X(DriverGetVersion) X(GetErrorName) X(GetErrorString) X(DeviceGetCount) X(DeviceGet)    \
  X(DeviceGetAttribute) X(DeviceGetName) X(DeviceTotalMem) X(DeviceGetPCIBusId)                   \
  X(DevicePrimaryCtxRetain) X(DevicePrimaryCtxRelease) X(CtxSetCurrent) X(CtxPushCurrent)         \
  X(CtxPopCurrent) X(MemGetInfo) X(MemAlloc) X(MemFree) X(MemsetD8) X(MemsetD8Async)              \
  X(MemHostAlloc) X(MemFreeHost) X(MemHostGetDevicePointer) X(MemHostRegister)                    \
  X(MemHostUnregister) X(MemcpyAsync) X(StreamCreate) X(StreamDestroy) X(StreamQuery)            \
  X(StreamSynchronize)                                                                            \
  X(StreamWaitEvent) X(StreamWriteValue64) X(StreamWaitValue64) X(LaunchHostFunc)                 \
  X(EventCreate) X(EventDestroy) X(EventRecord) X(EventSynchronize) X(EventQuery)                 \
  X(EventElapsedTime) X(DeviceCanAccessPeer) X(DeviceGetP2PAttribute) X(CtxEnablePeerAccess)      \
  X(StreamCreateWithPriority) X(CtxGetStreamPriorityRange)
/* clang-format on */

typedef struct ps__cuda_driver {
#define PS__FIELD(name) __typeof__(&cu##name) name;
  PS__CUDA_CALLS(PS__FIELD)
#undef PS__FIELD
  /* what a profiler is told; NULL where the driver does not have it */
  CUresult (*ProfilerStart)(void), (*ProfilerStop)(void);
} ps__cuda_driver;

/* The driver, opened and initialised once a process; any thread. PS_EDEVICE says what is missing
 * and what to do. */
ps_status ps__cuda_driver_open(const ps__cuda_driver **out);

/* Whether the library's kernels run on GPU @device (number @idx in messages). bf16 needs compute
 * capability 8.0. Machine code runs on its own major version, from its minor version on; CUDA_ARCH
 * chooses the versions at build time. The last entry of CUDA_ARCH is also built as PTX, for all
 * newer GPUs. Errors: PS_EDEVICE names what to build. */
ps_status ps__cuda_supported(const ps__cuda_driver *cu, CUdevice device, uint32_t idx);

/* Lets the current context, of GPU @a, access memory of context @to, of GPU @b (gpus.c). Copies
 * from @a to @b then take the direct way; without @access they go through the host. */
ps_status ps__cuda_reach(const ps__cuda_driver *cu, CUdevice a, CUdevice b, CUcontext to,
                         bool *access);

/* What other processes hold of GPU @device, BYTES, as it was at the first look at the GPU. To be
 * called before the GPU's context is made (usage.c). False: NVML does not say, and *others is 0. */
bool ps__cuda_usage_begin(const ps__cuda_driver *cu, uint32_t device, uint64_t *others);

/* The NUMA node that the GPU hangs on, -1 where the system does not say (facts.c). */
int ps__cuda_numa_node(const ps__cuda_driver *cu, CUdevice dev);

/* Bytes/s each way of GPU @device's PCIe link at the best that GPU and slot do, 0 where NVML
 * does not say (usage.c). */
double ps__cuda_link_bytes_per_s(const ps__cuda_driver *cu, uint32_t device);

/* "CUDA_ERROR_X: what it means (call)" as the last error. PS_ENOMEM, with what to do, when
 * memory is out, else PS_EDEVICE. */
ps_status ps__cuda_fail(const ps__cuda_driver *cu, CUresult r, const char *call);

#define PS__CUDA_TRY(cu, call)                                                                     \
  do {                                                                                             \
    CUresult r_ = (cu)->call;                                                                      \
    if (r_ != CUDA_SUCCESS)                                                                        \
      return ps__cuda_fail(cu, r_, #call);                                                         \
  } while (0)

#endif
