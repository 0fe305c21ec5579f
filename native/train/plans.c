/* plans.c - the plan that a trainer has: its hooks call the trainer. */
#include "train/trainer.h"

void ps__trainer_join_plan(ps_trainer *t) {
  ps_plan *p = t->plan;
  p->hooks = (ps__step_hooks){t, ps__trainer_hook};
  if (p->guests.val)
    p->guests.val->guest.hooks = (ps__step_hooks){t, ps__validation_hook};
}

void ps__trainer_leave_plan(ps_trainer *t) {
  ps_plan *p = t->plan;
  p->hooks = (ps__step_hooks){0};
  if (p->guests.val)
    p->guests.val->guest.hooks = (ps__step_hooks){0};
  atomic_store(&p->in_use, 0);
  if (t->owns_plan)
    (void)ps_plan_destroy(p);
}
