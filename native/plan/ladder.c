/* ladder.c - the searches of a plan, and which of the plans that they find is taken.
 *
 * What a search of limited length finds depends on its caps. So there is one under the plan's caps,
 * one among each other kind of candidates (ps__kind_of()), and one under the next lower cap of a
 * ladder at each place. All of them find their fastest candidates (search.c), which is a small
 * part of a search. The most promising go on to plans near those. Of the plans that are nearly as
 * fast as the fastest one the most robust is taken: the one that loses least where the host is
 * slower than measured. */
#include "hardware/hardware_impl.h"
#include "plan/evaluate.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a plan for less is a plan for more ------------------------------------------------------ */

/* The cap ladder: 2^k and 3 * 2^k bytes, the same for all plans. The largest cap of it below @cap;
 * 0: none. */
static uint64_t ladder_cap_below(uint64_t cap) {
  for (uint32_t k = 62; k-- > 0 && cap != UINT64_MAX;) {
    if (3ull << k < cap)
      return 3ull << k;
    if (2ull << k < cap)
      return 2ull << k;
  }
  return 0;
}

/* A search under caps of its own, or among candidates of one kind. It runs beside others, so that
 * what it writes is its own. */
typedef struct ladder_search {
  ps__search *s;
  ps__search_result out;
  bool went_on;   /* from its candidates to plans near them; only these compete */
  uint32_t place; /* whose cap is one of the ladder's; PS__N_MEMS: none is */
  uint32_t rank;  /* those with a lower one go on first (choose_varied()) */
  ps_status status;
  char why[256];
} ladder_search;

static ps_status ladder_search_init(ladder_search *r, const ps__search *s,
                                    const uint64_t cap[PS__N_MEMS]) {
  *r = (ladder_search){.s = ps__malloc(sizeof *s), .place = PS__N_MEMS};
  if (!r->s)
    return ps__fail(PS_ENOMEM, "out of memory for the search");
  *r->s = *s;
  r->s->arrays = (ps__evaluation_arrays){0};
  memcpy(r->s->cap, cap, sizeof r->s->cap);
  r->s->out = &r->out;
  r->s->evaluated = ps__calloc(s->space.n_candidates + 1, sizeof *r->s->evaluated);
  return r->s->evaluated ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for the search");
}

static void ladder_search_end(ladder_search *r) {
  if (r->s) {
    ps__evaluation_arrays_free(&r->s->arrays);
    ps__free(r->s->evaluated);
  }
  ps__free(r->s);
  r->s = NULL;
}

static void note_status(ladder_search *r, ps_status status) {
  r->status = status;
  if (status != PS_OK)
    snprintf(r->why, sizeof r->why, "%s", ps_last_error());
}

static void find_candidates_task(void *arg, int64_t i, uint32_t worker) {
  ladder_search *r = (ladder_search *)arg + i;
  (void)worker;
  note_status(r, ps__find_candidates(r->s));
  ps__evaluation_arrays_free(&r->s->arrays);
}

static void find_near_task(void *arg, int64_t i, uint32_t worker) {
  ladder_search *r = ((ladder_search **)arg)[i];
  (void)worker;
  r->went_on = true;
  note_status(r, ps__find_near(r->s));
}

/* The estimate of the best candidate that fits under the caps; 0: none fits. */
static double least_estimate(const ps__search *s, const uint64_t cap[PS__N_MEMS]) {
  for (size_t i = 0; i < s->space.n_candidates; i++) /* sorted */
    if (ps__kind_of(&s->space.candidate[i].keep) == PS__KIND_USUAL &&
        ps__fits_under(s, cap, s->space.candidate[i].bytes))
      return s->space.candidate[i].estimate_ns;
  return 0;
}

enum {
  MAX_LADDER_SEARCHES = PS__N_KINDS + 2 * PS__PINNED_MEM,
  MOST_BUDGETS = 3 /* of a model of 32 layers, for the local searches of a plan */
};
/* A cap of the ladder is searched where the estimates say that it costs at most so much time. */
static const double LADDER_WORTH = 1.02;

