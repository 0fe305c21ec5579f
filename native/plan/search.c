/* search.c - one search: the fastest candidates under the caps in the search space (candidates.h),
 * and the fastest plan near them (local_search.c). A plan has several searches (ladder.c).
 *
 * The search space does not depend on the caps, so a larger cap only admits more candidates: where
 * all are evaluated, more memory never gives a slower plan.
 *
 * Candidates are evaluated best estimate first. Before that one of each configuration is evaluated,
 * which tells how far off the configuration's estimates are. An evaluation costs more from stage to
 * stage, and each stage rules candidates out before the next: the bounds, emission, the bytes alive
 * at once, the memory map, the simulation. A candidate whose bound is no better than the best
 * simulated plan is passed over.
 *
 * A large search space has a budget (MAX_OPS for 32 layers). Its steps are evaluated with fewer
 * rounds, the local search varies the best, and the fastest few are evaluated with all rounds. */
#include "plan/evaluate.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ops emitted and simulated at most in one search, over all evaluations: some seconds (ps__budget()
 * for deep models). Where a search space needs more, the search gives the best of what it
 * evaluated. Those are long steps of deep models on machines where nothing is hidden. */
static const uint64_t MAX_OPS = 1200000;
/* From here on a candidate is passed over if the slack of those like it says that it does not
 * fit. */
static const uint64_t PRUNE_OPS = 400000;
/* Where a plan must be faster than another one, the fastest candidate is varied if its time is
 * below so many times that plan's. */
static const double WORTH_VARYING = 1.05;
enum { TRIES = 6 }; /* candidates of a configuration that are evaluated to find one that fits */

/* ---- the fastest ----------------------------------------------------------------------------- */

static int by_estimate(const void *pa, const void *pb) {
  const ps__candidate *a = pa, *b = pb;
  if (a->estimate_ns != b->estimate_ns)
    return a->estimate_ns < b->estimate_ns ? -1 : 1;
  if (a->microbatch != b->microbatch)
    return a->microbatch < b->microbatch ? -1 : 1;
  if (a->residency != b->residency)
    return a->residency < b->residency ? -1 : 1;
  if (a->ahead != b->ahead)
    return a->ahead > b->ahead ? -1 : 1;
  if (a->device != b->device)
    return a->device > b->device ? -1 : 1;
  return a->host < b->host ? -1 : a->host > b->host;
}

void ps__sort_by_estimate(ps__search *s) {
  qsort(s->space.candidate, s->space.n_candidates, sizeof *s->space.candidate, by_estimate);
}

typedef struct ranked {
  double ns;
  uint32_t idx;
} ranked;
static int by_rank(const void *pa, const void *pb) {
  const ranked *a = pa, *b = pb;
  if (a->ns != b->ns)
    return a->ns < b->ns ? -1 : 1;
  return a->idx < b->idx ? -1 : a->idx > b->idx;
}

/* Adds to a bound what evaluated candidates took beyond theirs. It is the same within a few percent
 * for candidates that differ in their parts on the device and host alone. What an arena is rounded
 * up by is not: it may be all of a small model's slack. */
static void add_slack(const ps__search *s, const ps__candidate *m, uint64_t bytes[PS__N_MEMS]) {
  const uint64_t rounding = ps__arena_round(1);
  for (uint32_t i = 0; s->prune && (s->large || s->n_ops > PRUNE_OPS) && i < PS__N_MEMS; i++) {
    const uint64_t slack = s->slack[m->microbatch][m->residency][m->ahead][i];
    bytes[i] += (slack > rounding ? slack - rounding : 0) / 20 * 19;
  }
}

/* Whether the candidate's bound says that it is no faster than the plan of another layout; than
 * that or the best so far. */
static bool is_too_slow(const ps__search *s, const ps__candidate *m) {
  return s->below_ns > 0 && m->bound_ns >= s->below_ns;
}
static bool cannot_win(const ps__search *s, const ps__candidate *m) {
  return is_too_slow(s, m) || (s->best[0].ns > 0 && m->bound_ns >= s->best[0].ns);
}

