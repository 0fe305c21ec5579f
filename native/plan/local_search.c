/* refine.c - from the fastest members of a large family on: what lies between the members. */
#include "plan/evaluate.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Ops emitted and simulated at most, over all starts (ps__budget() for deep models). */
static const uint64_t REFINE_OPS = 8000000;
static const double MOST_SLOWER = 1.15; /* than the fastest, before refining */
/* Starts, of a number of tokens a round at most A_ROUND, that share the first quarter of them;
 * the better ones share the second; the best, with all rounds of a step, the rest. Side by side
 * where there are CPUs. */
enum { A_ROUND = 2, N_REFINED = 8, N_BETTER = 4, N_FINISHED = 2 };

/* What refining changes, a part at a time: see ps__member. The share on the device follows: it
 * takes what the cap leaves. */
enum {
  MOVE_HOST,
  MOVE_PARAMS,
  MOVE_GRADS,
  MOVE_EXTRA,
  MOVE_STREAMED,
  MOVE_SPLIT,
  MOVE_SUMS,
  MOVE_HEAD,
  MOVE_AHEAD,
  N_MOVES
};

static int n_layers(const ps__search_state *s) {
  return s->plan->model.n_layers < 255 ? (int)s->plan->model.n_layers : 255;
}

static bool moved(const ps__search_state *s, ps__member *m, int what, int by) {
  /* elsewhere the "device" has no processor of its own */
  const bool cuda = s->plan->hw.backend == PS_BACKEND_CUDA;
  const int layers = n_layers(s);
  uint8_t *const field[N_MOVES] = {&m->host,  &m->keep.params, &m->keep.grads,
                                   &m->extra, &m->streamed,    &m->split,
                                   &m->sums,  &m->keep.head,   &m->ahead};
  const int split = layers < 255 ? layers + 1 : 255; /* the head too */
  const int most[N_MOVES] = {PS__SHARES,
                             PS__UNIT_PARTS,
                             PS__UNIT_PARTS,
                             s->family.size[m->size].layout.n_rounds > 1 ? PS__SHARES : 0,
                             cuda ? layers : 0,
                             cuda && s->plan->cfg.clip ? split : 0,
                             layers,
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

/* Gives @m the largest share on the device that fits, as far as a few looks tell, beginning from
 * one that should where a step like it took @taken bytes; what it takes too much of the host it
 * pays with its share there. */
static ps_status fill_device(ps__search_state *s, ps__member *m, uint64_t taken, double *out_ns,
                             uint64_t *out_taken) {
  const double part = ps__family_share_bytes(&s->family, m);
  const uint64_t cap = s->device_cap;
  /* a tiny part: more than an int holds */
  const double room = cap == UINT64_MAX ? PS__SHARES : trunc(((double)cap - (double)taken) / part);
  int share = room > PS__SHARES ? PS__SHARES : room < -PS__SHARES ? -1 : m->device + (int)room;
  *out_ns = 0;
  for (int tries = 0; tries < 4; tries++) {
    ps__look z;
    if (share > PS__SHARES - m->host)
      share = PS__SHARES - m->host;
    if (share < 0)
      return PS_OK;
    m->device = (uint8_t)share;
    PS_TRY(ps__look_emit(s, m, &z));
    const ps_status st = ps__look_time(s, m, &z, out_ns);
    *out_taken = z.bytes[PS__SPACE_DEVICE];
    const uint64_t host = z.bytes[PS__SPACE_HOST];
    ps__look_free(&z);
    if (st != PS_OK || *out_ns > 0)
      return st;
    if (host > s->host_cap) {
      const double over = (double)(host - s->host_cap) / part + 1;
      if (over > m->host)
        return PS_OK;
      m->host -= (uint8_t)over;
    } else
      share--;
  }
  return PS_OK;
}

/* Where a start's refinement is: the plan it is at, the device memory that takes, and the next
 * move to try: by step[@level], @failed of them in a row led nowhere; of the kicks
 * @kicked led nowhere since the last better plan. */
typedef struct walk {
  ps__fastest at;
  uint64_t taken;
  uint32_t level, move, failed, kicked;
  bool begun;
} walk;

static const int step[] = {6, 2, 1};
/* From where no step leads on: decisions that are good together are passed by one step at a
 * time, such as contributions that wait while sums run on fewer threads. */
static const struct {
  int what, by;
} kicks[] = {{MOVE_SUMS, 14},  {MOVE_EXTRA, 24},   {MOVE_PARAMS, 8},
             {MOVE_HOST, -10}, {MOVE_STREAMED, 8}, {MOVE_SUMS, -14}};
enum { N_LEVELS = 3, N_KICKS = sizeof kicks / sizeof *kicks };

/* To @m, where it fits. */
static ps_status try_member(ps__search_state *s, const walk *w, ps__member m, walk *out) {
  const ps__member *from = &w->at.member;
  const double units = (m.keep.params + m.keep.grads - from->keep.params - from->keep.grads) *
                       ps__family_unit_part_bytes(&s->family);
  *out = *w;
  PS_TRY(fill_device(s, &m, (uint64_t)((double)w->taken + units), &out->at.ns, &out->taken));
  out->at.member = m;
  return PS_OK;
}

/* To the next better plan near it, as long as there is one: each decision by larger and then
 * smaller steps, up and down, and further the same way where that was better. */
static ps_status take_step(ps__search_state *s, walk *w) {
  const int what = (int)w->move / 2,
            by = (w->move % 2 ? -1 : 1) * (what >= MOVE_HEAD ? 1 : step[w->level]);
  walk next = {0};
  ps__member m = w->at.member;
  if (!(what >= MOVE_HEAD && w->level > 0) && moved(s, &m, what, by))
    PS_TRY(try_member(s, w, m, &next));
  if (next.at.ns > 0 && (w->at.ns == 0 || next.at.ns < w->at.ns)) {
    *w = next;
    w->failed = 0;
    return PS_OK;
  }
  w->move = (w->move + 1) % (2 * N_MOVES);
  if (++w->failed < 2 * N_MOVES)
    return PS_OK;
  w->level++;
  w->failed = 0;
  return PS_OK;
}

static ps_status take_kick(ps__search_state *s, walk *w) {
  walk next = {0};
  ps__member m = w->at.member;
  const uint32_t k = w->kicked++;
  if (moved(s, &m, kicks[k].what, kicks[k].by))
    PS_TRY(try_member(s, w, m, &next));
  if (next.at.ns == 0)
    return PS_OK;
  next.kicked = w->kicked;
  next.level = next.failed = 0;
  *w = next;
  return PS_OK;
}

/* As it is or, with all its rounds, a little less where that is too much; and, where nothing was
 * refined yet, with what refined plans usually have, updates whole or split, if that is better. */
static ps_status begin(ps__search_state *s, walk *w) {
  const int layers = n_layers(s);
  walk usual = {0};
  ps__member m = w->at.member;
  const ps__layout *l = &s->family.size[m.size].layout;
  w->begun = true;
  PS_TRY(fill_device(s, &w->at.member, s->device_cap, &w->at.ns, &w->taken));
  if (w->taken == 0 || s->whole || m.keep.state || s->plan->hw.backend != PS_BACKEND_CUDA)
    return PS_OK;
  m = w->at.member;
  m.streamed = (uint8_t)(layers / 6);
  m.sums = (uint8_t)(l->n_rounds == 1 ? 0 : layers < 6 ? layers : 6);
  m.extra = l->first_round_chunks > l->chunks_per_round ? PS__SHARES / 2 : 0;
  PS_TRY(try_member(s, w, m, &usual));
  if (usual.at.ns > 0 && (w->at.ns == 0 || usual.at.ns < w->at.ns)) {
    *w = usual;
    m = w->at.member;
  }
  if (!s->plan->cfg.clip)
    return PS_OK;
  m.split = (uint8_t)layers;
  PS_TRY(try_member(s, w, m, &usual));
  if (usual.at.ns > 0 && (w->at.ns == 0 || usual.at.ns < w->at.ns))
    *w = usual;
  return PS_OK;
}

/* On from there until no kick leads to a better plan or @max_ops are used up. */
static ps_status refine(ps__search_state *s, walk *w, uint64_t max_ops) {
  const uint64_t end = s->n_ops + max_ops;
  if (!w->begun)
    PS_TRY(begin(s, w));
  walk best = *w;
  while (w->taken && s->n_ops < end) {
    if (w->level == N_LEVELS) {
      const uint32_t kicked = w->kicked;
      if (kicked == N_KICKS)
        break;
      *w = best;
      w->level = N_LEVELS;
      w->kicked = kicked;
      PS_TRY(take_kick(s, w));
      continue;
    }
    PS_TRY(take_step(s, w));
    if (w->at.ns == 0 || (best.at.ns > 0 && w->at.ns >= best.at.ns))
      continue;
    w->kicked = 0;
    best = *w;
  }
  const uint32_t kicked = w->kicked;
  if (w->at.ns != best.at.ns || w->at.ns == 0)
    *w = best;
  w->kicked = kicked;
  return PS_OK;
}

static int by_ns(const void *pa, const void *pb) {
  const ps__fastest *a = pa, *b = pb;
  if ((a->ns > 0) != (b->ns > 0))
    return a->ns > 0 ? -1 : 1;
  if (a->ns != b->ns)
    return a->ns < b->ns ? -1 : 1;
  if (a->member.size != b->member.size)
    return a->member.size < b->member.size ? -1 : 1;
  return a->member.keep.params < b->member.keep.params
             ? -1
             : a->member.keep.params > b->member.keep.params;
}

/* One size's refinement: a search of its own from there, so that sizes may be refined side by
 * side and how many are at work changes nothing. */
typedef struct branch {
  ps__search_state *s;
  walk at;
  uint64_t max_ops;
  ps__search_result out;
  ps_status status;
  char why[256];
} branch;

static void refine_branch(void *arg, int64_t task, uint32_t worker) {
  branch *b = ((branch **)arg)[task];
  (void)worker;
  b->status = refine(b->s, &b->at, b->max_ops);
  if (b->status != PS_OK)
    snprintf(b->why, sizeof b->why, "%s", ps_last_error());
}

static int by_branch(const void *pa, const void *pb) {
  return by_ns(&(*(branch *const *)pa)->at.at, &(*(branch *const *)pb)->at.at);
}

/* Where a host stream falls behind a little in each round, a few rounds do not show it. */
static void with_all_rounds(branch *b) {
  b->s->whole = true;
  memset(b->s->best, 0, sizeof b->s->best);
  b->at.begun = false;
  b->at.level = b->at.failed = b->at.kicked = 0;
  b->max_ops = ps__budget(b->s, REFINE_OPS / 2 / N_FINISHED);
}

static ps_status refine_all(ps__search_state *s, branch *b, uint32_t n) {
  ps__pool *pool;
  branch *order[N_REFINED];
  const uint32_t few = n < N_FINISHED ? n : N_FINISHED;
  PS_TRY(ps__pool_create(&pool, ps__family_workers(&s->family, n), "search"));
  for (uint32_t i = 0; i < n; i++) {
    order[i] = &b[i];
    b[i].max_ops = ps__budget(s, REFINE_OPS / 4 / N_REFINED);
  }
  ps__pool_run(pool, n, refine_branch, order);
  qsort(order, n, sizeof *order, by_branch);
  const uint32_t better = n < N_BETTER ? n : N_BETTER;
  for (uint32_t i = 0; i < better; i++)
    order[i]->max_ops = ps__budget(s, REFINE_OPS / 4 / N_BETTER);
  ps__pool_run(pool, better, refine_branch, order);
  qsort(order, better, sizeof *order, by_branch);
  for (uint32_t i = 0; i < few; i++)
    with_all_rounds(order[i]);
  ps__pool_run(pool, few, refine_branch, order);
  ps__pool_destroy(pool);
  bool held = false;
  for (uint32_t i = 0; i < n; i++) {
    if (b[i].status != PS_OK)
      return ps__fail(b[i].status, "%s", b[i].why);
    s->out->n_feasible += b[i].out.n_feasible;
    held |= b[i].s->whole && b[i].s->best[0].ns > 0;
  }
  if (held)
    memset(s->best, 0, sizeof s->best);
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t k = 0; b[i].s->whole == held && k < PS__N_BEST && b[i].s->best[k].ns > 0; k++)
      ps__note_best(s, b[i].s->best[k].ns, &b[i].s->best[k].member);
  return PS_OK;
}

/* The fastest members, but of each number of tokens a round A_ROUND at most: what refining gains
 * differs most between these, since small rounds add up the most gradients, and before it none
 * has its contributions wait or its updates elsewhere. */
static uint32_t starts(const ps__search_state *s, const ps__fastest *out[N_REFINED]) {
  uint64_t tokens[N_REFINED];
  uint32_t n = 0;
  for (const ps__fastest *f = s->fastest; f < s->fastest + 2 * PS__MAX_SIZES && f->ns > 0 &&
                                          f->ns < MOST_SLOWER * s->best[0].ns && n < N_REFINED;
       f++) {
    const ps__layout *l = &s->family.size[f->member.size].layout;
    uint32_t like = 0;
    tokens[n] = l->chunk_tokens * l->chunks_per_round;
    for (uint32_t i = 0; i < n; i++)
      like += tokens[i] == tokens[n];
    if (like < A_ROUND)
      out[n++] = f;
  }
  return n;
}

ps_status ps__refine(ps__search_state *s) {
  branch b[N_REFINED] = {0};
  const ps__fastest *from[N_REFINED];
  ps_status st = PS_OK;
  qsort(s->fastest, sizeof s->fastest / sizeof *s->fastest, sizeof *s->fastest, by_ns);
  uint32_t n = 0;
  for (const uint32_t most = starts(s, from); n < most; n++) {
    b[n].s = ps__malloc(sizeof *s);
    if (!b[n].s) {
      st = ps__fail(PS_ENOMEM, "out of memory for the search");
      break;
    }
    *b[n].s = *s; /* the family is shared and not written to */
    b[n].at.at = *from[n];
    b[n].s->out = &b[n].out;
    b[n].s->n_ops = 0;
  }
  if (st == PS_OK)
    st = refine_all(s, b, n);
  for (uint32_t i = 0; i < n; i++)
    ps__free(b[i].s);
  return st;
}
