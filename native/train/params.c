/* params.c - the host-resident parameters: loads, reads and writes them. */
#include "io/io.h"
#include "model/adapter.h"
#include "train/trainer.h"
#include <string.h>

enum { PIECE = 1 << 24, SPLIT = 1 << 16 }; /* elements read at a time */

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
  ps__updated_get(t, p.unit, p.offset, n, PS_F32, dst);
  return PS_OK;
}

ps_status ps_trainer_write_param(ps_trainer *t, uint32_t param, const float *src, uint64_t n) {
  ps_param_info p;
  PS_TRY(check_param(t, param, n, src, &p));
  PS_TRY(ps__trainer_idle(t));
  if (t->writing)
    return ps__fail(PS_ESTATE, "%s is part of a checkpoint that is being written: end that first",
                    p.name);
  if (t->run && ps__weights_stay(&t->plan->spec, p.unit))
    return ps__fail(PS_ESTATE,
                    "%s is device-resident: write it before the first step is submitted, and "
                    "before the first validation",
                    p.name);
  t->base_hash[0] = 0;
  if (!t->plan->model->unit[p.unit].adapter)
    t->base_mark[0] = 0;
  ps__updated_put(t, p.unit, p.offset, n, PS_F32, src);
  return PS_OK;
}

ps_status ps_trainer_read_grad(ps_trainer *t, uint32_t param, float *dst, uint64_t n) {
  ps_param_info p;
  PS_TRY(check_param(t, param, n, dst, &p));
  PS_TRY(ps__trainer_idle(t));
  if (t->plan->model->unit[p.unit].frozen)
    return ps__fail(PS_ESTATE, "%s is frozen: it has no gradient", p.name);
  if (t->n_switches && t->n_reported == t->switched_at && !t->plan->spec.keep_grads)
    return ps__fail(PS_ESTATE,
                    "the plan changed after the last step, whose gradients are gone: read them "
                    "after the next step, or make the plan with keep_grads");
  if (ps__total_on_device(&t->plan->spec, p.unit) && !t->plan->spec.keep_grads)
    return ps__fail(
        PS_ESTATE,
        "the gradient of %s stays on the device: make the plan with keep_grads to read it", p.name);
  if (ps__grad_passes(&t->plan->spec, p.unit))
    return ps__fail(
        PS_ESTATE,
        "the gradient of %s is gone after its update: make the plan with keep_grads to read it",
        p.name);
  ps__convert(dst, PS_F32, ps__array_at(t, p.unit, PS__ARRAY_GRAD, p.offset),
              ps__array_dtype(t, p.unit, PS__ARRAY_GRAD), n);
  return PS_OK;
}

/* ---- loading --------------------------------------------------------------------------------- */

/* Into a master copy of 24 bits by way of @buffer, of @split numbers. */
static ps_status load_numbers(ps_trainer *t, ps_tensor_file *f, uint64_t idx,
                              const ps_param_info *p, float *buffer, uint64_t split) {
  for (uint64_t first = 0; first < p->n; first += split) {
    const uint64_t n = p->n - first < split ? p->n - first : split;
    PS_TRY(ps_tensors_read(f, idx, first, n, PS_F32, buffer));
    ps__updated_put(t, p->unit, p->offset + first, n, PS_F32, buffer);
  }
  return PS_OK;
}

/* ---- a quantized base ------------------------------------------------------------------------ */

typedef struct put_job {
  ps_trainer *t;
  const ps_param_info *p;
  uint64_t first, n;
  const char *plain; /* in the recipe's dtype */
} put_job;

static void put_part(void *arg, int64_t task, uint32_t worker) {
  const put_job *j = arg;
  const uint64_t first = (uint64_t)task * SPLIT, n = j->n - first < SPLIT ? j->n - first : SPLIT;
  const ps_dtype dt = j->t->plan->model->dt;
  (void)worker;
  ps__updated_put(j->t, j->p->unit, j->p->offset + j->first + first, n, dt,
                  j->plain + first * ps_dtype_bytes(dt));
}

/* By way of @plain, which has room for PIECE elements in the recipe's dtype. */
static ps_status load_blocks(ps_trainer *t, ps_tensor_file *f, uint64_t idx, const ps_param_info *p,
                             ps__pool *pool, char *plain) {
  for (uint64_t first = 0; first < p->n; first += PIECE) {
    const uint64_t n = p->n - first < PIECE ? p->n - first : PIECE;
    put_job j = {t, p, first, n, plain};
    PS_TRY(ps_tensors_read(f, idx, first, n, t->plan->model->dt, plain));
    ps__pool_run(pool, (int64_t)((n + SPLIT - 1) / SPLIT), put_part, &j);
  }
  return PS_OK;
}

static ps_status load_quantized(ps_trainer *t, ps_tensor_file *f, uint64_t idx,
                                const ps_param_info *p) {
  ps__pool *pool;
  if (t->plan->model->unit[p->unit].base == PS_BASE_FP8 && ps__tensors_keep_blocks(f, idx))
    return ps__tensors_read_blocks(f, idx, ps__array_at(t, p->unit, PS__ARRAY_WEIGHTS, p->offset));
  const uint64_t most = p->n < PIECE ? p->n : PIECE;
  char *plain = ps__malloc(most * ps_dtype_bytes(t->plan->model->dt));
  if (!plain)
    return ps__fail(PS_ENOMEM, "no memory left to read %s", p->name);
  ps_status st = ps__pool_create(&pool, ps__n_cpus(), "ps-quantize");
  if (st == PS_OK) {
    st = load_blocks(t, f, idx, p, pool, plain);
    ps__pool_destroy(pool);
  }
  ps__free(plain);
  return st;
}

