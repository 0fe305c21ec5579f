/* init.c - draws the weights for a training from scratch, from the distributions that the model's
 * description gives (ps_param_info.init_mean, init_std, init_uniform): those of
 * models/init_model.py, with other bits. Element i of a model depends on the seed and on i alone:
 * splitmix64 makes a word for each pair of elements, and Box and Muller's transform makes the pair
 * of it, or its two halves are the pair (uniform). */
#include "core/mix64.h"
#include "train/trainer.h"
#include <math.h>
#include <string.h>

enum { PIECE = 1 << 16 }; /* elements a task; even, as elements come in pairs */

typedef struct init_job {
  char *dst;
  uint64_t n, element0, seed; /* element0 counts over the whole model: no two tensors are alike */
  float mean, std;
  bool uniform;
  ps_dtype dtype;
} init_job;

/* the first number of splitmix64 from @seed on */
static uint64_t first_of(uint64_t seed) { return ps__mix64(seed + PS__MIX_GAMMA); }

static void put(const init_job *j, uint64_t i, float x) {
  if (i < j->n)
    ps__store1_f32(j->dst, j->dtype, i, x);
}

static void init_piece(void *arg, int64_t task, uint32_t worker) {
  const init_job *j = arg;
  const uint64_t first = (uint64_t)task * PIECE, end = first + PIECE < j->n ? first + PIECE : j->n;
  const float turn = 6.2831853071795864769f / 16777216.0f;
  const float width = 2 * sqrtf(3.0f) * j->std / 16777216.0f; /* of the uniform distribution */
  for (uint64_t i = first; i < end; i += 2) {
    const uint64_t x = first_of(first_of(j->seed) ^ (j->element0 + i));
    if (j->uniform) {
      put(j, i, j->mean + width * ((float)(x >> 40) - 8388607.5f));
      put(j, i + 1, j->mean + width * ((float)(x & 0xffffff) - 8388607.5f));
      continue;
    }
    const float u = ((float)(x >> 40) + 1.0f) / 16777216.0f, angle = (float)(x & 0xffffff) * turn;
    const float r = j->std > 0 ? j->std * sqrtf(-2.0f * logf(u)) : 0.0f;
    put(j, i, j->mean + r * cosf(angle));
    put(j, i + 1, j->mean + r * sinf(angle));
  }
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
  PS_TRY(ps__pool_create(&pool, ps__n_cpus(), "ps-init"));
  for (uint32_t i = 0; i < m->n_params; i++) {
    const ps_param_info *p = &m->param[i];
    if (m->unit[p->unit].adapter != adapters)
      continue;
    init_job j = {.dst = ps__master_at(t, p->unit, p->offset),
                  .n = p->n,
                  .element0 = first + done,
                  .seed = t->cfg.seed,
                  .mean = p->init_mean,
                  .std = p->init_std,
                  .uniform = p->init_uniform != 0,
                  .dtype = ps__master_dtype(t, p->unit)};
    ps__pool_run(pool, (int64_t)((p->n + PIECE - 1) / PIECE), init_piece, &j);
    ps__trainer_refresh_copy(t, p);
    done += p->n;
    if (progress)
      progress(progress_user, "drawing weights", done * 2, total * 2);
  }
  ps__pool_destroy(pool);
  return PS_OK;
}