static bool cannot_fit(const ps__search *s, const ps__candidate *m) {
  uint64_t bytes[PS__N_MEMS];
  memcpy(bytes, m->bytes, sizeof bytes);
  if (ps__kind_of(&m->keep) != s->kind)
    return true;
  ps__hold_all_that_fit(s, m, bytes, false);
  if (!ps__fits(s, bytes))
    return true;
  memcpy(bytes, m->bytes, sizeof bytes);
  add_slack(s, m, bytes);
  ps__hold_all_that_fit(s, m, bytes, s->prune);
  return !ps__fits(s, bytes);
}

static void note_slack(ps__search *s, const ps__candidate *m, const ps__evaluation *e) {
  const uint64_t *bytes = m->bytes;
  uint64_t taken[PS__N_MEMS];
  memcpy(taken, e->bytes, sizeof taken);
  ps__without_held(s, m, taken);
  for (uint32_t i = 0; i < PS__N_MEMS; i++) {
    uint64_t *slack = &s->slack[m->microbatch][m->residency][m->ahead][i],
             now = taken[i] > bytes[i] ? taken[i] - bytes[i] : 0;
    if (*slack == 0 || now < *slack)
      *slack = now;
  }
}

static void note_fastest(ps__search *s, double ns, const ps__candidate *m) {
  ps__fastest *fastest = &s->fastest[2 * m->microbatch + (m->keep.params > 0)];
  if (ns > 0 && (fastest->ns == 0 || ns < fastest->ns))
    *fastest = (ps__fastest){ns, *m};
}

static ps_status evaluate(ps__search *s, const ps__candidate *from, double *out_ns) {
  ps__evaluation e;
  ps__candidate own = *from, *m = &own; /* searches that run at once share the search space */
  uint64_t bytes[PS__N_MEMS];
  s->evaluated[from - s->space.candidate] = 1;
  memcpy(bytes, m->bytes, sizeof bytes);
  add_slack(s, m, bytes);
  m->held = ps__blocks_to_hold(s, 0, bytes);
  PS_TRY(ps__evaluate_holding(s, m, &e));
  note_slack(s, m, &e);
  const ps_status st = ps__evaluate_time(s, m, &e, out_ns);
  ps__evaluation_end(s, &e);
  note_fastest(s, *out_ns, m);
  return st;
}

/* Of each configuration, evaluates the candidate of the best estimate that fits: it tells how far
 * off the configuration's estimates are. */
static ps_status evaluate_microbatches(ps__search *s) {
  double factor[PS__MAX_MICROBATCHES] = {0}, worst = 1;
  uint32_t tries[PS__MAX_MICROBATCHES] = {0};
  for (size_t i = 0; i < s->space.n_candidates && s->n_ops < ps__budget(s, MAX_OPS / 2); i++) {
    ps__candidate *m = &s->space.candidate[i];
    double ns = 0;
    if (factor[m->microbatch] > 0 || tries[m->microbatch] == TRIES || cannot_fit(s, m) ||
        is_too_slow(s, m))
      continue;
    tries[m->microbatch]++;
    PS_TRY(evaluate(s, m, &ns));
    if (ns > 0)
      factor[m->microbatch] = ns / m->estimate_ns;
    if (factor[m->microbatch] > worst)
      worst = factor[m->microbatch];
  }
  for (uint32_t i = 0; i < PS__MAX_MICROBATCHES; i++)
    s->factor[i] = factor[i] > 0 ? factor[i] : worst;
  return PS_OK;
}

/* The same in a ring. Bounds of device memory lack what several rounds have on its way at once,
 * some GiB: candidates in the order of their estimates would not fit for long. So the candidate of
 * the best estimate gets as many parts on the device as fit. */
