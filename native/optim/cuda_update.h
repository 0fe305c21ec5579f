/* cuda_update.h - the update of a unit in device memory: what optim.h says, bit for bit, on a
 * CUDA stream. */
#ifndef PS_OPTIM_CUDA_UPDATE_H
#define PS_OPTIM_CUDA_UPDATE_H
#include "kernels/cuda/cuda_exec.h"
#include "optim/optim.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A ps__update_unit_fn: fastest with arrays aligned to 16 bytes, segments that begin at
 * multiples of 8 elements, and unit_element0 a multiple of 4; with state in 8 bits they begin with
 * blocks. @gate must have a step. */
ps_status ps__cuda_update_unit(void *exec, const ps__update *u, const ps__segment *segments,
                               uint32_t n_segments, const ps__arrays *a, uint64_t unit_element0,
                               const ps__update_gate *gate);

#ifdef __cplusplus
}
#endif
#endif
