/* local_search.c - varies the fastest candidates of a large search space, decision by decision,
 * while the simulated time falls. */
#include "plan/evaluate.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Ops emitted and simulated at most, over all starting points (ps__budget() for deep models). */
static const uint64_t LOCAL_SEARCH_OPS = 8000000;
/* a starting point's time over the fastest candidate's, at most */
static const double START_MOST_SLOWER = 1.15;
/* There are three stages, each with its part of the ops:
 *   all starting points: STARTS_A_ROUND a number of tokens a round            a quarter
 *   the N_SECOND_STAGE best (one fewer beside branches that keep totals)        a quarter
 *   the N_LAST_STAGE best, with all rounds of a step                           a half
 * The starting points of a stage are searched at once where there are CPUs. */
enum { STARTS_A_ROUND = 2, N_STARTS = 8, N_SECOND_STAGE = 4, N_LAST_STAGE = 2 };

/* The decisions that a move changes, by one part at a time or more (ps__candidate). The parts on
 * the device follow: they take what the cap leaves. */
enum {
  MOVE_HOST,
  MOVE_PARAMS,
  MOVE_GRADS,
  MOVE_EXTRA,
  MOVE_STREAMED,
  MOVE_SPLIT,
  MOVE_SUMS,
  MOVE_FROM_HOST,
  MOVE_AGAIN,
  MOVE_HELD,
  MOVE_HEAD,
  MOVE_AHEAD,
  N_MOVES
};

static int n_layers(const ps__search *s) {
  return s->plan->model->cfg.n_layers < 255 ? (int)s->plan->model->cfg.n_layers : 255;
}

static bool moved(const ps__search *s, ps__candidate *m, int what, int by) {
  /* the CPU backend's "device" has no processor of its own */
  const bool cuda = s->plan->hw.backend == PS_BACKEND_CUDA, one = !ps__totals_on_host(s->plan);
  const ps__layout *l = &s->space.microbatch[m->microbatch].layout;
  const bool extra =
      one || (s->plan->at->n_devices > 1 && l->first_round_chunks > l->chunks_per_round);
  const int layers = n_layers(s);
  uint8_t *const field[N_MOVES] = {&m->host,       &m->keep.params, &m->keep.grads, &m->extra,
                                   &m->streamed,   &m->split,       &m->sums,       &m->from_host,
                                   &m->keep.again, &m->held,        &m->keep.head,  &m->ahead};
  const int split = layers < 255 ? layers + 1 : 255; /* the head too */
  const int most[N_MOVES] = {PS__SAVED_PARTS,
                             PS__UNIT_PARTS,
                             one || ps__totals_may_stay(s->plan) ? PS__UNIT_PARTS : 0,
                             extra && l->n_rounds > 1 ? PS__SAVED_PARTS : 0,
                             cuda && one ? layers : 0,
                             cuda && ps__may_split(s->plan) ? split : 0,
                             layers,
                             ps__may_take_pieces(s->plan) ? PS__UNIT_PARTS : 0,
                             m->keep.passing && !ps__is_ring(s->plan) ? PS__UNIT_PARTS : 0,
                             s->plan->holds ? layers : 0,
                             1,
                             PS__N_AHEADS - 1};
  const int to = *field[what] + by;
  if (m->keep.state && what != MOVE_HOST && what != MOVE_AHEAD)
    return false;
  if (to < 0 || to > most[what])
    return false;
  *field[what] = (uint8_t)to;
  return true;
}

/* BYTES of a device that so many blocks hold more. */
static double more_held(const ps__search *s, uint32_t from, uint32_t to) {
  return (double)s->held_there[to] - (double)s->held_there[from];
}

