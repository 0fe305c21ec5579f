/* complete.c - the rates that may be missing, from those that may not. */
#include "hardware/hardware_impl.h"

void ps__hardware_complete(ps_hardware *hw) {
  const double memory = hw->memory_bytes_per_s / 4;
  if (hw->backend == PS_BACKEND_CPU && !(hw->peak_flops_per_s > 0))
    hw->peak_flops_per_s = hw->gemm_flops_per_s[PS_F32];
  if (!(hw->gemm_fp8_flops_per_s > 0)) /* of an H200's 1.73 to 1.84 times bf16's, by the sums */
    hw->gemm_fp8_flops_per_s =
        (hw->backend == PS_BACKEND_CPU ? 1 : 1.75) * hw->gemm_flops_per_s[PS_BF16];
  if (!(hw->optimizer_weights_bytes_per_s > 0))
    hw->optimizer_weights_bytes_per_s = hw->optimizer_bytes_per_s;
  if (!(hw->optimizer_state_bytes_per_s > 0))
    hw->optimizer_state_bytes_per_s = hw->optimizer_bytes_per_s;
  if (!(hw->accumulate_bytes_per_s > 0))
    hw->accumulate_bytes_per_s = hw->optimizer_bytes_per_s;
  if (!(hw->accumulate_sumsq_bytes_per_s > 0))
    hw->accumulate_sumsq_bytes_per_s = hw->accumulate_bytes_per_s;
  if (!(hw->sumsq_bytes_per_s > 0))
    hw->sumsq_bytes_per_s = hw->optimizer_bytes_per_s;
  /* one thread moves a core's part, but no more than a core keeps in flight */
  if (!(hw->gather_bytes_per_s > 0))
    hw->gather_bytes_per_s = memory < 16e9 ? memory : 16e9;
  if (hw->backend == PS_BACKEND_CPU && !(hw->peer_bytes_per_s > 0)) /* its devices are arenas */
    hw->peer_bytes_per_s = hw->h2d_bytes_per_s;
}
