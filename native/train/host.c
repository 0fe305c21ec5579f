/* host.c - the arrays in host memory: where they are, and whether the weights are finite. */
#include "train/trainer.h"

enum { PIECE = 1024 }; /* elements */

static uint64_t piece_of(uint64_t n, uint64_t at) { return n - at < PIECE ? n - at : PIECE; }

/* Of a quantized unit: as ops read them, in the recipe's dtype. */
static void get_blocks(const ps_trainer *t, uint32_t unit, uint64_t first, uint64_t n,
                       ps_dtype dtype, void *dst) {
  const ps__storage as = ps__array_storage(t, unit, PS__ARRAY_WEIGHTS);
  char plain[PIECE * sizeof(float)];
  float x[PIECE];
  for (uint64_t i = 0; i < n; i += PIECE) {
    const uint64_t m = piece_of(n, i);
    ps__blocks_dequantize(x, as, ps__array_at(t, unit, PS__ARRAY_WEIGHTS, first + i), m);
    ps__convert(plain, t->plan->model->dt, x, PS_F32, m);
    ps__convert((char *)dst + i * ps_dtype_bytes(dtype), dtype, plain, t->plan->model->dt, m);
  }
}

/* What is quantized was rounded to the recipe's dtype before. */
static void put_blocks(const ps_trainer *t, uint32_t unit, uint64_t first, uint64_t n,
                       ps_dtype dtype, const void *src) {
  const ps__storage as = ps__array_storage(t, unit, PS__ARRAY_WEIGHTS);
  char plain[PIECE * sizeof(float)];
  float x[PIECE];
  for (uint64_t i = 0; i < n; i += PIECE) {
    const uint64_t m = piece_of(n, i);
    ps__convert(plain, t->plan->model->dt, (const char *)src + i * ps_dtype_bytes(dtype), dtype, m);
    ps__convert(x, PS_F32, plain, t->plan->model->dt, m);
    ps__blocks_quantize(ps__array_at(t, unit, PS__ARRAY_WEIGHTS, first + i), as, x, m);
  }
}

void ps__updated_get(const ps_trainer *t, uint32_t unit, uint64_t first, uint64_t n, ps_dtype dtype,
                     void *dst) {
  const ps_dtype own = ps__array_dtype(t, unit, PS__ARRAY_UPDATED);
  const char *const updated = ps__array_at(t, unit, PS__ARRAY_UPDATED, first),
                    *const weights = ps__array_at(t, unit, PS__ARRAY_WEIGHTS, first);
  float x[PIECE];
  if (t->plan->model->unit[unit].base) {
    get_blocks(t, unit, first, n, dtype, dst);
    return;
  }
  if ((uint32_t)own != PS__I8)
    ps__convert(dst, dtype, updated, own, n);
  for (uint64_t i = 0; (uint32_t)own == PS__I8 && i < n; i += PIECE) {
    const uint64_t m = piece_of(n, i);
    ps__master_merge(x, weights + 2 * i, updated + i, m);
    ps__convert((char *)dst + i * ps_dtype_bytes(dtype), dtype, x, PS_F32, m);
  }
}

void ps__updated_put(const ps_trainer *t, uint32_t unit, uint64_t first, uint64_t n, ps_dtype dtype,
                     const void *src) {
  const ps_dtype own = ps__array_dtype(t, unit, PS__ARRAY_UPDATED);
  char *const updated = ps__array_at(t, unit, PS__ARRAY_UPDATED, first), *const weights =
                                                                             ps__array_at(
                                                                                 t, unit,
                                                                                 PS__ARRAY_WEIGHTS,
                                                                                 first);
  float x[PIECE];
  if (t->plan->model->unit[unit].base) {
    put_blocks(t, unit, first, n, dtype, src);
    return;
  }
  if ((uint32_t)own != PS__I8)
    ps__convert(updated, own, src, dtype, n);
  if ((uint32_t)own != PS__I8 && weights != updated)
    ps__convert(weights, ps__array_dtype(t, unit, PS__ARRAY_WEIGHTS), updated, own, n);
  for (uint64_t i = 0; (uint32_t)own == PS__I8 && i < n; i += PIECE) {
    const uint64_t m = piece_of(n, i);
    ps__convert(x, PS_F32, (const char *)src + i * ps_dtype_bytes(dtype), dtype, m);
    ps__master_split(weights + 2 * i, updated + i, x, m);
  }
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
static bool all_finite(const ps_trainer *t, const ps_param_info *p) {
  union {
    float f[PIECE];
    uint32_t bits[PIECE];
  } piece;
  bool ok = true;
  for (uint64_t i = 0; ok && i < p->n; i += PIECE) {
    const uint64_t m = piece_of(p->n, i);
    ps__updated_get(t, p->unit, p->offset + i, m, PS_F32, piece.f);
    for (uint64_t j = 0; j < m; j++)
      ok &= (piece.bits[j] & 0x7f800000u) != 0x7f800000u;
  }
  return ok;
}

bool ps__trainer_find_nonfinite(const ps_trainer *t, ps_param_info *out) {
  for (uint32_t i = 0; i < t->plan->model->n_params; i++) {
    *out = t->plan->model->param[i];
    if (!all_finite(t, out))
      return true;
  }
  return false;
}