/* Among candidates of the other kinds, kind by kind, where there are any. */
static ps_status add_kinds(const ps__search *s, ladder_search r[MAX_LADDER_SEARCHES], uint32_t *n) {
  bool any[PS__N_KINDS] = {false};
  for (size_t i = 0; i < s->space.n_candidates; i++)
    any[ps__kind_of(&s->space.candidate[i].keep)] = true;
  for (int kind = PS__KIND_USUAL + 1; kind < PS__N_KINDS; kind++) {
    if (!any[kind])
      continue;
    PS_TRY(ladder_search_init(&r[(*n)++], s, s->cap));
    r[*n - 1].s->kind = kind;
  }
  return PS_OK;
}

/* Under the ladder's next cap below @above at @place: r->s stays NULL where that is not worth a
 * search. */
static ps_status begin_ladder_search(const ps__search *s, const uint64_t above[PS__N_MEMS],
                                     uint32_t place, ladder_search *r) {
  uint64_t cap[PS__N_MEMS];
  memcpy(cap, above, sizeof cap);
  cap[place] = ladder_cap_below(cap[place]);
  const double most = LADDER_WORTH * least_estimate(s, s->cap),
               here = cap[place] ? least_estimate(s, cap) : 0;
  if (ps__budget(s, 2) > MOST_BUDGETS || here == 0 || here > most)
    return PS_OK;
  PS_TRY(ladder_search_init(r, s, cap));
  r->place = place;
  return PS_OK;
}

/* Whether a search has found the same fastest candidate as the first one. */
static bool finds_the_same(const ladder_search *r, const ladder_search *first) {
  return r->s->best[0].ns > 0 && r->s->best[0].ns == first->s->best[0].ns;
}

/* Searches of a plan, and for each of them one under lower caps. */
typedef struct ladder {
  const ps__search *s;
  ladder_search r[MAX_LADDER_SEARCHES], lower[MAX_LADDER_SEARCHES];
  uint32_t n;
} ladder;

/* A search under a cap of the ladder that finds the same as the first one tells nothing new. So one
 * more begins under the first lower cap that tells something. On the way down most candidates are
 * known. */
static void find_lower_task(void *arg, int64_t i, uint32_t worker) {
  ladder *l = arg;
  ladder_search *r = &l->r[i], *lower = &l->lower[i];
  uint64_t cap[PS__N_MEMS];
  (void)worker;
  if (r->place == PS__N_MEMS || !finds_the_same(r, l->r))
    return;
  memcpy(cap, r->s->cap, sizeof cap);
  for (bool same = true; same;) {
    r->out.n_feasible += lower->out.n_feasible; /* of one that is given up */
    ladder_search_end(lower);
    *lower = (ladder_search){0};
    note_status(r, begin_ladder_search(l->s, cap, r->place, lower));
    if (r->status != PS_OK || !lower->s)
      return;
    memcpy(cap, lower->s->cap, sizeof cap);
    note_status(r, ps__find_candidates(lower->s));
    ps__evaluation_arrays_free(&lower->s->arrays);
    same = r->status == PS_OK && finds_the_same(lower, l->r);
  }
}

/* ---- robust by default ----------------------------------------------------------------------- */

/* A plan may take so many times the fastest one's time where it loses less on a machine whose host
 * memory is slower than measured. */
static const double ROBUST_MOST = 1.01;
/* It must gain so much there, and more than it costs here. */
static const double ROBUST_LEAST_GAIN = 0.005;
enum { N_VARIATIONS = 3, N_FINALISTS = MAX_LADDER_SEARCHES * PS__N_BEST + N_VARIATIONS };

typedef struct finalists {
  uint32_t n;
  ps__fastest of[N_FINALISTS];
} finalists;

/* Of the same cut, as bits depend on it. */
static void add_finalist(finalists *f, const ps__fastest *fastest, const ps__fastest *one) {
  bool known = one->ns == 0 || one->candidate.microbatch != fastest->candidate.microbatch ||
               one->ns > ROBUST_MOST * fastest->ns;
  for (uint32_t i = 0; i < f->n; i++)
    known |= f->of[i].ns == one->ns;
  if (!known)
    f->of[f->n++] = *one;
}