ps_status ps__trainer_load_param(ps_trainer *t, ps_tensor_file *f, uint64_t idx,
                                 const ps_param_info *p) {
  const ps_dtype dtype = ps__array_dtype(t, p->unit, PS__ARRAY_UPDATED);
  char *const updated = ps__array_at(t, p->unit, PS__ARRAY_UPDATED, p->offset),
              *const weights = ps__array_at(t, p->unit, PS__ARRAY_WEIGHTS, p->offset);
  if (idx == UINT64_MAX) {
    memset(updated, 0, ps__array_bytes(t, p->unit, PS__ARRAY_UPDATED, p->n));
    memset(weights, 0, ps__array_bytes(t, p->unit, PS__ARRAY_WEIGHTS, p->n));
    return PS_OK;
  }
  if (t->plan->model->unit[p->unit].base)
    return load_quantized(t, f, idx, p);
  if ((uint32_t)dtype == PS__I8) {
    const uint64_t most = ps__tensors_transposed(f, idx) ? PIECE : SPLIT,
                   split = p->n < most ? p->n : most;
    float *buffer = ps__malloc(split * sizeof *buffer);
    const ps_status st = buffer ? load_numbers(t, f, idx, p, buffer, split)
                                : ps__fail(PS_ENOMEM, "no memory left to read %s", p->name);
    ps__free(buffer);
    return st;
  }
  for (uint64_t first = 0; first < p->n; first += PIECE) {
    const uint64_t n = p->n - first < PIECE ? p->n - first : PIECE;
    PS_TRY(ps_tensors_read(f, idx, first, n, dtype,
                           ps__array_at(t, p->unit, PS__ARRAY_UPDATED, p->offset + first)));
  }
  if (weights != updated)
    ps__convert(weights, ps__array_dtype(t, p->unit, PS__ARRAY_WEIGHTS), updated, dtype, p->n);
  return PS_OK;
}

ps_status ps__trainer_check_tensors(const ps_trainer *t, const ps_tensor_file *f, const char *dir,
                                    bool weights) {
  return ps__model_check_tensors(t->plan->model, f, dir, weights);
}

ps_status ps__trainer_open_weights(const ps_trainer *t, const char *dir, ps_tensor_file **out) {
  ps_tensor_file *f;
  PS_TRY(ps_tensors_open(&f, dir));
  ps_status st = ps__trainer_check_tensors(t, f, dir, true);
  if (st == PS_OK && ps__has_score(&t->plan->model->cfg) &&
      ps_tensors_find(f, PS__SCORE) == UINT64_MAX && !t->plan->cfg.forward_only &&
      !t->cfg.adapter_dir && !t->resumed)
    ps__log(PS_LOG_WARN, "%s: has no " PS__SCORE ": the head of %u score%s is drawn from %s %llu",
            dir, t->plan->model->cfg.n_labels, t->plan->model->cfg.n_labels == 1 ? "" : "s",
            ps__field("seed"), (unsigned long long)t->cfg.seed);
  if (st == PS_OK)
    st = ps__model_note_weights(t->plan->model, f, dir);
  if (st == PS_OK)
    *out = f;
  else
    ps_tensors_close(f);
  return st;
}

/* The tensor of a parameter that is no adapter's: an adapter may have one in its place. */
static ps_status load_own(ps_trainer *t, ps_tensor_file *f, ps_tensor_file *adapters,
                          const ps_param_info *p) {
  char name[PS__PEFT_NAME_BYTES];
  ps__peft_name(name, p->name);
  const uint64_t idx = adapters ? ps_tensors_find(adapters, name) : UINT64_MAX,
                 own = ps_tensors_find(f, p->name);
  if (idx != UINT64_MAX)
    return ps__trainer_load_param(t, adapters, idx, p);
  return own == UINT64_MAX ? ps__trainer_draw_score(t, p) : ps__trainer_load_param(t, f, own, p);
}

ps_status ps__trainer_load_score(ps_trainer *t, ps_tensor_file *f) {
  const uint32_t i = ps_model_find(t->plan->model, PS__SCORE);
  const uint64_t idx = ps_tensors_find(f, PS__SCORE);
  return i == UINT32_MAX || idx == UINT64_MAX
             ? PS_OK
             : ps__trainer_load_param(t, f, idx, &t->plan->model->param[i]);
}

ps_status ps__trainer_load(ps_trainer *t, ps_tensor_file *f, ps_tensor_file *adapters,
                           ps_progress_fn progress, void *progress_user) {
  const ps_model *m = t->plan->model;
  uint64_t total = 0;
  for (uint32_t i = 0; i < m->n_params; i++)
    if (!m->unit[m->param[i].unit].adapter)
      total += ps__array_bytes(t, m->param[i].unit, PS__ARRAY_UPDATED, m->param[i].n);
  uint64_t done = 0;
  for (uint32_t i = 0; i < m->n_params; i++) {
    if (m->unit[m->param[i].unit].adapter)
      continue;
    PS_TRY(load_own(t, f, adapters, &m->param[i]));
    done += ps__array_bytes(t, m->param[i].unit, PS__ARRAY_UPDATED, m->param[i].n);
    if (progress)
      progress(progress_user, "loading weights", done, total);
  }
  return PS_OK;
}
