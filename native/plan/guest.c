/* guest.c - builds a guest over the step of a training. */
#include "plan/guest.h"
#include "plan/plan_impl.h"

ps_status ps__guest_place(ps__guest *g, const ps_model *m, const ps__spec *spec,
                          ps__step_hooks *hooks, const ps__step *training) {
  PS_TRY(ps__step_emit(&g->step, m, &g->layout, spec, hooks));
  return ps__step_map_over(&g->step, training);
}

ps_status ps__guest_compile(ps__guest *g) {
  ps_program *program = NULL;
  ps_status st = ps__step_program(&g->step, &program);
  if (st == PS_OK)
    st = ps_schedule_compile(&g->schedule, program);
  ps_program_destroy(program);
  return st;
}

ps_status ps__guest_predict(ps__guest *g, const ps_hardware *hw) {
  const ps__step *s = &g->step;
  double step_ns;
  ps__cost_model m =
      ps__cost_model_of(hw, s->model->fp8.on, s->at, hw->n_threads, s->spec->sum_threads);
  PS_TRY(ps__step_predict(s, g->schedule, &m, NULL, &step_ns));
  g->step_s = step_ns * 1e-9;
  return PS_OK;
}

void ps__guest_free(ps__guest *g) {
  (void)ps_schedule_destroy(g->schedule);
  g->schedule = NULL;
  ps__step_free(&g->step);
  ps__spec_free(&g->spec);
  ps__layout_free(&g->layout);
}

ps__guest *ps__guest_at(const ps__guests *all, uint32_t i) {
  if (i < all->n_ramp)
    return &all->ramp[i].guest;
  return i == all->n_ramp && all->val ? &all->val->guest : NULL;
}

uint64_t ps__guests_ops(const ps__guests *all) {
  uint64_t n = 0;
  const ps__guest *g;
  for (uint32_t i = 0; (g = ps__guest_at(all, i)); i++)
    n += g->step.n_op;
  return n;
}

void ps__guests_free(ps__guests *all) {
  ps__guest *g;
  for (uint32_t i = 0; (g = ps__guest_at(all, i)); i++)
    ps__guest_free(g);
  if (all->val)
    ps_model_destroy(all->val->model);
  ps__free(all->val);
  ps__free(all->ramp);
  *all = (ps__guests){0};
}
