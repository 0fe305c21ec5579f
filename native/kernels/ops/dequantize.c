/* dequantize.c - the row of what dequantizes a frozen base. */
#include "core/blocks.h"
#include "kernels/ops/row.h"

static ps_status check_dequantize(const void *args, const char *op) {
  const ps__args_dequantize *a = args;
  PS_TRY(ps__check_dt(a->dt, op));
  if (a->base == PS_BASE_PLAIN || a->base >= PS_N_BASES)
    return ps__fail(PS_EINVAL, "%s: base is %u: neither fp8 nor nf4 nor mxfp4", op, a->base);
  return a->n % PS__SPAN_ALIGN == 0 ? PS_OK
                                    : ps__fail(PS_EINVAL, "%s: n is %llu, no multiple of %d", op,
                                               (unsigned long long)a->n, PS__SPAN_ALIGN);
}
static ps_work work_dequantize(const void *args) {
  const ps__args_dequantize *a = args;
  return ps__bytes_work((double)a->n * (ps__stored_each(ps__base_storage(a->base, a->dt)) +
                                        (double)ps__dt_bytes(a->dt)));
}
PS__OP(dequantize, PS_CLASS_ELEMENTWISE, check_dequantize, .rate = PS__RATE_MEMORY,
       .work = work_dequantize);