/* The fastest with less offloaded: it recomputes more, and waits less for the host. */
static ps_status add_variations(ps__search *s, finalists *f, const ps__fastest *fastest) {
  static const int less[N_VARIATIONS] = {2, 5, 10};
  const uint32_t n_feasible = s->out->n_feasible; /* of the search alone */
  for (uint32_t i = 0; i < N_VARIATIONS; i++) {
    ps__candidate m = fastest->candidate;
    ps__evaluation e;
    double ns = 0;
    if (m.host < less[i])
      break;
    m.host = (uint8_t)(m.host - less[i]);
    PS_TRY(ps__evaluate_begin(s, &m, &e));
    const ps_status st = ps__evaluate_time(s, &m, &e, &ns);
    ps__evaluation_end(s, &e);
    s->out->n_feasible = n_feasible;
    if (st != PS_OK)
      return st;
    if (ns > ROBUST_MOST * fastest->ns)
      break;
    add_finalist(f, fastest, &(ps__fastest){ns, m});
  }
  return PS_OK;
}

/* Of the plans nearly as fast as the fastest, the one that loses least where host memory and its
 * links are slower. */
static ps_status prefer_robust(ps__search *s, finalists *f) {
  const ps__fastest fastest = s->best[0];
  ps_hardware slow = s->plan->hw;
  double best = 0, first = 0;
  ps__hardware_slow_host(&slow, PS__SLOW_HOST);
  s->whole = true;
  PS_TRY(add_variations(s, f, &fastest));
  for (uint32_t i = 0; i < f->n; i++) {
    double ns;
    PS_TRY(ps__evaluate_on(s, &f->of[i].candidate, &slow, &ns));
    const double gain = first > 0 ? 1 - ns / first : 0, cost = f->of[i].ns / fastest.ns - 1;
    if (i == 0) /* the fastest */
      best = first = ns;
    if (ns >= best || gain < ROBUST_LEAST_GAIN || gain <= cost)
      continue;
    best = ns;
    s->best[0] = f->of[i];
  }
  if (best == first)
    s->best[0] = fastest; /* variations that were evaluated may have been noted before it */
  return PS_OK;
}

/* A search goes on if its candidates take at most so many times the fastest one's time. */
static const double WORTH_GOING_ON = 1.1;
enum { RANK_FIRST, RANK_OTHER, RANK_SAME, RANK_SLOW };

static int by_rank_and_time(const void *pa, const void *pb) {
  const ladder_search *a = *(ladder_search *const *)pa, *b = *(ladder_search *const *)pb;
  if (a->rank != b->rank)
    return a->rank < b->rank ? -1 : 1;
  if (a->s->best[0].ns != b->s->best[0].ns)
    return a->s->best[0].ns < b->s->best[0].ns ? -1 : 1;
  return a < b ? -1 : a > b;
}

static void rank_searches(ladder *l) {
  double least = 0;
  for (uint32_t i = 0; i < l->n; i++) {
    const double ns = l->r[i].s->best[0].ns;
    if (ns > 0 && (least == 0 || ns < least))
      least = ns;
  }
  for (uint32_t i = 0; i < l->n; i++) {
    const double ns = l->r[i].s->best[0].ns;
    l->r[i].rank = i == 0                                                    ? RANK_FIRST
                   : ns == 0 || (l->s->large && ns > WORTH_GOING_ON * least) ? RANK_SLOW
                   : finds_the_same(&l->r[i], l->r)                          ? RANK_SAME
                                                                             : RANK_OTHER;
  }
}

/* How many searches go on from their candidates: in @order, whose first they are. The first search
 * does. Of the others those with the fastest candidates do, as many as there are budgets, and those
 * that found the same as the first one last. Where there is one budget, another kind of candidates
 * has one too if its fastest is faster. */
