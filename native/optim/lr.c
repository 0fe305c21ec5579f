/* lr.c - learning-rate schedules, pure functions of the step. With s the 0-based step, W
 * warmup_steps, T total_steps:
 *   warmup    s < W: peak * (s+1) / (W+1), so that the first step learns and step W is the first
 *             at the peak
 *   constant  peak
 *   cosine    min + (peak-min) * (1 + cos(pi p)) / 2,  p = (s-W) / (T-W)
 *   linear    peak * (1-p) + min * p
 *   WSD       peak until step B = max(W, T-decay_steps), then linear with p = (s-B) / (T-B)
 * From step T on all but constant stay at min. */
#include "optim/optim.h"
#include <math.h>

static double progress(uint64_t step, uint64_t from, uint64_t to) {
  if (step >= to)
    return 1.0;
  return step <= from ? 0.0 : (double)(step - from) / (double)(to - from);
}

/* exact at both ends */
static double between(double peak, double min, double p) { return peak * (1.0 - p) + min * p; }

double ps__lr_at(const ps__lr_schedule *s, uint64_t step) {
  const uint64_t warmup = s->warmup_steps, total = s->total_steps;
  const double peak = s->peak_lr, min = s->min_lr;
  if (step < warmup)
    return peak * (double)(step + 1) / (double)(warmup + 1);
  switch (s->kind) {
  case PS_LR_COSINE:
    return min +
           (peak - min) * 0.5 * (1.0 + cos(3.14159265358979323846 * progress(step, warmup, total)));
  case PS_LR_LINEAR: return between(peak, min, progress(step, warmup, total));
  case PS_LR_WSD: {
    uint64_t begin = total > s->decay_steps ? total - s->decay_steps : 0;
    return between(peak, min, progress(step, begin > warmup ? begin : warmup, total));
  }
  default: return peak;
  }
}
