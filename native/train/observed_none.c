/* observed_none.c - nothing is observed: what a build has without observed.c, whose functions come
 * first. */
#include "train/observed.h"

#define NONE __attribute__((weak))

NONE ps_status ps__observer_create(ps__observer **out, const ps_trainer *t) {
  (void)t;
  *out = NULL;
  return PS_OK;
}
NONE void ps__observer_destroy(ps__observer *o) { (void)o; }
NONE bool ps__observed_notice(const ps_trainer *t, ps__notice *out) {
  (void)t;
  (void)out;
  return false;
}
NONE ps_status ps__observed_hardware(const ps_trainer *t, ps_hardware *out) {
  (void)t;
  (void)out;
  return ps__fail(PS_ESTATE, "no marks were read yet");
}