ps_status ps__fill_device(ps__search *s, ps__candidate *m, uint64_t taken, double *out_ns,
                          uint64_t *out_taken) {
  const double part = ps__saved_part_bytes(&s->space, m);
  const uint64_t cap = s->cap[PS__DEVICE_MEM];
  /* with tiny parts it is more than an int holds */
  const double room =
      cap == UINT64_MAX ? PS__SAVED_PARTS : trunc(((double)cap - (double)taken) / part);
  int parts = room > PS__SAVED_PARTS    ? PS__SAVED_PARTS
              : room < -PS__SAVED_PARTS ? -1
                                        : m->device + (int)room;
  *out_ns = 0;
  for (int tries = 0; tries < 4; tries++) {
    ps__evaluation e;
    if (parts > PS__SAVED_PARTS - m->host)
      parts = PS__SAVED_PARTS - m->host;
    if (parts < 0)
      return PS_OK;
    m->device = (uint8_t)parts;
    PS_TRY(ps__evaluate_begin(s, m, &e));
    const ps_status st = ps__evaluate_time(s, m, &e, out_ns);
    *out_taken = e.bytes[PS__DEVICE_MEM];
    const uint64_t host = e.bytes[PS__HOST_MEM], pinned = e.bytes[PS__PINNED_MEM];
    const uint8_t held = ps__blocks_to_hold(s, m->held, e.bytes);
    ps__evaluation_end(s, &e);
    if (st != PS_OK || *out_ns > 0)
      return st;
    if (held != m->held) {
      parts = m->device - (int)ceil(more_held(s, m->held, held) / part);
      m->held = held;
    } else if (host > s->cap[PS__HOST_MEM] || pinned > s->cap[PS__PINNED_MEM]) {
      const uint64_t of_all = host > s->cap[PS__HOST_MEM] ? host - s->cap[PS__HOST_MEM] : 0,
                     of_pinned =
                         pinned > s->cap[PS__PINNED_MEM] ? pinned - s->cap[PS__PINNED_MEM] : 0;
      const double over = (double)(of_all > of_pinned ? of_all : of_pinned) /
                              ps__offloaded_part_bytes(&s->space, m) +
                          1;
      if (over > m->host)
        return PS_OK;
      m->host -= (uint8_t)over;
    } else
      parts--;
  }
  return PS_OK;
}

/* The state of a starting point's local search. */
typedef struct descent {
  ps__fastest at;       /* the plan that it is at */
  uint64_t taken;       /* device BYTES of that plan */
  uint32_t level, move; /* the next move, by step[level] parts */
  uint32_t failed;      /* moves in a row that found nothing better */
  uint32_t n_perturbed; /* perturbations since the last better plan */
  uint64_t thought;     /* device BYTES that its first plan is expected to take; 0: the cap */
  bool begun;
} descent;

static const int step[] = {6, 2, 1};
/* Perturbations leave a local optimum: some decisions are better only together, which single steps
 * pass by. One such pair is contributions that wait while sums run on fewer threads. */
static const struct {
  int what, by;
} perturbations[] = {{MOVE_SUMS, 14},      {MOVE_EXTRA, 24},     {MOVE_PARAMS, 8},
                     {MOVE_HOST, -10},     {MOVE_STREAMED, 8},   {MOVE_SUMS, -14},
                     {MOVE_FROM_HOST, 16}, {MOVE_FROM_HOST, -16}};
enum { N_LEVELS = 3, N_PERTURBATIONS = sizeof perturbations / sizeof *perturbations };

/* The last two perturbations are for units in pieces alone. */
static uint32_t n_perturbations(const ps__search *s) {
  return ps__may_take_pieces(s->plan) ? N_PERTURBATIONS : N_PERTURBATIONS - 2;
}

/* @out: @d at candidate @m; time 0 where it does not fit. */
static ps_status try_candidate(ps__search *s, const descent *d, ps__candidate m, descent *out) {
  const ps__candidate *from = &d->at.candidate;
  const double units = (m.keep.params - from->keep.params) * ps__unit_part_bytes(&s->space) +
                       (m.keep.grads - from->keep.grads) * ps__total_part_bytes(&s->space, &m) +
                       more_held(s, from->held, m.held);
  *out = *d;
  PS_TRY(ps__fill_device(s, &m, (uint64_t)((double)d->taken + units), &out->at.ns, &out->taken));
  out->at.candidate = m;
  return PS_OK;
}

/* One move. Each decision is moved up and down, by larger steps first and then by smaller ones.
 * After a better plan the same move is tried again. */
