/* init.c - draws the weights for a training from scratch, from the distributions that the model's
 * description gives (ps_param_info.init_mean, init_std, init_uniform): those of
 * models/init_model.py, with other bits (draw.h). The pad token's row of the embedding is zero, as
 * in transformers. */
#include "train/draw.h"
#include "train/trainer.h"
#include <string.h>

enum { PART = 1 << 16 }; /* elements a task; even, as elements come in pairs */

typedef struct init_job {
  ps__draw draw;
  char *dst;
  uint64_t n, element0; /* element0 counts over the whole model: no two tensors are alike */
  ps_dtype dtype;
} init_job;

static void init_part(void *arg, int64_t task, uint32_t worker) {
  const init_job *j = arg;
  const uint64_t first = (uint64_t)task * PART;
  ps__draw_numbers(&j->draw, j->element0 + first, j->n - first < PART ? j->n - first : PART,
                   j->dst + first * ps_dtype_bytes(j->dtype), j->dtype);
}

/* The array of a unit that is drawn: that which is updated, but of a master copy of 24 bits the
 * high bits, as in recipe bf16. */
static uint32_t drawn_as(const ps_trainer *t, uint32_t unit) {
  return (uint32_t)ps__array_dtype(t, unit, PS__ARRAY_UPDATED) == PS__I8 ? PS__ARRAY_WEIGHTS
                                                                         : PS__ARRAY_UPDATED;
}

/* The other array of the parameter: the low bits, or the weights of the master copy. */
static void fill_other(const ps_trainer *t, const ps_param_info *p) {
  const uint32_t what = drawn_as(t, p->unit);
  void *const updated = ps__array_at(t, p->unit, PS__ARRAY_UPDATED, p->offset),
              *const weights = ps__array_at(t, p->unit, PS__ARRAY_WEIGHTS, p->offset);
  if (what == PS__ARRAY_WEIGHTS)
    memset(updated, 0, ps__array_bytes(t, p->unit, PS__ARRAY_UPDATED, p->n));
  else if (weights != updated)
    ps__convert(weights, ps__array_dtype(t, p->unit, PS__ARRAY_WEIGHTS), updated,
                ps__array_dtype(t, p->unit, PS__ARRAY_UPDATED), p->n);
}

static void zero_pad(const ps_trainer *t) {
  const ps__args_embed *a = ps__embed_args_of(t->plan->model);
  const uint32_t what = drawn_as(t, 0);
  const uint64_t row = ps__array_bytes(t, 0, what, (uint64_t)a->dim);
  if (a->pad >= 0)
    memset(ps__array_at(t, 0, what, (uint64_t)a->pad * a->dim), 0, row);
}

/* A quantized parameter, by way of @plain, which has room for PLAIN numbers. A task puts whole
 * blocks. */
enum { PLAIN = 64 * PART };
static_assert(PART % 64 == 0, "blocks have 32 or 64 elements (blocks.h)");
typedef struct quantized_job {
  init_job draw;
  const ps_trainer *t;
  uint32_t unit;
  uint64_t at; /* of the unit's elements, the first that is drawn */
} quantized_job;
static void init_quantized_part(void *arg, int64_t task, uint32_t worker) {
  const quantized_job *j = arg;
  const uint64_t first = (uint64_t)task * PART, left = j->draw.n - first;
  init_job draw = j->draw;
  init_part(&draw, task, worker);
  ps__updated_put(j->t, j->unit, j->at + first, left < PART ? left : PART, j->draw.dtype,
                  j->draw.dst + first * ps_dtype_bytes(j->draw.dtype));
}
static void init_quantized(const ps_trainer *t, const ps_param_info *p, ps__pool *pool,
                           init_job draw, char *plain) {
  const uint64_t element0 = draw.element0;
  draw.dst = plain;
  draw.dtype = t->plan->model->dt;
  for (uint64_t first = 0; first < p->n; first += PLAIN) {
    draw.n = p->n - first < PLAIN ? p->n - first : PLAIN;
    draw.element0 = element0 + first;
    quantized_job j = {draw, t, p->unit, p->offset + first};
    ps__pool_run(pool, (int64_t)((draw.n + PART - 1) / PART), init_quantized_part, &j);
  }
}

/* @element0: of the numbers that are drawn. @plain: of a quantized parameter. */
static void draw_param(ps_trainer *t, const ps_param_info *p, uint64_t element0, ps__pool *pool,
                       char *plain) {
  init_job j = {.draw = {.seed = t->cfg.seed,
                         .mean = p->init_mean,
                         .std = p->init_std,
                         .uniform = p->init_uniform != 0},
                .dst = ps__array_at(t, p->unit, drawn_as(t, p->unit), p->offset),
                .n = p->n,
                .element0 = element0,
                .dtype = ps__array_dtype(t, p->unit, drawn_as(t, p->unit))};
  if (t->plan->model->unit[p->unit].base) {
    init_quantized(t, p, pool, j, plain);
    return;
  }
  ps__pool_run(pool, (int64_t)((p->n + PART - 1) / PART), init_part, &j);
  if (p->unit == 0)
    zero_pad(t);
  fill_other(t, p);
}

ps_status ps__trainer_draw_score(ps_trainer *t, const ps_param_info *p) {
  ps__pool *pool;
  PS_TRY(ps__pool_create(&pool, ps__n_cpus(), "ps-init"));
  draw_param(t, p, 1ull << 61, pool, NULL);
  ps__pool_destroy(pool);
  return PS_OK;
}

ps_status ps__trainer_init(ps_trainer *t, bool adapters, ps_progress_fn progress,
                           void *progress_user) {
  const ps_model *m = t->plan->model;
  /* adapters are drawn from numbers of their own: the same, whether the others are read or drawn */
  const uint64_t first = adapters ? 1ull << 62 : 0;
  uint64_t done = 0, total = 0;
  for (uint32_t i = 0; i < m->n_params; i++)
    total += m->unit[m->param[i].unit].adapter == adapters ? m->param[i].n : 0;
  ps__pool *pool;
  char *plain = ps__malloc(PLAIN * ps_dtype_bytes(m->dt));
  ps_status st = plain ? ps__pool_create(&pool, ps__n_cpus(), "ps-init")
                       : ps__fail(PS_ENOMEM, "out of memory to draw weights");
  if (st != PS_OK) {
    ps__free(plain);
    return st;
  }
  for (uint32_t i = 0; i < m->n_params; i++) {
    const ps_param_info *p = &m->param[i];
    if (m->unit[p->unit].adapter != adapters)
      continue;
    draw_param(t, p, first + done, pool, plain);
    done += p->n;
    if (progress)
      progress(progress_user, "drawing weights", done * 2, total * 2);
  }
  ps__pool_destroy(pool);
  ps__free(plain);
  return PS_OK;
}
