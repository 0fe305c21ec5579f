/* hardware_impl.h - what the files behind penstock/hardware.h share. */
#ifndef PS_PLAN_HARDWARE_IMPL_H
#define PS_PLAN_HARDWARE_IMPL_H
#include "../core/core.h"
#include <penstock/hardware.h>

/* ps__hardware_facts() - *hw cleared, then what the system and the driver report. Errors: PS_EINVAL, PS_EDEVICE. */
ps_status ps__hardware_facts(ps_hardware *hw, uint32_t backend, uint32_t device, uint32_t n_threads);

/* ps__hardware_complete() - fills what may be absent from the rates that may not (penstock/hardware.h). */
void ps__hardware_complete(ps_hardware *hw);
#endif
