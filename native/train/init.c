/* init.c - draws the weights for a training from scratch, from the same distribution as
 * models/init_model.py but with other bits.
 *
 * Norms are 1 and biases 0. Matrices are N(0, 0.02). Those that write into the residual stream
 * (o_proj, down_proj) are N(0, 0.02 / sqrt(2 layers)), as in GPT-2 (Radford et al. 2019, section
 * 2.3). Element i of a model depends on the seed and on i alone: splitmix64 makes a word for each
 * pair of elements, and Box and Muller's transform makes the pair of it. */
#include "train/trainer.h"
#include <math.h>
#include <string.h>

enum { PIECE = 1 << 16 }; /* elements a task; even, as elements come in pairs */
static const double STD = 0.02;

typedef struct init_job {
  char *dst;
  uint64_t n, element0, seed; /* element0 counts over the whole model: no two tensors are alike */
  float mean, std;
  ps_dtype dtype;
} init_job;

static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

static void put(const init_job *j, uint64_t i, float x) {
  if (i < j->n)
    ps__store1_f32(j->dst, j->dtype, i, x);
}

static void init_piece(void *arg, int64_t task, uint32_t worker) {
  const init_job *j = arg;
  const uint64_t first = (uint64_t)task * PIECE, end = first + PIECE < j->n ? first + PIECE : j->n;
  const float turn = 6.2831853071795864769f / 16777216.0f;
  for (uint64_t i = first; i < end; i += 2) {
    const uint64_t x = mix(mix(j->seed) ^ (j->element0 + i));
    const float u = ((float)(x >> 40) + 1.0f) / 16777216.0f, angle = (float)(x & 0xffffff) * turn;
    const float r = j->std > 0 ? j->std * sqrtf(-2.0f * logf(u)) : 0.0f;
    put(j, i, j->mean + r * cosf(angle));
    put(j, i + 1, j->mean + r * sinf(angle));
  }
}

static bool ends_in(const char *name, const char *with) {
  const size_t n = strlen(name), m = strlen(with);
  return n >= m && strcmp(name + n - m, with) == 0;
}

ps_status ps__trainer_init(ps_trainer *t, ps_progress_fn progress, void *progress_user) {
  const ps_model_config *m = &t->plan->model;
  const uint64_t total = ps_model_n_elements(m);
  uint64_t done = 0;
  ps__pool *pool;
  PS_TRY(ps__pool_create(&pool, ps__n_cpus(), "ps-init"));
  ps_status st = PS_OK;
  for (uint32_t i = 0; st == PS_OK && i < ps_model_n_params(m); i++) {
    ps_param_info p;
    init_job j = {.n = 0, .element0 = done, .seed = t->cfg.seed, .dtype = ps__master_dtype(t)};
    st = ps_model_param(m, i, &p);
    if (st != PS_OK)
      break;
    const bool out = ends_in(p.name, ".o_proj.weight") || ends_in(p.name, ".down_proj.weight");
    j.dst = ps__master_at(t, p.unit, p.offset);
    j.n = p.n;
    j.mean = p.role == PS_PARAM_NORM ? 1.0f : 0.0f;
    j.std = p.role != PS_PARAM_MATRIX ? 0.0f : (float)(out ? STD / sqrt(2.0 * m->n_layers) : STD);
    ps__pool_run(pool, (int64_t)((p.n + PIECE - 1) / PIECE), init_piece, &j);
    ps__trainer_refresh_copy(t, &p);
    done += p.n;
    if (progress)
      progress(progress_user, "drawing weights", done * 2, total * 2);
  }
  ps__pool_destroy(pool);
  return st;
}
