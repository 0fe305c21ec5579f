/* routing.h - how a step's tokens were spread over experts: what metrics say, and warnings. */
#ifndef PS_TRAIN_ROUTING_H
#define PS_TRAIN_ROUTING_H
#include "train/trainer.h"

/* ps__routing_create() - room for what follows from step to step, in t->unused; none in a model
 * without experts. Errors: PS_ENOMEM. Freed by ps__free(). */
ps_status ps__routing_create(ps_trainer *t);
/* ps__routing_report() - from the step's counters of all devices to its record. */
void ps__routing_report(ps_trainer *t, const uint64_t *counter, ps__step_record *r);
/* ps__routing_say() - warns of an expert without tokens, and of one with more than half of them:
 * once, and again when it is twice as bad. */
void ps__routing_say(ps_trainer *t, const ps__step_record *r);

#endif
