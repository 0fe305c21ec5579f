/* peers.c - the rates of several GPUs together, measured when a plan first needs them. */
#include "hardware/hardware_impl.h"
#ifdef PS_CUDA
#  include "backends/cuda/probe.h"
#endif

#ifdef PS_CUDA
/* Whether measuring several GPUs at once may take what it takes of each. */
static bool gpus_fit(const ps_hardware *hw, uint32_t n, uint64_t device_mem_bytes) {
  const uint64_t takes = ps_hardware_measure_bytes(hw) + 2ull * PS__COPY_BYTES;
  char need[32], given[32];
  if (ps__hardware_fits(takes, device_mem_bytes))
    return true;
  ps__log(PS_LOG_WARN,
          "measuring %u GPUs at once takes %s of device memory on each, %s are given: plans take "
          "what is known of one GPU; a larger %s lets them be measured",
          n, ps__format_bytes(need, takes), ps__format_bytes(given, device_mem_bytes),
          ps__field("device_mem_bytes"));
  return false;
}
#endif

ps_status ps__hardware_peers(ps_hardware *hw, const ps_hardware_ask *ask) {
  const uint32_t n = ask->n_devices;
  if (n <= 1 || hw->backend == PS_BACKEND_CPU)
    return PS_OK;
  PS_TRY(ps_hardware_gpus_check(hw->device, n));
#ifdef PS_CUDA
  bool access;
  double rate = hw->link[PS_LINK_PEER].bytes_per_s;
  PS_TRY(ps__cuda_peers(hw->device, n, &access));
  if (access && !(rate > 0))
    PS_TRY(ps__cuda_peer_rate(hw->device, n, &rate));
  if ((hw->n_gpus != n || !(hw->gpus_compute_speed > 0)) && gpus_fit(hw, n, ask->device_mem_bytes))
    PS_TRY(ps__hardware_measure_gpus(hw, ask));
  hw->link[PS_LINK_PEER].bytes_per_s = access ? rate : 0;
#endif
  return PS_OK;
}