static uint32_t choose_varied(ladder *l, ladder_search *order[]) {
  uint32_t varied = 1;
  rank_searches(l);
  for (uint32_t i = 0; i < l->n; i++)
    order[i] = &l->r[i];
  qsort(order, l->n, sizeof *order, by_rank_and_time);
  const double first = order[0]->s->best[0].ns;
  for (; varied < l->n && order[varied]->rank < RANK_SLOW; varied++) {
    const bool paid = !l->s->large || ps__budget(l->s, varied + 1) <= MOST_BUDGETS,
               faster = varied == 1 && (first == 0 || order[1]->s->best[0].ns < first);
    if (!paid && !faster)
      break;
  }
  return varied;
}

static bool any_failed(const ladder *l) {
  bool failed = false;
  for (uint32_t i = 0; i < l->n; i++)
    failed |= l->r[i].status != PS_OK;
  return failed;
}

/* Has the searches run side by side: first all of them for their fastest candidates, which is a
 * small part of a search, then those that go on from there. Where none of them comes to a plan, the
 * others go on too. */
static ps_status run_ladder(ladder *l) {
  ladder_search *order[MAX_LADDER_SEARCHES];
  ps__pool *pool;
  const uint32_t n = l->n;
  bool found = false;
  PS_TRY(ps__pool_create(
      &pool, l->s->plan->most_workers ? 1 : ps__search_space_workers(&l->s->space, n), "ladder"));
  ps__pool_run(pool, n, find_candidates_task, l->r);
  if (!any_failed(l))
    ps__pool_run(pool, n, find_lower_task, l);
  for (uint32_t i = 0; i < n; i++)
    if (l->lower[i].s) {
      l->r[l->n] = l->lower[i];
      l->r[l->n].s->out = &l->r[l->n].out;
      l->n++;
    }
  for (uint32_t begun = 0, end; !any_failed(l) && !found && begun < l->n; begun = end) {
    end = begun == 0 ? choose_varied(l, order) : l->n;
    ps__pool_run(pool, end - begun, find_near_task, order + begun);
    for (uint32_t i = begun; i < end; i++)
      found |= order[i]->s->best[0].ns > 0;
  }
  ps__pool_destroy(pool);
  return PS_OK;
}

static ps_status ladder_init(ladder *l, const ps__search *s) {
  l->s = s;
  PS_TRY(ladder_search_init(&l->r[l->n++], s, s->cap));
  PS_TRY(add_kinds(s, l->r, &l->n));
  for (uint32_t place = 0; place <= PS__HOST_MEM && s->large; place++) {
    const ps_status st = begin_ladder_search(s, s->cap, place, &l->r[l->n]);
    l->n += l->r[l->n].s != NULL;
    PS_TRY(st);
  }
  return PS_OK;
}

/* What the searches of a plan found: 30 KB, and stacks may be small. */
typedef struct all_found {
  ladder l;
  ps__fastest plan[MAX_LADDER_SEARCHES * PS__N_BEST];
  finalists f;
} all_found;

static ps_status take_found(ps__search *s, all_found *a) {
  ps_status st = ladder_init(&a->l, s);
  if (st == PS_OK)
    st = run_ladder(&a->l);
  for (uint32_t i = 0; i < a->l.n; i++) {
    ladder_search *r = &a->l.r[i];
    if (st == PS_OK && r->status != PS_OK)
      st = ps__fail(r->status, "%s", r->why);
    if (st == PS_OK && r->went_on && r->s->best[0].ns > 0 &&
        (s->best[0].ns == 0 || r->s->best[0].ns < s->best[0].ns))
      s->best[0] = r->s->best[0];
    for (uint32_t k = 0; st == PS_OK && r->went_on && k < PS__N_BEST; k++)
      a->plan[i * PS__N_BEST + k] = r->s->best[k];
    s->out->n_feasible += r->out.n_feasible;
    ladder_search_end(r);
  }
  if (st != PS_OK || s->best[0].ns == 0 || !s->large || s->plan->counts_guests)
    return st;
  a->f.of[a->f.n++] = s->best[0];
  for (size_t i = 0; i < MAX_LADDER_SEARCHES * PS__N_BEST; i++)
    add_finalist(&a->f, &s->best[0], &a->plan[i]);
  return prefer_robust(s, &a->f);
}