static ps_status take_step(ps__search *s, descent *d) {
  const int what = (int)d->move / 2,
            by = (d->move % 2 ? -1 : 1) * (what >= MOVE_HEAD ? 1 : step[d->level]);
  descent next = {0};
  ps__candidate m = d->at.candidate;
  if (!(what >= MOVE_HEAD && d->level > 0) && moved(s, &m, what, by))
    PS_TRY(try_candidate(s, d, m, &next));
  if (next.at.ns > 0 && (d->at.ns == 0 || next.at.ns < d->at.ns)) {
    *d = next;
    d->failed = 0;
    return PS_OK;
  }
  d->move = (d->move + 1) % (2 * N_MOVES);
  if (++d->failed < 2 * N_MOVES)
    return PS_OK;
  d->level++;
  d->failed = 0;
  return PS_OK;
}

static ps_status perturb(ps__search *s, descent *d) {
  descent next = {0};
  ps__candidate m = d->at.candidate;
  const uint32_t k = d->n_perturbed++;
  if (moved(s, &m, perturbations[k].what, perturbations[k].by))
    PS_TRY(try_candidate(s, d, m, &next));
  if (next.at.ns == 0)
    return PS_OK;
  next.n_perturbed = d->n_perturbed;
  next.level = next.failed = 0;
  *d = next;
  return PS_OK;
}

/* The first plan of a starting point: the candidate itself, with fewer parts on the device where it
 * does not fit with all its rounds. Where the candidate was not varied yet, two usual features of
 * final plans are tried too: streamed state and waiting contributions, with updates whole or
 * split. */
static ps_status begin_at_start(ps__search *s, descent *d) {
  const int layers = n_layers(s);
  descent usual = {0};
  ps__candidate m = d->at.candidate;
  const ps__layout *l = &s->space.microbatch[m.microbatch].layout;
  d->begun = true;
  PS_TRY(ps__fill_device(s, &d->at.candidate, d->thought ? d->thought : s->cap[PS__DEVICE_MEM],
                         &d->at.ns, &d->taken));
  d->thought = 0;
  if (d->taken == 0 || s->whole || m.keep.state || s->plan->hw.backend != PS_BACKEND_CUDA)
    return PS_OK;
  m = d->at.candidate;
  m.streamed = ps__totals_on_host(s->plan) ? 0 : (uint8_t)(layers / 6);
  m.sums = (uint8_t)(l->n_rounds == 1 && !m.keep.passing ? 0 : layers < 6 ? layers : 6);
  m.extra = l->first_round_chunks > l->chunks_per_round ? PS__SAVED_PARTS / 2 : 0;
  PS_TRY(try_candidate(s, d, m, &usual));
  if (usual.at.ns > 0 && (d->at.ns == 0 || usual.at.ns < d->at.ns)) {
    *d = usual;
    m = d->at.candidate;
  }
  if (!ps__may_split(s->plan))
    return PS_OK;
  m.split = (uint8_t)layers;
  PS_TRY(try_candidate(s, d, m, &usual));
  if (usual.at.ns > 0 && (d->at.ns == 0 || usual.at.ns < d->at.ns))
    *d = usual;
  return PS_OK;
}

/* Searches on from @d until no perturbation leads to a better plan, or @max_ops are spent. */
static ps_status search_near(ps__search *s, descent *d, uint64_t max_ops) {
  const uint64_t end = s->n_ops + max_ops;
  if (!d->begun)
    PS_TRY(begin_at_start(s, d));
  descent best = *d;
  while (d->taken && s->n_ops < end) {
    if (d->level == N_LEVELS) {
      const uint32_t n_perturbed = d->n_perturbed;
      if (n_perturbed == n_perturbations(s))
        break;
      *d = best;
      d->level = N_LEVELS;
      d->n_perturbed = n_perturbed;
      PS_TRY(perturb(s, d));
      continue;
    }
    PS_TRY(take_step(s, d));
    if (d->at.ns == 0 || (best.at.ns > 0 && d->at.ns >= best.at.ns))
      continue;
    d->n_perturbed = 0;
    best = *d;
  }
  const uint32_t n_perturbed = d->n_perturbed;
  if (d->at.ns != best.at.ns || d->at.ns == 0)
    *d = best;
  d->n_perturbed = n_perturbed;
  return PS_OK;
}

