/* beside.c - the memory of what runs in the place of the plan's step: the steps of a batch ramp,
 * and a validation. The search does not know of them, so the caps are checked once more. */
#include "plan/plan_impl.h"

/* What is beside the plan's step, and what to do where it needs too much. */
typedef struct guests {
  const char *what, *less;
} guests;

static guests guests_of(const ps_plan *p) {
  static const char validation[] = "lower --val-tokens, or leave validation out (--val none)",
                    both[] = "give the ramp fewer stages, or leave validation out (--val none)";
  if (p->n_ramp && p->val)
    return (guests){"the batch ramp and validation", both};
  return p->n_ramp ? (guests){"the batch ramp", "give the ramp fewer stages"}
                   : (guests){"validation", validation};
}

ps_status ps__plan_beside_check(const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  const uint64_t given = p->cfg.device_mem_bytes, device = ps__device_cap(&p->hw, given),
                 host = p->cfg.host_mem_bytes;
  const guests g = guests_of(p);
  char need[32], cap[32];
  if (!p->n_ramp && !p->val)
    return PS_OK;
  if (device && r->device_used_bytes > device) {
    ps__format_bytes_apart(need, r->device_used_bytes, cap, device);
    return device == given
               ? ps__fail(PS_EBUDGET,
                          "with %s %s of device memory are needed, %s given: raise --device-mem, "
                          "or %s",
                          g.what, need, cap, g.less)
               : ps__fail(PS_EBUDGET,
                          "with %s %s of device memory are needed, this GPU has %s that nothing "
                          "else uses: end what else uses it, or %s",
                          g.what, need, cap, g.less);
  }
  if (host && r->host_used_bytes > host) {
    ps__format_bytes_apart(need, r->host_used_bytes, cap, host);
    return ps__fail(PS_EBUDGET,
                    "with %s %s of host memory are needed, %s given: raise --host-mem, or %s",
                    g.what, need, cap, g.less);
  }
  return PS_OK;
}
