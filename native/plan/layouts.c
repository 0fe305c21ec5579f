/* layouts.c - searches of one layout, or of both: which way several devices share a step. */
#include "plan/plan_impl.h"

void ps__memos_destroy(ps__memos *m) {
  for (int i = 0; i < PS_N_LAYOUTS; i++)
    ps__memo_destroy(m->of[i]);
}

ps_status ps__memos_create(ps__memos *m) {
  ps_status st = PS_OK;
  *m = (ps__memos){0};
  for (int i = PS_LAYOUT_DATA_PARALLEL; i < PS_N_LAYOUTS && st == PS_OK; i++)
    st = ps__memo_create(&m->of[i]);
  if (st != PS_OK)
    ps__memos_destroy(m);
  return st;
}

ps__found ps__take_found(ps_plan *p) {
  const ps__found f = {p->layout, p->spec};
  p->layout = (ps__layout){0};
  p->spec = (ps__spec){0};
  return f;
}

void ps__free_found(ps__found f) {
  ps__spec_free(&f.spec);
  ps__layout_free(&f.layout);
}

void ps__keep_found(ps_plan *p, ps__found f) {
  ps__free_found(ps__take_found(p));
  p->layout = f.layout;
  p->spec = f.spec;
}

ps_status ps__find_in_layouts(ps_plan *p, const ps__memos *m, double below_ns,
                              ps__search_result *r) {
  if (p->cfg.layout != PS_LAYOUT_AUTO)
    return ps__find_plan(p, m->of[p->cfg.layout], below_ns, r);
  ps__search_result ring;
  p->cfg.layout = PS_LAYOUT_DATA_PARALLEL;
  PS_TRY(ps__find_plan(p, m->of[PS_LAYOUT_DATA_PARALLEL], below_ns, r));
  const ps__found whole = ps__take_found(p);
  p->cfg.layout = PS_LAYOUT_RING;
  const double most_ns = r->step_ns > 0 ? r->step_ns : below_ns;
  const ps_status st = ps__find_plan(p, m->of[PS_LAYOUT_RING], most_ns, &ring);
  const bool faster =
      st == PS_OK && ring.step_ns > 0 && (r->step_ns == 0 || ring.step_ns < r->step_ns);
  ring.n_candidates += r->n_candidates;
  ring.n_feasible += r->n_feasible;
  if (faster) {
    ps__free_found(whole);
    *r = ring;
    return PS_OK;
  }
  ps__keep_found(p, whole);
  p->cfg.layout = PS_LAYOUT_DATA_PARALLEL;
  r->n_candidates = ring.n_candidates;
  r->n_feasible = ring.n_feasible;
  return st;
}

/* Where a plan with more state on the disk gains less, it has less there: a drive wears. */
static const double DISK_LEAST_GAIN = 0.005;
/* So many levels without gain end the search: more on the disk takes longer, and frees memory that
 * the last ones had no use for. */
enum { DISK_TRIES = 2 };

ps_status ps__find_with_disk(ps_plan *p, const ps__memos *m, ps__search_result *r) {
  const uint32_t given = p->cfg.layout;
  ps__search_result best = {0};
  ps__found of_best = {0};
  uint8_t staging = PS__STAGE_NONE;
  uint32_t level = 0, layout = given, first = 0, n_worse = 0, n_candidates = 0, n_feasible = 0;
  ps_status st = PS_OK;
  if (!p->cfg.disk_mem_bytes)
    return ps__find_staged(p, m, r);
  for (uint32_t l = 0; st == PS_OK && l <= PS__DISK_LEVELS && n_worse < DISK_TRIES; l++) {
    ps__disk_level_set(p, l);
    if (p->disk_first == first)
      continue; /* the same as before */
    first = p->disk_first;
    p->cfg.layout = given;
    st = ps__find_staged(p, m, r);
    const bool faster = st == PS_OK && r->step_ns > 0 &&
                        (best.step_ns == 0 || r->step_ns < (1 - DISK_LEAST_GAIN) * best.step_ns);
    n_candidates += st == PS_OK ? r->n_candidates : 0;
    n_feasible += st == PS_OK ? r->n_feasible : 0;
    n_worse += best.step_ns > 0 && !faster;
    ps__free_found(faster ? of_best : ps__take_found(p));
    if (!faster)
      continue;
    best = *r;
    of_best = ps__take_found(p);
    level = l;
    staging = p->staging;
    layout = p->cfg.layout;
  }
  ps__keep_found(p, of_best);
  p->cfg.layout = best.step_ns > 0 ? layout : given;
  p->staging = staging;
  ps__disk_level_set(p, best.step_ns > 0 ? level : PS__DISK_LEVELS);
  best.n_candidates = n_candidates;
  best.n_feasible = n_feasible;
  *r = best;
  return st;
}

ps_status ps__find_smallest_in_layouts(ps_plan *p, const ps__memos *m, ps__search_result *r) {
  const uint32_t given = p->cfg.layout;
  p->staging = ps__most_staging(p);
  if (given != PS_LAYOUT_AUTO)
    return ps__find_smallest(p, m->of[given], r);
  ps__search_result ring;
  p->cfg.layout = PS_LAYOUT_RING;
  PS_TRY(ps__find_smallest(p, m->of[PS_LAYOUT_RING], &ring));
  const ps__found of_ring = ps__take_found(p);
  p->cfg.layout = PS_LAYOUT_DATA_PARALLEL;
  const ps_status st = ps__find_smallest(p, m->of[PS_LAYOUT_DATA_PARALLEL], r);
  const bool takes_ring =
      st == PS_OK && ring.step_ns > 0 && (r->step_ns == 0 || ring.step_ns < r->step_ns);
  for (uint32_t i = 0; st == PS_OK && i < PS__N_MEMS; i++)
    if (ring.smallest[i] && (r->smallest[i] == 0 || ring.smallest[i] < r->smallest[i]))
      r->smallest[i] = ring.smallest[i];
  r->n_candidates += ring.n_candidates;
  r->n_feasible += ring.n_feasible;
  if (takes_ring) {
    r->step_ns = ring.step_ns;
    p->cfg.layout = PS_LAYOUT_RING;
    ps__keep_found(p, of_ring);
  } else {
    ps__free_found(of_ring);
    p->cfg.layout = r->step_ns > 0 ? PS_LAYOUT_DATA_PARALLEL : given;
  }
  return st;
}
