/* refine.c - from the fastest members of a large family on: what lies between the members. */
#include "look.h"
#include <stdlib.h>
#include <string.h>

/* Ops emitted and simulated at most, over all starts. */
static const uint64_t REFINE_OPS = 7000000;
enum { N_REFINED = 6, N_FINISHED = 2 }; /* starts that share the first half of them, with fewer rounds a step; the best of them, the second, with all. Side by side where there are CPUs */

/* What refining changes, a part at a time: see ps__member. The share on the device follows: it takes what the cap leaves. */
enum { MOVE_HOST, MOVE_PARAMS, MOVE_GRADS, MOVE_EXTRA, MOVE_STREAMED, MOVE_SUMS, MOVE_HEAD, MOVE_AHEAD, N_MOVES };

static bool moved(const ps__search_state *s, ps__member *m, int what, int by) {
  const bool cuda = s->plan->hw.backend == PS_BACKEND_CUDA; /* elsewhere the "device" has no processor of its own */
  const int layers = s->plan->model.n_layers < 255 ? (int)s->plan->model.n_layers : 255;
  const bool extras = s->family.size[m->size].layout.first_round_chunks > s->family.size[m->size].layout.chunks_per_round;
  uint8_t *const field[N_MOVES] = {&m->host, &m->keep.params, &m->keep.grads, &m->extra, &m->streamed, &m->sums, &m->keep.head, &m->ahead};
  const int most[N_MOVES] = {PS__SHARES, PS__UNIT_PARTS, PS__UNIT_PARTS, extras ? PS__SHARES : 0, cuda ? layers : 0, layers, 1, PS__N_AHEADS - 1};
  const int to = *field[what] + by;
  if (m->keep.state && what != MOVE_HOST && what != MOVE_AHEAD) return false;
  if (to < 0 || to > most[what]) return false;
  *field[what] = (uint8_t)to;
  return true;
}

/* Gives @m the largest share on the device that fits, as far as a few looks tell, beginning from one that should where a step like it took @taken bytes. */
static ps_status fill_device(ps__search_state *s, ps__member *m, uint64_t taken, double *out_ns, uint64_t *out_taken) {
  const double part = ps__family_share_bytes(&s->family, m);
  const uint64_t cap = s->device_cap;
  int room = cap == UINT64_MAX ? PS__SHARES : (int)(((double)cap - (double)taken) / part), share = m->device + room;
  *out_ns = 0;
  for (int tries = 0; tries < 4; tries++, share--) {
    ps__look z;
    if (share > PS__SHARES - m->host) share = PS__SHARES - m->host;
    if (share < 0) return PS_OK;
    m->device = (uint8_t)share;
    PS_TRY(ps__look_emit(s, m, &z));
    const ps_status st = ps__look_time(s, m, &z, out_ns);
    *out_taken = z.bytes[PS__SPACE_DEVICE];
    const bool host = z.bytes[PS__SPACE_HOST] <= s->host_cap;
    ps__look_free(&z);
    if (st != PS_OK || *out_ns > 0 || !host) return st;
  }
  return PS_OK;
}

/* Where a size's refinement is: its best plan so far, the device memory that takes, and the next move to try: by step[@level], @failed of them in a row led nowhere. */
typedef struct walk { ps__fastest at; uint64_t taken; uint32_t level, move, failed; bool begun; } walk;

static const int step[] = {6, 2, 1};
enum { N_LEVELS = 3 };

/* On from there, to the next better plan near it, as long as there is one and @max_ops are not used up: each decision by larger and then smaller steps, up and down, and further
 * the same way where that was better. */
static ps_status refine(ps__search_state *s, walk *w, uint64_t max_ops) {
  const uint64_t end = s->n_ops + max_ops;
  if (!w->begun) {
    w->begun = true;
    PS_TRY(fill_device(s, &w->at.member, s->device_cap, &w->at.ns, &w->taken)); /* as it is or, with all its rounds, a little less where that is too much */
    if (w->taken == 0) w->level = N_LEVELS;
  }
  while (w->level < N_LEVELS && s->n_ops < end) {
    const int what = (int)w->move / 2, by = (w->move % 2 ? -1 : 1) * (what >= MOVE_HEAD ? 1 : step[w->level]);
    ps__member next = w->at.member;
    uint64_t now = 0;
    double ns = 0;
    if (!(what >= MOVE_HEAD && w->level > 0) && moved(s, &next, what, by)) {
      const double units = (next.keep.params + next.keep.grads - w->at.member.keep.params - w->at.member.keep.grads) * ps__family_unit_part_bytes(&s->family);
      PS_TRY(fill_device(s, &next, (uint64_t)((double)w->taken + units), &ns, &now));
    }
    if (ns > 0 && (w->at.ns == 0 || ns < w->at.ns)) {
      w->at = (ps__fastest){ns, next};
      w->taken = now;
      w->failed = 0;
      continue;
    }
    w->move = (w->move + 1) % (2 * N_MOVES);
    if (++w->failed < 2 * N_MOVES) continue;
    w->level++;
    w->failed = 0;
  }
  return PS_OK;
}

