/* beside.c - the memory of a plan's guests: the steps of a batch ramp, and a validation. The search
 * first leaves them out, so that a plan is the same with and without them. Where that plan does not
 * hold them, a second search counts them. */
#include "plan/plan_impl.h"

/* What the guests are, and what to do where they need too much. */
typedef struct named {
  const char *what;
  char less[160];
} named;

static named name_guests(const ps_plan *p) {
  const char *const stages = "give the ramp fewer stages";
  const bool ramp = p->cfg.n_ramp, val = p->cfg.val_tokens;
  named g = {.what = ramp && val ? "the batch ramp and validation"
                     : ramp      ? "the batch ramp"
                                 : "validation"};
  if (ramp && !val)
    snprintf(g.less, sizeof g.less, "%s", stages);
  else
    snprintf(g.less, sizeof g.less, "%s%s, or leave validation out (%s none)",
             ramp ? stages : "lower ", ramp ? "" : ps__field("val_tokens"),
             ps__field("val_dataset"));
  return g;
}

ps_status ps__plan_beside_check(const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  const ps__caps caps = ps__plan_caps(p);
  const uint64_t given = caps.given[PS__DEVICE_MEM], device = caps.holds[PS__DEVICE_MEM],
                 host = caps.holds[PS__HOST_MEM];
  const named g = name_guests(p);
  char need[32], cap[32];
  if (!ps__plan_has_guests(p))
    return PS_OK;
  if (device && r->device_used_bytes > device) {
    ps__format_bytes_apart(need, r->device_used_bytes, cap, device);
    return device == given
               ? ps__fail(PS_EBUDGET,
                          "with %s %s of device memory are needed, %s given: raise %s, "
                          "or %s",
                          g.what, need, cap, ps__field("device_mem_bytes"), g.less)
               : ps__fail(PS_EBUDGET,
                          "with %s %s of device memory are needed, this GPU has %s that nothing "
                          "else uses: end what else uses it, or %s",
                          g.what, need, cap, g.less);
  }
  char with[64];
  snprintf(with, sizeof with, "with %s ", g.what);
  PS_TRY(ps__pinned_check(p, with));
  if (host && r->host_used_bytes > host) {
    ps__format_bytes_apart(need, r->host_used_bytes, cap, host);
    return ps__fail(PS_EBUDGET, "with %s %s of host memory are needed, %s given: raise %s, or %s",
                    g.what, need, cap, ps__field("host_mem_bytes"), g.less);
  }
  return PS_OK;
}

ps_status ps__plan_guests(const ps__over *o, ps__guests *out) {
  PS_TRY(ps__plan_ramp(o, out));
  return o->plan->cfg.val_tokens ? ps__plan_validation(o, out) : PS_OK;
}

ps_status ps__plan_beside_bytes(const ps__over *o, uint64_t bytes[PS__N_MEMS], uint64_t *n_ops) {
  ps__step wide = *o->step; /* borrows all but its sizes */
  ps__over over = *o;
  ps__guests guests = {0};
  over.step = &wide;
  const ps_status st = ps__plan_guests(&over, &guests);
  if (st == PS_OK) {
    ps__used_bytes(o->plan, &wide, &guests, wide.space_bytes, bytes);
    *n_ops = ps__guests_ops(&guests);
  }
  ps__guests_free(&guests);
  return st;
}