/* The fastest plan found under the caps, among candidates of the other kinds, and under the caps
 * with a lower cap of the ladder at one place after the other; or one nearly as fast that is more
 * robust. Where more memory gains a step little, the search under less may find the faster plan,
 * which fits here too. */
static ps_status find_on_ladder(ps__search *s) {
  all_found *a = ps__calloc(1, sizeof *a);
  if (!a)
    return ps__fail(PS_ENOMEM, "out of memory for the searches of a plan");
  const ps_status st = take_found(s, a);
  ps__free(a);
  return st;
}

/* -- all searches of a plan -------------------------------------------------------------------- */

static ps_status keep_best(ps__search *s) {
  ps_plan *plan = s->plan;
  const ps__layout *l = &s->space.microbatch[s->best[0].candidate.microbatch].layout;
  PS_TRY(ps__layout_init(&plan->layout, plan->cfg.seq_len,
                         plan->cfg.tokens_per_step / plan->cfg.seq_len, l->chunk_tokens,
                         l->chunks_per_round, l->first_round_chunks, l->first_rounds));
  return ps__candidate_spec(&s->space, &s->best[0].candidate, &plan->layout, &plan->spec);
}

static ps_status search(ps_plan *plan, ps__memo *memo, bool sizes_only, double below_ns,
                        ps__search_result *out) {
  memset(out, 0, sizeof *out);
  ps__search *s = ps__calloc(1, sizeof *s);
  if (!s)
    return ps__fail(PS_ENOMEM, "out of memory for the search");
  const ps_hardware *hw = &plan->hw;
  s->plan = plan;
  s->memo = memo;
  s->out = out;
  s->below_ns = below_ns;
  ps__held_init(s);
  ps__search_watch watch = {.fn = plan->cfg.progress, .user = plan->cfg.progress_user};
  pthread_mutex_init(&watch.lock, NULL);
  s->watch = &watch;
  const ps__caps caps = ps__plan_caps(plan);
  for (uint32_t i = 0; i < PS__N_MEMS; i++)
    s->cap[i] = plan->room.given ? plan->room.used[i] : caps.holds[i] ? caps.holds[i] : UINT64_MAX;
  if (plan->all_pinned)
    s->cap[PS__PINNED_MEM] = UINT64_MAX;
  s->machine = hw->host_memory_bytes ? hw->host_memory_bytes : UINT64_MAX;
  const uint64_t host = s->cap[PS__HOST_MEM], there = host < s->machine ? host : s->machine;
  ps_status st = ps__search_space_init(&s->space, plan, sizes_only ? 0 : there, &plan->hooks);
  out->n_candidates = (uint32_t)s->space.n_candidates;
  s->prune = true;
  if (st == PS_OK && !sizes_only) {
    ps__sort_by_estimate(s);
    s->large = ps__search_space_is_large(&s->space);
  }
  if (st == PS_OK && s->large && !plan->counts_guests) /* guests need all rounds */
    st = ps__search_space_shorten(&s->space);
  if (st == PS_OK)
    st = sizes_only ? ps__find_smallest_under(s) : find_on_ladder(s);
  if (st == PS_OK && s->best[0].ns > 0)
    st = keep_best(s);
  if (st == PS_OK)
    out->step_ns = s->best[0].ns;
  ps__evaluation_arrays_free(&s->arrays);
  ps__search_space_free(&s->space);
  pthread_mutex_destroy(&watch.lock);
  ps__free(s);
  return st;
}

ps_status ps__find_plan(ps_plan *plan, ps__memo *memo, double below_ns, ps__search_result *out) {
  return search(plan, memo, false, below_ns, out);
}

ps_status ps__find_smallest(ps_plan *plan, ps__memo *memo, ps__search_result *out) {
  return search(plan, memo, true, 0, out);
}
