/* staging.c - searches under a cap of pinned memory: what need not be pinned, from the cheapest on.
 *
 * What no link touches is never pinned then (ps__step.pageable_bytes). Candidates do not choose
 * what is staged: one search has no staging, the next one that of all totals, the next ones that of
 * more and more weights, too. */
#include "plan/plan_impl.h"

static bool is_faster(const ps__search_result *a, const ps__search_result *b) {
  return a->step_ns > 0 && (b->step_ns == 0 || a->step_ns < b->step_ns);
}

/* How long a step would take if all could be pinned. */
static ps_status find_all_pinned(ps_plan *p, const ps__memos *memos, uint32_t layout, double *ns) {
  ps__search_result r;
  ps__free_found(ps__take_found(p));
  p->staging = PS__STAGE_NONE;
  p->cfg.layout = layout;
  p->all_pinned = true;
  const ps_status st = ps__find_in_layouts(p, memos, 0, &r);
  p->all_pinned = false;
  if (st == PS_OK)
    *ns = r.step_ns;
  return st;
}

/* Once there is a plan, staging more is worth while as long as that is faster: what need not be
 * pinned leaves room for saved activations. */
ps_status ps__find_staged(ps_plan *p, const ps__memos *memos, ps__search_result *out) {
  const uint32_t given = p->cfg.layout;
  uint32_t layout = given, n_candidates = 0, n_feasible = 0;
  uint8_t staging = PS__STAGE_NONE;
  ps__found best = {0};
  ps_status st = PS_OK;
  *out = (ps__search_result){0};
  for (uint8_t next = PS__STAGE_NONE; st == PS_OK && next <= ps__most_staging(p); next++) {
    ps__search_result r;
    if (next == PS__STAGE_TOTALS && p->model->n_trained == 0)
      continue;
    p->staging = next;
    p->cfg.layout = given;
    st = ps__find_in_layouts(p, memos, out->step_ns, &r);
    n_candidates += r.n_candidates;
    n_feasible += r.n_feasible;
    if (st == PS_OK && !is_faster(&r, out) && out->step_ns > 0)
      break;
    if (st != PS_OK || r.step_ns == 0)
      continue;
    ps__free_found(best);
    best = ps__take_found(p);
    *out = r;
    layout = p->cfg.layout;
    staging = next;
  }
  if (st == PS_OK && out->step_ns > 0 && p->cfg.pinned_mem_bytes)
    st = find_all_pinned(p, memos, given, &out->all_pinned_ns);
  ps__keep_found(p, best);
  p->cfg.layout = layout;
  p->staging = staging;
  out->n_candidates = n_candidates;
  out->n_feasible = n_feasible;
  return st;
}