static int by_ns(const void *pa, const void *pb) {
  const ps__fastest *a = pa, *b = pb;
  if ((a->ns > 0) != (b->ns > 0))
    return a->ns > 0 ? -1 : 1;
  if (a->ns != b->ns)
    return a->ns < b->ns ? -1 : 1;
  if (a->candidate.microbatch != b->candidate.microbatch)
    return a->candidate.microbatch < b->candidate.microbatch ? -1 : 1;
  return a->candidate.keep.params < b->candidate.keep.params
             ? -1
             : a->candidate.keep.params > b->candidate.keep.params;
}

/* The local search of one starting point has a search state of its own. So several searches run at
 * once, and their number changes no result. */
typedef struct branch {
  ps__search *s;
  descent at;
  uint64_t max_ops;
  ps__search_result out;
  ps_status status;
  char why[256];
} branch;

static void branch_task(void *arg, int64_t task, uint32_t worker) {
  branch *b = ((branch **)arg)[task];
  (void)worker;
  b->status = search_near(b->s, &b->at, b->max_ops);
  ps__evaluation_arrays_free(&b->s->arrays); /* those that all branches kept came to 580 MiB */
  if (b->status != PS_OK)
    snprintf(b->why, sizeof b->why, "%s", ps_last_error());
}

static int by_branch(const void *pa, const void *pb) {
  return by_ns(&(*(branch *const *)pa)->at.at, &(*(branch *const *)pb)->at.at);
}

/* The last stage: a host stream that falls behind a little in each round shows it only over all
 * rounds. */
static void with_all_rounds(branch *b) {
  b->s->whole = true;
  memset(b->s->best, 0, sizeof b->s->best);
  b->at.begun = false;
  b->at.level = b->at.failed = b->at.n_perturbed = 0;
  b->max_ops = ps__budget(b->s, LOCAL_SEARCH_OPS / 2 / N_LAST_STAGE);
}

/* Where totals may stay on their devices, two more branches begin at the best branch's plan, with
 * the totals of so many parts of the units. The second stage takes one other branch fewer then, and
 * the budgets of the stages do not grow. The last stage takes the best of these branches beside the
 * best other one. They are needed because no candidate of the search space keeps totals, and moves
 * alone seldom lead to a plan that does. Totals that stay take device memory from saved
 * activations. They are a gain when more saved activations are offloaded over the links, which have
 * less to copy then. */
static const uint8_t totals_kept[] = {8, 31};
enum { N_KEEPING = sizeof totals_kept };

static uint32_t n_keeping(const ps__search *s) {
  return ps__totals_may_stay(s->plan) ? N_KEEPING : 0;
}

static void keep_totals(branch *b, const descent *from, uint8_t parts) {
  ps__candidate m = from->at.candidate;
  const double more = (parts - m.keep.grads) * ps__total_part_bytes(&b->s->space, &m);
  m.keep.grads = parts;
  b->at = (descent){.at = {0, m}, .thought = (uint64_t)((double)from->taken + more)};
}

