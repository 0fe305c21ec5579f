/* complete.c - the rates that may be missing, from those that may not; and all of the host's. */
#include "hardware/hardware_impl.h"

static const ps_link_rate ends[PS_N_LINKS] = {
    [PS_LINK_H2D] = {.from = PS_PLACE_HOST, .to = PS_PLACE_DEVICE},
    [PS_LINK_D2H] = {.from = PS_PLACE_DEVICE, .to = PS_PLACE_HOST},
    [PS_LINK_PEER] = {.from = PS_PLACE_DEVICE, .to = PS_PLACE_DEVICE},
    [PS_LINK_NETWORK] = {.from = PS_PLACE_HOST, .to = PS_PLACE_HOST},
    [PS_LINK_DISK_READ] = {.from = PS_PLACE_DISK, .to = PS_PLACE_HOST},
    [PS_LINK_DISK_WRITE] = {.from = PS_PLACE_HOST, .to = PS_PLACE_DISK},
};

void ps__hardware_complete(ps_hardware *hw) {
  ps_link_rate *link = hw->link;
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
  for (int i = 0; i < PS_N_LINKS; i++) {
    link[i].from = ends[i].from;
    link[i].to = ends[i].to;
  }
  link[PS_LINK_D2H].duplex_bytes_per_s = link[PS_LINK_H2D].duplex_bytes_per_s;
  if (hw->backend == PS_BACKEND_CPU && !(link[PS_LINK_PEER].bytes_per_s > 0))
    link[PS_LINK_PEER].bytes_per_s = link[PS_LINK_H2D].bytes_per_s; /* its devices are arenas */
}

void ps__hardware_slow_host(ps_hardware *hw, double by) {
  double *const rate[] = {&hw->optimizer_bytes_per_s,        &hw->optimizer_weights_bytes_per_s,
                          &hw->optimizer_state_bytes_per_s,  &hw->accumulate_bytes_per_s,
                          &hw->accumulate_sumsq_bytes_per_s, &hw->sumsq_bytes_per_s,
                          &hw->gather_bytes_per_s,           &hw->memory_bytes_per_s};
  for (size_t i = 0; i < sizeof rate / sizeof *rate; i++)
    *rate[i] *= by;
  for (int i = PS_LINK_H2D; i <= PS_LINK_D2H; i++) {
    hw->link[i].bytes_per_s *= by;
    hw->link[i].duplex_bytes_per_s *= by;
  }
  for (int i = 0; i < 2 * PS_MAX_CONTENTION_RATES; i++) {
    ps_contention_rate *r = i < PS_MAX_CONTENTION_RATES
                                ? &hw->contention[i]
                                : &hw->gpus_contention[i - PS_MAX_CONTENTION_RATES];
    r->h2d_bytes_per_s *= by;
    r->d2h_bytes_per_s *= by;
    r->host_bytes_per_s *= by;
  }
}
