/* test_release.c - after a run has stopped, device ops that wait for host ops come to their end in
 * the schedule's order. A model of streams on one thread: random programs stop at random points,
 * and each time any op that may run next runs next. Usage: test_release [programs, default 3000]
 * [seed] */
#include "engine/release.h"
#include "random_program.h"

enum { STREAMS = 5, FIRST_HOST = 3, HOST_MASK = 1 << 3 | 1 << 4, MAX_RUN = RP_STEPS * RP_MAX_OPS };

typedef struct model {
  const ps_program *p;
  const ps_schedule *s;
  uint64_t r; /* random numbers */
  /* ops that ended, by stream; what device streams see of a host stream is its word */
  uint64_t ended[STREAMS], word[STREAMS];
  uint64_t begun; /* device ops with lower numbers were submitted */
  uint32_t order[RP_STEPS]
                [RP_MAX_OPS]; /* 1 + how many device ops ended before; 0: it did not run */
  uint32_t n_ran;
} model;

static bool on_host(void *user, uint32_t stream) { return stream >= FIRST_HOST; }

static uint64_t seen(const model *m, uint32_t of, uint32_t stream) {
  return on_host(NULL, of) && !on_host(NULL, stream) ? m->word[of] : m->ended[of];
}

/* The next op of @stream; NULL where it has none, or none that was submitted. */
static const ps__op *next_op(const model *m, uint32_t stream, uint64_t *step) {
  const uint64_t n = m->s->list.stream_n_ops[stream];
  if (!n || m->ended[stream] >= RP_STEPS * n)
    return NULL;
  *step = m->ended[stream] / n;
  const ps__op *op = m->s->list.ops;
  while (op->stream != stream || op->position != m->ended[stream] % n)
    op++;
  const uint64_t number = *step * m->s->list.n_ops + (uint64_t)(op - m->s->list.ops);
  return on_host(NULL, stream) || number < m->begun ? op : NULL;
}

static bool may_run(const model *m, uint32_t stream) {
  uint64_t step;
  const ps__op *op = next_op(m, stream, &step);
  for (uint32_t i = 0; op && i < op->n_wait; i++) {
    const ps_wait *w = &m->s->waits[op->wait + i];
    if (w->steps_back <= step &&
        seen(m, w->stream, stream) <
            (step - w->steps_back) * m->s->list.stream_n_ops[w->stream] + w->value)
      return false;
  }
  return op != NULL;
}

/* One op of the streams [from, to), any of those that may run. */
static bool run_one(model *m, uint32_t from, uint32_t to) {
  uint32_t ready[STREAMS], n = 0;
  uint64_t step;
  for (uint32_t s = from; s < to; s++)
    if (may_run(m, s))
      ready[n++] = s;
  if (n == 0)
    return false;
  const uint32_t s = ready[rnd_below(&m->r, n)];
  const ps__op *op = next_op(m, s, &step);
  m->ended[s]++;
  if (on_host(NULL, s))
    m->word[s] = m->ended[s];
  else
    m->order[step][op - m->s->list.ops] = ++m->n_ran;
  return true;
}

/* ---- what is called back --------------------------------------------------------------------- */

static uint64_t reached(void *user, uint32_t stream) { return ((model *)user)->word[stream]; }
static bool needed(void *user, uint64_t number) { return ((model *)user)->begun > number; }

static bool await(void *user, uint32_t stream, uint64_t value) {
  model *m = user;
  while (m->ended[stream] < value) {
    uint64_t step;
    if (!next_op(m, stream, &step))
      return false;                   /* it was not submitted */
    CHECK(run_one(m, 0, FIRST_HOST)); /* else all device streams hang */
  }
  return true;
}

static void let_go(void *user, uint32_t stream, uint64_t value) {
  model *m = user;
  CHECK(m->word[stream] < value);
  m->word[stream] = value;
  for (uint32_t n = rnd_below(&m->r, 3); n && run_one(m, 0, FIRST_HOST); n--)
    ;
}

/* ---- the tests ------------------------------------------------------------------------------- */

/* Device ops that were submitted all ran, and those that conflict in program order. */
static bool in_order(const model *m) {
  const uint64_t n = m->s->list.n_ops;
  for (uint64_t j = 0; j < m->begun; j++) {
    if (on_host(NULL, m->s->list.ops[j % n].stream))
      continue;
    CHECK(m->order[j / n][j % n] > 0);
    for (uint64_t i = 0; i < j; i++)
      if (!on_host(NULL, m->s->list.ops[i % n].stream) && rp_conflict(m->p, i % n, j % n) &&
          m->order[i / n][i % n] > m->order[j / n][j % n])
        return false;
  }
  return true;
}

/* A program that stops somewhere; then its host ops are let go in order, or all at once. */
static bool stops_in_order(const ps_program *p, uint64_t seed, bool at_once) {
  static model m;
  ps_schedule *s;
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  m = (model){.p = p, .s = s, .r = mix64(seed)};
  m.begun = rnd_below(&m.r, (uint32_t)(RP_STEPS * s->list.n_ops + 1));
  for (uint32_t n = rnd_below(&m.r, MAX_RUN); n && run_one(&m, 0, STREAMS); n--)
    ;
  if (at_once)
    m.word[3] = m.word[4] = INT64_MAX;
  else
    ps__release_in_order(&(ps__release){.schedule = s,
                                        .user = &m,
                                        .on_host = on_host,
                                        .reached = reached,
                                        .needed = needed,
                                        .await = await,
                                        .let_go = let_go});
  while (run_one(&m, 0, FIRST_HOST))
    ;
  const bool ok = in_order(&m);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  return ok;
}

int main(int argc, char **argv) {
  const uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 3000,
                 seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  const int64_t live = ps__live_allocations();
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < n; i++) {
    ps_program *p = rp_make_for(seed + i, STREAMS, HOST_MASK);
    if (!stops_in_order(p, seed + i, false)) {
      printf("FAIL program %llu\n", (unsigned long long)(seed + i));
      return 1;
    }
    wrong += !stops_in_order(p, seed + i, true);
    ps_program_destroy(p);
  }
  CHECK(wrong > 0 && ps__live_allocations() == live);
  printf("ok %llu programs that stop: device ops end in order; let go at once, %llu do not\n",
         (unsigned long long)n, (unsigned long long)wrong);
  return 0;
}
