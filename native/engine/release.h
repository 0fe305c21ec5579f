/* release.h - how device ops come to their end after a run has stopped.
 *
 * Device ops are submitted ahead. When an op fails or a run is cancelled, some of them still wait
 * for host ops that will not run. They must be let go, but not all at once: an order between two
 * device ops may hold only by way of a host op, because a schedule has no wait that others imply
 * (schedule.c). Let go at once, a copy to the host could read device memory that a later op has
 * overwritten.
 *
 * So each host op that did not run is let go in program order, after the device ops that it awaits
 * have ended. This keeps every order of the schedule. It comes to an end: the device ops that a
 * host op awaits are earlier in program order, and so are the host ops that those await. */
#ifndef PS_ENGINE_RELEASE_H
#define PS_ENGINE_RELEASE_H
#include "engine/schedule.h"

typedef struct ps__release {
  const ps_schedule *schedule;
  void *user;
  bool (*on_host)(void *user, uint32_t stream);
  /* The value that a host stream's counter has reached. */
  uint64_t (*reached)(void *user, uint32_t stream);
  /* Whether a device op after the one with this number (backend.h, begin()) was begun. Blocks until
   * that is known. */
  bool (*needed)(void *user, uint64_t number);
  /* Blocks until a device stream's counter is at least @value. False: it never will be, because
   * that op was not submitted, or the device failed. */
  bool (*await)(void *user, uint32_t stream, uint64_t value);
  /* A host stream's counter, as device streams see it, becomes @value. */
  void (*let_go)(void *user, uint32_t stream, uint64_t value);
} ps__release;

/* ps__release_in_order() - let go what device ops that were begun wait for. To be called when no
 * host stream runs ops any more. */
void ps__release_in_order(const ps__release *r);

#endif
