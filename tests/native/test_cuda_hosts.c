/* test_cuda_hosts.c - the kernel that adds over hosts, against its contract on the CPU, for both
 * dtypes, several numbers of hosts and every rank. Without a GPU it says why and skips. */
#ifndef PS_CUDA
#  include <stdio.h>
int main(void) {
  printf("ok skipped: built without CUDA\n");
  return 0;
}
#else
#  include "backends/cuda/driver.h"
#  include "check.h"
#  include "core/dtype.h"
#  include "kernels/cuda/hosts_add.h"
#  include <math.h>
#  include <penstock/model.h>

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
  cu->StreamDestroy(stream);
  CHECK(cu->DevicePrimaryCtxRelease(device) == CUDA_SUCCESS);
  puts("ok sums over hosts on a GPU");
  return 0;
}
#endif
