/* measure_later.c - the rates of FP8 products, of products of experts, of the delta rule and of
 * attention's heads above 256, each measured when a plan first needs them. */
#include "hardware/hardware_impl.h"
#ifdef PS_CUDA
#  include "backends/cuda/probe.h"
#endif

static bool measured_gpu(const ps_hardware *hw) {
  return hw->backend == PS_BACKEND_CUDA && hw->measured != PS_ESTIMATED;
}
/* Compute capability 8.9 is the first with products of FP8. */
bool ps__hardware_lacks_fp8(const ps_hardware *hw) {
  return measured_gpu(hw) && hw->compute_capability >= 89 && !hw->gemm_fp8[0].rows;
}
bool ps__hardware_lacks_experts(const ps_hardware *hw) {
  return measured_gpu(hw) && !hw->gemm_grouped[0].rows;
}

bool ps__hardware_lacks_delta(const ps_hardware *hw) {
  return measured_gpu(hw) && !hw->delta[0].heads;
}
bool ps__hardware_lacks_heads512(const ps_hardware *hw) {
  return measured_gpu(hw) && !(hw->heads512_attention_flops_per_s > 0);
}

#ifdef PS_CUDA
static const double SECONDS = 0.35; /* of a case, about as many as ps_hardware_measure() takes */

typedef struct more {
  const char *what, *time;
  ps_status (*measure)(ps_hardware *hw, double seconds, const ps__host_work *host);
} more;
static const more fp8 = {"FP8 products", "10 s to a minute", ps__cuda_measure_fp8},
                  experts = {"products of experts", "10 s", ps__cuda_measure_grouped},
                  delta = {"delta rule", "10 s", ps__cuda_measure_delta},
                  heads512 = {"attention with heads of 512", "10 s", ps__cuda_measure_heads512};

static ps_status measure(ps_hardware *hw, const ps_hardware_ask *ask, const more *m) {
  ps__host_places at = {.stride = 2ull * PS__COPY_BYTES, .n = 1};
  const uint64_t have = ps__hardware_room(ask->host_mem_bytes),
                 takes = ps_hardware_measure_bytes(hw);
  char need[32], there[32];
  if (have < at.stride) {
    ps__log(PS_LOG_WARN,
            "measuring %s takes %s of host memory, %s are left of what is given or free: their "
            "rates are estimates",
            m->what, ps__format_bytes(need, at.stride), ps__format_bytes(there, have));
    return PS_OK;
  }
  if (!ps__hardware_fits(takes, ask->device_mem_bytes)) {
    ps__log(PS_LOG_WARN,
            "measuring %s takes %s of device memory, %s are given: their rates are estimates; "
            "penstock profile measures them without a cap",
            m->what, ps__format_bytes(need, takes), ps__format_bytes(there, ask->device_mem_bytes));
    return PS_OK;
  }
  ps__hardware_note(ask, PS_HARDWARE_MEASURES, "measuring this GPU's %s once, which takes %s",
                    m->what, m->time);
  PS_TRY(ps__map((void **)&at.first, at.stride, "measuring the machine"));
  ps__cuda_place(hw->device, at.first, at.stride);
  ps_hardware measured = *hw;
  const ps_status st = m->measure(&measured, SECONDS, &(ps__host_work){.places = at});
  ps__unmap(at.first, at.stride);
  if (st == PS_OK)
    *hw = measured;
  return st;
}
#  define MEASURE(hw, ask, more) measure(hw, ask, more)
#else /* says that the build has no CUDA */
#  define MEASURE(hw, ask, more) ((void)(ask), ps_hardware_gpus_check((hw)->device, 1))
#endif

ps_status ps__hardware_fp8(ps_hardware *hw, const ps_hardware_ask *ask) {
  return ps__hardware_lacks_fp8(hw) ? MEASURE(hw, ask, &fp8) : PS_OK;
}
ps_status ps__hardware_experts(ps_hardware *hw, const ps_hardware_ask *ask) {
  return ps__hardware_lacks_experts(hw) ? MEASURE(hw, ask, &experts) : PS_OK;
}
ps_status ps__hardware_delta(ps_hardware *hw, const ps_hardware_ask *ask) {
  return ps__hardware_lacks_delta(hw) ? MEASURE(hw, ask, &delta) : PS_OK;
}
ps_status ps__hardware_heads512(ps_hardware *hw, const ps_hardware_ask *ask) {
  return ps__hardware_lacks_heads512(hw) ? MEASURE(hw, ask, &heads512) : PS_OK;
}
