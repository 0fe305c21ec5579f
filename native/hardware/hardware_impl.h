/* hardware_impl.h - what the files of native/hardware share. */
#ifndef PS_HARDWARE_IMPL_H
#define PS_HARDWARE_IMPL_H
#include "core/core.h"
#include <penstock/hardware.h>

/* ps__hardware_facts() - clear *hw, then fill in what the system and the driver report. Errors:
 * PS_EINVAL, PS_EDEVICE. */
ps_status ps__hardware_facts(ps_hardware *hw, uint32_t backend, uint32_t device,
                             uint32_t n_threads);

/* Threads of the io stream. It gathers the embedding's rows beside host ops on @n_threads, for some
 * milliseconds a round; a step's first forward pass waits for them. */
static inline uint32_t ps__io_threads(uint32_t n_threads) {
  return n_threads < 8 ? 1 : n_threads / 2;
}

/* ps__hardware_complete() - fill the rates that may be missing from those that may not
 * (penstock/hardware.h). */
void ps__hardware_complete(ps_hardware *hw);
#endif
