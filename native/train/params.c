/* params.c - the host-resident parameters: loads, reads and writes them, and finds broken ones. */
#include "train/trainer.h"
#include <string.h>

enum { PIECE = 1 << 24 }; /* elements read at a time */

ps_dtype ps__master_dtype(const ps_trainer *t, uint32_t unit) {
  const ps__recipe *r = t->plan->step.recipe;
  return t->plan->model->unit[unit].frozen ? r->weights : r->updated;
}

void *ps__master_at(const ps_trainer *t, uint32_t unit, uint64_t offset) {
  const ps__unit_host *h = &t->plan->step.unit_host[unit];
  return (char *)ps__host_at(t, h->master != PS__NO_VT ? h->master : h->weights) +
         offset * ps_dtype_bytes(ps__master_dtype(t, unit));
}

void ps__trainer_refresh_copy(const ps_trainer *t, const ps_param_info *p) {
  const ps__unit_host *h = &t->plan->step.unit_host[p->unit];
  if (h->master == PS__NO_VT)
    return;
  const ps__recipe *r = t->plan->step.recipe;
  ps__convert((char *)ps__host_at(t, h->weights) + p->offset * ps_dtype_bytes(r->weights),
              r->weights, ps__master_at(t, p->unit, p->offset), r->updated, p->n);
}

static ps_status check_param(const ps_trainer *t, uint32_t param, uint64_t n, const void *data,
                             ps_param_info *p) {
  if (!t || !data)
    return ps__fail(PS_EINVAL, "trainer and data must be given");
  PS_TRY(ps_model_param(t->plan->model, param, p));
  if (n != p->n)
    return ps__fail(PS_EINVAL, "%s has %llu elements, %llu given", p->name,
                    (unsigned long long)p->n, (unsigned long long)n);
  return PS_OK;
}

ps_status ps_trainer_read_param(ps_trainer *t, uint32_t param, float *dst, uint64_t n) {
  ps_param_info p;
  PS_TRY(check_param(t, param, n, dst, &p));
  PS_TRY(ps__trainer_idle(t));
  ps__convert(dst, PS_F32, ps__master_at(t, p.unit, p.offset), ps__master_dtype(t, p.unit), n);
  return PS_OK;
}

ps_status ps_trainer_write_param(ps_trainer *t, uint32_t param, const float *src, uint64_t n) {
  ps_param_info p;
  PS_TRY(check_param(t, param, n, src, &p));
  PS_TRY(ps__trainer_idle(t));
  if (t->n_submitted && ps__weights_stay(&t->plan->spec, p.unit))
    return ps__fail(PS_ESTATE, "%s is device-resident: write it before the first step is submitted",
                    p.name);
  ps__convert(ps__master_at(t, p.unit, p.offset), ps__master_dtype(t, p.unit), src, PS_F32, n);
  ps__trainer_refresh_copy(t, &p);
  return PS_OK;
}

ps_status ps_trainer_read_grad(ps_trainer *t, uint32_t param, float *dst, uint64_t n) {
  ps_param_info p;
  PS_TRY(check_param(t, param, n, dst, &p));
  PS_TRY(ps__trainer_idle(t));
  if (t->plan->model->unit[p.unit].frozen)
    return ps__fail(PS_ESTATE, "%s is frozen: it has no gradient", p.name);
  if (ps__updated_on_device(&t->plan->spec, p.unit) && !t->plan->spec.keep_grads)
    return ps__fail(
        PS_ESTATE,
        "the gradient of %s stays on the device: make the plan with keep_grads to read it", p.name);
  const char *grad = ps__host_at(t, t->plan->step.unit_host[p.unit].grad);
  const ps_dtype dtype = t->plan->step.recipe->grad;
  ps__convert(dst, PS_F32, grad + p.offset * ps_dtype_bytes(dtype), dtype, n);
  return PS_OK;
}

/* ---- loading --------------------------------------------------------------------------------- */

static ps_status check_tensor(const char *dir, const ps_tensor_info *info, const ps_param_info *p) {
  const bool ok = info->n_dims == p->n_dims && info->shape[0] == p->shape[0] &&
                  (p->n_dims < 2 || info->shape[1] == p->shape[1]);
  if (ok)
    return PS_OK;
  return ps__fail(
      PS_EFORMAT,
      "%s: tensor %s has %u dimensions beginning [%llu, %llu], config.json asks for [%llu%s%.0llu]",
      dir, p->name, info->n_dims, (unsigned long long)(info->n_dims ? info->shape[0] : 0),
      (unsigned long long)(info->n_dims > 1 ? info->shape[1] : 1), (unsigned long long)p->shape[0],
      p->n_dims > 1 ? ", " : "", (unsigned long long)(p->n_dims > 1 ? p->shape[1] : 0));
}

