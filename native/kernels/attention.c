/* attention.c - what the arguments of attention's ops mean and may be, on every backend. */
#include "kernels/ops.h"
#include "core/core.h"
#include <math.h>

float ps__attention_scale(const ps__args_attention *a) {
  return a->scale != 0.0f ? a->scale : (float)(1.0 / sqrt(a->head_dim));
}

ps_status ps__check_attention(const ps__args_attention *a, const char *op) {
  if (!(a->scale >= 0.0f && a->scale < INFINITY))
    return ps__fail(PS_EINVAL, "%s: scale is %g: it must be positive and finite, or 0", op,
                    (double)a->scale);
  if (!(a->softcap >= 0.0f && a->softcap < INFINITY))
    return ps__fail(PS_EINVAL, "%s: softcap is %g: it must be positive and finite, or 0 for none",
                    op, (double)a->softcap);
  return PS_OK;
}
