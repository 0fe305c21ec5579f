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