static ps_status evaluate_rings(ps__search *s) {
  bool begun[PS__MAX_MICROBATCHES] = {0};
  for (uint32_t i = 0; i < PS__MAX_MICROBATCHES; i++)
    s->factor[i] = 1;
  for (size_t i = 0; i < s->space.n_candidates && s->n_ops < ps__budget(s, MAX_OPS / 2); i++) {
    ps__candidate m = s->space.candidate[i];
    ps__evaluation e;
    double ns;
    uint64_t bytes[PS__N_MEMS];
    memcpy(bytes, m.bytes, sizeof bytes);
    ps__hold_all_that_fit(s, &m, bytes, false);
    if (begun[m.microbatch] || !ps__fits(s, bytes) || is_too_slow(s, &m))
      continue;
    begun[m.microbatch] = true;
    m.held = ps__blocks_to_hold(s, 0, m.bytes);
    PS_TRY(ps__evaluate_begin(s, &m, &e));
    uint64_t taken = e.bytes[PS__DEVICE_MEM];
    ps__evaluation_end(s, &e);
    PS_TRY(ps__fill_device(s, &m, taken, &ns, &taken));
    note_fastest(s, ns, &m);
    if (ns > 0)
      s->factor[m.microbatch] = ns / m.estimate_ns;
  }
  return PS_OK;
}

/* Whether the step is slower than the best one even if it kept all saved activations on the device.
 * Many candidates differ in nothing else, and share what this costs.
 *
 * Each op of that step has one in the candidate's step on the same stream, with the same arguments
 * and the same work:
 *   - the forward, head and backward ops of all chunks, the batch, losses, contributions, sums and
 *     updates do not depend on policies;
 *   - an op that it recomputes is one whose results are never saved, or are needed by those alone:
 *     the candidate saves no more, so it recomputes it too;
 *   - it fetches parameters where they are not there. Blocks are kept across rounds while what is
 *     saved on the device has room for them, which is the most here, and nothing else of a layer
 *     pass's fetches depends on policies.
 * What an op costs alone, and what it takes of shared resources, follows from its stream, arguments
 * and work. So with any number of threads for sums each stream and each resource works as much in
 * the candidate's step, or more, and ps__least_ns() is no less.
 *
 * A block that holds its state is the exception: how many do follows from the bytes, and its update
 * may leave the busiest stream. */
static ps_status is_slower_in_any_case(ps__search *s, const ps__candidate *m, bool *out) {
  double *least = &s->least_ns[m->microbatch][m->residency][m->ahead];
  *out = false;
  if (!s->winners_only || s->best[0].ns == 0 || s->plan->holds)
    return PS_OK;
  if (*least == 0) {
    const uint64_t n_ops = s->n_ops; /* not of the budget: no search ends earlier by it */
    ps__candidate all = *m;
    ps__evaluation e;
    all.device = PS__SAVED_PARTS;
    all.host = 0;
    PS_TRY(ps__evaluate_begin(s, &all, &e));
    *least = e.known.least_ns;
    ps__evaluation_end(s, &e);
    s->n_ops = n_ops;
  }
  *out = *least >= s->best[0].ns;
  return PS_OK;
}

/* The next candidate in an order that is worth an evaluation; NULL: none is left. */
static ps_status next_of(ps__search *s, const ranked *order, size_t *at, ps__candidate **out) {
  const ps__search_space *sp = &s->space;
  *out = NULL;
  while (!*out && *at < sp->n_candidates) {
    ps__candidate *m = &sp->candidate[order[(*at)++].idx];
    bool slower;
    if ((s->evaluated[m - sp->candidate] && s->prune) || cannot_win(s, m) || cannot_fit(s, m))
      continue;
    PS_TRY(is_slower_in_any_case(s, m, &slower));
    *out = slower ? NULL : m;
  }
  return PS_OK;
}

/* In the order of the estimates and, in turn, of the estimates times the factor of their
 * configuration: where one order is wrong the other may not be. */
