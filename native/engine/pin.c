/* pin.c - pinning that was refused. */
#include "engine/pin.h"
#include "core/core.h"
#include <penstock/engine.h>
#include <stdatomic.h>
#include <sys/resource.h>

static _Thread_local uint64_t at_most;
static _Atomic uint64_t limit;

void ps__pin_begin(void) { at_most = 0; }
uint64_t ps_pinned_at_most(void) { return at_most; }
void ps__pin_limit(uint64_t bytes) { atomic_store(&limit, bytes); }

uint64_t ps__pin_limited(uint64_t bytes) {
  const uint64_t most = atomic_load(&limit);
  return most && bytes > most ? most : 0;
}

ps_status ps__pin_refuse(uint32_t space, uint64_t want, uint64_t done, const char *why) {
  char all[32], have[32], locked[32] = "unlimited";
  struct rlimit rl;
  if (getrlimit(RLIMIT_MEMLOCK, &rl) == 0 && rl.rlim_cur != RLIM_INFINITY)
    ps__format_bytes(locked, rl.rlim_cur);
  at_most = done;
  return ps__fail(PS_EDEVICE,
                  "space %u: pinning stopped at %s of %s of host memory (%s; locked memory is "
                  "limited to %s): raise the limit (ulimit -l, the container's memlock, or its "
                  "memory), or state by %s what can be pinned",
                  space, ps__format_bytes(have, done), ps__format_bytes(all, want), why, locked,
                  ps__field("pinned_mem_bytes"));
}
