/* probe.cuh - what the probes of CUDA kernels share: how they fail, and random numbers. */
#ifndef PS_BENCH_PROBE_CUH
#define PS_BENCH_PROBE_CUH
#include <penstock/status.h>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <unistd.h>

typedef __nv_bfloat16 bf16;

/* Ends the process at once: after a fault of the GPU nothing of it can be released. */
static void must(cudaError_t e, int line) {
  if (e == cudaSuccess)
    return;
  printf("  FAILED: line %d: %s\n", line, cudaGetErrorString(e));
  fflush(stdout);
  _exit(1);
}
#define MUST(call) must((call), __LINE__)

/* What the kernels count on from the library. */
extern "C" ps_status ps__fail(ps_status code, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  printf("  refused: ");
  vprintf(fmt, ap);
  printf("\n");
  va_end(ap);
  return code;
}

static uint64_t seed = 1;
static double uniform() {
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return (double)(seed >> 11) / 9007199254740992.0;
}
static double normal() {
  return std::sqrt(-2.0 * std::log(1.0 - uniform())) * std::cos(6.283185307179586 * uniform());
}
#endif
