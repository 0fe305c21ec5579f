/* rows.c - updates a host-resident embedding row by row.
 *
 * The update of the embedding is the last update of a step (native/step/updates.c). It runs beside
 * the first gathers of the next step (native/step/embed.c), which need some rows before the others.
 * Whoever needs a row first updates it. The array done[row] says which update a row has: 1 + the
 * run's step, or BUSY while a thread writes the row. A row gets the same bits whoever updates it,
 * because optimizers work element by element and key their rounding by the element's index. */
#include "train/trainer.h"
#include "core/core.h"
#include <sched.h>

enum { GATHER_ROWS = 16, TASK_ELEMENTS = 16384 };
static const uint32_t BUSY = 1u << 31;

struct ps__rows {
  uint64_t n, dim; /* of the table */
  /* Rows that are updated together: a multiple of PS__STATE_BLOCK elements where state has blocks,
   * else one row. The last ones may be fewer. */
  uint64_t together;
  uint32_t dt;             /* of the gathered rows */
  float scale;             /* which the gathered rows get */
  _Atomic uint32_t done[]; /* [n]: of the rows together times i and those after it, done[i] */
};

/* What the updates of a step's rows have in common. */
typedef struct rows_job {
  ps__rows *rows;
  uint32_t id; /* 1 + the run's step whose update this is; 0: no update */
  ps__simd simd;
  ps__update u;
  ps__arrays a; /* the table's */
  float decay;
  uint64_t element0;
  /* a gather's: */
  const int32_t *token;
  const char *from;
  char *out;
  uint64_t n_tokens;
} rows_job;

ps_status ps__rows_create(ps__rows **out, const ps__args_embed *args, uint32_t block, uint32_t id) {
  const uint64_t n_rows = args->vocab;
  ps__rows *r = ps__calloc(1, sizeof *r + n_rows * sizeof *r->done);
  if (!r)
    return ps__fail(PS_ENOMEM, "out of memory for a table of %llu rows",
                    (unsigned long long)n_rows);
  r->n = n_rows;
  for (uint64_t i = 0; i < n_rows && id; i++)
    atomic_init(&r->done[i], id);
  r->dim = args->dim;
  r->together = 1;
  while (r->together * r->dim % block)
    r->together *= 2; /* blocks are powers of two */
  r->dt = args->dt;
  r->scale = ps__embed_scale(args);
  *out = r;
  return PS_OK;
}

void ps__rows_destroy(ps__rows *r) { ps__free(r); }

static rows_job job_of(const ps_trainer *t, uint32_t id, const ps__update *u) {
  rows_job j = {.rows = t->rows,
                .id = id,
                .simd = ps__simd_best(),
                .u = *u,
                .a = ps__arrays_on_host(t, 0),
                .decay = t->segments[t->first_segment[0]].decay,
                .element0 = t->first_element[0],
                .from = ps__array_at(t, 0, PS__ARRAY_WEIGHTS, 0)};
  return j;
}

static void update_rows(const rows_job *j, uint64_t row) {
  const ps__rows *r = j->rows;
  const uint64_t left = r->n - row, first = row * r->dim,
                 n = (left < r->together ? left : r->together) * r->dim;
  const ps__arrays a = ps__arrays_from(&j->a, j->u.recipe, first);
  ps__update_elements(j->simd, &j->u, n, &a, j->decay, j->element0 + first);
}

/* Returns when the row has the job's update, made by this thread or by another one. */
static void ensure_updated(const rows_job *j, uint64_t row) {
  const uint64_t first = row - row % j->rows->together;
  _Atomic uint32_t *done = &j->rows->done[first / j->rows->together];
  for (;;) {
    uint32_t now = atomic_load_explicit(done, memory_order_acquire);
    if (now == j->id)
      return;
    if (now & BUSY) {
      sched_yield(); /* another thread is writing the row, which takes microseconds */
      continue;
    }
    if (!atomic_compare_exchange_weak_explicit(done, &now, now | BUSY, memory_order_acquire,
                                               memory_order_relaxed))
      continue;
    update_rows(j, first);
    atomic_store_explicit(done, j->id, memory_order_release);
    return;
  }
}

static uint64_t rows_per_task(const rows_job *j) {
  return j->rows->dim < TASK_ELEMENTS ? TASK_ELEMENTS / j->rows->dim : 1;
}

static void update_task(void *arg, int64_t task, uint32_t worker) {
  const rows_job *j = arg;
  const uint64_t n = rows_per_task(j), first = (uint64_t)task * n,
                 end = first + n < j->rows->n ? first + n : j->rows->n;
  for (uint64_t row = first; row < end; row++)
    ensure_updated(j, row);
}

void ps__rows_update(const ps_trainer *t, ps__pool *pool, uint32_t id, const ps__update *u) {
  rows_job j = job_of(t, id, u);
  ps__pool_run(pool, (int64_t)((j.rows->n + rows_per_task(&j) - 1) / rows_per_task(&j)),
               update_task, &j);
}

static void gather_task(void *arg, int64_t task, uint32_t worker) {
  const rows_job *j = arg;
  const uint64_t first = (uint64_t)task * GATHER_ROWS,
                 end = first + GATHER_ROWS < j->n_tokens ? first + GATHER_ROWS : j->n_tokens;
  const ps__rows *r = j->rows;
  const size_t bytes = ps__stored_bytes(ps__plain(r->dt), r->dim);
  for (uint64_t i = first; i < end; i++) {
    if (j->id)
      ensure_updated(j, (uint64_t)j->token[i]);
    ps__embed_row(j->out + i * bytes, j->from + (size_t)j->token[i] * bytes, r->dt, r->dim,
                  r->scale);
  }
}

void ps__rows_gather(const ps_trainer *t, ps__pool *pool, uint32_t id, const ps__update *u,
                     const int32_t *token, uint64_t n_tokens, void *out) {
  rows_job j = job_of(t, id, u);
  j.token = token;
  j.n_tokens = n_tokens;
  j.out = out;
  ps__pool_run(pool, (int64_t)((n_tokens + GATHER_ROWS - 1) / GATHER_ROWS), gather_task, &j);
}
