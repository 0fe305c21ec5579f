/* cuda_adamw.h - AdamW over a unit in device memory: what optim.h says, bit for bit, on a CUDA
 * stream. */
#ifndef PS_OPTIM_CUDA_ADAMW_H
#define PS_OPTIM_CUDA_ADAMW_H
#include "kernels/cuda/cuda_exec.h"
#include "optim/optim.h"
#ifdef __cplusplus
extern "C" {
#endif

/* What an update looks at before it touches anything, in device memory, when it runs: after a
 * failure on the host the work that was submitted still runs, on stale data (engine/backend.h),
 * and must leave the weights of the last complete step. */
typedef struct ps__cuda_gate {
  /* nothing is done unless *step == expected: the host lets steps pass by number */
  const uint64_t *step;
  uint64_t expected;
  /* the gradient's scale, instead of ps__adamw_scalars.grad_scale; NULL: that one */
  const float *scale;
  /* nothing is done unless these n_sumsq (at most 32) are finite; NULL: not looked at */
  const double *sumsq;
  uint32_t n_sumsq;
} ps__cuda_gate;

/* ps__cuda_adamw_unit() - queue ps__adamw_unit() over device memory on exec->stream: the same
 * bits for every input. w, m, v, grad and w_bf16 (fp32-master only) are the unit's arrays,
 * aligned to their elements (fastest: to 16 bytes, segments beginning at multiples of 8
 * elements, unit_element0 a multiple of 4); they must not overlap. Segments, @s and @gate are
 * borrowed for the call, what
 * @gate points to until the update has run. Blocks: no. Allocates nothing. Errors: PS_EINVAL;
 * PS_EDEVICE the launch was refused. */
ps_status ps__cuda_adamw_unit(const ps__cuda_exec *exec, ps_recipe recipe,
                              const ps__adamw_segment *segments, uint32_t n_segments, void *w,
                              uint16_t *w_bf16, const void *grad, void *m, void *v,
                              uint64_t unit_element0, const ps__adamw_scalars *s,
                              const ps__cuda_gate *gate);

#ifdef __cplusplus
}
#endif
#endif
