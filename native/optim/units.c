/* units.c - the update of a unit on each backend. */
#include "kernels/ops.h"
#include "optim/update_impl.h"
#ifdef PS_CUDA
#  include "optim/cuda_update.h"
#endif

const ps__update_unit_fn ps__update_unit[PS_N_BACKENDS] = {
    [PS_BACKEND_CPU] = ps__cpu_update_unit, [PS_BACKEND_CUDA] = PS_CUDA_FN(update_unit)};