static ps_status load_param(ps_trainer *t, ps_tensor_file *f, const ps_param_info *p) {
  const ps_dtype dtype = ps__master_dtype(t, p->unit);
  const uint64_t idx = ps_tensors_find(f, p->name);
  char *dst = ps__master_at(t, p->unit, p->offset);
  for (uint64_t first = 0; first < p->n; first += PIECE) {
    const uint64_t n = p->n - first < PIECE ? p->n - first : PIECE;
    PS_TRY(ps_tensors_read(f, idx, first, n, dtype, dst + first * ps_dtype_bytes(dtype)));
  }
  ps__trainer_refresh_copy(t, p);
  return PS_OK;
}

/* A tensor that the model does not know is refused: without it the math would be another model's.
 * Two kinds are passed over: rotary tables of old files, which are derived, and a tied head. */
static ps_status check_unknown(const ps_trainer *t, const ps_tensor_file *f, const char *dir) {
  const ps_model *m = t->plan->model;
  for (uint64_t i = 0; i < ps_tensors_count(f); i++) {
    ps_tensor_info info;
    PS_TRY(ps_tensors_info(f, i, &info));
    if (ps_model_find(m, info.name) == UINT32_MAX && !strstr(info.name, "rotary_emb.inv_freq") &&
        !(m->cfg.tied_embeddings && strcmp(info.name, "lm_head.weight") == 0))
      return ps__fail(PS_EFORMAT,
                      "%s: tensor %s is not part of the model that config.json describes", dir,
                      info.name);
  }
  return PS_OK;
}

static ps_status check_known(const ps_trainer *t, const ps_tensor_file *f, const char *dir,
                             bool frozen) {
  for (uint32_t i = 0; i < t->plan->model->n_params; i++) {
    const ps_param_info *p = &t->plan->model->param[i];
    ps_tensor_info info;
    const uint64_t idx = ps_tensors_find(f, p->name);
    if (idx == UINT64_MAX && !frozen && t->plan->model->unit[p->unit].frozen)
      continue;
    if (idx == UINT64_MAX)
      return ps__fail(PS_EFORMAT, "%s: tensor %s is missing from its safetensors", dir, p->name);
    PS_TRY(ps_tensors_info(f, idx, &info));
    PS_TRY(check_tensor(dir, &info, p));
  }
  return PS_OK;
}

ps_status ps__trainer_check_tensors(const ps_trainer *t, const ps_tensor_file *f, const char *dir,
                                    bool frozen) {
  PS_TRY(check_unknown(t, f, dir));
  return check_known(t, f, dir, frozen);
}

ps_status ps__trainer_open_weights(const ps_trainer *t, const char *dir, ps_tensor_file **out) {
  PS_TRY(ps_tensors_open(out, dir));
  const ps_status st = ps__trainer_check_tensors(t, *out, dir, true);
  if (st != PS_OK)
    ps_tensors_close(*out);
  return st;
}

ps_status ps__trainer_load(ps_trainer *t, ps_tensor_file *f, ps_progress_fn progress,
                           void *progress_user) {
  const ps_model *m = t->plan->model;
  uint64_t total = 0;
  for (uint32_t i = 0; i < m->n_params; i++)
    total += m->param[i].n * ps_dtype_bytes(ps__master_dtype(t, m->param[i].unit));
  uint64_t done = 0;
  for (uint32_t i = 0; i < m->n_params; i++) {
    PS_TRY(load_param(t, f, &m->param[i]));
    done += m->param[i].n * ps_dtype_bytes(ps__master_dtype(t, m->param[i].unit));
    if (progress)
      progress(progress_user, "loading weights", done, total);
  }
  return PS_OK;
}

/* ---- looking for what is not finite ---------------------------------------------------------- */

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
    if (!all_finite(ps__master_at(t, out->unit, out->offset), out->n,
                    ps__master_dtype(t, out->unit)))
      return true;
  }
  return false;
}
