/* border.c - the step before which a trainer switches to another plan. */
#include "train/trainer.h"

/* Steps that callers submit ahead, at most, where tasks are to switch at the same step. */
enum { AHEAD = 3 };

uint64_t ps__border_at(const ps_trainer *t) {
  const uint64_t next = atomic_load(&t->border.next);
  return next ? next - 1 : UINT64_MAX;
}

void ps__border_set(ps_trainer *t, uint64_t step) { atomic_store(&t->border.next, step + 1); }

/* All tasks hear the same in the same step, and agree on the same border. */
void ps__border_said(ps_trainer *t, uint64_t step, const uint64_t *said, uint32_t n) {
  ps__border *b = &t->border;
  bool found = false, search_runs = false;
  for (uint32_t i = 0; i < n; i++) {
    found |= said[i] == PS__REPLAN_FOUND;
    search_runs |= said[i] == PS__REPLAN_SEARCHES;
  }
  if (!found || search_runs || step < atomic_load(&b->agreed))
    return;
  atomic_store(&b->agreed, step + 1 + AHEAD);
  if (atomic_load(&b->state) == PS__REPLAN_FOUND)
    ps__border_set(t, step + 1 + AHEAD);
}
