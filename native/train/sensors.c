/* sensors.c - what the sensors of the plan's GPUs say of a step. */
#include "train/trainer.h"
#include <math.h>

/* What two GPUs say as what one says; 0 where that of either is unknown. */
static double known(double a, double b, double both) { return a > 0 && b > 0 ? both : 0; }

/* The plan's GPUs as one. */
static bool read_all(const ps_plan *p, ps_gpu_state *all) {
  for (uint32_t i = 0; i < p->at->n_devices; i++) {
    ps_gpu_state one;
    if (ps_hardware_gpu_state(&one, p->hw.backend, p->hw.device + i) != PS_OK)
      return false;
    if (i == 0) {
      *all = one;
      continue;
    }
    all->clock_mhz = fmin(all->clock_mhz, one.clock_mhz);
    all->power_w = known(all->power_w, one.power_w, all->power_w + one.power_w);
    all->temperature_c =
        known(all->temperature_c, one.temperature_c, fmax(all->temperature_c, one.temperature_c));
    all->energy_j = known(all->energy_j, one.energy_j, all->energy_j + one.energy_j);
  }
  return true;
}

void ps__sensors_start(ps_trainer *t) {
  ps_gpu_state now;
  if (read_all(t->plan, &now))
    t->energy_j = now.energy_j;
  t->energy_ns = ps__now_ns();
}

/* The counters give the mean power since the step before was waited for. Where the caller waits
 * late for one step and soon after for the next, the second interval is too short for the counters,
 * and the power before holds. */
void ps__sensors_read(ps_trainer *t, ps_step_metrics *m) {
  ps_gpu_state now;
  if (!read_all(t->plan, &now))
    return;
  const uint64_t ns = ps__now_ns();
  const double seconds = (double)(ns - t->energy_ns) * 1e-9;
  if (!(now.energy_j > 0))
    t->mean_w = 0;
  else if (t->energy_j > 0 && now.energy_j >= t->energy_j && seconds > m->step_s / 2)
    t->mean_w = (now.energy_j - t->energy_j) / seconds;
  t->energy_j = now.energy_j;
  t->energy_ns = ns;
  m->gpu_clock_mhz = now.clock_mhz;
  m->gpu_power_w = now.power_w;
  m->gpu_temperature_c = now.temperature_c;
  m->gpu_energy_j = t->mean_w * m->step_s;
  if (now.clock_mhz > 0 || now.power_w > 0 || now.temperature_c > 0 || m->gpu_energy_j > 0)
    m->n_gpus_read = t->plan->at->n_devices;
}