static ps_status find_fastest(ps__search *s) {
  ps__search_space *sp = &s->space;
  ranked *order[2];
  size_t at[2] = {0};
  s->n_ops = 0;
  s->winners_only = false; /* of each configuration one is simulated, however slow */
  PS_TRY(ps__is_ring(s->plan) && s->large ? evaluate_rings(s) : evaluate_microbatches(s));
  order[0] = ps__malloc(2 * (sp->n_candidates + 1) * sizeof *order[0]);
  if (!order[0])
    return ps__fail(PS_ENOMEM, "out of memory for the order of %zu plans", sp->n_candidates);
  order[1] = order[0] + sp->n_candidates;
  for (size_t i = 0; i < sp->n_candidates; i++) {
    order[0][i] = (ranked){sp->candidate[i].estimate_ns * s->factor[sp->candidate[i].microbatch],
                           (uint32_t)i};
    order[1][i] = (ranked){sp->candidate[i].estimate_ns, (uint32_t)i};
  }
  qsort(order[0], sp->n_candidates, sizeof *order[0], by_rank);
  ps_status st = PS_OK;
  s->winners_only = !s->large; /* a large search varies slower ones, too */
  for (uint32_t turn = 0, idle = 0;
       st == PS_OK && idle < 2 &&
       s->n_ops <= ps__budget(s, s->best[0].ns > 0 ? MAX_OPS : 4 * MAX_OPS);
       turn ^= 1) {
    ps__candidate *m;
    double ns;
    st = next_of(s, order[turn], &at[turn], &m);
    idle = m ? 0 : idle + 1;
    if (st == PS_OK && m)
      st = evaluate(s, m, &ns);
  }
  ps__free(order[0]);
  return st;
}

typedef struct keyed {
  uint64_t key;
  uint32_t idx;
} keyed;
static int by_key(const void *pa, const void *pb) {
  const keyed *a = pa, *b = pb;
  if (a->key != b->key)
    return a->key < b->key ? -1 : 1;
  return a->idx < b->idx ? -1 : a->idx > b->idx;
}

/* With several devices a candidate with as many units in pieces as may be, or with none, whichever
 * the search space has not: one of the two takes the fewest ops, and so the least memory. */
static bool other_links(const ps__search *s, const ps__candidate *m, ps__candidate *out) {
  *out = *m;
  out->from_host = ps__from_host_first(s->plan) ? 0 : PS__UNIT_PARTS;
  return ps__may_take_pieces(s->plan) && m->from_host != out->from_host;
}

static ps_status evaluate_own(ps__search *s, ps__candidate *m) {
  ps__evaluation e;
  double ns;
  PS_TRY(ps__evaluate_begin(s, m, &e));
  const ps_status st = ps__evaluate_time(s, m, &e, &ns); /* notes it where it is faster */
  ps__evaluation_end(s, &e);
  return st;
}

/* Where no evaluated candidate fits: those that take the least device memory, until one fits. */
static ps_status find_any_that_fits(ps__search *s) {
  const size_t n = s->space.n_candidates;
  keyed *order = ps__malloc((n + 1) * sizeof *order);
  ps_status st = order ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for the order of %zu plans", n);
  for (size_t i = 0; st == PS_OK && i < n; i++)
    order[i] = (keyed){s->space.candidate[i].bytes[PS__DEVICE_MEM], (uint32_t)i};
  if (st == PS_OK)
    qsort(order, n, sizeof *order, by_key);
  s->n_ops = 0;
  s->prune = true;
  for (size_t i = 0;
       st == PS_OK && i < n && s->best[0].ns == 0 && s->n_ops <= ps__budget(s, 4 * MAX_OPS); i++) {
    ps__candidate *m = &s->space.candidate[order[i].idx];
    ps__candidate other;
    double ns;
    if (cannot_fit(s, m))
      continue;
    st = evaluate(s, m, &ns);
    if (st == PS_OK && s->best[0].ns == 0 && other_links(s, m, &other))
      st = evaluate_own(s, &other);
  }
  ps__free(order);
  return st;
}

/* The fastest plans, evaluated with all their rounds: shorter steps tell time and memory nearly,
 * and the fastest may not fit by a little. */
static ps_status confirm_best(ps__search *s) {
  ps__fastest few[PS__N_BEST];
  memcpy(few, s->best, sizeof few);
  memset(s->best, 0, sizeof s->best);
  s->whole = true;
  for (uint32_t i = 0, n_confirmed = 0; i < PS__N_BEST && few[i].ns > 0 && n_confirmed < 2; i++) {
    ps__evaluation e;
    double ns;
    PS_TRY(ps__evaluate_holding(s, &few[i].candidate, &e));
    const ps_status st = ps__evaluate_time(s, &few[i].candidate, &e, &ns);
    ps__evaluation_end(s, &e);
    if (st != PS_OK)
      return st;
    n_confirmed += ns > 0;
  }
  return PS_OK;
}

