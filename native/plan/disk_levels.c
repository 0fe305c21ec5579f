/* disk_levels.c - searches with more and more optimizer state on a disk. */
#include "plan/plan_impl.h"

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
