/* pin.h - pinning that was refused: how much could be pinned. */
#ifndef PS_ENGINE_PIN_H
#define PS_ENGINE_PIN_H
#include <penstock/status.h>
#include <stdint.h>

/* ps__pin_begin() - forgets what was refused before on this thread.
 * ps__pin_refuse() - PS_EDEVICE: of @want BYTES of space @space, @done could be pinned, which
 * ps_pinned_at_most() then tells. @why: in the driver's words.
 * ps__pin_limit() - for tests: from now on engines can pin so many BYTES of a space; 0: all.
 * ps__pin_limited() - whether this limit refuses to pin @bytes. */
void ps__pin_begin(void);
ps_status ps__pin_refuse(uint32_t space, uint64_t want, uint64_t done, const char *why);
PS_API void ps__pin_limit(uint64_t bytes);
uint64_t ps__pin_limited(uint64_t bytes);

#endif