/* Spends host memory that is left on contributions that wait longer to be added. The simulation may
 * gain nothing by it. But a host stream that is slower than predicted then falls behind without
 * holding anything back. Never at the cost of time: a plan for less memory would then be faster.
 * Only of a cap that was given: without one nobody offered all that the machine has. */
static ps_status spend_host(ps__search *s) {
  const double most_ns = s->best[0].ns;
  const int layers = s->plan->model->cfg.n_layers < 255 ? (int)s->plan->model->cfg.n_layers : 255;
  for (int by = 16; by > 0 && s->best[0].ns > 0 && s->cap[PS__HOST_MEM] != UINT64_MAX; by /= 2) {
    const ps__fastest before = s->best[0];
    ps__candidate m = before.candidate;
    ps__evaluation e;
    double ns;
    if (m.sums + by > layers ||
        (s->space.microbatch[m.microbatch].layout.n_rounds == 1 && !m.keep.passing))
      continue;
    m.sums = (uint8_t)(m.sums + by);
    PS_TRY(ps__evaluate_begin(s, &m, &e));
    const ps_status st = ps__evaluate_time(s, &m, &e, &ns);
    ps__evaluation_end(s, &e);
    if (st != PS_OK)
      return st;
    s->best[0] = ns > 0 && ns <= most_ns ? (ps__fastest){ns, m} : before;
  }
  return PS_OK;
}

/* With several devices in a small search space: how many units come whole from the host, and how
 * many in pieces, of which each device brings one. The local search of a large space varies the
 * same. */
static ps_status choose_links(ps__search *s) {
  const ps_plan *plan = s->plan;
  const bool pieces = ps__may_take_pieces(plan);
  const int way = ps__from_host_first(plan) ? -1 : 1;
  for (int by = PS__UNIT_PARTS; pieces && by > 0 && s->best[0].ns > 0; by /= 2) {
    ps__candidate m = s->best[0].candidate;
    const int to = m.from_host + way * by;
    if (to < 0 || to > PS__UNIT_PARTS)
      continue;
    m.from_host = (uint8_t)to;
    PS_TRY(evaluate_own(s, &m));
  }
  return PS_OK;
}

/* ---- the smallest ---------------------------------------------------------------------------- */

static uint64_t beyond(const ps__search *s, const uint64_t bytes[PS__N_MEMS]) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < PS__N_MEMS; i++)
    sum += bytes[i] > s->cap[i] ? bytes[i] - s->cap[i] : 0;
  return sum;
}

/* Whether @bytes are smaller at @place than any plan's before, within the other places' caps. */
static bool is_smallest(const ps__search *s, const uint64_t bytes[PS__N_MEMS], uint32_t place) {
  const uint64_t least = s->out->smallest[place];
  for (uint32_t i = 0; i < PS__N_MEMS; i++)
    if (i != place && bytes[i] > s->cap[i])
      return false;
  return ps__host_taken(s, bytes) <= s->machine && (least == 0 || bytes[place] < least);
}

static void note_smallest(ps__search *s, const uint64_t bytes[PS__N_MEMS]) {
  ps__search_result *r = s->out;
  for (uint32_t i = 0; i < PS__N_MEMS; i++)
    if (is_smallest(s, bytes, i))
      r->smallest[i] = bytes[i];
  if (r->any[0] == 0 || beyond(s, bytes) < s->best_miss) {
    memcpy(r->any, bytes, sizeof r->any);
    s->best_miss = beyond(s, bytes);
  }
}

/* In place of a place: the nearest to all caps, where no cap alone is enough. */
enum { NEAREST = PS__N_MEMS };

/* Whether a candidate that takes at least @bytes could be the smallest at @place. */
static bool could_be_smallest(const ps__search *s, uint32_t place,
                              const uint64_t bytes[PS__N_MEMS]) {
  return place == NEAREST ? s->out->any[0] == 0 || beyond(s, bytes) < s->best_miss
                          : is_smallest(s, bytes, place);
}

