/* host.c - the arrays in host memory: where they are, and whether the weights are finite. */
#include "train/trainer.h"

void ps__trainer_refresh_copy(const ps_trainer *t, const ps_param_info *p) {
  void *updated = ps__array_at(t, p->unit, PS__ARRAY_UPDATED, p->offset),
       *weights = ps__array_at(t, p->unit, PS__ARRAY_WEIGHTS, p->offset);
  if (weights != updated)
    ps__convert(weights, ps__array_dtype(t, p->unit, PS__ARRAY_WEIGHTS), updated,
                ps__array_dtype(t, p->unit, PS__ARRAY_UPDATED), p->n);
}

ps__arrays ps__arrays_on_host(const ps_trainer *t, uint32_t unit) {
  const ps__unit_host *h = &t->plan->step.unit_host[unit];
  ps__arrays a = {.w = ps__array_at(t, unit, PS__ARRAY_UPDATED, 0),
                  .copy =
                      h->master != PS__NO_VT ? ps__array_at(t, unit, PS__ARRAY_WEIGHTS, 0) : NULL,
                  .grad = ps__array_at(t, unit, PS__ARRAY_GRAD, 0)};
  for (uint32_t k = 0; k < ps__optimizers[t->plan->spec.optimizer].n_states; k++)
    a.state[k] = ps__array_at(t, unit, PS__ARRAY_STATE + k, 0);
  return a;
}

/* A float whose exponent bits are all set is not finite. */
static bool all_finite(const char *values, uint64_t n, ps_dtype dtype) {
  union {
    float f[1024];
    uint32_t bits[1024];
  } piece;
  bool ok = true;
  for (uint64_t i = 0; ok && i < n; i += 1024) {
    const uint64_t m = n - i < 1024 ? n - i : 1024;
    ps__convert(piece.f, PS_F32, values + i * ps_dtype_bytes(dtype), dtype, m);
    for (uint64_t j = 0; j < m; j++)
      ok &= (piece.bits[j] & 0x7f800000u) != 0x7f800000u;
  }
  return ok;
}

bool ps__trainer_find_nonfinite(const ps_trainer *t, ps_param_info *out) {
  for (uint32_t i = 0; i < t->plan->model->n_params; i++) {
    *out = t->plan->model->param[i];
    if (!all_finite(ps__array_at(t, out->unit, PS__ARRAY_UPDATED, out->offset), out->n,
                    ps__array_dtype(t, out->unit, PS__ARRAY_UPDATED)))
      return true;
  }
  return false;
}