static int by_ns(const void *pa, const void *pb) {
  const ps__fastest *a = pa, *b = pb;
  if ((a->ns > 0) != (b->ns > 0)) return a->ns > 0 ? -1 : 1;
  if (a->ns != b->ns) return a->ns < b->ns ? -1 : 1;
  if (a->member.size != b->member.size) return a->member.size < b->member.size ? -1 : 1;
  return a->member.keep.params < b->member.keep.params ? -1 : a->member.keep.params > b->member.keep.params;
}

/* One size's refinement: a search of its own from there, so that sizes may be refined side by side and how many are at work changes nothing. */
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
  if (b->status != PS_OK) snprintf(b->why, sizeof b->why, "%s", ps_last_error());
}

static int by_branch(const void *pa, const void *pb) { return by_ns(&(*(branch *const *)pa)->at.at, &(*(branch *const *)pb)->at.at); }

/* Where a host stream falls behind a little in each round, a few rounds do not show it. */
static void with_all_rounds(branch *b) {
  b->s->whole = true;
  memset(b->s->best, 0, sizeof b->s->best);
  b->at.begun = false;
  b->at.level = b->at.failed = 0;
  b->max_ops = REFINE_OPS / 2 / N_FINISHED;
}

static ps_status refine_all(ps__search_state *s, branch *b, uint32_t n) {
  ps__pool *pool;
  branch *order[N_REFINED];
  const uint32_t n_cpus = ps__n_cpus(), few = n < N_FINISHED ? n : N_FINISHED;
  PS_TRY(ps__pool_create(&pool, n_cpus < n ? n_cpus : n, "search"));
  for (uint32_t i = 0; i < n; i++) {
    order[i] = &b[i];
    b[i].max_ops = REFINE_OPS / 2 / N_REFINED;
  }
  ps__pool_run(pool, n, refine_branch, order);
  qsort(order, n, sizeof *order, by_branch);
  for (uint32_t i = 0; i < few; i++) with_all_rounds(order[i]);
  ps__pool_run(pool, few, refine_branch, order);
  ps__pool_destroy(pool);
  bool held = false;
  for (uint32_t i = 0; i < n; i++) {
    if (b[i].status != PS_OK) return ps__fail(b[i].status, "%s", b[i].why);
    s->out->n_feasible += b[i].out.n_feasible;
    held |= b[i].s->whole && b[i].s->best[0].ns > 0;
  }
  if (held) memset(s->best, 0, sizeof s->best);
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t k = 0; b[i].s->whole == held && k < PS__N_BEST && b[i].s->best[k].ns > 0; k++)
      ps__note_best(s, b[i].s->best[k].ns, &b[i].s->best[k].member);
  return PS_OK;
}

/* From the fastest members on, as far as they are not slower by more than refining is likely to gain. */
ps_status ps__refine(ps__search_state *s) {
  branch b[N_REFINED] = {0};
  uint32_t n = 0;
  ps_status st = PS_OK;
  qsort(s->fastest, sizeof s->fastest / sizeof *s->fastest, sizeof *s->fastest, by_ns);
  for (; n < N_REFINED && s->fastest[n].ns > 0 && s->fastest[n].ns < 1.06 * s->best[0].ns; n++) {
    b[n].s = ps__malloc(sizeof *s);
    if (!b[n].s) {
      st = ps__fail(PS_ENOMEM, "out of memory for the search");
      break;
    }
    *b[n].s = *s; /* the family is shared and not written to */
    b[n].at.at = s->fastest[n];
    b[n].s->out = &b[n].out;
    b[n].s->n_ops = 0;
  }
  if (st == PS_OK) st = refine_all(s, b, n);
  for (uint32_t i = 0; i < n; i++) ps__free(b[i].s);
  return st;
}

