/* beside.c - the memory of what runs in the place of the plan's step: the steps of a batch ramp,
 * and a validation. The search first leaves them out, so that a plan is the same with and without
 * them. Where that plan does not hold them, a second search counts them. */
#include "plan/plan_impl.h"
#include <string.h>

/* What is beside the plan's step, and what to do where it needs too much. */
typedef struct guests {
  const char *what, *less;
} guests;

static guests guests_of(const ps_plan *p) {
  static const char validation[] = "lower --val-tokens, or leave validation out (--val none)",
                    both[] = "give the ramp fewer stages, or leave validation out (--val none)";
  const bool ramp = p->cfg.n_ramp, val = p->cfg.val_tokens;
  if (ramp && val)
    return (guests){"the batch ramp and validation", both};
  return ramp ? (guests){"the batch ramp", "give the ramp fewer stages"}
              : (guests){"validation", validation};
}

ps_status ps__plan_beside_check(const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  const ps__caps caps = ps__plan_caps(p);
  const uint64_t given = caps.given[PS__DEVICE_MEM], device = caps.holds[PS__DEVICE_MEM],
                 host = caps.holds[PS__HOST_MEM];
  const guests g = guests_of(p);
  char need[32], cap[32];
  if (!ps__plan_has_guests(p))
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

/* A copy of the plan whose decisions these are. It borrows all but ramp and validation. */
ps_status ps__plan_beside_bytes(const ps_plan *p, const ps__layout *layout, const ps__spec *spec,
                                const ps__step *step, uint64_t bytes[PS__N_MEMS], uint64_t *n_ops) {
  ps_plan *t = ps__malloc(sizeof *t);
  if (!t)
    return ps__fail(PS_ENOMEM, "out of memory for the size of a plan");
  memcpy(t, p, sizeof *t);
  t->layout = *layout;
  t->spec = *spec;
  t->step = *step;
  t->ramp = NULL;
  t->val = NULL;
  t->n_ramp = 0;
  ps_status st = ps__plan_ramp(t, false);
  if (st == PS_OK && t->cfg.val_tokens)
    st = ps__plan_validation(t, false);
  if (st == PS_OK) {
    ps__used_bytes(t, &t->step, t->step.space_bytes, bytes);
    *n_ops = t->val ? t->val->step.n_op : 0;
    for (uint32_t i = 0; i < t->n_ramp; i++)
      *n_ops += t->ramp[i].step.n_op;
  }
  ps__plan_ramp_free(t);
  (void)ps_plan_destroy(t->val);
  ps__free(t);
  return st;
}
