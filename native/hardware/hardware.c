/* hardware.c - the facts of this machine, and rates estimated from them. */
#include "hardware/hardware_impl.h"
#include <penstock/engine.h>
#ifdef PS_CUDA
#  include "backends/cuda/probe.h"
#endif
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#define PS__NO_CUDA                                                                                \
  "this library was built without CUDA: install the CUDA toolkit (12.4 or newer) and run make "    \
  "CUDA=1, or use the cpu backend"

static void cpu_name(char *out, size_t room) {
  snprintf(out, room, "unknown CPU");
  FILE *f = fopen("/proc/cpuinfo", "r");
  char line[256];
  while (f && fgets(line, sizeof line, f)) {
    const char *colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) != 0 || !colon)
      continue;
    snprintf(out, room, "%s", colon + 2);
    out[strcspn(out, "\n")] = 0;
    break;
  }
  if (f)
    fclose(f);
}

ps_status ps__hardware_facts(ps_hardware *hw, uint32_t backend, uint32_t device,
                             uint32_t n_threads) {
  memset(hw, 0, sizeof *hw);
  (void)ps__process_bytes(); /* before a driver and measuring add to it */
  hw->struct_bytes = sizeof *hw;
  hw->backend = backend;
  hw->device = device;
  hw->n_cpus = ps__n_cpus();
  hw->n_threads = n_threads                                       ? n_threads
                  : backend == PS_BACKEND_CUDA && hw->n_cpus >= 4 ? hw->n_cpus - 2
                                                                  : hw->n_cpus;
  hw->host_memory_bytes = ps__host_memory_limit();
  cpu_name(hw->name, sizeof hw->name);
  if (backend == PS_BACKEND_CPU)
    return PS_OK;
  if (backend != PS_BACKEND_CUDA)
    return ps__fail(PS_EINVAL, "backend %u is unknown", backend);
#ifdef PS_CUDA
  PS_TRY(ps__cuda_facts(hw));
  hw->peak_flops_per_s = ps_hardware_peak(hw->device_name);
  return PS_OK;
#else
  return ps__fail(PS_EDEVICE, PS__NO_CUDA);
#endif
}

void ps__hardware_note(const ps_hardware_ask *ask, ps_hardware_note note, const char *fmt, ...) {
  char line[1024];
  va_list ap;
  if (!ask->note)
    return;
  va_start(ap, fmt);
  vsnprintf(line, sizeof line, fmt, ap);
  va_end(ap);
  ask->note(ask->user, note, line);
}

ps_status ps_hardware_gpu_state(ps_gpu_state *out, uint32_t backend, uint32_t device) {
  if (!out)
    return ps__fail(PS_EINVAL, "ps_hardware_gpu_state: out is NULL");
  if (backend >= PS_N_BACKENDS)
    return ps__fail(PS_EINVAL, "backend %u is unknown", backend);
  *out = (ps_gpu_state){.struct_bytes = sizeof *out};
#ifdef PS_CUDA
  if (backend == PS_BACKEND_CUDA)
    ps__cuda_state(device, out);
#else
  (void)device;
#endif
  return PS_OK;
}

uint32_t ps_hardware_n_gpus(void) {
#ifdef PS_CUDA
  return ps__cuda_n_devices();
#else
  (void)ps__fail(PS_EDEVICE, PS__NO_CUDA);
  return 0;
#endif
}

ps_status ps_hardware_gpus_check(uint32_t device, uint32_t n) {
  if (n < 1 || n > PS_MAX_DEVICES)
    return ps__fail(PS_EINVAL, "%u GPUs are asked for: give 1 to %d", n, PS_MAX_DEVICES);
#ifdef PS_CUDA
  return ps__cuda_gpus_check(device, n);
#else
  return ps__fail(PS_EDEVICE, PS__NO_CUDA);
#endif
}

const char *ps_hardware_gpu_unused(void) {
  bool driver = access("/proc/driver/nvidia/version", F_OK) == 0;
#ifdef PS_CUDA
  driver |= ps__cuda_driver_there();
#endif
  return driver && ps_hardware_n_gpus() == 0 ? ps_last_error() : NULL;
}

/* A core of the last ten years does about 50 GFLOP/s in fp32 GEMM; one memory channel for two cores
 * gives about 10 GB/s. */
static void estimate_cpu(ps_hardware *hw) {
  const double t = hw->n_threads;
  hw->gemm_flops_per_s[PS_F32] = 50e9 * t;
  hw->gemm_flops_per_s[PS_BF16] = 40e9 * t;
  hw->attention_flops_per_s[PS_F32] = hw->attention_bwd_flops_per_s[PS_F32] = 25e9 * t;
  hw->attention_flops_per_s[PS_BF16] = hw->attention_bwd_flops_per_s[PS_BF16] = 20e9 * t;
  hw->elementwise_bytes_per_s = 0.7 * hw->memory_bytes_per_s;
  hw->link[PS_LINK_H2D].bytes_per_s = hw->link[PS_LINK_D2H].bytes_per_s =
      hw->link[PS_LINK_H2D].duplex_bytes_per_s = 5e9;
  hw->op_ns = 3000;
}

ps_status ps_hardware_estimate(ps_hardware *out, uint32_t backend, uint32_t device,
                               uint32_t n_threads) {
  if (!out)
    return ps__fail(PS_EINVAL, "ps_hardware_estimate: out is NULL");
  ps_hardware hw;
  PS_TRY(ps__hardware_facts(&hw, backend, device, n_threads));
  hw.memory_bytes_per_s = 10e9 * (1 + hw.n_threads / 2.0);
  hw.optimizer_bytes_per_s = 0.7 * hw.memory_bytes_per_s;
  if (backend == PS_BACKEND_CUDA)
    ps__hardware_estimate_gpu(&hw);
  else
    estimate_cpu(&hw);
  ps__hardware_complete(&hw);
  *out = hw;
  return PS_OK;
}

/* BYTES that the process holds besides arenas, scratch and tables:
 *   what it held before: interpreter, libraries. Read once, so that no plan depends on the plans
 *     before it; rounded up to 8 MiB, so that the next process gets the same answer
 *   4 MiB a compute thread: OpenBLAS's packed panels, 2 of 1024 x 512 x 4. Tiles are at most 1024
 *     by 1024, blocks at most 512 deep, fp32
 *   256 KiB a thread: stack and allocator. Streams: compute and host with n threads, 3 more
 *   8 MiB: loading. A piece of fp32 values (4 MiB), windows of token shards (1 MiB), code and
 *     data of libraries that training touches first (3 MiB)
 *   1 GiB on CUDA: host memory of the driver and its libraries, more of it once kernels are loaded
 * Measured (tests/test_budget.py holds the sum to it): of the 17 to 45 MiB beyond what was held
 * before, 5 to 16 MiB are used with 1 to 8 threads. */
uint64_t ps__host_reserve(const ps_hardware *hw) {
  const uint64_t panels = 2ull * 1024 * 512 * 4, thread = 256 << 10, fixed = 8 << 20,
                 step = 8 << 20;
  const uint64_t driver = hw->backend == PS_BACKEND_CUDA ? 1ull << 30 : 0;
  return (ps__process_bytes() + step - 1) / step * step + driver + hw->n_threads * panels +
         (2ull * hw->n_threads + 3) * thread + fixed;
}
