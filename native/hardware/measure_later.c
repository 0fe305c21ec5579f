/* measure_later.c - the rates of FP8 products, of products of experts, of the delta rule and of
 * attention's heads above 256, each measured when a plan first needs them. */
#include "hardware/hardware_impl.h"

bool ps__hardware_lacks(const ps_hardware *hw, ps__extra extra) {
  if (hw->backend != PS_BACKEND_CUDA || hw->measured == PS_ESTIMATED)
    return false;
  switch (extra) {
  /* Compute capability 8.9 is the first with products of FP8. */
  case PS__EXTRA_FP8: return hw->compute_capability >= 89 && !hw->gemm_fp8[0].rows;
  case PS__EXTRA_EXPERTS: return !hw->gemm_grouped[0].rows;
  case PS__EXTRA_DELTA: return !hw->delta[0].heads;
  default: return !(hw->heads512_attention_flops_per_s > 0);
  }
}

#ifdef PS_CUDA
static const double SECONDS = 0.35; /* of a case, about as many as ps_hardware_measure() takes */

static const struct {
  const char *rates, *time;
} extras[] = {
    [PS__EXTRA_FP8] = {"FP8 products", "10 s to a minute"},
    [PS__EXTRA_EXPERTS] = {"products of experts", "10 s"},
    [PS__EXTRA_DELTA] = {"delta rule", "10 s"},
    [PS__EXTRA_HEADS512] = {"attention with heads of 512", "10 s"},
};

static ps_status measure(ps_hardware *hw, const ps_hardware_ask *ask, ps__extra extra) {
  const char *rates = extras[extra].rates;
  ps__host_places at = {.stride = 2ull * PS__COPY_BYTES, .n = 1};
  const uint64_t have = ps__hardware_room(ask->host_mem_bytes),
                 takes = ps_hardware_measure_bytes(hw);
  char need[32], there[32];
  if (have < at.stride) {
    ps__log(PS_LOG_WARN,
            "measuring %s takes %s of host memory, %s are left of what is given or free: their "
            "rates are estimates",
            rates, ps__format_bytes(need, at.stride), ps__format_bytes(there, have));
    return PS_OK;
  }
  if (!ps__hardware_fits(takes, ask->device_mem_bytes)) {
    ps__log(PS_LOG_WARN,
            "measuring %s takes %s of device memory, %s are given: their rates are estimates; "
            "penstock profile measures them without a cap",
            rates, ps__format_bytes(need, takes), ps__format_bytes(there, ask->device_mem_bytes));
    return PS_OK;
  }
  ps__hardware_note(ask, PS_HARDWARE_MEASURES, "measuring this GPU's %s once, which takes %s",
                    rates, extras[extra].time);
  PS_TRY(ps__map((void **)&at.first, at.stride, "measuring the machine"));
  ps__cuda_place(hw->device, at.first, at.stride);
  ps_hardware measured = *hw;
  const ps_status st =
      ps__cuda_measure_extra(&measured, extra, SECONDS, &(ps__host_work){.places = at});
  ps__unmap(at.first, at.stride);
  if (st == PS_OK)
    *hw = measured;
  return st;
}
#else
static ps_status measure(ps_hardware *hw, const ps_hardware_ask *ask, ps__extra extra) {
  (void)ask, (void)extra;
  return ps_hardware_gpus_check(hw->device, 1); /* says that the build has no CUDA */
}
#endif

ps_status ps__hardware_extra(ps_hardware *hw, const ps_hardware_ask *ask, ps__extra extra) {
  return ps__hardware_lacks(hw, extra) ? measure(hw, ask, extra) : PS_OK;
}
