/* pinned.c - a cap of pinned memory: what is staged under it, and what is said where it is too
 * low. */
#include "plan/candidates.h"

uint32_t ps__stages_weights(const ps_plan *p) {
  static const uint8_t parts[PS__STAGE_ALL + 1] = {[PS__STAGE_QUARTER] = PS__UNIT_PARTS / 4,
                                                   [PS__STAGE_HALF] = PS__UNIT_PARTS / 2,
                                                   [PS__STAGE_ALL] = PS__UNIT_PARTS};
  return parts[p->staging];
}

/* Generation copies weights from where they are. */
uint8_t ps__most_staging(const ps_plan *p) {
  return !p->cfg.pinned_mem_bytes  ? PS__STAGE_NONE
         : p->cfg.sample_sequences ? PS__STAGE_TOTALS
                                   : PS__STAGE_ALL;
}

ps_status ps__refuse_pinned(const ps_plan *p, const char *with, uint64_t bytes) {
  char need[32], cap[32];
  ps__format_bytes_apart(need, bytes, cap, p->cfg.pinned_mem_bytes);
  return ps__fail(PS_EBUDGET,
                  "%s%s of host memory must be pinned, %s can be: raise %s (ulimit -l, the "
                  "container's memlock, in WSL2 memory= in .wslconfig), or lower %s (the smallest "
                  "plan pins %llu bytes)",
                  with, need, cap, ps__field("pinned_mem_bytes"), ps__field("seq_len"),
                  (unsigned long long)bytes);
}

ps_status ps__pinned_check(const ps_plan *p, const char *with) {
  const ps_plan_report *r = &p->report;
  return r->pinned_bytes > r->pinned_mem_bytes ? ps__refuse_pinned(p, with, r->pinned_bytes)
                                               : PS_OK;
}
