/* test_cuda_hosts.c - the kernel that adds over hosts, against its contract on the CPU, for both
 * dtypes, several numbers of hosts and every rank; the lanes for NCCL, before an engine uses them
 * and while one does. Without a GPU it says why and skips. */
#ifndef PS_CUDA
#  include <stdio.h>
int main(void) {
  printf("ok skipped: built without CUDA\n");
  return 0;
}
#else
#  include "backends/cuda/driver.h"
#  include "backends/list.h"
#  include "check.h"
#  include "core/dtype.h"
#  include "engine/engine.h"
#  include "hosts/net.h"
#  include "kernels/cuda/hosts_add.h"
#  include <math.h>
#  include <penstock/model.h>
#  include <time.h>

enum { MAX_HOSTS = 5, MOST = 70000 };
static const ps__cuda_driver *cu;

/* One rank's elements, of magnitudes far apart, so that the order of additions shows. */
static void fill(ps_dtype dt, void *data, uint64_t n, uint64_t seed) {
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t x = mix64(seed * MOST + i);
    const float f = ldexpf((float)(int32_t)(uint32_t)x, -31 + (int)(x >> 60) - 8);
    ps__dtypes[dt].from_f32((char *)data + i * ps_dtype_bytes(dt), &f, 1);
  }
}

static void check_sum(ps_dtype dt, uint32_t n_hosts, uint32_t rank, uint64_t n, CUstream stream) {
  const size_t e = ps_dtype_bytes(dt), stride = (n * e + 15) / 16 * 16;
  char *host = calloc(n_hosts, stride), *sum = calloc(1, stride);
  CUdeviceptr mine, others;
  CHECK(cu->MemAlloc(&mine, stride) == CUDA_SUCCESS);
  CHECK(cu->MemAlloc(&others, MAX_HOSTS * stride) == CUDA_SUCCESS);
  for (uint32_t r = 0; r < n_hosts; r++) {
    fill(dt, host + r * stride, n, r + 1);
    const CUdeviceptr to = r == rank ? mine : others + (r < rank ? r : r - 1) * stride;
    CHECK(cu->MemcpyAsync(to, (CUdeviceptr)(uintptr_t)(host + r * stride), stride, stream) ==
          CUDA_SUCCESS);
  }
  CHECK(ps__cuda_hosts_add(stream, (void *)(uintptr_t)mine, (void *)(uintptr_t)others, stride, n,
                           rank, n_hosts, dt) == PS_OK);
  CHECK(cu->MemcpyAsync((CUdeviceptr)(uintptr_t)sum, mine, stride, stream) == CUDA_SUCCESS);
  CHECK(cu->StreamSynchronize(stream) == CUDA_SUCCESS);
  for (uint64_t i = 0; i < n; i++) {
    float total = 0, term;
    char bits[4];
    for (uint32_t r = 0; r < n_hosts; r++) {
      ps__dtypes[dt].to_f32(r ? &term : &total, host + r * stride + i * e, 1);
      total += r ? term : 0;
    }
    ps__dtypes[dt].from_f32(bits, &total, 1);
    CHECK(memcmp(bits, sum + i * e, e) == 0);
  }
  cu->MemFree(mine);
  cu->MemFree(others);
  free(host);
  free(sum);
}

/* ---- lanes ----------------------------------------------------------------------------------- */

/* An engine pins its host memory in ranges of PINNED, and one copy may not reach over two. */
enum { COPIED = (1 << 20) + 4096, PINNED = 1 << 30 };

