/* measure_fp8.c - the rates of FP8 products, measured when a plan first needs them. */
#include "hardware/hardware_impl.h"
#ifdef PS_CUDA
#  include "backends/cuda/probe.h"
#endif

/* Compute capability 8.9 is the first with products of FP8. */
bool ps__hardware_lacks_fp8(const ps_hardware *hw) {
  return hw->backend == PS_BACKEND_CUDA && hw->compute_capability >= 89 &&
         hw->measured != PS_ESTIMATED && !hw->gemm_fp8[0].rows;
}

#ifdef PS_CUDA
static const double SECONDS = 0.35; /* of a case, about as many as ps_hardware_measure() takes */

static ps_status measure(ps_hardware *hw, const ps_hardware_ask *ask) {
  ps__host_places at = {.stride = 2ull * PS__COPY_BYTES, .n = 1};
  const uint64_t have = ps__hardware_room(ask->host_mem_bytes),
                 takes = ps_hardware_measure_bytes(hw);
  char need[32], there[32];
  if (have < at.stride) {
    ps__log(PS_LOG_WARN,
            "measuring FP8 products takes %s of host memory, %s are left of what is given or free: "
            "their rates are estimates",
            ps__format_bytes(need, at.stride), ps__format_bytes(there, have));
    return PS_OK;
  }
  if (!ps__hardware_fits(takes, ask->device_mem_bytes)) {
    ps__log(PS_LOG_WARN,
            "measuring FP8 products takes %s of device memory, %s are given: their rates are "
            "estimates; penstock profile measures them without a cap",
            ps__format_bytes(need, takes), ps__format_bytes(there, ask->device_mem_bytes));
    return PS_OK;
  }
  ps__hardware_note(ask, PS_HARDWARE_MEASURES,
                    "measuring this GPU's FP8 products once, which takes 10 s to a minute");
  PS_TRY(ps__map((void **)&at.first, at.stride, "measuring the machine"));
  ps__cuda_place(hw->device, at.first, at.stride);
  const ps_status st = ps__cuda_measure_fp8(hw, SECONDS, &(ps__host_work){.places = at});
  ps__unmap(at.first, at.stride);
  return st;
}
#endif

ps_status ps__hardware_fp8(ps_hardware *hw, const ps_hardware_ask *ask) {
  if (!ps__hardware_lacks_fp8(hw))
    return PS_OK;
#ifdef PS_CUDA
  ps_hardware measured = *hw;
  PS_TRY(measure(&measured, ask));
  *hw = measured;
  return PS_OK;
#else
  (void)ask;
  return ps_hardware_gpus_check(hw->device, 1); /* says that the build has no CUDA */
#endif
}
