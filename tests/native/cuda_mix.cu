/* cuda_mix.cu - kernels of test_cuda_engine: one that mixes bytes like rp_compute() in
 * random_program.h, one that works for a given time, one that writes where it must not. */
#include "core/mix64.h"
#include "kernels/cuda/cuda_exec.h"
#include <cuda_runtime.h>
#include <penstock/engine.h>
#include <string.h>

typedef struct mix_args { /* rp_args */
  uint32_t n_access, delay_seed;
  uint8_t mode[4], bytes[4];
} mix_args;

typedef struct mix_ptr {
  uint8_t *p[4];
} mix_ptr;

__device__ static uint64_t mix64(uint64_t x) { return ps__mix64(x + PS__MIX_GAMMA); }

__device__ static void spin(uint64_t cycles) {
  for (long long end = clock64() + (long long)cycles; clock64() < end;)
    ;
}

__device__ static void delay(uint32_t seed, uint64_t step, uint64_t op) {
  const uint64_t r = mix64(seed + step * 131 + op * 7919);
  if (r % 64 < 8)
    spin((r >> 32) % 60000);
  else if (r % 64 < 24)
    spin((r >> 32) % 4000);
}

__global__ static void mix_k(mix_args a, mix_ptr ptr, uint64_t op, uint64_t step) {
  delay(a.delay_seed, step, op * 2);
  uint64_t h = mix64(op * 977 + step);
  for (uint32_t i = 0; i < a.n_access; i++)
    for (uint32_t b = 0; (a.mode[i] & PS_READ) && b < a.bytes[i]; b++)
      h = (h ^ ((volatile uint8_t *)ptr.p[i])[b]) * 0x100000001b3u;
  for (uint32_t i = 0; i < a.n_access; i++)
    for (uint32_t b = 0; (a.mode[i] & PS_WRITE) && b < a.bytes[i]; b++)
      ((volatile uint8_t *)ptr.p[i])[b] = (uint8_t)mix64(h + i * 64 + b);
  delay(a.delay_seed, step, op * 2 + 1);
}

__global__ static void work_k(uint64_t ns) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < ns);
}

__global__ static void stray_k(uint64_t *p) { *p = 1; }

static cudaStream_t stream_of(const ps_launch *l) {
  return ((const ps__cuda_exec *)l->exec)->stream;
}

extern "C" ps_status mix_cuda(const ps_launch *l) {
  mix_args a;
  mix_ptr ptr = {};
  memcpy(&a, l->args, sizeof a);
  for (uint32_t i = 0; i < l->n_ptr; i++)
    ptr.p[i] = (uint8_t *)l->ptr[i];
  mix_k<<<1, 1, 0, stream_of(l)>>>(a, ptr, l->op, l->step);
  return cudaGetLastError() == cudaSuccess ? PS_OK : PS_EDEVICE;
}

/* args: u64 ns */
extern "C" ps_status work_cuda(const ps_launch *l) {
  work_k<<<1, 1, 0, stream_of(l)>>>(*(const uint64_t *)l->args);
  return cudaGetLastError() == cudaSuccess ? PS_OK : PS_EDEVICE;
}

/* Keeps the default stream busy, on which cuMemsetD8 waits its turn. */
extern "C" bool work_on_default_stream(uint64_t ns) {
  work_k<<<1, 1>>>(ns);
  return cudaGetLastError() == cudaSuccess;
}

/* Step 2 writes to an address that is nobody's. */
extern "C" ps_status stray_cuda(const ps_launch *l) {
  stray_k<<<1, 1, 0, stream_of(l)>>>(
      (uint64_t *)(l->step == 2 ? (void *)(uintptr_t)4096 : l->ptr[0]));
  return cudaGetLastError() == cudaSuccess ? PS_OK : PS_EDEVICE;
}

/* Loads every kernel, so that none is loaded between a run's first and last step. */
extern "C" bool mix_load(void) {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, mix_k) == cudaSuccess &&
         cudaFuncGetAttributes(&a, work_k) == cudaSuccess &&
         cudaFuncGetAttributes(&a, stray_k) == cudaSuccess;
}
