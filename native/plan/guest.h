/* guest.h - a guest: a program that takes turns with the training on its engine, and in its memory.
 *
 * A guest runs while no step of training is in flight. Its step is mapped over the training's: what
 * outlives a step lies where the training has it, and all else past that. The trainer goes from one
 * to the other and moves nothing (engine/turn.h). */
#ifndef PS_PLAN_GUEST_H
#define PS_PLAN_GUEST_H
#include "step/step.h"
#include <penstock/hardware.h>

typedef struct ps__guest {
  ps__layout layout;
  ps__spec spec;         /* empty where it has the decisions of the training */
  ps__step_hooks hooks;  /* not used where it has those of the training */
  ps__step step;         /* mapped over the training's */
  ps_schedule *schedule; /* NULL: it tells its memory alone */
  double step_s;         /* predicted */
} ps__guest;

/* ps__guest_place() - emit the guest's step, whose layout is set, and map it over @training, which
 * is mapped. @spec and @hooks: its own or the training's, kept. Errors: PS_ENOMEM, PS_EINTERNAL;
 * the guest's step is left to ps__guest_free().
 * ps__guest_compile() - make its schedule. ps__guest_predict() - predict its time. Errors:
 * PS_ENOMEM, PS_EINVAL.
 * ps__guest_free() - all that it has; no run of it is left. It may be built again. */
ps_status ps__guest_place(ps__guest *g, const ps_model *m, const ps__spec *spec,
                          ps__step_hooks *hooks, const ps__step *training);
ps_status ps__guest_compile(ps__guest *g);
ps_status ps__guest_predict(ps__guest *g, const ps_hardware *hw);
void ps__guest_free(ps__guest *g);

/* A stage of a batch ramp: n_steps steps of n_sequences sequences a host, from first_step of the
 * training on. */
typedef struct ps__ramp {
  uint64_t n_steps, n_sequences, first_step, first_sequence;
  ps__guest guest;
} ps__ramp;

/* A validation is n_steps steps. The last step may have more sequences than are left of
 * n_sequences: the others do not count. */
typedef struct ps__val {
  ps_model *model; /* owned: forward alone, the cross-entropy alone */
  uint64_t n_steps, n_sequences;
  ps__guest guest;
} ps__val;

/* The guests that a plan has room for. Those whose build failed are half filled. */
typedef struct ps__guests {
  ps__ramp *ramp; /* [n_ramp] */
  uint32_t n_ramp;
  ps__val *val; /* NULL: none */
} ps__guests;
/* ps__guest_at() - the guest of number @i; NULL: there are no more.
 * ps__guests_ops() - ops of all their steps. */
ps__guest *ps__guest_at(const ps__guests *all, uint32_t i);
uint64_t ps__guests_ops(const ps__guests *all);
void ps__guests_free(ps__guests *all);
#endif