/* A candidate that fits under both caps becomes the plan: the search for the fastest ended before
 * it came to one. */
static ps_status evaluate_bytes(ps__search *s, uint32_t place, const ps__candidate *m) {
  ps__candidate own = *m;
  double ns;
  ps__evaluation e;
  uint64_t bytes[PS__N_MEMS];
  memcpy(bytes, m->bytes, sizeof bytes);
  add_slack(s, m, bytes);
  if (!could_be_smallest(s, place, bytes))
    return PS_OK;
  PS_TRY(ps__evaluate_begin(s, m, &e));
  note_slack(s, m, &e);
  ps_status st = could_be_smallest(s, place, e.bytes) ? ps__evaluate_map(s, &e) : PS_OK;
  if (st == PS_OK && e.mapped)
    note_smallest(s, e.bytes);
  if (st == PS_OK && e.mapped && s->best[0].ns == 0 && ps__fits(s, e.bytes))
    st = ps__evaluate_time(s, &own, &e, &ns);
  ps__evaluation_end(s, &e);
  return st;
}

static ps_status evaluate_bytes_of_both(ps__search *s, uint32_t place, const ps__candidate *m) {
  ps__candidate other;
  PS_TRY(evaluate_bytes(s, place, m));
  return other_links(s, m, &other) ? evaluate_bytes(s, place, &other) : PS_OK;
}

/* In the order of the bytes in @space, the least first: what is found early rules out most of the
 * rest. */
static ps_status find_smallest_at(ps__search *s, uint32_t place, uint32_t space, keyed *order) {
  const size_t n = s->space.n_candidates;
  ps_status st = PS_OK;
  for (size_t i = 0; i < n; i++)
    order[i] = (keyed){s->space.candidate[i].bytes[space], (uint32_t)i};
  qsort(order, n, sizeof *order, by_key);
  s->n_ops = 0;
  for (size_t i = 0; st == PS_OK && i < n && s->n_ops <= ps__budget(s, 2 * MAX_OPS); i++)
    st = evaluate_bytes_of_both(s, place, &s->space.candidate[order[i].idx]);
  return st;
}

ps_status ps__find_smallest_under(ps__search *s) {
  keyed *order = ps__malloc((s->space.n_candidates + 1) * sizeof *order);
  ps_status st = order ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for the smallest plan");
  bool found = false;
  for (uint32_t place = 0; st == PS_OK && place < PS__N_MEMS; place++) {
    if (place == PS__PINNED_MEM && s->cap[place] == UINT64_MAX)
      continue;
    st = find_smallest_at(s, place, place, order);
    found |= s->out->smallest[place] != 0;
  }
  for (uint32_t space = 0; st == PS_OK && !found && space <= PS__HOST_MEM; space++)
    st = find_smallest_at(s, NEAREST, space, order);
  ps__free(order);
  return st;
}

/* Whether another plan leaves room for the candidates that were found, once they are varied. */
static bool is_worth_varying(const ps__search *s) {
  return s->best[0].ns > 0 && (s->below_ns == 0 || s->best[0].ns < WORTH_VARYING * s->below_ns);
}

ps_status ps__find_candidates(ps__search *s) {
  if (s->below_ns > 0) {
    s->prune = true;
    PS_TRY(find_fastest(s));
    if (!is_worth_varying(s))
      return PS_OK;
  }
  for (int pass = 0; pass < 2 && s->best[0].ns == 0; pass++) {
    s->prune = pass == 0; /* the second pass finds what fits by a little */
    PS_TRY(find_fastest(s));
  }
  return s->best[0].ns > 0 ? PS_OK : find_any_that_fits(s);
}

ps_status ps__find_near(ps__search *s) {
  if (!is_worth_varying(s))
    return PS_OK;
  if (!s->large)
    return choose_links(s);
  PS_TRY(ps__local_search(s));
  PS_TRY(confirm_best(s));
  PS_TRY(spend_host(s));
  return s->best[0].ns > 0 ? PS_OK : find_fastest(s); /* now with all their rounds */
}