/* @data to the device and back to @back, by the lanes' marks, within 10 s. */
static void copy_over(const ps__net_device *d, const char *data, char *back, void *device) {
  const ps__net_device_api *api = d->api;
  bool passed = false, idle = false;
  CHECK(api->copy(d->user, PS__LANE_IN, device, data, COPIED) == PS_OK);
  CHECK(api->mark(d->user, PS__LANE_IN, PS__MARK_IN) == PS_OK);
  CHECK(api->after(d->user, PS__LANE_OUT, PS__MARK_IN) == PS_OK);
  CHECK(api->copy(d->user, PS__LANE_OUT, back, device, COPIED) == PS_OK);
  CHECK(api->mark(d->user, PS__LANE_OUT, PS__MARK_OUT) == PS_OK);
  for (int i = 0; i < 10000 && !passed; i++) {
    CHECK(api->passed(d->user, PS__MARK_OUT, &passed) == PS_OK);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
  CHECK(passed && api->idle(d->user, &idle) == PS_OK && idle);
  CHECK(memcmp(data, back, COPIED) == 0);
}

static ps_engine *engine_on(uint32_t gpu) {
  ps_engine *e;
  ps_engine_config cfg = {.struct_bytes = sizeof cfg, .n_places = 2, .n_spaces = 2, .n_streams = 2};
  cfg.place[0] = (ps_place){.kind = PS_PLACE_DEVICE, .backend = PS_BACKEND_CUDA, .device = gpu};
  cfg.place[1] = (ps_place){.kind = PS_PLACE_HOST, .backend = PS_BACKEND_CPU};
  for (uint32_t i = 0; i < 2; i++) {
    cfg.space[i] = (ps_space_config){.bytes = i ? PINNED + 2 * COPIED : 1, .place = i};
    cfg.stream[i] = (ps_stream_config){.place = i, .n_threads = 1};
  }
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  return e;
}

/* Lanes copy without an engine, and with one over two of its pinned ranges. */
static void check_lanes(void) {
  const int64_t live = ps__live_allocations();
  int n_gpus = 0;
  ps__net_device d, none;
  void *device, *a, *b;
  CHECK_FAILS(ps__backend_net(PS_BACKEND_CUDA, 99, &none), PS_EDEVICE, "GPU 99");
  CHECK_FAILS(ps__backend_net(PS_BACKEND_CPU, 0, &none), PS_EDEVICE, "NCCL needs GPUs");
  CHECK(ps__live_allocations() == live);
  CHECK(ps__backend_net(PS_BACKEND_CUDA, 0, &d) == PS_OK);
  CHECK(d.api->enter(d.user) == PS_OK);
  CHECK(d.api->reserve(d.user, false, COPIED, &device) == PS_OK);
  CHECK(d.api->reserve(d.user, true, COPIED, &a) == PS_OK);
  CHECK(d.api->reserve(d.user, true, COPIED, &b) == PS_OK);
  for (uint64_t i = 0; i < COPIED / 8; i++)
    ((uint64_t *)a)[i] = mix64(i);
  copy_over(&d, a, b, device);
  d.api->leave(d.user);

  CHECK(cu->DeviceGetCount(&n_gpus) == CUDA_SUCCESS);
  if (n_gpus > 1) {
    ps_engine *other = engine_on(1);
    CHECK_FAILS(ps__engine_net(other, &d), PS_EINVAL, "NCCL was opened on GPU 0");
    CHECK(ps_engine_close(other) == PS_OK);
  }
  ps_engine *e = engine_on(0);
  CHECK(ps__engine_net(e, &d) == PS_OK);
  char *host = (char *)ps_engine_space(e, 1) + PINNED - 4096;
  memcpy(host, a, COPIED);
  CHECK(d.api->enter(d.user) == PS_OK);
  const int64_t before = ps__live_allocations();
  d.api->release(d.user, a);
  d.api->release(d.user, b);
  CHECK(ps__live_allocations() == before - 2);
  copy_over(&d, host, host + COPIED, device);
  d.api->leave(d.user);
  d.api->close(d.user, true);
  CHECK(ps_engine_close(e) == PS_OK);
  CHECK(ps__live_allocations() == live);
}

int main(void) {
  static const uint64_t counts[] = {1, 7, 8, 9, 64, 2048, 2051, MOST - 3};
  CUdevice device;
  CUcontext ctx;
  CUstream stream;
  if (ps__cuda_driver_open(&cu) != PS_OK) {
    printf("ok skipped: %s\n", ps_last_error());
    return 0;
  }
  CHECK(cu->DeviceGet(&device, 0) == CUDA_SUCCESS);
  CHECK(cu->DevicePrimaryCtxRetain(&ctx, device) == CUDA_SUCCESS);
  CHECK(cu->CtxPushCurrent(ctx) == CUDA_SUCCESS);
  CHECK(cu->StreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
  for (int d = 0; d < 2; d++)
    for (uint32_t n_hosts = 2; n_hosts <= MAX_HOSTS; n_hosts++)
      for (uint32_t rank = 0; rank < n_hosts; rank++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
          check_sum(d ? PS_BF16 : PS_F32, n_hosts, rank, counts[i], stream);
  CHECK_FAILS(ps__cuda_hosts_add(stream, NULL, NULL, 16, 1, 0, 2, PS_F32), PS_EINVAL, "hosts_add");
  CHECK_FAILS(ps__cuda_hosts_add(stream, &cu, &cu, 16, 1, 2, 2, PS_F32), PS_EINVAL, "hosts_add");
  check_lanes();
  cu->StreamDestroy(stream);
  CHECK(cu->DevicePrimaryCtxRelease(device) == CUDA_SUCCESS);
  puts("ok sums over hosts on a GPU, and lanes for NCCL");
  return 0;
}
#endif