static ps_status search_branches(ps__search *s, branch *b, uint32_t n) {
  ps__pool *pool;
  branch *order[N_STARTS + N_KEEPING];
  const uint32_t keeping = n ? n_keeping(s) : 0, n_all = n + keeping;
  PS_TRY(ps__pool_create(&pool, ps__search_space_workers(&s->space, n), "search"));
  for (uint32_t i = 0; i < n; i++) {
    order[i] = &b[i];
    b[i].max_ops = ps__budget(s, LOCAL_SEARCH_OPS / 4 / N_STARTS);
  }
  ps__pool_run(pool, n, branch_task, order);
  qsort(order, n, sizeof *order, by_branch);
  const uint32_t most = keeping ? N_SECOND_STAGE - 1 : N_SECOND_STAGE, better = n < most ? n : most;
  for (uint32_t i = 0; i < keeping; i++) {
    keep_totals(&b[n + i], &order[0]->at, totals_kept[i]);
    order[better + i] = &b[n + i];
  }
  const uint32_t second = better + keeping, paid = n < N_SECOND_STAGE ? n : N_SECOND_STAGE;
  for (uint32_t i = 0; i < second; i++)
    order[i]->max_ops = ps__budget(s, LOCAL_SEARCH_OPS / 4 / N_SECOND_STAGE * paid / second);
  ps__pool_run(pool, second, branch_task, order);
  qsort(order, better, sizeof *order, by_branch);
  qsort(order + better, keeping, sizeof *order, by_branch);
  const bool kept = keeping && order[better]->at.at.ns > 0;
  if (kept) /* the best of both kinds: with all rounds their order may change */
    order[1] = order[better];
  const uint32_t few = kept || better > 1 ? N_LAST_STAGE : better,
                 paid_last = n < N_LAST_STAGE ? n : N_LAST_STAGE;
  for (uint32_t i = 0; i < few; i++) {
    with_all_rounds(order[i]);
    order[i]->max_ops = order[i]->max_ops * paid_last / few;
  }
  ps__pool_run(pool, few, branch_task, order);
  ps__pool_destroy(pool);
  bool confirmed = false;
  for (uint32_t i = 0; i < n_all; i++) {
    if (b[i].status != PS_OK)
      return ps__fail(b[i].status, "%s", b[i].why);
    s->out->n_feasible += b[i].out.n_feasible;
    confirmed |= b[i].s->whole && b[i].s->best[0].ns > 0;
  }
  if (confirmed)
    memset(s->best, 0, sizeof s->best);
  for (uint32_t i = 0; i < n_all; i++)
    for (uint32_t k = 0; b[i].s->whole == confirmed && k < PS__N_BEST && b[i].s->best[k].ns > 0;
         k++)
      ps__note_best(s, b[i].s->best[k].ns, &b[i].s->best[k].candidate);
  return PS_OK;
}

/* The starting points: the fastest candidates, but at most STARTS_A_ROUND with the same number of
 * tokens a round. The gain of the local search differs most between numbers of tokens a round:
 * small rounds add up the most gradients, and no candidate lets contributions wait or moves
 * updates. */
static uint32_t find_starts(const ps__search *s, const ps__fastest *out[N_STARTS]) {
  uint64_t tokens[N_STARTS];
  uint32_t n = 0;
  for (const ps__fastest *f = s->fastest; f < s->fastest + 2 * PS__MAX_MICROBATCHES && f->ns > 0 &&
                                          f->ns < START_MOST_SLOWER * s->best[0].ns && n < N_STARTS;
       f++) {
    const ps__layout *l = &s->space.microbatch[f->candidate.microbatch].layout;
    uint32_t like = 0;
    tokens[n] = l->chunk_tokens * l->chunks_per_round;
    for (uint32_t i = 0; i < n; i++)
      like += tokens[i] == tokens[n];
    if (like < STARTS_A_ROUND)
      out[n++] = f;
  }
  return n;
}

ps_status ps__local_search(ps__search *s) {
  branch b[N_STARTS + N_KEEPING] = {0};
  const ps__fastest *from[N_STARTS];
  ps_status st = PS_OK;
  ps__evaluation_arrays_free(&s->arrays);
  qsort(s->fastest, sizeof s->fastest / sizeof *s->fastest, sizeof *s->fastest, by_ns);
  const uint32_t n_starts = find_starts(s, from), most = n_starts + n_keeping(s);
  uint32_t n = 0;
  for (; n < most; n++) {
    b[n].s = ps__malloc(sizeof *s);
    if (!b[n].s) {
      st = ps__fail(PS_ENOMEM, "out of memory for the search");
      break;
    }
    *b[n].s = *s; /* the search space is shared and not written to */
    b[n].s->arrays = (ps__evaluation_arrays){0};
    if (n < n_starts)
      b[n].at.at = *from[n];
    b[n].s->out = &b[n].out;
    b[n].s->n_ops = 0;
  }
  if (st == PS_OK)
    st = search_branches(s, b, n_starts);
  for (uint32_t i = 0; i < n; i++)
    ps__free(b[i].s);
  return st;
}
