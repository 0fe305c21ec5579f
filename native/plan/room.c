/* room.c - the arenas of a plan that is made again: what of a candidate fits in them. */
#include "plan/plan_impl.h"

/* A candidate whose scratch does not fit takes so much more than there is. */
static const uint64_t NEVER = (uint64_t)1 << 44;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

void ps__room_used(const ps_plan *p, const ps__step *s, const uint64_t arena[PS_MAX_PLACES],
                   uint64_t bytes[PS__N_MEMS]) {
  const ps__room *r = &p->room;
  int64_t over[PS__N_MEMS] = {INT64_MIN, INT64_MIN}; /* all of the host's is pinned */
  for (uint32_t i = 0; i < s->at->n_places && i != s->at->disk; i++) {
    const uint32_t mem = ps__mem_of(s->at, i);
    over[mem] = larger(over[mem],
                       (int64_t)ps__arena_round(arena[i]) - (int64_t)ps__arena_round(r->bytes[i]));
  }
  const int64_t beside = (int64_t)(bytes[PS__HOST_MEM] - ps__arena_round(arena[s->at->host])),
                more = beside - (int64_t)r->beside;
  if (more > 0)
    over[PS__HOST_MEM] = larger(over[PS__HOST_MEM], more - (int64_t)r->spare);
  for (uint32_t i = 0; i < s->at->n_streams; i++)
    if (s->scratch_bytes[i] > r->scratch[i])
      over[PS__DEVICE_MEM] = larger(over[PS__DEVICE_MEM], (int64_t)NEVER);
  for (uint32_t i = 0; i <= PS__HOST_MEM; i++)
    bytes[i] = (uint64_t)((int64_t)r->used[i] + over[i]);
}
